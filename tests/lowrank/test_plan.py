from collections.abc import Mapping
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import to_hybrid
from fedhm.lowrank.plan import RankPlan, find_classifier, plan_ranks
from fedhm.measure.cost import measure
from fedhm.models import resnet18, resnet34

RATIOS = (1.0, 1 / 2, 1 / 4, 1 / 8)
# the paper's networks: keep, input, parameters of the four ratios, MACs in millions as printed
NETWORKS = {
    "resnet18-10": (3, 32, (11_173_962, 4_157_514, 2_209_866, 1_236_042), ("555.4", "259.7", "171.6", "127.6")),
    "resnet34-100": (15, 32, (21_328_292, 8_401_316, 4_985_252, 3_277_220), ("1159.4", "744.2", "631.0", "574.3")),
    "resnet34-200": (15, 64, (21_379_592, 8_452_616, 5_036_552, 3_328_520), ("4637.7", "2976.7", "2523.8", "2297.3")),
}


@cache
def paper_network(name: str) -> nn.Module:
    kind, classes = name.split("-")
    return {"resnet18": resnet18, "resnet34": resnet34}[kind](int(classes))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("tier", range(4))
def test_sizes_of_the_paper(name: str, tier: int) -> None:
    keep, side, parameters, macs = NETWORKS[name]
    model = paper_network(name)
    hybrid = to_hybrid(model, plan_ranks(model, RATIOS[tier], keep), spectral=False)
    cost = measure(hybrid, (3, side, side))
    assert cost.parameters == parameters[tier]
    assert f"{cost.macs / 1e6:.1f}" == macs[tier]


def test_layers_of_resnet18_that_stay_dense() -> None:
    plan = plan_ranks(paper_network("resnet18-10"), 1 / 4, keep=3)
    first = "among the first 3 layers"
    assert plan.dense == {
        "conv1": first,
        "layer1.0.conv1": first,
        "layer1.0.conv2": first,
        "layer2.0.shortcut.0": "a 1×1 shortcut, which the paper keeps",
        "layer3.0.shortcut.0": "a 1×1 shortcut, which the paper keeps",
        "layer4.0.shortcut.0": "a 1×1 shortcut, which the paper keeps",
        "fc": "the classifier",
    }
    assert plan["layer1.1.conv1"] == 16
    assert plan["layer2.0.conv1"] == 32
    assert plan["layer4.1.conv2"] == 128
    assert len(plan) == 14


def test_layers_of_resnet34_that_stay_dense() -> None:
    plan = plan_ranks(paper_network("resnet34-100"), 1 / 2, keep=15)
    assert {name.split(".")[0] for name in plan} == {"layer3", "layer4"}
    assert len(plan) == 2 * (6 + 3)


@pytest.mark.parametrize(
    ("layer", "ratio", "rank"),
    [
        (nn.Conv2d(64, 128, 3), 1 / 4, 32),
        (nn.Conv2d(128, 64, 3), 1 / 4, 16),  # of the output channels, whatever comes in
        (nn.Conv2d(64, 64, 3), 0.001, 1),  # never 0
        (nn.Conv2d(64, 63, 3), 1 / 4, 16),  # 15.75
        (nn.Conv2d(64, 61, 3), 1 / 4, 15),  # 15.25
        (nn.Linear(64, 256), 1 / 4, 16),  # of the smaller side
        (nn.Linear(256, 64), 1 / 4, 16),
        (nn.Linear(30, 30), 0.3, 9),
        (nn.Linear(30, 30), 0.001, 1),
        (nn.Conv2d(2, 64, 3), 1 / 16, 4),
    ],
)
def test_rank_rule(layer: nn.Module, ratio: float, rank: int) -> None:
    assert plan_ranks(nn.Sequential(layer), ratio, keep=0, classifier=None) == {"0": rank}


@pytest.mark.parametrize(
    ("layer", "ratio", "reason"),
    [
        (nn.Linear(8, 8), 1 / 2, "rank 4 would hold 64 parameters instead of 64"),
        (nn.Linear(100, 100), 0.9, "rank 90 would hold 18,000 parameters instead of 10,000"),
        # 1/2 of 64 output channels is 32, but the unrolled matrix (3, 192) has at most rank 3
        (nn.Conv2d(1, 64, 3), 1 / 2, "rank 3 would hold 585 parameters instead of 576"),
    ],
)
def test_a_rank_that_saves_nothing_stays_dense(layer: nn.Module, ratio: float, reason: str) -> None:
    plan = plan_ranks(nn.Sequential(layer), ratio, keep=0, classifier=None)
    assert len(plan) == 0
    assert plan.dense == {"0": reason}


@pytest.mark.parametrize(
    ("layer", "ratio", "decision"),
    [
        (nn.Conv2d(64, 128, 3), 1 / 4, 32),
        (nn.Conv2d(64, 64, 3), 0.001, 1),
        # the unrolled matrix (9, 64) has at most rank 9
        (nn.Conv2d(1, 64, 3), 1 / 2, "rank 9 would hold 657 parameters instead of 576"),
        (nn.Conv2d(4, 64, 3), 1 / 2, "rank 32 would hold 3,200 parameters instead of 2,304"),
        (nn.Linear(64, 256), 1 / 4, 16),
        (nn.Linear(8, 8), 1 / 2, "rank 4 would hold 64 parameters instead of 64"),
    ],
)
def test_rank_rule_in_pufferfishs_form(layer: nn.Module, ratio: float, decision: int | str) -> None:
    plan = plan_ranks(nn.Sequential(layer), ratio, keep=0, classifier=None, form="pufferfish")
    assert plan.decisions == {"0": decision}
    assert plan.form == "pufferfish"


def test_sizes_of_resnet18_in_pufferfishs_form() -> None:
    model = paper_network("resnet18-10")
    plan = plan_ranks(model, 1 / 4, keep=3, form="pufferfish")
    dense = sum(p.numel() for p in model.parameters())
    saved = 0
    for name, rank in plan.items():
        n, m, k, _ = model.get_parameter(f"{name}.weight").shape
        assert rank == n // 4
        saved += n * m * k * k - rank * (m * k * k + n)
    assert measure(to_hybrid(model, plan, spectral=False), (3, 32, 32)).parameters == dense - saved


def test_unknown_form() -> None:
    with pytest.raises(FedhmError, match="there is no form 'tucker' of factorized layers, only spatial and pufferfish"):
        plan_ranks(body(), 1 / 2, form="tucker")  # type: ignore[arg-type]


def body() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.Conv2d(32, 32, 1),
        nn.BatchNorm2d(32),
        nn.Conv2d(32, 32, 3),
        nn.Conv2d(32, 32, 3, groups=2),
        nn.Conv2d(32, 32, 3),
        nn.Flatten(),
        nn.Linear(32, 32),
        nn.Linear(32, 10),
    )


def test_every_weighted_layer_is_in_the_plan_or_has_a_reason() -> None:
    plan = plan_ranks(body(), 1 / 4)
    assert plan == {"1": 8, "3": 8, "5": 8, "7": 8}
    assert plan.dense == {
        "0": "among the first 1 layers",
        "4": "a grouped convolution (2 groups)",
        "8": "the classifier",
    }


@pytest.mark.parametrize(
    ("keep", "layers"),
    [
        (0, {"0", "1", "3", "5", "7"}),
        (1, {"1", "3", "5", "7"}),
        (2, {"1", "5", "7"}),
        (3, {"1", "5", "7"}),
        (4, {"1", "7"}),
        (99, {"1"}),
    ],
)
def test_keep_counts_neither_pointwise_convolutions_nor_the_classifier(keep: int, layers: set[str]) -> None:
    assert set(plan_ranks(body(), 1 / 4, keep)) == layers


def test_ratio_one_is_the_full_network() -> None:
    plan = plan_ranks(body(), 1)
    assert plan == {}
    assert plan.dense["3"] == "the ratio is 1: the full network"
    assert plan.dense["0"] == "among the first 1 layers"
    assert plan.dense.keys() == {"0", "1", "3", "4", "5", "7", "8"}


def test_1x1_convolutions_stay_dense_if_asked() -> None:
    plan = plan_ranks(body(), 1 / 4, pointwise=False)
    assert plan == {"3": 8, "5": 8, "7": 8}
    assert plan.dense["1"] == "a 1×1 convolution"


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 96), (96, 16)])
def test_an_expansion_and_a_projection_have_ranks_of_their_smaller_side(inputs: int, outputs: int) -> None:
    """Six times as many channels save below rank 6/7 of the smaller side."""
    model = nn.Sequential(nn.Conv2d(inputs, outputs, 1))
    assert plan_ranks(model, 1 / 2, 0, classifier=None) == {"0": 8}
    assert plan_ranks(model, 13 / 16, 0, classifier=None) == {"0": 13}
    assert plan_ranks(model, 14 / 16, 0, classifier=None).dense == {
        "0": "rank 14 would hold 1,568 parameters instead of 1,536"
    }


def test_classifier_can_be_named_or_absent() -> None:
    assert plan_ranks(body(), 1 / 4, classifier=None) == {"1": 8, "3": 8, "5": 8, "7": 8, "8": 2}
    named = plan_ranks(body(), 1 / 4, classifier="7")
    assert named == {"1": 8, "3": 8, "5": 8, "8": 2}
    assert named.dense["7"] == "the classifier"
    both = plan_ranks(body(), 1 / 4, classifier=("7", "8"))
    assert both == {"1": 8, "3": 8, "5": 8}
    assert both.dense["7"] == both.dense["8"] == "the classifier"


def test_a_1x1_convolution_at_the_end_is_the_classifier() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1))
    assert plan_ranks(model, 1 / 4) == {"1": 8}
    assert plan_ranks(model, 1 / 4).dense["2"] == "the classifier"
    assert plan_ranks(model, 1 / 4, classifier=None) == {"1": 8, "2": 8}


def test_dense_leaves_further_layers_as_they_are() -> None:
    plan = plan_ranks(body(), 1 / 4, dense=["5", "7"])
    assert plan == {"1": 8, "3": 8}
    assert plan.dense["5"] == plan.dense["7"] == "asked for"


def test_dense_takes_patterns_of_names() -> None:
    model = nn.ModuleDict({"a": body(), "b": body()})
    plan = plan_ranks(model, 1 / 4, keep=0, dense=["*.1", "b.[37]"])
    asked = [name for name, reason in plan.dense.items() if reason == "asked for"]
    assert asked == ["a.1", "b.1", "b.3", "b.7"]
    with pytest.raises(FedhmError, match=r"there is no layer '\*\.shortcut'"):
        plan_ranks(model, 1 / 4, dense=["*.shortcut"])


def test_shortcuts_of_a_resnet_inside_another_network_stay_dense() -> None:
    plan = plan_ranks(nn.Sequential(nn.Identity(), resnet18(width=0.25)), 1 / 4)
    assert plan.dense["1.layer2.0.shortcut.0"] == "a 1×1 shortcut, which the paper keeps"


def test_auto_classifier_is_a_linear_at_the_end() -> None:
    assert find_classifier(body()) == "8"
    assert find_classifier(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())) == "0"
    assert find_classifier(nn.Sequential(nn.Linear(3, 3), nn.Conv2d(3, 3, 3))) is None
    assert find_classifier(nn.Sequential(nn.ReLU())) is None
    assert find_classifier(nn.Linear(3, 3)) == ""


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5, float("nan"), float("inf")])
def test_wrong_ratio(ratio: float) -> None:
    with pytest.raises(FedhmError, match=rf"a rank ratio lies above 0 and at most at 1, not at {ratio:g}"):
        plan_ranks(body(), ratio)


def test_negative_keep() -> None:
    with pytest.raises(FedhmError, match="the number of layers to keep dense cannot be -1"):
        plan_ranks(body(), 1 / 2, keep=-1)


@pytest.mark.parametrize("name", ["9", "2", "conv1"])  # "2" has no weight matrix
def test_unknown_layers(name: str) -> None:
    with pytest.raises(
        FedhmError, match=rf"there is no layer '{name}' with a weight matrix in this model to keep dense"
    ):
        plan_ranks(body(), 1 / 2, dense=["3", name])
    with pytest.raises(FedhmError, match=rf"there is no layer '{name}' .* to be the classifier"):
        plan_ranks(body(), 1 / 2, classifier=name)


def test_model_without_layers_has_an_empty_plan() -> None:
    plan = plan_ranks(nn.Sequential(nn.ReLU()), 1 / 2)
    assert plan == {}
    assert str(plan) == ""


def test_str_is_a_table() -> None:
    plan = RankPlan({"stem": "among the first 1 layers", "a.conv": 4, "classifier": "the classifier"})
    assert str(plan).splitlines() == [
        "stem        dense: among the first 1 layers",
        "a.conv      rank 4",
        "classifier  dense: the classifier",
    ]


def test_plan_is_a_mapping() -> None:
    plan = RankPlan({"a": 1, "c": "asked for", "b": 2})
    assert isinstance(plan, Mapping)
    assert list(plan) == ["a", "b"]
    assert dict(plan) == {"a": 1, "b": 2}
    assert list(plan.items()) == [("a", 1), ("b", 2)]
    assert plan == {"a": 1, "b": 2}
    assert plan == RankPlan({"b": 2, "a": 1})
    assert plan != RankPlan({"a": 1, "b": 3})
    assert "c" not in plan
    assert plan.get("c", 7) == 7
    with pytest.raises(KeyError):
        plan["c"]
    assert not RankPlan({})
    with pytest.raises(TypeError):
        plan["a"] = 3  # type: ignore[index]


def test_ratios_may_be_written_as_fractions() -> None:
    assert plan_ranks(resnet18(10), "1/8", keep=3) == plan_ranks(resnet18(10), 0.125, keep=3)
    for wrong in ("one half", "1/0", "2"):
        with pytest.raises(FedhmError, match="rank ratio"):
            plan_ranks(resnet18(10), wrong)


def test_a_module_named_as_dense_keeps_all_its_layers() -> None:
    plan = plan_ranks(resnet18(10), 1 / 8, keep=3, dense=["layer4.1", "layer3"])
    kept = [name for name, reason in plan.dense.items() if reason == "asked for"]
    assert kept == [f"{block}.conv{n}" for block in ("layer3.0", "layer3.1", "layer4.1") for n in (1, 2)]


def test_model_is_not_changed_by_planning() -> None:
    model = body()
    before = {name: id(p) for name, p in model.named_parameters()}
    plan_ranks(model, 1 / 4)
    assert {name: id(p) for name, p in model.named_parameters()} == before


@given(st.integers(1, 40), st.sampled_from([1 / 8, 1 / 4, 1 / 2]))
def test_no_rank_is_above_the_largest_one_and_smaller_ranks_stay(most: int, ratio: float) -> None:
    model = resnet18(width=0.25)
    free, limited = plan_ranks(model, ratio, keep=0), plan_ranks(model, ratio, keep=0, max_rank=most)
    assert set(free) <= set(limited)  # a smaller rank may save parameters where a larger one does not
    assert {name: min(rank, most) for name, rank in free.items()} == {name: limited[name] for name in free}


def test_a_negative_largest_rank_is_refused() -> None:
    with pytest.raises(FedhmError, match="cannot be -1"):
        plan_ranks(resnet18(width=0.125), 1 / 2, max_rank=-1)
