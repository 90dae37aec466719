"""A run ends when its target is reached or it no longer improves, and knows its best round, from its records alone."""

import math

import pytest

from fedhm.config.objective import Metric, Metrics
from fedhm.config.schema import StopConfig
from fedhm.errors import FedhmError
from fedhm.server.callbacks import EarlyStopping
from fedhm.server.record import ClientMetrics, GroupMetrics, Record

ACCURACY, LOSS = Metric("accuracy", percent=True), Metric("loss", more_is_better=False)


def records(metric: Metric, *values: float | None) -> list[Record]:
    """One for each value of the smaller tier; None: the round was not evaluated."""
    found = [Record(number) for number in range(1, len(values) + 1)]
    for record, value in zip(found, values, strict=True):
        if value is not None:
            record.metrics = {tier: Metrics({metric.name: v}) for tier, v in (("full", 0.5), ("1/4", value))}
    return found


def stopping(metric: Metric = ACCURACY, **settings: object) -> EarlyStopping:
    return EarlyStopping(StopConfig.model_validate({"tier": "1/4", **settings}), metric, ["full", "1/4"])


@pytest.mark.parametrize(
    ("metric", "settings", "values", "reason"),
    [
        (ACCURACY, {}, [0.9, 0.8, 0.7, 0.6], ""),
        (ACCURACY, {"target": 0.9}, [0.5, 0.89], ""),
        (ACCURACY, {"target": 0.9}, [0.5, 0.9], "tier 1/4 reached 90 % accuracy"),
        (LOSS, {"target": 0.1}, [0.5, 0.2], ""),
        (LOSS, {"target": 0.1}, [0.5, 0.1], "tier 1/4 reached loss = 0.1"),
        (ACCURACY, {"target": 0.9}, [0.95, None], ""),  # of a round that was not evaluated nothing is known
        (ACCURACY, {"patience": 2}, [0.5, 0.6, 0.6], ""),
        (ACCURACY, {"patience": 2}, [0.5, 0.6, 0.6, 0.6], "did not improve since round 2, in 2 evaluations"),
        (ACCURACY, {"patience": 2}, [0.5, None, 0.4, None, 0.45], "did not improve since round 1, in 2 evaluations"),
        (ACCURACY, {"patience": 2}, [0.5, 0.4, 0.6, 0.5], ""),
        (
            LOSS,
            {"patience": 2},
            [0.5, 0.6, 0.7],
            "the loss of tier 1/4 did not improve since round 1, in 2 evaluations",
        ),
        (LOSS, {"patience": 2}, [0.7, 0.6, 0.5], ""),
        (ACCURACY, {"patience": 2, "min_change": 0.05}, [0.5, 0.54, 0.58], ""),  # 0.08 more than the first
        (ACCURACY, {"patience": 2, "min_change": 0.05}, [0.5, 0.54, 0.55], "by more than 0.05 since round 1"),
        (ACCURACY, {"patience": 1}, [math.nan], "did not improve since the start, in 1 evaluations"),
        (ACCURACY, {"patience": 2}, [math.nan, 0.1], ""),
    ],
)
def test_the_reason(metric: Metric, settings: dict[str, object], values: list[float | None], reason: str) -> None:
    found = stopping(metric, **settings).reason(records(metric, *values))
    assert (reason in found) if reason else not found


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        (ACCURACY, [0.5, 0.7, None, 0.7, 0.6], 2),
        (LOSS, [0.5, 0.7, 0.4, 0.45], 3),
        (ACCURACY, [math.nan, 0.1], 2),
        (ACCURACY, [None], 0),
    ],
)
def test_the_best_round_is_the_first_of_the_best(metric: Metric, values: list[float | None], best: int) -> None:
    assert stopping(metric, patience=9, min_change=0.3).best(records(metric, *values)) == best
    assert stopping(metric).best(records(metric, *values)) == 0  # nobody asked


def test_the_largest_tier_counts_unless_another_is_named() -> None:
    found = EarlyStopping(StopConfig(target=0.5), ACCURACY, ["full", "1/4"])
    assert found.reason(records(ACCURACY, 0.1)) == "tier full reached 50 % accuracy"


def test_the_median_over_clients_counts_where_only_they_evaluate() -> None:
    found = records(ACCURACY, 0.9, 0.1)
    for record, median in zip(found, (0.2, 0.6), strict=True):
        of = {name: Metrics(accuracy=median) for name in ("mean", "median", "worst_tenth")}
        group = GroupMetrics(5, 50, pooled=record.metrics["1/4"], **of)
        record.clients = {"1/4": ClientMetrics(group, {}, [])}
    config = StopConfig(tier="1/4", target=0.5)
    at_clients = EarlyStopping(config, ACCURACY, ["full", "1/4"], at_clients=True)
    assert at_clients.best(found) == 2
    assert at_clients.reason(found) == "tier 1/4 reached 50 % accuracy in the median over clients"
    on_test_set = EarlyStopping(config, ACCURACY, ["full", "1/4"])
    pooled = EarlyStopping(config.model_copy(update={"clients": "pooled"}), ACCURACY, ["full", "1/4"], at_clients=True)
    for by_metrics in (on_test_set, pooled):
        assert (by_metrics.best(found), by_metrics.reason(found)) == (1, "")


def test_what_cannot_be_is_one_sentence() -> None:
    with pytest.raises(FedhmError, match=r"stop\.tier: there is no tier '1/3', known are full, 1/4"):
        stopping(tier="1/3")
    with pytest.raises(FedhmError, match=r"stop\.target = 97, but accuracy is a share: 97 % is 0\.97"):
        stopping(target=97)
    stopping(Metric("mse", more_is_better=False), target=97)
