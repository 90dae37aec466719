"""`fedhm profile`: measure on a device what training takes there, and write it down for who plans a fleet."""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from rich.console import Console

from fedhm.assembly import Design, named_design
from fedhm.config.devices import DeviceProfile, Measurement
from fedhm.config.reading import load_config
from fedhm.config.settings import ResolvedConfig
from fedhm.config.training import TrainConfig
from fedhm.config.units import rate, size
from fedhm.errors import FedhmError
from fedhm.machine.files import write_atomically
from fedhm.machine.link import LinkServer, address, measure_link
from fedhm.machine.places import check_file
from fedhm.measure.cost import measure
from fedhm.methods.tier_work import TierWork
from fedhm.networks.exchange import digest_of
from fedhm.networks.inputs import one_tensor
from fedhm.report.sheets import readable_bytes


def profile(options: argparse.Namespace, console: Console) -> None:
    if options.serve:
        _serve(options.serve, console)
        return
    given = {name: _given(name, getattr(options, name), read) for name, read in READ.items()}
    if options.host and (options.up or options.down):
        raise FedhmError("--host measures the link, and --up and --down give it: choose one of them")
    config = load_config(options.config, options.changes).resolved()
    if config.method.needs_public:
        raise FedhmError(f"{config.method.name} needs public samples: profile another method, the model is the same")
    check_file(options.out)  # what is to be written takes minutes to measure
    design = named_design(config)
    if options.host:
        console.print(f"measuring the link to {options.host} …", highlight=False, markup=False)
        given["up"], given["down"] = measure_link(*address(options.host))
    steps = list(_measured(config, design, console))
    if not steps:
        raise FedhmError("nothing could be measured on this device: choose a smaller train.batch")
    shape = tuple(one_tensor(design.sample, "fedhm profile").shape[1:])
    found = DeviceProfile(
        name=options.name or platform.node() or "device",
        model=digest_of(design.model, shape),
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


READ: dict[str, Callable[[str], float]] = {"memory": size, "up": rate, "down": rate}


def _given(name: str, text: str | None, read: Callable[[str], float]) -> float | None:
    try:
        return None if text is None else read(text)
    except ValueError as error:
        raise FedhmError(f"--{name}: {error}") from None


def _measured(config: ResolvedConfig, design: Design, console: Console) -> Iterator[Measurement]:
    shape = tuple(one_tensor(design.sample, "fedhm profile").shape[1:])
    work = TierWork(design.method, design.model, config, shape)
    pairs = {task.network: tier for tier in reversed(work.tiers) for task in work.tasks(tier)}
    plain = config.train.model_copy(update={"epochs": 1, "checkpointing": False, "micro_batch": 0})
    ways = list(_ways(plain, config.train.micro_batch, work.can_checkpoint()))
    wanted = [(network, tier, *way) for network, tier in reversed(pairs.items()) for way in ways]
    for number, (network, tier, mode, train) in enumerate(wanted, start=1):
        what = f"{number} of {len(wanted)}: {network}, {mode}"
        found = _in_a_process(config.model_copy(update={"train": train}), tier, network)
        if found is None:
            console.print(f"{what}: its process was killed, so it takes more memory than there is", highlight=False)
            continue
        memory = readable_bytes(found["memory"] or None)
        console.print(f"{what}: {1e3 * found['seconds']:.4g} ms, {memory}", highlight=False, markup=False)
        macs = measure(design.method.network(network), shape).macs
        kind = {"checkpointing": bool(train.checkpointing), "micro_batch": train.micro_batch}
        yield Measurement(network=network, macs=macs, seconds=found["seconds"], memory=int(found["memory"]), **kind)


def _ways(train: TrainConfig, micro_batch: int, can_checkpoint: bool) -> Iterator[tuple[str, TrainConfig]]:
    yield "plain", train
    if can_checkpoint:
        yield "checkpointing", train.model_copy(update={"checkpointing": True})
    if part := micro_batch or train.batch // 4:
        yield f"micro-batches of {part}", train.model_copy(update={"micro_batch": part})


def _in_a_process(config: ResolvedConfig, tier: str, network: str) -> dict[str, float] | None:
    """Measure in a fresh process; None if the system killed it, as it does where memory runs out."""
    asked = json.dumps({"config": config.to_toml(), "tier": tier, "network": network})
    command = [sys.executable, "-m", "fedhm.cli.probe"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise FedhmError(f"training {network} fails on this device: {last}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _serve(where: str, console: Console) -> None:
    host, port = address(where)
    with LinkServer(host, port) as server:
        console.print(
            f"answering at {host}:{server.port} until Ctrl-C; on devices: fedhm profile … --host HOST:{server.port}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
