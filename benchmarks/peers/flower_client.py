"""What Flower's Ray actors run. A module of its own, so that Ray sends its name and not its contents."""

from functools import cache

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from peers.workload import BATCH, LR, clients, cnn, device

app = ClientApp()


@cache  # once in each actor
def network() -> nn.Module:
    return cnn().to(device())


@cache
def data() -> list[tuple[Tensor, Tensor]]:
    return [(images.to(device()), labels.to(device())) for images, labels in clients()]


@app.train()
def train(message: Message, context: Context) -> Message:
    model = network().train()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = data()[int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for inputs, targets in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    reply = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(labels)}),
    }
    return Message(content=RecordDict(reply), reply_to=message)
