"""`engine.client = "executorch"`: a federation whose clients train in the runtime, against the same in PyTorch."""

import pytest

import fedhm
from fedhm.config.loading import load_config
from fedhm.errors import FedhmError
from fedhm.experiment import Result

pytest.importorskip("executorch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHORT = [
    *("train.rounds=3", "model.width=0.25", "federation.clients=4", "federation.participation=1.0"),
    *("data.train_samples=300", "method.tiers=[1, 1/8]", "engine.threads=1", "evaluation.every=1"),
]


def run(*changes: str) -> Result:
    return fedhm.prepare(load_config("digits", [*SHORT, *changes])).run()


@pytest.fixture(scope="module")
def in_pytorch() -> Result:
    return run("engine.workers=1")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["engine.workers=1"], id="all"),
        pytest.param(["engine.workers=2", "engine.executorch_clients=[0, 1]"], id="half, in workers"),
    ],
)
def test_losses_agree_to_rounding(changes: list[str], in_pytorch: Result) -> None:
    """Tiers with and without a smaller tier inside, BatchNorm, clipping, both decays, masked losses, momentum."""
    found = run("engine.client=executorch", *changes)
    for record, expected in zip(found.records, in_pytorch.records, strict=True):
        for tier, metrics in record.metrics.items():
            assert metrics.loss == pytest.approx(expected.metrics[tier].loss, rel=2e-3)
    # it is not PyTorch that trained
    weights = [result.networks["1/8"].state_dict()["fc.weight"] for result in (found, in_pytorch)]
    assert not weights[0].equal(weights[1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["train.optimizer=adamw"], "^engine.client = 'executorch' needs train.optimizer = 'sgd'"),
        (["train.precision=bf16"], "needs train.precision = 'float32'"),
        (["train.micro_batch=4"], "needs train.micro_batch = 0"),
        (["train.frozen_statistics=true"], "needs train.frozen_statistics = false"),
        (["evaluation.diagnostics=theory"], "measures no steps"),
        (["engine.executorch_clients=[7]"], "names client 7, and there are 4, from 0"),
    ],
)
def test_settings_that_it_cannot_follow_are_refused(changes: list[str], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        fedhm.prepare(load_config("digits", [*SHORT, "engine.client=executorch", *changes]))


def test_some_clients_need_the_runtime_named() -> None:
    with pytest.raises(FedhmError, match=r"executorch_clients are for engine\.client"):
        load_config("digits", ["engine.executorch_clients=[1]"])


def test_other_kinds_of_work_are_refused() -> None:
    changes = ["engine.client=executorch", "method.name=fedmd", "data.public=held-out", "engine.workers=1"]
    small = [each for each in SHORT if not each.startswith("method")]
    with pytest.raises(FedhmError, match=r"engine\.client = 'executorch'"):
        fedhm.prepare(load_config("digits", [*small, *changes])).run()
