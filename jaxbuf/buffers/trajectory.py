"""Time-ordered steps of several environments, sampled as windows."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt

from jaxbuf.buffers import common
from jaxbuf.buffers.body import Body, counter_names, refuse
from jaxbuf.buffers.lookups import EpisodeLookups, broadcast_steps
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import checks, describe, fields, numbers, sizes, storage, trees
from jaxbuf.core.calls import call
from jaxbuf.core.slots import Slots
from jaxbuf.occupancy.rings import Rings
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.episodes import EpisodeIndex, Episodes
from jaxbuf.strategies.freshness import Freshness
from jaxbuf.strategies.part import Part, Rows, StepRows
from jaxbuf.strategies.protocols import Sampler
from jaxbuf.strategies.samplers import Uniform


class Steps(struct.PyTreeNode):
    """Steps that were read from every ring, in order of time.

    Attributes:
        data: The steps, leaves ``[E, T, ...]``; arbitrary where invalid.
        position: Their positions, ``[E, T]``; see ``TrajectoryBuffer.end_position``.
        valid: Which rows hold a step, ``[E, T]``: the first ones of every ring.
    """

    data: PyTree[Array]
    position: UInt[Array, "E T"]
    valid: Bool[Array, "E T"]

    __repr__ = describe.text
    _repr_html_ = describe.rich


class TrajectoryBuffer(EpisodeLookups, Body):
    """The last ``length`` steps of each of ``num_envs`` environments.

    Every environment has a ring of its own with its own write position, so that any of them may be
    added to at any time. Samples are windows of ``sequence_length`` consecutive steps that never
    cross a write position: the newest ``sequence_length - 1`` steps of a ring become starts as
    later ones arrive. A window is stale as soon as its first step is overwritten.

    Like an ``ItemBuffer`` it is one immutable pytree, its configuration static, its methods pure.

    Attributes:
        data: The steps, leaves ``[num_envs, length, ...]``.
        occupancy: Which steps and windows there are.
        sampler_state: What the sampler keeps: one slot for each place where a window may start.
        counters: Steps added, priorities rejected, and windows refused so far, by name in
            ``counter_names``, ``[K]`` uint32; they wrap.
        extra_states: What each of the extras keeps.
        sampler: How windows are drawn.
        extras: The parts beside the sampler: an index of episodes, limits on freshness, and your
            own.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> step = {"obs": jnp.zeros(3), "reward": jnp.float32(0)}
        >>> buffer = jaxbuf.TrajectoryBuffer.create(step, num_envs=4, length=100, sequence_length=8)
        >>> rollout = {"obs": jnp.ones((4, 20, 3)), "reward": jnp.ones((4, 20))}
        >>> buffer = buffer.add(rollout)
        >>> int(buffer.size), buffer.sample(jax.random.key(0), 32).data["obs"].shape
        (80, (32, 8, 3))
    """

    occupancy: Rings | Subset

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    @sizes.allocating("what the buffer keeps of its steps")
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
        """An empty buffer.

        Args:
            example: One unbatched step: arrays or ``jax.ShapeDtypeStruct``. Only shapes and dtypes
                matter.
            num_envs: Rings ``E``.
            length: Most steps held of each environment.
            sequence_length: Steps in a window.
            period: Windows start at multiples of it, counted from the beginning of the ring's
                memory; 1 allows every start, ``sequence_length`` makes windows disjoint.
            num_earliest_ignored: How many of the earliest steps of each ring start no window and
                are not gathered. They stay readable: what looks back from the start of a window,
                such as a stack of frames, finds them.
            sampler: How windows are drawn.
            episodes: Keep an index of episodes, by the flags among the steps.
            freshness: Retires windows that were used enough or are too stale; None retires none. A
                window is as stale as its first step. Steps stay, so ``size`` counts them as before.
            parts: Parts of your own, which derive from ``jaxbuf.strategies.Part``.

        Raises:
            ValueError: If a number is not an integer of at least 1, a window is longer than a ring,
                ``length`` is no multiple of ``period``, too many steps are ignored, there are more
                than 2**30 steps, the sampler needs scores or is no ``WindowSampler``, ``example``
                holds anything but arrays, or ``episodes`` names a field that is missing, of another
                shape, or of the wrong dtype.
        """
        num_envs = common.check_count("num_envs", num_envs)
        length = common.check_count("length", length)
        sequence_length = common.check_count("sequence_length", sequence_length)
        period = common.check_count("period", period)
        ignored = common.check_count("num_earliest_ignored", num_earliest_ignored, least=0)
        if num_envs * length > 2**30:
            raise ValueError(
                f"num_envs * length is {num_envs * length}; expected at most 2**30 steps"
            )
        _check_windows(sequence_length, length, ignored)
        if length % period:
            raise ValueError(
                f"length is {length} and period {period}; length must be a multiple of period"
            )
        common.check_sampler(sampler)
        common.check_removes(sampler, "a window is gone")
        if sampler.uses_score:
            raise ValueError(f"{sampler} needs scores, which steps do not have; choose another one")
        extras = common.check_parts(parts, episodes=episodes, freshness=freshness)
        for part in extras:
            if not part.of_windows:
                raise ValueError(f"a TrajectoryBuffer cannot have {part}, a part of items")
        data = storage.allocate(example, (num_envs, length))
        rings = Rings.create(num_envs, length, sequence_length, period, ignored)
        picks = any(part.removes for part in extras)
        occupancy = Subset.create(rings, rings.capacity) if picks else rings
        if sampler.uses_age:
            common.needs_order(occupancy, f"{sampler}")
        return cls(
            data=data,
            occupancy=occupancy,
            sampler_state=sampler.init(rings.capacity),
            counters=jnp.zeros((len(counter_names(extras)),), jnp.uint32),
            extra_states=tuple(part.init(data, rings.capacity) for part in extras),
            sampler=sampler,
            extras=extras,
        )

    @property
    def episodes(self) -> Episodes | None:
        """Which flags end an episode; None without an index of episodes."""
        return self._find(Episodes)[0]

    @property
    def episode_index(self) -> EpisodeIndex | None:
        """Where episodes begin and end; None without ``Episodes``."""
        return self._find(Episodes)[1] if self.episodes else None

    @property
    def num_envs(self) -> int:
        """Number of rings."""
        return self.rings.num_envs

    @property
    def length(self) -> int:
        """Most steps held of each environment."""
        return self.rings.length

    @property
    def sequence_length(self) -> int:
        """Steps in a window."""
        return self.rings.sequence_length

    @property
    def period(self) -> int:
        """Distance between the places where windows start."""
        return self.rings.period

    @property
    def num_earliest_ignored(self) -> int:
        """How many of the earliest steps of each ring start no window."""
        return self.rings.ignored

    @property
    def capacity(self) -> int:
        """Most steps held at a time, ``num_envs * length``."""
        return self.num_envs * self.length

    @property
    def max_windows(self) -> int:
        """Most windows that can be drawn from at a time, those of all rings together.

        A full ring has ``length - num_earliest_ignored - sequence_length + 1`` places for the first
        step of a window, and one window for every ``period`` of them.
        """
        places = self.length - self.num_earliest_ignored - self.sequence_length + 1
        return self.num_envs * -(-places // self.period)

    @property
    def size(self) -> Int[Array, ""]:
        """Steps held now, of all environments together."""
        return self.rings.steps

    @property
    def num_windows(self) -> Int[Array, ""]:
        """Windows that can be drawn now, of all environments together."""
        return self.occupancy.size

    def can_sample(self, batch_size: int | Int[Array, ""] = 1) -> Bool[Array, ""]:
        """Whether there are at least ``batch_size`` windows; at most ``max_windows`` can be."""
        return self.num_windows >= common.check_wanted(batch_size)

    def add(
        self,
        steps: PyTree[Array],
        *,
        priority: Float[Array, "..."] | None = None,
        version: Int[Array, "..."] | None = None,
        session: Int[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | None = None,
        env_ids: Int[Array, " K"] | None = None,
    ) -> Self:
        """Append one step, or ``T`` of them, to each environment, or to some of them.

        Args:
            steps: Leaves ``[num_envs, *shape]`` or ``[num_envs, T, *shape]``, in the example's
                dtypes. Of more than ``length`` the last ones stay.
            priority: ``[num_envs]`` or ``[num_envs, T]``, each for the window that ends at that
                step; finite and not negative. Another becomes the default and is counted in
                ``metrics()["rejected"]``; the step stays. The default, also without priorities, is
                the larger of the sampler's ``initial_priority`` and the largest priority in the
                buffer.
            version: Of the policy that made the steps, ``[num_envs]`` or ``[num_envs, T]`` int32,
                for ``Freshness``; without, the learner's own. Steps that are too stale already are
                kept, for without them others would become neighbors in time that are not; but no
                window starts at them: those are counted in ``metrics()["refused_stale"]``.
            session: Of the learner whose policy that was, ``[num_envs]`` or ``[num_envs, T]``
                int32, for ``Freshness``; without, the learner's own. Steps of another session are
                too stale, whatever their version.
            mask: Which steps to take, ``[num_envs]`` or ``[num_envs, T]``; those of a row keep
                their order, and the others cost no place and move no write position.
            env_ids: Which environments the rows are of, ``[K]`` different numbers below
                ``num_envs``; everything else then has a row for each of these instead of for each
                environment. Where numbers are traced, so that they cannot be checked, those that
                name no environment are left out, and of several rows for one the last counts.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example, if
                ``priority``, ``version`` or ``session`` is given and nothing here uses it, or if
                ``env_ids`` names no environment or one twice.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), num_envs=4, length=8)
            >>> buffer = buffer.add(jnp.array([[1, 2], [3, 4]]), env_ids=jnp.array([3, 0]))
            >>> buffer.end_position.tolist(), buffer.data[0, :2].tolist()
            ([2, 0, 0, 2], [3, 4])
        """
        self = common.check_single(self)
        if env_ids is not None:
            return self._add_to(env_ids, steps, priority, version, session, mask)
        steps, given, value = self._check(steps, priority, version, session, mask)
        if given.shape[1] == 0:
            return self
        return call(TrajectoryBuffer._put, self, steps, given, value)

    def _put(self, steps: PyTree[Array], given: Rows, value: Float[Array, "E T"] | None) -> Self:
        """Place steps, write them, say which windows come and go, and tell everybody."""
        rings, target, broken, completed = self.rings.place(given.shape[1], given.mask)
        rows = StepRows(**vars(given), rings=self.rings, target=target)
        begins = (target < self.capacity) & (target % self.period == 0)
        index = jnp.where(begins, target // self.period, rings.capacity)
        extras = self.replace(
            extra_states=self._tell(lambda part, state: part.on_steps(state, index, rows))
        )
        counts = {"adds": rows.count}
        if value is not None:
            refuse({"rejected": ~self.sampler.accepts(value)}, rows, counts)
        completed, refused = extras._refuse(completed, rows, counts)
        gone = jnp.concatenate([broken, *refused], axis=1).reshape(-1)
        state = jax.lax.stop_gradient(self.sampler_state)
        return self.replace(
            data=_unfold(storage.write(_fold(self.data), _fold(steps), target.reshape(-1)), self),
            occupancy=self._seen(rings, completed.reshape(-1), gone),
            sampler_state=self.sampler.on_slide(
                state, completed.reshape(-1), None if value is None else value.reshape(-1), gone
            ),
            counters=self._counted(counts),
            extra_states=extras._tell(lambda part, state: part.on_remove(state, gone)),
        )

    def sample(
        self, key: PRNGKeyArray, batch_size: int, *, sequence_length: int | None = None
    ) -> Sample:
        """Draw a batch of windows.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``; static.
            sequence_length: Steps in a window, this time; static. None takes the buffer's own. All
                windows of that length are drawn, also those that are shorter than the buffer's and
                newer. Such a one has the default priority, and an update of its priority is
                dropped. It costs a copy of the priorities.

        Returns:
            A ``Sample`` with leaves ``[B, sequence_length, ...]``, in order of time. Its shapes
            never depend on what the buffer holds: rows that cannot be drawn have ``valid`` False,
            probability 0 and index ``capacity``.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, ``key`` not a single
                key, or
                ``sequence_length`` is longer than a ring, or not the buffer's own where some
                windows are taken out: with ``Freshness``, or ``Episodes(boundary="avoid")``.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 1, 8, sequence_length=2)
            >>> buffer = buffer.add(jnp.arange(4)[None])
            >>> buffer.sample(jax.random.key(0), 2, sequence_length=4).data.tolist()
            [[0, 1, 2, 3], [0, 1, 2, 3]]
        """
        rows = common.check_batch_size(batch_size)
        common.check_key(key)
        self = common.check_single(self)
        return self._windows_of(sequence_length)._sample(key, rows)

    def clear(self, envs: Int[Array, " K"] | Bool[Array, " E"] | None = None) -> Self:
        """The buffer without its steps, or without those of some environments.

        Slots sampled before stay stale; positions and counters go on.

        Args:
            envs: Which environments: a mask ``[num_envs]``, or numbers ``[K]``, of which those that
                name no environment are ignored. Without, all of them; the result then shares no
                array with the original, so that either may be donated.

        Raises:
            ValueError: When traced, if ``envs`` is neither.
        """
        if envs is None:
            return self._cleared(self.rings.capacity)
        self = trees.on_device(self)
        mask = self._check_envs(envs)
        starts = self.length // self.period
        slot = jnp.arange(self.num_envs * starts, dtype=jnp.int32)
        gone = jnp.where(jnp.repeat(mask, starts), slot, slot.size)
        left = self._without(gone, self.rings.clear(mask))
        return left.replace(
            extra_states=left._tell(lambda part, state: part.on_clear_envs(state, mask))
        )

    @property
    def end_position(self) -> UInt[Array, " E"]:
        """The position that the next step of each environment will have, ``[num_envs]``.

        A step's position counts what was written to its ring before it. It never changes while the
        step is held, and neighbors in time have neighboring positions. It is unsigned and wraps at
        2**32, so differences of positions are right for ever. ``clear`` does not begin anew: it
        goes on from a later multiple of ``length``.
        """
        return self.rings.end

    @property
    def earliest_position(self) -> UInt[Array, " E"]:
        """The position of the earliest step held of each environment; the end if there is none."""
        return self.rings.end - self.rings.held

    def locate(self, slots: Slots) -> tuple[Int[Array, " B"], UInt[Array, " B"]]:
        """The environment of each sampled window, and the position of its first step, ``[B]``.

        Of rows that are not valid the environment is ``num_envs``.
        """
        common.check_slots(slots)
        env, position = self.rings.starts_at(slots.index, slots.generation)
        return jnp.where(slots.index < self.capacity, env, self.num_envs), position

    def get_field(
        self, path: str, env_ids: Int[Array, "..."], positions: UInt[Array, "..."]
    ) -> PyTree[Array]:
        """Read one field of single steps.

        Args:
            path: Its name; dots lead into nested fields. It may name a part of a step that holds
                several fields.
            env_ids: Whose steps, integers of any shape that broadcasts with ``positions``.
            positions: Which steps, as ``locate``, ``earliest_position`` and ``end_position`` count.

        Returns:
            The field, leaves ``[..., *shape]``; zeros where there is no such environment or the
            step is not held: not written yet, or gone.

        Raises:
            ValueError: When traced, if there is no such field, or a number is not an
                integer.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> step = {"obs": {"x": jnp.float32(0)}}
            >>> buffer = jaxbuf.TrajectoryBuffer.create(step, num_envs=2, length=3)
            >>> buffer = buffer.add({"obs": {"x": jnp.arange(8.0).reshape(2, 4)}})
            >>> buffer.earliest_position.tolist()
            [1, 1]
            >>> buffer.get_field("obs.x", jnp.array([0, 0, 1]), jnp.array([0, 1, 3])).tolist()
            [0.0, 1.0, 7.0]
        """
        self = common.check_single(self)
        field = fields.need(self.data, path, "path", "steps have")
        if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(field)):
            raise ValueError(f"path is {path!r}, which leads to no arrays")
        env, position, shape = broadcast_steps(env_ids, positions)
        row = self.rings.locate(env, position)
        held = row < self.capacity

        def shaped(leaf: Array) -> Array:
            known = held.reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.where(known, leaf, jnp.zeros_like(leaf)).reshape(*shape, *leaf.shape[1:])

        return jax.tree.map(shaped, storage.read(_fold(field), row))

    def gather_all(self, *, ignore_earliest: bool = True) -> Steps:
        """All steps held, in order of time.

        Args:
            ignore_earliest: Leave out the ``num_earliest_ignored`` earliest steps of each ring.

        Returns:
            ``Steps`` with leaves ``[num_envs, length, ...]``, whatever the buffer holds: the rows
            of a ring begin with its earliest step, and those past the newest one are invalid.
        """
        self = common.check_single(self)
        ignore = checks.check_flag("ignore_earliest", ignore_earliest)
        skip = self.num_earliest_ignored if ignore else 0
        return self._earliest(self.length, skip)

    def dequeue(self, n: int, *, mask: Bool[Array, " E"] | None = None) -> tuple[Self, Steps]:
        """Take the ``n`` earliest steps out of every ring.

        Args:
            n: Most steps of each environment; static.
            mask: From which environments, ``[num_envs]``.

        Returns:
            The buffer without them, and ``Steps`` with leaves ``[num_envs, n, ...]``, earliest
            first. A ring that holds fewer gives what it has; its other rows are invalid. Windows
            that lost a step are no longer drawn.

        Raises:
            ValueError: If ``n`` is not an integer from 1 to ``length``.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), num_envs=1, length=4)
            >>> buffer, steps = buffer.add(jnp.arange(2.0, 10.0)[None]).dequeue(2)
            >>> steps.data.tolist(), int(buffer.size)
            ([[6.0, 7.0]], 2)
        """
        self = common.check_single(self)
        n = common.check_count("n", n)
        if n > self.length:
            raise ValueError(f"n is {n}, but a ring has length {self.length}")
        taken: Any = None
        if mask is not None:
            shape = (self.num_envs,)
            taken = storage.check_rows(mask, "mask", shape, np.bool_, "(num_envs,)")
        steps = self._earliest(n, 0)
        if taken is not None:
            steps = steps.replace(valid=steps.valid & taken[:, None])
        count = jnp.sum(steps.valid, axis=1, dtype=jnp.int32)
        rings, gone = self.rings.drop(count, n)
        return self._without(gone, rings), steps

    def options(self) -> dict[str, Any]:
        """All but the sizes that it was created with, as keyword arguments of ``create``."""
        return {
            **super().options(),
            "sequence_length": self.sequence_length,
            "period": self.period,
            "num_earliest_ignored": self.num_earliest_ignored,
            "episodes": self.episodes,
        }

    def _sizes(self) -> dict[str, Array]:
        return {"size": self.size, "windows": self.occupancy.size}

    def _check(
        self, steps: Any, priority: Any, version: Any, session: Any, mask: Any
    ) -> tuple[PyTree[Array], Rows, Any]:
        """What ``add`` was given, ``[num_envs, T]``, once it is known to fit.

        Returns:
            The steps, what is known of each row, and the priorities.
        """
        steps, batch = common.check_steps(self.data, steps, self.num_envs)
        axes = "(num_envs, T)" if len(batch) > 1 else "(num_envs,)"
        shape = (self.num_envs, batch[1] if len(batch) > 1 else 1)
        common.check_version_used(self.extras, version, session)
        if priority is not None:
            common.needs_priority(self.sampler, "priority was given")
            priority = common.check_priority(priority, batch, axes).reshape(shape)
        rows = Rows(
            items=jax.lax.stop_gradient(steps),
            shape=shape,
            mask=None if mask is None else common.check_step_mask(mask, batch),
            version=None if version is None else _per_step(version, "version", batch, axes),
            session=None if session is None else _per_step(session, "session", batch, axes),
        )
        return steps, rows, priority

    def _refuse(
        self, completed: Int[Array, "E T"], rows: StepRows, counts: dict[str, Array]
    ) -> tuple[Int[Array, "E T"], list[Int[Array, "E T"]]]:
        """The windows that are complete without those that the parts refuse, and these."""
        refused: list[Int[Array, "E T"]] = []
        slots = self.rings.capacity
        for part, state in self._parts():
            for reason, mask in part.refuse_windows(state, completed, rows).items():
                hit = mask & (completed < slots)
                counts[reason] = jnp.sum(hit, dtype=jnp.uint32)
                refused.append(jnp.where(hit, completed, slots))
                completed = jnp.where(hit, slots, completed)
        return completed, refused

    def _add_to(
        self, env_ids: Any, steps: Any, priority: Any, version: Any, session: Any, mask: Any
    ) -> Self:
        """``add`` of one row for each of some environments: the others get masked ones."""
        ids = self._check_env_ids(env_ids)
        count = ids.shape[0]
        steps, batch = common.check_steps(self.data, steps, count)
        if count == 0:
            return self
        axes = "(K, T)" if len(batch) > 1 else "(K,)"
        taken = common.check_step_mask(np.ones(count, bool) if mask is None else mask, batch)
        if priority is not None:
            priority = common.check_priority(priority, batch, axes)
            priority = priority.reshape(taken.shape)
        if version is not None:
            version = _per_step(version, "version", batch, axes)
        if session is not None:
            session = _per_step(session, "session", batch, axes)
        # A negative number would count from the end.
        at = jnp.where(ids >= 0, ids, self.num_envs)
        row = jnp.full((self.num_envs,), -1, jnp.int32)
        row = row.at[at].max(jnp.arange(count, dtype=jnp.int32), mode="drop")
        here = jnp.maximum(row, 0)
        steps, priority, version, session, taken = jax.tree.map(
            lambda leaf: leaf[here], (steps, priority, version, session, taken)
        )
        taken &= (row >= 0)[:, None]
        return self.add(steps, priority=priority, version=version, session=session, mask=taken)

    def _earliest(self, count: int, skip: int) -> Steps:
        """The first ``count`` steps of each ring after ``skip`` of them."""
        env = jnp.arange(self.num_envs, dtype=jnp.int32)[:, None]
        rank = jnp.arange(count, dtype=jnp.uint32)[None]
        position = (self.earliest_position + jnp.uint32(skip))[:, None] + rank
        row = self.rings.locate(
            jnp.broadcast_to(env, position.shape).reshape(-1), position.reshape(-1)
        )
        data = jax.tree.map(
            lambda leaf: leaf.reshape(*position.shape, *leaf.shape[1:]),
            storage.read(_fold(self.data), row),
        )
        valid = rank + jnp.uint32(skip) < self.rings.held[:, None]
        return Steps(data=data, position=position, valid=valid)

    def _without(self, gone: Int[Array, "..."], rings: Rings) -> Self:
        """The buffer once there are no windows at these slots."""
        nothing, slots = jnp.zeros((0,), jnp.int32), gone.reshape(-1)
        state = jax.lax.stop_gradient(self.sampler_state)
        return self.replace(
            occupancy=self._seen(rings, nothing, slots),
            sampler_state=self.sampler.remove(state, slots),
            extra_states=self._tell(lambda part, state: part.on_remove(state, slots)),
        )

    def _seen(self, rings: Rings, come: Int[Array, " B"], gone: Int[Array, " R"]) -> Rings | Subset:
        """The occupancy after some windows have come and others have gone."""
        if not isinstance(self.occupancy, Subset):
            return rings
        member = jnp.concatenate([jnp.ones(come.shape, bool), jnp.zeros(gone.shape, bool)])
        return self.occupancy.replace(inner=rings).mark(jnp.concatenate([come, gone]), member)

    def _check_envs(self, envs: Any) -> Bool[Array, " E"]:
        """``envs`` as a mask."""
        given = numbers.abstract(envs, "envs")
        if given.dtype == jnp.bool_:
            return storage.check_rows(envs, "envs", (self.num_envs,), np.bool_, "(num_envs,)")
        if len(given.shape) != 1:
            raise ValueError(f"envs has shape {given.shape}; expected (K,), or a mask (num_envs,)")
        ids = numbers.integers(envs, "envs")
        # A negative number would count from the end.
        at = jnp.where(ids >= 0, ids, self.num_envs)
        return jnp.zeros((self.num_envs,), bool).at[at].set(True, mode="drop")

    def _windows_of(self, sequence_length: int | None) -> Self:
        """The same steps seen as windows of another length; None changes nothing."""
        if sequence_length is None:
            return self
        size = common.check_count("sequence_length", sequence_length)
        if size == self.sequence_length:
            return self
        _check_windows(size, self.length, self.num_earliest_ignored)
        if isinstance(self.occupancy, Subset):
            raise ValueError(
                f"sequence_length is {size}, but this buffer takes out some of its windows of "
                f"{self.sequence_length} steps (freshness, or episodes that are not crossed); "
                f"create it with sequence_length={size}"
            )
        rings, come, gone = self.rings.resize(size)
        state = jax.lax.stop_gradient(self.sampler_state)
        state = self.sampler.on_slide(state, come.reshape(-1), None, gone.reshape(-1))
        return self.replace(occupancy=rings, sampler_state=state)

    def _check_env_ids(self, env_ids: Any) -> Int[Array, " K"]:
        """``env_ids`` as an array."""
        given = numbers.ids(env_ids, "env_ids")
        if given.ndim != 1:
            raise ValueError(f"env_ids has shape {given.shape}; expected (K,)")
        if isinstance(given, np.ndarray):
            wrong = given[(given < 0) | (given >= self.num_envs)]
            if wrong.size:
                raise ValueError(
                    f"env_ids has {wrong[0]}; expected numbers from 0 to num_envs - 1, which is "
                    f"{self.num_envs - 1}"
                )
            names, times = np.unique(given, return_counts=True)
            if np.any(times > 1):
                raise ValueError(
                    f"env_ids has {names[times > 1][0]} twice; expected different numbers, and the "
                    "steps of one environment in one row, [K, T]"
                )
        return jnp.asarray(given).astype(jnp.int32)

    def _read(self, index: Int[Array, " B"]) -> PyTree[Array]:
        """The windows at ``index``, leaves ``[B, sequence_length, ...]``."""
        ring, start = self.rings.split(index)
        return storage.read_runs(self.data, ring, start, self.sequence_length)


def _check_windows(sequence_length: int, length: int, ignored: int) -> None:
    """Refuse windows that no ring could ever hold.

    Raises:
        ValueError: If they are too long.
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


def _per_step(value: Any, name: str, batch: tuple[int, ...], axes: str) -> Int[Array, "E T"]:
    """One integer for each step, or the same for all steps of an environment."""
    shape = batch[:1] if np.ndim(value) == 1 else batch
    array = storage.check_rows(value, name, shape, np.int32, axes).reshape(batch[0], -1)
    return jnp.broadcast_to(array, (batch[0], batch[1] if len(batch) > 1 else 1))


def _fold(data: PyTree[Array]) -> PyTree[Array]:
    """Leaves ``[E, T, ...]`` as ``[E * T, ...]``."""
    return jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2), data)


def _unfold(data: PyTree[Array], buffer: TrajectoryBuffer) -> PyTree[Array]:
    """The inverse of ``_fold`` for the storage of ``buffer``."""
    leading = (buffer.num_envs, buffer.length)
    return jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[1:]), data)
