"""The errors of `fedhm run` on Flower when a run does not start or does not end as it should."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from flwr.app import Context, RecordDict
from flwr.proto.node_pb2 import NodeInfo

from fedhm.config.loading import load_config
from fedhm.errors import FedhmError
from fedhm.flower import submit
from fedhm.flower.clients import config_client_app
from fedhm.flower.processes.process import Process
from fedhm.flower.processes.secrets import current_umask
from fedhm.flower.processes.superlink import Connection
from fedhm.flower.server import config_server_app
from fedhm.flower.submit import StatusFile, read_status
from flower_loopback import Loopback, LoopbackNode
from flower_up import wait_until

SETTINGS = ["engine.name=flower", "engine.superlink=ours", "federation.clients=1", "engine.patience=0"]


def sentence(run: Callable[[], object]) -> str:
    with pytest.raises(FedhmError) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            "pending",
            "nothing has started the run within 0 minutes: the executor of the SuperLink (flower-superexec) may",
        ),
        ("running", "the run's server process is on another machine"),
        ("finished:failed", "Flower could not start the run (it is 'finished:failed')"),
    ],
)
def test_a_run_that_does_not_start(state: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ASK_FLOWER_AFTER": 0.0,
        "START_TIMEOUT": 0.0,
        "POLL_SECONDS": 0.01,
        "run_status": lambda *_: state,
    }.items():
        monkeypatch.setattr(submit, name, value)
    ours = Connection(tmp_path, "ours")
    assert sentence(lambda: submit._wait_for_start(ours, 1, tmp_path / "news.json")).startswith(said)


def test_a_dead_process_is_named_when_a_run_does_not_start(tmp_path: Path) -> None:
    died = Process("the SuperLink's executor", ["false"], tmp_path, tmp_path / "executor.log")
    wait_until(lambda: not died.alive, 30)
    ours = Connection(tmp_path, "ours", (died,))
    said = sentence(lambda: submit._wait_for_start(ours, 1, tmp_path / "news.json"))
    assert said == f"the SuperLink's executor ended: (nothing) ({tmp_path}/executor.log)"


@pytest.mark.slow
def test_warnings_of_the_server_are_shown(tmp_path: Path) -> None:
    """Otherwise they would be hidden in the log of a process."""
    news = tmp_path / "status.json"
    small = ["data.train_samples=40", "train.rounds=1", "train.epochs=1", "train.micro_batch=8", "engine.threads=1"]
    config = load_config("digits", [*SETTINGS, *small]).resolved()
    given = {
        "config": config.to_toml(),
        "out": str(tmp_path / "run"),
        "status": str(news),
        "umask": oct(current_umask()),
    }
    grid = Loopback({1: LoopbackNode(config_client_app(), {"partition-id": 0, "num-partitions": 1})})
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        config_server_app()(grid, Context(1, 1, {}, RecordDict(), given))
    status = read_status(news)
    assert status is not None
    assert status["error"] == ""
    assert status["message"].startswith("with train.micro_batch = 8, BatchNorm layers normalise by")


class Unreachable(Loopback):
    """The grid of a SuperLink that was killed."""

    def get_nodes(self) -> list[NodeInfo]:
        raise httpx.ConnectError("refused \x1b[2J")


def test_a_killed_superlink_does_not_hide_the_resume_hint(tmp_path: Path) -> None:
    news, out = tmp_path / "status.json", tmp_path / "my runs" / "it's"
    config = load_config("digits", [*SETTINGS, "data.train_samples=40"]).resolved()
    given = {"config": config.to_toml(), "out": str(out), "status": str(news), "umask": oct(current_umask())}
    with pytest.raises(httpx.ConnectError):
        config_server_app()(Unreachable({}), Context(1, 1, {}, RecordDict(), given))
    status = read_status(news)
    assert status is not None
    assert status["error"] == "the SuperLink does not answer any more (ConnectError)"
    ours = Connection(tmp_path, "ours")
    assert sentence(lambda: submit._watch(ours, 1, news, out, None, print)) == status["error"]  # type: ignore[arg-type]
    out.mkdir(parents=True)
    (out / "config.toml").touch()  # it had begun
    said = sentence(lambda: submit._watch(ours, 1, news, out, None, print))  # type: ignore[arg-type]
    quoted = (
        re.escape("; fedhm resume '")
        + ".*"
        + re.escape("my runs/it'\"'\"'s'")
        + " resumes from the last complete round$"
    )
    assert re.search(quoted, said), said


def test_errors_of_settings_have_no_resume_hint(tmp_path: Path) -> None:
    news = tmp_path / "status.json"
    (tmp_path / "config.toml").touch()
    StatusFile(news).ended("train.lr is too high")
    ours = Connection(tmp_path, "ours")
    assert sentence(lambda: submit._watch(ours, 1, news, tmp_path, None, print)) == "train.lr is too high"  # type: ignore[arg-type]


def test_a_run_that_cannot_be_stopped_shows_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def superlink(*_: object) -> Iterator[Connection]:
        yield Connection(tmp_path, "ours")

    def raising(said: str) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise FedhmError(said)

        return fail

    replaced = {"_superlink": superlink, "start_run": lambda *_: 1, "STOP_TIMEOUT": 0.0}
    for name, value in {**replaced, "_watch": raising("it ended"), "stop_run": raising("nobody answers")}.items():
        monkeypatch.setattr(submit, name, value)
    config = load_config("digits", SETTINGS).resolved()
    said = sentence(lambda: submit.run_on_flower(config, tmp_path / "run", None, lambda _: None))  # type: ignore[arg-type]
    assert said == "it ended"
