"""What an ``ItemBuffer`` and a ``TrajectoryBuffer`` have in common: slots that are drawn from."""

import abc
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt

from jaxbuf.buffers import common, retire
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import counters, sizes, trees
from jaxbuf.core.calls import call
from jaxbuf.core.slots import Slots
from jaxbuf.strategies.diversity import Diversity, DiversityState
from jaxbuf.strategies.episodes import Episodes
from jaxbuf.strategies.freshness import Freshness, FreshnessState
from jaxbuf.strategies.part import Part, Rows
from jaxbuf.strategies.protocols import Draw, Sampler, Support

SomePart = TypeVar("SomePart", bound=Part)

_MISSING: dict[type[Part], str] = {
    Freshness: "nothing limits uses or staleness here; create the buffer with "
    "freshness=jaxbuf.Freshness(...)",
    Episodes: "episodes is None; create the buffer with episodes=jaxbuf.Episodes()",
}


class Body(struct.PyTreeNode):
    """A buffer whose slots hold items, or windows of steps, that a sampler draws.

    Attributes:
        data: The storage.
        occupancy: Which slots are live.
        sampler_state: What the sampler keeps.
        counters: What was added and refused so far, by name in ``counter_names``, ``[K]`` uint32;
            they wrap.
        extra_states: What each of the extras keeps.
        sampler: How items are drawn.
        extras: The parts beside the sampler, in the order in which they are asked.
    """

    data: PyTree[Array]
    occupancy: Any  # An Occupancy; each buffer says of which kind.
    sampler_state: Any
    counters: UInt[Array, " K"]
    extra_states: tuple[Any, ...]
    sampler: Sampler = struct.field(pytree_node=False)
    extras: tuple[Part, ...] = struct.field(pytree_node=False)

    @property
    @abc.abstractmethod
    def capacity(self) -> int:
        """Most items, or steps, held at a time."""

    @property
    @abc.abstractmethod
    def size(self) -> Int[Array, ""]:
        """Items, or steps, held now."""

    @abc.abstractmethod
    def _read(self, index: Int[Array, " B"]) -> PyTree[Array]:
        """What the slots at ``index`` hold, leaves ``[B, ...]``."""

    @property
    def counter_names(self) -> tuple[str, ...]:
        """The names of ``counters``: rows added, rows rejected, and other reasons to refuse one."""
        return counter_names(self.extras)

    @property
    def freshness(self) -> Freshness | None:
        """When items retire; None never."""
        return self._find(Freshness)[0]

    @property
    def freshness_state(self) -> FreshnessState:
        """What is known of uses and versions; nothing without limits on them."""
        return self._find(Freshness)[1]

    @property
    def diversity(self) -> Diversity | None:
        """Which new items are different enough to enter; None takes all."""
        return self._find(Diversity)[0]

    @property
    def diversity_state(self) -> DiversityState:
        """What the diversity filter keeps; nothing without one."""
        return self._find(Diversity)[1]

    def next_batch(self, key: PRNGKeyArray, batch_size: int) -> tuple[Self, Sample]:
        """Draw the next batch of a pass over the buffer, with the sampler ``Shuffled``.

        With another sampler the batch is that of ``sample``, and the buffer stays as it is.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``; static.

        Returns:
            The buffer to go on with, which knows which items, or windows, were given in this pass,
            and a ``Sample``. Where the pass has fewer left, the rows after them are invalid.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, or ``key`` not a single
                key.
        """
        rows = common.check_batch_size(batch_size)
        common.check_key(key)
        self = common.check_single(self)
        return call(Body._next_batch, self, key, rows, static=(2,))

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
        """Draw a batch from a range of ages, whatever the sampler.

        A ``TrajectoryBuffer`` draws windows, from the same range of ages of every ring.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``; static.
            start: The first item of the range, counted like the start of a slice of a list of the
                items from the oldest to the newest: ``-10`` means the last ten. May be traced.
            stop: The end of the range, counted in the same way.
            by_priority: Draw the items of the range with the sampler's own probabilities, relative
                to each other, instead of all with the same chance; static. Uniform where all of
                these are 0. It costs a pass over all slots.
            replacement: Whether a batch may hold an item twice; static.

        Returns:
            A ``Sample`` in order of age, ring by ring. By default its items are different and
            evenly spread over the range: each with the same chance, one from each of ``B`` parts of
            it. If the range holds no more than ``B`` items (by priority: items with a probability
            above 0), these are all of them, and the other rows are invalid. With replacement rows
            are independent of each other, or by priority one from each of ``B`` equal parts of the
            probability, and they are invalid only if the range is empty. ``probability`` is that of
            a single draw from the range.

        Raises:
            ValueError: If the evictor keeps no order of time, ``batch_size`` is not an integer of
                at least 1, a flag is neither True nor False, or ``by_priority`` is True and the
                sampler has no priorities.

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
        self = common.check_single(self)
        flags = {"by_priority": by_priority, "replacement": replacement}
        rows, bounds = common.check_range(self, key, batch_size, start, stop, flags)
        return call(Body._picked, self, key, rows, bounds, *flags.values(), static=(2, 4, 5))

    def latest(self, n: int) -> Sample:
        """The ``n`` newest items, or the ``n`` newest windows of every ring.

        Args:
            n: How many, of each ring; static.

        Returns:
            A ``Sample`` with leaves ``[n, ...]``, or ``[num_envs * n, sequence_length, ...]``, ring
            by ring and the oldest first. If there are fewer, the last rows of a ring are invalid.

        Raises:
            ValueError: If the evictor keeps no order of time, or ``n`` is not an integer from 1 to
                the number of slots, of each ring.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4, sequence_length=2)
            >>> buffer = buffer.add(jnp.arange(12).reshape(2, 6))
            >>> buffer.latest(2).data.tolist()
            [[3, 4], [4, 5], [9, 10], [10, 11]]
        """
        self = common.check_single(self)
        common.needs_order(self.occupancy, "latest")
        return call(Body._newest, self, sizes.check_count("n", n), static=(1,))

    def update_priority(
        self,
        slots: Slots,
        priority: Float[Array, " B"],
        *,
        mask: Bool[Array, " B"] | None = None,
    ) -> Self:
        """Set the priorities of sampled items, or windows.

        Rows whose item has been overwritten since (of a window any step), invalid rows and masked
        ones are dropped. Of several rows for one item the last accepted one counts.

        Args:
            slots: Which items: ``sample.slots``, ``[B]``.
            priority: Their new priorities, ``[B]``; a NaN, negative or infinite one is refused and
                counted in ``metrics()["rejected"]``.
            mask: Which rows to take, ``[B]``.

        Raises:
            ValueError: When traced, if the sampler has no priorities, or a shape differs.
        """
        self = common.check_single(self)
        value, mask = common.check_update(self.sampler, slots, priority, mask)
        return call(Body._updated, self, slots, value, mask)

    def mark_used(self, slots: Slots, *, mask: Bool[Array, " B"] | None = None) -> Self:
        """Count a use of each sampled item, or window; those used ``max_use`` times retire.

        Args:
            slots: Which items: ``sample.slots``, ``[B]``. One that is there twice was used twice.
                Rows whose item has been overwritten or has retired since are dropped.
            mask: Which rows to take, ``[B]``.

        Raises:
            ValueError: When traced, if the buffer has no ``Freshness``, or a shape differs.
        """
        freshness, _ = self._need(Freshness, "mark_used was called, but ")
        return retire.mark_used(common.check_single(self), freshness, slots, mask)

    def set_version(
        self, version: int | Int[Array, ""], session: int | Int[Array, ""] | None = None
    ) -> Self:
        """The learner is at this version now: what has become too stale retires.

        Args:
            version: Its version, an integer that fits int32; usually one more than before.
            session: Which run of the learner this is, if that matters: when it is another one than
                before, versions start over, and everything that is here retires.

        Raises:
            ValueError: When traced, if the buffer has no ``Freshness``, or one of the two is not
                an integer that fits int32.
        """
        freshness, _ = self._need(Freshness, "set_version was called, but ")
        return retire.set_version(common.check_single(self), freshness, version, session)

    def use_count(self, slots: Slots) -> Int[Array, " B"]:
        """How often each sampled item was used so far, ``[B]``; 0 where it is not here any more.

        Raises:
            ValueError: If the buffer has no ``Freshness``.
        """
        self._need(Freshness, "use_count was called, but ")
        return retire.uses_and_staleness(self, slots)[0]

    def staleness(self, slots: Slots) -> Int[Array, " B"]:
        """How many versions each sampled item is behind, ``[B]``; 0 where it is not here any more.

        Raises:
            ValueError: If the buffer has no ``Freshness``.
        """
        self._need(Freshness, "staleness was called, but ")
        return retire.uses_and_staleness(self, slots)[1]

    def support(self) -> Support:
        """How many items, or windows, can be drawn, and the least probability among them."""
        return call(Body._supported, trees.on_device(self))

    def _supported(self) -> Support:
        return self.sampler.support(lax.stop_gradient(self.sampler_state), self.occupancy)

    def metrics(self) -> dict[str, Array]:
        """Numbers worth watching, all scalars: one pass over the slots, for logging.

        Returns:
            ``size``, and of a ``TrajectoryBuffer``, whose size is in steps, the ``windows`` that
            can be drawn; ``adds`` and ``rejected``, counted since creation and wrapping at 2**32;
            ``effective_sample_size`` (of the distribution drawn from, ``1 / Σ P²``); with
            priorities ``priority_min``, ``priority_max`` and ``priority_mean`` of the live items,
            as their masses tell them; with scores ``score_min``, ``score_max`` and ``score_mean``.

            With a diversity filter how many rows it refused, ``refused_low_score``,
            ``refused_within_batch`` and ``refused_near_buffer``. With limits on freshness the
            learner's ``version``, how many rows were ``refused_stale`` and how many items
            ``retired_used`` and ``retired_stale``, and of the live items ``use_max``,
            ``use_mean``, ``staleness_max`` and ``staleness_mean``. With episodes that are avoided
            how many windows were ``refused_across_episodes``. With parts of your own what they
            count and tell.
        """
        return call(Body._told, trees.on_device(self))

    def _told(self) -> dict[str, Array]:
        found = {
            **self._sizes(),
            **counters.named(self.counter_names, self.counters),
            **self.occupancy.metrics(),
            **self.sampler.metrics(lax.stop_gradient(self.sampler_state), self.occupancy),
        }
        for part, state in self._parts():
            found |= part.metrics(state, self.occupancy)
        return found

    def options(self) -> dict[str, Any]:
        """The strategies that it was created with, as keyword arguments of ``create``."""
        return {
            "sampler": self.sampler,
            "freshness": self.freshness,
            "parts": tuple(part for part in self.extras if type(part) not in KEYWORDS),
        }

    def with_state(self, kind: type[Part], state: Any) -> Self:
        """The buffer with another state of the part of this kind."""
        states = [state if isinstance(part, kind) else before for part, before in self._parts()]
        return self.replace(extra_states=tuple(states))

    def _sizes(self) -> dict[str, Array]:
        return {"size": self.size}

    def _sample(self, key: PRNGKeyArray, batch_size: int) -> Sample:
        """What the sampler draws."""
        return call(Body._drawn, self, key, batch_size, static=(2,))

    def _drawn(self, key: PRNGKeyArray, batch_size: int) -> Sample:
        state = lax.stop_gradient(self.sampler_state)
        return self._gather(self.sampler.draw(state, key, batch_size, self.occupancy))

    def _next_batch(self, key: PRNGKeyArray, batch_size: int) -> tuple[Self, Sample]:
        state = lax.stop_gradient(self.sampler_state)
        state, draw = self.sampler.next(state, key, batch_size, self.occupancy)
        return self.replace(sampler_state=state), self._gather(draw)

    def _picked(
        self,
        key: PRNGKeyArray,
        batch_size: int,
        bounds: list[Int[Array, ""] | None],
        by_priority: bool,
        replacement: bool,
    ) -> Sample:
        flags = {"by_priority": by_priority, "replacement": replacement}
        return self._gather(common.pick(self, key, batch_size, bounds, **flags))

    def _newest(self, n: int) -> Sample:
        return self._gather(common.newest(self.occupancy, n))

    def _updated(
        self, slots: Slots, priority: Float[Array, " B"], mask: Bool[Array, " B"] | None
    ) -> Self:
        """Give sampled slots new priorities, but for the stale, masked and illegal ones."""
        taken = self.occupancy.holds(slots)
        if mask is not None:
            taken &= mask
        legal = self.sampler.accepts(priority)
        index = jnp.where(taken & legal, slots.index, self.capacity)
        state = lax.stop_gradient(self.sampler_state)
        rejected = jnp.sum(taken & ~legal, dtype=jnp.uint32)
        return self.replace(
            sampler_state=self.sampler.set_priority(state, index, priority),
            counters=self._counted({"rejected": rejected}),
        )

    def _gather(self, draw: Draw) -> Sample:
        """The items, or windows, that were drawn."""
        return common.gather(self.occupancy, draw, self.capacity, self._read)

    def _counted(self, counts: dict[str, Array]) -> UInt[Array, " K"]:
        """The counters with more in some of them."""
        return self.counters + counters.tally(self.counter_names, counts)

    def _parts(self) -> list[tuple[Part, Any]]:
        """The extras and what they keep; no gradient flows through that."""
        return list(zip(self.extras, lax.stop_gradient(self.extra_states), strict=True))

    def _tell(self, hear: Callable[[Part, Any], Any]) -> tuple[Any, ...]:
        """The states of all extras when each has heard of something."""
        return tuple(hear(part, state) for part, state in self._parts())

    def _find(self, kind: type[SomePart]) -> tuple[SomePart | None, Any]:
        """The part of this kind and its state; None, and nothing, without."""
        for part, state in zip(self.extras, self.extra_states, strict=True):
            if isinstance(part, kind):
                return part, state
        return None, ()

    def _need(self, kind: type[SomePart], what: str = "") -> tuple[SomePart, Any]:
        """The part of this kind and its state.

        Raises:
            ValueError: If there is none.
        """
        part, state = self._find(kind)
        if part is None:
            raise ValueError(what + _MISSING[kind])
        return part, state

    def _cleared(self, slots: int) -> Self:
        """The buffer when all have left its slots. Shares no array with the original."""
        return self.replace(
            data=jax.tree.map(jnp.zeros_like, self.data),
            occupancy=self.occupancy.clear(),
            sampler_state=self.sampler.init(slots),
            counters=self.counters.copy(),
            extra_states=self._tell(
                lambda part, state: part.on_clear(state, part.init(self.data, slots))
            ),
        )


# The parts that have an argument of their own.
KEYWORDS: dict[type[Part], str] = {
    Episodes: "episodes",
    Freshness: "freshness",
    Diversity: "diversity",
}


def counter_names(extras: tuple[Part, ...]) -> tuple[str, ...]:
    """The names under which a buffer with these parts counts rows."""
    reasons = [reason for part in extras for reason in part.reasons]
    return tuple(dict.fromkeys(["adds", "rejected", *reasons]))


def refuse(refused: dict[str, Bool[Array, "..."]], rows: Rows, counts: dict[str, Array]) -> Rows:
    """The rows without those that are refused, each of which counts under its first reason."""
    none: Array = jnp.uint32(0)
    for reason, mask in refused.items():
        hit = rows.taken & mask
        counts[reason] = counts.get(reason, none) + jnp.sum(hit, dtype=jnp.uint32)
        rows = rows.without(hit)
    return rows
