"""The presets, and the terminal states that one of them holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf


def test_terminal_states_by_lengths_and_by_mask():
    rng = np.random.default_rng(0)
    state = rng.normal(size=(6, 5, 2)).astype(np.float32)
    lengths = np.array([5, 1, 0, 3, 2, 4])
    mask = np.arange(5)[None] < lengths[:, None]
    trajectories = {"state": jnp.asarray(state), "log_reward": jnp.arange(6.0)}
    by_lengths = jax.jit(jaxbuf.terminal_states)(trajectories, jnp.asarray(lengths))
    by_mask = jax.jit(lambda t, m: jaxbuf.terminal_states(t, mask=m))(trajectories, mask)
    for last, valid in (by_lengths, by_mask):
        np.testing.assert_array_equal(valid, lengths > 0)
        np.testing.assert_array_equal(last["log_reward"], np.arange(6.0))
        expected = state[np.arange(6), np.maximum(lengths - 1, 0)]
        np.testing.assert_array_equal(last["state"], expected)


def test_terminal_states_with_bad_arguments():
    states = jnp.zeros((3, 4))
    with pytest.raises(ValueError, match="one of the two"):
        jaxbuf.terminal_states(states)
    # A row of one leaf would be another step of the other.
    unequal = {"a": jnp.zeros((3, 4)), "b": jnp.zeros((3, 6, 2)), "c": jnp.zeros(3)}
    message = (
        r"trajectories\['b'\] has shape \(3, 6, 2\) and others have 4 steps; expected \(B, T, "
    )
    with pytest.raises(ValueError, match=message):
        jaxbuf.terminal_states(unequal, jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match="mask has dtype int32; expected bool"):
        jaxbuf.terminal_states(states, mask=jnp.ones((3, 4), jnp.int32))


def test_a_terminal_state_buffer_holds_the_last_ones_first_in_first_out():
    buffer = jaxbuf.terminal_state_buffer(jnp.float32(0), 3)
    for start in (0.0, 100.0):
        states = start + jnp.arange(12.0).reshape(3, 4)
        last, valid = jaxbuf.terminal_states(states, jnp.array([4, 0, 1]))
        buffer = jaxbuf.add(buffer, last, mask=valid)
    assert sorted(buffer.data.tolist()) == [8, 103, 108]


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_reward_prioritized_keeps_the_highest(temperature):
    buffer = jaxbuf.reward_prioritized(jnp.float32(0), 3, temperature=temperature)
    for scores in (jnp.array([10.0, 20.0, 30.0]), jnp.array([5.0, 25.0])):
        buffer = jaxbuf.add(buffer, scores, score=scores)
    assert sorted(buffer.data.tolist()) == [20, 25, 30]


@pytest.mark.parametrize(
    "create",
    [
        jaxbuf.reward_prioritized,
        pytest.param(jaxbuf.diverse_reward_prioritized, marks=pytest.mark.slow),
    ],
    ids=["plain", "diverse"],
)
def test_fallback_draws_with_replacement_when_items_are_few(create):
    """As in torchgfn, whose ``replacement`` is ``n_samples > len(buffer)``."""
    buffer = create(jnp.float32(0), 5, temperature=1.0, fallback=True)
    buffer = jaxbuf.add(buffer, jnp.array([1.0, 2.0, 3.0]), score=jnp.array([1.0, 2.0, 3.0]))
    many = jaxbuf.sample(buffer, jax.random.key(0), 64)
    assert many.valid.all()
    few = jaxbuf.sample(buffer, jax.random.key(0), 3)
    assert sorted(few.data.tolist()) == [1, 2, 3]
    short = jaxbuf.sample(create(jnp.float32(0), 5, temperature=1.0), jax.random.key(0), 3)
    assert not short.valid.any()
    with pytest.raises(ValueError, match="fallback is True, but temperature is None; expected"):
        create(jnp.float32(0), 5, fallback=True)
