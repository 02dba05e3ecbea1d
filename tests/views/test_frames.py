"""`stack_frames` against one loop per stack, and at its edges."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbuf
from tests.operations import quick


def window(obs, terminated, truncated=None):
    fields = {"obs": jnp.asarray(obs), "terminated": jnp.asarray(terminated, bool)}
    return fields if truncated is None else {**fields, "truncated": jnp.asarray(truncated, bool)}


def stack(obs, ends, t, n):
    """The frames an agent had at step ``t``, and whether all of them are in the window."""
    frames, missing = [obs[t]], False
    while len(frames) < n:
        at_start = t == 0 or ends[t - 1]
        missing |= t == 0
        t -= not at_start
        frames.insert(0, obs[t])
    return np.stack(frames), not missing


@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.parametrize("cut", [True, False])
def test_agrees_with_one_loop_per_stack(n, cut):
    random = np.random.default_rng(n)
    obs = random.integers(0, 255, (12, 6, 2), np.uint8)
    terminated, truncated = random.random((2, 12, 6)) < 0.2
    ends = terminated | truncated if cut else terminated
    first = random.random(12) < 0.3
    given = window(obs, terminated, truncated if cut else None)
    stacks = jax.jit(lambda w, first: jaxbuf.stack_frames(w, n, first=first))(given, first)
    chex.assert_shape(stacks.frames, (12, 6, 2, n))
    assert (stacks.frames.dtype, stacks.complete.dtype) == (jnp.uint8, jnp.bool_)
    for row in range(12):
        for t in range(6):
            expected, complete = stack(obs[row], ends[row], t, n)
            np.testing.assert_array_equal(stacks.frames[row, t], expected.T)
            assert stacks.complete[row, t] == (complete or first[row])


@pytest.mark.parametrize("padding", ["first", "zeros"])
@pytest.mark.parametrize(
    ("n", "dtype"),
    quick(
        [*((n, "u1") for n in (1, 2, 3, 4)), (4, "i1"), (2, "f4"), (3, "?")],
        [(4, "u1"), (2, "f4")],
    ),
)
def test_large_frames_are_stacked_as_small_ones(padding, n, dtype):
    """Many bytes take other ways than few."""
    random = np.random.default_rng(n)
    obs = random.integers(-128, 128, (24, 6, 64, 64)).astype(dtype)
    ends = random.random((24, 6)) < 0.2

    def stacked(obs, axis):
        options = {"axis": axis, "padding": padding}
        return jax.jit(lambda w: jaxbuf.stack_frames(w, n, **options).frames)(window(obs, ends))

    large = stacked(obs, -1)
    chex.assert_shape(large, (24, 6, 64, 64, n))
    assert large.dtype == dtype
    for row in (0, 63):
        small = stacked(obs[:, :, row, :2], -1)
        np.testing.assert_array_equal(large[:, :, row, :2], small)
    for axis in (0, 1):
        np.testing.assert_array_equal(stacked(obs, axis), np.moveaxis(large, -1, 2 + axis))
    given = window(obs.reshape(2, 12, 6, 64, 64), ends.reshape(2, 12, 6))
    of_members = jax.vmap(lambda w: jaxbuf.stack_frames(w, n, padding=padding).frames)(given)
    np.testing.assert_array_equal(of_members, large.reshape(of_members.shape))


def test_nested_frames_and_the_axis_of_the_stack():
    obs = {"eye": np.arange(48.0).reshape(2, 4, 2, 3), "ear": np.arange(8).reshape(2, 4)}
    given = {"inner": obs, "last": np.zeros((2, 4), bool)}
    axes = {
        axis: jaxbuf.stack_frames(given, 2, "inner.eye", last="last", axis=axis).frames
        for axis in (0, 1, 2, -1, -2)
    }
    chex.assert_shape(axes[0], (2, 4, 2, 2, 3))
    np.testing.assert_array_equal(axes[0][:, 1:, 1], obs["eye"][:, 1:])
    np.testing.assert_array_equal(axes[0][:, 1:, 0], obs["eye"][:, :-1])
    np.testing.assert_array_equal(axes[1], jnp.moveaxis(axes[0], 2, 3))
    np.testing.assert_array_equal(axes[-1], jnp.moveaxis(axes[0], 2, 4))
    np.testing.assert_array_equal(axes[-1], axes[2])
    np.testing.assert_array_equal(axes[-2], axes[1])
    ear = {"inner": {"ear": obs["ear"]}, "last": given["last"]}
    both = jaxbuf.stack_frames(ear, 2, "inner", last="last").frames
    assert both["ear"][0].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]


def test_a_lost_life_ends_no_stack_where_the_last_step_is_given():
    given = window([[1, 2, 3, 4]], [[False, True, False, False]])
    given["last"] = jnp.array([[False, False, True, False]])
    stacks = jaxbuf.stack_frames(given, 2, last="last")
    assert stacks.frames[0].tolist() == [[1, 1], [1, 2], [2, 3], [4, 4]]


BAD = [
    (lambda w: w, {"n": 5}, "n is 5 and windows have 4 steps"),
    (lambda w: {"obs": w["obs"]}, {}, "terminated is 'terminated', but the window has no"),
    (lambda w: w, {"padding": "zero"}, "padding is 'zero'; choose from"),
    (lambda w: w, {"last": "obs"}, "last has dtype float32; expected bool"),
    (lambda w: {**w, "truncated": jnp.ones((2, 3), bool)}, {}, "truncated has shape (2, 3)"),
    (lambda w: {**w, "terminated": jnp.ones(2, bool)}, {}, "terminated has shape (2,)"),
    (lambda w: {**w, "obs": jnp.ones((2, 3))}, {}, "field 'obs' has shape (2, 3); expected (2, 4)"),
    (
        lambda w: w,
        {"axis": 2},
        "axis is 2; expected an integer from -2 to 1, for a stack of frames of shape (1,)",
    ),
]


@pytest.mark.parametrize(("change", "options", "message"), BAD)
def test_bad_input(change, options, message):
    given = change(window(jnp.ones((2, 4, 1)), jnp.zeros((2, 4), bool)))
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxbuf.stack_frames(given, **{"n": 2, **options})


def test_frames_of_zeros_before_an_episode():
    given = window([[6, 7, 8, 9]], [[False, True, False, False]])
    stacks = jaxbuf.stack_frames(given, 3, padding="zeros")
    assert stacks.frames[0].tolist() == [[0, 0, 6], [0, 6, 7], [0, 0, 8], [0, 8, 9]]
    assert stacks.complete[0].tolist() == [False, False, True, True]
