"""The local engine: tasks run one after the other in this process."""

from collections.abc import Iterable, Iterator, Sequence

from fedhm.client import Client
from fedhm.messages import Failure, Reply, Task


class LocalEngine:
    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for position, task in enumerate(tasks):
            reply: Reply
            try:
                reply = self._clients[task.client].run(task, position)
            except (RuntimeError, ValueError) as error:  # torch's way to say that network and data do not go together
                reply = Failure(task.client, str(error), position, error)
            yield reply
