"""The operations of a ``Sharded`` on its shards, except for the draw."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from jaxbuf.buffers.body import Body
from jaxbuf.core import checks
from jaxbuf.core.collectives import all_gather
from jaxbuf.core.slots import Slots
from jaxbuf.strategies.mass import least_positive
from jaxbuf.strategies.protocols import ShardableSampler
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
    sampler = buffer.sampler
    if not sampler.shardable:
        raise ValueError(
            f"{sampler} does not draw from shards: it must derive from "
            "jaxbuf.strategies.ShardableSampler, as Uniform, Prioritized and Softmax do, and draw "
            f"with replacement; choose such a sampler, or {_RECIPE}"
        )
    for part in buffer.extras:
        if not part.of_shards:
            raise ValueError(
                f"{part} looks at all items, but a shard has only some of them; {_RECIPE}"
            )
    evictor = buffer.options().get("evictor")
    if evictor is not None and not evictor.of_shards:
        raise ValueError(f"{evictor} compares each item with all others; {_RECIPE}")
    return buffer


def sampler_of(shards: Body) -> ShardableSampler:
    """Returns the sampler of the shards, which ``check_shard`` has seen."""
    return cast("ShardableSampler", shards.sampler)


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


def tell(buffer: AnyShards, rows: tuple[Any, ...], change: Callable[..., Body]) -> AnyShards:
    """Applies ``change(shard, slots, *values)`` to every shard, with the slots of its own items.

    Args:
        buffer: The buffer.
        rows: Slots ``[B]``, numbered through all shards; a mask ``[B]`` or None; and any number of
            values ``[B]``.
        change: A method of the shards. It gets all rows, and those of other shards have slots that
            are out of range.
    """

    def body(shards: Body, rows: Any, _: Any) -> Body:
        slots, mask, *values = rows
        if mask is not None:
            slots = slots.replace(index=jnp.where(mask, slots.index, buffer.capacity))
        slots, values = all_gather((slots, values), buffer.axis)

        def of(shard: Body, number: Array) -> Body:
            return change(shard, own_slots(slots, number, shard.capacity), *values)

        return jax.vmap(of)(shards, numbers_of(shards, buffer.axis))

    return buffer.replace(shards=run(buffer, body, rows))


def ask(
    buffer: Shards, slots: Slots, question: Callable[[Body, Slots], Int[Array, " B"]]
) -> Int[Array, " B"]:
    """Returns ``question(shard, slots)`` of the shard of each row; 0 must answer for other rows."""

    def of(shard: Body, number: Array, slots: Slots) -> Array:
        return question(shard, own_slots(slots, number, shard.capacity))

    return _answers(buffer, slots, of)


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

    found = _answers(buffer, (env, position), of)
    return found.replace(index=found.index + buffer.capacity)


def _answers(buffer: Shards, rows: PyTree[Array], of: Callable[..., Any]) -> Any:
    """Returns the sums of what ``of(shard, number, rows)`` answers for all rows of all devices."""

    def body(shards: Body, mine: PyTree[Array], _: Any) -> Any:
        rows = all_gather(mine, buffer.axis)
        count = jax.tree.leaves(mine)[0].shape[0]
        numbers = numbers_of(shards, buffer.axis)
        answers = jax.vmap(lambda shard, number: of(shard, number, rows))(shards, numbers)

        def own(leaf: Array) -> Array:
            if count == 0:
                return leaf[0]
            total = lax.psum(jnp.sum(leaf, axis=0, dtype=leaf.dtype), buffer.axis)
            return total.reshape(-1, count)[lax.axis_index(buffer.axis)]

        return jax.tree.map(own, answers)

    return run(buffer, body, rows)


def held(shard: Body, slots: Slots) -> Int[Array, " B"]:
    """Returns 1 for each item that is still in a shard."""
    return shard.holds(slots).astype(jnp.int32)


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


def clear(shard: Any) -> Body:
    """Clears one shard."""
    return shard.clear()


def metrics(buffer: Shards) -> dict[str, Array]:
    """Returns the metrics of all shards, joined as their names say."""

    def body(shards: Body, *_: Any) -> dict[str, Array]:
        found = all_gather(jax.vmap(lambda shard: shard.metrics())(shards), buffer.axis)
        found.pop("effective_sample_size", None)
        count = found.get("windows", found["size"])
        counts = shards.counter_names
        return {
            name: jnp.sum(value, dtype=value.dtype)
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
    # Every shard has the same version.
    return value[0] if name == "version" else jnp.sum(value, dtype=value.dtype)


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
