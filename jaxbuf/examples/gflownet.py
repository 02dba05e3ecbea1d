"""Train GFlowNets on a hypergrid with several replay buffers, to compare them.

A GFlowNet learns to stop at each point of the grid with a probability proportional to its reward.
Nearly all reward is near the corners, with hardly any in between. All updates train on the same
number of trajectories, but with a buffer some of them are replayed:
  none     all are fresh
  fifo     from the latest terminal states
  reward   from the states of highest reward, each as often as it was found
  diverse  likewise in proportion to it, and once the buffer is full only new states are added

Takes a minute or two on two CPU cores. Some things to try:
  --buffer none diverse           only some of the buffers
  --dims 2 --height 16            another grid
  --resume --steps 4000           train a finished run for longer

Ends with a table (medians over the seeds, and their range). Writes, in runs/gflownet or where --out
says:
  modes.png           modes found over fresh trajectories, of every seed with every buffer
  distance.png        L1 distance to the target over updates
  marginals.png       the first two coordinates where trajectories stop: target and learned
  log.csv             modes and distances as numbers, fifty times in a run
"""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree
from matplotlib.figure import Figure

import jaxbuf
from jaxbuf.examples import _run
from jaxbuf.examples._gflownet import NEVER, Agent, Buffer, GFlowNet, Options, TrainState

CHUNKS = 50


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Options of the training, and the buffers to compare."""

    buffer: tuple[Buffer, ...] = get_args(Buffer)  # which buffers
    seeds: int = 4  # how many seeds to train at once

    def __post_init__(self) -> None:
        super().__post_init__()
        _run.check(self, 1, "seeds")
        if not 0 < len(self.buffer) == len(set(self.buffer)):
            raise ValueError(f"--buffer is {' '.join(self.buffer)}; name each once")

    @property
    def always_fresh(self) -> bool:
        """True if no trajectories are replayed."""
        return self.buffer == ("none",)


class Outcome(NamedTuple):
    """The result of training with one buffer."""

    updates: Float[np.ndarray, " P"]  # of each seed after each chunk
    l1: Float[np.ndarray, "P S"]  # sum of absolute differences to the target then, from 0 to 2
    learned: Float[np.ndarray, "S N"]  # distributions of terminal states in the end
    found: Float[np.ndarray, "S M"]  # the fresh trajectory that first reached each mode, or inf
    fresh: int  # number of fresh trajectories of each seed
    seconds: list[float]  # duration of each chunk now; that of the first includes compilation

    def modes(self, fresh: Int[np.ndarray, " P"]) -> Float[np.ndarray, "P S"]:
        """Returns modes found within ``fresh`` trajectories; NaN past the end."""
        count = np.sum(self.found[None] <= fresh[:, None, None], axis=-1)
        return np.where(fresh[:, None] <= self.fresh, count, np.nan)

    @property
    def to_all(self) -> Float[np.ndarray, " S"]:
        """The number of fresh trajectories until all modes were found."""
        return self.found.max(axis=1)


# Cached, so that an agent that runs again in the same process is not compiled again.
@functools.cache
def programs(agent: Agent, length: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns jitted functions that begin and go on training with one buffer, for all seeds."""
    chunk = jax.vmap(lambda state: agent.train(state, length))
    # Donated, so that the buffers are updated in place.
    chunk = jax.jit(chunk, donate_argnums=0, compiler_options=jaxbuf.compiler_options())
    return jax.jit(jax.vmap(agent.init)), chunk


@functools.cache
def stopping_distribution(gflownet: GFlowNet) -> Callable[[PyTree], Float[Array, "S N"]]:
    """Returns a function that computes the exact terminal distributions of all seeds."""
    return jax.jit(jax.vmap(gflownet.stopping_distribution))


def train(run: _run.Run[Config]) -> None:
    """Trains with all buffers, which take turns chunk by chunk, and prints the results."""
    began = time.perf_counter()
    config = run.config
    length = math.ceil(config.steps / CHUNKS)
    agents = {kind: Agent(config, kind) for kind in config.buffer}
    keys = run.keys
    inits, chunks = zip(*(programs(agent, length) for agent in agents.values()), strict=True)
    states: dict[str, TrainState] = {
        kind: jax.eval_shape(init, keys) if run.resume else init(keys)
        for kind, init in zip(agents, inits, strict=True)
    }
    if run.resume:
        states = run.load(states)
    stops = stopping_distribution(GFlowNet(config.grid, config.hidden))
    target = np.asarray(config.grid.target())
    seconds: dict[str, list[float]] = {kind: [] for kind in agents}

    def next_chunk(
        states: dict[str, TrainState],
    ) -> tuple[dict[str, TrainState], dict[str, PyTree], str]:
        states, metrics = dict(states), dict[str, PyTree]()
        for kind, chunk in zip(agents, chunks, strict=True):
            started = time.perf_counter()
            states[kind] = jax.block_until_ready(chunk(states[kind]))
            seconds[kind].append(time.perf_counter() - started)
            l1 = np.abs(np.asarray(stops(states[kind].params)) - target).sum(axis=1)
            modes = np.sum(np.asarray(states[kind].found) < NEVER, axis=1)
            metrics[kind] = {"l1": l1, "modes": modes}
        shown = ", ".join(f"{kind} {m['modes'].mean():.1f}" for kind, m in metrics.items())
        return states, metrics, f"modes {shown}"

    states, _ = run.train(
        states,
        next_chunk,
        done=int(next(iter(states.values())).step[0]),
        until=config.steps,
        size=length,
        unit="updates",
        rows=config.seeds * len(agents),
    )
    found = {kind: np.asarray(state.found, np.float64) for kind, state in states.items()}
    outcomes = {
        kind: Outcome(
            updates=run.logged("step"),
            l1=run.logged(f"{kind}/l1"),
            learned=np.asarray(stops(states[kind].params)),
            found=np.where(found[kind] < NEVER, found[kind], np.inf),
            fresh=int(states[kind].fresh[0]),
            seconds=seconds[kind],
        )
        for kind in agents
    }
    print(_table(outcomes, config))
    print(compare(outcomes, time.perf_counter() - began))
    _draw(run.out, outcomes, config)
    print(f"pictures, log and checkpoint are in {run.out}")


def _table(outcomes: dict[str, Outcome], config: Config) -> str:
    length = math.ceil(config.steps / CHUNKS)
    header = [
        "buffer",
        "L1 distance",
        f"modes of {config.grid.num_modes}",
        "trajectories to all modes",
        "updates to all modes",
        "trajectories/s",
        "time",
    ]
    rows: list[list[str]] = []
    for kind, outcome in outcomes.items():
        # The first chunk is mostly compilation.
        measured = outcome.seconds[1:] or outcome.seconds
        trained = len(measured) * length * config.batch_size * config.seeds
        modes = outcome.modes(np.asarray([outcome.fresh]))[0]
        rows.append(
            [
                kind,
                _median(outcome.l1[-1], ".2f"),
                _median(modes, "g"),
                _median(outcome.to_all, ",.0f"),
                _median(np.ceil(outcome.to_all / Agent(config, kind).fresh), ",.0f"),
                f"{trained / sum(measured):,.0f}" if measured else "-",
                f"{sum(outcome.seconds):.1f} s",
            ]
        )
    return _run.table(header, rows)


def _median(values: Float[np.ndarray, " S"], form: str) -> str:
    """Returns the median over the seeds with a finite number, their range, and how many they are.

    Example:
        >>> _median(np.array([3.0, 1.0, 2.0]), "g"), _median(np.array([3.0, np.inf]), "g")
        ('2 (1 to 3)', '3 in 1 of 2 seeds')
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return "never"
    median, least, most = (
        format(value, form) for value in (np.median(finite), finite.min(), finite.max())
    )
    text = median if least == most else f"{median} ({least} to {most})"
    return text if len(finite) == len(values) else f"{text} in {len(finite)} of {len(values)} seeds"


def compare(outcomes: dict[str, Outcome], seconds: float) -> str:
    """Returns a comparison of the buffers with none, in words; the run took ``seconds``."""
    training = sum(sum(outcome.seconds) for outcome in outcomes.values())
    lines = [
        f"Trajectories to all modes are fresh ones. The run took {seconds:.1f} s: {training:.1f} s "
        "for training, whose parts are above, and the rest for setting up, L1 distances and files."
    ]
    without = outcomes["none"].to_all if "none" in outcomes else np.inf
    for kind, outcome in outcomes.items():
        needed = outcome.to_all
        # A median over the seeds that found them all would compare some of them with all.
        if kind != "none" and np.isfinite(needed).all() and np.isfinite(without).all():
            share = f"{np.median(needed) / np.median(without):.0%}"
            lines.append(f"{kind:<8} finds all modes in {share} of the trajectories of none.")
    return "\n".join(lines)


def _draw(folder: Path, outcomes: dict[str, Outcome], config: Config) -> None:
    """Writes the figures."""
    grid = config.grid
    title = f"hypergrid, {config.dims} × {config.height}"
    most = max(outcome.fresh for outcome in outcomes.values())
    fresh = np.unique(np.linspace(0, most, 401).astype(np.int64))
    _run.plot(
        folder / "modes.png",
        fresh,
        {kind: outcome.modes(fresh) for kind, outcome in outcomes.items()},
        title=title,
        xlabel="fresh trajectories per seed",
        ylabel=f"modes found, of {grid.num_modes}",
    )
    _run.plot(
        folder / "distance.png",
        next(iter(outcomes.values())).updates,
        {kind: outcome.l1 for kind, outcome in outcomes.items()},
        title=title,
        xlabel="updates per seed",
        ylabel="L1 distance to the target",
    )
    marginals = {"target": np.asarray(grid.target())}
    marginals |= {kind: outcome.learned.mean(axis=0) for kind, outcome in outcomes.items()}
    shape = (config.height, config.height if config.dims > 1 else 1)
    plot_marginals(folder / "marginals.png", marginals, shape)


def plot_marginals(
    path: Path, distributions: Mapping[str, Float[np.ndarray, " N"]], shape: tuple[int, int]
) -> None:
    """Draws the joint distributions of the first two coordinates side by side, in one scale.

    ``distributions`` are by name the probabilities of all points of a grid, ``[N]``, and ``shape``
    the lengths of the first two coordinates; the second is 1 if there is no such coordinate.
    """
    panels = {
        name: distribution.reshape(*shape, -1).sum(axis=-1).T
        for name, distribution in distributions.items()
    }
    figure = Figure(figsize=(2.2 * len(panels) + 1.0, 2.8), layout="constrained")
    axes: Any = figure.subplots(1, len(panels), sharey=True)
    most = max(panel.max() for panel in panels.values())
    image: Any = None
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(panel, origin="lower", vmin=0.0, vmax=most)
        axis.set(title=name, xlabel="first coordinate")
    if shape[1] > 1:
        axes[0].set_ylabel("second coordinate")
    figure.colorbar(image, ax=axes, label="probability")
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status."""
    return _run.main("gflownet", train, Config(), f"{__doc__}{_run.FILES}", argv)


if __name__ == "__main__":
    sys.exit(main())
