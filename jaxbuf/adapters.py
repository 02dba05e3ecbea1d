"""The name that ``jaxbuf.interop`` had in version 0.1."""

import warnings

from jaxbuf.interop import *  # noqa: F403

warnings.warn(
    "jaxbuf.adapters is now jaxbuf.interop; this name goes in version 0.3",
    DeprecationWarning,
    stacklevel=2,
)
