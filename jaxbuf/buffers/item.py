"""A set of independent items in slots."""

import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxbuf.buffers import events, retire
from jaxbuf.buffers.arguments import (
    check_evictor,
    check_num_rows,
    check_numbers,
    check_parts,
    check_removes,
    check_sampler,
    check_version_used,
    needs_order,
    needs_priority,
)
from jaxbuf.buffers.operation import Operation
from jaxbuf.buffers.sample import Normalization, Sample, Within, weighed
from jaxbuf.buffers.sampled import SampledBuffer, refuse
from jaxbuf.buffers.slotted import Envs
from jaxbuf.core import guesses, sizes, storage, trees
from jaxbuf.core.donation import check_readable
from jaxbuf.core.order import after
from jaxbuf.core.program import program
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Flag, Floats, Index, Key, Mask, Number, Numbers
from jaxbuf.occupancy.protocol import ItemOccupancy, Occupancy
from jaxbuf.strategies.diversity import Diversity
from jaxbuf.strategies.evictors import Oldest
from jaxbuf.strategies.freshness import Freshness
from jaxbuf.strategies.part import Part, Rows
from jaxbuf.strategies.protocols import Evictor, Sampler
from jaxbuf.strategies.uniform import Uniform


class ItemBuffer(SampledBuffer):
    """Up to ``capacity`` independent items: transitions, whole padded trajectories, states.

    The buffer is a single immutable pytree with static configuration, so it can be passed through
    ``jit``, ``scan``, ``vmap`` and checkpoints like any other pytree. Its methods are pure and
    return new buffers. ``jaxbuf.add``, ``jaxbuf.sample`` and ``jaxbuf.update_priority`` are jitted
    versions of them.

    Attributes:
        data: The items, leaves ``[capacity, ...]``.
        occupancy: Records which slots are live.
        sampler_state: The state of the sampler.
        counters: The numbers of items added, rows rejected, and rows refused for other reasons so
            far, in the order of ``counter_names``, ``[K]`` uint32, which wrap.
        extra_states: The state of each of the extras.
        sampler: The sampler, which draws items.
        hyperparameters: The varying hyperparameters of the sampler, by name; see
            ``jaxbuf.Varying``.
        extras: The parts besides sampler and evictor: limits on freshness, a diversity filter, and
            your own parts.
        evictor: The evictor, which makes room for new items.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> item = {"obs": jnp.zeros(3), "reward": jnp.float32(0)}
        >>> buffer = jaxbuf.ItemBuffer.create(item, capacity=100)
        >>> buffer = buffer.add({"obs": jnp.ones((8, 3)), "reward": jnp.arange(8.0)})
        >>> int(buffer.size), buffer.sample(jax.random.key(0), 32).data["obs"].shape
        (8, (32, 3))
    """

    occupancy: ItemOccupancy  # pyright: ignore[reportIncompatibleVariableOverride]
    evictor: Evictor = struct.field(pytree_node=False)

    @classmethod
    @sizes.allocating("what the buffer keeps of its items")
    @guesses.answered
    def create(
        cls,
        example: PyTree,
        capacity: int,
        *,
        sampler: Sampler = Uniform(),
        evictor: Evictor = Oldest(),
        freshness: Freshness | None = None,
        diversity: Diversity | None = None,
        parts: tuple[Part, ...] = (),
    ) -> Self:
        """Creates an empty buffer.

        The memory that is left is looked at outside of transformations only: under ``jax.vmap`` ask
        ``jax.eval_shape`` for the size of all members together.

        Args:
            example: One unbatched item of arrays or ``jax.ShapeDtypeStruct``. Only shapes and
                dtypes matter.
            capacity: The largest number of items that the buffer can hold.
            sampler: Draws items.
            evictor: Chooses the items that make room for new ones.
            freshness: Retires items that were used often enough or are too stale; None disables it.
            diversity: Refuses new items that are too close to others; None disables it.
            parts: More parts: ``jaxbuf.Removable()``, or your own, which derive from
                ``jaxbuf.strategies.Part``. ``freshness`` and ``diversity`` may stand here as well.

        Raises:
            ValueError: If ``capacity`` is not an integer in ``[1, 2**30]``, ``example`` holds
                anything but arrays or needs more memory than is available, ``diversity`` compares a
                field that items do not have, a part is for windows, or the sampler needs an order
                of age that the evictor does not keep.
        """
        capacity = sizes.check_count("capacity", capacity)
        check_sampler(sampler)
        check_evictor(evictor)
        extras = check_parts(parts, freshness=freshness, diversity=diversity)
        for part in extras:
            if not part.of_items:
                raise ValueError(f"an ItemBuffer cannot have {part}, which is a part for windows")
        data = storage.allocate(example, (capacity,), ("capacity", capacity))
        return cls._empty(sampler, extras, data, evictor.init(capacity), evictor=evictor)

    @staticmethod
    def check_fit(sampler: Sampler, extras: tuple[Part, ...], occupancy: Occupancy) -> None:
        if any(part.removes for part in extras):
            check_removes(sampler, "an item retires")
        if sampler.uses_age:
            needs_order(occupancy, f"{sampler}")
        if events.uses_episodes(sampler):
            raise ValueError(
                f"{sampler} needs episodes, which an ItemBuffer does not know; use a "
                "TrajectoryBuffer with episodes=jaxbuf.Episodes()"
            )

    @property
    def live(self) -> Bool[Array, " N"]:
        """A mask of the slots that hold an item, ``[capacity]``; ``size`` is their number.

        Items leave in many ways: they are overwritten, have been used often enough, or become too
        stale. The items that are live now show which ones have left. For example, if items refer to
        rows of a ``Store``, rows that no live item refers to can be deleted:

        >>> import jax.numpy as jnp, numpy as np, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"row": jnp.int32(0)}, capacity=2)
        >>> stored = np.arange(5)
        >>> buffer = buffer.add({"row": jnp.arange(5)})
        >>> np.setdiff1d(stored, buffer.data["row"][buffer.live]).tolist()
        [0, 1, 2]
        """
        check_readable(self)
        return trees.on_device(self.occupancy).live(jnp.arange(self.capacity, dtype=jnp.int32))

    @program(keeps=("data",))
    def can_sample(self, batch_size: int | Count = 1) -> Flag:
        """Returns whether at least ``batch_size`` items can be drawn."""
        return self.support().count >= check_num_rows(batch_size)

    def add(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        items: Arrays,
        *,
        priority: Float[ArrayLike, " B"] | None = None,
        score: Float[ArrayLike, " B"] | None = None,
        version: Int[ArrayLike, " B"] | None = None,
        session: Int[ArrayLike, " B"] | None = None,
        mask: Bool[ArrayLike, " B"] | None = None,
    ) -> Self:
        options = {"priority": priority, "score": score, "version": version, "session": session}
        return self.insert(items, mask=mask, **options)[0]

    def insert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        items: Arrays,
        *,
        priority: Float[ArrayLike, " B"] | None = None,
        score: Float[ArrayLike, " B"] | None = None,
        version: Int[ArrayLike, " B"] | None = None,
        session: Int[ArrayLike, " B"] | None = None,
        mask: Bool[ArrayLike, " B"] | None = None,
    ) -> tuple[Self, Slots]:
        items, rows, value, rejected = self._check(items, priority, score, version, session, mask)
        if rows.shape == (0,):
            empty = jnp.zeros((0,), jnp.int32)
            return self, Slots(empty, self.occupancy.generation(empty))
        counts: dict[str, Array] = {}
        if rejected:
            rows = rows.without(refuse(rejected, rows.taken, counts))
        for part, state in self._extras_and_states():
            if reasons := events.query(part.refuse, state, rows, self.occupancy):
                rows = rows.without(refuse(reasons, rows.taken, counts))
        buffer, near = self, self.diversity
        if near is not None and near.removes:
            leaving = near.replaced(lax.stop_gradient(self.diversity_state), rows, self.occupancy)
            buffer, counts["replaced_near_buffer"] = retire.remove_all(self, leaving)
            before = lax.stop_gradient(self.sampler_state)
            state = self.bound_sampler.with_default_of(buffer.sampler_state, before)
            buffer = trees.updated(buffer, sampler_state=state)
        score = rows.score if self.evictor.uses_score else None
        occupancy, index = buffer.occupancy.place(rows.shape[0], rows.mask, score)
        if buffer is not self:
            index = after(index, counts["replaced_near_buffer"])
        buffer = trees.updated(buffer, data=storage.write(self.data, items, index))
        buffer = buffer._notify(lambda part: part.on_add, index, rows)
        buffer = events.apply_change(buffer, occupancy, added=index, value=value)
        slots = Slots(index, occupancy.generation(index))
        counts["adds"] = rows.count
        return trees.updated(buffer, counters=self._counted(counts)), slots

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        key: Key,
        batch_size: int,
        *,
        beta: float | Number | None = None,
        normalize: Normalization = ...,
        within: Within | None = None,
    ) -> Sample:
        return weighed(self, self._draw_batch(key, batch_size), beta, normalize, within)

    def clear(self, envs: Envs = None) -> Self:
        if envs is not None:
            raise ValueError("envs was given, but an ItemBuffer has no environments; leave it out")
        return self._cleared()

    def route(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Raises an error, since all other operations are of environments."""
        raise operation.lacking(self, "use a jaxbuf.TrajectoryBuffer, which has environments")

    def options(self) -> dict[str, Any]:
        """Returns the strategies of the buffer, as keyword arguments of ``create``."""
        return {**super().options(), "evictor": self.evictor}

    def room(self, sequence_length: int | None = None) -> tuple[int, str]:
        del sequence_length
        reach = self.sampler.reach(self.capacity)
        text = "capacity is {}" if reach == self.capacity else "sampler draws from the newest {}"
        return reach, text

    @property
    def score_users(self) -> list[object]:
        strategies = (self.sampler, self.evictor, *self.extras)
        return [strategy for strategy in strategies if strategy.uses_score]

    def holds_row(self, row: Index) -> Mask:
        return self.occupancy.live(row)

    def any_row(self) -> Count:
        return self.occupancy.draw(jnp.zeros((1,), jnp.uint32))[0]

    def for_parts(self, row: Index, items: Arrays) -> tuple[Index, Rows]:
        return row, Rows(items=items, shape=row.shape, mask=row < self.capacity)

    def _check(
        self,
        items: Arrays,
        priority: Numbers | None,
        score: Numbers | None,
        version: Numbers | None,
        session: Numbers | None,
        mask: Numbers | None,
    ) -> tuple[Arrays, Rows, Floats | None, dict[str, Mask]]:
        """Checks the arguments of ``add`` and converts them to arrays.

        Returns:
            The items; the rows for the parts; the priorities or scores for the sampler; and a dict
            with a mask of the rows to reject because of these, under ``"rejected"``, which is empty
            if there are none of these.
        """
        items, (count,) = storage.check(self.data, items, "items", ("B",))
        shape = (count,)
        check_version_used(self.freshness, version, session)
        if score is None and self.score_users:
            raise ValueError(
                f"{self.score_users[0]} uses the score of items; pass score=[B] to add"
            )
        if score is not None and not self.score_users:
            raise ValueError(
                f"score was given, but neither {self.sampler} nor {self.evictor} uses it; leave it "
                "out or choose one that does"
            )
        if priority is not None:
            needs_priority(self.sampler, "priority was given")
            priority = check_numbers(priority, "priority", shape, "(B,)")

        def per_row(value: Numbers | None, name: str) -> Array | None:
            return None if value is None else check_numbers(value, name, shape, "(B,)")

        rows = Rows(
            items=jax.lax.stop_gradient(items),
            shape=shape,
            mask=per_row(mask, "mask"),
            score=per_row(score, "score"),
            version=per_row(version, "version"),
            session=per_row(session, "session"),
        )
        masks = [] if priority is None else [~self.bound_sampler.accepts(priority)]
        masks += [] if rows.score is None else [jnp.isnan(rows.score)]
        value = rows.score if self.sampler.uses_score else priority
        rejected = {"rejected": functools.reduce(jnp.logical_or, masks)} if masks else {}
        return items, rows, value, rejected
