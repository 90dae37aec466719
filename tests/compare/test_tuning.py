"""What --tune asks for, and how the best is chosen; `test_tune_command.py` has real runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedhm.cli import main
from fedhm.compare.execute import all_cells, config_of
from fedhm.compare.report import ComparisonReport
from fedhm.compare.results import EntryRuns
from fedhm.compare.select import Entry, Reference, known_names, resolve_entries
from fedhm.compare.tuning import Candidate, TuningResult, TuningSetup, read_tuning, shared_tuning
from fedhm.config.loading import load_config
from fedhm.config.objective import Metric
from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from made_runs import made_run

ACCURACY = Metric("accuracy", percent=True)
SETUP = TuningSetup({"train.lr": [0.02, 0.05, 0.1]}, share=0.2, rounds=5, seed=0)


def named(*names: str, config: Config) -> list[Entry]:
    return resolve_entries(names, Reference(config))


def tried(*means: float | None) -> list[Candidate]:
    return [
        Candidate(
            {"train.lr": lr}, {} if mean is None else {"full": mean + 0.1, "1/4": mean - 0.1}, "" if mean else "NaN"
        )
        for lr, mean in zip((0.02, 0.05, 0.1), means, strict=False)
    ]


def test_candidates_are_read_as_settings_are() -> None:
    options = [
        "train.lr = 0.02, 0.05,0.1",
        "train.milestones=[3,4],[5]",
        "train.nesterov=true,false",
        "method.w='a,b',c",
    ]
    assert read_tuning(options, None, None).candidates == {
        "train.lr": [0.02, 0.05, 0.1], "train.milestones": [[3, 4], [5]], "train.nesterov": [True, False],
        "method.w": ["a,b", "c"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tune", "train.lr"], "--tune takes KEY=A,B,…, such as train.lr=0.02,0.05,0.1, not 'train.lr'"),
        (["--tune", "train.lr="], "--tune takes KEY=A,B,…"),
        (["--tune", "train.lr=0.1,,0.2"], "--tune takes KEY=A,B,…"),
        (["--tune", "train.lr=0.1,0.1"], "--tune train.lr=0.1,0.1 leaves nothing to choose"),
        (["--tune", "train.lr=0.1,0.2", "--tune", "train.lr=0.3,0.4"], "--tune train.lr is given twice"),
        (["--tune", "train.lrr=0.1,0.2"], "unknown key 'train.lrr', did you mean 'train.lr'?"),
        (["--tune", "trian.lr=0.1,0.2"], "unknown key 'trian"),
        (["--tune", "lr=0.1,0.2"], "unknown key 'lr'"),
        (["--tune", "method.nothing=1,2"], "unknown key 'method.nothing'"),
        (["--tune", "train.lr=0.1,-1"], "--tune train.lr=-1: train.lr: input should be greater than 0 (got -1)"),
        (["--tune", "method.keep=1,9"], "--methods fedhm --tune method.keep=9: there is nothing to factorize"),
        (["--tune", "data.alpha=0.1,0.2"], "--tune data.alpha: all entries share this setting"),
        (["--tune", "train.rounds=1,2"], "--tune train.rounds: all entries share this setting"),
        (["--tune", "seed=1,2"], "--tune seed: all entries share this setting"),
        (["--tune", "train.lr=1,2", "--tune-share", "1"], "--tune-share takes a share between 0 and 1, such as 0.2"),
        (["--tune", "train.lr=1,2", "--tune-rounds", "0"], "--tune-rounds takes a whole number from 1 on, not '0'"),
        (["--tune-rounds", "3"], "--tune-rounds needs --tune KEY=A,B"),
        (["--tune", "train.lr=1,2", "--set", "data.validation=0.1"], "needs the test set: remove data.validation"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_runs(
    options: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "digits", "--methods", "fedhm,fedavg", *options]) == 1
    err = capsys.readouterr().err
    assert err.startswith("fedhm: ")
    assert sentence in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_runs_that_exist_are_not_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--runs", "somewhere", "--tune", "train.lr=1,2"]) == 1
    assert "--tune does not go with it" in capsys.readouterr().err


def test_tuning_runs_never_see_the_test_set_and_may_be_shorter(tmp_path: Path) -> None:
    config = load_config("digits", ["seed=3"])
    tuning = read_tuning(["train.lr=0.02,0.1", "train.momentum=0,0.9"], 0.3, 10)
    runs = tuning.cells(config, named("fedhm", "lowrank:1/8", config=config), tmp_path, jobs=2)
    assert len(runs) == 2 * 4
    for cell in runs:
        data, train = cell.config.data, cell.config.train
        assert data is not None
        assert (data.validation, train.rounds, train.milestones, cell.config.seed) == (0.3, 10, (8,), 3)
        assert cell.folder == tmp_path / cell.name
    assert {(cell.config.train.lr, cell.config.train.momentum) for cell in runs} == {
        (lr, momentum) for lr in (0.02, 0.1) for momentum in (0, 0.9)
    }
    assert [cell.name for cell in runs[3:5]] == [
        "tune/fedhm/train.lr=0.1,train.momentum=0.9",
        "tune/lowrank-1-8/train.lr=0.02,train.momentum=0",
    ]
    whole = read_tuning(["train.lr=0.02,0.1"], None, None).cells(config, named("fedavg", config=config), tmp_path, 1)
    assert [cell.config.train.milestones for cell in whole] == [(30,), (30,)]


def test_an_entry_is_tuned_by_the_settings_that_it_has(tmp_path: Path) -> None:
    config = load_config("digits")
    both = named("fedhm", "fedavg", config=config)
    runs = read_tuning(["method.aggregate=models,updates"], None, None).cells(config, both, tmp_path, 1)
    assert [(cell.entry.label, cell.entry.changes) for cell in runs] == [
        ("fedhm", {"method.aggregate": "models"}), ("fedhm", {"method.aggregate": "updates"}),
    ]  # fmt: skip
    assert [cell.config.method.aggregate for cell in runs] == ["models", "updates"]  # type: ignore[attr-defined]


def test_the_seeds_run_on_all_training_data_with_what_was_chosen(tmp_path: Path) -> None:
    config = load_config("digits")
    chosen = [Entry(e.label, e.method, {"train.lr": 0.05}) for e in named("fedhm", "fedavg", config=config)]
    for cell in all_cells(config, chosen, 2, tmp_path, 1):
        assert cell.config.data is not None
        assert (cell.config.train.lr, cell.config.data.validation, cell.config.train.rounds) == (0.05, 0, 40)


def test_the_servers_optimizer_is_everybodys(tmp_path: Path) -> None:
    config = load_config("digits", ["server.optimizer=momentum", "server.lr=0.5", "data.public=held-out"])
    found = {
        cell.entry.label: cell.config
        for cell in all_cells(config, named(*known_names(), config=config), 1, tmp_path, 1)
    }
    assert {"fedhm", "heterofl", "splitmix", "fedavg", "lowrank:1/8"} < found.keys()
    for own in found.values():
        assert (own.server.optimizer, own.server.learning_rate) == ("momentum", 0.5)
    table = config.model_dump(mode="json", exclude={"compare"})
    tuned = Entry("fedavg", {"name": "fedavg"}, {"server.lr": 0.1})  # unless it was tuned
    assert config_of(table, tuned, 0).server.learning_rate == 0.1


def test_the_best_mean_over_the_tiers_is_chosen() -> None:
    tuned = TuningResult(SETUP, ACCURACY, {"a": tried(0.5, 0.7, 0.6), "b": tried(0.5, 0.5), "c": tried(None, 0.2, 0.3)})
    assert [tuned.best_settings(label) for label in "abcd"] == [
        {"train.lr": 0.05}, {"train.lr": 0.02}, {"train.lr": 0.1}, {},
    ]  # fmt: skip
    less = TuningResult(SETUP, Metric("mse", more_is_better=False), {"a": tried(0.5, 0.7, 0.6)})
    assert less.best_settings("a") == {"train.lr": 0.02}
    tuned.check()
    with pytest.raises(FedhmError, match="all candidates failed for d; the last one: NaN"):
        TuningResult(SETUP, ACCURACY, {"d": tried(None, None)}).check()


def test_the_table_says_what_was_chosen_and_where_the_range_ends() -> None:
    sheet = TuningResult(SETUP, ACCURACY, {"a": tried(0.5, 0.7, 0.6), "b": tried(None, 0.2, 0.3)}).sheet
    assert sheet.columns == ["entry", "chosen", "train.lr=0.02", "train.lr=0.05", "train.lr=0.1"]
    assert list(sheet.rows) == [
        ["a", "train.lr=0.05", "50.00", "70.00", "60.00"],
        ["b", "train.lr=0.1", "failed", "20.00", "30.00"],
    ]
    assert (
        "Validation accuracy in percent, mean over the tiers after round 5, with seed 0, on 20 % held out" in sheet.note
    )
    assert sheet.note.endswith("The best is at the end of the candidates, so better values may lie beyond, for: b.")


def made(label: str, lr: float, method: str) -> EntryRuns:
    runs = [
        made_run(f"{label}-seed{seed}", {"full": 1000}, [{"full": 0.5}], {"name": method}, seed, train={"lr": lr})
        for seed in (0, 1)
    ]
    return EntryRuns(label, runs)


@pytest.mark.slow
def test_tuned_settings_may_differ_and_no_others(tmp_path: Path) -> None:
    ours, theirs = made("fedhm", 0.05, "fedhm"), made("fedavg", 0.1, "fedavg")
    with pytest.raises(FedhmError, match=r"fedhm-seed0 has train\.lr = 0\.05, fedavg-seed0 has 0\.1"):
        ComparisonReport([ours, theirs], "…", {})
    tuned = TuningResult(SETUP, ACCURACY, {"fedhm": tried(0.5, 0.7, 0.6), "fedavg": tried(0.5, 0.6, 0.7)})
    report = ComparisonReport([ours, theirs], "…", {}, tuned=tuned)
    assert tmp_path / "tune.json" in report.save(tmp_path)
    text = (tmp_path / "comparison.md").read_text()
    assert "learning rate tuned;" in text
    assert "| fedavg | name = fedavg, " in text
    assert "train.lr = 0.1" in text
    assert "### What was chosen" in text
    other = TuningResult(replace(SETUP, candidates={"train.momentum": [0, 0.9]}), ACCURACY, {})
    with pytest.raises(FedhmError, match=r"has train\.lr = 0\.05"):
        ComparisonReport([ours, theirs], "…", {}, tuned=other)


def test_what_was_tuned_is_read_back(tmp_path: Path) -> None:
    entries = [made("fedhm", 0.05, "fedhm"), made("fedavg", 0.1, "fedavg")]
    tuned = TuningResult(SETUP, ACCURACY, {"fedhm": tried(0.5, 0.7, 0.6), "other": tried(0.5, 0.6, 0.7)})
    folders = [tmp_path / "a" / "fedhm-seed0", tmp_path / "b" / "fedavg-seed0"]
    assert shared_tuning(folders, entries) is None
    tuned.save(tmp_path / "a")
    assert shared_tuning(folders, entries) is None
    found = shared_tuning(folders[:1], entries)
    assert found == TuningResult(SETUP, ACCURACY, {"fedhm": tried(0.5, 0.7, 0.6)})
    TuningResult(replace(SETUP, rounds=4), ACCURACY, {"fedavg": tried(0.5, 0.6, 0.7)}).save(tmp_path / "b")
    assert shared_tuning(folders, entries) is None  # the one had more rounds to be chosen by than the other
    TuningResult(SETUP, ACCURACY, {"fedavg": tried(0.5, 0.6, 0.7)}).save(tmp_path / "b")
    found = shared_tuning(folders, entries)
    assert found is not None
    assert list(found.tried) == ["fedhm", "fedavg"]
    (tmp_path / "b" / "tune.json").write_text("{}")
    with pytest.raises(FedhmError, match=r"cannot read .*tune\.json"):
        shared_tuning(folders, entries)
