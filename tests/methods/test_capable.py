"""Only clients that can train the full model do; the others are there, and are sent nothing."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.compare.results import EntryRuns
from fedhm.compare.select import Reference, resolve_entries
from fedhm.compare.tables import arrange_table
from fedhm.config.loading import load_config
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.methods.capable import Capable, CapableConfig
from fedhm.networks.exchange import exchanged_tensors
from fedhm.report.progress import LogLines
from fedhm.report.tables import report_csv, report_markdown
from fedhm.runs.folder import RunFolder
from fedhm.runs.history import read_runs
from fedhm.server.record import Record
from fedhm.work.messages import Participant

EVERYBODY = {"participation": 1.0}


def outcome(data: Federation, /, **sections: dict[str, object]) -> fedhm.Result:
    return assemble(small_model(), data, small_config(**sections)).run()


def assert_same(one: fedhm.Result, other: fedhm.Result) -> None:
    ours, theirs = (exchanged_tensors(result.networks["full"]) for result in (one, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for a, b in zip(one.records, other.records, strict=True):
        a.seconds = b.seconds = {}
        assert a == b


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("static_from", [0, "never"])
def test_with_full_clients_only_it_is_fedavg_bit_for_bit(
    federation: Federation, weighting: str, static_from: int | str
) -> None:
    evaluation: dict[str, object] = {"static_from": static_from}
    fedavg, capable = (
        outcome(federation, method={"name": name, "weighting": weighting, **more}, evaluation=evaluation)
        for name, more in (("fedavg", {}), ("capable", {"tiers": [1]}))
    )
    assert_same(capable, fedavg)


def test_others_are_sampled_and_get_nothing_in_training_or_evaluation(federation: Federation) -> None:
    result = outcome(federation, method={"name": "capable"}, federation=EVERYBODY)
    assert result.costs.keys() == result.metrics.keys() == result.networks.keys() == {"full"}
    for record in result.records:
        assert [p.tier for p in record.participants] == ["full", "1/2", "1/4", "1/8"] * 2
        assert {tier: traffic.clients for tier, traffic in record.traffic.items()} == {"full": 2}
        assert record.statistics.clients == 2  # of clients 0 and 4


def test_what_the_capable_learn_does_not_depend_on_the_others(federation: Federation) -> None:
    """The tiers of those who do not train make no difference."""
    assigned = {**EVERYBODY, "assignment": ["full", *["1/8"] * 3] * 2}
    by_number, by_name = (
        outcome(federation, method={"name": "capable", **tiers}, federation=settings)
        for settings, tiers in ((EVERYBODY, {}), (assigned, {"tiers": [1, "1/8"]}))
    )
    assert torch.equal(by_number.networks["full"][9].weight, by_name.networks["full"][9].weight)


NOBODY = {"participation": 0.125}  # one client: it can train in one round of four


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("server", ["none", "momentum", "adam"])
def test_a_round_without_a_capable_client_leaves_the_model(federation: Federation, server: str, workers: int) -> None:
    sections: dict[str, dict[str, object]] = {
        "method": {"name": "capable"},
        "federation": NOBODY,
        "train": {"rounds": 8, "on_bad_update": "drop"},
        "server": {"optimizer": server},
        "evaluation": {"static_from": "never"},
        "engine": {"workers": workers},
    }
    result = outcome(federation, **sections)
    trained = [bool(record.traffic) for record in result.records]
    assert set(trained) == {True, False}
    for before, after in zip(result.records, result.records[1:], strict=False):
        assert after.attempts == 1
        assert trained[after.round - 1] == (after.participants[0].tier == "full")
        assert (after.metrics == before.metrics) == (not trained[after.round - 1])


def test_statistics_for_an_evaluation_come_from_a_capable_client_in_any_round(federation: Federation) -> None:
    settings = {"participation": 0.125, "attempts": 1}
    result = outcome(federation, method={"name": "capable"}, federation=settings, train={"rounds": 8})
    assert {bool(record.traffic) for record in result.records} == {True, False}
    assert {record.statistics.clients for record in result.records} == {1}


def test_the_weights_stay_as_they_are_where_nobody_trains(federation: Federation) -> None:
    config = small_config(method={"name": "capable"}, federation=NOBODY, evaluation={"static_from": "never"})
    experiment = assemble(small_model(), federation, config)
    method = experiment.method
    state = method.start(experiment.initial)
    assert not list(method.tasks(state, [Participant(1, "1/2"), Participant(3, "1/8")], 1))
    after = method.merge(state, [], 1)
    assert all(torch.equal(after.weights[name], tensor) for name, tensor in experiment.initial.items())


def test_tiers_that_are_drawn_may_leave_nobody_in_the_whole_federation(federation: Federation) -> None:
    few = Federation(federation.clients[:2], federation.test, 4, federation.preprocessing)
    drawn = {"clients": 2, "participation": 1.0, "heterogeneity": "dynamic"}
    result = outcome(few, method={"name": "capable"}, federation=drawn, train={"rounds": 8})
    nobody = [record for record in result.records if all(p.tier != "full" for p in record.participants)]
    assert nobody
    assert all(not record.traffic and record.metrics["full"]["accuracy"] >= 0 for record in nobody)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"method": {"name": "capable", "tiers": [0.5, 0.25]}}, r"method\.tiers: one of them must be 1"),
        (
            {"method": {"name": "capable"}, "federation": {"assignment": ["1/2"] * 8}},
            r"federation\.assignment: nobody has tier 'full'",
        ),
        (
            {"method": {"name": "capable"}, "federation": {"assignment": ["1/3"] * 8}},
            r"there is no tier '1/3', known are full, 1/2, 1/4, 1/8",
        ),
    ],
)
def test_a_fleet_in_which_nobody_trains_is_one_sentence(
    federation: Federation, sections: dict[str, dict[str, object]], sentence: str
) -> None:
    with pytest.raises(FedhmError, match=sentence):
        assemble(small_model(), federation, small_config(**sections))


def test_levels_are_the_fleets_and_the_only_tier_is_full() -> None:
    method = Capable(small_model(), CapableConfig(tiers=(0.25, 1.0, 1.0)))
    assert (method.tiers, method.levels) == (("full",), ("full", "full", "1/4"))


def test_in_comparisons_the_fleet_is_fedhms() -> None:
    config = load_config("digits", ["method.tiers=[1, 1/4, 1/4]"])
    (entry,) = resolve_entries(["capable"], Reference(config))
    assert entry.method == {"name": "capable", "tiers": [1, 0.25, 0.25]}


def test_reports_and_comparisons_tell_of_the_one_level_that_trains(federation: Federation, tmp_path: Path) -> None:
    sections: dict[str, dict[str, object]] = {"federation": NOBODY, "train": {"rounds": 5}}
    for name in ("fedhm", "capable", "fedavg"):
        experiment = assemble(small_model(), federation, small_config(method={"name": name}, **sections))
        with RunFolder.create(tmp_path / name, experiment.config) as folder:
            experiment.run(folder)
    runs = read_runs([tmp_path / name for name in ("fedhm", "capable", "fedavg")])
    assert "capable" in report_markdown(runs)
    assert "Not comparable" not in report_markdown(runs)
    assert "capable" in report_csv(runs)
    table = arrange_table([EntryRuns(run.name, [run]) for run in runs])
    assert {row: (place.tier, place.shares) for row, place in table.columns["capable"].items()} == {0: ("full", 1)}
    assert table.columns["fedavg"][0].shares == 4


def test_a_round_in_which_nobody_trained_says_so() -> None:
    out = io.StringIO()
    lines = LogLines(Console(file=out), small_config().objective.headline)
    lines.started(0, 3)
    lines.round_done(Record(1, seconds={"merge": 0.1}))
    assert out.getvalue() == "round 1/3  nobody trained  0.1 s\n"
