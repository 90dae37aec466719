"""Simulated time: what a client's round takes on its device, from MACs or measured steps, and from bytes."""

from dataclasses import dataclass

from fedhm.config.sections.devices import DeviceConfig
from fedhm.config.sections.training import TrainConfig

AGAIN = 4 / 3  # forward and backward are three passes' worth of computation, and checkpointing runs forward once more


@dataclass(frozen=True)
class ClientSeconds:
    """The simulated seconds of one client in one round."""

    device: str
    computation: float
    down: float
    up: float

    @property
    def total(self) -> float:
        return self.computation + self.down + self.up


def computation(
    device: DeviceConfig, reference: float, network: str, macs: int, passes: int, train: TrainConfig
) -> float:
    """Return the seconds in which a device trains `network` on so many samples, counting each as often as it passes.

    By what was measured of this network trained in this way; otherwise by its MACs, at the device's speed.

    reference  MACs a second of a device with speed 1
    macs       of one sample's forward pass
    """
    checkpointing, again = bool(train.checkpointing), AGAIN if train.checkpointing else 1.0
    if device.profile is None:
        return again * macs * passes / (reference * (device.speed or 1.0))
    if step := device.profile.step(network, checkpointing, train.parts):
        return step.seconds * passes / device.profile.batch
    return again * macs * passes / device.profile.macs_per_second(macs)


def transfer(size: int, rate: float | None) -> float:
    """Return the seconds that bytes take on a link; a device without one is beside the server."""
    return size / rate if rate else 0.0
