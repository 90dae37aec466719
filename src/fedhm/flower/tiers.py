"""Which tier each client gets: the one that its node config names, or the largest that fits its memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhm.config.sections.devices import DeviceConfig, parse_profile
from fedhm.config.sections.federation import FederationConfig, fixed_level
from fedhm.config.settings import Config
from fedhm.errors import FedhmError
from fedhm.flower.nodes import Node
from fedhm.machine.printable import printable
from fedhm.methods.method import AnyMethod
from fedhm.methods.tier_work import TierWork
from fedhm.server.participants.fleet import foreign, largest_in, modes


@dataclass(frozen=True)
class Tiers:
    federation: FederationConfig  # with the tiers that clients have
    refused: dict[int, str]  # clients that can have none, and why


def with_devices(config: Config, nodes: Mapping[int, Node], digest: str) -> Tiers:
    """Make the nodes' device files the devices of the run, if there are such; who has a foreign one is left out."""
    federation = config.federation
    if federation.devices or not any(node.device for node in nodes.values()):
        return Tiers(federation, {})
    refused: dict[int, str] = {}
    described: dict[str, tuple[dict[str, Any], list[int]]] = {}  # by what nodes say of themselves
    for client in range(federation.clients):
        node = nodes.get(client, Node(client, 0))
        if node.tier or federation.assignment or federation.heterogeneity == "dynamic":
            raise FedhmError("a client names its device file, but others have tiers that are given or drawn: do either")
        known: dict[str, Any] = {"memory": node.memory} if node.memory else {}
        try:
            profile = parse_profile(node.device, "what it sent") if node.device else None
            reason = foreign(profile, digest, config.train) if profile else ""
        except FedhmError as error:
            profile, reason = None, str(error)
        if reason:
            refused[client] = f"its device file is of no use here: {printable(reason)}"
        elif profile:
            known["profile"] = profile
        described.setdefault(f"{reason and client} {node.memory} {node.device}", (known, []))[1].append(client)
    devices = [
        DeviceConfig(name=f"{_called(known)} {number}", clients=tuple(clients), **known)
        for number, (known, clients) in enumerate(described.values(), start=1)
    ]
    unfit = "leave-out" if federation.unfit == "refuse" else federation.unfit  # others need not stop for one of them
    return Tiers(federation.model_copy(update={"devices": tuple(devices), "unfit": unfit}), refused)


def _called(known: Mapping[str, Any]) -> str:
    return printable(known["profile"].name)[:40] if "profile" in known else "device"


def chosen_tiers(config: Config, work: TierWork, nodes: Mapping[int, Node]) -> Tiers:
    """Choose tiers: a client that asks for none gets that of its number; one that cannot get its own is left out."""
    asking = {client: node for client, node in nodes.items() if node.tier or node.memory}
    federation = config.federation
    if not asking or federation.given_tiers or federation.devices or federation.heterogeneity == "dynamic":
        return Tiers(federation, {})
    assignment: list[str] = []
    checkpointed: list[int] = []
    refused: dict[int, str] = {}
    for client in range(federation.clients):
        node = asking.get(client)
        if node is None:
            assignment.append(work.levels[fixed_level(client, len(work.levels))])
        elif node.tier and node.tier in (*work.tiers, *work.levels):
            assignment.append(node.tier)
        elif not node.tier and (found := largest_in(node.memory, work, bool(config.train.checkpointing))):
            assignment.append(found[0])
            checkpointed += [client] if found[1] and not config.train.checkpointing else []
        else:
            assignment.append(work.tiers[-1])
            refused[client] = _why(node, work, config)
    found_for_all = {"assignment": tuple(assignment), "checkpointed": tuple(checkpointed)}
    return Tiers(federation.model_copy(update=found_for_all), refused)


def too_much(config: Config, method: AnyMethod, node: Node) -> str:
    """Return why a client may not have the tier that it names: it was given a smaller one. Empty if it may.

    Given by the server's settings, by what it said when the run began, or by its number. What it can spare names no
    tier: it was measured when the run began.
    """
    if not node.tier or config.federation.heterogeneity == "dynamic":
        return ""
    order = tuple(dict.fromkeys([*method.levels, *method.tiers]))  # largest first
    if node.tier not in order:
        return _unknown(node, method.tiers)
    by_number = method.levels[fixed_level(node.client, len(method.levels))]
    given = config.federation.given_tiers[node.client] if config.federation.given_tiers else by_number
    if order.index(node.tier) >= order.index(given):
        return ""
    return f"it asks for tier {node.tier}, but was given {given}, which is smaller"


def _unknown(node: Node, tiers: Sequence[str]) -> str:
    return f"it asks for tier '{printable(node.tier)}', known are {', '.join(tiers)}"


def _why(node: Node, work: TierWork, config: Config) -> str:
    if node.tier:
        return _unknown(node, work.tiers)
    ways = [(tier, again) for tier in work.tiers for again in modes(work, bool(config.train.checkpointing))]
    size, tier = min((work.memory(tier, again), tier) for tier, again in ways)
    return (
        f"it can spare {node.memory >> 20} MiB, but training even tier {tier} takes {-(-size >> 20)} MiB "
        f"with train.batch = {config.train.batch}"
    )
