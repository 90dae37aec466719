"""Runs with records written by hand, for tests of what is computed from them."""

from dataclasses import replace
from typing import Any

import torch

from conftest import small_config
from fedhm.config.objective import Metrics
from fedhm.measure.cost import Cost
from fedhm.measure.time import ClientSeconds
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.history import Run
from fedhm.runs.models import Layer
from fedhm.server.record import ClientMetrics, Record, Simulated, Tally, Traffic
from fedhm.work.messages import Participant

FACTS = DataFacts(classes=4, input_shape=(1, 6, 6), clients=8, samples=160, digest="abc")


def made_run(
    name: str,
    sizes: dict[str, int],
    headlines: list[dict[str, float]],
    method: dict[str, Any] | None = None,
    seed: int = 0,
    facts: DataFacts = FACTS,
    **sections: dict[str, Any],
) -> Run:
    """One participant for each tier; a round costs it 10 bytes down, 10 up and 100 MACs for each parameter.

    `headlines` are the headline metric by round and tier; the objective's other metric is 1 − that.
    """
    train = {"rounds": len(headlines), **sections.pop("train", {})}
    config = small_config(method=method or {"name": "fedhm"}, train=train, **sections)
    first, second = (metric.name for metric in config.objective.metrics)
    records = [
        Record(
            number,
            [Participant(client, tier) for client, tier in enumerate(sizes)],
            metrics={tier: Metrics({first: value, second: 1 - value}) for tier, value in values.items()},
            traffic={t: Traffic(1, 1, down=10 * size, up=10 * size, macs=100 * size) for t, size in sizes.items()},
        )
        for number, values in enumerate(headlines, start=1)
    ]
    costs = {tier: Cost(size, macs=7 * size, bytes=4 * size) for tier, size in sizes.items()}
    return Run(name, config.model_copy(update={"seed": seed}), records, costs, facts)


def eventful_run(name: str = "eventful", reason: str = "it sent NaN", tier: str = "1/4", source: str = "digits") -> Run:
    """A run of three rounds in which there is something to tell of everything that reports know."""
    sizes = {"full": 1000, tier: 300}
    run = made_run(
        name,
        sizes,
        [{"full": 0.25 * n, tier: 0.2 * n} for n in (1, 2, 3)],
        data={"source": source},
        privacy={"clip": 1.0, "noise": 0.5},
    )
    for record in run.records:
        record.diagnostics = {"energy_beyond/1/4": 0.5 / record.round, "kappa": 2.0}
        record.epsilon = 1.5 * record.round
    last = run.records[-1]
    last.dropped = [{"client": 2, "tier": tier, "kind": "train", "reason": reason}]
    last.clipped = [
        {"client": 1, "tier": tier, "part": "weights", "norm": 9.0, "bound": 3.0},
        {"client": 0, "tier": "full", "part": "statistics", "network": "full", "values": 4},
    ]
    last.clients = {model: _at_clients(run, right, list(sizes)) for model, right in (("full", 3), (tier, 1))}
    last.evaluation = Traffic(8, 8, down=12_000, up=400)
    layers = {"full": {"conv": Layer(600), "fc": Layer(400)}, tier: {"conv": Layer(100, 3), "fc": Layer(200)}}
    return replace(run, layers=layers)


def timed_run() -> Run:
    """A run of three rounds on two kinds of devices, which take 10, 20 and 30 simulated seconds."""
    devices = [{"name": "fast", "share": 0.5}, {"name": "slow", "share": 0.5}]
    federation = {"devices": devices, "plan": ["full"] * 4 + ["1/4"] * 4}
    sizes = {"full": 1000, "1/4": 300}
    run = made_run("timed", sizes, [{"full": 0.3 * n, "1/4": 0.2 * n} for n in (1, 2, 3)], federation=federation)
    for record in run.records:
        fast, slow = ClientSeconds("fast", 1, 2, 3), ClientSeconds("slow", 10 * record.round - 4, 2, 2)
        record.simulated = Simulated(slow.total, {0: fast, 7: slow})
    return run


def _at_clients(run: Run, right: int, tiers: list[str]) -> ClientMetrics:
    tally = Tally(run.config.objective)
    for client in range(4):
        found = {"correct": max(0, right - client % 2), "loss": 2.0}
        sums = {name: torch.tensor(float(value)).double() for name, value in found.items()}
        tally.add(client, tiers[client % 2], 4, sums)
    return tally.result(tiers)
