"""Statistics, logs, plots and memory: what a run does while it runs."""
