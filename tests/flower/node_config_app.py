"""A Flower app that asks every client for its node config, writes the answers to a file, and waits."""

import json
from pathlib import Path
from typing import Any

from flower_up import wait_until

APP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "asking"
version = "1.0.0"
description = "asks clients for their node config"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0"]

[tool.flwr.app]
publisher = "tests"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "asking.server:app"
clientapp = "asking.client:app"

[tool.flwr.app.config]
text = ""
number = 0.0
nodes = 0
wait = 0
answers = ""
"""
SERVER = """
import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    while len(grid.get_node_ids()) < context.run_config["nodes"]:  # simulated ones come after the server
        time.sleep(0.2)
    questions = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    answers = [dict(reply.content["node"]) for reply in grid.send_and_receive(questions)]
    written = Path(context.run_config["answers"])
    written.with_suffix(".tmp").write_text(json.dumps([dict(context.run_config), answers]))
    written.with_suffix(".tmp").rename(written)
    time.sleep(context.run_config["wait"])
"""
CLIENT = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    return Message(RecordDict({"node": ConfigRecord(dict(context.node_config))}), reply_to=message)
"""


def make_app(path: Path) -> Path:
    (path / "asking").mkdir(parents=True)
    (path / "asking" / "__init__.py").write_text("")
    (path / "LICENSE").write_text("")
    (path / "README.md").write_text("")
    (path / "pyproject.toml").write_text(APP)
    (path / "asking" / "server.py").write_text(SERVER)
    (path / "asking" / "client.py").write_text(CLIENT)
    return path


def read_answers(answers: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the run's settings as its server saw them, and the clients' node configs in the order of their partitions.

    They are in the file that the setting `answers` names: reading Flower's log would start a command each time.
    """
    wait_until(answers.exists, 120)
    settings, nodes = json.loads(answers.read_text())
    return settings, sorted(nodes, key=lambda node: int(node["partition-id"]))
