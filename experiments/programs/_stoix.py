"""Stoix: packages, how its output reads, and the two lines that change."""

import re

from experiments.programs.harness import Point, Program

# Stoix asks for jax below 0.6, and names packages by the newest commit of their repositories. These
# are what its programs import. distrax brings tensorflow-probability 0.25, which cannot be imported
# with jax 0.10: uninstall it, and then install tfp-nightly.
PACKAGES = (
    "flashbax==0.1.3",
    "stoa-env==0.1.2",
    "gymnax==0.0.9",
    "distrax==0.1.9",
    "rlax==0.1.9",
    "tfp-nightly",
    "jumanji==1.1.2",
    "hydra-core",
    "colorama",
    "pandas",
    "rich",
    "orbax-checkpoint",
    "neptune==1.14.0.post2",
    "wandb",
    "tensorboard-logger",
)
LINES = re.compile(
    r"Timestep: (?P<step>\d+)|Q loss: (?P<loss>\S+)"
    r"|EVALUATOR.*Episode return mean: (?P<value>\S+)"
)


def points(text: str) -> list[Point]:
    """Returns the evaluations, each with the mean loss of training before it."""
    found, step, loss = list[Point](), 0, None
    for match in LINES.finditer(re.sub(r"\x1b\[[0-9;]*m", "", text)):
        if match["step"]:
            step = int(match["step"])
        elif match["loss"]:
            loss = float(match["loss"])
        else:
            found.append(Point(step, float(match["value"]), loss))
    return found


def program(name: str, system: str, steps: int, options: str) -> Program:
    """Returns a program of Stoix that learns CartPole, from its Q-learning systems."""
    file = f"stoix/systems/q_learning/{system}.py"
    return Program(
        name=name,
        repository="https://github.com/EdanToledo/Stoix",
        commit="8fff19c94a478c1e1ff75fbf10396d488aa25d70",
        packages=PACKAGES,
        command=f"{file} env=gymnax/cartpole arch.total_timesteps={steps} arch.num_evaluation=10 "
        f"arch.num_eval_episodes=16 arch.absolute_metric=False {options}",
        seed="arch.seed={}",
        steps=steps,
        changes={
            "own": {},
            "jaxbuf": {
                file: [
                    ("import flashbax as fbx", "import jaxbuf.interop.flashbax as fbx"),
                    (
                        "from flashbax.buffers.trajectory_buffer import BufferState",
                        "from jaxbuf.interop.flashbax.buffers.trajectory_buffer import BufferState",
                    ),
                ]
            },
        },
        points=points,
        # tensorboard-logger comes with protocol buffers that are older than today's package.
        environment={"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
    )
