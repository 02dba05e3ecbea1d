"""A first-in, first-out queue, whose items are taken once each."""

from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt

from jaxbuf.buffers.arguments import check_batch_size, check_num_rows, check_numbers
from jaxbuf.buffers.base import OwningBuffer
from jaxbuf.buffers.buffer import absent
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import counters, guesses, sizes, storage, trees
from jaxbuf.core.describe import Described
from jaxbuf.core.program import program
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Flag, Mask
from jaxbuf.occupancy.ring import QueueRing

# The names of the counters of a queue.
COUNTS = ("adds", "rejected", "taken")


class Queue(OwningBuffer, Described):
    """Up to ``capacity`` items, usually whole trajectories, each of which is consumed once.

    Unlike other buffers it evicts nothing: rows that do not fit are refused and counted. ``take``
    returns the oldest items and the queue without them. It is an immutable pytree, like the other
    buffers.

    Attributes:
        data: The items, leaves ``[capacity, ...]``.
        occupancy: Records which slots hold an item that has not been consumed.
        counters: The numbers of items added, rows rejected and items taken so far, in the order of
            ``COUNTS``, ``[3]`` uint32, which wrap.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> trajectory = {"obs": jnp.zeros((20, 3)), "reward": jnp.zeros(20)}
        >>> queue = jaxbuf.Queue.create(trajectory, capacity=4)
        >>> queue = queue.add({"obs": jnp.ones((3, 20, 3)), "reward": jnp.ones((3, 20))})
        >>> queue, batch = queue.take(2)
        >>> batch.data["obs"].shape, batch.valid.tolist(), int(queue.size)
        ((2, 20, 3), [True, True], 1)

    References:
        Cassirer et al., Reverb: A Framework for Experience Replay, 2021 (queues as tables).
    """

    data: Arrays
    occupancy: QueueRing  # pyright: ignore[reportIncompatibleVariableOverride]
    counters: UInt[Array, " 3"]

    is_queue = True
    extras = extra_states = ()

    @classmethod
    @guesses.answered
    def create(cls, example: PyTree, capacity: int) -> Self:
        """Creates an empty queue.

        The memory that is left is looked at outside of transformations only: under ``jax.vmap`` ask
        ``jax.eval_shape`` for the size of all members together.

        Args:
            example: One unbatched item of arrays or ``jax.ShapeDtypeStruct``. Only shapes and
                dtypes matter.
            capacity: The largest number of items in the queue.

        Raises:
            ValueError: If ``capacity`` is not an integer in ``[1, 2**30]``, or ``example`` holds
                anything but arrays or needs more memory than is available.
        """
        capacity = sizes.check_count("capacity", capacity)
        return cls(
            data=storage.allocate(example, (capacity,), ("capacity", capacity)),
            occupancy=QueueRing.create(capacity),
            counters=counters.tally(COUNTS, {}),
        )

    def can_add(self, batch_size: int | Count = 1) -> Flag:
        """Returns whether ``batch_size`` more items fit."""
        return self.capacity - self.size >= check_num_rows(batch_size)

    def can_sample(self, batch_size: int | Count = 1) -> Flag:
        """Returns whether the queue holds at least ``batch_size`` items."""
        return self.size >= check_num_rows(batch_size)

    def accepts(self, rows: int, mask: Mask | None = None) -> Mask:
        """Returns a mask of the rows that ``add`` would accept now: the first ones that fit.

        Args:
            rows: The number of rows to be added, ``B``; static.
            mask: A mask of the rows to be added, ``[B]``; None for all.

        Raises:
            ValueError: When traced, if ``rows`` is not an integer, or the mask does not consist of
                ``B`` bools.
        """
        rows = sizes.check_count("rows", rows, least=0)
        free = self.capacity - self.size
        if mask is None:
            return jnp.arange(rows, dtype=jnp.int32) < free
        offered = check_numbers(mask, "mask", (rows,), "(B,)")
        return offered & (jnp.cumsum(offered, dtype=jnp.int32) <= free)

    @program(stored=("items",), copies=True)
    def add(self, items: Arrays, *, mask: Mask | None = None) -> Self:
        """Appends a batch of items in order, as far as they fit; see ``accepts``.

        Args:
            items: The items, leaves ``[B, *shape]`` with the example's dtypes. Rows that do not fit
                are counted in ``metrics()["rejected"]``.
            mask: A mask of the rows to add, ``[B]``.

        Returns:
            The queue with the items.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example.
        """
        items, (rows,) = storage.check(self.data, items, "items", ("B",))
        offered = jnp.uint32(rows)
        if mask is not None:
            mask = check_numbers(mask, "mask", (rows,), "(B,)")
            offered = jnp.sum(mask, dtype=jnp.uint32)
        accepted = self.accepts(rows, mask)
        if rows == 0:
            return self
        occupancy, index = self.occupancy.place(rows, accepted, None)
        added = jnp.sum(accepted, dtype=jnp.uint32)
        return trees.updated(
            self,
            data=storage.write(self.data, items, index),
            occupancy=occupancy,
            counters=self.counters
            + counters.tally(COUNTS, {"adds": added, "rejected": offered - added}),
        )

    @program(static=("batch_size",), copies=True)
    def take(self, batch_size: int) -> tuple[Self, Sample]:
        """Takes the oldest items out of the queue.

        Args:
            batch_size: The number of rows ``B``; static.

        Returns:
            The queue without these items, and a ``Sample`` of them, the oldest first. If the queue
            holds fewer than ``B`` items, all of them are taken, and the other rows have ``valid``
            False, probability 0 and index ``capacity``; see ``can_sample``.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1.
        """
        rows, size = check_batch_size(batch_size), self.size
        row = jnp.arange(rows, dtype=jnp.int32)
        valid = row < size
        oldest = self.occupancy.position - size
        index = jnp.where(valid, (oldest + row) % self.capacity, self.capacity)
        sample = Sample(
            data=storage.read(self.data, index),
            slots=Slots(index=index, generation=self.occupancy.generation(index)),
            probability=valid.astype(jnp.float32),
            valid=valid,
        )
        count = jnp.minimum(size, rows).astype(jnp.uint32)
        queue = trees.updated(
            self,
            occupancy=self.occupancy.take(count),
            counters=self.counters + counters.tally(COUNTS, {"taken": count}),
        )
        return queue, sample

    sample, next_batch = (
        absent(name, "use take(batch_size), which returns the queue without these items as well")
        for name in ("sample", "next_batch")
    )

    @program(copies=True)
    def clear(self) -> Self:
        """Returns the queue without its items; counters keep their values.

        The result shares no array with the original, so that either may be donated.
        """
        data = jax.tree.map(jnp.zeros_like, self.data)
        empty = trees.updated(self, data=data, occupancy=self.occupancy.clear())
        return trees.in_place_of(self, empty)

    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor.

        Returns:
            ``size``, and the counts ``adds``, ``rejected`` (rows that did not fit) and ``taken``,
            which are since creation and wrap at 2**32.
        """
        return {"size": self.size, **counters.named(COUNTS, self.counters)}
