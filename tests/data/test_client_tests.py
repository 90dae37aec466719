"""Every client's test samples are held out of its own training, or brought along."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhm.config.schema import DataConfig
from fedhm.data.federation import (
    ClientTests,
    check_test_share,
    from_arrays,
    hold_out_client_tests,
    load_federation,
    split_client_test,
)
from fedhm.data.samples import Samples
from fedhm.errors import FedhmError


def numbered(count: int, first: int = 0) -> Samples:
    """Samples each of which is a number of its own."""
    numbers = torch.arange(first, first + count)
    return Samples(numbers[:, None].float(), numbers % 2)


@given(st.integers(1, 200), st.floats(0.001, 0.999), st.integers(0, 5))
def test_the_share_is_held_out_and_everybody_keeps_and_gives_at_least_one(count: int, share: float, seed: int) -> None:
    left, tests = split_client_test(numbered(count), share, seed, 3)
    assert sorted(torch.cat([left.inputs, tests.inputs]).flatten().tolist()) == list(range(count))
    assert len(tests) == (min(count - 1, max(1, round(share * count))) if count > 1 else 0)


def test_seed_and_client_decide_who_is_held_out() -> None:
    first, again, other_seed, other_client = (
        split_client_test(numbered(50), 0.3, seed, client)[1].inputs
        for seed, client in ((0, 1), (0, 1), (1, 1), (0, 2))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other_seed)
    assert not torch.equal(first, other_client)


def test_nothing_is_held_out_unless_it_is_asked_for() -> None:
    left, tests = hold_out_client_tests([numbered(4)], 0.0, 0)
    assert len(left[0]) == 4
    assert tests.holders([4]) == []


def test_a_named_source_is_split_the_same_way_whether_or_not_validation_samples_are_held_out() -> None:
    whole, alone, both = (
        load_federation(DataConfig(client_test=share, validation=validation), 7, 1)
        for share, validation in ((0.0, 0.0), (0.2, 0.0), (0.2, 0.1))
    )
    for number in range(7):
        tests = alone.client_tests.of(number)
        assert tests is not None
        assert len(tests) + len(alone.clients[number]) == len(whole.clients[number])
        assert tests.inputs.equal(both.client_tests.of(number).inputs)  # type: ignore[union-attr]
    assert len(both.test) == pytest.approx(0.1 * sum(map(len, alone.clients)), abs=1)
    assert alone.test.inputs.equal(whole.test.inputs)


def test_own_test_sets_leave_training_alone_and_some_clients_may_have_none() -> None:
    clients = [numbered(4), numbered(3, 10), numbered(2, 20)]
    tests = [(torch.zeros(5, 1), [0, 1, 2, 1, 0]), None, numbered(1, 7)]
    federation = from_arrays(clients, numbered(2), client_test=tests)
    assert [len(samples) for samples in federation.clients] == [4, 3, 2]
    assert [federation.client_tests.count(client) for client in range(3)] == [5, 0, 1]
    assert federation.client_tests.holders([4, 3, 2]) == [0, 2]
    assert federation.classes == 3  # the third is in a client's test set only


def test_images_are_normalised_by_what_is_trained_on() -> None:
    pixels = torch.arange(40, dtype=torch.uint8).repeat_interleave(4).view(40, 1, 2, 2)
    clients = [(pixels, torch.zeros(40))]
    federation = from_arrays(clients, clients[0], client_test=0.5)
    trained = federation.clients[0].inputs.double() / 255
    assert federation.preprocessing.mean == pytest.approx((trained.mean().item(),))


def test_who_has_not_said_anything_yet_may_have_some() -> None:
    assert ClientTests(remote=(3, 0, 0)).holders([9, 9, 0]) == [0, 2]
    assert ClientTests(remote=(0, 0, 0)).holders([9, 9, 0]) == []
    assert ClientTests(remote=(0, 0, 0), share=0.2).holders([1, 9, 0]) == [2]


@pytest.mark.parametrize(
    ("client_test", "sentence"),
    [
        (1.0, r"client_test must be a share of every client's samples, from 0 to below 1, not 1\.0"),
        (-0.1, "from 0 to below 1"),
        (float("nan"), "from 0 to below 1"),
        (True, "not True"),
        ([numbered(1)], "client_test has 1 test sets for 2 clients: each needs one, or None"),
        ([numbered(1), (torch.zeros(2, 7), [0, 1])], r"the test set of client 1 has inputs of shape \(7,\)"),
        ([numbered(1), (torch.zeros(2, 1), [0, -1])], "the test set of client 1 has labels outside 0…1"),
        ([numbered(1), "many"], "the test set of client 1 must be a pair"),
    ],
)
def test_what_cannot_be_is_one_sentence(client_test: object, sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        from_arrays([numbered(4), numbered(3)], numbered(2), client_test=client_test)  # type: ignore[arg-type]


def test_a_share_is_a_plain_number() -> None:
    assert check_test_share(0) == 0.0
    with pytest.raises(FedhmError, match=r"not '0\.2'"):
        check_test_share("0.2")
