"""Sampling: which clients take part in a round, at which tier, and the settings that sampling does not allow."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from fedhm.config.schema import Config, FederationConfig, fixed_level
from fedhm.errors import FedhmError
from fedhm.seeds import numpy_generator, secret_uniforms
from fedhm.work.messages import Participant


def sample_participants(
    config: FederationConfig, clients: int, levels: Sequence[str], seed: int, round_number: int
) -> Iterator[list[Participant]]:
    """Yield the participants of a round's first attempt, of its second attempt, and so on without end.

    They are a random share of the clients, in the order of their numbers. A later attempt prefers clients that were not
    asked before.
    """
    number = config.per_round(clients)
    chosen = numpy_generator(seed, "participants", round_number).choice(clients, number, replace=False).tolist()
    asked: set[int] = set()
    for attempt in count(2):
        yield _at_their_tiers(sorted(chosen), config, clients, levels, seed, round_number)
        asked.update(chosen)
        order = numpy_generator(seed, "participants", round_number, "attempt", attempt).permutation(clients).tolist()
        chosen = sorted(order, key=asked.__contains__)[:number]  # a stable order: each part of it stays random


def poisson_sample(
    config: FederationConfig, clients: int, levels: Sequence[str], seed: int, round_number: int, secret: bytes
) -> list[Participant]:
    """Return the participants of a private round: every client takes part independently, with the same probability.

    There may be none. Without the secret, nobody can tell which clients took part.
    """
    drawn = secret_uniforms(secret, clients, "participants", round_number)
    chosen = (drawn < config.participation).nonzero()[0].tolist()
    return _at_their_tiers(chosen, config, clients, levels, seed, round_number)


def expected_to_train(config: FederationConfig, clients: int, levels: Sequence[str], tiers: Sequence[str]) -> float:
    """Return the expected number of clients with a network in a round of Poisson sampling."""
    if config.heterogeneity == "dynamic":
        able = clients * sum(level in tiers for level in levels) / len(levels)
    elif config.given_tiers:
        able = sum(tier in tiers for tier in config.given_tiers)
    else:
        able = sum(levels[fixed_level(client, len(levels))] in tiers for client in range(clients))
    return config.participation * able


def clients_with_network(
    attempts: Iterable[list[Participant]], tiers: Sequence[str], clients: int
) -> Iterator[list[Participant]]:
    """Yield the participants of each attempt whose tier has a network; attempts without any are skipped.

    If no client at all has a network, which happens if tiers are drawn in each round, attempts stay as they are: the
    state after such a round is evaluated too.
    """
    without: set[int] = set()
    for chosen in attempts:
        able = [p for p in chosen if p.tier in tiers]
        without.update({p.client for p in chosen} - {p.client for p in able})
        if able or len(without) == clients:
            yield able or chosen


def evaluators(
    config: Config, holders: Sequence[int], clients: int, levels: Sequence[str], round_number: int
) -> Iterator[list[Participant]]:
    """Yield the clients that evaluate, out of those with test samples; if none of them answers, others, until all were.

    Each list is in the order of the clients' numbers. Clients whose tier has no network evaluate too: a model that
    leaves clients out must be judged by them.
    """
    number = max(1, round(config.evaluation.participation * len(holders)))
    chosen = numpy_generator(config.seed, "evaluators", round_number).choice(holders, number, replace=False).tolist()
    order = numpy_generator(config.seed, "evaluators", round_number, "others").permutation(holders).tolist()
    others = [client for client in order if client not in chosen]
    for some in (chosen, *(others[start : start + number] for start in range(0, len(others), number))):
        yield _at_their_tiers(sorted(some), config.federation, clients, levels, config.seed, round_number)


def _at_their_tiers(
    chosen: Sequence[int], config: FederationConfig, clients: int, levels: Sequence[str], seed: int, round_number: int
) -> list[Participant]:
    """Return the chosen clients as participants, each with the tier of its capability level."""
    if config.heterogeneity == "dynamic":
        drawn = numpy_generator(seed, "tiers", round_number).integers(len(levels), size=clients)
        return [Participant(client, levels[drawn[client]]) for client in chosen]
    if config.given_tiers:
        return [Participant(client, config.given_tiers[client]) for client in chosen]
    return [Participant(client, levels[fixed_level(client, len(levels))]) for client in chosen]


def check_min_updates(config: FederationConfig, clients: int) -> None:
    if config.min_updates > (number := config.per_round(clients)):
        raise FedhmError(f"federation.min_updates = {config.min_updates}, but {number} clients take part in a round")


def check_assignment(config: FederationConfig, clients: int, tiers: Sequence[str], levels: Sequence[str]) -> None:
    if not config.assignment:
        return
    if config.heterogeneity == "dynamic":
        raise FedhmError("federation.assignment fixes the clients' tiers, but federation.heterogeneity is 'dynamic'")
    if len(config.assignment) != clients:
        raise FedhmError(f"federation.assignment names {len(config.assignment)} tiers for {clients} clients")
    known = list(dict.fromkeys([*tiers, *levels]))
    if unknown := set(config.assignment) - set(known):
        raise FedhmError(f"federation.assignment: there is no tier '{min(unknown)}', known are {', '.join(known)}")
    if not set(config.assignment) & set(tiers):
        raise FedhmError(f"federation.assignment: nobody has tier '{tiers[0]}', and nobody else trains")


def check_partition(config: Config, levels: Sequence[str]) -> None:
    """Refuse a partition by tier if clients may have other tiers than the partition assumes."""
    if config.data is None or config.data.partition != "by-tier":
        return
    if config.federation.heterogeneity == "dynamic":
        raise FedhmError(
            "data.partition = 'by-tier' needs clients that stay at their tiers: set federation.heterogeneity to 'fixed'"
        )
    if config.federation.assignment or config.federation.devices:
        setting = "assignment" if config.federation.assignment else "devices"
        raise FedhmError(
            f"data.partition = 'by-tier' goes by the clients' numbers, as tiers do without federation.{setting}: "
            "leave that empty"
        )
    # with a single tier, all clients have it, whatever their samples are
    if len(levels) not in (1, config.data.by_tier_levels):
        raise FedhmError(
            f"data.by_tier_levels = {config.data.by_tier_levels}, but {config.method.name} has {len(levels)} levels "
            "(method.tiers, one listed twice counted twice): the two must be equal"
        )
