"""One batch from several buffers."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt

from jaxbuf.buffers import common
from jaxbuf.buffers.lookups import broadcast_steps
from jaxbuf.buffers.options import check_options
from jaxbuf.buffers.parts import (
    ENVIRONMENTS,
    EPISODES,
    FRESHNESS,
    PRIORITIES,
    Ability,
    choose,
    num_envs,
)
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import checks, describe, storage
from jaxbuf.core.random import scale_word
from jaxbuf.core.slots import Slots
from jaxbuf.strategies.protocols import Support


@dataclasses.dataclass(frozen=True)
class _Contents:
    """How many items all parts hold: what importance weights are relative to."""

    size: Int[Array, ""]


class Mixture(struct.PyTreeNode):
    """Several buffers, sampled together at a fixed ratio: offline and online data, say.

    A batch holds an exact number of rows from each part, first those of the first part. Slots know
    their buffer: a part's slots come after all those of the parts before it, so that
    ``update_priority`` reaches the right one. ``probability`` is that of a row of the mixture: the
    part's share of the batch, times what the part says. So ``importance_weights`` are relative to
    drawing uniformly from all items of all parts, whatever their samplers.

    A part that holds nothing gives rows that are not valid; the rows of the others stay as they
    are, so that shapes and the numbers from each part never depend on what is in them. Ask
    ``can_sample`` first.

    It is one immutable pytree, as its parts are, and works with ``jaxbuf.sample``,
    ``jaxbuf.update_priority`` and ``jaxbuf.importance_weights``. It may be a part itself.

    Parts need not be alike: ``mark_used`` and ``set_version`` reach those with ``Freshness``, and
    lookups such as ``locate`` and ``steps_to_episode_end`` are answered for each row by the part it
    is from. ``part_slots`` names the rows of one part for its own methods.

    Attributes:
        parts: The buffers.
        ratios: The share of each in a batch; they sum to 1.

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

    parts: tuple[Any, ...]
    ratios: tuple[float, ...] = struct.field(pytree_node=False)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(cls, buffers: Sequence[Any], ratios: Sequence[float]) -> Self:
        """A mixture of buffers.

        Args:
            buffers: The parts, whose samples have the same structure, shapes and dtypes.
            ratios: How many rows each gives, relative to the others.

        Raises:
            ValueError: If there are no buffers or not as many ratios, a ratio is negative or not
                finite, all are zero, samples of the parts do not fit together, two parts share
                memory, or there are 2**31 slots or more.
        """
        parts, weights = _sequence("buffers", buffers, "buffers"), _check_ratios(ratios)
        if not parts or len(parts) != len(weights):
            raise ValueError(
                f"there are {len(parts)} buffers and {len(weights)} ratios; expected one ratio for "
                "each of one buffer or more"
            )
        for i, part in enumerate(parts):
            check_options(part, "sample", {}, f"buffers[{i}]")
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
    def capacity(self) -> int:
        """Slots of all parts together."""
        return sum(part.capacity for part in self.parts)

    @property
    def size(self) -> Int[Array, ""]:
        """What the parts hold now, in all."""
        return _total([part.size for part in self.parts])

    @property
    def occupancy(self) -> Any:
        """How many items can be told apart, as ``occupancy.size``."""
        return _Contents(_total([part.occupancy.size for part in self.parts]))

    def counts(self, batch_size: int) -> tuple[int, ...]:
        """How many rows of a batch come from each part.

        Whole shares first; rows that are left go to the parts with the largest remainders, of equal
        ones to the first.
        """
        rows = common.check_batch_size(batch_size)
        product = np.uint64(2 * rows) * np.asarray(self._shares, np.uint64)
        whole, rest = product >> 32, product & np.uint64(2**32 - 1)
        counts = _largest_remainders(rows, whole.astype(np.int64), rest)
        return tuple(int(count) for count in counts)

    def can_sample(self, batch_size: int | Int[Array, ""] = 1) -> Bool[Array, ""]:
        """Whether every part with a share holds as many items as its rows, and at least one.

        Args:
            batch_size: Rows ``B``; may be traced.
        """
        if isinstance(batch_size, int | np.integer):
            counts: Any = [max(count, 1) for count in self.counts(batch_size)]
        else:
            rows = storage.check_rows(batch_size, "batch_size", (), np.int32, "a number")
            doubled = jnp.broadcast_to(2 * jnp.maximum(rows, 0).astype(jnp.uint32), len(self.parts))
            shares = jnp.asarray(self._shares, jnp.uint32)
            # The high and the low half of the product.
            whole, rest = scale_word(doubled, shares).astype(jnp.int32), doubled * shares
            counts = jnp.maximum(_largest_remainders(rows, whole, rest), 1)
        able = [
            part.can_sample(counts[i])
            for i, (part, ratio) in enumerate(zip(self.parts, self.ratios, strict=True))
            if ratio > 0
        ]
        return jnp.all(jnp.stack(able), axis=0)

    def add(self, items: PyTree[Array], *, part: int | None = None, **options: Any) -> Self:
        """Add to one of the parts.

        Args:
            items: What to add.
            part: To which part; static.
            **options: Those of the part's own ``add``.

        Raises:
            ValueError: If ``part`` is no part, if the part does not take one of the options, or as
                the part's ``add``.
        """
        i = self._check_part(part)
        check_options(self.parts[i], "add", options)
        return self.replace_part(i, self.parts[i].add(items, **options))

    def replace_part(self, part: int, buffer: Any) -> Self:
        """The mixture with another state of one part.

        Raises:
            ValueError: If ``part`` is no part, or ``buffer`` is not built as the one that was
                there.
        """
        i = self._check_part(part)
        if jax.tree.structure(buffer) != jax.tree.structure(self.parts[i]):
            raise ValueError(f"buffer is not built like parts[{i}]; create another mixture for it")
        return self.replace(parts=(*self.parts[:i], buffer, *self.parts[i + 1 :]))

    def sample(self, key: PRNGKeyArray, batch_size: int, **options: Any) -> Sample:
        """Draw a batch, an exact number of rows from each part.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``; static.
            **options: Those of the parts' own ``sample``, the same for all of them.

        Returns:
            A ``Sample``; rows that a part cannot give are invalid, have probability 0 and index
            ``capacity``.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, ``key`` not a single
                key, or a part does not take one of the options.
        """
        rows = common.check_batch_size(batch_size)
        common.check_key(key)
        for part in self.parts:
            check_options(part, "sample", options)
        keys = jax.random.split(key, len(self.parts))
        drawn: list[Sample] = []
        for i, count in enumerate(self.counts(rows)):
            if count > 0:
                sample = self.parts[i].sample(keys[i], count, **options)
                index = jnp.where(sample.valid, sample.slots.index + self._offset(i), self.capacity)
                drawn.append(
                    sample.replace(
                        slots=sample.slots.replace(index=index),
                        probability=sample.probability * jnp.float32(count / rows),
                    )
                )
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *drawn)

    def part_of(self, slots: Slots) -> Int[Array, " B"]:
        """Which part each row is from, ``[B]``; the number of parts where it is not valid."""
        common.check_slots(slots)
        ends = [self._offset(i + 1) for i in range(len(self.parts))]
        at_or_after = slots.index[:, None] >= jnp.asarray(ends, jnp.int32)[None]
        return jnp.sum(at_or_after, axis=1, dtype=jnp.int32)

    def part_slots(self, slots: Slots, part: int) -> Slots:
        """The slots of one part, as that part itself names them.

        Args:
            slots: Slots of the mixture: ``sample.slots``, ``[B]``.
            part: Which part; static.

        Returns:
            Slots for the part's own methods, ``[B]``. Rows that are from another part have index
            ``parts[part].capacity``, as rows that are not valid have, and are dropped there.

        Raises:
            ValueError: If ``part`` is no part, or ``slots`` are none.

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
        common.check_slots(slots)
        i = self._check_part(part)
        index, capacity = slots.index - self._offset(i), self.parts[i].capacity
        own = (index >= 0) & (index < capacity)
        return slots.replace(index=jnp.where(own, index, capacity))

    def update_priority(
        self,
        slots: Slots,
        priority: Float[Array, " B"],
        *,
        mask: Bool[Array, " B"] | None = None,
    ) -> Self:
        """Set the priorities of sampled items, each in the part it is from.

        Rows from parts without priorities are dropped, as are stale, invalid and masked ones.

        Args:
            slots: Which items: ``sample.slots``, ``[B]``.
            priority: Their new priorities, ``[B]``; one that is not legal is refused and counted by
                the part.
            mask: Which rows to take, ``[B]``.

        Raises:
            ValueError: When traced, if no part has priorities, or a shape differs.
        """
        return self._tell(
            "update_priority",
            PRIORITIES,
            lambda part, own: part.update_priority(own, priority, mask=mask),
            slots,
        )

    def mark_used(self, slots: Slots, *, mask: Bool[Array, " B"] | None = None) -> Self:
        """Count a use of each sampled item, in the part it is from.

        Rows from parts without ``Freshness`` are dropped, as are stale, invalid and masked ones.

        Args:
            slots: Which items: ``sample.slots``, ``[B]``.
            mask: Which rows to take, ``[B]``.

        Raises:
            ValueError: When traced, if no part has ``Freshness``, or a shape differs.
        """
        return self._tell(
            "mark_used", FRESHNESS, lambda part, own: part.mark_used(own, mask=mask), slots
        )

    def set_version(
        self, version: int | Int[Array, ""], session: int | Int[Array, ""] | None = None
    ) -> Self:
        """The learner is at this version now, for all parts with ``Freshness``.

        Args:
            version: Its version, an integer; usually one more than before.
            session: Which run of the learner this is, if that matters.

        Raises:
            ValueError: When traced, if no part has ``Freshness``, or a number is not an integer.
        """
        return self._tell("set_version", FRESHNESS, lambda part: part.set_version(version, session))

    def use_count(self, slots: Slots) -> Int[Array, " B"]:
        """How often each sampled item was used so far, ``[B]``.

        Returns:
            Counts; 0 where the item is not here any more, or its part has no ``Freshness``.

        Raises:
            ValueError: If no part has ``Freshness``.
        """
        return self._ask("use_count", FRESHNESS, slots, lambda part, own: part.use_count(own))

    def staleness(self, slots: Slots) -> Int[Array, " B"]:
        """How many versions each sampled item is behind, ``[B]``.

        Returns:
            Versions; 0 where the item is not here any more, or its part has no ``Freshness``.

        Raises:
            ValueError: If no part has ``Freshness``.
        """
        return self._ask("staleness", FRESHNESS, slots, lambda part, own: part.staleness(own))

    def locate(self, slots: Slots) -> tuple[Int[Array, " B"], UInt[Array, " B"]]:
        """The environment of each sampled window, and the position of its first step, ``[B]``.

        Environments are numbered through all parts: those of a part come after all those of the
        ``TrajectoryBuffer``s before it. Of rows that are not valid, or from a part without
        environments, it is the number of all environments.

        Raises:
            ValueError: If no part is a ``TrajectoryBuffer``.
        """
        total = num_envs(self)

        def of_part(i: int) -> tuple[Bool[Array, " B"], tuple[Array, Array]]:
            env, position = self.parts[i].locate(self.part_slots(slots, i))
            own = env < num_envs(self.parts[i])
            return own, (jnp.where(own, env + self._first_env(i), total), position)

        return self._join("locate", ENVIRONMENTS, of_part)

    def get_field(
        self, path: str, env_ids: Int[Array, "..."], positions: UInt[Array, "..."]
    ) -> PyTree[Array]:
        """Read one field of single steps, wherever ``locate`` says that they are.

        Args:
            path: Its name, as for ``TrajectoryBuffer.get_field``.
            env_ids: Whose steps, as ``locate`` numbers them, of any shape that broadcasts with
                ``positions``.
            positions: Which steps.

        Returns:
            The field, leaves ``[..., *shape]``; zeros where the step is not held.

        Raises:
            ValueError: When traced, if no part is a ``TrajectoryBuffer``, there is no such field,
                or a number is not an integer.
        """
        return self._ask_of_steps(
            "get_field",
            ENVIRONMENTS,
            env_ids,
            positions,
            lambda part, *step: part.get_field(path, *step),
        )

    def episode_begin_position(
        self,
        where: Slots | Int[Array, "..."],
        positions: Int[Array, "..."] | None = None,
        *,
        held: bool = False,
    ) -> UInt[Array, "..."]:
        """As ``TrajectoryBuffer.episode_begin_position``, each row by the part it is from.

        This and all other lookups of episodes take ``slots``, or ``env_ids`` and ``positions`` as
        ``locate`` numbers them. Rows from parts without ``Episodes`` get what steps get that are
        not held.

        Raises:
            ValueError: If no part has ``Episodes``.
        """
        return self._look_up("episode_begin_position", where, positions, held=held)

    def last_terminated_position(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> UInt[Array, "..."]:
        """As ``TrajectoryBuffer.last_terminated_position``, each row by the part it is from.

        Raises:
            ValueError: If no part has ``Episodes``.
        """
        return self._look_up("last_terminated_position", where, positions)

    def steps_to_episode_end(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> Int[Array, "..."]:
        """As ``TrajectoryBuffer.steps_to_episode_end``, each row by the part it is from.

        Raises:
            ValueError: If no part has ``Episodes``.
        """
        return self._look_up("steps_to_episode_end", where, positions)

    def is_episode_first(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> Bool[Array, "..."]:
        """As ``TrajectoryBuffer.is_episode_first``, each row by the part it is from.

        Raises:
            ValueError: If no part has ``Episodes``.
        """
        return self._look_up("is_episode_first", where, positions)

    def is_episode_last(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> Bool[Array, "..."]:
        """As ``TrajectoryBuffer.is_episode_last``, each row by the part it is from.

        Raises:
            ValueError: If no part has ``Episodes``.
        """
        return self._look_up("is_episode_last", where, positions)

    def episode_return(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> Float[Array, "..."]:
        """As ``TrajectoryBuffer.episode_return``, each row by the part it is from.

        Raises:
            ValueError: If no part has ``Episodes``, or one of them records no returns.
        """
        return self._look_up("episode_return", where, positions)

    def episode_mask(
        self, slots: Slots, *, sequence_length: int | None = None
    ) -> Bool[Array, "B S"]:
        """As ``TrajectoryBuffer.episode_mask``, each row by the part it is from.

        Raises:
            ValueError: If no part has ``Episodes``, or the ``boundary`` of one is ``"cross"``.
        """
        return self._ask(
            "episode_mask",
            EPISODES,
            slots,
            lambda part, own: part.episode_mask(own, sequence_length=sequence_length),
        )

    def clear(self) -> Self:
        """The mixture with nothing in its parts."""
        return self.replace(parts=tuple(part.clear() for part in self.parts))

    def support(self) -> Support:
        """How many items can be drawn, and the least probability among them."""
        supports = [
            (part.support(), jnp.float32(ratio))
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

    def metrics(self) -> dict[str, Array]:
        """Numbers worth watching, all scalars.

        Returns:
            ``size`` of all, and those of each part with its number before their names:
            ``0/size``, ``1/priority_max``.
        """
        found = {"size": self.size}
        for i, part in enumerate(self.parts):
            found |= {f"{i}/{name}": value for name, value in part.metrics().items()}
        return found

    def _tell(self, method: str, ability: Ability, tell: Callable[..., Any], *slots: Slots) -> Self:
        """The mixture once all parts that can were told something, with slots of their own."""
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
        """What all parts that can say of rows, each of its own.

        Of rows that are nobody's it is what the first of them says, which does not hold them.

        Args:
            method: What was called.
            ability: What it takes.
            ask: Gives which rows are those of a part, ``[B]``, and what it says, ``[B, ...]``.
        """
        ability.need(self, method)
        answer: Any = None
        for i, part in enumerate(self.parts):
            if ability.has(part):
                own, said = ask(i)
                answer = said if answer is None else choose(own, said, answer)
        return answer

    def _ask(
        self, method: str, ability: Ability, slots: Slots, ask: Callable[[Any, Slots], PyTree]
    ) -> PyTree[Array]:
        """What the parts say of sampled items."""

        def of_part(i: int) -> tuple[Bool[Array, " B"], PyTree[Array]]:
            own = self.part_slots(slots, i)
            return own.index < self.parts[i].capacity, ask(self.parts[i], own)

        return self._join(method, ability, of_part)

    def _ask_of_steps(
        self,
        method: str,
        ability: Ability,
        env_ids: Any,
        positions: Any,
        ask: Callable[[Any, Array, Array], PyTree[Array]],
    ) -> PyTree[Array]:
        """What the parts say of single steps of environments, as ``locate`` numbers these."""
        env, position, shape = broadcast_steps(env_ids, positions)

        def of_part(i: int) -> tuple[Bool[Array, " B"], PyTree[Array]]:
            number, count = env - self._first_env(i), num_envs(self.parts[i])
            own = (number >= 0) & (number < count)
            return own, ask(self.parts[i], jnp.where(own, number, count), position)

        answer = self._join(method, ability, of_part)
        return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), answer)

    def _look_up(self, method: str, where: Any, positions: Any, **options: Any) -> Array:
        """What the parts say of the episodes of sampled windows, or of single steps."""
        if isinstance(where, Slots):
            return self._ask(
                method,
                EPISODES,
                where,
                lambda part, own: getattr(part, method)(own, positions, **options),
            )
        if positions is None:
            raise ValueError("positions is None; give env_ids and positions, or slots")
        return self._ask_of_steps(
            method,
            EPISODES,
            where,
            positions,
            lambda part, env, position: getattr(part, method)(env, position, **options),
        )

    def _first_env(self, part: int) -> int:
        """The environments of the parts before it."""
        return sum(num_envs(before) for before in self.parts[:part])

    @property
    def _shares(self) -> list[int]:
        """The ratios in units of 2**-31, as which they can be multiplied exactly when traced."""
        until = [round(sum(self.ratios[:i]) * 2**31) for i in range(len(self.ratios) + 1)]
        return [end - start for start, end in itertools.pairwise(until)]

    def _offset(self, part: int) -> int:
        """The slots of the parts before it."""
        return sum(before.capacity for before in self.parts[:part])

    def _check_part(self, part: Any) -> int:
        whole = isinstance(part, int | np.integer) and not isinstance(part, bool)
        if not whole or not 0 <= part < len(self.parts):
            raise ValueError(
                f"part is {part!r}; expected the number of one of the {len(self.parts)} parts, an "
                f"integer from 0 to {len(self.parts) - 1}"
            )
        return int(part)


def _check_ratios(ratios: Any) -> tuple[float, ...]:
    """The ratios as Python floats."""
    return tuple(
        checks.check_number(
            f"ratios[{i}]", ratio, "a finite number of at least 0", lambda x: 0 <= x < math.inf
        )
        for i, ratio in enumerate(_sequence("ratios", ratios, "numbers"))
    )


def _sequence(name: str, values: Any, what: str) -> tuple[Any, ...]:
    """Several things, in a list or anything else that has an order and a length."""
    array = isinstance(values, np.ndarray | jax.Array) and values.ndim == 1
    if not array and (not isinstance(values, Sequence) or isinstance(values, str | bytes)):
        raise ValueError(f"{name} is {checks.name_of(values)}; expected a list of {what}")
    return tuple(values)


def _largest_remainders(rows: Any, whole: Any, rest: Any) -> Any:
    """Whole shares, and one row more for the parts with the largest remainders.

    Args:
        rows: Rows in all.
        whole: Whole shares of each part, ``[P]``: an array of NumPy's or of JAX's.
        rest: The remainders, unsigned in units of 2**-32, ``[P]``.

    Returns:
        Rows of each part, ``[P]``.
    """
    # Ratios are rounded, so equal remainders may differ in their last bits.
    rest = ((rest >> 1) + 2**14) >> 15
    earlier = np.tri(len(rest), k=-1, dtype=bool)
    ahead = (rest[None] > rest[:, None]) | ((rest[None] == rest[:, None]) & earlier)
    return whole + (ahead.sum(axis=1) < rows - whole.sum()).astype(whole.dtype)


def _total(numbers: list[Array]) -> Int[Array, ""]:
    return jnp.sum(jnp.stack(numbers), axis=0, dtype=jnp.int32)


def _check_alike(parts: tuple[Any, ...]) -> None:
    """Refuse parts whose samples cannot be put into one batch."""
    rows = [
        jax.eval_shape(lambda key, part=part: part.sample(key, 1).data, jax.random.key(0))
        for part in parts
    ]
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
