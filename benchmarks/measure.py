"""What the benchmarks share: interleaved timing, ratios, peak memory, and how their tables look.

Times on a shared machine are noise, but ratios of things that were measured side by side mean something: cases run
A B C A B C …, and a ratio is the median over such turns.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


@dataclass(frozen=True)
class Ratio:
    """The median of a ratio over the turns, and the quartiles between which half of them lie."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run all cases in turns and return the seconds of each call by case; the first `warmup` turns do not count."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=(warmup + repeats) * len(cases))
        for turn in range(warmup + repeats):
            for name, case in cases.items():
                progress.update(bar, description=name)
                gc.collect()  # garbage of one case must not be swept on another's time
                start = clock()
                case()
                seconds = clock() - start
                progress.advance(bar)
                if turn >= warmup:
                    times[name].append(seconds)
    return times


def median(times: Iterable[float]) -> float:
    return statistics.median(times)


def ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Return b/a of pairs run side by side: with seconds of the same work, how many times as fast `a` is as `b`."""
    ratios = [second / first for first, second in zip(a, b, strict=True)]
    quartiles = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Ratio(statistics.median(ratios), quartiles[0], quartiles[2])


def peak_memory(function: Callable[[], object]) -> float:
    """Return the peak resident memory in MiB of a forked child in which `function` runs.

    It counts what this process holds already, which `peak_memory(lambda: None)` tells. The child has one thread, for
    those of torch do not outlive a fork.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # what was freed here would serve the child, and hide what it needs
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError("the measured function failed in its process")
    return _mebibytes(usage)


def _mebibytes(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, KiB elsewhere


def machine() -> str:
    """Return one line on the machine that was measured on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def arguments(description: str | None, **options: tuple[Any, str]) -> argparse.Namespace:
    """Read the command line: `--quick`, `--json` and what the script adds, name=(default, help)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small version, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
    for name, (default, text) in options.items():
        told = f"{text} (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=told)
    return parser.parse_args()


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table whose first column is text and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def save_json(path: Path | None, table: Mapping[str, object]) -> None:
    """Write a table as JSON, dataclasses such as ratios as objects; without a path nothing is written."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **table}, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")
