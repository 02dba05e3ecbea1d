"""Programs written for flashbax run on jaxbuf, and what they can rely on is the same."""

import dataclasses
import re
import subprocess
import sys
from typing import Generic, TypeVar

import chex
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
import jaxbuf.interop.flashbax as facade
from tests.lenient import lenient

STEP = {"obs": jnp.array([5, 4]), "reward": jnp.array(1.0)}
KEY = jax.random.PRNGKey(0)
T, S, B = TypeVar("T"), TypeVar("S"), TypeVar("B")


def flashbax():
    return pytest.importorskip("flashbax")


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)


def stacked(count, *more):
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *more, *leaf.shape)), STEP)


def pair_shapes(experience):
    assert experience._fields == ("first", "second")
    return shapes(experience.first), shapes(experience.second)


def readme(fbx):
    """The quickstart of the README."""
    buffer = fbx.make_flat_buffer(max_length=32, min_length=2, sample_batch_size=1)
    state = buffer.init({"obs": jnp.array([0, 0]), "reward": jnp.array(0.0)})
    able = []
    for i in range(3):
        row = {"obs": jnp.array([3 * i, 3 * i + 1]), "reward": jnp.array(3.0 * i)}
        state = buffer.add(state, row)
        able.append(bool(buffer.can_sample(state)))
    batch = buffer.sample(state, KEY)
    difference = batch.experience.second["obs"] - batch.experience.first["obs"]
    return able, difference.tolist(), pair_shapes(batch.experience), shapes(state.experience)


def flat_on_devices(fbx):
    """The notebook on flat buffers, on as many devices as there are."""
    count = jax.local_device_count()
    buffer = fbx.make_flat_buffer(32, 8, 4, False, 8)
    state = jax.pmap(buffer.init)(stacked(count))
    for _ in range(2):
        state = jax.pmap(buffer.add)(state, stacked(count, 8))
    batch = jax.pmap(buffer.sample)(state, jax.random.split(KEY, count))
    able = buffer.can_sample(state)
    return able.tolist(), pair_shapes(batch.experience), shapes(state.experience)


def mixed(fbx):
    """The notebook on mixers."""
    buffers, states = [], []
    for size, sign in ((4, 1.0), (16, -1.0)):
        buffer = fbx.make_trajectory_buffer(
            add_batch_size=1,
            max_length_time_axis=1000,
            min_length_time_axis=5,
            sample_sequence_length=5,
            period=1,
            sample_batch_size=size,
        )
        state, add = buffer.init({"obs": jnp.ones(2)}), jax.jit(buffer.add, donate_argnums=0)
        for i in range(10):
            state = add(state, {"obs": jnp.full((1, 1, 2), sign * (i + 1))})
        buffers, states = [*buffers, buffer], [*states, state]
    mixer = fbx.make_mixer(buffers=buffers, sample_batch_size=8, proportions=[1, 3])
    batch = jax.jit(mixer.sample)(states, KEY)
    signs = np.sign(batch.experience["obs"][:, 0, 0]).tolist()
    return bool(mixer.can_sample(states)), signs, shapes(batch.experience)


def on_policy(fbx):
    """The queue of the PPO example, in a scan."""
    buffer = fbx.make_trajectory_queue(
        max_length_time_axis=8, add_batch_size=2, add_sequence_length=4, sample_sequence_length=4
    )

    def update(state, i):
        rollout = jax.tree.map(lambda leaf: leaf + i.astype(leaf.dtype), stacked(2, 4))
        able = [buffer.can_add(state), buffer.can_sample(state)]
        state = buffer.add(state, rollout)
        able.append(buffer.can_sample(state))
        state, batch = buffer.sample(state)
        return state, (jnp.stack(able), batch.experience)

    state, (able, seen) = jax.jit(lambda state: jax.lax.scan(update, state, jnp.arange(5)))(
        buffer.init(STEP)
    )
    return able.tolist(), jax.tree.map(lambda leaf: leaf.tolist(), seen), int(state.read_index)


def over_environments(fbx):
    """The Anakin example: one buffer for each environment, learning under a condition."""
    buffer = fbx.make_prioritised_flat_buffer(
        max_length=20, min_length=4, sample_batch_size=2, add_sequences=True, priority_exponent=0.5
    )

    def learn(state, key):
        batch = buffer.sample(state, key)
        return buffer.set_priorities(
            state, batch.indices, jnp.abs(batch.experience.first["reward"])
        )

    def step(state, key):
        state = buffer.add(state, stacked(3))
        able = buffer.can_sample(state)
        return jax.lax.cond(able, learn, lambda state, _: state, state, key), able

    states = jax.jit(jax.vmap(buffer.init))(stacked(4))
    keys = jax.random.split(KEY, (3, 4))
    _, able = jax.jit(lambda states: jax.lax.scan(jax.vmap(step), states, keys))(states)
    return able.tolist()


def independent_items(fbx):
    """The item buffer of the matrix games example, and the other ways to add."""
    found = []
    for make in (fbx.make_item_buffer, fbx.make_prioritised_item_buffer):
        buffer = make(max_length=10, min_length=5, sample_batch_size=4, add_batches=True)
        state, able = buffer.init(STEP), []
        for rows in (3, 1, 3):
            state = buffer.add(state, stacked(rows))
            able.append(bool(buffer.can_sample(state)))
        found.append((able, shapes(buffer.sample(state, KEY).experience), int(state.current_index)))
        for sequences, leading in ((False, ()), (True, (4,))):
            buffer = make(10, 5, 4, add_sequences=sequences)
            rows = stacked(*leading) if leading else STEP
            found.append(int(buffer.add(buffer.init(STEP), rows).current_index))
    return found


def sizes_of(experience):
    """The rows and steps of each leaf."""
    return jax.tree.map(lambda leaf: leaf.shape[:2], experience)


def offline(fbx):
    """A data set as a state, drawn from by a buffer that was made for other sizes."""
    from_arrays = fbx.trajectory_buffer.TrajectoryBufferState
    steps = {"step": jnp.arange(20.0)[None, :, None] * jnp.ones((1, 1, 2))}
    found = []
    for index, full in ((0, True), (7, True), (12, False), (0, False)):
        state = from_arrays(
            experience=steps, current_index=jnp.array(index), is_full=jnp.array(full)
        )
        for length, period in ((3, 1), (5, 2)):
            buffer = fbx.make_trajectory_buffer(
                add_batch_size=1,
                sample_batch_size=256,
                sample_sequence_length=length,
                period=period,
                min_length_time_axis=length,
                max_length_time_axis=max(length, 6),
            )
            found.append(bool(buffer.can_sample(state)))
            if found[-1]:
                drawn = np.asarray(jax.jit(buffer.sample)(state, KEY).experience["step"][..., 0])
                assert (np.diff(drawn, axis=1) % 20 == 1).all()
                starts = np.unique(drawn[:, 0])
                # flashbax counts periods from the oldest step and jaxbuf from the first place.
                found.append(starts.tolist() if period == 1 else drawn.shape)
        state = buffer.add(state, {"step": jnp.full((1, 3, 2), -1.0)})
        found += [int(state.current_index), bool(state.is_full), sizes_of(state.experience)]
        found.append(state.experience["step"][0, :, 0].tolist())
    return found


def changed_by_hand(fbx):
    """States whose experience is transformed, replaced and cut."""
    buffer = fbx.make_item_buffer(6, 1, 6)
    state = buffer.init({"obs": jnp.zeros(2), "reward": jnp.array(0.0)})
    for i in range(4):
        state = buffer.add(state, {"obs": jnp.full(2, 1.0 * i), "reward": jnp.array(1.0 * i)})
    scaled = state.replace(experience={**state.experience, "obs": state.experience["obs"] + 10})
    wider = state.replace(
        experience={"obs": jnp.ones((1, 6, 3)), "reward": state.experience["reward"]}
    )
    filled = state.replace(experience=scaled.experience, current_index=0, is_full=True)
    keys = jax.random.split(KEY, 20)
    batches = [
        jax.jit(jax.vmap(buffer.sample, (None, 0)))(s, keys).experience
        for s in (scaled, wider, filled)
    ]
    return (
        np.unique(batches[0]["obs"]).tolist(),
        shapes(batches[1]),
        len(np.unique(batches[2]["obs"])),
        [(int(s.current_index), bool(s.is_full)) for s in (scaled, wider, filled)],
    )


PROGRAMS = [
    offline,
    changed_by_hand,
    readme,
    flat_on_devices,
    mixed,
    on_policy,
    over_environments,
    independent_items,
]


SLOW = (offline, independent_items, over_environments, flat_on_devices, mixed)


@pytest.mark.parametrize(
    "program",
    [pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in PROGRAMS],
)
def test_documented_programs_do_the_same(program):
    # With other keys, so that rows are not compared, but all that is determined is.
    ours = program(facade)
    fbx = flashbax()
    with lenient():
        assert program(fbx) == ours


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 2])
def test_contents_and_distribution_stay_the_same_around_the_ring(period):
    fbx = flashbax()
    options = {
        "add_batch_size": 2,
        "sample_batch_size": 8,
        "sample_sequence_length": 3,
        "period": period,
        "min_length_time_axis": 5,
        "max_length_time_axis": 8,
        "priority_exponent": 0.5,
    }
    sides = [module.make_prioritised_trajectory_buffer(**options) for module in (fbx, facade)]
    adds = [jax.jit(side.add) for side in sides]
    states = [side.init(jnp.float32(0)) for side in sides]
    random = np.random.default_rng(0)
    clock = 0
    for _ in range(12):
        length = int(random.choice([1, 3]))
        steps = jnp.arange(clock, clock + length, dtype=jnp.float32)[None] + jnp.array(
            [[0.0], [99]]
        )
        clock += length
        with lenient():
            states[0] = adds[0](states[0], steps)
        states[1] = adds[1](states[1], steps)
        theirs, ours = states
        np.testing.assert_array_equal(theirs.experience, ours.experience)
        assert theirs.current_index == ours.current_index
        assert theirs.running_index == ours.running_index
        assert theirs.is_full == ours.is_full
        assert sides[0].can_sample(theirs) == sides[1].can_sample(ours)
        if not sides[1].can_sample(ours):
            continue
        tree = theirs.sum_tree_state
        leaves = tree.nodes[-(2**tree.tree_depth) :][: 2 * 8 // period]
        np.testing.assert_allclose(leaves, ours.buffer.sampler_state.leaves, rtol=1e-5)
        batch = sides[1].sample(ours, jax.random.PRNGKey(clock))
        assert batch.valid.all()
        np.testing.assert_allclose(
            batch.probabilities, leaves[batch.indices] / tree.nodes[0], rtol=1e-5
        )
        np.testing.assert_allclose(batch.priorities, leaves[batch.indices], rtol=1e-5)
        np.testing.assert_array_equal(np.diff(batch.experience, axis=1), 1.0)
        priorities = jnp.asarray(random.uniform(0.1, 1.0, 8), jnp.float32)
        with lenient():
            states[0] = sides[0].set_priorities(theirs, batch.indices, priorities)
        states[1] = sides[1].set_priorities(ours, batch.indices, priorities)


def make_rings(sample_batch_size=4, least=3, **more):
    options = {"min_length_time_axis": least, "max_length_time_axis": 8, **more}
    return facade.make_prioritised_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=sample_batch_size,
        sample_sequence_length=2,
        period=1,
        **options,
    )


def test_stale_priorities_are_dropped_if_slots_are_passed():
    buffer = make_rings()
    empty = buffer.init(jnp.float32(0))
    early = buffer.sample(empty, KEY)
    assert not early.valid.any()
    assert not early.probabilities.any()
    state = buffer.add(empty, jnp.zeros((1, 8)))
    batch = buffer.sample(state, KEY)
    state = buffer.add(state, jnp.ones((1, 8)))
    assert buffer.set_priorities(state, batch.slots, jnp.full(4, 9.0)).sum_tree_state.nodes[0] == 7
    assert buffer.set_priorities(state, batch.indices, jnp.full(4, 9.0)).sum_tree_state.nodes[0] > 7
    # The window at the last step is not complete, so nothing may make it drawable.
    last = jnp.array([7], jnp.int32)
    assert buffer.set_priorities(state, last, jnp.ones(1)).sum_tree_state.nodes[0] == 7


def test_a_queue_refuses_what_does_not_fit_and_keeps_what_is_short():
    queue = facade.make_trajectory_queue(4, 1, add_sequence_length=2, sample_sequence_length=3)
    state = queue.init(jnp.float32(0))
    same, batch = queue.sample(queue.add(state, jnp.ones((1, 2))))
    assert not batch.valid.any()
    assert int(same.buffer.size) == 2
    full = queue.add(same, 2 * jnp.ones((1, 2)))
    assert bool(full.is_full)
    assert not bool(queue.can_add(full))
    after, batch = queue.sample(queue.add(full, 3 * jnp.ones((1, 2))))
    assert batch.experience.tolist() == [[1.0, 1.0, 2.0]]
    assert batch.valid.tolist() == [True]
    assert (int(after.read_index), int(after.write_index)) == (3, 0)


def test_the_state_is_a_buffer_of_jaxbuf_inside():
    buffer = facade.make_item_buffer(10, 1, 2)
    state = buffer.add(buffer.init(jnp.float32(0)), jnp.float32(1))
    assert int(state.buffer.metrics()["size"]) == 1
    with pytest.raises(AttributeError, match="no priorities, so it keeps no sum tree"):
        _ = state.sum_tree_state


def test_warnings():
    with pytest.warns(UserWarning, match="max_size is 17, so rows have .* = 8 steps"):
        facade.make_trajectory_buffer(2, 1, 2, 1, 2, max_size=17)
    with pytest.warns(UserWarning, match="min_length_time_axis is 1, but windows have 3 steps"):
        buffer = facade.make_trajectory_buffer(1, 1, 3, 1, 1, max_length_time_axis=8)
    state = buffer.add(buffer.init(jnp.float32(0)), jnp.zeros((1, 2)))
    assert not bool(buffer.can_sample(state))
    with pytest.warns(UserWarning, match="so 2 of 4 steps are never sampled"):
        facade.make_trajectory_buffer(1, 1, 2, 4, 2, max_length_time_axis=8)
    with pytest.warns(UserWarning, match="they are shortened to 6, a multiple of it"):
        buffer = facade.make_trajectory_buffer(1, 1, 3, 3, 3, max_length_time_axis=8)
    chex.assert_shape(buffer.init(jnp.float32(0)).experience, (1, 6))


def test_names_of_states_that_programs_use():
    assert facade.BufferState is facade.PrioritisedTrajectoryBufferState
    assert facade.TrajectoryBufferState[dict] is not None
    assert facade.trajectory_buffer.BufferState is facade.BufferState
    assert facade.buffers.prioritised_item_buffer.ExperiencePair is facade.ExperiencePair
    buffer = facade.make_prioritised_item_buffer(8, 1, 2, priority_exponent=1.0)
    state = buffer.add(buffer.init(jnp.float32(0)), jnp.float32(1))
    assert float(state.sum_tree_state.max_recorded_priority) == 1.0
    state = buffer.set_priorities(state, jnp.array([0]), jnp.array([5.0]))
    assert float(state.sum_tree_state.max_recorded_priority) == 5.0
    # Classes are generic as those of flashbax.
    one = ("TrajectoryBufferState", "TrajectoryBufferSample", "PrioritisedTrajectoryBufferSample")
    for name in (*one, "TransitionSample", "TrajectoryQueueSample", "TrajectoryQueue"):
        assert getattr(facade, name)[T] is not None
    assert facade.ExperiencePair[T](1, 2).second == 2
    for name in ("TrajectoryBuffer", "PrioritisedTrajectoryBuffer"):
        assert getattr(facade, name)[T, S, B] is not None


SUBMODULES = """
import jaxbuf.interop.flashbax.trajectory_buffer as module
import jaxbuf.interop.flashbax.buffers.trajectory_buffer
from jaxbuf.interop.flashbax.buffers.flat_buffer import TrajectoryBuffer, make_flat_buffer
from jaxbuf.interop.flashbax.buffers.prioritised_trajectory_buffer import (
    PrioritisedTrajectoryBufferState,
)
from jaxbuf.interop.flashbax.buffers.trajectory_buffer import BufferSample, BufferState, Experience
from jaxbuf.interop.flashbax.utils import add_dim_to_args
import jaxbuf.interop.flashbax as fbx
assert fbx.utils.add_dim_to_args is add_dim_to_args
assert module.BufferState is BufferState is fbx.TrajectoryBufferState
assert jaxbuf.interop.flashbax.buffers.trajectory_buffer.make_item_buffer is fbx.make_item_buffer
"""


def test_modules_of_flashbax_can_be_imported():
    subprocess.run([sys.executable, "-c", SUBMODULES], check=True, timeout=120)


def make_windows(steps, period=1, **options):
    return facade.make_trajectory_buffer(
        1, 64, steps, period, steps, max_length_time_axis=20, **options
    )


def test_what_a_vault_reads_back_is_sampled(tmp_path):
    flashbax()
    from flashbax.vault import Vault

    buffer = make_windows(3)
    state = buffer.add(buffer.init(jnp.float32(0)), jnp.arange(15.0)[None])
    with lenient():
        vault = Vault("steps", state.experience, rel_dir=str(tmp_path), vault_uid="1")
        vault.write(state)
        read = Vault("steps", rel_dir=str(tmp_path), vault_uid="1").read()
    assert bool(buffer.can_sample(read))
    drawn = jax.jit(buffer.sample)(read, KEY)
    assert drawn.valid.all()
    assert np.unique(drawn.experience[:, 0]).tolist() == list(range(13))
    after = buffer.add(read, -jnp.ones((1, 2)))
    assert after.experience[0].tolist() == [-1.0, -1.0, *range(2, 15)]


def test_a_state_built_from_arrays_gets_priorities_when_needed():
    buffer = make_rings(64, priority_exponent=1.0)
    state = facade.PrioritisedTrajectoryBufferState(
        experience=np.arange(8, dtype=np.float32)[None], current_index=2, is_full=True
    )
    drawn = buffer.sample(state, KEY)
    assert np.unique(drawn.experience[:, 0]).tolist() == [0, 2, 3, 4, 5, 6, 7]
    np.testing.assert_allclose(drawn.probabilities, 1 / 7)
    state = buffer.set_priorities(state, drawn.indices[:1], jnp.array([1e6]))
    assert np.unique(buffer.sample(state, KEY).indices).tolist() == [int(drawn.indices[0])]
    with pytest.raises(ValueError, match="cannot take the sum_tree_state of another"):
        facade.PrioritisedTrajectoryBufferState(
            experience=jnp.zeros((1, 8)), current_index=0, is_full=True, sum_tree_state=object()
        )
    with pytest.raises(ValueError, match="current_index of a state with priorities"):
        state.replace(current_index=0)
    with pytest.raises(ValueError, match=r"sampler is Prioritized\(alpha=0.5"):
        state.buffer.replace(sampler=jaxbuf.Prioritized(alpha=0.5))


def of_arrays(*shape, current_index=0, is_full=True):
    return facade.TrajectoryBufferState(
        experience=jnp.zeros(shape), current_index=current_index, is_full=is_full
    )


def empty(buffer):
    return buffer.init(jnp.float32(0))


def sampled(buffer, state):
    return buffer.sample(state, KEY)


def mixer(rows, proportions, *buffers):
    return facade.make_mixer(list(buffers), rows, proportions)


def by(exponent):
    return make_rings(4, priority_exponent=exponent)


BAD = [
    (lambda: facade.make_trajectory_buffer(1, 1, 2, 1, 2), "give max_length_time_axis or max_s"),
    (lambda: make_windows(25), "but a row has 20 steps; make rows longer"),
    (lambda: facade.make_flat_buffer(8, 2, 9), "sample_batch_size is 9, but max_length only 8"),
    (lambda: facade.make_item_buffer(8, 9, 2), "min_length is 9, but max_length only 8"),
    (lambda: facade.make_flat_buffer(8, 2, 2, add_batch_size=5), "rows have 1 steps; they need 2"),
    (lambda: facade.make_trajectory_queue(4, 1, 1, 5), "is 5, but a row has 4 steps"),
    (lambda: mixer(4, [1, 1], make_rings()), "there are 1 buffers and 2 proportions"),
    (lambda: mixer(4, [1, 1], by(1.0), facade.make_item_buffer(4, 1, 1)), "of different kinds"),
    (lambda: mixer(0, [1], make_rings()), "sample_batch_size is 0; expected an integer"),
    (lambda: mixer(5, [1], by(1.0)).sample([empty(by(1.0))], KEY), "4 rows, but its share is 5"),
    (lambda: sampled(make_windows(5), empty(make_windows(3))), "5, but the state was made with 3"),
    (lambda: sampled(make_windows(3, 2), empty(make_windows(3))), "but the state was made with 1"),
    (lambda: sampled(by(0.5), empty(by(0.6))), "the sampler is Prioritized(alpha=0.5"),
    (lambda: of_arrays(6), "experience has shape (6,)"),
    (lambda: of_arrays(2, 6, current_index=7), "current_index is 7; expected numbers from 0 to 6"),
    (lambda: sampled(make_windows(3, 2), of_arrays(1, 7)), "has rows of 7 steps, and period is 2"),
    (lambda: sampled(make_windows(9), of_arrays(1, 7)), "sample_sequence_length is 9, but"),
    (lambda: sampled(make_windows(3), {"experience": 0}), "is neither a state of this module nor"),
    (lambda: of_arrays(1, 7).replace(size=3), "a state has no field 'size'"),
    (
        lambda: of_arrays(1, 7).replace(experience=jnp.zeros((1, 6))),
        "experience has shape (1, 6); expected (1, 7, ...)",
    ),
    (
        lambda: of_arrays(2, 6).replace(experience={"a": np.ones((2, 6, 3)), "b": np.ones((2, 5))}),
        "experience['b'] has shape (2, 5); expected (2, 6, ...)",
    ),
    (
        lambda: facade.TrajectoryBufferState(experience=jnp.zeros((2, 6)), current_index=0),
        "is_full is missing",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_state_of_arrays_is_vmapped_and_carried_through_a_scan():
    steps = jnp.arange(24.0).reshape(2, 1, 12)

    def draw(steps, index):
        state = facade.TrajectoryBufferState(
            experience=steps, current_index=index, is_full=jnp.array(False)
        )

        def step(state, key):
            return buffer.add(state, jnp.ones((1, 2))), buffer.sample(state, key).experience

        return jax.lax.scan(step, state, jax.random.split(KEY, 3))

    buffer = make_windows(2)
    state, drawn = jax.jit(jax.vmap(draw))(steps, jnp.array([4, 9]))
    assert state.current_index.tolist() == [10, 3]
    assert state.is_full.tolist() == [False, True]
    assert drawn.shape == (2, 3, 64, 2)
    assert np.unique(drawn[0, 0, :, 0]).tolist() == [0, 1, 2]
    assert np.unique(drawn[1, 0, :, 0]).tolist() == list(range(12, 20))


def own_rows(fbx):
    """A program that adds single steps, and whose samples have other fields than the buffer's."""
    buffer = fbx.make_trajectory_buffer(2, 4, 1, 1, 1, max_length_time_axis=8)
    add = fbx.utils.add_dim_to_args(buffer.add, axis=1, starting_arg_index=1, ending_arg_index=2)

    def rows(state, key) -> fbx.trajectory_buffer.TrajectoryBufferSample[T]:
        experience = buffer.sample(state, key).experience
        return fbx.trajectory_buffer.TrajectoryBufferSample(
            experience=jax.tree.map(lambda leaf: leaf[:, 0], experience)
        )

    own = buffer.replace(add=add, sample=rows)
    state = buffer.init(STEP)
    for _ in range(3):
        state = own.add(state, stacked(2))
    batch = jax.jit(own.sample)(state, KEY)
    mixer = fbx.make_mixer([own, own], 4, [1, 1])
    drawn = fbx.prioritised_trajectory_buffer.PrioritisedTrajectoryBufferSample(
        experience=batch.experience, indices=jnp.arange(4), probabilities=jnp.ones(4)
    )
    return (
        shapes(batch.experience),
        int(fbx.utils.get_timestep_count(state)),
        fbx.utils.get_tree_shape_prefix(state.experience, 2),
        shapes(mixer.sample([state, state], KEY).experience),
        shapes(drawn.replace(indices=jnp.arange(3)).indices),
        type(flax.serialization.to_state_dict({"buffer": state})["buffer"]) is type(state),
        flax.serialization.from_state_dict(buffer.init(STEP), state) is state,
    )


def axes_of_arguments(fbx):
    """``add_dim_to_args`` with positional arguments and with those passed by name."""

    def shapes_of(*args, **kwargs):
        return shapes((args, kwargs))

    rows = {"a": jnp.zeros((3, 4))}
    return [
        fbx.utils.add_dim_to_args(shapes_of, *options)(rows, rows, rows, x=rows, y=rows)
        for options in ((), (0,), (0, 0, 2), (2, None, 1), (1, 1, 2, ["x"]), (1, 9, 9, []))
    ]


def test_counters_have_64_bits_where_jax_has():
    with jax.enable_x64(True):
        buffer = make_windows(2)
        state = buffer.add(buffer.init(jnp.float32(0)), jnp.zeros((1, 3), jnp.float32))
        for name in ("current_index", "read_index", "write_index", "running_index"):
            assert getattr(state, name).dtype == jnp.int64
        same = of_arrays(1, 20, current_index=state.current_index, is_full=state.is_full)
        assert (same.current_index.dtype, int(same.current_index)) == (jnp.int64, 3)
    assert make_windows(2).init(jnp.float32(0)).current_index.dtype == jnp.int32


@pytest.mark.parametrize("program", [own_rows, axes_of_arguments])
def test_programs_that_wrap_a_buffer_do_the_same(program):
    ours = program(facade)
    fbx = flashbax()
    with lenient():
        assert program(fbx) == ours


def test_a_mixer_joins_rows_of_a_buffer_and_rows_that_a_program_made():
    buffer = make_rings(4)
    state = buffer.add(buffer.init(jnp.float32(0)), jnp.ones((1, 8)))

    def rows(state, key):
        batch = buffer.sample(state, key)
        return facade.PrioritisedTrajectoryBufferSample(
            experience=-batch.experience, indices=batch.indices, probabilities=batch.probabilities
        )

    # Rounded down these are 2 rows and 1; the first buffer gives what is missing.
    batch = facade.make_mixer([buffer, buffer.replace(sample=rows)], 4, [2, 1]).sample(
        [state, state], KEY
    )
    assert batch.experience[:, 0].tolist() == [1.0, 1.0, 1.0, -1.0]
    assert (batch.probabilities.shape, batch.valid, batch.slots) == ((4,), None, None)


DECORATORS = {
    "chex": chex.dataclass(frozen=True),
    "flax": flax.struct.dataclass,
    "dataclasses": dataclasses.dataclass(frozen=True),
}


@pytest.mark.parametrize("decorator", DECORATORS)
def test_programs_add_fields_to_samples_and_states(decorator):
    decorate = DECORATORS[decorator]

    @decorate
    class Sample(facade.PrioritisedTrajectoryBufferSample, Generic[T]):
        weights: jax.Array

    @decorate
    class State(facade.TrajectoryBufferState[T]):
        count: jax.Array

    @decorate
    class Buffer(facade.TrajectoryBuffer[T, S, B]):
        name: str

    experience = jnp.arange(12.0).reshape(1, 12)
    sample = Sample(
        experience=experience, indices=jnp.arange(3), probabilities=jnp.ones(3), weights=jnp.ones(3)
    )
    base = make_windows(2)
    state = State(buffer=base.add(base.init(jnp.float32(0)), experience).buffer, count=jnp.int32(1))
    for value, field in ((sample, "weights"), (state, "count")):
        changed = dataclasses.replace(value, **{field: getattr(value, field) + 1})
        if decorator != "dataclasses":  # It makes no pytree.
            changed = jax.jit(lambda value: jax.tree.map(lambda leaf: leaf, value))(changed)
        assert type(changed) is type(value)
        assert (getattr(changed, field) == 2).all()
        np.testing.assert_array_equal(changed.experience[0, :12], experience[0])
    assert (sample.valid, sample.slots) == (None, None)
    if decorator == "flax":  # Also made from arrays, and its fields are kept.
        state = State(experience=experience, current_index=0, is_full=True, count=jnp.int32(1))
        state = base.add(state.replace(experience=-experience), jnp.full((1, 2), 9.0))
        assert type(state) is State
        assert (int(state.count), int(state.current_index)) == (1, 2)
        with pytest.raises(ValueError, match="count is missing; State has that field"):
            State(experience=experience, current_index=0, is_full=True)
    drawn = np.asarray(base.sample(state, KEY).experience)
    assert drawn.shape == (64, 2)
    assert set(np.unique(drawn)) <= (
        {9.0, *range(-11, -1)} if decorator == "flax" else {*range(12)}
    )
    functions = Buffer(
        **{f.name: getattr(base, f.name) for f in dataclasses.fields(base)}, name="a"
    )
    assert (functions.name, functions.add) == ("a", base.add)
    assert Sample[int] is not None


@pytest.mark.parametrize(
    "line",
    [
        "from jaxbuf.interop.flashbax.buffers import sum_tree",
        "from jaxbuf.interop.flashbax.buffers.sum_tree import SumTreeState",
        "import jaxbuf.interop.flashbax.buffers.sum_tree as tree",
        "from jaxbuf.interop.flashbax.buffers.prioritised_trajectory_buffer import set_priorities",
        "from jaxbuf.interop.flashbax.prioritised_trajectory_buffer import prioritised_init",
        "facade.trajectory_buffer.can_sample",
    ],
)
def test_functions_of_flashbaxs_arrays_name_what_takes_their_place(line):
    with pytest.raises(ImportError, match=r"make_prioritised_trajectory_buffer.*replace\(init="):
        exec(line, {"facade": facade})


def test_other_names_are_missing_as_in_any_module():
    assert not hasattr(facade, "no_such_name")
    with pytest.raises(ValueError, match=r"tree\['b'\] has shape \(2,\); .* begin with \(3,\)"):
        facade.utils.get_tree_shape_prefix({"a": jnp.zeros((3, 2)), "b": jnp.zeros(2)})
    with pytest.raises(ValueError, match="the tree has no leaves"):
        facade.utils.get_tree_shape_prefix({})
