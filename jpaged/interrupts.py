"""Interrupts: SIGINT (Ctrl-C, a notebook's stop button) comes between two steps of the engine, and never within one.

Python delivers a signal between any two byte codes of the main thread, and of no other.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import ClassVar


class InterruptsHeldBack:
    """While it is open, interrupts wait; `deliver` and the end give them to the handler that they are meant for.

    One within another changes nothing. Nor does one in another thread, or where no Python function handles SIGINT.
    """

    current: ClassVar["InterruptsHeldBack | None"] = None  # the main thread's, where interrupts are held back

    def __init__(self):
        self.lets_one_through = False
        self._handler = None
        self._num_held = 0

    def __enter__(self) -> "InterruptsHeldBack":
        cls = InterruptsHeldBack
        if threading.current_thread() is not threading.main_thread():
            return self
        if cls.current is not None and not cls.current.lets_one_through:
            return self
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._outer, self._handler = cls.current, handler
            signal.signal(signal.SIGINT, self._on_signal)  # from here on nothing is raised
            cls.current = self
        return self

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            InterruptsHeldBack.current = self._outer
            found = signal.signal(signal.SIGINT, self._handler)  # from here on they come at once
            if found != self._on_signal:  # somebody who was called meanwhile wants another one
                signal.signal(signal.SIGINT, found)
            self.deliver()

    def deliver(self) -> None:
        """Calls the handler for each interrupt that has waited, which may raise: what is left then comes the next time."""
        while self._num_held:
            self._num_held -= 1
            self._handler(signal.SIGINT, sys._getframe())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.lets_one_through:
            self._num_held += 1
            return
        self.lets_one_through = False  # what the handler raises unwinds undisturbed
        self._handler(number, frame)
        self.lets_one_through = True


@contextlib.contextmanager
def interrupts_let_through() -> Iterator[None]:
    """For what may take long and loses nothing: an interrupt may end it, though they are held back around it."""
    holder = InterruptsHeldBack.current
    if holder is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    holder.lets_one_through = True
    try:
        holder.deliver()
        yield
    finally:
        holder.lets_one_through = False
