"""Several runs, one after the other: starting a simulation takes longer than they do."""

import json
from pathlib import Path

from fedhm.config.reading import parse_resolved
from fedhm.flower.apps import Context, Grid, make_server_app
from fedhm.flower.server import run_named
from fedhm.flower.status import StatusFile


def serve(grid: Grid, context: Context) -> None:
    status = StatusFile(Path(str(context.run_config["status"])))
    try:
        for name, text in json.loads(str(context.run_config["configs"])).items():
            run_named(grid, parse_resolved(text, name), Path(str(context.run_config["out"])) / name, [status])
    except BaseException as error:
        status.ended(repr(error))
        raise
    status.ended()


app = make_server_app(serve)
