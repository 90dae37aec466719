"""The peers' side of the conversation: a line on stdin asks for a round, a JSON line on stdout tells its seconds."""

import json
import os
import sys
import time


class Turns:
    """A peer's turns. Libraries may print what they like: their stdout becomes stderr."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._start: float | None = None

    def wait(self) -> bool:
        """End the round that runs, if one does, and wait for the next; return False when there will be none."""
        if self._start is not None:
            print(json.dumps({"seconds": time.perf_counter() - self._start}), file=self._answers, flush=True)
        asked = bool(sys.stdin.readline())
        self._start = time.perf_counter()
        return asked
