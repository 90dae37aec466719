"""The commands in README and docs: found, checked, and run in a short form. The last two also in a wheel's environment.

`python doc_commands.py ROOT` checks and runs all commands with the fedhm that this Python has installed.
"""

import contextlib
import io
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STAND_FOR = {"N": "1", "ROUND": "1", "PORT": "80", "PRESET": "digits", "CONFIG": "digits"}
SHELL = ("", "sh", "bash", "console", "shell")  # languages of blocks with commands
# a run of a second
SHORT = ["train.rounds=2", "train.epochs=1", "train.milestones=[]", "model.width=0.25", "federation.clients=8"]
SHORT += ["data.train_samples=200", "evaluation.every=1", "checkpoints.keep=all", "engine.threads=1"]


@dataclass(frozen=True)
class Command:
    page: str
    line: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "CONTRIBUTING.md",
            *sorted((root / "examples").glob("*/README.md"))]  # fmt: skip


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page's shell blocks, and `fedhm` with its options within sentences."""
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^ *```([\w-]*)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE):
        variables: dict[str, str] = {}
        for line in block.replace("\\\n", " ").splitlines() if language in SHELL else ():
            line = line.strip().removeprefix("$ ").removeprefix("! ")
            if re.match(r"(fedhm|python3?|pip|make) ", line) and "…" not in line.partition("  #")[0]:
                line = re.sub(r"\$(\w+)", lambda found: variables.get(found[1], found[0]), line)  # noqa: B023
                for part in re.split(r" (?:&&|;|\|) ", line):
                    yield Command(page.name, line, tuple(shlex.split(part, comments=True)))
            elif assigned := re.match(r'(\w+)="([^"]*)"', line):
                variables[assigned[1]] = assigned[2]
    for line in re.findall(r"`(fedhm [^`…]+)`", text):
        words = shlex.split(line.partition("  #")[0])
        words = [_example(word, words[1]) for word in words]
        if len(words) > 2 and not words[-1].startswith("--") and words[1:] != ["flower", "up"]:
            yield Command(page.name, line, tuple(words))


def _example(word: str, verb: str) -> str:
    """Return a word with a value in place of what stands for one."""
    values = {**STAND_FOR, "NAME": "table2" if verb == "paper" else "cifar10"}
    return re.sub(r"(?<![\w/])[A-Z]+$", lambda found: values.get(found[0], found[0]), word)


def check(command: Command, root: Path) -> str:
    """Return what is wrong with a command; empty if nothing is."""
    program, *words = command.words
    if program == "fedhm":
        return _wrong_with_fedhm(words)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE)
        unknown = [word for word in words if "=" not in word and word not in targets]
        return f"make has no target {unknown[0]}" if unknown else ""
    if program == "pip":
        text = (root / "pyproject.toml").read_text()
        extras = re.findall(r"^([\w-]+) = \[", text.partition("[project.optional-dependencies]")[2], flags=re.MULTILINE)
        named = [extra for found in re.findall(r"\[([\w,-]+)\]", command.line) for extra in found.split(",")]
        return next((f"there is no extra '{extra}'" for extra in named if extra not in extras), "")
    files = [word for word in words if word.endswith((".py", ".txt")) and "*" not in word]
    return next((f"there is no file {file}" for file in files if not (root / file).exists()), "")


def _wrong_with_fedhm(words: list[str]) -> str:
    from fedhm.cli import make_parser
    from fedhm.compare.select import known_names
    from fedhm.config.loading import load_config
    from fedhm.errors import FedhmError

    if "--help" in words or "--version" in words:
        return ""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = make_parser().parse_args(words)
        config = getattr(options, "config", None)
        if config and Path(config).name != "mine.toml":  # a user's own
            load_config(config, options.changes).resolved()
        if getattr(options, "methods", None) and words[0] == "compare":
            unknown = [name for name in options.methods.split(",") if name.partition(":")[0] not in known_names()]
            return f"there is no method {unknown[0]}" if unknown else ""
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except FedhmError as error:
        return str(error)
    return ""


def short_forms() -> list[tuple[int, list[str]]]:
    """Return commands that take seconds, with their exit codes: every verb once, in the order of a first hour."""
    return [
        (0, ["presets"]),
        (0, ["presets", "digits"]),
        (0, ["init", "mine.toml"]),
        (0, ["sizes", "digits"]),
        (0, ["fit", "digits", "--memory", "128MB"]),
        (0, ["plan", "cifar10-fleet"]),
        (0, ["paper"]),
        (0, ["run", "mine.toml", "--out", "runs/mine", "--set", *SHORT]),
        (0, ["resume", "runs/mine", "--from", "1"]),
        (0, ["verify", "runs/mine"]),
        (0, ["watch", "runs/mine"]),
        (0, ["export", "runs/mine", "--tier", "1/8", "--to", "torch"]),
        (0, ["compare", "digits", "--methods", "fedhm,fedavg", "--seeds", "1", "--jobs", "1", "--set", *SHORT]),
        (0, ["report", "runs/*"]),
        (0, ["profile", "digits", "--set", 'method.tiers=["1/8"]', "train.batch=2", "model.width=0.25"]),
        (1, ["run", "cifar10-quick"]),  # its data is missing: a sentence says how to get it
        (1, ["data", "cifar10"]),  # there is no network: a sentence says what to put where
    ]


UNTRIED = {"check-device", "flower"}  # take minutes, or a terminal of their own; other tests run them


def run_all(root: Path) -> None:
    """Check all commands, and run the short forms in this folder, which should be empty."""
    found = [command for page in pages(root) for command in commands(page)]
    wrong = {str(command): said for command in found if (said := check(command, root))}
    verbs = {command.words[1] for command in found if command.words[0] == "fedhm"}
    forms = short_forms()
    wrong |= {f"fedhm {verb}": "has no short form to run" for verb in verbs - {w[0] for _, w in forms} - UNTRIED}
    for code, words in forms:
        wrong |= _run(code, words)
    for config, changes in sorted({_settings(command) for command in found} - {None}):
        wrong |= _train(config, list(changes))
    for command, said in wrong.items():
        print(f"WRONG {command}\n      {said}")
    print(f"{len(found)} commands of {len({command.page for command in found})} pages, {len(wrong)} wrong")
    sys.exit(bool(wrong))


def _settings(command: Command) -> "tuple[str, tuple[str, ...]] | None":
    """Return preset and settings of a run on data that everybody has, which needs nothing else."""
    from fedhm.cli import make_parser

    if command.words[:2] != ("fedhm", "run") or "--help" in command.words:
        return None
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        options = make_parser().parse_args(command.words[1:])
        others = any(change.startswith(("engine.", "tracking.")) for change in options.changes)
        if options.config in ("digits", "diabetes") and options.changes and not others:
            return options.config, tuple(options.changes)
    return None


def _train(config: str, changes: list[str]) -> dict[str, str]:
    from fedhm import load_config, prepare
    from fedhm.errors import FedhmError

    fixed = {change.partition("=")[0] for change in changes} - {"train.rounds", "train.epochs", "train.milestones"}
    short = [change for change in SHORT if change.partition("=")[0] not in fixed]
    began = time.monotonic()
    try:
        prepare(load_config(config, [*changes, *short])).run()
    except FedhmError as error:
        return {f"fedhm run {config} --set {' '.join(changes)}": str(error)}
    print(f"{time.monotonic() - began:5.1f} s  fedhm run {config} --set {' '.join(changes)}", flush=True)
    return {}


def _run(code: int, words: list[str]) -> dict[str, str]:
    from fedhm.cli import main

    expanded = [str(each) for word in words for each in (sorted(Path().glob(word)) if "*" in word else [word])]
    if words[0] == "watch":  # Ctrl-C, once its page is there
        threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began, out, err = time.monotonic(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        got = main(expanded)
    print(f"{time.monotonic() - began:5.1f} s  fedhm {shlex.join(words)}", flush=True)
    if got == code and (out.getvalue() or err.getvalue()) and "Traceback" not in err.getvalue():
        return {}
    return {f"fedhm {shlex.join(words)}": f"exit code {got}: {err.getvalue()}"}


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
