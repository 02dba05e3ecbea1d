"""A set of independent items in slots."""

import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt

from jaxbuf.buffers import common
from jaxbuf.buffers.retire import Retiring
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import describe, sizes, storage, trees
from jaxbuf.core.slots import Slots
from jaxbuf.occupancy.subset import Subset
from jaxbuf.strategies.diversity import Diversity
from jaxbuf.strategies.evictors import Oldest
from jaxbuf.strategies.freshness import Freshness, FreshnessState
from jaxbuf.strategies.protocols import Draw, Evictor, Sampler, Support
from jaxbuf.strategies.samplers import Uniform


class ItemBuffer(Retiring, struct.PyTreeNode):
    """Up to ``capacity`` independent items: transitions, whole padded trajectories, states.

    The buffer is one immutable pytree, its configuration static: it goes through ``jit``, ``scan``,
    ``vmap`` and checkpoints as it is. Its methods are pure and return new buffers.
    ``jaxbuf.add``, ``jaxbuf.sample`` and ``jaxbuf.update_priority`` are the same, jitted.

    Attributes:
        data: The items, leaves ``[capacity, ...]``.
        occupancy: Which slots are live.
        sampler_state: What the sampler keeps.
        counters: Items added and rows rejected so far, ``[2]`` uint32; they wrap.
        sampler: How items are drawn.
        evictor: What makes room for new ones.
        diversity_state: What the diversity filter keeps; nothing without one.
        diversity: Which new items are different enough to enter; None takes all.
        freshness_state: What is known of uses and versions; nothing without limits on them.
        freshness: When items retire; None never.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> item = {"obs": jnp.zeros(3), "reward": jnp.float32(0)}
        >>> buffer = jaxbuf.ItemBuffer.create(item, capacity=100)
        >>> buffer = buffer.add({"obs": jnp.ones((8, 3)), "reward": jnp.arange(8.0)})
        >>> int(buffer.size), buffer.sample(jax.random.key(0), 32).data["obs"].shape
        (8, (32, 3))
    """

    data: PyTree[Array]
    occupancy: Any
    sampler_state: Any
    counters: UInt[Array, " 2"]
    sampler: Sampler = struct.field(pytree_node=False)
    evictor: Evictor = struct.field(pytree_node=False)
    diversity_state: Any = ()
    diversity: Diversity | None = struct.field(pytree_node=False, default=None)
    freshness_state: Any = ()
    freshness: Freshness | None = struct.field(pytree_node=False, default=None)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    @sizes.allocating("what the buffer keeps of its items")
    def create(
        cls,
        example: PyTree,
        capacity: int,
        *,
        sampler: Sampler = Uniform(),
        evictor: Evictor = Oldest(),
        freshness: Freshness | None = None,
        diversity: Diversity | None = None,
    ) -> Self:
        """An empty buffer.

        Args:
            example: One unbatched item: arrays or ``jax.ShapeDtypeStruct``. Only shapes and dtypes
                matter.
            capacity: Most items held at a time.
            sampler: How items are drawn.
            evictor: What makes room for new ones.
            freshness: Retires items that were used enough or are too stale; None retires none.
            diversity: Refuses new items that are too close to others; None refuses none.

        Raises:
            ValueError: If ``capacity`` is not an integer from 1 to 2**30, ``example`` holds
                anything but arrays or takes more memory than there is, or ``diversity`` compares a
                part that items do not have.
        """
        capacity = sizes.check_count("capacity", capacity)
        common.check_sampler(sampler)
        common.check_evictor(evictor)
        common.check_parts(freshness=freshness, diversity=diversity)
        data = storage.allocate(example, (capacity,))
        occupancy = evictor.init(capacity)
        if freshness is not None:
            common.check_removes(sampler, "an item retires")
            occupancy = Subset.create(occupancy, capacity)
        if sampler.uses_age:
            common.needs_order(occupancy, f"{sampler}")
        return cls(
            data=data,
            occupancy=occupancy,
            sampler_state=sampler.init(capacity),
            counters=jnp.zeros((2,), jnp.uint32),
            sampler=sampler,
            evictor=evictor,
            diversity_state=() if diversity is None else diversity.init(_one(data), capacity),
            diversity=diversity,
            freshness_state=() if freshness is None else freshness.init(capacity),
            freshness=freshness,
        )

    @property
    def capacity(self) -> int:
        """Most items held at a time."""
        inner = self.occupancy.inner if self.freshness else self.occupancy
        return inner.capacity

    @property
    def size(self) -> Int[Array, ""]:
        """Items held now."""
        return self.occupancy.size

    @property
    def live(self) -> Bool[Array, " N"]:
        """Which slots hold an item, ``[capacity]``.

        Items leave in many ways: others take their slot, they are used enough or become too stale.
        What is here now tells what has left. Where items name rows of a ``Store``, those that no
        item names can be deleted:

        >>> import jax.numpy as jnp, numpy as np, jaxbuf
        >>> buffer = jaxbuf.ItemBuffer.create({"row": jnp.int32(0)}, capacity=2)
        >>> stored = np.arange(5)
        >>> buffer = buffer.add({"row": jnp.arange(5)})
        >>> np.setdiff1d(stored, buffer.data["row"][buffer.live]).tolist()
        [0, 1, 2]
        """
        return self.occupancy.live(jnp.arange(self.capacity, dtype=jnp.int32))

    def can_sample(self, batch_size: int | Int[Array, ""] = 1) -> Bool[Array, ""]:
        """Whether there are at least ``batch_size`` items that can be drawn."""
        return self.support().count >= common.check_wanted(batch_size)

    def add(
        self,
        items: PyTree[Array],
        *,
        priority: Float[Array, " B"] | None = None,
        score: Float[Array, " B"] | None = None,
        version: Int[Array, " B"] | None = None,
        session: Int[Array, " B"] | None = None,
        mask: Bool[Array, " B"] | None = None,
    ) -> Self:
        """Add a batch of items; of more than ``capacity``, the last ones stay.

        Args:
            items: Leaves ``[B, *shape]``, in the example's dtypes.
            priority: Of each item, ``[B]``; finite and not negative. A row with another is refused
                and counted in ``metrics()["rejected"]``. Without, new items get the larger of the
                sampler's ``initial_priority`` and the largest priority in the buffer.
            score: Of each item, ``[B]``, for whatever here goes by it; any number, infinities
                included. A row with NaN is refused and counted.
            version: Of the policy that made each item, ``[B]`` int32, for ``Freshness``; without,
                the learner's own. A row that is too stale already is refused, evicts nothing, and
                is counted in ``metrics()["refused_stale"]``.
            session: Of the learner whose policy that was, ``[B]`` int32, for ``Freshness``;
                without, the learner's own. A row of another session is refused as too stale.
            mask: Which rows to take, ``[B]``; the others cost no slot.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example, if
                ``priority``, ``score``, ``version`` or ``session`` is given and nothing here uses
                it, or if ``score`` is missing.
        """
        self = common.check_single(self)
        items, (rows,) = storage.check(self.data, items, "items", ("B",))
        row_shape = (rows,)
        taken: Any = None
        if mask is not None:
            taken = storage.check_rows(mask, "mask", row_shape, np.bool_, "(B,)")
        value, score, points, legal = self._check_given(items, priority, score, row_shape)
        rejected = jnp.uint32(0)
        if legal is not None:
            offered = jnp.ones(row_shape, bool) if taken is None else taken
            rejected = jnp.sum(offered & ~legal, dtype=jnp.uint32)
            taken = offered & legal
        version, taken, refused = self._check_version(version, session, row_shape, taken)
        if rows == 0:
            return self
        diversity_state = jax.lax.stop_gradient(self.diversity_state)
        if self.diversity is not None and score is not None:
            diversity_state, taken = self.diversity.admit(
                diversity_state, points, score, taken, self.occupancy
            )
        occupancy, index = self.occupancy.place(rows, taken, score)
        if self.diversity is not None:
            diversity_state = self.diversity.added(diversity_state, index, points)
        freshness_state = self.freshness_state
        if self.freshness is not None and version is not None:
            freshness_state = self.freshness.added(freshness_state, index, version)
            if refused is not None:
                freshness_state = self.freshness.came(freshness_state, version, taken, refused)
        added = jnp.uint32(rows) if taken is None else jnp.sum(taken, dtype=jnp.uint32)
        return self.replace(
            data=storage.write(self.data, items, index),
            occupancy=occupancy,
            sampler_state=self.sampler.on_add(
                jax.lax.stop_gradient(self.sampler_state), index, value
            ),
            counters=self.counters + jnp.stack([added, rejected]),
            diversity_state=diversity_state,
            freshness_state=freshness_state,
        )

    def sample(self, key: PRNGKeyArray, batch_size: int) -> Sample:
        """Draw a batch.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``; static.

        Returns:
            A ``Sample``. Its shapes never depend on what the buffer holds: rows that cannot be
            drawn have ``valid`` False, probability 0 and index ``capacity``.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, or ``key`` not a single
                key.
        """
        rows = common.check_batch_size(batch_size)
        common.check_key(key)
        self = common.check_single(self)
        state = jax.lax.stop_gradient(self.sampler_state)
        draw = self.sampler.draw(state, key, rows, self.occupancy)
        return self._gather(draw)

    def next_batch(self, key: PRNGKeyArray, batch_size: int) -> tuple[Self, Sample]:
        """Draw the next batch of a pass over the buffer, with the sampler ``Shuffled``.

        With another sampler the batch is that of ``sample``, and the buffer stays as it is.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``; static.

        Returns:
            The buffer to go on with, which knows which items were given in this pass, and a
            ``Sample``. Where the pass has fewer left, the rows after them are invalid.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, or ``key`` not a single
                key.
        """
        rows = common.check_batch_size(batch_size)
        common.check_key(key)
        self = common.check_single(self)
        state = jax.lax.stop_gradient(self.sampler_state)
        state, draw = self.sampler.next(state, key, rows, self.occupancy)
        return self.replace(sampler_state=state), self._gather(draw)

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
        """Draw a batch from a range of ages, whatever the sampler.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``; static.
            start: The first item of the range, counted like the start of a slice of a list of the
                items from the oldest to the newest: ``-10`` means the last ten. May be traced.
            stop: The end of the range, counted in the same way.
            by_priority: Draw the items of the range with the sampler's own probabilities, relative
                to each other, instead of all with the same chance; static. Uniform where all of
                these are 0. It costs a pass over all slots.
            replacement: Whether a batch may hold an item twice; static.

        Returns:
            A ``Sample`` in order of age. By default its items are different and evenly spread over
            the range: each with the same chance, one from each of ``B`` parts of it. If the range
            holds no more than ``B`` items (by priority: items with a probability above 0), these
            are all of them, and the other rows are invalid. With replacement rows are independent
            of each other, or by priority one from each of ``B`` equal parts of the probability, and
            they are invalid only if the range is empty. ``probability`` is that of a single draw
            from the range.

        Raises:
            ValueError: If the evictor keeps no order of time, ``batch_size`` is no integer of at
                least 1, a flag is neither True nor False, or ``by_priority`` is True and the
                sampler has no priorities.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity=8)
            >>> buffer = buffer.add(jnp.arange(12))
            >>> buffer.sample_range(jax.random.key(0), 4, -4).data.tolist()
            [8, 9, 10, 11]
            >>> sampler = jaxbuf.Prioritized(alpha=1.0)
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity=8, sampler=sampler)
            >>> buffer = buffer.add(jnp.arange(5), priority=jnp.array([9.0, 0.0, 1.0, 3.0, 12.0]))
            >>> batch = buffer.sample_range(
            ...     jax.random.key(0), 16, -4, by_priority=True, replacement=True
            ... )
            >>> jnp.bincount(batch.data, length=5).tolist()
            [0, 0, 1, 3, 12]
        """
        self = common.check_single(self)
        return self._gather(
            common.pick(
                self,
                key,
                batch_size,
                start,
                stop,
                by_priority=by_priority,
                replacement=replacement,
            )
        )

    def latest(self, n: int) -> Sample:
        """The ``n`` newest items, in order of age.

        Args:
            n: How many; static.

        Returns:
            A ``Sample`` with leaves ``[n, ...]``, the oldest first. If there are fewer, the last
            rows are invalid.

        Raises:
            ValueError: If the evictor keeps no order of time, or ``n`` is not an integer from 1 to
                ``capacity``.
        """
        self = common.check_single(self)
        return self._gather(common.newest(self.occupancy, n))

    def update_priority(
        self,
        slots: Slots,
        priority: Float[Array, " B"],
        *,
        mask: Bool[Array, " B"] | None = None,
    ) -> Self:
        """Set the priorities of sampled items.

        Rows whose item has been overwritten since, invalid rows and masked ones are dropped. Of
        several rows for one item the last accepted one counts.

        Args:
            slots: Which items: ``sample.slots``, ``[B]``.
            priority: Their new priorities, ``[B]``; a NaN, negative or infinite one is refused and
                counted in ``metrics()["rejected"]``.
            mask: Which rows to take, ``[B]``.

        Raises:
            ValueError: When traced, if the sampler has no priorities, or a shape differs.
        """
        self = common.check_single(self)
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
        """The buffer without its items. Slots sampled before stay stale; counters go on.

        Shares no array with the original, so that either may be donated.
        """
        return self.replace(
            data=jax.tree.map(jnp.zeros_like, self.data),
            occupancy=self.occupancy.clear(),
            sampler_state=self.sampler.init(self.capacity),
            counters=self.counters.copy(),
            diversity_state=jax.tree.map(jnp.copy, self.diversity_state),
            freshness_state=self.freshness.cleared(self.freshness_state) if self.freshness else (),
        )

    def support(self) -> Support:
        """How many items can be drawn, and the least probability among them."""
        buffer = trees.on_device(self)
        state = jax.lax.stop_gradient(buffer.sampler_state)
        return self.sampler.support(state, buffer.occupancy)

    def metrics(self) -> dict[str, Array]:
        """Numbers worth watching, all scalars: one pass over the slots, for logging.

        Returns:
            ``size``; ``adds`` and ``rejected``, counted since creation and wrapping at 2**32;
            ``effective_sample_size`` (of the distribution drawn from, ``1 / Σ P²``); with
            priorities ``priority_min``, ``priority_max`` and ``priority_mean`` of the live items,
            as their masses tell them; with scores ``score_min``, ``score_max`` and
            ``score_mean``; and with a diversity filter how many rows it refused,
            ``refused_low_score``, ``refused_within_batch`` and ``refused_near_buffer``. With limits
            on freshness the learner's ``version``, how many rows were ``refused_stale`` and how
            many items ``retired_used`` and ``retired_stale``, and of the live items ``use_max``,
            ``use_mean``, ``staleness_max`` and ``staleness_mean``.
        """
        self = trees.on_device(self)
        diverse = self.diversity.metrics(self.diversity_state) if self.diversity else {}
        fresh = {}
        if self.freshness is not None:
            fresh = self.freshness.metrics(self.freshness_state, self.live)
        return {
            "size": self.size,
            "adds": self.counters[..., 0],
            "rejected": self.counters[..., 1],
            **self.occupancy.metrics(),
            **self.sampler.metrics(jax.lax.stop_gradient(self.sampler_state), self.occupancy),
            **diverse,
            **fresh,
        }

    def _gather(self, draw: Draw) -> Sample:
        """The items that were drawn."""
        read = functools.partial(storage.read, self.data)
        return common.gather(self.occupancy, draw, self.capacity, read)

    def _check_given(
        self, items: PyTree[Array], priority: Any, score: Any, row_shape: tuple[int, ...]
    ) -> tuple[Any, Any, Any, Any]:
        """What is known of each row, and which rows are legal; None for what nothing here uses.

        Returns:
            What the sampler goes by, the scores, the points that are compared, and a mask.
        """
        value, points, legal = None, None, []
        if priority is not None:
            common.needs_priority(self.sampler, "priority was given")
            value = common.check_priority(priority, row_shape, "(B,)")
            legal.append(self.sampler.accepts(value))
        score = self._check_score(score, row_shape)
        if score is not None:
            legal.append(~jnp.isnan(score))
            value = score if self.sampler.uses_score else value
        if self.diversity is not None:
            points = jax.lax.stop_gradient(self.diversity.points(items))
            legal.append(self.diversity.accepts(points))
        return value, score, points, functools.reduce(jnp.logical_and, legal) if legal else None

    def _check_version(
        self, version: Any, session: Any, row_shape: tuple[int, ...], taken: Any
    ) -> tuple[Any, Any, Any]:
        """The version of each row, or of all; which are still taken; and how many are refused.

        The last is None where neither versions nor sessions are given, for then none can be.
        """
        if self.freshness is None:
            self._refuse_versions(version, session)
            return None, taken, None
        learner = self.freshness_state
        if version is None and session is None:
            return learner.version, taken, None
        made_by = jnp.broadcast_to(learner.version, row_shape)
        if version is not None:
            made_by = storage.check_rows(version, "version", row_shape, np.int32, "(B,)")
        if session is None and self.freshness.max_staleness is None:
            return made_by, taken, jnp.uint32(0)
        fresh = made_by >= self.freshness.floor(learner.version)
        if session is not None:
            run = storage.check_rows(session, "session", row_shape, np.int32, "(B,)")
            fresh &= run == learner.session
        offered = jnp.ones(row_shape, bool) if taken is None else taken
        refused = jnp.sum(offered & ~fresh, dtype=jnp.uint32)
        return made_by, offered & fresh, refused

    def _noted(
        self, state: FreshnessState, occupancy: Subset, version: Int[Array, ""]
    ) -> FreshnessState:
        return self._needs_freshness("set_version").noted(state, occupancy.size, version)

    def _check_score(self, score: Any, row_shape: tuple[int, ...]) -> Any:
        """``score`` as an array, if it is given exactly where something goes by it."""
        parts = (self.sampler, self.evictor, self.diversity)
        users = [part for part in parts if part is not None and part.uses_score]
        if score is None:
            if users:
                raise ValueError(f"{users[0]} goes by the score of items; pass score=[B] to add")
            return None
        if not users:
            raise ValueError(
                f"score was given, but neither {self.sampler} nor {self.evictor} uses it; leave it "
                "out or choose one that does"
            )
        return storage.check_rows(score, "score", row_shape, np.float32, "(B,)")


def _one(data: PyTree[Array]) -> PyTree[jax.ShapeDtypeStruct]:
    """What one item is like."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)
