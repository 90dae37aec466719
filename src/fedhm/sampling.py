"""Who takes part in a round, and at which tier."""

from collections.abc import Sequence

from fedhm.config import FederationConfig
from fedhm.errors import FedhmError
from fedhm.messages import Participant
from fedhm.seeds import numpy_generator


def participants(
    config: FederationConfig, clients: int, levels: Sequence[str], seed: int, round_number: int
) -> list[Participant]:
    """A random share of the clients, in the order of their numbers, each with the tier of its capability level."""
    count, generator = config.per_round(clients), numpy_generator(seed, "participants", round_number)
    chosen = sorted(generator.choice(clients, count, replace=False).tolist())
    if config.heterogeneity == "dynamic":
        drawn = numpy_generator(seed, "tiers", round_number).integers(len(levels), size=clients)
        return [Participant(client, levels[drawn[client]]) for client in chosen]
    if config.assignment:
        return [Participant(client, config.assignment[client]) for client in chosen]
    return [Participant(client, levels[client % len(levels)]) for client in chosen]


def check_assignment(config: FederationConfig, clients: int, tiers: Sequence[str]) -> None:
    if not config.assignment:
        return
    if config.heterogeneity == "dynamic":
        raise FedhmError("federation.assignment fixes the clients' tiers, but federation.heterogeneity is 'dynamic'")
    if len(config.assignment) != clients:
        raise FedhmError(f"federation.assignment names {len(config.assignment)} tiers for {clients} clients")
    if unknown := set(config.assignment) - set(tiers):
        raise FedhmError(f"federation.assignment: there is no tier '{min(unknown)}', known are {', '.join(tiers)}")
