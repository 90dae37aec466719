"""`fedhm presets` lists and shows the presets, `fedhm init` writes a config file to start from."""

import argparse
from importlib import resources
from pathlib import Path

from fedhm.cli.options import Verbs, print_text
from fedhm.config.presets import presets, unknown_preset
from fedhm.errors import FedhmError
from fedhm.machine.files import check_file, os_error_reason
from fedhm.machine.printable import quoted_command


def add_presets(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "presets",
        help="list the presets, or show one",
        description="List the presets. With a name, print that preset: 'fedhm presets digits > mine.toml' copies it.",
    )
    parser.add_argument("name", nargs="?", metavar="PRESET", help="the preset to show (default: list all)")
    parser.set_defaults(action=show_presets, imports="")


def show_presets(options: argparse.Namespace) -> None:
    known = presets()
    if options.name is None:
        print_text("".join(f"{name:24}{text.splitlines()[0].removeprefix('# ')}\n" for name, text in known.items()))
    elif options.name in known:
        print_text(known[options.name])
    else:
        raise FedhmError(unknown_preset(options.name))


def add_init(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "init",
        help="write a config file to start from",
        description="Write a config file with the common settings, their defaults and what they do. It runs as it is.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.set_defaults(action=init, imports="")


def init(options: argparse.Namespace) -> None:
    path: Path = options.file
    if path.suffix != ".toml":
        raise FedhmError(f"the name of a config file ends in .toml: {quoted_command('fedhm', 'init', f'{path}.toml')}")
    check_file(path)
    text = resources.files("fedhm.config").joinpath("starter.toml").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("mine.toml", path.name))
    except FileExistsError:
        raise FedhmError(f"{path} exists already: name another file, or remove it first") from None
    except OSError as error:
        raise FedhmError(f"cannot write {path}: {os_error_reason(error)}") from None
    print(f"{path} is written: {quoted_command('fedhm', 'run', path)} runs it")
