"""The roles of all ranks: the same plan on every rank, computed without communication.

References:
    Lahlou et al., torchgfn: A PyTorch GFlowNet library, 2023, https://arxiv.org/abs/2305.14594
    (its distributed replay buffers).
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxbuf.core import checks, sizes

if TYPE_CHECKING:
    from mpi4py import MPI


class Group(NamedTuple):
    """The ranks of a manager and of the workers that it serves.

    Attributes:
        workers: The ranks of the workers, in rising order; at least one.
        manager: The rank of the manager.
    """

    workers: tuple[int, ...]
    manager: int


class Role(NamedTuple):
    """The role of a rank.

    Attributes:
        kind: ``"worker"``, ``"manager"`` or ``"coordinator"``.
        group: The number of the rank's group; None for the coordinator.
    """

    kind: Literal["worker", "manager", "coordinator"]
    group: int | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Splits ``world_size`` ranks into groups of one manager and the workers it serves.

    The ranks of a group are consecutive, and the last one is its manager. Groups have the same
    size, or the first ones have one rank more. The coordinator, if there is one, is the last of all
    ranks.

    With ``nodes``, managers are distributed over the nodes in proportion to their ranks, and the
    ranks of each node are split as above, so no group spans two nodes. This requires at least one
    manager per node, and at least two ranks per manager on each node. Otherwise groups have even
    sizes, and the ranks are ordered node by node.

    Attributes:
        world_size: The number of ranks.
        num_managers: The number of groups.
        coordinator: Whether one rank belongs to no group.
        nodes: The name of the node of each rank; None to ignore nodes. See ``node_names``.

    Raises:
        ValueError: If a group would have no worker, or ``nodes`` does not have a name for each
            rank.

    Example:
        >>> from jaxbuf.mpi import Layout
        >>> layout = Layout(8, 2)
        >>> layout.groups
        (Group(workers=(0, 1, 2), manager=3), Group(workers=(4, 5, 6), manager=7))
        >>> layout.role(3)
        Role(kind='manager', group=0)
        >>> Layout(6, 2, nodes=("a", "b") * 3).groups
        (Group(workers=(0, 2), manager=4), Group(workers=(1, 3), manager=5))
    """

    world_size: int
    num_managers: int = 1
    coordinator: bool = False
    nodes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        checks.settle(self, sizes.check_count, "world_size", "num_managers")
        checks.settle(self, checks.check_flag, "coordinator")
        needed = 2 * self.num_managers + self.coordinator
        if self.world_size < needed:
            raise ValueError(
                f"world_size is {self.world_size}; {self.num_managers} managers with a worker each"
                f"{' and a coordinator' if self.coordinator else ''} need at least {needed} ranks: "
                "start more, or lower num_managers"
            )
        if self.nodes is not None:
            if not isinstance(self.nodes, list | tuple):
                raise ValueError(
                    f"nodes is {checks.name_of(self.nodes)}; expected None or the name of the node "
                    "of each rank"
                )
            object.__setattr__(self, "nodes", tuple(str(node) for node in self.nodes))
            if len(self.nodes) != self.world_size:
                raise ValueError(
                    f"nodes has {len(self.nodes)} names; expected one for each of the "
                    f"{self.world_size} ranks"
                )

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in the order of their first ranks."""
        nodes = self._ranks_of_nodes()
        managers = _managers_of_nodes(self.num_managers, [len(ranks) for ranks in nodes])
        if managers is None:
            nodes, managers = [list(itertools.chain(*nodes))], [self.num_managers]
        chunks = [
            sorted(int(rank) for rank in chunk)
            for ranks, count in zip(nodes, managers, strict=True)
            for chunk in np.array_split(np.asarray(ranks), count)
        ]
        return tuple(Group(tuple(chunk[:-1]), chunk[-1]) for chunk in sorted(chunks))

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that train, in rising order."""
        return tuple(sorted(rank for group in self.groups for rank in group.workers))

    @property
    def managers(self) -> tuple[int, ...]:
        """The ranks that keep a buffer, in the order of groups."""
        return tuple(group.manager for group in self.groups)

    @property
    def coordinator_rank(self) -> int | None:
        """The rank that belongs to no group; None without a coordinator."""
        return self.world_size - 1 if self.coordinator else None

    @property
    def is_node_local(self) -> bool:
        """True if no group spans two nodes, or nodes are not known."""
        nodes = self.nodes
        if nodes is None:
            return True
        return all(
            len({nodes[rank] for rank in (*workers, manager)}) == 1
            for workers, manager in self.groups
        )

    def role(self, rank: int) -> Role:
        """Returns the role of a rank.

        Raises:
            ValueError: If ``rank`` is out of range.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}; expected 0 to {self.world_size - 1}")
        for number, group in enumerate(self.groups):
            if rank == group.manager:
                return Role("manager", number)
            if rank in group.workers:
                return Role("worker", number)
        return Role("coordinator", None)

    def _ranks_of_nodes(self) -> list[list[int]]:
        """Returns the ranks that belong to groups, node by node, in the order of first ranks."""
        grouped = range(self.world_size - self.coordinator)
        if self.nodes is None:
            return [list(grouped)]
        ranks: dict[str, list[int]] = {}
        for rank in grouped:
            ranks.setdefault(self.nodes[rank], []).append(rank)
        return list(ranks.values())


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A communicator as static configuration of a pytree; equal if it is the same communicator."""

    comm: Any

    def __hash__(self) -> int:
        return hash((self.rank, self.size))

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.comm.Get_size()

    @property
    def last(self) -> int:
        """The last rank, which is the manager of a group."""
        return self.size - 1


class Communicators(NamedTuple):
    """The communicators of a rank; None where it is not a member.

    Attributes:
        group: The workers of the rank's group and their manager, which has the last rank.
        training: All workers.
        managers: All managers.
        agents: The workers of the rank's group.
    """

    group: "MPI.Intracomm | None"
    training: "MPI.Intracomm | None"
    managers: "MPI.Intracomm | None"
    agents: "MPI.Intracomm | None"


def make_communicators(layout: Layout, world: "MPI.Intracomm | None" = None) -> Communicators:
    """Creates the communicators of a layout. Every rank of ``world`` calls this alike.

    Args:
        layout: The roles of all ranks.
        world: The communicator of all ranks; by default ``MPI.COMM_WORLD``.

    Raises:
        ValueError: If the layout has another number of ranks.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD if world is None else world
    if world.Get_size() != layout.world_size:
        raise ValueError(
            f"world_size is {layout.world_size}, but {world.Get_size()} ranks were started; start "
            "as many (mpiexec -n), or make the layout for world.Get_size()"
        )
    rank = world.Get_rank()
    kind, group = layout.role(rank)

    def split(number: int | None) -> Any:
        comm = world.Split(MPI.UNDEFINED if number is None else number, key=rank)
        return None if comm == MPI.COMM_NULL else comm

    # Split is collective: every rank calls it equally often, in the same order.
    return Communicators(
        group=split(group),
        training=split(0 if kind == "worker" else None),
        managers=split(0 if kind == "manager" else None),
        agents=split(group if kind == "worker" else None),
    )


def node_names(world: "MPI.Intracomm | None" = None) -> tuple[str, ...]:
    """Returns the name of the node of each rank. Every rank of ``world`` calls this."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD if world is None else world
    return tuple(world.allgather(MPI.Get_processor_name()))


def _managers_of_nodes(managers: int, ranks: Sequence[int]) -> list[int] | None:
    """Returns the number of managers of each node; None if a group would have to span nodes."""
    if managers < len(ranks):
        return None
    shares = [1] * len(ranks)
    for _ in range(managers - len(ranks)):
        # The next manager goes to the node whose groups would still be the largest with it.
        sizes = [count / (share + 1) for count, share in zip(ranks, shares, strict=True)]
        shares[int(np.argmax(sizes))] += 1
    enough = all(count >= 2 * share for count, share in zip(ranks, shares, strict=True))
    return shares if enough else None
