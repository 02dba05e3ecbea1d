"""Environments of brax, and of MuJoCo Playground, which have the same states."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

_FINAL = "final_obs"


class FinalObs:
    """A wrapper that keeps the last observation of an episode from being lost.

    brax's ``AutoResetWrapper`` replaces it by the first one of the next episode, so that nothing
    can be bootstrapped where a time limit ended the episode. Wrapped **within** it, this one keeps
    every observation in ``state.info``, from which ``brax_transitions`` takes it::

        env = training.VmapWrapper(env)
        env = training.EpisodeWrapper(env, episode_length=1000, action_repeat=1)
        env = training.AutoResetWrapper(FinalObs(env))

    Args:
        env: An environment of brax.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, rng: Array) -> Any:
        """Begins episodes."""
        return self._with_final(self.env.reset(rng))

    def step(self, state: Any, action: Array) -> Any:
        """Takes an action in each."""
        return self._with_final(self.env.step(state, action))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def _with_final(self, state: Any) -> Any:
        return state.replace(info={**state.info, _FINAL: state.obs})


def brax_transitions(
    state: Any, action: Shaped[Array, "E ..."], next_state: Any
) -> tuple[dict[str, Any], Bool[Array, " E"]]:
    """Turns a step of brax into transitions.

    Args:
        state: The state before, leaves ``[E, ...]``.
        action: The actions.
        next_state: The result of ``env.step(state, action)``.

    Returns:
        A dict with ``obs``, ``action``, ``reward``, ``terminated``, ``truncated`` and ``next_obs``,
        leaves ``[E, ...]``; and a mask, ``[E]``, of the rows whose ``next_obs`` can be used: it is
        what the action led to, or is not needed because the episode terminated. With ``FinalObs``
        these are all rows. Without it, rows in which the time limit ended the episode are not among
        them: pass the mask to ``add`` of an ``ItemBuffer``.

    Example:
        >>> from types import SimpleNamespace
        >>> import jax.numpy as jnp
        >>> before = SimpleNamespace(obs=jnp.array([[1.0], [2.0]]))
        >>> after = SimpleNamespace(
        ...     obs=jnp.array([[0.0], [0.0]]),
        ...     reward=jnp.ones(2),
        ...     done=jnp.ones(2),
        ...     info={"truncation": jnp.array([0.0, 1.0])},
        ... )
        >>> transitions, mask = brax_transitions(before, jnp.zeros((2, 3)), after)
        >>> transitions["terminated"].tolist(), transitions["truncated"].tolist(), mask.tolist()
        ([True, False], [False, True], [True, False])
    """
    done, info = next_state.done > 0, next_state.info
    truncated = jnp.zeros_like(done)
    if "truncation" in info:
        truncated = done & (info["truncation"] > 0)
    mask = jnp.ones_like(done) if _FINAL in info else ~truncated
    transitions = {
        "obs": state.obs,
        "action": action,
        "reward": next_state.reward,
        "terminated": done & ~truncated,
        "truncated": truncated,
        "next_obs": info.get(_FINAL, next_state.obs),
    }
    return transitions, mask
