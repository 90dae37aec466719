"""Several runs, one after the other: starting a simulation takes longer than they do."""

import json
import time
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedhm.config.loading import parse_resolved
from fedhm.flower.server import run_config_on_grid
from fedhm.flower.submit import StatusFile
from fedhm.machine.files import write_atomically

CLIENTS = 4

app = ServerApp()


@app.main()
def serve(grid: Grid, context: Context) -> None:
    status = StatusFile(Path(str(context.run_config["status"])))
    try:
        write_node_configs(grid, Path(str(context.run_config["nodes"])))
        for name, text in json.loads(str(context.run_config["configs"])).items():
            run_config_on_grid(grid, parse_resolved(text, name), Path(str(context.run_config["out"])) / name, [status])
    except BaseException as error:
        status.ended(repr(error))
        raise
    status.ended()


def write_node_configs(grid: Grid, path: Path) -> None:
    while len(list(grid.get_node_ids())) < CLIENTS:  # simulated ones come after the server
        time.sleep(0.2)
    questions = [Message(RecordDict(), node, "query.node") for node in grid.get_node_ids()]
    answers = [dict(reply.content.config_records["node"]) for reply in grid.send_and_receive(questions)]
    write_atomically(path, json.dumps(answers))
