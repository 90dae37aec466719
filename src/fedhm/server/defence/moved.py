"""What a client changed, in the parts that are bounded apart: weights, averages that follow the data, outputs."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedhm.lowrank.changes.change import Change, change
from fedhm.lowrank.hybrid import plan_of
from fedhm.lowrank.plan import find_classifier
from fedhm.networks.exchange import exchanged
from fedhm.work.messages import Task, Update
from fedhm.work.work import work_of

LARGEST = 1e300  # of a norm: JSON has no infinity
WEIGHTS, AVERAGES, OUTPUTS = "weights", "averages", "outputs"


@dataclass(frozen=True)
class Layout:
    """What the tensors of a network are."""

    factorized: Set[str]  # layers that travel as factors
    averages: Set[str]  # running averages, and other buffers that follow the data
    last: str | None = None  # the layer that gives the outputs


def layout(network: nn.Module, averages: Set[str]) -> Layout:
    """Return what a network's tensors are, as they travel."""
    own = network.state_dict().keys()
    made = {name.removesuffix(".u") for name in exchanged(network) if name.endswith(".u") and name not in own}
    return Layout(plan_of(network).keys() | made, averages, find_classifier(network))


def length(change: Change) -> float:
    """Return the norm of a change, or the largest that a record can have where it is too long to be computed."""
    return change.norm if change.norm <= LARGEST else LARGEST  # NaN is not


@dataclass(frozen=True)
class Moved:
    """An update, and how far each part of it is from what was sent."""

    update: Update
    parts: Mapping[str, Change]

    def cut(self, lengths: Mapping[str, float]) -> "Moved":
        """Return the update with some of its parts at other lengths, on the straight way from what was sent.

        The very same one, to the last bit, if no part is to have another length.
        """
        if not lengths:
            return self
        parts = {n: each.at_length(lengths[n]) if n in lengths else each for n, each in self.parts.items()}
        found = {name: tensor for each in parts.values() for name, tensor in each.returned.items()}
        return Moved(replace(self.update, tensors={name: found[name] for name in self.update.tensors}), parts)


def moved(task: Task, update: Update, known: Layout) -> Moved:
    """Return what an update changed; nothing where its kind of work does not train."""
    work = work_of(task.kind)
    if not work.trains:
        return Moved(update, {})
    if not work.returns_network:  # its own answer, such as logits, which may be as long as those of others
        nothing = {name: torch.zeros_like(tensor) for name, tensor in update.tensors.items()}
        return Moved(update, {OUTPUTS: change(update.tensors, nothing, ())})
    sent = work.loaded(task)
    averages = {name: tensor for name, tensor in update.tensors.items() if name in known.averages}
    weights = {name: tensor for name, tensor in update.tensors.items() if name not in averages}
    parts = {WEIGHTS: change(weights, sent, known.factorized)}
    if averages:
        parts[AVERAGES] = change(averages, sent, ())
    return Moved(update, parts)
