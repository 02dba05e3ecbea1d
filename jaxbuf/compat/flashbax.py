"""The name that ``jaxbuf.interop.flashbax`` had in version 0.1."""

import warnings

from jaxbuf.interop.flashbax import *  # noqa: F403

warnings.warn(
    "jaxbuf.compat.flashbax is now jaxbuf.interop.flashbax; this name goes in version 0.3",
    DeprecationWarning,
    stacklevel=2,
)
