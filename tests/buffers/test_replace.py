"""``replace`` takes what ``add`` could have stored; ``==``, ``len`` and ``[]`` say what to use."""

import collections
import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import jaxbuf

ITEM = {"x": jnp.zeros(2), "y": jnp.int32(0)}
KEY = jax.random.key(0)


def items():
    return jaxbuf.ItemBuffer.create(ITEM, 8, sampler=jaxbuf.Prioritized())


def sharded():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jaxbuf.Sharded.create(items, mesh, "d", shards=2)


# How each buffer is made, its storage is read, and another one is put in its place.
KINDS = {
    "items": (items, lambda b: b, lambda b, one: one),
    "rings": (
        lambda: jaxbuf.TrajectoryBuffer.create(ITEM, 2, 4),
        lambda b: b,
        lambda b, one: one,
    ),
    "queue": (lambda: jaxbuf.Queue.create(ITEM, 8), lambda b: b, lambda b, one: one),
    "mixture": (
        lambda: jaxbuf.Mixture.create([items(), items()], [1, 1]),
        lambda b: b.parts[1],
        lambda b, one: b.replace(parts=(b.parts[0], one)),
    ),
    "hosted": (
        lambda: jaxbuf.Hosted.create(items),
        lambda b: b.buffer,
        lambda b, one: b.replace(buffer=one),
    ),
    "sharded": (sharded, lambda b: b.shards, lambda b, one: b.replace(shards=one)),
}
WRONG = {
    "rows": (
        lambda d: {**d, "x": d["x"][..., :3, :]},
        r"data\['x'\] has shape \(.*3, 2\); expected \(.*, 2\)",
    ),
    "item shape": (lambda d: {**d, "x": d["x"][..., :1]}, r"data\['x'\] has shape .* expected"),
    "dtype": (
        lambda d: {**d, "y": d["y"].astype(jnp.float32)},
        r"data\['y'\] has dtype float32; expected int32",
    ),
    "name": (
        lambda d: {"x": d["x"], "z": d["y"]},
        r"data\['y'\] is missing; .*data\['z'\] is not in the example",
    ),
    "tuple": (lambda d: tuple(d.values()), "data is a tuple; expected a dict with 'x', 'y'"),
    "nothing": (lambda d: None, "data is None; expected a dict"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_that_does_not_fit_is_refused(kind, wrong):
    make, inner, put = KINDS[kind]
    buffer, (change, message) = make(), WRONG[wrong]
    one = inner(buffer)

    def replaced(one):
        return one.replace(data=change(one.data))

    with pytest.raises(ValueError, match=message):
        replaced(one)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(replaced, one)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.vmap(replaced), jax.tree.map(lambda x: x[None], one))
    if put(buffer, one) is one or wrong in ("rows", "nothing"):
        return
    with pytest.raises(ValueError, match=message):
        put(buffer, dataclasses.replace(one, data=change(one.data)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_that_fits_is_taken(kind):
    make, inner, put = KINDS[kind]
    buffer = make()
    one = inner(buffer)
    data = jax.tree.map(lambda x: x + 1, one.data)
    for other in (
        data,
        collections.OrderedDict(reversed(data.items())),
        jax.device_get(data),
        {**data, "y": np.asarray(data["y"], np.int64)},
    ):
        changed = put(buffer, one.replace(data=other))
        assert type(changed) is type(buffer)
        assert jax.tree.structure(changed) == jax.tree.structure(buffer)
        chex.assert_trees_all_equal(inner(changed).data, data)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(changed))
    # Trees that hold no arrays, as for shardings and axes, and shapes.
    shapes = jax.eval_shape(lambda: one)
    assert shapes.replace(data=shapes.data) is not None
    axes = jax.tree.map(lambda _: object(), one)
    assert axes.replace(data=None).data is None
    loaded = serialization.from_state_dict(one, serialization.to_state_dict(one))
    chex.assert_trees_all_equal(loaded, one)


def test_many_buffers_side_by_side():
    many = jax.jit(jax.vmap(lambda _: items()))(jnp.arange(3))
    data = jax.tree.map(jnp.ones_like, many.data)
    assert many.replace(data=data).data["x"].sum() == 3 * 8 * 2
    with pytest.raises(ValueError, match=r"data\['x'\] has shape \(8, 2\); expected \(3, 8, 2\)"):
        many.replace(data=jax.tree.map(lambda x: x[0], data))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_buffer_has_not_says_what_to_use(kind):
    buffer = KINDS[kind][0]()
    assert buffer
    assert buffer == buffer
    assert buffer != 3
    assert buffer in [None, buffer]
    with pytest.raises(TypeError, match=r"compare with chex.assert_trees_all_equal\(a, b\)"):
        buffer == KINDS[kind][0]()  # noqa: B015
    shapes, others = (jax.tree.map(np.shape, KINDS[kind][0]()) for _ in range(2))
    assert shapes == others
    assert shapes != jax.tree.map(np.size, buffer)
    with pytest.raises(TypeError, match="no hash"):
        hash(buffer)
    with pytest.raises(TypeError, match=r"buffer.size is the number"):
        len(buffer)
    with pytest.raises(TypeError, match=r"buffer.get\(slots\)"):
        buffer[0]
    for ask in (lambda: [*buffer], lambda: 0 in buffer):
        with pytest.raises(TypeError, match="iterable"):
            ask()
