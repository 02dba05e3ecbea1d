"""A filter that admits only items that differ enough from the others.

References:
    Lahlou et al., torchgfn: A PyTorch GFlowNet library, 2023, https://arxiv.org/abs/2305.14594
    (its norm-based diverse replay buffer).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped, UInt32
from numpy.typing import NDArray

from jaxbuf.core import checks, fields
from jaxbuf.core.types import Arrays, Count, Flag, Floats, Index, Mask
from jaxbuf.core.versions import vary_with
from jaxbuf.occupancy.protocol import ItemOccupancy
from jaxbuf.occupancy.ranking import to_rank
from jaxbuf.strategies.moves import Moves
from jaxbuf.strategies.part import Part, Rows
from jaxbuf.strategies.points import Ball, Points, finite, pairwise

WithinBatch = Literal["suppress", "greedy"]
Active = Literal["always", "full"]
Keep = Literal["first", "best"]
# A sort key larger than that of any score.
_NOT_COMPARED = np.uint32(2**32 - 1)
Field = str | Callable[[Arrays], Arrays]
_REASONS = ("refused_low_score", "refused_within_batch", "refused_near_buffer")


class DiversityState(struct.PyTreeNode):
    """The state of ``Diversity``.

    Attributes:
        points: The compared part of each item: float32 numbers, or uint32 words of their bits.
        score: The score of each item, ``[N]``, -inf in empty slots; None if the first items stay.
    """

    points: Points
    score: Float[Array, " N"] | None = None


@dataclasses.dataclass(frozen=True)
class Diversity(Part):
    """Admits a new item only if it is farther than ``cutoff`` from the items already kept.

    New rows are ranked by score; if scores are equal, the earlier row ranks higher. While the
    filter is active, a row is refused if it

    1. ranks below every item of a full buffer whose evictor uses scores;
    2. is within the cutoff of a higher-ranked row of its batch; or
    3. is within the cutoff of an item that was in the buffer before the add. With ``keep="best"``
       only if that item's score is at least as high.

    Each row is counted under the first reason that applies. A row whose compared part has a NaN is
    refused and counted in ``metrics()["rejected"]``, whether the filter is active or not.

    If ``cutoff`` or ``p`` is 0, coordinates are equal or not, whatever their dtype: all their bits
    are compared, except that 0.0 and -0.0 are equal. Otherwise coordinates are rounded to float32,
    which has 24 significant bits, and so are distances. Rounding may move integers beyond ±2**24
    and float64 numbers closer to each other. A row is refused and counted in ``"rejected"`` if its
    coordinates are so large that neighboring float32 numbers are farther apart than the cutoff,
    unless the cutoff is negative. Scale such coordinates, or subtract an offset, with a function as
    ``field``.

    The compared part is stored a second time, with 32 bits for a coordinate (or 64, if bits of
    64-bit numbers are compared), in a layout suited to comparisons. An add compares tiles of new
    rows with blocks of items, eight coordinates at a time, and skips the remaining coordinates once
    no pair of a tile can be within the cutoff. The working memory does not grow with the number of
    pairs.

    Attributes:
        cutoff: The largest distance at which two items count as the same; a row at exactly this
            distance is refused. 0 refuses exact duplicates only, of any dtype, and a negative
            cutoff disables the distance check. Otherwise it must be between 2**-40 and 2**40.
        p: The norm of the distance, ``sum(abs(difference) ** p) ** (1 / p)``, as in
            ``torch.cdist``: at least 0.01, ``inf`` for the largest difference of a coordinate, or 0
            for the number of coordinates that differ.
        field: The part of an item to compare: a field such as ``"state"`` or ``"obs.position"``, a
            function of one item, or a tuple of these, whose values are concatenated (for example a
            state and its condition). None compares the whole item. The resulting arrays are
            compared coordinate by coordinate. A function is part of the configuration: pass the
            same one each time. It is traced when a program that uses the buffer is, not at each
            call, and points that are stored are not computed again, so it must not depend on
            anything that changes, such as the parameters of a network that learns.
        within_batch: ``"suppress"`` compares a row with all higher-ranked rows, added or not;
            ``"greedy"`` compares it only with the higher-ranked rows that are added (so that reason
            3 comes before reason 2).
        active: ``"always"``, or ``"full"`` to admit every item until the buffer is full.
        keep: ``"first"``, or ``"best"`` to keep of items that are near each other the one of the
            highest score, as an archive of elites does. The items within the cutoff of a row that
            is added leave then, and are counted in ``metrics()["replaced_near_buffer"]``; of equal
            scores the older item stays. It needs ``active="always"``, and a sampler whose items can
            be removed. With ``evictor=Lowest()`` the slots of the items that left are filled first;
            with ``Oldest()`` in their turn. The buffer keeps a score for each item, and has
            ``remove``. An add that replaces items compares them with the new rows once more.

    Raises:
        ValueError: If ``cutoff`` or ``p`` is out of range, another argument is not one of its
            choices, or ``keep`` is ``"best"`` and ``active`` is ``"full"``.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> diversity = jaxbuf.Diversity(cutoff=1.0, within_batch="greedy")
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 5, diversity=diversity)
        >>> buffer = buffer.add(jnp.array([0.0, 1.0, 2.0]), score=jnp.array([3.0, 2.0, 1.0]))
        >>> int(buffer.size), int(buffer.metrics()["refused_within_batch"])
        (2, 1)
        >>> elites = jaxbuf.Diversity(cutoff=0.5, keep="best")
        >>> buffer = jaxbuf.ItemBuffer.create(
        ...     jnp.float32(0), 5, evictor=jaxbuf.Lowest(), diversity=elites
        ... )
        >>> for score in (1.0, 3.0, 2.0):
        ...     buffer = buffer.add(jnp.array([score / 10, 7.0]), score=jnp.array([score, 0.0]))
        >>> best = buffer.highest(3)
        >>> [round(x, 1) for x in best.data[best.valid].tolist()]
        [0.3, 7.0]
    """

    cutoff: float = 0.0
    p: float = 1.0
    field: Field | tuple[Field, ...] | None = None
    within_batch: WithinBatch = "suppress"
    active: Active = "always"
    keep: Keep = "first"

    uses_score = True

    @property
    def reasons(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _REASONS + (("replaced_near_buffer",) if self.removes else ())

    @property
    def removes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if items leave for better ones that are near them."""
        return self.keep == "best"

    def __post_init__(self) -> None:
        distance = (
            "a distance: 0, or from 2**-40 to 2**40 (scale the numbers with a function as field)"
        )
        checks.settle_number(self, "cutoff", distance, lambda x: x <= 0 or 2.0**-40 <= x <= 2.0**40)
        # With a smaller p, all distances look alike in float32.
        checks.settle_number(
            self,
            "p",
            "a norm: 1, 2, inf, any number of at least 0.01, or 0",
            lambda x: x == 0 or x >= 0.01,
        )
        field: object = self.field
        object.__setattr__(self, "field", tuple(field) if isinstance(field, list) else field)
        for part in _parts(self.field):
            if not (isinstance(part, str) or callable(part)):
                raise ValueError(
                    f"field is {checks.name_of(self.field)}; expected a field such as "
                    "'obs.position', a function of one item, or a tuple of these"
                )
        checks.check_choice("within_batch", self.within_batch, get_args(WithinBatch))
        checks.check_choice("active", self.active, get_args(Active))
        checks.check_choice("keep", self.keep, get_args(Keep))
        if self.removes and self.active != "always":
            raise ValueError(
                "keep is 'best', but active is 'full': items that leave would make room for "
                "duplicates; pass active='always'"
            )

    def init(self, data: Arrays, slots: int) -> DiversityState:
        """Returns the state of an empty buffer.

        Raises:
            ValueError: If the item has no such ``field``, or if the field has no coordinates or
                complex ones.
        """
        point = jax.eval_shape(self.points, data)
        if point.shape[1] == 0:
            raise ValueError(f"field {self.field!r} gives no numbers; there is nothing to compare")
        score = jnp.full((slots,), -jnp.inf, jnp.float32) if self.removes else None
        return DiversityState(Points.create(slots, point.shape[1], point.dtype), score)

    def points(self, items: Arrays) -> Shaped[Array, "B D"]:
        """Returns the compared part of each item: finite numbers, or words of their bits."""
        words = self.ball(items).words

        def of(item: Arrays) -> Shaped[Array, " D"]:
            leaves = self._leaves(item)
            if words:
                return jnp.concatenate([_bits(leaf, words) for leaf in leaves])
            return finite(jnp.concatenate([leaf.astype(jnp.float32) for leaf in leaves]))

        return jax.vmap(of)(items)

    def ball(self, items: Arrays) -> Ball:
        """Returns the ball of the points that are too near to one, for ``points`` of such items."""
        if self.cutoff < 0 or (self.cutoff > 0 and self.p > 0):
            return Ball(max(self.cutoff, 0.0), self.p)
        shapes = jax.eval_shape(lambda rows: jax.vmap(self._leaves)(rows), items)
        return Ball(self.cutoff, self.p, 2 if any(x.dtype.itemsize == 8 for x in shapes) else 1)

    def refuse(
        self, state: DiversityState, rows: Rows, occupancy: ItemOccupancy
    ) -> dict[str, Mask]:
        assert rows.score is not None
        points, ball = self.points(rows.items), self.ball(rows.items)
        incomparable = self._incomparable(rows.items, ball)
        score, offered = rows.score, rows.taken & ~incomparable
        if score.shape[0] == 1:
            # Add a row that is not offered, because XLA removes a sort of a single row.
            points, padding = jnp.repeat(points, 2, axis=0), (0, 1)
            score, offered = jnp.pad(score, padding), jnp.pad(offered, padding)
        reason = self._reasons(state, points, ball, score, offered, occupancy)
        reason = reason[: incomparable.shape[0]]
        refused = {name: reason == k for k, name in enumerate(_REASONS, 1)}
        return {"rejected": incomparable, **refused}

    def replaced(
        self, state: DiversityState, rows: Rows, occupancy: ItemOccupancy
    ) -> Bool[Array, " N"]:
        """Returns a mask of the items that leave for the rows that are added.

        No row was refused for these items, so all of them have lower scores.
        """
        slots, added = state.points.capacity, rows.taken
        if self.cutoff < 0:
            return jnp.zeros((slots,), bool)
        count = jnp.where(jnp.any(added), jnp.int32(slots), jnp.int32(0))  # []

        def compared(slot: Int[Array, "R 1"], row: Int[Array, "1 L"]) -> Bool[Array, "R L"]:
            live = occupancy.live(jnp.minimum(slot, slots - 1))  # [R, 1]
            return live & added.at[row].get(mode="fill", fill_value=False)

        points = Points.of(self.points(rows.items))
        return points.near(state.points, count, self.ball(rows.items), compared)

    def move(self, empty: DiversityState, state: DiversityState, moves: Moves) -> DiversityState:
        points = empty.points.set(moves.target, state.points.get(moves.source))
        if empty.score is None or state.score is None:
            return DiversityState(points)
        score = empty.score.at[moves.target].set(state.score[moves.source], mode="drop")
        return DiversityState(points, score)

    def on_add(self, state: DiversityState, index: Index, rows: Rows) -> DiversityState:
        state = state.replace(points=state.points.set(index, self.points(rows.items)))
        # ``set_field`` knows no scores.
        return state if rows.score is None else self.on_score(state, index, rows.score)

    def on_score(self, state: DiversityState, index: Index, score: Floats) -> DiversityState:
        if state.score is None:
            return state
        return state.replace(score=state.score.at[index].set(score, mode="drop"))

    def on_remove(self, state: DiversityState, index: Index) -> DiversityState:
        return self.on_score(state, index, jnp.full(index.shape, -jnp.inf, jnp.float32))

    def on_write(
        self, state: DiversityState, index: Index, rows: Rows, path: str | None
    ) -> DiversityState:
        # What a function of an item depends on is not known.
        compared = _parts(self.field) or (None,)
        if not any(not isinstance(x, str) or fields.overlap(rows.items, path, x) for x in compared):
            return state
        return self.on_add(state, index, rows)

    def check_valid(
        self, state: DiversityState, name: str, live: NDArray[np.bool_], data: Arrays
    ) -> Iterator[str]:
        slot = jnp.arange(live.size, dtype=jnp.int32)

        def differs(mask: NDArray[np.bool_]) -> bool:
            index = jnp.where(mask, slot, live.size)
            recomputed = _add_again(self, state, index, Rows(data, slot.shape))
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(recomputed), strict=True)
            # A function of an item may round differently when it is compiled again.
            numbers = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)
            return not all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in numbers)

        slots = np.flatnonzero(live)
        if not differs(live):
            return
        while len(slots) > 1:
            half = slots[: len(slots) // 2]
            inside = differs(np.isin(np.arange(live.size), half))
            slots = half if inside else slots[len(slots) // 2 :]
        yield (
            f"{name}.diversity_state.points has other numbers for slot {slots[0]} than the data: "
            f"{self.points(data)[slots[0]]}"
        )

    def _reasons(
        self,
        state: DiversityState,
        points: Shaped[Array, "B D"],
        ball: Ball,
        score: Floats,
        offered: Mask,
        occupancy: ItemOccupancy,
    ) -> Index:
        """Returns the number of the reason to refuse each offered row, or 0."""
        active = jnp.bool_(True)  # []
        if self.active == "full":
            active = occupancy.size == state.points.capacity  # []
        low = offered & active & occupancy.refuses(score)  # [B]
        compared = offered & active & ~low  # [B]
        if self.cutoff < 0:
            compared = jnp.zeros_like(offered)  # [B]
        # The result depends on ``low`` by a branch, into which XLA fuses nothing. So the buffer's
        # lowest score is read before the add changes it, and the array that holds it not copied.
        operands = low, compared, score, points, state, occupancy
        operands = vary_with(operands, operands)
        near = functools.partial(self._near, ball)
        any_compared = jnp.any(operands[1])  # []
        return lax.cond(any_compared, near, lambda low, *_: low.astype(jnp.int32), *operands)

    def _near(
        self,
        ball: Ball,
        low: Mask,
        compared: Mask,
        score: Floats,
        points: Shaped[Array, "B D"],
        state: DiversityState,
        occupancy: ItemOccupancy,
    ) -> Index:
        """Returns the number of the reason to refuse each row: 1 if it is ``low``, or 0, 2 or 3."""
        # Sort the rows to compare to the front, best first. All but the last line depends on the
        # sorted rows.
        key = jnp.where(compared, ~to_rank(score), _NOT_COMPARED)  # [B]
        row = jnp.arange(key.shape[0], dtype=jnp.int32)  # [B]
        key, order = lax.sort((key, row), num_keys=1)  # [B]
        count = jnp.sum(compared, dtype=jnp.int32)  # []
        ranked = Points.of(points[order])

        def held(row: Int[Array, "R 1"], slot: Int[Array, "1 L"]) -> Bool[Array, "..."]:
            live = occupancy.live(slot)  # [1, L]
            if state.score is None:
                return live
            rank = ~key.at[row].get(mode="clip")  # [R, 1], the row's score
            return live & (to_rank(state.score.at[slot].get(mode="clip")) >= rank)  # [R, L]

        near_buffer = state.points.near(ranked, count, ball, held)
        if self.within_batch == "suppress":
            near_batch = ranked.near(
                ranked, count, ball, lambda row, other: (other < row) & (other < count)
            )
            near_buffer &= ~near_batch
        else:
            near_batch = _near_added(ranked, ~near_buffer, count, ball)  # [B]
        reason = jnp.where(near_batch, 2, jnp.where(near_buffer, jnp.int32(3), jnp.int32(0)))  # [B]
        reason = jnp.zeros_like(reason).at[order].set(reason, unique_indices=True)  # [B]
        return jnp.where(low, 1, reason)

    def _incomparable(self, items: Arrays, ball: Ball) -> Mask:
        """Returns a mask of the items with a coordinate that cannot be compared."""

        def of(item: Arrays) -> Flag:
            masks = [jnp.any(jnp.isnan(x)) for x in self._leaves(item) if _is_float(x)]
            if self.cutoff > 0 and not ball.words:
                masks += [jnp.any(_is_coarse(x, self.cutoff)) for x in self._leaves(item)]
            return functools.reduce(jnp.logical_or, masks, jnp.bool_(False))

        return jax.vmap(of)(items)

    def _leaves(self, item: PyTree) -> list[Shaped[Array, " n"]]:
        """Returns the compared part of one item as vectors."""
        values = [item] if self.field is None else [_get(item, p) for p in _parts(self.field)]
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(values)]
        for leaf in leaves:
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise ValueError(
                    f"field {self.field!r} gives {leaf.dtype}; choose a part of the item with real "
                    "numbers, or a function that makes them"
                )
        return [leaf.reshape(-1) for leaf in leaves] or [jnp.zeros((0,), jnp.float32)]


@functools.partial(jax.jit, static_argnums=0)
def _add_again(part: Diversity, state: DiversityState, index: Index, rows: Rows) -> DiversityState:
    return part.on_add(state, index, rows)


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _bits(x: Shaped[Array, " n"], words: int) -> UInt32[Array, " m"]:
    """Returns the bits of numbers, ``words`` words for each."""
    if _is_float(x):
        size = jnp.finfo(x.dtype).bits
        bits = lax.bitcast_convert_type(x, f"uint{size}")
        # By its bits, since a comparison of numbers may take the smallest ones for zeros.
        sign = jnp.asarray(1 << (size - 1), bits.dtype)
        x = jnp.where(bits == sign, jnp.zeros_like(bits), bits)
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(x, jnp.uint32).reshape(-1)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        x = x.astype(jnp.int32)
    word = x.astype(jnp.uint32)[:, None]
    return jnp.pad(word, ((0, 0), (0, words - 1))).reshape(-1)


def _is_coarse(x: Shaped[Array, " n"], cutoff: float) -> Bool[Array, " n"]:
    """Returns a mask of the numbers near which float32 numbers are farther apart than the cutoff.

    Numbers that float32 holds exactly, because their dtype has no others of their size, are not.
    """
    largest = cutoff * 2.0**23
    if x.dtype == jnp.float64:
        return jnp.isfinite(x) & (jnp.abs(x) > largest)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.zeros(x.shape, bool)
    bound, info = int(max(largest, 2.0**24)), jnp.iinfo(x.dtype)
    above = x > jnp.asarray(min(bound, info.max), x.dtype)
    return above | (x < jnp.asarray(max(-bound, info.min), x.dtype))


def _near_added(ranked: Points, candidates: Mask, count: Count, ball: Ball) -> Mask:
    """Returns a mask of the rows, sorted best first, that are near a higher one that is added."""
    rows, height = ranked.capacity, ranked.height
    limit = jnp.float32(ball.limit)  # []
    padding = ranked.num_tiles * height - rows
    candidates = jnp.pad(candidates & (jnp.arange(rows, dtype=jnp.int32) < count), (0, padding))

    def tile(k: Array, near_added: Bool[Array, " P"]) -> Bool[Array, " P"]:
        # A loop with static bounds has a 64-bit index if x64 mode is on.
        k = jnp.asarray(k, jnp.int32)  # []
        first = k * height  # []
        added = candidates & ~near_added  # [P]
        # Rows of earlier tiles are decided; within the tile, rows are decided one by one.
        block = ranked.tile(k)  # [G, S, R]
        near_before = ranked.near(
            Points(block[None], height),
            jnp.int32(height),
            ball,
            lambda _, other: (other < first) & added[jnp.minimum(other, rows - 1)],
        )
        number = jnp.arange(height, dtype=jnp.int32)  # [R]
        pairs = pairwise(
            block,
            functools.partial(lax.dynamic_index_in_dim, block, keepdims=False),
            number[None] < number[:, None],
            ball,
        )
        is_near = pairs.sums <= limit  # [R, R]
        offered = lax.dynamic_slice(candidates, (first,), (height,))  # [R]

        def settle(i: Array, out: Bool[Array, " R"]) -> Bool[Array, " R"]:
            neighbors = lax.dynamic_index_in_dim(is_near, i, keepdims=False) & offered & ~out  # [R]
            return lax.dynamic_update_slice(out, (out[i] | jnp.any(neighbors))[None], (i,))

        begin = vary_with(near_before, is_near, offered)  # [R]
        settled = lax.fori_loop(0, height, settle, begin) & offered  # [R]
        return lax.dynamic_update_slice(near_added, settled, (first,))

    steps = -(-count // height)  # []
    none = vary_with(jnp.zeros_like(candidates), ranked.blocks)  # [P]
    return lax.fori_loop(0, steps, tile, none)[:rows]


def _parts(field: Field | tuple[Field, ...] | None) -> tuple[Field, ...]:
    if field is None:
        return ()
    return field if isinstance(field, tuple) else (field,)


def _get(item: Arrays, part: Field) -> Arrays:
    """Returns the field of an item at a dotted path, or the result of a function of the item.

    Raises:
        ValueError: If the item has no such field, or the function fails.
    """
    if isinstance(part, str):
        return fields.need(item, part, "field", "items have")
    try:
        return part(item)
    except (KeyError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"field {part!r} fails on an item with {type(error).__name__}: {error}; it gets one "
            "item like the example"
        ) from error
