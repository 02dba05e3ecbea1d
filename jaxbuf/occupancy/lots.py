"""Slots that keep a random sample of all items that were ever added."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt

from jaxbuf.core.random import random_words, scale_word
from jaxbuf.core.types import Floats, Index, Key, Mask
from jaxbuf.occupancy.ranking import Ranking

# The bits of the smallest normal float32, and the number of floats from there up to infinity.
_LEAST = 0x00800000
_MANY = 0x7F000000


class Lots(Ranking):
    """Keeps the items with the highest lots, which are random numbers in place of scores.

    The items are therefore a random sample of all items that were ever added.

    Attributes:
        words: The words of a PRNG key; each add draws its lots from them and from the number of
            items added before, ``[2]`` uint32.
    """

    words: UInt[Array, "2"]

    @classmethod
    def create(cls, capacity: int) -> Self:
        ranking = Ranking.create(capacity)
        return cls(
            nodes=ranking.nodes,
            arrivals=ranking.arrivals,
            held=ranking.held,
            capacity=capacity,
            words=jnp.zeros((2,), jnp.uint32),
        )

    def with_key(self, key: Key) -> Self:
        """Returns these slots with lots that are drawn from another key."""
        return self.replace(words=random_words(key, (2,)))

    def place(self, rows: int, mask: Mask | None, score: Floats | None) -> tuple[Self, Index]:
        """Draws a lot for each row, and chooses slots as if the lots were scores.

        A ``score`` has the lots of items that move here from another buffer; see ``stays_by``.
        """
        if score is None:
            key = jax.random.wrap_key_data(self.words, impl="threefry2x32")
            word = random_words(jax.random.fold_in(key, self.arrivals), (rows,))
            # Positive normal floats, of which there are 2**31: they are rarely equal.
            bits = scale_word(word, jnp.uint32(_MANY)) + jnp.int32(_LEAST)
            score = lax.bitcast_convert_type(bits, jnp.float32)
        return super().place(rows, mask, score)

    def refuses(self, score: Floats) -> Mask:
        """Returns all False: scores are ignored."""
        return jnp.zeros(score.shape, bool)

    def rescore(self, index: Index, score: Floats) -> Self:
        """Returns the same slots: scores are ignored."""
        del index, score
        return self

    def item_scores(self) -> Float[Array, " N"] | None:
        """Returns None: lots are not scores."""
        return None

    def stays_by(self) -> Float[Array, " N"]:
        """Returns the lots."""
        return self.score

    def continuing(self, old: Any) -> Self:
        return super().continuing(old).replace(words=old.words)

    def clear(self) -> Self:
        """Returns empty slots. Arrival numbers go on, so that later lots differ."""
        return super().clear().replace(words=self.words.copy())

    def metrics(self) -> dict[str, Array]:
        """Returns no metrics: lots are random."""
        return {}
