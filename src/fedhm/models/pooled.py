"""A classifier of texts on the mean of their tokens' outputs, as sentence encoders are trained to be read."""

from typing import Any

from torch import Tensor, nn


class MeanPooled(nn.Module):
    """An encoder of transformers with a linear layer on the mean of its outputs, as `model.pooling = "mean"` has it."""

    def __init__(self, encoder: nn.Module, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        settings: Any = encoder.config
        self.config = settings  # where peft and others look for what kind of model this is
        self.classifier = nn.Linear(settings.hidden_size, outputs)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.encoder.get_input_embeddings()  # type: ignore[operator]
        return found

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **more: Tensor) -> Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **more).last_hidden_state  # (B, T, d)
        counted = attention_mask[..., None].to(states.dtype)
        scores: Tensor = self.classifier((states * counted).sum(1) / counted.sum(1))
        return scores
