"""Seals notice every changed bit, and files are only read and written where they should be."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhm.machine.files import read_regular, write_atomically
from fedhm.machine.seal import (
    UNSEALED,
    check_checksum,
    read_checksums,
    read_sealed,
    read_sealed_json,
    seal,
    seal_again,
    write_checksums,
    write_sealed_json,
)
from fedhm.machine.tensors import read_tensors, write_tensors


def test_a_sealed_table_comes_back(tmp_path: Path) -> None:
    write_sealed_json(tmp_path / "table.json", {"a": 1, "b": [2.5, "ü"]})
    assert read_sealed_json(tmp_path / "table.json") == {"a": 1, "b": [2.5, "ü"]}


def test_every_flipped_bit_of_a_sealed_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    write_sealed_json(file, {"accuracy": 0.6873, "tier": "1/8"})
    intact = file.read_bytes()
    for position in range(len(intact)):
        for bit in range(8):
            damaged = bytearray(intact)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"its checksum differs|it has no checksum"):
                read_sealed(file)


def test_every_flipped_bit_of_a_file_of_tensors_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    write_tensors(file, {"w": torch.ones(3)}, {"format": "x"})
    intact = file.read_bytes()
    for position in range(len(intact)):
        for bit in range(8):
            damaged = bytearray(intact)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"checksum|deserializing header"):
                read_tensors(file)


@given(before=st.binary(max_size=200), after=st.binary(max_size=200))
def test_any_content_with_room_for_a_seal_can_be_sealed_again(before: bytes, after: bytes) -> None:
    content = before + UNSEALED.encode() + after
    sealed = seal(content)
    assert len(sealed) == len(content)
    assert seal_again(sealed) == sealed


def test_a_file_without_a_seal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text("{}")
    with pytest.raises(ValueError, match="it has no checksum"):
        read_sealed_json(tmp_path / "plain.json")


def test_checksums_of_files_that_have_no_room_for_a_seal(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n")
    write_checksums(tmp_path / "sums.json", [tmp_path / "a.csv"])
    (digest,) = read_checksums(tmp_path / "sums.json").sha256.values()
    check_checksum(tmp_path / "a.csv", digest)
    (tmp_path / "a.csv").write_text("1,3\n")
    with pytest.raises(ValueError, match="its checksum differs"):
        check_checksum(tmp_path / "a.csv", digest)


def test_a_temporary_file_does_not_follow_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "file.tmp").symlink_to(victim)
    write_atomically(tmp_path / "file", "new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "file").read_text() == "new"
    assert not (tmp_path / "file").is_symlink()


def test_a_left_over_temporary_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_text("half of it, from a killed process")
    write_atomically(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory") as error:
            read_regular(tmp_path / name)
        assert error.value.errno in (errno.EINVAL, errno.EISDIR)
