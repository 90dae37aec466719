"""Segmentation, several labels, and a user's own loss and metrics, against scikit-learn and by hand."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, jaccard_score
from torch import Tensor, nn

import fedhm
from conftest import no_figures
from fedhm.config.schema import Config
from fedhm.runs.history import read_runs

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
SETTINGS: dict[str, Any] = {
    "train": {"rounds": 2, "batch": 8},
    "method": {"tiers": [1, "1/4"]},
    "engine": {"threads": 1, "server_threads": 1, "workers": 1},
}


def model(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs))


def metrics_of(objective: fedhm.Objective, output: Tensor, targets: Tensor, parts: int = 1) -> fedhm.Metrics:
    sums: dict[str, Tensor] = {}
    for rows in torch.arange(len(targets)).chunk(parts):
        for name, value in objective.sums(output[rows], targets[rows]).items():
            sums[name] = sums.get(name, torch.zeros(())) + value.double()
    return objective.results(sums, len(targets))


@pytest.mark.parametrize("parts", [1, 3])
def test_segmentation_is_that_of_scikit_learn(parts: int) -> None:
    output, targets = torch.randn(6, 4, 5, 7), torch.randint(0, 4, (6, 5, 7))
    targets[:, 0] = 255
    found = metrics_of(fedhm.Segmentation(ignore_index=255), output, targets, parts)
    counted = targets != 255
    actual, guessed = targets[counted], output.argmax(1)[counted]
    assert found.mean_iou == pytest.approx(jaccard_score(actual, guessed, average="macro"))
    assert found.pixel_accuracy == pytest.approx((actual == guessed).double().mean().item())
    assert found.loss == pytest.approx(F.cross_entropy(output, targets, ignore_index=255).item(), rel=1e-5)


class Exits(nn.Module):
    """Two exits. In training the output is that of both, (N, exits, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(6, 16), nn.Linear(16, 16)
        self.exits = nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])

    def forward(self, x: Tensor) -> Tensor:
        first = self.early(x).relu()
        scores = [self.exits[0](first), self.exits[1](self.late(first).relu())]
        return torch.stack(scores, 1) if self.training else scores[-1]


def over_exits(output: Tensor, targets: Tensor) -> Tensor:
    if output.ndim == 2:
        return F.cross_entropy(output, targets)
    assert bool((output[..., 2] == 0).all()) or 2 in targets  # masked in every exit
    return F.cross_entropy(output.flatten(0, 1), targets.repeat_interleave(output.shape[1]))


def test_exits_that_are_only_trained_are_masked_too() -> None:
    some = Y < 2
    torch.manual_seed(0)
    found = fedhm.run(Exits(), [(X[some], Y[some]), (X, Y)], (X, Y), SETTINGS,
                      objective=fedhm.Classification(loss=over_exits))  # fmt: skip
    assert not any(record.dropped for record in found.records)
    assert found.metrics["1/4"].loss > 0


def test_masks_of_eight_bits_are_explained() -> None:
    masks = torch.randint(0, 2, (8, 6, 6)) * 255
    images = torch.rand(8, 3, 6, 6)
    with pytest.raises(fedhm.FedhmError, match=r"objective.ignore_index = 255; masks of 0 and 255 become classes by"):
        fedhm.run(nn.Conv2d(3, 2, 1), [(images, masks)], None, SETTINGS, objective="segmentation")
    with pytest.raises(fedhm.FedhmError, match=r"one for each pixel, .* set objective = 'segmentation'"):
        fedhm.run(nn.Conv2d(3, 2, 1), [(images, masks)], None, SETTINGS)


def test_segmentation_checks_its_masks() -> None:
    objective = fedhm.Segmentation()
    masks = torch.tensor([[[0, 255], [1, 1]]])
    assert objective.outputs([masks]) == 256
    with pytest.raises(fedhm.FedhmError, match=r"a pixel of class 255, outside 0…1: .* objective.ignore_index = 255"):
        objective.check(masks, 2, "client 0")
    ignoring = fedhm.Segmentation(ignore_index=255)
    ignoring.check(masks, 2, "client 0")
    small = ignoring.condensed(torch.cat([masks, torch.full_like(masks, 255)]))
    assert small.tolist() == [[[0, 1]], [[255, 255]]]
    assert ignoring.outputs([small]) == ignoring.outputs([masks]) == 2
    assert ignoring.loss(torch.randn(1, 2, 2, 2), torch.full((1, 2, 2), 255), None).item() == 0
    with pytest.raises(ValueError, match="the model gives scores for 4×4 pixels, and the masks have 2×2"):
        ignoring.loss(torch.randn(1, 2, 4, 4), masks, None)
    with pytest.raises(fedhm.FedhmError, match=r"must be of shape \(N, H, W\), not \(4,\)"):
        objective.as_targets(torch.zeros(4), "client 0", torch.float32)


def test_several_labels_are_those_of_scikit_learn() -> None:
    output, targets = torch.randn(30, 5), (torch.rand(30, 5) > 0.5).float()
    found = metrics_of(fedhm.MultiLabel(), output, targets, 4)
    assert found.f1 == pytest.approx(f1_score(targets, output > 0, average="micro"))
    assert found.label_accuracy == pytest.approx(((output > 0) == (targets > 0)).double().mean().item())
    assert found.loss == pytest.approx(F.binary_cross_entropy_with_logits(output, targets).item(), rel=1e-5)


def test_several_labels_are_learned() -> None:
    targets = (X[:, :4] > 0).long()
    settings = SETTINGS | {"train": {"rounds": 8, "batch": 4, "epochs": 2}}
    found = fedhm.run(
        model(4), [(X[i::2], targets[i::2]) for i in range(2)], (X, targets), settings, objective="multilabel"
    )
    assert found.metrics["full"].f1 > 0.7
    with pytest.raises(fedhm.FedhmError, match="must be zeros and ones"):
        fedhm.run(model(4), [(X, Y)], (X, Y), settings, objective="multilabel")


def top2(output: Tensor, targets: Tensor) -> Tensor:
    return (output.topk(2).indices == targets[:, None]).any(1)


def focal(output: Tensor, targets: Tensor) -> Tensor:
    return ((1 - output.softmax(1).gather(1, targets[:, None])) ** 2 * F.cross_entropy(output, targets)).mean()


def test_an_own_loss_is_trained_and_an_own_metric_is_exact() -> None:
    objective = fedhm.Classification(loss=focal, metrics={fedhm.Metric("top2", percent=True): top2, "margin": margin})
    found = fedhm.run(model(), [(X, Y)], (X, Y), SETTINGS, objective=objective)
    plain = fedhm.run(model(), [(X, Y)], (X, Y), SETTINGS)
    assert not torch.equal(found.networks["full"][4].weight, plain.networks["full"][4].weight)
    with torch.no_grad():
        output = found.networks["full"].eval()(X)
    assert found.metrics["full"].top2 == pytest.approx(top2(output, Y).double().mean().item())
    assert found.metrics["full"].margin == pytest.approx(margin(output, Y), rel=1e-5)
    assert list(found.metrics["full"]) == ["accuracy", "loss", "top2", "margin"]
    assert objective.headline.name == "accuracy"
    assert fedhm.Classification(metrics={"top2": top2}, main_metric="top2").headline.name == "top2"


def margin(output: Tensor, targets: Tensor) -> float:
    return float(output.gather(1, targets[:, None]).mean())


def test_an_own_loss_sees_masked_scores() -> None:
    seen = []

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        seen.append(output.detach())
        return F.cross_entropy(output, targets)

    fedhm.Classification(loss=loss).loss(torch.ones(2, 3), torch.tensor([0, 1]), (0, 1))
    assert seen[0][:, 2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"loss": 3}, "the loss must be a function of outputs and targets, not a int"),
        ({"metrics": {"top": None}}, "the metric 'top' must be a function"),
        ({"metrics": [top2]}, "metrics must be functions by name"),
        ({"metrics": {"loss": top2}}, "the metric 'loss' is there already"),
        ({"main_metric": "top"}, "main_metric = 'top' is none of accuracy, loss"),
    ],
)
def test_wrong_parts_are_one_sentence(arguments: Any, sentence: str) -> None:
    with pytest.raises(fedhm.FedhmError, match=sentence):
        fedhm.Classification(**arguments)


def test_own_parts_that_fail_are_one_sentence() -> None:
    def raises(output: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("no")

    for parts, sentence in (
        ({"metrics": {"odd": raises}}, r"the metric 'odd' cannot be computed: KeyError\('no'\)"),
        (
            {"metrics": {"odd": lambda output, _: output[:1, 0]}},
            "the metric 'odd' must return a number for each sample",
        ),
        ({"loss": lambda output, _: output}, "must return one number, the mean over the batch"),
    ):
        with pytest.raises(fedhm.FedhmError, match=sentence):
            fedhm.run(model(), [(X, Y)], (X, Y), SETTINGS, objective=fedhm.Classification(**parts))


def test_settings_without_own_parts_are_what_they_were() -> None:
    assert Config().to_toml().count("own_") == 0
    assert fedhm.Classification().model_dump() == {"name": "classification"}


class Distance(fedhm.Objective):
    """An objective of a user's own, which only this process knows."""

    name: Literal["distance-of-this-test"] = "distance-of-this-test"
    metrics: ClassVar = (fedhm.Metric("distance", more_is_better=False),)

    def as_targets(self, given: Tensor, whose: str, dtype: torch.dtype) -> Tensor:
        return given.long()

    def outputs(self, targets: Any) -> int:
        return 3

    def check(self, targets: Tensor, outputs: int, whose: str) -> None: ...

    def check_output(self, output: Tensor, outputs: int) -> None: ...

    def loss(self, output: Tensor, targets: Tensor, held: Any) -> Tensor:
        return F.cross_entropy(output, targets)

    def sums(self, output: Tensor, targets: Tensor) -> Any:
        return {"off": (output.argmax(1) - targets).abs().sum()}

    def results(self, sums: Any, samples: int) -> fedhm.Metrics:
        return fedhm.Metrics(distance=sums["off"].item() / samples)

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return F.mse_loss(student, teacher)


class Kept(fedhm.MethodConfig):
    """A method of a user's own."""

    name: Literal["kept-of-this-test"] = "kept-of-this-test"

    def build(self, model: nn.Module, setup: object) -> "RunningKept":
        return RunningKept(model)


class RunningKept(fedhm.Method[fedhm.ModelState]):
    tiers = levels = ("full",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def start(self, weights: Any) -> fedhm.ModelState:
        return fedhm.ModelState(weights)

    def tasks(self, state: Any, participants: Any, round_number: int) -> Any:
        for p in participants:
            yield fedhm.Task("train", round_number, p.client, p.tier, self.spec("full"), state.weights)

    def merge(self, state: Any, updates: Any, round_number: int) -> fedhm.ModelState:
        return fedhm.ModelState([update.tensors for update in updates][-1])

    def network(self, spec: fedhm.NetworkSpec) -> nn.Module:
        return copy.deepcopy(self.model)

    def weights(self, state: Any, tier: str) -> Any:
        return state.weights


def in_another_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fedhm", *arguments], capture_output=True, text=True, check=False)


@no_figures()
def test_other_processes_read_runs_with_own_methods_and_objectives(tmp_path: Path) -> None:
    settings = {key: value for key, value in SETTINGS.items() if key != "method"}
    fedhm.run(model(), [(X, Y)], (X, Y), settings, tmp_path / "run", objective=Distance(), method=Kept())
    own = fedhm.Classification(loss=focal, metrics={"top2": top2}, main_metric="top2")
    fedhm.run(model(), [(X, Y)], (X, Y), SETTINGS, tmp_path / "parts", objective=own)
    for name, metric in (("run", "distance"), ("parts", "top2")):
        done = in_another_process("report", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert metric in done.stdout
        assert in_another_process("verify", str(tmp_path / name)).returncode == 0
        resumed = in_another_process("resume", str(tmp_path / name))
        assert "was started from Python with its own data" in resumed.stderr
        exported = in_another_process("export", str(tmp_path / name), "--to", "torch")
        assert "was run with data from Python, which its folder lacks" in exported.stderr
    (here,) = read_runs([tmp_path / "run"])
    assert here.config.objective.headline.name == "distance"


@no_figures()
def test_a_preset_with_an_own_method_is_exported_elsewhere(tmp_path: Path) -> None:
    changes = ["train.rounds=1", "federation.clients=4", "data.train_samples=100", "engine.threads=1"]
    config = fedhm.load_config("digits", changes).model_copy(update={"method": Kept()}).resolved()
    from fedhm.config.registry import register
    from fedhm.run import report_on
    from fedhm.runs.folder import RunFolder

    register("methods", "kept-of-this-test", Kept)
    with RunFolder.create(tmp_path / "run", config) as folder:
        fedhm.prepare(config).run(folder)
    report_on(tmp_path / "run")
    done = in_another_process("export", str(tmp_path / "run"), "--to", "torch")
    assert done.returncode == 0, done.stderr
    resumed = in_another_process("resume", str(tmp_path / "run"))
    assert "the method 'kept-of-this-test' is not known here" in resumed.stderr
