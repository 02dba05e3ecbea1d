"""The operations that a buffer, or any member of it, supports."""

from typing import NamedTuple

from jaxbuf.buffers.buffer import as_buffer


class Ability(NamedTuple):
    """An ability that not all buffers have.

    Attributes:
        name: Its name among the ``abilities`` of a buffer.
        missing: The text of the error if no part has it.
    """

    name: str
    missing: str

    def has(self, buffer: object) -> bool:
        """Returns whether a buffer, or a member of it, has the ability."""
        return self.name in as_buffer(buffer).abilities

    def need(self, buffer: object, method: str) -> None:
        """Checks that a buffer, or a member of it, has the ability.

        Raises:
            ValueError: If none has it.
        """
        if not self.has(buffer):
            raise ValueError(f"{method} was called, but {self.missing}")


PRIORITIES = Ability(
    "priorities",
    "no part has priorities; create one of them with sampler=jaxbuf.Prioritized(...)",
)
CONTENTS = Ability(
    "contents",
    "no part is an ItemBuffer or a TrajectoryBuffer, whose contents can be looked up and changed",
)
SCORES = Ability(
    "scores",
    "no part uses scores; create one of them with evictor=jaxbuf.Lowest() or "
    "sampler=jaxbuf.Softmax()",
)
REMOVABLE = Ability(
    "removal",
    "no part removes items; create one of them with parts=(jaxbuf.Removable(),)",
)
FRESHNESS = Ability(
    "freshness",
    "no part limits uses or staleness; create one of them with freshness=jaxbuf.Freshness(...)",
)
ENVIRONMENTS = Ability(
    "environments",
    "no part has environments; make one of them a jaxbuf.TrajectoryBuffer",
)
EPISODES = Ability(
    "episodes",
    "no part knows its episodes; create a TrajectoryBuffer with episodes=jaxbuf.Episodes()",
)
