"""flashbax's call signatures over jaxbuf's buffers.

A program that makes buffers of flashbax 0.1 and calls their functions runs once its imports name
this module, which also stands for ``flashbax.buffers`` and has ``utils``:

    import jaxbuf.interop.flashbax as fbx  # was: import flashbax as fbx

| flashbax | jaxbuf |
| --- | --- |
| `make_trajectory_buffer` | `TrajectoryBuffer` with `add_batch_size` environments, written as one |
| `make_flat_buffer` | the same with windows of two steps, handed out as pairs |
| `make_item_buffer` | the same with one environment and windows of one step |
| `make_prioritised_…` | the same with `Prioritized(alpha=priority_exponent)` |
| `make_trajectory_queue` | `TrajectoryBuffer.dequeue` |
| `make_mixer` | batches of several buffers, joined; see also `Mixture` |

Shapes, structures, capacities, write positions, ``can_sample``, ``can_add`` and the numbers in
``indices`` are those of flashbax. What differs, and why (``make test-claims`` checks what is said
of flashbax 0.1.3):

* **Draws.** The same key gives another batch; the distribution is the same. Draws are with
  replacement and, with priorities, stratified, as there.
* **Sampling too early.** Where flashbax returns arbitrary rows, these samples say so: ``valid`` is
  False and probabilities are 0. A queue that cannot be sampled from stays as it is.
* **Stale priorities.** An index names a slot, not an item, so flashbax gives a new item the
  priority that was meant for the one it replaced. Pass ``batch.slots`` instead of
  ``batch.indices`` to ``set_priorities`` and such rows are dropped. Rows for windows that are not
  complete are dropped in any case: flashbax would make them drawable.
* **New items** get the largest priority that is in the buffer now (1 if that is larger), not the
  largest there ever was, cut to an integer (2.9 becomes 2.0 in flashbax 0.1.3): one outlier does
  not raise them for ever.
* **NaN, negative and infinite priorities** are refused instead of poisoning every sum, and sums are
  recomputed, not accumulated, so that they do not drift.
* **Full queues** refuse what does not fit; flashbax overwrites what was not read. Look at
  ``can_add`` as before.
* **A period that does not divide the length** shortens the length to a multiple of it, with a
  warning, also without priorities: windows start at multiples of ``period`` from the beginning of
  the memory, not from the oldest step.
* **Shapes and dtypes** of what is added raise ``ValueError`` naming the leaf. More steps at once
  than fit are no error: the last ones stay.
* **A mixer's buffers** must each sample enough rows for their share; flashbax returns fewer.
* ``device`` is accepted and ignored: what is fastest is chosen by where the arrays are.
* **States** have ``experience``, ``current_index``, ``is_full``, ``running_index``, ``read_index``
  and ``write_index``; of the sum tree only its root, ``sum_tree_state.nodes[0]``. They are built
  from ``experience``, ``current_index`` and ``is_full``, and these can be replaced; in a state with
  priorities only ``experience``. Windows of a state that is built have the default priority. What
  flashbax's ``Vault`` reads back can be sampled and added to as it is.
* **Samples** have the fields of flashbax's and some more, which are None in a batch that a program
  makes. Samples and states can be subclassed with the decorators of chex, flax and
  ``dataclasses``. They are no mappings: ``batch.experience``, not ``batch["experience"]``.
* **Functions of flashbax's modules**, such as ``sum_tree.get``, ``prioritised_add`` and
  ``set_priorities``, compute with the arrays of its states. Importing one raises ``ImportError``.
  ``make_prioritised_trajectory_buffer(...).replace(init=...)`` takes an ``init`` that returns
  ``TrajectoryBufferState(jaxbuf.TrajectoryBuffer.create(...))``, with windows and priorities of
  your own; "Moving from another library" has an example.
* **A state belongs to the buffer that made it.** To sample it with another window, period or
  exponent is refused, except for states that are built from arrays.

``state.buffer`` is the buffer of jaxbuf inside, with ``metrics()`` and all the rest, for moving
over bit by bit. With ``priority_exponent=jaxbuf.Varying(0.6)``, a state has an exponent of its own:
``state.replace(buffer=state.buffer.set_hyperparameters(alpha=0.5))``.
"""

import dataclasses
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import serialization, struct
from jaxtyping import Array, Float, PyTree

from jaxbuf.buffers import doors
from jaxbuf.buffers.trajectory import TrajectoryBuffer as Rings
from jaxbuf.core import exporting, numbers, trees
from jaxbuf.core.checks import check_flag, check_fraction
from jaxbuf.core.describe import Described
from jaxbuf.core.hyperparameters import Varying, split
from jaxbuf.core.sizes import check_count
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Flag, Floats, Index, Key, Mask, Number
from jaxbuf.interop.flashbax import _state, utils
from jaxbuf.strategies.prioritized import Prioritized
from jaxbuf.strategies.protocols import Sampler
from jaxbuf.strategies.uniform import Uniform

__all__ = [
    "BufferSample",
    "BufferState",
    "Experience",
    "ExperiencePair",
    "Mixer",
    "PrioritisedTrajectoryBuffer",
    "PrioritisedTrajectoryBufferSample",
    "PrioritisedTrajectoryBufferState",
    "PrioritisedTransitionSample",
    "TrajectoryBuffer",
    "TrajectoryBufferSample",
    "TrajectoryBufferState",
    "TrajectoryQueue",
    "TrajectoryQueueSample",
    "TrajectoryQueueState",
    "TransitionSample",
    "make_flat_buffer",
    "make_item_buffer",
    "make_mixer",
    "make_prioritised_flat_buffer",
    "make_prioritised_item_buffer",
    "make_prioritised_trajectory_buffer",
    "make_trajectory_buffer",
    "make_trajectory_queue",
    "utils",
]


Experience = TypeVar("Experience")
_Class = TypeVar("_Class", bound=type)


def _dataclass(kind: _Class) -> _Class:
    """Makes a class a pytree, which flax's ``to_state_dict`` returns as it is, as flashbax's."""
    kind = struct.dataclass(kind, repr=False)
    serialization.register_serialization_state(
        kind, lambda value: value, lambda _, value: value, override=True
    )
    return kind


class _Value(Described):
    """A class that programs subclass with the decorator of chex, flax or ``dataclasses``."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Leaves it to the decorator to make the subclass a dataclass."""


class SumTreeRoot(NamedTuple):
    """The part of a sum tree that can be read.

    Attributes:
        nodes: ``nodes[0]``, the sum of all leaves, ``[1]``.
        max_recorded_priority: The largest priority to the exponent that is in the buffer now, at
            least 1: what a new item gets, ``[]``.
    """

    nodes: Float[Array, " 1"]
    max_recorded_priority: Number


@_dataclass
class TrajectoryBufferState(Generic[Experience], _Value):
    """The state of a buffer or a queue: a ``TrajectoryBuffer`` whose rings share one position.

    It is also built from arrays, as a data set is: ``TrajectoryBufferState(experience=...,
    current_index=..., is_full=...)``. Such a state belongs to no buffer yet, so it is sampled with
    the windows of any. A subclass is built in the same way, with its own fields beside; with the
    decorator of chex only from ``buffer=state.buffer``.

    Attributes:
        buffer: The buffer of jaxbuf.

    Raises:
        ValueError: If the arrays do not fit each other, or the priorities of another library are
            given.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jaxbuf.interop.flashbax as fbx
        >>> state = fbx.TrajectoryBufferState(
        ...     experience={"obs": jnp.ones((2, 100, 3))}, current_index=0, is_full=True
        ... )
        >>> buffer = fbx.make_trajectory_buffer(2, 32, 5, 1, 5, max_length_time_axis=100)
        >>> buffer.sample(state, jax.random.PRNGKey(0)).experience["obs"].shape
        (32, 5, 3)
        >>> state = state.replace(experience=jax.tree.map(jnp.negative, state.experience))
        >>> float(buffer.sample(state, jax.random.PRNGKey(0)).experience["obs"].max())
        -1.0
    """

    buffer: Rings

    def __init_subclass__(cls, **options: Any) -> None:
        """Keeps the constructor, in place of which a decorator would put its own."""
        super().__init_subclass__(**options)
        cls.__init__ = cls.__dict__.get("__init__", TrajectoryBufferState.__init__)

    def __init__(self, buffer: Rings | None = None, **arrays: Any):
        """Takes a buffer of jaxbuf, arrays, or both, as ``replace`` does."""
        for field in dataclasses.fields(self)[1:]:  # Of a subclass.
            if field.default is dataclasses.MISSING and field.name not in arrays:
                raise ValueError(f"{field.name} is missing; {type(self).__name__} has that field")
            object.__setattr__(self, field.name, arrays.pop(field.name, field.default))
        if buffer is None:
            buffer = _state.of_arrays(arrays)
        elif arrays:
            buffer = _state.changed(buffer, arrays)
        object.__setattr__(self, "buffer", buffer)

    @property
    def experience(self) -> Experience:
        """The steps, leaves ``[add_batch_size, max_length_time_axis, ...]``."""
        return _state.experience(self.buffer)

    @property
    def current_index(self) -> Count:
        """The index on the time axis of the next step."""
        return self.buffer.rings.cursor[..., 0].astype(int)

    @property
    def write_index(self) -> Count:
        """The same, as queues call it."""
        return self.current_index

    @property
    def read_index(self) -> Count:
        """The index on the time axis of the earliest step, which a queue gives next."""
        num_steps = self.buffer.rings.held[..., 0].astype(int)
        return (self.current_index - num_steps) % self.buffer.length

    @property
    def is_full(self) -> Flag:
        """True if no more steps fit without overwriting earlier ones."""
        return self.buffer.rings.held[..., 0] == jnp.uint32(self.buffer.length)

    @property
    def running_index(self) -> Count:
        """The number of steps that were added to each row."""
        return self.buffer.end_position[..., 0].astype(int)

    @property
    def sum_tree_state(self) -> SumTreeRoot:
        """The root of the sum tree.

        Raises:
            AttributeError: If the buffer has no priorities.
        """
        if not self.buffer.sampler.uses_priority:
            raise AttributeError("this buffer has no priorities, so it keeps no sum tree")
        tree = self.buffer.sampler_state
        largest = jnp.maximum(tree.root("max"), 1.0)
        return SumTreeRoot(nodes=tree.root("sum")[..., None], max_recorded_priority=largest)


_State: TypeAlias = TrajectoryBufferState[Any]
TrajectoryQueueState = BufferState = PrioritisedTrajectoryBufferState = TrajectoryBufferState


class ExperiencePair(NamedTuple, Generic[Experience]):
    """Two consecutive steps, leaves ``[B, ...]``."""

    first: Experience
    second: Experience


@_dataclass
class TrajectoryBufferSample(Generic[Experience], _Value):
    """A batch.

    Attributes:
        experience: Windows ``[B, sample_sequence_length, ...]``, items ``[B, ...]``, an
            ``ExperiencePair`` of them, or what was taken out of a queue, ``[add_batch_size,
            sample_sequence_length, ...]``.
        valid: True for rows that were drawn, ``[B]``: all of them, once ``can_sample`` is True.
            None in a batch that a program made.
    """

    experience: Experience
    valid: Mask | None = struct.field(default=None, kw_only=True)


@_dataclass
class PrioritisedTrajectoryBufferSample(TrajectoryBufferSample[Experience]):
    """A batch drawn by priorities.

    Attributes:
        indices: The numbers of the windows, ``[B]``.
        probabilities: The probability of each in a draw, ``[B]``.
        priorities: Their priorities to the exponent, ``[B]``: what flashbax before 0.1.3 had
            instead of probabilities. None in a batch that a program made.
        slots: The windows, for ``set_priorities``: unlike ``indices`` they become stale when a
            window is overwritten. None in a batch that a program made.
    """

    indices: Index
    probabilities: Floats
    priorities: Floats | None = struct.field(default=None, kw_only=True)
    slots: Slots | None = struct.field(default=None, kw_only=True)


BufferSample = TransitionSample = TrajectoryQueueSample = TrajectoryBufferSample
PrioritisedTransitionSample = PrioritisedTrajectoryBufferSample

_AnyState = TypeVar("_AnyState", bound=_State)
_AnySample = TypeVar("_AnySample", bound=TrajectoryBufferSample[Any])


@dataclasses.dataclass(frozen=True)
class TrajectoryBuffer(Generic[Experience, _AnyState, _AnySample]):
    """The functions of a buffer.

    Attributes:
        init: Takes one step, and returns an empty state.
        add: Takes a state and experience, and returns the next state.
        sample: Takes a state and a key, and returns a batch.
        can_sample: Takes a state, and returns whether it holds enough.
    """

    init: Callable[..., _AnyState]
    add: Callable[..., _AnyState]
    sample: Callable[..., _AnySample]
    can_sample: Callable[..., Flag]

    def replace(self, **functions: Callable[..., Any]) -> Self:
        """The same with other functions, such as jitted ones."""
        return dataclasses.replace(self, **functions)


@dataclasses.dataclass(frozen=True)
class PrioritisedTrajectoryBuffer(TrajectoryBuffer[Experience, _AnyState, _AnySample]):
    """The functions of a buffer with priorities.

    Attributes:
        set_priorities: Takes a state, indices (or slots) and priorities, and returns the next
            state.
    """

    set_priorities: Callable[..., _AnyState]


@dataclasses.dataclass(frozen=True)
class TrajectoryQueue(TrajectoryBuffer[Experience, _State, Any]):
    """The functions of a queue; ``sample`` takes no key, and returns the next state and a batch.

    Attributes:
        can_add: Takes a state, and returns whether ``add_sequence_length`` steps fit.
    """

    can_add: Callable[..., Flag]


@dataclasses.dataclass(frozen=True)
class Mixer:
    """The functions of a mixer.

    Attributes:
        sample: Takes a list of states and a key, and returns one batch.
        can_sample: Takes a list of states, and returns whether all hold enough.
    """

    sample: Callable[..., Any]
    can_sample: Callable[..., Flag]


_Buffer: TypeAlias = TrajectoryBuffer[Any, _State, TrajectoryBufferSample[Any]]
_PrioritisedBuffer: TypeAlias = PrioritisedTrajectoryBuffer[
    Any, _State, PrioritisedTrajectoryBufferSample[Any]
]


def make_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
) -> _Buffer:
    """A buffer of windows, drawn uniformly.

    Args:
        add_batch_size: Rows added at a time.
        sample_batch_size: Windows in a batch.
        sample_sequence_length: Steps in a window.
        period: Steps from the start of a window to the start of the next one.
        min_length_time_axis: Steps in each row for ``can_sample`` to be True.
        max_size: Steps of all rows together, instead of ``max_length_time_axis``.
        max_length_time_axis: Steps in each row.

    Raises:
        ValueError: If both or none of the lengths are given, or a window or the least length is
            longer than a row.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jaxbuf.interop.flashbax as fbx
        >>> buffer = fbx.make_trajectory_buffer(
        ...     add_batch_size=2, sample_batch_size=4, sample_sequence_length=3, period=1,
        ...     min_length_time_axis=3, max_length_time_axis=10,
        ... )
        >>> state = buffer.init({"obs": jnp.zeros(5)})
        >>> state = buffer.add(state, {"obs": jnp.ones((2, 6, 5))})
        >>> batch = buffer.sample(state, jax.random.PRNGKey(0))
        >>> bool(buffer.can_sample(state)), batch.experience["obs"].shape
        (True, (4, 3, 5))
    """
    sizes = add_batch_size, sample_batch_size, sample_sequence_length, period
    return _windows(*sizes, min_length_time_axis, max_size, max_length_time_axis)


def make_prioritised_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
    priority_exponent: float | Varying = 0.6,
    device: str = "cpu",
) -> _PrioritisedBuffer:
    """``make_trajectory_buffer`` with draws by priority.

    ``priority_exponent``, from 0 to 1, is the ``alpha`` of ``jaxbuf.Prioritized``, and may be
    ``jaxbuf.Varying``. ``device`` is ignored.

    Raises:
        ValueError: As that one, or if the exponent is out of its range.
    """
    sampler = _prioritized(priority_exponent)
    sizes = add_batch_size, sample_batch_size, sample_sequence_length, period
    return _windows(*sizes, min_length_time_axis, max_size, max_length_time_axis, sampler)


def make_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
) -> _Buffer:
    """A buffer of pairs of consecutive steps, drawn uniformly.

    Args:
        max_length: Steps held, of all rows together.
        min_length: Pairs held for ``can_sample`` to be True.
        sample_batch_size: Pairs in a batch.
        add_sequences: Whether added experience has a time axis.
        add_batch_size: Rows added at a time; None if added experience has no axis for them.

    Raises:
        ValueError: If the lengths do not fit together.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jaxbuf.interop.flashbax as fbx
        >>> buffer = fbx.make_flat_buffer(max_length=32, min_length=2, sample_batch_size=1)
        >>> state = buffer.init({"obs": jnp.array([0, 0]), "reward": jnp.array(0.0)})
        >>> for i in range(3):
        ...     print(buffer.can_sample(state))
        ...     state = buffer.add(state, {"obs": jnp.array([i, i]), "reward": jnp.array(1.0)})
        False
        False
        False
        >>> pair = buffer.sample(state, jax.random.PRNGKey(0)).experience
        >>> (pair.second["obs"] - pair.first["obs"]).tolist()
        [[1, 1]]
    """
    return _pairs(max_length, min_length, sample_batch_size, add_sequences, add_batch_size)


def make_prioritised_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    priority_exponent: float | Varying = 0.6,
    device: str = "cpu",
) -> _PrioritisedBuffer:
    """``make_flat_buffer`` with draws by priority, as in ``make_prioritised_trajectory_buffer``.

    Raises:
        ValueError: As that one, or if the exponent is out of its range.
    """
    sampler = _prioritized(priority_exponent)
    return _pairs(max_length, min_length, sample_batch_size, add_sequences, add_batch_size, sampler)


def make_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
) -> _Buffer:
    """A buffer of independent items, drawn uniformly.

    Args:
        max_length: Items held.
        min_length: Items held for ``can_sample`` to be True.
        sample_batch_size: Items in a batch.
        add_sequences: Whether added items have a time axis.
        add_batches: Whether added items have a batch axis.

    Raises:
        ValueError: If the lengths do not fit together.
    """
    return _items(max_length, min_length, sample_batch_size, add_sequences, add_batches)


def make_prioritised_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
    priority_exponent: float | Varying = 0.6,
    device: str = "cpu",
) -> _PrioritisedBuffer:
    """``make_item_buffer`` with draws by priority, as in ``make_prioritised_trajectory_buffer``.

    Raises:
        ValueError: As that one, or if the exponent is out of its range.
    """
    sampler = _prioritized(priority_exponent)
    return _items(max_length, min_length, sample_batch_size, add_sequences, add_batches, sampler)


def make_trajectory_queue(
    max_length_time_axis: int,
    add_batch_size: int,
    add_sequence_length: int,
    sample_sequence_length: int,
    max_size: int | None = None,
) -> TrajectoryQueue[Any]:
    """A queue of steps: what is sampled is taken out, in order of time.

    Args:
        max_length_time_axis: Steps in each row.
        add_batch_size: Rows.
        add_sequence_length: Steps added at a time, for ``can_add``.
        sample_sequence_length: Steps taken at a time.
        max_size: Steps of all rows together, instead of ``max_length_time_axis``.

    Raises:
        ValueError: If more steps are taken at a time than fit.
    """
    check_count("add_batch_size", add_batch_size)
    check_count("add_sequence_length", add_sequence_length)
    check_count("sample_sequence_length", sample_sequence_length)
    length = _length(add_batch_size, max_size, max_length_time_axis if max_size is None else None)
    if sample_sequence_length > length:
        raise ValueError(
            f"sample_sequence_length is {sample_sequence_length}, but a row has {length} steps; "
            "choose a smaller one"
        )

    def init(experience: PyTree) -> _State:
        return TrajectoryBufferState(Rings.create(experience, add_batch_size, length))

    def can_add(state: _State) -> Flag:
        return state.buffer.rings.held[..., 0] + jnp.uint32(add_sequence_length) <= length

    def can_sample(state: _State) -> Flag:
        return state.buffer.rings.held[..., 0] >= sample_sequence_length

    def add(state: _State, batch: Arrays) -> _State:
        steps = jax.tree.leaves(batch)[0].shape[1]
        fits = state.buffer.rings.held[0] + jnp.uint32(steps) <= length
        mask = jnp.broadcast_to(fits, (add_batch_size, steps))
        return state.replace(buffer=doors.add(state.buffer, batch, mask=mask, donate=False))

    @jax.jit
    def sample(state: _State) -> tuple[_State, TrajectoryBufferSample[Any]]:
        mask = jnp.broadcast_to(can_sample(state), (add_batch_size,))
        buffer, steps = state.buffer.dequeue(sample_sequence_length, mask=mask)
        sample = TrajectoryBufferSample(experience=steps.data, valid=jnp.all(steps.valid, axis=1))
        return state.replace(buffer=buffer), sample

    return TrajectoryQueue(init, add, sample, can_sample, can_add)


def make_mixer(
    buffers: Sequence[TrajectoryBuffer[Any, Any, Any]],
    sample_batch_size: int,
    proportions: Sequence[float],
) -> Mixer:
    """One batch from several buffers; see also ``jaxbuf.Mixture``.

    Args:
        buffers: The buffers to draw from, all of one kind.
        sample_batch_size: Rows in a batch.
        proportions: The share of each buffer, relative to the others. Numbers of rows are
            rounded down; what is left over comes from the first.

    Raises:
        ValueError: If there are not as many proportions as buffers, the buffers are of different
            kinds, or ``sample_batch_size`` is below 1; and when sampled, if a buffer samples
            fewer rows than its share.
    """
    if len(buffers) != len(proportions) or not buffers:
        raise ValueError(
            f"there are {len(buffers)} buffers and {len(proportions)} proportions; expected one "
            "for each"
        )
    if any(type(buffer) is not type(buffers[0]) for buffer in buffers):
        raise ValueError("buffers are of different kinds; expected all with priorities or none")
    check_count("sample_batch_size", sample_batch_size)
    counts = [int(share / sum(proportions) * sample_batch_size) for share in proportions]
    counts[0] += sample_batch_size - sum(counts)

    def sample(states: Sequence[_State], key: Key) -> Any:
        batches: list[Any] = []
        keys = jax.random.split(key, len(buffers))
        for i, (buffer, state, count) in enumerate(zip(buffers, states, counts, strict=True)):
            rows = buffer.sample(state, keys[i])
            (held,) = utils.get_tree_shape_prefix(rows)
            if held < count:
                raise ValueError(
                    f"buffers[{i}] samples {held} rows, but its share is {count}; "
                    "make it with a larger sample_batch_size"
                )
            batches.append(jax.tree.map(lambda leaf, count=count: leaf[:count], rows))
        if len({jax.tree.structure(rows) for rows in batches}) > 1:
            # A program made some of them, without the fields that flashbax does not have.
            batches = [rows.replace(**dict.fromkeys(_only_here(rows))) for rows in batches]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)

    def can_sample(states: Sequence[_State]) -> Flag:
        pairs = zip(buffers, states, strict=True)
        return jnp.all(jnp.stack([buffer.can_sample(state) for buffer, state in pairs]))

    return Mixer(sample=sample, can_sample=can_sample)


def _only_here(sample: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(sample) if field.kw_only]


def _shaper(batches: bool, sequences: bool, flatten: bool = False) -> Callable[[Any], Array]:
    """Returns a function that gives a leaf the axes of rows and of time that it may lack."""
    check_flag("add_batches", batches)
    check_flag("add_sequences", sequences)

    def shaped(leaf: Any) -> Array:
        array = jnp.asarray(trees.owned(leaf))
        if not batches:
            array = array[None]
        if not sequences:
            array = array[:, None]
        return jax.lax.collapse(array, 0, 2)[None] if flatten else array

    return shaped


def _prioritized(exponent: float | Varying) -> Prioritized:
    if isinstance(exponent, Varying):
        return Prioritized(alpha=Varying(check_fraction("priority_exponent", exponent.value)))
    return Prioritized(alpha=check_fraction("priority_exponent", exponent))


def _step(windows: Arrays, number: int = 0) -> Arrays:
    return jax.tree.map(lambda leaf: leaf[:, number], windows)


def _length(rows: int, max_size: int | None, length: int | None) -> int:
    """Returns the number of steps in a row, from whichever of the two arguments was given."""
    if (max_size is None) == (length is None):
        raise ValueError("give max_length_time_axis or max_size, one of the two")
    if max_size is None:
        return check_count("max_length_time_axis", length)
    length = check_count("max_size", max_size) // rows
    _warn(f"max_size is {max_size}, so rows have max_size // add_batch_size = {length} steps")
    return length


def _check_lengths(max_length: int, min_length: int, sample_batch_size: int) -> None:
    check_count("max_length", max_length)
    check_count("sample_batch_size", sample_batch_size)
    check_count("min_length", min_length, least=0)
    for name, value in {"sample_batch_size": sample_batch_size, "min_length": min_length}.items():
        if value > max_length:
            raise ValueError(f"{name} is {value}, but max_length only {max_length}")


def _warn(message: str) -> None:
    """Warns with the line of the program that makes the buffer."""
    warnings.warn(message, stacklevel=4)


def _windows(
    rows: int,
    batch_size: int,
    sequence_length: int,
    period: int,
    least: int,
    max_size: int | None,
    max_length: int | None,
    sampler: Sampler = Uniform(),
    shaped: Callable[[Any], Any] | None = None,
    view: Callable[[Arrays], Any] = lambda data: data,
) -> Any:
    """A buffer of windows; ``shaped`` gives added leaves their axes, ``view`` hands windows out."""
    check_count("add_batch_size", rows)
    check_count("sample_batch_size", batch_size)
    check_count("sample_sequence_length", sequence_length)
    check_count("period", period)
    length = _length(rows, max_size, max_length)
    check_count("min_length_time_axis", least, least=0)
    if sequence_length > least:
        _warn(
            f"min_length_time_axis is {least}, but windows have {sequence_length} steps, so that "
            "many are waited for"
        )
    least = max(least, sequence_length)
    if period > sequence_length:
        _warn(
            f"period is {period} and windows have {sequence_length} steps, so "
            f"{period - sequence_length} of {period} steps are never sampled"
        )
    if least > length:
        raise ValueError(
            f"sample_sequence_length is {sequence_length} and min_length_time_axis {least}, but a "
            f"row has {length} steps; make rows longer"
        )
    if length % period:
        _warn(
            f"rows have {length} steps and period is {period}; they are shortened to "
            f"{length - length % period}, a multiple of it"
        )
    length -= length % period

    def init(experience: PyTree) -> _State:
        buffer = Rings.create(
            experience,
            rows,
            length,
            sequence_length=sequence_length,
            period=period,
            sampler=sampler,
        )
        return TrajectoryBufferState(buffer)

    def as_state(state: Any, fitted: bool = True) -> _State:
        """Returns a state of this module for one of flashbax; one of arrays gets its windows."""
        if not isinstance(state, TrajectoryBufferState):
            state = TrajectoryBufferState(**_state.fields_of(state))
        if not fitted or not isinstance(state.buffer.sampler, _state.OfArrays):
            return state
        fitting = _state.fitted(state.buffer, sequence_length, period, sampler)
        return state.replace(buffer=fitting)

    def add(state: _State, batch: PyTree) -> _State:
        # Without priorities nothing is kept of windows, so the state may stay as it is in a scan.
        state = as_state(state, fitted=sampler.uses_priority)
        batch = batch if shaped is None else jax.tree.map(shaped, batch)
        return state.replace(buffer=doors.add(state.buffer, batch, donate=False))

    def sample(state: _State, rng_key: Key) -> TrajectoryBufferSample[Any]:
        buffer = as_state(state).buffer
        for name, expected, actual in (
            ("sample_sequence_length", sequence_length, buffer.sequence_length),
            ("period", period, buffer.period),
            ("the sampler", split(sampler)[0], buffer.sampler),
        ):
            if expected != actual:
                raise ValueError(
                    f"{name} is {expected}, but the state was made with {actual}; sample it with "
                    "the buffer that made it, or add its experience to a state of this one"
                )
        batch = doors.sample(buffer, rng_key, batch_size)
        if not sampler.uses_priority:
            return TrajectoryBufferSample(experience=view(batch.data), valid=batch.valid)
        _, priorities = buffer.sampler_state.read(batch.slots.index)
        return PrioritisedTrajectoryBufferSample(
            experience=view(batch.data),
            valid=batch.valid,
            indices=batch.slots.index,
            probabilities=batch.probability,
            priorities=jnp.where(batch.valid, priorities, 0.0),
            slots=batch.slots,
        )

    def can_sample(state: _State) -> Flag:
        return state.is_full | (state.current_index >= least)

    def set_priorities(state: _State, indices: Index | Slots, priorities: Floats) -> _State:
        state = as_state(state)
        slots = indices
        if not isinstance(slots, Slots):
            index = numbers.integers(slots, "indices")
            slots = Slots(index=index, generation=state.buffer.occupancy.generation(index))
        buffer = doors.update_priority(state.buffer, slots, priorities, donate=False)
        return state.replace(buffer=buffer)

    if not sampler.uses_priority:
        return TrajectoryBuffer(init, add, sample, can_sample)
    return PrioritisedTrajectoryBuffer(init, add, sample, can_sample, set_priorities)


def _pairs(
    max_length: int,
    min_length: int,
    batch_size: int,
    sequences: bool,
    add_batch_size: int | None,
    sampler: Sampler = Uniform(),
) -> Any:
    """A buffer of windows of two steps, which are handed out as pairs."""
    rows = 1 if add_batch_size is None else check_count("add_batch_size", add_batch_size)
    _check_lengths(max_length, min_length, batch_size)
    length, least = max_length // rows, min_length // rows + 1
    if least > max_length:
        raise ValueError(f"min_length is {min_length}, but max_length only {max_length}")
    if length < 2:
        raise ValueError(
            f"max_length is {max_length} and add_batch_size {rows}, so rows have "
            f"{length} steps; they need 2 for a pair"
        )
    shaped = _shaper(add_batch_size is not None, sequences)

    def view(windows: Arrays) -> ExperiencePair[Any]:
        return ExperiencePair(first=_step(windows, 0), second=_step(windows, 1))

    return _windows(rows, batch_size, 2, 1, least, None, length, sampler, shaped, view)


def _items(
    max_length: int,
    min_length: int,
    batch_size: int,
    sequences: bool,
    batches: bool,
    sampler: Sampler = Uniform(),
) -> Any:
    """A buffer of windows of one step, in one row, which are handed out without their time axis."""
    _check_lengths(max_length, min_length, batch_size)
    shaped = _shaper(batches, sequences, flatten=True)
    return _windows(1, batch_size, 1, 1, min_length, None, max_length, sampler, shaped, _step)


# flashbax has a module for each kind of buffer, as in ``fbx.trajectory_buffer.BufferState`` and
# ``from flashbax.buffers.trajectory_buffer import BufferState``. Here all of them are this one.
buffers = flat_buffer = item_buffer = trajectory_buffer = trajectory_queue = mixer = (
    prioritised_flat_buffer
) = prioritised_item_buffer = prioritised_trajectory_buffer = sys.modules[__name__]
for _name in (
    "flat_buffer",
    "item_buffer",
    "mixer",
    "prioritised_flat_buffer",
    "prioritised_item_buffer",
    "prioritised_trajectory_buffer",
    "sum_tree",  # Whatever is taken from it raises.
    "trajectory_buffer",
    "trajectory_queue",
):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[f"{__name__}.buffers.{_name}"] = buffers
sys.modules[f"{__name__}.buffers"] = buffers

# Functions of flashbax's modules, which compute with the arrays of its states.
_OF_ITS_ARRAYS = re.compile(
    "sum_tree|SumTreeState|SET_BATCH_FN|(init|add|sample|can_sample|can_add|stratified_sample)$"
    "|(prioritised|set|get|calculate|create|validate)_"
)


def __getattr__(name: str) -> NoReturn:
    if _OF_ITS_ARRAYS.match(name):
        # Of an AttributeError, an import would leave out the text.
        raise ImportError(f"there is no {name} here: {_state.BRIDGE}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


exporting.register_all()
