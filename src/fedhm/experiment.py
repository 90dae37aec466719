"""The loop: tasks → engine → updates → filters → merge → filters → evaluation → record → callbacks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fedhm.config.schema import NO_TIER, ResolvedConfig
from fedhm.data.federation import Federation
from fedhm.engines.engine import Engine
from fedhm.errors import FedhmError
from fedhm.machine.device import deterministic, threads
from fedhm.machine.memory import ROUND_ADVICE, memory_errors
from fedhm.measure.cost import Cost
from fedhm.methods.adapting import check_travelling
from fedhm.methods.method import AnyMethod
from fedhm.networks.exchange import Tensors
from fedhm.networks.structure import unshare_base
from fedhm.report.result import Result
from fedhm.runs.callbacks import BestModels, Checkpoints, PlanFiles
from fedhm.runs.fingerprint import data_facts, fingerprint
from fedhm.runs.folder import RunFolder
from fedhm.runs.privacy import new_secret
from fedhm.server.callbacks import Callback, DivergenceWarning, EarlyStopping, RunState, Watcher, WatcherCallback
from fedhm.server.collect import CountedUpdates, collect, last_reason
from fedhm.server.evaluation import Evaluation
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.optimizer import Moments
from fedhm.server.record import Record
from fedhm.server.round import RoundFilters
from fedhm.server.sampling import sample_participants
from fedhm.work.messages import Participant


@dataclass
class Experiment:
    """A run made of ready parts, which `fedhm.assemble` puts together."""

    config: ResolvedConfig
    method: AnyMethod
    initial: Tensors  # weights of the full model
    federation: Federation  # as it was given, before inputs were cut to what the model takes
    facts: TaskFacts
    filters: RoundFilters
    evaluation: Evaluation
    early_stopping: EarlyStopping
    engine: Engine
    watchers: Sequence[Watcher] = ()

    @property
    def costs(self) -> dict[str, Cost]:
        """Return what every tier costs at the start."""
        return self._costs(None)

    def _costs(self, state: Any) -> dict[str, Cost]:
        return {tier: self.facts.network(self.method.spec(tier, state)).cost for tier in self.method.tiers}

    def fingerprint(self) -> str:
        """Return what tells this run from all others: a checkpoint of another run is not resumed."""
        return fingerprint(self.config, self.initial, self.federation)

    @memory_errors("for the server's part of a round", ROUND_ADVICE)
    def run(self, folder: RunFolder | None = None) -> Result:
        """Run the rounds that are left; with a folder, a round counts once its checkpoint is on disk."""
        engine = self.config.engine
        with threads(engine.server_threads), deterministic(engine.deterministic), ExitStack() as at_the_end:
            at_the_end.callback(self.engine.close)
            watchers = [WatcherCallback(watcher, folder.path if folder else None) for watcher in self.watchers]
            for watcher in reversed(watchers):
                at_the_end.callback(watcher.close)
            return self._run(folder, watchers)

    def _run(self, folder: RunFolder | None, watchers: Sequence[Callback]) -> Result:
        run, callbacks = self._begin(folder, watchers)
        device = self.config.engine.device_names if self.config.engine.name == "local" else ""
        for number in range(len(run.records) + 1, self.config.train.rounds + 1):
            if run.records and run.record.stopped:
                break
            self._round(run, Record(number, device=device), callbacks)
        if not run.networks:  # the run was complete already, and is asked for its models once more
            weights = self.evaluation.weights(run.state, deepcopy(run.record), self.engine.run, self._sample)
            run.networks = self.evaluation.networks(run.state, weights)
        for callback in callbacks:
            callback.run_ends(run)
        unshare_base({id(network): network for network in [*run.networks.values(), *run.best.values()]}.values())
        best_round = run.best_round if run.best else 0
        return Result(run.records, run.networks, self._costs(run.state), best_round, run.best, self.config)

    def _begin(self, folder: RunFolder | None, watchers: Sequence[Callback]) -> tuple[RunState, Sequence[Callback]]:
        """Return where the run is, at its start or after the last round in its folder, and the callbacks in order."""
        if self.filters.own and self.config.privacy.at_server:
            # privacy counts and bounds the updates that it passes on: a filter behind it would undo both
            raise FedhmError("[privacy] holds for the library's own filters only: leave out yours, or [privacy]")
        if folder:
            folder.write_plan(self.config)
        name = self.fingerprint() if folder else ""
        checkpoint, records = folder.restore(name, self.method.state_type, self.method.tiers) if folder else (None, [])
        if self.filters.privacy:
            self.filters.privacy.secret.value = folder.secret(resumed=bool(records)) if folder else new_secret()
        self.filters.optimizer.moments = checkpoint.moments if checkpoint else Moments()
        for each in self.filters:
            each.restore(records)
        state = checkpoint.state if checkpoint else self.method.start(self.initial)
        if self.config.method.adapters:
            tier = self.method.tiers[0]
            sent = self.facts.network(self.method.spec(tier)).travels
            check_travelling(sent, self.method.weights(state, tier), tier)
        whole = self.method.full_spec()
        full = self.facts.network(whole).cost if whole else None
        run = RunState(self.config, self.costs, state, records, full=full)
        # of remote clients, some may be missing when a run is resumed: what was known at its start stays
        data = None if checkpoint and self.federation.remote else data_facts(self.federation)
        callbacks = [
            PlanFiles(self.method, folder, self._costs, data),
            DivergenceWarning(self.federation.classes),
            self.early_stopping,
            BestModels(self.method, folder),
            Checkpoints(self.method, folder, name, self.filters.optimizer),
            *watchers,
        ]
        for callback in callbacks:
            callback.run_begins(run)
        return run, callbacks

    def _round(self, run: RunState, record: Record, callbacks: Sequence[Callback]) -> None:
        """Do one round: train, evaluate if it is due, and let callbacks keep the results."""
        run.state = self.train_round(run.state, record, callbacks)
        run.records.append(record)
        record.diagnostics = run.state.diagnostics
        for each in self.filters:
            each.finish(run.records)
        if record.round % self.config.evaluation.every == 0 or record.round == self.config.train.rounds:
            run.networks = self.evaluation.evaluate(run.state, record, self.engine.run, self._sample, callbacks)
        for callback in callbacks:
            callback.round_ends(run)
        for callback in callbacks:
            callback.round_saved(run)

    def train_round(self, state: Any, record: Record, callbacks: Sequence[Callback] = ()) -> Any:
        """Return the state after a round. A round that brings too few updates is tried again with other clients."""
        attempts, shortage = self.config.federation.attempts, ""
        for attempt, chosen in enumerate(islice(self._sample(record.round), attempts), start=1):
            record.attempts, record.participants = attempt, chosen
            with record.phase("merge"):
                merged, shortage = self._attempt(state, record, callbacks)
            if not shortage:
                break
            record.discard_findings()
        if shortage:
            raise FedhmError(shortage)
        with record.phase("merge"):
            after = merged
            for each in self.filters:
                after = each.merged(state, after, record)
            if after is not merged:
                after = self.method.refresh_derived(after, state)
        record.seconds["merge"] -= record.seconds.get("train", 0.0)  # merging waits for training
        return after

    def _attempt(self, state: Any, record: Record, callbacks: Sequence[Callback]) -> tuple[Any, str]:
        """Return the merged state of one attempt at a round, or why its updates are too few."""
        chosen = [participant for participant in record.participants if participant.tier != NO_TIER]
        dropped_before = len(record.dropped)
        tasks = list(self.method.tasks(state, chosen, record.round))
        for each in self.filters:
            tasks = each.tasks(tasks, record)
        arriving = collect(self.engine.run, tasks, list(self.filters), record, callbacks)
        updates = CountedUpdates(record.timed("train", arriving))
        # a private round counts, whoever took part
        least = 0 if self.config.privacy.active else min(self.config.federation.min_updates, len(tasks))
        merged = self.method.merge(state, updates, record.round) if updates.any or not least else state
        if updates.count >= least:
            return merged, ""
        usable = "too few updates" if updates.count else "no client's update"
        share = f"{updates.count or 'none'} of {len(tasks)}"
        attempt = f"attempt {record.attempts} of {self.config.federation.attempts}"
        reason = last_reason(record.dropped[dropped_before:])
        return state, f"{usable} could be used in round {record.round}, {share} in {attempt}: {reason}"

    def _sample(self, round_number: int) -> Iterator[list[Participant]]:
        """Return who takes part in a round: in its first attempt, in its second, and so on."""
        federation, levels, seed = self.config.federation, self.method.levels, self.config.seed
        found = sample_participants(federation, self.federation.size, levels, seed, round_number)
        for each in self.filters:
            found = each.sampling(found, round_number)
        return found
