"""BatchNorm statistics of every tier's network, gathered at the clients for an evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.networks.exchange import Tensors
from fedhm.server.collect import Intake, Run, last_reason
from fedhm.server.filters.clip import brought_in
from fedhm.server.record import ClientMetrics, Record, Tally
from fedhm.work.evaluate import BATCH, EVALUATE, no_numbers, warn_of
from fedhm.work.messages import Participant, Task, Update
from fedhm.work.statistics import STATISTICS, pool


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
            Task(STATISTICS, record.round, p.client, p.tier, tier, weights[tier], options=how(p.tier))
            for tier, p in asked
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
    reason = last_reason([entry for entry in record.dropped if entry["kind"] == STATISTICS])
    whose = "too few clients'" if least > 1 else "no client's"
    raise FedhmError(
        f"{whose} BatchNorm statistics of tier {missing[0]} could be used in round {record.round}: {reason}"
    )


def _bounded(answered: Sequence[Update], record: Record) -> list[Tensors]:
    """Return the statistics of one tier, none far from those of most clients, and note whose were."""
    bounded, counts = brought_in([update.tensors for update in answered])
    for update, values in zip(answered, counts, strict=True):
        if values:
            entry = {"client": update.client, "tier": update.tier, "part": STATISTICS, "network": update.network}
            record.clipped.append(entry | {"values": values})
    return bounded


# Every tier's model on the test samples of the clients, which the server never sees.


def evaluate_at_clients(
    intake: Intake,
    run: Run,
    weights: Mapping[str, tuple[str, Tensors]],
    chosen: Sequence[Participant],
    record: Record,
    config: Config,
    how: Callable[[str], Mapping[str, float]] = lambda _: {},
) -> dict[str, ClientMetrics]:
    """Return by tier how its model does at the chosen clients; all tiers are one exchange.

    weights  by tier, the name of its network and its weights, with the BatchNorm statistics to evaluate it with
    how      clients of a tier save memory
    """
    most = {BATCH: float(config.evaluation.batch)}
    asked = [(tier, p) for tier in weights for p in chosen]
    tasks = [
        Task(EVALUATE, record.round, p.client, p.tier, *weights[tier], options={**how(p.tier), **most})
        for tier, p in asked
    ]
    tier_of = {name: tier for tier, (name, _) in weights.items()}
    tiers = list(dict.fromkeys([*weights, *(p.tier for p in chosen)]))
    devices = [device.name for device in config.federation.device_of]
    found: dict[str, ClientMetrics] = {}
    for name, updates in groupby(intake.updates(run, tasks, record), key=lambda update: update.network):
        tally = Tally(config.objective, devices)
        for update in updates:
            tally.add(update.client, update.tier, update.samples, update.tensors)
        found[tier_of[name]] = tally.result(tiers)
    if missing := [tier for tier in weights if tier not in found]:
        reason = last_reason([entry for entry in record.dropped if entry["kind"] == EVALUATE])
        raise FedhmError(f"no client could evaluate tier {missing[0]} in round {record.round}: {reason}")
    if lost := [tier for tier in weights if any(no_numbers(one.metrics) for one in found[tier].each)]:
        warn_of(record.round, lost[0], "test samples of clients")
    return found
