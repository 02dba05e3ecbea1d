"""Options that are passed on to the methods of a buffer, which define them."""

import functools
import inspect
from collections.abc import Mapping
from typing import NoReturn

import jax

from jaxbuf.buffers.buffer import Buffer
from jaxbuf.core import checks
from jaxbuf.core.types import Function


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
    function = _methods(type(buffer)).get(method)
    if function is None or hasattr(function, "remedy") or jax.tree_util.all_leaves([buffer]):
        raise ValueError(f"{argument} is {_no_buffer(buffer, method)}")
    parameters = _parameters(function) if options else {}
    # A method with ``**options`` takes any, and checks them itself.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function
    for name in options:
        if name not in parameters:
            takes = [
                parameter.name
                for parameter in parameters.values()
                if parameter.kind is parameter.KEYWORD_ONLY
                or parameter.default is not parameter.empty
            ]
            hint = f", for its {method} takes {', '.join(takes)}" if takes else ""
            owner = checks.kind_of(buffer)
            raise ValueError(f"{name} was given, but {owner} has no use for it; leave it out{hint}")
    return function


@functools.lru_cache(maxsize=1024)
def _methods(kind: type) -> dict[str, Function]:
    """Returns the methods of a class by name, those of its bases included."""
    return dict(inspect.getmembers(kind, callable))


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
