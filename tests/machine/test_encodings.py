"""Any terminal's encoding works, and files are in UTF-8 whatever it is."""

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedhm
from fedhm.machine.printable import accept_any_text
from fedhm.machine.process import utf8_output

ROOT = Path(fedhm.__file__).parents[2]
BARE = {"LC_ALL": "POSIX", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # Python is left with ASCII
TERMINALS = {
    **{name: {"PYTHONIOENCODING": name} for name in ("latin-1", "ascii", "cp1252", "utf-16", "ascii:strict")},
    "C": {"LANG": "C"},
    "POSIX": {"LC_ALL": "POSIX"},
    "bare": BARE,
}
QUICK = [
    *("train.rounds=1", "federation.clients=4", "evaluation.every=1", "privacy.clip=1", "privacy.noise=1"),
    *("train.frozen_statistics=true", "train.masked_loss=false", "method.aggregate=updates"),
]


def fedhm_in(terminal: dict[str, str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run the command line with these variables, and return its exit code and what it printed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    done = subprocess.run(
        [sys.executable, "-m", "fedhm", *arguments], capture_output=True, env=variables | terminal, check=False
    )
    encoding = terminal.get("PYTHONIOENCODING", "utf-8").partition(":")[0]
    return done.returncode, done.stdout.decode(encoding), done.stderr.decode(encoding)


@pytest.mark.slow
@pytest.mark.parametrize("name", TERMINALS)
def test_help_presets_and_errors_are_printed_in_any_terminal(name: str) -> None:
    code, presets, errors = fedhm_in(TERMINALS[name], "presets")
    assert (code, errors) == (0, "")
    assert "cifar10-resnet10" in presets
    for arguments in (["--help"], ["run", "--help"], ["paper"]):
        code, shown, errors = fedhm_in(TERMINALS[name], *arguments)
        assert (code, errors) == (0, "")
        assert len(shown) > 100
    code, _, errors = fedhm_in(TERMINALS[name], "run", "é…→")
    assert code == 1
    assert errors.startswith("fedhm: there is no preset '")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latin-1", "ascii", "utf-16", "bare"])
def test_a_run_is_printed_in_any_terminal_and_its_files_are_in_utf8(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, shown, errors = fedhm_in(TERMINALS[name], "run", "digits", "--set", *QUICK, "--out", out)
    assert (code, errors) == (0, "")
    assert "reading digits" in shown
    assert "round 1/1" in shown
    for file in ("report.md", "report.csv", "report.html", "config.toml", "records.jsonl"):
        assert (out / file).read_text(encoding="utf-8")
    assert "ε = " in (out / "report.md").read_text(encoding="utf-8")
    code, shown, errors = fedhm_in(TERMINALS[name], "report", out)
    assert (code, errors) == (0, "")
    assert "accuracy" in shown


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ascii", "utf-16"])
def test_a_process_that_fails_in_a_comparison_is_understood(name: str, tmp_path: Path) -> None:
    comparing = ["compare", "digits", "--methods", "fedhm", "--seeds", "1", "--out", tmp_path / "c"]
    code, _, errors = fedhm_in(TERMINALS[name], *comparing, "--set", "train.rounds=1", "train.lr=1e30")
    assert code == 1
    assert "Traceback" not in errors
    assert "train.lr" in errors or "learning rate" in errors


def test_only_a_stream_that_would_raise_is_changed() -> None:
    strict, careful = (io.TextIOWrapper(io.BytesIO(), "ascii", errors) for errors in ("strict", "backslashreplace"))
    accept_any_text(strict, careful, io.StringIO(), None)
    for stream in (strict, careful):
        stream.write("a…\udce9")
        stream.flush()
    assert [each.buffer.getvalue() for each in (strict, careful)] == [b"a??", b"a\\u2026\\udce9"]  # type: ignore[attr-defined]


def test_processes_that_are_read_print_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-16")
    printed = subprocess.run([sys.executable, "-c", "print('…')"], capture_output=True, env=utf8_output(), check=True)
    assert printed.stdout.decode("utf-8").strip() == "…"


@pytest.mark.parametrize("file", [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")], ids=str)
def test_no_file_is_read_or_written_in_the_encoding_of_the_terminal(file: Path) -> None:
    wrong = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {word.arg for word in node.keywords}
        if name in ("read_text", "write_text") and isinstance(node.func, ast.Attribute):
            wrong += [node.lineno] if "encoding" not in given else []
        elif name in ("run", "Popen"):
            wrong += [node.lineno] if {"text", "universal_newlines"} & given else []
        elif name in ("open", "fdopen"):
            modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            textual = any(set(mode) <= set("rwax+t") for mode in modes)
            wrong += [node.lineno] if textual and "encoding" not in given else []
    assert not wrong, f"{file}: say encoding= in lines {wrong}"
