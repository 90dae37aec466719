"""A fleet of devices: which tier each client gets by its device, and how long a round takes whom."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fedhm.config.schema import NO_TIER, Config, DeviceConfig, DeviceProfile, ResolvedConfig, TrainConfig
from fedhm.config.units import readable_size
from fedhm.errors import FedhmError
from fedhm.measure.time import ClientSeconds, computation_seconds, transfer_seconds
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.filter import RoundFilter
from fedhm.server.record import Record, Simulated
from fedhm.work.messages import Task
from fedhm.work.train import trained_as

LATE = "late"  # how a record's reason begins for a client that a deadline keeps out


class Tiers(Protocol):
    """What is to be known of a method's tiers; `fedhm.methods.tier_work` has it."""

    tiers: tuple[str, ...]  # largest first
    levels: tuple[str, ...]

    def can_checkpoint(self) -> bool: ...
    def tasks(self, tier: str) -> list[Task]: ...
    def memory(self, tier: str, checkpointing: bool = False) -> int: ...


@dataclass(frozen=True)
class Planned:
    """What a client does in a round, and what that takes."""

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
    """The clients' devices in a run whose config lists them."""

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
        """Return the tasks of clients that are done by the deadline, and record everybody's time.

        Who is late is known before anybody trains, so late clients are not asked to; the round still waits for them.
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
        """Return how a task is trained: as the run's settings or its client's device say, or as its tier does."""
        train = self._config.train
        return trained_as(train.checkpointed if checkpointing else train, task)

    def _macs(self, task: Task) -> int:
        return self._facts.network(task.network).cost.macs

    def plan(self, tiers: Tiers) -> list[Planned]:
        """Choose for every client the largest tier that fits its device's memory, and the deadline of a round.

        Where a tier fits only with checkpointing, which changes no weight, it is trained so.
        """
        return [self._planned(client, tiers) for client in range(len(self._devices))]

    def _planned(self, client: int, tiers: Tiers) -> Planned:
        device, deadline = self._devices[client], self._config.federation.deadline
        options: list[Planned] = []
        for option in (option for tier in tiers.tiers for option in self._options(client, tier, tiers)):
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
        if self._config.federation.unfit != "smallest" or set(tiers.levels) - set(tiers.tiers):
            return replace(closest, tier=NO_TIER, checkpointing=False, problem=problem)
        smallest = next(option for option in options if option.tier == tiers.tiers[-1])
        return replace(smallest, problem=problem)

    def _options(self, client: int, tier: str, tiers: Tiers) -> Iterator[Planned]:
        device, all_of_them = self._devices[client], bool(self._config.train.checkpointing)
        tasks = [replace(task, client=client) for task in tiers.tasks(tier)]
        sizes = [self._facts.sizes(task) for task in tasks]
        macs = sum(self._macs(task) * self._facts.samples_seen(task) for task in tasks)
        for checkpointing in modes(tiers, all_of_them):
            memory = self._memory(device, tasks, checkpointing)
            if memory is None:
                memory = tiers.memory(tier, checkpointing)
            found = self.seconds(client, tasks, checkpointing)
            bytes_each_way = sum(down for down, _ in sizes), sum(up for _, up in sizes)
            yield Planned(client, device, tier, checkpointing, memory, macs, *bytes_each_way, found)

    def _memory(self, device: DeviceConfig, tasks: Sequence[Task], checkpointing: bool) -> int | None:
        """Return what was measured on the device, if it was, for all of a client's networks."""
        ways = [(str(task.network), self._train(task, checkpointing)) for task in tasks]
        profile = device.profile
        found = [profile and profile.step(name, bool(train.checkpointing), train.parts) for name, train in ways]
        sizes = [step.memory for step in found if step and step.memory]
        return max(sizes) if len(sizes) == len(found) else None


def modes(tiers: Tiers, all_of_them: bool) -> Sequence[bool]:
    """Return whether a client trains without checkpointing or with it, in the order in which that is tried."""
    return [all_of_them] if all_of_them or not tiers.can_checkpoint() else [False, True]


def largest_in(memory: int, tiers: Tiers, all_of_them: bool) -> tuple[str, bool] | None:
    """Return the largest tier that can be trained in so many bytes, whether with checkpointing; None if none can."""
    ways = ((tier, again) for tier in tiers.tiers for again in modes(tiers, all_of_them))
    return next((way for way in ways if tiers.memory(*way) <= memory), None)


def with_plan(config: ResolvedConfig, make: Callable[[], Sequence[Planned]]) -> ResolvedConfig:
    """Return the settings with each client's tier, where devices are to decide on it and have not yet.

    Refuses to leave out clients where nobody said so, and to leave out all of them.
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


def foreign(profile: DeviceProfile, digest: str, train: TrainConfig) -> str:
    """Return why a device file says nothing of a run, whose model has this digest; empty if it does."""
    if profile.model != digest:
        return f"it was measured with another model, {profile.described}"
    for name in ("batch", "optimizer"):
        if getattr(profile, name) != getattr(train, name):
            return f"it was measured with train.{name} = {getattr(profile, name)}, not {getattr(train, name)}"
    return ""


def check_profiles(devices: Sequence[DeviceConfig], digest: str, train: TrainConfig) -> None:
    """Refuse device files of another model, or of other steps."""
    for device in devices:
        if device.profile and (reason := foreign(device.profile, digest, train)):
            raise FedhmError(f"the file of device '{device.name}' is of no use here: {reason}; measure it again")


def _fits(option: Planned) -> bool:
    spare = option.device.spare_memory
    return spare is None or option.memory <= spare
