"""The protocol of an engine: a map over tasks, wherever they run."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from fedhm.errors import FedhmError
from fedhm.work.messages import Reply, Task


class Engine(Protocol):
    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        """Yield one reply for each task, in any order; `position` counts the tasks from 0."""
        ...

    def close(self) -> None:
        """Give back what was kept from run to run, such as processes; another run may follow."""
        ...


class Elsewhere:
    """The engine of an experiment that only Flower's processes can run: it can be inspected, but not run here."""

    SENTENCE = "engine.name = 'flower' is for 'fedhm run' and 'fedhm resume', and for Flower apps made by fedhm.flower"

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:  # noqa: ARG002
        raise FedhmError(self.SENTENCE)

    def close(self) -> None:
        """Do nothing: the engine never ran."""
