"""The device that a run asks for is there, or the run says so before anything starts."""

from pathlib import Path

import pytest
import torch

import fedhm
from conftest import small_config, small_model
from fedhm.assembly import assemble
from fedhm.data.federation import Federation
from fedhm.errors import FedhmError
from fedhm.machine.device import CPU, find_device, seeded, threads


@pytest.mark.parametrize("name", ["cuda:99", "meta", "toaster"])
def test_a_device_that_is_not_there_is_refused(name: str, federation: Federation) -> None:
    with pytest.raises(FedhmError, match=f"engine.device = '{name}' cannot be used"):
        assemble(small_model(), federation, small_config(engine={"device": name}))


def test_auto_is_a_device_that_is_there() -> None:
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert find_device("cpu") == CPU
    resolved = small_config(engine={"device": "auto"}).resolved().engine.device
    assert resolved == str(find_device("auto"))


def test_updates_and_models_are_on_the_cpu(federation: Federation) -> None:
    result = assemble(small_model(), federation, small_config(engine={"device": "auto"})).run()
    for network in result.networks.values():
        assert all(tensor.device == CPU for tensor in network.state_dict().values())


def test_global_randomness_is_lent_and_given_back() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawn = []
    for seed in (1, 1, 2):
        with seeded(seed):
            drawn.append(torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    torch.manual_seed(1)
    assert torch.equal(drawn[0], torch.rand(3))


def test_threads_are_set_for_a_while_and_by_one_module_only() -> None:
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    package = Path(fedhm.__path__[0])
    calling = [path for path in package.rglob("*.py") if "set_num_threads" in path.read_text()]
    assert [path.relative_to(package).as_posix() for path in calling] == ["machine/device.py"]
