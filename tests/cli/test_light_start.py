"""A command line is answered before anything heavy is imported, and Ctrl-C meanwhile is no traceback."""

import argparse
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

import forked
from fedhm.cli import make_parser

HEAVY = ("torch", "numpy", "matplotlib", "sklearn", "pydantic", "rich", "flwr", "PIL", "safetensors")

AFTERWARDS = """
import sys, time
began = time.perf_counter()
from fedhm.cli import main
try:
    code = main(sys.argv[2:])
except SystemExit as exit:
    code = exit.code
took = time.perf_counter() - began
with open(sys.argv[1], "w") as file:
    print(code or 0, f"{took:.3f}", *(module for module in sys.modules if "." not in module), file=file)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("presets", 0),
        ("compare --help", 0),
        ("paper", 0),
        ("paper tabel2", 1),
        ("run --sett a=1", 2),
        ("rnu", 2),
        ("", 2),
    ],
)
def test_nothing_heavy_is_imported_to_answer(arguments: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", AFTERWARDS, str(tmp_path / "said"), *arguments.split()]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = os.times()  # of the processor, so that a busy machine does not count
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.5
    got, seconds, *modules = (tmp_path / "said").read_text().split()
    print(f"fedhm {arguments}: {seconds} s")
    assert int(got) == code
    assert done.stdout if code == 0 else done.stderr
    assert not {*HEAVY} & {*modules}


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import sys, fedhm; dir(fedhm); print([m for m in {HEAVY} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_modules_called_like_public_functions_do_not_hide_them() -> None:
    code = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "fedhm"]:
    del sys.modules[name]
import fedhm.run, fedhm.measure.cost, fedhm
print(callable(fedhm.run), callable(fedhm.measure))
"""
    assert forked.code(code).stdout == "True True\n"


def verbs_of(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of all verbs, and of verbs of verbs."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [found for group in groups for verb in group.choices.values() for found in verbs_of(verb)] or [parser]


def test_every_verb_has_an_action_and_a_module_to_import() -> None:
    verbs = verbs_of(make_parser())
    assert len(verbs) >= 12
    for verb in verbs:
        assert callable(verb.get_default("action"))
        assert not verb.get_default("imports") or import_module(verb.get_default("imports"))


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_during_imports_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    # whoever swallows the exception in an import, as some of torch's own imports do, does not keep the process alive
    (tmp_path / "torch" / "__init__.py").write_text(
        "import time\ntry:\n    print('importing', flush=True); time.sleep(60)\nexcept BaseException:\n    pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "fedhm", "sizes", "digits"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "importing\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert time.monotonic() - began < 30
        assert process.stderr.read() == "\nfedhm: stopped\n"
