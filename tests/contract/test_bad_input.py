"""Bad input raises at the call or at trace time, and the message says what to change.

What no argument of its kind takes is asked of all calls in ``test_refusals``.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

PRIORITIZED, UNIFORM = jaxbuf.Prioritized(), jaxbuf.Uniform()
KEY = jax.random.key(0)
ONES, MASK = jnp.ones(8), jnp.ones(8, bool)


def example():
    return {"obs": jnp.zeros(4, jnp.float32), "action": jnp.int32(0)}


def rows(batch=8):
    return {"obs": jnp.zeros((batch, 4), jnp.float32), "action": jnp.zeros(batch, jnp.int32)}


def create(sampler=PRIORITIZED, **options):
    return jaxbuf.ItemBuffer.create(example(), 16, sampler=sampler, **options)


@functools.cache
def filled(sampler=PRIORITIZED):
    return create(sampler, freshness=jaxbuf.Freshness(max_use=2)).add(rows())


@functools.cache
def slots():
    return filled().latest(8).slots


@functools.cache
def rings():
    return jaxbuf.TrajectoryBuffer.create(example(), 2, 8)


def queue():
    return jaxbuf.Queue.create(jnp.float32(0), 4)


def add_steps(*leading, **options):
    """A call that adds steps to the rings of four environments."""
    buffer = jaxbuf.TrajectoryBuffer.create(example(), 4, 8)
    given = jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), example())
    return lambda: buffer.add(given, **options)


@functools.cache
def mixture():
    of_windows = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 2, 4, sequence_length=1)
    inner = jaxbuf.ItemBuffer.create(jnp.zeros(1), 8, sampler=PRIORITIZED)
    return jaxbuf.Mixture.create([inner, of_windows], [1, 1])


HOW_TO_ADD = {
    "method": lambda items: create().add(items),
    "function": lambda items: jaxbuf.add(create(), items),
    "undonated": lambda items: jaxbuf.add(filled(), items, donate=False),
    "jit": lambda items: jax.jit(lambda b, i: b.add(i))(create(), items),
}
# Other buffers say the same of the structure of items.
OTHERS = {
    "queue": lambda items: jaxbuf.Queue.create(example(), 16).add(items),
    "rings": lambda items: jaxbuf.TrajectoryBuffer.create(example(), 8, 4).add(items),
}
ITEMS = [
    *(
        ({"obs": jnp.zeros(shape)}, f"items['obs'] has shape {shape}; expected (B, 4)")
        for shape in ((8, 3), (4,), (8, 1), (8, 4, 1), (), (8, 2, 2))
    ),
    ({"action": rows()["action"][:, None]}, "items['action'] has shape (8, 1); expected (B,)"),
    *(
        ({leaf: rows()[leaf].astype(dtype)}, f"items['{leaf}'] has dtype {given}; expected {wants}")
        for leaf, dtype, given, wants in (
            ("action", jnp.float32, "float32", "int32"),
            ("action", jnp.int16, "int16", "int32"),
            ("action", jnp.uint32, "uint32", "int32"),
            ("action", jnp.bool_, "bool", "int32"),
            ("obs", jnp.int32, "int32", "float32"),
            ("obs", jnp.float16, "float16", "float32"),
        )
    ),
    ({"action": jnp.int32(0)}, "has shape (); expected (B,); put an axis in front, x[None]"),
    (
        {"action": jnp.zeros(7, jnp.int32)},
        "items['obs'] has B = 8 rows (shape (8, 4)), but items['action'] has 7; all leaves need",
    ),
    (
        {f"extra{number:02}": jnp.zeros(8) for number in range(20)},
        "items['extra05'] is not in the example; 14 more",
    ),
]
STRUCTURES = [
    (lambda x: {"obs": x["obs"]}, r"\['action'\] is missing"),
    (lambda x: {**x, "reward": ONES}, r"\['reward'\] is not in the example"),
    (lambda x: tuple(x.values()), " is a tuple; expected a dict with 'action', 'obs'"),
    (lambda x: [*x.values()], " is a list; expected a dict with 'action', 'obs'"),
    (lambda x: [[1.0, 2.0], [3.0, 4.0]], " is a list; expected a dict with 'action', 'obs'"),
    (lambda x: x["obs"], r" is an array .*; expected a dict with 'action', 'obs'"),
    (lambda x: (example(),) * 3, " is a tuple of 3; stack them: jax.tree.map"),
    (
        lambda x: [example()] * 3,
        r" is a list of 3; stack them: jax.tree.map\(lambda \*rows: jnp.stack\(rows\), \*\w+\)$",
    ),
]


@pytest.mark.parametrize("how", HOW_TO_ADD)
@pytest.mark.parametrize(("changed", "message"), ITEMS)
def test_a_shape_is_never_broadcast_and_a_dtype_never_cast(how, changed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HOW_TO_ADD[how](rows() | changed)


@pytest.mark.parametrize("how", [*HOW_TO_ADD, *OTHERS])
@pytest.mark.parametrize(("change", "message"), STRUCTURES)
def test_items_of_another_structure(how, change, message):
    with pytest.raises(ValueError, match="^(items|steps).*" + message):
        (HOW_TO_ADD | OTHERS)[how](change(rows()))


def mixed():
    """A dictionary of which JAX cannot sort the keys."""
    return {1: jnp.zeros(2), "obs": jnp.zeros(2)}


NO_PYTREE = "is not a pytree: its dictionaries need keys that can be sorted"
NESTED = {"a": ({"b": jnp.zeros(2)}, jnp.int32(0))}
NESTED_ROWS = {"a": ({"b": jnp.zeros((3, 5))}, jnp.zeros(3, jnp.int32))}
WINDOW = {
    "reward": np.zeros((2, 3), np.float32),
    "terminated": np.zeros((2, 3), bool),
    "id": np.zeros((2, 3), int),
}
NO_PRIORITIES = "Uniform(replacement={}) has no priorities; create the buffer with sampler="
DISTINCT = jaxbuf.Uniform(replacement=False)
ENDS = {"terminated": jnp.bool_(False)}


def side_by_side():
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), create())


def of(name, *args, **options):
    return lambda: getattr(filled(), name)(*args, **options)


def update(*args, **options):
    return lambda: filled().update_priority(slots(), *args, **options)


def create_with(leaf):
    return lambda: jaxbuf.ItemBuffer.create(leaf, 4)


BAD = [
    # Examples and items.
    *((lambda how=how: how(mixed()), f"items {NO_PYTREE}") for how in [*HOW_TO_ADD.values()][:3]),
    (create_with(mixed()), f"example {NO_PYTREE}"),
    (lambda: jaxbuf.TrajectoryBuffer.create(mixed(), 2, 4), f"example {NO_PYTREE}"),
    (lambda: jaxbuf.Queue.create(mixed(), 4), f"example {NO_PYTREE}"),
    (lambda: jaxbuf.ChunkAccumulator.create(mixed(), 2, 2), f"example {NO_PYTREE}"),
    (lambda: jaxbuf.save("nowhere", mixed()), f"buffer {NO_PYTREE}"),
    (create_with({}), "example has no leaves; pass one unbatched item, a pytree of arrays"),
    (lambda: jaxbuf.Queue.create({}, 4), "example has no leaves"),
    (lambda: queue().add(jnp.zeros((3, 1))), "items has shape (3, 1); expected (B,)"),
    (lambda: queue().add(jnp.zeros(3, int)), "items has dtype int32; expected float32"),
    (lambda: queue().add(jnp.zeros(2), mask=jnp.ones(3, bool)), "mask has shape (3,)"),
    (
        create_with({"obs": jnp.zeros(2), "name": "cart"}),
        "example['name'] is a str; expected an array of numbers",
    ),
    (
        lambda: create_with(NESTED)().add(NESTED_ROWS),
        "items['a'][0]['b'] has shape (3, 5); expected (B, 2)",
    ),
    (
        lambda: create_with(jnp.zeros(4))().add(jnp.zeros((8, 3))),
        "items has shape (8, 3); expected (B, 4)",
    ),
    (
        lambda: create_with({"action": jnp.int32(0)})().add({"action": [1, 2]}),
        "items['action'] is a list; expected an array: np.asarray(items[",
    ),
    # What the caller may have meant.
    (
        lambda: create_with(jnp.zeros((8, 3)))().add(jnp.zeros((8, 3))),
        "if this is a batch, create the buffer with one item",
    ),
    *(
        (add_steps(*shape), "the first axis is that of the 4 environments, num_envs")
        for shape in ((8,), (8, 5))
    ),
    (add_steps(6, 4), "time comes second: jnp.swapaxes(x, 0, 1)"),
    (
        add_steps(6, 2, env_ids=jnp.array([0, 1])),
        "2 environments, one for each of env_ids, and time",
    ),
    (
        lambda: create(jaxbuf.Softmax()).update_priority(slots(), ONES),
        "draws by the scores that add takes",
    ),
    # JAX reads NumPy's numbers of 64 bits as those of 32 before it traces a program, and an error
    # calls a dtype as the caller knows it.
    (of("add", rows() | {"obs": np.zeros((8, 4), int)}), "items['obs'] has dtype int64"),
    (
        lambda: jaxbuf.add(filled(), rows() | {"action": np.zeros(8)}, donate=False),
        "float64; expected int32",
    ),
    (of("add", rows(), mask=np.ones(8)), "mask has dtype float64; expected bool"),
    (of("add", rows(), priority=np.ones(8, complex)), "priority has dtype complex128"),
    (lambda: filled().set_field("action", slots(), np.ones(8)), "dtype float64"),
    (lambda: rings().slots_at(np.zeros(2), np.zeros(2)), "env_ids has dtype float64"),
    (lambda: rings().slots_at(np.zeros(2, int), np.zeros(2)), "positions has dtype float64"),
    (lambda: jaxbuf.n_step(WINDOW, 1, 0.9, reward="id"), "reward has dtype int64"),
    (
        lambda: jaxbuf.stack_frames(WINDOW, 2, "id", terminated="id"),
        "terminated has dtype int64",
    ),
    (lambda: jaxbuf.gae(WINDOW, np.zeros((2, 3), int), 0.9, 0.9), "value has dtype int64"),
    (lambda: jaxbuf.terminal_states(WINDOW, np.ones(2)), "lengths has dtype float64"),
    # Rows of other arguments.
    *(
        (call(jnp.ones(shape, dtype)), f"{name} has shape {shape}; expected (8,), which is {which}")
        for shape in ((7,), (1,), (), (8, 1))
        for call, name, dtype, which in (
            (lambda x: of("add", rows(), priority=x), "priority", "f4", "(B,)"),
            (lambda x: of("add", rows(), mask=x), "mask", bool, "(B,)"),
            (update, "priority", "f4", "that of slots"),
            (lambda x: update(ONES, mask=x), "mask", bool, "that of slots"),
        )
    ),
    (of("add", rows(), mask=jnp.ones(8, jnp.int32)), "mask has dtype int32; expected bool"),
    (of("add", rows(), mask=ONES), "mask has dtype float32; expected bool"),
    (of("add", rows(), priority=jnp.ones(8, jnp.complex64)), "priority has dtype complex64"),
    (update(ONES, mask=jnp.ones(8, jnp.int32)), "mask has dtype int32; expected bool"),
    (
        lambda: rings().add(
            jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), rows(5)), mask=jnp.ones(5, bool)
        ),
        "expected (2,), which is (num_envs,); or one for each step, (2, 5)",
    ),
    *(
        (call(x), f"slots has shape {x.index.shape}; expected (B,)")
        for x in (jaxbuf.Slots(jnp.zeros(s, "i4"), jnp.zeros(s, "u4")) for s in ((), (2, 2)))
        for call in (lambda x: of("mark_used", x), lambda x: of("update_priority", x, x.index))
    ),
    # What nothing uses.
    *(
        (call, NO_PRIORITIES.format(sampler.replacement))
        for sampler in (UNIFORM, DISTINCT)
        for call in (
            lambda s=sampler: filled(s).add(rows(), priority=ONES),
            lambda s=sampler: jaxbuf.add(filled(s), rows(), priority=ONES),
            lambda s=sampler: filled(s).update_priority(slots(), ONES),
            lambda s=sampler: jaxbuf.update_priority(filled(s), slots(), ONES),
        )
    ),
    *(
        (lambda s=s: create(s).add(rows(), score=ONES), f"score was given, but neither {s} nor")
        for s in (UNIFORM, PRIORITIZED)
    ),
    (
        lambda: jaxbuf.sample(filled(), KEY, 2, replacement=False),
        "replacement was given, but an ItemBuffer has no use for",
    ),
    (
        lambda: jaxbuf.update_priority(filled(), slots(), ONES, beta=0.4),
        "beta was given, but an ItemBuffer has no use for it",
    ),
    # What is no buffer of this kind.
    (lambda: jaxbuf.add(jaxbuf.Holder(create()), jnp.ones(2)), "buffer is a Holder; expected"),
    (
        lambda: jax.jit(lambda buffer: jaxbuf.sample(buffer, KEY, 2))(jnp.ones(3)),
        "buffer is an array float32[3]; expected",
    ),
    (
        lambda: jaxbuf.update_priority(queue(), None, jnp.ones(2)),
        "buffer is a Queue, which has no method update_priority; it has",
    ),
    *(
        (call, "use take(batch_size), which returns the queue")
        for call in (
            lambda: jaxbuf.sample(queue(), KEY, 2),
            lambda: jaxbuf.next_batch(queue(), KEY, 2),
            lambda: queue().sample(KEY, 2),
            lambda: queue().next_batch(KEY, 2),
            lambda: jaxbuf.Holder(queue()).sample(KEY, 2),
            lambda: jaxbuf.Hosted(queue).sample(KEY, 2),
        )
    ),
    (lambda: jaxbuf.add(side_by_side(), rows()), "buffer is 3 buffers side by side; "),
    (lambda: side_by_side().metrics(), "buffer is 3 buffers side by side; "),
    (lambda: side_by_side().support(), "buffer is 3 buffers side by side; "),
    (lambda: side_by_side().sample(KEY, 4), "jax.vmap"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_the_message_says_what_to_change(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("create", "options", "message"),
    [
        (
            lambda: jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 2, 4),
            {"score": ONES[:2]},
            "a TrajectoryBuffer has no use for it; leave it out, for its add takes priority, "
            "version, session, mask",
        ),
        (
            queue,
            {"priority": ONES[:2]},
            "a Queue has no use for it; leave it out, for its add takes mask",
        ),
        (create, {"part": 1}, "an ItemBuffer has no use for it"),
        (mixture, {"part": 1, "score": ONES[:2]}, "a TrajectoryBuffer has no use for it"),
        (
            lambda: jaxbuf.EpisodeAccumulator.create(ENDS, 2, 4),
            {"score": ONES[:2]},
            "an EpisodeAccumulator has no use for it; leave it out",
        ),
    ],
)
def test_an_option_that_a_buffer_does_not_take(create, options, message):
    buffer, message = create(), f"{[*options][-1]} was given, but {message}"
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.add(buffer, jnp.ones(2), **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.jit(lambda rows: jaxbuf.add(buffer, rows, **options))(jnp.ones(2))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffer))


def test_a_refused_call_consumes_nothing():
    buffer = create().add(rows())
    with pytest.raises(ValueError, match="items"):
        jaxbuf.add(buffer, {"obs": rows()["obs"]})
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffer))


def test_edges_of_the_options_are_legal():
    jaxbuf.Prioritized(alpha=0.0, epsilon=0.0, initial_priority=0.0, uniform_mix=0.0)
    jaxbuf.Prioritized(uniform_mix=1.0)


def test_the_advice_for_episode_mask_works():
    with pytest.raises(ValueError, match=r'episodes=jaxbuf\.Episodes\(boundary="mask"\)') as error:
        rings().episode_mask(rings().sample(KEY, 2).slots)
    assert str(error.value).startswith("episodes is None; create")
    episodes = jaxbuf.Episodes(boundary="mask")
    buffer = jaxbuf.TrajectoryBuffer.create(ENDS, 2, 8, episodes=episodes)
    assert buffer.episode_mask(buffer.sample(KEY, 2).slots).shape == (2, 1)


def test_a_key_of_the_old_style_is_as_good():
    new, old = filled().sample(jax.random.key(3), 8), filled().sample(jax.random.PRNGKey(3), 8)
    np.testing.assert_array_equal(new.slots.index, old.slots.index)


def test_a_donated_buffer_says_so_and_what_to_do(tmp_path):
    gone = create()
    buffer = jaxbuf.add(gone, rows())
    for use in (
        lambda: jaxbuf.add(gone, rows()),
        lambda: jaxbuf.sample(gone, KEY, 8),
        lambda: jaxbuf.update_priority(gone, slots(), ONES),
        lambda: jaxbuf.save(tmp_path, gone),
        lambda: gone.add(rows()),
        lambda: gone.sample(KEY, 8),
    ):
        with pytest.raises(ValueError, match=r"buffer was donated.*Go on with what that call"):
            use()
    # Errors about other arguments still name those.
    with pytest.raises(ValueError, match="items"):
        jaxbuf.add(buffer, rows() | {"more": ONES})


def test_the_size_of_a_donated_buffer():
    rings = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), 2, 4)
    for buffer, given in ((create(), rows()), (rings, jnp.zeros(2)), (queue(), jnp.zeros(2))):
        jaxbuf.add(buffer, given)
        with pytest.raises(ValueError, match="buffer was donated: an earlier call updated it"):
            int(buffer.size)
