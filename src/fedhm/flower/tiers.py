"""Which tier each client gets: the one that its node config names, or the largest that fits its memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedhm.config.settings import Config, fixed_level
from fedhm.flower.nodes import Node
from fedhm.machine.printable import printable
from fedhm.measure.training import memory_of_training
from fedhm.methods.method import AnyMethod


@dataclass(frozen=True)
class Tiers:
    assignment: tuple[str, ...]  # of all clients; empty: by their numbers
    refused: dict[int, str]  # clients that can have none, and why


def chosen_tiers(config: Config, method: AnyMethod, batch: Tensor, nodes: Mapping[int, Node]) -> Tiers:
    """Choose tiers: a client that asks for none gets that of its number; one that cannot get its own is left out."""
    asking = {client: node for client, node in nodes.items() if node.tier or node.memory}
    settled = config.federation.assignment or config.federation.heterogeneity == "dynamic"
    if not asking or settled:
        return Tiers(config.federation.assignment, {})
    memory: dict[str, int] = {}
    if any(not node.tier for node in asking.values()):
        shape = tuple(batch.shape[1:])
        memory = {
            tier: memory_of_training(method.network(tier), shape, config.train, batch.dtype) for tier in method.tiers
        }
    assignment: list[str] = []
    refused: dict[int, str] = {}
    for client in range(config.federation.clients):
        node = asking.get(client)
        if node is None:
            assignment.append(method.levels[fixed_level(client, len(method.levels))])
            continue
        fitting = [node.tier] if node.tier else [tier for tier, size in memory.items() if size <= node.memory]
        if fitting and fitting[0] in (*method.tiers, *method.levels):
            assignment.append(fitting[0])
        else:
            assignment.append(method.tiers[-1])
            refused[client] = _why(node, method, memory, config.train.batch)
    return Tiers(tuple(assignment), refused)


def too_much(config: Config, method: AnyMethod, node: Node) -> str:
    """Return why a client may not have the tier that it names: it was given a smaller one. Empty if it may.

    Given by the server's settings, by what it said when the run began, or by its number. What it can spare names no
    tier: it was measured when the run began.
    """
    if not node.tier or config.federation.heterogeneity == "dynamic":
        return ""
    order = tuple(dict.fromkeys([*method.levels, *method.tiers]))  # largest first
    if node.tier not in order:
        return _why(node, method, {}, config.train.batch)
    by_number = method.levels[fixed_level(node.client, len(method.levels))]
    given = config.federation.assignment[node.client] if config.federation.assignment else by_number
    if order.index(node.tier) >= order.index(given):
        return ""
    return f"it asks for tier {node.tier}, but was given {given}, which is smaller"


def _why(node: Node, method: AnyMethod, memory: Mapping[str, int], batch: int) -> str:
    if node.tier:
        return f"it asks for tier '{printable(node.tier)}', known are {', '.join(method.tiers)}"
    tier, size = min(memory.items(), key=lambda item: item[1])
    return (
        f"it can spare {node.memory >> 20} MiB, but training even tier {tier} takes {-(-size >> 20)} MiB "
        f"with train.batch = {batch}"
    )
