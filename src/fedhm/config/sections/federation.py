"""The clients: how many, who of them takes part, what they can afford."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedhm.config.section import Positive, Section
from fedhm.config.sections.devices import DeviceConfig, clients_of

NO_TIER = "none"  # of a client whose device can train none: it is sampled like the others, and left out


class FederationConfig(Section):
    clients: Positive = 20
    participation: Annotated[float, Field(gt=0, le=1)] = 0.5  # share of the clients sampled each round
    heterogeneity: Literal["fixed", "dynamic"] = "fixed"  # client p has tier p mod Γ, or draws one each round
    assignment: tuple[str, ...] = ()  # each client's tier by name, in place of p mod Γ
    min_updates: Positive = 1  # a round that brings fewer is tried again with other clients
    attempts: Positive = 3  # at a round, before the run ends
    devices: tuple[DeviceConfig, ...] = ()  # in place of p mod Γ: clients get the tier that fits their device
    deadline: Annotated[float, Field(ge=0)] = 0.0  # of a round, in simulated seconds; 0: no limit
    late: Literal["drop", "wait"] = "drop"  # the round ends without clients that are later, or waits for them
    unfit: Literal["refuse", "leave-out", "smallest"] = "refuse"  # what becomes of devices that no tier fits
    reference_macs_per_second: Annotated[float, Field(gt=0)] = 5e9  # of a device with speed 1, in training: MACs of
    # forward passes
    plan: tuple[str, ...] = ()  # each client's tier by its device, as a run found it at its start
    checkpointed: tuple[int, ...] = ()  # likewise, the clients that train with checkpointing
    inputs: str = ""  # likewise, what an input is like, by what most clients say to a server that has no samples

    @model_validator(mode="after")
    def _devices_decide(self) -> "FederationConfig":
        if self.devices:
            if self.heterogeneity == "dynamic":
                raise ValueError("devices decide on their clients' tiers: set heterogeneity to 'fixed'")
            if self.assignment:
                raise ValueError("devices decide on their clients' tiers: leave assignment empty")
            clients_of(self.devices, self.clients)
        elif self.deadline:
            raise ValueError("deadline is in simulated seconds, which follow from devices: list some")
        if self.plan and (not self.devices or len(self.plan) != self.clients):
            raise ValueError("plan is found by runs with devices, and has a tier for each client: leave it empty")
        return self

    def per_round(self, clients: int) -> int:
        """Return how many of so many clients take part in a round."""
        return max(1, round(self.participation * clients))

    @property
    def given_tiers(self) -> tuple[str, ...]:
        """Return each client's tier, where somebody or its device has decided on it; otherwise nothing."""
        return self.plan or self.assignment

    @property
    def device_of(self) -> tuple[DeviceConfig, ...]:
        """Return each client's device; empty where there are none."""
        return tuple(self.devices[n] for n in clients_of(self.devices, self.clients)) if self.devices else ()

    def with_files_read(self) -> "FederationConfig":
        if not any(device.file for device in self.devices):
            return self
        return self.model_copy(update={"devices": tuple(device.with_file_read() for device in self.devices)})


def fixed_level(client: int, levels: int) -> int:
    """Return which of so many capability levels a client stays at whose tier nobody assigned; 0 is the strongest."""
    return client % levels
