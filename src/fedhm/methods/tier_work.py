"""What a client of each tier gets to do, told without training: the very tasks, and the memory that they take."""

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from fedhm.config.schema import Config
from fedhm.measure.cost import SampleSpec, configured_training_memory, sample_spec, zero_batch
from fedhm.methods.method import AnyMethod
from fedhm.networks.exchange import exchanged_tensors, structure_digest
from fedhm.networks.inputs import Inputs, sample_shape
from fedhm.networks.saving import can_checkpoint
from fedhm.server.facts import TaskFacts
from fedhm.server.filters.fleet import Fleet, Planned, check_profiles
from fedhm.work.messages import Participant, Task
from fedhm.work.train import trained_as


class TierWork:
    """The work of a client of each tier, after a warm-up; it holds one network at a time, and exchanges all."""

    def __init__(
        self,
        method: AnyMethod,
        model: nn.Module,
        config: Config,
        input_shape: SampleSpec,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.tiers, self.levels = method.tiers, method.levels
        train, compiled = config.train, config.engine.compile
        sample = zero_batch(model, 1, input_shape, dtype)
        # whether clients may train with checkpointing where that is not asked of all of them
        self.can_checkpoint: Callable[[], bool] = cache(lambda: not compiled and can_checkpoint(model, sample))
        start = cache(lambda: method.start(exchanged_tensors(model)))
        self._tasks = cache(lambda tier: list(method.tasks(start(), [Participant(0, tier)], train.rounds)))
        self._train = train
        self._memory = cache(
            lambda network, train: configured_training_memory(method.network(network), input_shape, train, dtype)
        )

    def tasks(self, tier: str) -> list[Task]:
        found: list[Task] = self._tasks(tier)
        return found

    def memory(self, tier: str, checkpointing: bool = False) -> int:
        """Return the most memory that any of a client's tasks takes."""
        train = self._train.checkpointed if checkpointing else self._train
        return max(self._memory(task.network, trained_as(train, task)) for task in self.tasks(tier))


def plan_fleet(config: Config, model: nn.Module, method: AnyMethod, sample: Inputs, facts: TaskFacts) -> list[Planned]:
    """Find out which tier every client gets by its device, and what its rounds take; `sample` is a batch of one."""
    check_profiles(config.federation.devices, structure_digest(model, sample_shape(sample)), config.train)
    return Fleet(config, facts).plan(TierWork(method, model, config, *sample_spec(sample)))
