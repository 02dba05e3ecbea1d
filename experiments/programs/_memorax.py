"""Trains DQN or R2D2 of memorax on CartPole, and prints returns; see ``memorax_r2d2``."""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from memorax.algorithms import DQN, DQNConfig
from memorax.algorithms.r2d2 import R2D2, R2D2Config
from memorax.buffers import make_episode_buffer, make_prioritised_episode_buffer
from memorax.environments import environment
from memorax.networks import MLP, RNN, FeatureExtractor, Network, heads

SIZES = {"buffer_size": 20_000, "num_envs": 8, "num_eval_envs": 16}
LEARNING = {"gamma": 0.99, "tau": 1.0, "target_network_frequency": 1_024, "batch_size": 32}
EXPLORING = {"start_e": 1.0, "end_e": 0.05, "exploration_fraction": 0.5, "learning_rate": 1e-3}
LENGTH = 16


def make(name: str, steps: int) -> Any:
    """Returns an agent, whose network has a memory."""
    env, env_params = environment.make("gymnax::CartPole-v1")
    network = Network(
        FeatureExtractor(observation_extractor=MLP(features=(64,))),
        RNN(cell=nn.GRUCell(features=64)),
        heads.DiscreteQNetwork(action_dim=env.action_space(env_params).n),
    )
    common = {"name": name, "learning_starts": 1_000, "train_frequency": 8, "burn_in_length": 4}
    kinds: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
        "dqn": (DQN, DQNConfig, make_episode_buffer, {}),
        "r2d2": (
            R2D2,
            R2D2Config,
            make_prioritised_episode_buffer,
            {"sequence_length": LENGTH, "n_step": 3},
        ),
    }
    agent, config, buffer, more = kinds[name]
    schedules = {"epsilon_schedule": optax.linear_schedule(1.0, 0.05, steps // 2)}
    if name == "r2d2":
        schedules["beta_schedule"] = optax.constant_schedule(0.6)
    return agent(
        cfg=config(**common, **SIZES, **LEARNING, **EXPLORING, **more),
        env=env,
        env_params=env_params,
        q_network=network,
        optimizer=optax.adam(EXPLORING["learning_rate"]),
        buffer=buffer(
            max_length=SIZES["buffer_size"],
            min_length=LENGTH * SIZES["num_envs"],
            sample_batch_size=LEARNING["batch_size"],
            sample_sequence_length=LENGTH,
            add_batch_size=SIZES["num_envs"],
            add_sequences=True,
        ),
        **schedules,
    )


def main() -> None:
    """Trains an agent in 20 parts, and evaluates it after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agent", choices=("dqn", "r2d2"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20_480)
    options = parser.parse_args()
    agent = make(options.agent, options.steps)
    key, state = agent.init(jax.random.key(options.seed))
    key, state = agent.warmup(key, state, 1_024)
    for part in range(20):
        key, state, trained = agent.train(key, state, options.steps // 20)
        key, tried = agent.evaluate(key, state, 1_000)
        value = jnp.nanmean(tried.episode_returns)
        loss = float(trained.losses["losses/loss"])
        print("STEP", (part + 1) * options.steps // 20, "RETURN", float(value), "LOSS", loss)


if __name__ == "__main__":
    main()
