"""The tiers of a finished run as subjects of an export, with the run's own data to compare and measure them on."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedhm.assembly import read_federation
from fedhm.config.settings import Config
from fedhm.data.federation import Federation
from fedhm.data.samples import Samples, concatenate
from fedhm.data.sources.catalogue import CLASS_NAMES
from fedhm.errors import FedhmError
from fedhm.export.subject import Subject
from fedhm.machine.printable import pasteable
from fedhm.models.build import build_model
from fedhm.networks.inputs import one_tensor
from fedhm.runs.history import Run, read_runs
from fedhm.runs.tier_files import load_tier, tier_file

COMPARED = 256  # samples
CALIBRATION = 512  # training samples, from all clients alike


def subjects_of_run(path: Path, tiers: Sequence[str] = (), classes: Sequence[str] = ()) -> list[Subject]:
    """Read the models of a run's tiers, all of them if none is named."""
    run = _finished(path)
    for tier in tiers:
        if tier not in run.tiers:
            raise FedhmError(f"{path} has no tier '{tier}', only {', '.join(run.tiers)}")
    federation = read_federation(run.config)
    model = build_model(run.config, federation.input_shape, federation.classes)
    test = federation.test or concatenate([samples for _, samples in federation.tests.named()])
    names = tuple(classes) or _class_names(run.config, federation)
    if classes and len(classes) != federation.classes:
        raise FedhmError(f"there are {federation.classes} classes, but {len(classes)} names for them")
    return [
        Subject(
            load_tier(tier_file(path / "models", tier), model),
            tier,
            one_tensor(test.inputs, "export")[:COMPARED],
            random=False,
            preprocessing=federation.preprocessing if test.are_images else None,
            classes=names,
            objective=run.config.objective,
            test=test,
            calibration=_calibration(federation.clients),
            origin=_origin(run),
        )
        for tier in tiers or run.tiers
    ]


def _finished(path: Path) -> Run:
    (run,) = read_runs([path])
    if run.config.model is None or run.config.data is None:
        raise FedhmError(
            f"{path} was run with a model or data of its own, which only its owner has: export its networks from "
            "Python, fedhm.export(result.networks['1/8'], sample_shape)"
        )
    missing = [tier for tier in run.tiers if not tier_file(path / "models", tier).exists()]
    if not run.complete or missing:
        raise FedhmError(f"{path} is not finished, so it has no models yet: {pasteable('fedhm', 'resume', path)}")
    return run


def _class_names(config: Config, federation: Federation) -> tuple[str, ...]:
    if not config.objective.has_labels or config.data is None:
        return ()
    numbers = tuple(str(number) for number in range(federation.classes))
    return CLASS_NAMES.get(config.data.source, numbers)


def _calibration(clients: Sequence[Samples]) -> Tensor:
    each = -(-CALIBRATION // len(clients))
    return torch.cat([one_tensor(samples.inputs, "export")[:each] for samples in clients])


def _origin(run: Run) -> dict[str, str]:
    config = run.config
    assert config.data is not None
    assert config.model is not None
    return {
        "model": f"{config.model.name}, width {config.model.width:g}",
        "data": f"{config.data.source}, {config.data.partition}, {config.federation.clients} clients",
        "training": f"{config.method.name}, {len(run.records)} rounds, seed {config.seed}",
    }
