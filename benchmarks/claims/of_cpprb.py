"""cpprb: "Moving from another library"."""

import tempfile
from pathlib import Path

import cpprb
import numpy as np

from benchmarks.claims import claim, names_of


def prioritized(n=8, **options):
    buffer = cpprb.PrioritizedReplayBuffer(n, {"a": {"dtype": int}}, alpha=1.0, **options)
    buffer.add(a=np.arange(n))
    return buffer


def of_a_new_item(**options):
    """The largest priority after an update of items that have been overwritten."""
    buffer = prioritized(4, **options)
    batch = buffer.sample(64)
    buffer.add(a=np.arange(4, 8))
    buffer.update_priorities(batch["indexes"], np.full(64, 50.0))
    return round(buffer.get_max_priority())


def bytes_on_disk(**options):
    with tempfile.TemporaryDirectory() as folder:
        item = {"obs": {"shape": (8, 8, 4)}}
        cpprb.ReplayBuffer(64, item, mmap_prefix=f"{folder}/rows", **options)
        return sum(path.stat().st_size for path in Path(folder).iterdir())


claim("a sample has importance weights", True)(lambda: "weights" in prioritized().sample(4))
claim("draws an item twice in a batch", True)(
    lambda: len(set(prioritized().sample(9)["a"].ravel().tolist())) < 9
)
claim("applies stale updates, and drops them with check_for_update=True", (50, 1))(
    lambda: (of_a_new_item(check_for_update=False), of_a_new_item(check_for_update=True))
)
claim("bytes of 64 stacks of 4 frames on disk: a quarter with stack_compress", (65536, 17152))(
    lambda: (bytes_on_disk(), bytes_on_disk(stack_compress="obs"))
)
claim("has no windows, mixture, queue, highest scores or limits on use", [])(
    lambda: names_of(cpprb, "trajector|sequence|slice|mix|ensemble|queue|highest|stale|reuse")
)


@claim("n-step: the tail of an episode has next observations of 1, and done 0", [1, 1, 0, 0])
def _():
    n_step = {"size": 3, "gamma": 0.5, "rew": "rew", "next": "next_obs"}
    step = {"obs": {}, "rew": {}, "next_obs": {}, "done": {}}
    buffer = cpprb.ReplayBuffer(16, step, Nstep=n_step)
    for t in range(4):
        buffer.add(obs=10 + t, rew=1, next_obs=11 + t, done=0)
    buffer.on_episode_end()
    rows = buffer.get_all_transitions()
    return [value for name in ("next_obs", "done") for value in rows[name][-2:].ravel().tolist()]
