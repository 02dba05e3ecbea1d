"""Arguments that share memory with a buffer that is updated in place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

ITEM = {"reward": jnp.float32(0), "number": jnp.int32(0)}


def rows(*shape):
    return {"reward": jnp.arange(4.0).reshape(shape), "number": jnp.arange(4).reshape(shape)}


def items(**options):
    return jaxbuf.ItemBuffer.create(ITEM, 4, **options).add(rows(4))


def rings():
    return jaxbuf.TrajectoryBuffer.create(ITEM, 4, 1).add(rows(4))


def mixture():
    return jaxbuf.Mixture.create([items(), items()], [1, 1])


def hosted():
    return jaxbuf.add(jaxbuf.Hosted.create(lambda: jaxbuf.ItemBuffer.create(ITEM, 4)), rows(4))


def set_field(buffer, value, **options):
    return jaxbuf.set_field(buffer, "reward", buffer.latest(4).slots, value, **options)


def set_part(buffer, value, **options):
    slots = buffer.sample(jax.random.key(0), 4).slots
    return jaxbuf.set_field(buffer, "reward", slots, value, **options)


def add_to_part(buffer, rows, **options):
    return jaxbuf.add(buffer, rows, part=1, **options)


# A buffer, what of it a call gets as well, the call, and the name of the argument.
CASES = {
    "add": (items, lambda b: b.data, jaxbuf.add, r"items\['number'\]"),
    "insert": (items, lambda b: b.data, jaxbuf.insert, r"items\['number'\]"),
    "set_field": (items, lambda b: b.data["reward"], set_field, "value"),
    "steps": (rings, lambda b: b.data, jaxbuf.add, r"steps\['number'\]"),
    "another part": (mixture, lambda b: b.parts[0].data, add_to_part, r"items\['number'\]"),
    "part": (mixture, lambda b: b.parts[1].data["reward"], set_part, "value"),
    "hosted": (hosted, lambda b: b.buffer.data, jaxbuf.add, r"items\['number'\]"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_argument_that_a_donated_buffer_shares_is_named(name):
    make, of, call, argument = CASES[name]
    buffer = make()
    message = rf"^{argument} shares its memory with buffer\..*'\], which .*jnp\.copy.*donate=False"
    with pytest.raises(ValueError, match=message):
        call(buffer, of(buffer))
    # Nothing was lost, and both ways out of it lead to the same.
    kept = call(buffer, of(buffer), donate=False)
    changed = call(buffer, jax.tree.map(jnp.copy, of(buffer)))
    chex.assert_trees_all_equal(jax.tree.leaves(kept), jax.tree.leaves(changed))


def test_a_holder_says_so_and_goes_on():
    holder = jaxbuf.Holder(items())
    with pytest.raises(ValueError, match="shares its memory"):
        holder.add(holder.read(lambda buffer: buffer.data))
    holder.add(rows(4))
    assert int(holder.read(lambda buffer: buffer.size)) == 4


def test_a_buffer_with_one_array_in_two_places_is_refused():
    array = jnp.arange(4)
    buffer = jaxbuf.ItemBuffer.create({"a": jnp.int32(0), "b": jnp.int32(0)}, 4)
    buffer = buffer.replace(data={"a": array, "b": array})
    message = r"buffer\.data\['b'\] shares its memory with buffer\.data\['a'\]"
    with pytest.raises(ValueError, match=message):
        jaxbuf.add(buffer, {"a": jnp.ones(4, int), "b": jnp.ones(4, int)})


def test_what_an_operation_does_not_update_may_be_shared():
    buffer = items(sampler=jaxbuf.Prioritized(alpha=1.0))
    slots = buffer.latest(4).slots
    buffer = jaxbuf.update_priority(buffer, slots, buffer.data["reward"] + 0.0)
    buffer = jaxbuf.update_priority(buffer, slots, buffer.data["reward"])
    batch = buffer.get(slots)
    np.testing.assert_allclose(batch.probability, np.arange(4) / 6, rtol=1e-6)
    items_of = jax.tree.map(jnp.copy, buffer.data)
    shared = jaxbuf.add(buffer, {"reward": items_of["reward"], "number": items_of["number"]})
    assert int(shared.size) == 4
