"""A tier's model comes back from its file as it was, in whatever form it is factorized."""

from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import small_model
from fedhm.errors import FedhmError
from fedhm.lowrank.hybrid import plan_of, to_hybrid
from fedhm.lowrank.plan import plan_ranks
from fedhm.lowrank.svd import Form
from fedhm.machine.tensors import read_tensors, write_tensors
from fedhm.networks.exchange import exchanged_tensors
from fedhm.runs.models import load_tier, save_tier


@pytest.mark.parametrize("form", ["spatial", "pufferfish"])
def test_a_saved_tier_keeps_its_form(tmp_path: Path, form: Form) -> None:
    network = to_hybrid(small_model(), plan_ranks(small_model(), 1 / 4, form=form)).eval()
    save_tier(tmp_path / "tier", network, "1/4")
    loaded = load_tier(tmp_path / "tier", small_model(seed=5))
    assert [type(layer) for layer in loaded.modules()] == [type(layer) for layer in network.modules()]
    assert plan_of(loaded) == plan_of(network)
    batch = torch.rand(2, 1, 6, 6)
    assert torch.equal(loaded(batch), network(batch))


def test_a_file_that_names_no_form_is_refused(tmp_path: Path) -> None:
    network = to_hybrid(small_model(), plan_ranks(small_model(), 1 / 4)).eval()
    save_tier(tmp_path / "tier", network, "1/4")
    _, header = read_tensors(tmp_path / "tier")
    del header["form"]
    write_tensors(tmp_path / "old", exchanged_tensors(network), header)
    with pytest.raises(FedhmError, match=r"has a header that describes no network: KeyError\('form'\)"):
        load_tier(tmp_path / "old", small_model(seed=5))


def test_a_model_that_cannot_be_made_narrower_is_saved_all_the_same(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.LayerNorm((4, 4, 4)), nn.Flatten(), nn.Linear(64, 3))

    network, x = model().eval(), torch.randn(2, 1, 6, 6)
    save_tier(tmp_path / "tier.safetensors", network, "full")
    assert torch.equal(load_tier(tmp_path / "tier.safetensors", model())(x), network(x))
