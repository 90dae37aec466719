"""Messages by Flower's grid, one at a time, so that one client's broken reply costs nobody else's."""

from collections.abc import Sequence

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fedhm.machine.printable import printable

REASONS = {
    1: "its ClientApp cannot be loaded",
    2: "its ClientApp raised an exception",
    3: "the time for its answer was over",
    4: "its answer got lost",
    5: "it is not connected any more",
    7: "it could not get the app",
    8: "its process died",
}  # by Flower's error code
BY_THE_APP = (0, 1, 2)


class UnreadableError(Exception):
    """A reply that has come but cannot be read."""


def push(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages and return the ids under which their replies will come; None for what could not be sent."""
    ids: list[str | None] = [message_id or None for message_id in grid.push_messages(messages)]
    return ids + [None] * (len(messages) - len(ids))


def pull(grid: Grid, message_id: str) -> Message | None:
    """Return the reply to one message, if it has come. Whose it is follows from the message, not from what it says."""
    try:
        replies = list(grid.pull_messages([message_id]))
    except httpx.HTTPError:  # it is the SuperLink that does not answer
        raise
    except Exception as error:  # whatever Flower raises over bytes that a client made
        raise UnreadableError(f"it cannot be read ({type(error).__name__})") from error
    return replies[0] if replies else None


def describe(reply: Message) -> str:
    """Return why a reply is an error, in a clause."""
    reason = REASONS.get(reply.error.code, f"Flower reports error {reply.error.code}")
    if reply.error.code not in BY_THE_APP or not reply.error.reason:
        return reason
    # what the app raised stands in <'…'>, perhaps behind Flower's own words
    raised = reply.error.reason.partition(":<'")[2] or reply.error.reason
    lines = (raised.partition("Message: ")[2] or raised).removesuffix("'>").strip().splitlines()
    return f"{reason}: {printable(lines[0])}" if lines else reason
