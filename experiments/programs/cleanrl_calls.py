"""Times of CleanRL's buffer in NumPy, and of jaxbuf called from Python or inside the update.

python -m experiments.programs.cleanrl_calls /path/to/cleanrl

Writes ``docs/results/programs_calls.csv``. Needs what ``cleanrl_dqn_jax`` needs.
"""

import argparse
import csv
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import jaxbuf
from experiments.programs import _cleanrl
from experiments.programs.harness import RESULTS

CAPACITY, BATCH_SIZE, EVERY, REPEATS = 10_000, 128, 10, 400
SPACES = (gymnasium.spaces.Box(-1.0, 1.0, (4,)), gymnasium.spaces.Discrete(2))


def params() -> dict[str, Any]:
    """Returns the parameters of CleanRL's network."""
    sizes, keys = (4, 120, 84, 2), jax.random.split(jax.random.key(0), 3)
    return {
        str(i): (0.1 * jax.random.normal(keys[i], sizes[i : i + 2]), jnp.zeros(sizes[i + 1]))
        for i in range(3)
    }


def value(params: dict[str, Any], obs: Any) -> Any:
    """Returns the values of all actions, ``[B, 2]``."""
    for i in range(2):
        obs = jax.nn.relu(obs @ params[str(i)][0] + params[str(i)][1])
    return obs @ params["2"][0] + params["2"][1]


def learn(state: Any, obs: Any, next_obs: Any, action: Any, reward: Any, terminated: Any) -> Any:
    """Makes the update of CleanRL's ``dqn_jax.py``."""
    weights, moments = state
    target = reward + 0.99 * (1 - terminated) * jnp.max(value(weights, next_obs), axis=-1)

    def loss(weights: Any) -> Any:
        chosen = jnp.take_along_axis(value(weights, obs), action.reshape(-1, 1), axis=-1)
        return jnp.mean((chosen[:, 0] - target) ** 2)

    changes, moments = optax.adam(2.5e-4).update(jax.grad(loss)(weights), moments)
    return optax.apply_updates(weights, changes), moments


@functools.partial(jax.jit, donate_argnums=1)
def learn_inside(state: Any, buffer: Any, rows: Any, step: int) -> Any:
    """Adds rows, samples and makes the same update, as one program."""
    buffer = buffer.add(rows)
    batch = buffer.sample(jax.random.fold_in(jax.random.key(0), step), BATCH_SIZE)
    obs, next_obs, action, reward, terminated = batch.data
    return learn(state, obs, next_obs, action, reward, terminated.astype(jnp.float32)), buffer


def step(rng: np.random.Generator) -> tuple[Any, ...]:
    """Returns a step of one environment, as a vector environment of Gymnasium does."""
    obs, next_obs = rng.normal(size=(2, 1, 4)).astype(np.float32)
    return obs, next_obs, rng.integers(0, 2, 1), np.ones(1), np.zeros(1, bool)


def microseconds(function: Callable[[], Any]) -> float:
    """Returns how long a call of a function takes."""
    start = time.perf_counter()
    function()
    return 1e6 * (time.perf_counter() - start)


def quiet(times: Sequence[float]) -> float:
    """Returns the time below which a tenth of the calls stayed: others use the same cores."""
    return float(np.quantile(times, 0.1))


def cycles(own: type, called: type) -> dict[str, tuple[Any, Any, Callable[[], Any]]]:
    """Returns, for each way, its functions that add a step, sample, and do all between updates."""
    rng = np.random.default_rng(0)
    steps = [step(rng) for _ in range(EVERY)]
    jitted = jax.jit(learn)
    found = dict[str, tuple[Any, Any, Callable[[], Any]]]()
    for name, kind in {"NumPy": own, "jaxbuf, called from Python": called}.items():
        buffer = kind(CAPACITY, *SPACES, "cpu", handle_timeout_termination=False)
        for _ in range(CAPACITY // EVERY):
            for one in steps:
                buffer.add(*one, {})
        found[name] = outside(buffer, steps, jitted)
    found["jaxbuf, inside the update"] = (None, None, inside(steps))
    return found


def outside(buffer: Any, steps: list[Any], jitted: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """Returns the three functions of a buffer with the calls of CleanRL's."""
    weights = params()
    state = (weights, optax.adam(2.5e-4).init(weights))

    def cycle() -> None:
        nonlocal state
        for one in steps:
            buffer.add(*one, {})
        data = buffer.sample(BATCH_SIZE)
        state = jitted(
            state,
            data.observations.numpy(),
            data.next_observations.numpy(),
            data.actions.numpy(),
            data.rewards.flatten().numpy(),
            data.dones.flatten().numpy(),
        )
        jax.block_until_ready(state)

    return lambda: buffer.add(*steps[0], {}), lambda: buffer.sample(BATCH_SIZE), cycle


def inside(steps: list[Any]) -> Callable[[], Any]:
    """Returns the function that does all between two updates, with the buffer inside of it."""
    row = (np.zeros(4, np.float32), np.zeros(4, np.float32), np.int32(0), np.float32(0), np.False_)
    buffer = jaxbuf.ItemBuffer.create(row, CAPACITY)
    weights, number = params(), 0
    state = (weights, optax.adam(2.5e-4).init(weights))

    def cycle() -> None:
        nonlocal state, buffer, number
        rows = list[Any]()
        for one in steps:
            rows.append(one)
        batch = tuple(map(np.concatenate, zip(*rows, strict=True)))
        state, buffer = learn_inside(state, buffer, batch, number)
        jax.block_until_ready(state)
        number += 1

    for _ in range(CAPACITY // EVERY):
        cycle()
    return cycle


def main(clone: Path, out: Path) -> None:
    """Measures all ways in turn, and writes the times of calls that nothing disturbed."""
    sys.path.insert(0, str(clone))
    from cleanrl_utils.buffers import ReplayBuffer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    names: dict[str, Any] = {"np": np}
    exec(_cleanrl.CLASS, names)
    ways = cycles(ReplayBuffer, names["ReplayBuffer"])
    times: dict[tuple[str, int], list[float]] = {}
    for repeat in range(REPEATS):
        for name, functions in ways.items():
            for kind, function in enumerate(functions):
                if function is not None and repeat >= REPEATS // 10:
                    times.setdefault((name, kind), []).append(microseconds(function))
                elif function is not None:
                    function()
    kinds = ("add", "sample", "cycle")
    rows = [
        {"way": name}
        | {
            kind: f"{quiet(times[name, i]):.0f}" if (name, i) in times else ""
            for i, kind in enumerate(kinds)
        }
        for name in ways
    ]
    with (out / "programs_calls.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["way", *kinds], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(*rows, sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path, help="the folder of the clone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the numbers go")
    options = parser.parse_args()
    main(options.clone, options.out)
