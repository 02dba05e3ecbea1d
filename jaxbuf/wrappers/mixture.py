"""A mixture of buffers, from which a batch is sampled at given ratios."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Integer, PyTree, UInt

from jaxbuf.buffers import draws
from jaxbuf.buffers.arguments import (
    Where,
    broadcast_steps,
    check_batch_size,
    check_slots,
    check_where,
    mask_of,
)
from jaxbuf.buffers.buffer import By, Share, as_buffer, check_options
from jaxbuf.buffers.operation import Operation
from jaxbuf.buffers.queue import Queue
from jaxbuf.buffers.sample import (
    Contents,
    DrawnBuffer,
    Normalization,
    Sample,
    Within,
    weighed,
)
from jaxbuf.buffers.slotted import (
    AddOptions,
    Envs,
    InsertOptions,
    PartOptions,
    SlottedBuffer,
    WindowOptions,
)
from jaxbuf.core import checks, storage, trees
from jaxbuf.core.describe import Described
from jaxbuf.core.donation import check_readable
from jaxbuf.core.hyperparameters import Varying, merged
from jaxbuf.core.random import check_key
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import (
    Arrays,
    Count,
    Flag,
    Function,
    Index,
    Integers,
    Key,
    Mask,
    Number,
    Words,
)
from jaxbuf.strategies.episodes import Episode
from jaxbuf.strategies.protocols import Sampler, Support
from jaxbuf.wrappers import quotas

# The ends of errors, by the ability that an operation needs and no part has.
_MISSING = {
    "priorities": "has priorities; create one of them with sampler=jaxbuf.Prioritized(...)",
    "contents": "is an ItemBuffer or a TrajectoryBuffer, whose contents can be looked up and "
    "changed",
    "scores": "uses scores; create one of them with evictor=jaxbuf.Lowest() or "
    "sampler=jaxbuf.Softmax()",
    "removal": "removes items; create one of them with parts=(jaxbuf.Removable(),)",
    "freshness": "limits uses or staleness; create one of them with "
    "freshness=jaxbuf.Freshness(...)",
    "environments": "has environments; make one of them a jaxbuf.TrajectoryBuffer",
    "episodes": "knows its episodes; create a TrajectoryBuffer with episodes=jaxbuf.Episodes()",
}


class Mixture(SlottedBuffer, Described):
    """Several buffers, sampled together at given ratios, for example offline and online data.

    The buffers are called its parts. A batch has an exact number of rows from each part, ordered by
    part. Slots are numbered through all parts: the slots of a part follow those of the parts before
    it, so that ``update_priority`` reaches the right part. The ``probability`` of a row is the
    part's share of the batch, times the probability within the part. ``importance_weights`` are
    therefore relative to a uniform draw from the items of all parts, whatever their samplers. If
    the ratios are to remain, weigh the rows within their parts:
    ``sample(..., beta=, within="part")``.

    An empty part returns rows that are not valid, and the other parts are not affected, so that
    shapes and the numbers of rows do not depend on the contents of the parts. Use ``can_sample``
    to check.

    The mixture is an immutable pytree, like its parts, and works with ``jaxbuf.sample``,
    ``jaxbuf.update_priority`` and ``jaxbuf.importance_weights``. A part may be a mixture itself.

    Parts may be of different kinds: an operation applies to the parts that have it, for example
    ``mark_used`` to those with ``Freshness``, each with its own rows. Rows of other parts are
    dropped. ``add`` and ``insert`` take the number of the part, ``part=``. ``part_slots`` returns
    the slots of one part for its own methods.

    A part may also be a ``Queue``: ``next_batch`` takes its rows out, so that each of its items is
    in one batch, and draws the rest. Such a mixture cannot ``sample``.

    Attributes:
        parts: The buffers.
        ratios: The share of each part in a batch; they sum to 1. ``Varying()`` if they vary: then
            ``hyperparameters["ratios"]`` has them.
        names: The names of the parts, which take the place of their numbers in ``metrics`` and
            ``hyperparameters``, and are legal as ``part=``; empty if they have none.
        varying: Ratios that vary, ``[P]``, and the number of calls that gave illegal ones,
            ``rejected``; empty if they do not vary.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> offline = jaxbuf.ItemBuffer.create(jnp.float32(0), 100)
        >>> online = jaxbuf.ItemBuffer.create(jnp.float32(0), 10, sampler=jaxbuf.Prioritized())
        >>> mixture = jaxbuf.Mixture.create([offline.add(jnp.arange(50.0)), online], [3, 1])
        >>> mixture = mixture.add(-jnp.ones(5), part=1)
        >>> batch = jaxbuf.sample(mixture, jax.random.key(0), 8)
        >>> mixture.part_of(batch.slots).tolist(), batch.data[6:].tolist()
        ([0, 0, 0, 0, 0, 0, 1, 1], [-1.0, -1.0])
        >>> mixture = jaxbuf.update_priority(mixture, batch.slots, jnp.abs(batch.data))
    """

    parts: tuple[DrawnBuffer, ...]
    ratios: tuple[float, ...] | Varying = struct.field(pytree_node=False)
    names: tuple[str, ...] = struct.field(pytree_node=False, default=())
    varying: dict[str, Array] = struct.field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.parts, list | dict):
            raise TypeError("Mixture.create(buffers, ratios) makes a mixture")

    @classmethod
    def create(
        cls,
        buffers: Sequence[DrawnBuffer | Queue] | Mapping[str, DrawnBuffer | Queue],
        ratios: Sequence[float] | Float[Array, " P"] | Varying,
    ) -> Self:
        """Creates a mixture of buffers.

        Args:
            buffers: The parts, whose samples must have the same structure, shapes and dtypes. Items
                of a ``Queue`` are taken by ``next_batch``. A dict gives names to the parts, which
                are strings without ``/``; its order is that of the parts, and of the ratios.
            ratios: The relative numbers of rows from each part. With ``jaxbuf.Varying(ratios)``
                they can change while programs run, by ``set_hyperparameters(ratios=...)``; a draw
                then costs as much as one of a whole batch from each part.

        Raises:
            ValueError: If there are no buffers, a name is not legal, the number of ratios differs,
                a ratio is negative or not finite, all ratios are zero, samples of the parts differ
                in structure, shape or dtype, two parts share memory, there are 2**31 slots or more,
                or ratios vary and a part cannot draw a number of rows that varies.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> offline, online = [jaxbuf.ItemBuffer.create(jnp.float32(0), 8) for _ in range(2)]
            >>> parts = {"offline": offline, "online": online}
            >>> mixture = jaxbuf.Mixture.create(parts, jaxbuf.Varying((0.5, 0.5)))
            >>> mixture = mixture.add(jnp.zeros(8), part="offline").add(jnp.ones(8), part="online")
            >>> mixture = jaxbuf.set_hyperparameters(mixture, ratios=(0.25, 0.75))
            >>> jaxbuf.sample(mixture, jax.random.key(0), 4).data.tolist()
            [0.0, 1.0, 1.0, 1.0]
        """
        names = _check_names(buffers) if isinstance(buffers, Mapping) else ()
        buffers = [*buffers.values()] if isinstance(buffers, Mapping) else buffers
        parts = checks.check_sequence("buffers", buffers, "buffers")
        fixed, varying = _split(ratios, len(parts))
        for i, part in enumerate(parts):
            if not as_buffer(part).is_queue:
                check_options(part, "sample", {}, f"buffers[{i}]")
            _check_part_kind(part, f"buffers[{i}]")
            if varying:
                _check_draws_some(part, f"buffers[{i}]")
        if sum(part.capacity for part in parts) >= 2**31:
            raise ValueError("buffers have 2**31 slots or more; expected fewer in all")
        leaves = [id(leaf) for leaf in jax.tree.leaves(parts)]
        if len(set(leaves)) < len(leaves):
            raise ValueError("buffers share memory, so they cannot be donated; pass copies")
        _check_samples_alike(parts)
        return cls(parts=parts, ratios=fixed, names=names, varying=varying)

    @property
    def members(self) -> tuple[Any, ...]:
        return self.parts

    @property
    def capacity(self) -> int:
        """The number of slots of all parts together."""
        return sum(part.capacity for part in self.parts)

    @property
    def size(self) -> Count:
        """The number of items, or steps, in all parts together."""
        return _total([part.size for part in self.parts])

    @property
    def occupancy(self) -> Contents:
        """An object whose ``size`` is the number of items, or windows, in all parts."""
        check_readable(self)
        return Contents(_total([part.occupancy.size for part in self.parts]))

    def counts(self, batch_size: int) -> tuple[int, ...] | Int[Array, " P"]:
        """Returns the number of rows of a batch from each part; an array ``[P]`` if ratios vary.

        Each part gets its share rounded down, and the remaining rows go to the parts with the
        largest remainders; among equal remainders, to the first parts.
        """
        return quotas.divided(check_batch_size(batch_size), self._units)

    def shares(self, rows: int | Count) -> list[Share]:
        """Returns the buffers that a batch comes from; a part may be a mixture of several.

        A part that gives no row to this batch is listed with its ratio. If ratios vary, fractions
        are arrays.
        """
        counts = quotas.divided(rows, self._units)
        shares: list[Share] = []
        for part, ratio, count in zip(self.parts, self._shares, counts, strict=True):
            buffer, fraction = as_buffer(part), _fraction(count, rows, ratio)
            if buffer.is_queue:
                shares.append(Share(None, part.capacity, fraction))
            else:
                inner = buffer.shares(count)
                shares += [share._replace(fraction=share.fraction * fraction) for share in inner]
        return shares

    def can_sample(self, batch_size: int | Count = 1) -> Flag:
        """Returns whether every part can fill its rows of a batch, and has at least one item.

        Args:
            batch_size: The number of rows ``B``; may be traced. Parts with a ratio of 0 are
                ignored.
        """
        if isinstance(batch_size, int | np.integer):
            counts = self.counts(batch_size)
        else:
            rows = storage.check_rows(batch_size, "batch_size", (), np.int32, "a number")
            counts = quotas.divided(rows, self._units)
        if isinstance(counts, tuple):
            counts = [max(count, 1) for count in counts]
        else:
            counts = jnp.maximum(counts, 1)
        if self.varying:
            able = jnp.stack([part.can_sample(counts[i]) for i, part in enumerate(self.parts)])
            return jnp.all(able | ~quotas.is_positive(self.varying["ratios"]))
        able = [
            part.can_sample(counts[i])
            for i, (part, ratio) in enumerate(zip(self.parts, self.ratios, strict=True))
            if ratio > 0
        ]
        return jnp.all(jnp.stack(able), axis=0)

    def checked(self, updates: dict[str, Any]) -> dict[str, Any]:
        if self.varying and "ratios" in updates and "varying" not in updates:
            raise ValueError(
                "ratios vary here; change them with mixture.set_hyperparameters(ratios=...)"
            )
        return super().checked(updates)

    def check_room(self, asks: str, rows: int, sequence_length: int | None = None) -> None:
        if self.varying:
            return  # What a part gives is not known.
        for i, count in enumerate(self.counts(rows)):
            if self.ratios[i] > 0:
                part_asks = f"{asks}, of which parts[{i}] gives {count}"
                as_buffer(self.parts[i]).check_room(part_asks, max(count, 1), sequence_length)

    def check_add(self, arguments: dict[str, Any]) -> dict[str, Any]:
        # Another part than one of these is refused by ``add`` itself.
        i = self._number_of(arguments.get("part"))
        return arguments if i is None else as_buffer(self.parts[i]).check_add(arguments)

    def add(self, items: Arrays, **options: Unpack[AddOptions]) -> Self:
        i = self._pop_part(options)
        check_options(self.parts[i], "add", options)
        return self._with_part(i, self.parts[i].add(items, **options))

    def insert(self, items: Arrays, **options: Unpack[InsertOptions]) -> tuple[Self, Slots]:
        i = self._pop_part(options)
        check_options(self.parts[i], "insert", options, f"parts[{i}]")
        buffer, slots = self._slotted(i).insert(items, **options)
        return self._with_part(i, buffer), self._global_slots(i, slots)

    @property
    def hyperparameters(self) -> dict[str, Array]:
        """The varying ``ratios``, and the numbers of samplers with that of the part: ``0/alpha``.

        Those of a mixture that is a part are ``1/ratios``. Names of parts take the place of their
        numbers.
        """
        return {name: value for name, value in self.varying.items() if name == "ratios"} | {
            f"{label}/{name}": value
            for label, part in zip(self._labels, self.parts, strict=True)
            for name, value in getattr(part, "hyperparameters", {}).items()
        }

    def check_hyperparameters(self, arguments: dict[str, Any]) -> dict[str, Any]:
        named = dict(arguments)
        values, part = named.pop("values", None), named.pop("part", None)
        pairs = merged(values, named)
        new = dict(pairs)
        if len(new) < len(pairs):
            raise ValueError(f"a number was given twice in {[*new]}; name each number once")
        if part is not None:
            if "ratios" in new:
                raise ValueError("ratios are those of the mixture as a whole; leave part out")
            i = self._pop_part({"part": part})
            new = {f"{self._labels[i]}/{name}": value for name, value in new.items()}
        checked: dict[str, Array] = {}
        if "ratios" in new:
            if not self.varying:
                raise ValueError(
                    "ratios do not vary here; create the mixture with jaxbuf.Varying(ratios)"
                )
            given = new.pop("ratios")
            checked["ratios"] = quotas.check_varying(given, self.varying["ratios"].shape[0])
        for i, inner in self._by_part(new):
            check_options(self.parts[i], "set_hyperparameters", {}, f"parts[{i}]")
            inner = as_buffer(self.parts[i]).check_hyperparameters({"values": inner})["values"]
            checked |= {f"{self._labels[i]}/{name}": value for name, value in inner.items()}
        return {"values": checked}

    def kept_by_hyperparameters(self, arguments: dict[str, Any]) -> tuple[str, ...]:
        return ("parts",) if arguments["values"].keys() == {"ratios"} else ()

    def set_hyperparameters(
        self, values: Mapping[str, ArrayLike] | None = None, **options: Any
    ) -> Self:
        checked = self.check_hyperparameters({"values": values, **options})["values"]
        legal = self.are_legal(checked)
        return self.with_values(checked, legal).counting_illegal(legal, checked)

    def are_legal(self, values: dict[str, Array]) -> Flag:
        inner = [as_buffer(self.parts[i]).are_legal(of) for i, of in self._by_part(values)]
        own = [quotas.are_legal(values["ratios"])] if "ratios" in values else []
        return jnp.all(jnp.stack([jnp.bool_(True), *own, *inner]), axis=0)

    def with_values(self, values: dict[str, Array], legal: Flag) -> Self:
        parts, varying = list(self.parts), dict(self.varying)
        for i, inner in self._by_part(values):
            parts[i] = as_buffer(parts[i]).with_values(inner, legal)
        if "ratios" in values:
            varying["ratios"] = jnp.where(legal, values["ratios"], varying["ratios"])
        return trees.updated(self, parts=tuple(parts), varying=varying)

    def counting_illegal(self, legal: Flag, values: dict[str, Array]) -> Self:
        inner = self._by_part(values)
        if inner and not ("ratios" in values or (self.varying and len(inner) > 1)):
            i, of = inner[0]
            return self._with_part(i, as_buffer(self.parts[i]).counting_illegal(legal, of))
        if not self.varying:
            return self
        rejected = self.varying["rejected"] + (~legal).astype(jnp.uint32)
        return trees.updated(self, varying={**self.varying, "rejected": rejected})

    def with_sampler(self, sampler: Sampler, **options: Unpack[PartOptions]) -> Self:
        i = self._pop_part(options)
        check_options(self.parts[i], "with_sampler", options, f"parts[{i}]")
        return self._with_part(i, self._slotted(i).with_sampler(sampler, **options))

    def replace_part(self, part: int | str, buffer: DrawnBuffer | SlottedBuffer | Queue) -> Self:
        """Returns the mixture with a new state of one part.

        Raises:
            ValueError: If ``part`` is not the number or the name of a part, or ``buffer`` is not
                built like the present part.
        """
        i = self._check_part(part)
        if not trees.alike(buffer, self.parts[i]):
            raise ValueError(f"buffer is not built like parts[{i}]; create another mixture for it")
        return self.replace(parts=(*self.parts[:i], buffer, *self.parts[i + 1 :]))

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        key: Key,
        batch_size: int,
        *,
        beta: float | Number | None = None,
        normalize: Normalization = ...,
        within: Within | None = None,
        **options: Unpack[WindowOptions],
    ) -> Sample:
        """Draws a batch with an exact number of rows from each part.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.
            beta: The strength of importance weights, which are ``batch.weights`` then; it may be
                traced.
            normalize: As for ``jaxbuf.importance_weights``; static.
            within: ``"part"`` weighs rows within their parts, as ``jaxbuf.importance_weights``
                says; static.
            **options: Other options of the parts' own ``sample``, the same for all parts.

        Returns:
            A ``Sample``. Rows that a part cannot draw have ``valid`` False, probability 0 and index
            ``capacity``.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, ``key`` is not a single
                key, a part is a ``Queue``, a part does not take one of the options, or ``beta``,
                ``normalize`` or ``within`` is not legal, or one of the last two is given without
                ``beta``.
        """
        rows = check_batch_size(batch_size)
        key = check_key(key)
        for i, part in enumerate(self.parts):
            if as_buffer(part).is_queue:
                raise ValueError(
                    f"parts[{i}] is a Queue, whose rows are taken out; draw with next_batch, which "
                    "returns the mixture without them"
                )
            check_options(part, "sample", options)
        if self.varying:
            batch = self.sample_some(key, rows, jnp.int32(0), jnp.int32(rows), **options)
            return weighed(self, batch, beta, normalize, within)
        keys = jax.random.split(key, len(self.parts))
        batch = self._batch(
            {
                i: self.parts[i].sample(keys[i], count, **options)
                for i, count in enumerate(self.counts(rows))
                if count > 0
            }
        )
        return weighed(self, batch, beta, normalize, within)

    def next_batch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        key: Key,
        batch_size: int,
        *,
        beta: float | Number | None = None,
        normalize: Normalization = ...,
        within: Within | None = None,
    ) -> tuple[Self, Sample]:
        """Draws the next batch, with an exact number of rows from the pass of each part.

        A part with the sampler ``Shuffled`` gives the next items of its own pass, and each of its
        passes ends by itself: with other numbers of items or other ratios, parts begin new passes
        at different times. A part with another sampler draws as in ``sample``. From a ``Queue``,
        the oldest items are taken out. Their ``probability`` is the share of the queue, because
        they are certain to be in the batch.

        Args:
            key: A PRNG key.
            batch_size: The number of rows ``B``; static.
            beta: As for ``sample``; weights are those of the mixture before this batch.
            normalize: As for ``sample``.
            within: As for ``sample``.

        Returns:
            The new mixture, and a ``Sample``. If fewer items than its rows are left in the pass of
            a part, or in a queue, its last rows are invalid.

        Raises:
            ValueError: If ``batch_size`` is not an integer of at least 1, ``key`` is not a single
                key, a part has no ``next_batch``, or the weights cannot be computed, as for
                ``sample``.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> def passes(numbers):
            ...     buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=jaxbuf.Shuffled())
            ...     return buffer.add(numbers)
            >>> parts = [passes(jnp.arange(6)), passes(jnp.array([10, 11]))]
            >>> mixture = jaxbuf.Mixture.create(parts, [3, 1])
            >>> drawn = []
            >>> for key in jax.random.split(jax.random.key(0), 2):
            ...     mixture, batch = jaxbuf.next_batch(mixture, key, 4)
            ...     drawn += batch.data.tolist()
            >>> sorted(drawn)
            [0, 1, 2, 3, 4, 5, 10, 11]
        """
        rows = check_batch_size(batch_size)
        key = check_key(key)
        for i, part in enumerate(self.parts):
            if not as_buffer(part).is_queue:
                check_options(part, "next_batch", {}, f"parts[{i}]")
        if self.varying:
            mixture, batch = self.next_some(key, rows, jnp.int32(0), jnp.int32(rows))
            return mixture, weighed(self, batch, beta, normalize, within)
        keys, parts = jax.random.split(key, len(self.parts)), list(self.parts)
        samples: dict[int, Sample] = {}
        for i, count in enumerate(self.counts(rows)):
            if count > 0:
                parts[i], samples[i] = _next_of(parts[i], keys[i], count)
        batch = weighed(self, self._batch(samples), beta, normalize, within)
        return trees.updated(self, parts=tuple(parts)), batch

    def sample_some(
        self, key: Key, batch_size: int, begin: Count, count: Count, **options: Any
    ) -> Sample:
        keys = jax.random.split(key, len(self.parts))

        def draw(i: int, *rows: Count) -> Sample:
            part: Any = self.parts[i]
            if as_buffer(part).is_queue:
                raise ValueError(
                    f"parts[{i}] is a Queue, inside of a mixture whose ratios vary; create that "
                    "with ratios that stay, and draw with next_batch"
                )
            check_options(part, "sample", options)
            return part.sample_some(keys[i], batch_size, *rows, **options)

        return self._some(batch_size, begin, count, draw)

    def next_some(
        self, key: Key, batch_size: int, begin: Count, count: Count
    ) -> tuple[Self, Sample]:
        keys, parts = jax.random.split(key, len(self.parts)), list(self.parts)

        def draw(i: int, *rows: Count) -> Sample:
            part: Any = parts[i]
            if as_buffer(part).is_queue:
                raise ValueError(
                    f"parts[{i}] is a Queue, and the ratios vary: rows that were taken beyond its "
                    "share could not be given back; create the mixture with ratios that stay"
                )
            parts[i], sample = part.next_some(keys[i], batch_size, *rows)
            return sample

        sample = self._some(batch_size, begin, count, draw)
        return trees.updated(self, parts=tuple(parts)), sample

    def _some(
        self, batch_size: int, begin: Count, count: Count, draw: Callable[..., Sample]
    ) -> Sample:
        """Joins samples of all parts that have their rows where these are in the batch.

        Args:
            batch_size: The number of rows ``B`` of the batch.
            begin: The first row of this mixture.
            count: The number of its rows.
            draw: Takes the number of a part, its first row and the number of its rows, and returns
                a sample of ``B`` rows.
        """
        counts = quotas.divided(count, self._units)  # [P]
        begins = begin + jnp.cumsum(counts, dtype=jnp.int32) - counts  # [P]
        row = jnp.arange(batch_size, dtype=jnp.int32)
        joined: Any = None
        for i in range(len(self.parts)):
            sample = draw(i, begins[i], counts[i])
            sample = self._in_mixture(i, sample, _fraction(counts[i], count, 0.0))
            mine = (row >= begins[i]) & (row < begins[i] + counts[i])
            joined = sample if joined is None else trees.choose(mine, sample, joined)
        return joined

    def _batch(self, samples: dict[int, Sample]) -> Sample:
        """Joins samples of parts to one batch, with slots and probabilities of the mixture.

        Args:
            samples: The sample of each part that gives rows, by the number of the part.
        """
        rows = sum(sample.valid.shape[0] for sample in samples.values())

        joined = [
            self._in_mixture(i, sample, jnp.float32(sample.valid.shape[0] / rows))
            for i, sample in samples.items()
        ]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *joined)

    def _in_mixture(self, i: int, sample: Sample, share: Number) -> Sample:
        """Returns the sample of a part, which has this share of the batch, as of the mixture."""
        return sample.replace(
            slots=self._global_slots(i, sample.slots), probability=sample.probability * share
        )

    def _global_slots(self, part: int, slots: Slots) -> Slots:
        """Returns slots of a part as slots of the mixture, the inverse of ``part_slots``."""
        inside = slots.index < self.parts[part].capacity
        index = jnp.where(inside, slots.index + self._slot_offset(part), self.capacity)
        return slots.replace(index=index)

    def part_of(self, slots: Slots) -> Integers:
        """Returns the part of each row, ``[B]``; the number of parts if the row is invalid."""
        slots = check_slots(slots)
        ends = [self._slot_offset(i + 1) for i in range(len(self.parts))]
        past = slots.index[:, None] >= jnp.asarray(ends, jnp.int32)[None]  # [B, P]
        past |= slots.index[:, None] < 0
        return jnp.sum(past, axis=1, dtype=jnp.int32)

    def part_slots(self, slots: Slots, part: int | str) -> Slots:
        """Returns the slots of one part, for the part's own methods.

        Args:
            slots: Slots of the mixture, ``sample.slots``, ``[B]``.
            part: The number of the part, or its name; static.

        Returns:
            Slots of the part, ``[B]``. Rows of other parts, like invalid rows, have index
            ``parts[part].capacity``, so that the part ignores them.

        Raises:
            ValueError: If ``part`` is not one of the parts, or ``slots`` are not the slots of a
                sample.

        Example:
            >>> import jax, jax.numpy as jnp, jaxbuf
            >>> parts = [jaxbuf.ItemBuffer.create(jnp.float32(0), 4) for _ in range(2)]
            >>> mixture = jaxbuf.Mixture.create([part.add(jnp.ones(4)) for part in parts], [1, 1])
            >>> batch = mixture.sample(jax.random.key(0), 4)
            >>> (mixture.part_slots(batch.slots, 0).index < 4).tolist()
            [True, True, False, False]
            >>> (mixture.part_slots(batch.slots, 1).index < 4).tolist()
            [False, False, True, True]
        """
        return self._part_slots(check_slots(slots), self._check_part(part))

    def _part_slots(self, slots: Slots, i: int) -> Slots:
        """Returns what ``part_slots`` does, for arguments that were checked."""
        index, capacity = slots.index - self._slot_offset(i), self.parts[i].capacity
        inside = (index >= 0) & (index < capacity)  # [B]
        return slots.replace(index=jnp.where(inside, index, capacity))

    def route(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Performs an operation in the parts that are able to, each with the slots of its own rows.

        Rows of other parts are dropped, or get the result of an item that has left.
        """
        if not operation.by_member:
            raise operation.lacking(
                self, f"ask one of the parts: mixture.parts[i].{operation.name}(...)"
            )
        parts = list(self.parts)
        if not operation.takes_slots:
            for i in self._able_parts(operation.name, operation.needs):
                parts[i] = operation.call_on(parts[i], arguments)
            return trees.updated(self, parts=tuple(parts))
        slots = check_slots(arguments["slots"])

        def perform(i: int, part_slots: Slots) -> Any:
            return operation.call_on(parts[i], arguments | {"slots": part_slots})

        if not operation.changes:
            return self._of_slots(operation.name, operation.needs, slots, perform)
        for i in self._able_parts(operation.name, operation.needs):
            parts[i] = perform(i, self._part_slots(slots, i))
        return trees.updated(self, parts=tuple(parts))

    def get(self, slots: Slots) -> Sample:
        """Returns items, or windows, by the slots of an earlier sample.

        Returns:
            A ``Sample`` with their present data. Rows whose item has left are invalid, with index
            ``capacity`` and probability 0. The ``probability`` of other rows is that within the
            part, times the part's ratio.

        Raises:
            ValueError: If no part is an ``ItemBuffer`` or a ``TrajectoryBuffer``.
        """

        def read(i: int, part_slots: Slots) -> Sample:
            sample = self._slotted(i).get(part_slots)
            return self._in_mixture(i, sample, jnp.float32(self._shares[i]))

        return self._of_slots("get", "contents", check_slots(slots), read)

    def highest(self, n: int, by: By | None = None) -> Sample:
        return draws.highest(self, n, by)

    def best(self, n: int, by: By) -> tuple[Slots, Words]:
        found = [self._slotted(i).best(n, by) for i in range(len(self.parts))]
        each = [(self._global_slots(i, slots), word) for i, (slots, word) in enumerate(found)]
        slots, word = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *each)
        return draws.join_best(slots, word, n)

    def slots_at(
        self, env_ids: Int[ArrayLike, "..."], positions: Integer[ArrayLike, "..."]
    ) -> Slots:
        return self._of_steps(
            "slots_at",
            "environments",
            (env_ids, positions),
            lambda i, *steps: self._global_slots(i, self._slotted(i).slots_at(*steps)),
        )

    def locate(self, slots: Slots) -> tuple[Index, Words]:
        """Returns the environment of each sampled window, and the position of its first step.

        Both have shape ``[B]``. Environments are numbered through all parts: the environments of a
        part follow those of the parts before it. Rows that are invalid, or of a part without
        environments, get the total number of environments.

        Raises:
            ValueError: If no part is a ``TrajectoryBuffer``.
        """
        total, slots = self.num_envs, check_slots(slots)

        def read(i: int) -> tuple[Mask, tuple[Array, Array]]:
            env, position = self._slotted(i).locate(self._part_slots(slots, i))
            mask = env < as_buffer(self.parts[i]).num_envs
            return mask, (jnp.where(mask, env + self._env_offset(i), total), position)

        return self._join("locate", "environments", read)

    def get_field(
        self, path: str, env_ids: Int[ArrayLike, "..."], positions: Integer[ArrayLike, "..."]
    ) -> Arrays:
        return self._of_steps(
            "get_field",
            "environments",
            (env_ids, positions),
            lambda i, *steps: self._slotted(i).get_field(path, *steps),
        )

    def episode(self, where: Where, positions: Integer[ArrayLike, "..."] | None = None) -> Episode:
        """Returns the episodes of sampled windows, or of single steps.

        Args:
            where: As for ``TrajectoryBuffer.episode``. Environments are numbered as in ``locate``.
            positions: The positions of steps in these environments, with ``env_ids``.

        Returns:
            An ``Episode``. Rows of parts without ``Episodes`` get the same results as steps that
            are not held. Its ``value`` is None unless all parts with ``Episodes`` record returns.

        Raises:
            ValueError: If no part has ``Episodes``, or as raised by the parts.
        """
        slots = check_where(where, positions)
        if not isinstance(slots, Slots):
            return self._of_steps(
                "episode", "episodes", slots, lambda i, *steps: self._slotted(i).episode(*steps)
            )

        return self._of_slots(
            "episode", "episodes", slots, lambda i, part_slots: self._slotted(i).episode(part_slots)
        )

    def end_episodes(self, envs: Envs = None) -> Self:
        return self._of_envs("end_episodes", envs, lambda part, mask: part.end_episodes(mask))

    def drop_newest_episode(self, envs: Envs = None) -> Self:
        return self._of_envs(
            "drop_newest_episode", envs, lambda part, mask: part.drop_newest_episode(mask)
        )

    def clear(self, envs: Envs = None) -> Self:
        if envs is None:
            return trees.updated(self, parts=tuple(part.clear() for part in self.parts))
        return self._of_envs(
            "clear", envs, lambda part, mask: part.clear(mask), needs="environments"
        )

    def support(self) -> Support:
        supports = [
            (_support_of(part), jnp.float32(ratio))
            for part, ratio in zip(self.parts, self._shares, strict=True)
            if self.varying or ratio > 0
        ]
        if self.varying:
            drawn = quotas.is_positive(self.varying["ratios"])
            supports = [
                (Support(jnp.where(drawn[i], support.count, 0), support.least_probability), ratio)
                for i, (support, ratio) in enumerate(supports)
            ]
        least = [
            jnp.where(support.count > 0, support.least_probability * ratio, jnp.inf)
            for support, ratio in supports
        ]
        lowest = jnp.min(jnp.stack(least), axis=0)
        return Support(
            _total([support.count for support, _ in supports]),
            jnp.where(jnp.isfinite(lowest), lowest, 0.0),
        )

    def metrics(self) -> dict[str, Array]:
        """Returns scalars to monitor.

        Returns:
            The total ``size``, and the metrics of each part, whose names are prefixed with the
            number of the part: ``0/size``, ``1/priority_max``. Ratios that vary one by one, as
            ``ratios[0]`` and so on, and ``rejected``, the number of calls that gave illegal ones.
            Names of parts take the place of their numbers.
        """
        metrics = {"size": self.size}
        if self.varying:
            metrics |= {"rejected": self.varying["rejected"]}
            for i, label in enumerate(self._labels):
                metrics[f"ratios[{label}]"] = self.varying["ratios"][i]
        for label, part in zip(self._labels, self.parts, strict=True):
            metrics |= {f"{label}/{name}": value for name, value in part.metrics().items()}
        return metrics

    @property
    def _labels(self) -> tuple[str, ...]:
        """The names of the parts; their numbers if they have none."""
        return self.names or tuple(map(str, range(len(self.parts))))

    def _with_part(self, i: int, buffer: Any) -> Self:
        """Returns the mixture with a part that a method has returned, which needs no check."""
        return trees.updated(self, parts=(*self.parts[:i], buffer, *self.parts[i + 1 :]))

    def _slotted(self, part: int) -> SlottedBuffer:
        """Returns a part of which the caller knows that it is a ``SlottedBuffer``."""
        return cast("SlottedBuffer", self.parts[part])

    def _able_parts(self, name: str, needs: str) -> list[int]:
        """Returns the numbers of the parts that are able to do what an operation needs.

        Raises:
            ValueError: If no part is able to.
        """
        able = [i for i, part in enumerate(self.parts) if needs in as_buffer(part).abilities]
        if not able:
            raise ValueError(f"{name} was called, but no part {_MISSING[needs]}")
        return able

    def _join(self, name: str, needs: str, read: Callable[[int], tuple[Mask, Arrays]]) -> Arrays:
        """Joins the results of all parts that are able to, each for its own rows.

        Rows of no part get the result of the first of these parts, which does not hold them.

        Args:
            name: The name of the operation, for errors.
            needs: What a part must be able to do.
            read: Returns a mask of the rows of a part, ``[B]``, and its results, ``[B, ...]``.
        """
        joined: PyTree = None
        for i in self._able_parts(name, needs):
            mask, result = read(i)
            joined = result if joined is None else trees.choose(mask, result, joined)
        return joined

    def _of_slots(self, name: str, needs: str, slots: Slots, read: Function) -> Arrays:
        """Returns ``read(i, slots)`` of part ``i`` for the rows with its slots."""

        def read_part(i: int) -> tuple[Mask, Arrays]:
            part_slots = self._part_slots(slots, i)
            return part_slots.index < self.parts[i].capacity, read(i, part_slots)

        return self._join(name, needs, read_part)

    def _of_steps(
        self, name: str, needs: str, steps: tuple[object, object], read: Function
    ) -> Arrays:
        """Returns ``read(i, env, position)`` of part ``i`` for steps, numbered as in ``locate``."""
        env, position, shape = broadcast_steps(*steps)

        def read_part(i: int) -> tuple[Mask, Arrays]:
            mask, part_env = self._part_envs(i, env)
            return mask, read(i, part_env, position)

        joined = self._join(name, needs, read_part)
        return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), joined)

    def _of_envs(self, name: str, envs: Envs, change: Function, needs: str = "episodes") -> Self:
        """Applies ``change(part, mask)`` to the able parts, with the mask of their environments.

        Args:
            name: The name of the operation, for errors.
            envs: A mask or numbers of environments of all parts, which are numbered as in
                ``locate``.
            change: Returns a part after a change of the environments in the mask.
            needs: What a part must be able to do.
        """
        able, parts = self._able_parts(name, needs), [*self.parts]
        mask = mask_of(envs, self.num_envs)
        for i in able:
            start, count = self._env_offset(i), as_buffer(parts[i]).num_envs
            parts[i] = change(parts[i], mask[start : start + count])
        return trees.updated(self, parts=tuple(parts))

    def _part_envs(self, part: int, env: Index) -> tuple[Mask, Index]:
        """Returns a mask of the environments of a part, and their numbers in it, or past its end.

        This is for environments as ``part_slots`` is for slots.
        """
        number, count = env - self._env_offset(part), as_buffer(self.parts[part]).num_envs
        mask = (number >= 0) & (number < count)
        return mask, jnp.where(mask, number, count)

    def _by_part(self, values: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        """Returns the numbers of the parts that named values are for, with these values.

        Raises:
            ValueError: If a name does not begin with that of a part.
        """
        inner: dict[int, dict[str, Any]] = {}
        for name, value in values.items():
            label, slash, rest = name.partition("/")
            if slash:
                found = label in self._labels
                i = self._labels.index(label) if found else self._check_part(label)
                inner.setdefault(i, {})[rest] = value
            elif name != "ratios":
                self._check_part(None)
        return sorted(inner.items())

    def _env_offset(self, part: int) -> int:
        """Returns the number of environments of the parts before this one."""
        return sum(as_buffer(earlier).num_envs for earlier in self.parts[:part])

    @property
    def _units(self) -> list[int] | UInt[Array, " P"]:
        """The ratios in units of 2**-31."""
        if not self.varying:
            return quotas.in_units(self.ratios)
        return quotas.in_units_of(self.varying["ratios"])

    @property
    def _shares(self) -> tuple[float, ...] | Float[Array, " P"]:
        """The ratios, which sum to 1."""
        if not self.varying:
            return self.ratios
        return quotas.shares(lax.stop_gradient(self.varying["ratios"]))

    def _slot_offset(self, part: int) -> int:
        """Returns the number of slots of the parts before this one."""
        return sum(earlier.capacity for earlier in self.parts[:part])

    def _pop_part(self, options: Any) -> int:
        """Takes the number of the part out of the options of a call, and checks it.

        Raises:
            ValueError: If it is not the number of a part, or that of a mixture.
        """
        i = self._check_part(options.pop("part", None))
        if as_buffer(self.parts[i]).members:
            raise ValueError(
                f"parts[{i}] is a Mixture, of which one part would have to be named too; change "
                f"mixture.parts[{i}] by itself, and put it back with mixture.replace(parts=(...))"
            )
        return i

    def _check_part(self, part: Any) -> int:
        i = self._number_of(part)
        if i is None:
            names = ", ".join(map(repr, self.names))
            named = f"one of the names {names}, or " if names else ""
            raise ValueError(
                f"part is {part!r}; expected {named}the number of one of the {len(self.parts)} "
                f"parts, an integer from 0 to {len(self.parts) - 1}"
            )
        return i

    def _number_of(self, part: Any) -> int | None:
        """Returns the number of a part that is given by its number or its name; else None."""
        if isinstance(part, str):
            return self.names.index(part) if part in self.names else None
        integer = isinstance(part, int | np.integer) and not isinstance(part, bool)
        return int(part) if integer and 0 <= part < len(self.parts) else None


def _check_names(buffers: Mapping[Any, object]) -> tuple[str, ...]:
    """Returns the names of the parts.

    Raises:
        ValueError: If one is not a string, is empty, or has a slash.
    """
    for name in buffers:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"buffers has the name {name!r}; expected strings without '/'")
    return tuple(buffers)


def _split(given: object, parts: int) -> tuple[tuple[float, ...] | Varying, dict[str, Array]]:
    """Returns the fields ``ratios`` and ``varying`` of a new mixture."""
    if not isinstance(given, Varying):
        return quotas.check_static(given, parts), {}
    first = quotas.check_varying(given.value, parts)
    legal = quotas.are_legal(first)
    rejected = (~legal).astype(jnp.uint32)
    first = jnp.where(legal, first, 1.0)
    return Varying(None, first.shape), {"ratios": first, "rejected": rejected}


def _fraction(count: Any, rows: Any, ratio: Any) -> Any:
    """Returns the fraction of the rows that come from a part; its ratio if it gives none."""
    if isinstance(count, int):
        return count / rows if count else ratio
    share = count.astype(jnp.float32) / jnp.maximum(rows, 1).astype(jnp.float32)
    return jnp.where(count > 0, share, jnp.float32(ratio))


def _total(numbers: list[Array]) -> Count:
    return jnp.sum(jnp.stack(numbers), axis=0, dtype=jnp.int32)


def _next_of(part: Any, key: Key, rows: int) -> tuple[Any, Sample]:
    """Returns a part after its next batch, or without its oldest items, and these rows."""
    return part.take(rows) if as_buffer(part).is_queue else part.next_batch(key, rows)


def _support_of(part: Any) -> Support:
    """Returns the support of a part. Items of a queue have probability 1."""
    if not as_buffer(part).is_queue:
        return part.support()
    return Support(part.size, jnp.where(part.size > 0, 1.0, 0.0))


def _check_part_kind(part: object, name: str) -> None:
    """Raises ValueError if a wrapper cannot be a part."""
    buffer = as_buffer(part)
    if not buffer.runs_in_programs:
        raise ValueError(
            f"{name} is {checks.kind_of(part)}, which cannot be sampled inside a program; make the "
            "mixture inside of it: Hosted.create(lambda: jaxbuf.Mixture.create(...))"
        )
    if not buffer.on_one_device:
        raise ValueError(
            f"{name} is {checks.kind_of(part)}, whose batches are split over devices; sample from "
            "it by itself, and join the batches"
        )


def _check_draws_some(part: object, name: str) -> None:
    """Raises ValueError if a part cannot draw a number of rows that varies."""
    buffer = as_buffer(part)
    for i, inner in enumerate(buffer.members):
        _check_draws_some(inner, f"{name}.parts[{i}]")
    if not (buffer.members or buffer.is_queue or buffer.draws_some):
        raise ValueError(
            f"ratios vary, but {name} is {checks.kind_of(part)}, which cannot draw a number of "
            "rows that varies; choose ratios that stay, or a buffer of this library"
        )


def _check_samples_alike(parts: tuple[DrawnBuffer, ...]) -> None:
    """Raises ValueError if samples of the parts cannot be concatenated to one batch."""

    def row_of(part: DrawnBuffer) -> PyTree:
        if members := as_buffer(part).members:
            return row_of(members[0])

        def sample_row(key: Key) -> Arrays:
            is_queue = as_buffer(part).is_queue
            return (_next_of(part, key, 1)[1] if is_queue else part.sample(key, 1)).data

        return jax.eval_shape(sample_row, jax.random.key(0))

    rows = [row_of(part) for part in parts]
    expected = jax.tree_util.tree_leaves_with_path(rows[0])
    for i, other in enumerate(rows[1:], start=1):
        if not trees.alike(other, rows[0]):
            raise ValueError(
                f"samples of buffers[{i}] have another structure than those of buffers[0]: "
                f"{jax.tree.structure(other)}, not {jax.tree.structure(rows[0])}"
            )
        for (path, like), leaf in zip(expected, jax.tree.leaves(other), strict=True):
            if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
                name = "data" + jax.tree_util.keystr(path)
                raise ValueError(
                    f"{name} of samples of buffers[{i}] is {leaf.dtype}{list(leaf.shape[1:])}, but "
                    f"{like.dtype}{list(like.shape[1:])} of those of buffers[0]"
                )
