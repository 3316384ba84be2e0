r"""A solved saddle point of steepest descent, and its derivatives.

The solvers give numbers; what makes them functions of the couplings, of their scale and of b is
here. First derivatives are in closed form, with a multiplier w of the constraints on
:math:`\tau`. Where more are asked for, :math:`\tau` carries its implicit derivative, and A and
its log-determinant are functions whose values are known, so that no order inverts a V again.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spinformer.solve.implicit import implicit
from spinformer.solve.newton import ConeMinimum
from spinformer.solve.positive import cone_hessian, positive_factor
from spinformer.solve.secular import SharedMinimum, rotate
from spinformer.solve.solution import Solution

__all__ = ["Saddle", "SharedSaddle", "SiteSaddle"]


class Saddle(abc.ABC):
    """A solved saddle point: values without a graph, and the ways to attach one.

    The differentiable inputs are always (couplings J, scale, b), with K = scale * J.
    """

    solution: Solution
    value: Tensor  # Phi (...)
    log_det: Tensor  # (...)
    broken: Tensor  # (...) bool
    mask: Tensor | None

    @property
    @abc.abstractmethod
    def response(self) -> Tensor:
        """mu (..., N, D)."""

    @property
    @abc.abstractmethod
    def inverse(self) -> Tensor:
        """A (..., N, N), with rows of the unit matrix at absent sites."""

    @abc.abstractmethod
    def cotangents(
        self, couplings: Tensor, scale: Tensor, b: Tensor, grad: Tensor, needed: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """First derivatives of ``(grad * mu).sum()`` in J, scale and b, in closed form."""

    @abc.abstractmethod
    def curvature(self, inverse: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        r"""log det of :math:`P = A \circ (A + 2\mu\mu^{\mathsf T})` over the tau that there are,
        and the inverse of P, for :meth:`weigh`. Differentiable."""

    @abc.abstractmethod
    def weigh(self, inverse_curvature: Tensor, left: Tensor, right: Tensor) -> Tensor:
        r"""left^T P^{-1} right for left (..., N, p), right (..., N, q) -> (..., p, q)."""

    @abc.abstractmethod
    def _tau(self, k: Tensor, b: Tensor) -> Tensor:
        """tau of every site (..., N) with its implicit derivative in K and b."""

    @property
    def present(self) -> Tensor | None:
        return None if self.mask is None else ~self.mask

    def attach(self, couplings: Tensor, scale: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """(V, A, mu), differentiable to any order."""
        dtype = self.value.dtype
        k = scale.to(dtype)[..., None, None] * couplings.to(dtype)
        k = (k + k.mT) / 2
        b = b.to(dtype)
        if bool(self.broken.any()):
            k = torch.where(self.broken[..., None, None], 0.0, k)
            b = torch.where(self.broken[..., None, None], 0.0, b)
        v = torch.diag_embed(self._tau(k, b)) - k
        inverse = _Inverse.apply(v, self.inverse)
        return v, inverse, inverse @ b

    def mean(self, couplings: Tensor, scale: Tensor, b: Tensor) -> Tensor:
        """mu with its derivative, NaN in broken systems."""
        mu: Tensor = _Response.apply(self, couplings, scale, b)
        if bool(self.broken.any()):
            mu = torch.where(self.broken[..., None, None], torch.nan, mu)
        return mu

    def minimum(self, couplings: Tensor, scale: Tensor, b: Tensor) -> Tensor:
        """Phi with its derivative."""
        value: Tensor = _Minimum.apply(self, couplings, scale, b)
        return value


class SiteSaddle(Saddle):
    """One tau a site."""

    def __init__(self, minimum: ConeMinimum, mask: Tensor | None) -> None:
        self._minimum = minimum
        self.mask = mask
        self.solution, self.value = minimum.solution, minimum.value
        self.log_det, self.broken = minimum.log_det, minimum.broken

    @property
    def response(self) -> Tensor:
        return self._minimum.response

    @property
    def inverse(self) -> Tensor:
        return self._minimum.inverse

    @cached_property
    def _factor(self) -> Tensor:
        return positive_factor(cone_hessian(self.inverse, self.response))

    def cotangents(
        self, couplings: Tensor, scale: Tensor, b: Tensor, grad: Tensor, needed: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        # mu = A b and A_ii + |mu_i|^2 = 1; w is the multiplier of the constraint.
        inverse, mu = self.inverse, self.response
        direct = inverse @ grad
        slope = -(direct * mu).sum(-1, keepdim=True)
        w = torch.cholesky_solve(slope, self._factor)
        b_bar = torch.addcmul(direct, inverse @ (w * mu), torch.full_like(w, 2.0))
        couplings_bar = scale_bar = None
        k = scale.to(grad.dtype)[..., None, None]
        if needed[0]:
            couplings_bar = _sum_outer(k * b_bar, mu, couplings)
            couplings_bar += _sum_outer(inverse * (k * w).mT, inverse, couplings)
            couplings_bar = (couplings_bar + couplings_bar.mT) / 2
        if needed[1]:
            # sum_ij J_ij dL/dK_ij, from K mu = tau mu - b and (A K A)_ii = (A^2 tau)_i - A_ii
            tau = torch.where(self.broken[..., None], 1.0, self.solution.value)[..., None]
            own = inverse.diagonal(dim1=-2, dim2=-1)
            turned = (tau.mT @ inverse.square())[..., 0, :] - own
            scale_bar = (b_bar * (tau * mu - b)).sum((-2, -1)) + (w[..., 0] * turned).sum(-1)
            scale_bar = scale_bar / scale
        return couplings_bar, scale_bar, b_bar

    def curvature(self, inverse: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        p = inverse * (inverse + 2 * response @ response.mT)
        factor = positive_factor(p.detach())
        value = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        p_inverse = _Inverse.apply(p, torch.cholesky_inverse(factor))
        log_det: Tensor = LogDet.apply(p, p_inverse, value)
        return log_det, p_inverse

    def weigh(self, inverse_curvature: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return left.mT @ (inverse_curvature @ right)

    def _tau(self, k: Tensor, b: Tensor) -> Tensor:
        stored = self.inverse

        def residual(tau: Tensor, k: Tensor, b: Tensor) -> Tensor:
            inverse: Tensor = _Inverse.apply(torch.diag_embed(tau) - k, stored)
            return inverse.diagonal(dim1=-2, dim2=-1) + (inverse @ b).square().sum(-1) - 1

        def adjoint(_vjp: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
            # The Jacobian is -P, at every order.
            return -torch.cholesky_solve(right[..., None], self._factor)[..., 0]

        tau = torch.where(self.broken[..., None], 1.0, self.solution.value)
        return implicit(tau, residual, (k, b), adjoint)


class SharedSaddle(Saddle):
    """One tau for all sites, in the eigenbasis of J."""

    def __init__(self, minimum: SharedMinimum, mask: Tensor | None) -> None:
        self._minimum = minimum
        self.mask = mask
        self.solution, self.value = minimum.solution, minimum.value
        self.log_det, self.broken = minimum.log_det, minimum.broken

    @cached_property
    def response(self) -> Tensor:
        minimum = self._minimum
        return self._here(rotate(minimum.vectors, minimum.rotated / minimum.gaps[..., None]))

    def _here(self, state: Tensor) -> Tensor:
        """Without what rounding of mixed eigenvectors leaves at absent sites."""
        return state if self.mask is None else state.masked_fill(self.mask[..., None], 0.0)

    @cached_property
    def inverse(self) -> Tensor:
        minimum = self._minimum
        vectors = minimum.vectors
        inverse = (vectors / minimum.gaps[..., None, :]) @ vectors.mT
        if self.mask is not None:
            inverse = inverse.masked_fill(self.mask[..., None, :] | self.mask[..., :, None], 0.0)
            inverse.diagonal(dim1=-2, dim2=-1).add_(self.mask.to(inverse.dtype))
        return inverse

    @cached_property
    def _curvature(self) -> Tensor:
        """Sum of the entries of P over present sites (...)."""
        minimum = self._minimum
        squares = minimum.rotated.square().sum(-1)
        terms = (minimum.weights + 2 * squares / minimum.gaps) / minimum.gaps.square()
        return terms.sum(-1)

    def cotangents(
        self, couplings: Tensor, scale: Tensor, b: Tensor, grad: Tensor, needed: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        minimum = self._minimum
        gaps = minimum.gaps[..., None]
        image = minimum.rotated / gaps  # mu in the eigenbasis
        direct = rotate(minimum.vectors.mT, grad) / gaps
        w = -(direct * image).sum((-2, -1)) / self._curvature.clamp_min(
            torch.finfo(grad.dtype).tiny
        )
        w = w[..., None, None]
        turned = direct + 2 * w * image / gaps  # the cotangent of b in the eigenbasis
        b_bar = self._here(rotate(minimum.vectors, turned))
        k = scale.to(grad.dtype)[..., None, None]
        couplings_bar = scale_bar = None
        if needed[0]:
            couplings_bar = _sum_outer(k * b_bar, self.response, couplings)
            spectrum = (k * w / gaps.square())[..., 0]
            spectrum = spectrum.sum_to_size(*minimum.vectors.shape[:-1])
            couplings_bar += (minimum.vectors * spectrum[..., None, :]) @ minimum.vectors.mT
            couplings_bar = (couplings_bar + couplings_bar.mT) / 2
        if needed[1]:
            tau = torch.where(self.broken, 1.0, self.solution.value)
            levels = tau[..., None, None] - gaps  # eigenvalues of K
            scale_bar = (levels * turned * image).sum((-2, -1))
            # An absent site has eigenvalue zero and no share in this.
            scale_bar += (levels * w / gaps.square()).sum((-2, -1))
            scale_bar = scale_bar / scale
        return couplings_bar, scale_bar, b_bar

    def curvature(self, inverse: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        inverse = clear(inverse, self.mask)
        number = self._minimum.count.clamp_min(1)
        total = (inverse * (inverse + 2 * response @ response.mT)).sum((-2, -1))
        # Without a present site there is nothing to average.
        total = torch.where(self._minimum.count > 0, total, number)
        return (total / number).log(), 1 / total

    def weigh(self, inverse_curvature: Tensor, left: Tensor, right: Tensor) -> Tensor:
        sums = left.sum(-2)[..., :, None] * right.sum(-2)[..., None, :]
        return inverse_curvature[..., None, None] * sums

    def _tau(self, k: Tensor, b: Tensor) -> Tensor:
        stored, minimum = self.inverse, self._minimum
        number = minimum.count.clamp_min(1)
        jacobian = -self._curvature / number

        def spread(tau: Tensor) -> Tensor:
            every = tau[..., None].expand(k.shape[:-1])
            return every if self.mask is None else torch.where(self.mask, 1.0, every)

        def residual(tau: Tensor, k: Tensor, b: Tensor) -> Tensor:
            inverse: Tensor = _Inverse.apply(torch.diag_embed(spread(tau)) - k, stored)
            own = inverse.diagonal(dim1=-2, dim2=-1)
            if self.mask is not None:
                own = own.masked_fill(self.mask, 0.0)
            return (own + (inverse @ b).square().sum(-1)).sum(-1) / number - 1

        def adjoint(_vjp: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
            return torch.where(jacobian < 0, right / jacobian, 0.0)

        tau = torch.where(self.broken, 1.0, self.solution.value)
        return spread(implicit(tau, residual, (k, b), adjoint))


def _sum_outer(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
    """left @ right^T, summed over the systems that share the couplings ``like``."""
    if like.ndim == 2 and left.ndim > 2:
        return left.movedim(-2, 0).flatten(1) @ right.movedim(-2, 0).flatten(1).mT
    return (left @ right.mT).sum_to_size(*like.shape)


def clear(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """The matrix without the rows and columns of absent sites."""
    if mask is None:
        return matrix
    return matrix.masked_fill(mask[..., None, :] | mask[..., :, None], 0.0)


class _Inverse(torch.autograd.Function):
    """The known inverse of a matrix as a function of it, to any order."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, inverse: Tensor) -> Tensor:
        output = inverse.clone()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT), None


class LogDet(torch.autograd.Function):
    """The known log-determinant of a symmetric matrix; the inverse carries higher orders."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, inverse: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0][..., None, None] * inverse, None, None


class _Response(torch.autograd.Function):
    """mu of (J, scale, b): closed-form first derivatives, a graph where more are asked for."""

    @staticmethod
    def forward(ctx: Any, saddle: Saddle, couplings: Tensor, scale: Tensor, b: Tensor) -> Tensor:
        ctx.saddle = saddle
        ctx.save_for_backward(couplings, scale, b)
        return saddle.response.to(b.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saddle, arguments = ctx.saddle, ctx.saved_tensors
        needed = list(ctx.needs_input_grad[1:])
        grad = torch.where(saddle.broken[..., None, None], 0.0, grads[0])
        if torch.is_grad_enabled():
            # New names: a dependence of one argument on another is not ours to follow.
            names = [x.view_as(x) for x in arguments]
            mu = saddle.attach(*names)[2].to(grad.dtype)
            return None, *_gradients(mu, names, needed, grad)
        dtype = saddle.value.dtype
        couplings, scale, b = arguments
        found = saddle.cotangents(couplings, scale, b, grad.to(dtype), needed)
        return None, *(
            None if bar is None or not need else bar.to(x.dtype)
            for bar, need, x in zip(found, needed, arguments, strict=True)
        )


class _Minimum(torch.autograd.Function):
    """Phi of (J, scale, b): by the envelope theorem its derivatives hold tau fixed."""

    @staticmethod
    def forward(ctx: Any, saddle: Saddle, couplings: Tensor, scale: Tensor, b: Tensor) -> Tensor:
        ctx.saddle = saddle
        ctx.save_for_backward(couplings, scale, b)
        return saddle.value.to(b.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saddle, (couplings, scale, b) = ctx.saddle, ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        dtype = saddle.value.dtype
        grad = torch.where(saddle.broken, 0.0, grads[0]).to(dtype)[..., None, None]
        if torch.is_grad_enabled():
            _, inverse, mu = saddle.attach(couplings, scale, b)
        else:
            inverse, mu = saddle.inverse, saddle.response
        couplings_bar = scale_bar = b_bar = None
        if needed[0] or needed[1]:
            k_bar = grad / 2 * (inverse + mu @ mu.mT)
            if needed[0]:
                k = scale.to(dtype)[..., None, None]
                couplings_bar = (k * k_bar).sum_to_size(*couplings.shape).to(couplings.dtype)
            if needed[1]:
                products = torch.where(
                    saddle.broken[..., None, None], 0.0, couplings.to(dtype) * k_bar
                )
                scale_bar = products.sum((-2, -1)).to(scale.dtype)
        if needed[2]:
            b_bar = (grad * mu).to(b.dtype)
        return None, couplings_bar, scale_bar, b_bar


def _gradients(
    output: Tensor, inputs: list[Tensor], needed: list[bool], grad: Tensor
) -> list[Tensor | None]:
    """Derivatives, with a graph, in those of the inputs that need one."""
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    found = iter(torch.autograd.grad(output, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]
