"""Runs with hostile clients: what a deployment's default leaves of attacks, and that it changes no honest run."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from conftest import small_config, small_federation, small_model
from fedhm.assembly import assemble
from fedhm.config.loading import load_config
from fedhm.data.federation import Federation
from fedhm.engines.engine import Engine
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment
from fedhm.networks.exchange import exchanged_tensors
from fedhm.report.result import Result
from fedhm.runs.folder import RunFolder
from fedhm.runs.rounds import read_records
from fedhm.work.messages import Reply, Task
from hostile import ATTACKS, Hostile, mislabelled
from interruption import Interruption

HOSTILE = (0,)


class Backwards:
    """An engine whose last task is answered first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        yield from reversed(list(self._engine.run(tasks)))

    def close(self) -> None:
        self._engine.close()


def ready(
    federation: Federation, attack: str = "", rounds: int = 3, least: int = 1, **sections: dict[str, object]
) -> Experiment:
    train = {"rounds": rounds, "on_bad_update": "drop", **sections.pop("train", {})}
    everybody = {"clients": 8, "participation": 1.0, "min_updates": least, "attempts": 1}
    engine = {"threads": 1, "server_threads": 1, "workers": 1}
    at_the_end = {"every": rounds, **sections.pop("evaluation", {})}
    own = {"federation": everybody, "evaluation": at_the_end, "engine": engine, "train": train, **sections}
    config = small_config(**own).with_defence(deployed=True)
    data = mislabelled(federation, HOSTILE) if attack == "labels" else federation
    experiment = assemble(small_model(), data, config)
    if attack:
        experiment.engine = Hostile(experiment.engine, HOSTILE, attack)
    return experiment


def weights(result: Result) -> torch.Tensor:
    found = [t.flatten() for network in result.networks.values() for t in exchanged_tensors(network).values()]
    return torch.cat(found)


def distance(one: Result, other: Result) -> float:
    return (weights(one) - weights(other)).norm().item()


@pytest.mark.parametrize("method", ["fedhm", "heterofl", "splitmix", "feddlr", "fedpara"])
def test_a_run_that_nobody_attacks_is_the_same_to_the_last_bit(federation: Federation, method: str) -> None:
    own = {"name": method, **({"tiers": [2, 1]} if method == "splitmix" else {})}
    found = [ready(federation, method=own, server={"robust": robust}).run() for robust in ("none", "agreement")]
    assert torch.equal(weights(found[0]), weights(found[1]))
    assert [record.clipped + record.dropped for record in found[1].records] == [[]] * 3
    assert all(record.norms["weights"] for record in found[1].records)
    assert not any(record.norms for record in found[0].records)


@pytest.fixture(scope="module")
def honest() -> Result:
    return ready(small_federation(), train={"clip_norm": 0.0}).run()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:after round 3 the model of tier full has a loss of")  # nothing is left of it
@pytest.mark.parametrize("attack", ["flip", "noise", "replacement", "statistics"])
def test_the_default_bounds_what_one_client_can_do(federation: Federation, honest: Result, attack: str) -> None:
    unclipped = {"clip_norm": 0.0}  # clipped gradients of honest clients would hide a part of the damage
    bounded = ready(federation, attack, train=unclipped).run()
    unbounded = ready(federation, attack, server={"robust": "none"}, train=unclipped).run()
    assert distance(bounded, honest) < distance(unbounded, honest) / 3
    assert {entry["client"] for record in bounded.records for entry in record.clipped} == set(HOSTILE)


@pytest.mark.parametrize(
    ("start", "attack", "before", "rounds"),
    [
        *(("whole", "flip", 0, 3), ("whole", "ipm", 0, 3), ("whole", "labels", 6, 9)),
        *(("auto", "flip", 0, 3), ("auto", "ipm", 1, 3), ("auto", "labels", 3, 9)),
    ],
)
def test_who_goes_against_the_others_is_not_merged(
    federation: Federation, start: str, attack: str, before: int, rounds: int
) -> None:
    """Wrong labels take some rounds to tell: an honest client with few samples may be as far off, but not always."""
    method = {"name": "fedhm", "start": start}
    records = ready(federation, attack, rounds, method=method, train={"clip_norm": 0.0}).run().records
    dropped = [[entry["client"] for entry in record.dropped] for record in records]
    assert dropped == [[]] * before + [list(HOSTILE)] * (rounds - before)
    records = records[before:]
    assert all(record.agreement[0].agreement < 0 < record.agreement[0].median for record in records)
    assert all(HOSTILE[0] not in record.norms["weights"]["full"] for record in records)


def test_running_averages_that_travel_are_bounded_too(federation: Federation) -> None:
    never = {"static_from": "never"}
    bounded = ready(federation, "statistics", evaluation=never).run()
    assert weights(bounded).abs().max() < 1e4
    assert {entry["part"] for record in bounded.records for entry in record.clipped} == {"averages"}
    unbounded = ready(federation, "statistics", evaluation=never, server={"robust": "none"}).run()
    assert weights(unbounded).abs().max() > 1e8


@pytest.mark.slow
@pytest.mark.parametrize("robust", ["clip", "agreement", "centered-clip", "krum", "trimmed-mean", "median"])
def test_results_do_not_depend_on_arrival_order(federation: Federation, robust: str) -> None:
    found = []
    for backwards in (False, True):
        experiment = ready(federation, "flip", rounds=2, server={"robust": robust})
        if backwards:
            experiment.engine = Backwards(experiment.engine)
        found.append(experiment.run())
    assert torch.equal(weights(found[0]), weights(found[1]))


@pytest.mark.slow
@pytest.mark.parametrize("robust", ["clip", "agreement", "centered-clip"])
def test_a_resumed_run_bounds_as_one_that_was_not_interrupted(
    federation: Federation, tmp_path: Path, robust: str
) -> None:
    whole = ready(federation, "flip", server={"robust": robust}).run()
    experiment = ready(federation, "flip", server={"robust": robust})
    experiment.watchers = [Interruption(2)]
    with RunFolder.create(tmp_path, experiment.config) as folder, pytest.raises(KeyboardInterrupt):
        experiment.run(folder)
    with RunFolder.open(tmp_path) as folder:
        resumed = ready(federation, "flip", server={"robust": robust}).run(folder)
    assert torch.equal(weights(resumed), weights(whole))
    assert [record.clipped for record in resumed.records] == [record.clipped for record in whole.records]
    on_disk = list(read_records(tmp_path / "records.jsonl"))
    assert [record.norms for record in on_disk] == [r.norms for r in whole.records]
    assert [record.agreement for record in on_disk] == [r.agreement for r in whole.records]
    assert [record.dropped for record in on_disk] == [r.dropped for r in whole.records]


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack != "absent"])
def test_every_attack_passes_the_door(federation: Federation, attack: str) -> None:
    """Within the rules: what admission refuses would be no attack at all."""
    result = ready(federation, attack, rounds=1, server={"robust": "none"}).run()
    assert result.records[0].dropped == []


def test_krum_drops_the_one_that_is_far_off(federation: Federation) -> None:
    result = ready(federation, "noise", server={"robust": "krum", "attackers": 1}).run()
    assert [[entry["client"] for entry in record.dropped] for record in result.records] == [[0]] * 3


def test_what_the_defence_leaves_out_does_not_count_as_an_update(federation: Federation) -> None:
    with pytest.raises(
        FedhmError, match=r"too few updates could be used in round 1, 7 of 8 in attempt 1 of 1: .*client 0"
    ):
        ready(federation, "flip", rounds=1, least=8).run()
    merged = ready(federation, "flip", rounds=1, least=7).run()
    assert [entry["client"] for entry in merged.records[0].dropped] == [0]


def test_clipping_drops_nobody(federation: Federation) -> None:
    records = ready(federation, "flip", server={"robust": "clip"}).run().records
    assert [record.dropped for record in records] == [[]] * 3
    assert {entry["client"] for record in records for entry in record.clipped} == set(HOSTILE)
    assert not any(record.agreement for record in records)


def test_only_deployments_defend_by_default() -> None:
    private = small_config(privacy={"clip": 1.0, "noise": 1.0})
    deployed = small_config(engine={"threads": 1, "name": "flower", "superlink": "federation"})
    assert small_config().resolved().server.robust == "none"
    assert small_config(engine={"threads": 1, "name": "flower"}).resolved().server.robust == "none"
    assert deployed.resolved().server.robust == "agreement"
    # a defence compares clients, whom the noise hides
    assert private.with_defence(deployed=True).server.robust == "none"
    assert small_config(server={"robust": "clip"}).with_defence(deployed=True).server.robust == "clip"


@pytest.mark.parametrize("preset", ["cifar10-resnet18", "cifar100-resnet34", "tinyimagenet-resnet34"])
def test_the_papers_presets_have_neither_defence_nor_clipping(preset: str) -> None:
    config = load_config(preset)
    assert (config.server.robust, config.train.clip_norm) == ("none", 0.0)
