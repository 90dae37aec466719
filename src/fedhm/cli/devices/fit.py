"""fedhm fit: the largest version of a model that a device can afford."""

import argparse
from typing import Literal, cast

from rich.console import Console

from fedhm.assembly import named_design
from fedhm.cli.devices.fresh_process import STEPS, TIMES, step_in_fresh_process, with_mode
from fedhm.config.loading import load_config
from fedhm.config.units import KINDS, parse_amount
from fedhm.errors import FedhmError
from fedhm.lowrank.svd import Form
from fedhm.measure.fit import Fit, ModelVersions, TrainingSetup, fit_versions
from fedhm.measure.time import fit_to_seconds
from fedhm.networks.inputs import require_tensor
from fedhm.report.sheets import Sheet, format_bytes, format_macs, rich_table


def fit(options: argparse.Namespace, console: Console) -> None:
    """Print the plan for a config's model and training."""
    try:
        limits = {kind: parse_amount(size, kind) for kind in KINDS if (size := getattr(options, kind)) is not None}
    except ValueError as error:
        raise FedhmError(f"--{error}") from None
    if not limits and options.seconds is None:
        raise FedhmError(f"fedhm fit needs a budget: --{', --'.join(KINDS)} or --seconds")
    config = load_config(options.config, options.changes).resolved()
    design = named_design(config)
    sample = require_tensor(design.sample, "fedhm fit")
    shape = tuple(sample.shape[1:])
    training = TrainingSetup(shape, config.train.batch, config.train.optimizer, sample.dtype)
    keep, form = getattr(config.method, "keep", 1), cast(Form, getattr(config.method, "form", "spatial"))
    by: Literal["parameters", "macs"] = "macs" if set(limits) == {"macs"} else "parameters"
    versions = ModelVersions(design.model, training, keep, design.classifier or "auto", form, by=by)

    def seconds(found: Fit) -> float:
        what = f"a version of {found.expected.parameters:,} parameters"
        console.print(f"measuring a step of {what} in a process of its own …", highlight=False, markup=False)
        ranks = {"ranks": dict(found.plan), "form": found.plan.form}
        step = step_in_fresh_process(with_mode(config, found.mode), what, **ranks)
        if step is None:
            raise FedhmError(f"training {what} takes more memory than there is here")
        return step["seconds"]

    found = fit_to_seconds(versions, fit_versions(versions, limits), seconds, options.seconds)
    console.print(rich_table(plan_sheet(options.config, versions, found), spacious=True))
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


def plan_sheet(name: str, versions: ModelVersions, found: Fit) -> Sheet:
    """Return the layers of a plan with their ranks, and the share of the energy that each keeps."""
    rows = [
        [layer, str(found.plan.get(layer, "dense")), str(len(versions.layers[layer].energies)), f"{100 * kept:.1f} %"]
        for layer, kept in found.kept.items()
    ]
    title = f"{name}: batch {versions.training.batch}"
    return Sheet(["layer", "rank", "of", "energy kept"], [rows], left=1, title=title)
