"""Why a tier is as large as it is: which layers stay dense, how much of the model they hold, and what would help."""

from collections import defaultdict
from collections.abc import Callable

from torch import nn

from fedhm.lowrank.plan import TIED, UNKNOWN_TYPE, RankPlan, find_weights, plan_parameters

LARGE = 0.8  # of the parameters: a tier that keeps more saves next to nothing
NOTABLE = 0.05  # of the parameters: layers with less in all are not worth a sentence
NAMED = 3  # layers, at most


def _starts(*texts: str) -> Callable[[str], bool]:
    return lambda reason: reason.startswith(texts)


# By the reason why layers stay dense: what would make the tier smaller. The first that fits counts.
HELP: list[tuple[Callable[[str], bool], str]] = [
    (lambda reason: TIED in reason, "untie the embedding from the output layer, and both weights are planned apart"),
    (_starts("among the first"), "set method.keep to a smaller number, such as 0"),
    (_starts("rank "), "choose a smaller ratio, since at this one factors are no smaller than the weights"),
    (_starts("asked for"), "name fewer layers in method.dense"),
    (_starts("the classifier"), "give the classifier fewer inputs, since it stays dense at every ratio"),
    (
        _starts("a depthwise", "a grouped"),
        "choose method.name = 'heterofl', which removes channels, since ranks do not make grouped convolutions smaller",
    ),
    (
        _starts("it rescales", "its gradients are"),
        "make the embedding a plain one, without max_norm, sparse or scaling",
    ),
    (
        lambda reason: UNKNOWN_TYPE in reason or "whose owner" in reason,
        "use plain layers of torch, or add the layer type (docs/extending.md)",
    ),
    (_starts("its weight is computed"), "remove the parametrization, since weights that are computed stay dense"),
]


def nothing_to_factorize(model: nn.Module, plan: RankPlan, tier: str) -> str:
    """Return the sentence for a tier that has no factorized layer, with all layers and their reasons."""
    if not plan.decisions:
        return f"there is nothing to factorize for tier {tier}: the model has no layer with a weight matrix"
    helping = "; ".join(_help(model, plan, everything=True)) or "choose method.name = 'heterofl' or 'fedavg'"
    return f"there is nothing to factorize for tier {tier}: every layer stays dense. What would help: {helping}\n{plan}"


def too_large(model: nn.Module, plan: RankPlan, tier: str) -> str:
    """Return a sentence if a tier keeps so many of the parameters that it saves next to nothing; empty if not."""
    total = plan_parameters(model, {})
    kept = plan_parameters(model, plan) / total if total else 0.0
    if kept <= LARGE:
        return ""
    advice = _help(model, plan)
    dense_share = sum(_dense_sizes(model, plan).values()) / total
    if kept - dense_share > dense_share or not advice:  # most of it is factorized already
        advice = [
            "choose a smaller ratio, or ask for a share of the parameters, such as method.tiers = ['50%']",
            *advice,
        ]
    return f"tier {tier} keeps {100 * kept:.0f} % of the parameters{_largest(model, plan)}: {'; '.join(advice)}"


def share_out_of_reach(model: nn.Module, smallest: RankPlan, tier: str) -> str:
    """Return the sentence for a share of the parameters that no rank reaches."""
    least = plan_parameters(model, smallest) / plan_parameters(model, {})
    helping = "; ".join(["ask for at least so much", *_help(model, smallest)])
    return (
        f"tier {tier} cannot be met: with rank 1 in all {len(smallest)} factorized layers the model keeps "
        f"{100 * least:.1f} % of its parameters{_largest(model, smallest)}: {helping}"
    )


def _help(model: nn.Module, plan: RankPlan, everything: bool = False) -> list[str]:
    """Return what would make a version smaller: for the layers that hold much of the model, the largest first."""
    total = plan_parameters(model, {}) or 1
    by_help: dict[str, int] = defaultdict(int)
    for name, size in _dense_sizes(model, plan).items():
        found = next((text for fits, text in HELP if fits(plan.dense[name])), None)
        if found:
            by_help[found] += size
    notable = [text for text, size in by_help.items() if everything or size >= NOTABLE * total]
    return sorted(notable, key=lambda text: -by_help[text])[:NAMED]


def _largest(model: nn.Module, plan: RankPlan) -> str:
    """Name the dense layers with the most parameters, and why they are dense."""
    total = plan_parameters(model, {})
    sizes = sorted(_dense_sizes(model, plan).items(), key=lambda pair: -pair[1])[:NAMED]
    named = [f"'{name}' {100 * n / total:.0f} % ({plan.dense[name]})" for name, n in sizes if n >= NOTABLE * total]
    return f", of which {', '.join(named)}" if named else ""


def _dense_sizes(model: nn.Module, plan: RankPlan) -> dict[str, int]:
    """Return the trainable parameters of every weight that a plan leaves dense. A tied weight counts once."""
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for weight in find_weights(model):
        if weight.name in plan:
            continue
        parameters = [p for p in weight.parameters if p.requires_grad and id(p) not in seen]
        seen |= {id(p) for p in parameters}
        sizes[weight.name] = sum(p.numel() for p in parameters)
    return sizes
