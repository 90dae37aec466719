"""`fedhm.run` shows in a terminal how far it is, on stderr, and writes nothing anywhere else."""

import io
import os
import sys
import threading
from typing import Any

import pytest

import fedhm
from small import small_federation, small_model
from tiny_transformers import needs_peft, tiny_bert

SETTINGS: dict[str, Any] = {"train": {"rounds": 2}, "engine": {"workers": 1, "threads": 1}}


class Terminal:
    """A terminal in place of stderr, and all that was written to it; made in a test: pytest sets stderr before each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        self._master, slave = os.openpty()
        self._stream = os.fdopen(slave, "w")
        self._found: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)  # a test that fails does not wait for it
        self._reader.start()
        monkeypatch.setattr(sys, "stderr", self._stream)

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 4096):
                self._found.append(data)
        except OSError:  # nobody writes any more
            return

    def text(self) -> str:
        self._stream.close()
        self._reader.join()
        os.close(self._master)
        return b"".join(self._found).decode()


def run(**more: Any) -> fedhm.Result:
    federation = small_federation()
    clients = [(each.inputs, each.labels) for each in federation.clients]
    return fedhm.run(small_model(), clients, clients[0], SETTINGS, **more)


def test_rounds_are_shown_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(monkeypatch)
    run()
    shown = terminal.text()
    assert "round" in shown
    assert "2/2" in shown
    assert capsys.readouterr().out == ""


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    assert capsys.readouterr() == ("", "")


def test_nothing_is_shown_in_a_terminal_if_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    run(progress=False)
    assert terminal.text() == ""


def test_where_there_is_no_terminal_there_is_a_line_for_each_round_if_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    run(progress=True)
    lines = [line.partition("  ")[0].strip() for line in written.getvalue().splitlines()]
    assert lines == ["tier full", "tier 1/2", "tier 1/4", "tier 1/8", "round 1/2", "round 2/2"]


@pytest.mark.slow
@needs_peft
def test_tokenizing_is_shown_over_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    others = {f"word{number}": number for number in range(5, 40)}  # as many as the model has
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "card": 2, "rent": 3, "rain": 4, **others}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    client = (["card", "rent", "rain"] * 4, [0, 1, 2] * 4)
    method = {"name": "lora", "ranks": [2, 1]}
    terminal = Terminal(monkeypatch)
    fedhm.run(tiny_bert(), [client, client], client, SETTINGS | {"method": method}, tokenizer=tokenizer)
    shown = terminal.text()
    assert "tokenizing" in shown
    assert "36/36" in shown
    assert shown.index("36/36") < shown.index("round")
