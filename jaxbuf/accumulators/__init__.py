"""Accumulators, which assemble whole items row by row."""
