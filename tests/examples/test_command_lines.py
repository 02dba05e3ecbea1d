"""The command lines of the examples: what is wrong is said, with advice, and no file is written."""

import pytest

import apex
import bit_flipping
import dqn
import gflownet
import gflownet_mpi
import levels
import r2d2
import sac
from tests.programs.run_example import error_of, help_of

ADVICE = {
    apex: [
        (["--env", "Pendulum-v1"], "invalid choice 'Pendulum-v1'"),
        (["--actors", "0"], "--actors is 0; expected at least 1"),
        (["--samples-per-insert", "0"], "--samples-per-insert is 0.0; expected at least 0.001"),
        (["--rollout", "1000"], "--warmup is 2000; expected at least 4000"),
        (["--steps", "2000"], "--steps is 2000; expected at least 2001"),
    ],
    bit_flipping: [
        (["--strategy", "futur"], "invalid choice 'futur' for argument '--strategy'. Expected one"),
        (["--bits", "0"], "--bits is 0; expected at least 1 and at most 64"),
        (["--fraction", "1.5"], "--fraction is 1.5; expected at least 0 and at most 1"),
        (["--capacity", "8"], "--capacity is 8; expected at least 16"),
        (["--episodes", "8"], "--episodes is 8; expected at least 16"),
    ],
    dqn: [
        (["--env", "Pendulum-v1"], "invalid choice 'Pendulum-v1' for argument '--env'. Expected"),
        (["--sampler", "priority"], "Expected one of ('prioritized', 'uniform')"),
        (["--capacity", "63"], "--capacity is 63; expected at least 64"),
        (["--num-envs", "1001"], "--warmup is 2000; expected at least 2002"),
        (["--n-step", "9", "--warmup", "79"], "--warmup is 79; expected at least 80"),
        (["--n-step", "0"], "--n-step is 0; expected at least 1"),
        (["--steps", "2000"], "--steps is 2000; expected at least 2001"),
        (["--seeds", "1.5"], "invalid literal for int() with base 10: '1.5'"),
        (["--alpha", "-0.1"], "--alpha is -0.1; expected at least 0"),
        (["--beta", "1.1"], "--beta is 1.1; expected at least 0 and at most 1"),
        (["--lr", "nan"], "--lr is nan; expected at least 0"),
        (["--discount", "inf"], "--discount is inf; expected at least 0 and at most 1"),
        (["--stepz", "5"], "Perhaps you meant: --steps INT"),
    ],
    gflownet: [
        (["--buffer", "rewards"], "Expected one of ('none', 'fifo', 'reward', 'diverse')"),
        (["--buffer", "fifo", "fifo"], "--buffer is fifo fifo; name each once"),
        (["--height", "6"], "has no mode: no coordinate lies between 0.3 and 0.4"),
        (["--height", "1"], "ask for a height of 8, or of at least 12"),
        (["--dims", "7"], "has 2,097,152 states; its exact distribution is computed, so ask for"),
        (["--dims", "0"], "--dims is 0; expected at least 1"),
        (["--replay-ratio", "1"], "choose a ratio that leaves at least one fresh"),
        (["--replay-ratio", "0.01"], "leaves 0 to be replayed; choose a ratio that leaves"),
        (["--capacity", "7"], "--capacity is 7; expected at least 8"),
        (["--background", "0"], "--background is 0.0; expected at least 1e-30"),
        (["--temperature", "-1"], "--temperature is -1.0; expected at least 1e-30"),
        (["--steps", "0"], "--steps is 0; expected at least 1"),
    ],
    gflownet_mpi: [
        (["--run", "synch"], "Expected one of ('alone', 'sync', 'deferred', 'pipelined')"),
        (["--buffer", "none,fifo"], "Expected one of ('none', 'fifo', 'reward', 'diverse')"),
        (["--height", "6"], "has no mode: no coordinate lies between 0.3 and 0.4"),
        (["--capacity", "7"], "--capacity is 7; expected at least 8"),
        (["--every", "0"], "--every is 0; expected at least 1"),
    ],
    levels: [
        (["--size", "1"], "--size is 1; expected at least 2"),
        (["--replay", "0"], "--replay is 0.0; expected at least 0.03125 and at most 1"),
        (["--stale", "1.5"], "--stale is 1.5; expected at least 0 and at most 1"),
        (["--capacity", "31"], "--capacity is 31; expected at least 32"),
    ],
    r2d2: [
        (["--burn-in", "14"], "--sequence-length is 16; expected at least 18"),
        (["--eta", "1.5"], "--eta is 1.5; expected at least 0 and at most 1"),
        (["--capacity", "100"], "--capacity is 100; expected at least 2048"),
        (["--steps", "4096"], "--steps is 4096; expected at least 4097"),
        (["--period", "0"], "--period is 0; expected at least 1"),
    ],
    sac: [
        (["--env", "Pendulum-v99"], "--env is Pendulum-v99, which cannot be made: Environment"),
        (["--env", "CartPole-v1"], "with actions Discrete(2); expected a bounded vector"),
        (["--batch-size", "2000"], "--warmup is 1000; expected at least 2000"),
        (["--steps", "1000"], "--steps is 1000; expected at least 1001"),
        (["--updates", "0"], "--updates is 0; expected at least 1"),
        (["--discount", "1.5"], "--discount is 1.5; expected at least 0 and at most 1"),
    ],
}
# The picture that each of them leaves.
PICTURES = {
    apex: "learning_curve.png",
    bit_flipping: "success.png",
    dqn: "learning_curve.png",
    gflownet: "modes.png",
    levels: "solved.png",
    r2d2: "return.png",
    sac: "learning_curve.png",
}


def name_of(example):
    return example.__name__.rpartition(".")[2]


@pytest.mark.parametrize(
    ("example", "argv", "advice"),
    [(example, *row) for example, rows in ADVICE.items() for row in rows],
    ids=lambda value: name_of(value) if hasattr(value, "__name__") else None,
)
def test_a_wrong_argument_gets_advice(example, argv, advice, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert advice in error_of(example, argv, capsys)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("example", PICTURES, ids=name_of)
def test_help_says_where_it_writes(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = help_of(example, capsys)
    assert PICTURES[example] in text
    assert f"runs/{name_of(example)} or where --out" in " ".join(text.split())
    # When a run began is no option of it.
    assert "--began" not in text
    advice = f"there is no run in runs/{name_of(example)}; start without --resume"
    assert advice in error_of(example, ["--resume"], capsys)
    (tmp_path / "notes.txt").write_text("mine")
    advice = "notes.txt is a file; choose another --out"
    assert advice in error_of(example, ["--out", "notes.txt"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
