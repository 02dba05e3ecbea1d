"""Errors name what is wrong, and advise what works."""

import jax
import jax.numpy as jnp
import pytest

import jaxbuf

STEP = {"obs": jnp.zeros(3), "terminated": jnp.bool_(False)}


def steps(*leading):
    return {"obs": jnp.zeros((*leading, 3)), "terminated": jnp.zeros(leading, bool)}


def rings(**options):
    return jaxbuf.TrajectoryBuffer.create(STEP, 4, 8, **options)


def test_a_batch_as_the_example():
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros((8, 3)), 10)
    with pytest.raises(ValueError, match="if this is a batch, create the buffer with one item"):
        buffer.add(jnp.zeros((8, 3)))


@pytest.mark.parametrize("shape", [(8,), (8, 5)])
def test_another_number_of_environments(shape):
    with pytest.raises(ValueError, match="the first axis is that of the 4 environments, num_envs"):
        rings().add(steps(*shape))


def test_time_first():
    with pytest.raises(ValueError, match=r"time comes second: jnp.swapaxes\(x, 0, 1\)"):
        rings().add(steps(6, 4))
    with pytest.raises(ValueError, match="2 environments, one for each of env_ids, and time"):
        rings().add(steps(6, 2), env_ids=jnp.array([0, 1]))


def test_the_advice_for_episode_mask_works():
    with pytest.raises(ValueError, match=r'episodes=jaxbuf\.Episodes\(boundary="mask"\)') as error:
        rings().episode_mask(rings().sample(jax.random.key(0), 2).slots)
    assert str(error.value).startswith("episodes is None; create")
    buffer = rings(episodes=jaxbuf.Episodes(boundary="mask"))
    assert buffer.episode_mask(buffer.sample(jax.random.key(0), 2).slots).shape == (2, 1)


def test_priorities_of_a_buffer_with_scores():
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=jaxbuf.Softmax())
    buffer = buffer.add(jnp.zeros(2), score=jnp.zeros(2))
    with pytest.raises(ValueError, match="draws by the scores that add takes"):
        buffer.update_priority(buffer.latest(2).slots, jnp.ones(2))


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: jaxbuf.ItemBuffer.create(jnp.float32(0), 4), jnp.zeros(2)),
        (rings, steps(4)),
        (lambda: jaxbuf.Queue.create(jnp.float32(0), 4), jnp.zeros(2)),
    ],
)
def test_the_size_of_a_donated_buffer(make, rows):
    buffer = make()
    jaxbuf.add(buffer, rows)
    with pytest.raises(ValueError, match="buffer was donated: an earlier call updated it"):
        int(buffer.size)


def test_metrics_of_stacked_buffers():
    stacked = jax.jit(jax.vmap(lambda _: rings()))(jnp.arange(3))
    for look in (lambda b: b.metrics(), lambda b: b.support()):
        with pytest.raises(ValueError, match="buffer is 3 buffers side by side"):
            look(stacked)
    assert jax.jit(jax.vmap(lambda b: b.metrics()))(stacked)["size"].shape == (3,)
