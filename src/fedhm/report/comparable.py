"""Runs are comparable if they have the same objective, data, model, clients and training budget."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from fedhm.config.method import Change
from fedhm.config.schema import DataConfig, ModelConfig, StopConfig
from fedhm.config.section import Section
from fedhm.runs.history import Run

MUST_AGREE = {
    "data": tuple(key for key in DataConfig.model_fields if key != "folder"),
    "model": tuple(ModelConfig.model_fields),
    "federation": ("clients", "participation", "heterogeneity", "devices"),
    "train": (
        *("rounds", "iterations", "epochs", "batch", "lr", "milestones", "lr_decay"),
        *("optimizer", "momentum", "weight_decay"),
    ),
    "server": ("optimizer", "lr", "momentum", "betas", "tau"),
    "evaluation": ("static_from", "statistics"),
    "stop": tuple(key for key in StopConfig.model_fields if key != "clients"),
}


def find_difference(
    runs: Sequence[Run], tuned: Collection[str] = (), declared: Sequence[Sequence[Change]] = ()
) -> str | None:
    """Return the first difference that makes `runs` incomparable, as a sentence; None if they are comparable.

    Settings that were tuned for each method, with the same candidates, may differ. So may the changes that the entry
    of a run declares, which `declared` has for each run.
    """
    facts = [list(_facts(run, own)) for run, own in zip(runs, declared or [()] * len(runs), strict=True)]
    keys = dict.fromkeys(key for of_run in facts for key, _ in of_run if key not in tuned)
    for key in keys:
        known = [(run, value) for run, of_run in zip(runs, facts, strict=True) for k, value in of_run if k == key]
        first, expected = known[0]
        for run, value in known:
            if value != expected:
                return f"{first.name} has {key} = {_shown(expected)}, {run.name} has {_shown(value)}"
    return None


def _facts(run: Run, declared: Sequence[Change]) -> Iterator[tuple[str, Any]]:
    """Yield the facts that must be the same in all runs that have them.

    A declared change is none of them, if the run has exactly the declared value. If it changes the data, the samples
    are compared with those of other runs that have the same change.
    """
    settings_of_run = run.config.dotted()
    own = [change for change in declared if settings_of_run.get(change.name) == change.value]
    accepted = {change.name for change in own}
    of_data = sorted(str(change) for change in own if change.section == "data")
    changed = f" and {', '.join(of_data)}" if of_data else ""
    for key in type(run.config.objective).model_fields:  # each objective has its own settings
        yield f"objective.{key}", getattr(run.config.objective, key)
    yield "classes", run.data.classes  # before the settings, since it says more
    yield "input shape", run.data.input_shape
    for section, keys in MUST_AGREE.items():
        settings = getattr(run.config, section)
        for key in keys if settings is not None else ():
            if f"{section}.{key}" in accepted:
                continue
            if key == "epochs" and run.config.train.iterations:
                continue  # it has no effect
            if key != "heterogeneity" or len(run.tiers) > 1 or len(set(run.config.method.shares)) > 1:
                yield f"{section}.{key}", getattr(settings, key)
    if run.config.stop.active and run.evaluated and run.evaluated_at_clients:  # otherwise it has no effect
        yield "stop.clients", run.config.stop.clients
    yield f"samples{changed}", run.data.samples
    yield f"data digest with seed {run.config.seed}{changed}", run.data.digest


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return str([v.model_dump(mode="json", exclude_defaults=True) if isinstance(v, Section) else v for v in value])
    return str(value) or "nothing"
