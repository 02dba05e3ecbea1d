"""An index of the episodes in rings of steps."""

import dataclasses
import math
from typing import Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from jaxbuf.core import checks, fields, sizes, storage
from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.types import Arrays, Index, Integers, Mask, Word, Words
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.rings import Rings
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.part import Part, Rows, StepRows
from jaxbuf.strategies.returns import (
    RECURRENCES,
    Recorded,
    Recurrence,
    recompute_returns,
    record,
    returns_at,
    truncate_returns,
)

Boundary = Literal["cross", "mask", "avoid"]
ShortWindows = Literal["terminated", "ended", "never"]

# Distances saturate here, so that an episode may be arbitrarily long.
_FAR = 2**30


@dataclasses.dataclass(frozen=True)
class Episodes(Part):
    """Keeps an index of episodes in a ``TrajectoryBuffer``.

    Row ``t`` holds the observation before an action, and the reward and flags after it. An episode
    ends with the flagged row, and the next row begins another episode. A path names a field of a
    step that holds one bool or float; dots separate the names of nested fields.

    The index takes 4 bytes per step; the returns and ``last`` take another 4 bytes each. ``add``
    keeps them up to date at a cost that does not depend on the size of the buffer: to fill in
    returns, it walks back over the steps of the episode that has just ended, and no others.

    Attributes:
        terminated: Path of the flags of steps at which an episode terminated.
        truncated: Path of the flags of steps at which an episode was truncated. The default is the
            field ``truncated`` next to ``terminated`` or, failing that, at the top level of a step.
            If a step has neither, no episode is truncated.
        last: Path of the flags of the last steps of episodes. By default these are the steps that
            are terminated or truncated. Set it if values end before episodes do, for example at the
            loss of a life.
        reward: Path of the rewards; used only if returns are recorded.
        boundary: ``"cross"``: windows may contain steps of several episodes. ``"mask"``: they may
            as well, and ``episode_mask`` marks the steps that belong together. ``"avoid"``: no
            window has steps of two episodes. A window that reaches past the end of its episode is
            short, or is not drawn, as ``short_windows`` says.
        short_windows: With the boundary ``"avoid"``, the ends of episodes up to which windows may
            be shorter than ``sequence_length``. Such a window is padded with copies of its last
            step, and ``episode_mask`` marks the steps before them. ``"terminated"``: a window may
            end with a step that terminated, which needs no next observation. So every step of an
            episode that terminated starts a window, also if the whole episode is shorter than a
            window, and n-step returns of all windows are right. ``"ended"``: it may also end with a
            step that was truncated; choose this if your steps hold their next observations.
            ``"never"``: all windows have ``sequence_length`` steps.
        period: Windows start at the first step of an episode and at every ``period``-th step after
            it. The ``period`` of the buffer counts places of the ring instead; leave it at 1.
        record_return: Whether to record the discounted return from each step to the end of its
            episode, the ``value`` of ``TrajectoryBuffer.episode``.
        discount: The factor per step, in ``[0, 1]``.
        default_return: The return of steps whose episode has not ended yet, or was truncated. If
            returns serve as lower bounds of values, choose a number that is at most the smallest
            possible return.
        reward_clip: The smallest and largest reward, ``(low, high)``; None does not clip rewards.
        recurrence: ``"plain"``: ``G[t] = reward[t] + discount * G[t + 1]``, or just ``reward[t]``
            where the episode terminated. ``"alf"``: for rows as in ALF's replay buffer, whose
            reward and flags arrive with the observation that they led to. Its recurrence is
            ``G[t] = reward[t + 1] + discount * G[t + 1]``, without the term ``reward[t + 1]`` if
            row ``t`` terminated but did not end its episode. The last row of an episode has the
            default return.

    Raises:
        ValueError: If an argument is not one of its choices, or a number is out of range.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> step = {"reward": jnp.float32(0), "terminated": jnp.bool_(False)}
        >>> episodes = jaxbuf.Episodes(record_return=True, discount=0.5, default_return=-9)
        >>> buffer = jaxbuf.TrajectoryBuffer.create(step, num_envs=1, length=8, episodes=episodes)
        >>> ends = jnp.array([[False, False, True, False, False]])
        >>> buffer = buffer.add({"reward": jnp.ones((1, 5)), "terminated": ends})
        >>> episode = buffer.episode(jnp.int32(0), jnp.arange(5))
        >>> episode.begin.tolist(), episode.to_end.tolist()
        ([0, 0, 0, 3, 3], [2, 1, 0, 1, 0])
        >>> episode.value.tolist()
        [1.75, 1.5, 1.0, -9.0, -9.0]

    References:
        The episode index and the recorded returns of ALF's replay buffer,
        https://github.com/HorizonRobotics/alf.
    """

    terminated: str = "terminated"
    truncated: str | None = None
    last: str | None = None
    reward: str = "reward"
    boundary: Boundary = "cross"
    record_return: bool = False
    discount: float = 0.99
    default_return: float = -1000.0
    reward_clip: tuple[float, float] | None = None
    recurrence: Literal["plain", "alf"] = "plain"
    short_windows: ShortWindows = "terminated"
    period: int = 1

    of_items = False
    of_windows = True
    of_shards = True

    def __post_init__(self) -> None:
        checks.check_field("terminated", self.terminated)
        checks.check_field("reward", self.reward)
        for name, path in (("truncated", self.truncated), ("last", self.last)):
            if path is not None:
                checks.check_field(name, path)
        checks.check_choice("boundary", self.boundary, get_args(Boundary))
        checks.check_choice("recurrence", self.recurrence, tuple(RECURRENCES))
        checks.settle(self, checks.check_flag, "record_return")
        checks.settle_number(self, "discount", "a factor in [0, 1]", lambda x: 0 <= x <= 1)
        checks.settle_number(
            self, "default_return", "a number to compare with", lambda x: not math.isnan(x)
        )
        if self.reward_clip is not None:
            checks.settle(
                self,
                checks.check_pair,
                "reward_clip",
                expected="two numbers, (low, high)",
                legal=lambda low, high: low <= high,
            )

        checks.check_choice("short_windows", self.short_windows, get_args(ShortWindows))
        checks.settle(self, sizes.check_count, "period")
        if self.boundary == "avoid":
            object.__setattr__(self, "reasons", ("refused_across_episodes",))
        object.__setattr__(self, "removes", self.boundary == "avoid" or self.period > 1)

    def init_windows(self, data: Arrays, rings: Rings) -> "EpisodeIndex":
        """Returns the index of empty rings.

        Args:
            data: The buffer's storage, leaves ``[E * N, ...]``.
            rings: The rings.

        Raises:
            ValueError: If a field is missing, is not a scalar, or has the wrong dtype.
        """
        truncated = fields.truncation(data, self.terminated, self.truncated)
        flags = {"terminated": self.terminated, "truncated": truncated, "last": self.last}
        for name, path in flags.items():
            if path is not None:
                _check(data, path, name, np.bool_)
        if self.record_return:
            _check(data, self.reward, "reward", np.floating)
        num_envs, steps = rings.num_envs, rings.num_envs * rings.length
        return EpisodeIndex(
            behind=jnp.zeros((steps,), jnp.int32),  # [E * N]
            returns=jnp.zeros((steps,), jnp.float32) if self.record_return else (),  # [E * N]
            since=() if self.last is None else jnp.zeros((steps,), jnp.int32),  # [E * N]
            run=jnp.zeros((num_envs,), jnp.int32),  # [E]
            pending=jnp.zeros((num_envs,), jnp.int32),  # [E]
            cut=jnp.zeros((num_envs,), bool),  # [E]
            episodes=self,
        )

    def move(self, empty: "EpisodeIndex", state: "EpisodeIndex", moves: Moves) -> "EpisodeIndex":
        """Moves the entries of each step; the open episodes stay as they are."""
        behind, returns, since = moves.of_rows(
            (empty.behind, empty.returns, empty.since), (state.behind, state.returns, state.since)
        )
        names = ("run", "pending", "cut")
        blank, open_episodes = ({name: getattr(x, name) for name in names} for x in (empty, state))
        open_episodes = moves.of_envs(blank, open_episodes)
        return state.replace(behind=behind, returns=returns, since=since, **open_episodes)

    def on_add(self, state: "EpisodeIndex", index: Int[Array, "E T"], rows: Rows) -> "EpisodeIndex":
        del index
        assert isinstance(rows, StepRows)
        return state.extend(rows.items, rows.rings, rows.target, rows.mask)

    def check_write(self, path: str | None, data: Arrays, *, every: bool) -> None:
        """Refuses changes of the flags, and of single rewards whose returns are recorded.

        Args:
            path: The field that is to change; None for whole steps.
            data: The buffer's storage; only its structure matters.
            every: Whether the field of all steps changes, as in ``map_field``.

        Raises:
            ValueError: If the field is, or has, one of these.
        """
        truncated = fields.truncation(data, self.terminated, self.truncated)
        for flag in (self.terminated, truncated, self.last):
            if flag is not None and fields.overlap(data, path, flag):
                raise ValueError(
                    f"path is {path!r}, but episodes knows the ends of episodes from {flag!r}, "
                    "which cannot be changed; name another field, or end open episodes with "
                    "end_episodes"
                )
        if self.record_return and not every and fields.overlap(data, path, self.reward):
            raise ValueError(
                f"path is {path!r}, but episodes records the returns of {self.reward!r}; change "
                "the rewards of all steps with map_field, which records the returns anew, or "
                "create the buffer with record_return=False"
            )

    def on_map(
        self, state: "EpisodeIndex", data: Arrays, rings: Rings, path: str | None
    ) -> "EpisodeIndex":
        """Returns the index after ``map_field`` has changed a field of all steps."""
        if not (self.record_return and fields.overlap(data, path, self.reward)):
            return state
        return state.recomputed(rings, data)

    @property
    def pads(self) -> bool:
        """True if windows may be shorter than ``sequence_length``."""
        return self.boundary == "avoid" and self.short_windows != "never"

    @property
    def returns_by(self) -> Recurrence:
        """The recurrence that computes returns."""
        return RECURRENCES[self.recurrence](self.discount, self.default_return)

    def flags(self, steps: Arrays) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
        """Returns masks of the rows that terminated and of the last rows of episodes."""
        terminated = fields.find(steps, self.terminated)
        if self.last is not None:
            return terminated, fields.find(steps, self.last)
        truncated = fields.truncation(steps, self.terminated, self.truncated)
        if truncated is None:
            return terminated, terminated
        return terminated, terminated | fields.find(steps, truncated)

    def truncate(self, data: Arrays, row: Int[Array, " E"]) -> tuple[Arrays, list[str]]:
        """Sets the flags of steps at which episodes are truncated.

        Args:
            data: The buffer's storage, leaves ``[E * N, ...]``.
            row: The rows of these steps, all different; past the end for none.

        Returns:
            The storage, and the names of the fields that have changed.
        """
        truncated = fields.truncation(data, self.terminated, self.truncated)
        paths = [path for path in dict.fromkeys((truncated, self.last)) if path is not None]
        for path in paths:
            flags = fields.find(data, path)
            flags = flags.at[row].set(True, mode="drop", unique_indices=True)
            data = fields.replace(data, path, flags)
        return data, paths

    def rewards(self, steps: Arrays) -> Float[Array, "..."]:
        """Returns the clipped rewards."""
        rewards = fields.find(steps, self.reward).astype(jnp.float32)
        return rewards if self.reward_clip is None else jnp.clip(rewards, *self.reward_clip)


class EpisodeIndex(struct.PyTreeNode):
    """The state of ``Episodes``, an index of a buffer's steps.

    It stores the distance from each step back to the first step of its episode. Two steps belong to
    the same episode if and only if the episode of the later one begins no later than the earlier
    step. The end of an episode can therefore be found by bisection, and no entry changes when its
    episode continues, ends, or has its first steps overwritten.

    While an episode is open its returns are unknown, and the rewards are stored in their stead.

    Attributes:
        behind: The number of steps from the first step of its episode to each step, ``[E * N]``
            int32; it saturates at 2**30.
        returns: Returns of steps whose return is known, and rewards of the others, ``[E * N]``.
            An empty tuple if returns are not recorded.
        run: The number of steps of the open episode of each ring so far, ``[E]`` int32.
        pending: The number of newest steps of each ring that have no return yet, ``[E]`` int32.
        cut: Whether the first of these had terminated, ``[E]``; used only by ALF's recurrence.
        since: The number of steps from the last terminated step of its episode, or else from the
            first step of the episode, to each step, ``[E * N]`` int32; it saturates like
            ``behind``. An empty tuple without ``Episodes.last``, because then only the last step of
            an episode can have terminated.
        episodes: The configuration.
    """

    behind: Int[Array, " EN"]
    returns: PyTree[Float[Array, " EN"]]
    run: Int[Array, " E"]
    pending: Int[Array, " E"]
    cut: Bool[Array, " E"]
    since: PyTree[Int[Array, " EN"]]
    episodes: Episodes = struct.field(pytree_node=False)

    def extend(
        self,
        steps: Arrays,
        rings: Rings,
        target: Int[Array, "E T"],
        mask: Bool[Array, "E T"] | None,
    ) -> Self:
        """Adds new steps to the index.

        Args:
            steps: The new steps, leaves ``[E, T, ...]``.
            rings: The rings before these steps are added.
            target: Where each step is stored, as returned by ``Rings.place``.
            mask: A mask of the steps that are added; None for all.
        """
        terminated, last = self.episodes.flags(steps)  # [E, T]
        if mask is None:
            mask = jnp.ones(last.shape, bool)  # [E, T]
        terminated, last = terminated & mask, last & mask  # [E, T]
        rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1  # [E, T]
        count = rank[:, -1:] + 1  # [E, 1]
        run = self.run[:, None]  # [E, 1]
        # The number of the step that begins the next episode; the first new step has number 0.
        begin = lax.cummax(jnp.where(last, rank + 1, -run), axis=1)  # [E, T]
        before = jnp.concatenate([-run, begin[:, :-1]], axis=1)  # [E, T]
        behind = jnp.minimum(rank - before, _FAR)  # [E, T]
        rows = target.reshape(-1)  # [E * T]
        index = self.replace(
            behind=storage.write(self.behind, behind.reshape(-1), rows),  # [E * N]
            run=jnp.minimum(count - begin[:, -1:], _FAR)[:, 0],  # [E]
        )
        if self.episodes.last is not None:
            restarts = mask & (terminated | (behind == 0))  # [E, T]
            index = index.replace(since=self._since(restarts, rank, rings, rows))
        if self.episodes.record_return:
            rewards = self.episodes.rewards(steps)  # [E, T]
            new = record(
                self.episodes.returns_by,
                self._recorded,
                rewards,
                terminated,
                last,
                mask,
                rings,
                rows,
            )
            index = index.replace(returns=new.values, pending=new.pending, cut=new.cut)
        return index

    def episode(self, rings: Rings, env: Index, position: Words, steps: Arrays) -> "Episode":
        """Looks up the episodes of single steps.

        Args:
            rings: The rings of the buffer.
            env: The environments of the steps.
            position: The positions of the steps.
            steps: The stored steps, leaves ``[E * N, ...]``.
        """
        row = rings.row_of(env, position)  # [B]
        live = row < self.behind.size  # [B]
        behind = jnp.where(live, self.steps_before(row), 0)  # [B]
        steps_back = behind.astype(jnp.uint32)  # [B]
        earliest = (rings.end - rings.held).at[env].get(mode="clip")  # [B]
        return Episode(
            begin=position - steps_back,  # [B]
            held_begin=position - jnp.minimum(steps_back, position - earliest),  # [B]
            to_end=jnp.where(live, self._to_end(rings, env, position, row), -1),
            is_first=live & (behind == 0),  # [B]
            is_last=live & self._ended(rings, env, position),  # [B]
            last_terminated=position
            - jnp.where(live, self._terminated(row, steps), 0).astype(jnp.uint32),
            value=returns_at(self.episodes.returns_by, self._recorded, rings, env, position, row)
            if self.episodes.record_return
            else None,
        )

    def _to_end(self, rings: Rings, env: Index, position: Words, row: Index) -> Index:
        """Returns the number of held steps of the episode after each stored step."""
        ahead = (rings.end.at[env].get(mode="clip") - jnp.uint32(1) - position).astype(jnp.int32)
        length = rings.length
        bits = (length - 1).bit_length()
        start = row - remainder(row, length)

        def halve(i: Array, distance: Index) -> Integers:
            candidate = distance + (jnp.int32(1) << (bits - 1 - i))
            same = self.steps_before(start + remainder(row + candidate, length)) >= candidate
            return jnp.where((candidate <= ahead) & same, candidate, distance)

        begin = vary_with(jnp.zeros_like(row), self.behind)
        return lax.fori_loop(0, bits, halve, begin)

    def _ended(self, rings: Rings, env: Index, position: Words) -> Mask:
        """Returns whether an episode ended with each stored step."""
        after = rings.row_of(env, position + jnp.uint32(1))
        newest = position + jnp.uint32(1) == rings.end.at[env].get(mode="clip")
        return jnp.where(
            newest,
            self.run.at[env].get(mode="clip") == 0,
            (after < self.behind.size) & (self.steps_before(after) == 0),
        )

    def _terminated(self, row: Index, steps: Arrays) -> Index:
        """Returns the number of steps since the last one that terminated, or else the first."""
        if self.episodes.last is not None:
            return storage.read(self.since, row)
        terminated, _ = self.episodes.flags(steps)
        flags = storage.read(terminated, row)
        return jnp.where(flags, 0, self.steps_before(row))

    def in_episode(self, rings: Rings, index: Index) -> Bool[Array, "B S"]:
        """Returns a mask of the steps of windows in the episode of the window's first step."""
        rows = rings.rows_of(index)
        behind = self.steps_before(rows.reshape(-1)).reshape(rows.shape)
        offset = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
        # Short windows may reach past the newest step.
        return (behind >= offset) & (offset <= rings.age(index)[:, None])

    def completed(
        self, rings: Rings, steps: Arrays, count: Int[Array, " E"], most: int
    ) -> "Completed":
        """Returns the windows that the newest steps of each ring have completed.

        Args:
            rings: The rings with these steps, which are in the index already.
            steps: The stored steps, leaves ``[E * N, ...]``.
            count: The number of new steps of each ring.
            most: A static bound of ``count``.
        """
        avoids, extra = self.episodes.boundary == "avoid", rings.sequence_length - 1
        rows = min(most + extra, rings.length)
        # The axis of time comes first, [H, E]: XLA:CPU takes maxima over it in a sixth of the time.
        age = jnp.arange(rows, dtype=jnp.int32)[:, None]  # [H, 1]
        env = jnp.arange(rings.num_envs, dtype=jnp.int32)  # [E]
        index = remainder(rings.cursor.astype(jnp.int32)[None] - 1 - age, rings.length)  # [H, E]
        stored = {"behind": self.behind}  # [E * N]
        if self.episodes.short_windows == "terminated":
            stored["terminated"] = self.episodes.flags(steps)[0]  # [E * N]
        earliest = env * rings.length + index[-1]  # [E]
        runs = storage.read_runs(stored, earliest, rows, rings.length)  # [E, H], earliest first
        columns = {name: run.T[::-1].astype(jnp.int32) for name, run in runs.items()}  # [H, E]
        behind, terminated = columns["behind"], columns.get("terminated", jnp.int32(0))
        # A step ended its episode if the step after it, one row up, begins another.
        ended = jnp.concatenate([self.run[None] == 0, behind[:-1] == 0])  # [H, E]
        # Twice the age of the last step of each step's episode, plus 1 if it terminated; negative
        # while the episode is open.
        code = lax.cummax(jnp.where(ended, 2 * age + terminated, -2), axis=0)  # [H, E]
        last, terminated_last = code >> 1, (code & 1) == 1  # [H, E]
        short = (last >= 0) & (age - last < extra) if avoids else jnp.zeros(last.shape, bool)
        end = jnp.where(short, last, age - extra)  # [H, E]
        complete = ~short | (self.episodes.short_windows == "ended") | terminated_last  # [H, E]
        new, startable = count[None], rings.held.astype(jnp.int32)[None] - rings.ignored  # [1, E]
        starts = (age < startable) & (remainder(index, rings.period) == 0)  # [H, E]
        if self.episodes.period > 1:
            starts &= remainder(behind, self.episodes.period) == 0  # [H, E]
        slot = env[None] * rings.windows_per_ring + quotient(index, rings.period)  # [H, E]
        refused = starts & ~complete & (age >= extra) & (age - extra < new)  # [H, E]
        starts &= complete & (end >= 0) & (end < new)  # [H, E]
        begun = (age < new) & ~starts & (remainder(index, rings.period) == 0)  # [H, E]
        return Completed(
            slots=jnp.where(starts, slot, rings.num_slots).T,  # [E, H]
            end=end.T,  # [E, H]
            short=short.T,  # [E, H]
            broken=jnp.where(begun, slot, rings.num_slots)[:most].T,
            refused=jnp.sum(refused, dtype=jnp.uint32),  # []
        )

    def recomputed(self, rings: Rings, steps: Arrays) -> Self:
        """Returns the index with the returns recomputed from the rewards of the stored steps.

        Args:
            rings: The rings of the steps.
            steps: The stored steps, leaves ``[E * N, ...]``.
        """
        terminated, _ = self.episodes.flags(steps)
        returns = recompute_returns(
            self.episodes.returns_by,
            self.returns,
            rings,
            self.episodes.rewards(steps),
            terminated,
            self.behind,
            self.run == 0,
        )
        return self.replace(returns=returns)

    def end(self, rings: Rings, mask: Bool[Array, " E"]) -> Self:
        """Ends the open episodes of these rings, which were truncated by their newest step."""
        index = self
        if self.episodes.record_return:
            returns = truncate_returns(self.episodes.returns_by, self._recorded, rings, mask)
            index = self.replace(returns=returns)
        return index.clear(mask)

    def clear(self, mask: Bool[Array, " E"]) -> Self:
        """Forgets the open episodes of these rings."""
        return self.replace(
            run=jnp.where(mask, 0, self.run),
            pending=jnp.where(mask, 0, self.pending),
            cut=self.cut & ~mask,
        )

    def steps_before(self, row: Index) -> Integers:
        """Returns the number of steps between the start of its episode and each stored step."""
        return storage.read(self.behind, row)

    def _since(
        self,
        restarts: Bool[Array, "E T"],
        rank: Int[Array, "E T"],
        rings: Rings,
        rows: Int[Array, " ET"],
    ) -> Int[Array, " EN"]:
        """Returns ``since`` with the new rows; the count begins again at ``restarts``."""
        env = jnp.arange(rings.num_envs, dtype=jnp.int32)
        newest = remainder(rings.cursor.astype(jnp.int32) - 1, rings.length)
        before = storage.read(self.since, env * rings.length + newest)[:, None] + 1
        origin = lax.cummax(jnp.where(restarts, rank, -before), axis=1)
        since = jnp.minimum(rank - origin, _FAR).reshape(-1)
        return storage.write(self.since, since, rows)

    @property
    def _recorded(self) -> Recorded:
        return Recorded(self.returns, self.pending, self.cut)


class Episode(NamedTuple):
    """The episodes of sampled windows, or of single steps.

    All fields have the shape of the slots or positions, ``[B]`` for sampled windows, whose first
    steps count. Positions count the steps of a ring: see ``TrajectoryBuffer.end_position``.

    Attributes:
        begin: The position of the first step of the episode, which may have been overwritten; the
            step's own position if it is not held.
        held_begin: The position of the first step of the episode that the ring still holds; the
            step's own position if it is not held.
        to_end: The number of steps that follow in the episode, up to the newest one if it is open;
            -1 if the step itself is not held.
        is_first: Whether the episode began with this step; False if it is not held.
        is_last: Whether the episode ended with this step; False if it is not held.
        last_terminated: The position of the last step up to this one whose flag
            ``Episodes.terminated`` is set, or else ``begin``. Without ``Episodes.last`` only the
            last step of an episode can have it; with it, any step can, for example at the loss of a
            life. The step may have been overwritten. The step's own position if it is not held.
        value: The discounted return from this step to the end of the episode, float32. It is
            ``Episodes.default_return`` if the episode is open or was truncated, or if the step is
            not held. None without ``Episodes(record_return=True)``.
    """

    begin: UInt[Array, "..."]
    held_begin: UInt[Array, "..."]
    to_end: Int[Array, "..."]
    is_first: Bool[Array, "..."]
    is_last: Bool[Array, "..."]
    last_terminated: UInt[Array, "..."]
    value: Float[Array, "..."] | None


class Completed(NamedTuple):
    """The windows that the newest steps of each ring have completed.

    Attributes:
        slots: Their slots, by the age of their first step, ``[E, H]``; past the end where none was
            completed.
        end: The number of steps after the last step of each of them, ``[E, H]``.
        short: Whether a window is cut short by the end of its episode, ``[E, H]``.
        broken: The slots that begin with a new step but are not completed, ``[E, T]``.
        refused: The number of windows that are not drawn, because they would reach past the end of
            their episode.
    """

    slots: Int[Array, "E H"]
    end: Int[Array, "E H"]
    short: Bool[Array, "E H"]
    broken: Int[Array, "E T"]
    refused: Word


def _check(data: Arrays, path: str, name: str, kind: type[np.generic]) -> None:
    """Raises ValueError if a path does not lead to a single bool, or float, of a step."""
    array = fields.need(data, path, f"episodes.{name}", "the example has")
    if not isinstance(array, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise ValueError(f"episodes.{name} is {path!r}, which is not a single array")
    if not jnp.issubdtype(array.dtype, kind):
        expected = "bool" if kind is np.bool_ else "a floating dtype"
        raise ValueError(
            f"episodes.{name} is {path!r}, of dtype {array.dtype}; expected {expected}"
        )
    if array.ndim != 1:
        raise ValueError(
            f"episodes.{name} is {path!r}, of shape {array.shape[1:]}; expected one number per "
            "step, of shape ()"
        )
