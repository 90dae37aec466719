"""The measurable terms of FedHM's convergence bound, round by round (`evaluation.diagnostics = "theory"`).

The filter asks clients to measure their local steps, sees where they began and ended, and lets them compute gradients
when the round is merged. Nothing that is trained changes. `docs/theory.md` explains every name that is recorded.

All participants whose updates are merged count alike. With y_p and h_p the points of participant p at the start and at
the end of the round (`lowrank/factor_space.py`), ȳ and h̄ their means, η the learning rate and E the local steps:

    gradient_norm_squared   ‖∇g(ȳ)‖², g the mean of the participants' losses on samples that are fixed for the run
    start_distance          mean ‖ȳ − y_p‖²
    drift                   mean ‖h̄ − h_p‖²
    drift_bound             6 η² E² κ_g + 3 mean ‖ȳ − y_p‖²

The theorem bounds the mean of ‖∇g‖² over T steps by a sum, in which L_f and L_UV are Lipschitz moduli that cannot be
measured. Its terms are recorded without these, with the constants κ of the round. The theorem takes the largest of all
rounds; its proof takes their mean.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from fedhm.config.schema import ResolvedConfig
from fedhm.config.section import tier_name
from fedhm.errors import FedhmError
from fedhm.lowrank.factor_space import FactorSpace, Point, mean_point, squared_distance
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.server.collect import Run, collect
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.admission import Admission
from fedhm.server.filters.filter import Arrival, RoundFilter
from fedhm.server.record import Record
from fedhm.work.gradient import BATCHES, GRADIENT, VARIANCE
from fedhm.work.messages import Participant, Task, TaskOptions, Update
from fedhm.work.work import steps_in_round, work_of

PREFIX = "theory/"
S = TypeVar("S")


class AnalysedMethod(Protocol):
    """What the analysis needs of a method (`methods/method.py`)."""

    tiers: tuple[str, ...]

    def spec(self, tier: str, state: Any = None) -> NetworkSpec: ...
    def weights(self, state: Any, tier: str) -> Tensors: ...
    def training_options(self, state: Any, tier: str) -> TaskOptions: ...


def check_theory(config: ResolvedConfig) -> None:
    """Refuse the analysis of a method that it is not about."""
    if not config.method.analysed:
        raise FedhmError(
            f"evaluation.diagnostics = 'theory' measures FedHM's convergence bound, and {config.method.name} has none: "
            "set it to 'basic'"
        )


@dataclass
class _Group:
    """The participants that were sent the same network."""

    sent: Tensors
    start: Point
    dense: bool  # it has a dense layer that others factorize
    count: int = 0
    changes: Point = field(default_factory=dict)  # Σ (h_p − y_p)
    squares: float = 0.0  # Σ ‖h_p − y_p‖²

    def add(self, end: Point) -> None:
        change = {name: tensor - self.start[name] for name, tensor in end.items()}
        self.changes = {name: t + self.changes[name] if self.count else t for name, t in change.items()}
        self.squares += _squared(change)
        self.count += 1

    @property
    def mean_end(self) -> Point:
        return {name: tensor + self.changes[name] / self.count for name, tensor in self.start.items()}

    @property
    def spread(self) -> float:
        """Return Σ ‖h_p − mean h_p‖² over the group."""
        return max(0.0, self.squares - _squared(self.changes) / self.count)


@dataclass
class _Attempt:
    """What is known of an attempt at a round."""

    space: FactorSpace
    groups: dict[NetworkSpec, _Group]
    participants: list[Participant] = field(default_factory=list)  # whose updates came through
    gradient_squared: float = 0.0  # κ_g
    factor_norm: float = 0.0  # κ_UV
    steps: int = 0  # E


class Theory(RoundFilter):
    """Measures the terms of the bound in every round; `run` is an engine's."""

    def __init__(
        self, config: ResolvedConfig, method: AnalysedMethod, facts: TaskFacts, admission: Admission, run: Run
    ) -> None:
        self._config, self._method, self._facts = config, method, facts
        self._admission, self._run = admission, run
        self._attempt: _Attempt | None = None
        self._found: dict[str, float] = {}

    def tasks(self, tasks: list[Task], record: Record) -> list[Task]:
        sent = {task.network: work_of(task.kind).loaded(task) for task in tasks}
        space = FactorSpace.of([(dict(spec.ranks), tensors) for spec, tensors in sent.items()])
        groups = {
            spec: _Group(
                tensors,
                space.start(self._trained(spec, tensors)),
                dense=not space.ranks.keys() <= dict(spec.ranks).keys(),
            )
            for spec, tensors in sent.items()
        }
        self._attempt, self._found = _Attempt(space, groups), {}
        return [replace(task, options=replace(task.options, measure=True)) for task in tasks]

    def _trained(self, spec: NetworkSpec, tensors: Tensors) -> Tensors:
        untrained = self._facts.network(spec).untrained
        return {name: tensor for name, tensor in tensors.items() if name not in untrained}

    def updates(self, arrivals: Iterator[Arrival], record: Record) -> Iterator[Arrival]:
        for arrival in arrivals:
            self._observe(arrival.update)
            yield arrival

    def _observe(self, update: Update) -> None:
        attempt = self._attempt
        assert attempt is not None
        assert update.measured is not None  # admission has seen to it
        attempt.groups[update.network].add(attempt.space.end(self._trained(update.network, update.tensors)))
        attempt.participants.append(Participant(update.client, update.tier))
        attempt.gradient_squared = max(attempt.gradient_squared, update.measured.gradient_squared)
        attempt.factor_norm = max(attempt.factor_norm, update.measured.factor_norm)
        attempt.steps = max(attempt.steps, steps_in_round(self._config.train, update.samples))

    def merged(self, before: S, merged: S, record: Record) -> S:
        if self._attempt is not None and self._attempt.participants:
            with record.phase("theory"):
                self._found = self._measured(self._attempt, before, record)
            record.seconds["merge"] -= record.seconds["theory"]  # it is measured while the round is merged
        return merged

    def _measured(self, attempt: _Attempt, before: Any, record: Record) -> dict[str, float]:
        """Return everything that this round alone decides."""
        groups = [group for group in attempt.groups.values() if group.count]
        count = len(attempt.participants)
        start = mean_point((group.count, group.start) for group in groups)
        end = mean_point((group.count, group.mean_end) for group in groups)
        distance = sum(group.count * squared_distance(start, group.start) for group in groups) / count
        drift = sum(group.count * squared_distance(end, group.mean_end) + group.spread for group in groups) / count
        rate, steps, kappa = self._config.train.learning_rate(record.round), attempt.steps, attempt.gradient_squared
        return {
            "participants": float(count),
            "dense_participants": float(sum(group.count for group in groups if group.dense)),
            "layers": float(len(attempt.space.ranks)),
            "steps": float(steps),
            "kappa_g": kappa,
            "kappa_uv": attempt.factor_norm,
            "start_distance": distance,
            "drift": drift,
            "drift_bound": 6 * rate**2 * steps**2 * kappa + 3 * distance,
            **self._gradients(attempt, attempt.space.tensors(start, groups[0].sent), before, record),
        }

    def _gradients(self, attempt: _Attempt, mean: Tensors, before: Any, record: Record) -> dict[str, float]:
        """Return what the participants' gradients at ȳ tell; in the first round also f(w₀)."""
        largest, full = self._method.tiers[0], tier_name(1)
        mean_spec = NetworkSpec(largest, "mean of the factors", ranks=tuple(attempt.space.ranks.items()))
        networks = {mean_spec: mean}
        if record.round == 1:
            networks[self._method.spec(full, before)] = self._method.weights(before, full)
        options = {p.tier: self._method.training_options(before, p.tier) for p in attempt.participants}
        batch = self._config.evaluation.batch
        tasks = [
            Task(GRADIENT, record.round, p.client, p.tier, spec, tensors, options=replace(options[p.tier], batch=batch))
            for spec, tensors in networks.items()
            for p in attempt.participants
        ]
        total: Point = {}
        losses: list[float] = []
        variances: list[float] = []
        answers = 0
        for update in collect(self._run, self._admission.tasks(tasks, record), [self._admission], record):
            if update.network != mean_spec:
                losses.append(update.loss)
                continue
            answers += 1
            if update.tensors[BATCHES] >= 2:
                variances.append(update.tensors[VARIANCE].item())
            for name, tensor in update.tensors.items():
                if name.startswith(GRADIENT):
                    total[name] = total[name] + tensor.double() if name in total else tensor.double()
        found = {"gradient_norm_squared": _squared(total) / answers**2} if answers else {}
        found |= {"gradient_variance": max(variances)} if variances else {}
        return found | ({"initial_loss": math.fsum(losses) / len(losses)} if losses else {})

    def finish(self, records: Sequence[Record]) -> None:
        if self._found:
            record = records[-1]
            found = {f"{PREFIX}{name}": value for name, value in self._found.items()}
            record.diagnostics = {**record.diagnostics, **found}  # a new dict: the state has the old one
            record.diagnostics |= bound_terms(records, self._config)


def bound_terms(records: Sequence[Record], config: ResolvedConfig) -> dict[str, float]:
    """Return the terms of the theorem's bound with the last round's constants, without the moduli L_f and L_UV."""
    found = records[-1].diagnostics

    def here(name: str) -> float:
        return found.get(f"{PREFIX}{name}", math.nan)

    rate = config.train.learning_rate(records[-1].round)
    steps, layers, kappa_g = here("steps"), here("layers"), here("kappa_g")
    squared_uv, sigma_1, sigma_2 = here("kappa_uv") ** 2, found["kappa_sigma1"], found["kappa_sigma2"]
    total_steps = sum(record.diagnostics.get(f"{PREFIX}steps", 0.0) for record in records)
    initial, lowest = records[0].diagnostics.get(f"{PREFIX}initial_loss"), config.objective.loss_bound
    above = math.nan if initial is None or lowest is None else initial - lowest
    terms = {
        "start": 2 * above / (total_steps * rate),
        "sigma1_over_lf": 2 * layers * sigma_1 / (steps * rate),
        "drift_over_luv2": 6 * rate**2 * steps**2 * kappa_g,
        "averaging_over_lf": 12 * rate * steps * kappa_g * squared_uv,
        "noise_over_luv": rate * here("gradient_variance") / here("participants"),
        "sigma2_over_luv2": 6 * layers * sigma_2,
        "sigma2_over_lf": 12 * layers * sigma_2 * squared_uv / (steps * rate),
    }
    return {f"{PREFIX}bound/{name}": value for name, value in terms.items() if not math.isnan(value)}


def _squared(point: Point) -> float:
    return sum(float(tensor.square().sum()) for tensor in point.values())
