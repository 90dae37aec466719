"""One model at several widths, for methods whose tiers are widths: a tier's network is a slice of the full model."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from fedhm.config.section import width_name
from fedhm.errors import FedhmError
from fedhm.methods.means import WeightedMean, client_weight, trained_rows
from fedhm.methods.method import Setup
from fedhm.networks.exchange import Tensors
from fedhm.networks.spec import NetworkSpec
from fedhm.widths.narrow import channel_indices, check_alignment, narrow_network, select_channels
from fedhm.widths.plan import WidthPlan, plan_widths
from fedhm.widths.wrappers import divide_weights, scaled_layers, with_scaler
from fedhm.work.messages import Participant, Task, Update


class WidthSlices:
    """The networks of every width, and which channels of the full model they have.

    With a scaler (`widths/wrappers.py`), activations are divided by a width's share of the width `scaled_to`, which
    counts as the whole network.
    """

    def __init__(
        self, model: nn.Module, widths: Sequence[float], setup: Setup, *, scaled_to: float | None = None
    ) -> None:
        if not isinstance(setup.sample, Tensor):
            reason = "its setup has no sample" if setup.sample is None else "it cannot be one of several tensors"
            raise FedhmError(f"a method of widths must see an input of the model: {reason}")
        self.levels = tuple(width_name(width) for width in sorted(widths, reverse=True))
        self.widths = {width_name(width): width for width in sorted(widths, reverse=True)}
        self.tiers = tuple(self.widths)
        self._model, self._classifiers = model, setup.output_layers
        sample = setup.sample[:1]
        self._plans = {tier: self._plan(width, sample) for tier, width in self.widths.items()}
        self._shares = {
            tier: width / scaled_to
            for tier, width in self.widths.items()
            if scaled_to is not None and width != scaled_to and scaled_layers(self._plans[tier])
        }

    def _plan(self, width: float, sample: Tensor) -> WidthPlan:
        if width == 1:
            return {}
        plan = plan_widths(self._model, width, sample, self._classifiers)
        check_alignment(self._model, plan, sample)
        return plan

    def trained_spec(self, tier: str) -> NetworkSpec:
        """Return the network that clients of a tier train: with a scaler, if that makes a difference."""
        return NetworkSpec(tier, f"scaled {tier}", "scaled") if tier in self._shares else NetworkSpec(tier)

    def network(self, spec: NetworkSpec) -> nn.Module:
        """Return a tier's network as it is deployed, or with a scaler as it is trained."""
        network = narrow_network(self._model, self._plans[spec.tier])
        if spec.variant != "scaled":
            return network
        return with_scaler(network, self._plans[spec.tier], self._shares[spec.tier])

    def deployed_weights(self, tensors: Tensors, tier: str) -> Tensors:
        """Return the weights of the deployed network, from those of the network that was trained with a scaler."""
        return divide_weights(tensors, self._plans[tier], self._shares[tier]) if tier in self._shares else tensors

    def slice_weights(self, weights: Tensors, tier: str, offset: int = 0) -> Tensors:
        """Return the tier's slice of the full model's weights: a window of channels that starts at `offset`."""
        plan = self._plans[tier]
        return {name: select_channels(t, channel_indices(plan, name, t.ndim, offset)) for name, t in weights.items()}

    def rescale_init(self, tensors: Tensors, tier: str) -> Tensors:
        """Rescale sliced initial weights to a tier's width: initial weights shrink with the number of inputs."""
        cuts = {name: self._plans[tier].get(name.rpartition(".")[0]) for name in tensors}
        scale = {name: (c.inputs.full / c.inputs.kept) ** 0.5 for name, c in cuts.items() if c and c.inputs}
        return {name: tensor * scale.get(name, 1.0) for name, tensor in tensors.items()}

    def tasks(
        self, weights: Tensors, participants: Sequence[Participant], round_number: int, offset: int = 0
    ) -> Iterator[Task]:
        """Yield a task for every participant: train its tier's slice of the full model."""
        sent = {tier: self.slice_weights(weights, tier, offset) for tier in {p.tier for p in participants}}
        for p in participants:
            yield Task("train", round_number, p.client, p.tier, self.trained_spec(p.tier), sent[p.tier])

    def merge(self, weights: Tensors, updates: Iterable[Update], weighting: str, offset: int = 0) -> Tensors:
        """Return the full model, each number averaged over the clients whose slice has it."""
        mean = WeightedMean(weights)
        for update in updates:
            rows = trained_rows(update, self._classifiers)
            for name, tensor in update.tensors.items():
                indices = channel_indices(self._plans[update.tier], name, tensor.ndim, offset)
                own_rows = rows if name.rpartition(".")[0] in self._classifiers else None
                mean.add_part(name, tensor, client_weight(update, weighting), indices, own_rows)
        return mean.result()
