"""Where episodes begin and end in rings of steps, and what they returned."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from jaxbuf.core import checks, fields, storage
from jaxbuf.core.varying import vary_with
from jaxbuf.occupancy.rings import Rings
from jaxbuf.strategies.part import Part, StepRows

Boundary = Literal["cross", "mask", "avoid"]
Recurrence = Literal["plain", "alf"]

# Distances stop growing here, so that an episode may go on for ever.
_FAR = 2**30
# Steps that are filled in at once.
_CHUNK = 64
# What is known of the steps before one: nothing yet, their returns, or that there are none.
_OPEN, _KNOWN, _CUT = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Episodes(Part):
    """Keep an index of episodes in a ``TrajectoryBuffer``.

    Row ``t`` holds the observation before an action, and the reward and the flags after it: an
    episode ends with the row that is flagged, and the next row begins another. A path names a field
    of a step, one bool or float; dots lead into nested fields.

    The index takes four bytes per step, the returns another four, and so does ``last``. ``add``
    keeps all up to date at a cost that does not depend on how much is stored: a return is filled in
    by walking back over the steps of the episode that has just ended, and over no others.

    Attributes:
        terminated: Path of the flags that an episode terminated here.
        truncated: Path of the flags that an episode was cut off here. By default the field
            ``truncated`` beside ``terminated``, or else at the top, if steps have one; without, no
            episode is cut off.
        last: Path of the flags that an episode ended here. By default it does where it terminated
            or was truncated; give it where values stop before episodes do, as at the loss of a
            life.
        reward: Path of the rewards, read if returns are recorded.
        boundary: ``"cross"``: windows are drawn wherever they lie. ``"mask"``: so they are, and
            ``episode_mask`` tells which of their steps belong together. ``"avoid"``: a window with
            steps of two episodes is never drawn, has no mass and cannot be given any.
        record_return: Record the discounted return from each step to the end of its episode, for
            ``episode_return``.
        discount: Factor per step, in ``[0, 1]``.
        default_return: The return of steps whose episode has not ended yet, or was truncated. To
            bound values from below by returns, choose nothing larger than the least return.
        reward_clip: Least and largest reward, ``(low, high)``; None leaves rewards as they are.
        recurrence: ``"plain"``: ``G[t] = reward[t] + discount * G[t + 1]``, and just the reward
            where the episode terminated. ``"alf"``: rows as ALF's replay buffer has them, whose
            reward and flags arrive with the observation that they led to, and its recurrence
            ``G[t] = reward[t + 1] + discount * G[t + 1]``, in which only ``reward[t + 1]`` is left
            out where row ``t`` terminated within an episode. The last row of an episode has the
            default.

    Raises:
        ValueError: If a choice is unknown or a number is out of its range.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> step = {"reward": jnp.float32(0), "terminated": jnp.bool_(False)}
        >>> episodes = jaxbuf.Episodes(record_return=True, discount=0.5, default_return=-9)
        >>> buffer = jaxbuf.TrajectoryBuffer.create(step, num_envs=1, length=8, episodes=episodes)
        >>> ends = jnp.array([[False, False, True, False, False]])
        >>> buffer = buffer.add({"reward": jnp.ones((1, 5)), "terminated": ends})
        >>> env, position = jnp.zeros(5, jnp.int32), jnp.arange(5)
        >>> buffer.episode_begin_position(env, position).tolist()
        [0, 0, 0, 3, 3]
        >>> buffer.steps_to_episode_end(env, position).tolist()
        [2, 1, 0, 1, 0]
        >>> buffer.episode_return(env, position).tolist()
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
    recurrence: Recurrence = "plain"

    of_items = False
    of_windows = True

    def __post_init__(self) -> None:
        for name in ("terminated", "truncated", "last", "reward"):
            path = getattr(self, name)
            if path is not None or name in ("terminated", "reward"):
                checks.check_field(name, path)
        for name, choices in (("boundary", Boundary), ("recurrence", Recurrence)):
            checks.check_choice(name, getattr(self, name), get_args(choices))
        record_return = checks.check_flag("record_return", self.record_return)
        object.__setattr__(self, "record_return", record_return)
        discount = checks.check_number(
            "discount", self.discount, "a factor in [0, 1]", lambda x: 0 <= x <= 1
        )
        object.__setattr__(self, "discount", discount)
        default_return = checks.check_number(
            "default_return",
            self.default_return,
            "a number to compare with",
            lambda x: not math.isnan(x),
        )
        object.__setattr__(self, "default_return", default_return)
        if self.reward_clip is not None:
            clip = checks.check_pair(
                "reward_clip",
                self.reward_clip,
                "two numbers, (low, high)",
                lambda low, high: low <= high,
            )
            object.__setattr__(self, "reward_clip", clip)

        if self.boundary == "avoid":
            object.__setattr__(self, "removes", True)
            object.__setattr__(self, "reasons", ("refused_across_episodes",))

    def init(self, data: PyTree[Any], slots: int) -> "EpisodeIndex":
        """The index of an empty buffer.

        Args:
            data: Its storage, leaves ``[E, N, ...]``.
            slots: How many windows there can be.

        Raises:
            ValueError: If a field is missing, holds more than a number, or has the wrong dtype.
        """
        del slots
        truncated = fields.truncation(data, self.terminated, self.truncated)
        flags = {"terminated": self.terminated, "truncated": truncated, "last": self.last}
        for name, path in flags.items():
            if path is not None:
                _check(data, path, name, jnp.bool_)
        if self.record_return:
            _check(data, self.reward, "reward", jnp.floating)
        num_envs, length = jax.tree.leaves(data)[0].shape[:2]
        return EpisodeIndex(
            behind=jnp.zeros((num_envs, length), jnp.int32),
            returns=jnp.zeros((num_envs, length if self.record_return else 0), jnp.float32),
            since=() if self.last is None else jnp.zeros((num_envs, length), jnp.int32),
            counters=jnp.zeros((num_envs, 3), jnp.int32),
            episodes=self,
        )

    def on_steps(
        self, state: "EpisodeIndex", index: Int[Array, "E T"], rows: StepRows
    ) -> "EpisodeIndex":
        """The index with new steps."""
        del index
        return state.extend(rows.items, rows.rings, rows.target, rows.mask)

    def refuse_windows(
        self, state: "EpisodeIndex", index: Int[Array, "E T"], rows: StepRows
    ) -> dict[str, Bool[Array, "E T"]]:
        """Those with steps of two episodes, if they are avoided."""
        del index
        if self.boundary != "avoid":
            return {}
        # A window is complete with its last step.
        before = state.steps_before(rows.target.reshape(-1)).reshape(rows.shape)
        return {"refused_across_episodes": before < rows.rings.sequence_length - 1}

    def on_clear_envs(self, state: "EpisodeIndex", envs: Bool[Array, " E"]) -> "EpisodeIndex":
        """No episode is open in these rings."""
        return state.clear(envs)

    def flags(self, steps: PyTree[Array]) -> tuple[Bool[Array, "E T"], Bool[Array, "E T"]]:
        """Which rows terminated, and which are the last of their episode."""
        terminated = fields.find(steps, self.terminated)
        if self.last is not None:
            return terminated, fields.find(steps, self.last)
        truncated = fields.truncation(steps, self.terminated, self.truncated)
        if truncated is None:
            return terminated, terminated
        return terminated, terminated | fields.find(steps, truncated)

    def rewards(self, steps: PyTree[Array]) -> Float[Array, "E T"]:
        """The rewards, clipped."""
        rewards = fields.find(steps, self.reward).astype(jnp.float32)
        return rewards if self.reward_clip is None else jnp.clip(rewards, *self.reward_clip)


class EpisodeIndex(struct.PyTreeNode):
    """What ``Episodes`` keeps of a buffer's steps.

    For each step how far back its episode began: two steps belong to one episode exactly if the
    later one's begins no later than the earlier one. So the end of an episode is found by halving,
    and no step changes when its episode goes on, ends, or loses its head to the ring.

    The returns of an open episode are not known yet; their places hold its rewards until then.

    Attributes:
        behind: Steps from the first one of its episode to each step, ``[E, N]`` int32; it stops
            growing at 2**30.
        returns: Returns of finished steps, and rewards of others, ``[E, N]``; ``[E, 0]`` if they
            are not recorded.
        counters: For each ring how many steps its open episode has had, how many of the newest
            steps have no return yet, and whether the first of these had terminated (which matters
            to ALF's recurrence only); ``[E, 3]`` int32.
        since: Steps from the last one that terminated, or else the first of its episode, to each
            step, ``[E, N]`` int32, which stops growing like ``behind``; nothing without
            ``Episodes.last``, for then only the last step of an episode can have terminated.
        episodes: The configuration.
    """

    behind: Int[Array, "E N"]
    returns: Float[Array, "E N"]
    counters: Int[Array, "E 3"]
    since: Any
    episodes: Episodes = struct.field(pytree_node=False)

    def extend(
        self,
        steps: PyTree[Array],
        rings: Rings,
        target: Int[Array, "E T"],
        taken: Bool[Array, "E T"] | None,
    ) -> Self:
        """Note steps that are written.

        Args:
            steps: Leaves ``[E, T, ...]``.
            rings: The rings without them.
            target: Where they go, as ``Rings.place`` says.
            taken: Which of them are taken.
        """
        terminated, last = self.episodes.flags(steps)
        if taken is None:
            taken = jnp.ones(last.shape, bool)
        terminated, last = terminated & taken, last & taken
        rank = jnp.cumsum(taken, axis=1, dtype=jnp.int32) - 1
        count = rank[:, -1:] + 1
        run = self.counters[:, :1]
        # Steps are numbered from the first new one; here those that begin an episode.
        begin = lax.cummax(jnp.where(last, rank + 1, -run), axis=1)
        before = jnp.concatenate([-run, begin[:, :-1]], axis=1)
        behind = jnp.minimum(rank - before, _FAR)
        run = jnp.minimum(count - begin[:, -1:], _FAR)
        counters = jnp.concatenate([run, self.counters[:, 1:]], axis=1)
        rows = target.reshape(-1)
        index = self.replace(
            behind=storage.write(self.behind.reshape(-1), behind.reshape(-1), rows).reshape(
                self.behind.shape
            ),
            counters=counters,
        )
        if self.episodes.last is not None:
            anew = taken & (terminated | (behind == 0))
            index = index.replace(since=self._since(anew, rank, rings, rows))
        if self.episodes.record_return:
            rewards = self.episodes.rewards(steps)
            index = index._record(rewards, terminated, last, taken, rank, rings, rows)
        return index

    def begin(
        self, rings: Rings, env: Int[Array, " B"], position: UInt[Array, " B"]
    ) -> UInt[Array, " B"]:
        """The position of the first step of the episode; its own if the step is not held."""
        row = rings.locate(env, position)
        return position - jnp.where(row < self.behind.size, self.steps_before(row), 0).astype(
            jnp.uint32
        )

    def held_begin(
        self, rings: Rings, env: Int[Array, " B"], position: UInt[Array, " B"]
    ) -> UInt[Array, " B"]:
        """The same for the first step of the episode that is still held."""
        earliest = (rings.end - rings.held).at[env].get(mode="clip")
        back = position - self.begin(rings, env, position)
        return position - jnp.minimum(back, position - earliest)

    def last_terminated(
        self,
        rings: Rings,
        env: Int[Array, " B"],
        position: UInt[Array, " B"],
        data: PyTree[Array],
    ) -> UInt[Array, " B"]:
        """The position of the last step up to this one that terminated, or the episode's first.

        Args:
            rings: Where steps lie.
            env: Whose steps.
            position: Which steps; the result is its own where a step is not held.
            data: The steps themselves, leaves ``[E, N, ...]``.
        """
        row = rings.locate(env, position)
        if self.episodes.last is None:
            terminated, _ = self.episodes.flags(data)
            here = storage.read(terminated.reshape(-1), row)
            since = jnp.where(here, 0, self.steps_before(row))
        else:
            since = storage.read(self.since.reshape(-1), row)
        return position - jnp.where(row < self.behind.size, since, 0).astype(jnp.uint32)

    def remaining(
        self, rings: Rings, env: Int[Array, " B"], position: UInt[Array, " B"]
    ) -> Int[Array, " B"]:
        """Steps from here to the last one held of the episode; -1 if the step is not held."""
        row = rings.locate(env, position)
        ahead = (rings.end.at[env].get(mode="clip") - jnp.uint32(1) - position).astype(jnp.int32)
        length = self.behind.shape[-1]
        bits = (length - 1).bit_length()
        start = row - row % length

        def halve(i: Array, found: Int[Array, " B"]) -> Int[Array, " B"]:
            further = found + (jnp.int32(1) << (bits - 1 - i))
            same = self.steps_before(start + (row + further) % length) >= further
            return jnp.where((further <= ahead) & same, further, found)

        begin = vary_with(jnp.zeros_like(row), self.behind)
        found = lax.fori_loop(0, bits, halve, begin)
        return jnp.where(row < self.behind.size, found, -1)

    def is_first(
        self, rings: Rings, env: Int[Array, " B"], position: UInt[Array, " B"]
    ) -> Bool[Array, " B"]:
        """Whether an episode began with this step; not if the step is not held."""
        row = rings.locate(env, position)
        return (row < self.behind.size) & (self.steps_before(row) == 0)

    def is_last(
        self, rings: Rings, env: Int[Array, " B"], position: UInt[Array, " B"]
    ) -> Bool[Array, " B"]:
        """Whether an episode ended with this step; not if the step is not held."""
        after = rings.locate(env, position + jnp.uint32(1))
        newest = position + jnp.uint32(1) == rings.end.at[env].get(mode="clip")
        ended = jnp.where(
            newest,
            self.counters.at[env, 0].get(mode="clip") == 0,
            (after < self.behind.size) & (self.steps_before(after) == 0),
        )
        return ended & (rings.locate(env, position) < self.behind.size)

    def together(self, rings: Rings, index: Int[Array, " B"]) -> Bool[Array, "B S"]:
        """Which steps of windows belong to the episode of their first step."""
        rows = rings.window(index)
        behind = self.steps_before(rows.reshape(-1)).reshape(rows.shape)
        return behind >= jnp.arange(rows.shape[1], dtype=jnp.int32)[None]

    def recorded(
        self, rings: Rings, env: Int[Array, " B"], position: UInt[Array, " B"]
    ) -> Float[Array, " B"]:
        """The return of each step; the default if it has none, or is not held."""
        row = rings.locate(env, position)
        back = rings.end.at[env].get(mode="clip") - jnp.uint32(1) - position
        known = back >= self.counters.at[env, 1].get(mode="clip").astype(jnp.uint32)
        value = storage.read(self.returns.reshape(-1), row)
        known &= row < self.returns.size
        return jnp.where(known, value, jnp.float32(self.episodes.default_return))

    def clear(self, mask: Bool[Array, " E"]) -> Self:
        """No episode is open in these rings."""
        return self.replace(counters=jnp.where(mask[:, None], 0, self.counters))

    def steps_before(self, row: Int[Array, " B"]) -> Int[Array, " B"]:
        """How many steps of its episode lie before the step at each place."""
        return storage.read(self.behind.reshape(-1), row)

    def _since(
        self,
        anew: Bool[Array, "E T"],
        rank: Int[Array, "E T"],
        rings: Rings,
        rows: Int[Array, " ET"],
    ) -> Int[Array, "E N"]:
        """``since`` with the new rows, of which some begin to count ``anew``."""
        newest = (rings.counters[:, :1].astype(jnp.int32) - 1) % self.since.shape[1]
        before = jnp.take_along_axis(self.since, newest, axis=1) + 1
        origin = lax.cummax(jnp.where(anew, rank, -before), axis=1)
        since = jnp.minimum(rank - origin, _FAR).reshape(-1)
        return storage.write(self.since.reshape(-1), since, rows).reshape(self.since.shape)

    def _record(
        self,
        rewards: Float[Array, "E T"],
        terminated: Bool[Array, "E T"],
        last: Bool[Array, "E T"],
        taken: Bool[Array, "E T"],
        rank: Int[Array, "E T"],
        rings: Rings,
        rows: Int[Array, " ET"],
    ) -> Self:
        """Write new rows, and fill in what they tell of older ones."""
        alf = self.episodes.recurrence == "alf"
        pending, cut = self.counters[:, 1:2], self.counters[:, 2:] > 0
        num_envs = pending.shape[0]

        def back(carry: _Tail, row: tuple[Array, ...]) -> tuple[_Tail, Array]:
            reward, terminated, last, taken = row
            value, tail = _step_back(self.episodes, carry, reward, terminated, last)
            tail = jax.tree.map(functools.partial(jnp.where, taken), tail, carry)
            return tail, value

        nothing = jnp.zeros((num_envs,), jnp.float32)
        tail = _Tail(jnp.full((num_envs,), _OPEN, jnp.int32), nothing, nothing)
        columns = tuple(array.T for array in (rewards, terminated, last, taken))
        tail = vary_with(tail, columns)
        tail, values = lax.scan(back, tail, columns, reverse=True)

        # What comes after the newest row that settled those before it is pending.
        settles = terminated | last
        inner = terminated & ~last
        until = jnp.where(settles, rank + 1, -pending)
        if alf:
            # Such a row is itself the first of those that wait for the next.
            until = jnp.where(inner, rank, until)
        settled = jnp.max(until, axis=1, keepdims=True)
        here = settles & (until == settled)
        cut_now = jnp.where(
            jnp.any(settles, axis=1, keepdims=True),
            jnp.any(here & inner, axis=1, keepdims=True),
            cut,
        )
        count = rank[:, -1:] + 1
        left = jnp.minimum(count - settled, _FAR)
        counters = jnp.concatenate(
            [self.counters[:, :1], left, (cut_now & alf).astype(jnp.int32)], axis=1
        )

        returns = storage.write(self.returns.reshape(-1), values.T.reshape(-1), rows)
        position = rings.counters[:, 0].astype(jnp.int32)
        room = jnp.maximum(rings.length - count[:, 0], 0)
        kept = jnp.minimum(jnp.minimum(pending[:, 0], rings.held.astype(jnp.int32)), room)
        steps = jnp.where(tail.state == _OPEN, 0, kept)
        first = jnp.where(cut[:, 0], pending[:, 0] - 1, -1)
        fill = _filler(self.episodes)
        returns = fill(returns.reshape(self.returns.shape), position, steps, first, *tail)
        return self.replace(returns=returns, counters=counters)


class _Tail(NamedTuple):
    """What a return needs to know of the step after: see ``_OPEN``, its return and its reward."""

    state: Int[Array, " E"]
    value: Float[Array, " E"]
    reward: Float[Array, " E"]


def _step_back(
    episodes: Episodes,
    after: _Tail,
    reward: Array,
    terminated: Bool[Array, "..."],
    last: Bool[Array, "..."],
) -> tuple[Array, _Tail]:
    """What to store for a step, and what the step before it needs to know."""
    nothing = jnp.zeros_like(reward)
    default = jnp.full_like(reward, episodes.default_return)
    onward = jnp.float32(episodes.discount) * after.value
    state = jnp.where(last, _CUT, after.state)
    ended = jnp.where(terminated, _KNOWN, state)
    if episodes.recurrence == "alf":
        value = onward + jnp.where(terminated, nothing, after.reward)
        tail = _Tail(ended, jnp.where(terminated, nothing, value), reward)
    else:
        state, value = ended, reward + jnp.where(terminated, nothing, onward)
        tail = _Tail(ended, value, reward)
    stored = jnp.where(state == _KNOWN, value, jnp.where(state == _CUT, default, reward))
    return stored, tail


@functools.cache
def _filler(episodes: Episodes) -> Callable[..., Array]:
    """``_fill`` for these episodes, under ``vmap`` as well."""
    call = custom_vmap(functools.partial(_fill, episodes))

    @call.def_vmap
    def _(axis_size: int, batched: list[bool], *args: Array) -> Any:
        # More buffers are more rings: a batched loop would select between whole arrays.
        merged = [
            (arg if is_batched else jnp.broadcast_to(arg, (axis_size, *arg.shape))).reshape(
                -1, *arg.shape[1 + is_batched :]
            )
            for arg, is_batched in zip(args, batched, strict=True)
        ]
        filled = call(*merged)
        return filled.reshape(axis_size, -1, *filled.shape[1:]), True

    return call


def _fill(
    episodes: Episodes,
    returns: Float[Array, "E N"],
    position: Int[Array, " E"],
    steps: Int[Array, " E"],
    first: Int[Array, " E"],
    *tail: Array,
) -> Float[Array, "E N"]:
    """Turn pending rewards into returns, walking back from the newest.

    Args:
        episodes: The configuration.
        returns: What is stored.
        position: The place after the newest pending step of each ring.
        steps: How many to fill in.
        first: Which of them had terminated, counted from the newest.
        tail: The three parts of ``_Tail``.
    """
    rings, length = returns.shape
    base = jnp.arange(rings, dtype=jnp.int32)[:, None] * length
    state = tail[0][:, None]

    def unfinished(carry: tuple[Array, ...]) -> Array:
        return jnp.any(carry[1] < steps)

    def together(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    def back(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        flat, done, value, reward = carry
        count = done + jnp.arange(_CHUNK, dtype=jnp.int32)[None]
        at = base + (position[:, None] - 1 - count) % length
        old = flat.at[at].get(mode="promise_in_bounds")
        gained = old
        if episodes.recurrence == "alf":
            gained = jnp.concatenate([reward[:, None], old[:, :-1]], axis=1)
            gained = jnp.where(count == first[:, None], 0.0, gained)
        factor = jnp.full_like(gained, episodes.discount)
        factor, gained = lax.associative_scan(together, (factor, gained), axis=1)
        known = gained + factor * value[:, None]
        filled = jnp.where(state == _KNOWN, known, jnp.float32(episodes.default_return))
        at = jnp.where(count < steps[:, None], at, flat.size)
        flat = flat.at[at].set(filled, mode="drop", unique_indices=True)
        return flat, done + _CHUNK, known[:, -1], old[:, -1]

    carry = vary_with(
        (returns.reshape(-1), jnp.int32(0), tail[1], tail[2]), returns, steps, position, tail
    )
    return lax.while_loop(unfinished, back, carry)[0].reshape(returns.shape)


def _check(data: PyTree[Array], path: str, name: str, kind: Any) -> None:
    """Refuse a path that leads to no single bool, or float, of a step."""
    found = fields.need(data, path, f"episodes.{name}", "the example has")
    if not hasattr(found, "dtype"):
        raise ValueError(f"episodes.{name} is {path!r}, which is no single array")
    if not jnp.issubdtype(found.dtype, kind):
        expected = "bool" if kind is jnp.bool_ else "a floating dtype"
        raise ValueError(
            f"episodes.{name} is {path!r}, of dtype {found.dtype}; expected {expected}"
        )
    if found.ndim != 2:
        raise ValueError(
            f"episodes.{name} is {path!r}, of shape {found.shape[2:]}; expected one number a step, "
            "of shape ()"
        )
