"""The exchange in lock step: all ranks of a group call one pure function, inside jit.

Each call is a fixed sequence of collectives, so it can be part of a ``lax.scan`` or of a whole
training step in one program. All ranks branch on the same values, so no rank ever waits for a
message that another one does not send.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, PyTree

from jaxbuf.core import checks
from jaxbuf.core.describe import Described
from jaxbuf.core.leaves import bits, from_bits
from jaxbuf.core.slots import Slots
from jaxbuf.core.types import Arrays, Count, Flag, Floats, Mask, Number
from jaxbuf.mpi.baseline import Agreement, BaselineFilter, check_filter, combine
from jaxbuf.mpi.batch import Batch, Reply, check_batch, uses_score
from jaxbuf.mpi.layout import Communicators, Ranks
from jaxbuf.mpi.manager import Manager, outline


@dataclasses.dataclass(frozen=True)
class _Outline:
    """The shapes and dtypes of a pytree as static configuration."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    treedef: Any

    @classmethod
    def of(cls, tree: PyTree) -> Self:
        leaves, treedef = jax.tree.flatten(tree)
        return cls(tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves), treedef)

    @property
    def tree(self) -> PyTree:
        return jax.tree.unflatten(self.treedef, self.leaves)


class LockStep(Described):
    """One rank's end of the exchange between a manager and its workers: an immutable pytree.

    In each exchange every worker offers a batch of a fixed shape. The manager receives the batches
    in the order of ranks, and sends each worker the scores of its batch, and all of them the
    baseline. If no worker has a row to send, only one number is exchanged, the sum over all ranks
    of whether they have any.

    Call it within ``jax.jit``: outside of it each exchange compiles several programs anew.

    Attributes:
        manager: The manager; None on workers.
        filter: Chooses the items to send; None sends all of them.
        baseline: The last baseline, ``[]``.
        agreement: How several managers agree on a baseline; None if each has its own.
        slots: Whether replies have the slots of the rows.
        group: The communicator of the workers and their manager, which has the last rank.
        managers: The communicator of all managers; None on workers.
        outline: The shapes of the manager's arrays, known on every rank.

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
    baseline: Number
    agreement: Agreement | None = struct.field(pytree_node=False)
    slots: bool = struct.field(pytree_node=False)
    group: Ranks = struct.field(pytree_node=False)
    managers: Ranks | None = struct.field(pytree_node=False)
    outline: _Outline = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        communicators: Communicators,
        manager: Callable[[int], Manager],
        *,
        filter: BaselineFilter | None = None,  # noqa: A002
        agreement: Agreement | None = None,
        slots: bool = False,
    ) -> Self:
        """Creates this rank's end. Every rank of a group calls this with the same arguments.

        Args:
            communicators: The communicators of this rank.
            manager: Makes the manager, given the number of its workers. Workers use only the shapes
                and the configuration of the result.
            filter: Chooses the items to send; None sends all of them.
            agreement: How several managers agree on a baseline; see ``combine``. It requires that
                all groups exchange equally often. With None each manager has its own.
            slots: If True, replies have the slots of the rows, by which ``update_score`` and
                ``update_priority`` change the manager's items.

        Raises:
            ValueError: If this rank is not in a group, ``manager`` does not make a manager,
                ``filter`` is not a ``BaselineFilter``, or ``agreement`` is unknown.
        """
        if communicators.group is None:
            raise ValueError("this rank is not in a group; only managers and workers exchange")
        if agreement is not None and agreement not in get_args(Agreement):
            raise ValueError(
                f"agreement is {agreement!r}; choose None or from {get_args(Agreement)}"
            )
        check_filter(filter)
        group = Ranks(communicators.group)
        shapes = outline(manager, group.last)
        is_manager = group.rank == group.last
        managers = communicators.managers
        return cls(
            manager=manager(group.last) if is_manager else None,
            # A copy, so that the caller's filter survives the donation of this end.
            filter=None if is_manager else jax.tree.map(jnp.copy, filter),
            baseline=jnp.float32(-jnp.inf),
            agreement=agreement,
            slots=checks.check_flag("slots", slots),
            group=group,
            managers=None if managers is None else Ranks(managers),
            outline=_Outline.of(shapes),
        )

    @property
    def is_manager(self) -> bool:
        """True on the manager's rank."""
        return self.manager is not None

    def exchange(
        self, items: Arrays, *, score: Floats | None = None, mask: Mask | None = None
    ) -> tuple[Self, Reply]:
        """Sends a batch and receives its scores. Every rank of the group calls this equally often.

        Args:
            items: Leaves ``[B, ...]``, with the same shapes on every rank. The values that the
                manager passes are not used, so it can pass zeros.
            score: The score of each item, such as its log reward, ``[B]``; on every rank or none.
            mask: Which rows to send, ``[B]``; all False to send nothing.

        Returns:
            The new end, and the reply.

        Raises:
            ValueError: When traced, if a structure, shape or dtype differs from the example of the
                manager's buffer, or a required score is missing.
        """
        abstract: Manager = self.outline.tree
        buffer = abstract.buffer
        if self.filter is not None and score is None:
            raise ValueError("the filter needs the score of items; pass score=[B]")
        batch, mask = check_batch(buffer.data, items, score, mask, needs_score=uses_score(buffer))
        end = self
        if self.is_manager:
            mask = jnp.zeros_like(mask)
        elif self.filter is not None:
            chosen, mask = self.filter.select(batch.score, self.baseline, mask)
            end = end.replace(filter=chosen)
        sends = jnp.any(mask)
        any_sends = self._any_sends(sends)

        shapes = jax.eval_shape(
            lambda manager: _receive(manager, batch, mask, 0, self.slots)[1], abstract
        )
        answers = self._zeros(shapes)
        gathered = lax.cond(any_sends, self._gather, self._zeros, (batch, mask))
        baseline = self.baseline
        if end.manager is not None:
            count = jnp.where(any_sends, self.group.last, 0)
            manager, answers = _receive_all(end.manager, gathered, count, answers, self.slots)
            baseline = manager.baseline_value()
            end = end.replace(manager=manager)
        scores, slots = lax.cond(any_sends, self._scatter, self._row_of_rank, answers)
        if self.agreement is None:
            baseline = lax.cond(any_sends, self._broadcast, jnp.copy, baseline)
        else:
            # All groups take part, also those in which no worker sends anything.
            if self.managers is not None:
                baseline = combine(baseline, self.managers.comm, self.agreement)
            baseline = self._broadcast(baseline)
        if slots is not None:
            no_slot = jnp.int32(buffer.capacity)
            slots = slots.replace(index=jnp.where(sends, slots.index, no_slot))
        reply = Reply(
            scores=jax.tree.map(lambda x: jnp.where(sends, x, jnp.zeros_like(x)), scores),
            baseline=baseline,
            answered=sends,
            slots=slots,
        )
        # A copy, so that the reply survives the donation of this end.
        return end.replace(baseline=baseline.copy()), reply

    def update_score(self, slots: Slots, score: Floats, *, mask: Mask | None = None) -> Self:
        """Sets scores of the manager's items. Every rank of the group calls this equally often.

        The manager takes the rows in the order of ranks. It drops those whose item has left since,
        as the buffer's own ``update_score`` does. If no worker has a row to send, only one number
        is exchanged.

        Args:
            slots: The slots of the items, from replies to this worker, ``[B]``, with the same shape
                on every rank. What the manager passes is not used.
            score: Their new scores, ``[B]``.
            mask: Which rows to use, ``[B]``.

        Raises:
            ValueError: When traced, if no part of the manager's buffer uses scores, or a shape
                differs.
        """
        return self._update(Manager.update_score, slots, score, mask)

    def update_priority(self, slots: Slots, priority: Floats, *, mask: Mask | None = None) -> Self:
        """Sets priorities of the manager's items, as ``update_score`` sets scores.

        Raises:
            ValueError: When traced, if the sampler of the manager's buffer has no priorities, or a
                shape differs.
        """
        return self._update(Manager.update_priority, slots, priority, mask)

    def _update(self, update: Callable[..., Manager], slots: Slots, value: Any, mask: Any) -> Self:
        abstract: Manager = self.outline.tree
        jax.eval_shape(lambda manager: update(manager, slots, value, mask=mask), abstract)
        value = jnp.asarray(value, jnp.float32)
        mask = jnp.ones(value.shape, bool) if mask is None else jnp.asarray(mask)
        mask &= (slots.index < abstract.buffer.capacity) & (not self.is_manager)
        any_sends = self._any_sends(jnp.any(mask))
        gathered = lax.cond(any_sends, self._gather, self._zeros, (slots, value, mask))
        if self.manager is None:
            return self
        slots, value, mask = jax.tree.map(lambda x: x.reshape(-1), gathered)
        return self.replace(manager=update(self.manager, slots, value, mask=mask))

    def _zeros(self, tree: Arrays) -> Arrays:
        """Returns zeros like a tree; on the manager, with a row for each rank."""
        rows = (self.group.size,) if self.is_manager else ()
        return jax.tree.map(lambda x: jnp.zeros((*rows, *x.shape), x.dtype), tree)

    def _row_of_rank(self, tree: Arrays) -> Arrays:
        """Returns this rank's row of a tree of ``_zeros``, as ``_scatter`` does."""
        return jax.tree.map(lambda x: x[self.group.last], tree) if self.is_manager else tree

    def _any_sends(self, sends: Flag) -> Flag:
        """Returns on every rank whether one of them sends anything."""
        import mpi4jax
        from mpi4py import MPI

        return mpi4jax.allreduce(sends.astype(jnp.int32), op=MPI.SUM, comm=self.group.comm) > 0

    def _gather(self, tree: Arrays) -> Arrays:
        import mpi4jax

        return self._exchange(mpi4jax.gather, tree, gives_rows=self.is_manager)

    def _scatter(self, tree: Arrays) -> Arrays:
        import mpi4jax

        return self._exchange(mpi4jax.scatter, tree, takes_rows=self.is_manager)

    def _broadcast(self, tree: Arrays) -> Arrays:
        import mpi4jax

        return self._exchange(mpi4jax.bcast, tree)

    def _exchange(
        self,
        collective: Callable[..., Array],
        tree: Arrays,
        *,
        takes_rows: bool = False,
        gives_rows: bool = False,
    ) -> Arrays:
        """Passes a tree through a collective between the manager and its workers, bit by bit.

        MPI knows few of the dtypes of JAX, and bits are the same on every rank.

        Args:
            collective: The collective.
            tree: The leaves of this rank.
            takes_rows: Whether they have a row for each rank.
            gives_rows: Whether the result has a row for each rank.
        """

        def exchange_leaf(x: Array) -> Array:
            rows = x if takes_rows else x[None]
            words = bits(rows)  # [n, k]
            words = words if takes_rows else words[0]
            words = collective(words, root=self.group.last, comm=self.group.comm)
            out = from_bits(words if gives_rows else words[None], rows)
            return out if gives_rows else out[0]

        return jax.tree.map(exchange_leaf, tree)


def _receive_all(
    manager: Manager, gathered: Arrays, count: Count, answers: Arrays, slots: bool
) -> tuple[Manager, Arrays]:
    """Receives the batches of the first ``count`` ranks; returns a row of answers for each."""

    def receive(sender: Array, carry: tuple[Manager, Arrays]) -> tuple[Manager, Arrays]:
        manager, answers = carry
        batch, mask = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, sender, keepdims=False), gathered
        )
        manager, row = _receive(manager, batch, mask, sender, slots)
        answers = jax.tree.map(lambda rows, x: rows.at[sender].set(x), answers, row)
        return manager, answers

    return lax.fori_loop(jnp.int32(0), count, receive, (manager, answers))


def _receive(
    manager: Manager, batch: Batch, mask: Mask, sender: Any, slots: bool
) -> tuple[Manager, Arrays]:
    """Receives a batch; returns the manager, and the scores and, if asked for, the slots."""
    manager, scores, row_slots = manager.insert(
        batch.items, score=batch.score, mask=mask, sender=sender
    )
    return manager, (scores, row_slots if slots else None)
