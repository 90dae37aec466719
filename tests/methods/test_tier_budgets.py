"""FedHM with tiers that are budgets: plans from the spectrum, planned again, saved with the run, resumed exactly."""

import json
from pathlib import Path

import pytest
import torch

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.config.schema import Config, StopConfig
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment
from fedhm.measure.cost import training_memory
from fedhm.networks.exchange import exchanged_tensors
from fedhm.report.result import Result
from fedhm.runs.folder import RunFolder
from fedhm.work.messages import TaskOptions

TIERS = ["full", "bytes:8kB", {"parameters": "1/8"}]
NAMES = ("full", "bytes:8kB", "parameters:1/8")


def planned(**changes: object) -> Config:
    learnt = {"start": "smallest", "band_speed": 1}  # all that lies beyond the smallest rank, so that plans change
    method = {"name": "fedhm", "tiers": [1, *TIERS[1:]], "replan": [1, 3], **learnt, **changes}
    inside = {
        "nested": 0.5,
        "nested_tier": "random",
        "nested_form": "beside",
    }  # several networks in one, by their ranks
    return small_config(method=method, train={"rounds": 4, **inside})


def experiment_of(federation: Federation, config: Config) -> Experiment:
    return assemble(small_model(), federation, config)


def test_the_config_names_them_and_reads_them_back(tmp_path: Path) -> None:
    config = planned()
    assert config.method.model_dump()["tiers"] == (1.0, "bytes:8kB", "parameters:1/8")
    RunFolder.create(tmp_path / "run", config.resolved()).__exit__()
    assert RunFolder.open(tmp_path / "run").config.method == config.method


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"tiers": ["memory:-3MB"]}, "memory must be at least 1, not '-3MB'"),
        ({"tiers": [{"time": 3}]}, "there is no budget of 'time'"),
        ({"tiers": [1, "bytes:3 parsec"]}, "there is no unit 'parsec'"),
        ({"tiers": [1, "1/2"], "replan": [3]}, "replan is for tiers that are budgets"),
        ({"tiers": ["bytes:8kB"], "replan": [0]}, "greater than or equal to 1"),
    ],
)
def test_what_is_wrong_with_them_is_a_sentence(method: dict[str, object], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence) as error:
        small_config(method={"name": "fedhm", **method})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tiers", "sentence"),
    [
        (["parameters:100"], "parameters = 100 is too little for this model: .* classifier"),
        (["memory:1kB"], "memory = 1kB is too little to train any version"),
        (["bytes:8kB", "1/2"], "'bytes:8kB' affords less than a tier after it: list the largest first"),
        (["bytes:8kB", 1], "'bytes:8kB' affords less than a tier after it: list the largest first"),
        (["bytes:8kB", "bytes:9kB"], "'bytes:9kB' affords more than the tier before it: list the largest first"),
        (["bytes:8kB", "memory:1GB"], "'memory:1GB' affords more than the tier before it: list the largest first"),
        (["bytes:8kB", "macs:1G"], "'macs:1G' affords more than the tier before it"),
        (["1/8", "memory:1GB"], "'memory:1GB' affords more than the tier before it"),
        (["1/4", "1/2", "bytes:7kB"], "all tiers are listed with the largest first"),
    ],
)
def test_what_the_model_cannot_meet_is_a_sentence(federation: Federation, tiers: list[str], sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        experiment_of(federation, planned(tiers=tiers))


DONE: list[tuple[Path, Result]] = []  # one run, which several tests look at


@pytest.fixture
def whole(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    if not DONE:
        path, config = tmp_path_factory.mktemp("planned") / "run", planned().resolved()
        with RunFolder.create(path, config) as folder:
            DONE.append((path, experiment_of(federation, config).run(folder)))
    return DONE[0]


@pytest.mark.slow
def test_plans_keep_to_their_budgets_and_are_saved_with_the_run(whole: tuple[Path, Result]) -> None:
    path, result = whole
    assert tuple(result.metrics) == NAMES
    assert result.costs["bytes:8kB"].bytes <= 8000
    replanned = {record.round: record.plans for record in result.records if record.plans}
    assert set(replanned) <= {1, 3}
    assert replanned, "training has changed the spectrum"
    plans = json.loads((path / "plans.json").read_text())["plans"]
    assert plans == replanned[max(replanned)]
    assert all(rank <= plans["bytes:8kB"].get(layer, 1000) for layer, rank in plans["parameters:1/8"].items())
    costs = json.loads((path / "tiers.json").read_text())["tiers"]
    assert costs["bytes:8kB"]["bytes"] == result.costs["bytes:8kB"].bytes
    assert (path / "models" / "bytes-8kB.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_is_resumed_exactly_across_a_replan(
    whole: tuple[Path, Result], stop: int, federation: Federation, tmp_path: Path
) -> None:
    class StoppedError(Exception):
        pass

    class Stop:
        def started(self, done: int, rounds: int) -> None: ...
        def task_done(self, *_: object) -> None: ...
        def round_done(self, record: object) -> None:
            if getattr(record, "round", 0) == stop:
                raise StoppedError

    config = planned().resolved()
    with RunFolder.create(tmp_path / "run", config) as folder, pytest.raises(StoppedError):
        assemble(small_model(), federation, config, watchers=[Stop()]).run(folder)
    with RunFolder.open(tmp_path / "run") as folder:
        result = experiment_of(federation, config).run(folder)
    for tier, network in whole[1].networks.items():
        again = exchanged_tensors(result.networks[tier])
        assert all(torch.equal(again[name], tensor) for name, tensor in exchanged_tensors(network).items())
    assert [record.plans for record in result.records] == [record.plans for record in whole[1].records]


@pytest.mark.slow
def test_the_best_models_are_loaded_by_the_plan_of_their_round(federation: Federation, tmp_path: Path) -> None:
    config = planned().model_copy(update={"stop": StopConfig(target=1.0)}).resolved()  # which is never reached
    with RunFolder.create(tmp_path / "run", config) as folder:
        first = experiment_of(federation, config).run(folder)
    replanned = [record.round for record in first.records if record.plans]
    assert replanned == [1, 3]
    assert first.best_round == 2, "neither the first plan nor the last one is its own"
    with RunFolder.open(tmp_path / "run") as folder:
        again = experiment_of(federation, config).run(folder)
    assert again.best_round == first.best_round
    for tier, network in first.best.items():
        loaded = exchanged_tensors(again.best[tier])
        assert loaded.keys() == exchanged_tensors(network).keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in exchanged_tensors(network).items())


def test_a_nodes_method_knows_networks_by_their_specs_alone(federation: Federation) -> None:
    here = experiment_of(federation, planned()).method
    state = here.start(exchanged_tensors(small_model()))
    elsewhere = assemble(small_model(7), federation, planned()).method  # of other weights
    for tier in NAMES:
        shapes = {n: t.shape for n, t in exchanged_tensors(elsewhere.network(here.spec(tier, state))).items()}
        assert shapes == {n: t.shape for n, t in here.weights(state, tier).items()}


def test_a_budget_of_memory_says_how_to_train(federation: Federation) -> None:
    model, batch = small_model(), 64
    least = training_memory(small_model(), (1, 6, 6), batch)
    config = small_config(
        method={"name": "fedhm", "tiers": [1, f"memory:{least - 60_000}"]},
        train={"batch": batch, "rounds": 1},
    )
    with pytest.warns(UserWarning, match="micro-batches of .*BatchNorm"):
        experiment = assemble(model, federation, config)
    planned_tier = experiment.method.start(exchanged_tensors(model)).plans[experiment.method.tiers[1]]
    assert planned_tier.options == TaskOptions(micro_batch=planned_tier.micro_batch, checkpointing=False)
    assert planned_tier.micro_batch
    assert experiment.run().records[-1].metrics


def test_budgets_choose_their_own_ranks() -> None:
    with pytest.raises(FedhmError, match="max_rank is for tiers that are ratios"):
        planned(max_rank=3)
