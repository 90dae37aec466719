"""The largest version that is quick enough, by whoever measures how long a step of training takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedhm.config.schema import DeviceConfig, TrainConfig
from fedhm.errors import FedhmError
from fedhm.measure.fit import Fit, ModelVersions, TrainingMode, describe_fit

TRIES = 5  # times are noise: as often a smaller version is tried


def fit_to_seconds(
    versions: ModelVersions, found: Fit, seconds: Callable[[Fit], float], most: float | None = None
) -> Fit:
    """Return a version with the seconds of its step; with `most`, the largest below it that does not take longer."""
    measured = seconds(found)
    for _ in range(TRIES if most is not None else 0):
        assert most is not None
        if measured <= most or not found.number:
            break
        number = int(found.number * min(0.9, 0.95 * most / measured))
        found = describe_fit(versions, versions.plan(number), found.mode, number)
        measured = seconds(found)
    if most is not None and measured > most:
        how = "" if found.mode == TrainingMode() else f", trained with {found.mode}"
        raise FedhmError(
            f"seconds = {most:g} is too little for a step of training here: the closest version, of "
            f"{found.expected.parameters:,} parameters{how}, takes {measured:.3g} s: give at least so much, or a "
            "smaller train.batch"
        )
    return replace(found, expected=replace(found.expected, seconds=measured))


# Simulated time: what a client's round takes on its device, from MACs or measured steps, and from bytes.

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


def computation_seconds(
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


def transfer_seconds(size: int, rate: float | None) -> float:
    """Return the seconds that bytes take on a link; a device without one is beside the server."""
    return size / rate if rate else 0.0
