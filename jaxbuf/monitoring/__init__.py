"""Observation of a run: statistics, logs, plots and the memory that buffers take."""
