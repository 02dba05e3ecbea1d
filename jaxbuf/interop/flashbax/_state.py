"""States of flashbax's buffers, which are plain arrays, as buffers of jaxbuf."""

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.core import checks, numbers
from jaxbuf.core.types import Arrays
from jaxbuf.occupancy.rings import Rings
from jaxbuf.strategies.protocols import Sampler
from jaxbuf.strategies.uniform import Uniform

BRIDGE = (
    "it works on the arrays of flashbax's states. For windows or priorities of your own, change "
    "the functions of a buffer: make_prioritised_trajectory_buffer(...).replace(init=...), with an "
    "init that returns TrajectoryBufferState(jaxbuf.TrajectoryBuffer.create(...)). The guide "
    "'Moving from another library' has an example."
)
ARRAYS = ("experience", "current_index", "is_full", "running_index")


@dataclasses.dataclass(frozen=True)
class OfArrays(Uniform):
    """The sampler of a state that was made from arrays and belongs to no buffer yet."""


def of_arrays(arrays: dict[str, Any]) -> TrajectoryBuffer:
    """Returns a buffer of a state's arrays, with windows of one step.

    Args:
        arrays: The fields of a state. The experience has leaves ``[add_batch_size,
            max_length_time_axis, ...]``.

    Raises:
        ValueError: If a field is missing or unknown, or does not fit the others.
    """
    for name in arrays:
        if arrays[name] is not None and name not in (*ARRAYS, "insert_count"):
            raise ValueError(
                f"a state of jaxbuf cannot take the {name} of another library; leave it out, so "
                "that all windows get the default priority, and call set_priorities"
            )
    for name in ARRAYS[:3]:
        if arrays.get(name) is None:
            raise ValueError(f"{name} is missing; a state needs {', '.join(ARRAYS[:3])}")
    data = numbers.arrays(arrays["experience"], "experience")
    shape = jax.tree.leaves(data)[0].shape
    if len(shape) < 2:
        raise ValueError(
            f"experience has shape {shape}; expected (add_batch_size, max_length_time_axis, ...)"
        )
    rows, length = shape[:2]
    _check_leading(data, (rows, length))
    # Steps without elements, since the storage exists already.
    empty = TrajectoryBuffer.create(jnp.zeros(0), rows, length, sampler=OfArrays())
    rings = _with_steps(empty.rings, arrays["current_index"], arrays["is_full"])
    if arrays.get("running_index") is not None:
        running = numbers.integers(arrays["running_index"], "running_index")
        lap = running.astype(jnp.uint32)[..., None] // jnp.uint32(length) + jnp.uint32(1)
        rings = rings.replace(lap=jnp.broadcast_to(lap, rings.lap.shape))
    return dataclasses.replace(empty, data=_rows(data, 0), occupancy=rings)


def changed(buffer: TrajectoryBuffer, arrays: dict[str, Any]) -> TrajectoryBuffer:
    """Returns a buffer with other arrays in place of some of its state's.

    Raises:
        ValueError: If a field does not fit the buffer.
    """
    for name in arrays:
        if name not in ARRAYS[:3]:
            raise ValueError(f"a state has no field {name!r}; it has {', '.join(ARRAYS[:3])}")
    if "experience" in arrays:
        data = numbers.arrays(arrays["experience"], "experience")
        shape = buffer.rings.cursor.shape
        _check_leading(data, (*shape, buffer.length))
        buffer = dataclasses.replace(buffer, data=_rows(data, len(shape) - 1))
    if "current_index" in arrays or "is_full" in arrays:
        if buffer.sampler.uses_priority:
            raise ValueError(
                "the current_index of a state with priorities cannot be replaced, and neither can "
                "is_full, as each window has its priority; add the experience to a new state"
            )
        rings = buffer.rings
        index = arrays.get("current_index", rings.cursor[..., 0].astype(jnp.int32))
        full = arrays.get("is_full", rings.held[..., 0] == jnp.uint32(rings.length))
        # Two laps ahead, so that no earlier generation is used again.
        rings = _with_steps(rings.replace(lap=rings.lap + jnp.uint32(2)), index, full)
        buffer = buffer.replace(occupancy=rings)
    return buffer


def experience(buffer: TrajectoryBuffer) -> Arrays:
    """Returns the steps of a buffer, leaves ``[add_batch_size, max_length_time_axis, ...]``."""
    shape = buffer.rings.cursor.shape
    return jax.tree.map(
        lambda leaf: leaf.reshape(*shape, buffer.length, *leaf.shape[len(shape) :]), buffer.data
    )


def _rows(data: Arrays, axis: int) -> Arrays:
    """Returns experience with the axes of rings (``axis``) and time folded, as buffers keep it."""
    return jax.tree.map(lambda leaf: lax.collapse(leaf, axis, axis + 2), data)


def fitted(
    buffer: TrajectoryBuffer, sequence_length: int, period: int, sampler: Sampler
) -> TrajectoryBuffer:
    """Returns a buffer that was made from arrays with windows of another length and period.

    Raises:
        ValueError: If its rows cannot hold such windows.
    """
    length = buffer.length
    if sequence_length > length:
        raise ValueError(
            f"sample_sequence_length is {sequence_length}, but the state has rows of {length} "
            "steps; sample shorter windows"
        )
    if length % period:
        raise ValueError(
            f"the state has rows of {length} steps, and period is {period}; cut its experience "
            "to a multiple of period"
        )
    rings = buffer.rings.replace(sequence_length=sequence_length, period=period)
    return buffer.replace(occupancy=rings).with_sampler(sampler)


def _with_steps(rings: Rings, current_index: Any, is_full: Any) -> Rings:
    """Returns rings that write next at ``current_index`` and hold all steps, or those before it."""
    index = numbers.integers(current_index, "current_index")
    full = numbers.array(is_full, "is_full").astype(bool)
    if not isinstance(index, jax.core.Tracer):
        concrete = np.asarray(jax.device_get(index))
        wrong = concrete[(concrete < 0) | (concrete > rings.length)]
        if wrong.size:
            raise ValueError(
                f"current_index is {wrong.flat[0]}; expected numbers from 0 to {rings.length}, "
                "which is the number of steps in a row"
            )
    length = jnp.int32(rings.length)
    num_steps = jnp.where(full | (index >= length), length, index)

    def for_each_ring(value: Int[Array, "..."]) -> Array:
        return jnp.broadcast_to(value[..., None], rings.cursor.shape).astype(jnp.uint32)

    return rings.replace(cursor=for_each_ring(index % length), held=for_each_ring(num_steps))


def _check_leading(data: Arrays, leading: tuple[int, ...]) -> None:
    """Checks that all leaves begin with these axes."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if leaf.shape[: len(leading)] != leading:
            expected = ", ".join(map(str, leading))
            raise ValueError(
                f"experience{jax.tree_util.keystr(path)} has shape {leaf.shape}; expected "
                f"({expected}, ...)"
            )


def fields_of(state: object) -> dict[str, Any]:
    """Returns the arrays of a state that another library made, as flashbax's ``Vault`` does.

    Raises:
        ValueError: If it is no state.
    """
    if not all(hasattr(state, name) for name in ARRAYS[:3]):
        raise ValueError(
            f"the state is {checks.kind_of(state)}, which is neither a state of this module nor "
            f"one of flashbax; expected something with {', '.join(ARRAYS[:3])}"
        )
    return {name: getattr(state, name) for name in ARRAYS[:3]}
