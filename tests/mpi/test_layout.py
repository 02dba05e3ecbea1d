"""Layouts: properties over many sizes, and the communicators of real ranks."""

import json
import subprocess
import sys

import pytest

from tests.programs.mpi_launch import run_in_turn

pytest.importorskip("mpi4jax")

from jaxbuf.mpi import Layout, Role, make_communicators, node_names


def _check(layout):
    """Check what holds for every layout."""
    groups = layout.groups
    assert len(groups) == layout.num_managers
    everyone = sorted(rank for workers, manager in groups for rank in (*workers, manager))
    assert everyone == list(range(layout.world_size - layout.coordinator))
    for number, (workers, manager) in enumerate(groups):
        assert list(workers) == sorted(workers)
        assert workers
        assert manager > workers[-1]
        assert layout.role(manager) == Role("manager", number)
        assert {layout.role(rank) for rank in workers} == {Role("worker", number)}
    assert sorted(layout.workers + layout.managers) == everyone
    if layout.coordinator:
        assert layout.coordinator_rank == layout.world_size - 1
        assert layout.role(layout.world_size - 1) == Role("coordinator", None)
    else:
        assert layout.coordinator_rank is None


def test_the_documented_split():
    layout = Layout(world_size=8, num_managers=2)

    assert layout.managers == (3, 7)
    assert [group.workers for group in layout.groups] == [(0, 1, 2), (4, 5, 6)]


@pytest.mark.parametrize("coordinator", [False, True])
def test_every_possible_split_is_even(coordinator):
    for world_size in range(2 + coordinator, 40):
        for managers in range(1, (world_size - coordinator) // 2 + 1):
            layout = Layout(world_size, managers, coordinator)
            _check(layout)
            sizes = [len(group.workers) for group in layout.groups]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1
            for workers, manager in layout.groups:
                assert [*workers, manager] == list(range(workers[0], manager + 1))


@pytest.mark.parametrize("deal", ["block", "round_robin"])
@pytest.mark.parametrize("coordinator", [False, True])
def test_groups_stay_on_their_node_when_possible(deal, coordinator):
    for num_nodes in (1, 2, 3, 4):
        for per_node in (2, 3, 4, 7):
            world_size = num_nodes * per_node
            for managers in range(1, (world_size - coordinator) // 2 + 1):
                ranks = range(world_size)
                nodes = [
                    rank // per_node if deal == "block" else rank % num_nodes for rank in ranks
                ]
                layout = Layout(world_size, managers, coordinator, tuple(map(str, nodes)))
                _check(layout)
                if managers < num_nodes:
                    assert not layout.is_node_local
                elif managers % num_nodes == 0 and managers // num_nodes * 2 <= (
                    per_node - coordinator
                ):
                    assert layout.is_node_local


def test_nodes_of_different_size_get_managers_in_proportion():
    layout = Layout(9, 3, nodes=("a",) * 6 + ("b",) * 3)

    assert layout.is_node_local
    assert [group.workers for group in layout.groups] == [(0, 1), (3, 4), (6, 7)]


def test_a_node_too_small_for_a_group_joins_another():
    layout = Layout(6, 2, nodes=("a",) * 5 + ("b",))

    assert not layout.is_node_local
    assert layout.groups == Layout(6, 2).groups


def test_layouts_built_alike_are_equal():
    assert Layout(4, 1, nodes=["a"] * 4) == Layout(4, 1, nodes=("a",) * 4)
    assert hash(Layout(4, 1)) == hash(Layout(4, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 2), "world_size is 3; 2 managers with a worker each need at least 4 ranks"),
        ((4, 2, True), "and a coordinator need at least 5 ranks"),
        ((4, 1, False, ("a", "b")), "nodes has 2 names; expected one for each of the 4 ranks"),
    ],
)
def test_impossible_layouts_say_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)


def test_there_is_no_other_rank():
    with pytest.raises(ValueError, match="rank is 4; expected 0 to 3"):
        Layout(4).role(4)


def test_without_mpi_only_this_package_is_missing():
    program = """
import sys

sys.modules["mpi4py"] = sys.modules["mpi4jax"] = None
import jaxbuf

try:
    import jaxbuf.mpi
except ImportError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "jaxbuf.mpi needs mpi4py and mpi4jax: pip install 'jaxbuf[mpi]'" in run.stdout


@pytest.mark.mpi
@pytest.mark.slow
def test_communicators_on_real_ranks():
    ranks = [json.loads(rank.stdout) for rank in run_in_turn(3, __file__, "communicators")]

    assert [rank["one group"] for rank in ranks] == [
        [[0, 1, 2], [0, 1], None, [0, 1]],
        [[0, 1, 2], [0, 1], None, [0, 1]],
        [[0, 1, 2], None, [2], None],
    ]
    assert [rank["with coordinator"] for rank in ranks] == [
        [[0, 1], [0], None, [0]],
        [[0, 1], None, [1], None],
        [None, None, None, None],
    ]
    assert all("world_size is 4, but 3 ranks were started" in rank["error"] for rank in ranks)
    assert all(len(rank["nodes"]) == 3 for rank in ranks)


def _communicators():
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()

    def members(layout):
        made = make_communicators(layout)
        return [comm and comm.allgather(rank) for comm in made]

    try:
        make_communicators(Layout(4))
    except ValueError as caught:
        error = str(caught)
    out = {
        "one group": members(Layout(3)),
        "with coordinator": members(Layout(3, coordinator=True)),
        "error": error,
        "nodes": node_names(),
    }
    print(json.dumps(out))


if __name__ == "__main__":
    _communicators()
