"""From a config, or from a user's own model and data, to a finished run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedhm.config.reading import parse
from fedhm.config.settings import Config, EngineConfig, FederationConfig
from fedhm.data.federation import DataLike, Federation, PublicLike, gathered, partitioned
from fedhm.data.sources.catalogue import SHAPES
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment, Result
from fedhm.models import MODELS
from fedhm.runs.folder import RunFolder, read_config
from fedhm.seeds import derive
from fedhm.server.record import Watcher


def run(
    model: nn.Module,
    clients: Sequence[DataLike],
    test: DataLike,
    config: Mapping[str, Any] | Config | None = None,
    out: str | Path | None = None,
    *,
    crop: int = 0,
    flip: bool = False,
    public: PublicLike | None = None,
    watchers: Sequence[Watcher] = (),
) -> Result:
    """Trains `model` in a federation of `clients`, each of which holds its own samples.

    clients, test  pairs (inputs, labels) of arrays, or datasets of such pairs; uint8 images are normalised
    config         sections as in a config file: {"train": {"rounds": 20}, "method": {"tiers": [1, "1/4"]}}
    crop, flip     augment images: random window after padding by `crop` pixels, random mirror image
    public         inputs that everybody has, for methods that distil: an array, or as above; labels are not used
    out            a folder for records, checkpoints and models; if it holds an unfinished run of this config,
                   that is gone on with
    """
    if isinstance(config, Config):  # of a preset or file, all but its data and model
        config = config.model_dump(mode="json", exclude={"data", "model"})
    if config is not None and not isinstance(config, Mapping):
        raise FedhmError("config must be a mapping of sections; fedhm.load_config reads a preset or a file")
    if isinstance(clients, tuple) and len(clients) == 2 and hasattr(clients[0], "shape"):
        raise FedhmError("clients must be a list with an entry for each client, not one pair of arrays")
    table, clients = dict(config or {}), list(clients)
    if given := {"data", "model"} & set(table):
        raise FedhmError(f"the section '{min(given)}' is for runs from a config file; here data and model are given")
    table["federation"] = {**(table.get("federation") or {}), "clients": len(clients)}
    settings = parse(table, "config")
    path = None if out is None else Path(out)
    settings = as_begun(settings, path).resolved()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    federation = gathered(clients, test, crop, flip, dtype, public)
    experiment = Experiment(model, federation, settings, watchers=watchers)
    if path is None:
        return experiment.run()
    with RunFolder.open(path) if (path / "config.toml").exists() else RunFolder.create(path, settings) as folder:
        result = experiment.run(folder)
    report_on(path)
    return result


def report_on(path: Path) -> None:
    """Leaves the report of a finished run in its folder."""
    from fedhm.report.save import save_report  # plots take a second to import, which clients on Flower need not
    from fedhm.runs.history import read_runs

    save_report(read_runs([path]), path)


def as_begun(settings: Config, path: Path | None) -> Config:
    """The settings of a run that goes on in `path`, if there is one: threads and tiers are as it began with."""
    if path is None or not (path / "config.toml").exists():
        return settings
    begun = read_config(path)
    engine = {**begun.engine.model_dump(), **settings.engine.model_dump(exclude_defaults=True)}
    federation = {**settings.federation.model_dump(), "assignment": begun.federation.assignment}
    changes: dict[str, Any] = {"engine": EngineConfig(**engine)}
    if settings.engine.name == "flower" and not settings.federation.assignment:  # the clients' own, found at the start
        changes["federation"] = FederationConfig(**federation)
    settings = settings.model_copy(update=changes)
    if begun.without_place() != settings.resolved().without_place():
        raise FedhmError(f"{path} holds a run with other settings: choose another folder")
    return settings


def prepare(config: Config, watchers: Sequence[Watcher] = ()) -> Experiment:
    """Reads the data and builds the model that a config names."""
    federation = read_federation(config)
    model = build_model(config, federation.input_shape, federation.classes)
    return Experiment(model, federation, config, watchers=watchers)


def read_federation(config: Config) -> Federation:
    if config.data is None and config.engine.name == "flower":
        raise FedhmError(
            "this run has no [data] section: it is one of a Flower app, and the same 'flwr run' resumes it"
        )
    if config.data is None:
        raise FedhmError(
            "this run has no [data] section: it was started from Python with its own data, "
            "and is resumed there, by fedhm.run with the same arguments"
        )
    return partitioned(config.data, config.federation.clients, config.seed)


def build_model(config: Config, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model that the config names, initialised from its seed."""
    if config.model is None:
        raise FedhmError("the config has no [model] section")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "model"))
        return MODELS[config.model.name](num_classes=classes, in_channels=input_shape[0], width=config.model.width)


def input_format(config: Config) -> tuple[tuple[int, ...], int]:
    """Input shape and number of classes, without reading data where the source is a known one."""
    if config.data is not None and config.data.source in SHAPES:
        return SHAPES[config.data.source]
    federation = read_federation(config)
    return federation.input_shape, federation.classes
