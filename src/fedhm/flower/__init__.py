"""fedhm on Flower, for a user's own model and data: the two apps that Flower needs.

    # client_app.py                                   # server_app.py
    from fedhm.flower import client_app               from fedhm.flower import server_app
    from .task import build_model, client_data        from .task import CLASSES, build_model, test_data

    app = client_app(build_model, client_data)        app = server_app(build_model, test_data, CLASSES)

`examples/flower-app` is a complete example, and docs/flower.md explains how to run it. Needs
the extra `flower`. `run_on_flower` and `up` are for the CLI.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedhm.errors import FedhmError
from fedhm.machine.extras import how_to_install

if TYPE_CHECKING:
    from fedhm.flower.clients import client_app
    from fedhm.flower.deployment import up
    from fedhm.flower.server import server_app
    from fedhm.flower.submit import run_on_flower

__all__ = ["client_app", "run_on_flower", "server_app", "up"]

_MODULES = {"client_app": "clients", "run_on_flower": "submit", "server_app": "server", "up": "deployment"}


def __getattr__(name: str) -> Any:
    """Import a name when it is used: Flower is an extra and takes seconds to import, and a node needs no server."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedhm.flower' has no attribute '{name}'")
    if find_spec("flwr") is None or find_spec("cryptography") is None:
        raise FedhmError(f"Flower is not installed: {how_to_install('flower')}")
    return getattr(import_module(f"fedhm.flower.{_MODULES[name]}"), name)
