"""Inner products of recovered changes, of networks that are all versions of one model: ⟨Dᵢ, Dⱼ⟩ for all pairs.

A factorized layer's change is U V − U₀ V₀ = (U, −U₀)(V; V₀), a product of factors of twice the rank. So inner products
of two such are those of small matrices, and of one with a dense change D it is ⟨Lᵀ D, R⟩: nothing is recovered.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedhm.lowrank.changes.change import Change, inner
from fedhm.lowrank.decompositions.unroll import Form, join, unroll
from fedhm.networks.exchange import averages
from fedhm.networks.precision import precise

Recovered = Mapping[str, Tensor | tuple[Tensor, Tensor]]  # by name of the weight: dense, or left and right factor


def gram(changes: Sequence[Recovered]) -> Tensor:
    """Return the inner products of all pairs, (n, n)."""
    found = torch.zeros(len(changes), len(changes), dtype=torch.float64)
    for row, one in enumerate(changes):
        for column, other in enumerate(changes[: row + 1]):
            found[row, column] = found[column, row] = between(one, other)
    return found


def between(one: Recovered, other: Recovered) -> float:
    """Return the inner product of two changes."""
    return sum(_of_layer(one[name], other[name]) for name in one)


def by_layer(one: Recovered, other: Recovered) -> dict[str, float]:
    """Return the inner products of two changes, layer by layer."""
    found: dict[str, float] = {}
    for name in one:
        layer = name.rpartition(".")[0]
        found[layer] = found.get(layer, 0.0) + _of_layer(one[name], other[name])
    return found


def recovered(change: Change, factorized: Collection[str]) -> Recovered:
    """Return a change by the names that its tensors have in the full model, its factorized layers as factors."""
    found: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
    pairs = {f"{layer}.{part}" for layer in factorized for part in ("u", "v")}
    for name, tensor in change.returned.items():
        if name not in pairs and averages(tensor):
            difference = precise(tensor) - precise(change.sent[name])
            found[name] = torch.view_as_real(difference) if difference.is_complex() else difference
    for layer in sorted(factorized):  # sums are to have one order
        u, v = f"{layer}.u", f"{layer}.v"
        left, right = join(change.returned[u], change.returned[v])
        left_sent, right_sent = join(change.sent[u], change.sent[v])
        found[f"{layer}.weight"] = (
            torch.cat([left, -left_sent], 1).double(),
            torch.cat([right, right_sent], 0).double(),
        )
    return found


def _of_layer(one: Tensor | tuple[Tensor, Tensor], other: Tensor | tuple[Tensor, Tensor]) -> float:
    if isinstance(one, Tensor):
        if isinstance(other, Tensor):
            return torch.dot(one.flatten(), other.flatten().to(one.dtype)).item()
        one, other = other, one
    if isinstance(other, Tensor):
        left, right = one
        form: Form = "pufferfish" if right.shape[1] == len(other) else "spatial"
        return ((left.T @ unroll(other, form).to(left.dtype)) * right).sum().item()
    return inner(one, other)
