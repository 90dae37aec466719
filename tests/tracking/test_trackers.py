"""What TensorBoard, MLflow and wandb hold of a run, read back by their own readers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedhm
from fedhm.errors import FedhmWarning
from fedhm.runs.rounds import read_records
from fedhm.tracking.trackers import Tracker, values
from made_runs import eventful_run, timed_run

ROUNDS = 3
DOCS = Path(__file__).parents[2] / "docs" / "tracking.md"


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(24, 4, generator=generator), torch.arange(24) % 3


def run(out: Path | None, *watchers: fedhm.Watcher, rounds: int = ROUNDS, **tracking: Any) -> fedhm.Result:
    """A run of a few numbers, with two tiers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    settings: dict[str, Any] = {
        "train": {"rounds": rounds, "lr": 0.05},
        "method": {"tiers": [1, "1/4"]},
        "engine": {"threads": 1, "workers": 1, "server_threads": 1},
        "checkpoints": {"keep": "all"},
    }
    if tracking:
        settings["tracking"] = tracking
    return fedhm.run(model, [data(1), data(2)], data(3), settings, out, watchers=watchers)


class Stopping:
    """A watcher that ends the run as Ctrl-C would, after a round."""

    def __init__(self, after: int) -> None:
        self._after = after

    def started(self, *_: int) -> None: ...
    def task_done(self, *_: object) -> None: ...

    def round_done(self, record: fedhm.Record) -> None:
        if record.round == self._after:
            raise KeyboardInterrupt


pytestmark = pytest.mark.usefixtures("without_figures")


def interrupted(out: Path, after: int, **tracking: Any) -> fedhm.Result:
    """A run that was stopped before its trackers were told of round `after`, and resumed."""
    with pytest.raises(KeyboardInterrupt):
        run(out, Stopping(after), **tracking)
    return run(out, **tracking)


def expected(out: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for record in read_records(out / "records.jsonl"):
        for name, value in values(record).items():
            found.setdefault(name, []).append((record.round, value))
    return found


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]}


def assert_same(
    found: Mapping[str, Sequence[tuple[int, float]]], wanted: Mapping[str, list[tuple[int, float]]]
) -> None:
    """The same names, rounds and numbers; seconds are measured, and written rounded."""
    assert found.keys() == wanted.keys()
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        if not name.startswith("seconds/"):
            values_found = [value for _, value in found[name]]
            assert values_found == pytest.approx([value for _, value in points], rel=1e-6), name


def test_every_number_of_a_record_has_a_name() -> None:
    found = values(eventful_run().records[-1])
    assert found["accuracy/full"] == 0.75
    assert found["accuracy/1-4"] == pytest.approx(0.6)
    assert found["diagnostics/energy_beyond-1-4"] == pytest.approx(0.5 / 3)
    assert found["epsilon"] == 4.5
    assert "simulated_seconds" not in found
    assert values(timed_run().records[-1])["simulated_seconds"] == 30
    assert (found["dropped"], found["clipped"], found["participants"]) == (1, 2, 2)
    assert found["clients_worst_tenth_accuracy/1-4"] == 0.0
    assert found["bytes_down/full"] == 10_000


def test_tensorboard_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    out, boards = tmp_path / "run", tmp_path / "boards"
    interrupted(out, after=2, tensorboard=str(boards))
    assert [path.name for path in boards.iterdir()] == ["run"]
    assert_same(board(boards / "run"), expected(out))
    fedhm_again = run(out, tensorboard=str(boards))  # complete: nothing is told twice
    assert len(fedhm_again.records) == ROUNDS
    assert_same(board(boards / "run"), expected(out))


def test_rounds_that_were_taken_back_are_no_longer_on_the_board(tmp_path: Path) -> None:
    out, boards = tmp_path / "run", tmp_path / "boards"
    run(out, fedhm.tracking.TensorBoard(boards))
    from fedhm.runs.folder import RunFolder

    with RunFolder.open(out) as folder:
        folder.rewind(1)
    run(out, fedhm.tracking.TensorBoard(boards))
    assert_same(board(boards / "run"), expected(out))


def test_runs_of_one_name_have_boards_of_their_own(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        run(tmp_path / parent / "run", fedhm.tracking.TensorBoard(tmp_path / "boards"), rounds=1)
    assert sorted(path.name for path in (tmp_path / "boards").iterdir()) == ["run", "run-2"]


@pytest.mark.slow
def test_mlflow_holds_settings_metrics_and_models_once(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    out, store = tmp_path / "run", tmp_path / "store"
    result = interrupted(out, after=2, mlflow=str(store), mlflow_experiment="mine")
    client = MlflowClient(tracking_uri=store.as_uri())

    def tracked() -> list[Any]:
        experiment = client.get_experiment_by_name("mine")
        assert experiment
        return list(client.search_runs([experiment.experiment_id]))

    (found,) = tracked()
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["train.lr"] == "0.05"
    assert not [key for key in found.data.params if key.startswith("tracking")]

    def history(identifier: str) -> dict[str, list[tuple[int, float]]]:
        names = client.get_run(identifier).data.metrics
        return {n: [(m.step, m.value) for m in client.get_metric_history(identifier, n)] for n in names}

    assert_same(history(found.info.run_id), expected(out))
    models = {each.path for each in client.list_artifacts(found.info.run_id, "models")}
    assert models == {"models/full.safetensors", "models/1-4.safetensors"}
    place = client.download_artifacts(found.info.run_id, "models/1-4.safetensors", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        torch.testing.assert_close(fedhm.load_tier(place, model)(data()[0]), result.networks["1/4"].eval()(data()[0]))

    from fedhm.runs.folder import RunFolder

    with RunFolder.open(out) as folder:
        folder.rewind(1)
    run(out, mlflow=str(store), mlflow_experiment="mine")  # MLflow cannot forget, so this is another tracked run
    assert len(tracked()) == 2
    assert_same(history(tracked()[0].info.run_id), expected(out))


def written(file: Path) -> Iterator[bytes]:
    """The records of wandb's file, which is a log of LevelDB: blocks of 32 KiB, and pieces with a header of 7 bytes."""
    content, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if -place % 32768 < 7 and -place % 32768:  # the rest of a block that has no room for a header
            place += -place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            yield whole
            whole = b""


@pytest.mark.slow
def test_wandb_offline_holds_every_round_once(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    out = tmp_path / "run"
    interrupted(out, after=2, wandb="mine", wandb_mode="offline")
    rounds: dict[int, dict[str, float]] = {}
    identifiers, keys, artefacts = set(), set(), 0
    for file in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        for line in written(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(line)
            if record.WhichOneof("record_type") == "run":
                identifiers.add(record.run.run_id)
                keys |= {item.key for item in record.run.config.update}
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = record.history.step.num
                assert step not in rounds
                rounds[step] = {key: float(value) for key, value in items.items() if not key.startswith("_")}
            artefacts += record.WhichOneof("record_type") in ("artifact", "request") and "models-" in str(record)
    assert len(identifiers) == 1
    assert "train.lr" in keys
    assert artefacts
    found: dict[str, list[tuple[int, float]]] = {}
    for step in sorted(rounds):
        for name, value in rounds[step].items():
            found.setdefault(name, []).append((step, value))
    assert_same(found, expected(out))


class Broken(Tracker):
    """Fails in the rounds that it is told to."""

    called: ClassVar = "Broken"
    extra: ClassVar = "broken"
    module: ClassVar = "torch"

    def __init__(self, *rounds: int) -> None:
        super().__init__("somewhere")
        self.rounds, self.told, self.kept = set(rounds), list[int](), list[str]()

    def open(self, *_: object) -> str:
        if 0 in self.rounds:
            raise RuntimeError("no\nserver")
        return "id"

    def log(self, _: Mapping[str, float], round_number: int) -> None:
        if round_number in self.rounds:
            self.rounds.remove(round_number)
            raise OSError("the line is cut")
        self.told.append(round_number)

    def keep(self, files: Sequence[Path]) -> None:
        self.kept = [file.name for file in files]

    def end(self, complete: bool) -> None:
        self.outcome = complete


def test_one_that_fails_later_costs_no_round_and_misses_none() -> None:
    tracker = Broken(2)
    with pytest.warns(FedhmWarning, match="Broken fails \\(the line is cut\\); the run goes on"):
        assert len(run(None, tracker).records) == ROUNDS
    assert tracker.told == [1, 2, 3]
    assert tracker.outcome is True
    assert tracker.kept == ["full.safetensors", "1-4.safetensors"]


def test_one_that_fails_at_the_start_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(fedhm.FedhmError, match="Broken cannot be used: no server"):
        run(tmp_path / "run", Broken(0))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fedhm.FedhmError, match=r"TensorBoard cannot be used: cannot read or write .*file/run: not a"):
        run(tmp_path / "run", tensorboard=str(tmp_path / "file"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "said"), [("tensorboard", "TensorBoard"), ("mlflow", "MLflow"), ("wandb", "Weights")]
)
def test_one_that_is_not_installed_is_a_sentence(
    setting: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedhm.tracking.trackers.find_spec", lambda _: None)
    with pytest.raises(fedhm.FedhmError, match=rf"{said}.* is not installed: pip install '\.\[{setting}\]'"):
        run(tmp_path / "run", **{setting: str(tmp_path / "place")})
    assert not (tmp_path / "run").exists()


def test_tracking_does_not_make_it_another_run(tmp_path: Path) -> None:
    plain, tracked = tmp_path / "plain", tmp_path / "tracked"
    run(plain)
    run(tracked, tensorboard=str(tmp_path / "boards"))
    checkpoints = [next(path.glob("checkpoints/*3.safetensors")).read_bytes() for path in (plain, tracked)]
    assert checkpoints[0] == checkpoints[1]
    run(plain, tensorboard=str(tmp_path / "boards"))  # resumed with a tracker, which gets all rounds
    assert_same(board(tmp_path / "boards" / "plain"), expected(plain))


def test_what_the_docs_say_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    exec(compile(block, DOCS.name, "exec"), {})
    assert list(board(tmp_path / "boards" / "fedhm")["accuracy/1-4"])


def test_a_watcher_of_three_methods_is_enough() -> None:
    seen: list[int] = []

    class Mine:
        def started(self, done: int, rounds: int) -> None: ...
        def task_done(self, round_number: int, what: str, done: int, of: int) -> None: ...
        def round_done(self, record: fedhm.Record) -> None:
            seen.append(record.round)

    assert not isinstance(Mine(), fedhm.RunWatcher)
    run(None, Mine())
    assert seen == [1, 2, 3]
