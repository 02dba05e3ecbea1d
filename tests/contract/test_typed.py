"""The types and shapes of annotations are those of the arguments."""

import subprocess
import sys

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, jaxtyped

from tests.programs import typed


def test_the_check_sees_a_wrong_shape_and_takes_an_integer_for_a_float():
    @jaxtyped(typechecker=typed.checked)
    def scaled(x: Float[Array, "B D"], by: float) -> Float[Array, "..."]:
        return by * x

    assert scaled(jnp.ones((2, 3)), 2).shape == (2, 3)
    with pytest.warns(typed.WrongTypeWarning, match="parameter x"):
        scaled(jnp.ones(2), 2.0)


@pytest.mark.slow
def test_annotations_hold_in_all_operations():
    code = "from tests.programs import typed; print(*typed.broken(), sep='\\n', end='')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout, done.stdout
