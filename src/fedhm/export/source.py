"""The source of an export: a network, examples of its raw inputs, and samples to measure it on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fedhm.assembly import read_federation
from fedhm.config.objective import Objective
from fedhm.config.schema import Config
from fedhm.data.federation import Federation
from fedhm.data.samples import Preprocessing, Samples, concatenate
from fedhm.data.sources import SOURCES
from fedhm.errors import FedhmError
from fedhm.machine.printable import quoted_command
from fedhm.models.build import build_model
from fedhm.models.own import OwnModel, build_own
from fedhm.networks.inputs import require_tensor
from fedhm.runs.folder import read_run_facts
from fedhm.runs.history import Run, read_runs
from fedhm.runs.models import load_tier, tier_file


@dataclass(frozen=True)
class ExportSource:
    network: nn.Module
    name: str  # of its files: the tier
    inputs: Tensor  # raw inputs to compare on: uint8 images (N, C, H, W), or tensors as the network takes them
    random: bool  # the inputs are random numbers
    preprocessing: Preprocessing | None = None  # None: the network takes raw inputs
    classes: tuple[str, ...] = ()
    objective: Objective | None = None
    test: Samples | None = None  # to measure the metrics on
    calibration: Tensor | None = None  # raw training inputs: static int8 needs them
    origin: Mapping[str, str] = field(default_factory=dict)  # model, data and training, for the file's metadata

    @torch.no_grad()
    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the network's own outputs for raw inputs, normalised as in training."""
        if self.preprocessing is not None:
            inputs = self.preprocessing.normalise(inputs.permute(0, 2, 3, 1).contiguous())
        outputs: Tensor = self.network.eval()(inputs)
        return outputs


class RawImages(nn.Module):
    """A network that normalises its inputs itself: it takes uint8 images (N, C, H, W)."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.network = network
        for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)):
            self.register_buffer(name, (torch.tensor(values) * 255)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.network((images.float() - self.mean) / self.std)
        return outputs


# The tiers of a finished run, with the run's own data.

COMPARED = 256  # samples on which outputs are compared
CALIBRATION = 512  # training samples, from all clients alike


def sources_from_run(
    path: Path, tiers: Sequence[str] = (), classes: Sequence[str] = (), own: OwnModel | None = None
) -> list[ExportSource]:
    """Read the models of a run's tiers. Without names, all tiers. A run with a user's own model needs it again."""
    run = finished_run(path, own)
    for tier in tiers:
        if tier not in run.tiers:
            raise FedhmError(f"{path} has no tier '{tier}', only {', '.join(run.tiers)}")
    federation = read_federation(run.config)
    model = full_model(run.config, federation, own)
    test = federation.test or concatenate([samples for _, samples in federation.client_tests.named()])
    names = tuple(classes) or _class_names(run.config, federation)
    if classes and len(classes) != federation.classes:
        raise FedhmError(f"there are {federation.classes} classes, but {len(classes)} names for them")
    return [
        ExportSource(
            load_tier(tier_file(path / "models", tier), model, tier, read_run_facts(path).run),
            tier,
            require_tensor(test.inputs, "export")[:COMPARED],
            random=False,
            preprocessing=federation.preprocessing if test.are_images else None,
            classes=names,
            objective=run.config.objective,
            test=test,
            calibration=_calibration(federation.clients),
            origin=model_origin(run.config) | {"training": _training(run)},
        )
        for tier in tiers or run.tiers
    ]


def full_model(config: Config, federation: Federation, own: OwnModel | None) -> nn.Module:
    """Return the model of [model], or a user's own in its place."""
    if own is None:
        return build_model(config, federation.input_shape, federation.classes)
    return build_own(own, config.seed)


def finished_run(path: Path, own: OwnModel | None = None) -> Run:
    """Return the run of a folder, or refuse a folder without models."""
    (run,) = read_runs([path])
    file = tier_file(path / "models", run.tiers[-1])
    if run.config.data is None:
        raise FedhmError(
            f"{path} was run with data from Python, which its folder lacks: export its networks from Python, "
            f"fedhm.export(fedhm.load_tier({str(file)!r}, model), sample_shape)"
        )
    if run.config.model is None and own is None:
        raise FedhmError(f"{path} was run with a model of your own: name it with --model FILE.py:FUNCTION")
    if run.config.model is not None and own is not None:
        raise FedhmError(f"{path} was run with the model of its settings: leave out --model")
    missing = [tier for tier in run.tiers if not tier_file(path / "models", tier).exists()]
    if not run.complete or missing:
        raise FedhmError(f"{path} is not finished, so it has no models yet: {quoted_command('fedhm', 'resume', path)}")
    return run


def _class_names(config: Config, federation: Federation) -> tuple[str, ...]:
    if not config.objective.has_labels or config.data is None:
        return ()
    known = SOURCES[config.data.source].class_names if config.data.source in SOURCES else ()
    return known or tuple(str(number) for number in range(federation.classes))


def _calibration(clients: Sequence[Samples]) -> Tensor:
    each = -(-CALIBRATION // len(clients))
    return torch.cat([require_tensor(samples.inputs, "export")[:each] for samples in clients])


def model_origin(config: Config) -> dict[str, str]:
    """Return what a config trains, for the metadata of files."""
    assert config.data is not None
    return {
        "model": "of its user" if config.model is None else f"{config.model.name}, width {config.model.width:g}",
        "data": f"{config.data.source}, {config.data.partition}, {config.federation.clients} clients",
    }


def _training(run: Run) -> str:
    return f"{run.config.method.name}, {len(run.records)} rounds, seed {run.config.seed}"
