"""Statistics against a twin that keeps lists."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from jaxbuf import testing

WINDOW, CAPACITY, ROWS, BATCH = 4, 8, 3, 5


class Naive:
    """The last samples as lists of rows, and the counts of a period."""

    def __init__(self):
        self.samples, self.pushed, self.drawn, self.size, self.gone = [], 0, 0, 0, []
        self.uses = {}
        self.time = 0

    def sampled(self, use, staleness, priority):
        if len(use):
            self.time += 1
            self.samples = [*self.samples, (use, staleness, priority)][-WINDOW:]
        self.drawn += len(use)

    def came(self, items):
        """Items, named by a number each of its own."""
        self.pushed += len(items)
        self.uses |= dict.fromkeys(items, 0)

    def marked(self, drawn):
        for item in drawn:
            self.uses[item] += 1

    def left(self, live):
        """All but the live ones."""
        for item in set(self.uses) - set(live):
            self.gone.append(self.uses.pop(item))

    def metrics(self, size):
        metrics = {"pushed": self.pushed, "sampled": self.drawn, "current": size}
        metrics["samples"] = self.time
        metrics["removed"] = self.size + self.pushed - size
        assert metrics["removed"] == len(self.gone)
        metrics["reuse_mean"] = np.mean(self.gone) if self.gone else 0
        for i, name in enumerate(("use", "staleness", "priority")):
            rows = [sample[i] for sample in self.samples]
            metrics[f"{name}_mean"] = np.mean([r.mean() for r in rows]) if rows else 0
            metrics[f"{name}_max"] = max((r.max() for r in rows), default=0)
            if name == "priority":
                metrics["priority_min"] = min((r.min() for r in rows), default=0)
        return metrics


def step(carry, inputs):
    """One of everything; also what a twin has to know."""
    buffer, statistics = carry
    key, mask, version, priority, names = inputs
    buffer = buffer.add(names, mask=mask)
    buffer = buffer.set_version(version)
    batch = buffer.sample(key, BATCH)
    seen = buffer.use_count(batch.slots), buffer.staleness(batch.slots), batch.valid, priority
    statistics = statistics.sampled(buffer, batch, priority=priority)
    buffer = buffer.mark_used(batch.slots).update_priority(batch.slots, priority)
    live = buffer.occupancy.live(jnp.arange(CAPACITY))
    named = batch.data, buffer.data, live
    return (buffer, statistics), (seen, named, statistics.metrics(buffer))


def inputs(steps, seed=0):
    random = np.random.default_rng(seed)
    return (
        jax.random.split(jax.random.key(seed), steps),
        jnp.asarray(random.random((steps, ROWS)) < 0.4),
        jnp.asarray(np.cumsum(random.integers(0, 3, steps)), jnp.int32),
        jnp.asarray(random.random((steps, BATCH)), jnp.float32),
        jnp.arange(steps * ROWS, dtype=jnp.float32).reshape(steps, ROWS),
    )


def start(capacity=CAPACITY):
    limits = jaxbuf.Freshness(max_use=3, max_staleness=4)
    buffer = jaxbuf.ItemBuffer.create(
        jnp.float32(0), capacity, sampler=jaxbuf.Prioritized(), freshness=limits
    )
    return buffer, jaxbuf.Statistics.create(buffer, window=WINDOW)


def test_as_lists_would_have_it():
    run, naive, carry = jax.jit(step), Naive(), start()
    _, masks, _, _, names = inputs(40)
    refused = 0
    for i, given in enumerate(zip(*inputs(40), strict=True)):
        carry, (seen, (drawn, data, live), metrics) = run(carry, given)
        use, staleness, valid, priority = seen
        valid = np.asarray(valid)
        naive.came(np.asarray(names[i])[masks[i]].tolist())
        naive.marked(np.asarray(drawn)[valid].tolist())
        naive.left(np.asarray(data)[np.asarray(live)].tolist())
        naive.sampled(*(np.asarray(x)[valid] for x in (use, staleness, priority)))
        refused += not valid.any()
        expected = naive.metrics(int(carry[0].size))
        assert set(metrics) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
        if i % 9 == 8:
            buffer, statistics = carry
            carry = buffer, statistics.next_period(buffer)
            naive.pushed, naive.drawn, naive.size = 0, 0, int(buffer.size)
            naive.gone = []
    assert 0 < refused < 20


def test_trajectories_and_counters_that_wrap():
    buffer = jaxbuf.TrajectoryBuffer.create(jnp.float32(0), num_envs=2, length=4)
    buffer = buffer.replace(counters=jnp.array([2**32 - 3, 0], jnp.uint32))
    statistics = jaxbuf.Statistics.create(buffer)
    buffer = buffer.add(jnp.zeros((2, 3))).add(jnp.zeros((2, 3)))
    batch = buffer.sample(jax.random.key(0), 6)
    statistics = statistics.sampled(buffer, batch)
    chex.assert_shape(batch.data, (6, 1))
    metrics = {name: int(value) for name, value in statistics.metrics(buffer).items()}
    assert metrics == {"pushed": 12, "sampled": 6, "removed": 4, "current": 8, "samples": 1}
    cleared = statistics.next_period(buffer).metrics(buffer.clear())
    assert (int(cleared["pushed"]), int(cleared["removed"])) == (0, 8)


def test_the_time_of_a_read_out_wraps_with_its_record():
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=jaxbuf.Prioritized())
    buffer = buffer.add(jnp.zeros(4))
    statistics = jaxbuf.Statistics.create(buffer, window=3)
    # Three times this is the largest number of 32 bits.
    last = 3 * 1431655765 - 2
    statistics = statistics.replace(counters=statistics.counters.at[0].set(np.uint32(last)))
    record, batch = jax.jit(jaxbuf.Statistics.sampled), buffer.sample(jax.random.key(0), 2)
    for value, (time, newest) in enumerate([(last + 1, [1]), (0, [1, 2]), (1, [1, 2, 3])], 1):
        statistics = record(statistics, buffer, batch, priority=jnp.full(2, value, jnp.float32))
        metrics = statistics.metrics(buffer)
        assert int(metrics["samples"]) == time
        assert float(metrics["priority_mean"]) == pytest.approx(np.mean(newest))
    statistics = record(statistics, buffer, batch, priority=jnp.full(2, 4.0))
    assert float(statistics.metrics(buffer)["priority_mean"]) == pytest.approx(3.0)


def test_a_queue():
    queue = jaxbuf.Queue.create(jnp.float32(0), 4).add(jnp.zeros(1))
    statistics = jaxbuf.Statistics.create(queue)
    queue, batch = queue.add(jnp.zeros(2)).take(4)
    statistics = statistics.sampled(queue, batch)
    metrics = {name: int(value) for name, value in statistics.metrics(queue).items()}
    assert metrics == {"pushed": 2, "sampled": 3, "removed": 3, "current": 0, "samples": 1}
    assert int(statistics.next_period(queue).metrics(queue)["removed"]) == 0
    with pytest.raises(ValueError, match="priority was given, but a Queue has no priorities"):
        statistics.sampled(queue, batch, priority=jnp.ones(4))


@pytest.mark.slow
def test_one_part_of_a_mixture():
    """Its statistics are those of sampling that part alone, for the rows that it gave."""
    freshness = jaxbuf.Freshness(max_staleness=9)
    parts = [
        jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=sampler, freshness=freshness)
        for sampler in (jaxbuf.Uniform(), jaxbuf.Prioritized())
    ]
    mixture = jaxbuf.Mixture.create([part.add(jnp.zeros(4)) for part in parts], [1, 1])
    statistics = jaxbuf.Statistics.create(mixture.parts[1])
    mixture = mixture.add(jnp.ones(2), part=1).set_version(3)
    batch = mixture.sample(jax.random.key(0), 6)
    part, slots = mixture.parts[1], mixture.part_slots(batch.slots, 1)
    rows = batch.replace(slots=slots, valid=slots.index < part.capacity)
    statistics = statistics.sampled(part, rows, priority=jnp.arange(6.0))
    metrics = statistics.metrics(part)
    assert [int(metrics[name]) for name in ("pushed", "removed", "sampled")] == [2, 2, 3]
    assert [float(metrics[name]) for name in ("staleness_mean", "priority_mean")] == [3.0, 4.0]


def test_what_is_not_watched():
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4)
    statistics, batch = jaxbuf.Statistics.create(buffer), buffer.sample(jax.random.key(0), 2)
    mixture = jaxbuf.Mixture.create([buffer], [1])
    for thing, message in ((mixture, "buffer is a Mixture, whose"), ({}, "buffer is a dict; exp")):
        for call in (
            lambda thing: jaxbuf.Statistics.create(thing),
            lambda thing: statistics.sampled(thing, batch),
            statistics.metrics,
            statistics.next_period,
        ):
            with pytest.raises(ValueError, match=message):
                call(thing)
    with pytest.raises(ValueError, match="priority was given, but Uniform"):
        statistics.sampled(buffer, batch, priority=jnp.ones(2))
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=jaxbuf.Prioritized())
    with pytest.raises(ValueError, match=r"priority has shape \(3,\); expected \(2,\), which is"):
        statistics.sampled(buffer, batch, priority=jnp.ones(3))


@pytest.mark.slow
def test_reading_copies_nothing():
    def cycle(state, key):
        mask, version, priority = jnp.ones(ROWS, bool), jnp.int32(0), jnp.ones(BATCH)
        state, (_, _, metrics) = step(state, (key, mask, version, priority, jnp.ones(ROWS)))
        return state, metrics

    def loop(state, keys):
        return jax.lax.scan(cycle, state, keys)

    state = start(2**12)
    testing.assert_no_copy(loop, state, jax.random.split(jax.random.key(0), 4))
