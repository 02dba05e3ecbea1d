"""The operations of the buffers as functions, which are compiled once and update in place.

Each of these functions calls a method of the buffer. A function that changes the buffer *donates*
it: its memory is updated in place, and the buffer that was passed in cannot be used any more.
``donate=False`` keeps it, at the cost of a copy of what changes.

Inside your own ``jax.jit``, ``jax.lax.scan`` or ``jax.vmap`` they call the plain method, and
``donate`` has no effect: donate the buffer to your own program instead, with
``jax.jit(step, donate_argnums=0)``. A scan updates its carry in place by itself.

Their signatures are those of the declarations in ``slotted.py``, with which they are compared when
this module is imported.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from jaxbuf.buffers.buffer import Buffer, By, check_options, method_of, untaken
from jaxbuf.buffers.operation import Operation, given
from jaxbuf.buffers.queue import Queue
from jaxbuf.buffers.sample import Normalization, Sample, Steps, Within
from jaxbuf.buffers.slotted import (
    AddOptions,
    Envs,
    InsertOptions,
    PartOptions,
    SampleOptions,
    SlottedBuffer,
    WeightOptions,
)
from jaxbuf.core import advice, checks, guesses
from jaxbuf.core.program import OUTSIDE, Entry, OwnPrograms, Program, is_outside
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Function, Key, Number
from jaxbuf.core.versions import trace_state
from jaxbuf.strategies.protocols import Sampler

P = ParamSpec("P")
Result = TypeVar("Result", covariant=True)
Door = TypeVar("Door", bound=Function)


class _Buffer(Protocol):
    """A buffer with ``add``: one of this library, or your own."""

    @property
    def add(self) -> Function: ...


class _Adds(Protocol[P, Result]):
    """A buffer whose ``add`` has options of its own."""

    def add(self, items: Any, /, *args: P.args, **options: P.kwargs) -> Result: ...


class _Inserts(Protocol[P, Result]):
    """A buffer whose ``insert`` has options of its own."""

    def insert(self, items: Any, /, *args: P.args, **options: P.kwargs) -> Result: ...


class _Samples(Protocol[P]):
    """A buffer whose ``sample`` has options of its own."""

    def sample(
        self, key: Any, batch_size: int, /, *args: P.args, **options: P.kwargs
    ) -> Sample: ...


AnyBuffer = TypeVar("AnyBuffer", bound=_Buffer)


def call(
    declared: Callable[Concatenate[Any, P], Any],
    buffer: object,
    /,
    *args: object,
    donate: object = ...,
    **options: object,
) -> Any:
    """Calls a method of a buffer as one compiled program.

    Args:
        declared: The declaration of the method.
        buffer: The buffer.
        args: The positional arguments of the method.
        donate: Whether the buffer may be overwritten; not given for a method that does not change
            it.
        **options: Options of the method. One that is None is ignored, unless the declaration says
            that None is a value of it.

    Raises:
        ValueError: If ``buffer`` is not a buffer with this method or was donated before, or if the
            method does not take one of the options.
    """
    operation: Operation | None = vars(declared).get("operation")
    if options:
        options = given(options, operation.nones if operation else ())
    if not args and declared.__name__ == "add" and not {"items", "steps"} & options.keys():
        raise TypeError(f"add() has no items; {guesses.ANSWERS['add']}")
    if donate is True and operation is not None and not operation.changes:
        options["donate"] = donate  # Which it does not take.
    function = check_options(buffer, declared.__name__, options)
    donates = donate is True or (donate is not ... and checks.check_flag("donate", donate))
    if isinstance(buffer, OwnPrograms):
        if operation is None:
            return function(buffer, *args, **options)
        hosted: Any = buffer
        return hosted.route(operation, operation.bind(hosted, args, options), donate=donates)
    return _program(function)((buffer, *args), options, donate=donates)


@functools.lru_cache(maxsize=1024)
def _program(method: Function) -> Program:
    """Returns the program of a method, which may be that of somebody else's buffer."""
    return getattr(method, "program", None) or Program(method, foreign=True)


def _entry(
    declared: Function, donates: bool, *kinds: type, names: tuple[str, ...] = ()
) -> Entry | None:
    """Returns how a call enters a program, if the classes of its arguments say that it is in order.

    Args:
        declared: The declaration of the method.
        donates: Whether ``donate`` is an option of the call.
        *kinds: The classes of all arguments, those of ``names`` last.
        names: The names of the arguments that are passed by name.
    """
    count = len(kinds) - len(names)
    if not count or not issubclass(kinds[0], Buffer) or issubclass(kinds[0], OwnPrograms):
        return None
    method = method_of(kinds[0], declared.__name__)
    if method is None:
        return None
    made = _program(method)
    given = dict(zip([*made.names[: count - 1], *names], kinds[1:], strict=False))
    twice_or_unknown = len(given) < len(kinds) - 1
    if twice_or_unknown or not given.keys() >= made.required:
        return None
    if {type(None), type(...)} & {*kinds[count:]}:
        return None  # An option that is not given, or is None: ``given`` knows.
    if given.pop("donate", bool) is not bool or ("donate" in names and not donates):
        return None
    if untaken(method, tuple(given)) is not None:
        return None
    return made.entry(kinds[0], tuple(given), *given.values())


# The signatures of the functions, by name.
_signatures: dict[str, inspect.Signature] = {}


def _as_declared(declared: Function, options: type | None = None) -> Callable[[Door], Door]:
    """Returns a decorator that compares a function, or an overload of it, with a declaration.

    Args:
        declared: The declaration of the operation.
        options: A ``TypedDict`` in place of its ``**options``, of which each buffer takes some.

    Raises:
        TypeError: If the function has other parameters than the declaration.
    """
    _, *parameters = inspect.signature(declared).parameters.values()
    expected = {x.name: (x.kind, x.default) for x in parameters}
    if options is not None:
        del expected["options"]
        own: frozenset[str] = getattr(options, "__optional_keys__", frozenset())
        expected |= dict.fromkeys(own, (inspect.Parameter.KEYWORD_ONLY, None))

    def compare(function: Door) -> Door:
        signature = inspect.signature(function)
        _, *shown = signature.parameters.values()
        # An option that has None as a value is not given if it is ``...``.
        defaults = {x.name: None if x.default is ... else x.default for x in shown}
        if {x.name: (x.kind, defaults[x.name]) for x in shown if x.name != "donate"} != expected:
            raise TypeError(f"{function.__name__}{signature} is declared with {expected}")
        _signatures[function.__name__] = signature
        return function

    return compare


def _door(
    declared: Function, options: type | None = None, looks: Callable[[], int] | None = None
) -> Callable[[Door], Door]:
    """Returns a decorator for the function of an operation, whose docstrings it joins.

    Unless an overload was compared with the declaration before, the function is; see
    ``_as_declared``. The function itself runs if the classes of its arguments leave something to
    check, and as long as ``looks`` returns more than 0.
    """

    def decorate(function: Door) -> Door:
        if function.__name__ not in _signatures:
            _as_declared(declared, options)(function)
        signature = _signatures[function.__name__]
        names = frozenset(signature.parameters)
        donates = "donate" in names
        changes = {"donate": True} if donates else {}
        entry_of = functools.lru_cache(maxsize=1024)(functools.partial(_entry, declared, donates))

        @functools.wraps(function)
        def door(*args: Any, **options: Any) -> Any:
            if options:
                kinds = map(type, options.values())
                entry = entry_of(*map(type, args), *kinds, names=tuple(options))
            else:
                entry = entry_of(*map(type, args))
            if entry and not (looks and looks()) and trace_state() == OUTSIDE:
                donate = options.pop("donate", True) if donates else False
                return entry.program.outside(args, options, donate, entry)
            if options.keys() <= names:
                return function(*args, **options)
            # One that only a buffer of somebody else takes, or none does, which raises.
            return call(declared, *args, **(changes | options))

        vars(door)["__signature__"] = signature
        # The example is that of the function.
        head, *example = (inspect.getdoc(function) or "").partition("\n\nExample:")
        text, _, _ = (inspect.getdoc(declared) or "").partition("\n\nExample:")
        door.__doc__ = f"{head}\n\n{text.rstrip()}{''.join(example)}\n"
        return door  # pyright: ignore[reportReturnType]

    return decorate


@overload
@_as_declared(SlottedBuffer.add, AddOptions)
def add(
    buffer: AnyBuffer,
    items: Arrays,
    *,
    priority: Float[ArrayLike, "..."] | None = None,
    score: Float[ArrayLike, " B"] | None = None,
    version: Int[ArrayLike, "..."] | None = None,
    session: Int[ArrayLike, "..."] | None = None,
    mask: Bool[ArrayLike, "..."] | None = None,
    env_ids: Int[ArrayLike, " K"] | None = None,
    part: int | str | None = None,
    donate: bool = True,
) -> AnyBuffer: ...
@overload
def add(buffer: _Adds[P, Result], items: Arrays, *args: P.args, **options: P.kwargs) -> Result: ...
@_door(SlottedBuffer.add)
def add(buffer: Any, items: Any, *args: Any, donate: bool = True, **options: Any) -> Any:
    """Adds items to a buffer: ``buffer.add(items, ...)``, compiled, in place.

    It compiles once for all buffers with the same configuration, and again for other shapes; at the
    tenth it warns, once. The buffer is donated: its memory is updated in place, and the buffer
    passed in cannot be used any more. ``donate=False`` keeps it, at the cost of a copy of its whole
    contents.

    Inside your own ``jax.jit``, ``jax.lax.scan`` or ``jax.vmap`` this calls the plain method, and
    ``donate`` has no effect: donate the buffer to your own program instead, with
    ``jax.jit(step, donate_argnums=0)``. A scan updates its carry in place by itself.

    Options that are None are ignored. If you wrote the buffer class yourself, it takes the options
    of its own ``add``: Python integers, booleans, strings and functions are static, arrays are
    traced, and a call with a function compiles anew.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100, sampler=jaxbuf.Prioritized())
        >>> buffer = jaxbuf.add(buffer, jnp.arange(3.0), priority=jnp.array([1.0, 2.0, 4.0]))
        >>> larger = jaxbuf.add(buffer, jnp.arange(5.0), donate=False)
        >>> int(buffer.size), int(larger.size)
        (3, 8)
    """
    return call(SlottedBuffer.add, buffer, items, *args, donate=donate, **options)


@overload
@_as_declared(SlottedBuffer.insert, InsertOptions)
def insert(
    buffer: AnyBuffer,
    items: Arrays,
    *,
    priority: Float[ArrayLike, " B"] | None = None,
    score: Float[ArrayLike, " B"] | None = None,
    version: Int[ArrayLike, " B"] | None = None,
    session: Int[ArrayLike, " B"] | None = None,
    mask: Bool[ArrayLike, " B"] | None = None,
    part: int | str | None = None,
    donate: bool = True,
) -> tuple[AnyBuffer, Slots]: ...
@overload
def insert(
    buffer: _Inserts[P, Result], items: Arrays, *args: P.args, **options: P.kwargs
) -> Result: ...
@_door(SlottedBuffer.insert)
def insert(buffer: Any, items: Any, *args: Any, donate: bool = True, **options: Any) -> Any:
    """Adds items, and returns their slots: ``buffer.insert(...)``, compiled; donates the buffer.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100)
        >>> buffer, slots = jaxbuf.insert(buffer, jnp.arange(3.0))
        >>> slots.index.tolist()
        [0, 1, 2]
    """
    return call(SlottedBuffer.insert, buffer, items, *args, donate=donate, **options)


@overload
@_as_declared(SlottedBuffer.sample, SampleOptions)
def sample(
    buffer: _Buffer,
    key: Key,
    batch_size: int,
    *,
    sequence_length: int | None = None,
    beta: float | Number | None = None,
    normalize: Normalization = ...,
    within: Within | None = None,
) -> Sample: ...
@overload
def sample(
    buffer: _Samples[P], key: Key, batch_size: int, *args: P.args, **options: P.kwargs
) -> Sample: ...
@_door(SlottedBuffer.sample)
def sample(buffer: Any, key: Any, batch_size: int, *args: Any, **options: Any) -> Any:
    """Draws a batch from a buffer: ``buffer.sample(key, batch_size, ...)``, compiled.

    With ``beta`` the same program computes importance weights. It compiles once for each batch size
    and for all buffers with the same configuration. The buffer is not donated and does not change.
    Inside your own ``jax.jit`` this calls the plain method. Add before you sample there: a program
    that samples first has to keep the old storage, and copies it. The samplers ``Shuffled`` and
    ``Staleness`` record only what ``jaxbuf.next_batch`` draws.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"obs": jnp.zeros(3)}, 100)
        >>> buffer = jaxbuf.add(buffer, {"obs": jnp.ones((10, 3))})
        >>> batch = jaxbuf.sample(buffer, jax.random.key(0), 4)
        >>> batch.data["obs"].shape, batch.valid.tolist()
        ((4, 3), [True, True, True, True])
    """
    return call(SlottedBuffer.sample, buffer, key, batch_size, *args, **options)


@_door(SlottedBuffer.next_batch, WeightOptions)
def next_batch(
    buffer: AnyBuffer,
    key: Key,
    batch_size: int,
    *,
    beta: float | Number | None = None,
    normalize: Normalization = ...,
    within: Within | None = None,
    donate: bool = True,
) -> tuple[AnyBuffer, Sample]:
    """Draws the next batch of a pass: ``buffer.next_batch(key, batch_size)``, compiled, in place.

    The buffer is donated, as by ``jaxbuf.add``: it records what was drawn, and is returned as well.
    With ``Shuffled``, ``metrics()`` has the numbers of ``passes`` finished and of items ``left``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=jaxbuf.Shuffled())
        >>> buffer = jaxbuf.add(buffer, jnp.arange(8))
        >>> drawn = []
        >>> for key in jax.random.split(jax.random.key(0), 4):
        ...     buffer, batch = jaxbuf.next_batch(buffer, key, 2)
        ...     drawn += batch.data.tolist()
        >>> sorted(drawn), int(buffer.metrics()["passes"])
        ([0, 1, 2, 3, 4, 5, 6, 7], 1)
    """
    options = {"beta": beta, "normalize": normalize, "within": within}
    return call(SlottedBuffer.next_batch, buffer, key, batch_size, donate=donate, **options)


@_door(SlottedBuffer.update_priority, looks=advice.looks_left)
def update_priority(
    buffer: AnyBuffer,
    slots: Slots,
    priority: Float[ArrayLike, " B"],
    *,
    mask: Bool[ArrayLike, " B"] | None = None,
    donate: bool = True,
) -> AnyBuffer:
    """Sets priorities of sampled items: ``buffer.update_priority(...)``, compiled, in place.

    The buffer is donated. ``donate=False`` keeps it, at the cost of a copy of its priorities; the
    two buffers then share their storage, so that donating one of them consumes both. The first ten
    calls from Python, of up to 65,536 rows, look at the priorities, and warn if one is negative.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 100, sampler=jaxbuf.Prioritized())
        >>> buffer = jaxbuf.add(buffer, jnp.arange(10.0))
        >>> batch = jaxbuf.sample(buffer, jax.random.key(0), 4)
        >>> buffer = jaxbuf.update_priority(buffer, batch.slots, jnp.full(4, 7.0))
        >>> round(float(buffer.metrics()["priority_max"]), 3)
        7.0
    """
    if advice.looks_left() and is_outside():
        advice.note_priorities(priority, mask)
    return call(SlottedBuffer.update_priority, buffer, slots, priority, mask=mask, donate=donate)


@_door(SlottedBuffer.set_field)
def set_field(
    buffer: AnyBuffer,
    path: str | None,
    slots: Slots,
    value: Arrays,
    *,
    mask: Bool[ArrayLike, "..."] | None = None,
    donate: bool = True,
) -> AnyBuffer:
    """Changes a field of sampled items: ``buffer.set_field(...)``, compiled; donates the buffer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"value": jnp.float32(0)}, 100)
        >>> buffer = jaxbuf.add(buffer, {"value": jnp.arange(10.0)})
        >>> batch = jaxbuf.sample(buffer, jax.random.key(0), 64)
        >>> buffer = jaxbuf.set_field(buffer, "value", batch.slots, jnp.ones(64))
        >>> float(buffer.data["value"][:10].max())
        1.0
    """
    return call(SlottedBuffer.set_field, buffer, path, slots, value, mask=mask, donate=donate)


@_door(SlottedBuffer.map_field)
def map_field(
    buffer: AnyBuffer,
    path: str | None,
    fn: Function,
    *,
    batch_size: int = 4096,
    donate: bool = True,
) -> AnyBuffer:
    """Computes a field of all items anew: ``buffer.map_field(...)``, compiled; donates the buffer.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"reward": jnp.float32(0)}, 4)
        >>> buffer = jaxbuf.add(buffer, {"reward": jnp.arange(3.0)})
        >>> buffer = jaxbuf.map_field(buffer, "reward", lambda items: 2 * items["reward"])
        >>> buffer.data["reward"].tolist()
        [0.0, 2.0, 4.0, 0.0]
    """
    return call(SlottedBuffer.map_field, buffer, path, fn, batch_size=batch_size, donate=donate)


@_door(SlottedBuffer.update_score)
def update_score(
    buffer: AnyBuffer,
    slots: Slots,
    score: Float[ArrayLike, " B"],
    *,
    mask: Bool[ArrayLike, " B"] | None = None,
    donate: bool = True,
) -> AnyBuffer:
    """Sets scores of sampled items: ``buffer.update_score(...)``, compiled; donates the buffer."""
    return call(SlottedBuffer.update_score, buffer, slots, score, mask=mask, donate=donate)


@_door(SlottedBuffer.remove)
def remove(
    buffer: AnyBuffer,
    slots: Slots,
    *,
    mask: Bool[ArrayLike, " B"] | None = None,
    donate: bool = True,
) -> AnyBuffer:
    """Removes sampled items: ``buffer.remove(slots, ...)``, compiled; donates the buffer."""
    return call(SlottedBuffer.remove, buffer, slots, mask=mask, donate=donate)


@_door(SlottedBuffer.mark_used)
def mark_used(
    buffer: AnyBuffer,
    slots: Slots,
    *,
    mask: Bool[ArrayLike, " B"] | None = None,
    donate: bool = True,
) -> AnyBuffer:
    """Counts a use of sampled items: ``buffer.mark_used(...)``, compiled; donates the buffer."""
    return call(SlottedBuffer.mark_used, buffer, slots, mask=mask, donate=donate)


@_door(SlottedBuffer.set_version)
def set_version(
    buffer: AnyBuffer,
    version: int | Count,
    session: int | Count | None = None,
    *,
    donate: bool = True,
) -> AnyBuffer:
    """Sets the learner's version: ``buffer.set_version(...)``, compiled; donates the buffer."""
    return call(SlottedBuffer.set_version, buffer, version, session=session, donate=donate)


@_door(SlottedBuffer.clear)
def clear(buffer: AnyBuffer, envs: Envs = None, *, donate: bool = True) -> AnyBuffer:
    """Removes all items: ``buffer.clear(...)``, compiled; donates the buffer."""
    return call(SlottedBuffer.clear, buffer, envs=envs, donate=donate)


@_door(Queue.take)
def take(queue: AnyBuffer, batch_size: int, *, donate: bool = True) -> tuple[AnyBuffer, Sample]:
    """Takes the oldest items out of a queue: ``queue.take(...)``, compiled; donates the queue.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> queue = jaxbuf.add(jaxbuf.Queue.create(jnp.int32(0), 8), jnp.arange(5))
        >>> queue, batch = jaxbuf.take(queue, 3)
        >>> batch.data.tolist(), int(queue.size)
        ([0, 1, 2], 2)
    """
    return call(Queue.take, queue, batch_size, donate=donate)


@_door(SlottedBuffer.dequeue)
def dequeue(
    buffer: AnyBuffer, n: int, *, mask: Bool[ArrayLike, " E"] | None = None, donate: bool = True
) -> tuple[AnyBuffer, Steps]:
    """Removes the earliest steps: ``buffer.dequeue(n, ...)``, compiled; donates the buffer."""
    return call(SlottedBuffer.dequeue, buffer, n, mask=mask, donate=donate)


@_door(SlottedBuffer.latest)
def latest(buffer: _Buffer, n: int) -> Sample:
    """Returns the ``n`` newest items, or windows of every ring: ``buffer.latest(n)``, compiled."""
    return call(SlottedBuffer.latest, buffer, n)


@_door(SlottedBuffer.highest)
def highest(buffer: _Buffer, n: int, by: By | None = None) -> Sample:
    """Returns the ``n`` items of the highest scores: ``buffer.highest(n)``, compiled."""
    return call(SlottedBuffer.highest, buffer, n, by=by)


@_door(SlottedBuffer.sample_range)
def sample_range(
    buffer: _Buffer,
    key: Key,
    batch_size: int,
    start: int | Count | None = None,
    stop: int | Count | None = None,
    *,
    by_priority: bool = False,
    replacement: bool = False,
) -> Sample:
    """Draws a batch from a range of ages: ``buffer.sample_range(...)``, compiled."""
    options = {"by_priority": by_priority, "replacement": replacement}
    return call(
        SlottedBuffer.sample_range, buffer, key, batch_size, start=start, stop=stop, **options
    )


@_door(SlottedBuffer.set_hyperparameters)
def set_hyperparameters(
    buffer: AnyBuffer,
    values: Mapping[str, ArrayLike] | None = None,
    *,
    donate: bool = True,
    **options: ArrayLike,
) -> AnyBuffer:
    """Sets numbers of the sampler: ``buffer.set_hyperparameters(...)``, compiled, in place.

    The buffer is donated, as by ``jaxbuf.update_priority``.
    """
    return call(SlottedBuffer.set_hyperparameters, buffer, values=values, donate=donate, **options)


@_door(SlottedBuffer.with_sampler, PartOptions)
def with_sampler(
    buffer: AnyBuffer, sampler: Sampler, *, part: int | str | None = None, donate: bool = True
) -> AnyBuffer:
    """Changes the sampler: ``buffer.with_sampler(...)``, compiled; donates the buffer."""
    return call(SlottedBuffer.with_sampler, buffer, sampler, part=part, donate=donate)


@_door(SlottedBuffer.end_episodes)
def end_episodes(buffer: AnyBuffer, envs: Envs = None, *, donate: bool = True) -> AnyBuffer:
    """Truncates open episodes: ``buffer.end_episodes(...)``, compiled; donates the buffer."""
    return call(SlottedBuffer.end_episodes, buffer, envs=envs, donate=donate)


@_door(SlottedBuffer.drop_newest_episode)
def drop_newest_episode(buffer: AnyBuffer, envs: Envs = None, *, donate: bool = True) -> AnyBuffer:
    """Removes newest episodes: ``buffer.drop_newest_episode()``, compiled; donates the buffer."""
    return call(SlottedBuffer.drop_newest_episode, buffer, envs=envs, donate=donate)
