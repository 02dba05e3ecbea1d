"""Time-ordered steps of several environments, sampled as windows."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt

from jaxbuf.buffers import common
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import storage
from jaxbuf.core.rings import Rings
from jaxbuf.core.slots import Slots
from jaxbuf.strategies.samplers import Support, Uniform, WindowSampler


class TrajectoryBuffer(struct.PyTreeNode):
    """The last ``length`` steps of each of ``num_envs`` environments.

    Every environment has a ring of its own with its own write position, so that any of them may be
    added to at any time. Samples are windows of ``sequence_length`` consecutive steps that never
    cross a write position: the newest ``sequence_length - 1`` steps of a ring become starts as
    later ones arrive. A window is stale as soon as its first step is overwritten.

    Like an ``ItemBuffer`` it is one immutable pytree, its configuration static, its methods pure.

    Attributes:
        data: The steps, leaves ``[num_envs, length, ...]``.
        occupancy: Which steps and windows there are.
        sampler_state: What the sampler keeps: one slot for each place where a window may start.
        counters: Steps added and priorities rejected so far, ``[2]`` uint32; they wrap.
        sampler: How windows are drawn.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> step = {"obs": jnp.zeros(3), "reward": jnp.float32(0)}
        >>> buffer = jaxbuf.TrajectoryBuffer.create(step, num_envs=4, length=100, sequence_length=8)
        >>> rollout = {"obs": jnp.ones((4, 20, 3)), "reward": jnp.ones((4, 20))}
        >>> buffer = buffer.add(rollout)
        >>> int(buffer.size), buffer.sample(jax.random.key(0), 32).data["obs"].shape
        (80, (32, 8, 3))
    """

    data: PyTree[Array]
    occupancy: Any
    sampler_state: Any
    counters: UInt[Array, " 2"]
    sampler: WindowSampler = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        example: PyTree,
        num_envs: int,
        length: int,
        *,
        sequence_length: int = 1,
        period: int = 1,
        sampler: WindowSampler = Uniform(),
    ) -> Self:
        """An empty buffer.

        Args:
            example: One unbatched step: arrays or ``jax.ShapeDtypeStruct``. Only shapes and dtypes
                matter.
            num_envs: Rings ``E``.
            length: Most steps held of each environment.
            sequence_length: Steps in a window.
            period: Windows start at multiples of it, counted from the beginning of the ring's
                memory; 1 allows every start, ``sequence_length`` makes windows disjoint.
            sampler: How windows are drawn.

        Raises:
            ValueError: If a number is no whole number from 1 on, a window is longer than a ring,
                ``length`` is no multiple of ``period``, there are more than 2**30 steps, the
                sampler needs scores, or ``example`` holds anything but arrays.
        """
        num_envs = common.check_count("num_envs", num_envs)
        length = common.check_count("length", length)
        sequence_length = common.check_count("sequence_length", sequence_length)
        period = common.check_count("period", period)
        if num_envs * length > 2**30:
            raise ValueError(
                f"num_envs * length is {num_envs * length}; expected at most 2**30 steps"
            )
        if sequence_length > length:
            raise ValueError(
                f"sequence_length is {sequence_length}, but a ring has length {length}; make "
                "windows shorter or rings longer"
            )
        if length % period:
            raise ValueError(
                f"length is {length} and period {period}; length must be a multiple of period"
            )
        if sampler.uses_score:
            raise ValueError(f"{sampler} needs scores, which steps do not have; choose another one")
        return cls(
            data=storage.allocate(example, (num_envs, length)),
            occupancy=Rings.create(num_envs, length, sequence_length, period),
            sampler_state=sampler.init(num_envs * (length // period)),
            counters=jnp.zeros((2,), jnp.uint32),
            sampler=sampler,
        )

    @property
    def num_envs(self) -> int:
        """Number of rings."""
        return self.occupancy.num_envs

    @property
    def length(self) -> int:
        """Most steps held of each environment."""
        return self.occupancy.length

    @property
    def sequence_length(self) -> int:
        """Steps in a window."""
        return self.occupancy.sequence_length

    @property
    def period(self) -> int:
        """Distance between the places where windows start."""
        return self.occupancy.period

    @property
    def capacity(self) -> int:
        """Most steps held at a time, ``num_envs * length``."""
        return self.num_envs * self.length

    @property
    def size(self) -> Int[Array, ""]:
        """Steps held now, of all environments together."""
        return self.occupancy.steps

    def can_sample(self, batch_size: int | Int[Array, ""] = 1) -> Bool[Array, ""]:
        """Whether there are at least ``batch_size`` windows."""
        return self.occupancy.size >= batch_size

    def add(
        self,
        steps: PyTree[Array],
        *,
        priority: Float[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | None = None,
    ) -> Self:
        """Append one step, or ``T`` of them, to each environment.

        Args:
            steps: Leaves ``[num_envs, *shape]`` or ``[num_envs, T, *shape]``, in the example's
                dtypes. Of more than ``length`` the last ones stay.
            priority: ``[num_envs]`` or ``[num_envs, T]``, each for the window that ends at that
                step; finite and not negative. Another becomes the default and is counted in
                ``metrics()["rejected"]``; the step stays. The default, also without priorities, is
                the larger of the sampler's ``initial_priority`` and the largest priority in the
                buffer.
            mask: Which steps to take, ``[num_envs]`` or ``[num_envs, T]``; those of a row keep
                their order, and the others cost no place and move no write position.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example, or if
                ``priority`` is given and the sampler does not use it.
        """
        steps, batch = self._check(steps)
        rows = batch[1] if len(batch) > 1 else 1
        axes = "(num_envs, T)" if len(batch) > 1 else "(num_envs,)"
        grid = (self.num_envs, rows)
        value, taken = None, None
        rejected = jnp.uint32(0)
        if mask is not None:
            whole_rows = len(batch) > 1 and jnp.ndim(mask) == 1
            shape = batch[:1] if whole_rows else batch
            taken = storage.check_rows(mask, "mask", shape, np.bool_, axes)
            taken = jnp.broadcast_to(taken.reshape(self.num_envs, -1), grid)
        if priority is not None:
            common.needs_priority(self.sampler, "priority was given")
            value = storage.check_rows(priority, "priority", batch, np.float32, axes).reshape(grid)
            refused = ~self.sampler.accepts(value)
            if taken is not None:
                refused &= taken
            rejected = jnp.sum(refused, dtype=jnp.uint32)
        if rows == 0:
            return self
        occupancy, target, broken, completed = self.occupancy.place(rows, taken)
        added = jnp.uint32(rows * self.num_envs)
        if taken is not None:
            added = jnp.sum(taken, dtype=jnp.uint32)
        return self.replace(
            data=_unfold(storage.write(_fold(self.data), _fold(steps), target.reshape(-1)), self),
            occupancy=occupancy,
            sampler_state=self.sampler.slid(
                self.sampler_state,
                completed.reshape(-1),
                None if value is None else value.reshape(-1),
                broken.reshape(-1),
            ),
            counters=self.counters + jnp.stack([added, rejected]),
        )

    def sample(self, key: PRNGKeyArray, batch_size: int) -> Sample:
        """Draw a batch of windows.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``; static.

        Returns:
            A ``Sample`` with leaves ``[B, sequence_length, ...]``, in order of time. Its shapes
            never depend on what the buffer holds: rows that cannot be drawn have ``valid`` False,
            probability 0 and index ``capacity``.

        Raises:
            ValueError: If ``batch_size`` is no whole number from 1 on.
        """
        draw = self.sampler.draw(
            self.sampler_state, key, common.check_batch_size(batch_size), self.occupancy
        )
        index = jnp.where(draw.valid, draw.index, self.capacity)
        return Sample(
            data=self._read(index),
            slots=Slots(index=index, generation=self.occupancy.generation(index)),
            probability=jnp.where(draw.valid, draw.probability, 0.0),
            valid=draw.valid,
        )

    def update_priority(
        self,
        slots: Slots,
        priority: Float[Array, " B"],
        *,
        mask: Bool[Array, " B"] | None = None,
    ) -> Self:
        """Set the priorities of sampled windows.

        Rows whose window has been overwritten since, in part or as a whole, invalid rows and masked
        ones are dropped. Of several rows for one window the last accepted one counts.

        Args:
            slots: Which windows: ``sample.slots``, ``[B]``.
            priority: Their new priorities, ``[B]``; a NaN, negative or infinite one is refused and
                counted in ``metrics()["rejected"]``.
            mask: Which rows to take, ``[B]``.

        Raises:
            ValueError: When traced, if the sampler has no priorities, or a shape differs.
        """
        state, rejected = common.set_priority(
            self.sampler,
            self.sampler_state,
            self.occupancy,
            slots,
            priority,
            mask,
            self.capacity,
        )
        return self.replace(
            sampler_state=state,
            counters=self.counters + jnp.stack([jnp.uint32(0), rejected]),
        )

    def clear(self) -> Self:
        """The buffer without its steps. Slots sampled before stay stale; counters go on.

        Shares no array with the original, so that either may be donated.
        """
        return self.replace(
            data=jax.tree.map(jnp.zeros_like, self.data),
            occupancy=self.occupancy.clear(),
            sampler_state=self.sampler.cleared(self.sampler_state),
            counters=self.counters.copy(),
        )

    def support(self) -> Support:
        """How many windows can be drawn, and the least probability among them."""
        return self.sampler.support(self.sampler_state, self.occupancy)

    def metrics(self) -> dict[str, Array]:
        """Numbers worth watching, all scalars: one pass over the slots, for logging.

        Returns:
            ``size`` in steps and ``windows`` that can be drawn; ``adds`` (steps) and ``rejected``,
            counted since creation and wrapping at 2**32; ``effective_sample_size`` (of the
            distribution drawn from, ``1 / Σ P²``); and with priorities ``priority_min``,
            ``priority_max`` and ``priority_mean`` of the windows, as their masses tell them.
        """
        return {
            "size": self.size,
            "windows": self.occupancy.size,
            "adds": self.counters[..., 0],
            "rejected": self.counters[..., 1],
            **self.sampler.metrics(self.sampler_state, self.occupancy),
        }

    def _read(self, index: Int[Array, " B"]) -> PyTree[Array]:
        """The windows at ``index``, leaves ``[B, sequence_length, ...]``."""
        rows = storage.read(_fold(self.data), self.occupancy.window(index).reshape(-1))
        leading = (index.shape[0], self.sequence_length)
        return jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[1:]), rows)

    def _check(self, steps: PyTree[Array]) -> tuple[PyTree[Array], tuple[int, ...]]:
        """The steps as arrays ``[num_envs, T, *shape]``, and the leading axes they came with."""
        stored, given = jax.tree.leaves(self.data)[0], jax.tree.leaves(steps)
        one = bool(given) and jnp.ndim(given[0]) == stored.ndim - 1
        axes = (self.num_envs,) if one else (self.num_envs, "T")
        steps, batch = storage.check(self.data, steps, "steps", axes, skip=2)
        if one:
            steps = jax.tree.map(lambda leaf: leaf[:, None], steps)
        return steps, batch


def _fold(data: PyTree[Array]) -> PyTree[Array]:
    """Leaves ``[E, T, ...]`` as ``[E * T, ...]``."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), data)


def _unfold(data: PyTree[Array], buffer: TrajectoryBuffer) -> PyTree[Array]:
    """The inverse of ``_fold`` for the storage of ``buffer``."""
    leading = (buffer.num_envs, buffer.length)
    return jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[1:]), data)
