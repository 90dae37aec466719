"""Width plans: how many channels of every layer a narrower network keeps, for any network that runs.

A layer with C output channels keeps round(C · width) of them; the classifier keeps all. The number of inputs of a layer
follows from the layers before it. It is found by running the network once while its layers are made narrower.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhm.errors import FedhmError
from fedhm.networks.structure import copy_network, weight_owners

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)
LAYERS = (*CONVOLUTIONS, nn.Linear, *NORMS)  # layers that can be made narrower


def is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, CONVOLUTIONS) and layer.groups > 1 and layer.groups == layer.in_channels


def inputs_of(layer: nn.Module) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return layer.in_channels
    return layer.in_features if isinstance(layer, nn.Linear) else outputs_of(layer)


def outputs_of(layer: nn.Module) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return layer.out_channels
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, _BatchNorm):
        return layer.num_features
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    assert isinstance(layer, nn.LayerNorm)
    if _over_several_axes(layer):
        raise FedhmError("a LayerNorm over several axes cannot be made narrower")
    return layer.normalized_shape[0]


def sizes_of(network: nn.Module) -> dict[str, list[int]]:
    """Return [outputs, inputs] by layer name, for the layers that can be resized."""
    layers = {n: m for n, m in network.named_modules() if type(m) in LAYERS and not _over_several_axes(m)}
    return {name: [outputs_of(layer), inputs_of(layer)] for name, layer in layers.items()}


def _over_several_axes(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) > 1


def resize(layer: nn.Module, outputs: int, inputs: int) -> None:
    """Keep only the first `outputs` and `inputs` channels of a layer, in place."""
    if isinstance(layer, CONVOLUTIONS):
        if is_depthwise(layer):
            layer.groups = inputs
            inputs_per_group = 1
        elif layer.groups > 1 and (outputs, inputs) != (layer.out_channels, layer.in_channels):
            raise FedhmError(f"a convolution in {layer.groups} groups cannot be made narrower")
        else:
            inputs_per_group = inputs // layer.groups
        layer.out_channels, layer.in_channels = outputs, inputs
        shape: tuple[int, ...] = (outputs, inputs_per_group)
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = outputs, inputs
        shape = (outputs, inputs)
    else:
        if isinstance(layer, nn.GroupNorm):
            if outputs % layer.num_groups:
                raise FedhmError(f"a GroupNorm of {layer.num_groups} groups cannot have {outputs} channels")
            layer.num_channels = outputs
        elif isinstance(layer, nn.LayerNorm):
            layer.normalized_shape = (outputs,)
        elif isinstance(layer, _BatchNorm):
            layer.num_features = outputs
        shape = (outputs,)
    for name, parameter in layer.named_parameters(recurse=False):
        setattr(layer, name, nn.Parameter(_leading(parameter.detach(), shape), parameter.requires_grad))
    for name, buffer in layer.named_buffers(recurse=False):
        if buffer.ndim:  # not BatchNorm's counter
            setattr(layer, name, _leading(buffer, shape))


def _leading(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    where = tuple(slice(size) for size in shape[: tensor.ndim])
    return tensor[where].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Axis:
    """One axis of a weight: `kept` of its `full` indices. Each channel has a block of `unit` indices."""

    full: int
    kept: int
    unit: int = 1

    def window(self, offset: int) -> Tensor | None:
        """Return the indices of the channels offset, offset + 1, …, which wrap around the end; None means all."""
        if self.kept == self.full:
            return None
        channels = (torch.arange(self.kept // self.unit) + offset) % (self.full // self.unit)
        return (channels[:, None] * self.unit + torch.arange(self.unit)).flatten()


@dataclass(frozen=True)
class LayerCut:
    """The part of one layer that a width plan keeps."""

    outputs: Axis
    inputs: Axis | None  # None if a layer has one weight for each output: norms, depthwise convolutions
    normalised: bool = False  # a normalisation follows the layer


WidthPlan = dict[str, LayerCut]  # by layer name


def plan_widths(model: nn.Module, width: float, sample: Tensor, classifier: str | Collection[str] | None) -> WidthPlan:
    """Plan the network of `width`, a share of the channels in 0…1; `sample` is a batch of inputs.

    The classifier, or each of several, keeps its outputs. If it is unknown, the layer that runs last keeps them.
    """
    network = copy_network(model).eval()
    names = {layer: name for name, layer in _layers(network)}
    scores, order = _running(network, names, sample)
    given = (classifier,) if isinstance(classifier, str) else classifier
    last = given or order[-1:]
    cuts: WidthPlan = {}
    made: list[tuple[Tensor, str]] = []  # outputs of all layers except norms, in the order in which they ran

    def narrow(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        name = names[layer]
        if name in cuts:  # a layer that the network uses twice
            return
        found = arguments[0].shape[-1 if isinstance(layer, nn.Linear | nn.LayerNorm) else 1]
        inputs = _inputs(name, inputs_of(layer), found, cuts[made[-1][1]].outputs if made else None)
        full = outputs_of(layer)
        if isinstance(layer, NORMS) or is_depthwise(layer):
            share = full // inputs.full
            cuts[name] = LayerCut(Axis(full, inputs.kept * share, inputs.unit * share), None)
        else:
            kept = full if name in last else max(1, round(full * width))
            cuts[name] = LayerCut(Axis(full, kept), inputs)
        resize(layer, cuts[name].outputs.kept, inputs.kept)
        for output, source in made:
            if isinstance(layer, NORMS) and output is arguments[0]:
                cuts[source] = replace(cuts[source], normalised=True)

    def note(layer: nn.Module, _: Any, output: Tensor) -> None:
        if not isinstance(layer, NORMS):
            made.append((output, names[layer]))

    for layer in names:
        layer.register_forward_pre_hook(narrow)
        layer.register_forward_hook(note)
    narrow_scores = run_or_refuse(lambda: network(sample))
    if narrow_scores.shape != scores.shape:  # for example, a hard-coded reshape took channels for samples
        found, wanted = tuple(narrow_scores.shape), tuple(scores.shape)
        raise FedhmError(f"the model cannot be made narrower: its scores would be {found} instead of {wanted}")
    return cuts


def run_or_refuse(forward: Callable[[], Tensor]) -> Tensor:
    """Run a narrower network, and raise a clear error if it fails."""
    try:
        with torch.no_grad():
            return forward()
    except FedhmError:
        raise
    except Exception as error:  # of the user's model
        raise FedhmError(f"the model cannot be made narrower: {error}") from error


def _running(network: nn.Module, names: dict[nn.Module, str], sample: Tensor) -> tuple[Tensor, list[str]]:
    """Return the full network's output, and its layers except norms in the order in which they run."""
    order: list[str] = []
    hooks = [
        layer.register_forward_hook(lambda layer, *_: order.append(names[layer]))
        for layer in names
        if not isinstance(layer, NORMS)
    ]
    scores = run_or_refuse(lambda: network(sample))
    for hook in hooks:
        hook.remove()
    return scores, order


def _layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers to make narrower. Raise if other layers have weights."""
    owners = weight_owners(network)
    for name, layer in network.named_modules():
        own = list(layer.parameters(recurse=False))
        if not own and not isinstance(layer, NORMS):
            continue
        if type(layer) not in LAYERS:
            raise FedhmError(
                f"the model cannot be made narrower: '{name or 'the model itself'}' is a {type(layer).__name__}, "
                "and only convolutions, Linear and normalisation layers are"
            )
        if any(owners[id(p)] > 1 for p in own):
            raise FedhmError(f"the model cannot be made narrower: the weights of '{name}' are tied to another layer's")
        yield name, layer


def _inputs(name: str, full: int, found: int, previous: Axis | None) -> Axis:
    """Return the input axis of a layer that gets `found` values in place of the `full` network's."""
    if found == full:
        return Axis(full, full)
    if previous is not None and full % previous.full == 0 and found == full // previous.full * previous.kept:
        return Axis(full, found, full // previous.full * previous.unit)  # a flattened image: several per channel
    if found > full:
        raise FedhmError(f"the model cannot be made narrower: '{name}' would get {found} inputs instead of {full}")
    return Axis(full, found)
