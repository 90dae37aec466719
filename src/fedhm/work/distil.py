"""Distil: train the network that the client keeps towards the task's logits, then on the client's own samples.

The client sends its logits on the public samples. On the public inputs xᵢ, with targets tᵢ of shape (outputs,), a
student f minimises

    mean |f(xᵢ) − tᵢ|                            absolute error, by FedMD's clients
    the objective's divergence                   by FedDF's server
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Batch, Feed
from fedhm.networks.batchnorm import normalise_by_batch
from fedhm.networks.exchange import Tensors
from fedhm.networks.inputs import Inputs, forward_batch
from fedhm.networks.reuse import PreparedNetwork
from fedhm.networks.saving import backward_in_parts, checkpoint_blocks
from fedhm.networks.sgd import SGD, Optimizer, ParameterGroup
from fedhm.seeds import torch_generator
from fedhm.work.client import Client
from fedhm.work.messages import Task, Update
from fedhm.work.train import fit, inference_batch, task_seed
from fedhm.work.work import Example, Expected, WorkResult, samples_trained_on, validate_bounds

Loss = Callable[[Tensor, Tensor], Tensor]
CONSENSUS, LOGITS = (
    "consensus",
    "logits",
)  # the tensor of a task, after the first round; the tensor of its answer


class Distil:
    trains, returns_network, tests = True, False, False
    past, short = "distilled", "distil"

    def loaded(self, task: Task) -> Tensors:
        return task.kept

    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        assert client.public is not None
        public, labels = client.public.on(client.networks.device, client.cache), client.loss_labels
        with task_seed(client, task):
            self._digest(client, task, ready.network, public)
            loss = fit(client, task, ready, labels)
        found = logits(ready.network, public, inference_batch(client.train.batch, client.train, task)).cpu()
        return WorkResult({LOGITS: found}, loss, labels, ready.hand_over(task.kept))

    def _digest(self, client: Client, task: Task, network: nn.Module, public: Feed) -> None:
        """Train the network towards the clients' mean logits by plain SGD, if there are any yet."""
        if CONSENSUS not in task.tensors:
            return
        generator = torch_generator(client.seed, "digest", task.round, task.client)
        optimizer = SGD([ParameterGroup(list(network.parameters()))], lr=task.options.digest_lr)
        consensus = task.tensors[CONSENSUS].to(client.networks.device)
        checkpoint_blocks([network], client.train.checkpointing)
        for _ in range(task.options.digest_epochs):
            batches = public.shuffled(client.train.batch, generator)
            distil_towards(network, consensus, F.l1_loss, optimizer, batches, client.train.micro_batch)

    @torch.no_grad()
    def expected(self, network: nn.Module, example: Example) -> Tensors:
        output = forward_batch(network.eval(), example.inputs)
        return {LOGITS: output.new_zeros(example.public, *output.shape[1:])}

    def validate(self, update: Update, task: Task, expected: Expected) -> str | None:
        for name, tensor in update.tensors.items():
            if reason := validate_bounds(name, tensor, -expected.largest_output, expected.largest_output):
                return reason
        return None

    def samples_seen(self, task: Task, samples: int, public: int, train: TrainConfig) -> int:
        digested = task.options.digest_epochs if CONSENSUS in task.tensors else 0
        return samples_trained_on(train, samples) + public * (1 + digested)


def distil_towards(
    network: nn.Module, targets: Tensor, loss: Loss, optimizer: Optimizer, batches: Iterable[Batch], most: int = 0
) -> None:
    """Make one step on each batch of public inputs. With each input comes the number of its row in `targets`.

    most  how many samples of a batch run together; 0: all of them
    """
    network.train()
    trained = list(network.parameters())

    def loss_of(inputs: Inputs, rows: Tensor) -> Tensor:
        return loss(forward_batch(network, inputs), targets[rows])

    with normalise_by_batch(network):
        for inputs, rows in batches:
            optimizer.zero_grad()
            backward_in_parts(loss_of, inputs, rows, most, trained)
            optimizer.step()


@torch.no_grad()
def logits(network: nn.Module, public: Feed, batch: int) -> Tensor:
    """Return the logits (N, outputs) for all public inputs.

    BatchNorm normalises by batch, as in training, since its running averages need not have travelled. All other layers
    are in evaluation mode.
    """
    network.eval()
    with normalise_by_batch(network):
        return torch.cat([forward_batch(network, inputs) for inputs, _ in public.ordered(batch)])


ENTRY_POINT = Distil()
