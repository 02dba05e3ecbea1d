"""Gives each operation the docstring that ``help`` shows, and renders examples as code.

Operations have their docstrings where they are declared: methods that override them, and the
functions of ``jaxbuf``, get them at run time.

The parser knows ``Examples:``, not ``Example:``, and takes prompts outside of such a section for
prose.
"""

import inspect
import pkgutil
import re
from typing import Any

from griffe import Docstring, Extension


class Examples(Extension):
    """Changes docstrings as they are read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrites the docstring of one class, function or module."""
        if obj.is_function and re.match(r"jaxbuf\.(buffers|wrappers)\b", obj.path):
            try:
                text = inspect.getdoc(pkgutil.resolve_name(obj.path))
            except (AttributeError, ImportError):
                text = None
            if text:
                obj.docstring = Docstring(text, lineno=obj.lineno, parent=obj, parser="google")
        if obj.docstring is not None:
            value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            value = re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", value, flags=re.M)
            obj.docstring.value = value
