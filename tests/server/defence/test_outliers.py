"""Statistics that lie far from most clients' are brought to where these are; others do not change by a bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.networks.exchange import Tensors
from fedhm.server.filters.clip import DEVIATIONS, SPREADS, clamp_outliers, intervals
from fedhm.work.statistics import pool


def client(seed: int, channels: int = 4, **changed: float) -> Tensors:
    """Honest statistics of one client, around a mean of 3 and a variance of 4; some of them changed everywhere."""
    generator = torch.Generator().manual_seed(seed)

    def draw(middle: float) -> torch.Tensor:
        return middle + 0.2 * torch.randn(channels, generator=generator, dtype=torch.float64)

    found = {"bn/values": torch.tensor(50.0, dtype=torch.float64), "bn/mean": draw(3.0), "bn/variance": draw(4.0)}
    return found | {f"bn/{part}": torch.full_like(found[f"bn/{part}"], value) for part, value in changed.items()}


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 20))
def test_honest_statistics_stay_as_they_are(seed: int, clients: int) -> None:
    gathered = [client(seed + n) for n in range(clients)]
    bounded, counts = clamp_outliers(gathered)
    assert counts == [0] * clients
    for before, after in zip(gathered, bounded, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("hostile", [1, 2, 3])
@pytest.mark.parametrize("lie", [{"mean": 1e10}, {"mean": -1e10}, {"variance": 1e20}, {"mean": 1e5, "variance": 0.0}])
def test_a_few_that_lie_move_the_pooled_ones_little(hostile: int, lie: dict[str, float]) -> None:
    gathered = [client(n, **lie) if n < hostile else client(n) for n in range(10)]
    honest = pool(gathered[hostile:])
    bounded, counts = clamp_outliers(gathered)
    found = pool(bounded)
    assert all(counts[:hostile])
    assert not any(counts[hostile:])
    off = (found["bn.running_mean"] - honest["bn.running_mean"]).abs().max().item()
    assert off <= 0.3  # what most clients have stands in their place
    assert (found["bn.running_var"] - honest["bn.running_var"]).abs().max().item() <= (
        1.5 if "variance" in lie else 0.3
    )


def test_what_is_just_outside_is_brought_to_the_edge() -> None:
    gathered = [client(n) for n in range(9)]
    middle, reach = intervals([*gathered, client(9, mean=3.0)], "bn")["mean"]
    outside = client(9)
    outside["bn/mean"][0] = (middle + 1.5 * reach)[0]
    edge = intervals([*gathered, outside], "bn")["mean"]
    bounded, counts = clamp_outliers([*gathered, outside])
    assert counts == [0] * 9 + [1]
    assert bounded[9]["bn/mean"][0].item() == pytest.approx((edge.middle + edge.reach)[0].item())
    assert torch.equal(bounded[9]["bn/mean"][1:], outside["bn/mean"][1:])
    assert reach.max().item() <= SPREADS * 0.4 + DEVIATIONS * 2.3


@pytest.mark.parametrize("part", ["mean", "variance"])
def test_who_is_off_in_all_channels_is_told_by_less(part: str) -> None:
    gathered = [client(n, channels=64) for n in range(10)]
    middle, reach = intervals(gathered, "bn")[part]
    for share, others in ((0.2, False), (0.4, True)):
        liar = client(10, channels=64) | {f"bn/{part}": middle + share * reach}
        bounded, counts = clamp_outliers([*gathered, liar])
        assert counts == [0] * 10 + [64 * others]
        expected = intervals([*gathered, liar], "bn")[part].middle if others else liar[f"bn/{part}"]
        assert torch.equal(bounded[10][f"bn/{part}"], expected)


def test_of_two_nobody_knows_who_lies() -> None:
    gathered = [client(0), client(1, mean=1e10)]
    bounded, counts = clamp_outliers(gathered)
    assert counts == [0, 0]
    assert torch.equal(bounded[1]["bn/mean"], gathered[1]["bn/mean"])


def test_a_channel_that_is_dead_at_most_clients_may_live_at_one() -> None:
    gathered = [client(n) for n in range(6)]
    for number, tensors in enumerate(gathered):
        tensors["bn/mean"][0], tensors["bn/variance"][0] = (0.5, 1.0) if number == 3 else (0.0, 0.0)
    assert clamp_outliers(gathered)[1] == [0] * 6
