"""Checks of the arguments of assertions, and how these report problems."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxbuf.core.donation import check_not_donated
from jaxbuf.core.leaves import from_numbers, is_key, to_host


def check_concrete(tree: PyTree, name: str) -> None:
    """Refuses trees without numbers.

    Raises:
        ValueError: If the tree was donated, is traced, or has shapes in place of arrays.
    """
    check_not_donated(tree, name)
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            kind = "traced" if isinstance(leaf, jax.core.Tracer) else "a shape without numbers"
            raise ValueError(f"{name} is {kind}; call this with arrays, outside of jax.jit")


def fetched(tree: PyTree) -> PyTree:
    """Returns the tree with its arrays on the host, but PRNG keys on one device."""

    def fetch(leaf: Any) -> Any:
        words = to_host(leaf)
        key = isinstance(leaf, jax.Array) and is_key(leaf.dtype)
        return from_numbers(leaf, jnp.asarray(words)) if key else words

    return jax.tree.map(fetch, tree)


def report(title: str, problems: list[str], most: int = 8) -> None:
    """Raises an error if there are problems.

    Raises:
        AssertionError: If there are any. It lists the first of them.
    """
    if problems:
        others = [f"and {len(problems) - most} more"] if len(problems) > most else []
        raise AssertionError("\n  ".join([title, *problems[:most], *others]))
