"""Ctrl-C at every step of a call."""

import contextlib
import signal
import sys


class Interrupt:
    """Sends this process Ctrl-C at step ``at`` of what runs inside, and counts the steps.

    A step is a line of any code in Python, or an instruction in the files of ``finely``. The
    signal comes as a real one does: its handler runs before the step.
    """

    def __init__(self, at, finely=()):
        self.at, self.finely, self.steps = at, finely, 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def enter(self, frame, *_):
        if frame.f_code is Interrupt.__exit__.__code__:
            return None
        frame.f_trace_opcodes = frame.f_code.co_filename in self.finely
        return self.step()

    def step(self, *_):
        self.steps += 1
        if self.steps - 1 == self.at:
            signal.raise_signal(signal.SIGINT)
        return self.step


def interrupt_everywhere(call, check, finely=()):
    """Calls again and again, with an interrupt at one of the steps; checks what is left then."""
    call()
    with Interrupt(None, finely) as whole:
        call()
    missed = 0
    for at in range(0, whole.steps, 1 if finely else 3):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(at, finely):
            call()
            missed += 1
        signal.signal(signal.SIGINT, signal.default_int_handler)
        check()
    # Python ignores an interrupt that comes while it closes a generator.
    assert missed <= whole.steps // 50
    return whole.steps
