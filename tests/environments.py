"""Lines of the guide on environments, run with the libraries that they are for.

    python -m tests.environments             # all: some minutes
    python -m tests.environments gymnax pgx  # some

`make test-environments` runs it where these libraries are installed. Random actions are played and
stored. Each row is then compared with one step of the library itself, which never resets, and each
episode that begins with a reset by the key that the docstring of `with_resets` names.
"""

import functools
import importlib
import re
import sys
import time
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf
from jaxbuf.interop import gymnasium_transitions, rollout, with_resets

GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "environments.md").read_text()
# The guide's limits are too long for a test.
LIMIT = "=500"


def discrete(n):
    return lambda key: jax.random.randint(key, (), 0, n)


def box(key):
    return jax.random.uniform(key, (1,), minval=-1, maxval=1)


def agents(key):
    keys = jax.random.split(key, 3)
    return {f"agent_{i}": jax.random.randint(keys[i], (), 0, 5) for i in range(3)}


# The limit, an action, whether episodes fail, and whether a limit ends some.
INSIDE_JAX = {
    "gymnax": (20, discrete(2), True, True),
    "brax": (6, box, True, True),
    "playground": (20, box, False, True),
    "jumanji": (12, discrete(4), True, True),
    "craftax": (120, discrete(17), True, True),
    "navix": (30, discrete(3), True, True),
    "xminigrid": (20, discrete(6), True, True),
    "pgx": (0, discrete(9), True, False),
    "jaxmarl": (10, agents, False, True),
    "envelope": (20, discrete(2), True, True),
}
# The vector environments that the lines make, for a loop in Python.
IN_PYTHON = {
    "gymnasium": ("next_step", "same_step", "disabled"),
    "ale_py": ("envs",),
    "envpool": ("every_result",),
}
CART = ("obs", "action", "next_obs", "terminated")
MODULES = {
    "playground": "mujoco_playground",
    "brax": "brax.envs",
    "craftax": "craftax.craftax_env",
}
DISTRIBUTIONS = {"envelope": "jax-envelope", "ale_py": "ale-py"}


def lines_under(heading):
    return re.search(rf"\n### {heading}\n.*?```python\n(.*?)```", GUIDE, re.DOTALL)[1]


def run_lines(name, **given):
    """Runs the lines under a heading of the guide; returns what they define."""
    lines = lines_under("brax" if name == "playground" else name)
    if name == "playground":
        lines = re.sub("# (env = .*)\nenv = .*", r"\1", lines)
    if name in INSIDE_JAX:
        lines = lines.replace(LIMIT, f"={INSIDE_JAX[name][0]}")
    module = MODULES.get(name, name)
    importlib.import_module(module)
    top = module.split(".")[0]
    names = {"jax": jax, "np": np, top: sys.modules[top]} | given
    exec(lines, names)
    return names


def pair(name):
    """Returns what the guide's lines pass to ``with_resets``: ``reset``, ``step`` and options."""
    found = []

    def record(*functions, **options):
        found.append((*functions, options))
        return functions

    run_lines(name, with_resets=record)
    return found[0]


def check_inside_jax(name):
    """Raises an error if a row is wrong; yields how many episodes ended, and how."""
    reset, step, options = pair(name)
    raw = jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(jax.vmap(step)))
    for resets in (None, 1):
        yield f"resets={resets}: {check_rows(name, reset, step, options, raw, resets)}"


def check_rows(name, reset, step, options, raw, resets, num_steps=122):
    limit, act, fails, stops = INSIDE_JAX[name]
    num_envs = 24 if limit == 120 else 6  # each ends once at least
    begin, advance = with_resets(reset, step, resets=resets, **options)
    most = num_envs if resets is None else resets

    def one(envs, key):
        act_key, step_key = jax.random.split(key)
        action = jax.vmap(act)(jax.random.split(act_key, num_envs))
        after, out = advance(step_key, envs, action)
        keys = jax.random.split(step_key)
        begun = jax.random.split(keys[1], most)
        begun = begun if most == num_envs else jnp.repeat(begun[:1], num_envs, axis=0)
        keys = jax.random.split(keys[0], num_envs), begun
        return after, (out, envs.inner, after.obs, after.waiting, keys)

    @jax.jit
    def play(key):
        return rollout(one, begin(key, num_envs), key, num_steps)[1]

    out, inner, obs_after, waiting, keys = play(jax.random.key(3))
    rows, shape = out.transitions, (num_envs, num_steps)
    mask = np.ones(shape, bool) if out.mask is None else np.asarray(out.mask)
    buffer = jaxbuf.TrajectoryBuffer.create(jax.tree.map(lambda x: x[0, 0], rows), *shape)
    assert buffer.add(rows, mask=out.mask).size == mask.sum()

    # Every step once more, by the library alone.
    obs, _, reward, failed, stopped = raw[1](keys[0], inner, rows["action"])
    failed, stopped = (np.broadcast_to(np.asarray(flag, bool), shape) for flag in (failed, stopped))
    ended = (np.asarray(rows["terminated"]) | np.asarray(rows["truncated"])) & mask
    steps = np.zeros(shape, int)
    for t in range(num_steps):
        before = steps[:, t - 1] * (mask & ~ended)[:, t - 1] if t else 0
        steps[:, t] = before + 1
    equal("next_obs", rows["next_obs"], obs, mask)
    equal("reward", rows["reward"], reward, mask)
    equal("terminated", rows["terminated"], failed, mask)
    ours = "time_limit" in options
    equal("truncated", rows["truncated"], stopped | (ours & (steps == limit)), mask)
    assert (steps <= limit).all() or not stops
    assert not (rows["truncated"] & (steps != limit) & mask).any(), "truncated too early"
    assert (ended | (steps != limit) | ~mask).all() or not stops, "a limit is passed"
    # Where it goes on, it goes on from there; where it begins, it begins by its key.
    begins = (ended | ~mask) & ~np.asarray(waiting)
    equal("obs after a step", obs_after, obs, mask & ~ended)
    env, at = (np.resize(index, num_envs * num_steps // 4) for index in np.nonzero(begins))
    first = raw[0](keys[1][env, at])[0]
    equal("first obs", jax.tree.map(lambda leaf: leaf[env, at], obs_after), first, ...)

    terminated, truncated = rows["terminated"], rows["truncated"]
    both = int((terminated & truncated).sum())
    counts = [int((terminated & ~truncated).sum()), int((truncated & ~terminated).sum()), both]
    assert sum(counts) >= 20, f"only {counts} episodes ended"
    assert ((counts[0] > 0), (counts[1] > 0)) == (fails, stops), counts
    dtypes = {field: str(jax.tree.leaves(rows[field])[0].dtype) for field in ("obs", "reward")}
    return f"{counts[0]} failed, {counts[1]} stopped, {both} both, {(~mask).sum()} masked; {dtypes}"


def equal(name, have, want, rows):
    """Checks leaves ``[E, T, ...]`` in some rows; programs that differ may round differently."""
    for one, other in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        one, other = (np.asarray(leaf, np.float64)[rows] for leaf in (one, other))
        np.testing.assert_allclose(one, other, 1e-5, 1e-5, err_msg=name)


def check_in_python(name, num_steps=600):
    """Raises an error if a row of a loop in Python is wrong; returns how many episodes ended."""
    example = {"obs": jnp.zeros(4), "action": jnp.int32(0), "reward": jnp.float32(0)}
    example |= {"terminated": False, "truncated": False, "next_obs": jnp.zeros(4)}
    given = {"jaxbuf": jaxbuf, "buffer": jaxbuf.ItemBuffer.create(example, 2_000)}
    lines = run_lines(
        name, functools=functools, act=lambda obs: (obs[:, 2] > 0).astype(int), **given
    )
    reports = []
    for label in IN_PYTHON[name]:
        envs, rng, ended, steps = lines[label], np.random.default_rng(0), None, []
        obs, _ = envs.reset(seed=0) if name == "gymnasium" else envs.reset()
        num_envs = len(obs)
        for _ in range(num_steps):
            action = rng.integers(0, 2, num_envs)
            step = gymnasium_transitions(envs, obs, action, envs.step(action), ended)
            steps.append(step)
            obs, ended = step.obs, step.ended
            if label == "disabled" and ended.any():
                obs, _ = envs.reset(options={"reset_mask": ended})
        rows = [jax.tree.map(np.asarray, step.transitions) for step in steps]
        rows = jax.tree.map(lambda *leaves: np.stack(leaves, 1), *rows)  # [E, T, ...]
        mask, ends = (np.stack([getattr(s, x) for s in steps], 1) for x in ("mask", "ended"))
        buffer = jaxbuf.TrajectoryBuffer.create(
            jax.tree.map(lambda leaf: jnp.asarray(leaf[0, 0]), rows), *mask.shape
        )
        assert buffer.add(rows, mask=mask).size == mask.sum()
        went_on = (mask & ~(rows["terminated"] | rows["truncated"]))[:, :-1] & mask[:, 1:]
        follows = rows["next_obs"][:, :-1][went_on], rows["obs"][:, 1:][went_on]
        np.testing.assert_array_equal(*follows)
        if name != "ale_py":
            check_cart(*(rows[field][mask] for field in CART))
        assert ends.sum() >= 20 or name == "ale_py", ends.sum()
        reports.append(f"{label}: {ends.sum()} ended, {(~mask).sum()} only reset")
    if name == "envpool":
        data = jax.tree.map(
            lambda leaf: np.asarray(leaf)[: lines["buffer"].size], lines["buffer"].data
        )
        check_cart(*(data[field] for field in CART))
        ends = data["terminated"] | data["truncated"]
        assert ends.sum() >= 20
        reports.append(f"asynchronous: {len(ends)} rows, {ends.sum()} ended")
    if name != "gymnasium":
        reports.append(check_xla(name))
    return "; ".join(reports)


def check_xla(name):
    """Raises an error if rows of ``xla()`` are not those of the same steps from Python."""
    lines = lines_under("xla").replace("num_steps=100", "num_steps=600")
    if name == "ale_py":
        lines = re.sub("^# ", "", lines.split("# Of ale-py:\n")[1], flags=re.MULTILINE)
    obs, reward, actions = jnp.zeros(4), jnp.float32(0), 2
    if name == "ale_py":
        obs, reward, actions = jnp.zeros((4, 84, 84), jnp.uint8), jnp.int32(0), 4
    example = {"obs": obs, "action": jnp.int32(0), "reward": reward, "next_obs": obs}
    example |= {"terminated": False, "truncated": False}
    seen = {"jax": jax, "jnp": jnp, "rollout": rollout, "key": jax.random.key(0)}
    seen |= {name: sys.modules[name], "buffer": jaxbuf.TrajectoryBuffer.create(example, 4, 600)}
    seen["act"] = lambda obs, key: jax.random.randint(key, (4,), 0, actions)
    exec(lines, seen)
    rows, mask = jax.tree.map(np.asarray, (seen["rows"], seen["mask"]))
    assert seen["buffer"].size == mask.sum()
    make = re.search("envs = (.*)", lines)[1]
    again = eval(make, seen)
    obs, _ = again.reset(seed=0) if name == "ale_py" else again.reset()
    ended = np.zeros(4, bool)
    for t in range(mask.shape[1]):
        next_obs, reward, terminated, truncated, _ = again.step(rows["action"][:, t])
        want = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated}
        for field, values in (want | {"next_obs": next_obs}).items():
            np.testing.assert_array_equal(rows[field][:, t], values, err_msg=field)
        np.testing.assert_array_equal(mask[:, t], ~ended)
        obs, ended = next_obs, terminated | truncated
    assert not mask.all()
    return f"xla: {mask.sum()} rows, {(~mask).sum()} only reset"


def check_cart(obs, action, next_obs, terminated):
    """Checks rows ``[N, ...]`` of CartPole against its equations."""
    place, speed, angle, turning = np.asarray(obs, np.float64).T
    force = np.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * turning**2 * np.sin(angle)) / 1.1
    bend = 9.8 * np.sin(angle) - np.cos(angle) * push
    bend /= 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
    want = [place + 0.02 * speed, speed + 0.02 * (push - 0.05 * bend * np.cos(angle) / 1.1)]
    want = np.stack([*want, angle + 0.02 * turning, turning + 0.02 * bend], -1)
    np.testing.assert_allclose(next_obs, want, 1e-3, 1e-4)
    fell = (np.abs(want[:, 0]) > 2.4) | (np.abs(want[:, 2]) > 12 * np.pi / 180)
    np.testing.assert_array_equal(terminated, fell)


def check(name):
    """Yields what was seen of a library; raises an error if something is wrong."""
    release = f"| {name.replace('_', '-')} {version(DISTRIBUTIONS.get(name, name))} |"
    assert release in GUIDE, f"the table of the guide has no row {release}"
    yield from [check_in_python(name)] if name in IN_PYTHON else check_inside_jax(name)


def main(names):
    warnings.simplefilter("ignore")
    failed = 0
    for name in names:
        start = time.perf_counter()
        try:
            for line in check(name):
                print(f"{name}, {line}", flush=True)
        except Exception:
            failed += 1
            print(f"{name} failed\n{traceback.format_exc()}")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*INSIDE_JAX, *IN_PYTHON]))
