"""The exchange in lock step: all ranks of a group call one pure function, inside jit.

Each call is a fixed sequence of collectives, so that it composes with ``lax.scan`` and with the
whole training step in one program. Everything a rank decides by, all ranks know: none ever waits
for a message that another one does not send.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxbuf.core import describe, storage
from jaxbuf.mpi.baseline import Agreement, BaselineFilter, check_filter, combine
from jaxbuf.mpi.layout import Communicators
from jaxbuf.mpi.manager import Manager, check_rows
from jaxbuf.mpi.scores import uses_score


class Reply(struct.PyTreeNode):
    """What a rank hears in an exchange.

    Attributes:
        scores: The scores of its batch; zeros if it sent none.
        baseline: From which score on an item is worth sending, ``[]``.
        answered: Whether it sent a batch, ``[]`` bool; never on the manager.
    """

    scores: dict[str, Array]
    baseline: Float[Array, ""]
    answered: Bool[Array, ""]

    __repr__ = describe.text
    _repr_html_ = describe.rich


@dataclasses.dataclass(frozen=True)
class _Link:
    """Communicators as configuration: those of one handle are the same."""

    group: Any
    managers: Any

    def __hash__(self) -> int:
        return hash((self.rank, self.manager))

    @property
    def rank(self) -> int:
        return self.group.Get_rank()

    @property
    def manager(self) -> int:
        """The rank of the manager, the last of the group."""
        return self.group.Get_size() - 1


@dataclasses.dataclass(frozen=True)
class _Outline:
    """Shapes and dtypes of a pytree, as configuration."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    treedef: Any

    @classmethod
    def of(cls, tree: Any) -> Self:
        leaves, treedef = jax.tree.flatten(tree)
        return cls(tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves), treedef)

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.treedef, self.leaves)


class LockStep(struct.PyTreeNode):
    """One rank's end of the exchange between a manager and its workers: an immutable pytree.

    In each exchange every worker offers a batch of a fixed shape. The manager takes the batches in
    the order of ranks, each as ``Manager.receive`` does, and sends back to each worker its scores,
    and to all of them the baseline. If no worker has a row to send, neither items nor replies
    travel: one number, summed over all ranks, is all.

    Attributes:
        manager: What the manager keeps; None on workers.
        filter: Which items to send; None sends all of them.
        baseline: The last one heard of, ``[]``.
        agreement: How several managers agree on a baseline; None if each has its own.
        link: Communicators.
        outline: The shapes of what the manager keeps, known on every rank.

    Example:
        Under ``mpiexec -n 4 python program.py``, three workers and a manager run this one program:

        >>> import jax, jax.numpy as jnp, jaxbuf
        >>> from jaxbuf.mpi import Layout, LockStep, Manager, make_communicators
        >>> def manager(num_workers):
        ...     buffer = jaxbuf.reward_prioritized(jnp.zeros(8, jnp.int32), 10_000)
        ...     return Manager.create(buffer, num_workers)
        >>> @jax.jit
        ... def exchange(lock_step, states, log_reward):
        ...     return lock_step.exchange(states, score=log_reward)
        >>> lock_step = LockStep.create(make_communicators(Layout(4)), manager)  # doctest: +SKIP
        >>> lock_step, reply = exchange(lock_step, states, log_reward)  # doctest: +SKIP
    """

    manager: Manager | None
    filter: BaselineFilter | None
    baseline: Float[Array, ""]
    agreement: Agreement | None = struct.field(pytree_node=False)
    link: _Link = struct.field(pytree_node=False)
    outline: _Outline = struct.field(pytree_node=False)

    __repr__ = describe.text
    _repr_html_ = describe.rich

    @classmethod
    def create(
        cls,
        communicators: Communicators,
        manager: Callable[[int], Manager],
        *,
        filter: BaselineFilter | None = None,  # noqa: A002
        agreement: Agreement | None = None,
    ) -> Self:
        """This rank's end. Every rank of a group calls this alike.

        Args:
            communicators: Those of this rank.
            manager: Makes the manager, given the number of its workers. Workers only look at the
                shapes of what it makes.
            filter: Which items to send; None sends all of them.
            agreement: How several managers agree on a baseline; see ``combine``. Then all groups
                exchange equally often. None: each manager has its own.

        Raises:
            ValueError: If this rank is in no group, ``manager`` makes none, ``filter`` is no
                ``BaselineFilter``, or ``agreement`` is unknown.
        """
        group = communicators.group
        if group is None:
            raise ValueError("this rank is in no group; only managers and workers exchange")
        if agreement is not None and agreement not in get_args(Agreement):
            raise ValueError(
                f"agreement is {agreement!r}; choose None or from {get_args(Agreement)}"
            )
        check_filter(filter)
        link = _Link(group, communicators.managers)
        made = jax.eval_shape(lambda: manager(link.manager))
        if not isinstance(made, Manager):
            raise ValueError(
                f"manager makes a {type(made).__name__}; expected a function that takes a number "
                "of workers and returns a jaxbuf.mpi.Manager"
            )
        is_manager = link.rank == link.manager
        return cls(
            manager=manager(link.manager) if is_manager else None,
            # A copy, so that the caller keeps its own when this end is donated.
            filter=None if is_manager else jax.tree.map(jnp.copy, filter),
            baseline=jnp.float32(-jnp.inf),
            agreement=agreement,
            link=link,
            outline=_Outline.of(made),
        )

    @property
    def is_manager(self) -> bool:
        """Whether this rank is the manager."""
        return self.manager is not None

    def exchange(
        self,
        items: PyTree[Array],
        *,
        score: Float[Array, " B"] | None = None,
        mask: Bool[Array, " B"] | None = None,
    ) -> tuple[Self, Reply]:
        """Send a batch and hear of the last one: every rank of the group calls this, equally often.

        Args:
            items: Leaves ``[B, ...]``, of the same shapes on every rank. What the manager passes is
                not looked at; zeros will do.
            score: Of each item, such as its log reward, ``[B]``; on every rank or on none.
            mask: Which rows to send, ``[B]``; all False if there is nothing.

        Returns:
            This end, going on, and what it hears.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example of the
                manager's buffer, or a score that is needed is missing.
        """
        import mpi4jax
        from mpi4py import MPI

        abstract: Manager = self.outline.tree
        items, (rows,) = storage.check(abstract.buffer.data, items, "items", ("B",))
        if self.filter is not None and score is None:
            raise ValueError("the filter goes by the score of items; pass score=[B]")
        there, score = check_rows(uses_score(abstract.buffer), rows, score, mask)
        end = self
        if self.is_manager:
            there = jnp.zeros_like(there)
        elif self.filter is not None:
            chosen, there = self.filter.select(score, self.baseline, there)
            end = end.replace(filter=chosen)
        sends = jnp.any(there)
        senders = mpi4jax.allreduce(sends.astype(jnp.int32), op=MPI.SUM, comm=self.link.group)
        travels = senders > 0

        payload = (items, score, there)
        shapes = jax.eval_shape(lambda m: m.receive(items, score=score, mask=there)[1], abstract)
        scores = self._zeros(shapes)
        gathered = lax.cond(travels, self._gather, self._zeros, payload)
        baseline = self.baseline
        if end.manager is not None:
            count = jnp.where(travels, self.link.manager, 0)
            manager, scores = _take_all(end.manager, gathered, count, scores)
            baseline = manager.baseline_value()
            end = end.replace(manager=manager)
        scores = lax.cond(travels, self._scatter, self._own, scores)
        if self.agreement is None:
            baseline = lax.cond(travels, self._broadcast, jnp.copy, baseline)
        else:
            # Here all groups take part, whether or not something travels within one's own.
            if self.is_manager:
                baseline = combine(baseline, self.link.managers, self.agreement)
            baseline = self._broadcast(baseline)
        reply = Reply(
            scores=jax.tree.map(lambda x: jnp.where(sends, x, jnp.zeros_like(x)), scores),
            baseline=baseline,
            answered=sends,
        )
        # Whoever donates one of the two keeps the other.
        return end.replace(baseline=baseline.copy()), reply

    def _zeros(self, tree: Any) -> Any:
        """Like what this rank holds for all others: on the manager, a row for each rank."""
        rows = (self.link.manager + 1,) if self.is_manager else ()
        return jax.tree.map(lambda x: jnp.zeros((*rows, *x.shape), x.dtype), tree)

    def _own(self, tree: Any) -> Any:
        """What ``_zeros`` holds for this rank."""
        return jax.tree.map(lambda x: x[self.link.manager], tree) if self.is_manager else tree

    def _gather(self, tree: Any) -> Any:
        import mpi4jax

        link = self.link
        return _in_words(lambda x: mpi4jax.gather(x, root=link.manager, comm=link.group), tree)

    def _scatter(self, tree: Any) -> Any:
        import mpi4jax

        link = self.link
        return _in_words(lambda x: mpi4jax.scatter(x, root=link.manager, comm=link.group), tree)

    def _broadcast(self, tree: Any) -> Any:
        import mpi4jax

        link = self.link
        return _in_words(lambda x: mpi4jax.bcast(x, root=link.manager, comm=link.group), tree)


def _take_all(
    manager: Manager, gathered: Any, count: Int[Array, ""], scores: Any
) -> tuple[Manager, Any]:
    """The manager after the batches of the first ``count`` ranks, and a row of scores for each."""

    def take(sender: Array, carry: tuple[Manager, Any]) -> tuple[Manager, Any]:
        manager, scores = carry
        items, score, there = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, sender, keepdims=False), gathered
        )
        manager, row = manager.receive(items, score=score, mask=there, sender=sender)
        scores = jax.tree.map(lambda all_, x: all_.at[sender].set(x), scores, row)
        return manager, scores

    return lax.fori_loop(jnp.int32(0), count, take, (manager, scores))


def _in_words(send: Callable[[Array], Array], tree: Any) -> Any:
    """Send each leaf, the small floats that MPI does not know as the words they lie in."""

    def send_leaf(x: Array) -> Array:
        unknown = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        if not unknown:
            return send(x)
        word = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8
        return lax.bitcast_convert_type(send(lax.bitcast_convert_type(x, word)), x.dtype)

    return jax.tree.map(send_leaf, tree)
