"""Steps of other libraries' environments as the transitions that buffers hold.

None of these libraries is imported here: the functions only read what their objects offer.
"""

from jaxbuf.adapters.brax_env import FinalObs, brax_transitions
from jaxbuf.adapters.gymnasium_env import VectorStep, gymnasium_transitions, transition_like
from jaxbuf.adapters.gymnax_env import GymnaxState, gymnax_reset, gymnax_step
from jaxbuf.adapters.rollout import rollout

__all__ = [
    "FinalObs",
    "GymnaxState",
    "VectorStep",
    "brax_transitions",
    "gymnasium_transitions",
    "gymnax_reset",
    "gymnax_step",
    "rollout",
    "transition_like",
]
