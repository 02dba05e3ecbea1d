"""A `Mixture` of different buffers: each row is answered by the part it is from."""

import functools
import inspect
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

STEP = {"x": jnp.int32(0), "terminated": jnp.bool_(False)}
EPISODES = jaxbuf.Episodes(boundary="mask")


added = jax.jit(lambda buffer, rows: buffer.add(rows))


def rings(first, num_envs, steps, **options):
    """Steps counted from ``first``, each environment from 100 more; every third ends an episode."""
    options = {"episodes": EPISODES, **options}
    buffer = jaxbuf.TrajectoryBuffer.create(STEP, num_envs, 8, sequence_length=2, **options)
    x = first + 100 * jnp.arange(num_envs)[:, None] + jnp.arange(steps)[None]
    return added(buffer, {"x": x, "terminated": x % 3 == 2})


def windows(first, count, **options):
    """The same steps as items of two."""
    item = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), STEP)
    x = first + jnp.arange(count)[:, None] + jnp.arange(2)[None]
    buffer = jaxbuf.ItemBuffer.create(item, 8, **options)
    return added(buffer, {"x": x, "terminated": x % 3 == 2})


@functools.cache
def offline():
    return rings(1000, 3, 8)


@functools.cache
def items():
    return windows(5000, 6, freshness=jaxbuf.Freshness(max_use=2))


@functools.cache
def online():
    freshness = jaxbuf.Freshness(max_use=3, max_staleness=1)
    return rings(2000, 2, 10, sampler=jaxbuf.Prioritized(), freshness=freshness)


def nested():
    inner = jaxbuf.Mixture.create([items(), online()], [1, 1])
    return jaxbuf.Mixture.create([offline(), inner], [1, 1])


@functools.partial(jax.jit, static_argnums=1)
def shuffled(mixture, rows):
    batch = mixture.sample(jax.random.key(3), rows)
    order = jax.random.permutation(jax.random.key(1), rows)
    return jax.tree.map(lambda leaf: leaf[order], batch)


def drawn(mixture, rows=32):
    """A batch in another order than it was drawn, and which buffer each row is from."""
    batch = shuffled(mixture, rows)
    x = np.asarray(batch.data["x"][:, 0])
    return batch, np.where(x >= 5000, 1, np.where(x >= 2000, 2, 0))


def test_slots_of_a_part():
    mixture = nested()
    batch, _ = drawn(mixture)
    for i, part in enumerate(mixture.parts):
        own = mixture.part_slots(batch.slots, i)
        mine = mixture.part_of(batch.slots) == i
        assert (own.index[~mine] == part.capacity).all()
        chex.assert_trees_all_equal(own.generation, batch.slots.generation)
        if i == 0:
            read = part.get_field("x", *part.locate(own))
            chex.assert_trees_all_equal(read[mine], batch.data["x"][mine, 0])


def test_locate_and_get_field():
    mixture = nested()
    batch, source = drawn(mixture)
    env, position = jax.jit(lambda m, s: m.locate(s))(mixture, batch.slots)
    x = np.asarray(batch.data["x"])
    assert (env[source == 0] == (x[source == 0, 0] - 1000) // 100).all()
    assert (env[source == 1] == 5).all()
    assert (env[source == 2] == 3 + (x[source == 2, 0] - 2000) // 100).all()
    offset = jnp.arange(2, dtype=jnp.uint32)[None]
    read = mixture.get_field("x", env[:, None], position[:, None] + offset)
    assert (read[source != 1] == x[source != 1]).all()
    assert (read[source == 1] == 0).all()
    chex.assert_shape(mixture.get_field("x", env, position), (32,))
    slots = mixture.slots_at(env, position)
    assert (slots.index == mixture.capacity).tolist() == (source == 1).tolist()
    chex.assert_trees_all_equal(
        *(jax.tree.map(lambda x: x[source != 1], s) for s in (slots, batch.slots))
    )


LOOKUPS = sorted(
    name
    for name, method in vars(jaxbuf.TrajectoryBuffer).items()
    if inspect.isfunction(method) and "where" in inspect.signature(method).parameters
    if not name.startswith("_")
)
LOOKUPS = ["episode_mask", *LOOKUPS]


@pytest.mark.parametrize("name", LOOKUPS)
def test_every_lookup_is_passed_on_with_its_options(name):
    own, passed = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(getattr(c, name)).parameters.values()
        ]
        for c in (jaxbuf.TrajectoryBuffer, jaxbuf.Mixture)
    )
    assert own == passed


def test_lookups_of_episodes():
    mixture = nested()
    batch, source = drawn(mixture)
    env, position = mixture.locate(batch.slots)
    by_slots, by_steps = mixture.episode(batch.slots), mixture.episode(env, position)
    chex.assert_trees_all_equal(mixture.episode((env, position)), by_steps)
    for found in (by_slots, by_steps):
        for number, part, before in ((0, offline(), 0), (2, online(), 3)):
            here = source == number
            expected = part.episode(env[here] - before, position[here])
            chex.assert_trees_all_equal(jax.tree.map(lambda x, here=here: x[here], found), expected)
        # As steps that are not held, for which positions are their own.
        nowhere = offline().episode(jnp.array([3]), jnp.array([0]))
        for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(nowhere), strict=True):
            assert leaf.dtype == jnp.uint32 or (leaf[source == 1] == expected).all()


def test_windows_of_another_length():
    mixture = jaxbuf.Mixture.create([rings(0, 2, 8), rings(1000, 1, 8)], [1, 1])
    batch = jaxbuf.sample(mixture, jax.random.key(0), 8, sequence_length=4)
    x = np.asarray(batch.data["x"])
    np.testing.assert_array_equal(x, x[:, :1] + np.arange(4)[None])
    assert (x[:, 0] >= 1000).tolist() == [False] * 4 + [True] * 4
    mask = mixture.episode_mask(batch.slots, sequence_length=4)
    np.testing.assert_array_equal(mask, x // 3 == x[:, :1] // 3)
    with pytest.raises(ValueError, match="sequence_length was given, but an ItemBuffer has no use"):
        jaxbuf.sample(nested(), jax.random.key(0), 8, sequence_length=4)


def test_returns():
    step = {**STEP, "reward": jnp.float32(0)}
    options = {"episodes": jaxbuf.Episodes(record_return=True, discount=0.5)}
    parts = [jaxbuf.TrajectoryBuffer.create(step, 1, 4, **options) for _ in range(2)]
    steps = {"x": jnp.zeros((1, 2), jnp.int32), "terminated": jnp.array([[False, True]])}
    parts = [
        part.add({**steps, "reward": jnp.array([[reward, reward]])})
        for part, reward in zip(parts, (1.0, 10.0), strict=True)
    ]
    mixture = jaxbuf.Mixture.create(parts, [1, 1])
    env, position = jnp.array([[0], [1]]), jnp.arange(2)[None]
    assert mixture.episode(env, position).value.tolist() == [[1.5, 1.0], [15.0, 10.0]]
    # They are not told where some parts do not record them.
    silent = jaxbuf.TrajectoryBuffer.create(step, 1, 4, episodes=jaxbuf.Episodes())
    for some in ([parts[0], silent], [silent, parts[0]]):
        assert jaxbuf.Mixture.create(some, [1, 1]).episode(0, 0).value is None


def plain():
    parts = [jaxbuf.ItemBuffer.create(jnp.int32(0), 4).add(jnp.arange(4)) for _ in range(2)]
    return jaxbuf.Mixture.create(parts, [1, 1])


BAD = [
    (lambda m, s: m.mark_used(s), "mark_used was called, but no part limits uses or staleness"),
    (lambda m, s: m.set_version(1), "set_version was called, but no part limits uses"),
    (lambda m, s: m.use_count(s), "use_count was called, but no part limits uses"),
    (lambda m, s: m.staleness(s), "staleness was called, but no part limits uses"),
    (lambda m, s: m.locate(s), "locate was called, but no part has environments"),
    (lambda m, s: m.get_field("x", 0, 0), "get_field was called, but no part has environments"),
    (lambda m, s: m.episode(s), "episode was called, but no part knows its episodes"),
    (lambda m, s: m.episode_mask(s), "episode_mask was called, but no part knows its episodes"),
    (
        lambda m, s: m.slots_at(s.index, s.index),
        "slots_at was called, but no part has environments",
    ),
    (lambda m, s: m.update_score(s, jnp.zeros(4)), "update_score was called, but no part uses"),
    (lambda m, s: m.remove(s), "remove was called, but no part removes items"),
    (lambda m, s: m.part_slots(s, 2), "part is 2; expected the number of one of the 2 parts"),
    (lambda m, s: m.part_slots(s.index, 0), "slots is only an array; expected the slots"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_no_part_can_do(call, message):
    mixture = plain()
    with pytest.raises(ValueError, match=re.escape(message)):
        call(mixture, mixture.sample(jax.random.key(0), 4).slots)


def test_lookups_need_slots_or_both_names_of_steps():
    mixture = nested()
    batch, _ = drawn(mixture)
    with pytest.raises(ValueError, match="positions is None; give env_ids and positions"):
        mixture.episode(jnp.arange(2))
    with pytest.raises(ValueError, match="positions were given with slots"):
        mixture.episode(batch.slots, jnp.arange(32))
