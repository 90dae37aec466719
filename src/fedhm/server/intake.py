"""From tasks to the updates that may be merged: the engine's replies in order, through the door, into the record."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedhm.config.settings import Config
from fedhm.data.federation import Federation
from fedhm.engines.engine import Engine, in_task_order
from fedhm.errors import FedhmError
from fedhm.measure.cost import measure
from fedhm.methods.method import Method
from fedhm.networks.batchnorm import blank, running_names
from fedhm.networks.exchange import Tensors, size_in_bytes
from fedhm.server.admission import Expected, objection
from fedhm.server.record import Record, Watcher
from fedhm.work.distil import blank_scores
from fedhm.work.messages import Failure, Reply, Task, Update


class TooFewUpdatesError(FedhmError):
    """A round's attempt failed; another one may not."""


class Intake:
    """`config` is resolved; `sample` is a batch of one input."""

    def __init__(
        self, method: Method, federation: Federation, config: Config, sample: Tensor, watchers: Sequence[Watcher]
    ) -> None:
        self._federation, self._config, self._watchers = federation, config, watchers
        self._public = len(federation.public or ())
        self.cost = cache(lambda name: measure(method.network(name), federation.input_shape, sample.dtype))
        self.running_names = cache(lambda name: frozenset(running_names(method.network(name))))
        self._statistics = cache(lambda name: blank(method.network(name), sample))
        self._scores = cache(lambda name: blank_scores(method.network(name), sample, self._public))

    def updates(self, engine: Engine, tasks: Iterable[Task], record: Record, least: int = 0) -> Iterator[Update]:
        """Sends tasks to the engine and lets their updates in, in the order of the tasks.

        Raises in the end if there were fewer than `least`, so that who merges them does not come to a result.
        """
        sent = [self._without_running(task) if self.static(task.round) else task for task in tasks]
        admitted, before = 0, len(record.dropped)
        torch.set_num_threads(1)  # updates are folded by one thread, beside workers that keep the cores busy
        try:
            for reply in in_task_order(engine.run(sent), len(sent)):
                task = sent[reply.position]
                judged = self._judged(reply, task)
                record.count(task, judged, self._macs(task) if isinstance(reply, Update) else 0)
                for watcher in self._watchers:
                    watcher.task_done(record.round, task.kind, reply.position + 1, len(sent))
                if isinstance(judged, Failure):
                    self._refuse(task, judged, record)
                else:
                    admitted += 1
                    yield judged
        finally:
            torch.set_num_threads(self._config.engine.server_threads)
        if admitted < least:
            usable = "too few updates" if admitted else "no client's update"
            attempt = f"attempt {record.attempts} of {self._config.federation.attempts}"
            count = f"{admitted or 'none'} of {len(sent)}"
            reason = last_reason(record.dropped[before:])
            raise TooFewUpdatesError(f"{usable} could be used in round {record.round}, {count} in {attempt}: {reason}")

    def static(self, round_number: int) -> bool:
        start = self._config.evaluation.static_from
        return start != "never" and round_number > start

    def _without_running(self, task: Task) -> Task:
        """Static batch normalisation: running averages are neither sent nor sent back."""
        names = self.running_names(task.network)
        return replace(task, tensors={name: t for name, t in task.tensors.items() if name not in names})

    def _judged(self, reply: Reply, task: Task) -> Reply:
        """The reply, or in place of an update that must not be merged a failure that cost as many bytes."""
        if isinstance(reply, Failure):
            return reply
        reason = objection(reply, task, self._expected(task))
        if reason is None:
            return reply
        up = _size_of_anything(reply.tensors) if reply.up is None else reply.up
        return Failure(task.client, reason, reply.position, down=reply.down, up=up)

    def _expected(self, task: Task) -> Expected:
        tensors = task.tensors
        if task.kind != "train":
            tensors = (self._scores if task.kind == "distil" else self._statistics)(task.network)
        return Expected(
            tensors,
            # What a remote client says of itself may change; its engine holds it to what it said last.
            0 if self._federation.remote else self._federation.samples_of(task.client),
            self._federation.classes,
            task.kind != "statistics" and self._config.train.masked_loss,
            self.running_names(task.network),
            self._config.train.max_change,
        )

    def _refuse(self, task: Task, failure: Failure, record: Record) -> None:
        if self._config.train.on_bad_update == "stop":
            raise FedhmError(
                f"the update of client {task.client} (tier {task.tier}) in round {task.round} cannot be used: "
                f"{failure.reason}; {_hint(failure.reason)}, "
                "or go on without such updates with train.on_bad_update = 'drop'"
            ) from failure.cause
        entry = {"client": task.client, "tier": task.tier, "kind": task.kind, "reason": failure.reason}
        record.dropped.append(entry)

    def _macs(self, task: Task) -> int:
        """MACs that a task spends, as the paper counts them: those of one forward pass × epochs × samples."""
        epochs = 1 if task.kind == "statistics" else self._config.train.epochs
        passes = self._federation.samples_of(task.client) * epochs
        if task.kind == "distil":
            digested = task.options["digest_epochs"] if "consensus" in task.tensors else 0
            passes += self._public * (1 + int(digested))
        macs: int = self.cost(task.network).macs
        return macs * passes


def last_reason(dropped: Sequence[dict[str, Any]]) -> str:
    return f"of client {dropped[-1]['client']}, {dropped[-1]['reason']}" if dropped else "nobody answered"


def _hint(reason: str) -> str:
    if "its change has norm" in reason:
        return "lower train.lr or raise train.max_change"
    return "lower train.lr or set train.clip_norm" if "loss" in reason or "NaN" in reason else "mend the client"


def _size_of_anything(tensors: Tensors) -> int:
    """In bytes, of what a client sent as its tensors, which need not be such."""
    if not isinstance(tensors, dict):
        return 0
    return size_in_bytes({name: t for name, t in tensors.items() if isinstance(t, Tensor) and not t.is_nested})
