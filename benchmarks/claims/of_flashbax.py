"""flashbax: the docstring of `jaxbuf.interop.flashbax`, and "Moving from another library"."""

import flashbax as fbx
import jax
import jax.numpy as jnp

from benchmarks.claims import claim, names_of

KEY = jax.random.key(0)


def prioritised(*priorities, capacity=8, batch=8, steps=1):
    """A buffer, and a state with the numbers 0 to 5 in one row, and these priorities of item 0."""
    buffer = fbx.make_prioritised_trajectory_buffer(
        1, batch, steps, 1, steps, max_length_time_axis=capacity, priority_exponent=1.0
    )
    state = buffer.add(buffer.init(jnp.int32(0)), jnp.arange(6)[None])
    for priority in priorities:
        state = buffer.set_priorities(state, jnp.array([0]), jnp.array([priority]))
    return buffer, state


def drawn(buffer_and_state):
    buffer, state = buffer_and_state
    return sorted(buffer.sample(state, KEY).indices.tolist())


def total(buffer_and_state):
    return float(buffer_and_state[1].sum_tree_state.nodes[0])


def of_a_new_item(*priorities):
    buffer, state = prioritised(*priorities)
    tree = buffer.add(state, jnp.full((1, 1), 9)).sum_tree_state
    return fbx.buffers.sum_tree.get(tree, jnp.array([6])).item()


claim("has no n-step returns, frame stacks, hindsight or limits on use", [])(
    lambda: names_of(fbx, "step|frame|stack|hindsight|stale|reuse")
)
claim("a sample has no importance weights", "experience indices probabilities")(
    lambda: " ".join(sorted(prioritised()[0].sample(prioritised()[1], KEY)))
)
claim("draws an item twice in a batch", True)(lambda: len(set(drawn(prioritised(batch=7)))) < 7)
claim("new items get the largest priority ever, cut to an integer: 2.0 after 2.9 and 1", 2.0)(
    lambda: of_a_new_item(2.9, 1.0)
)
claim("takes priorities of NaN, -1 and infinity, into the sum of all", "nan, 4.0, inf")(
    lambda: ", ".join(str(total(prioritised(priority))) for priority in (jnp.nan, -1.0, jnp.inf))
)
claim("sums are accumulated: the sum of six ones after 1e8 and back to 1 is not 6", True)(
    lambda: total(prioritised(1e8, 1.0)) != 6.0
)


@claim("works inside jit, scan and vmap", (3, 5, 8))
def _():
    buffer, state = prioritised()
    row = jnp.zeros((1, 1), jnp.int32)
    step = lambda state, key: (buffer.add(state, row), buffer.sample(state, key).indices)  # noqa: E731
    run = jax.jit(jax.vmap(lambda keys: jax.lax.scan(step, state, keys)[1]))
    return run(jax.random.split(KEY, (3, 5))).shape


@claim("gives a new item the priority that was meant for the one it replaced", [0] * 8)
def _():
    buffer, state = prioritised(capacity=6)
    state = buffer.add(state, jnp.full((1, 1), 9))  # It takes the place of item 0.
    return drawn((buffer, buffer.set_priorities(state, jnp.array([0]), jnp.array([1e9]))))


@claim("a priority makes a window drawable that is not complete", [5] * 8)
def _():
    buffer, state = prioritised(steps=4)  # Windows begin at 0, 1 and 2.
    return drawn((buffer, buffer.set_priorities(state, jnp.array([5]), jnp.array([1e9]))))


@claim("sampling too early returns rows that nobody added", (False, [0, 0]))
def _():
    buffer = fbx.make_item_buffer(max_length=8, min_length=2, sample_batch_size=2)
    state = buffer.init(jnp.int32(0))
    return bool(buffer.can_sample(state)), buffer.sample(state, KEY).experience.tolist()


@claim("a queue overwrites what was not read: of 0 to 5, a queue of 4 gives 4 and 5 first", [4, 5])
def _():
    queue = fbx.make_trajectory_queue(4, 1, 2, 2)
    state = queue.init(jnp.int32(0))
    for first in (0, 2, 4):
        state = queue.add(state, jnp.arange(first, first + 2)[None])
    return queue.sample(state)[1].experience[0].tolist()


@claim("a mixer of 4 rows returns 3 where a part samples 1 row", 3)
def _():
    parts = [fbx.make_item_buffer(8, 1, size) for size in (1, 8)]
    states = [part.add(part.init(jnp.int32(0)), jnp.int32(7)) for part in parts]
    return len(fbx.make_mixer(parts, 4, [0.5, 0.5]).sample(states, KEY).experience)


@claim("without priorities, windows start at multiples of the period from the oldest step", [2, 5])
def _():
    buffer = fbx.make_trajectory_buffer(1, 64, 3, 3, 3, max_length_time_axis=6)
    state = buffer.add(buffer.init(jnp.int32(0)), jnp.arange(6)[None])
    state = buffer.add(state, jnp.arange(6, 8)[None])
    return sorted(set(buffer.sample(state, KEY).experience[:, 0].tolist()))
