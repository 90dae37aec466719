"""The first updates of a round that can be compared with each other, by which every update is judged."""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from fedhm.server.defence.agreement.gram import Recovered, by_layer
from fedhm.server.defence.agreement.standing import LEAST_SPREAD, Seen, Standing

FEWEST = 2  # others, who tell which way is against theirs
TELLING = 4  # others, of which three honest ones tell who disagrees with them
DEVIATIONS = 1.4826  # in a median distance from the median
QUANTILE = 0.6  # of the cosines with others
CLEAR = 2.0  # spreads: so large is the median agreement of clients that go one way
OF_MOST = 1 / 8  # of the largest median so far, likewise


class Panel:
    """Changes of one model by their clients. Those that disagree with the rest, or did before, do not tell the way.

    last  the layer that gives the outputs: who agrees is told by the others, if there are any
    """

    def __init__(self, clients: Sequence[int], changes: Sequence[Recovered], last: str | None, known: Standing) -> None:
        self._clients, self._changes, self._last, self._known = clients, changes, last, known
        products = torch.stack([self._products(change) for change in changes], 1)  # (1 + layers, n, n)
        self._lengths = products.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt()
        self._cosines = _over(products, self._lengths[:, :, None] * self._lengths[:, None])
        trusted = [place for place, client in enumerate(clients) if not known.was_out(client)]
        self._way = trusted if len(trusted) > TELLING else list(range(len(clients)))
        for _ in clients:
            self._look()
            if self.median <= 0:
                break
            left = [place for place, seen in enumerate(self._seen) if not known.out(clients[place], seen)]
            if left == self._way or len(left) <= TELLING:
                break
            self._way = left

    @property
    def clear(self) -> bool:
        """Tell whether clients go one way at all: those that have converged do not, and nobody can be told by it."""
        return self.median > max(0.0, CLEAR * self._distance, OF_MOST * self._known.most)

    def others(self, client: int) -> int:
        """Return how many other clients' changes tell the way."""
        return sum(self._clients[place] != client for place in self._way)

    def along(self, client: int, change: Recovered) -> tuple[float, float]:
        """Return how a change goes along with the others': its agreement, and its cosine as a whole."""
        own = self._stacked(by_layer(change, change)).clamp(min=0.0).sqrt()
        return self._along(client, _over(self._products(change), own[:, None] * self._lengths))

    def seen(self, agreement: float) -> Seen:
        return Seen(agreement, self.median, self._spread)

    def _look(self) -> None:
        """Compare all with those that tell the way."""
        found = [self._along(client, self._cosines[:, place]) for place, client in enumerate(self._clients)]
        agreements, wholes = ([found[place][part] for place in self._way] for part in (0, 1))
        self.median, self.median_cosine = statistics.median(agreements), statistics.median(wholes)
        self._distance = DEVIATIONS * statistics.median(abs(each - self.median) for each in agreements)
        self._spread = max(self._distance, LEAST_SPREAD * self.median)
        self._seen = [self.seen(agreement) for agreement, _ in found]

    def _along(self, client: int, cosines: Tensor) -> tuple[float, float]:
        """Return the agreement, and the cosine with the sum of the others' changes, each of length 1.

        cosines  with each, (1 + layers, n)
        """
        others = [place for place in self._way if self._clients[place] != client]
        if not others:
            return 0.0, 0.0
        agreement = cosines[1:, others].mean(0).quantile(QUANTILE)
        length = self._cosines[0][others][:, others].sum().clamp(min=0.0).sqrt()
        return agreement.item(), _over(cosines[0, others].sum(), length).item()

    def _products(self, change: Recovered) -> Tensor:
        return torch.stack([self._stacked(by_layer(change, other)) for other in self._changes], 1)

    def _stacked(self, products: dict[str, float]) -> Tensor:
        """Return the whole, then the layers that tell who agrees, (1 + layers,), in one order for all networks."""
        ordered = dict(sorted(products.items()))
        layers = [value for layer, value in ordered.items() if layer != self._last] or [*ordered.values()]
        return torch.tensor([sum(ordered.values()), *layers], dtype=torch.float64)


def _over(products: Tensor, lengths: Tensor) -> Tensor:
    """Return cosines: 0 of what did not change, −1 of what is too long to be computed."""
    return torch.where(lengths > 0, products / lengths, 0.0).nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0)
