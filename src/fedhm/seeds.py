"""Randomness is passed, never global: every draw has a generator named by what it is for."""

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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


@dataclass
class Secret:
    """A secret that several hold before it is known: it is filled in when a run starts."""

    value: bytes = field(default=b"", repr=False)


# What must stay hidden from all who do not have a secret: torch's and numpy's generators can be seen through.


def secret_uniforms(secret: bytes, count: int, *purpose: int | str) -> NDArray[np.float64]:
    """Return numbers from 0 up to 1, in steps of 2⁻⁵³, that follow from a secret and what they are for."""
    name = "/".join(str(part) for part in purpose).encode()
    stream = hashlib.shake_256(len(secret).to_bytes(8, "big") + secret + name).digest(8 * count)
    return (np.frombuffer(stream, dtype="<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53


def secret_normals(secret: bytes, count: int, *purpose: int | str) -> Tensor:
    """Return numbers of the standard normal distribution, in double precision, by Box and Muller's method."""
    half = (count + 1) // 2
    first, second = np.split(secret_uniforms(secret, 2 * half, *purpose), 2)
    radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * math.pi * second
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])
