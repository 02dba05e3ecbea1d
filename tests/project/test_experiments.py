"""Experiments measure what they say, and the pages of results quote the numbers in their files."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    bit_flipping,
    cliffwalk,
    common,
    hypergrid,
    levels,
    minatar,
    pendulum,
    population,
)
from experiments.programs import (
    ajax_dqn,
    cleanrl_dqn_jax,
    harness,
    memorax_r2d2,
    page,
    stoix_rainbow,
)
from tests.lenient import lenient

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    path.stem: program
    for program in (cliffwalk, bit_flipping, hypergrid, minatar, pendulum, levels, population)
    if (path := ROOT / "docs" / "results" / f"{program.__name__.split('.')[-1]}.csv").exists()
}


@pytest.fixture
def promotion():
    """Optax mixes dtypes and ranks."""
    with lenient():
        yield


def test_the_memory_holds_the_transitions_of_all_sequences():
    n, expected = 4, []
    for sequence in range(2**n):
        for state in range(n):
            right = bool(sequence >> state & 1)
            expected.append((state, right))
            if not right:
                break
    state, right = cliffwalk.memory(n)
    assert sorted(zip(state.tolist(), right.tolist(), strict=True)) == sorted(expected)
    assert len(expected) == 2 ** (n + 1) - 2


@pytest.mark.parametrize("n", [2, 6])
def test_true_values_are_those_of_value_iteration(n):
    values = np.zeros((n, 2))
    for _ in range(n):
        following = [values[state + 1].max() if state + 1 < n else 0.0 for state in range(n)]
        rewards = np.eye(n)[-1]
        values = np.stack([np.zeros(n), rewards + (1 - 1 / n) * np.asarray(following)], axis=1)
    np.testing.assert_allclose(cliffwalk.true_values(n), values, rtol=1e-12)


# With linear values and many states the oracle ends where each update makes the error larger.
@pytest.mark.parametrize(("linear", "n"), [(False, 6), (True, 4)])
def test_all_agents_learn_and_the_oracle_is_fastest(linear, n):
    updates = {}
    for agent in cliffwalk.AGENTS:
        values, updates[agent] = cliffwalk.run(n, agent, 3, 100_000, linear=linear)
        assert values.shape == (3, n, 2)
        error = np.mean((values - cliffwalk.true_values(n)) ** 2, axis=(1, 2))
        assert np.all(error < cliffwalk.THRESHOLD), agent
        assert np.all(updates[agent] > 0), agent
    for agent in cliffwalk.SAMPLERS:
        assert np.all(updates["oracle"] <= updates[agent]), agent


def test_linear_values_share_a_constant_among_states():
    # Action 0 is right in the second state alone.
    weights = jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [10.0, 20.0]])
    expected = [[1 + 10, 2 + 20], [4 + 20, 3 + 10], [5 + 10, 6 + 20]]
    np.testing.assert_array_equal(cliffwalk.values_of(weights, 3), expected)
    np.testing.assert_array_equal(cliffwalk.values_of(weights[:3], 3), [[1, 2], [4, 3], [5, 6]])


@pytest.mark.parametrize("linear", [False, True])
def test_an_update_follows_the_gradient_of_its_value(linear):
    n, state, right = 4, jnp.int32(1), jnp.bool_(True)
    weights = jax.random.normal(jax.random.key(0), (n + linear, 2))
    after, error = cliffwalk.learn(weights, n, state, right)
    values = cliffwalk.values_of(weights, n)
    np.testing.assert_allclose(error, 0.75 * values[2].max() - values[1, 1], rtol=1e-6)
    slope = jax.grad(lambda weights: cliffwalk.values_of(weights, n)[1, 1])(weights)
    assert np.sum(slope) == 1 + linear
    np.testing.assert_allclose(after, weights + 0.25 * error * slope, rtol=1e-6)


def test_the_memory_is_filled_in_random_order():
    n, sampler = 6, cliffwalk.SAMPLERS["rank-based, α = 1"]
    rows = sorted(zip(*map(np.ndarray.tolist, cliffwalk.memory(n)), strict=True))
    ordered = np.repeat([True, False], len(rows) // 2)
    for seed in range(3):
        data = cliffwalk.fill(n, sampler, jax.random.key(seed)).data
        found = zip(data["state"].tolist(), data["right"].tolist(), strict=True)
        assert sorted(found) == rows
        # Half of 126 at random: 63 with a standard deviation of 5.6.
        assert 35 < np.sum(np.asarray(data["right"]) == ordered) < 91


def test_runs_that_are_given_up_are_counted(tmp_path):
    options = cliffwalk.Options(least=4, most=4, seeds=2, most_updates=100, out=tmp_path)
    cliffwalk.main(options)
    found = common.read(tmp_path / "cliffwalk.csv")
    assert {row["updates"] for row in found if row["agent"] == "uniform"} >= {"inf"}
    rows = [{"updates": updates} for updates in ("60", "inf", "70")]
    assert cliffwalk.cell(rows) == "1 of 3 given up"
    assert cliffwalk.cell([rows[0], rows[0]]) == "60 (60 to 60)"
    assert (tmp_path / "cliffwalk.svg").exists()


def test_an_interval_covers_the_mean_of_its_population():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        low, high = common.interval(rng.normal(3.0, 1.0, 30), draws=400)
        covered += low <= 3.0 <= high
    # 95 % in the limit, somewhat less with 30 values: binomial, 0.93 of 200 ± 5 sigma.
    assert 0.84 * 200 <= covered < 200


def test_bit_flipping_with_few_bits(tmp_path, promotion):
    options = bit_flipping.Options(
        bits=(2,), seeds=2, episodes=800, runs=tmp_path / "runs", out=tmp_path
    )
    bit_flipping.main(options)
    table = common.read(tmp_path / "bit_flipping.csv")
    assert [row["seed"] for row in table] == ["0", "1"] * 2
    assert all(0.9 < float(row["success"]) <= 1 for row in table)
    before = (tmp_path / "bit_flipping.svg").read_bytes()
    bit_flipping.main(options)
    assert (tmp_path / "bit_flipping.svg").read_bytes() == before


def test_hypergrid_on_a_small_grid(tmp_path, promotion):
    options = hypergrid.Options(
        steps=100, seeds=2, dims=1, height=8, runs=tmp_path / "runs", out=tmp_path
    )
    hypergrid.main(options)
    table = common.read(tmp_path / "hypergrid.csv")
    assert {row["buffer"] for row in table} == set(hypergrid.KINDS)
    assert all(0 <= float(row["l1"]) <= 2 for row in table)
    # A line has a mode at each end, and a hundred updates find both.
    assert {row["modes"] for row in table if row["updates"] == "100"} == {"2"}


def test_rows_of_minatar_are_means_of_tenths_of_a_run():
    steps = np.arange(1, 21) * 10
    returns = np.stack([steps / 10, np.full(20, np.nan)], axis=1)
    rows = minatar.rows("Breakout", "uniform", steps, returns)
    first = [row for row in rows if row["seed"] == 0]
    assert [row["step"] for row in first] == [20 * i for i in range(1, 11)]
    assert [float(row["return"]) for row in first] == [2 * i + 1.5 for i in range(10)]
    assert all(row["return"] == "nan" for row in rows if row["seed"] == 1)


def test_stages_are_means_of_parts_and_of_differences():
    rows = [
        {"agent": agent, "step": step, "seed": seed, "return": step + seed + extra}
        for agent, extra in (("one", 0), ("other", 5))
        for step in (10, 20, 30)
        for seed in (0, 1)
    ]
    curves = common.curves(rows, ("one", "other"), "return")
    np.testing.assert_array_equal(curves["one"], [[10, 11], [20, 21], [30, 31]])
    parts = {"start": slice(1), "rest": slice(1, None)}
    assert common.stages(curves, parts, ".0f") == [
        ["one", "10 (10 to 11)", "26 (25 to 26)"],
        ["other", "16 (15 to 16)", "30 (30 to 31)"],
        ["difference", "5 (5 to 5)", "5 (5 to 5)"],
    ]


def test_pendulum_for_a_few_episodes(tmp_path, promotion):
    options = pendulum.Options(steps=3_300, seeds=1, runs=tmp_path / "runs", out=tmp_path)
    pendulum.main(options)
    found = common.read(tmp_path / "pendulum.csv")
    steps = [int(row["step"]) for row in found if row["agent"] == "prioritized"]
    # Four environments end an episode in 201 steps, with the reset; a line of the log has nine.
    assert steps == [828, 1_620, 2_412, 3_240]
    returns = {a: [row["return"] for row in found if row["agent"] == a] for a in pendulum.AGENTS}
    # Priorities change nothing before learning begins.
    assert returns["uniform"][0] == returns["prioritized"][0]
    assert returns["uniform"][-1] != returns["prioritized"][-1]
    before = (tmp_path / "pendulum.svg").read_bytes()
    pendulum.main(options)
    assert (tmp_path / "pendulum.svg").read_bytes() == before


def test_levels_in_small_mazes(tmp_path, promotion):
    options = levels.Options(steps=38_400, seeds=2, size=3, runs=tmp_path / "runs", out=tmp_path)
    levels.main(options)
    found = common.read(tmp_path / "levels.csv")
    assert {row["agent"] for row in found} == {"uniform", "prioritized"}
    curves = common.curves(found, levels.AGENTS, "solved")
    assert all(curve.shape == (50, 2) for curve in curves.values())
    # The mean of the second half, since a single point varies with how a version of XLA rounds.
    assert all(curve[25:].mean() > curve[0].mean() + 0.05 for curve in curves.values())


def test_a_small_population_learns_as_its_members_do_alone(tmp_path):
    few = {"states": 4, "agents": 2, "seeds": 2, "updates": 200, "points": 4, "repeats": 1}
    rows, times = population.compare(population.Options(**few, out=tmp_path))
    assert len(rows) == 2 * 2 * 4
    assert all(row["together"] == row["one by one"] for row in rows)
    assert [row["way"] for row in times] == 2 * list(population.WAYS)
    errors = [float(row["together"]) for row in rows if row["update"] == 200]
    assert max(errors) < 0.1


def test_an_interrupted_run_ends_the_experiment(tmp_path):
    with pytest.raises(SystemExit, match="130"):
        common.train(lambda words: 130, ["--steps", 3], tmp_path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_page_of_results_agrees_with_its_files(name, tmp_path):
    folder = ROOT / "docs" / "results"
    page = (folder / f"{name}.md").read_text()
    assert PROGRAMS[name].table(folder / f"{name}.csv") in page
    assert f"({name}.svg)" in page
    assert f"python -m experiments.{name}" in page
    copy = tmp_path / f"{name}.csv"
    copy.write_bytes((folder / f"{name}.csv").read_bytes())
    PROGRAMS[name].draw(copy)
    assert (folder / f"{name}.svg").read_bytes() == copy.with_suffix(".svg").read_bytes()


def test_the_page_of_programs_of_others_agrees_with_its_files(tmp_path):
    folder = ROOT / "docs" / "results"
    text = (folder / "programs.md").read_text()
    assert page.table(folder / "programs.csv") in text
    assert page.versions(folder / "programs.csv") in text
    assert page.calls(folder / "programs_calls.csv") in text
    copy = tmp_path / "programs.csv"
    copy.write_bytes((folder / "programs.csv").read_bytes())
    page.draw(copy)
    assert (folder / "programs.svg").read_bytes() == copy.with_suffix(".svg").read_bytes()


def test_the_way_that_the_page_shows_is_the_one_that_was_run():
    text = (ROOT / "docs" / "results" / "programs.md").read_text()
    changed = "".join(new for _, new in cleanrl_dqn_jax.INSIDE)
    for line in ("buffer = buffer.add(rows)", "@functools.partial(jax.jit, donate_argnums=1)"):
        assert line in text
        assert line in changed


def test_a_clone_of_another_version_is_refused(tmp_path):
    (tmp_path / "agent.py").write_text("import flashbax as fbx\n")
    changes = {"agent.py": [("import flashbax as fbx", "import jaxbuf.interop.flashbax as fbx")]}
    harness.change(tmp_path, changes)
    assert (tmp_path / "agent.py").read_text() == "import jaxbuf.interop.flashbax as fbx\n"
    with pytest.raises(SystemExit, match=r"agent.py says 0 times, not once: 'import flashbax"):
        harness.change(tmp_path, changes)


def test_what_a_program_prints_becomes_returns_of_fifths_of_training(monkeypatch):
    monkeypatch.setattr(harness.importlib.metadata, "version", lambda name: "1")
    text = "".join(
        f"MISC - Timestep: {step}\n\x1b[1mTRAINER - Q loss: {loss} | Steps per second: 1\n"
        f"EVALUATOR - Episode length mean: 9.0 | Episode return mean: {step / 2048:.3f} | a: 1\n"
        for step, loss in zip(range(2048, 20_481, 2048), [2.5] * 9 + ["nan"], strict=True)
    )
    points = stoix_rainbow.PROGRAM.points(text)
    row = harness.row(stoix_rainbow.PROGRAM, "own", 0, 12.34, points)
    assert [row[f"return_{i}"] for i in range(1, 6)] == ["1.50", "3.50", "5.50", "7.50", "9.50"]
    assert (row["loss"], row["cpu_seconds"]) == ("nan", "12.3")
    with pytest.raises(SystemExit, match="printed no return from step 16384 to 20480"):
        harness.row(stoix_rainbow.PROGRAM, "own", 0, 12.34, points[:8])


def test_what_clients_of_flashbax_print_is_read():
    text = "STEP 1500 RETURN 10.5\nSTEP 3000 RETURN 86.0\n"
    assert ajax_dqn.points(text) == [harness.Point(1500, 10.5), harness.Point(3000, 86.0)]
    text = "a warning\nSTEP 1024 RETURN 9.5 LOSS 0.25\n"
    assert memorax_r2d2.points(text) == [harness.Point(1024, 9.5, 0.25)]


def test_a_run_takes_the_place_of_one_of_the_same_seed(tmp_path):
    path = tmp_path / "programs.csv"
    row = {"program": "DQN", "buffer": "own", "seed": 0, "loss": "1"}
    for found in (row, row | {"seed": 1}, row | {"buffer": "jaxbuf"}, row | {"loss": "2"}):
        harness.write(path, found)
    kept = [(found["buffer"], found["seed"], found["loss"]) for found in common.read(path)]
    assert kept == [("own", "1", "1"), ("jaxbuf", "0", "1"), ("own", "0", "2")]
