"""Steps that are measured in processes of their own: what they say, and how they end."""

import resource
import signal
import subprocess
import sys

import pytest

import fedhm
from fedhm.cli.probe import measure_step, mode_of, ran_out_of_memory, with_mode
from fedhm.errors import FedhmError
from fedhm.measure.fit import TrainingMode

CONFIG = fedhm.load_config("digits", ["train.batch=8", "engine.threads=1"]).resolved()


def test_settings_have_the_mode_that_is_measured() -> None:
    for mode in (TrainingMode(), TrainingMode(4), TrainingMode(0, True), TrainingMode(4, True)):
        assert mode_of(with_mode(CONFIG, mode).train) == mode
    named = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"checkpointing": ("a", "b")})})
    assert with_mode(named, TrainingMode(0, True)).train.checkpointing == ("a", "b")


@pytest.mark.slow
def test_a_version_is_measured_by_its_ranks() -> None:
    found = measure_step(CONFIG, "it", ranks={"conv2": 3, "conv3": 2}, form="spatial")
    assert found is not None
    assert found["seconds"] > 0
    with pytest.raises(FedhmError, match=r"^training it fails on this device: .*rank 9999 is impossible"):
        measure_step(CONFIG, "it", ranks={"conv2": 9999}, form="spatial")


@pytest.mark.slow
def test_want_of_memory_is_told_from_other_ends() -> None:
    program = "import torch; torch.empty(2**40)"
    limited = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34)),
    )
    assert ran_out_of_memory(limited.returncode, limited.stderr)
    assert ran_out_of_memory(-signal.SIGKILL, "")
    assert not ran_out_of_memory(-signal.SIGSEGV, "")
    assert not ran_out_of_memory(1, "ValueError: no")
    assert not ran_out_of_memory(0, "MemoryError in a warning")
