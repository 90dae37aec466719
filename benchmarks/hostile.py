"""Hostile clients: an engine around another one in which some clients' replies are not what came of their tasks.

They know all: what the server sent, what every honest client of the round answered, and all bounds. Each attack is as
strong as `train.max_change` allows where it goes by length, and hides among the honest where it does not.

    absent       no answer: what is lost with such a client, and no defence can give back
    flip         the way back from where the training went, as far as it may be
    replacement  the way to a model that says the next class, as far as it may be
    noise        a random way, as far as it may be
    alie         a little is enough (Baruch et al. 2019): the honest mean − z × their deviation, number by number
    ipm          inner-product manipulation (Xie et al. 2020): the honest mean's change, backwards
    labels       honest training on wrong labels
    head         honest training but for the classifier: each class goes where the next one is, by as much as passes
    statistics   BatchNorm statistics as far off as the door lets in, also where they travel as running averages
    near         BatchNorm statistics that are off by as much as passes among the honest ones by the default
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedhm.data.federation import Federation
from fedhm.data.samples import Samples
from fedhm.engines.engine import Engine
from fedhm.networks.exchange import Tensors
from fedhm.seeds import derive
from fedhm.server.filters.clip import intervals, layer_limit
from fedhm.work.messages import Failure, Reply, Task, Update
from fedhm.work.work import LARGEST_MEAN, work_of

ALLOWED = 0.99  # of what `train.max_change` lets in
ORDER = (0, 5, 10, 15, 4, 9)  # who is hostile first: of four tiers in turn, one of each before two of any
HEAD = 2.5  # times how far honest clients move
ATTACKS = ("absent", "flip", "replacement", "noise", "alie", "ipm", "labels", "head", "statistics", "near")

Forge = Callable[[Tensors, Sequence[Tensors]], Tensors]  # of the own answer and the honest ones


class Hostile:
    """An engine in which the `hostile` clients attack; it keeps a round's replies until all are there."""

    def __init__(self, engine: Engine, hostile: Iterable[int], attack: str, max_change: float = 10.0) -> None:
        self._engine, self._hostile = engine, frozenset(hostile)
        self._attack, self._most = attack, ALLOWED * max_change

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        sent = list(tasks)
        replies = list(self._engine.run(sent))
        for reply in replies:
            task = sent[reply.position]
            if task.client in self._hostile and self._attack == "absent":
                yield Failure(task.client, "it is absent", reply.position)
            elif isinstance(reply, Update) and task.client in self._hostile:
                others = [r for r in replies if isinstance(r, Update) and self._comparable(r, task)]
                yield replace(reply, tensors=self._forged(task, reply, others))
            else:
                yield reply

    def close(self) -> None:
        self._engine.close()

    def _comparable(self, reply: Update, task: Task) -> bool:
        return reply.client not in self._hostile and (reply.kind, reply.network) == (task.kind, task.network)

    def _forged(self, task: Task, own: Update, honest: Sequence[Update]) -> Tensors:
        work = work_of(task.kind)
        if task.kind == "statistics":
            forge = _STATISTICS.get(self._attack)
            return forge(own.tensors, [update.tensors for update in honest]) if forge else own.tensors
        if not work.returns_network:
            return own.tensors
        sent = work.loaded(task)
        running = {n: t for n, t in own.tensors.items() if n.endswith(("running_mean", "running_var"))}
        if self._attack in _STATISTICS:
            return own.tensors | {n: torch.full_like(t, LARGEST_MEAN) for n, t in running.items()}
        trained = {n: t for n, t in own.tensors.items() if n not in running and t.is_floating_point()}
        if self._attack in ("flip", "noise", "replacement"):
            way = _way(self._attack, trained, sent, derive(task.round, "hostile", task.client))
            longest = self._most * _norm(sent[n] for n in trained)
            return own.tensors | {n: sent[n] + t * (longest / _norm(way.values())) for n, t in way.items()}
        if self._attack == "head":
            usual = statistics.median(_norm(u.tensors[n] - sent[n] for n in trained) for u in honest or [own])
            way = _wrong_classes(trained, sent)
            return own.tensors | {n: sent[n] + t * (HEAD * usual / _norm(way.values())) for n, t in way.items()}
        if self._attack in ("alie", "ipm"):
            among = [update.tensors for update in honest] or [own.tensors]  # alone in its tier, it looks at itself
            return own.tensors | _among(self._attack, among, sent, trained, len(honest), len(self._hostile))
        return own.tensors  # it has trained on wrong labels


def _way(attack: str, trained: Tensors, sent: Tensors, seed: int) -> Tensors:
    if attack == "noise":
        generator = torch.Generator().manual_seed(seed)
        return {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in trained.items()}
    if attack == "flip":
        return {n: sent[n] - t for n, t in trained.items()}
    return {n: t - sent[n] for n, t in trained.items()} | _wrong_classes(trained, sent)


def _wrong_classes(trained: Tensors, sent: Tensors) -> Tensors:
    """Return the classifier's way to where each class has the next one's row."""
    last = list(trained)[-1].rpartition(".")[0]
    return {n: t.roll(1, 0) - sent[n] for n, t in trained.items() if n.rpartition(".")[0] == last}


def _among(
    attack: str, honest: Sequence[Tensors], sent: Tensors, names: Iterable[str], others: int, hostile: int
) -> Tensors:
    found: Tensors = {}
    for name in names:
        stacked = torch.stack([tensors[name] for tensors in honest])
        mean = stacked.mean(0)
        if attack == "ipm":
            found[name] = sent[name] - (mean - sent[name])
        else:
            found[name] = mean - _alie_z(others + hostile, hostile) * stacked.std(0, correction=0)
    return found


def _alie_z(clients: int, hostile: int) -> float:
    """Return how many deviations the paper goes from the mean, and at least one: few clients give it no room at all."""
    needed = clients // 2 + 1 - hostile
    share = (clients - hostile - needed) / max(1, clients - hostile)
    return max(1.0, statistics.NormalDist().inv_cdf(min(max(share, 0.01), 0.99)))


def _far(own: Tensors, _: Sequence[Tensors]) -> Tensors:
    return {n: t if n.endswith("/values") else torch.full_like(t, LARGEST_MEAN) for n, t in own.items()}


def _near(own: Tensors, honest: Sequence[Tensors]) -> Tensors:
    """Return means and variances at the edge of what passes among the honest ones, all channels alike."""
    found = dict(own)
    for layer in {name.rpartition("/")[0] for name in own}:
        for part, (middle, reach) in intervals(honest or [own], layer).items():
            found[f"{layer}/{part}"] = middle + 0.95 * layer_limit(len(middle)) * reach
    return found


_STATISTICS: dict[str, Forge] = {"statistics": _far, "near": _near}


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(torch.linalg.vector_norm(tensor.double()).item() for tensor in tensors))


def mislabelled(federation: Federation, hostile: Iterable[int]) -> Federation:
    """Return the federation in which hostile clients have the last class's label for the first class, and so on."""
    wrong = frozenset(hostile)
    clients = [
        Samples(each.inputs, federation.classes - 1 - each.labels) if number in wrong else each
        for number, each in enumerate(federation.clients)
    ]
    return replace(federation, clients=clients)
