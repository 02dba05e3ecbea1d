"""Arrays that were given away: donated to a program that has updated them in place."""

from typing import Any

import jax
import jax.core

from jaxbuf.core import trees


def is_gone(tree: Any, name: str = "tree") -> bool:
    """Whether an array of the tree was donated, so that its contents cannot be read any more.

    Raises:
        ValueError: If what ``name`` calls the tree in an error is not a pytree.
    """
    return any(
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()
        for leaf in trees.leaves(tree, name)
    )


def check_there(tree: Any, name: str) -> None:
    """Refuse what was donated, and what is not a pytree.

    Raises:
        ValueError: If it is gone, saying how to keep it, or if it is not a pytree.
    """
    if is_gone(tree, name):
        raise ValueError(
            f"{name} was donated: an earlier call updated it in place, so this one is gone. Go on "
            "with what that call returned, as in buffer = jaxbuf.add(buffer, items), or pass it "
            "donate=False to keep both"
        )
