"""Claims of the guides about other libraries, as programs: ``make test-claims``.

Each module here is about one library. A claim is a sentence, what its check has to return, and the
check, which runs that library alone.
"""

import re
from collections.abc import Callable
from typing import Any

CLAIMS: list[tuple[str, Any, Callable[[], Any]]] = []


def claim(text: str, expected: Any) -> Callable[[Callable[[], Any]], None]:
    """Adds a check, which has to return ``expected``, to the claims."""
    return lambda check: CLAIMS.append((text, expected, check))


def names_of(owner: Any, pattern: str) -> list[str]:
    """The public names of a module or class in which the pattern occurs."""
    names = [name for name in dir(owner) if not name.startswith("_")]
    return [name for name in names if re.search(pattern, name, re.IGNORECASE)]


def raised(call: Callable[[], Any]) -> str | None:
    """The name of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None
