"""Why an update was not used, in a client's own words: it stands in records and sentences, and does nothing there."""

from collections.abc import Iterable, Iterator

import pytest

from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.cli import _failed
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.experiment import Experiment
from fedhm.server.record import Record
from fedhm.work.messages import Failure, Reply, Task

REASON = "\x1b[2J\x1b]0;title\x07\x9b31m [red]\u202e" + "x" * 10_000
SHOWN = "�[2J�]0;title��31m [red]�"


class Complaining:
    """An engine whose first client fails with words of its own."""

    def __init__(self, experiment: Experiment) -> None:
        self._engine = experiment.engine

    def run(self, tasks: Iterable[Task]) -> Iterator[Reply]:
        for reply in self._engine.run(list(tasks)):
            yield Failure(reply.client, REASON, 0) if reply.position == 0 else reply

    def close(self) -> None:
        self._engine.close()


def run(federation: Federation, on_bad_update: str) -> list[Record]:
    sections = {"train": {"rounds": 1, "batch": 8, "on_bad_update": on_bad_update}, "method": {"name": "fedavg"}}
    experiment = assemble(small_model(), federation, small_config(**sections))
    experiment.engine = Complaining(experiment)
    return experiment.run().records


def test_records_hold_a_line_that_can_be_read(federation: Federation) -> None:
    (record,) = run(federation, "drop")
    entry = record.dropped[0]
    assert entry["reason"].startswith(SHOWN)
    assert len(entry["reason"]) == 300
    assert entry["reason"].isprintable()


def test_a_sentence_that_ends_a_run_can_be_read(federation: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FedhmError) as caught:
        run(federation, "stop")
    assert SHOWN in str(caught.value)
    assert len(str(caught.value)) < 600
    assert _failed(f"{caught.value}\x1b[2J", 1) == 1
    assert capsys.readouterr().err == f"fedhm: {caught.value}�[2J\n"
