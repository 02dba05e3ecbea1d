"""Checks of configuration: of arguments whose values are known in Python before anything runs."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxbuf.core.hyperparameters import MAY_VARY, Varying, checked

Kind = TypeVar("Kind")

# A longer repr would hide the message around it.
_SHORT = 80


def kind_of(value: object) -> str:
    """Returns the kind of a value, as a phrase that can follow "is".

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


def name_of(value: object) -> str:
    """Returns a value's repr if it is short, and else its kind, as a phrase that follows "is".

    Example:
        >>> [name_of(value) for value in ("x", 0.5, [1, 2], [np.zeros(3)], np.zeros(3))]
        ["'x'", '0.5', '[1, 2]', 'a list', 'an array float64[3]']
    """
    if isinstance(value, jax.core.Tracer):
        return f"traced ({value.aval})"
    if isinstance(value, Varying):
        return f"{value!r}, but only numbers of samplers may vary: {MAY_VARY}"
    text = repr(value) if _is_plain(value) else ""
    return text if 0 < len(text) <= _SHORT else kind_of(value)


def settle(configuration: Any, check: Callable[..., Any], *names: str, **options: Any) -> None:
    """Checks fields of a frozen dataclass in its ``__post_init__``, and sets what is returned.

    A NumPy scalar, for instance, may differ from the same Python number, and cause a retrace.

    Args:
        configuration: The instance. Numbers that it declares in ``varies`` may be ``Varying``.
        check: A function of the name and the value of a field, such as ``check_flag``.
        *names: The fields.
        **options: Further arguments of ``check``.
    """
    check = functools.partial(check, **options)
    for name in names:
        value = getattr(configuration, name)
        varies = name in getattr(configuration, "varies", ())
        settled = checked(name, value, check) if varies else check(name, value)
        object.__setattr__(configuration, name, settled)


def settle_number(
    configuration: Any, name: str, expected: str, legal: Callable[[float], bool]
) -> None:
    """Settles a field by ``check_number``."""
    settle(configuration, check_number, name, expected=expected, legal=legal)


def check_flag(name: str, value: object) -> bool:
    """Returns a switch as a Python bool.

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


def check_number(name: str, value: object, expected: str, legal: Callable[[float], bool]) -> float:
    """Returns a number that is known when the program is traced, as a Python float.

    NumPy scalars are converted because as configuration they would cause retracing. A number of
    fewer than 64 bits becomes the shortest decimal that is rounded to it.

    Args:
        name: Its name in errors.
        value: A Python, NumPy or JAX number.
        expected: A description of legal numbers, for errors.
        legal: Returns True for a legal number.

    Raises:
        ValueError: If it is not one real number, or not a legal one.

    Example:
        >>> check_number("alpha", np.float32(0.6), "a number", lambda x: x >= 0)
        0.6
        >>> check_number("alpha", "0.6", "a number of at least 0", lambda x: x >= 0)
        Traceback (most recent call last):
        ValueError: alpha is '0.6'; expected a number of at least 0
    """
    number = _as_float(value)
    if number is None or not legal(number):
        raise ValueError(f"{name} is {name_of(value)}; expected {expected}")
    return number


def check_nonnegative(name: str, value: object) -> float:
    """Returns a finite number of at least 0 as a Python float.

    Raises:
        ValueError: If it is not such a number.

    Example:
        >>> check_nonnegative("alpha", -1)
        Traceback (most recent call last):
        ValueError: alpha is -1; expected a finite number of at least 0
    """
    return check_number(name, value, "a finite number of at least 0", lambda x: 0 <= x < math.inf)


def check_fraction(name: str, value: object) -> float:
    """Returns a fraction as a Python float.

    Raises:
        ValueError: If it is not a number from 0 to 1.
    """
    return check_number(name, value, "a fraction in [0, 1]", lambda x: 0 <= x <= 1)


def check_step_size(name: str, value: object) -> float:
    """Returns the share of a new value in a moving average as a Python float.

    Raises:
        ValueError: If it is not a number above 0 and at most 1.
    """
    return check_number(name, value, "a number above 0 and at most 1", lambda x: 0 < x <= 1)


def check_pair(
    name: str, value: object, expected: str, legal: Callable[[float, float], bool]
) -> tuple[float, float]:
    """Returns two bounds as Python floats.

    Raises:
        ValueError: If they are not two numbers, or not legal ones.

    Example:
        >>> check_pair("reward_clip", 1.0, "(low, high)", lambda low, high: low <= high)
        Traceback (most recent call last):
        ValueError: reward_clip is 1.0; expected (low, high)
    """
    bounds: list[float | None] = []
    if isinstance(value, list | tuple):
        bounds = [_as_float(bound) for bound in cast("Sequence[object]", value)]
    elif isinstance(value, np.ndarray | jax.Array) and not _is_abstract(value):
        bounds = [_as_float(bound) for bound in value] if value.shape == (2,) else []
    if len(bounds) == 2:
        low, high = bounds
        if low is not None and high is not None and legal(low, high):
            return low, high
    raise ValueError(f"{name} is {name_of(value)}; expected {expected}")


def check_sequence(name: str, values: object, what: str) -> tuple[Any, ...]:
    """Returns the values of a list, or of any other sequence or one-dimensional array.

    Raises:
        ValueError: If it is neither.

    Example:
        >>> check_sequence("ratios", 3, "numbers")
        Traceback (most recent call last):
        ValueError: ratios is 3; expected a list of numbers
    """
    array = isinstance(values, np.ndarray | jax.Array) and values.ndim == 1
    if not array and (not isinstance(values, Sequence) or isinstance(values, str | bytes)):
        raise ValueError(f"{name} is {name_of(values)}; expected a list of {what}")
    return tuple(cast("Sequence[Any]", values))


def check_weights(name: str, weights: object) -> tuple[float, ...]:
    """Returns relative weights as Python floats.

    Raises:
        ValueError: If they are not a list of finite numbers of at least 0.

    Example:
        >>> check_weights("ratios", [1, -1])
        Traceback (most recent call last):
        ValueError: ratios[1] is -1; expected a finite number of at least 0
    """
    return tuple(
        check_nonnegative(f"{name}[{i}]", weight)
        for i, weight in enumerate(check_sequence(name, weights, "numbers"))
    )


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Returns a name, which must be one of ``choices``.

    Raises:
        ValueError: If it is not one of them.

    Example:
        >>> check_choice("order", "old", ("age", "random"))
        Traceback (most recent call last):
        ValueError: order is 'old'; choose from ('age', 'random')
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {name_of(value)}; choose from {tuple(choices)}")
    return value


def check_field(name: str, value: object) -> str:
    """Returns the name of a field; dots in it lead into nested fields.

    Raises:
        ValueError: If it is not a string.

    Example:
        >>> check_field("reward", 3)
        Traceback (most recent call last):
        ValueError: reward is 3; expected the name of a field, a string
    """
    return check_kind(name, value, str, "the name of a field, a string")


def check_path(name: str, value: object) -> Path:
    """Returns the path of a file or a folder.

    Raises:
        ValueError: If it is not a path.

    Example:
        >>> check_path("path", None)
        Traceback (most recent call last):
        ValueError: path is None; expected a path, a str or an os.PathLike
    """
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is {name_of(value)}; expected a path, a str or an os.PathLike")
    return Path(value)


def check_seconds(name: str, value: object) -> float | None:
    """Returns a duration in seconds, or None.

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


def check_kind(name: str, value: object, kind: type[Kind], expected: str) -> Kind:
    """Returns a value, which must be an instance of a class.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {name_of(value)}; expected {expected}")
    return value


def _as_float(value: object) -> float | None:
    """Returns a real number as a float, or None for any other value."""
    if _is_abstract(value) or isinstance(value, bool):
        return None
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))
        # The shortest decimal of ``np.float32(0.6)`` is 0.6, which equals what a user would write.
        return float(str(np.asarray(value)[()])) if real and value.shape == () else None
    if not isinstance(value, int | float):
        return None
    # The largest Python integers do not fit a float.
    if isinstance(value, int) and abs(value) >= 2**1023:
        return math.inf if value > 0 else -math.inf
    return float(value)


def _is_plain(value: object) -> bool:
    """Returns whether the repr of a value is what a user would write."""
    if isinstance(value, list | tuple | dict):
        parts: Any = value.values() if isinstance(value, dict) else value
        return all(_is_plain(part) for part in parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jax.tree_util.all_leaves([value])  # A strategy, not a buffer.
    return isinstance(value, str | bytes | bool | int | float | complex | np.generic)


def _is_abstract(value: object) -> bool:
    """Returns whether the numbers of an array are unknown until a program runs."""
    return isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct)
