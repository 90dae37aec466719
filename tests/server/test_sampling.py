"""Who has which tier, and that samples dealt out by tier go to those who have it."""

import pytest

import fedhm
from fedhm.assembly import read_federation
from fedhm.config.loading import load_config
from fedhm.config.schema import FederationConfig
from fedhm.errors import FedhmError
from fedhm.runs.fingerprint import data_facts
from fedhm.server.sampling import clients_with_network, sample_participants
from fedhm.work.messages import Participant

BY_TIER = ["data.partition=by-tier", "federation.clients=8", "train.rounds=1"]


def test_clients_of_a_tier_are_those_that_its_labels_were_dealt_to() -> None:
    config = load_config("digits", [*BY_TIER, "data.by_tier_levels=2", "method.tiers=[1, 1/4]"])
    levels, clients = fedhm.prepare(config).method.levels, read_federation(config).clients
    main_labels: dict[str, set[frozenset[int]]] = {}
    for p in next(sample_participants(FederationConfig(participation=1.0), 8, levels, 0, 1)):
        counts = clients[p.client].labels.bincount(minlength=10)
        main_labels.setdefault(p.tier, set()).add(frozenset(counts.topk(5).indices.tolist()))
    (of_full,), (of_quarter,) = main_labels["full"], main_labels["1/4"]  # all clients of a tier agree
    assert of_full | of_quarter == set(range(10))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["federation.heterogeneity=dynamic"], "needs clients that stay at their tiers"),
        ([f"federation.assignment={['full'] * 8}"], r"goes by the clients' numbers, .* without federation\.assignment"),
        (["method.tiers=[1, 1/2, 1/4]"], r"data\.by_tier_levels = 4, but fedhm has 3 levels"),
        (["method.name=fedavg", "federation.heterogeneity=dynamic"], "needs clients that stay at their tiers"),
    ],
)
def test_samples_by_tier_for_clients_with_other_tiers_are_one_sentence(changes: list[str], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        fedhm.prepare(load_config("digits", [*BY_TIER, *changes]))


@pytest.mark.parametrize("method", [["method.tiers=[1, 1, 1/4, 1/8]"], ["method.name=fedavg"]])
def test_a_tier_listed_twice_and_a_single_one_for_all_have_the_same_samples(method: list[str]) -> None:
    usual = fedhm.prepare(load_config("digits", BY_TIER))
    other = fedhm.prepare(load_config("digits", [*BY_TIER, *method]))
    assert data_facts(other.federation) == data_facts(usual.federation)


def drawn(*numbers: int, full: int | None = None) -> list[Participant]:
    return [Participant(number, "full" if number == full else "1/2") for number in numbers]


def test_only_clients_whose_tier_has_a_network_are_sent_one() -> None:
    drawings = [drawn(0, 1), drawn(2, 3, full=3), drawn(0, 1), drawn(0, 3, full=3)]
    assert list(clients_with_network(drawings, ["full"], 4)) == [[Participant(3, "full")]] * 2
    assert list(clients_with_network(drawings, ["full", "1/2"], 4)) == drawings


def test_where_no_client_has_a_network_drawings_count_once_everybody_was_asked() -> None:
    drawings = [drawn(0, 1), drawn(2, 3), drawn(0, 2)]
    assert list(clients_with_network(drawings, ["full"], 4)) == drawings[1:]
