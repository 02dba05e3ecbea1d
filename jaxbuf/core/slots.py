"""Names of items: the index of a slot and its generation.

A slot gets a new generation each time it is written. A name kept from an earlier sample therefore
tells whether its item is still there.
"""

from flax import struct

from jaxbuf.core.types import Index, Words


class Slots(struct.PyTreeNode):
    """Names of sampled items.

    Attributes:
        index: Slot of the item, ``[B]`` int32; the capacity for a row without an item.
        generation: Tells apart the items that the slot has held over time, ``[B]`` uint32. It is
            opaque: compare it, do not compute with it.
    """

    index: Index
    generation: Words
