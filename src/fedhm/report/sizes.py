"""What a client of each tier pays, told without training: from the very tasks that it would get."""

from collections.abc import Sequence
from functools import cache

from rich.table import Table
from torch import nn

from fedhm.config.settings import Config
from fedhm.measure.cost import measure, training_memory
from fedhm.methods.method import AnyMethod
from fedhm.networks.batchnorm import running_names
from fedhm.networks.exchange import Tensors, exchanged, size_in_bytes
from fedhm.report.sheets import Sheet, readable_bytes, readable_macs, rich_table
from fedhm.work.messages import Participant, Task
from fedhm.work.work import work_of

COLUMNS = ("tier", "parameters", "MACs/sample", "in training", "bytes each way", "training memory")


def size_table(name: str, config: Config, model: nn.Module, method: AnyMethod, shape: tuple[int, ...]) -> Table:
    """Return what each tier costs: a client that trains several networks holds one at a time, and exchanges all.

    The MACs of training are told apart where they are not those of the tier's network.
    """
    state = method.start(exchanged(model))
    macs = cache(lambda network: measure(method.network(network), shape).macs)
    rows: list[list[str]] = []
    differ = False
    for tier in method.tiers:
        cost = measure(method.network(tier), shape)
        tasks = list(method.tasks(state, [Participant(0, tier)], config.train.rounds))  # after a warm-up
        training = sum(macs(task.network) for task in tasks)
        differ |= training != cost.macs
        sent = _both_ways(_bytes(method, tasks, config.evaluation.static_from == 0))
        memory = readable_bytes(_memory(method, tasks, config, shape))
        numbers = [f"{cost.parameters:,}", readable_macs(cost.macs), readable_macs(training)]
        rows.append([tier, *numbers, sent, memory])
    shown = [column for column in range(len(COLUMNS)) if differ or COLUMNS[column] != "in training"]
    title = f"{name}: one sample {'×'.join(map(str, shape))}, batch {config.train.batch}"
    sheet = Sheet(
        [COLUMNS[column] for column in shown],
        [[[row[column] for column in shown] for row in rows]],
        left=1,
        title=title,
    )
    table = rich_table(sheet, spacious=True)
    table.title_justify = "center"
    return table


def _both_ways(sizes: tuple[int, int] | None) -> str:
    if sizes is None or sizes[0] == sizes[1]:
        return readable_bytes(sizes and sizes[0])
    return f"{readable_bytes(sizes[0])} down, {readable_bytes(sizes[1])} up"


def _memory(method: AnyMethod, tasks: Sequence[Task], config: Config, shape: tuple[int, ...]) -> int:
    """Return the most memory that any of a client's networks takes in training."""
    networks = {task.network for task in tasks}
    batch, optimizer = config.train.batch, config.train.optimizer
    return max(training_memory(method.network(each), shape, batch, optimizer=optimizer) for each in networks)


def _bytes(method: AnyMethod, tasks: Sequence[Task], static: bool) -> tuple[int, int] | None:
    """Return the bytes down and up; None where logits travel instead, as many as there are public samples."""
    if not all(work_of(task.kind).returns_network for task in tasks):
        return None
    down = up = 0
    for task in tasks:
        # under static batch normalisation, running averages never travel
        left_out = running_names(method.network(task.network)) if static else set()
        down += _size(task.tensors, left_out)
        up += _size(work_of(task.kind).loaded(task), left_out)
    return down, up


def _size(tensors: Tensors, left_out: set[str]) -> int:
    return size_in_bytes({name: tensor for name, tensor in tensors.items() if name not in left_out})
