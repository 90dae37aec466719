"""Rank collapse: how much of a model its small tiers cannot see.

With σ the singular values of a layer's unrolled weight W and r its rank in a tier, the energy beyond that tier is

    Σ_layers (‖W‖²_F − Σ_{i≤r} σᵢ²) / Σ_layers ‖W‖²_F        over the layers that the tier factorizes.

Where it goes to 0 round by round, the full model has become no more than its truncation.
"""

from collections.abc import Mapping

from torch import Tensor


def energy_beyond(energies: Mapping[str, float], spectra: Mapping[str, Tensor], ranks: Mapping[str, int]) -> float:
    """From each layer's ‖W‖²_F and its leading singular values, of which at least as many as its rank are known."""
    total = sum(energies[layer] for layer in ranks)
    within = sum(spectra[layer][:rank].double().square().sum().item() for layer, rank in ranks.items())
    return max(0.0, 1 - within / total) if total else 0.0
