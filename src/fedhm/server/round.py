"""The filters of a run's rounds: the one place where they are put together, and where their order is decided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from fedhm.config.schema import ResolvedConfig
from fedhm.data.federation import Federation
from fedhm.networks.exchange import Tensors, untrained_names
from fedhm.networks.spec import NetworkSpec
from fedhm.seeds import Secret
from fedhm.server.collect import Run
from fedhm.server.facts import NetworkFacts, TaskFacts
from fedhm.server.filters.admission import Admission
from fedhm.server.filters.client_weights import ClientWeights, check_client_weights
from fedhm.server.filters.defence import Defence
from fedhm.server.filters.filter import RoundFilter
from fedhm.server.filters.fleet import Fleet
from fedhm.server.filters.optimizer import ServerOptimizer
from fedhm.server.filters.privacy import Privacy, PrivateMethod, check_privacy
from fedhm.server.filters.theory import Theory, check_theory
from fedhm.work.messages import TaskOptions


class FilteredMethod(PrivateMethod, Protocol):
    """What filters know of a method (`methods/method.py`)."""

    one_model: bool

    def spec(self, tier: str, state: Any = None) -> NetworkSpec: ...
    def weights(self, state: Any, tier: str) -> Tensors: ...
    def training_options(self, state: Any, tier: str) -> TaskOptions: ...


@dataclass(frozen=True)
class RoundFilters:
    """All filters of a run. Iterating gives them in the order in which their hooks run.

    The fleet leaves clients out before anything is sent. Admission comes before everything that computes with updates.
    Defence compares updates as clients sent them, so it comes before privacy cuts them. Weights go to updates that pass
    both admission and defence. The optimizer steps on the
    state that privacy released, so that its step tells no more than that state does. Theory comes last: it changes
    nothing, and measures what is merged.
    """

    admission: Admission
    defence: Defence
    optimizer: ServerOptimizer
    fleet: Fleet | None = None  # None: the clients' devices are not known
    privacy: Privacy | None = None  # None: nothing is hidden
    late: RoundFilter | None = None  # of a deployment: clients that were missing at the start; it changes sampling only
    own: Sequence[RoundFilter] = ()  # a user's, after all others that change anything
    weights: ClientWeights | None = None  # None: all clients count alike
    theory: Theory | None = None  # None: the terms of the convergence bound are not measured

    def __iter__(self) -> Iterator[RoundFilter]:
        known = (self.fleet, self.admission, self.defence, self.weights, self.privacy, self.late, self.optimizer)
        ordered = (*known, *self.own, self.theory)
        return (each for each in ordered if each is not None)


def round_filters(
    config: ResolvedConfig,
    model: nn.Module,
    method: FilteredMethod,
    federation: Federation,
    facts: TaskFacts,
    secret: Secret,
    run: Run,
    *,
    clients_test: bool,
) -> RoundFilters:
    """Make the filters that the settings ask for.

    run           an engine's, for filters that have work of their own for clients
    clients_test  some clients evaluate on samples of theirs
    """
    if config.evaluation.diagnostics == "theory":
        check_theory(config)
    check_client_weights(config)
    networks = [facts.network(method.spec(tier)) for tier in method.tiers]
    not_weights = untrained_names(model).union(*(each.untrained for each in networks))
    admission = Admission(config, federation, facts)
    return RoundFilters(
        admission,
        Defence(config, facts, method.one_model),
        ServerOptimizer(
            config.server,
            config.method.name,
            method.state_type.averaged,
            not_weights,
            always=config.privacy.at_server,
        ),
        Fleet(config, facts) if config.federation.devices else None,
        _privacy(config, method, federation, networks, secret, clients_test) if config.privacy.active else None,
        weights=ClientWeights(config.federation.weights) if config.federation.weights else None,
        theory=Theory(config, method, facts, admission, run) if config.evaluation.diagnostics == "theory" else None,
    )


def _privacy(
    config: ResolvedConfig,
    method: FilteredMethod,
    federation: Federation,
    networks: Sequence[NetworkFacts],
    secret: Secret,
    clients_test: bool,
) -> Privacy:
    running = frozenset[str]().union(*(each.running for each in networks))
    frozen = config.train.frozen_statistics
    check_privacy(config, federation, normalised=bool(running) and not frozen, tests=clients_test)
    fixed = (running if frozen else frozenset()).union(*(each.fixed for each in networks))
    return Privacy(config, method, federation.size, fixed, secret)
