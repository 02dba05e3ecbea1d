"""Options of the jitted functions are those of a buffer's own methods; others are refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import jaxbuf

ITEM = jax.ShapeDtypeStruct((), jnp.float32)
KEY = jax.random.key(0)


def items(**options):
    return jaxbuf.ItemBuffer.create(ITEM, 8, **options)


TRACES = []


class Pile(struct.PyTreeNode):
    """A buffer of a user, whose methods have their own options."""

    total: jax.Array

    def add(self, items, *, times: int = 1, how: str = "sum", weight=None):
        TRACES.append(times)
        more = getattr(jnp, how)(items) * jnp.float32(times)
        return self.replace(total=self.total + more * (1.0 if weight is None else weight))

    def sample(self, key, batch_size, *, offset: int = 0):
        return jnp.broadcast_to(self.total, (batch_size + offset,))

    def update_priority(self, slots, priority, **others):
        return self.replace(total=self.total + sum(others.values()))


def test_options_of_somebodys_own_buffer():
    buffer = jaxbuf.add(Pile(jnp.float32(0)), jnp.arange(4.0), times=3, how="max")
    assert float(buffer.total) == 9.0
    buffer = jaxbuf.add(buffer, jnp.arange(4.0), weight=jnp.float32(0.5))
    assert jaxbuf.sample(buffer, KEY, 2, offset=1).tolist() == [12.0] * 3
    buffer = jaxbuf.update_priority(buffer, None, None, anything=jnp.float32(1.0))
    assert float(buffer.total) == 13.0
    TRACES.clear()
    for times in (1, 2, 1, 2):
        buffer = jaxbuf.add(buffer, jnp.ones(2), times=times)
    assert (float(buffer.total), TRACES) == (25.0, [1, 2])


def test_an_option_that_is_none_is_left_out():
    rings = jaxbuf.TrajectoryBuffer.create(ITEM, 2, 4)
    chex.assert_trees_all_equal(
        jaxbuf.add(rings, jnp.ones(2), score=None, donate=False), rings.add(jnp.ones(2))
    )


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, jnp.float32])
def test_numbers_of_configuration_are_those_that_were_written(kind):
    """A number of 32 bits is the same configuration, and so the same program, as the decimal."""
    makers = [
        lambda x: jaxbuf.Prioritized(alpha=x, initial_priority=x, epsilon=x, uniform_mix=x),
        lambda x: jaxbuf.Softmax(temperature=x),
        lambda x: jaxbuf.Recent(ratio=x, steps=2),
        lambda x: jaxbuf.RankBased(alpha=x),
        lambda x: jaxbuf.Staleness(alpha=x),
        lambda x: jaxbuf.Blend([jaxbuf.Uniform(), jaxbuf.Prioritized()], [x, 1]),
        lambda x: jaxbuf.Diversity(cutoff=x, p=x),
        lambda x: jaxbuf.Episodes(discount=x, default_return=x, reward_clip=(-x, x)),
        lambda x: jaxbuf.Mixture.create([items(), items()], [x, 1]).ratios,
    ]
    for make in makers:
        one, other = make(kind(0.6)), make(0.6)
        assert one == other
        assert hash(one) == hash(other)


PRIORITIZED = jaxbuf.Prioritized(alpha=0.6)


def windows(**options):
    step = {"reward": jnp.float32(0), "terminated": jnp.bool_(False)}
    return jaxbuf.TrajectoryBuffer.create(step, 2, 8, **options)


def returns(discount):
    return (jaxbuf.Episodes(record_return=True, discount=discount),)


@pytest.mark.parametrize(
    ("buffer", "name", "new"),
    [
        (items(sampler=PRIORITIZED), "sampler", jaxbuf.Prioritized(alpha=0.5)),
        (items(), "sampler", PRIORITIZED),
        (items(sampler=jaxbuf.Softmax()), "sampler", jaxbuf.Softmax(temperature=2.0)),
        (items(sampler=jaxbuf.Shuffled()), "sampler", PRIORITIZED),
        (windows(sampler=PRIORITIZED), "sampler", jaxbuf.Prioritized(alpha=0.5)),
        (windows(episodes=returns(0.9)[0]), "extras", returns(0.5)),
        (windows(), "extras", returns(0.5)),
        (items(), "evictor", jaxbuf.Lowest()),
    ],
)
def test_what_a_state_was_made_by_cannot_be_replaced_alone(buffer, name, new):
    state = {"sampler": "sampler_state", "extras": "extra_states", "evictor": "occupancy"}[name]
    message = rf"^{name} is .*, but {state} was made by .*; create another buffer with {name}="
    with pytest.raises(ValueError, match=message):
        buffer.replace(**{name: new})
    other = jaxbuf.ItemBuffer.create(ITEM, 8, sampler=jaxbuf.Prioritized(alpha=0.5))
    both = buffer.replace(**{name: new, state: getattr(other, state)})
    assert getattr(both, name) == new


def test_what_no_state_depends_on_can_be_replaced():
    buffer = items(sampler=jaxbuf.Uniform(), freshness=jaxbuf.Freshness(max_use=3))
    buffer = buffer.add(jnp.arange(4.0)).replace(
        sampler=jaxbuf.Uniform(replacement=False), extras=(jaxbuf.Freshness(max_use=9),)
    )
    assert sorted(buffer.sample(KEY, 4).data.tolist()) == [0.0, 1.0, 2.0, 3.0]
    same = items(sampler=PRIORITIZED).replace(sampler=jaxbuf.Prioritized(alpha=0.6))
    assert same.sampler == PRIORITIZED
    assert items(sampler=PRIORITIZED).replace(sampler=jaxbuf.Uniform()).sampler == jaxbuf.Uniform()
    with pytest.raises(TypeError, match="evictor"):
        windows().replace(evictor=jaxbuf.Lowest())
