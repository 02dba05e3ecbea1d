"""Datasets of Minari, a common format for offline reinforcement learning data.

References:
    Younis et al., Minari, https://minari.farama.org.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, cast, get_args

import jax
import numpy as np
from jaxtyping import PyTree

from jaxbuf.buffers import doors
from jaxbuf.buffers.buffer import as_buffer
from jaxbuf.buffers.options import check_options
from jaxbuf.core import checks, numbers, storage, trees
from jaxbuf.core.checks import kind_of, name_of
from jaxbuf.core.sizes import check_count
from jaxbuf.io.order import items_in_order, rings_in_order

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
# The fields with a row more than there are steps, of which the first or the last one is left out.
_ONE_MORE = {
    "obs": ("observations", 0),
    "next_obs": ("observations", 1),
    "infos": ("infos", 0),
    "next_infos": ("infos", 1),
}
Incomplete = Literal["raise", "skip"]


class _Missing(ValueError):
    """The error of an episode that has too few observations or infos."""


def from_minari(
    dataset: Any,
    buffer: Buffer,
    *,
    incomplete: Incomplete = "raise",
    rows_at_a_time: int = 1024,
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
        filled: Any = _into_rings(episodes, buffer, rows_at_a_time)
    else:
        filled, blocks = buffer, as_buffer(buffer).num_blocks
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


def _read(dataset: Any, like: dict[str, Any], skip: bool) -> Iterator[dict[str, Any]]:
    """Yields the steps of each episode, leaves ``[T, ...]``.

    Raises:
        ValueError: If an episode does not have them; the message names it.
    """
    for number, episode in enumerate(_episodes(dataset)):
        try:
            yield _steps(episode, like)
        except _Missing as error:
            if not skip:
                raise _named(error, number, episode) from error
        except ValueError as error:
            raise _named(error, number, episode) from error


def _named(error: ValueError, number: int, episode: Any) -> ValueError:
    """Returns an error that says which episode it is about."""
    named = f", with id {episode.id}" if hasattr(episode, "id") else ""
    return ValueError(f"{error} (episode {number} of dataset{named})")


def _steps(episode: Any, like: dict[str, Any]) -> dict[str, Any]:
    """Returns the steps of an episode, leaves ``[T, ...]``."""
    count = len(episode.rewards)
    truncated = np.asarray(episode.truncations, bool).copy()
    if count:
        truncated[-1] |= not episode.terminations[-1]
    every = {
        "action": episode.actions,
        "reward": episode.rewards,
        "terminated": episode.terminations,
        "truncated": truncated,
    }
    chosen: dict[str, Any] = {}
    for name in like:
        source, first = _ONE_MORE.get(name, ("", 0))
        if source and not hasattr(episode, source):
            raise ValueError(f"the episode has no {source}, but the items of buffer have {name!r}")
        given = getattr(episode, source) if source else every[name]
        chosen[name] = _part(like[name], given, f"episode[{name!r}]")
        if source:
            _check_rows(chosen[name], first + count, count, name)
            rows = slice(first, first + count)
            chosen[name] = _at(chosen[name], rows)
    given = trees.match(like, chosen)
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


def _part(like: Any, given: Any, name: str) -> Any:
    """Returns the arrays of ``given`` that ``like`` has, in dicts for all mappings.

    Raises:
        ValueError: If a mapping lacks a key.
    """
    if isinstance(like, Mapping):
        keys = [*cast("Mapping[Any, Any]", like)]
        if not isinstance(given, Mapping):
            wanted = ", ".join(map(repr, keys))
            raise ValueError(f"{name} is {kind_of(given)}; expected a dict with {wanted}")
        missing = [key for key in keys if key not in given]
        if missing:
            known = ", ".join(map(repr, cast("Mapping[Any, Any]", given)))
            has = f"it has {known}" if known else "there is nothing in it"
            raise ValueError(f"{name} has no {missing[0]!r}; {has}")
        return {key: _part(like[key], given[key], f"{name}[{key!r}]") for key in keys}
    if type(like) is tuple and isinstance(given, tuple) and len(like) == len(given):
        pairs = zip(like, cast("tuple[Any, ...]", given), strict=True)
        return tuple(_part(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(pairs))
    if jax.tree_util.all_leaves([like]) and not isinstance(given, Mapping | tuple):
        # A list of numbers or of arrays, one for each step, is one array.
        return np.asarray(given)
    return jax.tree.map(np.asarray, given)


def _check_rows(given: PyTree[Any], needed: int, steps: int, field: str) -> None:
    """Checks that an episode has enough rows of a field.

    Raises:
        ValueError: If it has fewer.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        if leaf.ndim and len(leaf) < needed:
            last = ", so the last one is missing" if len(leaf) == steps else ""
            raise _Missing(
                f"episode[{field!r}]{jax.tree_util.keystr(path)} needs {needed} rows, but there "
                f"are {len(leaf)} for {steps} steps{last}; leave {field!r} out of the items, or "
                'pass incomplete="skip" to leave such episodes out'
            )


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
    given = [0] * as_buffer(buffer).num_envs

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
    if as_buffer(source) is not source:
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
