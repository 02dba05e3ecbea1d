"""An assertion about the probabilities with which a buffer draws."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc
from jaxtyping import Array, Float, Float64, Int

from jaxbuf.buffers.arguments import check_batch_size
from jaxbuf.buffers.buffer import as_buffer
from jaxbuf.core import checks
from jaxbuf.core.random import check_key
from jaxbuf.core.sizes import check_count
from jaxbuf.core.types import Index, Key
from jaxbuf.testing.structures import check_concrete, report

# The number of samples drawn at a time: each may need as much memory as the buffer.
_AT_ONCE = 500
# The chi-square test needs an expected count of at least this in each cell; rarer slots share one.
_LEAST_COUNT = 5.0


def assert_distribution(
    buffer: Any,
    key: Key,
    expected: Float[Array, " N"],
    *,
    draws: int = 20_000,
    batch_size: int = 1,
    significance: float = 1e-4,
) -> None:
    """Checks by many draws that slots are drawn with given probabilities: a chi-square test.

    All draws are one compiled program. The same key gives the same draws, so a test that passes
    keeps passing.

    Args:
        buffer: A buffer that can be sampled from.
        key: A PRNG key.
        expected: The probability of each slot, ``[capacity]``; for a ``TrajectoryBuffer``, of each
            window by its slot, ``[num_envs * length / period]``. Probabilities sum to 1, and a slot
            of probability 0 must never be drawn.
        draws: The number of samples to draw.
        batch_size: Rows of each sample. The test counts all rows. Rows of one sample may depend on
            each other only if that makes the counts vary less, as in stratified draws. A
            ``Mixture`` needs a multiple of the sum of its ratios.
        significance: The probability that a correct buffer fails, for a random key.

    Raises:
        AssertionError: If a row is invalid, a slot of probability 0 is drawn, or the counts are too
            far from the expected ones. It names the slots that differ most.
        ValueError: If ``expected`` has the wrong shape or is not a distribution, a number is out of
            its range, or there are too few draws to distinguish slots.

    References:
        Pearson, On the criterion that a given system of deviations..., 1900.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf, jaxbuf.testing
        >>> sampler = jaxbuf.Prioritized(alpha=1.0)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity=4, sampler=sampler)
        >>> buffer = buffer.add(jnp.arange(3), priority=jnp.array([1.0, 0.0, 3.0]))
        >>> key = jax.random.key(0)
        >>> jaxbuf.testing.assert_distribution(buffer, key, jnp.array([0.25, 0.0, 0.75, 0.0]))
        >>> jaxbuf.testing.assert_distribution(buffer, key, jnp.array([0.5, 0.0, 0.5, 0.0]))
        Traceback (most recent call last):
        AssertionError: buffer does not draw as expected (p = ..., significance 0.0001):
          slot 0 was drawn ... times of 20000; expected 10000.0
          slot 2 was drawn ... times of 20000; expected 10000.0
    """
    check_concrete(buffer, "buffer")
    if not as_buffer(buffer).runs_in_programs:
        # The buffer inside draws the same, and all draws of it are one program.
        buffer, _ = as_buffer(buffer).inside()
    check_key(key)
    draws = check_count("draws", draws)
    batch_size = check_batch_size(batch_size)
    significance = checks.check_number(
        "significance", significance, "a number between 0 and 1", lambda x: 0 < x < 1
    )
    num_slots = as_buffer(buffer).num_slots
    probability = _check_distribution(expected, num_slots)
    total = draws * batch_size
    mean = probability * total  # [N]
    cell = _cells(mean)
    if np.sum(probability > 0) > 1 and cell.max() == 0:
        raise ValueError(f"draws is {draws}; too few to tell slots apart, draw more")

    counts = np.asarray(_count_draws(buffer, key, num_slots, draws, batch_size), np.int64)
    invalid, counts = counts[-1], counts[:-1]
    problems: list[str] = []
    if invalid:
        problems.append(f"{invalid} of {total} rows are invalid; expected none")
    for slot in np.flatnonzero((probability == 0) & (counts > 0)):
        problems.append(f"slot {slot} was drawn {counts[slot]} times of {total}; expected never")
    report("buffer does not draw as expected:", problems)

    expected_counts = np.bincount(cell, mean)
    cell_counts = np.bincount(cell, counts)
    chi_square = float(np.sum((cell_counts - expected_counts) ** 2 / expected_counts))
    half = jnp.float32((expected_counts.size - 1) / 2)
    p = float(gammaincc(half, jnp.float32(chi_square / 2)))
    if expected_counts.size > 1 and p < significance:
        deviation = np.abs(counts - mean) / np.sqrt(np.maximum(mean, 1.0))
        farthest = np.argsort(-deviation, kind="stable")
        problems = [
            f"slot {slot} was drawn {counts[slot]} times of {total}; expected {mean[slot]:.1f}"
            for slot in sorted(farthest[: min(4, np.sum(probability > 0))])
        ]
        title = f"buffer does not draw as expected (p = {p:.2g}, significance {significance:g}):"
        report(title, problems)


def _check_distribution(expected: Float[Array, " N"], num_slots: int) -> Float64[np.ndarray, " N"]:
    """Returns the probability of each slot.

    Raises:
        ValueError: If ``expected`` is not a distribution over the slots.
    """
    probability = np.asarray(expected, np.float64)
    if probability.shape != (num_slots,):
        raise ValueError(f"expected has shape {probability.shape}; there are {num_slots} slots")
    legal = bool(np.all((probability >= 0) & (probability <= 1.001)))
    total = float(probability.sum())
    if not legal or not math.isclose(total, 1.0, rel_tol=1e-3):
        raise ValueError(
            f"expected sums to {total:g}, from {probability.min():g} to {probability.max():g}; "
            "give probabilities that sum to 1"
        )
    return probability / total


def _cells(mean: Float64[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Returns the cell of the test for each slot. Rare slots share a cell."""
    cell, last, count = np.zeros(mean.size, np.int64), 0, 0.0
    for slot in np.argsort(mean, kind="stable"):
        cell[slot] = last
        count += float(mean[slot])
        if count >= _LEAST_COUNT:
            last, count = last + 1, 0.0
    # The remaining slots are too few for their own cell, and join the last one.
    return np.minimum(cell, max(last - 1, 0))


@functools.partial(jax.jit, static_argnames=("num_slots", "draws", "batch_size"))
def _count_draws(
    buffer: Any, key: Key, num_slots: int, draws: int, batch_size: int
) -> Int[Array, " N+1"]:
    """Counts the draws of each slot and, as the last number, invalid rows."""

    def draw(key: Key) -> Index:
        sample = buffer.sample(key, batch_size)
        return jnp.where(sample.valid, sample.slots.index, num_slots)

    index = jax.lax.map(draw, jax.random.split(key, draws), batch_size=min(_AT_ONCE, draws))
    return jnp.zeros((num_slots + 1,), jnp.int32).at[index.reshape(-1)].add(1)
