"""What training leaves alone is merged as it was sent, also where half precision lost its digits on the way."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

from conftest import small_config
from fedhm.data.federation import from_arrays
from fedhm.errors import FedhmError
from fedhm.networks.exchange import exchanged_tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.server.collect import collect
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.admission import Admission
from fedhm.server.record import Record
from fedhm.work.messages import Reply, Task, Update

X, Y = torch.randn(12, 4), torch.arange(12) % 3
MASK = torch.tensor([[-1e9, 0.1], [0.1, -1e9]])


def model() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 3))
    network.register_buffer("mask", MASK.clone())
    return network


def admitted(mask: torch.Tensor, *, fp16: bool) -> Update:
    """Send one task, have it answered with this mask, and return what is let in."""
    engine = {"name": "flower", "fp16": fp16, "threads": 1}
    config = small_config(federation={"clients": 1}, engine=engine, train={"on_bad_update": "stop"}).resolved()
    federation = from_arrays([(X, Y)], (X, Y))
    facts = TaskFacts(lambda _: model(), federation, config, (X[:1], Y[:1]))
    task = Task(
        "train", 1, 0, "full", NetworkSpec("full"), {name: t.clone() for name, t in exchanged_tensors(model()).items()}
    )

    def run(tasks: Sequence[Task]) -> Iterator[Reply]:
        tensors = {**tasks[0].tensors, "mask": mask}
        yield Update("train", 1, 0, "full", NetworkSpec("full"), tensors, 12, (0, 1, 2), 0.5)

    (update,) = collect(run, [task], [Admission(config, federation, facts)], Record(1))
    return update


def test_lost_digits_of_a_constant_buffer_are_given_back() -> None:
    assert torch.equal(admitted(MASK.half().float(), fp16=True).tensors["mask"], MASK)
    assert torch.equal(admitted(MASK.clone(), fp16=False).tensors["mask"], MASK)


@pytest.mark.parametrize(("mask", "fp16"), [(MASK.half().float(), False), (MASK + 1, True), (0 * MASK, False)])
def test_another_buffer_is_refused(mask: torch.Tensor, fp16: bool) -> None:
    with pytest.raises(FedhmError, match="'mask' is not trained, but did not come back as it was sent"):
        admitted(mask, fp16=fp16)
