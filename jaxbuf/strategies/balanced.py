"""Drawing the same number of windows from every environment, or from every episode."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt
from numpy.typing import NDArray

from jaxbuf.core import checks
from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.problems import first_wrong
from jaxbuf.core.random import random_words, scale_word
from jaxbuf.core.types import Count, Floats, Index, Integers, Key, Mask, State
from jaxbuf.occupancy.ages import Ages, in_part, ring_of
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.mass import effective_size
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.protocols import Draw, KnownSampler, Support, everywhere, support_of

By = Literal["environment", "episode"]


@dataclasses.dataclass(frozen=True)
class Balanced(KnownSampler):
    """Draws as many windows from each environment, or episode, of a ``TrajectoryBuffer``.

    Each of the ``E`` environments that hold a window contributes ``B // E`` of the ``B`` rows, and
    ``B % E`` randomly chosen environments contribute one more. Within an environment all windows
    are equally likely. A window of an environment that holds ``n`` windows therefore has the
    probability ``1 / (E * n)``. The sample reports it, so that importance weights correct for
    environments that hold fewer windows than others. Rows are ordered by environment.

    An ``ItemBuffer`` counts as a single environment.

    With ``by="episode"`` each row is drawn for itself, in no order: first an episode, each equally
    likely, and then one of its windows. These are the episodes of which a window can be drawn, the
    unfinished ones too, and a window belongs to the episode of its first step. Of an episode that
    is half overwritten, the windows that are left count. Windows that were removed or have retired
    do not. A window of one of ``M`` episodes, with ``n`` windows that can be drawn, has the
    probability ``1 / (M * n)``. A draw does not look at all steps; ``support`` and ``metrics`` do.

    Attributes:
        replacement: Whether a batch may hold a window twice. If False, the windows of an
            environment are evenly spread over time: its history is divided into equal parts, and
            one window is drawn from each. An environment with too few windows contributes all of
            them, and the others make up for it. Rows beyond the number of windows are invalid, and
            ``probability`` is the same as with replacement.
        by: ``"environment"``, or ``"episode"`` for rings with ``Episodes``, with replacement.

    Raises:
        ValueError: If ``replacement`` is neither True nor False, ``by`` is not one of these, or an
            episode is to be drawn without replacement.

    References:
        ALF, https://github.com/HorizonRobotics/alf: uniform sampling of its replay buffer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.TrajectoryBuffer.create(
        ...     jnp.int32(0), num_envs=2, length=8, sampler=jaxbuf.Balanced()
        ... )
        >>> few = jnp.arange(8)[None] < jnp.array([[8], [1]])
        >>> buffer = buffer.add(jnp.arange(16).reshape(2, 8), mask=few)
        >>> batch = buffer.sample(jax.random.key(0), 6)
        >>> (batch.data[:, 0] // 8).tolist(), batch.probability[jnp.array([0, 5])].tolist()
        ([0, 0, 0, 1, 1, 1], [0.0625, 0.5])

        An episode of 6 steps, and one of 2:

        >>> buffer = jaxbuf.TrajectoryBuffer.create(
        ...     {"t": jnp.int32(0), "terminated": jnp.bool_(False)}, num_envs=1, length=8,
        ...     sampler=jaxbuf.Balanced(by="episode"), episodes=jaxbuf.Episodes(),
        ... )
        >>> t = jnp.arange(8)[None]
        >>> buffer = buffer.add({"t": t, "terminated": t == 5})
        >>> slots = buffer.slots_at(jnp.array([0]), jnp.arange(8))
        >>> [round(float(p), 3) for p in buffer.get(slots).probability]
        [0.083, 0.083, 0.083, 0.083, 0.083, 0.083, 0.25, 0.25]
    """

    replacement: bool = True
    by: By = "environment"

    uses_age = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.settle(self, checks.check_flag, "replacement")
        checks.check_choice("by", self.by, get_args(By))
        if self.by == "episode" and not self.replacement:
            raise ValueError(
                "replacement is False, but episodes are drawn with replacement; leave it True, or "
                'choose by="environment"'
            )

    @property
    def uses_episodes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if it draws by episode."""
        return self.by == "episode"

    def init(self, capacity: int) -> State:
        """Returns the set of the last window of each episode, which is empty; or no state."""
        return Bitset.create(capacity) if self.by == "episode" else ()

    def on_episodes(self, state: State, index: Index, last: Mask) -> State:
        return state.set(index, last)

    def move(self, empty: State, state: State, moves: Moves) -> State:
        """Returns the empty state: the buffer tells which windows are the last ones afterwards."""
        del state, moves
        return empty

    def draw(self, state: State, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws ``batch_size`` windows, by environment in the order of these."""
        return self.draw_some(state, key, batch_size, batch_size, occupancy)

    def draw_some(
        self, state: State, key: Key, batch_size: int, count: int | Count, occupancy: Occupancy
    ) -> Draw:
        if self.by == "episode":  # The rows are independent of each other, and of their number.
            return _draw_by_episode(state, key, batch_size, occupancy)
        ages = occupancy.age_range(None, None)
        windows = ages.count  # [E]
        words, ties, shifts = jnp.split(
            random_words(key, (batch_size + 2 * windows.shape[0],)),
            [batch_size, batch_size + windows.shape[0]],
        )
        rows = _row_counts(count, windows, ties, replacement=self.replacement)  # [E]
        row = jnp.arange(batch_size, dtype=jnp.int32)
        env, first_row = ring_of(rows, row)  # [B], [E]

        def of_env(value: Array) -> Array:
            return value.at[env].get(mode="clip")

        available = of_env(windows)
        if self.replacement:
            offset = scale_word(words, available)
        else:
            strata = jnp.maximum(of_env(rows), 1)
            offset = in_part(words, row - of_env(first_row), strata, available)
            # A random shift decides which windows are in the larger strata.
            shift = scale_word(shifts, windows)
            shift = jnp.where(remainder(available, strata) > 0, of_env(shift), 0)
            offset = remainder(offset + shift, jnp.maximum(available, 1))
        index = ages.in_ring(env, offset)
        valid = row < jnp.sum(rows, dtype=jnp.int32)
        return Draw(index, _probability(windows, env), valid)

    def probability(self, state: State, index: Index, occupancy: Occupancy) -> Floats:
        ages = occupancy.age_range(None, None)
        if self.by == "episode":
            since, until = _bounds(state, ages, quotient(index, ages.most))
            # The first of the last windows that follow, around the end of the ring.
            number = state.before(index)
            *_, windows = _windows_of(state, ages, jnp.where(number < until, number, since))
            return _probability_by_episode(state, windows)
        return _probability(ages.count, quotient(index, ages.most))

    def support(self, state: State, occupancy: Occupancy) -> Support:
        if self.by == "episode":
            return support_of(everywhere(self, state, occupancy))
        windows = occupancy.age_range(None, None).count
        least = _probability(windows, jnp.argmax(windows)[None])[0]
        return Support(occupancy.size, jnp.where(occupancy.size > 0, least, 0.0))

    def check_valid(
        self, state: State, name: str, live: NDArray[np.bool_], occupancy: Occupancy
    ) -> Iterator[str]:
        del occupancy
        if self.by == "episode":
            last = np.asarray(state.get(jnp.arange(live.size, dtype=jnp.int32)))
            yield from first_wrong(name, last, last & ~live, "False, no window")

    @property
    def sequential(self) -> bool:
        """False by environment, in whose order rows are."""
        return self.by == "episode"

    def metrics(self, state: State, occupancy: Occupancy) -> dict[str, Array]:
        """Returns ``effective_sample_size``: less than ``size`` if some hold fewer than others."""
        if self.by == "episode":
            return {"effective_sample_size": effective_size(everywhere(self, state, occupancy))}
        windows = occupancy.age_range(None, None).count
        each = _probability(windows, jnp.arange(windows.shape[0], dtype=jnp.int32))
        squares = jnp.sum(jnp.where(windows > 0, each * each * windows.astype(jnp.float32), 0.0))
        size = jnp.where(squares > 0, 1.0 / jnp.where(squares > 0, squares, 1.0), 0.0)
        return {"effective_sample_size": size}


def _probability(windows: Int[Array, " E"], env: Index) -> Floats:
    """Returns the probability of a single window of each of these environments."""
    envs = jnp.maximum(jnp.sum(windows > 0, dtype=jnp.int32), 1).astype(jnp.float32)
    number = jnp.maximum(windows.at[env].get(mode="clip"), 1).astype(jnp.float32)
    return 1.0 / (envs * number)


def _draw_by_episode(last: Bitset, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
    """Draws windows of episodes that are drawn before, given the last window of each episode."""
    ages = occupancy.age_range(None, None)
    words, more = jnp.split(random_words(key, (2 * batch_size,)), 2)
    env, first, windows = _windows_of(last, ages, scale_word(words, last.size))
    index = ages.in_ring(env, first + scale_word(more, windows))
    valid = jnp.broadcast_to(last.size > 0, index.shape)
    return Draw(index, _probability_by_episode(last, windows), valid)


def _windows_of(last: Bitset, ages: Ages, episode: Integers) -> tuple[Index, Integers, Integers]:
    """Returns the rings of episodes ``[B]``, their first windows' ranks, and numbers of windows.

    Episodes are numbered in the order of the slots of their last windows.
    """
    final = last.at(episode)  # [B]
    env = quotient(final, ages.most)  # [B]
    since, until = _bounds(last, ages, env)  # [B]
    # The episode before it in the ring, around its end; itself if there is no other.
    previous = last.at(jnp.where(episode > since, episode, until) - 1)  # [B]
    rank, before = jnp.split(ages.rank(jnp.concatenate([final, previous])), 2)  # [B]
    start = jnp.where(before < rank, before + 1, 0)  # [B]
    return env, start, jnp.maximum(rank - start + 1, 1)


def _bounds(last: Bitset, ages: Ages, env: Index) -> tuple[Integers, Integers]:
    """Returns the number of the first episode of each ring, and of the first after the ring."""
    rings, rows = ages.count.shape[0], env.shape[0]
    if rings < 2 * rows:
        edge = last.before(jnp.arange(rings + 1, dtype=jnp.int32) * ages.most)  # [E + 1]
        return edge.at[env].get(mode="clip"), edge.at[env + 1].get(mode="clip")
    since, until = jnp.split(last.before(jnp.concatenate([env, env + 1]) * ages.most), 2)
    return since, until


def _probability_by_episode(last: Bitset, windows: Integers) -> Floats:
    """Returns the probability of a window, given how many its episode has."""
    episodes = jnp.maximum(last.size, 1).astype(jnp.float32)
    return 1.0 / (episodes * windows.astype(jnp.float32))


def _row_counts(
    rows: int | Count, windows: Int[Array, " E"], ties: UInt[Array, " E"], *, replacement: bool
) -> Int[Array, " E"]:
    """Divides ``rows`` among the environments as equally as possible.

    Args:
        rows: The total number of rows.
        windows: The number of windows that each environment holds.
        ties: A random word for each environment, which decides which of them get one row more.
        replacement: Whether a window may be drawn more than once. If not, an environment gets at
            most as many rows as it holds windows.

    Returns:
        The number of rows of each environment, ``[E]``.
    """
    number = jnp.arange(windows.shape[0], dtype=jnp.int32)
    nonempty = windows > 0
    if replacement:
        most = jnp.where(nonempty, rows, 0)
        level = rows // jnp.maximum(jnp.sum(nonempty, dtype=jnp.int32), 1)
    else:
        most, ascending = windows, jnp.sort(windows)
        # The rows for each environment that is left once smaller ones contribute all windows.
        used = jnp.cumsum(ascending, dtype=jnp.int32) - ascending
        left = (rows - used) // (windows.shape[0] - number)
        enough = left < ascending
        level = jnp.where(jnp.any(enough), left[jnp.argmax(enough)], ascending[-1])
    count = jnp.minimum(most, level)
    more = most > level
    *_, order = lax.sort((~more, ties, number), num_keys=2)
    rest = rows - jnp.sum(count, dtype=jnp.int32)
    favored = jnp.zeros(nonempty.shape, bool).at[order].set(number < rest)
    return count + (more & favored).astype(jnp.int32)
