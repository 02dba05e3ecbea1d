"""Functions of the caller: what they compute now counts, and nothing keeps them."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxbuf
from jaxbuf.buffers import buffer as any_buffer
from jaxbuf.buffers import doors
from jaxbuf.core import advice

ITEM = {"obs": jnp.float32(0), "value": jnp.float32(0)}


class Agent:
    scale = 1.0

    def value(self, items):
        return self.scale * items["obs"]


def method():
    agent = Agent()
    return agent.value, functools.partial(setattr, agent, "scale")


def partial():
    params = {"scale": 1.0}

    def value(params, items):
        return params["scale"] * items["obs"]

    return functools.partial(value, params), functools.partial(params.__setitem__, "scale")


def network():
    linear = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))

    def train(number):
        linear.kernel[...] = jnp.full((1, 1), number, jnp.float32)

    return lambda items: linear(items["obs"][:, None])[:, 0], train


def empty(capacity=4):
    return jaxbuf.ItemBuffer.create(ITEM, capacity)


def filled(buffer, *shape):
    return jaxbuf.add(buffer, {"obs": jnp.ones(shape), "value": jnp.zeros(shape)})


def items():
    return filled(empty(), 4)


def rings():
    return filled(jaxbuf.TrajectoryBuffer.create(ITEM, 2, 2), 2, 2)


def mixture():
    return jaxbuf.Mixture.create([items(), items()], [1, 1])


def hosted():
    return filled(jaxbuf.Hosted.create(empty), 4)


def sharded():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return filled(jaxbuf.Sharded.create(lambda: empty(2), mesh, "d", shards=2), 4)


BUFFERS = (items, rings, mixture, hosted, sharded)


def by_method(buffer, *args):
    return buffer.map_field(*args)


def by_holder(buffer, *args):
    holder = jaxbuf.Holder(buffer)
    holder.apply(lambda buffer: (jaxbuf.map_field(buffer, *args), None))
    return holder.read(lambda buffer: buffer)


CASES = [
    *((buffer, method, jaxbuf.map_field) for buffer in BUFFERS),
    *((items, learner, jaxbuf.map_field) for learner in (partial, network)),
    (items, method, by_method),
    (rings, method, by_holder),
]


def values(buffer):
    data = jax.tree_util.tree_leaves_with_path(buffer)
    return [np.ravel(leaf).tolist() for path, leaf in data if "'value'" in str(path)]


@pytest.mark.parametrize(("make", "learner", "call"), CASES)
def test_a_mapped_field_is_what_the_function_computes_now(make, learner, call):
    (value, train), buffer = learner(), make()
    for number in (2.0, 3.0):
        train(number)
        buffer = call(buffer, "value", value)
        assert values(buffer) == [[number] * 4] * len(values(buffer))


def test_inside_of_jit_a_function_is_traced_with_the_program_of_the_caller():
    value, train = method()
    mapped = jax.jit(lambda buffer: jaxbuf.map_field(buffer, "value", value))
    for _ in range(2):
        buffer = mapped(items())
        train(3.0)
        assert values(buffer) == [[1.0] * 4]


def test_operations_of_other_buffers_take_functions_too():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Theirs:
        data: jax.Array

        def add(self, items, transform):
            return Theirs(self.data + transform(items))

    agent = Agent()
    agent.apply = lambda x: agent.scale * x
    buffer = Theirs(jnp.float32(0))
    for number in (2.0, 3.0):
        agent.scale = number
        buffer = jaxbuf.add(buffer, jnp.float32(1), transform=agent.apply)
    assert float(buffer.data) == 5.0


def test_shapes_that_are_looked_at_first_are_those_of_now():
    @dataclasses.dataclass
    class Config:
        capacity: int = 2

        def create(self):
            return jaxbuf.ItemBuffer.create(jnp.float32(0), self.capacity)

    config, mesh = Config(), jax.make_mesh((1,), ("d",))
    create, capacities = config.create, []
    for config.capacity in (2, 3):
        capacities.append(jaxbuf.Sharded.create(create, mesh, "d").capacity)
    assert capacities == [2, 3]
    config.capacity = 2**30
    with pytest.raises(ValueError, match=r"2\*\*31 slots or more"):
        jaxbuf.Sharded.create(create, mesh, "d", shards=2)

    traced = []

    def step(numbers):
        traced.append(config.capacity)
        return numbers + config.capacity

    for config.capacity in (2, 3):
        jaxbuf.explain_memory(step, jnp.zeros(400))
    assert {*traced} == {2, 3}


def kept(make):
    """Counts those of three arrays that are there after a function used them and was dropped."""
    there = []
    for number in range(3):
        captured = jnp.full((8,), number, jnp.float32)
        there.append(weakref.ref(captured))
        make(captured)
        del captured
    gc.collect()
    return sum(one() is not None for one in there)


@pytest.mark.parametrize("make", BUFFERS)
def test_a_function_is_not_kept(make):
    buffer = make()

    def change(captured):
        nonlocal buffer
        buffer = jaxbuf.map_field(buffer, "value", lambda items: items["obs"] + captured[0])

    assert kept(change) == 0


def test_the_warning_of_many_shapes_keeps_no_configuration():
    def change(captured):
        diversity = jaxbuf.Diversity(field=lambda item: item + captured)
        buffer = jaxbuf.ItemBuffer.create(jnp.zeros(8), 4, diversity=diversity)
        advice.note_shapes(buffer, jnp.zeros((2, 8)), "add")

    assert kept(change) == 0


def test_programs_of_many_configurations_are_not_kept_for_ever():
    made = jaxbuf.ItemBuffer.add.program
    for cache in (
        made.entry,
        made.compiled,
        doors._program,
        any_buffer._methods,
        any_buffer._parameters,
    ):
        assert cache.cache_info().maxsize
