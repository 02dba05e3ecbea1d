"""Trains several variants of an agent at once, for examples that compare them."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

import jaxbuf
from jaxbuf.examples import _run

CHUNKS = 50


class Agent(Protocol):
    """An agent in two variants or more, whose training is pure functions of a state."""

    def init(self, key: PRNGKeyArray, variant: Float[Array, ""], /) -> PyTree:
        """Returns the state at the start; its ``step`` is the number of steps so far."""
        ...

    def train(self, state: PyTree, length: int) -> tuple[PyTree, dict[str, Array]]:
        """Trains for ``length`` iterations; returns the next state, and metrics to log."""
        ...


# Cached, so that an agent that runs again in the same process is not compiled again.
@functools.cache
def _programs(agent: Agent, length: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns jitted functions that begin and continue a run, for all seeds of all variants."""
    init = jax.vmap(jax.vmap(agent.init, in_axes=(0, None)), in_axes=(None, 0))
    chunk = jax.vmap(jax.vmap(lambda state: agent.train(state, length)))
    # Donated, so that the buffers are updated in place.
    options = jaxbuf.compiler_options()
    return jax.jit(init), jax.jit(chunk, donate_argnums=0, compiler_options=options)


def compare(
    run: _run.Run[Any],
    agent: Agent,
    variants: Mapping[str, float],
    metric: str,
    *,
    size: int,
    title: str,
) -> None:
    """Trains variants of an agent with the same seeds, in one program, and compares them.

    Logs the metrics about fifty times. Ends with a picture of one of them, and with a table of its
    mean over the last tenth of the run.

    Args:
        run: A run whose configuration has ``seed``, ``seeds``, the number of seeds of each variant,
            and ``steps``, the number of steps of each seed.
        agent: The agent; hashable.
        variants: The number that ``agent.init`` gets, by the name of the variant.
        metric: The name of the metric to compare.
        size: Number of steps in an iteration.
        title: The title of the picture.
    """
    config = run.config
    length = math.ceil(config.steps / size / CHUNKS)
    init, chunk = _programs(agent, length)
    numbers = jnp.asarray([*variants.values()], jnp.float32)
    state = run.begin(init, run.keys, numbers)

    def next_chunk(state: PyTree) -> tuple[PyTree, dict[str, PyTree], str]:
        state, metrics = chunk(state)
        means = np.mean(metrics[metric], axis=1)
        shown = ", ".join(f"{mean:.2f} {v}" for v, mean in zip(variants, means, strict=True))
        logged = {k: dict(zip(variants, v, strict=True)) for k, v in metrics.items()}
        return state, logged, f"{metric} {shown}"

    run.train(
        state,
        next_chunk,
        done=int(state.step[0, 0]),
        until=config.steps,
        size=length * size,
        unit="steps",
        rows=len(variants) * config.seeds,
    )
    step, curves = run.logged("step"), {name: run.logged(f"{metric}/{name}") for name in variants}
    picture = run.out / f"{metric}.png"
    _run.plot(picture, step, curves, title=title, xlabel="steps per seed", ylabel=metric)
    columns = {name: _run.cells(_run.late(curve), "{:.2f}") for name, curve in curves.items()}
    columns["steps of each"] = _run.totals(step[-1], config.seeds)
    run.report(picture.name, columns)
