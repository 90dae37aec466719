"""Quick copies of networks are those of `copy.deepcopy`."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from conftest import small_model
from fedhm.networks.structure import copy_network


@dataclass(frozen=True)
class Note:
    about: nn.Module
    words: list[str]


class Odd(nn.Module):
    """Holds all that a user's module might: shared and strided tensors, hooks, plain objects, itself in a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.again = self.layer
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.layer.weight
        self.register_buffer("whole", torch.arange(12.0).reshape(3, 4))
        self.register_buffer("part", self.whole[1:, ::2], persistent=False)
        self.register_buffer("last", torch.randn(1, 5, 1, 3).to(memory_format=torch.channels_last))
        self.register_buffer("none", None)
        self.view = self.layer.weight.data[0]
        self.marked = torch.zeros(2)
        self.marked.remark = ["of a user's"]  # type: ignore[attr-defined]
        self.empty = torch.empty(0, 2)
        self.turned = torch.randn(4, 3).T
        self.lists: list[object] = [self.layer, {"x": self.whole}, (1, [2, 3]), {1, 2}, self]
        self.note = Note(self.tied, ["a", "b"])
        self.lists.append(self.note)
        self.kind, self.function, self.type = nn.ReLU, torch.relu, torch.float16
        self.calls = 0
        self.layer.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tied(self.layer(x)) + self.view + self.part.sum()
        return y


@pytest.mark.parametrize(
    "build",
    [Odd, small_model, lambda: nn.LSTM(3, 4, 2), lambda: nn.TransformerEncoderLayer(8, 2, 16), nn.GELU],
    ids=["odd", "small", "lstm", "transformer", "gelu"],
)
def test_they_hold_what_a_deep_copy_holds(build: Callable[[], nn.Module]) -> None:
    model = build()
    ours, theirs = copy_network(model), copy.deepcopy(model)
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    for one, other in zip(ours.modules(), theirs.modules(), strict=True):
        assert type(one) is type(other)
        assert list(vars(one)) == list(vars(other))
    for mine, its, original in zip(tensors(ours), tensors(theirs), tensors(model), strict=True):
        assert torch.equal(mine, its)
        assert (mine.stride(), mine.requires_grad, type(mine)) == (its.stride(), its.requires_grad, type(its))
        assert mine.data_ptr() != original.data_ptr()
    assert not {id(module) for module in ours.modules()} & {id(module) for module in model.modules()}


def tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("build", [Odd, small_model, lambda: nn.LSTM(3, 4, 2)], ids=["odd", "small", "lstm"])
def test_values_that_are_loaded_afterwards_need_not_be_copied(build: Callable[[], nn.Module]) -> None:
    model = build()
    names = [name for name, _ in model.named_parameters()]
    left_out = names[:1]
    before = [tensor.clone() for tensor in tensors(model)]
    ours, whole = copy_network(model, without_values=left_out), copy_network(model)
    with torch.no_grad():
        ours.get_parameter(left_out[0]).copy_(model.get_parameter(left_out[0]))
    for mine, its in zip(tensors(ours), tensors(whole), strict=True):
        assert torch.equal(mine, its)
        assert (mine.stride(), mine.requires_grad, type(mine)) == (its.stride(), its.requires_grad, type(its))
    if isinstance(ours, Odd):  # what shares the memory of a parameter without values does so in the copy too
        assert ours.tied.weight is ours.layer.weight
        assert ours.view.data_ptr() == ours.layer.weight.data_ptr()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(7)
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors(model), before, strict=True))


def test_what_is_one_thing_is_one_thing_in_the_copy() -> None:
    model = Odd()
    new = copy_network(model)
    assert isinstance(new, Odd)
    assert new.again is new.layer is new.lists[0]
    assert new.tied.weight is new.layer.weight
    assert new.lists[4] is new
    assert new.lists[5] is new.note
    assert new.note.about is new.tied
    assert new.note.words == ["a", "b"]
    assert new.note.words is not model.note.words
    with torch.no_grad():
        new.layer.weight.fill_(7)
        new.whole.fill_(5)
    assert new.view.tolist() == [7, 7, 7]
    assert new.part.unique().tolist() == [5]
    assert model.view.tolist() != [7, 7, 7]
    assert model.part.tolist() == [[4, 6], [8, 10]]
    assert new.marked.remark == ["of a user's"]
    assert new.marked.remark is not model.marked.remark
    assert (new.turned.stride(), new.empty.shape) == (model.turned.stride(), (0, 2))
    new(torch.ones(1, 3))
    assert (new.calls, model.calls) == (1, 0)  # the hook is the copy's own


def test_modules_that_say_themselves_how_they_are_copied_are_asked() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: dict[int, object]) -> "Own":
            return self

    class Stated(nn.Linear):
        def __getstate__(self) -> dict[str, object]:
            return {**super().__getstate__(), "seen": [len(vars(self))]}  # type: ignore[misc]

    model = nn.Sequential(Own(2, 2), Stated(2, 2), Stated(2, 2))
    new = copy_network(model)
    assert new[0] is model[0]
    assert new[1].seen == new[2].seen == [len(vars(model[1]))]
    assert new[1].seen is not new[2].seen


def test_a_copy_can_be_written_and_copied_again() -> None:
    model = small_model()
    again = pickle.loads(pickle.dumps(copy_network(copy_network(model))))
    batch = torch.rand(2, 1, 6, 6)
    assert torch.equal(again.eval()(batch), model.eval()(batch))
