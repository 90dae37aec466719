"""`fedhm data` fetches a data set from Hugging Face into the layout that the library reads."""

import argparse
from pathlib import Path

from fedhm.cli.options import Verbs, terminal
from fedhm.config.presets import presets
from fedhm.errors import FedhmError

DESCRIPTION = """\
Fetches cifar10, cifar100, fashion-mnist or tinyimagenet from Hugging Face, checks it, and writes it in the layout that
presets read. The folder holds either all of it or none of it. What was downloaded stays in the cache of the package
datasets, so the same command resumes after an interruption."""


def add_data(verbs: Verbs) -> None:
    parser = verbs.add_parser("data", help="fetch a data set from Hugging Face", description=DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="cifar10, cifar100, fashion-mnist or tinyimagenet")
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="default: data/NAME, or FEDHM_DATA/NAME, where runs look for it",
    )
    parser.add_argument(
        "--from",
        dest="source",
        default="",
        metavar="SOURCE",
        help="another data set of Hugging Face with the same images, or a folder of parquet files",
    )
    parser.set_defaults(action=fetch_data, imports="fedhm.data.fetch")


def fetch_data(options: argparse.Namespace) -> None:
    from difflib import get_close_matches

    from fedhm.data.fetch import FETCHED, fetch
    from fedhm.data.sources import SOURCES, default_folder
    from fedhm.machine.printable import quoted_command

    name: str = options.name
    if name in SOURCES and name not in FETCHED:
        raise FedhmError(f"{name} comes with the package scikit-learn: there is nothing to fetch")
    if name not in FETCHED:
        near = get_close_matches(name.lower(), FETCHED, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "known are " + ", ".join(FETCHED)
        raise FedhmError(f"there is no data set '{name}' to fetch: {hint}")
    console = terminal()

    def say(sentence: str) -> None:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    folder = options.to or default_folder(name)
    fetch(name, folder, options.source, say)
    place = [] if folder == default_folder(name) else ["--set", f"data.folder={folder}"]
    say(f"{quoted_command('fedhm', 'run', _preset_for(name), *place)} uses it")


def _preset_for(name: str) -> str:
    """Return a preset that uses a data set, a quick one if there is one."""
    fitting = [preset for preset, text in presets().items() if f'source = "{name}"' in text]
    return next((preset for preset in fitting if preset.endswith("-quick")), fitting[0])
