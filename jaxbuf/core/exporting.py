"""Buffers as arguments and results of exported programs, and the kernels in these."""

import dataclasses
import enum
import functools
import importlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
from flax import struct

from jaxbuf.core import native, segment_tree
from jaxbuf.core.segment_tree import Tree


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the checks that ``jax.export`` has to leave out for programs that work on buffers.

    JAX refuses to export a program with kernels that are not its own, because it cannot know for
    how long they mean the same. Those of jaxbuf do in all processes with the same version of
    jaxbuf. Buffers, samples and all other pytrees of jaxbuf are known to ``jax.export``.

    Returns:
        The value to pass as ``disabled_checks``.

    Example:
        >>> import jax, jax.export, jax.numpy as jnp, jaxbuf
        >>> def step(buffer, items, key):
        ...     buffer = buffer.add(items)
        ...     return buffer, buffer.sample(key, 4)
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8)
        >>> args = buffer, jnp.arange(5), jax.random.key(0)
        >>> checks = jaxbuf.export_checks()
        >>> exported = jax.export.export(jax.jit(step), disabled_checks=checks)(*args)
        >>> buffer, batch = jax.jit(exported.call)(*args)
        >>> int(buffer.size), batch.data.shape
        (5, (4,))
    """
    return [jax.export.DisabledSafetyCheck.custom_call(f"jaxbuf_{name}") for name in native.KERNELS]


def for_platform(tree: Tree, platform: str) -> Tree:
    """Returns buffers whose priorities lie in memory as is fast on another platform.

    A buffer of prioritized replay keeps segment trees, which are wide for accelerators and narrow
    for a CPU. A buffer is created for the platform on which it is created, and ``jaxbuf.load``
    returns one as wide as its ``like``. Every buffer works everywhere, with the same draws up to
    the rounding of sums; one for another platform is slow: a cycle of 2^20 slots takes 55 times as
    many cycles on a TPU. So call this before a buffer is moved to another platform, and before a
    program is exported or compiled for one. All else stays as it is.

    Args:
        tree: A pytree with buffers, also of ``jax.ShapeDtypeStruct``.
        platform: ``"cpu"``, ``"gpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``.

    Returns:
        The pytree.

    Raises:
        ValueError: If it is another platform.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> make = lambda: jaxbuf.ItemBuffer.create(jnp.int32(0), 9, sampler=jaxbuf.Prioritized())
        >>> jaxbuf.for_platform(jax.eval_shape(make), "tpu").sampler_state.width
        128
    """
    platforms = ("cpu", "gpu", "cuda", "rocm", "tpu")
    if platform not in platforms:
        raise ValueError(f"platform is {platform!r}; expected one of {', '.join(platforms)}")
    return segment_tree.with_width(tree, segment_tree.width_for(platform))


def register_all() -> None:
    """Makes the pytrees of jaxbuf known to ``jax.export``, except those not imported yet."""
    for kind in _below(struct.PyTreeNode):
        if _is_new(kind):
            _register(kind)
    for kind in tuple.__subclasses__():
        if hasattr(kind, "_fields") and _is_new(kind):
            name = _path(kind)
            jax.export.register_namedtuple_serialization(kind, serialized_name=name)


_registered: set[type] = set()


def _below(kind: type) -> list[type]:
    return [kind, *(below for child in kind.__subclasses__() for below in _below(child))]


def _is_new(kind: type) -> bool:
    if kind in _registered or not kind.__module__.startswith("jaxbuf."):
        return False
    _registered.add(kind)
    return True


def _register(kind: type[Any]) -> None:
    fields = dataclasses.fields(kind)
    static = [field.name for field in fields if not field.metadata.get("pytree_node", True)]
    traced = [field.name for field in fields if field.metadata.get("pytree_node", True)]

    def write(values: Sequence[Any]) -> bytes:
        named = dict(zip(static, values, strict=True))
        where = f"of {kind.__name__}"
        return json.dumps({k: _encode(v, f"{k} {where}") for k, v in named.items()}).encode()

    def read(text: bytes) -> tuple[Any, ...]:
        named = {name: _decode(value) for name, value in json.loads(text).items()}
        return tuple(named[name] for name in static)

    def build(aux_data: Any, children: Sequence[Any]) -> Any:
        # Its leaves are numbers that stand for arrays, which the class itself would refuse.
        made = object.__new__(kind)
        for name, value in zip([*static, *traced], [*aux_data, *children], strict=True):
            object.__setattr__(made, name, value)
        return made

    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=_path(kind),
        serialize_auxdata=write,
        deserialize_auxdata=read,
        from_children=build,
    )


def _encode(value: Any, name: str) -> Any:
    """Returns a value of a configuration as JSON has it.

    Raises:
        ValueError: If another process could not make it again.
    """
    inner: Callable[[Any], Any] = functools.partial(_encode, name=name)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {"tuple": [inner(each) for each in value]}
    if isinstance(value, np.dtype):
        return {"dtype": str(value)}
    if isinstance(value, jax.sharding.Mesh):
        numbers = [[device.id for device in value.devices.flat], list(value.devices.shape)]
        kinds = [kind.name for kind in value.axis_types]
        return {"mesh": numbers, "axes": [list(value.axis_names), kinds]}
    if isinstance(value, enum.Enum):
        return {"of": _path(type(value)), "member": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        fields = {
            field.name: _encode(getattr(value, field.name), f"{field.name} of {kind}")
            for field in dataclasses.fields(value)
            if field.init
        }
        if _is_found(type(value)):
            return {"class": _path(type(value)), "fields": fields}
    elif callable(value) and _is_found(value):
        return {"path": _path(value)}
    raise ValueError(
        f"{name} is {value!r}, which cannot be exported, since another process cannot find it; "
        "take a function, or a class, at the top level of a module"
    )


def _decode(value: Any) -> Any:
    """Applies the inverse of ``_encode``."""
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_decode(each) for each in value["tuple"])
    if "dtype" in value:
        return np.dtype(value["dtype"])
    if "mesh" in value:
        (numbers, shape), (names, kinds) = value["mesh"], value["axes"]
        devices = {device.id: device for device in jax.devices()}
        if missing := set(numbers) - devices.keys():
            raise ValueError(
                f"the program was exported for {math.prod(shape)} devices; there are {len(devices)}"
                f", and no device {min(missing)}"
            )
        grid = np.asarray([devices[number] for number in numbers]).reshape(shape)
        types = tuple(jax.sharding.AxisType[kind] for kind in kinds)
        return jax.sharding.Mesh(grid, tuple(names), axis_types=types)
    if "member" in value:
        return _find(value["of"])[value["member"]]
    if "class" in value:
        fields = {name: _decode(each) for name, each in value["fields"].items()}
        return _find(value["class"])(**fields)
    return _find(value["path"])


def _path(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _find(path: str) -> Any:
    module, _, names = path.partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(module))


def _is_found(thing: Any) -> bool:
    try:
        return _find(_path(thing)) is thing
    except (AttributeError, ImportError):
        return False
