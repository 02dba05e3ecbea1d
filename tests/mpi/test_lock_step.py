"""The exchange in lock step: real ranks hold what one process computes without MPI.

Run as a program, this file is the program of the ranks, which writes what each of them holds.
"""

import functools
import json
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from tests.programs.mpi_launch import run_in_turn

pytest.importorskip("mpi4jax")

import jaxbuf
from jaxbuf.mpi import (
    EMA,
    BaselineFilter,
    Communicators,
    Layout,
    LockStep,
    Manager,
    Min,
    combine,
    make_communicators,
)

_STEPS, _ROWS, _WIDTH = 8, 3, 2
# In this step no rank sends anything; in the next one the first worker does not.
_SILENT = 3


def _layout(ranks):
    return Layout(ranks, num_managers=2 if ranks == 4 else 1)


def _score(buffer, batch, mask, sender):
    held = buffer.size.astype(jnp.float32)
    total = jnp.sum(jnp.where(mask, batch.items["reward"], 0.0))
    return {"held": held, "per row": jnp.stack([total, sender.astype(jnp.float32)])}


_ITEM = {
    "state": jnp.zeros(_WIDTH, jnp.int32),
    "reward": jnp.float32(0),
    "half": jnp.bfloat16(0),
    "flag": jnp.bool_(False),
}


def _prioritized(workers):
    buffer = jaxbuf.reward_prioritized(_ITEM, 7, temperature=1.0)
    return Manager.create(buffer, workers, baseline=Min(0.5), scores=_score)


def _diverse(workers):
    buffer = jaxbuf.diverse_reward_prioritized(_ITEM, 4, cutoff=1.0, field="state")
    return Manager.create(buffer, workers, baseline=EMA(0.5), scores=_score)


def _plain(workers):
    return Manager.create(jaxbuf.ItemBuffer.create(_ITEM, 5), workers)


def _updated(workers):
    return Manager.create(jaxbuf.reward_prioritized(_ITEM, 7), workers)


def _new_scores(reward):
    """Returns what a worker learns later of some rows of a batch, and which they are."""
    return reward[::-1] + 0.5, np.arange(_ROWS) < 2


_CASES = {
    "prioritized": (_prioritized, BaselineFilter.create(refresh_after=2)),
    "diverse": (_diverse, None),
    "plain": (_plain, None),
    "updated": (_updated, None),
}
# Starting ranks and compiling take long, so each number of ranks has its own cases.
_CASES_OF = {2: ("plain", "updated"), 3: ("prioritized", "diverse", "updated"), 4: ("prioritized",)}


def _inputs(rank):
    """Returns the states, rewards and mask of each step of a rank."""
    random = np.random.default_rng(rank)
    states = random.integers(0, 3, (_STEPS, _ROWS, _WIDTH)).astype(np.int32)
    reward = random.normal(size=(_STEPS, _ROWS)).astype(np.float32)
    mask = random.random((_STEPS, _ROWS)) < 0.8
    mask[_SILENT] = False
    if rank == 0:
        mask[_SILENT + 1] = False
    return states, reward, mask


def _train(count, batch, scored):
    """Returns the batch of a small training step, which depends on how often it was answered."""
    states, reward, mask = batch
    items = {
        "state": states + count,
        "reward": reward,
        "half": reward.astype(jnp.bfloat16),
        "flag": reward > 0,
    }
    return items, (reward if scored else None), mask


def _reference(name, layout):
    """Compute what all ranks hold in one process, one rank after the other."""
    make, chosen = _CASES[name]
    scored = name != "plain"
    insert, select = jax.jit(Manager.insert), jax.jit(BaselineFilter.select)
    update = jax.jit(Manager.update_score)
    groups = [(group.workers, make(len(group.workers))) for group in layout.groups]
    managers = [manager for _, manager in groups]
    baselines = [jnp.float32(-jnp.inf)] * len(groups)
    filters = dict.fromkeys(layout.workers, chosen)
    counts = dict.fromkeys(layout.workers, jnp.int32(0))
    heard = {rank: [] for rank in range(layout.world_size)}
    inputs = {rank: _inputs(rank) for rank in layout.workers}
    for step in range(_STEPS):
        own, any_sent, slots = [], [], {}
        for g, (workers, _) in enumerate(groups):
            sent = False
            for number, rank in enumerate(workers):
                batch = [jnp.asarray(x[step]) for x in inputs[rank]]
                items, score, mask = _train(counts[rank], batch, scored)
                if filters[rank] is not None:
                    filters[rank], mask = select(filters[rank], score, baselines[g], mask)
                managers[g], scores, slots[rank] = insert(
                    managers[g], items, score=score, mask=mask, sender=jnp.int32(number)
                )
                answered = bool(mask.any())
                sent |= answered
                counts[rank] += int(answered)
                if not answered:
                    scores = jax.tree.map(jnp.zeros_like, scores)
                heard[rank].append((scores, answered))
            own.append(managers[g].baseline_value())
            any_sent.append(sent)
            for rank in workers if name == "updated" else ():
                new, rows = _new_scores(inputs[rank][1][step])
                managers[g] = update(managers[g], slots[rank], new, mask=rows)
        if len(groups) > 1:
            own = [jnp.minimum(*own)] * 2
            any_sent = [True] * 2
        baselines = [
            new if sent else old for new, old, sent in zip(own, baselines, any_sent, strict=True)
        ]
        for g, (workers, _) in enumerate(groups):
            for rank in workers:
                heard[rank][-1] = (*heard[rank][-1], baselines[g])
    out = {}
    for g, group in enumerate(layout.groups):
        out[group.manager] = jax.tree.leaves(managers[g])
        for rank in group.workers:
            scores, answered, baseline = zip(*heard[rank], strict=True)
            scores = jax.tree.map(lambda *x: jnp.stack(x), *scores)
            rest = [np.array(baseline), np.array(answered), counts[rank]]
            out[rank] = [*jax.tree.leaves((filters[rank], scores)), *rest]
    return out


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_ranks_hold_what_one_process_computes(ranks, tmp_path):
    printed = run_in_turn(ranks, __file__, tmp_path)

    for name in _CASES_OF[ranks]:
        expected = _reference(name, _layout(ranks))
        for rank in range(ranks):
            file = np.load(tmp_path / f"{name}-{rank}.npz")
            assert len(file.files) == len(expected[rank])
            for key, want in zip(file.files, expected[rank], strict=True):
                np.testing.assert_array_equal(file[key], _plainly(want), f"{name} {rank} {key}")
    for rank, output in enumerate(printed):
        assert output.stderr == ""
        facts = json.loads(output.stdout)
        known = [-np.inf, ranks / 2, ranks - 1]
        assert facts["combined"] == [known, known, [-np.inf] * 3, [0.0] * 3]
        assert facts["zeros"] == json.loads(printed[0].stdout)["zeros"]
        assert facts["outside of branches"] == (
            ["allreduce_mpi"] if ranks < 4 else sorted(_agreeing(rank))
        )
        assert "items['state'] has shape" in facts["error"]


def _agreeing(rank):
    own = ["allreduce_mpi", "bcast_mpi"]
    return [*own, "allgather_mpi"] if rank in _layout(4).managers else own


def test_a_rank_outside_of_groups_cannot_exchange():
    with pytest.raises(ValueError, match="this rank is not in a group"):
        LockStep.create(Communicators(None, None, None, None), _plain)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"agreement": "median"}, "agreement is 'median'; choose None or from"),
        ({"filter": 10}, "filter is 10; expected None or jaxbuf.mpi.BaselineFilter.create"),
    ],
)
def test_unknown_choices_say_why(choice, message):
    with pytest.raises(ValueError, match=message):
        LockStep.create(Communicators(object(), None, None, None), _plain, **choice)


def test_a_manager_refuses_bad_arguments():
    plain = jaxbuf.ItemBuffer.create(jnp.float32(0), 4)
    with pytest.raises(ValueError, match=r"Min\(alpha=0.1\) uses the scores in the buffer"):
        Manager.create(plain, 1, baseline=Min())
    with pytest.raises(ValueError, match="buffer is a Queue; expected a jaxbuf"):
        Manager.create(jaxbuf.Queue.create(jnp.float32(0), 4), 1)
    with pytest.raises(ValueError, match="num_workers is 0"):
        Manager.create(plain, 0)
    with pytest.raises(ValueError, match="scores returned a float; expected a dict of arrays"):
        Manager.create(plain, 1, scores=lambda *_: 0.0).receive(jnp.zeros(2))
    scored = Manager.create(jaxbuf.reward_prioritized(jnp.float32(0), 4), 1)
    with pytest.raises(ValueError, match=r"uses the score of items; pass score=\[B\]"):
        scored.receive(jnp.zeros(2))


def test_a_manager_that_only_scores():
    buffer = jaxbuf.reward_prioritized(jnp.float32(0), 4)
    manager = Manager.create(buffer, 2, baseline=Min(), store=False)
    score = jnp.arange(6.0)
    manager, scores = manager.receive(score, score=score, sender=1)
    assert int(manager.buffer.size) == 0
    assert float(scores["score"]) == np.inf
    assert float(manager.baseline_value()) == 0.0
    assert manager.counters.tolist() == [[0, 0], [1, 6]]


def test_a_batch_without_rows_changes_nothing():
    manager = _prioritized(1)
    items, score, mask = _train(jnp.int32(0), [jnp.asarray(x[0]) for x in _inputs(0)], True)
    manager, _ = manager.receive(items, score=score, mask=mask)
    after, _ = manager.receive(items, score=score, mask=jnp.zeros_like(mask))
    chex.assert_trees_all_equal(manager, after)


def _plainly(x):
    x = np.asarray(x)
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


def _run_case(name, communicators, rank, size):
    make, chosen = _CASES[name]
    agreement = "min" if size == 4 else None
    scored, slots = name != "plain", name == "updated"
    end = LockStep.create(communicators, make, filter=chosen, agreement=agreement, slots=slots)

    def step(carry, batch):
        end, count = carry
        items, score, mask = _train(count, batch, scored)
        end, reply = end.exchange(items, score=score, mask=mask)
        if slots:
            new, rows = _new_scores(score)
            end = end.update_score(reply.slots, new, mask=rows)
        return (end, count + reply.answered.astype(jnp.int32)), reply

    run = jax.jit(functools.partial(lax.scan, step), donate_argnums=0)
    inputs = jax.tree.map(jnp.asarray, _inputs(rank))
    (end, count), reply = run((end, jnp.int32(0)), inputs)
    leaves = (
        jax.tree.leaves(end.manager)
        if end.is_manager
        else [
            *jax.tree.leaves((end.filter, reply.scores)),
            *(reply.baseline, reply.answered, count),
        ]
    )
    return end, leaves


def _collectives(jaxpr):
    """Returns the names of the operations that communicate outside of branches."""
    names = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.endswith("_mpi"):
            names.append(equation.primitive.name)
        elif equation.primitive.name != "cond":
            for inner in jax.tree.leaves(equation.params):
                if isinstance(inner, Jaxpr | ClosedJaxpr):
                    names += _collectives(inner)
    return names


def _program(folder):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    communicators = make_communicators(_layout(size))
    end = None
    for name in _CASES_OF[size]:
        end, leaves = _run_case(name, communicators, rank, size)
        np.savez(Path(folder) / f"{name}-{rank}.npz", *map(_plainly, leaves))

    items, score, mask = _train(jnp.int32(0), [jnp.asarray(x[0]) for x in _inputs(rank)], True)
    jaxpr = jax.make_jaxpr(lambda x: end.exchange(x, score=score, mask=mask))(items).jaxpr
    try:
        end.exchange({**items, "state": jnp.zeros((_ROWS, _WIDTH + 1), jnp.int32)}, score=score)
    except ValueError as caught:
        error = str(caught)

    @jax.jit
    def agree(mine):
        return jnp.stack([combine(mine, world, by) for by in ("min", "mean", "max")])

    # First only the first rank has no baseline, then none of them has one; at last both zeros meet.
    numbers = (
        rank if rank else -jnp.inf,
        rank if rank else jnp.nan,
        -jnp.inf,
        0.0 if rank else -0.0,
    )
    combined = [agree(jnp.float32(number)) for number in numbers]
    out = {
        "combined": [numbers.tolist() for numbers in combined],
        "zeros": np.signbit(combined[-1]).tolist(),
        "outside of branches": sorted(_collectives(jaxpr)),
        "error": error,
    }
    print(json.dumps(out))


if __name__ == "__main__":
    _program(sys.argv[1])
