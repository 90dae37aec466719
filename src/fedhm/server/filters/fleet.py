"""A fleet of devices (`[[federation.devices]]`): the tier of each client, and the simulated time of each round.

Before a run, `plan_fleet` gives every client the largest tier that fits its device's memory and the deadline.
In each round, `Fleet` computes the time of every client and leaves out clients that would miss the deadline.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from fedhm.config.schema import NO_TIER, Config, DeviceConfig, DeviceProfile, ResolvedConfig, TrainConfig
from fedhm.config.units import readable_size
from fedhm.errors import FedhmError
from fedhm.measure.cost import SampleSpec, configured_training_memory, sample_spec, zero_batch
from fedhm.measure.time import ClientSeconds, computation_seconds, transfer_seconds
from fedhm.networks.exchange import Tensors, exchanged_tensors, structure_digest
from fedhm.networks.inputs import Inputs, sample_shape
from fedhm.networks.saving import can_checkpoint
from fedhm.networks.spec import NetworkSpec
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.filter import RoundFilter
from fedhm.server.record import Record, Simulated
from fedhm.work.messages import Participant, Task
from fedhm.work.train import task_train_config

LATE = "late"  # how a record's reason begins for a client that a deadline keeps out


class PlannedMethod(Protocol):
    """What a plan asks of a method (`methods/method.py`)."""

    tiers: tuple[str, ...]  # largest first
    levels: tuple[str, ...]

    def start(self, weights: Tensors) -> Any: ...
    def tasks(self, state: Any, participants: Sequence[Participant], round_number: int) -> Iterable[Task]: ...
    def network(self, spec: NetworkSpec) -> nn.Module: ...


class TierWork:
    """The tasks of each tier's clients after a warm-up, and the memory that training takes. Nothing is trained.

    One network at a time is in memory. All running averages are exchanged.
    """

    def __init__(
        self,
        method: PlannedMethod,
        model: nn.Module,
        config: Config,
        input_shape: SampleSpec,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.tiers, self.levels = method.tiers, method.levels
        train, compiled = config.train, config.engine.compile
        sample = zero_batch(model, 1, input_shape, dtype)
        # whether some clients may train with checkpointing if the settings do not ask it of all of them
        self.can_checkpoint: Callable[[], bool] = cache(lambda: not compiled and can_checkpoint(model, sample))
        start = cache(lambda: method.start(exchanged_tensors(model)))
        self._tasks = cache(lambda tier: list(method.tasks(start(), [Participant(0, tier)], train.rounds)))
        self._train = train
        self._memory = cache(
            lambda network, train: configured_training_memory(method.network(network), input_shape, train, dtype)
        )

    def tasks(self, tier: str) -> list[Task]:
        found: list[Task] = self._tasks(tier)
        return found

    def memory(self, tier: str, checkpointing: bool = False, profile: DeviceProfile | None = None) -> int:
        """Return the bytes of the client's largest task.

        They are as measured on the device, if its profile has all networks of the client. Otherwise they are predicted.
        """
        train = self._train.checkpointed if checkpointing else self._train
        trained = [(task.network, task_train_config(train, task)) for task in self.tasks(tier)]
        steps = [profile and profile.step(str(net), bool(own.checkpointing), own.parts) for net, own in trained]
        measured = [step.memory for step in steps if step and step.memory]
        return max(measured if len(measured) == len(trained) else (self._memory(*each) for each in trained))


@dataclass(frozen=True)
class ClientPlan:
    """A client's tier, and the costs of one of its rounds."""

    client: int
    device: DeviceConfig
    tier: str  # NO_TIER: none
    checkpointing: bool
    memory: int  # bytes
    macs: int
    down: int
    up: int
    seconds: ClientSeconds
    problem: str = ""  # why no tier fits the device


class Fleet(RoundFilter):
    """The clients' devices, in a run whose config lists them."""

    def __init__(self, config: Config, facts: TaskFacts) -> None:
        self._config, self._facts, self._devices = config, facts, config.federation.device_of

    def seconds(self, client: int, tasks: Sequence[Task], checkpointing: bool) -> ClientSeconds:
        """Return the simulated seconds that a client's tasks of a round take on its device."""
        device, reference = self._devices[client], self._config.federation.reference_macs_per_second
        sizes = [self._facts.sizes(task) for task in tasks]
        computed = [
            computation_seconds(
                device,
                reference,
                str(task.network),
                self._macs(task),
                self._facts.samples_seen(task),
                self._train(task, checkpointing),
            )
            for task in tasks
        ]
        return ClientSeconds(
            device.name,
            sum(computed),
            transfer_seconds(sum(down for down, _ in sizes), device.downlink),
            transfer_seconds(sum(up for _, up in sizes), device.uplink),
        )

    def tasks(self, tasks: list[Task], record: Record) -> list[Task]:
        """Return the tasks of clients that finish before the deadline, and record every client's time.

        Late clients are known in advance, so they do not train. The round still lasts until the deadline.
        """
        federation = self._config.federation
        record.simulated = simulated = record.simulated or Simulated()
        late: set[int] = set()
        slowest = 0.0
        for client in dict.fromkeys(task.client for task in tasks):
            own = [task for task in tasks if task.client == client]
            found = self.seconds(client, own, client in federation.checkpointed)
            simulated.clients[client] = found
            if federation.late == "drop" and 0 < federation.deadline < found.total:
                late.add(client)
                reason = (
                    f"{LATE}: its round takes {found.total:.4g} s, federation.deadline is {federation.deadline:g} s"
                )
                record.dropped += [
                    {"client": client, "tier": task.tier, "kind": task.kind, "reason": reason} for task in own
                ]
            slowest = max(slowest, found.total)
        simulated.seconds += federation.deadline if late else slowest
        return [task for task in tasks if task.client not in late]

    def _train(self, task: Task, checkpointing: bool) -> TrainConfig:
        """Return the training settings of a task: the run's, those of the client's device, or those of its tier."""
        train = self._config.train
        return task_train_config(train.checkpointed if checkpointing else train, task)

    def _macs(self, task: Task) -> int:
        return self._facts.network(task.network).cost.macs

    def plan(self, work: TierWork) -> list[ClientPlan]:
        """Choose for every client the largest tier that fits its device's memory and the deadline.

        If a tier fits only with checkpointing, the client trains with it. Checkpointing changes no weight.
        """
        return [self._plan_client(client, work) for client in range(len(self._devices))]

    def _plan_client(self, client: int, work: TierWork) -> ClientPlan:
        device, deadline = self._devices[client], self._config.federation.deadline
        options: list[ClientPlan] = []
        for option in (option for tier in work.tiers for option in self._options(client, tier, work)):
            options.append(option)
            if _fits(option) and not (deadline and option.seconds.total > deadline):
                return option
        closest = min(options, key=lambda option: option.memory)
        problem = (
            f"device '{device.name}' can spare {readable_size(device.spare_memory or 0)}, but training even tier "
            f"{closest.tier} takes {readable_size(closest.memory)}{' with checkpointing' * closest.checkpointing}"
        )
        if fitting := [option for option in options if _fits(option)]:
            closest = min(fitting, key=lambda option: option.seconds.total)
            problem = (
                f"device '{device.name}' takes {closest.seconds.total:.4g} s for a round of even tier {closest.tier}, "
                f"and federation.deadline is {deadline:g} s"
            )
        if self._config.federation.unfit != "smallest" or set(work.levels) - set(work.tiers):
            return replace(closest, tier=NO_TIER, checkpointing=False, problem=problem)
        smallest = next(option for option in options if option.tier == work.tiers[-1])
        return replace(smallest, problem=problem)

    def _options(self, client: int, tier: str, work: TierWork) -> Iterator[ClientPlan]:
        """Yield a tier without checkpointing and with it, in the order of preference."""
        device, for_all = self._devices[client], bool(self._config.train.checkpointing)
        tasks = [replace(task, client=client) for task in work.tasks(tier)]
        sizes = [self._facts.sizes(task) for task in tasks]
        macs = sum(self._macs(task) * self._facts.samples_seen(task) for task in tasks)
        for checkpointing in checkpointing_modes(work, for_all):
            yield ClientPlan(
                client,
                device,
                tier,
                checkpointing,
                work.memory(tier, checkpointing, device.profile),
                macs,
                down=sum(down for down, _ in sizes),
                up=sum(up for _, up in sizes),
                seconds=self.seconds(client, tasks, checkpointing),
            )


def _fits(option: ClientPlan) -> bool:
    spare = option.device.spare_memory
    return spare is None or option.memory <= spare


def checkpointing_modes(work: TierWork, for_all: bool) -> Sequence[bool]:
    """Return the modes to try: without checkpointing, then with it; `for_all`: the settings ask it of all clients."""
    return [for_all] if for_all or not work.can_checkpoint() else [False, True]


def largest_tier_within(
    memory: int | None, work: TierWork, for_all: bool, profile: DeviceProfile | None = None
) -> tuple[str, bool] | None:
    """Return the largest tier that trains in this many bytes, and whether with checkpointing; None if none does.

    memory   None: there is no limit
    profile  of the device, if it was measured
    """
    options = ((tier, mode) for tier in work.tiers for mode in checkpointing_modes(work, for_all))
    return next((option for option in options if memory is None or work.memory(*option, profile) <= memory), None)


def plan_fleet(
    config: Config, model: nn.Module, method: PlannedMethod, sample: Inputs, facts: TaskFacts
) -> list[ClientPlan]:
    """Return every client's tier by its device, and the costs of its rounds; `sample` is a batch of one."""
    check_profiles(config.federation.devices, structure_digest(model, sample_shape(sample)), config.train)
    return Fleet(config, facts).plan(TierWork(method, model, config, *sample_spec(sample)))


def with_fleet_plan(config: ResolvedConfig, make: Callable[[], Sequence[ClientPlan]]) -> ResolvedConfig:
    """Return the settings with each client's tier, if the config lists devices and has no plan yet.

    Raises if clients would be left out without `federation.unfit` allowing it, or if all clients would be.
    """
    federation = config.federation
    if federation.plan or not federation.devices:
        return config
    planned = make()
    problems = [each.problem for each in planned if each.problem]
    if len(problems) == len(planned):
        raise FedhmError(f"no client can train: {problems[0]}")
    if problems and federation.unfit == "refuse":
        raise FedhmError(
            f"{problems[0]}: leave its clients out with federation.unfit = 'leave-out', lower train.batch, or add a "
            "smaller tier"
        )
    own = [each.client for each in planned if each.checkpointing and not config.train.checkpointing]
    found = {"plan": tuple(each.tier for each in planned), "checkpointed": tuple(own)}
    return config.model_copy(update={"federation": federation.model_copy(update=found)})


def profile_mismatch(profile: DeviceProfile, digest: str, train: TrainConfig) -> str:
    """Return why a device file does not apply to a run, whose model has this digest; empty if it does."""
    if profile.model != digest:
        return f"it was measured with another model, {profile.described}"
    for name in ("batch", "optimizer"):
        if getattr(profile, name) != getattr(train, name):
            return f"it was measured with train.{name} = {getattr(profile, name)}, not {getattr(train, name)}"
    return ""


def check_profiles(devices: Sequence[DeviceConfig], digest: str, train: TrainConfig) -> None:
    """Refuse device files that were measured with another model, or with other training steps."""
    for device in devices:
        if device.profile and (reason := profile_mismatch(device.profile, digest, train)):
            raise FedhmError(f"the file of device '{device.name}' is of no use here: {reason}; measure it again")
