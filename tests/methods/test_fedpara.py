"""FedPara: factors are drawn once, trained, and averaged as they are."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_full
from fedhm.methods.fedpara import FedPara, FedParaConfig
from fedhm.methods.method import Setup, State
from fedhm.networks.exchange import exchanged_tensors, load
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Update


def start(method: FedPara, model: nn.Module) -> State:
    return method.start({name: t.clone() for name, t in exchanged_tensors(model).items()})


def test_everybody_gets_the_factors_and_the_dense_layers() -> None:
    model = small_model()
    method = FedPara(model, FedParaConfig(ratio=0))
    state = start(method, model)
    assert dict(method.plan) == {"3": 3, "7": 5}
    sent = [task.tensors for task in method.tasks(state, [Participant(0, method.tier), Participant(1, method.tier)], 1)]
    assert sent[0].keys() == sent[1].keys() == exchanged_tensors(method.network(method.spec(method.tier))).keys()
    assert "3.weight" not in sent[0]
    assert torch.equal(sent[0]["0.weight"], model[0].weight)
    assert torch.equal(sent[0]["7.bias"], model[7].bias)
    sizes = {name: tuple(t.shape) for name, t in sent[0].items() if name.startswith(("3.first", "7.second"))}
    assert sizes == {
        "3.first.x": (16, 3),
        "3.first.y": (8, 3),
        "3.first.t": (3, 3, 3, 3),
        "7.second.x": (24, 5),
        "7.second.y": (144, 5),
    }


def test_the_seed_of_the_run_decides_the_factors() -> None:
    model = small_model()
    first, same, other = (start(FedPara(model, FedParaConfig(), Setup(seed=seed)), model).weights for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["7.first.x"], other["7.first.x"])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_merging_is_the_plain_mean_of_the_factors(weighting: str) -> None:
    model = small_model()
    method = FedPara(model, FedParaConfig.model_validate({"weighting": weighting}), Setup("9"))
    state = start(method, model)
    moved = [{name: t + 0.1 * torch.randn_like(t) for name, t in state.weights.items()} for _ in range(3)]
    shares = torch.tensor([1.0, 1.0, 1.0] if weighting == "uniform" else [5.0, 1.0, 2.0])
    updates = [
        Update("train", 1, client, method.tier, NetworkSpec(method.tier), tensors, samples, None, 0.1)
        for client, (tensors, samples) in enumerate(zip(moved, (5, 1, 2), strict=True))
    ]
    merged = method.merge(state, iter(updates), 1).weights
    for name, tensor in merged.items():
        expected = sum(share * tensors[name] for share, tensors in zip(shares / shares.sum(), moved, strict=True))
        torch.testing.assert_close(tensor, expected)
    # rows of labels that nobody holds keep their value, as with every method
    partial = Update("train", 1, 0, method.tier, NetworkSpec(method.tier), moved[0], 1, (0, 1), 0.1)
    rows = method.merge(state, iter([partial]), 1).weights["9.weight"]
    assert torch.equal(rows, torch.cat([moved[0]["9.weight"][:2], state.weights["9.weight"][2:]]))


def test_it_learns(federation: Federation) -> None:
    sections: dict[str, dict[str, object]] = {"train": {"rounds": 8, "epochs": 3}, "evaluation": {"every": 8}}
    config = small_config(method={"name": "fedpara", "ratio": 0.2}, **sections)
    result = assemble(small_model(), federation, config).run()
    assert result.metrics["fedpara-0.2"].accuracy > 0.85


def test_the_cost_is_less_on_the_wire_and_the_same_in_macs(federation: Federation) -> None:
    costs = {}
    for method in ("fedpara", "fedavg"):
        experiment = assemble(small_model(), federation, small_config(method={"name": method}))
        (costs[method],) = experiment.costs.values()
    assert costs["fedpara"].macs == costs["fedavg"].macs
    assert costs["fedpara"].bytes < 0.6 * costs["fedavg"].bytes
    assert costs["fedpara"].parameters < 0.6 * costs["fedavg"].parameters


@pytest.mark.usefixtures("without_figures")
def test_an_interrupted_run_goes_on_and_its_model_is_loaded(federation: Federation, tmp_path: Path) -> None:
    settings = {"method": {"name": "fedpara"}, "train": {"rounds": 3, "batch": 8}, "engine": {"threads": 1}}
    first = fedhm.run(small_model(), federation.clients, federation.test, settings, tmp_path)
    max((tmp_path / "checkpoints").iterdir()).unlink()  # as if the last round had not been finished
    again = fedhm.run(small_model(), federation.clients, federation.test, settings, tmp_path)
    saved = fedhm.load_tier(tmp_path / "models" / "fedpara-0.1.safetensors", small_model(seed=5))
    full = load(small_model(seed=5), {n: t for n, t in to_full(saved).items() if t.is_floating_point()}).eval()
    batch = torch.rand(2, 1, 6, 6)
    assert torch.equal(saved(batch), first.networks["fedpara-0.1"].eval()(batch))
    assert torch.equal(saved(batch), again.networks["fedpara-0.1"].eval()(batch))
    torch.testing.assert_close(saved(batch), full(batch))


def test_a_model_with_nothing_to_compose_is_an_error() -> None:
    with pytest.raises(FedhmError, match=r"nothing to compose(.|\n)*the classifier"):
        FedPara(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), FedParaConfig())
    with pytest.raises(FedhmError, match=r"one network, 'fedpara-0\.1', not 'full'"):
        FedPara(small_model(), FedParaConfig()).network(FedPara(small_model(), FedParaConfig()).spec("full"))
