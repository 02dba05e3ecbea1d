"""The example in a single file: it learns, and logs to what its user has."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxbuf
import jaxbuf.testing
import single_file_dqn
from single_file_dqn import Args
from tests.programs.tensorboard import events_of

pytestmark = pytest.mark.usefixtures("promotion")


class Run:
    """A run of Weights & Biases that keeps what it is told."""

    def __init__(self, **settings):
        self.settings, self.logged = settings, []

    def log(self, metrics, step):
        self.logged.append((step, metrics))


def test_it_learns_and_logs_to_the_writers_of_its_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = []
    init = lambda **settings: runs.append(Run(**settings)) or runs[0]  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    args = Args(total_timesteps=16_000, buffer_size=8_000, track=True)
    returns = single_file_dqn.main(args)
    # A random policy keeps the pole up for about 22 steps.
    assert np.mean(returns[:20]) < 40
    assert np.mean(returns[-20:]) > 80
    (run,), (folder,) = runs, (tmp_path / "runs").iterdir()
    assert run.settings["name"] == folder.name
    assert run.settings["config"] == vars(args)
    curves = events_of(folder)
    assert {"charts/episodic_return", "losses/td_loss", "buffer/priority_max"} <= set(curves)
    for name, points in curves.items():
        assert points == [(step, pytest.approx(row[name], rel=1e-5)) for step, row in run.logged]
    assert run.logged[-1][1]["buffer/size"] == 8_000


def test_an_update_copies_no_storage():
    example = {
        **{name: jnp.zeros(4) for name in ("obs", "next_obs")},
        "action": jnp.int32(0),
        "reward": jnp.float32(0),
        "terminated": jnp.bool_(0),
    }
    buffer = jaxbuf.ItemBuffer.create(example, 5_000, sampler=jaxbuf.Prioritized())
    network = single_file_dqn.QNetwork(2)
    params = network.init(jax.random.key(0), jnp.zeros((1, 4)))
    state = single_file_dqn.DQNState.create(
        apply_fn=network.apply, params=params, target_params=params, tx=optax.adam(1e-3)
    )
    rest = (state, jax.random.key(1), 0.4, 8, 0.99, 0.01)
    jaxbuf.testing.assert_no_copy(single_file_dqn.update, buffer, *rest)
