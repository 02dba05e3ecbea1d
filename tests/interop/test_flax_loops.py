"""A buffer inside of a TrainState of flax, and of a module of nnx; the guide has one of equinox."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxbuf
from tests.lenient import lenient

BATCH, ROWS, STEPS = 16, 8, 30
EXAMPLE = {"obs": jnp.zeros(3), "target": jnp.float32(0)}
WEIGHTS = jnp.array([1.0, -2.0, 0.5])


class Learner(TrainState):
    """flax's own, with a buffer."""

    buffer: jaxbuf.ItemBuffer


def new_buffer():
    return jaxbuf.ItemBuffer.create(EXAMPLE, 64, sampler=jaxbuf.Prioritized(epsilon=0.01))


def data(i):
    obs = jax.random.normal(jax.random.fold_in(jax.random.key(7), i), (ROWS, 3))
    return {"obs": obs, "target": obs @ WEIGHTS}


def learn(params, buffer, items, key):
    """Learns from the buffer of any kind of state: gradients, priorities and the loss."""
    buffer = buffer.add(items)
    batch = buffer.sample(key, BATCH)

    def loss(params: Any) -> Any:
        error = batch.data["obs"] @ params["w"] - batch.data["target"]
        return jnp.mean(error**2), error

    (value, error), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return gradients, buffer.update_priority(batch.slots, jnp.abs(error)), value


def by_hand():
    """The same with nothing but optax."""
    params, buffer, key = {"w": jnp.zeros(3)}, new_buffer(), jax.random.key(0)
    optimizer = optax.adam(0.1)
    state = optimizer.init(params)
    losses = []
    step = jax.jit(learn)
    for i in range(STEPS):
        key, sample_key = jax.random.split(key)
        gradients, buffer, loss = step(params, buffer, data(i), sample_key)
        with lenient():
            updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, buffer


@pytest.fixture(scope="module")
def expected():
    return by_hand()


def check_run(step, buffer_of, expected):
    """Runs a step that learns from the data with a number, and compares with `by_hand`."""
    key, losses = jax.random.key(0), []
    for i in range(STEPS):
        key, sample_key = jax.random.split(key)
        before = buffer_of()
        losses.append(float(step(data(i), sample_key)))
        assert before.data["obs"].is_deleted()
    np.testing.assert_allclose(losses, expected[0], rtol=1e-4)
    np.testing.assert_array_equal(buffer_of().data["obs"], expected[1].data["obs"])
    metrics = buffer_of().metrics()
    assert metrics["priority_max"] > metrics["priority_min"]


def test_a_train_state_is_donated_with_its_buffer(expected, tmp_path):
    chex.clear_trace_counter()
    optimizer = optax.adam(0.1)

    # Arrays of a checkpoint lie on a device of their own choice: another trace at most.
    @chex.assert_max_traces(n=2)
    def learn_all(learner, items, key):
        gradients, buffer, loss = learn(learner.params, learner.buffer, items, key)
        with lenient():
            learner = learner.apply_gradients(grads=gradients)
        return learner.replace(buffer=buffer), loss

    def new_learner():
        params = {"w": jnp.zeros(3)}
        return Learner.create(apply_fn=None, params=params, tx=optimizer, buffer=new_buffer())

    jitted, learner = jax.jit(learn_all, donate_argnums=0), new_learner()

    def step(*inputs):
        nonlocal learner
        learner, loss = jitted(learner, *inputs)
        if learner.step == STEPS // 2:
            # Resumed half way: the optimizer and the buffer go on as if nothing had happened.
            jaxbuf.save(tmp_path / "run", learner)
            learner = jaxbuf.load(tmp_path / "run", like=new_learner())
        return loss

    check_run(step, lambda: learner.buffer, expected)
    assert expected[0][-1] < expected[0][0] / 10


def test_an_nnx_module_holds_a_buffer_as_data(expected):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(3))
            self.buffer = nnx.data(new_buffer())

    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    traces = []

    def learn_all(model, optimizer, items, key):
        traces.append(1)
        gradients, model.buffer, loss = learn({"w": model.w[...]}, model.buffer, items, key)
        with lenient():
            optimizer.update(model, nnx.State({"w": nnx.Param(gradients["w"])}))
        return loss

    step = nnx.jit(learn_all, donate_argnums=0)
    check_run(functools.partial(step, model, optimizer), lambda: model.buffer, expected)
    assert traces == [1]
    with pytest.raises(ValueError, match="immutable node of type ItemBuffer"):
        nnx.update(model, nnx.state(model))
