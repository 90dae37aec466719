"""The protocol of an engine: a map over tasks, wherever they run."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from fedhm.work.messages import Reply, Task


class Engine(Protocol):
    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        """One reply for each task, in any order; `position` counts the tasks from 0."""
        ...

    def close(self) -> None:
        """Gives back what was kept from run to run, such as processes; another run may follow."""
        ...


def in_task_order(replies: Iterable[Reply], count: int) -> Iterator[Reply]:
    """Holds back what came early, so that sums do not depend on who was faster.

    Of several replies to one of the `count` tasks the first counts; a reply to no task does not.
    """
    early: dict[int, Reply] = {}
    answered: set[int] = set()
    following = 0
    for reply in replies:
        if type(reply.position) is not int or reply.position in answered or not 0 <= reply.position < count:
            continue
        answered.add(reply.position)
        early[reply.position] = reply
        while following in early:
            yield early.pop(following)
            following += 1
    for position in sorted(early):  # some task before them was never answered
        yield early[position]
