"""Datasets of Minari, a common format for offline reinforcement learning data.

References:
    Younis et al., Minari, https://minari.farama.org.
"""

import importlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args

import jax
import numpy as np
from jaxtyping import Bool, PyTree, Shaped

from jaxbuf.buffers import doors
from jaxbuf.buffers.buffer import as_buffer, check_options
from jaxbuf.core import checks, numbers, storage, trees
from jaxbuf.core.checks import kind_of, name_of
from jaxbuf.core.sizes import check_count
from jaxbuf.io.order import items_in_order, padded, rings_in_order

Buffer = TypeVar("Buffer", bound=Any)

_FIELDS = (
    "obs",
    "action",
    "reward",
    "next_obs",
    "terminated",
    "truncated",
    "infos",
    "next_infos",
)
# Fields with one row more than there are steps: their source, and the first of the rows to take.
_ONE_MORE = {
    "obs": ("observations", 0),
    "next_obs": ("observations", 1),
    "infos": ("infos", 0),
    "next_infos": ("infos", 1),
}
Incomplete = Literal["raise", "skip"]


class _MissingRows(ValueError):
    """An episode has too few observations or infos."""


def from_minari(
    dataset: Any, buffer: Buffer, *, incomplete: Incomplete = "raise", rows_at_a_time: int = 1024
) -> Buffer:
    """Adds all episodes of a Minari dataset to a buffer.

    The buffer's items must be a dict with any of ``obs``, ``action``, ``reward``, ``next_obs``,
    ``terminated``, ``truncated``, ``infos`` and ``next_infos``. Fields that it does not have are
    left out, also those within observations and infos, such as the text of an instruction, which no
    buffer can hold. ``infos`` came with ``obs``, and ``next_infos`` with ``next_obs``: the latter
    are what ``env.step`` returned for this step. Numbers are cast to the buffer's dtypes, since
    Minari keeps rewards in float64.

    In a ``TrajectoryBuffer`` each episode is added as a whole to the environment that has received
    the fewest steps. An episode whose data end without ``terminated`` or ``truncated`` is marked as
    truncated, since another episode follows it in its ring.

    Args:
        dataset: The result of ``minari.load_dataset``, or any other iterable of its episodes.
        buffer: An ``ItemBuffer``, ``Queue`` or ``TrajectoryBuffer``, which may be ``Hosted`` or
            ``Sharded``. It is consumed: go on with the result.
        incomplete: ``"raise"`` an error if an episode has too few observations for the fields of
            the buffer, or ``"skip"`` it. For ``next_obs`` there must be one after the last step.
        rows_at_a_time: Number of rows to add in one step.

    Raises:
        ValueError: If the buffer's items are not such a dict, ``dataset`` does not consist of
            episodes, or an episode lacks a field or rows of it, or has another shape; the message
            names the episode.

    Example:
        >>> import types, jax.numpy as jnp, numpy as np, jaxbuf
        >>> episode = types.SimpleNamespace(
        ...     observations={"mission": ["open", "open", "open"], "at": np.arange(3)},
        ...     actions=np.zeros(2, np.int64),
        ...     rewards=np.array([0.0, 1.0]),
        ...     terminations=np.array([False, True]),
        ...     truncations=np.array([False, False]),
        ... )
        >>> item = {"obs": {"at": jnp.int32(0)}, "reward": jnp.float32(0)}
        >>> buffer = jaxbuf.from_minari([episode], jaxbuf.ItemBuffer.create(item, 4))
        >>> buffer.data["obs"]["at"][:2].tolist(), buffer.data["reward"][:2].tolist()
        ([0, 1], [0.0, 1.0])
    """
    check_options(buffer, "add", {})
    checks.check_choice("incomplete", incomplete, get_args(Incomplete))
    rows_at_a_time = check_count("rows_at_a_time", rows_at_a_time)
    fields = as_buffer(buffer).example
    if not isinstance(fields, dict) or not set(fields) <= set(_FIELDS):
        raise ValueError(
            f"the items of buffer are {jax.tree.structure(fields)}; expected a dict with any "
            f"of {', '.join(_FIELDS)}"
        )
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), fields)
    episodes = _read(dataset, like, incomplete == "skip")
    if as_buffer(buffer).num_envs:
        return _add_to_rings(episodes, buffer, rows_at_a_time)
    filled, blocks = buffer, as_buffer(buffer).num_blocks
    rows_at_a_time = -(-rows_at_a_time // blocks) * blocks
    for items, mask in _batches(episodes, rows_at_a_time):
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
            ``observation_space`` and ``action_space``. Numbers are cast to the dtypes of these
            spaces, such as float64. Images are written as they are; with ``jpeg_encoding=True``
            they take less space, and change a little.

    Returns:
        The ``minari.MinariDataset``.

    Raises:
        ImportError: If Minari is not installed.
        ValueError: If a field is missing, there are no steps, or a number does not fit the dtype of
            its space.
    """
    episodes = [episode for steps in _in_order(source) for episode in _split(steps)]
    if not episodes:
        raise ValueError("source holds no steps; nothing was written")
    try:
        minari = importlib.import_module("minari")
        collector = importlib.import_module("minari.data_collector")
    except ImportError as error:
        raise ImportError("to_minari needs Minari: pip install 'jaxbuf[minari]'") from error
    spaces = _spaces(options)
    for episode in episodes:
        episode.update({name: _cast(episode[name], spaces[name], name) for name in spaces})
    buffers = [collector.EpisodeBuffer(id=i, **episode) for i, episode in enumerate(episodes)]
    return minari.create_dataset_from_buffers(
        dataset_id, buffers, **{"jpeg_encoding": False} | options
    )


def _spaces(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the known spaces, by the names of an episode's fields."""
    spaces = {
        "observations": options.get("observation_space"),
        "actions": options.get("action_space"),
    }
    env = options.get("env")
    if env is not None and None in spaces.values():
        made = env
        if not hasattr(env, "observation_space"):
            # A name or a specification, as Gymnasium takes them.
            made = importlib.import_module("gymnasium").make(env)
        given = {"observations": made.observation_space, "actions": made.action_space}
        spaces = {name: space or given[name] for name, space in spaces.items()}
        if made is not env:
            made.close()
    return {name: space for name, space in spaces.items() if space is not None}


def _cast(values: PyTree, space: Any, name: str) -> PyTree:
    """Returns the rows of a space in its dtypes; rows of another structure as they are."""
    inner = getattr(space, "spaces", None)
    if isinstance(values, Mapping) and isinstance(inner, Mapping):
        return {
            key: _cast(value, inner.get(key), f"{name}[{key!r}]") for key, value in values.items()
        }
    if isinstance(values, tuple) and isinstance(inner, tuple):
        pairs = itertools.zip_longest(values, inner[: len(values)])
        return tuple(_cast(value, one, f"{name}[{i}]") for i, (value, one) in enumerate(pairs))
    dtype = getattr(space, "dtype", None)
    if not isinstance(values, np.ndarray) or not isinstance(dtype, np.dtype):
        return values
    return numbers.convert(values, name, dtype)


def _episodes(dataset: Any) -> Iterator[Any]:
    is_minari = hasattr(dataset, "iterate_episodes")
    try:
        episodes = iter(dataset.iterate_episodes() if is_minari else dataset)
    except TypeError as error:
        raise ValueError(
            f"dataset is {name_of(dataset)}; expected what minari.load_dataset returns, or another "
            "iterable of episodes"
        ) from error
    needed = ("observations", "actions", "rewards", "terminations", "truncations")
    for episode in episodes:
        if not all(hasattr(episode, name) for name in needed):
            raise ValueError(
                f"dataset holds {name_of(episode)}; expected episodes with {', '.join(needed)}"
            )
        yield episode


def _read(dataset: Any, like: dict[str, PyTree], skip: bool) -> Iterator[dict[str, PyTree]]:
    """Yields the steps of each episode, leaves ``[T, ...]``.

    Raises:
        ValueError: If an episode does not have them; the message names it.
    """
    skipped = (_MissingRows,) if skip else ()
    for number, episode in enumerate(_episodes(dataset)):
        try:
            yield _steps(episode, like)
        except skipped:
            continue
        except ValueError as error:
            name = f", with id {episode.id}" if hasattr(episode, "id") else ""
            message = f"{error} (episode {number} of dataset{name})"
            raise ValueError(message) from error


def _steps(episode: Any, like: dict[str, PyTree]) -> dict[str, PyTree]:
    """Returns the steps of an episode, leaves ``[T, ...]``."""
    count = len(episode.rewards)
    truncated = np.asarray(episode.truncations, bool).copy()
    if count:
        truncated[-1] |= not episode.terminations[-1]
    columns = {
        "action": episode.actions,
        "reward": episode.rewards,
        "terminated": episode.terminations,
        "truncated": truncated,
    }
    selected: dict[str, PyTree] = {}
    for name in like:
        source, first = _ONE_MORE.get(name, ("", 0))
        if source and not hasattr(episode, source):
            raise ValueError(f"the episode has no {source}, but the items of buffer have {name!r}")
        rows = getattr(episode, source) if source else columns[name]
        selected[name] = _select(like[name], rows, f"episode[{name!r}]")
        if source:
            _check_rows(selected[name], first + count, count, name)
            selected[name] = _index(selected[name], slice(first, first + count))
    steps = trees.match(like, selected)
    if trees.alike(like, steps):
        steps = jax.tree_util.tree_map_with_path(
            lambda path, x, y: numbers.convert(
                np.asarray(x), "episode" + jax.tree_util.keystr(path), y.dtype
            ),
            steps,
            like,
        )
    jax.eval_shape(lambda: storage.check(like, steps, "episode", (count,)))
    return steps


def _select(like: PyTree, values: PyTree, name: str) -> PyTree:
    """Returns the arrays of ``values`` that ``like`` has, in dicts for all mappings.

    Raises:
        ValueError: If a mapping lacks a key.
    """
    if isinstance(like, Mapping):
        keys = [*like]
        if not isinstance(values, Mapping):
            expected = ", ".join(map(repr, keys))
            raise ValueError(f"{name} is {kind_of(values)}; expected a dict with {expected}")
        missing = [key for key in keys if key not in values]
        if missing:
            present = ", ".join(map(repr, values))
            has = f"it has {present}" if present else "there is nothing in it"
            raise ValueError(f"{name} has no {missing[0]!r}; {has}")
        return {key: _select(like[key], values[key], f"{name}[{key!r}]") for key in keys}
    if type(like) is tuple and isinstance(values, tuple) and len(like) == len(values):
        pairs = zip(like, values, strict=True)
        return tuple(_select(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(pairs))
    if jax.tree_util.all_leaves([like]) and not isinstance(values, Mapping | tuple):
        # A list of numbers or of arrays, one for each step, is one array.
        return np.asarray(values)
    return jax.tree.map(np.asarray, values)


def _check_rows(rows: PyTree, needed: int, steps: int, field: str) -> None:
    """Checks that an episode has enough rows of a field.

    Raises:
        ValueError: If it has fewer.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        if leaf.ndim and len(leaf) < needed:
            last = ", so the last one is missing" if len(leaf) == steps else ""
            raise _MissingRows(
                f"episode[{field!r}]{jax.tree_util.keystr(path)} needs {needed} rows, but there "
                f"are {len(leaf)} for {steps} steps{last}; leave {field!r} out of the items, or "
                'pass incomplete="skip" to leave such episodes out'
            )


def _batches(
    episodes: Iterator[dict[str, PyTree]], size: int
) -> Iterator[tuple[PyTree, Bool[np.ndarray, " B"]]]:
    """Yields batches of steps of one size, padded at the end, with masks of their valid rows."""
    waiting: list[PyTree] = []
    count = 0
    for steps in episodes:
        waiting.append(steps)
        count += len(jax.tree.leaves(steps)[0])
        if count >= size:
            rows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *waiting)
            whole = count // size * size
            for begin in range(0, whole, size):
                yield _index(rows, slice(begin, begin + size)), np.ones(size, bool)
            waiting, count = [_index(rows, slice(whole, None))], count - whole
    if count:
        rows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *waiting)
        yield jax.tree.map(lambda x: padded(x, size), rows), np.arange(size) < count


def _add_to_rings(episodes: Iterator[dict[str, PyTree]], buffer: Any, size: int) -> Any:
    """Returns the buffer with each episode added to the ring that received the fewest steps."""
    num_added = [0] * as_buffer(buffer).num_envs

    def tile(x: Shaped[np.ndarray, "T ..."]) -> Shaped[np.ndarray, "E T ..."]:
        return np.broadcast_to(x, (len(num_added), *x.shape))

    for steps in episodes:
        count = len(jax.tree.leaves(steps)[0])
        env = num_added.index(min(num_added))
        num_added[env] += count
        for begin in range(0, count, size):
            length = min(size, count - begin)
            rows = _index(steps, slice(begin, begin + length))
            items = jax.tree.map(lambda x: tile(padded(x, size)), rows)
            mask: Any = np.zeros((len(num_added), size), bool)
            mask[env, :length] = True
            buffer = doors.add(buffer, items, mask=mask)
    return buffer


def _index(tree: PyTree, index: slice) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


def _in_order(source: Any) -> list[dict[str, PyTree]]:
    """Returns the steps of each environment, oldest first, leaves ``[T, ...]``."""
    if as_buffer(source) is not source:
        return [jax.tree.map(np.asarray, source)]
    ordered = rings_in_order(source) or [items_in_order(source)]
    return [rows.read(0, rows.num_rows) for rows in ordered]


def _split(steps: Any) -> Iterator[dict[str, Any]]:
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
    for end in (np.flatnonzero(ends) + 1).tolist():
        stop, last = end, _index(steps["obs"], slice(end - 1, end))
        flags = truncated[begin:end].copy()
        if "next_obs" in steps:
            last = trees.match(last, _index(steps["next_obs"], slice(end - 1, end)))
        elif not terminated[end - 1]:
            stop, flags = end - 1, flags[:-1]
        if stop > begin:
            flags[-1] |= not terminated[stop - 1]
            rows = slice(begin, stop)
            yield {
                "observations": jax.tree.map(
                    lambda *leaves: np.concatenate(leaves), _index(steps["obs"], rows), last
                ),
                "actions": _index(steps["action"], rows),
                "rewards": np.asarray(steps["reward"][rows], np.float64),
                "terminations": terminated[rows],
                "truncations": flags,
            }
        begin = end
