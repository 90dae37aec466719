"""The manifest of a training file: all that a client needs to know beside the file, as JSON.

`docs/on-device.md` describes its fields. A client without this library reads it, so a field keeps its meaning.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedhm.config.objective import Objective
from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Preprocessing
from fedhm.networks.exchange import held_tensors
from fedhm.ondevice.check import GraphCheck
from fedhm.ondevice.executorch import EVALUATE, TRAIN
from fedhm.ondevice.graph import PREFIX, Example, TrainingGraph
from fedhm.ondevice.loop import weight_decays

FORMAT = "fedhm-training-graph-1"


def make_manifest(
    file: str,
    tier: str,
    kind: str,
    network: nn.Module,
    objective: Objective,
    train: TrainConfig,
    graph: TrainingGraph,
    example: Example,
    check: GraphCheck,
    augmentation: Preprocessing | None,
    facts: Mapping[str, str],
) -> dict[str, Any]:
    """Return the manifest of a training graph in a file.

    kind  of the tasks that the graph is for: "train", or "nested" if a smaller tier is trained inside
    """
    decays, held = weight_decays(network, train), held_tensors(network)
    (inputs, input_type), (targets, target_type) = graph.inputs[:2]
    bases = {layer: list(shape) for layer, (shape, _) in zip(graph.bases, graph.inputs[4:], strict=True)}
    return {
        "format": FORMAT,
        "file": file,
        "sha256": hashlib.sha256(graph.program).hexdigest(),
        "tier": tier,
        "work": kind,
        "objective": objective.name,
        "methods": {
            "train": {
                "name": TRAIN,
                "prefix": PREFIX,
                "inputs": ["inputs", "targets", "weights", "held", *(f"basis {layer}" for layer in bases)],
                "outputs": ["differentiated", "loss", *(n for s in graph.statistics for n in (s.mean, s.variance))],
            },
            "evaluate": {"name": EVALUATE, "inputs": [*graph.tensors, "inputs"], "outputs": ["outputs"]},
        },
        "inputs": {"shape": list(inputs[1:]), "dtype": _name(input_type)},
        "targets": {"shape": list(targets[1:]), "dtype": _name(target_type)},
        "outputs": example.outputs,
        "rows": graph.rows,
        "batch": train.batch,
        "epochs": train.epochs,
        "iterations": train.iterations,
        "crop": augmentation.crop if augmentation else 0,
        "flip": bool(augmentation and augmentation.flip),
        "masked": bool(train.masked_loss and objective.has_labels),
        "learning_rate": schedule_of(train),
        "momentum": train.momentum,
        "dampening": train.dampening,
        "nesterov": train.nesterov,
        "clip_norm": train.gradient_limit,
        "frobenius_decay_in_graph": train.frobenius_decay,
        "parameters": [
            {"name": name, "shape": list(held[name].shape), "weight_decay": decays[name]} for name in graph.parameters
        ],
        "statistics": [
            {
                "mean": s.mean,
                "variance": s.variance,
                "shape": list(held[s.mean].shape),
                "momentum": s.momentum,
                "values": s.values,
            }
            for s in graph.statistics
        ],
        "bases": bases,
        "sends": list(graph.tensors),
        "settings": settings_of(train, objective, kind),
        "checked": {"steps": check.steps, "gradients": check.gradients, "outputs": check.outputs},
        "facts": dict(facts),
    }


def schedule_of(train: TrainConfig) -> dict[str, Any]:
    """Return all that `TrainConfig.learning_rate` depends on."""
    return {
        "lr": train.lr,
        "schedule": train.schedule,
        "warmup_rounds": train.warmup_rounds,
        "rounds": train.rounds,
        "milestones": list(train.milestones),
        "factor": train.lr_decay,
    }


# settings of [train] that the graph and the loop around it follow, or cannot follow
FOLLOWED = (
    *("batch", "epochs", "iterations", "lr", "schedule", "warmup_rounds", "milestones", "lr_decay", "optimizer"),
    *("momentum", "dampening", "nesterov", "clip_norm", "weight_decay", "frobenius_decay", "decay_factors"),
    *("masked_loss", "precision", "micro_batch", "checkpointing", "frozen_statistics", "head_factor"),
)
NESTED = ("nested", "nested_tier", "nested_form")  # of graphs with a smaller tier inside


def settings_of(train: TrainConfig, objective: Objective, kind: str) -> dict[str, Any]:
    """Return the settings that a run must share, by their dotted keys: a client compares them with its server's."""
    names = [*FOLLOWED, *(NESTED if kind == "nested" else ())]
    if train.schedule == "cosine":  # the others do not depend on the last round
        names.append("rounds")
    values = train.model_dump(mode="json") | {name: getattr(train, name) for name in ("schedule", "warmup_rounds")}
    values["clip_norm"] = train.gradient_limit
    return {"objective": objective.model_dump(mode="json")} | {f"train.{name}": values[name] for name in names}


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
