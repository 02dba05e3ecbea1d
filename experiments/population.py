"""A population with different exponents in one program: ``python -m experiments.population``.

Agents replay the Blind Cliffwalk (see ``experiments.cliffwalk``) by priority, each with its own
``alpha``. They learn all together, under one ``vmap`` with a number that varies, and then one by
one, where ``alpha`` is part of the program.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import NDArray

import jaxbuf
from experiments import cliffwalk, common

WAYS = ("together", "one by one")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    states: int = 10  # states in a row
    agents: int = 8  # exponents from 0 to 1
    seeds: int = 4  # agents of each exponent
    updates: int = 4000  # updates of each agent
    points: int = 20  # points of a curve
    repeats: int = 5  # times that each way is timed
    out: Path = common.RESULTS  # where the numbers and the plot go


def learn(options: Options, alpha: Any, key: PRNGKeyArray) -> Float[Array, " P"]:
    """Returns the mean squared errors of one agent, at equal distances."""
    n = options.states
    sampler = jaxbuf.Prioritized(alpha=alpha, epsilon=1e-4)
    key, first_key, order_key = jax.random.split(key, 3)
    weights = 0.1 * jax.random.normal(first_key, (n, 2))
    buffer = cliffwalk.fill(n, sampler, order_key)

    def update(carry: Any, key: PRNGKeyArray) -> tuple[Any, None]:
        weights, buffer = carry
        batch = buffer.sample(key, 1)
        weights, error = cliffwalk.learn(weights, n, batch.data["state"][0], batch.data["right"][0])
        return (weights, buffer.update_priority(batch.slots, jnp.abs(error)[None])), None

    def point(carry: Any, keys: PRNGKeyArray) -> tuple[Any, Array]:
        carry, _ = jax.lax.scan(update, carry, keys)
        return carry, cliffwalk.squared_error(carry[0], n)

    keys = jax.random.split(key, (options.points, options.updates // options.points))
    return jax.lax.scan(point, (weights, buffer), keys)[1]


def exponents(options: Options) -> NDArray[Any]:
    """Returns the exponents of the agents."""
    return np.linspace(0, 1, options.agents).astype(np.float32)


def ways(options: Options) -> dict[str, Callable[[], Any]]:
    """Returns functions that compile and run all agents, and return their curves ``[A, S, P]``."""
    alphas, keys = exponents(options), jax.random.split(jax.random.key(0), options.seeds)

    def together() -> Callable[[], Any]:
        def one(alpha: Array, key: PRNGKeyArray) -> Array:
            return learn(options, jaxbuf.Varying(alpha), key)

        each_seed = jax.vmap(one, in_axes=(None, 0))
        run = jax.jit(
            jax.vmap(each_seed, in_axes=(0, None)), compiler_options=jaxbuf.compiler_options()
        )
        return lambda: run(alphas, keys)

    def one_by_one() -> Callable[[], Any]:
        runs = [
            jax.jit(
                lambda key, alpha=alpha: learn(options, float(alpha), key),
                compiler_options=jaxbuf.compiler_options(),
            )
            for alpha in alphas
        ]
        return lambda: np.stack([[run(key) for key in keys] for run in runs])

    return dict(zip(WAYS, (together, one_by_one), strict=True))


def compare(options: Options) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the curves of all agents, both ways, and the times that the ways take."""
    curves, times, ready = {}, list[dict[str, Any]](), {}

    def timed(way: str, what: str, run: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        found = np.asarray(run())
        times.append({"way": way, "what": what, "seconds": f"{time.perf_counter() - begin:.4f}"})
        return found

    for way, make in ways(options).items():
        ready[way] = make()
        curves[way] = timed(way, "first", ready[way])
    for _ in range(options.repeats):
        for way, run in ready.items():
            timed(way, "again", run)
    each = options.updates // options.points
    rows = [
        {"alpha": f"{alpha:.3f}", "seed": seed, "update": (point + 1) * each}
        | {way: f"{curve[i, seed, point]:.6g}" for way, curve in curves.items()}
        for i, alpha in enumerate(exponents(options))
        for seed in range(options.seeds)
        for point in range(options.points)
    ]
    return rows, times


def draw(path: Path) -> None:
    """Draws the curves of the population, and on top those of agents that learn alone, as dots."""
    found = common.read(path)
    figure, panels = common.figure(1)
    alphas = list(dict.fromkeys(row["alpha"] for row in found))
    for number, alpha in enumerate(alphas[:: max(len(alphas) // 4, 1)]):
        mine = [row for row in found if row["alpha"] == alpha]
        color = common.COLORS[number % len(common.COLORS)]
        lines = {way: common.group(mine, "update", way) for way in WAYS}
        x = list(lines["together"])
        together, alone = ([values.mean() for values in lines[way].values()] for way in WAYS)
        panels[0].plot(x, together, color=color, label=f"α = {alpha}")
        panels[0].plot(x, alone, "o", color=color, markersize=3)
    panels[0].set(yscale="log", xlabel="updates", ylabel="mean squared error")
    panels[0].legend()
    common.save(figure, path)


def table(path: Path) -> str:
    """Returns the times of both ways, and how far apart their curves are, in markdown."""
    found, times = common.read(path), common.read(path.with_name(f"{path.stem}_times.csv"))

    def seconds(way: str, what: str) -> float:
        chosen = [row for row in times if (row["way"], row["what"]) == (way, what)]
        return float(np.median([float(row["seconds"]) for row in chosen]))

    rows = [[way, *(f"{seconds(way, what):.2f} s" for what in ("first", "again"))] for way in WAYS]
    ratios = [seconds(WAYS[1], what) / seconds(WAYS[0], what) for what in ("first", "again")]
    rows.append(["ratio", *(f"{ratio:.1f}" for ratio in ratios)])
    one, two = (np.asarray([float(row[way]) for row in found]) for way in WAYS)
    apart = f"Largest relative difference of two points: {np.max(np.abs(one / two - 1)):.1e}."
    header = ["agents learn", "with compilation", "again"]
    return f"{common.markdown(header, rows)}\n\n{apart}"


def main(options: Options) -> None:
    """Trains all agents both ways; writes the numbers and the plot."""
    rows, times = compare(options)
    path = common.write(options.out / "population.csv", rows)
    common.write(options.out / "population_times.csv", times)
    draw(path)
    print(table(path))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
