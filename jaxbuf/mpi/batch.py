"""Batches and replies, the same in both forms of the exchange, and the check of a batch."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxbuf.buffers.arguments import check_mask, check_numbers
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.core import storage
from jaxbuf.core.describe import Described
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Flag, Floats, Mask, Number


class Batch(NamedTuple):
    """A batch of items from a worker.

    Attributes:
        items: Leaves ``[B, ...]``.
        score: The score of each item, such as its log reward, ``[B]``; NaN for an item without one.
    """

    items: Arrays
    score: Floats


class Reply(Described):
    """The manager's reply to a worker.

    Attributes:
        scores: The scores of the worker's batch; zeros if it sent none.
        baseline: The lowest score that is worth sending, ``[]``.
        answered: Whether the worker sent a batch, ``[]`` bool; always False on the manager.
        slots: The slot of each row of the batch, ``[B]``, where the worker asks for slots; None
            elsewhere.
    """

    scores: dict[str, Array]
    baseline: Number
    answered: Flag
    slots: Slots | None = None


def check_batch(
    like: Arrays, items: PyTree, score: Any, mask: Any, *, needs_score: bool
) -> tuple[Batch, Mask]:
    """Checks a batch, and fills in the score and the mask if they are not given.

    Args:
        like: Arrays ``[N, ...]`` with the dtypes and, after the first axis, the shapes of items.
        items: Leaves ``[B, ...]``.
        score: The score of each item, ``[B]``; NaN is filled in for None.
        mask: Which rows are part of the batch, ``[B]``; None means all of them.
        needs_score: Whether the manager's buffer uses scores.

    Returns:
        The batch and its mask.

    Raises:
        ValueError: If a structure, shape or dtype differs, or a required score is missing.
    """
    items, (rows,) = storage.check(like, items, "items", ("B",))
    mask = check_mask(mask, (rows,), "(B,)")
    if score is not None:
        score = check_numbers(score, "score", (rows,), "(B,)")
    elif needs_score:
        raise ValueError("the manager's buffer uses the score of items; pass score=[B]")
    else:
        score = jnp.full((rows,), jnp.nan, jnp.float32)
    return Batch(items, score), mask


def uses_score(buffer: ItemBuffer) -> bool:
    """Returns whether a strategy of the buffer uses the scores of items."""
    parts = (buffer.sampler, buffer.evictor, buffer.diversity)
    return any(part is not None and part.uses_score for part in parts)
