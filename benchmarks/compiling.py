"""Programs compiled for a device that is not there, from the shapes of their arguments."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxbuf
from benchmarks.harness import Options, Unavailable
from benchmarks.jax_loops import Binding
from benchmarks.running import progress_bar
from benchmarks.workload import Workload

OPERATIONS = ("add", "sample", "update", "cycle")
LIBRARIES = ("jaxbuf", "flashbax")
OPTIONS = Options()

WHOLE = jax.P()
"""Of arrays that every device has."""

Bind = Callable[[Workload], Binding]
Place = Callable[[jax.P], jax.sharding.Sharding]


@dataclasses.dataclass(frozen=True)
class Job:
    """A buffer, and what it is to do.

    Attributes:
        name: Of the buffer.
        workload: The job.
        binds: Makes each library's binding.
        seeds: How many buffers there are, by `vmap`.
        devices: How many devices the buffer lies on.
    """

    name: str
    workload: Workload
    binds: Mapping[str, Bind]
    seeds: int = 1
    devices: int = 1

    def about(self, operation: str) -> list[str]:
        """The cells of a table that say what this is: buffer, operation, slots and batch."""
        workload = self.workload
        batch = workload.add_size if operation == "add" else workload.sample_size
        return [self.name, operation, f"{workload.capacity:,}", f"{batch:,}"]


ABOUT = ("buffer", "operation", "slots", "batch")
"""The heads of the columns of `Job.about`."""


def for_device(bind: Callable[..., Binding], device: str) -> Bind:
    """The binding of flashbax that takes its path for a device, as it does only if it finds one."""

    def bind_device(workload: Workload) -> Binding:
        with mock.patch.object(jax, "devices"):
            return bind(workload, OPTIONS, device)

    return bind_device


def bind_scored(workload: Workload, *, create: Callable[[Any, int], Any]) -> Binding:
    """Buffers of the highest scores, which are the rewards of the items."""
    return Binding(
        create=lambda: create(workload.transitions.example, workload.capacity),
        add=lambda buffer, items: buffer.add(items, score=items["reward"]),
        sample=lambda buffer, key: buffer.sample(key, workload.sample_size),
        call_add=jaxbuf.add,
        call_sample=lambda buffer, key: jaxbuf.sample(buffer, key, workload.sample_size),
        data=lambda sample: sample.data,
    )


def placed(tree: Any, where: jax.sharding.Sharding) -> Any:
    """The shapes of arrays that lie there."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree
    )


def compiled(
    job: Job,
    library: str,
    operation: str,
    place: Place,
    cycle: Callable[[Binding], Callable[..., Any]],
    length: int,
) -> tuple[Any, float] | None:
    """Traces and compiles an operation of a library anew, as it is when it is called from Python.

    Args:
        job: What the buffer is to do.
        library: Whose buffer it is.
        operation: One of `OPERATIONS`.
        place: Tells where an array lies that is sharded like this.
        cycle: Makes a function of the state, items, keys and priorities that scans over the latter.
        length: The number of steps of that scan.

    Returns:
        The program, and the seconds of the CPU that it took; None if the library lacks the
        operation.
    """
    jax.clear_caches()
    began = time.process_time()
    if library not in job.binds:
        return None
    workload, binding = job.workload, job.binds[library](job.workload)
    if operation == "update" and binding.update is None:
        return None

    def shapes(function: Callable[..., Any], *arguments: Any, spec: jax.P = WHOLE) -> Any:
        return placed(jax.eval_shape(function, *arguments), place(spec))

    rows, row = jax.P("data"), jax.P(None, "data")
    state, key = shapes(binding.create, spec=rows), shapes(lambda: jax.random.key(0))
    new = workload.transitions.items(np.arange(workload.add_size))
    items = shapes(lambda: binding.arguments(new)[0], spec=rows)
    size = workload.sample_size
    made: dict[str, Callable[[], tuple[Any, ...]]] = {
        "add": lambda: (binding.add, state, items),
        "sample": lambda: (binding.sample, state, key),
        "update": lambda: (
            binding.update,
            state,
            shapes(lambda *of: binding.slots(binding.sample(*of)), state, key, spec=rows),
            shapes(lambda: jnp.zeros(size), spec=rows),
        ),
        "cycle": lambda: (
            cycle(binding),
            state,
            items,
            shapes(lambda: jax.random.split(jax.random.key(0), length)),
            shapes(lambda: jnp.zeros((length, size)), spec=row),
        ),
    }
    function, *arguments = made[operation]()
    if job.seeds > 1:
        function = jax.vmap(function)
        arguments = jax.tree.map(
            lambda leaf: leaf.update(shape=(job.seeds, *leaf.shape)), arguments
        )
    jitted = jax.jit(function, donate_argnums=None if operation == "sample" else 0)
    return jitted.lower(*arguments).compile(), time.process_time() - began


def chosen(jobs: Sequence[Job], only: str) -> list[tuple[Job, str]]:
    """The jobs, each with an operation whose name and the buffer's a pattern is found in.

    Raises:
        Unavailable: If there are none.
    """
    options = Options(only=only)
    pairs = itertools.product(jobs, OPERATIONS)
    found = [(job, operation) for job, operation in pairs if options.wants(job.name, operation)]
    if not found:
        raise Unavailable(f"nothing matches --only {only}")
    return found


def lines(
    programs: Sequence[tuple[Job, str]], count: Callable[[Job, str, str], Sequence[str] | None]
) -> Iterator[list[str]]:
    """Yields the lines of a table, with a bar of progress.

    Args:
        programs: Jobs with an operation of each.
        count: Makes the cells of a job, a library and an operation, or None if the library lacks
            the operation.
    """
    with progress_bar(len(programs), "operation") as bar:
        for job, operation in programs:
            bar.set_description(f"{job.name}: {operation}", refresh=False)
            found = [count(job, library, operation) for library in LIBRARIES]
            if width := max(len(cells or ()) for cells in found):
                nothing = ["–"] * width
                cells = itertools.chain.from_iterable(cells or nothing for cells in found)
                yield [*job.about(operation), *cells]
            bar.update()
