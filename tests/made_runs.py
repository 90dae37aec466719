"""Runs with records written by hand, for tests of what is computed from them."""

from typing import Any

from conftest import small_config
from fedhm.config.objective import Metrics
from fedhm.measure.cost import Cost
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.history import Run
from fedhm.server.record import Record, Traffic
from fedhm.work.messages import Participant

FACTS = DataFacts(classes=4, input_shape=(1, 6, 6), clients=8, samples=160, digest="abc")


def made_run(
    name: str,
    sizes: dict[str, int],
    headlines: list[dict[str, float]],
    method: dict[str, Any] | None = None,
    seed: int = 0,
    facts: DataFacts | None = FACTS,
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
