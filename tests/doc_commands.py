"""The commands of README and docs: found, read by their own parsers, and run as they stand or in a short form.

`python doc_commands.py ROOT` does all of it in an empty folder, with the fedhm that this Python has installed.
"""

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

STAND_FOR = {"N": "1", "ROUND": "1", "PORT": "80", "PRESET": "digits", "CONFIG": "digits", "FILE.toml": "mine.toml"}
SHELL = ("", "sh", "bash", "console", "shell")  # languages of blocks with commands
BLOCKS = re.compile(r"^ *```([\w-]*)\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
FLOWER = ("flwr", "flower-superlink", "flower-supernode")
AS_THEY_STAND = ("openssl", "ssh-keygen", "printf", "mkdir", ".")  # run by the shell
OTHERS = ("fedhm", "make", "pip", "python", "python3", "git", "cd", "export", "nginx", "tensorboard")
PROGRAMS = (*OTHERS, *FLOWER, *AS_THEY_STAND)

# a run of a second
SHORT = ["train.rounds=1", "train.epochs=1", "train.milestones=[]", "model.width=0.25", "federation.clients=8"]
SHORT += ["data.train_samples=200", "evaluation.every=1", "checkpoints.keep=all", "engine.threads=1"]
ALWAYS_SHORT = ("train.rounds", "train.epochs", "train.milestones", "data.train_samples")  # whatever a command says
NARROW = ["model.width=0.125"]
FILLED = {  # options that some of a verb's commands have: with them, more are the same
    "export": {"--tier": ["1/8"], "--to": ["torch"]},
    "fit": {"--memory": ["128MB"], "--bytes": ["5MB"]},
    "profile": {"--out": ["board.json"], "--memory": ["64MB"], "--up": ["2Mbit"], "--down": ["10Mbit"]},
}

CIFAR = "hours of training on CIFAR: tests/compare/test_compare_command.py, on small data"
TEXTS = "needs texts and a pretrained transformer: tests/adapters/test_text_run.py, with small ones"
QUICK = "minutes or hours: tests/benchmarks/test_quick.py, with --quick"
FEDERATION = "needs other terminals, with a federation in them: tests/flower/test_deployment.py"
SIMULATION = "starts Flower's processes, which takes half a minute: tests/flower/test_simulation.py"
CLIENTS = "half a minute: tests/ondevice/test_runtime_clients.py"
PAPER = "hours of training on CIFAR: tests/paper/test_paper_command.py, on small data"
WHEEL = "tests/test_doc_commands.py builds and installs the wheel"
# Commands that nothing is run for. An asterisk at the end stands for any further words, or none.
EXCEPTIONS = {
    "fedhm compare cifar10-fleet *": CIFAR,
    "fedhm compare cifar10-resnet10 *": CIFAR,
    "fedhm compare cifar10-resnet18": CIFAR,
    "fedhm compare cifar10-tiers *": CIFAR,
    "fedhm compare cifar100-tiers *": CIFAR,
    "fedhm paper table2": PAPER,
    "fedhm paper table2 --data cifar10 *": PAPER,
    "fedhm paper table2 --scale small": PAPER,
    "fedhm paper table8 --scale small *": PAPER,
    "fedhm compare clinc150-lora *": TEXTS,
    "fedhm run clinc150-lora *": TEXTS,
    "fedhm sizes clinc150-lora *": TEXTS,
    "fedhm check-device *": "minutes on a device: tests/engines/on_device.py, with --quick",
    'fedhm run cifar10-resnet18 --set engine.devices=["cuda:0","cuda:1"]': "needs two GPUs",
    "fedhm export digits --tier 1/8 --to executorch --train": "as that of a run: tests/ondevice/test_phone_client.py",
    "fedhm run digits --set engine.client=executorch": CLIENTS,
    "fedhm run digits --set method.start=whole train.rounds=10 evaluation.every=1 engine.workers=1 "
    "engine.client=executorch": CLIENTS,
    "fedhm flower up *": "runs until Ctrl-C, in a terminal of its own: tests/flower/test_up.py",
    "fedhm run digits --set engine.name=flower engine.superlink=federation *": FEDERATION,
    "fedhm run digits --set engine.name=flower": SIMULATION,
    "fedhm run digits --set engine.name=flower train.rounds=1 *": SIMULATION,
    "flower-superlink *": FEDERATION,
    "flower-supernode *": FEDERATION,
    "flwr supernode *": FEDERATION,
    "flwr run APP ours": FEDERATION,
    "flwr run examples/flower-app *": "starts Flower's processes: tests/flower/test_example_app.py",
    "FLWR_HOME=federation/flower flwr run examples/flower-app *": FEDERATION,
    "nginx *": "needs nginx and a SuperLink: tests/flower/test_proxy.py",
    "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1": "sets variables in the reader's shell",
    "git clone URL fedhm": "URL is wherever the repository is published",
    "cd fedhm": "the checkout is there already",
    "pip wheel --no-deps -w dist .": WHEEL,
    "pip install -c constraints.txt dist/fedhm-*.whl": WHEEL,
    "pip install -c constraints.txt fedhm-*.whl": WHEEL,
    "pip install -c constraints.txt torch --index-url *": "needs the network",
    "python -m pytest *": "these are tests of the same suite",
    "PYTHONPATH=tests python -m torture *": "minutes: tests/torture/test_torture.py",
    "PYTHONPATH=src:tests python tests/engines/device_counts.py": "its counts are tests/engines/on_device.py's, too",
    "python examples/phone_client.py *": "needs files of a server: tests/ondevice/test_phone_client.py",
    "python benchmarks/agreement.py *": QUICK,
    "python benchmarks/architectures.py *": "needs EfficientNet's weights: tests/benchmarks/test_architectures.py",
    "python benchmarks/attacks.py *": QUICK,
    "python benchmarks/convolution_code.py": QUICK,
    "python benchmarks/engine.py *": QUICK,
    "python benchmarks/export_speed.py": QUICK,
    "python benchmarks/factorize_minilm.py *": "needs texts and MiniLM: tests/lowrank/test_minilm.py, without texts",
    "python benchmarks/layer_ranks.py *": QUICK,
    "python benchmarks/lora_intents.py *": TEXTS,
    "python benchmarks/lora_server.py *": "minutes: tests/benchmarks/test_quick.py, with two clients",
    "python benchmarks/lora_shakespeare.py *": TEXTS,
    "python benchmarks/memory.py": QUICK,
    "python benchmarks/privacy.py": QUICK,
    "python benchmarks/privacy_audit.py *": QUICK,
    "python benchmarks/scale.py *": QUICK,
    "python benchmarks/server_round.py *": QUICK,
    "python benchmarks/stress.py *": QUICK,
    "python benchmarks/tiers.py *": QUICK,
}


@dataclass(frozen=True)
class Command:
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.text))

    @property
    def program(self) -> str:
        return self._parts[0]

    @property
    def arguments(self) -> list[str]:
        return self._parts[1:]

    @property
    def _parts(self) -> list[str]:
        """Leave out variables of the environment before the program."""
        words = list(self.words)
        while re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        return words


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "CONTRIBUTING.md",
            *sorted((root / "examples").glob("*/README.md"))]  # fmt: skip


def all_commands(root: Path) -> list[Command]:
    return [command for page in pages(root) for command in commands(page)]


def commands(page: Path) -> Iterator[Command]:
    """Yield every line of a page's shell blocks, and the commands within sentences that have arguments."""
    text = page.read_text(encoding="utf-8")
    for language, block in BLOCKS.findall(text):
        lines = [line.strip().removeprefix("$ ").removeprefix("! ") for line in block.replace("\\\n", " ").splitlines()]
        variables: dict[str, str] = {}
        if language in SHELL and any(_begins_with_a_program(line) for line in lines):  # else a drawing, or a file
            for line in lines:
                line = re.sub(r"(^|\s)#\s.*", "", line).strip()
                line = re.sub(r"\$(\w+)", lambda found: variables.get(found[1], found[0]), line)  # noqa: B023
                if assigned := re.fullmatch(r'(\w+)="([^"]*)"', line):
                    variables[assigned[1]] = assigned[2]
                elif line:
                    yield from (Command(page.name, part) for part in re.split(r" (?:&&|;|\|) ", line))
    for paragraph in re.split(r"\n\s*\n", BLOCKS.sub("", text)):  # a stray backtick ends with its paragraph
        for line in re.findall(r"`([^`]+)`", paragraph):
            if _begins_with_a_program(line) and "…" not in line and _has_arguments(Command(page.name, line)):
                verb = Command(page.name, line).arguments[0]
                yield Command(page.name, shlex.join(_example(word, verb) for word in shlex.split(line, comments=True)))


def _begins_with_a_program(line: str) -> bool:
    found = re.match(r"(?:[A-Z_]+=\S+ )*(\S+)\s+\S", line)
    return found is not None and found[1] in PROGRAMS


def _has_arguments(command: Command) -> bool:
    """Tell a command of a sentence from the mere name of a command, or of one of its options."""
    named = {"fedhm": 1, "flwr": 1}.get(command.program, 0)
    arguments = command.arguments
    return len(arguments) > named and not arguments[-1].startswith("-") and arguments != ["flower", "up"]


def _example(word: str, verb: str) -> str:
    """Return a word with a value in place of what stands for one."""
    values = STAND_FOR | {"NAME": "table2" if verb == "paper" else "cifar10"}
    values |= {"CONFIG": "cifar10-fleet"} if verb == "plan" else {}
    return values.get(word) or re.sub(r"(?<![\w/])[A-Z]+$", lambda found: values.get(found[0], found[0]), word)


def check(command: Command, root: Path) -> str:
    """Return what is wrong with a command; empty if nothing is. Nothing is run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what scripts import
        match command.program:
            case "fedhm":
                return _wrong_with_fedhm(command.arguments)
            case "make":
                return _wrong_with_make(command.arguments, root)
            case "pip":
                return _wrong_with_pip(command, root)
            case "python" | "python3":
                return _wrong_with_script(command.arguments, root)
            case "flwr" | "flower-superlink" | "flower-supernode":
                return _wrong_with_flower(command.program, command.arguments, root)
            case program:
                return "" if program in PROGRAMS else f"'{program}' is no program that the tests of the docs know"


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


def _wrong_with_make(words: list[str], root: Path) -> str:
    targets = re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE)
    unknown = [word for word in words if "=" not in word and word not in targets]
    return f"make has no target {unknown[0]}" if unknown else ""


def _wrong_with_pip(command: Command, root: Path) -> str:
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [extra for found in re.findall(r"\[([\w,-]+)\]", command.text) for extra in found.split(",")]
    return next((f"there is no extra '{extra}'" for extra in named if extra not in extras), "")


def _wrong_with_script(words: list[str], root: Path) -> str:
    """Let a script read its command line, and stop it before it does anything else."""
    files = [word for word in words if word.endswith((".py", ".txt")) and "*" not in word]
    if missing := [file for file in files if not (root / file).exists()]:
        return f"there is no file {missing[0]}"
    script, is_module = (words[1], True) if words[0] == "-m" else (words[0], False)
    if is_module and script in ("venv", "pytest"):
        return ""
    path = root / "tests" / script / "__main__.py" if is_module else root / script
    if "parse_args(" not in path.read_text() and " arguments(" not in path.read_text():  # that of benchmarks/measure.py
        return f"{script} takes no options" if words[1:] else ""
    said, before, path_before = io.StringIO(), sys.argv, sys.path.copy()
    sys.argv = [str(path), *words[2 if is_module else 1 :]]
    sys.path.insert(0, str(path.parents[1 if is_module else 0]))
    try:
        with _stop_after_parsing(), contextlib.redirect_stderr(said), contextlib.suppress(_ParsedError):
            runpy.run_path(str(path), run_name="__main__")
            return f"{script} has read no command line"
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    finally:
        sys.argv, sys.path[:] = before, path_before
    return ""


class _ParsedError(Exception):
    pass


@contextlib.contextmanager
def _stop_after_parsing() -> Iterator[None]:
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser) -> None:
        parse_args(parser)
        raise _ParsedError

    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]


def _wrong_with_flower(program: str, words: list[str], root: Path) -> str:
    import click
    from flwr.cli.app import typer_click_object
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    if missing := [word for word in words if word.startswith("examples/") and not (root / word).exists()]:
        return f"there is no folder {missing[0]}"
    said = io.StringIO()
    try:
        if program == "flwr":
            verb: click.Command | None = typer_click_object
            while isinstance(verb, click.Group):
                verb = verb.commands.get(words.pop(0))
            if verb is None:
                return "flwr has no such command"
            verb.make_context(verb.name, words)
        else:
            parser = _parse_args_run_superlink() if program == "flower-superlink" else _parse_args_run_supernode()
            with contextlib.redirect_stderr(said):
                parser.parse_args(words)
    except click.ClickException as error:
        return error.format_message()
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    return ""


@dataclass(frozen=True)
class Form:
    """What is run for a command: it as it stands, or a version of it that takes seconds."""

    words: tuple[str, ...]
    code: int = 0
    folder: Path | None = None  # None: the empty one
    trained_only: bool = False  # without a folder and its report, which takes longer than a short run

    def __str__(self) -> str:
        return shlex.join(self.words)


def short_form(command: Command, root: Path) -> Form | None:
    """Return what is run for a command; None if nothing is."""
    words = command.arguments
    match command.program, words[:1]:
        case "fedhm", _:
            return _short_fedhm(words)
        case "make", _:
            return Form(("make", "--dry-run", *words), folder=root)
        case "pip", ["install"]:
            # all extras at once, with what is installed: do versions of constraints.txt satisfy them?
            offline = ("--dry-run", "--no-index", "--no-build-isolation", "--quiet")
            return Form(("python", "-m", "pip", "install", *offline, "-c", "constraints.txt", ".[dev]"), folder=root)
        case "python3", ["-m"] if words[1:] == ["venv", ".venv"]:
            return Form(("python3", "-m", "venv", "--without-pip", ".venv"))
        case "python", ["benchmarks/phases.py"]:
            return Form(("python", str(root / words[0]), "runs/mine"))
        case "tensorboard", _:
            return Form(("tensorboard", *words, "--inspect"))  # instead of serving
        case program, _ if program in AS_THEY_STAND:
            return Form(("sh", "-c", command.text))
    return None


def _short_fedhm(words: Sequence[str]) -> Form | None:
    options = _options(["runs/mine" if word == "DIR" else word for word in words])
    verb, *named = options[""]
    settings = options.pop("--set", [])
    trained_only = False
    match verb:
        case "presets" | "init" | "plan" | "verify" | "report" | "watch":
            pass
        case "data":
            return Form(("fedhm", *words), code=1)  # there is no network: a sentence says what to put where
        case "run":
            options[""] = [verb, _at_hand(named[0])]
            resumed = options.get("--out") == ["runs/mine"]
            settings = _shortened(settings, *(["train.rounds=2"] if resumed else []))
            # without --out, other commands read only the folder of plain `fedhm run digits`, and what a tracker writes
            unread = settings != SHORT and not any(setting.startswith("tracking.") for setting in settings)
            trained_only = unread and options[""] == ["run", "digits"] and "--out" not in options
        case "resume":
            options |= {name: ["3" if name == "--rounds" else "1"] for name in options} | {"": [verb, "runs/mine"]}
        case "compare" if "--runs" not in options:
            _shorten_comparison(options, settings)
            settings = _shortened(settings)
        case "paper":
            options |= {"--scale": ["small"], "--methods": ["fedhm-paper"]} if "--estimate" in options else {}
        case "sizes":
            settings = [*settings, *NARROW]
        case "fit":
            options = FILLED[verb] | options | {"": [verb, _at_hand(named[0])]}
            settings = [*settings, *NARROW]
        case "profile":
            options = FILLED[verb] | options | {"": [verb, _at_hand(named[0])]}
            settings = [*settings, *NARROW, "train.batch=2", 'method.tiers=["1/8"]']
        case "export":
            is_run = named[0].startswith("runs/")
            options = FILLED[verb] | options | {"": [verb, "runs/mine" if is_run else named[0]]}
            options |= {"--to": ["onnx"]} if "--card" in options else {}  # the others take seconds more
            settings = [] if is_run else [*settings, *NARROW]
        case "compare":  # with --runs
            pass
        case _:
            return None
    options |= {"--set": settings} if settings else {}
    found = ("fedhm", *(word for name in sorted(options) for word in (name, *options[name]) if word))
    return Form(found, trained_only=trained_only)


def _shorten_comparison(options: dict[str, list[str]], settings: Sequence[str]) -> None:
    """Compare two methods by a run each, which are shared; or one method, if a command sets anything else."""
    special = ["--set"] if any(_key(setting) not in ALWAYS_SHORT for setting in settings) else []
    special += [name for name in ("--tune", "--model", "--data", "--setting") if name in options]
    methods = ",".join(options.get("--methods", ["fedhm"])).split(",")
    if tuned := options.get("--tune"):
        options["--tune"] = [",".join(tuned[0].split(",")[:2])]
    options |= {"": ["compare", "digits"], "--seeds": ["1"], "--jobs": ["1"]}
    options |= {"--methods": methods[:1] if special else ["fedhm,heterofl"]}
    options |= {"--out": ["runs/compared" + "".join(name.removeprefix("-") for name in special)]}


def _options(words: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of each option; those before all options have the name ''."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
        found.setdefault(name, []).extend([] if word == name else [word])
    return found


def _at_hand(config: str) -> str:
    """Return digits, whose samples everybody has, in place of presets that need a download."""
    return config if config.endswith(".toml") or config == "diabetes" else "digits"


def _shortened(settings: Sequence[str], *more: str) -> list[str]:
    """Return the settings, without those that make a run long, and with SHORT."""
    own = {setting for setting in settings if setting not in SHORT and _key(setting) not in ALWAYS_SHORT} | {*more}
    fixed = {_key(setting) for setting in own}
    return [*sorted(own), *(setting for setting in SHORT if _key(setting) not in fixed)]


def _key(setting: str) -> str:
    return setting.partition("=")[0]


def exception_of(command: Command, exceptions: Mapping[str, str] = EXCEPTIONS) -> str | None:
    """Return the entry of the table that a command falls under."""
    words = " ".join(command.words)
    for entry in exceptions:
        beginning = entry.removesuffix(" *")
        if words == beginning or (beginning != entry and words.startswith(f"{beginning} ")):
            return entry
    return None


def gaps(found: Sequence[Command], root: Path, exceptions: Mapping[str, str] = EXCEPTIONS) -> dict[str, str]:
    """Return the commands that nothing is run for, and exceptions that no command needs."""
    entries = {command: exception_of(command, exceptions) for command in found}
    wrong = {
        str(command): "has no short form, and is not in EXCEPTIONS"
        for command, entry in entries.items()
        if entry is None and short_form(command, root) is None
    }
    wrong |= {entry: "is no longer in the docs" for entry in exceptions if entry not in entries.values()}
    for entry, reason in exceptions.items():
        if missing := [path for path in re.findall(r"tests/[\w/]+\.py", reason) if not (root / path).exists()]:
            wrong[entry] = f"is said to be tested by {missing[0]}, which is not there"
    return wrong


def forms(found: Sequence[Command], root: Path) -> list[Form]:
    """Return all that is run, each once, in the order of a first hour. What a run needs comes before it."""
    wanted = [Form(("fedhm", "init", "mine.toml"))]
    for command in found:
        if exception_of(command) is None and (form := short_form(command, root)):
            wanted += [*_compared_runs(command), form]
    wanted += [
        Form(("openssl", "verify", "-x509_strict", "-CAfile", "ca.crt", "server.pem")),  # made by the docs' commands
        Form(("fedhm", "run", "cifar10-quick"), code=1),  # a sentence says how to get its data
    ]
    taken: set[str] = set()
    unique: list[Form] = []
    for form in dict.fromkeys(wanted):
        if form.words[:2] == ("fedhm", "run") and "--out" in form.words:  # pages call different runs by the same name
            place = form.words.index("--out") + 1
            free = next(name for n in range(len(wanted)) if (name := f"{form.words[place]}{-n or ''}") not in taken)
            form = replace(form, words=(*form.words[:place], free, *form.words[place + 1 :]))
            taken.add(free)
        unique.append(form)
    order = ("init", "run", "resume")
    return sorted(unique, key=lambda f: order.index(f.words[1]) if f.words[1] in order else len(order))


def _compared_runs(command: Command) -> Iterator[Form]:
    """Yield the runs that `fedhm compare --runs` names: runs/NAME-seedN is one of the method NAME."""
    names: list[str] = []
    for folder in _options(command.arguments).get("--runs", []) if command.program == "fedhm" else []:
        name, _, seed = folder.partition("-seed")
        names += [] if name in names else [name]
        method = ("fedhm", "fedavg", "heterofl")[names.index(name)]
        settings = _shortened([f"method.name={method}", f"seed={seed or 0}"])
        yield Form(("fedhm", "run", "digits", "--out", folder, "--set", *settings))


def make_own_model(root: Path) -> None:
    """Write my_model.py, which a page tells of."""
    (function,) = re.findall(
        r"^def make_model\(.*?\n(?:    .*\n)+", (root / "docs/extending.md").read_text(), flags=re.M
    )
    Path("my_model.py").write_text(f"from torch import nn\n\n\n{function}")


def run_all(root: Path) -> None:
    """Check all commands of fedhm, and run all forms in this folder, which should be empty."""
    found = all_commands(root)
    wrong = {str(c): said for c in found if c.program == "fedhm" and (said := check(c, root))} | gaps(found, root)
    make_own_model(root)
    done = forms(found, root)
    for form in done:
        began = sum(os.times()[:4])  # of the processor, also by processes below
        said = _run(form)
        print(f"{sum(os.times()[:4]) - began:5.1f} s  {form}", flush=True)
        wrong |= {str(form): said} if said else {}
    for command, said in wrong.items():
        print(f"WRONG {command}\n      {said}")
    excepted = sum(exception_of(command) is not None for command in found)
    print(f"{len(found)} commands, {excepted} of them exceptions; {len(done)} short forms were run, {len(wrong)} wrong")
    sys.exit(bool(wrong))


def _run(form: Form) -> str:
    """Return what went wrong; empty if nothing did."""
    if form.words[0] == "fedhm":
        return _run_here(form)
    done = subprocess.run(form.words, cwd=form.folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == form.code else f"exit code {done.returncode}: {done.stdout}{done.stderr}"


def _run_here(form: Form) -> str:
    """Run `fedhm` in this process, which has imported PyTorch already."""
    from fedhm import load_config, prepare
    from fedhm.cli import main
    from fedhm.errors import FedhmError

    if form.trained_only:
        options = _options(form.words[2:])
        try:
            return "" if prepare(load_config(options[""][0], options["--set"])).run().metrics else "it has no metrics"
        except FedhmError as error:
            return str(error)
    words = [str(each) for word in form.words[1:] for each in (sorted(Path().glob(word)) if "*" in word else [word])]
    if words[0] == "watch":  # Ctrl-C, once its page is there
        threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            got: object = main(words)
        except SystemExit as error:  # of the parser
            got = error.code
    if got == form.code and (out.getvalue() or err.getvalue()) and "Traceback" not in err.getvalue():
        return ""
    return f"exit code {got}: {out.getvalue()[-300:]}{err.getvalue()}"


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
