"""Options that are passed on to the methods of a buffer, which define them."""

import functools
import inspect
from collections.abc import Mapping

import jax
import numpy as np

from jaxbuf.core import checks
from jaxbuf.core.types import Function, Static


def check_options(
    buffer: object, method: str, options: Mapping[str, object], argument: str = "buffer"
) -> None:
    """Checks that ``buffer`` is a buffer, and that its method takes these options.

    Args:
        buffer: The buffer, or another object that was passed instead.
        method: The name of the method that the options are for.
        options: The options by name.
        argument: The name of the buffer in an error.

    Raises:
        ValueError: If ``buffer`` is not a pytree with such a method, or the method does not take
            an option.
    """
    own = _methods(type(buffer)).get(method)
    if own is None or jax.tree_util.all_leaves([buffer]):
        raise ValueError(f"{argument} is {_no_buffer(buffer, method)}")
    takes = _options(own)
    for name in options:
        if takes is not None and name not in takes:
            known = f", for its {method} takes {', '.join(takes)}" if takes else ""
            owner = checks.kind_of(buffer)
            raise ValueError(
                f"{name} was given, but {owner} has no use for it; leave it out{known}"
            )


def split_options(options: Mapping[str, object]) -> tuple[dict[str, object], Static]:
    """Splits options into traced and static ones, for a method that is jitted.

    Python and NumPy integers, booleans and strings configure a call and are static. Everything
    else, arrays first of all, is traced.

    Returns:
        The traced options by name, and the static ones as hashable pairs of names and values.
    """
    fixed = {name for name, value in options.items() if isinstance(value, int | str | np.integer)}
    traced = {name: value for name, value in options.items() if name not in fixed}
    return traced, tuple((name, options[name]) for name in sorted(fixed))


@functools.cache
def _methods(kind: type) -> dict[str, Function]:
    """Returns the methods of a class by name, those of its bases included."""
    return dict(inspect.getmembers(kind, callable))


@functools.cache
def _options(method: Function) -> tuple[str, ...] | None:
    """Returns the names of a method's options; None if it takes any and checks them itself."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
    )


def _no_buffer(thing: object, method: str) -> str:
    methods = _methods(type(thing))
    if "add" in methods and not jax.tree_util.all_leaves([thing]):
        has = ", ".join(
            name
            for name, member in methods.items()
            if inspect.isfunction(member) and not name.startswith("_")
        )
        return f"{checks.kind_of(thing)}, which has no method {method}; it has {has}"
    return f"{checks.kind_of(thing)}; expected a buffer, such as one of jaxbuf.ItemBuffer.create"
