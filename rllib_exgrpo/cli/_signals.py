"""Ctrl-C and SIGTERM: a run ends after the step under way, with a checkpoint."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(on_first: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Calls a function on the first signal to stop; a second one ends the process.

    Args:
        on_first: gets the signal.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        on_first(signal.Signals(number))

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    # Ray's own handler of SIGTERM exits without a word; a second signal must not wait.
    previous[signal.SIGTERM] = signal.SIG_DFL
    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


def say(text: str) -> None:
    """Prints from within a signal handler, where `print` may be under way already."""
    os.write(sys.stdout.fileno(), text.encode())
