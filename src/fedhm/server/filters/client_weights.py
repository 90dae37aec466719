"""How much each client counts in the mean (`federation.weights`): some clients have more or better data."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fedhm.config.schema import Config
from fedhm.errors import FedhmError
from fedhm.server.filters.filter import Arrival, RoundFilter
from fedhm.server.record import Record


class ClientWeights(RoundFilter):
    """Gives every update the weight of its client. Methods multiply it with their own (`method.weighting`)."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = tuple(weights)

    def updates(self, arrivals: Iterator[Arrival], record: Record) -> Iterator[Arrival]:
        for arrival in arrivals:
            update = arrival.update
            yield replace(arrival, reply=replace(update, weight=self._weights[update.client]))


def check_client_weights(config: Config) -> None:
    """Refuse weights that a run would not use."""
    if not config.federation.weights:
        return
    if not config.method.weighs_clients:
        raise FedhmError(f"method.name = '{config.method.name}' counts all clients alike: leave federation.weights out")
    if config.server.robust in ("trimmed-mean", "median"):
        raise FedhmError(
            f"server.robust = '{config.server.robust}' counts all clients alike: leave federation.weights out"
        )
    if config.privacy.at_server:
        raise FedhmError("[privacy] bounds one client's effect by counting all alike: leave federation.weights out")
