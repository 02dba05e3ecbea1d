"""The monitor: what is written when, from where, and that it survives what happens to processes."""

import io
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorboardX

import jaxbuf
from tests.programs.kill import kill_repeatedly
from tests.programs.tensorboard import events_of


class Rows:
    """A writer that remembers."""

    def __init__(self):
        self.rows, self.calls = [], []

    def write(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def rewind(self, step):
        self.calls.append(("rewind", step))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")

    @property
    def steps(self):
        return [step for step, _ in self.rows]


def test_every_so_many_steps_whatever_the_stride():
    for every, stride in [(1, 1), (10, 1), (10, 7), (3, 10), (8, 4)]:
        rows = Rows()
        monitor = jaxbuf.Monitor([rows], every_steps=every)
        steps = range(5, 120, stride)
        written = [step for step in steps if monitor.write(step, {"x": step})]
        multiples = [m for m in range(every, 130, every) if m > 5]
        expected = {5} | {next((s for s in steps if s >= m), None) for m in multiples}
        assert written == sorted(expected - {None})
        assert rows.steps == written


def test_every_so_many_seconds():
    now, rows = [0.0], Rows()
    monitor = jaxbuf.Monitor([rows], every_seconds=2.0, clock=lambda: now[0])
    for step, moment in enumerate([0.0, 1.0, 1.9, 2.0, 3.9, 4.5, 6.4, 6.5, 20.0, 21.0]):
        now[0] = moment
        monitor.write(step, {})
    assert rows.steps == [0, 3, 5, 7, 8]


def test_names_of_nested_metrics_and_of_elements():
    rows = Rows()
    metrics = {"a": {"b": jnp.int32(3), "c": np.float64(0.5)}, "d": jnp.arange(4).reshape(2, 2)}
    jaxbuf.Monitor([rows]).write(jnp.int32(7), metrics)
    names = {"a/b": 3.0, "a/c": 0.5, "d/0/0": 0.0, "d/0/1": 1.0, "d/1/0": 2.0, "d/1/1": 3.0}
    assert rows.rows == [(7, names)]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("transform", ["eager", "jit", "vmap"])
def test_callbacks_from_a_scan_over_a_buffer(transform, ordered):
    rows = Rows()
    monitor = jaxbuf.Monitor([rows], every_steps=2)

    def run(value):
        def step(buffer, i):
            buffer = buffer.add(jnp.full(3, value + i.astype(jnp.float32)))
            monitor.callback(i, {**buffer.metrics(), "value": value}, ordered=ordered)
            return buffer, None

        buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8)
        return jax.lax.scan(step, buffer, jnp.arange(5))[0].size

    transformed = {"eager": run, "jit": jax.jit(run), "vmap": jax.jit(jax.vmap(run))}[transform]
    value = jnp.float32(0.5)
    transformed(jnp.stack([value, value]) if transform == "vmap" else value)
    monitor.flush()
    assert rows.steps == [0, 2, 4]
    assert rows.calls == ["flush"]
    seeds = ["/0", "/1"] if transform == "vmap" else [""]
    for (_, metrics), size in zip(rows.rows, [3, 8, 8], strict=True):
        assert [metrics[f"value{seed}"] for seed in seeds] == [0.5] * len(seeds)
        # Metrics that are the same for all seeds are not repeated for each.
        assert {metrics[name] for name in metrics if name.startswith("size")} == {size}


def test_a_callback_leaves_gradients_alone():
    rows = Rows()
    monitor = jaxbuf.Monitor([rows])

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        monitor.callback(0, {"loss": x**2})
        return x**2

    assert float(loss(jnp.float32(3))[1]) == 6
    with monitor:
        pass
    assert rows.rows == [(0, {"loss": 9.0})]
    assert rows.calls == ["flush", "close"]


def test_csv_gets_columns_when_they_appear(tmp_path):
    path = tmp_path / "logs" / "log.csv"
    naive, names = [], ["step"]
    random = np.random.default_rng(0)
    with jaxbuf.Monitor([jaxbuf.CsvWriter(path)]) as monitor:
        for step in range(40):
            row = {n: step + 0.25 for n in "abcdefgh,"[: 1 + step // 4] if random.random() < 0.6}
            names += [name for name in row if name not in names]
            naive.append({"step": step, **row})
            monitor.write(step, row)
    lines = path.read_text().splitlines()
    assert lines[0].replace('","', "COMMA").split(",") == [
        name.replace(",", "COMMA") for name in names
    ]
    for line, row in zip(lines[1:], naive, strict=True):
        assert line.split(",") == [str(row.get(name, "")) for name in names]


def test_csv_refuses_a_number_that_is_called_step(tmp_path):
    path = tmp_path / "log.csv"
    with jaxbuf.Monitor([jaxbuf.CsvWriter(path)]) as monitor:
        monitor.write(1, {"loss": 0.5})
        message = "metrics has a number called 'step', as the first column is; choose another name"
        with pytest.raises(ValueError, match=message):
            monitor.write(2, {"loss": 0.25, "step": 7.0})
        monitor.write(3, {"loss": 0.125, "env/step": 7.0})
    assert path.read_text().split() == ["step,loss,env/step", "1,0.5,", "3,0.125,7.0"]


def test_csv_goes_on_where_a_run_was_interrupted(tmp_path):
    path = tmp_path / "log.csv"
    with jaxbuf.Monitor([jaxbuf.CsvWriter(path)]) as monitor:
        for step in (10, 20, 30):
            monitor.write(step, {"x": 1})
    with path.open("a") as file:
        file.write("40,1.")
    with jaxbuf.Monitor([jaxbuf.CsvWriter(path)], every_steps=10, resume_at=20) as monitor:
        for step in (25, 30, 40):
            monitor.write(step, {"x": 2})
    assert path.read_text().split() == ["step,x", "10,1.0", "20,1.0", "30,2.0", "40,2.0"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.csv"]


def test_csv_leaves_other_files_alone(tmp_path):
    path = tmp_path / "notes.csv"
    for text in ("name,age\nAnn,30\n", "step,x\n1,2\nhello\n", "notes"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"notes\.csv is no log of steps; move it away"):
            jaxbuf.CsvWriter(path)
        assert path.read_text() == text


def log_writer(path, sender):
    """Write one row after the other, with a new column now and then."""
    writer = jaxbuf.CsvWriter(path)
    columns, *rows = [line.split(",") for line in path.read_text().splitlines()]
    for k, (step, *cells) in enumerate(rows):
        assert step == str(k)
        assert [float(cell) for cell in cells if cell] == [k + 0.5] * (k // 10 + 1)
        assert len(cells) == len(columns) - 1
    k = len(rows)
    sender.send(k)
    while True:
        writer.write(k, {f"x{i}": k + 0.5 for i in range(k // 10 + 1)})
        k += 1
        sender.send(k)


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_whole_rows(tmp_path, kills):
    assert kill_repeatedly(log_writer, tmp_path / "log.csv", 0.02, kills) > 0


def test_terminal():
    out = io.StringIO()
    with jaxbuf.Monitor([jaxbuf.TerminalWriter(out)]) as monitor:
        monitor.write(1_000, {"loss": 1 / 3, "seed": jnp.arange(2), "size": 50_000})
    assert out.getvalue().splitlines() == [
        "-----------------------",
        "| step     |     1000 |",
        "| loss     | 0.333333 |",
        "| seed     |          |",
        "|  0       |        0 |",
        "|  1       |        1 |",
        "| size     |    50000 |",
        "-----------------------",
    ]


class Histograms(Rows):
    """A writer that remembers histograms too."""

    def histogram(self, step, name, values):
        self.rows.append((step, {name: sorted(values.tolist())}))


def test_histograms_are_of_what_can_be_drawn():
    buffer = jaxbuf.ItemBuffer.create(jnp.int32(0), 4, sampler=jaxbuf.Prioritized(alpha=1.0))
    full = buffer.add(jnp.arange(3), priority=jnp.array([2.0, 0.5, 8.0]))
    mixture = jaxbuf.Mixture.create([full, buffer], [1, 1])
    writer = Histograms()
    named = {"old": mixture, "new": jax.tree.map(jnp.copy, full)}
    named = jaxbuf.Mixture.create(named, [1, 1])
    with jaxbuf.Monitor([Rows(), writer]) as monitor:
        monitor.histograms(7, full)
        monitor.histograms(8, mixture)
        monitor.histograms(9, named)
    ages, priorities = [0, 1, 2], [0.5, 2.0, 8.0]
    expected = [(7, {"ages": ages}), (7, {"priorities": priorities})]
    expected += [(8, {"0/ages": ages}), (8, {"0/priorities": priorities})]
    expected += [(9, {"old/0/ages": ages}), (9, {"old/0/priorities": priorities})]
    expected += [(9, {"new/ages": ages}), (9, {"new/priorities": priorities})]
    assert writer.rows == expected
    with pytest.raises(ValueError, match="buffer is traced"):
        jax.jit(lambda buffer: monitor.histograms(0, buffer))(full)


def test_histograms_reach_tensorboard_and_wandb(tmp_path, monkeypatch):
    logged = []
    run = types.SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics)))
    made = types.SimpleNamespace(Histogram=lambda np_histogram: np_histogram)
    monkeypatch.setitem(sys.modules, "wandb", made)
    values = np.linspace(0, 10, 128)
    mine = tensorboardX.SummaryWriter(tmp_path / "mine")
    writers = [jaxbuf.TensorBoardWriter(tmp_path / "own"), jaxbuf.TensorBoardWriter(mine)]
    for writer in [*writers, jaxbuf.WandbWriter(run=run)]:
        writer.histogram(3, "priorities", values)
        writer.close()
    mine.close()
    for folder in ("own", "mine"):
        (found,) = events_of(tmp_path / folder, "histo")["priorities"]
        assert (found[0], found[1].num, found[1].sum) == (3, 128, 640)
    ((step, metrics),) = logged
    assert step == 3
    np.testing.assert_array_equal(metrics["priorities"][0], np.full(64, 2))


def test_tensorboard(tmp_path):
    for resume_at, value in [(None, 1.0), (20, 2.0), (30, 3.0)]:
        writer = jaxbuf.TensorBoardWriter(tmp_path)
        monitor = jaxbuf.Monitor([writer], resume_at=resume_at)
        for step in range((resume_at or 0) + 10, 50, 10):
            monitor.write(step, {"loss": value, "seed": jnp.arange(2)})
        # It is there already, so a killed process loses nothing of it.
        curves = events_of(tmp_path)
        assert curves["loss"][-1] == (40, value)
        monitor.close()
    assert curves["loss"] == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 3.0)]
    assert curves["seed/1"] == [(step, 1.0) for step in (10, 20, 30, 40)]


def test_a_summary_writer_of_the_user_stays_open(tmp_path):
    for purge_step, value in [(None, 1.0), (21, 2.0)]:
        mine = tensorboardX.SummaryWriter(
            tmp_path, purge_step=purge_step, filename_suffix=f".{value}"
        )
        resume_at = purge_step and purge_step - 1
        with jaxbuf.Monitor([jaxbuf.TensorBoardWriter(mine)], resume_at=resume_at) as monitor:
            for step in range((resume_at or 0) + 10, 50, 10):
                monitor.write(step, {"loss": value})
        mine.add_scalar("mine", value, 50)
        mine.close()
    curves = events_of(tmp_path)
    assert curves["loss"] == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    assert curves["mine"] == [(50, 2.0)]


@pytest.mark.parametrize("of", [lambda path: path, tensorboardX.SummaryWriter])
def test_tensorboard_refuses_names_that_it_makes_one(of, tmp_path):
    given = of(tmp_path)
    with jaxbuf.Monitor([jaxbuf.TensorBoardWriter(given)]) as monitor:
        monitor.write(0, {"td error": 1.0})
        message = "TensorBoard takes both 'td error' and 'td_error' for 'td_error'; choose another"
        with pytest.raises(ValueError, match=message):
            monitor.write(1, {"td error": 1.0, "td_error": 2.0})
    getattr(given, "close", lambda: None)()
    assert events_of(tmp_path) == {"td_error": [(0, 1.0)]}


class Run:
    def __init__(self, calls):
        self.calls = calls

    def log(self, data, step=None):
        self.calls.append((step, data))

    def finish(self):
        self.calls.append("finish")


def test_weights_and_biases(monkeypatch):
    calls = []

    def init(*, project=None, mode=None):
        calls.append((project, mode))
        return Run(calls)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, run=None))
    writer = jaxbuf.WandbWriter(project="replay", mode="offline")
    with jaxbuf.Monitor([writer], every_steps=2) as monitor:
        for step in range(4):
            monitor.write(step, {"loss": jnp.float32(step)})
    assert calls == [("replay", "offline"), (0, {"loss": 0.0}), (2, {"loss": 2.0}), "finish"]


@pytest.mark.parametrize("how", ["given", "wandb.run", "created beside others"])
def test_a_run_of_the_user_is_not_finished(how, monkeypatch):
    mine = Run([])
    setup = types.SimpleNamespace(most_recent_active_run=mine if "beside" in how else None)
    wandb = types.SimpleNamespace(
        init=lambda: mine, run=mine if how == "wandb.run" else None, setup=lambda: setup
    )
    monkeypatch.setitem(sys.modules, "wandb", None if how == "given" else wandb)
    writer = jaxbuf.WandbWriter(**({"run": mine} if how == "given" else {}))
    with jaxbuf.Monitor([writer]) as monitor:
        monitor.write(1, {"loss": 0.5})
    assert mine.calls == [(1, {"loss": 0.5})]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxbuf.WandbWriter(run=3), "run is 3; expected None or a run"),
        (lambda: jaxbuf.WandbWriter(run=Run([]), project="a"), "run was given, and project, which"),
        (lambda: jaxbuf.TensorBoardWriter(3), "folder is 3; expected a path"),
        (
            lambda: jaxbuf.Monitor([], every_steps=2, every_seconds=1.0),
            "every_steps is 2 and every_seconds is 1.0;",
        ),
        (
            lambda: jaxbuf.Monitor([Rows()]).write(np.array([1, 2]), {}),
            "step is [1, 2]; expected one number, the same",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("metrics", "name"),
    [({"a": {"b": 1}, "a/b": 2}, "a/b"), ({"loss": np.arange(2.0), "loss/1": 5.0}, "loss/1")],
)
def test_two_numbers_of_one_name_are_refused(metrics, name):
    rows = Rows()
    with pytest.raises(ValueError, match=f"metrics has two numbers called '{name}'; expected one"):
        jaxbuf.Monitor([rows]).write(0, metrics)
    assert rows.rows == []


@pytest.mark.parametrize(
    ("module", "make", "install"),
    [
        ("tensorboardX", lambda path: jaxbuf.TensorBoardWriter(path), r"'jaxbuf\[logging\]'"),
        ("wandb", lambda path: jaxbuf.WandbWriter(), "wandb"),
    ],
)
def test_a_missing_library_says_how_to_get_it(module, make, install, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"install it with `pip install {install}`"):
        make(tmp_path)
