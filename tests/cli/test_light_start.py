"""A command line is answered before anything heavy is imported, and Ctrl-C meanwhile is no traceback."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from pkgutil import resolve_name

import pytest

import fedhm
import forked
from fedhm.cli.parser import make_parser

HEAVY = ("torch", "numpy", "matplotlib", "sklearn", "pydantic", "rich", "flwr", "PIL", "safetensors")
SOURCE = Path(fedhm.__file__).parent

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


def test_every_verb_has_a_function() -> None:
    named = re.findall(r'verb="([^"]+)"', (SOURCE / "cli" / "parser.py").read_text())
    assert len(named) >= 7
    for name in named:
        assert callable(resolve_name(name))
    assert make_parser().parse_args(["presets"]).verb in named


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
