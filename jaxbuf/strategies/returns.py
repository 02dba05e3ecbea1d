"""Returns of the steps in rings, recorded as episodes end."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Int

from jaxbuf.core import storage
from jaxbuf.core.division import remainder
from jaxbuf.core.types import Floats, Index, Words
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.rings import Rings

# The number of steps whose returns are filled in at once.
_CHUNK = 64
# The state of the return of the steps before a given one: not known yet, known, or undefined,
# because the episode was cut off.
_OPEN, _KNOWN, _CUT = 0, 1, 2
# Counts saturate here, so that an episode may be arbitrarily long.
_FAR = 2**30


class Recorded(NamedTuple):
    """The returns of the steps in rings, or their rewards where no return is known yet.

    Attributes:
        values: Returns of steps whose return is known, and rewards of the others, ``[E * N]``.
        pending: The number of newest steps of each ring that have no return yet, ``[E]`` int32.
        cut: Whether nothing that follows counts for the first of these, ``[E]``: it terminated, but
            its episode goes on. Only ``AsInAlf`` sets it.
    """

    values: Float[Array, " EN"]
    pending: Int[Array, " E"]
    cut: Bool[Array, " E"]


class Tail(NamedTuple):
    """The numbers of the next step that the return of a step depends on.

    Attributes:
        state: Whether the return is known; one of the three numbers above, int32.
        value: The return of the step after.
        reward: The reward of the step after.
    """

    state: Int[Array, " E"]
    value: Float[Array, " E"]
    reward: Float[Array, " E"]


@dataclasses.dataclass(frozen=True)
class Recurrence(abc.ABC):
    """A rule that computes the return of a step from its reward and the next step.

    Attributes:
        discount: The factor per step.
        default_return: The return of steps that have none.
    """

    discount: float
    default_return: float

    @abc.abstractmethod
    def back(
        self, after: Tail, reward: Array, terminated: Bool[Array, "..."], last: Bool[Array, "..."]
    ) -> tuple[Array, Tail]:
        """Returns the value to store for a step, and the tail for the step before it."""

    @abc.abstractmethod
    def settle(
        self, terminated: Bool[Array, "E T"], last: Bool[Array, "E T"], rank: Int[Array, "E T"]
    ) -> tuple[Int[Array, "E T"], Bool[Array, "E T"]]:
        """Finds the steps whose returns are settled by the new steps.

        Args:
            terminated: Which steps terminated.
            last: Which steps end their episode.
            rank: The numbers of the steps.

        Returns:
            For each step that terminated or ended its episode, the number of the first step whose
            return is still unknown; and whether nothing that follows counts for that step.
        """

    @abc.abstractmethod
    def gains(
        self, rewards: Float[Array, "E C"], after: Float[Array, " E"], nothing: Bool[Array, "E C"]
    ) -> Float[Array, "E C"]:
        """Returns the reward that each of these consecutive steps adds to its discounted return.

        Args:
            rewards: The rewards of the steps, the newest first.
            after: The reward of the step after the newest of them.
            nothing: The steps for which nothing that follows counts.
        """

    def _stored(self, state: Array, value: Array, reward: Array) -> Array:
        default = jnp.full_like(reward, self.default_return)
        return jnp.where(state == _KNOWN, value, jnp.where(state == _CUT, default, reward))


class Plain(Recurrence):
    """``G[t] = reward[t] + discount * G[t + 1]``, or just ``reward[t]`` where it terminated."""

    def back(
        self, after: Tail, reward: Array, terminated: Bool[Array, "..."], last: Bool[Array, "..."]
    ) -> tuple[Array, Tail]:
        """Returns the value to store for a step, and the tail for the step before it."""
        state = jnp.where(terminated, _KNOWN, jnp.where(last, _CUT, after.state))
        onward = jnp.float32(self.discount) * after.value
        value = reward + jnp.where(terminated, jnp.zeros_like(reward), onward)
        return self._stored(state, value, reward), Tail(state, value, reward)

    def settle(
        self, terminated: Bool[Array, "E T"], last: Bool[Array, "E T"], rank: Int[Array, "E T"]
    ) -> tuple[Int[Array, "E T"], Bool[Array, "E T"]]:
        """Settles all steps up to and including one that terminated or ended its episode."""
        del terminated
        return rank + 1, jnp.zeros_like(last)

    def gains(
        self, rewards: Float[Array, "E C"], after: Float[Array, " E"], nothing: Bool[Array, "E C"]
    ) -> Float[Array, "E C"]:
        """Returns the rewards of the steps."""
        del after, nothing
        return rewards


class AsInAlf(Recurrence):
    """``G[t] = reward[t + 1] + discount * G[t + 1]``, for rows as in ALF's replay buffer.

    The term ``reward[t + 1]`` is left out if row ``t`` terminated but did not end its episode, and
    the last row of an episode has no return.

    References:
        https://github.com/HorizonRobotics/alf
    """

    def back(
        self, after: Tail, reward: Array, terminated: Bool[Array, "..."], last: Bool[Array, "..."]
    ) -> tuple[Array, Tail]:
        """Returns the value to store for a step, and the tail for the step before it."""
        zero = jnp.zeros_like(reward)
        state = jnp.where(last, _CUT, after.state)
        value = jnp.float32(self.discount) * after.value
        value += jnp.where(terminated, zero, after.reward)
        tail = Tail(
            jnp.where(terminated, _KNOWN, state), jnp.where(terminated, zero, value), reward
        )
        return self._stored(state, value, reward), tail

    def settle(
        self, terminated: Bool[Array, "E T"], last: Bool[Array, "E T"], rank: Int[Array, "E T"]
    ) -> tuple[Int[Array, "E T"], Bool[Array, "E T"]]:
        """Settles the steps before one that terminated within its episode, but not this one."""
        inner = terminated & ~last
        return jnp.where(inner, rank, rank + 1), inner

    def gains(
        self, rewards: Float[Array, "E C"], after: Float[Array, " E"], nothing: Bool[Array, "E C"]
    ) -> Float[Array, "E C"]:
        """Returns the rewards of the steps after them."""
        gained = jnp.concatenate([after[:, None], rewards[:, :-1]], axis=1)
        return jnp.where(nothing, 0.0, gained)


RECURRENCES: dict[str, type[Recurrence]] = {"plain": Plain, "alf": AsInAlf}


def record(
    recurrence: Recurrence,
    recorded: Recorded,
    rewards: Float[Array, "E T"],
    terminated: Bool[Array, "E T"],
    last: Bool[Array, "E T"],
    mask: Bool[Array, "E T"],
    rings: Rings,
    rows: Int[Array, " ET"],
) -> Recorded:
    """Records new steps, and fills in the returns of older steps that are now known.

    Args:
        recurrence: The rule that computes returns.
        recorded: The returns recorded before.
        rewards: The rewards of the new steps.
        terminated: Which of them terminated.
        last: Which of them end their episode.
        mask: Which of them are added.
        rings: The rings before these steps are added.
        rows: Where each step is stored.
    """
    num_envs = rewards.shape[0]

    def back(carry: Tail, row: tuple[Array, ...]) -> tuple[Tail, Array]:
        reward, terminated, last, mask = row
        value, tail = recurrence.back(carry, reward, terminated, last)
        tail = jax.tree.map(functools.partial(jnp.where, mask), tail, carry)
        return tail, value

    columns = tuple(array.T for array in (rewards, terminated, last, mask))
    tail = vary_with(_open_tail(num_envs), columns)
    tail, values = lax.scan(back, tail, columns, reverse=True)

    # A row that terminated or ended an episode settles the returns of all rows before it. The
    # rows after the newest of these are pending.
    pending, cut = recorded.pending[:, None], recorded.cut[:, None]
    rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    settles = terminated | last
    until, cuts = recurrence.settle(terminated, last, rank)
    until = jnp.where(settles, until, -pending)
    settled = jnp.max(until, axis=1, keepdims=True)
    newest = settles & (until == settled)
    any_settles = jnp.any(settles, axis=1, keepdims=True)
    new_cut = jnp.where(any_settles, jnp.any(newest & cuts, axis=1, keepdims=True), cut)
    count = rank[:, -1:] + 1
    unsettled = jnp.minimum(count - settled, _FAR)

    written = storage.write(recorded.values, values.T.reshape(-1), rows)
    room = jnp.maximum(rings.length - count[:, 0], 0)
    kept = jnp.minimum(jnp.minimum(recorded.pending, rings.held.astype(jnp.int32)), room)
    steps = jnp.where(tail.state == _OPEN, 0, kept)
    cut_step = jnp.where(recorded.cut, recorded.pending - 1, -1)
    fill = _batched_fill(recurrence)
    filled = fill(written, rings.cursor.astype(jnp.int32), steps, cut_step, *tail)
    return Recorded(filled, unsettled[:, 0], new_cut[:, 0])


def recompute_returns(
    recurrence: Recurrence,
    values: Float[Array, " EN"],
    rings: Rings,
    rewards: Float[Array, " EN"],
    terminated: Bool[Array, " EN"],
    behind: Int[Array, " EN"],
    ended: Bool[Array, " E"],
) -> Float[Array, " EN"]:
    """Returns the recorded returns after rewards have changed.

    Args:
        recurrence: The rule that computes returns.
        values: The recorded returns.
        rings: The rings of the steps.
        rewards: The new rewards of the stored steps.
        terminated: Which stored steps terminated.
        behind: The number of steps from the first step of its episode to each stored step.
        ended: Whether the newest step of each ring has ended its episode.
    """
    env = jnp.arange(rings.num_envs, dtype=jnp.int32)
    num_steps, cursor = rings.held.astype(jnp.int32), rings.cursor.astype(jnp.int32)

    def back(age: Array, carry: tuple[Array, Tail, Array]) -> tuple[Array, Tail, Array]:
        returns, after, last = carry
        # A loop with static bounds has a 64-bit index if x64 mode is on.
        age = jnp.asarray(age, jnp.int32)
        row = env * rings.length + remainder(cursor - 1 - age, rings.length)
        value, tail = recurrence.back(after, rewards[row], terminated[row], last)
        # Each row past the end is a different one.
        target = jnp.where(age < num_steps, row, rings.num_envs * rings.length + env)
        returns = returns.at[target].set(value, mode="drop", unique_indices=True)
        # The step before the first one of an episode ended the episode before.
        return returns, tail, behind[row] == 0

    begin = values, _open_tail(rings.num_envs), ended
    begin = vary_with(begin, begin, rewards, terminated, behind, num_steps, cursor)
    return lax.fori_loop(0, rings.length, back, begin)[0]


def truncate_returns(
    recurrence: Recurrence, recorded: Recorded, rings: Rings, mask: Bool[Array, " E"]
) -> Float[Array, " EN"]:
    """Returns the recorded returns after the open episodes of these rings were truncated.

    Their pending steps get the default return.
    """
    steps = jnp.where(mask, jnp.minimum(recorded.pending, rings.held.astype(jnp.int32)), 0)
    nothing = jnp.zeros_like(steps, jnp.float32)
    tail = Tail(jnp.full_like(steps, _CUT), nothing, nothing)
    position, cut_step = rings.cursor.astype(jnp.int32), jnp.full_like(steps, -1)
    return _batched_fill(recurrence)(recorded.values, position, steps, cut_step, *tail)


def returns_at(
    recurrence: Recurrence,
    recorded: Recorded,
    rings: Rings,
    env: Index,
    position: Words,
    row: Index,
) -> Floats:
    """Returns the return of each step; the default if it is unknown or the step is not held.

    Args:
        recurrence: The rule that computed the returns.
        recorded: The recorded returns.
        rings: The rings of the steps.
        env: The environments of the steps.
        position: The positions of the steps.
        row: Where each step is stored; past the end if it is not held.
    """
    back = rings.end.at[env].get(mode="clip") - jnp.uint32(1) - position
    is_known = back >= recorded.pending.at[env].get(mode="clip").astype(jnp.uint32)
    value = storage.read(recorded.values, row)
    is_known &= row < recorded.values.size
    return jnp.where(is_known, value, jnp.float32(recurrence.default_return))


def _open_tail(num_envs: int) -> Tail:
    """Returns the tail of the newest step of each ring."""
    nothing = jnp.zeros((num_envs,), jnp.float32)
    return Tail(jnp.full((num_envs,), _OPEN, jnp.int32), nothing, nothing)


@functools.cache
def _batched_fill(recurrence: Recurrence) -> Callable[..., Array]:
    """Returns ``_fill`` for this recurrence, with a rule for ``vmap``."""
    call = custom_vmap(functools.partial(_fill, recurrence))

    @call.def_vmap
    def _(axis_size: int, batched: list[bool], *args: Array) -> tuple[Array, bool]:
        # Treat the rings of all buffers as one set: a batched loop would select whole arrays.
        merged = [
            (arg if is_batched else jnp.broadcast_to(arg, (axis_size, *arg.shape))).reshape(
                -1, *arg.shape[1 + is_batched :]
            )
            for arg, is_batched in zip(args, batched, strict=True)
        ]
        return call(*merged).reshape(axis_size, -1), True

    return call


def _fill(
    recurrence: Recurrence,
    returns: Float[Array, " EN"],
    position: Int[Array, " E"],
    steps: Int[Array, " E"],
    cut_step: Int[Array, " E"],
    *tail: Array,
) -> Float[Array, " EN"]:
    """Turns pending rewards into returns, walking back from the newest.

    Args:
        recurrence: The rule that computes returns.
        returns: The stored returns and pending rewards.
        position: The index in each ring after the newest pending step.
        steps: The number of steps to fill in.
        cut_step: The step among them for which nothing that follows counts, counted back from the
            newest; -1 if there is no such step.
        *tail: The three fields of ``Tail``.
    """
    (rings,) = position.shape
    length = returns.size // rings
    base = jnp.arange(rings, dtype=jnp.int32)[:, None] * length
    state = tail[0][:, None]

    def unfinished(carry: tuple[Array, ...]) -> Array:
        return jnp.any(carry[1] < steps)

    def compose(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    def back(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        flat, done, value, reward = carry
        count = done + jnp.arange(_CHUNK, dtype=jnp.int32)[None]
        # Counts past the earliest step read arbitrary rows; their results are dropped.
        row = base + remainder(position[:, None] - 1 - count, length)
        rewards = flat.at[row].get(mode="promise_in_bounds")
        gains = recurrence.gains(rewards, reward, count == cut_step[:, None])
        factor = jnp.full_like(gains, recurrence.discount)
        factor, gains = lax.associative_scan(compose, (factor, gains), axis=1)
        discounted = gains + factor * value[:, None]
        filled = jnp.where(state == _KNOWN, discounted, jnp.float32(recurrence.default_return))
        row = jnp.where(count < steps[:, None], row, flat.size)
        flat = flat.at[row].set(filled, mode="drop", unique_indices=True)
        return flat, done + _CHUNK, discounted[:, -1], rewards[:, -1]

    carry = vary_with((returns, jnp.int32(0), tail[1], tail[2]), returns, steps, position, tail)
    return lax.while_loop(unfinished, back, carry)[0]
