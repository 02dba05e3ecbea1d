"""The Blind Cliffwalk of prioritized replay: ``python -m experiments.cliffwalk``.

Reproduces figures 1 and 2 of Schaul et al., "Prioritized Experience Replay" (ICLR 2016). There are
n states in a row. The right action leads to the next state, the wrong one ends the episode, and
only the right action in the last state has a reward, of 1. The memory holds the transitions of all
2**n sequences of actions, each up to its first wrong action: 2**(n + 1) - 2 transitions, of which
one has the reward. Q-learning replays one transition per update, with step size 1/4 and discount
1 - 1/n, until the mean squared error of Q is below 1e-3. Q is a table, or a linear function of the
state and a constant.
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
# Without importance weights. The paper names no exponents for this task; it chose 0.6 and 0.7 for
# Atari.
SAMPLERS = {
    "uniform": jaxbuf.Uniform(),
    "proportional, α = 0.6": jaxbuf.Prioritized(alpha=0.6, epsilon=1e-4),
    "proportional, α = 1": jaxbuf.Prioritized(alpha=1.0, epsilon=1e-4),
    "rank-based, α = 0.7": jaxbuf.RankBased(alpha=0.7),
    "rank-based, α = 1": jaxbuf.RankBased(alpha=1.0),
    "nearly greedy, α = 8": jaxbuf.Prioritized(alpha=8.0),
}
AGENTS = (*SAMPLERS, "oracle")
# Linear values have a constant feature beside the states.
FORMS = {"a table": False, "linear": True}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    least: int = 2  # states at least
    most: int = 12  # and at most
    seeds: int = 10  # runs of each
    most_updates: int = 500_000  # updates after which a run is given up
    out: Path = common.RESULTS  # where the numbers and the plot go


def memory(n: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the state of all transitions of n states, and whether the action is right."""
    # Half of the sequences that reach a state take the right action there, and half the wrong one.
    state = np.repeat(np.arange(n, dtype=np.int32), 2 ** (n - 1 - np.arange(n)))
    return np.tile(state, 2), np.repeat([True, False], len(state))


def true_values(n: int) -> NDArray[Any]:
    """Returns the optimal values of the wrong and the right action in each state, ``[n, 2]``."""
    return np.stack([np.zeros(n), (1 - 1 / n) ** np.arange(n - 1, -1, -1)], axis=1)


def values_of(weights: Float[Array, "m 2"], n: int) -> Float[Array, "n 2"]:
    """Returns the values of the wrong and the right action in each state.

    Args:
        weights: Of each feature and action, ``[n, 2]``; with the constant ``[n + 1, 2]``.
        n: The number of states.
    """
    # The right action alternates, so that the constant's weights do not learn to be right.
    state, right = np.indices((n, 2))
    action = (state + right) % 2
    values = weights[state, action]
    return values + weights[n, action] if len(weights) > n else values


def td_error(
    values: Float[Array, "n 2"], state: Int[Array, " B"], right: Bool[Array, " B"]
) -> Float[Array, " B"]:
    """Returns the TD errors of transitions."""
    n = values.shape[0]
    following = jnp.max(values[jnp.minimum(state + 1, n - 1)], axis=-1)
    target = jnp.where(state + 1 < n, (1 - 1 / n) * following, 1.0)
    return jnp.where(right, target, 0.0) - values[state, right.astype(jnp.int32)]


def learn(
    weights: Float[Array, "m 2"], n: int, state: Int[Array, ""], right: Bool[Array, ""]
) -> tuple[Float[Array, "m 2"], Float[Array, ""]]:
    """Returns the weights after an update with one transition, and the TD error before."""
    error = td_error(values_of(weights, n), state[None], right[None])[0]
    action = (state + right.astype(jnp.int32)) % 2
    weights = weights.at[state, action].add(STEP_SIZE * error)
    if len(weights) > n:
        weights = weights.at[n, action].add(STEP_SIZE * error)
    return weights, error


def squared_error(weights: Float[Array, "m 2"], n: int) -> Float[Array, ""]:
    """Returns the mean squared error of the values."""
    return jnp.mean((values_of(weights, n) - jnp.asarray(true_values(n), jnp.float32)) ** 2)


def fill(n: int, sampler: Any, key: PRNGKeyArray) -> jaxbuf.ItemBuffer:
    """Returns a buffer of all transitions in random order.

    The order counts where ranks are equal, as they are at first: the lower slot comes first.
    """
    state, right = memory(n)
    order = jax.random.permutation(key, len(state))
    example = {"state": jnp.int32(0), "right": jnp.bool_(False)}
    buffer = jaxbuf.ItemBuffer.create(example, len(state), sampler=sampler)
    return buffer.add({"state": jnp.asarray(state)[order], "right": jnp.asarray(right)[order]})


def replay(
    n: int, sampler: Any, weights: Float[Array, "m 2"], key: PRNGKeyArray, most: int
) -> tuple[Float[Array, "m 2"], Int[Array, ""]]:
    """Replays until the values are learned; returns the weights and the number of updates."""
    key, order_key = jax.random.split(key)
    buffer = fill(n, sampler, order_key)

    def unfinished(carry: Any) -> Array:
        return (squared_error(carry[0], n) >= THRESHOLD) & (carry[2] < most)

    def update(carry: Any) -> Any:
        weights, buffer, updates, key = carry
        key, sample_key = jax.random.split(key)
        batch = buffer.sample(sample_key, 1)
        weights, error = learn(weights, n, batch.data["state"][0], batch.data["right"][0])
        if sampler.uses_priority:
            buffer = buffer.update_priority(batch.slots, jnp.abs(error)[None])
        return weights, buffer, updates + 1, key

    weights, _, updates, _ = jax.lax.while_loop(
        unfinished, update, (weights, buffer, jnp.int32(0), key)
    )
    return weights, updates


def oracle(
    n: int, weights: Float[Array, "m 2"], most: int
) -> tuple[Float[Array, "m 2"], Int[Array, ""]]:
    """Replays, each time, the transition after which the mean squared error is lowest."""
    state, right = jnp.repeat(jnp.arange(n), 2), jnp.tile(jnp.asarray([False, True]), n)

    def update(carry: Any) -> Any:
        weights, updates = carry
        after, _ = jax.vmap(lambda s, r: learn(weights, n, s, r))(state, right)
        errors = jax.vmap(lambda weights: squared_error(weights, n))(after)
        return after[jnp.argmin(errors)], updates + 1

    def unfinished(carry: Any) -> Array:
        return (squared_error(carry[0], n) >= THRESHOLD) & (carry[1] < most)

    return jax.lax.while_loop(unfinished, update, (weights, jnp.int32(0)))


def run(
    n: int, agent: str, seeds: int, most: int, *, linear: bool = False
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the final values ``[seeds, n, 2]`` and the numbers of updates ``[seeds]``."""

    @jax.jit
    def one_seed(key: PRNGKeyArray) -> tuple[Array, Array]:
        key, first_key = jax.random.split(key)
        weights = 0.1 * jax.random.normal(first_key, (n + linear, 2))
        if agent == "oracle":
            weights, updates = oracle(n, weights, most)
        else:
            weights, updates = replay(n, SAMPLERS[agent], weights, key, most)
        return values_of(weights, n), updates

    # One after the other: under vmap, all seeds would wait for the slowest.
    results = [one_seed(jax.random.key(seed)) for seed in range(seeds)]
    values, updates = zip(*results, strict=True)
    return np.stack(values), np.stack(updates)


def select(rows: list[dict[str, str]], **wanted: str) -> list[dict[str, str]]:
    """Returns the rows that have these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def draw(path: Path) -> None:
    """Draws the median number of updates of each agent, with 95 % intervals.

    Sizes at which a run was given up are left out.
    """
    found = common.read(path)
    figure, panels = common.figure(len(FORMS))
    for panel, form in zip(panels, FORMS, strict=True):
        for number, agent in enumerate(AGENTS):
            curve = common.group(select(found, Q=form, agent=agent), "transitions", "updates")
            known = {size: counts for size, counts in curve.items() if np.isfinite(counts).all()}
            if known:
                common.draw_mean(panel, known, agent, number, np.median)
        panel.set(title=f"Q is {form}", xscale="log", yscale="log", xlabel="transitions in memory")
    panels[0].set_ylabel("updates until MSE < 0.001, median")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    common.save(figure, path)


def table(path: Path) -> str:
    """Returns median numbers of updates with 95 % intervals for every other n, in markdown."""
    found = common.read(path)
    every = list(dict.fromkeys(row["n"] for row in found))
    sizes = every[::-2][::-1]
    rows = [
        [form, agent, *(cell(select(found, Q=form, agent=agent, n=n)) for n in sizes)]
        for form in FORMS
        for agent in AGENTS
    ]
    return common.markdown(["Q", "replay", *(f"n = {n}" for n in sizes)], rows)


def cell(rows: list[dict[str, str]]) -> str:
    """Returns the median number of updates with its interval, or how many runs were given up."""
    updates = np.asarray([float(row["updates"]) for row in rows])
    if given_up := np.sum(np.isinf(updates)):
        return f"{given_up} of {len(updates)} given up"
    return common.spread(updates, ",.0f", np.median)


def main(options: Options) -> None:
    """Runs all agents on all sizes; writes the numbers and the plot."""
    rows, path = list[dict[str, Any]](), options.out / "cliffwalk.csv"
    for n in range(options.least, options.most + 1):
        for form, linear in FORMS.items():
            for agent in AGENTS:
                most = options.most_updates
                _, counts = run(n, agent, options.seeds, most, linear=linear)
                updates = [int(count) if count < most else np.inf for count in counts]
                about = {"n": n, "transitions": 2 ** (n + 1) - 2, "Q": form, "agent": agent}
                rows += [about | {"seed": s, "updates": count} for s, count in enumerate(updates)]
                print(f"n = {n}, {form}, {agent}: {np.median(updates):,.0f} updates", flush=True)
        draw(common.write(path, rows))
    print(table(path))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
