"""Differential privacy, `[privacy]`: the noise of a round, the ε of a run, and the settings that void its promise.

A private round hides every single client in the sum of the changes. With W the model before the round, and Dₚ the
change of participant p, recovered to full shape and clipped as a whole to ‖Dₚ‖ ≤ C,

    W ← W + (Σₚ Dₚ + N(0, (z C)²)) / n        n = q · clients that have a network, whoever took part

One client more or less changes the sum by at most C. Everything that follows (a decomposition, the server's optimizer,
the tiers' models) is computed from W alone, and reveals no more than W does.

ε is computed by the Rényi accountant of Google's dp-accounting, depending on `privacy.where`:

    server   Every client takes part with probability q, and the sum of changes of norm at most C has noise of z · C.
             This is the Gaussian mechanism with Poisson sampling. Two runs are neighbours if one has one client more.
    client   The server sees which client sent what. Two changes of norm at most C may be 2 C apart, so the noise of
             z · C is z / 2 in these units. This is the Gaussian mechanism, once for every round in which a client takes
             part. Two runs are neighbours if one client has as many other samples, whichever they are.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedhm.config.schema import Config, PrivacyConfig, ResolvedConfig
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.lowrank.delta import clip_delta
from fedhm.lowrank.hybrid import plan_of
from fedhm.lowrank.layers import dense_weight_name
from fedhm.machine.extras import how_to_install
from fedhm.machine.tensors import update_digest
from fedhm.networks.exchange import Tensors, is_averageable
from fedhm.networks.spec import NetworkSpec
from fedhm.seeds import Secret, secret_normals
from fedhm.server.filters.filter import Arrival, RoundFilter
from fedhm.server.record import Record
from fedhm.server.sampling import expected_to_train, poisson_sample
from fedhm.server.state import TensorPath, map_tensors
from fedhm.work.messages import Participant, Task, Update
from fedhm.work.work import work_of

# Orders of the Rényi divergence. They are whole numbers: for others, the sums do not converge at a large q.
ORDERS = (*range(2, 64), 80, 96, 128, 192, 256, 512, 1024)


def check_accountant() -> None:
    """Refuse privacy with noise if dp-accounting is not installed, which computes ε."""
    try:
        import dp_accounting.rdp  # noqa: F401
    except ImportError:
        raise FedhmError(f"privacy.noise needs the package dp-accounting: {how_to_install('privacy')}") from None


@cache
def epsilon(privacy: PrivacyConfig, participation: float, times: int) -> float:
    """Return ε after this many rounds; with noise at the clients, after this many rounds of one client."""
    import dp_accounting as dp  # takes seconds, and only private runs need it
    from dp_accounting.rdp import RdpAccountant

    if privacy.where == "server":
        step: dp.DpEvent = dp.PoissonSampledDpEvent(participation, dp.GaussianDpEvent(privacy.noise))
    else:
        step = dp.GaussianDpEvent(privacy.noise / 2)
    accountant = RdpAccountant(ORDERS, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return float(accountant.compose(step, times).get_epsilon(privacy.delta)) if times else 0.0


def epsilon_after(records: Sequence[Record], config: Config) -> float | None:
    """Return ε of the rounds so far; None: there is no bound.

    With noise at the clients, it is that of the client that took part most often. If a run may end early, its outputs
    decide when. Only the ε of all its planned rounds holds for every possible end.
    """
    privacy = config.privacy
    if not privacy.active or not privacy.noise:
        return None
    if config.stop.active:
        times = config.train.rounds
    elif privacy.at_server:
        times = len(records)
    else:
        turns = Counter(participant.client for record in records for participant in record.participants)
        times = max(turns.values(), default=0)
    return epsilon(privacy, config.federation.participation, times)


def check_privacy(config: ResolvedConfig, federation: Federation, *, normalised: bool, tests: bool) -> None:
    """Refuse settings under which a client's data would leave without noise, and say what to set instead.

    normalised  some network stores BatchNorm statistics that follow the data
    tests       some clients evaluate models on their own samples
    """
    if problems := [*_problems(config, federation, normalised), *_problems_of_clients(config, tests)]:
        raise FedhmError("\n".join(f"[privacy]: {problem}" for problem in problems))
    if config.privacy.noise:
        check_accountant()


def _problems(config: ResolvedConfig, federation: Federation, normalised: bool) -> Iterator[str]:
    train, stop = config.train, config.stop
    if config.privacy.at_server and config.method.unbounded:
        yield config.method.unbounded
    robust = config.server.robust
    if config.privacy.at_server and robust != "none":  # one client could decide about the updates of all others
        yield f"server.robust = '{robust}' judges an update by those of other clients: set it to 'none'"
    if train.masked_loss and config.objective.has_labels:
        yield "train.masked_loss = true averages a label's row over the clients that hold the label: set it to false"
    if normalised and config.evaluation.gathers_after is not None:
        yield (
            "BatchNorm statistics are gathered at clients without noise: set evaluation.static_from = 'never', so that "
            "running averages are part of the bounded change, or train.frozen_statistics = true"
        )
    if config.evaluation.diagnostics == "theory":
        yield "evaluation.diagnostics = 'theory' lets gradients leave the clients without noise: set it to 'basic'"
    if train.on_bad_update == "stop":
        yield "train.on_bad_update = 'stop' lets one client's update decide whether the run goes on: set it to 'drop'"
    if config.federation.deadline and config.federation.late == "drop":
        yield "federation.deadline drops clients by how many samples they have: set federation.late to 'wait'"
    if config.federation.min_updates > 1:
        yield "a private round is never tried again, as federation.min_updates > 1 may want it: set it to 1"
    if stop.active and (federation.test is None or config.evaluated_on == "validation"):
        yield "[stop] would end the run by metrics of the clients' own samples, without noise: leave it out"
    if config.data is None and not federation.remote and federation.preprocessing.mean:
        yield (
            "images in uint8 are normalised by the mean of all clients' pixels, without noise: give floating-point "
            "inputs that you have normalised yourself"
        )


def _problems_of_clients(config: ResolvedConfig, tests: bool) -> Iterator[str]:
    if not config.privacy.at_clients:
        return
    if tests:
        yield "evaluation at clients sends metrics without noise: do without data.client_test, or set where = 'server'"
    if getattr(config.method, "weighting", "uniform") == "samples":
        yield "method.weighting = 'samples' counts a client by its number of samples, which has no noise: set 'uniform'"
    if config.data is not None and config.data.validation:
        yield "data.validation shows clients' samples to the server: set it to 0, or set where = 'server'"
    if config.train.max_change:
        yield "train.max_change would refuse updates for the noise that their clients added: set it to 0"


S = TypeVar("S")


class PrivateMethod(Protocol):
    """What a private round needs of a method (`methods/method.py`)."""

    tiers: tuple[str, ...]
    levels: tuple[str, ...]
    recovers: bool
    state_type: type[Any]

    def network(self, spec: NetworkSpec) -> nn.Module:
        """Return a new network."""
        ...


class Privacy(RoundFilter):
    """The filter of a private run. If clients add the noise themselves, it only computes ε.

    fixed   names of tensors that training leaves alone: they keep their values and get no noise
    secret  the seed of sampling and noise; it is filled in before the first round
    """

    def __init__(self, config: Config, method: PrivateMethod, clients: int, fixed: Set[str], secret: Secret) -> None:
        self.secret = secret
        self._config, self._method, self._clients, self._fixed = config, method, clients, fixed
        self._expected = expected_to_train(config.federation, clients, method.levels, method.tiers)
        self._factorized = cache(lambda spec: frozenset(plan_of(method.network(spec)) if method.recovers else ()))
        self._count = 0  # updates of the round so far

    def sampling(self, attempts: Iterator[list[Participant]], round_number: int) -> Iterator[list[Participant]]:
        """Draw every client independently, as the accountant assumes. A private round has one attempt."""
        if not self._config.privacy.at_server:
            return attempts
        federation, seed, levels = self._config.federation, self._config.seed, self._method.levels
        return iter([poisson_sample(federation, self._clients, levels, seed, round_number, self.secret.value)])

    def tasks(self, tasks: list[Task], record: Record) -> list[Task]:
        """Refuse tasks whose answer is anything but one trained network from each client."""
        seen: set[int] = set()
        for task in tasks:
            work = work_of(task.kind)
            if task.client in seen or task.kept or not (work.trains and work.returns_network):
                raise FedhmError(
                    f"method.name = '{self._config.method.name}' has clients send more than one network that they "
                    "trained, which [privacy] does not cover: choose fedhm or fedavg"
                )
            seen.add(task.client)
        return tasks

    def updates(self, arrivals: Iterator[Arrival], record: Record) -> Iterator[Arrival]:
        """Clip every change to the bound, and count the updates."""
        if not self._config.privacy.at_server:
            yield from arrivals
            return
        self._count = 0
        for each in arrivals:
            self._count += 1
            yield Arrival(each.task, replace(each.update, tensors=self._clipped(each.update, each.task)))

    def _clipped(self, update: Update, task: Task) -> Tensors:
        """Return a client's tensors with a change of at most the allowed norm."""
        sent, layers = work_of(task.kind).loaded(task), self._factorized(task.network)
        fixed = {name for name in sent if name in self._fixed or self._is_fixed_factor(name, layers)}
        returned = {name: sent[name] if name in fixed else tensor for name, tensor in update.tensors.items()}
        return clip_delta(returned, sent, layers, self._config.privacy.clip)

    def _is_fixed_factor(self, name: str, layers: Set[str]) -> bool:
        """Tell whether a tensor is a factor of a fixed weight."""
        layer, _, _ = name.rpartition(".")
        return layer in layers and dense_weight_name(layer) in self._fixed

    def merged(self, before: S, merged: S, record: Record) -> S:
        """Return the state with noise. It gets noise even if nobody took part, since that must stay hidden too."""
        if not self._config.privacy.at_server:
            return merged
        averaged = self._method.state_type.averaged
        old, share = dict[str, Tensor](), self._count / self._expected
        map_tensors(_fields(before, averaged), lambda name, _, tensor: old.setdefault(name, tensor))
        sums = _digest(_fields(merged, averaged), self._count)

        def with_noise(name: str, path: TensorPath, mean: Tensor) -> Tensor:
            if path[-1] in self._fixed or not is_averageable(mean):
                return old[name]
            after, start = (_as_doubles(tensor) for tensor in (mean, old[name]))
            new = start + share * (after - start) + self._noise(after, name, record.round, sums)
            if path[-1].endswith("running_var"):
                new.clamp_(min=0.0)  # noise may make a variance negative
            return (torch.view_as_complex(new) if mean.is_complex() else new).to(mean.dtype)

        return replace(merged, **map_tensors(_fields(merged, averaged), with_noise))  # type: ignore[type-var]

    def _noise(self, like: Tensor, name: str, round_number: int, sums: str) -> Tensor:
        """Return the noise of one tensor. It depends on the sums that it hides.

        A round that is repeated after an interruption gets the same noise. If other clients answer then, the same noise
        must not hide both sums: their difference would have no noise.
        """
        privacy = self._config.privacy
        drawn = secret_normals(self.secret.value, like.numel(), "noise", round_number, name, sums)
        return drawn.view(like.shape) * (privacy.noise * privacy.clip / self._expected)

    def finish(self, records: Sequence[Record]) -> None:
        records[-1].epsilon = epsilon_after(records, self._config)


def _fields(state: Any, averaged: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(state, name) for name in averaged}


def _as_doubles(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _digest(fields: dict[str, Any], count: int) -> str:
    digest = hashlib.blake2b(str(count).encode())

    def add(_: str, __: TensorPath, tensor: Tensor) -> Tensor:
        update_digest(digest, tensor)
        return tensor

    map_tensors(fields, add)
    return digest.hexdigest()
