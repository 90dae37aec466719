"""Runs on an accelerator give the CPU's numbers, on one device or on several, and copies are counted.

The accelerator is pretended (`pretended_device.py`): its operations are the CPU's, so that numbers differ by the order
of sums at most. `test_on_devices.py` runs these tests in a process of their own.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor, nn

import fedhm
import pretended_device
from fedhm import experiment as experiment_module
from fedhm.assembly import assemble
from fedhm.cli import check_device, main
from fedhm.compare.execute import accelerators, all_cells, default_jobs
from fedhm.compare.select import Reference, resolve_entries
from fedhm.config.loading import load_config
from fedhm.config.registry import known, make
from fedhm.config.schema import Config, PrivacyConfig, ServerConfig, TrainConfig
from fedhm.data.federation import Federation, from_arrays
from fedhm.data.samples import Feed, Preprocessing, SampleCache, Samples
from fedhm.engines.engine import find_devices, workers_for
from fedhm.errors import FedhmError
from fedhm.lowrank import layers as low_rank_layers
from fedhm.machine import device as device_module
from fedhm.machine import process as process_module
from fedhm.machine.device import CPU, CopiedTensors, CopyStream, find_device, move_tensors, seeded
from fedhm.machine.process import usable_cores
from fedhm.report.result import Result
from fedhm.runs.folder import RunFolder
from fedhm.runs.rounds import read_records
from fedhm.seeds import torch_generator
from fedhm.server.callbacks import Watcher
from fedhm.server.filters import privacy as privacy_module
from fedhm.work import client as client_module
from fedhm.work.client import Client
from fedhm.work.distil import distil_towards
from fedhm.work.messages import Task, Update
from interruption import Interruption
from made_adapters import DATA, TEST, TRAIN, settings
from pretended_device import counted, memory_limit
from run_outcome import outcome
from small import small_config, small_federation, small_model
from tiny_transformers import sentences, tiny_bert, tiny_gpt2

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


DISTILLING = ("fedmd", "feddf")


def with_public() -> Federation:
    """The exact federation, of which the test inputs are public, too."""
    whole = exact_federation()
    assert whole.test is not None
    clients = [(each.inputs, each.labels) for each in whole.clients]
    test = whole.test.inputs, whole.test.labels
    return from_arrays(clients, test, public=whole.test.tensor, dtype=torch.float64)


@pytest.mark.parametrize("method", DISTILLING)
def test_distillation_gives_the_cpus_numbers(method: str) -> None:
    mine, theirs = (run(place, data=with_public(), method={"name": method}) for place in ("cpu", PRETEND))
    assert largest_difference(mine, theirs) < ROUNDING


@pytest.mark.parametrize("place", ["cpu", PRETEND])
def test_adam_follows_gradients_that_are_rounding_errors_in_float32_only(place: str) -> None:
    """This is why FedDF in float32 is not the same on every device: Adam's steps are as long for tiny gradients.

    A bias before BatchNorm changes no output. Its gradient is 0 but for rounding.
    """

    def largest_move(dtype: torch.dtype) -> float:
        student = small_model().to(device=place, dtype=dtype)
        before, optimizer = student[0].bias.detach().clone(), torch.optim.Adam(student.parameters(), lr=1e-3)
        inputs = torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(0)).to(device=place, dtype=dtype)
        batches = [(inputs, torch.arange(16, device=place))] * 20
        teacher = torch.ones(16, 4, device=place, dtype=dtype).cumsum(0)
        distil_towards(student, teacher, make("objectives", "classification").divergence, optimizer, batches)
        return float((student[0].bias.detach() - before).abs().max().cpu())

    assert largest_move(torch.float32) > 1e-4  # steps have a length of up to 1e-3
    assert largest_move(torch.float64) < 1e-10


def test_feddfs_server_distils_on_the_device() -> None:
    """Its models and logits stay there: the weights of a tier are copied to it and back, and logits are not."""
    experiment = assemble(small_model(), small_public(), _config(method={"name": "feddf", "steps": 7}))
    method, state = experiment.method, experiment.method.start(experiment.initial)
    updates = list(experiment.engine.run(list(method.tasks(state, next(experiment._sample(1)), 1))))
    assert all(isinstance(update, Update) for update in updates)
    for _ in range(2):  # the first time, the public samples are brought to the device, too
        with counted() as counts:
            method.merge(state, [update for update in updates if isinstance(update, Update)], 1)
    tiers = len(method.tiers)
    assert counts.to_host == tiers
    assert counts.synchronisations == tiers + len(updates)  # each client's logits must be finite
    assert counts.to_device == 2 * (tiers + len(updates))  # weights, and the order of the samples


def small_public() -> Federation:
    whole = small_federation()
    assert whole.test is not None
    clients = [(each.inputs, each.labels) for each in whole.clients]
    return from_arrays(clients, (whole.test.inputs, whole.test.labels), public=whole.test.tensor)


SETTINGS: Mapping[str, dict[str, Any]] = {
    "momentum and decay": {"train": {"momentum": 0.9, "weight_decay": 1e-3}},
    "adamw": {"train": {"optimizer": "adamw", "lr": 0.001}},
    "nesterov": {"train": {"momentum": 0.9, "nesterov": True}},
    "dampening": {"train": {"momentum": 0.9, "dampening": 0.1}},
    "adamw's own": {
        "train": {"optimizer": "adamw", "lr": 0.001, "betas": [0.8, 0.9], "eps": 1e-6, "amsgrad": True},
    },
    "milestones": {"train": {"milestones": [1], "lr_decay": 0.5, "epochs": 2, "on_bad_update": "stop"}},
    "bad updates are dropped": {"train": {"on_bad_update": "drop", "max_change": 5.0}},
    "decayed factors": {"train": {"frobenius_decay": 1e-2, "decay_factors": True}},
    "clipping": {"train": {"clip_norm": 0.5}},
    "frobenius decay": {"train": {"frobenius_decay": 1e-2}},
    "masked loss": {"train": {"masked_loss": True}},
    "micro-batches": {"train": {"micro_batch": 3}},
    "iterations": {"train": {"iterations": 3}},
    "frozen statistics": {"train": {"frozen_statistics": True}},
    "nothing nested": {"train": {"nested": 0.0}},
    "nested beside": {"train": {"nested": 0.5, "nested_form": "beside"}},
    "nested sum": {"train": {"nested": 0.5, "nested_form": "sum"}},
    "nested instead": {"train": {"nested": 0.5, "nested_form": "instead", "nested_tier": "random"}},
    "paper's rule": {"method": {"name": "fedhm", "aggregate": "models"}},
    "running averages": {"evaluation": {"static_from": "never"}},
    "test batches": {"evaluation": {"statistics": "test-batch"}},
    "theory": {"evaluation": {"diagnostics": "theory"}, "train": {"nested": 0.0, "clip_norm": 0.0}},
    "server momentum": {"server": {"optimizer": "momentum", "momentum": 0.5, "lr": 0.7}},
    "server adam": {"server": {"optimizer": "adam", "betas": [0.8, 0.9], "tau": 1e-2}},
    "no defence": {"server": {"robust": "none"}},
    "clip": {"server": {"robust": "clip"}},
    "agreement": {"server": {"robust": "agreement"}},
    "centered clip": {"server": {"robust": "centered-clip"}},
    "krum": {"server": {"robust": "krum", "attackers": 2}, "federation": {"participation": 1.0}},
    "trimmed mean": {"server": {"robust": "trimmed-mean", "trim": 0.3}},
    "median": {"server": {"robust": "median"}, "method": {"name": "fedavg"}},
    "median of products": {"server": {"robust": "median"}},
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


ADAPTERS: Mapping[str, dict[str, Any]] = {
    "lora": {"name": "lora"},
    "lora, models": {"name": "lora", "aggregate": "models"},
    "lora, partitions": {"name": "lora", "aggregate": "partitions"},
    "lora, fold": {"name": "lora", "fold": True, "fold_rank": 6},
    "homolora": {"name": "homolora", "rank": 2},
    "hetlora": {"name": "hetlora"},
    "hetlora, prune": {"name": "hetlora", "prune": 0.5},
    "flora": {"name": "flora"},
    "ffalora": {"name": "ffalora", "rank": 2},
    "fedsa": {"name": "fedsa", "rank": 2},
    "fedsa, shared head": {"name": "fedsa", "rank": 2, "share_head": True},
}


def adapted(
    device: str, method: dict[str, Any], base: nn.Module | None = None, clients: int = 3, **train: Any
) -> Result:
    own = settings(method)
    if "rank" in method:
        del own["method"]["ranks"]
    own["engine"], own["train"] = {**own["engine"], "device": device}, {**own["train"], "head_factor": 2.0, **train}
    return fedhm.run(base or tiny_bert(), DATA[:clients], TEST, own)


@pytest.mark.parametrize("method", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_adapters_give_the_cpus_numbers_and_leave_the_users_base_where_it_is(method: dict[str, Any]) -> None:
    base = tiny_bert()
    mine, theirs = adapted("cpu", method), adapted(PRETEND, method, base)
    assert largest_difference(mine, theirs) < 1e-5  # adapters are trained in float32
    assert {parameter.device for parameter in base.parameters()} == {CPU}


PRIVACY: Mapping[str, dict[str, Any]] = {
    "clipped at the server": {"clip": 0.05},
    "noise at the server": {"clip": 0.05, "noise": 0.5, "delta": 1e-4},
    "clipped at clients": {"clip": 0.05, "where": "client"},
    "noise at clients": {"clip": 0.05, "noise": 0.1, "where": "client"},
}


@pytest.mark.parametrize("method", [{"name": "fedavg"}, {"name": "fedhm", "aggregate": "updates"}], ids=str)
@pytest.mark.parametrize("privacy", PRIVACY.values(), ids=PRIVACY.keys())
def test_every_form_of_privacy_gives_the_cpus_numbers(
    privacy: dict[str, Any], method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is drawn on the host. A run's own depends on a secret, and on the last bits of what it hides."""
    monkeypatch.setattr(experiment_module, "new_secret", lambda: bytes(32))
    for module in (client_module, privacy_module):
        monkeypatch.setattr(module, "_digest", lambda *_: "")
    sections: dict[str, Any] = {
        "privacy": privacy,
        "method": method,
        "train": {"masked_loss": False, "max_change": 0},
        "evaluation": {"static_from": "never"},
        "federation": {"participation": 1.0},
    }
    assert largest_difference(run("cpu", **sections), run(**sections)) < ROUNDING


def _texts(
    place: str, objective: str, method: str, model: nn.Module, vocabulary: int, count: int = 3, **train: Any
) -> Result:
    clients = [sentences(18, seed, vocabulary=vocabulary) for seed in range(count)]
    test = sentences(24, 99, vocabulary=vocabulary)
    own: dict[str, Any] = {"method": {"name": method}, "train": TRAIN | train, "federation": {"participation": 1.0}}
    own |= {"engine": {"workers": 1, "threads": 1, "device": place}, "objective": objective}
    model.config.use_cache = False  # it begins with `torch.tensor([], device=…)`, which no device in Python can do
    if objective == "causal_lm":  # every token is a target
        return fedhm.run(model, [inputs for inputs, _ in clients], test[0], own)
    return fedhm.run(model, clients, test, own)


def _fitted(place: str, method: str) -> Result:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x @ torch.arange(5.0, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    engine = {"device": place, "workers": 1}
    own = {"method": method, "objective": "regression", "engine": engine, "train": {"rounds": 2, "lr": 0.01}}
    return fedhm.run(model, [(x[:20], y[:20]), (x[20:], y[20:])], (x, y), own)


def _labelled(place: str, objective: str, method: str) -> Result:
    """Train on labels of every pixel, or on several labels of every image."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 1, 6, 6, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).long() if objective == "segmentation" else (x.flatten(1)[:, :3] > 0).double()
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
    last = nn.Conv2d(16, 2, 1) if objective == "segmentation" else nn.Sequential(nn.Flatten(), nn.Linear(576, 3))
    own = {"objective": objective, "method": method, "engine": {"device": place, "workers": 1}, "train": {"rounds": 2}}
    return fedhm.run(nn.Sequential(*convolutions, last).double(), [(x[:12], y[:12]), (x[12:], y[12:])], (x, y), own)


OBJECTIVES: Mapping[str, Callable[[str, str], Result]] = {
    "segmentation": lambda place, method: _labelled(place, "segmentation", method),
    "multilabel": lambda place, method: _labelled(place, "multilabel", method),
    "classification": lambda place, method: run(place, method={"name": method}),
    "regression": _fitted,
    "sequence_classification": lambda place, method: _texts(
        place, "sequence_classification", method, tiny_bert().double(), 40
    ),
    "causal_lm": lambda place, method: _texts(place, "causal_lm", method, tiny_gpt2().double(), 30),
}


@pytest.mark.parametrize("method", ["fedhm", "fedavg"])
@pytest.mark.parametrize("train", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_every_objective_gives_the_cpus_numbers(train: Callable[[str, str], Result], method: str) -> None:
    assert largest_difference(train("cpu", method), train(PRETEND, method)) < ROUNDING


WORK: Mapping[str, Callable[[], object]] = {
    "train": lambda: run(method={"name": "fedavg"}),
    "nested": run,
    "statistics": run,
    "evaluate": run,
    "gradient": lambda: run(**SETTINGS["theory"]),
    "distil": lambda: run(data=with_public(), method={"name": "fedmd"}),
    "prune": lambda: adapted(PRETEND, ADAPTERS["hetlora, prune"]),
    "adapt": lambda: adapted(PRETEND, ADAPTERS["fedsa"]),
}


@pytest.mark.parametrize(("kind", "doing"), WORK.items(), ids=WORK.keys())
def test_every_kind_of_work_is_done_on_the_device(
    kind: str, doing: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of these runs are compared above. Here each is seen to do the work that it stands for."""
    seen: set[str] = set()

    def watched(self: Client, task: Task, position: int = 0) -> Update:
        with counted() as counts:
            update = do(self, task, position)
        assert counts.operations > 10
        assert all(tensor.device == CPU for tensor in update.tensors.values())
        seen.add(task.kind)
        return update

    do = Client.run
    monkeypatch.setattr(Client, "run", watched)
    doing()
    assert kind in seen


# Settings of runs that are no matter of where networks run, or that other tests of this file set.
ELSEWHERE = {
    "train": {
        "rounds",
        "begun_rounds",
        "schedule",
        "warmup_rounds",
        "batch",
        "checkpointing",
        "precision",
        "head_factor",
    },
    "evaluation": {"every"},
}


def test_every_registered_name_and_every_setting_has_a_case_here() -> None:
    adapters = {method["name"] for method in ADAPTERS.values()}
    assert set(known("methods")) == {*METHODS, *DISTILLING, *adapters}
    assert set(known("objectives")) == set(OBJECTIVES)
    assert set(known("work")) == set(WORK)
    cases = [*SETTINGS.values(), *({"privacy": privacy} for privacy in PRIVACY.values())]
    for name, section in (("train", TrainConfig), ("server", ServerConfig), ("privacy", PrivacyConfig)):
        for key, field in section.model_fields.items():
            if key in ELSEWHERE.get(name, ()):
                continue
            given = {str(case[name][key]) for case in cases if key in case.get(name, {})}
            assert given, f"no case sets {name}.{key}"
            missing = {str(word) for word in words_of(field.annotation)} - given - {str(field.default), "auto"}
            assert not missing, f"no case sets {name}.{key} to {missing}"


def words_of(annotation: Any) -> Iterator[str]:
    """Yield the words that a setting may be, such as the names of rules."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from words_of(part)


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


TRANSFORMERS: Mapping[str, Callable[..., Result]] = {
    **{name: partial(adapted, PRETEND, method, clients=1) for name, method in ADAPTERS.items()},
    "sequence_classification": lambda **train: _texts(
        PRETEND, "sequence_classification", "fedavg", tiny_bert(), 40, 1, **train
    ),
    "causal_lm": lambda **train: _texts(PRETEND, "causal_lm", "fedavg", tiny_gpt2(), 30, 1, **train),
}


@pytest.mark.parametrize("train", TRANSFORMERS.values(), ids=TRANSFORMERS.keys())
def test_a_local_step_of_a_transformer_copies_nothing_and_waits_for_nothing(train: Callable[..., Result]) -> None:
    """Some batches are padded and some are not, about which transformers would ask the device."""
    found = []
    for epochs in (1, 2):
        with counted() as counts:
            train(epochs=epochs, rounds=1)
        found.append((counts.to_device, counts.to_host, counts.synchronisations))
    assert found[0] == found[1]


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


def _feed(samples: Samples, device: str) -> Feed:
    """Samples that do not stay on the device."""
    return Feed(samples, Preprocessing((0.4, 0.5, 0.6), (0.2, 0.3, 0.2), 1, True), torch.device(device))


def test_the_next_batch_is_copied_before_the_step_on_this_one() -> None:
    """Each batch has two copies, of pixels and labels. The first step begins when two batches were sent."""
    copies = []
    with counted() as counts:
        for inputs, _ in _feed(images(11), PRETEND).shuffled(4, torch_generator(0, "test")):
            copies.append(counts.to_device)
            assert inputs.device == torch.device(PRETEND)  # type: ignore[union-attr]
    assert [each - copies[0] for each in copies] == [0, 2, 2]
    assert counts.to_host == counts.synchronisations == 0


def test_batches_are_copied_on_a_stream_of_their_own_that_the_steps_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended device refuses tensors of a stream that was not waited for."""
    used: list[Any] = []

    def watched(self: CopyStream, tensors: Sequence[Tensor]) -> CopiedTensors:
        used.append(self._stream)
        return copy(self, tensors)

    copy = CopyStream.copy
    monkeypatch.setattr(CopyStream, "copy", watched)
    batches = list(_feed(images(11), PRETEND).ordered(4))
    assert len(used) == len(batches) == 3
    assert len(set(map(id, used))) == 1
    assert used[0] is not torch.get_device_module("pretend").current_stream()
    assert used[0].done == 6  # copies
    unwaited = CopyStream(torch.device(PRETEND)).copy([torch.ones(3)])
    with pytest.raises(RuntimeError, match="without waiting for it"):
        unwaited._tensors[0] + 1
    assert torch.equal((unwaited.wait()[0] + 1).cpu(), torch.full((3,), 2.0))


def test_a_device_without_streams_gets_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_streams", lambda _: None)
    here = list(_feed(images(11), "cpu").ordered(4))
    there = list(_feed(images(11), PRETEND).ordered(4))
    for (mine, my_targets), (theirs, their_targets) in zip(here, there, strict=True):
        assert torch.equal(mine, theirs.cpu())  # type: ignore[arg-type, union-attr]
        assert torch.equal(my_targets, their_targets.cpu())


def test_batches_come_from_pinned_memory_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    monkeypatch.setattr(device_module, "PINNED_KINDS", ("pretend",))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: [pinned.append(self), self][1])
    list(_feed(images(11), PRETEND).ordered(4))
    assert len(pinned) == 6


# ---- too little memory ----


def test_too_little_memory_is_one_sentence_that_says_what_to_lower() -> None:
    experiment = assemble(small_model(), small_federation(), _config(method={"name": "fedavg"}))
    state = experiment.method.start(experiment.initial)
    training = list(experiment.method.tasks(state, next(experiment._sample(1))[:1], 1))

    def train() -> object:
        return list(experiment.engine.run(training))

    def evaluate() -> object:
        weights = {"full": experiment.method.weights(state, "full")}
        return experiment.evaluation._by_engine(state, weights, 1, experiment.engine.run)

    for work, advice in ((train, "set train.micro_batch"), (evaluate, "lower evaluation.batch")):
        work()  # the network and the samples are on the device
        with memory_limit() as memory:
            work()
        sentence = rf"^there is not enough memory on {PRETEND} for client \d \(tier full\) in round 1: {advice}"
        with memory_limit(memory.peak - 1), pytest.raises(FedhmError, match=sentence) as raised:
            work()
        assert "engine.data_on_device = false" in str(raised.value)
        assert "\n" not in str(raised.value)
        with memory_limit(memory.peak):
            work()


def in_its_own_process(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code with the device in a new process: one that has used a device cannot be forked any more."""
    script = folder / "script.py"
    script.write_text(
        f"""
import sys
sys.path[:0] = {[str(Path(pretended_device.__file__).parent)]!r}
sys.argv = ["-n0"]
import pretended_device
pretended_device.register()
{code}
"""
    )
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)


def test_too_little_memory_in_a_worker_is_the_same_sentence(tmp_path: Path) -> None:
    code = """
from engines.on_device import run
with pretended_device.memory_limit(20_000):
    try:
        run(engine={"workers": 2})
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = in_its_own_process(code, tmp_path)
    said = done.stdout + done.stderr
    assert said.startswith(f"NotEnoughMemoryError there is not enough memory on {PRETEND} for client "), said
    assert "set train.micro_batch or train.checkpointing, or lower train.batch, engine.workers" in said


def test_too_little_memory_of_feddfs_server_names_its_batch() -> None:
    experiment = assemble(small_model(), small_public(), _config(method={"name": "feddf", "steps": 2}))
    method, state = experiment.method, experiment.method.start(experiment.initial)
    updates = experiment.engine.run(list(method.tasks(state, next(experiment._sample(1))[:1], 1)))
    found = [update for update in updates if isinstance(update, Update)]
    with memory_limit(1000), pytest.raises(FedhmError, match=r"to distil the clients' models: lower method\.batch"):
        method.merge(state, found, 1)


def test_samples_leave_the_device_if_others_need_the_room() -> None:
    parts = [images(4), images(5), images(6)]
    cache = SampleCache(torch.device(PRETEND), parts[0].nbytes + parts[1].nbytes)
    for part, copies in ((parts[0], 2), (parts[1], 2), (parts[0], 0), (parts[2], 2), (parts[1], 2)):
        with counted() as counts:
            assert cache.find(part) is not None
        assert counts.to_device == copies


# ---- several devices ----


def test_workers_and_several_devices_give_the_same_numbers(tmp_path: Path) -> None:
    """All devices do tasks. The first to begin waits for the others, so that none is too late for its share."""
    engines = [{"workers": 1}, {"workers": 3}, {"devices": [PRETEND, "pretend:1"]}]
    digests = []
    for number, engine in enumerate(engines):
        began = tmp_path / str(number)
        began.mkdir()
        devices = set(engine.get("devices", [PRETEND]))  # type: ignore[call-overload]
        code = f"""
import hashlib, time
from pathlib import Path
from engines.on_device import run
from fedhm.work.client import Client
do, began = Client.run, Path({str(began)!r})

def watched(self, task, position=0):
    update = do(self, task, position)
    (began / str(self.networks.device)).touch()
    until = time.monotonic() + 60
    while len(list(began.iterdir())) < {len(devices)} and time.monotonic() < until:
        time.sleep(0.01)
    return update

Client.run = watched
result = run(engine={engine!r})
digest = hashlib.sha256(str([(r.metrics, r.traffic["full"].loss) for r in result.records]).encode())
for network in result.networks.values():
    for tensor in network.state_dict().values():
        digest.update(tensor.numpy().tobytes())
print(digest.hexdigest())
"""
        done = in_its_own_process(code, tmp_path)
        assert done.returncode == 0, done.stderr
        assert {path.name for path in began.iterdir()} == devices
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


def test_the_record_names_the_device(tmp_path: Path) -> None:
    config = small_config(engine={"threads": 1, "workers": 1, "device": PRETEND}, train={"rounds": 1})
    with RunFolder.create(tmp_path / "run", config.resolved()) as folder:
        result = assemble(small_model(), small_federation(), config).run(folder)
    assert [record.device for record in result.records] == [PRETEND]
    (line,) = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["device"] == PRETEND
    (read,) = read_records(tmp_path / "run" / "records.jsonl")
    assert read.device == PRETEND


def test_a_device_that_is_not_there_is_one_sentence() -> None:
    for name in ("cuda", "cuda:7", "toaster", "hip"):
        sentence = f"^engine.device = '{name}' cannot be used with this PyTorch: [^.]+$"
        with pytest.raises(FedhmError, match=sentence) as raised:
            find_device(name)
        assert len(str(raised.value)) < 320  # torch lists all kinds of devices for a name that is none


def test_seeds_hold_on_a_device_and_are_restored() -> None:
    device = torch.device(PRETEND)
    before = torch.rand(1)
    with seeded(3, device):
        one = torch.rand(4, device=device).cpu()
    with seeded(3, device):
        assert torch.equal(torch.rand(4, device=device).cpu(), one)
    assert not torch.equal(torch.rand(1), before)


# ---- resuming ----


@pytest.mark.usefixtures("without_figures")
def test_a_resumed_run_is_bit_exact_on_the_device(tmp_path: Path) -> None:
    engine = {"threads": 1, "workers": 1, "device": PRETEND, "deterministic": True}
    config = small_config(engine=engine, train={"momentum": 0.9, "precision": "fp16"}, server={"optimizer": "momentum"})

    def train(folder: RunFolder, *watchers: Watcher) -> Result:
        with folder:
            return assemble(small_model(), small_federation(), config, watchers=watchers).run(folder)

    whole = train(RunFolder.create(tmp_path / "whole", config.resolved()))
    with pytest.raises(KeyboardInterrupt):
        train(RunFolder.create(tmp_path / "stopped", config.resolved()), Interruption(after=1))
    resumed = train(RunFolder.open(tmp_path / "stopped"))
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    for tier, network in whole.networks.items():
        for mine, other in zip(
            network.state_dict().values(), resumed.networks[tier].state_dict().values(), strict=True
        ):
            assert torch.equal(mine, other)


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
def test_the_check_of_a_device_prints_its_tables(device: str, tmp_path: Path) -> None:
    code = f"""
from fedhm.cli import main
with pretended_device.memory_limit():  # so that memory is counted
    sys.exit(main(["check-device", {device!r}, "--quick"]))
"""
    done = in_its_own_process(code, tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "### A round of 8 clients" in said
    assert re.search(r"^Fastest: engine\.workers = \d+\.$", said, re.MULTILINE)
    assert re.search(r"\| 1/8 \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| (0\.0e\+00|\d\.\de-\d\d) \|", said)
    assert re.search(r"\| full \| \d+ \| \d+ \| [\d.]+ \| \d+ \| \d+ \| \d+ \| (float32|bf16|fp16) \|", said)
    memory = re.findall(r"\| (?:float32|bf16|fp16) \| ([\d.]+) MB \| (?:([\d.]+) MB|–) \|$", said, re.MULTILINE)
    assert len(memory) == 4  # tiers
    for predicted, measured in memory:
        assert bool(measured) == (device == PRETEND)
        # the prediction has temporary copies of a CPU's convolutions, too
        assert not measured or 0.65 < float(measured) / float(predicted) < 1


def test_the_check_of_a_device_names_the_fastest_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is measured in a process of its own, which returns microseconds, or 0 if it failed."""
    monkeypatch.setattr(process_module, "usable_cores", lambda: 4)
    for times, fastest in (((300, 100, 200), "2"), ((300, 200, 100), "4"), ((300, 0, 0), "1")):
        left = list(times)
        monkeypatch.setattr(process_module, "in_child", lambda _, left=left: left.pop(0))
        sheet = check_device._workers(CPU, 24)
        assert [row[0] for row in sheet.rows] == ["1", "2", "4"]
        assert sheet.note == f"Fastest: engine.workers = {fastest}."
    monkeypatch.setattr(process_module, "in_child", lambda _: 0)
    assert check_device._workers(CPU, 24).note == "No number of workers could be measured."


def test_the_check_of_a_device_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-device", "cuda:9"]) == 1
    assert capsys.readouterr().err.startswith("fedhm: engine.device = 'cuda:9' cannot be used")
