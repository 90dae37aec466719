"""Files of a run's folder that are damaged, foreign or cannot be read are told apart, each in a sentence."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

import fedhm
from fedhm.errors import FedhmError
from fedhm.machine.seal import UNSEALED, read_sealed_json, seal, write_sealed_json
from fedhm.machine.tensors import read_tensors, write_tensors
from fedhm.methods.method import ModelState
from fedhm.report.sections import run_sections
from fedhm.report.tables import report_csv, report_markdown
from fedhm.runs.folder import RunFolder, read_costs, read_data_facts
from fedhm.runs.history import read_runs
from fedhm.runs.models import load_tier, save_tier
from fedhm.runs.rounds import Checkpoint, append_record, chain_line, newest_checkpoint, read_records, save_checkpoint
from fedhm.server.record import Record, Traffic
from fedhm.widths.wrappers import Ensemble
from fedhm.work.messages import Participant
from made_runs import eventful_run

RECORD = Record(1, [Participant(0, "full")], traffic={"full": Traffic(1, 1, 40, 40, 7, 0.5)})
DEEP = "[" * 100_000 + "]" * 100_000


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    append_record(file, RECORD)
    with file.open("a") as unfinished:
        unfinished.write(RECORD.to_json()[:50])
    assert read_records(file) == [RECORD]
    nan = Record(2, diagnostics={"kappa": float("inf")}, traffic={"full": Traffic(loss=float("nan"))})
    again = Record.from_json(nan.to_json())
    assert again.to_json() == nan.to_json()


def test_every_flipped_bit_in_records_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    append_record(file, RECORD, "run")
    append_record(file, replace(RECORD, round=2))
    content = file.read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            with pytest.raises(FedhmError):
                read_records(file, "run")


def chained(texts: Iterable[str], run: str = "") -> bytes:
    """Return lines whose digests are right, of any texts: only a program that knows the format writes these."""
    lines = []
    for text in texts:
        line, run = chain_line(text, run)
        lines.append(line + b"\n")
    return b"".join(lines)


def eventful_folder(path: Path) -> list[str]:
    """Leave the folder of a run of which there is much to tell, and return its records as JSON."""
    run = eventful_run()
    assert run.data is not None
    with RunFolder.create(path, run.config.resolved()) as folder:
        folder.save_costs(run.costs)
        folder.save_data_facts(run.data)
    return [record.to_json() for record in run.records]


@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_a_changed_record_with_a_right_digest_can_be_reported_on_or_is_refused(stride: int, tmp_path: Path) -> None:
    *before, last = eventful_folder(tmp_path / "run")
    refused = reported = 0
    for position in range(0, len(last), stride):
        changed = last[:position] + chr(ord(last[position]) ^ 1 << 2) + last[position + 1 :]
        try:
            (tmp_path / "run" / "records.jsonl").write_bytes(chained([*before, changed]))
            runs = read_runs([tmp_path / "run"])
        except (FedhmError, json.JSONDecodeError):
            refused += 1
            continue
        assert report_markdown(runs)
        assert report_csv(runs)
        assert run_sections(runs)
        reported += 1
    assert min(refused, reported) > 100 / stride


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '"metrics": {"full": {"accuracy"',
            '"metrics": {"full": {"accurbcy"',
            "does not have the accuracy of every model",
        ),
        ('"median": {"accuracy"', '"median": {"accurbcy"', "does not have the accuracy of every model"),
        ('"clients": {"full"', '"clients": {"fuml"', "round 3 of .* have other tiers: full"),
        ('"round": 3', '"round": 6', "line 3 of .* is the record of round 6, not of 3"),
        ('"client": 2, "tier": "1/4", "kind"', '"cliant": 2, "tier": "1/4", "kind"', "dropped.0: .*it names no client"),
    ],
)
def test_a_record_that_cannot_be_reported_on_is_one_sentence(old: str, new: str, said: str, tmp_path: Path) -> None:
    *before, last = eventful_folder(tmp_path / "run")
    assert old in last
    (tmp_path / "run" / "records.jsonl").write_bytes(chained([*before, last.replace(old, new, 1)]))
    with pytest.raises(FedhmError, match=said):
        read_runs([tmp_path / "run"])
    (tmp_path / "run" / "records.jsonl").write_bytes(chained([last]))
    with pytest.raises(FedhmError, match=r"line 1 of .* is the record of round 3, not of the first"):
        read_runs([tmp_path / "run"])


@pytest.mark.usefixtures("without_figures")
def test_a_damaged_record_is_one_sentence_where_a_run_goes_by_it(tmp_path: Path) -> None:
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    settings = {"train": {"rounds": 2}, "engine": {"threads": 1}, "method": "fedavg", "stop": {"patience": 5}}
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    fedhm.run(model, [(x, y)], (x, y), settings, out=tmp_path)
    file = tmp_path / "records.jsonl"
    file.write_text(file.read_text().replace('"accuracy"', '"accurbcy"', 1))
    with pytest.raises(FedhmError, match=r"line 1 of .* it was changed: its digest differs"):
        fedhm.run(model, [(x, y)], (x, y), settings, out=tmp_path)


@pytest.mark.parametrize(
    "line",
    [DEEP, "[]", "null", "{}", '{"round": "x"}', RECORD.to_json().replace("40", '"forty"'), "\udcff", "1" * 5000],
    ids=range(8),
)
def test_lines_that_are_no_records_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(os.fsencode(line) + b"\n")
    with pytest.raises(FedhmError, match=r"^line 1 of .* is not a round's record: .{,200}$"):
        read_records(tmp_path / "records.jsonl")


@pytest.mark.parametrize(
    "content", ["{}", "[]", "3", DEEP, '{"full": 3}', '{"full": {"parameters": "many"}}', "\udcff", ""], ids=range(8)
)
def test_costs_and_facts_that_are_none_are_refused(content: str, tmp_path: Path) -> None:
    for name, read in (("tiers.json", read_costs), ("data.json", read_data_facts)):
        (tmp_path / name).write_bytes(os.fsencode(content))
        with pytest.raises(FedhmError, match=rf"{name}.{{,200}}$"):
            read(tmp_path)


@pytest.mark.usefixtures("without_figures")
def test_tiers_of_another_run_are_noticed(tmp_path: Path) -> None:
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    settings = {"train": {"rounds": 1}, "engine": {"threads": 1}, "method": "fedavg"}
    fedhm.run(nn.Linear(4, 3), [(x, y)], (x, y), settings, out=tmp_path)
    table = read_sealed_json(tmp_path / "tiers.json")
    write_sealed_json(tmp_path / "tiers.json", {**table, "tiers": {"1/8": table["tiers"]["full"]}})
    with pytest.raises(FedhmError, match=r"tiers.json and round 1 of .* name other tiers: 1/8"):
        read_runs([tmp_path])


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "device-that-is-gone")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("spoil", [dangle, replace_by_folder, link_to_itself])
def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Checkpoint(1, ModelState({"a": torch.ones(1)})), "run")
    spoil(next(tmp_path.iterdir()))
    with pytest.raises(FedhmError, match=r"cannot be read \(.+\); it need not be damaged") as error:
        newest_checkpoint(tmp_path, "run", ModelState)
    assert "remove" not in str(error.value)


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, Checkpoint(1, ModelState({"a": torch.ones(1)})), "run")

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)  # whoever runs the tests may be allowed to read everything
    with pytest.raises(FedhmError, match=r"cannot be read \(Permission denied\); it need not be damaged"):
        newest_checkpoint(tmp_path, "run", ModelState)


def test_a_checkpoint_in_a_place_whose_name_is_no_text_is_not_called_damaged(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"bad\xff")
    save_checkpoint(folder, Checkpoint(1, ModelState({"a": torch.ones(1)})), "run")
    with pytest.raises(FedhmError, match=r"the name .*bad\\xff/round-000001.safetensors is not in UTF-8: rename it"):
        newest_checkpoint(folder, "run", ModelState)


@pytest.mark.parametrize(
    "header", [[], "text", 3, None, {"format": []}, json.loads("[" * 900 + "]" * 900)], ids=range(6)
)
def test_headers_that_are_no_mapping_of_ours_are_refused(header: Any, tmp_path: Path) -> None:
    path = tmp_path / "round-000001.safetensors"
    path.write_bytes(seal(save({"a": torch.ones(1)}, {"fedhm": json.dumps(header), "seal": UNSEALED})))
    with pytest.raises(FedhmError, match=r"is damaged|is not a checkpoint"):
        newest_checkpoint(tmp_path, "run", ModelState)
    with pytest.raises(FedhmError, match=r"cannot read|is not a tier's model"):
        load_tier(path, nn.Linear(4, 3))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": None},
        {"ranks": [1]},
        {"ranks": {"0": 10**9}},
        {"ranks": {"9": 1}},
        {"ranks": {"0": 1}, "form": "round"},
        {"sizes": []},
        {"sizes": {"0": 3}},
        {"sizes": {"0": [10**12, 10**12]}},
        {"sizes": {"0": [-1, 4]}},
        {"sizes": {"0": ["8", 4]}},
        {"members": 10**9},
        {"members": "2"},
        {"members": -1},
        {"hadamard": 3},
        {"hadamard": {"0": "x"}},
    ],
    ids=str,
)
def test_headers_of_tiers_that_describe_no_network_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    save_tier(tmp_path / "tier", model(), "full")
    tensors, header = read_tensors(tmp_path / "tier")
    write_tensors(tmp_path / "tier", tensors, {**header, **changes})
    with pytest.raises(FedhmError, match=r"^.{,400}$"):
        load_tier(tmp_path / "tier", model())


def test_an_ensemble_is_still_read(tmp_path: Path) -> None:
    save_tier(tmp_path / "tier", Ensemble(model() for _ in range(2)), "2x1")
    assert isinstance(load_tier(tmp_path / "tier", model()), Ensemble)
