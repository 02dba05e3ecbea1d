"""Old names of arguments and functions, which still work in this version but warn."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def warn(old: str, new: str) -> None:
    """Warns the caller's caller that a name is deprecated."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)


def argument(old: str, new: str) -> Callable[[Function], Function]:
    """Returns a decorator that lets a function take an argument by its old name as well."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if old in options:
                if new in options:
                    raise ValueError(f"{old} and {new} were both given; leave out {old}")
                warn(f"the argument {old}", new)
                options[new] = options.pop(old)
            return function(*args, **options)

        return call  # pyright: ignore[reportReturnType]  # functools.wraps forgets the type.

    return decorate


def field(old: str, new: str) -> Callable[[Class], Class]:
    """Returns a decorator that lets a dataclass be made and read with a field's old name."""

    def read(self: Any) -> Any:
        warn(f"the attribute {old}", new)
        # The name is an argument of the decorator.
        return getattr(self, new)

    def decorate(kind: Class) -> Class:
        kind.__init__ = argument(old, new)(kind.__init__)
        setattr(kind, old, property(read, doc=f"The old name of ``{new}``."))
        return kind

    return decorate
