"""Entries that must not count: self couplings, and whatever stands at absent sites."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["clear", "flatten_blocks", "is_symmetric", "remove", "rounding"]


def remove(matrix: Tensor, absent: Tensor | None, dim: int = 1) -> Tensor:
    """Zero the self couplings, and the rows and columns of absent sites.

    Args:
        matrix: ``(..., N D, N D)``, the components of a spin next to each other.
        absent: bool ``(..., N)``, True = absent, or None.
        dim: ``D``.
    """
    n = matrix.shape[-1] // dim
    blocks = matrix.reshape(*matrix.shape[:-2], n, dim, n, dim)
    # Writes and fills, not products: NaN times zero is NaN, in the value and in the gradient.
    # Writing the diagonal costs a copy; a fill by an identity mask measured 7 times as much.
    place = blocks.diagonal(dim1=-4, dim2=-2)
    blocks = torch.diagonal_scatter(blocks, torch.zeros_like(place), dim1=-4, dim2=-2)
    if absent is not None:
        removed = absent[..., :, None] | absent[..., None, :]
        blocks = blocks.masked_fill(removed[..., :, None, :, None], 0.0)
    return blocks.reshape(*blocks.shape[:-4], n * dim, n * dim)


def clear(state: Tensor, absent: Tensor | None) -> Tensor:
    """Zero at absent sites, whatever stands there: zero times NaN would still be NaN."""
    return state if absent is None else state.masked_fill(absent.unsqueeze(-1), 0.0)


def flatten_blocks(tensor: Tensor) -> Tensor:
    """``(..., N, N, D, D)`` to ``(..., N D, N D)``."""
    return tensor.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)


def rounding(num_terms: int, dtype: torch.dtype) -> float:
    """Asymmetry, relative to the largest entry, that the rounding of a sum can leave.

    Rounding errors of n terms add up to about sqrt(n) eps; 8 leaves room for a few such sums in a
    row. An asymmetry of this size is below the rounding of the energy itself.
    """
    return 8.0 * math.sqrt(max(num_terms, 1)) * torch.finfo(dtype).eps


def is_symmetric(matrix: Tensor) -> bool:
    """Whether every system of ``(..., n, n)`` equals its transpose to rounding.

    A system with an entry that is not finite is not judged (it compares false), and hides nothing
    in another one.
    """
    if matrix.numel() == 0:
        return True
    with torch.no_grad():
        asymmetry = (matrix - matrix.mT).abs().amax((-2, -1))
        scale = matrix.abs().amax((-2, -1))
        return not bool((asymmetry > rounding(matrix.shape[-1], matrix.dtype) * scale).any())
