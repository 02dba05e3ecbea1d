"""A mixture of buffers, from which a batch is sampled at fixed ratios."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray, PyTree, UInt

from jaxbuf.buffers import common
from jaxbuf.buffers.buffer import Buffer, Share, as_buffer
from jaxbuf.buffers.created import check_alike
from jaxbuf.buffers.lookups import OldLookups, Where, broadcast_steps, check_where, mask_of
from jaxbuf.buffers.options import absent, check_options
from jaxbuf.buffers.queue import Queue
from jaxbuf.buffers.sample import Contents, DrawnBuffer, Sample
from jaxbuf.core import checks, describe, storage, trees
from jaxbuf.core.donation import check_readable
from jaxbuf.core.program import program
from jaxbuf.core.random import scale_word
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Function
from jaxbuf.strategies.episodes import Episode
from jaxbuf.strategies.protocols import Support
from jaxbuf.wrappers.abilities import (
    CONTENTS,
    ENVIRONMENTS,
    EPISODES,
    FRESHNESS,
    PRIORITIES,
    REMOVABLE,
    SCORES,
    Ability,
)


class Mixture(OldLookups, Buffer, struct.PyTreeNode):
    """Several buffers, sampled together at fixed ratios, for example offline and online data.

    A batch has an exact number of rows from each part, ordered by part. Slots are numbered through
    all parts: the slots of a part follow those of the parts before it, so that ``update_priority``
    reaches the right part. The ``probability`` of a row is the part's share of the batch, times the
    probability within the part. ``importance_weights`` are therefore relative to a uniform draw
    from the items of all parts, whatever their samplers. If the ratios are to remain, weigh the
    rows within their parts: ``importance_weights(..., within="part")``.

    An empty part returns rows that are not valid, and the other parts are not affected, so that
    shapes and the numbers of rows do not depend on the contents of the parts. Use ``can_sample``
    to check.

    The mixture is an immutable pytree, like its parts, and works with ``jaxbuf.sample``,
    ``jaxbuf.update_priority`` and ``jaxbuf.importance_weights``. A part may be a mixture itself.

    Parts may be of different kinds: ``mark_used`` and ``set_version`` apply to the parts with
    ``Freshness``, and lookups such as ``locate`` and ``episode`` ask, for each row, the part that
    it comes from. ``part_slots`` returns the slots of one part for its own methods.

    A part may also be a ``Queue``: ``next_batch`` takes its rows out, so that each of its items is
    in one batch, and draws the rest. Such a mixture cannot ``sample``.

    Attributes:
        parts: The buffers.
        ratios: The share of each part in a batch; they sum to 1.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> offline = jaxbuf.ItemBuffer.create(jnp.float32(0), 100)
        >>> online = jaxbuf.ItemBuffer.create(jnp.float32(0), 10, sampler=jaxbuf.Prioritized())
        >>> mixture = jaxbuf.Mixture.create([offline.add(jnp.arange(50.0)), online], [3, 1])
        >>> mixture = mixture.add(-jnp.ones(5), part=1)
        >>> batch = jaxbuf.sample(mixture, jax.random.key(0), 8)
        >>> mixture.part_of(batch.slots).tolist(), batch.data[6:].tolist()
        ([0, 0, 0, 0, 0, 0, 1, 1], [-1.0, -1.0])
        >>> mixture = jaxbuf.update_priority(mixture, batch.slots, jnp.abs(batch.data))
    """

    parts: tuple[DrawnBuffer, ...]
    ratios: tuple[float, ...] = struct.field(pytree_node=False)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(cls, buffers: Sequence[DrawnBuffer | Queue], ratios: Sequence[float]) -> Self:
        """Creates a mixture of buffers.

        Args:
            buffers: The parts, whose samples must have the same structure, shapes and dtypes. Items
                of a ``Queue`` are taken by ``next_batch``.
            ratios: The relative numbers of rows from each part.

        Raises:
            ValueError: If there are no buffers, the number of ratios differs, a ratio is negative
                or not finite, all ratios are zero, samples of the parts differ in structure, shape
                or dtype, two parts share memory, or there are 2**31 slots or more.
        """
        parts = checks.check_sequence("buffers", buffers, "buffers")
        weights = checks.check_weights("ratios", ratios)
        if not parts or len(parts) != len(weights):
            raise ValueError(
                f"there are {len(parts)} buffers and {len(weights)} ratios; expected one ratio for "
                "each of one buffer or more"
            )
        for i, part in enumerate(parts):
            if not as_buffer(part).is_queue:
                check_options(part, "sample", {}, f"buffers[{i}]")
            _check_whole(part, f"buffers[{i}]")
        if sum(weights) <= 0:
            raise ValueError(
                f"ratios is {weights}; expected finite numbers of at least 0, not all 0"
            )
        if sum(part.capacity for part in parts) >= 2**31:
            raise ValueError("buffers have 2**31 slots or more; expected fewer in all")
        leaves = [id(leaf) for leaf in jax.tree.leaves(parts)]
        if len(set(leaves)) < len(leaves):
            raise ValueError("buffers share memory, so they cannot be donated; pass copies")
        _check_alike(parts)
        return cls(parts=parts, ratios=tuple(w / sum(weights) for w in weights))

    @property
    def members(self) -> tuple[Any, ...]:
        """The parts."""
        return self.parts

    @property
    def capacity(self) -> int:
        """The number of slots of all parts together."""
        return sum(part.capacity for part in self.parts)

    @property
    def size(self) -> Int[Array, ""]:
        """The number of items, or steps, in all parts together."""
        return _total([part.size for part in self.parts])

    @property
    def occupancy(self) -> Contents:
        """An object whose ``size`` is the number of items, or windows, in all parts."""
        check_readable(self)
        return Contents(_total([part.occupancy.size for part in self.parts]))

    def counts(self, batch_size: int) -> tuple[int, ...]:
        """Returns the number of rows of a batch that come from each part.

        Each part gets its share rounded down, and the remaining rows go to the parts with the
        largest remainders; among equal remainders, to the first parts.
        """
        rows = common.check_batch_size(batch_size)
        product = np.uint64(2 * rows) * np.asarray(self._shares, np.uint64)
        whole, rest = product >> 32, product & np.uint64(2**32 - 1)
        counts = _largest_remainders(rows, whole.astype(np.int64), rest)
        return tuple(int(count) for count in counts)

    def shares(self, rows: int) -> list[Share]:
        """Returns the buffers that a batch comes from; a part may be a mixture of several.

        A part that gives no row to a batch so small has its ratio as its share.
        """
        counts = self.counts(rows) if rows else [0] * len(self.parts)
        found: list[Share] = []
        for part, ratio, count in zip(self.parts, self.ratios, counts, strict=True):
            known, fraction = as_buffer(part), count / rows if count else ratio
            if known.is_queue:
                found.append(Share(None, part.capacity, fraction))
            else:
                inner = known.shares(count)
                found += [one._replace(fraction=one.fraction * fraction) for one in inner]
        return found

    def can_sample(self, batch_size: int | Int[Array, ""] = 1) -> Bool[Array, ""]:
        """Returns whether every part can fill its rows of a batch, and has at least one item.

        Args:
            batch_size: The number of rows ``B``; may be traced. Parts with a ratio of 0 are
                ignored.
        """
        if isinstance(batch_size, int | np.integer):
            counts: Sequence[int] | Array = [max(count, 1) for count in self.counts(batch_size)]
        else:
            rows = storage.check_rows(batch_size, "batch_size", (), np.int32, "a number")
            doubled = jnp.broadcast_to(2 * jnp.maximum(rows, 0).astype(jnp.uint32), len(self.parts))
            shares = jnp.asarray(self._shares, jnp.uint32)
            # The high and low halves of the 64-bit product.
            whole, rest = scale_word(doubled, shares).astype(jnp.int32), doubled * shares
            counts = jnp.maximum(_largest_remainders(rows, whole, rest), 1)
        able = [
            part.can_sample(counts[i])
            for i, (part, ratio) in enumerate(zip(self.parts, self.ratios, strict=True))
            if ratio > 0
        ]
        return jnp.all(jnp.stack(able), axis=0)

    def checked(self, updates: dict[str, Any]) -> dict[str, Any]:
        """Returns new fields after a check that the parts hold the same kind of items."""
        if "parts" in updates:
            check_alike("parts", self.parts, updates["parts"])
        return super().checked(updates)

    def check_room(self, asks: str, rows: int, sequence_length: int | None = None) -> None:
        """Checks that each part can ever hold its share of so many items, or windows."""
        for i, count in enumerate(self.counts(rows)):
            if self.ratios[i] > 0:
                more = f"{asks}, of which parts[{i}] gives {count}"
                as_buffer(self.parts[i]).check_room(more, max(count, 1), sequence_length)

    def known_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of ``add``, after the checks of the part that gets them."""
        part, parts = given.get("part"), self.parts
        if isinstance(part, int | np.integer) and 0 <= part < len(parts):
            return as_buffer(parts[part]).known_options(given)
        return given

    @program(static=("part",), before=known_options)
    def add(self, items: PyTree[Array], *, part: int | None = None, **options: object) -> Self:
        """Adds items to one of the parts.

        Args:
            items: The items, as for the ``add`` of the part.
            part: The number of the part; static.
            **options: Options of the part's own ``add``.

        Returns:
            The mixture with the items.

        Raises:
            ValueError: If ``part`` is not the number of a part, if the part does not take one of
                the options, or as raised by the part's ``add``.
        """
        i = self._check_part(part)
        check_options(self.parts[i], "add", options)
        return self.replace_part(i, self.parts[i].add(items, **options))

    def replace_part(self, part: int, buffer: DrawnBuffer | Queue) -> Self:
        """Returns the mixture with a new state of one part.

        Raises:
            ValueError: If ``part`` is not the number of a part, or ``buffer`` is not built like the
                present part.
        """
        i = self._check_part(part)
        if jax.tree.structure(buffer) != jax.tree.structure(self.parts[i]):
            raise ValueError(f"buffer is not built like parts[{i}]; create another mixture for it")
        return self.replace(parts=(*self.parts[:i], buffer, *self.parts[i + 1 :]))

    @program(static=("batch_size",))
    def sample(self, key: PRNGKeyArray, batch_size: int, **options: object) -> Sample:
        """Draws a batch with an exact number of rows from each part.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.
            **options: Options of the parts' own ``sample``, the same for all parts.

        Returns:
            A ``Sample``. Rows that a part cannot draw have ``valid`` False, probability 0 and index
            ``capacity``.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, ``key`` is not a single
                key, a part is a ``Queue``, or a part does not take one of the options.
        """
        rows = common.check_batch_size(batch_size)
        key = common.check_key(key)
        for i, part in enumerate(self.parts):
            if as_buffer(part).is_queue:
                raise ValueError(
                    f"parts[{i}] is a Queue, whose rows are taken out; draw with next_batch, which "
                    "returns the mixture without them"
                )
            check_options(part, "sample", options)
        keys = jax.random.split(key, len(self.parts))
        return self._batch(
            {
                i: self.parts[i].sample(keys[i], count, **options)
                for i, count in enumerate(self.counts(rows))
                if count > 0
            }
        )

    @program(static=("batch_size",))
    def next_batch(self, key: PRNGKeyArray, batch_size: int) -> tuple[Self, Sample]:
        """Draws the next batch, with an exact number of rows from the pass of each part.

        A part with the sampler ``Shuffled`` gives the next items of its own pass, and each of its
        passes ends by itself: with other numbers of items or other ratios, parts begin new passes
        at different times. A part with another sampler draws as in ``sample``. From a ``Queue``,
        the oldest items are taken out. Their ``probability`` is the share of the queue, because
        they are certain to be in the batch.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.

        Returns:
            The new mixture, and a ``Sample``. If fewer items than its rows are left in the pass of
            a part, or in a queue, its last rows are invalid.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, ``key`` is not a single
                key, or a part has no ``next_batch``.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> def passes(numbers):
            ...     buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=jaxbuf.Shuffled())
            ...     return buffer.add(numbers)
            >>> parts = [passes(jnp.arange(6)), passes(jnp.array([10, 11]))]
            >>> mixture = jaxbuf.Mixture.create(parts, [3, 1])
            >>> found = []
            >>> for key in jax.random.split(jax.random.key(0), 2):
            ...     mixture, batch = jaxbuf.next_batch(mixture, key, 4)
            ...     found += batch.data.tolist()
            >>> sorted(found)
            [0, 1, 2, 3, 4, 5, 10, 11]
        """
        rows = common.check_batch_size(batch_size)
        key = common.check_key(key)
        for i, part in enumerate(self.parts):
            if not as_buffer(part).is_queue:
                check_options(part, "next_batch", {}, f"parts[{i}]")
        keys, parts = jax.random.split(key, len(self.parts)), list(self.parts)
        drawn: dict[int, Sample] = {}
        for i, count in enumerate(self.counts(rows)):
            if count > 0:
                parts[i], drawn[i] = _next_of(parts[i], keys[i], count)
        return self.replace(parts=tuple(parts)), self._batch(drawn)

    def _batch(self, drawn: dict[int, Sample]) -> Sample:
        """Returns one sample of what the parts of these numbers gave."""
        rows = sum(sample.valid.shape[0] for sample in drawn.values())

        def own(i: int, sample: Sample) -> Sample:
            share = jnp.float32(sample.valid.shape[0] / rows)
            return sample.replace(
                slots=self._numbered(i, sample.slots), probability=sample.probability * share
            )

        samples = [own(i, sample) for i, sample in drawn.items()]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *samples)

    def _numbered(self, part: int, slots: Slots) -> Slots:
        """Returns slots of a part as slots of the mixture."""
        there = slots.index < self.parts[part].capacity
        index = jnp.where(there, slots.index + self._offset(part), self.capacity)
        return slots.replace(index=index)

    def part_of(self, slots: Slots) -> Int[Array, " B"]:
        """Returns the part of each row, ``[B]``; the number of parts if the row is invalid."""
        slots = common.check_slots(slots)
        ends = [self._offset(i + 1) for i in range(len(self.parts))]
        at_or_after = slots.index[:, None] >= jnp.asarray(ends, jnp.int32)[None]
        at_or_after |= slots.index[:, None] < 0
        return jnp.sum(at_or_after, axis=1, dtype=jnp.int32)

    def part_slots(self, slots: Slots, part: int) -> Slots:
        """Returns the slots of one part, for the part's own methods.

        Args:
            slots: Slots of the mixture, ``sample.slots``, ``[B]``.
            part: The number of the part; static.

        Returns:
            Slots of the part, ``[B]``. Rows of other parts, like invalid rows, have index
            ``parts[part].capacity``, so that the part ignores them.

        Raises:
            ValueError: If ``part`` is not the number of a part, or ``slots`` are not the slots of a
                sample.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> parts = [jaxbuf.ItemBuffer.create(jnp.float32(0), 4) for _ in range(2)]
            >>> mixture = jaxbuf.Mixture.create([part.add(jnp.ones(4)) for part in parts], [1, 1])
            >>> batch = mixture.sample(jax.random.key(0), 4)
            >>> (mixture.part_slots(batch.slots, 0).index < 4).tolist()
            [True, True, False, False]
            >>> (mixture.part_slots(batch.slots, 1).index < 4).tolist()
            [False, False, True, True]
        """
        slots = common.check_slots(slots)
        i = self._check_part(part)
        index, capacity = slots.index - self._offset(i), self.parts[i].capacity
        own = (index >= 0) & (index < capacity)
        return slots.replace(index=jnp.where(own, index, capacity))

    @program()
    def update_priority(
        self,
        slots: Slots,
        priority: Float[Array, " B"],
        *,
        mask: Bool[Array, " B"] | None = None,
    ) -> Self:
        """Sets the priorities of sampled items, each in the part that it comes from.

        Rows of parts without priorities are dropped, as are stale, invalid and masked rows.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            priority: Their new priorities, ``[B]``; illegal ones are refused and counted by the
                part.
            mask: A mask of the rows to use, ``[B]``.

        Raises:
            ValueError: When traced, if no part has priorities, or a shape differs.
        """
        return self._tell(
            "update_priority",
            PRIORITIES,
            lambda part, own: part.update_priority(own, priority, mask=mask),
            slots,
        )

    @program(static=("part",))
    def insert(
        self, items: PyTree[Array], *, part: int | None = None, **options: object
    ) -> tuple[Self, Slots]:
        """Adds items to one of the parts, and returns their slots.

        Args:
            items: The items, as for the ``insert`` of the part.
            part: The number of the part; static.
            **options: Options of the part's own ``insert``.

        Returns:
            The mixture with the items, and their slots, which are numbered through all parts. A row
            that was not stored has index ``capacity``.

        Raises:
            ValueError: If ``part`` is not the number of a part, if the part does not take one of
                the options, or as raised by the part's ``insert``.
        """
        i = self._check_part(part)
        check_options(self.parts[i], "insert", options, f"parts[{i}]")
        buffer, slots = operator.methodcaller("insert", items, **options)(self.parts[i])
        return self.replace_part(i, buffer), self._numbered(i, slots)

    @program(static=("path",))
    def set_field(
        self,
        path: str | None,
        slots: Slots,
        value: PyTree[Array],
        *,
        mask: Bool[Array, "..."] | None = None,
    ) -> Self:
        """Changes one field of sampled items, or windows, in the parts that they come from.

        Args:
            path: The name of the field, as for ``set_field`` of the parts.
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            value: The new values, leaves ``[B, ...]``.
            mask: A mask of the rows to write, ``[B]``; ``[B, sequence_length]`` if all parts hold
                windows.

        Raises:
            ValueError: When traced, as raised by the parts.
        """
        return self._tell(
            "set_field",
            CONTENTS,
            lambda part, own: part.set_field(path, own, value, mask=mask),
            slots,
        )

    @program(static=("path", "fn", "batch_size"))
    def map_field(self, path: str | None, fn: Function, *, batch_size: int = 4096) -> Self:
        """Computes one field of all items, or steps, of all parts anew; see ``ItemBuffer``.

        Each call from Python traces ``fn`` and compiles anew.

        Raises:
            ValueError: When traced, as raised by the parts.
        """
        return self._tell(
            "map_field", CONTENTS, lambda part: part.map_field(path, fn, batch_size=batch_size)
        )

    @program()
    def update_score(
        self, slots: Slots, score: Float[Array, " B"], *, mask: Bool[Array, " B"] | None = None
    ) -> Self:
        """Sets the scores of sampled items, each in the part that it comes from.

        Rows of parts without scores are dropped, as are stale, invalid and masked rows.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            score: Their new scores, ``[B]``; a NaN is refused and counted by the part.
            mask: A mask of the rows to use, ``[B]``.

        Raises:
            ValueError: When traced, if no part uses scores, or a shape differs.
        """
        return self._tell(
            "update_score",
            SCORES,
            lambda part, own: part.update_score(own, score, mask=mask),
            slots,
        )

    @program()
    def remove(self, slots: Slots, *, mask: Bool[Array, " B"] | None = None) -> Self:
        """Removes sampled items, or windows, from the parts that they come from.

        Rows of parts that remove no items are dropped, as are stale, invalid and masked rows.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            mask: A mask of the rows to remove, ``[B]``.

        Raises:
            ValueError: When traced, if no part has ``Removable``, or a shape differs.
        """
        return self._tell("remove", REMOVABLE, lambda part, own: part.remove(own, mask=mask), slots)

    @program()
    def holds(self, slots: Slots) -> Bool[Array, " B"]:
        """Returns whether sampled items, or windows, are still there, ``[B]``.

        Raises:
            ValueError: If no part is an ``ItemBuffer`` or a ``TrajectoryBuffer``.
        """
        return self._ask("holds", CONTENTS, slots, lambda part, own: part.holds(own))

    @program()
    def get(self, slots: Slots) -> Sample:
        """Returns items, or windows, by the slots of an earlier sample.

        Returns:
            A ``Sample`` with their present data. Rows whose item has left are invalid, with index
            ``capacity`` and probability 0. The ``probability`` of other rows is that within the
            part, times the part's ratio.

        Raises:
            ValueError: If no part is an ``ItemBuffer`` or a ``TrajectoryBuffer``.
        """

        def of_part(i: int) -> tuple[Bool[Array, " B"], Sample]:
            own = self.part_slots(slots, i)
            sample: Sample = operator.methodcaller("get", own)(self.parts[i])
            return own.index < self.parts[i].capacity, sample.replace(
                slots=self._numbered(i, sample.slots),
                probability=sample.probability * jnp.float32(self.ratios[i]),
            )

        return self._join("get", CONTENTS, of_part)

    @program()
    def slots_at(self, env_ids: Int[Array, "..."], positions: Integer[Array, "..."]) -> Slots:
        """Returns the slots of the windows that start at steps, the inverse of ``locate``.

        Args:
            env_ids: The environments of the steps, numbered as in ``locate``, of any shape that
                broadcasts with ``positions``.
            positions: The positions of the steps.

        Returns:
            Slots of the same shape, with index ``capacity`` where no window starts.

        Raises:
            ValueError: When traced, if no part is a ``TrajectoryBuffer``, or an argument does not
                hold integers.
        """
        env, position, shape = broadcast_steps(env_ids, positions)

        def of_part(i: int) -> tuple[Bool[Array, " B"], Slots]:
            number, count = env - self._first_env(i), as_buffer(self.parts[i]).num_envs
            own = (number >= 0) & (number < count)
            at = operator.methodcaller("slots_at", jnp.where(own, number, count), position)
            return own, self._numbered(i, at(self.parts[i]))

        found = self._join("slots_at", ENVIRONMENTS, of_part)
        return jax.tree.map(lambda leaf: leaf.reshape(shape), found)

    @program()
    def mark_used(self, slots: Slots, *, mask: Bool[Array, " B"] | None = None) -> Self:
        """Counts a use of each sampled item, in the part that it comes from.

        Rows of parts without ``Freshness`` are dropped, as are stale, invalid and masked rows.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            mask: A mask of the rows to use, ``[B]``.

        Raises:
            ValueError: When traced, if no part has ``Freshness``, or a shape differs.
        """
        return self._tell(
            "mark_used", FRESHNESS, lambda part, own: part.mark_used(own, mask=mask), slots
        )

    @program()
    def set_version(
        self, version: int | Int[Array, ""], session: int | Int[Array, ""] | None = None
    ) -> Self:
        """Sets the learner's version in all parts with ``Freshness``.

        Args:
            version: The learner's version, an integer; usually one more than before.
            session: The number of the learner's run. None keeps the present session.

        Raises:
            ValueError: When traced, if no part has ``Freshness``, or an argument is not an integer.
        """
        return self._tell("set_version", FRESHNESS, lambda part: part.set_version(version, session))

    def use_count(self, slots: Slots) -> Int[Array, " B"]:
        """Returns the number of uses of each sampled item, ``[B]``.

        Returns:
            Counts; 0 if the item has left, or its part has no ``Freshness``.

        Raises:
            ValueError: If no part has ``Freshness``.
        """
        return self._ask("use_count", FRESHNESS, slots, lambda part, own: part.use_count(own))

    def staleness(self, slots: Slots) -> Int[Array, " B"]:
        """Returns the staleness of each sampled item, ``[B]``.

        Returns:
            The staleness in versions; 0 if the item has left, or its part has no ``Freshness``.

        Raises:
            ValueError: If no part has ``Freshness``.
        """
        return self._ask("staleness", FRESHNESS, slots, lambda part, own: part.staleness(own))

    def locate(self, slots: Slots) -> tuple[Int[Array, " B"], UInt[Array, " B"]]:
        """Returns the environment of each sampled window, and the position of its first step.

        Both have shape ``[B]``. Environments are numbered through all parts: the environments of a
        part follow those of the parts before it. Rows that are invalid, or of a part without
        environments, get the total number of environments.

        Raises:
            ValueError: If no part is a ``TrajectoryBuffer``.
        """
        total = self.num_envs

        def of_part(i: int) -> tuple[Bool[Array, " B"], tuple[Array, Array]]:
            locate = operator.methodcaller("locate", self.part_slots(slots, i))
            env, position = locate(self.parts[i])
            own = env < as_buffer(self.parts[i]).num_envs
            return own, (jnp.where(own, env + self._first_env(i), total), position)

        return self._join("locate", ENVIRONMENTS, of_part)

    def get_field(
        self, path: str, env_ids: Int[Array, "..."], positions: Integer[Array, "..."]
    ) -> PyTree[Array]:
        """Reads one field of single steps, as ``TrajectoryBuffer.get_field`` does.

        Args:
            path: The name of the field, as for ``TrajectoryBuffer.get_field``.
            env_ids: The environments of the steps, numbered as in ``locate``, of any shape that
                broadcasts with ``positions``.
            positions: The positions of the steps.

        Returns:
            The field, leaves ``[..., *shape]``; zeros if a step is not held.

        Raises:
            ValueError: When traced, if no part is a ``TrajectoryBuffer``, there is no such field,
                or an argument does not hold integers.
        """
        return self._ask_of_steps(
            "get_field",
            ENVIRONMENTS,
            env_ids,
            positions,
            lambda part, *step: part.get_field(path, *step),
        )

    @program()
    def episode(self, where: Where, positions: Integer[Array, "..."] | None = None) -> Episode:
        """Returns what is known of the episodes of sampled windows, or of single steps.

        Args:
            where: As for ``TrajectoryBuffer.episode``. Environments are numbered as in ``locate``.
            positions: The positions of steps in these environments, with ``env_ids``.

        Returns:
            An ``Episode``. Rows of parts without ``Episodes`` get the same results as steps that
            are not held. Its ``value`` is None unless all parts with ``Episodes`` record returns.

        Raises:
            ValueError: If no part has ``Episodes``, or as raised by the parts.
        """
        asked = check_where(where, positions)
        if isinstance(asked, Slots):
            return self._ask("episode", EPISODES, asked, lambda part, own: part.episode(own))
        return self._ask_of_steps(
            "episode", EPISODES, *asked, lambda part, *step: part.episode(*step)
        )

    def episode_mask(
        self, slots: Slots, *, sequence_length: int | None = None
    ) -> Bool[Array, "B S"]:
        """Returns ``TrajectoryBuffer.episode_mask`` of each row's part.

        Raises:
            ValueError: If no part has ``Episodes``, or the ``boundary`` of one is ``"cross"``.
        """
        return self._ask(
            "episode_mask",
            EPISODES,
            slots,
            lambda part, own: part.episode_mask(own, sequence_length=sequence_length),
        )

    @program()
    def end_episodes(self, envs: Int[Array, " K"] | Bool[Array, " E"] | None = None) -> Self:
        """Ends open episodes, in the parts with ``Episodes``; see ``TrajectoryBuffer``.

        Args:
            envs: The environments, numbered as in ``locate``: a mask of all of them, or numbers
                ``[K]``. None means all.

        Raises:
            ValueError: If no part has ``Episodes``, or, when traced, if ``envs`` is neither a mask
                nor numbers.
        """
        return self._change_episodes("end_episodes", envs)

    @program()
    def drop_newest_episode(self, envs: Int[Array, " K"] | Bool[Array, " E"] | None = None) -> Self:
        """Removes the newest episodes, in the parts with ``Episodes``; see ``TrajectoryBuffer``.

        Args:
            envs: The environments, as for ``end_episodes``.

        Raises:
            ValueError: If no part has ``Episodes``, or, when traced, if ``envs`` is neither a mask
                nor numbers.
        """
        return self._change_episodes("drop_newest_episode", envs)

    def _change_episodes(self, method: str, envs: object) -> Self:
        EPISODES.need(self, method)
        mask, parts = mask_of(envs, self.num_envs), list(self.parts)
        for i, part in enumerate(parts):
            if EPISODES.has(part):
                first, count = self._first_env(i), as_buffer(part).num_envs
                change = operator.methodcaller(method, mask[first : first + count])
                parts[i] = change(part)
        return self.replace(parts=tuple(parts))

    @program()
    def clear(self) -> Self:
        """Returns the mixture with all parts cleared."""
        return self.replace(parts=tuple(part.clear() for part in self.parts))

    @program()
    def support(self) -> Support:
        """Returns the number of items that can be drawn, and the least probability among them."""
        supports = [
            (_support_of(part), jnp.float32(ratio))
            for part, ratio in zip(self.parts, self.ratios, strict=True)
            if ratio > 0
        ]
        least = [
            jnp.where(support.count > 0, support.least_probability * ratio, jnp.inf)
            for support, ratio in supports
        ]
        lowest = jnp.min(jnp.stack(least), axis=0)
        return Support(
            _total([support.count for support, _ in supports]),
            jnp.where(jnp.isfinite(lowest), lowest, 0.0),
        )

    @program()
    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor.

        Returns:
            The total ``size``, and the metrics of each part, whose names are prefixed with the
            number of the part: ``0/size``, ``1/priority_max``.
        """
        found = {"size": self.size}
        for i, part in enumerate(self.parts):
            found |= {f"{i}/{name}": value for name, value in part.metrics().items()}
        return found

    dequeue, gather, gather_all, latest, sample_range = (
        absent(name, f"ask one of the parts: mixture.parts[i].{name}(...)")
        for name in ("dequeue", "gather", "gather_all", "latest", "sample_range")
    )

    def _tell(self, method: str, ability: Ability, tell: Function, *slots: Slots) -> Self:
        """Returns the mixture after applying ``tell`` to all parts that have the ability.

        Each part gets its own slots.
        """
        ability.need(self, method)
        parts = list(self.parts)
        for i, part in enumerate(parts):
            if ability.has(part):
                parts[i] = tell(part, *(self.part_slots(rows, i) for rows in slots))
        return self.replace(parts=tuple(parts))

    def _join(
        self,
        method: str,
        ability: Ability,
        ask: Callable[[int], tuple[Bool[Array, " B"], PyTree[Array]]],
    ) -> PyTree[Array]:
        """Joins the results of all parts that have the ability, each for its own rows.

        Rows of no part get the result of the first of these parts, which does not hold them.

        Args:
            method: The name of the method, for errors.
            ability: The ability that the method needs.
            ask: Returns a mask of the rows of a part, ``[B]``, and its results, ``[B, ...]``.
        """
        ability.need(self, method)
        answer: PyTree = None
        for i, part in enumerate(self.parts):
            if ability.has(part):
                own, said = ask(i)
                answer = said if answer is None else trees.choose(own, said, answer)
        return answer

    def _ask(self, method: str, ability: Ability, slots: Slots, ask: Function) -> PyTree[Array]:
        """Returns the results of the parts for sampled items."""

        def of_part(i: int) -> tuple[Bool[Array, " B"], PyTree[Array]]:
            own = self.part_slots(slots, i)
            return own.index < self.parts[i].capacity, ask(self.parts[i], own)

        return self._join(method, ability, of_part)

    def _ask_of_steps(
        self,
        method: str,
        ability: Ability,
        env_ids: object,
        positions: object,
        ask: Function,
    ) -> PyTree[Array]:
        """Returns the results of the parts for single steps, with ``locate``'s environments."""
        env, position, shape = broadcast_steps(env_ids, positions)

        def of_part(i: int) -> tuple[Bool[Array, " B"], PyTree[Array]]:
            number, count = env - self._first_env(i), as_buffer(self.parts[i]).num_envs
            own = (number >= 0) & (number < count)
            return own, ask(self.parts[i], jnp.where(own, number, count), position)

        answer = self._join(method, ability, of_part)
        return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), answer)

    def _first_env(self, part: int) -> int:
        """Returns the number of environments of the parts before this one."""
        return sum(as_buffer(before).num_envs for before in self.parts[:part])

    @property
    def _shares(self) -> list[int]:
        """The ratios in units of 2**-31, so that traced products with them are exact."""
        until = [round(sum(self.ratios[:i]) * 2**31) for i in range(len(self.ratios) + 1)]
        return [end - start for start, end in itertools.pairwise(until)]

    def _offset(self, part: int) -> int:
        """Returns the number of slots of the parts before this one."""
        return sum(before.capacity for before in self.parts[:part])

    def _check_part(self, part: Any) -> int:
        whole = isinstance(part, int | np.integer) and not isinstance(part, bool)
        if not whole or not 0 <= part < len(self.parts):
            raise ValueError(
                f"part is {part!r}; expected the number of one of the {len(self.parts)} parts, an "
                f"integer from 0 to {len(self.parts) - 1}"
            )
        return int(part)


def _largest_remainders(rows: Any, whole: Any, rest: Any) -> Any:
    """Rounds shares to integers, giving one row more to the parts with the largest remainders.

    Args:
        rows: The total number of rows.
        whole: The share of each part rounded down, ``[P]``; a NumPy or JAX array.
        rest: The remainders, unsigned in units of 2**-32, ``[P]``.

    Returns:
        The number of rows of each part, ``[P]``.
    """
    # Ratios are rounded, so remainders that should be equal may differ in their last bits.
    rest = ((rest >> 1) + 2**14) >> 15
    earlier = np.tri(len(rest), k=-1, dtype=bool)
    ahead = (rest[None] > rest[:, None]) | ((rest[None] == rest[:, None]) & earlier)
    return whole + (ahead.sum(axis=1) < rows - whole.sum()).astype(whole.dtype)


def _total(numbers: list[Array]) -> Int[Array, ""]:
    return jnp.sum(jnp.stack(numbers), axis=0, dtype=jnp.int32)


def _next_of(part: Any, key: PRNGKeyArray, rows: int) -> tuple[Any, Sample]:
    """Returns the next rows of a part, and the part after them."""
    return part.take(rows) if as_buffer(part).is_queue else part.next_batch(key, rows)


def _support_of(part: Any) -> Support:
    """Returns the support of a part. What is taken out of a queue is certain."""
    if not as_buffer(part).is_queue:
        return part.support()
    return Support(part.size, jnp.where(part.size > 0, 1.0, 0.0))


def _takes(part: object) -> bool:
    """Returns whether rows of a part, or of a part of it, are taken out."""
    known = as_buffer(part)
    return known.is_queue or any(_takes(inner) for inner in known.members)


def _check_whole(part: object, name: str) -> None:
    """Raises ValueError if a wrapper cannot be a part."""
    known = as_buffer(part)
    if not known.runs_in_programs:
        raise ValueError(
            f"{name} is {checks.kind_of(part)}, which cannot be sampled inside a program; make the "
            "mixture inside of it: Hosted.create(lambda: jaxbuf.Mixture.create(...))"
        )
    if not known.on_one_device:
        raise ValueError(
            f"{name} is {checks.kind_of(part)}, whose batches are split over devices; sample from "
            "it by itself, and join the batches"
        )


def _check_alike(parts: tuple[DrawnBuffer, ...]) -> None:
    """Raises ValueError if samples of the parts cannot be concatenated to one batch."""

    def row_of(part: Any) -> PyTree:
        def draw(key: PRNGKeyArray) -> PyTree[Array]:
            batch = _next_of(part, key, 1)[1] if _takes(part) else part.sample(key, 1)
            return batch.data

        return jax.eval_shape(draw, jax.random.key(0))

    rows = [row_of(part) for part in parts]
    first = jax.tree_util.tree_leaves_with_path(rows[0])
    for i, other in enumerate(rows[1:], start=1):
        if jax.tree.structure(other) != jax.tree.structure(rows[0]):
            raise ValueError(
                f"samples of buffers[{i}] have another structure than those of buffers[0]: "
                f"{jax.tree.structure(other)}, not {jax.tree.structure(rows[0])}"
            )
        for (path, want), got in zip(first, jax.tree.leaves(other), strict=True):
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                name = "data" + jax.tree_util.keystr(path)
                raise ValueError(
                    f"{name} of samples of buffers[{i}] is {got.dtype}{list(got.shape[1:])}, but "
                    f"{want.dtype}{list(want.shape[1:])} of those of buffers[0]"
                )
