"""An engine that does no task twice: of runs that are alike, as under attacks of which nothing is left, one is trained.

Training follows from the task and the client's samples alone, so that a remembered reply is the one that would come.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

from fedhm.engines.engine import Engine
from fedhm.work.messages import Reply, Task, Update

MOST = 6000  # replies, of which the oldest are forgotten


class Remembering:
    """An engine around another one. `samples_of` names a client's samples, which differ from run to run."""

    _replies: ClassVar[dict[bytes, Update]] = {}  # of all runs of this process

    def __init__(self, engine: Engine, samples_of: Callable[[int], str]) -> None:
        self._engine, self._samples_of = engine, samples_of

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        sent = list(tasks)
        keys = [self._key(task) for task in sent]
        new = [place for place, key in enumerate(keys) if key not in self._replies]
        for place, key in enumerate(keys):
            if key in self._replies:
                yield replace(self._replies[key], position=place)
        for reply in self._engine.run([sent[place] for place in new]) if new else ():
            moved = replace(reply, position=new[reply.position])
            if isinstance(moved, Update):
                self._replies[keys[moved.position]] = moved
                if len(self._replies) > MOST:
                    self._replies.pop(next(iter(self._replies)))
            yield moved

    def close(self) -> None:
        self._engine.close()

    def _key(self, task: Task) -> bytes:
        said = (task.kind, task.round, task.client, task.tier, task.network, task.options)
        digest = hashlib.blake2b(repr((said, self._samples_of(task.client))).encode())
        for name, tensor in task.tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.digest()
