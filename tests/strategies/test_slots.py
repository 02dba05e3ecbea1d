"""The words that indices and points are drawn with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.core.random import random_words


def test_random_words_are_the_same_everywhere():
    keys = jax.random.split(jax.random.key(3), 4)
    apart = jnp.stack([random_words(key, (2, 15)) for key in keys])
    together = jax.vmap(lambda key: random_words(key, (2, 15)))(keys)
    _, scanned = jax.lax.scan(lambda _, key: (None, random_words(key, (2, 15))), None, keys)
    np.testing.assert_array_equal(apart, together)
    np.testing.assert_array_equal(apart, scanned)
    assert len(np.unique(apart)) == apart.size


@pytest.mark.parametrize("key", [jax.random.PRNGKey(1), jax.random.key(1, impl="rbg")])
def test_keys_of_other_kinds(key):
    words = random_words(key, (5000,))
    share = np.unpackbits(np.asarray(words).view(np.uint8)).mean()
    assert words.dtype == jnp.uint32
    assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(32 * 5000)


def test_a_raw_key_draws_what_a_typed_one_draws():
    raw = random_words(jax.random.PRNGKey(7), (9,))
    np.testing.assert_array_equal(raw, random_words(jax.random.key(7), (9,)))
