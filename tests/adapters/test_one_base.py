"""A base is in memory once while a run lasts, and the user's model stays as it was, whatever becomes of results."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedhm
from fedhm.server.record import Record
from made_adapters import DATA, TEST, TRAIN, settings
from tiny_transformers import needs_peft, tiny_bert

pytestmark = [pytest.mark.slow, needs_peft]
NAME = "bert.embeddings.word_embeddings.weight"
WIDE = 43  # tokens: nothing else has such a shape


def wide() -> nn.Module:
    model = tiny_bert()
    model.resize_token_embeddings(WIDE)
    return model


def copies() -> int:
    """Return in how many places of the memory an embedding of the model lies."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return len({t.untyped_storage().data_ptr() for t in alive if t.shape == (WIDE, 16)})


class Watching:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def started(self, *_: int) -> None:
        self.seen.append(copies())

    def task_done(self, *_: object) -> None: ...

    def round_done(self, _: Record) -> None:
        self.seen.append(copies())


@pytest.mark.parametrize("own", [{}, {"name": "flora"}])
@pytest.mark.usefixtures("without_figures")
def test_a_base_is_in_memory_once_while_a_run_lasts(own: dict[str, str], tmp_path: Path) -> None:
    gc.unfreeze()  # tests begin with what is there frozen, which must not hide anything here
    model, watching = wide(), Watching()
    asked = settings({"ranks": [2, 1], **own}, train={**TRAIN, "rounds": 1})
    fedhm.run(model, DATA, TEST, asked, tmp_path / "run", watchers=[watching])
    assert watching.seen == [1, 1]


@pytest.mark.usefixtures("without_figures")
def test_merging_a_result_into_its_base_leaves_the_users_model_alone(tmp_path: Path) -> None:
    model = tiny_bert()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = fedhm.run(model, DATA, TEST, settings({"ranks": [2]}, train={**TRAIN, "rounds": 1}), tmp_path / "run")
    loaded = fedhm.load_tier(tmp_path / "run" / "models" / "full.safetensors", model)
    for network in (result.networks["full"], loaded):
        merged = network.merge_and_unload()
        assert not torch.equal(
            merged.get_submodule("bert.encoder.layer.0.attention.self.query").weight,
            before["bert.encoder.layer.0.attention.self.query.weight"],
        )
        with torch.no_grad():
            dict(merged.named_parameters())[NAME].zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
