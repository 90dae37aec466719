"""Every command in README and docs can be typed as it stands, and works in the environment of an installed wheel."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from doc_commands import check, commands, pages, short_forms

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_commands_can_be_written_like_that(page: Path) -> None:
    wrong = {str(command): said for command in commands(page) if (said := check(command, ROOT))}
    assert not wrong


def test_no_command_installs_fedhm_from_an_index() -> None:
    for path in [*pages(ROOT), *sorted((ROOT / "src").rglob("*.py"))]:
        assert "pip install 'fedhm" not in path.read_text(), path


def test_a_wrong_command_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    lines = ["fedhm rnu digits", "fedhm run digitz", "fedhm run digits --set train.lrr=1  # why", "make coffee"]
    lines += ["fedhm compare digits --methods fedhm,fedhn", "python nowhere.py", "pip install '.[flowers]'"]
    page.write_text("```sh\n" + "\n".join(lines) + "\n```\nand `fedhm resume DIR --from ROUNDS`\n")
    found = list(commands(page))
    assert len(found) == len(lines) + 1
    assert all(check(command, ROOT) for command in found)
    page.write_text(
        "```\nfedhm run digits \\\n  --set train.lr=0.5 && fedhm report runs/*\n```\n`fedhm resume DIR --from ROUND`\n"
    )
    found = list(commands(page))
    assert [command.words[1] for command in found] == ["run", "report", "resume"]
    assert not any(check(command, ROOT) for command in found)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(ROOT)]
    if importlib.util.find_spec("hatchling"):
        command.append("--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("building a wheel needs hatchling, installed or from a package index")
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("fedhm-*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = {line.removeprefix("src/") for line in listed.splitlines() if (ROOT / line).exists()}
    assert not files - set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_work_where_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In an environment with the wheel and, from this one, the packages that it needs; in an empty folder."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    (own,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # behind the wheel's own; an editable fedhm there is not seen, since its own .pth file is not read
    (own / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FEDHM_DATA")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "COLUMNS": "120"}
    (tmp_path / "empty").mkdir()

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=tmp_path / "empty",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    assert str(own) in run(str(python), "-c", "import fedhm; print(fedhm.__file__)")
    assert "digits" in run(str(python.with_name("fedhm")), "presets")
    said = run(str(python), str(ROOT / "tests" / "doc_commands.py"), str(ROOT))
    assert said.count(" s  fedhm ") >= len(short_forms())
    assert " 0 wrong" in said
