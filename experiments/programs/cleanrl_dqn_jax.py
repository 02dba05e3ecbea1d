"""DQN of CleanRL, in JAX, on CartPole: with its own buffer, and with jaxbuf in two ways.

python -m experiments.programs.cleanrl_dqn_jax /path/to/cleanrl

The first way keeps the program as it is and calls jaxbuf from Python. The second one holds the
buffer inside the jitted update, which adds the steps since the last update, and samples.
"""

from experiments.programs import _cleanrl, harness

INSIDE = [
    (_cleanrl.IMPORT, "import jaxbuf\n"),
    (
        """    rb = ReplayBuffer(
        args.buffer_size,
        envs.single_observation_space,
        envs.single_action_space,
        "cpu",
        handle_timeout_termination=False,
    )

    @jax.jit
    def update(q_state, observations, actions, next_observations, rewards, dones):
""",
        """    row = (obs[0], obs[0], np.int32(0), np.float32(0), np.bool_(False))
    buffer = jaxbuf.ItemBuffer.create(row, args.buffer_size)
    rows = []

    @functools.partial(jax.jit, donate_argnums=1)
    def update(q_state, buffer, rows, step):
        buffer = buffer.add(rows)
        batch = buffer.sample(jax.random.fold_in(key, step), args.batch_size)
        observations, next_observations, actions, rewards, dones = batch.data
""",
    ),
    ("import os\nimport random\n", "import functools\nimport os\nimport random\n"),
    (
        "        return loss_value, q_pred, q_state\n",
        "        return loss_value, q_pred, q_state, buffer\n",
    ),
    (
        "        rb.add(obs, real_next_obs, actions, rewards, terminations, infos)\n",
        """        rows.append((obs, real_next_obs, actions, rewards, terminations))
        if global_step <= args.learning_starts and global_step % args.train_frequency == 0:
            buffer = jaxbuf.add(buffer, tuple(map(np.concatenate, zip(*rows))))
            rows = []
""",
    ),
    (
        """                data = rb.sample(args.batch_size)
                # perform a gradient-descent step
                loss, old_val, q_state = update(
                    q_state,
                    data.observations.numpy(),
                    data.actions.numpy(),
                    data.next_observations.numpy(),
                    data.rewards.flatten().numpy(),
                    data.dones.flatten().numpy(),
                )
""",
        """                # perform a gradient-descent step
                loss, old_val, q_state, buffer = update(
                    q_state, buffer, tuple(map(np.concatenate, zip(*rows))), global_step
                )
                rows = []
""",
    ),
]

PROGRAM = _cleanrl.program(
    "CleanRL DQN in JAX",
    "dqn_jax.py",
    50_000,
    "--learning-starts 1000",
    {"jaxbuf in the update": {"cleanrl/dqn_jax.py": INSIDE}},
)

if __name__ == "__main__":
    harness.main(PROGRAM, __doc__)
