"""The settings of a run, typed and validated. `reading.py` reads them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator
from pydantic_core import PydanticCustomError

from fedhm.config.plugins import Group, UnknownNameError, find, make
from fedhm.config.section import Positive, Ratio, Section
from fedhm.config.sections.federation import FederationConfig
from fedhm.config.sections.method_config import MethodConfig
from fedhm.config.sections.objective import Objective
from fedhm.config.sections.privacy import PrivacyConfig
from fedhm.config.sections.tracking import TrackingConfig
from fedhm.config.sections.training import ServerConfig, StopConfig, TrainConfig
from fedhm.machine.cores import MOST_PROCESSES, usable_cores
from fedhm.machine.device import find_device

CLIENT_TEST = 0.2  # the share that clients hold out where there is nothing else to evaluate on


class DataConfig(Section):
    source: str = "digits"  # diabetes, digits, fashion-mnist, cifar10, cifar100, tinyimagenet, hf:NAME or text:NAME
    folder: Path | None = None  # where the files are; without it FEDHM_DATA or ./data
    partition: Literal["iid", "dirichlet", "dirichlet-unequal", "by-tier"] = "iid"  # all but -unequal: equal sizes
    alpha: Annotated[float, Field(gt=0)] = 0.5
    by_tier_share: Annotated[float, Field(ge=0, le=1)] = 0.8  # of a client's samples, of the labels of its level
    by_tier_levels: Positive = 4  # as many as methods have: said here, since all methods are to have the same data
    downscale: Positive = 1  # images shrink by this: the mean of every block of so many × so many pixels
    max_length: Positive = 128  # tokens of a text: what is longer is cut
    crop: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    train_samples: Annotated[int, Field(ge=0)] = 0  # how many to train on, chosen at random; 0 is all
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0  # evaluate on this share, held out of each client's samples,
    # in place of the test set; 0: on the test set
    client_test: Annotated[float, Field(ge=0, lt=1)] = 0.0  # every client holds this share out of its training, and
    # every tier's model is evaluated there, too; 0: no client evaluates
    test: bool = True  # the server has the source's test set; without, client_test is 0.2 unless it is said
    public: str = ""  # unlabelled samples that everybody has, for distillation: a source, or "held-out" from this one
    public_samples: Positive = 1000

    @model_validator(mode="before")
    @classmethod
    def _evaluated_somewhere(cls, given: Any) -> Any:
        alone = isinstance(given, dict) and given.get("test") is False
        return {"client_test": CLIENT_TEST, **given} if alone else given

    @model_validator(mode="after")
    def _evaluated(self) -> "DataConfig":
        if not (self.test or self.client_test or self.validation):
            raise ValueError("test = false and client_test = 0 leave nothing to evaluate on: set one of them")
        return self


class ModelConfig(Section):
    name: Literal["cnn", "mlp", "resnet10", "resnet18", "resnet34", "vit", "transformer"] = "cnn"
    width: Annotated[float, Field(gt=0)] = 1.0
    depth: Annotated[int, Field(ge=1, le=100)] = 6  # of a vit: how many blocks it has
    patch: Positive = 4  # of a vit: pixels of a patch's side
    base: str = ""  # of a transformer: the folder of a pretrained one, or the installed package that brings it
    pooling: Literal["own", "mean"] = "own"  # of a transformer that classifies: what its new head looks at
    dropout: Annotated[float, Field(ge=0, lt=1)] | Literal["own"] = "own"  # of a transformer, in training

    @model_validator(mode="after")
    def _pretrained(self) -> "ModelConfig":
        if (self.name == "transformer") != bool(self.base):
            raise ValueError("name = 'transformer' and a base, a pretrained model, belong together")
        if self.name != "vit" and (self.depth, self.patch) != (6, 4):
            raise ValueError("depth and patch are settings of name = 'vit'")
        return self


class EvaluationConfig(Section):
    every: Positive = 1  # rounds between evaluations; the last round is always evaluated
    static_from: Annotated[int, Field(ge=0)] | Literal["never"] = 0  # after this round, BatchNorm statistics are
    # gathered at the clients; up to it, their running averages are used
    batch: Positive = 128
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the clients with test samples that evaluate


Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Threads = Annotated[int, Field(ge=0, le=MOST_PROCESSES)]


class EngineConfig(Section):
    name: Literal["local", "flower"] = "local"
    workers: Processes | Literal["auto"] = "auto"  # processes that share a round's tasks; results do not depend on it
    threads: Threads = 0  # of a task; 0: as many cores as there are for each task of a round
    server_threads: Threads = 0  # of factorizing and evaluating; 0: all cores
    device: str = "cpu"  # of the clients' networks and of evaluation; auto: cuda where there is one
    compile: bool = False  # the clients' networks, by torch.compile
    superlink: str = ""  # of Flower: a connection's name, or the folder of `fedhm flower up`; empty: a simulation here
    patience: Annotated[float, Field(ge=0)] = 120.0  # of Flower: seconds to wait for one more client to connect
    deadline: Annotated[float, Field(ge=0)] = 0.0  # of Flower: seconds for a round's answers; 0: no limit
    fp16: bool = False  # of Flower: tensors travel in half precision

    @model_validator(mode="after")
    def _elsewhere_by_flower_only(self) -> "EngineConfig":
        if self.superlink and self.name != "flower":
            raise ValueError("a superlink is for engine.name = 'flower'")
        return self


class CheckpointsConfig(Section):
    keep: Positive | Literal["all"] = 2  # the newest so many, to resume from


class CompareConfig(Section):
    """The tiers of the methods that FedHM is compared with; empty: matched to FedHM's by their parameters."""

    widths: tuple[Ratio, ...] = ()  # of the methods that slim the model
    bases: tuple[Positive, ...] = ()  # Split-Mix's: how many base networks


def _of_its_name(group: Group, default: str) -> BeforeValidator:
    """Read a section by the class that its `name` stands for; without a name it is the default's."""

    def read(section: Any) -> Any:
        section = {"name": section} if isinstance(section, str) else section
        if not isinstance(section, dict):
            return section
        name = section.get("name", default)
        try:
            kind: type[Section] = find(group, str(name))
        except UnknownNameError as error:
            raise PydanticCustomError("unknown_name", "{sentence}", {"sentence": str(error)}) from None
        return kind.model_validate({**section, "name": name})

    return BeforeValidator(read)


class Config(Section):
    """All settings of a run; `data` and `model` are None where it is started from Python with a user's own."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    data: DataConfig | None = None
    model: ModelConfig | None = None
    federation: FederationConfig = FederationConfig()
    train: TrainConfig = TrainConfig()
    method: Annotated[SerializeAsAny[MethodConfig], _of_its_name("methods", "fedhm")] = Field(
        default_factory=partial(make, "methods", "fedhm")
    )
    objective: Annotated[SerializeAsAny[Objective], _of_its_name("objectives", "classification")] = Field(
        default_factory=partial(make, "objectives", "classification")
    )
    server: ServerConfig = ServerConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    stop: StopConfig = StopConfig()
    engine: EngineConfig = EngineConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    compare: CompareConfig | None = None  # no part of a single run
    tracking: TrackingConfig | None = None  # no part of what makes a run that run

    @property
    def evaluated_on(self) -> str:
        """Return which samples tell how well a run does, in a word: test or validation."""
        return "validation" if self.data is not None and self.data.validation else "test"

    def resolved(self) -> "ResolvedConfig":
        """Fill in all that depends on where the run was started, so that a resumed run repeats it.

        Sums depend on the number of threads in their last digits. So no number of threads depends on `workers`, which
        is left open: it may be another one when the run is resumed.
        """
        cores = usable_cores()
        engine = {
            "threads": self.engine.threads or max(1, cores // self.federation.per_round(self.federation.clients)),
            "server_threads": self.engine.server_threads or cores,
            "device": self.engine.device,
        }
        if self.engine.device == "auto" and self.engine.name == "local":  # Flower's nodes find out what they have
            engine["device"] = str(find_device("auto"))
        if self.engine.superlink and Path(self.engine.superlink).is_dir():
            engine["superlink"] = str(Path(self.engine.superlink).absolute())
        changes: dict[str, Section | None] = {"engine": self.engine.model_copy(update=engine)}
        changes["compare"] = None
        changes["tracking"] = self.tracking.placed() if self.tracking else None
        if self.train.on_bad_update == "auto":
            # under privacy, whether a run goes on must not depend on what one client sent
            reaction = "stop" if self.engine.name == "local" and not self.privacy.active else "drop"
            changes["train"] = self.train.model_copy(update={"on_bad_update": reaction})
        if self.server.robust == "auto":  # what judges an update by those of others is no way to hide a client
            rule = "none" if self.privacy.at_server else "clip"
            changes["server"] = self.server.model_copy(update={"robust": rule})
        if self.data is not None and self.data.folder is not None:
            changes["data"] = self.data.model_copy(update={"folder": self.data.folder.absolute()})
        changes["federation"] = self.federation.with_files_read()
        return ResolvedConfig(**{name: getattr(self, name) for name in Config.model_fields} | changes)

    def of_client(self, client: int) -> Self:
        """Return the settings with which a client trains: some have devices that need checkpointing."""
        if client not in self.federation.checkpointed or self.train.checkpointing:
            return self
        return self.model_copy(update={"train": self.train.checkpointed})

    def without_place(self) -> Self:
        """Keep all that makes a run the run that it is, wherever it is resumed."""
        place = {
            key: EngineConfig.model_fields[key].default for key in ("workers", "superlink", "patience", "deadline")
        }
        engine = self.engine.model_copy(update=place)
        return self.model_copy(update={"engine": engine, "checkpoints": CheckpointsConfig(), "tracking": None})

    def dotted(self) -> dict[str, Any]:
        """Return every setting by its dotted key, as --set would change it."""
        found: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json", exclude_none=True).items():
            found |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        return found

    def __hash__(self) -> int:
        return hash(self.to_toml())  # a method of a user's may have settings without a hash

    def to_toml(self, stated: Mapping[str, Any] | None = None) -> str:
        """Return the settings as TOML: all of them, or the values of those that are `stated`, by section."""
        table = self.model_dump(mode="json", exclude_none=True)
        if stated is not None:
            table = {name: _only(value, stated[name]) for name, value in table.items() if name in stated}
        return tomli_w.dumps(table)


def _only(value: Any, stated: Any) -> Any:
    both = isinstance(value, dict) and isinstance(stated, dict)
    return {key: inner for key, inner in value.items() if key in stated} if both else value


class ResolvedConfig(Config):
    """Settings that leave nothing open to where they are read: what a run is made of, and what its folder holds."""

    @model_validator(mode="after")
    def _nothing_left_open(self) -> Self:
        if not self.engine.threads or not self.engine.server_threads:
            raise ValueError("engine.threads and engine.server_threads of a run must be whole numbers from 1 on")
        if self.train.on_bad_update == "auto":
            raise ValueError("train.on_bad_update of a run must be 'stop' or 'drop'")
        if self.server.robust == "auto":
            raise ValueError("server.robust of a run must be one of the rules, or 'none'")
        return self

    def with_workers(self, workers: int | Literal["auto"]) -> Self:
        return self.model_copy(update={"engine": self.engine.model_copy(update={"workers": workers})})
