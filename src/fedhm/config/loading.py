"""Reads settings from presets and TOML files. Errors are sentences."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fedhm.config.presets import presets, unknown_preset
from fedhm.config.registry import Group, UnknownNameError, find
from fedhm.config.schema import Config, ResolvedConfig
from fedhm.config.section import Section
from fedhm.errors import FedhmError
from fedhm.machine.files import read_regular
from fedhm.machine.printable import quoted_command

LONGEST = 120  # characters of a value in an error


def load_config(name: str, changes: Iterable[str] = ()) -> Config:
    """Read the config of a preset or a TOML file, with `section.key=value` changes applied."""
    known = presets()
    if name in known:
        text, where = known[name], f"preset '{name}'"
    elif name.endswith(".toml") or os.sep in name:
        where = name
        starter = f"; {quoted_command('fedhm', 'init', name)} writes one to start from"
        text = read_text(Path(name), if_missing=starter if name.endswith(".toml") else "")
    else:
        raise FedhmError(f"{unknown_preset(name)} (a config file ends in .toml)")
    changes = list(changes)
    table = _changed(parse_toml(text, where), changes)
    where += " with --set" if changes else ""
    return parse({"data": {}, "model": {}, **table}, where)


def parse_resolved(text: str, where: str) -> ResolvedConfig:
    """Read the TOML of a resolved config."""
    return parse(parse_toml(text, where), where).resolved()


def read_text(path: Path, if_missing: str = "") -> str:
    """Return the content of a text file, without the byte order mark that some editors write.

    if_missing  the end of the error sentence if there is no such file
    """
    try:
        return read_regular(path).decode("utf-8-sig")
    except OSError as error:
        hint = if_missing if isinstance(error, FileNotFoundError) else ""
        raise FedhmError(f"cannot read {path}: {error.strerror}{hint}") from None
    except UnicodeDecodeError as error:
        raise FedhmError(f"{path} is not a text file in UTF-8, or damaged: {error}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Read TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FedhmError(f"{where} is not valid TOML: {error}") from None
    except ValueError:
        raise FedhmError(f"{where} is not valid TOML: a number in it has too many digits") from None
    except RecursionError:
        raise FedhmError(f"{where} is not valid TOML: its values are nested too deeply") from None


def parse_flat(values: Mapping[str, Any], where: str) -> Config:
    """Read dotted keys with plain values; lists are written as text: {"method.tiers": "[1, 1/2]"}.

    Keys of no section are ignored: Flower's run config may hold keys of others.
    """
    table: dict[str, Any] = {}
    for key, value in values.items():
        section, dot, name = key.partition(".")
        value = read_value(value) if isinstance(value, str) and value.startswith("[") else value
        if dot and section in Config.model_fields:
            table.setdefault(section, {})[name] = value
        elif key == "seed":
            table[key] = value
    return parse(table, where)


def parse(table: dict[str, Any], where: str) -> Config:
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise FedhmError("\n".join(f"{where}: {sentence}" for sentence in _sentences(error, table))) from None


def _changed(table: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    pairs: list[tuple[list[str], Any]] = []
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            hint = "; put the preset before --set" if change in presets() else ""
            raise FedhmError(f"--set takes KEY=VALUE, such as train.lr=0.05, not '{change}'{hint}")
        pairs.append((key.strip().split("."), read_value(text.strip())))
    for path, value in pairs:
        if len(path) == 2 and path[0] in NAMED and path[1] == "name" and _name_of(table, path[0]) != value:
            table[path[0]] = {}  # another method has other settings, so its section starts empty
    for path, value in pairs:
        section = table
        for part in path[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise FedhmError(f"--set {'.'.join(path)}: '{part}' is not a section")
        section[path[-1]] = value
    return table


def _name_of(table: dict[str, Any], section: str) -> Any:
    given = table.get(section, {})
    return given.get("name") if isinstance(given, dict) else given


def read_value(text: str) -> Any:
    """Read a value as TOML does. A bare word is a string, and so is a bare fraction in a list."""
    if text.startswith("["):
        text = re.sub(r'(?<![\w"\'/.])(\d+/\d+)(?![\w"\'/.])', r'"\1"', text)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError):
        raise FedhmError(f"{_brief(text)} has too many digits, or is nested too deeply, to be a value") from None


NAMED: dict[str, tuple[Group, str]] = {"method": ("methods", "fedhm"), "objective": ("objectives", "classification")}


def _sentences(error: ValidationError, table: dict[str, Any]) -> Iterator[str]:
    known = list(_known_keys(table))
    said: set[str] = set()
    for problem in error.errors():
        # pydantic puts the name of a union's branch into the path, which the user never wrote
        path = [str(part) for part in problem["loc"]]
        key = ".".join(part for part in path if not part.startswith(("constrained-", "literal[")))
        if key in said:
            continue  # pydantic reports a value once for each type of a union
        said.add(key)
        if problem["type"] == "unknown_name":
            yield f"{key}.name: {problem['msg']}"
        elif problem["type"] == "too_short" and len(problem["input"]):
            continue  # follows from a refused item, which has its own sentence
        elif problem["type"] == "extra_forbidden":
            sections = [each for each in known if each.rpartition(".")[2] == key]  # the user left out the section
            near = sections or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            yield f"unknown key '{key}'" + (f", did you mean '{near[0]}'?" if near else "")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            got = problem["input"]
            shown = "" if isinstance(got, dict | BaseModel) else f" (got {_brief(got)})"
            yield f"{key}: {message[0].lower()}{message[1:]}{shown}"


def _known_keys(table: dict[str, Any]) -> Iterator[str]:
    """Yield every key that this config may have, in dotted form."""
    for name in Config.model_fields:
        yield name
        section = _section_of(name, table.get(name))
        if section is not None:
            yield from (f"{name}.{key}" for key in section.model_fields)


def _brief(value: Any) -> str:
    """Return a value as an error shows it, shortened."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} beyond printing"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def _section_of(name: str, given: Any) -> type[Section] | None:
    """Return the class that reads a section."""
    return _named_section(name, given) if name in NAMED else _section(Config.model_fields[name].annotation)


def _named_section(name: str, given: Any) -> type[Section] | None:
    group, default = NAMED[name]
    try:
        name = given.get("name", default) if isinstance(given, dict) else given or default
        found: type[Section] = find(group, str(name))
    except UnknownNameError:
        return None
    return found


def _section(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
