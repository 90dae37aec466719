"""A run that ended early is complete, says why, resumes as complete, and keeps the models of its best round."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedhm
from fedhm.assembly import assemble
from fedhm.compare.results import EntryRuns, incomparable_entries
from fedhm.config.loading import parse
from fedhm.data.federation import from_arrays
from fedhm.engines.engine import Engine
from fedhm.errors import FedhmError
from fedhm.report.result import Result
from fedhm.report.tables import report_markdown
from fedhm.runs.folder import is_complete, read_config
from fedhm.runs.history import read_runs
from fedhm.runs.models import best_round_on_disk, load_best_models, load_tier, tier_file
from fedhm.work.messages import Reply, Task, Update
from made_runs import made_run
from test_without_server_test import SETTINGS, clients, model

pytestmark = pytest.mark.usefixtures("without_figures")


def run(out: Path | None, rounds: int = 30, watchers: tuple[object, ...] = (), **stop: object) -> Result:
    config = {**SETTINGS, "train": {**SETTINGS["train"], "rounds": rounds, "lr": 0.2}, "stop": stop}
    return fedhm.run(model(), clients(), config=config, out=out, watchers=watchers)  # type: ignore[arg-type]


def models(out: Path) -> dict[str, bytes]:
    """Return the model files of a run by where they lie."""
    return {str(path.relative_to(out)): path.read_bytes() for path in (out / "models").rglob("*.safetensors")}


def accuracies(result: Result) -> list[float]:
    """Return by round what [stop] goes by where only clients evaluate."""
    return [record.clients["full"].overall.median.accuracy for record in result.records]


def test_a_target_ends_the_run_which_is_complete_then(tmp_path: Path) -> None:
    whole = accuracies(run(None, rounds=8))
    target = max(whole[:4])
    first = next(number for number, value in enumerate(whole, start=1) if value >= target)
    result = run(tmp_path / "run", rounds=8, target=target)
    assert accuracies(result) == whole[:first]
    assert result.records[-1].stopped == f"tier full reached {100 * target:g} % accuracy in the median over clients"
    assert is_complete(tmp_path / "run", read_config(tmp_path / "run"))
    before = models(tmp_path / "run")
    again = run(tmp_path / "run", rounds=8, target=target)
    assert accuracies(again) == accuracies(result)
    assert models(tmp_path / "run") == before
    (read,) = read_runs([tmp_path / "run"])
    assert read.complete
    text = report_markdown([read])
    assert f"run stopped after round {first}: {result.records[-1].stopped}." in text
    assert f"The best round of run was {first}: models/best-round-{first}." in text


def test_patience_keeps_the_models_of_the_best_round(tmp_path: Path) -> None:
    result = run(tmp_path / "run", patience=3)
    values = accuracies(result)
    assert len(values) < 30
    assert result.best_round == len(values) - 3 == 1 + values.index(max(values))
    assert [path.name for path in (tmp_path / "run" / "models").glob("best-*")] == [f"best-round-{result.best_round}"]
    cut = run(None, rounds=result.best_round)
    for tier, network in result.best.items():
        saved = load_tier(tier_file(tmp_path / "run" / "models" / f"best-round-{result.best_round}", tier), model())
        for name, tensor in cut.networks[tier].state_dict().items():
            assert torch.equal(network.state_dict()[name], tensor)
            assert torch.equal(saved.state_dict()[name], tensor)
    again = run(tmp_path / "run", patience=3)
    assert again.best_round == result.best_round
    for tier, network in again.best.items():
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, result.best[tier].state_dict()[name])


class OneLiar:
    """An engine whose client 0 says, from round 2 on, that the model is as wrong as the door lets in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, tasks: Sequence[Task]) -> Iterator[Reply]:
        for reply in self._engine.run(tasks):
            task = tasks[reply.position]
            if isinstance(reply, Update) and task.kind == "evaluate" and task.client == 0 and task.round > 1:
                errors = torch.full_like(reply.tensors["errors"], 1e19 * reply.samples)
                reply = replace(reply, tensors={**reply.tensors, "errors": errors})
            yield reply

    def close(self) -> None:
        self._engine.close()


def lied_to(how: str) -> Result:
    """Run without a server's test set, with one client of five that lies."""
    table = {
        **SETTINGS,
        "train": {"rounds": 5, "epochs": 4, "lr": 0.05, "batch": 8},
        "federation": {"clients": 5, "participation": 1.0},
        "objective": "regression",
        "engine": {"threads": 1, "server_threads": 1, "workers": 1},
        "stop": {"patience": 2, "clients": how},
    }
    config = parse(table, "test").resolved()
    numbers = [(x, x[:, 0]) for x, _ in clients()]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    data = from_arrays(numbers, None, objective=config.objective, client_test=0.5)
    experiment = assemble(network, data, config)
    experiment.engine = OneLiar(experiment.engine)
    return experiment.run()


def test_one_client_that_lies_neither_ends_a_run_nor_chooses_its_round() -> None:
    pooled = lied_to("pooled")
    assert (len(pooled.records), pooled.best_round) == (3, 1)
    median = lied_to("median")
    assert (len(median.records), median.best_round) == (5, 5)


def test_a_run_may_go_by_the_pooled_metric(tmp_path: Path) -> None:
    result = run(tmp_path, rounds=3, patience=5, clients="pooled")
    pooled = [record.metrics["full"].accuracy for record in result.records]
    assert result.best_round == 1 + pooled.index(max(pooled))
    assert run(tmp_path, rounds=3, patience=5, clients="pooled").best_round == result.best_round  # resumed as complete


class KilledError(Exception):
    """In place of a kill."""


class KillAfter:
    def __init__(self, round_number: int) -> None:
        self._round = round_number

    def started(self, *_: object) -> None: ...
    def task_done(self, *_: object) -> None: ...
    def round_done(self, record: fedhm.Record) -> None:
        if record.round == self._round:
            raise KilledError


@pytest.mark.parametrize("where", [1, 4])
def test_a_run_that_was_killed_ends_as_if_it_were_not(
    where: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", patience=3)
    with pytest.raises(KilledError):
        run(tmp_path / "run", patience=3, watchers=(KillAfter(where),))
    # and once more, between the models of a best round and its checkpoint: what it left must not count
    with monkeypatch.context() as patch:
        patch.setattr("fedhm.runs.folder.append_record", _kill)
        with pytest.raises(KilledError):
            run(tmp_path / "run", patience=3)
    resumed = run(tmp_path / "run", patience=3)
    assert (resumed.best_round, accuracies(resumed)) == (whole.best_round, accuracies(whole))
    assert models(tmp_path / "run") == models(tmp_path / "whole")


def _kill(*_: object) -> None:
    raise KilledError


def test_models_of_a_round_that_never_counted_are_not_the_best(tmp_path: Path) -> None:
    for number in (3, 7):
        (tmp_path / f"best-round-{number}").mkdir()
    (tmp_path / "best-round-x").mkdir()
    assert best_round_on_disk(tmp_path, rounds=6) == 3
    assert best_round_on_disk(tmp_path, rounds=7) == 7
    assert best_round_on_disk(tmp_path / "none", rounds=7) == 0
    assert load_best_models(tmp_path, 5, {"full": model()}) == {}
    with pytest.raises(FedhmError, match=r"cannot read .*best-round-3/full\.safetensors"):
        load_best_models(tmp_path, 3, {"full": model()})


def test_without_a_reason_to_end_nothing_is_kept(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=2)
    assert (result.best_round, result.best) == (0, {})
    assert models(tmp_path / "run").keys() == {"models/1-4.safetensors", "models/full.safetensors"}
    assert "stopped" not in (tmp_path / "run" / "records.jsonl").read_text()


def test_the_last_round_ends_a_run_anyway() -> None:
    result = run(None, rounds=1, target=0.0)
    assert result.records[-1].stopped == ""
    assert result.best_round == 1


def test_an_unknown_tier_is_one_sentence() -> None:
    with pytest.raises(FedhmError, match=r"stop\.tier: there is no tier '1/3', known are full, 1/4"):
        run(None, patience=1, tier="1/3")


def test_a_run_that_ended_early_is_compared_like_any_other() -> None:
    early, whole = (
        made_run("run", {"full": 9}, [{"full": 0.5}] * 3, seed=seed, train={"rounds": 5}) for seed in (0, 1)
    )
    assert "has done 3 of its 5 rounds" in str(incomparable_entries([EntryRuns("fedhm", [early])]))
    early.records[-1].stopped = whole.records[-1].stopped = "tier full reached 50 % accuracy"
    assert incomparable_entries([EntryRuns("fedhm", [early, whole])]) is None
    endless = made_run("endless", {"full": 9}, [{"full": 0.5}] * 5, seed=0)
    patient = made_run("patient", {"full": 9}, [{"full": 0.5}] * 5, seed=1, stop={"patience": 2})
    assert incomparable_entries([EntryRuns("a", [endless]), EntryRuns("b", [patient])]) == (
        "endless has stop.patience = 0, patient has 2"
    )
