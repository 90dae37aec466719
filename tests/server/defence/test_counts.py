"""What a client says of itself counts for little where it is out of all proportion."""

import pytest
import torch
from torch import nn

from conftest import small_config
from fedhm.data.federation import remote_federation
from fedhm.data.samples import Preprocessing
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.server.collect import collect
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.admission import Admission
from fedhm.server.filters.clip import cap_samples, sample_limit, typical_loss
from fedhm.server.record import Record, Tally
from fedhm.work.messages import Task, Update
from fedhm.work.statistics import pool

HUGE = 2**62
X, Y = torch.randn(12, 4), torch.arange(12) % 3


def update(kind: str, samples: int, **tensors: float) -> Update:
    found = {name.replace("_", "/"): torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()}
    return Update(kind, 1, 0, "full", NetworkSpec("full"), found, samples, None, 0.0)


def test_the_cap_is_a_multiple_of_what_most_say() -> None:
    assert sample_limit([100, 120, 0, 80, HUGE]) == 1000
    assert sample_limit([100, HUGE]) == 1000
    assert sample_limit([0, 0]) is None


def test_who_says_a_usual_number_stays_the_very_same() -> None:
    honest = update("train", 100, w=1.0)
    assert cap_samples(honest, 1000) is honest
    assert cap_samples(honest, None) is honest


def test_pooled_statistics_are_not_owned_by_a_claim() -> None:
    lie = update("statistics", HUGE, bn_values=float(HUGE), bn_mean=5.0, bn_variance=1.0)
    honest = update("statistics", 100, bn_values=100.0, bn_mean=0.0, bn_variance=1.0)
    pooled = pool(each.tensors for each in [cap_samples(lie, 200), *[honest] * 8])
    assert pooled["bn.running_mean"].item() == pytest.approx(5.0 * 200 / 1000)


def test_pooled_metrics_are_not_owned_by_a_claim() -> None:
    tally = Tally(small_config().objective)
    lie = update("evaluate", HUGE, correct=0.0, loss=0.0)
    honest = update("evaluate", 100, correct=100.0, loss=10.0)
    for number, each in enumerate([cap_samples(lie, 200), *[honest] * 8]):
        tally.add(number, "full", each.samples, each.tensors)
    assert tally.result(["full"]).overall.pooled.accuracy == pytest.approx(0.8)


@pytest.mark.parametrize(("robust", "counted"), [("clip", 1000), ("none", HUGE)])
def test_a_remote_client_is_let_in_with_what_it_may_count_for(robust: str, counted: int) -> None:
    config = small_config(federation={"clients": 3}, server={"robust": robust}).resolved()
    federation = remote_federation((X, Y), 3, (100, 100, HUGE), Preprocessing((), ()))
    model = nn.Linear(4, 3)
    facts = TaskFacts(lambda _: model, federation, config, (X[:1], Y[:1]))
    task = Task("train", 1, 2, "full", NetworkSpec("full"), exchanged_tensors(model))
    reply = Update("train", 1, 2, "full", NetworkSpec("full"), dict(task.tensors), HUGE, (0, 1, 2), 0.5)
    admission = Admission(config, federation, facts)
    (let_in,) = collect(lambda _: iter([reply]), [task], [admission], Record(1))
    assert let_in.samples == counted


def test_a_made_up_loss_does_not_hide_the_others() -> None:
    assert typical_loss([0.5, 0.7, 1e30], 3e29) == 0.7
    assert typical_loss([1e30, 0.5], 5e29) == 0.5
    assert typical_loss([0.5, 0.7, 3.0], 1.4) == 1.4
    assert typical_loss([2000.0, 2500.0, 4000.0], 2800.0) == 2800.0


def test_the_record_has_the_median_then_and_stays_readable() -> None:
    record = Record(1)
    for client, loss in enumerate((0.5, 1e30, 0.25)):
        task = Task("train", 1, client, "full", NetworkSpec("full"), {})
        record.count(task, Update("train", 1, client, "full", NetworkSpec("full"), {}, 5, None, loss), 0)
    record.bound_losses()
    assert record.traffic["full"].loss == 0.5
    assert Record.from_json(record.to_json()).traffic == record.traffic
