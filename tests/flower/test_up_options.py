import socket
import sys
from pathlib import Path

import pytest

from fedhm.cli import main, make_parser
from fedhm.flower.deployment import _node_configs
from fedhm.machine.extras import how_to_install


def test_clients_get_tiers_or_memory_in_turn() -> None:
    assert _node_configs(3, ["full", "1/4"], None) == [
        'partition-id=0 num-partitions=3 tier="full"',
        'partition-id=1 num-partitions=3 tier="1/4"',
        'partition-id=2 num-partitions=3 tier="full"',
    ]
    assert _node_configs(1, None, ["512"]) == ["partition-id=0 num-partitions=1 memory=512"]
    assert _node_configs(1, None, None) == ["partition-id=0 num-partitions=1"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--clients", "0"], "--clients takes a whole number from 1 to 1000, not '0'"),
        (["--clients", "many"], "--clients takes a whole number from 1 to 1000, not 'many'"),
        (["--port", "99999"], "--port takes a whole number from 1 to 65535, not '99999'"),
        (["--memory", "512", "-3"], "--memory takes a whole number from 1 to 2147483648, not '-3'"),
        (["--tiers", 'a" b'], "--tiers takes names of tiers such as full or 1/4, not 'a\" b'"),
        (["--tiers", "full", "--memory", "5"], "--tiers and --memory exclude each other: "),
    ],
)
def test_wrong_options_are_one_sentence(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flower", "up", "--folder", str(tmp_path / "new"), *options]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"fedhm: {sentence}")
    assert said.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_taken_port_or_an_impossible_folder_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["flower", "up", "--folder", str(tmp_path / "new"), "--port", port]) == 1
    assert capsys.readouterr().err == f"fedhm: port {port} cannot be used: Address already in use\n"
    (tmp_path / "file").write_text("")
    assert main(["flower", "up", "--folder", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.startswith(f"fedhm: cannot make the folder {tmp_path / 'file'}: ")


def test_without_flower_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert main(["flower", "up", "--folder", str(tmp_path / "new")]) == 1
    assert capsys.readouterr().err == f"fedhm: Flower is not installed: {how_to_install('flower')}\n"


def test_the_first_lines_say_what_to_type_in_another_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["flower", "up", "--clients", "3", "--folder", "file/x"]) == 1
    first, *commands = capsys.readouterr().out.splitlines()[:3]
    assert "needs this terminal until Ctrl-C" in first
    assert "in another terminal" in first
    assert commands[0] == f"  cd {tmp_path}"
    assert commands[1].endswith("engine.name=flower engine.superlink=file/x federation.clients=3")
    assert make_parser().parse_args(commands[1].split()[1:]).action
