"""Centered clipping and multi-Krum from inner products are those of the papers, and resist known attacks."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhm.config.schema import ServerConfig
from fedhm.errors import FedhmError
from fedhm.networks.spec import NetworkSpec
from fedhm.server.filters.agreement import (
    ITERATIONS,
    centered_clip,
    centered_clip_judge,
    judge_together,
    krum,
    krum_judge,
    krum_scores,
)
from fedhm.server.filters.clip import DefenceLog
from fedhm.server.filters.defence import check_attackers
from fedhm.server.filters.history import WEIGHTS, Layout, NormHistory, UpdateDelta, update_delta
from fedhm.work.messages import Task, Update

SIZE = 40
LAYOUT = Layout(frozenset(), frozenset())


def changes(seed: int, count: int) -> Tensor:
    """Honest changes, around a common way of length 1."""
    generator = torch.Generator().manual_seed(seed)
    way = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    own = torch.randn(count, SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5
    return way / way.norm() + own


def plain_centered_clip(vectors: Tensor, tau: float) -> Tensor:
    center = torch.zeros_like(vectors[0])
    for _ in range(ITERATIONS):
        steps = [(x - center) * min(1.0, tau / max((x - center).norm().item(), 1e-300)) for x in vectors]
        center = center + torch.stack(steps).mean(0)
    return center


def plain_krum_scores(vectors: Tensor, hostile: int) -> list[float]:
    scores = []
    for i, x in enumerate(vectors):
        distances = sorted((x - y).square().sum().item() for j, y in enumerate(vectors) if j != i)
        scores.append(sum(distances[: len(vectors) - hostile - 2]))
    return scores


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(0.01, 3.0))
@example(512, 6, 1.0625)  # nobody is further than tau from the second center, but one client is from the mean
def test_the_mean_of_the_lengthened_is_that_of_the_paper(seed: int, count: int, tau: float) -> None:
    vectors = changes(seed, count)
    factors = centered_clip(vectors @ vectors.T, tau)
    torch.testing.assert_close((factors[:, None] * vectors).mean(0), plain_centered_clip(vectors, tau))


def test_where_nobody_is_far_all_factors_are_one() -> None:
    vectors = changes(0, 10)
    assert centered_clip(vectors @ vectors.T, 100.0).tolist() == [1.0] * 10


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(9, 14))
def test_krums_scores_are_those_of_the_paper(seed: int, hostile: int, count: int) -> None:
    vectors = changes(seed, count)
    found = krum_scores(vectors @ vectors.T, hostile)
    assert found.tolist() == pytest.approx(plain_krum_scores(vectors, hostile))
    worst = sorted(range(count), key=lambda i: found[i].item())[count - hostile :]
    assert krum(vectors @ vectors.T, hostile) == sorted(set(range(count)) - set(worst))


def attacked(attack: str, hostile: int, honest: Tensor) -> Tensor:
    mean = honest.mean(0)
    generator = torch.Generator().manual_seed(1)
    forged = {
        "flip": -4 * honest[:hostile],
        "noise": 4 * torch.nn.functional.normalize(torch.randn(hostile, SIZE, generator=generator).double()),
        "scaled": 4 * honest[0].roll(1).expand(hostile, -1),
        "ipm": -1.0 * mean.expand(hostile, -1),
        "alie": (mean - 1.5 * honest.std(0)).expand(hostile, -1),
    }[attack]
    return torch.cat([forged, honest])


@pytest.mark.parametrize("hostile", [1, 2, 3])
@pytest.mark.parametrize("attack", ["flip", "noise", "scaled", "ipm", "alie"])
def test_what_is_left_of_an_attack_goes_the_honest_way(attack: str, hostile: int) -> None:
    honest = changes(5, 10 - hostile)
    vectors = attacked(attack, hostile, honest)
    wanted = honest.mean(0)
    inner, tau = vectors @ vectors.T, vectors.norm(dim=1).median().item()
    centered = (centered_clip(inner, tau)[:, None] * vectors).mean(0)
    assert torch.cosine_similarity(centered, wanted, dim=0) > 0.75
    if attack not in ("ipm", "alie"):  # which hide from distances where several agree
        assert set(krum(inner, hostile)) == set(range(hostile, 10))


def arrived(client: int, vector: Tensor, network: str = "full") -> UpdateDelta:
    task = Task("train", 1, client, network, NetworkSpec(network), {"w": torch.ones(SIZE, dtype=torch.float64)})
    update = Update("train", 1, client, network, NetworkSpec(network), {"w": 1 + vector}, 5, None, 0.0)
    return update_delta(task, update, LAYOUT)


def test_the_updates_are_cut_as_the_rule_says() -> None:
    vectors = torch.cat([changes(3, 9), -4 * changes(3, 1)])
    log = DefenceLog({}, [], [])
    judge = centered_clip_judge(NormHistory(lambda _: 1.0), 1, log)
    arriving = [arrived(n, vector) for n, vector in enumerate(vectors)]
    passed = list(judge_together(arriving, judge, lambda _: LAYOUT, one_model=True))
    found = torch.stack([each.update.tensors["w"] - 1 for each in passed]).mean(0)
    tau = vectors.norm(dim=1).sort().values[4:6].mean().item()
    torch.testing.assert_close(found, plain_centered_clip(vectors, tau))
    assert 9 in {entry["client"] for entry in log.clipped}


def test_krum_drops_with_a_reason() -> None:
    vectors = torch.cat([changes(3, 6), 4 * changes(9, 1), changes(3, 3)])
    log = DefenceLog({}, [], [])
    arriving = [arrived(n, vector) for n, vector in enumerate(vectors)]
    passed = list(judge_together(arriving, krum_judge(1, log), lambda _: LAYOUT, one_model=True))
    assert [each.update.client for each in passed] == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert all(each is arriving[each.update.client] for each in passed)
    (entry,) = log.dropped
    assert (entry["client"], entry["tier"], entry["kind"]) == (6, "full", "train")
    assert entry["reason"].startswith("Krum: it is among the 1 of 10 that are furthest from the others (score ")


def test_networks_that_are_no_versions_of_one_model_are_judged_apart() -> None:
    arriving = [arrived(n, vector, f"w{n % 2}") for n, vector in enumerate(changes(3, 10))]
    sizes: list[int] = []

    def judge(members: object, inner: Tensor) -> list[UpdateDelta | None]:
        sizes.append(len(inner))
        return list(members)  # type: ignore[call-overload, no-any-return]

    assert list(judge_together(arriving, judge, lambda _: LAYOUT, one_model=False)) == arriving
    assert sizes == [5, 5]
    list(judge_together(arriving, judge, lambda _: LAYOUT, one_model=True))
    assert sizes[2:] == [10]


def test_of_too_few_krum_lets_all_pass() -> None:
    vectors = changes(0, 4)
    assert krum(vectors @ vectors.T, 3) == [0, 1, 2, 3]


def test_krum_is_refused_where_it_could_tell_nobody() -> None:
    config = ServerConfig(robust="krum", attackers=4)
    check_attackers(config, 11)
    with pytest.raises(FedhmError, match=r"krum.*attackers = 4 only among 11 or more clients, but 10 take part"):
        check_attackers(config, 10)
    check_attackers(ServerConfig(attackers=4), 2)


def test_other_work_passes_all_rules() -> None:
    task = Task("statistics", 1, 0, "full", NetworkSpec("full"), {})
    other = update_delta(task, Update("statistics", 1, 0, "full", NetworkSpec("full"), {}, 5, None, 0.0), LAYOUT)
    assert WEIGHTS not in other.parts
    assert list(judge_together([other], krum_judge(1, DefenceLog({}, [], [])), lambda _: LAYOUT, True)) == [other]
