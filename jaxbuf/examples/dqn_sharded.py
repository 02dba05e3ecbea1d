"""DQN whose environments, replay buffer and gradients are spread over all devices.

``python -m jaxbuf.examples.dqn_sharded`` trains the agent of ``dqn`` on CartPole, on all
available devices. ``--devices 8`` splits a CPU into eight devices, and with ``--coordinator``
several processes train together.

Environments, buffer and batches are divided among ``--shards``, and the shards among the devices.
The program is written as for one device. Only three places deal with devices: ``jaxbuf.Sharded``
keeps each shard on the device of its environments, ``Agent.each_shard`` computes on the device that
has the rows of a shard, and ``Agent.whole`` collects the gradients of all shards before they are
averaged. Since a shard computes the same on every device, their number only changes the speed.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import struct
from jaxtyping import Array, Float, Int, PRNGKeyArray

import jaxbuf
from jaxbuf.examples import _run, dqn
from jaxbuf.interop import GymnaxState, gymnax_reset

DESCRIPTION = """Train DQN with one prioritized replay buffer over all devices.

On a cluster, run the same command in every process; the guide "More than one device" has examples.
Writes, in runs/dqn_sharded or where --out says:
  log.csv      returns, losses and metrics of the buffer
  checkpoint/  the whole training state; --resume goes on from it, on other devices, too"""
SPLIT, SAME = jax.P("data"), jax.P()


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the training. All numbers are totals over the shards."""

    devices: int | None = None  # how many to use; on a CPU so many are made
    shards: int = 8  # parts of the buffer; a multiple of the number of devices
    steps: int = 100_000  # environment steps
    num_envs: int = 8  # environments side by side
    batch_size: int = 64  # transitions in an update
    capacity: int = 50_000  # transitions in the buffer
    warmup: int = 2_000  # random steps before learning begins
    hidden: int = 64  # width of each hidden layer
    seed: int = 0  # source of all randomness
    chunks: int = 20  # how often to log and to save
    out: Path = Path("runs/dqn_sharded")  # the folder to write to
    resume: bool = False  # go on from the checkpoint in --out
    coordinator: str | None = None  # HOST:PORT of process 0; "auto" under Slurm and on TPU pods
    num_processes: int | None = None  # how many there are, unless "auto"
    process_id: int | None = None  # which of them this is, unless "auto"

    def __post_init__(self) -> None:
        _run.check(self, 1, "shards", "num_envs", "batch_size", "hidden", "chunks")
        _run.check(self, max(self.batch_size, 2 * self.num_envs), "capacity", "warmup")
        _run.check(self, self.warmup + 1, "steps")
        for name in ("num_envs", "batch_size"):
            if getattr(self, name) % self.shards:
                raise ValueError(f"--{name.replace('_', '-')} must be a multiple of --shards")


class TrainState(struct.PyTreeNode):
    """The state that training changes.

    Attributes:
        envs: State of the environments, by shard: leaves ``[S, E, ...]``.
        episode_return: Sum of rewards since each episode began, by shard.
        buffer: The replay buffer, each shard on the device of its environments.
        params: Parameters of the Q-network. They and all that follow are the same on all devices.
        target_params: Their moving average, which the targets use.
        opt_state: State of the optimizer.
        step: Number of environment steps so far.
    """

    envs: GymnaxState
    episode_return: Float[Array, "S E"]
    buffer: jaxbuf.Sharded
    params: Any
    target_params: Any
    opt_state: optax.OptState
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Agent:
    """The agent of ``dqn`` over the devices of a mesh."""

    config: Config
    mesh: jax.sharding.Mesh

    @functools.cached_property
    def dqn(self) -> dqn.Agent:
        """The agent that provides the network, optimizer, schedules, actions, steps and errors."""
        names = ("steps", "num_envs", "batch_size", "capacity", "warmup", "hidden")
        return dqn.Agent(dqn.Config(**{name: getattr(self.config, name) for name in names}))

    def each_shard(self, function: Callable[..., Any], params: Any, *args: Any) -> Any:
        """Calls ``function(params, *args)`` for each shard, on the device that has its ``args``.

        Args:
            function: The function of one shard.
            params: Its first argument, the same for all shards.
            *args: Leaves ``[S, ...]``.

        Returns:
            All results, leaves ``[S, ...]``.
        """

        def here(params: Any, args: Any) -> Any:
            # Parameters of this device, since jax.grad would otherwise sum over all devices.
            params = jax.lax.pcast(params, "data", to="varying")
            # One shard after the other, so that results do not depend on how many are on a device.
            return jax.lax.map(lambda own: function(params, *own), args)

        mapped = jax.shard_map(here, mesh=self.mesh, in_specs=(SAME, SPLIT), out_specs=SPLIT)
        return mapped(params, args)

    def whole(self, tree: Any) -> Any:
        """Returns all of ``tree`` on every device."""
        return jax.lax.with_sharding_constraint(tree, jax.NamedSharding(self.mesh, SAME))

    def shardings(self) -> Any:
        """Returns the shardings of a ``TrainState``, a prefix of it."""
        split, same = (jax.NamedSharding(self.mesh, spec) for spec in (SPLIT, SAME))
        state: Any = TrainState
        return state(
            envs=split,
            episode_return=split,
            buffer=split,
            params=same,
            target_params=same,
            opt_state=same,
            step=same,
        )

    def init(self) -> TrainState:
        """Returns the state of a new network, new episodes and an empty buffer."""
        config = self.config
        shards, num_envs = config.shards, config.num_envs // config.shards
        env, env_params = _run.make_env(self.dqn.config.env)
        params_key, envs_key = jax.random.split(jax.random.key(config.seed))
        envs = jax.vmap(lambda key: gymnax_reset(env, env_params, key, num_envs))(
            jax.random.split(envs_key, shards)
        )
        one = jax.tree.map(lambda leaf: leaf[0], envs)
        action = jnp.zeros(num_envs, jnp.int32)
        step = jax.eval_shape(lambda: self.dqn.step(params_key, one, action)[1])

        def make_shard() -> jaxbuf.TrajectoryBuffer:
            return jaxbuf.TrajectoryBuffer.create(
                jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), step),
                num_envs,
                config.capacity // config.num_envs,
                sequence_length=2,
                sampler=jaxbuf.Prioritized(epsilon=dqn.PRIORITY_EPSILON),
            )

        params = self.dqn.network.init(params_key, one.obs)
        return TrainState(
            envs=envs,
            episode_return=jnp.zeros((shards, num_envs)),
            buffer=jaxbuf.Sharded.create(make_shard, self.mesh, "data", shards=shards),
            params=params,
            target_params=jax.tree.map(jnp.copy, params),
            opt_state=self.dqn.optimizer.init(params),
            step=jnp.int32(0),
        )

    def train(self, state: TrainState, iterations: int) -> tuple[TrainState, dict[str, Any]]:
        """Acts and learns; returns the new state and the metrics to log."""

        def iteration(state: TrainState, _: None) -> tuple[TrainState, Any]:
            act_key, learn_key = jax.random.split(self.key(state))
            state, ended = self.interact(state, act_key, self.dqn.schedules(state.step)[0])
            state, loss = self.learn(state, learn_key)
            return state, (ended, loss)

        state, ((episodes, returns), losses) = jax.lax.scan(iteration, state, length=iterations)
        log = {
            "return": jnp.sum(returns) / jnp.maximum(jnp.sum(episodes), 1),
            "loss": jnp.mean(losses),
            "buffer": state.buffer.metrics(),
        }
        return state, log

    def warm_up(self, state: TrainState, iterations: int) -> TrainState:
        """Adds random steps."""

        def iteration(state: TrainState, _: None) -> tuple[TrainState, None]:
            return self.interact(state, self.key(state), jnp.float32(1))[0], None

        return jax.lax.scan(iteration, state, length=iterations)[0]

    def key(self, state: TrainState) -> PRNGKeyArray:
        """Returns the key of this step."""
        return jax.random.fold_in(jax.random.key(self.config.seed), state.step)

    def interact(
        self, state: TrainState, key: PRNGKeyArray, epsilon: Float[Array, ""]
    ) -> tuple[TrainState, tuple[Array, Array]]:
        """Takes an ε-greedy step in every environment, and adds it to the shard on its device.

        Returns:
            The new state, the number of episodes that ended, and the sum of their returns.
        """

        def act(same: Any, key: PRNGKeyArray, envs: GymnaxState, episode_return: Array) -> Any:
            params, epsilon = same
            action_key, step_key = jax.random.split(key)
            action = self.dqn.act(params, envs.obs, epsilon, action_key)
            envs, steps = self.dqn.step(step_key, envs, action)
            total = episode_return + steps["reward"]
            ended = steps["terminated"] | steps["truncated"]
            log = jnp.sum(ended, dtype=jnp.int32), jnp.sum(jnp.where(ended, total, 0.0))
            return envs, jnp.where(ended, 0.0, total), steps, log

        keys = jax.random.split(key, self.config.shards)
        same = state.params, epsilon
        envs, episode_return, steps, log = self.each_shard(
            act, same, keys, state.envs, state.episode_return
        )
        # In the order of the shards, as the buffer gives the first rows to its first shard.
        steps = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), steps)
        state = state.replace(
            envs=envs,
            episode_return=episode_return,
            buffer=state.buffer.add(steps),
            step=state.step + self.config.num_envs,
        )
        episodes, returns = self.whole(log)
        return state, (jnp.sum(episodes, dtype=jnp.int32), jnp.sum(returns))

    def learn(self, state: TrainState, key: PRNGKeyArray) -> tuple[TrainState, Float[Array, ""]]:
        """Updates the network, its target and the priorities once; also returns the loss."""

        def gradient(params: Any, window: Any, weights: Float[Array, " b"]) -> Any:
            def loss_fn(online: Any) -> tuple[Float[Array, ""], Float[Array, " b"]]:
                error = self.dqn.td_error(online, params[1], window)
                return 0.5 * jnp.mean(weights * error**2), error

            (loss, error), grads = jax.value_and_grad(loss_fn, has_aux=True)(params[0])
            return grads, loss, error

        batch = state.buffer.sample(key, self.config.batch_size)
        weights = jaxbuf.importance_weights(state.buffer, batch, self.dqn.schedules(state.step)[1])
        shards = self.config.shards
        window, weights = jax.tree.map(
            lambda leaf: leaf.reshape(shards, -1, *leaf.shape[1:]), (batch.data, weights)
        )
        params = state.params, state.target_params
        grads, losses, error = self.each_shard(gradient, params, window, weights)
        # Averaged in the same order for any number of devices. With a large network use jnp.mean
        # alone: devices then sum their own gradients first, which sends less, but the last bits
        # depend on the number of devices.
        grads, loss = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), self.whole((grads, losses)))
        updates, opt_state = self.dqn.optimizer.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates)
        rate = self.dqn.config.target_rate
        state = state.replace(
            params=new,
            target_params=optax.incremental_update(new, state.target_params, rate),
            opt_state=opt_state,
            buffer=state.buffer.update_priority(batch.slots, jnp.abs(error).reshape(-1)),
        )
        return state, loss


def find_devices(config: Config) -> list[Any]:
    """Joins the other processes, if there are any; returns the devices of all processes."""
    if config.coordinator is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = None if config.coordinator == "auto" else config.coordinator
        jax.distributed.initialize(address, config.num_processes, config.process_id)
    if config.devices is not None:
        jax.config.update("jax_num_cpu_devices", config.devices // (config.num_processes or 1))
    devices = jax.devices()[: config.devices]
    if config.devices is not None and len(devices) < config.devices:
        raise ValueError(f"--devices is {config.devices}, but there are {len(devices)}")
    return devices


def train(config: Config) -> None:
    """Trains, and logs in the first process."""
    devices = find_devices(config)
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(auto,), devices=devices)
    agent = Agent(config, mesh)
    where, same = agent.shardings(), jax.NamedSharding(mesh, SAME)
    iterations = -(-(config.steps - config.warmup) // config.num_envs // config.chunks)
    # Donated, so that the buffer is updated in place.
    jit = functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    chunk = jit(agent.train, out_shardings=(where, same))
    state = jax.jit(agent.init, out_shardings=where)()
    if config.resume:
        state = jaxbuf.load(config.out / "checkpoint", state)
    else:
        state = jit(agent.warm_up, out_shardings=where)(state, config.warmup // config.num_envs)
    first = jax.process_index() == 0
    writers = [jaxbuf.CsvWriter(config.out / "log.csv")] if first else []
    # Resumed from here, so that later rows of an earlier run are dropped.
    with jaxbuf.Monitor(writers, resume_at=int(state.step)) as monitor:
        while int(state.step) < config.steps:
            state, log = chunk(state, iterations)
            step, log = int(state.step), jax.device_get(log)
            monitor.write(step, log)
            if first:
                shown = f"return {log['return']:.1f}  loss {log['loss']:.4f}"
                print(f"step {step:,}  {shown}", flush=True)
            # In this order, since steps after a checkpoint are logged again.
            monitor.flush()
            jaxbuf.save(config.out / "checkpoint", state)


def main(argv: Sequence[str] | None = None) -> int:
    """Run this example from the command line and return its exit status."""
    prog = "python -m jaxbuf.examples.dqn_sharded"
    train(tyro.cli(Config, args=argv, prog=prog, description=DESCRIPTION))
    return 0


if __name__ == "__main__":
    sys.exit(main())
