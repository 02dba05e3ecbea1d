"""The accumulator of whole episodes, which assembles them step by step."""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, PyTree

from jaxbuf.accumulators.lanes import Lanes, at_a_time, check_line, shapes_of, write
from jaxbuf.buffers.arguments import check_step_mask, check_steps
from jaxbuf.core import fields, storage, trees
from jaxbuf.core.describe import Described
from jaxbuf.core.program import program
from jaxbuf.core.sizes import check_count
from jaxbuf.core.types import Arrays, Count, Numbers


class PaddedEpisode(Described):
    """An episode as one item, padded to a fixed length; or a batch of them.

    Attributes:
        steps: Leaves ``[max_length, ...]``, or ``[B, max_length, ...]``; zeros past the end.
        length: The number of real steps, which come first; ``[]`` or ``[B]`` int32.
    """

    steps: Arrays
    length: Int[Array, "..."]

    @property
    def mask(self) -> Bool[Array, "... L"]:
        """A mask of the real steps, ``[max_length]`` or ``[B, max_length]``."""
        longest = jax.tree.leaves(self.steps)[0].shape[self.length.ndim]
        step = jax.lax.broadcasted_iota(jnp.int32, (*self.length.shape, longest), self.length.ndim)
        return step < self.length[..., None]


class EpisodeAccumulator(Described):
    """Assembles the steps of ``num_envs`` environments into whole episodes.

    An episode ends with a step that is ``terminated`` or ``truncated``. An episode that reaches
    ``max_length`` steps without such a flag is cut and counted, and its later steps form another
    item. Neither flag is set in the last step of a piece that was cut, so a learner bootstraps from
    it as from a truncated step.

    Each ``add`` returns up to ``per_add`` complete episodes, oldest first, ready for
    ``ItemBuffer.add``. Other complete episodes wait in a queue; if the queue is full, an episode is
    lost and counted as ``refused``. Each ``add`` copies ``per_add`` padded episodes, complete or
    not, so the default depends on the number of steps that are added, and not only on the number of
    environments. If single steps are added and the defaults are used, no episode is lost while all
    of them have at least ``max_length / 32`` steps, even if those of all environments end at the
    same time. With shorter episodes and more than 16 environments, choose for ``per_add`` the
    average number of episodes that end in an ``add``, rounded up. With long rollouts of short
    episodes, choose for ``waiting`` the largest number of episodes that may end in one rollout.

    The accumulator is a single immutable pytree, like a buffer.

    Attributes:
        data: The steps, leaves ``[num_envs + waiting, max_length, ...]``.
        lanes: Records to which environment each row of ``data`` belongs, and which are complete.
        flags: Paths of the fields that end an episode.
        per_add: The largest number of episodes returned at a time, ``K``; None for the default.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> step = {"obs": jnp.float32(0), "terminated": jnp.bool_(False)}
        >>> accumulator = jaxbuf.EpisodeAccumulator.create(step, num_envs=2, max_length=4)
        >>> buffer = jaxbuf.ItemBuffer.create(accumulator.example, capacity=100)
        >>> rollout = {
        ...     "obs": jnp.arange(6.0).reshape(2, 3),
        ...     "terminated": jnp.array([[False, True, False], [False, False, False]]),
        ... }
        >>> accumulator, episodes, done = accumulator.add(rollout)
        >>> buffer = buffer.add(episodes, mask=done)
        >>> done.tolist(), episodes.steps["obs"][0].tolist(), episodes.mask[0].tolist()
        ([True, False], [0.0, 1.0, 0.0, 0.0], [True, True, False, False])
        >>> int(buffer.size)
        1
    """

    data: Arrays
    lanes: Lanes
    flags: tuple[str, ...] = struct.field(pytree_node=False)
    per_add: int | None = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        example: PyTree,
        num_envs: int,
        max_length: int,
        *,
        per_add: int | None = None,
        waiting: int | None = None,
        terminated: str = "terminated",
        truncated: str | None = None,
    ) -> Self:
        """Creates an empty accumulator.

        Args:
            example: One unbatched step of arrays or ``jax.ShapeDtypeStruct``.
            num_envs: The number of environments ``E``.
            max_length: The largest number of steps of an episode, ``L``.
            per_add: The largest number of episodes returned by one ``add``, ``K``. By default 16,
                or ``32 * num_envs * T / max_length`` if that is larger, and at most ``num_envs``.
            waiting: The largest number of complete episodes that are kept until they are returned,
                including episodes completed by the same ``add``; by default ``num_envs``, or
                ``per_add`` if that was given and is larger.
            terminated: Path of the flag of the last step of an episode; dots separate the names of
                nested fields.
            truncated: Path of the flag of steps at which an episode was truncated. The default is
                the field ``truncated`` next to ``terminated`` or, failing that, at the top level of
                a step, if there is one.

        Raises:
            ValueError: If a number is not an integer of at least 1, ``per_add`` is larger than
                ``waiting``, there are more than 2**30 steps, a flag is missing or not a bool, or
                ``example`` holds anything but arrays.
        """
        num_envs = check_count("num_envs", num_envs)
        max_length = check_count("max_length", max_length)
        per_add, waiting = check_line(num_envs, max_length, per_add, waiting)
        data = storage.allocate(
            example, (num_envs + waiting, max_length), ("max_length", max_length)
        )
        names = [("terminated", terminated)]
        truncated = fields.truncation(data, terminated, truncated)
        if truncated is not None:
            names.append(("truncated", truncated))
        for name, path in names:
            flag = fields.need(data, path, name, "the example has")
            if not isinstance(flag, jax.Array) or flag.dtype != np.bool_ or flag.ndim != 2:
                kind = "no array"
                if isinstance(flag, jax.Array):
                    kind = f"{flag.dtype} of shape {flag.shape[2:]}"
                raise ValueError(
                    f"{name} is {path!r}, which is {kind} in the example; expected one bool"
                )
        return cls(
            data=data,
            lanes=Lanes.create(num_envs, waiting, max_length),
            flags=tuple(path for _, path in names),
            per_add=per_add,
        )

    @property
    def num_envs(self) -> int:
        """The number of environments."""
        return self.lanes.lane.shape[-1]

    @property
    def max_length(self) -> int:
        """The largest number of steps of an episode."""
        return self.lanes.length

    @property
    def example(self) -> PaddedEpisode:
        """The shapes of an episode, as an example for ``ItemBuffer.create`` or ``Queue.create``."""
        length: PyTree = jax.ShapeDtypeStruct((), jnp.int32)
        return PaddedEpisode(steps=shapes_of(self.data), length=length)

    @property
    def filled(self) -> Int[Array, " E"]:
        """The number of steps in the open episode of each environment, ``[num_envs]``."""
        return self.lanes.filled

    @property
    def waiting(self) -> Count:
        """The number of complete episodes that have not been returned yet."""
        return self.lanes.waiting

    @program(stored=("steps",))
    def add(
        self, steps: Arrays, *, mask: Bool[Array, "..."] | None = None
    ) -> tuple[Self, PaddedEpisode, Bool[Array, " K"]]:
        """Appends one step or ``T`` steps to each environment, and returns complete episodes.

        Args:
            steps: The steps, leaves ``[num_envs, *shape]`` or ``[num_envs, T, *shape]`` with the
                example's dtypes.
            mask: A mask of the steps to add, ``[num_envs]`` or ``[num_envs, T]``; the added steps
                of a row keep their order.

        Returns:
            The new accumulator; up to ``per_add`` episodes, leaves ``[K, max_length, ...]``, in the
            order in which they were completed (at the same step: in the order of environments); and
            a mask of the rows that hold an episode, ``[K]``, which is the ``mask`` for
            ``ItemBuffer.add``.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example.
        """
        steps, added = self._check(steps, mask)
        if not added.shape[1]:
            return self.take()
        ends = jnp.zeros(added.shape, bool)
        for path in self.flags:
            ends |= fields.find(steps, path)
        lanes, target = self.lanes.place(added, ends)
        extended = self.replace(data=write(self.data, steps, target), lanes=lanes)
        return extended._take(added.size)

    @program()
    def take(self) -> tuple[Self, PaddedEpisode, Bool[Array, " K"]]:
        """Returns waiting episodes, as many as an ``add`` of single steps does."""
        return self._take(self.num_envs)

    def _take(self, rows: int) -> tuple[Self, PaddedEpisode, Bool[Array, " K"]]:
        """Returns as many of the waiting episodes as an ``add`` of so many steps does."""
        count = at_a_time(self.per_add, self.lanes, rows)
        lanes, lane, length, done = self.lanes.take(count)
        episodes = PaddedEpisode(steps=storage.read(self.data, lane), length=length)
        real = episodes.mask
        padded = jax.tree.map(
            lambda leaf: jnp.where(
                real.reshape(*real.shape, *(1,) * (leaf.ndim - 2)), leaf, jnp.zeros_like(leaf)
            ),
            episodes.steps,
        )
        return self.replace(lanes=lanes), episodes.replace(steps=padded), done

    @program()
    def drop(self, envs: Bool[Array, " E"]) -> Self:
        """Drops and counts the unfinished episodes of some environments.

        Args:
            envs: A mask of the environments, ``[num_envs]``.

        Raises:
            ValueError: When traced, if the shape or dtype differs.
        """
        envs = storage.check_rows(envs, "envs", (self.num_envs,), np.bool_, "(num_envs,)")
        return self.replace(lanes=self.lanes.drop(envs))

    @program()
    def clear(self) -> Self:
        """Returns an empty accumulator with the same counters, which shares no array with this."""
        data = jax.tree.map(jnp.zeros_like, self.data)
        return trees.in_place_of(self, self.replace(data=data, lanes=self.lanes.clear()))

    @program()
    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor.

        Returns:
            The numbers of ``steps`` in unfinished episodes and of episodes ``waiting``. Also counts
            since creation, which wrap at 2**32: completed ``episodes``; of these the episodes
            ``cut`` for their length, and ``refused`` because too many were waiting; and unfinished
            episodes ``dropped``.
        """
        counts = self.lanes.counts()
        return {
            "steps": jnp.sum(self.filled, axis=-1, dtype=jnp.int32),
            "waiting": self.waiting,
            "episodes": counts["complete"],
            "cut": counts["cut"],
            "refused": counts["refused"],
            "dropped": counts["dropped"],
        }

    def _check(self, steps: Arrays, mask: Numbers | None) -> tuple[Arrays, Bool[Array, "E T"]]:
        """Returns the steps as arrays ``[num_envs, T, *shape]``, and a mask of those to add."""
        steps, batch = check_steps(self.data, steps, self.num_envs, skip=2)
        return steps, check_step_mask(jnp.ones(batch, bool) if mask is None else mask, batch)
