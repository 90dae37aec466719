"""FedHM with bands, with smaller tiers trained inside larger ones."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.lowrank.svd import Form, unroll
from fedhm.methods.fedavg import FedAvg, FedAvgConfig
from fedhm.methods.fedhm import FedHM, FedHMConfig, FedHMState
from fedhm.methods.method import Setup
from fedhm.networks.exchange import Tensors, exchanged_tensors, load
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Participant, Task, Update

TIERS = ("full", "1/2", "1/4", "1/8")
both_forms = pytest.mark.parametrize("form", ["spatial", "pufferfish"])


def method_of(dtype: torch.dtype = torch.float64, nested: tuple[float, float] | None = None, **config: object) -> FedHM:
    model = small_model().to(dtype)
    return FedHM(
        model,
        FedHMConfig.model_validate({"aggregate": "bands", "start": "whole", "band_speed": 1, **config}),
        Setup(nested=nested, nested_tier="random"),
    )


def begun(method: FedHM) -> FedHMState:
    return method.start({name: t.clone() for name, t in exchanged_tensors(method._model).items()})


def tasks_of(method: FedHM, state: FedHMState, tiers: Sequence[str]) -> list[Task]:
    return list(method.tasks(state, [Participant(number, tier) for number, tier in enumerate(tiers)], 1))


def answer(task: Task, seed: int = 0) -> Update:
    generator = torch.Generator().manual_seed(1000 * seed + task.client)
    moved = {n: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in task.tensors.items()}
    return Update("train", task.round, task.client, task.tier, task.network, moved, 10, None, 0.1)


def recovered(method: FedHM, spec: NetworkSpec, tensors: Tensors) -> Tensors:
    from fedhm.lowrank.hybrid import to_full

    return to_full(load(method.network(spec), tensors))


def plain_bands(method: FedHM, state: FedHMState, tasks: Sequence[Task], updates: Sequence[Update]) -> Tensors:
    """Every client's change cut into bands by projections as matrices, and every band averaged by itself."""
    form = method.config.form
    merged: Tensors = {}
    for name, old in state.weights.items():
        layer = name.removesuffix(".weight")
        changes = [
            recovered(method, t.network, u.tensors)[name] - recovered(method, t.network, t.tensors)[name]
            for t, u in zip(tasks, updates, strict=True)
        ]
        ranks = [method.planner.first[t.network.tier].ranks.get(layer) for t in tasks]
        if not any(ranks):
            merged[name] = old + sum(changes) / len(changes)
            continue
        matrices = [unroll(change, form) for change in changes]
        L, _, R = torch.linalg.svd(unroll(old, form), full_matrices=False)
        reach = [rank or 10**6 for rank in ranks]
        step = torch.zeros_like(matrices[0])
        for lowest, below in zip(sorted(set(reach)), [0, *sorted(set(reach))], strict=False):
            among = [(m, r) for m, r in zip(matrices, reach, strict=True) if r >= lowest]
            for matrix, rank in among:
                upper = matrix if rank == lowest else tangent(matrix, L, R, lowest)
                step += (upper - tangent(matrix, L, R, below)) / len(among)
        everybody = torch.stack(matrices).mean(0)
        merged[name] = unroll(old, form) + torch.lerp(everybody, step, method.config.band_speed)
    return merged


def tangent(change: Tensor, L: Tensor, R: Tensor, rank: int) -> Tensor:
    left, right = L[:, :rank], R[:rank]
    one = [torch.eye(side, dtype=change.dtype) for side in change.shape]
    return change - (one[0] - left @ left.T) @ change @ (one[1] - right.T @ right)


@both_forms
@pytest.mark.parametrize("speed", [1, 0.5])
def test_bands_against_the_formula(form: Form, speed: float) -> None:
    method = method_of(form=form, band_speed=speed)
    state = begun(method)
    tasks = tasks_of(method, state, [*TIERS, "1/4", "full"])
    updates = [answer(task) for task in tasks]
    merged = method.merge(state, iter(updates), 1)
    for name, expected in plain_bands(method, state, tasks, updates).items():
        layered = any(name == f"{layer}.weight" for plan in state.plans.values() for layer in plan.ranks)
        found = unroll(merged.weights[name], form) if layered else merged.weights[name]
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 4), tier=st.sampled_from(TIERS))
def test_with_one_tier_only_bands_are_updates_bit_for_bit(seed: int, count: int, tier: str) -> None:
    merged = []
    for aggregate in ("bands", "updates"):
        method = method_of(torch.float32, aggregate=aggregate)
        state = begun(method)
        updates = [answer(task, seed) for task in tasks_of(method, state, [tier] * count)]
        merged.append(method.merge(state, iter(updates), 1).weights)
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])


def test_with_full_clients_only_bands_are_fedavg_bit_for_bit() -> None:
    merged = []
    model = small_model()
    for method in (FedHM(model, FedHMConfig(start="whole"), Setup("9")), FedAvg(model, FedAvgConfig(), Setup("9"))):
        state = method.start(exchanged_tensors(model))
        tasks = method.tasks(state, [Participant(number, "full") for number in range(3)], 1)
        merged.append(method.merge(state, [answer(task) for task in tasks], 1).weights)
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])


@pytest.mark.parametrize("others", [1, 5])
def test_a_band_does_not_depend_on_how_many_updates_smaller_tiers_sent(others: int) -> None:
    """Clients that change nothing slow nobody down beyond their own rank."""
    method = method_of()
    state = begun(method)
    tasks = tasks_of(method, state, ["full", *["1/8"] * others])
    idle = [Update("train", 1, t.client, t.tier, t.network, t.tensors, 10, None, 0.0) for t in tasks[1:]]
    update = answer(tasks[0])
    merged = method.merge(state, [update, *idle], 1)
    for layer, rank in method.planner.first["1/8"].ranks.items():
        name = f"{layer}.weight"
        change = unroll(update.tensors[name] - state.weights[name])
        L, _, R = torch.linalg.svd(unroll(state.weights[name]), full_matrices=False)
        left_alone = change - tangent(change, L, R, rank)
        found = unroll(merged.weights[name] - state.weights[name])
        torch.testing.assert_close(found - tangent(found, L, R, rank), left_alone)
        torch.testing.assert_close(tangent(found, L, R, rank), tangent(change, L, R, rank) / (1 + others))


def test_from_the_smallest_rank_all_tiers_begin_as_one_function_and_can_go_apart() -> None:
    method = method_of(torch.float32, start="smallest")
    state = begun(method)
    weights = {tier: recovered(method, method.spec(tier), method.weights(state, tier)) for tier in TIERS}
    for tier in TIERS[:-1]:
        for name, tensor in weights[tier].items():
            torch.testing.assert_close(tensor, weights["1/8"][name], rtol=1e-4, atol=1e-6)
    for layer, rank in method.planner.first["1/2"].ranks.items():
        small = method.planner.first["1/8"].ranks[layer]
        left, right = state.factors[layer].prefix(rank)
        assert torch.linalg.matrix_rank(left) == rank  # a direction whose factors were both 0 would never move
        assert not right[small:].any()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "which"), [("auto", "smallest"), ("beside", "random"), ("instead", "random")])
@pytest.mark.parametrize("tiers", [[1, "1/2", "1/4", "1/8"], ["1/2", "1/4"]])
def test_a_whole_run(federation: Federation, tiers: list[object], form: str, which: str) -> None:
    config = small_config(
        method={"name": "fedhm", "tiers": tiers, "aggregate": "bands", "start": "smallest"},
        train={"rounds": 12, "epochs": 3, "nested": 0.5, "nested_form": form, "nested_tier": which},
        evaluation={"every": 12},
    )
    experiment = assemble(small_model(), federation, config)
    result = experiment.run()
    assert all(metrics.accuracy > 0.85 for metrics in result.metrics.values()), result.metrics
    record = result.records[-1]
    # the smallest tier's clients train nothing but their own network; the others pay for what they train inside
    for tier, cost in result.costs.items():
        spent = record.traffic[tier].macs / (record.traffic[tier].clients * 20 * 3)
        inside = [result.costs[t].macs for t in list(result.costs)[list(result.costs).index(tier) + 1 :]]
        inside = inside[-1:] if which == "smallest" else inside
        smaller = sum(inside) / len(inside) if inside else 0.0
        expected = (cost.macs + smaller) / 2 if form == "instead" else cost.macs + smaller
        assert spent == pytest.approx(expected if inside else cost.macs, abs=1)


def test_what_a_full_client_trains_inside_is_the_smaller_tier_itself() -> None:
    """Before any step, the network inside gives the logits that the smaller tier's own network gives."""
    from fedhm.lowrank.hybrid import nested_tiers
    from fedhm.work.nested import BASIS, Nested

    method = method_of(nested=(0.5, 0.5), start="whole")
    state = begun(method)
    x = torch.rand(5, 1, 6, 6, dtype=torch.float64)
    for tier, task in zip(TIERS[:-1], tasks_of(method, state, TIERS[:-1]), strict=True):
        assert (task.kind, str(task.network)) == ("nested", f"nested {tier}")
        network = load(method.network(task.network), Nested().loaded(task))
        bases = {n.removeprefix(BASIS): t for n, t in task.tensors.items() if n.startswith(BASIS)}
        assert bool(bases) == (tier == "full")
        inside, before = nested_tiers(network), [buffer.clone() for buffer in network.buffers()]
        for number, smaller in enumerate(TIERS[TIERS.index(tier) + 1 :]):
            alone = load(method.network(method.spec(smaller)), method.weights(state, smaller)).train()
            found = inside.forward(number, network.train(), bases, x)
            torch.testing.assert_close(found, alone(x), rtol=1e-8, atol=1e-8)
            found.sum().backward()
            assert all(p.grad is not None for p in network.parameters())
            # running averages are not those of the network inside
            assert all(torch.equal(b, old) for b, old in zip(network.buffers(), before, strict=True))
    assert tasks_of(method, state, ["1/8"])[0].kind == "train"


@pytest.mark.usefixtures("without_figures")
def test_killed_and_resumed_bit_for_bit(federation: Federation, tmp_path: Path) -> None:
    settings = {
        "method": {"aggregate": "bands", "start": "smallest"},
        "server": {"optimizer": "momentum", "momentum": 0.5},
        "train": {"rounds": 4, "nested": 0.5},
        "engine": {"threads": 1},
    }

    class Stop:
        def started(self, done: int, rounds: int) -> None: ...
        def task_done(self, *_: object) -> None: ...
        def round_done(self, record: fedhm.Record) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    data = (federation.clients, federation.test)
    with pytest.raises(KeyboardInterrupt):
        fedhm.run(small_model(), *data, settings, tmp_path / "killed", watchers=[Stop()])
    resumed = fedhm.run(small_model(), *data, settings, tmp_path / "killed")
    whole = fedhm.run(small_model(), *data, settings, tmp_path / "whole")
    for tier in TIERS:
        one, other = (result.networks[tier].state_dict() for result in (resumed, whole))
        assert all(torch.equal(one[name], other[name]) for name in one)
