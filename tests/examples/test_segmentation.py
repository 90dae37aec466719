"""The U-Net of the example learns at every tier."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "segmentation.py"


@pytest.mark.slow
def test_every_tier_finds_the_discs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("segmentation", EXAMPLE)
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    result = example.main(rounds=4)
    assert list(result.metrics) == ["full", "1/2", "1/4"]
    assert all(found.mean_iou > 0.7 for found in result.metrics.values()), result.metrics
    assert "mean_iou" in capsys.readouterr().out
