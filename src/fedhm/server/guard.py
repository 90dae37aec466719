"""From the updates that were let in to those that are merged: `[server] robust`, with what it found in the record."""

from collections.abc import Callable, Iterator

from fedhm.config.training import ServerConfig
from fedhm.defence.clip import Findings, clip
from fedhm.defence.moved import Layout, moved
from fedhm.defence.norms import History
from fedhm.defence.opposed import bound_opposed
from fedhm.defence.together import by_centered_clip, by_krum, judged_together
from fedhm.errors import FedhmError
from fedhm.server.intake import Guard
from fedhm.server.record import Record
from fedhm.work.messages import Task, Update


def check_attackers(config: ServerConfig, participants: int) -> None:
    """Refuse to let Krum look for more hostile clients than it can tell among a round's participants."""
    if config.robust == "krum" and participants < (needed := 2 * config.attackers + 3):
        raise FedhmError(
            f"server.robust = 'krum' tells server.attackers = {config.attackers} only among {needed} or more clients, "
            f"but {participants} take part in a round: lower it, or raise federation.participation"
        )


def guard_of(
    config: ServerConfig, layout: Callable[[str], Layout], one_model: bool, history: History, record: Record
) -> Guard | None:
    """Return what guards a round against hostile clients, which are told by the rounds before; None: nothing does.

    layout     by name of a network
    one_model  all networks are versions of one model
    """
    if config.robust == "none":
        return None

    def guard(admitted: Iterator[tuple[Task, Update]]) -> Iterator[Update]:
        arriving = (moved(task, update, layout(task.network)) for task, update in admitted)
        findings = Findings(record.norms, record.clipped, record.dropped)
        short = clip(arriving, history, record.round, findings)  # before every rule
        passing = bound_opposed(short, history, record.round, findings, layout, one_model)
        if config.robust == "centered-clip":
            judge = by_centered_clip(history, record.round, findings)
            passing = judged_together(passing, judge, layout, one_model)
        elif config.robust == "krum":
            passing = judged_together(passing, by_krum(config.attackers, findings), layout, one_model)
        for each in passing:
            yield each.update

    return guard
