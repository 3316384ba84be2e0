"""Linear equations and eigenvalues of batches of systems, and sums with a transpose."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "add_transpose",
    "eigenvalues",
    "solve_each",
    "symmetric_eigenvalues",
    "symmetric_spectrum",
]


def solve_each(left: Tensor, right: Tensor) -> Tensor:
    """The x of ``left @ x = right`` for (..., n, n) and (..., n, k), one LU a system.

    Batched LU on CPUs is known to hang for n >= 160 with several threads; single ones don't.
    """
    if left.numel() == 0:
        return torch.zeros_like(right)
    if left.ndim == 2:
        solution: Tensor = torch.linalg.solve(left, right)
        return solution
    rows = zip(left.flatten(0, -3), right.flatten(0, -3), strict=True)
    return torch.stack([torch.linalg.solve(a, b) for a, b in rows]).reshape(right.shape)


def symmetric_eigenvalues(matrix: Tensor) -> Tensor:
    """Ascending eigenvalues (..., n) of symmetric (..., n, n).

    A system with an entry that is not finite gets NaN; LAPACK would fail for the whole batch.
    """
    finite, matrix = _finite(matrix)
    values: Tensor = torch.linalg.eigvalsh(matrix)
    return torch.where(finite, values, torch.nan)


def symmetric_spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Those and the eigenvectors (..., n, n), as columns; those of zero in a system without."""
    finite, matrix = _finite(matrix)
    values, vectors = torch.linalg.eigh(matrix)
    return torch.where(finite, values, torch.nan), vectors


def eigenvalues(matrix: Tensor) -> Tensor:
    """Complex eigenvalues (..., n) of any (..., n, n); NaN as in :func:`symmetric_eigenvalues`."""
    finite, matrix = _finite(matrix)
    values: Tensor = torch.linalg.eigvals(matrix)
    return torch.where(finite, values, torch.nan)


def _finite(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Which matrices are finite (..., 1), and those with zeros in the place of the others."""
    finite = torch.isfinite(matrix).all(-1).all(-1)
    return finite[..., None], torch.where(finite[..., None, None], matrix, 0.0)


def add_transpose(matrices: Tensor, out: Tensor) -> Tensor:
    """A + A^T of (B, n, n), into ``out``, which may be A."""
    if matrices.shape[-1] <= 128:
        return torch.add(matrices, matrices.mT.contiguous(), out=out)
    for matrix, target in zip(matrices, out, strict=True):
        # A transposed copy of one matrix runs tile by tile, a transposed operand of a sum does not.
        torch.add(matrix, matrix.mT.contiguous(), out=target)
    return out
