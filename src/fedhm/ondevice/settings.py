"""The settings that a training graph cannot follow. They are refused, never ignored."""

from fedhm.config.schema import TrainConfig
from fedhm.errors import FedhmError

UNABLE: dict[str, tuple[object, str]] = {
    "optimizer": ("sgd", "ExecuTorch has SGD only"),
    "precision": ("float32", "the graph computes in float32"),
    "micro_batch": (0, "the graph has a fixed batch"),
    "checkpointing": (False, "the graph keeps all activations"),
    "frozen_statistics": (False, "the graph normalises by batches"),
    "head_factor": (1.0, "the graph has one learning rate"),
}


def check_train_settings(train: TrainConfig, why: str) -> None:
    """Refuse settings of [train] that a training graph cannot follow; `why` begins the sentence."""
    for name, (needed, reason) in UNABLE.items():
        given = getattr(train, name)
        if given != needed:
            value = f"'{needed}'" if isinstance(needed, str) else str(needed).lower()
            raise FedhmError(f"{why} needs train.{name} = {value}: {reason}")
