"""Rounds of the workload in pfl-research; torchrun makes its processes, the first argument says their threads."""

import sys
import types

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from peers.turns import Turns
from peers.workload import BATCH, CLIENTS, LR, ROUNDS, clients, cnn, device


def loss(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(network.train()(images), labels)


@torch.no_grad()
def metrics(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
    total = F.cross_entropy(network.eval()(images), labels, reduction="sum").item()
    return {"loss": Weighted(total, len(labels))}


class Paced(TrainingProcessCallback):
    """A callback that holds each round until it is asked for; where there are two processes, the first one listens."""

    def __init__(self) -> None:
        self.distributed = torch.distributed.is_initialized()
        self.turns = Turns() if not self.distributed or torch.distributed.get_rank() == 0 else None

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:  # noqa: ARG002
        self._ended()
        return Metrics()

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        return self._ended(), Metrics()

    def _ended(self) -> bool:
        if device().type != "cpu":
            torch.accelerator.synchronize()  # a round is done when the device is
        asked = torch.tensor([self.turns.wait() if self.turns else True])
        if self.distributed:
            torch.distributed.broadcast(asked, 0)
        return not asked.item()


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    network = cnn().to(device())
    network.loss = types.MethodType(loss, network)  # where pfl looks for them
    network.metrics = types.MethodType(metrics, network)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    data = FederatedDataset.from_slices(
        {n: (images.to(device()), labels.to(device())) for n, (images, labels) in enumerate(clients())},
        get_user_sampler("minimize_reuse", list(range(CLIENTS))),
    )
    FederatedAveraging().run(
        # the first round is always evaluated; it is a warm-up
        NNAlgorithmParams(
            central_num_iterations=ROUNDS, evaluation_frequency=ROUNDS, train_cohort_size=CLIENTS, val_cohort_size=0
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        callbacks=[Paced()],
    )


if __name__ == "__main__":
    main()
