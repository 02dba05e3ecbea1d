"""Rainbow of Stoix on CartPole, with flashbax and with jaxbuf.

python -m experiments.programs.stoix_rainbow /path/to/Stoix
"""

from experiments.programs import _stoix, harness

PROGRAM = _stoix.program(
    "Stoix Rainbow",
    "ff_rainbow",
    20_480,
    "arch.total_num_envs=16 system.total_buffer_size=20000 system.total_batch_size=32 "
    "system.epochs=16",
)

if __name__ == "__main__":
    harness.main(PROGRAM, __doc__)
