"""Runs with records written by hand, for tests of what is computed from them."""

from typing import Any

from conftest import small_config
from fedhm.measure.cost import Cost
from fedhm.runs.fingerprint import DataFacts
from fedhm.runs.history import Run
from fedhm.server.record import Record, Traffic
from fedhm.work.evaluate import Score
from fedhm.work.messages import Participant

FACTS = DataFacts(classes=4, input_shape=(1, 6, 6), clients=8, samples=160, digest="abc")


def made_run(
    name: str,
    sizes: dict[str, int],
    accuracies: list[dict[str, float]],
    method: dict[str, Any] | None = None,
    seed: int = 0,
    facts: DataFacts | None = FACTS,
    **sections: dict[str, Any],
) -> Run:
    """One participant for each tier; a round costs it 10 bytes down, 10 up and 100 MACs for each parameter."""
    train = {"rounds": len(accuracies), **sections.pop("train", {})}
    config = small_config(method=method or {"name": "fedhm"}, train=train, **sections)
    records = [
        Record(
            number,
            [Participant(client, tier) for client, tier in enumerate(sizes)],
            scores={tier: Score(value, 1 - value) for tier, value in scores.items()},
            traffic={t: Traffic(1, 1, down=10 * size, up=10 * size, macs=100 * size) for t, size in sizes.items()},
        )
        for number, scores in enumerate(accuracies, start=1)
    ]
    costs = {tier: Cost(size, macs=7 * size, bytes=4 * size) for tier, size in sizes.items()}
    return Run(name, config.model_copy(update={"seed": seed}), records, costs, facts)
