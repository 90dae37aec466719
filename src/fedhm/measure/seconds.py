"""The largest version that is quick enough, by whoever measures how long a step of training takes."""

from collections.abc import Callable
from dataclasses import replace

from fedhm.errors import FedhmError
from fedhm.measure.fit import Fit, fitted
from fedhm.measure.versions import Mode, Versions

TRIES = 5  # times are noise: as often a smaller version is tried


def timed(versions: Versions, found: Fit, seconds: Callable[[Fit], float], most: float | None = None) -> Fit:
    """Return a version with the seconds of its step; with `most`, the largest below it that does not take longer."""
    measured = seconds(found)
    for _ in range(TRIES if most is not None else 0):
        assert most is not None
        if measured <= most or not found.number:
            break
        number = int(found.number * min(0.9, 0.95 * most / measured))
        found = fitted(versions, versions.plan(number), found.mode, number)
        measured = seconds(found)
    if most is not None and measured > most:
        how = "" if found.mode == Mode() else f", trained with {found.mode}"
        raise FedhmError(
            f"seconds = {most:g} is too little for a step of training here: the closest version, of "
            f"{found.expected.parameters:,} parameters{how}, takes {measured:.3g} s: give at least so much, or a "
            "smaller train.batch"
        )
    return replace(found, expected=replace(found.expected, seconds=measured))
