"""How a smaller tier is nested in a training graph. It stands alone, because importing torch.export takes long."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedhm.lowrank.hybrid import NestedTiers


@dataclass(frozen=True)
class Nesting:
    """A smaller tier that is trained inside the network, with the same batches (`fedhm.work.nested`)."""

    inside: NestedTiers
    weight: float  # w: of the smaller tier's loss
    parts: float  # by which both losses are divided: 1 for their sum, 1 + w for their mean
    bases: Mapping[str, tuple[int, ...]]  # the shapes of the directions that come with a task, by layer
