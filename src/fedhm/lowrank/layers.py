"""Factorized layers: each equals the dense layer whose weight is the product of its two factors."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhm.lowrank.svd import Form, factorize, roll, to_layer_factors, to_matrix_factors, unroll, unrolled_shape

ROW = 8  # pixels: for longer rows oneDNN is as fast
WORTHWHILE = 2**25  # multiply-accumulates: fewer take less time than the calls of the operations

Pair = tuple[int, int]


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair | str, dilation: Pair
) -> Tensor:
    """Compute `F.conv2d` with a kernel k×1 or 1×k; for small images, its weight gradient is one matrix product.

    oneDNN, by which torch convolves on CPUs, sums a weight gradient row by row of the image. Rows of a few pixels leave
    it at half its speed or less. The gradient of tap j, over all positions p,

        dW[o, c, j] = Σₚ g[p, o] x[p + j − padding, c]

    is a product of two matrices once the shifted copies of one of them lie side by side. The copies are made of the one
    with fewer channels: between two factors there are as few channels as the rank.
    """
    if isinstance(padding, str) or dilation != (1, 1) or not _pays(x, weight, stride):
        return F.conv2d(x, weight, bias, stride, padding, dilation)
    y = cast(Tensor, _Convolution.apply(x, weight, stride, padding))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias[:, None, None]


def _pays(x: Tensor, weight: Tensor, stride: Pair) -> bool:
    if torch.compiler.is_exporting():  # an exported graph holds operators, not the functions of this file
        return False
    if x.ndim != 4 or x.device.type not in ("cpu", "meta") or not (weight.requires_grad and torch.is_grad_enabled()):
        return False
    batch, _, height, width = x.shape
    rows, row = batch * height // stride[0], width // stride[1]
    return row <= ROW and rows * row * weight.numel() >= WORTHWHILE and not torch.is_autocast_enabled("cpu")


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        context.save_for_backward(*inputs[:2])
        context.stride, context.padding = inputs[2:]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = context.saved_tensors
        (g,) = gradients
        of_x = of_weight = None
        if context.needs_input_grad[0]:
            # not `nn.grad.conv2d_input`, which makes an x of its own and loses the memory format
            shape = (None, context.stride, context.padding, (1, 1), False, (0, 0), 1)
            of_x = torch.ops.aten.convolution_backward(g, x, weight, *shape, (True, False, False))[0]
        if context.needs_input_grad[1]:
            of_weight = weight_gradient(x, g, weight.shape, context.stride, context.padding)
        return of_x, of_weight, None, None


def weight_gradient(x: Tensor, g: Tensor, shape: torch.Size, stride: Pair, padding: Pair) -> Tensor:
    """Return the gradient of a weight of `shape`, (n, m, k, 1) or (n, m, 1, k), for input x and output gradient g."""
    n, m, *kernel = shape
    vertical, horizontal = zip(kernel, stride, padding, strict=True)
    axis, (taps, step, pad) = (1, vertical) if horizontal == (1, 1, 0) else (2, horizontal)
    x, g = x.permute(0, 2, 3, 1), g.permute(0, 2, 3, 1)  # (batch, height, width, channels)
    if step == 1 and n < m:
        # The same sum over positions of x: here g is shifted, in the other direction.
        product = _shifted(g, axis, taps, taps - 1 - pad, 1).T @ x.reshape(-1, m)  # (k n, m)
        return product.view(taps, n, m).flip(0).permute(1, 2, 0).reshape(shape)
    product = _shifted(x, axis, taps, pad, step).T @ g.reshape(-1, n)  # (k m, n)
    return product.view(taps, m, n).permute(2, 1, 0).reshape(shape)


def _shifted(images: Tensor, axis: int, taps: int, pad: int, step: int) -> Tensor:
    """Put shifted copies side by side: (batch, height, width, channels) → (positions, taps · channels)."""
    pads = [0, 0, pad, pad] if axis == 2 else [0, 0, 0, 0, pad, pad]
    windows = F.pad(images, pads).unfold(axis, taps, step)  # (batch, height, width, channels, taps)
    return windows.transpose(3, 4).reshape(-1, taps * images.shape[3])


class LowRank(nn.Module):
    """The two factors of one layer, and the dense weight that they represent.

    W = roll(L R). L (rows, r) is held as `u` and R (r, columns) as `v`, in the shapes that `to_layer_factors` gives.
    Sizes have the names that the dense layer gives them, since models read them: `layer.kernel_size`.
    """

    form: ClassVar[Form] = "spatial"

    def __init__(self, dense: nn.Module, rank: int, *, spectral: bool = True) -> None:
        super().__init__()
        self._make_factors(cast(Tensor, dense.weight), rank, spectral)
        self.bias = cast(nn.Parameter | None, getattr(dense, "bias", None))
        self.train(dense.training)

    def _make_factors(self, trained: Tensor, rank: int, spectral: bool) -> None:
        """Make the factors of a weight: by its truncated SVD, or zeros to be loaded."""
        weight = trained.detach()
        self.dense_shape = weight.shape
        self.rank = rank
        if spectral:
            left, right = factorize(unroll(weight, self.form), rank).prefix(rank)
        else:
            rows, columns = unrolled_shape(weight.shape, self.form)
            left, right = weight.new_zeros(rows, rank), weight.new_zeros(rank, columns)
        u, v = to_layer_factors(left, right, weight.shape)
        self.u = nn.Parameter(u, requires_grad=trained.requires_grad)
        self.v = nn.Parameter(v, requires_grad=trained.requires_grad)

    @classmethod
    def dense_name(cls, layer: str) -> str:
        """Return the name of the dense weight that the factors of `layer` stand for."""
        return f"{layer}.weight" if layer else "weight"

    @property
    def weight(self) -> Tensor:
        """Return the recovered dense weight, for modules that read `layer.weight` instead of calling the layer."""
        left, right = to_matrix_factors(self.u, self.v)
        return roll(left @ right, self.dense_shape)


class LowRankLinear(LowRank):
    """A factorized Linear layer: y = (x uᵀ) vᵀ + b, with u (r, m), v (n, r)."""

    @property
    def in_features(self) -> int:
        return self.dense_shape[1]

    @property
    def out_features(self) -> int:
        return self.dense_shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.u), self.v, self.bias)

    def extra_repr(self) -> str:
        n, m = self.dense_shape
        return f"in_features={m}, out_features={n}, rank={self.rank}, bias={self.bias is not None}"


class LowRankTransposed(LowRank):
    """A factorized Linear layer that holds its weight as (m, n), as Conv1D of `transformers` does: y = (x v) u + b.

    The rest of the library treats that weight like one of a Linear from n to m. So u is (r, n) and v is (m, r), and the
    recovered weight v u is also the matrix by which x is multiplied.
    """

    @property
    def nx(self) -> int:
        return self.dense_shape[0]

    @property
    def nf(self) -> int:
        return self.dense_shape[1]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.v.T), self.u.T, self.bias)

    def extra_repr(self) -> str:
        m, n = self.dense_shape
        return f"in_features={m}, out_features={n}, rank={self.rank}, bias={self.bias is not None}"


class LowRankEmbedding(LowRank):
    """A factorized table of V rows with d numbers: rows of v (V, r) are looked up, and multiplied by u (r, d).

    A row for padding is 0 and stays 0: it gets no gradient, as in the dense table.
    """

    def __init__(self, dense: nn.Embedding, rank: int, *, spectral: bool = True) -> None:
        super().__init__(dense, rank, spectral=spectral)
        self.num_embeddings, self.embedding_dim = dense.num_embeddings, dense.embedding_dim
        self.padding_idx = dense.padding_idx

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.v, self.padding_idx) @ self.u

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.rank}"


class LowRankEmbeddingBag(LowRankEmbedding):
    """A factorized table whose rows are summed or averaged: so are those of v, since u is linear."""

    def __init__(self, dense: nn.EmbeddingBag, rank: int, *, spectral: bool = True) -> None:
        super().__init__(cast(nn.Embedding, dense), rank, spectral=spectral)
        self.mode, self.include_last_offset = dense.mode, dense.include_last_offset

    def forward(self, x: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        bags = F.embedding_bag(
            x,
            self.v,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
        return bags @ self.u


class LowRankWeight(LowRank):
    """The factors of one of the weights of a recurrent layer, as a part of that layer: W = v u."""

    def __init__(self, weight: Tensor, rank: int, *, spectral: bool = True) -> None:
        nn.Module.__init__(self)
        self._make_factors(weight, rank, spectral)
        self.bias = None

    @classmethod
    def dense_name(cls, layer: str) -> str:
        return layer

    def forward(self) -> Tensor:
        return self.v @ self.u

    def extra_repr(self) -> str:
        return f"{tuple(self.dense_shape)}, rank={self.rank}"


class LowRankRecurrent(nn.RNNBase):
    """A recurrent layer of torch of which some weights are factorized. It comes before torch's class.

    The products of the factors are formed once for each batch, and torch's own kernel runs with them. So the layer has
    fewer parameters and bytes, but as many MACs as the dense layer: a loop over time in Python would take far longer.
    """

    def __init__(self, dense: nn.RNNBase, ranks: Mapping[str, int], *, spectral: bool = True) -> None:
        nn.Module.__init__(self)
        vars(self).update({name: value for name, value in vars(dense).items() if name not in vars(self)})
        self._init_flat_weights()
        for name, parameter in dense._parameters.items():
            if name in ranks:
                assert parameter is not None
                self.add_module(name, LowRankWeight(parameter, ranks[name], spectral=spectral))
            else:
                self.register_parameter(name, parameter)
        self.train(dense.training)

    # Torch keeps a list of its weights beside the parameters. Here it exists only while the layer runs: products are
    # no leaves of the graph, and a network that holds one cannot be copied.

    def _init_flat_weights(self) -> None:
        self._flat_weights: list[Tensor | None] = []
        self._flat_weight_refs: list[Any] = []

    def _update_flat_weights(self) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        nn.Module.__setattr__(self, name, value)

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        return [[cast(nn.Parameter, self._weight(name)) for name in names] for names in self._all_weights]

    def _weight(self, name: str) -> Tensor:
        held = getattr(self, name)
        return cast(Tensor, held() if isinstance(held, LowRankWeight) else held)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self._flat_weights = [self._weight(name) for name in self._flat_weights_names]
        try:
            return super().forward(*arguments, **named)
        finally:
            self._flat_weights = []


class LowRankLSTM(LowRankRecurrent, nn.LSTM):
    pass


class LowRankGRU(LowRankRecurrent, nn.GRU):
    pass


class LowRankRNN(LowRankRecurrent, nn.RNN):
    pass


class LowRankConvolution(LowRank):
    """A factorized convolution with the settings of the dense one. A bias stays on the second factor."""

    def __init__(self, dense: nn.Conv1d | nn.Conv2d, rank: int, *, spectral: bool = True) -> None:
        super().__init__(dense, rank, spectral=spectral)
        self.in_channels, self.out_channels, self.groups = dense.in_channels, dense.out_channels, 1
        self.kernel_size: tuple[int, ...] = dense.kernel_size
        self.stride: tuple[int, ...] = dense.stride
        self.dilation: tuple[int, ...] = dense.dilation
        self.padding: str | tuple[int, ...] = dense.padding
        self.padding_mode = dense.padding_mode
        # (left, right, top, bottom), which torch computes for "same" too
        self._pads: list[int] = list(dense._reversed_padding_repeated_twice)

    @property
    def _is_pointwise(self) -> bool:
        return is_pointwise(self.dense_shape)

    def extra_repr(self) -> str:
        n, m, *kernel = self.dense_shape
        size = f"kernel_size={tuple(kernel)}"
        return f"{m}, {n}, {size}, rank={self.rank}, stride={self.stride}, padding={self.padding}"


class LowRankConv1d(LowRankConvolution):
    """A convolution of k taps m → r, then one of a single tap r → n: r (m k + n) parameters.

    It equals a factorized Conv2d with a k×1 kernel, in both forms. The first convolution has the stride, padding and
    dilation.
    """

    def forward(self, x: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pads, mode=self.padding_mode), (0,)
        x = F.conv1d(x, self.u, None, self.stride, padding, self.dilation)
        return F.conv1d(x, self.v, self.bias)


class LowRankConv2d(LowRankConvolution):
    """A k₁×1 convolution m → r, then a 1×k₂ convolution r → n: r (m k₁ + n k₂) parameters.

    Stride, padding and dilation are split by axis, so the pair equals the dense convolution at any stride. A 1×1
    convolution only reads the pixels of its stride. So these are taken first, for less to compute, and because oneDNN
    has a bug in strided 1×1 convolutions (`channels_last` in `networks/structure.py`).
    """

    def forward(self, x: Tensor) -> Tensor:
        if self._is_pointwise:
            if any(self._pads):
                mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
                x = F.pad(x, self._pads, mode=mode)
            x = x[..., :: self.stride[0], :: self.stride[1]] if self.stride != (1, 1) else x
            return F.conv2d(F.conv2d(x, self.u), self.v, self.bias)
        vertical: str | tuple[int, int]
        horizontal: str | tuple[int, int]
        if self.padding_mode != "zeros":
            # Padding columns commutes with a vertical convolution, so each axis is padded before its own convolution.
            x = F.pad(x, [0, 0, *self._pads[2:]], mode=self.padding_mode)
            vertical = horizontal = (0, 0)
        elif isinstance(self.padding, str):
            vertical = horizontal = self.padding
        else:
            vertical, horizontal = (self.padding[0], 0), (0, self.padding[1])
        x = convolve(x, self.u, None, (self.stride[0], 1), vertical, (self.dilation[0], 1))
        if self.padding_mode != "zeros":
            x = F.pad(x, [*self._pads[:2], 0, 0], mode=self.padding_mode)
        return convolve(x, self.v, self.bias, (1, self.stride[1]), horizontal, (1, self.dilation[1]))


class PufferfishConv2d(LowRankConvolution):
    """A k₁×k₂ convolution m → r, then a 1×1 convolution r → n, as in Pufferfish: r (m k₁ k₂ + n) parameters.

    The first convolution has the stride, padding and dilation.
    """

    form = "pufferfish"

    def forward(self, x: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pads, mode=self.padding_mode), (0, 0)
        x = F.conv2d(x, self.u, None, self.stride, padding, self.dilation)
        return F.conv2d(x, self.v, self.bias)


# The factorized type of every layer, by the layer's exact type and the form. Rows may be added.
LAYERS: dict[type[nn.Module], dict[Form, type[LowRank]]] = {
    nn.Conv1d: {"spatial": LowRankConv1d, "pufferfish": LowRankConv1d},
    nn.Conv2d: {"spatial": LowRankConv2d, "pufferfish": PufferfishConv2d},
    nn.Linear: {"spatial": LowRankLinear, "pufferfish": LowRankLinear},
    nn.Embedding: {"spatial": LowRankEmbedding, "pufferfish": LowRankEmbedding},
    nn.EmbeddingBag: {"spatial": LowRankEmbeddingBag, "pufferfish": LowRankEmbeddingBag},
}
# The same for recurrent layers, which have several weights: each is factorized, or stays dense, by itself.
RECURRENT: dict[type[nn.Module], type[LowRankRecurrent]] = {
    nn.LSTM: LowRankLSTM,
    nn.GRU: LowRankGRU,
    nn.RNN: LowRankRNN,
}
# The same for types of packages that are not imported here, by their full names.
FOREIGN: dict[str, dict[Form, type[LowRank]]] = {
    "transformers.pytorch_utils.Conv1D": {"spatial": LowRankTransposed, "pufferfish": LowRankTransposed},
}


def factorized_types(layer: nn.Module) -> dict[Form, type[LowRank]] | None:
    """Return the factorized type of a layer for each form, or None if its type is unknown."""
    kind = type(layer)
    return LAYERS.get(kind) or FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}")


RECURRENT_WEIGHT = re.compile(r"(.*\.)?weight_(ih|hh|hr)_l\d+(_reverse)?")  # as torch names them


def dense_weight_name(layer: str) -> str:
    """Return the name of the dense weight of a rank plan's layer among the tensors of the full network.

    A plan names a module, whose tensor is its `weight`, or one weight of a recurrent layer: that is a tensor itself.
    """
    return layer if RECURRENT_WEIGHT.fullmatch(layer) else f"{layer}.weight"


def module_of(layer: str) -> str:
    """Return the name of the module that a rank plan's layer is, or is a weight of."""
    return layer.rpartition(".")[0] if RECURRENT_WEIGHT.fullmatch(layer) else layer


def is_pointwise(shape: torch.Size) -> bool:
    """Tell whether a weight of this shape is that of a convolution with a kernel of one pixel."""
    return len(shape) > 2 and set(shape[2:]) == {1}


def rank_at_ratio_one(shape: torch.Size) -> int:
    """Return the rank at ratio 1: the output channels of a convolution, min(m, n) of a 1×1 convolution or a Linear."""
    return shape[0] if len(shape) > 2 and not is_pointwise(shape) else min(shape[:2])


def largest_rank(shape: torch.Size, form: Form = "spatial") -> int:
    """Return the smallest rank at which a factorized layer can represent every weight of `shape`."""
    return min(unrolled_shape(shape, form))
