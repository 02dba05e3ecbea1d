"""Runs an agent from the command line: progress, checkpoints, resuming, and the final report."""

import dataclasses
import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpy.typing import NDArray

import jaxbuf
from jaxbuf.examples import _cli, _report
from jaxbuf.examples._run_folder import SAVES, RunError, RunFolder, save_is_due

CHUNKS = 100


class EpisodeLog(NamedTuple):
    """Episodes that ended in one step, or in many.

    Attributes:
        episodes: How many.
        total_return: Sum of their returns.
    """

    episodes: Int[Array, ""]
    total_return: Float[Array, ""]


class Config(Protocol):
    """What the runner reads of a configuration, a frozen dataclass of ``_cli.option`` fields."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def seed(self) -> int:
        """The first seed."""
        ...

    @property
    def seeds(self) -> int:
        """How many seeds are trained at once."""
        ...

    @property
    def steps(self) -> int:
        """Environment steps of each seed, the warm-up among them."""
        ...

    @property
    def warmup(self) -> int:
        """Those before learning begins."""
        ...

    @property
    def num_envs(self) -> int:
        """Environments side by side in each seed."""
        ...


class Agent(Protocol):
    """Pure functions that the runner maps over seeds. Hashable: equal agents share a program.

    A state is a pytree; its ``step`` holds the environment steps so far.
    """

    @property
    def title(self) -> str:
        """Stands above the learning curve."""
        ...

    def init(self, key: PRNGKeyArray) -> Any:
        """The state after the warm-up."""
        ...

    def train(self, state: Any, iterations: int) -> tuple[Any, EpisodeLog, dict[str, Any]]:
        """Go on for ``iterations`` steps of all environments; returns metrics as well."""
        ...

    def evaluate(self, state: Any, key: PRNGKeyArray) -> Float[Array, " episodes"]:
        """Returns of whole greedy episodes."""
        ...


@dataclasses.dataclass(frozen=True)
class Curve:
    """Returns while training, one point per chunk.

    Attributes:
        steps: Environment steps per seed.
        returns: Of each seed, the mean over the episodes that ended in the chunk, NaN if none did.
    """

    steps: list[int] = dataclasses.field(default_factory=list[int])
    returns: list[list[float]] = dataclasses.field(default_factory=list[list[float]])

    def recent(self) -> list[float]:
        """The mean of each seed over the last tenth of the points."""
        last = np.asarray(self.returns[-math.ceil(len(self.returns) / 10) :])
        ended = [seed[~np.isnan(seed)] for seed in last.T]
        return [float(seed.mean()) if seed.size else math.nan for seed in ended]


class Outcome(NamedTuple):
    """What a run came to.

    Attributes:
        curve: Returns while training.
        greedy: Mean return of each seed's greedy episodes after training.
        steps: Environment steps of each seed, earlier runs that this one resumed included.
        steps_per_second: Of all seeds together, without the first chunk, which is compiled; NaN if
            all was done before.
        seconds: From start to end.
    """

    curve: Curve
    greedy: list[float]
    steps: int
    steps_per_second: float
    seconds: float


def main(
    argv: Sequence[str] | None,
    *,
    example: str,
    description: str,
    options: type[Any],
    make_config: Callable[..., Any],
    make_agent: Callable[[Any], Agent],
) -> int:
    """Run an example from the command line.

    Args:
        argv: The words after the program's name; None takes those of this process.
        example: Name of the module in ``jaxbuf.examples``, and of the folder under ``runs/``.
        description: For ``--help``.
        options: The dataclass whose fields are the options.
        make_config: Makes a configuration from the options that were given, by name. Raises
            ``ValueError``, with a message for the user, where they do not go together.
        make_agent: Makes the agent from it.

    Returns:
        The exit status: 0, or 130 after an interruption.

    Raises:
        SystemExit: With status 2 and one line on stderr, when an argument is wrong.
    """
    parser = _parser(example, description, options)
    given = vars(parser.parse_args(argv))
    folder = RunFolder(given.pop("out"), example)
    resume: bool = given.pop("resume")
    log: bool = given.pop("log")
    curve = Curve()
    try:
        if log and importlib.util.find_spec("tensorboardX") is None:
            raise RunError(
                "--log needs tensorboardX; install it with `pip install 'jaxbuf[examples]'`"
            )
        if resume:
            record = folder.go_on(given)
            config = make_config(**record["config"])
            curve = Curve(**record["curve"])
        else:
            config = make_config(**given)
            folder.begin()
        log = log or folder.log_table.exists()
        writers = _log_writers(folder) if log else []
    except (RunError, ValueError) as error:
        parser.error(str(error))
    agent = make_agent(config)
    try:
        with jaxbuf.Monitor(writers, resume_at=curve.steps[-1] if resume else None) as monitor:
            outcome = _train(agent, config, folder, curve, monitor, resume=resume)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {folder.how_to_go_on()}", file=sys.stderr)
        return 130
    picture = folder.path / "learning_curve.png"
    _report.plot_learning_curve(
        picture, np.asarray(outcome.curve.steps), np.asarray(outcome.curve.returns), agent.title
    )
    print(_table(outcome, config))
    print(f"learning curve  {picture}\ncheckpoint      {folder.checkpoints}")
    if log:
        print(f"log             {folder.log_table}, {folder.log_events}")
    return 0


def _parser(example: str, description: str, options: type[Any]) -> _cli.Parser:
    files = f"""\
  learning_curve.png  return of every seed while training
  checkpoint/         the whole training state, {SAVES} times in a run, the latest kept
  run.json            which example this folder belongs to
  log.csv             with --log, {CHUNKS} times in a run: returns, losses, metrics of the buffer
  tensorboard/        the same, for TensorBoard"""
    parser = _cli.example_parser(example, description, files, options, amount="steps")
    parser.add_argument(
        "--log",
        action="store_true",
        help="log while training; a run that is resumed goes on with its log in any case",
    )
    return parser


def _train(
    agent: Agent,
    config: Config,
    folder: RunFolder,
    curve: Curve,
    monitor: jaxbuf.Monitor,
    *,
    resume: bool,
) -> Outcome:
    begin = time.perf_counter()
    keys = jnp.stack([jax.random.key(config.seed + i) for i in range(config.seeds)])
    # Arrays of a checkpoint are tied to a device. So are these, else a resumed run would be another
    # program.
    keys = jax.device_put(keys, jax.devices()[0])
    init, evaluate = _over_seeds(agent)
    with _report.Progress(config.steps * config.seeds) as progress:
        progress.phase("compiling")
        states = folder.load_state(jax.eval_shape(init, keys)) if resume else init(keys)
        step = int(states.step[0])
        # Chunks of one length: one program.
        length = _iterations(config.steps - config.warmup, config, CHUNKS)
        chunk = _chunk(agent, length)
        chunks = _iterations(config.steps - step, config, length)
        progress.expect((step + chunks * length * config.num_envs) * config.seeds)
        progress.advance(step * config.seeds, math.nan)
        seconds: list[float] = []
        for i in range(chunks):
            started = time.perf_counter()
            states, log, metrics = chunk(states)
            returns = _mean_returns(log)
            seconds.append(time.perf_counter() - started)
            progress.phase("training")
            progress.advance(length * config.num_envs * config.seeds, float(returns.mean()))
            step += length * config.num_envs
            curve.steps.append(step)
            curve.returns.append(returns.tolist())
            monitor.write(step, {"return": returns, **metrics})
            if save_is_due(i, chunks):
                record = {
                    "step": step,
                    "config": dataclasses.asdict(config),
                    "curve": dataclasses.asdict(curve),
                }
                # First: what comes after a checkpoint is written again when it is resumed.
                monitor.flush()
                folder.save(step, states, record)
        progress.phase("evaluating")
        greedy = np.asarray(evaluate(states, keys)).mean(axis=1)
    # The first chunk is mostly compilation.
    measured = seconds[1:] or seconds
    steps_per_chunk = length * config.num_envs * config.seeds
    return Outcome(
        curve=curve,
        greedy=greedy.tolist(),
        steps=step,
        steps_per_second=len(measured) * steps_per_chunk / sum(measured) if measured else math.nan,
        seconds=time.perf_counter() - begin,
    )


def _log_writers(folder: RunFolder) -> list[jaxbuf.Writer]:
    return [jaxbuf.TensorBoardWriter(folder.log_events), jaxbuf.CsvWriter(folder.log_table)]


def _iterations(steps: int, config: Config, parts: int) -> int:
    """How many steps of all environments make one of ``parts`` parts, rounded up."""
    return math.ceil(math.ceil(steps / config.num_envs) / parts)


# Both are kept, so that an agent that is run again in the same process is not compiled again.
@functools.cache
def _over_seeds(agent: Agent) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Array]]:
    return jax.jit(jax.vmap(agent.init)), jax.jit(jax.vmap(agent.evaluate))


@functools.cache
def _chunk(agent: Agent, length: int) -> Callable[[Any], tuple[Any, EpisodeLog, dict[str, Any]]]:
    def chunk(states: Any) -> tuple[Any, EpisodeLog, dict[str, Any]]:
        return jax.vmap(lambda state: agent.train(state, length))(states)

    # Donated, so that the buffers are updated where they are.
    return jax.jit(chunk, donate_argnums=0, compiler_options=jaxbuf.compiler_options())


def _mean_returns(log: EpisodeLog) -> NDArray[np.float64]:
    count = np.asarray(log.episodes, np.float64)
    total = np.asarray(log.total_return, np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _table(outcome: Outcome, config: Config) -> str:
    recent = outcome.curve.recent()
    rate = outcome.steps_per_second
    rows = [
        [str(config.seed + i), f"{greedy:.1f}", f"{train:.1f}", f"{outcome.steps:,}", "", ""]
        for i, (greedy, train) in enumerate(zip(outcome.greedy, recent, strict=True))
    ]
    total = [
        f"{np.mean(outcome.greedy):.1f}",
        f"{np.mean(recent):.1f}",
        f"{outcome.steps * config.seeds:,}",
        "-" if math.isnan(rate) else f"{rate:,.0f}",
        f"{outcome.seconds:.1f} s",
    ]
    header = ["seed", "greedy return", "return in training", "steps", "steps/s", "time"]
    return _report.table(header, [*rows, ["all", *total]])
