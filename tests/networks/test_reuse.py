"""Networks that are used again compute what new ones do, whatever they hold beside their state."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhm.assembly as assembly
from conftest import adapters, small_config
from fedhm.assembly import assemble
from fedhm.config.registry import known
from fedhm.data.federation import Federation
from fedhm.networks.exchange import Tensors, exchanged_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.spec import NetworkSpec
from fedhm.report.result import Result


class Restless(nn.Module):
    """Does in training all that a layer should not: it counts, collects, and puts other tensors in place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.notes = 0, [1.0], {"last": 1.0}
        self.plain = torch.ones(())
        self.register_buffer("average", torch.ones(()), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.calls += 1
        self.seen.append(0.5 * self.calls)
        self.notes["last"] *= 1.01
        self.plain.mul_(1.01)
        self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean()
        self.count += 1
        return x * (
            1 + 0.01 * (self.calls + sum(self.seen) + self.notes["last"] + self.plain + self.average + self.count)
        )


def restless_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            Restless(),
            nn.ReLU(),
            nn.Conv2d(8, 16, 1, stride=2, bias=False),  # in channels-first memory
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(16 * 9, 24),
            nn.ReLU(),
            nn.Linear(24, 4),
        )


def run(data: Federation, method: str, static_from: int | str) -> Result:
    few_steps = {"steps": 10} if method == "feddf" else {}  # of distillation, at the server
    own = {"name": method, **few_steps, **adapters(method, "9")}
    sections = {"method": own, "evaluation": {"static_from": static_from}}
    config = small_config(**sections, federation={"participation": 1.0})
    return assemble(restless_model(), replace(data, public=data.test), config).run()


@pytest.mark.slow
@pytest.mark.parametrize("static_from", [0, "never"])
@pytest.mark.parametrize("method", known("methods"))
def test_no_method_can_tell(
    method: str, static_from: int | str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[NetworkPool] = []

    class Watched(NetworkPool):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(assembly, "NetworkPool", Watched)
    reused = run(federation, method, static_from)
    assert made[0]._prepared
    monkeypatch.setattr(assembly, "NetworkPool", partial(NetworkPool, most=0))
    fresh = run(federation, method, static_from)
    assert reused.metrics == fresh.metrics
    for tier, network in fresh.networks.items():
        found = reused.networks[tier].state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in network.state_dict().items())
    losses = [[(t, r.traffic[t].loss) for t in r.traffic] for result in (reused, fresh) for r in result.records]
    assert losses[:2] == losses[2:]


class Counted:
    """Builds networks, and counts how many."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build, self.built = build, 0

    def __call__(self, _: str) -> nn.Module:
        self.built += 1
        return self.build()


def use(networks: NetworkPool, name: str, tensors: Tensors) -> Tensors:
    """Everything that a network holds when it is handed out; then it is trained."""
    with networks.loaded(name, tensors) as ready:
        held = {n: t.detach().clone() for n, t in (*ready.network.named_parameters(), *ready.network.named_buffers())}
        assert all(p.grad is None and p.requires_grad for p in ready.network.parameters())
        optimizer = torch.optim.SGD(ready.network.parameters(), lr=0.1)
        for _ in range(2):
            ready.forward(torch.randn(4, 1, 6, 6)).square().sum().backward()
            optimizer.step()
        ready.network.requires_grad_(name != "frozen")
        ready.network.eval()
    return held


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_what_a_task_leaves_out_is_as_in_a_new_network() -> None:
    build = Counted(restless_model)
    networks = NetworkPool(build)
    sent = {name: tensor.clone() for name, tensor in exchanged_tensors(restless_model()).items()}
    some = {name: tensor for name, tensor in sent.items() if not name.startswith("9")}
    first = use(networks, "a", some)
    assert same(use(networks, "a", some), first)
    assert same(use(networks, "a", sent), first)
    fewer = {name: tensor for name, tensor in some.items() if not name.startswith("5")}
    assert same(use(networks, "a", fewer), first)
    assert same(use(networks, "a", some), first)
    assert build.built == 1


def test_a_network_that_was_left_with_other_tensors_than_it_had_is_as_new() -> None:
    networks = NetworkPool(Counted(restless_model))
    first = use(networks, "frozen", {})
    assert same(use(networks, "frozen", {}), first)


def test_only_the_last_networks_are_kept() -> None:
    build = Counted(restless_model)
    networks = NetworkPool(build, most=2)
    for name in ("a", "b", "a", "b", "c", "b", "c", "a"):
        use(networks, name, {})
    assert build.built == 4
    assert len(networks._prepared) == 2


def test_a_network_whose_task_failed_is_not_used_again() -> None:
    build = Counted(restless_model)
    networks = NetworkPool(build)
    first = use(networks, "a", {})
    with pytest.raises(RuntimeError, match="shape"), networks.loaded("a", {}) as ready:
        ready.forward(torch.randn(4, 1, 7, 7))
    assert same(use(networks, "a", {}), first)
    assert build.built == 1


class Rolling(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 4)
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(x.flatten(1) * torch.rand(36, generator=self.generator))
        return scores


def test_a_network_with_a_generator_of_its_own_draws_the_same_in_every_task() -> None:
    networks = NetworkPool(lambda _: Rolling())
    drawn = []
    for _ in range(3):
        with networks.loaded("a", {}) as ready:
            drawn.append(ready.forward(torch.ones(2, 1, 6, 6)).tolist())
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code
def test_compiled_networks_train_like_others(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 24), nn.Linear(24, 4))
    sections = {"method": {"name": "fedavg"}, "federation": {"participation": 1.0}}
    compilations: list[nn.Module] = []
    compile_network = torch.compile

    def watched(what: nn.Module, **options: Any) -> object:
        compilations.append(what)
        return compile_network(what, **options)

    plain = assemble(model, federation, small_config(**sections)).run().networks["full"].state_dict()
    monkeypatch.setattr(torch, "compile", watched)
    # or else several processes import the compiler to share what one does in a second
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    result = assemble(model, federation, small_config(**sections, engine={"threads": 1, "compile": True})).run()
    found = result.networks["full"].state_dict()
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    assert len([each for each in compilations if isinstance(each, nn.Module)]) == 1  # for all clients and rounds


COMPILE = """
import torch
from fedhm.errors import FedhmError
from fedhm.networks.reuse import check_compiler
try:
    check_compiler(torch.device("cpu"))
except FedhmError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_machine_without_compiler_is_told(tmp_path: Path) -> None:
    """In a process of its own, since torch reads once which compiler there is."""
    environment = {**os.environ, "CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True)
    assert "engine.compile = true, but torch.compile does not work here" in done.stdout


class Skips(nn.Module):
    """Does not take its scale from a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        state.pop(prefix + "scale")
        super()._load_from_state_dict(state, prefix, *rest)


class SkipsByHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_load_state_dict_pre_hook(lambda _, state, prefix, *__: state.pop(prefix + "scale", None))


@pytest.mark.parametrize("build", [Skips, SkipsByHook])
def test_values_that_a_network_does_not_load_are_those_of_a_new_one(build: Callable[[], nn.Module]) -> None:
    torch.use_deterministic_algorithms(True)  # fills memory without values with NaN
    try:
        pool = NetworkPool(lambda _: build())
        with pool.loaded(NetworkSpec("full"), {"scale": torch.zeros(3)}) as ready:
            assert ready.network.get_parameter("scale").tolist() == [1, 1, 1]
    finally:
        torch.use_deterministic_algorithms(False)
