"""What the server has to know of a network, all of it found on one: building it takes longer than asking it."""

from dataclasses import dataclass

from torch import nn

from fedhm.measure.cost import Cost, measure, sample_spec
from fedhm.measure.self_written import find_self_written
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.exchange import exchanged_tensors, untrained_names
from fedhm.networks.inputs import Inputs
from fedhm.server.filters.history import Layout, layout


@dataclass(frozen=True)
class NetworkFacts:
    cost: Cost
    running: frozenset[str]  # names of BatchNorm's running averages
    untrained: frozenset[str]  # of what no optimizer steps on, running averages among it
    fixed: frozenset[str]  # of what training leaves alone
    layout: Layout
    travels: frozenset[str]  # all that is exchanged of it


def facts_of(network: nn.Module, sample: Inputs) -> NetworkFacts:
    """Look at a network that is thrown away afterwards; `sample` is a batch of one input."""
    running = frozenset(running_statistic_names(network))
    fixed, moving = _fixed_and_moving(network, sample)
    known = layout(network, running | moving)
    return NetworkFacts(
        measure(network, *sample_spec(sample)),
        running,
        untrained_names(network),
        fixed,
        known,
        frozenset(exchanged_tensors(network)),
    )


def _fixed_and_moving(network: nn.Module, sample: Inputs) -> tuple[frozenset[str], frozenset[str]]:
    """Return which tensors training leaves alone, and which it changes without stepping on them."""
    names = untrained_names(network) - running_statistic_names(network)
    if not names:
        return names, names
    try:
        written = find_self_written(network, sample)
    except Exception:  # whatever a foreign model raises: it may need another batch, and need not be told here
        return frozenset(), names
    return names - written, names & written
