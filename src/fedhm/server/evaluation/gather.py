"""BatchNorm statistics of every tier's network, gathered at the clients for an evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from fedhm.errors import FedhmError
from fedhm.networks.exchange import Tensors
from fedhm.server.defence.outliers import brought_in
from fedhm.server.intake import Intake, Run, last_reason
from fedhm.server.record import Record
from fedhm.work.messages import Participant, Task, Update
from fedhm.work.statistics import KIND, pool


def gather_statistics(
    intake: Intake,
    run: Run,
    weights: Mapping[str, Tensors],
    attempts: Iterator[Sequence[Participant]],
    record: Record,
    robust: bool = True,
    least: int = 1,
    how: Callable[[str], Mapping[str, float]] = lambda _: {},
) -> Iterator[tuple[str, Tensors]]:
    """Yield each tier that has statistics, and what they are. What too few answered for is asked of other clients.

    weights   by tier
    attempts  whom to ask first, and whom if some tier is still missing then
    robust    bring what lies far from most clients' statistics to where these are
    how       clients of a tier save memory
    least     clients that have to answer for a tier, or all that were asked where these are fewer
    """
    missing = [tier for tier in weights if intake.facts(tier).running]
    for chosen in attempts:
        asked = [(tier, p) for tier in missing for p in chosen]
        tasks = [
            Task(KIND, record.round, p.client, p.tier, tier, weights[tier], options=how(p.tier)) for tier, p in asked
        ]
        updates = intake.updates(run, tasks, record)
        for tier, of_tier in groupby(updates, key=lambda update: update.network):
            answered = list(of_tier)  # a few numbers for each channel: small beside a model
            if len(answered) < min(least, len(chosen)):
                continue
            yield tier, pool(_bounded(answered, record) if robust else [update.tensors for update in answered])
            missing.remove(tier)
        if not missing:
            return
    reason = last_reason([entry for entry in record.dropped if entry["kind"] == KIND])
    whose = "too few clients'" if least > 1 else "no client's"
    raise FedhmError(
        f"{whose} BatchNorm statistics of tier {missing[0]} could be used in round {record.round}: {reason}"
    )


def _bounded(answered: Sequence[Update], record: Record) -> list[Tensors]:
    """Return the statistics of one tier, none far from those of most clients, and note whose were."""
    bounded, counts = brought_in([update.tensors for update in answered])
    for update, values in zip(answered, counts, strict=True):
        if values:
            entry = {"client": update.client, "tier": update.tier, "part": KIND, "network": update.network}
            record.clipped.append(entry | {"values": values})
    return bounded
