"""A result in hand: a short table, a frame, a figure."""

import sys
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot
from torch import nn

import fedhm

X, Y = torch.randn(30, 6), torch.arange(30) % 3


@pytest.fixture(scope="module")
def result() -> fedhm.Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    settings = {"train": {"rounds": 3}, "method": {"tiers": [1, "1/4"]}, "engine": {"threads": 1, "workers": 1}}
    return fedhm.run(model, [(X[i::3], Y[i::3]) for i in range(3)], (X, Y), settings)


def test_it_prints_as_a_short_table(result: fedhm.Result) -> None:
    lines = str(result).splitlines()
    assert lines[0] == "fedhm, 3 rounds"
    assert lines[1].split() == ["tier", "parameters", "MACs", "size", "accuracy", "loss"]
    assert [line.split()[0] for line in lines[2:]] == ["full", "1/4"]
    assert result.metrics["full"].accuracy == pytest.approx(float(lines[2].split("%")[0].split()[-1]) / 100, abs=1e-4)
    assert len({len(line) for line in lines[1:]}) == 1
    assert str(result.summary()) == repr(result.summary()) == str(result)
    assert repr(result).startswith("<fedhm.Result of fedhm, 3 rounds, accuracy full: ")
    assert len(repr(result)) < 120


def test_a_frame_has_a_row_for_each_round_and_tier(result: fedhm.Result) -> None:
    frame = result.frame()
    assert len(frame) == 6
    assert list(frame.columns[:4]) == ["round", "tier", "accuracy", "loss"]
    last = frame[(frame["round"] == 3) & (frame["tier"] == "1/4")].iloc[0]
    assert last["accuracy"] == result.metrics["1/4"].accuracy
    assert frame["clients"].sum() == sum(len(record.participants) for record in result.records)


def test_without_pandas_it_is_one_sentence(result: fedhm.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fedhm.FedhmError, match="returns a frame of pandas: pip install pandas"):
        result.frame()


def test_it_draws(result: fedhm.Result, tmp_path: Path) -> None:
    figure = result.plot(tmp_path / "accuracy.png")
    (axes,) = figure.axes
    assert axes.get_ylabel() == "test accuracy (%)"
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    pyplot.close(figure)
