"""The loop: tasks → engine → updates → admission → merge → evaluate each tier → record → checkpoint."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, groupby, islice

import torch
from torch import nn

from fedhm.config.method import Distilling
from fedhm.config.settings import Config
from fedhm.data.batches import Feed
from fedhm.data.federation import Federation
from fedhm.engines.engine import Engine
from fedhm.engines.local import LocalEngine, workers_for
from fedhm.errors import FedhmError
from fedhm.machine.device import CPU, find_device
from fedhm.measure.cost import Cost
from fedhm.methods import make_method
from fedhm.methods.method import Setup, State
from fedhm.networks.batchnorm import pool
from fedhm.networks.exchange import Tensors, exchanged, load, travels_as
from fedhm.networks.probe import probe
from fedhm.runs.checkpoint import Checkpoint
from fedhm.runs.fingerprint import data_facts, fingerprint
from fedhm.runs.folder import RunFolder
from fedhm.server.intake import Intake, TooFewUpdatesError, last_reason
from fedhm.server.record import Record, Watcher
from fedhm.server.sampling import check_assignment, check_minimum, drawings
from fedhm.work.client import Client
from fedhm.work.evaluate import Score, evaluate
from fedhm.work.messages import Participant, Task
from fedhm.work.reuse import Networks, check_compiler


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
        self.clients = federation.size
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
        check_minimum(config.federation, self.clients)
        self.intake = Intake(self.method, federation, config.resolved(), batch, watchers)
        self.cost = self.intake.cost
        self.costs = {tier: self.cost(tier) for tier in self.method.tiers}
        settings = config.resolved().engine
        self._elsewhere = False  # where it would run is no part of this process
        if engine is None:
            if federation.remote:
                raise FedhmError(
                    "the clients' samples lie elsewhere: an experiment must be given an engine to reach them"
                )
            networks = Networks(self.method.network, device, settings.compile)
            parts = (federation.preprocessing, networks, config.train, config.seed, public)
            workers = workers_for(settings, config.federation.per_round(self.clients))
            engine = LocalEngine([Client(samples, *parts) for samples in federation.clients], workers, settings.threads)
            self._elsewhere = config.engine.name == "flower"
        self.engine = engine
        self._threads = settings.server_threads
        self._initial = {name: tensor.clone() for name, tensor in exchanged(model).items()}
        self.fingerprint = fingerprint(config, self._initial, federation)
        self.data_facts, self._remote = data_facts(federation), bool(federation.remote)

    def run(self, folder: RunFolder | None = None) -> Result:
        """Runs the rounds that are left; with a folder, a round counts once its checkpoint is on disk."""
        if self._elsewhere:
            raise FedhmError(
                "engine.name = 'flower' is for 'fedhm run' and 'fedhm resume', and for Flower apps made by fedhm.flower"
            )
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
            record = Record(number)
            state = self._next_state(state, record)
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
            if not (checkpoint and self._remote):  # of remote clients, some may be missing by now
                folder.save_data_facts(self.data_facts)
        state = checkpoint.state if checkpoint else self.method.start(self._initial)
        for watcher in self.watchers:
            watcher.started(len(records), self.config.train.rounds)
        return state, records

    def _next_state(self, state: State, record: Record) -> State:
        """After a round, which is tried again with other clients if too few of their updates can be used."""
        federation = self.config.federation
        for attempt, chosen in enumerate(self._drawings(record.round), start=1):
            record.attempts, record.participants = attempt, chosen
            tasks = self.method.tasks(state, chosen, record.round)
            updates = self.intake.updates(self.engine, tasks, record, least=federation.min_updates)
            try:
                with record.phase("merge"):
                    merged = self.method.merge(state, record.timed("train", updates))
                break
            except TooFewUpdatesError:
                if attempt == federation.attempts:
                    raise
        record.seconds["merge"] -= record.seconds["train"]  # merging waits for training
        return merged

    def _tier_networks(self, state: State, record: Record) -> dict[str, nn.Module]:
        """The model of every tier, its BatchNorm statistics gathered at the round's participants."""
        weights = {tier: self.method.weights(state, tier) for tier in self.method.tiers}
        networks = {tier: load(self.method.network(tier), weights[tier]) for tier in weights}
        if self.intake.static(record.round) and any(self.intake.running_names(tier) for tier in weights):
            with record.phase("statistics"):
                for tier, statistics in self._statistics(weights, record):
                    load(networks[tier], statistics)
        # from here on they are networks like any others
        return {tier: travels_as(network, None) for tier, network in networks.items()}

    def _statistics(self, weights: dict[str, Tensors], record: Record) -> Iterator[tuple[str, Tensors]]:
        """Of every tier that has any. What no participant answered for is asked of other clients."""
        missing = [tier for tier in weights if self.intake.running_names(tier)]
        others = islice(self._drawings(record.round), record.attempts, None)
        for chosen in islice(chain([record.participants], others), self.config.federation.attempts):
            asked = [(tier, p) for tier in missing for p in chosen]
            tasks = [Task("statistics", record.round, p.client, p.tier, tier, weights[tier]) for tier, p in asked]
            updates = self.intake.updates(self.engine, tasks, record)
            for tier, of_tier in groupby(updates, key=lambda update: update.network):
                yield tier, pool(update.tensors for update in of_tier)
                missing.remove(tier)
            if not missing:
                return
        reason = last_reason([entry for entry in record.dropped if entry["kind"] == "statistics"])
        raise FedhmError(
            f"no client's BatchNorm statistics of tier {missing[0]} could be used in round {record.round}: {reason}"
        )

    def _drawings(self, round_number: int) -> Iterator[list[Participant]]:
        return drawings(self.config.federation, self.clients, self.method.levels, self.config.seed, round_number)

    def _scores(self, networks: dict[str, nn.Module], record: Record) -> dict[str, Score]:
        with record.phase("evaluate"):
            return {t: evaluate(network, self._test, self.config.evaluation.batch) for t, network in networks.items()}
