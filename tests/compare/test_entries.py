"""What the names in --methods stand for."""

from pathlib import Path

import pytest

from fedhm.compare.execute import all_cells
from fedhm.compare.select import Entry, Reference, default_names, drop_duplicates, known_names, resolve_entries
from fedhm.config.loading import load_config
from fedhm.config.method import Change
from fedhm.config.registry import make
from fedhm.config.schema import Config
from fedhm.errors import FedhmError


def paper(*changes: str) -> Config:
    return load_config("cifar10-resnet18", changes)


def named(*names: str, config: Config | None = None) -> dict[str, Entry]:
    return {entry.label: entry for entry in resolve_entries(names, Reference(config or paper()))}


def test_fedhm_is_the_presets_own_method() -> None:
    config = paper("method.keep=5", "method.weighting=softmax")
    method = named("fedhm", config=config)["fedhm"].method
    assert method == config.method.model_dump(mode="json")
    assert named("fedhm-updates", config=config)["fedhm-updates"].method == {**method, "aggregate": "updates"}
    assert named("fedhm-paper", config=config)["fedhm-paper"].method == method


def test_fedhm_as_it_is_now_stands_beside_the_papers() -> None:
    found = named("fedhm", "fedhm-paper", config=load_config("digits", ()))
    assert (found["fedhm"].method["aggregate"], found["fedhm"].method["start"]) == ("bands", "auto")
    assert found["fedhm-paper"].method == {**found["fedhm"].method, "aggregate": "models", "start": "whole"}


def test_the_librarys_defaults_have_the_papers_tiers_and_weighting() -> None:
    config = paper("method.weighting=softmax", "method.temperature=3")
    method, default = named("fedhm-default", config=config)["fedhm-default"].method, make("methods", "fedhm")
    assert (method["aggregate"], method["band_speed"]) == (default.aggregate, default.band_speed)
    assert (method["keep"], method["weighting"], method["temperature"]) == (3, "softmax", 3)
    plain = list(named("fedhm", "fedhm-default", config=load_config("digits", ())).values())
    assert drop_duplicates(plain)[1] == {"fedhm-default": "fedhm"}  # a config without the paper's rule has them already


def test_where_both_are_the_same_one_of_them_runs() -> None:
    first, twins = drop_duplicates(list(named("fedhm", "fedhm-paper", "fedavg").values()))
    assert ([entry.label for entry in first], twins) == (["fedhm", "fedavg"], {"fedhm-paper": "fedhm"})
    both = list(named("fedhm", "fedhm-paper", config=load_config("digits", ())).values())
    assert drop_duplicates(both) == (both, {})


@pytest.mark.parametrize(("setting", "weighting"), [("fixed", "uniform"), ("dynamic", "softmax-inverse")])
def test_published_is_every_detail_of_the_published_code(setting: str, weighting: str) -> None:
    config = paper(f"federation.heterogeneity={setting}", "data.partition=dirichlet", "method.temperature=3")
    entry = named("fedhm-published", config=config)["fedhm-published"]
    own = {"aggregate": "models", "start": "whole", "weighting": weighting, "absent_labels": "zero"}
    assert entry.method == {**config.method.model_dump(mode="json"), **own}
    assert {str(change) for change in entry.declared} == {
        "train.decay_factors = true", "evaluation.statistics = test-batch", "model.init = fan-in",
        "data.partition = dirichlet-feddf", "data.normalisation = published",
    }  # fmt: skip


def test_published_declares_only_what_the_model_and_the_data_have() -> None:
    def names(*changes: str) -> set[str]:
        config = load_config("digits", changes)
        return {change.name for change in named("fedhm-published", config=config)["fedhm-published"].declared}

    assert names() == {"train.clip_norm", "train.decay_factors", "evaluation.statistics", "model.init"}
    assert names("model.name=vit", "model.patch=4") == {
        *("train.clip_norm", "train.decay_factors", "evaluation.statistics"),
    }
    assert names("train.frozen_statistics=true") == {"train.clip_norm", "train.decay_factors", "model.init"}
    # what the config says for all entries is no difference
    assert names("train.decay_factors=true", "model.init=fan-in", "train.clip_norm=2") == {"evaluation.statistics"}


def test_with_one_tier_the_published_code_averages_factors() -> None:
    one = named("fedhm-published", config=paper("method.tiers=[1/4]"))["fedhm-published"]
    assert (one.method["aggregate"], one.method["absent_labels"]) == ("factors", "count")
    family = named("lowrank-published")
    assert list(family) == ["lowrank-published:1/2", "lowrank-published:1/4", "lowrank-published:1/8"]
    assert {entry.method["aggregate"] for entry in family.values()} == {"factors"}
    assert all(entry.declared == named("fedhm-published")["fedhm-published"].declared for entry in family.values())


def test_entries_that_differ_in_what_they_declare_are_no_duplicates() -> None:
    same_method = [Entry("a", {"name": "fedavg"}), Entry("b", {"name": "fedavg"})]
    assert drop_duplicates(same_method) == (same_method[:1], {"b": "a"})
    decay, batch = Change("train", "decay_factors", True), Change("evaluation", "statistics", "test-batch")
    changed = [same_method[0], Entry("b", {"name": "fedavg"}, declared=(decay, batch))]
    assert drop_duplicates(changed) == (changed, {})
    twice = [*changed, Entry("c", {"name": "fedavg"}, declared=(batch, decay))]
    assert drop_duplicates(twice) == (changed, {"c": "b"})


def test_a_declared_setting_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    entry = Entry("mine", {"name": "fedavg"}, declared=(Change("train", "no_such", 1),))
    with pytest.raises(FedhmError, match=r"--methods mine: unknown key 'train\.no_such'"):
        all_cells(paper(), [entry], 1, tmp_path, 1)


def test_tuned_settings_go_before_declared_ones(tmp_path: Path) -> None:
    entry = Entry("mine", {"name": "fedavg"}, {"train.lr": 0.5}, (Change("train", "lr", 0.1),))
    assert all_cells(paper(), [entry], 1, tmp_path, 1)[0].config.train.lr == 0.5


def test_what_a_practical_person_would_try_is_compared_by_default() -> None:
    names = default_names(Reference(load_config("digits", ())))
    assert {"fedhm", "fedhm-paper", "lowrank", "capable", "fedavg"} < set(names)
    nobody = default_names(Reference(load_config("digits", ["method.tiers=[1/2, 1/4]"])))
    assert nobody == [name for name in names if name != "capable"]  # who could train the full model
    named(*names)
    named(*nobody, config=load_config("digits", ["method.tiers=[1/2, 1/4]"]))


def test_another_methods_preset_is_compared_with_fedhms_defaults() -> None:
    assert named("fedhm", config=paper("method.name=fedavg"))["fedhm"].method["tiers"] == [1, 0.5, 0.25, 0.125]


def test_variants_replace_the_largest_tiers_by_the_next_smaller() -> None:
    found = named("fedhm-v2", "fedhm-v3", "heterofl-v2", "heterofl-v3")
    assert [entry.method["tiers"] for entry in found.values()] == [
        [0.5, 0.5, 0.25, 0.125],
        [0.25, 0.25, 0.25, 0.125],
        [0.62, 0.62, 0.5, 0.35],
        [0.5, 0.5, 0.5, 0.35],
    ]
    with pytest.raises(FedhmError, match="fedhm-v3 needs at least 3 tiers, but there are 2"):
        named("fedhm-v3", config=paper("method.tiers=[1, 1/2]"))


def test_methods_of_widths_have_the_papers() -> None:
    found = named("heterofl", "fedrolex", "fjord", "fjord-distil", "fedmd", "feddf", "splitmix")
    assert all(e.method["tiers"] == [1, 0.62, 0.5, 0.35] for e in found.values() if e.label != "splitmix")
    assert found["fjord-distil"].method["distil"] is True
    assert found["splitmix"].method == {"name": "splitmix", "base": 0.35, "tiers": [9, 3, 2, 1]}


def test_families_have_an_entry_for_each_size_below_the_full_model() -> None:
    assert list(named("lowrank", "slimmed")) == [
        "lowrank:1/2", "lowrank:1/4", "lowrank:1/8", "slimmed:0.62", "slimmed:0.5", "slimmed:0.35",
    ]  # fmt: skip
    low_rank = named("lowrank:0.125")["lowrank:1/8"].method
    of_the_paper = {"aggregate": "models", "start": "whole", "absent_labels": "leave-out"}
    assert low_rank == {"name": "fedhm", "tiers": ["0.125"], "keep": 3, **of_the_paper}
    assert named("slimmed:.35")["slimmed:0.35"].method == {"name": "slimmed", "width": ".35"}


def test_one_tier_methods_take_the_smallest_tier_and_the_presets_keep() -> None:
    found = named("pufferfish", "feddlr", "fedpara", "fedavg")
    pufferfish = found["pufferfish"].method
    assert (pufferfish["tiers"], pufferfish["form"], pufferfish["warmup"]) == ([0.125], "pufferfish", 16)
    assert found["feddlr"].method == {"name": "feddlr", "tier": 0.125, "keep": 3}
    assert found["fedpara"].method["keep"] == 3
    assert found["fedavg"].method == {"name": "fedavg"}
    assert named("pufferfish", config=paper("train.rounds=4"))["pufferfish"].method["warmup"] == 1


def test_the_same_entry_is_there_once() -> None:
    assert list(named("fedavg", "lowrank:1/8", "fedavg", "lowrank:0.125")) == ["fedavg", "lowrank:1/8"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("heteroffl", "there is no 'heteroffl', did you mean 'heterofl'"),
        ("x", "known are fedhm, fedhm-paper, fedhm-updates"),
        ("fedhm:1/2", "only lowrank, lowrank-published and slimmed are followed by a colon"),
    ],
)
def test_unknown_names_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(FedhmError) as error:
        named(name)
    assert sentence in str(error.value)


def test_no_name_is_refused() -> None:
    with pytest.raises(FedhmError, match="there is no method to compare"):
        named()


@pytest.mark.parametrize("name", ["lowrank:7", "lowrank:half", "slimmed:0", "slimmed:"])
def test_sizes_that_are_none_are_refused_in_a_sentence(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(FedhmError, match=r"--methods \w+:.*: method\."):
        all_cells(paper(), list(named(name).values()), 1, tmp_path_factory.mktemp("out"), 1)


def test_every_name_gives_valid_runs_that_differ_in_what_they_declare(tmp_path_factory: pytest.TempPathFactory) -> None:
    planned = all_cells(
        paper(), resolve_entries(known_names(), Reference(paper())), 2, tmp_path_factory.mktemp("out"), 1
    )
    assert len({cell.folder for cell in planned}) == len(planned)
    for cell in planned:
        assert cell.config.compare is None
        assert cell.config.engine.threads == 1
        declared = {change.name: change.value for change in cell.entry.declared if change.value != "auto"}
        expected = planned[0].config.dotted() | declared | {"train.clip_norm": cell.config.train.clip_norm}
        other = {key for key, value in cell.config.dotted().items() if value != expected.get(key)}
        assert not {key for key in other if not key.startswith("method.") and key != "seed"}
        assert bool(cell.entry.declared) == ("published" in cell.entry.label or cell.entry.label == "fedhm-default")
    assert {cell.config.seed for cell in planned} == {0, 1}
    assert [cell.name for cell in planned if cell.entry.label == "lowrank:1/8"] == [
        "lowrank-1-8-seed0", "lowrank-1-8-seed1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("jobs", "changes", "engine"),
    [
        (8, [], (1, 1, 1)),
        (20, [], (1, 1, 1)),
        (2, [], (4, 1, 4)),
        (2, ["engine.threads=2"], (2, 2, 4)),
        (8, ["engine.workers=3", "engine.server_threads=5"], (3, 1, 5)),
    ],
)
def test_runs_share_the_cores(
    jobs: int, changes: list[str], engine: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedhm.compare.execute.usable_cores", lambda: 8)
    config = load_config("digits", ["engine.threads=0", "engine.server_threads=0", *changes])
    for cell in all_cells(config, resolve_entries(["fedhm", "fedavg"], Reference(config)), 10, tmp_path, jobs):
        found = cell.config.engine
        assert (found.workers, found.threads, found.server_threads) == engine


def test_a_configs_own_section_goes_for_the_method_that_it_names() -> None:
    config = load_config("digits", ["method.name=splitmix", "method.base=0.5", "method.tiers=[2,1]"])
    found = {entry.label: entry.method for entry in resolve_entries(["splitmix", "heterofl"], Reference(config))}
    assert (found["splitmix"]["base"], found["splitmix"]["tiers"]) == (0.5, [2, 1])
    assert len(found["heterofl"]["tiers"]) == 4


@pytest.mark.parametrize("change", ["compare.widths=[1,0.5]", "compare.bases=[3,1]"])
def test_there_must_be_a_size_for_each_tier(change: str) -> None:
    with pytest.raises(FedhmError, match=r"compare\.\w+ has 2 sizes, but FedHM has 4 tiers to match"):
        resolve_entries(["heterofl", "splitmix"], Reference(load_config("digits", [change])))
