"""Every command in README and docs can be typed as it stands, and works in the environment of an installed wheel."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from doc_commands import Command, all_commands, check, commands, forms, gaps, pages

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_commands_can_be_written_like_that(page: Path) -> None:
    wrong = {str(command): said for command in commands(page) if (said := check(command, ROOT))}
    assert not wrong


def test_no_command_installs_fedhm_from_an_index() -> None:
    for path in [*pages(ROOT), *sorted((ROOT / "src").rglob("*.py"))]:
        assert "pip install 'fedhm" not in path.read_text(), path


def test_every_command_is_run_or_has_a_reason_why_not() -> None:
    assert not gaps(all_commands(ROOT), ROOT)


def found_in(text: str, folder: Path) -> list[Command]:
    (folder / "page.md").write_text(text)
    return list(commands(folder / "page.md"))


def test_a_wrong_command_is_found(tmp_path: Path) -> None:
    lines = ["fedhm rnu digits", "fedhm run digitz", "fedhm run digits --set train.lrr=1  # why", "make coffee"]
    lines += ["fedhm compare digits --methods fedhm,fedhn", "python nowhere.py", "pip install '.[flowers]'"]
    lines += ["python benchmarks/scale.py --clientz 3", "python benchmarks/convolution_code.py --batch 3"]
    lines += ["python benchmarks/agreement.py --json", "PYTHONPATH=tests python -m torture --minutes long"]
    lines += ["flwr fly examples/flower-app", "flwr run examples/flower-app --streams", "flwr run examples/flower-apps"]
    lines += ["flower-superlink --ports 80", "flower-supernode --superlink", "docker run fedhm"]
    found = found_in("```sh\n" + "\n".join(lines) + "\n```\nand `fedhm resume DIR --from ROUNDS`\n", tmp_path)
    assert len(found) == len(lines) + 1
    assert not [command for command in found if not check(command, ROOT)]


def test_a_right_command_is_found_to_be_so(tmp_path: Path) -> None:
    lines = ["fedhm run digits \\\n  --set train.lr=0.5 && fedhm report runs/*"]
    lines += ["openssl x509 -in ca.crt", "tensorboard --logdir a"]
    lines += ["FLWR_HOME=a/b flwr run examples/flower-app ours --stream", "flower-superlink --port 80 \\\n  --insecure"]
    lines += ["python benchmarks/scale.py --clients 3", "PYTHONPATH=tests python -m torture --minutes 1"]
    block = "```\n" + "\n".join(lines) + "\n```\n"
    sentence = "`fedhm resume DIR --from ROUND`, of `fedhm run` with `--set`, or `make docs`\n"
    drawing = "```\nconfig ─► fedhm run\n```\n"
    found = found_in(f"{block}\n{sentence}\n{drawing}", tmp_path)
    assert [command.arguments[0] for command in found[:2]] == ["run", "report"]
    assert [command.program for command in found[2:5]] == ["openssl", "tensorboard", "flwr"]
    assert [" ".join(command.words) for command in found[-2:]] == ["fedhm resume DIR --from 1", "make docs"]
    assert len(found) == len(lines) + 3
    assert not [(command, said) for command in found if (said := check(command, ROOT))]


def test_a_command_that_nothing_is_run_for_is_found(tmp_path: Path) -> None:
    found = found_in("```\nfedhm run digits\nfedhm check-device cpu\nflwr login ours\nnginx -t\n```\n", tmp_path)
    exceptions = {"flwr *": "needs a SuperLink", "fedhm check-device": "minutes", "nginx -t": "tests/test_nowhere.py"}
    assert gaps(found, ROOT, exceptions) == {
        "page.md: fedhm check-device cpu": "has no short form, and is not in EXCEPTIONS",
        "fedhm check-device": "is no longer in the docs",
        "nginx -t": "is said to be tested by tests/test_nowhere.py, which is not there",
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run([*command, "-w", str(folder), str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("fedhm-*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = {line.removeprefix("src/") for line in listed.splitlines() if (ROOT / line).exists()}
    assert "fedhm/__init__.py" in files
    assert not files - set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_work_where_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In an environment with the wheel and, from this one, the packages that it needs; in an empty folder."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    (own,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # behind the wheel's own; an editable fedhm there is not seen, since its own .pth file is not read
    (own / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "COLUMNS": "120"}
    environment |= {"FEDHM_DATA": str(tmp_path / "data")}
    # commands of the wheel's environment first; those of packages, such as tensorboard, are only here
    environment["PATH"] = os.pathsep.join([str(python.parent), sysconfig.get_path("scripts"), os.environ["PATH"]])
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

    assert str(own) in run(str(python), "-c", "import importlib.util as u; print(u.find_spec('fedhm').origin)")
    assert "digits" in run(str(python.with_name("fedhm")), "presets")
    said = run(str(python), str(ROOT / "tests" / "doc_commands.py"), str(ROOT))
    assert len(re.findall(r"^ *\d+\.\d s  ", said, flags=re.MULTILINE)) == len(forms(all_commands(ROOT), ROOT))
    assert " 0 wrong" in said
