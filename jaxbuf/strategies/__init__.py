"""Samplers, evictors and filters, and the base classes to derive your own from."""

from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.occupancy.protocol import ItemOccupancy, Occupancy
from jaxbuf.occupancy.ring import Ring
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.part import Part, Rows, StepRows
from jaxbuf.strategies.protocols import (
    Draw,
    Evictor,
    KnownSampler,
    Sampler,
    ShardableSampler,
    Support,
    Targets,
)

__all__ = [
    "Draw",
    "Evictor",
    "ItemOccupancy",
    "KnownSampler",
    "Moves",
    "Occupancy",
    "Part",
    "Ring",
    "Rows",
    "Sampler",
    "SegmentTree",
    "ShardableSampler",
    "StepRows",
    "Support",
    "Targets",
]
