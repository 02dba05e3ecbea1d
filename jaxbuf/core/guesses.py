"""Answers to first guesses: names that other libraries have, and what to use here."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from jaxbuf.core.types import Function

P = ParamSpec("P")
R = TypeVar("R")

_CREATE = "create makes buffers, such as jaxbuf.ItemBuffer.create(example, capacity)"
_UPDATE = "update_priority(slots, priority) sets priorities"
_DATA = 'the items of a batch are batch.data, such as batch.data["obs"]'
_SIZE = (
    "the size of a buffer is its capacity, ItemBuffer.create(example, capacity), and that of rings "
    "num_envs times length, TrajectoryBuffer.create(example, num_envs, length)"
)
# By the name of an attribute of the package, of a buffer or of a batch, or that of an argument, or
# that of a function whose arguments are wrong as a whole.
ANSWERS = {
    "ReplayBuffer": _CREATE,
    "PrioritizedReplayBuffer": f"{_CREATE[:-1]}, sampler=jaxbuf.Prioritized())",
    "update_priorities": _UPDATE,
    "set_priorities": _UPDATE,
    **dict.fromkeys(
        ("indices", "index", "idx"),
        "batch.slots says which items they are, for update_priority and the like",
    ),
    "experience": _DATA,
    "obs": _DATA,
    "beta": "beta is an argument of sample, and of importance_weights(buffer, batch, beta=0.4)",
    "eps": "the constant is called epsilon: jaxbuf.Prioritized(epsilon=1e-6)",
    "max_size": _SIZE,
    "max_length": _SIZE,
    "capacity": _SIZE,
    "__init__": _CREATE,
    "add": 'items are one pytree: add({"obs": obs, "action": action})',
    "importance_weights": "the buffer comes first: importance_weights(buffer, batch, beta=0.4)",
}


def refuse(owner: Any, name: str) -> NoReturn:
    """Raises the error for an attribute that is not there, as ``__getattr__`` of its owner."""
    data = vars(owner).get("data")
    inside = isinstance(data, Mapping) and name in data
    if answer := f"it is in batch.data[{name!r}]" if inside else ANSWERS.get(name):
        raise AttributeError(f"{type(owner).__name__} has no {name}; {answer}")
    object.__getattribute__(owner, name)  # The usual error, or that of a property.
    raise AttributeError(name)


def _explained(
    error: TypeError, function: Function, args: tuple[Any, ...], options: Mapping[str, Any]
) -> TypeError | None:
    """Returns a better error for a call with wrong arguments; None if there is no answer."""
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        return None  # The function raised it, and not the call.
    name, known = function.__name__, inspect.signature(function).parameters
    guessed = [option for option in options if option not in known]
    makes = name == "__init__" and hasattr(args[0], "create")
    if makes or (len(args) != 2 if name == "add" else not guessed):
        guessed = [name]
    answers = [ANSWERS[guess] for guess in guessed if guess in ANSWERS]
    if makes and "occupancy" not in known:
        answers = [f"{type(args[0]).__name__}.create makes one"]
    return TypeError(f"{error}; {answers[0]}") if answers else None


def answered(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function whose errors about wrong arguments have an answer."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except TypeError as error:
            better = _explained(error, function, args, options)
            if better is None:
                raise
            raise better from None

    return call
