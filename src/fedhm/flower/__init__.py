"""fedhm on Flower, for a user's own model and data: the two apps that Flower asks for.

    # client_app.py                                   # server_app.py
    from fedhm.flower import client_app               from fedhm.flower import server_app
    from .task import build_model, client_data        from .task import CLASSES, build_model, test_data

    app = client_app(build_model, client_data)        app = server_app(build_model, test_data, CLASSES)

`examples/flower-app` is a whole one, and docs/flower.md says how it is run. Needs `pip install 'fedhm[flower]'`.
"""

from typing import TYPE_CHECKING, Any

from fedhm.flower.processes.process import check_installed

if TYPE_CHECKING:
    from fedhm.flower.clients import client_app
    from fedhm.flower.server import server_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Import the apps when one is asked for: Flower is an extra and takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module 'fedhm.flower' has no attribute '{name}'")
    check_installed()
    if name == "client_app":  # a node starts a process for every message: what only servers need is not imported there
        from fedhm.flower.clients import client_app

        return client_app
    from fedhm.flower.server import server_app

    return server_app
