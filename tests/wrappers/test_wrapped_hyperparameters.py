"""Numbers that vary, and other samplers, in buffers that are made of others."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import Prioritized, Recent, Softmax, Uniform, Varying, testing
from tests.models import items as reference

KEY = jax.random.key(0)
PRIORITIES = (1.0, 3.0, 0.0, 2.0, 5.0, 0.5)
VARYING = Prioritized(alpha=Varying(1.0), uniform_mix=Varying(1.0))
NAN = float("nan")


def items(sampler=VARYING):
    return jaxbuf.ItemBuffer.create(jnp.int32(0), 8, sampler=sampler)


def sharded(sampler=VARYING, exchange=True):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(lambda: items(sampler), mesh, "x", shards=3, exchange=exchange)


def filled(buffer, **options):
    data = jnp.arange(6, dtype=jnp.int32)
    return jaxbuf.insert(buffer, data, priority=jnp.array(PRIORITIES), **options)


def law(alpha, mix):
    masses = [reference.mass(value, alpha, 0.0) for value in PRIORITIES]
    return reference.proportional(masses, mix)


def test_a_sharded_buffer_draws_as_one():
    buffer, slots = filled(jaxbuf.set_hyperparameters(sharded(), alpha=2.0))
    assert buffer.hyperparameters["alpha"] == 2
    for mix in (1.0, 0.25, 0.0):
        buffer = jaxbuf.set_hyperparameters(buffer, uniform_mix=mix)
        found = buffer.get(slots).probability
        np.testing.assert_allclose(found, law(2.0, mix), rtol=1e-5, atol=1e-9)
        by_slot = np.zeros(buffer.capacity)
        by_slot[slots.index] = law(2.0, mix)
        testing.assert_distribution(buffer, KEY, by_slot, draws=2000, batch_size=6)
    assert buffer.support().count == 5
    refuse = jax.jit(lambda b, x: b.set_hyperparameters(alpha=x, uniform_mix=0.5))
    refused = refuse(buffer, jnp.float32(NAN))
    metrics = refused.metrics()
    assert metrics["rejected"] == 1
    assert (metrics["alpha"], metrics["uniform_mix"]) == (2, 0)
    assert refuse(refused, jnp.float32(0.5)).metrics()["rejected"] == 1
    with pytest.raises(ValueError, match="alpha is -1"):
        jaxbuf.set_hyperparameters(buffer, alpha=-1)
    testing.assert_valid(refused)


@pytest.mark.slow
def test_a_sharded_temperature_applies_at_once():
    buffer = sharded(Softmax(temperature=Varying(1.0)))
    data, score = jnp.arange(6, dtype=jnp.int32), jnp.array(PRIORITIES)
    buffer, slots = jaxbuf.insert(buffer, data, score=score)
    buffer = jaxbuf.set_hyperparameters(buffer, temperature=3.0)
    np.testing.assert_allclose(buffer.get(slots).probability, jax.nn.softmax(score / 3), rtol=1e-5)
    drawn = buffer.sample(KEY, 6)
    expected = jax.nn.softmax(score / 3)[drawn.data]
    np.testing.assert_allclose(drawn.probability, expected, rtol=1e-5)


def test_another_sampler_of_a_sharded_buffer():
    buffer, slots = filled(sharded(Prioritized(alpha=1.0)))
    changed = jaxbuf.with_sampler(buffer, Prioritized(alpha=2.0), donate=False)
    found = changed.get(slots).probability
    np.testing.assert_allclose(found, law(2.0, 0.0), rtol=1e-5, atol=1e-9)
    uniform = jaxbuf.with_sampler(changed, Uniform())
    np.testing.assert_allclose(uniform.sample(KEY, 6).probability, 1 / 6, rtol=1e-6)
    assert uniform.hyperparameters == {}
    with pytest.raises(ValueError, match="does not draw from shards"):
        buffer.with_sampler(Recent(0.5, 2))


@pytest.mark.slow
def test_a_sharded_checkpoint_moves_the_values_to_other_shards(tmp_path):
    buffer, _ = filled(jaxbuf.set_hyperparameters(sharded(), alpha=2.0, uniform_mix=0.5))
    jaxbuf.save(tmp_path, buffer)
    mesh = buffer.mesh
    like = jaxbuf.Sharded.create(items, mesh, "x", shards=2)
    loaded = jaxbuf.load(tmp_path, like, resize=True)
    chex.assert_trees_all_equal(loaded.hyperparameters, buffer.hyperparameters)
    assert loaded.metrics()["adds"] == buffer.metrics()["adds"] == 6
    drawn = loaded.sample(KEY, 6)
    np.testing.assert_allclose(drawn.probability, law(2.0, 0.5)[drawn.data], rtol=1e-5)


def test_a_part_of_a_mixture():
    mixture = jaxbuf.Mixture.create([items(Prioritized()), items()], [1, 1])
    mixture, slots = filled(mixture, part=1)
    assert mixture.hyperparameters == {"1/alpha": 1.0, "1/uniform_mix": 1.0}
    changed = jaxbuf.set_hyperparameters(mixture, part=1, uniform_mix=0, donate=False)
    found = changed.get(slots).probability
    np.testing.assert_allclose(found, law(1.0, 0.0) / 2, rtol=1e-5, atol=1e-9)
    assert changed.metrics()["1/uniform_mix"] == 0
    traced = jax.jit(lambda m, x: m.set_hyperparameters({"alpha": x}, part=1))
    assert traced(changed, NAN).metrics()["1/rejected"] == 1
    other = jaxbuf.with_sampler(changed, Uniform(), part=1)
    np.testing.assert_allclose(other.get(slots).probability, 1 / 12, rtol=1e-6)
    for wrong, says in (
        ({"part": 0, "alpha": 1.0}, r"Prioritized\(alpha=jaxbuf.Varying"),
        ({"part": 1, "alpha": -1.0}, "alpha is -1"),
        ({"part": 2, "alpha": 1.0}, "part is 2"),
        ({"alpha": 1.0}, "part is None"),
    ):
        with pytest.raises(ValueError, match=says):
            mixture.set_hyperparameters(**wrong)
    with_queue = jaxbuf.Mixture.create([items(), jaxbuf.Queue.create(jnp.int32(0), 8)], [1, 1])
    for call in (
        lambda: with_queue.set_hyperparameters(alpha=1.0, part=1),
        lambda: with_queue.with_sampler(Uniform(), part=1),
    ):
        with pytest.raises(ValueError, match=r"parts\[1\] is a Queue"):
            call()


def test_fewer_numbers_in_a_wrapped_buffer():
    """Warnings are errors here: JAX warns of a donated array that is like none of the result."""
    many = Prioritized(alpha=Varying(1.0), epsilon=Varying(0.0), uniform_mix=Varying(1.0))
    mixture = jaxbuf.Mixture.create([items(Uniform()), items(many)], [1, 1])
    for buffer, options in (
        (sharded(many), {}),
        (jaxbuf.Hosted.create(lambda: items(many)), {}),
        (mixture, {"part": 1}),
    ):
        buffer, slots = filled(buffer, **options)
        changed = jaxbuf.with_sampler(buffer, Prioritized(alpha=Varying(2.0)), **options)
        found = changed.get(slots).probability * (2 if options else 1)
        np.testing.assert_allclose(found, law(2.0, 0.0), rtol=1e-5, atol=1e-9)
