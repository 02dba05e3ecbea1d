"""Trains DQN of ajax-rl on CartPole, and prints its evaluations; see ``ajax_dqn``."""

import argparse

from ajax import DQN
from ajax.logging.wandb_logging import LoggingConfig


def main() -> None:
    """Trains an agent, which learns from a buffer that samples rows of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30_000)
    options = parser.parse_args()
    agent = DQN("CartPole-v1", n_envs=4, buffer_size=20_000, target_update_interval=200)
    logging = LoggingConfig(config={}, log_frequency=options.steps // 20, use_wandb=False)
    _, found = agent.train(seed=options.seed, n_timesteps=options.steps, logging_config=logging)
    for step, value in zip(
        found["timestep"][0], found["Eval/episodic mean reward"][0], strict=True
    ):
        print("STEP", int(step), "RETURN", float(value))


if __name__ == "__main__":
    main()
