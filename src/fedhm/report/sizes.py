"""What a client of each tier pays, told without training: from the very tasks that it would get."""

from collections.abc import Sequence
from functools import cache

from rich.table import Table
from torch import nn

from fedhm.config.settings import Config
from fedhm.measure.cost import measure
from fedhm.measure.training import memory_of_training
from fedhm.methods.method import AnyMethod
from fedhm.networks.batchnorm import running_names
from fedhm.networks.exchange import Tensors, exchanged, size_in_bytes
from fedhm.report.sheets import Sheet, readable_bytes, readable_macs, rich_table
from fedhm.work.messages import Participant, Task
from fedhm.work.work import work_of

TIER, PARAMETERS, MACS, TRAINING = "tier", "parameters", "MACs/sample", "in training"
BOTH, DOWN, UP, MEMORY = "bytes each way", "bytes down", "up", "training memory"


def size_table(name: str, config: Config, model: nn.Module, method: AnyMethod, shape: tuple[int, ...]) -> Table:
    """Return what each tier costs: a client that trains several networks holds one at a time, and exchanges all."""
    state = method.start(exchanged(model))
    macs = cache(lambda network: measure(method.network(network), shape).macs)
    rows: list[dict[str, str]] = []
    for tier in method.tiers:
        cost = measure(method.network(tier), shape)
        tasks = list(method.tasks(state, [Participant(0, tier)], config.train.rounds))  # after a warm-up
        down, up = _bytes(method, tasks, config.evaluation.static_from == 0 and not config.train.frozen_statistics)
        rows.append(
            {
                TIER: tier,
                PARAMETERS: f"{cost.parameters:,}",
                MACS: readable_macs(cost.macs),
                TRAINING: readable_macs(sum(macs(task.network) for task in tasks)),
                DOWN: readable_bytes(down),
                UP: readable_bytes(up),
                MEMORY: readable_bytes(_memory(method, tasks, config, shape)),
            }
        )
    title = f"{name}: one sample {'×'.join(map(str, shape))}, batch {config.train.batch}"
    table = rich_table(_without_twins(rows, title), spacious=True)
    table.title_justify = "center"
    return table


def _without_twins(rows: Sequence[dict[str, str]], title: str) -> Sheet:
    """Leave out what training computes, and what goes up, where that is what the network computes, and what came."""
    shown = {column: column for column in rows[0]}
    if all(row[TRAINING] == row[MACS] for row in rows):
        del shown[TRAINING]
    if all(row[UP] == row[DOWN] for row in rows):
        del shown[UP]
        shown[DOWN] = BOTH
    if len(shown) == len(rows[0]):
        shown[MACS], shown[DOWN], shown[MEMORY] = "MACs", "down", "memory"  # all of them have to fit 80 columns
    return Sheet(list(shown.values()), [[[row[column] for column in shown] for row in rows]], left=1, title=title)


def _memory(method: AnyMethod, tasks: Sequence[Task], config: Config, shape: tuple[int, ...]) -> int:
    """Return the most memory that any of a client's networks takes in training."""
    networks = {task.network for task in tasks}
    return max(memory_of_training(method.network(each), shape, config.train) for each in networks)


def _bytes(method: AnyMethod, tasks: Sequence[Task], static: bool) -> tuple[int | None, int | None]:
    """Return the bytes down and up; None where logits travel instead, as many as there are public samples."""
    if not all(work_of(task.kind).returns_network for task in tasks):
        return None, None
    down = up = 0
    for task in tasks:
        # under static batch normalisation, running averages never travel
        left_out = running_names(method.network(task.network)) if static else set()
        down += _size(task.tensors, left_out)
        up += _size(work_of(task.kind).loaded(task), left_out)
    return down, up


def _size(tensors: Tensors, left_out: set[str]) -> int:
    return size_in_bytes({name: tensor for name, tensor in tensors.items() if name not in left_out})
