"""Ordered dropout with distillation: the gradient of a batch against its formula."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.config.registry import make
from fedhm.widths.narrow import narrow_network
from fedhm.widths.plan import plan_widths
from fedhm.widths.wrappers import OrderedDropout

OBJECTIVE = make("objectives", "classification")
X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(8) % 3


def widest() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def narrower(width: float) -> nn.Module:
    return narrow_network(widest(), plan_widths(widest(), width, X[:1], "5"))


def at_width(network: nn.Module, width: float, x: Tensor) -> Tensor:
    """Run the leading channels of `network`, by hand."""
    kept = round(8 * width)
    assert isinstance(network, nn.Sequential)
    first, norm, _, hidden, _, last = network
    x = F.linear(x, first.weight[:kept], first.bias[:kept])  # type: ignore[index]
    x = F.batch_norm(x, None, None, norm.weight[:kept], norm.bias[:kept], training=True)  # type: ignore[index,arg-type]
    x = F.linear(F.relu(x), hidden.weight[:kept, :kept], hidden.bias[:kept])  # type: ignore[index]
    return F.linear(F.relu(x), last.weight[:, :kept], last.bias)  # type: ignore[index,arg-type]


@pytest.mark.parametrize(("place", "width"), [(1, 0.5), (2, 0.25)])
def test_the_drawn_width_learns_from_the_widest_which_learns_from_the_labels(place: int, width: float) -> None:
    network = widest()
    ordered = OrderedDropout(network, [narrower(0.5), narrower(0.25)], OBJECTIVE.divergence, always=place).train()
    loss = F.cross_entropy(ordered(X), Y)
    loss.backward()
    twin = widest()
    scores = at_width(twin, 1.0, X)
    from_labels = F.cross_entropy(scores, Y)
    # the published second term: cross-entropy with the teacher's probabilities in place of labels
    from_widest = F.cross_entropy(at_width(twin, width, X), scores.detach().softmax(1))
    (from_labels + from_widest).backward()
    assert loss.item() == pytest.approx(from_labels.item())
    for (name, ours), theirs in zip(network.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_the_widest_does_not_learn_from_itself() -> None:
    plain, distilling = widest(), widest()
    F.cross_entropy(plain.train()(X), Y).backward()
    ordered = OrderedDropout(distilling, [narrower(0.5)], OBJECTIVE.divergence, always=0).train()
    F.cross_entropy(ordered(X), Y).backward()
    for one, other in zip(plain.parameters(), distilling.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_it_is_the_widest_in_evaluation_and_can_be_copied() -> None:
    ordered = OrderedDropout(widest(), [narrower(0.5)], OBJECTIVE.divergence)
    twin = copy.deepcopy(ordered)
    assert torch.equal(twin.eval()(X), ordered.network.eval()(X))
    assert [share for _, share in ordered.passes_in_training] == [1, 0.5]
    assert [share for _, share in OrderedDropout(widest(), [narrower(0.5)]).passes_in_training] == [0.5, 0.5]
