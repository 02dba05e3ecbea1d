"""DQN on two games of MinAtar with three ways to replay: ``python -m experiments.minatar``.

Trains ``jaxbuf.examples.dqn`` once for each game and way to replay, with all seeds at once, and
goes on from the checkpoint of a run that was interrupted. A larger ``--steps`` trains finished runs
for longer.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments import common
from jaxbuf.examples import _run, dqn

GAMES = ("Breakout", "SpaceInvaders")
AGENTS = {
    "uniform": ("--sampler", "uniform"),
    "prioritized": ("--sampler", "prioritized"),
    "3-step, uniform": ("--sampler", "uniform", "--n-step", "3"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    steps: int = 100_000  # environment steps of each seed
    seeds: int = 5  # seeds, all trained at once
    warmup: int = 2_000  # random steps before learning begins
    hidden: int = 128  # width of the hidden layer
    games: tuple[str, ...] = GAMES  # games of MinAtar
    runs: Path = Path("runs/minatar")  # where runs and their checkpoints are kept
    out: Path = common.RESULTS  # where the numbers and the plot go


def train(options: Options, game: str, agent: str) -> Path:
    """Trains all seeds of an agent, or goes on with them, and returns the folder of the run."""
    folder = options.runs / game / agent.replace(", ", "-")
    resume = (folder / "checkpoint").exists()
    dqn.main(
        [
            *("--env", f"{game}-MinAtar", *AGENTS[agent], "--out", str(folder)),
            *("--steps", str(options.steps), "--seeds", str(options.seeds)),
            *("--warmup", str(options.warmup), "--hidden", str(options.hidden)),
            *("--num-envs", "16", "--batch-size", "32", "--capacity", "100_000"),
            *("--lr", "1e-3", "--final-lr", "1e-4", "--exploration", "0.3"),
            *(("--resume",) if resume else ()),
        ]
    )
    return folder


def rows(game: str, agent: str, folder: Path) -> list[dict[str, Any]]:
    """Returns one row for each seed and each tenth of a run: the mean return while training."""
    run: Any = _run.Run(None, folder)
    steps, returns = run.logged("step"), run.logged("return")
    tenths = zip(
        np.array_split(steps, min(10, len(steps))),
        np.array_split(returns, min(10, len(steps))),
        strict=True,
    )
    return [
        {"game": game, "agent": agent, "seed": seed, "step": int(step[-1]), "return": f"{mean:.3f}"}
        for step, part in tenths
        for seed, mean in enumerate(np.ma.masked_invalid(part).mean(axis=0).filled(np.nan))
    ]


def draw(path: Path) -> None:
    """Draws the mean return of each agent over steps, with 95 % intervals over the seeds."""
    table = common.read(path)
    games = list(dict.fromkeys(row["game"] for row in table))
    figure, panels = common.figure(len(games))
    for panel, game in zip(panels, games, strict=True):
        for agent in AGENTS:
            mine = [row for row in table if (row["game"], row["agent"]) == (game, agent)]
            if mine:
                curve = common.group(mine, "step", "return")
                common.draw_mean(panel, curve, agent, list(AGENTS).index(agent))
        panel.set(title=f"{game}-MinAtar", xlabel="environment steps")
    panels[0].set_ylabel("return per episode while training")
    panels[0].legend(loc="upper left")
    common.save(figure, path)


def table(path: Path) -> str:
    """Returns the mean returns of the last tenth of each run with 95 % intervals, in markdown."""
    found = common.read(path)
    rows: list[list[str]] = []
    for game, agent in dict.fromkeys((row["game"], row["agent"]) for row in found):
        mine = [row for row in found if (row["game"], row["agent"]) == (game, agent)]
        step, last = list(common.group(mine, "step", "return").items())[-1]
        rows.append([game, agent, f"{step:,.0f}", f"{len(last)}", common.spread(last)])
    return common.markdown(["game", "replay", "steps", "seeds", "return"], rows)


def main(options: Options) -> None:
    """Trains what is not trained yet, then writes the numbers and the plot."""
    found, path = list[dict[str, Any]](), options.out / "minatar.csv"
    for game in options.games:
        for agent in AGENTS:
            found += rows(game, agent, train(options, game, agent))
            draw(common.write(path, found))
    print(table(path))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
