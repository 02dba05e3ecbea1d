"""Prioritized levels against uniform ones, in random mazes: ``python -m experiments.levels``.

Trains ``examples/levels.py``, all seeds of both agents at once, and goes on from the checkpoint
of a run that was interrupted. All other options are the example's own.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import tyro

import levels
from experiments import common

AGENTS = tuple(levels.AGENTS)
MEASURES = {
    "solved": "share of held-out mazes solved",
    "detours": "share of the buffer that needs a detour",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    steps: int = 400_000  # environment steps of each seed
    seeds: int = 8  # seeds of each agent, all trained at once
    size: int = 6  # width and height of a maze
    runs: Path = Path("runs/levels_n")  # where the run and its checkpoint are kept
    out: Path = common.RESULTS  # where the numbers and the plot go


def train(options: Options) -> list[dict[str, Any]]:
    """Trains both agents, or goes on with them; returns their measures over steps, by seed."""
    names = ("steps", "seeds", "size")
    words = [word for name in names for word in (f"--{name}", getattr(options, name))]
    run = common.train(levels.main, words, options.runs)
    logged = {(name, agent): run.logged(f"{name}/{agent}") for name in MEASURES for agent in AGENTS}
    return [
        {"agent": agent, "seed": seed, "step": int(step)}
        | {name: f"{logged[name, agent][i, seed]:.4f}" for name in MEASURES}
        for agent in AGENTS
        for i, step in enumerate(run.logged("step"))
        for seed in range(options.seeds)
    ]


def draw(path: Path) -> None:
    """Draws both measures of both agents over steps, with 95 % intervals over the seeds."""
    found = common.read(path)
    figure, panels = common.figure(len(MEASURES))
    for panel, (measure, label) in zip(panels, MEASURES.items(), strict=True):
        for number, agent in enumerate(AGENTS):
            mine = [row for row in found if row["agent"] == agent]
            common.draw_mean(panel, common.group(mine, "step", measure), agent, number)
        panel.set(xlabel="environment steps", ylabel=label)
    panels[0].legend(loc="lower right")
    common.save(figure, path)


def table(path: Path) -> str:
    """Returns the means of both measures in parts of the runs with 95 % intervals, in markdown.

    The last row is the difference between the agents, seed by seed.
    """
    found = common.read(path)
    solved, detours = (common.curves(found, AGENTS, name) for name in MEASURES)
    count = len(solved["uniform"])
    parts = {
        "solved in the first third": slice(count // 3),
        "in the second third": slice(count // 3, 2 * count // 3),
        "in the last tenth": slice(-math.ceil(count / 10), None),
    }
    late = {"need a detour": parts["in the last tenth"]}
    rows = zip(
        common.stages(solved, parts, "z.3f"), common.stages(detours, late, "z.3f"), strict=True
    )
    return common.markdown(["mazes", *parts, *late], [row + more[1:] for row, more in rows])


def main(options: Options) -> None:
    """Trains what is not trained yet, then writes the numbers and the plot."""
    path = common.write(options.out / "levels.csv", train(options))
    draw(path)
    print(table(path))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
