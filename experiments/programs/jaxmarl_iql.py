"""Independent Q-learning of JaxMARL with a recurrent network, on MPE's simple spread.

python -m experiments.programs.jaxmarl_iql /path/to/JaxMARL
"""

import re

from experiments.programs import harness
from experiments.programs.harness import Point, Program

FILE = "baselines/QLearning/iql_rnn.py"
STEPS = 208 * 960  # 8 environments, 26 steps in each update
LINE = re.compile(r"RETURN (\d+) (\S+) (\S+)")
PRINT = """print(
                        "RETURN",
                        int(metrics["env_step"]),
                        float(metrics["test_returned_episode_returns"]),
                        float(metrics["loss"]),
                    )"""


def points(text: str) -> list[Point]:
    """Returns the last evaluation as of each update."""
    return [Point(int(step), float(value), float(loss)) for step, value, loss in LINE.findall(text)]


PROGRAM = Program(
    name="JaxMARL IQL",
    repository="https://github.com/FLAIROx/JaxMARL",
    commit="c793d095618c6d3edfb5632802348f57b70a4b94",
    packages=(
        "flashbax==0.1.3",
        "gymnax==0.0.9",
        "optax",
        "hydra-core",
        "safetensors",
        "wandb",
        "matplotlib",
    ),
    command=f"{FILE} +alg=ql_rnn_mpe alg.TOTAL_TIMESTEPS={STEPS} alg.LOG_AGENTS_SEPARATELY=False",
    seed="SEED={}",
    steps=STEPS,
    changes={
        "own": {},
        "jaxbuf": {
            FILE: [("import flashbax as fbx", "import jaxbuf.interop.flashbax as fbx")],
        },
    },
    points=points,
    # It reports to wandb only.
    repairs={
        FILE: [
            ('if config["WANDB_MODE"] != "disabled":', "if True:"),
            ("wandb.log(metrics)", PRINT),
        ]
    },
)

if __name__ == "__main__":
    harness.main(PROGRAM, __doc__)
