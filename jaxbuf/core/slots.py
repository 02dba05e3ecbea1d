"""Which slots hold an item, and which item: indices and generations.

A slot is named by its index and its generation, which is another one each time the slot is written.
A name kept from an earlier sample therefore tells whether the item it meant is still there.
"""

from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Int, UInt


class Slots(struct.PyTreeNode):
    """Names of sampled items.

    Attributes:
        index: Where the item lies, ``[B]`` int32; the capacity where there is none.
        generation: Which item of those that the slot has held, ``[B]`` uint32. Opaque: compare it,
            do not compute with it.
    """

    index: Int[Array, " B"]
    generation: UInt[Array, " B"]


def same_item(slots: Slots, occupancy: Any) -> Bool[Array, " B"]:
    """Whether an item is live and of the generation that its name says."""
    live = occupancy.live(slots.index)
    return live & (occupancy.generation(slots.index) == slots.generation)
