"""Gives each operation the docstring that ``help`` shows, and puts what is used first on top.

Operations have their docstrings where they are declared: methods that override them, and the
functions of ``jaxbuf``, get them at run time.

The page of a class begins with the methods that everyone uses, also where these are inherited, and
leaves out operations that it inherits but does not have: those of a ``TrajectoryBuffer`` are
declared for all buffers. The page of a sampler, an evictor or a part says what to choose. The
methods that buffers call are on the page of the classes that one derives from.

The parser knows ``Examples:``, not ``Example:``, and takes prompts outside of such a section for
prose.
"""

import inspect
import pkgutil
import re
from typing import Any

from griffe import Alias, Docstring, Extension

STRATEGIES = {"Sampler", "Evictor", "Part"}
TO_DERIVE_FROM = {"KnownSampler", "ShardableSampler"}
OF_STRATEGIES = {"by_slot", "lets_remove"}  # what wrappers ask buffers, under the same names
FIRST = ("create", "add", "sample", "update_priority", "can_sample", "size", "capacity")


class Examples(Extension):
    """Changes docstrings as they are read, and the order of members once all are known."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Gives each class the members of its bases, in the order of its page."""
        for module in _modules(pkg):
            for kind in module.classes.values():
                if not kind.is_alias:
                    _arrange(kind)

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrites the docstring of one class, function or module."""
        if obj.is_function and re.match(r"jaxbuf\.(buffers|wrappers)\b", obj.path):
            try:
                text = inspect.getdoc(pkgutil.resolve_name(obj.path))
            except (AttributeError, ImportError):
                text = None
            if text:
                obj.docstring = Docstring(
                    text, parent=obj, parser="google", parser_options={"warnings": False}
                )
        if obj.docstring is not None:
            value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            value = re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", value, flags=re.M)
            obj.docstring.value = value


def _modules(module: Any) -> list[Any]:
    """Returns a module and all modules below it."""
    below = [child for child in module.modules.values() if not child.is_alias]
    return [module, *(one for child in below for one in _modules(child))]


def _arrange(kind: Any) -> None:
    """Orders the members of a class: those used first, other methods, and attributes."""
    bases = {base.name for base in kind.mro()}
    members = dict(kind.members)
    for name, member in kind.inherited_members.items():
        target = member.final_target
        # A class that holds items overrides each operation that it has.
        if not ("SampledBuffer" in bases and target.parent.name == "SlottedBuffer"):
            members[name] = Alias(name, target, parent=kind)
    if STRATEGIES & bases and kind.name not in TO_DERIVE_FROM:
        members = {name: member for name, member in members.items() if name.startswith("__")}
    if "Buffer" in bases:
        members = {name: member for name, member in members.items() if name not in OF_STRATEGIES}
    first = {name: members[name] for name in FIRST if name in members}
    methods = {name: member for name, member in members.items() if member.is_function}
    kind.members = first | methods | members
