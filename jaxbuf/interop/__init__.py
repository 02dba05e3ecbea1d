"""Other libraries: steps of their environments as transitions, and flashbax's call signatures.

None of these libraries is imported here: the functions only read what their objects offer.
"""

from jaxbuf.core import exporting
from jaxbuf.interop.brax_env import FinalObs, brax_transitions
from jaxbuf.interop.gymnasium_env import VectorStep, gymnasium_transitions, transition_like
from jaxbuf.interop.gymnax_env import GymnaxState, gymnax_reset, gymnax_step, rollout
from jaxbuf.interop.resets import EnvState, EnvStep, with_resets

__all__ = [
    "EnvState",
    "EnvStep",
    "FinalObs",
    "GymnaxState",
    "VectorStep",
    "brax_transitions",
    "gymnasium_transitions",
    "gymnax_reset",
    "gymnax_step",
    "rollout",
    "transition_like",
    "with_resets",
]

exporting.register_all()
