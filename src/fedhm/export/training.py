"""A tier's training step as files for a device: the graph (`.train.pte`), its manifest, and the first weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedhm.assembly import design, read_federation
from fedhm.config.objective import Objective
from fedhm.config.schema import Config, TrainConfig
from fedhm.data.federation import Federation
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.errors import FedhmError
from fedhm.export.source import finished_run, full_model, model_origin
from fedhm.export.write import Exported, temporary_folder
from fedhm.machine.files import file_name
from fedhm.methods.method import AnyMethod
from fedhm.models.own import OwnModel
from fedhm.networks.exchange import Tensors, exchanged_tensors, held_tensors, load
from fedhm.networks.inputs import require_tensor
from fedhm.ondevice.check import check_graph
from fedhm.ondevice.executorch import require_executorch
from fedhm.ondevice.graph import Example, build_graph
from fedhm.ondevice.manifest import make_manifest
from fedhm.ondevice.nesting import Nesting
from fedhm.ondevice.settings import check_train_settings
from fedhm.runs.folder import read_run_facts
from fedhm.runs.models import load_tier, tier_file
from fedhm.work.messages import Participant, Task
from fedhm.work.nested import BASIS, nesting_of

CHECKED = 512  # samples at most, of the first clients, on which the steps are compared


@dataclass(frozen=True)
class TrainingSource:
    """A network to be trained on a device, and samples to compare its steps on."""

    network: nn.Module
    tier: str
    objective: Objective
    train: TrainConfig
    example: Example
    random: bool = False  # the samples are random numbers
    kind: str = "train"  # of the tasks that the graph is for
    nesting: Nesting | None = None
    bases: Mapping[str, Tensor] = field(default_factory=dict)  # that come with a task beside the network's tensors
    augmentation: Preprocessing | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


def write_training(source: TrainingSource, folder: Path) -> Exported:
    """Write the training files of a network into a folder. A graph that differs from PyTorch is refused."""
    require_executorch("a training graph")
    check_train_settings(source.train, "a training graph")
    given = (source.network, source.objective, source.train)
    source.objective.check(source.example.targets, source.example.outputs, "a training graph")
    try:
        graph = build_graph(*given, source.example, source.nesting)
        check = check_graph(*given, graph, source.example, source.nesting)
    except FedhmError as error:
        raise FedhmError(f"tier {source.tier} cannot be exported for training: {error}") from error
    name = f"{file_name(source.tier)}.train"
    manifest = make_manifest(
        f"{name}.pte", source.tier, source.kind, *given, graph, source.example, check, source.augmentation, source.facts
    )
    with temporary_folder(folder) as beside:
        (beside / f"{name}.pte").write_bytes(graph.program)
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        (beside / f"{name}.json").write_text(text, encoding="utf-8")
        tensors = {**held_tensors(source.network), **source.bases}
        first = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        (beside / f"{name}.safetensors").write_bytes(save(first))  # save_file would hide it from other users
    manifest_path = folder / f"{name}.json"
    return Exported(
        folder / f"{name}.pte", "executorch", False, check.gradients, source.random, {}, manifest=manifest_path
    )


def training_sources(
    path: Path | Config, tiers: Sequence[str] = (), own: OwnModel | None = None
) -> list[TrainingSource]:
    """Return the tiers of a finished run, or of a config whose run has not begun, as its clients train them.

    own  a user's own model: in place of that of a config, or the one that a finished run had
    """
    if isinstance(path, Config):
        config, trained = path if own is None else path.without_model(), None
    else:
        run = finished_run(path, own)
        config, trained = run.config, path
    config = config.resolved()
    if config.privacy.at_clients:
        raise FedhmError(
            "a client with a training graph does not clip its update or add noise to it: privacy.where = 'client' "
            "needs clients with fedhm"
        )
    federation = read_federation(config)
    model = full_model(config, federation, own)
    sample = Feed(federation.example, federation.preprocessing).one()[0]
    method = design(config, model, sample, federation.classes, federation.public_feed()).method
    for tier in tiers:
        if tier not in method.tiers:
            raise FedhmError(f"there is no tier '{tier}', only {', '.join(method.tiers)}")
    example = _example(federation)
    found: list[TrainingSource] = []
    for tier in tiers or method.tiers:
        saved: Tensors = {}
        if trained is not None:
            file = tier_file(trained / "models", tier)
            saved = exchanged_tensors(load_tier(file, model, tier, read_run_facts(trained).run))
        (task,) = method.tasks(_state(method, model, saved), [Participant(0, tier)], config.train.rounds)
        network, nesting = _training_network(method, task, config.train)
        if saved:
            load(network, saved)
        bases = {name: tensor for name, tensor in task.tensors.items() if nesting and name.startswith(BASIS)}
        outputs = _outputs(network, example, config.objective)
        whole = Example(example.inputs, example.targets, outputs, example.preprocessing)
        found.append(
            TrainingSource(
                network,
                tier,
                config.objective,
                config.train,
                whole,
                False,
                task.kind,
                nesting,
                bases,
                federation.preprocessing,
                model_origin(config),
            )
        )
    return found


def _state(method: AnyMethod, model: nn.Module, saved: Tensors) -> Any:
    """Return the method's state of a model before its run, with the saved tensors in it that it holds as they are.

    The directions of dense layers, which come with a nested task, are then those of the saved tensors.
    """
    first = {name: tensor.clone() for name, tensor in exchanged_tensors(model).items()}
    same = {name: saved[name] for name in first if name in saved and saved[name].shape == first[name].shape}
    return method.start(first | {name: tensor.clone() for name, tensor in same.items()})


def _training_network(method: AnyMethod, task: Task, train: TrainConfig) -> tuple[nn.Module, Nesting | None]:
    """Return the network that a client of the tier trains, with the weights of its first task."""
    network = method.network(task.network)
    if task.kind == "nested":
        nesting, own = nesting_of(task, network, train)
        return load(network, own), nesting
    if task.kind != "train":
        raise FedhmError(f"clients of tier {task.tier} do '{task.kind}', and a training graph is for training only")
    return load(network, task.tensors), None


def _example(federation: Federation) -> Example:
    samples: list[Samples] = []
    for each in federation.clients:
        samples.append(each)
        if sum(map(len, samples)) >= CHECKED:
            break
    inputs = torch.cat([require_tensor(each.inputs, "export") for each in samples])[:CHECKED]
    targets = torch.cat([each.labels for each in samples])[:CHECKED]
    preprocessing = federation.preprocessing if samples[0].are_images else None
    return Example(inputs.contiguous(), targets, 0, preprocessing)


def network_example(
    network: nn.Module, inputs: Tensor, targets: Tensor, preprocessing: Preprocessing | None, objective: Objective
) -> Example:
    """Return the example of a network of one's own."""
    plain = Example(inputs, targets, 0, preprocessing)
    return Example(inputs, targets, _outputs(network, plain, objective), preprocessing)


@torch.no_grad()
def _outputs(network: nn.Module, example: Example, objective: Objective) -> int:
    """Return the length of the mask of labels: the network's outputs; 1 without labels."""
    if not objective.has_labels:
        return 1
    inputs = example.inputs[:2]
    if example.preprocessing is not None:
        inputs = example.preprocessing.normalise(inputs.permute(0, 2, 3, 1).contiguous())
    training = network.training
    outputs = network.eval()(inputs)
    network.train(training)
    return int(outputs.shape[-1])
