"""Bit flipping with and without hindsight: ``python -m experiments.bit_flipping``.

Follows figure 1 of Andrychowicz et al., "Hindsight Experience Replay" (2017), with the agent of
``examples/bit_flipping.py``: the success rate of greedy episodes over the number of bits.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import tyro

import bit_flipping
from experiments import common


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    bits: tuple[int, ...] = (5, 10, 13, 15, 20, 25)  # numbers of bits
    seeds: int = 5  # seeds of each agent, all trained at once
    episodes: int = 8_000  # episodes of each seed
    runs: Path = Path("runs/bit_flipping_n")  # where runs and their checkpoints are kept
    out: Path = common.RESULTS  # where the numbers and the plot go


def train(options: Options, bits: int) -> list[dict[str, Any]]:
    """Trains both agents, or goes on with them; returns the last success rate of each seed."""
    words = ("--bits", bits, "--seeds", options.seeds, "--episodes", options.episodes)
    run = common.train(bit_flipping.main, words, options.runs / str(bits))
    return [
        {"bits": bits, "agent": agent, "seed": seed, "success": f"{rate:.3f}"}
        for agent in bit_flipping.AGENTS
        for seed, rate in enumerate(run.logged(agent)[-1])
    ]


def draw(path: Path) -> None:
    """Draws the mean success rate of both agents over the number of bits."""
    table = common.read(path)
    figure, (panel,) = common.figure(1)
    for number, agent in enumerate(reversed(bit_flipping.AGENTS)):
        mine = [row for row in table if row["agent"] == agent]
        common.draw_mean(panel, common.group(mine, "bits", "success"), agent, number)
    panel.axvline(13, color="black", linestyle=":", label="most bits of DQN in the paper")
    panel.set(xlabel="number of bits", ylabel="success rate of greedy episodes", ylim=(-0.03, 1.03))
    panel.set_xticks(sorted({int(row["bits"]) for row in table}))
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    common.save(figure, path)


def table(path: Path) -> str:
    """Returns the success rates with their 95 % intervals, as a table in markdown."""
    found = common.read(path)
    curves = {
        agent: common.group([r for r in found if r["agent"] == agent], "bits", "success")
        for agent in bit_flipping.AGENTS
    }
    rows = [
        [f"{bits:.0f}", *(common.spread(curve[bits]) for curve in curves.values())]
        for bits in next(iter(curves.values()))
    ]
    return common.markdown(["bits", *curves], rows)


def main(options: Options) -> None:
    """Trains what is not trained yet, then writes the numbers and the plot."""
    rows, path = list[dict[str, Any]](), options.out / "bit_flipping.csv"
    for bits in sorted(options.bits):
        rows += train(options, bits)
        draw(common.write(path, rows))
    print(table(path))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
