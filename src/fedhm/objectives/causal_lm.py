"""Causal language modelling: the cross-entropy of every token, given the tokens before it; perplexity = exp(loss).

The output (batch, length, vocabulary) at a position predicts the next token. A target of −100 does not count.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhm.config.objective import Metric, Metrics, Objective
from fedhm.errors import FedhmError
from fedhm.networks.exchange import upcast_half

NOT_COUNTED = -100
MOST = 700.0  # exp of a larger loss overflows


class CausalLM(Objective):
    name: Literal["causal_lm"] = "causal_lm"
    metrics: ClassVar = (Metric("perplexity", more_is_better=False), Metric("loss", more_is_better=False))
    per_token: ClassVar = True
    lowest_loss: ClassVar[float | None] = 0.0

    def as_targets(self, given: Tensor, whose: str, dtype: torch.dtype) -> Tensor:
        return given.long()

    def outputs(self, targets: Sequence[Tensor]) -> int:
        return 1 + max((int(each.max()) for each in targets if len(each)), default=0)

    def check(self, targets: Tensor, outputs: int, whose: str) -> None:
        if targets.dtype != torch.int64 or targets.ndim != 1:
            raise FedhmError(f"{whose} must have sequences of tokens: causal_lm predicts each from those before it")

    def check_output(self, output: Tensor, outputs: int) -> None:
        if output.ndim != 3:
            shape = tuple(output.shape)
            raise FedhmError(f"a language model must give a score for every token at every place, not {shape}")

    def loss(self, output: Tensor, targets: Tensor, held: tuple[int, ...] | None) -> Tensor:
        # a batch without any target has a loss of 0, not NaN
        return _summed(output, targets) / _counted(targets).clamp(min=1)

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"loss": _summed(upcast_half(output), targets), "tokens": _counted(targets)}

    def results(self, sums: Mapping[str, Tensor], samples: int) -> Metrics:
        loss = sums["loss"].item() / max(1.0, sums["tokens"].item())
        return Metrics(perplexity=math.exp(loss) if loss < MOST else math.inf, loss=loss)

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True)


def _summed(output: Tensor, targets: Tensor) -> Tensor:
    scores, following = output[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
    return F.cross_entropy(scores, following, ignore_index=NOT_COUNTED, reduction="sum")


def _counted(targets: Tensor) -> Tensor:
    return (targets[:, 1:] != NOT_COUNTED).sum()


ENTRY_POINT = CausalLM
