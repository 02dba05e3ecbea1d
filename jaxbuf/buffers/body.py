"""The common base of ``ItemBuffer`` and ``TrajectoryBuffer``: slots that a sampler draws."""

import abc
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt

from jaxbuf.buffers import common, retire, write_back
from jaxbuf.buffers.base import Base
from jaxbuf.buffers.created import Created
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import counters, fields, sizes, storage, trees
from jaxbuf.core.duplicates import keep_last
from jaxbuf.core.program import program
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Function, State
from jaxbuf.strategies.diversity import Diversity, DiversityState
from jaxbuf.strategies.freshness import Freshness, FreshnessState
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.part import Part, Rows
from jaxbuf.strategies.protocols import Draw, Support

SomePart = TypeVar("SomePart", bound=Part)
SomeBody = TypeVar("SomeBody", bound="Body")


class Body(Base, Created):
    """A buffer with slots for items, or for windows of steps, that a sampler draws."""

    @property
    @abc.abstractmethod
    def size(self) -> Int[Array, ""]:
        """The number of items, or steps, that the buffer holds."""

    @abc.abstractmethod
    def _read(self, index: Int[Array, " B"]) -> PyTree[Array]:
        """Returns the contents of the slots at ``index``, leaves ``[B, ...]``."""

    @abc.abstractmethod
    def _stored(self, index: Int[Array, " B"]) -> Int[Array, "..."]:
        """Returns the rows of the storage that hold the contents of slots, or ``capacity``.

        For items these are the slots ``[B]`` themselves, for windows their own steps ``[B, L]``.
        """

    @abc.abstractmethod
    def _written(
        self, row: Int[Array, "..."], items: PyTree[Array]
    ) -> tuple[Int[Array, "..."], Rows]:
        """Returns slots and rows for ``Part.on_write``, of items in these rows of storage."""

    @abc.abstractmethod
    def _holds_row(self, row: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Returns whether there is an item, or a step, in these rows of the storage."""

    @abc.abstractmethod
    def _some_row(self) -> Int[Array, ""]:
        """Returns a row of the storage with an item, or a step; arbitrary in an empty buffer."""

    @property
    @abc.abstractmethod
    def have(self) -> str:
        """The beginning of an error about fields: "items have" or "steps have"."""

    @property
    @abc.abstractmethod
    def _places(self) -> Any:
        """The occupancy of items, or the rings of steps."""

    @property
    @abc.abstractmethod
    def _score_users(self) -> list[object]:
        """The strategies that use scores."""

    @property
    @abc.abstractmethod
    def step_axes(self) -> tuple[int, ...]:
        """The axis of the steps of a window, ``(sequence_length,)``; no axis for items."""

    @property
    def counter_names(self) -> tuple[str, ...]:
        """The names of ``counters``: rows added, rows rejected, and other reasons to refuse one."""
        return counter_names(self.extras)

    @property
    def abilities(self) -> frozenset[str]:
        """The abilities of the buffer; see ``jaxbuf.wrappers.abilities``."""
        has = {
            "contents": True,
            "priorities": self.sampler.uses_priority,
            "scores": self.uses_score,
            "removal": self.lets_remove,
            "freshness": self.freshness is not None,
        }
        return frozenset(name for name, there in has.items() if there)

    @property
    def uses_score(self) -> bool:
        """True if a strategy of this buffer uses scores, which ``update_score`` sets."""
        return bool(self._score_users)

    @property
    def freshness(self) -> Freshness | None:
        """The limits on uses and staleness; None without ``Freshness``."""
        return self._find(Freshness)[0]

    @property
    def freshness_state(self) -> FreshnessState:
        """The state of ``freshness``; an empty tuple without it."""
        return self._find(Freshness)[1]

    @property
    def diversity(self) -> Diversity | None:
        """The filter that admits only items that differ enough; None without it."""
        return self._find(Diversity)[0]

    @property
    def diversity_state(self) -> DiversityState:
        """The state of ``diversity``; an empty tuple without it."""
        return self._find(Diversity)[1]

    @program(static=("batch_size",))
    def next_batch(self, key: PRNGKeyArray, batch_size: int) -> tuple[Self, Sample]:
        """Draws the next batch of a pass over the buffer, with the sampler ``Shuffled``.

        ``Staleness``, and a sampler of your own that defines ``on_draw``, is told which items were
        drawn. With any other sampler this is ``sample``, and the buffer does not change.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.

        Returns:
            The new buffer, which records the items, or windows, drawn in this pass, and a
            ``Sample``. If fewer than ``B`` items are left in the pass, the last rows are invalid.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, or ``key`` is not a
                single key.
        """
        rows = common.check_batch_size(batch_size)
        state = lax.stop_gradient(self.sampler_state)
        after, draw = self.sampler.next(state, common.check_key(key), rows, self.occupancy)
        after = common.check_state(self.sampler, "next", state, after)
        return self.replace(sampler_state=after), self.gather(draw)

    @program(static=("batch_size", "by_priority", "replacement"))
    def sample_range(
        self,
        key: PRNGKeyArray,
        batch_size: int,
        start: int | Int[Array, ""] | None = None,
        stop: int | Int[Array, ""] | None = None,
        *,
        by_priority: bool = False,
        replacement: bool = False,
    ) -> Sample:
        """Draws a batch from a range of ages, independently of the sampler.

        A ``TrajectoryBuffer`` draws windows, from the same range of ages in every ring.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.
            start: The start of the range, as in a slice of a list of the items from the oldest to
                the newest: ``-10`` means the ten newest. May be traced.
            stop: The end of the range, as in such a slice.
            by_priority: Whether to draw the items of the range with probabilities proportional to
                those of the sampler, instead of equal ones; static. If these are all 0, the draw is
                uniform. It costs a pass over all slots.
            replacement: Whether a batch may hold an item twice; static.

        Returns:
            A ``Sample`` in order of age, ring by ring.

            * Without replacement (the default) its items are different. Unless ``by_priority`` is
              set, they are also evenly spread over the range, one from each of ``B`` equal parts.
              If the range holds at most ``B`` items (with a probability above 0), all of them are
              drawn, and the other rows are invalid.
            * With replacement rows are independent; with ``by_priority``, one is drawn from each of
              ``B`` equal parts of the probability. Rows are invalid only if the range is empty.

            ``probability`` is the probability of a single draw from the range.

        Raises:
            ValueError: If the evictor does not keep the order of insertion, ``batch_size`` is not
                an integer of at least 1, a flag is neither True nor False, or ``by_priority`` is
                True and the sampler has no priorities.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity=8)
            >>> buffer = buffer.add(jnp.arange(12))
            >>> buffer.sample_range(jax.random.key(0), 4, -4).data.tolist()
            [8, 9, 10, 11]
            >>> sampler = jaxbuf.Prioritized(alpha=1.0)
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity=8, sampler=sampler)
            >>> buffer = buffer.add(jnp.arange(5), priority=jnp.array([9.0, 0.0, 1.0, 3.0, 12.0]))
            >>> batch = buffer.sample_range(
            ...     jax.random.key(0), 16, -4, by_priority=True, replacement=True
            ... )
            >>> jnp.bincount(batch.data, length=5).tolist()
            [0, 0, 1, 3, 12]
        """
        flags = {"by_priority": by_priority, "replacement": replacement}
        rows, bounds = common.check_range(self, key, batch_size, start, stop, flags)
        return self.gather(common.pick(self, key, rows, bounds, **flags))

    @program()
    def gather(self, draw: Draw) -> Sample:
        """Returns the items, or windows, of a draw.

        Args:
            draw: The draw, such as one by a sampler that the buffer does not have.

        Returns:
            A ``Sample``, whose invalid rows have probability 0 and index ``capacity``. Rows of the
            draw whose slot holds no item, or no complete window, are invalid as well.

        Raises:
            ValueError: If ``draw`` is not a ``jaxbuf.strategies.Draw``, or its fields have other
                shapes or dtypes.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=jaxbuf.Prioritized())
            >>> buffer = buffer.add(jnp.arange(3))
            >>> sampler = jaxbuf.Uniform(replacement=False)
            >>> draw = sampler.draw((), jax.random.key(0), 3, buffer.occupancy)
            >>> sorted(buffer.gather(draw).data.tolist())
            [0, 1, 2]
        """
        index, probability, valid = common.check_draw(draw)
        valid &= self.occupancy.live(index)
        index = jnp.where(valid, index, self.capacity)
        return Sample(
            data=self._read(index),
            slots=Slots(index=index, generation=self.occupancy.generation(index)),
            probability=jnp.where(valid, probability, 0.0),
            valid=valid,
        )

    @program(static=("n",))
    def latest(self, n: int) -> Sample:
        """Returns the ``n`` newest items, or the ``n`` newest windows of every ring.

        Args:
            n: The number of items, or of windows of each ring; static.

        Returns:
            A ``Sample`` with leaves ``[n, ...]``, or ``[num_envs * n, sequence_length, ...]``,
            ordered by ring and then from the oldest to the newest. If a ring holds fewer than
            ``n``, its last rows are invalid.

        Raises:
            ValueError: If the evictor does not keep the order of insertion, or ``n`` is not an
                integer from 1 to the number of slots (of each ring).

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4, sequence_length=2)
            >>> buffer = buffer.add(jnp.arange(12).reshape(2, 6))
            >>> buffer.latest(2).data.tolist()
            [[3, 4], [4, 5], [9, 10], [10, 11]]
        """
        common.needs_order(self.occupancy, "latest")
        return self.gather(common.newest(self.occupancy, sizes.check_count("n", n)))

    @program(keeps=("data",))
    def update_priority(
        self,
        slots: Slots,
        priority: Float[Array, " B"],
        *,
        mask: Bool[Array, " B"] | None = None,
    ) -> Self:
        """Sets the priorities of sampled items, or windows.

        A row is dropped if it is invalid or masked out, or if its item has been overwritten since
        it was sampled (for a window: any of its steps). If several rows name the same item, the
        last accepted one wins.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            priority: Their new priorities, ``[B]``. Rows with a NaN, negative or infinite priority
                are refused and counted in ``metrics()["rejected"]``.
            mask: A mask of the rows to use, ``[B]``.

        Returns:
            The buffer with the new priorities.

        Raises:
            ValueError: When traced, if the sampler has no priorities, or a shape differs.
        """
        slots, value, mask = common.check_update(self.sampler, slots, priority, mask)
        taken = self.occupancy.holds(slots) & mask
        legal = self.sampler.accepts(value)
        index = jnp.where(taken & legal, slots.index, self.capacity)
        state = lax.stop_gradient(self.sampler_state)
        rejected = jnp.sum(taken & ~legal, dtype=jnp.uint32)
        return self.replace(
            sampler_state=common.hear(self.sampler, "set_priority", state, index, value),
            counters=self._counted({"rejected": rejected}),
        )

    @program(static=("path",))
    def set_field(
        self,
        path: str | None,
        slots: Slots,
        value: PyTree[Array],
        *,
        mask: Bool[Array, "..."] | None = None,
    ) -> Self:
        """Changes one field of sampled items, or of the steps of sampled windows.

        A row is dropped if it is invalid or masked out, or if its item has left since it was
        sampled; a window leaves as a whole. If several rows name the same item, or windows share a
        step, the last accepted one wins. Of a window that is padded at the end of its episode (see
        ``Episodes``), only the real steps are written.

        Args:
            path: The name of the field: the keys, attributes or indices that lead to it, with dots
                between them. A key may have dots itself, such as ``"observation.state"``. It may
                also name a part of an item that holds several fields; None writes whole items.
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            value: The new values, leaves ``[B, *shape]`` with the example's dtypes; for windows
                ``[B, sequence_length, *shape]``.
            mask: A mask of the rows to write, ``[B]``; for windows also of their steps,
                ``[B, sequence_length]``.

        Returns:
            The buffer with the new values.

        Raises:
            ValueError: When traced, if there is no such field, a structure, shape or dtype differs,
                or a part does not allow the change: ``Episodes`` refuses its flags, and rewards
                whose returns it records.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> item = {"obs": jnp.float32(0), "value": jnp.float32(0)}
            >>> buffer = jaxbuf.ItemBuffer.create(item, 8)
            >>> buffer = buffer.add({"obs": jnp.arange(3.0), "value": jnp.zeros(3)})
            >>> batch = buffer.latest(2)
            >>> buffer = buffer.set_field("value", batch.slots, 10 * batch.data["obs"])
            >>> buffer.latest(3).data["value"].tolist()
            [0.0, 10.0, 20.0]
        """
        slots = common.check_slots(slots)
        rows, steps = slots.index.shape[0], self.step_axes
        field = write_back.check_writable(self.extras, self.data, path, self.have, every=False)
        value, _ = storage.check(field, value, "value", (rows, *steps))
        taken = common.check_mask(mask, (rows,), steps)
        if rows == 0:
            return self
        held = jnp.where(self.occupancy.holds(slots), slots.index, self.occupancy.capacity)
        row = self._stored(held)
        taken = taken.reshape(rows, *[-1] * (row.ndim - taken.ndim), *taken.shape[1:])
        row = keep_last(jnp.where(taken, row, self.capacity), self.capacity)
        flat = jax.tree.map(lambda leaf: leaf.reshape(row.size, *leaf.shape[row.ndim :]), value)
        data = fields.replace(self.data, path, storage.write(field, flat, row.reshape(-1)))
        # Only items carry gradients.
        state, states = lax.stop_gradient((self.sampler_state, self.extra_states))
        if write_back.listens(self.extras):
            items = lax.stop_gradient(storage.read(data, row.reshape(-1)))
            items = jax.tree.map(lambda leaf: leaf.reshape(*row.shape, *leaf.shape[1:]), items)
            states = write_back.follow(self, states, *self._written(row, items), path)
        return self.replace(data=data, sampler_state=state, extra_states=states)

    @program(static=("path", "fn", "batch_size"))
    def map_field(self, path: str | None, fn: Function, *, batch_size: int = 4096) -> Self:
        """Computes one field of all items, or of all steps, anew.

        Items are changed in place, ``batch_size`` at a time, which limits the memory that ``fn``
        needs; under ``jax.vmap``, the field is copied once. This includes steps whose windows are
        not drawn because they have retired, were removed, or are not complete.

        Each call from Python traces ``fn`` and compiles anew, because ``fn`` may compute something
        else by now. To compile once for all calls, call it inside your own ``jax.jit``, with the
        parameters that ``fn`` reads as an argument: there, ``fn`` is traced with the rest of your
        program. It runs once for each batch, so ``jax.debug.callback`` in it can report progress.

        Args:
            path: The name of the field, as for ``set_field``.
            fn: A function of items, leaves ``[B, *shape]``, which returns their new values; of a
                ``TrajectoryBuffer`` it gets single steps, without an axis of time. For an empty
                slot it gets some item a second time, and the result is dropped, so the cost does
                not depend on how many slots are empty.
            batch_size: The number ``B`` of items for each call; static.

        Returns:
            The buffer with the new values.

        Raises:
            ValueError: When traced, if there is no such field, ``fn`` is not a function or returns
                values of another structure, shape or dtype, ``batch_size`` is not an integer of at
                least 1, or a part does not allow the change: ``Episodes`` refuses its flags. It
                computes recorded returns anew.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> step = {"obs": jnp.float32(0), "reward": jnp.float32(0)}
            >>> rings = jaxbuf.TrajectoryBuffer.create(step, num_envs=1, length=4)
            >>> rings = rings.add({"obs": jnp.arange(3.0)[None], "reward": jnp.zeros((1, 3))})
            >>> rings = rings.map_field("reward", lambda steps: -steps["obs"])
            >>> rings.latest(3).data["reward"][:, 0].tolist()
            [-0.0, -1.0, -2.0]
        """
        fn = write_back.check_function(fn)
        rows = min(sizes.check_count("batch_size", batch_size), self.capacity)
        write_back.check_writable(self.extras, self.data, path, self.have, every=True)
        data, states = write_back.map_field(
            self, self.data, path, fn, rows, self._some_row(), self._holds_row, self._written
        )
        known = lax.stop_gradient(data)
        return self.replace(
            data=data,
            sampler_state=lax.stop_gradient(self.sampler_state),
            extra_states=tuple(
                common.hear(part, "on_map", lax.stop_gradient(state), known, self._places, path)
                for part, state in zip(self.extras, states, strict=True)
            ),
        )

    @program(keeps=("data",))
    def update_score(
        self,
        slots: Slots,
        score: Float[Array, " B"],
        *,
        mask: Bool[Array, " B"] | None = None,
    ) -> Self:
        """Sets the scores of sampled items, by which samplers draw and evictors choose.

        Rows are dropped, and the last accepted one of several wins, as in ``update_priority``. The
        order of arrival, which decides between equal scores, does not change.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            score: Their new scores, ``[B]``. May be infinite, as in ``add``; rows with a NaN are
                refused and counted in ``metrics()["rejected"]``.
            mask: A mask of the rows to use, ``[B]``.

        Returns:
            The buffer with the new scores.

        Raises:
            ValueError: When traced, if no part of the buffer uses scores, or a shape differs.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 3, evictor=jaxbuf.Lowest())
            >>> buffer, slots = buffer.insert(jnp.arange(3), score=jnp.array([1.0, 2.0, 3.0]))
            >>> buffer = buffer.update_score(slots, jnp.array([4.0, 2.0, 0.0]))
            >>> sorted(buffer.add(jnp.array([7]), score=jnp.array([1.0])).data.tolist())
            [0, 1, 7]
        """
        slots = common.check_slots(slots)
        write_back.check_scores(self.sampler, self.occupancy, self._score_users)
        shape = slots.index.shape
        score = storage.check_rows(score, "score", shape, np.float32, "that of slots")
        taken = common.check_mask(mask, shape)
        if shape[0] == 0:
            return self
        changed, refused = write_back.update_score(self, slots, score, taken)
        rejected = jnp.sum(refused, dtype=jnp.uint32)
        return changed.replace(counters=self._counted({"rejected": rejected}))

    @program(keeps=("data",))
    def remove(self, slots: Slots, *, mask: Bool[Array, " B"] | None = None) -> Self:
        """Removes sampled items, or windows; the steps of windows stay.

        Their slots are stale from now on. A row is dropped if it is invalid or masked out, or if
        its item has left already.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            mask: A mask of the rows to remove, ``[B]``.

        Returns:
            The buffer without them. With ``Removable``, their number is counted in
            ``metrics()["removed"]``.

        Raises:
            ValueError: When traced, if the buffer has neither ``Removable`` nor another part that
                removes items, or a shape differs.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, parts=(jaxbuf.Removable(),))
            >>> buffer, slots = buffer.insert(jnp.arange(3))
            >>> buffer = buffer.remove(slots, mask=jnp.array([False, True, False]))
            >>> buffer.holds(slots).tolist(), int(buffer.size)
            ([True, False, True], 2)
        """
        slots = common.check_slots(slots)
        taken = common.check_mask(mask, slots.index.shape)
        changed, count = write_back.remove(self, slots, taken)
        if "removed" not in self.counter_names:
            return changed
        return changed.replace(counters=self._counted({"removed": count}))

    @program(keeps=("data",))
    def holds(self, slots: Slots) -> Bool[Array, " B"]:
        """Returns whether sampled items are still there, and whether windows can be drawn, ``[B]``.

        Raises:
            ValueError: When traced, if ``slots`` are not the slots of a sample, ``[B]``.
        """
        slots = common.check_slots(slots)
        return self.occupancy.holds(slots)

    @program()
    def get(self, slots: Slots) -> Sample:
        """Returns items, or windows, by the slots of an earlier sample.

        Args:
            slots: The slots, ``sample.slots``, ``[B]``.

        Returns:
            A ``Sample`` with their present data. Rows whose item has left are invalid, with index
            ``capacity`` and probability 0. The ``probability`` of other rows is that of a draw by
            the sampler; 0 for a sampler of your own that is not a ``KnownSampler``.

        Raises:
            ValueError: When traced, if ``slots`` are not the slots of a sample, ``[B]``.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4)
            >>> buffer, slots = buffer.insert(jnp.arange(4))
            >>> batch = buffer.add(jnp.array([4, 5])).get(slots)
            >>> batch.valid.tolist(), batch.data[2:].tolist()
            ([False, False, True, True], [2, 3])
        """
        slots = common.check_slots(slots)
        held = self.occupancy.holds(slots)
        index = jnp.where(held, slots.index, self.occupancy.capacity)
        return self.gather(Draw(index, write_back.probability(self, index), held))

    @program(keeps=("data",))
    def mark_used(self, slots: Slots, *, mask: Bool[Array, " B"] | None = None) -> Self:
        """Counts a use of each sampled item, or window, and retires items used ``max_use`` times.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``. An item that occurs twice is
                counted twice. Rows whose item has since been overwritten or retired are dropped.
            mask: A mask of the rows to use, ``[B]``.

        Returns:
            The buffer with the new counts, without the items that have retired.

        Raises:
            ValueError: When traced, if the buffer has no ``Freshness``, or a shape differs.
        """
        self.need("counts_uses", "mark_used was called, but ")
        slots = common.check_slots(slots)
        taken = common.check_mask(mask, slots.index.shape)
        if slots.index.size == 0:
            return self
        return retire.on_use(self, slots, self.occupancy.holds(slots) & taken)

    @program(keeps=("data",))
    def set_version(
        self, version: int | Int[Array, ""], session: int | Int[Array, ""] | None = None
    ) -> Self:
        """Sets the learner's version, and retires the items that have become too stale.

        Args:
            version: The learner's version, an integer that fits int32; usually one more than
                before.
            session: The number of the learner's run. If it changes, versions start over, and all
                items retire. None keeps the present session.

        Returns:
            The buffer without the items that have become too stale.

        Raises:
            ValueError: When traced, if the buffer has no ``Freshness``, or an argument is not an
                integer that fits int32.
        """
        self.need("uses_version", "set_version was called, but ")
        return retire.on_version(self, *retire.check_version(version, session))

    @program(keeps=("data",))
    def use_count(self, slots: Slots) -> Int[Array, " B"]:
        """Returns the number of uses of each sampled item, ``[B]``; 0 if the item has left.

        Raises:
            ValueError: If the buffer has no ``Freshness``.
        """
        return retire.known(self, "use_count", slots)

    @program(keeps=("data",))
    def staleness(self, slots: Slots) -> Int[Array, " B"]:
        """Returns the staleness of each sampled item, in versions, ``[B]``; 0 if the item has left.

        Raises:
            ValueError: If the buffer has no ``Freshness``.
        """
        return retire.known(self, "staleness", slots)

    @program(keeps=("data",))
    def support(self) -> Support:
        """Returns the number of items, or windows, that can be drawn, and their least probability.

        See ``jaxbuf.strategies.Support``.
        """
        return self.sampler.support(lax.stop_gradient(self.sampler_state), self.occupancy)

    @program(keeps=("data",))
    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor; it costs one pass over the slots.

        Returns:
            A dict with the following entries, as far as they apply to the buffer. Counts are since
            creation and wrap at 2**32.

            * ``size``; ``windows``, the number of windows that can be drawn, for a
              ``TrajectoryBuffer``, whose size is in steps; the counts ``adds`` and ``rejected``.
            * ``effective_sample_size``, which is ``1 / Σ P²`` for the probabilities ``P`` of the
              sampler.
            * With priorities, ``priority_min``, ``priority_max`` and ``priority_mean`` of the live
              items, computed from their masses.
            * With scores, ``score_min``, ``score_max`` and ``score_mean``.
            * With ``Diversity``, the counts of refused rows ``refused_low_score``,
              ``refused_within_batch`` and ``refused_near_buffer``.
            * With ``Freshness``, the learner's ``version``, the counts ``refused_stale``,
              ``retired_used`` and ``retired_stale``, and ``use_max``, ``use_mean``,
              ``staleness_max`` and ``staleness_mean`` of the live items.
            * With ``Episodes(boundary="avoid")``, the count ``refused_across_episodes`` of windows.
            * The reasons and metrics of your own parts.
        """
        found: dict[str, Array] = {}
        state = lax.stop_gradient(self.sampler_state)
        sampled = common.ask(self.sampler, "metrics", state, self.occupancy)
        told: list[tuple[object, dict[str, Array]]] = [
            ("the buffer", self._sizes()),
            ("a count of rows", counters.named(self.counter_names, self.counters)),
            # A sampler and an evictor that both use scores report them both.
            (self.sampler, {**self.occupancy.metrics(), **sampled}),
        ]
        told += [
            (part, common.ask(part, "metrics", kept, self.occupancy))
            for part, kept in self._parts()
        ]
        owners: dict[str, object] = {}
        for owner, values in told:
            for name in values:
                if name in owners:
                    raise ValueError(
                        f"{name!r} is a metric of {owners[name]} and of {owner}; rename the reason "
                        "or the metric of your own part"
                    )
                owners[name] = owner
            found |= values
        return found

    def options(self) -> dict[str, Any]:
        """Returns the strategies of the buffer, as keyword arguments of ``create``."""
        return {"sampler": self.sampler, "parts": self.extras}

    def by_slot(self) -> dict[str, Array]:
        """Returns the numbers by which items are drawn or evicted, ``[N]``, by name."""
        return {**self.sampler.by_slot(self.sampler_state), **super().by_slot()}

    def move(self, old: Self, moves: Moves) -> Self:
        """Returns this buffer, which is empty, with the items of another one like it.

        What the sampler and the parts know of these items moves as well.
        """
        parts = zip(self.extras, self.extra_states, old.extra_states, strict=True)
        return (
            super()
            .move(old, moves)
            .replace(
                sampler_state=self.sampler.move(self.sampler_state, old.sampler_state, moves),
                extra_states=tuple(part.move(empty, state, moves) for part, empty, state in parts),
            )
        )

    def _sizes(self) -> dict[str, Array]:
        return {"size": self.size}

    def _drawn(self, key: PRNGKeyArray, batch_size: int) -> Sample:
        """Returns a batch drawn by the sampler."""
        rows = common.check_batch_size(batch_size)
        state = lax.stop_gradient(self.sampler_state)
        return self.gather(self.sampler.draw(state, common.check_key(key), rows, self.occupancy))

    def _counted(self, counts: dict[str, Array]) -> UInt[Array, " K"]:
        """Returns the counters with these counts added."""
        return self.counters + counters.tally(self.counter_names, counts)

    def _parts(self) -> list[tuple[Part, State]]:
        """Returns the extras and their states, through which no gradient flows."""
        return list(zip(self.extras, lax.stop_gradient(self.extra_states), strict=True))

    def _write(self, items: PyTree[Array], row: Int[Array, " R"], event: str, *told: Any) -> Self:
        """Returns the buffer with new items, or steps, in rows of the storage; parts are told."""
        data = storage.write(self.data, items, row)
        return self.replace(data=data, extra_states=self._tell(event, *told))

    def _tell(self, event: str, *told: Any) -> tuple[State, ...]:
        """Returns the states of all extras after an event, the name of a method of parts."""
        return tuple(common.hear(part, event, state, *told) for part, state in self._parts())

    def _find(self, kind: type[SomePart]) -> tuple[SomePart | None, State]:
        """Returns the part of this class and its state, or ``(None, ())``."""
        for part, state in zip(self.extras, self.extra_states, strict=True):
            if isinstance(part, kind):
                return part, state
        return None, ()

    def need(self, flag: str, what: str) -> None:
        """Checks that a part has a flag, ``"counts_uses"`` or ``"uses_version"``.

        Raises:
            ValueError: If none has it; the message begins with ``what``.
        """
        if not any(getattr(part, flag) for part in self.extras):
            raise ValueError(what + retire.MISSING)

    def _cleared(self, init: Callable[[Part], State]) -> Self:
        """Returns the buffer with empty slots, which shares no array with the original.

        Args:
            init: Returns the state of a part for an empty buffer.
        """
        empty = self.replace(
            data=jax.tree.map(jnp.zeros_like, self.data),
            occupancy=self.occupancy.clear(),
            sampler_state=self.sampler.init(self.num_slots),
            extra_states=tuple(
                common.hear(part, "on_clear", state, init(part)) for part, state in self._parts()
            ),
        )
        return trees.in_place_of(self, empty)


def check_names(buffer: SomeBody) -> SomeBody:
    """Returns the buffer.

    Raises:
        ValueError: If a part that is not one of this library names a reason or a metric like
            something else that ``metrics()`` returns.
    """
    own = Part.__module__.partition(".")[0]
    if any(type(part).__module__.partition(".")[0] != own for part in buffer.extras):
        jax.eval_shape(buffer.metrics)
    return buffer


def counter_names(extras: tuple[Part, ...]) -> tuple[str, ...]:
    """The names under which a buffer with these parts counts rows."""
    reasons = [reason for part in extras for reason in part.reasons]
    return tuple(dict.fromkeys(["adds", "rejected", *reasons]))


def refuse(
    reasons: dict[str, Bool[Array, "..."]], taken: Bool[Array, "..."], counts: dict[str, Array]
) -> Bool[Array, "..."]:
    """Returns which of the taken rows are refused, each counted under the first of its reasons."""
    none: Array = jnp.uint32(0)
    refused = jnp.zeros_like(taken)
    for reason, mask in reasons.items():
        hit = taken & mask & ~refused
        counts[reason] = counts.get(reason, none) + jnp.sum(hit, dtype=jnp.uint32)
        refused |= hit
    return refused
