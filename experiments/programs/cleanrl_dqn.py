"""DQN of CleanRL, in torch, on CartPole: with its own buffer and with jaxbuf called from Python.

python -m experiments.programs.cleanrl_dqn /path/to/cleanrl
"""

from experiments.programs import _cleanrl, harness

PROGRAM = _cleanrl.program("CleanRL DQN", "dqn.py", 50_000, "--learning-starts 1000")

if __name__ == "__main__":
    harness.main(PROGRAM, __doc__)
