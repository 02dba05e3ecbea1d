"""Peers that need an environment of their own, each a program that serves one.

Such a module may import only what its environment has: the standard library, NumPy, the peer, and
modules of the benchmark that keep to the same. [`benchmarks.peer_process`][] starts it.
"""
