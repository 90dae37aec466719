"""Updates that are too long are cut to what clients usually move; nobody else's changes by a bit."""

import statistics
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.networks.spec import NetworkSpec
from fedhm.server.filters.clip import DefenceLog, clip
from fedhm.server.filters.history import (
    AVERAGES,
    BOUND_FACTOR,
    ENOUGH_NORMS,
    MAX_GROWTH,
    MAX_OVER_ALL_TIERS,
    MIN_NORMS,
    OUTPUTS,
    WEIGHTS,
    Layout,
    NormHistory,
    UpdateDelta,
    update_delta,
)
from fedhm.work.messages import Task, Update

SIZE = 6


def arrived(client: int, length: float, tier: str = "full", averages: float | None = None) -> UpdateDelta:
    """An update whose weights, and perhaps running averages, are so far from what was sent."""
    generator = torch.Generator().manual_seed(client)
    way = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    sent, returned = {"w": torch.ones(SIZE, dtype=torch.float64)}, {"w": 1 + length * way / way.norm()}
    if averages is not None:
        sent["mean"], returned["mean"] = torch.zeros(1), torch.tensor([averages])
    task = Task("train", 1, client, tier, NetworkSpec(tier), sent)
    update = Update("train", 1, client, tier, NetworkSpec(tier), returned, 5, None, 0.0)
    return update_delta(task, update, Layout(frozenset(), frozenset({"mean"})))


def history(*rounds: dict[str, list[float]], lr: float = 1.0) -> NormHistory:
    found = NormHistory(lambda _: lr)
    for number, norms in enumerate(rounds, start=1):
        found.add(number, {WEIGHTS: {tier: dict(enumerate(each)) for tier, each in norms.items()}})
    return found


def clipped(arriving: list[UpdateDelta], known: NormHistory, round_number: int = 9) -> tuple[list[float], DefenceLog]:
    log = DefenceLog({}, [], [])
    return [each.parts[WEIGHTS].norm for each in clip(arriving, known, round_number, log)], log


def test_in_the_first_round_the_bound_is_that_of_the_round_itself() -> None:
    lengths = [1.0, 2.0, 500.0, 1.5, 1.2, 0.5, 2.5, 1.1, 400.0, 2.0]
    bound = BOUND_FACTOR * statistics.median(lengths[:ENOUGH_NORMS])
    found, log = clipped([arrived(n, length) for n, length in enumerate(lengths)], history(), 1)
    assert found == pytest.approx([min(length, bound) for length in lengths])
    assert [(e["client"], e["tier"], e["part"]) for e in log.clipped] == [
        (2, "full", WEIGHTS),
        (8, "full", WEIGHTS),
    ]
    assert [(e["norm"], e["bound"]) for e in log.clipped] == [pytest.approx((n, bound)) for n in (500.0, 400.0)]
    assert log.norms[WEIGHTS]["full"] == pytest.approx(dict(enumerate(found)))


def test_of_few_updates_nobody_is_bounded() -> None:
    lengths = [1.0, 500.0]
    assert len(lengths) < MIN_NORMS
    found, log = clipped([arrived(n, length) for n, length in enumerate(lengths)], history(), 1)
    assert found == pytest.approx(lengths)
    assert not log.clipped


def test_of_three_in_the_first_round_one_is_bounded_by_the_others() -> None:
    found, log = clipped([arrived(n, length) for n, length in enumerate([1.0, 500.0, 2.0])], history(), 1)
    assert found == pytest.approx([1.0, BOUND_FACTOR * 2.0, 2.0])
    assert [entry["client"] for entry in log.clipped] == [1]


def test_the_few_of_several_rounds_are_enough() -> None:
    found, _ = clipped([arrived(7, 500.0)], history({"full": [1.0, 2.0]}, {"full": [1.0, 2.0]}))
    assert found == pytest.approx([BOUND_FACTOR * 2.0])


def test_who_is_short_enough_stays_the_very_same() -> None:
    arriving = [arrived(n, 1.0 + n / 10) for n in range(12)]
    passed = list(clip(arriving, history(), 1, DefenceLog({}, [], [])))
    assert all(after is before for after, before in zip(passed, arriving, strict=True))


def test_no_more_are_held_back_than_a_median_needs() -> None:
    taken: list[int] = []

    def arriving() -> Iterator[UpdateDelta]:
        for number in range(50):
            taken.append(number)
            yield arrived(number, 1.0)

    for known in (history(), history({"full": [1.0] * ENOUGH_NORMS})):
        taken.clear()
        for place, _ in enumerate(clip(arriving(), known, 2, DefenceLog({}, [], []))):
            assert len(taken) == max(ENOUGH_NORMS, place + 1)


def test_a_client_with_many_tasks_has_one_vote() -> None:
    lengths = [(0, 500.0)] * 12 + [(n, 1.0) for n in range(1, 6)]
    found, log = clipped([arrived(client, length) for client, length in lengths], history(), 1)
    assert max(found) == pytest.approx(BOUND_FACTOR)
    assert log.norms[WEIGHTS]["full"].keys() == set(range(6))


def test_the_bound_falls_with_the_learning_rate() -> None:
    known = NormHistory(lambda number: 0.1 if number < 5 else 0.01)
    known.add(1, {WEIGHTS: {"full": dict.fromkeys(range(9), 2.0)}})
    assert known.bound(WEIGHTS, "full", 2) == pytest.approx(BOUND_FACTOR * 2.0)
    assert known.bound(WEIGHTS, "full", 5) == pytest.approx(BOUND_FACTOR * 0.2)


def test_the_level_stays_when_clients_converge() -> None:
    quiet = [{"full": [0.01] * 10}] * 20
    assert history({"full": [1.0] * 10}, *quiet).bound(WEIGHTS, "full", 22) == pytest.approx(BOUND_FACTOR)


def test_the_level_rises_with_a_rounds_clients_but_not_at_once() -> None:
    known = history({"full": [1.0] * 10})
    assert known.bound(WEIGHTS, "full", 2, [1.5] * 5 + [1e6] * 5) == pytest.approx(BOUND_FACTOR * 1.5)
    assert known.bound(WEIGHTS, "full", 2, [9.0] * 10) == pytest.approx(BOUND_FACTOR * MAX_GROWTH)
    assert known.bound(WEIGHTS, "full", 2, [0.1] * 10) == pytest.approx(BOUND_FACTOR)
    assert known.bound(WEIGHTS, "full", 2, [1.5] * (MIN_NORMS - 1)) == pytest.approx(BOUND_FACTOR)


def test_a_tier_has_its_own_level_but_not_any() -> None:
    known = history({"full": [1.0] * 20, "1/2": [1.5] * 10, "1/8": [50.0] * 10})
    assert known.bound(WEIGHTS, "full", 2) == pytest.approx(BOUND_FACTOR)
    assert known.bound(WEIGHTS, "1/2", 2) == pytest.approx(BOUND_FACTOR * 1.5)
    assert known.bound(WEIGHTS, "1/8", 2) == pytest.approx(BOUND_FACTOR * MAX_OVER_ALL_TIERS * 1.25)
    assert known.bound(WEIGHTS, "unseen", 2) == pytest.approx(BOUND_FACTOR * 1.25)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.5, 2.0), min_size=10, max_size=10), st.sets(st.integers(0, 9), max_size=3))
def test_a_minority_does_not_raise_the_bound_for_long(honest: list[float], hostile: set[int]) -> None:
    """Whatever a minority sends, round after round, what is left of it is a multiple of what honest clients send."""
    known = history()
    for number in range(1, 12):
        lengths = [1e6 if n in hostile else length for n, length in enumerate(honest)]
        log = DefenceLog({}, [], [])
        list(clip([arrived(n, length) for n, length in enumerate(lengths)], known, number, log))
        left = log.norms[WEIGHTS]["full"]
        assert max(left.values()) <= BOUND_FACTOR * 2.0 * (1 + 1e-9)
        known.add(number, log.norms)


def test_running_averages_are_bounded_apart() -> None:
    arriving = [arrived(n, 1.0, averages=0.1) for n in range(7)] + [arrived(7, 1.0, averages=1e9)]
    log = DefenceLog({}, [], [])
    *_, last = clip(arriving, history(), 1, log)
    assert last.parts[WEIGHTS].norm == pytest.approx(1.0)
    assert last.update.tensors["mean"].item() == pytest.approx(BOUND_FACTOR * 0.1)
    assert torch.equal(last.update.tensors["w"], arriving[-1].update.tensors["w"])
    assert [entry["part"] for entry in log.clipped] == [AVERAGES]


def test_outputs_are_bounded_by_those_of_others() -> None:
    def answer(client: int, size: float) -> UpdateDelta:
        task = Task("distil", 1, client, "full", NetworkSpec("full"), {})
        update = Update(
            "distil", 1, client, "full", NetworkSpec("full"), {"logits": torch.full((4, 3), size)}, 5, None, 0.0
        )
        return update_delta(task, update, Layout(frozenset(), frozenset()))

    log = DefenceLog({}, [], [])
    *_, last = clip([*(answer(n, 2.0) for n in range(7)), answer(7, 1e6)], history(), 1, log)
    assert last.update.tensors["logits"].flatten().tolist() == pytest.approx([2.0 * BOUND_FACTOR] * 12)
    assert [entry["part"] for entry in log.clipped] == [OUTPUTS]


def test_other_work_passes() -> None:
    task = Task("statistics", 1, 0, "full", NetworkSpec("full"), {})
    update = Update("statistics", 1, 0, "full", NetworkSpec("full"), {"bn/mean": torch.full((3,), 1e9)}, 5, None, 0.0)
    assert update_delta(task, update, Layout(frozenset(), frozenset())).parts == {}


def test_clients_that_do_not_move_bound_nobody() -> None:
    found, log = clipped([arrived(1, 3.0)], history({"full": [0.0] * 10}))
    assert found == pytest.approx([3.0])
    assert not log.clipped


def test_what_is_too_long_to_be_computed_is_not_short() -> None:
    """Such a norm is NaN, which is neither above nor below a bound."""
    sent = {"a.u": torch.ones(1, 2, dtype=torch.float64), "a.v": torch.ones(2, 1, dtype=torch.float64)}
    returned = {name: tensor * 1e200 for name, tensor in sent.items()}
    task = Task("train", 1, 99, "full", NetworkSpec("full"), sent)
    update = Update("train", 1, 99, "full", NetworkSpec("full"), returned, 5, None, 0.0)
    huge = update_delta(task, update, Layout(frozenset({"a"}), frozenset()))
    assert not huge.parts[WEIGHTS].norm <= 1e300
    (left,), log = clipped([huge], history({"full": [1.0] * 10}))
    assert left == 0.0
    assert log.norms[WEIGHTS]["full"][99] == BOUND_FACTOR
    assert log.clipped[0]["norm"] == 1e300
