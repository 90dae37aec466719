"""The example runs as a user would run it, and every tier has learnt."""

import re
from pathlib import Path

import pytest

import forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


@pytest.mark.slow
def test_every_tier_learns() -> None:
    done = forked.script(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    accuracies = dict(re.findall(r"^tier (\S+) .* accuracy ([\d.]+)%$", done.stdout, re.MULTILINE))
    assert list(accuracies) == ["full", "1/2", "1/4", "1/8"]
    assert all(float(accuracy) > 80 for accuracy in accuracies.values()), accuracies  # chance is 10 %
    assert re.search(r"^conv +rank 8$", done.stdout, re.MULTILINE)
    assert re.search(r"^tier 1/8 reads a \d, which is a \d$", done.stdout, re.MULTILINE)
