"""Arguments that configure something: what they are is known in Python, before anything runs."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

# A longer repr hides the message that it stands in.
_SHORT = 80


def kind_of(value: Any) -> str:
    """What sort of thing something is, after "is".

    Example:
        >>> [kind_of(value) for value in (None, "x", int, [1, 2], np.zeros(3))]
        ['None', 'a str', 'the class int', 'a list', 'an array float64[3]']
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, np.ndarray | jax.Array):
        return f"an array {value.dtype}{list(value.shape)}"
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "AEIOUaeiou" else f"a {kind}"


def name_of(value: Any) -> str:
    """What something is, after "is": the thing itself if it is short, or else its kind.

    Example:
        >>> [name_of(value) for value in ("x", 0.5, [1, 2], [np.zeros(3)], np.zeros(3))]
        ["'x'", '0.5', '[1, 2]', 'a list', 'an array float64[3]']
    """
    if isinstance(value, jax.core.Tracer):
        return f"traced ({value.aval})"
    text = repr(value) if _is_plain(value) else ""
    return text if 0 < len(text) <= _SHORT else kind_of(value)


def check_flag(name: str, value: Any) -> bool:
    """A switch as a Python bool.

    Raises:
        ValueError: If it is neither True nor False.

    Example:
        >>> check_flag("replacement", "no")
        Traceback (most recent call last):
        ValueError: replacement is 'no'; expected True or False
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {name_of(value)}; expected True or False")
    return bool(value)


def check_number(name: str, value: Any, expected: str, legal: Callable[[float], bool]) -> float:
    """A number that is known when the program is traced, as a Python float.

    NumPy scalars compare unequal to the same Python number; as configuration they would retrace.

    Args:
        name: What to call it in an error.
        value: A Python number, or one of NumPy or JAX.
        expected: What to say that it must be.
        legal: Whether a number is that.

    Raises:
        ValueError: If it is not one real number, or not a legal one.

    Example:
        >>> check_number("alpha", "0.6", "a number of at least 0", lambda x: x >= 0)
        Traceback (most recent call last):
        ValueError: alpha is '0.6'; expected a number of at least 0
    """
    number = _as_float(value)
    if number is None or not legal(number):
        raise ValueError(f"{name} is {name_of(value)}; expected {expected}")
    return number


def check_fraction(name: str, value: Any) -> float:
    """A share of something, as a Python float.

    Raises:
        ValueError: If it is not a number from 0 to 1.
    """
    return check_number(name, value, "a fraction in [0, 1]", lambda x: 0 <= x <= 1)


def check_pair(
    name: str, value: Any, expected: str, legal: Callable[[float, float], bool]
) -> tuple[float, float]:
    """Two bounds, as Python floats.

    Raises:
        ValueError: If they are not two numbers, or not legal ones.

    Example:
        >>> check_pair("reward_clip", 1.0, "(low, high)", lambda low, high: low <= high)
        Traceback (most recent call last):
        ValueError: reward_clip is 1.0; expected (low, high)
    """
    sized = isinstance(value, list | tuple) or getattr(value, "shape", None) == (2,)
    bounds = [_as_float(bound) for bound in value] if sized and not _is_abstract(value) else []
    if len(bounds) == 2:
        low, high = bounds
        if low is not None and high is not None and legal(low, high):
            return low, high
    raise ValueError(f"{name} is {name_of(value)}; expected {expected}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of a few names.

    Raises:
        ValueError: If it is none of them.

    Example:
        >>> check_choice("order", "old", ("age", "random"))
        Traceback (most recent call last):
        ValueError: order is 'old'; choose from ('age', 'random')
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {name_of(value)}; choose from {tuple(choices)}")
    return value


def check_field(name: str, value: Any) -> str:
    """The name of a field, in which dots lead into nested ones.

    Raises:
        ValueError: If it is not a string.

    Example:
        >>> check_field("reward", 3)
        Traceback (most recent call last):
        ValueError: reward is 3; expected the name of a field, a string
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} is {name_of(value)}; expected the name of a field, a string")
    return value


def check_path(name: str, value: Any) -> Path:
    """The path of a file or a folder.

    Raises:
        ValueError: If it is none.

    Example:
        >>> check_path("path", None)
        Traceback (most recent call last):
        ValueError: path is None; expected a path, a str or an os.PathLike
    """
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is {name_of(value)}; expected a path, a str or an os.PathLike")
    return Path(value)


def check_seconds(name: str, value: Any) -> float | None:
    """A length of time, or None.

    Raises:
        ValueError: If it is neither None nor a number above 0.

    Example:
        >>> check_seconds("timeout", 0)
        Traceback (most recent call last):
        ValueError: timeout is 0; expected seconds, more than 0, or None
    """
    if value is None:
        return None
    return check_number(name, value, "seconds, more than 0, or None", lambda x: x > 0)


def check_kind(name: str, value: Any, kind: type, expected: str) -> None:
    """Refuse what is not an instance of a class.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {name_of(value)}; expected {expected}")


def _as_float(value: Any) -> float | None:
    """A real number as a float; None if it is not one."""
    if _is_abstract(value) or isinstance(value, bool):
        return None
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))
        return float(value) if real and value.shape == () else None
    if not isinstance(value, int | float):
        return None
    # The largest Python integers have no float.
    if isinstance(value, int) and abs(value) >= 2**1023:
        return math.inf if value > 0 else -math.inf
    return float(value)


def _is_plain(value: Any) -> bool:
    """Whether the repr of something is as people write it."""
    if isinstance(value, list | tuple | dict):
        parts: Any = value.values() if isinstance(value, dict) else value
        return all(_is_plain(part) for part in parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jax.tree_util.all_leaves([value])  # A strategy, not a buffer.
    return isinstance(value, str | bytes | bool | int | float | complex | np.generic)


def _is_abstract(value: Any) -> bool:
    """Whether the numbers of an array are only known when a program runs."""
    return isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct)
