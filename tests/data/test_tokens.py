"""Sequences of tokens: batches hold each once, padded to the longest of its own batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhm.config.registry import make
from fedhm.data.convert import to_samples
from fedhm.data.samples import Feed, Preprocessing, Samples, concatenate
from fedhm.data.tokens import Tokens
from fedhm.errors import FedhmError
from fedhm.networks.saving import backward_in_parts

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=60)


def samples(sizes: list[int]) -> Samples:
    ids = [[number + 1] * size for number, size in enumerate(sizes)]
    return Samples(Tokens.of({"input_ids": ids}, "it", padding=0), torch.arange(len(sizes)))


@settings(deadline=None, max_examples=30)
@given(sizes=lengths, size=st.integers(2, 9), seed=st.integers(0, 3))
def test_an_epoch_has_every_sequence_once_and_padding_is_masked(sizes: list[int], size: int, seed: int) -> None:
    feed = Feed(samples(sizes), Preprocessing())
    for batches in (feed.shuffled(size, torch.Generator().manual_seed(seed)), feed.ordered(size)):
        seen = []
        for inputs, labels in batches:
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            assert ids.shape[1] == max(sizes[label] for label in labels.tolist())
            assert torch.equal(ids, mask * (labels[:, None] + 1))
            assert mask.sum(1).tolist() == [sizes[label] for label in labels.tolist()]
            seen += labels.tolist()
        assert sorted(seen) == list(range(len(sizes)))


def test_buckets_keep_padding_small() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 60, (2000,), generator=generator).tolist()

    def padded(batches: list[torch.Tensor]) -> float:
        whole = sum(len(batch) * max(sizes[n] for n in batch.tolist()) for batch in batches)
        return 1 - sum(sizes) / whole

    tokens = samples(sizes).inputs
    assert isinstance(tokens, Tokens)
    assert padded(tokens.buckets(16, generator)) < 0.1
    assert padded(list(torch.randperm(2000, generator=generator).split(16))) > 0.4


def test_parts_of_the_samples_are_those_sequences() -> None:
    whole = samples([3, 1, 4, 1, 5])
    part = concatenate([whole.subset(torch.tensor([2, 0])), whole.subset(torch.tensor([4]))])
    assert part.labels.tolist() == [2, 0, 4]
    inputs, labels = next(Feed(part, Preprocessing()).ordered(8))
    assert [row.tolist() for row in inputs["input_ids"]] == [[1] * 3 + [0] * 2, [3] * 4 + [0], [5] * 5]
    assert labels.tolist() == [0, 2, 4]


def test_targets_of_tokens_are_padded_by_what_is_not_counted() -> None:
    objective = make("objectives", "causal_lm")
    told = {"input_ids": [[5, 6, 7], [8]], "labels": [[-100, 6, 7], [8]]}
    given_ = to_samples((told, None), "it", torch.float32, objective)
    _, targets = next(Feed(given_, Preprocessing()).ordered(4))
    assert targets.tolist() == [[8, -100, -100], [-100, 6, 7]]
    without = to_samples(({"input_ids": [[5, 6, 7], [8]]}, None), "it", torch.float32, objective)
    assert next(Feed(without, Preprocessing()).ordered(4))[1].tolist() == [[8, -100, -100], [5, 6, 7]]


def test_a_tokenizers_padding_and_a_data_set_of_hugging_face_are_read() -> None:
    datasets = pytest.importorskip("datasets")
    objective = make("objectives", "classification")
    ids, mask = torch.tensor([[4, 5, 0], [6, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    padded = to_samples(({"input_ids": ids, "attention_mask": mask}, [1, 0]), "it", torch.float32, objective)
    table = datasets.Dataset.from_dict({"input_ids": [[4, 5], [6]], "text": ["a b", "c"], "label": [1, 0]})
    read = to_samples(table, "it", torch.float32, objective)
    for each in (padded, read):
        assert isinstance(each.inputs, Tokens)
        assert each.inputs.lengths.tolist() == [2, 1]
        assert each.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("given_", "sentence"),
    [
        (({"input_ids": [[1], []]}, [0, 1]), "a sample without any token"),
        (({"input_ids": [[1], [2]]}, [0]), "2 sequences, but 1 labels"),
        (({"input_ids": [[1], [2]], "attention_mask": [[1], [1, 1]]}, [0, 1]), "must be as long as"),
        (({"input_ids": [1, 2]}, [0, 1]), "a list of token numbers for each sample"),
        ({"input_ids": [[1], [2]]}, "no column 'label'"),
    ],
)
def test_what_is_no_text_is_one_sentence(given_: object, sentence: str) -> None:
    with pytest.raises(FedhmError, match=sentence):
        to_samples(given_, "it", torch.float32, make("objectives", "classification"))  # type: ignore[arg-type]


def test_parts_of_a_batch_of_several_tensors_add_up() -> None:
    layer = torch.nn.Embedding(9, 3)

    def loss(inputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(layer(inputs["input_ids"]).mean(1), targets)

    batch, targets = {"input_ids": torch.arange(8).view(4, 2)}, torch.tensor([0, 1, 2, 0])
    found = []
    for most in (0, 2):
        layer.weight.grad = None
        backward_in_parts(loss, batch, targets, most, [layer.weight])
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
    torch.testing.assert_close(*found)
