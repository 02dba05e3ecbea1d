"""Agents that learn with jaxbuf: ``python -m jaxbuf.examples.NAME``, each with ``--help``."""
