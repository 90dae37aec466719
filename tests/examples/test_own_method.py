"""A method from outside the package: as an object, by its name, in comparisons. On Flower: tests/flower."""

import copy
import runpy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import Field
from torch import nn

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.compare.select import known_names
from fedhm.config import registry as plugins
from fedhm.config.loading import load_config, parse
from fedhm.config.registry import known
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.networks.exchange import Tensors
from installed import install

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_method.py"
Data = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def data() -> Data:
    torch.manual_seed(0)
    x = torch.randn(120, 6)
    y = (x @ torch.randn(6, 3)).argmax(1)
    return [(x[i::6], y[i::6]) for i in range(6)]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert float(capsys.readouterr().out.removeprefix("accuracy ").removesuffix("%\n")) > 85


@pytest.mark.usefixtures("without_figures")
def test_an_object_is_run_saved_and_resumed(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})
    own = runpy.run_path(str(EXAMPLE))["FedMedian"]
    settings = {"train": {"rounds": 2, "lr": 0.1}, "engine": {"threads": 1}}

    def run(rounds: int) -> fedhm.Result:
        changed = {**settings, "train": {**settings["train"], "rounds": rounds}}
        return fedhm.run(network(), data[1:], data[0], changed, method=own(strength=0.5))

    whole = run(2)
    method = own(strength=0.5)
    result = fedhm.run(network(), data[1:], data[0], settings, tmp_path / "run", method=method)
    assert 'name = "fedmedian"\nstrength = 0.5' in (tmp_path / "run" / "config.toml").read_text()
    assert result.metrics == whole.metrics
    max((tmp_path / "run" / "checkpoints").iterdir()).unlink()  # as if the last round had not been finished
    again = fedhm.run(network(), data[1:], data[0], settings, tmp_path / "run", method=method)
    assert again.metrics == whole.metrics
    with pytest.raises(FedhmError, match="this run has no"):  # its data came from Python
        fedhm.resume(tmp_path / "run")


def test_an_installed_method_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", EXAMPLE, "methods", {"fedmedian": "FedMedian"}, monkeypatch)
    config = load_config("digits", ["method.name=fedmedian", "method.strength=0.5"])
    assert config.method.model_dump() == {"name": "fedmedian", "strength": 0.5}
    assert "fedmedian" in known("methods")
    assert "fedmedian" in known_names()
    with pytest.raises(FedhmError, match=r"unknown key 'method.strenght', did you mean 'method.strength'"):
        load_config("digits", ["method.name=fedmedian", "method.strenght=0.5"])
    with pytest.raises(FedhmError, match=r"there is no method 'fedmedia', known are fedhm, capable, fedavg.*fedmedian"):
        load_config("digits", ["method.name=fedmedia"])


def test_a_package_that_does_not_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken_method.py"
    broken.write_text("import a_module_that_is_not_there\n")
    install(tmp_path / "site", broken, "methods", {"broken": "Method"}, monkeypatch)
    with pytest.raises(FedhmError, match=r"the method 'broken' cannot be loaded from broken_method:Method.*not_there"):
        parse({"method": {"name": "broken"}}, "test")


def test_wrong_methods_are_one_sentence(data: Data) -> None:
    class Copycat(Own):
        name: Literal["fedhm"] = "fedhm"  # type: ignore[assignment]

    cases: list[tuple[object, dict[str, object], str]] = [
        (3, {}, "config: method: input should be a valid dictionary or instance of MethodConfig"),
        (Own(), {"method": {"name": "fedhm"}}, "the method is given twice"),
        (Copycat(), {}, "'fedhm' is the name of another method"),
        ("fedsgd", {}, "there is no method 'fedsgd'"),
    ]
    for method, config, sentence in cases:
        with pytest.raises(FedhmError, match=sentence):
            fedhm.run(network(), data[1:], data[0], config, method=method)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        fedhm.MethodConfig(name="x")  # type: ignore[abstract]
    assert fedhm.run(network(), data[1:], data[0], {"train": {"rounds": 1}}, method="fedavg").metrics.keys() == {"full"}


class Own(fedhm.MethodConfig):
    name: Literal["own"] = "own"
    parts: list[float] = Field(default=[1.0])

    def build(self, model: nn.Module, setup: object) -> "Remembering":  # noqa: ARG002
        return Remembering(model)


@dataclass(frozen=True)
class Memory(fedhm.State):
    weights: Tensors
    seen: tuple[int, ...] = ()


class Remembering(fedhm.Method[Memory]):
    """It has a state of its own, of which it must say so."""

    tiers = levels = ("full",)
    state_type = Memory

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def start(self, weights: Tensors) -> Memory:
        return Memory(weights)

    def tasks(
        self, state: Memory, participants: Sequence[fedhm.Participant], round_number: int
    ) -> Iterator[fedhm.Task]:
        for p in participants:
            yield fedhm.Task("train", round_number, p.client, p.tier, self.spec("full"), state.weights)

    def merge(self, state: Memory, updates: Iterable[fedhm.Update], round_number: int) -> Memory:
        last = list(updates)[-1]
        return Memory(last.tensors, (*state.seen, round_number))

    def network(self, spec: fedhm.NetworkSpec) -> nn.Module:  # noqa: ARG002
        return copy.deepcopy(self.model)

    def weights(self, state: Memory, tier: str) -> Tensors:  # noqa: ARG002
        return state.weights


SHORT: dict[str, Any] = {"train": {"rounds": 2, "lr": 0.1}, "engine": {"threads": 1}}


@pytest.mark.usefixtures("without_figures")
def test_a_state_of_ones_own_comes_back_and_a_wrong_one_is_refused_at_once(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fedhm.run(network(), data[1:], data[0], SHORT, tmp_path / "run", method=Own())
    max((tmp_path / "run" / "checkpoints").iterdir()).unlink()
    again = fedhm.run(network(), data[1:], data[0], {**SHORT, "method": Own()}, tmp_path / "run")
    assert again.metrics == whole.metrics
    monkeypatch.setattr(Remembering, "state_type", fedhm.ModelState)
    with pytest.raises(FedhmError, match="is a Memory, but its state_type is ModelState: set state_type = Memory"):
        fedhm.run(network(), data[1:], data[0], SHORT, tmp_path / "other", method=Own())
    assert not (tmp_path / "other").exists()  # what failed in its first round does not stand in the way


def test_a_class_that_was_made_again_takes_the_place_of_the_first(data: Data) -> None:
    for _ in range(2):  # as a notebook's cell that is run twice
        again = type("Own", (Own,), {"__module__": Own.__module__, "__qualname__": "Own"})
        assert fedhm.run(network(), data[1:], data[0], SHORT, method=again()).metrics


def test_settings_without_a_hash_can_still_be_told_apart() -> None:
    one, other = (parse({"method": Own(parts=[share])}, "test").resolved() for share in (1.0, 2.0))
    assert hash(one) != hash(other)
    assert hash(one) == hash(one.model_copy())


def test_a_name_alone_stands_for_its_section() -> None:
    config = parse({"method": "fedavg", "objective": "regression"}, "test")
    assert (config.method.name, config.objective.name) == ("fedavg", "regression")


def test_no_round_is_merged_under_another_number(federation: Federation) -> None:
    seen: list[int] = []
    experiment = assemble(small_model(), federation, small_config(train={"rounds": 3}))
    merge = experiment.method.merge

    def watched(state: object, updates: object, round_number: int) -> object:
        seen.append(round_number)
        return merge(state, updates, round_number)

    experiment.method.merge = watched  # type: ignore[method-assign]
    experiment.run()
    assert seen == [1, 2, 3]
