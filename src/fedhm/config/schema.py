"""The devices of a fleet: what they can spare for training, how fast they are, and how they are connected."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from fedhm.config.method import MethodConfig
from fedhm.config.objective import Objective
from fedhm.config.registry import Group, UnknownNameError, find, make
from fedhm.config.section import Positive, Ratio, Section
from fedhm.config.units import parse_rate, parse_size
from fedhm.errors import FedhmError
from fedhm.machine.device import find_device
from fedhm.machine.process import MOST_PROCESSES, usable_cores

Seconds = Annotated[float, Field(gt=0)]
Size = Annotated[int, BeforeValidator(parse_size)]  # plain bytes where settings are written down
Rate = Annotated[float, BeforeValidator(parse_rate)]  # in bytes a second, likewise


class Measurement(Section):
    """What one step of training took on a device."""

    network: str  # by its name in the method's tasks, as a rule that of a tier
    checkpointing: bool = False
    micro_batch: Annotated[int, Field(ge=0)] = 0
    macs: Annotated[int, Field(gt=0)]  # of one sample's forward pass
    seconds: Seconds  # of a step
    memory: Annotated[int, Field(ge=0)] = 0  # most bytes above an idle process; 0: the system does not tell


class DeviceProfile(Section):
    """A device as `fedhm profile` measured it: the content of a device file."""

    version: Literal[1] = 1
    name: str
    model: str  # a digest of its tensors' names and shapes, and of the shape of an input
    described: str  # the same in words
    batch: Positive
    optimizer: Literal["sgd", "adamw"]
    threads: Positive
    machine: str
    memory: Size | None = None  # that it can spare for training
    up: Rate | None = None
    down: Rate | None = None
    steps: Annotated[tuple[Measurement, ...], Field(min_length=1)]

    def step(self, network: str, checkpointing: bool, micro_batch: int) -> Measurement | None:
        """Return what was measured of a network trained in this way, if it was."""
        wanted = (network, checkpointing, micro_batch)
        return next((s for s in self.steps if (s.network, s.checkpointing, s.micro_batch) == wanted), None)

    def macs_per_second(self, macs: int) -> float:
        """Return how fast the device trains a network that was not measured: as the one with the nearest MACs."""
        nearest = min(self._plain or self.steps, key=lambda step: abs(step.macs - macs))
        return nearest.macs * self.batch / nearest.seconds

    @property
    def _plain(self) -> Sequence[Measurement]:
        return [step for step in self.steps if not step.checkpointing and not step.micro_batch]


class DeviceConfig(Section):
    """A kind of device, and the clients that have one."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    share: Ratio | None = None  # of the clients,
    clients: tuple[Annotated[int, Field(ge=0)], ...] = ()  # or their numbers, from 0
    memory: Size | None = None  # that it can spare for training; none: as its file says, or without limit
    speed: Annotated[float, Field(gt=0)] | None = None  # relative to federation.reference_macs_per_second; none: 1
    file: Path | None = None  # as `fedhm profile` wrote it on the device, in place of a speed
    up: Rate | None = None  # none: as its file says, or it takes no time
    down: Rate | None = None
    profile: DeviceProfile | None = None  # the file's content: so runs keep it

    @model_validator(mode="after")
    def _one_source(self) -> "DeviceConfig":
        if self.speed is not None and (self.file is not None or self.profile is not None):
            raise ValueError(f"device '{self.name}' has a speed and a file, which measures it: leave one out")
        return self

    @property
    def spare_memory(self) -> int | None:
        return self.memory or (self.profile.memory if self.profile else None)

    @property
    def uplink(self) -> float | None:
        """Return the bytes a second from the device to the server; None: that takes no time."""
        return self.up or (self.profile.up if self.profile else None)

    @property
    def downlink(self) -> float | None:
        return self.down or (self.profile.down if self.profile else None)

    def with_file_read(self) -> "DeviceConfig":
        """Return the device with the content of its file, which may be another one when the run is resumed."""
        if self.file is None:
            return self
        return self.model_copy(update={"profile": read_profile(self.file), "file": None})


def read_profile(path: Path) -> DeviceProfile:
    """Read a device file."""
    try:
        return parse_profile(path.read_bytes(), str(path))
    except OSError as error:
        raise FedhmError(f"cannot read the device file {path}: {error.strerror}") from None


def parse_profile(text: str | bytes, where: str) -> DeviceProfile:
    """Read what a device file holds."""
    try:
        return DeviceProfile.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        what = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
        raise FedhmError(f"{where} is no device file of 'fedhm profile', or damaged: {what}") from None


def clients_of(devices: Sequence[DeviceConfig], clients: int) -> list[int]:
    """Return which of the devices each client has; raise ValueError if not every client has exactly one.

    By shares clients are dealt out in the order of the list, so many as each share comes to, rounded so that all
    clients have a device.
    """
    by_share = [device for device in devices if device.share is not None]
    for device in devices:
        if (device.share is None) == (not device.clients) or (by_share and device.share is None):
            raise ValueError(
                f"device '{device.name}': either every device has a share of the clients, or each lists their numbers"
            )
    if len({device.name for device in devices}) < len(devices):
        raise ValueError("two devices have the same name")
    return _dealt_by_share(devices, clients) if by_share else _by_numbers(devices, clients)


def _by_numbers(devices: Sequence[DeviceConfig], clients: int) -> list[int]:
    found: dict[int, int] = {}
    for number, device in enumerate(devices):
        for client in device.clients:
            if client >= clients:
                raise ValueError(f"device '{device.name}' lists client {client}, but there are {clients}, from 0")
            if client in found:
                raise ValueError(f"client {client} is listed twice, with device '{device.name}' the second time")
            found[client] = number
    if missing := sorted(set(range(clients)) - set(found)):
        raise ValueError(f"client {missing[0]} has no device: every client must be listed once")
    return [found[client] for client in range(clients)]


def _dealt_by_share(devices: Sequence[DeviceConfig], clients: int) -> list[int]:
    shares = [device.share or 0.0 for device in devices]
    if abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"the devices' shares add up to {sum(shares):g}, not to 1")
    exact = [share * clients for share in shares]
    counts = [int(each + 1e-9) for each in exact]
    by_rest = sorted(range(len(devices)), key=lambda number: counts[number] - exact[number])  # the largest rest first
    for number in by_rest[: clients - sum(counts)]:
        counts[number] += 1
    if 0 in counts:
        device = devices[counts.index(0)]
        raise ValueError(f"device '{device.name}' has a share of {device.share:g}, which is none of {clients} clients")
    return [number for number, count in enumerate(counts) for _ in range(count)]


# The clients: how many, who of them takes part, what they can afford.

NO_TIER = "none"  # of a client whose device can train none: it is sampled like the others, and left out


class FederationConfig(Section):
    clients: Positive = 20
    participation: Annotated[float, Field(gt=0, le=1)] = 0.5  # share of the clients sampled each round
    heterogeneity: Literal["fixed", "dynamic"] = "fixed"  # client p has tier p mod Γ, or draws one each round
    assignment: tuple[str, ...] = ()  # each client's tier by name, in place of p mod Γ
    min_updates: Positive = 1  # a round that brings fewer is tried again with other clients
    attempts: Positive = 3  # at a round, before the run ends
    devices: tuple[DeviceConfig, ...] = ()  # in place of p mod Γ: clients get the tier that fits their device
    deadline: Annotated[float, Field(ge=0)] = 0.0  # of a round, in simulated seconds; 0: no limit
    late: Literal["drop", "wait"] = "drop"  # the round ends without clients that are later, or waits for them
    unfit: Literal["refuse", "leave-out", "smallest"] = "refuse"  # what becomes of devices that no tier fits
    reference_macs_per_second: Annotated[float, Field(gt=0)] = 5e9  # of a device with speed 1, in training: MACs of
    # forward passes
    plan: tuple[str, ...] = ()  # each client's tier by its device, as a run found it at its start
    checkpointed: tuple[int, ...] = ()  # likewise, the clients that train with checkpointing
    inputs: str = ""  # likewise, what an input is like, by what most clients say to a server that has no samples

    @model_validator(mode="after")
    def _devices_decide(self) -> "FederationConfig":
        if self.devices:
            if self.heterogeneity == "dynamic":
                raise ValueError("devices decide on their clients' tiers: set heterogeneity to 'fixed'")
            if self.assignment:
                raise ValueError("devices decide on their clients' tiers: leave assignment empty")
            clients_of(self.devices, self.clients)
        elif self.deadline:
            raise ValueError("deadline is in simulated seconds, which follow from devices: list some")
        if self.plan and (not self.devices or len(self.plan) != self.clients):
            raise ValueError("plan is found by runs with devices, and has a tier for each client: leave it empty")
        return self

    def per_round(self, clients: int) -> int:
        """Return how many of so many clients take part in a round."""
        return max(1, round(self.participation * clients))

    @property
    def given_tiers(self) -> tuple[str, ...]:
        """Return each client's tier, where somebody or its device has decided on it; otherwise nothing."""
        return self.plan or self.assignment

    @property
    def device_of(self) -> tuple[DeviceConfig, ...]:
        """Return each client's device; empty where there are none."""
        return tuple(self.devices[n] for n in clients_of(self.devices, self.clients)) if self.devices else ()

    def with_device_files(self) -> "FederationConfig":
        if not any(device.file for device in self.devices):
            return self
        return self.model_copy(update={"devices": tuple(device.with_file_read() for device in self.devices)})


def fixed_level(client: int, levels: int) -> int:
    """Return which of so many capability levels a client stays at whose tier nobody assigned; 0 is the strongest."""
    return client % levels


# The settings of training: what clients do with their samples, and the server with what comes back.

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Section):
    rounds: Positive = 20
    epochs: Positive = 1
    batch: Positive = 64
    micro_batch: Annotated[int, Field(ge=0)] = (
        0  # a batch goes through the network in parts of so many samples, for one
    )
    # step: less memory; 0: all at once
    checkpointing: bool | tuple[str, ...] = False  # blocks of the network, found or named, run again in the backward
    # pass: less memory for a third more computation, and the same weights
    frozen_statistics: bool = False  # BatchNorm layers normalise by the statistics that the model came with
    lr: Annotated[float, Field(gt=0)] = 0.1
    head_factor: Annotated[float, Field(gt=0)] = 1.0  # on the learning rate, of a new head beside adapters
    milestones: tuple[int, ...] = ()  # rounds after which the learning rate is multiplied by lr_decay
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    optimizer: Literal["sgd", "adamw"] = "sgd"  # torch's own
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of sgd, as are the next two
    dampening: Annotated[float, Field(ge=0, le=1)] = 0.0
    nesterov: bool = False
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # of adamw, as are the next two
    eps: Annotated[float, Field(gt=0)] = 1e-8
    amsgrad: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    frobenius_decay: Annotated[float, Field(ge=0)] = 1e-4
    decay_factors: bool = False  # plain weight decay on the factors too, as published FedHM code does
    masked_loss: bool = True  # logits of labels that a client does not hold count as 0
    nested: Annotated[float, Field(ge=0, le=1)] = 0.5  # of FedHM by bands: how much a client trains a smaller tier, too
    nested_tier: Literal["smallest", "random"] = "smallest"  # always that one, or one drawn for every batch
    # both losses on every batch, as their sum or their mean, or the other one alone on this share of the batches; auto:
    # the sum, whose steps are longer, where the network has normalisation layers, which bear that
    nested_form: Literal["auto", "sum", "beside", "instead"] = "auto"
    clip_norm: Annotated[float, Field(ge=0)] = 0.0  # largest gradient norm; 0 is no limit
    max_change: Annotated[float, Field(ge=0)] = 10.0  # largest ‖update − sent‖ / max(‖sent‖, 1); 0 is no limit
    on_bad_update: Literal["auto", "stop", "drop"] = "auto"  # stop with the local engine, drop with Flower

    @model_validator(mode="after")
    def _as_torch_has_it(self) -> "TrainConfig":
        if self.nesterov and self.optimizer == "sgd" and (self.momentum == 0 or self.dampening):
            raise ValueError("nesterov needs a momentum, and no dampening")
        if self.nested_form == "instead" and self.nested == 1:
            raise ValueError("nested_form = 'instead' needs a nested below 1, or no larger tier would be trained")
        if not self.learning_rate(self.rounds):  # norms of changes are measured in multiples of it
            raise ValueError("lr is multiplied by lr_decay at so many milestones that it is 0 in the last round")
        return self

    @property
    def checkpointed(self) -> "TrainConfig":
        """Return these settings with checkpointing, of the blocks that are named or found."""
        return self if self.checkpointing else self.model_copy(update={"checkpointing": True})

    @property
    def parts(self) -> int:
        """Return the samples in a micro-batch; 0: a batch goes through the network at once."""
        return self.micro_batch if self.micro_batch < self.batch else 0

    @property
    def nested_shares(self) -> tuple[float, float] | None:
        """Return the shares of the batches that run through a client's own network and through one inside it."""
        if not self.nested:
            return None
        return (1 - self.nested, self.nested) if self.nested_form == "instead" else (1.0, 1.0)

    def learning_rate(self, round_number: int) -> float:
        """Return the learning rate of round 1, 2, …; a milestone is the last round before a drop."""
        return self.lr * self.lr_decay ** sum(round_number > milestone for milestone in self.milestones)


class ServerConfig(Section):
    """What the server makes of a round's updates: how far each may go, and their mean itself or a step towards it."""

    optimizer: Literal["none", "momentum", "adam"] = "none"  # FedAvgM, FedAdam
    lr: Annotated[float, Field(ge=0)] = 0.0  # of the server's steps; 0: 1 with momentum, 0.01 with adam
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # β of momentum
    betas: tuple[Beta, Beta] = (0.9, 0.99)  # β₁ and β₂ of adam
    tau: Annotated[float, Field(gt=0)] = 1e-3  # τ of adam: its degree of adaptivity
    # against hostile clients; auto: clip, or none where the server hides its clients by noise
    robust: Literal["auto", "none", "clip", "centered-clip", "krum", "trimmed-mean", "median"] = "auto"
    attackers: Annotated[int, Field(ge=0)] = 1  # of krum: how many of a round's participants may be hostile
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2  # of trimmed-mean: the share that is left out at each end

    @property
    def learning_rate(self) -> float:
        return self.lr or (0.01 if self.optimizer == "adam" else 1.0)


class StopConfig(Section):
    """When a run ends before its last round: never, if neither a patience nor a target is set."""

    patience: Annotated[int, Field(ge=0)] = 0  # so many evaluations without an improvement end it; 0: never
    min_change: Annotated[float, Field(ge=0)] = 0.0  # of the headline metric: what is not more is no improvement
    target: float | None = None  # the headline metric's value at which it ends, as records have it: 0.97
    tier: str = ""  # whose model counts; empty: the largest tier's
    # where only clients evaluate: what of their metrics counts. One that lies moves the pooled ones as far as it likes
    clients: Literal["median", "pooled"] = "median"

    @property
    def active(self) -> bool:
        return self.patience > 0 or self.target is not None


# The settings of differential privacy: what one client can change at most, and how much noise hides it.

LEAST_NOISE = 1e-6  # with far less ε is no longer a number, and with this it is of the order of 10¹² already


class PrivacyConfig(Section):
    """Off, unless a bound is set; a bound without noise guarantees nothing."""

    clip: Annotated[float, Field(ge=0)] = 0.0  # C: the largest norm of one client's change, of all tensors together
    noise: Annotated[float, Field(ge=0)] = 0.0  # z: the noise has a standard deviation of z · C
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # δ at which ε is stated
    where: Literal["server", "client"] = "server"  # who adds the noise: a server that is trusted, or every client

    @model_validator(mode="after")
    def _noise_hides_something_bounded(self) -> "PrivacyConfig":
        if self.noise and not self.clip:
            raise ValueError("noise is in units of clip, which is 0: set privacy.clip, too")
        if 0 < self.noise < LEAST_NOISE:
            raise ValueError(f"noise = {self.noise:g} hides nothing: set {LEAST_NOISE:g} or more, or 0 for none")
        return self

    @property
    def active(self) -> bool:
        return self.clip > 0

    @property
    def at_server(self) -> bool:
        return self.active and self.where == "server"

    @property
    def at_clients(self) -> bool:
        return self.active and self.where == "client"


# The settings of trackers: which tools are told how a run goes. They do not make it another run.


class TrackingConfig(Section):
    tensorboard: str = ""  # a folder, in which every run has one of its own; empty: none
    mlflow: str = ""  # a tracking URI, or a folder; empty: none
    mlflow_experiment: str = "fedhm"
    wandb: str = ""  # a project; empty: none
    wandb_mode: Literal["online", "offline"] = "online"  # offline: into the run's folder, for `wandb sync`
    models: bool = True  # the final models are kept as artefacts, where a tracker has such

    def with_absolute_paths(self) -> "TrackingConfig":
        """Return the settings with whole paths: on Flower another process follows them, in another folder."""
        board = str(Path(self.tensorboard).absolute()) if self.tensorboard else ""
        is_folder = self.mlflow and "://" not in self.mlflow and ":" not in self.mlflow and self.mlflow != "databricks"
        place = str(Path(self.mlflow).absolute()) if is_folder else self.mlflow
        return self.model_copy(update={"tensorboard": board, "mlflow": place})


# The settings of a run, typed and validated. `reading.py` reads them.

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
        changes["tracking"] = self.tracking.with_absolute_paths() if self.tracking else None
        if self.train.on_bad_update == "auto":
            # under privacy, whether a run goes on must not depend on what one client sent
            reaction = "stop" if self.engine.name == "local" and not self.privacy.active else "drop"
            changes["train"] = self.train.model_copy(update={"on_bad_update": reaction})
        if self.server.robust == "auto":  # what judges an update by those of others is no way to hide a client
            rule = "none" if self.privacy.at_server else "clip"
            changes["server"] = self.server.model_copy(update={"robust": rule})
        if self.data is not None and self.data.folder is not None:
            changes["data"] = self.data.model_copy(update={"folder": self.data.folder.absolute()})
        changes["federation"] = self.federation.with_device_files()
        return ResolvedConfig(**{name: getattr(self, name) for name in Config.model_fields} | changes)

    def for_client(self, client: int) -> Self:
        """Return the settings with which a client trains: some have devices that need checkpointing."""
        if client not in self.federation.checkpointed or self.train.checkpointing:
            return self
        return self.model_copy(update={"train": self.train.checkpointed})

    def without_location(self) -> Self:
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

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


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
