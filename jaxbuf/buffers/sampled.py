"""The common base of ``ItemBuffer`` and ``TrajectoryBuffer``: slots that a sampler draws."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, UInt

from jaxbuf.buffers import draws, events, hyperparameters, retire, write_back
from jaxbuf.buffers.arguments import (
    check_batch_size,
    check_mask,
    check_numbers,
    check_sampler,
    check_slots,
    check_version,
    needs_order,
    needs_priority,
)
from jaxbuf.buffers.base import SampledBase
from jaxbuf.buffers.buffer import By
from jaxbuf.buffers.sample import Normalization, Sample, Within, weighed
from jaxbuf.buffers.slotted import SlottedBuffer
from jaxbuf.core import checks, counters, fields, sizes, storage, trees
from jaxbuf.core.hyperparameters import are_legal, bind, check_values, filled, split
from jaxbuf.core.random import check_key
from jaxbuf.core.slots import Slots
from jaxbuf.core.sorting import keep_last
from jaxbuf.core.types import (
    Arrays,
    Count,
    Flag,
    Function,
    Index,
    Integers,
    Key,
    Mask,
    Number,
    State,
    Words,
)
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.diversity import Diversity
from jaxbuf.strategies.episodes import Episodes
from jaxbuf.strategies.freshness import Freshness
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.part import Part
from jaxbuf.strategies.protocols import Draw, Sampler, Support

AnyBuffer = TypeVar("AnyBuffer", bound="SampledBuffer")


class SampledBuffer(SlottedBuffer, SampledBase):
    """A buffer with slots for items, or for windows of steps, that a sampler draws."""

    draws_some = True

    @staticmethod
    @abc.abstractmethod
    def check_fit(sampler: Sampler, extras: tuple[Part, ...], occupancy: Occupancy) -> None:
        """Checks that a sampler fits the other strategies of a buffer.

        Raises:
            ValueError: If it does not.
        """

    @classmethod
    def _empty(
        cls,
        sampler: Sampler,
        extras: tuple[Part, ...],
        data: Arrays,
        occupancy: Occupancy,
        **others: Any,
    ) -> Self:
        """Returns an empty buffer of these fields, after checks that they fit each other.

        If a part removes items, the occupancy becomes a ``Subset``.
        """
        num_slots = occupancy.num_slots
        if any(part.removes for part in extras):
            occupancy = Subset.create(occupancy, num_slots)
        cls.check_fit(sampler, extras, occupancy)
        sampler, values, legal = split(sampler)
        buffer = cls(
            data=data,
            occupancy=occupancy,
            sampler_state=bind(sampler, values).init(num_slots),
            counters=counters.tally(counter_names(extras), {"rejected": ~legal}),
            extra_states=init_states(extras, data, occupancy.places),
            sampler=sampler,
            extras=extras,
            hyperparameters=values,
            **others,
        )
        return check_metric_names(buffer)

    @property
    def counter_names(self) -> tuple[str, ...]:
        """The names of ``counters``: rows added, rows rejected, and other reasons to refuse one."""
        return counter_names(self.extras)

    @property
    def abilities(self) -> frozenset[str]:
        has = {
            "contents": True,
            "priorities": self.sampler.uses_priority,
            "scores": self.uses_score,
            "removal": self.lets_remove,
            "freshness": self.freshness is not None,
            "environments": self.num_envs > 0,
            "episodes": self.episodes is not None,
        }
        return frozenset(name for name, able in has.items() if able)

    @property
    def compares_by(self) -> frozenset[str]:
        return frozenset(jax.eval_shape(lambda buffer: buffer._compared(), self))

    @property
    def uses_score(self) -> bool:
        """True if a strategy of this buffer uses scores, which ``update_score`` sets."""
        return bool(self.score_users)

    @property
    def freshness(self) -> Freshness | None:
        """The limits on uses and staleness; None without ``Freshness``."""
        return self.find_part(Freshness)[0]

    @property
    def diversity(self) -> Diversity | None:
        """The filter that admits only items that differ enough; None without it."""
        return self.find_part(Diversity)[0]

    @property
    def diversity_state(self) -> Any:
        """The state of ``diversity``; an empty tuple without it."""
        return self.find_part(Diversity)[1]

    def next_batch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        key: Key,
        batch_size: int,
        *,
        beta: float | Number | None = None,
        normalize: Normalization = ...,
        within: Within | None = None,
    ) -> tuple[Self, Sample]:
        rows = check_batch_size(batch_size)
        state = lax.stop_gradient(self.sampler_state)
        after, draw = self.bound_sampler.next(state, check_key(key), rows, self.occupancy)
        after = events.check_state(self.bound_sampler.next, state, after)
        batch = weighed(self, self.gather(draw), beta, normalize, within)
        return trees.updated(self, sampler_state=after), batch

    def sample_some(
        self, key: Key, batch_size: int, begin: Count, count: Count, **options: Any
    ) -> Sample:
        """Draws ``count`` rows of a batch, from the row ``begin`` on; the others are invalid.

        Args:
            key: A PRNG key.
            batch_size: The number of rows of the batch; static.
            begin: The first row.
            count: The number of rows; they have the law of a batch of just so many.
            **options: Options of ``sample``.
        """
        buffer = self._windows_of(**options)
        state = lax.stop_gradient(buffer.sampler_state)
        drawn = buffer.bound_sampler.draw_some(state, key, batch_size, count, buffer.occupancy)
        return buffer.gather(draws.placed(drawn, begin, count))

    def next_some(
        self, key: Key, batch_size: int, begin: Count, count: Count
    ) -> tuple[Self, Sample]:
        """Draws some rows of a next batch, as ``sample_some`` does, and tells the sampler."""
        if type(self.sampler).next is not Sampler.next:
            raise ValueError(
                f"the sampler of a part is {self.sampler}, and the ratios of the mixture vary: "
                "rows that were drawn beyond its share could not be given back; create the mixture "
                "with ratios that stay, or choose jaxbuf.Uniform(replacement=False)"
            )
        sampler, state = self.bound_sampler, lax.stop_gradient(self.sampler_state)
        drawn = sampler.draw_some(state, key, batch_size, count, self.occupancy)
        drawn = draws.placed(drawn, begin, count)
        index = jnp.where(drawn.valid, drawn.index, self.occupancy.capacity)
        state = events.notify(sampler.on_draw, state, index)
        return trees.updated(self, sampler_state=state), self.gather(drawn)

    def sample_range(
        self,
        key: Key,
        batch_size: int,
        start: int | Count | None = None,
        stop: int | Count | None = None,
        *,
        by_priority: bool = False,
        replacement: bool = False,
    ) -> Sample:
        flags = {"by_priority": by_priority, "replacement": replacement}
        rows, bounds = draws.check_range(self, key, batch_size, start, stop, flags)
        return self.gather(draws.draw_range(self, key, rows, bounds, **flags))

    def gather(self, draw: Draw) -> Sample:
        index, probability, valid = draws.check_draw(draw)
        slots, valid = self.occupancy.slots_of(index, valid, past_end=self.capacity)
        return Sample(
            data=self._read(slots.index),
            slots=slots,
            probability=draws.or_zero(probability, valid),
            valid=valid,
        )

    def latest(self, n: int) -> Sample:
        needs_order(self.occupancy, "latest")
        return self.gather(draws.draw_newest(self.occupancy, sizes.check_count("n", n)))

    def highest(self, n: int, by: By | None = None) -> Sample:
        return draws.highest(self, n, by)

    def best(self, n: int, by: By) -> tuple[Slots, Words]:
        occupancy = self.occupancy
        index, word = draws.best(occupancy, self._compared()[by], n)
        return Slots(jnp.where(word > 0, index, self.capacity), occupancy.generation(index)), word

    def update_priority(
        self,
        slots: Slots,
        priority: Float[ArrayLike, " B"],
        *,
        mask: Bool[ArrayLike, " B"] | None = None,
    ) -> Self:
        needs_priority(self.sampler, "update_priority was called")
        slots = check_slots(slots)
        shape = slots.index.shape
        value = check_numbers(priority, "priority", shape, "that of slots")
        mask = check_mask(mask, shape)
        sampler = self.bound_sampler
        legal = jnp.broadcast_to(sampler.accepts(value), mask.shape)
        index, rejected = self.occupancy.rows_to_change(slots, mask, legal)
        state = lax.stop_gradient(self.sampler_state)
        return trees.updated(
            self,
            sampler_state=events.notify(sampler.set_priority, state, index, value),
            counters=self._counted({"rejected": rejected}),
        )

    def set_field(
        self,
        path: str | None,
        slots: Slots,
        value: Arrays,
        *,
        mask: Bool[ArrayLike, "..."] | None = None,
    ) -> Self:
        slots = check_slots(slots)
        rows, steps = slots.index.shape[0], self.step_axes
        field = write_back.check_writable(self, path, every=False)
        value, _ = storage.check(field, value, "value", (rows, *steps))
        mask = check_mask(mask, (rows,), steps=steps)
        if rows == 0:
            return self
        index = jnp.where(self.occupancy.holds(slots), slots.index, self.num_slots)
        row = self.rows_of(index)  # [B], or [B, L] of windows
        if mask.ndim < row.ndim:
            mask = mask[:, None]  # [B, 1], for all steps of a window
        row = keep_last(jnp.where(mask, row, self.capacity), self.capacity)
        flat = jax.tree.map(lambda leaf: leaf.reshape(row.size, *leaf.shape[row.ndim :]), value)
        data = fields.replace(self.data, path, storage.write(field, flat, row.reshape(-1)))
        # Only items carry gradients.
        state, states = lax.stop_gradient((self.sampler_state, self.extra_states))
        if write_back.follows_writes(self.extras):
            states = write_back.notify_of_write(self, states, row, storage.read(data, row), path)
        return trees.updated(self, data=data, sampler_state=state, extra_states=states)

    def map_field(self, path: str | None, fn: Function, *, batch_size: int = 4096) -> Self:
        if not callable(fn):
            raise ValueError(f"fn is {checks.name_of(fn)}; expected a function of items [B, ...]")
        rows = min(sizes.check_count("batch_size", batch_size), self.capacity)
        write_back.check_writable(self, path, every=True)
        data, states = write_back.map_field(self, path, fn, rows)
        state, states = lax.stop_gradient((self.sampler_state, states))
        buffer = trees.updated(self, data=data, sampler_state=state, extra_states=states)
        return buffer._mapped(path)

    def update_score(
        self,
        slots: Slots,
        score: Float[ArrayLike, " B"],
        *,
        mask: Bool[ArrayLike, " B"] | None = None,
    ) -> Self:
        slots = check_slots(slots)
        write_back.check_scores(self)
        shape = slots.index.shape
        score = check_numbers(score, "score", shape, "that of slots")
        mask = check_mask(mask, shape)
        if shape[0] == 0:
            return self
        illegal = jnp.isnan(score)
        index, rejected = self.occupancy.rows_to_change(slots, mask, ~illegal)
        score = jnp.where(illegal, 0.0, score)
        state = lax.stop_gradient(self.sampler_state)
        # Samplers find the last of several rows for an item themselves, as in ``update_priority``.
        if self.sampler.uses_score:
            state = events.notify(self.bound_sampler.set_priority, state, index, score)
        index = keep_last(index, self.capacity)
        buffer = trees.updated(
            self,
            occupancy=self.occupancy.rescore(index, score),
            sampler_state=state,
            counters=self._counted({"rejected": rejected}),
        )
        return buffer._notify(lambda part: part.on_score, index, score)

    def remove(self, slots: Slots, *, mask: Bool[ArrayLike, " B"] | None = None) -> Self:
        slots = check_slots(slots)
        mask = check_mask(mask, slots.index.shape)
        if not self.lets_remove:
            raise ValueError(
                "remove was called, but nothing removes items here; create the buffer with "
                "parts=(jaxbuf.Removable(),)"
            )
        mask = self.occupancy.holds(slots) & mask
        changed, count = retire.remove(self, jnp.where(mask, slots.index, self.capacity))
        if "removed" not in self.counter_names:
            return changed
        return trees.updated(changed, counters=self._counted({"removed": count}))

    def holds(self, slots: Slots) -> Mask:
        slots = check_slots(slots)
        return self.occupancy.holds(slots)

    def get(self, slots: Slots) -> Sample:
        slots = check_slots(slots)
        live = self.occupancy.holds(slots)
        index = jnp.where(live, slots.index, self.num_slots)
        state = lax.stop_gradient(self.sampler_state)
        probability = self.bound_sampler.probability(state, index, self.occupancy)
        if probability is None:  # The sampler cannot tell.
            probability = jnp.zeros(index.shape, jnp.float32)
        return self.gather(Draw(index, probability, live))

    def mark_used(self, slots: Slots, *, mask: Bool[ArrayLike, " B"] | None = None) -> Self:
        if self.freshness is None:
            raise retire.lacking("mark_used")
        slots = check_slots(slots)
        mask = check_mask(mask, slots.index.shape)
        if slots.index.size == 0:
            return self
        return retire.on_use(self, slots, self.occupancy.holds(slots) & mask)

    def set_version(self, version: int | Count, session: int | Count | None = None) -> Self:
        if self.freshness is None:
            raise retire.lacking("set_version")
        return retire.on_version(self, *check_version(version, session))

    def use_count(self, slots: Slots) -> Integers:
        return retire.uses_and_staleness(self, slots, "use_count")[0]

    def staleness(self, slots: Slots) -> Integers:
        return retire.uses_and_staleness(self, slots, "staleness")[1]

    def support(self) -> Support:
        return self.bound_sampler.support(lax.stop_gradient(self.sampler_state), self.occupancy)

    def metrics(self) -> dict[str, Array]:
        metrics: dict[str, Array] = {}
        state = lax.stop_gradient(self.sampler_state)
        of_sampler = events.query(self.bound_sampler.metrics, state, self.occupancy)
        reports: list[tuple[object, dict[str, Array]]] = [
            ("the buffer", self._sizes()),
            ("a count of rows", counters.named(self.counter_names, self.counters)),
            # A sampler and an evictor that both use scores report the same metrics of these.
            (self.sampler, {**self.occupancy.metrics(), **of_sampler}),
            ("a number of the sampler", self.hyperparameter_metrics()),
        ]
        reports += [
            (part, events.query(part.metrics, state, self.occupancy))
            for part, state in self._extras_and_states()
        ]
        owners: dict[str, object] = {}
        for owner, values in reports:
            for name in values:
                if name in owners:
                    raise ValueError(
                        f"{name!r} is a metric of {owners[name]} and of {owner}; rename the reason "
                        "or the metric of your own part"
                    )
                owners[name] = owner
            metrics |= values
        return metrics

    def check_hyperparameters(self, arguments: dict[str, Any]) -> dict[str, Any]:
        named = dict(arguments)
        values = named.pop("values", None)
        return {"values": check_values(self.sampler, values, named)}

    def kept_by_hyperparameters(self, arguments: dict[str, Any]) -> tuple[str, ...]:
        del arguments
        notified = any(map(hyperparameters.is_notified, self.bound_sampler.leaf_samplers))
        return ("data", "occupancy", "extra_states", *(() if notified else ("sampler_state",)))

    def set_hyperparameters(
        self, values: Mapping[str, ArrayLike] | None = None, **options: ArrayLike
    ) -> Self:
        values = check_values(self.sampler, values, options)
        legal = self.are_legal(values)
        return self.with_values(values, legal).counting_illegal(legal, values)

    def are_legal(self, values: dict[str, Array]) -> Flag:
        return are_legal(self.sampler, values)

    def with_values(self, values: dict[str, Array], legal: Flag) -> Self:
        return hyperparameters.set_values(self, values, legal)

    def counting_illegal(self, legal: Flag, values: dict[str, Array]) -> Self:
        del values
        return trees.updated(self, counters=self._counted({"rejected": ~legal}))

    def with_sampler(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sampler: Sampler
    ) -> Self:
        check_sampler(sampler)
        if sampler == self.sampler:
            return self
        self.check_fit(sampler, self.extras, self.occupancy)
        by_slot = lax.stop_gradient(self.by_slot())
        changed, legal = hyperparameters.with_sampler(self, sampler, by_slot)
        every = jnp.arange(self.num_slots, dtype=jnp.int32)
        changed = changed.counting_illegal(legal, {}).with_episodes(every, every[:0])
        return check_metric_names(changed)

    def options(self) -> dict[str, Any]:
        return {"sampler": filled(self.sampler), "parts": self.extras}

    def by_slot(self) -> dict[str, Array]:
        return {**self.bound_sampler.by_slot(self.sampler_state), **self._kept_scores()}

    def _kept_scores(self) -> dict[str, Array]:
        """Returns the score of each slot that the occupancy or the diversity filter keeps."""
        score = getattr(self.diversity_state, "score", None)
        return ({} if score is None else {"score": score}) | super().by_slot()

    def _compared(self) -> dict[str, Array]:
        """Returns what ``highest`` compares of each slot, ``[N]``, by name."""
        compared = self._kept_scores()
        state = lax.stop_gradient(self.sampler_state)
        for sampler, inner in hyperparameters.inside(self.bound_sampler, state):
            compared = {**sampler.compared(inner), **compared}
        return compared

    def move(self, old: Self, moves: Moves) -> Self:
        extras = zip(self.extras, self.extra_states, old.extra_states, strict=True)
        return trees.updated(
            self,
            hyperparameters=old.hyperparameters,
            sampler_state=old.bound_sampler.move(self.sampler_state, old.sampler_state, moves),
            extra_states=tuple(part.move(empty, state, moves) for part, empty, state in extras),
        )

    def hyperparameter_metrics(self) -> dict[str, Array]:
        """Returns the varying hyperparameters as scalars, those of an array as ``name[i]``."""
        scalars: dict[str, Array] = {}
        for name, value in lax.stop_gradient(self.hyperparameters).items():
            if value.ndim:
                scalars |= {f"{name}[{i}]": value[i] for i in range(value.size)}
            else:
                scalars[name] = value
        return scalars

    def _windows_of(self) -> Self:
        """Returns the buffer that ``sample`` draws from with its options."""
        return self

    def _mapped(self, path: str | None) -> Self:
        """Returns the buffer after a field of all that it stores has changed."""
        del path
        return self

    def _sizes(self) -> dict[str, Array]:
        return {"size": self.size}

    def _read(self, index: Index) -> Arrays:
        """Returns the contents of the slots at ``index``, leaves ``[B, ...]``."""
        return storage.read(self.data, self.rows_of(index))

    def _draw_batch(self, key: Key, batch_size: int) -> Sample:
        """Returns a batch drawn by the sampler."""
        rows = check_batch_size(batch_size)
        state = lax.stop_gradient(self.sampler_state)
        return self.gather(self.bound_sampler.draw(state, check_key(key), rows, self.occupancy))

    def _counted(self, counts: dict[str, Array]) -> UInt[Array, " K"]:
        """Returns the counters with these counts added."""
        return self.counters + counters.tally(self.counter_names, counts)

    def _extras_and_states(self) -> list[tuple[Part, State]]:
        """Returns the extras and their states, through which no gradient flows."""
        return list(zip(self.extras, lax.stop_gradient(self.extra_states), strict=True))

    def _notify(self, method_of: Callable[[Part], Callable[..., State]], *arguments: Any) -> Self:
        """Calls a method of all extras, such as that of ``lambda part: part.on_add``."""
        states = [
            events.notify(method_of(part), state, *arguments)
            for part, state in self._extras_and_states()
        ]
        return trees.updated(self, extra_states=tuple(states))

    def _cleared(self) -> Self:
        """Returns the buffer with empty slots, which shares no array with the original."""
        empty = trees.updated(
            self,
            data=jax.tree.map(jnp.zeros_like, self.data),
            occupancy=self.occupancy.clear(),
            sampler_state=self.bound_sampler.init(self.num_slots),
            extra_states=init_states(self.extras, self.data, self.occupancy.places),
        )
        if limits := self.freshness:
            state = limits.clear(self.freshness_state, empty.freshness_state)
            empty = empty.with_state(Freshness, state)
        return trees.in_place_of(self, empty)


def init_states(extras: tuple[Part, ...], data: Arrays, occupancy: Any) -> tuple[State, ...]:
    """Returns the states of parts for empty slots; of windows, the occupancy is their rings."""
    return tuple(
        part.init_windows(data, occupancy)
        if isinstance(part, Episodes)
        else part.init(data, occupancy.num_slots)
        for part in extras
    )


def check_metric_names(buffer: AnyBuffer) -> AnyBuffer:
    """Returns the buffer after a check that no two of its metrics have the same name.

    Only metrics of parts from outside of this library can, so others are not traced.

    Raises:
        ValueError: If two have.
    """
    package = Part.__module__.partition(".")[0]
    if any(type(part).__module__.partition(".")[0] != package for part in buffer.extras):
        jax.eval_shape(buffer.metrics)
    return buffer


def counter_names(extras: tuple[Part, ...]) -> tuple[str, ...]:
    """The names under which a buffer with these parts counts rows."""
    reasons = [reason for part in extras for reason in part.reasons]
    return tuple(dict.fromkeys(["adds", "rejected", *reasons]))


def refuse(
    reasons: dict[str, Bool[Array, "..."]], mask: Bool[Array, "..."], counts: dict[str, Array]
) -> Bool[Array, "..."]:
    """Returns a mask of the rows to refuse, each counted under the first of its reasons.

    Args:
        reasons: A mask of rows for each reason.
        mask: The rows still to be added.
        counts: The numbers of rows by reason, to which these are added.
    """
    zero: Array = jnp.uint32(0)
    refused = jnp.zeros_like(mask)
    for reason, illegal in reasons.items():
        new = mask & illegal & ~refused
        counts[reason] = counts.get(reason, zero) + jnp.sum(new, dtype=jnp.uint32)
        refused |= new
    return refused
