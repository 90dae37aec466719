"""Admission: every reply is checked here before the server computes with it.

An update may come from a client that diverged, is broken, or means harm. So nothing in it is trusted, not even the
types of its values. Its numbers are bounded, since a single 1e38 destroys a mean.
"""

import math
import reprlib
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from fedhm.config.schema import ResolvedConfig
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.machine.printable import printable
from fedhm.networks.exchange import Tensors, size_in_bytes
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.clip import cap_samples, sample_limit
from fedhm.server.filters.filter import Arrival, RoundFilter
from fedhm.server.record import Record
from fedhm.work.messages import Failure, Reply, Task, TrainingMeasures, Update
from fedhm.work.work import LARGEST_LOGIT, LARGEST_LOSS, LARGEST_MEAN, Expected, validate_change, work_of

_short = reprlib.Repr()  # a client's text may be of any length
_short.maxstring = 80


class Admission(RoundFilter):
    """Passes usable updates on, counts the traffic of all replies, and records why the others were dropped."""

    def __init__(self, config: ResolvedConfig, federation: Federation, facts: TaskFacts) -> None:
        self._config, self._federation, self._facts = config, federation, facts
        # The server counts the samples of clients on this machine itself.
        bounded = federation.remote and config.server.robust != "none"
        self._train_sample_limit = sample_limit(federation.remote) if bounded else None
        self._test_sample_limit = sample_limit(federation.client_tests.remote) if bounded else None

    def tasks(self, tasks: list[Task], record: Record) -> list[Task]:
        return [self._facts.travels(task) for task in tasks]

    def updates(self, arrivals: Iterator[Arrival], record: Record) -> Iterator[Arrival]:
        for arrival in arrivals:
            task, checked = arrival.task, self._checked(arrival.reply, arrival.task)
            record.count(task, checked, self._facts.macs(task) if isinstance(arrival.reply, Update) else 0)
            if isinstance(checked, Failure):
                self._drop(task, checked, record)
            else:
                yield Arrival(task, checked)

    def _checked(self, reply: Reply, task: Task) -> Reply:
        """Return the reply, or a failure that cost as many bytes if the update must not be merged."""
        if isinstance(reply, Failure):
            return reply
        reason = reason_to_refuse(reply, task, self.expected(task))
        if reason is None:
            tests = work_of(task.kind).tests
            limit = self._test_sample_limit if tests else self._train_sample_limit
            return cap_samples(self._with_fixed_tensors(reply, task), limit)
        up = _size_of_anything(reply.tensors) if reply.up is None else reply.up
        return Failure(task.client, reason, reply.position, down=reply.down, up=up)

    def _with_fixed_tensors(self, update: Update, task: Task) -> Update:
        """Restore tensors that training leaves alone, since half precision has rounded them."""
        if not self._facts.halved or not work_of(task.kind).returns_network:
            return update
        fixed = self._facts.network(task.network).fixed
        return replace(update, tensors={n: task.tensors[n] if n in fixed else t for n, t in update.tensors.items()})

    def expected(self, task: Task) -> Expected:
        """Return what the server knows about a task's answer in advance."""
        config, facts = self._config, self._facts.network(task.network)
        return Expected(
            self._facts.answer(task),
            # A remote client may get more samples; its engine holds it to the number that it claimed last.
            samples=0 if self._federation.remote else self._facts.samples(task),
            classes=self._federation.classes,
            labelled=work_of(task.kind).trains and config.train.masked_loss and config.objective.has_labels,
            running=facts.layout.averages,
            fixed=facts.fixed,
            halved=self._facts.halved,
            largest_output=LARGEST_LOGIT if config.objective.has_labels else LARGEST_MEAN,
            max_change=config.train.max_change,
            objective=config.objective,
        )

    def _drop(self, task: Task, failure: Failure, record: Record) -> None:
        reason = printable(failure.reason)  # a client may have written it
        if self._config.train.on_bad_update == "stop":
            raise FedhmError(
                f"the update of client {task.client} (tier {task.tier}) in round {task.round} cannot be used: "
                f"{reason}; {_hint(reason, self._config)}, "
                "or go on without such updates with train.on_bad_update = 'drop'"
            ) from failure.cause
        record.dropped.append({"client": task.client, "tier": task.tier, "kind": task.kind, "reason": reason})


def _hint(reason: str, config: ResolvedConfig) -> str:
    if "its change has norm" in reason:
        return "lower train.lr or raise train.max_change"
    if "half precision" in reason:  # the reason itself says what to set
        return "or lower train.lr"
    if "loss" in reason or "NaN" in reason:
        if config.train.gradient_limit:
            return "lower train.lr or train.clip_norm"
        advised = config.method.clip_norm(config.train.lr)
        return (
            f"set train.clip_norm = {advised:.3g} or lower train.lr"
            if advised
            else "lower train.lr or set train.clip_norm"
        )
    return "mend the client"


def _size_of_anything(tensors: Tensors) -> int:
    """Return the bytes of a client's tensors, which may be anything else instead."""
    if not isinstance(tensors, dict):
        return 0
    return size_in_bytes({name: t for name, t in tensors.items() if isinstance(t, Tensor) and not t.is_nested})


def reason_to_refuse(update: Update, task: Task, expected: Expected) -> str | None:
    """Return why `update` must not be merged as the answer to `task`; None if it may."""
    reason = (
        _wrong_task(update, task)
        or _wrong_claim(update, expected)
        or _wrong_measures(update.measured, task)
        or _wrong_tensors(update.tensors, expected.tensors)
        or _wrong_tensors(update.kept, task.kept)
    )
    return (
        reason
        or work_of(task.kind).validate(update, task, expected)
        or validate_change(update.kept, task.kept, expected)
    )


def _wrong_task(update: Update, task: Task) -> str | None:
    for name in ("kind", "round", "client", "tier", "network"):
        asked, answered = getattr(task, name), getattr(update, name)
        if type(answered) is not type(asked) or answered != asked:
            return f"it answers another task, of {name} {_short.repr(answered)} instead of {_short.repr(asked)}"
    return None


def _wrong_claim(update: Update, expected: Expected) -> str | None:
    samples, labels, loss = update.samples, update.labels, update.loss
    if type(samples) is not int or samples < 1 or samples != (expected.samples or samples):
        return f"it claims {_short.repr(samples)} samples instead of {expected.samples or 'some'}"
    if (labels is not None) != expected.labelled:
        return f"it {'does not say' if expected.labelled else 'says'} which labels it holds"
    if labels is not None:
        if not isinstance(labels, tuple | list) or not all(type(label) is int for label in labels):
            return f"its labels are {_short.repr(labels)}, not class numbers"
        if len(set(labels)) < max(1, len(labels)):
            return "it claims a label twice" if labels else "it claims to hold no label"
        if min(labels) < 0 or max(labels) >= expected.classes:
            return f"it claims labels outside 0…{expected.classes - 1}"
    if not isinstance(loss, float):
        return f"its loss is {_short.repr(loss)}, not a number"
    if not math.isfinite(loss):
        return f"its loss became {'NaN' if math.isnan(loss) else 'infinite'}"
    if abs(loss) > LARGEST_LOSS:
        return f"its loss is {loss:.0e}"
    return None


def _wrong_measures(measured: TrainingMeasures | None, task: Task) -> str | None:
    """Return why measures of training must not be used; None if they may, or if none were asked for and none came."""
    if (measured is not None) != task.options.measure:
        return f"it {'lacks' if measured is None else 'adds'} measures of its training"
    if measured is None:
        return None
    if type(measured) is not TrainingMeasures:
        return f"its measures of training are {_short.repr(measured)}"
    for name, value in asdict(measured).items():
        if type(value) is not float or not 0 <= value <= LARGEST_LOSS:  # NaN is in no order
            return f"its {name} is {_short.repr(value)}, not a number from 0 to {LARGEST_LOSS:.0e}"
    return None


def _wrong_tensors(tensors: Tensors, expected: Tensors) -> str | None:
    """Return why names, shapes or types are not the expected ones; None if they are."""
    if not isinstance(tensors, dict):
        return f"it has {_short.repr(tensors)} in place of tensors"
    if odd := tensors.keys() ^ expected.keys():
        name = min(odd, key=repr)
        return f"it {'lacks' if name in expected else 'adds'} the tensor {_short.repr(name)}"
    for name, tensor in tensors.items():
        if not _is_plain(tensor):
            return f"'{name}' is not a plain dense tensor"
        if tensor.shape != expected[name].shape:
            return f"'{name}' has shape {_short.repr(tuple(tensor.shape))} instead of {tuple(expected[name].shape)}"
        if tensor.dtype != expected[name].dtype:
            return f"'{name}' has type {tensor.dtype} instead of {expected[name].dtype}"
    return None


def _is_plain(tensor: object) -> bool:
    """Tell whether a tensor is stored plainly: any other may raise an error, or change, when computed with."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    apart = tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.device.type == "cpu" and not apart and tensor.is_contiguous()
