r"""Special functions of one spin on a sphere in D dimensions.

With :math:`\nu = D/2 - 1` and the normalized uniform measure on the unit sphere,

.. math::
    z_D(\kappa) = \int \mathrm d\Omega\, e^{\kappa\, u\cdot e}
        = \Gamma(D/2)\,(2/\kappa)^\nu I_\nu(\kappa), \qquad
    A_D(\kappa) = (\log z_D)' = I_{\nu+1}(\kappa) / I_\nu(\kappa).

One route serves every D and every :math:`\kappa \ge 0`, with no switch points:

1. Raise the order to :math:`\mu = \nu + n \ge \mu_0`, where Debye's uniform expansion has converged
   to rounding for *all* arguments. With :math:`p = (1 + (\kappa/\mu)^2)^{-1/2}`,
   :math:`s = \sqrt{1 - p^2}`, the ratio is :math:`r_\mu = s\,g(p)` with

   .. math:: g(p) = \frac1{1+p} - p\,\frac{W(p)}{U(p)},\qquad
             U = \sum_{k\ge0} \frac{u_k(p)}{\mu^k},\quad
             W = \sum_{k\ge1} \frac{\tfrac12 u_{k-1}(p) + p\,u_{k-1}'(p)}{\mu^k},

   where W comes from the identity :math:`v_k - u_k = p(p^2-1)(\tfrac12 u_{k-1} + p u_{k-1}')`
   between the two Debye families, so that nothing cancels at small or large :math:`\kappa`.
2. Come down by :math:`r_{v-1} = \kappa / (2v + \kappa r_v)`, which damps errors, and
   :math:`\log z_{2v} - \log z_{2v+2} = \log(1 + \kappa r_v / 2v)`, whose terms are all positive.

Everything is a smooth function of :math:`x = \kappa^2`, also at zero field, and is stored so: the
log-normalizer, the reduced ratio :math:`a(x) = A_D / \kappa` and the slope
:math:`F(x) = A_D'(\kappa)`. Their derivatives follow from the same two steps, differentiated term
by term; the textbook formula :math:`A' = 1 - A^2 - (D-1)A/\kappa` loses every digit at large
:math:`\kappa`. In float64 the relative error is a few units of rounding for D = 2 ... 4096 and
:math:`\kappa` = 0 ... 1e10, in float32 below 1e-6; half precisions are computed in float32.
Derivatives exist to the fourth order of a (fifth of the log-normalizer); beyond it
``NotImplementedError`` is raised.

Sources: NIST Digital Library of Mathematical Functions, sections 10.29 and 10.41 (recurrences,
uniform expansions and their polynomials); Banerjee et al. 2005, JMLR 6, 1345 (first guess of the
inverse).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "bessel_ratio",
    "bessel_ratio_derivative",
    "inverse_reduced_ratio",
    "log_normalizer",
    "log_normalizer_squared",
    "reduced_jet",
    "reduced_ratio",
    "reduced_ratio_derivative",
    "reduced_slope",
]

# From this order the uniform expansion, with at most so many terms, reaches a dtype's rounding.
_LOWEST_ORDER = {torch.float64: 24.0, torch.float32: 10.0}
_MAX_TERMS = {torch.float64: 14, torch.float32: 8}
# Highest derivatives of a and of F.
_HIGHEST, _HIGHEST_SLOPE = 4, 2


def bessel_ratio(kappa: Tensor, dim: int) -> Tensor:
    r"""Mean alignment of a spin with its field, :math:`A_D(\kappa) = I_{D/2}/I_{D/2-1}`.

    Args:
        kappa: non-negative field :math:`\beta R |h|`, any shape.
        dim: D >= 1.
    """
    return _Ratio.apply(kappa, _check_dim(dim))  # type: ignore[no-any-return]


def bessel_ratio_derivative(kappa: Tensor, dim: int) -> Tensor:
    r""":math:`A_D'(\kappa) = 1 - A^2 - (D-1) A / \kappa`, the longitudinal response, without the
    cancellation of that formula. Arguments as in :func:`bessel_ratio`."""
    return reduced_slope(_square(kappa), dim).to(kappa.dtype)


def log_normalizer(kappa: Tensor, dim: int) -> Tensor:
    r""":math:`\log z_D(\kappa)`, zero at :math:`\kappa = 0`; its derivative is
    :func:`bessel_ratio`. Arguments as there."""
    return _LogNormalizer.apply(kappa, _check_dim(dim))  # type: ignore[no-any-return]


def reduced_ratio(x: Tensor, dim: int) -> Tensor:
    r""":math:`a(x) = A_D(\sqrt x)/\sqrt x`, smooth at zero, where it is 1 / D.

    The magnetization of a spin is :math:`R^2 a(R^2 |b|^2)\, b` with no division by :math:`|b|`.
    """
    return _Reduced.apply(x, _check_dim(dim), 0)  # type: ignore[no-any-return]


def reduced_ratio_derivative(x: Tensor, dim: int) -> Tensor:
    r""":math:`a'(x)`, smooth at zero, where it is -1 / D^2 (D + 2)."""
    return _Reduced.apply(x, _check_dim(dim), 1)  # type: ignore[no-any-return]


def log_normalizer_squared(x: Tensor, dim: int) -> Tensor:
    r""":math:`\log z_D(\sqrt x)`, smooth at zero; its derivative is half of
    :func:`reduced_ratio`."""
    return _LogNormalizerSquared.apply(x, _check_dim(dim))  # type: ignore[no-any-return]


def reduced_slope(x: Tensor, dim: int) -> Tensor:
    r""":math:`F(x) = A_D'(\sqrt x)`, smooth at zero, where it is 1 / D."""
    return _Slope.apply(x, _check_dim(dim), 0)  # type: ignore[no-any-return]


def reduced_jet(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r""":math:`a(x), a'(x), a''(x)` and :math:`F(x)` for about the price of one of them.

    At zero :math:`a'' = 4 / D^3 (D+2)(D+4)`.
    """
    return _Jet.apply(x, _check_dim(dim))  # type: ignore[no-any-return]


def inverse_reduced_ratio(y: Tensor, dim: int) -> Tensor:
    r""":math:`\kappa / r` where :math:`A_D(\kappa) = r`, as a smooth function of :math:`y = r^2`.

    It is D at zero and diverges as :math:`(D-1)/2(1-r)` for :math:`r \to 1`; ``y`` outside
    [0, 1) gives NaN. Newton steps from the guess r (D - r^2) / (1 - r^2).
    """
    return _Inverse.apply(y, _check_dim(dim))  # type: ignore[no-any-return]


def _square(kappa: Tensor) -> Tensor:
    """kappa^2, which has no room in half precision."""
    wide = kappa if kappa.dtype in _LOWEST_ORDER else kappa.float()
    return wide * wide


def _check_dim(dim: int) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
        raise ValueError(f"dim={dim!r}: the spin dimension must be an integer >= 1")
    return dim


# --- the two steps ------------------------------------------------------------------------------


def _evaluate(
    x: Tensor, dim: int, order: int, *, slope: int = -1, log: bool = False
) -> tuple[list[Tensor], ...]:
    """Derivatives 0 ... order in x of a, 0 ... slope <= order of F, and the log-normalizer."""
    dtype = x.dtype
    work = x if dtype in _LOWEST_ORDER else x.float()
    if order >= 2 and work.dtype == torch.float32:
        # Every derivative takes an order of digits from what the expansion has left.
        work = work.double()
    nu = dim / 2 - 1
    target = work.dtype
    steps = max(0, math.ceil(_LOWEST_ORDER[target] - nu))
    if target == torch.float32 and steps and (order or slope >= 0):
        # Coming down by n orders multiplies a slope's rounding by (2 nu + 2n + 1) / (2 nu + 1), too
        # much for float32 in few dimensions. The ratio's own error is damped.
        work = work.double()
    a, f, log_z = _uniform(work, nu + steps, target, order, slope, log)
    for step in range(steps, 0, -1):
        v = nu + step
        if log:
            log_z = log_z + torch.log1p(work * a[0] / (2 * v))
        a, f = _lower(work, v, a, f)
    if (
        dim == 1 and slope >= 0
    ):  # 1 - tanh^2 is exponentially small, which no recurrence of algebraic terms keeps
        decay = torch.exp(-work.sqrt())
        f = [(2 * decay / (1 + decay * decay)) ** 2]
        if slope >= 1:  # F' = -F a
            f.append(-f[0] * a[0])
        if slope >= 2:
            f.append(-f[1] * a[0] - f[0] * a[1])
    outputs = (a, f, [log_z])
    return tuple([term.to(dtype) for term in terms] for terms in outputs)


def _uniform(
    x: Tensor, mu: float, target: torch.dtype, order: int, slope: int, log: bool
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """a, F and log z at order mu by Debye's expansion, to the rounding of ``target``."""
    u_poly, w_poly, u_slope, u_one = _debye(mu, target)
    q = torch.sqrt(1 + x / mu**2)
    p = 1 / q
    jets = max(order + 1, slope + 2)  # derivatives of g
    u = [_polynomial(poly, p) for poly in _derivatives(u_poly, jets)]
    w = [_polynomial(poly, p) for poly in _derivatives(w_poly, jets)]
    # Taylor jets of h = p W / U and of 1 / (1 + p).
    numerator = [p * w[k] + k * w[k - 1] if k else p * w[0] for k in range(jets)]
    h = _quotient(numerator, u)
    g = [math.factorial(k) * (-1) ** k / (1 + p) ** (k + 1) - h[k] for k in range(jets)]

    c = -1 / (2 * mu**2)  # dp/dx = c p^3
    p2 = p * p
    m = [p * g[0]] + [k * g[k - 1] + p * g[k] for k in range(1, order + 1)]  # of p g(p)
    a = [term / mu for term in _chain(m, c, p)]
    f: list[Tensor] = []
    if slope >= 0:  # of p^2 (p g - (1 - p^2) g')
        one_minus = x * p2 / mu**2
        n = [p2 * (p * g[0] - one_minus * g[1])]
        if slope >= 1:
            n.append(3 * p2 * g[0] + (5 * p2 - 2) * p * g[1] - p2 * one_minus * g[2])
        if slope >= 2:
            n.append(
                6 * p * g[0]
                + (18 * p2 - 2) * g[1]
                + (9 * p2 - 4) * p * g[2]
                - p2 * one_minus * g[3]
            )
        f = [term / mu for term in _chain(n, c, p)]

    log_z = x
    if log:
        e = x / mu**2 / (1 + q)  # q - 1
        correction = -e * p * _polynomial(u_slope, p) / u_one  # U(p) / U(1) - 1
        log_z = mu * (e - torch.log1p(e / 2)) - torch.log1p(e) / 2 + torch.log1p(correction)
    return a, f, log_z


def _chain(terms: list[Tensor], c: float, p: Tensor) -> list[Tensor]:
    """Derivatives in x from derivatives in p, where dp/dx = c p^3.

    d^n/dx^n = c^n p^(2n) sum_k t(n, k) p^k d^k/dp^k, t(n+1, k) = (2n + k) t(n, k) + t(n, k-1).
    """
    results = [terms[0]]
    weights = [1]  # t(n, k) for k = 1 ... n; t(1, 1) = 1
    for n in range(1, len(terms)):
        total = weights[-1] * terms[n]
        for k in range(n - 1, 0, -1):
            total = weights[k - 1] * terms[k] + p * total
        results.append(c**n * p ** (2 * n + 1) * total)
        lifted = [(2 * n + k) * weight for k, weight in enumerate(weights, 1)] + [0]
        weights = [a + b for a, b in zip(lifted, [0, *weights], strict=True)]
    return results


def _lower(
    x: Tensor, v: float, a: list[Tensor], f: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """From order v to order v - 1: a -> 1 / (2v + x a), F -> (2v - x F) / (2v + x a)^2."""
    order = len(a) - 1
    den = [2 * v + x * a[0]] + [k * a[k - 1] + x * a[k] for k in range(1, order + 1)]
    inverse = [1 / den[0]]
    for k in range(1, order + 1):  # Leibniz' rule for inverse * den = 1
        total = inverse[0] * den[k]
        for j in range(1, k):
            total = total + math.comb(k, j) * inverse[j] * den[k - j]
        inverse.append(-inverse[0] * total)
    lowered: list[Tensor] = []
    if len(f) == 1:
        lowered = [(2 * v - x * f[0]) * inverse[0] ** 2]
    elif f:
        n = [2 * v - x * f[0]] + [-k * f[k - 1] - x * f[k] for k in range(1, len(f))]
        lowered = _quotient(_quotient(n, den), den)
    return inverse, lowered


def _quotient(numerator: list[Tensor], denominator: list[Tensor]) -> list[Tensor]:
    """Derivatives of a quotient from those of its parts, by Leibniz' rule."""
    result: list[Tensor] = []
    for k, value in enumerate(numerator):
        for j in range(k):
            value = value - math.comb(k, j) * result[j] * denominator[k - j]
        result.append(value / denominator[0])
    return result


# --- Debye's polynomials ------------------------------------------------------------------------

_Polynomial = tuple[float, ...]


@functools.lru_cache(maxsize=1)
def _debye_polynomials() -> list[list[Fraction]]:
    """u_k(p) as coefficient lists, by the recurrence (10.41.9) of the NIST library."""
    polynomials = [[Fraction(1)]]
    for _ in range(max(_MAX_TERMS.values())):
        u = polynomials[-1]
        new = [Fraction(0)] * (len(u) + 3)
        for j, coefficient in enumerate(u):
            if j:
                new[j + 1] += coefficient * j / 2
                new[j + 3] -= coefficient * j / 2
            new[j + 1] += coefficient / (8 * (j + 1))
            new[j + 3] -= 5 * coefficient / (8 * (j + 3))
        polynomials.append(new)
    return polynomials


@functools.lru_cache(maxsize=256)
def _debye(mu: float, dtype: torch.dtype) -> tuple[_Polynomial, _Polynomial, _Polynomial, float]:
    """U(p), W(p), (U(p) - U(1)) / (p - 1) and U(1) of one order, as polynomials in p."""
    eps = torch.finfo(dtype).eps
    exact = Fraction(mu)
    polynomials = _debye_polynomials()
    terms = 1
    while terms < _MAX_TERMS[dtype] and _size(polynomials[terms], exact, terms) > eps / 8:
        terms += 1
    u_sum = [Fraction(0)] * (3 * terms + 1)
    w_sum = [Fraction(0)] * (3 * terms + 1)
    for k in range(terms + 1):
        for j, coefficient in enumerate(polynomials[k]):
            u_sum[j] += coefficient / exact**k
            if k < terms:
                w_sum[j] += coefficient * (Fraction(1, 2) + j) / exact ** (k + 1)
    quotient: list[Fraction] = []  # synthetic division by p - 1
    for coefficient in reversed(u_sum[1:]):
        quotient.append(coefficient + (quotient[-1] if quotient else 0))
    return (
        _trimmed(u_sum, eps),
        _trimmed(w_sum, eps),
        _trimmed(quotient[::-1], eps),
        float(sum(u_sum)),
    )


def _size(polynomial: Sequence[Fraction], mu: Fraction, k: int) -> float:
    """Largest |u_k(p)| / mu^k over 0 <= p <= 1, on a grid."""
    points = [Fraction(i, 16) for i in range(1, 17)]
    values = [abs(float(sum(c * p**j for j, c in enumerate(polynomial)))) for p in points]
    return max(values) / float(mu) ** k


def _trimmed(polynomial: Sequence[Fraction], eps: float) -> _Polynomial:
    """Floats without the highest coefficients that cannot move the last digit on [0, 1]."""
    values = [float(coefficient) for coefficient in polynomial]
    scale = max(abs(value) for value in values)
    dropped = 0.0
    while len(values) > 1 and dropped + abs(values[-1]) < eps / 64 * scale:
        dropped += abs(values.pop())
    return tuple(values)


@functools.lru_cache(maxsize=1024)
def _derivatives(polynomial: _Polynomial, count: int) -> tuple[_Polynomial, ...]:
    rows = [polynomial]
    for _ in range(count - 1):
        rows.append(tuple(j * c for j, c in enumerate(rows[-1]))[1:] or (0.0,))
    return tuple(rows)


def _polynomial(coefficients: _Polynomial, p: Tensor) -> Tensor:
    result = torch.full_like(p, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result.mul_(p).add_(coefficient)
    return result


# --- as differentiable functions ----------------------------------------------------------------


class _Reduced(torch.autograd.Function):
    """Derivative number ``order`` of a(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, order: int) -> Tensor:
        if order > _HIGHEST:
            raise NotImplementedError("derivatives of the Bessel ratio exist to the fourth order")
        ctx.dim, ctx.order = dim, order
        # An implicit layer calls backward in every iteration of its adjoint: the derivative is
        # computed here, once, unless it is to be differentiated itself.
        ahead = order + 1 if ctx.needs_input_grad[0] and order < _HIGHEST else order
        terms = _evaluate(x, dim, ahead)[0]
        ctx.save_for_backward(x, terms[ahead])
        return terms[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, slope = ctx.saved_tensors
        if torch.is_grad_enabled() or ctx.order == _HIGHEST:
            slope = _Reduced.apply(x, ctx.dim, ctx.order + 1)
        return grad * slope, None, None


class _Slope(torch.autograd.Function):
    """Derivative number ``order`` of F(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, order: int) -> Tensor:
        if order > _HIGHEST_SLOPE:
            raise NotImplementedError("derivatives of the Bessel slope exist to the second order")
        ctx.dim, ctx.order = dim, order
        ahead = order + 1 if ctx.needs_input_grad[0] and order < _HIGHEST_SLOPE else order
        terms = _evaluate(x, dim, ahead, slope=ahead)[1]
        ctx.save_for_backward(x, terms[ahead])
        return terms[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, slope = ctx.saved_tensors
        if torch.is_grad_enabled() or ctx.order == _HIGHEST_SLOPE:
            slope = _Slope.apply(x, ctx.dim, ctx.order + 1)
        return grad * slope, None, None


class _Jet(torch.autograd.Function):
    """a, a', a'' and F."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.dim = dim
        ahead = int(ctx.needs_input_grad[0])  # as in _Reduced
        a, f, _ = _evaluate(x, dim, 2 + ahead, slope=ahead)
        ctx.save_for_backward(x, a[1], a[2], a[-1], f[-1])
        return a[0], a[1], a[2], f[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, *slopes = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The saved a' and a'' are outputs, with a graph; the other two have none yet.
            slopes[2] = _Reduced.apply(x, ctx.dim, 3)
            slopes[3] = _Slope.apply(x, ctx.dim, 1)
        total = grads[0] * slopes[0]
        for grad, slope in zip(grads[1:], slopes[1:], strict=True):
            total = total + grad * slope
        return total, None


class _LogNormalizerSquared(torch.autograd.Function):
    """log z as a function of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(x)
        return _evaluate(x, dim, 0, log=True)[2][0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * _Reduced.apply(x, ctx.dim, 0) / 2, None


class _LogNormalizer(torch.autograd.Function):
    """log z as a function of kappa: its second derivative keeps the digits of A'."""

    @staticmethod
    def forward(ctx: Any, kappa: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(kappa)
        return _evaluate(_square(kappa), dim, 0, log=True)[2][0].to(kappa.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (kappa,) = ctx.saved_tensors
        return grad * _Ratio.apply(kappa, ctx.dim), None


class _Ratio(torch.autograd.Function):
    """A as a function of kappa."""

    @staticmethod
    def forward(ctx: Any, kappa: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(kappa)
        return (kappa * _evaluate(_square(kappa), dim, 0)[0][0]).to(kappa.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (kappa,) = ctx.saved_tensors
        return grad * bessel_ratio_derivative(kappa, ctx.dim), None


class _Inverse(torch.autograd.Function):
    """c(y) = kappa / r; dc/dy = -a'(x) c^3 / F(x) at x = y c^2."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        work = y if y.dtype in _LOWEST_ORDER else y.float()
        c = _solve_inverse(work, dim).to(y.dtype)
        ctx.save_for_backward(y, c)
        return c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, c = ctx.saved_tensors
        x = y * c * c
        slope = _Reduced.apply(x, ctx.dim, 1)
        return -grad * slope * c**3 / _Slope.apply(x, ctx.dim, 0), None


def _solve_inverse(y: Tensor, dim: int) -> Tensor:
    r = y.sqrt()
    # Newton for c, kappa = r c: A is concave and increasing, so that after the first step the
    # iteration comes from below and converges quadratically; eight steps reach rounding from the
    # guess, whose relative error is below 1 / 3 for every D >= 2 and r.
    c = (dim - y) / (1 - y) if dim > 1 else torch.atanh(r) / r
    for _ in range(8):
        x = y * c * c
        (a,), (slope,), _ = _evaluate(x, dim, 0, slope=0)
        step = (1 - c * a) / slope  # (r - A) / (r A')
        c = torch.maximum(c + step, c / 4)
    inside = (y >= 0) & (y < 1)
    c = torch.where(r > 0, c, torch.full_like(c, float(dim)))
    return torch.where(inside, c, torch.full_like(c, math.nan))
