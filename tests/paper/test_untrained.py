"""The tables and figures that need no runs."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.assembly import named_design
from fedhm.cli import main
from fedhm.measure.cost import measure
from fedhm.paper.numbers import LATE_MACS_RESNET34, LATE_PARAMETERS, SIZES
from fedhm.paper.scale import paper_config
from fedhm.paper.untrained import ExampleLayer, formulas, network_sheet, settings_sheet, stages_of


@settings(max_examples=20, deadline=None)
@given(st.integers(3, 12), st.integers(3, 12), st.sampled_from([1, 3, 5]), st.integers(1, 6), st.integers(1, 3))
def test_layers_cost_what_the_formulas_say(m: int, n: int, k: int, side: int, rank: int) -> None:
    for formula in formulas(ExampleLayer(m, n, k, side, rank)):
        measured = measure(formula.network, formula.shape)
        expected = (formula.expected.parameters, formula.expected.macs)
        assert (measured.parameters, measured.macs) == expected, formula.layer


@pytest.mark.slow
def test_the_layers_of_a_tier_and_its_batchnorm_add_up_to_the_papers_size() -> None:
    config = paper_config("cifar10", "iid", "fixed", "paper")
    published = [size.millions for size in SIZES["cifar10"]["fedhm-paper"]]
    sheet = network_sheet(config, published)
    rows, (whole, paper) = sheet.groups
    batchnorm = 2 * (64 + 4 * 64 + 5 * 128 + 5 * 256 + 5 * 512)  # weights and biases, of shortcuts too
    for column in range(5, 9):
        layers = sum(int(row[column].replace(",", "")) for row in rows)
        assert layers + batchnorm == int(whole[column].replace(",", ""))
        assert f"{int(whole[column].replace(',', '')) / 1e6:.2f} M" == paper[column]
    assert [row[2:5] for row in rows if row[0] == "layer4.1.conv2"] == [["256", "128", "64"]]


def test_settings_that_differ_are_bold() -> None:
    paper = settings_sheet({"cifar10": paper_config("cifar10", "iid", "fixed", "paper")})
    assert not any("**" in cell for row in paper.rows for cell in row)
    small = settings_sheet({"cifar10": paper_config("cifar10", "iid", "fixed", "small")})
    assert ["rounds", "160", "**20**"] in [list(row) for row in small.rows]


@pytest.mark.slow
def test_late_stages_have_the_papers_shares() -> None:
    stages = stages_of(named_design(paper_config("cifar100", "iid", "fixed", "paper")))
    assert list(stages) == ["conv1", "layer1", "layer2", "layer3", "layer4", "FC"]
    parameters, macs = (sum(part) for part in zip(*((c.parameters, c.macs) for c in stages.values()), strict=True))
    late = stages["layer3"], stages["layer4"]
    assert 100 * sum(cost.parameters for cost in late) / parameters > LATE_PARAMETERS
    # 55.71 %, of which the paper leaves out a tenth
    assert 100 * sum(cost.macs for cost in late) / macs == pytest.approx(LATE_MACS_RESNET34, abs=0.15)


def test_table1_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "table1", "--out", str(tmp_path)]) == 0
    assert "Pufferfish" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"table1.md", "table1.csv", "table1.html"}


@pytest.mark.parametrize("option", ["--seeds=2", "--jobs=2", "--partition=iid", "--methods=x", "--estimate"])
def test_options_of_runs_are_refused(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "table1", option, "--out", str(tmp_path)]) == 1
    name = option.partition("=")[0]
    assert f"table1 trains nothing: leave {name} out" in capsys.readouterr().err
