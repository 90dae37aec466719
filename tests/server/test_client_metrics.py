"""What clients answer is pooled to the metrics of their joint samples, and its spread over them is told."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhm.config.objective import Objective
from fedhm.networks.spec import NetworkSpec
from fedhm.objectives.classification import Classification
from fedhm.objectives.regression import Regression
from fedhm.server.filters.admission import reason_to_refuse
from fedhm.server.record import ClientMetrics, GroupMetrics, Record, Tally
from fedhm.work.messages import Task, TaskOptions, Update
from fedhm.work.work import Expected


def sums(objective: Objective, output: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in objective.sums(output, targets).items()}


def tallied(objective: Objective, parts: list[tuple[torch.Tensor, torch.Tensor]], tiers: list[str]) -> ClientMetrics:
    tally = Tally(objective)
    for client, (output, targets) in enumerate(parts):
        tally.add(client, tiers[client % len(tiers)], len(targets), sums(objective, output, targets))
    return tally.result(["full", "1/2", "1/4"])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.booleans(), st.integers(0, 1000))
def test_pooled_metrics_are_those_of_all_samples_together(sizes: list[int], numbers: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    objective: Objective = Regression() if numbers else Classification()
    outputs = torch.randn(sum(sizes), 3, generator=generator).double()
    targets = torch.randn(sum(sizes), 3, generator=generator) if numbers else outputs.argsort()[:, 1]
    parts = list(zip(outputs.split(sizes), targets.split(sizes), strict=True))
    found = tallied(objective, parts, ["1/2", "full"])
    assert found.overall.pooled == pytest.approx(objective.results(sums(objective, outputs, targets), sum(sizes)))
    assert list(found.by_tier) == (["full", "1/2"] if len(sizes) > 1 else ["1/2"])
    halves = [parts[i::2] for i in (1, 0) if parts[i::2]]
    for group, half in zip(found.by_tier.values(), halves, strict=True):
        joined = torch.cat([o for o, _ in half]), torch.cat([t for _, t in half])
        assert group.pooled == pytest.approx(objective.results(sums(objective, *joined), len(joined[1])))
        assert (group.clients, group.samples) == (len(half), len(joined[1]))


def test_spread_is_over_clients_and_the_worst_are_those_with_low_accuracy_and_high_loss() -> None:
    """Twelve clients of one to twelve samples; a twelfth of the clients answers nothing right, another all."""
    tally = Tally(Classification())
    for client in range(12):
        samples = client + 1
        right = torch.tensor(samples * client / 11).double()
        tally.add(client, "full", samples, {"correct": right, "loss": torch.tensor(float(samples * client)).double()})
    found = tally.result(["full"]).overall
    assert found.mean.accuracy == pytest.approx(0.5)
    assert found.median.accuracy == pytest.approx(0.5)
    assert found.pooled.accuracy == pytest.approx(sum((c + 1) * c / 11 for c in range(12)) / 78)
    assert found.worst_tenth.accuracy == pytest.approx(0.5 / 11)  # two of twelve
    assert found.worst_tenth.loss == pytest.approx(10.5)


def test_a_few_liars_do_not_move_the_median() -> None:
    tally = Tally(Classification())
    for client in range(9):
        right, loss = (8.0, 1.0) if client > 2 else (0.0, 3e7)
        tally.add(client, "full", 10, {"correct": torch.tensor(right).double(), "loss": torch.tensor(loss).double()})
    found = tally.result(["full"]).overall
    assert found.median == {"accuracy": 0.8, "loss": 0.1}
    assert found.mean.loss > 1e5


def test_records_carry_them_by_name_and_give_them_back() -> None:
    parts = [(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])), (torch.randn(2, 3), torch.tensor([1, 1]))]
    found = tallied(Classification(), parts, ["full", "1/4"])
    record = Record(3, clients={"1/2": found})
    record.evaluation.clients = 2
    table = json.loads(record.to_json())
    assert table["clients"]["1/2"]["overall"]["worst_tenth"].keys() == {"accuracy", "loss"}
    assert table["clients"]["1/2"]["each"][1] == asdict(found.each[1])
    again = Record.from_json(record.to_json())
    assert again == record
    assert again.clients["1/2"].by_tier["1/4"].pooled.accuracy == found.each[1].metrics.accuracy


def test_records_without_them_are_as_they_always_were() -> None:
    assert list(json.loads(Record(1).to_json())) == [
        *("round", "participants", "metrics", "traffic", "statistics", "diagnostics", "dropped", "seconds", "attempts")
    ]


TASK = Task("evaluate", 1, 5, "full", NetworkSpec("1/2"), {}, options=TaskOptions(batch=8))
RIGHT, LOSS = torch.tensor(7.0).double(), torch.tensor(12.5).double()
UPDATE = Update("evaluate", 1, 5, "full", NetworkSpec("1/2"), {"correct": RIGHT, "loss": LOSS}, 10, None, 0.0)
KNOWN = Expected({"correct": RIGHT, "loss": LOSS}, samples=10, classes=4, objective=Classification())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"samples": 11}, "it claims 11 samples instead of 10"),
        ({"samples": 10**30}, "it claims 1000000000000000000000000000000 samples instead of 10"),
        ({"correct": 11.0}, "'correct' has the value 11, not in 0…10"),
        ({"correct": -1.0}, "'correct' has the value -1, not in 0…10"),
        ({"loss": -1.0}, "'loss' has the value -1, not in 0…3e+07"),
        ({"loss": 1e9}, "'loss' has the value 1e+09, not in 0…3e+07"),
        ({"loss": float("nan")}, None),  # which a network may give
        ({"loss": float("nan"), "correct": 11.0}, "'correct' has the value 11, not in 0…10"),
        ({"correct": [1.0, 2.0]}, "'correct' has shape (2,) instead of ()"),
        ({"more": 1.0}, "it adds the tensor 'more'"),
    ],
)
def test_lies_are_bounded_by_the_counts(changes: dict[str, object], reason: str | None) -> None:
    samples = changes.pop("samples", UPDATE.samples)
    tensors = {**UPDATE.tensors, **{name: torch.tensor(v, dtype=torch.float64) for name, v in changes.items()}}
    update = replace(UPDATE, tensors=tensors, samples=samples)  # type: ignore[arg-type]
    assert reason_to_refuse(update, TASK, KNOWN) == reason


def answers(*losses: float) -> GroupMetrics:
    """Return what clients with ten samples each come to, of which seven are right."""
    tally = Tally(Classification())
    for client, loss in enumerate(losses):
        tally.add(client, "full", 10, {"correct": RIGHT, "loss": torch.tensor(10 * loss).double()})
    return tally.result(["full"]).overall


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf])
def test_one_answer_that_is_no_number_hides_nobody_elses(lie: float) -> None:
    """What counts for one metric need not for another: accuracy is that of all."""
    found = answers(lie, 1.0, 2.0)
    assert (found.clients, found.samples) == (3, 30)
    assert found.pooled == {"accuracy": 0.7, "loss": 1.5}
    assert (found.mean.loss, found.median.loss, found.worst_tenth.loss) == (1.5, 1.5, 2.0)


def test_what_is_nan_at_half_of_the_clients_is_nan() -> None:
    """A network that gives numbers only at the few others is not judged by these."""
    found = answers(math.nan, math.nan, 1.0, 2.0)
    assert found.pooled.accuracy == 0.7
    assert math.isnan(found.pooled.loss)
    assert math.isnan(found.mean.loss)
    assert found.median.loss == 1.5


def test_sums_of_which_no_metrics_follow_are_refused() -> None:
    class Strict(Classification):
        def results(self, *_: object) -> None:  # type: ignore[override]
            raise ZeroDivisionError("nothing there")

    raising = replace(KNOWN, objective=Strict())
    assert (
        reason_to_refuse(UPDATE, TASK, raising)
        == "no metrics follow from its sums (ZeroDivisionError('nothing there'))"
    )
