"""One buffer whose items are spread over the devices along an axis of a mesh."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Integer

from jaxbuf.buffers import draws
from jaxbuf.buffers.arguments import (
    broadcast_steps,
    check_batch_size,
    check_num_rows,
    check_offsets,
    check_sampler,
    check_slots,
    mask_of,
)
from jaxbuf.buffers.buffer import By, check_options
from jaxbuf.buffers.operation import Operation
from jaxbuf.buffers.sample import Contents, Normalization, Sample, StepsAround, Within, weighed
from jaxbuf.buffers.sampled import SampledBuffer
from jaxbuf.buffers.slotted import AddOptions, Envs, InsertOptions, SlottedBuffer
from jaxbuf.core import checks, native, sizes, trees
from jaxbuf.core.program import is_outside, program
from jaxbuf.core.random import check_key
from jaxbuf.core.segment_tree import using_width, width_for
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Flag, Function, Key, Number
from jaxbuf.strategies.protocols import Sampler, Support
from jaxbuf.wrappers.sharded import operations as on_shards
from jaxbuf.wrappers.sharded import sampling
from jaxbuf.wrappers.sharded.per_device import ShardedFields, num_local


class Sharded(SlottedBuffer, ShardedFields):
    """One logical buffer of ``S`` shards, each a whole buffer, along an axis of a mesh.

    ``sample`` draws exactly like a single buffer with the items of all shards: every device
    receives the sums of all shards, computes the same targets, and draws the targets that fall into
    its own shards. ``S`` is part of the configuration, and the number of devices is not: results
    are the same on any mesh whose axis divides ``S``.

    Rows are sharded over the same axis. Block ``k`` of ``B / S`` rows of an ``add`` goes to shard
    ``k``, so that no row is sent to another device, and every device holds ``B / D`` rows of a
    batch. Each shard evicts its own oldest items. All shapes, and ``batch_size``, are global, and
    all numbers of rows, of slots as well, are multiples of ``S``.
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
        >>> auto = (jax.sharding.AxisType.Auto,)  # Explicit axes raise in most losses of a batch
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
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
            make: A function that creates one shard, an ``ItemBuffer`` or a ``TrajectoryBuffer``;
                traced at each call.
            mesh: The mesh of devices. Create it with axes of type ``jax.sharding.AxisType.Auto``,
                unless your loss chooses the sharding of its gradients.
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
        if not callable(make):
            raise ValueError(
                f"make is {checks.kind_of(make)}; expected a function that creates one shard, such "
                "as lambda: jaxbuf.ItemBuffer.create(...)"
            )
        width = width_for(mesh.devices.flat[0].platform)
        with using_width(width):
            # JAX would remember the shapes of a function; what this one reads may have changed.
            one = on_shards.check_shard(jax.eval_shape(lambda: make()))
        if one.capacity * count >= 2**31:
            raise ValueError("shards have 2**31 slots or more; expected fewer in all")

        if is_outside():
            arrays = jax.tree.leaves(one)
            each = sum(sizes.check_bytes("a shard", x.shape, x.dtype) for x in arrays)
            label, rows = "what each device keeps of the shards", one.capacity
            nbytes = each * count // devices
            sizes.check_memory(label, nbytes, "capacity of a shard", rows, mesh.local_devices)

        def build() -> SampledBuffer:
            return jax.tree.map(lambda leaf: jnp.stack([leaf] * count), make())

        sharding = jax.NamedSharding(mesh, jax.P(axis))
        with using_width(width), sizes.allocating("what the shards keep of their items"):
            stacked: Any = jax.jit(build, out_shardings=sharding)()
        return cls(shards=stacked, num_shards=count, mesh=mesh, axis=axis, exchange=exchange)

    @property
    def num_envs(self) -> int:
        """The number of environments of all shards together; 0 if they hold items."""
        return self.num_shards * self.shards.num_envs

    def inside(self) -> tuple[SampledBuffer, int]:
        return self.shards, self.num_shards

    def room(self, sequence_length: int | None = None) -> tuple[float, str]:
        each, text = self.shards.room(sequence_length)
        return self.num_shards * each, text

    @property
    @program()
    def size(self) -> Count:
        """The number of items, or steps, in all shards together."""
        return on_shards.total(self, lambda shard: shard.size)

    @property
    @program()
    def occupancy(self) -> Contents:
        """An object whose ``size`` is the number of items, or windows, in all shards."""
        return Contents(on_shards.total(self, lambda shard: shard.occupancy.size))

    @program()
    def can_sample(self, batch_size: int | Count = 1) -> Flag:
        """Returns whether ``batch_size`` items can be drawn.

        Without ``exchange``, each shard must be able to draw its ``batch_size / S`` items.
        """
        return on_shards.can_sample(self, check_num_rows(batch_size))

    def support(self) -> Support:
        return on_shards.support(self)

    def add(self, items: Arrays, **options: Unpack[AddOptions]) -> Self:
        """Adds rows: the first ``B / S`` rows to the first shard, and so on.

        If ``S`` does not divide the number of your rows, pad them with rows that are masked out,
        and let the shards take turns: in call ``t`` roll all leaves and the mask by ``t * B / S``
        rows. Rows that are padded at the same places each time always miss the same shards, whose
        capacity is then lost. A single row needs ``mask=jnp.arange(S) == t % S``.

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
        shards = self._add_rows(
            "add", lambda shard, items, options: shard.add(items, **options), items, dict(options)
        )
        return trees.updated(self, shards=shards)

    def insert(self, items: Arrays, **options: Unpack[InsertOptions]) -> tuple[Self, Slots]:
        shards, slots = self._add_rows(
            "insert",
            lambda shard, items, options: shard.insert(items, **options),
            items,
            dict(options),
        )
        return trees.updated(self, shards=shards), slots

    def _add_rows(
        self, name: str, add_block: Function, items: Arrays, options: dict[str, object]
    ) -> Any:
        """Calls ``add_block(shard, items, options)`` on all shards, each with its own rows.

        Raises:
            ValueError: If an argument is wrong, in the shapes that the caller knows.
        """
        arguments = {name: value for name, value in options.items() if value is not None}
        check_options(self.shards, name, arguments)
        if "env_ids" in arguments:
            raise ValueError("env_ids was given, but rows go to shards by their place; use mask")
        leaves, _ = trees.flatten(items, "items")
        if not leaves:
            raise ValueError("items has no arrays; expected the leaves of an item, each (B, ...)")
        for path, leaf in jax.tree_util.tree_leaves_with_path({"items": items} | arguments):
            argument = path[0].key + jax.tree_util.keystr(path[1:])
            if not np.ndim(leaf):
                raise ValueError(f"{argument} has shape (); expected a row for each item, (B, ...)")
            if path[0].key == "items":
                self._check_rows(argument, np.shape(leaf)[0], to_add=True)
        try:
            return on_shards.add_rows(self, add_block, items, arguments)
        except (TypeError, ValueError):
            # A shard knows its own rows only. One buffer for all rows names what is wrong.
            envs = num_local(self.shards) * self.shards.num_envs
            one = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], self.shards))
            whole = jax.eval_shape(lambda: one.anew(**({"num_envs": envs} if envs else {})))
            jax.eval_shape(lambda buffer: add_block(buffer, items, arguments), whole)
            raise

    @property
    @program()
    def hyperparameters(self) -> dict[str, Array]:
        """The varying hyperparameters of the sampler, the same in all shards."""
        return on_shards.hyperparameters(self)

    def check_hyperparameters(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return self.shards.check_hyperparameters(arguments)

    def set_hyperparameters(
        self, values: Mapping[str, ArrayLike] | None = None, **options: ArrayLike
    ) -> Self:
        checked = self.shards.check_hyperparameters({"values": values, **options})["values"]
        return on_shards.change_sampler(
            self, lambda shard, values: shard.set_hyperparameters(values), (checked,)
        )

    def with_sampler(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sampler: Sampler
    ) -> Self:
        check_sampler(sampler)
        on_shards.check_shardable(sampler)
        return on_shards.change_sampler(self, lambda shard: shard.with_sampler(sampler))

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        key: Key,
        batch_size: int,
        *,
        beta: float | Number | None = None,
        normalize: Normalization = ...,
        within: Within | None = None,
    ) -> Sample:
        """Draws a batch from all shards.

        Args:
            key: A PRNG key; if devices have different keys, the key of the first shard is used.
            batch_size: The total number of rows ``B``, a multiple of ``S``; static.
            beta: The strength of importance weights, which are ``batch.weights`` then; it may be
                traced.
            normalize: As for ``jaxbuf.importance_weights``; static.
            within: As for ``jaxbuf.importance_weights``; static.

        Returns:
            A ``Sample`` whose rows are sharded over the axis. Slots are numbered through all
            shards.

        Raises:
            ValueError: If ``batch_size`` is not a multiple of ``S``, ``key`` is not a single key,
                or ``beta``, ``normalize`` or ``within`` is not legal, or one of the last two is
                given without ``beta``.
        """
        rows = check_batch_size(batch_size)
        key = check_key(key)
        _check_multiple(f"batch_size is {rows}", rows, self.num_shards)
        batch = sampling.sample(self, key, rows)
        # A kernel would gather the rows of all devices on each of them.
        with native.called_from_python(False):
            return weighed(self, batch, beta, normalize, within)

    def route(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Performs an operation in each shard, with the slots of its own items.

        Raises:
            ValueError: As raised by one shard for all rows, or if these cannot be split among the
                shards.
        """
        if not operation.by_member:
            raise operation.lacking(
                self,
                "ask each shard, which is a buffer: "
                f"jax.vmap(lambda shard: shard.{operation.name}(...))(sharded.shards)",
            )
        shapes = on_shards.result_shapes(self.shards, operation, arguments)
        rows = on_shards.cast_arguments(self.shards, operation, arguments)
        if not operation.takes_slots:
            return on_shards.change_each(
                self, lambda shard, rows: operation.call_on(shard, arguments | rows), (rows,)
            )
        all_slots, mask = rows["slots"], rows.get("mask")
        self._check_rows("slots", all_slots.index.shape[0])
        if mask is not None and mask.ndim == 1:
            # Rows that are masked out travel as slots that are out of range.
            index = jnp.where(rows.pop("mask"), all_slots.index, self.capacity)
            rows["slots"], arguments = all_slots.replace(index=index), arguments | {"mask": None}

        def perform(shard: SampledBuffer, shard_id: Array, rows: dict[str, Any]) -> Any:
            inside = on_shards.shard_slots(rows["slots"], shard_id, shard.capacity)
            return operation.call_on(shard, arguments | rows | {"slots": inside})

        if operation.changes:
            return on_shards.change_rows(self, rows, perform)
        values = on_shards.read_rows(self, rows, perform)
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), values, shapes)

    def get(self, slots: Slots) -> Sample:
        slots = check_slots(slots)
        self._check_rows("slots", slots.index.shape[0])
        return sampling.get(self, slots)

    def highest(self, n: int, by: By | None = None) -> Sample:
        rows, by = draws.check_highest(self, n, by)
        draws.check_enough(rows, self.num_shards * self.shards.num_slots)
        _check_multiple(f"n is {rows}", rows, self.num_shards)
        return sampling.get(self, on_shards.best(self, rows, by))

    def slots_at(
        self, env_ids: Int[ArrayLike, "..."], positions: Integer[ArrayLike, "..."]
    ) -> Slots:
        self._need("slots_at", "environments")
        env, position, shape = broadcast_steps(env_ids, positions)
        self._check_rows("env_ids", env.shape[0])
        slots = on_shards.slots_at(self, env, position)
        return jax.tree.map(lambda leaf: leaf.reshape(shape), slots)

    def steps_around(
        self,
        slots: Slots,
        offsets: Sequence[int] | Int[ArrayLike, " K"],
        path: str | None = None,
    ) -> StepsAround:
        self._need("steps_around", "environments")
        slots, offset = check_slots(slots), jnp.asarray(check_offsets(offsets))
        self._check_rows("slots", slots.index.shape[0])
        return sampling.steps_around(self, slots, offset, path)

    def clear(self, envs: Envs = None) -> Self:
        if envs is None:
            return on_shards.change_each(self, lambda shard: shard.clear())
        return self._of_envs(
            "clear", envs, lambda shard, mask: shard.clear(mask), needs="environments"
        )

    def end_episodes(self, envs: Envs = None) -> Self:
        return self._of_envs("end_episodes", envs, lambda shard, mask: shard.end_episodes(mask))

    def drop_newest_episode(self, envs: Envs = None) -> Self:
        return self._of_envs(
            "drop_newest_episode", envs, lambda shard, mask: shard.drop_newest_episode(mask)
        )

    def metrics(self) -> dict[str, Array]:
        """Returns the metrics of all shards together, as scalars.

        Counts are summed, minima and maxima are taken over the shards, and means are weighted by
        size. ``effective_sample_size`` is left out, because it cannot be computed from the values
        of the shards. ``shard_size_min`` and ``shard_size_max`` are the sizes of the smallest and
        the largest shard. If they grow apart, see ``add``.
        """
        return on_shards.metrics(self)

    def _need(self, method: str, ability: str) -> None:
        """Checks that the shards have environments, or episodes.

        Raises:
            ValueError: If they do not.
        """
        lacks = {
            "environments": f"{checks.kind_of(self.shards)} has no environments; make shards that "
            "are a jaxbuf.TrajectoryBuffer",
            "episodes": "the shards know no episodes; create each with "
            "jaxbuf.TrajectoryBuffer.create(..., episodes=jaxbuf.Episodes())",
        }
        if ability not in self.abilities:
            raise ValueError(f"{method} was called, but {lacks[ability]}")

    def _of_envs(self, name: str, envs: Envs, change: Function, needs: str = "episodes") -> Self:
        """Returns the buffer after a change of environments, in the order of the rows of ``add``.

        On each device these are the environments of its own shards.
        """
        self._need(name, needs)
        mask = mask_of(envs, num_local(self.shards) * self.shards.num_envs)
        return on_shards.change_envs(self, mask, change)

    def _check_rows(self, name: str, rows: int, *, to_add: bool = False) -> None:
        """Raises ValueError if rows cannot be split evenly among the shards of this device."""
        count = num_local(self.shards)
        each = -(-rows // count)  # rows of a shard
        advice = f", or pad to {each * count} with rows that are masked out"
        if to_add:
            advice += "; block k goes to shard k, so "
            advice += (
                "put these into different shards"
                if self.shards.num_envs
                else "let the shards take turns: in call t, roll all leaves and the mask by "
                f"t % {count} * {each} rows"
            )
        _check_multiple(f"{name} has {rows} rows", rows, count, advice)


def _check_multiple(what: str, rows: int, count: int, advice: str = "") -> None:
    """Raises ValueError if the number of rows is not a multiple of the number of shards."""
    if rows % count:
        lower = rows // count * count
        raise ValueError(
            f"{what}, but there are {count} shards; make it a multiple of {count}, "
            f"such as {lower or count}{advice}"
        )
