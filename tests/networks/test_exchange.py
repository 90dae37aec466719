"""What travels of a network, and a network that travels in another form than its own."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Preprocessing, Samples
from fedhm.errors import FedhmError
from fedhm.measure.cost import measure
from fedhm.networks.exchange import Tensors, exchanged_tensors, load, set_packing
from fedhm.networks.reuse import NetworkPool
from fedhm.networks.spec import NetworkSpec
from fedhm.work.client import Client
from fedhm.work.messages import Task


@dataclass(frozen=True)
class Halved:
    """Weights travel in half precision."""

    def pack(self, tensors: Tensors) -> Tensors:
        return {name: t.half() for name, t in tensors.items()}

    def unpack(self, tensors: Tensors) -> Tensors:
        return {name: t.float() for name, t in tensors.items()}


def network() -> nn.Module:
    return set_packing(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), Halved())


def test_a_network_is_sent_and_loaded_in_its_wire_form() -> None:
    first, second = network(), network()
    sent = exchanged_tensors(first)
    assert sent.keys() == exchanged_tensors(set_packing(copy.deepcopy(first), None)).keys()
    assert all(tensor.dtype == torch.float16 for tensor in sent.values())
    load(second, {"0.weight": sent["0.weight"]})
    assert torch.equal(second[0].weight, first[0].weight.half().float())
    assert not torch.equal(second[2].weight, first[2].weight.half().float())
    with pytest.raises(FedhmError, match="does not fit the network"):
        load(second, {"0.weight": torch.zeros(2, 2)})


def test_cost_counts_the_bytes_of_the_wire_form() -> None:
    own = network()
    wire = measure(own, (6,))
    plain = measure(set_packing(own, None), (6,))
    assert (wire.parameters, wire.macs, wire.bytes) == (plain.parameters, plain.macs, plain.bytes // 2)


def test_a_client_answers_in_the_form_in_which_it_was_asked() -> None:
    samples = Samples(torch.randn(20, 6), torch.arange(20) % 3)
    client = Client(samples, Preprocessing(), NetworkPool(lambda _: network()), TrainConfig(batch=5), seed=0)
    sent = {name: t for name, t in exchanged_tensors(network()).items() if "running" not in name}
    update = client.run(Task("train", 1, 0, "full", NetworkSpec("full"), sent))
    assert {name: t.dtype for name, t in update.tensors.items()} == dict.fromkeys(sent, torch.float16)
    assert not torch.equal(update.tensors["0.weight"], sent["0.weight"])
    statistics = client.run(Task("statistics", 1, 0, "full", NetworkSpec("full"), sent))
    assert set(statistics.tensors) == {"1/values", "1/mean", "1/variance"}
