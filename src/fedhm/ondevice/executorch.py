"""ExecuTorch: programs become files, and files become steps. Nothing else of the library imports it for training."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedhm.errors import FedhmError
from fedhm.machine.extras import how_to_install
from fedhm.machine.printable import printable

if TYPE_CHECKING:
    from torch.export import ExportedProgram  # it takes long to import

INSTALL = how_to_install("executorch")
TRAIN, EVALUATE = "train", "evaluate"


def require_executorch(what: str) -> None:
    """Refuse what needs ExecuTorch where it is not installed."""
    if find_spec("executorch") is None:
        raise FedhmError(f"{what} needs ExecuTorch: {INSTALL}")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and log messages of ExecuTorch's imports."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def lower(programs: Mapping[str, "ExportedProgram"], layers: Mapping[str, str]) -> bytes:
    """Return the file of several programs.

    layers  the layer of each operator, for sentences
    """
    require_executorch("a training graph")
    with quiet():
        from executorch.exir import EdgeCompileConfig, to_edge

        try:
            edge = to_edge(dict(programs), compile_config=EdgeCompileConfig(_check_ir_validity=False))
            _check_operators(edge, layers)
            return bytes(edge.to_executorch().buffer)
        except FedhmError:
            raise
        except Exception as error:  # whatever the compiler raises
            reason = printable(str(error).strip().partition("\n")[0]) or type(error).__name__
            raise FedhmError(f"ExecuTorch cannot write the training step: {reason}") from error


def _check_operators(edge: Any, layers: Mapping[str, str]) -> None:
    """Refuse operators that the runtime here lacks, with the layer that they come from."""
    from executorch.extension.pybindings.portable_lib import _get_operator_names

    known = {name.removeprefix("aten::").partition(".")[0] for name in _get_operator_names()}
    for method in edge.methods:
        for node in edge.exported_program(method).graph.nodes:
            name = str(getattr(node.target, "_name", "")) or str(getattr(node.target, "__name__", ""))
            short = name.removeprefix("aten::").removeprefix("aten.").partition(".")[0]
            if node.op != "call_function" or short in known or name.startswith(("_operator", "getitem")):
                continue
            if "aten" not in str(node.target):
                continue
            of = layers.get(short.removesuffix("_backward"), "the model's forward")
            raise FedhmError(f"{of} cannot be trained by ExecuTorch: its runtime has no operator '{short}'")


def plain(tensor: Tensor) -> Tensor:
    """Return a copy with the usual strides: `contiguous` leaves odd ones of axes of length 1, which kernels misread."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class LoadedGraph:
    """A file in the runtime: its parameters are memory of the runtime, which `copy_` and the optimizer change."""

    def __init__(self, program: bytes) -> None:
        require_executorch("a training graph")
        with quiet():
            from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer
            from executorch.extension.training import TrainingModule

            self._program = program  # the runtime reads it where it lies
            self._module = _load_for_executorch_from_buffer(program)
            self._training = TrainingModule(self._module)

    def step(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run one step forward and backward, and return its outputs without the gradients."""
        found: list[Tensor] = self._training.forward_backward(TRAIN, [plain(each) for each in inputs])
        return found

    @property
    def gradients(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._training.named_gradients()
        return found

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters in the runtime's own memory; known after the first step."""
        found: dict[str, Tensor] = self._training.named_parameters()
        return found

    def evaluate(self, tensors: Sequence[Tensor], inputs: Tensor) -> Tensor:
        (found,) = self._module.run_method(EVALUATE, [*map(plain, tensors), plain(inputs)])
        assert isinstance(found, Tensor)
        return found


def make_optimizer(
    parameters: dict[str, Tensor], lr: float, momentum: float, dampening: float, decay: float, nesterov: bool
) -> Any:
    """Return ExecuTorch's SGD for parameters of the runtime."""
    with quiet():
        from executorch.extension.training import get_sgd_optimizer

        return get_sgd_optimizer(parameters, lr, momentum, dampening, decay, nesterov)
