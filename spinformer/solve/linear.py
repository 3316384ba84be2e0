"""Linear equations of batches of systems."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["solve_each"]


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
