"""Items of many rows, collected row by row: whole episodes and chunks of fragments."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, PyTree, UInt

from jaxbuf.buffers import common
from jaxbuf.buffers.lanes import Lanes
from jaxbuf.core import describe, fields, storage, trees
from jaxbuf.strategies.freshness import Freshness


class PaddedEpisode(struct.PyTreeNode):
    """An episode as one item, padded to a fixed length; or a batch of them.

    Attributes:
        steps: Leaves ``[max_length, ...]``, or ``[B, max_length, ...]``; zeros past the end.
        length: Steps that are real, the first ones; ``[]`` or ``[B]`` int32.
    """

    steps: PyTree[Array]
    length: Int[Array, "..."]

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @property
    def mask(self) -> Bool[Array, "... L"]:
        """Which steps are real, ``[max_length]`` or ``[B, max_length]``."""
        longest = jax.tree.leaves(self.steps)[0].shape[self.length.ndim]
        step = jax.lax.broadcasted_iota(jnp.int32, (*self.length.shape, longest), self.length.ndim)
        return step < self.length[..., None]


class Chunk(struct.PyTreeNode):
    """Consecutive fragments of one worker as one item; or a batch of them.

    Attributes:
        fragments: Leaves ``[fragments_per_chunk, ...]``, or ``[B, fragments_per_chunk, ...]``.
        version: The model version of the first fragment; ``[]`` or ``[B]`` int32.
        session: The session of all fragments; ``[]`` or ``[B]`` int32.
    """

    fragments: PyTree[Array]
    version: Int[Array, "..."]
    session: Int[Array, "..."] | None = None

    __repr__ = describe.text
    _repr_html_ = describe.rich


class EpisodeAccumulator(struct.PyTreeNode):
    """Assembles the steps of ``num_envs`` environments into whole episodes.

    An episode ends where a step is ``terminated`` or ``truncated``. One that reaches ``max_length``
    steps without is cut there, counted, and goes on as another item; neither flag is set in the
    last step of a piece that was cut, so it is bootstrapped as what is truncated.

    Each ``add`` hands out up to ``per_add`` complete episodes, oldest first, ready for
    ``ItemBuffer.add``. Others wait in line; one that is complete while the line is full is lost
    and counted as ``refused``. With one step at a time and the defaults none ever waits. Handing
    out costs ``per_add`` padded episodes in each ``add``, whether complete or not, so with long
    episodes and single steps choose a small one: as many as end in an ``add`` on average, rounded
    up. For long rollouts of short episodes choose ``waiting`` as large as may end in one of them.

    One immutable pytree, as a buffer.

    Attributes:
        data: The steps, leaves ``[num_envs + waiting, max_length, ...]``.
        lanes: Which of them belong to which environment, and which are complete.
        flags: Paths of the fields that end an episode.
        per_add: Most episodes handed out at a time, ``K``.

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

    data: PyTree[Array]
    lanes: Lanes
    flags: tuple[str, ...] = struct.field(pytree_node=False)
    per_add: int = struct.field(pytree_node=False)

    __repr__ = describe.text
    _repr_html_ = describe.rich

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
        """An empty accumulator.

        Args:
            example: One unbatched step: arrays or ``jax.ShapeDtypeStruct``.
            num_envs: Environments ``E``.
            max_length: Most steps of an episode, ``L``.
            per_add: Most episodes handed out by one ``add``, ``K``; by default ``num_envs``.
            waiting: Most complete episodes that are kept until they are handed out, those of the
                ``add`` itself included; by default the larger of ``num_envs`` and ``per_add``.
            terminated: Name of the flag that an episode ended with this step; dots lead into nested
                fields.
            truncated: Name of the flag that it was cut off here. By default the field
                ``truncated`` beside ``terminated``, or else at the top, if steps have one.

        Raises:
            ValueError: If a number is not an integer of at least 1, ``per_add`` is larger than
                ``waiting``, there are more than 2**30 steps, a flag is missing or no bool, or
                ``example`` holds anything but arrays.
        """
        num_envs = common.check_count("num_envs", num_envs)
        max_length = common.check_count("max_length", max_length)
        per_add, waiting = _check_line(num_envs, max_length, per_add, waiting)
        data = storage.allocate(example, (num_envs + waiting, max_length))
        names = [("terminated", terminated)]
        truncated = fields.truncation(data, terminated, truncated)
        if truncated is not None:
            names.append(("truncated", truncated))
        for name, path in names:
            flag = fields.need(data, path, name, "the example has")
            if not isinstance(flag, jax.Array) or flag.dtype != np.bool_ or flag.ndim != 2:
                found = getattr(flag, "dtype", "no array"), getattr(flag, "shape", (0, 0))[2:]
                raise ValueError(
                    f"{name} is {path!r}, which is {found[0]} of shape {found[1]} in the example; "
                    "expected one bool"
                )
        return cls(
            data=data,
            lanes=Lanes.create(num_envs, waiting, max_length),
            flags=tuple(path for _, path in names),
            per_add=per_add,
        )

    @property
    def num_envs(self) -> int:
        """Environments."""
        return self.lanes.lane.shape[-1]

    @property
    def max_length(self) -> int:
        """Most steps of an episode."""
        return self.lanes.length

    @property
    def example(self) -> PaddedEpisode:
        """One episode as ``ItemBuffer.create`` and ``Queue.create`` want it, of shapes only."""
        length: Any = jax.ShapeDtypeStruct((), jnp.int32)
        return PaddedEpisode(steps=_shapes(self.data), length=length)

    @property
    def filled(self) -> Int[Array, " E"]:
        """Steps of the episode that each environment is in, ``[num_envs]``."""
        return self.lanes.filled

    @property
    def waiting(self) -> Int[Array, ""]:
        """Complete episodes that are not handed out yet."""
        return self.lanes.waiting

    def add(
        self, steps: PyTree[Array], *, mask: Bool[Array, "..."] | None = None
    ) -> tuple[Self, PaddedEpisode, Bool[Array, " K"]]:
        """Append one step, or ``T`` of them, to each environment; hand out what is complete.

        Args:
            steps: Leaves ``[num_envs, *shape]`` or ``[num_envs, T, *shape]``, in the example's
                dtypes.
            mask: Which steps to take, ``[num_envs]`` or ``[num_envs, T]``; those of a row keep
                their order.

        Returns:
            The accumulator that goes on; up to ``per_add`` episodes, those first that were complete
            first (of one step those of the first environments), leaves ``[K, max_length, ...]``;
            and which rows hold one, ``[K]``: the ``mask`` for ``ItemBuffer.add``.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example.
        """
        self = trees.on_device(self)
        steps, taken = self._check(steps, mask)
        if not taken.shape[1]:
            return self.take()
        ends = jnp.zeros(taken.shape, bool)
        for path in self.flags:
            ends |= fields.find(steps, path)
        lanes, target = self.lanes.place(taken, ends)
        return self.replace(data=_write(self.data, steps, target), lanes=lanes).take()

    def take(self) -> tuple[Self, PaddedEpisode, Bool[Array, " K"]]:
        """Hand out up to ``per_add`` of the episodes that wait, as ``add`` does."""
        self = trees.on_device(self)
        lanes, lane, length, done = self.lanes.take(self.per_add)
        episodes = PaddedEpisode(steps=storage.read(self.data, lane), length=length)
        real = episodes.mask
        padded = jax.tree.map(
            lambda leaf: jnp.where(
                real.reshape(*real.shape, *(1,) * (leaf.ndim - 2)), leaf, jnp.zeros_like(leaf)
            ),
            episodes.steps,
        )
        return self.replace(lanes=lanes), episodes.replace(steps=padded), done

    def drop(self, envs: Bool[Array, " E"]) -> Self:
        """Forget, and count, the unfinished episodes of some environments: ``[num_envs]`` bools.

        Raises:
            ValueError: When traced, if the shape or dtype differs.
        """
        self = trees.on_device(self)
        envs = storage.check_rows(envs, "envs", (self.num_envs,), np.bool_, "(num_envs,)")
        return self.replace(lanes=self.lanes.drop(envs))

    def clear(self) -> Self:
        """Without any steps; counters go on. Shares no array with the original."""
        return self.replace(data=jax.tree.map(jnp.zeros_like, self.data), lanes=self.lanes.clear())

    def metrics(self) -> dict[str, Array]:
        """Numbers worth watching, all scalars.

        Returns:
            ``steps`` of unfinished episodes and episodes ``waiting``; and counted since creation,
            wrapping at 2**32: ``episodes`` that were complete, of these the ones ``cut`` for their
            length and ``refused`` because too many waited, and the unfinished ones ``dropped``.
        """
        counters = self.lanes.counters
        return {
            "steps": jnp.sum(self.filled, axis=-1, dtype=jnp.int32),
            "waiting": self.waiting,
            "episodes": counters[..., 0],
            "cut": counters[..., 1],
            "refused": counters[..., 2],
            "dropped": counters[..., 3],
        }

    def _check(self, steps: PyTree[Array], mask: Any) -> tuple[PyTree[Array], Bool[Array, "E T"]]:
        """The steps as arrays ``[num_envs, T, *shape]``, and which of them to take."""
        steps, batch = common.check_steps(self.data, steps, self.num_envs)
        return steps, common.check_step_mask(jnp.ones(batch, bool) if mask is None else mask, batch)


class ChunkAccumulator(struct.PyTreeNode):
    """Collects the fragments of ``num_workers`` workers into chunks of consecutive ones.

    Workers number their fragments. Where a number does not follow the one before, or the session is
    another one, what the worker has of an incomplete chunk is dropped and counted, and the fragment
    begins another. A chunk has the model version of its first fragment. Complete chunks are handed
    out as an ``EpisodeAccumulator`` hands out episodes, ready for ``ItemBuffer.add``.

    With ``freshness``, and the learner's version told by ``set_version``, no chunk begins with a
    fragment that is too stale: such fragments, and those of other sessions than the learner's, are
    dropped from the front of what a worker has, and what follows them is kept. So one old fragment
    does not cost the chunk.

    Attributes:
        data: Fragments, their versions and sessions, leaves ``[num_workers + waiting, F, ...]``.
        lanes: Which of them belong to which worker, and which are complete.
        start: The place of the first fragment in each lane, from where they go round,
            ``[num_workers + waiting]`` int32.
        number: The number of each worker's last fragment, ``[num_workers]`` int32.
        session: Its session, ``[num_workers]`` int32.
        learner: The learner's version and session, ``[2]`` int32.
        rejected: Fragments of workers that do not exist, ``[]`` uint32; wraps.
        stale: Fragments dropped as too stale, ``[]`` uint32; wraps.
        per_add: Most chunks handed out at a time, ``K``.
        freshness: Which fragments are too stale; None for none. Uses are the buffer's to count.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> accumulator = jaxbuf.ChunkAccumulator.create(
        ...     jnp.float32(0), num_workers=2, fragments_per_chunk=2
        ... )
        >>> accumulator, chunks, done = accumulator.add(
        ...     jnp.array([1.0, 5.0, 2.0]),
        ...     worker=jnp.array([0, 1, 0]),
        ...     number=jnp.array([0, 0, 1]),
        ...     version=jnp.array([7, 8, 8]),
        ... )
        >>> chunks.fragments[done].tolist(), chunks.version[done].tolist()
        ([[1.0, 2.0]], [7])

        Stale fragments at the front:

        >>> freshness = jaxbuf.Freshness(max_staleness=1, comparison=">")
        >>> accumulator = jaxbuf.ChunkAccumulator.create(
        ...     jnp.int32(0), num_workers=1, fragments_per_chunk=3, freshness=freshness
        ... )
        >>> number = jnp.arange(5)
        >>> accumulator, chunks, done = accumulator.set_version(3).add(
        ...     number, worker=0 * number, number=number, version=jnp.array([0, 3, 3, 3, 3])
        ... )
        >>> chunks.fragments[done].tolist(), accumulator.filled.tolist()
        ([[1, 2, 3]], [1])

    References:
        MineStudio (Cai et al., 2024), the fragment buffer of its online training.
    """

    data: tuple[PyTree[Array], Array, Array]
    lanes: Lanes
    start: Int[Array, " N"]
    number: Int[Array, " W"]
    session: Int[Array, " W"]
    learner: Int[Array, " 2"]
    rejected: UInt[Array, ""]
    stale: UInt[Array, ""]
    per_add: int = struct.field(pytree_node=False)
    freshness: Freshness | None = struct.field(pytree_node=False, default=None)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(
        cls,
        example: PyTree,
        num_workers: int,
        fragments_per_chunk: int,
        *,
        per_add: int | None = None,
        waiting: int | None = None,
        freshness: Freshness | None = None,
    ) -> Self:
        """An empty accumulator.

        Args:
            example: One unbatched fragment: arrays or ``jax.ShapeDtypeStruct``.
            num_workers: Workers ``W``.
            fragments_per_chunk: Fragments in a chunk, ``F``.
            per_add: Most chunks handed out by one ``add``, ``K``; by default ``num_workers``.
            waiting: Most complete chunks that are kept until they are handed out, those of the
                ``add`` itself included; by default the larger of ``num_workers`` and ``per_add``.
            freshness: Which fragments are too stale, by its ``max_staleness`` and ``comparison``:
                that of the buffer. None takes them all.

        Raises:
            ValueError: If a number is not an integer of at least 1, ``per_add`` is larger than
                ``waiting``, there are more than 2**30 fragments, ``example`` holds anything but
                arrays, or ``freshness`` is no ``Freshness``.
        """
        num_workers = common.check_count("num_workers", num_workers)
        length = common.check_count("fragments_per_chunk", fragments_per_chunk)
        per_add, waiting = _check_line(num_workers, length, per_add, waiting)
        common.check_parts((), freshness=freshness)
        leading = (num_workers + waiting, length)
        return cls(
            data=(
                storage.allocate(example, leading),
                jnp.zeros(leading, jnp.int32),
                jnp.zeros(leading, jnp.int32),
            ),
            lanes=Lanes.create(num_workers, waiting, length),
            start=jnp.zeros(leading[:1], jnp.int32),
            number=jnp.zeros((num_workers,), jnp.int32),
            session=jnp.zeros((num_workers,), jnp.int32),
            learner=jnp.zeros((2,), jnp.int32),
            rejected=jnp.uint32(0),
            stale=jnp.uint32(0),
            per_add=per_add,
            freshness=freshness,
        )

    @property
    def num_workers(self) -> int:
        """Workers."""
        return self.lanes.lane.shape[-1]

    @property
    def fragments_per_chunk(self) -> int:
        """Fragments in a chunk."""
        return self.lanes.length

    @property
    def example(self) -> Chunk:
        """One chunk as ``ItemBuffer.create`` and ``Queue.create`` want it, of shapes only."""
        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        return Chunk(fragments=_shapes(self.data[0]), version=number, session=number)

    @property
    def filled(self) -> Int[Array, " W"]:
        """Fragments of the incomplete chunk of each worker, ``[num_workers]``."""
        return self.lanes.filled

    @property
    def waiting(self) -> Int[Array, ""]:
        """Complete chunks that are not handed out yet."""
        return self.lanes.waiting

    @property
    def live(self) -> Bool[Array, "N F"]:
        """Which places of ``data`` hold a fragment, ``[num_workers + waiting, F]``."""
        length = self.fragments_per_chunk
        place = jnp.arange(length, dtype=jnp.int32)[None]
        return (place - self.start[:, None]) % length < self.lanes.held[:, None]

    def set_version(
        self, version: int | Int[Array, ""], session: int | Int[Array, ""] | None = None
    ) -> Self:
        """The learner is at this version now: of incomplete chunks what is too stale is dropped.

        It is dropped with what came before it, and counted; what follows is kept. Chunks that are
        complete and wait are left to the buffer.

        Args:
            version: Its version, an integer; usually one more than before.
            session: Which run of the learner this is, if that matters.

        Raises:
            ValueError: When traced, if the accumulator has no ``freshness``, or one of the two is
                not an integer.
        """
        if self.freshness is None:
            raise ValueError(
                "set_version was called, but nothing limits staleness here; create the accumulator "
                "with freshness=jaxbuf.Freshness(...)"
            )
        now = storage.check_rows(version, "version", (), np.int32, "a number")
        run = self.learner[1]
        if session is not None:
            run = storage.check_rows(session, "session", (), np.int32, "a number")
        accumulator = self.replace(learner=jnp.stack([now, run]))
        lane, length = self.lanes.lane, self.fragments_per_chunk
        rank = jnp.arange(length, dtype=jnp.int32)[None]
        place = (self.start[lane][:, None] + rank) % length
        versions, sessions = (leaf[lane[:, None], place] for leaf in self.data[1:])
        old = (rank < self.filled[:, None]) & accumulator._is_stale(versions, sessions)
        gone = jnp.max(jnp.where(old, rank + 1, 0), axis=1)
        return accumulator.replace(
            lanes=self.lanes.replace(filled=self.filled - gone),
            start=self.start.at[lane].add(gone, unique_indices=True) % length,
            stale=self.stale + jnp.sum(gone, dtype=jnp.uint32),
        )

    def add(
        self,
        fragments: PyTree[Array],
        worker: Int[Array, " B"],
        number: Int[Array, " B"],
        *,
        version: Int[Array, " B"] | None = None,
        session: Int[Array, " B"] | None = None,
        mask: Bool[Array, " B"] | None = None,
    ) -> tuple[Self, Chunk, Bool[Array, " K"]]:
        """Take fragments of any workers; hand out the chunks that are complete.

        Args:
            fragments: Leaves ``[B, *shape]``, in the example's dtypes; those of one worker in
                order.
            worker: Whose each is, ``[B]`` int32 in ``[0, num_workers)``; others are counted in
                ``metrics()["rejected"]``.
            number: Which of the worker's fragments each is, ``[B]`` int32, counting by one.
            version: The model version that each was made with, ``[B]`` int32; by default the
                learner's, which is 0 until ``set_version``. One that is too stale is dropped and
                counted in ``metrics()["stale"]``.
            session: The learner's session that each was made in, ``[B]`` int32; by default the
                learner's now. Fragments of two sessions never join into one chunk, and with
                ``freshness`` those of another one than the learner's are too stale.
            mask: Which fragments to take, ``[B]``.

        Returns:
            The accumulator that goes on; up to ``per_add`` chunks, those first that were complete
            first; and which rows hold one, ``[K]``: the ``mask`` for ``ItemBuffer.add``.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example.
        """
        self = trees.on_device(self)
        fragments, (rows,) = storage.check(self.data[0], fragments, "fragments", ("B",), skip=2)
        shape = (rows,)
        worker = storage.check_rows(worker, "worker", shape, np.int32, "(B,)")
        number = storage.check_rows(number, "number", shape, np.int32, "(B,)")
        version = jnp.broadcast_to(self.learner[0], shape) if version is None else version
        version = storage.check_rows(version, "version", shape, np.int32, "(B,)")
        session = jnp.broadcast_to(self.learner[1], shape) if session is None else session
        session = storage.check_rows(session, "session", shape, np.int32, "(B,)")
        offered = jnp.ones(shape, bool)
        if mask is not None:
            offered = storage.check_rows(mask, "mask", shape, np.bool_, "(B,)")
        if rows == 0:
            return self.take()
        known = offered & (worker >= 0) & (worker < self.num_workers)
        stale = known & self._is_stale(version, session)
        owner = jnp.arange(self.num_workers, dtype=jnp.int32)[:, None]
        taken = (known & ~stale)[None] & (worker[None] == owner)
        row = jnp.where(taken, jnp.arange(rows, dtype=jnp.int32)[None], -1)
        latest = jax.lax.cummax(row, axis=1)
        before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        last_number = _at(number, before, self.number[:, None])
        last_session = _at(session, before, self.session[:, None])
        follows = (number[None] == last_number + 1) & (session[None] == last_session)
        lanes, target = self.lanes.place(taken, jnp.zeros_like(taken), taken & ~follows)
        accumulator = self.replace(
            # A row is one worker's; for the others its place lies past the end.
            data=_write(
                self.data, (fragments, version, session), self._turn(jnp.min(target, axis=0))
            ),
            lanes=lanes,
            number=_at(number, latest[:, -1], self.number),
            session=_at(session, latest[:, -1], self.session),
            rejected=self.rejected + jnp.sum(offered & ~known, dtype=jnp.uint32),
            stale=self.stale + jnp.sum(stale, dtype=jnp.uint32),
        )
        return accumulator.take()

    def take(self) -> tuple[Self, Chunk, Bool[Array, " K"]]:
        """Hand out up to ``per_add`` of the chunks that wait, as ``add`` does."""
        self = trees.on_device(self)
        lanes, lane, _, done = self.lanes.take(self.per_add)
        length = self.fragments_per_chunk
        place = lane[:, None] * length + jnp.arange(length, dtype=jnp.int32)[None]
        place = self._turn(place.reshape(-1))
        rows = jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2), self.data)
        fragments, version, session = jax.tree.map(
            lambda leaf: leaf.reshape(self.per_add, length, *leaf.shape[1:]),
            storage.read(rows, place),
        )
        chunks = Chunk(fragments, version[:, 0], session[:, 0])
        return self.replace(lanes=lanes), chunks, done

    def drop(self, workers: Bool[Array, " W"]) -> Self:
        """Forget, and count, the incomplete chunks of some workers: ``[num_workers]`` bools.

        Raises:
            ValueError: When traced, if the shape or dtype differs.
        """
        shape = (self.num_workers,)
        self = trees.on_device(self)
        workers = storage.check_rows(workers, "workers", shape, np.bool_, "(num_workers,)")
        return self.replace(lanes=self.lanes.drop(workers))

    def clear(self) -> Self:
        """Without any fragments; counters go on. Shares no array with the original."""
        return self.replace(
            data=jax.tree.map(jnp.zeros_like, self.data),
            lanes=self.lanes.clear(),
            start=jnp.zeros_like(self.start),
            number=jnp.zeros_like(self.number),
            session=jnp.zeros_like(self.session),
            learner=self.learner.copy(),
            rejected=self.rejected.copy(),
            stale=self.stale.copy(),
        )

    def metrics(self) -> dict[str, Array]:
        """Numbers worth watching, all scalars.

        Returns:
            ``fragments`` of incomplete chunks and chunks ``waiting``; and counted since creation,
            wrapping at 2**32: ``chunks`` that were complete, of these the ones ``refused`` because
            too many waited, incomplete ones ``dropped``, for a gap in the numbers or by ``drop``,
            and the fragments ``rejected`` for their worker and dropped as too ``stale``.
        """
        counters = self.lanes.counters
        return {
            "fragments": jnp.sum(self.filled, axis=-1, dtype=jnp.int32),
            "waiting": self.waiting,
            "chunks": counters[..., 0],
            "refused": counters[..., 2],
            "dropped": counters[..., 3],
            "rejected": self.rejected,
            "stale": self.stale,
        }

    def _is_stale(
        self, version: Int[Array, "..."], session: Int[Array, "..."]
    ) -> Bool[Array, "..."]:
        """Which fragments are too stale, or of another session than the learner's."""
        if self.freshness is None:
            return jnp.zeros(version.shape, bool)
        return (version < self.freshness.floor(self.learner[0])) | (session != self.learner[1])

    def _turn(self, target: Int[Array, " R"]) -> Int[Array, " R"]:
        """Where rows of lanes lie, ``lane * F + place``, if place 0 lies at the lane's start."""
        length = self.fragments_per_chunk
        lane, place = target // length, target % length
        turned = lane * length + (self.start.at[lane].get(mode="clip") + place) % length
        return jnp.where(lane < self.lanes.count, turned, target)


def _check_line(
    owners: int, length: int, per_add: int | None, waiting: int | None
) -> tuple[int, int]:
    """How many items are handed out at a time, and how many may wait."""
    hands_out = common.check_count("per_add", owners if per_add is None else per_add)
    line = common.check_count("waiting", max(owners, hands_out) if waiting is None else waiting)
    if hands_out > line:
        raise ValueError(
            f"per_add is {hands_out}, but only {line} items may be waiting; make per_add smaller "
            "or waiting larger"
        )
    if (owners + line) * length > 2**30:
        raise ValueError(
            f"{owners + line} items of {length} rows are more than 2**30 rows; make them shorter "
            "or waiting smaller"
        )
    return hands_out, line


def _at(values: Int[Array, " B"], row: Int[Array, "..."], otherwise: Array) -> Int[Array, "..."]:
    """The values at some rows; those of ``otherwise`` where a row is negative."""
    return jnp.where(row < 0, otherwise, values[row])


def _shapes(data: PyTree[Array]) -> PyTree[jax.ShapeDtypeStruct]:
    """One lane of the storage, as shapes and dtypes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)


def _write(data: PyTree[Array], rows: PyTree[Array], target: Int[Array, "..."]) -> PyTree[Array]:
    """Put rows, leaves ``[*target.shape, ...]``, at their places in the lanes of the storage."""
    written = storage.write(
        jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2), data),
        jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, target.ndim), rows),
        target.reshape(-1),
    )
    return jax.tree.map(lambda new, leaf: new.reshape(leaf.shape), written, data)
