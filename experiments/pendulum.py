"""Soft actor-critic on Pendulum with and without priorities: ``python -m experiments.pendulum``.

Trains ``examples/sac.py`` once for each seed and way to replay, and goes on from the checkpoint
of a run that was interrupted. All other options are the example's own.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray

import sac
from experiments import common

AGENTS = ("uniform", "prioritized")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    steps: int = 20_000  # environment steps of each seed
    seeds: int = 8  # seeds, one after the other
    runs: Path = Path("runs/pendulum")  # where runs and their checkpoints are kept
    out: Path = common.RESULTS  # where the numbers and the plot go


def train(options: Options, agent: str, seed: int) -> list[dict[str, Any]]:
    """Trains one seed of an agent, or goes on with it; returns its rows."""
    words = ("--sampler", agent, "--seed", seed, "--steps", options.steps)
    run = common.train(sac.main, words, options.runs / agent / str(seed))
    return rows(agent, seed, run.logged("step"), run.logged("return"))


def rows(agent: str, seed: int, steps: NDArray[Any], returns: NDArray[Any]) -> list[dict[str, Any]]:
    """Returns one row for each logged step before which episodes ended.

    Args:
        agent: The name of the agent.
        seed: The seed of the run.
        steps: Numbers of steps, ``[P]``.
        returns: Mean returns of the episodes that ended since the last of these, or NaN; ``[P]``.
    """
    return [
        {"agent": agent, "seed": seed, "step": int(step), "return": f"{mean:.1f}"}
        for step, mean in zip(steps, returns, strict=True)
        if np.isfinite(mean)
    ]


def draw(path: Path) -> None:
    """Draws the mean return of both agents over steps, with 95 % intervals over the seeds."""
    found = common.read(path)
    figure, (panel,) = common.figure(1)
    for number, agent in enumerate(AGENTS):
        mine = [row for row in found if row["agent"] == agent]
        common.draw_mean(panel, common.group(mine, "step", "return"), agent, number)
    panel.set(xlabel="environment steps", ylabel="return per episode while training")
    panel.legend(loc="lower right")
    common.save(figure, path)


def table(path: Path) -> str:
    """Returns mean returns of parts of the runs with 95 % intervals, in markdown.

    The last row is the difference between the agents, seed by seed.
    """
    returns = common.curves(common.read(path), AGENTS, "return")
    quarter = len(returns["uniform"]) // 4
    parts = {
        "first quarter": slice(quarter),
        "second quarter": slice(quarter, 2 * quarter),
        "second half": slice(2 * quarter, None),
        "whole run": slice(None),
    }
    return common.markdown(["return in the", *parts], common.stages(returns, parts, "z.1f"))


def main(options: Options) -> None:
    """Trains what is not trained yet, then writes the numbers and the plot."""
    found, path = list[dict[str, Any]](), options.out / "pendulum.csv"
    for seed in range(options.seeds):
        for agent in AGENTS:
            found += train(options, agent, seed)
    draw(common.write(path, found))
    print(table(path))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
