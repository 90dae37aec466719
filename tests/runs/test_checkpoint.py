"""Checkpoints come back bit for bit; damaged and foreign ones are told apart."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.machine.tensors import write_tensors
from fedhm.methods.method import ModelState, State
from fedhm.networks.exchange import Tensors
from fedhm.runs.rounds import Checkpoint, newest_checkpoint, save_checkpoint


@dataclass(frozen=True)
class Memory(State):
    weights: Tensors
    memory: dict[str, Tensor]


def state(seed: int = 0) -> Memory:
    torch.manual_seed(seed)
    weights = {"a.weight": torch.randn(4, 3).to(memory_format=torch.contiguous_format), "b": torch.tensor(1.5)}
    memory = {"a/left": torch.randn(4, 2), "half": torch.randn(3).bfloat16()}
    return Memory(weights, memory, diagnostics={"kappa_uv": 0.1})


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Checkpoint(7, state()), "run")
    found = newest_checkpoint(tmp_path, "run", Memory)
    assert found is not None
    assert found.round == 7
    assert found.state.diagnostics == {"kappa_uv": 0.1}
    for part in ("weights", "memory"):
        old, new = getattr(state(), part), getattr(found.state, part)
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) and old[name].dtype == new[name].dtype for name in old)


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none", "run", Memory) is None
    for number in range(8, 12):
        save_checkpoint(tmp_path, Checkpoint(number, state(number)), "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-000010.safetensors",
        "round-000011.safetensors",
    ]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Checkpoint(1, state()), "run")
    path = next(tmp_path.iterdir())
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x01
        path.write_bytes(damaged)
        if content[position : position + 1] == b" ":
            continue  # between the entries of a header, and at its end, a space means nothing
        with pytest.raises(FedhmError, match=r"is damaged|is not a checkpoint"):
            newest_checkpoint(tmp_path, "run", Memory)


@pytest.mark.parametrize("length", [0, 5, 200])
def test_a_cut_file_is_noticed_and_the_way_out_said(tmp_path: Path, length: int) -> None:
    save_checkpoint(tmp_path, Checkpoint(1, state()), "run")
    save_checkpoint(tmp_path, Checkpoint(2, state()), "run")
    path = max(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(FedhmError, match=r"is damaged(.|\n)*remove it to resume from the one before"):
        newest_checkpoint(tmp_path, "run", Memory)
    path.unlink()
    found = newest_checkpoint(tmp_path, "run", Memory)
    assert found is not None
    assert found.round == 1


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Checkpoint(1, state()), "another")
    with pytest.raises(FedhmError, match="belongs to another run"):
        newest_checkpoint(tmp_path, "run", Memory)
    save_file({"x": torch.ones(1)}, tmp_path / "round-000009.safetensors")
    with pytest.raises(FedhmError, match="is not a checkpoint of this library"):
        newest_checkpoint(tmp_path, "run", Memory)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "round-000003.safetensors", {"weights/a": torch.ones(1)}, {"format": "fedhm-checkpoint-1"})
    with pytest.raises(FedhmError, match="is not a checkpoint of this library"):
        newest_checkpoint(tmp_path, "run", Memory)


def test_a_state_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Checkpoint(1, ModelState({"a": torch.ones(1)})), "run")
    with pytest.raises(FedhmError, match="holds the state of another version of the method"):
        newest_checkpoint(tmp_path, "run", Memory)
