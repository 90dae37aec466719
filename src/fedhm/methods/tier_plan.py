"""The rank plan of a tier, for the methods whose tiers are rank ratios."""

from torch import nn

from fedhm.config.section import tier_name
from fedhm.errors import FedhmError
from fedhm.lowrank.decompositions.unroll import Form
from fedhm.lowrank.plan import RankPlan, plan_ranks


def tier_plan(model: nn.Module, ratio: float, keep: int, classifier: str | None, form: Form = "spatial") -> RankPlan:
    """Return a tier's rank plan; one below full must differ from it. `classifier` gives the logits, where known."""
    plan = plan_ranks(model, ratio, keep, classifier=classifier or "auto", form=form)
    if not plan and ratio < 1:
        raise FedhmError(
            f"there is nothing to factorize for tier {tier_name(ratio)}: every layer stays dense; "
            f"choose a smaller ratio or a smaller method.keep\n{plan}"
        )
    return plan
