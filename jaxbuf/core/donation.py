"""Detects arrays that were donated to a program, which has updated them in place."""

import jax
import jax.core

from jaxbuf.core import trees


def is_gone(tree: object, name: str = "tree") -> bool:
    """Returns whether an array of the tree was donated, so that it can no longer be read.

    Raises:
        ValueError: If the tree, which the error calls ``name``, is not a pytree.
    """
    leaves = trees.leaves(tree, name)
    # Few classes are looked at instead of many leaves, because each call from Python comes here.
    known = {
        kind
        for kind in set(map(type, leaves))
        if issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)
    }
    return any(leaf.is_deleted() for leaf in leaves if type(leaf) in known)


def check_there(tree: object, name: str) -> None:
    """Checks that a tree is a pytree and was not donated.

    Raises:
        ValueError: If it was donated (the message says how to keep it) or is not a pytree.
    """
    if is_gone(tree, name):
        raise ValueError(
            f"{name} was donated: an earlier call updated it in place, so this one is gone. Go on "
            "with what that call returned, as in buffer = jaxbuf.add(buffer, items), or pass it "
            "donate=False to keep both"
        )
