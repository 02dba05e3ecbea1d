"""Every public function with the arguments it takes, and values of every kind to give it instead.

``CALLS`` names the calls; each of its arguments has a legal value and a kind. ``HOSTILE`` names the
values, and ``KINDS`` tells which of them are legal for an argument of a kind, or may be, and what
a refusal of the others says.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import tempfile
import types
import zipfile
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


def things():
    """Buffers and what else calls are made with; made once, since no call may change them."""
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
    return types.SimpleNamespace(
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
        rate=jaxbuf.RateLimiter.create(1.0),
        throughput=jaxbuf.ThroughputLimiter.create(),
    )


THINGS = things()
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
POSITIVE = (REAL | LARGE) - {"zero"}
FINITE = REAL | LARGE | {"negative", "minus half"}
NUMERIC = FINITE | {"inf", "minus inf", "giant"}
STEPS = {"zero", "negative", "true", "huge", "giant"}
EXAMPLE = NUMERIC | ARRAYS | {"list", "dict", "key", "shape", "nan", "true", "complex"}
EXAMPLE |= {"queue", "slots", "sample"}
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
    "score": (NUMERIC, "expected a score"),
    "distance from 0": (REAL | LARGE, DISTANCE),
    "time": (NUMERIC | {"none"}, "expected seconds, or None"),
    "count, also true": (
        {"zero", "true"},
        rf"{NUMBERS}|expected (one integer|an integer( from 0 to 2\*\*31 - 1)?)$",
    ),
    "window": ({"episodes"}, "the (window|batch) has no such field"),
    "trajectories": ({"keys", "slots", "sample"}, ANY),
    "metrics": (
        FINITE
        | {"nan", "inf", "minus inf", "true", "none", "list", "dict"}
        | {"integers", "grid", "bools", "queue", "slots", "sample"},
        f"{NUMBERS}|expected (numbers|an array)",
    ),
    "step": (STEPS, "expected (an integer|one number)"),
    "step or none": (STEPS | {"none"}, "expected None or the number of a step"),
    "size in bytes": ({"zero", "huge"}, COUNT_0),
    "norm": (
        REAL | LARGE | {"inf", "giant"},
        "expected a norm: 1, 2, inf, any number of at least 0.01, or 0",
    ),
    "distance": (FINITE | {"minus inf"}, DISTANCE),
    "at least 0": (REAL | LARGE, AT_LEAST_0),
    "above 0": (POSITIVE, ABOVE_0),
    "at least 1": (LARGE, "expected a number of at least 1"),
    "any number": (NUMERIC, "expected (a number|one of at least 2)"),
    "temperature": (POSITIVE | {"none"}, ABOVE_0),
    "seconds": (
        POSITIVE | {"none", "giant", "inf"},
        "expected (None or seconds, more than 0|a number above 0)",
    ),
    "traced number": (
        FINITE | {"nan", "inf", "minus inf", "true"},
        rf"{NUMBERS}|expected (\(\), which is (one|a) num|float32|an? (array|number of at most))",
    ),
    "beta": (
        FINITE,
        rf"{NUMBERS}|pass beta=|expected (a finite number|\(\), which is one number|float32)",
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
    "offsets": (
        {"integers", "list"},
        f"{NUMBERS}|expected (integers|an array$|\\(K,\\), such as range)",
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


def call(function, names="", host=False, consumes=False, **others):
    """A call with arguments of ``ARGUMENTS`` by name, and others."""
    arguments = {name: ARGUMENTS[name] for name in names.split()} | others
    return Call(function, arguments, host, consumes)


def of(name, method, names="", **others):
    """A method of one of the things."""
    return call(
        lambda **options: getattr(getattr(THINGS, name), method)(**options), names, **others
    )


ZEROS = jnp.zeros((ROWS,))
MASK = jnp.ones((ROWS,), bool)
COUNTS = jnp.zeros((ROWS,), jnp.int32)
SLOTS = (THINGS.batch.slots, "slots")
# Priorities that are set, and may not be left out.
PRIORITY = {"priority": (ZEROS, "rows")}


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


def old_store():
    path = folder()
    file = pathlib.Path(__file__).with_name("io") / "stores_0_3_0.zip"
    zipfile.ZipFile(file).extractall(path)
    return f"{path}/renewed"


@functools.cache
def store():
    opened = jaxbuf.Store(folder(), step())
    opened.append(rows(ROWS))
    return opened


def on_store(method, names="", **others):
    return call(lambda **options: getattr(store(), method)(**options), names, True, **others)


@functools.cache
def holder(name):
    full = getattr(THINGS, name).clear().add(rows(ROWS))
    return jaxbuf.Holder(full)


def on_holder(name, method, names="", **others):
    return call(lambda **options: getattr(holder(name), method)(**options), names, True, **others)


# What these names mean in most calls.
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "achieved": ("achieved_goal", "field there"),
    "achieved_goals": (jnp.zeros((ROWS, 3, 2)), "nothing"),
    "add_batch_size": (2, "count"),
    "add_batches": (True, "flag"),
    "add_sequence_length": (2, "count"),
    "add_sequences": (True, "flag"),
    "alpha": (0.1, "above 0 to 1"),
    "axis": (-1, "integer"),
    "base": (jaxbuf.Uniform(), "known sampler"),
    "batch_size": (2, "count"),
    "beta": (0.4, "beta"),
    "boundary": ("mask", "choice"),
    "buffer": (THINGS.item, "buffer"),
    "buffers": ([THINGS.plain], "buffer"),
    "by": ("priority", "choice"),
    "by_priority": (False, "flag"),
    "cache_bytes": (2**20, "size in bytes"),
    "capacity": (8, "count"),
    "carry": (ZEROS, "pytree"),
    "chunk": (4, "count or none"),
    "comparison": (">=", "choice"),
    "compress": (False, "flag"),
    "coordinator": (False, "flag"),
    "count": (1, "count, also true"),
    "cutoff": (0.0, "distance"),
    "dataset": ([], "episodes of a dataset"),
    "default_return": (0.0, "any number"),
    "discount": (0.9, "traced number"),
    "diversity": (None, "filter"),
    "donate": (False, "flag"),
    "drop_last": (True, "flag"),
    "episodes": (None, "episodes"),
    "epsilon": (0.0, "at least 0"),
    "every_seconds": (2.0, "seconds"),
    "every_steps": (2, "count on the host or none"),
    "evictor": (jaxbuf.Oldest(), "evictor"),
    "example": (step(), "example"),
    "fallback": (False, "flag"),
    "field": ("obs", "what is compared"),
    "filter": (None, "rows or none"),
    "first": (MASK, "rows or none"),
    "fn": (jnp.sin, "function"),
    "fraction": (0.8, "fraction"),
    "fragments": (rows(ROWS), "items"),
    "fragments_per_chunk": (2, "count"),
    "freshness": (None, "freshness"),
    "goal": ("goal", "field there"),
    "group": ("group", "field there"),
    "groups": (2, "groups"),
    "ignore_earliest": (True, "flag"),
    "initial_priority": (1.0, "at least 0"),
    "items": (rows(ROWS), "items"),
    "key": (KEY, "key"),
    "lambda_": (0.9, "traced number"),
    "least": (1, "count or none"),
    "lengths": (COUNTS, "rows"),
    "log_ratio": (THINGS.windows["reward"], "rows"),
    "mask": (MASK, "rows or none"),
    "max_length": (8, "count"),
    "max_length_time_axis": (8, "count"),
    "max_staleness": (1, "count or none"),
    "max_use": (1, "count or none"),
    "metrics": ({"loss": 1.0}, "metrics"),
    "min_batches": (1.0, "at least 1"),
    "min_length": (2, "count from 0"),
    "min_length_time_axis": (2, "count from 0"),
    "min_size": (1, "count"),
    "mode": ("a", "choice"),
    "n": (2, "count"),
    "next_value": (None, "rows or none"),
    "normalize": ("batch", "choice or none"),
    "nodes": (None, "rows or none"),
    "num_earliest_ignored": (0, "count from 0"),
    "num_envs": (2, "count"),
    "num_groups": (4, "count"),
    "num_managers": (1, "count"),
    "num_steps": (3, "count"),
    "num_workers": (2, "count"),
    "number": (COUNTS, "rows"),
    "order": ("age", "choice"),
    "p": (1.0, "norm"),
    "padding": ("none", "choice"),
    "part": (0, "count from 0"),
    "path": (folder(), "folder"),
    "per_add": (None, "count or none"),
    "period": (1, "count"),
    "positions": (COUNTS, "steps"),
    "prefetch": (2, "count"),
    "priority": (ZEROS, "rows or none"),
    "priority_exponent": (0.5, "fraction"),
    "q": (0.1, "fraction"),
    "ratio": (0.5, "fraction"),
    "ratios": ([1], "nothing"),
    "recheck": (1.0, "seconds"),
    "record_return": (True, "flag"),
    "recurrence": ("plain", "choice"),
    "refresh_after": (10, "count or none"),
    "replacement": (True, "flag"),
    "resize": (False, "flag"),
    "partial": (False, "flag"),
    "resume_at": (0, "step or none"),
    "reward": ("reward", "field there"),
    "reward_clip": (None, "pair or none"),
    "reward_fn": (goals, "function"),
    "rho_clip": (1.0, "traced number"),
    "rows_at_a_time": (4, "count"),
    "sample": (THINGS.batch, "sample"),
    "sample_batch_size": (2, "count"),
    "sample_sequence_length": (2, "count"),
    "sampler": (jaxbuf.Uniform(), "sampler"),
    "samplers": ([jaxbuf.Uniform()], "nothing"),
    "seconds": (1.0, "traced number"),
    "seed": (0, "count on the host from 0"),
    "sequence_length": (2, "count or none"),
    "session": (COUNTS, "rows or none"),
    "size": (1, "count, also true"),
    "slots": SLOTS,
    "smallest": (1024, "count on the host"),
    "sort_every": (1, "count"),
    "start": (0, "count on the host from 0"),
    "state": (0, "anything"),
    "steps": (rows(ROWS), "items"),
    "store": (True, "flag"),
    "strategy": ("future", "choice"),
    "stratified": (True, "flag"),
    "t": (COUNTS, "rows"),
    "temperature": (1.0, "temperature"),
    "terminated": ("terminated", "field there"),
    "threshold": (0.0, "score"),
    "timeout": (0.0, "time"),
    "tolerance": (10.0, "any number"),
    "trajectories": (THINGS.windows, "trajectories"),
    "truncated": (None, "field there or none"),
    "value": (THINGS.windows["reward"], "rows"),
    "version": (COUNTS, "rows or none"),
    "waiting": (None, "count or none"),
    "where": (COUNTS, "steps"),
    "window": (THINGS.windows, "window"),
    "within_batch": ("greedy", "choice"),
    "worker": (COUNTS, "rows"),
    "workers": (jnp.ones(2, bool), "rows"),
    "world_size": (4, "count"),
    "writers": ([], "nothing"),
}

FBX_WINDOWS = (
    "add_batch_size sample_batch_size sample_sequence_length period min_length_time_axis "
    "max_length_time_axis"
)
CALLS: dict[str, Call] = {
    # Functions.
    "add": call(jaxbuf.add, "items donate priority", buffer=(THINGS.item, "buffer to add to")),
    "add donated": call(
        jaxbuf.add, "items mask", buffer=(THINGS.plain, "buffer to add to"), consumes=True
    ),
    "sample": call(jaxbuf.sample, "buffer key batch_size"),
    "sample with weights": call(jaxbuf.sample, "buffer key batch_size beta normalize"),
    "sample windows": call(
        jaxbuf.sample, "key batch_size sequence_length", buffer=(THINGS.trajectory, "buffer")
    ),
    "update_priority": call(jaxbuf.update_priority, "buffer slots donate", **PRIORITY),
    "importance_weights": call(jaxbuf.importance_weights, "buffer sample beta normalize"),
    "sample_groups": call(
        jaxbuf.sample_groups,
        "key groups num_groups group order padding",
        buffer=(THINGS.groups, "buffer"),
        size=(2, "count"),
        replacement=(False, "flag"),
    ),
    "n_step": call(jaxbuf.n_step, "window discount reward terminated truncated", n=(1, "count")),
    "gae": call(jaxbuf.gae, "window value discount lambda_ reward terminated truncated"),
    "vtrace": call(
        jaxbuf.vtrace, "window value log_ratio discount next_value rho_clip terminated truncated"
    ),
    "stack_frames": call(
        jaxbuf.stack_frames,
        "window n terminated truncated first axis",
        field=("obs", "field there"),
        last=(None, "field there or none"),
    ),
    "hindsight": call(
        jaxbuf.hindsight,
        "key achieved_goals t reward_fn strategy fraction achieved goal reward",
        batch=(BATCH, "window"),
        length=(COUNTS + 3, "rows or none"),
    ),
    "hindsight, geometric": call(
        lambda **options: jaxbuf.hindsight(strategy="geometric", **options),
        "key achieved_goals t reward_fn",
        batch=(BATCH, "window"),
        discount=(0.5, "above 0 to 1"),
    ),
    "terminal_states": call(jaxbuf.terminal_states, "trajectories lengths"),
    "terminal_states with a mask": call(
        jaxbuf.terminal_states, "trajectories", mask=(jnp.ones((ROWS, 3), bool), "rows")
    ),
    "plot": call(jaxbuf.plot, buffer=(THINGS.plain, "queue"), host=True),
    # Buffers.
    "ItemBuffer.create": call(
        jaxbuf.ItemBuffer.create, "example capacity sampler evictor freshness diversity"
    ),
    "TrajectoryBuffer.create": call(
        jaxbuf.TrajectoryBuffer.create,
        "example num_envs period num_earliest_ignored sampler episodes freshness",
        length=(8, "count"),
        sequence_length=(2, "count"),
    ),
    "Queue.create": call(jaxbuf.Queue.create, "example capacity"),
    "Mixture.create": call(jaxbuf.Mixture.create, "buffers ratios"),
    "EpisodeAccumulator.create": call(
        jaxbuf.EpisodeAccumulator.create,
        "num_envs per_add waiting terminated truncated",
        max_length=(4, "count"),
        example=(step(), "nothing"),
    ),
    "ChunkAccumulator.create": call(
        jaxbuf.ChunkAccumulator.create,
        "example num_workers fragments_per_chunk per_add waiting freshness",
    ),
    "Statistics.create": call(
        jaxbuf.Statistics.create, buffer=(THINGS.plain, "queue"), window=(4, "count")
    ),
    "reward_prioritized": call(jaxbuf.reward_prioritized, "example capacity temperature fallback"),
    "diverse_reward_prioritized": call(
        jaxbuf.diverse_reward_prioritized,
        "example capacity cutoff p field temperature fallback",
        active=("always", "choice"),
    ),
    "terminal_state_buffer": call(jaxbuf.terminal_state_buffer, "example capacity"),
    "reservoir": call(jaxbuf.reservoir, "example capacity sampler", key=(KEY, "key or none")),
    # Strategies.
    "Uniform": call(jaxbuf.Uniform, "replacement"),
    "Balanced": call(jaxbuf.Balanced, "replacement", by=("environment", "choice")),
    "Shuffled": call(jaxbuf.Shuffled, "drop_last"),
    "Prioritized": call(
        jaxbuf.Prioritized,
        "initial_priority epsilon stratified replacement",
        alpha=(0.6, "at least 0"),
        uniform_mix=(0.0, "fraction"),
    ),
    "Softmax": call(
        jaxbuf.Softmax, "fallback", temperature=(1.0, "above 0"), replacement=(False, "flag")
    ),
    "RankBased": call(
        jaxbuf.RankBased, "by sort_every stratified replacement", alpha=(0.7, "at least 0")
    ),
    "Staleness": call(jaxbuf.Staleness, "stratified replacement", alpha=(1.0, "at least 0")),
    "Blend": call(jaxbuf.Blend, "samplers", weights=([1], "nothing")),
    "Recent": call(jaxbuf.Recent, "ratio base", steps=(4, "count")),
    "Diversity": call(jaxbuf.Diversity, "cutoff p field within_batch", active=("full", "choice")),
    "Freshness": call(jaxbuf.Freshness, "max_use max_staleness comparison"),
    "Episodes": call(
        jaxbuf.Episodes,
        "boundary record_return default_return reward_clip recurrence",
        terminated=("terminated", "field"),
        truncated=(None, "field or none"),
        last=(None, "field or none"),
        reward=("reward", "field"),
        discount=(0.9, "fraction"),
    ),
    "RateLimiter.create": call(
        jaxbuf.RateLimiter.create, "min_size tolerance", samples_per_insert=(1.0, "above 0")
    ),
    "ThroughputLimiter.create": call(
        jaxbuf.ThroughputLimiter.create,
        "min_batches",
        samples_per_insert=((0.5, 2.0), "pair"),
        window=(30.0, "above 0"),
    ),
    # The layer for programs written for flashbax.
    "make_trajectory_buffer": call(fbx.make_trajectory_buffer, FBX_WINDOWS),
    "make_prioritised_trajectory_buffer": call(
        fbx.make_prioritised_trajectory_buffer, FBX_WINDOWS + " priority_exponent"
    ),
    "make_flat_buffer": call(
        fbx.make_flat_buffer,
        "max_length min_length sample_batch_size add_sequences",
        add_batch_size=(None, "count or none"),
    ),
    "make_prioritised_flat_buffer": call(
        fbx.make_prioritised_flat_buffer,
        "max_length min_length sample_batch_size add_sequences priority_exponent",
        add_batch_size=(None, "count or none"),
    ),
    "make_item_buffer": call(
        fbx.make_item_buffer, "max_length min_length sample_batch_size add_sequences add_batches"
    ),
    "make_prioritised_item_buffer": call(
        fbx.make_prioritised_item_buffer,
        "max_length min_length sample_batch_size add_sequences priority_exponent add_batches",
    ),
    "make_trajectory_queue": call(
        fbx.make_trajectory_queue,
        "max_length_time_axis add_batch_size add_sequence_length sample_sequence_length",
    ),
    # Environments and their datasets.
    "rollout": call(
        rollout,
        "carry key num_steps",
        step=(lambda carry, key: (carry, {"obs": carry}), "function that is called"),
    ),
    "from_minari": call(
        jaxbuf.from_minari,
        "dataset rows_at_a_time",
        buffer=(THINGS.offline, "buffer to add to"),
        host=True,
    ),
    # Methods.
    "ItemBuffer.add": of("item", "add", "items priority mask version session"),
    "ItemBuffer.add scored": of("scored", "add", "items", score=(ZEROS, "rows")),
    "ItemBuffer.next_batch": of("item", "next_batch", "key batch_size"),
    "ItemBuffer.sample": of("item", "sample", "key batch_size"),
    "ItemBuffer.sample_range": of(
        "plain",
        "sample_range",
        "key batch_size by_priority",
        start=(-2, "integer or none"),
        stop=(None, "integer or none"),
        replacement=(False, "flag"),
    ),
    "ItemBuffer.latest": of("plain", "latest", "n"),
    "ItemBuffer.highest": of("scored", "highest", "n"),
    "ItemBuffer.can_sample": of("item", "can_sample", batch_size=(1, "wanted")),
    "ItemBuffer.update_priority": of("item", "update_priority", "slots mask", **PRIORITY),
    "ItemBuffer.mark_used": of("item", "mark_used", "slots mask"),
    "ItemBuffer.set_version": of(
        "item", "set_version", version=(1, "integer"), session=(0, "integer or none")
    ),
    "ItemBuffer.set_hyperparameters": of(
        "annealed", "set_hyperparameters", uniform_mix=(0.5, "fraction")
    ),
    "ItemBuffer.with_sampler": of("item", "with_sampler", "sampler"),
    "ItemBuffer.use_count": of("item", "use_count", "slots"),
    "ItemBuffer.staleness": of("item", "staleness", "slots"),
    "TrajectoryBuffer.add": of(
        "trajectory",
        "add",
        "steps priority mask version session",
        env_ids=(np.arange(ROWS), "environments"),
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
    "TrajectoryBuffer.sample": of("trajectory", "sample", "key batch_size sequence_length"),
    "TrajectoryBuffer.sample_range": of(
        "trajectory", "sample_range", "key batch_size", start=(-2, "integer or none")
    ),
    "TrajectoryBuffer.update_priority": of(
        "trajectory", "update_priority", "slots mask", **PRIORITY
    ),
    "TrajectoryBuffer.locate": of("trajectory", "locate", "slots"),
    "TrajectoryBuffer.clear": of("trajectory", "clear", envs=(MASK, "environments")),
    "TrajectoryBuffer.get_field": of(
        "trajectory",
        "get_field",
        "positions",
        path=("obs", "field there"),
        env_ids=(COUNTS, "steps"),
    ),
    "TrajectoryBuffer.steps_around": of(
        "trajectory",
        "steps_around",
        "slots",
        offsets=(COUNTS, "offsets"),
        path=("obs", "field there or none"),
    ),
    "TrajectoryBuffer.gather_all": of("trajectory", "gather_all", "ignore_earliest"),
    "TrajectoryBuffer.dequeue": of("trajectory", "dequeue", "n mask"),
    "TrajectoryBuffer.episode": of("trajectory", "episode", "where positions"),
    "TrajectoryBuffer.episode_mask": of("trajectory", "episode_mask", "slots sequence_length"),
    "Queue.add": of("queue", "add", "items mask"),
    "Queue.take": of("queue", "take", "batch_size"),
    "Queue.can_add": of("queue", "can_add", batch_size=(2, "wanted")),
    "Queue.can_sample": of("queue", "can_sample", batch_size=(2, "wanted")),
    "Queue.accepts": of("queue", "accepts", "mask", rows=(ROWS, "count from 0")),
    "Mixture.add": of("mixture", "add", "items part"),
    "Mixture.sample": of("mixture", "sample", "key batch_size"),
    "Mixture.can_sample": of("mixture", "can_sample", batch_size=(2, "wanted")),
    "Mixture.counts": of("mixture", "counts", "batch_size"),
    "Mixture.replace_part": of(
        "mixture", "replace_part", part=(1, "count from 0"), buffer=(THINGS.plain, "buffer")
    ),
    "Mixture.part_of": of("mixture", "part_of", "slots"),
    "Mixture.part_slots": of("mixture", "part_slots", "slots part"),
    "Mixture.update_priority": of("mixture", "update_priority", "slots mask", **PRIORITY),
    "EpisodeAccumulator.add": of("episodes", "add", "steps mask"),
    "EpisodeAccumulator.drop": of("episodes", "drop", envs=(MASK, "rows")),
    "ChunkAccumulator.add": of("chunks", "add", "fragments worker number mask version session"),
    "ChunkAccumulator.drop": of("chunks", "drop", "workers"),
    "ChunkAccumulator.set_version": of(
        "chunks", "set_version", version=(1, "integer"), session=(0, "integer or none")
    ),
    "Statistics.sampled": of(
        "statistics",
        "sampled",
        "priority",
        buffer=(THINGS.item, "queue"),
        batch=(THINGS.batch, "sample"),
    ),
    "Statistics.metrics": of("statistics", "metrics", buffer=(THINGS.item, "queue")),
    "Statistics.next_period": of("statistics", "next_period", buffer=(THINGS.item, "queue")),
    "RateLimiter.can_insert": of("rate", "can_insert", "size count"),
    "RateLimiter.inserted": of("rate", "inserted", "count"),
    "ThroughputLimiter.can_sample": of("throughput", "can_sample", "size count"),
    "ThroughputLimiter.after": of("throughput", "after", "seconds"),
    "explain_memory": call(
        lambda fn, smallest: jaxbuf.explain_memory(fn, jnp.zeros(3), smallest=smallest),
        "fn smallest",
        host=True,
    ),
    # Calls that keep data on disk, wait, or write.
    "save": call(lambda path: jaxbuf.save(path, THINGS.plain), "path", host=True),
    "load": call(
        lambda path, resize, partial: jaxbuf.load(
            path, THINGS.plain, resize=resize, partial=partial
        ),
        "resize partial",
        path=(saved(), "folder"),
        host=True,
    ),
    "Store": call(
        lambda **options: jaxbuf.Store(**options).close(),
        "mode chunk compress cache_bytes",
        path=(folder(), "folder"),
        example=(step(), "example on disk"),
        host=True,
    ),
    "convert_store": call(
        lambda **options: jaxbuf.convert_store(new=f"{folder()}/new", **options),
        "compress",
        old=(old_store(), "folder"),
        example=(np.float32(0), "example on disk"),
        host=True,
    ),
    "Store.append": on_store(
        "append", "items", mask=(np.ones(ROWS, bool), "rows or none"), start=(None, "start or none")
    ),
    "Store.read": on_store("read", rows=([0, 1], "row numbers")),
    "Store.delete": on_store("delete", rows=([], "row numbers")),
    "Store.batches": on_store(
        "batches", "batch_size seed start prefetch", steps=(1, "steps or none")
    ),
    "Store.load_into": on_store(
        "load_into",
        "start rows_at_a_time",
        buffer=(THINGS.plain.clear(), "buffer to add to"),
        stop=(0, "steps or none"),
    ),
    "Holder": call(jaxbuf.Holder, "state recheck", host=True),
    "Holder.add": on_holder("plain", "add", "items mask timeout"),
    "Holder.add to a queue": on_holder(
        "queue", "add", "mask timeout", items=(rows(ROWS), "what waits")
    ),
    "Holder.sample": on_holder("plain", "sample", "key batch_size least timeout"),
    "Holder.sample with weights": on_holder(
        "plain", "sample", "key batch_size beta normalize least timeout"
    ),
    "Holder.take": on_holder("queue", "take", "timeout", batch_size=(1, "count")),
    "Monitor": call(jaxbuf.Monitor, "writers every_steps resume_at", host=True),
    "Monitor every few seconds": call(jaxbuf.Monitor, "writers every_seconds", host=True),
    "Monitor.write": call(
        lambda **options: jaxbuf.Monitor([]).write(**options),
        "metrics",
        step=(1, "step"),
        host=True,
    ),
    "CsvWriter": call(
        lambda path: jaxbuf.CsvWriter(path).close(),
        path=(folder() + "/log.csv", "folder"),
        host=True,
    ),
}


if importlib.util.find_spec("mpi4jax") is not None:
    from jaxbuf import mpi

    CALLS |= {
        "EMA": call(mpi.EMA, "alpha"),
        "Min": call(mpi.Min, "alpha"),
        "Percentile": call(mpi.Percentile, "q alpha"),
        "BaselineFilter.create": call(mpi.BaselineFilter.create, "refresh_after"),
        "BaselineFilter.select": call(
            lambda **options: mpi.BaselineFilter.create().select(**options),
            "mask",
            score=(ZEROS, "rows of any number"),
            baseline=(0.0, "traced number"),
        ),
        "Layout": call(mpi.Layout, "world_size num_managers coordinator nodes"),
        "Novelty": call(mpi.Novelty, field=(None, "what is compared"), p=(2.0, "norm 1 or 2")),
        "NewModes": call(
            mpi.NewModes,
            "threshold p",
            field=(None, "what is compared"),
            cutoff=(0.0, "distance from 0"),
        ),
        "WeightedSum": call(
            mpi.WeightedSum,
            "alpha",
            parts=((mpi.Retained(),), "nothing"),
            weights=({"retained": 1.0}, "weights"),
        ),
        "Manager.create": call(
            mpi.Manager.create,
            "num_workers store",
            buffer=(THINGS.scored, "buffer"),
            baseline=(mpi.EMA(), "nothing"),
            scores=(mpi.DEFAULT, "just functions"),
        ),
        "WorkerState.create": call(mpi.WorkerState.create, "example filter", rows=(2, "count")),
    }
