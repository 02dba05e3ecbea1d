"""One buffer whose items are spread over the devices along an axis of a mesh."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbuf.buffers import common
from jaxbuf.buffers.exchange import exchange, numbers_of, places
from jaxbuf.buffers.options import check_options
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import checks, describe, sizes, storage
from jaxbuf.core.calls import call
from jaxbuf.core.collectives import all_gather
from jaxbuf.core.slots import Slots
from jaxbuf.strategies.protocols import ShardableSampler, Support
from jaxbuf.strategies.samplers import least_positive

_RECIPE = (
    "keep one ItemBuffer whose data alone is sharded and everything else replicated, as the guide "
    '"More than one device" shows'
)


@dataclasses.dataclass(frozen=True)
class _Contents:
    """The number of items in all shards, for importance weights."""

    size: Int[Array, ""]


class Sharded(struct.PyTreeNode):
    """One logical buffer of ``S`` shards, each a whole buffer, along an axis of a mesh.

    ``sample`` draws exactly like a single buffer with the items of all shards: every device
    receives the sums of all shards, computes the same targets, and draws the targets that fall into
    its own shards. ``S`` is part of the configuration, and the number of devices is not: results
    are the same on any mesh whose axis divides ``S``.

    Rows are sharded over the same axis. Block ``k`` of ``B / S`` rows of an ``add`` goes to shard
    ``k``, so that no row is sent to another device, and every device holds ``B / D`` rows of a
    batch. Each shard evicts its own oldest items. All shapes, and ``batch_size``, are global.
    Inside your own ``jax.shard_map`` over the axis, to which the buffer is passed with
    ``in_specs=P(axis)``, each device passes and receives its own rows.

    Attributes:
        shards: The shards as one buffer, with a leading axis ``S`` in every leaf.
        num_shards: The number of shards, ``S``.
        mesh: The mesh on which the buffer was created.
        axis: The axis of the mesh along which the shards are laid out.
        exchange: Whether a batch is drawn from all shards as if they were one buffer.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> buffer = jaxbuf.Sharded.create(
        ...     lambda: jaxbuf.ItemBuffer.create(jnp.float32(0), 100, sampler=jaxbuf.Prioritized()),
        ...     mesh, "data", shards=4,
        ... )
        >>> buffer = jaxbuf.add(buffer, jnp.arange(8.0))
        >>> batch = jaxbuf.sample(buffer, jax.random.key(0), 8)
        >>> buffer = jaxbuf.update_priority(buffer, batch.slots, batch.data)
        >>> int(buffer.size), buffer.capacity, sorted(batch.data.tolist())
        (8, 400, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    """

    shards: Any
    num_shards: int = struct.field(pytree_node=False)
    mesh: jax.sharding.Mesh = struct.field(pytree_node=False)
    axis: str = struct.field(pytree_node=False)
    exchange: bool = struct.field(pytree_node=False, default=True)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(
        cls,
        make: Callable[[], Any],
        mesh: jax.sharding.Mesh,
        axis: str,
        *,
        shards: int | None = None,
        exchange: bool = True,
    ) -> Self:
        """Creates an empty buffer, whose arrays are allocated on their own devices.

        Args:
            make: A function that creates one shard, an ``ItemBuffer`` or a ``TrajectoryBuffer``.
            mesh: The mesh of devices.
            axis: The axis of the mesh along which to lay out the shards.
            shards: The number of shards ``S``, a multiple of the length of the axis, which is the
                default. With more shards, the buffer can later be loaded onto up to ``S`` devices.
            exchange: False draws ``B / S`` rows of every batch from each shard, so that no rows are
                sent between devices. ``probability`` is that of this draw: with ``beta=1`` weighted
                means remain unbiased, but items of shards with little mass are drawn more often
                than from a single buffer.

        Raises:
            ValueError: If the mesh has no such axis, ``shards`` is not a multiple of its length,
                ``make`` returns a buffer that compares or orders all of its items (``Lowest``,
                ``Diversity``, ``Recent``, draws without replacement) or whose sampler does not
                derive from ``jaxbuf.strategies.ShardableSampler``, or there are 2**31 slots or
                more.
        """
        axes = mesh.axis_names if isinstance(mesh, jax.sharding.Mesh) else None
        if axes is None:
            raise ValueError(f"mesh is {checks.kind_of(mesh)}; expected one of jax.make_mesh")
        if axis not in axes:
            raise ValueError(f"axis is {axis!r}, but the mesh has {axes}; name one of these")
        devices = mesh.shape[axis]
        count = devices if shards is None else sizes.check_count("shards", shards)
        if count % devices:
            raise ValueError(
                f"shards is {count}, but there are {devices} devices along {axis!r}; choose a "
                f"multiple of {devices}, or a mesh whose axis divides {count}"
            )
        exchange = checks.check_flag("exchange", exchange)
        one = _check_shard(jax.eval_shape(make))
        if one.capacity * count >= 2**31:
            raise ValueError("shards have 2**31 slots or more; expected fewer in all")

        def build() -> Any:
            return jax.tree.map(lambda leaf: jnp.stack([leaf] * count), make())

        sharding = jax.NamedSharding(mesh, jax.P(axis))
        return cls(
            shards=jax.jit(build, out_shardings=sharding)(),
            num_shards=count,
            mesh=mesh,
            axis=axis,
            exchange=exchange,
        )

    @property
    def capacity(self) -> int:
        """The largest number of items, or steps, that all shards together can hold."""
        return self.num_shards * self.shards.capacity

    @property
    def size(self) -> Int[Array, ""]:
        """The number of items, or steps, in all shards together."""
        return call(_total, self, _size_of, static=(1,))

    @property
    def occupancy(self) -> Any:
        """An object whose ``size`` is the number of items, or windows, in all shards."""
        return _Contents(call(_total, self, _occupied, static=(1,)))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes over which a batch is split here; empty outside of ``shard_map``."""
        inside = self.axis in jax.sharding.get_abstract_mesh().manual_axes
        return (self.axis,) if inside else ()

    def can_sample(self, batch_size: int | Int[Array, ""] = 1) -> Bool[Array, ""]:
        """Returns whether ``batch_size`` items can be drawn.

        Without ``exchange``, each shard must be able to draw its ``batch_size / S`` items.
        """
        return call(_can_sample, self, common.check_wanted(batch_size))

    def support(self) -> Support:
        """Returns the number of items that can be drawn, and the least probability among them."""
        return Support(*call(_support, self))

    def add(self, items: PyTree[Array], **options: Any) -> Self:
        """Adds rows: the first ``B / S`` rows to the first shard, and so on.

        Args:
            items: Items, leaves ``[B, ...]``, or steps for ``TrajectoryBuffer`` shards with ``B``
                environments in total; ``B`` is a multiple of ``S``.
            **options: Options of the shards' own ``add`` except ``env_ids``, with one row for each
                row of ``items``. By default new items get the largest priority of all shards.

        Returns:
            The buffer with the rows.

        Raises:
            ValueError: When traced, if ``B`` is not a multiple of ``S``, or as raised by the
                shards' ``add``.
        """
        given = {name: value for name, value in options.items() if value is not None}
        check_options(self.shards, "add", given)
        if "env_ids" in given:
            raise ValueError("env_ids was given, but rows go to shards by their place; use mask")
        for path, leaf in jax.tree_util.tree_leaves_with_path({"items": items} | given):
            name = path[0].key + jax.tree_util.keystr(path[1:])
            if not np.ndim(leaf):
                raise ValueError(f"{name} has shape (); expected a row for each item, (B, ...)")
            self._check_rows(name, np.shape(leaf)[0])
        return call(_add, self, items, given)

    def sample(self, key: PRNGKeyArray, batch_size: int) -> Sample:
        """Draws a batch from all shards.

        Args:
            key: A PRNG key; if devices have different keys, the key of the first shard is used.
            batch_size: The total number of rows ``B``, a multiple of ``S``; static.

        Returns:
            A ``Sample`` whose rows are sharded over the axis. Slots are numbered through all
            shards.

        Raises:
            ValueError: If ``batch_size`` is not a multiple of ``S``, or ``key`` is not a single
                key.
        """
        rows = common.check_batch_size(batch_size)
        common.check_key(key)
        if rows % self.num_shards:
            raise ValueError(_odd("batch_size", rows, self.num_shards))
        return call(_sample, self, key, rows, static=(2,))

    def update_priority(
        self, slots: Slots, priority: Float[Array, " B"], *, mask: Bool[Array, " B"] | None = None
    ) -> Self:
        """Sets the priorities of sampled items, on any device; see ``ItemBuffer``.

        Raises:
            ValueError: When traced, if the sampler has no priorities, ``B`` is not a multiple of
                ``S``, or a shape differs.
        """
        common.needs_priority(self.shards.sampler, "update_priority was called")
        common.check_slots(slots)
        shape = slots.index.shape
        value = common.check_priority(priority, shape, "that of slots")
        taken = np.ones(shape, bool) if mask is None else mask
        taken = storage.check_rows(taken, "mask", shape, np.bool_, "that of slots")
        self._check_rows("slots", shape[0])
        return call(_update, self, slots, value, taken.astype(jnp.int32))

    def clear(self) -> Self:
        """Returns the buffer without items; earlier slots remain stale, counters are kept."""
        return call(_clear, self)

    def metrics(self) -> dict[str, Array]:
        """Returns the metrics of all shards together, as scalars.

        Counts are summed, minima and maxima are taken over the shards, and means are weighted by
        size. ``effective_sample_size`` is left out, because it cannot be computed from the values
        of the shards.
        """
        return call(_metrics, self)

    def _check_rows(self, name: str, rows: int) -> None:
        """Raises ValueError if rows cannot be split evenly among the shards that are here."""
        count = jax.tree.leaves(self.shards)[0].shape[0]
        if rows % count:
            raise ValueError(_odd(name, rows, count))


_EXPLICIT = jax.sharding.AxisType.Explicit


def _check_shard(buffer: Any) -> Any:
    """Returns the buffer; raises ValueError if it cannot be a shard."""
    sampler: Any = getattr(buffer, "sampler", None)
    if sampler is None:
        raise ValueError(
            f"make gives {checks.kind_of(buffer)}; expected a function that creates an ItemBuffer "
            "or a TrajectoryBuffer"
        )
    if not isinstance(sampler, ShardableSampler) or not sampler.shardable:
        raise ValueError(
            f"{sampler} does not draw from shards: it must derive from "
            "jaxbuf.strategies.ShardableSampler, as Uniform, Prioritized and Softmax do, and draw "
            f"with replacement; choose such a sampler, or {_RECIPE}"
        )
    for part in buffer.extras:
        if part.of_items:
            raise ValueError(
                f"{part} looks at all items, but a shard has only some of them; {_RECIPE}"
            )
    evictor: Any = getattr(buffer, "evictor", None)
    if evictor is not None and evictor.uses_score:
        raise ValueError(f"{evictor} compares each item with all others; {_RECIPE}")
    return buffer


def _run(
    buffer: Sharded, body: Callable[..., Any], rows: Any = (), same: Any = (), out: Any = None
) -> Any:
    """Runs ``body(shards, rows, same)`` on each device, with the device's own shards and rows.

    Args:
        buffer: The buffer.
        body: A function of the arrays on one device; its shards have a leading axis ``S / D``.
        rows: Arrays whose first axis is sharded.
        same: Arrays that are replicated on every device.
        out: The ``PartitionSpec`` of the results; by default that of the shards.
    """
    here = jax.sharding.get_abstract_mesh()
    spec = jax.P(buffer.axis)
    mesh: Any = buffer.mesh if here.empty else here
    if mesh.shape.get(buffer.axis) != buffer.mesh.shape[buffer.axis]:
        raise ValueError(
            f"buffer was created on a mesh of {dict(buffer.mesh.shape)}, but this program runs "
            f"on one of {dict(mesh.shape)}; create it on that mesh, or save and load it"
        )
    if bool(buffer.batch_axes):
        local = jax.tree.leaves(buffer.shards)[0].shape[0]
        if local * mesh.shape[buffer.axis] != buffer.num_shards:
            raise ValueError(
                f"buffer has {local} of its {buffer.num_shards} shards on each of "
                f"{mesh.shape[buffer.axis]} devices; pass it to shard_map by in_specs={spec}"
            )
        return body(buffer.shards, rows, same)
    args, specs = (buffer.shards, rows, same), (spec, spec, jax.P())
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[buffer.axis] == _EXPLICIT:
        # With explicit sharding, shard_map requires arguments with the shardings of its in_specs.
        args = tuple(
            jax.reshard(tree, jax.NamedSharding(mesh, spec))
            for tree, spec in zip(args, specs, strict=True)
        )
    mapped = jax.shard_map(
        body,
        mesh=buffer.mesh if here.empty else None,
        in_specs=specs,
        out_specs=spec if out is None else out,
        axis_names={buffer.axis},
        check_vma=False,
    )
    return mapped(*args)


def _odd(name: str, rows: int, count: int) -> str:
    lower = rows // count * count
    return (
        f"{name} has {rows} rows, but there are {count} shards; make it a multiple of {count}, "
        f"such as {lower or count}; pad with rows that are masked out"
    )


def _size_of(shard: Any) -> Int[Array, ""]:
    return shard.size


def _occupied(shard: Any) -> Int[Array, ""]:
    return shard.occupancy.size


def _total(buffer: Sharded, of: Callable[[Any], Array]) -> Int[Array, ""]:
    def body(shards: Any, *_: Any) -> Array:
        return lax.psum(jnp.sum(jax.vmap(of)(shards), dtype=jnp.int32), buffer.axis)

    return _run(buffer, body, out=jax.P())


def _support(buffer: Sharded) -> tuple[Int[Array, ""], Float[Array, ""]]:
    def body(shards: Any, *_: Any) -> tuple[Array, Array]:
        if buffer.exchange:
            known = shards.sampler.reach(_world(buffer, shards))
            return known.count, known.least_probability
        count, least = _supports(buffer, shards)
        return jnp.sum(count, dtype=jnp.int32), least_positive(least) / buffer.num_shards

    return _run(buffer, body, out=jax.P())


def _can_sample(buffer: Sharded, wanted: Int[Array, ""]) -> Bool[Array, ""]:
    if buffer.exchange:
        return buffer.support().count >= wanted

    def body(shards: Any, *_: Any) -> Array:
        return jnp.min(_supports(buffer, shards)[0])

    return _run(buffer, body, out=jax.P()) * buffer.num_shards >= wanted


def _supports(buffer: Sharded, shards: Any) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Returns the number of items that each shard can draw, and their least probability."""

    def of(shard: Any) -> tuple[Array, Array]:
        known = shard.support()
        return known.count, known.least_probability

    return all_gather(jax.vmap(of)(shards), buffer.axis)


def _add(buffer: Sharded, items: Any, given: dict[str, Any]) -> Sharded:
    if jax.tree.leaves(items)[0].shape[0] == 0:
        return buffer

    def body(shards: Any, rows: Any, _: Any) -> Any:
        sampler, count = shards.sampler, jax.tree.leaves(shards)[0].shape[0]
        if sampler.uses_priority and "priority" not in given:
            state, world = lax.stop_gradient((shards.sampler_state, _world(buffer, shards)))
            state = jax.vmap(lambda own: sampler.lend(own, world))(state)
            shards = shards.replace(sampler_state=state)
        blocks = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)
        return jax.vmap(lambda shard, row: shard.add(row[0], **row[1]))(shards, blocks)

    return buffer.replace(shards=_run(buffer, body, (items, given)))


def _update(buffer: Sharded, slots: Slots, value: Array, taken: Array) -> Sharded:
    capacity = buffer.shards.capacity

    def body(shards: Any, rows: Any, _: Any) -> Any:
        slots, value, taken = all_gather(rows, buffer.axis)

        def of(shard: Any, number: Array) -> Any:
            own = (slots.index // capacity == number) & (taken > 0)
            index = jnp.where(own, slots.index - number * capacity, capacity)
            return shard.update_priority(slots.replace(index=index), value)

        return jax.vmap(of)(shards, numbers_of(shards, buffer.axis))

    index = jnp.asarray(slots.index, jnp.int32)
    slots = Slots(index, jnp.asarray(slots.generation, jnp.uint32))
    return buffer.replace(shards=_run(buffer, body, (slots, value, taken)))


def _clear(buffer: Sharded) -> Sharded:
    def body(shards: Any, *_: Any) -> Any:
        return jax.vmap(lambda shard: shard.clear())(shards)

    return buffer.replace(shards=_run(buffer, body))


def _metrics(buffer: Sharded) -> dict[str, Array]:
    def body(shards: Any, *_: Any) -> dict[str, Array]:
        found = all_gather(jax.vmap(lambda shard: shard.metrics())(shards), buffer.axis)
        found.pop("effective_sample_size", None)
        count = found.get("windows", found["size"]).astype(jnp.float32)
        share = count / jnp.maximum(jnp.sum(count), 1.0)

        def joined(name: str, value: Array) -> Array:
            if name.endswith("_mean"):
                return jnp.sum(jnp.where(share > 0, value * share, 0.0))
            if name.endswith("_min"):
                least = jnp.min(jnp.where(share > 0, value, jnp.inf))
                return jnp.where(jnp.isfinite(least), least, 0.0)
            largest = name.endswith("_max") or name == "version"
            return jnp.max(value) if largest else jnp.sum(value, dtype=value.dtype)

        return {name: joined(name, value) for name, value in found.items()}

    return _run(buffer, body, out=jax.P())


def _sample(buffer: Sharded, key: PRNGKeyArray, rows: int) -> Sample:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    axis, count = buffer.axis, buffer.num_shards
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), buffer.shards)
    row = jax.eval_shape(lambda shard: shard.sample(jax.random.key(0), 1).data, one)
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(row))

    def body(shards: Any, _: Any, words: Array) -> Sample:
        shards = shards.replace(sampler_state=lax.stop_gradient(shards.sampler_state))
        sampler, local = shards.sampler, jax.tree.leaves(shards)[0].shape[0]
        known = _reports(shards) if buffer.exchange else ()
        known = (known, jnp.broadcast_to(words, (local, *words.shape)))
        world, words = all_gather(known, axis)
        key_ = words[0]
        if typed:
            key_ = jax.random.wrap_key_data(key_, impl=jax.random.key_impl(key))
        if not buffer.exchange:

            def share(shard: Any, number: Array) -> Sample:
                batch = shard.sample(jax.random.fold_in(key_, number), rows // count)
                batch = batch.replace(probability=batch.probability / count)
                return _numbered(buffer, batch, number)

            batch = jax.vmap(share)(shards, numbers_of(shards, axis))
            return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

        aimed = sampler.aim(world, key_, rows, count * shards.occupancy.capacity)
        source = places(aimed.shard, count)
        home, target = jax.tree.map(lambda leaf: leaf[source], (aimed.shard, aimed.target))

        def fetch(shard: Any, number: Array, position: Int[Array, " n"]) -> Any:
            wanted = jax.tree.map(lambda leaf: leaf.at[position].get(mode="clip"), target)
            draw = sampler.hit(shard.sampler_state, shard.occupancy, wanted, world)
            own = home.at[position].get(mode="fill", fill_value=count) == number
            draw = dataclasses.replace(draw, valid=draw.valid & own)
            batch = _numbered(buffer, shard._gather(draw), number)
            return batch.data, batch.slots, batch.probability

        data, slots, probability = exchange(fetch, shards, home, count, nbytes, axis)
        return Sample(data, slots, probability, slots.index < buffer.capacity)

    return _run(buffer, body, same=jax.random.key_data(key) if typed else key)


def _numbered(buffer: Sharded, batch: Sample, number: Int[Array, ""]) -> Sample:
    """Returns the sample of one shard with slots that are numbered through all shards."""
    index = batch.slots.index + number * buffer.shards.capacity
    index = jnp.where(batch.valid, index, buffer.capacity)
    return batch.replace(slots=batch.slots.replace(index=index))


def _reports(shards: Any) -> Any:
    return jax.vmap(lambda shard: shard.sampler.report(shard.sampler_state, shard.occupancy))(
        shards
    )


def _world(buffer: Sharded, shards: Any) -> Any:
    """Returns the reports of all shards, on every device."""
    return all_gather(_reports(shards), buffer.axis)
