"""Validation samples are held out of what the clients train on, and evaluated on in place of the test set."""

from collections import Counter

import pytest
import torch

import fedhm
from fedhm.config.schema import DataConfig
from fedhm.data.federation import hold_out_validation, load_federation
from fedhm.data.samples import Samples
from fedhm.data.sources import read_source
from fedhm.errors import FedhmError


def images(*parts: Samples) -> Counter[bytes]:
    return Counter(image.numpy().tobytes() for samples in parts for image in samples.inputs)


def numbered(*sizes: int) -> list[Samples]:
    """Clients with as many samples, each of which is a number of its own."""
    numbers = torch.arange(sum(sizes))
    return [Samples(part[:, None].float(), part % 2) for part in numbers.split(list(sizes))]


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_the_test_set_is_never_seen(partition: str) -> None:
    config = DataConfig.model_validate({"partition": partition, "validation": 0.2})
    federation, again, other = (load_federation(config, 7, seed) for seed in (1, 1, 2))
    source = read_source("digits", None)
    assert images(federation.test, *federation.clients) == images(source.train)
    assert len(federation.test) == round(0.2 * 1442)
    assert torch.equal(federation.test.inputs, again.test.inputs)
    assert not torch.equal(federation.test.inputs, other.test.inputs)


def test_every_client_gives_its_share_and_nobody_gets_others_samples() -> None:
    whole, without = (load_federation(DataConfig(validation=share), 7, 1) for share in (0.0, 0.2))
    for all_of_it, left in zip(whole.clients, without.clients, strict=True):
        assert len(left) == pytest.approx(0.8 * len(all_of_it), abs=1)
        assert images(left) <= images(all_of_it)


def test_small_clients_round_together_and_keep_a_sample() -> None:
    left, held = hold_out_validation(numbered(*[3] * 20), 0.1, seed=0)
    assert len(held) == 6
    assert {len(samples) for samples in left} == {2, 3}
    left, held = hold_out_validation(numbered(1, 1, 10), 0.9, seed=0)
    assert [len(samples) for samples in left] == [1, 1, 1]
    assert len(held) == 9


def test_a_share_of_nothing_is_one_sentence() -> None:
    with pytest.raises(FedhmError, match=r"data\.validation = 0\.01 holds nothing out of 9 samples"):
        hold_out_validation(numbered(3, 3, 3), 0.01, seed=0)
    with pytest.raises(FedhmError, match=r"data\.validation: input should be less than 1 \(got 1\)"):
        fedhm.load_config("digits", ["data.validation=1"])


def test_a_config_says_what_it_is_evaluated_on() -> None:
    assert fedhm.load_config("digits").evaluated_on == "test"
    config = fedhm.load_config("digits", ["data.validation=0.1"])
    assert config.evaluated_on == "validation"
    assert config.objective.headline.axis(config.evaluated_on) == "validation accuracy (%)"
