"""Runs on an accelerator give the CPU's numbers, on one device or on several, and copies are counted.

The accelerator is pretended (`pretended_device.py`): its operations are the CPU's, so that numbers differ by the order
of sums at most. `test_on_devices.py` runs these tests in a process of their own.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhm
import pretended_device
from fedhm.assembly import assemble
from fedhm.cli import main
from fedhm.compare.execute import accelerators, all_cells, default_jobs
from fedhm.compare.select import Reference, resolve_entries
from fedhm.config.loading import load_config
from fedhm.config.schema import Config
from fedhm.data.federation import Federation, from_arrays
from fedhm.data.samples import Feed, Preprocessing, SampleCache, Samples
from fedhm.engines.engine import find_devices, workers_for
from fedhm.errors import FedhmError
from fedhm.lowrank import layers as low_rank_layers
from fedhm.machine import device as device_module
from fedhm.machine.device import CPU, find_device, move_tensors, seeded
from fedhm.machine.process import usable_cores
from fedhm.runs.history import Result
from fedhm.seeds import torch_generator
from made_adapters import DATA, TEST, settings
from pretended_device import counted
from small import small_config, small_federation, small_model
from tiny_transformers import tiny_bert

PRETEND = "pretend:0"
ROUNDING = 1e-9  # of losses in float64: only the order of sums differs


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    pretended_device.register()
    # on the CPU only, some convolutions are computed in another way, which rounds otherwise
    monkeypatch.setattr(low_rank_layers, "WORTHWHILE", 2**60)


def run(
    device: str = PRETEND, model: nn.Module | None = None, data: Federation | None = None, **sections: Any
) -> Result:
    engine = {"threads": 1, "workers": 1, "device": device} | sections.pop("engine", {})
    train = {"rounds": 2} | sections.pop("train", {})
    config = small_config(engine=engine, train=train, **sections)
    return assemble(model or small_model().double(), data or exact_federation(), config).run()


def exact_federation() -> Federation:
    """The small federation in float64, in which rounding hardly grows from round to round."""
    whole = small_federation()
    assert whole.test is not None
    return from_arrays(
        [(each.tensor.double() / 255, each.labels) for each in whole.clients],
        (whole.test.tensor.double() / 255, whole.test.labels),
        dtype=torch.float64,
    )


def largest_difference(one: Result, other: Result) -> float:
    """Return the largest difference between losses, and between metrics, of all rounds."""
    return max(
        abs(a - b)
        for mine, theirs in zip(one.records, other.records, strict=True)
        for a, b in [
            *((mine.traffic[tier].loss, theirs.traffic[tier].loss) for tier in mine.traffic),
            *((m, theirs.metrics[t][n]) for t, metrics in mine.metrics.items() for n, m in metrics.items()),
        ]
    )


# ---- the same numbers ----

METHODS = ("fedhm", "fedavg", "slimmed", "heterofl", "fedrolex", "fjord", "splitmix", "fedpara", "feddlr", "capable")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_cpus_numbers(method: str) -> None:
    section = {"name": method}
    assert largest_difference(run("cpu", method=section), run(method=section)) < ROUNDING


def with_public() -> Federation:
    """The small federation, of which the test inputs are public, too. Public inputs are taken in float32."""
    whole = small_federation()
    assert whole.test is not None
    clients = [(each.inputs, each.labels) for each in whole.clients]
    return from_arrays(clients, (whole.test.inputs, whole.test.labels), public=whole.test.tensor)


@pytest.mark.parametrize(("method", "most"), [("fedmd", 1e-5), ("feddf", 1e-3)])
def test_distillation_gives_the_cpus_numbers(method: str, most: float) -> None:
    """FedDF's server trains by Adam, whose steps are as long for tiny gradients: it magnifies rounding."""
    mine, theirs = (run(place, small_model(), with_public(), method={"name": method}) for place in ("cpu", PRETEND))
    assert largest_difference(mine, theirs) < most


SETTINGS: Mapping[str, dict[str, Any]] = {
    "momentum and decay": {"train": {"momentum": 0.9, "weight_decay": 1e-3}},
    "adamw": {"train": {"optimizer": "adamw", "lr": 0.001}},
    "nesterov": {"train": {"momentum": 0.9, "nesterov": True}},
    "clipping": {"train": {"clip_norm": 0.5}},
    "frobenius decay": {"train": {"frobenius_decay": 1e-2}},
    "masked loss": {"train": {"masked_loss": True}},
    "micro-batches": {"train": {"micro_batch": 3}},
    "iterations": {"train": {"iterations": 3}},
    "frozen statistics": {"train": {"frozen_statistics": True}},
    "nothing nested": {"train": {"nested": 0.0}},
    "nested instead": {"train": {"nested": 0.5, "nested_form": "instead", "nested_tier": "random"}},
    "paper's rule": {"method": {"name": "fedhm", "aggregate": "models"}},
    "running averages": {"evaluation": {"static_from": "never"}},
    "test batches": {"evaluation": {"statistics": "test-batch"}},
    "theory": {"evaluation": {"diagnostics": "theory"}, "train": {"nested": 0.0, "clip_norm": 0.0}},
    "server momentum": {"server": {"optimizer": "momentum"}},
    "clip": {"server": {"robust": "clip"}},
    "agreement": {"server": {"robust": "agreement"}},
    "krum": {"server": {"robust": "krum"}, "federation": {"participation": 1.0}},
    "median": {"server": {"robust": "median"}, "method": {"name": "fedavg"}},
    "samples are copied": {"engine": {"data_on_device": False}},
    "few samples stay": {"engine": {"data_on_device": "2kB"}},
    "deterministic": {"engine": {"deterministic": True}},
}


@pytest.mark.filterwarnings("ignore:with train.micro_batch")
@pytest.mark.parametrize("sections", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_setting_gives_the_cpus_numbers(sections: dict[str, Any]) -> None:
    assert largest_difference(run("cpu", **sections), run(**sections)) < ROUNDING


def test_checkpointing_and_dropout_give_the_cpus_numbers() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        body, head = small_model()[:6], nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(16 * 9, 4))
        return nn.Sequential(body, head).double()

    sections = {"train": {"checkpointing": True}}
    assert largest_difference(run("cpu", model(), **sections), run(PRETEND, model(), **sections)) < ROUNDING


@pytest.mark.parametrize("method", ["lora", "hetlora", "ffalora", "fedsa", "flora", "homolora"])
def test_adapters_give_the_cpus_numbers_and_leave_the_users_base_where_it_is(method: str) -> None:
    def adapted(device: str) -> tuple[Result, nn.Module]:
        base = tiny_bert()
        own = settings({"name": method})
        if method not in ("lora", "hetlora", "flora"):
            own["method"] = {"name": method, "rank": 2}
        own["engine"] = {**own["engine"], "device": device}
        return fedhm.run(base, DATA, TEST, own), base

    (mine, _), (theirs, base) = adapted("cpu"), adapted(PRETEND)
    assert largest_difference(mine, theirs) < 1e-5  # adapters are trained in float32
    assert {parameter.device for parameter in base.parameters()} == {CPU}


def test_noise_of_a_client_is_added_on_the_host() -> None:
    """It is drawn from a secret, so numbers cannot be compared: the run must end, with finite models."""
    quiet = {"train": {"masked_loss": False, "max_change": 0}, "evaluation": {"static_from": "never"}}
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    own = {**quiet, "privacy": {"clip": 1.0, "noise": 0.1, "where": "client"}, "engine": {"device": PRETEND}}
    result = fedhm.run(nn.Linear(4, 3), [(x, y)], (x, y), {**own, "method": "fedavg"})
    assert all(bool(t.isfinite().all()) for t in result.networks["full"].state_dict().values())


def test_regression_gives_the_cpus_numbers() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    y = x @ torch.arange(5.0)

    def fitted(device: str) -> Result:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
        engine = {"device": device, "workers": 1}
        own = {"method": "fedavg", "objective": "regression", "engine": engine, "train": {"rounds": 2}}
        return fedhm.run(model, [(x[:20], y[:20]), (x[20:], y[20:])], (x, y), own)

    assert largest_difference(fitted("cpu"), fitted(PRETEND)) < 1e-4  # of squares, in float32


def test_mixed_devices_are_refused_by_the_pretended_one() -> None:
    one, other = torch.ones(3, device=PRETEND), torch.ones(3, device="pretend:1")
    for stranger in (torch.ones(3), other):
        with pytest.raises(RuntimeError, match="got tensors on several devices"):
            one + stranger


# ---- counts ----


def _config(**sections: Any) -> Config:
    return small_config(engine={"threads": 1, "workers": 1, "device": PRETEND}, **sections)


@pytest.mark.parametrize("method", ["fedhm", "fedavg", "heterofl", "splitmix"])
def test_a_local_step_copies_nothing_and_waits_for_nothing(method: str) -> None:
    """More epochs add steps, and no copy or synchronisation."""
    found = []
    for epochs in (1, 1, 4):  # the first run fills caches of constants
        config = _config(train={"epochs": epochs, "rounds": 1, "momentum": 0.9}, method={"name": method})
        experiment = assemble(small_model(), small_federation(), config)
        with counted() as counts:
            experiment.run()
        found.append((counts.to_device, counts.to_host, counts.synchronisations))
    assert found[1] == found[2]


def test_a_local_step_in_float16_waits_for_nothing() -> None:
    found = []
    for epochs in (1, 1, 4):
        config = _config(train={"epochs": epochs, "rounds": 1, "precision": "fp16"})
        experiment = assemble(small_model(), small_federation(), config)
        with counted() as counts:
            experiment.run()
        found.append((counts.to_device, counts.to_host, counts.synchronisations))
    assert found[1] == found[2]


def test_a_task_moves_its_weights_once_each_way() -> None:
    experiment = assemble(small_model(), small_federation(), _config(method={"name": "fedavg"}))
    state = experiment.method.start(experiment.initial)
    weights = sum(tensor.nbytes for tensor in experiment.initial.values())
    for _ in range(2):  # the first time, the network and the samples are brought to the device, too
        tasks = list(experiment.method.tasks(state, next(experiment._sample(1))[:1], 1))
        with counted() as counts:
            (reply,) = experiment.engine.run(tasks)
    assert reply.samples == 20
    assert (counts.to_device, counts.to_host) == (2, 1)  # weights and draws, and weights back
    assert counts.synchronisations == 2  # the copy to the host, and the loss
    assert weights <= counts.bytes_to_device <= weights + 20 * 8 * 4
    assert counts.bytes_to_host == weights


def test_evaluation_waits_once_for_each_tier() -> None:
    experiment = assemble(small_model(), small_federation(), _config(evaluation={"static_from": "never"}))
    state = experiment.method.start(experiment.initial)
    weights = {tier: experiment.method.weights(state, tier) for tier in experiment.method.tiers}
    for _ in range(2):
        with counted() as counts:
            experiment.evaluation._by_engine(state, weights, 1, experiment.engine.run)
    assert counts.synchronisations == counts.to_host == len(weights)
    assert counts.to_device == 2 * len(weights)  # weights, and the order of the samples


def test_all_tensors_travel_in_one_copy() -> None:
    given = {"a": torch.ones(3), "b": torch.arange(5), "c": torch.tensor(True), "d": torch.ones(2, 2).half().t()}
    with counted() as counts:
        there = move_tensors(given, torch.device(PRETEND))
        back = move_tensors(there, CPU)
    assert (counts.to_device, counts.to_host) == (1, 1)
    for name, tensor in given.items():
        assert there[name].device == torch.device(PRETEND)
        assert torch.equal(back[name], tensor)
        assert back[name].dtype == tensor.dtype


# ---- samples on the device ----


def images(count: int = 11) -> Samples:
    pixels = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Samples(pixels, torch.arange(count) % 3).subset(torch.arange(count))


@pytest.mark.parametrize("crop", [0, 2])
@pytest.mark.parametrize("flip", [False, True])
def test_batches_are_the_same_on_every_device(crop: int, flip: bool) -> None:
    preprocessing = Preprocessing((0.4, 0.5, 0.6), (0.2, 0.3, 0.2), crop, flip)
    samples, device = images(), torch.device(PRETEND)

    def batches(feed: Feed) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in feed.shuffled(4, torch_generator(0, "test"), 7):
            assert isinstance(inputs, Tensor)
            yield inputs.cpu(), targets.cpu()

    here = list(batches(Feed(samples, preprocessing)))
    for cache in (None, SampleCache(device), SampleCache(device, 10)):
        there = list(batches(Feed(samples, preprocessing, device, cache)))
        for (mine, my_targets), (theirs, their_targets) in zip(here, there, strict=True):
            assert torch.equal(mine, theirs)
            assert torch.equal(my_targets, their_targets)


def test_samples_leave_the_device_if_others_need_the_room() -> None:
    parts = [images(4), images(5), images(6)]
    cache = SampleCache(torch.device(PRETEND), parts[0].nbytes + parts[1].nbytes)
    for part, copies in ((parts[0], 2), (parts[1], 2), (parts[0], 0), (parts[2], 2), (parts[1], 2)):
        with counted() as counts:
            assert cache.find(part) is not None
        assert counts.to_device == copies


# ---- several devices ----


def test_workers_and_several_devices_give_the_same_numbers(tmp_path: Path) -> None:
    """In processes of their own: one that has used a device cannot be forked any more."""
    engines = [{"workers": 1}, {"workers": 3}, {"devices": ["pretend:0", "pretend:1"]}]
    digests = []
    for engine in engines:
        script = tmp_path / "script.py"
        script.write_text(
            f"""
import sys
sys.path[:0] = {[str(Path(pretended_device.__file__).parent)]!r}
sys.argv = ["-n0"]
import hashlib
from engines.on_device import run
import pretended_device
pretended_device.register()
result = run(engine={engine!r})
digest = hashlib.sha256(str([(r.metrics, r.traffic["full"].loss) for r in result.records]).encode())
for network in result.networks.values():
    for tensor in network.state_dict().values():
        digest.update(tensor.numpy().tobytes())
print(digest.hexdigest())
"""
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout)
    assert len(set(digests)) == 1


def test_a_process_that_has_trained_cannot_share_a_device_with_workers() -> None:
    run()
    with pytest.raises(FedhmError, match=r"this process has trained a network itself.*set engine\.workers = 1"):
        run(engine={"workers": 2})


def test_devices_are_of_one_kind_and_different() -> None:
    for names in (["cpu", PRETEND], [PRETEND, PRETEND]):
        config = small_config(engine={"devices": names}).engine
        with pytest.raises(FedhmError, match="must name different devices of one kind"):
            find_devices(config)


def test_workers_are_as_many_as_devices_at_least() -> None:
    def workers(**engine: Any) -> int:
        return workers_for(small_config(engine={"threads": 1, **engine}).engine, 4)

    both = ["pretend:0", "pretend:1"]
    assert workers(devices=both, workers=1) == 2
    assert workers(devices=both, workers=5) == 5
    assert workers(device=PRETEND) == 1  # as many as there is memory for, and one core
    with pytest.raises(FedhmError, match=r"compiled networks: set one of engine\.devices"):
        workers(devices=both, compile=True)
    with pytest.raises(FedhmError, match=r"a server that trains, too: set engine\.workers = 1 or 'auto'"):
        workers_for(small_config(engine={"device": PRETEND, "workers": 2}).engine, 4, server_trains=True)


# ---- choosing a device ----


def test_auto_is_an_accelerator_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("auto") == CPU  # a pretended one is none
    monkeypatch.setattr(device_module, "AUTO_KINDS", ("pretend",))
    assert find_device("auto").type == "pretend"
    assert small_config(engine={}).engine.device == "auto"
    assert small_config(engine={}).resolved().engine.device.startswith("pretend")


def test_a_device_that_is_not_there_is_one_sentence() -> None:
    for name in ("cuda", "cuda:7", "toaster"):
        with pytest.raises(FedhmError, match=f"engine.device = '{name}' cannot be used with this PyTorch: .+"):
            find_device(name)


def test_seeds_hold_on_a_device_and_are_restored() -> None:
    device = torch.device(PRETEND)
    before = torch.rand(1)
    with seeded(3, device):
        one = torch.rand(4, device=device).cpu()
    with seeded(3, device):
        assert torch.equal(torch.rand(4, device=device).cpu(), one)
    assert not torch.equal(torch.rand(1), before)


# ---- precision ----


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("device", ["cpu", PRETEND])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training_in_16_bits_learns_as_in_32(precision: str, device: str, optimizer: str) -> None:
    train = {"rounds": 3, "epochs": 3, "optimizer": optimizer, "lr": 0.05 if optimizer == "sgd" else 0.002}
    exact = run(device, small_model(), small_federation(), train=train)
    found = run(device, small_model(), small_federation(), train={**train, "precision": precision})
    for tier, metrics in found.metrics.items():
        assert metrics.accuracy > exact.metrics[tier].accuracy - 0.1
    parameters = [p for network in found.networks.values() for p in network.parameters()]
    assert {parameter.dtype for parameter in parameters} == {torch.float32}  # as the model's
    assert (device == PRETEND) or largest_difference(exact, found) > 0  # a pretended device casts nothing


def test_a_step_whose_gradients_overflow_is_left_out() -> None:
    """The first scale of float16 is too large for these inputs. It is halved until gradients are finite."""
    x, y = 30 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    train = {"precision": "fp16", "rounds": 2, "epochs": 5, "batch": 8, "lr": 1e-4}
    result = fedhm.run(model, [(x, y)], (x, y), {"train": train, "method": "fedavg", "engine": {"device": "cpu"}})
    assert all(bool(t.isfinite().all()) for t in result.networks["full"].state_dict().values())
    assert result.records[-1].traffic["full"].loss < result.records[0].traffic["full"].loss


def test_fp16_and_dampening_do_not_go_together() -> None:
    with pytest.raises(FedhmError, match="may leave out steps"):
        small_config(train={"precision": "fp16", "dampening": 0.1, "momentum": 0.9})


# ---- several runs, and the check of a device ----


def test_runs_of_a_comparison_are_spread_over_the_devices(tmp_path: Path) -> None:
    config = load_config("digits", ["engine.device=pretend"])
    entries = resolve_entries(["fedavg", "fedhm", "heterofl"], Reference(config))
    cells = all_cells(config, entries, 1, tmp_path, jobs=2)
    assert [cell.config.engine.device for cell in cells] == ["pretend:0", "pretend:1", "pretend:0"]
    assert {cell.config.engine.workers for cell in cells} == {"auto"}  # each run sees what has room
    assert default_jobs(config) == 2
    one = load_config("digits", ["engine.device=pretend:1"])
    assert accelerators(one.engine) == ["pretend:1"]
    assert default_jobs(load_config("digits", ["engine.device=cpu"])) == usable_cores()


@pytest.mark.parametrize("device", ["cpu", PRETEND])
def test_the_check_of_a_device_prints_its_tables(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-device", device, "--quick"]) == 0
    said = capsys.readouterr().out
    assert "### A round of 8 clients" in said
    assert re.search(r"\| 1/8 \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| (0\.0e\+00|\d\.\de-\d\d) \|", said)
    assert re.search(r"\| full \| \d+ \| \d+ \| [\d.]+ \| \d+ \| \d+ \| \d+ \| (float32|bf16|fp16) \|", said)


def test_the_check_of_a_device_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-device", "cuda:9"]) == 1
    assert capsys.readouterr().err.startswith("fedhm: engine.device = 'cuda:9' cannot be used")
