"""The settings of differential privacy: what one client can change at most, and how much noise hides it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedhm.config.section import Section

LEAST_NOISE = 1e-6  # with far less ε is no longer a number, and with this it is of the order of 10¹² already


class PrivacyConfig(Section):
    """Off, unless a bound is set; a bound without noise guarantees nothing."""

    clip: Annotated[float, Field(ge=0)] = 0.0  # C: the largest norm of one client's change, of all tensors together
    noise: Annotated[float, Field(ge=0)] = 0.0  # z: the noise has a standard deviation of z · C
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # δ at which ε is stated
    where: Literal["server", "client"] = "server"  # who adds the noise: a server that is trusted, or every client

    @model_validator(mode="after")
    def _noise_hides_something_bounded(self) -> "PrivacyConfig":
        if self.noise and not self.clip:
            raise ValueError("noise is in units of clip, which is 0: set privacy.clip, too")
        if 0 < self.noise < LEAST_NOISE:
            raise ValueError(f"noise = {self.noise:g} hides nothing: set {LEAST_NOISE:g} or more, or 0 for none")
        return self

    @property
    def active(self) -> bool:
        return self.clip > 0

    @property
    def at_server(self) -> bool:
        return self.active and self.where == "server"

    @property
    def at_clients(self) -> bool:
        return self.active and self.where == "client"
