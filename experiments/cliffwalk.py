"""The Blind Cliffwalk of prioritized replay: ``python -m experiments.cliffwalk``.

Reproduces figure 1 of Schaul et al., "Prioritized Experience Replay" (ICLR 2016). There are n
states in a row. The right action leads to the next state, the wrong one ends the episode, and only
the right action in the last state has a reward, of 1. The memory holds the transitions of all 2**n
sequences of actions, each up to its first wrong action: 2**(n + 1) - 2 transitions, of which one
has the reward. Tabular Q-learning replays one transition per update, with step size 1/4 and
discount 1 - 1/n, until the mean squared error of Q is below 1e-3.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from numpy.typing import NDArray

import jaxbuf
from experiments import common

STEP_SIZE, THRESHOLD = 0.25, 1e-3
# The paper corrects by no importance weights in this figure either.
SAMPLERS = {
    "uniform": jaxbuf.Uniform(),
    "proportional": jaxbuf.Prioritized(alpha=1.0, epsilon=1e-4),
    "nearly greedy (α = 8)": jaxbuf.Prioritized(alpha=8.0),
}
AGENTS = (*SAMPLERS, "oracle")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    least: int = 2  # states at least
    most: int = 12  # and at most
    seeds: int = 10  # runs of each
    most_updates: int = 2_000_000  # updates after which a run is given up
    out: Path = common.RESULTS  # where the numbers and the plot go


def memory(n: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the state of all transitions of n states, and whether the action is right."""
    # Half of the sequences that reach a state take the right action there, and half the wrong one.
    state = np.repeat(np.arange(n, dtype=np.int32), 2 ** (n - 1 - np.arange(n)))
    return np.tile(state, 2), np.repeat([True, False], len(state))


def true_values(n: int) -> NDArray[Any]:
    """Returns the optimal values of the wrong and the right action in each state, ``[n, 2]``."""
    return np.stack([np.zeros(n), (1 - 1 / n) ** np.arange(n - 1, -1, -1)], axis=1)


def td_error(
    values: Float[Array, "n 2"], state: Int[Array, " B"], right: Bool[Array, " B"]
) -> Float[Array, " B"]:
    """Returns the TD errors of transitions."""
    n = values.shape[0]
    following = jnp.max(values[jnp.minimum(state + 1, n - 1)], axis=-1)
    target = jnp.where(state + 1 < n, (1 - 1 / n) * following, 1.0)
    return jnp.where(right, target, 0.0) - values[state, right.astype(jnp.int32)]


def learned(values: Float[Array, "n 2"]) -> Bool[Array, ""]:
    """Returns True if the mean squared error of the values is below the threshold."""
    truth = jnp.asarray(true_values(values.shape[0]), jnp.float32)
    return jnp.mean((values - truth) ** 2) < THRESHOLD


def replay(n: int, sampler: Any, key: PRNGKeyArray, most: int) -> tuple[Array, Array]:
    """Replays until the values are learned; returns the values and the number of updates."""
    state, right = memory(n)
    example = {"state": jnp.int32(0), "right": jnp.bool_(False)}
    buffer = jaxbuf.ItemBuffer.create(example, len(state), sampler=sampler)
    buffer = buffer.add({"state": state, "right": right})
    key, first_key = jax.random.split(key)

    def unfinished(carry: Any) -> Array:
        return ~learned(carry[0]) & (carry[2] < most)

    def update(carry: Any) -> Any:
        values, buffer, updates, key = carry
        key, sample_key = jax.random.split(key)
        batch = buffer.sample(sample_key, 1)
        error = td_error(values, **batch.data)
        action = batch.data["right"].astype(jnp.int32)
        values = values.at[batch.data["state"], action].add(STEP_SIZE * error)
        if sampler.uses_priority:
            buffer = buffer.update_priority(batch.slots, jnp.abs(error))
        return values, buffer, updates + 1, key

    start = (0.1 * jax.random.normal(first_key, (n, 2)), buffer, jnp.int32(0), key)
    values, _, updates, _ = jax.lax.while_loop(unfinished, update, start)
    return values, updates


def oracle(n: int, key: PRNGKeyArray, most: int) -> tuple[Array, Array]:
    """Replays, each time, the transition after which the mean squared error is lowest."""
    state, right = jnp.repeat(jnp.arange(n), 2), jnp.tile(jnp.asarray([False, True]), n)
    truth = jnp.asarray(true_values(n), jnp.float32)

    def update(carry: Any) -> Any:
        values, updates = carry
        change = STEP_SIZE * td_error(values, state, right).reshape(n, 2)
        # An update changes one value, so the best one lowers this value's squared error most.
        gain = (values - truth) ** 2 - (values + change - truth) ** 2
        best = jnp.argmax(gain)
        return values.ravel().at[best].add(change.ravel()[best]).reshape(n, 2), updates + 1

    def unfinished(carry: Any) -> Array:
        return ~learned(carry[0]) & (carry[1] < most)

    first = 0.1 * jax.random.normal(jax.random.split(key)[1], (n, 2))
    return jax.lax.while_loop(unfinished, update, (first, jnp.int32(0)))


def run(n: int, agent: str, seeds: int, most: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the final values ``[seeds, n, 2]`` and the numbers of updates ``[seeds]``."""

    @jax.jit
    def one_seed(key: PRNGKeyArray) -> tuple[Array, Array]:
        if agent == "oracle":
            return oracle(n, key, most)
        return replay(n, SAMPLERS[agent], key, most)

    # One after the other: under vmap, all seeds would wait for the slowest.
    results = [one_seed(jax.random.key(seed)) for seed in range(seeds)]
    values, updates = zip(*results, strict=True)
    return np.stack(values), np.stack(updates)


def draw(path: Path) -> None:
    """Draws the median number of updates of each agent, with 95 % intervals."""
    table = common.read(path)
    figure, (panel,) = common.figure(1)
    for number, agent in enumerate(AGENTS):
        mine = [row for row in table if row["agent"] == agent]
        curve = common.group(mine, "transitions", "updates")
        common.draw_mean(panel, curve, agent, number, np.median)
    panel.set(xscale="log", yscale="log", xlabel="transitions in the replay memory")
    panel.set_ylabel("updates until MSE < 0.001, median")
    panel.legend(loc="upper left")
    common.save(figure, path)


def table(path: Path) -> str:
    """Returns the median numbers of updates with their 95 % intervals, as a table in markdown."""
    found = common.read(path)
    rows = [
        [n, size]
        + [
            common.spread(
                np.asarray([float(r["updates"]) for r in found if (r["n"], r["agent"]) == (n, a)]),
                ",.0f",
                np.median,
            )
            for a in AGENTS
        ]
        for n, size in dict.fromkeys((r["n"], r["transitions"]) for r in found)
    ]
    return common.markdown(["n", "transitions", *AGENTS], rows)


def main(options: Options) -> None:
    """Runs all agents on all sizes; writes the numbers and the plot."""
    rows, path = list[dict[str, Any]](), options.out / "cliffwalk.csv"
    for n in range(options.least, options.most + 1):
        for agent in AGENTS:
            _, updates = run(n, agent, options.seeds, options.most_updates)
            size = 2 ** (n + 1) - 2
            rows += [
                {"n": n, "transitions": size, "agent": agent, "seed": seed, "updates": int(count)}
                for seed, count in enumerate(updates)
            ]
            print(f"n = {n}, {agent}: median of {np.median(updates):,.0f} updates", flush=True)
        draw(common.write(path, rows))
    print(table(path))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
