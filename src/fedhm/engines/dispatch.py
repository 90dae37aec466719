"""One run's tasks on their way to workers and back."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from fedhm.engines.arena import Arena, Place
from fedhm.engines.parcel import Note, packed_task, read, unpacked_error, unpacked_reply, write
from fedhm.work.messages import Reply, Task


class Dispatch:
    """A run's tasks, handed out as there are slots for them, and never far ahead of the oldest that is not answered:
    later replies have to wait for it, and must not become more and more."""

    def __init__(self, tasks: Iterable[Task], shared: Arena, slots: Sequence[Arena], notes: int, window: int) -> None:
        self.under_way: dict[int, Task] = {}  # by position, oldest first
        self._tasks, self._position = iter(tasks), 0
        self._shared, self._slots, self._notes, self._window = shared, slots, notes, window
        self._free = list(range(len(slots)))
        self._places: dict[int, tuple[Tensor, Place]] = {}  # by identity: what goes to many clients is written once
        shared.used = 0

    def hand_out(self) -> None:
        while self._free and self._position - next(iter(self.under_way), self._position) < self._window:
            task = next(self._tasks, None)
            if task is None:
                return
            slot = self._free.pop()
            own = self._slots[slot]
            own.used = 0
            self.under_way[self._position] = task
            write(packed_task(task, self._position, self._share, own.put), slot, own).send(self._notes)
            self._position += 1

    def accept(self, note: Note) -> Reply:
        values = read(note, self._slots[note.slot])
        if "error" in values:
            raise unpacked_error(values["error"], self.under_way[values["error"]["position"]])
        reply = unpacked_reply(values, self._slots[note.slot])
        del self.under_way[reply.position]
        self._free.append(note.slot)
        return reply

    def _share(self, tensor: Tensor) -> Place:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = tensor, self._shared.put(tensor)  # held, so that its identity stays its own
        return self._places[id(tensor)][1]
