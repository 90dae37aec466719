"""Facts about networks and tasks that the server needs before any answer comes. Each network is built once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from torch import nn

from fedhm.config.schema import ResolvedConfig
from fedhm.data.federation import Federation
from fedhm.data.samples import Batch
from fedhm.machine.memory import lacks_memory
from fedhm.measure.cost import Cost, measure, sample_spec
from fedhm.measure.self_written import find_self_written
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.exchange import Tensors, exchanged_tensors, size_in_bytes, untrained_names
from fedhm.networks.inputs import Inputs
from fedhm.networks.spec import NetworkSpec
from fedhm.server.filters.history import Layout, layout_of
from fedhm.work.messages import Task
from fedhm.work.work import Example, work_of


@dataclass(frozen=True)
class NetworkFacts:
    cost: Cost
    running: frozenset[str]  # names of BatchNorm's running averages
    untrained: frozenset[str]  # names of tensors that no optimizer steps on, running averages among them
    fixed: frozenset[str]  # names of tensors that training leaves alone
    layout: Layout
    travels: frozenset[str]  # names of all tensors that are exchanged


def facts_of(network: nn.Module, sample: Inputs) -> NetworkFacts:
    """Look at a network that is thrown away afterwards; `sample` is a batch of one input."""
    running = frozenset(running_statistic_names(network))
    fixed, moving = _fixed_and_moving(network, sample)
    shape, dtype = sample_spec(sample)
    return NetworkFacts(
        measure(network, shape, dtype),
        running,
        untrained_names(network),
        fixed,
        layout_of(network, running | moving),
        frozenset(exchanged_tensors(network)),
    )


def _fixed_and_moving(network: nn.Module, sample: Inputs) -> tuple[frozenset[str], frozenset[str]]:
    """Return the tensors that training leaves alone, and the untrained tensors that a forward pass changes."""
    names = untrained_names(network) - running_statistic_names(network)
    if not names:
        return names, names
    try:
        written = find_self_written(network, sample)
    except Exception as error:  # a foreign model may raise anything: it may need another batch, which says nothing
        if lacks_memory(error):
            raise
        return frozenset(), names
    return names - written, names & written


class TaskFacts:
    """What is known about the tasks of a run: networks by spec, samples, bytes, MACs and the form of answers.

    build   makes the network of a spec
    sample  a batch of one
    """

    def __init__(
        self,
        build: Callable[[NetworkSpec], nn.Module],
        federation: Federation,
        config: ResolvedConfig,
        sample: Batch,
    ) -> None:
        self._federation, self._config = federation, config
        self._public_samples = len(federation.public or ())
        inputs, targets = sample
        example = Example(inputs, targets, config.objective, self._public_samples)
        self.network: Callable[[NetworkSpec], NetworkFacts] = cache(lambda spec: facts_of(build(spec), inputs))
        self._own_answer = cache(lambda kind, spec: work_of(kind).expected(build(spec), example))

    @property
    def halved(self) -> bool:
        """Tell whether matrices travel in half precision."""
        return self._config.engine.fp16 and self._config.engine.name == "flower"

    def static(self, round_number: int) -> bool:
        """Tell whether BatchNorm statistics are gathered for the evaluation: then running averages need not travel."""
        start = self._config.evaluation.gathers_after
        return start is not None and round_number > start and not self._config.train.frozen_statistics

    def travels(self, task: Task) -> Task:
        """Return a task without running averages, where these travel only to be evaluated with."""
        if not self.static(task.round) or work_of(task.kind).tests:
            return task
        names = self.network(task.network).running
        return replace(task, tensors={name: t for name, t in task.tensors.items() if name not in names})

    def answer(self, task: Task) -> Tensors:
        """Return tensors with the names, shapes and types of a task's answer."""
        work = work_of(task.kind)
        found: Tensors = work.loaded(task) if work.returns_network else self._own_answer(task.kind, task.network)
        return found

    def sizes(self, task: Task) -> tuple[int, int]:
        """Return the bytes of tensors that a task takes down, and its update up, whichever engine carries them."""
        task = self.travels(task)
        down, up = size_in_bytes(task.tensors), size_in_bytes(self.answer(task))
        return (down // 2, up // 2) if self.halved else (down, up)

    def samples(self, task: Task) -> int:
        """Return how many samples a task's client has for this kind of work."""
        tests, client = work_of(task.kind).tests, task.client
        return self._federation.client_tests.count(client) if tests else self._federation.samples_of(client)

    def samples_seen(self, task: Task) -> int:
        """Return how many samples go forward through a task's network."""
        return work_of(task.kind).samples_seen(task, self.samples(task), self._public_samples, self._config.train)

    def macs(self, task: Task) -> int:
        """Return the MACs that a task spends, as the paper counts them: those of the samples' forward passes."""
        return self.network(task.network).cost.macs * self.samples_seen(task)
