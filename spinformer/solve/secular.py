r"""The minimum in the cone over equal :math:`\tau_i`, from a secular equation.

With one :math:`\tau` for all sites, the function :math:`\Phi` of :mod:`spinformer.solve.newton`
needs no matrix but the eigenvectors of K, once: what is left is the largest root of a sum of poles
at the eigenvalues.

Source: Gander, Golub & von Matt 1989, Lin. Alg. Appl. 114, 815, for secular equations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.solve.newton import MAX_ITERATIONS, ROUNDING
from spinformer.solve.solution import Solution

__all__ = ["SharedMinimum", "minimize_shared", "rotate"]


@dataclass(frozen=True)
class SharedMinimum:
    r"""The minimum of :math:`\Phi` over equal :math:`\tau_i`, in the eigenbasis of K.

    Attributes:
        solution: :math:`\tau` (...) with residual
            :math:`|\overline{A_{ii} + |\mu_i|^2} - 1|`, the mean over present sites.
        gaps: :math:`\tau - \lambda_k` (..., N), without cancellation.
        vectors: U (..., N, N), or (N, N) for all systems.
        rotated: :math:`U^{\mathsf T} b` (..., N, D).
        weights: :math:`\sum_{i\ \mathrm{present}} U_{ik}^2` (..., N).
        count: number of present sites (...).
        log_det: of :math:`\tau - K` over present sites (...).
        value: :math:`\Phi` at its minimum (...).
        broken: as in :class:`~spinformer.solve.newton.ConeMinimum`.
    """

    solution: Solution
    gaps: Tensor
    vectors: Tensor
    rotated: Tensor
    weights: Tensor
    count: Tensor
    log_det: Tensor
    value: Tensor
    broken: Tensor


def minimize_shared(
    values: Tensor,
    vectors: Tensor,
    b: Tensor,
    *,
    scale: Tensor | None = None,
    absent: Tensor | None = None,
    tolerance: float | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> SharedMinimum:
    r"""Minimize :math:`\Phi` over equal :math:`\tau_i = \tau`; not differentiable.

    In the eigenbasis of K the condition is a scalar, decreasing function of the gap
    :math:`g = \tau - \lambda_{\max} > 0`,

    .. math:: \frac1n \sum_k \frac{w_k}{g + \delta_k} + \frac{|\tilde b_k|^2}{(g + \delta_k)^2} = 1,
              \qquad \delta_k = \lambda_{\max} - \lambda_k,

    and is solved for g, not :math:`\tau`: nothing cancels, however cold the system. Newton's method
    on the reciprocal of the left side, safeguarded by a bracket.

    Args:
        values: eigenvalues (..., N) of a symmetric matrix, ascending.
        vectors: eigenvectors (..., N, N) in columns. Without leading axes they serve all systems.
        b: (..., N, D), zero at absent sites.
        scale: positive factors (...): K is ``scale`` times the matrix. None is 1.
        absent: bool (..., N). The rows and columns of the matrix must be zero there.
        tolerance: of the residual; None is 1e-12 in float64 and 1e-5 in float32.
        max_iterations: steps, each O(N).

    Returns:
        the :class:`SharedMinimum`.

    Cost: one product with the eigenvectors, O(N^2 D).
    """
    dtype = b.dtype
    if tolerance is None:
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    # More than the tolerance costs nothing here.
    goal = min(tolerance, 64 * torch.finfo(dtype).eps)
    rotated = rotate(vectors.mT, b)
    squares = rotated.square().sum(-1)
    batch, n = squares.shape[:-1], squares.shape[-1]
    values = values if scale is None else scale[..., None] * values
    values = values.expand(*batch, n)
    if absent is None:
        weights = torch.ones_like(squares)
        count = torch.full(batch, float(n), dtype=dtype, device=b.device)
    else:
        present = (~absent).to(dtype)
        weights = (vectors.mT.square() @ present[..., None])[..., 0].expand(*batch, n)
        count = present.sum(-1).expand(batch)
    broken = ~torch.isfinite(squares.sum(-1) + values.sum(-1))
    if bool(broken.any()):
        squares = squares.masked_fill(broken[..., None], 0.0)
        rotated = rotated.masked_fill(broken[..., None, None], 0.0)
        values = values.masked_fill(broken[..., None], 0.0)
        weights = weights.nan_to_num(1.0).masked_fill(broken[..., None], 1.0)

    number = count.clamp_min(1)
    empty = count == 0  # nothing to solve: any tau will do
    highest = _last(values)
    deltas = highest[..., None] - values
    mean_square = squares.sum(-1) / number
    top, top_weight = _last(squares) / number, _last(weights) / number
    low = (top_weight + torch.sqrt(top_weight.square() + 4 * top)) / 2
    high = (1 + torch.sqrt(1 + 4 * mean_square)) / 2
    gap = high.clone()
    steps = torch.zeros(batch, dtype=torch.int64, device=b.device)
    while True:
        reciprocal = 1 / (gap[..., None] + deltas)
        single = weights * reciprocal
        double = squares * reciprocal.square()
        total = (single + double).sum(-1) / number
        residual = (total - 1).abs()
        going = (residual > goal) & (steps < max_iterations) & ~empty
        # The bracket is the last resort of rounding: between neighbours there is no better gap.
        low = torch.where(total >= 1, torch.maximum(low, gap), low)
        high = torch.where(total <= 1, torch.minimum(high, gap), high)
        going &= high - low > 2 * torch.finfo(dtype).eps * high
        if not bool(going.any()):
            break
        slope = ((single + 2 * double) * reciprocal).sum(-1) / number
        new = gap + total * (total - 1) / slope
        new = torch.where((new > low) & (new < high), new, (low * high).sqrt())
        gap = torch.where(going, new, gap)
        steps += going

    gaps = gap[..., None] + deltas
    tau = gap + highest
    log_det = (weights * gaps.log()).sum(-1)
    field = (squares / gaps).sum(-1)
    value = (count * (tau - 1) - log_det + field) / 2
    residual = torch.where(empty, 0.0, residual)
    limit = ROUNDING * torch.finfo(dtype).eps
    converged = (residual <= max(tolerance, limit)) | ((residual < math.inf) & (high <= low))
    solution = Solution(
        tau.masked_fill(broken, torch.nan),
        residual.masked_fill(broken, torch.nan),
        steps,
        converged & ~broken,
    )
    return SharedMinimum(
        solution,
        gaps,
        vectors,
        rotated,
        weights,
        count,
        log_det,
        value.masked_fill(broken, torch.nan),
        broken,
    )


def _last(rows: Tensor) -> Tensor:
    """The last entry of each row, zero of an empty one."""
    return rows[..., -1] if rows.shape[-1] else rows.sum(-1)


def rotate(matrix: Tensor, state: Tensor) -> Tensor:
    """matrix @ state, with the systems that share a matrix as columns of one product."""
    shared = state.ndim - matrix.ndim
    if shared <= 0:
        return matrix @ state
    # Broadcast, the matrix would be read, and copied, once a system.
    columns = state.flatten(0, shared - 1).movedim(0, -2)
    systems, dim = columns.shape[-2:]
    product = (matrix @ columns.flatten(-2)).unflatten(-1, (systems, dim))
    rotated: Tensor = product.movedim(-2, 0).unflatten(0, state.shape[:shared])
    return rotated
