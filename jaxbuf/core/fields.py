"""Fields of a pytree by name: dots lead through keys and attributes."""

import dataclasses
from typing import Any

import jax

from jaxbuf.core import checks


def find(tree: Any, path: str) -> Any:
    """The field at a dotted path; None if there is none, or nothing in it.

    Example:
        >>> find({"obs": {"goal": 1}}, "obs.goal"), find({"obs": 1}, "obs.goal")
        (1, None)
    """
    at = tree
    for part in path.split("."):
        at = at.get(part) if isinstance(at, dict) else getattr(at, part, None)
    return at if jax.tree.leaves(at) else None


def need(tree: Any, path: str, name: str, where: str) -> Any:
    """The field at a dotted path.

    Args:
        tree: Where to look.
        path: The path.
        name: What to call the argument that gave it in an error.
        where: What to call the tree, as in "the window has".

    Raises:
        ValueError: If there is none; it says which there are.

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


def truncation(tree: Any, terminated: str, given: str | None) -> str | None:
    """The path of the flags that an episode was cut off.

    Args:
        tree: Where to look.
        terminated: Path of the flags that it terminated.
        given: The path if it is known.

    Returns:
        The path given; without, that of a field ``truncated`` beside the other flags, or else of
        one that no other field encloses; None if there is neither.

    Example:
        >>> truncation({"done": {"terminated": 0, "truncated": 1}}, "done.terminated", None)
        'done.truncated'
    """
    if given is not None:
        return given
    beside = checks.check_field("terminated", terminated).rpartition(".")[0]
    paths = (f"{beside}.truncated", "truncated") if beside else ("truncated",)
    return next((path for path in paths if find(tree, path) is not None), None)


def replace(tree: Any, path: str, value: Any) -> Any:
    """The tree with another field at a dotted path, which must be there.

    Dicts, named tuples and dataclasses are copied on the way, never changed.

    Example:
        >>> replace({"obs": {"goal": 1, "arm": 2}}, "obs.goal", 3)
        {'obs': {'goal': 3, 'arm': 2}}
    """
    part, _, rest = path.partition(".")
    inner = tree[part] if isinstance(tree, dict) else getattr(tree, part)
    changed = replace(inner, rest, value) if rest else value
    if isinstance(tree, dict):
        return {**tree, part: changed}
    if hasattr(tree, "_replace"):
        return tree._replace(**{part: changed})
    return dataclasses.replace(tree, **{part: changed})
