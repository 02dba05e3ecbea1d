"""Every buffer with every strategy, and everything that can be done with it.

For tests that put all of that through some transformation. An operation is a function of a buffer,
a sample from it, a number on which all its arguments depend, and a key; see ``OPERATIONS``.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxbuf
from jaxbuf.occupancy.subset import Subset

CAPACITY = 6
ENVS, LENGTH = 2, 6
ROWS, BATCH = 3, 4
GROUPS = 3

ITEM = {
    "obs": jnp.zeros(2),
    "action": jnp.int32(0),
    "reward": jnp.float32(0),
    "terminated": jnp.bool_(False),
}


def _items(**options):
    return functools.partial(jaxbuf.ItemBuffer.create, ITEM, CAPACITY, **options)


def _windows(**options):
    options = {"sequence_length": 2} | options
    return functools.partial(jaxbuf.TrajectoryBuffer.create, ITEM, ENVS, LENGTH, **options)


def _mixture(ratios=(1, 1)):
    return jaxbuf.Mixture.create(
        [_items()(), _items(sampler=jaxbuf.Prioritized(), freshness=_LIMITS)()], ratios
    )


_BLEND = jaxbuf.Blend((jaxbuf.RankBased(), jaxbuf.Staleness(), jaxbuf.Recent(0.5, 2)), (2, 1, 1))
_VARYING = jaxbuf.Blend(
    (
        jaxbuf.Prioritized(jaxbuf.Varying(0.5), uniform_mix=jaxbuf.Varying(0.1)),
        jaxbuf.Recent(jaxbuf.Varying(0.5), 2, jaxbuf.RankBased(jaxbuf.Varying(1.0))),
    ),
    jaxbuf.Varying((1.0, 2.0)),
)
_LIMITS = jaxbuf.Freshness(max_use=2, max_staleness=3)
_PLAIN = jaxbuf.Prioritized()
_DISTINCT = jaxbuf.Prioritized(replacement=False, uniform_mix=0.1)

# Functions without arguments that create an empty buffer.
BUFFERS = {
    "uniform": _items(),
    "uniform-distinct": _items(sampler=jaxbuf.Uniform(replacement=False)),
    "prioritized": _items(sampler=_PLAIN),
    "prioritized-mix": _items(sampler=jaxbuf.Prioritized(0.5, epsilon=0.1, uniform_mix=0.1)),
    "prioritized-distinct": _items(sampler=_DISTINCT),
    "softmax": _items(sampler=jaxbuf.Softmax()),
    "softmax-distinct": _items(sampler=jaxbuf.Softmax(replacement=False)),
    "softmax-fallback": _items(sampler=jaxbuf.Softmax(replacement=False, fallback=True)),
    "shuffled": _items(sampler=jaxbuf.Shuffled()),
    "shuffled-fresh-lowest": _items(
        sampler=jaxbuf.Shuffled(drop_last=True), freshness=_LIMITS, evictor=jaxbuf.Lowest()
    ),
    "ranked": _items(sampler=jaxbuf.RankBased()),
    "ranked-distinct": _items(sampler=jaxbuf.RankBased(sort_every=3, replacement=False)),
    "stale": _items(sampler=jaxbuf.Staleness()),
    "stale-distinct": _items(sampler=jaxbuf.Staleness(replacement=False)),
    "blend": _items(sampler=_BLEND),
    "recent": _items(sampler=jaxbuf.Recent(0.5, 2, _PLAIN)),
    "varying": _items(sampler=_VARYING),
    "reservoir": functools.partial(jaxbuf.reservoir, ITEM, CAPACITY, sampler=_PLAIN),
    "lowest": _items(evictor=jaxbuf.Lowest()),
    "lowest-softmax": _items(evictor=jaxbuf.Lowest(), sampler=jaxbuf.Softmax()),
    "lowest-ranked": _items(evictor=jaxbuf.Lowest(), sampler=jaxbuf.RankBased(by="score")),
    "diverse": _items(diversity=jaxbuf.Diversity(0.5, field="obs")),
    "diverse-greedy-lowest": _items(
        diversity=jaxbuf.Diversity(0.5, 2, within_batch="greedy", active="full"),
        evictor=jaxbuf.Lowest(),
    ),
    "diverse-best": _items(diversity=jaxbuf.Diversity(0.5, field="obs", keep="best")),
    "fresh": _items(freshness=_LIMITS),
    "fresh-prioritized": _items(freshness=_LIMITS, sampler=_PLAIN),
    "fresh-lowest-softmax": _items(
        freshness=_LIMITS, evictor=jaxbuf.Lowest(), sampler=jaxbuf.Softmax()
    ),
    "windows": _windows(),
    "windows-distinct": _windows(sampler=jaxbuf.Uniform(replacement=False)),
    "windows-prioritized": _windows(sampler=_PLAIN, period=2),
    "windows-prioritized-distinct": _windows(sampler=_DISTINCT),
    "windows-ranked": _windows(sampler=jaxbuf.RankBased(sort_every=2), period=2),
    "windows-stale": _windows(sampler=jaxbuf.Staleness()),
    "windows-blend": _windows(sampler=_BLEND),
    "windows-recent": _windows(sampler=jaxbuf.Recent(0.5, 2)),
    "windows-balanced": _windows(sampler=jaxbuf.Balanced()),
    "windows-balanced-distinct": _windows(sampler=jaxbuf.Balanced(replacement=False)),
    "windows-by-episode": _windows(
        sampler=jaxbuf.Balanced(by="episode"), episodes=jaxbuf.Episodes(boundary="avoid")
    ),
    "windows-shuffled": _windows(sampler=jaxbuf.Shuffled(drop_last=True)),
    "windows-fresh": _windows(freshness=_LIMITS, sampler=_PLAIN),
    "windows-episodes": _windows(episodes=jaxbuf.Episodes(boundary="mask", record_return=True)),
    "windows-lives": _windows(episodes=jaxbuf.Episodes(last="terminated", boundary="mask")),
    "removable": _items(parts=(jaxbuf.Removable(),), sampler=_PLAIN),
    "removable-lowest-softmax": _items(
        parts=(jaxbuf.Removable(),), evictor=jaxbuf.Lowest(), sampler=jaxbuf.Softmax()
    ),
    "windows-removable": _windows(parts=(jaxbuf.Removable(),), sampler=_PLAIN),
    "windows-avoid": _windows(episodes=jaxbuf.Episodes(boundary="avoid"), sampler=_PLAIN),
    "queue": functools.partial(jaxbuf.Queue.create, ITEM, CAPACITY),
    "mixture": _mixture,
    "mixture-varying": lambda: _mixture(jaxbuf.Varying((0.5, 0.5))),
}


def numbered(sampler, priorities, capacity=None):
    """A buffer that holds the row numbers of these priorities as its items."""
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), capacity or len(priorities), sampler=sampler)
    given = {"priority": jnp.asarray(priorities, jnp.float32)} if sampler.uses_priority else {}
    return jaxbuf.add(buffer, jnp.arange(len(priorities), dtype=jnp.int32), **given)


@functools.cache
def empty(name):
    """The buffer of this name without its arrays."""
    return jax.eval_shape(BUFFERS[name])


@functools.cache
def abstract(name):
    """The same, and a sample of it."""
    return empty(name), jax.eval_shape(draw, empty(name), jax.random.key(0))


def concrete(name, scale=1):
    """The buffer of this name with some items in it, but not full, and a sample of it."""
    return _filled(name, BUFFERS[name](), jnp.float32(scale), jax.random.key(0))


@functools.partial(jax.jit, static_argnames="name")
def _filled(name, buffer, scale, key):
    del name
    buffer = OPERATIONS["add"][1](buffer, None, scale, key)
    return buffer, draw(buffer, key)


def draw(buffer, key):
    if isinstance(buffer, jaxbuf.Queue):
        return buffer.take(BATCH)[1]
    return buffer.sample(key, BATCH)


def rows(scale, *leading):
    """Items whose numbers are proportional to ``scale``."""

    def ramp(leaf):
        shape = (*leading, *leaf.shape)
        numbers = jnp.arange(1, jnp.zeros(shape).size + 1, dtype=jnp.int32).reshape(shape)
        if leaf.dtype == jnp.float32:
            return numbers.astype(jnp.float32) * scale
        return numbers % 3 == 0 if leaf.dtype == jnp.bool_ else numbers % GROUPS

    return jax.tree.map(ramp, ITEM)


def able(ability):
    return lambda buffer: ability in buffer.abilities


is_windows, is_sampled = able("environments"), able("contents")
has_priorities, has_scores = able("priorities"), able("scores")
has_limits, has_episodes = able("freshness"), able("episodes")


def is_items(buffer):
    return isinstance(buffer, jaxbuf.ItemBuffer)


def is_single(buffer):
    return is_items(buffer) or is_windows(buffer)


def has_varying(buffer):
    return is_single(buffer) and bool(buffer.hyperparameters)


def has_order(buffer):
    if is_items(buffer):
        return isinstance(buffer.evictor, jaxbuf.Oldest)
    return is_windows(buffer)


def takes_out(buffer):
    """Returns whether some windows are taken out in between."""
    return isinstance(buffer.occupancy, Subset)


# What a sampler computes of items it computes of windows, and beside other parts as well.
REPEATED = {"fresh", "lowest-softmax", "lowest-ranked", "removable-lowest-softmax"}
REPEATED |= {f"windows-{name}" for name in ("distinct", "prioritized-distinct", "ranked", "stale")}
REPEATED |= {f"windows-{name}" for name in ("blend", "recent", "shuffled")}
DIFFERENT = [name for name in BUFFERS if name not in REPEATED]
# These differ from others in what they draw alone.
OTHER_DRAWS = {name for name in BUFFERS if name.endswith(("distinct", "fallback"))}
# For each operation: the buffers that have it, and the function itself.
OPERATIONS = {}
# Some call no method of samplers, and need not go through all of them: they are done with one
# buffer of each class, occupancy and part.
WITHOUT_SAMPLER = set()
ONE_OF_EACH = {
    "prioritized",
    "lowest",
    "diverse",
    "fresh-prioritized",
    "removable",
    "removable-lowest-softmax",
    "windows",
    "windows-prioritized",
    "windows-fresh",
    "windows-episodes",
    "windows-removable",
    "windows-avoid",
}


def operation(has=lambda buffer: True, *, asks_sampler=True):
    """Lists a function under its name."""

    def listed(function):
        OPERATIONS[function.__name__] = has, function
        if not asks_sampler:
            WITHOUT_SAMPLER.add(function.__name__)
        return function

    return listed


@operation()
def add(buffer, sample, scale, key):
    leading = (ENVS, ROWS) if is_windows(buffer) else (ROWS,)
    number = jnp.arange(1, ROWS + 1, dtype=jnp.float32) * scale
    given = {"mask": jnp.broadcast_to(number > 0, leading)}
    if has_priorities(buffer):
        given["priority"] = jnp.broadcast_to(number, leading)
    if has_scores(buffer):
        given["score"] = jnp.log(number)
    if has_limits(buffer):
        given["version"] = jnp.broadcast_to(number.astype(jnp.int32), leading)
    if isinstance(buffer, jaxbuf.Mixture):
        given["part"] = 1
    return buffer.add(rows(scale, *leading), **given)


@operation()
def add_plainly(buffer, sample, scale, key):
    leading = (ENVS,) if is_windows(buffer) else (ROWS,)
    given = {"score": scale * jnp.ones(ROWS)} if has_scores(buffer) else {}
    if isinstance(buffer, jaxbuf.Mixture):
        given["part"] = 0
    return buffer.add(rows(scale, *leading), **given)


@operation(is_windows, asks_sampler=False)
def add_to_some(buffer, sample, scale, key):
    ids = jnp.arange(ENVS, dtype=jnp.int32)[1:] * scale.astype(jnp.int32)
    return buffer.add(rows(scale, ENVS - 1, ROWS), env_ids=ids)


@operation(is_sampled)
def sample(buffer, sample, scale, key):
    return buffer.sample(key, BATCH, beta=scale)


def has_next_of_its_own(buffer):
    """Returns whether ``next_batch`` may do more than ``sample``."""
    # Uniform and Softmax stand for these, with which it does no more.
    others = jaxbuf.Prioritized, jaxbuf.RankBased, jaxbuf.Balanced
    return is_single(buffer) and not isinstance(buffer.sampler, others)


@operation(has_next_of_its_own)
def next_batch(buffer, sample, scale, key):
    return buffer.next_batch(key, BATCH, beta=scale, normalize="buffer")


@operation(lambda buffer: is_windows(buffer) and not takes_out(buffer), asks_sampler=False)
def sample_longer(buffer, sample, scale, key):
    return buffer.sample(key, BATCH, sequence_length=3)


@operation(lambda buffer: not is_sampled(buffer))
def take(buffer, sample, scale, key):
    return buffer.take(BATCH), buffer.accepts(ROWS), buffer.can_add(2)


@operation(has_order, asks_sampler=False)
def sample_range(buffer, sample, scale, key):
    return buffer.sample_range(key, BATCH, -3, None), buffer.latest(2)


@operation(lambda buffer: has_order(buffer) and has_priorities(buffer), asks_sampler=False)
def sample_range_by_priority(buffer, sample, scale, key):
    first, second = jax.random.split(key)
    return (
        buffer.sample_range(first, BATCH, 1, by_priority=True, replacement=False),
        buffer.sample_range(second, BATCH, 1, by_priority=True, replacement=True),
    )


@operation(has_priorities)
def update_priority(buffer, sample, scale, key):
    return buffer.update_priority(sample.slots, scale * jnp.ones(BATCH), mask=sample.valid)


@operation(is_sampled)
def importance_weights(buffer, sample, scale, key):
    return [
        jaxbuf.importance_weights(buffer, sample, scale, normalize)
        for normalize in ("batch", "buffer", "mean", None)
    ]


@operation()
def clear(buffer, sample, scale, key):
    return buffer.clear()


@operation(is_windows)
def clear_some(buffer, sample, scale, key):
    return buffer.clear(jnp.arange(ENVS, dtype=jnp.float32) < scale)


@operation()
def metrics(buffer, sample, scale, key):
    return buffer.metrics(), buffer.size, buffer.can_sample(2)


@operation(is_single, asks_sampler=False)
def set_field(buffer, sample, scale, key):
    axes = (BATCH, 2) if is_windows(buffer) else (BATCH,)
    mask = jnp.broadcast_to(sample.valid.reshape(BATCH, *[1] * (len(axes) - 1)), axes)
    return buffer.set_field("obs", sample.slots, scale * jnp.ones((*axes, 2)), mask=mask)


@operation(is_single, asks_sampler=False)
def map_field(buffer, sample, scale, key):
    return buffer.map_field("reward", lambda items: items["reward"] * scale, batch_size=4)


@operation(has_varying)
def set_hyperparameters(buffer, sample, scale, key):
    values = {"ratio": scale / (1 + scale), "uniform_mix": 1 / (1 + scale)}
    values["weights"] = jnp.stack([scale, jnp.float32(1)])
    return buffer.set_hyperparameters(values, **{"samplers[1].base.alpha": scale})


@operation(lambda buffer: isinstance(buffer, jaxbuf.Mixture) and bool(buffer.varying))
def set_ratios(buffer, sample, scale, key):
    return buffer.set_hyperparameters(ratios=jnp.stack([scale, jnp.float32(1)]))


@operation(has_varying)
def with_sampler(buffer, sample, scale, key):
    return buffer.with_sampler(jaxbuf.RankBased(jaxbuf.Varying(scale)))


@operation(is_items, asks_sampler=False)
def insert(buffer, sample, scale, key):
    number = jnp.arange(1, ROWS + 1, dtype=jnp.float32) * scale
    score = number if has_scores(buffer) else None
    return buffer.insert(rows(scale, ROWS), score=score, mask=number > 0)


@operation(lambda buffer: is_sampled(buffer) and bool(buffer.compares_by))
def highest(buffer, sample, scale, key):
    return buffer.highest(BATCH)


@operation(is_single)
def get(buffer, sample, scale, key):
    return buffer.get(sample.slots), buffer.holds(sample.slots)


@operation(has_scores)
def update_score(buffer, sample, scale, key):
    return buffer.update_score(sample.slots, scale * jnp.ones(BATCH), mask=sample.valid)


@operation(lambda buffer: is_single(buffer) and buffer.lets_remove)
def remove(buffer, sample, scale, key):
    return buffer.remove(sample.slots, mask=sample.valid & (scale > 0))


@operation(is_windows, asks_sampler=False)
def slots_at(buffer, sample, scale, key):
    return buffer.slots_at(jnp.arange(ENVS, dtype=jnp.int32), scale.astype(jnp.int32))


@operation(has_limits)
def mark_used(buffer, sample, scale, key):
    return buffer.mark_used(sample.slots, mask=sample.valid)


@operation(has_limits)
def set_version(buffer, sample, scale, key):
    version = scale.astype(jnp.int32) + 2
    return buffer.set_version(version), buffer.set_version(version, session=version)


@operation(has_limits)
def staleness(buffer, sample, scale, key):
    return buffer.staleness(sample.slots), buffer.use_count(sample.slots)


@operation(is_items, asks_sampler=False)
def sample_groups(buffer, sample, scale, key):
    given = {"num_groups": GROUPS, "size": 2, "group": "action"}
    ids = jnp.arange(2, dtype=jnp.int32)
    first, second = jax.random.split(key)
    return (
        jaxbuf.sample_groups(buffer, first, 2, **given),
        jaxbuf.sample_groups(buffer, second, ids, order="random", padding="random", **given),
    )


@operation(is_single, asks_sampler=False)
def statistics(buffer, sample, scale, key):
    priority = scale * jnp.ones(BATCH) if has_priorities(buffer) else None
    kept = jaxbuf.Statistics.create(buffer, 3)
    kept = kept.sampled(buffer, sample, priority=priority)
    return kept, kept.metrics(buffer), kept.next_period(buffer)


@operation(is_windows, asks_sampler=False)
def read(buffer, sample, scale, key):
    env, position = buffer.locate(sample.slots)
    return buffer.get_field("obs", env, position), buffer.gather_all()


@operation(is_windows, asks_sampler=False)
def steps_around(buffer, sample, scale, key):
    offsets = jnp.stack([-scale, scale]).astype(jnp.int32)
    return buffer.steps_around(sample.slots, range(-2, 3)), buffer.steps_around(
        sample.slots, offsets, "obs"
    )


@operation(is_windows, asks_sampler=False)
def dequeue(buffer, sample, scale, key):
    return buffer.dequeue(2, mask=jnp.arange(ENVS, dtype=jnp.float32) < scale)


@operation(has_episodes)
def look_up(buffer, sample, scale, key):
    slots = sample.slots
    found = buffer.episode(slots)
    masks = buffer.episode_index.episodes.boundary == "mask"
    return (found, buffer.episode_mask(slots)) if masks else found


@operation(
    lambda buffer: is_windows(buffer) and not has_episodes(buffer) and buffer.period == 1,
    asks_sampler=False,
)
def views(buffer, sample, scale, key):
    steps = sample.data
    return (
        jaxbuf.n_step(steps, 1, scale),
        jaxbuf.stack_frames(steps, 2),
        jaxbuf.terminal_states(steps, mask=steps["terminated"]),
        jaxbuf.hindsight(
            key,
            steps,
            steps["obs"],
            jnp.zeros(BATCH, jnp.int32),
            reward_fn=lambda achieved, goal: jnp.sum(jnp.abs(achieved - goal), -1),
            fraction=scale,
            achieved="obs",
            goal="obs",
        ),
    )


@functools.cache
def operations_of(name):
    """The operations to put through a test with the buffer of this name."""

    def is_asked(what):
        if what in WITHOUT_SAMPLER:
            return name in ONE_OF_EACH
        return name in DIFFERENT and (name not in OTHER_DRAWS or what in ("sample", "next_batch"))

    return [what for what, (has, _) in OPERATIONS.items() if has(empty(name)) and is_asked(what)]


CASES = [(name, what) for name in BUFFERS for what in operations_of(name)]


@functools.cache
def features(name, what):
    """The features of a buffer that an operation may meet: kind, sampler, occupancy and parts."""
    buffer = empty(name)
    found = {type(buffer)}
    if not is_single(buffer):
        return found
    found |= {type(buffer.occupancy), type(buffer.occupancy.places)}
    found |= {type(part) for part in buffer.extras}
    if what in ("add", "sample"):
        # Rows and draws may depend on the options of a part.
        found |= {("period", getattr(buffer, "period", 1)), *buffer.extras}
    if what in ("sample", "next_batch"):
        found.add(buffer.sampler)
    elif what not in WITHOUT_SAMPLER:
        for sampler in (buffer.sampler, *buffer.sampler.leaf_samplers):
            found.add((type(sampler), getattr(sampler, "replacement", None)))
    return found


def quick(cases, chosen):
    """Parameters of a test, of which ``make test`` runs the chosen ones alone."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in chosen else pytest.mark.slow,
        )
        for case in cases
    ]


def pairs(cases):
    """Parameters of a test: cases that begin with the names of a buffer and of an operation.

    Cases that are left out by default have each operation with each feature in common with others;
    ``make test-all`` runs them as well.
    """
    has = {case: {(*case[1:], f) for f in features(*case[:2])} for case in cases}
    left, chosen = set().union(*has.values()), set()
    while left:
        best = max(cases, key=lambda case: len(has[case] & left))
        chosen.add(best)
        left -= has[best]
    return quick(cases, chosen)
