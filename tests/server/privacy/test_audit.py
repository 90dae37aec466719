"""Who knows all but the secret tells no better than ε allows whether a client took part; and would without noise."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[3]
TRIALS = 200


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # for what the benchmarks share
        spec = importlib.util.spec_from_file_location("privacy_audit", ROOT / "benchmarks" / "privacy_audit.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules.pop("measure", None)  # a name that others may have
        return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "noise", "participation", "rounds"),
    [("fedavg", 1.0, 1.0, 1), ("fedavg", 1.0, 0.5, 3), ("fedhm", 1.0, 1.0, 1)],
)
def test_no_attack_does_better_than_is_stated(
    audit: ModuleType, method: str, noise: float, participation: float, rounds: int
) -> None:
    how = (method, noise, participation, rounds)
    least = audit.epsilon_at_least(*audit.scores(*how, TRIALS, ""), 1e-5)
    assert 0 < least <= audit.stated(*how)


@pytest.mark.parametrize("broken", ["noise", "clip"])
@pytest.mark.parametrize("method", ["fedavg", "fedhm"])
def test_the_audit_notices_what_is_missing(audit: ModuleType, method: str, broken: str) -> None:
    how = (method, 5.0, 1.0, 1)
    least = audit.epsilon_at_least(*audit.scores(*how, TRIALS // 2, broken), 1e-5)
    assert least > 2 * audit.stated(*how)


def test_the_bound_is_clopper_and_pearsons(audit: ModuleType) -> None:
    """It finds no more than there is in a mechanism of which all is known: a coin that tells the truth 3 times in 4."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(40):
        without, with_it = ((torch.rand(400, generator=generator) < p).double() for p in (0.25, 0.75))
        found.append(audit.epsilon_at_least(without, with_it, 0.0))
    exact = torch.tensor(0.75 / 0.25).log().item()
    assert sum(each > exact for each in found) <= 2  # one in twenty
    assert max(found) > 0.5 * exact
