"""A warning about old names, which still work in this version."""

import warnings


def warn(old: str, new: str) -> None:
    """Warns the caller's caller that a name is deprecated."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)
