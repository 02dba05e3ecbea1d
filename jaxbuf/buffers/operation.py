"""Descriptions of operations, by which wrappers route them and programs compile them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack

import numpy as np

from jaxbuf.core import checks
from jaxbuf.core.program import About, program
from jaxbuf.core.types import Dtype, Function

P = ParamSpec("P")
R = TypeVar("R")

# What the numbers of arguments of these names become, in all operations.
DTYPES: dict[str, Dtype] = {
    "priority": np.dtype("float32"),
    "score": np.dtype("float32"),
    "version": np.dtype("int32"),
    "session": np.dtype("int32"),
    "mask": np.dtype("bool"),
}
# Priorities that are too large are refused and counted, row by row.
INFINITE = ("priority",)
_SHARED: About = {"dtypes": DTYPES, "infinite": INFINITE, "keys": ("key",)}


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An operation of buffers, as wrappers and compiled programs see it.

    Attributes:
        declared: The method that declares its name, its signature and its docstring.
        about: What its program must know; see ``jaxbuf.core.program.About``.
        needs: What a buffer must be able to do; one of its ``abilities``.
        changes: Whether it returns the changed buffer, alone or first of all; else it returns a
            value for each row, or a sample.
        rows: The argument that gives the number of rows of the returned sample; None without one.
        by_member: Whether a wrapper of several buffers performs it in each of them, with the slots
            of its own rows. Wrappers override other operations, or lack them.
        nones: The options for which None is a value. Any other option is left out if it is None.
    """

    declared: Function
    about: About
    needs: str
    changes: bool
    rows: str | None
    by_member: bool
    nones: tuple[str, ...]

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters by name, without ``self``."""
        _, *named = inspect.signature(self.declared).parameters.values()
        return {parameter.name: parameter for parameter in named}

    @property
    def takes_slots(self) -> bool:
        """True if it has an argument ``slots``, which names its rows, ``[B]``."""
        return "slots" in self.parameters

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the parameters that may be passed by position."""
        kinds = self.parameters.items()
        return [name for name, x in kinds if x.kind is x.POSITIONAL_OR_KEYWORD]

    @functools.cached_property
    def required(self) -> list[str]:
        """The names of the parameters without a default."""
        return [
            name for name in self.names if self.parameters[name].default is inspect.Parameter.empty
        ]

    @property
    def name(self) -> str:
        """The name of the method."""
        return self.declared.__name__

    def bind(self, buffer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments that a call passes, by name.

        Raises:
            TypeError: If an argument is missing, or one is given that the operation does not take.
        """
        arguments = dict(zip(self.names, args, strict=False)) | options
        no_duplicates = len(arguments) == len(args) + len(options)
        taken = arguments.keys() <= self.parameters.keys() or "options" in self.parameters
        if no_duplicates and taken and arguments.keys() >= {*self.required}:
            return arguments
        try:
            inspect.signature(self.declared).bind(buffer, *args, **options)
        except TypeError as error:
            hint = f"; jaxbuf.{self.name}(buffer, ...) takes it" if "donate" in options else ""
            raise TypeError(f"{type(buffer).__name__}.{self.name}() {error}{hint}") from None
        raise AssertionError(self.name)

    def call_on(self, buffer: Any, arguments: dict[str, Any]) -> Any:
        """Calls the operation on another buffer, with arguments by name."""
        args, options = self.split(arguments)
        return getattr(buffer, self.name)(*args, **options)

    def split(self, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the required arguments, and those of the others that are given, by name."""
        others = {name: arguments[name] for name in arguments if name not in self.required}
        return [arguments[name] for name in self.required], given(others, self.nones)

    def lacking(self, buffer: object, remedy: str) -> ValueError:
        """Returns an error that says what to use in place of an operation that a buffer lacks."""
        return ValueError(
            f"{self.name} was called, but {checks.kind_of(buffer)} has none; {remedy}"
        )

    def as_program(self, method: Callable[P, R]) -> Callable[P, R]:
        """Returns a method that performs the operation, as a program."""
        call = program(**self.about)(method)
        vars(call)["operation"] = self
        return call


def given(options: dict[str, Any], nones: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the options that are given: None is a value of ``nones``, and none of the others."""
    return {
        name: value
        for name, value in options.items()
        if value is not ... and (value is not None or name in nones)
    }


def operation(
    *,
    needs: str = "contents",
    changes: bool = True,
    rows: str | None = None,
    by_member: bool = True,
    nones: tuple[str, ...] = (),
    **about: Unpack[About],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for the declaration of an operation; see ``Operation`` and ``About``.

    A class that performs the operation overrides it. A class that does not, such as a wrapper, gets
    it in its ``route``, with the arguments by name.
    """

    def decorate(declared: Callable[P, R]) -> Callable[P, R]:
        facts: About = {**_SHARED, **about, "copies": changes}
        description = Operation(declared, facts, needs, changes, rows, by_member, nones)
        vars(declared)["operation"] = description

        @functools.wraps(declared)
        def routed(self: Any, *args: Any, **options: Any) -> Any:
            return self.route(description, description.bind(self, args, options))

        return description.as_program(routed)

    return decorate
