"""Time: the largest version of a model whose training step is fast enough, and simulated seconds of clients."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedhm.config.schema import DeviceConfig, TrainConfig
from fedhm.errors import FedhmError
from fedhm.measure.fit import Fit, ModelVersions, TrainingMode, describe_fit

TRIES = 5  # smaller versions to try, since measured times are noisy


def fit_to_seconds(
    versions: ModelVersions, found: Fit, seconds: Callable[[Fit], float], most: float | None = None
) -> Fit:
    """Return a version with the measured seconds of its step; with `most`, the largest one that takes no longer."""
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


AGAIN = 4 / 3  # forward and backward cost three passes, and checkpointing runs forward once more


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
    """Return the seconds in which a device trains `network`.

    If the device's profile has this network trained in this way, its measured step counts. Otherwise the MACs do, at
    the device's speed.

    reference  MACs a second of a device with speed 1
    macs       of one sample's forward pass
    passes     samples, each counted as often as it is trained on
    """
    checkpointing, again = bool(train.checkpointing), AGAIN if train.checkpointing else 1.0
    if device.profile is None:
        return again * macs * passes / (reference * (device.speed or 1.0))
    if step := device.profile.step(network, checkpointing, train.parts):
        return step.seconds * passes / device.profile.batch
    return again * macs * passes / device.profile.macs_per_second(macs)


def transfer_seconds(size: int, rate: float | None) -> float:
    """Return the seconds that a transfer of `size` bytes takes. A device without a rate has an instant link."""
    return size / rate if rate else 0.0
