"""Names for the types that many signatures share.

An argument that is about to be checked is an ``object``, since it may be anything.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, PyTree

# A dtype of NumPy, or one that extends NumPy's, such as bfloat16.
Dtype: TypeAlias = np.dtype[Any]
# Any function; its arguments and results are those of the caller.
Function: TypeAlias = Callable[..., Any]
# One number or an array of them, as users pass it.
Numbers: TypeAlias = jax.typing.ArrayLike
# What a strategy keeps in a buffer, and passes through ``jit``; each strategy has its own.
State: TypeAlias = PyTree[Array]
