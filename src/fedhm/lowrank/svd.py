"""Truncated singular value decompositions of weights: exact, or from a known decomposition of a similar matrix.

A weight is unrolled to a matrix first. Two forms say how:

spatial     A convolution (n, m, k₁, k₂) unrolls to the matrix with rows (m, k₁) and columns (n, k₂). Each row belongs
            to one input channel and vertical offset, each column to one output channel and horizontal offset. This is
            a permutation of axes, not a plain reshape. It makes the factors a vertical and a horizontal convolution.
pufferfish  Rows (m, k₁, k₂), columns n: the factors are a convolution of the same size into r channels, and a 1×1
            convolution that mixes them.

A Linear weight (n, m) unrolls to its transpose, by both rules with k₁ = k₂ = 1. A Conv1d weight (n, m, k) follows both
rules with k₂ = 1. The forms differ in the shapes of their matrices, and are equal where the shapes are (k₂ = 1). So
only `unroll` needs to know the form.

A matrix is decomposed once, at the largest rank of all tiers: smaller ranks are prefixes.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedhm.errors import FedhmError

Form = Literal["spatial", "pufferfish"]


def unroll(weight: Tensor, form: Form = "spatial") -> Tensor:
    """Unroll a weight: (n, m, k₁, k₂) → (m k₁, n k₂), or (m k₁ k₂, n) in Pufferfish's form; (n, m, k) → (m k, n)."""
    if weight.ndim < 4 or form == "pufferfish":
        return weight.flatten(1).T
    n, m, k1, k2 = weight.shape
    return weight.permute(1, 2, 0, 3).reshape(m * k1, n * k2)


def unrolled_shape(shape: torch.Size, form: Form = "spatial") -> tuple[int, int]:
    if len(shape) < 4 or form == "pufferfish":
        return math.prod(shape[1:]), shape[0]
    n, m, k1, k2 = shape
    return m * k1, n * k2


def roll(matrix: Tensor, shape: torch.Size) -> Tensor:
    """Invert `unroll`: turn a matrix back into a weight of `shape`."""
    if matrix.shape[1] == shape[0]:
        return matrix.T.reshape(shape).contiguous()
    n, m, k1, k2 = shape
    return matrix.reshape(m, k1, n, k2).permute(2, 0, 1, 3).contiguous()


def to_layer_factors(left: Tensor, right: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Turn matrix factors (rows, r), (r, columns) into the two layers' weights u, v for a dense weight of `shape`.

    Convolution: u (r, m, k₁, 1), v (n, r, 1, k₂); in Pufferfish's form u (r, m, k₁, k₂), v (n, r, 1, 1).
    Conv1d: u (r, m, k), v (n, r, 1). Linear: u (r, m), v (n, r).
    """
    rank = left.shape[1]
    u, v = left.T, right.T
    if len(shape) == 4:
        n, m, k1, _ = shape
        u = u.reshape(rank, m, k1, -1)
        v = right.reshape(rank, n, 1, -1).permute(1, 0, 2, 3)
    elif len(shape) == 3:
        u, v = u.reshape(rank, *shape[1:]), v[:, :, None]
    # `contiguous()` would keep odd strides of axes of length 1, by which torch may choose another convolution kernel
    return u.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)


def to_matrix_factors(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `to_layer_factors`: turn the layers' weights back into matrix factors."""
    return u.flatten(1).T, v.transpose(0, 1).flatten(1)


class Factors(NamedTuple):
    """Factors of a matrix (M, N): `left @ right` is its best approximation of rank k, or within a bound of it.

    The singular values are split evenly, so that both factors start at the same scale.
    Smaller ranks are prefixes: `left[:, :r]`, `right[:r]`.
    """

    left: Tensor  # (M, k): U √Σ
    right: Tensor  # (k, N): √Σ Vᵀ
    spectrum: Tensor  # the largest singular values: k of them, or all min(M, N)

    def prefix(self, rank: int) -> tuple[Tensor, Tensor]:
        return self.left[:, :rank], self.right[:rank]

    def cut(self, rank: int) -> "Factors":
        """Return the decomposition truncated at `rank`, where the directions beyond it can still be learnt.

        As in LoRA, one factor of such a direction is 0 and the other is not: with both at 0 it would have no gradient.
        """
        right, spectrum = self.right.clone(), self.spectrum.clone()
        right[rank:], spectrum[rank:] = 0, 0
        return Factors(self.left, right, spectrum)

    def raised(self, rank: int, norm: float) -> "Factors":
        """Return the decomposition with its leading `rank` directions scaled to the Frobenius norm `norm`."""
        own = float(torch.linalg.vector_norm(self.spectrum[:rank].double()))
        factor = norm / own if own else 1.0
        left, right, spectrum = self.left.clone(), self.right.clone(), self.spectrum.clone()
        left[:, :rank] *= math.sqrt(factor)
        right[:rank] *= math.sqrt(factor)
        spectrum[:rank] *= factor
        return Factors(left, right, spectrum)


def product_spectrum(left: Tensor, right: Tensor) -> Tensor:
    """Return the singular values of `left @ right`, (M, r) and (r, N), from matrices of r rows and columns."""
    if not bool(left.isfinite().all() and right.isfinite().all()):
        raise FedhmError("a factor holds NaN or infinite values: the model has diverged; lower train.lr")
    precise = torch.promote_types(left.dtype, torch.float32)
    triangles = [torch.linalg.qr(factor.to(precise), mode="r").R for factor in (left, right.T)]
    spectrum: Tensor = torch.linalg.svdvals(triangles[0] @ triangles[1].T)
    return spectrum


def factorize(matrix: Tensor, rank: int) -> Factors:
    """Decompose `matrix` (M, N) exactly, and keep its `rank` largest directions and all its singular values."""
    if not bool(matrix.isfinite().all()):  # LAPACK's result for these can be anything
        raise FedhmError("a weight matrix holds NaN or infinite values: the model has diverged; lower train.lr")
    # half precision has no decomposition of its own
    precise = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    U, spectrum, Vt = _through_gram(precise, rank) if precise.dtype == torch.float32 else _lapack(precise, rank)
    root = spectrum[:rank].sqrt()
    left, right = U * root, root[:, None] * Vt
    return Factors(left.to(matrix.dtype), right.to(matrix.dtype), spectrum)


def _lapack(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    U, spectrum, Vt = torch.linalg.svd(matrix, full_matrices=False)
    return U[:, :rank], spectrum, Vt[:rank]


def _through_gram(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose by the eigenvectors of the smaller Gram matrix, in float64.

    Squaring costs half of the digits, and float64 has more than twice the digits of float32. So the small singular
    values are as accurate as by an SVD in float32. It takes a fraction of the time for matrices that are not square,
    and a little less for square ones.
    """
    if matrix.shape[0] > matrix.shape[1]:
        V, spectrum, Ut = _through_gram(matrix.T, rank)
        return Ut.T, spectrum, V.T
    precise = matrix.double()
    energies, vectors = torch.linalg.eigh(precise @ precise.T)
    spectrum, U = energies.flip(0).clamp(min=0).sqrt(), vectors.flip(1)[:, :rank]
    scaled = U.T @ precise  # (rank, N): Σ Vᵀ
    # beyond the rank of the matrix there is no direction: the row is zero
    norms = scaled.norm(dim=1, keepdim=True)
    Vt = torch.where(norms > spectrum[0] * 1e-14, scaled / norms, 0)
    return U.float(), spectrum.float(), Vt.float()


RANDOM_EDGE = 1.15  # of small matrices, the largest singular value lies up to a tenth beyond the edge


def looks_untrained(weight: Tensor, spectrum: Tensor, form: Form = "spatial") -> bool:
    """Tell whether the largest singular value is no larger than that of independent random numbers.

    Marchenko and Pastur: for a matrix (M, N) of numbers with variance s², it is about s (√M + √N). Training adds
    directions far beyond that.
    """
    rows, columns = unrolled_shape(weight.shape, form)
    deviation = math.sqrt(squared_norm(weight) / weight.numel())
    return float(spectrum[0]) <= RANDOM_EDGE * deviation * (math.sqrt(rows) + math.sqrt(columns))


def squared_norm(weight: Tensor) -> float:
    """Return ‖W‖²_F, accurate enough to subtract from: rows are summed in float32 for speed, their sums in float64."""
    return float(torch.linalg.vector_norm(weight.flatten(1), dim=1).double().square().sum())


TOLERANCE = 1.002  # times the smallest possible error
# Lanczos steps, and the margin on the energy they find: five find 0.8 of it or more, ten 0.95, also if many directions
# have almost the same energy.
ESTIMATES = ((5, 1.4), (10, 1.07))
NOISE = 1e-7  # of the largest energy: smaller estimates are rounding
ROUNDING = 1e-6  # of the energy of A: a smaller error is rounding in float32


def worst_ratio(matrix: Tensor, rank: int, left: Tensor, spectrum: Tensor, turned: Tensor) -> float:
    """Bound the error of the first `rank` directions of a pass, as a multiple of the smallest possible error.

    Let Q hold k orthonormal left vectors, B = Qᵀ A with singular values sᵢ and right vectors V', and C = A − Q B the
    part of A outside their span. The approximation keeps the first r directions; its squared error is ‖A‖² − Σᵢ≤ᵣ sᵢ².
    The best approximation has ‖A‖² − Σᵢ≤ᵣ σᵢ², so the question is how large that sum can be. For any t

        Σᵢ≤ᵣ σᵢ² ≤ r t + tr (Aᵀ A − t)₊

    In the basis (V', V'⊥), Aᵀ A = [S² + Eᵀ E, Eᵀ F; Fᵀ E, Fᵀ F] with E = C V' and F = C V'⊥. With φ ≥ ‖C‖₂ and t > φ²
    the lower right block minus t is below −(t − φ²), and completing the square gives

        Σᵢ≤ᵣ σᵢ² ≤ r t + tr (S² − t + Eᵀ E t / (t − φ²))₊

    Since Q = orthonormal A V, C V = 0 and E = C (1 − V Vᵀ) V'. So Eᵀ E ≤ φ² (1 − Tᵀ T), where T = Vᵀ V' has the angles
    between the bases before and after. Only φ is estimated: by Lanczos steps from a random vector, which approach the
    largest singular value from below, and a margin. A few steps and a wide margin are often enough.

    left    (M, k) orthonormal: Q
    turned  (k, k): T
    """
    energies = spectrum.double().square()
    total = squared_norm(matrix)
    error = max(total - energies[:rank].sum().item(), ROUNDING * total)
    enough = (1 - TOLERANCE**-2) * error
    excess = math.inf
    lanczos = _Lanczos(matrix, left)
    for steps, margin in ESTIMATES:
        found = lanczos.largest_energy(steps)
        if not math.isfinite(found):
            break
        beyond = max(margin * found, NOISE * float(energies[0]))
        excess = _excess(energies, rank, turned, beyond, enough)
        if excess <= enough:
            break
    return math.sqrt(error / (error - excess)) if excess < error else math.inf


def _excess(energies: Tensor, rank: int, turned: Tensor, beyond: float, enough: float) -> float:
    """Bound how much larger than Σᵢ≤ᵣ sᵢ² the best sum can be. The bound is loose, or infinite, if that decides."""
    kept = energies[:rank].sum()
    above = torch.tensor([1.01, 1.02, 1.04, 1.07, 1.1, 1.15, 1.25, 1.4, 1.7, 2, 3, 5, 10, 20, 50], dtype=torch.float64)
    levels = torch.cat([above * beyond, energies[rank - 1 : rank].clamp(min=1.01 * beyond)])
    growth = beyond * levels / (levels - beyond)
    sines = (1 - turned.double().square().sum(0)).clamp(min=0)
    outset = rank * levels - kept
    # G ≤ 2 (G of the kept directions ⊕ G of the spare ones), and angles ≤ 1: an upper bound that takes only sums
    room = energies - levels[:, None]
    kept_part = room[:, :rank].clamp(min=0).sum(1) + 2 * growth * sines[:rank].sum()
    most = outset + kept_part + (room[:, rank:] + 2 * growth[:, None]).clamp(min=0).sum(1)
    most = torch.minimum(most, outset + room.clamp(min=0).sum(1) + growth * sines.sum())
    if most.min() <= enough:
        return float(most.min())
    least = outset + (room + growth[:, None] * sines).clamp(min=0).sum(1)  # the diagonal alone
    best = int(least.argmin())
    if least[best] > enough:
        return math.inf
    angles = torch.eye(len(energies), dtype=torch.float64) - (turned.T @ turned).double()
    block = torch.diag(energies - levels[best]) + growth[best] * angles
    return float(outset[best] + torch.linalg.eigvalsh(block).clamp(min=0).sum())


class _Lanczos:
    """An estimate of ‖A − Q Qᵀ A‖₂² that improves with every step."""

    def __init__(self, matrix: Tensor, left: Tensor) -> None:
        self._matrix, self._left = matrix, left
        self._next = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(1), dtype=matrix.dtype)
        self._visited = matrix.new_empty(0, matrix.shape[1])
        self._diagonal: list[float] = []
        self._beside: list[float] = []

    def largest_energy(self, steps: int) -> float:
        """Return the estimate after `steps` steps, including those of earlier calls."""
        while len(self._diagonal) < steps and (norm := float(self._next.norm())) > 1e-30:
            if self._diagonal:
                self._beside.append(norm)
            here = self._next / norm
            self._visited = torch.cat([self._visited, here[None]])
            image = self._matrix @ here
            image -= self._left @ (self._left.T @ image)
            vector = image @ self._matrix
            self._diagonal.append(float(vector @ here))
            for _ in range(2):  # once is not enough in float32
                vector -= (self._visited @ vector) @ self._visited
            self._next = vector
        beside = torch.diag(torch.tensor(self._beside, dtype=torch.float64), 1)
        steps_so_far = torch.diag(torch.tensor(self._diagonal, dtype=torch.float64)) + beside + beside.T
        return float(torch.linalg.eigvalsh(steps_so_far)[-1]) if bool(steps_so_far.isfinite().all()) else math.inf


PASSES = 3  # after more, an exact decomposition is faster
SPARE = 64  # directions beyond the rank, at most
SMALL = 256  # rows or columns: below, an exact decomposition is fast
WORTHWHILE = 0.6  # of the full rank: above, an exact decomposition is not slower
FALLING = 0.7  # if the spectrum falls by so much within the spare directions, the old spare ones are of no use


def spare_directions(rank: int, full_rank: int) -> int:
    """Return the number of spare directions beyond `rank`, between the kept directions and the truncated ones."""
    wanted = min(max(16, rank // 2), SPARE)
    return wanted if full_rank >= SMALL and rank + wanted <= WORTHWHILE * full_rank else 0


def decompose(matrix: Tensor, rank: int, known: Factors | None) -> tuple[Factors, bool]:
    """Decompose `matrix` at `rank` and some spare directions; also return whether the decomposition is exact.

    known  a decomposition by this function of a similar matrix, such as the weight of the round before
    """
    count = rank + spare_directions(rank, min(matrix.shape))
    if known is not None and count > rank and matrix.dtype == torch.float32:
        found = refactorize(matrix, rank, known)
        if found is not None:
            return found, False
    factors = factorize(matrix, count)
    return (factors._replace(spectrum=factors.spectrum[:count]) if count > rank else factors), True


def refactorize(matrix: Tensor, rank: int, known: Factors) -> Factors | None:
    """Decompose `matrix` by subspace iteration from `known`, with the first `rank` directions within the tolerance.

    One pass over A (M, N) starts from the known right singular vectors V (N, k), with some more than `rank`:

        Q = orthonormal A V    the known directions, after the change
        B = Qᵀ A               its singular values and vectors are the new ones, found through the k×k matrix B Bᵀ

    It costs two products with A in place of a decomposition. `worst_ratio` bounds how far from the best approximation
    the result can be. If that is too far, another pass starts from the result. Return None after too many passes.
    """
    if not bool(known.spectrum[len(known.right) - 1] > 0):  # a singular value of 0 has no direction to start from
        return None
    basis = _start(known, rank, matrix)
    for _ in range(PASSES):
        found = _one_pass(matrix, basis)
        if found is None:
            return None
        if worst_ratio(matrix, rank, found.left, found.spectrum, found.turned) <= TOLERANCE:
            root = found.spectrum.sqrt().to(matrix.dtype)
            return Factors(found.left * root, root[:, None] * found.right, found.spectrum.to(matrix.dtype))
        basis = found.right
    return None


class Pass(NamedTuple):
    """The result of one pass of subspace iteration."""

    left: Tensor  # (M, k) orthonormal
    spectrum: Tensor  # (k,) in float64
    right: Tensor  # (k, N) orthonormal
    turned: Tensor  # (k, k): T = Vᵀ V', the cosines between the right vectors before and after


def _one_pass(matrix: Tensor, basis: Tensor) -> Pass | None:
    """Do one pass over `matrix`, from orthonormal right vectors (k, N) to the next; None if that fails."""
    X, L, unit = _nearly_orthonormal(matrix @ basis.T)
    B = unit @ (X.T @ matrix)
    inner = (B @ B.T).double()
    if not bool(inner.isfinite().all()):  # the exact decomposition raises a clear error
        return None
    energies, rotation = torch.linalg.eigh(inner)
    energies, rotation = energies.flip(0), rotation.flip(1).to(X.dtype)
    if not bool(energies[-1] > 0):  # the matrix has fewer directions
        return None
    spectrum = energies.sqrt()
    scaled = rotation / spectrum.to(X.dtype)
    # T = Vᵀ V' = L scaled, since B V = Qᵀ A V = Lᵀ
    return Pass(X @ (unit.T @ rotation), spectrum, scaled.T @ B, L @ scaled)


def _nearly_orthonormal(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (X, L, unit) with X unitᵀ = Q orthonormal and Q Lᵀ = Y.

    The columns come from singular vectors, so they are almost orthogonal already. X is Y with columns of length 1, and
    their Gram matrix gives the rest in half the time of a QR decomposition.
    """
    lengths = Y.norm(dim=0)
    X = Y / lengths
    lower, failed = torch.linalg.cholesky_ex(X.T @ X)
    one = torch.eye(Y.shape[1], dtype=Y.dtype)
    if failed or not bool(lower.diagonal().min() > 0.1):
        Q, R = torch.linalg.qr(Y)
        return Q, R.T, one
    return X, lengths[:, None] * lower, torch.linalg.solve_triangular(lower, one, upper=False)


def _start(known: Factors, rank: int, matrix: Tensor) -> Tensor:
    """Return the orthonormal right vectors (k, N) to start from."""
    spectrum = known.spectrum[: len(known.right)]
    basis = known.right / spectrum.sqrt()[:, None]
    if spectrum[-1] < 1e-3 * spectrum[0]:  # rounding errors were divided by the singular values too
        basis = torch.linalg.qr(basis.T).Q.T
    if spectrum[-1] < FALLING * spectrum[rank - 1]:
        # The truncated part is new in every round: start from probes of the matrix, not from the old directions.
        generator = torch.Generator().manual_seed(0)
        probes = torch.randn(len(basis) - rank, len(matrix), generator=generator, dtype=matrix.dtype)
        basis = torch.cat([basis[:rank], _beside(probes @ matrix, basis[:rank])])
    return basis


def _beside(rows: Tensor, kept: Tensor) -> Tensor:
    """Return orthonormal rows that span the part of `rows` orthogonal to `kept`."""
    for _ in range(2):  # twice, for orthogonality to the last digit
        rows = rows - (rows @ kept.T) @ kept
    Q: Tensor = torch.linalg.qr(rows.T).Q
    return Q.T
