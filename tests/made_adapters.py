"""Rounds of adapters on a tiny transformer, without training: methods, their states, and what clients might send."""

from typing import Any

import torch
from torch import Tensor, nn

from fedhm.adapters.packing import FOLDED
from fedhm.config.registry import find
from fedhm.methods.method import AnyMethod, Setup
from fedhm.networks.exchange import Tensors, exchanged_tensors
from fedhm.networks.inputs import forward_batch
from fedhm.work.messages import Participant, Update
from tiny_transformers import sentences, tiny_bert

RANKS = [4, 2, 1]
TRAIN = {"rounds": 2, "batch": 8, "lr": 0.02, "optimizer": "adamw"}
DATA = [sentences(18, seed) for seed in range(3)]
TEST = sentences(24, 99)


def settings(method: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    own = {"name": "lora", "ranks": RANKS} | (method or {})
    whole = {"participation": 1.0}
    return {"method": own, "train": TRAIN, "federation": whole, "engine": {"workers": 1, "threads": 1}} | sections


def batch() -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (5, 7), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def output(network: nn.Module) -> Tensor:
    with torch.no_grad():
        return forward_batch(network.eval(), batch())


def started(name: str, model: nn.Module | None = None, **own: Any) -> tuple[AnyMethod, Any, Tensors]:
    """Return a method around a model, its state before the first round, and the model's weights."""
    model = model or tiny_bert()
    method = find("methods", name).model_validate({"name": name, **own}).build(model, Setup("classifier", batch()))
    weights = {n: t.clone() for n, t in exchanged_tensors(model).items()}
    return method, method.start(weights), weights


def answers(method: AnyMethod, state: Any, clients: int, seed: int = 0) -> list[Update]:
    """Return updates as if clients had trained: what they were sent, and noise."""
    generator = torch.Generator().manual_seed(seed)
    asked = [Participant(number, method.levels[number % len(method.levels)]) for number in range(clients)]
    found = []
    for task in method.tasks(state, asked, 1):
        own = {n: t for n, t in task.tensors.items() if not n.startswith(FOLDED)}
        moved = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in own.items()}
        kept = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in task.kept.items()}
        found.append(Update(task.kind, 1, task.client, task.tier, task.network, moved, 10, None, 1.0, kept=kept))
    return found
