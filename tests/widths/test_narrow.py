"""Narrower networks: the paper's sizes, any model that runs, and what cannot be narrowed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import small_model
from fedhm.errors import FedhmError
from fedhm.models import MODELS
from fedhm.networks.inputs import probe_model
from fedhm.widths.narrow import assignable_indices, channel_indices, check_alignment, narrow_network, select_channels
from fedhm.widths.plan import Axis, plan_widths


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("name", ["cnn", "resnet18", "resnet34"])
@pytest.mark.parametrize("width", [0.62, 0.35, 0.1])
@pytest.mark.parametrize("classifier", ["fc", None])
def test_narrowing_gives_the_network_that_is_built_at_that_width(
    name: str, width: float, classifier: str | None
) -> None:
    model = MODELS[name](num_classes=7, in_channels=3)
    plan = plan_widths(model, width, torch.zeros(1, 3, 8, 8), classifier)
    built = MODELS[name](num_classes=7, in_channels=3, width=width)
    shapes = {n: t.shape for n, t in narrow_network(model, plan).state_dict().items()}
    assert shapes == {n: t.shape for n, t in built.state_dict().items()}
    check_alignment(model, plan, torch.zeros(1, 3, 8, 8))


def test_width_one_keeps_everything() -> None:
    model = small_model()
    network = narrow_network(model, plan_widths(model, 1.0, torch.zeros(1, 1, 6, 6), "9"))
    x = torch.randn(3, 1, 6, 6)
    assert torch.equal(network.eval()(x), model.eval()(x))


def test_a_flattened_image_keeps_all_pixels_of_the_channels_that_are_left() -> None:
    plan = plan_widths(small_model(), 0.5, torch.zeros(1, 1, 6, 6), "9")
    assert plan["7"].inputs == Axis(full=144, kept=72, unit=9)
    window = plan["7"].inputs.window(offset=15)
    assert window is not None
    assert window[:9].tolist() == list(range(135, 144))
    assert window[9:18].tolist() == list(range(9))  # around the end


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 40), st.integers(1, 4))
def test_windows_hold_each_channel_at_most_once(kept: int, more: int, offset: int, unit: int) -> None:
    axis = Axis((kept + more) * unit, kept * unit, unit)
    window = axis.window(offset)
    assert window is not None
    assert len(window) == kept * unit == len(set(window.tolist()))
    assert window.max() < axis.full
    assert window[0] == offset % (kept + more) * unit


@pytest.mark.parametrize("offset", [0, 3, 100])
def test_taking_and_putting_back_are_inverse(offset: int) -> None:
    model = small_model()
    plan = plan_widths(model, 0.4, torch.zeros(1, 1, 6, 6), "9")
    shapes = {n: t.shape for n, t in narrow_network(model, plan).state_dict().items()}
    for name, tensor in model.state_dict().items():
        indices = channel_indices(plan, name, tensor.ndim, offset)
        part = select_channels(tensor, indices)
        assert part.shape == shapes[name]
        if tensor.ndim:
            assert torch.equal(tensor[assignable_indices(indices, tensor.shape)], part)


class Mixed(nn.Module):
    """A residual network with a depthwise convolution, GroupNorm and LayerNorm, and layers that are defined late."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 5)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Conv2d(8, 16, 1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.groups = nn.GroupNorm(2, 8)
        self.first = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = x + self.groups(self.depth(x)).sigmoid()
        y: Tensor = self.head(self.norm(self.last(x).mean((2, 3))))
        return y


def test_models_that_know_nothing_of_widths() -> None:
    model, x = Mixed(), torch.randn(2, 3, 6, 6)
    classifier = probe_model(model, x, lambda _: None)
    assert classifier == ("head",)
    plan = plan_widths(model, 0.5, x[:1], classifier)
    check_alignment(model, plan, x)
    network = narrow_network(model, plan)
    assert network(x).shape == (2, 5)
    assert network.depth.weight.shape == (4, 1, 3, 3)  # type: ignore[union-attr]
    assert parameters(network) < parameters(model) / 2


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.cat([self.a(x).relu(), self.b(x).relu()], 1))
        return y


@pytest.mark.parametrize("width", [0.75, 0.5, 0.25, 0.125])
@pytest.mark.parametrize("zeros", [True, False])
def test_channels_that_do_not_line_up_are_noticed(width: float, zeros: bool) -> None:
    """Whatever the model's weights and the sample are."""
    model, x = Concatenated(), torch.zeros(1, 4)
    if zeros:
        for p in model.parameters():
            nn.init.zeros_(p)
    with pytest.raises(FedhmError, match="do not line up"):
        check_alignment(model, plan_widths(model, width, x, "c"), x)


class Odd(nn.Module):
    """Scores that no Linear gives, a number among the buffers, one layer under two names, a norm without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 16, 3, padding=1, groups=8)  # two outputs for each channel
        self.mixed = nn.Conv2d(16, 8, 1)
        self.again = self.mixed2 = nn.Conv2d(8, 8, 1)
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.head = nn.Conv2d(8, 5, 1)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.first(x.float())).relu()
        x = self.again(self.mixed2(self.mixed(x)).relu()) * self.scale
        x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(x).mean((2, 3)).log_softmax(1)


@pytest.mark.parametrize("width", [0.5, 0.25])
def test_odd_models_are_narrowed_all_the_same(width: float) -> None:
    model, x = Odd(), torch.randn(3, 2, 6, 6)
    assert probe_model(model, x, lambda _: None) == ()
    plan = plan_widths(model, width, x[:1], None)
    check_alignment(model, plan, x)
    network = narrow_network(model, plan)
    assert network(x).shape == (3, 5)
    assert parameters(network) < width * parameters(model)


def test_only_what_a_normalisation_looks_at_is_normalised() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm, self.fc = nn.Linear(4, 8), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.a(x), self.b(x)
            y: Tensor = self.fc(self.norm(a) + b)
            return y

    plan = plan_widths(Sum(), 0.5, torch.zeros(2, 4), "fc")
    assert (plan["a"].normalised, plan["b"].normalised) == (True, False)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    return model


class HardCoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.conv(x).view(-1, 16))
        return y


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.Bilinear(8, 8, 2)), (4,), "'1' is a Bilinear"),
        (tied(), (4,), "tied to another"),
        (nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1, groups=2), nn.Flatten()), (4, 4, 4), "2 groups"),
        (
            nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(24, 2)),
            (4, 4, 4),
            "GroupNorm of 2 groups",
        ),
        (nn.Sequential(nn.Linear(4, 8), nn.LayerNorm((3, 8)), nn.Linear(8, 2)), (3, 4), "LayerNorm over several axes"),
        (HardCoded(), (1, 4, 4), "cannot be made narrower"),
    ],
)
def test_what_cannot_be_narrowed_is_one_sentence(model: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(FedhmError, match=message) as raised:
        plan_widths(model, 0.5, torch.zeros(2, *shape), None)
    assert "\n" not in str(raised.value)
