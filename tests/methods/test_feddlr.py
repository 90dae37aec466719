"""FedDLR against its formulas, and against FedAvg where nothing is cut off."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.layers import largest_rank
from fedhm.lowrank.svd import unroll
from fedhm.measure.cost import measure
from fedhm.methods.feddlr import Factored, FedDLR, FedDLRConfig
from fedhm.methods.method import Setup, State
from fedhm.networks.exchange import Tensors, exchanged_tensors, load, size_in_bytes
from fedhm.networks.spec import NetworkSpec
from fedhm.report.result import Result
from fedhm.work.messages import Participant, Update

LAYERS = ("3", "7")


def start(method: FedDLR, model: nn.Module) -> State:
    return method.start({name: t.clone() for name, t in exchanged_tensors(model).items()})


def truncated(weight: torch.Tensor, rank: int) -> torch.Tensor:
    """The best approximation of this rank to an unrolled weight."""
    U, spectrum, Vt = torch.linalg.svd(unroll(weight))
    return U[:, :rank] @ torch.diag(spectrum[:rank]) @ Vt[:rank]


def test_what_travels_is_the_truncated_decomposition() -> None:
    model = small_model().double()
    method = FedDLR(model, FedDLRConfig(tier=0.25))
    state = start(method, model)
    (task,) = method.tasks(state, [Participant(0, "1/4")], 1)
    hybrid = to_hybrid(model, method.form.plan)
    assert {name: t.shape for name, t in task.tensors.items()} == {
        n: t.shape for n, t in exchanged_tensors(hybrid).items()
    }
    network = load(method.network(method.spec("1/4")), task.tensors)
    assert dict(method.form.plan) == {"3": 4, "7": 6}
    for layer, rank in method.form.plan.items():
        recovered = unroll(network.get_submodule(layer).weight)
        torch.testing.assert_close(recovered, truncated(model.get_submodule(layer).weight, rank))
    assert torch.equal(network[9].weight, model[9].weight)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_server_recovers_averages_and_factorizes_again(weighting: str) -> None:
    model = small_model().double()
    method = FedDLR(model, FedDLRConfig.model_validate({"tier": 0.25, "weighting": weighting}), Setup("9"))
    state = start(method, model)
    trained: list[Tensors] = []
    updates: list[Update] = []
    for client, samples in enumerate((3, 1, 4)):
        full = load(method.network(method.spec("1/4")), state.packed)
        with torch.no_grad():
            for parameter in full.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        trained.append({name: t.clone() for name, t in full.state_dict().items()})
        updates.append(
            Update("train", 1, client, "1/4", NetworkSpec("1/4"), exchanged_tensors(full), samples, None, 0.1)
        )
    merged = method.merge(state, iter(updates), 1)
    shares = torch.tensor([1.0, 1.0, 1.0] if weighting == "uniform" else [3.0, 1.0, 4.0], dtype=torch.float64)
    shares /= shares.sum()
    network = load(method.network(method.spec("1/4")), merged.packed)
    for layer, rank in method.form.plan.items():
        mean = sum(a * truncated(t[f"{layer}.weight"], rank) for a, t in zip(shares, trained, strict=True))
        U, spectrum, Vt = torch.linalg.svd(mean)
        assert spectrum[rank] > 1e-3  # the mean of truncated models has a higher rank than they
        expected = (U[:, :rank] * spectrum[:rank]) @ Vt[:rank]
        torch.testing.assert_close(unroll(network.get_submodule(layer).weight), expected)
    for name in ("0.weight", "4.bias", "9.weight"):
        expected = sum(a * t[name] for a, t in zip(shares, trained, strict=True))
        torch.testing.assert_close(network.state_dict()[name], expected)


def run(federation: Federation, model: nn.Module, **sections: dict[str, object]) -> Result:
    return assemble(model, federation, small_config(**sections)).run()


def test_at_ratio_1_it_is_fedavg_bit_for_bit(federation: Federation) -> None:
    feddlr, fedavg = (
        run(federation, small_model(), method={"name": name, "tier": 1}, train={"rounds": 3})
        for name in ("feddlr", "fedavg")
    )
    states = [result.networks["full"].state_dict() for result in (feddlr, fedavg)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert feddlr.metrics == fedavg.metrics
    assert feddlr.costs == fedavg.costs


def test_factors_of_full_rank_end_where_fedavg_does(federation: Federation) -> None:
    experiment = assemble(small_model(), federation, small_config(method={"name": "feddlr", "tier": 1}))
    method = experiment.method
    assert isinstance(method, FedDLR)
    model = small_model()
    method.form = Factored({layer: largest_rank(model.get_submodule(layer).weight.shape) for layer in LAYERS})
    assert {"3.u", "7.v"} <= set(start(method, model).packed)
    state = experiment.run().networks["full"].state_dict()
    for name, tensor in run(federation, small_model(), method={"name": "fedavg"}).networks["full"].state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-4)


def test_bytes_are_those_of_the_factors_macs_those_of_the_full_model(federation: Federation) -> None:
    result = run(federation, small_model(), method={"name": "feddlr", "tier": "1/4"})
    model = small_model()
    cost, full = result.costs["1/4"], measure(model, (1, 6, 6))
    assert (cost.parameters, cost.macs) == (full.parameters, full.macs)
    factors = 4 * (4 * 3 * (8 + 16) + 6 * (144 + 24))
    dense = full.bytes - 4 * (16 * 8 * 9 + 144 * 24)
    assert cost.bytes == dense + factors
    running = 4 * 2 * (8 + 16)  # static batch normalisation: they stay at home
    for record in result.records:
        traffic = record.traffic["1/4"]
        assert traffic.down == traffic.up == traffic.clients * (cost.bytes - running)
        assert traffic.macs == traffic.clients * full.macs * 20
        assert record.statistics.down == record.statistics.clients * (cost.bytes - running)


def test_it_learns(federation: Federation) -> None:
    sections: dict[str, dict[str, object]] = {"train": {"rounds": 8, "epochs": 3}, "evaluation": {"every": 8}}
    result = run(federation, small_model(), method={"name": "feddlr"}, **sections)
    assert result.metrics["1/4"].accuracy > 0.85
    # what is evaluated is what clients get
    for layer, rank in {"3": 4, "7": 6}.items():
        weight = result.networks["1/4"].get_submodule(layer).weight.detach()
        assert torch.linalg.matrix_rank(unroll(weight), rtol=1e-5) == rank


def test_running_averages_travel_where_they_are_used(federation: Federation) -> None:
    result = run(federation, small_model(), method={"name": "feddlr"}, evaluation={"static_from": "never"})
    assert result.records[0].traffic["1/4"].down == 4 * result.costs["1/4"].bytes
    assert result.networks["1/4"][1].running_mean.any()


@pytest.mark.usefixtures("without_figures")
def test_an_interrupted_run_goes_on_and_its_model_is_loaded(federation: Federation, tmp_path: Path) -> None:
    settings = {"method": {"name": "feddlr"}, "train": {"rounds": 3, "batch": 8}, "engine": {"threads": 1}}
    first = fedhm.run(small_model(), federation.clients, federation.test, settings, tmp_path)
    max((tmp_path / "checkpoints").iterdir()).unlink()  # as if the last round had not been finished
    again = fedhm.run(small_model(), federation.clients, federation.test, settings, tmp_path)
    saved = fedhm.load_tier(tmp_path / "models" / "1-4.safetensors", small_model(seed=5))
    batch = torch.rand(2, 1, 6, 6)
    assert torch.equal(saved(batch), first.networks["1/4"].eval()(batch))
    assert torch.equal(saved(batch), again.networks["1/4"].eval()(batch))


def test_its_model_can_start_another_run(federation: Federation) -> None:
    model = run(federation, small_model(), method={"name": "feddlr"}).networks["1/4"]
    assert exchanged_tensors(model).keys() == exchanged_tensors(small_model()).keys()
    further = run(federation, model, method={"name": "fedhm"}, train={"rounds": 1})
    assert further.costs["full"].bytes == size_in_bytes(exchanged_tensors(small_model()))


def test_a_client_that_diverges_is_refused_for_its_loss(federation: Federation) -> None:
    with pytest.raises(FedhmError, match=r"in round 1 cannot be used: its loss became NaN; lower train\.lr"):
        run(federation, small_model(), method={"name": "feddlr"}, train={"lr": 1e30})


def test_a_layer_that_is_used_twice_travels_once() -> None:
    shared = nn.Linear(24, 24)
    model = nn.Sequential(nn.Linear(6, 24), shared, nn.ReLU(), shared, nn.Linear(24, 3))
    method = FedDLR(model, FedDLRConfig(tier=0.25))
    state = start(method, model)
    assert {name for name in state.packed if name.startswith(("1.", "3."))} == {"1.u", "1.v", "1.bias"}
    network = load(method.network(method.spec("1/4")), state.packed)
    assert network[1] is network[3]
    assert exchanged_tensors(network).keys() == state.packed.keys()


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(FedhmError, match="nothing to factorize for tier 1/4"):
        FedDLR(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), FedDLRConfig())
    with pytest.raises(FedhmError, match="one network, '1/4', not 'full'"):
        FedDLR(small_model(), FedDLRConfig()).network(FedDLR(small_model(), FedDLRConfig()).spec("full"))
