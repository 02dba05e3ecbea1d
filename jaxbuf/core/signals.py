"""Signals that wait while a state is consumed and its successor is not stored yet."""

import _signal  # pyright: ignore[reportMissingImports]
import contextlib
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any, Self

# The signals whose handlers may raise: of the keyboard, of launchers and schedulers, of clocks.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_NUMBERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))

# Those of ``signal`` convert handlers to enums and back, which takes ten times as long.
_get_handler: Any = _signal.getsignal
_set_handler: Any = _signal.signal

# Seconds after which a thread that waits looks for signals.
_PAUSE = 0.1


class DeferredSignals:
    """A context whose signals are handled at its end: Ctrl-C does not interrupt what is inside.

    A call that donates a state loses it if it is interrupted before the result is stored, and
    Python may interrupt its main thread between any two steps. Signals that come inside are handled
    by their own handlers right after the block, each of them once. A block that waits calls
    ``deliver`` at least every ``pause`` seconds. Other threads hear of no signals, so there this
    does nothing.

    Handlers are replaced for the time of the block. The replacement passes signals on unless the
    block is running. So nothing changes if an interrupt comes while handlers are being replaced, or
    before they are back in place.

    Attributes:
        pause: The most seconds that the block may wait before it calls ``deliver``.

    Example:
        >>> import signal
        >>> steps = []
        >>> before = signal.signal(signal.SIGINT, lambda *_: steps.append("handled"))
        >>> with DeferredSignals():
        ...     signal.raise_signal(signal.SIGINT)
        ...     steps.append("done")
        >>> signal.signal(signal.SIGINT, before) and steps
        ['done', 'handled']
    """

    def __init__(self) -> None:
        self.pause = threading.TIMEOUT_MAX
        self._waits = False
        self._handlers: dict[int, Any] = {}
        self._came: dict[int, FrameType | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.pause = _PAUSE
            self._replace()
            self._waits = True
        return self

    def __exit__(self, *error: object) -> None:
        self._waits = False
        try:
            self._restore()
        finally:
            self.deliver()

    def deliver(self) -> bool:
        """Handles the signals that came. Their handlers may raise.

        Returns:
            Whether there were any.
        """
        if not self._came:
            return False
        number = next(iter(self._came))
        frame = self._came.pop(number)
        try:
            self._handlers[number](number, frame)
        finally:
            self.deliver()
        return True

    @contextlib.contextmanager
    def passing(self) -> Generator[None]:
        """Lets signals through for a part of the block, which they may interrupt."""
        waits, self._waits = self._waits, False
        try:
            self.deliver()
            yield
        finally:
            self._waits = waits

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            self._came[number] = frame
        else:
            self._handlers[number](number, frame)

    def _replace(self) -> None:
        try:
            for number in _NUMBERS:
                handler = _get_handler(number)
                # Signals without a handler in Python are not handled between two of its steps.
                if callable(handler):
                    self._handlers[number] = handler
                    _set_handler(number, self._receive)
        except BaseException as error:
            self._restore()
            # Within another program, what Python takes for its main thread need not be one.
            if not (isinstance(error, ValueError) and "main thread" in str(error)):
                raise

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            # Unless the block has set another one.
            if _get_handler(number) == self._receive:
                _set_handler(number, handler)
