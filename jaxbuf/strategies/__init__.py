"""Frozen choices: how to sample, what to evict. They know the core only."""
