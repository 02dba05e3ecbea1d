"""A part that lets items be removed by name."""

import dataclasses

from jaxbuf.strategies.part import Part


@dataclasses.dataclass(frozen=True)
class Removable(Part):
    """Lets ``buffer.remove`` take out single items, or windows, of a buffer.

    The buffer then keeps a bit for each slot, which tells whether its item is still there. With
    ``Oldest``, the slot of a removed item is filled again in the usual order; with ``Lowest``,
    removed items are overwritten first. From a ``TrajectoryBuffer`` windows are removed, and their
    steps stay. The number of removed items is counted as ``metrics()["removed"]``.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, parts=(jaxbuf.Removable(),))
        >>> buffer, slots = buffer.insert(jnp.arange(5))
        >>> buffer = buffer.remove(slots, mask=jnp.array([True, False, False, True, False]))
        >>> buffer.latest(3).data.tolist(), int(buffer.metrics()["removed"])
        ([1, 2, 4], 2)
    """

    reasons = ("removed",)
    removes = True
    of_windows = True
    of_shards = True
