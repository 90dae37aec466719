"""A round is a list of filters: each takes care of one concern, and knows nothing of the others.

`server/round.py` puts the list together. The hooks of all filters run in the order of the list:

    fleet       tasks      leave out clients that miss the deadline, and compute everybody's simulated time
    admission   tasks      leave out running averages that need not travel
                updates    refuse answers that are broken, too far off or not finite; count the traffic
    defence     updates    cut and drop updates by comparison with other clients
                finish     remember how far clients moved, and which way
    weights     updates    say how much each client counts
    privacy     sampling   draw clients independently
                tasks      refuse tasks whose answers the guarantee does not cover
                updates    cut every change to the bound
                merged     add noise
                finish     count ε
    late        sampling   on Flower: give clients that come late their tiers, and skip attempts that reach nobody
    optimizer   merged     make a step towards the mean instead of taking it
    theory      tasks      ask clients to measure their steps
                updates    measure how far clients drift apart
                merged     let clients compute gradients
                finish     record the terms of the convergence bound
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedhm.server.record import Record
from fedhm.work.messages import Participant, Reply, Task, Update

S = TypeVar("S")


@dataclass(frozen=True)
class Arrival:
    """A reply on its way to the merge, and the task that it answers."""

    task: Task
    reply: Reply

    @property
    def update(self) -> Update:
        """Return the update. Behind admission there are no failures."""
        assert isinstance(self.reply, Update)
        return self.reply


class RoundFilter:
    """One concern of a round. A filter overrides the hooks that it needs; the others pass everything on."""

    def restore(self, records: Sequence[Record]) -> None:
        """Begin a run: forget everything, and learn from the rounds that are done already."""

    def sampling(self, attempts: Iterator[list[Participant]], round_number: int) -> Iterator[list[Participant]]:
        """Change who takes part: the participants of the first attempt, of the second, and so on."""
        return attempts

    def tasks(self, tasks: list[Task], record: Record) -> list[Task]:
        """Change the tasks of an attempt before they are sent."""
        return tasks

    def updates(self, arrivals: Iterator[Arrival], record: Record) -> Iterator[Arrival]:
        """Change or drop updates, one at a time, in the order of their tasks."""
        return arrivals

    def merged(self, before: S, merged: S, record: Record) -> S:
        """Change the merged state of a round that counts; return `merged` itself to leave it alone."""
        return merged

    def finish(self, records: Sequence[Record]) -> None:
        """Learn from the last of these rounds, which was merged, and complete its record."""
