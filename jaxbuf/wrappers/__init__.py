"""Buffers that hold other buffers, and threads that share one."""
