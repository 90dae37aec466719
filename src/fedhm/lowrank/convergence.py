"""The measurable constants of the paper's convergence bound (appendix, assumptions on the factorized layers).

With r(p) the rank of participant p in a layer, √Σ_r(p) that layer's leading square-rooted singular values padded
with zeros, and a mean over the round's participants:

    κ_σ1 = max over layers of  ‖ (mean_p √Σ_r(p))² − Σ ‖²_F
    κ_σ2 = max over layers and participants of  ‖ mean_i √Σ_r(i) − √Σ_r(p) ‖²_F
    κ_UV = max over layers and participants of  ‖U‖_F, ‖V‖_F

They are 0 when everybody trains the full network, and tell how far truncation pulls the participants apart.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def spectral_constants(spectra: Mapping[str, Tensor], ranks: Sequence[Mapping[str, int]]) -> tuple[float, float]:
    """κ_σ1 and κ_σ2 from each layer's singular values and each participant's ranks; no rank means full rank."""
    first = second = 0.0
    for layer, spectrum in spectra.items():
        chosen = torch.tensor([plan.get(layer, len(spectrum)) for plan in ranks])
        # participants of one rank hold the same values: one row for each distinct rank
        distinct, counts = chosen.unique(return_counts=True)
        kept = torch.arange(len(spectrum)) < distinct[:, None]
        roots = spectrum.double().clamp(min=0).sqrt() * kept
        mean = (roots * counts[:, None]).sum(0) / counts.sum()
        first = max(first, (mean**2 - spectrum.double()).square().sum().item())
        second = max(second, (mean - roots).square().sum(1).max().item())
    return first, second


def largest_norm(factors: Iterable[Tensor]) -> float:
    """κ_UV over the factors of one update."""
    return max((factor.norm().item() for factor in factors), default=0.0)
