"""Compiled steps: none of them may copy anything as large as a buffer."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from jaxbuf import testing
from jaxbuf.core import native
from jaxbuf.core.order import after
from jaxbuf.core.segment_tree import WIDE, using_width
from jaxbuf.testing import hlo
from tests import operations

CAPACITY = 2**14
EXAMPLE = {"obs": jnp.zeros(7), "reward": jnp.float32(0), "frame": jnp.zeros((8, 9, 2), bool)}
PRIORITIZED = jaxbuf.Prioritized()


def items(rows):
    return jax.tree.map(lambda leaf: jnp.ones((rows, *leaf.shape), leaf.dtype), EXAMPLE)


def assert_no_copy(step, buffer, keys):
    """In a loop no array with a number of each slot is copied."""

    def loop(buffer, keys):
        return jax.lax.scan(step, buffer, keys)

    testing.assert_no_copy(loop, buffer, keys, smallest=CAPACITY)


def cycle(rows, batch_size, normalize):
    def step(buffer, key):
        buffer = buffer.add(items(rows))
        batch = buffer.sample(key, batch_size)
        weights = jaxbuf.importance_weights(buffer, batch, 0.4, normalize)
        td_error = batch.data["reward"] - batch.data["obs"].mean(-1)
        return buffer.update_priority(batch.slots, jnp.abs(td_error)), jnp.sum(weights * td_error)

    return step


KEYS = jax.random.split(jax.random.key(0), 3)


@pytest.mark.parametrize(
    ("rows", "batch_size", "normalize"),
    [(1, 1, "buffer"), pytest.param(2048, 4096, "batch", marks=pytest.mark.slow)],
)
def test_a_scanned_cycle_copies_nothing(rows, batch_size, normalize):
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)
    assert_no_copy(cycle(rows, batch_size, normalize), buffer, KEYS)


WIDE_ROW = jnp.zeros(17)
FRESH = jaxbuf.Freshness(max_use=4, max_staleness=100)
RECENT = jaxbuf.Recent(0.25, 100, PRIORITIZED)


def wide_items(**options):
    return jaxbuf.ItemBuffer.create(WIDE_ROW, CAPACITY, **options)


def wide_windows(sequence_length=1, **options):
    return jaxbuf.TrajectoryBuffer.create(
        WIDE_ROW, 8, CAPACITY // 8, sequence_length=sequence_length, **options
    )


CYCLES = {
    "uniform": wide_items,
    "mix": lambda: wide_items(sampler=jaxbuf.Prioritized(uniform_mix=0.1)),
    "recent": lambda: wide_items(sampler=RECENT),
    "recent-fresh": lambda: wide_items(sampler=RECENT, freshness=FRESH),
    "reservoir": lambda: jaxbuf.reservoir(WIDE_ROW, CAPACITY),
    "windows": lambda: wide_windows(2),
    "windows-prioritized": lambda: wide_windows(3, sampler=PRIORITIZED),
    "windows-recent-fresh": lambda: wide_windows(2, sampler=RECENT, freshness=FRESH),
    "mixture": lambda: jaxbuf.Mixture.create(
        [wide_items(sampler=PRIORITIZED), wide_items(sampler=PRIORITIZED)], [1, 1]
    ),
}


@pytest.mark.parametrize("name", operations.quick(CYCLES, {"windows-prioritized", "mixture"}))
def test_nor_does_one_with_all_that_a_buffer_is_able_to_do(name):
    buffer = CYCLES[name]()
    part = {"part": 1} if name == "mixture" else {}

    def step(buffer, inputs):
        key, version = inputs
        if "fresh" in name:
            buffer = buffer.set_version(version)
        buffer = buffer.add(jnp.ones((8, 17)), mask=jax.random.bernoulli(key, 0.5, (8,)), **part)
        batch = buffer.sample(key, 32)
        weights = jaxbuf.importance_weights(buffer, batch, 0.4)
        error = weights * batch.data.reshape(32, -1).sum(1)
        if "fresh" in name:
            buffer = buffer.mark_used(batch.slots)
        if "priorities" in buffer.abilities:
            buffer = buffer.update_priority(batch.slots, error)
        return buffer, jnp.sum(error)

    inputs = KEYS, jnp.arange(3, dtype=jnp.int32)
    loop = jax.jit(lambda *args: jax.lax.scan(step, *args), donate_argnums=0)
    program = loop.lower(buffer, inputs).compile()
    found = hlo.copies(program.as_text(), CAPACITY)
    assert [copy for copy in found if max(copy.shape) >= CAPACITY] == []
    assert program.memory_analysis().temp_size_in_bytes < CAPACITY * WIDE_ROW.nbytes / 2


def test_a_cycle_over_seeds_copies_nothing():
    empty = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)
    buffers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), empty)
    keys = jax.random.split(jax.random.key(0), (5, 3))
    step = jax.vmap(cycle(4, 32, "batch"))
    assert_no_copy(step, buffers, keys)


def test_updates_that_ignore_the_probabilities_copy_nothing():
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)

    def step(buffer, key):
        batch = buffer.sample(key, 256)
        return buffer.update_priority(batch.slots, jnp.ones(256)), batch.probability

    assert_no_copy(step, buffer, KEYS)


@pytest.mark.parametrize(
    "dtype",
    operations.quick([bool, jnp.int8, jnp.uint32, jnp.float32, jnp.bfloat16], {bool, jnp.float32}),
)
def test_what_comes_after_a_read_does_not_copy(dtype):
    """Without saying so, the read may come after the write, for which the old array is kept."""

    def step(numbers, key, *, says):
        index = jax.random.randint(key, (8,), 0, CAPACITY)
        read = numbers[index]
        index = after(index, read) if says else index
        return numbers.at[index].set(numbers.dtype.type(1)), read

    numbers = jnp.zeros(4 * CAPACITY, dtype)
    assert_no_copy(functools.partial(step, says=True), numbers, KEYS)
    with pytest.raises(AssertionError, match="copies what it could update in place"):
        assert_no_copy(functools.partial(step, says=False), numbers, KEYS)


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1])
def test_what_comes_after_a_read_is_the_same(value):
    bits = jnp.full(3, value, jnp.uint32)
    floats = jax.lax.bitcast_convert_type(bits, jnp.float32)
    have = after(jnp.arange(3), bits, floats, bits[0] > 0, floats[:2])
    assert have.tolist() == [0, 1, 2]


@pytest.mark.parametrize("native_on", operations.quick([True, False], {True}))
def test_no_score_is_read_before_all_masses_are_computed_anew(native_on):
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(7), CAPACITY, sampler=jaxbuf.Softmax())
    with native.using_native(native_on):
        add = jax.jit(lambda b, rows, score: b.add(rows, score=score), donate_argnums=0)
        text = add.lower(buffer, jnp.zeros((8, 7)), jnp.zeros(8)).compile().as_text()
    # They are in a loop that rarely runs, so nothing has a number of each slot but what is stored.
    begin = text[text.index("ENTRY") :]
    assert not re.findall(rf"= \w+\[{CAPACITY}\]\S* (?:fusion|copy)\(.*", begin)


def test_time_does_not_grow_with_the_buffer():
    """A copy of the larger one alone would take a hundred times as long."""
    seconds, rows = [], items(32)
    for capacity in (2**12, 2**19):
        buffer = jaxbuf.ItemBuffer.create(EXAMPLE, capacity, sampler=PRIORITIZED)
        times = []
        for _ in range(30):
            begin = time.perf_counter()
            buffer = jaxbuf.add(buffer, rows)
            batch = jaxbuf.sample(buffer, KEYS[0], 32)
            buffer = jaxbuf.update_priority(buffer, batch.slots, batch.probability)
            jax.block_until_ready(buffer)
            times.append(time.perf_counter() - begin)
        seconds.append(min(times))
    assert seconds[1] < 10 * seconds[0]


def waits(function, *args):
    """Loops and branches of a program that depend on its numbers, and how many scatters it has."""
    with native.using_native(False):
        program = jax.make_jaxpr(function)(*args)
    names = [equation.primitive.name for equation in equations(program.jaxpr)]
    return sum(name in ("while", "cond") for name in names), names.count("scatter")


def equations(jaxpr):
    """The equations of a program for accelerators, those of its loops and functions included."""
    for equation in jaxpr.eqns:
        platforms = equation.params.get("branches_platforms")
        if platforms is not None:
            # A choice that is made when the program is compiled.
            yield from equations(equation.params["branches"][platforms.index(None)].jaxpr)
            continue
        yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


# Draws without replacement go in rounds, until there are enough, and a ranking loops over rows.
@pytest.mark.parametrize("name", ["uniform", "prioritized", "mix", "windows-prioritized"])
def test_accelerators_are_never_waited_for(name):
    """Of a loop or branch that depends on its numbers the host has to be told how it goes on."""
    buffer = wide_items(sampler=PRIORITIZED) if name == "prioritized" else CYCLES[name]()
    programs = [waits(lambda b, rows: b.add(rows), buffer, jnp.ones((8, 17)))]
    programs.append(waits(lambda b, key: b.sample(key, 256), buffer, KEYS[0]))
    if name != "uniform":
        programs.append(update_of(buffer))
    assert all(loops == 0 for loops, _ in programs)


def update_of(buffer):
    slots = jax.eval_shape(lambda buffer: buffer.sample(KEYS[0], 256), buffer).slots
    return waits(lambda b, *rows: b.update_priority(*rows), buffer, slots, jnp.ones(256))


def test_an_update_writes_once_for_each_large_level():
    # The leaves by two writes; levels above at most 2**20 leaves are computed as a whole.
    def scatters(capacity):
        create = functools.partial(jaxbuf.ItemBuffer.create, EXAMPLE, capacity, sampler=PRIORITIZED)
        return update_of(jax.eval_shape(create))[1]

    # A wide tree has an array for each of three reductions, and one of counts.
    with using_width(WIDE):
        assert [scatters(2**bits) - scatters(2**12) for bits in (20, 24, 28)] == [0, 4, 8]


DISTINCT = [
    jaxbuf.Uniform(replacement=False),
    jaxbuf.Prioritized(replacement=False),
    jaxbuf.Softmax(replacement=False),
    jaxbuf.RankBased(replacement=False),
    jaxbuf.Blend((jaxbuf.RankBased(replacement=False), jaxbuf.Uniform()), (0.5, 0.5)),
]


@pytest.mark.parametrize(
    "sampler", operations.quick(DISTINCT, DISTINCT[:2]), ids=lambda sampler: type(sampler).__name__
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

    loop = lambda buffer, keys: jax.lax.scan(step, buffer, keys)  # noqa: E731
    compiled = jax.jit(loop, donate_argnums=0).lower(buffer, KEYS).compile()
    found = hlo.copies(compiled.as_text(), 4 * CAPACITY)
    found = [copy for copy in found if max(copy.shape) >= CAPACITY]
    assert all(copy.conditional for copy in found)
    assert not isinstance(sampler, jaxbuf.Uniform) or not found


def test_the_check_sees_a_copy():
    buffer = jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=PRIORITIZED)

    def both(buffer, key):
        batch = buffer.sample(key, 256)
        return buffer.add(items(64)), batch.data

    with pytest.raises(AssertionError, match=r"buffer\.data\['obs'\] .* in each step of a loop"):
        assert_no_copy(both, buffer, KEYS)


ENDS = {"terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}
CHANGED = {**EXAMPLE, **ENDS, "hidden": jnp.zeros(5)}
REMOVABLE = (jaxbuf.Removable(),)
CHANGES = {
    "items": lambda: jaxbuf.ItemBuffer.create(CHANGED, CAPACITY, sampler=PRIORITIZED),
    "removable": lambda: jaxbuf.ItemBuffer.create(
        CHANGED, CAPACITY, sampler=PRIORITIZED, parts=REMOVABLE
    ),
    "scored": lambda: jaxbuf.ItemBuffer.create(
        CHANGED,
        CAPACITY,
        sampler=jaxbuf.Softmax(),
        evictor=jaxbuf.Lowest(),
        diversity=jaxbuf.Diversity(0.5, field="hidden"),
        parts=REMOVABLE,
    ),
    "windows": lambda: jaxbuf.TrajectoryBuffer.create(
        CHANGED,
        8,
        CAPACITY // 8,
        sequence_length=4,
        sampler=PRIORITIZED,
        parts=REMOVABLE,
        episodes=jaxbuf.Episodes(boundary="avoid", record_return=True),
    ),
}


def change(name, buffer, key):
    """Draws a batch and changes it, or what is stored of all items."""
    if name == "map_field":
        return buffer.map_field("reward", lambda items: items["hidden"][:, 0], batch_size=256)
    if name == "insert":
        rows = jax.tree.map(lambda leaf: jnp.ones((32, *leaf.shape), leaf.dtype), CHANGED)
        score = jnp.arange(32.0) if buffer.evictor.uses_score else None
        return buffer.insert(rows, score=score)[0]
    if name == "dequeue":
        return buffer.dequeue(2)[0]
    batch = buffer.sample(key, 32)
    if name == "update_score":
        return buffer.update_score(batch.slots, batch.probability)
    if name == "remove":
        return buffer.remove(batch.slots)
    return buffer.set_field("hidden", batch.slots, batch.data["hidden"] + 1.0)


CHANGE_CASES = [
    *(("items", name) for name in ("set_field", "map_field", "insert")),
    ("removable", "remove"),
    *(("scored", name) for name in ("set_field", "map_field", "insert", "update_score", "remove")),
    *(("windows", name) for name in ("set_field", "map_field", "remove", "dequeue")),
]


WITH_KERNELS = [(*case, True) for case in CHANGE_CASES]


@pytest.mark.parametrize(
    ("kind", "name", "native_on"),
    operations.quick(
        # No kernel maps, and the others remove as well.
        WITH_KERNELS
        + [
            (*case, False)
            for case in CHANGE_CASES
            if case[0] != "removable" and case[1] != "map_field"
        ],
        [*WITH_KERNELS[::2], ("scored", "update_score", True), ("items", "set_field", False)],
    ),
)
def test_changes_copy_nothing(kind, name, native_on):
    # `tests/buffers/test_doors.py` has them without a loop.
    buffer = jax.eval_shape(CHANGES[kind])

    def step(buffer, key):
        return change(name, buffer, key), ()

    with native.using_native(native_on):
        assert_no_copy(step, buffer, KEYS)


def test_a_mapped_field_is_one_pass():
    """In the loop over all items nothing branches, and nothing is searched for."""
    buffer = CHANGES["items"]()

    def mapped(buffer):
        return buffer.map_field("reward", lambda items: 2 * items["reward"], batch_size=256)

    loops = [
        e for e in equations(jax.make_jaxpr(mapped)(buffer).jaxpr) if e.primitive.name == "scan"
    ]
    assert [loop.params["length"] for loop in loops] == [CAPACITY // 256]
    names = {e.primitive.name for e in equations(loops[0].params["jaxpr"].jaxpr)}
    assert "dynamic_update_slice" in names
    assert not any(name.startswith(("cond", "while", "reduce", "arg")) for name in names)
