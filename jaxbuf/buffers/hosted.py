"""A buffer in the memory of the host, whose batches go to an accelerator."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbuf.buffers import common, ops
from jaxbuf.buffers.options import check_options
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import checks, describe, trees
from jaxbuf.core.calls import OwnPrograms, call, is_outside
from jaxbuf.core.slots import Slots
from jaxbuf.strategies.protocols import Support


@dataclasses.dataclass(frozen=True)
class _Contents:
    """How many items, or windows, there are."""

    size: Any


class Hosted(OwnPrograms, struct.PyTreeNode):
    """A buffer that lies on a CPU device of this process, while its batches go to an accelerator.

    The host usually has more memory than the accelerator. All of the buffer stays there and is
    updated in place, with the native kernels of the CPU; only batches travel. It gives the same
    batches as the buffer that ``make`` makes, bit for bit.

    The methods are those of the buffer inside, but they are called from Python: each runs a program
    of its own on the CPU, so ``jax.jit``, ``jax.lax.scan`` and ``jax.vmap`` cannot call them. What
    is passed to them may be on any device of this process. A method that changes the buffer
    consumes it, unless it is told ``donate=False``, and returns the one to go on with.

    **Drawing while the accelerator works.** JAX returns before a step is done. So draw the next
    batch after the step was called, and before its TD errors are asked for:

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

    Priorities are one step late this way, as the next batch is drawn before they are set. A row
    whose item has been overwritten in the meantime is dropped, as always. Keep keys on
    ``buffer.device``, as here: one that is computed on the accelerator is there only after the step
    before it, and the draw would wait for that.

    ``jaxbuf.save`` and ``jaxbuf.load`` take it like any other buffer, and its devices may be others
    when it is loaded. Give it to a ``jaxbuf.Holder`` where several threads use it.

    Attributes:
        buffer: The buffer itself; its arrays are on ``device``.
        to: The device that batches are put on, or the sharding that they get.
        device: The CPU device.

    References:
        Hoffman et al., Acme, 2020: batches that are fetched for the next step while the present one
        runs.
    """

    buffer: Any
    to: Any = struct.field(pytree_node=False, default=None)
    device: Any = struct.field(pytree_node=False, default=None)

    def __post_init__(self) -> None:
        # A function when users call the class; a buffer when JAX puts the fields together again.
        if callable(self.buffer):
            device = _cpu()
            object.__setattr__(self, "buffer", _make(self.buffer, device))
            object.__setattr__(self, "to", _check_to(self.to))
            object.__setattr__(self, "device", device)

    @classmethod
    def create(cls, make: Callable[[], Any], to: Any = None) -> Self:
        """An empty buffer in the memory of the host.

        ``Hosted(make, to)`` is the same.

        Args:
            make: Makes the buffer, such as ``lambda: jaxbuf.ItemBuffer.create(item, 10**6)``. It
                is called once, with the CPU as the default device.
            to: Where batches go: a device, or a sharding such as
                ``NamedSharding(mesh, PartitionSpec("data"))``, which splits their rows among
                several devices. By default the first device of this process.

        Raises:
            ValueError: If ``make`` is no function that makes a buffer to sample from, ``to`` is
                neither a device nor a sharding of rows, this process has no CPU device, or this is
                called inside of ``jax.jit`` or another transformation.
        """
        if not callable(make):
            raise ValueError(
                f"make is {checks.kind_of(make)}; expected a function that makes a buffer, such as "
                "lambda: jaxbuf.ItemBuffer.create(item, capacity)"
            )
        return cls(make, to=to)

    def __repr__(self) -> str:
        """Where it is and where batches go, and what is in the buffer."""
        inner = describe.text(self.buffer).replace("\n", "\n  ")
        return f"Hosted: on {self.device}, batches go to {self.to}\n  {inner}"

    @property
    def capacity(self) -> int:
        """Most items, or steps, held at a time."""
        return self.buffer.capacity

    @property
    def size(self) -> Int[Array, ""]:
        """Items, or steps, held now."""
        return self._call("_size", {})

    @property
    def occupancy(self) -> _Contents:
        """How many items, or windows, there are, as importance weights ask for it."""
        return _Contents(np.asarray(self._call("_count", {})))

    def can_sample(self, batch_size: int | Int[Array, ""] = 1) -> Bool[Array, ""]:
        """Whether there are at least ``batch_size`` items, or windows, that can be drawn."""
        return self._call("can_sample", {"batch_size": batch_size})

    def add(self, items: PyTree[Array], *, donate: bool = True, **options: Any) -> Self:
        """Add items, which are brought to the host.

        Args:
            items: What to add, as for the buffer inside.
            donate: False keeps this buffer usable, at the price of a copy of all it holds.
            **options: Those of the buffer's own ``add``.

        Returns:
            The buffer with the items.

        Raises:
            ValueError: As ``jaxbuf.add``, or if this is called inside of ``jax.jit`` or another
                transformation.
        """
        items, options = self._here("add", (items, options))
        return self.replace(buffer=ops.add(self.buffer, items, donate=donate, **options))

    def sample(self, key: PRNGKeyArray, batch_size: int, **options: Any) -> Sample:
        """Draw a batch on the host, and send it to where batches go.

        Args:
            key: A PRNG key, best on ``device``.
            batch_size: Rows ``B``.
            **options: Those of the buffer's own ``sample``.

        Returns:
            A ``Sample`` of ``B`` rows with all of its arrays on ``to``. It may still be on its way.

        Raises:
            ValueError: As ``jaxbuf.sample``, if the devices of ``to`` cannot share so many rows
                equally, or if this is called inside of ``jax.jit`` or another transformation.
        """
        key, options = self._here("sample", (key, options))
        self._check_rows(common.check_batch_size(batch_size))
        return jax.device_put(ops.sample(self.buffer, key, batch_size, **options), self.to)

    def next_batch(
        self, key: PRNGKeyArray, batch_size: int, *, donate: bool = True
    ) -> tuple[Self, Sample]:
        """Draw the next batch of a pass on the host, and send it to where batches go.

        Args:
            key: A PRNG key, best on ``device``.
            batch_size: Rows ``B``.
            donate: False keeps this buffer usable, at the price of a copy of all it holds.

        Returns:
            The buffer to go on with, and a ``Sample`` with all of its arrays on ``to``.

        Raises:
            ValueError: As ``jaxbuf.next_batch`` and ``sample``.
        """
        key = self._here("next_batch", key)
        self._check_rows(common.check_batch_size(batch_size))
        buffer, batch = ops.next_batch(self.buffer, key, batch_size, donate=donate)
        return self.replace(buffer=buffer), jax.device_put(batch, self.to)

    def sample_range(
        self,
        key: PRNGKeyArray,
        batch_size: int,
        start: int | Int[Array, ""] | None = None,
        stop: int | Int[Array, ""] | None = None,
        *,
        by_priority: bool = False,
        replacement: bool = False,
    ) -> Sample:
        """Draw a batch from a range of ages, as ``sample_range`` of the buffer inside does."""
        rows = common.check_batch_size(batch_size)
        self._check_rows(rows)
        batch = self._call(
            "sample_range",
            {"key": key, "start": start, "stop": stop},
            batch_size=rows,
            by_priority=checks.check_flag("by_priority", by_priority),
            replacement=checks.check_flag("replacement", replacement),
        )
        return jax.device_put(batch, self.to)

    def latest(self, n: int) -> Sample:
        """The ``n`` newest items, or windows of every ring, as of the buffer inside."""
        n = common.check_count("n", n)
        self._check_rows(n * getattr(self.buffer, "num_envs", 1))
        return jax.device_put(self._call("latest", {}, n=n), self.to)

    def update_priority(
        self, slots: Slots, priority: Float[Array, " B"], *, donate: bool = True, **options: Any
    ) -> Self:
        """Set priorities of sampled items, which are brought to the host.

        Args:
            slots: Which items: ``sample.slots``, ``[B]``.
            priority: The new priorities, ``[B]``.
            donate: False keeps this buffer usable, at the price of a copy of all it holds.
            **options: Those of the buffer's own ``update_priority``.

        Returns:
            The buffer with the new priorities.

        Raises:
            ValueError: As ``jaxbuf.update_priority``, or if this is called inside of ``jax.jit`` or
                another transformation.
        """
        given = (slots, priority, options)
        slots, priority, options = self._here("update_priority", given)
        buffer = ops.update_priority(self.buffer, slots, priority, donate=donate, **options)
        return self.replace(buffer=buffer)

    def mark_used(
        self, slots: Slots, *, mask: Bool[Array, " B"] | None = None, donate: bool = True
    ) -> Self:
        """Count a use of each sampled item, as ``mark_used`` of a buffer with ``Freshness``."""
        return self._change("mark_used", {"slots": slots, "mask": mask}, donate)

    def set_version(
        self,
        version: int | Int[Array, ""],
        session: int | Int[Array, ""] | None = None,
        *,
        donate: bool = True,
    ) -> Self:
        """Tell the learner's version, as ``set_version`` of a buffer with ``Freshness``."""
        return self._change("set_version", {"version": version, "session": session}, donate)

    def use_count(self, slots: Slots) -> Int[Array, " B"]:
        """How often each sampled item was used, ``[B]``, on ``device``."""
        return self._call("use_count", {"slots": slots})

    def staleness(self, slots: Slots) -> Int[Array, " B"]:
        """How many versions each sampled item is behind, ``[B]``, on ``device``."""
        return self._call("staleness", {"slots": slots})

    def clear(self, *, donate: bool = True) -> Self:
        """The buffer without its items. Slots sampled before stay stale; counters go on."""
        return self._change("clear", {}, donate)

    def support(self) -> Support:
        """How many items can be drawn, and the least probability among them, as NumPy scalars.

        These fit arrays of any device, which ``jaxbuf.importance_weights`` needs.
        """
        count, least = self._call("_support", {})
        return Support(np.asarray(count), np.asarray(least))  # pyright: ignore[reportArgumentType]

    def metrics(self) -> dict[str, Array]:
        """Numbers worth watching, those of the buffer inside; scalars on ``device``."""
        return self._call("metrics", {})

    def _call(self, method: str, given: dict[str, Any], donate: bool = False, **static: Any) -> Any:
        """What a method of the buffer says of arguments that are traced and others that are not."""
        given = self._here(method, given)
        if method not in _OTHERS:
            check_options(self.buffer, method, {})
        named = tuple(sorted(static.items()))
        return call(_method, self.buffer, method, given, named, static=(1, 3), donate=donate)

    def _change(self, method: str, given: dict[str, Any], donate: bool) -> Self:
        donate = checks.check_flag("donate", donate)
        return self.replace(buffer=self._call(method, given, donate))

    def _here(self, method: str, tree: Any) -> Any:
        """The tree with its arrays on the CPU device.

        Raises:
            ValueError: If something is being traced, or an array is not on devices of this process.
        """
        method = method.lstrip("_")
        if not is_outside():
            raise ValueError(
                f"{method} was called inside of jax.jit or another transformation, but a Hosted "
                "buffer is called from Python; sample before your jitted step and pass it the "
                "batch, or use the buffer without Hosted there"
            )
        trees.leaves(tree, f"the argument of {method}")

        # Given a device only, an array that was split over an explicit mesh would keep its type.
        here = jax.sharding.SingleDeviceSharding(self.device)

        def bring(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):
                return leaf
            if not leaf.is_fully_addressable:
                raise ValueError(
                    f"{method} got an array on devices of other processes; pass the rows that are "
                    "on this process, such as those of its addressable_shards"
                )
            return jax.device_put(leaf, here)

        return jax.tree.map(bring, tree)

    def _check_rows(self, rows: int) -> None:
        """Refuse batches that cannot be split.

        Raises:
            ValueError: If the devices of ``to`` cannot share so many rows equally.
        """
        if isinstance(self.to, jax.sharding.Sharding):
            try:
                self.to.shard_shape((rows,))
            except ValueError as error:
                raise ValueError(
                    f"the batch has {rows} rows, which the sharding {self.to} cannot split equally "
                    "among its devices; ask for a multiple of their number"
                ) from error


def _method(buffer: Any, method: str, given: dict[str, Any], static: Any) -> Any:
    if method in _OTHERS:
        return _OTHERS[method](buffer)
    return getattr(buffer, method)(**given, **dict(static))


def _support(buffer: Any) -> tuple[Array, Array]:
    support = buffer.support()
    return support.count, support.least_probability


_OTHERS: dict[str, Callable[[Any], Any]] = {
    "_size": lambda buffer: buffer.size,
    "_count": lambda buffer: buffer.occupancy.size,
    "_support": _support,
}


def _cpu() -> Any:
    """A CPU device of this process.

    Raises:
        ValueError: If there is none.
    """
    if not is_outside():
        raise ValueError(
            "Hosted was created inside of jax.jit or another transformation; create it in Python, "
            "before your loop"
        )
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "this process has no CPU device for a Hosted buffer; name it beside the accelerator in "
            'jax_platforms, as in JAX_PLATFORMS="cuda,cpu"'
        ) from error


def _make(make: Callable[[], Any], device: Any) -> Any:
    """The buffer, committed to the device.

    Raises:
        ValueError: If it is no buffer to sample from.
    """
    with jax.default_device(device):
        buffer = make()
    check_options(buffer, "sample", {}, "what make returns")
    if isinstance(buffer, OwnPrograms):
        raise ValueError("make returns a Hosted buffer; return the buffer itself")
    return jax.device_put(buffer, device)


def _check_to(to: Any) -> Any:
    """Where batches go.

    Raises:
        ValueError: If it is no device, and no sharding of rows.
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
