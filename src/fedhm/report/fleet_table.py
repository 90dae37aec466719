"""A fleet of devices in tables: who gets which tier and what a round takes whom, planned and as it went."""

import statistics
from collections.abc import Sequence
from itertools import groupby

from fedhm.config.sections.federation import NO_TIER
from fedhm.config.settings import Config
from fedhm.config.units import shown
from fedhm.report.sheets import Sheet, readable_bytes, readable_macs
from fedhm.runs.history import Run
from fedhm.server.participants.fleet import LATE, Planned
from fedhm.server.record import Record

NOTHING = "–"


def plan_sheet(name: str, config: Config, planned: Sequence[Planned]) -> Sheet:
    """Return a row for each device and tier that its clients get; of clients with other samples, the slowest's time."""
    groups = [
        list(group) for _, group in groupby(planned, key=lambda each: (each.device.name, each.tier, each.checkpointing))
    ]
    able = [each for each in planned if each.tier != NO_TIER]
    slowest = max(able, key=lambda each: each.seconds.total).client if able else None
    rows: list[list[str]] = []
    for group in groups:
        last = max(group, key=lambda each: each.seconds.total)
        spare = last.device.spare_memory
        memory = f"{_short(last.memory)} / {'any' if spare is None else _short(spare)}"
        tier = last.tier + (" *" if last.checkpointing and not config.train.checkpointing else "")
        costs = [readable_macs(last.macs), readable_bytes(last.down), readable_bytes(last.up)]
        seconds = [last.seconds.computation, last.seconds.down, last.seconds.up, last.seconds.total]
        numbers = [NOTHING] * 7 if last.tier == NO_TIER else [*costs, *(f"{each:.3g}" for each in seconds)]
        mark = " ←" if slowest in [each.client for each in group] else ""
        rows.append([last.device.name, _clients(group), tier, memory, *numbers[:-1], numbers[-1] + mark])
    columns = ["device", "clients", "tier", "memory", "MACs", "down", "up", "compute s", "down s", "up s", "total s"]
    return Sheet(columns, [rows], left=3, title=f"{name}: a round of {config.method.name}", note=_note(config, planned))


def _note(config: Config, planned: Sequence[Planned]) -> str:
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


def _clients(group: Sequence[Planned]) -> str:
    numbers = [each.client for each in group]
    together = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    return f"{numbers[0]}–{numbers[-1]}" if together else ", ".join(map(str, numbers))


def _short(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else shown(size)


def time_sheet(run: Run) -> Sheet | None:
    """Return what rounds took the clients of each device; None for a run without devices."""
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
        seconds = [f"{statistics.fmean(each):.3g}" if each else NOTHING for each in parts]
        slowest = sum(_slowest(record) in clients for record in timed)
        rows.append([device.name, str(len(clients)), tiers, *seconds, str(slowest), str(late)])
    whole = sum(record.simulated.seconds for record in timed if record.simulated)
    return Sheet(
        ["device", "clients", "tier", "compute s", "down s", "up s", "slowest", "late"],
        [rows],
        left=1,
        title=f"{run.name}: simulated time by device",
        note=f"Seconds of a client in a round of training, in the mean; slowest: in how many of {len(timed)} rounds "
        f"one of them was; late: updates that a deadline kept out. All rounds together take {whole:,.4g} s.",
    )


def _slowest(record: Record) -> int | None:
    clients = record.simulated.clients if record.simulated else {}
    return max(clients, key=lambda client: clients[client].total, default=None)
