"""`explain_memory` names what is copied, and only that."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from jaxbuf.core.sizes import format_bytes
from jaxbuf.io.hlo import Program

CAPACITY = 2**12
EXAMPLE = {"obs": jnp.zeros(7), "next_obs": jnp.zeros(7), "reward": jnp.float32(0)}
LARGE = ["data['next_obs']", "data['obs']", "data['reward']", "sampler_state.nodes"]
KEYS = jax.random.split(jax.random.key(0), 3)


def create():
    return jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=jaxbuf.Prioritized())


def items(rows=16):
    return jax.tree.map(lambda leaf: jnp.ones((rows, *leaf.shape), leaf.dtype), EXAMPLE)


def add_then_sample(buffer, key):
    buffer = buffer.add(items())
    return buffer, buffer.sample(key, 32).data


def sample_then_add(buffer, key):
    batch = buffer.sample(key, 32)
    return buffer.add(items()), batch.data


def scanned(step):
    def scan(buffer, keys):
        return jax.lax.scan(step, buffer, keys)

    return scan


def short(names):
    return sorted(name.partition(".")[2] for name in names)


def test_a_donated_add_is_in_place():
    buffer = create()
    report = jaxbuf.explain_memory(jaxbuf.add, buffer, items())
    assert report.copied == ()
    assert report.bytes_copied == 0
    assert len(report.in_place) == len(jax.tree.leaves(buffer))
    assert report.bytes_in_place == sum(leaf.nbytes for leaf in jax.tree.leaves(buffer))
    assert "buffer.data['obs']" in report.in_place
    assert "0 B copied, 259.3 KiB updated in place" in str(report)
    assert report.advice == ""
    assert not buffer.data["obs"].is_deleted()


def test_without_donation_everything_is_copied():
    report = jaxbuf.explain_memory(jaxbuf.add, create(), items(), donate_argnums=())
    assert set(LARGE) <= set(short(report.copied))
    assert report.in_place == ()
    assert report.bytes_copied == sum(leaf.nbytes for leaf in report.leaves)
    assert "donate" in report.advice
    assert report.advice in str(report).replace("\n", " ")


def test_sampling_before_adding_copies_in_each_step():
    report = jaxbuf.explain_memory(scanned(sample_then_add), create(), KEYS)
    assert "data['obs']" in short(report.copied)
    copied = {leaf.name: leaf for leaf in report.leaves if leaf.fate == "copied"}
    obs = copied["buffer.data['obs']"]
    assert obs.in_loop
    assert obs.bytes_copied % (3 * obs.nbytes) == 0
    assert "in each step of a loop of 3" in str(report)
    assert "add before you sample" in report.advice


def test_adding_before_sampling_copies_nothing():
    report = jaxbuf.explain_memory(scanned(add_then_sample), create(), KEYS)
    assert report.copied == ()


def test_a_copy_of_one_leaf_names_that_leaf_alone():
    def keep_one(buffer, rows):
        return buffer.add(rows), buffer.data["next_obs"]

    report = jaxbuf.explain_memory(keep_one, create(), items())
    assert report.copied == ("buffer.data['next_obs']",)
    assert report.bytes_copied >= CAPACITY * 7 * 4
    assert "old contents are needed" in report.advice


def test_abstract_arguments_need_no_memory():
    huge = jax.eval_shape(lambda: jaxbuf.ItemBuffer.create(EXAMPLE, 2**30))
    rows = jax.eval_shape(items)
    report = jaxbuf.explain_memory(jaxbuf.add, huge, rows)
    assert report.copied == ()
    assert "updated in place" in str(report)
    assert report.bytes_in_place > 2**35


def test_sampling_only_reads():
    report = jaxbuf.explain_memory(
        jaxbuf.sample, create(), jax.random.key(0), 8, static_argnums=2, donate_argnums=()
    )
    assert len(report.read) == len(report.leaves)
    assert report.bytes_copied == 0


def test_a_jitted_function_keeps_its_own_donation():
    @functools.partial(jax.jit, static_argnums=1, donate_argnames="buffer")
    def step(unused, rows, buffer):
        return buffer.add(items(rows))

    report = jaxbuf.explain_memory(step, jnp.zeros(CAPACITY), 16, create())
    assert report.name == "step"
    assert report.copied == ()
    assert set(LARGE) <= set(short(report.in_place))
    undonated = jax.jit(lambda params, state: {"replay": state["replay"].add(items())})
    report = jaxbuf.explain_memory(undonated, jnp.zeros(3), {"replay": create()})
    assert "state['replay'].data['obs']" in report.copied
    assert all(leaf.name.startswith("state") for leaf in report.leaves)


def test_over_seeds_and_for_trajectories():
    buffers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), create())
    keys = jax.random.split(jax.random.key(0), (3, 2))
    report = jaxbuf.explain_memory(scanned(jax.vmap(add_then_sample)), buffers, keys)
    assert report.copied == ()
    rings = jaxbuf.TrajectoryBuffer.create(EXAMPLE, 2, CAPACITY, sequence_length=3)
    steps = jax.tree.map(lambda leaf: jnp.ones((2, 4, *leaf.shape), leaf.dtype), EXAMPLE)
    assert jaxbuf.explain_memory(jaxbuf.add, rings, steps).copied == ()
    kept = jaxbuf.explain_memory(jaxbuf.add, rings, steps, donate_argnums=())
    assert "data['obs']" in short(kept.copied)


def test_without_buffers_all_arguments_are_looked_at():
    report = jaxbuf.explain_memory(lambda x, y: x + y, jnp.zeros(999), 1.0, donate_argnums=())
    assert report.read == ("x", "y")
    assert jaxbuf.explain_memory(lambda x: x + 1, jnp.zeros(999)).in_place == ("x",)


def test_bad_input():
    with pytest.raises(ValueError, match="smallest is 0; expected a number of bytes from 1 on"):
        jaxbuf.explain_memory(jaxbuf.add, create(), items(), smallest=0)


def test_a_program_of_one_result_and_sizes():
    compiled = jax.jit(lambda x: x * 2, donate_argnums=0).lower(jnp.zeros(8)).compile()
    program = Program(compiled.as_text())
    assert program.aliased == {0}
    assert [parameter.label for parameter in program.parameters] == ["x"]
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1024) == "1.0 KiB"
