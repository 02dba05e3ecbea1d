"""The operations of a ``Sharded`` on its shards, except for samples."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxbuf.buffers import draws
from jaxbuf.buffers.arguments import check_slots
from jaxbuf.buffers.buffer import By
from jaxbuf.buffers.operation import DTYPES, INFINITE, Operation
from jaxbuf.buffers.sampled import SampledBuffer
from jaxbuf.core import checks, fields, numbers, trees
from jaxbuf.core.collectives import all_gather
from jaxbuf.core.hyperparameters import bind
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Flag, Function, Index, Words
from jaxbuf.strategies.mass import least_positive
from jaxbuf.strategies.protocols import Sampler, ShardableSampler, Support
from jaxbuf.wrappers.sharded.per_device import (
    ShardedFields,
    map_shards,
    num_local,
    run_on_devices,
    shard_ids,
)

AnySharded = TypeVar("AnySharded", bound=ShardedFields)

_RECIPE = (
    "keep one ItemBuffer whose data alone is sharded and everything else replicated, as the guide "
    '"More than one device" shows'
)


def check_shard(buffer: object) -> SampledBuffer:
    """Returns the buffer.

    Raises:
        ValueError: If it cannot be a shard.
    """
    if not isinstance(buffer, SampledBuffer):
        raise ValueError(
            f"make gives {checks.kind_of(buffer)}; expected a function that creates an ItemBuffer "
            "or a TrajectoryBuffer"
        )
    check_shardable(buffer.sampler)
    for part in buffer.extras:
        if not part.of_shards:
            raise ValueError(
                f"{part} looks at all items, but a shard has only some of them; {_RECIPE}"
            )
    evictor = buffer.options().get("evictor")
    if evictor is not None and not evictor.of_shards:
        raise ValueError(f"{evictor} compares each item with all others; {_RECIPE}")
    return buffer


def check_shardable(sampler: Sampler) -> None:
    """Checks that a sampler can draw from shards.

    Raises:
        ValueError: If it cannot.
    """
    if not sampler.shardable:
        raise ValueError(
            f"{sampler} does not draw from shards: it must derive from "
            "jaxbuf.strategies.ShardableSampler, as Uniform, Prioritized and Softmax do, and draw "
            f"with replacement; choose such a sampler, or {_RECIPE}"
        )


def sampler_of(shards: SampledBuffer) -> ShardableSampler:
    """Returns the sampler of the shards, which ``check_shard`` has checked."""
    return cast("ShardableSampler", bind(shards.sampler, values_of(shards)))


def values_of(shards: SampledBuffer) -> dict[str, Array]:
    """Returns the varying hyperparameters of the sampler, the same in all shards."""
    return jax.tree.map(lambda value: value[0], lax.stop_gradient(shards.hyperparameters))


def hyperparameters(buffer: ShardedFields) -> dict[str, Array]:
    """Returns the varying hyperparameters of the sampler."""
    return run_on_devices(buffer, lambda shards, *_: values_of(shards), out=jax.P())


def change_sampler(
    buffer: AnySharded, change: Callable[..., SampledBuffer], arguments: tuple[Arrays, ...] = ()
) -> AnySharded:
    """Applies ``change(shard, *arguments)`` to every shard; only the first counts illegal values.

    So the sum of their counters counts these once.
    """

    def body(shards: SampledBuffer, _: object, replicated: tuple[Arrays, ...]) -> SampledBuffer:
        changed = jax.vmap(lambda shard: change(shard, *replicated))(shards)
        first = shard_ids(shards, buffer.axis) == 0
        counters = jnp.where(first[:, None], changed.counters, shards.counters)
        return trees.updated(changed, counters=counters)

    return trees.updated(buffer, shards=run_on_devices(buffer, body, replicated=arguments))


def summarize(shards: SampledBuffer) -> Arrays:
    """Returns the summaries of the shards on this device, leaves ``[L]``."""
    state = lax.stop_gradient(shards.sampler_state)
    return jax.vmap(sampler_of(shards).summarize)(state, shards.occupancy)


def total(buffer: ShardedFields, count: Callable[[SampledBuffer], Array]) -> Count:
    """Returns the sum of ``count(shard)`` over all shards."""

    def body(shards: SampledBuffer, *_: object) -> Array:
        return lax.psum(jnp.sum(jax.vmap(count)(shards), dtype=jnp.int32), buffer.axis)

    return run_on_devices(buffer, body, out=jax.P())


def support(buffer: ShardedFields) -> Support:
    """Returns the number of items that can be drawn, and their least probability."""

    def body(shards: SampledBuffer, *_: object) -> Support:
        if buffer.exchange:
            summaries = all_gather(summarize(shards), buffer.axis)  # [S]
            return sampler_of(shards).support_among(summaries)
        count, least = _supports(buffer, shards)
        least = least_positive(least) / buffer.num_shards
        return Support(jnp.sum(count, dtype=jnp.int32), least)

    return run_on_devices(buffer, body, out=jax.P())


def can_sample(buffer: ShardedFields, num_rows: Count) -> Flag:
    """Returns whether so many rows can be drawn; without exchange, each shard needs its share."""
    if buffer.exchange:
        return support(buffer).count >= num_rows

    def body(shards: SampledBuffer, *_: object) -> Array:
        return jnp.min(_supports(buffer, shards)[0])

    return run_on_devices(buffer, body, out=jax.P()) * buffer.num_shards >= num_rows


def add_rows(
    buffer: ShardedFields, add_block: Function, items: Arrays, arguments: dict[str, object]
) -> Any:
    """Calls ``add_block(shard, items, arguments)`` on each shard with its block of the rows.

    Slots among the results are numbered through all shards, and have one row for each item.
    """

    def body(shards: SampledBuffer, rows: tuple[Arrays, ...], _: object) -> Any:
        has_rows = any(leaf.size for leaf in jax.tree.leaves(rows[0]))
        # Steps whose priority is refused get the default, items are refused with it.
        if has_rows and ("priority" not in arguments or shards.num_envs):
            shards = with_global_default(buffer, shards)
        count = num_local(shards)
        blocks = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), rows)
        result = jax.vmap(add_block)(shards, *blocks)  # [L], with slots [L, B / S]
        if not isinstance(result, tuple):
            return result
        changed, slots = result
        slots = global_slots(buffer, slots, shard_ids(shards, buffer.axis)[:, None])
        return changed, jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), slots)

    return run_on_devices(buffer, body, (items, arguments))


def with_global_default(buffer: ShardedFields, shards: SampledBuffer) -> SampledBuffer:
    """Returns the shards with the default priority of all of them together.

    A shard keeps it until one of its priorities changes, which must follow.
    """
    sampler = sampler_of(shards)
    if not sampler.uses_priority:
        return shards
    summaries = all_gather(summarize(shards), buffer.axis)  # [S]
    states = lax.stop_gradient(shards.sampler_state)
    states = jax.vmap(sampler.with_global_default, in_axes=(0, None))(states, summaries)
    return trees.updated(shards, sampler_state=states)


def global_slots(buffer: ShardedFields, slots: Slots, shard_id: Int[Array, "..."]) -> Slots:
    """Returns slots of these shards as slots of the whole buffer."""
    capacity = buffer.shards.capacity
    inside = slots.index < capacity
    index = jnp.where(inside, slots.index + shard_id * capacity, buffer.capacity)
    return slots.replace(index=index)


def shard_slots(slots: Slots, shard_id: Count, capacity: int) -> Slots:
    """Returns slots of the whole buffer as slots of a shard; those of others are out of range."""
    inside = slots.index // capacity == shard_id
    return slots.replace(index=jnp.where(inside, slots.index - shard_id * capacity, capacity))


def change_envs(
    buffer: AnySharded, mask: Bool[Array, " E"], change: Callable[[Any, Array], SampledBuffer]
) -> AnySharded:
    """Applies ``change(shard, mask)`` to every shard, with the mask of its own environments."""

    def body(shards: SampledBuffer, mask: Bool[Array, " E"], _: object) -> SampledBuffer:
        if shards.episodes is not None and shards.episodes.removes:
            # Windows that end with their episodes may be complete then, and get the default.
            shards = with_global_default(buffer, shards)
        return jax.vmap(change)(shards, mask.reshape(num_local(shards), -1))

    return trees.updated(buffer, shards=run_on_devices(buffer, body, mask))


def change_rows(
    buffer: AnySharded, rows: Arrays, change: Callable[[Any, Array, Any], SampledBuffer]
) -> AnySharded:
    """Applies ``change(shard, shard_id, rows)`` to every shard, with the rows of all devices."""

    def body(shards: SampledBuffer, rows: Arrays, _: object) -> SampledBuffer:
        rows = all_gather(rows, buffer.axis)  # [B]
        ids = shard_ids(shards, buffer.axis)
        return jax.vmap(change, in_axes=(0, 0, None))(shards, ids, rows)

    return trees.updated(buffer, shards=run_on_devices(buffer, body, rows))


def best(buffer: ShardedFields, n: int, by: By) -> Slots:
    """Returns the slots of the ``n`` best items of all shards, each device its block of them."""

    def body(shards: SampledBuffer, *_: object) -> Slots:
        slots, word = jax.vmap(lambda shard: shard.best(n, by))(shards)  # [L, n]
        slots = global_slots(buffer, slots, shard_ids(shards, buffer.axis)[:, None])
        found: Any = all_gather((slots, word), buffer.axis)  # [S, n]
        every, words = jax.tree.map(lambda leaf: leaf.reshape(-1), found)  # [S * n]
        joined = draws.join_best(every, words, n)[0]
        rows = n * num_local(shards) // buffer.num_shards
        first = lax.axis_index(buffer.axis) * rows
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, rows), joined)

    return run_on_devices(buffer, body)


def slots_at(buffer: ShardedFields, env: Index, position: Words) -> Slots:
    """Returns the slots of the windows that start at steps of environments of all shards."""

    def read(shard: Any, shard_id: Array, steps: tuple[Array, Array]) -> Slots:
        env, position = steps
        inside = (env >= 0) & (env // shard.num_envs == shard_id)
        env = jnp.where(inside, env - shard_id * shard.num_envs, shard.num_envs)
        slots = shard.slots_at(env, position)
        present = slots.index < shard.capacity
        # ``read_rows`` sums over the shards, so a shard returns 0 for rows that it does not hold.
        # The index of a missing slot is the capacity, which is therefore subtracted until then.
        return jax.tree.map(
            lambda leaf, missing: jnp.where(present, leaf - missing, jnp.zeros_like(leaf)),
            global_slots(buffer, slots, shard_id),
            Slots(jnp.int32(buffer.capacity), jnp.uint32(0)),
        )

    slots = read_rows(buffer, (env, position), read)
    return slots.replace(index=slots.index + buffer.capacity)


def read_rows(buffer: ShardedFields, rows: Arrays, read: Function) -> Arrays:
    """Returns ``read(shard, shard_id, rows)``, summed over the shards.

    For each row, at most one shard may return anything but 0.
    """

    def body(shards: SampledBuffer, rows: Arrays, _: object) -> Arrays:
        count = jax.tree.leaves(rows)[0].shape[0]
        rows = all_gather(rows, buffer.axis)  # [B]
        ids = shard_ids(shards, buffer.axis)
        values = jax.vmap(read, in_axes=(0, 0, None))(shards, ids, rows)  # [L, B]

        def sum_of_rows(leaf: Array) -> Array:
            if count == 0:
                return leaf[0]
            dtype = jnp.int32 if leaf.dtype == bool else leaf.dtype
            total = lax.psum(jnp.sum(leaf, axis=0, dtype=dtype), buffer.axis)  # [B]
            return total.reshape(-1, count, *total.shape[1:])[lax.axis_index(buffer.axis)]

        return jax.tree.map(sum_of_rows, values)

    return run_on_devices(buffer, body, rows)


def result_shapes(shards: SampledBuffer, operation: Operation, arguments: dict[str, Any]) -> PyTree:
    """Checks the arguments of an operation of one shard; returns the shapes of its result.

    Arguments that are traced lose their shardings and the axes over which they vary. The values of
    the others are checked, too.
    """
    leaves, treedef = jax.tree.flatten((shards, arguments))
    num_shard_leaves = jax.tree.structure(shards).num_leaves
    shapes = {
        i: jax.ShapeDtypeStruct(
            leaf.shape[1:] if i < num_shard_leaves else leaf.shape,
            leaf.dtype,
            weak_type=bool(jax.typeof(leaf).weak_type),
        )
        for i, leaf in enumerate(leaves)
        if i < num_shard_leaves or isinstance(leaf, jax.core.Tracer)
    }

    def perform(traced: dict[int, Any]) -> Any:
        shard, arguments = treedef.unflatten([traced.get(i, leaf) for i, leaf in enumerate(leaves)])
        return operation.call_on(shard, arguments)

    return jax.eval_shape(perform, shapes)


def cast_arguments(
    shards: SampledBuffer, operation: Operation, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Returns the array arguments of an operation, cast to the dtypes that it uses.

    Arrays lose their weak types on the way to the devices, so a shard would refuse them as passed.

    Args:
        shards: The shards.
        operation: The operation.
        arguments: Its arguments by name, which were checked.
    """
    arrays: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "slots":
            arrays[name] = check_slots(value)
        elif name in operation.about.get("stored", ()):
            like = fields.stored(shards.data, arguments["path"], f"{shards.unit} have")
            arrays[name] = jax.tree.map(
                lambda leaf, stored, name=name: numbers.to_array(leaf, name, stored.dtype),
                trees.match(like, value),
                like,
            )
        elif value is not None and name in DTYPES:
            arrays[name] = numbers.to_array(value, name, DTYPES[name], infinite=name in INFINITE)
    return arrays


def change_each(
    buffer: AnySharded, change: Callable[..., SampledBuffer], arguments: tuple[Arrays, ...] = ()
) -> AnySharded:
    """Applies ``change(shard, *arguments)`` to every shard."""

    def body(shards: SampledBuffer, _: object, replicated: tuple[Arrays, ...]) -> SampledBuffer:
        return map_shards(lambda shard: change(shard, *replicated))(shards)

    return trees.updated(buffer, shards=run_on_devices(buffer, body, replicated=arguments))


def metrics(buffer: ShardedFields) -> dict[str, Array]:
    """Returns the metrics of all shards, joined as ``Sharded.metrics`` says."""

    def body(shards: SampledBuffer, *_: object) -> dict[str, Array]:
        per_shard = jax.vmap(lambda shard: shard.metrics())(shards)
        per_shard = all_gather(per_shard, buffer.axis)  # [S]
        per_shard.pop("effective_sample_size", None)
        count = per_shard.get("windows", per_shard["size"])
        alike = {"version", *jax.vmap(lambda shard: shard.hyperparameter_metrics())(shards)}

        def join(name: str, value: Array) -> Array:
            if name in alike:
                return value[0]
            if name in shards.counter_names:
                return jnp.sum(value, dtype=value.dtype)
            return _join_metric(name, per_shard, count)

        sizes = per_shard["size"]
        extremes = {"shard_size_min": jnp.min(sizes), "shard_size_max": jnp.max(sizes)}
        return {name: join(name, value) for name, value in per_shard.items()} | extremes

    return run_on_devices(buffer, body, out=jax.P())


def _join_metric(name: str, per_shard: dict[str, Array], count: Int[Array, " S"]) -> Array:
    """Returns one value for the values ``[S]`` of a metric in all shards, with ``count`` items."""
    value, nonempty = per_shard[name], count > 0  # [S]
    if name.endswith("_mean"):
        share = count.astype(jnp.float32) / jnp.maximum(jnp.sum(count), 1).astype(jnp.float32)
        mean = jnp.sum(jnp.where(nonempty, value * share, 0.0))
        stem = name.removesuffix("_mean")
        least, largest = (
            per_shard.get(stem + end, value).astype(jnp.float32) for end in ("_min", "_max")
        )
        # The sum of both infinities is NaN. As in a single buffer, their mean is 0.
        return jnp.where(jnp.any(least == -jnp.inf) & jnp.any(largest == jnp.inf), 0.0, mean)
    # A shard without items has no extremes. If all are empty, the value is that of the first one.
    extremes = jnp.where(nonempty, value, value[jnp.argmax(nonempty)])  # [S]
    if name.endswith("_min"):
        return jnp.min(extremes)
    if name.endswith("_max"):
        return jnp.max(extremes)
    return jnp.sum(value, dtype=value.dtype)


def _supports(
    buffer: ShardedFields, shards: SampledBuffer
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Returns the number of items that each shard can draw, and their least probability."""
    support = jax.vmap(lambda shard: shard.support())(shards)
    return all_gather((support.count, support.least_probability), buffer.axis)
