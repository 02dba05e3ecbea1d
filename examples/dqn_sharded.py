"""Train DQN with one prioritized replay buffer over all devices.

The agent is that of ``dqn``, on CartPole. --devices 8 splits a CPU into eight devices. On a
cluster, run the same command in every process; the guide "More than one device" has examples.

Writes, in runs/dqn_sharded or where --out says:
  log.csv      returns, losses and metrics of the buffer
  checkpoint/  the whole training state; --resume goes on from it, on other devices, too
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import struct
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, PyTree

import common
import dqn
import jaxbuf
from jaxbuf.interop import GymnaxState, gymnax_reset


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
        common.check(self, 1, "shards", "num_envs", "batch_size", "hidden", "chunks")
        common.check(self, max(self.batch_size, 2 * self.num_envs), "capacity", "warmup")
        common.check(self, self.warmup + 1, "steps")
        for name in ("num_envs", "batch_size"):
            if getattr(self, name) % self.shards:
                raise ValueError(f"--{name.replace('_', '-')} must be a multiple of --shards")


class TrainState(struct.PyTreeNode):
    """The state that training changes. From the parameters on, it is the same on all devices."""

    envs: GymnaxState  # by shard, leaves [S, E, ...]
    episode_return: Float[Array, "S E"]  # rewards since each episode began
    buffer: jaxbuf.Sharded  # each shard on the device of its environments
    params: PyTree
    target_params: PyTree  # their moving average, which the targets use
    opt_state: optax.OptState
    step: Int[Array, ""]  # environment steps so far


class Agent:
    """The agent of ``dqn`` over the devices of a mesh, written as for one device.

    Environments, buffer and batches are divided among the shards, and these among the devices. Only
    three places deal with that: ``jaxbuf.Sharded``, ``each_shard`` and ``whole``. A shard computes
    the same on every device, so the number of devices only changes the speed.
    """

    def __init__(self, config: Config, mesh: jax.sharding.Mesh) -> None:
        self.config, self.mesh = config, mesh
        # It provides the network, optimizer, schedules, actions, steps and errors.
        names = ("steps", "num_envs", "batch_size", "capacity", "warmup", "hidden")
        self.dqn = dqn.Agent(dqn.Config(**{name: getattr(config, name) for name in names}))
        self.same, self.split = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))

    def each_shard(self, function: Callable[..., PyTree], params: PyTree, *args: PyTree) -> PyTree:
        """Calls ``function(params, *args)`` for each shard, where the rows of ``args`` are."""

        def local(params: PyTree, args: PyTree) -> PyTree:
            # One shard after the other, so that results do not depend on how many are on a device.
            return jax.lax.map(lambda shard: function(params, *shard), args)

        split = jax.P("data")
        # With its check, shard_map would let jax.grad sum over all devices.
        mapped = jax.shard_map(
            local, mesh=self.mesh, in_specs=(jax.P(), split), out_specs=split, check_vma=False
        )
        return mapped(params, args)

    def whole(self, tree: PyTree) -> PyTree:
        """Returns all of ``tree`` on every device."""
        return jax.lax.with_sharding_constraint(tree, self.same)

    def init(self) -> TrainState:
        """Returns the state of a new network, with ``warmup`` random steps in the buffer."""
        config, shards = self.config, self.config.shards
        params_key, envs_key = jax.random.split(jax.random.key(config.seed))
        env, num_envs = dqn.make_env(self.dqn.config.env), config.num_envs // shards
        keys = jax.random.split(envs_key, shards)
        envs = jax.vmap(lambda key: gymnax_reset(*env, key, num_envs))(keys)
        shard, action = jax.tree.map(lambda leaf: leaf[0], envs), jnp.zeros(num_envs, jnp.int32)
        steps = jax.eval_shape(self.dqn.step, params_key, shard, action)[1]

        def make_shard() -> jaxbuf.TrajectoryBuffer:
            return jaxbuf.TrajectoryBuffer.create(
                common.one_of(steps),
                num_envs,
                config.capacity // config.num_envs,
                sequence_length=2,
                sampler=jaxbuf.Prioritized(epsilon=dqn.PRIORITY_EPSILON),
            )

        buffer = jaxbuf.Sharded.create(make_shard, self.mesh, "data", shards=shards)
        params = self.dqn.network.init(params_key, shard.obs)
        target, opt_state = jax.tree.map(jnp.copy, params), self.dqn.optimizer.init(params)
        returns = jnp.zeros((shards, num_envs))
        state = TrainState(envs, returns, buffer, params, target, opt_state, jnp.int32(0))
        length = config.warmup // config.num_envs
        return jax.lax.scan(lambda s, _: self.interact(s, self.key(s), 1.0), state, None, length)[0]

    def train(self, state: TrainState, iterations: int) -> tuple[TrainState, dict[str, PyTree]]:
        """Acts and learns; returns the new state and the metrics to log."""

        def iteration(state: TrainState, _: None) -> tuple[TrainState, PyTree]:
            act_key, learn_key = jax.random.split(self.key(state))
            state, log = self.interact(state, act_key, self.dqn.schedules(state.step)[0])
            state, loss = self.learn(state, learn_key)
            return state, (log, loss)

        state, (logs, losses) = jax.lax.scan(iteration, state, length=iterations)
        episodes, total_return = (jnp.sum(leaf) for leaf in logs)
        log = {"return": total_return / jnp.maximum(episodes, 1), "loss": jnp.mean(losses)}
        return state, log | {"buffer": state.buffer.metrics()}

    def key(self, state: TrainState) -> PRNGKeyArray:
        """Returns the key of this step."""
        return jax.random.fold_in(jax.random.key(self.config.seed), state.step)

    def interact(
        self, state: TrainState, key: PRNGKeyArray, epsilon: ArrayLike
    ) -> tuple[TrainState, dqn.Episodes]:
        """Takes an ε-greedy step in every environment, and adds it to the shard on its device."""

        def act(
            params: PyTree, key: PRNGKeyArray, envs: GymnaxState, episode_return: Array
        ) -> PyTree:
            action_key, step_key = jax.random.split(key)
            action = self.dqn.act(params[0], envs.obs, params[1], action_key)
            envs, steps = self.dqn.step(step_key, envs, action)
            return envs, steps, *dqn.count_episodes(episode_return, steps)

        keys = jax.random.split(key, self.config.shards)
        envs, steps, returns, log = self.each_shard(
            act, (state.params, epsilon), keys, state.envs, state.episode_return
        )
        # In the order of the shards, as the buffer gives the first rows to its first shard.
        steps = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), steps)
        state = state.replace(envs=envs, episode_return=returns, buffer=state.buffer.add(steps))
        log = jax.tree.map(lambda leaf: jnp.sum(leaf, dtype=leaf.dtype), self.whole(log))
        return state.replace(step=state.step + self.config.num_envs), log

    def learn(self, state: TrainState, key: PRNGKeyArray) -> tuple[TrainState, Float[Array, ""]]:
        """Updates the network, its target and the priorities once; also returns the loss."""

        def gradient(params: PyTree, window: PyTree, weights: Float[Array, " b"]) -> PyTree:
            def loss_fn(online: PyTree) -> tuple[Float[Array, ""], Float[Array, " b"]]:
                error = self.dqn.td_error(online, params[1], window)
                return 0.5 * jnp.mean(weights * error**2), error

            (loss, error), grads = jax.value_and_grad(loss_fn, has_aux=True)(params[0])
            return grads, loss, error

        batch = state.buffer.sample(key, self.config.batch_size)
        weights = jaxbuf.importance_weights(state.buffer, batch, self.dqn.schedules(state.step)[1])
        shards, rows = self.config.shards, (batch.data, weights)
        window, weights = jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:]), rows)
        params = state.params, state.target_params
        grads, losses, error = self.each_shard(gradient, params, window, weights)
        # Averaged in the same order for any number of devices. For a large network jnp.mean alone
        # sends less, but the last bits then depend on that number.
        grads, loss = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), self.whole((grads, losses)))
        updates, opt_state = self.dqn.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        target = optax.incremental_update(params, state.target_params, self.dqn.config.target_rate)
        buffer = state.buffer.update_priority(batch.slots, jnp.abs(error).reshape(-1))
        state = state.replace(params=params, target_params=target, opt_state=opt_state)
        return state.replace(buffer=buffer), loss


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
    split, same, make_state = agent.split, agent.same, cast("Any", TrainState)
    # From the parameters on, the same on all devices.
    shardings = make_state(split, split, split, same, same, same, same)
    iterations = -(-(config.steps - config.warmup) // config.num_envs // config.chunks)
    # Donated, so that the buffer is updated in place.
    options: Any = {"static_argnums": 1, "donate_argnums": 0}
    chunk = jax.jit(agent.train, out_shardings=(shardings, same), **options)
    if jax.process_index() == 0:
        print("compiling", file=sys.stderr, flush=True)
    state = jax.jit(agent.init, out_shardings=shardings)()
    if config.resume:
        state = jaxbuf.load(config.out / "checkpoint", state)
    writers = [jaxbuf.CsvWriter(config.out / "log.csv")] if jax.process_index() == 0 else []
    # Resumed from here, so that later rows of an earlier run are dropped.
    with jaxbuf.Monitor(writers, resume_at=int(state.step)) as monitor:
        while int(state.step) < config.steps:
            state, log = chunk(state, iterations)
            step, log = int(state.step), jax.device_get(log)
            monitor.write(step, log)
            shown = f"step {step:,}  return {log['return']:.1f}  loss {log['loss']:.4f}"
            if jax.process_index() == 0:
                print(shown, flush=True)
            # In this order, since steps after a checkpoint are logged again.
            monitor.flush()
            jaxbuf.save(config.out / "checkpoint", state)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status."""
    prog = "python examples/dqn_sharded.py"
    train(tyro.cli(Config, args=argv, prog=prog, description=__doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
