"""How fast exported files are, and how much memory they take, measured here with their runtimes."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.export.formats import find_format
from fedhm.export.write import Exported

SECONDS = 1.0  # for each file
FEWEST, MOST = 15, 200  # times that each is run
WARM = 3


@dataclass(frozen=True)
class Timed:
    seconds: float  # the median, of one sample on one thread
    memory: int | None  # the most bytes that loading and running it adds to the runtime's own; None: unknown here


def timed(files: Sequence[Exported], sample: Tensor) -> list[Timed]:
    """Measure files in turn, so that whatever else the machine does hits all of them alike.

    Time is the processor's: on one thread that is what a call takes where nobody else wants the processor.
    """
    loaded = [find_format(file.format).load(file.path, threads=1) for file in files]
    spent: list[list[float]] = [[] for _ in files]
    began = time.perf_counter()
    while len(spent[0]) < FEWEST + WARM or (
        time.perf_counter() - began < SECONDS * len(files) and len(spent[0]) < MOST
    ):
        for outputs, seconds in zip(loaded, spent, strict=True):
            start = time.process_time()
            outputs(sample)
            seconds.append(time.process_time() - start)
    medians = [statistics.median(seconds[WARM:]) for seconds in spent]
    return [Timed(median, peak_memory(file, sample)) for median, file in zip(medians, files, strict=True)]


def peak_memory(file: Exported, sample: Tensor) -> int | None:
    """Return what a process of its own needs more, at most, when it loads and runs the file."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "sample.safetensors"
        save_file({"sample": sample.contiguous()}, inputs)
        command = [sys.executable, "-m", "fedhm.export.cards.peak", file.format, str(file.path.absolute()), str(inputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise FedhmError(f"a process that was to run {file.path} failed: {' '.join(said)}")
    peak: int | None = json.loads(done.stdout.splitlines()[-1])
    return peak
