"""torchgfn: "Coming from torchgfn", and the table in "Moving from another library"."""

import tempfile

import torch
from gfn.containers import ReplayBuffer
from gfn.containers.replay_buffer import NormBasedDiversePrioritizedReplayBuffer
from gfn.containers.states_container import StatesContainer
from gfn.gym import HyperGrid

from benchmarks.claims import claim, names_of, raised

GRID = HyperGrid(ndim=2, height=8)
BOTH = {"prioritized_capacity": True, "prioritized_sampling": True}


def items(rewards, states=None, conditions=None):
    """Terminal states with these log rewards, by default [0, 0], [1, 0], [2, 0], ..."""
    n = len(rewards)
    states = torch.tensor([[i, 0] for i in range(n)] if states is None else states)
    states = GRID.states_from_tensor(
        states, None if conditions is None else torch.tensor(conditions)
    )
    return StatesContainer(GRID, states, torch.ones(n, dtype=torch.bool), torch.tensor(rewards))


def filled(rewards, capacity=4, **options):
    buffer = ReplayBuffer(GRID, capacity, **options)
    buffer.add(items(rewards))
    return buffer


def rewards(container):
    return sorted(container.log_rewards.tolist())


claim("has no weights and no updates", [])(lambda: names_of(ReplayBuffer, "weight|update"))
claim("keeps the highest rewards with prioritized_capacity=True", [2, 3])(
    lambda: rewards(filled([3.0, 2.0, 1.0, 0.0], 2, **BOTH).training_container)
)
claim("5 of 2 items are 5 by priority, and otherwise 2, without replacement", [5, 2])(
    lambda: [len(filled([0.0, 1.0], prioritized_sampling=p).sample(5)) for p in (True, False)]
)
claim("draws by the softmax of log rewards: of 0 and 1, 1 with e / (e + 1), 0.73", 0.73)(
    lambda: round(filled([0.0, 1.0], **BOTH).sample(10**6).log_rewards.mean().item(), 2)
)
claim("the softmax underflows: of 0, -200 and -300, a batch of 2 has 0 and -300", [-300, 0])(
    lambda: rewards(filled([-300.0, -200.0, 0.0], **BOTH).sample(2))
)


@claim("a reward of NaN stays whatever comes, and each prioritized sample raises", "RuntimeError")
def _():
    buffer = filled([float("nan")], 2, **BOTH)
    buffer.add(items([1.0, 2.0, 3.0, 4.0]))
    assert buffer.training_container.log_rewards.isnan().any()
    return raised(lambda: buffer.sample(1))


@claim("load into a new buffer loads nothing, into a filled one 3 items", [0, 3])
def _():
    new, old = ReplayBuffer(GRID, 4), filled([5.0])
    with tempfile.TemporaryDirectory() as folder:
        filled([0.0, 1.0, 2.0]).save(f"{folder}/buffer.pt")
        for buffer in (new, old):
            buffer.load(f"{folder}/buffer.pt")
    return [len(new), len(old)]


@claim("diversity: items fill the buffer, later ones differ in state or condition", [9, 9, 5])
def _():
    buffer = NormBasedDiversePrioritizedReplayBuffer(GRID, 3, cutoff_distance=0.0)
    buffer.add(items([1.0, 9.0, 9.0], [[1, 1], [1, 1], [1, 1]], [[0.0], [0.0], [0.0]]))
    buffer.add(items([7.0], [[1, 1]], [[0.0]]))
    buffer.add(items([5.0], [[1, 1]], [[1.0]]))
    return rewards(buffer.training_container)[::-1]
