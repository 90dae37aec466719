"""`fedhm plan`: which tier every client of a fleet gets, and how long a round takes whom."""

import argparse

from rich.console import Console

from fedhm.assembly import design, read_federation
from fedhm.config.loading import load_config
from fedhm.data.samples import Feed
from fedhm.errors import FedhmError
from fedhm.methods.tier_work import plan_fleet
from fedhm.models.build import build_model
from fedhm.report.sheets import rich_table
from fedhm.report.tables import plan_sheet
from fedhm.server.collect import Intake
from fedhm.server.filters.fleet import with_plan


def plan(options: argparse.Namespace, console: Console) -> None:
    """Show the plan of a config with devices; what a run would refuse is the last sentence, and an error."""
    if options.config is None:
        raise FedhmError("name a preset or a config file that lists devices, such as cifar10-fleet")
    config = load_config(options.config, options.changes).resolved()
    if not config.federation.devices:
        raise FedhmError(f"{options.config} lists no devices: docs/devices.md has what [[federation.devices]] are like")
    federation = read_federation(config)
    model = build_model(config, federation.input_shape, federation.classes)
    sample = next(Feed(federation.example, federation.preprocessing).ordered(1))
    method = design(config, model, sample[0], federation.classes, federation.public_feed()).method
    intake = Intake(method.network, federation, config, sample, ())
    planned = plan_fleet(config, model, method, sample[0], intake)
    sheet = plan_sheet(options.config, config, planned)
    for part in sheet.split(console.width):
        console.print(rich_table(part))
    console.print(sheet.note, highlight=False, markup=False)
    with_plan(config, lambda: planned)
