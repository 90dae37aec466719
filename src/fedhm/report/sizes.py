"""What a client of each tier pays, told without training: from the very tasks that it would get."""

from collections.abc import Sequence
from functools import cache

from rich.table import Table
from torch import nn

from fedhm.adapters.adapted import described
from fedhm.config.settings import Config
from fedhm.measure.cost import form_of, measure
from fedhm.methods.method import AnyMethod
from fedhm.methods.tier_work import TierWork
from fedhm.networks.batchnorm import running_names
from fedhm.networks.exchange import Tensors, base_of, size_in_bytes
from fedhm.networks.inputs import Inputs, shape_of
from fedhm.report.sheets import Sheet, readable_bytes, readable_macs, rich_table
from fedhm.work.messages import Task
from fedhm.work.work import work_of

TIER, RANK, PARAMETERS, MACS, TRAINING = "tier", "rank", "parameters", "MACs/sample", "in training"
BOTH, DOWN, UP, MEMORY = "bytes each way", "bytes down", "up", "training memory"


def size_table(name: str, config: Config, model: nn.Module, method: AnyMethod, sample: Inputs) -> Table:
    """Return what each tier costs: a client that trains several networks holds one at a time, and exchanges all."""
    shape = form_of(sample)[0]
    work = TierWork(method, model, config, shape)
    macs = cache(lambda network: measure(method.network(network), shape).macs)
    rows: list[dict[str, str]] = []
    for tier in method.tiers:
        network = method.network(tier)
        cost, adapter = measure(network, shape), described(network)
        tasks = work.tasks(tier)
        down, up = _bytes(method, tasks, config.evaluation.static_from == 0 and not config.train.frozen_statistics)
        rows.append(
            {
                TIER: tier,
                **({RANK: str(adapter["rank"])} if adapter else {}),
                PARAMETERS: f"{cost.parameters:,}",
                MACS: readable_macs(cost.macs),
                TRAINING: readable_macs(sum(macs(task.network) for task in tasks)),
                DOWN: readable_bytes(down),
                UP: readable_bytes(up),
                MEMORY: readable_bytes(work.memory(tier)),
            }
        )
    title = f"{name}: one sample {'×'.join(map(str, shape_of(sample)))}, batch {config.train.batch}"
    table = rich_table(_without_twins(rows, title), spacious=True)
    table.title_justify = "center"
    if base := base_of(method.network(method.tiers[0])):
        numbers = sum(tensor.numel() for tensor in base.values())
        table.caption = f"and a frozen base of {numbers:,} parameters, {readable_bytes(size_in_bytes(base))}, not sent"
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
