"""Settings are checked before anything runs, and what is wrong is said in one sentence."""

from pathlib import Path

import pytest

from fedhm.config.loading import load_config, parse, presets
from fedhm.config.schema import Config, DataConfig, ModelConfig
from fedhm.config.section import tier_name
from fedhm.errors import FedhmError
from fedhm.machine.process import usable_cores
from fedhm.methods.fedavg import FedAvgConfig
from fedhm.methods.fedhm import FedHMConfig

PAPER = {
    "cifar10-resnet18": ("cifar10", "resnet18", 3, 160, (100, 150)),
    "cifar100-resnet34": ("cifar100", "resnet34", 15, 100, (70, 90)),
    "tinyimagenet-resnet34": ("tinyimagenet", "resnet34", 15, 60, (40, 55)),
}


def test_the_five_presets_are_there() -> None:
    assert set(presets()) >= {"digits", "fashion-mnist", *PAPER}


@pytest.mark.parametrize("name", PAPER)
def test_paper_presets_have_the_papers_settings(name: str) -> None:
    source, model, keep, rounds, milestones = PAPER[name]
    config = load_config(name)
    assert config.data is not None
    assert config.model is not None
    assert isinstance(config.method, FedHMConfig)
    assert (config.data.source, config.data.crop, config.data.flip, config.data.alpha) == (source, 4, True, 0.5)
    assert (config.model.name, config.model.width) == (model, 1.0)
    assert (config.federation.clients, config.federation.participation) == (20, 0.5)
    train = config.train
    assert (train.rounds, train.milestones, train.epochs, train.batch) == (rounds, milestones, 10, 64)
    assert (train.lr, train.lr_decay, train.momentum, train.weight_decay) == (0.1, 0.1, 0.9, 1e-4)
    assert train.frobenius_decay == 1e-4
    assert config.method.tiers == (1, 0.5, 0.25, 0.125)
    assert (config.method.keep, config.method.temperature) == (keep, 5.0)
    assert config.evaluation.static_from == milestones[0]
    assert (config.method.aggregate, config.method.start) == ("models", "whole")


def test_every_other_preset_has_fedhms_default() -> None:
    default = FedHMConfig()
    for name in set(presets()) - PAPER.keys():
        method = load_config(name).method
        if isinstance(method, FedHMConfig):
            found = method.aggregate, method.start, method.band_speed
            assert found == (default.aggregate, default.start, default.band_speed), name
            assert load_config(name).train.nested == 0.5, name


@pytest.mark.parametrize("source", ["cifar10", "cifar100"])
def test_presets_for_many_seeds_are_small(source: str) -> None:
    config = load_config(f"{source}-tiers")
    assert config.data is not None
    assert config.model is not None
    assert isinstance(config.method, FedHMConfig)
    assert (config.data.source, config.data.partition, config.data.downscale) == (source, "iid", 2)
    assert (config.federation.clients, config.federation.per_round(20)) == (20, 10)
    assert (config.server.optimizer, config.method.aggregate, config.method.start) == ("momentum", "bands", "auto")
    assert config.method.tiers == (1, 0.5, 0.25, 0.125)
    assert config.model.name == "resnet10"


def test_learning_rate_drops_after_each_milestone() -> None:
    train = load_config("cifar10-resnet18").train
    rates = [train.learning_rate(number) for number in (1, 100, 101, 150, 151, 160)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize("name", presets())
def test_a_resolved_config_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    config = load_config(name).resolved()
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    again = load_config(str(file))
    assert again.resolved() == config
    assert again.engine.threads >= 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("train.lrr=0.1", "unknown key 'train.lrr', did you mean 'train.lr'?"),
        ("trian.lr=0.1", "unknown key 'trian', did you mean 'train'?"),
        ("sed=1", "unknown key 'sed', did you mean 'seed'?"),
        ("lr=0.1", "unknown key 'lr', did you mean 'train.lr'?"),
        ("method.teirs=[1]", "unknown key 'method.teirs', did you mean 'method.tiers'?"),
        ("train.lr=-1", "train.lr: input should be greater than 0 (got -1)"),
        ("train.lr=fast", "train.lr: input should be a valid number"),
        ("train.rounds=1.5", "train.rounds: input should be a valid integer"),
        ("method.tiers=[0]", "method.tiers.0: input should be greater than 0"),
        ("method.tiers=[2]", "method.tiers.0: input should be less than or equal to 1"),
        ("method.tiers=[]", "method.tiers: tuple should have at least 1 item"),
        (
            "method.tiers=[0.1234561, 0.1234562]",
            "two tiers are so close that they have the same name: make them differ more",
        ),
        ("model.width=inf", "model.width: input should be a finite number"),
        ("method.name=fedsgd", "method.name: there is no method 'fedsgd', known are fedhm, capable, fedavg"),
        (
            "data.partition=even",
            "data.partition: input should be 'iid', 'dirichlet', 'dirichlet-unequal', 'dirichlet-feddf' or 'by-tier'",
        ),
        ("evaluation.static_from=soon", "evaluation.static_from"),
        ("engine.data_on_device=lots", "with --set: engine.data_on_device: 'lots' is no size"),
        ("train=3", "train: input should be a valid dictionary"),
        ("train.lr.x=3", "'lr' is not a section"),
        ("train.lr", "--set takes KEY=VALUE"),
        ("=3", "--set takes KEY=VALUE"),
    ],
)
def test_wrong_settings_are_one_sentence(change: str, sentence: str) -> None:
    with pytest.raises(FedhmError) as error:
        load_config("digits", [change])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("given", "kept"), [("true", True), ("false", False), ("auto", "auto"), ("4GB", 4 * 10**9)])
def test_samples_on_a_device_are_all_none_or_a_size(given: str, kept: object) -> None:
    found = load_config("digits", [f"engine.data_on_device={given}"]).engine.data_on_device
    assert found == kept
    assert type(found) is type(kept)


def test_unknown_presets_and_files(tmp_path: Path) -> None:
    with pytest.raises(FedhmError, match="did you mean 'digits'"):
        load_config("digit")
    with pytest.raises(FedhmError, match="No such file or directory; 'fedhm init "):
        load_config(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    with pytest.raises(FedhmError, match="not valid TOML"):
        load_config(str(broken))
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FedhmError, match="not a text file"):
        load_config(str(broken))


def test_changes_are_read_as_toml_and_bare_words_as_strings() -> None:
    config = load_config("digits", ["train.milestones=[3,5]", "data.partition=dirichlet", "method.tiers=[1/3, 1]"])
    assert config.train.milestones == (3, 5)
    assert config.data is not None
    assert config.data.partition == "dirichlet"
    assert isinstance(config.method, FedHMConfig)
    assert config.method.tiers == (1 / 3, 1)


def test_another_method_starts_with_its_own_settings() -> None:
    config = load_config("digits", ["method.name=fedavg", "method.tier=1/8"])
    assert config.method == FedAvgConfig(tier=0.125)


def test_an_infinite_temperature_is_written_and_read_back(tmp_path: Path) -> None:
    config = load_config("digits", ["method.temperature=inf"])
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(str(tmp_path / "config.toml")) == config


def test_a_file_without_data_and_model_takes_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "few.toml").write_text("[train]\nrounds = 3\n")
    config = load_config(str(tmp_path / "few.toml"))
    assert (config.data, config.model) == (DataConfig(), ModelConfig())


@pytest.mark.parametrize(
    ("given", "resolved"), [((0, 0), (3, 32)), ((5, 0), (5, 32)), ((0, 7), (3, 7)), ((40, 1), (40, 1))]
)
def test_threads_are_chosen_by_cores_and_participants_whatever_the_workers(
    given: tuple[int, int], resolved: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedhm.config.schema.usable_cores", lambda: 32)  # and 10 participants
    for workers in ("auto", 1, 4):
        engine = {"threads": given[0], "server_threads": given[1], "workers": workers}
        found = parse({"engine": engine}, "test").resolved().engine
        assert (found.threads, found.server_threads, found.workers) == (*resolved, workers)


@pytest.mark.parametrize(("share", "cores"), [("", 8), ("3", 3), ("16", 8), ("2,1", 2), ("0", 8), ("many", 8)])
def test_usable_cores_are_limited_by_the_environment(share: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", share)
    assert usable_cores() == cores


def test_a_folder_is_remembered_whole() -> None:
    config = load_config("digits", ["data.folder=somewhere"]).resolved()
    assert config.data is not None
    assert config.data.folder == Path("somewhere").absolute()


def test_a_method_section_without_a_name_is_fedhms() -> None:
    assert parse({"method": {"tiers": [1, "1/4"]}}, "test").method == FedHMConfig(tiers=(1.0, 0.25))


def test_a_config_without_sections_is_whole() -> None:
    assert parse({}, "test") == Config()


@pytest.mark.parametrize(
    ("ratio", "name"), [(1, "full"), (0.5, "1/2"), (1 / 3, "1/3"), (0.125, "1/8"), (0.377, "0.377")]
)
def test_tier_names(ratio: float, name: str) -> None:
    assert tier_name(ratio) == name


def test_a_learning_rate_that_becomes_zero_is_one_sentence() -> None:
    table = {"rounds": 2, "lr_decay": 1e-300, "milestones": [1, 1]}
    with pytest.raises(FedhmError, match="lr is multiplied by lr_decay at so many milestones that it is 0 in the last"):
        parse({"train": table}, "test")
    assert parse({"train": {**table, "milestones": [1]}}, "test").train.learning_rate(2) > 0
    assert parse({"train": {**table, "milestones": [5, 5]}}, "test").train.learning_rate(2) == 0.1
