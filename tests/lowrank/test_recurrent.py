"""Embeddings and recurrent layers: factorized, recovered, copied, trained inside larger tiers, and measured."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import NestedTiers, plan_of, to_full, to_hybrid
from fedhm.lowrank.layers import LowRankEmbedding, LowRankRecurrent
from fedhm.lowrank.plan import plan_ranks
from fedhm.measure.cost import measure, training_memory
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.structure import copy_network

TIGHT = {"rtol": 0, "atol": 1e-10}
KINDS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Tagger(nn.Module):
    def __init__(self, kind: str, **options: object) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12, padding_idx=0)
        self.layers = KINDS[kind](12, 16, batch_first=True, **options)
        outputs = options.get("proj_size") or 16
        assert isinstance(outputs, int)
        self.fc = nn.Linear(2 * outputs if options.get("bidirectional") else outputs, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.layers(self.words(tokens))[0][:, -1])
        return scores


OPTIONS: list[tuple[str, dict[str, object]]] = [
    ("lstm", {}),
    ("lstm", {"num_layers": 2, "bidirectional": True}),
    ("lstm", {"proj_size": 7, "bias": False}),
    ("gru", {"num_layers": 2, "dropout": 0.0}),
    ("gru", {"bidirectional": True}),
    ("rnn", {"nonlinearity": "relu"}),
]


def tokens(count: int = 3) -> Tensor:
    return torch.randint(0, 50, (count, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_a_hybrid_equals_its_recovered_network(kind: str, options: dict[str, object]) -> None:
    model = Tagger(kind, **options).double()
    plan = plan_ranks(model, 1 / 4)
    weights = [name for name, _ in model.layers.named_parameters() if name.startswith("weight")]
    assert list(plan) == ["words", *(f"layers.{name}" for name in weights)]
    hybrid = to_hybrid(model, plan)
    assert isinstance(hybrid.layers, KINDS[kind])  # type: ignore[arg-type]
    assert plan_of(hybrid) == plan
    shortened, x = hybrid(tokens()), tokens()
    full = to_full(hybrid)
    assert full.keys() == model.state_dict().keys()
    model.load_state_dict(full, strict=True)
    torch.testing.assert_close(model(x), shortened, **TIGHT)


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_at_full_rank_nothing_is_lost(kind: str, options: dict[str, object]) -> None:
    model = Tagger(kind, **options).double()
    ranks = {name: min(model.get_parameter(name).shape) for name in model.state_dict() if ".weight_" in name}
    hybrid = to_hybrid(model, {"words": 12, **ranks})
    torch.testing.assert_close(hybrid(tokens()), model(tokens()), **TIGHT)


def test_only_some_weights_of_a_layer_may_be_factorized() -> None:
    model = Tagger("lstm").double()
    hybrid = to_hybrid(model, {"layers.weight_hh_l0": 3})
    names = set(exchanged_tensors(hybrid))
    assert {"layers.weight_hh_l0.u", "layers.weight_hh_l0.v", "layers.weight_ih_l0", "layers.bias_hh_l0"} <= names
    assert "layers.weight_hh_l0" not in names
    model.load_state_dict(to_full(hybrid), strict=True)
    torch.testing.assert_close(model(tokens()), hybrid(tokens()), **TIGHT)


def test_wrong_names_of_recurrent_weights_are_refused() -> None:
    model = Tagger("gru")
    for name in ("layers", "layers.weight_ih_l1", "fc.weight"):
        with pytest.raises(FedhmError, match=f"factorizes '{name}', but the model has no such layer"):
            to_hybrid(model, {name: 2})
    with pytest.raises(FedhmError, match="rank 13 is impossible for layer 'layers"):
        to_hybrid(model, {"layers.weight_ih_l0": 13})


@pytest.mark.parametrize("copied", [copy_network, copy.deepcopy])
def test_copies_after_training_are_apart(copied: Callable[[nn.Module], nn.Module]) -> None:
    hybrid = to_hybrid(Tagger("lstm"), plan_ranks(Tagger("lstm"), 1 / 4))
    hybrid(tokens()).sum().backward()
    assert all(p.grad is not None for p in hybrid.parameters())
    before, other = hybrid(tokens()), copied(hybrid)
    torch.testing.assert_close(other(tokens()), before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    torch.testing.assert_close(hybrid(tokens()), before)


def test_the_row_for_padding_stays_zero() -> None:
    table = nn.Embedding(20, 8, padding_idx=3)
    layer = LowRankEmbedding(table, 2)
    assert not layer(torch.tensor([3])).any()
    layer(torch.arange(20)).sum().backward()
    assert layer.v.grad is not None
    assert not layer.v.grad[3].any()
    assert layer.v.grad[4].any()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings(mode: str) -> None:
    table = nn.EmbeddingBag(20, 8, mode=mode, padding_idx=1).double()
    model = nn.Sequential(table)
    hybrid = to_hybrid(model, {"0": 3})
    x, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 4])
    table.load_state_dict({"weight": to_full(hybrid)["0.weight"]})
    torch.testing.assert_close(hybrid[0](x, offsets), table(x, offsets), **TIGHT)  # type: ignore[index]
    torch.testing.assert_close(hybrid[0](x.view(2, 3)), table(x.view(2, 3)), **TIGHT)  # type: ignore[index]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (nn.Embedding(50, 16, max_norm=1.0), r"it rescales its rows itself \(max_norm\)"),
        (nn.Embedding(50, 16, sparse=True), "its gradients are sparse"),
        (nn.Embedding(50, 16, scale_grad_by_freq=True), "its gradients are sparse or scaled by frequency"),
        (nn.EmbeddingBag(50, 16, mode="max"), "it takes the maximum of its rows"),
    ],
)
def test_unusual_embeddings_stay_dense_with_the_reason(table: nn.Module, reason: str) -> None:
    with pytest.raises(FedhmError, match=f"must stay dense: {reason}"):
        to_hybrid(nn.Sequential(table), {"0": 2})


def test_neither_embeddings_nor_recurrent_layers_count_among_the_first() -> None:
    plan = plan_ranks(Tagger("lstm"), 1 / 4, keep=1, classifier=None)
    assert plan.dense == {"fc": "among the first 1 layers"}
    assert plan == {"words": 3, "layers.weight_ih_l0": 3, "layers.weight_hh_l0": 4}
    assert plan_ranks(Tagger("lstm"), 1 / 4, dense=["layers"]) == {"words": 3}


def test_a_recurrent_weight_with_two_owners_stays_dense_and_tied() -> None:
    model = nn.ModuleList([nn.LSTM(8, 8), nn.LSTM(8, 8)])
    model[1].weight_ih_l0 = model[0].weight_ih_l0
    plan = plan_ranks(model, 1 / 4)
    assert list(plan) == ["0.weight_hh_l0", "1.weight_hh_l0"]
    assert plan.dense["0.weight_ih_l0"] == plan.dense["1.weight_ih_l0"] == "its weight is tied to another layer's"
    hybrid = to_hybrid(model, plan)
    assert hybrid.get_parameter("0.weight_ih_l0") is hybrid.get_parameter("1.weight_ih_l0")


def test_smaller_tiers_train_inside_a_larger_one() -> None:
    model = Tagger("lstm").double()
    large, small = plan_ranks(model, 1 / 2, dense=["layers.weight_ih_l0"]), plan_ranks(model, 1 / 4)
    network, inner = to_hybrid(model, large), to_hybrid(model, small)
    assert "layers.weight_ih_l0" not in large
    left = torch.linalg.svd(model.get_parameter("layers.weight_ih_l0").T, full_matrices=False)[0]
    nested = NestedTiers([inner], [small])
    output = nested.forward(0, network, {"layers.weight_ih_l0": left}, tokens())
    torch.testing.assert_close(output, inner(tokens()), **TIGHT)
    output.sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    assert all(p.grad is None for p in inner.parameters())


def test_costs_are_those_of_the_factors() -> None:
    """MACs of recurrent layers stay: torch's kernel runs with the products. Factors of a table add their product."""
    model = Tagger("lstm")
    plan = plan_ranks(model, 1 / 4)
    hybrid = to_hybrid(model, plan)
    full, small = (measure(each, (7,), torch.int64) for each in (model, hybrid))
    saved = 50 * 12 - 3 * (50 + 12) + 64 * 12 - 3 * (64 + 12) + 64 * 16 - 4 * (64 + 16)
    assert full.parameters - small.parameters == saved
    assert small.bytes == 4 * small.parameters
    assert small.macs - full.macs == 7 * 3 * 12
    assert training_memory(hybrid, (7,), 4, torch.int64) > 0
    with torch.device("meta"):
        abstract = Tagger("lstm")
    assert measure(to_hybrid(abstract, plan, spectral=False), (7,), torch.int64) == small


def test_recurrent_layers_move_between_types_and_list_their_weights() -> None:
    hybrid = to_hybrid(Tagger("lstm"), plan_ranks(Tagger("lstm"), 1 / 4)).double()
    layer = hybrid.layers
    assert isinstance(layer, LowRankRecurrent)
    layer.flatten_parameters()
    assert [tuple(weight.shape) for weight in layer.all_weights[0]] == [(64, 12), (64, 16), (64,), (64,)]
    assert hybrid(tokens()).dtype == torch.float64
