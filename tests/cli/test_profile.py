"""`fedhm profile`: a device file that a plan can be made with."""

from pathlib import Path

import pytest

import fedhm
from fedhm.cli import main
from fedhm.cli.profile import modes_to_measure
from fedhm.config.schema import TrainConfig, read_profile
from fedhm.measure.fit import TrainingMode

SMALL = ["--set", "method.tiers=[1/8]", "train.batch=8", "engine.threads=1"]


@pytest.mark.slow
def test_a_device_is_measured_and_its_file_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "device.json"
    given = ["--up", "10Mbit", "--down", "2MB/s", "--memory", "64MB", "--name", "here"]
    assert main(["profile", "digits", "--out", str(file), *given, *SMALL]) == 0
    assert "2 of 2: 1/8, micro-batches of 2" in capsys.readouterr().out
    found = read_profile(file)
    assert (found.name, found.up, found.down, found.memory, found.batch) == ("here", 1.25e6, 2e6, 64_000_000, 8)
    assert [(step.network, step.micro_batch) for step in found.steps] == [("1/8", 0), ("1/8", 2)]
    assert all(step.seconds > 0 for step in found.steps)
    changes = [*SMALL[1:], f'federation.devices=[{{name="d", share=1, file="{file}"}}]']
    experiment = fedhm.prepare(fedhm.load_config("digits", changes))
    assert set(experiment.config.federation.plan) == {"1/8"}


def test_all_that_a_plan_may_choose_is_measured() -> None:
    train, both = TrainConfig(batch=64), (TrainingMode(16), TrainingMode(16, True))
    assert list(modes_to_measure(train, True, TrainingMode())) == [TrainingMode(), TrainingMode(0, True), *both]
    assert list(modes_to_measure(train, False, TrainingMode())) == [TrainingMode(), TrainingMode(16)]
    assert list(modes_to_measure(train, True, TrainingMode(32, True))) == [
        TrainingMode(),
        TrainingMode(0, True),
        *both,
        TrainingMode(32, True),
    ]
    asked = train.model_copy(update={"micro_batch": 8})
    assert list(modes_to_measure(asked, False, TrainingMode(8))) == [TrainingMode(), TrainingMode(8)]
    assert list(modes_to_measure(TrainConfig(batch=2), False, TrainingMode())) == [TrainingMode()]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--up", "fast"], "--up: 'fast' is no rate"),
        (["--memory", "-1MB"], "--memory: '-1MB' is no size"),
        (["--set", "method.name=fedmd"], "fedmd needs public samples"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "digits", "--out", str(tmp_path / "d.json"), *arguments]) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "d.json").exists()


def test_what_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out, sentence in (
        (tmp_path, "it is a folder; name a file"),
        (tmp_path / "file" / "d.json", "is a file; choose"),
    ):
        assert main(["profile", "digits", "--out", str(out)]) == 1
        captured = capsys.readouterr()
        assert sentence in captured.err
        assert not captured.out
