"""Runs that differ in data, budget or seeds are not comparable, and the sentence names both values."""

from dataclasses import replace
from typing import Any

import pytest

from fedhm.compare.results import EntryRuns, incomparable_entries
from fedhm.config.method import Change
from fedhm.report.comparable import find_difference
from fedhm.report.tables import report_markdown
from fedhm.runs.history import Run
from made_runs import FACTS, made_run

SIZES = {"full": 100, "1/4": 30}
DONE = [{"full": 0.5, "1/4": 0.4}, {"full": 0.6, "1/4": 0.5}]


def test_the_same_settings_and_other_methods_are_comparable() -> None:
    fedhm = made_run("a", SIZES, DONE)
    heterofl = made_run("b", {"full": 100, "w0.5": 25}, [{"full": 0.1, "w0.5": 0.2}] * 2, {"name": "heterofl"})
    assert find_difference([fedhm, heterofl]) is None
    assert find_difference([]) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": {"rounds": 3}}, "a has train.rounds = 2, b has 3"),
        ({"train": {"epochs": 5}}, "a has train.epochs = 1, b has 5"),
        ({"train": {"iterations": 4}}, "a has train.iterations = 0, b has 4"),
        ({"train": {"batch": 16}}, "a has train.batch = 8, b has 16"),
        ({"train": {"lr": 0.1}}, "a has train.lr = 0.05, b has 0.1"),
        ({"train": {"milestones": [1]}}, "a has train.milestones = [], b has [1]"),
        ({"train": {"momentum": 0.5}}, "a has train.momentum = 0.9, b has 0.5"),
        ({"server": {"optimizer": "momentum"}}, "a has server.optimizer = none, b has momentum"),
        ({"server": {"lr": 0.5}}, "a has server.lr = 0.0, b has 0.5"),
        ({"federation": {"clients": 9}}, "a has federation.clients = 8, b has 9"),
        ({"federation": {"participation": 1.0}}, "a has federation.participation = 0.5, b has 1.0"),
        ({"federation": {"heterogeneity": "dynamic"}}, "a has federation.heterogeneity = fixed, b has dynamic"),
        ({"evaluation": {"static_from": 1}}, "a has evaluation.static_from = 0, b has 1"),
        ({"evaluation": {"statistics": "test-batch"}}, "a has evaluation.statistics = stored, b has test-batch"),
    ],
)  # fmt: skip
def test_other_budgets_are_named(changes: dict[str, Any], sentence: str) -> None:
    assert find_difference([made_run("a", SIZES, DONE), made_run("b", SIZES, DONE, **changes)]) == sentence


def test_epochs_do_not_count_beside_iterations() -> None:
    runs = [made_run(name, SIZES, DONE, train={"iterations": 4, "epochs": n}) for name, n in (("a", 1), ("b", 2))]
    assert find_difference(runs) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"source": "cifar10"}, "a has data.source = digits, b has cifar10"),
        ({"partition": "dirichlet"}, "a has data.partition = iid, b has dirichlet"),
        ({"alpha": 0.1}, "a has data.alpha = 0.5, b has 0.1"),
        ({"crop": 4}, "a has data.crop = 0, b has 4"),
        ({"normalisation": "published"}, "a has data.normalisation = measured, b has published"),
        ({"flip": True}, "a has data.flip = False, b has True"),
        ({"public": "held-out"}, "a has data.public = nothing, b has held-out"),
        ({"train_samples": 50}, "a has data.train_samples = 0, b has 50"),
    ],
)  # fmt: skip
def test_other_data_are_named(changes: dict[str, Any], sentence: str) -> None:
    runs = [made_run(name, SIZES, DONE, data=own) for name, own in (("a", {}), ("b", changes))]
    assert find_difference(runs) == sentence


def test_where_the_files_are_makes_no_difference() -> None:
    section = {"source": "digits", "folder": "/elsewhere"}
    assert find_difference([made_run("a", SIZES, DONE), made_run("b", SIZES, DONE, data=section)]) is None


def test_other_models_are_named() -> None:
    runs = [made_run("a", SIZES, DONE, model={"width": 1.0}), made_run("b", SIZES, DONE, model={"width": 0.5})]
    assert find_difference(runs) == "a has model.width = 1.0, b has 0.5"


def test_the_tiers_of_one_tier_methods_are_neither_fixed_nor_dynamic() -> None:
    one = made_run("b", {"full": 100}, [{"full": 0.5}] * 2, {"name": "fedavg"}, federation={"heterogeneity": "dynamic"})
    assert find_difference([made_run("a", SIZES, DONE), one]) is None
    assert find_difference([one, made_run("a", SIZES, DONE)]) is None


def test_data_from_python_are_told_apart() -> None:
    a = made_run("a", SIZES, DONE)
    hundred = made_run("b", SIZES, DONE, facts=replace(FACTS, classes=100))
    assert find_difference([a, hundred]) == "a has classes = 4, b has 100"
    other = made_run("b", SIZES, DONE, facts=replace(FACTS, digest="xyz"))
    assert find_difference([a, other]) == "a has data digest with seed 0 = abc, b has xyz"
    other_seed = made_run("b", SIZES, DONE, seed=1, facts=replace(FACTS, digest="xyz"))
    assert find_difference([a, other_seed]) is None, "another seed deals the samples out in another way"


BATCH = Change("evaluation", "statistics", "test-batch")
FEDDF = Change("data", "partition", "dirichlet-feddf")


def test_declared_changes_are_accepted_and_no_others() -> None:
    def difference(own: dict[str, Any], *declared: Change) -> str | None:
        return find_difference([made_run("a", SIZES, DONE), made_run("b", SIZES, DONE, **own)], (), [(), declared])

    by_batch = {"evaluation": {"statistics": "test-batch"}}
    assert difference(by_batch, BATCH) is None
    assert difference(by_batch) == "a has evaluation.statistics = stored, b has test-batch"
    assert difference({}, BATCH) is None, "the run has the others' setting"
    more = {**by_batch, "train": {"epochs": 5}}
    assert difference(more, BATCH) == "a has train.epochs = 1, b has 5"
    # another value than the declared one is a difference as any other
    other = Change("train", "epochs", 4)
    assert difference({"train": {"epochs": 5}}, other) == "a has train.epochs = 1, b has 5"
    assert difference({"train": {"epochs": 4}}, other) is None


def test_declared_changes_of_the_data_have_samples_of_their_own() -> None:
    def run(name: str, digest: str, partition: str) -> Run:
        facts = replace(FACTS, digest=digest, samples=FACTS.samples - (partition == "dirichlet-feddf"))
        return made_run(name, SIZES, DONE, facts=facts, data={"partition": partition})

    plain, changed = run("a", "abc", "dirichlet"), run("b", "xyz", "dirichlet-feddf")
    assert find_difference([plain, changed], (), [(), (FEDDF,)]) is None
    assert find_difference([plain, changed]) == "a has data.partition = dirichlet, b has dirichlet-feddf"
    # entries with the same change must have the same samples
    twin, other = run("c", "xyz", "dirichlet-feddf"), run("d", "uvw", "dirichlet-feddf")
    assert find_difference([plain, changed, twin], (), [(), (FEDDF,), (FEDDF,)]) is None
    found = find_difference([plain, changed, other], (), [(), (FEDDF,), (FEDDF,)])
    assert found == "b has data digest with seed 0 and data.partition = dirichlet-feddf = xyz, d has uvw"


def test_entries_are_compared_by_what_they_declare() -> None:
    plain = EntryRuns("a", [made_run("a-seed0", SIZES, DONE)])
    changed = [made_run("b-seed0", SIZES, DONE, evaluation={"statistics": "test-batch"})]
    assert incomparable_entries([plain, EntryRuns("b", changed, [BATCH])]) is None
    assert "evaluation.statistics" in str(incomparable_entries([plain, EntryRuns("b", changed)]))


def test_seeds_must_agree() -> None:
    def entry(label: str, *seeds: int) -> EntryRuns:
        return EntryRuns(label, [made_run(f"{label}-seed{seed}", SIZES, DONE, seed=seed) for seed in seeds])

    assert incomparable_entries([entry("a", 0, 1), entry("b", 0, 1)]) is None
    sentence = "a was run with the seeds 0, 1, b with 0"
    assert incomparable_entries([entry("a", 0, 1), entry("b", 0)]) == sentence
    assert "two runs with the same settings and seed" in str(incomparable_entries([entry("a", 0, 0)]))


def test_unfinished_runs_are_not_compared() -> None:
    unfinished = made_run("half", SIZES, DONE, train={"rounds": 4})
    assert incomparable_entries([EntryRuns("a", [unfinished])]) == "half has done 2 of its 4 rounds"


def test_a_report_of_runs_that_are_not_comparable_says_so() -> None:
    a, b = made_run("a", SIZES, DONE), made_run("b", SIZES, DONE, train={"epochs": 5})
    assert report_markdown([a, b]).endswith("\nNot comparable: a has train.epochs = 1, b has 5.\n")
    assert "Not comparable" not in report_markdown([a, made_run("c", SIZES, DONE)])
