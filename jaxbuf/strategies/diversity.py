"""Which new items are different enough to enter.

References:
    Lahlou et al., torchgfn: A PyTorch GFlowNet library, 2023, https://arxiv.org/abs/2305.14594
    (its norm-based diverse replay buffer).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxbuf.core import checks, fields, renamed
from jaxbuf.core.varying import vary_with
from jaxbuf.occupancy.protocol import ItemOccupancy
from jaxbuf.occupancy.ranking import to_rank
from jaxbuf.strategies.part import Part, Rows
from jaxbuf.strategies.points import Ball, Points, finite, pairwise

WithinBatch = Literal["suppress", "greedy"]
Active = Literal["always", "full"]
# Sort behind all scores.
_LOW, _NOT_OFFERED = np.uint32(2**32 - 2), np.uint32(2**32 - 1)
Field = str | Callable[[Any], Any]


class DiversityState(struct.PyTreeNode):
    """What ``Diversity`` keeps.

    Attributes:
        points: The part of each item that is compared, as float32.
    """

    points: Points


@renamed.field("key", "field")
@dataclasses.dataclass(frozen=True)
class Diversity(Part):
    """An arriving item enters only if it is farther than ``cutoff`` from what is kept.

    New rows are ranked by score; of equal scores the earlier row ranks higher. While the filter is
    active, a row is refused if it

    1. ranks below everything in a full buffer whose evictor goes by score;
    2. is within the cutoff of a row of its batch that ranks higher; or
    3. is within the cutoff of an item in the buffer, as the buffer was before the add.

    Each row is counted under the first reason that holds. A row whose compared part has a NaN is
    refused and counted in ``metrics()["rejected"]``, whether the filter is active or not.

    The compared part is kept a second time, as float32 and laid out for comparing. An add compares
    all pairs of new rows and items by eight coordinates, and by the next ones only those rows that
    may still have something within the cutoff. Memory beside the buffer does not grow with the
    number of pairs.

    Attributes:
        cutoff: The largest distance at which two items are the same; a row at exactly this distance
            is refused. At 0 only duplicates are; below 0 nothing is for its distance. Otherwise
            from 2**-40 to 2**40.
        p: Norm of the distance, ``sum(abs(difference) ** p) ** (1 / p)``, as in ``torch.cdist``:
            ``inf`` for the largest difference of a coordinate, 0 for the number of coordinates that
            differ, or a number of at least 0.01.
        field: What is compared: a field such as ``"state"`` or ``"obs.position"``, a function of
            one item, or several of these, whose values are concatenated (a state and its
            condition); None compares all of the item. Whatever arrays it gives are compared
            coordinate by coordinate. A function is part of the configuration: pass the same one
            each time.
        within_batch: ``"suppress"`` compares a row with every higher one, whether that enters or
            not; ``"greedy"`` only with those that enter (so that reason 3 comes before reason 2).
        active: ``"always"``, or ``"full"`` to let everything in until the buffer is full.

    Raises:
        ValueError: If ``cutoff`` or ``p`` is out of its range, or another choice is unknown.

    Example:
        >>> import jax.numpy as jnp, jaxbuf
        >>> diversity = jaxbuf.Diversity(cutoff=1.0, within_batch="greedy")
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 5, diversity=diversity)
        >>> buffer = buffer.add(jnp.array([0.0, 1.0, 2.0]), score=jnp.array([3.0, 2.0, 1.0]))
        >>> int(buffer.size), int(buffer.metrics()["refused_within_batch"])
        (2, 1)
    """

    cutoff: float = 0.0
    p: float = 1.0
    field: Field | tuple[Field, ...] | None = None
    within_batch: WithinBatch = "suppress"
    active: Active = "always"

    reasons = ("refused_low_score", "refused_within_batch", "refused_near_buffer")
    uses_score = True

    def __post_init__(self) -> None:
        cutoff = checks.check_number(
            "cutoff",
            self.cutoff,
            "a distance: 0, or from 2**-40 to 2**40 (scale the numbers with a function as field)",
            lambda x: x <= 0 or 2.0**-40 <= x <= 2.0**40,
        )
        object.__setattr__(self, "cutoff", cutoff)
        # For a smaller one all distances look alike in float32.
        p = checks.check_number(
            "p",
            self.p,
            "a norm: 1, 2, inf, any number of at least 0.01, or 0",
            lambda x: x == 0 or x >= 0.01,
        )
        object.__setattr__(self, "p", p)
        if isinstance(self.field, list):
            object.__setattr__(self, "field", tuple(cast("list[Field]", self.field)))
        for part in _parts(self.field):
            if not (isinstance(part, str) or callable(part)):
                raise ValueError(
                    f"field is {checks.name_of(self.field)}; expected a field such as "
                    "'obs.position', a function of one item, or a tuple of these"
                )
        for name, known in (("within_batch", WithinBatch), ("active", Active)):
            checks.check_choice(name, getattr(self, name), get_args(known))

    def init(self, data: PyTree[Any], slots: int) -> DiversityState:
        """No points, of as many coordinates as an item has.

        Raises:
            ValueError: If the item has nothing of the name that ``field`` gives, or only complex
                numbers or none.
        """
        item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)
        width = jax.eval_shape(self._point, item).shape[0]
        if width == 0:
            raise ValueError(f"field {self.field!r} gives no numbers; there is nothing to compare")
        return DiversityState(Points.create(slots, width))

    def points(self, items: PyTree[Array]) -> Float[Array, "B D"]:
        """What is compared of each item."""
        return jax.vmap(self._point)(items)

    def refuse(
        self, state: DiversityState, rows: Rows, occupancy: ItemOccupancy
    ) -> dict[str, Bool[Array, " B"]]:
        """Those that cannot be compared, rank too low, or are too close to others."""
        assert rows.score is not None
        points = self.points(rows.items)
        bad = jnp.any(jnp.isnan(points), axis=1)
        score, offered = rows.score, rows.taken & ~bad
        if score.shape[0] == 1:
            # Beside a row that is not offered, for XLA drops a sort of one row.
            points, more = jnp.repeat(points, 2, axis=0), (0, 1)
            score, offered = jnp.pad(score, more), jnp.pad(offered, more)
        why = self._judge(state, points, score, offered, occupancy)[: bad.shape[0]]
        refused = {name: why == k for k, name in enumerate(self.reasons, 1)}
        return {"rejected": bad, **refused}

    def on_add(self, state: DiversityState, index: Int[Array, " B"], rows: Rows) -> DiversityState:
        """New items have been written to ``index``."""
        return state.replace(points=state.points.set(index, finite(self.points(rows.items))))

    def _judge(
        self,
        state: DiversityState,
        points: Float[Array, "B D"],
        score: Float[Array, " B"],
        offered: Bool[Array, " B"],
        occupancy: ItemOccupancy,
    ) -> Int[Array, " B"]:
        """For each offered row the number of the reason to refuse it, or 0."""
        active = jnp.bool_(True)
        if self.active == "full":
            active = occupancy.size == state.points.capacity
        low = offered & active & occupancy.refuses(score)
        # The rows that are compared come first, best first. What follows goes by the sorted rows: a
        # sort is never fused into what comes after it, so that the buffer's lowest score is read
        # before the add changes it, or XLA copies what holds it.
        key = jnp.where(offered, jnp.where(low, _LOW, ~to_rank(score)), _NOT_OFFERED)
        row = jnp.arange(key.shape[0], dtype=jnp.int32)
        key, order = lax.sort((key, row), num_keys=1)
        low, left = key == _LOW, key < _LOW
        count = jnp.where(active, jnp.sum(left, dtype=jnp.int32), jnp.int32(0))
        if self.cutoff < 0:
            count = jnp.int32(0)
        ball = Ball(max(self.cutoff, 0.0), self.p)
        ranked = Points.of(finite(points)[order])

        old = state.points.near(ranked, count, ball, lambda _, slot: occupancy.live(slot))
        if self.within_batch == "suppress":
            batch = ranked.near(
                ranked, count, ball, lambda row, other: (other < row) & (other < count)
            )
            old &= ~batch
        else:
            batch = _crowded(ranked, ~old, count, ball)
        why = jnp.where(batch, 2, jnp.where(old, jnp.int32(3), jnp.int32(0)))
        why = jnp.where(low, 1, why)
        return jnp.zeros_like(why).at[order].set(why, unique_indices=True)

    def _point(self, item: PyTree) -> Float[Array, " D"]:
        """The compared part of one item, flat."""
        values = [item] if self.field is None else [_get(item, p) for p in _parts(self.field)]
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(values)]
        for leaf in leaves:
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise ValueError(
                    f"field {self.field!r} gives {leaf.dtype}; choose a part of the item with real "
                    "numbers, or a function that makes them"
                )
        flat = [leaf.astype(jnp.float32).reshape(-1) for leaf in leaves]
        return jnp.concatenate([jnp.zeros((0,), jnp.float32), *flat])


def _crowded(
    ranked: Points, entering: Bool[Array, " B"], count: Int[Array, ""], ball: Ball
) -> Bool[Array, " B"]:
    """Of the rows that would enter, best first, which are near a higher one that enters."""
    rows, height = ranked.capacity, ranked.height
    limit = jnp.float32(ball.limit)
    padding = ranked.num_tiles * height - rows
    entering = jnp.pad(entering & (jnp.arange(rows, dtype=jnp.int32) < count), (0, padding))

    def tile(k: Array, crowded: Bool[Array, " P"]) -> Bool[Array, " P"]:
        # A loop with known bounds counts in 64 bits where these are on.
        k = jnp.asarray(k, jnp.int32)
        first = k * height
        enters = entering & ~crowded
        # Those of earlier tiles are settled; within the tile one row settles after the other.
        block = ranked.tile(k)
        before = ranked.near(
            Points(block[None], height),
            jnp.int32(height),
            ball,
            lambda _, other: (other < first) & enters[jnp.minimum(other, rows - 1)],
        )
        number = jnp.arange(height, dtype=jnp.int32)
        pairs = pairwise(
            block,
            functools.partial(lax.dynamic_index_in_dim, block, keepdims=False),
            number[None] < number[:, None],
            ball,
        )
        near = pairs.sums <= limit
        offered = lax.dynamic_slice(entering, (first,), (height,))

        def settle(i: Array, out: Bool[Array, " R"]) -> Bool[Array, " R"]:
            beside = lax.dynamic_index_in_dim(near, i, keepdims=False) & offered & ~out
            return lax.dynamic_update_slice(out, (out[i] | jnp.any(beside))[None], (i,))

        settled = lax.fori_loop(0, height, settle, vary_with(before, near, offered)) & offered
        return lax.dynamic_update_slice(crowded, settled, (first,))

    steps = -(-count // height)
    nobody = vary_with(jnp.zeros_like(entering), ranked.blocks)
    return lax.fori_loop(0, steps, tile, nobody)[:rows]


def _parts(field: Any) -> tuple[Any, ...]:
    if field is None:
        return ()
    return cast("tuple[Any, ...]", field) if isinstance(field, tuple) else (field,)


def _get(item: Any, part: Field) -> Any:
    """The field of an item at a dotted path, or what a function makes of it.

    Raises:
        ValueError: If there is no such field.
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
