"""Names that every system takes, folders that cannot be written, and what a user is told of them."""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhm.cli import main
from fedhm.errors import FedhmError
from fedhm.machine.files import check_file, check_file_names, check_folder, file_name, make_folder, os_error_sentence


@pytest.mark.parametrize(
    ("tier", "name"),
    [
        ("full", "full"),
        ("1/8", "1-8"),
        ("w0.62", "w0.62"),
        ("memory:5MB", "memory-5MB"),
        ("memory:5MB,bytes:1/8", "memory-5MB,bytes-1-8"),
        ('a\\b*c?d"e<f>g|h\n', "a-b-c-d-e-f-g-h-"),
        ("..", "_"),
        (".hidden", "_.hidden"),
        ("large. ", "large"),
        ("NUL", "_NUL"),
        ("com1.x", "_com1.x"),
        ("console", "console"),
        ("größte Stufe", "größte Stufe"),
    ],
)
def test_tiers_as_names_of_files(tier: str, name: str) -> None:
    assert file_name(tier) == name


@given(st.text(min_size=1, max_size=40))
def test_a_name_is_one_part_of_a_path_and_stays_as_it_is(name: str) -> None:
    found = file_name(name)
    assert found not in ("", ".", "..")
    assert Path(found).name == found
    assert not set(found) & set('/\\:*?"<>|')
    assert file_name(found) == found


def test_tiers_that_would_share_a_file_are_refused() -> None:
    check_file_names(["full", "1/8", "memory:5MB", "1/8"])
    with pytest.raises(FedhmError, match="the tiers '1/8' and '1:8' would share a file"):
        check_file_names(["full", "1/8", "1:8"])
    with pytest.raises(FedhmError, match="would share a file"):
        check_file_names(["Large", "large"])


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below" / "it"):
        for refuse in (check_folder, make_folder):
            with pytest.raises(FedhmError, match=rf"cannot make the folder {path}: {file} is a file; choose another"):
                refuse(path)
    with pytest.raises(FedhmError, match=r"cannot make the folder .*: file name too long"):
        make_folder(tmp_path / ("x" * 300))
    with pytest.raises(FedhmError, match=f"cannot write the file {tmp_path}: it is a folder"):
        check_file(tmp_path)
    check_file(tmp_path / "new" / "file.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # looking makes nothing
    make_folder(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_a_folder_that_may_not_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # whoever runs the tests may be root, who may do everything
    with pytest.raises(FedhmError, match=f"cannot write into the folder {tmp_path}: permission denied"):
        check_folder(tmp_path / "new")


def test_what_the_system_refuses_is_said_without_its_number() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/runs/mine/records.jsonl.tmp")
    assert os_error_sentence(full) == "cannot read or write /runs/mine/records.jsonl: no space left on device"
    assert os_error_sentence(OSError("odd")) == "cannot go on: odd"


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "digits", "--out", "FILE"],
        ["run", "digits", "--out", "FILE/below"],
        ["report", ".", "--out", "FILE"],
        ["export", ".", "--out", "FILE"],
        ["compare", "digits", "--out", "FILE"],
    ],
)
def test_a_place_that_is_a_file_is_refused_before_anything_is_done(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main([argument.replace("FILE", str(file)) for argument in arguments]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("fedhm: cannot make the folder ")
    assert f"{file} is a file" in said.err
    assert said.out == ""


def test_a_device_file_below_a_file_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["profile", "digits", "--out", f"{tmp_path}/file/device.json"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"fedhm: cannot make the folder {tmp_path}/file: {tmp_path}/file is a file")
    assert said.out == ""
