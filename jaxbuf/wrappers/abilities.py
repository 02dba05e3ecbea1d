"""The operations that a buffer, or any buffer of a mixture, supports."""

from collections.abc import Callable
from typing import NamedTuple

from jaxbuf.buffers.body import Body
from jaxbuf.buffers.sample import DrawnBuffer
from jaxbuf.buffers.trajectory import TrajectoryBuffer


class Composite:
    """A buffer made of other buffers.

    Attributes:
        parts: These buffers.
    """

    parts: tuple[DrawnBuffer, ...]


class Ability(NamedTuple):
    """An ability that not all buffers have.

    Attributes:
        test: Returns whether a buffer has the ability.
        missing: The text of the error if no part has it.
    """

    test: Callable[[object], bool]
    missing: str

    def has(self, buffer: object) -> bool:
        """Returns whether a buffer, or a part of it, has the ability."""
        if isinstance(buffer, Composite):
            return any(self.has(part) for part in buffer.parts)
        return self.test(buffer)

    def need(self, buffer: object, method: str) -> None:
        """Checks that a buffer, or a part of it, has the ability.

        Raises:
            ValueError: If no part has it.
        """
        if not self.has(buffer):
            raise ValueError(f"{method} was called, but {self.missing}")


PRIORITIES = Ability(
    lambda buffer: isinstance(buffer, Body) and buffer.sampler.uses_priority,
    "no part has priorities; create one of them with sampler=jaxbuf.Prioritized(...)",
)
CONTENTS = Ability(
    lambda buffer: isinstance(buffer, Body),
    "no part is an ItemBuffer or a TrajectoryBuffer, whose contents can be looked up and changed",
)
SCORES = Ability(
    lambda buffer: isinstance(buffer, Body) and buffer.uses_score,
    "no part uses scores; create one of them with evictor=jaxbuf.Lowest() or "
    "sampler=jaxbuf.Softmax()",
)
REMOVABLE = Ability(
    lambda buffer: isinstance(buffer, Body) and buffer.lets_remove,
    "no part removes items; create one of them with parts=(jaxbuf.Removable(),)",
)
FRESHNESS = Ability(
    lambda buffer: isinstance(buffer, Body) and buffer.freshness is not None,
    "no part limits uses or staleness; create one of them with freshness=jaxbuf.Freshness(...)",
)
ENVIRONMENTS = Ability(
    lambda buffer: isinstance(buffer, TrajectoryBuffer),
    "no part has environments; make one of them a jaxbuf.TrajectoryBuffer",
)
EPISODES = Ability(
    lambda buffer: isinstance(buffer, TrajectoryBuffer) and buffer.episodes is not None,
    "no part knows its episodes; create a TrajectoryBuffer with episodes=jaxbuf.Episodes()",
)


def num_envs(buffer: object) -> int:
    """Returns the number of environments of a buffer, or of all its parts; 0 if it has none."""
    if isinstance(buffer, Composite):
        return sum(num_envs(part) for part in buffer.parts)
    return buffer.num_envs if isinstance(buffer, TrajectoryBuffer) else 0
