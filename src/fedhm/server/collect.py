"""From tasks to the updates of a round: the engine's replies in the order of their tasks, through all filters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fedhm.machine.device import threads
from fedhm.server.callbacks import Callback
from fedhm.server.filters.filter import Arrival, RoundFilter
from fedhm.server.record import Record
from fedhm.work.messages import Reply, Task, Update

Run = Callable[[Sequence[Task]], Iterator[Reply]]  # an engine's


def collect(
    run: Run, tasks: Sequence[Task], filters: Sequence[RoundFilter], record: Record, callbacks: Sequence[Callback] = ()
) -> Iterator[Update]:
    """Send tasks to the engine, and yield the updates that pass all filters, in the order of the tasks.

    Updates are folded by one thread, beside workers that keep the cores busy. Memory does not grow with their number.
    """
    with threads(1):
        arrivals = _arrivals(run, tasks, record, callbacks)
        for each in filters:
            arrivals = each.updates(arrivals, record)
        for arrival in arrivals:
            yield arrival.update


def _arrivals(run: Run, tasks: Sequence[Task], record: Record, callbacks: Sequence[Callback]) -> Iterator[Arrival]:
    for reply in in_task_order(run(tasks), len(tasks)):
        task = tasks[reply.position]
        for callback in callbacks:
            callback.task_done(record.round, task.kind, reply.position + 1, len(tasks))
        yield Arrival(task, reply)


def in_task_order(replies: Iterable[Reply], count: int) -> Iterator[Reply]:
    """Hold back early replies, so that sums do not depend on which client was faster.

    If a task has several replies, the first counts. A reply to none of the `count` tasks is ignored.
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


class CountedUpdates(Iterator[Update]):
    """Updates on their way into a merge, and how many of them there were."""

    def __init__(self, updates: Iterator[Update]) -> None:
        self._updates = updates
        self._first = next(updates, None)
        self.count = 0

    @property
    def any(self) -> bool:
        """Tell whether there is any update, without taking it."""
        return self.count > 0 or self._first is not None

    def __next__(self) -> Update:
        first, self._first = self._first, None
        update = first if first is not None else next(self._updates)
        self.count += 1
        return update


def last_reason(dropped: Sequence[dict[str, Any]]) -> str:
    return f"of client {dropped[-1]['client']}, {dropped[-1]['reason']}" if dropped else "nobody answered"
