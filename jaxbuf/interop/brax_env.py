"""Environments of brax, and of MuJoCo Playground, which have the same states."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from jaxbuf.core.types import Arrays

_FINAL = "final_obs"
# What MuJoCo Playground's auto-reset does not replace when it replaces the rest of ``info``.
_KEPT = "AutoResetWrapper_preserve_info"
# What the auto-resets of brax and of MuJoCo Playground add to ``info`` when episodes begin.
_AUTO_RESETS = ("first_obs", "AutoResetWrapper_first_obs")


class _Record(NamedTuple):
    """The record that ``FinalObs`` keeps of a step.

    Attributes:
        obs: The observations, leaves ``[E, ...]``.
        stepped: True after a step, ``[E]``; False if it was made by a reset.
        truncation: The flags of the time limit, ``[E]``; None if they are set further outside.
    """

    obs: Arrays
    stepped: Bool[Array, " E"]
    truncation: Shaped[Array, " E"] | None


class FinalObs:
    """A wrapper that keeps the last observation of an episode from being lost.

    brax's ``AutoResetWrapper`` replaces it by the first one of the next episode, so that nothing
    can be bootstrapped where a time limit ended the episode. Wrapped **within** it, this one keeps
    every observation in ``state.info``, from which ``brax_transitions`` takes it::

        env = training.VmapWrapper(env)
        env = training.EpisodeWrapper(env, episode_length=1000, action_repeat=1)
        env = training.AutoResetWrapper(FinalObs(env))

    MuJoCo Playground's ``BraxAutoResetWrapper`` is wrapped around it likewise. With
    ``full_reset=True`` that one replaces ``info`` as well, but for one entry, in which this wrapper
    keeps the observation and the flag of the time limit.

    brax's ``EpisodeWrapper`` needs keys of the old kind, ``jax.random.PRNGKey``: typed ones, as
    ``jax.random.key`` makes, give its counts the wrong shape. Pass ``jax.random.key_data(keys)``.

    Args:
        env: An environment of brax.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, rng: Array) -> Any:
        """Begins episodes.

        Raises:
            ValueError: If the environment resets by itself, or counts steps in the wrong shape.
        """
        state = self.env.reset(rng)
        if any(name in state.info for name in _AUTO_RESETS):
            raise ValueError(
                "FinalObs is around an auto-reset, which has replaced the last observations; put "
                "it within: AutoResetWrapper(FinalObs(env))"
            )
        steps, shape = state.info.get("steps"), jnp.shape(state.done)
        if steps is not None and jnp.shape(steps) != shape:
            advice = ""
            if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
                advice = (
                    "; brax's EpisodeWrapper needs keys of the old kind: pass "
                    "jax.random.key_data(keys), or keys made by jax.random.PRNGKey"
                )
            raise ValueError(
                f"state.info['steps'] has shape {jnp.shape(steps)} and state.done {shape}; "
                f"expected the same{advice}"
            )
        return _keep(state, _Record(state.obs, _flags(state, False), state.info.get("truncation")))

    def step(self, state: Any, action: Array) -> Any:
        """Takes an action in each."""
        before = _record(state.info)
        state = self.env.step(state, action)
        truncation = state.info.get("truncation")
        if before is not None and before.truncation is None:
            # It is of the step before: a wrapper around this one sets it later.
            truncation = None
        return _keep(state, _Record(state.obs, _flags(state, True), truncation))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)


def _flags(state: Any, value: bool) -> Bool[Array, " E"]:
    return jnp.full_like(state.done, value, bool)


def _keep(state: Any, record: _Record) -> Any:
    """Returns the state with a record in its ``info``, where an auto-reset replaces it last."""
    kept = state.info.get(_KEPT, {})
    if isinstance(kept, dict):
        return state.replace(info={**state.info, _KEPT: {**kept, _FINAL: record}})
    return state.replace(info={**state.info, _FINAL: record})


def _record(info: dict[str, Any]) -> _Record | None:
    """Returns the record of the newest step or reset; None without ``FinalObs``."""
    kept = info.get(_KEPT, {})
    kept = kept if isinstance(kept, dict) else {}
    record = kept.get(_FINAL, info.get(_FINAL))
    return record if isinstance(record, _Record) else None


def _is_of_this_step(info: dict[str, Any], done: Bool[Array, " E"]) -> Bool[Array, " E"]:
    """Returns whether ``info`` is that of a step: brax's ``EpisodeWrapper`` counts steps in it.

    After a step the counts are at least 1, and those of a reset are 0. An auto-reset may keep the
    number of steps while it replaces everything else, but not the length among the metrics.
    """
    metrics = info.get("episode_metrics")
    length = metrics.get("length") if isinstance(metrics, dict) else None
    count = info.get("steps") if length is None else length
    return jnp.ones_like(done) if count is None else count > 0


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
        leaves ``[E, ...]``; and a mask, ``[E]``, of the rows that can be used: it is known how the
        episode ended, if it did, and ``next_obs`` is what the action led to, or is not needed
        because the episode terminated. With ``FinalObs`` these are all rows, unless an auto-reset
        replaced all of ``info``. Without it, rows in which the time limit ended the episode are not
        among them, and none that ended if ``info`` was replaced. Pass the mask to ``add`` of an
        ``ItemBuffer``.

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
    record = _record(info)
    limit, is_known = info.get("truncation"), _is_of_this_step(info, done)
    if record is not None and record.truncation is not None:
        limit, is_known = record.truncation, record.stepped
    truncated = jnp.zeros_like(done) if limit is None else done & (limit > 0)
    has_next = ~truncated if record is None else record.stepped
    transitions = {
        "obs": state.obs,
        "action": action,
        "reward": next_state.reward,
        "terminated": done & ~truncated,
        "truncated": truncated,
        "next_obs": next_state.obs if record is None else record.obs,
    }
    return transitions, has_next & (is_known | ~done)
