"""Access to fields of a pytree by dotted names, which lead through keys and attributes."""

import dataclasses
from typing import Any

import jax
from jaxtyping import PyTree

from jaxbuf.core import checks


def find(tree: PyTree, path: str) -> PyTree:
    """Returns the field at a dotted path; None if it is missing or None.

    Example:
        >>> find({"obs": {"goal": 1}}, "obs.goal"), find({"obs": 1}, "obs.goal")
        (1, None)
    """
    at = tree
    for part in path.split("."):
        at = _step(at, part)
    return at if jax.tree.leaves(at) else None


def need(tree: PyTree, path: str, name: str, where: str) -> PyTree:
    """Returns the field at a dotted path, which must exist.

    Args:
        tree: The tree that has the field.
        path: The path.
        name: The name, in errors, of the argument that gave the path.
        where: A phrase for the tree in errors, such as "the window has".

    Raises:
        ValueError: If the tree has no such field; the message lists its fields.

    Example:
        >>> need({"obs": {"goal": 1}, "reward": 2}, "gain", "reward", "the window has")
        Traceback (most recent call last):
        ValueError: reward is 'gain', but the window has no such field; there are obs.goal, reward
    """
    checks.check_field(name, path)
    found = find(tree, path)
    if found is None:
        paths = jax.tree_util.tree_leaves_with_path(tree)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
        known = f"there are {', '.join(names)}" if any(names) else "an array has no fields"
        raise ValueError(f"{name} is {path!r}, but {where} no such field; {known}")
    return found


def truncation(tree: PyTree, terminated: str, given: str | None) -> str | None:
    """Returns the path of the flags for truncated episodes.

    Args:
        tree: The tree that has the flags.
        terminated: Path of the flags for terminated episodes.
        given: The path if it is known.

    Returns:
        ``given`` if it is not None; else the path of a field ``truncated`` beside ``terminated``,
        or of such a field at the top level; None if the tree has neither.

    Example:
        >>> truncation({"done": {"terminated": 0, "truncated": 1}}, "done.terminated", None)
        'done.truncated'
    """
    if given is not None:
        return given
    beside = checks.check_field("terminated", terminated).rpartition(".")[0]
    paths = (f"{beside}.truncated", "truncated") if beside else ("truncated",)
    return next((path for path in paths if find(tree, path) is not None), None)


def replace(tree: PyTree, path: str, value: object) -> PyTree:
    """Returns the tree with another value at a dotted path, which must exist.

    Dicts, named tuples and dataclasses along the path are copied, never changed.

    Example:
        >>> replace({"obs": {"goal": 1, "arm": 2}}, "obs.goal", 3)
        {'obs': {'goal': 3, 'arm': 2}}
    """
    part, _, rest = path.partition(".")
    changed = replace(_step(tree, part), rest, value) if rest else value
    if isinstance(tree, dict):
        return {**tree, part: changed}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return dataclasses.replace(tree, **{part: changed})
    named: Any = tree
    return named._replace(**{part: changed})


def stored(tree: PyTree, path: str | None, where: str) -> PyTree:
    """Returns the field of a storage at a dotted path, which must exist; None names all of it.

    Raises:
        ValueError: If there is no such field, or the path leads into an array.

    Example:
        >>> stored({"obs": {"goal": 1}, "reward": 2}, "gain", "items have")
        Traceback (most recent call last):
        ValueError: path is 'gain', but items have no such field; there are obs.goal, reward
    """
    if path is None:
        return tree
    found, at = need(tree, path, "path", where), tree
    for part in path.split("."):
        # An array has attributes, such as its transpose, that are no fields.
        if jax.tree_util.all_leaves([at]):
            raise ValueError(f"path is {path!r}, which leads into an array; name the field itself")
        at = _step(at, part)
    return found


def written(tree: PyTree, path: str | None, value: PyTree) -> PyTree:
    """Returns the tree with another value at a dotted path, as ``replace``; None replaces all."""
    return value if path is None else replace(tree, path, value)


def overlap(path: str | None, other: str | None) -> bool:
    """Returns whether one of two fields is, or is within, the other; None is all fields.

    Example:
        >>> overlap("obs", "obs.goal"), overlap("obs.goal", None), overlap("obs", "observed")
        (True, True, False)
    """
    if path is None or other is None:
        return True
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _step(tree: PyTree, part: str) -> PyTree:
    """Returns the value of a key or an attribute; None if there is no such one."""
    if isinstance(tree, dict):
        return tree.get(part)
    # The name is a part of the user's path, and the tree may be of any class of the user.
    return getattr(tree, part, None)
