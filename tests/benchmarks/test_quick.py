"""Every benchmark runs, and its ratios are numbers. How large they are is no test's business: machines are noisy."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forked

ROOT = Path(__file__).parent.parent.parent
# digests tells whether two versions give the same; phases reads runs; lora_server, architectures and on_device run what
# has tests of its own; the others need real weights
NO_RATIOS = (
    "digests.py",
    "lora_server.py",
    "lora_intents.py",
    "lora_shakespeare.py",
    "factorize_minilm.py",
    "architectures.py",
    "phases.py",
    "on_device.py",
)
SCRIPTS = sorted(
    p for p in (ROOT / "benchmarks").glob("*.py") if "__main__" in p.read_text() and p.name not in NO_RATIOS
)
PROMISED = {
    "privacy_audit.py": {"methods": {"fedavg", "fedhm"}},
    "privacy.py": {"noise": {"0", "0.1"}},
    "engine.py": {
        "of_bare": {*(f"ResNet-18 {tier}" for tier in ("full", "1/2", "1/4", "1/8", "1/2, Frobenius decay")), "CNN"},
        "price_of_nesting": {f"ResNet-18 {tier}, keep = {n}" for tier in ("full", "1/2", "1/4") for n in (1, 3)},
        "two_workers_against": {
            f"fedhm, {pool}, {how}"
            for pool in ("1 worker", "ProcessPoolExecutor")
            for how in ("by the clock", "in CPU seconds")
        },
    },
    "attacks.py": {
        f"{who}, {defence}, seed 0": {"full", "1/2", "1/4", "1/8", "hostile updates merged", "honest updates left out"}
        for who in ("nobody attacks", "flip by 1")
        for defence in ("none", "agreement")
    },
    "agreement.py": {"digits, one class each, 0": {"updates", "dropped", "cut", "accuracy"}},
    "stress.py": {"digits, iid, 10 epochs, lr 0.1": {"fedhm", "fedavg"}},
    "export_speed.py": {"tiers": {"full", "1/8"}, "macs": {"full", "1/8"}},
    "layer_ranks.py": {
        "error": {f"{ratio}, {how}" for ratio in ("1/2", "1/4", "1/8") for how in ("one ratio", "by layer")}
    },
    "convolution_code.py": {"kept": {"forward", "gradient of inputs", "gradient of weights"}},
    "memory.py": {
        "predicted_of_measured": {
            "full, plain, as glibc has it",
            "full, plain",
            "1/8, checkpointing, micro-batches of 4",
        }
    },
    "tiers.py": {"tiers": {"full", "1/2", "1/4", "1/8"}, "layers": {"full", "1/2", "1/4", "1/8"}},
    "scale.py": {"clients": {"5", "20"}, "layers": {"64", "128"}},
    "server_round.py": {
        "ratios": {"server round", "factorization", "memory 100 / 10"},
        "truncation": {"1/2", "1/4", "1/8"},
    },
}


def ratios(value: Any) -> Iterator[dict[str, float]]:
    if isinstance(value, dict):
        if value.keys() == {"median", "low", "high"}:
            yield value
        for inner in value.values():
            yield from ratios(inner)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_quick_run_gives_ratios(script: Path, tmp_path: Path) -> None:
    done = forked.script(script, "--quick", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert all(math.isfinite(number) for number in numbers(written))
    for each in ratios(written):
        assert 0 < each["low"] <= each["median"] <= each["high"]
    for section, names in PROMISED[script.name].items():
        assert written[section].keys() == names


@pytest.mark.slow
def test_a_round_by_bands_is_timed_against_averaging_models(tmp_path: Path) -> None:
    options = ["--quick", "--aggregate", "bands", "--json", str(tmp_path / "out.json")]
    done = forked.script(ROOT / "benchmarks" / "server_round.py", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["ratios"]["times as long as averaging models"]
    assert 0 < found["low"] <= found["median"] <= found["high"]


@pytest.mark.slow
def test_the_server_of_adapters_is_timed_with_each_rule() -> None:
    done = forked.script(ROOT / "benchmarks" / "lora_server.py", "--clients", "2")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if re.fullmatch(r"\| `\w+` \| \d+ ms \|", line)]
    assert [row.split("`")[1] for row in rows] == ["models", "updates", "bands", "partitions"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_an_absent_device_of_the_engines_benchmark_is_one_sentence() -> None:
    done = forked.script(ROOT / "benchmarks" / "engine.py", "--quick", "--device", "cuda")
    assert done.returncode == 1
    assert done.stderr == "engine.device = 'cuda' cannot be used with this PyTorch: there is no such CUDA device\n"
    assert not done.stdout


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")
def test_the_engines_benchmark_leaves_no_process_behind(tmp_path: Path) -> None:
    """Not even a child of a peer that has moved to a session of its own, as Ray's do."""
    stray = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    peer = f"{stray}; sys.stdin.read()"
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from peers.process import Peer
with Peer([sys.executable, "-c", {peer!r}]) as peer:
    print(peer._process.pid, peer._process.stdout.readline())
    raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    assert not any(runs(pid) for pid in pids)


def runs(pid: int) -> bool:
    """A zombie, whose parent has not asked for it yet, has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False
