"""Operations: one function, compiled once when it is called from Python."""

import contextlib
import functools
import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import jaxbuf
from jaxbuf.core import program as programs
from jaxbuf.core.program import program
from tests.traces import counted_traces


class Tally(struct.PyTreeNode):
    """A sum with storage that no operation changes."""

    data: jax.Array
    counters: jax.Array

    @classmethod
    def create(cls):
        return cls(data=jnp.arange(4.0), counters=jnp.zeros(1))

    @program(static=("times",), keeps=("data",))
    def plus(self, number, *, times=1, mask=None):
        taken = 1.0 if mask is None else jnp.sum(mask, dtype=jnp.float32)
        return self.replace(counters=self.counters + times * number * taken)

    @program(reads=("data",))
    def plus_data(self):
        return self.replace(counters=self.counters + jnp.sum(self.data))

    @program()
    def read(self, factor=None):
        return self.data if factor is None else self.data * factor


def test_where_there_are_several_platforms_an_array_says_which(monkeypatch):
    asked = []
    monkeypatch.setattr(programs, "_only_platform", lambda: None)
    monkeypatch.setattr(programs, "platform_of", lambda array: asked.append(array) or "cpu")
    tally = Tally.create()
    assert tally.plus(2.0).counters == 2
    assert len(asked) == 1
    assert asked[0] is tally.counters


def test_it_is_one_program_outside_of_transformations():
    seen = []

    @program(static=("n",))
    def add(x, n=1):
        seen.append(x)
        return x + n

    x = jnp.float32(1)
    for _ in range(3):
        assert add(x) == 2
    assert len(seen) == 1
    assert isinstance(seen[0], jax.core.Tracer)
    assert add(x, 2) == add(x, n=2) == 3
    assert len(seen) == 2
    assert jax.jit(lambda x: add(x, n=2))(x) == 3
    with jax.disable_jit():
        assert add(x, n=5) == 6
    assert add.__name__ == "add"
    assert functools.reduce(lambda y, _: add(y), range(3), x) == 4


@pytest.mark.parametrize("wrong", [np.array(["a"]), np.zeros((2, 3), np.float32)])
def test_an_error_does_not_keep_the_buffer(wrong):
    buffer = jaxbuf.ItemBuffer.create(jnp.zeros(4), 64)
    data = weakref.ref(buffer.data)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            buffer = jaxbuf.add(buffer, wrong)
        assert buffer.size == 0
        del buffer
        assert data() is None
    finally:
        gc.enable()


def test_static_arguments_of_other_types_are_other_programs():
    kinds = []

    @program(static=("n",))
    def kind(x, n):
        kinds.append(type(n))
        return x

    for n in (1, True, 1.0, np.int64(1), "1"):
        kind(jnp.float32(0), n)
    assert kinds == [int, bool, float, str]


def test_a_field_that_is_kept_is_not_passed_through_the_program():
    tally = Tally.create()
    after = tally.plus(2.0, times=3)
    assert after.data is tally.data
    assert (after.counters[0], tally.counters[0]) == (6, 0)
    held = jax.tree.leaves(tally)[0].unsafe_buffer_pointer()
    donated = jaxbuf.ItemBuffer.create(jnp.float32(0), 4, sampler=jaxbuf.Prioritized())
    donated = jaxbuf.add(donated, jnp.arange(4.0))
    storage, occupancy = donated.data, donated.occupancy
    slots = donated.sample(jax.random.key(0), 2).slots
    updated = jaxbuf.update_priority(donated, slots, jnp.ones(2))
    assert updated.data is storage
    assert updated.occupancy is occupancy
    assert held
    with pytest.raises(ValueError, match="buffer was donated"):
        donated.sample(jax.random.key(0), 2)
    apart = updated.update_priority(slots, jnp.full(2, 3.0))
    assert apart.data is storage
    chex.assert_trees_all_equal(updated.data, apart.data)


def test_a_field_that_is_only_read_does_not_come_out_of_the_program():
    tally = Tally.create()
    after = tally.plus_data()
    assert after.data is tally.data
    assert after.counters[0] == 6
    assert tally.replace(data=tally.data + 1).plus_data().counters[0] == 10


def test_options_that_are_none_need_no_program_of_their_own():
    tally = Tally.create()
    tally.plus(1.0)
    with counted_traces() as traces:
        assert tally.plus(2.0, mask=None).counters[0] == 2
    assert not traces


def test_wrong_arguments_raise_what_python_raises():
    tally = Tally.create()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'number'"):
        tally.plus()
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'self' and"):
        Tally.plus()
    with pytest.raises(TypeError, match="multiple values for argument 'number'"):
        tally.plus(1.0, number=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'often'"):
        tally.plus(1.0, often=2)
    with pytest.raises(TypeError, match="positional arguments"):
        tally.plus(1.0, 2)


def test_a_donated_buffer_is_refused_before_its_arguments_are_looked_at():
    tally = Tally.create()
    jax.jit(lambda x: x + 1, donate_argnums=0)(tally.counters)
    with pytest.raises(ValueError, match="buffer was donated"):
        tally.plus("one")


def test_an_array_inside_a_buffer_that_was_donated_alone_is_noticed():
    tally = Tally.create()
    jax.jit(lambda x: x + 1, donate_argnums=0)(tally.data)
    with pytest.raises(ValueError, match="buffer was donated"):
        tally.read()
