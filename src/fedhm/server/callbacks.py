"""Callbacks: everything that happens beside the rounds, such as early stopping, progress bars and trackers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from warnings import warn

from torch import nn

from fedhm.config.objective import Metric, Metrics
from fedhm.config.schema import Config, StopConfig
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.measure.cost import Cost
from fedhm.server.record import Record


class Watcher(Protocol):
    """An object that follows a run: `fedhm.run(..., watchers=[...])`.

    Any object with these methods is a watcher. `round_done` is called after the round is on disk. An exception of a
    watcher ends the run, which can be resumed.
    """

    def started(self, done: int, rounds: int) -> None:
        """Handle the start of the rounds: `done` of `rounds` are done already."""

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        """Handle a client's answer: `what` is the kind of its work, `done` of `of` tasks of this kind are over."""

    def round_done(self, record: Record) -> None:
        """Handle the record of a round."""


@dataclass(frozen=True)
class About:
    """The facts of a run at its start, or when it is resumed."""

    config: Config
    costs: Mapping[str, Cost]  # by tier
    records: Sequence[Record]  # of the rounds that are done already
    folder: Path | None  # None: the run has no folder
    full: Cost | None = None  # of the whole model, if the method has it


@runtime_checkable
class RunWatcher(Watcher, Protocol):
    """A watcher with these methods also gets the facts of the run, its final models, and its end."""

    def begun(self, about: About) -> None:
        """Handle the facts of the run, before `started`."""

    def ended(self, networks: Mapping[str, nn.Module]) -> None:
        """Handle the final model of every tier, after all rounds."""

    def close(self) -> None:
        """Release everything: the run has ended, failed, or was stopped, perhaps before it began."""


@dataclass
class RunState:
    """The state of a run. Callbacks read it and may complete it."""

    config: Config
    costs: Mapping[str, Cost]  # by tier, at the start
    state: Any  # the method's
    records: list[Record]
    networks: dict[str, nn.Module] = field(default_factory=dict)  # every tier's model, as it was last evaluated
    best_round: int = 0  # of a run that may end early; 0: none
    best: dict[str, nn.Module] = field(default_factory=dict)  # every tier's model after that round
    full: Cost | None = None  # of the whole model, if the method has it

    @property
    def record(self) -> Record:
        return self.records[-1]


class Callback:
    """What happens beside the rounds. A callback overrides the hooks that it needs.

    The hooks of all callbacks run in the order of their list. `fedhm.experiment` holds that list.
    """

    def run_begins(self, run: RunState) -> None:
        """Handle the start of a run, or that it is resumed after the rounds in `run.records`."""

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        """Handle a client's answer: `what` is the kind of its work, `done` of `of` tasks of this kind are over."""

    def round_ends(self, run: RunState) -> None:
        """Handle a round that was merged and evaluated. Its record can still be completed."""

    def round_saved(self, run: RunState) -> None:
        """Handle a round that counts: all callbacks have seen its end, and it is on disk if the run has a folder."""

    def run_ends(self, run: RunState) -> None:
        """Handle the end of a run, after all its rounds."""

    def close(self) -> None:
        """Release everything: the run has ended, failed, or was stopped, perhaps before it began."""


class WatcherCallback(Callback):
    """Calls a user's watcher, or a tracker."""

    def __init__(self, watcher: Watcher, folder: Path | None) -> None:
        self._watcher, self._folder = watcher, folder
        self._run_watcher = watcher if isinstance(watcher, RunWatcher) else None

    def run_begins(self, run: RunState) -> None:
        if self._run_watcher:
            self._run_watcher.begun(About(run.config, run.costs, tuple(run.records), self._folder, run.full))
        self._watcher.started(len(run.records), run.config.train.rounds)

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        self._watcher.task_done(round_number, what, done, of)

    def round_saved(self, run: RunState) -> None:
        self._watcher.round_done(run.record)

    def run_ends(self, run: RunState) -> None:
        if self._run_watcher:
            self._run_watcher.ended(run.networks)

    def close(self) -> None:
        if self._run_watcher:
            self._run_watcher.close()


FAR_FROM_GUESSING = 10.0  # a loss that is this multiple of a guess's is no longer learning
GUESSING = 1.25  # up to this multiple of chance, a model only guesses


class DivergenceWarning(Callback):
    """Warns once if a method that needs its gradients clipped runs without a limit, and its models have diverged.

    Such a run may end with finite weights and the accuracy of a guess. A model has diverged if its loss is many times
    that of a guess, or if after the last round it only guesses, although the clients' own losses are small.
    """

    def __init__(self, classes: int) -> None:
        self._chance = 1 / max(2, classes)
        self._guess = -math.log(self._chance)  # the loss of a model that finds all classes equally likely
        self._warned = False

    def round_saved(self, run: RunState) -> None:
        config, record = run.config, run.record
        advised = config.method.clip_norm(config.train.lr)
        unlimited = config.objective.has_labels and advised and not config.train.gradient_limit
        if not unlimited or self._warned:
            return
        own_losses = [traffic.loss for traffic in record.traffic.values() if traffic.answers]
        learnt = record.round == config.train.rounds and min(own_losses, default=math.inf) < self._guess / 2
        if lost := [tier for tier, metrics in record.metrics.items() if self._diverged(metrics, learnt)]:
            self._warned = True
            loss = record.metrics[lost[0]]["loss"]
            warn(
                f"after round {record.round} the model of tier {lost[0]} has a loss of {loss:.3g}, and guessing has "
                f"{self._guess:.3g}. Training may have diverged at the clients: set train.clip_norm = "
                f"{advised:.3g}, or lower train.lr",
                FedhmWarning,
                stacklevel=2,
            )

    def _diverged(self, metrics: Metrics, learnt: bool) -> bool:
        """Tell whether a model has diverged; `learnt`: the clients' own losses are small after the last round."""
        if not {"loss", "accuracy"} <= metrics.keys():  # an objective of a user's own
            return False
        guesses = metrics["accuracy"] < GUESSING * self._chance and metrics["loss"] >= self._guess
        return metrics["loss"] >= FAR_FROM_GUESSING * self._guess or (learnt and guesses)


class EarlyStopping(Callback):
    """Ends a run early, and finds its best round. Both follow from the records alone.

    The headline metric of one tier's model decides.

    at_clients  the server has no test set: the median over clients counts, unless the settings say otherwise
    """

    def __init__(self, config: StopConfig, metric: Metric, tiers: Sequence[str], *, at_clients: bool = False) -> None:
        if config.tier and config.tier not in tiers:
            raise FedhmError(f"stop.tier: there is no tier '{config.tier}', known are {', '.join(tiers)}")
        if metric.percent and config.target is not None and config.target > 1:
            raise FedhmError(f"stop.target = {config.target:g}, but {metric.name} is a share: 97 % is 0.97")
        self.active = config.active
        self._config, self._metric, self._tier = config, metric, config.tier or tiers[0]
        self._by_median = at_clients and config.clients == "median"

    def run_begins(self, run: RunState) -> None:
        run.best_round = self.best(run.records)

    def round_ends(self, run: RunState) -> None:
        if run.record.round < run.config.train.rounds:
            run.record.stopped = self.reason(run.records)
        run.best_round = self.best(run.records)

    def reason(self, records: Sequence[Record]) -> str:
        """Return why a run ends after the last of these rounds, as part of a sentence; empty if it goes on."""
        found = self._values(records)
        if not found or records[-1].round not in found:
            return ""
        target, patience, metric = self._config.target, self._config.patience, self._metric
        which = " in the median over clients" if self._by_median else ""
        if target is not None and metric.reaches(found[records[-1].round], target):
            return f"tier {self._tier} reached {metric.goal(target)}{which}"
        last = self._last_improvement(found, self._config.min_change)
        waited = [number for number in found if number > last]
        if patience and len(waited) >= patience:
            since = f"since round {last}" if last else "since the start"
            more = f" by more than {self._config.min_change:g}" if self._config.min_change else ""
            improved = f"did not improve{which}{more} {since}"
            return f"the {metric.name} of tier {self._tier} {improved}, in {len(waited)} evaluations"
        return ""

    def best(self, records: Sequence[Record]) -> int:
        """Return the round with the best model; 0 if no round was evaluated, or early stopping is off."""
        return self._last_improvement(self._values(records), 0.0) if self.active else 0

    def _values(self, records: Sequence[Record]) -> dict[int, float]:
        return {r.round: self._found(r)[self._metric.name] for r in records if r.metrics}

    def _found(self, record: Record) -> Metrics:
        return record.clients[self._tier].overall.median if self._by_median else record.metrics[self._tier]

    def _last_improvement(self, values: dict[int, float], least: float) -> int:
        """Return the last round that was better than all rounds before it by more than `least`; 0 if there is none."""
        sign = 1 if self._metric.more_is_better else -1
        last, best = 0, -float("inf")
        for number, value in values.items():
            if sign * value > best + least:  # never true for NaN
                last, best = number, sign * value
        return last
