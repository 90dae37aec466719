"""The one error that a user can cause, and the one warning: a sentence that says what is wrong and what to do."""

import warnings
from collections.abc import Callable
from typing import Any


class FedhmWarning(UserWarning):
    """Given for what a run can live with, but its user should know. The CLI prints it as one sentence."""


class FedhmError(Exception):
    """Raised for wrong input, missing data, damaged files. The CLI prints it without a traceback."""


def show_warnings(say: Callable[[str], None]) -> None:
    """Say the library's own warnings as sentences, and show all others as Python does, until warnings are reset."""
    otherwise = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, FedhmWarning):
            say(str(message))
        else:
            otherwise(message, category, *where, **more)

    warnings.showwarning = show
