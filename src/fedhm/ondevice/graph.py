"""From a network to the graph of its training step, for ExecuTorch.

One step of the graph, for a fixed number of rows B (a batch; rows that are missing have weight 0):

    train(inputs (B, …), targets (B, …), weights (B,), held (outputs,)) →
        Σ wᵢ lossᵢ / Σ wᵢ  +  λ/2 Σ ‖L R‖²_F        what is differentiated: the loss and the Frobenius decay
        Σ wᵢ lossᵢ / Σ wᵢ                           the loss that is reported
        mean, variance of each BatchNorm layer      with which the loop moves the running averages
        the gradient of every parameter

    evaluate(every tensor that travels …, inputs (B, …)) → outputs

Clipping, weight decay, momentum and the learning rate belong to the loop around the graph: they change from round to
round, and ExecuTorch has an optimizer for them.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fedhm.config.objective import Objective
from fedhm.config.schema import TrainConfig
from fedhm.data.samples import Preprocessing
from fedhm.errors import FedhmError
from fedhm.lowrank.layers import LowRank
from fedhm.machine.printable import printable
from fedhm.networks.batchnorm import running_statistic_names
from fedhm.networks.exchange import held_tensors
from fedhm.networks.info import info_of
from fedhm.networks.structure import copy_network
from fedhm.ondevice.executorch import lower, plain
from fedhm.ondevice.nesting import Nesting
from fedhm.ondevice.rewrites import Statistic, layer_name, operator_name, rewrite

PREFIX = "network."  # of the names of a network's tensors in the graph
WEIGHTS = "weights"  # the input with a weight for each row


@dataclass(frozen=True)
class Example:
    """What a graph's inputs look like: one batch of any size, as the graph takes it."""

    inputs: Tensor  # raw images (N, C, H, W) in uint8, with a preprocessing; otherwise as the network takes them
    targets: Tensor
    outputs: int  # classes, or numbers to predict
    preprocessing: Preprocessing | None = None  # the graph normalises images itself


@dataclass(frozen=True)
class TrainingGraph:
    """A network's training step, as ExecuTorch reads it, and the facts that a loop around it needs."""

    program: bytes  # the .pte file
    rows: int
    parameters: tuple[str, ...]  # in the order of their gradients
    statistics: tuple[Statistic, ...]  # in the order of their outputs
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and type of each input of a step
    tensors: tuple[str, ...]  # that travel, in the order of the inputs of `evaluate`
    bases: tuple[str, ...]  # layers whose directions are inputs, too, in their order
    layers: Mapping[str, str]  # for each operator a layer that has it, for sentences
    uses: Mapping[str, str]  # for each parameter its layer and the operators behind it, for sentences


def rows_for(batch: int) -> int:
    """Return the rows of a graph for batches of this size: a single last sample joins the batch before it."""
    return batch + 1


def build_graph(
    network: nn.Module, objective: Objective, train: TrainConfig, example: Example, nesting: Nesting | None = None
) -> TrainingGraph:
    """Return the training graph of a network, or refuse it in one sentence."""
    network = copy_network(network)
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = plain(tensor)  # networks of clients are channels-last
    rows, bases = rows_for(train.batch), dict(nesting.bases) if nesting else {}
    _check_network(network)
    inputs, targets = _filled(example.inputs, rows), _filled(example.targets, rows)
    held = torch.ones(example.outputs)
    directions = [torch.zeros(shape) for shape in bases.values()]
    given = (inputs, targets, torch.ones(rows), held, *directions)
    step = TrainingStep(network.train(), objective, train.frobenius_decay, example.preprocessing, nesting)
    try:
        with torch.enable_grad():
            _check_gradients(step, given)
            graph = torch.export.export(step, given).module(check_guards=False)
    except FedhmError:
        raise
    except Exception as error:  # whatever torch, or a foreign model, raises
        raise FedhmError(
            "the training step cannot be exported, since torch.export cannot follow the model's forward. It must not "
            f"branch on the values of samples: {_reason(error)}"
        ) from error
    assert isinstance(graph, GraphModule)
    uses = _uses(graph)
    operators = {operator_name(node): layer_name(node) for node in graph.graph.nodes if node.op == "call_function"}
    statistics = rewrite(graph, WEIGHTS, PREFIX)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    try:
        joint = _with_gradients(graph, given)
        forward = _evaluation(network, example, inputs)
    except FedhmError:
        raise
    except Exception as error:
        raise FedhmError(f"torch cannot differentiate the training step as a graph: {_reason(error)}") from error
    parameters = tuple(
        name.removeprefix(PREFIX)
        for name in (joint.graph_signature.backward_signature.gradients_to_parameters.values())
    )
    trained = {name for name, _ in network.named_parameters()}
    if set(parameters) != trained:
        lost = min(trained ^ set(parameters))
        raise FedhmError(f"'{lost}' has several names: a training graph needs a tensor of its own for each")
    program = lower({"train": joint, "evaluate": forward}, operators)
    tensors = tuple(held_tensors(network))
    formats = tuple((tuple(each.shape), each.dtype) for each in given)
    return TrainingGraph(program, rows, parameters, tuple(statistics), formats, tensors, tuple(bases), operators, uses)


class TrainingStep(nn.Module):
    """The losses of one batch, of which the first is differentiated."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        objective: Objective,
        decay: float,
        preprocessing: Preprocessing | None = None,
        nesting: Nesting | None = None,
    ) -> None:
        super().__init__()
        self.network, self._objective, self._decay, self._nesting = network, objective, decay, nesting
        self._normalised = preprocessing is not None
        for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)) if preprocessing else ():
            self.register_buffer(name, (torch.tensor(values) * 255)[:, None, None])

    def forward(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, held: Tensor, *bases: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self._normalised:
            inputs = (inputs.float() - self.mean) / self.std

        def mean_loss(output: Tensor) -> Tensor:
            losses = self._objective.sample_losses(output, targets, held)
            if losses is None:
                raise FedhmError(
                    f"the objective '{self._objective.name}' has no loss for each sample (sample_losses), which a "
                    "training graph needs"
                )
            return (losses * weights).sum() / weights.sum()

        loss = mean_loss(self.network(inputs))
        if self._nesting:
            named = dict(zip(self._nesting.bases, bases, strict=True))
            smaller = mean_loss(self._nesting.inside.forward(0, self.network, named, inputs))
            loss = (loss + smaller * self._nesting.weight) / self._nesting.parts
        total = loss
        for layer in self.network.modules() if self._decay else ():
            if isinstance(layer, LowRank):
                total = total + self._decay / 2 * squared_product_norm(layer.u, layer.v)
        return total, loss.detach() * 1.0


def squared_product_norm(u: Tensor, v: Tensor) -> Tensor:
    """Return ‖L R‖²_F by the Gram matrices of the factors: Σ (vᵀ v) ∘ (u uᵀ), both r×r."""
    left = v.movedim(1, -1).flatten(0, -2)  # (·, r)
    right = u.flatten(1)  # (r, ·)
    return ((left.T @ left) * (right @ right.T)).sum()


def _with_gradients(graph: nn.Module, example: tuple[Tensor, ...]) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.export.experimental import _export_forward_backward

        joint = _export_forward_backward(torch.export.export(graph, example))
    _without_empty(joint.graph_module)
    return joint


def _without_empty(graph: GraphModule) -> None:
    """Replace tensors without values, an operator that the runtime lacks, by zeros: they are filled afterwards."""
    empty = {torch.ops.aten.empty_permuted.default, torch.ops.aten.empty.memory_format}
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in empty:
            with graph.graph.inserting_before(node):
                zeros = graph.graph.call_function(
                    torch.ops.aten.full.default, (node.args[0], 0), {"dtype": node.meta["val"].dtype}
                )
            zeros.meta = dict(node.meta)
            node.replace_all_uses_with(zeros)
            graph.graph.erase_node(node)
    graph.recompile()


class _Evaluation(nn.Module):
    """The network's outputs, as a function of all tensors that travel."""

    def __init__(self, network: nn.Module, names: Sequence[str], preprocessing: Preprocessing | None) -> None:
        super().__init__()
        self._network, self._names = [network], names  # in a list: its tensors are inputs, not parts of the graph
        self._step = [TrainingStep(nn.Identity(), None, 0.0, preprocessing)]  # type: ignore[arg-type]

    def forward(self, *given: Tensor) -> Any:
        *tensors, inputs = given
        step = self._step[0]
        if step._normalised:
            inputs = (inputs.float() - step.mean) / step.std
        return torch.func.functional_call(self._network[0], dict(zip(self._names, tensors, strict=True)), (inputs,))


def _evaluation(network: nn.Module, example: Example, inputs: Tensor) -> ExportedProgram:
    own = copy_network(network).eval().requires_grad_(False)
    tensors = held_tensors(own)
    module = _Evaluation(own, list(tensors), example.preprocessing).eval()
    return torch.export.export(module, (*(tensor.contiguous() for tensor in tensors.values()), inputs))


def _check_gradients(step: TrainingStep, given: tuple[Tensor, ...]) -> None:
    """Refuse parameters that the loss does not depend on: the runtime's optimizer wants a gradient of each."""
    total, _ = step(*given)
    named = dict(step.network.named_parameters())
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            raise FedhmError(f"'{name}' gets no gradient from the loss: a training graph uses every parameter")


def _check_network(network: nn.Module) -> None:
    """Refuse tensors that a task brings and the graph would not take from it."""
    seen: dict[Tensor, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if parameter in seen:
            raise FedhmError(
                f"'{name}' is the same tensor as '{seen[parameter]}': a training graph needs one of its own for each"
            )
        seen[parameter] = name
    info = info_of(network)
    if info.packing is not None or info.shared or info.frozen_base:
        raise FedhmError("adapters of a frozen base cannot be trained by ExecuTorch: the base would be in the graph")
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            raise FedhmError(f"'{name}' is frozen, and a training graph trains every parameter")
        if parameter.dtype != torch.float32:
            raise FedhmError(f"'{name}' is {parameter.dtype}, and ExecuTorch trains in float32 only")
    moved, trained = running_statistic_names(network), {name for name, _ in network.named_parameters()}
    for name in held_tensors(network):
        if name not in moved and name not in trained:
            raise FedhmError(
                f"'{name}' is a buffer that travels and is not trained: a training graph has no such input"
            )


def _filled(tensor: Tensor, rows: int) -> Tensor:
    """Return a batch of exactly this many rows, by repeating its own."""
    return plain(tensor[torch.arange(rows) % len(tensor)])


def _uses(graph: GraphModule) -> dict[str, str]:
    """Return the layer and the operators between each parameter and the next layer, for the sentence of a refusal."""
    found: dict[str, str] = {}
    for node in graph.graph.nodes:
        if node.op != "get_attr" or not str(node.target).startswith(PREFIX):
            continue
        behind: list[str] = []
        current = next(iter(node.users), None)
        while current is not None and current.op == "call_function" and len(behind) < 6:
            name = operator_name(current)
            if behind and any(arg.op == "get_attr" for arg in current.all_input_nodes):
                break
            behind.append(name)
            current = next(iter(current.users), None)
        name = str(node.target).removeprefix(PREFIX)
        found[name] = f"layer '{name.rpartition('.')[0] or name}' (operators {', '.join(behind)})"
    return found


def _reason(error: Exception) -> str:
    return printable(str(error).strip().partition("\n")[0]) or type(error).__name__
