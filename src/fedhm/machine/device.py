"""Where networks run: the device that a run asks for, and randomness on it for one purpose alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedhm.errors import FedhmError

CPU = torch.device("cpu")


def find_device(name: str) -> torch.device:
    """Return the device of this name, which must be there; `auto` is a CUDA device where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()
    except Exception as error:  # torch has no error of its own for this
        reason = str(error).partition("\n")[0] or repr(error)
        raise FedhmError(f"engine.device = '{name}' cannot be used with this PyTorch: {reason}") from None
    return device


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed the global generators for a while, and restore them afterwards: dropout and the like know no others.

    `torch.manual_seed` would do so for every kind of device, and takes longer than a step of a small network.
    """
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        yield
