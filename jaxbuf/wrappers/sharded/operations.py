"""The operations of a ``Sharded`` on its shards, except for the draw."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from jaxbuf.buffers.arguments import check_slots
from jaxbuf.buffers.body import Body
from jaxbuf.buffers.operation import Operation
from jaxbuf.core import checks, fields, numbers, trees
from jaxbuf.core.collectives import all_gather
from jaxbuf.core.hyperparameters import bind
from jaxbuf.core.slots import Slots
from jaxbuf.strategies.mass import least_positive
from jaxbuf.strategies.protocols import Sampler, ShardableSampler
from jaxbuf.wrappers.sharded.per_device import Shards, here_of, numbers_of, run

AnyShards = TypeVar("AnyShards", bound=Shards)

_RECIPE = (
    "keep one ItemBuffer whose data alone is sharded and everything else replicated, as the guide "
    '"More than one device" shows'
)


def check_shard(buffer: Any) -> Body:
    """Returns the buffer.

    Raises:
        ValueError: If it cannot be a shard.
    """
    if not isinstance(buffer, Body):
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


def sampler_of(shards: Body) -> ShardableSampler:
    """Returns the sampler of the shards, which ``check_shard`` has seen."""
    return cast("ShardableSampler", bind(shards.sampler, values_of(shards)))


def values_of(shards: Body) -> dict[str, Array]:
    """Returns the numbers of the sampler that vary, which all shards have alike."""
    return jax.tree.map(lambda value: value[0], lax.stop_gradient(shards.hyperparameters))


def hyperparameters(buffer: Shards) -> dict[str, Array]:
    """Returns the numbers of the sampler that vary."""
    return run(buffer, lambda shards, *_: values_of(shards), out=jax.P())


def change_sampler(
    buffer: AnyShards, change: Callable[..., Body], arguments: tuple[Any, ...] = ()
) -> AnyShards:
    """Applies ``change(shard, *arguments)`` to every shard; what is refused is counted once."""

    def body(shards: Any, _: Any, same: Any) -> Body:
        changed = jax.vmap(lambda shard: change(shard, *same))(shards)
        first = numbers_of(shards, buffer.axis) == 0
        counters = jnp.where(first[:, None], changed.counters, shards.counters)
        return changed.replace(counters=counters)

    return buffer.replace(shards=run(buffer, body, same=arguments))


def summaries(shards: Body) -> PyTree[Array]:
    """Returns the summaries of the shards on this device, leaves ``[L]``."""
    summarize = sampler_of(shards).summarize
    return jax.vmap(summarize)(lax.stop_gradient(shards.sampler_state), shards.occupancy)


def total(buffer: Shards, count: Callable[[Body], Array]) -> Int[Array, ""]:
    """Returns the sum of a count over all shards."""

    def body(shards: Body, *_: Any) -> Array:
        return lax.psum(jnp.sum(jax.vmap(count)(shards), dtype=jnp.int32), buffer.axis)

    return run(buffer, body, out=jax.P())


def size_of(shard: Body) -> Int[Array, ""]:
    """Returns the number of items, or steps, in a shard."""
    return shard.size


def occupied(shard: Body) -> Int[Array, ""]:
    """Returns the number of items, or windows, in a shard."""
    return shard.occupancy.size


def support(buffer: Shards) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Returns the number of items that can be drawn, and their least probability."""

    def body(shards: Body, *_: Any) -> tuple[Array, Array]:
        if buffer.exchange:
            known = all_gather(summaries(shards), buffer.axis)
            known = sampler_of(shards).support_among(known)
            return known.count, known.least_probability
        count, least = _supports(buffer, shards)
        return jnp.sum(count, dtype=jnp.int32), least_positive(least) / buffer.num_shards

    return run(buffer, body, out=jax.P())


def can_sample(buffer: Shards, wanted: Int[Array, ""]) -> Bool[Array, ""]:
    """Returns whether so many items can be drawn, without exchange from every shard alike."""
    if buffer.exchange:
        return support(buffer)[0] >= wanted

    def body(shards: Body, *_: Any) -> Array:
        return jnp.min(_supports(buffer, shards)[0])

    return run(buffer, body, out=jax.P()) * buffer.num_shards >= wanted


def add(buffer: AnyShards, items: PyTree[Array], given: dict[str, object]) -> AnyShards:
    """Adds one block of the rows to each shard."""

    def put(shard: Any, items: PyTree[Array], given: dict[str, Any]) -> Body:
        return shard.add(items, **given)

    return buffer.replace(shards=_put(buffer, items, given, put))


def insert(
    buffer: AnyShards, items: PyTree[Array], given: dict[str, object]
) -> tuple[AnyShards, Slots]:
    """Adds one block of the rows to each shard; returns slots that are numbered through all."""

    def put(shard: Any, items: PyTree[Array], given: dict[str, Any]) -> tuple[Body, Slots]:
        return shard.insert(items, **given)

    shards, slots = _put(buffer, items, given, put)
    return buffer.replace(shards=shards), slots


def _put(
    buffer: Shards,
    items: PyTree[Array],
    given: dict[str, object],
    put: Callable[..., Any],
) -> Any:
    """Calls ``put(shard, items, given)`` for each shard with its block of the rows.

    Slots among the results become rows that are numbered through all shards.
    """

    def body(shards: Any, rows: Any, _: Any) -> Any:
        sampler = sampler_of(shards)
        some = any(leaf.size for leaf in jax.tree.leaves(rows[0]))
        if sampler.uses_priority and "priority" not in given and some:
            # New items get the largest priority of all shards. Without any, a shard would keep it.
            known = all_gather(summaries(shards), buffer.axis)
            state = lax.stop_gradient(shards.sampler_state)
            state = jax.vmap(lambda own: sampler.with_global_default(own, known))(state)
            shards = shards.replace(sampler_state=state)
        count = here_of(shards)
        blocks = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), rows)
        out = jax.vmap(lambda shard, block: put(shard, *block))(shards, blocks)
        if not isinstance(out, tuple):
            return out
        changed, slots = out
        slots = numbered(buffer, slots, numbers_of(shards, buffer.axis)[:, None])
        return changed, jax.tree.map(lambda leaf: lax.collapse(leaf, 0, 2), slots)

    return run(buffer, body, (items, given))


def numbered(buffer: Shards, slots: Slots, number: Int[Array, "..."]) -> Slots:
    """Returns slots of the shards of these numbers as slots of the whole buffer."""
    capacity = buffer.shards.capacity
    there = slots.index < capacity
    index = jnp.where(there, slots.index + number * capacity, buffer.capacity)
    return slots.replace(index=index)


def of_envs(
    buffer: AnyShards, mask: Bool[Array, " E"], change: Callable[[Any, Array], Any]
) -> AnyShards:
    """Applies ``change(shard, mask)`` to every shard, with the mask of its own environments."""

    def body(shards: Any, mask: Any, _: Any) -> Body:
        return jax.vmap(change)(shards, mask.reshape(here_of(shards), -1))

    return buffer.replace(shards=run(buffer, body, mask))


def tell(
    buffer: AnyShards, rows: PyTree[Array], change: Callable[[Any, Array, Any], Body]
) -> AnyShards:
    """Applies ``change(shard, number, rows)`` to every shard, with the rows of all devices."""

    def body(shards: Body, mine: Any, _: Any) -> Body:
        rows = all_gather(mine, buffer.axis)
        numbers = numbers_of(shards, buffer.axis)
        return jax.vmap(lambda shard, number: change(shard, number, rows))(shards, numbers)

    return buffer.replace(shards=run(buffer, body, rows))


def slots_at(buffer: Shards, env: Int[Array, " B"], position: UInt[Array, " B"]) -> Slots:
    """Returns the slots of the windows that start at steps of environments of all shards."""

    def of(shard: Any, number: Array, steps: tuple[Array, Array]) -> Slots:
        env, position = steps
        own = (env >= 0) & (env // shard.num_envs == number)
        env = jnp.where(own, env - number * shard.num_envs, shard.num_envs)
        found = shard.slots_at(env, position)
        there = found.index < shard.capacity
        named = numbered(buffer, found, number)
        # Zeros answer for the rows of other shards.
        return jax.tree.map(
            lambda leaf, none: jnp.where(there, leaf - none, jnp.zeros_like(leaf)),
            named,
            Slots(jnp.int32(buffer.capacity), jnp.uint32(0)),
        )

    found = answers(buffer, (env, position), of)
    return found.replace(index=found.index + buffer.capacity)


def answers(buffer: Shards, rows: PyTree[Array], of: Callable[..., Any]) -> Any:
    """Returns what ``of(shard, number, rows)`` answers for each row; all shards but one say 0."""

    def body(shards: Body, mine: PyTree[Array], _: Any) -> Any:
        rows = all_gather(mine, buffer.axis)
        count = jax.tree.leaves(mine)[0].shape[0]
        numbers = numbers_of(shards, buffer.axis)
        answers = jax.vmap(lambda shard, number: of(shard, number, rows))(shards, numbers)

        def own(leaf: Array) -> Array:
            if count == 0:
                return leaf[0]
            kind = jnp.int32 if leaf.dtype == bool else leaf.dtype
            total = lax.psum(jnp.sum(leaf, axis=0, dtype=kind), buffer.axis)
            return total.reshape(-1, count, *total.shape[1:])[lax.axis_index(buffer.axis)]

        return jax.tree.map(own, answers)

    return run(buffer, body, rows)


def checked(shards: Body, operation: Operation, given: dict[str, Any]) -> Any:
    """Returns the shapes of what an operation of one shard returns, which checks its arguments.

    Neither the shardings of the arrays nor the axes that they vary over are seen. Arguments that
    are not traced are, so that known numbers are checked.
    """
    leaves, treedef = jax.tree.flatten((shards, given))
    of_shards = jax.tree.structure(shards).num_leaves
    shapes = {
        i: jax.ShapeDtypeStruct(
            leaf.shape[1:] if i < of_shards else leaf.shape,
            leaf.dtype,
            weak_type=bool(jax.typeof(leaf).weak_type),
        )
        for i, leaf in enumerate(leaves)
        if i < of_shards or isinstance(leaf, jax.core.Tracer)
    }

    def perform(seen: dict[int, Any]) -> Any:
        shard, given = treedef.unflatten([seen.get(i, leaf) for i, leaf in enumerate(leaves)])
        return operation.of(shard, given)

    return jax.eval_shape(perform, shapes)


def arrays(shards: Body, operation: Operation, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operation that are not static, with the dtypes that they become.

    Arrays of other dtypes, or of weak types, which are lost on the way, would not be accepted.

    Args:
        shards: The shards.
        operation: The operation.
        given: Its arguments by name, which were checked.
    """
    dtypes, infinite = operation.about.get("dtypes", {}), operation.about.get("infinite", ())
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name == operation.slots:
            out[name] = check_slots(value)
        elif name in operation.about.get("stored", ()):
            like = fields.stored(shards.data, given["path"], f"{shards.unit} have")
            out[name] = jax.tree.map(
                lambda leaf, stored, name=name: numbers.to_array(leaf, name, stored.dtype),
                trees.match(like, value),
                like,
            )
        elif value is not None and name in dtypes:
            out[name] = numbers.to_array(value, name, dtypes[name], infinite=name in infinite)
    return out


def each(
    buffer: AnyShards, change: Callable[..., Body], arguments: tuple[Any, ...] = ()
) -> AnyShards:
    """Applies ``change(shard, *arguments)`` to every shard."""

    def body(shards: Any, _: Any, same: Any) -> Body:
        if here_of(shards) > 1:
            return jax.vmap(lambda shard: change(shard, *same))(shards)
        # A single shard is not mapped: its loops end by its own conditions, and XLA updates what
        # they carry in place.
        changed = change(jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), shards), *same)
        return jax.tree.map(lambda leaf: leaf[None], changed)

    return buffer.replace(shards=run(buffer, body, same=arguments))


def metrics(buffer: Shards) -> dict[str, Array]:
    """Returns the metrics of all shards, joined as their names say."""

    def body(shards: Body, *_: Any) -> dict[str, Array]:
        found = all_gather(jax.vmap(lambda shard: shard.metrics())(shards), buffer.axis)
        found.pop("effective_sample_size", None)
        count = found.get("windows", found["size"])
        counts = shards.counter_names
        alike = {"version", *jax.vmap(lambda shard: shard.sampler_numbers())(shards)}
        return {
            name: value[0]
            if name in alike
            else jnp.sum(value, dtype=value.dtype)
            if name in counts
            else _joined(name, value, count)
            for name, value in found.items()
        }

    return run(buffer, body, out=jax.P())


def _joined(name: str, value: Array, count: Int[Array, " S"]) -> Array:
    """Returns one value for the values ``[S]`` of a metric in all shards, with ``count`` items."""
    some = count > 0
    if name.endswith("_mean"):
        share = count.astype(jnp.float32) / jnp.maximum(jnp.sum(count), 1).astype(jnp.float32)
        return jnp.sum(jnp.where(some, value * share, 0.0))
    # A shard without items has no extremes. If all are empty, the value is that of the first one.
    known = jnp.where(some, value, value[jnp.argmax(some)])
    if name.endswith("_min"):
        return jnp.min(known)
    if name.endswith("_max"):
        return jnp.max(known)
    return jnp.sum(value, dtype=value.dtype)


def _supports(buffer: Shards, shards: Body) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Returns the number of items that each shard can draw, and their least probability."""

    def of(shard: Body) -> tuple[Array, Array]:
        known = shard.support()
        return known.count, known.least_probability

    return all_gather(jax.vmap(of)(shards), buffer.axis)


def own_slots(slots: Slots, number: Int[Array, ""], capacity: int) -> Slots:
    """Returns the slots within one shard; those of other shards are out of range."""
    own = slots.index // capacity == number
    return slots.replace(index=jnp.where(own, slots.index - number * capacity, capacity))
