"""Network specs are values: equal specs mean the same network, and they survive the trip through JSON."""

import json

from hypothesis import given
from hypothesis import strategies as st

from fedhm.networks.spec import NetworkSpec

names = st.text(max_size=8)
ranks = st.dictionaries(names, st.integers(1, 512), max_size=4).map(lambda each: tuple(each.items()))


def specs(inside: st.SearchStrategy[tuple[NetworkSpec, ...]]) -> st.SearchStrategy[NetworkSpec]:
    return st.builds(
        NetworkSpec, tier=names, label=names, variant=names, number=st.integers(0, 99), ranks=ranks, inside=inside
    )


nested = st.recursive(specs(st.just(())), lambda inner: specs(st.lists(inner, max_size=2).map(tuple)), max_leaves=4)


@given(nested)
def test_a_spec_comes_back_from_json_as_it_was(spec: NetworkSpec) -> None:
    found = NetworkSpec.from_values(json.loads(json.dumps(spec.to_values())))
    assert found == spec
    assert hash(found) == hash(spec)
    assert str(found) == str(spec)  # seeds depend on it


@given(nested, nested)
def test_only_equal_specs_have_equal_values(one: NetworkSpec, other: NetworkSpec) -> None:
    same_values = json.dumps(one.to_values()) == json.dumps(other.to_values())
    assert same_values == (one == other)


def test_a_plain_spec_is_its_tier_alone() -> None:
    assert NetworkSpec("1/4").to_values() == {"tier": "1/4"}
    assert str(NetworkSpec("1/4")) == "1/4"
    assert str(NetworkSpec("1/4", "scaled 1/4", "scaled")) == "scaled 1/4"
