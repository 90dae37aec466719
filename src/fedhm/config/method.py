"""The settings of every method, and how its tiers are called."""

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _as_ratio(value: object) -> object:
    """Ratios may be written as "1/8"."""
    if isinstance(value, str):
        try:
            return float(Fraction(value))
        except (ValueError, ZeroDivisionError):
            return value
    return value


def _told_apart(ratios: tuple[float, ...]) -> tuple[float, ...]:
    if len({f"{ratio:g}" for ratio in ratios}) != len(set(ratios)):
        raise ValueError("two tiers differ too little to be told apart")
    return ratios


Ratio = Annotated[float, BeforeValidator(_as_ratio), Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Ratios = Annotated[tuple[Ratio, ...], Field(min_length=1), AfterValidator(_told_apart)]
PAPER_WIDTHS = (1.0, 0.62, 0.5, 0.35)  # sizes near those of γ = 1, 1/2, 1/4, 1/8 on ResNet-18


def tier_name(ratio: float) -> str:
    """How a rank ratio is called everywhere: full, 1/2, 1/8, or the plain number."""
    if ratio == 1:
        return "full"
    fraction = Fraction(ratio).limit_denominator(64)
    return str(fraction) if math.isclose(float(fraction), ratio, rel_tol=1e-9) else f"{ratio:g}"


def width_name(width: float) -> str:
    """How a width is called everywhere: full, w0.62."""
    return "full" if width == 1 else f"w{width:g}"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")


class FedHMConfig(Section):
    name: Literal["fedhm"] = "fedhm"
    tiers: Ratios = (1.0, 1 / 2, 1 / 4, 1 / 8)  # one listed twice has two shares of the clients
    keep: Annotated[int, Field(ge=0)] = 1  # the paper's ρ
    weighting: Literal["uniform", "samples", "softmax", "softmax-inverse"] = "uniform"
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 5.0  # τ of the softmax weightings
    aggregate: Literal["models", "updates"] = "models"  # updates: directions that a tier cannot carry are left alone
    form: Literal["spatial", "pufferfish"] = "spatial"  # k×1 and 1×k convolutions, or k×k and 1×1
    warmup: Annotated[int, Field(ge=0)] = 0  # rounds in which everybody trains the full model


class _Averaging(Section):
    weighting: Literal["uniform", "samples"] = "uniform"


class FedAvgConfig(_Averaging):
    name: Literal["fedavg"] = "fedavg"
    tier: Ratio = 1.0  # one network for all clients: the full one, or its hybrid network at this ratio
    keep: Annotated[int, Field(ge=0)] = 1


class SlimmedConfig(_Averaging):
    name: Literal["slimmed"] = "slimmed"
    width: Ratio = 0.35  # one width for all clients


class HeteroFLConfig(_Averaging):
    name: Literal["heterofl"] = "heterofl"
    tiers: Ratios = PAPER_WIDTHS  # widths
    scaler: bool = True  # divide activations by the width in training, where no normalisation follows


class FedRolexConfig(_Averaging):
    name: Literal["fedrolex"] = "fedrolex"
    tiers: Ratios = PAPER_WIDTHS  # widths
    roll: Annotated[int, Field(ge=0)] = 1  # channels by which the window moves each round


class FjORDConfig(_Averaging):
    name: Literal["fjord"] = "fjord"
    tiers: Ratios = PAPER_WIDTHS  # widths


class SplitMixConfig(_Averaging):
    name: Literal["splitmix"] = "splitmix"
    base: Ratio = 0.35  # the width of a base network
    tiers: Annotated[tuple[Positive, ...], Field(min_length=1)] = (9, 3, 2, 1)  # how many of them
    rescaled_init: bool = True  # weights start as small as those of the full width


class FedParaConfig(_Averaging):
    name: Literal["fedpara"] = "fedpara"
    # γ: from the smallest useful rank to the one that saves nothing
    ratio: Annotated[float, BeforeValidator(_as_ratio), Field(ge=0, le=1)] = 0.1
    keep: Annotated[int, Field(ge=0)] = 1


class FedDLRConfig(_Averaging):
    name: Literal["feddlr"] = "feddlr"
    tier: Ratio = 1 / 4  # the rank ratio of what travels
    keep: Annotated[int, Field(ge=0)] = 1


class Distilling(Section):
    """Of a method that cannot do without public samples."""

    name: str


class FedMDConfig(Distilling):
    name: Literal["fedmd"] = "fedmd"
    tiers: Ratios = PAPER_WIDTHS  # widths; every client has a model of its own
    digest_epochs: Positive = 1  # over the public samples, towards the consensus
    digest_lr: Annotated[float, Field(gt=0)] = 0.1  # of absolute errors, whose gradients are small


class FedDFConfig(_Averaging, Distilling):
    name: Literal["feddf"] = "feddf"
    tiers: Ratios = PAPER_WIDTHS  # widths; every tier has a model of its own
    steps: Positive = 50  # of distillation after each round
    lr: Annotated[float, Field(gt=0)] = 1e-3
    batch: Annotated[int, Field(ge=2)] = 64  # batch normalisation has no variance of a single value


AnyMethodConfig = (
    FedHMConfig
    | FedAvgConfig
    | SlimmedConfig
    | HeteroFLConfig
    | FedRolexConfig
    | FjORDConfig
    | SplitMixConfig
    | FedParaConfig
    | FedDLRConfig
    | FedMDConfig
    | FedDFConfig
)
MethodConfig = Annotated[AnyMethodConfig, Field(discriminator="name")]
METHOD_CONFIGS: dict[str, type[Section]] = {
    str(section.model_fields["name"].default): section for section in AnyMethodConfig.__args__
}
