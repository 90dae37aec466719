"""Narrower networks: made from a network and a width plan, and the part of the full network that each one holds."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedhm.errors import FedhmError
from fedhm.networks.exchange import is_averageable
from fedhm.networks.structure import copy_network
from fedhm.widths.plan import NORMS, WidthPlan, resize, run_or_refuse

ChannelIndices = tuple[Tensor | None, ...]  # indices for each leading axis of a tensor; None: all of them


def narrow_network(model: nn.Module, plan: WidthPlan) -> nn.Module:
    """Return a copy of `model` with the leading channels of every layer that `plan` keeps."""
    network = copy_network(model)
    layers = dict(network.named_modules())
    for name, cut in plan.items():
        inputs = cut.inputs.kept if cut.inputs else cut.outputs.kept // cut.outputs.unit
        resize(layers[name], cut.outputs.kept, inputs)
    return network


def channel_indices(plan: WidthPlan, name: str, ndim: int, offset: int = 0) -> ChannelIndices:
    """Return the indices of the full network's tensor `name`, of `ndim` axes, that the narrower network holds.

    The window starts at channel `offset` of every layer.
    """
    layer = name.rpartition(".")[0]
    if layer not in plan or ndim == 0:
        return ()
    cut = plan[layer]
    first = cut.outputs.window(offset)
    if ndim == 1 or cut.inputs is None:
        return (first,)
    return first, cut.inputs.window(offset)


def select_channels(tensor: Tensor, indices: ChannelIndices) -> Tensor:
    """Return the part of a tensor at these indices."""
    for axis, chosen in enumerate(indices):
        if chosen is not None:
            tensor = tensor.index_select(axis, chosen)
    return tensor


def assignable_indices(indices: ChannelIndices, shape: torch.Size) -> tuple[Tensor, ...]:
    """Return indices such that `tensor[…]` equals `select_channels` and can be assigned to."""
    chosen = [torch.arange(size) if i is None else i for i, size in zip(indices, shape, strict=False)]
    if len(chosen) == 2:
        return chosen[0][:, None], chosen[1]
    return tuple(chosen)


def check_alignment(model: nn.Module, plan: WidthPlan, sample: Tensor) -> None:
    """Raise if the narrower network of a plan is not a part of the full network.

    It is a part if the full network gives the same outputs with all other weights at zero, for any window. If channels
    of several layers are concatenated, it is not: the plan takes the leading channels of all layers together. Weights
    and inputs are positive here, so that no activation is switched off and no two differences cancel.
    """
    generator = torch.Generator().manual_seed(0)
    full, narrow = (_without_mixing_norms(each).eval() for each in (copy_network(model), narrow_network(model, plan)))
    inputs = torch.rand(sample.shape, generator=generator).to(sample) if sample.is_floating_point() else sample
    own = {name: tensor.detach() for name, tensor in _tensors(narrow)}
    for name, tensor in _tensors(full):
        if not is_averageable(tensor) or name not in own:
            continue
        part, values = own[name], tensor.detach()
        indices = channel_indices(plan, name, values.ndim, offset=1)
        fan_in = max(1, part.numel() // part.shape[0]) if part.ndim else 1
        if name.endswith("running_var"):
            values.fill_(1.0)  # no channel has variance 0
        elif part.ndim:
            values.zero_()
            drawn = torch.rand(part.shape, generator=generator, dtype=torch.float64) / fan_in
            values[assignable_indices(indices, values.shape)] = drawn.to(values)
        part.copy_(select_channels(values, indices))
    expected, got = run_or_refuse(lambda: full(inputs)), run_or_refuse(lambda: narrow(inputs))
    if not torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
        raise FedhmError(
            "the model cannot be made narrower: channels of its layers do not line up, as where several are "
            "concatenated, so the narrow network is no part of the full one"
        )


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor once with its name, also if its layer has two names."""
    yield from network.named_parameters()
    yield from network.named_buffers()


def _without_mixing_norms(network: nn.Module) -> nn.Module:
    """Remove norms over several channels: their output changes with missing channels, whatever the plan."""
    for parent in network.modules():
        for name, child in parent.named_children():
            if isinstance(child, NORMS) and not isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, nn.Identity())
    return network
