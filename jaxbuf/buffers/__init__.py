"""The buffers: pytrees composed of the core and the strategies."""
