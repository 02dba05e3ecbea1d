"""Names for the types that many signatures share.

An argument that is about to be checked is an ``object``, since it may be anything.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt

# A dtype of NumPy, or one that extends NumPy's, such as bfloat16.
Dtype: TypeAlias = np.dtype[Any]
# Any function; its arguments and results are those of the caller.
Function: TypeAlias = Callable[..., Any]
# One number or an array of them, as users pass it.
Numbers: TypeAlias = jax.typing.ArrayLike
# A pytree of arrays, such as items ``[B, ...]``; where it matters the docstring says the shapes.
Arrays: TypeAlias = PyTree[Array]
# A PRNG key, typed or not.
Key: TypeAlias = PRNGKeyArray
# A number for each of B rows: the slot or the place of an item, other integers, whether the row
# counts, its priority or score, and its random word.
Index: TypeAlias = Int[Array, " B"]
Integers: TypeAlias = Int[Array, " B"]
Mask: TypeAlias = Bool[Array, " B"]
Floats: TypeAlias = Float[Array, " B"]
Words: TypeAlias = UInt[Array, " B"]
# A single number.
Count: TypeAlias = Int[Array, ""]
Number: TypeAlias = Float[Array, ""]
Flag: TypeAlias = Bool[Array, ""]
Word: TypeAlias = UInt[Array, ""]
# What a strategy keeps in a buffer, and passes through ``jit``; each strategy has its own.
State: TypeAlias = PyTree[Array]
