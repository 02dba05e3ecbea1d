"""Frozen choices: how to sample, what to evict; and the classes that your own ones derive from."""

from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.protocols import Draw, Evictor, KnownSampler, Sampler, Support

__all__ = [
    "Draw",
    "Evictor",
    "KnownSampler",
    "Occupancy",
    "Sampler",
    "SegmentTree",
    "Support",
]
