"""Renders the examples of docstrings as code.

The parser knows ``Examples:``, not ``Example:``, and takes prompts outside of such a section for
prose.
"""

import re
from typing import Any

from griffe import Extension


class Examples(Extension):
    """Changes docstrings as they are read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrites the docstring of one class, function or module."""
        if obj.docstring is not None:
            value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            value = re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", value, flags=re.M)
            obj.docstring.value = value
