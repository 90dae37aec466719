"""A record counts what really travelled, where somebody knows."""

import pytest
import torch

from fedhm.networks.spec import NetworkSpec
from fedhm.server.record import Record
from fedhm.work.messages import Failure, Reply, Task, Update

TASK = Task("train", 1, 5, "full", NetworkSpec("full"), {"a": torch.zeros(10)})
UPDATE = Update("train", 1, 5, "full", NetworkSpec("full"), {"a": torch.zeros(10)}, 3, None, 0.5)


@pytest.mark.parametrize(
    ("reply", "down", "up"),
    [
        (UPDATE, 40, 40),
        (Update(**{**vars(UPDATE), "down": 50, "up": 60}), 50, 60),
        (Update(**{**vars(UPDATE), "down": 0, "up": 0}), 0, 0),  # it had the weights already
        (Failure(5, "it caught fire"), 40, 0),
        (Failure(5, "it came too late", down=50, up=60), 50, 60),
    ],
)
def test_bytes_are_those_that_travelled_or_those_of_the_tensors(reply: Reply, down: int, up: int) -> None:
    record = Record(1)
    record.count(TASK, reply, macs=7)
    traffic = record.traffic["full"]
    assert (traffic.clients, traffic.down, traffic.up) == (1, down, up)
