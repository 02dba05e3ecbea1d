"""One batch from several buffers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxbuf.buffers import common
from jaxbuf.buffers.options import check_options
from jaxbuf.buffers.sample import Sample
from jaxbuf.core import describe
from jaxbuf.core.slots import Slots
from jaxbuf.strategies.samplers import Support


@dataclasses.dataclass(frozen=True)
class _Contents:
    """How many items all parts hold: what importance weights are relative to."""

    size: Int[Array, ""]


class Mixture(struct.PyTreeNode):
    """Several buffers, sampled together at a fixed ratio: offline and online data, say.

    A batch holds an exact number of rows from each part, first those of the first part. Slots know
    their buffer: a part's slots come after all those of the parts before it, so that
    ``update_priority`` reaches the right one. ``probability`` is that of a row of the mixture: the
    part's share of the batch, times what the part says. So ``importance_weights`` are relative to
    drawing uniformly from all items of all parts, whatever their samplers.

    A part that holds nothing gives rows that are not valid; the rows of the others stay as they
    are, so that shapes and the numbers from each part never depend on what is in them. Ask
    ``can_sample`` first.

    It is one immutable pytree, as its parts are, and works with ``jaxbuf.sample``,
    ``jaxbuf.update_priority`` and ``jaxbuf.importance_weights``. It may be a part itself.

    Attributes:
        parts: The buffers.
        ratios: The share of each in a batch; they sum to 1.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> offline = jaxbuf.ItemBuffer.create(jnp.float32(0), 100)
        >>> online = jaxbuf.ItemBuffer.create(jnp.float32(0), 10, sampler=jaxbuf.Prioritized())
        >>> mixture = jaxbuf.Mixture.create([offline.add(jnp.arange(50.0)), online], [3, 1])
        >>> mixture = mixture.add(-jnp.ones(5), part=1)
        >>> batch = jaxbuf.sample(mixture, jax.random.key(0), 8)
        >>> mixture.part_of(batch.slots).tolist(), batch.data[6:].tolist()
        ([0, 0, 0, 0, 0, 0, 1, 1], [-1.0, -1.0])
        >>> mixture = jaxbuf.update_priority(mixture, batch.slots, jnp.abs(batch.data))
    """

    parts: tuple[Any, ...]
    ratios: tuple[float, ...] = struct.field(pytree_node=False)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(cls, buffers: Sequence[Any], ratios: Sequence[float]) -> Self:
        """A mixture of buffers.

        Args:
            buffers: The parts, whose samples have the same structure, shapes and dtypes.
            ratios: How many rows each gives, relative to the others.

        Raises:
            ValueError: If there are no buffers or not as many ratios, a ratio is negative or not
                finite, all are zero, samples of the parts do not fit together, two parts share
                memory, or there are 2**31 slots or more.
        """
        parts, weights = tuple(buffers), tuple(float(ratio) for ratio in ratios)
        if not parts or len(parts) != len(weights):
            raise ValueError(
                f"there are {len(parts)} buffers and {len(weights)} ratios; expected one ratio for "
                "each of one buffer or more"
            )
        for i, part in enumerate(parts):
            if not all(hasattr(part, name) for name in ("sample", "support", "occupancy")):
                raise ValueError(f"buffers[{i}] is a {type(part).__name__}; expected a buffer")
        if not all(math.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
            raise ValueError(f"ratios is {weights}; expected finite numbers from 0 on, not all 0")
        if sum(part.capacity for part in parts) >= 2**31:
            raise ValueError("buffers have 2**31 slots or more; expected fewer in all")
        leaves = [id(leaf) for leaf in jax.tree.leaves(parts)]
        if len(set(leaves)) < len(leaves):
            raise ValueError("buffers share memory, so they cannot be donated; pass copies")
        _check_alike(parts)
        return cls(parts=parts, ratios=tuple(w / sum(weights) for w in weights))

    @property
    def capacity(self) -> int:
        """Slots of all parts together."""
        return sum(part.capacity for part in self.parts)

    @property
    def size(self) -> Int[Array, ""]:
        """What the parts hold now, in all."""
        return _total([part.size for part in self.parts])

    @property
    def occupancy(self) -> Any:
        """How many items can be told apart, as ``occupancy.size``."""
        return _Contents(_total([part.occupancy.size for part in self.parts]))

    def counts(self, batch_size: int) -> tuple[int, ...]:
        """How many rows of a batch come from each part.

        Whole shares first; rows that are left go to the parts with the largest remainders, of equal
        ones to the first.
        """
        exact = [batch_size * ratio for ratio in self.ratios]
        # A share that is whole but for rounding, such as 10 * 0.7, must not lose a row.
        whole = [math.floor(share + 1e-9 * batch_size) for share in exact]
        order = sorted(range(len(exact)), key=lambda i: (round(whole[i] - exact[i], 9), i))
        extra = set(order[: batch_size - sum(whole)])
        return tuple(count + (i in extra) for i, count in enumerate(whole))

    def can_sample(self, batch_size: int = 1) -> Bool[Array, ""]:
        """Whether every part with a share holds as many items as its rows, and at least one."""
        counts = self.counts(common.check_batch_size(batch_size))
        able = [
            part.can_sample(max(count, 1))
            for part, count, ratio in zip(self.parts, counts, self.ratios, strict=True)
            if ratio > 0
        ]
        return jnp.all(jnp.stack(able), axis=0)

    def add(self, items: PyTree[Array], *, part: int | None = None, **options: Any) -> Self:
        """Add to one of the parts.

        Args:
            items: What to add.
            part: To which part; static.
            **options: Those of the part's own ``add``.

        Raises:
            ValueError: If ``part`` is no part, if the part does not take one of the options, or as
                the part's ``add``.
        """
        i = self._check_part(part)
        check_options(self.parts[i], "add", options)
        return self.replace_part(i, self.parts[i].add(items, **options))

    def replace_part(self, part: int, buffer: Any) -> Self:
        """The mixture with another state of one part.

        Raises:
            ValueError: If ``part`` is no part, or ``buffer`` is not built as the one that was
                there.
        """
        i = self._check_part(part)
        if jax.tree.structure(buffer) != jax.tree.structure(self.parts[i]):
            raise ValueError(f"buffer is not built like parts[{i}]; create another mixture for it")
        return self.replace(parts=(*self.parts[:i], buffer, *self.parts[i + 1 :]))

    def sample(self, key: PRNGKeyArray, batch_size: int) -> Sample:
        """Draw a batch, an exact number of rows from each part.

        Args:
            key: A PRNG key.
            batch_size: Rows ``B``; static.

        Returns:
            A ``Sample``; rows that a part cannot give are invalid, have probability 0 and index
            ``capacity``.

        Raises:
            ValueError: If ``batch_size`` is no whole number from 1 on, or ``key`` no single key.
        """
        rows = common.check_batch_size(batch_size)
        common.check_key(key)
        keys = jax.random.split(key, len(self.parts))
        drawn: list[Sample] = []
        for i, count in enumerate(self.counts(rows)):
            if count > 0:
                sample = self.parts[i].sample(keys[i], count)
                index = jnp.where(sample.valid, sample.slots.index + self._offset(i), self.capacity)
                drawn.append(
                    sample.replace(
                        slots=sample.slots.replace(index=index),
                        probability=sample.probability * jnp.float32(count / rows),
                    )
                )
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *drawn)

    def part_of(self, slots: Slots) -> Int[Array, " B"]:
        """Which part each row is from, ``[B]``; the number of parts where it is not valid."""
        ends = [self._offset(i + 1) for i in range(len(self.parts))]
        at_or_after = slots.index[:, None] >= jnp.asarray(ends, jnp.int32)[None]
        return jnp.sum(at_or_after, axis=1, dtype=jnp.int32)

    def update_priority(
        self,
        slots: Slots,
        priority: Float[Array, " B"],
        *,
        mask: Bool[Array, " B"] | None = None,
    ) -> Self:
        """Set the priorities of sampled items, each in the part it is from.

        Rows from parts without priorities are dropped, as are stale, invalid and masked ones.

        Args:
            slots: Which items: ``sample.slots``, ``[B]``.
            priority: Their new priorities, ``[B]``; one that is not legal is refused and counted by
                the part.
            mask: Which rows to take, ``[B]``.

        Raises:
            ValueError: When traced, if no part has priorities, or a shape differs.
        """
        if not _uses_priority(self):
            raise ValueError(
                "update_priority was called, but no part has priorities; create one of them with "
                "sampler=jaxbuf.Prioritized(...)"
            )
        parts: list[Any] = []
        for i, part in enumerate(self.parts):
            index = slots.index - self._offset(i)
            theirs = (index >= 0) & (index < part.capacity)
            own = slots.replace(index=jnp.where(theirs, index, part.capacity))
            with_priorities = _uses_priority(part)
            parts.append(
                part.update_priority(own, priority, mask=mask) if with_priorities else part
            )
        return self.replace(parts=tuple(parts))

    def clear(self) -> Self:
        """The mixture with nothing in its parts."""
        return self.replace(parts=tuple(part.clear() for part in self.parts))

    def support(self) -> Support:
        """How many items can be drawn, and the least probability among them."""
        supports = [
            (part.support(), jnp.float32(ratio))
            for part, ratio in zip(self.parts, self.ratios, strict=True)
            if ratio > 0
        ]
        least = [
            jnp.where(support.count > 0, support.least_probability * ratio, jnp.inf)
            for support, ratio in supports
        ]
        lowest = jnp.min(jnp.stack(least), axis=0)
        return Support(
            _total([support.count for support, _ in supports]),
            jnp.where(jnp.isfinite(lowest), lowest, 0.0),
        )

    def metrics(self) -> dict[str, Array]:
        """Numbers worth watching, all scalars.

        Returns:
            ``size`` of all, and those of each part with its number before their names:
            ``0/size``, ``1/priority_max``.
        """
        found = {"size": self.size}
        for i, part in enumerate(self.parts):
            found |= {f"{i}/{name}": value for name, value in part.metrics().items()}
        return found

    def _offset(self, part: int) -> int:
        """The slots of the parts before it."""
        return sum(before.capacity for before in self.parts[:part])

    def _check_part(self, part: Any) -> int:
        whole = isinstance(part, int | np.integer) and not isinstance(part, bool)
        if not whole or not 0 <= part < len(self.parts):
            raise ValueError(
                f"part is {part!r}; expected the number of one of the {len(self.parts)} parts, an "
                f"integer from 0 to {len(self.parts) - 1}"
            )
        return int(part)


def _uses_priority(part: Any) -> bool:
    if isinstance(part, Mixture):
        return any(_uses_priority(inner) for inner in part.parts)
    return part.sampler.uses_priority


def _total(numbers: list[Array]) -> Int[Array, ""]:
    return jnp.sum(jnp.stack(numbers), axis=0, dtype=jnp.int32)


def _check_alike(parts: tuple[Any, ...]) -> None:
    """Refuse parts whose samples cannot be put into one batch."""
    rows = [
        jax.eval_shape(lambda key, part=part: part.sample(key, 1).data, jax.random.key(0))
        for part in parts
    ]
    first = jax.tree_util.tree_leaves_with_path(rows[0])
    for i, other in enumerate(rows[1:], start=1):
        if jax.tree.structure(other) != jax.tree.structure(rows[0]):
            raise ValueError(
                f"samples of buffers[{i}] have another structure than those of buffers[0]: "
                f"{jax.tree.structure(other)}, not {jax.tree.structure(rows[0])}"
            )
        for (path, want), got in zip(first, jax.tree.leaves(other), strict=True):
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                name = "data" + jax.tree_util.keystr(path)
                raise ValueError(
                    f"{name} of samples of buffers[{i}] is {got.dtype}{list(got.shape[1:])}, but "
                    f"{want.dtype}{list(want.shape[1:])} of those of buffers[0]"
                )
