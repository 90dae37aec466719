"""On an accelerator, masks of transformers are made without asking whether anything is padded."""

from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest
import torch

from fedhm.engines.masks import LONG, masks_without_waiting
from fedhm.machine.device import CPU
from tiny_transformers import needs_peft, tiny_bert, tiny_gpt2

ACCELERATOR = torch.device("meta")  # any that is not the CPU
pytestmark = needs_peft


def masking() -> Any:
    return import_module("transformers.masking_utils")


def made(kind: str, seen: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of attention to all tokens that are seen."""
    length = seen.shape[1]
    find: Any = masking().ALL_MASK_ATTENTION_FUNCTIONS[kind]
    every = masking().bidirectional_mask_function
    options: dict[str, bool] = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    found: torch.Tensor | None = find(len(seen), length, length, mask_function=every, attention_mask=seen, **options)
    return found


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_mask_that_hides_nothing_is_made_on_an_accelerator_only(kind: str) -> None:
    full, long = torch.ones(2, 5, dtype=torch.bool), torch.ones(1, LONG, dtype=torch.bool)
    padded = full.clone()
    padded[1, 3:] = False
    before = made(kind, padded)
    assert before is not None
    with masks_without_waiting(CPU):
        assert made(kind, full) is None
    with masks_without_waiting(ACCELERATOR):
        mask, same = made(kind, full), made(kind, padded)
        assert mask is not None
        assert same is not None
        assert bool((mask if kind == "sdpa" else mask == 0).all())
        assert torch.equal(same, before)
        assert made(kind, long) is None
    assert made(kind, full) is None


def test_the_masks_of_transformers_are_its_own_afterwards_even_if_a_step_fails() -> None:
    registry = masking().ALL_MASK_ATTENTION_FUNCTIONS
    before = dict(registry)
    for _ in range(2):
        seen = []
        with suppress(ValueError), masks_without_waiting(ACCELERATOR):
            seen.append(dict(registry))
            raise ValueError("a step fails")
        assert dict(registry) == before
        assert before not in seen
    with masks_without_waiting(ACCELERATOR):
        assert seen == [dict(registry)]  # nothing that torch has compiled is compiled again


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [tiny_bert, tiny_gpt2])
def test_a_model_gives_the_same_outputs(make: Any, padded: bool) -> None:
    model = make().double().eval()
    ids = torch.randint(3, 30, (3, 7), generator=torch.Generator().manual_seed(0))
    seen = torch.ones_like(ids)
    seen[2, 4:] = int(not padded)
    outputs = []
    for device in (CPU, ACCELERATOR):
        with masks_without_waiting(device), torch.no_grad():
            outputs.append(model(input_ids=ids, attention_mask=seen).logits)
    if padded:
        assert torch.equal(*outputs)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
