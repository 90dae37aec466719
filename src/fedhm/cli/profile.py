"""`fedhm profile` measures training on a device and writes a device file, from which fleets are planned."""

import argparse
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedhm.cli.options import Verbs, accept_negative_sizes, add_config, terminal
from fedhm.config.units import parse_rate, parse_size
from fedhm.errors import FedhmError
from fedhm.machine.files import check_file, write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from fedhm.assembly import Design
    from fedhm.config.schema import Measurement, ResolvedConfig, TrainConfig
    from fedhm.measure.fit import TrainingMode

DESCRIPTION = """\
Run it on a device: it measures the seconds of a step and the peak memory of training each tier, plainly, with
checkpointing, in micro-batches and with both, each in a process of its own, and writes a device file for
[[federation.devices]] and for the node config of a SuperNode."""


def add_profile(verbs: Verbs) -> None:
    parser = verbs.add_parser("profile", help="measure what training takes on this device", description=DESCRIPTION)
    add_config(parser)
    accept_negative_sizes(parser)
    parser.add_argument("--out", type=Path, default=Path("device.json"), metavar="FILE", help="default: device.json")
    parser.add_argument("--name", metavar="NAME", help="of the device (default: this host's)")
    parser.add_argument("--memory", metavar="SIZE", help="that it can spare for training, such as 512MB")
    parser.add_argument("--up", metavar="RATE", help="of its link to the server, such as 10Mbit")
    parser.add_argument("--down", metavar="RATE", help="likewise from the server")
    parser.set_defaults(action=profile, imports="fedhm.run")


def profile(options: argparse.Namespace) -> None:
    import torch

    from fedhm.assembly import named_design
    from fedhm.config.loading import load_config
    from fedhm.config.schema import DeviceProfile
    from fedhm.networks.exchange import structure_digest
    from fedhm.networks.inputs import require_tensor

    parsers: dict[str, Callable[[str], float]] = {"memory": parse_size, "up": parse_rate, "down": parse_rate}
    given = {name: _parsed(name, getattr(options, name), parse) for name, parse in parsers.items()}
    check_file(options.out)  # before measurements that take minutes
    config = load_config(options.config, options.changes).resolved()
    if config.method.needs_public:
        raise FedhmError(f"{config.method.name} needs public samples: profile another method, the model is the same")
    design, console = named_design(config), terminal()
    steps = list(_measure_tiers(config, design, console))
    if not steps:
        raise FedhmError("nothing could be measured on this device: choose a smaller train.batch")
    shape = tuple(require_tensor(design.sample, "fedhm profile").shape[1:])
    found = DeviceProfile(
        name=options.name or platform.node() or "device",
        model=structure_digest(design.model, shape),
        described=f"that of {options.config} for inputs of {'×'.join(map(str, shape))}",
        batch=config.train.batch,
        optimizer=config.train.optimizer,
        threads=config.engine.threads,
        machine=f"{platform.system()} {platform.machine()}, torch {torch.__version__}",
        steps=tuple(steps),
        **given,
    )
    write_atomically(options.out, found.model_dump_json(indent=2, exclude_none=True) + "\n")
    fastest = max(step.macs * config.train.batch / step.seconds for step in steps)
    console.print(f"{options.out}: up to {fastest / 1e9:.3g} GMACs a second in training", highlight=False, markup=False)


def _parsed(name: str, text: str | None, parse: Callable[[str], float]) -> float | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise FedhmError(f"--{name}: {error}") from None


def _measure_tiers(config: "ResolvedConfig", design: "Design", console: "Console") -> "Iterator[Measurement]":
    from fedhm.cli.probe import measure_step, mode_of, with_mode
    from fedhm.config.schema import Measurement
    from fedhm.measure.cost import measure
    from fedhm.measure.fit import TrainingMode
    from fedhm.networks.inputs import require_tensor
    from fedhm.report.format import format_bytes
    from fedhm.server.filters.fleet import TierWork
    from fedhm.work.train import task_train_config

    shape = tuple(require_tensor(design.sample, "fedhm profile").shape[1:])
    work = TierWork(design.method, design.model, config, shape)
    tasks = {str(task.network): task for tier in reversed(work.tiers) for task in work.tasks(tier)}
    pairs = [
        (task, mode)
        for task in reversed(tasks.values())
        for mode in modes_to_measure(
            config.train, work.can_checkpoint(), mode_of(task_train_config(config.train, task))
        )
    ]
    for number, (task, mode) in enumerate(pairs, start=1):
        what = f"{number} of {len(pairs)}: {task.network}, {mode if mode != TrainingMode() else 'plain'}"
        found = measure_step(with_mode(config, mode), str(task.network), tier=task.tier, network=str(task.network))
        if found is None:
            console.print(f"{what}: it takes more memory than there is", highlight=False, markup=False)
            continue
        memory = format_bytes(found["memory"] or None)
        console.print(f"{what}: {1e3 * found['seconds']:.4g} ms, {memory}", highlight=False, markup=False)
        yield Measurement(
            network=str(task.network),
            checkpointing=mode.checkpointing,
            micro_batch=mode.micro_batch,
            macs=measure(design.method.network(task.network), shape).macs,
            seconds=found["seconds"],
            memory=int(found["memory"]),
        )


def modes_to_measure(train: "TrainConfig", can_checkpoint: bool, own: "TrainingMode") -> "Iterable[TrainingMode]":
    """Return the training modes to measure: those that a plan may choose among, and a tier's own."""
    from fedhm.measure.fit import TrainingMode

    part = train.parts or train.batch // 4
    sizes = [0, part] if part else [0]
    found = [TrainingMode(size, again) for size in sizes for again in ((False, True) if can_checkpoint else (False,))]
    return dict.fromkeys([*found, own])
