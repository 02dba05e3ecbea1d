"""Every public function with the arguments it takes, and values of every kind to give it instead.

``CALLS`` names the calls; each of its arguments has a legal value and a kind. ``HOSTILE`` names the
values, and ``KINDS`` tells which of them are legal for an argument of a kind, or may be, and what
a refusal of the others says.
"""

import dataclasses
import functools
import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf
import jaxbuf.interop.flashbax as fbx
from jaxbuf.interop import rollout

ROWS = 4


def step():
    return {
        "obs": jnp.zeros(2),
        "reward": jnp.float32(0),
        "terminated": jnp.bool_(False),
        "group": jnp.int32(0),
    }


def rows(*leading):
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), step())


@dataclasses.dataclass
class Things:
    """Buffers and what else calls are made with; made once, since no call may change them."""

    item: Any
    scored: Any
    plain: Any
    annealed: Any
    trajectory: Any
    queue: Any
    mixture: Any
    statistics: Any
    episodes: Any
    chunks: Any
    batch: Any
    windows: Any
    groups: Any
    offline: Any

    @classmethod
    def make(cls):
        fresh = jaxbuf.Freshness(max_use=4, max_staleness=8)
        item = jaxbuf.ItemBuffer.create(step(), 8, sampler=jaxbuf.Prioritized(), freshness=fresh)
        scored = jaxbuf.reward_prioritized(step(), 8, temperature=1.0)
        plain = jaxbuf.ItemBuffer.create(step(), 8)
        trajectory = jaxbuf.TrajectoryBuffer.create(
            step(),
            ROWS,
            8,
            sequence_length=2,
            sampler=jaxbuf.Prioritized(),
            episodes=jaxbuf.Episodes(boundary="mask", record_return=True),
            freshness=fresh,
        )
        parts = [jaxbuf.ItemBuffer.create(step(), 8, sampler=jaxbuf.Prioritized()), plain.clear()]
        annealed = jaxbuf.Prioritized(uniform_mix=jaxbuf.Varying(1.0))
        zeros = jnp.zeros((ROWS,), jnp.int32)
        slots = jaxbuf.Slots(index=zeros, generation=zeros.astype(jnp.uint32))
        probability, valid = jnp.ones((ROWS,)), jnp.ones((ROWS,), bool)
        return cls(
            item=item,
            scored=scored,
            plain=plain,
            annealed=jaxbuf.ItemBuffer.create(step(), 8, sampler=annealed),
            trajectory=trajectory,
            queue=jaxbuf.Queue.create(step(), 8),
            mixture=jaxbuf.Mixture.create(parts, [1, 1]),
            statistics=jaxbuf.Statistics.create(item, 4),
            episodes=jaxbuf.EpisodeAccumulator.create(step(), ROWS, 4),
            chunks=jaxbuf.ChunkAccumulator.create(step(), 2, 2, freshness=fresh),
            batch=jaxbuf.Sample(rows(ROWS), slots, probability, valid),
            windows=rows(ROWS, 3),
            groups=jaxbuf.ItemBuffer.create(step(), 8),
            offline=jaxbuf.ItemBuffer.create({"obs": jnp.zeros(2), "reward": jnp.float32(0)}, 8),
        )


THINGS = Things.make()
KEY = jax.random.key(0)

HOSTILE: dict[str, Any] = {
    "none": None,
    "string": "x",
    "bytes": b"x",
    "list": [1, 2],
    "dict": {"a": 1},
    "tuple": (1, "x"),
    "object": object(),
    "class": int,
    "strategy class": jaxbuf.Uniform,
    "function": lambda *_: None,
    "module": jaxbuf,
    "key": KEY,
    "shape": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
    "nan": float("nan"),
    "inf": float("inf"),
    "minus inf": -float("inf"),
    "negative": -1,
    "minus half": -0.5,
    "zero": 0,
    "half": 0.5,
    "five halves": 2.5,
    "huge": 2**62,
    "giant": 2**2000,
    "true": True,
    "complex": 1j,
    "scalar": jnp.float32(0.5),
    "integers": np.arange(3),
    "grid": jnp.zeros((2, 2)),
    "bools": jnp.ones(3, bool),
    "objects": np.array([object()] * ROWS),
    "strings": np.array(["a"] * ROWS),
    "keys": jax.random.split(KEY, ROWS),
    "queue": THINGS.queue,
    "slots": THINGS.batch.slots,
    "bad slots": jaxbuf.Slots(index=jnp.zeros(3), generation="x"),  # pyright: ignore
    "sample": THINGS.batch,
    "sampler": jaxbuf.Uniform(),
    "evictor": jaxbuf.Oldest(),
    "filter": jaxbuf.Diversity(),
    "freshness": jaxbuf.Freshness(max_use=1),
    "episodes": jaxbuf.Episodes(),
}

ARRAYS = {"integers", "grid", "bools", "keys"}
REAL = {"zero", "half", "scalar"}
LARGE = {"five halves", "huge"}
EXAMPLE = (
    REAL
    | LARGE
    | ARRAYS
    | {"list", "dict", "key", "shape", "nan", "inf", "minus inf", "negative", "minus half", "true"}
    | {"complex", "queue", "slots", "sample", "giant"}
)
NUMBERS = "expected an array of numbers"
COUNT = "expected an integer of at (least 1|most 2)|^give "
COUNT_0 = "expected an integer of at (least 0|most (2|9))|expected from 0 to that"
PROGRAM = "is traced, but a sampler is part of the program"
FRACTION = rf"expected a (fraction|factor|number) (in \[0, 1\]|from 0 .* to 1)|{PROGRAM}"
AT_LEAST_0 = f"expected a finite number of at least 0|{PROGRAM}"
ABOVE_0 = f"expected a (positive number|finite number above 0)|{PROGRAM}"
INTEGER = rf"{NUMBERS}|expected (int32|an integer from -2|\(\), which is (a number|one integer))"
WAITED = f"{INTEGER}|expected an array$|expected an integer of at most 2"
ADDED = r"expected a dict with 'group', 'obs', 'reward', 'terminated'|'obs'\] is missing"
BUFFER = "expected a buffer, such as one of jaxbuf.ItemBuffer.create"
KEYS = r"expected one key, such as jax.random.key\(0\) or one of the keys that"
NAME = "expected the name of a field, a string"
THERE = f"{NAME}|has no such field|have no such field"
PATH = "expected a path, a str or an os.PathLike"
COMPARED = "expected a field such as 'obs.position', a function of one item, or a tuple of these"
DISTANCE = r"expected a distance: 0, or from 2\*\*-40 to 2\*\*40|expected at least 0"
EXAMPLES = f"{NUMBERS}|pass one unbatched item, a pytree of arrays"
# Nothing more than this where what is wrong with a value differs.
ANY = r"expected|choose|give|pass|leave|create|there are|than the example|has no|it has"
# Which values are legal for an argument of a kind, or may be in some places, and what a refusal of
# the others says.
KINDS: dict[str, tuple[set[str], str]] = {
    "nothing": (set(), ANY),
    "flag": ({"true"}, "expected True or False"),
    "groups": ({"integers", "list"}, f"{COUNT}|{NUMBERS}|expected (integers|an array)$"),
    "count": (set(), COUNT),
    "count or none": ({"none"}, COUNT),
    "count from 0": ({"zero"}, f"{COUNT_0}|expected the number of one of the 2 parts"),
    "count on the host": ({"huge"}, "expected an integer of at (least 1|most 9)"),
    "count on the host or none": ({"huge", "none"}, "expected an integer of at (least 1|most 9)"),
    "count on the host from 0": ({"zero", "huge"}, COUNT_0),
    "integer": (
        {"zero", "negative", "true"},
        f"{INTEGER}|axis is .*expected an integer from -2 to 1, for a stack of frames",
    ),
    "integer or none": ({"zero", "negative", "true", "none"}, INTEGER),
    "wanted": ({"zero", "negative", "true"}, WAITED),
    "fraction": (
        REAL,
        rf"{FRACTION}|expected (finite numbers of at least 0|\(\), which is|float32|an array)",
    ),
    "above 0 to 1": ({"half", "scalar"}, "expected a number above 0 and at most 1"),
    "norm 1 or 2": ({"inf", "giant"}, "expected a norm: 1, 2 or inf"),
    "score": (
        REAL | LARGE | {"negative", "minus half", "inf", "minus inf", "giant"},
        "expected a score",
    ),
    "distance from 0": (REAL | LARGE, DISTANCE),
    "time": (
        REAL | LARGE | {"negative", "minus half", "inf", "minus inf", "giant", "none"},
        "expected seconds, or None",
    ),
    "count, also true": (
        {"zero", "true"},
        rf"{NUMBERS}|expected (one integer|an integer( from 0 to 2\*\*31 - 1)?)$",
    ),
    "window": ({"episodes"}, "the (window|batch) has no such field"),
    "trajectories": ({"keys", "slots", "sample"}, ANY),
    "metrics": (
        REAL
        | LARGE
        | {"negative", "minus half", "nan", "inf", "minus inf", "true", "none", "list", "dict"}
        | {"integers", "grid", "bools", "queue", "slots", "sample"},
        f"{NUMBERS}|expected (numbers|an array)",
    ),
    "step": ({"zero", "negative", "true", "huge", "giant"}, "expected (an integer|one number)"),
    "step or none": (
        {"zero", "negative", "true", "huge", "giant", "none"},
        "expected None or the number of a step",
    ),
    "size in bytes": ({"zero", "huge"}, COUNT_0),
    "norm": (
        REAL | LARGE | {"inf", "giant"},
        "expected a norm: 1, 2, inf, any number of at least 0.01, or 0",
    ),
    "distance": (REAL | LARGE | {"negative", "minus half", "minus inf"}, DISTANCE),
    "at least 0": (REAL | LARGE, AT_LEAST_0),
    "above 0": ((REAL | LARGE) - {"zero"}, ABOVE_0),
    "at least 1": (LARGE, "expected a number of at least 1"),
    "any number": (
        REAL | LARGE | {"negative", "minus half", "inf", "minus inf", "giant"},
        "expected (a number|one of at least 2)",
    ),
    "temperature": ((REAL | LARGE | {"none"}) - {"zero"}, ABOVE_0),
    "seconds": (
        (REAL | LARGE | {"none", "giant", "inf"}) - {"zero"},
        "expected (None or seconds, more than 0|a number above 0)",
    ),
    "traced number": (
        REAL | LARGE | {"negative", "minus half", "nan", "inf", "minus inf", "true"},
        rf"{NUMBERS}|expected (\(\), which is (one|a) num|float32|an? (array|number of at most))",
    ),
    "beta": (
        REAL | LARGE | {"negative", "minus half"},
        rf"{NUMBERS}|expected (a finite number|\(\), which is one number|float32)",
    ),
    "pair": ({"list"}, "expected bounds with 0 <= least <= largest"),
    "pair or none": ({"none", "list"}, r"expected two numbers, \(low, high\)"),
    "rows or none": ({"none"}, ANY),
    "rows": (set(), r"expected|^give lengths=\[B\] or mask|; pass score=\[B\] to add"),
    "rows of any number": ({"integers", "bools"}, ANY),
    "key": ({"key"}, KEYS),
    "key or none": ({"key", "none"}, KEYS),
    "example": (EXAMPLE, EXAMPLES),
    "items": (set(), f"{ADDED}|{NUMBERS}"),
    "buffer": (
        set(),
        f"{BUFFER}|has no method|create|expected (an? (jaxbuf.)?ItemBuffer|a list of|one ratio)",
    ),
    "buffer to add to": ({"queue"}, BUFFER),
    "queue": ({"queue"}, "expected an ItemBuffer, TrajectoryBuffer( or|,) Queue"),
    "slots": ({"slots"}, "expected the slots of a sample: batch.slots"),
    "sample": ({"sample"}, "expected the whole sample, not its data or slots"),
    "sampler": ({"sampler"}, r"expected a sampler such as Uniform\(replacement=True\)"),
    "known sampler": ({"sampler"}, r"choose jaxbuf.Uniform\(...\) or jaxbuf.Prioritized\(...\)"),
    "evictor": ({"evictor"}, r"expected an evictor such as Oldest\(\)"),
    "filter": ({"none", "filter"}, r"expected None or jaxbuf.Diversity\(cutoff, ...\)"),
    "freshness": ({"none", "freshness"}, r"expected None or jaxbuf.Freshness\(max_use, ...\)"),
    "episodes": ({"none", "episodes"}, r"expected None or jaxbuf.Episodes\(...\)"),
    "field": ({"string"}, NAME),
    "field or none": ({"string", "none"}, NAME),
    "field there": (set(), THERE),
    "field there or none": ({"none"}, THERE),
    "what is compared": ({"none", "string", "class", "strategy class", "function"}, COMPARED),
    "choice": (set(), r"choose from \("),
    "choice or none": ({"none"}, 'choose "batch", "buffer", "mean" or None'),
    "folder": ({"string"}, PATH),
    "example on disk": (EXAMPLE | {"giant"}, EXAMPLES),
    "start or none": ({"none", "zero"}, COUNT_0),
    "steps or none": ({"none", "zero", "huge"}, COUNT_0),
    "what waits": ({"queue"}, ADDED),
    "anything": (set(HOSTILE), ""),
    "weights": ({"dict"}, "expected a dict of weights by name"),
    "just functions": ({"function"}, "expected a function that scores a batch, or a StatefulScore"),
    "function": ({"class", "strategy class", "function"}, "expected a function"),
    "function that is called": ({"class", "strategy class", "function"}, "expected a function"),
    "episodes of a dataset": (set(), "expected (what minari.load_dataset returns|episodes with)"),
    "environments": ({"none", "integers", "list"}, ANY),
    "steps": (
        {"zero", "negative", "integers", "slots", "bad slots"},
        f"{NUMBERS}|expected (integers|an integer from)|give env_ids and positions, or slots",
    ),
    "row numbers": (
        {"zero", "negative", "huge", "giant", "list", "integers"},
        r"expected integers, a mask or a slice of all rows|expected \(4,\), one for each row of",
    ),
    "pytree": (set(HOSTILE), ""),
}


@dataclasses.dataclass
class Call:
    """A function, and for each of its arguments a legal value and what is legal there.

    ``host`` says that it cannot be traced, and ``consumes`` that it donates what it is given.
    """

    function: Callable[..., Any]
    arguments: dict[str, tuple[Any, str]]
    host: bool = False
    consumes: bool = False


def call(function, host=False, consumes=False, **arguments):
    return Call(function, arguments, host, consumes)


def of(name, method, **arguments):
    """A method of one of the things."""
    return call(lambda **options: getattr(getattr(THINGS, name), method)(**options), **arguments)


ZEROS = jnp.zeros((ROWS,))
MASK = jnp.ones((ROWS,), bool)
COUNTS = jnp.zeros((ROWS,), jnp.int32)
SLOTS = (THINGS.batch.slots, "slots")
ENVS = {"where": (COUNTS, "steps"), "positions": (COUNTS, "steps")}
SAMPLING = {"key": (KEY, "key"), "batch_size": (2, "count")}
RANGE = {
    **SAMPLING,
    "start": (-2, "integer or none"),
    "stop": (None, "integer or none"),
    "by_priority": (False, "flag"),
    "replacement": (False, "flag"),
}
UPDATE = {"slots": SLOTS, "priority": (ZEROS, "rows"), "mask": (MASK, "rows or none")}
VERSION = {"version": (COUNTS, "rows or none"), "session": (COUNTS, "rows or none")}
FLAGS = {"terminated": ("terminated", "field there"), "truncated": (None, "field there or none")}
FBX_WINDOWS = {
    "add_batch_size": (2, "count"),
    "sample_batch_size": (2, "count"),
    "sample_sequence_length": (2, "count"),
    "period": (1, "count"),
    "min_length_time_axis": (2, "count from 0"),
    "max_length_time_axis": (8, "count"),
}
FBX_ITEMS = {
    "max_length": (8, "count"),
    "min_length": (2, "count from 0"),
    "sample_batch_size": (2, "count"),
    "add_sequences": (True, "flag"),
}
FBX_PAIRS = {"add_batch_size": (None, "count or none")}
FBX_EXPONENT = {"priority_exponent": (0.5, "fraction")}


def achieved(row, step):
    return jnp.zeros((ROWS, 2))


def goals(first, second):
    return jnp.zeros((ROWS,))


BATCH = {"achieved_goal": jnp.zeros((ROWS, 2)), "goal": jnp.zeros((ROWS, 2)), "reward": ZEROS}


FOLDER = tempfile.TemporaryDirectory()


def folder():
    return tempfile.mkdtemp(dir=FOLDER.name)


def saved():
    path = folder()
    jaxbuf.save(path, THINGS.plain)
    return path


@functools.cache
def store():
    opened = jaxbuf.Store(folder(), step())
    opened.append(rows(ROWS))
    return opened


def on_store(method, **arguments):
    return call(lambda **options: getattr(store(), method)(**options), host=True, **arguments)


@functools.cache
def holder(name):
    full = getattr(THINGS, name).clear().add(rows(ROWS))
    return jaxbuf.Holder(full)


def on_holder(name, method, **arguments):
    return call(lambda **options: getattr(holder(name), method)(**options), host=True, **arguments)


CALLS: dict[str, Call] = {
    # Functions.
    "add": call(
        jaxbuf.add,
        buffer=(THINGS.item, "buffer to add to"),
        items=(rows(ROWS), "items"),
        donate=(False, "flag"),
        priority=(ZEROS, "rows or none"),
    ),
    "add donated": call(
        jaxbuf.add,
        buffer=(THINGS.plain, "buffer to add to"),
        items=(rows(ROWS), "items"),
        mask=(MASK, "rows or none"),
        consumes=True,
    ),
    "sample": call(jaxbuf.sample, buffer=(THINGS.item, "buffer"), **SAMPLING),
    "sample windows": call(
        jaxbuf.sample,
        buffer=(THINGS.trajectory, "buffer"),
        **SAMPLING,
        sequence_length=(2, "count or none"),
    ),
    "update_priority": call(
        jaxbuf.update_priority,
        buffer=(THINGS.item, "buffer"),
        slots=SLOTS,
        priority=(ZEROS, "rows"),
        donate=(False, "flag"),
    ),
    "importance_weights": call(
        jaxbuf.importance_weights,
        buffer=(THINGS.item, "buffer"),
        sample=(THINGS.batch, "sample"),
        beta=(0.4, "beta"),
        normalize=("buffer", "choice or none"),
    ),
    "sample_groups": call(
        jaxbuf.sample_groups,
        buffer=(THINGS.groups, "buffer"),
        key=(KEY, "key"),
        groups=(2, "groups"),
        num_groups=(4, "count"),
        size=(2, "count"),
        group=("group", "field there"),
        order=("age", "choice"),
        padding=("none", "choice"),
        replacement=(False, "flag"),
    ),
    "n_step": call(
        jaxbuf.n_step,
        window=(THINGS.windows, "window"),
        n=(1, "count"),
        discount=(0.9, "traced number"),
        reward=("reward", "field there"),
        **FLAGS,
    ),
    "gae": call(
        jaxbuf.gae,
        window=(THINGS.windows, "window"),
        value=(THINGS.windows["reward"], "rows"),
        discount=(0.9, "traced number"),
        lambda_=(0.9, "traced number"),
        reward=("reward", "field there"),
        **FLAGS,
    ),
    "vtrace": call(
        jaxbuf.vtrace,
        window=(THINGS.windows, "window"),
        value=(THINGS.windows["reward"], "rows"),
        log_ratio=(THINGS.windows["reward"], "rows"),
        discount=(0.9, "traced number"),
        next_value=(None, "rows or none"),
        rho_clip=(1.0, "traced number"),
        **FLAGS,
    ),
    "stack_frames": call(
        jaxbuf.stack_frames,
        window=(THINGS.windows, "window"),
        n=(2, "count"),
        field=("obs", "field there"),
        **FLAGS,
        last=(None, "field there or none"),
        first=(MASK, "rows or none"),
        axis=(-1, "integer"),
    ),
    "hindsight": call(
        jaxbuf.hindsight,
        key=(KEY, "key"),
        batch=(BATCH, "window"),
        achieved_goals=(jnp.zeros((ROWS, 3, 2)), "nothing"),
        t=(COUNTS, "rows"),
        length=(COUNTS + 3, "rows or none"),
        reward_fn=(goals, "function"),
        strategy=("future", "choice"),
        fraction=(0.8, "fraction"),
        achieved=("achieved_goal", "field there"),
        goal=("goal", "field there"),
        reward=("reward", "field there"),
    ),
    "terminal_states": call(
        lambda **options: jaxbuf.terminal_states(**options),
        trajectories=(THINGS.windows, "trajectories"),
        lengths=(COUNTS, "rows"),
    ),
    "terminal_states with a mask": call(
        lambda **options: jaxbuf.terminal_states(**options),
        trajectories=(THINGS.windows, "trajectories"),
        mask=(jnp.ones((ROWS, 3), bool), "rows"),
    ),
    "plot": call(jaxbuf.plot, buffer=(THINGS.plain, "queue"), host=True),
    # Buffers.
    "ItemBuffer.create": call(
        jaxbuf.ItemBuffer.create,
        example=(step(), "example"),
        capacity=(8, "count"),
        sampler=(jaxbuf.Uniform(), "sampler"),
        evictor=(jaxbuf.Oldest(), "evictor"),
        freshness=(None, "freshness"),
        diversity=(None, "filter"),
    ),
    "TrajectoryBuffer.create": call(
        jaxbuf.TrajectoryBuffer.create,
        example=(step(), "example"),
        num_envs=(2, "count"),
        length=(8, "count"),
        sequence_length=(2, "count"),
        period=(1, "count"),
        num_earliest_ignored=(0, "count from 0"),
        sampler=(jaxbuf.Uniform(), "sampler"),
        episodes=(None, "episodes"),
        freshness=(None, "freshness"),
    ),
    "Queue.create": call(jaxbuf.Queue.create, example=(step(), "example"), capacity=(8, "count")),
    "Mixture.create": call(
        jaxbuf.Mixture.create, buffers=([THINGS.plain], "buffer"), ratios=([1], "nothing")
    ),
    "EpisodeAccumulator.create": call(
        jaxbuf.EpisodeAccumulator.create,
        num_envs=(2, "count"),
        max_length=(4, "count"),
        per_add=(None, "count or none"),
        waiting=(None, "count or none"),
        example=(step(), "nothing"),
        **FLAGS,
    ),
    "ChunkAccumulator.create": call(
        jaxbuf.ChunkAccumulator.create,
        example=(step(), "example"),
        num_workers=(2, "count"),
        fragments_per_chunk=(2, "count"),
        per_add=(None, "count or none"),
        waiting=(None, "count or none"),
        freshness=(None, "freshness"),
    ),
    "Statistics.create": call(
        jaxbuf.Statistics.create, buffer=(THINGS.plain, "queue"), window=(4, "count")
    ),
    "reward_prioritized": call(
        jaxbuf.reward_prioritized,
        example=(step(), "example"),
        capacity=(8, "count"),
        temperature=(1.0, "temperature"),
        fallback=(False, "flag"),
    ),
    "diverse_reward_prioritized": call(
        jaxbuf.diverse_reward_prioritized,
        example=(step(), "example"),
        capacity=(8, "count"),
        cutoff=(0.0, "distance"),
        p=(1.0, "norm"),
        field=("obs", "what is compared"),
        temperature=(1.0, "temperature"),
        fallback=(False, "flag"),
        active=("always", "choice"),
    ),
    "terminal_state_buffer": call(
        jaxbuf.terminal_state_buffer, example=(step(), "example"), capacity=(8, "count")
    ),
    "reservoir": call(
        jaxbuf.reservoir,
        example=(step(), "example"),
        capacity=(8, "count"),
        key=(KEY, "key or none"),
        sampler=(jaxbuf.Uniform(), "sampler"),
    ),
    # Strategies.
    "Uniform": call(jaxbuf.Uniform, replacement=(True, "flag")),
    "Balanced": call(jaxbuf.Balanced, replacement=(True, "flag")),
    "Shuffled": call(jaxbuf.Shuffled, drop_last=(True, "flag")),
    "Prioritized": call(
        jaxbuf.Prioritized,
        alpha=(0.6, "at least 0"),
        initial_priority=(1.0, "at least 0"),
        epsilon=(0.0, "at least 0"),
        uniform_mix=(0.0, "fraction"),
        stratified=(True, "flag"),
        replacement=(True, "flag"),
    ),
    "Softmax": call(
        jaxbuf.Softmax,
        temperature=(1.0, "above 0"),
        replacement=(False, "flag"),
        fallback=(False, "flag"),
    ),
    "RankBased": call(
        jaxbuf.RankBased,
        alpha=(0.7, "at least 0"),
        by=("priority", "choice"),
        sort_every=(1, "count"),
        stratified=(True, "flag"),
        replacement=(True, "flag"),
    ),
    "Staleness": call(
        jaxbuf.Staleness,
        alpha=(1.0, "at least 0"),
        stratified=(True, "flag"),
        replacement=(True, "flag"),
    ),
    "Blend": call(jaxbuf.Blend, samplers=([jaxbuf.Uniform()], "nothing"), weights=([1], "nothing")),
    "Recent": call(
        jaxbuf.Recent,
        ratio=(0.5, "fraction"),
        steps=(4, "count"),
        base=(jaxbuf.Uniform(), "known sampler"),
    ),
    "Diversity": call(
        jaxbuf.Diversity,
        cutoff=(0.0, "distance"),
        p=(1.0, "norm"),
        field=("obs", "what is compared"),
        within_batch=("greedy", "choice"),
        active=("full", "choice"),
    ),
    "Freshness": call(
        jaxbuf.Freshness,
        max_use=(1, "count or none"),
        max_staleness=(1, "count or none"),
        comparison=(">=", "choice"),
    ),
    "Episodes": call(
        jaxbuf.Episodes,
        terminated=("terminated", "field"),
        truncated=(None, "field or none"),
        last=(None, "field or none"),
        reward=("reward", "field"),
        boundary=("mask", "choice"),
        record_return=(True, "flag"),
        discount=(0.9, "fraction"),
        default_return=(0.0, "any number"),
        reward_clip=(None, "pair or none"),
        recurrence=("plain", "choice"),
    ),
    "RateLimiter.create": call(
        jaxbuf.RateLimiter.create,
        samples_per_insert=(1.0, "above 0"),
        min_size=(1, "count"),
        tolerance=(10.0, "any number"),
    ),
    "ThroughputLimiter.create": call(
        jaxbuf.ThroughputLimiter.create,
        samples_per_insert=((0.5, 2.0), "pair"),
        window=(30.0, "above 0"),
        min_batches=(1.0, "at least 1"),
    ),
    # The layer for programs written for flashbax.
    "make_trajectory_buffer": call(fbx.make_trajectory_buffer, **FBX_WINDOWS),
    "make_prioritised_trajectory_buffer": call(
        fbx.make_prioritised_trajectory_buffer, **FBX_WINDOWS, **FBX_EXPONENT
    ),
    "make_flat_buffer": call(fbx.make_flat_buffer, **FBX_ITEMS, **FBX_PAIRS),
    "make_prioritised_flat_buffer": call(
        fbx.make_prioritised_flat_buffer, **FBX_ITEMS, **FBX_PAIRS, **FBX_EXPONENT
    ),
    "make_item_buffer": call(fbx.make_item_buffer, **FBX_ITEMS, add_batches=(True, "flag")),
    "make_prioritised_item_buffer": call(
        fbx.make_prioritised_item_buffer,
        **FBX_ITEMS,
        **FBX_EXPONENT,
        add_batches=(True, "flag"),
    ),
    "make_trajectory_queue": call(
        fbx.make_trajectory_queue,
        max_length_time_axis=(8, "count"),
        add_batch_size=(2, "count"),
        add_sequence_length=(2, "count"),
        sample_sequence_length=(2, "count"),
    ),
    # Environments and their datasets.
    "rollout": call(
        rollout,
        step=(lambda carry, key: (carry, {"obs": carry}), "function that is called"),
        carry=(ZEROS, "pytree"),
        key=(KEY, "key"),
        num_steps=(3, "count"),
    ),
    "from_minari": call(
        jaxbuf.from_minari,
        host=True,
        dataset=([], "episodes of a dataset"),
        buffer=(THINGS.offline, "buffer to add to"),
        rows_at_a_time=(4, "count"),
    ),
    # Methods.
    "ItemBuffer.add": of(
        "item",
        "add",
        items=(rows(ROWS), "items"),
        priority=(ZEROS, "rows or none"),
        mask=(MASK, "rows or none"),
        **VERSION,
    ),
    "ItemBuffer.add scored": of(
        "scored", "add", items=(rows(ROWS), "items"), score=(ZEROS, "rows")
    ),
    "ItemBuffer.next_batch": of("item", "next_batch", **SAMPLING),
    "ItemBuffer.sample": of("item", "sample", **SAMPLING),
    "ItemBuffer.sample_range": of("plain", "sample_range", **RANGE),
    "ItemBuffer.latest": of("plain", "latest", n=(2, "count")),
    "ItemBuffer.can_sample": of("item", "can_sample", batch_size=(1, "wanted")),
    "ItemBuffer.update_priority": of("item", "update_priority", **UPDATE),
    "ItemBuffer.mark_used": of("item", "mark_used", slots=SLOTS, mask=(MASK, "rows or none")),
    "ItemBuffer.set_version": of(
        "item", "set_version", version=(1, "integer"), session=(0, "integer or none")
    ),
    "ItemBuffer.set_hyperparameters": of(
        "annealed", "set_hyperparameters", uniform_mix=(0.5, "fraction")
    ),
    "ItemBuffer.with_sampler": of("item", "with_sampler", sampler=(jaxbuf.Uniform(), "sampler")),
    "ItemBuffer.use_count": of("item", "use_count", slots=SLOTS),
    "ItemBuffer.staleness": of("item", "staleness", slots=SLOTS),
    "TrajectoryBuffer.add": of(
        "trajectory",
        "add",
        steps=(rows(ROWS), "items"),
        priority=(ZEROS, "rows or none"),
        mask=(MASK, "rows or none"),
        env_ids=(np.arange(ROWS), "environments"),
        **VERSION,
    ),
    "TrajectoryBuffer.add rollouts": of(
        "trajectory",
        "add",
        steps=(rows(ROWS, 3), "items"),
        priority=(jnp.zeros((ROWS, 3)), "rows or none"),
        mask=(jnp.ones((ROWS, 3), bool), "rows or none"),
        version=(jnp.zeros((ROWS, 3), jnp.int32), "rows or none"),
        session=(jnp.zeros((ROWS, 3), jnp.int32), "rows or none"),
    ),
    "TrajectoryBuffer.sample": of(
        "trajectory", "sample", **SAMPLING, sequence_length=(2, "count or none")
    ),
    "TrajectoryBuffer.sample_range": of(
        "trajectory", "sample_range", **SAMPLING, start=(-2, "integer or none")
    ),
    "TrajectoryBuffer.latest": of("trajectory", "latest", n=(2, "count")),
    "TrajectoryBuffer.can_sample": of("trajectory", "can_sample", batch_size=(1, "wanted")),
    "TrajectoryBuffer.update_priority": of("trajectory", "update_priority", **UPDATE),
    "TrajectoryBuffer.mark_used": of(
        "trajectory", "mark_used", slots=SLOTS, mask=(MASK, "rows or none")
    ),
    "TrajectoryBuffer.use_count": of("trajectory", "use_count", slots=SLOTS),
    "TrajectoryBuffer.staleness": of("trajectory", "staleness", slots=SLOTS),
    "TrajectoryBuffer.locate": of("trajectory", "locate", slots=SLOTS),
    "TrajectoryBuffer.clear": of("trajectory", "clear", envs=(MASK, "environments")),
    "TrajectoryBuffer.get_field": of(
        "trajectory",
        "get_field",
        path=("obs", "field there"),
        env_ids=(COUNTS, "steps"),
        positions=(COUNTS, "steps"),
    ),
    "TrajectoryBuffer.gather_all": of("trajectory", "gather_all", ignore_earliest=(True, "flag")),
    "TrajectoryBuffer.dequeue": of(
        "trajectory", "dequeue", n=(2, "count"), mask=(MASK, "rows or none")
    ),
    "TrajectoryBuffer.episode": of("trajectory", "episode", **ENVS),
    "TrajectoryBuffer.episode_mask": of(
        "trajectory", "episode_mask", slots=SLOTS, sequence_length=(2, "count or none")
    ),
    "Queue.add": of("queue", "add", items=(rows(ROWS), "items"), mask=(MASK, "rows or none")),
    "Queue.take": of("queue", "take", batch_size=(2, "count")),
    "Queue.can_add": of("queue", "can_add", batch_size=(2, "wanted")),
    "Queue.can_sample": of("queue", "can_sample", batch_size=(2, "wanted")),
    "Queue.accepts": of(
        "queue", "accepts", rows=(ROWS, "count from 0"), mask=(MASK, "rows or none")
    ),
    "Mixture.add": of("mixture", "add", items=(rows(ROWS), "items"), part=(0, "count from 0")),
    "Mixture.sample": of("mixture", "sample", **SAMPLING),
    "Mixture.can_sample": of("mixture", "can_sample", batch_size=(2, "wanted")),
    "Mixture.counts": of("mixture", "counts", batch_size=(2, "count")),
    "Mixture.replace_part": of(
        "mixture", "replace_part", part=(1, "count from 0"), buffer=(THINGS.plain, "buffer")
    ),
    "Mixture.part_of": of("mixture", "part_of", slots=SLOTS),
    "Mixture.part_slots": of("mixture", "part_slots", slots=SLOTS, part=(0, "count from 0")),
    "Mixture.update_priority": of("mixture", "update_priority", **UPDATE),
    "EpisodeAccumulator.add": of(
        "episodes", "add", steps=(rows(ROWS), "items"), mask=(MASK, "rows or none")
    ),
    "EpisodeAccumulator.drop": of("episodes", "drop", envs=(MASK, "rows")),
    "ChunkAccumulator.add": of(
        "chunks",
        "add",
        fragments=(rows(ROWS), "items"),
        worker=(COUNTS, "rows"),
        number=(COUNTS, "rows"),
        mask=(MASK, "rows or none"),
        **VERSION,
    ),
    "ChunkAccumulator.drop": of("chunks", "drop", workers=(jnp.ones(2, bool), "rows")),
    "ChunkAccumulator.set_version": of(
        "chunks", "set_version", version=(1, "integer"), session=(0, "integer or none")
    ),
    "Statistics.sampled": of(
        "statistics",
        "sampled",
        buffer=(THINGS.item, "queue"),
        batch=(THINGS.batch, "sample"),
        priority=(ZEROS, "rows or none"),
    ),
    "Statistics.metrics": of("statistics", "metrics", buffer=(THINGS.item, "queue")),
    "Statistics.next_period": of("statistics", "next_period", buffer=(THINGS.item, "queue")),
    "RateLimiter.can_insert": call(
        lambda **options: jaxbuf.RateLimiter.create(1.0).can_insert(**options),
        size=(1, "count, also true"),
        count=(1, "count, also true"),
    ),
    "RateLimiter.inserted": call(
        lambda **options: jaxbuf.RateLimiter.create(1.0).inserted(**options),
        count=(1, "count, also true"),
    ),
    "ThroughputLimiter.can_sample": call(
        lambda **options: jaxbuf.ThroughputLimiter.create().can_sample(**options),
        size=(1, "count, also true"),
        count=(1, "count, also true"),
    ),
    "ThroughputLimiter.after": call(
        lambda **options: jaxbuf.ThroughputLimiter.create().after(**options),
        seconds=(1.0, "traced number"),
    ),
    "explain_memory": call(
        lambda fn, smallest: jaxbuf.explain_memory(fn, jnp.zeros(3), smallest=smallest),
        host=True,
        fn=(jnp.sin, "function"),
        smallest=(1024, "count on the host"),
    ),
    # Calls that keep data on disk, wait, or write.
    "save": call(
        lambda path: jaxbuf.save(path, THINGS.plain), host=True, path=(folder(), "folder")
    ),
    "load": call(
        lambda path, resize: jaxbuf.load(path, THINGS.plain, resize=resize),
        host=True,
        path=(saved(), "folder"),
        resize=(False, "flag"),
    ),
    "Store": call(
        lambda **options: jaxbuf.Store(**options).close(),
        host=True,
        path=(folder(), "folder"),
        example=(step(), "example on disk"),
        mode=("a", "choice"),
        chunk=(4, "count or none"),
        cache_bytes=(2**20, "size in bytes"),
    ),
    "Store.append": on_store(
        "append",
        items=(rows(ROWS), "items"),
        mask=(np.ones(ROWS, bool), "rows or none"),
        start=(None, "start or none"),
    ),
    "Store.read": on_store("read", rows=([0, 1], "row numbers")),
    "Store.delete": on_store("delete", rows=([], "row numbers")),
    "Store.batches": on_store(
        "batches",
        batch_size=(2, "count"),
        seed=(0, "count on the host from 0"),
        start=(0, "count on the host from 0"),
        steps=(1, "steps or none"),
        prefetch=(2, "count"),
    ),
    "Store.load_into": on_store(
        "load_into",
        buffer=(THINGS.plain.clear(), "buffer to add to"),
        start=(0, "count on the host from 0"),
        stop=(0, "steps or none"),
        rows_at_a_time=(4, "count"),
    ),
    "Holder": call(jaxbuf.Holder, host=True, state=(0, "anything"), recheck=(1.0, "seconds")),
    "Holder.add": on_holder(
        "plain",
        "add",
        items=(rows(ROWS), "items"),
        mask=(MASK, "rows or none"),
        timeout=(0.0, "time"),
    ),
    "Holder.add to a queue": on_holder(
        "queue",
        "add",
        items=(rows(ROWS), "what waits"),
        mask=(MASK, "rows or none"),
        timeout=(0.0, "time"),
    ),
    "Holder.sample": on_holder(
        "plain", "sample", **SAMPLING, least=(1, "count or none"), timeout=(0.0, "time")
    ),
    "Holder.sample_with_weights": on_holder(
        "plain",
        "sample_with_weights",
        **SAMPLING,
        beta=(0.4, "beta"),
        normalize=("batch", "choice or none"),
        least=(1, "count or none"),
        timeout=(0.0, "time"),
    ),
    "Holder.take": on_holder("queue", "take", batch_size=(1, "count"), timeout=(0.0, "time")),
    "Monitor": call(
        jaxbuf.Monitor,
        host=True,
        writers=([], "nothing"),
        every_steps=(2, "count on the host or none"),
        resume_at=(0, "step or none"),
    ),
    "Monitor every few seconds": call(
        jaxbuf.Monitor, host=True, writers=([], "nothing"), every_seconds=(2.0, "seconds")
    ),
    "Monitor.write": call(
        lambda **options: jaxbuf.Monitor([]).write(**options),
        host=True,
        step=(1, "step"),
        metrics=({"loss": 1.0}, "metrics"),
    ),
    "CsvWriter": call(
        lambda path: jaxbuf.CsvWriter(path).close(),
        host=True,
        path=(folder() + "/log.csv", "folder"),
    ),
}


if importlib.util.find_spec("mpi4jax") is not None:
    from jaxbuf import mpi

    CALLS |= {
        "EMA": call(mpi.EMA, alpha=(0.1, "above 0 to 1")),
        "Min": call(mpi.Min, alpha=(0.1, "above 0 to 1")),
        "Percentile": call(mpi.Percentile, q=(0.1, "fraction"), alpha=(0.1, "above 0 to 1")),
        "BaselineFilter.create": call(
            mpi.BaselineFilter.create, refresh_after=(10, "count or none")
        ),
        "BaselineFilter.select": call(
            lambda **options: mpi.BaselineFilter.create().select(**options),
            score=(ZEROS, "rows of any number"),
            baseline=(0.0, "traced number"),
            mask=(MASK, "rows or none"),
        ),
        "Layout": call(
            mpi.Layout,
            world_size=(4, "count"),
            num_managers=(1, "count"),
            coordinator=(False, "flag"),
            nodes=(None, "rows or none"),
        ),
        "Novelty": call(mpi.Novelty, field=(None, "what is compared"), p=(2.0, "norm 1 or 2")),
        "NewModes": call(
            mpi.NewModes,
            threshold=(0.0, "score"),
            field=(None, "what is compared"),
            cutoff=(0.0, "distance from 0"),
            p=(1.0, "norm"),
        ),
        "WeightedSum": call(
            mpi.WeightedSum,
            parts=((mpi.Retained(),), "nothing"),
            weights=({"retained": 1.0}, "weights"),
            alpha=(0.1, "above 0 to 1"),
        ),
        "Manager.create": call(
            mpi.Manager.create,
            buffer=(THINGS.scored, "buffer"),
            num_workers=(2, "count"),
            baseline=(mpi.EMA(), "nothing"),
            scores=(mpi.DEFAULT, "just functions"),
            store=(True, "flag"),
        ),
        "WorkerState.create": call(
            mpi.WorkerState.create,
            example=(step(), "example"),
            rows=(2, "count"),
            filter=(None, "rows or none"),
        ),
    }
