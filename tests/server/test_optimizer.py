"""The server's optimizers: the published formulas, for every method, and through a killed and resumed run."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from conftest import adapters, small_config, small_model
from fedhm.assembly import assemble
from fedhm.config.registry import known
from fedhm.config.schema import ServerConfig
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.methods.means import factorized
from fedhm.methods.method import ModelState
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.runs.folder import RunFolder
from fedhm.runs.rounds import newest_checkpoint
from fedhm.server.filters.optimizer import Moments, ServerOptimizer
from fedhm.server.state import flatten
from interruption import Interruption

WITHOUT_A_MEAN = ["fedmd", "flora", "lora"]  # models that clients keep; factors that are made anew in every round


def steps(config: ServerConfig, means: list[float], running: float = 7.0) -> list[ModelState]:
    optimizer = ServerOptimizer(config, "fedavg", ("weights",), {"bn.running_mean"})
    state, moments = ModelState({"w": torch.zeros(()).double(), "bn.running_mean": torch.zeros(())}), Moments()
    states: list[ModelState] = []
    for mean in means:
        merged = ModelState({"w": torch.tensor(mean).double(), "bn.running_mean": torch.tensor(running)})
        state, moments = optimizer.step(state, merged, moments)
        states.append(state)
    return states


def test_momentum_is_fedavgm() -> None:
    """Hsu et al. 2019: v ← β v + Δ, x ← x + η v."""
    config = ServerConfig(optimizer="momentum", momentum=0.5, lr=0.8)
    x = v = 0.0
    for mean, state in zip([1.0, 3.0, -2.0], steps(config, [1.0, 3.0, -2.0]), strict=True):
        v = 0.5 * v + (mean - x)
        x += 0.8 * v
        assert state.weights["w"].item() == pytest.approx(x, rel=1e-6)
        assert state.weights["bn.running_mean"] == 7.0  # no weight: as it was averaged


def test_adam_is_fedadam() -> None:
    """Reddi et al. 2021, algorithm 2: no bias correction, v starts at τ²."""
    config = ServerConfig(optimizer="adam", lr=0.1, betas=(0.9, 0.99), tau=1e-2)
    x, m, v = 0.0, 0.0, 1e-4
    for mean, state in zip([1.0, 3.0, -2.0], steps(config, [1.0, 3.0, -2.0]), strict=True):
        delta = mean - x
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        x += 0.1 * m / (v**0.5 + 1e-2)
        assert state.weights["w"].item() == pytest.approx(x, rel=1e-5)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_of_complex_weights_real_and_imaginary_parts_are_two_numbers(name: Literal["momentum", "adam"]) -> None:
    optimizer = ServerOptimizer(ServerConfig(optimizer=name), "fedavg", ("weights",), set())
    state, moments = ModelState({"z": torch.zeros(1, dtype=torch.complex64), "xy": torch.zeros(1, 2)}), Moments()
    for mean in (1 - 2j, 3 + 1j):
        z = torch.tensor([mean], dtype=torch.complex64)
        state, moments = optimizer.step(state, ModelState({"z": z, "xy": torch.view_as_real(z)}), moments)
    assert state.weights["z"].abs() > 0
    assert torch.equal(torch.view_as_real(state.weights["z"]), state.weights["xy"])


def test_momentum_zero_is_the_mean_itself() -> None:
    config = ServerConfig(optimizer="momentum", momentum=0.0)
    assert [s.weights["w"].item() for s in steps(config, [1.0, 3.0])] == [1.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({*known("methods")} - {*WITHOUT_A_MEAN}))
def test_it_steps_after_every_methods_mean(method: str, federation: Federation) -> None:
    """In the first round, momentum with η = ½ goes half of the way from the start to the mean."""
    federation = replace(federation, public=federation.test)
    # running averages travel
    own = {"name": method, **({"steps": 2} if method == "feddf" else {}), **adapters(method, "7")}
    sections = {
        "method": own,
        "evaluation": {"static_from": "never"},
        "train": {"rounds": 1},
    }
    plain = assemble(small_model(), federation, small_config(**sections))
    half = assemble(small_model(), federation, small_config(**sections, server={"optimizer": "momentum", "lr": 0.5}))
    start, mean, moved = plain.method.start(plain.initial), next_state(plain), next_state(half)
    assert half.filters.optimizer.config.optimizer != "none"
    running = running_statistic_names(small_model())
    for field in mean.averaged:
        olds, means, news = (flatten(getattr(state, field))[0] for state in (start, mean, moved))
        if method == "feddlr":  # which truncates what comes of the step
            continue
        for name, old in olds.items():
            wanted = means[name] if name.rpartition("/")[2] in running else old + 0.5 * (means[name] - old)
            torch.testing.assert_close(news[name], wanted, msg=f"{method} {name}")
    for tier in half.method.tiers:
        half.method.network(half.method.spec(tier))
        assert half.method.weights(moved, tier).keys() == half.method.weights(mean, tier).keys()


def next_state(experiment):  # type: ignore[no-untyped-def]
    from fedhm.server.record import Record

    return experiment.train_round(experiment.method.start(experiment.initial), Record(1))


def test_what_fedhm_sends_follows_the_step(federation: Federation) -> None:
    """Its factors are those of the weights after the step, not of the mean."""
    config = small_config(method={"name": "fedhm", "tiers": [1, "1/2"]}, server={"optimizer": "momentum", "lr": 0.5})
    experiment = assemble(small_model(), federation, config)
    moved = next_state(experiment)
    factors, _ = factorized(moved.weights, [plan.ranks for plan in moved.plans.values()], "spatial")
    for layer, expected in factors.items():
        torch.testing.assert_close(
            moved.factors[layer].left @ moved.factors[layer].right, expected.left @ expected.right, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("method", WITHOUT_A_MEAN)
def test_a_method_without_a_mean_is_refused(method: str, federation: Federation) -> None:
    federation = replace(federation, public=federation.test)
    config = small_config(method={"name": method, **adapters(method, "7")}, server={"optimizer": "adam"})
    with pytest.raises(FedhmError, match=rf"{method} averages no weights: server.optimizer must be 'none'"):
        assemble(small_model(), federation, config)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_its_moments_are_part_of_a_checkpoint(optimizer: str, federation: Federation, tmp_path: Path) -> None:
    def config(rounds: int):  # type: ignore[no-untyped-def]
        return small_config(train={"rounds": rounds}, server={"optimizer": optimizer}).resolved()

    whole = assemble(small_model(), federation, config(4)).run()
    with RunFolder.create(tmp_path / "run", config(4)) as folder:
        first = assemble(small_model(), federation, config(4))
        kept = first.fingerprint()
        first.watchers = [Interruption(2)]
        with pytest.raises(KeyboardInterrupt):
            first.run(folder)
        checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints", kept, first.method.state_type)
        assert checkpoint is not None
        assert checkpoint.moments.first
        assert bool(checkpoint.moments.second) == (optimizer == "adam")
        resumed = assemble(small_model(), federation, config(4)).run(folder)
    for tier, network in whole.networks.items():
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, resumed.networks[tier].state_dict()[name])
