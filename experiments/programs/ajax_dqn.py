"""DQN of ajax-rl on CartPole, with flashbax and with jaxbuf.

python -m experiments.programs.ajax_dqn /path/to/the/unzipped/wheel
"""

import re

from experiments.programs import harness
from experiments.programs.harness import Point, Program

STEPS = 30_000
STEP = re.compile(r"STEP (\d+) RETURN (\S+)")
IMPORT = ("import flashbax as fbx", "import jaxbuf.interop.flashbax as fbx")


def points(text: str) -> list[Point]:
    """Returns the evaluations."""
    return [Point(int(step), float(value)) for step, value in STEP.findall(text)]


PROGRAM = Program(
    name="ajax-rl DQN",
    repository="https://pypi.org/project/ajax-rl",
    commit="0.4.0",
    packages=("ajax-rl==0.4.0", "flashbax==0.1.3", "gymnax==1.0.1", "flax", "jaxtyping"),
    command="-m experiments.programs._ajax",
    seed="--seed {}",
    steps=STEPS,
    changes={
        "own": {},
        "jaxbuf": {
            "ajax/buffers/utils.py": [
                IMPORT,
                ("from flashbax.buffers", "from jaxbuf.interop.flashbax.buffers"),
                ("from flashbax.utils", "from jaxbuf.interop.flashbax.utils"),
            ],
            "ajax/environments/interaction.py": [IMPORT],
            "ajax/state.py": [IMPORT],
            "ajax/types.py": [IMPORT],
        },
    },
    points=points,
    # The second run would find compiled what the first one had to compile.
    environment={"AJAX_NO_COMPILE_CACHE": "1"},
)

if __name__ == "__main__":
    harness.main(PROGRAM, __doc__)
