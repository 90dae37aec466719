"""How much a client may count for by the number of samples that it says it has, and by its loss.

Nobody sees a remote client's samples. One that claims 2⁶² of them would own every mean by samples, the pooled BatchNorm
statistics and the pooled metrics: no client counts for more than a multiple of the median of what all say.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fedhm.work.messages import Update
from fedhm.work.statistics import KIND as STATISTICS
from fedhm.work.work import work_of

TIMES_MEDIAN = 10  # of the clients' numbers of samples
LOSS_TIMES_MEDIAN = 100.0


def most_samples(said: Iterable[int]) -> int | None:
    """Return for how many samples a client may count; None: nobody has said how many it has."""
    known = [count for count in said if count]
    return TIMES_MEDIAN * statistics.median_low(known) if known else None


def capped(update: Update, most: int | None) -> Update:
    """Return the update of a client that counts for no more than so many samples: sums and counts shrink with them."""
    if most is None or update.samples <= most:
        return update
    share, tensors = most / update.samples, update.tensors
    if work_of(update.kind).tests:
        tensors = {name: tensor * share for name, tensor in tensors.items()}
    elif update.kind == STATISTICS:
        tensors = {name: t * share if name.endswith("/values") else t for name, t in tensors.items()}
    return replace(update, samples=most, tensors=tensors)


def typical_loss(losses: Sequence[float], mean: float) -> float:
    """Return the mean loss; where one is out of all proportion to most, the median, which it does not move."""
    middle = statistics.median_low(losses)
    return middle if max(map(abs, losses)) > LOSS_TIMES_MEDIAN * max(1.0, abs(middle)) else mean
