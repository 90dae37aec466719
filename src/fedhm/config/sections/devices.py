"""The devices of a fleet: what they can spare for training, how fast they are, and how they are connected."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from fedhm.config.section import Positive, Ratio, Section
from fedhm.config.units import rate, size
from fedhm.errors import FedhmError

Seconds = Annotated[float, Field(gt=0)]
Size = Annotated[int, BeforeValidator(size)]  # plain bytes where settings are written down
Rate = Annotated[float, BeforeValidator(rate)]  # in bytes a second, likewise


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
