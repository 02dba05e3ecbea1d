"""Reproductions of published results with jaxbuf: ``python -m experiments.NAME``.

Each program writes its numbers to ``docs/results/NAME.csv`` and the plot of them beside it.
"""
