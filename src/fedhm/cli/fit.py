"""`fedhm fit` finds the largest version of a model that a device can afford, `fedhm plan` the tiers of a fleet."""

import argparse
from typing import TYPE_CHECKING, Literal, cast

from fedhm.cli.options import Verbs, accept_negative_sizes, add_config, number, terminal
from fedhm.config.units import KINDS, parse_amount
from fedhm.errors import FedhmError

if TYPE_CHECKING:
    from fedhm.lowrank.svd import Form
    from fedhm.measure.fit import Fit, ModelVersions
    from fedhm.report.sheets import Sheet

FIT = (
    "Find the largest version of a model that meets all budgets: ranks by layer, and how to train it. The spectrum is "
    "that of the model's first weights."
)
BUDGETS = {
    "memory": "of a training step, such as 128MB",
    "bytes": "of one transfer of the network, such as 5MB",
    "macs": "of one sample's forward pass, such as 50M",
    "parameters": "such as 1.5M",
}


def add_fit(verbs: Verbs) -> None:
    parser = verbs.add_parser("fit", help="the largest version of a model that a device can afford", description=FIT)
    add_config(parser)
    accept_negative_sizes(parser)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", metavar="SIZE", help=BUDGETS[kind])
    parser.add_argument(
        "--seconds",
        type=number("--seconds", "a number above 0", above=0),
        metavar="S",
        help="of a training step, measured on this machine in a process of its own",
    )
    parser.set_defaults(action=fit, imports="fedhm.run")


def fit(options: argparse.Namespace) -> None:
    """Print the ranks, the training mode and the costs of the largest version within the budgets."""
    from fedhm.assembly import named_design
    from fedhm.cli.probe import STEPS, TIMES, measure_step, with_mode
    from fedhm.config.loading import load_config
    from fedhm.measure.fit import ModelVersions, TrainingSetup, fit_versions
    from fedhm.measure.time import fit_to_seconds
    from fedhm.networks.inputs import require_tensor
    from fedhm.report.format import format_bytes, format_macs
    from fedhm.report.sheets import rich_table

    try:
        limits = {kind: parse_amount(size, kind) for kind in KINDS if (size := getattr(options, kind)) is not None}
    except ValueError as error:
        raise FedhmError(f"--{error}") from None
    if not limits and options.seconds is None:
        raise FedhmError(f"fedhm fit needs a budget: --{', --'.join(KINDS)} or --seconds")
    config = load_config(options.config, options.changes).resolved()
    design = named_design(config)
    sample = require_tensor(design.sample, "fedhm fit")
    training = TrainingSetup(tuple(sample.shape[1:]), config.train.batch, config.train.optimizer, sample.dtype)
    keep, form = getattr(config.method, "keep", 1), cast("Form", getattr(config.method, "form", "spatial"))
    by: Literal["parameters", "macs"] = "macs" if set(limits) == {"macs"} else "parameters"
    dense: tuple[str, ...] = getattr(config.method, "dense", ())
    versions = ModelVersions(design.model, training, keep, design.classifiers or "auto", form, by=by, dense=dense)
    console = terminal()

    def seconds(found: "Fit") -> float:
        what = f"a version of {found.expected.parameters:,} parameters"
        console.print(f"measuring a step of {what} in a process of its own …", highlight=False, markup=False)
        ranks = {"ranks": dict(found.plan), "form": found.plan.form}
        step = measure_step(with_mode(config, found.mode), what, **ranks)
        if step is None:
            raise FedhmError(f"training {what} takes more memory than there is here")
        return step["seconds"]

    found = fit_to_seconds(versions, fit_versions(versions, limits), seconds, options.seconds)
    console.print(rich_table(_rank_sheet(options.config, versions, found), spacious=True))
    expected = found.expected
    console.print(
        f"train.micro_batch = {found.micro_batch}, train.checkpointing = {str(found.checkpointing).lower()}\n"
        f"memory of a step {format_bytes(expected.memory)}\n"
        f"seconds of a step {expected.seconds:.3g} here, in the fastest of {TIMES} times {STEPS} steps\n"
        f"MACs of a sample {format_macs(expected.macs)}, bytes each way {format_bytes(expected.bytes)}, "
        f"parameters {expected.parameters:,}",
        highlight=False,
        markup=False,
    )


def _rank_sheet(name: str, versions: "ModelVersions", found: "Fit") -> "Sheet":
    """Return the layers of a plan with their ranks, and the share of the energy that each keeps."""
    from fedhm.report.sheets import Sheet

    rows = [
        [layer, str(found.plan.get(layer, "dense")), str(len(versions.layers[layer].energies)), f"{100 * kept:.1f} %"]
        for layer, kept in found.kept.items()
    ]
    title = f"{name}: batch {versions.training.batch}"
    return Sheet(["layer", "rank", "of", "energy kept"], [rows], left=1, title=title)


def add_plan(verbs: Verbs) -> None:
    parser = verbs.add_parser("plan", help="which tier each device of a fleet gets, and how long a round takes it")
    add_config(parser, default=None)
    parser.set_defaults(action=plan, imports="fedhm.run")


def plan(options: argparse.Namespace) -> None:
    """Print the plan of a config with devices. If a run would refuse it, the error comes after the table."""
    from fedhm.assembly import design, lacks_files, planned_federation
    from fedhm.config.loading import load_config
    from fedhm.data.samples import Feed
    from fedhm.models.build import build_model
    from fedhm.report.sheets import rich_table
    from fedhm.report.tables import plan_sheet
    from fedhm.server.facts import TaskFacts
    from fedhm.server.filters.fleet import plan_fleet, with_fleet_plan

    if options.config is None:
        raise FedhmError("name a preset or a config file that lists devices, such as cifar10-fleet")
    config = load_config(options.config, options.changes).resolved()
    if not config.federation.devices:
        raise FedhmError(
            f"{options.config} lists no devices: docs/devices.md shows how to write [[federation.devices]]"
        )
    federation = planned_federation(config)
    model = build_model(config, federation.input_shape, federation.classes)
    sample = next(Feed(federation.example, federation.preprocessing).ordered(1))
    method = design(config, model, sample[0], federation.classes, federation.public_feed()).method
    facts = TaskFacts(method.network, federation, config, sample)
    planned = plan_fleet(config, model, method, sample[0], facts)
    sheet, console = plan_sheet(options.config, config, planned), terminal()
    for part in sheet.split(console.width):
        console.print(rich_table(part))
    console.print(sheet.note, highlight=False, markup=False)
    if config.data is not None and lacks_files(config.data):
        samples = sum(federation.remote)
        console.print(
            f"The files of {config.data.source} are not here: the plan is for its published size, "
            f"{samples:,} training samples at the clients.",
            highlight=False,
            markup=False,
        )
    with_fleet_plan(config, lambda: planned)
