"""Gives each operation the docstring that ``help`` shows, and puts what is used first on top.

Operations have their docstrings where they are declared: methods that override them, and the
functions of ``jaxbuf``, get them at run time.

The page of a class begins with the methods that everyone uses, also where these are inherited.

The parser knows ``Examples:``, not ``Example:``, and takes prompts outside of such a section for
prose.
"""

import inspect
import pkgutil
import re
from typing import Any

from griffe import Alias, Docstring, Extension

FIRST = ("create", "add", "sample", "update_priority", "can_sample", "size", "capacity")


class Examples(Extension):
    """Changes docstrings as they are read, and the order of members once all are known."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Puts the members that are used first before all others."""
        for room in ("buffers", "wrappers", "accumulators"):
            for module in _modules(pkg[room]):
                for kind in module.classes.values():
                    if not kind.is_alias:
                        _put_first(kind)

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


def _modules(module: Any) -> list[Any]:
    """Returns a module and all modules below it."""
    return [module, *(one for child in module.modules.values() for one in _modules(child))]


def _put_first(kind: Any) -> None:
    """Orders the members of a class: the ones used first, its own, and inherited ones."""
    inherited = {
        name: Alias(name, member.final_target, parent=kind)
        for name, member in kind.inherited_members.items()
    }
    members = {**kind.members, **inherited}
    first = {name: members[name] for name in FIRST if name in members}
    kind.members = first | members
