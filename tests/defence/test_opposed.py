"""What goes far against the others is cut; what they agree on, or merely differ in, is not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedhm.defence.clip import Findings
from fedhm.defence.moved import Layout, Moved, moved
from fedhm.defence.norms import SETTLED, History
from fedhm.defence.opposed import AGAINST, bound_opposed
from fedhm.work.messages import Task, Update

SIZE = 50
LAYOUT = Layout(frozenset(), frozenset())


def arrived(client: int, vector: Tensor, network: str = "full") -> Moved:
    task = Task("train", 1, client, network, network, {"w": torch.ones(SIZE, dtype=torch.float64)})
    update = Update("train", 1, client, network, network, {"w": 1 + vector}, 5, None, 0.0)
    return moved(task, update, LAYOUT)


def honest(seed: int, count: int) -> list[Tensor]:
    """Changes of length about 1.4 that agree in one half of it."""
    generator = torch.Generator().manual_seed(seed)
    way = torch.nn.functional.normalize(torch.randn(SIZE, generator=generator, dtype=torch.float64), dim=0)
    return [way + torch.randn(SIZE, generator=generator, dtype=torch.float64) / SIZE**0.5 for _ in range(count)]


def passed(vectors: list[Tensor], findings: Findings, networks: str = "a" * 20, one_model: bool = True) -> list[Moved]:
    arriving = [arrived(n, vector, networks[n]) for n, vector in enumerate(vectors)]
    return list(bound_opposed(arriving, History(lambda _: 1.0), 1, findings, lambda _: LAYOUT, one_model))


def against(vector: Tensor, others: list[Tensor], usual: float) -> float:
    """How far a change goes against the others, by the book."""
    total = torch.stack([other * min(1.0, usual / other.norm().item()) for other in others]).sum(0)
    return -(vector @ total / total.norm()).item()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(6, 14))
def test_honest_changes_stay_the_very_same(seed: int, count: int) -> None:
    vectors, findings = honest(seed, count), Findings({}, [], [])
    arriving = [arrived(n, vector) for n, vector in enumerate(vectors)]
    found = list(bound_opposed(arriving, History(lambda _: 1.0), 1, findings, lambda _: LAYOUT, True))
    assert all(after is before for after, before in zip(found, arriving, strict=True))
    assert findings.clipped == []


@pytest.mark.parametrize("place", [0, 5, 9])  # among those that are held, and after them
@pytest.mark.parametrize("factor", [-2.0, -4.0, -100.0])
def test_one_that_goes_back_is_cut_to_what_may_be(place: int, factor: float) -> None:
    vectors = honest(3, 10)
    vectors[place] = factor * vectors[place]
    findings = Findings({}, [], [])
    found = [each.update.tensors["w"] - 1 for each in passed(vectors, findings)]
    usual = torch.stack(vectors[:SETTLED]).norm(dim=1).sort().values[3:5].mean().item()
    others = [vector for n, vector in enumerate(vectors[:SETTLED]) if n != place]
    assert against(vectors[place], others, usual) > AGAINST * usual
    assert against(found[place], others, usual) == pytest.approx(AGAINST * usual)
    torch.testing.assert_close(found[place] / found[place].norm(), vectors[place] / vectors[place].norm())
    (entry,) = findings.clipped
    assert (entry["client"], entry["bound"]) == (place, pytest.approx(found[place].norm().item()))
    assert all(torch.equal(found[n], vectors[n] + 1 - 1) for n in range(10) if n != place)


def test_who_has_too_few_others_to_be_compared_with_passes() -> None:
    findings = Findings({}, [], [])
    vectors = honest(3, 6)
    vectors[0] = -4 * vectors[0]
    passed(vectors, findings, "ababab", one_model=False)
    assert findings.clipped == []
    passed(vectors, findings, "ababab", one_model=True)
    assert [entry["client"] for entry in findings.clipped] == [0]


def test_no_more_are_held_than_at_first() -> None:
    taken: list[int] = []

    def arriving():  # type: ignore[no-untyped-def]
        for number, vector in enumerate(honest(0, 30)):
            taken.append(number)
            yield arrived(number, vector)

    guarded = bound_opposed(arriving(), History(lambda _: 1.0), 1, Findings({}, [], []), lambda _: LAYOUT, True)
    for place, _ in enumerate(guarded):
        assert len(taken) == max(SETTLED, place + 1)
