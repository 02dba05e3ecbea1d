"""Which slots hold an item, and which item: indices and generations.

A slot is named by its index and its generation, which is another one each time the slot is written.
A name kept from an earlier sample therefore tells whether the item it meant is still there.
"""

from flax import struct
from jaxtyping import Array, Int, UInt


class Slots(struct.PyTreeNode):
    """Names of sampled items.

    Attributes:
        index: Where the item lies, ``[B]`` int32; the capacity where there is none.
        generation: Which item of those that the slot has held, ``[B]`` uint32. Opaque: compare it,
            do not compute with it.
    """

    index: Int[Array, " B"]
    generation: UInt[Array, " B"]
