"""The largest eigenvalue of a symmetric matrix, or of a symmetric map, and its derivative."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from spinformer.errors import ConvergenceError

__all__ = ["DENSE_ROWS", "differentiable_once", "largest_eigenvalue", "leading_eigenvector"]

# Up to this many rows one dense symmetric eigenvalue problem is cheaper than building a Krylov
# space (and, unlike that one, differentiable twice).
DENSE_ROWS = 512

# How often ARPACK may restart, about ten products each: far above what an edge without a gap
# to speak of takes (a diluted lattice of 32^3 sites: 35), so that a hopeless case ends.
_RESTARTS = 1000


def largest_eigenvalue(matrix: Tensor) -> Tensor:
    """Of the symmetric part of each system of ``(..., n, n)``, n >= 1; ``O(n^3)``."""
    # The eigenvalue routine fails for the whole batch where one system has a NaN.
    finite = matrix.isfinite().all(-1).all(-1)
    matrix = torch.where(finite[..., None, None], matrix, 0.0)
    largest: Tensor = torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT))[..., -1]
    broken = torch.full_like(largest, math.nan)
    return torch.where(finite, largest, broken)


def leading_eigenvector(
    product: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Of the largest eigenvalue of a symmetric map on states of one shape, of norm one, by ARPACK.

    The states have at least two entries. A map whose values are not finite gets NaN.

    Raises:
        ConvergenceError: ARPACK gives up.
    """
    # Imported where it is needed: scipy's sparse solvers take longer to import than all of this
    # package may (0.3 s), and few callers come here.
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # noqa: PLC0415

    # A fixed start: the same couplings give the same answer, alone or in a batch, and the global
    # random state is left alone. A Gaussian is orthogonal to no eigenvector.
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    unit: Tensor = gaussian / torch.linalg.vector_norm(gaussian)
    start = unit.to(dtype=dtype, device=device)
    # ARPACK's tolerance is absolute for a small spectrum: it is given one of order one.
    scale = float(torch.linalg.vector_norm(product(start)))
    if not math.isfinite(scale):
        return torch.full_like(start, math.nan)
    if scale == 0.0:
        return start

    def multiply(vector: NDArray[Any]) -> NDArray[Any]:
        image = product(torch.from_numpy(vector).to(device).reshape(start.shape))
        scaled: NDArray[Any] = (image / scale).flatten().cpu().numpy()
        return scaled

    rows, first = start.numel(), start.flatten().cpu().numpy()
    operator = LinearOperator((rows, rows), matvec=multiply, dtype=first.dtype)
    try:
        _, vectors = eigsh(operator, k=1, which="LA", v0=first, maxiter=_RESTARTS)
    except ArpackError as error:
        raise ConvergenceError(
            f"the largest eigenvalue of couplings of {rows} rows was not found ({error}): its "
            "neighbours may be too close; use torch.linalg.eigvalsh on "
            "couplings.symmetrize().to_dense()"
        ) from error
    return torch.from_numpy(vectors).to(device).reshape(start.shape)


def differentiable_once(value: Tensor) -> Tensor:
    """The same value; a derivative of its derivative raises ``NotImplementedError``."""
    once: Tensor = _Once.apply(value)
    return once


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (value,) = ctx.saved_tensors
        return _NotTwice.apply(gradient, value)


class _NotTwice(torch.autograd.Function):
    # The gradient as it is, tied to ``value`` so that its own backward is reached, and raises.
    # torch's once_differentiable raises only where the incoming gradient requires one; here the
    # missing term is in the eigenvector, whatever the gradient that comes in.

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, value: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise NotImplementedError(
            f"the largest eigenvalue of couplings with more than {DENSE_ROWS} rows has no second "
            "derivative: use torch.linalg.eigvalsh on couplings.symmetrize().to_dense()"
        )
