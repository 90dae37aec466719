"""Ctrl-C where an exception would be lost: in imports, and in weak references' callbacks, of which torch has many."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

STOPPED = 130  # the exit code of what Ctrl-C has ended


@contextmanager
def ended_at_once(leave: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let Ctrl-C end the process right there, after `leave`: for what leaves nothing half done on disk."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield  # somebody else has decided what it does
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        leave()
        with suppress(RuntimeError, OSError):  # it may have come in the middle of writing there
            sys.stdout.flush()
        print("\nfedhm: stopped", file=sys.stderr, flush=True)
        os._exit(STOPPED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
