"""A whole agent: the DQN of `examples/dqn.py` on CartPole, with each library's buffer in it.

Four seeds in one program, as the example trains them: per iteration eight environments take a step,
and a batch of 64 is drawn, learned from and given new priorities. What is compared, and why it is
equal work: network, optimizer, environments and all settings are those of the example's defaults;
only the buffer differs.

* **jaxbuf**: `TrajectoryBuffer` with `Prioritized(alpha=0.6)`.
* **flashbax**: `make_prioritised_trajectory_buffer` with windows of the same length, behind the
  same methods. Now and then it draws a window that has no priority, whose weight would be infinite
  and the loss NaN: such rows get the weight 0.

* **nothing**: no buffer: nothing is kept, and every batch is the same. It learns nothing, and shows
  what all the rest takes.

Times are per step of all environments of all seeds, learning included. Both libraries must have
learned by the end of the check; what they reached is said below the table.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import REFERENCE, Operation, Options, Row, UnequalWork, import_library
from benchmarks.programs import compiled, scanned

NAME = "agent"
OPERATION = "scan iteration"
SEEDS = 4
CHUNK = 250
"""Iterations in a timed program."""

CHECKED_STEPS = 100_000
"""Environment steps of each seed after which the agents must have learned."""

LEARNED = 100.0
"""Mean return that shows it: that of random actions is about 22, the largest 500."""


def import_dqn() -> Any:
    """The example, a script that imports what stands beside it."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_library("dqn")


def rows(options: Options) -> list[Row]:
    """The row, if it is wanted."""
    if not options.wants(NAME, OPERATION):
        return []
    title = f"DQN with prioritized replay on CartPole, {SEEDS} seeds, one iteration of all of them"
    builders = {
        library: functools.partial(AgentContestant, options, library)
        for library in (REFERENCE, *OTHERS)
    }
    return [Row(NAME, title, [OPERATION], builders)]


class FlashbaxReplay(flax.struct.PyTreeNode):
    """A prioritized trajectory buffer of flashbax behind the methods that the agent calls.

    Attributes:
        state: Its state.
        functions: Its functions.
    """

    state: Any
    functions: Any = flax.struct.field(pytree_node=False)

    def add(self, steps: Any) -> "FlashbaxReplay":
        """Adds a step of every environment."""
        rows = jax.tree.map(lambda leaf: leaf[:, None], steps)
        return self.replace(state=self.functions.add(self.state, rows))

    def sample(self, key: jax.Array, batch_size: int) -> Any:
        """Draws windows; `batch_size` is that of `functions`."""
        jaxbuf = import_library("jaxbuf")
        drawn = self.functions.sample(self.state, key)
        generation = jnp.zeros((batch_size,), jnp.uint32)
        return jaxbuf.Sample(
            data=drawn.experience,
            slots=jaxbuf.Slots(index=drawn.indices, generation=generation),
            probability=drawn.probabilities,
            valid=drawn.probabilities > 0,
        )

    def update_priority(self, slots: Any, priority: jax.Array) -> "FlashbaxReplay":
        """Sets priorities; flashbax adds no epsilon of its own."""
        dqn = import_dqn()
        raised = priority + jnp.float32(dqn.PRIORITY_EPSILON)
        return self.replace(state=self.functions.set_priorities(self.state, slots.index, raised))

    def support(self) -> Any:
        """Not asked for: weights are relative to the largest of the batch."""
        raise NotImplementedError

    def metrics(self) -> dict[str, jax.Array]:
        """None."""
        return {}


class NoReplay(flax.struct.PyTreeNode):
    """The same windows each time.

    Attributes:
        windows: Leaves [B, T, ...].
    """

    windows: Any

    def add(self, steps: Any) -> "NoReplay":
        """Keeps nothing."""
        del steps
        return self

    def sample(self, key: jax.Array, batch_size: int) -> Any:
        """The windows, as if all had been drawn alike."""
        del key
        jaxbuf = import_library("jaxbuf")
        nothing = jnp.zeros((batch_size,), jnp.int32)
        return jaxbuf.Sample(
            data=self.windows,
            slots=jaxbuf.Slots(index=nothing, generation=nothing.astype(jnp.uint32)),
            probability=jnp.ones((batch_size,), jnp.float32),
            valid=jnp.ones((batch_size,), bool),
        )

    def update_priority(self, slots: Any, priority: jax.Array) -> "NoReplay":
        """Sets nothing."""
        del slots, priority
        return self

    def support(self) -> Any:
        """Not asked for: weights are relative to the largest of the batch."""
        raise NotImplementedError

    def metrics(self) -> dict[str, jax.Array]:
        """None."""
        return {}


def flashbax_replay(config: Any, step: Any) -> FlashbaxReplay:
    """An empty buffer of flashbax for steps of these shapes."""
    functions = import_library("flashbax").make_prioritised_trajectory_buffer(
        add_batch_size=config.num_envs,
        sample_batch_size=config.batch_size,
        sample_sequence_length=config.n_step + 1,
        period=1,
        min_length_time_axis=config.n_step + 1,
        max_length_time_axis=config.capacity // config.num_envs,
        priority_exponent=config.alpha,
        device=jax.default_backend(),
    )
    return FlashbaxReplay(functions.init(_zeros(step)), functions)


def no_replay(config: Any, step: Any) -> NoReplay:
    """Windows of zeros for steps of these shapes."""
    return NoReplay(_zeros(step, config.batch_size, config.n_step + 1))


def _zeros(step: Any, *leading: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), step)


OTHERS: dict[str, Callable[[Any, Any], Any]] = {"flashbax": flashbax_replay, "nothing": no_replay}
"""What stands in the place of jaxbuf's buffer."""


def make_agent(library: str) -> Any:
    """The agent of the example with the buffer of a library, or of none: "nothing"."""
    dqn = import_dqn()
    config = dqn.Config(seeds=SEEDS)
    if library not in OTHERS:
        return dqn.Agent(config)

    @dataclasses.dataclass(frozen=True)
    class OtherAgent(dqn.Agent):
        def create_buffer(self, step: Any) -> Any:
            return OTHERS[library](config, step)

    return OtherAgent(config)


class AgentContestant:
    """The agent in training.

    Attributes:
        state: Of all seeds, leaves [SEEDS, ...].
    """

    def __init__(self, options: Options, library: str):
        """Compiles it, and fills its buffers with random steps.

        Args:
            options: Whether it is a trial.
            library: Whose buffer it has: "jaxbuf", "flashbax" or "nothing".
        """
        self._options, self._library, self._agent = options, library, make_agent(library)
        keys = jax.random.split(jax.random.key(0), SEEDS)
        self.state: Any = jax.jit(jax.vmap(self._agent.init))(keys)
        self._returns = 0.0
        train = functools.partial(self._agent.train, iterations=CHUNK)

        def program(state: Any) -> Any:
            state, log, _ = jax.vmap(lambda one: train(one))(state)
            return state, log

        self._program = compiled(program, self.state)

    def verify(self) -> None:
        """Trains for a while.

        Raises:
            UnequalWork: If the agent has not learned then.
        """
        steps = CHECKED_STEPS // (10 if self._options.quick else 1)
        chunks = steps // (CHUNK * self._agent.config.num_envs)
        logs: list[Any] = []
        for _ in range(chunks):
            self.state, log = self._program(self.state)
            logs.append(jax.device_get(log))
        late = logs[-max(1, chunks // 10) :]
        total = sum(np.sum(log.total_return) for log in late)
        self._returns = float(total / max(1, sum(np.sum(log.episodes) for log in late)))
        learns = self._library != "nothing" and not self._options.quick
        if learns and self._returns < LEARNED:
            raise UnequalWork(f"the mean return is {self._returns:.0f} after {steps:,} steps")

    def operations(self) -> Mapping[str, Operation]:
        """One iteration of all seeds."""
        return {OPERATION: Operation(scanned(self, self._program, tuple), CHUNK)}

    def facts(self) -> Mapping[str, str]:
        """Returns the environment steps of an iteration, and the mean return."""
        return {
            "environment steps in an iteration": str(SEEDS * self._agent.config.num_envs),
            "mean return in the last tenth of the check": f"{self._returns:.0f}",
        }
