"""Conjugate gradients with a diagonal preconditioner, one solve a system."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spinformer.solve.solution import Solution

__all__ = ["conjugate_gradient"]


def conjugate_gradient(
    operator: Callable[[Tensor], Tensor],
    right: Tensor,
    diagonal: Tensor,
    *,
    tolerance: float | Tensor,
    max_iterations: int,
) -> Solution:
    r"""Solve :math:`P x = r` with a symmetric positive-definite P that is only applied.

    A finished system is frozen, so that none changes another. Every iterate is a direction of
    descent of :math:`\tfrac12 x^{\mathsf T} P x - r^{\mathsf T} x`, also where it stops early.

    Args:
        operator: ``x (..., N) -> P x``.
        right: r (..., N).
        diagonal: of P (..., N), positive: the preconditioner.
        tolerance: of :math:`|P x - r| / |r|`, a number or one a system (...).
        max_iterations: products with P.

    Returns:
        x with that residual, as the recursion knows it. A system whose r is not finite, or for
        which P is not positive, has not converged.

    Source: Hestenes & Stiefel 1952, J. Res. Natl. Bur. Stand. 49, 409.
    """
    size = torch.linalg.vector_norm(right, dim=-1)
    sound = torch.isfinite(size)
    residual = right.masked_fill(~sound[..., None], 0.0)
    unit = torch.where(sound & (size > 0), size, 1.0)
    relative = torch.linalg.vector_norm(residual, dim=-1) / unit
    value = torch.zeros_like(right)
    steps = torch.zeros(size.shape, dtype=torch.int64, device=size.device)
    active = relative > tolerance
    direction = residual / diagonal
    product = (residual * direction).sum(-1)
    for _ in range(max_iterations):
        if not bool(active.any()):
            break
        image = operator(direction)
        curvature = (direction * image).sum(-1)
        # A comparison with NaN is false.
        sound &= ~active | (curvature > 0)
        active &= sound
        length = torch.where(active, product / curvature, 0.0)[..., None]
        value = torch.addcmul(value, length, direction)
        residual = torch.addcmul(residual, length, image, value=-1)
        steps += active
        relative = torch.linalg.vector_norm(residual, dim=-1) / unit
        active &= relative > tolerance
        turned = residual / diagonal
        before, product = product, (residual * turned).sum(-1)
        ratio = torch.where(active, product / before, 0.0)[..., None]
        direction = torch.addcmul(turned, ratio, direction)
    relative = relative.masked_fill(~sound, torch.nan)
    return Solution(value, relative, steps, relative <= tolerance)
