"""The contents of a buffer inside of wrappers, for code that adds to or reads any buffer."""

from typing import Any

from jaxbuf.buffers.created import Created
from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.core import checks
from jaxbuf.wrappers.hosted import Hosted
from jaxbuf.wrappers.sharded.sharded import Sharded


def inside(buffer: Any) -> tuple[Any, int]:
    """Returns the buffer inside of wrappers, and the number of shards in its leaves' first axis.

    Returns:
        The buffer that a ``Hosted`` or ``Sharded`` holds, or ``buffer`` itself; and the number of
        shards, or 0 if its leaves have no axis of shards.
    """
    if isinstance(buffer, Hosted):
        return inside(buffer.buffer)
    if isinstance(buffer, Sharded):
        return buffer.shards, buffer.num_shards
    return buffer, 0


def num_rings(buffer: Any) -> int:
    """Returns the number of environments whose steps ``add`` takes; 0 if it takes items."""
    one, shards = inside(buffer)
    return max(shards, 1) * one.num_envs if isinstance(one, TrajectoryBuffer) else 0


def num_blocks(buffer: Any) -> int:
    """Returns a number of which the number of items in an ``add`` must be a multiple."""
    return max(inside(buffer)[1], 1)


def item_of(buffer: Any) -> Any:
    """Returns the shapes and dtypes of an item, or of one step of one environment.

    Raises:
        ValueError: If the buffer does not keep items of one kind.
    """
    one, _ = inside(buffer)
    if not isinstance(one, Created):
        raise ValueError(
            f"buffer is {checks.kind_of(buffer)}, which keeps no items of its own; pass one of its "
            "parts, or another buffer"
        )
    return one.example
