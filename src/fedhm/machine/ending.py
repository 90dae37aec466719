"""Ending a process without taking apart all that it has imported.

Python frees every object of every module first. With torch imported that takes half a second of the processor, and a
whole one in a fork, which has to copy the memory before. What is registered to be done at the end is done, as ever.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def run_to_the_end(run: Callable[[], object]) -> NoReturn:
    """Run the rest of this process, and end it with the exit code that `sys.exit(run())` would give."""
    try:
        code = run()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        if code is not None:
            print(code, file=sys.stderr)
        code = int(code is not None)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it any more; it is closed; there is none
            stream.flush()
    os._exit(code & 0xFF)
