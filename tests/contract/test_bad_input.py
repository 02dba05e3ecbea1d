"""Bad input raises at the call or at trace time, and the message says what to change."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf

PRIORITIZED = jaxbuf.Prioritized()


def example():
    return {"obs": jnp.zeros(4, jnp.float32), "action": jnp.int32(0)}


def rows(batch=8):
    return {"obs": jnp.zeros((batch, 4), jnp.float32), "action": jnp.zeros(batch, jnp.int32)}


def create(sampler=PRIORITIZED, capacity=16):
    return jaxbuf.ItemBuffer.create(example(), capacity, sampler=sampler)


def filled(sampler=PRIORITIZED):
    return jaxbuf.add(create(sampler), rows())


def rings():
    return jaxbuf.TrajectoryBuffer.create(example(), 2, 8)


WINDOW = {
    "reward": np.zeros((2, 3), np.float32),
    "terminated": np.zeros((2, 3), bool),
    "id": np.zeros((2, 3), int),
}

HOW_TO_ADD = {
    "method": lambda buffer, items, **options: buffer.add(items, **options),
    "function": jaxbuf.add,
    "undonated": lambda buffer, items, **options: jaxbuf.add(
        buffer, items, donate=False, **options
    ),
    "jit": lambda buffer, items, **options: jax.jit(lambda b, i: b.add(i, **options))(
        buffer, items
    ),
}


@pytest.mark.parametrize("how", list(HOW_TO_ADD))
def test_wrong_shape_has_the_promised_message(how):
    bad = rows() | {"obs": jnp.zeros((8, 3), jnp.float32)}
    message = re.escape("items['obs'] has shape (8, 3); expected (B, 4)")
    with pytest.raises(ValueError, match=message):
        HOW_TO_ADD[how](create(), bad)


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [("obs", (4,)), ("obs", (8, 1)), ("obs", (8, 4, 1)), ("obs", ()), ("obs", (8, 2, 2))],
)
def test_a_shape_is_never_broadcast(leaf, shape):
    bad = rows() | {leaf: jnp.zeros(shape, jnp.float32)}
    with pytest.raises(ValueError, match=re.escape(f"items['{leaf}'] has shape {shape}")):
        create().add(bad)


def test_an_unbatched_item_is_refused():
    message = r"items\['action'\] has shape \(\); expected \(B,\); put an axis in front, x\[None\]"
    with pytest.raises(ValueError, match=message):
        create().add(example())


def test_a_list_of_items_says_how_to_stack_them():
    message = "items is a list of 3; stack them: "
    with pytest.raises(ValueError, match=message) as error:
        create().add([example()] * 3)
    assert str(error.value).endswith("jax.tree.map(lambda *rows: jnp.stack(rows), *items)")
    items = [example()] * 3
    create().add(jax.tree.map(lambda *rows: jnp.stack(rows), *items))


def test_a_python_scalar_in_place_of_a_batch_is_refused():
    with pytest.raises(ValueError, match=re.escape("items['action']")):
        create().add(rows() | {"action": 3})


def test_leaves_must_agree_on_the_batch():
    bad = rows() | {"action": jnp.zeros(7, jnp.int32)}
    with pytest.raises(ValueError, match=r"items\['(obs|action)'\].*\b[78]\b") as error:
        create().add(bad)
    assert "7" in str(error.value)
    assert "8" in str(error.value)


@pytest.mark.parametrize("how", list(HOW_TO_ADD))
@pytest.mark.parametrize(
    ("leaf", "bad", "expected"),
    [
        ("action", jnp.float32, "int32"),
        ("action", jnp.int16, "int32"),
        ("action", jnp.uint32, "int32"),
        ("action", jnp.bool_, "int32"),
        ("obs", jnp.int32, "float32"),
        ("obs", jnp.float16, "float32"),
    ],
)
def test_a_dtype_is_never_cast(how, leaf, bad, expected):
    items = rows()
    items[leaf] = items[leaf].astype(bad)
    with pytest.raises(ValueError, match=re.escape(f"items['{leaf}']")) as error:
        HOW_TO_ADD[how](create(), items)
    assert expected in str(error.value)
    assert jnp.dtype(bad).name in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.add(rows() | {"obs": np.zeros((8, 4), int)}), "items['obs'] has dtype int64"),
        (lambda b: jaxbuf.add(b, rows() | {"action": np.zeros(8)}), "float64; expected int32"),
        (lambda b: b.add(rows(), mask=np.ones(8)), "mask has dtype float64; expected bool"),
        (lambda b: b.add(rows(), priority=np.ones(8, complex)), "priority has dtype complex128"),
        (lambda b: b.set_field("action", b.latest(2).slots, np.ones(2)), "dtype float64"),
        (lambda b: rings().slots_at(np.zeros(2), np.zeros(2)), "env_ids has dtype float64"),
        (lambda b: rings().slots_at(np.zeros(2, int), np.zeros(2)), "positions has dtype float64"),
        (lambda b: jaxbuf.n_step(WINDOW, 1, 0.9, reward="id"), "reward has dtype int64"),
        (
            lambda b: jaxbuf.stack_frames(WINDOW, 2, "id", terminated="id"),
            "terminated has dtype int64",
        ),
        (lambda b: jaxbuf.gae(WINDOW, np.zeros((2, 3), int), 0.9, 0.9), "value has dtype int64"),
        (lambda b: jaxbuf.terminal_states(WINDOW, np.ones(2)), "lengths has dtype float64"),
    ],
)
def test_a_dtype_is_called_as_the_caller_knows_it(call, message):
    """JAX reads NumPy's numbers of 64 bits as those of 32 before it traces a program."""
    with pytest.raises(ValueError, match=re.escape(message)):
        call(filled())


@pytest.mark.parametrize("how", list(HOW_TO_ADD))
def test_a_missing_leaf_is_named(how):
    with pytest.raises(ValueError, match="action"):
        HOW_TO_ADD[how](create(), {"obs": rows()["obs"]})


@pytest.mark.parametrize("how", list(HOW_TO_ADD))
def test_an_extra_leaf_is_named(how):
    with pytest.raises(ValueError, match="reward"):
        HOW_TO_ADD[how](create(), rows() | {"reward": jnp.zeros(8, jnp.float32)})


def mixed():
    """A dictionary of which JAX cannot sort the keys."""
    return {1: jnp.zeros(2), "obs": jnp.zeros(2)}


@pytest.mark.parametrize("how", list(HOW_TO_ADD))
def test_keys_that_cannot_be_sorted_together(how, tmp_path):
    message = "is not a pytree: its dictionaries need keys that can be sorted"
    if how != "jit":
        with pytest.raises(ValueError, match=f"items {message}"):
            HOW_TO_ADD[how](create(), mixed())
    for make in (
        lambda: jaxbuf.ItemBuffer.create(mixed(), 4),
        lambda: jaxbuf.TrajectoryBuffer.create(mixed(), 2, 4),
        lambda: jaxbuf.Queue.create(mixed(), 4),
        lambda: jaxbuf.ChunkAccumulator.create(mixed(), 2, 2),
    ):
        with pytest.raises(ValueError, match=f"example {message}"):
            make()
    with pytest.raises(ValueError, match=f"buffer {message}"):
        jaxbuf.save(tmp_path, mixed())


def test_a_list_in_place_of_an_array_is_named():
    item = {"action": jnp.int32(0), "reward": jnp.float32(0)}
    buffer = jaxbuf.ItemBuffer.create(item, 4)
    with pytest.raises(
        ValueError,
        match=re.escape("items['action'] is a list; expected an array: np.asarray(items["),
    ):
        buffer.add({"action": [1, 2], "reward": np.zeros(2, np.float32)})


def test_of_many_differences_a_few_are_named():
    more = {f"extra{number:02}": jnp.zeros(8) for number in range(20)}
    with pytest.raises(
        ValueError, match=re.escape("items['extra05'] is not in the example; 14 more")
    ):
        create().add(rows() | more)


def test_another_container_is_refused():
    with pytest.raises(ValueError, match="items"):
        create().add((rows()["obs"], rows()["action"]))
    with pytest.raises(ValueError, match="items"):
        create().add(rows()["obs"])


def test_the_message_names_a_nested_leaf():
    nested = {"a": ({"b": jnp.zeros(2, jnp.float32)}, jnp.int32(0))}
    buffer = jaxbuf.ItemBuffer.create(nested, 4)
    bad = {"a": ({"b": jnp.zeros((3, 5), jnp.float32)}, jnp.zeros(3, jnp.int32))}
    message = re.escape("items['a'][0]['b'] has shape (3, 5); expected (B, 2)")
    with pytest.raises(ValueError, match=message):
        buffer.add(bad)


def test_the_message_for_an_item_of_one_array():
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(4, jnp.float32), 4)
    with pytest.raises(ValueError, match=re.escape("items has shape (8, 3); expected (B, 4)")):
        buffer.add(jnp.zeros((8, 3), jnp.float32))


def test_a_refused_call_consumes_nothing():
    buffer = filled()
    with pytest.raises(ValueError, match="items"):
        jaxbuf.add(buffer, {"obs": rows()["obs"]})
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(buffer))
    assert buffer.size == 8


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity):
    with pytest.raises(ValueError, match=rf"capacity.*{capacity}"):
        create(capacity=capacity)


@pytest.mark.parametrize("capacity", [2.5, "many", None])
def test_capacity_must_be_an_integer(capacity):
    with pytest.raises((TypeError, ValueError), match="capacity"):
        create(capacity=capacity)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("alpha", -0.1),
        ("alpha", float("nan")),
        ("alpha", float("inf")),
        ("epsilon", -1e-6),
        ("epsilon", float("nan")),
        ("epsilon", float("inf")),
        ("initial_priority", -1.0),
        ("initial_priority", float("nan")),
        ("initial_priority", float("inf")),
        ("uniform_mix", -0.1),
        ("uniform_mix", 1.1),
        ("uniform_mix", float("nan")),
    ],
)
def test_options_of_prioritized(option, value):
    with pytest.raises(ValueError, match=option) as error:
        jaxbuf.Prioritized(**{option: value})
    assert str(value) in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0.0},
        {"epsilon": 0.0},
        {"initial_priority": 0.0},
        {"uniform_mix": 0.0},
        {"uniform_mix": 1.0},
    ],
)
def test_edges_of_the_options_are_legal(options):
    jaxbuf.Prioritized(**options)


@pytest.mark.parametrize("strategy", ["sampler", "evictor"])
def test_a_name_is_no_strategy(strategy):
    with pytest.raises((TypeError, ValueError), match=strategy):
        jaxbuf.ItemBuffer.create(example(), 4, **{strategy: "uniform"})


@pytest.mark.parametrize("sampler", [jaxbuf.Uniform(), jaxbuf.Uniform(replacement=False)])
def test_a_priority_that_nothing_consumes(sampler):
    with pytest.raises(ValueError, match=r"priority.*Uniform|Uniform.*priority"):
        create(sampler).add(rows(), priority=jnp.ones(8, jnp.float32))
    with pytest.raises(ValueError, match=r"priority.*Uniform|Uniform.*priority"):
        jaxbuf.add(create(sampler), rows(), priority=jnp.ones(8, jnp.float32))


@pytest.mark.parametrize("sampler", [jaxbuf.Uniform(), jaxbuf.Uniform(replacement=False)])
def test_an_update_that_nothing_consumes(sampler):
    buffer = filled(sampler)
    slots = jaxbuf.sample(buffer, jax.random.key(0), 8).slots
    with pytest.raises(ValueError, match=r"priority.*Uniform|Uniform.*priority"):
        buffer.update_priority(slots, jnp.ones(8, jnp.float32))
    with pytest.raises(ValueError, match=r"priority.*Uniform|Uniform.*priority"):
        jaxbuf.update_priority(buffer, slots, jnp.ones(8, jnp.float32))


@pytest.mark.parametrize("sampler", [jaxbuf.Uniform(), PRIORITIZED])
def test_a_score_that_nothing_consumes(sampler):
    with pytest.raises(ValueError, match="score"):
        create(sampler).add(rows(), score=jnp.ones(8, jnp.float32))


@pytest.mark.parametrize("shape", [(7,), (1,), (), (8, 1)])
def test_shape_of_added_priorities(shape):
    with pytest.raises(ValueError, match="priority") as error:
        create().add(rows(), priority=jnp.ones(shape, jnp.float32))
    assert str(shape) in str(error.value)
    assert "(8,)" in str(error.value)


@pytest.mark.parametrize("shape", [(7,), (1,), (), (8, 1)])
def test_shape_of_the_mask(shape):
    with pytest.raises(ValueError, match="mask") as error:
        create().add(rows(), mask=jnp.ones(shape, bool))
    assert str(shape) in str(error.value)
    assert "(8,)" in str(error.value)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_dtype_of_the_mask(dtype):
    with pytest.raises(ValueError, match="mask") as error:
        create().add(rows(), mask=jnp.ones(8, dtype))
    assert jnp.dtype(dtype).name in str(error.value)
    assert "bool" in str(error.value)


@pytest.mark.parametrize("dtype", [jnp.complex64])
def test_dtype_of_a_priority(dtype):
    with pytest.raises(ValueError, match="priority") as error:
        create().add(rows(), priority=jnp.ones(8, dtype))
    assert jnp.dtype(dtype).name in str(error.value)


@pytest.mark.parametrize("shape", [(7,), (1,), (), (8, 1)])
def test_shape_of_updated_priorities(shape):
    buffer = filled()
    slots = jaxbuf.sample(buffer, jax.random.key(0), 8).slots
    with pytest.raises(ValueError, match="priority") as error:
        buffer.update_priority(slots, jnp.ones(shape, jnp.float32))
    assert str(shape) in str(error.value)
    assert "(8,)" in str(error.value)


def test_mask_of_an_update():
    buffer = filled()
    slots = jaxbuf.sample(buffer, jax.random.key(0), 8).slots
    priority = jnp.ones(8, jnp.float32)
    with pytest.raises(ValueError, match="mask") as error:
        buffer.update_priority(slots, priority, mask=jnp.ones(7, bool))
    assert "(7,)" in str(error.value)
    assert "(8,)" in str(error.value)
    with pytest.raises(ValueError, match=r"mask.*int32"):
        buffer.update_priority(slots, priority, mask=jnp.ones(8, jnp.int32))


@pytest.mark.parametrize("batch_size", [0, -3])
def test_batch_size_must_be_positive(batch_size):
    for sample in (jaxbuf.sample, lambda buffer, key, n: buffer.sample(key, n)):
        with pytest.raises(ValueError, match=rf"batch_size.*{batch_size}"):
            sample(filled(), jax.random.key(0), batch_size)


def test_batch_size_must_be_an_integer():
    with pytest.raises((TypeError, ValueError), match="batch_size"):
        filled().sample(jax.random.key(0), 2.5)


@pytest.mark.parametrize("normalize", ["max", "sum", "", True])
def test_an_unknown_normalization_names_the_known_ones(normalize):
    buffer = filled()
    sample = jaxbuf.sample(buffer, jax.random.key(0), 8)
    with pytest.raises(ValueError, match="normalize") as error:
        jaxbuf.importance_weights(buffer, sample, 0.4, normalize=normalize)
    for known in ("batch", "buffer", "mean", "None"):
        assert known in str(error.value)
    assert repr(normalize) in str(error.value)


def test_an_item_without_arrays_is_refused():
    with pytest.raises(ValueError, match="example"):
        jaxbuf.ItemBuffer.create({}, 4)


def test_an_example_that_is_no_array_is_named():
    with pytest.raises((TypeError, ValueError), match="name"):
        jaxbuf.ItemBuffer.create({"obs": jnp.zeros(2), "name": "cart"}, 4)


def test_bad_values_never_raise():
    """Bad values are masked and counted, and never raise, in eager mode as in jit."""
    priority = np.full(8, np.nan, np.float32)
    buffer = create().add(rows(), priority=jnp.asarray(priority))
    assert buffer.size == 0
    assert buffer.metrics()["rejected"] == 8


KEYS = {
    "a number": (0, "key is of type int; expected one key, such as jax.random.key(0)"),
    "keys": (
        jax.random.split(jax.random.key(0)),
        "key is of type key<fry> of shape (2,); expected one",
    ),
    "old keys": (jax.random.split(jax.random.PRNGKey(0)), "key is of type uint32 of shape (2, 2)"),
    "floats": (jnp.zeros(2), "key is of type float32 of shape (2,)"),
    "a generator": (np.random.default_rng(0), "key is of type Generator"),
}


@pytest.mark.parametrize(("key", "message"), KEYS.values(), ids=list(KEYS))
def test_a_key_is_one_key(key, message):
    buffer = filled()
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.sample(key, 4)
    with pytest.raises(ValueError, match="key is"):
        buffer.sample_range(key, 4, -3)


def test_a_key_that_is_jitted_is_named_too():
    with pytest.raises(ValueError, match="key is of type int; expected one key"):
        jaxbuf.sample(filled(), 0, 4)


def test_a_key_of_the_old_style_is_as_good():
    buffer = filled()
    new, old = buffer.sample(jax.random.key(3), 8), buffer.sample(jax.random.PRNGKey(3), 8)
    np.testing.assert_array_equal(new.slots.index, old.slots.index)


@pytest.mark.parametrize("batch_size", [jax.random.key(0), jnp.int32(4), 4.0, None])
def test_a_batch_size_that_is_no_number_is_named(batch_size):
    with pytest.raises(ValueError, match=r"(?s)batch_size is .*; expected an integer"):
        jaxbuf.sample(filled(), jax.random.key(0), batch_size)


@pytest.mark.parametrize("bound", ["start", "stop"])
@pytest.mark.parametrize("number", [2**40, -(2**31) - 1])
def test_a_range_that_int32_does_not_hold_is_named(bound, number):
    rings = jaxbuf.TrajectoryBuffer.create(jnp.int32(0), 1, 8).add(jnp.arange(5)[None])
    for buffer in (filled(), rings):
        with pytest.raises(ValueError, match=f"{bound} is {number}; expected an integer from"):
            buffer.sample_range(jax.random.key(0), 4, **{bound: number})


def test_a_donated_buffer_says_so_and_what_to_do(tmp_path):
    gone = create()
    buffer = jaxbuf.add(gone, rows())
    slots = jaxbuf.sample(buffer, jax.random.key(0), 8).slots
    for use in (
        lambda: jaxbuf.add(gone, rows()),
        lambda: jaxbuf.sample(gone, jax.random.key(0), 8),
        lambda: jaxbuf.update_priority(gone, slots, jnp.ones(8)),
        lambda: jaxbuf.save(tmp_path, gone),
        lambda: gone.add(rows()),
        lambda: gone.sample(jax.random.key(0), 8),
    ):
        with pytest.raises(ValueError, match=r"buffer was donated.*Go on with what that call"):
            use()
    # Errors about other arguments still name those.
    with pytest.raises(ValueError, match="items"):
        jaxbuf.add(buffer, rows() | {"more": jnp.ones(8)})


def test_slots_are_the_slots_of_a_sample():
    buffer = filled()
    batch = buffer.sample(jax.random.key(0), 4)
    with pytest.raises(ValueError, match=re.escape("slots is a Sample; expected the slots")):
        jaxbuf.update_priority(buffer, batch, jnp.ones(4))
    with pytest.raises(ValueError, match=re.escape("slots is only an array; expected the slots")):
        buffer.update_priority(batch.slots.index, jnp.ones(4))
    with pytest.raises(ValueError, match="sample is a dict; expected the whole sample"):
        jaxbuf.importance_weights(buffer, batch.data, 0.4)


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_slots_are_rows(shape):
    freshness = jaxbuf.Freshness(max_use=2)
    sampler = jaxbuf.Prioritized()
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=sampler, freshness=freshness)
    slots = jaxbuf.Slots(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.uint32))
    for call in (
        lambda: buffer.update_priority(slots, jnp.ones(shape)),
        lambda: buffer.mark_used(slots),
    ):
        with pytest.raises(ValueError, match=re.escape(f"slots has shape {shape}; expected (B,)")):
            call()


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint32])
def test_slots_may_be_integers_of_any_width(dtype):
    freshness = jaxbuf.Freshness(max_use=2)
    sampler = jaxbuf.Prioritized(alpha=1.0)
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=sampler, freshness=freshness)
    buffer, slots = buffer.insert(jnp.arange(3))
    slots = jaxbuf.Slots(*(np.asarray(x).astype(dtype) for x in (slots.index, slots.generation)))
    buffer = buffer.update_priority(slots, jnp.arange(3.0)).mark_used(slots)
    np.testing.assert_array_equal(buffer.sampler_state.leaves, [0, 1, 2, 0])
    assert buffer.use_count(slots).tolist() == [1, 1, 1]
    assert buffer.staleness(slots).tolist() == [0, 0, 0]


def test_buffers_side_by_side_need_vmap():
    buffers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), create())
    for use in (
        lambda: jaxbuf.add(buffers, rows()),
        lambda: buffers.sample(jax.random.key(0), 4),
    ):
        with pytest.raises(ValueError, match=r"buffer is 3 buffers side by side; .*jax\.vmap"):
            use()


def test_a_sampler_is_no_evictor_and_an_evictor_no_sampler():
    with pytest.raises(ValueError, match=re.escape("sampler is Lowest(); expected a sampler")):
        create(jaxbuf.Lowest())
    with pytest.raises(ValueError, match=r"evictor is Uniform.*; expected an evictor"):
        jaxbuf.ItemBuffer.create(example(), 4, evictor=jaxbuf.Uniform())
    with pytest.raises(ValueError, match="sampler is 'uniform'; expected a sampler such as"):
        jaxbuf.TrajectoryBuffer.create(example(), 2, 4, sampler="uniform")


def test_a_mask_of_steps_says_both_shapes_that_fit():
    buffer = jaxbuf.TrajectoryBuffer.create(example(), 2, 10)
    steps = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), rows(5))
    message = "expected (2,), which is (num_envs,); or one for each step, (2, 5)"
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.add(steps, mask=jnp.ones(5, bool))
