"""Train an adapter on a base that was trained before, or with parts that the client keeps; send back the shared part.

A task brings three things: the tensors that are trained and sent back, tensors to fold into the frozen base, and the
tensors that its client kept from its last task.
"""

from fedhm.adapters.packing import FOLDED
from fedhm.networks.exchange import Tensors
from fedhm.networks.reuse import PreparedNetwork, load_from_host
from fedhm.work.client import Client
from fedhm.work.messages import Task
from fedhm.work.train import fit, task_seed
from fedhm.work.work import TrainingWork, WorkResult


class Adapt(TrainingWork):
    def loaded(self, task: Task) -> Tensors:
        return {name: tensor for name, tensor in task.tensors.items() if not name.startswith(FOLDED)}

    def run(self, client: Client, task: Task, ready: PreparedNetwork) -> WorkResult:
        own = self.loaded(task)
        more = {name: t for name, t in task.tensors.items() if name not in own} | task.kept
        load_from_host(ready.network, more, client.networks.device)
        with task_seed(client, task):
            labels = client.loss_labels
            loss = fit(client, task, ready, labels)
        return WorkResult(ready.hand_over(own), loss, labels, ready.hand_over(task.kept))


ENTRY_POINT = Adapt()
