"""Arrays that were given away: donated to a program that has updated them in place."""

from typing import Any

import jax
import jax.core


def is_gone(tree: Any) -> bool:
    """Whether an array of the tree was donated, so that its contents cannot be read any more."""
    return any(
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()
        for leaf in jax.tree.leaves(tree)
    )


def check_there(tree: Any, name: str) -> None:
    """Refuse what was donated.

    Raises:
        ValueError: If it is gone; it says how to keep it.
    """
    if is_gone(tree):
        raise ValueError(
            f"{name} was donated: an earlier call updated it in place, so this one is gone. Go on "
            "with what that call returned, as in buffer = jaxbuf.add(buffer, items), or pass it "
            "donate=False to keep both"
        )
