"""`explain_memory` tells what is updated in place, and copies are found in compiled programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxbuf
import jaxbuf.testing
from benchmarks.hlo import Work, work
from jaxbuf.testing import hlo

CAPACITY = 2**12
EXAMPLE = {"obs": jnp.zeros(7), "next_obs": jnp.zeros(7), "reward": jnp.float32(0)}
LARGE = ["data['next_obs']", "data['obs']", "data['reward']", "sampler_state.nodes"]
KEYS = jax.random.split(jax.random.key(0), 3)


def create():
    return jaxbuf.ItemBuffer.create(EXAMPLE, CAPACITY, sampler=jaxbuf.Prioritized())


def items(rows=16):
    return jax.tree.map(lambda leaf: jnp.ones((rows, *leaf.shape), leaf.dtype), EXAMPLE)


def short(names):
    return sorted(name.partition(".")[2] for name in names)


def test_a_donated_add_is_in_place():
    buffer = create()
    report = jaxbuf.explain_memory(jaxbuf.add, buffer, items())
    assert report.copied == ()
    assert report.bytes_copied == 0
    assert len(report.in_place) == len(jax.tree.leaves(buffer))
    assert report.bytes_in_place == sum(leaf.nbytes for leaf in jax.tree.leaves(buffer))
    assert "buffer.data['obs']" in report.in_place
    assert "0 B copied, 260.3 KiB updated in place, " in str(report)
    assert report.advice == ""
    assert not buffer.data["obs"].is_deleted()


def test_a_method_takes_its_buffer_along():
    report = jaxbuf.explain_memory(create().add, items())
    assert report.copied == ()
    assert "self.data['obs']" in report.in_place


@pytest.mark.parametrize("name", ["first", "second"])
def test_names_are_those_of_this_call_in_a_cached_program(name):
    # The programs are the same, so the second one comes from the compilation cache of the tests.
    step = {
        "first": lambda first, rows: first.add(rows),
        "second": lambda second, rows: second.add(rows),
    }[name]
    report = jaxbuf.explain_memory(step, create(), items())
    assert f"{name}.data['obs']" in report.in_place


def test_what_is_closed_over_is_told():
    buffer = create()
    report = jaxbuf.explain_memory(lambda rows: buffer.add(rows), items())
    assert report.closed_over_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(buffer.data))
    assert "pass a buffer as an argument" in report.advice
    assert jaxbuf.explain_memory(jaxbuf.add, buffer, items()).closed_over_bytes == 0


def test_without_donation_everything_is_copied():
    report = jaxbuf.explain_memory(jaxbuf.add, create(), items(), donate_argnums=())
    assert set(LARGE) <= set(short(report.copied))
    assert report.in_place == ()
    assert report.bytes_copied == sum(leaf.nbytes for leaf in report.leaves)
    assert "donate" in report.advice
    assert report.advice in str(report).replace("\n", " ")


def test_a_result_beside_the_buffer_is_counted():
    def keep_one(buffer, rows):
        return buffer.add(rows), buffer.data["next_obs"]

    report = jaxbuf.explain_memory(keep_one, create(), items())
    assert report.result_bytes >= CAPACITY * 7 * 4
    assert report.copied == ()
    assert "nothing of the old buffer" in report.advice


def test_abstract_arguments_need_no_memory():
    huge = jax.eval_shape(lambda: jaxbuf.ItemBuffer.create(EXAMPLE, 2**30))
    rows = jax.eval_shape(items)
    report = jaxbuf.explain_memory(jaxbuf.add, huge, rows)
    assert report.copied == ()
    assert "updated in place" in str(report)
    assert report.bytes_in_place > 2**35


def test_a_jitted_function_keeps_its_own_donation():
    @functools.partial(jax.jit, static_argnums=1, donate_argnames="buffer")
    def step(unused, rows, buffer):
        return buffer.add(items(rows))

    report = jaxbuf.explain_memory(step, jnp.zeros(CAPACITY), 16, create())
    assert report.name == "step"
    assert report.copied == ()
    assert set(LARGE) <= set(short(report.in_place))
    undonated = jax.jit(lambda params, state: {"replay": state["replay"].add(items())})
    report = jaxbuf.explain_memory(undonated, jnp.zeros(3), {"replay": create()})
    assert "state['replay'].data['obs']" in report.copied
    assert all(leaf.name.startswith("state") for leaf in report.leaves)


class Agent(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(7, 1, rngs=nnx.Rngs(0))

    def learn(self, buffer, rows):
        return buffer.add(rows), self.layer(rows["obs"]).sum()

    learn_in_place = nnx.jit(learn, donate_argnames="buffer")


def test_functions_of_nnx_keep_their_own_donation():
    buffer, agent = create(), Agent()
    given = functools.partial(jax.jit(lambda _, old, new: old.add(new), donate_argnums=1), 1.0)
    for step, args in (
        (nnx.jit(Agent.learn, donate_argnums=1), (agent, buffer, items())),
        (agent.learn_in_place, (buffer, items())),
        (given, (buffer, items())),
    ):
        report = jaxbuf.explain_memory(step, *args)
        assert report.copied == ()
        assert set(LARGE) <= set(short(report.in_place))
        jaxbuf.testing.assert_no_copy(step, *args)
    copying = nnx.jit(Agent.learn)
    assert "buffer.data['obs']" in jaxbuf.explain_memory(copying, agent, buffer, items()).copied
    with pytest.raises(AssertionError, match=r"buffer.data\['obs'\] .* is copied"):
        jaxbuf.testing.assert_no_copy(copying, agent, buffer, items())


def test_none_in_an_argument_is_not_a_leaf():
    def step(state, rows):
        return {"nothing": None, "buffer": state["buffer"].add(rows)}

    # Before the buffer in the order of leaves, as what equinox.partition leaves out is.
    report = jaxbuf.explain_memory(step, {"a": None, "b": (None, 1.0), "buffer": create()}, items())
    assert set(LARGE) <= set(short(name.partition("]")[2] for name in report.in_place))
    assert report.copied == ()


def test_arguments_have_their_names_also_beside_defaults_and_static_ones():
    def step(buffer, rows, scale=2.0, *more, power=1):
        return buffer.add(rows), scale * power, more

    report = jaxbuf.explain_memory(step, create(), items())
    assert "buffer.data['obs']" in report.in_place
    report = jaxbuf.explain_memory(step, create(), items(), 3.0, jnp.ones(3), donate_argnums=())
    assert "buffer.data['obs']" in report.copied

    def add(number, buffer, key=None):
        return buffer.add(items(number))

    for fn in (jax.jit(add, static_argnums=0, donate_argnums=1), add):
        report = jaxbuf.explain_memory(fn, 16, create(), donate_argnums=1, static_argnums=0)
        assert "buffer.data['obs']" in report.in_place
    report = jaxbuf.explain_memory(
        lambda x, y=1.0, *z: (x, y, z), jnp.ones(3), 2.0, 3.0, donate_argnums=()
    )
    assert [leaf.name for leaf in report.leaves] == ["x", "y", "z[0]"]


def test_memory_of_a_network_is_no_reason_to_change_the_order():
    """Activations take more memory than the buffer, which is updated in place."""

    def step(buffer, weights, key):
        buffer = buffer.add(items())
        obs = buffer.sample(key, 4096).data["obs"]
        loss = lambda w: jnp.tanh(jnp.tanh(obs @ w) @ w.T).sum()  # noqa: E731
        return buffer, jax.grad(loss)(weights)

    report = jaxbuf.explain_memory(step, create(), jnp.ones((7, 256)), KEYS[0])
    assert report.temporary_bytes > CAPACITY * 7 * 4
    assert report.advice == ""


def test_without_buffers_all_arguments_are_looked_at():
    report = jaxbuf.explain_memory(lambda x, y: x + y, jnp.zeros(999), 1.0, donate_argnums=())
    assert report.read == ("x", "y")
    assert jaxbuf.explain_memory(lambda x: x + 1, jnp.zeros(999)).in_place == ("x",)


class Hidden:
    """A compiled function that has no ``trace``, like those of equinox.filter_jit."""

    __wrapped__ = staticmethod(lambda buffer, rows: buffer.add(rows))

    def __call__(self, *args):
        return self.__wrapped__(*args)

    def lower(self, *args):
        return jax.jit(lambda leaves: leaves).lower(jax.tree.leaves(args))


def test_a_function_that_hides_its_arguments_is_refused_with_what_to_pass():
    for tool in (jaxbuf.explain_memory, jaxbuf.testing.assert_no_copy):
        with pytest.raises(ValueError, match=r"fn is a Hidden, .* pass jax.jit\(fn.__wrapped__"):
            tool(Hidden(), create(), items())
        tool(jax.jit(Hidden().__wrapped__, donate_argnums=0), create(), items())


# As compilers for accelerators write it: a copy that runs aside, one that is a kernel of its own,
# one in a branch, one in a loop of unknown length, and one within a kernel, which stores nothing.
ELSEWHERE = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }

%wrapped_copy_computation (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %copy.1 = f32[64,64]{1,0} copy(%p)
}

%inner (q: f32[64,64]) -> f32[64] {
  %q = f32[64,64]{1,0} parameter(0)
  %copy.2 = f32[64,64]{0,1} copy(%q)
  ROOT %reduce.1 = f32[64]{0} bitcast(%copy.2)
}

%branch (r: (f32[4096], s32[])) -> (f32[4096]) {
  %r = (f32[4096]{0}, s32[]) parameter(0)
  %gte.1 = f32[4096]{0} get-tuple-element(%r), index=0
  %copy.3 = f32[4096]{0} copy(%gte.1)
  ROOT %tuple.1 = (f32[4096]{0}) tuple(%copy.3)
}

%body (s: (s32[], f32[4096], /*index=2*/f32[8])) -> (s32[], f32[4096], f32[8]) {
  %s = (s32[], f32[4096]{0}, /*index=2*/f32[8]{0}) parameter(0)
  %gte.2 = s32[] get-tuple-element(%s), index=0
  %gte.3 = f32[4096]{0} get-tuple-element(%s), index=1
  %gte.4 = f32[8]{0} get-tuple-element(%s), index=2
  %copy.4 = f32[4096]{0} copy(%gte.3)
  ROOT %tuple.2 = (s32[], f32[4096]{0}, f32[8]{0}) tuple(%gte.2, %copy.4, %gte.4)
}

%condition (t: (s32[], f32[4096], f32[8])) -> pred[] {
  %t = (s32[], f32[4096]{0}, f32[8]{0}) parameter(0)
  ROOT %constant.1 = pred[] constant(true)
}

ENTRY %main (a: f32[64,64], b: f32[4096], c: f32[8]) -> (f32[64,64], f32[4096]) {
  %a = f32[64,64]{1,0} parameter(0), metadata={op_name="buffer.data[\\'obs\\']"}
  %b = f32[4096]{0} parameter(1), metadata={op_name="buffer.nodes"}
  %c = f32[8]{0} parameter(2)
  %n = s32[] constant(0)
  %copy-start.1 = (f32[64,64]{1,0}, f32[64,64]{1,0}, u32[]) copy-start(%a)
  %copy-done.1 = f32[64,64]{1,0} copy-done(%copy-start.1)
  %wrapped_copy = f32[64,64]{1,0} fusion(%copy-done.1), kind=kLoop, calls=%wrapped_copy_computation
  %sums = f32[64]{0} fusion(%a), kind=kInput, calls=%inner
  %tuple.3 = (f32[4096]{0}, s32[]) tuple(%b, %n)
  %cond = (f32[4096]{0}) conditional(%n, %tuple.3, %tuple.3), branch_computations={%branch, %branch}
  %gte.5 = f32[4096]{0} get-tuple-element(%cond), index=0
  %tuple.4 = (s32[], f32[4096]{0}, f32[8]{0}) tuple(%n, %gte.5, %c)
  %while.1 = (s32[], f32[4096]{0}, f32[8]{0}) while(%tuple.4), condition=%condition, body=%body
  %gte.6 = f32[4096]{0} get-tuple-element(%while.1), index=1
  ROOT %tuple.5 = (f32[64,64]{1,0}, f32[4096]{0}) tuple(%wrapped_copy, %gte.6)
}
"""


def test_copies_in_programs_for_other_backends():
    # The copy that starts, the kernel, those in the branch and in the loop; none within a kernel.
    assert sorted(hlo.copies(ELSEWHERE, 64)) == [
        ((64, 64), 64 * 64 * 4, False, False),
        ((64, 64), 64 * 64 * 4, False, False),
        ((4096,), 4096 * 4, False, True),
        ((4096,), 4096 * 4, True, False),
    ]
    assert hlo.copies(ELSEWHERE, 64 * 64 * 4 + 1) == []


def test_work_in_programs_for_other_backends():
    # Both branches count; of a loop of unknown length one step does.
    assert work(ELSEWHERE, 64) == Work(kernels=6, waits=2, copied=5 * 4096 * 4)
    known = 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    looped = ELSEWHERE.replace("body=%body", known)
    assert work(looped, 64) == Work(kernels=10, waits=1, copied=9 * 4096 * 4)
