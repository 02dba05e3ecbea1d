"""A buffer in host memory that sends its batches to an accelerator."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, PyTree

from jaxbuf.buffers import doors
from jaxbuf.buffers.arguments import check_batch_size, check_slots
from jaxbuf.buffers.buffer import Share, as_buffer, check_options
from jaxbuf.buffers.operation import Operation
from jaxbuf.buffers.sample import Contents, Sample
from jaxbuf.buffers.slotted import SlottedBuffer
from jaxbuf.core import checks, trees
from jaxbuf.core.describe import Described, text
from jaxbuf.core.program import OwnPrograms, is_outside, no_mesh
from jaxbuf.core.types import Count, Flag
from jaxbuf.strategies.protocols import Support

Result = TypeVar("Result")


class Hosted(OwnPrograms, SlottedBuffer, Described):
    """A buffer on a CPU device of this process that sends its batches to an accelerator.

    The host usually has more memory than the accelerator. The whole buffer stays on the host, where
    it is updated in place by the native CPU kernels; only batches are transferred. The batches are
    bitwise equal to those of the buffer that ``make`` returns.

    It has the operations of the buffer inside, and ``apply`` and ``read`` for anything else. They
    must be called from Python: each of them runs its own program on the CPU, so they cannot be
    called within ``jax.jit``, ``jax.lax.scan`` or ``jax.vmap``. Arguments may be on any device of
    this process. A sample is sent to ``to``, where its transfer may still be in progress; all other
    results stay on ``device``. A method that changes the buffer returns the new buffer and consumes
    the old one: ``jaxbuf.add(buffer, items, donate=False)`` and the like keep it.

    **Drawing while the accelerator works.** JAX dispatches a step asynchronously. Draw the next
    batch after calling the step and before using its TD errors:

    >>> import jax, jax.numpy as jnp, jaxbuf
    >>> item = {"obs": jnp.zeros(3), "reward": jnp.float32(0)}
    >>> buffer = jaxbuf.Hosted.create(
    ...     lambda: jaxbuf.ItemBuffer.create(item, 10_000, sampler=jaxbuf.Prioritized())
    ... )
    >>> buffer = jaxbuf.add(buffer, {"obs": jnp.ones((64, 3)), "reward": jnp.arange(64.0)})
    >>> train = jax.jit(lambda w, data: (w + 0.01, jnp.abs(data["obs"] @ w - data["reward"])))
    >>> w, key = jnp.zeros(3), jax.device_put(jax.random.key(0), buffer.device)
    >>> batch = jaxbuf.sample(buffer, key, 16)
    >>> for step in range(1, 4):
    ...     w, td_error = train(w, batch.data)  # the accelerator begins with this
    ...     following = jaxbuf.sample(buffer, jax.random.fold_in(key, step), 16)  # meanwhile
    ...     buffer = jaxbuf.update_priority(buffer, batch.slots, td_error)  # waits for the step
    ...     batch = following

    Priorities are then one step late, because the next batch is drawn before they are set. A row
    whose item has been overwritten in the meantime is dropped, as always. Keep keys on
    ``buffer.device``, as in this example: a key that is computed on the accelerator is available
    only after the step before it, and the draw would wait for that.

    ``jaxbuf.save`` and ``jaxbuf.load`` accept it like any other buffer, and it may be loaded onto
    other devices. If several threads use it, put it into a ``jaxbuf.Holder``.

    Attributes:
        buffer: The buffer itself; its arrays are on ``device``.
        to: The device or the sharding of the batches.
        device: The CPU device.

    References:
        Hoffman et al., Acme, 2020, which fetches the batch of the next step while the present step
        runs.
    """

    buffer: Any
    to: Any = struct.field(pytree_node=False, default=None)
    device: Any = struct.field(pytree_node=False, default=None)

    runs_in_programs = False

    def __post_init__(self) -> None:
        # Users pass a function; JAX passes the buffer when it unflattens the pytree.
        if callable(self.buffer):
            device = _cpu()
            object.__setattr__(self, "buffer", _make(self.buffer, device))
            object.__setattr__(self, "to", _check_to(self.to))
            object.__setattr__(self, "device", device)

    @classmethod
    def create(cls, make: Callable[[], Any], to: Any = None) -> Self:
        """Creates an empty buffer in host memory; ``Hosted(make, to)`` does the same.

        Args:
            make: A function that creates the buffer, such as
                ``lambda: jaxbuf.ItemBuffer.create(item, 10**6)``. It is called once, with the CPU
                as the default device.
            to: The destination of batches: a device, or a sharding such as
                ``NamedSharding(mesh, PartitionSpec("data"))``, which splits their rows among
                several devices. By default the first device of this process.

        Raises:
            ValueError: If ``make`` is not a function that returns a buffer with ``sample``, ``to``
                is neither a device nor a sharding of rows, or this process has no CPU device.

        Example:
            ``jax.eval_shape`` gives the shapes for ``jaxbuf.load``, which take no memory.

            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> make = lambda: jaxbuf.ItemBuffer.create(jnp.float32(0), capacity=10**9)
            >>> like = jax.eval_shape(lambda: jaxbuf.Hosted.create(make))
            >>> like.buffer.data
            ShapeDtypeStruct(shape=(1000000000,), dtype=float32)
        """
        if not callable(make):
            raise ValueError(
                f"make is {checks.kind_of(make)}; expected a function that makes a buffer, such as "
                "lambda: jaxbuf.ItemBuffer.create(item, capacity)"
            )
        return cls(make, to=to)

    def __repr__(self) -> str:
        """Describes the devices and the buffer inside."""
        inner = text(self.buffer).replace("\n", "\n  ")
        return f"Hosted: on {self.device}, batches go to {self.to}\n  {inner}"

    @property
    def home(self) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(self.device)

    @property
    def capacity(self) -> int:
        """The largest number of items, or steps, that the buffer can hold."""
        return self.buffer.capacity

    @property
    def size(self) -> Count:
        """The number of items, or steps, that the buffer holds."""
        return self.read(operator.attrgetter("size"))

    def inside(self) -> tuple[Any, int]:
        return as_buffer(self.buffer).inside()

    def check_room(self, asks: str, rows: int, sequence_length: int | None = None) -> None:
        as_buffer(self.buffer).check_room(asks, rows, sequence_length)

    def shares(self, rows: int) -> list[Share]:
        """Returns the buffers that a batch comes from, each of them hosted."""
        # NumPy's numbers, as in ``support``.
        shares = [
            share._replace(fraction=jax.tree.map(np.asarray, share.fraction))
            for share in as_buffer(self.buffer).shares(rows)
        ]
        return [
            share if share.buffer is None else share._replace(buffer=self._with(share.buffer))
            for share in shares
        ]

    @property
    def occupancy(self) -> Contents:
        """An object whose ``size`` is the number of items, or windows, for importance weights."""
        count = np.asarray(self.read(operator.attrgetter("occupancy.size")))
        return Contents(count)  # pyright: ignore[reportArgumentType]

    def can_sample(self, batch_size: int | Count = 1) -> Flag:
        """Returns whether at least ``batch_size`` items, or windows, can be drawn."""
        return self.read(lambda buffer, count: buffer.can_sample(count), batch_size)

    def apply(
        self, function: Callable[..., tuple[Any, Result]], *arguments: PyTree
    ) -> tuple[Self, Result]:
        """Changes the buffer inside: ``buffer, result = function(buffer, *arguments)``.

        Args:
            function: Returns the new buffer and a result. It is called from Python each time, not
                traced, with the CPU as the device of its arrays; functions of ``jaxbuf`` update the
                buffer in place there.
            arguments: Pytrees, whose arrays are transferred to the host.

        Returns:
            The new ``Hosted``, and the result, whose arrays stay on ``device``.

        Raises:
            ValueError: If this is called inside of ``jax.jit`` or another transformation.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> rings = jaxbuf.Hosted.create(
            ...     lambda: jaxbuf.TrajectoryBuffer.create(jnp.int32(0), num_envs=2, length=8)
            ... )
            >>> rings = jaxbuf.add(rings, jnp.arange(6).reshape(2, 3))
            >>> rings, steps = rings.apply(lambda buffer: jaxbuf.dequeue(buffer, 2))
            >>> steps.data.tolist(), int(rings.size)
            ([[0, 1], [3, 4]], 2)
        """
        arguments = self._on_host("apply", arguments)
        with no_mesh():
            buffer, result = function(self.buffer, *arguments)
        return self.replace(buffer=buffer), result

    def read(self, function: Callable[..., Result], *arguments: PyTree) -> Result:
        """Returns ``function(buffer, *arguments)`` of the buffer inside, as in ``apply``.

        Raises:
            ValueError: If this is called inside of ``jax.jit`` or another transformation.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> rings = jaxbuf.Hosted.create(
            ...     lambda: jaxbuf.TrajectoryBuffer.create(jnp.int32(0), num_envs=2, length=8)
            ... )
            >>> rings = jaxbuf.add(rings, jnp.arange(6).reshape(2, 3))
            >>> rings.read(lambda buffer: buffer.end_position).tolist()
            [3, 3]
        """
        arguments = self._on_host("read", arguments)
        with no_mesh():
            return function(self.buffer, *arguments)

    def route(self, operation: Operation, arguments: dict[str, Any], *, donate: bool = True) -> Any:
        """Performs an operation of the buffer inside, with its arguments on the CPU device.

        Args:
            operation: The operation.
            arguments: Its arguments by name.
            donate: Whether it may overwrite the buffer. Methods do; ``jaxbuf.add`` and the other
                functions take it as an option.

        Raises:
            ValueError: As raised by the buffer inside, if this is called inside of ``jax.jit`` or
                another transformation, or if the rows of a sample cannot be split equally among the
                devices of ``to``.
        """
        arguments = self._on_host(operation.name, arguments)
        if operation.takes_slots:
            check_slots(arguments["slots"])
        if operation.rows is not None and operation.changes:
            # A later error would come after the buffer was donated.
            self._check_rows(check_batch_size(arguments[operation.rows]))
        args, options = operation.split(arguments)
        if operation.changes:
            options["donate"] = donate
        send = self._send if operation.rows is not None else lambda result: result
        with no_mesh():
            result = doors.call(operation.declared, self.buffer, *args, **options)
        if not operation.changes:
            return send(result)
        if not isinstance(result, tuple):
            return self._with(result)
        buffer, result = result
        return self._with(buffer), send(result)

    @property
    def hyperparameters(self) -> dict[str, Array]:
        """The varying hyperparameters of the sampler, on ``device``."""
        return self.buffer.hyperparameters

    def support(self) -> Support:
        # NumPy's numbers can be combined with arrays on any device, as importance weights require.
        return jax.tree.map(np.asarray, self.read(lambda buffer: buffer.support()))

    def _with(self, buffer: Any) -> Self:
        """Returns it with another state of the buffer inside, which needs no check."""
        return dataclasses.replace(self, buffer=buffer)

    def _send(self, sample: Sample) -> Sample:
        """Returns a sample that is transferred to ``to``."""
        self._check_rows(sample.valid.shape[0])
        return jax.device_put(sample, self.to)

    def _on_host(self, method: str, tree: PyTree) -> PyTree:
        """Returns the tree with its arrays on the CPU device.

        Raises:
            ValueError: If called inside of a transformation, or if an array is not on devices of
                this process.
        """
        if not is_outside():
            raise ValueError(
                f"{method} was called inside of jax.jit or another transformation, but a Hosted "
                "buffer is called from Python; sample before your jitted step and pass it the "
                "batch, or use the buffer without Hosted there"
            )
        trees.flatten(tree, f"the argument of {method}")

        # With a device instead of a sharding, an array that is split over a mesh with explicit axes
        # would keep its sharding in its type.
        host = self.home

        def move(leaf: object) -> object:
            if not isinstance(leaf, jax.Array):
                return leaf
            if not leaf.is_fully_addressable:
                raise ValueError(
                    f"{method} got an array on devices of other processes; pass the rows that are "
                    "on this process, such as those of its addressable_shards"
                )
            return jax.device_put(leaf, host)

        return jax.tree.map(move, tree)

    def _check_rows(self, rows: int) -> None:
        """Checks that a batch can be split among the devices of ``to``.

        Raises:
            ValueError: If the rows cannot be split equally.
        """
        if isinstance(self.to, jax.sharding.Sharding):
            try:
                self.to.shard_shape((rows,))
            except ValueError as error:
                raise ValueError(
                    f"the batch has {rows} rows, which the sharding {self.to} cannot split equally "
                    "among its devices; ask for a multiple of their number"
                ) from error


def _cpu() -> Any:
    """Returns a CPU device of this process.

    Raises:
        ValueError: If this process has no CPU device.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "this process has no CPU device for a Hosted buffer; name it next to the accelerator "
            'in jax_platforms, as in JAX_PLATFORMS="cuda,cpu"'
        ) from error


def _make(make: Callable[[], Any], device: Any) -> Any:
    """Creates the buffer, and commits it to the device.

    Raises:
        ValueError: If it is not a buffer with ``sample``.
    """
    with no_mesh(), jax.default_device(device):
        buffer = make()
    check_options(buffer, "sample", {}, "what make returns")
    if not as_buffer(buffer).runs_in_programs:
        raise ValueError("make returns a Hosted buffer; return the buffer itself")
    if not as_buffer(buffer).on_one_device:
        raise ValueError(
            f"make returns {checks.kind_of(buffer)}, which is spread over the devices of a mesh, "
            "but a Hosted buffer is on one CPU device; return the buffer of one shard"
        )
    return jax.device_put(buffer, device)


def _check_to(to: object) -> Any:
    """Returns the checked destination of batches, by default the first device.

    Raises:
        ValueError: If it is neither a device nor a sharding of rows.
    """
    if to is None:
        return jax.local_devices()[0]
    if not isinstance(to, jax.Device | jax.sharding.Sharding):
        raise ValueError(
            f"to is {checks.kind_of(to)}; expected a device, such as jax.devices()[0], or a "
            "sharding, such as jax.sharding.NamedSharding(mesh, PartitionSpec('data'))"
        )
    if isinstance(to, jax.sharding.NamedSharding) and len(to.spec) > 1:
        raise ValueError(
            f"to has the spec {to.spec}, but batches can be split by their rows only; expected one "
            "axis, such as PartitionSpec('data')"
        )
    return to
