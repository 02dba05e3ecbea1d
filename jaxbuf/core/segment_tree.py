"""Sum, min and max over slots, kept up to date as slots change.

One array holds the leaves and, above them, the levels of every operation. A node has ``FANOUT``
children and is always computed from them, never changed by a difference: nothing drifts, and a bad
value is gone once it is overwritten.

References:
    Schaul et al., Prioritized Experience Replay, ICLR 2016 (appendix B.2.1: the sum tree).
"""

from collections.abc import Sequence
from typing import Self, cast, get_args

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jaxbuf.core import tree_kernels
from jaxbuf.core.tree_kernels import FANOUT, Layout, Op


class SegmentTree(struct.PyTreeNode):
    """An array of ``capacity`` numbers with reductions over all of them and over ranges.

    Attributes:
        nodes: Leaves and levels, ``[P]`` float32; see ``tree_kernels.Layout``.
        summary: The bits of the roots, one for each operation, and last how many leaves are
            positive; ``[len(ops) + 1]`` uint32. One small array, apart from the nodes: reading it
            never stands in the way of updating them in place.
        capacity: Number of leaves.
        ops: The reductions it keeps.

    Example:
        >>> import jax.numpy as jnp
        >>> tree = SegmentTree.create(4, ops=("sum", "max"))
        >>> tree = tree.set(jnp.arange(4), jnp.array([3.0, 1.0, 2.0, 5.0]))
        >>> float(tree.root("sum")), float(tree.reduce(1, 3)), float(tree.root("max"))
        (11.0, 3.0, 5.0)
        >>> tree.query(jnp.array([0.0, 2.9, 3.0, 3.9, 4.0, 6.0, 10.9])).tolist()
        [0, 0, 1, 1, 2, 3, 3]
    """

    nodes: Float[Array, " P"]
    summary: UInt[Array, " K"]
    capacity: int = struct.field(pytree_node=False)
    ops: tuple[Op, ...] = struct.field(pytree_node=False)

    @classmethod
    def create(cls, capacity: int, ops: Sequence[str] = ("sum",)) -> Self:
        """A tree in which no leaf is set yet.

        Args:
            capacity: Number of leaves; any number from 1 on.
            ops: Which of ``"sum"``, ``"min"``, ``"max"`` and ``"min_positive"`` (the least of the
                leaves above zero, 0 if there is none). A leaf that was never set counts as the
                neutral element, which for ``"max"`` next to sums is 0: their leaves are masses, not
                negative.

        Raises:
            ValueError: If ``capacity`` is below 1, or if ``ops`` names no operation, one twice, an
                unknown one, or ``"min"`` next to others (whose unset leaves are not infinite).
        """
        known = get_args(Op)
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a tree needs at least one leaf")
        if not ops or len(set(ops)) < len(ops) or not set(ops) <= set(known):
            raise ValueError(f"ops is {tuple(ops)}; choose from {known}, each once")
        if "min" in ops and len(ops) > 1:
            raise ValueError(f"ops is {tuple(ops)}; give 'min' a tree of its own")
        layout = Layout(capacity, cast("tuple[Op, ...]", tuple(ops)))
        roots = jnp.full((len(layout.ops),), layout.fill, jnp.float32)
        positive = jnp.full((1,), capacity if layout.fill > 0 else 0, jnp.uint32)
        return cls(
            nodes=jnp.full((layout.size,), layout.fill, jnp.float32),
            summary=jnp.concatenate([lax.bitcast_convert_type(roots, jnp.uint32), positive]),
            capacity=capacity,
            ops=layout.ops,
        )

    @property
    def layout(self) -> Layout:
        """Where the nodes lie."""
        return Layout(self.capacity, self.ops)

    @property
    def leaves(self) -> Float[Array, " N"]:
        """The numbers themselves, ``[capacity]``."""
        return self.nodes[..., : self.capacity]

    def root(self, op: str = "sum") -> Float[Array, ""]:
        """The reduction over all leaves."""
        bits = self.summary[..., self.ops.index(self._op(op))]
        return lax.bitcast_convert_type(bits, jnp.float32)

    @property
    def nnz(self) -> Int[Array, ""]:
        """How many leaves are positive."""
        return self.summary[..., len(self.ops)].astype(jnp.int32)

    def get(self, index: Int[Array, " B"]) -> Float[Array, " B"]:
        """The leaves at ``index``; one outside ``[0, capacity)`` reads as the nearest leaf."""
        if index.shape[0] == 0:
            return jnp.zeros((0,), jnp.float32)
        return tree_kernels.read(self.layout, self.nodes, index)

    def set(
        self, index: Int[Array, " B"], value: Float[Array, " B"], *, contiguous: bool = False
    ) -> Self:
        """Set leaves.

        Args:
            index: Which, ``[B]``; rows outside ``[0, capacity)`` are dropped, and of several rows
                for one leaf the last wins.
            value: To what, ``[B]``.
            contiguous: A promise that the rows which are not dropped come first and follow each
                other modulo the capacity. It makes the update cheaper.
        """
        if index.shape[0] == 0:
            return self
        nodes, roots, gained = tree_kernels.set_leaves(
            self.layout, self.nodes, index, value, contiguous=contiguous
        )
        positive = self.summary[-1:] + gained[None].astype(jnp.uint32)
        bits = lax.bitcast_convert_type(roots, jnp.uint32)
        # By a select, number by number, XLA:CPU would read the roots later, and copy the tree.
        return self.replace(nodes=nodes, summary=jnp.concatenate([bits, positive]))

    def query(
        self, prefix: Float[Array, " B"], refine: Float[Array, " B"] | None = None
    ) -> Int[Array, " B"]:
        """The leaf in which each prefix lies: the smallest ``i`` with ``prefix < v_0 + ... + v_i``.

        The rule is exact up to the rounding of the sums. While the total is positive no leaf
        without mass is ever returned, for any prefix in ``[0, total)``.

        Args:
            prefix: Points in ``[0, total)``, ``[B]``.
            refine: What to add to each residual half way down, ``[B]``; see ``samplers``.
        """
        self._op("sum")
        return tree_kernels.find(self.layout, self.nodes, prefix, refine)

    def reduce(
        self, start: int | Int[Array, ""], stop: int | Int[Array, ""], op: str = "sum"
    ) -> Float[Array, ""]:
        """The reduction over leaves ``start`` to ``stop - 1``; the neutral element if none.

        Touches two blocks of nodes per level. ``start`` and ``stop`` are clipped to the leaves.
        """
        layout, name = self.layout, self._op(op)
        neutral = jnp.full((FANOUT,), tree_kernels.NEUTRAL[name], jnp.float32)
        low = jnp.clip(jnp.asarray(start, jnp.int32), 0, self.capacity)
        high = jnp.clip(jnp.asarray(stop, jnp.int32), low, self.capacity)
        lane = jnp.arange(FANOUT, dtype=jnp.int32)
        parts = [neutral]
        for level in range(layout.depth + 1):
            # Whole blocks are left to the level above; the ragged ends are taken here.
            above_low, above_high = -(-low // FANOUT), high // FANOUT
            inner_low, inner_high = above_low * FANOUT, above_high * FANOUT
            for first, begin, end in (
                (low // FANOUT * FANOUT, low, jnp.minimum(inner_low, high)),
                (inner_high, jnp.maximum(inner_high, inner_low), high),
            ):
                at = layout.offset(name, level) + first + lane
                inside = (first + lane >= begin) & (first + lane < end)
                values = self.nodes.at[at].get(mode="fill", fill_value=0)
                parts.append(jnp.where(inside, values, neutral))
            low, high = above_low, jnp.maximum(above_high, above_low)
        stacked = jnp.stack(parts)
        if name == "sum":
            return jnp.sum(stacked)
        if name == "max":
            return jnp.max(stacked)
        if name == "min":
            return jnp.min(stacked)
        least = jnp.min(jnp.where(stacked > 0, stacked, jnp.inf))
        return lax.select(jnp.isfinite(least), least, jnp.zeros_like(least))

    def clear(self) -> Self:
        """The tree as it was created; shares no array with the original."""
        return type(self).create(self.capacity, self.ops)

    def _op(self, op: str) -> Op:
        if op not in self.ops:
            raise ValueError(f"this tree keeps {self.ops}; create it with {op!r} among its ops")
        return op
