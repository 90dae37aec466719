"""The server needs no test set: metrics are then those of the clients' test samples together."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble, read_federation
from fedhm.data.federation import ClientTests, Federation, hold_out_client_tests
from fedhm.errors import FedhmError
from fedhm.report.tables import report_markdown
from fedhm.runs.history import read_runs
from test_experiment import same

SETTINGS = {
    "train": {"rounds": 2, "lr": 0.1, "batch": 8},
    "method": {"tiers": [1, "1/4"]},
    "engine": {"threads": 1, "server_threads": 1},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    y = (x @ torch.randn(8, 3, generator=torch.Generator().manual_seed(2))).argmax(1)
    return [(x[i::5], y[i::5]) for i in range(5)]


@pytest.mark.usefixtures("without_figures")
def test_a_fifth_of_every_clients_samples_tells_how_well_it_goes(tmp_path: Path) -> None:
    result = fedhm.run(model(), clients(), config=SETTINGS, out=tmp_path / "run")
    assert result.metrics == {tier: found.overall.pooled for tier, found in result.clients.items()}
    assert result.clients["1/4"].overall.samples == 20
    (run,) = read_runs([tmp_path / "run"])
    assert "accuracy and loss: on the clients' own test samples, all together." in report_markdown([run])
    again = fedhm.run(model(), clients(), config=SETTINGS, out=tmp_path / "run")  # it is complete
    assert again.metrics == result.metrics
    with pytest.raises(FedhmError, match="belongs to another run"):
        fedhm.run(model(), clients(), config=SETTINGS, out=tmp_path / "run", client_test=0.3)


def test_nobody_to_evaluate_is_one_sentence() -> None:
    for options in ({"client_test": 0}, {"client_test": [None] * 5}):
        with pytest.raises(FedhmError, match="there is nothing to evaluate on: give the server test samples, or"):
            fedhm.run(model(), clients(), config=SETTINGS, **options)
    alone = [(x[:1], y[:1]) for x, y in clients()]
    with pytest.raises(FedhmError, match="there is nothing to evaluate on"):
        fedhm.run(model(), alone, config=SETTINGS)


def test_the_servers_test_set_changes_metrics_only(federation: Federation) -> None:
    left, tests = hold_out_client_tests(federation.clients, 0.2, 0)
    whole = replace(federation, clients=left, client_tests=tests)
    with_test = assemble(small_model(), whole, small_config()).run()
    without = assemble(small_model(), replace(whole, test=None), small_config()).run()
    assert same(with_test, without)
    assert with_test.clients == without.clients
    assert without.metrics == {tier: found.overall.pooled for tier, found in with_test.clients.items()}
    assert with_test.metrics != without.metrics


def test_samples_that_do_not_go_together_are_told_by_the_first_clients() -> None:
    odd = [*clients()[:4], (torch.zeros(4, 7), torch.zeros(4))]
    with pytest.raises(FedhmError, match=r"client 4 has inputs of shape \(7,\) .*, client 0 of shape \(8,\)"):
        fedhm.run(model(), odd, config=SETTINGS)


def test_a_config_says_that_the_server_has_none() -> None:
    config = fedhm.load_config("digits", ["data.test=false", "data.train_samples=200"])
    assert config.data is not None
    assert config.data.client_test == 0.2
    federation = read_federation(config)
    assert federation.test is None
    assert federation.client_tests.count(0) == 2
    assert federation.input_shape == (1, 8, 8)
    chosen = fedhm.load_config("digits", ["data.test=false", "data.client_test=0.5"])
    assert chosen.data is not None
    assert chosen.data.client_test == 0.5
    validated = fedhm.load_config("digits", ["data.test=false", "data.client_test=0", "data.validation=0.1"])
    assert read_federation(validated).test is not None
    assert read_federation(validated).client_tests == ClientTests()
    with pytest.raises(FedhmError, match=r"data: test = false and client_test = 0 leave nothing to evaluate on"):
        fedhm.load_config("digits", ["data.test=false", "data.client_test=0"])
    # what is written is read back the same
    assert fedhm.config.loading.parse_resolved(chosen.resolved().to_toml(), "x").data == chosen.resolved().data
