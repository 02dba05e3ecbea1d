"""DQN on two games of MinAtar with three ways to replay: ``python -m experiments.minatar``.

Trains ``examples/dqn.py`` once for each game and way to replay, with all seeds at once, and
goes on from the checkpoint of a run that was interrupted. A larger ``--steps`` trains finished runs
for longer.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import NDArray

import dqn
from experiments import common

GAMES = ("Breakout", "SpaceInvaders")
AGENTS = {
    "uniform": ("--sampler", "uniform"),
    "prioritized": ("--sampler", "prioritized"),
    "3-step, uniform": ("--sampler", "uniform", "--n-step", "3"),
}
# The returns of DQN after so many frames, read off the blue curves of img/learning_curves.gif in
# github.com/kenjyoung/MinAtar at 4241f24 (Young and Tian, 2019), means of 30 runs.
PUBLISHED = {
    "Breakout": {50_000: 1.2, 100_000: 4.5, 200_000: 6.2, 500_000: 8.3, 1_000_000: 9.3},
    "SpaceInvaders": {50_000: 10, 100_000: 19, 200_000: 21, 300_000: 23, 1_000_000: 33},
}
PUBLISHED_END = {"Breakout": 10, "SpaceInvaders": 44}  # after 5 million frames


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


def train(options: Options, game: str, agent: str) -> list[dict[str, Any]]:
    """Trains all seeds of an agent, or goes on with them; returns its rows."""
    words = [
        *("--env", f"{game}-MinAtar", *AGENTS[agent], "--steps", options.steps),
        *("--seeds", options.seeds, "--warmup", options.warmup, "--hidden", options.hidden),
        *("--num-envs", 16, "--batch-size", 32, "--capacity", 100_000),
        *("--lr", 1e-3, "--final-lr", 1e-4, "--exploration", 0.3),
    ]
    run = common.train(dqn.main, words, options.runs / game / agent.replace(", ", "-"))
    return rows(game, agent, run.logged("step"), run.logged("return"))


def rows(game: str, agent: str, steps: NDArray[Any], returns: NDArray[Any]) -> list[dict[str, Any]]:
    """Returns one row for each seed and each tenth of a run: the mean return while training.

    Args:
        game: The name of the game.
        agent: The name of the agent.
        steps: Numbers of steps, ``[P]``.
        returns: Mean returns of the episodes that ended since the last of these, or NaN;
            ``[P, seeds]``.
    """
    parts = min(10, len(steps))
    return [
        {"game": game, "agent": agent, "seed": seed, "step": int(step[-1]), "return": f"{mean:.3f}"}
        for step, part in zip(
            np.array_split(steps, parts), np.array_split(returns, parts), strict=True
        )
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
        last = max(int(row["step"]) for row in table)
        known = {step: value for step, value in PUBLISHED[game].items() if step <= 1.05 * last}
        label = "DQN of Young and Tian, read off"
        panel.plot(known.keys(), known.values(), "x:", color="black", label=label)
        panel.set(title=f"{game}-MinAtar", xlabel="environment steps (frames)")
    panels[0].set_ylabel("return per episode while training")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    common.save(figure, path)


def table(path: Path) -> str:
    """Returns the mean returns of the last tenth of each run with 95 % intervals, in markdown."""
    found = common.read(path)
    rows: list[list[str]] = []
    for game, agent in dict.fromkeys((row["game"], row["agent"]) for row in found):
        mine = [row for row in found if (row["game"], row["agent"]) == (game, agent)]
        step, last = list(common.group(mine, "step", "return").items())[-1]
        nearest = min(PUBLISHED[game], key=lambda frames: abs(frames - step))
        published = [f"{PUBLISHED[game][nearest]} at {nearest:,}", f"{PUBLISHED_END[game]}"]
        rows.append([game, agent, f"{step:,.0f}", f"{len(last)}", common.spread(last), *published])
    header = ["replay", "steps", "seeds", "return", "published DQN", "published at 5 million"]
    return common.markdown(["game", *header], rows)


def main(options: Options) -> None:
    """Trains what is not trained yet, then writes the numbers and the plot."""
    found, path = list[dict[str, Any]](), options.out / "minatar.csv"
    for game in options.games:
        for agent in AGENTS:
            found += train(options, game, agent)
            draw(common.write(path, found))
    print(table(path))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
