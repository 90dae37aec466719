"""Accuracy against ε: the digits demo at several levels of noise, beside the accountant's number for the same steps.

    python benchmarks/privacy.py --rounds 40

One seed for each level. The demo has 20 clients, which is far too few to hide one among them at a small ε: the noise is
a multiple of what one client may change, and the mean of ten divides it by ten only.
"""

from typing import Any

import fedhm
from fedhm.server.filters.privacy import ORDERS
from measure import arguments, save_json, show

SETTINGS = (
    *("train.masked_loss=false", "method.aggregate=updates", "evaluation.static_from=never"),
    "method.start=smallest",  # short steps learn too little beside the random weights of a whole one
)


def main() -> None:
    options = arguments(
        __doc__,
        rounds=(40, "of each run"),
        clip=(1.0, "privacy.clip"),
        clients=(20, "federation.clients"),
    )
    levels, rounds = ((0.0, 0.1), 2) if options.quick else ((0.0, 0.1, 0.3, 1.0), options.rounds)
    rows, found = [], dict[str, dict[str, Any]]()
    for noise in levels:
        changes = [*SETTINGS, f"privacy.clip={options.clip}", f"privacy.noise={noise}", f"train.rounds={rounds}"]
        changes += [f"evaluation.every={rounds}", f"federation.clients={options.clients}"]
        config = fedhm.load_config("digits", changes)
        result = fedhm.prepare(config).run()
        stated, counted = result.records[-1].epsilon, own_number(config.federation.participation, noise, rounds)
        accuracies = {tier: metrics.accuracy for tier, metrics in result.metrics.items()}
        found[f"{noise:g}"] = {"stated": stated, "accountant": counted, "accuracy": accuracies}
        shown = ("–" if each is None else f"{each:,.1f}" for each in (stated, counted))
        rows.append((f"{noise:g}", *shown, *(f"{100 * accuracy:.1f} %" for accuracy in accuracies.values())))
    tiers = list(found["0"]["accuracy"])
    show(f"digits, {rounds} rounds, δ = 1e-5", ["noise", "ε in the record", "accountant's own", *tiers], rows)
    save_json(options.json, {"noise": found})


def own_number(participation: float, noise: float, rounds: int) -> float | None:
    """Return ε as the accountant has it if it is told every step by itself."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    if not noise:
        return None
    accountant = RdpAccountant(ORDERS)
    for _ in range(rounds):
        accountant.compose(dp.PoissonSampledDpEvent(participation, dp.GaussianDpEvent(noise)))
    return float(accountant.get_epsilon(1e-5))


if __name__ == "__main__":
    main()
