"""DI-engine: "Coming from DI-engine", and its table in "Moving from another library"."""

import contextlib
import tempfile

from ding.data import DequeBuffer
from ding.data.buffer import middleware
from ding.worker.replay_buffer import AdvancedReplayBuffer

from benchmarks.claims import claim, raised


def filled(*uses, n=4, size=4, priorities=None, **options):
    """A buffer of the items 0, 1, ..., what it uses, and what `push` returned for each."""
    buffer = DequeBuffer(size=size)
    made = [getattr(middleware, name)(buffer, **options.get(name, {})) for name in uses]
    for each in made:
        buffer.use(each)
    metas = [{"priority": p} for p in priorities] if priorities else [None] * n
    return buffer, made, [buffer.push({"i": i}, meta=meta) for i, meta in enumerate(metas)]


START = {"start": -3}
PER, USE, RANGE = "PriorityExperienceReplay", "use_time_check", "sample_range_view"
claim("use_time_check beside PriorityExperienceReplay: the first sample raises", ["TypeError"] * 2)(
    lambda: [
        raised(lambda: filled(*uses, use_time_check={"max_use": 5})[0].sample(2))  # noqa: B023
        for uses in ((PER, USE), (USE, PER))
    ]
)
claim("one priority of 0 makes all weights 0", [0.0] * 64)(
    lambda: [each.meta["priority_IS"] for each in filled(PER, priorities=[0, 1])[0].sample(64)]
)
claim("sample_range_view counts from the capacity: of 4 items in 8 slots, none", "ValueError")(
    lambda: raised(lambda: filled(RANGE, size=8, sample_range_view=START)[0].sample(1))
)
claim("sample_range_view drops keywords: replace=True does not draw 5 of 3 items", "ValueError")(
    lambda: raised(lambda: filled(RANGE, sample_range_view=START)[0].sample(5, replace=True))
)


@claim("updates of items that left return False; after a delete, others too", [False, True, False])
def _():
    buffer, _, pushed = filled()
    buffer.push({"i": 4})
    stale = buffer.update(pushed[0].index, {"i": 7}, {})
    buffer.delete(pushed[1].index)
    return [stale, *(buffer.update(item.index, {"i": 7}, {}) for item in pushed[2:])]


@claim("after a delete, an update of an item pushed later, 9, changes another", [1, 7, 3, 9])
def _():
    buffer, _, pushed = filled()
    buffer.delete(pushed[0].index)
    buffer.update(buffer.push({"i": 9}).index, {"i": 7}, {})
    return [item.data["i"] for item in buffer.storage]


@claim("a new item gets the largest priority ever seen, here 500", 500)
def _():
    buffer, _, pushed = filled(PER)
    for priority in (500.0, 1.0):
        buffer.update(pushed[0].index, None, {**pushed[0].meta, "priority": priority})
    return round(buffer.push({"i": 9}).meta["priority"])


@claim("staleness_check keeps items whose staleness is exactly max_staleness", 4)
def _():
    buffer, _, _ = filled("staleness_check", n=0, staleness_check={"max_staleness": 10})
    for i in range(4):
        buffer.push({"i": i}, meta={"train_iter_data_collected": 0})
    buffer.sample(train_iter_sample_data=10, size=1)
    return buffer.count()


@claim(
    "AdvancedReplayBuffer, 8 slots, 12 pushed: sample_range=slice(-3, None) gives 5, 6 and 7",
    [5, 6, 7],
)
def _():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        config = AdvancedReplayBuffer.default_config()
        config.replay_buffer_size = 8
        buffer = AdvancedReplayBuffer(config, exp_name=".")
        for i in range(12):
            buffer.push({"i": i}, 0)
        batch = buffer.sample(3, 0, sample_range=slice(-3, None))
        buffer.close()
        return sorted({item["i"] for item in batch})
