"""The loop: tasks → engine → updates → admission → merge → optimizer → evaluate each tier → record → checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from fedhm.config.objective import Metrics
from fedhm.config.schema import NO_TIER, ResolvedConfig
from fedhm.data.samples import Feed
from fedhm.engines.engine import Engine
from fedhm.measure.cost import Cost
from fedhm.methods.adapting import check_travelling
from fedhm.methods.method import AnyMethod
from fedhm.networks.exchange import Tensors, cast_like, load, set_packing
from fedhm.networks.structure import unshare_base
from fedhm.runs.checkpoint import Checkpoint
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.folder import RunFolder
from fedhm.runs.models import load_best_models, remove_other_best_models, save_best_models
from fedhm.runs.privacy import new_secret
from fedhm.runs.result import Result
from fedhm.server.callbacks import About, Stopping, Watcher, run_watchers
from fedhm.server.collect import Guard, Intake, TooFewUpdatesError
from fedhm.server.evaluation import evaluate_at_clients, gather_statistics
from fedhm.server.filters.defence import Defence
from fedhm.server.filters.fleet import Fleet
from fedhm.server.filters.optimizer import Moments, ServerOptimizer
from fedhm.server.filters.privacy import Mechanism
from fedhm.server.record import ClientMetrics, Record
from fedhm.server.sampling import drawings, evaluators, with_a_network
from fedhm.server.state import check_state
from fedhm.work.evaluate import evaluate_tiers
from fedhm.work.messages import Participant, Task, Update


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
    fingerprint: Callable[[], str]  # of settings, data and initial weights
    data: DataFacts
    watchers: Sequence[Watcher] = ()
    remote: bool = False  # the clients' samples lie elsewhere
    holders: Sequence[int] = ()  # the clients that have test samples
    stopping: Stopping | None = None  # None: it never ends before its last round
    privacy: Mechanism | None = None  # None: nothing is hidden
    fleet: Fleet | None = None  # None: nobody knows the clients' devices

    def run(self, folder: RunFolder | None = None) -> Result:
        """Run the rounds that are left; with a folder, a round counts once its checkpoint is on disk."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.config.engine.server_threads)
        try:
            return self._run(folder)
        finally:
            self.engine.close()
            for watcher in run_watchers(self.watchers):
                watcher.close()
            torch.set_num_threads(threads)

    def _run(self, folder: RunFolder | None) -> Result:
        rounds, every = self.config.train.rounds, self.config.evaluation.every
        if folder:
            folder.write_plan(self.config)
        run = self.fingerprint() if folder else ""
        (state, moments), records = self._begin(folder, run)
        defence = Defence(self.config, self.intake, self.method.one_model, records)
        networks: dict[str, nn.Module] = {}
        best: dict[str, nn.Module] = {}
        for number in range(len(records) + 1, rounds + 1):
            if records and records[-1].stopped:
                break
            record = Record(number)
            before, (state, moments) = state, self._next_state(state, moments, record, defence.guard(record))
            if (plans := self.method.planned_ranks(state)) != self.method.planned_ranks(before):
                record.plans = plans
            defence.done(record)
            if number == 1:
                check_state(state, self.method.state_type)  # parts that were empty at the start are there now
            record.diagnostics = state.diagnostics
            if number % every == 0 or number == rounds:
                weights = self._tier_weights(state, record)
                networks = self._tier_networks(state, weights)
                record.clients = self._at_clients(state, weights, record)
                record.metrics = self._metrics(networks, record)
            records.append(record)
            record.epsilon = self.privacy.epsilon(records) if self.privacy else None
            if self.stopping and number < rounds:
                record.stopped = self.stopping.reason(records)
            if self._best_round(records) == number:
                best = networks
                if folder:
                    save_best_models(folder.models, number, networks)
            if folder:
                self._save_plans(folder, state, anew=bool(record.plans))
                folder.commit(record, Checkpoint(number, state, moments), run, self.config.checkpoints.keep)
                remove_other_best_models(folder.models, self._best_round(records))
            for watcher in self.watchers:
                watcher.round_done(record)
        # A run that was complete already is asked for its models once more.
        networks = networks or self._tier_networks(state, self._tier_weights(state, deepcopy(records[-1])))
        if folder:
            folder.save_models(networks)
            remove_other_best_models(folder.models, self._best_round(records))
        for watcher in run_watchers(self.watchers):
            watcher.ended(networks)
        if folder and not best:  # it was found before this process resumed the run
            best = self._saved_best(folder, records)
        unshare_base({id(network): network for network in [*networks.values(), *best.values()]}.values())
        return Result(records, networks, self._costs(state), self._best_round(records) if best else 0, best)

    def _best_round(self, records: Sequence[Record]) -> int:
        return self.stopping.best(records) if self.stopping else 0

    def _saved_best(self, folder: RunFolder, records: Sequence[Record]) -> dict[str, nn.Module]:
        """Return the models of the best round, in networks of the ranks that were planned up to it."""
        best = self._best_round(records)
        plans = next((record.plans for record in reversed(records[:best]) if record.plans), {})
        names = {t: self.method.planned_name(t, plans[t]) if t in plans else t for t in self.method.tiers}
        blank = {tier: set_packing(self.method.network(name), None) for tier, name in names.items()}
        return load_best_models(folder.models, best, blank)

    def _begin(self, folder: RunFolder | None, run: str) -> tuple[tuple[Any, Moments], list[Record]]:
        checkpoint, records = folder.restore(run, self.method.state_type, self.method.tiers) if folder else (None, [])
        if self.privacy:
            self.privacy.secret.value = folder.secret(resumed=bool(records)) if folder else new_secret()
        if folder:
            folder.save_costs(self.costs)
            if not (checkpoint and self.remote):  # of remote clients, some may be missing by now
                folder.save_data_facts(self.data)
        for told in run_watchers(self.watchers):
            told.begun(About(self.config, self.costs, tuple(records), folder.path if folder else None))
        for watcher in self.watchers:
            watcher.started(len(records), self.config.train.rounds)
        state = checkpoint.state if checkpoint else self.method.start(self.initial)
        if self.config.method.adapters:
            tier = self.method.tiers[0]
            check_travelling(self.intake.facts(tier).travels, self.method.weights(state, tier), tier)
        if folder:
            self._save_plans(folder, state)
        if checkpoint:
            return (state, checkpoint.moments), records
        check_state(state, self.method.state_type)
        return (state, Moments()), records

    def _save_plans(self, folder: RunFolder, state: Any, *, anew: bool = True) -> None:
        """Write the ranks that a state has decided on, and what its tiers cost with them."""
        if anew and (plans := self.method.planned_ranks(state)):
            folder.save_plans(plans)
            folder.save_costs(self._costs(state))

    def _costs(self, state: Any) -> dict[str, Cost]:
        if not self.method.planned_ranks(state):
            return self.costs
        return {tier: self.intake.facts(self.method.network_name(state, tier)).cost for tier in self.method.tiers}

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
                    tasks = list(self.method.tasks(state, [p for p in chosen if p.tier != NO_TIER], record.round))
                    tasks = self.fleet.in_time(tasks, record) if self.fleet else tasks
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
        names = {self.method.network_name(state, tier): tier for tier in weights}
        if self.intake.static(record.round) and any(self.intake.facts(name).running for name in names):
            others = islice(self._drawings(record.round), record.attempts, None)
            able = with_a_network(chain([record.participants], others), self.method.tiers, self.clients)
            attempts = islice(able, self.config.federation.attempts)
            with record.phase("statistics"):
                robust = self.config.server.robust != "none"
                least = 0 if self.privacy else self.config.federation.min_updates
                sent = {name: weights[tier] for name, tier in names.items()}
                asked = (self.intake, self.engine.run, sent, attempts, record, robust, least)
                for name, found in gather_statistics(*asked, partial(self.method.training_options, state)):
                    weights[names[name]] = {**sent[name], **cast_like(sent[name], found)}
        return weights

    def _tier_networks(self, state: Any, weights: Mapping[str, Tensors]) -> dict[str, nn.Module]:
        network, name = self.method.network, self.method.network_name
        networks = {tier: load(network(name(state, tier)), weights[tier]) for tier in weights}
        # from here on they are networks like any others
        return {tier: set_packing(network, None) for tier, network in networks.items()}

    def _at_clients(self, state: Any, weights: Mapping[str, Tensors], record: Record) -> dict[str, ClientMetrics]:
        if not self.holders:
            return {}
        chosen = evaluators(self.config, self.holders, self.clients, self.method.levels, record.round)
        with record.phase("evaluate"):
            sent = {tier: (self.method.network_name(state, tier), tensors) for tier, tensors in weights.items()}
            how = partial(self.method.training_options, state)
            return evaluate_at_clients(self.intake, self.engine.run, sent, chosen, record, self.config, how)

    def _drawings(self, round_number: int) -> Iterator[list[Participant]]:
        if self.privacy and self.privacy.at_server:
            return iter([self.privacy.participants(round_number)])
        return drawings(self.config.federation, self.clients, self.method.levels, self.config.seed, round_number)

    def _metrics(self, networks: dict[str, nn.Module], record: Record) -> dict[str, Metrics]:
        if self.test is None:
            return {tier: found.overall.pooled for tier, found in record.clients.items()}
        with record.phase("evaluate"):
            return evaluate_tiers(networks, self.test, self.config, record.round)
