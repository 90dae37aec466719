"""The sum of a private round: what one client can change of it, and the noise that hides that."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from private_runs import CLIP, UPDATES, ByHand, by_hand, changed, normal_federation, private_config, vector
from torch import Tensor

from conftest import small_model
from fedhm.assembly import assemble
from fedhm.lowrank.delta import clip_delta, factorized_delta
from fedhm.networks.exchange import Tensors
from fedhm.seeds import secret_normals, secret_uniforms
from fedhm.server.record import Record
from fedhm.work.messages import Task

METHODS = (
    UPDATES,
    {**UPDATES, "form": "pufferfish"},
    {**UPDATES, "warmup": 1},
    {"name": "fedavg"},
    {"name": "fedavg", "tier": "1/4"},
    {"name": "capable", "tiers": [1, "1/2"]},
    {"name": "slimmed", "width": 0.5},
    {"name": "fedpara"},
)


def model_after(method: dict[str, object], answers: dict[int, float], scales: float, seed: int) -> tuple[Tensor, float]:
    """The weights after a round without noise in which these clients answer, in units in which the sum is."""

    def answer(task: Task) -> Tensors | None:
        if task.client not in answers:
            return None
        generator = torch.Generator().manual_seed(1000 * seed + task.client)
        return changed(task, generator, scales * answers[task.client])

    config = private_config(method=method, privacy={"noise": 0.0})
    experiment = by_hand(config, answer, torch.float64)
    state = experiment.method.start(experiment.initial)
    after = experiment.train_round(state, Record(1))
    assert experiment.filters.privacy is not None
    expected = experiment.filters.privacy._expected
    return vector(after.weights) * expected, expected


@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
@example(canary=0, power=5.0, seed=0)
@example(canary=0, power=-5.0, seed=0)
@given(st.integers(0, 7), st.floats(-6, 6), st.integers(0, 10_000))
@settings(max_examples=3, deadline=None)
def test_a_client_more_changes_the_sum_by_the_bound_at_most(
    method: dict[str, object], canary: int, power: float, seed: int
) -> None:
    others = {client: 1.0 for client in (1, 2, 4, 6) if client != canary}
    without, _ = model_after(method, others, 1.0, seed)
    with_it, _ = model_after(method, {**others, canary: 10.0**power}, 1.0, seed)
    # sums of weights, some of them 1e9, in double precision
    assert (with_it - without).norm().item() <= CLIP * (1 + 1e-9) + 1e-12
    if method["name"] != "capable" and power > 2:
        assert (with_it - without).norm().item() == pytest.approx(CLIP, rel=2e-6)


def test_adversaries_cannot_overflow_the_bound() -> None:
    sent = {"l.u": torch.ones(2, 3), "l.v": torch.ones(4, 2), "b": torch.zeros(3)}
    for huge in (1e30, 3e38, -3e38):
        for names in (("l.u",), ("l.v",), ("b",), ("l.u", "l.v", "b")):
            returned = {n: torch.full_like(t, huge) if n in names else t for n, t in sent.items()}
            cut = clip_delta(returned, sent, ("l",), CLIP)
            assert factorized_delta(cut, sent, ("l",)).norm <= CLIP
    doubles = {name: tensor.double() for name, tensor in sent.items()}
    cut = clip_delta({n: torch.full_like(t, 1e250) for n, t in doubles.items()}, doubles, ("l",), CLIP)
    assert factorized_delta(cut, doubles, ("l",)).norm <= CLIP  # of which the norm cannot be computed


@given(st.integers(0, 10_000), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), st.floats(0.01, 10))
def test_the_bound_holds_after_rounding(seed: int, dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent, returned = (
        {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        for shapes in [{"l.u": (2, 5), "l.v": (7, 2), "b": (40,)}] * 2
    )
    assert factorized_delta(clip_delta(returned, sent, ("l",), bound), sent, ("l",)).norm <= bound


@pytest.mark.parametrize("answering", [0, 3])
def test_the_noise_has_the_deviation_that_is_stated(answering: int) -> None:
    """Also if fewer clients answer than were expected: the divisor is fixed."""
    config = private_config(privacy={"noise": 2.0}, method={"name": "fedavg"})
    experiment = by_hand(config, lambda task: dict(task.tensors) if task.client < answering else None)
    state = experiment.method.start(experiment.initial)
    after = experiment.train_round(state, Record(1))
    fixed = ("mask", "0.bias")
    assert all(torch.equal(after.weights[name], state.weights[name]) for name in fixed)
    moved = {name: t for name, t in after.weights.items() if name not in fixed}
    noise = (vector(moved) - vector({name: state.weights[name] for name in moved})) * 8
    deviation = 2.0 * CLIP
    count = len(noise)
    assert count > 500
    assert noise.mean().item() == pytest.approx(0, abs=4 * deviation / math.sqrt(count))
    assert noise.std().item() == pytest.approx(deviation, rel=4 / math.sqrt(2 * count))


def test_the_mean_is_over_those_who_were_expected() -> None:
    """Three of eight answer with a change of 0.01 in one number: it moves by 3 · 0.01 / 8."""

    def answer(task: Task) -> Tensors | None:
        moved = {**task.tensors, "5.bias": task.tensors["5.bias"] + torch.tensor([0.01, 0, 0, 0])}
        return moved if task.client < 3 else None

    experiment = by_hand(private_config(privacy={"noise": 0.0}), answer)
    state = experiment.method.start(experiment.initial)
    after = experiment.train_round(state, Record(1))
    moved = after.weights["5.bias"] - state.weights["5.bias"]
    assert moved.tolist() == pytest.approx([0.03 / 8, 0, 0, 0], abs=1e-7)


def test_other_sums_are_never_hidden_by_the_same_noise() -> None:
    """What comes of a round that is repeated with other answers does not lay bare what they differ in."""

    def after(shift: float, secret: bytes = b"s" * 32) -> Tensor:
        experiment = by_hand(
            private_config(method={"name": "fedavg"}),
            lambda task: {**task.tensors, "5.bias": task.tensors["5.bias"] + shift},
        )
        assert experiment.filters.privacy is not None
        experiment.filters.privacy.secret.value = secret
        state = experiment.method.start(experiment.initial)
        merged = experiment.train_round(state, Record(1))
        return vector(merged.weights)

    assert torch.equal(after(0.001), after(0.001))
    for other in (after(0.002), after(0.001, b"t" * 32)):
        differing = (after(0.001) != other).double().mean().item()
        assert differing > 0.9


def test_the_servers_optimizer_steps_on_noise_alone() -> None:
    """That nobody was asked must not be seen."""
    config = private_config(server={"optimizer": "momentum"}, federation={"participation": 1e-9})
    experiment = by_hand(config, lambda task: dict(task.tensors))
    state = experiment.method.start(experiment.initial)
    record = Record(1)
    after = experiment.train_round(state, record)
    assert record.participants == []
    assert experiment.filters.optimizer.moments.first
    assert not torch.equal(after.weights["4.weight"], state.weights["4.weight"])
    factors = after.factors["4"]
    approximated = torch.linalg.svdvals(after.weights["4.weight"].T - factors.left @ factors.right).max()
    assert approximated < torch.linalg.svdvals(after.weights["4.weight"]).max()


def test_running_variances_stay_such() -> None:
    config = private_config(method={"name": "fedavg"}, evaluation={"static_from": "never"}, privacy={"noise": 100.0})
    experiment = assemble(small_model(), normal_federation(), config, ByHand(lambda task: dict(task.tensors)))
    assert experiment.filters.privacy is not None
    experiment.filters.privacy.secret.value = b"s" * 32
    state = experiment.method.start(experiment.initial)
    after = experiment.train_round(state, Record(1))
    assert after.weights["1.running_var"].min() == 0
    assert (after.weights["1.running_mean"] != state.weights["1.running_mean"]).all()


def test_statistics_that_stay_get_no_noise_and_cannot_be_changed() -> None:
    train = {"masked_loss": False, "max_change": 0, "frozen_statistics": True}
    config = private_config(method={"name": "fedavg"}, train=train)
    answers = ByHand(lambda task: {name: tensor + 1 for name, tensor in task.tensors.items()})
    experiment = assemble(small_model(), normal_federation(), config, answers)
    assert experiment.filters.privacy is not None
    experiment.filters.privacy.secret.value = b"s" * 32
    state = experiment.method.start(experiment.initial)
    record = Record(1)
    after = experiment.train_round(state, record)
    assert not record.dropped
    for name, tensor in after.weights.items():
        assert torch.equal(tensor, state.weights[name]) == ("running" in name)


def test_secret_numbers_are_those_of_their_distributions() -> None:
    uniform = torch.from_numpy(secret_uniforms(b"x" * 32, 20_000, "test"))
    assert 0 <= uniform.min() < 0.001
    assert 0.999 < uniform.max() < 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / 20_000))
    normal = secret_normals(b"x" * 32, 20_001, "test")
    assert len(normal) == 20_001
    assert normal.mean().item() == pytest.approx(0, abs=4 / math.sqrt(20_000))
    assert normal.var().item() == pytest.approx(1, abs=4 * math.sqrt(2 / 20_000))
    beyond = (normal.abs() > 2).double().mean().item()
    assert beyond == pytest.approx(0.0455, abs=4 * math.sqrt(0.0455 / 20_000))
    assert not torch.equal(normal, secret_normals(b"y" * 32, 20_001, "test"))
