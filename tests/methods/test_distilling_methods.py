"""FedDF and FedMD: the published rules on small cases, and whole runs that learn, resume and refuse."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.data.samples import Feed, Preprocessing, Samples, concatenate
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment
from fedhm.methods.feddf import FedDF, FedDFConfig, FedDFState
from fedhm.methods.fedmd import FedMD, FedMDConfig, FedMDState
from fedhm.methods.method import Setup
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.report.result import Result
from fedhm.seeds import torch_generator
from fedhm.server.record import Record
from fedhm.work.messages import Participant, Reply, Task, TaskOptions, Update

FEDDF: dict[str, object] = {"name": "feddf", "tiers": [1, 0.5, 0.25], "steps": 10, "batch": 16}
FEDMD: dict[str, object] = {"name": "fedmd", "tiers": [1, 0.5, 0.25]}
BOTH = pytest.mark.parametrize("method", [FEDDF, FEDMD], ids=lambda method: method["name"])
PUBLIC, CLASSES = 40, 4


@pytest.fixture
def sharing(federation: Federation) -> Federation:
    return replace(federation, public=concatenate([federation.clients[5], federation.clients[7]]))


def run(data: Federation, method: dict[str, object], **sections: dict[str, object]) -> Result:
    return assemble(small_model(), data, small_config(method=method, **sections)).run()


# ---- FedDF's rule, in double precision: Adam divides by gradients, and would magnify the last digits of float32


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


INPUTS = doubles(PUBLIC, 1, 6, 6)
SETUP = Setup("9", INPUTS[:1], 3, Feed(Samples(INPUTS, torch.arange(PUBLIC)), Preprocessing()))


def feddf(**settings: object) -> tuple[FedDF, FedDFState]:
    model = small_model().double()
    method = FedDF(model, FedDFConfig.model_validate({**FEDDF, "steps": 4, **settings}), SETUP)
    return method, method.start(exchanged_tensors(model))


def answers(method: FedDF, state: FedDFState) -> list[Update]:
    """Two clients of the full tier, one of half the width and none of the smallest; running averages travel."""
    people = [Participant(0, "full"), Participant(1, "w0.5"), Participant(2, "full")]
    updates = []
    for t in method.tasks(state, people, 6):
        moved = {n: x + doubles(*x.shape, seed=t.client).abs() / 10 for n, x in t.tensors.items()}
        updates.append(Update("train", 6, t.client, t.tier, t.network, moved, 10 + t.client, None, 0.5))
    return updates


def logits(network: nn.Module, weights: Tensors) -> Tensor:
    """By batch statistics, batch by batch."""
    load(network, weights).train()
    return torch.cat([network(part) for part in INPUTS.split(16)]).detach()


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_feddf_averages_in_tiers_then_follows_the_mean_of_all_clients(weighting: str) -> None:
    method, state = feddf(weighting=weighting)
    updates = answers(method, state)
    a, b, c = (update.tensors for update in updates)
    merged = method.merge(state, iter(updates), 6).models

    teacher = sum(logits(method.network(method.spec(u.tier)), u.tensors) for u in updates) / 3
    share = 0.5 if weighting == "uniform" else 10 / 22
    averages = {
        "full": {n: share * a[n] + (1 - share) * c[n] for n in a},
        "w0.5": b,
        "w0.25": method.weights(state, "w0.25"),
    }
    for tier, average in averages.items():
        student = load(method.network(method.spec(tier)), average).train()
        generator = torch_generator(3, "distil", 6, tier)
        orders = [torch.randperm(PUBLIC, generator=generator).split(16) for _ in range(2)]
        names = [name for name, _ in student.named_parameters()]
        first = dict.fromkeys(names, torch.zeros(()))
        second = dict.fromkeys(names, torch.zeros(()))
        for step, rows in enumerate([*orders[0], *orders[1]][:4], start=1):
            p, q = teacher[rows].softmax(1), student(INPUTS[rows]).softmax(1)
            loss = (p * (p.log() - q.log())).sum() / len(rows)
            gradients = torch.autograd.grad(loss, list(student.parameters()))
            with torch.no_grad():
                for (name, parameter), g in zip(student.named_parameters(), gradients, strict=True):
                    first[name] = 0.9 * first[name] + 0.1 * g
                    second[name] = 0.999 * second[name] + 0.001 * g**2
                    root = (second[name] / (1 - 0.999**step)).sqrt() + 1e-8
                    parameter -= 1e-3 * first[name] / (1 - 0.9**step) / root
        expected = {**average, **{name: parameter.detach() for name, parameter in student.named_parameters()}}
        for name, tensor in expected.items():  # running averages are those of the clients' mean
            torch.testing.assert_close(merged[tier][name], tensor, rtol=1e-6, atol=1e-9)


def test_feddf_takes_classifier_rows_only_from_clients_that_hold_the_label() -> None:
    method, state = feddf(lr=1e-30)
    updates = answers(method, state)
    updates[0] = replace(updates[0], labels=(0, 1))
    rows = method.merge(state, updates, 6).models["full"]["9.weight"]
    a, c = updates[0].tensors["9.weight"], updates[2].tensors["9.weight"]
    torch.testing.assert_close(rows[:2], (a[:2] + c[:2]) / 2)
    torch.testing.assert_close(rows[2:], c[2:])


def test_tiers_of_feddf_begin_as_slices_but_share_nothing() -> None:
    method, state = feddf(steps=1)
    full, half = (method.weights(state, tier) for tier in ("full", "w0.5"))
    torch.testing.assert_close(half["0.weight"], full["0.weight"][:4])
    torch.testing.assert_close(half["3.weight"], full["3.weight"][:8, :4] * 2**0.5)  # at the scale of its own width
    merged = method.merge(state, answers(method, state)[:1], 1)
    assert (method.weights(merged, "w0.5")["3.weight"] - half["3.weight"]).abs().max() < 1.1e-3  # one step of Adam
    assert (method.weights(merged, "full")["3.weight"] - full["3.weight"]).abs().max() > 0.1


# ---- FedMD's rule


def fedmd() -> tuple[FedMD, FedMDState]:
    model = small_model()
    sample = torch.zeros(1, 1, 6, 6)
    config = FedMDConfig.model_validate({**FEDMD, "digest_epochs": 3, "digest_lr": 0.2})
    method = FedMD(model, config, Setup("9", sample))
    return method, method.start(exchanged_tensors(model))


def told(task: Task, value: float) -> Update:
    scores = {"logits": torch.full((PUBLIC, CLASSES), value)}
    kept = {name: torch.full_like(t, value) for name, t in task.kept.items()}
    update = Update("distil", task.round, task.client, task.tier, task.network, scores, 9, None, 0.5)
    return replace(update, kept=kept)


def test_fedmd_agrees_on_the_mean_of_the_rounds_scores() -> None:
    method, state = fedmd()
    people = [Participant(1, "w0.5"), Participant(3, "full"), Participant(4, "w0.5")]
    tasks = list(method.tasks(state, people, 1))
    assert all(t.kind == "distil" and t.tensors == {} for t in tasks)
    assert tasks[0].options == TaskOptions(digest_epochs=3, digest_lr=0.2)
    state = method.merge(state, (told(t, float(t.client)) for t in tasks), 1)
    tasks = list(method.tasks(state, [*people[:2], Participant(0, "full")], 2))
    for t in tasks:
        torch.testing.assert_close(t.tensors["consensus"], torch.full((PUBLIC, CLASSES), (1 + 3 + 4) / 3))
    state = method.merge(state, (told(t, 10.0 * t.client) for t in tasks[:2]), 2)
    torch.testing.assert_close(state.consensus, torch.full((PUBLIC, CLASSES), 20.0))


def test_every_client_of_fedmd_keeps_a_model_of_its_own() -> None:
    method, state = fedmd()
    initial = {tier: method.weights(state, tier) for tier in method.tiers}
    assert torch.equal(initial["w0.5"]["0.weight"], exchanged_tensors(small_model())["0.weight"][:4])
    people = [Participant(1, "w0.5"), Participant(3, "full"), Participant(4, "w0.5")]
    tasks = list(method.tasks(state, people, 1))
    state = method.merge(state, (told(t, float(t.client)) for t in reversed(tasks)), 1)
    values = {t.client: float(t.kept["3.weight"].mean()) for t in method.tasks(state, people, 2)}
    assert values == {1: 1.0, 3: 3.0, 4: 4.0}
    (new,) = method.tasks(state, [Participant(7, "w0.5")], 2)
    assert all(torch.equal(t, initial["w0.5"][name]) for name, t in new.kept.items())

    def shown(tier: str) -> float:
        return float(method.weights(state, tier)["3.weight"].mean())

    assert (shown("full"), shown("w0.5")) == (3.0, 1.0)  # of several the lowest number
    assert torch.equal(method.weights(state, "w0.25")["3.weight"], initial["w0.25"]["3.weight"])
    state = method.merge(state, [told(new, 7.0)], 1)
    assert (shown("full"), shown("w0.5")) == (3.0, 7.0)  # the last to take part


# ---- whole runs


@pytest.mark.slow
@BOTH
def test_they_learn(sharing: Federation, method: dict[str, object]) -> None:
    everybody: dict[str, object] = {"participation": 1.0}
    result = run(sharing, method, train={"rounds": 10, "epochs": 2}, federation=everybody, evaluation={"every": 10})
    assert all(score.accuracy > 0.7 for score in result.metrics.values()), result.metrics
    # Of FedMD this is client 0's model: it lacks the fourth label, which it has learned from the consensus alone.
    assert 3 not in sharing.clients[0].labels
    assert result.metrics["full"].accuracy > 0.9


def test_of_fedmd_only_scores_travel(sharing: Federation) -> None:
    result = run(sharing, {**FEDMD, "digest_epochs": 3}, train={"rounds": 2, "epochs": 2})
    scores = 4 * PUBLIC * CLASSES
    for record in result.records:
        for tier, traffic in record.traffic.items():
            assert traffic.up == traffic.clients * scores
            assert traffic.down == (traffic.clients * scores if record.round > 1 else 0)
            passes = 20 * 2 + PUBLIC * (1 + 3 * (record.round > 1))
            assert traffic.macs == traffic.clients * result.costs[tier].macs * passes


@BOTH
def test_chance_is_seeded(sharing: Federation, method: dict[str, object]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Dropout(0.3), nn.BatchNorm1d(24), nn.Linear(24, 4))
    finals = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        finals.append(assemble(model, sharing, small_config(method=method)).run().networks["full"].state_dict())
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(seed)))
    assert all(torch.equal(tensor, finals[1][name]) for name, tensor in finals[0].items())


class KilledError(BaseException):
    """Stands for the end of the process: nothing catches it."""


class Killer:
    def started(self, *_: int) -> None: ...
    def task_done(self, *_: object) -> None: ...
    def round_done(self, record: Record) -> None:
        if record.round == 2:
            raise KilledError


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("static_from", [0, "never"])
def test_a_resumed_run_ends_the_same(
    sharing: Federation, tmp_path: Path, method: dict[str, object], static_from: object
) -> None:
    settings = small_config(method=method, train={"rounds": 4}, evaluation={"static_from": static_from})

    def go_on(name: str, **options: Any) -> bytes:
        data = (sharing.clients, sharing.test, settings, tmp_path / name)
        fedhm.run(small_model(), *data, public=sharing.public, **options)
        return max((tmp_path / name / "checkpoints").iterdir()).read_bytes()

    whole = go_on("whole")
    with pytest.raises(KilledError):
        go_on("killed", watchers=[Killer()])
    assert go_on("killed") == whole


@BOTH
def test_without_public_data_they_refuse_at_once(federation: Federation, method: dict[str, object]) -> None:
    with pytest.raises(FedhmError, match=rf"{method['name']} distils on public data, of which this run has none: set"):
        assemble(small_model(), federation, small_config(method=method))


@BOTH
def test_a_config_file_names_public_data(method: dict[str, object]) -> None:
    changes = [f"method.name={method['name']}", "data.public=held-out", "train.rounds=1", "model.width=0.25"]
    experiment = fedhm.prepare(fedhm.load_config("digits", changes))
    assert experiment.facts._public_samples == 1000
    assert set(experiment.run().metrics) == {"full", "w0.62", "w0.5", "w0.35"}


def test_clients_of_fedmd_must_stay_at_their_tiers(sharing: Federation) -> None:
    with pytest.raises(FedhmError, match=r"fedmd every client keeps .*federation.heterogeneity must be 'fixed'"):
        run(sharing, FEDMD, federation={"heterogeneity": "dynamic"})
    run(sharing, FEDDF, federation={"heterogeneity": "dynamic"}, train={"rounds": 1})


class Lying:
    """The local engine, with what one client says changed on its way."""

    def __init__(self, experiment: Experiment, **changes: Tensors) -> None:
        self._engine, self._changes = experiment.engine, changes

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for reply in self._engine.run(tasks):
            lie = isinstance(reply, Update) and reply.kind == "distil" and reply.client == 3
            yield replace(reply, **self._changes) if lie else reply  # type: ignore[arg-type]

    def close(self) -> None:
        self._engine.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensors": {"logits": torch.zeros(PUBLIC - 1, CLASSES)}}, "'logits' has shape (39, 4) instead of (40, 4)"),
        ({"tensors": {"logits": torch.full((PUBLIC, CLASSES), torch.inf)}}, "'logits' holds NaN or infinite values"),
        ({"tensors": {}}, "it lacks the tensor 'logits'"),
        ({"kept": {}}, "it lacks the tensor '0.bias'"),
    ],
)
def test_bad_scores_cost_only_themselves(sharing: Federation, changes: dict[str, Tensors], reason: str) -> None:
    sections = {"train": {"on_bad_update": "drop", "rounds": 1}, "federation": {"participation": 1.0}}
    experiment = assemble(small_model(), sharing, small_config(method=FEDMD, **sections))
    experiment.engine = Lying(experiment, **changes)
    (record,) = experiment.run().records
    assert [(entry["client"], entry["reason"]) for entry in record.dropped] == [(3, reason)]
