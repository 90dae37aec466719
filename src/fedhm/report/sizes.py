"""What a client of each tier pays, told without training: from the very tasks that it would get."""

from collections.abc import Sequence

from rich.table import Table
from torch import nn

from fedhm.config.settings import Config
from fedhm.measure.cost import measure, training_memory
from fedhm.methods.method import AnyMethod
from fedhm.networks.batchnorm import running_names
from fedhm.networks.exchange import exchanged, size_in_bytes
from fedhm.report.sheets import Sheet, readable_bytes, readable_macs, rich_table
from fedhm.work.messages import Participant, Task
from fedhm.work.work import work_of

COLUMNS = ("tier", "parameters", "MACs/sample", "bytes each way", "training memory")


def size_table(name: str, config: Config, model: nn.Module, method: AnyMethod, shape: tuple[int, ...]) -> Table:
    """Return what each tier costs: a client that trains several networks holds one at a time, and exchanges all."""
    state = method.start(exchanged(model))
    rows: list[list[str]] = []
    for tier in method.tiers:
        cost = measure(method.network(tier), shape)
        tasks = list(method.tasks(state, [Participant(0, tier)], config.train.rounds))  # after a warm-up
        sent = readable_bytes(_bytes(method, tasks, config.evaluation.static_from == 0))
        memory = readable_bytes(_memory(method, tasks, config, shape))
        rows.append([tier, f"{cost.parameters:,}", readable_macs(cost.macs), sent, memory])
    title = f"{name}: one sample {'×'.join(map(str, shape))}, batch {config.train.batch}"
    table = rich_table(Sheet(COLUMNS, [rows], left=1, title=title), spacious=True)
    table.title_justify = "center"
    return table


def _memory(method: AnyMethod, tasks: Sequence[Task], config: Config, shape: tuple[int, ...]) -> int:
    """Return the most memory that any of a client's networks takes in training."""
    networks = {task.network for task in tasks}
    batch, optimizer = config.train.batch, config.train.optimizer
    return max(training_memory(method.network(each), shape, batch, optimizer=optimizer) for each in networks)


def _bytes(method: AnyMethod, tasks: Sequence[Task], static: bool) -> int | None:
    """Return the bytes sent each way; None where logits travel instead, as many as there are public samples."""
    if not all(work_of(task.kind).returns_network for task in tasks):
        return None
    total = 0
    for task in tasks:
        # under static batch normalisation, running averages never travel
        left_out = running_names(method.network(task.network)) if static else set()
        total += size_in_bytes({name: tensor for name, tensor in task.tensors.items() if name not in left_out})
    return total
