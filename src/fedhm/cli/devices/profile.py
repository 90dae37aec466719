"""`fedhm profile`: measure on a device what training takes there, and write it down for who plans a fleet."""

import argparse
import platform
from collections.abc import Callable, Iterable, Iterator

import torch
from rich.console import Console

from fedhm.assembly import Design, named_design
from fedhm.cli.devices.fresh_process import mode_of, step_in_fresh_process, with_mode
from fedhm.config.loading import load_config
from fedhm.config.schema import DeviceProfile, Measurement, ResolvedConfig, TrainConfig
from fedhm.config.units import parse_rate, parse_size
from fedhm.errors import FedhmError
from fedhm.machine.files import check_file, write_atomically
from fedhm.measure.cost import measure
from fedhm.measure.fit import TrainingMode
from fedhm.methods.tier_work import TierWork
from fedhm.networks.exchange import structure_digest
from fedhm.networks.inputs import require_tensor
from fedhm.report.sheets import format_bytes
from fedhm.work.train import trained_as


def profile(options: argparse.Namespace, console: Console) -> None:
    given = {name: _given(name, getattr(options, name), read) for name, read in READ.items()}
    check_file(options.out)  # before measurements that take minutes
    config = load_config(options.config, options.changes).resolved()
    if config.method.needs_public:
        raise FedhmError(f"{config.method.name} needs public samples: profile another method, the model is the same")
    design = named_design(config)
    steps = list(_measured(config, design, console))
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


READ: dict[str, Callable[[str], float]] = {"memory": parse_size, "up": parse_rate, "down": parse_rate}


def _given(name: str, text: str | None, read: Callable[[str], float]) -> float | None:
    try:
        return None if text is None else read(text)
    except ValueError as error:
        raise FedhmError(f"--{name}: {error}") from None


def _measured(config: ResolvedConfig, design: Design, console: Console) -> Iterator[Measurement]:
    shape = tuple(require_tensor(design.sample, "fedhm profile").shape[1:])
    work = TierWork(design.method, design.model, config, shape)
    tasks = {task.network: task for tier in reversed(work.tiers) for task in work.tasks(tier)}
    ways = [
        (task, mode)
        for task in reversed(tasks.values())
        for mode in modes_to_measure(config.train, work.can_checkpoint(), mode_of(trained_as(config.train, task)))
    ]
    for number, (task, mode) in enumerate(ways, start=1):
        what = f"{number} of {len(ways)}: {task.network}, {mode if mode != TrainingMode() else 'plain'}"
        found = step_in_fresh_process(with_mode(config, mode), task.network, tier=task.tier, network=task.network)
        if found is None:
            console.print(f"{what}: it takes more memory than there is", highlight=False, markup=False)
            continue
        memory = format_bytes(found["memory"] or None)
        console.print(f"{what}: {1e3 * found['seconds']:.4g} ms, {memory}", highlight=False, markup=False)
        yield Measurement(
            network=task.network,
            checkpointing=mode.checkpointing,
            micro_batch=mode.micro_batch,
            macs=measure(design.method.network(task.network), shape).macs,
            seconds=found["seconds"],
            memory=int(found["memory"]),
        )


def modes_to_measure(train: TrainConfig, can_checkpoint: bool, own: TrainingMode) -> Iterable[TrainingMode]:
    """Return the ways to train that are measured: those that a plan may choose among, and a tier's own."""
    part = train.parts or train.batch // 4
    sizes = [0, part] if part else [0]
    found = [TrainingMode(size, again) for size in sizes for again in ((False, True) if can_checkpoint else (False,))]
    return dict.fromkeys([*found, own])
