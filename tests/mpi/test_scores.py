"""Score functions agree with NumPy on the same batches."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("mpi4jax")

import jaxbuf
from jaxbuf.mpi import DEFAULT, Manager, NewModes, Novelty, Retained, RewardSum, WeightedSum
from tests.operations import quick

_ITEM = {"id": jnp.int32(0), "state": jnp.zeros(10, jnp.int32)}
_CAPACITY = 7

_receive = jax.jit(Manager.receive)


def _batches(rows=4, values=4, steps=12):
    random = np.random.default_rng(0)
    for step in range(steps):
        ids = np.arange(rows, dtype=np.int32) + step * rows
        states = np.zeros((rows, 10), np.int32)
        # The last coordinate lies in another group of eight coordinates.
        states[:, [0, 9]] = random.integers(0, values, (rows, 2))
        score = random.integers(-3, 4, rows).astype(np.float32)
        mask = random.random(rows) < (0 if step == 5 else 0.8)
        yield {"id": ids, "state": states}, score, mask


def _held(buffer):
    """Returns the ids and states in the buffer."""
    live = np.asarray(buffer.occupancy.live(jnp.arange(buffer.capacity)))
    return np.asarray(buffer.data["id"])[live], np.asarray(buffer.data["state"])[live]


def _what_differs(item):
    """Returns the coordinates of the state that are not always zero."""
    return item["state"][::9]


@functools.cache
def _buffer(kind, capacity=_CAPACITY, key="state"):
    if kind == "diverse":
        return jaxbuf.diverse_reward_prioritized(_ITEM, capacity, cutoff=1.0, field=key)
    if kind == "lowest":
        return jaxbuf.reward_prioritized(_ITEM, capacity)
    return jaxbuf.ItemBuffer.create(_ITEM, capacity)


# Items are compared in tiles of 128 and blocks of 512, which these capacities do not fill.
_CASES = [
    (kind, *of)
    for kind in ("oldest", "lowest", "diverse")
    for of in ((_CAPACITY, "state"), (200, "state"), (600, "state"), (600, _what_differs))
]


@pytest.mark.parametrize(
    ("kind", "capacity", "key"),
    quick(_CASES, _CASES[::4]),
)
def test_scores_as_in_numpy(kind, capacity, key):
    norm = 2.0 if kind == "lowest" else 1.0
    parts = (Retained(), RewardSum(), Novelty(key, norm), NewModes(1.0, key))
    weights = {"retained": 1.0, "novelty": 0.5, "new_modes": -2.0}
    scores = WeightedSum(parts, weights, alpha=0.25)
    manager = Manager.create(_buffer(kind, capacity, key), 2, scores=scores)
    averages = [None, None]
    batches = _batches() if capacity == _CAPACITY else _batches(rows=150, values=40)
    for step, (items, score, mask) in enumerate(batches):
        _, states = _held(manager.buffer)
        sender = step % 2
        manager, got = _receive(manager, items, score=score, mask=mask, sender=sender)
        ids, _ = _held(manager.buffer)

        rows = np.flatnonzero(mask)
        apart = items["state"][rows][:, None] - states[None]
        distance = np.linalg.norm(apart, norm, axis=2)
        nearest = distance.min(axis=1) if len(states) else np.zeros(len(rows))
        modes = {tuple(items["state"][row]) for row in rows if score[row] >= 1}
        expected = {
            "retained": np.isin(items["id"], ids).sum(),
            "reward_sum": np.exp(score[rows]).sum(),
            "novelty": nearest.mean() if len(rows) else 0.0,
            "new_modes": len(modes - {tuple(state) for state in states}),
        }
        total = sum(weight * expected[name] for name, weight in weights.items())
        if len(rows):
            before = averages[sender]
            averages[sender] = total if before is None else 0.25 * total + 0.75 * before
        expected["score"] = averages[sender] or 0.0
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_novelty_is_measured_before_the_batch_is_stored():
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(2), 4)
    manager = Manager.create(buffer, 1, scores=Novelty(p=math.inf))
    for row, expected in (([0.0, 0.0], 0.0), ([3.0, -4.0], 4.0), ([3.0, -4.0], 0.0)):
        manager, scores = manager.receive(jnp.array([row]))
        assert float(scores["novelty"]) == expected


def test_modes_near_each_other_count_once():
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(1), 4)
    manager = Manager.create(buffer, 1, scores=NewModes(0.0, cutoff=0.5))
    found = []
    for _ in range(2):
        items = jnp.array([[0.0], [0.5], [2.0], [9.0]])
        score = jnp.array([1.0, 1.0, 0.0, -1.0])
        manager, scores = manager.receive(items, score=score)
        found.append(float(scores["new_modes"]))
    assert found == [2.0, 0.0]


def test_the_default_is_infinite():
    manager = Manager.create(jaxbuf.ItemBuffer.create(jnp.float32(0), 4), 1)
    assert manager.scores is DEFAULT
    _, scores = manager.receive(jnp.zeros(2))
    assert float(scores["score"]) == np.inf


def test_rows_without_score_have_no_reward():
    manager = Manager.create(jaxbuf.ItemBuffer.create(jnp.float32(0), 4), 1, scores=RewardSum())
    _, scores = manager.receive(jnp.zeros(2))
    assert float(scores["reward_sum"]) == 0.0
    _, scores = manager.receive(jnp.zeros(3), score=jnp.array([0.0, jnp.nan, -jnp.inf]))
    assert float(scores["reward_sum"]) == 1.0


def test_configurations_are_compared_by_value():
    one = WeightedSum([Retained(), Novelty(p=np.float32(2))], {"b": 1, "a": np.float32(2)})
    other = WeightedSum((Retained(), Novelty()), (("a", 2.0), ("b", 1.0)))
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Novelty(p=3), "p is 3; expected a norm: 1, 2 or inf"),
        (lambda: WeightedSum((Retained(),), {}), "weights is empty"),
        (lambda: _with_weights({"novel": 1.0}), r"weights has 'novel', which no part returns"),
    ],
)
def test_bad_choices_say_why(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def _with_weights(weights):
    buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 4)
    manager = Manager.create(buffer, 1, scores=WeightedSum((Retained(),), weights))
    return manager.receive(jnp.zeros(2))
