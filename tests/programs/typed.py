"""Traces every operation with every strategy, and compares all arguments with their annotations.

``broken`` names each function of the package that gets, or returns, another type or another shape
than its annotations say. It needs a process of its own, since only modules that are imported after
the hook is there are checked.
"""

import collections.abc
import functools
import operator
import types
import typing
import warnings
from typing import Any, Self

import beartype
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree, install_import_hook


class WrongTypeWarning(UserWarning):
    """An argument or a result is not what its annotation says."""


# An integer may stand for a float, as type checkers have it.
_check = beartype.beartype(
    conf=beartype.BeartypeConf(is_pep484_tower=True, violation_type=WrongTypeWarning)
)


def checked(function: Any) -> Any:
    """Returns a function that warns of wrong types; called by ``jaxtyping`` for each function."""
    # JAX also builds its pytrees from other things than arrays.
    if isinstance(function, type) or function.__name__ == "__init__":
        return function
    hints = function.__annotations__
    function.__annotations__ = {name: _checkable(hint) for name, hint in hints.items()}
    return _check(function)


def _checkable(hint: Any) -> Any:
    """Returns the type with ``Any`` in place of what beartype cannot check in a function."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Self or isinstance(hint, typing.TypeVar | typing.ParamSpec):
        return Any
    if any(getattr(kind, "_is_protocol", False) for kind in (hint, origin)):
        return Any
    # Leaves are also shapes, or whatever JAX puts in their place.
    if isinstance(hint, type) and issubclass(hint, PyTree):
        return Any
    if origin in (np.ndarray, collections.abc.Callable):
        return origin
    known = tuple(map(_checkable, args))
    if known == args or origin is typing.Literal:
        return hint
    if isinstance(hint, types.UnionType):
        return Any if Any in known else functools.reduce(operator.or_, known)
    return hint.copy_with(known) if hasattr(hint, "copy_with") else origin[known]


def broken() -> list[str]:
    """Traces all operations, and returns a line for each annotation that does not hold."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WrongTypeWarning)
        with install_import_hook("jaxbuf", "tests.programs.typed.checked"):
            from tests import operations
        arguments = jnp.float32(1), jax.random.key(0)
        for name, what in operations.CASES:
            jax.eval_shape(operations.OPERATIONS[what][1], *operations.abstract(name), *arguments)
    return sorted({str(w.message) for w in caught if w.category is WrongTypeWarning})
