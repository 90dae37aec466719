"""From tasks to the updates that may be merged: the engine's replies in order, through admission, into the record."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.config.schema import ResolvedConfig
from fedhm.data.federation import Federation
from fedhm.data.samples import Batch
from fedhm.errors import FedhmError
from fedhm.machine.printable import printable
from fedhm.networks.exchange import Tensors, size_in_bytes
from fedhm.server.callbacks import Watcher
from fedhm.server.facts import NetworkFacts, facts_of
from fedhm.server.filters.admission import objection
from fedhm.server.filters.clip import capped, most_samples
from fedhm.server.record import Record
from fedhm.work.messages import Failure, Reply, Task, Update
from fedhm.work.work import LARGEST_LOGIT, LARGEST_MEAN, Example, Expected, work_of

Run = Callable[[Sequence[Task]], Iterator[Reply]]  # an engine's
Guard = Callable[[Iterator[tuple[Task, Update]]], Iterator[Update]]


class TooFewUpdatesError(FedhmError):
    """A round's attempt brought too few updates; another one may bring enough."""


class Intake:
    """Lets updates in and records them; `network` makes a network by its name, `sample` is a batch of one."""

    def __init__(
        self,
        network: Callable[[str], nn.Module],
        federation: Federation,
        config: ResolvedConfig,
        sample: Batch,
        watchers: Sequence[Watcher],
    ) -> None:
        self._federation, self._config, self._watchers = federation, config, watchers
        self._public = len(federation.public or ())
        # Of samples that are here, nobody can say another number
        guarded = federation.remote and config.server.robust != "none"
        told = (federation.remote, federation.client_tests.remote) if guarded else ((), ())
        self._most_samples = [most_samples(counts) for counts in told]  # to train on, and to test on
        example = Example(*sample, config.objective, self._public)
        self.facts: Callable[[str], NetworkFacts] = cache(lambda name: facts_of(network(name), example.inputs))
        self._blank = cache(lambda kind, name: work_of(kind).blank(network(name), example))

    def updates(
        self, run: Run, tasks: Iterable[Task], record: Record, least: int = 0, guard: Guard | None = None
    ) -> Iterator[Update]:
        """Send tasks to the engine and let their updates in, in the order of the tasks.

        Raises in the end if there were fewer than `least`, or than tasks where these are fewer still, so that whoever
        merges them gets no result.

        guard  makes of the updates that were let in those that are to be merged, which are those that count
        """
        torch.set_num_threads(1)  # updates are folded by one thread, beside workers that keep the cores busy
        sent, merged, before = [self._as_it_travels(task) for task in tasks], 0, len(record.dropped)
        try:
            admitted = self._admitted(run, sent, record, least)
            for update in guard(admitted) if guard else (update for _, update in admitted):
                merged += 1
                yield update
            self._check_enough(merged, min(least, len(sent)), len(sent), record, before)
        finally:
            torch.set_num_threads(self._config.engine.server_threads)

    def _admitted(self, run: Run, sent: Sequence[Task], record: Record, least: int) -> Iterator[tuple[Task, Update]]:
        admitted, before = 0, len(record.dropped)
        for reply in in_task_order(run(sent), len(sent)):
            task = sent[reply.position]
            judged = self._judged(reply, task)
            record.count(task, judged, self._macs(task) if isinstance(reply, Update) else 0)
            for watcher in self._watchers:
                watcher.task_done(record.round, task.kind, reply.position + 1, len(sent))
            if isinstance(judged, Failure):
                self._refuse(task, judged, record)
            else:
                admitted += 1
                yield task, judged
        self._check_enough(admitted, min(least, len(sent)), len(sent), record, before)  # a guard need not go on then

    def _check_enough(self, found: int, least: int, sent: int, record: Record, before: int) -> None:
        """Refuse an attempt with fewer updates than are needed; `before` it so many had been dropped in the round."""
        if found < least:
            usable = "too few updates" if found else "no client's update"
            attempt = f"attempt {record.attempts} of {self._config.federation.attempts}"
            count = f"{found or 'none'} of {sent}"
            reason = last_reason(record.dropped[before:])
            raise TooFewUpdatesError(f"{usable} could be used in round {record.round}, {count} in {attempt}: {reason}")

    def static(self, round_number: int) -> bool:
        start = self._config.evaluation.static_from
        return start != "never" and round_number > start and not self._config.train.frozen_statistics

    def sizes(self, task: Task) -> tuple[int, int]:
        """Return the bytes of tensors that a task takes down, and its update up, whichever engine carries them."""
        work, task = work_of(task.kind), self._as_it_travels(task)
        up = work.loaded(task) if work.returns_network else self._blank(task.kind, task.network)
        down, back = (size_in_bytes(tensors) for tensors in (task.tensors, up))
        return (down // 2, back // 2) if self._halved else (down, back)

    def passes(self, task: Task) -> int:
        """Return how many samples go forward through a task's network."""
        return work_of(task.kind).passes(task, self.samples(task), self._public, self._config.train)

    def _as_it_travels(self, task: Task) -> Task:
        """Leave running averages out, which under static batch normalisation travel only to be evaluated with."""
        if not self.static(task.round) or work_of(task.kind).tests:
            return task
        names = self.facts(task.network).running
        return replace(task, tensors={name: t for name, t in task.tensors.items() if name not in names})

    def _judged(self, reply: Reply, task: Task) -> Reply:
        """Return the reply, or in place of an update that must not be merged a failure that cost as many bytes."""
        if isinstance(reply, Failure):
            return reply
        reason = objection(reply, task, self._expected(task))
        if reason is None:
            return capped(self._as_sent(reply, task), self._most_samples[work_of(task.kind).tests])
        up = _size_of_anything(reply.tensors) if reply.up is None else reply.up
        return Failure(task.client, reason, reply.position, down=reply.down, up=up)

    def _as_sent(self, update: Update, task: Task) -> Update:
        """Give back their digits to tensors that training leaves alone, where these were lost on the way."""
        if not self._halved or not work_of(task.kind).returns_network:
            return update
        fixed = self.facts(task.network).fixed
        return replace(update, tensors={n: task.tensors[n] if n in fixed else t for n, t in update.tensors.items()})

    @property
    def _halved(self) -> bool:
        return self._config.engine.fp16 and self._config.engine.name == "flower"

    def _expected(self, task: Task) -> Expected:
        work, config = work_of(task.kind), self._config
        facts = self.facts(task.network)
        return Expected(
            work.loaded(task) if work.returns_network else self._blank(task.kind, task.network),
            # What a remote client says of itself may change; its engine holds it to what it said last.
            0 if self._federation.remote else self.samples(task),
            self._federation.classes,
            work.trains and config.train.masked_loss and config.objective.has_labels,
            facts.layout.averages,
            facts.fixed,
            self._halved,
            LARGEST_LOGIT if config.objective.has_labels else LARGEST_MEAN,
            config.train.max_change,
            config.objective,
        )

    def samples(self, task: Task) -> int:
        """Return how many samples a task's client has for this kind of work."""
        tests, client = work_of(task.kind).tests, task.client
        return self._federation.client_tests.count(client) if tests else self._federation.samples_of(client)

    def _refuse(self, task: Task, failure: Failure, record: Record) -> None:
        reason = printable(failure.reason)  # a client may have written it
        if self._config.train.on_bad_update == "stop":
            raise FedhmError(
                f"the update of client {task.client} (tier {task.tier}) in round {task.round} cannot be used: "
                f"{reason}; {_hint(reason)}, "
                "or go on without such updates with train.on_bad_update = 'drop'"
            ) from failure.cause
        entry = {"client": task.client, "tier": task.tier, "kind": task.kind, "reason": reason}
        record.dropped.append(entry)

    def _macs(self, task: Task) -> int:
        """Return the MACs that a task spends, as the paper counts them: those of the samples' forward passes."""
        return self.facts(task.network).cost.macs * self.passes(task)


def in_task_order(replies: Iterable[Reply], count: int) -> Iterator[Reply]:
    """Hold back what came early, so that sums do not depend on who was faster.

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


def last_reason(dropped: Sequence[dict[str, Any]]) -> str:
    return f"of client {dropped[-1]['client']}, {dropped[-1]['reason']}" if dropped else "nobody answered"


def _hint(reason: str) -> str:
    if "its change has norm" in reason:
        return "lower train.lr or raise train.max_change"
    if "half precision" in reason:  # which says what to do
        return "or lower train.lr"
    return "lower train.lr or set train.clip_norm" if "loss" in reason or "NaN" in reason else "mend the client"


def _size_of_anything(tensors: Tensors) -> int:
    """Return the bytes of what a client sent as its tensors, which need not be such."""
    if not isinstance(tensors, dict):
        return 0
    return size_in_bytes({name: t for name, t in tensors.items() if isinstance(t, Tensor) and not t.is_nested})
