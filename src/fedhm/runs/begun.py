"""What a run's folder states of the run: its settings, and which versions of this library began and resumed it.

Settings that came up later are not stated there. They are read as what the library did before it had them, which each
section knows (`Section.as_before`), and are no part of what identifies the run.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedhm.config.reading import parse_begun, read_text
from fedhm.config.settings import Config, ResolvedConfig
from fedhm.errors import FedhmError
from fedhm.machine.files import check_name, write_atomically

FILE = "config.toml"
_SIGNATURE = re.compile(r"^# fedhm (\S+) ", re.MULTILINE)


@dataclass(frozen=True)
class Begun:
    config: ResolvedConfig
    stated: Mapping[str, Any]  # the settings that the folder states, by section
    versions: tuple[str, ...]  # that began and resumed the run; none: one from before they were written

    @property
    def remark(self) -> str:
        """Return, for a sentence that refuses the folder, which other version wrote it; nothing if it was this one."""
        return _remark(self.versions)

    def settled(self, given: Config) -> Config:
        """Return settings in which all that the folder does not state, and nobody has set, is as it was before."""
        changes: dict[str, Any] = {}
        for name in Config.model_fields:
            old, new = getattr(self.config, name), getattr(given, name)
            if type(old) is not type(new) or not hasattr(new, "as_before"):
                continue
            kept = {
                key: getattr(old, key)
                for key, field in type(new).model_fields.items()
                if key not in self.stated.get(name, ())
                and getattr(new, key) == field.get_default(call_default_factory=True)
            }
            changes[name] = new.model_copy(update=kept)
        return given.model_copy(update=changes)

    def difference(self, given: Config) -> str:
        """Return the first setting that makes it another run, as part of a sentence; empty if there is none."""
        old, new = self.config.without_place().dotted(), given.without_place().dotted()
        for key in (*new, *old):
            if old.get(key) != new.get(key):
                return f"{key} = {old.get(key, 'nothing')}, not {new.get(key, 'nothing')}"
        return ""


def read_begun(path: Path) -> Begun:
    """Read what the folder of a run states."""
    check_name(path)
    file = path / FILE
    if not file.exists():
        raise FedhmError(f"{path} is not the folder of a run: {_what_is_there(path)}")
    text = read_text(file)
    versions = tuple(_SIGNATURE.findall(text))
    try:
        return Begun(*parse_begun(text, str(file)), versions)
    except FedhmError as error:
        raise FedhmError(f"{error}{_remark(versions)}") from None


def _what_is_there(path: Path) -> str:
    if not path.exists():
        return "there is no such folder"
    if not path.is_dir():
        return "it is a file"
    within = min(path.glob(f"*/{FILE}"), default=None)
    return f"there is no {FILE} in it" if within is None else f"it holds runs, of which name one: {within.parent}"


def write_begun(path: Path, config: ResolvedConfig) -> None:
    """Write the settings of a run that this version begins."""
    write_atomically(path / FILE, f"# fedhm {version('fedhm')} began this run\n{config.to_toml()}")


def note_resumed(path: Path, begun: Begun, done: int) -> None:
    """Note in a run's folder that this version resumes it, if another one wrote the rounds before."""
    if begun.versions[-1:] != (version("fedhm"),):
        text = read_text(path / FILE)
        signatures = [match.end() for match in _SIGNATURE.finditer(text)]
        end = text.find("\n", signatures[-1]) + 1 if signatures else 0
        note = f"# fedhm {version('fedhm')} resumed it after round {done}\n"
        write_atomically(path / FILE, text[:end] + note + text[end:])


def _remark(versions: tuple[str, ...]) -> str:
    own = version("fedhm")
    if versions[-1:] == (own,):
        return ""
    writer = f"fedhm {versions[-1]}" if versions else "an earlier version of fedhm, which did not sign it"
    return f" (the folder was written by {writer}, this is fedhm {own})"
