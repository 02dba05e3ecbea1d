"""Limits of the machine: the floors under the times of the rows.

Each is measured in the same run, by the least time of several blocks:

* **copy**: a large jitted copy into allocated memory; it counts bytes read and bytes written.
* **jump**: the time of one 4-byte read at a random cache line of an array, among very many
  independent ones, as in a jitted gather. Arrays that fit in a cache are faster, so it is measured
  for an array as large as the memory that the operation jumps about in.
* **dispatch**: a call of a jitted function that does nothing, from Python until its result is
  there, with as many given, donated and returned arrays as the timed call.

The floor under an operation is the time to move its data ([`Traffic`][benchmarks.limits.Traffic])
at these rates, plus one dispatch for every call from Python. It does not include looking something
up in a tree or drawing random numbers: the distance from the floor is the time that an algorithm
needs beyond moving data. Data that stays in a cache from one iteration to the next, such as large
items that are added over and over, may be faster than memory, and thus than the floor.

Whole agents and rows of several processes have no floor. In these rows another contestant, such as
a step without an exchange, shows the best possible time.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LINE = 64
"""Bytes of a cache line, the smallest unit that memory transfers."""

COPIED = 2**28
LARGEST = 2**29
"""Jumps in arrays beyond this size are taken to cost what they cost in one of this size."""

BLOCKS = 7


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The data that an operation has to move in any library.

    Attributes:
        streamed: Bytes read or written one after the other: of what is given or returned, and of
            what follows upon the first line of a place in the buffer.
        jumps: Places anywhere in the buffer that are read or written; a place that is read and
            written counts once, and so does only its first line.
        within: Bytes of the buffer, in which these places lie.
    """

    streamed: int = 0
    jumps: int = 0
    within: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        """Both, one after the other."""
        return Traffic(
            self.streamed + other.streamed,
            self.jumps + other.jumps,
            max(self.within, other.within),
        )

    def seconds(self) -> float:
        """The least time this takes here."""
        jumping = self.jumps * jump_seconds(self.within) if self.jumps else 0.0
        return self.streamed / copy_rate() + jumping


def gathered(rows: int, row_bytes: Iterable[int], within: int) -> Traffic:
    """Rows fetched from anywhere in a buffer and written one after the other.

    Every leaf lies by itself: a row of it is one jump, and what it has beyond one line is streamed.

    Args:
        rows: How many.
        row_bytes: Bytes of a row in each leaf.
        within: Bytes of the buffer.
    """
    sizes = list(row_bytes)
    beyond = sum(max(0, size - LINE) for size in sizes)
    return Traffic(rows * (beyond + sum(sizes)), rows * len(sizes), within)


@functools.cache
def copy_rate() -> float:
    """Bytes read and written in a second by a large copy."""
    size = COPIED if jax.default_backend() == "cpu" else 4 * COPIED
    source = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda into, given: given.copy(), donate_argnums=0, keep_unused=True)
    into = [copy(jnp.ones_like(source), source)]

    def once() -> jax.Array:
        into[0] = copy(into[0], source)
        return into[0]

    return 2 * size / _least_seconds(once, calls=4)


def jump_seconds(within: int) -> float:
    """Seconds per read at a random place, in an array of about so many bytes."""
    return _jump_seconds(min(LARGEST, 2 ** math.ceil(math.log2(max(within, 2**12)))))


@functools.cache
def _jump_seconds(within: int) -> float:
    lines = within // LINE
    # Enough to take longer than a launch, on devices with launches.
    jumps = 2**18 if jax.default_backend() == "cpu" else 2**23
    places = np.random.default_rng(0).integers(0, lines, jumps) * (LINE // 4)
    given = jnp.zeros(lines * (LINE // 4), jnp.float32), jnp.asarray(places, jnp.int32)
    gather = jax.jit(lambda array, places: array.at[places].get(mode="promise_in_bounds"))
    return _least_seconds(lambda: gather(*given), calls=4) / jumps


@functools.cache
def dispatch_seconds(donated: int, given: int, made: int) -> float:
    """Seconds of a call from Python that does nothing, until its result is there.

    Args:
        donated: Arrays given and returned, their memory taken over.
        given: Arrays given besides.
        made: Arrays returned besides, scalars.
    """
    state, rest = _scalars(donated), _scalars(given)
    call = empty(made)
    held = [call(state, rest)]

    def once() -> Any:
        kept, new = held[0] = call(held[0][0], rest)
        (kept or new)[0].block_until_ready()
        return new

    return _least_seconds(once, calls=200)


@functools.cache
def empty(made: int) -> Callable[[Any, Any], Any]:
    """A jitted function that returns its first argument, donated, and so many new scalars."""

    def nothing(state: Any, given: Any) -> Any:
        del given
        return state, (jnp.float32(0.0),) * made

    return jax.jit(nothing, donate_argnums=0, keep_unused=True)


def _scalars(count: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.float32(number) for number in range(count))


def _least_seconds(call: Callable[[], Any], calls: int) -> float:
    """The least seconds per call over blocks of calls."""
    jax.block_until_ready(call())
    seconds: list[float] = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - start) / calls)
    return min(seconds)


def forget() -> None:
    """Lets all be measured anew."""
    for measured in (copy_rate, _jump_seconds, dispatch_seconds):
        measured.cache_clear()


def facts() -> dict[str, str]:
    """The rates, for the table of the machine."""
    return {
        "copy, bytes read and written": f"{copy_rate() / 1e9:.1f} GB/s",
        "random reads in 1 MiB, in 512 MiB": " and ".join(
            f"{jump_seconds(size) * 1e9:.2f}" for size in (2**20, 2**29)
        )
        + " ns each",
        "call of an empty jitted function, 8 arrays": f"{dispatch_seconds(8, 0, 0) * 1e6:.0f} µs",
    }
