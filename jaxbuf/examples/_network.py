"""Q-networks for vectors and for small images."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Shaped


class QNetwork(nn.Module):
    """One value per action, for observations that are vectors or images.

    Vectors go through two hidden layers. Images ``[height, width, channels]`` go through one 3 × 3
    convolution with 16 features and one hidden layer, the network of Young and Tian, "MinAtar"
    (2019). Hidden layers are normalized, which keeps the values of off-policy learning from running
    away (Gallici et al., "Simplifying Deep Temporal Difference Learning", 2024).

    Attributes:
        num_actions: A.
        hidden: Width of each hidden layer.
    """

    num_actions: int
    hidden: int

    @nn.compact
    def __call__(self, obs: Shaped[Array, "B ..."]) -> Float[Array, "B A"]:
        """Values of all actions for B observations."""
        x = obs.astype(jnp.float32)
        if x.ndim == 4:
            x = nn.relu(nn.Dense(16)(patches(x)))
            x = x.reshape(x.shape[0], -1)
        else:
            x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        x = nn.relu(nn.LayerNorm()(nn.Dense(self.hidden)(x)))
        return nn.Dense(self.num_actions)(x)


def patches(x: Float[Array, "B H W C"]) -> Float[Array, "B H-2 W-2 9*C"]:
    """All 3 × 3 patches of an image: a Dense over them is a convolution.

    ``nn.Conv`` under a vmap over its parameters becomes a grouped convolution, which is slow.
    """
    height, width = x.shape[1] - 2, x.shape[2] - 2
    views = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(views, axis=-1)
