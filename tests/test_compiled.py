"""What XLA makes of a step: nothing as large as a buffer may be copied in it."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from jaxbuf.core import rowwise
from jaxbuf.io.hlo import Program

CAPACITY = 2**14
EXAMPLE = {"obs": jnp.zeros(7), "reward": jnp.float32(0), "frame": jnp.zeros((8, 9, 2), bool)}
PRIORITIZED = jaxbuf.Prioritized()


def items(rows):
    return jax.tree.map(lambda leaf: jnp.ones((rows, *leaf.shape), leaf.dtype), EXAMPLE)


def copies(function, *args):
    """The copies of arrays with at least one number per slot in the compiled ``function``."""
    compiled = jax.jit(function, donate_argnums=0).lower(*args).compile()
    found = Program(compiled.as_text()).copies(4 * CAPACITY)
    return [copy for copy in found if max(copy.shape) >= CAPACITY]


def cycle(rows, batch_size, normalize):
    def step(buffer, key):
        buffer = buffer.add(items(rows))
        batch = buffer.sample(key, batch_size)
        weights = jaxbuf.importance_weights(buffer, batch, 0.4, normalize)
        td_error = batch.data["reward"] - batch.data["obs"].mean(-1)
        return buffer.update_priority(batch.slots, jnp.abs(td_error)), jnp.sum(weights * td_error)

    return step


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
@pytest.mark.parametrize(("rows", "batch_size"), [(1, 1), (1, 32), (64, 256), (2048, 4096)])
def test_a_scanned_cycle_copies_nothing(rows, batch_size, normalize):
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)
    keys = jax.random.split(jax.random.key(0), 3)
    step = cycle(rows, batch_size, normalize)
    assert not copies(lambda buffer, keys: jax.lax.scan(step, buffer, keys), buffer, keys)


def test_a_cycle_over_seeds_copies_nothing():
    empty = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)
    buffers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), empty)
    keys = jax.random.split(jax.random.key(0), (5, 3))
    step = jax.vmap(cycle(4, 32, "batch"))
    assert not copies(lambda buffers, keys: jax.lax.scan(step, buffers, keys), buffers, keys)


def test_updates_that_ignore_the_probabilities_copy_nothing():
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)

    def step(buffer, key):
        batch = buffer.sample(key, 256)
        return buffer.update_priority(batch.slots, jnp.ones(256)), batch.probability

    keys = jax.random.split(jax.random.key(0), 3)
    assert not copies(lambda buffer, keys: jax.lax.scan(step, buffer, keys), buffer, keys)


def compiled(function, *args, donate=None):
    """The program that a call from Python runs."""
    with rowwise.alone():
        return jax.jit(function, donate_argnums=donate).lower(*args).compile()


def operations(program):
    """What XLA takes for the number of operations of a program."""
    return program.cost_analysis()["flops"]


def first_kernels(text):
    """How many kernels of a program read nothing but its arguments and constants."""
    ready, count = set(), 0
    for line in text[text.index("\nENTRY") :].splitlines()[1:]:
        parts = re.match(r"\s*(?:ROOT )?(%[\w.-]+) = .*? ([\w-]+)\((.*?)\)(?:,|$)", line)
        if parts is None:
            continue
        name, kind, operands = parts.groups()
        made_of = set(re.findall(r"%[\w.-]+", operands)) if kind != "constant" else set()
        if made_of <= ready:
            if kind in ("parameter", "constant", "tuple", "get-tuple-element", "bitcast"):
                ready.add(name)
            else:
                count += 1
    return count


@pytest.mark.parametrize("rows", [32, 64, 256, 512])
def test_small_programs_are_short_enough_to_run_at_once(rows):
    # Beyond 1,000 operations XLA:CPU hands a program to a thread, and waits for it.
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, 2**20, sampler=PRIORITIZED)
    key, priority = jax.random.key(0), jnp.ones(rows)
    batch = jax.eval_shape(lambda: buffer.sample(key, rows))
    if rows <= rowwise.SHORT_RUN:
        add = compiled(lambda buffer: buffer.add(items(rows)), buffer, donate=0)
        assert operations(add) < 1000
    sample = compiled(lambda buffer, key: buffer.sample(key, rows), buffer, key)
    assert operations(sample) < 1000
    update = compiled(
        lambda buffer, *rows: buffer.update_priority(*rows), buffer, batch.slots, priority, donate=0
    )
    assert operations(update) < 1000
    weights = compiled(
        lambda batch, beta: jaxbuf.importance_weights(buffer, batch, beta), batch, jnp.float32(0.4)
    )
    assert operations(weights) < 1000
    # It takes one of the kernels that could run, and if more than eight are left hands on half.
    assert first_kernels(update.as_text()) <= 9


@pytest.mark.parametrize("sampler", [jaxbuf.Uniform(replacement=False), jaxbuf.Softmax()])
def test_other_samples_are_short_enough_to_run_at_once(sampler):
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, 2**20, sampler=sampler)
    sample = compiled(lambda buffer, key: buffer.sample(key, 256), buffer, jax.random.key(0))
    assert operations(sample) < 1000


def test_first_kernels_are_those_that_wait_for_nothing():
    x = jnp.ones(64)
    assert first_kernels(compiled(lambda x: jnp.cumsum(jnp.cumsum(x)), x).as_text()) == 1
    many = compiled(lambda x: [jnp.cumsum(x[:n]) for n in range(3, 15)], x)
    assert first_kernels(many.as_text()) == 12


def loops_of_kernels(text):
    """How many loops of a program are not one native function, but launch kernels in each step."""
    native = set(re.findall(r"to_apply=(%[\w.-]+)(?=.*small_call)", text))
    found, inside = 0, ""
    for line in text.splitlines():
        if begun := re.match(r"(?:ENTRY )?(%[\w.-]+) .*\{\s*$", line):
            inside = begun[1]
        found += " while(" in line and inside not in native
    return found


@pytest.mark.parametrize("rows", [8, 64, 256])
def test_trees_of_several_seeds_change_in_native_loops(rows):
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)
    key, priority = jax.random.key(0), jnp.ones(rows)
    slots = jax.eval_shape(lambda: buffer.sample(key, rows)).slots
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), (buffer, items(rows)))
    add = jax.jit(jax.vmap(lambda buffer, new: buffer.add(new))).lower(*many).compile()
    assert loops_of_kernels(add.as_text()) == 0
    args = jax.tree.map(lambda leaf: jnp.zeros((4, *leaf.shape), leaf.dtype), (slots, priority))
    update = jax.vmap(lambda buffer, slots, priority: buffer.update_priority(slots, priority))
    assert loops_of_kernels(jax.jit(update).lower(many[0], *args).compile().as_text()) == 0


def test_loops_of_kernels_are_found():
    def long(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.sort(x) + i.astype(x.dtype), x)

    assert loops_of_kernels(jax.jit(long).lower(jnp.ones(512)).compile().as_text()) == 1


def lowered(platform, function, *args):
    """What another platform's compiler is given."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


STEP = {**EXAMPLE, "terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}
BUFFERS = {
    "uniform": lambda: jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY),
    "prioritized": lambda: jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED),
    "mixed": lambda: jaxbuf.ItemBuffer.create(
        EXAMPLE, CAPACITY, sampler=jaxbuf.Prioritized(uniform_mix=0.1)
    ),
    "highest": lambda: jaxbuf.reward_prioritized(EXAMPLE, CAPACITY),
    "windows": lambda: jaxbuf.TrajectoryBuffer.create(
        STEP, 8, CAPACITY // 8, sequence_length=4, sampler=PRIORITIZED
    ),
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_are_never_waited_for(platform, kind):
    # Of a loop or branch that depends on its numbers the host has to be told how it goes on.
    buffer, key = BUFFERS[kind](), jax.random.key(0)
    sampled = jax.eval_shape(lambda: buffer.sample(key, 256))
    programs = []
    if kind != "highest":
        # Draws without replacement go in rounds, until there are enough.
        programs.append(lowered(platform, lambda buffer, key: buffer.sample(key, 256), buffer, key))
    if kind == "windows":
        steps = jax.tree.map(lambda leaf: jnp.ones((8, 1, *leaf.shape), leaf.dtype), STEP)
        programs.append(lowered(platform, lambda buffer, rows: buffer.add(rows), buffer, steps))
    else:
        score = {"score": jnp.ones(64)} if kind == "highest" else {}
        add = lambda buffer, rows, score: buffer.add(rows, **score)  # noqa: E731
        programs.append(lowered(platform, add, buffer, items(64), score))
    if kind not in ("uniform", "highest"):
        update = lambda buffer, *rows: buffer.update_priority(*rows)  # noqa: E731
        programs.append(lowered(platform, update, buffer, sampled.slots, jnp.ones(256)))
    for program in programs:
        assert "stablehlo.while" not in program
        assert "stablehlo.if" not in program


@pytest.mark.parametrize(("capacity", "scatters"), [(2**14, 2), (2**20, 3), (2**24, 4)])
def test_updates_on_accelerators_write_few_times(capacity, scatters):
    # The leaves, the levels of many nodes, and all levels of few nodes together.
    buffer = jax.eval_shape(
        lambda: jaxbuf.ItemBuffer.create(EXAMPLE, capacity, sampler=PRIORITIZED)
    )
    slots = jax.eval_shape(lambda buffer: buffer.sample(jax.random.key(0), 256), buffer).slots
    update = lambda buffer, *rows: buffer.update_priority(*rows)  # noqa: E731
    program = lowered("cuda", update, buffer, slots, jnp.ones(256))
    assert program.count('"stablehlo.scatter"(') == scatters


@pytest.mark.parametrize(
    "sampler",
    [
        jaxbuf.Uniform(replacement=False),
        jaxbuf.Prioritized(replacement=False),
        jaxbuf.Softmax(replacement=False),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_without_replacement_a_copy_is_made_only_when_it_is_needed(sampler):
    # To take the drawn items out, where one round of proposals was not enough.
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=sampler)

    def step(buffer, key):
        score = jnp.ones(64) if sampler.uses_score else None
        buffer = buffer.add(items(64), score=score)
        batch = buffer.sample(key, 256)
        if sampler.uses_priority:
            buffer = buffer.update_priority(batch.slots, batch.data["reward"])
        return buffer, batch.data["reward"]

    keys = jax.random.split(jax.random.key(0), 3)
    found = copies(lambda buffer, keys: jax.lax.scan(step, buffer, keys), buffer, keys)
    assert all(copy.conditional for copy in found)
    assert not isinstance(sampler, jaxbuf.Uniform) or not found


def test_the_check_sees_a_copy():
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)

    def both(buffer, key):
        batch = buffer.sample(key, 256)
        return buffer.add(items(64)), batch.data

    keys = jax.random.split(jax.random.key(0), 3)
    assert copies(lambda buffer, keys: jax.lax.scan(both, buffer, keys), buffer, keys)
