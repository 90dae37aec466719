"""The tables of runs: tiers, clients, devices, and the costs of each tier without training.

They are printed in a terminal, written into `report.md` and shown on the page. `report.csv` has the plain numbers.
"""

import statistics
from collections.abc import Sequence
from functools import cache
from itertools import groupby

from rich.table import Table
from torch import nn

from fedhm.adapters.adapted import describe_adapter
from fedhm.config.schema import NO_TIER, Config
from fedhm.measure.cost import measure, sample_spec
from fedhm.methods.method import AnyMethod
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.exchange import Tensors, shared_parameters, size_in_bytes
from fedhm.networks.inputs import Inputs, sample_shape
from fedhm.report.comparable import find_difference
from fedhm.report.format import MISSING, format_bytes, format_macs, format_memory
from fedhm.report.sheets import Sheet, csv_text, markdown_table, markdown_text, rich_table
from fedhm.runs.history import Run
from fedhm.server.filters.fleet import LATE, ClientPlan, TierWork
from fedhm.server.record import GroupMetrics, Record
from fedhm.work.messages import Task
from fedhm.work.work import work_of

ALL_CLIENTS = "all"


# The models of the tiers at the clients, on the clients' own test samples.


def client_sheet(run: Run) -> Sheet | None:
    """Return the headline metric of each model, over all clients and by their tier or device.

    It is that of the last evaluated round. None if no client evaluated.
    """
    last = next((record for record in reversed(run.evaluated) if record.clients), None)
    if last is None:
        return None
    metric = run.config.objective.headline

    def row(tier: str, whose: str, group: GroupMetrics) -> list[str]:
        values = (group.pooled, group.mean, group.median, group.worst_tenth)
        shown = (metric.shown(each[metric.name]) for each in values)
        return [tier, whose, f"{group.clients:,}", f"{group.samples:,}", *shown]

    groups = []
    for tier, found in last.clients.items():
        # if all clients have one tier, its row would repeat that of all clients
        by_tier = found.by_tier if len(found.by_tier) > 1 else {}
        apart = {**by_tier, **{f"device {name}": group for name, group in found.by_device.items()}}
        groups.append(
            [row(tier, ALL_CLIENTS, found.overall), *(row(tier, whose, group) for whose, group in apart.items())]
        )
    columns = ["tier", "at", "clients", "samples", metric.name, "mean", "median", "worst tenth"]
    return Sheet(
        columns,
        groups,
        left=2,
        title=f"{run.name}: {metric.name} at the clients, round {last.round}",
        note=f"at: all clients, or those of one tier{' or device' * bool(run.config.federation.devices)}. "
        f"{metric.name}: every sample counts alike. Mean, median and worst tenth: every client counts alike. "
        "Worst tenth: the mean over the tenth of the clients at which the model does worst. "
        f"{_evaluation_cost(run)}",
    )


def _evaluation_cost(run: Run) -> str:
    records = [record for record in run.evaluated if record.clients]
    spent = sum(record.evaluation.down + record.evaluation.up for record in records)
    clients = sum(record.evaluation.clients for record in records) / len(run.tiers)  # each client evaluates all tiers
    return f"An evaluation costs a client {format_bytes(spent / clients)}."


# A fleet of devices: the tier and the time of each device, as planned and as it went.


def plan_sheet(name: str, config: Config, planned: Sequence[ClientPlan]) -> Sheet:
    """Return a row for each device and tier. Its time is that of the client with the most samples, the slowest."""
    groups = [
        list(group) for _, group in groupby(planned, key=lambda each: (each.device.name, each.tier, each.checkpointing))
    ]
    able = [each for each in planned if each.tier != NO_TIER]
    slowest = max(able, key=lambda each: each.seconds.total).client if able else None
    rows: list[list[str]] = []
    for group in groups:
        last = max(group, key=lambda each: each.seconds.total)
        spare = last.device.spare_memory
        memory = f"{format_memory(last.memory)} / {'any' if spare is None else format_memory(spare)}"
        tier = last.tier + (" *" if last.checkpointing and not config.train.checkpointing else "")
        costs = [format_macs(last.macs), format_bytes(last.down), format_bytes(last.up)]
        seconds = [last.seconds.computation, last.seconds.down, last.seconds.up, last.seconds.total]
        numbers = [MISSING] * 7 if last.tier == NO_TIER else [*costs, *(f"{each:.3g}" for each in seconds)]
        mark = " ←" if slowest in [each.client for each in group] else ""
        rows.append([last.device.name, _client_numbers(group), tier, memory, *numbers[:-1], numbers[-1] + mark])
    columns = ["device", "clients", "tier", "memory", "MACs", "down", "up", "compute s", "down s", "up s", "total s"]
    return Sheet(
        columns, [rows], left=3, title=f"{name}: a round of {config.method.name}", note=_plan_note(config, planned)
    )


def _plan_note(config: Config, planned: Sequence[ClientPlan]) -> str:
    federation = config.federation
    text = "memory: needed / to spare. Seconds are simulated, of one client in one round; ←: the slowest."
    if any(each.checkpointing for each in planned) and not config.train.checkpointing:
        text += " *: trains with checkpointing, for the same weights."
    if federation.deadline:
        kept = "later clients are dropped" if federation.late == "drop" else "later clients are waited for"
        text += f" federation.deadline is {federation.deadline:g} s, {kept}."
    for problem in dict.fromkeys(each.problem for each in planned if each.problem):
        text += f" Nothing fits: {problem}."
    return text


def _client_numbers(group: Sequence[ClientPlan]) -> str:
    numbers = [each.client for each in group]
    together = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"{numbers[0]}–{numbers[-1]}" if together else ", ".join(map(str, numbers))


def time_sheet(run: Run) -> Sheet | None:
    """Return the simulated seconds of the clients of each device; None for a run without devices."""
    timed = [record for record in run.records if record.simulated]
    if not timed:
        return None
    rows: list[list[str]] = []
    for device in run.config.federation.devices:
        clients = [n for n, each in enumerate(run.config.federation.device_of) if each.name == device.name]
        tiers = ", ".join(dict.fromkeys(run.config.federation.plan[client] for client in clients))
        found = [own for r in timed if r.simulated for n, own in r.simulated.clients.items() if n in clients]
        dropped = [entry for record in timed for entry in record.dropped if entry["client"] in clients]
        late = sum(entry["reason"].startswith(LATE) for entry in dropped)
        parts = [[own.computation for own in found], [own.down for own in found], [own.up for own in found]]
        seconds = [f"{statistics.fmean(each):.3g}" if each else MISSING for each in parts]
        slowest = sum(_slowest_client(record) in clients for record in timed)
        rows.append([device.name, str(len(clients)), tiers, *seconds, str(slowest), str(late)])
    whole = sum(record.simulated.seconds for record in timed if record.simulated)
    return Sheet(
        ["device", "clients", "tier", "compute s", "down s", "up s", "slowest", "late"],
        [rows],
        left=1,
        title=f"{run.name}: simulated time by device",
        note=f"Mean seconds of a client in a round. Slowest: rounds, of {len(timed)}, in which one of these "
        f"clients was the slowest. Late: updates that missed the deadline. All rounds together take {whole:,.4g} s.",
    )


def _slowest_client(record: Record) -> int | None:
    clients = record.simulated.clients if record.simulated else {}
    return max(clients, key=lambda client: clients[client].total, default=None)


# The costs of each tier, without training: measured on the tasks that a client of the tier would get.

TIER, RANK, PARAMETERS, MACS, TRAINING = "tier", "rank", "parameters", "MACs/sample", "in training"
BOTH, DOWN, UP, MEMORY = "bytes each way", "bytes down", "up", "training memory"


def size_table(name: str, config: Config, model: nn.Module, method: AnyMethod, sample: Inputs) -> Table:
    """Return the costs of each tier. A client that trains several networks holds one at a time and exchanges all."""
    shape = sample_spec(sample)[0]
    work = TierWork(method, model, config, shape)
    macs = cache(lambda network: measure(method.network(network), shape).macs)
    rows: list[dict[str, str]] = []
    for tier in method.tiers:
        network = method.network(method.spec(tier))
        cost, adapter = measure(network, shape), describe_adapter(network)
        tasks = work.tasks(tier)
        down, up = _bytes_down_and_up(
            method, tasks, config.evaluation.gathers_after == 0 and not config.train.frozen_statistics
        )
        rows.append(
            {
                TIER: tier,
                **({RANK: str(adapter["rank"])} if adapter else {}),
                PARAMETERS: f"{cost.parameters:,}",
                MACS: format_macs(cost.macs),
                TRAINING: format_macs(sum(macs(task.network) for task in tasks)),
                DOWN: format_bytes(down),
                UP: format_bytes(up),
                MEMORY: format_bytes(work.memory(tier)),
            }
        )
    title = f"{name}: one sample {'×'.join(map(str, sample_shape(sample)))}, batch {config.train.batch}"
    table = rich_table(_size_sheet(rows, title), spacious=True)
    table.title_justify = "center"
    if base := shared_parameters(method.network(method.spec(method.tiers[0]))):
        numbers = sum(tensor.numel() for tensor in base.values())
        table.caption = f"and a frozen base of {numbers:,} parameters, {format_bytes(size_in_bytes(base))}, not sent"
    return table


def _size_sheet(rows: Sequence[dict[str, str]], title: str) -> Sheet:
    """Leave out columns that repeat another: MACs in training, and bytes up if they equal the bytes down."""
    headings = {column: column for column in rows[0]}
    if all(row[TRAINING] == row[MACS] for row in rows):
        del headings[TRAINING]
    if all(row[UP] == row[DOWN] for row in rows):
        del headings[UP]
        headings[DOWN] = BOTH
    if len(headings) == len(rows[0]):
        headings[MACS], headings[DOWN], headings[MEMORY] = (
            "MACs",
            "down",
            "memory",
        )  # all of them have to fit 80 columns
    return Sheet(list(headings.values()), [[[row[column] for column in headings] for row in rows]], left=1, title=title)


def _bytes_down_and_up(method: AnyMethod, tasks: Sequence[Task], static: bool) -> tuple[int | None, int | None]:
    """Return the bytes down and up; None if logits travel, whose number depends on the public samples."""
    if not all(work_of(task.kind).returns_network for task in tasks):
        return None, None
    down = up = 0
    for task in tasks:
        # under static batch normalisation, running averages never travel
        left_out = running_statistic_names(method.network(task.network)) if static else set()
        down += _size_without(task.tensors, left_out)
        up += _size_without(work_of(task.kind).loaded(task), left_out)
    return down, up


def _size_without(tensors: Tensors, left_out: set[str]) -> int:
    return size_in_bytes({name: tensor for name, tensor in tensors.items() if name not in left_out})


# Runs: the costs and metrics of each tier.

WHICH = ("run", "method", "round", "tier")
COSTS = ("parameters", "MACs/sample", "bytes/round")
BEST = "best"
WIDE = 110  # characters that a table of several runs takes


def run_sheet(runs: Sequence[Run]) -> Sheet:
    """Return a row for each run and tier. A single run is named in the title instead.

    Bytes per round are of one client of the tier, down and up. Metrics are those of the last evaluated round, and
    `best` is the headline metric of the best one.
    """
    metrics = metric_names(runs)
    place = _best_column(runs, metrics)
    groups = [_tier_rows(run, metrics, place) for run in runs]
    columns = [*WHICH, *COSTS, *metrics[:place], BEST, *metrics[place:]]
    whole = Sheet(columns, groups, left=len(WHICH), note=run_caption(runs), numbers=("round",))
    if len(runs) > 1:
        return whole
    name, method, last = groups[0][0][:3]
    only_tiers = [[row[3:] for row in groups[0]]]
    return Sheet(whole.columns[3:], only_tiers, left=1, title=f"{name}: {method}, round {last}", note=whole.note)


def metric_names(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of all runs, each once. Runs may have different objectives."""
    return list(dict.fromkeys(metric.name for run in runs for metric in run.config.objective.reported))


def _best_column(runs: Sequence[Run], metrics: Sequence[str]) -> int:
    """Return the place of `best` among the metrics: after the headline, or last if runs have several headlines."""
    return 1 if len({run.config.objective.headline.name for run in runs}) == 1 else len(metrics)


def _tier_rows(run: Run, metrics: Sequence[str], place: int) -> list[list[str]]:
    last = run.evaluated[-1]
    which = (run.name, run.config.method.name, f"{last.round}/{run.config.train.rounds}")
    rows: list[list[str]] = []
    for tier in run.tiers:
        cost = run.costs[tier]
        costs = (f"{cost.parameters:,}", format_macs(cost.macs), format_bytes(run.bytes_per_client(tier)))
        of_tier = last.metrics[tier]
        shown = {m.name: m.shown(of_tier[m.name]) for m in run.config.objective.reported if m.name in of_tier}
        headline = run.config.objective.headline
        best = headline.best(record.metrics[tier][headline.name] for record in run.evaluated)
        values = [shown.get(name, "") for name in metrics]
        rows.append([*which, tier, *costs, *values[:place], headline.shown(best), *values[place:]])
    return rows


def run_caption(runs: Sequence[Run]) -> str:
    """Return a note with what the columns leave out."""
    text = (
        "bytes/round: one client's training, down and up. best: the run's first metric in each tier's best round, "
        "which was chosen by that metric and is optimistic."
    )
    for run in runs:
        whose = f" of {run.name}" if len(runs) > 1 else ""
        if run.evaluated_at_clients:
            names = " and ".join(metric.name for metric in run.config.objective.reported)
            text += f" {names}{whose}: on the clients' own test samples, all together."
        text += _privacy_sentence(run) + _ending(run)
        if gathering := run.statistics_bytes():
            what = "gradients and BatchNorm statistics" if run.gathers_gradients else "BatchNorm statistics"
            when = "in a round, in the mean" if run.gathers_gradients else "when evaluated"
            text += f" Gathering {what}{whose} adds {format_bytes(gathering)} a client {when}."
    return text


def _privacy_sentence(run: Run) -> str:
    """Return the guarantee of a private run, which docs/privacy.md explains; nothing for other runs."""
    privacy, epsilon = run.config.privacy, run.records[-1].epsilon
    if not privacy.active:
        return ""
    if epsilon is None:
        return f" {run.name}: changes are bounded by {privacy.clip:g}, without noise, so nothing is promised."
    return (
        f" {run.name}: every client has ε = {epsilon:.3g} at δ = {privacy.delta:g} of differential privacy, by noise "
        f"{privacy.noise:g} × {privacy.clip:g} at the {privacy.where}."
    )


def _ending(run: Run) -> str:
    """Return why a run stopped early, and where the models of its best round are."""
    last = run.records[-1]
    stopped = f" {run.name} stopped after round {last.round}: {last.stopped}." if last.stopped else ""
    best = f" The best round of {run.name} was {run.best}: models/best-round-{run.best}." if run.best else ""
    return stopped + best


def rich_tables(runs: Sequence[Run], width: int) -> list[Table]:
    """Return one table for all runs if the terminal has room, otherwise one for each."""
    together = [runs] if width >= WIDE else [[run] for run in runs]
    sheets = [*(run_sheet(group) for group in together), *_client_sheets(runs)]
    return [rich_table(each, spacious=True) for each in sheets]


def _client_sheets(runs: Sequence[Run]) -> list[Sheet]:
    """Return the tables of clients and devices, for the runs that have them."""
    return [found for run in runs for make in (client_sheet, time_sheet) if (found := make(run))]


def report_markdown(runs: Sequence[Run]) -> str:
    found = find_difference(runs)
    tables = [markdown_table(each) for each in (run_sheet(runs), *_client_sheets(runs))]
    return "\n".join(tables) + (f"\nNot comparable: {markdown_text(found)}.\n" if found else "")


def report_csv(runs: Sequence[Run]) -> str:
    """Return plain numbers: a line for each run, evaluated round and tier."""
    metrics = metric_names(runs)
    private = any(record.epsilon is not None for run in runs for record in run.records)
    timed = any(run.seconds_so_far() for run in runs)
    more = [*(["epsilon"] if private else []), *(["simulated_seconds_so_far"] if timed else [])]
    rows: list[list[object]] = [[*WHICH, "parameters", "macs", "client_bytes_so_far", *metrics, *more]]
    for run in runs:
        seconds = run.seconds_so_far()
        for record in run.evaluated:
            for tier, of_tier in record.metrics.items():
                cost = run.costs[tier]
                which = [run.name, run.config.method.name, record.round, tier]
                sent = run.bytes_per_client(tier)
                so_far = "" if sent is None else record.round * sent
                values = (of_tier.get(name, "") for name in metrics)
                stated: list[float | str] = ["" if record.epsilon is None else record.epsilon] if private else []
                stated += [seconds[record.round - 1] if seconds else ""] if timed else []
                rows.append([*which, cost.parameters, cost.macs, so_far, *values, *stated])
    return csv_text(rows)
