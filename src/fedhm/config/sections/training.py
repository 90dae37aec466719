"""The settings of training: what clients do with their samples, and the server with what comes back."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fedhm.config.section import Positive, Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Section):
    as_before: ClassVar = {"nested": 0.0, "nested_tier": "random"}

    rounds: Positive = 20
    epochs: Positive = 1
    batch: Positive = 64
    micro_batch: Annotated[int, Field(ge=0)] = (
        0  # a batch goes through the network in parts of so many samples, for one
    )
    # step: less memory; 0: all at once
    checkpointing: bool | tuple[str, ...] = False  # blocks of the network, found or named, run again in the backward
    # pass: less memory for a third more computation, and the same weights
    frozen_statistics: bool = False  # BatchNorm layers normalise by the statistics that the model came with
    lr: Annotated[float, Field(gt=0)] = 0.1
    head_factor: Annotated[float, Field(gt=0)] = 1.0  # on the learning rate, of a new head beside adapters
    milestones: tuple[int, ...] = ()  # rounds after which the learning rate is multiplied by lr_decay
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    optimizer: Literal["sgd", "adamw"] = "sgd"  # torch's own
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of sgd, as are the next two
    dampening: Annotated[float, Field(ge=0, le=1)] = 0.0
    nesterov: bool = False
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # of adamw, as are the next two
    eps: Annotated[float, Field(gt=0)] = 1e-8
    amsgrad: bool = False
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    frobenius_decay: Annotated[float, Field(ge=0)] = 1e-4
    decay_factors: bool = False  # plain weight decay on the factors too, as published FedHM code does
    masked_loss: bool = True  # logits of labels that a client does not hold count as 0
    nested: Annotated[float, Field(ge=0, le=1)] = 0.5  # of FedHM by bands: how much a client trains a smaller tier, too
    nested_tier: Literal["smallest", "random"] = "smallest"  # always that one, or one drawn for every batch
    # both losses on every batch, as their sum or their mean, or the other one alone on this share of the batches; auto:
    # the sum, whose steps are longer, where the network has normalisation layers, which bear that
    nested_form: Literal["auto", "sum", "beside", "instead"] = "auto"
    clip_norm: Annotated[float, Field(ge=0)] = 0.0  # largest gradient norm; 0 is no limit
    max_change: Annotated[float, Field(ge=0)] = 10.0  # largest ‖update − sent‖ / max(‖sent‖, 1); 0 is no limit
    on_bad_update: Literal["auto", "stop", "drop"] = "auto"  # stop with the local engine, drop with Flower

    @model_validator(mode="after")
    def _as_torch_has_it(self) -> "TrainConfig":
        if self.nesterov and self.optimizer == "sgd" and (self.momentum == 0 or self.dampening):
            raise ValueError("nesterov needs a momentum, and no dampening")
        if self.nested_form == "instead" and self.nested == 1:
            raise ValueError("nested_form = 'instead' needs a nested below 1, or no larger tier would be trained")
        if not self.learning_rate(self.rounds):  # norms of changes are measured in multiples of it
            raise ValueError("lr is multiplied by lr_decay at so many milestones that it is 0 in the last round")
        return self

    @property
    def checkpointed(self) -> "TrainConfig":
        """Return these settings with checkpointing, of the blocks that are named or found."""
        return self if self.checkpointing else self.model_copy(update={"checkpointing": True})

    @property
    def parts(self) -> int:
        """Return the samples in a micro-batch; 0: a batch goes through the network at once."""
        return self.micro_batch if self.micro_batch < self.batch else 0

    @property
    def nested_shares(self) -> tuple[float, float] | None:
        """Return the shares of the batches that run through a client's own network and through one inside it."""
        if not self.nested:
            return None
        return (1 - self.nested, self.nested) if self.nested_form == "instead" else (1.0, 1.0)

    def learning_rate(self, round_number: int) -> float:
        """Return the learning rate of round 1, 2, …; a milestone is the last round before a drop."""
        return self.lr * self.lr_decay ** sum(round_number > milestone for milestone in self.milestones)


class ServerConfig(Section):
    """What the server makes of a round's updates: how far each may go, and their mean itself or a step towards it."""

    as_before: ClassVar = {"robust": "none"}

    optimizer: Literal["none", "momentum", "adam"] = "none"  # FedAvgM, FedAdam
    lr: Annotated[float, Field(ge=0)] = 0.0  # of the server's steps; 0: 1 with momentum, 0.01 with adam
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # β of momentum
    betas: tuple[Beta, Beta] = (0.9, 0.99)  # β₁ and β₂ of adam
    tau: Annotated[float, Field(gt=0)] = 1e-3  # τ of adam: its degree of adaptivity
    # against hostile clients; auto: clip, or none where the server hides its clients by noise
    robust: Literal["auto", "none", "clip", "centered-clip", "krum", "trimmed-mean", "median"] = "auto"
    attackers: Annotated[int, Field(ge=0)] = 1  # of krum: how many of a round's participants may be hostile
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2  # of trimmed-mean: the share that is left out at each end

    @property
    def learning_rate(self) -> float:
        return self.lr or (0.01 if self.optimizer == "adam" else 1.0)


class StopConfig(Section):
    """When a run ends before its last round: never, if neither a patience nor a target is set."""

    as_before: ClassVar = {"clients": "pooled"}

    patience: Annotated[int, Field(ge=0)] = 0  # so many evaluations without an improvement end it; 0: never
    min_change: Annotated[float, Field(ge=0)] = 0.0  # of the headline metric: what is not more is no improvement
    target: float | None = None  # the headline metric's value at which it ends, as records have it: 0.97
    tier: str = ""  # whose model counts; empty: the largest tier's
    # where only clients evaluate: what of their metrics counts. One that lies moves the pooled ones as far as it likes
    clients: Literal["median", "pooled"] = "median"

    @property
    def active(self) -> bool:
        return self.patience > 0 or self.target is not None
