"""The weighted mean, dense and in factor form, against plain arithmetic."""

import pytest
import torch

from fedhm.lowrank.svd import roll
from fedhm.methods.means import WeightedMean, trained_rows
from fedhm.networks.spec import NetworkSpec
from fedhm.work.messages import Update


def test_dense_and_factored_contributions_add_up() -> None:
    old = {"w": torch.randn(6, 4, 3, 3, dtype=torch.float64)}
    dense = torch.randn_like(old["w"])
    left, right = torch.randn(12, 2, dtype=torch.float64), torch.randn(2, 18, dtype=torch.float64)
    mean = WeightedMean(old)
    mean.add("w", dense, 2.0)
    mean.add_product("w", left, right, 0.5)
    expected = (2 * dense + 0.5 * roll(left @ right, old["w"].shape)) / 2.5
    torch.testing.assert_close(mean.result()["w"], expected)


def test_what_nobody_contributed_to_keeps_its_value() -> None:
    old = {"a": torch.randn(3), "b": torch.randn(3)}
    mean = WeightedMean(old)
    mean.add("a", torch.ones(3), 1.0)
    assert torch.equal(mean.result()["b"], old["b"])
    assert torch.equal(mean.result()["a"], torch.ones(3))


def test_rows_are_averaged_over_those_who_trained_them() -> None:
    old = {"w": torch.full((4, 2), 9.0), "b": torch.full((4,), 9.0)}
    mean = WeightedMean(old)
    for name, ones in (("w", torch.ones(4, 2)), ("b", torch.ones(4))):
        mean.add(name, ones, 1.0, held_rows((0, 1), 4))
        mean.add(name, 4 * ones, 2.0, held_rows((1, 2), 4))
    assert mean.result()["w"].tolist() == [[1, 1], [3, 3], [4, 4], [9, 9]]
    assert mean.result()["b"].tolist() == [1, 3, 4, 9]


def held_rows(labels: tuple[int, ...] | None, rows: int, classifier: str | None = "fc") -> torch.Tensor | None:
    update = Update("train", 1, 0, "full", NetworkSpec("full"), {"fc.weight": torch.zeros(rows, 2)}, 1, labels, 0.0)
    return trained_rows(update, classifier)


def test_a_model_that_is_its_own_classifier() -> None:
    update = Update("train", 1, 0, "full", NetworkSpec("full"), {"weight": torch.zeros(3, 2)}, 1, (0, 2), 0.0)
    rows = trained_rows(update, "")
    assert rows is not None
    assert rows.tolist() == [1, 0, 1]
    assert trained_rows(update, None) is None


def test_without_a_classifier_or_missing_labels_all_rows_are_trained() -> None:
    assert held_rows((0, 1, 2), 3) is None
    assert held_rows(None, 3) is None
    assert held_rows((0,), 3, classifier=None) is None
    assert held_rows((0,), 3, classifier="elsewhere") is None


def test_the_type_of_the_weights_is_kept() -> None:
    for kind in (torch.float64, torch.bfloat16):
        mean = WeightedMean({"w": torch.zeros(3, 2, dtype=kind)})
        mean.add("w", torch.ones(3, 2, dtype=kind), 3.0, held_rows((0,), 3))
        assert mean.result()["w"].dtype == kind


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_are_averaged_in_32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    models = [torch.randn(5, 6, generator=generator).to(dtype) for _ in range(9)]
    left, right = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 2), (2, 5)))
    rows, samples = held_rows((0, 1), 5), 20_000.0  # their sum is beyond the largest number of float16
    old = {name: torch.zeros(5, 6, dtype=dtype) for name in ("whole", "rows", "part", "product")}
    mean = WeightedMean(old)
    for model in models:
        mean.add("whole", model, samples)
        mean.add("rows", model, samples, rows)
        mean.add_part("part", model[:, :3], samples, (None, torch.arange(3)))
        mean.add_product("product", left, right, samples)
    found, exact = mean.result(), torch.stack(models).float().mean(0).to(dtype)
    assert all(tensor.dtype == dtype for tensor in found.values())
    torch.testing.assert_close(found["whole"], exact)
    torch.testing.assert_close(found["rows"][:2], exact[:2])
    torch.testing.assert_close(found["part"][:, :3], exact[:, :3])
    torch.testing.assert_close(found["product"], (left.float() @ right.float()).T.to(dtype))


def test_complex_numbers_are_averaged() -> None:
    ones = torch.ones(4, 2, dtype=torch.complex64)
    mean = WeightedMean({"w": 9 * ones, "rows": 9 * ones})
    for value, weight, labels in ((1 + 2j, 1.0, (0, 1)), (4 - 1j, 2.0, (1, 2))):
        mean.add("w", value * ones, weight)
        mean.add("rows", value * ones, weight, held_rows(labels, 4))
    assert mean.result()["w"][0, 0] == 3
    assert mean.result()["rows"][:, 0].tolist() == [1 + 2j, 3, 4 - 1j, 9]
