"""Train DQN with prioritized replay on a Gymnasium environment, all of it in this file.

CartPole takes about a minute on two CPU cores. Writes for TensorBoard in ``runs/``, and with
``--track`` to Weights & Biases.
"""

import functools
import time
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn
from flax.training.train_state import TrainState
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensorboardX import SummaryWriter

import jaxbuf
from jaxbuf.interop import gymnasium_transitions, transition_like


@dataclass
class Args:
    """Options of the training."""

    exp_name: str = "single_file_dqn"  # the first part of the name of the run
    seed: int = 1  # source of all randomness
    track: bool = False  # log to Weights & Biases as well
    wandb_project_name: str = "jaxbuf"  # the project there
    env_id: str = "CartPole-v1"  # any environment with a fixed number of actions
    total_timesteps: int = 60_000  # environment steps
    num_envs: int = 4  # environments side by side
    learning_rate: float = 1e-3  # of Adam
    buffer_size: int = 50_000  # transitions in the buffer
    gamma: float = 0.99  # discount per step
    tau: float = 0.01  # how far each update moves the target network
    batch_size: int = 128  # transitions in an update
    start_e: float = 1.0  # share of random actions at first
    end_e: float = 0.05  # and once it has fallen
    exploration_fraction: float = 0.3  # share of the run in which it falls
    learning_starts: int = 2_000  # environment steps before the first update
    train_frequency: int = 4  # environment steps between two updates
    alpha: float = 0.6  # priority exponent; 0 is uniform
    beta: float = 0.4  # importance exponent at first; ends at 1


class QNetwork(nn.Module):
    """The values of all actions."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the values for a batch of observations, ``[B, A]``."""
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(120)(x))
        x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(self.num_actions)(x)


class DQNState(TrainState):
    """The network, its optimizer, and the parameters that the targets use."""

    target_params: dict[str, Any]


@jax.jit
def greedy(q_state: DQNState, obs: jax.Array) -> jax.Array:
    """Returns the best actions for a batch of observations."""
    return q_state.apply_fn(q_state.params, obs).argmax(axis=-1)


# The buffer is donated, so it is updated in place.
@functools.partial(jax.jit, static_argnames=("batch_size", "gamma", "tau"), donate_argnums=(0, 1))
def update(
    buffer: jaxbuf.ItemBuffer,
    q_state: DQNState,
    key: jax.Array,
    beta: float,
    batch_size: int,
    gamma: float,
    tau: float,
) -> tuple[jaxbuf.ItemBuffer, DQNState, dict[str, jax.Array]]:
    """Samples a batch, and updates the network, its target and the priorities."""
    batch = buffer.sample(key, batch_size)
    weights = jaxbuf.importance_weights(buffer, batch, beta)
    data = batch.data
    # Double DQN: the network chooses the next action, and the target network values it.
    best = q_state.apply_fn(q_state.params, data["next_obs"]).argmax(axis=-1)
    q_next = q_state.apply_fn(q_state.target_params, data["next_obs"])
    q_next = jnp.take_along_axis(q_next, best[:, None], axis=-1)[:, 0]
    # Nothing follows a termination; a time limit only cuts an episode off.
    target = data["reward"] + gamma * jnp.where(data["terminated"], 0.0, q_next)

    def loss_fn(params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        q_values = q_state.apply_fn(params, data["obs"])
        q_value = jnp.take_along_axis(q_values, data["action"][:, None], axis=-1)[:, 0]
        return jnp.mean(weights * (q_value - target) ** 2), q_value

    (loss, q_value), grads = jax.value_and_grad(loss_fn, has_aux=True)(q_state.params)
    q_state = q_state.apply_gradients(grads=grads)
    target_params = optax.incremental_update(q_state.params, q_state.target_params, tau)
    q_state = q_state.replace(target_params=target_params)
    buffer = buffer.update_priority(batch.slots, jnp.abs(q_value - target))
    return buffer, q_state, {"td_loss": loss, "q_values": jnp.mean(q_value)}


def linear_schedule(start: float, end: float, duration: float, t: int) -> float:
    """Returns a number that goes from ``start`` to ``end`` in ``duration`` steps, and stays."""
    return start + (end - start) * min(t / duration, 1.0)


def main(args: Args) -> list[float]:
    """Trains, and returns the returns of all episodes."""
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    writer = SummaryWriter(f"runs/{run_name}")
    writers: list[jaxbuf.Writer] = [jaxbuf.TensorBoardWriter(writer)]
    if args.track:
        import wandb  # type: ignore

        run = wandb.init(project=args.wandb_project_name, name=run_name, config=vars(args))
        writers.append(jaxbuf.WandbWriter(run=run))
    monitor = jaxbuf.Monitor(writers)

    rng = np.random.default_rng(args.seed)
    key, network_key = jax.random.split(jax.random.key(args.seed))
    envs: Any = gym.make_vec(args.env_id, args.num_envs, vectorization_mode="sync")
    envs = RecordEpisodeStatistics(envs)
    obs, _ = envs.reset(seed=args.seed)
    network = QNetwork(int(envs.single_action_space.n))
    params = network.init(network_key, obs)
    q_state = DQNState.create(
        apply_fn=network.apply,
        params=params,
        target_params=jax.tree.map(jnp.copy, params),
        tx=optax.adam(args.learning_rate),
    )
    buffer = jaxbuf.ItemBuffer.create(
        transition_like(envs),
        args.buffer_size,
        sampler=jaxbuf.Prioritized(alpha=args.alpha, epsilon=1e-3),
    )

    returns, losses, ended, start_time, updates = [], {}, None, time.time(), 0
    for global_step in range(0, args.total_timesteps, args.num_envs):
        duration = args.exploration_fraction * args.total_timesteps
        epsilon = linear_schedule(args.start_e, args.end_e, duration, global_step)
        explore = rng.random(args.num_envs) < epsilon
        anything = rng.integers(network.num_actions, size=args.num_envs)
        actions = np.where(explore, anything, np.asarray(greedy(q_state, obs)))
        result = envs.step(actions)
        # A step that only resets an episode is no transition: the mask leaves it out.
        step = gymnasium_transitions(envs, obs, actions, result, ended)
        # From Python, the functions of jaxbuf donate the buffer: no copy is made.
        buffer = jaxbuf.add(buffer, step.transitions, mask=step.mask)
        obs, ended = step.obs, step.ended

        infos = result[-1]
        if "episode" in infos:
            returns += infos["episode"]["r"][infos["_episode"]].tolist()

        if global_step >= args.learning_starts:
            while updates * args.train_frequency < global_step - args.learning_starts:
                key, sample_key = jax.random.split(key)
                beta = linear_schedule(args.beta, 1.0, args.total_timesteps, global_step)
                buffer, q_state, losses = update(
                    buffer, q_state, sample_key, beta, args.batch_size, args.gamma, args.tau
                )
                updates += 1

        if global_step // 1_000 > (global_step - args.num_envs) // 1_000 and losses:
            charts = {
                "episodic_return": np.mean(returns[-20:]) if returns else np.nan,
                "epsilon": epsilon,
                "SPS": global_step / (time.time() - start_time),
            }
            metrics = {"charts": charts, "losses": losses, "buffer": buffer.metrics()}
            monitor.write(global_step, metrics)
            print(f"step {global_step:,}  return {charts['episodic_return']:.1f}", flush=True)

    monitor.close()
    writer.close()
    envs.close()
    return returns


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
