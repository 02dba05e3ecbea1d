"""Lookups of the episodes in a buffer of steps."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from jaxbuf.buffers.common import check_slots
from jaxbuf.core import checks, numbers, trees
from jaxbuf.core.slots import Slots
from jaxbuf.occupancy.rings import Rings
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.episodes import EpisodeIndex, Episodes


class EpisodeLookups:
    """The lookups of a ``TrajectoryBuffer`` with ``Episodes``.

    Each of them takes either the slots of sampled windows, ``sample.slots``, and returns results
    for their first steps; or ``env_ids`` and ``positions`` of single steps, as returned by
    ``TrajectoryBuffer.locate``, of any shapes that broadcast. All of them raise a ``ValueError`` if
    the buffer was created without ``Episodes``.

    Attributes:
        data: The steps, leaves ``[num_envs, length, ...]``.
        occupancy: Records which steps and windows there are.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> step = {"terminated": jnp.bool_(False)}
        >>> buffer = jaxbuf.TrajectoryBuffer.create(
        ...     step, num_envs=1, length=8, episodes=jaxbuf.Episodes()
        ... )
        >>> buffer = buffer.add({"terminated": jnp.array([[False, True, False, False]])})
        >>> env_ids, positions = jnp.array([0]), jnp.arange(4)
        >>> buffer.episode_begin_position(env_ids, positions).tolist()
        [0, 0, 2, 2]
        >>> buffer.steps_to_episode_end(env_ids, positions).tolist()
        [1, 0, 1, 0]
        >>> buffer.is_episode_first(env_ids, positions).tolist()
        [True, False, True, False]
        >>> buffer.is_episode_last(env_ids, positions).tolist()
        [False, True, False, False]
        >>> slots = buffer.sample(jax.random.key(0), 32).slots
        >>> bool(jnp.all(buffer.steps_to_episode_end(slots) <= 1))
        True
    """

    data: PyTree[Array]
    occupancy: Any

    if TYPE_CHECKING:

        def _need(self, kind: type[Any], what: str = "") -> tuple[Any, Any]: ...

        def _windows_of(self, sequence_length: int | None) -> Self: ...

    @property
    def rings(self) -> Rings:
        """The rings of all steps and windows, including windows that are not drawn."""
        return self.occupancy.inner if isinstance(self.occupancy, Subset) else self.occupancy

    def episode_begin_position(
        self,
        where: Slots | Int[Array, "..."],
        positions: Int[Array, "..."] | None = None,
        *,
        held: bool = False,
    ) -> UInt[Array, "..."]:
        """Returns the position of the first step of the episode, which may have been overwritten.

        Args:
            where: ``sample.slots``, or ``env_ids``.
            positions: The positions of steps in these environments, with ``env_ids``.
            held: Whether to return the first step of the episode that is still held instead;
                static.

        Returns:
            Positions; the step's own position if it is not held.
        """
        first_held = checks.check_flag("held", held)
        query = EpisodeIndex.held_begin if first_held else EpisodeIndex.begin
        return self._look_up(query, where, positions)

    def last_terminated_position(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> UInt[Array, "..."]:
        """Returns the position of the last step, up to this one, with a discount of zero.

        That is a step whose flag ``Episodes.terminated`` is set: the last step of the episode or,
        with ``Episodes.last``, any step, for example at the loss of a life. It may have been
        overwritten.

        Args:
            where: ``sample.slots``, or ``env_ids``.
            positions: The positions of steps in these environments, with ``env_ids``.

        Returns:
            Positions; the position of the episode's first step if no step has terminated yet, and
            the step's own position if it is not held.

        References:
            ``get_disc_0_begin_position`` of ALF's replay buffer,
            https://github.com/HorizonRobotics/alf.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> step = {"life_lost": jnp.bool_(False), "over": jnp.bool_(False)}
            >>> episodes = jaxbuf.Episodes(terminated="life_lost", last="over")
            >>> buffer = jaxbuf.TrajectoryBuffer.create(step, 1, 8, episodes=episodes)
            >>> lost = jnp.array([[False, True, False, True, False]])
            >>> over = jnp.array([[False, False, False, True, False]])
            >>> buffer = buffer.add({"life_lost": lost, "over": over})
            >>> buffer.last_terminated_position(jnp.array([0]), jnp.arange(5)).tolist()
            [0, 1, 1, 3, 4]
        """
        query = functools.partial(EpisodeIndex.last_terminated, data=self.data)
        return self._look_up(query, where, positions)

    def steps_to_episode_end(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> Int[Array, "..."]:
        """Returns the number of steps that follow in the episode, up to the newest if it is open.

        Args:
            where: ``sample.slots``, or ``env_ids``.
            positions: The positions of steps in these environments, with ``env_ids``.

        Returns:
            Numbers of steps, at least 0; -1 if the step itself is not held.
        """
        return self._look_up(EpisodeIndex.remaining, where, positions)

    def is_episode_first(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> Bool[Array, "..."]:
        """Returns whether an episode began with this step; False if it is not held.

        Args:
            where: ``sample.slots``, or ``env_ids``.
            positions: The positions of steps in these environments, with ``env_ids``.
        """
        return self._look_up(EpisodeIndex.is_first, where, positions)

    def is_episode_last(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> Bool[Array, "..."]:
        """Returns whether an episode ended with this step; False if it is not held.

        Args:
            where: ``sample.slots``, or ``env_ids``.
            positions: The positions of steps in these environments, with ``env_ids``.
        """
        return self._look_up(EpisodeIndex.is_last, where, positions)

    def episode_return(
        self, where: Slots | Int[Array, "..."], positions: Int[Array, "..."] | None = None
    ) -> Float[Array, "..."]:
        """Returns the discounted return from this step to the end of its episode.

        Args:
            where: ``sample.slots``, or ``env_ids``.
            positions: The positions of steps in these environments, with ``env_ids``.

        Returns:
            Returns; ``Episodes.default_return`` if the episode is open or was truncated, or if the
            step is not held.

        Raises:
            ValueError: If the buffer was created without ``Episodes(record_return=True)``.
        """
        if not self._index().episodes.record_return:
            raise ValueError(
                "record_return is False; create the buffer with "
                "episodes=jaxbuf.Episodes(record_return=True)"
            )
        return self._look_up(EpisodeIndex.recorded, where, positions)

    def episode_mask(
        self, slots: Slots, *, sequence_length: int | None = None
    ) -> Bool[Array, "B S"]:
        """Returns a mask of the steps of sampled windows in the episode of the first step.

        Args:
            slots: ``sample.slots``, ``[B]``.
            sequence_length: The ``sequence_length`` passed to ``sample``, if any; static.

        Returns:
            A mask ``[B, sequence_length]``; all False for a window that is not held any more.

        Raises:
            ValueError: If the ``boundary`` is ``"cross"``.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> step = {"terminated": jnp.bool_(False)}
            >>> buffer = jaxbuf.TrajectoryBuffer.create(
            ...     step, 1, 4, sequence_length=4, episodes=jaxbuf.Episodes(boundary="mask")
            ... )
            >>> buffer = buffer.add({"terminated": jnp.array([[False, True, False, False]])})
            >>> buffer.episode_mask(buffer.sample(jax.random.key(0), 1).slots).tolist()
            [[True, True, False, False]]
        """
        self = trees.on_device(self)
        index = self._index()
        if index.episodes.boundary == "cross":
            raise ValueError(
                'boundary is "cross", whose windows are used as they are; create the buffer with '
                'episodes=jaxbuf.Episodes(boundary="mask")'
            )
        check_slots(slots)
        windows = self._windows_of(sequence_length)
        mask = index.together(windows.rings, slots.index)
        return mask & windows.occupancy.holds(slots)[:, None]

    def _index(self) -> EpisodeIndex:
        return lax.stop_gradient(self._need(Episodes)[1])

    def _look_up(self, query: Callable[..., Array], where: Any, positions: Any) -> Array:
        self = trees.on_device(self)
        index, rings = self._index(), self.rings
        if isinstance(where, Slots):
            check_slots(where, "where")
            if positions is not None:
                raise ValueError("positions were given with slots, which have their own")
            env, position = rings.starts_at(where.index, where.generation)
            return query(index, rings, env, position)
        if positions is None:
            raise ValueError("positions is None; give env_ids and positions, or slots")
        env, position, shape = broadcast_steps(where, positions, "where")
        return query(index, rings, env, position).reshape(shape)


def broadcast_steps(
    env_ids: Any, positions: Any, name: str = "env_ids"
) -> tuple[Int[Array, " B"], UInt[Array, " B"], tuple[int, ...]]:
    """Returns environments and positions of steps as flat arrays, and their broadcast shape.

    Args:
        env_ids: The environments of the steps.
        positions: The positions of the steps.
        name: The name of ``env_ids`` in an error.

    Raises:
        ValueError: If an argument does not hold integers, or the two do not broadcast.
    """
    env, position = numbers.integers(env_ids, name), numbers.array(positions, "positions")
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"positions has dtype {position.dtype}; expected integers")
    try:
        shape = jnp.broadcast_shapes(env.shape, position.shape)
    except ValueError as error:
        raise ValueError(
            f"{name} has shape {env.shape} and positions {position.shape}; expected shapes that "
            "broadcast"
        ) from error
    env = jnp.broadcast_to(env, shape).reshape(-1)
    position = jnp.broadcast_to(position, shape).reshape(-1).astype(jnp.uint32)
    return env, position, shape
