"""Descriptions of what is wrong in arrays, for structures that check themselves."""

import abc
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxbuf.core.leaves import to_host


class Checked(abc.ABC):
    """A structure that can tell whether its arrays are consistent."""

    @abc.abstractmethod
    def check_valid(self, name: str) -> Iterator[str]:
        """Yields a line for each problem; none if the structure is valid.

        Args:
            name: The structure as an expression, with which lines begin.
        """


def checked(tree: Any, name: str) -> Iterator[str]:
    """Yields a line for each problem of the structures in a tree.

    Args:
        tree: A pytree.
        name: The tree as an expression, with which lines begin.
    """

    def is_checked(node: object) -> bool:
        return isinstance(node, Checked)

    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_checked):
        if is_checked(node):
            yield from node.check_valid(name + jax.tree_util.keystr(path))


def first_wrong(name: str, values: Any, wrong: Any, expected: Any) -> Iterator[str]:
    """Yields a line about the first wrong value, with the number of wrong values.

    Args:
        name: The name of the values in the message.
        values: Any array.
        wrong: A mask of the wrong values, of the same shape.
        expected: The expected values: a description, or an array of the same shape.
    """
    at = np.argwhere(np.asarray(wrong))
    if len(at):
        index = tuple(at[0].tolist())
        place = f"[{', '.join(map(str, index))}]" if index else ""
        wanted = expected if isinstance(expected, str) else np.asarray(expected)[index]
        more = f" ({len(at)} in all are wrong)" if len(at) > 1 else ""
        yield f"{name}{place} is {np.asarray(values)[index]}; expected {wanted}{more}"


def differing(name: str, tree: Any, other: Any, expected: str) -> Iterator[str]:
    """Yields a line for each leaf in which two pytrees differ, bit for bit."""
    others = jax.tree.leaves(other)
    pairs = zip(jax.tree_util.tree_leaves_with_path(tree), others, strict=True)
    for (path, leaf), twin in pairs:
        ours, theirs = to_host(leaf), to_host(twin)
        label = name + jax.tree_util.keystr(path)
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            kinds = [f"{array.dtype}{list(array.shape)}" for array in (ours, theirs)]
            yield f"{label} is {kinds[0]}; expected {kinds[1]}, {expected}"
            continue
        words = [np.ascontiguousarray(array[..., None]).view(np.uint8) for array in (ours, theirs)]
        for line in first_wrong(label, ours, (words[0] != words[1]).any(-1), theirs):
            yield f"{line}, {expected}"
