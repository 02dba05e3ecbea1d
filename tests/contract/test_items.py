"""The contract of `ItemBuffer`, for every sampler and under every transformation.

Random scripts of adds, samples, updates and clears are run by one scan, which is compared with the
NumPy twin after every step. A script is also run eagerly, jitted step by step, in a vmap over three
scripts and through the donating functions, and these are compared with the scan.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxbuf
from jaxbuf import testing
from jaxbuf.core.versions import takes_option
from tests.models import items as reference
from tests.models.blend import BlendedItemBuffer
from tests.models.ranks import RankedItemBuffer
from tests.models.sampling import RecentItemBuffer
from tests.models.staleness import StaleItemBuffer

STEPS = 18
EAGER_STEPS = 2
DEFAULT_ROWS = 7
EXPLICIT_ROWS = 3
BATCH = 24
PICKS = 10
LANES = 3

# Small rings wrap often; the larger ones have more than one level of sums in any sensible tree.
SMALL, LARGE = 5, 18
LARGER = {
    "unstratified-initial-zero", "epsilon-and-mix", "mix-without-replacement", "ranked", "blended"
}  # fmt: skip

# A part of a batch from the newest items: the ratio, and how many are new. Products with a half are
# exact, so that a fused multiply and add rounds as two steps do.
RECENT = 0.5, 2
# Exponents of priorities, how many items are new, and weights, whose products are exact as well.
BLENDED = (0.7, 0.0), 3, (0.5, 0.25, 0.25)


def varying(**options):
    return jaxbuf.Prioritized(**{name: jaxbuf.Varying(value) for name, value in options.items()})


def recent(**options):
    return jaxbuf.Recent(*RECENT, jaxbuf.Prioritized(**options))


def blended(alpha):
    parts = jaxbuf.Prioritized(alpha), jaxbuf.Uniform(), jaxbuf.Recent(1.0, BLENDED[1])
    return jaxbuf.Blend(parts, BLENDED[2])


def recent_twin(capacity, **options):
    return RecentItemBuffer(capacity, *RECENT, **options)


def blended_twin(capacity, **options):
    return BlendedItemBuffer(capacity, *BLENDED, **options)


UNIFORM = jaxbuf.Uniform, reference.ItemBuffer
PRIORITIZED = jaxbuf.Prioritized, reference.ItemBuffer
RANKED = jaxbuf.RankBased, RankedItemBuffer
STALE = jaxbuf.Staleness, StaleItemBuffer
MIX = {"alpha": 0.6, "epsilon": 0.01, "uniform_mix": 0.3}
# A sampler, its twin, and the options of both.
SAMPLERS = {
    "uniform": (*UNIFORM, {}),
    "uniform-without-replacement": (*UNIFORM, {"replacement": False}),
    "prioritized": (*PRIORITIZED, {"alpha": 0.6}),
    "unstratified-initial-zero": (
        *PRIORITIZED, {"alpha": 1.0, "stratified": False, "initial_priority": 0.0}
    ),
    "epsilon-and-mix": (*PRIORITIZED, MIX | {"alpha": 0.7, "initial_priority": 2.0}),
    "varying": (varying, reference.ItemBuffer, MIX),
    "prioritized-without-replacement": (*PRIORITIZED, {"alpha": 0.6, "replacement": False}),
    "mix-without-replacement": (
        *PRIORITIZED, {"alpha": 1.0, "uniform_mix": 0.25, "replacement": False}
    ),
    "recent": (recent, recent_twin, {"alpha": 1.0}),
    "ranked": (*RANKED, {"alpha": 0.7}),
    "ranked-seldom": (*RANKED, {"alpha": 1.0, "sort_every": 3}),
    "ranked-without-replacement": (*RANKED, {"alpha": 0.5, "replacement": False}),
    "blended": (blended, blended_twin, {"alpha": 0.7}),
    "stale": (*STALE, {}),
    "stale-without-replacement": (*STALE, {"replacement": False}),
}  # fmt: skip

# Of these, a part of what was drawn is removed after each step.
REMOVABLE = {"prioritized-without-replacement", "ranked-seldom", "stale-without-replacement"}

every_sampler = pytest.mark.parametrize("name", list(SAMPLERS))


def capacity_of(name):
    if is_stale(name):
        # No item would wait if each batch had all of them.
        return BATCH + LARGE
    return LARGE if name in LARGER else SMALL


def is_prioritized(name):
    return "alpha" in SAMPLERS[name][2]


def is_stale(name):
    return SAMPLERS[name][1] is StaleItemBuffer


def flags_of(name):
    """The flags of a step: it updates priorities, draws by ``next_batch``, or removes items."""
    return {
        "prioritized": is_prioritized(name),
        "onward": is_stale(name),
        "removes": name in REMOVABLE,
    }


def rows(uid):
    """The data of items by their number: leaves ``[*uid.shape, ...]`` of several dtypes."""
    uid = np.asarray(uid, np.int32)
    return {
        "uid": uid,
        "obs": np.stack([uid * 0.5, -uid.astype(np.float64)], -1).astype(np.float32),
        "nested": (uid % 2 == 0, np.stack([uid, uid + 1, uid + 2], -1).astype(np.uint8)),
    }


def example():
    return jax.tree.map(lambda leaf: leaf[0], rows(np.zeros(1)))


def random_priorities(rng, shape):
    """Priorities over many magnitudes, a fifth of them zero or not acceptable."""
    good = np.exp(rng.normal(0.0, 2.0, shape))
    special = rng.choice([0.0, 0.0, 1e-6, 1e6, np.nan, -1.0, np.inf, -np.inf], shape)
    return np.where(rng.random(shape) < 0.25, special, good).astype(np.float32)


@functools.cache
def script(seed):
    """``STEPS`` random operations, all with the same shapes, leaves ``[STEPS, ...]``."""
    rng = np.random.default_rng(seed)
    uid = np.arange(STEPS * (DEFAULT_ROWS + EXPLICIT_ROWS)).reshape(STEPS, -1)
    density = rng.choice([0.0, 0.2, 0.6, 1.0], (STEPS, 1), p=[0.15, 0.4, 0.3, 0.15])
    operations = {
        "default_rows": rows(uid[:, :DEFAULT_ROWS]),
        "default_mask": rng.random((STEPS, DEFAULT_ROWS)) < density,
        "explicit_rows": rows(uid[:, DEFAULT_ROWS:]),
        "explicit_mask": rng.random((STEPS, EXPLICIT_ROWS)) < 0.5,
        "explicit_priority": random_priorities(rng, (STEPS, EXPLICIT_ROWS)),
        "clear": rng.random(STEPS) < 0.1,
        "key": np.stack(
            [jax.random.key_data(jax.random.key(seed * STEPS + t)) for t in range(STEPS)]
        ),
        "remember": rng.random(STEPS) < 0.6,
        "pick": rng.integers(0, 2 * BATCH, (STEPS, PICKS)).astype(np.int32),
        "update_priority": random_priorities(rng, (STEPS, PICKS + 3)),
        "update_mask": rng.random((STEPS, PICKS + 3)) < 0.8,
        "remove_mask": rng.random((STEPS, BATCH)) < 0.1,
    }
    # The first step adds nothing and the second does not clear, so that an empty buffer is sampled
    # once and a filled one soon after.
    operations["default_mask"][0] = False
    operations["explicit_mask"][0] = False
    operations["clear"][:2] = False
    # More rows than a small ring has slots, of which none is overwritten before the draw.
    operations["default_mask"][3], operations["explicit_mask"][3] = True, False
    # All priorities at zero, somewhere in the middle: every stored item is picked and set to zero,
    # and drawn before others are added.
    middle = STEPS // 2
    operations["update_priority"][middle] = 0.0
    operations["update_mask"][middle] = True
    operations["pick"][middle] = np.arange(PICKS)
    for mask in ("default_mask", "explicit_mask", "clear"):
        operations[mask][middle + 1] = False
    return operations


def choose_slots(now, remembered, pick, capacity):
    """Slots to update: duplicates, stale ones, and three that never existed."""
    chosen = jax.tree.map(lambda a, b: jnp.concatenate([a, b])[pick], now, remembered)
    fabricated = jaxbuf.Slots(
        index=jnp.stack([jnp.int32(-1), jnp.int32(capacity), now.index[0]]),
        generation=jnp.stack(
            [now.generation[0], now.generation[0], now.generation[0] + jnp.uint32(1)]
        ),
    )
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), chosen, fabricated)


def no_slots(capacity):
    return jaxbuf.Slots(
        index=jnp.full(BATCH, capacity, jnp.int32), generation=jnp.zeros(BATCH, jnp.uint32)
    )


def observe(buffer, sample):
    """Returns the values that are compared after the adds of a step."""
    return {
        "size": buffer.size,
        "can_sample_1": buffer.can_sample(),
        "can_sample_3": buffer.can_sample(3),
        "sample": sample,
        "weights": {
            str(normalize): jaxbuf.importance_weights(buffer, sample, 0.5, normalize=normalize)
            for normalize in ("batch", "buffer", "mean", None)
        },
    }


def cleared(buffer):
    return buffer.clear()


def unchanged(buffer):
    return buffer


def step(carry, operation, *, prioritized, onward, removes, donates=False):
    """One step of a script with the pure methods, or the functions that consume the buffer."""

    def call(what, buffer, *args, **options):
        if donates:
            return getattr(jaxbuf, what)(buffer, *args, **options)
        return getattr(buffer, what)(*args, **options)

    # What is seen of a buffer may be a part of it, which is then consumed.
    keep = jax.device_get if donates else unchanged
    buffer, remembered = carry
    buffer = jax.lax.cond(operation["clear"], cleared, unchanged, buffer)
    before = keep(buffer.metrics())
    buffer = call("add", buffer, operation["default_rows"], mask=operation["default_mask"])
    explicit = {"priority": operation["explicit_priority"]} if prioritized else {}
    rows, mask = operation["explicit_rows"], operation["explicit_mask"]
    buffer = call("add", buffer, rows, mask=mask, **explicit)
    key = jax.random.wrap_key_data(operation["key"])
    sample = call("sample", buffer, key, BATCH)
    seen = keep(observe(buffer, sample) | {"before": before, "added": buffer.metrics()})
    if onward:
        buffer, sample = call("next_batch", buffer, key, BATCH)
        seen["sample"] = keep(sample)
    if prioritized:
        slots = choose_slots(sample.slots, remembered, operation["pick"], buffer.capacity)
        priority, mask = operation["update_priority"], operation["update_mask"]
        buffer = call("update_priority", buffer, slots, priority, mask=mask)
    if removes:
        buffer = call("remove", buffer, sample.slots, mask=operation["remove_mask"])
    remembered = jax.tree.map(
        lambda old, new: jnp.where(operation["remember"], new, old), remembered, sample.slots
    )
    return (buffer, remembered), seen | {"updated": keep(buffer.metrics())}


def at(tree, t):
    return jax.tree.map(lambda leaf: leaf[t], tree)


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *trees)


def start(name):
    make, _, options = SAMPLERS[name]
    parts = (jaxbuf.Removable(),) if name in REMOVABLE else ()
    buffer = jaxbuf.ItemBuffer.create(
        example(), capacity_of(name), sampler=make(**options), parts=parts
    )
    return buffer, no_slots(capacity_of(name))


@functools.cache
def scanned(name, seed=0):
    """The run everything else is compared with, leaves ``[STEPS, ...]``."""
    (buffer, _), seen = program(name)(start(name), script(seed))
    testing.assert_valid(buffer)
    assert buffer.size == seen["updated"]["size"][-1]
    return jax.device_get(seen)


@functools.cache
def program(name):
    return jax.jit(scan(name))


def scan(name):
    return functools.partial(jax.lax.scan, functools.partial(step, **flags_of(name)))


def check(name, steps=STEPS, transform=unchanged, **options):
    """One call of ``transform(step)`` for each step is the scan."""
    function = transform(functools.partial(step, **flags_of(name), **options))
    carry, seen = start(name), []
    for t in range(steps):
        carry, out = function(carry, jax.tree.map(jnp.asarray, at(script(0), t)))
        seen.append(out)
    testing.assert_valid(carry[0])
    assert_same(at(scanned(name), slice(steps)), stack(seen))


def assert_same(expected, actual):
    """Indices and data bit for bit, probabilities to an ulp, derived floats nearly."""
    chex.assert_trees_all_equal(exact(actual), exact(expected))
    chex.assert_trees_all_close_ulp(
        actual["sample"].probability, expected["sample"].probability, maxulp=1
    )
    derived = "weights", "before", "added", "updated"
    chex.assert_trees_all_close(
        {name: actual[name] for name in derived},
        {name: expected[name] for name in derived},
        rtol=2e-6,
    )


def exact(seen):
    sample = seen["sample"]
    counts = [seen[name] for name in ("size", "can_sample_1", "can_sample_3")]
    return counts, sample.data, sample.slots, sample.valid


class Replay:
    """Runs a script on the twin and checks a recorded run against it, step by step."""

    def __init__(self, name):
        self.name = name
        self.prioritized = is_prioritized(name)
        _, twin, options = SAMPLERS[name]
        self.capacity = capacity_of(name)
        self.twin = twin(self.capacity, **options)
        self.items = {}
        self.generations = {}
        self.offset = 0
        self.cleared = False
        self.remembered = [None] * BATCH

    def add(self, data, mask, priority=None):
        uid = data["uid"].tolist()
        for number, item in zip(uid, self.twin.add(uid, priority, mask), strict=True):
            if item is not None:
                self.items[number] = item

    def check_sample(self, sample):
        """Every row against the twin; returns the twin's item of each row, or None."""
        shares = self.twin.probabilities()
        valid = sample.valid
        assert valid.sum() == self.twin.valid_rows(BATCH)
        chex.assert_tree_all_finite(sample.probability)
        np.testing.assert_array_equal(sample.slots.index[~valid], self.capacity)
        np.testing.assert_array_equal(sample.probability[~valid], 0.0)
        drawn = [None] * BATCH
        for row in np.flatnonzero(valid):
            drawn[row] = item = self.items[int(sample.data["uid"][row])]
            assert self.twin.is_live(item), f"item {item.data} is gone or was never there"
            assert shares[item] > 0
            self.check_slot(item, int(sample.slots.index[row]), int(sample.slots.generation[row]))
        chex.assert_trees_all_equal(at(sample.data, valid), rows(sample.data["uid"][valid]))
        expected = [shares[item] for item in drawn if item is not None]
        np.testing.assert_allclose(sample.probability[valid], expected, rtol=1e-5)
        if not self.twin.replacement:
            present = [item for item in drawn if item is not None]
            assert len(set(present)) == len(present)
        return drawn

    def check_slot(self, item, index, generation):
        """The ring's slot (up to one turn after a clear), and one generation for each item."""
        assert 0 <= index < self.capacity
        if self.cleared:
            self.offset = (index - item.index) % self.capacity
            self.cleared = False
        assert index == (item.index + self.offset) % self.capacity
        for other, known in self.generations.items():
            if known[0] == index:
                assert (known[1] == generation) == (other is item)
        self.generations[item] = (index, generation)

    def check_metrics(self, metrics):
        twin = self.twin
        assert metrics["size"] == twin.size
        chex.assert_tree_all_finite(metrics)
        if is_stale(self.name) and twin.size:
            ages = [twin.now - twin.times[item] for item in twin.live]
            assert metrics["batches_since_drawn_max"] == max(ages)
        if not (self.prioritized and twin.size):
            return
        masses = twin.masses()
        if isinstance(twin, RankedItemBuffer):
            assert metrics["changes_since_sort"] == twin.changes
        elif twin.alpha == 1.0 and twin.epsilon == 0.0:
            for name, value in (
                ("min", masses.min()),
                ("max", masses.max()),
                ("mean", masses.mean()),
            ):
                np.testing.assert_allclose(metrics[f"priority_{name}"], value, rtol=1e-5)
        if twin.uniform_mix == 0.0 and masses.any() and self.name != "recent":
            np.testing.assert_allclose(
                metrics["effective_sample_size"], reference.effective_sample_size(masses), rtol=1e-4
            )

    def check_weights(self, weights, sample):
        everyone = list(self.twin.probabilities().values())
        valid = sample.valid
        for normalize, actual in weights.items():
            chex.assert_tree_all_finite(actual)
            np.testing.assert_array_equal(actual[~valid], 0.0)
            if valid.any():
                expected = reference.importance_weights(
                    sample.probability[valid],
                    everyone,
                    0.5,
                    None if normalize == "None" else normalize,
                )
                np.testing.assert_allclose(actual[valid], expected, rtol=2e-5)

    def check_can_sample(self, seen):
        for n in (1, 3):
            actual = seen[f"can_sample_{n}"]
            if self.twin.drawable() >= n:
                assert actual
            if self.twin.size < n:
                assert not actual

    def one_step(self, operation, seen):
        twin = self.twin
        if operation["clear"]:
            twin.clear()
            self.cleared = True
        adds, rejected = twin.adds, twin.rejected
        self.add(operation["default_rows"], operation["default_mask"])
        self.add(
            operation["explicit_rows"],
            operation["explicit_mask"],
            operation["explicit_priority"] if self.prioritized else None,
        )
        assert seen["added"]["adds"] - seen["before"]["adds"] == twin.adds - adds
        assert seen["added"]["rejected"] - seen["before"]["rejected"] == twin.rejected - rejected
        assert seen["size"] == twin.size
        self.check_metrics(seen["added"])
        self.check_can_sample(seen)
        drawn = self.check_sample(seen["sample"])
        self.check_weights(seen["weights"], seen["sample"])
        if is_stale(self.name):
            self.twin.drawn(drawn)
        if self.prioritized:
            self.update(operation, seen, drawn)
        if self.name in REMOVABLE:
            twin.remove(drawn, operation["remove_mask"])
        self.check_metrics(seen["updated"])
        if operation["remember"]:
            self.remembered = drawn

    def update(self, operation, seen, drawn):
        chosen = [*drawn, *self.remembered]
        items = [chosen[pick] for pick in operation["pick"]] + [None, None, None]
        rejected = self.twin.rejected
        self.twin.update_priority(items, operation["update_priority"], operation["update_mask"])
        refused = seen["updated"]["rejected"] - seen["added"]["rejected"]
        # Whether a bad priority for a slot that is gone counts as refused is left open.
        bad = [
            take and not reference.is_priority(value)
            for value, take in zip(
                operation["update_priority"], operation["update_mask"], strict=True
            )
        ]
        assert self.twin.rejected - rejected <= refused <= sum(bad)


@every_sampler
@pytest.mark.parametrize("seed", range(LANES))
def test_twin_agrees_after_every_step(name, seed):
    operations, seen = script(seed), scanned(name, seed)
    replay = Replay(name)
    for t in range(STEPS):
        replay.one_step(at(operations, t), at(seen, t))
    assert replay.twin.adds > replay.capacity


# `test_debugging.py` fills all and draws from them without jit; here they are updated as well.
@pytest.mark.parametrize("name", ["epsilon-and-mix", "blended", *sorted(REMOVABLE)[1:]])
def test_eager_is_the_scan(name):
    check(name, EAGER_STEPS)


class VariantsTest(parameterized.TestCase):
    """With arrays of JAX and of NumPy as arguments."""

    # The dtypes of items do not affect samplers, so a few are enough.
    @chex.variants(with_jit=True, with_device=True, without_device=True)
    @parameterized.parameters("uniform", "epsilon-and-mix")
    def test_variant_is_the_scan(self, name):
        check(name, EAGER_STEPS, self.variant)


# Each class of samplers; `test_histories.py` has more of them.
@pytest.mark.parametrize(
    "name",
    [
        "uniform-without-replacement",
        "mix-without-replacement",
        "recent",
        "blended",
        *sorted(REMOVABLE)[1:],
    ],
)
def test_vmap_of_scans_is_the_scan(name):
    carry = jax.tree.map(lambda leaf: np.stack([leaf] * LANES), start(name))
    operations = stack([script(seed) for seed in range(LANES)])
    (buffers, _), seen = jax.device_get(jax.jit(jax.vmap(scan(name)))(carry, operations))
    for lane in range(LANES):
        assert_same(scanned(name, lane), at(seen, lane))
    testing.assert_valid(buffers)
    np.testing.assert_array_equal(buffers.size, seen["updated"]["size"][:, -1])
    assert buffers.capacity == capacity_of(name)


# Those with removals stand for others of their classes.
@pytest.mark.parametrize("name", ["uniform", "varying", "blended", *sorted(REMOVABLE)[1:]])
def test_donated_is_the_scan(name):
    check(name, donates=True)


# As a user's programs are compiled; those of the other tests are not made fast.
OPTIMIZED = {
    name: value
    for name, value in (
        ("xla_backend_optimization_level", 3),
        ("xla_llvm_disable_expensive_passes", False),
        ("xla_cpu_use_fusion_emitters", True),
    )
    if takes_option(name, value)
}


@pytest.mark.parametrize("name", ["uniform", "mix-without-replacement", "recent"])
def test_optimized_is_the_scan(name):
    check(name, transform=functools.partial(jax.jit, compiler_options=OPTIMIZED))
