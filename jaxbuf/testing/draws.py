"""An assertion about the probabilities with which a buffer draws."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc
from jaxtyping import Array, Float, PRNGKeyArray

from jaxbuf.buffers.arguments import check_batch_size
from jaxbuf.buffers.buffer import as_buffer
from jaxbuf.core import checks
from jaxbuf.core.random import check_key
from jaxbuf.core.sizes import check_count
from jaxbuf.testing.structures import check_concrete, report

# The number of samples drawn at a time: each may need as much memory as the buffer.
_AT_ONCE = 500
# The chi-square test needs expected counts of at least this many; rarer slots share a cell.
_FEW = 5.0


def assert_distribution(
    buffer: Any,
    key: PRNGKeyArray,
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
    known = as_buffer(buffer)
    if not known.runs_in_programs:
        # Its draws are those of the buffer inside, all of which are one program.
        buffer, _ = known.inside()
    check_key(key)
    draws = check_count("draws", draws)
    batch_size = check_batch_size(batch_size)
    significance = checks.check_number(
        "significance", significance, "a number between 0 and 1", lambda x: 0 < x < 1
    )
    slots = as_buffer(buffer).num_slots
    law = _check_law(expected, slots)
    total = draws * batch_size
    often = law * total
    cell = _cells(often)
    if np.sum(law > 0) > 1 and cell.max() == 0:
        raise ValueError(f"draws is {draws}; too few to tell slots apart, draw more")

    counts = np.asarray(_draw(buffer, key, slots, draws, batch_size), np.int64)
    invalid, counts = counts[-1], counts[:-1]
    problems: list[str] = []
    if invalid:
        problems.append(f"{invalid} of {total} rows are invalid; expected none")
    for slot in np.flatnonzero((law == 0) & (counts > 0)):
        problems.append(f"slot {slot} was drawn {counts[slot]} times of {total}; expected never")
    report("buffer does not draw as expected:", problems)

    wanted = np.bincount(cell, often)
    got = np.bincount(cell, counts)
    chi_square = float(np.sum((got - wanted) ** 2 / wanted))
    p = float(gammaincc(jnp.float32((wanted.size - 1) / 2), jnp.float32(chi_square / 2)))
    if wanted.size > 1 and p < significance:
        far = np.argsort(-(np.abs(counts - often) / np.sqrt(np.maximum(often, 1.0))), kind="stable")
        problems = [
            f"slot {slot} was drawn {counts[slot]} times of {total}; expected {often[slot]:.1f}"
            for slot in sorted(far[: min(4, np.sum(law > 0))])
        ]
        title = f"buffer does not draw as expected (p = {p:.2g}, significance {significance:g}):"
        report(title, problems)


def _check_law(expected: Any, slots: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the probability of each slot.

    Raises:
        ValueError: If ``expected`` is not a distribution over the slots.
    """
    law = np.asarray(expected, np.float64)
    if law.shape != (slots,):
        raise ValueError(f"expected has shape {law.shape}; there are {slots} slots")
    legal = bool(np.all((law >= 0) & (law <= 1.001)))
    if not legal or not math.isclose(float(law.sum()), 1.0, rel_tol=1e-3):
        raise ValueError(
            f"expected sums to {law.sum():g}, from {law.min():g} to {law.max():g}; give "
            "probabilities that sum to 1"
        )
    return law / law.sum()


def _cells(often: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the cell of the test for each slot. Rare slots share a cell."""
    order = np.argsort(often, kind="stable")
    cell, held = np.zeros(often.size, np.int64), 0.0
    last = 0
    for slot in order:
        cell[slot] = last
        held += float(often[slot])
        if held >= _FEW:
            last, held = last + 1, 0.0
    # The remaining slots are too few for their own cell, and join the last one.
    return np.minimum(cell, max(last - 1, 0))


@functools.partial(jax.jit, static_argnames=("slots", "draws", "batch_size"))
def _draw(buffer: Any, key: PRNGKeyArray, slots: int, draws: int, batch_size: int) -> Array:
    """Counts the draws of each slot and, as the last number, invalid rows."""

    def draw(key: PRNGKeyArray) -> Array:
        sample = buffer.sample(key, batch_size)
        return jnp.where(sample.valid, sample.slots.index, slots)

    index = jax.lax.map(draw, jax.random.split(key, draws), batch_size=min(_AT_ONCE, draws))
    return jnp.zeros((slots + 1,), jnp.int32).at[index.reshape(-1)].add(1)
