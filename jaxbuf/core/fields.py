"""Fields of a pytree by name: dots lead through keys and attributes."""

import dataclasses
from typing import Any

import jax


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
