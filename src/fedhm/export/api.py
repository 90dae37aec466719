"""`fedhm.export`: a tier of a run, or your own network, as a file for a device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.assembly import dtype_of
from fedhm.config.loading import parse
from fedhm.config.objective import Objective
from fedhm.config.registry import make
from fedhm.data.convert import to_samples
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.export.formats import find_format
from fedhm.export.source import COMPARED, ExportSource, sources_from_run
from fedhm.export.write import Exported, write
from fedhm.networks.inputs import require_tensor

RANDOM_INPUTS = 8


def export(
    model: nn.Module | str | Path,
    sample_shape: Sequence[int] | None = None,
    *,
    to: str = "onnx",
    tier: str | None = None,
    out: str | Path | None = None,
    int8: bool = False,
    samples: Any = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    classes: Sequence[str] = (),
    objective: Objective | str = "classification",
    train: bool | Mapping[str, Any] = False,
) -> Exported:
    """Write a network for a device's runtime, check the file with that runtime, and return the results.

    model         the folder of a finished run, with `tier`; or a network, with `sample_shape` such as (3, 32, 32)
    to            "onnx", "torch" (a .pt2 file) or "executorch" (a .pte file)
    out           the folder to write into: by default `export` in the run's, or here
    int8          8-bit weights and activations, for onnx: needs samples, of which a run has its own
    samples       pairs (inputs, labels) to compare and measure on; without, random inputs are compared
    mean, std     of a network's own images, by channel and for pixels in 0…1: the file then takes uint8 images
    classes       what the outputs stand for, kept in the file
    train         a file that trains, for executorch (docs/on-device.md); for a network, perhaps its settings of [train]
    """
    if train is not False:
        return _export_training(model, sample_shape, to, tier, out, int8, samples, mean, std, objective, train)
    if isinstance(model, nn.Module):
        if tier is not None:
            raise FedhmError("tier= is for the folder of a run; a network is exported as it is")
        source = _source_from_network(model, sample_shape, samples, mean, std, classes, objective)
        return write(source, to, Path(out or "export"), int8=int8)
    if sample_shape is not None or samples is not None or mean or std:
        raise FedhmError("sample_shape, samples, mean and std are for a network: the folder of a run has them")
    if tier is None:
        raise FedhmError("name the tier to export, such as tier='1/8'")
    (source,) = sources_from_run(Path(model), [tier], classes)
    return write(source, to, Path(out or Path(model) / "export"), int8=int8)


def _export_training(
    model: nn.Module | str | Path,
    shape: Sequence[int] | None,
    to: str,
    tier: str | None,
    out: str | Path | None,
    int8: bool,
    samples: Any,
    mean: Sequence[float],
    std: Sequence[float],
    objective: Objective | str,
    train: bool | Mapping[str, Any],
) -> Exported:
    from fedhm.export.training import TrainingSource, network_example, training_sources, write_training

    if to != "executorch" or int8:
        raise FedhmError("train=True writes ExecuTorch files in 32 bits: it goes with to='executorch'")
    find_format(to)
    if not isinstance(model, nn.Module):
        if train is not True or tier is None:
            raise FedhmError("a run has its settings of [train] and its tiers: train=True, tier='1/8'")
        (found,) = training_sources(Path(model), [tier])
        return write_training(found, Path(out or Path(model) / "export"))
    if samples is None:
        raise FedhmError("a training graph is checked on samples: pass some with samples=(inputs, labels)")
    source = _source_from_network(model, shape, samples, mean, std, (), objective)
    assert source.test is not None
    assert source.objective is not None
    settings = {"nested": 0.0, **(train if isinstance(train, Mapping) else {})}
    config = parse({"train": settings}, "train=").resolved()
    inputs = require_tensor(source.test.inputs, "export")
    example = network_example(model, inputs, source.test.labels, source.preprocessing, source.objective)
    own = TrainingSource(model, "model", source.objective, config.train, example)
    return write_training(own, Path(out or "export"))


def _source_from_network(
    model: nn.Module,
    shape: Sequence[int] | None,
    given: Any,
    mean: Sequence[float],
    std: Sequence[float],
    classes: Sequence[str],
    objective: Objective | str,
) -> ExportSource:
    if shape is None:
        raise FedhmError("say the shape of one input, without the batch axis: sample_shape=(3, 32, 32)")
    if not isinstance(shape, Sequence) or any(not hasattr(size, "__index__") or size < 1 for size in shape):
        raise FedhmError(
            f"sample_shape must be the shape of one input, such as (3, 32, 32), not {shape!r}; to= names the format"
        )
    if len(mean) != len(std) or (mean and len(mean) != shape[0]):
        raise FedhmError(f"mean and std have a number for each of the {shape[0]} channels")
    if mean and len(shape) != 3:
        raise FedhmError(f"mean and std are for images (C, H, W), not for inputs of shape {tuple(shape)}")
    learned = make("objectives", objective) if isinstance(objective, str) else objective
    test = None if given is None else to_samples(given, "samples", dtype_of(model), learned)
    inputs = _random(model, shape, images=bool(mean)) if test is None else require_tensor(test.inputs, "export")
    if tuple(inputs.shape[1:]) != tuple(shape):
        raise FedhmError(f"the samples have inputs of shape {tuple(inputs.shape[1:])}, not {tuple(shape)}")
    if (inputs.dtype == torch.uint8) != bool(mean):
        raise FedhmError("uint8 images need mean and std, as in training; other inputs take none")
    preprocessing = Preprocessing(tuple(mean), tuple(std)) if mean else None
    source = ExportSource(
        model, "model", inputs[:COMPARED], test is None, preprocessing, tuple(classes), learned, test,
        None if test is None else inputs[:COMPARED],
    )  # fmt: skip
    try:
        outputs = source.outputs(source.inputs[:1])
    except Exception as error:  # whatever a foreign model raises
        raise FedhmError(f"the model does not accept one input of shape {tuple(shape)}: {error}") from error
    if not isinstance(outputs, Tensor):
        raise FedhmError(f"the model must give a tensor, not a {type(outputs).__name__}")
    if classes and outputs.shape[-1] != len(classes):
        raise FedhmError(f"the model has {outputs.shape[-1]} outputs, but there are {len(classes)} names for them")
    return source


def _random(model: nn.Module, shape: Sequence[int], *, images: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if images:
        return torch.randint(0, 256, (RANDOM_INPUTS, *shape), dtype=torch.uint8, generator=generator)
    return torch.randn(RANDOM_INPUTS, *shape, dtype=dtype_of(model), generator=generator)
