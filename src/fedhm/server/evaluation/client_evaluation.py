"""Every tier's model on the test samples of the clients, which the server never sees."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from fedhm.config.settings import Config
from fedhm.errors import FedhmError
from fedhm.networks.exchange import Tensors
from fedhm.server.evaluation.client_metrics import ClientMetrics, Tally
from fedhm.server.intake import Intake, Run, last_reason
from fedhm.server.record import Record
from fedhm.work.evaluate import BATCH, KIND, no_numbers, warn_of
from fedhm.work.messages import Participant, Task


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
        Task(KIND, record.round, p.client, p.tier, *weights[tier], options={**how(p.tier), **most}) for tier, p in asked
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
        reason = last_reason([entry for entry in record.dropped if entry["kind"] == KIND])
        raise FedhmError(f"no client could evaluate tier {missing[0]} in round {record.round}: {reason}")
    if lost := [tier for tier in weights if any(no_numbers(one.metrics) for one in found[tier].each)]:
        warn_of(record.round, lost[0], "test samples of clients")
    return found
