"""The algorithm that the convergence analysis is about, step by step in plain PyTorch, and the library's run of it."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import small_config
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.data.samples import Feed, Preprocessing, Samples
from fedhm.report.result import Result
from fedhm.seeds import torch_generator

CLIENTS, STEPS, ROUNDS, BATCH, LR, SEED = 6, 5, 3, 8, 0.05, 4

# Both sides compute in float64, and sum in different orders. A wrong rule is seen above 1e-3.
TOLERANCE = 1e-10

pytestmark = pytest.mark.filterwarnings("ignore:tier 1/2 keeps")  # such small networks save little


class MLP(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 12), nn.Tanh()]
        super().__init__(nn.Flatten(), *layers, nn.Linear(12, 4))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 8, 3, 2, 1, bias=False), nn.Tanh()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(72, 10), nn.Tanh(), nn.Linear(10, 4))


def model(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().double()


def federation() -> Federation:
    """24 or 29 samples of each client: 3 batches, or 4 of which the last has 5."""
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.randn(4, 1, 6, 6, generator=generator, dtype=torch.float64)

    def draw(count: int) -> Samples:
        labels = torch.randint(0, 4, (count,), generator=generator)
        noise = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
        return Samples(prototypes[labels] + noise, labels)

    return Federation([draw(24 + 5 * (n % 2)) for n in range(CLIENTS)], draw(20), 4, Preprocessing())


def run(kind: type[nn.Module], tiers: Sequence[float], **sections: Any) -> tuple[Result, Tensor]:
    """Return the library's run, and all weights of its full model at the end."""
    config = small_config(
        federation={"clients": CLIENTS, "participation": 1.0},
        train={
            "rounds": ROUNDS, "iterations": STEPS, "batch": BATCH, "lr": LR, "momentum": 0.0,
            "weight_decay": 0.0, "frobenius_decay": 0.0, "clip_norm": 0.0, "masked_loss": False,
            **sections.pop("train", {}),
        },
        method={"name": "fedhm", "tiers": list(tiers), "aggregate": "models", "weighting": "uniform"},
        server={"robust": "none"},
        evaluation={"diagnostics": "theory", "batch": 20, **sections.pop("evaluation", {})},
        **sections,
    )  # fmt: skip
    experiment = assemble(model(kind), federation(), config.model_copy(update={"seed": SEED}))
    final: dict[str, Tensor] = {}
    merge = experiment.method.merge

    def watched(state: Any, updates: Any, round_number: int) -> Any:
        after = merge(state, updates, round_number)
        final.update(after.weights)
        return after

    experiment.method.merge = watched  # type: ignore[method-assign]
    result = experiment.run()
    return result, torch.cat([final[name].flatten() for name in dict(model(kind).named_parameters())])


# The twin: Algorithm "FedHM simple" of the paper's appendix, and the quantities of its analysis, each by its formula.


class Factors(nn.Module):
    """A layer whose weight is U Vᵀ, with U (rows, r) and V (columns, r) of the unrolled weight."""

    def __init__(self, layer: Any, rank: int) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        del self.layer.weight
        self.shape = layer.weight.shape
        U, S, Vt = torch.linalg.svd(unrolled(layer.weight.detach()), full_matrices=False)
        self.U, self.V = (nn.Parameter(A[:, :rank] * S[:rank].sqrt()) for A in (U, Vt.T))

    @property
    def weight(self) -> Tensor:
        n, m, k1, k2 = (*self.shape, 1, 1)[:4]
        return (self.U @ self.V.T).reshape(m, k1, n, k2).permute(2, 0, 1, 3).reshape(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight = self.weight
        y: Tensor = self.layer(x)
        return y


def unrolled(weight: Tensor) -> Tensor:
    n, m, k1, k2 = (*weight.shape, 1, 1)[:4]
    return weight.reshape(n, m, k1, k2).permute(1, 2, 0, 3).reshape(m * k1, n * k2)


def factorize(network: nn.Module, ratio: float) -> nn.Module:
    """Return the hybrid network. Dense stay the first layer, the classifier, and what would not get smaller."""
    hybrid = copy.deepcopy(network)
    names = [name for name, layer in network.named_children() if isinstance(layer, nn.Linear | nn.Conv2d)]
    for name in names[1:-1]:
        layer = getattr(hybrid, name)
        rows, columns = unrolled(layer.weight).shape
        rank = max(1, round(ratio * (len(layer.weight) if layer.weight.ndim == 4 else min(rows, columns))))
        if ratio < 1 and rank * (rows + columns) < layer.weight.numel():
            setattr(hybrid, name, Factors(layer, rank))
    return hybrid


def point(network: nn.Module, ranks: dict[str, int]) -> dict[str, Tensor]:
    """Return all parameters, the factors padded with zeros."""
    found = {}
    for name, parameter in network.named_parameters():
        layer, _, part = name.partition(".")
        missing = ranks[layer] - parameter.shape[1] if part in ("U", "V") else 0
        found[name.replace("layer.", "")] = F.pad(parameter.detach().clone(), (0, missing) if missing else ())
    return found


def mean(points: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in points]).mean(0) for name in points[0]}


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return sum((first[name] - second[name]).square().sum().item() for name in first)


def batches(samples: Samples, round_number: int, client: int, tier: str) -> Iterator[tuple[Any, Tensor]]:
    """Yield the library's batches: the algorithm draws any."""
    generator = torch_generator(SEED, "batches", round_number, client, tier)
    while True:
        yield from Feed(samples, Preprocessing()).shuffled(BATCH, generator)


def fixed_samples(samples: Samples, client: int) -> tuple[Tensor, Tensor]:
    chosen = torch.randperm(len(samples), generator=torch_generator(SEED, "gradient", client))[:20]
    return samples.tensor[chosen], samples.labels[chosen]


def at(network: nn.Module, values: dict[str, Tensor], ranks: dict[str, int]) -> nn.Module:
    """Return the network with factors of these ranks at a point."""
    built = copy.deepcopy(network)
    for name, rank in ranks.items():
        setattr(built, name, Factors(getattr(built, name), rank))
    for name, parameter in built.named_parameters():
        parameter.data = values[name.replace("layer.", "")].clone()
    return built


def gradient(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    found = torch.autograd.grad(F.cross_entropy(network(inputs), labels), list(network.parameters()))
    return torch.cat([each.flatten() for each in found])


def plain(kind: type[nn.Module], tiers: Sequence[float]) -> tuple[Tensor, list[dict[str, float]]]:
    """Return the weights after all rounds, and what the analysis is about in each round."""
    w, data = model(kind), federation().clients
    names = {1.0: "full", 1 / 2: "1/2", 1 / 4: "1/4", 1 / 8: "1/8"}
    measured: list[dict[str, float]] = []
    for number in range(1, ROUNDS + 1):
        ratios = [tiers[p % len(tiers)] for p in range(CLIENTS)]
        networks = [factorize(w, ratio) for ratio in ratios]
        hybrids = [{n: m for n, m in net.named_modules() if isinstance(m, Factors)} for net in networks]
        ranks = {n: max(h[n].U.shape[1] for h in hybrids if n in h) for n in {n for h in hybrids for n in h}}
        starts = [point(network, ranks) for network in networks]
        squares: list[list[float]] = [[] for _ in networks]
        norms: list[float] = []
        for p, network in enumerate(networks):
            stream = batches(data[p], number, p, names[ratios[p]])
            for _ in range(STEPS):
                norms += [factor.norm().item() for h in hybrids[p].values() for factor in (h.U, h.V)]
                g = gradient(network, *next(stream))
                squares[p].append(g.square().sum().item())
                for parameter, part in zip(
                    network.parameters(), g.split([x.numel() for x in network.parameters()]), strict=True
                ):
                    parameter.data -= LR * part.view_as(parameter)
            norms += [factor.norm().item() for h in hybrids[p].values() for factor in (h.U, h.V)]
        found = {"kappa_g": max(sum(each) / STEPS for each in squares), "kappa_uv": max(norms)}
        if all(h.keys() == ranks.keys() for h in hybrids):  # nobody trains a layer dense that others factorize
            ends = [point(network, ranks) for network in networks]
            y, h = mean(starts), mean(ends)
            found["start_distance"] = sum(distance(y, each) for each in starts) / CLIENTS
            found["drift"] = sum(distance(h, each) for each in ends) / CLIENTS
            found["drift_bound"] = 6 * LR**2 * STEPS**2 * found["kappa_g"] + 3 * found["start_distance"]
            samples = [fixed_samples(data[p], p) for p in range(CLIENTS)]
            whole = torch.stack([gradient(at(w, y, ranks), *each) for each in samples]).mean(0)
            found["gradient_norm_squared"] = whole.square().sum().item()
            if number == 1:
                losses = [F.cross_entropy(w(inputs), labels).item() for inputs, labels in samples]
                found["initial_loss"] = sum(losses) / CLIENTS
        measured.append(found)
        with torch.no_grad():
            for name, parameter in w.named_parameters():
                layer, _, part = name.partition(".")
                parts = [getattr(network, layer) for network in networks]
                recovered = [getattr(x.layer if part == "bias" and isinstance(x, Factors) else x, part) for x in parts]
                parameter.copy_(torch.stack([each.detach() for each in recovered]).mean(0))
    return torch.cat([parameter.detach().flatten() for parameter in w.parameters()]), measured


@pytest.mark.parametrize("kind", [MLP, Convolutions])
@pytest.mark.parametrize("tiers", [(1 / 2, 1 / 4, 1 / 8), (1.0, 1 / 2, 1 / 4)])
def test_the_library_runs_the_algorithm_of_the_analysis(kind: type[nn.Module], tiers: tuple[float, ...]) -> None:
    result, found = run(kind, tiers)
    expected, measured = plain(kind, tiers)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for record, by_formula in zip(result.records, measured, strict=True):
        of_library = {name: record.diagnostics[f"theory/{name}"] for name in by_formula}
        assert of_library == pytest.approx(by_formula, rel=1e-7)  # of a loss in float32: 1e-8


def test_the_steps_that_the_twin_leaves_out_are_seen() -> None:
    """Momentum, a decay or other weights change the result far more than the tolerance."""
    _, right = run(MLP, (1 / 2, 1 / 4))
    for train in (
        {"momentum": 0.5},
        {"frobenius_decay": 0.01},
        {"iterations": STEPS + 1},
        {"masked_loss": True, "lr": 0.06},
    ):
        _, wrong = run(MLP, (1 / 2, 1 / 4), train=train, evaluation={"diagnostics": "basic"})
        assert (right - wrong).abs().max() > 1e-4


def test_measuring_changes_nothing_that_is_trained() -> None:
    _, measured = run(MLP, (1.0, 1 / 4))
    _, unmeasured = run(MLP, (1.0, 1 / 4), evaluation={"diagnostics": "basic"})
    assert torch.equal(measured, unmeasured)


@pytest.mark.parametrize("tiers", [(1 / 2, 1 / 4, 1 / 8), (1.0, 1 / 4)])
def test_the_lemma_holds(tiers: tuple[float, ...]) -> None:
    """The drift is below its bound, which the analysis proves for factors and expectations."""
    result, _ = run(MLP, tiers)
    for record in result.records:
        found = record.diagnostics
        assert found["theory/start_distance"] < found["theory/drift"] < found["theory/drift_bound"]
        assert found["theory/dense_participants"] == (3 if 1.0 in tiers else 0)
