"""The reference client, which imports nothing of the library: it trains as PyTorch does, or says why not."""

import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedhm
from fedhm.assembly import make_client, read_federation
from fedhm.cli import main
from fedhm.config.loading import load_config
from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Samples
from fedhm.errors import FedhmError
from fedhm.export.cards import write_training_cards
from fedhm.export.training import TrainingSource, training_sources, write_training
from fedhm.export.write import Exported
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.exchange import held_tensors
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.spec import NetworkSpec
from fedhm.networks.structure import copy_network
from fedhm.ondevice.manifest import schedule_of
from fedhm.work.client import Client
from fedhm.work.messages import Task
from fedhm.work.statistics import gather

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
def nested(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingSource, Path]:
    """Return a tier with a smaller one inside, and its manifest."""
    changes = [*CHANGES, "train.schedule=cosine", "train.milestones=[]"]
    (source,) = training_sources(load_config("digits", changes), ["full"])
    found = write_training(source, tmp_path_factory.mktemp("nested")).manifest
    assert found is not None
    return source, found


@pytest.fixture(scope="module")
def module() -> Any:
    sys.path.insert(0, str(CLIENT.parent))
    try:
        import phone_client
    finally:
        sys.path.pop(0)
    return phone_client


@pytest.fixture(scope="module")
def phone(module: Any, exported: Path) -> Any:
    return module, module.Phone(exported)


def pytorch_client(source: TrainingSource) -> Client:
    """Return a client of the library with the same network and samples."""
    config = load_config("digits", CHANGES).resolved().model_copy(update={"train": source.train})
    pool = NetworkPool(lambda _: copy_network(source.network))
    return make_client(Samples(*digits()), read_federation(config).preprocessing, pool, config, None)


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
def test_it_trains_as_pytorch_does(
    phone: Any, written: tuple[TrainingSource, Exported], exported: Path, round_number: int
) -> None:
    source, _ = written
    inputs, targets = digits()
    weights = load_file(exported.with_suffix(".safetensors"))
    trained, loss, labels = phone[1].train(weights, inputs, targets, round_number)
    task = Task("train", round_number, 0, "1/8", NetworkSpec("1/8"), held_tensors(source.network))
    update = pytorch_client(source).run(task)
    assert loss == pytest.approx(update.loss, rel=1e-4)
    assert tuple(labels) == update.labels
    assert set(trained) == set(update.tensors)
    for name, tensor in update.tensors.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=2e-5)
        if name != "bn1.running_var":
            assert not torch.equal(tensor, weights[name]), name
    outputs = phone[1].evaluate(trained, inputs)
    assert outputs.shape == (20, 10)


def test_running_averages_need_not_travel(phone: Any, written: tuple[TrainingSource, Exported], exported: Path) -> None:
    """A server that gathers BatchNorm statistics for its evaluation sends none, and wants none back."""
    weights = load_file(exported.with_suffix(".safetensors"))
    running = running_statistic_names(written[0].network)
    bare = {name: tensor for name, tensor in weights.items() if name not in running}
    (trained, *rest), (whole, *others) = (phone[1].train(given, *digits(), 1) for given in (bare, weights))
    assert set(trained) == set(bare)
    assert rest == others
    assert all(trained[name].equal(whole[name]) for name in bare)


def test_it_gathers_statistics_as_the_library_does(phone: Any, written: tuple[TrainingSource, Exported]) -> None:
    network = copy_network(written[0].network)
    network.load_state_dict(written[0].network.state_dict())
    bare = {n: t for n, t in held_tensors(network).items() if n not in running_statistic_names(network)}
    config = load_config("digits", CHANGES)
    client, preprocessing = read_federation(config).clients[0], read_federation(config).preprocessing
    for size in (20, 61):  # one batch, and three: behind the first layer, three batches are normalised otherwise
        few = client.subset(torch.arange(size))
        found = phone[1].gather(bare, few.tensor.contiguous(), few.labels)
        expected = gather(network, [preprocessing.normalise(few.tensor.permute(0, 2, 3, 1).contiguous())])
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
            if size == 20 or name.startswith("bn1/") or name.endswith("/values"):
                torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
            else:
                torch.testing.assert_close(found[name], tensor, rtol=0.5, atol=0.1)
    with pytest.raises(phone[0].PhoneError, match="have no variance"):
        phone[1].gather({name: tensor * float("nan") for name, tensor in bare.items()}, *digits())


@pytest.mark.parametrize(
    "settings",
    [
        {"milestones": (2, 4), "lr_decay": 0.3},
        {"milestones": (3,), "warmup_rounds": 2},
        {"schedule": "cosine"},
        {"schedule": "cosine", "warmup_rounds": 3},
        {"schedule": "constant", "warmup_rounds": 1},
    ],
)
def test_its_learning_rate_is_that_of_the_settings(module: Any, settings: dict[str, Any]) -> None:
    train = TrainConfig(rounds=9, lr=0.37, **settings)
    rate = json.loads(json.dumps(schedule_of(train)))
    for round_number in range(1, 13):
        assert module.learning_rate(rate, round_number) == train.learning_rate(round_number)


def by_files(manifest: Path, folder: Path, *more: str, update: str = "update.safetensors") -> tuple[int, str]:
    inputs, targets = digits()
    save_file({"inputs": inputs, "targets": targets}, folder / "samples.safetensors")
    command = [sys.executable, str(CLIENT), str(manifest), str(folder / "samples.safetensors")]
    command += [str(manifest.with_suffix(".safetensors")), str(folder / update), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stderr


def test_it_works_with_files(exported: Path, tmp_path: Path) -> None:
    assert by_files(exported, tmp_path, "--round", "2") == (0, "")
    facts = json.loads((tmp_path / "update.json").read_text())
    assert (facts["round"], facts["samples"]) == (2, 20)
    assert facts["labels"] == sorted(set(digits()[1].tolist()))
    sent = load_file(tmp_path / "update.safetensors")
    assert set(sent) == set(json.loads(exported.read_text())["sends"])
    assert by_files(exported, tmp_path, update="missing/update.safetensors") == (
        1,
        f"phone_client: there is no folder {tmp_path / 'missing'} for the update\n",
    )


def test_a_tier_with_another_inside_works_with_its_own_files(
    nested: tuple[TrainingSource, Path], tmp_path: Path
) -> None:
    source, manifest = nested
    code, said = by_files(manifest, tmp_path, "--round", "2")
    assert (code, said) == (0, "")
    first = load_file(manifest.with_suffix(".safetensors"))
    bases = {"basis conv2", "basis conv3", "basis hidden"}
    assert set(first) == held_tensors(source.network).keys() | bases
    update = pytorch_client(source).run(Task("nested", 2, 0, "full", NetworkSpec("full"), first))
    sent = load_file(tmp_path / "update.safetensors")
    assert set(sent) == set(update.tensors)
    for name, tensor in update.tensors.items():
        torch.testing.assert_close(sent[name], tensor, rtol=1e-3, atol=2e-5)
    assert json.loads((tmp_path / "update.json").read_text())["loss"] == pytest.approx(update.loss, rel=1e-4)
    modes = {path.stat().st_mode for path in manifest.parent.iterdir()}
    assert len(modes) == 1


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
    refused("'conv1.weight' is float16, not float32", weights={name: t.half() for name, t in weights.items()})
    copied = tmp_path / "copy"
    shutil.copytree(exported.parent, copied)
    program = copied / "1-8.train.pte"
    program.write_bytes(program.read_bytes()[:-100])
    refused("1-8.train.pte is damaged, or not the file of", copied / exported.name)
    program.unlink()
    refused("cannot be read as a manifest with its file", copied / exported.name)
    (copied / exported.name).write_text("{}")
    refused("is not a manifest of this kind", copied / exported.name)


def set_to(value: Any, *keys: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m.pop("batch"), "damaged manifest: it has no 'batch'"),
        (lambda m: m["learning_rate"].pop("schedule"), "it has no 'learning_rate.schedule'"),
        (lambda m: m["statistics"][0].pop("values"), "it has no 'statistics.values'"),
        (set_to("24", "batch"), "'batch' is \"24\", which is no int"),
        (set_to({}, "parameters"), "'parameters' must be a list"),
        (set_to(64, "batch"), "25 rows are not those of a batch of 64"),
        (set_to(0, "epochs"), "epochs or iterations, must be 1 or more"),
        (set_to("float31", "inputs", "dtype"), "torch has no type 'float31'"),
        (set_to("steps", "learning_rate", "schedule"), "must be one of milestones, cosine, constant"),
        (set_to(7, "outputs"), r"does not fit 1-8.train.pte: .*Expected shape \(10\), but received \(7\)"),
        (set_to([1, 9, 9], "inputs", "shape"), "does not fit 1-8.train.pte: the runtime cannot make a step"),
        (set_to("other", "methods", "train", "name"), "does not fit 1-8.train.pte: the runtime cannot make a step"),
        (set_to([1, 1], "parameters", 0, "shape"), r"'conv1.weight' is \[1, 1\] there, and \[8, 1, 3, 3\] in"),
        (lambda m: m["statistics"].pop(), "its statistics are not those of the BatchNorm layers"),
        (lambda m: m["sends"].pop(), "'sends' must name all parameters and statistics"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_its_graph_is_one_sentence(
    module: Any, exported: Path, tmp_path: Path, change: Callable[[Any], None], sentence: str
) -> None:
    values = json.loads(exported.read_text())
    change(values)
    refuse_manifest(module, exported, tmp_path, values, sentence)


@pytest.mark.parametrize("content", [b"garbage" * 100, 50_000])
def test_a_broken_graph_with_a_fitting_digest_is_one_sentence(
    module: Any, exported: Path, tmp_path: Path, content: bytes | int
) -> None:
    program = exported.with_suffix(".pte").read_bytes()[:content] if isinstance(content, int) else content
    values = {**json.loads(exported.read_text()), "sha256": hashlib.sha256(program).hexdigest()}
    (tmp_path / "1-8.train.pte").write_bytes(program)
    refuse_manifest(module, exported, tmp_path, values, "1-8.train.pte: ")


def refuse_manifest(module: Any, exported: Path, folder: Path, values: Any, sentence: str) -> None:
    if not (folder / "1-8.train.pte").exists():
        shutil.copy(exported.with_suffix(".pte"), folder)
    (folder / exported.name).write_text(json.dumps(values))
    with pytest.raises(module.PhoneError, match=sentence) as caught:
        module.Phone(folder / exported.name)
    assert "\n" not in str(caught.value)


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
    private = ["train.masked_loss=false", "evaluation.static_from=never"]
    private += ["privacy.where=client", "privacy.clip=0.5", "privacy.noise=2.0"]
    assert "does not clip its update or add noise" in said("digits", "--train", "--to", "executorch", "--set", *private)
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
    samples = torch.randn(20, 6), torch.arange(20) % 5
    with pytest.raises(FedhmError, match=r"labels outside 0…2"):
        fedhm.export(network, (6,), to="executorch", train=True, out=tmp_path, samples=samples)
    with pytest.raises(FedhmError, match="goes with to='executorch'"):
        fedhm.export(network, (6,), train=True, out=tmp_path)
