"""Time-ordered steps of several environments, sampled as windows."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree, UInt

from jaxbuf.buffers import events, write_back
from jaxbuf.buffers.arguments import (
    Where,
    broadcast_steps,
    check_num_rows,
    check_numbers,
    check_offsets,
    check_parts,
    check_removes,
    check_sampler,
    check_slots,
    check_step_mask,
    check_steps,
    check_version_used,
    check_where,
    mask_of,
    needs_order,
    needs_priority,
    per_step,
)
from jaxbuf.buffers.operation import Operation
from jaxbuf.buffers.sample import Normalization, Sample, Steps, StepsAround, Within, weighed
from jaxbuf.buffers.sampled import SampledBuffer, refuse
from jaxbuf.buffers.slotted import Envs
from jaxbuf.core import checks, fields, guesses, numbers, sizes, storage, trees
from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.donation import check_readable
from jaxbuf.core.sizes import check_count
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Flag, Index, Key, Mask, Number, Numbers, State, Words
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.occupancy.rings import Rings
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.episodes import Episode, EpisodeIndex, Episodes
from jaxbuf.strategies.freshness import Freshness
from jaxbuf.strategies.part import Part, Rows, StepRows
from jaxbuf.strategies.protocols import Sampler
from jaxbuf.strategies.uniform import Uniform

# The number of windows that are removed at a time.
_ROWS = 256


class TrajectoryBuffer(SampledBuffer):
    """The last ``length`` steps of each of ``num_envs`` environments.

    Every environment has its own ring with its own write position, so that steps of any environment
    may be added at any time. Samples are windows of ``sequence_length`` consecutive steps that
    never cross a write position: the newest ``sequence_length - 1`` steps of a ring can start a
    window only after later steps have been added. A window is stale as soon as its first step is
    overwritten.

    Like an ``ItemBuffer``, it is a single immutable pytree with static configuration and pure
    methods.

    Attributes:
        data: The steps, leaves ``[num_envs * length, ...]``, one ring after the other.
        occupancy: Records which steps and windows there are.
        sampler_state: The state of the sampler, with one slot for each place where a window may
            start.
        counters: The numbers of steps added, priorities rejected, and windows refused so far, in
            the order of ``counter_names``, ``[K]`` uint32, which wrap.
        extra_states: The state of each of the extras.
        sampler: The sampler, which draws windows.
        hyperparameters: The varying hyperparameters of the sampler, by name; see
            ``jaxbuf.Varying``.
        extras: The parts besides the sampler: an index of episodes, limits on freshness, and your
            own parts.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> step = {"obs": jnp.zeros(3), "reward": jnp.float32(0)}
        >>> buffer = jaxbuf.TrajectoryBuffer.create(step, num_envs=4, length=100, sequence_length=8)
        >>> rollout = {"obs": jnp.ones((4, 20, 3)), "reward": jnp.ones((4, 20))}
        >>> buffer = buffer.add(rollout)
        >>> int(buffer.size), buffer.sample(jax.random.key(0), 32).data["obs"].shape
        (80, (32, 8, 3))
    """

    occupancy: Rings | Subset  # pyright: ignore[reportIncompatibleVariableOverride]

    unit = "steps"
    drawn_unit = "windows"

    @classmethod
    @sizes.allocating("what the buffer keeps of its steps")
    @guesses.answered
    def create(
        cls,
        example: PyTree,
        num_envs: int,
        length: int,
        *,
        sequence_length: int = 1,
        period: int = 1,
        num_earliest_ignored: int = 0,
        sampler: Sampler = Uniform(),
        episodes: Episodes | None = None,
        freshness: Freshness | None = None,
        parts: tuple[Part, ...] = (),
    ) -> Self:
        """Creates an empty buffer.

        The memory that is left is looked at outside of transformations only: under ``jax.vmap`` ask
        ``jax.eval_shape`` for the size of all members together.

        Args:
            example: One unbatched step of arrays or ``jax.ShapeDtypeStruct``. Only shapes and
                dtypes matter.
            num_envs: The number of environments ``E``, each with a ring.
            length: The largest number of steps held for each environment.
            sequence_length: The number of steps in a window.
            period: Windows start at places of the ring that are multiples of this number. 1 allows
                every start, and ``sequence_length`` makes windows disjoint.
            num_earliest_ignored: The number of earliest steps of each ring that start no window and
                are not gathered. They can still be read by views that look back from the start of a
                window, such as a stack of frames.
            sampler: Draws windows.
            episodes: Keeps an index of episodes, based on flags in the steps; None disables it.
            freshness: Retires windows that were used often enough or are too stale; None disables
                it. A window is as stale as its first step. The steps of retired windows are kept,
                and ``size`` counts them.
            parts: More parts: ``jaxbuf.Removable()``, or your own, which derive from
                ``jaxbuf.strategies.Part``. ``episodes`` and ``freshness`` may stand here as well.

        Raises:
            ValueError: If a number is not an integer of at least 1 (``num_earliest_ignored``: 0), a
                window is longer than a ring, ``length`` is not a multiple of ``period``, too many
                steps are ignored, there are more than 2**30 steps, the sampler needs scores, a part
                is for items, ``example`` holds anything but arrays or needs more memory than is
                available, or ``episodes`` names a field that is missing or has the wrong shape or
                dtype.
        """
        num_envs = check_count("num_envs", num_envs)
        length = check_count("length", length)
        sequence_length = check_count("sequence_length", sequence_length)
        period = check_count("period", period)
        ignored = check_count("num_earliest_ignored", num_earliest_ignored, least=0)
        if num_envs * length > 2**30:
            raise ValueError(
                f"num_envs * length is {num_envs * length}; expected at most 2**30 steps"
            )
        _check_windows(sequence_length, length, ignored)
        if length % period:
            raise ValueError(
                f"length is {length} and period {period}; length must be a multiple of period"
            )
        check_sampler(sampler)
        extras = check_parts(parts, episodes=episodes, freshness=freshness)
        for part in extras:
            if not part.of_windows:
                raise ValueError(
                    f"a TrajectoryBuffer cannot have {part}, which is a part for items"
                )
        data = storage.allocate(example, (num_envs * length,), ("length", length))  # [E * N, ...]
        rings = Rings.create(num_envs, length, sequence_length, period, ignored)
        return cls._empty(sampler, extras, data, rings)

    @staticmethod
    def check_fit(sampler: Sampler, extras: tuple[Part, ...], occupancy: Occupancy) -> None:
        check_removes(sampler, "a window is gone")
        if events.uses_episodes(sampler) and not any(isinstance(x, Episodes) for x in extras):
            raise ValueError(
                f"{sampler} needs episodes, but episodes is None; create the buffer with "
                "episodes=jaxbuf.Episodes()"
            )
        if sampler.uses_score:
            raise ValueError(f"{sampler} needs scores, which steps do not have; choose another one")
        if sampler.uses_age:
            needs_order(occupancy, f"{sampler}")

    @property
    def episodes(self) -> Episodes | None:
        """The configuration of the index of episodes; None without ``Episodes``."""
        return self.find_part(Episodes)[0]

    @property
    def episode_index(self) -> EpisodeIndex | None:
        """The index of episodes; None without ``Episodes``."""
        return self.find_part(Episodes)[1] if self.episodes else None

    @property
    def rings(self) -> Rings:
        """The rings of all steps and windows, including windows that are not drawn."""
        return self.occupancy.inner if isinstance(self.occupancy, Subset) else self.occupancy

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that ``create`` takes, by name."""
        return {"num_envs": self.num_envs, "length": self.length}

    @property
    def num_envs(self) -> int:
        return self.rings.num_envs

    @property
    def length(self) -> int:
        """The largest number of steps held for each environment."""
        return self.rings.length

    @property
    def sequence_length(self) -> int:
        """The number of steps in a window."""
        return self.rings.sequence_length

    @property
    def period(self) -> int:
        """The distance between places where windows may start."""
        return self.rings.period

    @property
    def num_earliest_ignored(self) -> int:
        """The number of earliest steps of each ring that start no window."""
        return self.rings.ignored

    @property
    def capacity(self) -> int:
        """The largest number of steps that the buffer can hold, ``num_envs * length``."""
        return self.num_envs * self.length

    @property
    def max_windows(self) -> int:
        """The largest number of windows that can be drawn from, of all rings together.

        A full ring has ``length - num_earliest_ignored - sequence_length + 1`` places for the first
        step of a window, and a window at every ``period``-th of them. Short windows (see
        ``Episodes``) may start at the other steps too.
        """
        further = 0 if self.episodes and self.episodes.pads else self.sequence_length - 1
        places = self.length - self.num_earliest_ignored - further
        return self.num_envs * -(-places // self.period)

    def room(self, sequence_length: int | None = None) -> tuple[int, str]:
        most = self.max_windows
        if sequence_length is not None and sequence_length != self.sequence_length:
            places = self.length - self.num_earliest_ignored - (sequence_length - 1)
            most = max(self.num_envs * -(-places // self.period), 0)
        return most, "room is for {} windows"

    @property
    def size(self) -> Count:
        """The number of steps held, of all environments together."""
        check_readable(self)
        return self.rings.steps

    @property
    def num_windows(self) -> Count:
        """The number of windows that can be drawn, of all environments together."""
        check_readable(self)
        return self.occupancy.size

    def can_sample(self, batch_size: int | Count = 1) -> Flag:
        """Returns whether at least ``batch_size`` windows can be drawn; see ``max_windows``."""
        return self.num_windows >= check_num_rows(batch_size)

    def check_add(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of ``add``, after a check of the numbers of ``env_ids``.

        Once they are traced they have no values.
        """
        ids = arguments.get("env_ids")
        return arguments if ids is None else {**arguments, "env_ids": self.check_env_ids(ids)}

    def add(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        steps: Arrays,
        *,
        priority: Float[ArrayLike, "..."] | None = None,
        version: Int[ArrayLike, "..."] | None = None,
        session: Int[ArrayLike, "..."] | None = None,
        mask: Bool[ArrayLike, "..."] | None = None,
        env_ids: Int[ArrayLike, " K"] | None = None,
    ) -> Self:
        """Appends one step or ``T`` steps to each environment, or to some of them.

        Args:
            steps: The steps, leaves ``[num_envs, *shape]`` or ``[num_envs, T, *shape]`` with the
                example's dtypes. If there are more than ``length``, the last ones are kept.
            priority: Priorities, ``[num_envs]`` or ``[num_envs, T]``, each for the window that ends
                at that step; finite and not negative. Any other priority is counted in
                ``metrics()["rejected"]`` and replaced by the default; the step is added. The
                default is the larger of the sampler's ``initial_priority`` and the largest priority
                in the buffer.
            version: Versions of the policies that generated the steps, ``[num_envs]`` or
                ``[num_envs, T]`` int32, for ``Freshness``; by default the learner's version. Steps
                that are too stale already are added, because the steps around them would otherwise
                become neighbors in time. But no window starts at them, and these windows are
                counted in ``metrics()["refused_stale"]``.
            session: Sessions of the learner in which the steps were generated, ``[num_envs]`` or
                ``[num_envs, T]`` int32, for ``Freshness``; by default the learner's session. Steps
                of another session are too stale, whatever their version.
            mask: A mask of the steps to add, ``[num_envs]`` or ``[num_envs, T]``. The added steps
                of a row keep their order; masked-out steps take no place and do not move the write
                position.
            env_ids: The environments of the rows, ``[K]`` different numbers below ``num_envs``. All
                other arguments then have ``K`` rows instead of ``num_envs``. If the numbers are
                traced they cannot be checked: rows with a number out of range are then left out,
                and if several rows have the same number, the last one is used.

        Returns:
            The buffer with the steps.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example, if
                ``priority``, ``version`` or ``session`` is given but not used by the buffer, or if
                ``env_ids`` has a number that is out of range or occurs twice.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), num_envs=4, length=8)
            >>> buffer = buffer.add(jnp.array([[1, 2], [3, 4]]), env_ids=jnp.array([3, 0]))
            >>> buffer.end_position.tolist(), buffer.data[:2].tolist()
            ([2, 0, 0, 2], [3, 4])
        """
        options = {"priority": priority, "version": version, "session": session, "mask": mask}
        if env_ids is not None:
            return self._add_to(env_ids, steps, options)
        steps, offered, value = self._check(steps, None, **options)
        num_steps = offered.shape[1]
        if num_steps == 0:
            return self
        rings, target, broken, completed = self.rings.place(num_steps, offered.mask)
        rows = StepRows(**vars(offered), rings=self.rings, target=target)
        flat = jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), steps)  # [E * T, ...]
        buffer = trees.updated(self, data=storage.write(self.data, flat, target.reshape(-1)))
        buffer = buffer._notify(lambda part: part.on_add, self._windows_at(target), rows)
        counts = {"adds": rows.count}
        if value is not None:
            refuse({"rejected": ~self.bound_sampler.accepts(value)}, rows.taken, counts)
        if self.episodes is not None and self.episodes.removes:
            count, order = _in_order(offered)  # [E], [E, T]
            windows = buffer._index().completed(rings, buffer.data, count, num_steps)
            for reason in self.episodes.reasons:
                counts[reason] = windows.refused
            # The row that completed each window, [E, H].
            column = count[:, None] - 1 - windows.end
            column = jnp.take_along_axis(order, jnp.clip(column, 0, num_steps - 1), axis=1)
            rows, value = _rows_at(rows, column), _at(value, column)
            ignored = broken[:, min(num_steps, self.sequence_length - 1) :]  # [E, I]
            broken = jnp.concatenate([windows.broken, ignored], axis=1)  # [E, R]
            completed = windows.slots  # [E, H]
        completed, refused = buffer._refuse(completed, rows, counts)
        removed = jnp.concatenate([broken, *refused], axis=1)  # [E, R]
        buffer = buffer._change_windows(rings, added=completed, value=value, removed=removed)
        return trees.updated(buffer, counters=self._counted(counts))

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        key: Key,
        batch_size: int,
        *,
        sequence_length: int | None = None,
        beta: float | Number | None = None,
        normalize: Normalization = ...,
        within: Within | None = None,
    ) -> Sample:
        """Draws a batch of windows.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.
            sequence_length: The number of steps in a window of this batch; static. None uses the
                buffer's ``sequence_length``. A shorter length adds windows that are newer than any
                of the buffer's own. These have the default priority, and updates of their
                priorities are dropped. Another length costs a copy of the priorities.
            beta: The strength of importance weights, which are ``batch.weights`` then; it may be
                traced. They are those of ``jaxbuf.importance_weights`` for this buffer, whose
                windows they count, also of a batch of another length.
            normalize: As for ``jaxbuf.importance_weights``; static.
            within: As for ``jaxbuf.importance_weights``; static.

        Returns:
            A ``Sample`` with leaves ``[B, sequence_length, ...]``, in order of time. Its shapes do
            not depend on the contents of the buffer: rows that cannot be drawn have ``valid``
            False, probability 0 and index ``capacity``.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, ``key`` is not a single
                key, ``sequence_length`` is longer than a ring, or it differs from the buffer's
                although some windows are taken out, by ``Freshness`` or by
                ``Episodes(boundary="avoid")``. If ``beta``, ``normalize`` or ``within`` is not
                legal, or one of the last two is given without ``beta``.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 1, 8, sequence_length=2)
            >>> buffer = buffer.add(jnp.arange(4)[None])
            >>> buffer.sample(jax.random.key(0), 2, sequence_length=4).data.tolist()
            [[0, 1, 2, 3], [0, 1, 2, 3]]
        """
        batch = self._windows_of(sequence_length)._draw_batch(key, batch_size)
        return weighed(self, batch, beta, normalize, within)

    def route(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Raises an error for ``insert``: a window has no slot before it is complete."""
        raise ValueError(
            f"{operation.name} was called, but steps of a TrajectoryBuffer have no slots of their "
            "own; use add, and slots_at(env_ids, positions) for the windows that start at its steps"
        )

    def clear(self, envs: Envs = None) -> Self:
        if envs is None:
            return self._cleared()
        mask = mask_of(envs, self.num_envs)
        buffer = self._without_newest(jnp.where(mask, self.rings.held.astype(jnp.int32), 0))
        cleared = buffer._change_windows(self.rings.clear(mask))
        if self.episodes is None:
            return cleared
        return cleared.with_state(Episodes, cleared._index().clear(mask))

    @property
    def end_position(self) -> UInt[Array, " E"]:
        """The position of the next step of each environment, ``[num_envs]``.

        The position of a step is the number of steps written to its ring before it. It does not
        change while the step is held, and consecutive steps have consecutive positions. Positions
        are unsigned and wrap at 2**32, so that differences of positions stay correct. ``clear``
        does not reset them, but continues from a later multiple of ``length``.
        """
        check_readable(self)
        return self.rings.end

    @property
    def earliest_position(self) -> UInt[Array, " E"]:
        """The position of the earliest step held of each environment; the end position if empty."""
        return self.end_position - self.rings.held

    def locate(self, slots: Slots) -> tuple[Index, Words]:
        slots, rings = check_slots(slots), self.rings
        env, position = rings.first_step_of(slots.index, slots.generation)
        live = rings.row_of(env, position) < rings.num_envs * rings.length
        return jnp.where(live, env, rings.num_envs), position

    def slots_at(
        self, env_ids: Int[ArrayLike, "..."], positions: Integer[ArrayLike, "..."]
    ) -> Slots:
        env, position, shape = broadcast_steps(env_ids, positions)
        index = self._windows_at(self.rings.row_of(env, position))
        index = jnp.where(self.occupancy.live(index), index, self.capacity)
        generation = self.occupancy.generation(index)
        return Slots(index.reshape(shape), generation.reshape(shape))

    def get_field(
        self, path: str, env_ids: Int[ArrayLike, "..."], positions: Integer[ArrayLike, "..."]
    ) -> Arrays:
        field = fields.need(self.data, path, "path", "steps have")
        env, position, shape = broadcast_steps(env_ids, positions)
        row = self.rings.row_of(env, position).reshape(shape)
        values = storage.read(field, row)
        return trees.choose(row < self.capacity, values, jax.tree.map(jnp.zeros_like, values))

    def steps_around(
        self,
        slots: Slots,
        offsets: Sequence[int] | Int[ArrayLike, " K"],
        path: str | None = None,
    ) -> StepsAround:
        slots, offset = check_slots(slots), jnp.asarray(check_offsets(offsets))[None]  # [1, K]
        field, rings = fields.stored(self.data, path, "steps have"), self.rings
        if isinstance(self.occupancy, Subset):
            live = self.occupancy.holds(slots)  # [B]
        else:  # Also where a shorter window was sampled.
            live = rings.replace(sequence_length=1).holds(slots)  # [B]
        env, position = rings.first_step_of(slots.index, slots.generation)  # [B]
        if self.episodes is None:
            end, held = storage.select(env, (rings.end, rings.held))  # [B]
            back = position - (end - held)  # [B]
            ahead = (end - jnp.uint32(1) - position).astype(jnp.int32)  # [B]
        else:
            episode = self._index().episode(rings, env, position, self.data)
            back, ahead = position - episode.held_begin, episode.to_end  # [B]
        back, ahead = (jnp.where(live, x, 0)[:, None] for x in (back.astype(jnp.int32), ahead))
        near = jnp.clip(offset, -back, ahead)  # [B, K]
        row = rings.row_of(env, position)[:, None]  # [B, 1]
        place = remainder(row, self.length)  # [B, 1]
        data = storage.read(field, row - place + remainder(place + near, self.length))
        zeros = jax.tree.map(jnp.zeros_like, data)
        inside = live[:, None] & (near == offset)  # [B, K]
        return StepsAround(trees.choose(live[:, None], data, zeros), inside)

    def gather_all(self, *, ignore_earliest: bool = True) -> Steps:
        ignore = checks.check_flag("ignore_earliest", ignore_earliest)
        skip = self.num_earliest_ignored if ignore else 0
        return self._earliest(self.length, skip)

    def dequeue(self, n: int, *, mask: Bool[ArrayLike, " E"] | None = None) -> tuple[Self, Steps]:
        n = check_count("n", n)
        if n > self.length:
            raise ValueError(f"n is {n}, but a ring has length {self.length}")
        steps = self._earliest(n, 0)
        if mask is not None:
            mask = check_numbers(mask, "mask", (self.num_envs,), "(num_envs,)")
            steps = steps.replace(valid=steps.valid & mask[:, None])
        count = jnp.sum(steps.valid, axis=1, dtype=jnp.int32)
        rings, removed = self.rings.drop(count, n)
        return self._change_windows(rings, removed=removed), steps

    def episode(self, where: Where, positions: Integer[ArrayLike, "..."] | None = None) -> Episode:
        index, rings, steps = self._index(), self.rings, check_where(where, positions)
        if isinstance(steps, Slots):
            env, position = rings.first_step_of(steps.index, steps.generation)
            return index.episode(rings, env, position, self.data)
        env, position, shape = broadcast_steps(*steps, "where")
        episode = index.episode(rings, env, position, self.data)
        return jax.tree.map(lambda leaf: leaf.reshape(shape), episode)

    def episode_mask(
        self, slots: Slots, *, sequence_length: int | None = None
    ) -> Bool[Array, "B S"]:
        if self.episodes is None or self.episodes.boundary == "cross":
            reason = "episodes is None"
            if self.episodes is not None:
                reason = 'boundary is "cross", whose windows are used as they are'
            raise ValueError(
                f'{reason}; create the buffer with episodes=jaxbuf.Episodes(boundary="mask")'
            )
        slots = check_slots(slots)
        windows = self._windows_of(sequence_length)
        mask = windows._index().in_episode(windows.rings, slots.index)
        return mask & windows.occupancy.holds(slots)[:, None]

    def end_episodes(self, envs: Envs = None) -> Self:
        index, rings = self._index("end_episodes was called, but "), self.rings
        mask = mask_of(envs, self.num_envs) & (index.run > 0)  # [E]
        newest = self._newest_rows(mask)  # [E]
        data, paths = index.episodes.truncate(self.data, newest)
        ended = trees.updated(self.with_state(Episodes, index.end(rings, mask)), data=data)
        steps = lax.stop_gradient(storage.read(data, newest))  # [E, ...]
        if write_back.follows_writes(self.extras):
            for path in paths:
                states = lax.stop_gradient(ended.extra_states)
                states = write_back.notify_of_write(ended, states, newest, steps, path)
                ended = trees.updated(ended, extra_states=states)
        if not index.episodes.removes:
            return ended
        # Windows that are cut short by the new end may be complete now.
        windows = ended._index().completed(rings, data, mask.astype(jnp.int32), 1)
        slots = jnp.where(windows.short, windows.slots, rings.num_slots)  # [E, H]
        counts: dict[str, Array] = {}
        _, rows = ended.for_parts(newest, steps)  # [E, 1]
        rows = _rows_at(rows, jnp.zeros(slots.shape, jnp.int32))
        slots, refused = ended._refuse(slots, rows, counts)
        removed = jnp.concatenate(refused, axis=1) if refused else None
        ended = ended._change_windows(rings, added=slots, removed=removed)
        return trees.updated(ended, counters=self._counted(counts))

    def drop_newest_episode(self, envs: Envs = None) -> Self:
        index, rings = self._index("drop_newest_episode was called, but "), self.rings
        mask = mask_of(envs, self.num_envs)  # [E]
        newest = self._newest_rows(mask)  # [E]
        steps = index.steps_before(newest) + 1  # [E]
        count = jnp.where(newest < self.capacity, steps, 0)  # [E]
        count = jnp.minimum(count, rings.held.astype(jnp.int32))  # [E]
        # Windows of earlier episodes that reach into the removed one.
        across = 0 if index.episodes.boundary == "avoid" else self.sequence_length - 1
        buffer = self._without_newest(jnp.where(count > 0, count + across, 0))
        buffer = buffer._change_windows(rings.retract(count))
        return buffer.with_state(Episodes, buffer._index().clear(mask))

    def _without_newest(self, count: Int[Array, " E"]) -> Self:
        """Removes the windows that start at the newest ``count`` steps of each ring.

        A fixed number is removed at a time, so that the cost follows the largest count.
        """
        rings, width = self.rings, -(-_ROWS // self.num_envs)
        env = jnp.repeat(jnp.arange(self.num_envs, dtype=jnp.int32), width)  # [E * width]
        offset = jnp.tile(jnp.arange(width, dtype=jnp.int32), self.num_envs)  # [E * width]
        most = jnp.max(count)  # []

        def is_left(carry: tuple[Array, Self]) -> Flag:
            return carry[0] < most

        def remove(carry: tuple[Array, Self]) -> tuple[Array, Self]:
            first, buffer = carry
            age = first + offset  # [E * width]
            row = rings.row_of(env, rings.end[env] - jnp.uint32(1) - age.astype(jnp.uint32))
            row = jnp.where(age < count[env], row, self.capacity)  # [E * width]
            return first + width, buffer._change_windows(rings, removed=self._windows_at(row))

        # The loop does not carry the steps.
        without_data = lax.stop_gradient(dataclasses.replace(self, data=()))
        carry = vary_with((jnp.int32(0), without_data), without_data, most)
        buffer = lax.while_loop(is_left, remove, carry)[1]
        return dataclasses.replace(buffer, data=self.data)

    def _newest_rows(self, mask: Bool[Array, " E"]) -> Int[Array, " E"]:
        """Returns the rows of the newest steps of some rings; past the end for the others."""
        env = jnp.arange(self.num_envs, dtype=jnp.int32)
        row = self.rings.row_of(env, self.rings.end - jnp.uint32(1))
        # Each row past the end is a different one.
        return jnp.where(mask & (row < self.capacity), row, self.capacity + env)

    def options(self) -> dict[str, Any]:
        return {
            **super().options(),
            "sequence_length": self.sequence_length,
            "period": self.period,
            "num_earliest_ignored": self.num_earliest_ignored,
        }

    def _index(self, what: str = "") -> EpisodeIndex:
        """Returns the index of episodes, through which no gradient flows.

        Raises:
            ValueError: If the buffer has none; the message begins with ``what``.
        """
        episodes, index = self.find_part(Episodes)
        if episodes is None:
            raise ValueError(
                f"{what}episodes is None; create the buffer with episodes=jaxbuf.Episodes()"
            )
        return lax.stop_gradient(index)

    def _mapped(self, path: str | None) -> Self:
        if self.episodes is None:
            return self
        data = lax.stop_gradient(self.data)
        index = self.episodes.on_map(self._index(), data, self.rings, path)
        return self.with_state(Episodes, index)

    def _sizes(self) -> dict[str, Array]:
        return {"size": self.size, "windows": self.occupancy.size}

    def _check(
        self,
        steps: Arrays,
        env_ids: Int[Array, " K"] | None,
        *,
        priority: Numbers | None,
        version: Numbers | None,
        session: Numbers | None,
        mask: Numbers | None,
    ) -> tuple[Arrays, Rows, Float[Array, "E T"] | None]:
        """Checks the arguments of ``add`` and converts them to arrays ``[num_envs, T, ...]``.

        With ``env_ids`` these are arrays ``[K, T, ...]``, with a row for each of them.

        Returns:
            The steps, the rows for the parts, and the priorities.
        """
        count, first, what = self.num_envs, "num_envs", "num_envs"
        if env_ids is not None:
            count, first, what = env_ids.size, "K", "one for each of env_ids"
        steps, batch = check_steps(self.data, steps, count, what)
        axes = f"({first}, T)" if len(batch) > 1 else f"({first},)"
        shape = (count, batch[1] if len(batch) > 1 else 1)
        check_version_used(self.freshness, version, session)
        if priority is not None:
            needs_priority(self.sampler, "priority was given")
            priority = check_numbers(priority, "priority", batch, axes).reshape(shape)  # [E, T]

        def integers(value: Numbers | None, name: str) -> Int[Array, "E T"] | None:
            return None if value is None else per_step(value, name, batch, axes)

        rows = Rows(
            items=lax.stop_gradient(steps),
            shape=shape,
            mask=None if mask is None else check_step_mask(mask, batch),
            version=integers(version, "version"),
            session=integers(session, "session"),
        )
        return steps, rows, priority

    def _refuse(
        self, completed: Int[Array, "E H"], rows: StepRows, counts: dict[str, Array]
    ) -> tuple[Int[Array, "E H"], list[Int[Array, "E H"]]]:
        """Returns the completed windows that no part refuses, and the windows that each refuses."""
        removed: list[Int[Array, "E H"]] = []
        slots = self.rings.num_slots
        for part, state in self._extras_and_states():
            offered = dataclasses.replace(rows, completed=completed)
            if reasons := events.query(part.refuse, state, offered, self.occupancy):
                refused = refuse(reasons, completed < slots, counts)  # [E, H]
                removed.append(jnp.where(refused, completed, slots))
                completed = jnp.where(refused, slots, completed)  # [E, H]
        return completed, removed

    def _add_to(self, env_ids: object, steps: Arrays, options: dict[str, Numbers | None]) -> Self:
        """Adds rows to some environments, by an ``add`` with masked rows for the others."""
        ids = self.check_env_ids(env_ids)
        steps, rows, priority = self._check(steps, ids, **options)
        if ids.size == 0:
            return self
        # JAX would count a negative index from the end.
        env = jnp.where(ids >= 0, ids, self.num_envs)
        row = jnp.full((self.num_envs,), -1, jnp.int32)
        row = row.at[env].max(jnp.arange(ids.size, dtype=jnp.int32), mode="drop")
        steps, taken, priority, version, session = jax.tree.map(
            lambda leaf: leaf[jnp.maximum(row, 0)],
            (steps, rows.taken, priority, rows.version, rows.session),
        )
        mask = taken & (row >= 0)[:, None]
        return self.add(steps, priority=priority, version=version, session=session, mask=mask)

    def _earliest(self, count: int, skip: int) -> Steps:
        """Returns the earliest ``count`` steps of each ring, after skipping ``skip`` of them."""
        env = jnp.arange(self.num_envs, dtype=jnp.int32)[:, None]
        rank = jnp.arange(count, dtype=jnp.uint32)[None]
        position = (self.earliest_position + jnp.uint32(skip))[:, None] + rank
        row = self.rings.row_of(
            jnp.broadcast_to(env, position.shape).reshape(-1), position.reshape(-1)
        )
        data = storage.read(self.data, row.reshape(position.shape))
        valid = rank + jnp.uint32(skip) < self.rings.held[:, None]
        return Steps(data=data, position=position, valid=valid)

    def _change_windows(
        self,
        rings: Rings,
        *,
        added: Int[Array, "..."] | None = None,
        value: Float[Array, "..."] | None = None,
        removed: Int[Array, "..."] | None = None,
    ) -> Self:
        """Returns the buffer with these rings, after windows were added and removed."""
        occupancy: Rings | Subset = rings
        if isinstance(self.occupancy, Subset):
            nothing = jnp.zeros((0,), jnp.int32)
            new, old = (nothing if x is None else x.reshape(-1) for x in (added, removed))
            member = jnp.concatenate([jnp.ones(new.shape, bool), jnp.zeros(old.shape, bool)])
            index = jnp.concatenate([new, old])
            occupancy = self.occupancy.replace(inner=rings).mark(index, member)
        return events.apply_change(self, occupancy, added=added, value=value, removed=removed)

    def with_episodes(self, added: Index, removed: Int[Array, " R"]) -> Self:
        """Returns the buffer after a sampler that uses episodes got to know their last windows.

        These may have changed where windows were added, and just before these and the removed ones.
        """
        if not events.uses_episodes(self.sampler):
            return self
        ages, rings, nowhere = self.occupancy.age_range(None, None), self.rings, self.num_slots
        begin = jnp.cumsum(ages.count, dtype=jnp.int32) - ages.count  # [E]

        def neighbor(index: Index, by: int) -> Index:
            """Returns the window before or after each; past the end if its ring has none."""
            env = quotient(index, ages.most)  # [B]
            first, count = storage.select(env, (begin, ages.count))  # [B]
            rank = ages.rank(index) + by  # [B]
            inside = (index < nowhere) & (rank >= 0) & (rank < count)
            return jnp.where(inside, ages.at(first + jnp.maximum(rank, 0)), nowhere)

        changed = jnp.concatenate([added, removed])
        index = jnp.concatenate([neighbor(changed, -1), added])  # [C]
        if isinstance(self.occupancy, Subset) or not changed.size:
            newest = ages.at(begin + jnp.maximum(ages.count - 1, 0))  # [E]
            index = jnp.concatenate([jnp.where(ages.count > 0, newest, nowhere), index])  # [C]
        following = neighbor(index, 1)  # [C]
        (_, place), (env, next_place) = map(rings.ring_and_start, (index, following))  # [C]
        behind = self._index().steps_before(env * self.length + next_place)  # [C]
        same = (following < nowhere) & (behind >= remainder(next_place - place, self.length))
        last = self.occupancy.live(index) & ~same
        # Windows that leave a few at a time are live until the last of them has left.
        index = jnp.concatenate([index, removed])
        last = jnp.concatenate([last, jnp.zeros(removed.shape, bool)])

        def notify(sampler: Sampler, state: State) -> State:
            if not sampler.uses_episodes:
                return state
            return events.notify(sampler.on_episodes, state, index, last)

        state = lax.stop_gradient(self.sampler_state)
        return trees.updated(self, sampler_state=self.bound_sampler.map_state(state, notify))

    def _windows_of(self, sequence_length: int | None = None) -> Self:
        """Returns a buffer of the same steps with windows of another length; None keeps it."""
        if sequence_length is None:
            return self
        size = check_count("sequence_length", sequence_length)
        if size == self.sequence_length:
            return self
        _check_windows(size, self.length, self.num_earliest_ignored)
        if isinstance(self.occupancy, Subset):
            raise ValueError(
                f"sequence_length is {size}, but this buffer takes out some of its windows of "
                f"{self.sequence_length} steps (Freshness, Removable, or Episodes with boundary "
                f'"avoid"); create it with sequence_length={size}'
            )
        rings, added, removed = self.rings.resize(size)
        return self._change_windows(rings, added=added, removed=removed)

    def check_env_ids(self, env_ids: object) -> Int[Array, " K"]:
        """Returns the ``env_ids`` of ``add`` as an array, checked unless they are traced.

        Raises:
            ValueError: If they are not integers ``[K]``, or a number is out of range or occurs
                twice.
        """
        ids = numbers.ids(env_ids, "env_ids")
        if ids.ndim != 1:
            raise ValueError(f"env_ids has shape {ids.shape}; expected (K,)")
        if isinstance(ids, np.ndarray):
            illegal = ids[(ids < 0) | (ids >= self.num_envs)]
            if illegal.size:
                raise ValueError(
                    f"env_ids has {illegal[0]}; expected numbers from 0 to num_envs - 1, which is "
                    f"{self.num_envs - 1}"
                )
            unique, counts = np.unique(ids, return_counts=True)
            if np.any(counts > 1):
                raise ValueError(
                    f"env_ids has {unique[counts > 1][0]} twice; expected different numbers, and "
                    "the steps of one environment in one row, [K, T]"
                )
        return jnp.asarray(ids).astype(jnp.int32)

    @property
    def step_axes(self) -> tuple[int, ...]:
        return (self.sequence_length,)

    @property
    def score_users(self) -> list[object]:
        return []

    def rows_of(self, index: Index) -> Int[Array, "B L"]:
        mask = index[:, None] < self.rings.num_slots
        if self.episodes is not None and self.episodes.pads:
            mask &= self._index().in_episode(self.rings, index)
        return jnp.where(mask, self.rings.rows_of(index), self.capacity)

    def holds_row(self, row: Index) -> Mask:
        return self.rings.holds_step(row)

    def any_row(self) -> Count:
        env = lax.argmax(self.rings.held, 0, jnp.int32)
        newest = self.rings.cursor[env].astype(jnp.int32) - 1
        return env * jnp.int32(self.length) + remainder(newest, self.length)

    def for_parts(
        self, row: Int[Array, "..."], items: Arrays
    ) -> tuple[Int[Array, "B L"], StepRows]:
        if row.ndim == 1:
            row, items = row[:, None], jax.tree.map(lambda leaf: leaf[:, None], items)
        written = row < self.capacity
        rows = StepRows(items=items, shape=row.shape, mask=written, rings=self.rings, target=row)
        return self._windows_at(row), rows

    def _windows_at(self, row: Int[Array, "..."]) -> Int[Array, "..."]:
        """Returns the slots of the windows that begin in these rows; past the end for none."""
        begins = (row < self.capacity) & (remainder(row, self.period) == 0)
        return jnp.where(begins, quotient(row, self.period), self.rings.num_slots)

    def _read(self, index: Index) -> Arrays:
        if self.episodes is None or not self.episodes.pads:
            first = jnp.minimum(index * self.period, self.capacity - 1)
            return storage.read_runs(self.data, first, self.sequence_length, self.length)
        ring, start = self.rings.ring_and_start(index)
        mask = self._index().in_episode(self.rings, index)
        last = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.int32) - 1
        offset = jnp.arange(self.sequence_length, dtype=jnp.int32)[None]
        place = remainder(start[:, None] + jnp.minimum(offset, last), self.length)
        return storage.read(self.data, ring[:, None] * self.length + place)  # [B, S, ...]


def _check_windows(sequence_length: int, length: int, ignored: int) -> None:
    """Checks that a ring can hold a window.

    Raises:
        ValueError: If windows are too long.
    """
    if sequence_length > length:
        raise ValueError(
            f"sequence_length is {sequence_length}, but a ring has length {length}; make "
            "windows shorter or rings longer"
        )
    if sequence_length + ignored > length:
        raise ValueError(
            f"num_earliest_ignored is {ignored} and sequence_length {sequence_length}, but a "
            f"ring has length {length}, so no window would ever be drawn; ignore fewer steps "
            "or make rings longer"
        )


def _in_order(rows: Rows) -> tuple[Int[Array, " E"], Int[Array, "E T"]]:
    """Returns the number of steps added to each environment, and their columns in order."""
    num_envs, num_steps = rows.shape
    column = jnp.broadcast_to(jnp.arange(num_steps, dtype=jnp.int32), rows.shape)
    if rows.mask is None:
        return jnp.full((num_envs,), num_steps, jnp.int32), column
    env = jnp.arange(num_envs, dtype=jnp.int32)[:, None]
    rank = jnp.where(rows.mask, jnp.cumsum(rows.mask, axis=1, dtype=jnp.int32) - 1, num_steps)
    order = jnp.zeros(rows.shape, jnp.int32).at[env, rank].set(column, mode="drop")
    return jnp.sum(rows.mask, axis=1, dtype=jnp.int32), order


def _rows_at(rows: StepRows, column: Int[Array, "E H"]) -> StepRows:
    """Returns the rows in these columns."""
    names = ("items", "mask", "version", "session", "target")
    columns: Any = _at({name: getattr(rows, name) for name in names}, column)
    return dataclasses.replace(rows, shape=column.shape, **columns)


def _at(tree: Arrays, column: Int[Array, "E H"]) -> Arrays:
    """Returns the columns ``[E, H, ...]`` of leaves ``[E, T, ...]``."""
    env = jnp.arange(column.shape[0], dtype=jnp.int32)[:, None]
    return jax.tree.map(lambda leaf: leaf.at[env, column].get(mode="promise_in_bounds"), tree)
