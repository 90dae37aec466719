"""Networks that run another network for each batch of their training, as ordered dropout does."""

from collections.abc import Sequence

from torch import nn


def run_in_training(network: nn.Module) -> Sequence[nn.Module]:
    """The networks of which `network` draws one for each batch (`drawn`), the widest first, or `network` itself.

    They share the weights of the first.
    """
    drawn: Sequence[nn.Module] | None = getattr(network, "drawn", None)
    return drawn or [network]
