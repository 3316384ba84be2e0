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
from spinformer.solve.linear import add_transpose
from spinformer.solve.newton import ITERATIVE_SITES, ConeMinimum, iterative_solve
from spinformer.solve.positive import (
    cone_hessian,
    known_inverse,
    known_log_det,
    positive_factor,
)
from spinformer.solve.secular import SharedMinimum, rotate
from spinformer.solve.solution import Solution

__all__ = ["DenseSaddle", "Response", "Saddle", "SharedSaddle", "SiteSaddle"]


class Response(abc.ABC):
    """A and mu at a saddle, with their derivatives, and what observables ask of them."""

    mu: Tensor  # (..., N, D)

    @property
    @abc.abstractmethod
    def own(self) -> Tensor:
        """A_ii (..., N), zero at absent sites."""

    @property
    @abc.abstractmethod
    def inverse(self) -> Tensor:
        """A (..., N, N) with empty rows at absent sites."""

    @property
    @abc.abstractmethod
    def log_det(self) -> Tensor:
        """log det A^{-1} over present sites (...)."""

    @property
    @abc.abstractmethod
    def pairs(self) -> Tensor:
        r""":math:`\sum_{ij} J_{ij} (A_{ij} + \mu_i\cdot\mu_j)` (...)."""

    @abc.abstractmethod
    def apply(self, state: Tensor) -> Tensor:
        """A times a state (..., N, p), zero at absent sites."""

    @abc.abstractmethod
    def relax(self, right: Tensor) -> Tensor:
        r""":math:`P^{-1}` times (..., N, p), :math:`P = A\circ(A + 2\mu\mu^{\mathsf T})`.

        With one shared tau, :math:`1 / \sum_{ij} P_{ij}` in the place of every entry.
        """


class Saddle(abc.ABC):
    """A solved saddle point: values without a graph, and the ways to attach one.

    The differentiable inputs are always couplings, in one or two tensors, their scale, and b.
    """

    solution: Solution
    value: Tensor  # Phi (...)
    log_det: Tensor  # (...)
    broken: Tensor  # (...) bool
    mask: Tensor | None
    shared: bool  # one tau for all sites

    @abc.abstractmethod
    def mean(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """mu, and what :meth:`completed` makes A of, with their derivatives in closed form; None
        where A has none."""

    def completed(self, inverse: Tensor) -> Tensor:
        """A (..., N, N), with anything at absent sites."""
        return inverse

    @abc.abstractmethod
    def minimum(self, *inputs: Tensor) -> Tensor:
        """Phi with its derivative."""

    @abc.abstractmethod
    def attach(self, *inputs: Tensor) -> Response:
        """Everything else, differentiable to any order."""


class DenseSaddle(Saddle):
    """Couplings as a matrix: the inputs are (J, scale, b), with K = scale * J."""

    inverse_at_hand: bool  # whether the solver has left A behind

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
        self,
        couplings: Tensor,
        scale: Tensor,
        b: Tensor,
        grad: Tensor,
        inverse_grad: Tensor | None,
        needed: list[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """First derivatives of ``(grad * mu).sum() + (inverse_grad * A).sum()`` in J, scale and b,
        in closed form. ``inverse_grad`` is zero at absent sites, or None for zero."""

    @abc.abstractmethod
    def curvature(self, inverse: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        r"""log det of :math:`P = A \circ (A + 2\mu\mu^{\mathsf T})` over the tau that there are,
        and the inverse of P, for :meth:`relax`. Differentiable."""

    @abc.abstractmethod
    def relax(self, inverse_curvature: Tensor, right: Tensor) -> Tensor:
        """P^{-1} right, (..., N, p)."""

    @abc.abstractmethod
    def _tau(self, k: Tensor, b: Tensor) -> Tensor:
        """tau of every site (..., N) with its implicit derivative in K and b."""

    @property
    def present(self) -> Tensor | None:
        return None if self.mask is None else ~self.mask

    def attach(self, *inputs: Tensor) -> DenseResponse:
        return DenseResponse(self, *inputs)

    def matrices(self, couplings: Tensor, scale: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """(V, A, mu), differentiable to any order."""
        dtype = self.value.dtype
        k = scale.to(dtype)[..., None, None] * couplings.to(dtype)
        k = (k + k.mT) / 2
        b = b.to(dtype)
        if bool(self.broken.any()):
            k = torch.where(self.broken[..., None, None], 0.0, k)
            b = torch.where(self.broken[..., None, None], 0.0, b)
        v = torch.diag_embed(self._tau(k, b)) - k
        inverse = known_inverse(v, self.inverse)
        return v, inverse, inverse @ b

    def mean(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        # One backward pass serves both, and costs nothing for one that is not used.
        mu, inverse = _Response.apply(self, *inputs)
        return mu, inverse

    def completed(self, inverse: Tensor) -> Tensor:
        if self.inverse_at_hand:
            return inverse
        value: Tensor = _Carried.apply(inverse, self.inverse)
        return value

    def minimum(self, *inputs: Tensor) -> Tensor:
        value: Tensor = _Minimum.apply(self, *inputs)
        return value


class SiteSaddle(DenseSaddle):
    """One tau a site."""

    inverse_at_hand, shared = True, False

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

    def _adjoint(self, right: Tensor) -> Tensor:
        """P^{-1} right (..., N), without a graph."""
        if right.shape[-1] >= ITERATIVE_SITES and "_factor" not in vars(self):
            tolerance = 100 * torch.finfo(right.dtype).eps
            hessian = cone_hessian(self.inverse, self.response)
            found = iterative_solve(hessian, right, tolerance)
            if found is not None:
                return found
            self._factor = positive_factor(hessian)
        return torch.cholesky_solve(right[..., None], self._factor)[..., 0]

    def cotangents(
        self,
        couplings: Tensor,
        scale: Tensor,
        b: Tensor,
        grad: Tensor,
        inverse_grad: Tensor | None,
        needed: list[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        # mu = A b and A_ii + |mu_i|^2 = 1; w is the multiplier of the constraint.
        inverse, mu = self.inverse, self.response
        direct = inverse @ grad
        slope = -(direct * mu).sum(-1, keepdim=True)
        product = None
        if inverse_grad is not None:
            # G, of which only the symmetric part counts; dA = A dK A - A dtau A.
            product = inverse @ inverse_grad
            diagonal = (product * inverse).sum(-1, keepdim=True)  # of A G A
            slope = slope - diagonal
        w = self._adjoint(slope[..., 0])[..., None]
        b_bar = torch.addcmul(direct, inverse @ (w * mu), torch.full_like(w, 2.0))
        couplings_bar = scale_bar = None
        k = scale.to(grad.dtype)[..., None, None]
        if needed[0]:
            couplings_bar = _sum_outer(k * b_bar, mu, couplings)
            left = inverse * (k * w).mT
            if product is not None:
                left = left.addcmul_(k, product)
            couplings_bar += _sum_outer(left, inverse, couplings)
            couplings_bar = _symmetric_part(couplings_bar)
        if needed[1]:
            # sum_ij J_ij dL/dK_ij, from K mu = tau mu - b and (A K A)_ii = (A^2 tau)_i - A_ii
            tau = torch.where(self.broken[..., None], 1.0, self.solution.value)[..., None]
            own = inverse.diagonal(dim1=-2, dim2=-1)
            turned = (tau.mT @ inverse.square())[..., 0, :] - own
            scale_bar = (b_bar * (tau * mu - b)).sum((-2, -1)) + (w[..., 0] * turned).sum(-1)
            if inverse_grad is not None:
                scale_bar += (tau * diagonal).sum((-2, -1)) - (inverse_grad * inverse).sum((-2, -1))
            scale_bar = scale_bar / scale
        return couplings_bar, scale_bar, b_bar

    def curvature(self, inverse: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        p = inverse * (inverse + 2 * response @ response.mT)
        factor = positive_factor(p.detach())
        value = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        p_inverse = known_inverse(p, torch.cholesky_inverse(factor))
        log_det = known_log_det(p, p_inverse, value)
        return log_det, p_inverse

    def relax(self, inverse_curvature: Tensor, right: Tensor) -> Tensor:
        return inverse_curvature @ right

    def _tau(self, k: Tensor, b: Tensor) -> Tensor:
        stored = self.inverse

        def residual(tau: Tensor, k: Tensor, b: Tensor) -> Tensor:
            inverse = known_inverse(torch.diag_embed(tau) - k, stored)
            return inverse.diagonal(dim1=-2, dim2=-1) + (inverse @ b).square().sum(-1) - 1

        def adjoint(_vjp: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
            # The Jacobian is -P, at every order.
            return -self._adjoint(right)

        tau = torch.where(self.broken[..., None], 1.0, self.solution.value)
        return implicit(tau, residual, (k, b), adjoint)


class SharedSaddle(DenseSaddle):
    """One tau for all sites, in the eigenbasis of J."""

    inverse_at_hand, shared = False, True

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
        self,
        couplings: Tensor,
        scale: Tensor,
        b: Tensor,
        grad: Tensor,
        inverse_grad: Tensor | None,
        needed: list[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        minimum = self._minimum
        gaps = minimum.gaps[..., None]
        image = minimum.rotated / gaps  # mu in the eigenbasis
        direct = rotate(minimum.vectors.mT, grad) / gaps
        slope = -(direct * image).sum((-2, -1))
        product = inverse = None
        if inverse_grad is not None:
            # G, of which only the symmetric part counts; dA = A dK A - dtau A A.
            inverse = clear(self.inverse, self.mask)
            product = inverse @ inverse_grad
            trace = (product * inverse).sum((-2, -1))  # of A G A
            slope = slope - trace
        w = slope / self._curvature.clamp_min(torch.finfo(grad.dtype).tiny)
        w = w[..., None, None]
        turned = direct + 2 * w * image / gaps  # the cotangent of b in the eigenbasis
        b_bar = self._here(rotate(minimum.vectors, turned))
        k = scale.to(grad.dtype)[..., None, None]
        couplings_bar = scale_bar = None
        if needed[0]:
            couplings_bar = _sum_outer(k * b_bar, self.response, couplings)
            if product is None or inverse is None:
                spectrum = (k * w / gaps.square())[..., 0]
                spectrum = spectrum.sum_to_size(*minimum.vectors.shape[:-1])
                couplings_bar += (minimum.vectors * spectrum[..., None, :]) @ minimum.vectors.mT
            else:
                left = (k * w * inverse).addcmul_(k, product)
                couplings_bar += _sum_outer(left, inverse, couplings)
            couplings_bar = _symmetric_part(couplings_bar)
        if needed[1]:
            tau = torch.where(self.broken, 1.0, self.solution.value)
            levels = tau[..., None, None] - gaps  # eigenvalues of K
            scale_bar = (levels * turned * image).sum((-2, -1))
            # An absent site has eigenvalue zero and no share in this.
            scale_bar += (levels * w / gaps.square()).sum((-2, -1))
            if inverse_grad is not None and inverse is not None:
                # A K A = tau A A - A
                scale_bar += tau * trace - (inverse_grad * inverse).sum((-2, -1))
            scale_bar = scale_bar / scale
        return couplings_bar, scale_bar, b_bar

    def curvature(self, inverse: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        inverse = clear(inverse, self.mask)
        number = self._minimum.count.clamp_min(1)
        total = (inverse * (inverse + 2 * response @ response.mT)).sum((-2, -1))
        # Without a present site there is nothing to average.
        total = torch.where(self._minimum.count > 0, total, number)
        return (total / number).log(), 1 / total

    def relax(self, inverse_curvature: Tensor, right: Tensor) -> Tensor:
        sums = right.sum(-2, keepdim=True)
        return (inverse_curvature[..., None, None] * sums).expand_as(right)

    def _tau(self, k: Tensor, b: Tensor) -> Tensor:
        stored, minimum = self.inverse, self._minimum
        number = minimum.count.clamp_min(1)
        jacobian = -self._curvature / number

        def spread(tau: Tensor) -> Tensor:
            every = tau[..., None].expand(k.shape[:-1])
            return every if self.mask is None else torch.where(self.mask, 1.0, every)

        def residual(tau: Tensor, k: Tensor, b: Tensor) -> Tensor:
            inverse = known_inverse(torch.diag_embed(spread(tau)) - k, stored)
            own = inverse.diagonal(dim1=-2, dim2=-1)
            if self.mask is not None:
                own = own.masked_fill(self.mask, 0.0)
            return (own + (inverse @ b).square().sum(-1)).sum(-1) / number - 1

        def adjoint(_vjp: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
            return torch.where(jacobian < 0, right / jacobian, 0.0)

        tau = torch.where(self.broken, 1.0, self.solution.value)
        return spread(implicit(tau, residual, (k, b), adjoint))


class DenseResponse(Response):
    """A and mu as matrices."""

    def __init__(self, saddle: DenseSaddle, couplings: Tensor, scale: Tensor, b: Tensor) -> None:
        self._saddle, self._couplings = saddle, couplings
        self._v, self._inverse, self.mu = saddle.matrices(couplings, scale, b)

    @cached_property
    def inverse(self) -> Tensor:
        return clear(self._inverse, self._saddle.mask)

    @property
    def own(self) -> Tensor:
        return self.inverse.diagonal(dim1=-2, dim2=-1)

    @property
    def log_det(self) -> Tensor:
        value = known_log_det(self._v, self._inverse, self._saddle.log_det)
        return value

    @property
    def pairs(self) -> Tensor:
        return (self._couplings * (self.inverse + self.mu @ self.mu.mT)).sum((-2, -1))

    def apply(self, state: Tensor) -> Tensor:
        return self.inverse @ state

    def relax(self, right: Tensor) -> Tensor:
        return self._saddle.relax(self._curvature, right)

    @cached_property
    def _curvature(self) -> Tensor:
        return self._saddle.curvature(self._inverse, self.mu)[1]


def _sum_outer(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
    """left @ right^T, summed over the systems that share the couplings ``like``."""
    if like.ndim == 2 and left.ndim > 2:
        return left.movedim(-2, 0).flatten(1) @ right.movedim(-2, 0).flatten(1).mT
    return (left @ right.mT).sum_to_size(*like.shape)


def _symmetric_part(matrix: Tensor) -> Tensor:
    """In the place of the matrix."""
    flat = matrix.view(matrix.shape[:-2].numel(), *matrix.shape[-2:])
    add_transpose(flat, flat).div_(2)
    return matrix


def clear(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """The matrix without the rows and columns of absent sites."""
    if mask is None:
        return matrix
    return matrix.masked_fill(mask[..., None, :] | mask[..., :, None], 0.0)


class _Response(torch.autograd.Function):
    """(mu, A) of (J, scale, b): closed-form first derivatives, a graph where more are asked for."""

    @staticmethod
    def forward(
        ctx: Any, saddle: DenseSaddle, couplings: Tensor, scale: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.saddle = saddle
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(couplings, scale, b)
        if saddle.inverse_at_hand:
            # Without a copy: nobody writes into it.
            inverse = saddle.inverse.detach().to(b.dtype)
        else:
            # Zero, with the derivative of A: not everyone who asks for mu asks for A.
            inverse = b.new_zeros(()).expand(*b.shape[:-1], b.shape[-2])
        return saddle.response.to(b.dtype, copy=True), inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saddle, arguments = ctx.saddle, ctx.saved_tensors
        needed = list(ctx.needs_input_grad[1:])
        mean_grad, inverse_grad = grads
        if bool(saddle.broken.any()):
            broken = saddle.broken[..., None, None]
            mean_grad, inverse_grad = (
                None if grad is None else torch.where(broken, 0.0, grad) for grad in grads
            )
        if torch.is_grad_enabled():
            # New names: a dependence of one argument on another is not ours to follow.
            names = [x.view_as(x) for x in arguments]
            _, inverse, mu = saddle.matrices(*names)
            return None, *_gradients((mu, inverse), names, needed, (mean_grad, inverse_grad))
        dtype = saddle.value.dtype
        couplings, scale, b = arguments
        mean_grad = torch.zeros_like(b) if mean_grad is None else mean_grad
        inverse_grad = None if inverse_grad is None else inverse_grad.to(dtype)
        found = saddle.cotangents(couplings, scale, b, mean_grad.to(dtype), inverse_grad, needed)
        return None, *(
            None if bar is None or not need else bar.to(x.dtype)
            for bar, need, x in zip(found, needed, arguments, strict=True)
        )


class _Carried(torch.autograd.Function):
    """A value whose derivative another tensor has."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, value: Tensor) -> Tensor:
        return value.detach().to(carrier.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Minimum(torch.autograd.Function):
    """Phi of (J, scale, b): by the envelope theorem its derivatives hold tau fixed."""

    @staticmethod
    def forward(
        ctx: Any, saddle: DenseSaddle, couplings: Tensor, scale: Tensor, b: Tensor
    ) -> Tensor:
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
            _, inverse, mu = saddle.matrices(couplings, scale, b)
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
    outputs: tuple[Tensor, ...],
    inputs: list[Tensor],
    needed: list[bool],
    grads: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Derivatives, with a graph, in those of the inputs that need one."""
    given = [
        (out, grad.to(out.dtype))
        for out, grad in zip(outputs, grads, strict=True)
        if grad is not None
    ]
    if not given:
        return [None for _ in inputs]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    derivatives = torch.autograd.grad(
        [out for out, _ in given],
        wanted,
        [grad for _, grad in given],
        create_graph=True,
        allow_unused=True,
    )
    found = iter(derivatives)
    return [next(found) if need else None for need in needed]
