"""The reference client, which imports nothing of the library: it trains as PyTorch does, or says why not."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedhm
from fedhm.assembly import make_client, read_federation
from fedhm.cli import main
from fedhm.config.loading import load_config
from fedhm.data.samples import Samples
from fedhm.errors import FedhmError
from fedhm.export.cards import write_training_cards
from fedhm.export.training import TrainingSource, training_sources, write_training
from fedhm.export.write import Exported
from fedhm.networks.exchange import held_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.spec import NetworkSpec
from fedhm.networks.structure import copy_network
from fedhm.work.messages import Task

pytest.importorskip("executorch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CLIENT = Path(__file__).parents[2] / "examples" / "phone_client.py"
# batches as large as the data: their order does not matter
CHANGES = ["model.width=0.25", "train.batch=24", "train.epochs=3", "train.clip_norm=0.5", "train.milestones=[2]"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingSource, Exported]:
    (source,) = training_sources(load_config("digits", CHANGES), ["1/8"])
    return source, write_training(source, tmp_path_factory.mktemp("phone"))


@pytest.fixture(scope="module")
def exported(written: tuple[TrainingSource, Exported]) -> Path:
    _, done = written
    assert done.manifest is not None
    assert done.difference < 1e-4
    return done.manifest


@pytest.fixture(scope="module")
def phone(exported: Path) -> Any:
    sys.path.insert(0, str(CLIENT.parent))
    try:
        import phone_client
    finally:
        sys.path.pop(0)
    return phone_client, phone_client.Phone(exported)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    samples = read_federation(load_config("digits", CHANGES)).clients[0]
    few = samples.subset(torch.arange(20))
    return few.tensor.contiguous(), few.labels


def test_it_imports_nothing_of_the_library() -> None:
    tree = ast.parse(CLIENT.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.partition(".")[0] == "fedhm" for name in names)
    assert "nn.Module" not in CLIENT.read_text()


@pytest.mark.parametrize("round_number", [1, 3])
def test_it_trains_as_pytorch_does(phone: Any, exported: Path, round_number: int) -> None:
    config = load_config("digits", CHANGES).resolved()
    (source,) = training_sources(load_config("digits", CHANGES), ["1/8"])
    inputs, targets = digits()
    weights = load_file(exported.with_suffix(".safetensors"))
    trained, loss, labels = phone[1].train(weights, inputs, targets, round_number)
    pool = NetworkPool(lambda _: copy_network(source.network))
    client = make_client(Samples(inputs, targets), read_federation(config).preprocessing, pool, config, None)
    task = Task("train", round_number, 0, "1/8", NetworkSpec("1/8"), held_tensors(source.network))
    update = client.run(task)
    assert loss == pytest.approx(update.loss, rel=1e-4)
    assert tuple(labels) == update.labels
    assert set(trained) == set(update.tensors)
    for name, tensor in update.tensors.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=2e-5)
        if name != "bn1.running_var":
            assert not torch.equal(tensor, weights[name]), name
    outputs = phone[1].evaluate(trained, inputs)
    assert outputs.shape == (20, 10)


def test_it_works_with_files(exported: Path, tmp_path: Path) -> None:
    inputs, targets = digits()
    save_file({"inputs": inputs, "targets": targets}, tmp_path / "samples.safetensors")
    command = [sys.executable, str(CLIENT), str(exported), str(tmp_path / "samples.safetensors")]
    command += [str(exported.with_suffix(".safetensors")), str(tmp_path / "update.safetensors"), "--round", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "update.json").read_text())
    assert (facts["round"], facts["samples"]) == (2, 20)
    assert facts["labels"] == sorted(set(targets.tolist()))
    sent = load_file(tmp_path / "update.safetensors")
    assert set(sent) == set(json.loads(exported.read_text())["sends"])


def test_bad_input_is_one_sentence(phone: Any, exported: Path, tmp_path: Path) -> None:
    module, good = phone
    inputs, targets = digits()
    weights = load_file(exported.with_suffix(".safetensors"))

    def refused(sentence: str, manifest: Path | None = None, **given: Any) -> None:
        def train() -> None:
            own = good if manifest is None else module.Phone(manifest)
            own.train(given.get("weights", weights), given.get("inputs", inputs), given.get("targets", targets), 1)

        with pytest.raises(module.PhoneError, match=sentence) as caught:
            train()
        assert "\n" not in str(caught.value)

    refused(r"inputs are uint8 of shape \(1, 8, 4\), not uint8 of \(1, 8, 8\)", inputs=inputs[..., :4])
    refused("inputs are float32", inputs=inputs.float())
    refused("labels must be in 0…9", targets=targets + 5)
    refused("20 inputs and 19 targets", targets=targets[:19])
    refused("do not fit the graph of tier 1/8: 'conv1.weight' is missing", weights={})
    refused(r"'conv2.u' is \[1, 2\]", weights={**weights, "conv2.u": torch.zeros(1, 2)})
    refused("it has no 'other'", weights={**weights, "other": torch.zeros(1)})
    copied = tmp_path / "copy"
    shutil.copytree(exported.parent, copied)
    program = copied / "1-8.train.pte"
    program.write_bytes(program.read_bytes()[:-100])
    refused("1-8.train.pte is damaged, or not the file of", copied / exported.name)
    program.unlink()
    refused("cannot be read as a manifest with its file", copied / exported.name)
    (copied / exported.name).write_text("{}")
    refused("cannot be read as a manifest", copied / exported.name)


def test_the_command_refuses_what_does_not_go_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        assert main(["export", *arguments, "--out", str(tmp_path / "out")]) == 1
        return capsys.readouterr().err

    assert "it goes with --to executorch" in said("digits", "--train")
    assert "no tier '1/3', only full, 1/2" in said("digits", "--train", "--to", "executorch", "--tier", "1/3")
    adam = ("digits", "--train", "--to", "executorch", "--tier", "1/8", "--set", "train.optimizer=adamw")
    assert "needs train.optimizer = 'sgd': ExecuTorch has SGD only" in said(*adam)
    random = ("digits", "--train", "--to", "executorch", "--tier", "full", "--set", "train.nested_tier=random")
    assert "set train.nested_tier = 'smallest'" in said(*random)
    assert not list(tmp_path.glob("out/*"))


def test_cards_measure_both_runtimes(written: tuple[TrainingSource, Exported], tmp_path: Path) -> None:
    source, done = written
    _, path = write_training_cards([source], [done], tmp_path)
    numbers = r"[\d.]+ kB \| [\d,]+ \| 25 \| [\d.]+ ms \| [\d.]+ ms \| [\d.]+ [kM]B \| [\d.]+ [kM]B"
    assert re.search(rf"\| 1/8 \| {numbers} \|", path.read_text())


def test_the_example_of_the_docs_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    page = CLIENT.parents[1] / "docs" / "on-device.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    exec(compile(block, "docs/on-device.md", "exec"), {})
    manifest = json.loads((tmp_path / "exported" / "model.train.json").read_text())
    assert (manifest["batch"], manifest["rows"], manifest["learning_rate"]["lr"]) == (8, 9, 0.05)
    assert manifest["clip_norm"] > 0  # the method's own


def test_a_network_of_ones_own_needs_samples(tmp_path: Path) -> None:
    network = torch.nn.Linear(6, 3)
    with pytest.raises(FedhmError, match="is checked on samples"):
        fedhm.export(network, (6,), to="executorch", train=True, out=tmp_path)
    with pytest.raises(FedhmError, match="goes with to='executorch'"):
        fedhm.export(network, (6,), train=True, out=tmp_path)
