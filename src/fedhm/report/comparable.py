"""Which runs may stand in one table: those with the same data, model, clients, training budget and seeds."""

from collections.abc import Iterator, Sequence
from typing import Any

from fedhm.compare.compared import Compared
from fedhm.config.settings import DataConfig, ModelConfig
from fedhm.runs.history import Run

MUST_AGREE = {
    "data": tuple(key for key in DataConfig.model_fields if key != "folder"),
    "model": tuple(ModelConfig.model_fields),
    "federation": ("clients", "participation", "heterogeneity"),
    "train": ("rounds", "epochs", "batch", "lr", "milestones", "lr_decay"),
    "evaluation": ("static_from",),
}


def difference(runs: Sequence[Run]) -> str | None:
    """The first thing that keeps `runs` from being compared, as a sentence; None if they can be."""
    facts = [list(_facts(run)) for run in runs]
    keys = dict.fromkeys(key for of_run in facts for key, _ in of_run)
    for key in keys:
        known = [(run, value) for run, of_run in zip(runs, facts, strict=True) for k, value in of_run if k == key]
        first, expected = known[0]
        for run, value in known:
            if value != expected:
                return f"{first.name} has {key} = {_shown(expected)}, {run.name} has {_shown(value)}"
    return None


def difference_of_entries(entries: Sequence[Compared]) -> str | None:
    """The same for entries, whose seeds must agree too and whose runs must be finished."""
    for run in (run for entry in entries for run in entry.runs):
        if len(run.records) < run.config.train.rounds:
            return f"{run.name} has done {len(run.records)} of its {run.config.train.rounds} rounds"
    if found := difference([run for entry in entries for run in entry.runs]):
        return found
    for entry in entries:
        if len(set(entry.seeds)) < len(entry.seeds):
            return f"{entry.label} has two runs with the same settings and seed"
        if entry.seeds != entries[0].seeds:
            a, b = (", ".join(map(str, e.seeds)) for e in (entries[0], entry))
            return f"{entries[0].label} was run with the seeds {a}, {entry.label} with {b}"
    return None


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    """Whatever must be the same in all runs that know it."""
    if run.data is not None:  # the first to be named, since it says most
        yield "classes", run.data.classes
        yield "input shape", run.data.input_shape
    for section, keys in MUST_AGREE.items():
        settings = getattr(run.config, section)
        for key in keys if settings is not None else ():
            if key != "heterogeneity" or len(run.tiers) > 1:
                yield f"{section}.{key}", getattr(settings, key)
    if run.data is not None:
        yield "samples", run.data.samples
        yield f"data digest with seed {run.config.seed}", run.data.digest


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value) or "nothing"
