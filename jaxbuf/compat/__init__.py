"""The place that ``jaxbuf.interop.flashbax`` had in version 0.1."""
