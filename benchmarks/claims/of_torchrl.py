"""torchrl: "Moving from another library"."""

import collections

import torch
from tensordict import TensorDict
from torchrl import data, envs
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from benchmarks.claims import claim, names_of


def filled(capacity=8, storage=None, kind=data.TensorDictReplayBuffer, batch_size=4, **options):
    """A buffer to which 8 items were added, the numbers from 0, of three episodes."""
    storage = LazyTensorStorage(capacity) if storage is None else storage
    buffer = kind(storage=storage, batch_size=batch_size, **options)
    numbers = torch.arange(12)
    episode = torch.tensor([0] * 2 + [1] * 6 + [2] * 4)
    rows = TensorDict({"i": numbers, "score": numbers.float(), "episode": episode}, [12])
    buffer.extend(rows[:capacity] if capacity > 3 else rows)
    return buffer


claim("SamplerWithoutReplacement: no repeats within a pass of two batches", list(range(8)))(
    lambda: (lambda b: sorted([*b.sample()["i"].tolist(), *b.sample()["i"].tolist()]))(
        filled(sampler=data.SamplerWithoutReplacement())
    )
)
claim("TensorDictMaxValueWriter keeps the items of highest value", [9, 10, 11])(
    lambda: sorted(
        filled(3, writer=data.TensorDictMaxValueWriter(rank_key="score"))[:]["i"].tolist()
    )
)
claim("ReplayBufferEnsemble draws a batch of 8 from two buffers", 8)(
    lambda: data.ReplayBufferEnsemble(filled(), filled(), batch_size=8).sample()["i"].numel()
)
claim("data on disk", list(range(8)))(lambda: filled(storage=LazyMemmapStorage(8))[:]["i"].tolist())
claim("has limits on use and age, and hindsight", 3)(
    lambda: len(names_of(data, "^(ConsumingSampler|StalenessAwareSampler|HERReplayBuffer)$"))
)
claim("has n-step returns and frame stacks", ["CatFrames", "MultiStepTransform"])(
    lambda: names_of(envs.transforms, "^(CatFrames|MultiStepTransform)$")
)


@claim("SliceSampler, lengths 2, 6 and 4, windows of 4: percent of each start", [17, 17, 17, 50])
def _():
    torch.manual_seed(0)
    sampler = data.SliceSampler(slice_len=4, traj_key="episode", strict_length=True)
    starts = filled(12, sampler=sampler, batch_size=400_000).sample()["i"][::4].tolist()
    return sorted(round(100 * n / len(starts)) for n in collections.Counter(starts).values())


@claim("a prioritized sample has importance weights", ["priority_weight"])
def _():
    import torchrl._torchrl  # noqa: F401 - its wheel fits one version of torch

    kind = data.TensorDictPrioritizedReplayBuffer
    batch = filled(kind=kind, alpha=1.0, beta=1.0).sample()
    return [name for name in batch.keys() if "weight" in name]  # noqa: SIM118
