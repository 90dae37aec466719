"""A state is taken apart into named tensors and JSON, and comes back as it was."""

import json
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedhm.server.state import flatten, map_tensors, unflatten


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Inner:
    pair: Pair
    number: int


@dataclass(frozen=True)
class Everything:
    by_name: dict[str, Tensor]
    by_number: dict[int, dict[str, Tensor]]
    several: tuple[dict[str, Tensor], ...]
    pairs: dict[str, Pair]
    inner: Inner
    maybe: Tensor | None = None
    fixed: tuple[int, str] = (1, "a")
    values: dict[str, float] = field(default_factory=dict)


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
tensors = st.integers(0, 99).map(lambda n: torch.full((2,), float(n)))
pairs = st.builds(Pair, tensors, tensors)
states = st.builds(
    Everything,
    st.dictionaries(names, tensors, max_size=3),
    st.dictionaries(st.integers(-5, 5), st.dictionaries(names, tensors, max_size=2), max_size=3),
    st.lists(st.dictionaries(names, tensors, max_size=2), max_size=3).map(tuple),
    st.dictionaries(names, pairs, max_size=2),
    st.builds(Inner, pairs, st.integers()),
    st.none() | tensors,
    st.tuples(st.integers(), names),
    st.dictionaries(names, st.floats(allow_nan=False), max_size=2),
)


def plain(value: object) -> object:
    """With lists in place of tensors, so that == compares."""
    return map_tensors(value, lambda _, __, tensor: tensor.tolist())  # type: ignore[arg-type, return-value]


@given(states)
def test_whatever_it_holds_comes_back(state: Everything) -> None:
    named, outline = flatten(state)
    again = unflatten(Everything, named, json.loads(json.dumps(outline)))
    assert plain(again) == plain(state)
    assert flatten(again)[0].keys() == named.keys()


def test_names_that_could_be_mixed_up_are_not() -> None:
    one, two, three = (Pair(torch.zeros(1), torch.ones(1)) for _ in range(3))
    state = Everything({"a/b": torch.ones(1)}, {}, (), {"a": one, "a/left": two}, Inner(three, 1))
    assert len(flatten(state)[0]) == 1 + 4 + 2


def test_a_tensor_that_comes_twice_is_written_once() -> None:
    shared = torch.ones(3)
    state = {"a": shared, "b": shared}
    named, outline = flatten(state)
    assert list(named) == ["a"]
    assert unflatten(dict[str, Tensor], named, outline).keys() == {"a", "b"}


def test_what_cannot_be_written_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"a state cannot hold a set \(a/b\)"):
        flatten({"a": {"b": {1, 2}}})
    with pytest.raises(ValueError, match="it is not a Inner"):
        unflatten(Inner, {}, {"pair": {"left": "x", "right": "y"}, "number": 1})
