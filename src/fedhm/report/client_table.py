"""How every tier's model does at the clients, on test samples of their own."""

from fedhm.report.sheets import Sheet, readable_bytes
from fedhm.runs.history import Run
from fedhm.server.evaluation.client_metrics import Group

EVERYBODY = "all"


def client_sheet(run: Run) -> Sheet | None:
    """Return a row for each tier's model and for the clients of each tier; None if no client evaluated.

    It has the headline metric, after the last evaluated round.
    """
    last = next((record for record in reversed(run.evaluated) if record.clients), None)
    if last is None:
        return None
    metric = run.config.objective.headline

    def row(tier: str, whose: str, group: Group) -> list[str]:
        values = (group.pooled, group.mean, group.median, group.worst_tenth)
        shown = (metric.shown(each[metric.name]) for each in values)
        return [tier, whose, f"{group.clients:,}", f"{group.samples:,}", *shown]

    groups = []
    for tier, found in last.clients.items():
        # where all clients have one tier, there is nothing to tell apart
        by_tier = found.by_tier if len(found.by_tier) > 1 else {}
        apart = {**by_tier, **{f"device {name}": group for name, group in found.by_device.items()}}
        groups.append(
            [row(tier, EVERYBODY, found.overall), *(row(tier, whose, group) for whose, group in apart.items())]
        )
    columns = ["tier", "at", "clients", "samples", metric.name, "mean", "median", "worst tenth"]
    return Sheet(
        columns,
        groups,
        left=2,
        title=f"{run.name}: {metric.name} at the clients, round {last.round}",
        note=f"at: all clients, or those of one tier{' or device' * bool(run.config.federation.devices)}. "
        f"{metric.name}: every sample counts alike; mean, median and worst "
        "tenth, which is the mean over the tenth of the clients at which the model does worst: every client does. "
        f"{_cost(run)}",
    )


def _cost(run: Run) -> str:
    records = [record for record in run.evaluated if record.clients]
    spent = sum(record.evaluation.down + record.evaluation.up for record in records)
    clients = sum(record.evaluation.clients for record in records) / len(run.tiers)  # each evaluates all tiers
    return f"An evaluation costs a client {readable_bytes(spent / clients)}."
