"""Draws that do not depend on the sampler alone: from a range of ages, and of the newest items."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxbuf.buffers.arguments import check_batch_size, needs_order, needs_priority
from jaxbuf.buffers.base import SampledBase
from jaxbuf.buffers.buffer import Buffer, By
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import checks, native, sizes, sorting, storage
from jaxbuf.core.random import check_key, random_words, scale_word
from jaxbuf.core.segment_tree import SegmentTree
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Count, Floats, Index, Key, Mask, Words
from jaxbuf.occupancy.ages import Ages, Bound, grid, spread
from jaxbuf.occupancy.protocol import Occupancy
from jaxbuf.occupancy.ranking import to_rank
from jaxbuf.strategies.mass import draw_by_mass, draw_distinct, over
from jaxbuf.strategies.protocols import Draw, KnownSampler, uniform_probability


def check_range(
    buffer: SampledBase,
    key: Key,
    batch_size: int,
    start: Bound,
    stop: Bound,
    flags: dict[str, bool],
) -> tuple[int, list[Count | None]]:
    """Checks the arguments of ``sample_range``, and returns the number of rows and the bounds.

    Raises:
        ValueError: If the occupancy does not keep the order of insertion, ``batch_size`` is not an
            integer of at least 1, a flag is neither True nor False, a bound is not an integer, or
            ``by_priority`` is True and the sampler has no priorities or is not a ``KnownSampler``.
    """
    needs_order(buffer.occupancy, "sample_range")
    rows = check_batch_size(batch_size)
    check_key(key)
    for name, flag in flags.items():
        checks.check_flag(name, flag)
    if flags["by_priority"]:
        needs_priority(buffer.sampler, "by_priority is True")
        if not isinstance(buffer.sampler, KnownSampler):
            raise ValueError(
                f"by_priority is True, but {buffer.sampler} cannot tell the probability of items "
                "it did not draw; derive it from jaxbuf.strategies.KnownSampler"
            )
    bounds = [
        None if bound is None else storage.check_rows(bound, name, (), np.int32, "one integer")
        for name, bound in (("start", start), ("stop", stop))
    ]
    return rows, bounds


def draw_range(
    buffer: SampledBase,
    key: Key,
    rows: int,
    bounds: list[Count | None],
    *,
    by_priority: bool,
    replacement: bool,
) -> Draw:
    """Draws rows from a range of ages, in order of age; see ``sample_range`` of the buffers."""
    ages = buffer.occupancy.age_range(*bounds)
    if by_priority:
        return _draw_by_priority(buffer, key, rows, ages, replacement=replacement)
    row = jnp.arange(rows, dtype=jnp.int32)
    if replacement:
        word = random_words(key, (rows,))
        rank = jnp.sort(scale_word(word, ages.total))
        valid = jnp.broadcast_to(ages.total > 0, (rows,))
    else:
        words = random_words(key, (rows + 1,))
        enough = ages.total >= rows
        rank = jnp.where(enough, jnp.sort(spread(words[1:], words[0], ages.total)), row)
        valid = row < ages.total
    probability = jnp.broadcast_to(uniform_probability(ages.total), (rows,))
    return Draw(ages.at(rank), probability, valid)


def _draw_by_priority(
    buffer: SampledBase, key: Key, batch_size: int, ages: Ages, *, replacement: bool
) -> Draw:
    """Draws rows from a range of ages with probabilities proportional to the sampler's."""
    sampler = buffer.bound_sampler
    assert isinstance(sampler, KnownSampler)
    capacity = ages.most * ages.count.shape[0]
    rank = jnp.arange(capacity, dtype=jnp.int32)
    inside = rank < ages.total
    state = jax.lax.stop_gradient(buffer.sampler_state)
    mass = sampler.probability(state, ages.at(rank), buffer.occupancy)
    mass = jnp.where(inside, mass, 0.0)
    mass = jnp.where(jnp.any(mass > 0), mass, inside.astype(jnp.float32))
    tree = SegmentTree.create(capacity).set_all(mass)

    if replacement:
        drawn = draw_by_mass(key, batch_size, tree, stratified=True)
        valid = jnp.broadcast_to(ages.total > 0, (batch_size,))
    else:
        drawn, valid = draw_distinct(key, batch_size, jnp.minimum(batch_size, tree.nnz), tree)
        drawn = jnp.sort(jnp.where(valid, drawn, capacity))
    return Draw(ages.at(drawn), over(tree.read(drawn)[1], tree.root("sum")), valid)


def draw_newest(occupancy: Occupancy, n: int) -> Draw:
    """Draws the ``n`` newest items of each ring, ordered by ring and then by age.

    Raises:
        ValueError: If ``n`` is more than a ring can hold.
    """
    ages = occupancy.age_range(-n, None)
    if n > ages.most:
        raise ValueError(f"n is {n}, but there is room for {ages.most}")
    index, valid = grid(ages, n)
    probability = jnp.broadcast_to(uniform_probability(ages.total), (index.size,))
    return Draw(index.reshape(-1), probability, valid.reshape(-1))


def highest(buffer: Any, n: int, by: By | None) -> Sample:
    """Returns the items of ``highest``, of a buffer that defines ``best``."""
    slots, _ = buffer.best(*check_highest(buffer, n, by))
    check_enough(n, slots.index.shape[0])
    return buffer.get(slots)


def check_enough(n: int, num_slots: int) -> None:
    """Raises ValueError if ``highest`` asks for more rows than there are slots."""
    if num_slots < n:
        raise ValueError(f"n is {n}, but there are {num_slots} slots")


def check_highest(buffer: Buffer, n: int, by: By | None) -> tuple[int, By]:
    """Checks the arguments of ``highest``, and returns the number of rows and what to compare.

    Raises:
        ValueError: If the buffer keeps nothing to compare, or not this.
    """
    rows, kept = sizes.check_count("n", n), buffer.compares_by
    if by is not None:
        checks.check_choice("by", by, get_args(By))
    wanted: tuple[By, ...] = get_args(By) if by is None else (by,)
    for name in wanted:
        if name in kept:
            return rows, name
    keeps = "not every part keeps" if buffer.members else f"{checks.kind_of(buffer)} does not keep"
    raise ValueError(
        f"highest was called, but {keeps} the {' or the '.join(wanted)} of its items; create it "
        "with evictor=jaxbuf.Lowest() or sampler=jaxbuf.Softmax() for scores, or with "
        "sampler=jaxbuf.Prioritized() for priorities"
    )


def best(occupancy: Occupancy, value: Float[Array, " N"], n: int) -> tuple[Index, Words]:
    """Returns the slots of the ``n`` items with the largest values, and words in their order.

    Of equal ones the newest comes first. Rows without an item have the word 0. There are fewer rows
    than ``n`` if there are fewer slots.
    """
    slot = jnp.arange(value.shape[0], dtype=jnp.int32)  # [N]
    counts = occupancy.live(slot) & ~jnp.isnan(value)  # [N]
    word = jnp.where(counts, to_rank(value), jnp.uint32(0))  # [N]
    age = occupancy.places.item_ages()
    age = slot.astype(jnp.uint32) if age is None else age  # [N]
    n = min(n, value.shape[0])
    # These hold everything above the last one, but any of its equals.
    top, above = sorting.largest_words(word, n)  # [n]
    newest = jnp.where(word == top[-1], ~age, jnp.uint32(0))  # [N]
    equal = sorting.largest_words(newest, n)[1]  # [n]
    index = jnp.concatenate([above, equal])  # [2n]
    top = jnp.where(top > top[-1], top, jnp.uint32(0))  # [n]
    rest = jnp.where(newest[equal] > 0, word[equal], jnp.uint32(0))  # [n]
    fall, _, index = lax.sort((~jnp.concatenate([top, rest]), age[index], index), num_keys=2)
    return index[:n], ~fall[:n]


def join_best(slots: Slots, word: Words, n: int) -> tuple[Slots, Words]:
    """Returns the first ``n`` rows in the order of ``best``; equal ones stay in their order."""
    row = jnp.arange(word.shape[0], dtype=jnp.int32)
    fall, row = lax.sort((~word, row), num_keys=1, is_stable=True)
    return jax.tree.map(lambda leaf: leaf[row[:n]], slots), ~fall[:n]


def placed(draw: Draw, begin: Count, count: Count) -> Draw:
    """Returns a draw whose first ``count`` rows are moved to ``begin``; the others are invalid."""
    row = jnp.arange(draw.index.shape[0], dtype=jnp.int32) - begin
    inside = (row >= 0) & (row < count)
    row = jnp.where(inside, row, 0)
    return Draw(draw.index[row], draw.probability[row], draw.valid[row] & inside)


@native.kernel("or_zero")
def or_zero(probability: Floats, valid: Mask) -> Floats:
    """Returns the probabilities of valid rows, and 0 for the others."""
    return jnp.where(valid, probability, 0.0)


def check_draw(draw: object) -> tuple[Index, Floats, Mask]:
    """Returns the slots, the probabilities and the mask of a draw.

    Raises:
        ValueError: If it is not a draw, or a shape or dtype differs.
    """
    if not isinstance(draw, Draw):
        raise ValueError(
            f"draw is {checks.name_of(draw)}; expected a jaxbuf.strategies.Draw, which a sampler's "
            "draw returns"
        )
    shape = (getattr(draw.index, "size", 1),)  # What is no array is refused by name.
    return (
        storage.check_rows(draw.index, "draw.index", shape, np.int32, "(B,)"),
        storage.check_rows(draw.probability, "draw.probability", shape, np.float32, "(B,)"),
        storage.check_rows(draw.valid, "draw.valid", shape, np.bool_, "(B,)"),
    )
