"""GFlowNets with and without replay on a hypergrid: ``python -m jaxbuf.examples.gflownet --help``.

The grid is that of Bengio et al. (2021), the loss trajectory balance (Malkin et al., "Trajectory
balance: Improved credit assignment in GFlowNets", 2022) with a uniform backward policy. An update
trains on fresh trajectories and on replayed ones: terminal states from a buffer, walked back to the
origin. Rollouts, adds, draws and updates are one ``lax.scan``, which ``vmap`` runs for every seed.
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
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray
from matplotlib.figure import Figure
from numpy.typing import NDArray

import jaxbuf
from jaxbuf.examples import _cli, _report, _runner
from jaxbuf.examples._hypergrid import HyperGrid, Trajectories, pick
from jaxbuf.examples._lenient import lenient_promotion
from jaxbuf.examples._run_folder import RunError, RunFolder

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
  --dims 2 --height 16            another grid"""
EXAMPLE = "gflownet"
BUFFERS = ("none", "fifo", "reward", "diverse")
CHUNKS = 50
NEVER = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Config:
    """What to train, and how.

    Raises:
        ValueError: When two values do not go together; the message says what to change.
    """

    buffer: tuple[str, ...] = _cli.option(
        BUFFERS, _cli.choices(BUFFERS), "which buffers, of none, fifo, reward and diverse"
    )
    dims: int = _cli.option(4, _cli.integer(1, 20), "dimensions of the grid")
    height: int = _cli.option(8, _cli.integer(1, 2**20), "points along each")
    background: float = _cli.option(
        1e-3, _cli.number(0, above=True), "reward between the corners; less is harder"
    )
    seeds: int = _cli.option(4, _cli.integer(1), "how many seeds to train at once")
    seed: int = _cli.option(0, _cli.integer(0), "the first of them")
    steps: int = _cli.option(2_000, _cli.integer(1, 10**6), "updates of each seed")
    batch_size: int = _cli.option(16, _cli.integer(1, 1000), "trajectories in an update")
    replay_ratio: float = _cli.option(
        0.5, _cli.number(0, 1), "share of them that is replayed, if there is a buffer"
    )
    capacity: int = _cli.option(300, _cli.integer(1, 2**20), "terminal states in a buffer")
    temperature: float = _cli.option(
        1.0, _cli.number(0, above=True), "of drawing from the diverse buffer by log reward"
    )
    exploration: float = _cli.option(0.05, _cli.number(0, 1), "share of random actions")
    lr: float = _cli.option(1e-3, _cli.number(0, above=True), "learning rate of the policy")
    log_z_lr: float = _cli.option(
        0.1, _cli.number(0, above=True), "learning rate of the log of the total reward"
    )
    hidden: int = _cli.option(64, _cli.integer(1), "width of both hidden layers")

    def __post_init__(self) -> None:
        _ = self.grid
        if self.buffer == ("none",):
            return
        if not 0 < self.replayed < self.batch_size:
            raise ValueError(
                f"of --batch-size {self.batch_size}, --replay-ratio {self.replay_ratio} leaves "
                f"{self.replayed} to be replayed; choose a ratio that leaves at least one fresh "
                "and one replayed, or --buffer none"
            )
        if self.capacity < self.replayed:
            raise ValueError(
                f"a buffer of --capacity {self.capacity} never holds the {self.replayed} that are "
                "replayed in an update; make the capacity at least as large"
            )

    @functools.cached_property
    def grid(self) -> HyperGrid:
        """What to learn."""
        return HyperGrid(self.dims, self.height, self.background)

    @property
    def replayed(self) -> int:
        """Trajectories of an update that are replayed."""
        return round(self.batch_size * self.replay_ratio)


class Policy(nn.Module):
    """Logits of all actions, from the coordinates of a state.

    Attributes:
        height: H.
        num_actions: A.
        hidden: Width of both hidden layers.
    """

    height: int
    num_actions: int
    hidden: int

    @nn.compact
    def __call__(self, states: Int[Array, "... D"]) -> Float[Array, "... A"]:
        """All the same at first."""
        x = jax.nn.one_hot(states, self.height, dtype=jnp.float32)
        x = x.reshape(*states.shape[:-1], -1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.num_actions, kernel_init=nn.initializers.zeros)(x)


@dataclasses.dataclass(frozen=True)
class GFlowNet:
    """A policy on a grid, and how far it is from stopping in proportion to reward.

    Parameters are ``{"policy": those of the network, "log_z": the log of the total reward}``.

    Args:
        grid: Where it goes.
        hidden: Width of both hidden layers.
    """

    grid: HyperGrid
    hidden: int

    @functools.cached_property
    def network(self) -> Policy:
        """The forward policy."""
        return Policy(self.grid.height, self.grid.num_actions, self.hidden)

    def init(self, key: PRNGKeyArray) -> Any:
        """Parameters of a policy that takes each legal action with the same probability."""
        origin = jnp.zeros(self.grid.dims, jnp.int32)
        return {"policy": self.network.init(key, origin), "log_z": jnp.float32(0)}

    def log_policy(self, params: Any, states: Int[Array, "... D"]) -> Float[Array, "... A"]:
        """Log probability of each action; −inf where it is illegal."""
        logits: Any = self.network.apply(params["policy"], states)
        return jax.nn.log_softmax(jnp.where(self.grid.legal(states), logits, -jnp.inf))

    def rollout(
        self, params: Any, key: PRNGKeyArray, count: int, exploration: float
    ) -> Trajectories:
        """``count`` trajectories, padded, with a share ``exploration`` of random actions."""
        grid = self.grid

        def forward(carry: tuple[Array, Array], point: Array) -> tuple[tuple[Array, Array], Any]:
            state, running = carry
            mass = jnp.exp(self.log_policy(params, state))
            legal = grid.legal(state).astype(jnp.float32)
            anything = legal / jnp.sum(legal, axis=-1, keepdims=True)
            action = pick(point, mass + exploration * (anything - mass))
            action = jnp.where(running, action, grid.dims)
            after = (grid.step(state, action), running & (action < grid.dims))
            return after, (state, action, running)

        start = (jnp.zeros((count, grid.dims), jnp.int32), jnp.ones(count, jnp.bool_))
        points = jax.random.uniform(key, (grid.max_length, count))
        _, (states, actions, running) = jax.lax.scan(forward, start, points)
        lengths = jnp.sum(running, axis=0, dtype=jnp.int32)
        return Trajectories(jnp.swapaxes(states, 0, 1), actions.T, lengths)

    def imbalance(self, params: Any, trajectories: Trajectories) -> Float[Array, " B"]:
        """By how much the log flow along each trajectory misses balance; its square is the loss."""
        log_policy = self.log_policy(params, trajectories.states)
        taken = jnp.take_along_axis(log_policy, trajectories.actions[..., None], axis=-1)[..., 0]
        log_forward = jnp.sum(jnp.where(trajectories.mask, taken, 0.0), axis=1)
        # The padding repeats the state in which a trajectory stopped.
        log_reward = self.grid.log_reward(trajectories.states[:, -1])
        log_backward = self.grid.log_backward(trajectories)
        return params["log_z"] + log_forward - log_reward - log_backward

    def stopping_distribution(self, params: Any) -> Float[Array, " N"]:
        """Where the policy stops, exactly."""
        return self.grid.stopping_distribution(self.log_policy(params, self.grid.states()))


class TrainState(struct.PyTreeNode):
    """Everything that training changes.

    Attributes:
        params: Parameters of the GFlowNet.
        opt_state: State of the optimizer.
        buffer: Terminal states, or None.
        found: At which fresh trajectory each mode was first reached, ``[M]``; else ``NEVER``.
        fresh: Fresh trajectories so far, scalar.
        key: Source of all later randomness.
    """

    params: Any
    opt_state: optax.OptState
    buffer: jaxbuf.ItemBuffer | None
    found: Int[Array, " M"]
    fresh: Int[Array, ""]
    key: PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class Agent:
    """Training with one kind of buffer: pure functions of a ``TrainState``.

    Args:
        config: All settings.
        kind: Which of its buffers.
    """

    config: Config
    kind: str

    @functools.cached_property
    def gflownet(self) -> GFlowNet:
        """What is trained."""
        return GFlowNet(self.config.grid, self.config.hidden)

    @property
    def fresh(self) -> int:
        """Fresh trajectories in an update."""
        return self.config.batch_size - (0 if self.kind == "none" else self.config.replayed)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam, much faster for ``log_z`` than for the policy."""
        rates = {"policy": self.config.lr, "log_z": self.config.log_z_lr}
        return optax.multi_transform(
            {name: optax.adam(rate) for name, rate in rates.items()}, {name: name for name in rates}
        )

    def init(self, key: PRNGKeyArray) -> TrainState:
        """A new policy and an empty buffer."""
        key, params_key = jax.random.split(key)
        params = self.gflownet.init(params_key)
        return TrainState(
            params=params,
            opt_state=self.optimizer.init(params),
            buffer=self.new_buffer(),
            found=jnp.full(self.config.grid.num_modes, NEVER, jnp.int32),
            fresh=jnp.int32(0),
            key=key,
        )

    def new_buffer(self) -> jaxbuf.ItemBuffer | None:
        """An empty buffer of terminal states."""
        capacity = self.config.capacity
        state = jax.ShapeDtypeStruct((self.config.dims,), jnp.int32)
        if self.kind == "fifo":
            return jaxbuf.terminating_states(state, capacity)
        if self.kind == "reward":
            return jaxbuf.reward_prioritized(state, capacity)
        if self.kind == "diverse":
            return jaxbuf.diverse_reward_prioritized(
                state, capacity, temperature=self.config.temperature
            )
        return None

    def train(self, state: TrainState, iterations: int) -> TrainState:
        """Update ``iterations`` times, all in one ``lax.scan``."""

        def iteration(state: TrainState, _: None) -> tuple[TrainState, None]:
            return self.update(state), None

        return jax.lax.scan(iteration, state, length=iterations)[0]

    def update(self, state: TrainState) -> TrainState:
        """Roll out, remember, replay and learn."""
        config, grid = self.config, self.config.grid
        key, rollout_key, replay_key = jax.random.split(state.key, 3)
        trajectories = self.gflownet.rollout(
            state.params, rollout_key, self.fresh, config.exploration
        )
        last, valid = jaxbuf.terminal_states(trajectories.states, trajectories.lengths)
        number = state.fresh + 1 + jnp.arange(self.fresh, dtype=jnp.int32)
        found = state.found.at[grid.mode(last)].min(number, mode="drop")
        buffer = state.buffer
        if buffer is not None:
            # In this order: a buffer that is sampled before it is added to gets copied.
            score = None if self.kind == "fifo" else grid.log_reward(last)
            buffer = buffer.add(last, score=score, mask=valid)
            sample_key, backward_key = jax.random.split(replay_key)
            batch = buffer.sample(sample_key, config.replayed)
            trajectories = jax.tree.map(
                lambda *leaves: jnp.concatenate(leaves),
                trajectories,
                grid.backward(backward_key, batch.data),
            )
            valid = jnp.concatenate([valid, batch.valid])

        def loss_fn(params: Any) -> Float[Array, ""]:
            loss = self.gflownet.imbalance(params, trajectories) ** 2
            # Fresh trajectories are always valid: there is no mean of nothing.
            return jnp.mean(loss, where=valid)

        grads = jax.grad(loss_fn)(state.params)
        with lenient_promotion():
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        return state.replace(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            buffer=buffer,
            found=found,
            fresh=state.fresh + self.fresh,
            key=key,
        )


class Outcome(NamedTuple):
    """What training with one buffer came to.

    Attributes:
        l1: Distance to the target after each chunk, the sum of absolute differences, from 0 to 2;
            ``[P, seeds]``.
        learned: Where the policies stop in the end, ``[seeds, N]``.
        found: At which fresh trajectory each mode was first reached, inf if it was not;
            ``[seeds, M]``.
        fresh: Fresh trajectories of each seed.
        seconds: For each chunk; the first is compiled in its time.
    """

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
    try:
        config = Config(**given)
        folder.begin()
    except (RunError, ValueError) as error:
        parser.error(str(error))
    began = time.perf_counter()
    try:
        outcomes = _train(config)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was kept", file=sys.stderr)
        return 130
    print(_table(outcomes, config))
    print(compare(outcomes, time.perf_counter() - began))
    for name, picture in _draw(folder.path, outcomes, config).items():
        print(f"{name:<15} {picture}")
    return 0


def _parser() -> _cli.Parser:
    files = """\
  modes.png      modes found over fresh trajectories, of every seed with every buffer
  distance.png   L1 distance to the target over updates
  marginals.png  the first two coordinates where trajectories stop: the target and what was learned
  run.json       which example this folder belongs to"""
    return _cli.example_parser(EXAMPLE, DESCRIPTION, files, Config)


def _train(config: Config) -> dict[str, Outcome]:
    """One outcome for each buffer, chunk by chunk in turn, so that their speeds compare."""
    keys = jnp.stack([jax.random.key(config.seed + i) for i in range(config.seeds)])
    target = np.asarray(config.grid.target())
    length, chunks = _chunks(config)
    agents = {kind: Agent(config, kind) for kind in config.buffer}
    stops = _stopping_distribution(GFlowNet(config.grid, config.hidden))
    updates = chunks * length * config.seeds * len(agents)
    with _report.Progress(updates, unit=" updates") as progress:
        progress.phase("compiling")
        states = {kind: _init(agent)(keys) for kind, agent in agents.items()}
        learned = {kind: np.zeros(0) for kind in agents}
        l1: dict[str, list[NDArray[Any]]] = {kind: [] for kind in agents}
        seconds: dict[str, list[float]] = {kind: [] for kind in agents}
        modes: dict[str, float] = {}
        for _ in range(chunks):
            for kind, agent in agents.items():
                began = time.perf_counter()
                states[kind] = jax.block_until_ready(_chunk(agent, length)(states[kind]))
                seconds[kind].append(time.perf_counter() - began)
                learned[kind] = np.asarray(stops(states[kind].params))
                l1[kind].append(np.abs(learned[kind] - target).sum(axis=1))
                modes[kind] = np.sum(np.asarray(states[kind].found) < NEVER, axis=1).mean()
                progress.advance(length * config.seeds, np.nan)
            progress.phase("modes " + ", ".join(f"{kind} {n:.1f}" for kind, n in modes.items()))
    found = {kind: np.asarray(state.found, np.float64) for kind, state in states.items()}
    return {
        kind: Outcome(
            l1=np.stack(l1[kind]),
            learned=learned[kind],
            found=np.where(found[kind] < NEVER, found[kind], np.inf),
            fresh=chunks * length * agent.fresh,
            seconds=seconds[kind],
        )
        for kind, agent in agents.items()
    }


def _chunks(config: Config) -> tuple[int, int]:
    """Updates in a chunk, and how many chunks there are."""
    length = -(-config.steps // CHUNKS)
    return length, -(-config.steps // length)


# All are kept, so that an agent that is run again in the same process is not compiled again.
@functools.cache
def _init(agent: Agent) -> Callable[[PRNGKeyArray], TrainState]:
    return jax.jit(jax.vmap(agent.init))


@functools.cache
def _chunk(agent: Agent, length: int) -> Callable[[TrainState], TrainState]:
    chunk = jax.vmap(lambda state: agent.train(state, length))
    # Donated, so that the buffers are updated where they are.
    return jax.jit(chunk, donate_argnums=0, compiler_options=_runner.compiler_options())


@functools.cache
def _stopping_distribution(gflownet: GFlowNet) -> Callable[[Any], Float[Array, "S N"]]:
    return jax.jit(jax.vmap(gflownet.stopping_distribution))


def _table(outcomes: dict[str, Outcome], config: Config) -> str:
    length, _ = _chunks(config)
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
                f"{trained / sum(measured):,.0f}",
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
    length, chunks = _chunks(config)
    _report.plot_groups(
        pictures["distance"],
        length * np.arange(1, chunks + 1),
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
