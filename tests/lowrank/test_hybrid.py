import copy
from collections.abc import Callable, Mapping
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import plan_of, to_full, to_hybrid
from fedhm.lowrank.layers import LowRank, LowRankConv2d, LowRankLinear, PufferfishConv2d, largest_rank
from fedhm.lowrank.plan import RankPlan, plan_ranks
from fedhm.lowrank.svd import Form
from fedhm.models import cnn, resnet18

TIGHT = {"rtol": 0.0, "atol": 1e-10}


def plan_all(model: nn.Module, **options: object) -> RankPlan:
    """A quarter of the rank for every layer that can be factorized at all."""
    return plan_ranks(model, 1 / 4, keep=0, classifier=None, **options)  # type: ignore[arg-type]


def largest(model: nn.Module, plan: Mapping[str, int]) -> RankPlan:
    form = plan.form if isinstance(plan, RankPlan) else "spatial"
    return RankPlan({name: largest_rank(model.get_submodule(name).weight.shape, form) for name in plan}, form)


def check(model: nn.Module, run: Callable[[nn.Module], Tensor], plan: Mapping[str, int]) -> None:
    """What holds for every double-precision model that is factorized as `plan` says."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [(name, id(module)) for name, module in model.named_modules()]
    expected = run(model)
    assert plan, "nothing was factorized"

    whole = to_hybrid(model, largest(model, plan))
    assert plan_of(whole) == largest(model, plan)
    torch.testing.assert_close(run(whole), expected, **TIGHT)

    hybrid = to_hybrid(model, plan)
    assert plan_of(hybrid) == dict(plan)
    shortened = run(hybrid)
    assert (shortened - expected).abs().max() > 1e-6
    full = copy.deepcopy(model)
    assert all(not tensor.requires_grad for tensor in to_full(hybrid).values())
    full.load_state_dict(to_full(hybrid), strict=True)
    torch.testing.assert_close(run(full), shortened, **TIGHT)

    copied = copy.deepcopy(hybrid)
    assert torch.equal(run(copied), shortened)
    rebuilt = to_hybrid(model, plan_of(hybrid), spectral=False)
    rebuilt.load_state_dict(hybrid.state_dict(), strict=True)
    assert torch.equal(run(rebuilt), shortened)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(run(hybrid), shortened)

    assert [(name, id(module)) for name, module in model.named_modules()] == modules
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def on(*shape: int) -> Callable[[nn.Module], Tensor]:
    x = torch.randn(*shape, dtype=torch.float64)
    return lambda model: model(x)


@pytest.mark.parametrize("form", ["spatial", "pufferfish"])
def test_nested_containers(form: Form) -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, (3, 1), stride=2))),
        nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(8 * 3 * 4, 16), nn.Tanh()), nn.Linear(16, 8)),
    ).double()
    plan = plan_all(model, form=form)
    assert set(plan) == {"0.0", "0.1.1", "1.1.0", "1.2"}
    check(model, on(3, 2, 8, 8), plan)


@pytest.mark.parametrize("build", [lambda: cnn(4, 3, width=0.25), lambda: resnet18(4, width=0.125)])
@pytest.mark.parametrize("form", ["spatial", "pufferfish"])
def test_networks_of_the_library(build: Callable[[], nn.Module], form: Form) -> None:
    model = build().double().eval()
    check(model, on(2, 3, 16, 16), plan_ranks(model, 1 / 4, form=form))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(batch_first: bool, training: bool, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    plan = plan_all(model)
    assert set(plan) == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    assert plan.dense["layers.0.self_attn"] == "a MultiheadAttention, a type of layer that is not factorized"
    assert "whose owner may use its weight without calling it" in plan.dense["layers.0.self_attn.out_proj"]
    run = on(3, 5, 16)
    check(model, run, plan)
    kernel = "torch._transformer_encoder_layer_fwd"
    with torch.no_grad(), patch(kernel, wraps=torch._transformer_encoder_layer_fwd) as fast_path:
        check(model, run, plan)
    assert fast_path.called == (batch_first and not training)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_transformer_encoder_with_padding_uses_nested_tensors() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    with torch.no_grad(), patch("torch._nested_tensor_from_mask", wraps=torch._nested_tensor_from_mask) as nested:
        check(model, lambda model: model(x, src_key_padding_mask=padding), plan_all(model))
    assert nested.called


class Language(nn.Module):
    """Embedding and output share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.hidden = nn.Linear(12, 12)
        self.out = nn.Linear(12, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.hidden(self.embedding(tokens)).relu())


def test_weight_tied_to_an_embedding_stays_dense_and_tied() -> None:
    model = Language().double()
    plan = plan_all(model)
    assert plan == {"hidden": 3}
    assert plan.dense["out"] == "its weight is tied to another layer's"
    hybrid = to_hybrid(model, plan)
    assert hybrid.out.weight is hybrid.embedding.weight
    tokens = torch.arange(20).reshape(2, 10)
    check(model, lambda model: model(tokens), plan)
    with pytest.raises(FedhmError, match="factorizes 'out', but it must stay dense: its weight is tied"):
        to_hybrid(model, {"out": 3})


def test_convolutions_tied_to_each_other_stay_dense_and_tied() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))).double()
    model[2].weight = model[0].weight
    plan = plan_all(model)
    assert plan == {"1": 2}
    assert plan.dense["0"] == plan.dense["2"] == "its weight is tied to another layer's"
    hybrid = to_hybrid(model, plan)
    assert hybrid[2].weight is hybrid[0].weight
    check(model, on(2, 8, 5, 5), plan)


def test_a_shared_bias_stays_shared() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)).double()
    model[1].bias = model[0].bias
    hybrid = to_hybrid(model, {"0": 3, "1": 3})
    assert hybrid[1].bias is hybrid[0].bias
    assert hybrid[0].bias is not model[0].bias
    check(model, on(2, 12), {"0": 3, "1": 3})


class Recurrent(nn.Module):
    """One cell in a list twice, and once more under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        cell = nn.Linear(12, 12)
        self.steps = nn.ModuleList([cell, nn.Linear(12, 12), cell])
        self.last = cell

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x).relu()
        return self.last(x)


def test_a_shared_module_stays_one_module() -> None:
    model = Recurrent().double()
    plan = plan_all(model)
    assert plan == {"steps.0": 3, "steps.1": 3}
    hybrid = to_hybrid(model, plan)
    assert isinstance(hybrid.steps[0], LowRankLinear)
    assert hybrid.steps[0] is hybrid.steps[2] is hybrid.last
    assert {"steps.0.weight", "steps.2.weight", "last.weight"} <= to_full(hybrid).keys()
    check(model, on(2, 12), plan)


def test_a_shared_block_is_factorized_inside() -> None:
    block = nn.Sequential(nn.Linear(12, 12), nn.ReLU())
    model = nn.Sequential(block, nn.Linear(12, 12), block).double()
    plan = plan_all(model)
    assert set(plan) == {"0.0", "1"}
    hybrid = to_hybrid(model, plan)
    assert hybrid[0] is hybrid[2]
    check(model, on(2, 12), plan)


def test_root_linear() -> None:
    model = nn.Linear(12, 12).double()
    assert plan_ranks(model, 1 / 4, keep=0).dense == {"": "the classifier"}
    plan = plan_all(model)
    assert plan == {"": 3}
    assert isinstance(to_hybrid(model, plan), LowRankLinear)
    assert to_full(to_hybrid(model, plan)).keys() == {"weight", "bias"}
    check(model, on(2, 12), plan)


def test_root_convolution() -> None:
    model = nn.Conv2d(4, 8, 3, bias=False).double()
    plan = plan_all(model)
    assert plan == {"": 2}
    assert isinstance(to_hybrid(model, plan), LowRankConv2d)
    check(model, on(2, 4, 6, 6), plan)


def test_the_plan_decides_the_form() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 12)).double()
    plans = {form: plan_all(model, form=form) for form in ("spatial", "pufferfish")}
    kinds = {form: [type(layer) for layer in to_hybrid(model, plan)] for form, plan in plans.items()}
    assert kinds["spatial"] == [LowRankConv2d, nn.Flatten, LowRankLinear]
    assert kinds["pufferfish"] == [PufferfishConv2d, nn.Flatten, LowRankLinear]
    assert [type(layer) for layer in to_hybrid(model, dict(plans["pufferfish"]))] == kinds["spatial"]
    for form, plan in plans.items():
        assert plan_of(to_hybrid(model, plan)).form == form
    with pytest.raises(FedhmError, match="rank 9 is impossible for layer '0': it must lie between 1 and 8"):
        to_hybrid(model, RankPlan({"0": 9}, "pufferfish"))


def test_dilated_convolution_is_factorized_grouped_and_transposed_are_not() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, dilation=2, padding=2),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 8, 3),
        nn.Flatten(1, 2),
        nn.Conv1d(48, 8, 3),
        nn.Conv1d(8, 8, 3, groups=4),
    ).double()
    plan = plan_all(model)
    assert plan == {"0": 2, "5": 2}
    assert plan.dense == {
        "1": "a grouped convolution (2 groups)",
        "2": "a depthwise convolution",
        "3": "a ConvTranspose2d, a type of layer that is not factorized",
        "6": "a grouped convolution (4 groups)",
    }
    check(model, on(2, 8, 8, 8), plan)
    for name in plan.dense:
        with pytest.raises(FedhmError, match=rf"the rank plan factorizes '{name}', but it must stay dense: a "):
            to_hybrid(model, {name: 1})


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * 2


def halved(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Half())


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        halved,
    ],
    ids=["old weight_norm", "old spectral_norm", "weight_norm", "spectral_norm", "own parametrization"],
)
def test_a_weight_that_is_computed_stays_dense(change: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)  # a spectral norm may be far too small before it has run often, and outputs large
    model = nn.Sequential(change(nn.Conv2d(8, 8, 3)), nn.Conv2d(8, 8, 3), nn.Flatten(), change(nn.Linear(32, 12)))
    model.double().eval()
    plan = plan_all(model)
    assert plan == {"1": 2}
    reason = "its weight is computed from other parameters"
    assert plan.dense == {"0": reason, "3": reason}
    with torch.no_grad():  # torch cannot copy the old ones once they have run with gradients
        check(model, on(2, 8, 6, 6), plan)
    with pytest.raises(FedhmError, match=reason):
        to_hybrid(model, {"0": 2})


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(12, 12)), nn.Linear(12, 12))
    model(torch.ones(1, 12))
    with pytest.raises(FedhmError, match=r"^the model cannot be copied: Only Tensors created explicitly"):
        to_hybrid(model, {"1": 3})


def test_a_layer_with_a_computed_weight_counts_as_a_layer() -> None:
    model = nn.Sequential(halved(nn.Linear(12, 12)), nn.Linear(12, 12), nn.Linear(12, 12), halved(nn.Linear(12, 12)))
    plan = plan_ranks(model, 1 / 4, keep=1, dense=["0"])
    assert plan == {"1": 3, "2": 3}
    assert plan.dense["3"] == "the classifier"


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_stay_dense_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(12)).double()
    plan = plan_all(model)
    assert plan == {"1": 2}
    reason = "its weight has no shape before the model has run once"
    assert plan.dense == {"0": reason, "3": reason}
    with pytest.raises(FedhmError, match=reason):
        to_hybrid(model, {"3": 2})
    run = on(2, 4, 8, 8)
    assert run(to_hybrid(model, plan)).shape == (2, 12)
    run(model)
    assert plan_all(model) == {"0": 2, "1": 2, "3": 3}
    check(model, run, plan_all(model))


def test_frozen_layers_stay_frozen() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)).double()
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    hybrid = to_hybrid(model, {"0": 3, "1": 3, "2": 3})
    trainable = {name for name, p in hybrid.named_parameters() if p.requires_grad}
    assert trainable == {"1.bias", "2.u", "2.v", "2.bias"}
    check(model, on(2, 12), plan_all(model))


def test_each_layer_keeps_its_mode() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    model[0].eval()
    hybrid = to_hybrid(model, {"0": 3, "1": 3})
    assert [layer.training for layer in hybrid] == [False, True]


@pytest.mark.parametrize(
    ("register", "fires_backward"),
    [
        (lambda layer, hook: layer.register_forward_hook(hook), False),
        (lambda layer, hook: layer.register_forward_pre_hook(hook), False),
        (lambda layer, hook: layer.register_full_backward_hook(hook), True),
        (lambda layer, hook: layer.register_full_backward_pre_hook(hook), True),
    ],
)
def test_a_layer_with_hooks_stays_dense(register: Callable, fires_backward: bool) -> None:
    calls = []
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)).double()
    register(model[0], lambda *_: calls.append(1))
    plan = plan_all(model)
    assert plan == {"1": 3}
    assert plan.dense == {"0": "hooks are registered on it, which a new layer would lose"}
    hybrid = to_hybrid(model, plan)
    y = hybrid(torch.randn(2, 12, dtype=torch.float64, requires_grad=True))
    if fires_backward:
        y.sum().backward()
    assert calls == [1]
    with pytest.raises(FedhmError, match="hooks are registered on it"):
        to_hybrid(model, {"0": 3})


def test_hooks_of_a_container_are_kept() -> None:
    seen = []
    model = nn.Sequential(nn.Sequential(nn.Linear(12, 12)), nn.Linear(12, 12)).double()
    model[0].register_forward_hook(lambda *_: seen.append(1))
    hybrid = to_hybrid(model, plan_all(model))
    assert plan_of(hybrid) == {"0.0": 3, "1": 3}
    on(2, 12)(hybrid)
    assert seen == [1]


def test_bfloat16() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 12)).bfloat16()
    plan = plan_all(model)
    hybrid = to_hybrid(model, plan)
    assert {p.dtype for p in hybrid.parameters()} == {torch.bfloat16}
    assert hybrid(torch.randn(2, 4, 4, 4).bfloat16()).dtype == torch.bfloat16
    model.load_state_dict(to_full(hybrid), strict=True)

    whole = to_full(to_hybrid(model, largest(model, plan)))
    for name in ("0.weight", "2.weight"):
        weight, recovered = model.get_parameter(name).double(), whole[name]
        assert recovered.dtype == torch.bfloat16
        # both factors and their product are rounded once, and |L| |R| is at most the sum of the singular values
        matrix = weight if weight.ndim == 2 else weight.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
        bound = 1.5 * torch.finfo(torch.bfloat16).eps * torch.linalg.svdvals(matrix).sum()
        assert (recovered.double() - weight).norm() < bound


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("order", torch.arange(11, -1, -1))
        self.register_buffer("mask", torch.arange(12) % 2 == 0)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.hidden(x))[:, self.order] * self.mask


def test_integer_and_boolean_buffers_are_carried() -> None:
    model = Buffers().double()
    model(torch.randn(4, 12, dtype=torch.float64))
    model.eval()
    full = to_full(to_hybrid(model, {"hidden": 3}))
    assert full["norm.num_batches_tracked"].item() == 1
    assert torch.equal(full["order"], model.order)
    assert torch.equal(full["mask"], model.mask)
    assert full.keys() == model.state_dict().keys()
    check(model, on(4, 12), {"hidden": 3})


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class OwnLSTM(nn.LSTM):
    pass


def test_a_subclass_of_lstm_stays_dense() -> None:
    model = Sequence()
    model.lstm = OwnLSTM(6, 12, num_layers=2, bidirectional=True, batch_first=True)
    model = model.double()
    plan = plan_all(model)
    assert plan == {"head": 3}
    assert plan.dense == {"lstm": "a OwnLSTM, a type of layer that is not factorized"}
    check(model, on(2, 5, 6), plan)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


def test_a_subclass_of_linear_stays_dense() -> None:
    model = nn.Sequential(Doubled(12, 12), nn.Linear(12, 12)).double()
    plan = plan_all(model)
    assert plan == {"1": 3}
    assert plan.dense == {"0": "a Doubled, whose owner may use its weight without calling it"}
    check(model, on(2, 12), plan)
    with pytest.raises(FedhmError, match="factorizes '0', but it must stay dense: a Doubled"):
        to_hybrid(model, {"0": 3})


def test_an_empty_plan_is_a_copy() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    hybrid = to_hybrid(model, {})
    assert hybrid is not model
    assert hybrid[0].weight is not model[0].weight
    assert torch.equal(hybrid[0].weight, model[0].weight)
    assert to_full(hybrid).keys() == model.state_dict().keys()


def test_a_model_without_memory_can_be_factorized() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 10**4, 3), nn.Linear(10**5, 10**5))
    hybrid = to_hybrid(model, {"1": 10}, spectral=False)
    assert hybrid[1].u.shape == (10, 10**5)
    assert hybrid[1].u.is_meta


@pytest.mark.parametrize(
    ("name", "rank", "limit"), [("0", 0, 12), ("0", -1, 12), ("0", 13, 12), ("2", 7, 6), ("2", 2.5, 6), ("2", "3", 6)]
)
def test_impossible_ranks(name: str, rank: int, limit: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(9, 6))
    sentence = f"rank {rank} is impossible for layer '{name}': it must lie between 1 and {limit}"
    with pytest.raises(FedhmError, match=sentence):
        to_hybrid(model, {name: rank})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("7", "'7', but the model has no such layer"),
        ("layer1.conv1", "'layer1.conv1', but the model has no such layer"),
        ("1", "'1', but it must stay dense: a BatchNorm2d, a type of layer that is not factorized"),
        ("", "'', but it must stay dense: a Sequential, a type of layer that is not factorized"),
    ],
)
def test_plans_of_another_model(name: str, why: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Linear(9, 6))
    with pytest.raises(FedhmError, match=f"^the rank plan factorizes {why}$"):
        to_hybrid(model, {"0": 2, name: 1})
    assert not any(isinstance(layer, LowRank) for layer in model.modules())


def test_a_hybrid_network_is_not_factorized_again() -> None:
    hybrid = to_hybrid(nn.Sequential(nn.Linear(12, 12)), {"0": 3})
    assert plan_all(hybrid) == {}
    with pytest.raises(FedhmError, match="a LowRankLinear, a type of layer that is not factorized"):
        to_hybrid(hybrid, {"0": 2})
