"""Rate limiters: the numbers of Reverb and DI-engine, and exact over any number of steps."""

import fractions
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.traces import LOWERED, counted_traces

# Ratio, least size and range; inserts and samples in turn, of several at once where a number says
# so, with a "!" where they are refused, a "?" where they are only asked for; "-" removes an item.
REVERB = {
    "samples until enough was inserted": ((1.0, 2, -1.0, 1.0), "!s i !s i s"),
    "nothing within the range": ((1.5, 1, -3.0, 3.1), "i i s s s s s s !s"),
    # The insert that is refused would lead to an error of 3.5.
    "what leaves the range": ((1.5, 2, -1.0, 3.0), "!s i !s i s !i s i"),
    "samples of several": ((1.0, 1, -1.0, 1.0), "!s i ?s ?s2 !s3"),
    "inserts of several": ((1.5, 2, 0.0, 5.0), "?i ?i2 ?i3 !i4 i i i !i s s ?i !i2"),
    "the items that are left": ((5.0, 2, 0.0, 10.0), "i i !i s - ?i !s i s"),
}


def follow(script, limiter, size=0):
    """Returns a limiter after a script, and how many items there are."""
    for word in script.split():
        if word == "-":
            size -= 1
            continue
        asked, kind, number = re.fullmatch("([!?]?)([is])(.*)", word).groups()
        count = int(number or 1)
        able = limiter.can_insert if kind == "i" else limiter.can_sample
        assert bool(able(size, count)) == (asked != "!")
        if not asked:
            limiter = limiter.inserted(count) if kind == "i" else limiter.sampled(count)
            size += count * (kind == "i")
    return limiter, size


@pytest.mark.parametrize("case", REVERB)
def test_reverb_blocks(case):
    (ratio, min_size, *bounds), script = REVERB[case]
    follow(script, jaxbuf.RateLimiter.create(ratio, min_size, tuple(bounds)))


def test_reverb_accepts_what_it_accepts():
    for arguments in ((0.5, 10, 1.1), (1, 10, (5, 9)), (1, 10, (7, 12)), (1, 10, 100)):
        jaxbuf.RateLimiter.create(*arguments)
    # One number is a range around the start.
    limiter = jaxbuf.RateLimiter.create(0.5, 10, 1.5)
    assert limiter.range == (3.5, 6.5)
    assert (limiter.numerator, limiter.denominator) == (1, 2)


def test_a_limiter_beside_another_buffer_than_its_own():
    def allowed(limiter, size):
        return sum(bool(limiter.can_sample(size, count)) for count in range(1, 100))

    new = jaxbuf.RateLimiter.create(4.0, min_size=8, tolerance=16.0)
    begun = new.inserted(8)
    assert allowed(begun, 8) == 16
    # Both of the first 8 rows are counted beside a new buffer.
    assert allowed(begun.inserted(10).sampled(40).inserted(8), 8) == 16 + 8 * 4
    # Beside an older buffer, its first 8 rows have to be counted.
    assert (allowed(new, 50), allowed(new.inserted(8), 50)) == (0, 16)


def test_only_a_minimum_size():
    limiter = jaxbuf.RateLimiter.create(1.0, 3)
    limiter = limiter.inserted(2**31 - 1).sampled(5)
    assert [bool(limiter.can_sample(size, 100)) for size in (2, 3)] == [False, True]
    assert limiter.can_insert(10, 10**6)


@pytest.mark.parametrize(
    ("ratio", "low", "high"), [(1.5, -1.0, 3.0), (0.1, -2.0, 0.9), (8.0, -20.0, 29.29)]
)
def test_random_steps_agree_with_fractions(ratio, low, high):
    random = np.random.default_rng(1)
    exact = fractions.Fraction(str(ratio))
    bounds = fractions.Fraction(str(low)), fractions.Fraction(str(high))
    start = jaxbuf.RateLimiter.create(ratio, 2, (low, high))
    inserts = random.random(300) < 0.5
    counts = random.integers(1, 4, 300).astype(np.int32)

    def step(carry, row):
        limiter, size = carry
        insert, count = row
        allowed = jnp.where(
            insert, limiter.can_insert(size, count), limiter.can_sample(size, count)
        )
        taken = jnp.where(allowed, count, 0)
        added = jnp.where(insert, taken, 0)
        limiter = limiter.inserted(added).sampled(taken - added)
        # A buffer of eight.
        return (limiter, jnp.minimum(size + added, 8)), allowed

    (limiter, _), allowed = jax.jit(lambda rows: jax.lax.scan(step, (start, jnp.int32(0)), rows))(
        (inserts, counts)
    )
    error, size, expected = fractions.Fraction(0), 0, []
    for insert, count in zip(inserts.tolist(), counts.tolist(), strict=True):
        if insert:
            expected.append(size + count <= 2 or error + count * exact <= bounds[1])
        else:
            expected.append(size >= 2 and error - count >= bounds[0])
        if expected[-1]:
            error += count * exact if insert else -count
            size = min(size + count, 8) if insert else size
    np.testing.assert_array_equal(allowed, expected)
    assert 20 < sum(expected) < 280
    assert float(limiter.metrics()["error"]) == pytest.approx(float(error))


def test_past_2_to_the_32_steps():
    limiter = jaxbuf.RateLimiter.create(0.3, 1, (-5.0, 5.0))
    limiter = limiter.replace(counters=jnp.full((2,), 2**32 - 1, jnp.uint32))
    limiter = limiter.inserted(10).sampled(3)
    assert (limiter.metrics()["inserts"], limiter.metrics()["samples"]) == (9, 2)
    assert float(limiter.metrics()["error"]) == 0
    assert limiter.can_insert(5, 16)
    assert not limiter.can_insert(5, 17)
    # Far out of its range the error saturates instead of turning over.
    for _ in range(3):
        limiter = limiter.inserted(2**31 - 1)
    assert not limiter.can_insert(5)
    assert limiter.can_sample(5, 1000)


def test_di_engine_rates():
    """Max 2, min .5, ratio 1.5, window 5 s."""
    limiter = jaxbuf.ThroughputLimiter.create(
        samples_per_insert=(0.5, 2.0), window=5.0, min_batches=1.5
    )
    limiter, size = follow("i30 s19 s19 s19", limiter)
    assert limiter.counts.tolist() == [30, 57]
    # 30 / 76 is below .5, and 30 / 21 below 1.5; then 120 / 57 is above 2.
    limiter, size = follow("!s19 !s21 i30 i30 !i30", limiter, size)
    np.testing.assert_allclose(limiter.after(5.0).counts, [0.9, 0.57], rtol=1e-5)
    second = limiter
    for _ in range(5):
        second = second.after(jnp.float32(1))
    np.testing.assert_allclose(second.counts, limiter.after(5).counts, rtol=1e-5)


def test_throughput_without_bounds_or_samples():
    limiter = jaxbuf.ThroughputLimiter.create()
    follow("?i1000000", limiter)
    follow("?s8", limiter, 8)
    follow("!s8", limiter, 7)
    # Nothing was sampled so far.
    limiter = jaxbuf.ThroughputLimiter.create(samples_per_insert=(1.0, math.inf))
    follow("i100 ?i100 s !i", limiter)


def rate(*arguments):
    return lambda: jaxbuf.RateLimiter.create(*arguments)


def throughput(*arguments, **options):
    return lambda: jaxbuf.ThroughputLimiter.create(*arguments, **options)


BAD = [
    (rate(1e-5), "samples_per_insert is 1e-05; expected at least 1 / 1000"),
    (rate(5, 10, 4), "tolerance is 4, a range of 8; expected one of at least 10"),
    (rate(0.5, 10, 0.9), "tolerance is 0.9, a range of 1.8; expected one of at least 2"),
    (rate(5, 10, (8, 12)), "tolerance is (8, 12), a range of 4;"),
    (rate(0.1, 10, (9.5, 10.5)), "tolerance is (9.5, 10.5), a range of 1;"),
    (rate(1, 10, (11, 15)), "tolerance begins at 11.0, above samples_per_insert * min_size = 10"),
    (rate(0.123, 2**28, 10), "too large to count exactly at a ratio of 123/1000"),
    (
        throughput(samples_per_insert=(2.0, 1.0)),
        "samples_per_insert is (2.0, 1.0); expected bounds",
    ),
    (throughput(samples_per_insert=(-1, 1.0)), "samples_per_insert is (-1, 1.0); expected bounds"),
    *(
        (
            lambda name=name: jaxbuf.RateLimiter.create(samples_per_insert=2.0, **{name: 3}),
            f"{name} was given, but RateLimiter.create has no use for it; it takes "
            "samples_per_insert, min_size (Reverb's min_size_to_sample) and tolerance (its "
            "error_buffer,",
        )
        for name in ("error_buffer", "samples_per_insert_ratio", "min_size_to_sample", "max_diff")
    ),
    (
        throughput(window_seconds=3),
        "window_seconds was given, but ThroughputLimiter.create has no use for it; it takes",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


STEPS = {
    "rate": lambda: jaxbuf.RateLimiter.create(1.0, 2, 4.0).inserted(3).sampled(1),
    "throughput": lambda: (
        jaxbuf.ThroughputLimiter.create(samples_per_insert=(0.5, 2.0)).inserted(3).sampled(1)
    ),
}
every_limiter = pytest.mark.parametrize("create", STEPS.values(), ids=STEPS)


@every_limiter
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, bool])
def test_a_count_of_any_width(create, dtype):
    limiter = create()
    expected = limiter.inserted(1).sampled(1)
    chex.assert_trees_all_equal(limiter.inserted(dtype(1)).sampled(dtype(1)), expected)


@every_limiter
def test_a_negative_count_that_is_traced_counts_as_none(create):
    limiter = create()
    counted = jax.jit(lambda limiter, n: limiter.inserted(n).sampled(n))(limiter, -5)
    chex.assert_trees_all_equal(counted, limiter)


@pytest.mark.parametrize(
    ("inserts", "samples", "least", "ratio"),
    [(8, 256, 100, 4.0), (1, 3, 10, 0.3), (40, 1, 1, 1.5), (20, 30, 1000, 2.0)],
)
def test_a_tolerance_for_several_at_once_never_blocks_for_good(inserts, samples, least, ratio):
    start = jaxbuf.RateLimiter.create(ratio, least, inserts * ratio + samples)

    def step(carry, coin):
        limiter, size = carry
        insert, sample = limiter.can_insert(size, inserts), limiter.can_sample(size, samples)
        inserted = jnp.where(insert & (~sample | coin), inserts, 0)
        sampled = jnp.where(sample & (inserted == 0), samples, 0)
        return (limiter.inserted(inserted).sampled(sampled), size + inserted), insert | sample

    coins = jax.random.bernoulli(jax.random.key(0), shape=(500,))
    _, able = jax.jit(lambda coins: jax.lax.scan(step, (start, jnp.int32(0)), coins))(coins)
    assert able.all()


def test_time_that_runs_backwards_changes_no_count():
    limiter = jaxbuf.ThroughputLimiter.create(samples_per_insert=(0.5, 2.0)).inserted(3).sampled(1)
    for seconds, counts in ((-5.0, [3, 1]), (math.nan, [3, 1]), (math.inf, [0, 0])):
        assert limiter.after(seconds).counts.tolist() == counts


@pytest.mark.slow
@every_limiter
def test_each_call_from_python_is_one_program(create):
    limiter, size, few = create(), jnp.int32(5), jnp.uint8(3)
    steps = {
        "can_insert": lambda limiter: limiter.can_insert(size, 2),
        "can_sample": lambda limiter: limiter.can_sample(size, np.int64(2)),
        "inserted": lambda limiter: limiter.inserted(2),
        "sampled": lambda limiter: limiter.sampled(few),
        "metrics": lambda limiter: limiter.metrics(),
    }
    if isinstance(limiter, jaxbuf.ThroughputLimiter):
        steps["after"] = lambda limiter: limiter.after(0.5)
    jax.clear_caches()
    for name, step in steps.items():
        for programs_made in (1, 0):
            with counted_traces(LOWERED) as programs:
                found = step(limiter)
            assert len(programs) == programs_made, name
        # Inside the caller's own program it is the plain method.
        chex.assert_trees_all_close(jax.jit(step)(limiter), found, rtol=1e-6)
