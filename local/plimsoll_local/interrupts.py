"""Ctrl-C put off for the moments in which it would leave half of something behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """SIGINT in the block takes effect at its end: for short blocks that clean up.

    Only the main thread hears signals; in another there is nothing to put off. A child started
    in the block is not touched: a handler, unlike SIG_IGN, ends with exec.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if heard:
            signal.raise_signal(signal.SIGINT)
