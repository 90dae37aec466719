"""The notebooks in examples/notebooks run from top to bottom, and are kept without outputs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
BEGINNING = """
import subprocess
import matplotlib

matplotlib.use("Agg")


def shell(command):
    subprocess.run(command, shell=True, check=True)


"""


def _cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def _as_python(source: str) -> str:
    """Return a cell as plain Python: a line that begins with `!` is a command of the shell, as in Jupyter."""
    return re.sub(r"^!((?:.*\\\n)*.*)$", lambda found: f"shell({found[1]!r})", source, flags=re.MULTILINE)


def test_there_are_three() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["compare_methods", "fleet_to_onnx", "own_model"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_no_outputs_are_kept(notebook: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in _cells(notebook, "code"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_it_runs(notebook: Path, tmp_path: Path) -> None:
    program = tmp_path / f"{notebook.stem}.py"
    blocks = [_as_python("".join(cell["source"])) for cell in _cells(notebook, "code")]
    program.write_text(BEGINNING + "\n\n".join(blocks))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
