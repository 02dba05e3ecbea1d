"""The interface of all buffers with slots: each operation is declared here, and nowhere else."""

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack

from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxbuf.buffers.arguments import Where, check_offsets
from jaxbuf.buffers.buffer import Buffer, By
from jaxbuf.buffers.operation import Operation, operation
from jaxbuf.buffers.sample import Normalization, Sample, Steps, StepsAround, Within, check_beta
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import (
    Arrays,
    Count,
    Function,
    Index,
    Integers,
    Key,
    Mask,
    Number,
    Words,
)
from jaxbuf.strategies.episodes import Episode
from jaxbuf.strategies.protocols import Draw, Sampler, Support

# Environments, as numbers or as a mask; None means all.
Envs = Int[ArrayLike, " K"] | Bool[ArrayLike, " E"] | None


class InsertOptions(TypedDict, total=False):
    """The options of ``insert``, each of which some buffers take."""

    priority: Float[ArrayLike, " B"] | None
    score: Float[ArrayLike, " B"] | None
    version: Int[ArrayLike, " B"] | None
    session: Int[ArrayLike, " B"] | None
    mask: Bool[ArrayLike, " B"] | None
    part: int | str | None


class AddOptions(InsertOptions, total=False):
    """The options of ``add``, each of which some buffers take."""

    env_ids: Int[ArrayLike, " K"] | None


class WindowOptions(TypedDict, total=False):
    """The option of ``sample`` that buffers of windows take."""

    sequence_length: int | None


class WeightOptions(TypedDict, total=False):
    """The options of ``sample`` and ``next_batch`` for importance weights."""

    beta: float | Number | None
    normalize: Normalization
    within: Within | None


class SampleOptions(WindowOptions, WeightOptions, total=False):
    """The options of ``sample``, each of which some buffers take."""


def _check_beta(buffer: object, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a draw, after a check of a ``beta`` that tracing would hide."""
    del buffer
    arguments["beta"] = check_beta(arguments["beta"])
    return arguments


class PartOptions(TypedDict, total=False):
    """The option of operations that a ``Mixture`` performs in one of its parts."""

    part: int | str | None


class SlottedBuffer(Buffer):
    """A buffer whose items, or windows, are named by slots.

    A class overrides the operations that it performs itself, without a decorator, and without a
    docstring unless it differs: here they become programs. All others go to its ``route``.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            operation = getattr(vars(SlottedBuffer).get(name), "operation", None)
            if operation is not None and not hasattr(method, "operation"):
                setattr(cls, name, operation.as_program(method))

    def best(self, n: int, by: By) -> tuple[Slots, Words]:
        """Returns the slots of ``highest``, and words in the order of what is compared.

        A row without an item has the word 0. There are fewer rows than ``n`` if there are fewer
        slots.
        """
        raise NotImplementedError

    def route(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Performs an operation that this class does not override.

        Args:
            operation: The operation.
            arguments: The arguments that the caller passed, by name.

        Raises:
            ValueError: If the buffer lacks it; the message says what to use.
        """
        raise NotImplementedError

    @operation(
        by_member=False,
        static=("part",),
        stored=("items", "steps"),
        before=lambda buffer, arguments: buffer.check_add(arguments),
        concerns=("env_ids",),
    )
    def add(self, items: Arrays, **options: Unpack[AddOptions]) -> Self:
        """Adds a batch of items; if there are more than ``capacity``, the last ones are kept.

        Args:
            items: The items, leaves ``[B, *shape]`` with the example's dtypes; for rings steps,
                leaves ``[num_envs, *shape]`` or ``[num_envs, T, *shape]``, with options of
                ``[num_envs]`` or ``[num_envs, T]``. Python's numbers are cast to the example's
                dtypes, and NumPy's numbers of 64 bits to 32 if they fit.
            **options: The following, as far as the buffer takes them.

                * ``priority``: Priorities, ``[B]``, finite and not negative. A row with any other
                  priority is refused and counted in ``metrics()["rejected"]``. By default new items
                  get the larger of the sampler's ``initial_priority`` and the largest priority in
                  the buffer.
                * ``score``: Scores, ``[B]``, used by the sampler, evictor or diversity filter. May
                  be infinite; a row with NaN is refused and counted in ``metrics()["rejected"]``.
                * ``version``: Versions of the policies that generated the items, ``[B]`` int32, for
                  ``Freshness``; by default the learner's version. A row that is too stale already
                  is refused, evicts nothing, and is counted in ``metrics()["refused_stale"]``.
                * ``session``: Sessions of the learner in which the items were generated, ``[B]``
                  int32, for ``Freshness``; by default the learner's session. A row of another
                  session is refused as too stale.
                * ``mask``: A mask of the rows to add, ``[B]``; masked-out rows take no slot.
                * ``env_ids``: The environments of the rows, ``[K]``, of a ``TrajectoryBuffer``.
                * ``part``: The number, or the name, of the part of a ``Mixture`` that gets the
                  items; static.

        Returns:
            The buffer with the items.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example, if an
                option is given but not used by the buffer, or if ``score`` is missing.
        """
        raise NotImplementedError

    @operation(
        by_member=False,
        static=("part",),
        stored=("items",),
        before=lambda buffer, arguments: buffer.check_add(arguments),
        concerns=("env_ids",),
    )
    def insert(self, items: Arrays, **options: Unpack[InsertOptions]) -> tuple[Self, Slots]:
        """Adds a batch of items, and returns their slots as well.

        Args:
            items: The items, leaves ``[B, *shape]``, as for ``add``.
            **options: The options of ``add`` except ``env_ids``.

        Returns:
            The buffer with the items, and the slot of each row, ``[B]``. A row that was masked out
            or refused, or that a later row of the same call has evicted, has index ``capacity``.

        Raises:
            ValueError: As raised by ``add``.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=jaxbuf.Prioritized())
            >>> priority = jnp.array([1.0, jnp.nan, 1.0])
            >>> buffer, slots = buffer.insert(jnp.arange(3), priority=priority)
            >>> slots.index.tolist()
            [0, 8, 1]
        """
        raise NotImplementedError

    @operation(
        by_member=False,
        changes=False,
        rows="batch_size",
        static=("batch_size", "sequence_length", "normalize", "within"),
        nones=("normalize",),
        before=_check_beta,
        concerns=("beta",),
    )
    def sample(self, key: Key, batch_size: int, **options: Unpack[SampleOptions]) -> Sample:
        """Draws a batch of items, or windows.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.
            **options: ``sequence_length`` for a ``TrajectoryBuffer``, which says more about it, and
                the following, which every buffer takes.

                * ``beta``: The strength of importance weights, which are ``batch.weights`` then. It
                  may be traced, so annealing it does not cause a retrace. No gradient flows through
                  weights.
                * ``normalize``: ``"batch"`` (the default), ``"buffer"``, ``"mean"`` or None, as for
                  ``jaxbuf.importance_weights``, which says what they mean; static.
                * ``within``: ``"part"`` or None, likewise; static.

        Returns:
            A ``Sample``. Its shapes do not depend on the contents of the buffer: rows that cannot
            be drawn have ``valid`` False, probability 0 and index ``capacity``. Without ``beta``,
            its ``weights`` are None.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, ``key`` is not a single
                key, the buffer does not take an option, ``beta`` is not a finite number, or
                ``normalize`` or ``within`` is not one of these, or is given without ``beta``.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=jaxbuf.Prioritized(1.0))
            >>> buffer = buffer.add(jnp.arange(2), priority=jnp.array([1.0, 3.0]))
            >>> batch = buffer.sample(jax.random.key(0), 4, beta=1.0)
            >>> batch.data.tolist(), [round(w, 3) for w in batch.weights.tolist()]
            ([0, 1, 1, 1], [1.0, 0.333, 0.333, 0.333])
        """
        raise NotImplementedError

    @operation(
        by_member=False,
        rows="batch_size",
        static=("batch_size", "normalize", "within"),
        nones=("normalize",),
        before=_check_beta,
        concerns=("beta",),
    )
    def next_batch(
        self, key: Key, batch_size: int, **options: Unpack[WeightOptions]
    ) -> tuple[Self, Sample]:
        """Draws the next batch of a pass over the buffer, with the sampler ``Shuffled``.

        ``Staleness``, and a sampler of your own that defines ``on_draw``, is told which items were
        drawn. With any other sampler this is ``sample``, and the buffer does not change.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.
            **options: ``beta``, ``normalize`` and ``within``, as for ``sample``. Weights are those
                of the buffer before this batch.

        Returns:
            The new buffer, which records the items, or windows, drawn in this pass, and a
            ``Sample``. If fewer than ``B`` items are left in the pass, the last rows are invalid.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, ``key`` is not a single
                key, or an option is not legal, as for ``sample``.
        """
        raise NotImplementedError

    @operation(
        needs="priorities",
        keeps=("data", "extra_states"),
        reads=("occupancy", "hyperparameters"),
    )
    def update_priority(
        self,
        slots: Slots,
        priority: Float[ArrayLike, " B"],
        *,
        mask: Bool[ArrayLike, " B"] | None = None,
    ) -> Self:
        """Sets the priorities of sampled items, or windows.

        A row is dropped if it is invalid or masked out, or if its item has been overwritten since
        it was sampled (for a window: any of its steps). If several rows name the same item, the
        last accepted one wins.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            priority: Their new priorities, ``[B]``. Rows with a NaN, negative or infinite priority
                are refused and counted in ``metrics()["rejected"]``.
            mask: A mask of the rows to use, ``[B]``.

        Returns:
            The buffer with the new priorities.

        Raises:
            ValueError: When traced, if the sampler has no priorities, or a shape differs.
        """
        raise NotImplementedError

    @operation(static=("path",), stored=("value",))
    def set_field(
        self,
        path: str | None,
        slots: Slots,
        value: Arrays,
        *,
        mask: Bool[ArrayLike, "..."] | None = None,
    ) -> Self:
        """Changes one field of sampled items, or of the steps of sampled windows.

        A row is dropped if it is invalid or masked out, or if its item has left since it was
        sampled; a window leaves as a whole. If several rows name the same item, or windows share a
        step, the last accepted one wins. Of a window that is padded at the end of its episode (see
        ``Episodes``), only the real steps are written.

        Args:
            path: The name of the field: the keys, attributes or indices that lead to it, with dots
                between them. A key may have dots itself, such as ``"observation.state"``. It may
                also name a part of an item that holds several fields; None writes whole items.
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            value: The new values, leaves ``[B, *shape]`` with the example's dtypes; for windows
                ``[B, sequence_length, *shape]``.
            mask: A mask of the rows to write, ``[B]``; for windows also of their steps,
                ``[B, sequence_length]``.

        Returns:
            The buffer with the new values.

        Raises:
            ValueError: When traced, if there is no such field, a structure, shape or dtype differs,
                or a part does not allow the change: ``Episodes`` refuses its flags, and rewards
                whose returns it records.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> item = {"obs": jnp.float32(0), "value": jnp.float32(0)}
            >>> buffer = jaxbuf.ItemBuffer.create(item, 8)
            >>> buffer = buffer.add({"obs": jnp.arange(3.0), "value": jnp.zeros(3)})
            >>> batch = buffer.latest(2)
            >>> buffer = buffer.set_field("value", batch.slots, 10 * batch.data["obs"])
            >>> buffer.latest(3).data["value"].tolist()
            [0.0, 10.0, 20.0]
        """
        raise NotImplementedError

    @operation(static=("path", "fn", "batch_size"))
    def map_field(self, path: str | None, fn: Function, *, batch_size: int = 4096) -> Self:
        """Computes one field of all items, or of all steps, anew.

        Items are changed in place, ``batch_size`` at a time, which limits the memory that ``fn``
        needs; under ``jax.vmap``, the field is copied once. This includes steps whose windows are
        not drawn because they have retired, were removed, or are not complete.

        Each call from Python traces ``fn`` and compiles anew, because ``fn`` may compute something
        else by now. To compile once for all calls, call it inside your own ``jax.jit``, with the
        parameters that ``fn`` reads as an argument: there, ``fn`` is traced with the rest of your
        program. It runs once for each batch, so ``jax.debug.callback`` in it can report progress.

        Args:
            path: The name of the field, as for ``set_field``.
            fn: A function of items, leaves ``[B, *shape]``, which returns their new values; of a
                ``TrajectoryBuffer`` it gets single steps, without an axis of time. Integers and
                bools must have the dtype that is stored; floats may be weakly typed. For an empty
                slot it gets some item a second time, and the result is dropped, so the cost does
                not depend on how many slots are empty.
            batch_size: The number ``B`` of items for each call; static.

        Returns:
            The buffer with the new values.

        Raises:
            ValueError: When traced, if there is no such field, ``fn`` is not a function or returns
                values of another structure, shape or dtype, ``batch_size`` is not an integer of at
                least 1, or a part does not allow the change: ``Episodes`` refuses its flags. It
                computes recorded returns anew.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> step = {"obs": jnp.float32(0), "reward": jnp.float32(0)}
            >>> rings = jaxbuf.TrajectoryBuffer.create(step, num_envs=1, length=4)
            >>> rings = rings.add({"obs": jnp.arange(3.0)[None], "reward": jnp.zeros((1, 3))})
            >>> rings = rings.map_field("reward", lambda steps: -steps["obs"])
            >>> rings.latest(3).data["reward"][:, 0].tolist()
            [-0.0, -1.0, -2.0]
        """
        raise NotImplementedError

    @operation(needs="scores", keeps=("data",))
    def update_score(
        self,
        slots: Slots,
        score: Float[ArrayLike, " B"],
        *,
        mask: Bool[ArrayLike, " B"] | None = None,
    ) -> Self:
        """Sets the scores of sampled items, by which samplers draw and evictors choose.

        Rows are dropped, and the last accepted one of several wins, as in ``update_priority``. The
        order of arrival, which decides between equal scores, does not change.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            score: Their new scores, ``[B]``. May be infinite, as in ``add``; rows with a NaN are
                refused and counted in ``metrics()["rejected"]``.
            mask: A mask of the rows to use, ``[B]``.

        Returns:
            The buffer with the new scores.

        Raises:
            ValueError: When traced, if no part of the buffer uses scores, or a shape differs.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 3, evictor=jaxbuf.Lowest())
            >>> buffer, slots = buffer.insert(jnp.arange(3), score=jnp.array([1.0, 2.0, 3.0]))
            >>> buffer = buffer.update_score(slots, jnp.array([4.0, 2.0, 0.0]))
            >>> sorted(buffer.add(jnp.array([7]), score=jnp.array([1.0])).data.tolist())
            [0, 1, 7]
        """
        raise NotImplementedError

    @operation(needs="removal", keeps=("data",))
    def remove(self, slots: Slots, *, mask: Bool[ArrayLike, " B"] | None = None) -> Self:
        """Removes sampled items, or windows; the steps of windows stay.

        Their slots are stale from now on. A row is dropped if it is invalid or masked out, or if
        its item has left already.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``.
            mask: A mask of the rows to remove, ``[B]``.

        Returns:
            The buffer without them. With ``Removable``, their number is counted in
            ``metrics()["removed"]``.

        Raises:
            ValueError: When traced, if the buffer has neither ``Removable`` nor another part that
                removes items, or a shape differs.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, parts=(jaxbuf.Removable(),))
            >>> buffer, slots = buffer.insert(jnp.arange(3))
            >>> buffer = buffer.remove(slots, mask=jnp.array([False, True, False]))
            >>> buffer.holds(slots).tolist(), int(buffer.size)
            ([True, False, True], 2)
        """
        raise NotImplementedError

    @operation(changes=False, keeps=("data",))
    def holds(self, slots: Slots) -> Mask:
        """Returns whether sampled items are still there, and whether windows can be drawn, ``[B]``.

        Raises:
            ValueError: When traced, if ``slots`` are not the slots of a sample, ``[B]``.
        """
        raise NotImplementedError

    @operation(by_member=False, changes=False, rows="slots")
    def get(self, slots: Slots) -> Sample:
        """Returns items, or windows, by the slots of an earlier sample.

        Args:
            slots: The slots, ``sample.slots``, ``[B]``.

        Returns:
            A ``Sample`` with their present data. Rows whose item has left are invalid, with index
            ``capacity`` and probability 0. The ``probability`` of other rows is that of a draw by
            the sampler; 0 for a sampler of your own that is not a ``KnownSampler``.

        Raises:
            ValueError: When traced, if ``slots`` are not the slots of a sample, ``[B]``.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4)
            >>> buffer, slots = buffer.insert(jnp.arange(4))
            >>> batch = buffer.add(jnp.array([4, 5])).get(slots)
            >>> batch.valid.tolist(), batch.data[2:].tolist()
            ([False, False, True, True], [2, 3])
        """
        raise NotImplementedError

    @operation(needs="freshness", keeps=("data",))
    def mark_used(self, slots: Slots, *, mask: Bool[ArrayLike, " B"] | None = None) -> Self:
        """Counts a use of each sampled item, or window, and retires items used ``max_use`` times.

        Args:
            slots: The slots of the items, ``sample.slots``, ``[B]``. An item that occurs twice is
                counted twice. Rows whose item has since been overwritten or retired are dropped.
            mask: A mask of the rows to use, ``[B]``.

        Returns:
            The buffer with the new counts, without the items that have retired.

        Raises:
            ValueError: When traced, if the buffer has no ``Freshness``, or a shape differs.
        """
        raise NotImplementedError

    @operation(needs="freshness", keeps=("data",))
    def set_version(self, version: int | Count, session: int | Count | None = None) -> Self:
        """Sets the learner's version, and retires the items that have become too stale.

        Args:
            version: The learner's version, an integer that fits int32; usually one more than
                before.
            session: The number of the learner's run. If it changes, versions start over, and all
                items retire. None keeps the present session.

        Returns:
            The buffer without the items that have become too stale.

        Raises:
            ValueError: When traced, if the buffer has no ``Freshness``, or an argument is not an
                integer that fits int32.
        """
        raise NotImplementedError

    @operation(needs="freshness", changes=False, keeps=("data",))
    def use_count(self, slots: Slots) -> Integers:
        """Returns the number of uses of each sampled item, ``[B]``; 0 if the item has left.

        Raises:
            ValueError: If the buffer has no ``Freshness``.
        """
        raise NotImplementedError

    @operation(needs="freshness", changes=False, keeps=("data",))
    def staleness(self, slots: Slots) -> Integers:
        """Returns the staleness of each sampled item, in versions, ``[B]``; 0 if the item has left.

        Raises:
            ValueError: If the buffer has no ``Freshness``.
        """
        raise NotImplementedError

    @operation(by_member=False)
    def clear(self, envs: Envs = None) -> Self:
        """Returns the buffer without its items, or rings without the steps of some environments.

        Slots sampled before remain stale; positions and counters keep their values.

        Args:
            envs: The environments to clear, as a mask ``[num_envs]`` or as numbers ``[K]``, of
                which numbers out of range are ignored. None clears all, and then the result shares
                no array with the original, so that either may be donated.

        Raises:
            ValueError: When traced, if ``envs`` is neither a mask nor numbers, or is given and
                there are no environments.
        """
        raise NotImplementedError

    @operation(by_member=False, changes=False, static=("n",), rows="n")
    def latest(self, n: int) -> Sample:
        """Returns the ``n`` newest items, or the ``n`` newest windows of every ring.

        Args:
            n: The number of items, or of windows of each ring; static.

        Returns:
            A ``Sample`` with leaves ``[n, ...]``, or ``[num_envs * n, sequence_length, ...]``,
            ordered by ring and then from the oldest to the newest. If a ring holds fewer than
            ``n``, its last rows are invalid.

        Raises:
            ValueError: If the evictor does not keep the order of insertion, or ``n`` is not an
                integer from 1 to the number of slots (of each ring).

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4, sequence_length=2)
            >>> buffer = buffer.add(jnp.arange(12).reshape(2, 6))
            >>> buffer.latest(2).data.tolist()
            [[3, 4], [4, 5], [9, 10], [10, 11]]
        """
        raise NotImplementedError

    @operation(by_member=False, changes=False, static=("n", "by"), rows="n")
    def highest(self, n: int, by: By | None = None) -> Sample:
        """Returns the ``n`` items, or windows, of the highest scores, the highest first.

        Items that compare equal are in order of age, the newest first. Windows of several rings
        that are equally old are in the order of their rings; parts of a ``Mixture`` and shards of a
        ``Sharded`` follow each other. The cost is a pass over all slots.

        Args:
            n: The number of rows; static, at most the number of slots. Of a ``Sharded`` a multiple
                of the number of its shards.
            by: ``"score"``, or ``"priority"`` to compare the masses of the sampler, which are all
                equal if ``alpha`` is 0; static. By default the score, or the priority where there
                are no scores.

        Returns:
            A ``Sample``, whose ``probability`` is that of ``get``. If there are fewer items that
            can be drawn, the last rows are invalid.

        Raises:
            ValueError: If the buffer, or a part of a ``Mixture``, keeps neither scores nor
                priorities, or not those of ``by``, or ``n`` is not an integer from 1 to the number
                of slots.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, evictor=jaxbuf.Lowest())
            >>> buffer = buffer.add(jnp.arange(5), score=jnp.array([2.0, -1.0, 7.0, 2.0, 0.0]))
            >>> buffer.highest(3).data.tolist()
            [2, 3, 0]
        """
        raise NotImplementedError

    @operation(
        by_member=False,
        changes=False,
        static=("batch_size", "by_priority", "replacement"),
        rows="batch_size",
    )
    def sample_range(
        self,
        key: Key,
        batch_size: int,
        start: int | Count | None = None,
        stop: int | Count | None = None,
        *,
        by_priority: bool = False,
        replacement: bool = False,
    ) -> Sample:
        """Draws a batch from a range of ages, independently of the sampler.

        A ``TrajectoryBuffer`` draws windows, from the same range of ages in every ring.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.
            start: The start of the range, as in a slice of a list of the items from the oldest to
                the newest: ``-10`` means the ten newest. May be traced.
            stop: The end of the range, as in such a slice.
            by_priority: Whether to draw the items of the range with probabilities proportional to
                those of the sampler, instead of equal ones; static. If these are all 0, the draw is
                uniform. It costs a pass over all slots.
            replacement: Whether a batch may hold an item twice; static.

        Returns:
            A ``Sample`` in order of age, ring by ring.

            * Without replacement (the default) its items are different. Unless ``by_priority`` is
              set, they are also evenly spread over the range, one from each of ``B`` equal parts.
              If the range holds at most ``B`` items (with a probability above 0), all of them are
              drawn, and the other rows are invalid.
            * With replacement rows are independent; with ``by_priority``, one is drawn from each of
              ``B`` equal parts of the probability. Rows are invalid only if the range is empty.

            ``probability`` is the probability of a single draw from the range.

        Raises:
            ValueError: If the evictor does not keep the order of insertion, ``batch_size`` is not
                an integer of at least 1, a flag is neither True nor False, or ``by_priority`` is
                True and the sampler has no priorities.

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
        raise NotImplementedError

    @operation(by_member=False, changes=False, rows="draw")
    def gather(self, draw: Draw) -> Sample:
        """Returns the items, or windows, of a draw.

        Args:
            draw: The draw, such as one by a sampler that the buffer does not have.

        Returns:
            A ``Sample``, whose invalid rows have probability 0 and index ``capacity``. Rows of the
            draw whose slot holds no item, or no complete window, are invalid as well.

        Raises:
            ValueError: If ``draw`` is not a ``jaxbuf.strategies.Draw``, or its fields have other
                shapes or dtypes.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=jaxbuf.Prioritized())
            >>> buffer = buffer.add(jnp.arange(3))
            >>> sampler = jaxbuf.Uniform(replacement=False)
            >>> draw = sampler.draw((), jax.random.key(0), 3, buffer.occupancy)
            >>> sorted(buffer.gather(draw).data.tolist())
            [0, 1, 2]
        """
        raise NotImplementedError

    @operation(by_member=False, changes=False, static=("ignore_earliest",))
    def gather_all(self, *, ignore_earliest: bool = True) -> Steps:
        """Returns all steps held, in order of time.

        Args:
            ignore_earliest: Whether to leave out the ``num_earliest_ignored`` earliest steps of
                each ring.

        Returns:
            ``Steps`` with leaves ``[num_envs, length, ...]``. The rows of a ring begin with its
            earliest step, and rows past the newest step are invalid.

        Raises:
            ValueError: If ``ignore_earliest`` is neither True nor False.
        """
        raise NotImplementedError

    @operation(by_member=False, static=("n",))
    def dequeue(self, n: int, *, mask: Bool[ArrayLike, " E"] | None = None) -> tuple[Self, Steps]:
        """Removes the ``n`` earliest steps from every ring.

        Args:
            n: The largest number of steps to remove from each environment; static.
            mask: A mask of the environments, ``[num_envs]``; None for all.

        Returns:
            The buffer without these steps, and ``Steps`` with leaves ``[num_envs, n, ...]``, the
            earliest first. If a ring holds fewer steps, all of them are removed, and its other rows
            are invalid. Windows that lost a step are no longer drawn.

        Raises:
            ValueError: If ``n`` is not an integer from 1 to ``length``.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), num_envs=1, length=4)
            >>> buffer, steps = buffer.add(jnp.arange(2.0, 10.0)[None]).dequeue(2)
            >>> steps.data.tolist(), int(buffer.size)
            ([[6.0, 7.0]], 2)
        """
        raise NotImplementedError

    @operation(by_member=False, needs="environments", changes=False, keeps=("data",))
    def locate(self, slots: Slots) -> tuple[Index, Words]:
        """Returns the environment of each sampled window, and the position of its first step.

        Both have shape ``[B]``. The environment of an invalid row, and of a window whose first step
        is no longer held, is ``num_envs``.

        Raises:
            ValueError: When traced, if ``slots`` are not the slots of a sample.
        """
        raise NotImplementedError

    @operation(by_member=False, needs="environments", changes=False, keeps=("data",))
    def slots_at(
        self, env_ids: Int[ArrayLike, "..."], positions: Integer[ArrayLike, "..."]
    ) -> Slots:
        """Returns the slots of the windows that start at these steps, the inverse of ``locate``.

        Args:
            env_ids: The environments of the steps, integers of any shape that broadcasts with
                ``positions``.
            positions: The positions of the steps, as in ``locate``, ``earliest_position`` and
                ``end_position``.

        Returns:
            Slots of the same shape, for ``get``, ``set_field``, ``update_priority`` and others.
            Where no window starts that can be drawn, they have index ``capacity``.

        Raises:
            ValueError: When traced, if an argument does not hold integers.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> buffer = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 2, 4, sequence_length=2)
            >>> buffer = buffer.add(jnp.arange(12).reshape(2, 6))
            >>> slots = buffer.slots_at(jnp.array([0, 1, 1]), jnp.array([2, 4, 5]))
            >>> batch = buffer.get(slots)
            >>> batch.valid.tolist(), batch.data[:2].tolist()
            ([True, True, False], [[2, 3], [10, 11]])
        """
        raise NotImplementedError

    @operation(by_member=False, needs="environments", changes=False, static=("path",))
    def get_field(
        self, path: str, env_ids: Int[ArrayLike, "..."], positions: Integer[ArrayLike, "..."]
    ) -> Arrays:
        """Reads one field of single steps.

        Args:
            path: The name of the field, with dots between the names of nested fields. It may also
                name a part of a step that holds several fields.
            env_ids: The environments of the steps, integers of any shape that broadcasts with
                ``positions``.
            positions: The positions of the steps, as in ``locate``, ``earliest_position`` and
                ``end_position``.

        Returns:
            The field, leaves ``[..., *shape]``; zeros if an environment does not exist, or a step
            is not written yet or no longer held.

        Raises:
            ValueError: When traced, if there is no such field, or an argument does not hold
                integers.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> step = {"obs": {"x": jnp.float32(0)}}
            >>> buffer = jaxbuf.TrajectoryBuffer.create(step, num_envs=2, length=3)
            >>> buffer = buffer.add({"obs": {"x": jnp.arange(8.0).reshape(2, 4)}})
            >>> buffer.earliest_position.tolist()
            [1, 1]
            >>> buffer.get_field("obs.x", jnp.array([0, 0, 1]), jnp.array([0, 1, 3])).tolist()
            [0.0, 1.0, 7.0]
        """
        raise NotImplementedError

    @operation(
        needs="environments",
        changes=False,
        static=("path",),
        before=lambda _, arguments: arguments | {"offsets": check_offsets(arguments["offsets"])},
    )
    def steps_around(
        self,
        slots: Slots,
        offsets: Sequence[int] | Int[ArrayLike, " K"],
        path: str | None = None,
    ) -> StepsAround:
        """Reads the steps at some offsets from the first step of each sampled window.

        These may be steps before the window, after its end, or far apart: the context of a
        Decision Transformer, the observations and actions of a diffusion policy, the
        ``delta_timestamps`` of LeRobot. They are those of one episode, that of the first step; ends
        of episodes are known from ``Episodes``, without which an episode is what the ring holds.

        Args:
            slots: The slots of the windows, ``sample.slots``, ``[B]``.
            offsets: The offsets of the steps, integers ``[K]`` in any order, negative for steps
                before the first one. They may be traced; known ones are below 2**30 either way.
            path: The name of one field to read, with dots between the names of nested fields; None
                reads whole steps.

        Returns:
            A ``StepsAround`` with the steps, leaves ``[B, K, *shape]``, and a mask ``[B, K]``. A
            step before the beginning of the episode, after its end, overwritten or not yet there is
            not ``inside``; in its place stands the nearest one that is there, the first or the last
            of the episode. A stale row, whose window has left, has zeros, and none is ``inside``.

        Raises:
            ValueError: When traced, if there is no such field, or ``offsets`` are not integers
                ``[K]``, or known and not below 2**30 either way.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> step = {"t": jnp.int32(0), "terminated": jnp.bool_(False)}
            >>> rings = jaxbuf.TrajectoryBuffer.create(step, 1, 8, episodes=jaxbuf.Episodes())
            >>> t = jnp.arange(6)[None]
            >>> rings = rings.add({"t": t, "terminated": t == 1})
            >>> around = rings.steps_around(rings.slots_at(jnp.array([0]), 3), range(-3, 2))
            >>> around.data["t"].tolist(), around.inside.tolist()
            ([[2, 2, 2, 3, 4]], [[False, False, True, True, True]])
        """
        raise NotImplementedError

    @operation(by_member=False, needs="episodes", changes=False)
    def episode(self, where: Where, positions: Integer[ArrayLike, "..."] | None = None) -> Episode:
        """Looks up the episodes of sampled windows, or of single steps.

        Under ``jax.jit``, fields that are not used cost nothing.

        Args:
            where: The slots of windows, ``sample.slots``, whose first steps are looked up; or
                ``env_ids`` of single steps; or both environments and positions, as ``locate``
                returns them.
            positions: The positions of steps in these environments, with ``env_ids``, of any shape
                that broadcasts with them.

        Returns:
            An ``Episode``, whose fields have the shape of the slots, or of the steps.

        Raises:
            ValueError: If the buffer was created without ``Episodes``, if positions are given with
                slots or missing without them, or, when traced, if an argument does not hold
                integers.

        References:
            The episode index of ALF's replay buffer, https://github.com/HorizonRobotics/alf, has
            a method for each of these fields.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> step = {"life_lost": jnp.bool_(False), "over": jnp.bool_(False)}
            >>> episodes = jaxbuf.Episodes(terminated="life_lost", last="over")
            >>> buffer = jaxbuf.TrajectoryBuffer.create(step, 1, 8, episodes=episodes)
            >>> lost = jnp.array([[False, True, False, True, False]])
            >>> over = jnp.array([[False, False, False, True, False]])
            >>> buffer = buffer.add({"life_lost": lost, "over": over})
            >>> episode = buffer.episode(jnp.array([0]), jnp.arange(5))
            >>> episode.begin.tolist(), episode.to_end.tolist()
            ([0, 0, 0, 0, 4], [3, 2, 1, 0, 0])
            >>> episode.last_terminated.tolist()
            [0, 1, 1, 3, 4]
            >>> slots = buffer.sample(jax.random.key(0), 32).slots
            >>> bool(jnp.all(buffer.episode(slots).to_end <= 3))
            True
        """
        raise NotImplementedError

    @operation(needs="episodes", changes=False, static=("sequence_length",), keeps=("data",))
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
        raise NotImplementedError

    @operation(by_member=False, needs="episodes")
    def end_episodes(self, envs: Envs = None) -> Self:
        """Ends the open episodes, as if they had been truncated at their newest steps.

        The next step of these environments begins another episode. Use it when environments start
        over although no flag says so: after ``jaxbuf.load``, or after a reset in the middle of an
        episode. The newest step of an open episode becomes truncated and, with ``Episodes.last``,
        the last one, also in the flags that the step holds. Recorded returns of the episode are
        ``default_return``. Environments without an open episode do not change.

        Args:
            envs: The environments, as a mask ``[num_envs]`` or as numbers ``[K]``, of which numbers
                out of range are ignored. None means all of them.

        Returns:
            The buffer, in which the next steps begin other episodes.

        Raises:
            ValueError: If the buffer was created without ``Episodes``, or, when traced, if ``envs``
                is neither a mask nor numbers.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> step = {"terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}
            >>> buffer = jaxbuf.TrajectoryBuffer.create(step, 1, 8, episodes=jaxbuf.Episodes())
            >>> steps = {name: jnp.zeros((1, 3), bool) for name in step}
            >>> buffer = buffer.add(steps).end_episodes().add(steps)
            >>> buffer.episode(jnp.array([0]), jnp.arange(6)).begin.tolist()
            [0, 0, 0, 3, 3, 3]
            >>> buffer.data["truncated"].tolist()
            [False, False, True, False, False, False, False, False]
        """
        raise NotImplementedError

    @operation(by_member=False, needs="episodes", keeps=("data",))
    def drop_newest_episode(self, envs: Envs = None) -> Self:
        """Removes the steps of the newest episode of each environment, whether it has ended or not.

        The next step takes the place of the first removed one, and begins an episode. Steps that
        the removed ones had overwritten do not come back. All slots sampled from an environment
        that loses steps become stale, and the positions of its other steps grow by ``length``.

        Args:
            envs: The environments, as for ``end_episodes``.

        Returns:
            The buffer without the steps of these episodes.

        Raises:
            ValueError: If the buffer was created without ``Episodes``, or, when traced, if ``envs``
                is neither a mask nor numbers.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> step = {"t": jnp.int32(0), "terminated": jnp.bool_(False)}
            >>> buffer = jaxbuf.TrajectoryBuffer.create(step, 1, 8, episodes=jaxbuf.Episodes())
            >>> ends = jnp.array([[False, True, False, False, False]])
            >>> buffer = buffer.add({"t": jnp.arange(5)[None], "terminated": ends})
            >>> buffer = buffer.drop_newest_episode()
            >>> buffer.gather_all().data["t"][0, : int(buffer.size)].tolist()
            [0, 1]
        """
        raise NotImplementedError

    @operation(
        by_member=False,
        static=("part",),
        before=lambda buffer, arguments: buffer.check_hyperparameters(arguments),
        keeps=lambda buffer, arguments: buffer.kept_by_hyperparameters(arguments),
    )
    def set_hyperparameters(
        self, values: Mapping[str, ArrayLike] | None = None, **options: ArrayLike
    ) -> Self:
        """Changes numbers of the sampler, which must be ``jaxbuf.Varying``.

        The numbers may be traced: inside ``jax.jit`` and ``jax.lax.scan``, and under ``jax.vmap``
        with another one for each buffer. It does not compile anew for other numbers.

        * ``uniform_mix``, ``ratio``, ``weights``, ``temperature``, and ``alpha`` of ``RankBased``
          and ``Staleness`` apply to all draws from then on. A new ``temperature`` and an ``alpha``
          of ``RankBased`` cost a pass over all slots.
        * ``alpha`` and ``epsilon`` of ``Prioritized`` apply to priorities that are set from then
          on; see there.
        * ``ratios`` of a ``Mixture``, ``[P]``, apply to all batches from then on. Those of a
          mixture that is its second part are ``"1/ratios"``.

        Args:
            values: New values by name, or by path where several samplers of a ``Blend`` have the
                same name, such as ``{"samplers[0].alpha": 0.5}``. The names are those of
                ``buffer.hyperparameters``.
            **options: New values by name; for numbers of samplers in a ``Mixture`` also the number
                of the ``part``, without which their names begin with it, as in ``"1/alpha"``.

        Returns:
            The buffer with the new values. A value that is traced and not legal, such as a NaN, is
            refused and counted in ``metrics()["rejected"]``, once for each call; then all values
            stay as they are.

        Raises:
            ValueError: If a value is known and not legal, has another shape, or a number does not
                vary.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> sampler = jaxbuf.Prioritized(alpha=1.0, uniform_mix=jaxbuf.Varying(1.0))
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=sampler)
            >>> buffer, slots = buffer.insert(jnp.arange(2), priority=jnp.array([1.0, 3.0]))
            >>> buffer.get(slots).probability.tolist()
            [0.5, 0.5]
            >>> buffer.set_hyperparameters(uniform_mix=0.0).get(slots).probability.tolist()
            [0.25, 0.75]
        """
        raise NotImplementedError

    @operation(by_member=False, static=("sampler", "part"), keeps=("data",), loses=True)
    def with_sampler(self, sampler: Sampler, **options: Unpack[PartOptions]) -> Self:
        """Returns the same items in the same slots under another sampler.

        Slots, counters and parts stay as they are. The new sampler gets the priorities, or scores,
        that the old one knows, and its own default where that knows none. A sampler that was there
        before, also as one of several inside of another, keeps all that it knows. The cost is a
        pass over all slots; items are not copied by ``jaxbuf.with_sampler``.

        The result has another type, so a loop such as ``jax.lax.scan`` cannot carry it in place of
        the original. To change a number only, see ``set_hyperparameters``.

        Args:
            sampler: The new sampler; static.
            **options: For a ``Mixture``, the number of the ``part``; static.

        Returns:
            The buffer with this sampler.

        Raises:
            ValueError: When traced, if the sampler does not fit the buffer, as in ``create``, or
                draws by score and nothing in the buffer keeps scores.

        Example:
            >>> import jax.numpy as jnp, jaxbuf
            >>> sampler = jaxbuf.Prioritized(alpha=1.0)
            >>> buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=sampler)
            >>> buffer, slots = buffer.insert(jnp.arange(2), priority=jnp.array([1.0, 3.0]))
            >>> buffer = buffer.with_sampler(jaxbuf.RankBased(alpha=1.0))
            >>> [round(float(p), 3) for p in buffer.get(slots).probability]
            [0.333, 0.667]
        """
        raise NotImplementedError

    @operation(by_member=False, changes=False, keeps=("data",))
    def support(self) -> Support:
        """Returns the number of items, or windows, that can be drawn, and their least probability.

        See ``jaxbuf.strategies.Support``.
        """
        raise NotImplementedError

    @operation(by_member=False, changes=False, keeps=("data",))
    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor; it costs one pass over the slots.

        Returns:
            A dict with the following entries, as far as they apply to the buffer. Counts are since
            creation and wrap at 2**32.

            * ``size``; ``windows``, the number of windows that can be drawn, for a
              ``TrajectoryBuffer``, whose size is in steps; the counts ``adds`` and ``rejected``.
            * ``effective_sample_size``, which is ``1 / Σ P²`` for the probabilities ``P`` of the
              sampler.
            * With priorities, ``priority_min``, ``priority_max`` and ``priority_mean`` of the live
              items, computed from their masses.
            * With scores, ``score_min``, ``score_max`` and ``score_mean``.
            * With ``Diversity``, the counts of refused rows ``refused_low_score``,
              ``refused_within_batch`` and ``refused_near_buffer``; with ``keep="best"`` the count
              ``replaced_near_buffer`` of items.
            * With ``Freshness``, the learner's ``version``, the counts ``refused_stale``,
              ``retired_used`` and ``retired_stale``, and ``use_max``, ``use_mean``,
              ``staleness_max`` and ``staleness_mean`` of the live items.
            * With ``Episodes(boundary="avoid")``, the count ``refused_across_episodes`` of windows.
            * The varying hyperparameters of the sampler (see ``Varying``), by their names in
              ``hyperparameters``; weights one by one, as ``weights[0]`` and so on.
            * The reasons and metrics of your own parts.
        """
        raise NotImplementedError
