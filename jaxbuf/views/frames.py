"""Stacks of the last frames, made from single frames after sampling."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxbuf.core import checks, fields, native, numbers, sizes, storage, trees
from jaxbuf.core.describe import Described
from jaxbuf.core.program import program
from jaxbuf.core.types import Arrays, Mask

# From so many bytes of stacks on, memory decides the time.
_LARGE = 2**18
# The integers of so many bytes.
_WORDS = {2: jnp.uint16, 4: jnp.uint32}


class FrameStack(Described):
    """The last ``n`` frames at every step of some windows.

    Attributes:
        frames: Stacks, oldest frame first, leaves ``[B, L, *frame, n]``; the place of the axis of
            ``n`` is an option.
        complete: Whether a stack is the one that the agent saw, ``[B, L]``. Other stacks need
            frames from before the window, and have its first frame instead.
    """

    frames: Arrays
    complete: Bool[Array, "B L"]


@program(static=("n", "field", "terminated", "truncated", "last", "axis", "padding"))
def stack_frames(
    window: Arrays,
    n: int,
    field: str = "obs",
    *,
    terminated: str = "terminated",
    truncated: str | None = None,
    last: str | None = None,
    first: Mask | None = None,
    axis: int = -1,
    padding: Literal["first", "zeros"] = "first",
) -> FrameStack:
    """Stacks the last ``n`` frames at every step, so that a buffer can store each frame once.

    A stack never reaches into the previous episode: as an agent does after a reset, it repeats the
    first frame of its own episode. Stacks are complete at step ``n - 1`` of a window and later, and
    at earlier steps if their episode began within the window. Sample windows of ``n + 1`` steps (of
    ``n + m`` for ``m``-step returns); the last two stacks of a window are then an observation and
    the next one. Windows that avoid the ends of episodes have no complete stack for the first
    ``n - 1`` steps of an episode, unless they begin with it: mark these windows with ``first``.

    For a million steps of 84 × 84 bytes in stacks of four, single frames take an eighth of the
    memory of stacks and next stacks:

    >>> import jax, jax.numpy as jnp, jaxbuf
    >>> def nbytes(create):
    ...     leaves = jax.tree.leaves(jax.eval_shape(create))
    ...     return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    >>> frame, stack = (jax.ShapeDtypeStruct(s, jnp.uint8) for s in ((84, 84), (84, 84, 4)))
    >>> step = {"action": jnp.int32(0), "reward": jnp.float32(0), "terminated": jnp.bool_(False)}
    >>> single = {**step, "obs": frame}
    >>> nbytes(lambda: jaxbuf.TrajectoryBuffer.create(single, 8, 125_000, sequence_length=5))
    7065000104
    >>> double = {**step, "obs": stack, "next_obs": stack}
    >>> nbytes(lambda: jaxbuf.ItemBuffer.create(double, 1_000_000))
    56457000020

    Args:
        window: Windows of consecutive steps, such as ``sample.data`` of a ``TrajectoryBuffer``: a
            dict, or another pytree with named fields, with leaves ``[B, L, ...]``.
        n: Frames in a stack, from 1 to ``L``.
        field: Name of the frames, one array or a pytree of arrays; dots lead into nested fields.
        terminated: Name of the flags that an episode terminated here, ``[B, L]`` bools.
        truncated: Name of the flags that an episode was cut off here. By default the field
            ``truncated`` beside ``terminated``, or else at the top, if the window has one. If it
            has none, no episode is cut off.
        last: Name of the flags that an episode ended here. By default it ends where it terminated
            or was truncated. Set this if values stop before episodes do, as at the loss of a life.
        first: A mask of windows that begin with the first step of an episode, ``[B]``:
            ``buffer.episode(sample.slots).is_first`` of a buffer with ``Episodes``. By default no
            window is known to.
        axis: The place of the axis of ``n`` in a stack: last by default, 0 before the frame's axes.
        padding: The frames before the first one of an episode: ``"first"`` repeats it, and
            ``"zeros"`` are frames of zeros, as in Dopamine.

    Returns:
        The stacks, and which of them are complete.

    Raises:
        ValueError: If ``n`` is not an integer in ``[1, L]``, or a field is missing or has the wrong
            shape or dtype.

    Example:
        >>> window = {
        ...     "obs": jnp.array([[6, 7, 8, 9]]),
        ...     "terminated": jnp.array([[False, True, False, False]]),
        ... }
        >>> stacks = jaxbuf.stack_frames(window, 3)
        >>> stacks.frames[0].tolist()
        [[6, 6, 6], [6, 6, 7], [8, 8, 8], [8, 8, 9]]
        >>> stacks.complete[0].tolist()
        [False, False, True, True]

    References:
        Mnih et al., Human-level control through deep reinforcement learning, Nature 2015; the
        ``FrameStacker`` of ALF, https://github.com/HorizonRobotics/alf.
    """
    frames = fields.need(window, field, "field", "the window has")
    frames = numbers.arrays(frames, "field")
    ends = _ends(window, terminated, truncated, last)
    batch, length = ends.shape
    for leaf in jax.tree.leaves(frames):
        if leaf.shape[:2] != ends.shape:
            raise ValueError(
                f"field {field!r} has shape {leaf.shape}; expected {ends.shape} first, the shape "
                "of the flags"
            )
    n = sizes.check_count("n", n)
    if not 1 <= n <= length:
        raise ValueError(f"n is {n} and windows have {length} steps; expected 1 <= n <= {length}")
    begins_window = jnp.zeros((batch,), bool)
    if first is not None:
        begins_window = storage.check_rows(first, "first", (batch,), np.bool_, "(B,)")
    for leaf in jax.tree.leaves(frames):
        _check_axis(axis, leaf.shape[2:])
    checks.check_choice("padding", padding, ("first", "zeros"))
    step = jnp.arange(length, dtype=jnp.int32)
    # The first step of an episode follows the last one of another.
    after_end = jnp.concatenate([jnp.zeros((batch, 1), bool), ends[:, :-1]], axis=1)
    begin = lax.cummax(jnp.where(after_end, step[None], 0), axis=1)
    offset = jnp.arange(1 - n, 1, dtype=jnp.int32)
    frame_step = step[:, None] + offset[None]
    source = jnp.maximum(frame_step[None], begin[:, :, None])
    missing = frame_step[None] < begin[:, :, None] if padding == "zeros" else None
    source += length * jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    complete = (step >= n - 1)[None] | (begin > 0) | begins_window[:, None]

    def stacks(leaf: Array) -> Array:
        place = int(axis) % (leaf.ndim - 1)

        def gathered(leaf: Array, begin: Int[Array, "B L"]) -> Array:
            del begin
            return _gather(leaf, source, missing, place)

        if not (_is_large(leaf, n) and _are_words(leaf, n, place)):
            return gathered(leaf, begin)
        packed = functools.partial(_pack, n, padding == "zeros")
        return native.either(packed, packed, leaf, begin, elsewhere=gathered)

    return FrameStack(frames=jax.tree.map(stacks, frames), complete=complete)


def _is_large(leaf: Array, n: int) -> bool:
    return n * leaf.size * leaf.dtype.itemsize >= _LARGE


def _are_words(leaf: Array, n: int, place: int) -> bool:
    """Returns whether the ``n`` bytes of a stack that lie side by side fill an integer."""
    return leaf.dtype in (jnp.uint8, jnp.int8) and n in _WORDS and place == leaf.ndim - 2


def _gather(
    leaf: Array, source: Int[Array, "B L n"], missing: Bool[Array, "B L n"] | None, place: int
) -> Array:
    """Reads frames of the flattened windows, and moves the axis of ``n`` to its place."""
    flat = lax.collapse(leaf, 0, 2)  # [B * L, *frame]
    # Of many frames XLA's own gather leaves out what nobody uses.
    large = _is_large(leaf, source.shape[2])
    stacks = storage.select(source, flat) if large else storage.read(flat, source)
    if missing is not None:
        stacks = trees.choose(missing, jnp.zeros_like(stacks), stacks)  # [B, L, n, *frame]
    return jnp.moveaxis(stacks, 2, 2 + place)


def _pack(n: int, zeros: bool, leaf: Array, begin: Int[Array, "B L"]) -> Array:
    """Stacks bytes along the last axis, as integers of ``n`` bytes.

    XLA on a CPU would write the stacks one frame after the other first, and then all of them again.
    """
    word, length = _WORDS[n], leaf.shape[1]
    step = jnp.arange(length, dtype=jnp.int32)
    frame = lax.bitcast_convert_type(leaf, jnp.uint8)  # [B, L, *frame]
    nearest, stack = jnp.zeros_like(frame), jnp.zeros(leaf.shape, word)
    for back in range(n):
        earlier = jnp.concatenate([*[frame[:, :1]] * back, frame[:, : length - back]], axis=1)
        instead = jnp.zeros_like(frame) if zeros else nearest
        nearest = trees.choose(begin <= (step - back)[None], earlier, instead)  # [B, L, *frame]
        # The oldest frame comes first, in the lowest byte.
        stack |= nearest.astype(word) << word(8 * (n - 1 - back))
    return lax.bitcast_convert_type(stack, leaf.dtype)  # [B, L, *frame, n]


def _check_axis(axis: object, frame: tuple[int, ...]) -> None:
    least, most = -len(frame) - 1, len(frame)
    if not isinstance(axis, int | np.integer) or not least <= axis <= most:
        raise ValueError(
            f"axis is {checks.name_of(axis)}; expected an integer from {least} to {most}, for a "
            f"stack of frames of shape {frame} has {most + 1} axes"
        )


def _ends(
    window: Arrays, terminated: str, truncated: str | None, last: str | None
) -> Bool[Array, "B L"]:
    """Returns a mask of the steps at which episodes end."""
    if last is not None:
        return _flags(window, last, "last")
    ends = _flags(window, terminated, "terminated")
    truncated = fields.truncation(window, terminated, truncated)
    if truncated is None:
        return ends
    cuts = _flags(window, truncated, "truncated")
    if cuts.shape != ends.shape:
        raise ValueError(f"truncated has shape {cuts.shape}; expected {ends.shape}")
    return ends | cuts


def _flags(window: Arrays, path: str, name: str) -> Bool[Array, "B L"]:
    value = fields.need(window, path, name, "the window has")
    flags = numbers.array(value, name, np.bool_)
    if flags.ndim != 2:
        raise ValueError(f"{name} has shape {flags.shape}; expected (B, L)")
    return flags
