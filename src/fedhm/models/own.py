"""A user's own model on the command line: `--model FILE.py:FUNCTION` or `--model package.module:FUNCTION`.

A run's folder does not name it: code is only run when a user names it.
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedhm.errors import FedhmError
from fedhm.seeds import derive

OwnModel = nn.Module | Callable[[], nn.Module]  # a model, or a function that makes one


def build_own(model: OwnModel, seed: int) -> nn.Module:
    """Return a user's model; one that a function makes is initialised from the seed."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise FedhmError(f"model must be an nn.Module, or a function that makes one, not a {type(model).__name__}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model"))
        try:
            made = model()
        except Exception as error:  # a user's function may raise anything
            raise FedhmError(f"the model cannot be made: {error!r}") from error
    if not isinstance(made, nn.Module):
        raise FedhmError(f"the function that makes the model returns a {type(made).__name__}, not an nn.Module")
    return made


def load_function(text: str) -> Callable[[], nn.Module]:
    """Return the function that `--model` names."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise FedhmError(f"--model takes FILE.py:FUNCTION or package.module:FUNCTION, not '{text[:80]}'")
    try:
        module = _of_file(Path(place)) if place.endswith(".py") else import_module(place)
    except FedhmError:
        raise
    except Exception as error:  # a user's module may raise anything when it is imported
        raise FedhmError(f"--model: {place} cannot be imported: {error!r}") from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise FedhmError(f"--model: {place} has no function '{name}'")
    function: Callable[[], nn.Module] = found
    return function


def _of_file(path: Path) -> Any:
    if not path.is_file():
        raise FedhmError(f"--model: there is no file {path}")
    name = f"fedhm_own_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
