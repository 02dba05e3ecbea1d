"""Checks of the parts that buffers are made of. Each check yields the problems that it finds."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxbuf.core.donation import check_there
from jaxbuf.core.segment_tree import FANOUT, SegmentTree
from jaxbuf.occupancy.bitset import Bitset
from jaxbuf.occupancy.ranking import Ranking
from jaxbuf.occupancy.ring import Ring
from jaxbuf.occupancy.rings import Rings


def check_concrete(tree: Any, name: str) -> None:
    """Refuses trees without numbers.

    Raises:
        ValueError: If the tree was donated, is traced, or has shapes in place of arrays.
    """
    check_there(tree, name)
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            kind = "traced" if isinstance(leaf, jax.core.Tracer) else "a shape without numbers"
            raise ValueError(f"{name} is {kind}; call this with arrays, outside of jax.jit")


def fetched(tree: Any) -> Any:
    """Returns the tree with its arrays on the host, but PRNG keys on one device."""

    def fetch(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return np.asarray(leaf)
        words = np.asarray(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(leaf))

    return jax.tree.map(fetch, tree)


def report(title: str, problems: list[str], most: int = 8) -> None:
    """Raises an error if there are problems.

    Raises:
        AssertionError: If there are any. It lists the first of them.
    """
    if problems:
        more = [f"and {len(problems) - most} more"] if len(problems) > most else []
        raise AssertionError("\n  ".join([title, *problems[:most], *more]))


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
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, twin = jax.random.key_data(leaf), jax.random.key_data(twin)
        ours, theirs = np.asarray(leaf), np.asarray(twin)
        label = name + jax.tree_util.keystr(path)
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            kinds = [f"{array.dtype}{list(array.shape)}" for array in (ours, theirs)]
            yield f"{label} is {kinds[0]}; expected {kinds[1]}, {expected}"
            continue
        words = [np.ascontiguousarray(array[..., None]).view(np.uint8) for array in (ours, theirs)]
        for line in first_wrong(label, ours, (words[0] != words[1]).any(-1), theirs):
            yield f"{line}, {expected}"


def tree_problems(name: str, tree: SegmentTree) -> Iterator[str]:
    """Checks that leaves are numbers, and that reductions are those of the leaves."""
    leaves = np.asarray(tree.leaves)
    wrong, legal = np.isnan(leaves), "a number"
    if {"sum", "min_positive"} & set(tree.ops):
        wrong, legal = ~((leaves >= 0) & (leaves < np.inf)), "a finite number of at least 0"
    found = list(first_wrong(f"{name}.leaves", leaves, wrong, legal))
    if found:
        yield from found
        return
    again, said = _set_again(tree), "which is what the leaves say"
    roots = {f"root({op!r})": (tree.root(op), again.root(op)) for op in tree.ops}
    for label, (ours, theirs) in {**roots, "nnz": (tree.nnz, again.nnz)}.items():
        yield from first_wrong(f"{name}.{label}", ours, ours != theirs, f"{theirs}, {said}")
    for line in differing(name, tree, again, said):
        yield f"{line}: {_where(tree, again)}"


def _where(tree: SegmentTree, again: SegmentTree) -> str:
    """Returns the slots over which a reduction is not that of the leaves."""
    width = FANOUT
    while width < FANOUT * tree.capacity:
        for op in tree.ops:
            ours, theirs = (_reduce(one, width, op) for one in (tree, again))
            wrong = np.flatnonzero(np.asarray(ours != theirs))
            if wrong.size:
                first = int(wrong[0]) * width
                return f"the {op} of slots {first} to {min(first + width, tree.capacity) - 1}"
        width *= FANOUT
    return f"a node above slot {tree.capacity - 1}, the last one"


@jax.jit
def _set_again(tree: SegmentTree) -> SegmentTree:
    """Returns a tree of the same leaves, with every node computed again."""
    return tree.set_all(tree.leaves)


@functools.partial(jax.jit, static_argnames=("width", "op"))
def _reduce(tree: SegmentTree, width: int, op: str) -> Any:
    """Returns the reductions over each ``width`` consecutive slots."""
    first = jnp.arange(0, tree.capacity, width, dtype=jnp.int32)
    return jax.vmap(lambda start: tree.reduce(start, start + width, op))(first)


def bitset_problems(name: str, members: Bitset) -> Iterator[str]:
    """Checks counts and ranks against the members."""
    is_member, before, at = map(np.asarray, _look_up(members))
    size = int(np.sum(is_member))
    yield from first_wrong(
        f"{name}.size", members.size, members.size != size, f"{size}, the number of members"
    )
    counts = np.concatenate([[0], np.cumsum(is_member)])
    yield from first_wrong(f"{name}.before", before, before != counts, counts)
    slots = np.flatnonzero(is_member)
    yield from first_wrong(f"{name}.at", at[:size], at[:size] != slots, slots)


@jax.jit
def _look_up(members: Bitset) -> tuple[Any, Any, Any]:
    index = jnp.arange(members.capacity + 1, dtype=jnp.int32)
    return members.get(index[:-1]), members.before(index), members.at(index[:-1])


def ring_problems(name: str, ring: Ring) -> Iterator[str]:
    """Checks that counters are within their ranges."""
    position, size = np.asarray(ring.cursor), np.asarray(ring.held)
    yield from first_wrong(
        f"{name}.position", position, position >= ring.capacity, f"less than {ring.capacity}"
    )
    yield from first_wrong(
        f"{name}.size", size, size > ring.capacity, f"at most the capacity, {ring.capacity}"
    )


def rings_problems(name: str, rings: Rings) -> Iterator[str]:
    """Checks that the cursors and the numbers of steps are within their ranges."""
    cursor, held = np.asarray(rings.cursor), np.asarray(rings.held)
    last = rings.length - 1
    yield from first_wrong(f"{name}.cursor", cursor, cursor > last, f"at most {last}")
    yield from first_wrong(f"{name}.held", held, held > rings.length, f"at most {rings.length}")


def ranking_problems(name: str, ranking: Ranking) -> Iterator[str]:
    """Checks that only items have scores, and that each node is the lowest of its children."""
    capacity, size = ranking.capacity, int(ranking.size)
    if not 0 <= size <= capacity:
        yield f"{name}.size is {size}; expected at most the capacity, {capacity}"
        return
    slot = np.arange(capacity)
    score, scored = np.asarray(ranking.score), np.asarray(ranking.scored)
    yield from first_wrong(f"{name}.score", score, np.isnan(score), "a number")
    free = f"False: there are only {size} items"
    yield from first_wrong(f"{name}.scored", scored, scored & (slot >= size), free)
    number = np.asarray(ranking.generation(jnp.arange(capacity, dtype=jnp.int32)))[:size]
    _, first, inverse = np.unique(number, return_index=True, return_inverse=True)
    twice = first[inverse] != slot[:size]
    yield from first_wrong(f"{name}.generation", number, twice, "a number that no other slot has")
    yield from differing(name, ranking, _compute_again(ranking), "the lowest of its children")


@jax.jit
def _compute_again(ranking: Ranking) -> Ranking:
    return ranking.recomputed()
