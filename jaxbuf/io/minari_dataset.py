"""Datasets of Minari, a common format for offline reinforcement learning data.

References:
    Younis et al., Minari, https://minari.farama.org.
"""

import importlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from jaxbuf.buffers import doors
from jaxbuf.buffers.kinds import item_of, num_blocks, num_rings
from jaxbuf.buffers.options import check_options
from jaxbuf.core import numbers, storage, trees
from jaxbuf.core.checks import name_of
from jaxbuf.core.sizes import check_count
from jaxbuf.io.order import items_in_order, rings_in_order

Buffer = TypeVar("Buffer", bound=Any)

_FIELDS = ("obs", "action", "reward", "next_obs", "terminated", "truncated")


def from_minari(dataset: Any, buffer: Buffer, *, rows_at_a_time: int = 1024) -> Buffer:
    """Adds all episodes of a Minari dataset to a buffer.

    The buffer's items must be a dict with any of ``obs``, ``action``, ``reward``, ``next_obs``,
    ``terminated`` and ``truncated``; fields that it does not have are left out. Numbers are cast to
    the buffer's dtypes, since Minari keeps rewards in float64.

    In a ``TrajectoryBuffer`` each episode is added as a whole to the environment that has received
    the fewest steps. An episode whose data end without ``terminated`` or ``truncated`` is marked as
    truncated, since another episode follows it in its ring.

    Args:
        dataset: The result of ``minari.load_dataset``, or any other iterable of its episodes.
        buffer: An ``ItemBuffer``, ``Queue`` or ``TrajectoryBuffer``, which may be ``Hosted`` or
            ``Sharded``. It is consumed: go on with the result.
        rows_at_a_time: Number of rows to add in one step.

    Raises:
        ValueError: If the buffer's items are not such a dict, a shape differs, or the dataset has
            no episodes.
    """
    check_options(buffer, "add", {})
    rows_at_a_time = check_count("rows_at_a_time", rows_at_a_time)
    fields = item_of(buffer)
    if not isinstance(fields, dict) or not set(fields) <= set(_FIELDS):
        raise ValueError(
            f"the items of buffer are {jax.tree.structure(fields)}; expected a dict with any "
            f"of {', '.join(_FIELDS)}"
        )
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), fields)
    episodes = (_steps(episode, like) for episode in _episodes(dataset))
    if num_rings(buffer):
        filled: Any = _into_rings(episodes, buffer, rows_at_a_time)
    else:
        filled, blocks = buffer, num_blocks(buffer)
        rows_at_a_time = -(-rows_at_a_time // blocks) * blocks
        for items, mask in _pieces(episodes, rows_at_a_time):
            filled = doors.add(filled, items, mask=mask)
    return filled


def to_minari(dataset_id: str, source: Any, **options: Any) -> Any:
    """Writes the steps of a buffer as a Minari dataset, one episode after the other.

    Args:
        dataset_id: Its name, such as ``cartpole/expert-v0``.
        source: A ``TrajectoryBuffer``; an ``ItemBuffer`` whose items are the steps of one
            environment in order; or such steps themselves, a dict of leaves ``[T, ...]``. The dict
            has ``obs``, ``action``, ``reward`` and ``terminated``, and may have ``truncated`` and
            ``next_obs``. An episode ends where one of the flags is set, and at the last step. Its
            last observation is ``next_obs`` if the dict has it. Otherwise the last step provides
            only that observation, and its action and reward are left out. A terminated episode
            keeps its last step and repeats the observation, which no target uses.
        options: Options of ``minari.create_dataset_from_buffers``, which needs ``env``, or
            ``observation_space`` and ``action_space``. Image compression is lossy unless
            ``jpeg_encoding=False``.

    Returns:
        The ``minari.MinariDataset``.

    Raises:
        ImportError: If Minari is not installed.
        ValueError: If a field is missing or there are no steps.
    """
    rings = [_cut(ring) for ring in _in_order(source)]
    parts = [part for ring in rings for part in ring]
    if not parts:
        raise ValueError("source holds no steps; nothing was written")
    try:
        minari = importlib.import_module("minari")
        collector = importlib.import_module("minari.data_collector")
    except ImportError as error:
        raise ImportError("to_minari needs Minari: pip install 'jaxbuf[minari]'") from error
    buffers = [collector.EpisodeBuffer(id=i, **part) for i, part in enumerate(parts)]
    return minari.create_dataset_from_buffers(dataset_id, buffers, **options)


def _episodes(dataset: Any) -> Iterator[Any]:
    whole = hasattr(dataset, "iterate_episodes")
    try:
        every = iter(dataset.iterate_episodes() if whole else dataset)
    except TypeError as error:
        raise ValueError(
            f"dataset is {name_of(dataset)}; expected what minari.load_dataset returns, or another "
            "iterable of episodes"
        ) from error
    needed = ("observations", "actions", "rewards", "terminations", "truncations")
    for episode in every:
        if not all(hasattr(episode, name) for name in needed):
            raise ValueError(
                f"dataset holds {name_of(episode)}; expected episodes with {', '.join(needed)}"
            )
        yield episode


def _steps(episode: Any, like: dict[str, Any]) -> dict[str, Any]:
    """Returns the steps of an episode, leaves ``[T, ...]``."""
    count = len(episode.rewards)
    truncated = np.asarray(episode.truncations, bool).copy()
    if count:
        truncated[-1] |= not episode.terminations[-1]
    every = {
        "obs": jax.tree.map(lambda x: np.asarray(x)[:count], episode.observations),
        "action": episode.actions,
        "reward": episode.rewards,
        "next_obs": jax.tree.map(lambda x: np.asarray(x)[1 : count + 1], episode.observations),
        "terminated": episode.terminations,
        "truncated": truncated,
    }
    given = trees.match(like, {name: every[name] for name in like})
    want, have = jax.tree.structure(like), jax.tree.structure(given)
    if want == have:
        given = jax.tree_util.tree_map_with_path(
            lambda path, x, y: numbers.convert(
                np.asarray(x), "episode" + jax.tree_util.keystr(path), y.dtype
            ),
            given,
            like,
        )
    jax.eval_shape(lambda: storage.check(like, given, "episode", (count,)))
    return given


def _pieces(episodes: Iterator[dict[str, Any]], size: int) -> Iterator[tuple[PyTree[Any], Any]]:
    """Yields steps in blocks of one size, padded at the end, with masks of their valid rows."""
    waiting: list[PyTree[Any]] = []
    count = 0
    for steps in episodes:
        waiting.append(steps)
        count += len(jax.tree.leaves(steps)[0])
        if count >= size:
            rows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *waiting)
            whole = count // size * size
            for begin in range(0, whole, size):
                yield _at(rows, slice(begin, begin + size)), np.ones(size, bool)
            waiting, count = [_at(rows, slice(whole, None))], count - whole
    if count:
        rows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *waiting)
        yield jax.tree.map(lambda x: _pad(x, size), rows), np.arange(size) < count


def _into_rings(episodes: Iterator[dict[str, Any]], buffer: Any, size: int) -> Any:
    given = [0] * num_rings(buffer)

    def tile(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.broadcast_to(x, (len(given), *x.shape))

    for steps in episodes:
        count = len(jax.tree.leaves(steps)[0])
        env = given.index(min(given))
        given[env] += count
        for begin in range(0, count, size):
            length = min(size, count - begin)
            block = jax.tree.map(lambda x: _pad(x, size), _at(steps, slice(begin, begin + length)))
            items = jax.tree.map(tile, block)
            mask: Any = np.zeros((len(given), size), bool)
            mask[env, :length] = True
            buffer = doors.add(buffer, items, mask=mask)
    return buffer


def _at(tree: PyTree[Any], index: Any) -> PyTree[Any]:
    return jax.tree.map(lambda x: x[index], tree)


def _pad(x: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    return np.pad(x, [(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)])


def _in_order(source: Any) -> list[dict[str, Any]]:
    """Returns the steps of each environment, oldest first, leaves ``[T, ...]``."""
    if not hasattr(source, "occupancy"):
        return [jax.tree.map(np.asarray, source)]
    rings: Any = rings_in_order(source)
    return [items_in_order(source)] if rings is None else rings


def _cut(steps: Any) -> Iterator[dict[str, Any]]:
    """Yields the episodes of one environment's steps, with the fields of Minari's buffers."""
    needed = ("obs", "action", "reward", "terminated")
    missing = [name for name in needed if not isinstance(steps, dict) or name not in steps]
    if missing:
        raise ValueError(f"source has no {missing[0]!r}; expected a dict with {', '.join(needed)}")
    terminated = np.asarray(steps["terminated"], bool)
    truncated = np.asarray(steps.get("truncated", np.zeros_like(terminated)), bool)
    ends = terminated | truncated
    ends[-1:] = True
    begin = 0

    def join(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([a, b])

    for end in (np.flatnonzero(ends) + 1).tolist():
        stop, last = end, _at(steps["obs"], slice(end - 1, end))
        cut = truncated[begin:end].copy()
        if "next_obs" in steps:
            last = trees.match(last, _at(steps["next_obs"], slice(end - 1, end)))
        elif not terminated[end - 1]:
            stop, cut = end - 1, cut[:-1]
        if stop > begin:
            cut[-1] |= not terminated[stop - 1]
            rows = slice(begin, stop)
            yield {
                "observations": jax.tree.map(join, _at(steps["obs"], rows), last),
                "actions": _at(steps["action"], rows),
                "rewards": np.asarray(steps["reward"][rows], np.float64),
                "terminations": terminated[rows],
                "truncations": cut,
            }
        begin = end
