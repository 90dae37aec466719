"""All settings of a run: one class for each section of a config file, then `Config`, which holds them.

`loading.py` reads them from presets and files. The sections [method] and [objective] are read by the classes of the
method and the objective that they name.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from fedhm.config.method import MethodConfig
from fedhm.config.objective import Objective
from fedhm.config.registry import Group, UnknownNameError, find, make
from fedhm.config.section import Positive, Ratio, Section, is_empty
from fedhm.config.units import parse_rate, parse_size
from fedhm.errors import FedhmError
from fedhm.machine.device import find_device
from fedhm.machine.files import read_regular
from fedhm.machine.process import MOST_PROCESSES, usable_cores

Size = Annotated[int, BeforeValidator(parse_size)]  # written as plain bytes
Rate = Annotated[float, BeforeValidator(parse_rate)]  # written as plain bytes a second
Link = Annotated[Rate, Field(ge=1e-3, le=1e15)]  # of a device that was measured


def _parse_on_device(value: Any) -> bool | str | int:
    """Read a budget for samples on a device, so that a wrong one is one sentence and not one for each type."""
    return value if isinstance(value, bool) or value == "auto" else parse_size(value)


OnDevice = Annotated[bool | Literal["auto"] | int, BeforeValidator(_parse_on_device)]


OptimizerName = Literal["sgd", "adamw"]  # of the clients: torch's own optimizers


class Measurement(Section):
    """One step of training on a device."""

    network: str  # its name in the method's tasks, usually that of a tier
    checkpointing: bool = False
    micro_batch: Annotated[int, Field(ge=0, le=10**9)] = 0
    macs: Annotated[int, Field(gt=0, le=10**18)]  # of one sample's forward pass
    seconds: Annotated[float, Field(ge=1e-9, le=1e6)]  # of a step
    memory: Annotated[int, Field(ge=0, le=2**60)] = 0  # peak bytes above an idle process; 0: unknown on this system


class DeviceProfile(Section):
    """A device as `fedhm profile` measured it: the content of a device file.

    Its numbers are bounded, because files come from other machines: no time that is computed from them overflows.
    """

    version: Literal[1] = 1
    name: str
    model: str  # a digest of its tensors' names and shapes, and of the shape of an input
    described: str  # the same in words
    batch: Positive
    optimizer: OptimizerName
    threads: Positive
    machine: str
    memory: Annotated[Size, Field(le=2**60)] | None = None  # to spare for training
    up: Link | None = None
    down: Link | None = None
    steps: Annotated[tuple[Measurement, ...], Field(min_length=1)]

    def step(self, network: str, checkpointing: bool, micro_batch: int) -> Measurement | None:
        """Return the measurement of a network in a training mode, if there is one."""
        wanted = (network, checkpointing, micro_batch)
        return next((s for s in self.steps if (s.network, s.checkpointing, s.micro_batch) == wanted), None)

    def macs_per_second(self, macs: int) -> float:
        """Return the speed for a network that was not measured: that of the one with the nearest MACs."""
        nearest = min(self._plain or self.steps, key=lambda step: abs(step.macs - macs))
        return nearest.macs * self.batch / nearest.seconds

    @property
    def _plain(self) -> Sequence[Measurement]:
        return [step for step in self.steps if not step.checkpointing and not step.micro_batch]


class DeviceConfig(Section):
    """A kind of device, and the clients that have it."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    share: Ratio | None = None  # of the clients,
    clients: tuple[Annotated[int, Field(ge=0)], ...] = ()  # or their numbers, from 0
    memory: Size | None = None  # to spare for training; none: as in its file, or no limit
    speed: Annotated[float, Field(gt=0)] | None = None  # relative to federation.reference_macs_per_second; none: 1
    file: Path | None = None  # as `fedhm profile` wrote it on the device, in place of a speed
    up: Rate | None = None  # none: as in its file, or transfers take no time
    down: Rate | None = None
    profile: DeviceProfile | None = None  # the content of `file`, which runs keep

    @model_validator(mode="after")
    def _check_speed(self) -> "DeviceConfig":
        if self.speed is not None and (self.file is not None or self.profile is not None):
            raise ValueError(f"device '{self.name}' has a speed and a file, which measures it: leave one out")
        return self

    @property
    def spare_memory(self) -> int | None:
        return self.memory or (self.profile.memory if self.profile else None)

    @property
    def uplink(self) -> float | None:
        """Return the bytes a second from the device to the server; None: transfers take no time."""
        return self.up or (self.profile.up if self.profile else None)

    @property
    def downlink(self) -> float | None:
        return self.down or (self.profile.down if self.profile else None)

    def with_file_read(self) -> "DeviceConfig":
        """Return the device with the content of its file: the file may change before the run is resumed."""
        if self.file is None:
            return self
        return self.model_copy(update={"profile": read_profile(self.file), "file": None})


def read_profile(path: Path) -> DeviceProfile:
    """Read a device file."""
    try:
        return parse_profile(read_regular(path), str(path))
    except OSError as error:
        raise FedhmError(f"cannot read the device file {path}: {error.strerror}") from None


def parse_profile(text: str | bytes, where: str) -> DeviceProfile:
    """Read the content of a device file."""
    try:
        return DeviceProfile.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        what = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
        raise FedhmError(f"{where} is no device file of 'fedhm profile', or damaged: {what}") from None


def clients_of(devices: Sequence[DeviceConfig], clients: int) -> list[int]:
    """Return each client's device, as its place in the list; raise ValueError unless every client has exactly one.

    With shares, clients get devices in the order of the list. Shares are rounded so that every client has a device.
    """
    by_share = [device for device in devices if device.share is not None]
    for device in devices:
        if (device.share is None) == (not device.clients) or (by_share and device.share is None):
            raise ValueError(
                f"device '{device.name}': either every device has a share of the clients, or each lists their numbers"
            )
    if len({device.name for device in devices}) < len(devices):
        raise ValueError("two devices have the same name")
    return _by_shares(devices, clients) if by_share else _by_numbers(devices, clients)


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


def _by_shares(devices: Sequence[DeviceConfig], clients: int) -> list[int]:
    shares = [device.share or 0.0 for device in devices]
    if abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"the devices' shares add up to {sum(shares):g}, not to 1")
    exact = [share * clients for share in shares]
    counts = [int(each + 1e-9) for each in exact]
    by_rest = sorted(range(len(devices)), key=lambda number: counts[number] - exact[number])  # largest remainder first
    for number in by_rest[: clients - sum(counts)]:
        counts[number] += 1
    if 0 in counts:
        device = devices[counts.index(0)]
        raise ValueError(f"device '{device.name}' has a share of {device.share:g}, which is none of {clients} clients")
    return [number for number, count in enumerate(counts) for _ in range(count)]


NO_TIER = "none"  # of a client whose device can train no tier: it is sampled like the others, and left out


class FederationConfig(Section):
    """The clients: how many there are, how many take part in a round, and what they can afford."""

    clients: Positive = 20
    participation: Annotated[float, Field(gt=0, le=1)] = 0.5  # share of the clients sampled each round
    heterogeneity: Literal["fixed", "dynamic"] = "fixed"  # client p has tier p mod Γ, or draws one each round
    assignment: tuple[str, ...] = ()  # each client's tier by name, in place of p mod Γ
    min_clients: Annotated[int, Field(ge=0)] = 0  # of Flower: a run begins with so many; 0: more than half of them
    # how much each client counts in the mean, times its weight by method.weighting; empty: all count alike
    weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(exclude_if=is_empty)] = ()
    min_updates: Positive = 1  # a round with fewer is repeated with other clients
    attempts: Positive = 3  # at a round, before the run ends with an error
    devices: tuple[DeviceConfig, ...] = ()  # in place of p mod Γ: each client gets a tier that fits its device
    deadline: Annotated[float, Field(ge=0)] = 0.0  # of a round, in simulated seconds; 0: no limit
    late: Literal["drop", "wait"] = "drop"  # clients past the deadline are dropped, or waited for
    unfit: Literal["refuse", "leave-out", "smallest"] = "refuse"  # devices that no tier fits
    # of a device with speed 1, in training: MACs of forward passes
    reference_macs_per_second: Annotated[float, Field(gt=0)] = 5e9
    # found by a run at its start
    plan: tuple[str, ...] = ()  # each client's tier by its device
    checkpointed: tuple[int, ...] = ()  # the clients that train with checkpointing
    inputs: str = ""  # an `InputSpec`: what most clients report to a server without samples
    missing: tuple[int, ...] = ()  # the clients that were not connected: what they say when they come gives their tiers

    @model_validator(mode="after")
    def _check_min_clients(self) -> "FederationConfig":
        if self.min_clients > self.clients:
            raise ValueError(f"min_clients = {self.min_clients}, but there are {self.clients} clients")
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> "FederationConfig":
        if self.weights and len(self.weights) != self.clients:
            raise ValueError(f"weights has {len(self.weights)} numbers for {self.clients} clients: each needs one")
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> "FederationConfig":
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

    @property
    def needed_clients(self) -> int:
        """Return how many clients must be connected for a run on Flower to begin."""
        return self.min_clients or self.clients // 2 + 1

    def per_round(self, clients: int) -> int:
        """Return how many of `clients` take part in a round."""
        return max(1, round(self.participation * clients))

    @property
    def given_tiers(self) -> tuple[str, ...]:
        """Return each client's tier, if settings or devices decide it; empty otherwise."""
        return self.plan or self.assignment

    @property
    def device_of(self) -> tuple[DeviceConfig, ...]:
        """Return each client's device; empty without devices."""
        return tuple(self.devices[n] for n in clients_of(self.devices, self.clients)) if self.devices else ()

    def with_device_files(self) -> "FederationConfig":
        if not any(device.file for device in self.devices):
            return self
        return self.model_copy(update={"devices": tuple(device.with_file_read() for device in self.devices)})


def fixed_level(client: int, levels: int) -> int:
    """Return the capability level of a client without an assigned tier; 0 is the strongest."""
    return client % levels


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Section):
    """How clients train."""

    rounds: Positive = 20
    # found by a run that was lengthened: the rounds with which it began
    begun_rounds: Annotated[int, Field(ge=0, le=10**9, exclude_if=is_empty)] = 0
    epochs: Positive = 1
    iterations: Annotated[int, Field(ge=0)] = 0  # local steps of a round, in place of epochs; 0: epochs count
    batch: Positive = 64
    # of forward and backward passes; weights, steps, losses and evaluation are in float32
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    # samples that go through the network together, for a step on the whole batch: less memory; 0: the whole batch
    micro_batch: Annotated[int, Field(ge=0)] = 0
    # blocks of the network, found or named, run again in the backward pass: less memory, a third more computation, the
    # same weights
    checkpointing: bool | tuple[str, ...] = False
    frozen_statistics: bool = False  # BatchNorm layers normalise by the statistics of the initial model
    lr: Annotated[float, Field(gt=0)] = 0.1
    head_factor: Annotated[float, Field(gt=0)] = 1.0  # times the learning rate, for a new head beside adapters
    # the learning rate drops at milestones, falls along half a cosine to nearly 0 in the last round, or stays
    schedule: Annotated[Literal["milestones", "cosine", "constant"], Field(exclude_if=lambda v: v == "milestones")] = (
        "milestones"
    )
    # the first rounds, in which the learning rate rises in equal steps; FedHM's own method.warmup is another thing
    warmup_rounds: Annotated[int, Field(ge=0, le=10**9, exclude_if=is_empty)] = 0
    milestones: tuple[int, ...] = ()  # rounds after which the learning rate is multiplied by lr_decay
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    optimizer: OptimizerName = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of sgd, as are the next two
    dampening: Annotated[float, Field(ge=0, le=1)] = 0.0
    nesterov: bool = False
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # of adamw, as are the next two
    eps: Annotated[float, Field(gt=0)] = 1e-8
    amsgrad: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    frobenius_decay: Annotated[float, Field(ge=0)] = 1e-4
    decay_factors: bool = False  # plain weight decay on the factors, too, as in published FedHM code
    masked_loss: bool = True  # logits of labels that a client does not hold count as 0
    nested: Annotated[float, Field(ge=0, le=1)] = 0.5  # FedHM by bands: weight of a smaller tier inside
    nested_tier: Literal["smallest", "random"] = "smallest"  # always the smallest, or one drawn for every batch
    # sum, beside: both losses on every batch, as their sum or their mean; instead: the smaller tier alone, on a share
    # of the batches; auto: the sum, whose steps are longer, if normalisation layers make up for that
    nested_form: Literal["auto", "sum", "beside", "instead"] = "auto"
    # largest norm of the gradient of all parameters together; 0: no limit; auto: the method's own
    clip_norm: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    max_change: Annotated[float, Field(ge=0)] = 10.0  # largest ‖update − sent‖ / max(‖sent‖, 1); 0 is no limit
    on_bad_update: Literal["auto", "stop", "drop"] = "auto"  # stop with the local engine, drop with Flower

    @model_validator(mode="after")
    def _check_precision(self) -> "TrainConfig":
        if self.precision == "fp16" and self.dampening:
            raise ValueError("precision = 'fp16' may leave out steps, which torch cannot do with dampening: use bf16")
        return self

    @model_validator(mode="after")
    def _check_optimizer(self) -> "TrainConfig":
        if self.nesterov and self.optimizer == "sgd" and (self.momentum == 0 or self.dampening):
            raise ValueError("nesterov needs a momentum, and no dampening")
        if self.nested_form == "instead" and self.nested == 1:
            raise ValueError("nested_form = 'instead' needs a nested below 1, or no larger tier would be trained")
        if self.milestones and self.schedule != "milestones":
            raise ValueError(
                f"milestones are for schedule = 'milestones', not for '{self.schedule}': set train.milestones=[], too"
            )
        if self.warmup_rounds and self.warmup_rounds >= self.rounds:
            raise ValueError(f"warmup_rounds = {self.warmup_rounds} leave nothing of {self.rounds} rounds")
        if not self.learning_rate(self.rounds):  # norms of changes are measured in multiples of it
            raise ValueError("lr is multiplied by lr_decay at so many milestones that it is 0 in the last round")
        return self

    @property
    def checkpointed(self) -> "TrainConfig":
        """Return these settings with checkpointing, of the blocks that are named or found."""
        return self if self.checkpointing else self.model_copy(update={"checkpointing": True})

    @property
    def parts(self) -> int:
        """Return the samples in a micro-batch; 0: the whole batch at once."""
        return self.micro_batch if self.micro_batch < self.batch else 0

    @property
    def gradient_limit(self) -> float:
        """Return the largest gradient norm; 0: no limit, also while the method's own is not filled in."""
        return 0.0 if self.clip_norm == "auto" else self.clip_norm

    @property
    def nested_shares(self) -> tuple[float, float] | None:
        """Return the shares of batches that run through a client's own network, and through the smaller one inside."""
        if not self.nested:
            return None
        return (1 - self.nested, self.nested) if self.nested_form == "instead" else (1.0, 1.0)

    def learning_rate(self, round_number: int) -> float:
        """Return the learning rate of round 1, 2, …; a milestone is the last round before a drop."""
        if round_number <= self.warmup_rounds:
            return self.lr * round_number / (self.warmup_rounds + 1)
        if self.schedule == "cosine":
            done = (round_number - 1 - self.warmup_rounds) / (self.rounds - self.warmup_rounds)
            return self.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.lr * self.lr_decay ** sum(round_number > milestone for milestone in self.milestones)


class ServerConfig(Section):
    """How the server merges updates: how it defends against hostile ones, and how it steps towards their mean."""

    optimizer: Literal["none", "momentum", "adam"] = "none"  # FedAvgM, FedAdam
    lr: Annotated[float, Field(ge=0)] = 0.0  # of the server's steps; 0: 1 with momentum, 0.01 with adam
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # β of momentum
    betas: tuple[Beta, Beta] = (0.9, 0.99)  # β₁ and β₂ of adam
    tau: Annotated[float, Field(gt=0)] = 1e-3  # τ of adam: its degree of adaptivity
    # defence against hostile clients; auto: agreement in deployments without noise at the server, otherwise none
    robust: Literal["auto", "none", "clip", "agreement", "centered-clip", "krum", "trimmed-mean", "median"] = "auto"
    attackers: Annotated[int, Field(ge=0)] = 1  # krum: how many participants of a round may be hostile
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2  # trimmed-mean: the share left out at each end

    @property
    def learning_rate(self) -> float:
        return self.lr or (0.01 if self.optimizer == "adam" else 1.0)


class StopConfig(Section):
    """When a run ends before its last round. Without a patience and a target it never does."""

    patience: Annotated[int, Field(ge=0)] = 0  # evaluations without improvement that end the run; 0: never
    min_change: Annotated[float, Field(ge=0)] = 0.0  # of the headline metric: a smaller change is no improvement
    target: float | None = None  # a value of the headline metric that ends the run, as in records: 0.97
    tier: str = ""  # whose model counts; empty: the largest tier's
    # the metric that counts if only clients evaluate; a lying client can move the pooled one as far as it likes
    clients: Literal["median", "pooled"] = "median"

    @property
    def active(self) -> bool:
        return self.patience > 0 or self.target is not None


LEAST_NOISE = 1e-6  # with it, ε is of the order of 10¹²; with far less, ε is no longer a number


class PrivacyConfig(Section):
    """Differential privacy. It is off unless `clip` is set; a clip without noise guarantees nothing."""

    clip: Annotated[float, Field(ge=0)] = 0.0  # C: the largest norm of one client's change, of all tensors together
    noise: Annotated[float, Field(ge=0)] = 0.0  # z: the noise has a standard deviation of z · C
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # δ at which ε is stated
    where: Literal["server", "client"] = "server"  # a trusted server adds the noise, or every client

    @model_validator(mode="after")
    def _check_noise(self) -> "PrivacyConfig":
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


class TrackingConfig(Section):
    """The experiment trackers that log the run. They are no part of its identity."""

    tensorboard: str = ""  # a folder, in which every run has its own; empty: none
    mlflow: str = ""  # a tracking URI, or a folder; empty: none
    mlflow_experiment: str = "fedhm"
    wandb: str = ""  # a project; empty: none
    wandb_mode: Literal["online", "offline"] = "online"  # offline: into the run's folder, for `wandb sync`
    models: bool = True  # keep the final models as artefacts, if the tracker has them

    def with_absolute_paths(self) -> "TrackingConfig":
        """Return the settings with absolute paths: on Flower, another process uses them in another folder."""
        board = str(Path(self.tensorboard).absolute()) if self.tensorboard else ""
        is_folder = self.mlflow and "://" not in self.mlflow and ":" not in self.mlflow and self.mlflow != "databricks"
        place = str(Path(self.mlflow).absolute()) if is_folder else self.mlflow
        return self.model_copy(update={"tensorboard": board, "mlflow": place})


CLIENT_TEST = 0.2  # the share that clients hold out if there is nothing else to evaluate on


class DataConfig(Section):
    source: str = "digits"  # diabetes, digits, fashion-mnist, cifar10, cifar100, tinyimagenet, hf:NAME or text:NAME
    folder: Path | None = None  # of the files; none: FEDHM_DATA or ./data
    # all but -unequal: equal sizes; -feddf: the sampler of FedDF, which FedHM's published code uses
    partition: Literal["iid", "dirichlet", "dirichlet-unequal", "dirichlet-feddf", "by-tier"] = "iid"
    alpha: Annotated[float, Field(gt=0)] = 0.5
    by_tier_share: Annotated[float, Field(ge=0, le=1)] = 0.8  # of a client's samples, with labels of its level
    by_tier_levels: Positive = 4  # a setting of the data, so that all methods get the same data
    # of images: by mean and deviation of the training images, or by the numbers in FedHM's published code
    normalisation: Literal["measured", "published"] = "measured"
    downscale: Positive = 1  # k: every block of k × k pixels becomes its mean
    max_length: Positive = 128  # tokens of a text; longer texts are cut
    crop: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    train_samples: Annotated[int, Field(ge=0)] = 0  # to train on, chosen at random; 0: all
    # evaluate on this share, held out of each client's samples, in place of the test set; 0: on the test set
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # every client holds out this share of its samples and evaluates every tier's model on them; 0: no client evaluates
    client_test: Annotated[float, Field(ge=0, lt=1)] = 0.0
    test: bool = True  # the server has the source's test set; if not, client_test is 0.2 by default
    public: str = ""  # unlabelled samples for distillation, which everybody has: a source, or "held-out" from this one
    public_samples: Positive = 1000

    @model_validator(mode="before")
    @classmethod
    def _default_client_test(cls, given: Any) -> Any:
        alone = isinstance(given, dict) and given.get("test") is False
        return {"client_test": CLIENT_TEST, **given} if alone else given

    @model_validator(mode="after")
    def _check_evaluation(self) -> "DataConfig":
        if not (self.test or self.client_test or self.validation):
            raise ValueError("test = false and client_test = 0 leave nothing to evaluate on: set one of them")
        return self


class ModelConfig(Section):
    name: Literal["cnn", "mlp", "resnet10", "resnet18", "resnet34", "vit", "transformer"] = "cnn"
    width: Annotated[float, Field(gt=0)] = 1.0
    # of the cnn and the ResNets: He's rule by outputs for convolutions, or by inputs for Linear layers, too, as in
    # FedHM's published code
    init: Literal["fan-out", "fan-in"] = "fan-out"
    depth: Annotated[int, Field(ge=1, le=100)] = 6  # of a vit: its number of blocks
    patch: Positive = 4  # of a vit: pixels of a patch's side
    base: str = ""  # of a transformer: the folder of a pretrained one, or the installed package that has it
    pooling: Literal["own", "mean"] = "own"  # of a transformer that classifies: the input of its new head
    dropout: Annotated[float, Field(ge=0, lt=1)] | Literal["own"] = "own"  # of a transformer, in training

    @model_validator(mode="after")
    def _check_base(self) -> "ModelConfig":
        if (self.name == "transformer") != bool(self.base):
            raise ValueError("name = 'transformer' and a base, a pretrained model, belong together")
        if self.name != "vit" and (self.depth, self.patch) != (6, 4):
            raise ValueError("depth and patch are settings of name = 'vit'")
        if self.init != "fan-out" and not self.has_init:
            raise ValueError(f"init is a setting of the cnn and the ResNets, not of name = '{self.name}'")
        return self

    @property
    def has_init(self) -> bool:
        """Tell whether `init` decides on the first weights."""
        return self.name in ("cnn", "resnet10", "resnet18", "resnet34")


class EvaluationConfig(Section):
    every: Positive = 1  # rounds between evaluations; the last round is always evaluated
    # after this round, BatchNorm statistics are gathered at the clients; before, the running averages are used
    static_from: Annotated[int, Field(ge=0)] | Literal["never"] = 0
    # BatchNorm layers normalise by their stored statistics, or by those of each test batch, as in FedHM's published
    # code; then metrics depend on `batch`, and no statistics are gathered
    statistics: Literal["stored", "test-batch"] = "stored"
    batch: Positive = 128
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the clients with test samples that evaluate
    diagnostics: Literal["basic", "theory"] = "basic"  # theory: the terms of FedHM's convergence bound in every round

    @property
    def gathers_after(self) -> int | None:
        """Return the round after which BatchNorm statistics are gathered at the clients; None: never."""
        return None if self.static_from == "never" or self.statistics == "test-batch" else self.static_from


Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Threads = Annotated[int, Field(ge=0, le=MOST_PROCESSES)]


ClientRuntime = Literal["torch", "executorch"]


class EngineConfig(Section):
    name: Literal["local", "flower"] = "local"
    # what makes the clients' local steps
    client: Annotated[ClientRuntime, Field(exclude_if=lambda value: value == "torch")] = "torch"
    # with executorch: only these; empty: all clients
    executorch_clients: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(exclude_if=is_empty)] = ()
    workers: Processes | Literal["auto"] = "auto"  # processes that share a round's tasks; results do not depend on it
    threads: Threads = 0  # of a task; 0: the cores, divided by the tasks of a round
    server_threads: Threads = 0  # of factorizing and evaluating; 0: all cores
    # of the clients' networks and of evaluation; auto: CUDA, ROCm, MPS or XPU if there is one, else the CPU
    device: str = "auto"
    devices: tuple[str, ...] = ()  # several of one kind, which share a round's tasks; empty: `device` alone
    # samples stay on a device while they fit into this memory; auto: half of what is free at the start
    data_on_device: OnDevice = "auto"
    deterministic: bool = False  # torch's deterministic algorithms: a resumed run is bit-exact on a device, too
    compile: bool = False  # the clients' networks, by torch.compile
    superlink: str = ""  # of Flower: a connection's name, or the folder of `fedhm flower up`; empty: a simulation here
    patience: Annotated[float, Field(ge=0)] = 120.0  # of Flower: seconds to wait for one more client to connect
    deadline: Annotated[float, Field(ge=0)] = 0.0  # of Flower: seconds for a round's answers; 0: no limit
    fp16: bool = False  # of Flower: tensors are sent in half precision

    @model_validator(mode="after")
    def _check_superlink(self) -> "EngineConfig":
        if self.superlink and self.name != "flower":
            raise ValueError("a superlink is for engine.name = 'flower'")
        if self.executorch_clients and self.client != "executorch":
            raise ValueError("executorch_clients are for engine.client = 'executorch'")
        return self

    @property
    def device_names(self) -> str:
        """Return the devices on which networks run, separated by commas."""
        return ", ".join(self.devices) or self.device


class CheckpointsConfig(Section):
    keep: Positive | Literal["all"] = 2  # how many of the newest are kept, to resume from


class CompareConfig(Section):
    """The tiers of methods that FedHM is compared with; empty: matched to FedHM's by their parameters."""

    widths: tuple[Ratio, ...] = ()  # of the methods that slim the model
    bases: tuple[Positive, ...] = ()  # Split-Mix's: how many base networks


def _by_name(group: Group, default: str) -> BeforeValidator:
    """Read a section by the class of its `name`; `default` is used if it has none."""

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
    """All settings of a run; `data` and `model` are None if it is started from Python with a user's own."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    data: DataConfig | None = None
    model: ModelConfig | None = None
    federation: FederationConfig = FederationConfig()
    train: TrainConfig = TrainConfig()
    method: Annotated[SerializeAsAny[MethodConfig], _by_name("methods", "fedhm")] = Field(
        default_factory=partial(make, "methods", "fedhm")
    )
    objective: Annotated[SerializeAsAny[Objective], _by_name("objectives", "classification")] = Field(
        default_factory=partial(make, "objectives", "classification")
    )
    server: ServerConfig = ServerConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    stop: StopConfig = StopConfig()
    engine: EngineConfig = EngineConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    compare: CompareConfig | None = None  # no part of a single run
    tracking: TrackingConfig | None = None

    @model_validator(mode="after")
    def _check_statistics(self) -> Self:
        if self.evaluation.statistics == "test-batch" and self.train.frozen_statistics:
            raise ValueError(
                "train.frozen_statistics = true trains with stored statistics, and evaluation.statistics = "
                "'test-batch' evaluates without them: leave one out"
            )
        return self

    @property
    def evaluated_on(self) -> str:
        """Return the kind of samples that evaluation uses: test or validation."""
        return "validation" if self.data is not None and self.data.validation else "test"

    def resolved(self) -> "ResolvedConfig":
        """Fill in all settings that depend on the machine, so that a resumed run repeats them.

        The last digits of sums depend on the number of threads. So no number of threads depends on `workers`, which
        may change when the run is resumed.
        """
        cores = usable_cores()
        engine = {
            "threads": self.engine.threads or max(1, cores // self.federation.per_round(self.federation.clients)),
            "server_threads": self.engine.server_threads or cores,
            "device": self.engine.device,
        }
        if self.engine.device == "auto" and self.engine.name == "local":  # Flower's nodes choose for themselves
            engine["device"] = str(find_device("auto"))
        if self.engine.superlink and Path(self.engine.superlink).is_dir():
            engine["superlink"] = str(Path(self.engine.superlink).absolute())
        changes: dict[str, Section | None] = {"engine": self.engine.model_copy(update=engine)}
        changes["compare"] = None
        changes["tracking"] = self.tracking.with_absolute_paths() if self.tracking else None
        train: dict[str, Any] = {}
        if self.train.on_bad_update == "auto":
            # under privacy, one client's update must not decide whether the run goes on
            train["on_bad_update"] = "stop" if self.engine.name == "local" and not self.privacy.active else "drop"
        if self.train.clip_norm == "auto":
            # gradients of a cross-entropy have a known scale; those of a regression follow from its targets' unit
            train["clip_norm"] = self.method.clip_norm(self.train.lr) if self.objective.clips_gradients else 0.0
        changes["train"] = self.train.model_copy(update=train)
        changes["server"] = self.with_defence(deployed=bool(self.engine.superlink)).server
        if self.data is not None and self.data.folder is not None:
            changes["data"] = self.data.model_copy(update={"folder": self.data.folder.absolute()})
        changes["federation"] = self.federation.with_device_files()
        return ResolvedConfig(**{name: getattr(self, name) for name in Config.model_fields} | changes)

    def with_defence(self, *, deployed: bool) -> Self:
        """Fill in the defence where the settings leave it open.

        Nobody is hostile in a simulation, so nothing is changed or dropped there. A defence compares clients, which
        would undo the privacy that noise at the server gives them.
        """
        if self.server.robust != "auto":
            return self
        rule = "agreement" if deployed and not self.privacy.at_server else "none"
        return self.model_copy(update={"server": self.server.model_copy(update={"robust": rule})})

    def for_client(self, client: int) -> Self:
        """Return the settings of one client: some devices need checkpointing, some train in another runtime."""
        if self.engine.executorch_clients and client not in self.engine.executorch_clients:
            plain = self.engine.model_copy(update={"client": "torch", "executorch_clients": ()})
            return self.model_copy(update={"engine": plain}).for_client(client)
        if client not in self.federation.checkpointed or self.train.checkpointing:
            return self
        return self.model_copy(update={"train": self.train.checkpointed})

    def without_model(self) -> Self:
        """Return the settings of a run with a user's own model."""
        return self.model_copy(update={"model": None})

    def without_location(self) -> Self:
        """Return the settings that identify a run, without those of the place where it runs."""
        place = {
            key: EngineConfig.model_fields[key].default
            for key in ("workers", "devices", "data_on_device", "superlink", "patience", "deadline")
        }
        engine = self.engine.model_copy(update=place)
        federation = self.federation.model_copy(update={"min_clients": 0})
        train = self.train
        if train.begun_rounds:  # a lengthened run is still the run that began
            train = train.model_copy(update={"rounds": train.begun_rounds, "begun_rounds": 0})
        changes = {
            "train": train,
            "engine": engine,
            "federation": federation,
            "checkpoints": CheckpointsConfig(),
            "tracking": None,
        }
        return self.model_copy(update=changes)

    def dotted(self) -> dict[str, Any]:
        """Return every setting by its dotted key, as --set would change it."""
        found: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json", exclude_none=True).items():
            found |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        return found

    def __hash__(self) -> int:
        return hash(self.to_toml())  # a user's method may have settings without a hash

    def to_toml(self, exclude: Mapping[str, Any] | None = None) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True, exclude=dict(exclude or {})))


class ResolvedConfig(Config):
    """Settings that leave nothing to the machine: a run uses them, and its folder holds them."""

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        if not self.engine.threads or not self.engine.server_threads:
            raise ValueError("engine.threads and engine.server_threads of a run must be whole numbers from 1 on")
        if self.train.on_bad_update == "auto":
            raise ValueError("train.on_bad_update of a run must be 'stop' or 'drop'")
        if self.train.clip_norm == "auto":
            raise ValueError("train.clip_norm of a run must be a number")
        if self.server.robust == "auto":
            raise ValueError("server.robust of a run must be one of the rules, or 'none'")
        return self

    def with_workers(self, workers: int | Literal["auto"]) -> Self:
        return self.model_copy(update={"engine": self.engine.model_copy(update={"workers": workers})})
