"""Long local training on few labels: gradients are clipped where layers are factorized, and a divergence is named."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import small_config
from fedhm.assembly import assemble, read_federation
from fedhm.config.loading import load_config
from fedhm.config.method import STABLE_STEP
from fedhm.config.schema import ResolvedConfig
from fedhm.errors import FedhmError, FedhmWarning
from fedhm.models.build import build_model
from fedhm.report.result import Result

SKEWED = ["data.partition=dirichlet", "data.alpha=0.1", "train.epochs=10", "train.rounds=2", "train.milestones=[]"]
PAPERS_RULE = ["method.aggregate=models", "train.clip_norm=0"]


def run_digits(*changes: str) -> Result:
    config = load_config("digits", [*SKEWED, "engine.workers=1", *changes])
    federation = read_federation(config)
    return assemble(build_model(config, federation.input_shape, federation.classes), federation, config).run()


@pytest.mark.parametrize(
    ("sections", "limit"),
    [
        ({}, STABLE_STEP / 0.05),
        ({"train": {"lr": 0.2}}, STABLE_STEP / 0.2),
        ({"method": {"name": "fedhm", "aggregate": "models"}}, STABLE_STEP / 0.05),
        ({"method": {"name": "fedavg"}}, 0.0),
        ({"method": {"name": "fedavg", "tier": 0.5}}, STABLE_STEP / 0.05),
        ({"method": {"name": "heterofl"}}, 1.0),
        ({"method": {"name": "splitmix"}}, 0.0),
        ({"objective": {"name": "regression"}}, 0.0),
        ({"train": {"clip_norm": 7}}, 7.0),
        ({"train": {"clip_norm": 0}}, 0.0),
    ],
)
def test_the_method_decides_on_clipping_unless_the_settings_do(
    sections: dict[str, dict[str, object]], limit: float
) -> None:
    assert small_config(**sections).resolved().train.gradient_limit == limit


def test_a_run_has_a_number() -> None:
    table = small_config().resolved().model_dump()
    table["train"]["clip_norm"] = "auto"
    with pytest.raises(ValueError, match=r"train\.clip_norm of a run must be a number"):
        ResolvedConfig.model_validate(table)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.5, 8.0))
def test_a_step_on_factors_grows_with_the_factors(seed: int, scale: float) -> None:
    """Scaling W by c² by scaling both factors by c makes the same gradient G move the product c² times as far."""
    generator = torch.Generator().manual_seed(seed)
    u, v, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((9, 3), (7, 3), (9, 7)))
    rate = 1e-6  # so small that the second-order term is nothing

    def moved(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (u - rate * g @ v) @ (v - rate * g.T @ u).T - u @ v.T

    torch.testing.assert_close(moved(scale * u, scale * v), scale**2 * moved(u, v), rtol=1e-3, atol=1e-9)


@pytest.mark.slow
def test_every_tier_trains_where_fedavg_does() -> None:
    """Ten epochs on clients of one or two labels: without a limit, the loss becomes NaN in the second round."""
    fedavg = run_digits("method.name=fedavg").metrics["full"].accuracy
    assert fedavg > 0.4
    assert all(metrics.accuracy > 0.8 * fedavg for metrics in run_digits().metrics.values())


@pytest.mark.slow
def test_a_run_that_diverges_names_the_setting_that_helps() -> None:
    with pytest.raises(FedhmError, match=r"its loss became NaN; set train\.clip_norm = 2 or lower train\.lr"):
        run_digits("train.clip_norm=0")
    with pytest.warns(FedhmWarning, match=r"may have diverged at the clients: set train\.clip_norm = 2, or lower"):
        result = run_digits(*PAPERS_RULE)
    assert all(metrics["loss"] > math.log(10) for metrics in result.metrics.values())


@pytest.mark.slow
def test_a_run_that_trains_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_digits(*PAPERS_RULE, "data.partition=iid", "train.epochs=2", "train.rounds=3")
