"""The loop: tasks → engine → updates → admission → merge → optimizer → evaluate each tier → record → checkpoint."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any
from warnings import warn

import torch
from torch import nn

from fedhm.config.objective import Metrics
from fedhm.config.settings import ResolvedConfig
from fedhm.data.batches import Feed
from fedhm.engines.engine import Engine
from fedhm.errors import FedhmWarning
from fedhm.measure.cost import Cost
from fedhm.methods.method import AnyMethod
from fedhm.networks.exchange import Tensors, as_types_of, load, travels_as
from fedhm.privacy.mechanism import Mechanism
from fedhm.runs.best_models import keep_only, load_best, save_best
from fedhm.runs.checkpoint import Checkpoint
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.folder import RunFolder
from fedhm.runs.secret import new_secret
from fedhm.server.client_evaluation import evaluate_at_clients
from fedhm.server.client_metrics import ClientMetrics
from fedhm.server.flatten import check_state
from fedhm.server.gather import gather_statistics
from fedhm.server.guard import Defence
from fedhm.server.intake import Guard, Intake, TooFewUpdatesError
from fedhm.server.optimizer import Moments, ServerOptimizer
from fedhm.server.record import Record, Watcher
from fedhm.server.sampling import drawings, evaluators, with_a_network
from fedhm.server.stopping import Stopping
from fedhm.work.evaluate import evaluate
from fedhm.work.messages import Participant, Task, Update


@dataclass(frozen=True)
class Result:
    records: list[Record]
    networks: dict[str, nn.Module]  # the final model of every tier
    costs: dict[str, Cost]
    best_round: int = 0  # the best one of a run that could end early ([stop]), and every tier's model after it
    best: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, Metrics]:
        """Return the metrics of every tier's final model."""
        return self.records[-1].metrics

    @property
    def clients(self) -> dict[str, ClientMetrics]:
        """Return how every tier's final model does at the clients; empty where they have no test samples."""
        return self.records[-1].clients

    @property
    def scores(self) -> dict[str, Metrics]:
        """Return the metrics by the name that the first version had for them."""
        return self.metrics


@dataclass
class Experiment:
    """A run made of ready parts, which `fedhm.assemble` puts together."""

    config: ResolvedConfig
    method: AnyMethod
    initial: Tensors  # weights of the full model
    clients: int
    test: Feed | None  # None: metrics are those of the clients
    intake: Intake
    optimizer: ServerOptimizer
    engine: Engine
    costs: dict[str, Cost]  # by tier
    fingerprint: Callable[[Mapping[str, Any] | None], str]  # of this very run, from the settings that its folder states
    data: DataFacts
    watchers: Sequence[Watcher] = ()
    remote: bool = False  # the clients' samples lie elsewhere
    holders: Sequence[int] = ()  # the clients that have test samples
    stopping: Stopping | None = None  # None: it never ends before its last round
    privacy: Mechanism | None = None  # None: nothing is hidden

    def run(self, folder: RunFolder | None = None) -> Result:
        """Run the rounds that are left; with a folder, a round counts once its checkpoint is on disk."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.config.engine.server_threads)
        try:
            return self._run(folder)
        finally:
            self.engine.close()
            torch.set_num_threads(threads)

    def _run(self, folder: RunFolder | None) -> Result:
        rounds, every = self.config.train.rounds, self.config.evaluation.every
        run = self.fingerprint(folder.begun.stated) if folder else ""
        (state, moments), records = self._begin(folder, run)
        defence = Defence(self.config, self.intake, self.method.one_model, records)
        networks: dict[str, nn.Module] = {}
        best: dict[str, nn.Module] = {}
        for number in range(len(records) + 1, rounds + 1):
            if records and records[-1].stopped:
                break
            record = Record(number)
            state, moments = self._next_state(state, moments, record, defence.guard(record))
            defence.done(record)
            if number == 1:
                check_state(state, self.method.state_type)  # parts that were empty at the start are there now
            record.diagnostics = state.diagnostics
            if number % every == 0 or number == rounds:
                weights = self._tier_weights(state, record)
                networks = self._tier_networks(weights)
                record.clients = self._at_clients(weights, record)
                record.metrics = self._metrics(networks, record)
            records.append(record)
            record.epsilon = self.privacy.epsilon(records) if self.privacy else None
            if self.stopping and number < rounds:
                record.stopped = self.stopping.reason(records)
            if self._best_round(records) == number:
                best = networks
                if folder:
                    save_best(folder.models, number, networks)
            if folder:
                folder.commit(record, Checkpoint(number, state, moments), run, self.config.checkpoints.keep)
                self._forget_others(folder, records)
            for watcher in self.watchers:
                watcher.round_done(record)
        # A run that was complete already is asked for its models once more.
        networks = networks or self._tier_networks(self._tier_weights(state, deepcopy(records[-1])))
        if folder:
            folder.save_models(networks)
        if folder:
            self._forget_others(folder, records)
        if folder and not best:  # it was found before this process resumed the run
            blank = {tier: travels_as(self.method.network(tier), None) for tier in self.method.tiers}
            best = load_best(folder.models, self._best_round(records), blank)
        return Result(records, networks, self.costs, self._best_round(records) if best else 0, best)

    def _forget_others(self, folder: RunFolder, records: Sequence[Record]) -> None:
        """Remove the models of rounds that were the best once, now that a better one counts."""
        if best := self._best_round(records):
            keep_only(folder.models, best)

    def _best_round(self, records: Sequence[Record]) -> int:
        return self.stopping.best(records) if self.stopping else 0

    def _begin(self, folder: RunFolder | None, run: str) -> tuple[tuple[Any, Moments], list[Record]]:
        checkpoint, records = folder.restore(run, self.method.state_type) if folder else (None, [])
        if self.privacy:
            self.privacy.secret.value = folder.secret(begun=bool(records)) if folder else new_secret()
        if folder:
            folder.save_costs(self.costs)
            if not (checkpoint and self.remote):  # of remote clients, some may be missing by now
                folder.save_data_facts(self.data)
        for watcher in self.watchers:
            watcher.started(len(records), self.config.train.rounds)
        if checkpoint:
            return (checkpoint.state, checkpoint.moments), records
        state = self.method.start(self.initial)
        check_state(state, self.method.state_type)
        return (state, Moments()), records

    def _next_state(
        self, state: Any, moments: Moments, record: Record, guard: Guard | None = None
    ) -> tuple[Any, Moments]:
        """Return the state after a round, which is tried again with other clients if too few updates can be used."""
        federation = self.config.federation
        least = 0 if self.privacy else federation.min_updates  # a private round counts, whoever took part
        for attempt, chosen in enumerate(self._drawings(record.round), start=1):
            record.attempts, record.participants = attempt, chosen
            try:
                with record.phase("merge"):
                    tasks = list(self.method.tasks(state, chosen, record.round))
                    updates = self.intake.updates(self.engine.run, tasks, record, least, guard)
                    merged, changed = self._merged(state, record.timed("train", updates), tasks, record)
                    if self.optimizer.steps and changed:
                        merged, moments = self.optimizer.step(state, merged, moments)
                    if changed and (self.optimizer.steps or (self.privacy and self.privacy.at_server)):
                        merged = self.method.settle(merged, state)
                break
            except TooFewUpdatesError:
                if attempt == federation.attempts:
                    raise
        record.seconds["merge"] -= record.seconds.get("train", 0.0)  # merging waits for training
        return merged, moments

    def _merged(self, state: Any, updates: Iterator[Update], tasks: Sequence[Task], record: Record) -> tuple[Any, bool]:
        """Return what a round's updates come to, and whether that is anything new: not if nobody was asked to train.

        If the server hides its clients by noise, there always is some: that nobody was asked must not be seen either.
        """
        if self.privacy:
            self.privacy.check(tasks)
        if not (self.privacy and self.privacy.at_server):
            return self.method.merge(state, updates, record.round), bool(record.traffic)
        bounded = self.privacy.bounded(updates, tasks)
        merged = self.method.merge(state, bounded, record.round)
        return self.privacy.released(state, merged, bounded.count, record.round), True

    def _tier_weights(self, state: Any, record: Record) -> dict[str, Tensors]:
        """Return every tier's weights, its BatchNorm statistics gathered at the round's participants."""
        weights = {tier: self.method.weights(state, tier) for tier in self.method.tiers}
        if self.intake.static(record.round) and any(self.intake.running_names(tier) for tier in weights):
            others = islice(self._drawings(record.round), record.attempts, None)
            able = with_a_network(chain([record.participants], others), self.method.tiers, self.clients)
            attempts = islice(able, self.config.federation.attempts)
            with record.phase("statistics"):
                robust = self.config.server.robust != "none"
                for tier, found in gather_statistics(self.intake, self.engine.run, weights, attempts, record, robust):
                    weights[tier] = {**weights[tier], **as_types_of(weights[tier], found)}
        return weights

    def _tier_networks(self, weights: Mapping[str, Tensors]) -> dict[str, nn.Module]:
        networks = {tier: load(self.method.network(tier), weights[tier]) for tier in weights}
        # from here on they are networks like any others
        return {tier: travels_as(network, None) for tier, network in networks.items()}

    def _at_clients(self, weights: Mapping[str, Tensors], record: Record) -> dict[str, ClientMetrics]:
        if not self.holders:
            return {}
        chosen = evaluators(self.config, self.holders, self.clients, self.method.levels, record.round)
        with record.phase("evaluate"):
            return evaluate_at_clients(self.intake, self.engine.run, weights, chosen, record, self.config)

    def _drawings(self, round_number: int) -> Iterator[list[Participant]]:
        if self.privacy and self.privacy.at_server:
            return iter([self.privacy.participants(round_number)])
        return drawings(self.config.federation, self.clients, self.method.levels, self.config.seed, round_number)

    def _metrics(self, networks: dict[str, nn.Module], record: Record) -> dict[str, Metrics]:
        if self.test is None:
            return {tier: found.overall.pooled for tier, found in record.clients.items()}
        batch, objective = self.config.evaluation.batch, self.config.objective
        with record.phase("evaluate"):
            found = {tier: evaluate(network, self.test, batch, objective) for tier, network in networks.items()}
        if lost := [tier for tier, metrics in found.items() if not all(map(math.isfinite, metrics.values()))]:
            warn(
                f"after round {record.round} the model of tier {lost[0]} gives NaN or infinite values for "
                f"{self.config.evaluated_on} samples, so that some of its metrics are no numbers: lower train.lr, or "
                "resume from an earlier round with 'fedhm resume DIR --from ROUND'",
                FedhmWarning,
                stacklevel=2,
            )
        return found
