"""R2D2 of memorax on CartPole, with its prioritized buffer of episodes and with one of jaxbuf.

python -m experiments.programs.memorax_r2d2 /path/to/the/unzipped/wheel
"""

import re

from experiments.programs import harness
from experiments.programs.harness import Point, Program

STEPS = 20_480
STEP = re.compile(r"STEP (\d+) RETURN (\S+) LOSS (\S+)")
FILE = "memorax/buffers/prioritised_episode_buffer.py"

# What the file imports, and what is left of it: functions of flashbax that compute with the arrays
# of its states are used by functions that are not called any more.
IMPORTS = """from flashbax import utils
from flashbax.buffers import sum_tree
from flashbax.buffers.prioritised_trajectory_buffer import (
    SET_BATCH_FN, Priorities, PrioritisedTrajectoryBuffer,
    PrioritisedTrajectoryBufferSample, PrioritisedTrajectoryBufferState,
    Probabilities, get_sum_tree_capacity, prioritised_init, set_priorities,
    validate_device, validate_priority_exponent)
from flashbax.buffers.sum_tree import SumTreeState
from flashbax.buffers.trajectory_buffer import (
    Experience, can_sample, validate_trajectory_buffer_args)
from flashbax.utils import add_dim_to_args
"""
INSTEAD = """import jaxbuf
import jaxbuf.interop.flashbax as fbx
from jaxbuf.interop.flashbax import (
    Experience, PrioritisedTrajectoryBuffer, PrioritisedTrajectoryBufferSample,
    PrioritisedTrajectoryBufferState, utils)
Priorities = Probabilities = SumTreeState = jax.Array
"""
BUFFER = """def make_prioritised_episode_buffer(
    max_length, min_length, sample_batch_size, sample_sequence_length, add_batch_size,
    add_sequences=True, priority_exponent=0.6):
    length = max_length // add_batch_size
    base = fbx.make_prioritised_trajectory_buffer(
        add_batch_size, sample_batch_size, sample_sequence_length, 1,
        max(min_length // add_batch_size, sample_sequence_length), max_length_time_axis=length,
        priority_exponent=priority_exponent)

    def init(step):
        return fbx.TrajectoryBufferState(jaxbuf.TrajectoryBuffer.create(
            step, add_batch_size, length, sequence_length=sample_sequence_length,
            sampler=jaxbuf.Prioritized(alpha=priority_exponent),
            episodes=jaxbuf.Episodes(terminated="done", period=2**30)))

    return base.replace(
        init=init, can_sample=lambda state: base.can_sample(state) & state.buffer.can_sample())


def _own_make_prioritised_episode_buffer(
"""


def points(text: str) -> list[Point]:
    """Returns the evaluations, each with the mean loss of training before it."""
    return [Point(int(step), float(value), float(loss)) for step, value, loss in STEP.findall(text)]


def _to(name: str) -> tuple[str, str]:
    return (f"from flashbax{name}", f"from jaxbuf.interop.flashbax{name}")


PROGRAM = Program(
    name="memorax R2D2",
    repository="https://pypi.org/project/memorax",
    commit="1.0.1",
    packages=("memorax==1.0.1", "flashbax==0.1.3", "gymnax==0.0.9", "flax", "jaxtyping"),
    command="-m experiments.programs._memorax r2d2",
    seed="--seed {}",
    steps=STEPS,
    changes={
        "own": {},
        "jaxbuf": {
            FILE: [(IMPORTS, INSTEAD), ("def make_prioritised_episode_buffer(\n", BUFFER)],
            "memorax/buffers/episode_buffer.py": [
                _to(" import"),
                _to(".buffers"),
                _to(".utils"),
            ],
            "memorax/utils/typing.py": [
                ("import flashbax as fbx", "import jaxbuf.interop.flashbax as fbx")
            ],
        },
    },
    points=points,
)

if __name__ == "__main__":
    harness.main(PROGRAM, __doc__)
