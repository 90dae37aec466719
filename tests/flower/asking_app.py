"""A Flower app that asks every client for its node config, prints what it got, and waits."""

import json
import re
import time
from pathlib import Path
from typing import Any

from fedhm.flower.processes.connection import Connection, flwr

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
"""
SERVER = """
import json
import time

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    print("SETTINGS " + json.dumps(context.run_config), flush=True)
    while len(grid.get_node_ids()) < context.run_config["nodes"]:  # simulated ones come after the server
        time.sleep(0.2)
    questions = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    answers = [dict(reply.content["node"]) for reply in grid.send_and_receive(questions)]
    print("ANSWERED " + json.dumps(answers), flush=True)
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


def an_app(path: Path) -> Path:
    (path / "asking").mkdir(parents=True)
    (path / "asking" / "__init__.py").write_text("")
    (path / "LICENSE").write_text("")
    (path / "README.md").write_text("")
    (path / "pyproject.toml").write_text(APP)
    (path / "asking" / "server.py").write_text(SERVER)
    (path / "asking" / "client.py").write_text(CLIENT)
    return path


def answered(connection: Connection, run: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run's settings as its server saw them, and the clients' node configs in the order of their partitions."""
    logs, until = "", time.monotonic() + 120
    while "ANSWERED" not in logs:
        assert time.monotonic() < until, logs
        time.sleep(1)
        logs = flwr(connection, "log", str(run), "--show")
    (settings,), (nodes,) = re.findall("SETTINGS (.*)", logs), re.findall("ANSWERED (.*)", logs)
    return json.loads(settings), sorted(json.loads(nodes), key=lambda node: int(node["partition-id"]))
