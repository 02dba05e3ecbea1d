"""Each operation that is declared for all buffers, in each wrapper.

It does what it does in the buffers inside, each with its own rows, or says what to use instead.
"""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf.buffers.slotted import SlottedBuffer
from jaxbuf.strategies import Draw
from tests.operations import quick

ENVS, LENGTH, ROWS = 2, 8, 8
FLAGS = {"terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}
STEP = {"x": jnp.float32(0), **FLAGS}
# Windows have one step here, and items are like windows.
ITEM = jax.tree.map(lambda leaf: leaf[None], STEP)
KEY = jax.random.key(0)

DECLARED = {
    name: member.operation
    for name, member in vars(SlottedBuffer).items()
    if hasattr(member, "operation")
}


def mesh(kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((1,), ("d",), axis_types=(kind,))


def steps(envs, rows=5, first=0):
    number = first + jnp.arange(envs * rows, dtype=jnp.float32).reshape(envs, rows)
    return {"x": number, "terminated": number % 4 == 3, "truncated": number < 0}


def rings():
    return jaxbuf.TrajectoryBuffer.create(
        STEP,
        ENVS,
        LENGTH,
        sampler=jaxbuf.Prioritized(),
        episodes=jaxbuf.Episodes(boundary="mask"),
        freshness=jaxbuf.Freshness(max_use=3, max_staleness=2),
        parts=(jaxbuf.Removable(),),
    )


def items():
    return jaxbuf.ItemBuffer.create(ITEM, 8, sampler=jaxbuf.Softmax(), parts=(jaxbuf.Removable(),))


def flat(rows, first=0):
    return jax.tree.map(lambda leaf: leaf[0, :, None], steps(1, rows, first))


def scores(rows):
    return jnp.arange(rows, dtype=jnp.float32)


def a_mixture():
    parts = [rings().add(steps(ENVS)), items().add(flat(6, 100), score=scores(6))]
    parts.append(rings().add(steps(ENVS, first=50)))
    return jaxbuf.Mixture.create(parts, [2, 1, 1])


def a_sharded(make, kind=jax.sharding.AxisType.Auto):
    return jaxbuf.Sharded.create(make, mesh(kind), "d", shards=2)


# Wrappers with something in them, of rings and of items.
WRAPPERS = {
    "mixture": (a_mixture, a_mixture),
    "sharded": (
        lambda: a_sharded(rings).add(steps(2 * ENVS)),
        lambda: a_sharded(items).add(flat(12), score=scores(12)),
    ),
    "hosted": (
        lambda: jaxbuf.Hosted.create(rings).add(steps(ENVS)),
        lambda: jaxbuf.Hosted.create(items).add(flat(6), score=scores(6)),
    ),
}
LACKS = {
    "mixture": {"latest", "sample_range", "gather", "gather_all", "dequeue"},
    "sharded": {"latest", "sample_range", "gather", "gather_all", "dequeue", "next_batch"}
    | {"locate", "get_field", "episode"},
}
# Rings have neither.
OF_ITEMS = {"insert", "update_score"}


def arguments(name, buffer, slots):
    """Arguments of an operation, by position and by name."""
    mask = jnp.arange(ROWS, dtype=jnp.int32) % 4 != 1
    number = jnp.arange(1, ROWS + 1, dtype=jnp.float32)
    envs, positions = jnp.arange(4, dtype=jnp.int32) % ENVS, jnp.arange(4, dtype=jnp.uint32)
    part = {"part": 1} if isinstance(buffer, jaxbuf.Mixture) else {}
    batch = jnp.arange(4, dtype=jnp.int32)
    of_items = {"score": scores(4)}
    return {
        "add": ((flat(4),), of_items | part) if part else ((steps(buffer.num_envs),), {}),
        "insert": ((flat(4),), of_items | part),
        "sample": ((KEY, ROWS), {"beta": 0.5, "normalize": None}),
        "next_batch": ((KEY, ROWS), {"beta": 0.5, "normalize": "mean", "within": "part"}),
        "update_priority": ((slots, number), {"mask": mask}),
        "set_field": (("x", slots, number[:, None]), {"mask": mask}),
        "map_field": (("x", negative), {"batch_size": 4}),
        "update_score": ((slots, number), {"mask": mask}),
        "remove": ((slots,), {"mask": mask}),
        "mark_used": ((slots,), {"mask": mask}),
        "set_version": ((2,), {"session": None}),
        "set_hyperparameters": (({},), part),
        "with_sampler": ((jaxbuf.Uniform(),), part),
        "latest": ((2,), {}),
        "highest": ((2,), {}),
        "sample_range": ((KEY, 4, -2), {}),
        "gather": ((Draw(batch, jnp.ones(4), batch >= 0),), {}),
        "dequeue": ((2,), {}),
        "slots_at": ((envs, positions), {}),
        "get_field": (("x", envs, positions), {}),
        "steps_around": ((slots, jnp.array([-9, 0, 2, 1])), {}),
    }.get(name, ((slots,), {}) if DECLARED[name].takes_slots or name == "episode" else ((), {}))


def negative(steps):
    return -steps["x"]


@functools.cache
def filled(kind, of_items):
    """A wrapper, and slots of it in reverse: valid, stale, repeated and invalid ones."""
    buffer = WRAPPERS[kind][of_items]()
    slots = buffer.sample(KEY, ROWS).slots
    index, generation = (np.flip(np.array(x)) for x in (slots.index, slots.generation))
    index[3], generation[3] = index[2], generation[2]
    generation[5] -= 1
    index[6] = buffer.capacity
    return buffer, jaxbuf.Slots(jnp.asarray(index), jnp.asarray(generation))


def call(buffer, name, args, options):
    """The method, or the function, which keeps the buffer."""
    door = getattr(jaxbuf, name, None)
    if door is None:
        return getattr(buffer, name)(*args, **options)
    keep = {"donate": False} if "donate" in inspect.signature(door).parameters else {}
    return door(buffer, *args, **options, **keep)


def check_kind(out, buffer, name):
    """A change returns another buffer of the kind, and the operation has a docstring."""
    first = out[0] if isinstance(out, tuple) else out
    assert (type(first) is type(buffer)) == DECLARED[name].changes
    assert inspect.getdoc(getattr(type(buffer), name))


ROUTED = [
    name
    for name, operation in DECLARED.items()
    if operation.takes_slots and name not in ("get", "locate")
]


# What is routed is called below.
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in ("mixture", "sharded")
        for name in DECLARED
        if name not in ROUTED or name in LACKS[kind]
        # Some parts have only scores here, and the others only priorities.
        if (kind, name) != ("mixture", "highest")
    ],
)
def test_a_wrapper_has_it_or_says_what_to_use(kind, name):
    buffer, slots = filled(kind, name in OF_ITEMS)
    args, options = arguments(name, buffer, slots)
    if name in LACKS[kind]:
        with pytest.raises(ValueError, match=rf"^{name} was called, but a \w+ has none; .+"):
            call(buffer, name, args, options)
    else:
        out = jax.eval_shape(lambda buffer: call(buffer, name, args, options), buffer)
        check_kind(out, buffer, name)


@pytest.mark.parametrize("name", quick(DECLARED, [*DECLARED][::2]))
def test_a_hosted_buffer_does_what_the_buffer_does(name):
    hosted, slots = filled("hosted", name in OF_ITEMS)
    plain = hosted.buffer
    args, options = arguments(name, hosted, slots)
    expected = getattr(plain, name)(*args, **options)
    got = call(hosted, name, args, options)
    check_kind(got, hosted, name)
    inner = jax.tree.map(
        lambda x: x.buffer if isinstance(x, jaxbuf.Hosted) else x,
        got,
        is_leaf=lambda x: isinstance(x, jaxbuf.Hosted),
    )
    chex.assert_trees_all_close(inner, expected, rtol=1e-6)


def members(buffer):
    if isinstance(buffer, jaxbuf.Mixture):
        return buffer.parts
    return [
        jax.tree.map(lambda leaf, i=i: leaf[i], buffer.shards) for i in range(buffer.num_shards)
    ]


def row_of(tree, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), tree)


def expected_of(buffer, name, slots, args, options):
    """Each member after the operation, and the result of each row, found member by member."""
    changed, rows, first = [], {}, 0
    for member in members(buffer):
        index = np.asarray(slots.index) - first
        here = (index >= 0) & (index < member.capacity)
        own = jaxbuf.Slots(jnp.asarray(np.where(here, index, member.capacity)), slots.generation)
        own_args = [own if arg is slots else arg for arg in args]
        first += member.capacity
        if DECLARED[name].needs in member.abilities:
            out = getattr(member, name)(*own_args, **options)
            if not DECLARED[name].changes:
                rows |= {int(i): row_of(out, i) for i in np.flatnonzero(here)}
            changed.append(out)
        else:
            changed.append(member)
    return changed, rows


OF_ALL_ITEMS = "map_field", "set_version"


BY_ROWS = [(kind, name) for name in (*ROUTED, *OF_ALL_ITEMS) for kind in ("mixture", "sharded")]


# Every other operation of each kind.
@pytest.mark.parametrize(("kind", "name"), quick(BY_ROWS, {*BY_ROWS[::4], *BY_ROWS[3::4]}))
def test_each_row_goes_to_the_buffer_that_it_comes_from(kind, name):
    buffer, slots = filled(kind, name in OF_ITEMS)
    args, options = arguments(name, buffer, slots)
    expected, rows = expected_of(buffer, name, slots, args, options)
    eager = call(buffer, name, args, options)
    check_kind(eager, buffer, name)
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), buffer)
    mapped = jax.jit(jax.vmap(lambda buffer: getattr(buffer, name)(*args, **options)))(twice)
    mapped = jax.tree.map(lambda leaf: leaf[1], mapped)
    for out in (eager, mapped):
        if DECLARED[name].changes:
            for got, member in zip(members(out), expected, strict=True):
                chex.assert_trees_all_close(got, member, rtol=1e-6)
        else:
            chex.assert_trees_all_equal({i: row_of(out, i) for i in rows}, rows)


@pytest.mark.parametrize("name", quick(ROUTED, ROUTED[::2]))
def test_shards_do_it_inside_shard_map_and_on_explicit_axes(name):
    buffer, slots = filled("sharded", name in OF_ITEMS)
    args, options = arguments(name, buffer, slots)
    expected = call(buffer, name, args, options)

    def inside(buffer, args, options):
        args = [static.get(i, arg) for i, arg in enumerate(args)]
        return getattr(buffer, name)(*args, **options)

    static = {i: arg for i, arg in enumerate(args) if isinstance(arg, str)}
    args = [0 if i in static else arg for i, arg in enumerate(args)]
    spec = jax.P("d")
    specs = (spec, [jax.P() if i in static else spec for i in range(len(args))], spec)
    mapped = jax.jit(jax.shard_map(inside, mesh=mesh(), in_specs=specs, out_specs=spec))(
        buffer, args, options
    )
    chex.assert_trees_all_close(mapped, expected, rtol=1e-6)
    explicit = mesh(jax.sharding.AxisType.Explicit)
    placed = jax.tree.map(np.asarray, (buffer, args, options))
    moved = jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.NamedSharding(explicit, jax.P())), placed
    )
    held = moved[0].replace(mesh=explicit)
    with jax.set_mesh(explicit):
        out = jax.jit(inside)(held, moved[1], moved[2])
    chex.assert_trees_all_close(jax.tree.leaves(out), jax.tree.leaves(expected), rtol=1e-6)
