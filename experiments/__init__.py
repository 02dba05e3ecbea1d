"""Reproductions of published results with jaxbuf: ``python -m experiments.NAME``.

Each program writes its numbers to ``docs/results/NAME.csv`` and the plot of them beside it. Most
train the programs of ``examples``.
"""

import sys
from pathlib import Path

# They are scripts, which import what stands beside them.
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
