"""What would break the promise is refused before a run starts, in sentences that say what to set."""

import builtins
import math
import re
from typing import Any

import pytest
import torch
from private_runs import ByHand, normal_federation, plain_model, private_config

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.config.loading import parse
from fedhm.config.schema import LEAST_NOISE, PrivacyConfig, ServerConfig
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.machine.extras import how_to_install
from fedhm.server.filters.privacy import check_privacy, epsilon

SERVER_ONLY = {"clip": 1.0, "noise": 1.0, "where": "server"}
LOCAL = {"clip": 1.0, "noise": 1.0, "where": "client"}


def refusal(model: torch.nn.Module | None = None, **sections: dict[str, Any]) -> str:
    with pytest.raises(FedhmError) as caught:
        assemble(model or plain_model(), normal_federation(), private_config(**sections))
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"name": "fedhm"}, "method.aggregate = 'bands' averages a band over the few .*: set 'updates'"),
        ({"name": "fedhm", "aggregate": "models"}, "method.aggregate = 'models' counts .*: set 'updates'"),
        ({"name": "fedhm", "aggregate": "updates", "weighting": "samples"}, "weighting = 'samples' .*: set 'uniform'"),
        ({"name": "fedhm", "aggregate": "updates", "weighting": "softmax"}, "weighting = 'softmax' .*: set 'uniform'"),
        ({"name": "fedavg", "weighting": "samples"}, "method.weighting = 'samples' counts some clients more"),
        ({"name": "heterofl"}, "'heterofl' does not move its model by a plain mean of changes: choose fedhm or fedavg"),
        ({"name": "fedrolex"}, "'fedrolex' does not move"),
        ({"name": "fjord"}, "'fjord' does not move"),
        ({"name": "splitmix"}, "'splitmix' does not move"),
        ({"name": "feddlr"}, "'feddlr' does not move"),
    ],
)
def test_means_without_a_bound(method: dict[str, object], said: str) -> None:
    assert re.search(said, refusal(method=method))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"masked_loss": True}}, "train.masked_loss = true"),
        ({"train": {"masked_loss": False, "on_bad_update": "stop"}}, "set it to 'drop'"),
        ({"federation": {"min_updates": 2}}, "federation.min_updates > 1"),
    ],
)
def test_settings_that_go_around_the_noise(sections: dict[str, Any], said: str) -> None:
    for privacy in (SERVER_ONLY, LOCAL):
        assert said in refusal(**sections, privacy=privacy)


def test_rules_that_look_at_all_clients() -> None:
    class Guarded(ServerConfig):
        robust: str = "median"

    config = private_config().resolved().model_copy(update={"server": Guarded()})
    with pytest.raises(FedhmError, match=r"server\.robust = 'median' judges an update by those of other clients"):
        check_privacy(config, normal_federation(), normalised=False, tests=False)


def test_statistics_in_the_clear() -> None:
    assert "evaluation.static_from = 'never'" in refusal(small_model())
    config = private_config(evaluation={"static_from": "never"})
    assert assemble(small_model(), normal_federation(), config).filters.privacy is not None


def test_all_that_is_wrong_is_said_at_once() -> None:
    said = refusal(small_model(), method={"name": "fedhm"}, train={"masked_loss": True}).splitlines()
    assert len(said) == 3
    assert all(line.startswith("[privacy]: ") for line in said)


def test_stopping_by_metrics_of_clients() -> None:
    there = normal_federation()
    clients = [(samples.inputs, samples.labels) for samples in there.clients]
    table = {
        "privacy": {"clip": 1.0}, "method": {"name": "fedavg"}, "train": {"masked_loss": False}, "stop": {"patience": 2}
    }  # fmt: skip
    with pytest.raises(FedhmError, match=r"\[stop\] would end the run by metrics of the clients' own samples"):
        fedhm.run(plain_model(), clients, None, table)
    assert there.test is not None
    held = parse({**table, "data": {"validation": 0.2}, "engine": {"threads": 1}}, "test")
    with pytest.raises(FedhmError, match=r"\[stop\] would end the run"):
        assemble(plain_model(), there, held)
    with_a_test_set = parse({**table, "engine": {"threads": 1}}, "test")
    assert assemble(plain_model(), there, with_a_test_set).filters.privacy is not None


def test_pixels_whose_mean_is_taken_in_the_clear(federation: Federation) -> None:
    config = private_config(evaluation={"static_from": "never"})
    with pytest.raises(FedhmError, match="give floating-point inputs that you have normalised yourself"):
        assemble(small_model(), federation, config)


def test_local_noise_refuses_what_a_client_would_send_without_it() -> None:
    assert "set it to 0" in refusal(privacy=LOCAL, train={"masked_loss": False, "max_change": 10.0})
    assert "data.validation" in refusal(privacy=LOCAL, data={"validation": 0.2})
    by_samples = {"name": "fedavg", "weighting": "samples"}
    assert "method.weighting = 'samples' counts a client by its" in refusal(privacy=LOCAL, method=by_samples)
    there = normal_federation()
    clients = [(samples.inputs, samples.labels) for samples in there.clients]
    table = {"privacy": LOCAL, "method": {"name": "fedavg"}, "train": {"masked_loss": False, "max_change": 0}}
    with pytest.raises(FedhmError, match="evaluation at clients sends metrics without noise"):
        fedhm.run(plain_model(), clients, (there.test.inputs, there.test.labels), table, client_test=0.2)  # type: ignore[union-attr]


def test_local_noise_covers_one_network_for_each_client() -> None:
    config = private_config(privacy=LOCAL, method={"name": "splitmix", "tiers": [3, 1]})
    experiment = assemble(plain_model(), normal_federation(), config, ByHand(lambda task: dict(task.tensors)))
    with pytest.raises(FedhmError, match="more than one network that they trained"):
        experiment.run()


def test_noise_needs_a_bound() -> None:
    with pytest.raises(FedhmError, match=r"set privacy\.clip, too"):
        small_config(privacy={"noise": 1.0})
    with pytest.raises(FedhmError, match=r"noise = 1e-200 hides nothing: set 1e-06 or more, or 0 for none"):
        small_config(privacy={"clip": 1.0, "noise": 1e-200})
    assert math.isfinite(epsilon(PrivacyConfig(clip=1.0, noise=LEAST_NOISE), 0.5, 10**6))
    for wrong in ({"clip": -1}, {"delta": 0}, {"delta": 1}, {"where": "cloud"}, {"clip": float("inf")}):
        with pytest.raises(FedhmError, match="privacy"):
            small_config(privacy=wrong)


def test_without_an_accountant_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert refusal() == "privacy.noise needs the package dp-accounting: " + how_to_install("privacy")
