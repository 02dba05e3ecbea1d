"""GFlowNets with and without replay on a hypergrid: ``python -m jaxbuf.examples.gflownet --help``.

Rollouts, adds, draws and updates are one ``lax.scan``, which ``vmap`` runs for every seed.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from numpy.typing import NDArray

import jaxbuf
from jaxbuf.examples import _cli, _report
from jaxbuf.examples._gflownet import BUFFERS, NEVER, Agent, GFlowNet, Options, TrainState
from jaxbuf.examples._run_folder import SAVES, RunError, RunFolder, save_is_due

DESCRIPTION = """Train GFlowNets on a hypergrid with several replay buffers, to compare them.

A GFlowNet learns to stop at each point of the grid with a probability proportional to its reward;
nearly all of that lies near the corners, with next to nothing between them. Each update trains on
as many trajectories as any other, but with a buffer a part of them are replayed:
  none     all are fresh
  fifo     from the latest terminal states
  reward   from those of highest reward, each as often as it was found
  diverse  from distinct ones of highest reward, in proportion to it

Ends with a table (medians over the seeds, and their range) and pictures. Takes a minute or two on
two CPU cores.

  --buffer none,diverse           only some of the buffers
  --dims 2 --height 16            another grid
  --resume --steps 4000           train a finished run for longer"""
EXAMPLE = "gflownet"
CHUNKS = 50


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Which buffers to compare, and what to train with each.

    Raises:
        ValueError: When two values do not go together; the message says what to change.
    """

    buffer: tuple[str, ...] = _cli.option(
        BUFFERS, _cli.choices(BUFFERS), "which buffers, of none, fifo, reward and diverse"
    )
    seeds: int = _cli.option(4, _cli.integer(1), "how many seeds to train at once")

    @property
    def always_fresh(self) -> bool:
        """Whether nothing is replayed."""
        return self.buffer == ("none",)


class Outcome(NamedTuple):
    """What training with one buffer came to.

    Attributes:
        updates: Updates of each seed after each chunk, ``[P]``.
        l1: Distance to the target then, the sum of absolute differences, from 0 to 2;
            ``[P, seeds]``.
        learned: Where the policies stop in the end, ``[seeds, N]``.
        found: At which fresh trajectory each mode was first reached, inf if it was not;
            ``[seeds, M]``.
        fresh: Fresh trajectories of each seed.
        seconds: For each chunk since the program began; the first is compiled in its time.
    """

    updates: NDArray[Any]
    l1: NDArray[Any]
    learned: NDArray[Any]
    found: NDArray[Any]
    fresh: int
    seconds: list[float]

    def modes(self, fresh: NDArray[Any]) -> NDArray[Any]:
        """Modes found by so many fresh trajectories, ``[P, seeds]``; NaN past the end."""
        count = np.sum(self.found[None] <= fresh[:, None, None], axis=-1)
        return np.where(fresh[:, None] <= self.fresh, count, np.nan)

    @property
    def to_all(self) -> NDArray[Any]:
        """Fresh trajectories until all modes were found, ``[seeds]``."""
        return self.found.max(axis=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run this example from the command line and return its exit status."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    folder = RunFolder(given.pop("out"), EXAMPLE)
    resume: bool = given.pop("resume")
    try:
        record = folder.go_on(given) if resume else None
        config = Config(**(record["config"] if record else given))
        if not resume:
            folder.begin()
    except (RunError, ValueError) as error:
        parser.error(str(error))
    began = time.perf_counter()
    try:
        outcomes = _train(config, folder, record)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {folder.how_to_go_on('update')}", file=sys.stderr)
        return 130
    print(_table(outcomes, config))
    print(compare(outcomes, time.perf_counter() - began))
    for name, picture in _draw(folder.path, outcomes, config).items():
        print(f"{name:<15} {picture}")
    print(f"checkpoint      {folder.checkpoints}")
    return 0


def _parser() -> _cli.Parser:
    files = f"""\
  modes.png      modes found over fresh trajectories, of every seed with every buffer
  distance.png   L1 distance to the target over updates
  marginals.png  the first two coordinates where trajectories stop: the target and what was learned
  checkpoint/    the whole training state, {SAVES} times in a run, the latest kept
  run.json       which example this folder belongs to"""
    return _cli.example_parser(EXAMPLE, DESCRIPTION, files, Config, amount="steps")


def _train(config: Config, folder: RunFolder, record: dict[str, Any] | None) -> dict[str, Outcome]:
    """One outcome for each buffer, chunk by chunk in turn, so that their speeds compare."""
    # On the device, as what a checkpoint holds is: so a resumed run is the same program.
    keys = jax.device_put(
        jnp.stack([jax.random.key(config.seed + i) for i in range(config.seeds)]), jax.devices()[0]
    )
    target = np.asarray(config.grid.target())
    length = _length(config)
    done: int = record["step"] if record else 0
    chunks = -(-(config.steps - done) // length)
    agents = {kind: Agent(config, kind) for kind in config.buffer}
    stops = _stopping_distribution(GFlowNet(config.grid, config.hidden))
    rows = config.seeds * len(agents)
    updates: list[int] = record["updates"] if record else []
    l1: dict[str, list[list[float]]] = record["l1"] if record else {kind: [] for kind in agents}
    with _report.Progress((done + chunks * length) * rows, unit=" updates") as progress:
        progress.phase("compiling")
        like = {kind: jax.eval_shape(_init(agent), keys) for kind, agent in agents.items()}
        states: dict[str, TrainState] = (
            folder.load_state(like)
            if record
            else {kind: _init(agent)(keys) for kind, agent in agents.items()}
        )
        progress.advance(done * rows, np.nan)
        seconds: dict[str, list[float]] = {kind: [] for kind in agents}
        modes: dict[str, float] = {}
        for i in range(chunks):
            for kind, agent in agents.items():
                began = time.perf_counter()
                states[kind] = jax.block_until_ready(_chunk(agent, length)(states[kind]))
                seconds[kind].append(time.perf_counter() - began)
                learned = np.asarray(stops(states[kind].params))
                l1[kind].append(np.abs(learned - target).sum(axis=1).tolist())
                modes[kind] = np.sum(np.asarray(states[kind].found) < NEVER, axis=1).mean()
                progress.advance(length * config.seeds, np.nan)
            progress.phase("modes " + ", ".join(f"{kind} {n:.1f}" for kind, n in modes.items()))
            done += length
            updates.append(done)
            if save_is_due(i, chunks):
                config_then = dataclasses.asdict(config)
                now = {"step": done, "config": config_then, "updates": updates, "l1": l1}
                folder.save(done, states, now)
    found = {kind: np.asarray(state.found, np.float64) for kind, state in states.items()}
    return {
        kind: Outcome(
            updates=np.asarray(updates),
            l1=np.asarray(l1[kind]),
            learned=np.asarray(stops(states[kind].params)),
            found=np.where(found[kind] < NEVER, found[kind], np.inf),
            fresh=done * agent.fresh,
            seconds=seconds[kind],
        )
        for kind, agent in agents.items()
    }


def _length(config: Config) -> int:
    """Updates in a chunk."""
    return -(-config.steps // CHUNKS)


# All are kept, so that an agent that is run again in the same process is not compiled again.
@functools.cache
def _init(agent: Agent) -> Callable[[PRNGKeyArray], TrainState]:
    return jax.jit(jax.vmap(agent.init))


@functools.cache
def _chunk(agent: Agent, length: int) -> Callable[[TrainState], TrainState]:
    chunk = jax.vmap(lambda state: agent.train(state, length))
    # Donated, so that the buffers are updated where they are.
    return jax.jit(chunk, donate_argnums=0, compiler_options=jaxbuf.compiler_options())


@functools.cache
def _stopping_distribution(gflownet: GFlowNet) -> Callable[[Any], Float[Array, "S N"]]:
    return jax.jit(jax.vmap(gflownet.stopping_distribution))


def _table(outcomes: dict[str, Outcome], config: Config) -> str:
    length = _length(config)
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
    return _report.table(header, rows)


def _median(values: NDArray[Any], form: str) -> str:
    """The median over seeds, and in brackets their range."""
    median, least, most = (
        format(value, form) if np.isfinite(value) else "never"
        for value in (np.median(values), values.min(), values.max())
    )
    return median if least == most else f"{median} ({least} to {most})"


def compare(outcomes: dict[str, Outcome], seconds: float) -> str:
    """How the buffers compare with none, in words; ``seconds`` is what all took."""
    lines = [f"Trajectories to all modes are fresh ones; {seconds:.0f} s in all."]
    without = np.median(outcomes["none"].to_all) if "none" in outcomes else np.inf
    for kind, outcome in outcomes.items():
        needed = np.median(outcome.to_all)
        if kind != "none" and np.isfinite(needed) and np.isfinite(without):
            share = f"{needed / without:.0%}"
            lines.append(f"{kind:<8} finds all modes in {share} of the trajectories of none.")
    return "\n".join(lines)


def _draw(folder: Path, outcomes: dict[str, Outcome], config: Config) -> dict[str, Path]:
    """Write the pictures; returns where each is."""
    grid = config.grid
    title = f"hypergrid, {config.dims} × {config.height}"
    pictures = {name: folder / f"{name}.png" for name in ("modes", "distance", "marginals")}
    most = max(outcome.fresh for outcome in outcomes.values())
    fresh = np.unique(np.linspace(0, most, 401).astype(np.int64))
    _report.plot_groups(
        pictures["modes"],
        fresh,
        {kind: outcome.modes(fresh) for kind, outcome in outcomes.items()},
        title=title,
        xlabel="fresh trajectories per seed",
        ylabel=f"modes found, of {grid.num_modes}",
    )
    _report.plot_groups(
        pictures["distance"],
        next(iter(outcomes.values())).updates,
        {kind: outcome.l1 for kind, outcome in outcomes.items()},
        title=title,
        xlabel="updates per seed",
        ylabel="L1 distance to the target",
    )
    marginals = {"target": np.asarray(grid.target())}
    marginals |= {kind: outcome.learned.mean(axis=0) for kind, outcome in outcomes.items()}
    _plot_marginals(pictures["marginals"], marginals, config)
    return pictures


def _plot_marginals(path: Path, distributions: dict[str, NDArray[Any]], config: Config) -> None:
    """Draw the joint distribution of the first two coordinates, side by side in one scale."""
    width = config.height if config.dims > 1 else 1
    panels = {
        name: distribution.reshape(config.height, width, -1).sum(axis=-1).T
        for name, distribution in distributions.items()
    }
    figure = Figure(figsize=(2.2 * len(panels) + 1.0, 2.8), layout="constrained")
    axes: Any = figure.subplots(1, len(panels), sharey=True)
    most = max(panel.max() for panel in panels.values())
    image: Any = None
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(panel, origin="lower", vmin=0.0, vmax=most)
        axis.set(title=name, xlabel="first coordinate")
    if config.dims > 1:
        axes[0].set_ylabel("second coordinate")
    figure.colorbar(image, ax=axes, label="probability")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
