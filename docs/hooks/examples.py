"""Renders an ``Example:`` of a docstring as code: the parser knows ``Examples:`` only."""

import re
from typing import Any

from griffe import Extension


class Examples(Extension):
    """Changes the titles of sections as docstrings are read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Look at one class, function or module."""
        if obj.docstring is not None:
            value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = value
