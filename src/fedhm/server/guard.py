"""From the updates that were let in to those that are merged: `[server] robust`, with what it found in the record."""

from collections.abc import Callable, Iterator

from fedhm.config.training import ServerConfig
from fedhm.defence.clip import Findings, clip
from fedhm.defence.moved import Layout, moved
from fedhm.defence.norms import History
from fedhm.server.intake import Guard
from fedhm.server.record import Record
from fedhm.work.messages import Task, Update


def guard_of(config: ServerConfig, layout: Callable[[str], Layout], history: History, record: Record) -> Guard | None:
    """Return what guards a round against hostile clients, which are told by the rounds before; None: nothing does.

    layout  by name of a network
    """
    if config.robust == "none":
        return None

    def guard(admitted: Iterator[tuple[Task, Update]]) -> Iterator[Update]:
        arriving = (moved(task, update, layout(task.network)) for task, update in admitted)
        findings = Findings(record.norms, record.clipped, record.dropped)
        for each in clip(arriving, history, record.round, findings):
            yield each.update

    return guard
