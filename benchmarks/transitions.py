"""Transitions whose every value follows from a serial number, so that copies can be checked."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np

Items = dict[str, np.ndarray]

MAX_SERIAL = 2**24
"""Serial numbers are stored in a float32 reward, which holds integers exactly up to here."""


def _hash(values: np.ndarray) -> np.ndarray:
    """Mixes integers into 16 bits that look random. [...] -> [...] uint16."""
    mixed = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(40)).astype(np.uint16)


@dataclasses.dataclass(frozen=True, eq=False)
class Transitions:
    """A kind of transition: the shapes and dtypes of one, and the values of the n-th.

    The reward is the serial number itself; every other leaf is a fixed pattern shifted by a hash of
    the serial number. So what a sampled row must contain follows from its reward, whatever the
    slot it lay in.

    Attributes:
        leaves: Shape and dtype of each leaf of one transition; has a float32 scalar `reward`.
    """

    leaves: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def example(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One unbatched transition, as shapes and dtypes."""
        return dict(self.leaves)

    @property
    def num_bytes(self) -> int:
        """Bytes of one transition."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves.values())

    def items(self, serials: np.ndarray) -> Items:
        """The transitions with these serial numbers.

        Args:
            serials: [B] integers below `MAX_SERIAL`.

        Returns:
            Leaves [B, ...].
        """
        return {
            name: serials.astype(np.float32)
            if name == "reward"
            else self._leaf(serials, leaf, salt)
            for salt, (name, leaf) in enumerate(self.leaves.items())
        }

    def serials(self, items: Items) -> np.ndarray:
        """The serial numbers of transitions, read from their rewards. -> [B, ...] int64."""
        return items["reward"].astype(np.int64)

    @staticmethod
    def _leaf(serials: np.ndarray, leaf: jax.ShapeDtypeStruct, salt: int) -> np.ndarray:
        code = np.uint8 if leaf.dtype.itemsize == 1 else np.uint16
        pattern = _hash(np.arange(math.prod(leaf.shape)) + 1_000_003 * (salt + 1)).astype(code)
        shift = _hash(serials + 7_919 * MAX_SERIAL * (salt + 1)).astype(code)
        codes = pattern[None, :] + shift[:, None]
        if leaf.dtype == np.bool_:
            values = (codes & 8) != 0
        elif np.issubdtype(leaf.dtype, np.floating):
            values = codes.astype(leaf.dtype) / leaf.dtype.type(256)
        else:
            values = codes.astype(leaf.dtype, copy=False)
        return values.reshape(len(serials), *leaf.shape)


def _leaf(*shape: int, dtype: type = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


CARTPOLE = Transitions(
    {
        "obs": _leaf(4),
        "action": _leaf(dtype=np.int32),
        "reward": _leaf(),
        "terminated": _leaf(dtype=np.bool_),
        "next_obs": _leaf(4),
    }
)
"""CartPole's transition: 41 bytes."""

MUJOCO = Transitions(
    {
        "obs": _leaf(17),
        "action": _leaf(6),
        "reward": _leaf(),
        "terminated": _leaf(dtype=np.bool_),
        "next_obs": _leaf(17),
    }
)
"""HalfCheetah's transition: 165 bytes."""

MUJOCO_STEP = Transitions(
    {name: leaf for name, leaf in MUJOCO.leaves.items() if name != "next_obs"}
)
"""HalfCheetah's step, as stored where the next observation is in the next step: 97 bytes."""

ATARI = Transitions(
    {
        "obs": _leaf(84, 84, 4, dtype=np.uint8),
        "action": _leaf(dtype=np.int32),
        "reward": _leaf(),
        "terminated": _leaf(dtype=np.bool_),
    }
)
"""Four stacked Atari frames with what followed: 28,233 bytes. One observation per transition, so
that 2^16 of them fit in 1.9 GB per library."""
