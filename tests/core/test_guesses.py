"""Names of other libraries get an answer that says what to use."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import jaxbuf

ITEM = {"obs": jnp.zeros(3), "action": jnp.int32(0)}
ROWS = {"obs": jnp.zeros((4, 3)), "action": jnp.zeros(4, jnp.int32)}


def filled():
    return jaxbuf.ItemBuffer.create(ITEM, 8, sampler=jaxbuf.Prioritized()).add(ROWS)


def batch():
    return filled().sample(jax.random.key(0), 4)


def import_one():
    from jaxbuf import PrioritizedReplayBuffer  # noqa: F401


@pytest.mark.parametrize(
    ("call", "kind", "answer"),
    [
        (lambda: jaxbuf.ItemBuffer(ITEM, 100), TypeError, "ItemBuffer.create(example, capacity)"),
        (lambda: jaxbuf.ItemBuffer(ITEM, capacity=8), TypeError, "create(example, capacity)"),
        (lambda: jaxbuf.TrajectoryBuffer(ITEM, 2, 8), TypeError, "create makes buffers"),
        (lambda: jaxbuf.Queue(ITEM), TypeError, "create makes buffers"),
        (lambda: jaxbuf.Mixture([filled()], [1]), TypeError, "Mixture.create"),
        (lambda: jaxbuf.Mixture({"a": filled()}, [1]), TypeError, "Mixture.create"),
        (lambda: jaxbuf.Sharded(filled()), TypeError, "Sharded.create makes one"),
        (lambda: jaxbuf.EpisodeAccumulator(ITEM, 4), TypeError, "EpisodeAccumulator.create makes"),
        (lambda: jaxbuf.RateLimiter(4.0, min_size=9), TypeError, "RateLimiter.create makes one"),
        (lambda: jaxbuf.ReplayBuffer, AttributeError, "ItemBuffer.create(example, capacity)"),
        (import_one, ImportError, "sampler=jaxbuf.Prioritized()"),
        (lambda: jaxbuf.update_priorities, AttributeError, "update_priority(slots, priority)"),
        (lambda: filled().update_priorities, AttributeError, "update_priority(slots, priority)"),
        (lambda: batch().indices, AttributeError, "batch.slots"),
        (lambda: batch().idx, AttributeError, "batch.slots"),
        (lambda: batch().experience, AttributeError, "batch.data"),
        (lambda: batch().obs, AttributeError, "it is in batch.data['obs']"),
        (lambda: batch().action, AttributeError, "it is in batch.data['action']"),
        (lambda: batch()["obs"], TypeError, 'batch.data["obs"]'),
        (lambda: list(batch()), TypeError, "batch.data"),
        (lambda: jaxbuf.Prioritized(beta=0.4), TypeError, "buffer, batch, beta=0.4)"),
        (lambda: jaxbuf.Prioritized(eps=1e-6), TypeError, "called epsilon"),
        (lambda: jaxbuf.ItemBuffer.create(ITEM, max_size=8), TypeError, "is its capacity"),
        (lambda: jaxbuf.TrajectoryBuffer.create(ITEM, 2, capacity=8), TypeError, "times length"),
        (lambda: jaxbuf.Queue.create(ITEM, max_length=8), TypeError, "is its capacity"),
        (lambda: filled().add(**ROWS), TypeError, "items are one pytree"),
        (lambda: filled().add(*ROWS.values()), TypeError, "items are one pytree"),
        (lambda: jaxbuf.add(filled(), **ROWS), TypeError, "items are one pytree"),
        (lambda: jaxbuf.add(filled(), *ROWS.values()), TypeError, "items are one pytree"),
        (
            lambda: jax.jit(lambda b: b.add(**ROWS))(filled()),
            TypeError,
            "items are one pytree",
        ),
        (
            lambda: jaxbuf.importance_weights(batch(), 0.4),
            TypeError,
            "importance_weights(buffer, batch, beta=0.4)",
        ),
    ],
)
def test_a_first_guess_is_answered(call, kind, answer):
    with pytest.raises(kind) as error:
        call()
    assert answer in str(error.value)


def test_other_errors_are_as_they_were():
    class Odd(jaxbuf.strategies.Sampler):
        def draw(self, state, key, batch_size, occupancy):
            raise TypeError("argument 'obs' of my own")

        def support(self, state, occupancy):
            raise TypeError("a support of my own")

    def message(kind, call):
        with pytest.raises(kind) as error:
            call()
        return str(error.value)

    own = jaxbuf.ItemBuffer.create(ITEM, 8, sampler=Odd())
    assert message(TypeError, lambda: own.sample(jax.random.key(0), 2)).endswith("of my own")
    weights = functools.partial(jaxbuf.importance_weights, own, batch(), 0.4, "buffer")
    assert message(TypeError, weights).endswith("of my own")
    buffer = filled()
    assert "pytree" not in message(TypeError, lambda: buffer.add(ROWS, staleness=1))
    assert message(AttributeError, lambda: buffer.nothing).endswith("no attribute 'nothing'")
    assert message(AttributeError, lambda: jaxbuf.nothing).endswith("no attribute 'nothing'")
    assert not hasattr(jaxbuf, "ReplayBuffer")
    assert getattr(buffer, "obs", None) is None
    assert [*inspect.signature(jaxbuf.Prioritized).parameters][:2] == ["alpha", "initial_priority"]
    assert "capacity" in inspect.signature(jaxbuf.ItemBuffer.create).parameters
