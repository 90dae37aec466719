"""Time the server's round for all adapters of MiniLM, on one core: python benchmarks/lora_server.py --clients 10 20

It is the method's own `merge`, as a run calls it, with updates of clients of ranks 16, 8, 4 and 2: of query and value
of six layers, twelve weights of 384 × 384, and of a head for 150 classes. A model of MiniLM's shape with random weights
has the same adapters; nothing of its base takes part.
"""

import argparse
import statistics
import time
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from fedhm.methods.lora import LoRA, LoRAConfig, LoRAState
from fedhm.methods.method import Setup
from fedhm.work.messages import Participant, Update

AGGREGATES = ("models", "updates", "bands", "partitions")


def of_minilms_shape() -> nn.Module:
    """Return MiniLM's layers; the vocabulary, which no adapter is for, is small."""
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    transformers: Any = import_module("transformers")
    model: nn.Module = transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes, vocab_size=100, num_labels=150)
    )
    return model


def answers(method: LoRA, state: LoRAState, clients: int) -> list[Update]:
    """Return updates as if clients had trained: what they were sent, and noise."""
    generator = torch.Generator().manual_seed(0)
    asked = [Participant(number, method.levels[number % len(method.levels)]) for number in range(clients)]
    found = []
    for task in method.tasks(state, asked, 1):
        moved = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in task.tensors.items()}
        found.append(Update(task.kind, 1, task.client, task.tier, task.network, moved, 10, None, 1.0))
    return found


def rounds(method: LoRA, weights: dict[str, Tensor], clients: int, repeats: int) -> list[float]:
    """Return the CPU seconds of a round, several times; the round before it has left something to begin from."""
    begun = method.start(weights)
    state = method.merge(begun, answers(method, begun, clients), 1)
    updates = answers(method, state, clients)
    found = []
    for _ in range(repeats):
        start = time.process_time()
        method.merge(state, updates, 2)
        found.append(time.process_time() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = of_minilms_shape()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    print(f"| | {' | '.join(f'{count} clients' for count in options.clients)} |\n|---|{'--:|' * len(options.clients)}")
    for aggregate in AGGREGATES:
        method = LoRA(model, LoRAConfig.model_validate({"aggregate": aggregate}), Setup("classifier"))
        found = [statistics.median(rounds(method, weights, count, options.repeats)) for count in options.clients]
        print(f"| `{aggregate}` | {' | '.join(f'{1000 * each:.0f} ms' for each in found)} |", flush=True)


if __name__ == "__main__":
    main()
