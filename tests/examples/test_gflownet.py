"""The GFlowNet example: its grid is exact, its loss vanishes where it should, and it learns."""

import dataclasses
import itertools
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import gflownet
from gflownet import HyperGrid, pick
from tests.programs.run_example import check_files, finish, interrupt

pytestmark = pytest.mark.usefixtures("promotion")

SMALL = HyperGrid(2, 8, background=0.1)
# At first there are fewer states than are to be replayed.
QUICK = [
    *("--dims", "2", "--steps", "300", "--seeds", "2", "--batch-size", "8"),
    *("--replay-ratio", "0.6", "--capacity", "40", "--hidden", "16"),
    *("--background", "0.1", "--lr", "0.01"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, promotion):
    """A run from start to end, with every buffer."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return finish(gflownet.main, [*QUICK, "--out", str(out)], out)


@pytest.mark.parametrize(("dims", "height"), [(1, 7), (3, 8), (2, 21)])
def test_rewards_and_modes_are_those_of_a_naive_grid(dims, height):
    grid = HyperGrid(dims, height, background=0.25)
    points = list(itertools.product(range(height), repeat=dims))
    rewards, modes = [], []
    for point in points:
        off = [abs(Fraction(x, height - 1) - Fraction(1, 2)) for x in point]
        ring = all(a > Fraction(1, 4) for a in off)
        mode = all(Fraction(3, 10) < a < Fraction(4, 10) for a in off)
        rewards.append(0.25 + 0.5 * ring + 2 * mode)
        corner = sum(2**d for d, x in enumerate(point) if 2 * x > height - 1)
        modes.append(corner if mode else 2**dims)
    states = grid.states()
    np.testing.assert_array_equal(states, points)
    np.testing.assert_allclose(np.exp(grid.log_reward(states)), rewards, rtol=1e-6)
    np.testing.assert_array_equal(grid.mode(states), modes)
    assert set(modes) == set(range(2**dims + 1))
    np.testing.assert_allclose(grid.target(), np.asarray(rewards) / sum(rewards), rtol=1e-5)
    assert float(grid.target().sum()) == pytest.approx(1, abs=1e-5)


def random_policy(grid, key):
    logits = 2 * jax.random.normal(key, (grid.num_states, grid.num_actions))
    return jax.nn.log_softmax(jnp.where(grid.legal(grid.states()), logits, -jnp.inf))


def test_where_a_policy_stops_is_exact():
    log_policy = random_policy(SMALL, jax.random.key(0))
    policy = np.exp(np.asarray(log_policy, np.float64)).reshape(8, 8, 3)
    flow = np.zeros((9, 9))
    flow[0, 0] = 1
    for x, y in itertools.product(range(8), repeat=2):
        flow[x + 1, y] += flow[x, y] * policy[x, y, 0]
        flow[x, y + 1] += flow[x, y] * policy[x, y, 1]
    expected = flow[:8, :8] * policy[..., 2]
    actual = SMALL.stopping_distribution(log_policy)
    np.testing.assert_allclose(actual, expected.reshape(-1), rtol=1e-4, atol=1e-9)
    assert float(actual.sum()) == pytest.approx(1, abs=1e-5)


def check_legal(grid, trajectories):
    """Every action is legal and leads to the next state; only the last one stops."""
    states, actions, lengths = (np.asarray(leaf) for leaf in trajectories)
    assert states.shape[1] == grid.max_length
    np.testing.assert_array_equal(states[:, 0], 0)
    np.testing.assert_array_equal(trajectories.mask.sum(axis=1), lengths)
    for state, action, length in zip(states, actions, lengths, strict=True):
        at = np.zeros(grid.dims, int)
        for t in range(length - 1):
            np.testing.assert_array_equal(state[t], at)
            assert 0 <= action[t] < grid.dims
            at[action[t]] += 1
            assert at[action[t]] < grid.height
        np.testing.assert_array_equal(state[length - 1 :] - at, 0)
        assert (action[length - 1 :] == grid.dims).all()


def test_the_way_back_is_a_legal_trajectory_that_ends_in_the_state():
    states = SMALL.states()
    trajectories = jax.jit(SMALL.backward)(jax.random.key(1), states)
    check_legal(SMALL, trajectories)
    np.testing.assert_array_equal(trajectories.states[:, -1], states)
    np.testing.assert_array_equal(trajectories.lengths, states.sum(axis=1) + 1)


def test_ways_back_are_as_likely_as_they_say():
    states = jnp.tile(jnp.array([[1, 2]], jnp.int32), (6_000, 1))
    trajectories = jax.jit(SMALL.backward)(jax.random.key(2), states)
    ways = [tuple(way) for way in np.asarray(trajectories.actions[:, :3]).tolist()]
    log_backward = np.asarray(SMALL.log_backward(trajectories))
    # Two choices of two parents, unless the first step back already reaches an edge.
    expected = {(0, 1, 1): 0.25, (1, 0, 1): 0.25, (1, 1, 0): 0.5}
    assert set(ways) == set(expected)
    for way, share in expected.items():
        at = ways.index(way)
        assert np.exp(log_backward[at]) == pytest.approx(share, rel=1e-5)
    counts = [ways.count(way) for way in expected]
    chances = [6_000 * share for share in expected.values()]
    assert scipy.stats.chisquare(counts, chances).pvalue > 1e-3


def test_what_has_no_mass_is_not_picked():
    mass = jnp.array([0.0, 3.0, 0.0, 1.0, 0.0])
    points = jnp.array([0.0, 0.7499, 0.75, 1 - 2.0**-23])
    picked = pick(points, jnp.broadcast_to(mass, (4, 5)))
    assert picked.tolist() == [1, 1, 3, 3]


@dataclasses.dataclass(frozen=True)
class Exact(gflownet.GFlowNet):
    """The parameters hold the log policy of each state."""

    def log_policy(self, params: Any, states: Any) -> Any:
        place = jnp.array([self.grid.height, 1], jnp.int32)
        return params["policy"][states @ place]


def exact_parameters(grid):
    """Flows that balance, from the far corner back to the origin."""
    reward = np.exp(np.asarray(grid.log_reward(grid.states()), np.float64)).reshape(8, 8)
    flow = np.zeros((9, 9))
    policy = np.zeros((8, 8, 3))
    for x, y in itertools.product(range(7, -1, -1), repeat=2):
        # A state shares its flow among its parents.
        right = flow[x + 1, y] / (1 + (y > 0))
        up = flow[x, y + 1] / (1 + (x > 0))
        flow[x, y] = reward[x, y] + right + up
        policy[x, y] = np.array([right, up, reward[x, y]]) / flow[x, y]
    with np.errstate(divide="ignore"):
        log_policy = jnp.asarray(np.log(policy).reshape(-1, 3), jnp.float32)
    return {"policy": log_policy, "log_z": jnp.float32(np.log(flow[0, 0]))}


def test_balance_is_exact_where_flows_are():
    exact = Exact(SMALL, hidden=1)
    params = exact_parameters(SMALL)
    np.testing.assert_allclose(exact.stopping_distribution(params), SMALL.target(), rtol=1e-4)
    rolled = jax.jit(exact.rollout, static_argnums=2)(params, jax.random.key(3), 200, 0.5)
    walked = SMALL.backward(jax.random.key(4), SMALL.states())
    for trajectories in (rolled, walked):
        np.testing.assert_allclose(exact.imbalance(params, trajectories), 0, atol=1e-4)
    wrong = {**params, "log_z": params["log_z"] + 1}
    np.testing.assert_allclose(exact.imbalance(wrong, walked), 1, atol=1e-4)


def test_rollouts_stop_where_the_policy_says():
    exact = Exact(SMALL, hidden=1)
    params = {"policy": random_policy(SMALL, jax.random.key(5))}
    rollout = jax.jit(exact.rollout, static_argnums=2)
    trajectories = rollout(params, jax.random.key(6), 8_000, 0.0)
    check_legal(SMALL, jax.tree.map(lambda leaf: leaf[:200], trajectories))
    last = np.asarray(trajectories.states[:, -1]) @ [8, 1]
    expected = 8_000 * np.asarray(exact.stopping_distribution(params), np.float64)
    often = expected >= 5
    counts = np.bincount(last, minlength=64)
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    expected *= counts.sum() / expected.sum()
    assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3


def test_a_new_policy_prefers_nothing():
    model = gflownet.GFlowNet(SMALL, hidden=4)
    log_policy = model.log_policy(model.init(jax.random.key(0)), SMALL.states())
    legal = np.asarray(SMALL.legal(SMALL.states()))
    expected = np.where(legal, 1 / legal.sum(axis=1, keepdims=True), 0)
    np.testing.assert_allclose(np.exp(log_policy), expected, rtol=1e-6)


def test_modes_over_trajectories():
    found = np.array([[3.0, 8.0], [5.0, np.inf]])
    outcome = gflownet.Outcome(np.ones(1), np.zeros((1, 2)), np.zeros((2, 4)), found, 8, [1.0])
    modes = outcome.modes(np.array([0, 3, 5, 8, 9]))
    np.testing.assert_array_equal(modes, [[0, 0], [1, 0], [1, 1], [2, 1], [np.nan, np.nan]])
    np.testing.assert_array_equal(outcome.to_all, [8, np.inf])


def test_a_run_compares_the_buffers(finished):
    header, _, *rows = finished.out.splitlines()[:6]
    assert " ".join(header.split()) == (
        "buffer L1 distance modes of 4 trajectories to all modes updates to all modes "
        "trajectories/s time"
    )
    rows = [row.split() for row in rows]
    assert [row[0] for row in rows] == ["none", "fifo", "reward", "diverse"]
    for row in rows:
        # A new policy has 1.4.
        assert float(row[1]) < 0.5
        assert row[-1] == "s"
    whole, parts = re.search(r"took ([\d.]+) s: ([\d.]+) s for training", finished.out).groups()
    assert float(parts) == pytest.approx(sum(float(row[-2]) for row in rows), abs=0.3)
    assert float(whole) > float(parts)


def test_what_a_run_says_of_the_buffers():
    def outcome(*to_all):
        found = np.asarray([[1.0, last] for last in to_all])
        return gflownet.Outcome(np.ones(1), np.zeros((1, 2)), np.zeros((2, 4)), found, 9, [1.0])

    first, *others = gflownet.compare(
        {
            "none": outcome(8, 6, 9),
            "reward": outcome(np.inf, np.inf, 2),
            "diverse": outcome(2, 9, 4),
        },
        seconds=12.3,
    ).splitlines()
    assert first.startswith("Trajectories to all modes are fresh ones. The run took 12.3 s: 3.0 s ")
    assert others == ["diverse  finds all modes in 50% of the trajectories of none."]
    never = {"none": outcome(np.inf), "reward": outcome(np.inf), "diverse": outcome(2)}
    assert "finds" not in gflownet.compare(never, seconds=1.0)


def test_a_run_leaves_its_files(finished):
    check_files(finished, "pictures", ["modes", "distance", "marginals"], "gflownet", dims=2)


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    finished, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "run"
    # In the 23rd of fifty chunks, of which every fifth is saved.
    interrupt(gflownet.main, [*QUICK, "--out", str(out)], 23, monkeypatch, capsys)
    again = finish(gflownet.main, ["--out", str(out), "--resume"], out)
    # After 20 chunks of six updates, of two seeds with four buffers; the first line is three later.
    assert "1.10k/2.40k" in again.err
    assert (out / "log.csv").read_text() == (finished.folder / "log.csv").read_text()
    assert without_times(again.out) == without_times(finished.out)


def without_times(printed):
    """The table up to the columns that tell how fast it was."""
    return [row.split()[:-3] for row in printed.splitlines()[:6]]
