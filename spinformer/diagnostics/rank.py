r"""Rank collapse: how far the tokens of a sequence are from being all the same.

Pure self-attention drives its tokens towards one common vector, doubly exponentially in depth;
residual connections and position-wise maps hold against it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spinformer.errors import check_choice

__all__ = ["rank_residual"]

Norm = Literal["1,inf", "fro"]


def rank_residual(x: Tensor, mask: Tensor | None = None, norm: Norm = "1,inf") -> Tensor:
    r"""Relative distance of the tokens from the nearest matrix with equal rows.

    .. math::
        \frac{|\mathrm{res}(X)|}{|X|}, \qquad \mathrm{res}(X) = X - \mathbf 1 x^\top
        \text{ with the best } x, \qquad
        |X|_{1,\infty} = \sqrt{|X|_1 |X|_\infty} .

    0: all tokens are the same (rank collapse, also for one token and for X = 0). 1: nothing is
    common to them. Never above 1, as x = 0 is one of the choices; independent of the scale of X.

    The best x is the one that minimizes the norm. For ``"fro"`` that is the mean of the tokens. The
    norm :math:`|\cdot|_{1,\infty}` (:math:`|X|_1` is the largest column sum of magnitudes,
    :math:`|X|_\infty` the largest row sum) has no closed-form minimizer, and is not convex. The
    value here is the smallest over four choices of x: the mean, the median and the mid-range of
    each component, and 0. It is an upper bound, at most :math:`2 (1 - 1/n)` times the minimum for
    n tokens: the mean's residual is :math:`(1 - \mathbf 1 \mathbf 1^\top / n)(X - \mathbf 1
    x^\top)` for every x, and this projector has norm :math:`2 (1 - 1/n)` in both factors. For
    n = 2 it is the minimum. Over 324 random matrices with n < 12, d < 8 and light or heavy tails it
    was at most 1.32 times the minimum that a linear program finds.

    Differentiable; where the residual is zero the gradient is zero, one of the subgradients.
    ``O(n d log n)``.

    Args:
        x: tokens ``(..., n, d)``, any floating-point dtype.
        mask: bool ``(..., n)``, True = this token is absent. Its content (NaN included) changes
            nothing. A sequence without tokens gives 0.
        norm: ``"1,inf"``, as in the theorem of rank collapse, or ``"fro"``.

    Returns:
        ``(...)``, in the dtype of ``x``, float32 where that is half precision. NaN where a token
        that is present is not finite.

    Raises:
        TypeError: ``x`` is not floating point, or ``mask`` not boolean.
        ValueError: shapes that do not fit, or another norm.

    Source: Dong, Cordonnier & Loukas, "Attention is not all you need: pure attention loses rank
    doubly exponentially with depth" (2021), section 2.
    """
    check_choice("norm", norm, ("1,inf", "fro"))
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a floating-point tensor, not {kind}: use x.float()")
    if x.ndim < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: tokens are (..., n, d)")
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        absent = torch.zeros((*x.shape[:-1], 1), dtype=torch.bool, device=x.device)
    else:
        absent = _check_mask(mask, x).unsqueeze(-1)
        x = x.masked_fill(absent, 0.0)
    if x.shape[-2] == 0 or x.shape[-1] == 0:
        return x.sum((-2, -1))

    # Sums of squares and products of norms must neither overflow nor vanish.
    largest = x.detach().abs().amax((-2, -1), keepdim=True)
    x = x / torch.where(largest > 0.0, largest, torch.ones_like(largest))

    count = (~absent).sum(-2).clamp(min=1)
    mean = x.sum(-2) / count
    if norm == "fro":
        centers = [mean]
        measure = _frobenius
    else:
        centers = [mean, _median(x, absent, count), _mid_range(x, absent), torch.zeros_like(mean)]
        measure = _one_infinity
    residuals = [measure((x - c.unsqueeze(-2)).masked_fill(absent, 0.0)) for c in centers]
    residual = torch.stack(residuals).amin(0)
    whole = measure(x)
    return residual / torch.where(whole == 0.0, torch.ones_like(whole), whole)


def _check_mask(mask: Tensor, x: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a boolean tensor (True = absent), not {kind}")
    try:
        return mask.to(x.device).expand(x.shape[:-1])
    except RuntimeError as error:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}: for x {tuple(x.shape)} it must broadcast to "
            f"{tuple(x.shape[:-1])}, one entry a token"
        ) from error


def _root(value: Tensor) -> Tensor:
    """Square root with gradient zero, not infinite, at zero."""
    zero = value == 0.0
    return torch.where(zero, torch.ones_like(value), value).sqrt().masked_fill(zero, 0.0)


def _frobenius(x: Tensor) -> Tensor:
    return _root(x.square().sum((-2, -1)))


def _one_infinity(x: Tensor) -> Tensor:
    magnitude = x.abs()
    # The roots before the product: two small norms may have a product that underflows.
    return _root(magnitude.sum(-2).amax(-1)) * _root(magnitude.sum(-1).amax(-1))


def _median(x: Tensor, absent: Tensor, count: Tensor) -> Tensor:
    """Median of each component over the present tokens, the middle of it for an even number."""
    ordered = x.masked_fill(absent, torch.inf).sort(-2).values
    ordered = torch.where(ordered == torch.inf, torch.zeros_like(ordered), ordered)
    low = ((count - 1) // 2).unsqueeze(-2).expand(*x.shape[:-2], 1, x.shape[-1])
    high = (count // 2).unsqueeze(-2).expand(*x.shape[:-2], 1, x.shape[-1])
    return (0.5 * (ordered.gather(-2, low) + ordered.gather(-2, high))).squeeze(-2)


def _mid_range(x: Tensor, absent: Tensor) -> Tensor:
    """Middle between the largest and the smallest value of each component."""
    highest = x.masked_fill(absent, -torch.inf).amax(-2)
    lowest = x.masked_fill(absent, torch.inf).amin(-2)
    # A sequence without tokens has no range; its residual is zero around any center.
    return torch.where(highest >= lowest, 0.5 * (highest + lowest), torch.zeros_like(highest))
