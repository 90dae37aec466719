"""The loop: tasks → engine → updates → admission → merge → evaluate each tier → record → checkpoint."""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
from torch import nn

from fedhm.admission import objection
from fedhm.batchnorm import blank, pool, running_names
from fedhm.checkpoint import Checkpoint
from fedhm.client import Client
from fedhm.config import Config
from fedhm.cost import Cost, measure
from fedhm.data.batches import Feed
from fedhm.data.federation import Federation
from fedhm.device import CPU, find_device
from fedhm.distil import blank_scores
from fedhm.engines.engine import Engine, in_task_order
from fedhm.engines.local import LocalEngine, workers_for
from fedhm.errors import FedhmError
from fedhm.evaluate import Score, evaluate
from fedhm.exchange import exchanged, load, travels_as
from fedhm.fingerprint import data_facts, fingerprint
from fedhm.folder import RunFolder
from fedhm.messages import Failure, Reply, Task, Tensors, Update
from fedhm.method_config import Distilling
from fedhm.methods import make_method
from fedhm.methods.method import Setup, State
from fedhm.probe import probe
from fedhm.records import Record
from fedhm.reuse import Networks, check_compiler
from fedhm.sampling import check_assignment, participants


class Watcher(Protocol):
    """Is told how a run goes."""

    def started(self, done: int, rounds: int) -> None: ...
    def task_done(self, round_number: int, what: str, done: int, of: int) -> None: ...
    def round_done(self, record: Record) -> None: ...


@dataclass(frozen=True)
class Result:
    records: list[Record]
    networks: dict[str, nn.Module]  # the final model of every tier
    costs: dict[str, Cost]

    @property
    def scores(self) -> dict[str, Score]:
        return self.records[-1].scores


class Experiment:
    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        config: Config,
        engine: Engine | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.config, self.watchers = config, watchers
        self.clients, self.classes = len(federation.clients), federation.classes
        device = find_device(config.engine.device)
        if config.engine.compile:
            check_compiler(device)
        self._test = Feed(federation.test, federation.preprocessing, device)
        batch, _ = next(self._test.on(CPU).ordered(1))
        public, self.public = federation.public_feed(), len(federation.public or ())
        if not self.public and isinstance(config.method, Distilling):
            raise FedhmError(
                f"{config.method.name} distils on public data, of which this run has none: "
                "set data.public to a source or to 'held-out', or give fedhm.run some with public="
            )
        fixed = config.federation.heterogeneity == "fixed"
        setup = Setup(probe(model, batch, federation.classes), batch, config.seed, public, fixed)
        self.method = make_method(model, config.method, setup)
        check_assignment(config.federation, self.clients, self.method.tiers)
        self.cost = cache(lambda name: measure(self.method.network(name), federation.input_shape, batch.dtype))
        self.running_names = cache(lambda name: running_names(self.method.network(name)))
        self.statistics = cache(lambda name: blank(self.method.network(name), batch))
        self.scores = cache(lambda name: blank_scores(self.method.network(name), batch, self.public))
        self.costs = {tier: self.cost(tier) for tier in self.method.tiers}
        settings = config.resolved().engine
        networks = Networks(self.method.network, device, settings.compile)
        parts = (federation.preprocessing, networks, config.train, config.seed, public)
        workers = workers_for(settings, config.federation.per_round(self.clients))
        clients = [Client(samples, *parts) for samples in federation.clients]
        self.engine = engine or LocalEngine(clients, workers, settings.threads)
        self._threads = settings.server_threads
        self._initial = {name: tensor.clone() for name, tensor in exchanged(model).items()}
        self.fingerprint = fingerprint(config, self._initial, federation)
        self.data_facts = data_facts(federation)

    def run(self, folder: RunFolder | None = None) -> Result:
        """Runs the rounds that are left; with a folder, a round counts once its checkpoint is on disk."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._run(folder)
        finally:
            self.engine.close()
            torch.set_num_threads(threads)

    def _run(self, folder: RunFolder | None) -> Result:
        rounds, every = self.config.train.rounds, self.config.evaluation.every
        state, records = self._begin(folder)
        networks: dict[str, nn.Module] = {}
        for number in range(len(records) + 1, rounds + 1):
            chosen = participants(self.config.federation, self.clients, self.method.levels, self.config.seed, number)
            record = Record(number, chosen)
            with record.phase("merge"):
                updates = self._updates(self.method.tasks(state, chosen, number), record)
                state = self.method.merge(state, record.timed("train", updates))
            record.seconds["merge"] -= record.seconds["train"]  # merging waits for training
            record.diagnostics = state.diagnostics
            if number % every == 0 or number == rounds:
                networks = self._tier_networks(state, record)
                record.scores = self._scores(networks, record)
            records.append(record)
            if folder:
                folder.commit(record, Checkpoint(number, state), self.fingerprint)
            for watcher in self.watchers:
                watcher.round_done(record)
        # A run that was complete already is asked for its models once more.
        networks = networks or self._tier_networks(state, deepcopy(records[-1]))
        if folder:
            folder.save_models(networks)
        return Result(records, networks, self.costs)

    def _begin(self, folder: RunFolder | None) -> tuple[State, list[Record]]:
        checkpoint, records = folder.restore(self.fingerprint) if folder else (None, [])
        if folder:
            folder.save_costs(self.costs)
            folder.save_data_facts(self.data_facts)
        state = checkpoint.state if checkpoint else self.method.start(self._initial)
        for watcher in self.watchers:
            watcher.started(len(records), self.config.train.rounds)
        return state, records

    def _updates(self, tasks: Iterable[Task], record: Record) -> Iterator[Update]:
        """Sends tasks to the engine and lets their updates in, in the order of the tasks."""
        sent = [self._without_running(task) if self._static(task.round) else task for task in tasks]
        admitted = 0
        torch.set_num_threads(1)  # updates are folded by one thread, beside workers that keep the cores busy
        try:
            for reply in in_task_order(self.engine.run(sent), len(sent)):
                task = sent[reply.position]
                record.count(task, reply, self._macs(task, reply))
                for watcher in self.watchers:
                    watcher.task_done(record.round, task.kind, reply.position + 1, len(sent))
                if isinstance(reply, Failure):
                    self._refuse(task, reply, record)
                elif reason := objection(reply, task, self._expected(task), self.classes):
                    self._refuse(task, Failure(task.client, reason), record)
                else:
                    admitted += 1
                    yield reply
        finally:
            torch.set_num_threads(self._threads)
        if not admitted:
            reason = record.dropped[-1]["reason"] if record.dropped else "there were no clients"
            raise FedhmError(f"no client's update could be used in round {record.round}: {reason}")

    def _refuse(self, task: Task, failure: Failure, record: Record) -> None:
        if self.config.train.on_bad_update == "stop":
            hint = (
                "lower train.lr or set train.clip_norm"
                if "loss" in failure.reason or "NaN" in failure.reason
                else "mend the client"
            )
            raise FedhmError(
                f"the update of client {task.client} (tier {task.tier}) in round {task.round} cannot be used: "
                f"{failure.reason}; {hint}, or go on without such updates with train.on_bad_update = 'drop'"
            ) from failure.cause
        entry = {"client": task.client, "tier": task.tier, "kind": task.kind, "reason": failure.reason}
        record.dropped.append(entry)

    def _tier_networks(self, state: State, record: Record) -> dict[str, nn.Module]:
        """The model of every tier, its BatchNorm statistics gathered at the round's participants."""
        networks: dict[str, nn.Module] = {}
        for tier in self.method.tiers:
            weights = self.method.weights(state, tier)
            networks[tier] = load(self.method.network(tier), weights)
            if self._static(record.round) and self.running_names(tier):
                with record.phase("statistics"):
                    chosen = record.participants
                    tasks = [Task("statistics", record.round, p.client, p.tier, tier, weights) for p in chosen]
                    load(networks[tier], pool(update.tensors for update in self._updates(tasks, record)))
            travels_as(networks[tier], None)  # from here on it is a network like any other
        return networks

    def _scores(self, networks: dict[str, nn.Module], record: Record) -> dict[str, Score]:
        with record.phase("evaluate"):
            return {t: evaluate(network, self._test, self.config.evaluation.batch) for t, network in networks.items()}

    def _static(self, round_number: int) -> bool:
        start = self.config.evaluation.static_from
        return start != "never" and round_number > start

    def _without_running(self, task: Task) -> Task:
        """Static batch normalisation: running averages are neither sent nor sent back."""
        names = self.running_names(task.network)
        return replace(task, tensors={name: t for name, t in task.tensors.items() if name not in names})

    def _expected(self, task: Task) -> Tensors:
        """What an answer's tensors look like."""
        if task.kind == "distil":
            return self.scores(task.network)
        return task.tensors if task.kind == "train" else self.statistics(task.network)

    def _macs(self, task: Task, reply: Reply) -> int:
        """MACs that a task spent, as the paper counts them: those of one forward pass × epochs × samples."""
        if isinstance(reply, Failure):
            return 0
        passes = reply.samples * (1 if task.kind == "statistics" else self.config.train.epochs)
        if task.kind == "distil":
            digested = task.options["digest_epochs"] if "consensus" in task.tensors else 0
            passes += self.public * (1 + int(digested))
        macs: int = self.cost(task.network).macs
        return macs * passes
