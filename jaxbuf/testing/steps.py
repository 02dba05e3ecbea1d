"""Checks that a training step updates a buffer in place, and that a run can be interrupted."""

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxbuf.core import trees
from jaxbuf.core.problems import differing
from jaxbuf.core.sizes import check_count, format_bytes
from jaxbuf.io.checkpoint import load, save
from jaxbuf.monitoring.memory import ORDER, LeafMemory, compile_step
from jaxbuf.testing.hlo import typed_copies
from jaxbuf.testing.structures import check_concrete, report


def assert_no_copy(
    step: Callable[..., Any],
    buffer: Any,
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    smallest: int = 1024,
) -> None:
    """Checks that a compiled step, to which the buffer is donated, updates it in place.

    The step is compiled but not run. Check a step that ``jax.lax.scan`` repeats within the loop,
    since XLA treats loops differently:
    ``assert_no_copy(lambda buffer, keys: jax.lax.scan(step, buffer, keys), buffer, keys)``.

    Args:
        step: The step; its first argument is donated. A function that ``jax.jit`` or flax's
            ``nnx.jit`` returned keeps its own donated and static arguments.
        buffer: A buffer, or a training state with buffers in it, as arrays or as the shapes that
            ``jax.eval_shape`` returns.
        *args: Other arguments of the step.
        static_argnums: Positions of static arguments, as in ``jax.jit``.
        smallest: Leaves of fewer bytes may be copied; small counters always are.

    Raises:
        AssertionError: If a leaf is copied. The message names it, says how often, and what helps.
        ValueError: If no leaf has at least ``smallest`` bytes, so that nothing would be checked,
            or ``step`` is one of equinox's ``filter_jit``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf, jaxbuf.testing
        >>> buffer = jaxbuf.ItemBuffer.create({"obs": jnp.zeros(8)}, capacity=10_000)
        >>> items = {"obs": jnp.ones((32, 8))}
        >>> jaxbuf.testing.assert_no_copy(jaxbuf.ItemBuffer.add, buffer, items)
        >>> jaxbuf.testing.assert_no_copy(jax.jit(jaxbuf.ItemBuffer.add), buffer, items)
        Traceback (most recent call last):
        AssertionError: the step copies what it could update in place:
          self.data['obs'] (312.5 KiB) is copied
          A buffer that is not donated must stay as it was, ...
    """
    smallest = check_count("smallest", smallest)
    memory, program = compile_step(step, (buffer, *args), 0, static_argnums, smallest)
    watched = [leaf for leaf in memory.leaves if leaf.in_buffer] or list(memory.leaves)
    large = [leaf for leaf in watched if leaf.nbytes >= smallest]
    if not large:
        raise ValueError(
            f"buffer has no leaf of {smallest} bytes or more, so that nothing would be checked; "
            "pass a larger one, such as jax.eval_shape makes, or another smallest"
        )
    problems = {leaf.name: _describe(leaf) for leaf in large if leaf.fate == "copied"}
    for dtype, copy in sorted(typed_copies(program, smallest), key=lambda pair: -pair[1].nbytes):
        # The program has the dtype and the shape of a copy, but not the leaf.
        alike = [leaf for leaf in large if leaf.may_be(dtype, copy.shape)]
        suffix = " in each step of a loop" if copy.in_loop else ""
        if alike:
            names = " or ".join(leaf.name for leaf in alike)
            problems[names] = _describe(alike[0], names) + suffix
    if problems:
        title = "the step copies what it could update in place:"
        report(title, [*problems.values(), memory.advice or ORDER])


def _describe(leaf: LeafMemory, names: str = "") -> str:
    return f"{names or leaf.name} ({format_bytes(leaf.nbytes)}) is copied"


def assert_resumes(
    step: Callable[..., Any],
    buffer: Any,
    *args: Any,
    steps: int = 4,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Checks that a run that is saved and loaded half way ends like an uninterrupted one.

    ``step`` is called ``steps`` times, each time with the state that it returned last. Then the run
    is repeated, but half way its state is saved by ``jaxbuf.save`` and loaded by ``jaxbuf.load``
    into a state as it was at the start. All results must be the same, bit for bit.

    Args:
        step: The step. It takes a state and ``args``, and returns the next state or a tuple of that
            and other results. It may donate the state.
        buffer: A buffer, or the whole state of a run: a pytree with the buffer, parameters, the
            state of an optimizer and a PRNG key. State that the step keeps elsewhere is not saved.
        *args: Other arguments of each step.
        steps: Number of steps in a run, at least 2.
        path: A folder for the checkpoint; None for one that is deleted afterwards.

    Raises:
        AssertionError: If the state cannot be saved or loaded, or the two runs differ. The message
            names the leaves that differ.
        ValueError: If ``steps`` is less than 2, or ``buffer`` is traced or was donated.

    Example:
        >>> import jax, jax.numpy as jnp, jaxbuf, jaxbuf.testing
        >>> buffer = jaxbuf.ItemBuffer.create(jnp.float32(0), 8, sampler=jaxbuf.Prioritized())
        >>> def step(state):
        ...     key, subkey = jax.random.split(state["key"])
        ...     buffer = state["buffer"].add(jnp.arange(3.0))
        ...     batch = buffer.sample(subkey, 2)
        ...     buffer = buffer.update_priority(batch.slots, batch.data)
        ...     return {"buffer": buffer, "key": key}, batch.data.mean()
        >>> state = {"buffer": buffer, "key": jax.random.key(0)}
        >>> jaxbuf.testing.assert_resumes(step, state)
    """
    check_concrete(buffer, "buffer")
    steps = check_count("steps", steps, least=2)
    half = steps // 2

    def run(state: PyTree, count: int) -> tuple[PyTree, list[PyTree]]:
        # A copy, which may be donated.
        arrays = jax.Array | np.ndarray
        state = jax.tree.map(lambda x: x.copy() if isinstance(x, arrays) else x, state)
        outputs: list[PyTree] = []
        for _ in range(count):
            state, output = _split(step(state, *args), state)
            outputs.append(output)
        return state, outputs

    middle, outputs = run(buffer, half)
    with tempfile.TemporaryDirectory() as temporary:
        folder = temporary if path is None else path
        try:
            save(folder, middle)
            loaded = load(folder, like=buffer)
        except ValueError as error:
            raise AssertionError(f"a state after {half} steps does not load: {error}") from error
    end, later_outputs = run(loaded, steps - half)
    uninterrupted = run(buffer, steps)
    problems = _differences((end, [*outputs, *later_outputs]), uninterrupted)
    if problems:
        title = f"the run that was loaded after {half} of {steps} steps ends in another way:"
        if _differences(run(buffer, steps), uninterrupted):
            title = "the step does not do the same each time, with or without a checkpoint:"
        report(title, problems)


def _split(result: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Splits the result of a step into the next state and its other results."""
    if isinstance(result, tuple) and jax.tree.structure(result) != jax.tree.structure(state):
        return result[0], result[1:]
    return result, ()


def _differences(
    run: tuple[PyTree, list[PyTree]], expected: tuple[PyTree, list[PyTree]]
) -> list[str]:
    problems: list[str] = []
    for name, tree, like in zip(("buffer", "outputs"), run, expected, strict=True):
        if not trees.alike(tree, like):
            return [f"{name} is not built as before"]
        problems += differing(name, tree, like, "as without a checkpoint")
    return problems
