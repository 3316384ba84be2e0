r"""Parallel dynamics to second order around independent spins: what kinetic equations are made of.

A spin in a field b has the mean :math:`\tau b`, the covariance :math:`C = \tau + w\,bb^{\mathsf T}`
and the third cumulants :math:`\kappa_{acd} = w\,(b_a\delta_{cd} + b_c\delta_{ad} + b_d\delta_{ac})
+ 2 w' b_a b_c b_d`, :math:`w' = dw/d|b|^2`. Sums over pairs of these tensors are products
of scalars and of the overlaps :math:`b_i\cdot b_j`: nothing of size :math:`N D^2` is formed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spinformer.equilibrium.tap import reaction_weights
from spinformer.spins.site import Gaussian, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.special import reduced_jet

__all__ = ["Cumulants", "cubic", "cumulants", "reaction", "two_bonds", "weighted_bond"]


class Cumulants(NamedTuple):
    """Of independent spins: b (..., N, D), the others (..., N).

    Attributes:
        b: the field.
        tau: transverse variance; the mean is tau b.
        rho: longitudinal variance, tau + w b^2.
        w: of the covariance.
        slope: dw / d b^2, of the third cumulants.
    """

    b: Tensor
    tau: Tensor
    rho: Tensor
    w: Tensor
    slope: Tensor

    @property
    def trace(self) -> Tensor:
        """tr C, (..., N)."""
        return (self.b.shape[-1] - 1) * self.tau + self.rho

    @property
    def square(self) -> Tensor:
        """:math:`|b|^2`, (..., N)."""
        return self.b.square().sum(-1)


def cumulants(site: SiteLaw, b: Tensor, fluctuates: Tensor | None) -> Cumulants:
    """Of spins in fields b (..., N, D); one that is absent, or fixed at a start, has none."""
    x = b.square().sum(-1)
    if isinstance(site, Gaussian):
        tau = torch.full_like(x, site.variance)
        rho, w, slope = tau, torch.zeros_like(x), torch.zeros_like(x)
    elif isinstance(site, LargeDSphere):
        weight = (2 * site.radius / site.dim) ** 2
        q = torch.sqrt(1 + weight * x)
        tau = 2 * site.radius**2 / site.dim / (1 + q)
        rho = tau / q
        w = -tau * weight / (q * (1 + q))
        slope = tau * weight**2 * (1 + 3 * q) / (2 * q**3 * (1 + q) ** 2)
    else:
        # Ising spins are the sphere in one dimension.
        assert site.radius is not None
        square = site.radius**2
        a, a1, a2, along = reduced_jet(square * x, site.dim)
        tau, rho, w, slope = square * a, square * along, 2 * square**2 * a1, 2 * square**3 * a2
    if fluctuates is not None:
        tau, rho, w, slope = (torch.where(fluctuates, t, 0.0) for t in (tau, rho, w, slope))
    return Cumulants(b, tau, rho, w, slope)


def reaction(site: SiteLaw, now: Cumulants, before: Cumulants, square: Tensor) -> Tensor:
    r"""Onsager's reaction :math:`O_i = \tfrac12 \partial_{m_i} \operatorname{tr}(V_i C_i)`.

    :math:`V_i = \sum_j K_{ij}^2 C_j` is the covariance of the field on spin i.

    Args:
        site: the law. For ``LargeDSphere`` its leading order in D, as in
            :class:`~spinformer.TAP`.
        now: of the spins that receive.
        before: of the spins that give.
        square: :math:`K_{ij}^2`, (..., N, N).
    """
    if isinstance(site, Gaussian):
        return torch.zeros_like(now.b)
    mean = now.tau[..., None] * now.b
    if not isinstance(site, Sphere):
        return -mean * (square @ (before.tau if site.dim > 1 else before.rho)[..., None])
    p, q = (square @ torch.stack((before.trace, before.tau), -1)).unbind(-1)
    v = (square * (now.b @ before.b.mT)) @ (before.w[..., None] * before.b)
    # An absent spin has neither variance.
    tau, rho = (torch.where(x == 0, 1.0, x) for x in (now.tau, now.rho))
    u = (now.b * v).sum(-1)
    along, across = reaction_weights(now.b, (tau, rho, now.w, now.slope), p, q, u)
    return along[..., None] * now.b + across[..., None] * v


def weighted_bond(weight: Tensor, now: Cumulants, before: Cumulants) -> Tensor:
    """weight_ij tr(C_i C_j), with C_i of ``now`` and C_j of ``before``, (..., N, N)."""
    dim = now.b.shape[-1]
    u = now.b @ before.b.mT
    long_now, long_before = now.w * now.square, before.w * before.square
    trace = (
        now.tau[..., :, None] * (dim * before.tau + long_before)[..., None, :]
        + long_now[..., :, None] * before.tau[..., None, :]
        + (now.w[..., :, None] * before.w[..., None, :]) * u.square()
    )
    return weight * trace


def cubic(now: Cumulants, before: Cumulants) -> Tensor:
    r""":math:`\sum_{acd} \kappa^i_{acd}\kappa^j_{acd}`, (..., N, N)."""
    dim = now.b.shape[-1]
    u = now.b @ before.b.mT
    w, v = now.w[..., :, None], before.w[..., None, :]
    p, q = now.slope[..., :, None], before.slope[..., None, :]
    mixed = p * now.square[..., :, None] * v + w * q * before.square[..., None, :]
    return (3 * (dim + 2) * w * v + 6 * mixed + 4 * p * q * u.square()) * u


def two_bonds(left: Tensor, right: Tensor, end: Cumulants, middle: Cumulants) -> Tensor:
    r""":math:`\sum_k L_{ik} R_{kj} \operatorname{tr}(C_i C_k C_j)`, (..., N, N), O(N^3).

    C_i and C_j are those of ``end``, C_k of ``middle``.
    """
    u = end.b @ middle.b.mT
    ends = end.b @ end.b.mT
    tau_i, tau_j = end.tau[..., :, None], end.tau[..., None, :]
    w_i, w_j = end.w[..., :, None], end.w[..., None, :]
    mid_left = left * middle.w[..., None, :]
    isotropic = (left * middle.tau[..., None, :]) @ right
    return (
        weighted_bond(isotropic, end, end)
        + tau_i * tau_j * ((mid_left * middle.square[..., None, :]) @ right)
        + tau_j * w_i * ((mid_left * u.square()) @ right)
        + tau_i * w_j * (mid_left @ (right * u.mT.square()))
        + w_i * w_j * ends * ((mid_left * u) @ (right * u.mT))
    )
