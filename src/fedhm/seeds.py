"""Randomness is passed, never global: every draw has a generator named by what it is for."""

import hashlib

import numpy as np
import torch


def derive(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed for one purpose, e.g. `derive(seed, "train", round, client)`.

    Hashing, rather than adding, keeps neighbouring rounds and clients unrelated.
    """
    name = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *purpose: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive(seed, *purpose))


def numpy_generator(seed: int, *purpose: int | str) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *purpose))
