"""The evaluation of every tier's model after a round: on the server's test set, and on the clients' test samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from typing import Any, Protocol

from torch import nn

from fedhm.config.objective import Metrics
from fedhm.config.schema import ResolvedConfig
from fedhm.data.samples import Feed
from fedhm.errors import FedhmError
from fedhm.networks.exchange import Tensors, cast_like, load, set_packing
from fedhm.networks.spec import NetworkSpec
from fedhm.server.callbacks import Callback
from fedhm.server.collect import Run, collect, last_reason
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.admission import Admission
from fedhm.server.filters.clip import clamp_outliers
from fedhm.server.record import ClientMetrics, Record, Tally
from fedhm.server.sampling import clients_with_network, evaluators
from fedhm.work.evaluate import EVALUATE, evaluate_tiers, no_numbers, warn_of
from fedhm.work.messages import Participant, Task, TaskOptions, Update
from fedhm.work.statistics import STATISTICS, pool

Sampler = Callable[[int], Iterator[list[Participant]]]  # from a round to its participants, attempt by attempt


class Deploying(Protocol):
    """What an evaluation needs of a method (`methods/method.py`)."""

    tiers: tuple[str, ...]
    levels: tuple[str, ...]

    def spec(self, tier: str, state: Any = None) -> NetworkSpec: ...
    def network(self, spec: NetworkSpec) -> nn.Module: ...
    def weights(self, state: Any, tier: str) -> Tensors: ...
    def training_options(self, state: Any, tier: str) -> TaskOptions: ...


@dataclass(frozen=True)
class Evaluation:
    """Evaluates every tier's model after a round.

    clients      how many there are
    test         None: metrics are those of the clients' test samples together
    holders      the clients that have test samples
    test_client  the number by which the engine knows `test`, if it evaluates; None: this process does
    reachable    gets lists of clients that may evaluate, and passes on those that are worth asking
    """

    config: ResolvedConfig
    method: Deploying
    facts: TaskFacts
    admission: Admission
    clients: int
    test: Feed | None
    holders: Sequence[int] = ()
    test_client: int | None = None
    reachable: Callable[[Iterator[list[Participant]]], Iterator[list[Participant]]] = iter

    def evaluate(
        self, state: Any, record: Record, run: Run, sampler: Sampler, callbacks: Sequence[Callback] = ()
    ) -> dict[str, nn.Module]:
        """Return every tier's model after the round, and record its metrics; `run` is an engine's."""
        weights = self.weights(state, record, run, sampler, callbacks)
        networks = self.networks(state, weights)
        record.clients = self._at_clients(state, weights, record, run, callbacks)
        record.metrics = self._metrics(state, weights, networks, record, run)
        return networks

    def weights(
        self, state: Any, record: Record, run: Run, sampler: Sampler, callbacks: Sequence[Callback] = ()
    ) -> dict[str, Tensors]:
        """Return every tier's weights; BatchNorm statistics are gathered at the round's participants."""
        weights = {tier: self.method.weights(state, tier) for tier in self.method.tiers}
        tiers = {self.method.spec(tier, state): tier for tier in weights}
        if self.facts.static(record.round) and any(self.facts.network(spec).running for spec in tiers):
            others = islice(sampler(record.round), record.attempts, None)
            able = clients_with_network(chain([record.participants], others), self.method.tiers, self.clients)
            attempts = islice(able, self.config.federation.attempts)
            with record.phase("statistics"):
                sent = {spec: weights[tier] for spec, tier in tiers.items()}
                for spec, found in self._statistics(state, sent, attempts, record, run, callbacks):
                    weights[tiers[spec]] = {**sent[spec], **cast_like(sent[spec], found)}
        return weights

    def networks(self, state: Any, weights: Mapping[str, Tensors]) -> dict[str, nn.Module]:
        """Return the networks of all tiers with their weights, as plain modules."""
        networks = {t: load(self.method.network(self.method.spec(t, state)), weights[t]) for t in weights}
        return {tier: set_packing(network, None) for tier, network in networks.items()}

    def _statistics(
        self,
        state: Any,
        weights: Mapping[NetworkSpec, Tensors],
        attempts: Iterator[Sequence[Participant]],
        record: Record,
        run: Run,
        callbacks: Sequence[Callback],
    ) -> Iterator[tuple[NetworkSpec, Tensors]]:
        """Yield each network that has BatchNorm layers, and their statistics over the clients' joint samples.

        If too few clients answer for a network, the clients of the next attempt are asked.
        """
        missing = [spec for spec in weights if self.facts.network(spec).running]
        least = 0 if self.config.privacy.active else self.config.federation.min_updates
        for chosen in attempts:
            tasks = [
                Task(
                    STATISTICS,
                    record.round,
                    p.client,
                    p.tier,
                    spec,
                    weights[spec],
                    options=self.method.training_options(state, p.tier),
                )
                for spec in missing
                for p in chosen
            ]
            answers = self._answers(tasks, record, run, callbacks)
            for spec, of_network in groupby(answers, key=lambda update: update.network):
                answered = list(of_network)  # a few numbers for each channel: small beside a model
                if len(answered) < min(least, len(chosen)):
                    continue
                yield spec, pool(self._without_outliers(answered, record))
                missing.remove(spec)
            if not missing:
                return
        reason = last_reason([entry for entry in record.dropped if entry["kind"] == STATISTICS])
        whose = "too few clients'" if least > 1 else "no client's"
        raise FedhmError(
            f"{whose} BatchNorm statistics of tier {missing[0]} could be used in round {record.round}: {reason}"
        )

    def _without_outliers(self, answered: Sequence[Update], record: Record) -> list[Tensors]:
        """Return the statistics of one network without outliers, and record the clients that had some."""
        gathered = [update.tensors for update in answered]
        if self.config.server.robust == "none":
            return gathered
        bounded, counts = clamp_outliers(gathered)
        for update, values in zip(answered, counts, strict=True):
            if values:
                entry = {"client": update.client, "tier": update.tier, "part": STATISTICS}
                record.clipped.append(entry | {"network": str(update.network), "values": values})
        return bounded

    def _at_clients(
        self, state: Any, weights: Mapping[str, Tensors], record: Record, run: Run, callbacks: Sequence[Callback]
    ) -> dict[str, ClientMetrics]:
        """Return every tier's metrics at the chosen clients. One exchange serves all tiers.

        If nobody answers for a tier, other clients are asked. If that is in vain, the server's test set must do.
        """
        if not self.holders:
            return {}
        drawn = evaluators(self.config, self.holders, self.clients, self.method.levels, record.round)
        found: dict[str, ClientMetrics] = {}
        with record.phase("evaluate"):
            for chosen in islice(self.reachable(drawn), self.config.federation.attempts):
                missing = [tier for tier in weights if tier not in found]
                found |= self._asked(state, {tier: weights[tier] for tier in missing}, chosen, record, run, callbacks)
                if len(found) == len(weights):
                    break
        if missing := [tier for tier in weights if tier not in found]:
            if self.test is not None:  # a client that claims test samples and evaluates nothing must not end the run
                return {}
            reason = last_reason([entry for entry in record.dropped if entry["kind"] == EVALUATE])
            raise FedhmError(f"no client could evaluate tier {missing[0]} in round {record.round}: {reason}")
        if lost := [tier for tier in weights if any(no_numbers(one.metrics) for one in found[tier].each)]:
            warn_of(record.round, lost[0], "test samples of clients")
        return {tier: found[tier] for tier in weights}

    def _asked(
        self,
        state: Any,
        weights: Mapping[str, Tensors],
        chosen: Sequence[Participant],
        record: Record,
        run: Run,
        callbacks: Sequence[Callback],
    ) -> dict[str, ClientMetrics]:
        """Return the metrics of the tiers for which some of the chosen clients answer."""
        specs = {self.method.spec(tier, state): tier for tier in weights}
        tasks = [
            Task(
                EVALUATE,
                record.round,
                p.client,
                p.tier,
                spec,
                weights[tier],
                options=replace(
                    self.method.training_options(state, p.tier),
                    batch=self.config.evaluation.batch,
                    test_batch_statistics=self.config.evaluation.statistics == "test-batch",
                ),
            )
            for spec, tier in specs.items()
            for p in chosen
        ]
        devices = [device.name for device in self.config.federation.device_of]
        groups = list(dict.fromkeys([*self.method.tiers, *(p.tier for p in chosen)]))
        found: dict[str, ClientMetrics] = {}
        answers = self._answers(tasks, record, run, callbacks)
        for spec, updates in groupby(answers, key=lambda update: update.network):
            tally = Tally(self.config.objective, devices)
            for update in updates:
                tally.add(update.client, update.tier, update.samples, update.tensors)
            found[specs[spec]] = tally.result(groups)
        return found

    def _answers(self, tasks: list[Task], record: Record, run: Run, callbacks: Sequence[Callback]) -> Iterator[Update]:
        return collect(run, self.admission.tasks(tasks, record), [self.admission], record, callbacks)

    def _metrics(
        self, state: Any, weights: Mapping[str, Tensors], networks: dict[str, nn.Module], record: Record, run: Run
    ) -> dict[str, Metrics]:
        if self.test is None:
            return {tier: found.overall.pooled for tier, found in record.clients.items()}
        with record.phase("evaluate"):
            if self.test_client is None:
                found = evaluate_tiers(networks, self.test, self.config)
            else:
                found = self._by_engine(state, weights, record.round, run)
        if lost := [tier for tier, metrics in found.items() if no_numbers(metrics)]:
            warn_of(record.round, lost[0], f"{self.config.evaluated_on} samples")
        return found

    def _by_engine(self, state: Any, weights: Mapping[str, Tensors], round_number: int, run: Run) -> dict[str, Metrics]:
        """Return the metrics on the server's test set, computed by the engine."""
        assert self.test is not None
        assert self.test_client is not None
        options = TaskOptions(
            batch=self.config.evaluation.batch,
            test_batch_statistics=self.config.evaluation.statistics == "test-batch",
        )
        specs = [self.method.spec(tier, state) for tier in weights]
        tasks = [
            Task(EVALUATE, round_number, self.test_client, tier, spec, weights[tier], options=options)
            for tier, spec in zip(weights, specs, strict=True)
        ]
        found: dict[int, Metrics] = {}
        for reply in run(tasks):
            if not isinstance(reply, Update):
                raise FedhmError(f"a model could not be evaluated: {reply.reason}")
            found[reply.position] = self.config.objective.results(reply.tensors, reply.samples)
        return {tier: found[position] for position, tier in enumerate(weights)}
