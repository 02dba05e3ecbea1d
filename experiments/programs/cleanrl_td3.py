"""TD3 of CleanRL, in torch, on Pendulum: with its own buffer and with jaxbuf called from Python.

python -m experiments.programs.cleanrl_td3 /path/to/cleanrl
"""

from experiments.programs import _cleanrl, harness

PROGRAM = _cleanrl.program(
    "CleanRL TD3",
    "td3_continuous_action.py",
    8_000,
    "--env-id Pendulum-v1 --learning-starts 1000",
)

if __name__ == "__main__":
    harness.main(PROGRAM, __doc__)
