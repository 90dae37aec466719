"""Regression on real data: the example runs as a user would run it, and every tier predicts better than the mean."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "regression.py"


def test_every_tier_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    found = re.findall(
        r"^tier (\S+) .* R² (-?[\d.]+)  mean squared error ([\d.]+)$", capsys.readouterr().out, re.MULTILINE
    )
    assert [tier for tier, _, _ in found] == ["full", "1/4", "1/8"]
    for _, r2, mse in found:
        assert float(r2) > 0.3  # the mean of the targets gives 0, the best linear model about 0.5
        assert float(mse) < 0.8
