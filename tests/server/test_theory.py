"""The terms of the convergence bound: measured at clients, recorded by the server, refused where they mean nothing."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedhm
from conftest import small_config, small_federation, small_model
from fedhm.assembly import assemble
from fedhm.config.schema import TrainConfig
from fedhm.data.federation import Federation
from fedhm.data.samples import Preprocessing, Samples
from fedhm.engines.engine import Engine
from fedhm.errors import FedhmError
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.spec import NetworkSpec
from fedhm.report.result import Result
from fedhm.seeds import torch_generator
from fedhm.server.filters.admission import reason_to_refuse
from fedhm.server.record import Record
from fedhm.work.client import Client
from fedhm.work.messages import Reply, Task, TaskOptions, TrainingMeasures, Update, update_from, update_values
from fedhm.work.work import Expected

NAMES = {
    *("participants", "dense_participants", "layers", "steps", "kappa_g", "kappa_uv", "start_distance", "drift"),
    *("drift_bound", "gradient_norm_squared", "gradient_variance"),
    *(f"bound/{name}" for name in ("start", "sigma1_over_lf", "drift_over_luv2", "averaging_over_lf")),
    *(f"bound/{name}" for name in ("noise_over_luv", "sigma2_over_luv2", "sigma2_over_lf")),
}


def theory_config(**sections: dict[str, Any]) -> fedhm.Config:
    evaluation = {"diagnostics": "theory", "batch": 16, **sections.pop("evaluation", {})}
    return small_config(evaluation=evaluation, **sections)


def run(data: Federation, engine: Engine | None = None, /, **sections: dict[str, Any]) -> Result:
    return assemble(small_model(), data, theory_config(**sections), engine).run()


def of_theory(record: Record) -> dict[str, float]:
    return {n.removeprefix("theory/"): v for n, v in record.diagnostics.items() if n.startswith("theory/")}


@pytest.mark.parametrize("train", [{}, {"nested": 0}, {"iterations": 2}])
def test_every_round_has_all_terms(federation: Federation, train: dict[str, object]) -> None:
    result = run(federation, train=train)
    first, second = (of_theory(record) for record in result.records)
    assert set(first) == NAMES | {"initial_loss"}
    assert set(second) == NAMES
    for record in result.records:
        found, kappas = of_theory(record), record.diagnostics
        rate, layers, steps = 0.05, 2, train.get("iterations", 3)  # 20 samples in batches of 8
        assert (found["layers"], found["steps"], found["participants"]) == (layers, steps, 4)
        uv, g, noise = found["kappa_uv"] ** 2, found["kappa_g"], found["gradient_variance"]
        one, two = kappas["kappa_sigma1"], kappas["kappa_sigma2"]
        terms = {
            "start": 2 * first["initial_loss"] / (record.round * steps * rate),
            "sigma1_over_lf": 2 * layers * one / (steps * rate),
            "drift_over_luv2": 6 * rate**2 * steps**2 * g,
            "averaging_over_lf": 12 * rate * steps * g * uv,
            "noise_over_luv": rate * noise / 4,
            "sigma2_over_luv2": 6 * layers * two,
            "sigma2_over_lf": 12 * layers * two * uv / (steps * rate),
        }
        assert {name: found[f"bound/{name}"] for name in terms} == pytest.approx(terms)
        assert found["kappa_uv"] >= kappas["kappa_uv"]  # which looks at the end of the round only
        json.loads(record.to_json())
        assert Record.from_json(record.to_json()).diagnostics == record.diagnostics


def test_without_it_nothing_is_measured_and_nothing_else_changes(federation: Federation) -> None:
    basic, theory = (run(federation, evaluation={"diagnostics": d}) for d in ("basic", "theory"))
    for without, measured in zip(basic.records, theory.records, strict=True):
        assert not of_theory(without)
        assert without.diagnostics == {k: v for k, v in measured.diagnostics.items() if not k.startswith("theory/")}
        assert without.metrics == measured.metrics
        assert without.traffic == measured.traffic
        gradients = 4 * (2 if measured.round == 1 else 1)  # with those of the initial model
        assert measured.statistics.clients == without.statistics.clients + gradients
        assert measured.statistics.up > without.statistics.up
        assert measured.evaluation == without.evaluation
        assert measured.seconds["merge"] > 0
    for tier, network in basic.networks.items():
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, theory.networks[tier].state_dict()[name])


@pytest.mark.slow
def test_workers_measure_the_same(federation: Federation) -> None:
    alone, several = (run(federation, engine={"workers": n, "threads": 1, "server_threads": 1}) for n in (1, 2))
    assert [r.diagnostics for r in alone.records] == [r.diagnostics for r in several.records]


@pytest.mark.usefixtures("without_figures")
def test_a_run_that_is_resumed_records_the_same(federation: Federation, tmp_path: Path) -> None:
    config = theory_config(train={"rounds": 3}, checkpoints={"keep": "all"})

    def go_on(**options: Any) -> Result:
        return fedhm.run(small_model(), federation.clients, federation.test, config, tmp_path, **options)

    whole = [record.diagnostics for record in go_on().records]
    assert [record.diagnostics for record in go_on(from_round=1).records] == whole


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "feddlr"])
def test_other_methods_are_refused(federation: Federation, method: str) -> None:
    with pytest.raises(FedhmError, match=rf"^evaluation.diagnostics = 'theory' measures FedHM's .*, and {method} has"):
        run(federation, method={"name": method})


def test_private_runs_are_refused(federation: Federation) -> None:
    for where in ("server", "client"):
        with pytest.raises(FedhmError, match="'theory' lets gradients leave the clients without noise"):
            run(federation, privacy={"clip": 1.0, "where": where})


class Meddling:
    """The local engine, with replies changed on their way."""

    def __init__(self, data: Federation, change: Callable[[Update], Update], **sections: dict[str, Any]) -> None:
        self._engine, self._change = assemble(small_model(), data, theory_config(**sections)).engine, change

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for reply in self._engine.run(tasks):
            yield self._change(reply) if isinstance(reply, Update) else reply

    def close(self) -> None:
        self._engine.close()


BAD = (float("nan"), float("inf"), -1.0, 1e31, None, "1", True, 10**400)


@pytest.mark.parametrize("bad", [*(TrainingMeasures(value, 1.0) for value in BAD), None, {"gradient_squared": 1.0}, 7])  # type: ignore[arg-type]
def test_hostile_measures_cost_their_own_update_only(federation: Federation, bad: Any) -> None:
    def lie(update: Update) -> Update:
        return replace(update, measured=bad) if update.client == 3 and update.kind in ("train", "nested") else update

    train = {"rounds": 1, "on_bad_update": "drop"}
    everybody = {"participation": 1.0}
    sections = {"train": train, "federation": everybody}
    (record,) = run(federation, Meddling(federation, lie, **sections), **sections).records
    assert [entry["client"] for entry in record.dropped] == [3]
    assert of_theory(record)["participants"] == 7
    assert max(of_theory(record).values()) < 1e5


def test_hostile_gradients_cost_their_own_answer_only(federation: Federation) -> None:
    def lie(update: Update) -> Update:
        if update.client != 3 or update.kind != "gradient":
            return update
        return replace(update, tensors={name: tensor * torch.inf for name, tensor in update.tensors.items()})

    sections: dict[str, Any] = {"train": {"rounds": 1, "on_bad_update": "drop"}, "federation": {"participation": 1.0}}
    (record,) = run(federation, Meddling(federation, lie, **sections), **sections).records
    assert [(entry["client"], entry["kind"]) for entry in record.dropped] == [(3, "gradient")] * 2
    assert of_theory(record)["participants"] == 8
    assert of_theory(record)["gradient_norm_squared"] < 100
    assert {t.clients for t in record.traffic.values()} == {2}  # gradients are not training


def test_measures_that_nobody_asked_for_are_refused() -> None:
    task = Task("train", 1, 0, "full", NetworkSpec("full"), {})
    update = Update("train", 1, 0, "full", NetworkSpec("full"), {}, 5, None, 0.0, measured=TrainingMeasures(1.0, 1.0))
    expected = Expected({}, 5, 4)
    assert "adds measures" in str(reason_to_refuse(update, task, expected))
    asked = replace(task, options=TaskOptions(measure=True))
    assert reason_to_refuse(update, asked, expected) is None
    assert "lacks measures" in str(reason_to_refuse(replace(update, measured=None), asked, expected))
    travelled = update_from(json.loads(json.dumps(update_values(update))), {}, {})
    assert travelled == update


# A client's gradient.


def linear() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3)).double()


def gradient(count: int, size: int, batch: int, round_number: int = 1, **train: object) -> Update:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    samples = Samples(inputs, torch.arange(count) % 3)
    config = TrainConfig.model_validate({"batch": size, **train})
    client = Client(samples, Preprocessing(), NetworkPool(lambda _: linear()), config, seed=3)
    spec, options = NetworkSpec("full"), TaskOptions(batch=batch)
    return client.run(Task("gradient", round_number, 5, "full", spec, exchanged_tensors(linear()), options=options))


@pytest.mark.parametrize(
    ("count", "size", "batch", "whole"), [(20, 4, 12, 3), (20, 4, 11, 2), (20, 4, 9, 1), (7, 8, 20, 0), (20, 8, 20, 2)]
)
def test_a_gradient_and_its_variance(count: int, size: int, batch: int, whole: int) -> None:
    """Nine samples in batches of four are batches of four and five: there is one whole batch."""
    update = gradient(count, size, batch)
    network = linear().eval()
    generator = torch_generator(3, "gradient", 5)
    chosen = torch.randperm(count, generator=generator)[:batch]
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[chosen]
    labels = (torch.arange(count) % 3)[chosen]

    def plain(rows: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(network(inputs[rows]), labels[rows])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])

    sent = torch.cat([update.tensors[f"gradient {name}"].flatten() for name, _ in network.named_parameters()])
    torch.testing.assert_close(sent, plain(torch.arange(len(chosen))), rtol=1e-10, atol=1e-12)
    assert update.tensors["batches"] == whole
    if whole > 1:
        order = torch.randperm(len(chosen), generator=generator)
        each = torch.stack([plain(rows) for rows in order.split(size) if len(rows) == size])
        expected = (each - each.mean(0)).square().sum() / (whole - 1)
        torch.testing.assert_close(update.tensors["variance"], expected, rtol=1e-9, atol=1e-12)
    else:
        assert update.tensors["variance"] == 0
    assert update.loss == pytest.approx(F.cross_entropy(network(inputs), labels).item(), rel=1e-6)


def test_the_samples_are_the_same_in_every_round() -> None:
    first, later = gradient(20, 4, 12), gradient(20, 4, 12, round_number=9)
    assert all(torch.equal(tensor, later.tensors[name]) for name, tensor in first.tensors.items())
    parts = gradient(20, 4, 12, micro_batch=2)
    for name, tensor in first.tensors.items():
        torch.testing.assert_close(parts.tensors[name], tensor, rtol=1e-9, atol=1e-12)


def test_a_single_batch_has_no_variance(federation: Federation) -> None:
    for record in run(federation, evaluation={"batch": 8}).records:
        assert set(of_theory(record)) - {"initial_loss"} == NAMES - {"gradient_variance", "bound/noise_over_luv"}


def test_batchnorm_and_frozen_statistics() -> None:
    """Both normalise as training does, and leave the statistics alone."""
    data = small_federation()
    for train in ({}, {"frozen_statistics": True}):
        for record in run(data, train=train).records:
            assert of_theory(record)["gradient_norm_squared"] > 0
