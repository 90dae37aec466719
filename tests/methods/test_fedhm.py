"""FedHM against its formulas."""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.config.section import tier_name
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import plan_of, to_full
from fedhm.lowrank.layers import PufferfishConv2d
from fedhm.lowrank.svd import Form, unroll
from fedhm.methods.fedavg import FedAvg, FedAvgConfig
from fedhm.methods.fedhm import FedHM, FedHMConfig, weight_of
from fedhm.methods.method import Method, Setup, State
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.work.messages import Participant, Task, Update

TIERS = ("full", "1/2", "1/4", "1/8")
PAPER = {"aggregate": "models", "start": "whole"}
both_forms = pytest.mark.parametrize("form", ["spatial", "pufferfish"])


def paper(settings: Mapping[str, object]) -> FedHMConfig:
    """FedHM as in the paper, with some settings changed."""
    return FedHMConfig.model_validate({**PAPER, **settings})


def start(method: Method, model: nn.Module) -> State:
    return method.start({name: t.clone() for name, t in exchanged_tensors(model).items()})


def answer(task: Task, seed: int = 0, labels: tuple[int, ...] | None = None, samples: int = 10) -> Update:
    """What a client might send: everything moved a little."""
    generator = torch.Generator().manual_seed(1000 * seed + task.client)
    moved = {n: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in task.tensors.items()}
    return Update("train", task.round, task.client, task.tier, task.network, moved, samples, labels, 0.1)


def recovered(method: FedHM, update: Update) -> Tensors:
    """The full model that an update stands for, by way of the network itself."""
    full = to_full(load(method.network(update.network), update.tensors))
    return {name: tensor for name, tensor in full.items() if tensor.is_floating_point()}


def round_of(method: Method, state: State, tiers: Sequence[str]) -> list[Task]:
    return list(method.tasks(state, [Participant(number, tier) for number, tier in enumerate(tiers)], 1))


@both_forms
def test_each_tier_is_sent_the_truncated_decomposition(form: Form) -> None:
    model = small_model()
    method = FedHM(model, paper({"keep": 1, "form": form}))
    state = start(method, model)
    for tier in TIERS:
        network = load(method.network(method.spec(tier)), method.weights(state, tier))
        for layer, rank in method.planner.first[tier].ranks.items():
            weight = unroll(state.weights[f"{layer}.weight"], form)
            error = (unroll(to_full(network)[f"{layer}.weight"], form) - weight).norm().item()
            assert error == pytest.approx(float(torch.linalg.svdvals(weight)[rank:].norm()), rel=1e-4)
    assert [len(method.planner.first[tier].ranks) for tier in TIERS] == [0, 2, 2, 2]


@both_forms
@pytest.mark.parametrize("weighting", ["uniform", "samples", "softmax", "softmax-inverse"])
def test_models_are_recovered_and_averaged_by_weight(weighting: str, form: Form) -> None:
    model = small_model().double()
    config = paper({"weighting": weighting, "temperature": 2.0, "form": form})
    method = FedHM(model, config)
    state = start(method, model)
    updates = [answer(task, samples=task.client + 1) for task in round_of(method, state, TIERS)]
    merged = method.merge(state, iter(updates), 1)

    ratios = [1, 1 / 2, 1 / 4, 1 / 8]
    exponents = {
        "uniform": [0.0] * 4,
        "samples": [math.log(n) for n in (1, 2, 3, 4)],
        "softmax": [ratio / 2 for ratio in ratios],
        "softmax-inverse": [-1 / ratio / 2 for ratio in ratios],
    }[weighting]
    alphas = torch.softmax(torch.tensor(exponents, dtype=torch.float64), 0)
    for name, tensor in merged.weights.items():
        expected = sum(alpha * recovered(method, u)[name] for alpha, u in zip(alphas, updates, strict=True))
        torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-9)


def test_the_papers_weights_and_those_of_published_code() -> None:
    def weights(name: str) -> list[float]:
        config = paper({"weighting": name, "temperature": 5})
        raw = [weight_of(config, ratio, 1) for ratio in (1, 1 / 2, 1 / 4, 1 / 8)]
        return [round(value / sum(raw), 3) for value in raw]

    assert weights("softmax") == [0.277, 0.251, 0.239, 0.233]
    assert weights("softmax-inverse") == [0.383, 0.313, 0.210, 0.094]
    assert weights("uniform") == [0.25] * 4
    infinite = paper({"weighting": "softmax", "temperature": math.inf})
    assert weight_of(infinite, 0.125, 1) == weight_of(infinite, 1, 1)


def test_a_temperature_at_which_small_tiers_vanish_is_refused() -> None:
    with pytest.raises(FedhmError, match="leaves the smallest tier without weight"):
        FedHM(small_model(), paper({"weighting": "softmax", "temperature": 0.01}))


@pytest.mark.parametrize(("tiers", "own"), [(["1/2", "1/8"], True), (["full", "1/8"], False)])
def test_without_a_client_of_the_largest_tier_the_servers_model_is_one_more(tiers: list[str], own: bool) -> None:
    model = small_model().double()
    method = FedHM(model, paper({"weighting": "softmax", "temperature": 0.5}))
    state = start(method, model)
    updates = [answer(task) for task in round_of(method, state, tiers)]
    merged = method.merge(state, iter(updates), 1)
    ratios = {"full": 1.0, "1/2": 1 / 2, "1/8": 1 / 8}
    models = [(ratios[u.tier], recovered(method, u)) for u in updates] + [(1.0, state.weights)] * own
    alphas = torch.softmax(torch.tensor([ratio / 0.5 for ratio, _ in models], dtype=torch.float64), 0)
    for name, tensor in merged.weights.items():
        expected = sum(alpha * each[name] for alpha, (_, each) in zip(alphas, models, strict=True))
        torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-9)


@both_forms
def test_the_update_form_adds_what_clients_changed(form: Form) -> None:
    model = small_model().double()
    method = FedHM(model, paper({"aggregate": "updates", "form": form}))
    state = start(method, model)
    tasks = round_of(method, state, TIERS)
    updates = [answer(task) for task in tasks]
    merged = method.merge(state, iter(updates), 1)
    for name, old in state.weights.items():
        change = torch.zeros_like(old)
        for task, update in zip(tasks, updates, strict=True):
            sent = Update("train", 1, task.client, task.tier, task.network, task.tensors, 1, None, 0.0)
            change += (recovered(method, update)[name] - recovered(method, sent)[name]) / 4
        torch.testing.assert_close(merged.weights[name], old + change, rtol=1e-9, atol=1e-9)


def test_untrained_directions_collapse_in_the_model_form_only() -> None:
    """Clients that change nothing: averaging models multiplies the tail by the full clients' share, every round."""
    model = small_model().double()
    tail: dict[str, float] = {}
    energies: dict[str, list[float]] = {"models": [], "updates": []}
    for form in ("models", "updates"):
        method = FedHM(model, paper({"aggregate": form}))
        state = start(method, model)
        before = float(state.factors["7"].spectrum[12:].norm())  # beyond the largest low rank, 24 / 2
        for _ in range(2):
            idle = [
                Update("train", 1, t.client, t.tier, t.network, t.tensors, 1, None, 0.0)
                for t in round_of(method, state, TIERS)
            ]
            state = method.merge(state, iter(idle), 1)
            energies[form].append(state.diagnostics["energy_beyond/1/2"])
        tail[form] = float(state.factors["7"].spectrum[12:].norm()) / before
    assert tail["models"] == pytest.approx(0.25**2, rel=1e-6)
    assert tail["updates"] == pytest.approx(1, rel=1e-6)
    assert energies["models"][1] < energies["models"][0] / 10
    assert energies["updates"][1] == pytest.approx(energies["updates"][0], rel=1e-6)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), counts=st.lists(st.integers(1, 50), min_size=2, max_size=5))
def test_all_clients_at_full_rank_is_fedavg_bit_for_bit(seed: int, counts: list[int]) -> None:
    model = small_model(seed % 7)
    for weighting in ("uniform", "samples"):
        fedhm = FedHM(model, paper({"weighting": weighting}), Setup("9"))
        fedavg = FedAvg(model, FedAvgConfig.model_validate({"weighting": weighting}), Setup("9"))
        merged = []
        for method in (fedhm, fedavg):
            state = start(method, model)
            tasks = round_of(method, state, ["full"] * len(counts))
            labels = [None if n % 2 else (0, 2) for n in counts]
            updates = [answer(t, seed, held, n) for t, held, n in zip(tasks, labels, counts, strict=True)]
            merged.append(method.merge(state, iter(updates), 1).weights)
        assert merged[0].keys() == merged[1].keys()
        assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])


def test_a_whole_run_at_full_rank_is_fedavg_bit_for_bit(federation: Federation) -> None:
    runs = []
    for method in ({"name": "fedhm", "tiers": [1]}, {"name": "fedavg", "tier": 1}):
        config = small_config(method=method, train={"rounds": 3})
        runs.append(assemble(small_model(), federation, config).run())
    states = [run.networks["full"].state_dict() for run in runs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert runs[0].metrics == runs[1].metrics


@pytest.mark.parametrize("weighting", ["uniform", "samples", "softmax"])
@pytest.mark.parametrize("aggregate", ["models", "updates"])
def test_warm_up_rounds_are_fedavg_bit_for_bit(federation: Federation, weighting: str, aggregate: str) -> None:
    fedhm = {"name": "fedhm", **PAPER, "warmup": 3, "weighting": weighting, "aggregate": aggregate}
    fedavg = {"name": "fedavg", "weighting": "samples" if weighting == "samples" else "uniform"}
    warm, plain = (
        assemble(small_model(), federation, small_config(method=method, train={"rounds": 3})).run()
        for method in (fedhm, fedavg)
    )
    states = [run.networks["full"].state_dict() for run in (warm, plain)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for one, other in zip(warm.records, plain.records, strict=True):
        assert {p.tier for p in one.participants} != {"full"}
        assert one.metrics["full"] == other.metrics["full"]
        assert one.diagnostics["kappa_uv"] == one.diagnostics["kappa_sigma2"] == 0
        # what a small tier's clients exchange and compute in a warm-up round is that of the full network
        assert {t.down / t.clients for t in one.traffic.values()} == {other.traffic["full"].down / 4}
        assert sum(t.macs for t in one.traffic.values()) == other.traffic["full"].macs


@pytest.mark.parametrize("tiers", [(1.0, 1 / 2, 1 / 4), (1 / 2, 1 / 4)])
def test_after_the_warm_up_every_tier_trains_its_own_network(tiers: tuple[float, ...]) -> None:
    model = small_model()
    method = FedHM(model, paper({"tiers": tiers, "warmup": 2}))
    participants = [Participant(number, tier) for number, tier in enumerate(method.tiers)]
    state = start(method, model)
    for round_number in (1, 2, 3, 4):
        tasks = list(method.tasks(state, participants, round_number))
        assert [task.tier for task in tasks] == list(method.tiers)
        assert [str(task.network) for task in tasks] == (
            ["full"] * len(tiers) if round_number <= 2 else [task.tier for task in tasks]
        )
        for task in tasks:
            network = load(method.network(task.network), task.tensors)
            assert exchanged_tensors(network).keys() == task.tensors.keys()
            assert (plan_of(network) == {}) == (task.network.tier == "full")
        state = method.merge(state, (answer(task) for task in tasks), round_number)
    assert set(method.tiers) == {tier_name(ratio) for ratio in tiers}


def test_a_run_without_a_full_tier_warms_up_on_the_full_network(federation: Federation) -> None:
    config = small_config(method={"tiers": [1 / 4, 1 / 8], "warmup": 1}, evaluation={"static_from": "never"})
    experiment = assemble(small_model(), federation, config)
    result = experiment.run()
    assert set(result.networks) == set(result.costs) == {"1/4", "1/8"}
    for tier, cost in result.costs.items():
        sent = [record.traffic[tier].down / record.traffic[tier].clients for record in result.records]
        assert sent == [experiment.facts.network(experiment.method.spec("full")).cost.bytes, cost.bytes]


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", ["models", "updates"])
@pytest.mark.usefixtures("without_figures")
def test_a_whole_run_in_pufferfishs_form(federation: Federation, tmp_path: Path, aggregate: str) -> None:
    settings: dict[str, dict[str, object]] = {
        "method": {"form": "pufferfish", "start": "whole", "aggregate": aggregate},
        "train": {"rounds": 8, "epochs": 3, "batch": 8, "lr": 0.05},
        "evaluation": {"every": 8},
        "engine": {"threads": 1},
    }
    result = fedhm.run(small_model(), federation.clients, federation.test, settings, tmp_path)
    assert all(score.accuracy > 0.85 for score in result.metrics.values()), result.metrics
    small = fedhm.load_tier(tmp_path / "models" / "1-8.safetensors", small_model())
    assert isinstance(small.get_submodule("3"), PufferfishConv2d)
    assert result.costs["full"].parameters - result.costs["1/8"].parameters == (
        16 * 8 * 9 - 2 * (8 * 9 + 16) + 144 * 24 - 3 * (144 + 24)
    )
    batch = torch.rand(2, 1, 6, 6)
    assert torch.equal(small(batch), result.networks["1/8"].eval()(batch))


def test_classifier_rows_come_from_those_who_hold_the_label() -> None:
    model = small_model()
    method = FedHM(model, paper({}), Setup("9"))
    state = start(method, model)
    tasks = round_of(method, state, ["full", "1/8"])
    updates = [answer(tasks[0], labels=(0, 1)), answer(tasks[1], labels=(1, 2))]
    merged = method.merge(state, iter(updates), 1).weights["9.weight"]
    first, second = (update.tensors["9.weight"] for update in updates)
    assert torch.equal(merged[0], first[0])
    torch.testing.assert_close(merged[1], (first[1] + second[1]) / 2)
    assert torch.equal(merged[2], second[2])
    assert torch.equal(merged[3], state.weights["9.weight"][3])


def test_diagnostics_are_zero_without_truncation_and_positive_with() -> None:
    model = small_model()
    method = FedHM(model, paper({}))
    state = start(method, model)
    alone = method.merge(state, (answer(t) for t in round_of(method, state, ["full", "full"])), 1).diagnostics
    mixed = method.merge(state, (answer(t) for t in round_of(method, state, TIERS)), 1).diagnostics
    kappas = {name: value for name, value in alone.items() if name.startswith("kappa")}
    assert kappas == pytest.approx({"kappa_uv": 0.0, "kappa_sigma1": 0.0, "kappa_sigma2": 0.0}, abs=1e-25)
    assert alone.keys() == mixed.keys()
    assert all(value > 0 for value in mixed.values())


@both_forms
def test_diagnostics_tell_what_lies_beyond_each_tier(form: Form) -> None:
    model = small_model().double()
    method = FedHM(model, paper({"form": form}))
    state = start(method, model)
    merged = method.merge(state, (answer(t) for t in round_of(method, state, TIERS)), 1)
    found = {name: value for name, value in merged.diagnostics.items() if name.startswith("energy_beyond/")}
    assert list(found) == [f"energy_beyond/{tier}" for tier in TIERS[1:]]
    for tier in TIERS[1:]:
        truncated = to_full(load(method.network(method.spec(tier)), method.weights(merged, tier)))
        names = [f"{layer}.weight" for layer in method.planner.first[tier].ranks]
        lost = sum((merged.weights[name] - truncated[name]).square().sum() for name in names)
        whole = sum(merged.weights[name].square().sum() for name in names)
        assert found[f"energy_beyond/{tier}"] == pytest.approx((lost / whole).item(), rel=1e-9)


@pytest.mark.parametrize("aggregate", ["models", "updates", "bands"])
def test_merging_folds_one_update_at_a_time(aggregate: str) -> None:
    """Each update may be thrown away before the next is made."""
    import gc
    import weakref

    model = small_model()
    method = FedHM(model, paper({"aggregate": aggregate}))
    state = start(method, model)
    alive: list[weakref.ref[Update]] = []

    def stream() -> object:
        for task in round_of(method, state, TIERS * 3):
            gc.collect()
            assert sum(reference() is not None for reference in alive) <= 1
            update = answer(task)
            alive.append(weakref.ref(update))
            yield update
            del update

    method.merge(state, stream(), 1)  # type: ignore[arg-type]
    assert len(alive) == 12


def test_a_model_with_nothing_to_factorize_is_an_error() -> None:
    with pytest.raises(FedhmError, match=r"nothing to factorize for tier 1/2(.|\n)*the classifier"):
        FedHM(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), paper({}))
    with pytest.raises(FedhmError, match="nothing to factorize"):
        FedAvg(nn.Linear(4, 2), FedAvgConfig(tier=0.5))


def test_fedavg_of_a_small_tier_averages_its_factors() -> None:
    model = small_model()
    method = FedAvg(model, FedAvgConfig(tier=0.25))
    state = start(method, model)
    hybrid_error = (
        to_full(load(method.network(method.spec("1/4")), state.weights))["7.weight"] - model[7].weight
    ).norm()
    spectrum = torch.linalg.svdvals(model[7].weight.detach())
    assert hybrid_error.item() == pytest.approx(float(spectrum[6:].norm()), rel=1e-4)
    updates = [answer(task) for task in round_of(method, state, ["1/4"] * 2)]
    merged = method.merge(state, iter(copy.copy(updates)), 1)
    torch.testing.assert_close(merged.weights["7.u"], (updates[0].tensors["7.u"] + updates[1].tensors["7.u"]) / 2)
