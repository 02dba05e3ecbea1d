"""Drawing the same number of windows from every environment."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt

from jaxbuf.core import checks
from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.random import random_words, scale_word
from jaxbuf.core.types import Count, Floats, Index, Key, State
from jaxbuf.occupancy.ages import in_part, ring_of
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.protocols import Draw, KnownSampler, Support


@dataclasses.dataclass(frozen=True)
class Balanced(KnownSampler):
    """Draws the same number of windows from every environment of a ``TrajectoryBuffer``.

    Each of the ``E`` environments that hold a window contributes ``B // E`` of the ``B`` rows, and
    ``B % E`` randomly chosen environments contribute one more. Within an environment all windows
    are equally likely. A window of an environment that holds ``n`` windows therefore has the
    probability ``1 / (E * n)``. The sample reports it, so that importance weights correct for
    environments that hold fewer windows than others. Rows are ordered by environment.

    An ``ItemBuffer`` counts as a single environment.

    Attributes:
        replacement: Whether a batch may hold a window twice. If False, the windows of an
            environment are evenly spread over time: its history is divided into equal parts, and
            one window is drawn from each. An environment with too few windows contributes all of
            them, and the others make up for it. Rows beyond the number of windows are invalid, and
            ``probability`` is the same as with replacement.

    Raises:
        ValueError: If ``replacement`` is neither True nor False.

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
    """

    replacement: bool = True

    uses_age = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.settle(self, checks.check_flag, "replacement")

    def draw(self, state: State, key: Key, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draws ``batch_size`` windows, ordered by environment."""
        return self.draw_some(state, key, batch_size, batch_size, occupancy)

    def draw_some(
        self, state: State, key: Key, batch_size: int, count: int | Count, occupancy: Occupancy
    ) -> Draw:
        del state
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
        begin = jnp.cumsum(windows, dtype=jnp.int32) - windows
        index = ages.at(of_env(begin) + offset)
        valid = row < jnp.sum(rows, dtype=jnp.int32)
        return Draw(index, _probability(windows, env), valid)

    def probability(self, state: State, index: Index, occupancy: Occupancy) -> Floats:
        del state
        ages = occupancy.age_range(None, None)
        return _probability(ages.count, quotient(index, ages.most))

    def support(self, state: State, occupancy: Occupancy) -> Support:
        del state
        windows = occupancy.age_range(None, None).count
        least = _probability(windows, jnp.argmax(windows)[None])[0]
        return Support(occupancy.size, jnp.where(occupancy.size > 0, least, 0.0))

    @property
    def sequential(self) -> bool:
        """False: rows are ordered by environment."""
        return False

    def metrics(self, state: State, occupancy: Occupancy) -> dict[str, Array]:
        """Returns ``effective_sample_size``: less than ``size`` if some environments hold fewer."""
        del state
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
