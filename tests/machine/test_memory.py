"""Too little memory is one sentence that says what to lower, wherever it happens."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

import fedhm
from fedhm.cli import main
from fedhm.config.registry import find
from fedhm.data.federation import Federation
from fedhm.engines.engine import LocalEngine
from fedhm.errors import FedhmError
from fedhm.machine.device import CPU
from fedhm.machine.memory import (
    LEAST_FOR_TORCH,
    NotEnoughMemoryError,
    lacks_memory,
    memory_errors,
    mentions_lack_of_memory,
)
from fedhm.work.messages import Failure
from small import small_model

SHORTAGES = [
    MemoryError(),
    MemoryError("std::bad_alloc"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("could not create a primitive"),
    RuntimeError("could not create a memory object"),
    RuntimeError("can't start new thread"),
    RuntimeError("libgomp: Thread creation failed: Resource temporarily unavailable"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
]
ids = [f"{type(error).__name__} {error}"[:40] for error in SHORTAGES]


def raised(error: Exception, behind: Exception, hidden: bool = False) -> Exception:
    """Return an error as it is when it was raised while another one was handled."""
    try:
        try:
            raise behind
        except Exception as first:
            raise error from (None if hidden else first)
    except Exception as found:
        return found


@pytest.mark.parametrize("error", SHORTAGES, ids=ids)
def test_errors_for_lack_of_memory_are_recognised(error: Exception) -> None:
    assert lacks_memory(error)
    assert lacks_memory(raised(ValueError("it failed"), error))
    assert lacks_memory(raised(FedhmError("the model cannot be run"), error, hidden=True)) is not isinstance(
        error, OSError
    )
    with (
        pytest.raises(NotEnoughMemoryError, match=r"^there is not enough memory.* to bake: lower the heat") as found,
        memory_errors("to bake", "lower the heat"),
    ):
        raise error
    assert len(str(found.value).splitlines()) == 1


def test_the_allocator_of_torch_still_says_the_same() -> None:
    with pytest.raises(NotEnoughMemoryError), memory_errors("for it", "lower it"):
        torch.empty(2**50)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("no"),
        OSError(errno.ENOSPC, "No space left on device"),
        FedhmError("could not create a primitive settlement"),
        KeyError("x"),
    ],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert not lacks_memory(error)
    with pytest.raises(type(error)) as found, memory_errors("to bake", "lower the heat"):
        raise error
    assert found.value is error


def test_the_sentence_nearest_to_the_place_counts() -> None:
    with (
        pytest.raises(NotEnoughMemoryError, match="inside: lower that"),
        memory_errors("outside", "lower this"),
        memory_errors("inside", "lower that"),
    ):
        raise MemoryError


def test_outputs_of_processes_are_read_likewise() -> None:
    assert mentions_lack_of_memory("Traceback …\nMemoryError")
    assert mentions_lack_of_memory("RuntimeError: could not create a primitive")
    assert not mentions_lack_of_memory("ValueError: no")


def fail_with(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


def clients_and_test(federation: Federation) -> tuple[list[Any], Any]:
    assert federation.test is not None
    return [(s.inputs, s.labels) for s in federation.clients], (federation.test.inputs, federation.test.labels)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("error", [SHORTAGES[0], SHORTAGES[2], SHORTAGES[3], SHORTAGES[5]], ids=str)
def test_a_client_without_memory_ends_a_run_on_this_machine_and_is_not_dropped(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, workers: int, error: Exception, tmp_path: Path
) -> None:
    monkeypatch.setattr(type(find("work", "nested")), "run", fail_with(error))
    monkeypatch.setattr(type(find("work", "train")), "run", fail_with(error))
    clients, test = clients_and_test(federation)
    settings = {"train": {"rounds": 1, "on_bad_update": "drop"}, "engine": {"workers": workers, "threads": 1}}
    sentence = (
        r"^there is not enough memory.* for client \d \(tier .*\) in round 1: set train\.micro_batch .*train\.batch"
    )
    with pytest.raises(NotEnoughMemoryError, match=sentence):
        fedhm.run(small_model(), clients, test, settings, tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()  # no round is done: the folder is free again


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("fedhm.data.convert._in_memory", "to read the data: give fewer samples"),
        ("fedhm.assembly.TaskFacts", r"to prepare the networks of the tiers: choose a smaller model.*model\.width"),
        ("fedhm.server.evaluation.evaluate_tiers", r"for the server's part of a round: lower engine\.workers"),
        ("fedhm.work.evaluate.evaluate", r"to evaluate the tiers: lower evaluation\.batch"),
    ],
)
def test_the_sentence_is_about_the_place(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, place: str, sentence: str
) -> None:
    monkeypatch.setattr(place, fail_with(RuntimeError("could not create a primitive")))
    clients, test = clients_and_test(federation)
    with pytest.raises(NotEnoughMemoryError, match=f"there is not enough memory {sentence}"):
        fedhm.run(small_model(), clients, test, {"train": {"rounds": 1}, "engine": {"threads": 1, "workers": 1}})


@pytest.mark.parametrize("place", ["assembly", "server.facts"])
def test_a_trial_of_the_model_does_not_hide_the_lack_of_memory(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(f"fedhm.{place}.find_self_written", fail_with(MemoryError()))
    monkeypatch.setattr("fedhm.server.facts.untrained_names", lambda _: frozenset({"x"}))
    clients, test = clients_and_test(federation)
    with pytest.raises(NotEnoughMemoryError):
        fedhm.run(small_model(), clients, test, {"train": {"rounds": 1}, "engine": {"threads": 1, "workers": 1}})


def test_a_worker_that_has_no_memory_for_its_answer_ends_quietly(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedhm.engines.workers.decode_task", fail_with(MemoryError()))
    clients, test = clients_and_test(federation)
    with pytest.raises(FedhmError, match=r"there may not be enough memory for 2 workers, then set engine\.workers"):
        fedhm.run(small_model(), clients, test, {"train": {"rounds": 1}, "engine": {"threads": 1, "workers": 2}})
    assert "Traceback" not in capfd.readouterr().err


def test_the_command_line_says_it_and_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedhm.report.save_report", fail_with(MemoryError()))
    monkeypatch.setattr(LocalEngine, "run", LocalEngine._run_here)
    settings = ["train.rounds=1", "train.epochs=1", "federation.clients=4", "data.train_samples=80", "engine.threads=1"]
    assert main(["run", "digits", "--set", *settings, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fedhm: there is not enough memory to go on: lower engine.workers, train.batch or")
    assert said.endswith(f"'fedhm resume {tmp_path}/run' resumes from the last complete round\n")
    monkeypatch.setattr("fedhm.assembly.load_federation", fail_with(MemoryError()))
    assert main(["run", "digits", "--out", str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err == "fedhm: there is not enough memory to read the data: lower data.train_samples\n"


def test_a_node_of_flower_loses_its_own_updates_only() -> None:
    pytest.importorskip("flwr")
    from fedhm.flower.clients import _replies
    from fedhm.networks.spec import NetworkSpec
    from fedhm.work.messages import Task

    class Starved:
        networks = SimpleNamespace(device=CPU)

        def reply(self, _: Task) -> NoReturn:
            raise NotEnoughMemoryError("there is not enough memory for client 3")

    task = Task("train", 1, 3, "full", NetworkSpec("full"), {})
    for make in (Starved, fail_with(MemoryError())):
        (reply,) = _replies(make, 3, [task])  # type: ignore[arg-type]
        assert isinstance(reply, Failure)
        assert reply.client == 3
        assert reply.reason.startswith("there is not enough memory")


def run_with(limit: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that may map so many bytes."""
    return subprocess.run(
        [sys.executable, "-m", "fedhm", *arguments],
        capture_output=True,
        encoding="utf-8",
        check=False,
        preexec_fn=lambda: (
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        ),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the memory that is mapped")
def test_a_limit_below_what_torch_takes_is_said_before_it_is_imported() -> None:
    done = run_with(LEAST_FOR_TORCH - 1, "run", "digits")
    assert done.returncode == 1
    assert done.stderr == (
        "fedhm: there is not enough memory to load PyTorch: raise the limit; "
        "'ulimit -v' limits this process to 0.60 GB\n"
    )
    assert run_with(LEAST_FOR_TORCH - 1, "presets").returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the memory that is mapped")
@pytest.mark.parametrize("megabytes", [610, 680, 700, 720, 740, 780, 840, 900, 2000])
def test_at_no_limit_there_is_a_traceback(megabytes: int, tmp_path: Path) -> None:
    settings = ["train.rounds=1", "engine.workers=1", "engine.threads=1"]
    done = run_with(megabytes * 1_000_000, "run", "digits", "--set", *settings, "--out", tmp_path / "run")
    assert "Traceback" not in done.stderr
    # OpenBLAS, OpenMP and C++ may end a process by themselves, with a line of their own
    by_library = ("OpenBLAS error", "libgomp", "terminate called")
    assert done.returncode == 0 or done.stderr.startswith(("fedhm: there is not enough memory", *by_library))
