"""What was done to the runs, and what came of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


class TooLateError(Exception):
    """Raised where a run was done before it could be hit: this counts for nothing."""


class LostError(Exception):
    """Raised where a run cannot be resumed, says so in another form than a sentence, or leaves something behind."""


@dataclass
class Counted:
    times: int = 0
    lost: int = 0


@dataclass
class Tally:
    """Counts faults by their names, and says each of them as it happens."""

    say: Callable[[str], None] = print
    faults: dict[str, Counted] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _pending: list[str] = field(default_factory=list)  # of the run under way: what becomes of it decides

    def tell(self, sentence: str) -> None:
        self.say(f"[{time.monotonic() - self.began:4.0f} s] {sentence}")

    def struck(self, fault: str, what: str) -> None:
        self.faults.setdefault(fault, Counted()).times += 1
        self._pending.append(fault)
        self.tell(f"{fault}: {what}")

    def ended(self, run: str, problem: str) -> None:
        """Close a run: with a problem all that was done to it counts as lost, since any of it may be the reason."""
        hit = self._pending
        for fault in hit if problem else ():
            self.faults[fault].lost += 1
        if problem and not hit:
            self.faults.setdefault("none at all", Counted()).lost += 1
        self.tell(f"{run} after {len(hit)} fault{'s' * (len(hit) != 1)}: {problem or 'the same, bit for bit'}")
        self._pending = []

    def counted(self, fault: str, problem: str) -> None:
        """Count a fault whose outcome is known, and tell it if something was lost."""
        found = self.faults.setdefault(fault, Counted())
        found.times += 1
        if problem:
            found.lost += 1
            self.tell(f"{fault}: {problem}")

    def times(self, fault: str) -> int:
        return self.faults.get(fault, Counted()).times

    @property
    def lost(self) -> int:
        return sum(counted.lost for counted in self.faults.values())

    def table(self) -> str:
        lines = ["| fault | how often | lost | withstood |", "|---|--:|--:|--:|"]
        rows = [*sorted(self.faults.items()), ("all", self._sum())]
        lines += [f"| {name} | {c.times} | {c.lost} | {max(0, c.times - c.lost)} |" for name, c in rows]
        return "\n".join(lines)

    def _sum(self) -> Counted:
        return Counted(sum(c.times for c in self.faults.values()), self.lost)
