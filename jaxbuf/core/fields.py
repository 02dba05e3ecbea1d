"""Access to fields of a pytree by name, as JAX's key paths name them.

The name of a field is what ``jax.tree_util.keystr(path, simple=True, separator=".")`` returns for
the path that leads to it: the keys, attributes and indices on the way, with dots between them. A
key may have dots of its own. All containers that JAX knows work here, and no others.
"""

from collections.abc import Iterator

import jax
from jaxtyping import PyTree

from jaxbuf.core import checks

# The numbers of the children that lead to a field, one at each level from the top.
Indices = tuple[int, ...]


def find(tree: PyTree, name: str) -> PyTree:
    """Returns the field of this name; None if it is missing or holds nothing.

    Raises:
        ValueError: If there are two fields of this name.

    Example:
        >>> find({"obs": {"goal": 1}}, "obs.goal"), find({"obs.goal": 1}, "obs.goal")
        (1, 1)
        >>> find({"obs.goal": 1, "obs": {"goal": 2}}, "obs.goal")
        Traceback (most recent call last):
        ValueError: 'obs.goal' could be ['obs']['goal'] or ['obs.goal']; rename one of these fields
    """
    return _locate(tree, name)[1]


def need(tree: PyTree, name: str, argument: str, where: str) -> PyTree:
    """Returns the field of this name, which must exist.

    Args:
        tree: The tree that has the field.
        name: The name of the field.
        argument: The name, in errors, of the argument that gave it.
        where: A phrase for the tree in errors, such as "the window has".

    Raises:
        ValueError: If the tree has no such field; the message lists its fields. Or if it has two.

    Example:
        >>> need({"obs": {"goal": 1}, "reward": 2}, "gain", "reward", "the window has")
        Traceback (most recent call last):
        ValueError: reward is 'gain', but the window has no such field; there are obs.goal, reward
    """
    field = find(tree, checks.check_field(argument, name))
    if field is None:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
        hint = f"there are {', '.join(names)}" if any(paths) else "an array has no fields"
        raise ValueError(f"{argument} is {name!r}, but {where} no such field; {hint}")
    return field


def truncation(tree: PyTree, terminated: str, truncated: str | None) -> str | None:
    """Returns the name of the flags for truncated episodes.

    Args:
        tree: The tree that has the flags.
        terminated: Name of the flags for terminated episodes.
        truncated: The name, or None to look for it.

    Returns:
        ``truncated`` if it is not None; else the name of a field ``truncated`` beside
        ``terminated``, or of such a field at the top level; None if the tree has neither.

    Example:
        >>> truncation({"done": {"terminated": 0, "truncated": 1}}, "done.terminated", None)
        'done.truncated'
        >>> truncation({"next.done": 0, "next.truncated": 1}, "next.done", None)
        'next.truncated'
    """
    if truncated is not None:
        return truncated
    beside = checks.check_field("terminated", terminated).rpartition(".")[0]
    names = (f"{beside}.truncated", "truncated") if beside else ("truncated",)
    return next((name for name in names if find(tree, name) is not None), None)


def replace(tree: PyTree, name: str | None, value: object) -> PyTree:
    """Returns the tree with another value of a field, which must exist; None replaces all.

    Example:
        >>> replace({"arm": 1, "obs": {"goal": 2}}, "obs.goal", 3)
        {'arm': 1, 'obs': {'goal': 3}}
    """
    indices = () if name is None else _locate(tree, name)[0]
    assert indices is not None
    return _put(tree, indices, value)


def stored(tree: PyTree, name: str | None, where: str) -> PyTree:
    """Returns the field of a storage, which must exist; None names all of it.

    Raises:
        ValueError: If there is no such field, or there are two.

    Example:
        >>> stored({"obs": {"goal": 1}, "reward": 2}, "gain", "items have")
        Traceback (most recent call last):
        ValueError: path is 'gain', but items have no such field; there are obs.goal, reward
    """
    return tree if name is None else need(tree, name, "path", where)


def overlap(tree: PyTree, name: str | None, other: str | None) -> bool:
    """Returns whether one of two fields of a tree is, or is within, the other; None is all fields.

    Example:
        >>> tree = {"obs": {"goal": 1}, "obs.x": 2}
        >>> [overlap(tree, "obs", other) for other in ("obs.goal", "obs.x", None)]
        [True, False, True]
    """
    both = [() if x is None else _locate(tree, x)[0] for x in (name, other)]
    return all(a == b for a, b in zip(*(indices or () for indices in both), strict=False))


def _locate(tree: PyTree, name: str) -> tuple[Indices | None, PyTree]:
    """Returns the indices of the field of this name, and the field; None if it holds nothing.

    Raises:
        ValueError: If there are two.
    """
    matches = list(_search(tree, name))
    if len(matches) > 1:
        paths = " or ".join(sorted(jax.tree_util.keystr(path) for _, path, _ in matches))
        raise ValueError(f"{name!r} could be {paths}; rename one of these fields")
    return (matches[0][0], matches[0][2]) if matches else (None, None)


def _search(node: PyTree, name: str) -> Iterator[tuple[Indices, tuple[object, ...], PyTree]]:
    """Yields the indices of the fields of this name, their key paths, and the fields."""
    for i, (path, child) in enumerate(_children(node)[0]):
        key = jax.tree_util.keystr(path, simple=True)
        if name == key and jax.tree.leaves(child):
            yield (i,), path, child
        elif name.startswith(f"{key}."):
            for indices, rest, field in _search(child, name[len(key) + 1 :]):
                yield (i, *indices), (*path, *rest), field


def _put(node: PyTree, indices: Indices, value: object) -> PyTree:
    if not indices:
        return value
    children, treedef = _children(node)
    values = [child for _, child in children]
    values[indices[0]] = _put(values[indices[0]], indices[1:], value)
    return jax.tree.unflatten(treedef, values)


def _children(node: PyTree) -> tuple[list[tuple[tuple[object, ...], PyTree]], object]:
    """Returns the children of a node with their keys, and its structure; an array has none."""
    children, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return ([], treedef) if jax.tree_util.treedef_is_leaf(treedef) else (children, treedef)
