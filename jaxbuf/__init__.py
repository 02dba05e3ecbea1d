"""Replay memory for JAX: every buffer an immutable pytree, every operation a pure function.

Create a buffer from an example of an item, add batches, sample, and update priorities:

    >>> import jax, jax.numpy as jnp, jaxbuf
    >>> item = {"obs": jnp.zeros(4), "reward": jnp.float32(0)}
    >>> buffer = jaxbuf.ItemBuffer.create(item, capacity=1000, sampler=jaxbuf.Prioritized())
    >>> buffer = jaxbuf.add(buffer, {"obs": jnp.ones((64, 4)), "reward": jnp.ones(64)})
    >>> batch = jaxbuf.sample(buffer, jax.random.key(0), 32, beta=0.4)  # data, slots, weights, ...
    >>> buffer = jaxbuf.update_priority(buffer, batch.slots, jnp.abs(batch.data["reward"]))
    >>> int(buffer.size), batch.data["obs"].shape, batch.weights.shape
    (64, (32, 4), (32,))

These functions donate the buffer: continue with the result. Within your own ``jax.jit`` call the
methods, ``buffer.add(...)`` and ``buffer.sample(...)``, and donate the buffer there.

Windows of consecutive steps come from a ``TrajectoryBuffer``, items that are taken once from a
``Queue``, batches from several buffers from a ``Mixture``. ``Sharded`` is a buffer over several
devices, ``Hosted`` one in the memory of the host, ``Holder`` one for several threads, ``Store`` one
on disk. ``save`` and ``load`` keep a buffer, or a whole training state. ``jaxbuf.interop`` knows
environments and flashbax's calls, ``jaxbuf.testing`` has assertions, ``jaxbuf.mpi`` the exchange
between ranks.
"""

import dis
import importlib
import inspect
from typing import Any

from jaxbuf.accumulators.chunks import Chunk, ChunkAccumulator
from jaxbuf.accumulators.episodes import EpisodeAccumulator, PaddedEpisode
from jaxbuf.buffers.doors import (
    add,
    clear,
    dequeue,
    drop_newest_episode,
    end_episodes,
    highest,
    insert,
    latest,
    map_field,
    mark_used,
    next_batch,
    remove,
    sample,
    sample_range,
    set_field,
    set_hyperparameters,
    set_version,
    take,
    update_priority,
    update_score,
    with_sampler,
)
from jaxbuf.buffers.groups import Groups, sample_groups
from jaxbuf.buffers.item import ItemBuffer
from jaxbuf.buffers.presets import (
    diverse_reward_prioritized,
    reservoir,
    reward_prioritized,
    terminal_state_buffer,
)
from jaxbuf.buffers.queue import Queue
from jaxbuf.buffers.sample import Sample, Steps, StepsAround, importance_weights
from jaxbuf.buffers.trajectory import TrajectoryBuffer
from jaxbuf.core import exporting, guesses, native
from jaxbuf.core.exporting import export_checks, for_platform
from jaxbuf.core.hyperparameters import Varying
from jaxbuf.core.native import native_available
from jaxbuf.core.program import compiler_options
from jaxbuf.core.slots import Slots
from jaxbuf.io.checkpoint import load, save
from jaxbuf.io.conversion import convert_store
from jaxbuf.io.minari_dataset import from_minari, to_minari
from jaxbuf.io.store import Store, StoreBatch
from jaxbuf.monitoring.memory import MemoryReport, explain_memory
from jaxbuf.monitoring.monitor import (
    CsvWriter,
    Monitor,
    TensorBoardWriter,
    TerminalWriter,
    WandbWriter,
    Writer,
)
from jaxbuf.monitoring.plot import plot
from jaxbuf.monitoring.statistics import Statistics
from jaxbuf.pacing.rate_limiter import RateLimiter, ThroughputLimiter
from jaxbuf.strategies.balanced import Balanced
from jaxbuf.strategies.blend import Blend
from jaxbuf.strategies.diversity import Diversity
from jaxbuf.strategies.episodes import Episode, Episodes
from jaxbuf.strategies.evictors import Lowest, Oldest
from jaxbuf.strategies.freshness import Freshness
from jaxbuf.strategies.part import Removable
from jaxbuf.strategies.prioritized import Prioritized
from jaxbuf.strategies.rank_based import RankBased
from jaxbuf.strategies.recent import Recent
from jaxbuf.strategies.shuffled import Shuffled
from jaxbuf.strategies.softmax import Softmax
from jaxbuf.strategies.staleness import Staleness
from jaxbuf.strategies.uniform import Uniform
from jaxbuf.views.advantages import Advantages, gae, vtrace
from jaxbuf.views.frames import FrameStack, stack_frames
from jaxbuf.views.hindsight import hindsight
from jaxbuf.views.n_step import NStep, n_step
from jaxbuf.views.terminal import terminal_states
from jaxbuf.wrappers.feed import feed
from jaxbuf.wrappers.holder import Holder, Stopped
from jaxbuf.wrappers.hosted import Hosted
from jaxbuf.wrappers.mixture import Mixture
from jaxbuf.wrappers.sharded.sharded import Sharded

__version__ = "0.4.0"

__all__ = [
    "Advantages",
    "Balanced",
    "Blend",
    "Chunk",
    "ChunkAccumulator",
    "CsvWriter",
    "Diversity",
    "Episode",
    "EpisodeAccumulator",
    "Episodes",
    "FrameStack",
    "Freshness",
    "Groups",
    "Holder",
    "Hosted",
    "ItemBuffer",
    "Lowest",
    "MemoryReport",
    "Mixture",
    "Monitor",
    "NStep",
    "Oldest",
    "PaddedEpisode",
    "Prioritized",
    "Queue",
    "RankBased",
    "RateLimiter",
    "Recent",
    "Removable",
    "Sample",
    "Sharded",
    "Shuffled",
    "Slots",
    "Softmax",
    "Staleness",
    "Statistics",
    "Steps",
    "StepsAround",
    "Stopped",
    "Store",
    "StoreBatch",
    "TensorBoardWriter",
    "TerminalWriter",
    "ThroughputLimiter",
    "TrajectoryBuffer",
    "Uniform",
    "Varying",
    "WandbWriter",
    "Writer",
    "add",
    "clear",
    "compiler_options",
    "convert_store",
    "dequeue",
    "diverse_reward_prioritized",
    "drop_newest_episode",
    "end_episodes",
    "explain_memory",
    "export_checks",
    "feed",
    "for_platform",
    "from_minari",
    "gae",
    "highest",
    "hindsight",
    "importance_weights",
    "insert",
    "latest",
    "load",
    "map_field",
    "mark_used",
    "n_step",
    "native_available",
    "next_batch",
    "plot",
    "remove",
    "reservoir",
    "reward_prioritized",
    "sample",
    "sample_groups",
    "sample_range",
    "save",
    "set_field",
    "set_hyperparameters",
    "set_version",
    "stack_frames",
    "take",
    "terminal_state_buffer",
    "terminal_states",
    "to_minari",
    "update_priority",
    "update_score",
    "vtrace",
    "with_sampler",
]

native.register()
exporting.register_all()


def __getattr__(name: str) -> Any:
    # Imported only where they are used: most programs need none of them.
    if name in ("interop", "mpi", "testing"):
        return importlib.import_module(f"jaxbuf.{name}")
    text = f"module 'jaxbuf' has no attribute {name!r}"
    if name in guesses.ANSWERS:
        text += f"; {guesses.ANSWERS[name]}"
        frame = inspect.currentframe()
        caller = frame.f_back if frame else None
        # An import would leave out the text of an AttributeError.
        if caller and dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
            raise ImportError(text)
    raise AttributeError(text)


def __dir__() -> list[str]:
    return sorted(__all__)
