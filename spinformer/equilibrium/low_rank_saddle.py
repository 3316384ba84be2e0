r"""A saddle point of steepest descent whose couplings have low rank, and its derivatives.

With :math:`K = k (G M G^{\mathsf T} - \text{its diagonal})` all that depends on :math:`\tau`, G, M,
k and b is a few products of N x q matrices (:mod:`spinformer.solve.low_rank`), written once as a
differentiable function of them. :math:`\tau` carries its implicit derivative, whose adjoint
:math:`P u = g` is solved by conjugate gradients, or is one division if shared. Memory is O(N (q +
D)) in every order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from spinformer.equilibrium.saddle import Response, Saddle
from spinformer.errors import OnFailure
from spinformer.solve.conjugate_gradient import conjugate_gradient
from spinformer.solve.implicit import envelope, implicit
from spinformer.solve.low_rank import core, core_log_det, hessian_product
from spinformer.solve.low_rank_newton import LowRankMinimum

__all__ = ["LowRankSaddle"]

# Products with P in one adjoint solve: far from order 20 to 50 are usual.
_PRODUCTS = 2000
# Relative residual of an adjoint, and the largest that is taken for one.
_ADJOINT = {torch.float32: (1e-6, 1e-4), torch.float64: (1e-13, 1e-9)}


class LowRankSaddle(Saddle):
    """A saddle point for (G, M, scale, b): one tau a site, or one for all.

    Args:
        minimum: the solution.
        mask: absent sites.
        shared: whether there is one tau for all.
        on_failure: what to do about an adjoint that does not converge.
    """

    def __init__(
        self, minimum: LowRankMinimum, mask: Tensor | None, shared: bool, on_failure: OnFailure
    ) -> None:
        self._found = minimum
        self.mask, self.shared, self.on_failure = mask, shared, on_failure
        self.solution, self.value = minimum.solution, minimum.value
        self.log_det, self.broken = minimum.log_det, minimum.broken

    def mean(self, *inputs: Tensor) -> tuple[Tensor, None]:
        mu = self._found.response
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            mu = self.attach(*inputs).mu
        return mu.to(inputs[-1].dtype), None

    def minimum(self, *inputs: Tensor) -> Tensor:
        clean = self._clean(*inputs)

        def phi(tau: Tensor, *clean: Tensor) -> Tensor:
            state = _LowRank(self, tau, *clean)
            field = (clean[2] * state.mu).sum((-2, -1))
            return ((tau - 1).sum(-1) - state.log_det + field) / 2

        return envelope(phi, self._tau(*clean), clean).to(inputs[-1].dtype)

    def attach(self, *inputs: Tensor) -> LowRankResponse:
        clean = self._clean(*inputs)
        return LowRankResponse(self, self._tau(*clean), inputs[2].to(self.value.dtype), *clean)

    def _clean(
        self, factor: Tensor, middle: Tensor, scale: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """G, k M and b in the dtype of the solution, zero in broken systems."""
        dtype = self.value.dtype
        factor, b = factor.to(dtype), b.to(dtype)
        middle = scale.to(dtype)[..., None, None] * middle.to(dtype)
        if bool(self.broken.any()):
            broken = self.broken[..., None, None]
            factor, middle, b = (torch.where(broken, 0.0, x) for x in (factor, middle, b))
        return factor, middle, b

    def _tau(self, *clean: Tensor) -> Tensor:
        """tau of every site (..., N) with its implicit derivative."""
        found = self._found.tau
        if not self.shared:

            def residual(tau: Tensor, *clean: Tensor) -> Tensor:
                state = _LowRank(self, tau, *clean)
                return state.own + state.mu.square().sum(-1) - 1

            return implicit(found, residual, clean, lambda _vjp, right: -self.relax(right))

        number = self._count.clamp_min(1)

        def spread(tau: Tensor) -> Tensor:
            every = tau[..., None].expand(found.shape)
            return every if self.mask is None else torch.where(self.mask, 1.0, every)

        def average(tau: Tensor, *clean: Tensor) -> Tensor:
            state = _LowRank(self, spread(tau), *clean)
            total = state.own + state.mu.square().sum(-1)
            if self.mask is not None:
                total = total.masked_fill(self.mask, 0.0)
            return total.sum(-1) / number - 1

        def adjoint(_vjp: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
            return torch.where(self._count > 0, -right * number / self._total, 0.0)

        # Of an empty or broken system any tau will do; one that is masked everywhere has none.
        tau = torch.where(self.broken, 1.0, self.solution.value)
        return spread(implicit(tau, average, clean, adjoint))

    @cached_property
    def _count(self) -> Tensor:
        tau = self._found.tau
        present = torch.ones_like(tau) if self.mask is None else (~self.mask).to(tau.dtype)
        return present.sum(-1)

    @cached_property
    def _total(self) -> Tensor:
        """Sum of the entries of P over present sites (...)."""
        tau = self._found.tau
        present = torch.ones_like(tau) if self.mask is None else (~self.mask).to(tau.dtype)
        ones = present.expand(tau.shape).reshape(-1, tau.shape[-1])
        total = (ones * self._found.point.hessian(ones)).sum(-1)
        return total.reshape(self.value.shape).clamp_min(torch.finfo(tau.dtype).tiny)

    def relax(self, right: Tensor) -> Tensor:
        """P^{-1} right (..., N), without a graph."""
        point = self._found.point
        tolerance, limit = _ADJOINT[right.dtype]
        flat = right.expand(self._found.tau.shape).reshape(point.tau.shape)
        found = conjugate_gradient(
            point.hessian,
            flat,
            point.hessian_diagonal(),
            tolerance=tolerance,
            max_iterations=_PRODUCTS,
        )
        # A right side that is not finite is somebody else's failure, and keeps to its system.
        missed = (found.residual > limit) & torch.isfinite(flat).all(-1)
        if bool(missed.any()):
            type(found)(found.value, found.residual, found.iterations, ~missed).check(
                self.on_failure,
                "the adjoint of steepest descent on low-rank couplings",
                "The response of t is that of the last iterate: raise the temperature or the "
                "field, or pass dense couplings.",
            )
        return found.value.reshape(right.shape)


class _LowRank:
    """A and mu as differentiable functions of tau, G, k M and b at the solution."""

    def __init__(
        self, saddle: LowRankSaddle, tau: Tensor, factor: Tensor, middle: Tensor, b: Tensor
    ) -> None:
        self._saddle = saddle
        self.factor, self.middle = factor, middle
        self.shift = ((factor @ middle) * factor).sum(-1)
        self.diagonal = 1 / (tau + self.shift)
        self.right = self.diagonal[..., None] * factor
        self.gram = factor.mT @ self.right
        known = saddle._found.core
        middle = middle.expand(known.shape)
        self.core = core(self.gram, middle, known)
        self.left = self.right @ self.core
        self.mu = self.left @ (self.right.mT @ b) + self.diagonal[..., None] * b
        self.own = self.diagonal + (self.left * self.right).sum(-1)

    @property
    def log_det(self) -> Tensor:
        """log det V."""
        free = self.diagonal.log().sum(-1)
        found = self._saddle.log_det + free.detach()
        return core_log_det(self.gram, self.middle, self.core, found) - free


class LowRankResponse(Response):
    """A and mu with their derivatives, without an N x N matrix unless asked for one."""

    def __init__(self, saddle: LowRankSaddle, tau: Tensor, scale: Tensor, *clean: Tensor) -> None:
        self._saddle, self._scale = saddle, scale
        self._state = _LowRank(saddle, tau, *clean)
        self.mu = self._state.mu

    @cached_property
    def own(self) -> Tensor:
        own, mask = self._state.own, self._saddle.mask
        return own if mask is None else own.masked_fill(mask, 0.0)

    @property
    def log_det(self) -> Tensor:
        return self._state.log_det

    @property
    def inverse(self) -> Tensor:
        state, mask = self._state, self._saddle.mask
        inverse = torch.diag_embed(state.diagonal) + state.left @ state.right.mT
        if mask is None:
            return inverse
        return inverse.masked_fill(mask[..., None, :] | mask[..., :, None], 0.0)

    def apply(self, state: Tensor) -> Tensor:
        own = self._state
        image = own.left @ (own.right.mT @ state) + own.diagonal[..., None] * state
        mask = self._saddle.mask
        return image if mask is None else image.masked_fill(mask[..., None], 0.0)

    @property
    def pairs(self) -> Tensor:
        state = self._state
        spins = state.gram + state.gram @ state.core @ state.gram
        overlap = state.factor.mT @ state.mu
        spins = spins + overlap @ overlap.mT
        itself = state.shift * (state.own + state.mu.square().sum(-1))
        return ((state.middle * spins).sum((-2, -1)) - itself.sum(-1)) / self._scale

    def relax(self, right: Tensor) -> Tensor:
        saddle, state = self._saddle, self._state
        if saddle.shared:
            ones = torch.ones_like(state.own)
            if saddle.mask is not None:
                ones = ones.masked_fill(saddle.mask, 0.0)
            total = (ones * self._hessian(ones)).sum(-1)[..., None, None]
            total = torch.where(total > 0, total, 1.0)
            return (right.sum(-2, keepdim=True) / total).expand_as(right) * ones[..., None]
        parts = (state.diagonal, state.own, state.left, state.right, state.mu)

        def residual(
            u: Tensor,
            target: Tensor,
            diagonal: Tensor,
            own: Tensor,
            left: Tensor,
            right: Tensor,
            mu: Tensor,
        ) -> Tensor:
            return hessian_product(diagonal, own, left, right, mu, u) - target

        columns = []
        for column in right.unbind(-1):
            column = column.expand(state.own.shape)
            with torch.no_grad():
                found = saddle.relax(column)
            columns.append(
                implicit(found, residual, (column, *parts), lambda _vjp, g: saddle.relax(g))
            )
        return torch.stack(columns, -1)

    def _hessian(self, vector: Tensor) -> Tensor:
        state = self._state
        return hessian_product(state.diagonal, state.own, state.left, state.right, state.mu, vector)
