"""Ask the clients what their inputs are like, for a server that has no samples and was not told."""

from collections.abc import Callable

from fedhm.config.settings import ResolvedConfig
from fedhm.data.batches import Preprocessing
from fedhm.data.form import InputForm, most_say
from fedhm.errors import FedhmError
from fedhm.flower.nodes import Roster
from fedhm.flower.wire import Terms


def unknown_inputs(config: ResolvedConfig) -> Terms:
    """Return the terms of a server that cannot say yet how many classes there are: nodes then tell of their inputs."""
    return Terms(config, 0, Preprocessing())


def inputs_of_most(roster: Roster, config: ResolvedConfig, all_of_them: bool, say: Callable[[str], None]) -> str:
    """Wait for clients, return what most of them say of their inputs, and say who says otherwise.

    These are not left out: a network may take their inputs as well, and if not, that costs their own updates.
    """
    if config.privacy.active:
        raise FedhmError(
            "[privacy]: clients would say without noise what their inputs are like: tell the server by inputs="
        )
    roster.gather(config.engine.patience, all_of_them)
    said = {client: InputForm.read(node.inputs) for client, node in roster.introduced().items() if node.inputs}
    found, others = most_say(said)
    for client in others:
        say(f"client {client} says that its inputs are {said[client]}; those of most are {found}")
    return str(found)
