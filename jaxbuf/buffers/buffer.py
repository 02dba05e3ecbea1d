"""A buffer of any kind, as code that takes all of them sees it, and the options of its methods."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, PyTree

from jaxbuf.core import checks, guesses
from jaxbuf.core.storage import has_shapes, like
from jaxbuf.core.types import Flag, Function

# What ``highest`` compares.
By = Literal["score", "priority"]


class Share(NamedTuple):
    """The share of one buffer in each batch.

    Attributes:
        buffer: The buffer; None if its items are taken out, once each, and so are certain.
        slots: Its number of slots.
        fraction: The fraction of the rows that come from it; an array ``[]`` if it varies.
    """

    buffer: Any
    slots: int
    fraction: Any


class Buffer:
    """A buffer of any kind. Each kind gives its own answers, so that nobody asks which one it is.

    Attributes:
        owns_items: Whether it stores items itself, and not in buffers inside of it.
        is_queue: Whether items are taken out, once each, and none is evicted.
        runs_in_programs: Whether its methods can be called within ``jax.jit``.
        on_one_device: Whether all of a batch is on one device.
        draws_some: Whether it can draw a number of rows that is traced, by ``sample_some``.
    """

    owns_items: bool = False
    is_queue: bool = False
    runs_in_programs: bool = True
    on_one_device: bool = True
    draws_some: bool = False

    def __init_subclass__(cls, **options: Any):
        if not issubclass(cls, struct.PyTreeNode):
            super().__init_subclass__(**options)
            return
        # flax gives each class an ``==`` of its fields, and a ``replace``, which hide those below.
        super().__init_subclass__(**({"eq": False} | options))
        del cls.replace

    def replace(self: Any, **updates: Any) -> Any:
        """Returns the buffer with other fields.

        Raises:
            ValueError: When traced, if the new storage, or that of a buffer inside, differs from
                the present one in its structure, a shape or a dtype; the message names the leaf. If
                the sampler, the evictor or a part is replaced, but not its state, which says
                nothing to the new one. Limits on freshness may change, as may a sampler that keeps
                no state.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create({"x": jnp.float32(0)}, 8)
            >>> buffer.replace(data={"x": jnp.zeros(3)})
            Traceback (most recent call last):
            ValueError: data['x'] has shape (3,); expected (8,)
        """
        return dataclasses.replace(self, **self.checked(updates))

    def checked(self: Any, updates: dict[str, Any]) -> dict[str, Any]:
        """Returns new fields as ``replace`` takes them, after its checks."""
        for field in dataclasses.fields(self):
            name, before = field.name, getattr(self, field.name)
            if name == "data" and name in updates:
                updates = {**updates, name: like(before, updates[name], name)}
            elif name in updates:
                _check_alike(name, before, updates[name])
        return updates

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        this: Any = self
        names = [field.name for field in dataclasses.fields(this)]
        ours, theirs = ([getattr(one, name) for name in names] for one in (this, other))
        try:
            # Of buffers of shapes or shardings, as ``jax.tree.map`` makes them, this is one answer.
            return self is other or ours == theirs
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"== of {self._kind()} has no single answer, since its arrays may be large or "
                "traced; compare with chex.assert_trees_all_equal(a, b), or "
                "jaxbuf.testing.assert_holds(buffer, items) for the items"
            ) from error

    def __hash__(self) -> int:
        raise TypeError(
            f"{self._kind()} has no hash, since its arrays change; pass it to jax.jit as an "
            "argument that is not static"
        )

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> NoReturn:
        raise TypeError(
            f"{self._kind()} has no len, which a traced program would not know; buffer.size is the "
            "number that it holds, and buffer.capacity the most that it can hold"
        )

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            f"{self._kind()} has no items by number; buffer.get(slots) returns the items in slots, "
            "buffer.latest(n) the newest ones, and buffer.data has the storage"
        )

    # Otherwise Python would count up the items.
    __iter__ = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            guesses.refuse(self, name)

    @property
    def members(self) -> tuple[Any, ...]:
        """The buffers that it is made of, as a ``Mixture`` is; usually none."""
        return ()

    @property
    def abilities(self) -> frozenset[str]:
        """The names of what it, or a buffer inside, is able to do, which operations need."""
        return frozenset().union(*(one.abilities for one in self._inner()))

    @property
    def compares_by(self) -> frozenset[str]:
        """The choices of ``by`` in ``highest``: the numbers that all buffers inside keep."""
        inner = [one.compares_by for one in self._inner()]
        return frozenset.intersection(*inner) if inner else frozenset()

    @property
    def num_envs(self) -> int:
        """The number of environments whose steps it holds; 0 if it holds items."""
        return sum(one.num_envs for one in self._inner())

    @property
    def num_blocks(self) -> int:
        """A number of which the number of items in an ``add`` must be a multiple."""
        return max(self.inside()[1], 1)

    @property
    def num_slots(self: Any) -> int:
        """The number of slots of items, or of windows."""
        return self.capacity

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of a mesh over which rows are split here; empty if each device has all."""
        return ()

    @property
    def example(self) -> PyTree:
        """The shapes and dtypes of an item, or of a step.

        Raises:
            ValueError: If the buffer does not keep items of one kind.
        """
        if not self.members and (inner := self._inner()):
            return inner[0].example
        raise ValueError(
            f"buffer is {self._kind()}, which keeps no items of its own; pass one of its parts, or "
            "another buffer"
        )

    @property
    def storage(self) -> PyTree:
        """Arrays with the structure and the dtypes of items, or steps, and with any shapes."""
        inner = self._inner()
        return inner[0].storage if inner else ()

    @property
    def home(self) -> jax.sharding.Sharding | None:
        """The sharding that its arrays must have; None if they may be on any device."""
        return None

    def inside(self) -> tuple[Any, int]:
        """Returns the buffer inside of wrappers, and the number of its shards.

        The shards are the first axis of its leaves; the number is 0 if there is no such axis.
        """
        return self, 0

    def room(self: Any, sequence_length: int | None = None) -> tuple[float, str]:
        """Returns the number of items, or windows, that can be drawn, and a text about it.

        Args:
            sequence_length: The length of the windows; None for that of the buffer.
        """
        del sequence_length
        return self.capacity, "capacity is {}"

    def check_room(self, asks: str, rows: int, sequence_length: int | None = None) -> None:
        """Checks that the buffer can ever hold so many items, or windows of a length.

        It only reads the configuration.

        Args:
            asks: The beginning of the error, such as "batch_size asks for 8 rows at a time".
            rows: The number of items, or windows.
            sequence_length: As for ``room``.

        Raises:
            ValueError: If it never can.
        """
        room, text = self.room(sequence_length)
        if rows > room:
            raise ValueError(f"{asks}, but the {text.format(room)}; this would wait for ever")

    def shares(self: Any, rows: int) -> list[Share]:
        """Returns the buffers that a batch comes from, in the order of their slots.

        Args:
            rows: The number of rows of the batch.
        """
        del rows
        return [Share(self, self.capacity, 1.0)]

    def check_add(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of ``add``, after checks of values that tracing would hide."""
        return arguments

    def check_hyperparameters(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of ``set_hyperparameters``, after checks like ``check_add``."""
        return arguments

    def kept_by_hyperparameters(self, arguments: dict[str, Any]) -> tuple[str, ...]:
        """Returns the fields that ``set_hyperparameters`` neither reads nor changes."""
        del arguments
        return ()

    def are_legal(self, values: dict[str, Array]) -> Flag:
        """Returns whether new hyperparameters, by their names here, are legal."""
        raise NotImplementedError

    def with_values(self, values: dict[str, Array], legal: Flag) -> Any:
        """Returns the buffer with new hyperparameters, if they are legal."""
        raise NotImplementedError

    def counting_illegal(self, legal: Flag, values: dict[str, Array]) -> Any:
        """Returns the buffer after counting hyperparameters that are not legal."""
        raise NotImplementedError

    def _inner(self) -> "list[Buffer]":
        """Returns the buffers that answer for a wrapper: its members, or the one inside of it."""
        if self.members:
            return [as_buffer(member) for member in self.members]
        inner, _ = self.inside()
        return [inner] if isinstance(inner, Buffer) and inner is not self else []

    def _kind(self) -> str:
        return checks.kind_of(self)


@dataclasses.dataclass(frozen=True)
class _Other(Buffer):
    """The answers in place of an object that is not one of this library."""

    thing: Any

    @property
    def capacity(self) -> float:
        return getattr(self.thing, "capacity", math.inf)

    def inside(self) -> tuple[Any, int]:
        return self.thing, 0

    def shares(self, rows: int) -> list[Share]:
        del rows
        return [Share(self.thing, self.thing.capacity, 1.0)]

    def are_legal(self, values: dict[str, Array]) -> Flag:
        del values
        return jnp.bool_(True)

    def with_values(self, values: dict[str, Array], legal: Flag) -> Any:
        del legal
        return self.thing.set_hyperparameters(values)

    def counting_illegal(self, legal: Flag, values: dict[str, Array]) -> Any:
        del legal, values
        return self.thing

    def _kind(self) -> str:
        return checks.kind_of(self.thing)


def as_buffer(thing: object) -> Buffer:
    """Returns an object that answers for a buffer: itself, or the usual answers for your own."""
    return thing if isinstance(thing, Buffer) else _Other(thing)


def owns_items(node: object) -> bool:
    """Returns whether a node of a pytree is a buffer that holds items of its own."""
    return isinstance(node, Buffer) and node.owns_items


def _check_alike(name: str, before: object, after: object) -> None:
    """Checks that buffers inside of another one hold the same kind of items as those before them.

    Raises:
        ValueError: If a structure, shape or dtype of items differs; the message names the leaf.
    """

    def inside(tree: object) -> list[tuple[Any, Any]]:
        pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=owns_items)
        return [(path, node) for path, node in pairs if owns_items(node)]

    for (_, old), (path, new) in zip(inside(before), inside(after), strict=False):
        if has_shapes(old.data):
            like(old.example, new.example, f"{name}{jax.tree_util.keystr(path)}.data")


def check_options(
    buffer: object, method: str, options: Mapping[str, object], argument: str = "buffer"
) -> Function:
    """Returns a method of a buffer, after a check that it takes these options.

    Args:
        buffer: The buffer, or another object that was passed instead.
        method: The name of the method that the options are for.
        options: The options by name.
        argument: The name of the buffer in an error.

    Raises:
        ValueError: If ``buffer`` is not a pytree with such a method, or the method does not take
            an option.
    """
    function = method_of(type(buffer), method)
    is_tree = isinstance(buffer, Buffer) or not jax.tree_util.all_leaves([buffer])
    if function is None or not is_tree:
        raise ValueError(f"{argument} is {_no_buffer(buffer, method)}")
    if not options:
        return function
    name = untaken(function, tuple(options))
    if name is None:
        return function
    takes = [
        parameter.name
        for parameter in _parameters(function).values()
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
    ]
    hint = f", for its {method} takes {', '.join(takes)}" if takes else ""
    owner = checks.kind_of(buffer)
    raise ValueError(f"{name} was given, but {owner} has no use for it; leave it out{hint}")


@functools.lru_cache(maxsize=1024)
def _methods(kind: type) -> dict[str, Function]:
    """Returns the methods of a class by name, those of its bases included."""
    return dict(inspect.getmembers(kind, callable))


@functools.lru_cache(maxsize=1024)
def method_of(kind: type, name: str) -> Function | None:
    """Returns a method of a class; None if it lacks it, or has one that says what to use."""
    method = _methods(kind).get(name)
    return None if hasattr(method, "remedy") else method


@functools.lru_cache(maxsize=1024)
def untaken(method: Function, names: tuple[str, ...]) -> str | None:
    """Returns the first of these options that a method does not take; None if it takes all."""
    parameters = _parameters(method)
    # A method with ``**options`` takes any, and checks them itself.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return next((name for name in names if name not in parameters), None)


@functools.lru_cache(maxsize=1024)
def _parameters(method: Function) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(method).parameters


def _no_buffer(thing: object, method: str) -> str:
    methods = _methods(type(thing))
    if "add" in methods and not jax.tree_util.all_leaves([thing]):
        has = ", ".join(
            name
            for name, member in methods.items()
            if inspect.isfunction(member) and not hasattr(member, "remedy") and name[0] != "_"
            # Nor what code of this library asks a buffer.
            if not hasattr(Buffer, name)
        )
        more = "; " + vars(methods[method])["remedy"] if method in methods else ""
        return f"{checks.kind_of(thing)}, which has no method {method}; it has {has}{more}"
    return f"{checks.kind_of(thing)}; expected a buffer, such as one of jaxbuf.ItemBuffer.create"


def absent(method: str, remedy: str) -> Function:
    """Returns a method for a class that lacks it, which raises an error that says what to use."""

    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise ValueError(f"{method} was called, but {checks.kind_of(self)} has none; {remedy}")

    refuse.__name__ = refuse.__qualname__ = method
    refuse.__doc__ = f"Raises an error: {remedy}."
    vars(refuse)["remedy"] = remedy
    return refuse
