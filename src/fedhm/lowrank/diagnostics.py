"""The measurable constants of the paper's convergence bound (appendix, assumptions on the factorized layers).

With r(p) the rank of participant p in a layer, √Σ_r(p) that layer's leading square-rooted singular values padded
with zeros, and a mean over the round's participants:

    κ_σ1 = max over layers of  ‖ (mean_p √Σ_r(p))² − Σ ‖²_F
    κ_σ2 = max over layers and participants of  ‖ mean_i √Σ_r(i) − √Σ_r(p) ‖²_F
    κ_UV = max over layers and participants of  ‖U‖_F, ‖V‖_F

If a layer was decomposed in part, only the energy Σσ² of the other singular values is known. That is enough for κ_σ1.
For κ_σ2, which needs Σσ, the upper bound √(count · Σσ²) is used.

The constants are 0 if all participants train the full network. They measure how far truncation separates participants.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedhm.lowrank.layers import dense_weight_name, largest_rank
from fedhm.lowrank.svd import Factors, Form, squared_norm


class Tail(NamedTuple):
    """The unknown singular values of a layer that was decomposed in part."""

    values: int  # their number
    energy: float  # Σσ²


def spectral_constants(
    spectra: Mapping[str, Tensor], ranks: Sequence[Mapping[str, int]], tails: Mapping[str, Tail] = {}
) -> tuple[float, float]:
    """Return κ_σ1 and κ_σ2 from each layer's singular values and each participant's ranks. No rank means full rank."""
    first = second = 0.0
    for layer, spectrum in spectra.items():
        tail = tails.get(layer, Tail(0, 0.0))
        chosen = torch.tensor([plan.get(layer, len(spectrum) + tail.values) for plan in ranks])
        # participants of one rank have the same values: one row for each distinct rank
        distinct, counts = chosen.unique(return_counts=True)
        shares = counts.double() / counts.sum()
        kept = torch.arange(len(spectrum)) < distinct[:, None]
        roots = spectrum.double().clamp(min=0).sqrt() * kept
        mean = (roots * shares[:, None]).sum(0)
        whole = (distinct > len(spectrum)).double()  # participants with the whole tail
        share = float((whole * shares).sum())
        beyond = (1 - share**2) ** 2 * tail.energy
        first = max(first, (mean**2 - spectrum.double()).square().sum().item() + beyond)
        apart = (mean - roots).square().sum(1) + (share - whole) ** 2 * math.sqrt(tail.values * tail.energy)
        second = max(second, apart.max().item())
    return first, second


def largest_norm(factors: Iterable[Tensor]) -> float:
    """Return κ_UV over the factors of one update."""
    return max((factor.norm().item() for factor in factors), default=0.0)


def energy_beyond(energies: Mapping[str, float], spectra: Mapping[str, Tensor], ranks: Mapping[str, int]) -> float:
    """Return the share of the layers' energies ‖W‖²_F beyond their ranks, up to which singular values are known."""
    total = sum(energies[layer] for layer in ranks)
    within = sum(spectra[layer][:rank].double().square().sum().item() for layer, rank in ranks.items())
    return max(0.0, 1 - within / total) if total else 0.0


def layer_constants(
    weights: Mapping[str, Tensor], factors: Mapping[str, Factors], ranks: Sequence[Mapping[str, int]], form: Form
) -> tuple[float, float]:
    """Return κ_σ1 and κ_σ2 of a model from its layers' decompositions, whole or in part, and participants' ranks."""
    spectra = {layer: found.spectrum for layer, found in factors.items()}
    tails: dict[str, Tail] = {}
    for layer, spectrum in spectra.items():
        weight = weights[dense_weight_name(layer)]
        if unknown := largest_rank(weight.shape, form) - len(spectrum):
            tails[layer] = Tail(unknown, max(0.0, squared_norm(weight) - float(spectrum.double().square().sum())))
    return spectral_constants(spectra, ranks, tails) if ranks else (0.0, 0.0)


def tier_energies(
    weights: Mapping[str, Tensor], factors: Mapping[str, Factors], plans: Mapping[str, Mapping[str, int]]
) -> dict[str, float]:
    """Return, by tier, the share of the model's energy beyond the tier's ranks."""
    spectra = {layer: found.spectrum for layer, found in factors.items()}
    energies = {layer: squared_norm(weights[dense_weight_name(layer)]) for layer in factors}
    return {tier: energy_beyond(energies, spectra, plan) for tier, plan in plans.items()}
