"""Transformers trained whole, each tier at its own ranks: what FedHM does with any model, it does with these."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedhm
from fedhm.lowrank.layers import LowRankLinear, LowRankTransposed
from run_outcome import outcome
from tiny_transformers import sentences, tiny_bert, tiny_gpt2, tiny_vit

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # importing transformers takes seconds

CLIENTS, TEST = [sentences(18, seed) for seed in range(4)], sentences(24, 99)
TRAIN = {"rounds": 3, "batch": 8, "lr": 0.01, "optimizer": "adamw"}


def settings(method: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    # pretrained weights are not to be cut to the smallest tier's rank before the first round
    tiers = {"name": "fedhm", "tiers": [1, "1/4"], "start": "whole"}
    own = {"keep": 0} | (method if method and "name" in method else tiers | (method or {}))
    whole = {"federation": {"participation": 1.0}, "engine": {"workers": 1, "threads": 1}}
    return {"method": own, "train": TRAIN} | whole | sections


class StoppedError(BaseException):
    """Stands for the end of the process."""


class StopAfter:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def started(self, done: int, rounds: int) -> None:
        pass

    def task_done(self, round_number: int, what: str, done: int, of: int) -> None:
        pass

    def round_done(self, record: fedhm.Record) -> None:
        if record.round == self.rounds:
            raise StoppedError


def test_bert_learns_in_both_tiers_and_its_weights_are_the_models() -> None:
    longer = {"train": {**TRAIN, "rounds": 6, "epochs": 3}}
    result = fedhm.run(tiny_bert(), CLIENTS, TEST, settings(**longer))
    assert list(result.metrics) == ["full", "1/4"]
    for tier in result.metrics:
        assert result.metrics[tier].accuracy > 0.6, result.metrics
    small = result.networks["1/4"]
    assert isinstance(small.get_submodule("bert.encoder.layer.0.attention.self.query"), LowRankLinear)
    loaded = tiny_bert()
    loaded.load_state_dict(fedhm.to_full(small), strict=True)
    ids = torch.tensor([[1, 4, 7, 10], [1, 5, 8, 11]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, small.eval()(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("aggregate", ["models", "bands"])
def test_a_run_that_was_stopped_is_resumed_bit_for_bit(aggregate: str, tmp_path: Path) -> None:
    given = tiny_bert(), CLIENTS, TEST, settings({"aggregate": aggregate})
    fedhm.run(*given, tmp_path / "whole")
    with pytest.raises(StoppedError):
        fedhm.run(*given, tmp_path / "stopped", watchers=[StopAfter(1)])
    result = fedhm.run(*given, tmp_path / "stopped")
    assert len(result.records) == 3
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("method", [{}, {"aggregate": "models"}, {"name": "feddlr"}, {"name": "fedpara"}])
def test_gpt2_with_its_fused_and_transposed_layers_learns_words(method: dict[str, Any]) -> None:
    words = {"input_ids": [[1 + (3 * n + k) % 20 for k in range(9)] for n in range(12)]}
    given = settings(method, objective={"name": "causal_lm"})
    result = fedhm.run(tiny_gpt2(), [words] * 3, words, given)
    for tier in result.metrics:
        assert result.records[-1].traffic[tier].loss < result.records[0].traffic[tier].loss
    if given["method"]["name"] == "fedhm":
        assert isinstance(result.networks["1/4"].get_submodule("transformer.h.0.attn.c_attn"), LowRankTransposed)


def test_vit_of_transformers_trains_on_images() -> None:
    torch.manual_seed(0)
    labels = torch.arange(24) % 3
    images = torch.randn(24, 1, 8, 8) + labels[:, None, None, None]
    result = fedhm.run(tiny_vit(), [(images, labels)] * 2, (images, labels), settings({"keep": 1}))
    assert result.records[-1].traffic["1/4"].loss < result.records[0].traffic["1/4"].loss
