"""Limits on the rate of sampling relative to the rate of inserting.

Before a step, ``can_insert`` and ``can_sample`` return whether it is allowed; after it,
``inserted`` and ``sampled`` count it. A limiter only keeps the counts: the caller decides whether
to wait or to skip a step that is not allowed.
"""

import fractions
import math
from typing import Any, NoReturn, Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, UInt

from jaxbuf.core import checks, numbers, sizes, storage, trees
from jaxbuf.core.describe import Described
from jaxbuf.core.program import program
from jaxbuf.core.types import Count, Flag, Number, Word

# A ratio is stored as a fraction with at most this denominator, so that no rounding accumulates.
_DENOMINATOR = 1000
# Errors and their increments are clipped to this, so that a sum of the two fits an int32.
_MOST = 2**30 - 1
# Bounds are decimals, whose multiples are not exact: 0.29 * 100 has to count as 29.
_ROUNDING = 1e-6
_MOST_ITEMS = 2**31 - 1

_Count = int | Count | Word


def _check_counts(_: object, arguments: dict[str, Any]) -> dict[str, Any]:
    """Checks counts that are Python or NumPy numbers, which a program could not do."""
    return {name: _check_count(value, name) for name, value in arguments.items()}


class RateLimiter(Described):
    """Keeps the number of samples near a multiple of the number of inserts.

    It keeps ``error = inserts * samples_per_insert - samples`` within a range. An insert is refused
    if it would raise the error above the range, unless the buffer then holds at most ``min_size``
    items. A sample is refused if it would lower the error below the range, or if the buffer holds
    fewer than ``min_size`` items. The limiter is an immutable pytree with the semantics of Reverb.

    Save it together with the buffer whose rows it counts, and load both or neither. Beside a new
    buffer, it would allow ``min_size * samples_per_insert`` more samples of the first rows. Beside
    an older buffer, a new limiter begins as ``limiter.inserted(min_size)``. If it also counts items
    that are still to come, such as rollouts under way, do not save it: these are lost with the
    process, and would take room for ever. Begin with ``limiter.inserted(buffer.size)`` then.

    Attributes:
        error: The error in units of ``1 / denominator``, ``[]`` int32; exact until it saturates at
            2**30.
        counters: The numbers of inserts and samples so far, ``[2]`` uint32, which wrap.
        numerator: ``samples_per_insert * denominator``.
        denominator: The denominator of the ratio, at most 1000.
        min_size: The number of items that must be in the buffer before sampling.
        range: The bounds of the error.

    Example:
        >>> import jaxbuf
        >>> limiter = jaxbuf.RateLimiter.create(1.5, min_size=2, tolerance=(-1.0, 3.0))
        >>> limiter = limiter.inserted(2)
        >>> bool(limiter.can_sample(2)), bool(limiter.can_insert(2))
        (True, False)
        >>> limiter = limiter.sampled(2)
        >>> bool(limiter.can_insert(2))
        True

    References:
        Cassirer et al., Reverb: A Framework for Experience Replay, 2021, section 3.3.
    """

    error: Count
    counters: UInt[Array, " 2"]
    numerator: int = struct.field(pytree_node=False)
    denominator: int = struct.field(pytree_node=False)
    min_size: int = struct.field(pytree_node=False)
    range: tuple[float, float] = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        samples_per_insert: float,
        min_size: int = 1,
        tolerance: float | tuple[float, float] = math.inf,
        **unknown: object,
    ) -> Self:
        """Creates a limiter with all counts at zero.

        Args:
            samples_per_insert: The average number of times that an item is sampled; rounded to the
                nearest fraction with a denominator of at most 1000.
            min_size: The number of items that must be in the buffer before sampling.
            tolerance: The largest distance of the error from ``min_size * samples_per_insert``, its
                value after the first ``min_size`` inserts; or the bounds of the error themselves,
                ``(low, high)``. By default only ``min_size`` is enforced. If ``n`` items are
                inserted and ``m`` sampled at a time, choose at least ``n * samples_per_insert +
                m``. With a smaller tolerance, inserts and samples may both be refused from some
                time on, and a caller that waits for them waits forever, unless it is a ``Holder``,
                which then lets rows in.
            **unknown: None; names of other libraries raise an error with those of this one.

        Raises:
            ValueError: If a number is out of range, an option is unknown, or the tolerance is so
                small that inserts and samples would block each other.
        """
        if unknown:
            _refuse_option(
                cls,
                unknown,
                "samples_per_insert, min_size (Reverb's min_size_to_sample) and tolerance (its "
                "error_buffer, or a pair of min_diff and max_diff)",
            )
        ratio = checks.check_number(
            "samples_per_insert",
            samples_per_insert,
            "a positive number",
            lambda x: 0 < x < math.inf,
        )
        min_size = sizes.check_count("min_size", min_size)
        fraction = fractions.Fraction(ratio).limit_denominator(_DENOMINATOR)
        if not fraction:
            raise ValueError(f"samples_per_insert is {ratio}; expected at least 1 / {_DENOMINATOR}")
        start = int(min_size) * ratio
        expected = "a number, or bounds (low, high)"
        if isinstance(tolerance, tuple | list):
            low, high = checks.check_pair("tolerance", tolerance, expected, _are_numbers)
        else:
            distance = checks.check_number("tolerance", tolerance, expected, _are_numbers)
            low, high = start - distance, start + distance
        least = 2 * max(1.0, ratio)
        if not high - low >= least - _ROUNDING:
            raise ValueError(
                f"tolerance is {tolerance}, a range of {high - low:g}; expected one of at least "
                f"{least}, 2 * max(1, samples_per_insert), since inserts and samples could block "
                "each other for good"
            )
        if low > start:
            raise ValueError(
                f"tolerance begins at {low}, above samples_per_insert * min_size = {start}; once "
                "min_size items are there, nothing could be sampled"
            )
        largest = max(abs(bound) for bound in (low, high, start) if math.isfinite(bound))
        if largest * fraction.denominator >= _MOST // 2:
            raise ValueError(
                f"tolerance {tolerance} and min_size {min_size} are too large to count exactly at "
                f"a ratio of {fraction}; make them smaller, or the ratio a simpler fraction"
            )
        return cls(
            error=jnp.int32(0),
            counters=jnp.zeros((2,), jnp.uint32),
            numerator=fraction.numerator,
            denominator=fraction.denominator,
            min_size=int(min_size),
            range=(low, high),
        )

    @program(before=_check_counts)
    def can_insert(self, size: _Count, count: _Count = 1) -> Flag:
        """Returns whether ``count`` items may be inserted into a buffer that holds ``size``."""
        few = _integer(count, "count") <= self.min_size - _integer(size, "size")
        bound = self.range[1] * self.denominator
        if bound >= _MOST:
            return jnp.ones_like(few)
        return few | (self._shifted(count, self.numerator) <= math.floor(bound + _ROUNDING))

    @program(before=_check_counts)
    def can_sample(self, size: _Count, count: _Count = 1) -> Flag:
        """Returns whether ``count`` items may be sampled from a buffer that holds ``size``."""
        enough = _integer(size, "size") >= self.min_size
        bound = self.range[0] * self.denominator
        if bound <= -_MOST:
            return enough & (_integer(count, "count") >= 0)
        return enough & (self._shifted(count, -self.denominator) >= math.ceil(bound - _ROUNDING))

    @program(before=_check_counts)
    def inserted(self, count: _Count = 1) -> Self:
        """Returns the limiter after an insert of ``count`` items."""
        return self._after(count, self.numerator, 0)

    @program(before=_check_counts)
    def sampled(self, count: _Count = 1) -> Self:
        """Returns the limiter after a sample of ``count`` items."""
        return self._after(count, -self.denominator, 1)

    @program(before=_check_counts)
    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor.

        Returns:
            ``inserts`` and ``samples``, counted since creation and wrapping at 2**32, and the
            ``error`` in samples.
        """
        return {
            "inserts": self.counters[..., 0],
            "samples": self.counters[..., 1],
            "error": self.error.astype(jnp.float32) / jnp.float32(self.denominator),
        }

    def most(self, method: str) -> float:
        """Returns the largest count that ``"can_insert"`` or ``"can_sample"`` ever allows."""
        ratio = self.numerator / self.denominator
        low, high = self.range
        if method == "can_insert":
            # The error is never below its bound, except that it begins at 0.
            most = max((high - min(low, 0.0)) / ratio, self.min_size)
        else:
            most = max(high, self.min_size * ratio) - low
        return math.floor(most + _ROUNDING) if math.isfinite(most) else most

    def _shifted(self, count: _Count, step: int) -> Count:
        """Returns the error after ``count`` changes by ``step``, saturated."""
        count = jnp.minimum(_integer(count, "count"), _MOST // abs(step))
        return jnp.clip(self.error + count * jnp.int32(step), -_MOST, _MOST)

    def _after(self, count: _Count, step: int, counter: int) -> Self:
        number = _integer(count, "count").astype(jnp.uint32)
        return self.replace(
            error=self._shifted(count, step), counters=self.counters.at[counter].add(number)
        )


class ThroughputLimiter(Described):
    """Keeps the ratio of recent samples to recent inserts in a range.

    Both counts decay, to 1% after ``window`` seconds. The limiter reads no clock: call
    ``after(seconds)`` with the time since the last call. It is an immutable pytree with the
    semantics of DI-engine.

    Attributes:
        counts: The decayed numbers of inserts and samples, ``[2]`` float32.
        samples_per_insert: The bounds of the ratio.
        window: The time after which a count has decayed to 1%, in seconds.
        min_batches: The size that the buffer needs before sampling, as a multiple of the number of
            items requested.

    Example:
        >>> import jaxbuf
        >>> limiter = jaxbuf.ThroughputLimiter.create(samples_per_insert=(0.5, 2.0), window=5.0)
        >>> limiter = limiter.inserted(30).sampled(57)
        >>> bool(limiter.can_sample(30, 19)), bool(limiter.can_insert(30, 60))
        (False, True)
        >>> [round(float(count), 2) for count in limiter.after(5.0).counts]
        [0.3, 0.57]

    References:
        Niu et al., DI-engine: the throughput controller of its advanced buffer. It decays the
        counts once a second; here they decay continuously.
    """

    counts: Float[Array, " 2"]
    samples_per_insert: tuple[float, float] = struct.field(pytree_node=False)
    window: float = struct.field(pytree_node=False)
    min_batches: float = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        *,
        samples_per_insert: tuple[float, float] = (0.0, math.inf),
        window: float = 30.0,
        min_batches: float = 1.0,
        **unknown: object,
    ) -> Self:
        """Creates a limiter with all counts at zero.

        Args:
            samples_per_insert: The smallest and largest ratio of samples to inserts.
            window: The time after which a count has decayed to 1%, in seconds.
            min_batches: The size that the buffer needs before sampling, as a multiple of the number
                of items requested; at least 1.
            **unknown: None; names of other libraries raise an error with those of this one.

        Raises:
            ValueError: If a number is out of range, or an option is unknown.
        """
        if unknown:
            _refuse_option(
                cls,
                unknown,
                "samples_per_insert (bounds: the inverses of the max and min of DI-engine's "
                "push_sample_rate_limit), window (its window_seconds) and min_batches (its "
                "sample_min_limit_ratio)",
            )
        return cls(
            counts=jnp.zeros((2,), jnp.float32),
            samples_per_insert=_check_bounds("samples_per_insert", samples_per_insert),
            window=checks.check_number(
                "window", window, "a positive number of seconds", lambda x: 0 < x < math.inf
            ),
            min_batches=checks.check_number(
                "min_batches", min_batches, "a number of at least 1", lambda x: 1 <= x < math.inf
            ),
        )

    @program(before=_check_counts)
    def can_insert(self, size: _Count, count: _Count = 1) -> Flag:
        """Returns whether ``count`` items may be inserted; True without recent samples."""
        del size
        inserts, samples = self.counts[0], self.counts[1]
        low = jnp.float32(self.samples_per_insert[0])
        return (samples < 1e-5) | (low * (inserts + _float(count)) <= samples)

    @program(before=_check_counts)
    def can_sample(self, size: _Count, count: _Count = 1) -> Flag:
        """Returns whether ``count`` items may be sampled from a buffer that holds ``size``."""
        inserts, samples = self.counts[0], self.counts[1]
        enough = _float(size, "size") >= jnp.float32(self.min_batches) * _float(count)
        high = self.samples_per_insert[1]
        if high == math.inf:
            return enough
        return enough & (samples + _float(count) <= jnp.float32(high) * inserts)

    @program(before=_check_counts)
    def inserted(self, count: _Count = 1) -> Self:
        """Returns the limiter after an insert of ``count`` items."""
        return self.replace(counts=self.counts.at[0].add(_float(count)))

    @program(before=_check_counts)
    def sampled(self, count: _Count = 1) -> Self:
        """Returns the limiter after a sample of ``count`` items."""
        return self.replace(counts=self.counts.at[1].add(_float(count)))

    @program(before=_check_counts)
    def after(self, seconds: float | Number) -> Self:
        """Returns the limiter ``seconds`` later; a negative time or NaN counts as 0."""
        passed = storage.check_rows(seconds, "seconds", (), np.float32, "one number")
        passed = jnp.where(passed > 0, passed, 0.0)
        decay = jnp.exp(passed * jnp.float32(math.log(0.01) / self.window))
        return self.replace(counts=self.counts * decay)

    @program(before=_check_counts)
    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor: the recent ``inserts`` and ``samples``."""
        return {"inserts": self.counts[..., 0], "samples": self.counts[..., 1]}


def _refuse_option(limiter: type, unknown: dict[str, object], options: str) -> NoReturn:
    name, create = next(iter(unknown)), f"{limiter.__name__}.create"
    raise ValueError(f"{name} was given, but {create} has no use for it; it takes {options}")


def _check_bounds(name: str, bounds: object) -> tuple[float, float]:
    return checks.check_pair(
        name,
        bounds,
        "bounds with 0 <= least <= largest",
        lambda low, high: 0 <= low <= high and low < math.inf,
    )


def _are_numbers(*bounds: float) -> bool:
    return not any(math.isnan(bound) for bound in bounds)


def _check_count(number: object, name: str) -> object:
    """Checks a count of items that is a Python or NumPy number, and returns it as int32.

    Anything else, such as an array or a number of seconds, is returned unchecked.

    Raises:
        ValueError: If it is not an integer in ``[0, 2**31 - 1]``.
    """
    single = isinstance(number, int | float | np.generic) and not isinstance(number, np.bool_)
    if name == "seconds":
        return float(number) if isinstance(number, int) else number
    if not single:
        return number
    if not isinstance(number, int | np.integer) or not 0 <= number <= _MOST_ITEMS:
        raise ValueError(f"{name} is {number}; expected an integer from 0 to 2**31 - 1")
    return np.int32(number)


def _integer(number: object, name: str) -> Count:
    """Converts a number of items to int32; a negative number in an array becomes 0.

    Raises:
        ValueError: If it is not an integer, or is a Python or NumPy number outside
            ``[0, 2**31 - 1]``.
    """
    number = _check_count(number, name)
    shaped = numbers.type_of(number, name)
    if shaped.shape:
        raise ValueError(f"{name} has shape {shaped.shape}; expected one integer")
    array = jnp.asarray(trees.owned(number))
    if array.dtype == np.bool_:
        return array.astype(jnp.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {array.dtype}; expected an integer")
    most = min(int(jnp.iinfo(array.dtype).max), _MOST_ITEMS)
    return jnp.clip(array, 0, most).astype(jnp.int32)


def _float(number: object, name: str = "count") -> Number:
    return _integer(number, name).astype(jnp.float32)
