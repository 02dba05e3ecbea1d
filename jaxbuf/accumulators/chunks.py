"""The accumulator of chunks, which assembles them from the fragments of workers."""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, PyTree

from jaxbuf.accumulators.lanes import Lanes, at_a_time, check_line, shapes_of, write
from jaxbuf.buffers.arguments import check_mask, check_parts, check_version
from jaxbuf.core import storage, trees
from jaxbuf.core.describe import Described
from jaxbuf.core.division import quotient, remainder
from jaxbuf.core.program import program
from jaxbuf.core.sizes import check_count
from jaxbuf.core.types import Arrays, Count, Dtype, Index, Integers, Mask, Word
from jaxbuf.strategies.freshness import Freshness

# The dtypes of the numbers of each fragment.
_INTEGERS: dict[str, Dtype] = dict.fromkeys(
    ("version", "session", "worker", "number"), np.dtype("int32")
)


class Chunk(Described):
    """Consecutive fragments of one worker as one item; or a batch of them.

    Attributes:
        fragments: Leaves ``[fragments_per_chunk, ...]``, or ``[B, fragments_per_chunk, ...]``.
        version: The model version of the first fragment; ``[]`` or ``[B]`` int32.
        session: The session of all fragments; ``[]`` or ``[B]`` int32.
    """

    fragments: Arrays
    version: Int[Array, "..."]
    session: Int[Array, "..."] | None = None


class ChunkAccumulator(Described):
    """Collects the fragments of ``num_workers`` workers into chunks of consecutive fragments.

    Workers number their fragments. If a number does not follow the previous one, or the session
    changes, the worker's incomplete chunk is dropped and counted, and the fragment begins a new
    one. A chunk has the model version of its first fragment. Complete chunks are returned in the
    same way as the episodes of an ``EpisodeAccumulator``, ready for ``ItemBuffer.add``.

    With ``freshness``, and the learner's version set by ``set_version``, no chunk begins with a
    fragment that is too stale. Fragments that are too stale, or of another session than the
    learner's, are dropped from the front of an incomplete chunk, and the later ones are kept, so
    that a single old fragment does not cost the whole chunk.

    Attributes:
        data: Fragments, their versions and sessions, leaves ``[num_workers + waiting, F, ...]``.
        lanes: Records to which worker each row of ``data`` belongs, and which are complete.
        start: The index of the first fragment in each lane, ``[num_workers + waiting]`` int32; the
            others follow it cyclically.
        number: The number of each worker's last fragment, ``[num_workers]`` int32.
        session: The session of each worker's last fragment, ``[num_workers]`` int32.
        learner: The learner's version and session, ``[2]`` int32.
        rejected: The number of fragments of workers that do not exist, ``[]`` uint32; it wraps.
        stale: The number of fragments dropped as too stale, ``[]`` uint32; it wraps.
        per_add: The largest number of chunks returned at a time, ``K``; None for the default.
        freshness: Determines which fragments are too stale; None keeps all. Uses are counted by the
            buffer, not here.

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

        Stale fragments are dropped from the front:

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

    data: tuple[Arrays, Array, Array]
    lanes: Lanes
    start: Int[Array, " N"]
    number: Int[Array, " W"]
    session: Int[Array, " W"]
    learner: Int[Array, " 2"]
    rejected: Word
    stale: Word
    per_add: int | None = struct.field(pytree_node=False)
    freshness: Freshness | None = struct.field(pytree_node=False, default=None)

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
        """Creates an empty accumulator.

        Args:
            example: One unbatched fragment of arrays or ``jax.ShapeDtypeStruct``.
            num_workers: The number of workers ``W``.
            fragments_per_chunk: The number of fragments in a chunk, ``F``.
            per_add: The largest number of chunks returned by one ``add``, ``K``. By default 16, or
                ``32 * B / fragments_per_chunk`` if that is larger, and at most ``num_workers``.
            waiting: The largest number of complete chunks that are kept until they are returned,
                including chunks completed by the same ``add``; by default ``num_workers``, or
                ``per_add`` if that was given and is larger.
            freshness: The buffer's ``Freshness``, whose ``max_staleness`` and ``comparison``
                determine which fragments are too stale. None keeps all fragments.

        Raises:
            ValueError: If a number is not an integer of at least 1, ``per_add`` is larger than
                ``waiting``, there are more than 2**30 fragments, ``example`` holds anything but
                arrays, or ``freshness`` is neither None nor a ``Freshness``.
        """
        num_workers = check_count("num_workers", num_workers)
        length = check_count("fragments_per_chunk", fragments_per_chunk)
        per_add, waiting = check_line(num_workers, length, per_add, waiting)
        check_parts((), freshness=freshness)
        leading = (num_workers + waiting, length)
        return cls(
            data=(
                storage.allocate(example, leading, ("fragments_per_chunk", length)),
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
        """The number of workers."""
        return self.lanes.lane.shape[-1]

    @property
    def fragments_per_chunk(self) -> int:
        """The number of fragments in a chunk."""
        return self.lanes.length

    @property
    def example(self) -> Chunk:
        """The shapes of one chunk, as an example for ``ItemBuffer.create`` or ``Queue.create``."""
        number: PyTree = jax.ShapeDtypeStruct((), jnp.int32)
        return Chunk(fragments=shapes_of(self.data[0]), version=number, session=number)

    @property
    def filled(self) -> Int[Array, " W"]:
        """The number of fragments in the incomplete chunk of each worker, ``[num_workers]``."""
        return self.lanes.filled

    @property
    def storage(self) -> Arrays:
        """Arrays with the structure and the dtypes of fragments."""
        return self.data[0]

    @property
    def waiting(self) -> Count:
        """The number of complete chunks that have not been returned yet."""
        return self.lanes.waiting

    @property
    def live(self) -> Bool[Array, "N F"]:
        """A mask of the rows of ``data`` that hold a fragment, ``[num_workers + waiting, F]``."""
        length = self.fragments_per_chunk
        position = jnp.arange(length, dtype=jnp.int32)[None]
        return remainder(position - self.start[:, None], length) < self.lanes.num_rows[:, None]

    @program(dtypes=_INTEGERS)
    def set_version(self, version: int | Count, session: int | Count | None = None) -> Self:
        """Sets the learner's version, and drops fragments of incomplete chunks that are too stale.

        Fragments that are too stale are dropped and counted together with all earlier ones of their
        chunk; later ones are kept. Complete chunks that are waiting do not change: the buffer
        checks them.

        Args:
            version: The learner's version, an integer; usually one more than before.
            session: The number of the learner's run. None keeps the present session.

        Raises:
            ValueError: When traced, if the accumulator has no ``freshness``, or an argument is not
                an integer.
        """
        if self.freshness is None:
            raise ValueError(
                "set_version was called, but nothing limits staleness here; create the accumulator "
                "with freshness=jaxbuf.Freshness(...)"
            )
        new_version, new_session = check_version(version, session)
        new_session = self.learner[1] if new_session is None else new_session
        accumulator = self.replace(learner=jnp.stack([new_version, new_session]))
        lane, length = self.lanes.lane, self.fragments_per_chunk
        rank = jnp.arange(length, dtype=jnp.int32)[None]
        position = remainder(self.start[lane][:, None] + rank, length)
        versions, sessions = (leaf[lane[:, None], position] for leaf in self.data[1:])
        is_stale = (rank < self.filled[:, None]) & accumulator._is_stale(versions, sessions)
        dropped = jnp.max(jnp.where(is_stale, rank + 1, 0), axis=1)
        return accumulator.replace(
            lanes=self.lanes.replace(filled=self.filled - dropped),
            start=remainder(self.start.at[lane].add(dropped, unique_indices=True), length),
            stale=self.stale + jnp.sum(dropped, dtype=jnp.uint32),
        )

    @program(stored=("fragments",), dtypes=_INTEGERS)
    def add(
        self,
        fragments: Arrays,
        worker: Index,
        number: Integers,
        *,
        version: Integers | None = None,
        session: Integers | None = None,
        mask: Mask | None = None,
    ) -> tuple[Self, Chunk, Bool[Array, " K"]]:
        """Adds fragments of any workers, and returns complete chunks.

        Args:
            fragments: The fragments, leaves ``[B, *shape]`` with the example's dtypes; the
                fragments of each worker must be in order.
            worker: The worker of each fragment, ``[B]`` int32 in ``[0, num_workers)``; fragments of
                other numbers are dropped and counted in ``metrics()["rejected"]``.
            number: The number of each fragment, ``[B]`` int32, which increases by one from each
                fragment of a worker to the next.
            version: The model version that generated each fragment, ``[B]`` int32; by default the
                learner's version, which is 0 before ``set_version``. A fragment that is too stale
                is dropped and counted in ``metrics()["stale"]``.
            session: The learner's session in which each fragment was generated, ``[B]`` int32; by
                default the learner's session. A chunk never contains fragments of two sessions, and
                with ``freshness``, fragments of another session than the learner's are too stale.
            mask: A mask of the fragments to add, ``[B]``.

        Returns:
            The new accumulator; up to ``per_add`` chunks in the order in which they were completed;
            and a mask of the rows that hold a chunk, ``[K]``, which is the ``mask`` for
            ``ItemBuffer.add``.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example.
        """
        fragments, (rows,) = storage.check(self.data[0], fragments, "fragments", ("B",), skip=2)
        shape = (rows,)
        version = jnp.broadcast_to(self.learner[0], shape) if version is None else version
        session = jnp.broadcast_to(self.learner[1], shape) if session is None else session
        worker = storage.check_rows(worker, "worker", shape, np.int32, "(B,)")
        number = storage.check_rows(number, "number", shape, np.int32, "(B,)")
        version = storage.check_rows(version, "version", shape, np.int32, "(B,)")
        session = storage.check_rows(session, "session", shape, np.int32, "(B,)")
        offered = check_mask(mask, shape, "(B,)")
        if rows == 0:
            return self.take()
        assigned = offered & (worker >= 0) & (worker < self.num_workers)
        stale = assigned & self._is_stale(version, session)
        owner = jnp.arange(self.num_workers, dtype=jnp.int32)[:, None]
        accepted = (assigned & ~stale)[None] & (worker[None] == owner)  # [W, B]
        row = jnp.where(accepted, jnp.arange(rows, dtype=jnp.int32)[None], -1)
        latest = jax.lax.cummax(row, axis=1)
        previous = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        last_number = _at(number, previous, self.number[:, None])
        last_session = _at(session, previous, self.session[:, None])
        follows = (number[None] == last_number + 1) & (session[None] == last_session)
        lanes, target = self.lanes.place(accepted, jnp.zeros_like(accepted), accepted & ~follows)
        accumulator = self.replace(
            # Each row belongs to one worker; for all others its target is past the end.
            data=write(
                self.data, (fragments, version, session), self._rotated(jnp.min(target, axis=0))
            ),
            lanes=lanes,
            number=_at(number, latest[:, -1], self.number),
            session=_at(session, latest[:, -1], self.session),
            rejected=self.rejected + jnp.sum(offered & ~assigned, dtype=jnp.uint32),
            stale=self.stale + jnp.sum(stale, dtype=jnp.uint32),
        )
        return accumulator._take(rows)

    @program()
    def take(self) -> tuple[Self, Chunk, Bool[Array, " K"]]:
        """Returns waiting chunks, as many as an ``add`` of a fragment of each worker."""
        return self._take(self.num_workers)

    def _take(self, rows: int) -> tuple[Self, Chunk, Bool[Array, " K"]]:
        """Returns as many of the waiting chunks as an ``add`` of so many fragments does."""
        lanes, lane, _, done = self.lanes.take(at_a_time(self.per_add, self.lanes, rows))
        length = self.fragments_per_chunk
        row = lane[:, None] * length + jnp.arange(length, dtype=jnp.int32)[None]
        row = self._rotated(row.reshape(-1)).reshape(row.shape)  # [K, F]
        rows = jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2), self.data)
        fragments, version, session = storage.read(rows, row)
        chunks = Chunk(fragments, version[:, 0], session[:, 0])
        return self.replace(lanes=lanes), chunks, done

    @program()
    def drop(self, workers: Bool[Array, " W"]) -> Self:
        """Drops and counts the incomplete chunks of some workers.

        Args:
            workers: A mask of the workers, ``[num_workers]``.

        Raises:
            ValueError: When traced, if the shape or dtype differs.
        """
        shape = (self.num_workers,)
        workers = storage.check_rows(workers, "workers", shape, np.bool_, "(num_workers,)")
        return self.replace(lanes=self.lanes.drop(workers))

    @program()
    def clear(self) -> Self:
        """Returns an empty accumulator with the same counters, which shares no array with this."""
        empty = self.replace(
            data=jax.tree.map(jnp.zeros_like, self.data),
            lanes=self.lanes.clear(),
            start=jnp.zeros_like(self.start),
            number=jnp.zeros_like(self.number),
            session=jnp.zeros_like(self.session),
        )
        return trees.in_place_of(self, empty)

    @program()
    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor.

        Returns:
            The numbers of ``fragments`` in incomplete chunks and of chunks ``waiting``. Also counts
            since creation, which wrap at 2**32: completed ``chunks``; of these the chunks
            ``refused`` because too many were waiting; incomplete chunks ``dropped``, for a gap in
            the numbers or by ``drop``; fragments ``rejected`` for their worker, and fragments
            dropped as too ``stale``.
        """
        counts = self.lanes.counts()
        return {
            "fragments": jnp.sum(self.filled, axis=-1, dtype=jnp.int32),
            "waiting": self.waiting,
            "chunks": counts["complete"],
            "refused": counts["refused"],
            "dropped": counts["dropped"],
            "rejected": self.rejected,
            "stale": self.stale,
        }

    def _is_stale(
        self, version: Int[Array, "..."], session: Int[Array, "..."]
    ) -> Bool[Array, "..."]:
        """Returns a mask of the fragments that are too stale, or not of the learner's session."""
        if self.freshness is None:
            return jnp.zeros(version.shape, bool)
        return (version < self.freshness.floor(self.learner[0])) | (session != self.learner[1])

    def _rotated(self, target: Int[Array, " R"]) -> Int[Array, " R"]:
        """Returns the rows of the storage, ``lane * F + index``, of these rows of lanes.

        ``target`` counts from the first fragment of each lane, which stands at ``start``.
        """
        length = self.fragments_per_chunk
        lane, position = quotient(target, length), remainder(target, length)
        rotated = lane * length + remainder(storage.select(lane, self.start) + position, length)
        return jnp.where(lane < self.lanes.count, rotated, target)


def _at(values: Integers, row: Int[Array, "..."], otherwise: Array) -> Int[Array, "..."]:
    """Returns the values at some rows, or ``otherwise`` where a row is negative."""
    return jnp.where(row < 0, otherwise, values[row])
