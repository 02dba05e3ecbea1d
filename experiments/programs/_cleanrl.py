"""CleanRL: packages, repairs, and a class of its calls over a buffer of jaxbuf."""

import re
from collections.abc import Mapping

from experiments.programs.harness import Changes, Point, Program

# CleanRL asks for Python below 3.11, and for older versions of torch and jax.
PACKAGES = ("torch==2.14.1", "gymnasium==0.29.1", "tensorboard", "tyro", "optax")
EPISODE = re.compile(r"global_step=(\d+), episodic_return=\[?([^\]\s]+)")
# gymnasium 0.29 looks for a name that NumPy 2 has no longer, in its checks of environments only.
MAKE = ("env = gym.make(env_id)\n", "env = gym.make(env_id, disable_env_checker=True)\n")
IMPORT = "from cleanrl_utils.buffers import ReplayBuffer\n"
# Has the calls of CleanRL's own class, over a buffer of jaxbuf that is called from Python.
CLASS = """import jax
import jaxbuf
import torch
from cleanrl_utils.buffers import ReplayBufferSamples


class ReplayBuffer:
    def __init__(self, size, observation_space, action_space, device, **options):
        obs = jax.ShapeDtypeStruct(observation_space.shape, observation_space.dtype)
        action = jax.ShapeDtypeStruct(action_space.shape or (1,), action_space.dtype)
        one = jax.ShapeDtypeStruct((1,), np.float32)
        row = ReplayBufferSamples(obs, action, obs, one, one)
        self.buffer = jaxbuf.ItemBuffer.create(row, size)
        self.key = jax.random.key(np.random.randint(2**31))

    def add(self, obs, next_obs, action, reward, done, infos):
        done, reward = done.astype(np.float32)[:, None], reward[:, None]
        action = action.reshape(len(obs), -1)
        rows = ReplayBufferSamples(obs, action, next_obs, done, reward)
        self.buffer = jaxbuf.add(self.buffer, rows)

    def sample(self, batch_size):
        self.key, key = jax.random.split(self.key)
        data = jaxbuf.sample(self.buffer, key, batch_size).data
        tensors = ReplayBufferSamples(*(torch.from_numpy(np.array(leaf)) for leaf in data))
        if not tensors.actions.is_floating_point():
            tensors = tensors._replace(actions=tensors.actions.long())
        return tensors
"""


def points(text: str) -> list[Point]:
    """Returns the episodes of training."""
    return [Point(int(step), float(value)) for step, value in EPISODE.findall(text)]


def program(
    name: str, file: str, steps: int, options: str, further: Mapping[str, Changes] | None = None
) -> Program:
    """Returns a program of CleanRL, with jaxbuf's buffer behind the calls of its own class."""
    return Program(
        name=name,
        repository="https://github.com/vwxyzjn/cleanrl",
        commit="fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
        packages=PACKAGES,
        command=f"cleanrl/{file} --total-timesteps {steps} {options}",
        seed="--seed {}",
        steps=steps,
        changes={
            "own": {},
            "jaxbuf": {f"cleanrl/{file}": [(IMPORT, CLASS)]},
            **(further or {}),
        },
        points=points,
        repairs={f"cleanrl/{file}": [MAKE]},
        # With more threads, torch would count the time in which it waits for a core.
        environment={"OMP_NUM_THREADS": "1"},
    )
