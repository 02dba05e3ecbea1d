"""Samples, steps, and the importance weights that correct for the probabilities of a draw."""

import math
from collections.abc import Callable
from types import EllipsisType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    Self,
    TypeAlias,
    get_args,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, UInt

from jaxbuf.buffers.arguments import check_slots
from jaxbuf.buffers.buffer import Share, as_buffer, check_options
from jaxbuf.core import checks, guesses, native, storage
from jaxbuf.core.describe import Described
from jaxbuf.core.numbers import TINY
from jaxbuf.core.program import program
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Flag, Floats, Function, Mask, Number
from jaxbuf.strategies.protocols import Support

Normalize = Literal["batch", "buffer", "mean"]
Within = Literal["part"]
# That of a draw is given with ``beta`` only, so that its default is none of its values.
Normalization: TypeAlias = Normalize | EllipsisType | None


class Sample(Described):
    """A batch sampled from a buffer.

    Attributes:
        data: The items, leaves ``[B, ...]``; ``[B, sequence_length, ...]`` for windows.
        slots: The slots of the items, ``[B]``, for ``update_priority``.
        probability: The probability that a single draw returns each row, ``[B]``; 0 if invalid.
        valid: A mask of the rows that were drawn, ``[B]``. These are all rows, unless the buffer
            holds too few items. The data of other rows is arbitrary, but not NaN unless stored
            items are.
        weights: The importance weights of the rows, ``[B]``, if ``sample`` or ``next_batch`` got a
            ``beta``; else None.
    """

    data: Arrays
    slots: Slots
    probability: Floats
    valid: Mask
    # Not ``| None``, so that a type checker allows products with the weights that were asked for.
    weights: Floats | Any = None

    def __getitem__(self, name: object) -> NoReturn:
        raise TypeError(f"a Sample has no items of its own; {guesses.ANSWERS['experience']}")

    def __iter__(self) -> NoReturn:
        self.__getitem__(0)  # At once: otherwise it comes with the first item only.

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            guesses.refuse(self, name)


class Steps(Described):
    """Steps read from every ring, in order of time.

    Attributes:
        data: The steps, leaves ``[E, T, ...]``; arbitrary where invalid.
        position: Their positions, ``[E, T]``; see ``TrajectoryBuffer.end_position``.
        valid: A mask of the rows that hold a step, ``[E, T]``, which are the first ones of each
            ring.
    """

    data: Arrays
    position: UInt[Array, "E T"]
    valid: Bool[Array, "E T"]


class StepsAround(Described):
    """Steps around the first steps of windows, as ``steps_around`` returns them.

    Attributes:
        data: The steps, leaves ``[B, K, ...]``. In place of a step that is not there stands the
            nearest one of its episode that is, and 0 in the rows of stale slots.
        inside: A mask of the steps that are there, ``[B, K]``.
    """

    data: Arrays
    inside: Bool[Array, "B K"]


class Contents(NamedTuple):
    """The number of items, or windows, in a buffer that consists of several.

    ``importance_weights`` reads it as the occupancy of such a buffer.
    """

    size: Count


class _Sized(Protocol):
    @property
    def size(self) -> Count: ...


class _Supported(Protocol):
    @property
    def occupancy(self) -> _Sized: ...

    def support(self) -> Support: ...


class DrawnBuffer(_Supported, Protocol):
    """A buffer that can be drawn from: one of this library, or your own."""

    @property
    def capacity(self) -> int:
        """The number of slots, or of steps."""
        ...

    @property
    def size(self) -> Count:
        """The number of items, or of steps."""
        ...

    @property
    def add(self) -> Function:
        """The method that adds items."""
        ...

    @property
    def sample(self) -> Callable[..., Sample]:
        """The method that draws a batch."""
        ...

    @property
    def next_batch(self) -> Function:
        """The method that draws the next batch of a pass."""
        ...

    def can_sample(self, batch_size: int | Count = 1) -> Flag:
        """Returns whether a batch can be drawn."""
        ...

    def clear(self) -> Self:
        """Returns the buffer without items."""
        ...

    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor."""
        ...


@guesses.answered
def importance_weights(
    buffer: _Supported,
    sample: Sample,
    beta: float | Number,
    normalize: Normalize | None = "batch",
    *,
    within: Within | None = None,
) -> Floats:
    """Returns weights that correct the bias of prioritized sampling: ``(N · P(i)) ** -beta``.

    ``N`` is the number of items, or windows, in the buffer. The weights are normalized as chosen by
    ``normalize``. They are computed from ratios of probabilities, so that neither tiny
    probabilities nor large buffers overflow.

    Of a ``Mixture`` they undo the ratios of its parts as well, because ``N`` counts the items of
    all parts together. With ``within="part"``, ``N`` and ``P`` are those of the part that a row
    comes from, so that the ratios remain.

    ``sample`` and ``next_batch`` take the same ``beta``, ``normalize`` and ``within``, and return
    the same weights as ``batch.weights``, in one program. This function is for other samples, and
    for weights that are computed later.

    Args:
        buffer: The buffer from which the sample was drawn, in its state at that time.
        sample: The sample.
        beta: The strength of the correction, from 0 (none) to 1 (full). It is traced, so annealing
            it does not cause a retrace.
        normalize: ``"batch"`` divides by the largest weight of the batch, and ``"buffer"`` by the
            largest weight of the whole buffer; with either, weights only scale updates down.
            ``"mean"`` is ALF's ``(p · nnz / Σp) ** -beta``, which counts only items that can be
            drawn. None does not normalize.
        within: None weighs all items of a ``Mixture`` alike, and ``"part"`` the items of each part,
            as the part itself would in a batch of its own; a part that is a mixture is taken apart
            too. All parts are then divided by the same largest weight, that of the batch or of the
            parts, so that no part gains by it. Rows that were taken out of a ``Queue`` have the
            weight of an item that is drawn uniformly. The sample must be whole, as it was drawn,
            because its number of rows tells the shares of the parts. Of other buffers, ``"part"``
            is the buffer itself.

    Returns:
        Weights, ``[B]``; 0 where the sample is invalid, and where its probability is 0: an item
        that was looked up with ``get``, and would not be drawn.

    Raises:
        ValueError: If ``normalize`` or ``within`` is none of these, or ``sample`` is not a sample.

    References:
        Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> sampler = jaxbuf.Prioritized(alpha=0.6, replacement=False)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=sampler)
        >>> buffer = buffer.add(jnp.arange(4.0), priority=jnp.array([1.0, 2.0, 4.0, 8.0]))
        >>> batch = buffer.sample(jax.random.key(0), 4)
        >>> weights = jaxbuf.importance_weights(buffer, batch, beta=0.4)
        >>> [round(float(w), 4) for w in weights[jnp.argsort(batch.data)]]
        [1.0, 0.8467, 0.717, 0.6071]
    """
    _check_choices(normalize, within)
    beta = check_beta(beta)
    check_options(buffer, "support", {})
    check_sample("sample", sample)
    # Relative to the largest weight of the batch they do not depend on the buffer.
    needed = None if normalize == "batch" and within is None else buffer
    slots = None if within is None else check_slots(sample.slots, "sample.slots")
    # Each device of a ``Sharded`` inside ``shard_map`` holds a part of the batch.
    axes = as_buffer(buffer).batch_axes
    return _weights(needed, sample.probability, sample.valid, beta, normalize, axes, slots)


@program(static=("normalize", "axes"), buffers=("buffer",))
def _weights(
    buffer: _Supported | None,
    probability: Floats,
    valid: Mask,
    beta: float | Number,
    normalize: Normalize | None,
    axes: tuple[str, ...],
    slots: Slots | None = None,
) -> Floats:
    beta = storage.check_rows(beta, "beta", (), np.float32, "one number")
    probability, valid, beta = lax.stop_gradient((probability, valid, beta))
    scale = jnp.float32(1) if buffer is None or slots is not None else _scale(buffer, normalize)
    ratio, valid = _ratios(probability, valid, scale, relative=buffer is None and not axes)
    if slots is not None:
        shares = as_buffer(buffer).shares(ratio.shape[0])
        counts, least = _counts_and_smallest(shares, normalize)
        # The share of the part cancels out, so that only the draw within the part counts.
        fractions = [_above_0(share.fraction) for share in shares]
        scale = counts / jnp.asarray(fractions, jnp.float32)
        ends = np.cumsum([share.slots for share in shares[:-1]], dtype=np.int32)
        part = jnp.sum(slots.index[:, None] >= ends[None], axis=1, dtype=jnp.int32)  # [B]
        # Of a single part without a gather, which explicit axes of a mesh do not allow.
        ratio = ratio * (scale.at[part].get(mode="clip") if len(shares) > 1 else scale[0])
        if normalize == "batch":
            least = jnp.min(ratio, where=valid, initial=jnp.finfo(jnp.float32).max)
            least = lax.pmin(least, axes) if axes else least
        ratio = ratio / least
    elif buffer is None and axes:
        ratio = ratio / lax.pmin(jnp.min(ratio, initial=1.0), axes)
    return jnp.where(valid, ratio**-beta, 0.0)


def _scale(buffer: _Supported, normalize: Normalize | None) -> Number:
    """Returns ``N``, or for ``"buffer"`` the inverse of the least probability."""
    if normalize == "buffer":
        return 1.0 / jnp.maximum(buffer.support().least_probability, TINY)
    count = buffer.support().count if normalize == "mean" else buffer.occupancy.size
    return jnp.asarray(count).astype(jnp.float32)


@native.kernel("drawn")
def _ratios(
    probability: Floats, valid: Mask, scale: Number, *, relative: int
) -> tuple[Floats, Mask]:
    """Returns probabilities times ``scale``, or relative to the least of them, and a mask.

    The mask is that of the rows that can be drawn: ``get`` returns items that are never drawn as
    well, which count as 1. Of others, the probability may be so small that the largest weight would
    be infinite, so it is at least ``TINY``.
    """
    valid = valid & (probability > 0)
    probability = jnp.where(valid, jnp.maximum(probability, TINY), 1.0)
    # Not divided: XLA multiplies by the inverse anyway, and so does the kernel.
    by = 1.0 / jnp.min(probability, initial=1.0) if relative else scale
    return probability * by, valid


def _above_0(fraction: Any) -> Any:
    """Returns the fraction of a share; 1 where it is 0."""
    if isinstance(fraction, float):
        return fraction or 1.0
    return jnp.where(fraction > 0, fraction, 1.0)


def weighed(
    buffer: _Supported,
    sample: Sample,
    beta: float | Number | None,
    normalize: Normalization,
    within: Within | None,
) -> Sample:
    """Returns a sample with its importance weights; without ``beta`` the sample itself.

    Args:
        buffer: The buffer from which the sample was drawn, in its state before.
        sample: The sample.
        beta: As for ``importance_weights``; None for no weights.
        normalize: As for ``importance_weights``; ``...`` stands for the default.
        within: As for ``importance_weights``.

    Raises:
        ValueError: As raised by ``check_weighing``.
    """
    beta, how = check_weighing(beta, normalize, within)
    if beta is None:
        return sample
    return sample.replace(weights=importance_weights(buffer, sample, beta, how, within=within))


def check_weighing(
    beta: float | Number | None, normalize: Normalization, within: Within | None
) -> tuple[Any, Normalize | None]:
    """Returns ``beta``, and what ``normalize`` stands for, after checks of the options of a draw.

    Raises:
        ValueError: If ``beta`` is not a finite number or None, if ``normalize`` or ``within`` is
            none of their values, or one of these is given and ``beta`` is None.
    """
    how = "batch" if normalize is ... else normalize
    _check_choices(how, within)
    if beta is not None:
        return check_beta(beta), how
    for name, is_given in (("normalize", normalize is not ...), ("within", within is not None)):
        if is_given:
            raise ValueError(
                f"{name} was given without beta; pass beta=, such as beta=0.4, for importance "
                f"weights, or leave {name} out"
            )
    return None, how


def check_beta(beta: float | Number) -> Any:
    """Returns an array as it is, and any other number as a Python float.

    Raises:
        ValueError: If it is known, and is not a finite number.
    """
    # A float is tested without more, since each call from Python comes here.
    if isinstance(beta, float | np.floating) and math.isfinite(beta):
        return float(beta)
    if isinstance(beta, jax.Array | np.ndarray):
        return beta
    return checks.check_number("beta", beta, "a finite number", math.isfinite)


def _check_choices(normalize: object, within: object) -> None:
    """Raises ValueError if ``normalize`` or ``within`` is none of their values."""
    if within is not None and (not isinstance(within, str) or within != "part"):
        raise ValueError(f'within is {checks.name_of(within)}; choose "part" or None')
    if normalize is not None and (
        not isinstance(normalize, str) or normalize not in get_args(Normalize)
    ):
        name = checks.name_of(normalize)
        raise ValueError(f'normalize is {name}; choose "batch", "buffer", "mean" or None')


def _counts_and_smallest(
    shares: list[Share], normalize: Normalize | None
) -> tuple[Float[Array, " P"], Number]:
    """Returns ``N`` of each share, and the smallest ``N · P``, which has the largest weight.

    The latter is 1 unless weights are normalized over the whole buffer. An item that was taken
    out of a queue counts as one that is drawn uniformly.
    """
    most = jnp.finfo(jnp.float32).max
    counts, products = list[Array](), list[Array]()
    for buffer, _, fraction in shares:
        count, least = jnp.float32(1), jnp.float32(1)
        if buffer is not None and normalize in ("buffer", "mean"):
            support = buffer.support()
            count = support.count if normalize == "mean" else buffer.occupancy.size
            least = jnp.asarray(support.least_probability)
        elif buffer is not None:
            count = buffer.occupancy.size
        # A part without items gives no rows.
        counts.append(jnp.maximum(jnp.asarray(count).astype(jnp.float32), 1.0))
        can_be_drawn = (least > 0) & (fraction > 0)
        least = jnp.maximum(least, TINY)
        products.append(jnp.where(can_be_drawn, least * counts[-1], most))
    smallest = jnp.min(jnp.stack(products)) if normalize == "buffer" else jnp.float32(1)
    return jnp.stack(counts), smallest


def check_sample(name: str, sample: object) -> None:
    """Checks that ``sample`` is a single sample.

    Raises:
        ValueError: If it has no probabilities and mask of shape ``[B]``.
    """
    arrays = jax.Array | np.ndarray
    if not isinstance(sample, Sample) or not all(
        isinstance(field, arrays) for field in (sample.probability, sample.valid)
    ):
        raise ValueError(
            f"{name} is {checks.kind_of(sample)}; expected the whole sample, not its data or slots"
        )
    probability, valid = sample.probability, sample.valid
    if probability.shape != valid.shape or probability.ndim != 1:
        raise ValueError(
            f"{name} has a probability of shape {probability.shape} and valid of shape "
            f"{valid.shape}; expected (B,); work on several samples with jax.vmap"
        )
