"""GFlowNets on a hypergrid with four ways to replay: ``python -m experiments.hypergrid``.

Trains ``examples/gflownet.py``, on the grid of Bengio et al. (2021), with no replay, the latest
terminal states, those of highest reward, and distinct ones of highest reward. All updates train on
the same number of trajectories, half of which are replayed if there is a buffer.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any, get_args

import tyro

import gflownet
from experiments import common
from gflownet import Buffer

KINDS = get_args(Buffer)
NAMES = {
    "none": "no replay",
    "fifo": "latest states",
    "reward": "highest rewards",
    "diverse": "distinct high rewards",
}


MEASURES = {"l1": "L1 distance to the target, 0 to 2", "modes": "modes found"}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    steps: int = 2_000  # updates of each seed
    seeds: int = 6  # seeds of each buffer, all trained at once
    dims: int = 4  # dimensions of the grid
    height: int = 8  # points along each
    background: float = 1e-3  # reward between the corners
    runs: Path = Path("runs/hypergrid")  # where the run and its checkpoint are kept
    out: Path = common.RESULTS  # where the numbers and the plot go


def train(options: Options) -> list[dict[str, Any]]:
    """Trains with all buffers, or goes on with it; returns L1 and modes over updates, by seed."""
    names = ("steps", "seeds", "dims", "height", "background")
    words = [word for name in names for word in (f"--{name}", getattr(options, name))]
    run = common.train(gflownet.main, words, options.runs)
    step = run.logged("step")
    # A tenth of the points is enough for a curve.
    kept = sorted({0, *range(4, len(step), 5), len(step) - 1})
    return [
        {
            "buffer": kind,
            "updates": int(step[i]),
            "seed": seed,
            "l1": f"{run.logged(f'{kind}/l1')[i, seed]:.4f}",
            "modes": int(run.logged(f"{kind}/modes")[i, seed]),
        }
        for kind in KINDS
        for i in kept
        for seed in range(options.seeds)
    ]


def draw(path: Path) -> None:
    """Draws the mean L1 distance and the mean number of modes of each buffer over updates."""
    table = common.read(path)
    figure, panels = common.figure(2)
    for panel, (column, label) in zip(panels, MEASURES.items(), strict=True):
        for number, kind in enumerate(KINDS):
            mine = [row for row in table if row["buffer"] == kind]
            curve = common.group(mine, "updates", column)
            common.draw_mean(panel, curve, NAMES[kind], number)
        panel.set(xlabel="updates", ylabel=label)
    panels[1].legend(loc="lower right")
    common.save(figure, path)


def table(path: Path) -> str:
    """Returns L1 and modes a third of the way and at the end, with intervals, in markdown."""
    found = common.read(path)
    steps = list(common.group(found, "updates", "l1"))
    times = (steps[len(steps) // 3], steps[-1])
    rows: list[list[str]] = []
    for kind in KINDS:
        mine = [row for row in found if row["buffer"] == kind]
        l1, modes = (common.group(mine, "updates", name) for name in MEASURES)
        cells = [(l1, ".2f"), (modes, ".1f")]
        rows.append([NAMES[kind], *(common.spread(c[t], form) for t in times for c, form in cells)])
    header = [f"{name} at {time:,.0f}" for time in times for name in ("L1", "modes")]
    return common.markdown(["buffer", *header], rows)


def main(options: Options) -> None:
    """Trains what is not trained yet, then writes the numbers and the plot."""
    path = common.write(options.out / "hypergrid.csv", train(options))
    draw(path)
    print(table(path))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
