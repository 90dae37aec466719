"""What a client of each tier pays, told without training: from the very tasks that it would get."""

from rich.table import Table
from torch import nn

from fedhm.config.settings import Config
from fedhm.measure.cost import measure, training_memory
from fedhm.methods.method import Method
from fedhm.networks.batchnorm import running_names
from fedhm.networks.exchange import exchanged, size_in_bytes
from fedhm.report.tables import readable_bytes, readable_macs
from fedhm.work.messages import Participant, Task


def size_table(name: str, config: Config, model: nn.Module, method: Method, shape: tuple[int, ...]) -> Table:
    """A client that trains several networks holds one at a time, and exchanges all of them."""
    table = Table(title=f"{name}: one sample {'×'.join(map(str, shape))}, batch {config.train.batch}")
    for column in ("tier", "parameters", "MACs/sample", "bytes each way", "training memory"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    state = method.start(exchanged(model))
    for tier in method.tiers:
        cost = measure(method.network(tier), shape)
        tasks = list(method.tasks(state, [Participant(0, tier)], config.train.rounds))  # after a warm-up
        networks = {task.network for task in tasks}
        memory = max(training_memory(method.network(each), shape, config.train.batch) for each in networks)
        table.add_row(
            tier,
            f"{cost.parameters:,}",
            readable_macs(cost.macs),
            readable_bytes(_bytes(method, tasks, config.evaluation.static_from == 0)),
            readable_bytes(memory),
        )
    return table


def _bytes(method: Method, tasks: list[Task], static: bool) -> int | None:
    """None where scores travel in place of networks: as many as there are public samples."""
    if any(task.kind != "train" for task in tasks):
        return None
    total = 0
    for task in tasks:
        # under static batch normalisation, running averages never travel
        left_out = running_names(method.network(task.network)) if static else set()
        total += size_in_bytes({name: tensor for name, tensor in task.tensors.items() if name not in left_out})
    return total
