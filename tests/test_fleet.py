"""Fleets of devices: who gets what, how long a round takes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from conftest import no_figures
from fedhm.cli import main
from fedhm.config.schema import DeviceProfile, Measurement
from fedhm.errors import FedhmError
from fedhm.networks.exchange import structure_digest
from fedhm.report.plot import render_matplotlib
from fedhm.report.plots import client_plot
from fedhm.runs.folder import read_config
from fedhm.runs.history import read_runs
from fedhm.server.record import Record

STRONG = {"name": "strong", "share": 0.5, "speed": 2, "up": "1MB/s", "down": "2MB/s"}
WEAK = {"name": "weak", "share": 0.5, "speed": 0.1, "up": "10kB/s", "down": "20kB/s"}
DIM, CLASSES = 8, 3


def data() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(140, 1, 1, DIM, generator=generator)
    y = x[:, 0, 0, :CLASSES].argmax(1)
    return [(x[i : i + 20], y[i : i + 20]) for i in range(0, 80, 20)], (x[100:], y[100:])


def blocks() -> torch.nn.Module:
    """Return a network of blocks, of which checkpointing saves the activations."""
    torch.manual_seed(0)
    block = [torch.nn.Sequential(torch.nn.Linear(24, 24), *[torch.nn.Tanh()] * 12) for _ in range(3)]
    flat = torch.nn.Flatten()
    return torch.nn.Sequential(flat, torch.nn.Linear(DIM, 24), *block, torch.nn.Linear(24, CLASSES))


def run(
    *devices: dict[str, Any],
    out: Path | None = None,
    method: Any = None,
    rounds: int = 2,
    batch: int = 10,
    **federation: Any,
) -> fedhm.Result:
    clients, test = data()
    settings = {
        "federation": {"participation": 1.0, "devices": list(devices), "reference_macs_per_second": 1e5, **federation},
        "train": {"rounds": rounds, "batch": batch, "lr": 0.05, "nested": 0},
        "method": method or {"name": "fedhm", "tiers": [1, "1/4"]},
        "engine": {"threads": 1, "server_threads": 1, "workers": 1},
    }
    return fedhm.run(blocks(), clients, test, settings, out, client_test=0.2)


def simulated(record: Record) -> Any:
    assert record.simulated is not None
    return record.simulated


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fleet") / "run"
    run(STRONG, WEAK, out=out, deadline=1.0, unfit="smallest", late="wait")
    return out


@pytest.mark.slow
def test_seconds_follow_from_macs_and_bytes(timed: Path) -> None:
    history = read_runs([timed])[0]
    tiers = history.config.federation.plan
    assert tiers[:2] == ("full", "full")
    assert tiers[2:] == ("1/4", "1/4")
    for record in history.records:
        for client, seconds in simulated(record).clients.items():
            cost = history.costs[tiers[client]]
            speed, down, up = (2, 2e6, 1e6) if client < 2 else (0.1, 2e4, 1e4)
            assert seconds.device == ("strong" if client < 2 else "weak")
            assert seconds.computation == pytest.approx(cost.macs * 16 / (1e5 * speed))
            assert seconds.down == pytest.approx(cost.bytes / down)
            assert seconds.up == pytest.approx(cost.bytes / up)
        assert simulated(record).seconds == max(s.total for s in simulated(record).clients.values())
    assert history.seconds_so_far() == [simulated(history.records[0]).seconds * n for n in (1, 2)]


def test_the_plan_is_kept_with_the_run_and_a_finished_run_resumes(timed: Path) -> None:
    before = read_runs([timed])[0].records
    assert read_config(timed).federation.plan == ("full", "full", "1/4", "1/4")
    with no_figures():
        again = run(STRONG, WEAK, out=timed, deadline=1.0, unfit="smallest", late="wait")
    assert read_runs([timed])[0].records == before
    assert len(again.records) == 2
    with pytest.raises(FedhmError, match="holds a run with other settings"):
        run(STRONG, {**WEAK, "speed": 0.2}, out=timed, deadline=1.0, unfit="smallest", late="wait")


def test_reports_tell_time_and_devices(timed: Path) -> None:
    text = (timed / "report.md").read_text()
    assert "simulated time by device" in text
    assert "device weak" in text
    assert (timed / "accuracy-by-time.png").exists()
    assert "simulated_seconds_so_far" in (timed / "report.csv").read_text().splitlines()[0]
    record = read_runs([timed])[0].records[-1]
    of_tier = record.clients["full"]
    assert list(of_tier.by_device) == ["strong", "weak"]
    assert sum(group.samples for group in of_tier.by_device.values()) == of_tier.overall.samples
    assert (timed / "accuracy-at-clients.png").exists()


def test_the_plot_of_clients_tells_devices_apart(timed: Path) -> None:
    history = read_runs([timed])[0]
    plot = client_plot(history, [history])
    assert plot is not None
    (axes,) = render_matplotlib([plot]).axes
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_title().get_text() == "clients with device, and their median"
    assert [text.get_text() for text in legend.get_texts()] == ["strong", "weak", "all samples of all clients"]
    markers = {legend_line.get_marker() for legend_line in legend.get_lines()[:2]}
    assert len(markers) == 2
    assert markers <= {line.get_marker() for line in axes.get_lines()}


def test_runs_without_devices_say_nothing_of_them() -> None:
    record = json.loads(run().records[-1].to_json())
    assert "simulated" not in record
    assert all("by_device" not in of_tier for of_tier in record["clients"].values())


def test_who_is_late_is_dropped_before_training() -> None:
    full = {"name": "fedavg"}
    with pytest.raises(FedhmError, match=r"device 'weak' takes .* s for a round of even tier full, and .* is 1 s"):
        run(STRONG, WEAK, deadline=1, method=full)
    record = run(STRONG, WEAK, deadline=1, unfit="smallest", method=full).records[-1]
    assert [entry["client"] for entry in record.dropped] == [2, 3]
    assert all(entry["reason"].startswith("late: its round takes") for entry in record.dropped)
    assert record.traffic["full"].clients == 2
    assert simulated(record).seconds == 1
    waited = run(STRONG, WEAK, deadline=1, unfit="smallest", late="wait", method=full).records[-1]
    assert not waited.dropped
    assert simulated(waited).seconds > 1


def test_who_fits_nothing_is_left_out_where_the_config_says_so() -> None:
    small = {**WEAK, "memory": "2kB"}
    with pytest.raises(FedhmError, match=r"device 'weak' can spare 2.00 kB, but training even tier 1/4 takes"):
        run(STRONG, small)
    record = run(STRONG, small, unfit="leave-out").records[-1]
    assert [p.tier for p in record.participants] == ["full", "full", "none", "none"]
    assert list(simulated(record).clients) == [0, 1]
    with pytest.raises(FedhmError, match="no client can train"):
        run({**STRONG, "memory": "2kB"}, small, unfit="leave-out")
    with pytest.raises(FedhmError, match="no client can train"):
        run(STRONG, WEAK, unfit="smallest", deadline=1e-6)


def test_a_tier_that_fits_with_checkpointing_only_is_trained_so_for_the_same_weights() -> None:
    sizes = {again: fedhm.training_memory(blocks(), (1, 1, DIM), 10, checkpointing=again) for again in (False, True)}
    assert sizes[True] < sizes[False]
    plain, saving = run(STRONG, WEAK), run(STRONG, {**WEAK, "memory": sizes[True]})
    assert {p.tier for p in plain.records[-1].participants} == {"full"}
    a, b = (result.records[-1] for result in (plain, saving))
    assert a.metrics == b.metrics
    assert a.participants == b.participants
    assert simulated(b).clients[3].computation == pytest.approx(simulated(a).clients[3].computation * 4 / 3)
    assert simulated(b).clients[0] == simulated(a).clients[0]


@pytest.mark.slow
def test_a_device_affords_the_tier_that_is_its_own_budget() -> None:
    """That tier trains in micro-batches, which the run's settings know nothing of."""
    small, batch = fedhm.training_memory(blocks(), (1, 1, DIM), 64, micro_batch=16, checkpointing=True), 64
    assert small < fedhm.training_memory(blocks(), (1, 1, DIM), batch, checkpointing=True)
    method = {"name": "fedhm", "tiers": [1, f"memory:{small}"]}
    record = run(STRONG, {**WEAK, "memory": small}, method=method, batch=batch).records[-1]
    assert [p.tier for p in record.participants] == ["full", "full", *[f"memory:{small}B"] * 2]
    with pytest.raises(FedhmError, match=r"device 'weak' can spare .* but training even tier memory"):
        run(STRONG, {**WEAK, "memory": small - 1}, method=method, batch=batch)


def test_devices_choose_widths_too() -> None:
    method = {"name": "heterofl", "tiers": [1, 0.5]}
    record = run(STRONG, WEAK, method=method, deadline=2.0).records[-1]
    assert [p.tier for p in record.participants] == ["full", "full", "w0.5", "w0.5"]


def profile(**changes: Any) -> DeviceProfile:
    steps = [Measurement(network=tier, macs=1000, seconds=s, memory=5000) for tier, s in (("full", 2.0), ("1/4", 0.5))]
    known = {
        "name": "p",
        "model": structure_digest(blocks(), (1, 1, DIM)),
        "described": "x",
        "machine": "m",
        "threads": 1,
    }
    return DeviceProfile(**{**known, "batch": 10, "optimizer": "sgd", "steps": steps, "up": 1e4, **changes})


@pytest.mark.slow
def test_a_device_file_gives_seconds_of_steps_and_memory(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    file.write_text(profile(memory=6000).model_dump_json())
    with no_figures():
        found = run({"name": "a", "share": 1, "file": str(file)}, deadline=2.0, out=tmp_path / "run").records[-1]
    seconds = simulated(found).clients[0]
    assert {p.tier for p in found.participants} == {"1/4"}
    assert seconds.computation == pytest.approx(0.5 * 16 / 10)
    file.unlink()  # the run has kept it
    assert read_config(tmp_path / "run").federation.devices[0].profile == profile(memory=6000)
    assert main(["report", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "0123"}, "measured with another model"),
        ({"batch": 20}, r"measured with train\.batch = 20, not 10"),
        ({"optimizer": "adamw"}, r"measured with train\.optimizer = adamw, not sgd"),
    ],
)
def test_a_device_file_of_something_else_is_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(profile(**changes).model_dump_json())
    with pytest.raises(FedhmError, match=sentence):
        run({"name": "a", "share": 1, "file": str(tmp_path / "d.json")})


def test_devices_do_not_go_with_samples_by_tier() -> None:
    config = fedhm.load_config("digits", ["data.partition=by-tier", 'federation.devices=[{name="a", share=1}]'])
    with pytest.raises(FedhmError, match=r"without federation\.devices: leave that empty"):
        fedhm.prepare(config)


def test_the_plan_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    devices = 'federation.devices=[{name="big", share=0.5}, {name="tiny", share=0.5, speed=0.001, up="1kbit"}]'
    assert main(["plan", "digits", "--set", devices, "federation.reference_macs_per_second=1e9"]) == 0
    shown = capsys.readouterr().out
    assert "big" in shown
    assert "tiny" in shown
    assert "←" in shown
    assert "any" in shown
    assert main(["plan", "digits", "--set", devices, "federation.deadline=0.01"]) == 1
    captured = capsys.readouterr()
    assert "Nothing fits" in captured.out
    assert "and federation.deadline is 0.01 s" in captured.err
    assert main(["plan", "digits"]) == 1
    assert "lists no devices" in capsys.readouterr().err


def test_a_fleet_is_planned_without_the_files_of_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDHM_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "cifar10-fleet", "--set", "federation.clients=4"]) == 0
    shown = capsys.readouterr().out
    assert "desktop" in shown
    assert "published size, 50,000 training samples" in shown
