"""DQN of rejax on CartPole, with its own buffer and with jaxbuf.

python -m experiments.programs.rejax_dqn /path/to/rejax
"""

import re

from experiments.programs import harness
from experiments.programs.harness import Point, Program

# Takes the place of rejax's class of this name, which stays in the file and is not used.
CLASS = """class ReplayBuffer(struct.PyTreeNode):
    buffer: jaxbuf.ItemBuffer

    @classmethod
    def empty(cls, size, obs_space, action_space):
        obs = jnp.zeros(obs_space.shape, obs_space.dtype)
        action = jnp.zeros(action_space.shape, action_space.dtype)
        step = Minibatch(obs, action, jnp.float32(0), jnp.bool_(False), obs)
        sampler = jaxbuf.Uniform(replacement=False)
        return cls(jaxbuf.ItemBuffer.create(step, size, sampler=sampler))

    def extend(self, batch):
        return self.replace(buffer=self.buffer.add(batch))

    def sample(self, num, rng):
        return self.buffer.sample(rng, num).data


class _OwnReplayBuffer(CircularBuffer):
"""
STEP = re.compile(r"Step (\d+), Mean episode length: \S+ Mean return: (\S+)")


def points(text: str) -> list[Point]:
    """Returns the evaluations."""
    return [Point(int(step), float(value)) for step, value in STEP.findall(text)]


PROGRAM = Program(
    name="rejax DQN",
    repository="https://github.com/keraJLi/rejax",
    commit="d7510951b7a89ca8463cb2a6d18e21750ec454ff",
    packages=("gymnax==0.0.9", "distrax==0.1.9", "tfp-nightly", "optax", "pyyaml", "matplotlib"),
    command="train.py --algorithm dqn --config configs/gymnax/cartpole.yaml",
    seed="--seed_id {}",
    steps=100_000,
    changes={
        "own": {},
        "jaxbuf": {
            "src/rejax/buffers.py": [
                ("import chex\nimport jax\n", "import chex\nimport jax\nimport jaxbuf\n"),
                ("class ReplayBuffer(CircularBuffer):\n", CLASS),
            ]
        },
    },
    points=points,
    source="src",
)

if __name__ == "__main__":
    harness.main(PROGRAM, __doc__)
