"""Drawing the same number of windows from every environment."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt

from jaxbuf.core import checks
from jaxbuf.core.random import random_words, scale_word
from jaxbuf.occupancy.ages import in_part, ring_of
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.strategies.protocols import Draw, KnownSampler, Support


@dataclasses.dataclass(frozen=True)
class Balanced(KnownSampler):
    """The same number of windows from every environment of a ``TrajectoryBuffer``.

    Of ``B`` rows each of the ``E`` environments that hold a window gives ``B // E``, and ``B % E``
    of them, left to chance, give one more. Within an environment all windows are equally likely. So
    a window has the probability ``1 / (E * n)`` if its environment holds ``n``: what a sample
    tells, so that importance weights correct for environments that hold fewer than others. Rows
    come environment by environment.

    To an ``ItemBuffer`` all items are from one environment.

    Attributes:
        replacement: Whether a batch may hold a window twice. Without, the windows of an environment
            are evenly spread over its time, one from each of as many equal parts; an environment
            that holds too few gives all of them, and the others make up for it. Rows beyond the
            number of windows are invalid, and ``probability`` is as with replacement.

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
        object.__setattr__(self, "replacement", checks.check_flag("replacement", self.replacement))

    def draw(self, state: Any, key: PRNGKeyArray, batch_size: int, occupancy: Occupancy) -> Draw:
        """Draw ``batch_size`` windows, environment by environment."""
        del state
        ages = occupancy.age_range(None, None)
        held = ages.count
        words, lots, turns = jnp.split(
            random_words(key, (batch_size + 2 * held.shape[0],)),
            [batch_size, batch_size + held.shape[0]],
        )
        count = _share_out(batch_size, held, lots, again=self.replacement)
        row = jnp.arange(batch_size, dtype=jnp.int32)
        env, before = ring_of(count, row)

        def of_env(value: Array) -> Array:
            return value.at[env].get(mode="clip")

        number = of_env(held)
        if self.replacement:
            place = scale_word(words, number.astype(jnp.uint32)).astype(jnp.int32)
        else:
            parts = jnp.maximum(of_env(count), 1)
            place = in_part(words, row - of_env(before), parts, number)
            # Which windows are in the larger parts is left to chance.
            shift = scale_word(turns, held.astype(jnp.uint32)).astype(jnp.int32)
            shift = jnp.where(number % parts > 0, of_env(shift), 0)
            place = (place + shift) % jnp.maximum(number, 1)
        first = jnp.cumsum(held, dtype=jnp.int32) - held
        index = ages.at(of_env(first) + place)
        valid = row < jnp.sum(count, dtype=jnp.int32)
        return Draw(index, _probability(held, env), valid)

    def probability(
        self, state: Any, index: Int[Array, " B"], occupancy: Occupancy
    ) -> Float[Array, " B"]:
        """The probability with which a single draw gives each of these live windows."""
        del state
        ages = occupancy.age_range(None, None)
        return _probability(ages.count, index // ages.most)

    def support(self, state: Any, occupancy: Occupancy) -> Support:
        """All windows."""
        del state
        held = occupancy.age_range(None, None).count
        least = _probability(held, jnp.argmax(held)[None])[0]
        return Support(occupancy.size, jnp.where(occupancy.size > 0, least, 0.0))

    def metrics(self, state: Any, occupancy: Occupancy) -> dict[str, Array]:
        """``effective_sample_size``: less than all of them if some environments hold fewer."""
        del state
        held = occupancy.age_range(None, None).count
        each = _probability(held, jnp.arange(held.shape[0], dtype=jnp.int32))
        squares = jnp.sum(jnp.where(held > 0, each * each * held.astype(jnp.float32), 0.0))
        size = jnp.where(squares > 0, 1.0 / jnp.where(squares > 0, squares, 1.0), 0.0)
        return {"effective_sample_size": size}


def _probability(held: Int[Array, " E"], env: Int[Array, " B"]) -> Float[Array, " B"]:
    """The probability of a window of each of these environments."""
    some = jnp.maximum(jnp.sum(held > 0, dtype=jnp.int32), 1).astype(jnp.float32)
    number = jnp.maximum(held.at[env].get(mode="clip"), 1).astype(jnp.float32)
    return 1.0 / (some * number)


def _share_out(
    rows: int, held: Int[Array, " E"], lots: UInt[Array, " E"], *, again: bool
) -> Int[Array, " E"]:
    """How many rows each environment gives: as equal numbers as can be, ``rows`` in all.

    Args:
        rows: How many there are to give.
        held: How many windows each environment holds.
        lots: A random word for each, which decides who gives one more.
        again: Whether a window may be given more than once, or else only as many as there are.
    """
    number = jnp.arange(held.shape[0], dtype=jnp.int32)
    some = held > 0
    if again:
        most = jnp.where(some, rows, 0)
        level = rows // jnp.maximum(jnp.sum(some, dtype=jnp.int32), 1)
    else:
        most, rising = held, jnp.sort(held)
        # If all before have given everything, so many are left to each of the others.
        given = jnp.cumsum(rising, dtype=jnp.int32) - rising
        left = (rows - given) // (held.shape[0] - number)
        enough = left < rising
        level = jnp.where(jnp.any(enough), left[jnp.argmax(enough)], rising[-1])
    count = jnp.minimum(most, level)
    more = most > level
    *_, order = lax.sort((~more, lots, number), num_keys=2)
    rest = rows - jnp.sum(count, dtype=jnp.int32)
    chosen = jnp.zeros(some.shape, bool).at[order].set(number < rest)
    return count + (more & chosen).astype(jnp.int32)
