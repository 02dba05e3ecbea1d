"""Numbers of samplers that vary, and how a buffer keeps their values.

The sampler of a buffer is static, so its numbers are part of each compiled program. Where it has a
``Varying``, the buffer keeps the value in an array, and ``bind`` puts this into the sampler
wherever it is used.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxbuf.core.types import Flag

AnySampler = TypeVar("AnySampler")
Values = dict[str, Array]

_MOST = float(np.finfo(np.float32).max)
_LEAST_SUM = float(np.finfo(np.float32).tiny)


# For type checkers a ``Varying`` may stand where a number does.
_Number: Any = object


@dataclasses.dataclass(frozen=True, repr=False)
class Varying(_Number):
    """A number of a sampler that can change while programs run, with its first value.

    The buffer keeps the value in ``buffer.hyperparameters``, and ``buffer.set_hyperparameters``
    changes it: also to a traced number, inside ``jax.jit`` and ``jax.lax.scan``, and under
    ``jax.vmap`` to another one for each buffer. A number that is not ``Varying`` is part of the
    program, which then may be a little faster.

    These numbers can vary: ``alpha``, ``epsilon`` and ``uniform_mix`` of ``Prioritized``, ``alpha``
    of ``RankBased`` and ``Staleness``, ``temperature`` of ``Softmax``, ``ratio`` of ``Recent``, and
    ``weights`` of ``Blend``, as a whole; and the ``ratios`` of a ``Mixture``, in its ``create``. A
    sampler of your own names its numbers in ``varies``; see
    ``jaxbuf.strategies.Sampler``.

    Attributes:
        value: The first value. In the sampler of a buffer it is None, since the buffer has it.
        shape: The shape of the value; filled in by the buffer.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> sampler = jaxbuf.Prioritized(alpha=jaxbuf.Varying(0.6))
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8, sampler=sampler)
        >>> buffer = jaxbuf.set_hyperparameters(buffer, alpha=0.5)
        >>> float(buffer.hyperparameters["alpha"])
        0.5
    """

    value: Any
    shape: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return "Varying()" if self.value is None else f"Varying({self.value!r})"


GUIDE = '"How do I sweep or anneal a hyperparameter?"'
# For errors about other numbers. A test compares it with the samplers.
MAY_VARY = (
    "alpha, epsilon and uniform_mix of Prioritized, alpha of RankBased and Staleness, temperature "
    "of Softmax, ratio of Recent, weights of Blend, ratios of a Mixture, and what your own sampler "
    "names in its varies"
)


def checked(name: str, value: Any, check: Callable[[str, Any], Any]) -> Any:
    """Returns ``check(name, value)`` for a number of a new sampler, which may be ``Varying``.

    Raises:
        ValueError: As raised by ``check``, or if the number is traced.
    """
    if isinstance(value, Varying):
        concrete = value.value is not None and _is_concrete(value.value)
        return Varying(check(name, value.value)) if concrete else value
    if not _is_concrete(value):
        raise ValueError(
            f"{name} is traced, but a sampler is part of the program, which has to know it; to "
            f"change {name}, create the buffer with {name}=jaxbuf.Varying(...) and call "
            f"buffer.set_hyperparameters({name}=...); see the guide {GUIDE}"
        )
    return check(name, value)


def check_declared(strategy: Any, declared: Iterable[str] = ()) -> None:
    """Checks that only declared numbers of a strategy are ``Varying``.

    Args:
        strategy: A sampler, an evictor or a part.
        declared: The names of the numbers that may be.

    Raises:
        ValueError: If another number is.
    """
    for name, value in _fields(strategy):
        inside = value if isinstance(value, tuple | list) else (value,)
        for one in inside:
            if isinstance(one, Varying) and (one is not value or name not in declared):
                kind = type(strategy).__name__
                which = f"the numbers that may vary are {MAY_VARY}"
                if declared:
                    which = f"of its numbers only {', '.join(declared)} may vary, as a whole"
                raise ValueError(
                    f"{name} of {kind} is {value!r}, but {which}; give {name} a value that stays"
                )
        for one in inside:
            if _is_sampler(one):
                check_declared(one, one.varies)


def split(sampler: AnySampler) -> tuple[AnySampler, Values, Flag]:
    """Returns a sampler without its varying hyperparameters, these by name, and their law.

    The last of the three tells whether all of them are legal. A traced value that is not becomes
    the usual value of the number, or the least legal one.

    Raises:
        ValueError: If a known value is not legal, or missing.
    """
    check_declared(sampler, cast("Any", sampler).varies)
    names = names_of(sampler)
    values: Values = {}
    good = jnp.bool_(True)
    for path, owner, name, number in _walk(sampler):
        if number.value is None:
            raise ValueError(
                f"{path} is Varying(), whose value another buffer has; pass jaxbuf.Varying(...) "
                "with a number"
            )
        value = _converted(names[path], owner, name, number.value)
        legal = _is_legal(owner, name, value)
        values[names[path]] = jnp.where(legal, value, _usual(owner, name, value.shape))
        good &= legal
    bare = _replaced(sampler, lambda path: Varying(None, values[names[path]].shape))
    return bare, values, good


def bind(sampler: AnySampler, values: Values) -> AnySampler:
    """Returns a sampler with the present values in place of ``Varying``."""
    if not values:
        return sampler
    names = names_of(sampler)
    return _replaced(sampler, lambda path: values[names[path]])


def filled(sampler: AnySampler) -> AnySampler:
    """Returns the sampler of a buffer with some first values, for a buffer like it."""
    usual = {path: _usual(owner, name, v.shape) for path, owner, name, v in _walk(sampler)}
    return _replaced(
        sampler, lambda path: Varying(usual[path] if np.ndim(usual[path]) else float(usual[path]))
    )


def names_of(sampler: Any) -> dict[str, str]:
    """Returns the names of varying hyperparameters by path: its last part, if that is unique."""
    paths = [path for path, *_ in _walk(sampler)]
    short = [path.rpartition(".")[2] for path in paths]
    return {p: s if short.count(s) == 1 else p for p, s in zip(paths, short, strict=True)}


def check_values(sampler: Any, values: object, named: Mapping[str, Any]) -> dict[str, Array]:
    """Returns new values by the names that the buffer has for them, after checks.

    Args:
        sampler: The sampler of the buffer.
        values: New values by name or path; None for none.
        named: More of them.

    Raises:
        ValueError: If a number does not vary or occurs twice, or a value has another shape, is no
            number, or is known and not legal.
    """
    names = names_of(sampler)
    owners = {names[path]: (owner, name) for path, owner, name, _ in _walk(sampler)}
    new: dict[str, Array] = {}
    for key, value in merged(values, named):
        label = names.get(key, key)
        if label not in owners:
            raise ValueError(_does_not_vary(sampler, key, names))
        if label in new:
            raise ValueError(f"{key} was given twice; name each number once")
        owner, name = owners[label]
        new[label] = _converted(key, owner, name, value)
        shape = getattr(owner, name).shape
        if new[label].shape != shape:
            raise ValueError(f"{key} has shape {new[label].shape}; expected {shape}")
    return new


def merged(values: object, named: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the names and the values of a call, in its order.

    Raises:
        ValueError: If ``values`` is neither None nor a dict.
    """
    if values is not None and not isinstance(values, Mapping):
        raise ValueError(
            f"values is a {type(values).__name__}; expected a dict of numbers by name, or "
            "arguments such as alpha=0.5"
        )
    return [*(values or {}).items(), *named.items()]


def are_legal(sampler: Any, values: Values) -> Flag:
    """Returns whether all of these values are legal."""
    names = names_of(sampler)
    good = jnp.bool_(True)
    for path, owner, name, _ in _walk(sampler):
        if names[path] in values:
            good &= _is_legal(owner, name, values[names[path]])
    return good


def changed(sampler: AnySampler, **fields: Any) -> AnySampler:
    """Returns a sampler with other fields, which may be traced."""
    other = copy.copy(sampler)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other


def varies_now(sampler: Any) -> bool:
    """Returns whether a bound sampler has a varying hyperparameter of its own."""
    return any(isinstance(getattr(sampler, name, None), jax.Array) for name in sampler.varies)


def is_fixed(value: Any, number: float) -> bool:
    """Returns whether a program knows that a number of a sampler is this one."""
    return not isinstance(value, jax.Array) and value == number


def at_most(value: Any, most: float) -> Any:
    """Returns the smaller one of a number of a sampler and a constant."""
    return jnp.minimum(value, most) if isinstance(value, jax.Array) else min(value, most)


def _walk(sampler: Any, path: str = "") -> Iterator[tuple[str, Any, str, Varying]]:
    """Yields path, owner, name and number of each ``Varying`` in a sampler, and in those inside."""
    for name, value in _fields(sampler):
        if isinstance(value, Varying):
            yield f"{path}{name}", sampler, name, value
        elif _is_sampler(value):
            yield from _walk(value, f"{path}{name}.")
        elif isinstance(value, tuple):
            for i, inner in enumerate(value):
                if _is_sampler(inner):
                    yield from _walk(inner, f"{path}{name}[{i}].")


def _replaced(sampler: Any, new: Callable[[str], Any], path: str = "") -> Any:
    """Returns a sampler with ``new(path)`` in place of each ``Varying``."""
    fresh: dict[str, Any] = {}
    for name, value in _fields(sampler):
        if isinstance(value, Varying):
            fresh[name] = new(f"{path}{name}")
        elif _is_sampler(value):
            fresh[name] = _replaced(value, new, f"{path}{name}.")
        elif isinstance(value, tuple) and any(map(_is_sampler, value)):
            fresh[name] = tuple(
                _replaced(inner, new, f"{path}{name}[{i}].") if _is_sampler(inner) else inner
                for i, inner in enumerate(value)
            )
    return changed(sampler, **fresh)


def _fields(sampler: Any) -> list[tuple[str, Any]]:
    if not dataclasses.is_dataclass(sampler):
        return []
    return [(field.name, getattr(sampler, field.name)) for field in dataclasses.fields(sampler)]


def _is_sampler(value: Any) -> bool:
    return hasattr(type(value), "varies")


def _range(owner: Any, name: str) -> tuple[float, float]:
    low, high = owner.varies[name]
    return float(low), min(float(high), _MOST)


def _is_legal(owner: Any, name: str, value: Any) -> Any:
    """Returns whether a value, of NumPy or JAX, is legal.

    One with an axis stands for weights, which are not all 0.
    """
    low, high = _range(owner, name)
    good = ((value >= low) & (value <= high)).all()
    if value.ndim:
        total = value.sum()
        good &= (total >= _LEAST_SUM) & (total <= _MOST)
    return good


def _usual(owner: Any, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns a legal value: the default of the class, or else the least one."""
    if shape:
        return np.ones(shape, np.float32)
    defaults = {field.name: field.default for field in dataclasses.fields(owner)}
    usual, (low, _) = defaults[name], _range(owner, name)
    usual = usual.value if isinstance(usual, Varying) else usual
    return np.asarray(usual if isinstance(usual, int | float) else low, np.float32)


def _converted(label: str, owner: Any, name: str, value: Any) -> Array:
    """Returns a value of a sampler as a float32 array."""
    expected = _expected(owner, name, ndim(value))
    return converted(label, value, expected, lambda wide: _is_legal(owner, name, wide))


def converted(label: str, value: Any, expected: str, is_legal: Callable[[Any], Any]) -> Array:
    """Returns a value as a float32 array.

    Args:
        label: The name of the value, for errors.
        value: A number, or several.
        expected: A text for errors.
        is_legal: Returns whether a value that is known is legal, from float64 numbers.

    Raises:
        ValueError: If it is no number, or known and not legal.
    """
    is_concrete = _is_concrete(value)
    if isinstance(value, list | tuple) and not is_concrete:
        parts: Any = value
        if any(map(ndim, parts)):
            raise ValueError(f"{label} is {value}; expected {expected}")
        value = jnp.stack([jnp.asarray(part, jnp.float32) for part in parts])
    if is_concrete:
        try:
            array = np.asarray(value)
            real = array.dtype.kind in "iuf" or jnp.issubdtype(array.dtype, jnp.floating)
            wide = array.astype(np.float64) if real else array
        except (TypeError, ValueError):
            real, wide = False, np.zeros(())
        if not real or not is_legal(wide):
            raise ValueError(f"{label} is {value}; expected {expected}")
        return jnp.asarray(wide.astype(np.float32))
    if not isinstance(value, jax.Array) or not (
        jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    ):
        raise ValueError(f"{label} is {value}; expected {expected}")
    return jax.lax.stop_gradient(value.astype(jnp.float32))


def ndim(value: Any) -> int:
    """Returns the number of axes of a value, at most 1 of a list, whose parts may be traced."""
    return 1 if isinstance(value, list | tuple) else np.ndim(value)


def _expected(owner: Any, name: str, num_axes: int) -> str:
    low, high = owner.varies[name]
    if num_axes:
        return "finite numbers of at least 0, not all 0"
    if math.isinf(high):
        return f"a finite number of at least {low:.4g}"
    return f"a number in [{low:.4g}, {high:.4g}]"


def _is_concrete(value: Any) -> bool:
    """Returns whether no number in a value is traced, or only a shape."""

    def is_unknown(leaf: Any) -> bool:
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            return True
        return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable

    return not any(map(is_unknown, jax.tree.leaves(value)))


def _does_not_vary(sampler: Any, key: str, names: dict[str, str]) -> str:
    """Returns an error about a name that is not one of a varying hyperparameter."""
    same = [path for path in names if path.rpartition(".")[2] == key]
    if same:
        return f"{key} is the name of {len(same)} numbers; choose from {same}, as in a dict"
    some = f"; {', '.join(names.values())} may change" if names else ""
    name = key.rpartition(".")[2]
    owner = next((one for one in _inside(sampler) if name in one.varies), None)
    how = f"the numbers that may vary are {MAY_VARY}"
    if owner is not None:
        how = f"create the buffer with {type(owner).__name__}({name}=jaxbuf.Varying(...))"
    return f"{key} does not vary in {sampler}{some}; {how}"


def _inside(sampler: Any) -> Iterator[Any]:
    """Yields a sampler and those inside of it."""
    yield sampler
    for _, value in _fields(sampler):
        for inner in value if isinstance(value, tuple) else (value,):
            if _is_sampler(inner):
                yield from _inside(inner)
