"""The objectives of text: F1 as scikit-learn has it, and the loss of each token from those before it."""

import math

import torch
import torch.nn.functional as F

from fedhm.config.registry import make


def test_macro_f1_is_scikit_learns_also_in_batches() -> None:
    from sklearn.metrics import f1_score

    generator = torch.Generator().manual_seed(0)
    objective = make("objectives", "sequence_classification")
    output, targets = torch.randn(60, 7, generator=generator), torch.randint(0, 5, (60,), generator=generator)
    parts = [objective.sums(output[rows], targets[rows]) for rows in torch.arange(60).split(13)]
    sums = {name: sum(part[name].double() for part in parts) for name in parts[0]}
    found = objective.results(sums, 60)
    assert math.isclose(found.macro_f1, f1_score(targets, output.argmax(1), average="macro"))
    assert math.isclose(found.accuracy, (output.argmax(1) == targets).double().mean().item())


def test_a_token_is_predicted_from_those_before_it_and_minus_100_does_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    objective = make("objectives", "causal_lm")
    output = torch.randn(2, 4, 9, generator=generator)
    targets = torch.tensor([[3, 4, 5, 6], [7, -100, 8, -100]])
    expected = [-F.log_softmax(output[0, place], 0)[token] for place, token in ((0, 4), (1, 5), (2, 6))]
    expected.append(-F.log_softmax(output[1, 1], 0)[8])
    mean = torch.stack(expected).mean()
    torch.testing.assert_close(objective.loss(output, targets, None), mean)
    found = objective.results({n: t.double() for n, t in objective.sums(output, targets).items()}, 2)
    assert math.isclose(found.loss, mean.item(), rel_tol=1e-6)
    assert math.isclose(found.perplexity, math.exp(found.loss))
    assert objective.loss(output, torch.full_like(targets, -100), None) == 0
