"""Adapters of a hostile client are left out as whole models of one are, and cost little."""

import pytest

from fedhm.assembly import assemble
from fedhm.config.loading import parse
from fedhm.data.federation import from_arrays
from fedhm.errors import FedhmError
from fedhm.report.result import Result
from hostile import Hostile
from tiny_transformers import sentences, tiny_bert

pytest.importorskip("peft")
pytestmark = pytest.mark.slow  # importing transformers takes seconds

CLIENTS, ROUNDS = 8, 8
HOSTILE = 0  # of the largest rank


def trained(attack: str, method: str, robust: str = "agreement") -> Result:
    own = {"name": method} | ({"rank": 2} if method == "homolora" else {"ranks": [4, 2, 1]})
    settings = {
        "data": {}, "model": {}, "method": own, "server": {"robust": robust},
        "train": {"rounds": ROUNDS, "batch": 8, "epochs": 3, "lr": 0.02, "optimizer": "adamw", "on_bad_update": "drop"},
        "federation": {"clients": CLIENTS, "participation": 1.0}, "evaluation": {"every": ROUNDS},
        "engine": {"workers": 1, "threads": 1},
    }  # fmt: skip
    config = parse(settings, "test")
    federation = from_arrays([sentences(18, seed) for seed in range(CLIENTS)], sentences(60, 99))
    experiment = assemble(tiny_bert(), federation, config)
    if attack:
        experiment.engine = Hostile(experiment.engine, [HOSTILE], attack)
    return experiment.run()


def accuracies(attack: str, method: str, robust: str = "agreement") -> list[float]:
    """Return those of the tiers; of a model that was destroyed, none is right."""
    try:
        return [metrics.accuracy for metrics in trained(attack, method, robust).metrics.values()]
    except FedhmError:
        return [0.0]


def left_out(result: Result) -> list[int]:
    return [entry["client"] for record in result.records for entry in record.dropped]


@pytest.mark.parametrize(("method", "lost"), [("lora", 0), ("hetlora", 0), ("homolora", 1)])
def test_adapters_that_go_back_are_left_out(method: str, lost: int) -> None:
    """Of 64 updates, with 18 sentences to train on, an honest one may go its own way for once."""
    honest, attacked = trained("", method), trained("flip", method)
    assert not any(record.clipped for record in honest.records)
    assert len(left_out(honest)) <= lost
    assert left_out(attacked).count(HOSTILE) == ROUNDS
    assert len(left_out(attacked)) <= ROUNDS + lost
    for tier, metrics in honest.metrics.items():
        assert attacked.metrics[tier].accuracy > metrics.accuracy - 0.1


def test_without_a_defence_one_adapter_ends_the_run() -> None:
    assert max(accuracies("flip", "lora", "none")) < 0.5
