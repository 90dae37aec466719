"""From settings, or a user's own model and data, to a finished run."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fedhm.assembly import assemble, dtype_of, read_federation
from fedhm.config.loading import parse
from fedhm.config.method import MethodConfig
from fedhm.config.objective import Objective
from fedhm.config.placeholder import is_placeholder
from fedhm.config.registry import Group, UnknownNameError, find, register
from fedhm.config.schema import Config, EngineConfig
from fedhm.data.convert import DataLike, PublicLike, check_clients, named_client_tests, named_weights
from fedhm.data.federation import default_test_share, from_arrays
from fedhm.data.text import TextReader, TokenizingBar, check_tokenizer, count_samples, text_limits, with_padding_token
from fedhm.engines.engine import FlowerOnlyEngine
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment
from fedhm.machine.memory import ROUND_ADVICE, memory_errors
from fedhm.models.build import build_model
from fedhm.models.own import OwnModel, build_own
from fedhm.report import save_report
from fedhm.report.progress import show_rounds
from fedhm.report.result import Result
from fedhm.runs.folder import RunFolder, read_config, read_settings
from fedhm.runs.history import read_runs
from fedhm.server.callbacks import Watcher


@memory_errors("for the run", ROUND_ADVICE)
def run(
    model: nn.Module,
    clients: Sequence[DataLike] | Mapping[str, DataLike],
    test: DataLike | None = None,
    config: Mapping[str, Any] | Config | None = None,
    out: str | Path | None = None,
    *,
    method: MethodConfig | str | None = None,
    objective: Objective | str | None = None,
    crop: int = 0,
    flip: bool = False,
    public: PublicLike | None = None,
    client_test: float | Sequence[DataLike | None] | Mapping[str, DataLike | None] | None = None,
    from_round: int | None = None,
    tokenizer: Any = None,
    watchers: Sequence[Watcher] = (),
    progress: bool | None = None,
) -> Result:
    """Train `model` in a federation of `clients`, each of which holds its own samples.

    clients, test  pairs (inputs, labels) of arrays, or datasets of such pairs; uint8 images are normalised
    config         sections as in a config file: {"train": {"rounds": 20}, "method": {"tiers": [1, "1/4"]}}
    method         in place of config's section: a name, or an object with its settings, also one of your own
    objective      likewise: "classification" or "regression", or an object
    crop, flip     augment images: random window after padding by `crop` pixels, random mirror image
    public         inputs that everybody has, for methods that distil: an array, or as above; labels are not used
    client_test    evaluate at the clients, too: the share of its samples that each holds out of its training, or a list
                   with a test set for each client (None: it has none); `Result.clients` tells how they do. Without
                   `test` it is 0.2 unless it is said, and metrics are those of all clients' test samples together
    tokenizer      of transformers, the model's own: clients and test may be texts then, pairs (texts, labels) or data
                   sets with a column `text`
    out            a folder for records, checkpoints and models; an unfinished run of this config there is resumed, and
                   one with fewer rounds is lengthened
    from_round     of a run in `out`, take back the rounds after this one first: what came of them is moved to a folder
                   there
    progress       show on stderr how far tokenizing and the rounds are; None: if that is a terminal
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise FedhmError(f"model must be an nn.Module, ready to be trained, not {kind}")
    own_tests: float | Sequence[DataLike | None]
    if client_test is None:
        own_tests = default_test_share(test is not None)
    elif isinstance(client_test, Mapping):
        own_tests = named_client_tests(client_test, clients)
    else:
        own_tests = client_test
    table = _own_table(config, method=method, objective=objective)
    federation_table = table.get("federation") or {}
    if not isinstance(federation_table, Mapping):
        raise FedhmError(f"config: federation: input should be a mapping (got {federation_table!r})")
    if isinstance(weights := federation_table.get("weights"), Mapping):
        federation_table = {**federation_table, "weights": named_weights(weights, clients)}
    clients = check_clients(clients)
    table["federation"] = {**federation_table, "clients": len(clients)}
    settings = parse(table, "config")
    if settings.engine.name == "flower":
        raise FedhmError(FlowerOnlyEngine.SENTENCE)
    path = None if out is None else Path(out)
    if from_round is not None and (path is None or not (path / "config.toml").exists()):
        raise FedhmError("from_round goes back in a run that has begun: out must be its folder")
    resolved = resumed_settings(settings, path).resolved()
    shown = is_shown(progress)
    with TokenizingBar(sum(map(count_samples, (*clients, test))), shown and tokenizer is not None) as bar:
        reader = None if tokenizer is None else TextReader(tokenizer, text_limits(model).length, bar)
        if reader:
            check_tokenizer(tokenizer, model)
            model = with_padding_token(model, reader.padding)
        with memory_errors("to read the data", "give fewer samples"):
            federation = from_arrays(
                clients,
                test,
                crop=crop,
                flip=flip,
                dtype=dtype_of(model),
                public=public,
                objective=settings.objective,
                client_test=own_tests,
                seed=settings.seed,
                reader=reader,
            )
    with show_rounds(shown, resolved.objective.headline) as bars:
        experiment = assemble(model, federation, resolved, watchers=[*bars, *watchers])
        if path is None:
            return experiment.run()
        with RunFolder.open(path) if (path / "config.toml").exists() else RunFolder.create(path, resolved) as folder:
            try:
                if from_round is not None:
                    _rewind(experiment, folder, from_round)
                result = experiment.run(folder)
            except FedhmError:
                folder.remove_if_no_round_done()
                raise
    report_on(path)
    return result


def is_shown(progress: bool | None) -> bool:
    """Tell whether progress is shown: as it is said, or else if there is a terminal to show it in."""
    return sys.stderr is not None and sys.stderr.isatty() if progress is None else progress


@memory_errors("for the run", ROUND_ADVICE)
def resume(
    out: str | Path,
    *,
    workers: int | Literal["auto"] | None = None,
    from_round: int | None = None,
    rounds: int | None = None,
    model: OwnModel | None = None,
    watchers: Sequence[Watcher] = (),
    progress: bool | None = None,
) -> Result:
    """Finish the run in the folder `out`, whose config names its model and data; it ends as if never interrupted.

    With `rounds`, the run gets more rounds than it began with, even if it was finished. A run that began with a model
    of your own needs it again, as `model`.
    With `from_round`, rounds after that one are taken back first: what came of them is moved to a folder in `out`.
    `progress` is as for `run`.
    """
    with show_rounds(is_shown(progress), read_config(Path(out)).objective.headline) as bars:
        result = finish(Path(out), workers, from_round, [*bars, *watchers], rounds, model)
    report_on(Path(out))
    return result


def finish(
    path: Path,
    workers: int | Literal["auto"] | None,
    from_round: int | None,
    watchers: Sequence[Watcher],
    rounds: int | None = None,
    model: OwnModel | None = None,
) -> Result:
    """Run the rounds that are left of the run in a folder, or up to `rounds`, without a report."""
    if rounds is not None:
        lengthen(path, rounds)
    config = read_config(path)
    if config.engine.name == "flower":
        raise FedhmError(FlowerOnlyEngine.SENTENCE)
    experiment = prepare(config if workers is None else config.with_workers(workers), watchers, model=model)
    with RunFolder.open(path) as folder:
        if from_round is not None:
            _rewind(experiment, folder, from_round)
        return experiment.run(folder)


def lengthen(path: Path, rounds: int) -> None:
    """Give the run in a folder more rounds."""
    with RunFolder.open(path) as folder:
        folder.lengthen(rounds)


def _rewind(experiment: Experiment, folder: RunFolder, last: int) -> None:
    folder.write_plan(experiment.config)
    folder.rewind(last, experiment.fingerprint())


def prepare(config: Config, watchers: Sequence[Watcher] = (), *, model: OwnModel | None = None) -> Experiment:
    """Read the data that a config names, and build its model; `model` is a model of your own, in place of [model].

    It may be a function that makes the model: it is called once the generators are seeded by the config's seed.
    """
    if not isinstance(config, Config):
        raise FedhmError(f"prepare takes settings that are read, not {config!r:.60}: fedhm.load_config('digits')")
    federation = read_federation(config)
    if model is None:
        built = build_model(config, federation.input_shape, federation.classes)
    else:
        built, config = build_own(model, config.seed), config.without_model()
    return assemble(built, federation, config, watchers=watchers)


def _own_table(config: Mapping[str, Any] | Config | None, **sections: Any) -> dict[str, Any]:
    """Return a user's settings as a table, with the sections that are given apart."""
    replaceable: tuple[str, ...] = ()
    if isinstance(config, Config):  # of a preset or file, all but its data and model
        replaceable = tuple(sections)
        named = {"method": config.method, "objective": config.objective}
        config = config.model_dump(mode="json", exclude={"data", "model", *named}) | named
    if config is not None and not isinstance(config, Mapping):
        raise FedhmError("config must be a mapping of sections; fedhm.load_config reads a preset or a file")
    table = dict(config or {})
    if given := {"data", "model"} & set(table):
        raise FedhmError(f"the section '{min(given)}' is for runs from a config file; here data and model are given")
    for name, section in sections.items():
        if section is not None and table.get(name) is not None and name not in replaceable:
            raise FedhmError(f"the {name} is given twice: by {name}=, and by the config's section '{name}'")
        section = table.get(name) if section is None else section
        if section is not None:
            table[name] = section if isinstance(section, str | Mapping) else _made_known(name, section)
    return table


def _made_known(kind: str, given: Any) -> Any:
    """Let the name of an object stand for its class in this process, which reads the settings back for the report."""
    group: Group = "methods" if kind == "method" else "objectives"
    name = str(getattr(given, "name", ""))  # what is no settings at all is refused with the others
    try:
        known = find(group, name) if name else type(given)
        if is_placeholder(known):  # of a run that was read here before
            raise UnknownNameError(name)
        again = (known.__module__, known.__qualname__) == (type(given).__module__, type(given).__qualname__)
        if again:  # a notebook's cell that was run again makes the class anew
            register(group, name, type(given))
        else:
            raise FedhmError(f"'{name}' is the name of another {kind}: give yours a name of its own")
    except UnknownNameError:
        register(group, name, type(given))
    return given


def report_on(path: Path) -> None:
    """Leave the report of a finished run in its folder."""
    save_report(read_runs([path]), path)


def resumed_settings(settings: Config, path: Path | None) -> Config:
    """Return the settings of a run that is resumed in `path`, if there is one: threads and tiers as it began with."""
    if path is None or not (path / "config.toml").exists():
        return settings
    stored = read_settings(path)
    begun = stored.config
    engine = {**begun.engine.model_dump(), **settings.engine.model_dump(exclude_defaults=True)}
    changes: dict[str, Any] = {"engine": EngineConfig(**engine)}
    kept = ["plan", "checkpointed", "inputs", "missing"]  # found when the run began
    if settings.engine.name == "flower" and not settings.federation.assignment:  # clients said more of themselves
        kept += ["assignment", *(() if settings.federation.devices else ("devices", "unfit"))]
    changes["federation"] = settings.federation.model_copy(
        update={name: getattr(begun.federation, name) for name in kept}
    )
    if settings.train.rounds > begun.train.rounds:  # the same run, with more rounds
        as_begun = {"rounds": begun.train.rounds, "begun_rounds": begun.train.begun_rounds}
        shorter = changes | {"train": settings.train.model_copy(update=as_begun)}
        if not stored.difference(settings.model_copy(update=shorter).resolved()):
            lengthen(path, settings.train.rounds)
            stored = read_settings(path)
            begun = stored.config
    if settings.train.rounds == begun.train.rounds:
        changes["train"] = settings.train.model_copy(update={"begun_rounds": begun.train.begun_rounds})
    settings = settings.model_copy(update=changes)
    if found := stored.difference(settings.resolved()):
        raise FedhmError(
            f"{path} holds a run with other settings, {found}: choose another folder{stored.version_remark}"
        )
    return settings
