"""Stable-Baselines3: "Coming from Stable-Baselines3 and CleanRL"."""

import numpy as np
from gymnasium import spaces
from stable_baselines3.common import buffers

from benchmarks.claims import claim, names_of, raised


def filled(n=4, **options):
    """A buffer of 8 slots with n rows, which end at a time limit."""
    box = spaces.Box(-1, 1, (2,))
    buffer = buffers.ReplayBuffer(8, box, spaces.Discrete(2), "cpu", **options)
    for _ in range(n):
        row = np.zeros(2, np.float32), np.ones(2, np.float32), np.zeros(1, int), np.ones(1)
        buffer.add(*row, np.ones(1), [{"TimeLimit.truncated": True}])
    return buffer


claim("keeps five fields", "actions dones next_observations observations rewards")(
    lambda: " ".join(sorted(k for k, v in filled().sample(2)._asdict().items() if v is not None))
)
claim("dones are 0 at a time limit that infos name", 0.0)(lambda: filled().sample(1).dones.item())
claim("optimize_memory_usage beside handle_timeout_termination raises", "ValueError")(
    lambda: raised(lambda: filled(optimize_memory_usage=True))
)
claim("a size of 8 with n_envs=4 is 2 rows of each", 2)(lambda: filled(0, n_envs=4).buffer_size)
claim("has no prioritized replay", [])(lambda: names_of(buffers, "priorit"))
