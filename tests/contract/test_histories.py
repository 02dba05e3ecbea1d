"""Each buffer through one history of all operations that change it.

Its program is compiled once: a scan in which each step draws, and then does one of the operations.
Half of the history is one call, to which the buffer is donated.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf import testing
from jaxbuf.core.versions import takes_option
from tests import operations

# Operations that a buffer has not are left out. With a negative number no row of an add counts, and
# priorities and scores are illegal.
HISTORY = (
    ("add", 1), ("update_priority", 2), ("update_score", 3), ("mark_used", 1), ("take", 1),
    ("add_to_some", 1), ("set_field", 2), ("remove", 1), ("add_plainly", 2), ("set_version", 1),
    ("add", -1), ("update_priority", -1), ("insert", 2), ("mark_used", 1), ("add", 3),
    ("dequeue", 1), ("add_plainly", 1), ("set_hyperparameters", 3), ("map_field", 2),
    ("update_score", -1), ("update_priority", 4), ("set_version", 2), ("add", 2), ("clear_some", 1),
    ("add", 4), ("mark_used", 1), ("remove", 2), ("clear", 1), ("add", 1), ("add_plainly", 3),
    ("update_priority", 1), ("mark_used", 1), ("add", 5),
)  # fmt: skip
LANES = 2
REMEMBERED = 5
# As a user's programs are compiled; those of the other tests are not made fast.
OPTIMIZED = {
    name: value
    for name, value in (
        ("xla_backend_optimization_level", 3),
        ("xla_llvm_disable_expensive_passes", False),
        ("xla_cpu_use_fusion_emitters", True),
    )
    if takes_option(name, value)
}


def changed(what, buffer, sample, scale, key):
    """The buffer after an operation, whatever else it returns."""
    kind = type(buffer)
    out = operations.OPERATIONS[what][1](buffer, sample, scale, key)
    found = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, kind))
    found = [x for x in found if isinstance(x, kind)]
    # With a session, or without one.
    return jax.tree.map(lambda a, b: jnp.where(scale > 1, a, b), found[0], found[-1])


def step(branches, state, inputs):
    """Draws, and updates items of this batch and of an earlier one, which may be gone."""
    buffer, remembered, count = state
    branch, scale, key = inputs
    if operations.has_next_of_its_own(buffer):
        buffer, batch = buffer.next_batch(key, operations.BATCH)
    else:
        batch = operations.draw(buffer, key)
    drawn = buffer

    def some(now, before):
        new = jnp.arange(operations.BATCH) % 2 == 0
        return jnp.where(new.reshape(-1, *[1] * (now.ndim - 1)), now, before)

    mixed = jax.tree.map(some, batch, remembered)
    buffer = jax.lax.switch(
        branch, [functools.partial(changed, what) for what in branches], buffer, mixed, scale, key
    )
    remembered = jax.tree.map(
        lambda old, new: jnp.where(count % REMEMBERED == 0, new, old), remembered, batch
    )
    return (buffer, remembered, count + 1), (drawn, buffer, batch, buffer.metrics())


class History:
    """The program of a buffer, and what it makes of the history.

    Attributes:
        inputs: by lanes and halves, the numbers of operations, arguments and keys.
        half: the program, of a state and of inputs that are as many for both halves.
    """

    def __init__(self, name):
        buffer = operations.empty(name)
        done = [pair for pair in HISTORY if operations.OPERATIONS[pair[0]][0](buffer)]
        done += done[-1:] * (len(done) % 2)
        self.branches = sorted({what for what, _ in done})
        codes = [self.branches.index(what) for what, _ in done]
        scales = np.array([scale for _, scale in done], np.float32)
        shape = LANES, 2, len(done) // 2
        # The second lane has other numbers, of the same signs.
        scales = np.stack([scales, np.sign(scales) * (np.abs(scales) + 1)])
        keys = jax.random.split(jax.random.key(1), shape)
        codes = np.stack([np.array(codes, np.int32).reshape(shape[1:])] * LANES)
        self.inputs = codes, scales.reshape(shape), keys
        self.step = functools.partial(step, self.branches)
        self.half = jax.jit(functools.partial(jax.lax.scan, self.step), donate_argnums=0)
        self.name = name

    def start(self):
        buffer = operations.BUFFERS[self.name]()
        sample = jax.eval_shape(lambda: operations.draw(buffer, jax.random.key(0)))
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sample)
        return buffer, nothing, jnp.int32(0)


history = functools.cache(History)


@functools.cache
def results(name, lane=0):
    """The state at the end, and what is seen after each operation of both halves."""
    it, seen = history(name), []
    state = it.start()
    for half in range(2):
        state, told = it.half(state, at(it.inputs, lane, half))
        seen.append(jax.device_get(told))
    return state, jax.tree.map(lambda *leaves: np.concatenate(leaves), *seen)


def at(tree, *index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def exact(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if not np.issubdtype(leaf.dtype, np.floating)]


BESIDE = (
    "softmax-distinct", "shuffled-fresh-lowest", "windows-fresh", "queue", "mixture",
    "diverse-best", "diverse-greedy-lowest", "reservoir", "windows-recent", "windows-avoid",
    "windows-balanced-distinct", "windows-by-episode", "windows-episodes",
)  # fmt: skip
# A buffer of each kind, and each part in one of them.
OF_EACH_KIND = {
    "prioritized", "shuffled-fresh-lowest", "diverse", "windows-fresh", "windows-episodes",
    "windows-removable", "queue", "mixture",
}  # fmt: skip
every_state = pytest.mark.parametrize(
    "name",
    operations.quick(
        [name for name in operations.DIFFERENT if name not in operations.OTHER_DRAWS], OF_EACH_KIND
    ),
)


@every_state
def test_every_operation_leaves_a_buffer_valid(name):
    _, (drawn, after, *_) = seen = results(name)
    numbers = [leaf for leaf in jax.tree.leaves(seen) if np.issubdtype(leaf.dtype, np.floating)]
    assert not any(np.isnan(leaf).any() for leaf in numbers)
    testing.assert_valid(after)
    if operations.has_next_of_its_own(operations.empty(name)):
        testing.assert_valid(drawn)


@every_state
def test_a_run_goes_on_where_it_was_interrupted(name):
    it = history(name)

    def step(state):
        done = state["half"]
        (buffer, *others), seen = it.half(
            (state["buffer"], *state["others"]), at(it.inputs, 0, done)
        )
        return {"buffer": buffer, "others": others, "half": done + 1}, seen

    buffer, *others = it.start()
    state = {"buffer": buffer, "others": others, "half": np.zeros((), np.int32)}
    testing.assert_resumes(step, state, steps=2)


def assert_same(found, expected):
    """Numbers that are computed nearly, and all others bit for bit."""
    chex.assert_trees_all_close(found, expected, rtol=1e-6)
    chex.assert_trees_all_equal(exact(found), exact(expected))


@pytest.mark.parametrize("name", operations.quick(BESIDE, {"windows-fresh", "queue"}))
def test_scans_side_by_side_do_what_each_does(name):
    it = history(name)
    both = [jax.tree.map(lambda leaf: jnp.stack([leaf] * LANES), it.start())]
    scan, told = jax.jit(jax.vmap(functools.partial(jax.lax.scan, it.step))), []
    for half in range(2):
        state, seen = scan(both[-1], at(it.inputs, slice(None), half))
        both.append(state)
        told.append(jax.device_get(seen))
    told = jax.tree.map(lambda *leaves: np.concatenate(leaves, 1), *told)
    for lane in range(LANES):
        assert_same(at((both[-1], told), lane), results(name, lane))


@pytest.mark.parametrize(
    "name",
    operations.quick(
        ["shuffled-fresh-lowest", "windows-fresh", "queue", "mixture"],
        {"queue", "mixture"},
    ),
)
def test_steps_with_donation_are_a_scan(name):
    it = history(name)
    one = jax.jit(it.step, donate_argnums=0)
    state, seen = it.start(), []
    for t in np.ndindex(it.inputs[0].shape[1:]):
        state, told = one(state, at(it.inputs, 0, *t))
        seen.append(jax.device_get(told))
    assert_same((state, jax.tree.map(lambda *leaves: np.stack(leaves), *seen)), results(name))


@pytest.mark.parametrize(
    "name",
    operations.quick(["prioritized", "shuffled-fresh-lowest", "windows-fresh"], {"prioritized"}),
)
def test_optimized_is_the_scan(name):
    it, seen = history(name), []
    scan = functools.partial(jax.lax.scan, it.step)
    half, state = jax.jit(scan, compiler_options=OPTIMIZED), it.start()
    for number in range(2):
        state, told = half(state, at(it.inputs, 0, number))
        seen.append(jax.device_get(told))
    assert_same((state, jax.tree.map(lambda *leaves: np.concatenate(leaves), *seen)), results(name))
