"""The demo keeps its promise: every tier ends within one point of full-model FedAvg, with the same rounds and seeds."""

import pytest

import fedhm


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_tier_is_within_a_point_of_full_fedavg(seed: int) -> None:
    def scores(*changes: str) -> dict[str, float]:
        config = fedhm.load_config("digits", [f"seed={seed}", "evaluation.every=1000", *changes])
        return {tier: score.accuracy for tier, score in fedhm.prepare(config).run().metrics.items()}

    reference = scores("method.name=fedavg")["full"]
    tiers = scores()
    assert set(tiers) == {"full", "1/2", "1/4", "1/8"}
    assert min(tiers.values()) > reference - 0.01
