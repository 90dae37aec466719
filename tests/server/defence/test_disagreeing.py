"""Who does not go along with the others is left out; what they agree on, or merely differ in, is not."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.server.filters.agreement import MAX_AGAINST, REFERENCE_SIZE, PeerGroup, drop_disagreeing
from fedhm.server.filters.clip import DefenceLog
from fedhm.server.filters.history import (
    AGREEMENT_WINDOW,
    LASTING_SPREADS,
    ROUND_SPREADS,
    AgreementHistory,
    AgreementScore,
    Layout,
    NormHistory,
    UpdateDelta,
    update_delta,
)
from fedhm.work.messages import Task, Update

SIZE = 50
LAYERS = ("a.w", "b.w", "last.w")
LAYOUT = Layout(frozenset(), frozenset(), "last")


def arrived(client: int, change: Tensors, network: str = "full") -> UpdateDelta:
    sent = {name: torch.ones(SIZE, dtype=torch.float64) for name in LAYERS}
    returned = {name: sent[name] + change[name] for name in LAYERS}
    task = Task("train", 1, client, network, NetworkSpec(network), sent)
    return update_delta(task, Update("train", 1, client, network, NetworkSpec(network), returned, 5, None, 0.0), LAYOUT)


def honest(seed: int, count: int) -> list[Tensors]:
    """Changes of which every layer agrees in one half of its length."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5

    way = {name: draw() for name in LAYERS}
    return [{name: way[name] + draw() for name in LAYERS} for _ in range(count)]


def times(factor: float, change: Tensors, layers: tuple[str, ...] = LAYERS) -> Tensors:
    return {name: factor * tensor if name in layers else tensor for name, tensor in change.items()}


def guarded(
    arriving: list[UpdateDelta], log: DefenceLog, known: AgreementHistory | None = None, one_model: bool = True
) -> list[int]:
    """Return which of the updates pass; they have to be the very same."""
    log.norms = {"weights": {each.update.tier: {} for each in arriving}}
    history = NormHistory(lambda _: 1.0)
    found = drop_disagreeing(arriving, history, 1, log, lambda _: LAYOUT, one_model, known or AgreementHistory())
    return [next(n for n, each in enumerate(arriving) if each is passed) for passed in found]


def passed(changes: list[Tensors], log: DefenceLog | None = None, known: AgreementHistory | None = None) -> list[int]:
    arriving = [arrived(n, change) for n, change in enumerate(changes)]
    return guarded(arriving, log or DefenceLog({}, [], []), known)


def but(*hostile: int, of: int = 10) -> list[int]:
    return [n for n in range(of) if n not in hostile]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(6, 18))
def test_honest_changes_stay_the_very_same(seed: int, count: int) -> None:
    log = DefenceLog({}, [], [])
    assert passed(honest(seed, count), log) == list(range(count))
    assert log.dropped == []
    assert list(log.agreement) == list(range(count))


@pytest.mark.parametrize("place", [0, 5, 14])  # among those that are held, and after them
@pytest.mark.parametrize("factor", [-0.1, -1.0, -4.0])
def test_one_that_goes_back_is_left_out_however_short(place: int, factor: float) -> None:
    changes, log = honest(3, 15), DefenceLog({}, [], [])
    changes[place] = times(factor, changes[place])
    assert passed(changes, log) == but(place, of=15)
    (entry,) = log.dropped
    assert (entry["client"], entry["tier"], entry["kind"]) == (place, "full", "train")
    assert entry["reason"].startswith("it disagrees with the others: agreement -0.")


@pytest.mark.parametrize("seed", range(5))
def test_three_of_ten_that_go_back_together_are_left_out(seed: int) -> None:
    changes = honest(seed, 10)
    changes[:3] = [times(-1, change) for change in changes[:3]]
    assert passed(changes) == but(0, 1, 2)


def test_who_is_left_out_does_not_tell_how_far_clients_move() -> None:
    changes, log = honest(3, 10), DefenceLog({}, [], [])
    changes[2] = times(-1, changes[2])
    arriving = [arrived(n, change) for n, change in enumerate(changes)]
    log.norms = {"weights": {"full": dict.fromkeys(range(10), 1.0)}}
    list(drop_disagreeing(arriving, NormHistory(lambda _: 1.0), 1, log, lambda _: LAYOUT, True, AgreementHistory()))
    assert list(log.norms["weights"]["full"]) == but(2)


def test_the_last_layer_may_differ_but_not_go_far_against_the_others() -> None:
    changes, log = honest(3, 10), DefenceLog({}, [], [])
    changes[2] = times(-1, changes[2], ("last.w",))
    changes[6] = times(-9, changes[6], ("last.w",))
    assert passed(changes, log) == but(6)
    assert "of it goes against the others, who usually move by" in log.dropped[0]["reason"]
    assert 0 < MAX_AGAINST < 1


def test_what_was_too_long_has_to_go_along_with_the_others() -> None:
    changes = honest(3, 10)
    random = torch.randn(SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    random -= (random @ (way := sum(c["last.w"] for c in changes))) / (way @ way) * way
    common = {name: torch.stack([change[name] for change in changes]).sum(0) for name in LAYERS}
    changes[1] = times(4.0, common)
    changes[7] = {**changes[7], "last.w": 9 * random}

    def cut(norm: float) -> DefenceLog:
        return DefenceLog(
            {}, [{"client": n, "tier": "full", "part": "weights", "norm": norm, "bound": 9.0} for n in (1, 7)], []
        )

    log = cut(99.0)
    assert passed(changes, log) == but(7)
    assert log.dropped[0]["reason"].startswith("it was 11 times as long as allowed, and does not go along with")
    # a client with many samples honestly moves further: length alone is no reason to drop its update
    assert passed(changes, cut(20.0)) == but()


def test_of_who_goes_its_own_way_only_what_is_too_long_is_left_out_in_time() -> None:
    """An honest client with few samples has an agreement of about 0 in every round; so has noise, but it is long."""
    own_way = honest(8, 1)[0]
    changes = [*honest(3, 10)[:9], own_way]
    cut = [{"client": 9, "tier": "full", "part": "weights", "norm": 20.0, "bound": 9.0}]
    for clipped, left in ((list(cut), but(9)), ([], but())):
        standing = AgreementHistory()
        for _ in range(AGREEMENT_WINDOW):
            log = DefenceLog({}, list(clipped), [])
            found = passed(changes, log, standing)
            standing.add(log.agreement)
        assert found == left


def test_who_disagrees_a_little_for_long_is_left_out() -> None:
    changes = honest(3, 10)
    random = honest(8, 1)[0]
    changes[4] = {name: tensor - 0.5 * changes[4][name] for name, tensor in random.items()}
    log, standing = DefenceLog({}, [], []), AgreementHistory()
    assert passed(changes, log, standing) == but()
    standing.add(log.agreement)
    rounds = 1
    while passed(changes, DefenceLog({}, [], []), standing) == but():
        standing.add(log.agreement)
        rounds += 1
    assert rounds < AGREEMENT_WINDOW
    assert passed(changes, DefenceLog({}, [], []), standing) == but(4)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.floats(-1, 1), st.floats(0, 1), st.floats(0.01, 1), st.floats(0, 0.5)), min_size=1, max_size=8
    )
)
def test_standing_is_the_formula(rounds: list[tuple[float, float, float, float]]) -> None:
    standing, seen = AgreementHistory(), [AgreementScore(*each) for each in rounds]
    for each in seen[:-1]:
        standing.add({3: each, 4: AgreementScore(-1.0, 1.0, 0.01)})

    def below(some: list[AgreementScore]) -> bool:
        excess = sum(s.agreement - s.expected for s in some)
        return len(some) > 1 and excess < -LASTING_SPREADS * sum(s.spread**2 for s in some) ** 0.5

    (agreement, _, spread, expected), last = seen[-1], seen[-AGREEMENT_WINDOW:]
    once = agreement - expected < -ROUND_SPREADS * spread
    assert standing.disagrees(3, seen[-1]) == (once or below(last))
    assert standing.disagreed_before(3) == below(seen[:-1][-AGREEMENT_WINDOW + 1 :])


def test_agreement_is_a_quantile_of_the_mean_cosines_of_the_layers_but_the_last() -> None:
    changes = honest(5, 6)
    group = PeerGroup(range(6), changes, "last", AgreementHistory())
    plain = []
    for other in changes[1:]:
        cosines = [torch.cosine_similarity(changes[0][n], other[n], dim=0).item() for n in ("a.w", "b.w")]
        plain.append(sum(cosines) / 2)
    agreement, cosine = group.compare(0, changes[0])
    low, high = sorted(plain)[2:4]
    assert agreement == pytest.approx(low + 0.4 * (high - low))  # 60 % of the way from the least to the most
    whole = [torch.cat([change[n] for n in LAYERS]) for change in changes]
    way = sum(each / each.norm() for each in whole[1:])
    assert cosine == pytest.approx(torch.cosine_similarity(whole[0], way, dim=0).item())
    assert group.peers(0) == 5


def test_who_was_out_does_not_tell_the_way_and_stays_out_where_nobody_knows_it() -> None:
    """Four of ten that are alike, where honest ones hardly agree, would otherwise be the way."""
    hostile, changes = (0, 1, 2, 3), [honest(n, 1)[0] for n in range(10)]
    way = honest(77, 1)[0]
    changes = [{n: t + 0.2 * way[n] for n, t in change.items()} for change in changes]
    for number in hostile:
        changes[number] = {n: 0.1 * changes[number][n] - way[n] for n in LAYERS}
    known = AgreementHistory()
    assert set(hostile) & set(passed(changes))
    for _ in range(AGREEMENT_WINDOW):
        known.add({number: AgreementScore(-0.3, 0.4, 0.1) for number in hostile})
    assert passed(changes, known=known) == but(*hostile)
    log = DefenceLog({}, [], [])
    assert passed(changes[:4], log, known) == []
    assert log.dropped[0]["reason"] == "it disagreed with the others in its last rounds"


def test_layers_are_compared_by_name_whatever_their_order() -> None:
    """A tier's factorized layers come after its dense ones, so that networks of other tiers have another order."""
    changes = honest(5, 8)
    changes = [{**change, "b.w": 100 * change["b.w"]} for change in changes]
    mixed = [dict(reversed(change.items())) if n % 2 else change for n, change in enumerate(changes)]
    one, other = (PeerGroup(range(8), each, "last", AgreementHistory()) for each in (changes, mixed))
    for number in range(8):
        assert other.compare(number, mixed[number]) == pytest.approx(one.compare(number, changes[number]))


def test_who_has_too_few_others_to_be_compared_with_passes() -> None:
    changes = honest(3, 8)
    changes[0] = times(-4, changes[0])
    apart = [arrived(n, change, "abcd"[n % 4]) for n, change in enumerate(changes)]
    assert guarded(apart, DefenceLog({}, [], []), one_model=False) == but(of=8)
    assert guarded(apart, DefenceLog({}, [], []), one_model=True) == but(0, of=8)


@pytest.mark.parametrize(("count", "told"), [(4, 100), (3, 95)])  # of three, chance may hide which way two go
def test_of_three_or_four_who_goes_against_the_others_is_left_out(count: int, told: int) -> None:
    found = []
    for seed in range(100):
        changes, log, hostile = honest(seed, count), DefenceLog({}, [], []), seed % count
        assert passed(changes) == but(of=count)
        changes[hostile] = times(-4, changes[hostile])
        merged = passed(changes, log)
        assert set(but(hostile, of=count)) <= set(merged)
        found += ["goes against the others" in entry["reason"] for entry in log.dropped]
    assert all(found)
    assert len(found) >= told


def test_of_four_nobody_is_left_out_for_going_another_way() -> None:
    """So few tell too little of how honest clients differ."""
    changes, log = honest(3, 4), DefenceLog({}, [], [])
    changes[1] = honest(4, 1)[0]
    assert passed(changes, log) == but(of=4)
    assert log.agreement == {}


def test_where_nobody_agrees_nobody_is_left_out() -> None:
    changes = [honest(n, 1)[0] for n in range(3)]
    changes = [times(sign, change) for change in changes for sign in (1.0, -1.0)]
    log = DefenceLog({}, [], [])
    assert passed(changes, log) == but(of=6)
    assert log.agreement == {}


def test_rounds_in_which_clients_have_converged_do_not_count_and_who_was_out_stays_out() -> None:
    changes = honest(3, 10)
    changes[2] = times(-0.1, changes[2])
    assert passed(changes) == but(2)
    known, log = AgreementHistory(), DefenceLog({}, [], [])
    known.add({30: AgreementScore(9.0, 9.0, 0.1)})  # once they agreed as much
    known.add({5: AgreementScore(-0.3, 0.4, 0.1)})
    known.add({5: AgreementScore(-0.3, 0.4, 0.1)})
    assert passed(changes, log, known) == but(5)
    assert log.dropped[0]["reason"] == "it disagreed with the others in its last rounds"
    assert log.agreement == {}


def test_no_more_are_held_than_at_first() -> None:
    taken: list[int] = []

    def arriving() -> Iterator[UpdateDelta]:
        for number, change in enumerate(honest(0, 30)):
            taken.append(number)
            yield arrived(number, change)

    history, log = NormHistory(lambda _: 1.0), DefenceLog({}, [], [])
    for place, _ in enumerate(
        drop_disagreeing(arriving(), history, 1, log, lambda _: LAYOUT, True, AgreementHistory())
    ):
        assert len(taken) == max(REFERENCE_SIZE, place + 1)
