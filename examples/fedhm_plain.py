"""FedHM in plain PyTorch: the paper's Algorithm 1, to be read from top to bottom.

Nothing of the library is used and nothing is done for speed: every tier is factorized anew, every client's model is
recovered to full shape and kept. The test beside this example holds the library to the same numbers.
BatchNorm trains here by batch statistics, as in the library, but gathering them for evaluation is left out.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Settings:
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-4  # of everything but the factors
    frobenius_decay: float = 1e-4  # λ, of the factors
    longest_step: float = 0.2  # learning rate × gradient norm: longer gradients are clipped; the paper clips nothing
    keep: int = 1  # ρ: so many layers stay dense at the start
    temperature: float = math.inf  # τ; at infinity every client counts the same
    bands: bool = False  # average changes, each of their bands over those whose rank reaches it, and not models
    band_speed: float = 0.5  # between the mean of changes over everybody, at 0, and that by bands, at 1


class Factored(nn.Module):
    """W ≈ U Vᵀ: a k×1 convolution m → r, then a 1×k convolution r → n. A Linear layer is the case k = 1."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, rank: int) -> None:
        super().__init__()
        self.shape, self.bias = layer.weight.shape, layer.bias
        self.stride, self.padding = (layer.stride, layer.padding) if isinstance(layer, nn.Conv2d) else ((1, 1), (0, 0))
        n, m, k1, k2 = (*self.shape, 1, 1)[:4]
        matrix = layer.weight.detach().reshape(n, m, k1, k2).permute(1, 2, 0, 3).reshape(m * k1, n * k2)
        U, S, Vt = torch.linalg.svd(matrix, full_matrices=False)
        left, right = U[:, :rank] * S[:rank].sqrt(), S[:rank, None].sqrt() * Vt[:rank]
        self.u = nn.Parameter(left.T.reshape(rank, m, k1, 1))
        self.v = nn.Parameter(right.reshape(rank, n, 1, k2).transpose(0, 1))

    @property
    def weight(self) -> Tensor:
        """Return the dense weight that the factors stand for."""
        return torch.einsum("rmi,nrj->nmij", self.u[:, :, :, 0], self.v[:, :, 0, :]).reshape(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape(*x.shape[:2], *(x.shape[2:] or (1, 1)))
        y = F.conv2d(y, self.u, None, (self.stride[0], 1), (int(self.padding[0]), 0))
        y = F.conv2d(y, self.v, self.bias, (1, self.stride[1]), (0, int(self.padding[1])))
        return y if x.ndim == 4 else y.flatten(1)


def layers_of(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """Return the layers that count, in order; 1×1 convolutions do not. The last one is the classifier."""
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    return {name: layer for name, layer in found.items() if layer.weight.shape[2:] != (1, 1)}


def hybrid_network(model: nn.Module, ratio: float, keep: int) -> nn.Module:
    """Return the [ρ, L, γ] network: dense stay the first ρ layers, the classifier, and what would not get smaller."""
    hybrid = copy.deepcopy(model)
    for name, layer in list(layers_of(hybrid).items())[keep:-1]:
        n, m, k1, k2 = (*layer.weight.shape, 1, 1)[:4]
        rank = max(1, round(ratio * (n if isinstance(layer, nn.Conv2d) else min(n, m))))
        if ratio < 1 and rank * (m * k1 + n * k2) < layer.weight.numel():
            parent, _, child = name.rpartition(".")
            setattr(hybrid.get_submodule(parent), child, Factored(layer, rank))
    return hybrid


def train(network: nn.Module, batches: Batches, held: Tensor, settings: Settings) -> None:
    """Do the paper's LocalUpdate: SGD on the client's batches; `held` masks the labels that the client has."""
    pairs = [module for module in network.modules() if isinstance(module, Factored)]
    factors = [factor for pair in pairs for factor in (pair.u, pair.v)]
    others = [p for p in network.parameters() if all(p is not factor for factor in factors)]
    optimizer = torch.optim.SGD(others, settings.lr, settings.momentum, weight_decay=settings.weight_decay)
    optimizer.add_param_group({"params": factors, "weight_decay": 0.0})
    network.train()
    for inputs, labels in batches:
        loss = F.cross_entropy(network(inputs) * held, labels)
        penalty = sum(pair.weight.square().sum() for pair in pairs)
        optimizer.zero_grad()
        (loss + settings.frobenius_decay / 2 * penalty).backward()
        nn.utils.clip_grad_norm_(network.parameters(), settings.longest_step / settings.lr)
        optimizer.step()


def unrolled(weight: Tensor) -> Tensor:
    n, m, k1, k2 = (*weight.shape, 1, 1)[:4]
    return weight.reshape(n, m, k1, k2).permute(1, 2, 0, 3).reshape(m * k1, n * k2)


def banded(
    old: Tensor, changes: Sequence[Tensor], ranks: Sequence[int], alpha: Sequence[float], speed: float
) -> Tensor:
    """Return the mean change of a matrix: a rank's band is what the next smaller rank has no tangent direction for."""
    U, _, Vt = torch.linalg.svd(old, full_matrices=False)

    def tangent(change: Tensor, rank: int) -> Tensor:
        left, right = U[:, :rank] @ U[:, :rank].T, Vt[:rank].T @ Vt[:rank]
        projected: Tensor = left @ change + change @ right - left @ change @ right
        return projected

    mean = torch.zeros_like(old)
    for below, rank in pairwise([0, *sorted(set(ranks))]):
        reaching = [(a, change, own) for a, change, own in zip(alpha, changes, ranks, strict=True) if own >= rank]
        for a, change, own in reaching:
            band = (change if own == rank else tangent(change, rank)) - tangent(change, below)
            mean += a * band / sum(a for a, _, _ in reaching)
    everybody = sum(a * change for a, change in zip(alpha, changes, strict=True)) / sum(alpha)
    return speed * mean + (1 - speed) * everybody


def merge_bands(
    model: nn.Module, networks: Sequence[tuple[nn.Module, nn.Module]], alpha: Tensor, speed: float
) -> dict[str, Tensor]:
    """Return W + the banded mean of what clients changed; `networks` has each as it was sent and as it came back."""
    merged: dict[str, Tensor] = {}
    for name, layer in layers_of(model).items():
        sent = [network.get_submodule(name) for network, _ in networks]
        if any(isinstance(each, Factored) for each in sent):
            weight = attrgetter(f"{name}.weight")
            changes = [unrolled(weight(after) - weight(before)) for before, after in networks]
            ranks = [len(each.u) if isinstance(each, Factored) else min(changes[0].shape) for each in sent]
            step = banded(unrolled(layer.weight), changes, ranks, alpha.tolist(), speed)
            n, m, k1, k2 = (*layer.weight.shape, 1, 1)[:4]
            rolled = step.reshape(m, k1, n, k2).permute(2, 0, 1, 3).reshape(layer.weight.shape)
            merged[f"{name}.weight"] = layer.weight + rolled
    return merged


@torch.no_grad()
def merge(model: nn.Module, recovered: Sequence[dict[str, Tensor]], alpha: Tensor, held: Tensor) -> None:
    """Set W ← Σ αₚ Wₚ, a row of the classifier only over the clients that hold its label; without any, it stays."""
    classifier = list(layers_of(model))[-1]
    for name, old in model.named_parameters():
        weights = torch.stack([full[name] for full in recovered])  # (clients, *shape)
        rows = held if name.startswith(f"{classifier}.") else torch.ones(len(alpha), 1)
        share = (alpha[:, None] * rows).reshape(*rows.shape, *[1] * (old.ndim - 1))
        old.copy_(torch.where(share.sum(0) > 0, (share * weights).sum(0) / share.sum(0), old))


def one_round(
    model: nn.Module,
    participants: Sequence[tuple[int, float]],  # client, rank ratio γ
    batches: Callable[[int, float], Batches],  # what a client trains on
    held: Tensor,  # (clients, classes): who holds which label
    settings: Settings,
) -> None:
    """Do one round of FedHM; `model`, the server's, becomes the next one."""
    hybrids = {ratio: hybrid_network(model, ratio, settings.keep) for ratio in {ratio for _, ratio in participants}}
    recovered, networks = [], []
    for client, ratio in participants:
        network = copy.deepcopy(hybrids[ratio])
        train(network, batches(client, ratio), held[client], settings)
        networks.append((hybrids[ratio], network))
        recovered.append({name: attrgetter(name)(network).detach() for name, _ in model.named_parameters()})
    owners, ratios = held[[client for client, _ in participants]], [ratio for _, ratio in participants]
    if not settings.bands and max(ratios) < 1:  # published code: without a full client, the server's model is one more
        recovered.append({name: p.detach().clone() for name, p in model.named_parameters()})
        owners, ratios = torch.cat([owners, torch.ones_like(owners[:1])]), [*ratios, 1.0]
    alpha = torch.softmax(torch.tensor(ratios, dtype=torch.float64) / settings.temperature, 0)
    if settings.bands:
        with torch.no_grad():
            by_bands = merge_bands(model, networks, alpha, settings.band_speed)
        recovered = [full | by_bands for full in recovered]  # the mean of one and the same is itself
    merge(model, recovered, alpha, owners)


def small_network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in [(1, 16, 1), (16, 32, 2), (32, 64, 2)]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


def main(rounds: int = 12, clients: int = 12, tiers: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8)) -> None:
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    inputs = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train_labels, test = labels[:1500], slice(1500, None)
    shares = torch.distributions.Dirichlet(torch.full((clients,), 0.5)).sample((10,))  # of every label's samples
    owner = torch.multinomial(shares[train_labels], 1).squeeze(1)
    held = torch.stack([torch.bincount(train_labels[owner == c], minlength=10) > 0 for c in range(clients)])

    def batches(client: int, _: float) -> Batches:
        mine = torch.nonzero(owner == client).squeeze(1)
        for indices in mine[torch.randperm(len(mine))].split(32):
            yield inputs[indices], labels[indices]

    model, settings = small_network(), Settings()
    for number in range(1, rounds + 1):
        chosen = torch.randperm(clients)[: clients // 2].tolist()
        one_round(model, [(c, tiers[c % len(tiers)]) for c in chosen], batches, held, settings)
        print(f"round {number:2}", end="")
        for ratio in tiers:
            network = hybrid_network(model, ratio, settings.keep).eval()
            accuracy = (network(inputs[test]).argmax(1) == labels[test]).float().mean()
            print(f"   γ = {ratio:g}: {accuracy:.1%}", end="")
        print()


if __name__ == "__main__":
    main()
