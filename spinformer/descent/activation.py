r"""Monotone activations as proximal maps.

Let :math:`\sigma` be non-decreasing and continuous, :math:`\tilde\sigma` its (convex)
antiderivative and :math:`\tilde\sigma^*(z) = \sup_x (z x - \tilde\sigma(x))` the conjugate of that.
Then

.. math::
    \sigma(y) = \operatorname*{argmin}_z\; \tilde\sigma^*(z) - z y
              = \operatorname*{argmin}_z\; \eta(z) + \tfrac12 (z - y)^2, \qquad
    \eta(z) = \tilde\sigma^*(z) - \tfrac12 z^2 ,

the proximal map of the penalty :math:`\eta`, which is infinite outside the range of
:math:`\sigma`. It is convex if and only if no slope of :math:`\sigma` exceeds 1 (Moreau 1965); with
slopes up to L it is convex up to :math:`(1 - 1/L) z^2 / 2` (Gribonval & Nikolova 2020).

Conversely a proximal map never decreases: add the two inequalities that say that z minimizes for y
and z' for y', and :math:`(z - z')(y - y') \ge 0` is left. So GELU and SiLU, which fall on the left
of their minimum, are proximal maps of nothing, convex or not. ``"monotone_gelu"`` and
``"monotone_silu"`` are the functions themselves on the right of it, and constant on the left: at
most 0.16997 below GELU and 0.27846 below SiLU, in the limit of large negative x. No proximal map is
closer to either than half of that, since between the two sides of the fall it must not fall. Their
largest slopes, 1.1289 and 1.0998, leave the penalty weakly convex: sizes below 8.75 and 11.0.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spinformer.errors import check_choice
from spinformer.solve.implicit import implicit

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "HardTanh",
    "LeakyReLU",
    "NumericActivation",
    "Sigmoid",
    "SoftThreshold",
    "Softplus",
    "Tanh",
    "as_activation",
    "check_size",
    "diagonal_adjoint",
    "increasing_root",
]

Elementwise = Callable[[Tensor], Tensor]


class Activation(ABC):
    r"""A non-decreasing function :math:`\sigma`, with what makes it a minimization.

    All methods act elementwise, on any shape, and are differentiable twice. A subclass gives the
    function, its antiderivative, the penalty on the closed range, and an inverse.

    Attributes:
        lower: infimum of the range.
        upper: supremum of the range.
        slopes: the least and the largest slope.
        flats: the intervals of slope zero, each as ``(value, left, right)``.
    """

    lower: float = -math.inf
    upper: float = math.inf
    slopes: tuple[float, float] = (0.0, 1.0)
    flats: tuple[tuple[float, float, float], ...] = ()

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        r""":math:`\sigma(x)`."""

    @abstractmethod
    def _antiderivative(self, x: Tensor) -> Tensor:
        """The value alone: its derivative is the function."""

    @abstractmethod
    def _penalty(self, z: Tensor) -> Tensor:
        """eta on the closed range, the value alone: its derivative is the inverse less z."""

    @abstractmethod
    def _inverse(self, z: Tensor) -> Tensor:
        """Some x with sigma(x) = z, for z in the range; anything elsewhere."""

    @property
    def convexity(self) -> float:
        r"""The largest :math:`\mu` for which :math:`\eta - \mu z^2 / 2` is convex.

        ``1 / L - 1``, with L the largest slope: negative where it exceeds 1.
        """
        return 1 / self.slopes[1] - 1 if self.slopes[1] > 0 else math.inf

    def antiderivative(self, x: Tensor) -> Tensor:
        r""":math:`\tilde\sigma(x)`, with the constant that fits :meth:`conjugate`."""
        return _primitive(x, self._antiderivative, self)

    def penalty(self, z: Tensor) -> Tensor:
        r""":math:`\eta(z)`; infinite outside the range, NaN where z is NaN."""
        inside = self._inside(z)
        # What is not used is evaluated at a point of the range, lest it send NaN to the gradient.
        safe = torch.where(inside, z, self._inner)
        outside = torch.where(z.isnan(), z, torch.inf)
        value = _primitive(safe, self._penalty, self._penalty_slope)
        return torch.where(inside, value, outside)

    def conjugate(self, z: Tensor) -> Tensor:
        r""":math:`\tilde\sigma^*(z) = \eta(z) + z^2 / 2`; infinite outside the range."""
        return self.penalty(z) + z.square() / 2

    def inverse(self, z: Tensor, nearest: Tensor | None = None) -> Tensor:
        r"""x with :math:`\sigma(x) = z`, the derivative of the conjugate; NaN outside the range.

        Args:
            z: values.
            nearest: where a whole interval is mapped to z, the x closest to this is taken; None
                leaves the choice open.
        """
        x = torch.where(self._inside(z), self._inverse(z), torch.nan)
        if nearest is not None:
            for value, left, right in self.flats:
                x = torch.where(z == value, nearest.clamp(left, right), x)
        return x

    def prox(self, Y: Tensor, size: float | Tensor = 1.0) -> Tensor:
        r""":math:`\operatorname{argmin}_Z\, size\; \eta(Z) + |Z - Y|^2 / 2`; sigma at size 1.

        In :math:`Z = \sigma(X)` the condition reads :math:`size\, X + (1 - size)\, \sigma(X) = Y`,
        whose left side has slopes between 1 and ``size``: no conjugate is needed, and no step can
        leave the range. Solved by a safeguarded Newton iteration, differentiated implicitly, to any
        order, in Y and in the size.

        Args:
            Y: any shape.
            size: positive, a number or a tensor that broadcasts to ``Y``.

        Raises:
            ValueError: a size that is not positive, or so large that the objective is not strictly
                convex, which happens where ``slopes[1]`` exceeds 1.
        """
        check_size(size, self.convexity)
        return self.map(Y, size)

    def map(self, Y: Tensor, size: float | Tensor) -> Tensor:
        """:meth:`prox` without a look at the size, which is known to be right."""
        if not isinstance(size, Tensor) and size == 1:
            return self(Y)
        return self(self._preimage(Y, size))

    def _preimage(self, Y: Tensor, size: float | Tensor) -> Tensor:
        sizes = torch.as_tensor(size, dtype=Y.dtype, device=Y.device).expand(Y.shape)

        def residual(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
            return s * x + (1 - s) * self(x) - y

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            return residual(x, Y, sizes), sizes + (1 - sizes) * _slope(self, x)

        with torch.no_grad():
            # It rises at least at this rate, so that its root lies within the reach of Y.
            least, largest = self.slopes
            rate = torch.minimum(sizes + (1 - sizes) * least, sizes + (1 - sizes) * largest)
            end = Y - residual(Y, Y, sizes) / rate
            x = increasing_root(both, torch.minimum(Y, end), torch.maximum(Y, end))
        return implicit(x, residual, (Y, sizes), diagonal_adjoint)

    @property
    def _inner(self) -> float:
        """A point inside the range."""
        if math.isinf(self.lower) or math.isinf(self.upper):
            return max(self.lower + 1.0, 1.0) if math.isinf(self.upper) else self.upper - 1.0
        return (self.lower + self.upper) / 2

    def _penalty_slope(self, z: Tensor) -> Tensor:
        return self._inverse(z) - z

    def _inside(self, z: Tensor) -> Tensor:
        return (z >= self.lower) & (z <= self.upper)


class LeakyReLU(Activation):
    """``x``, and ``slope * x`` where negative; the penalty is ``(1 / slope - 1) z^2 / 2`` there.

    With slope 0, the default, it is ReLU, whose penalty is the indicator of ``z >= 0``; with slope
    1 the identity, without a penalty.

    Raises:
        ValueError: a slope outside [0, 1].
    """

    def __init__(self, slope: float = 0.0) -> None:
        if not 0 <= slope <= 1:
            raise ValueError(f"slope={slope!r} must be in [0, 1]: the penalty is not convex")
        self.slope = slope
        self.slopes = (slope, 1.0)
        if slope == 0:
            self.lower = 0.0
            self.flats = ((0.0, -math.inf, 0.0),)

    def __call__(self, x: Tensor) -> Tensor:
        return F.relu(x) if self.slope == 0 else F.leaky_relu(x, self.slope)

    def _antiderivative(self, x: Tensor) -> Tensor:
        return x * self(x) / 2

    def _penalty(self, z: Tensor) -> Tensor:
        return self._penalty_slope(z) * z / 2

    def _inverse(self, z: Tensor) -> Tensor:
        return torch.where(z < 0, z / self.slope, z) if self.slope > 0 else z

    def map(self, Y: Tensor, size: float | Tensor) -> Tensor:
        if self.slope == 0:
            return F.relu(Y)
        # 1 / (1 + size (1 / slope - 1)) without the division by a slope that may be tiny.
        return torch.where(Y < 0, Y * (self.slope / (self.slope + size * (1 - self.slope))), Y)


class SoftThreshold(Activation):
    """``sign(x) max(|x| - threshold, 0)``; the penalty is ``threshold |z|``.

    Raises:
        ValueError: a negative threshold.
    """

    def __init__(self, threshold: float = 1.0) -> None:
        if not threshold >= 0:
            raise ValueError(f"threshold={threshold!r} must not be negative")
        self.threshold = threshold
        self.flats = ((0.0, -threshold, threshold),)

    def __call__(self, x: Tensor) -> Tensor:
        return _shrink(x, self.threshold)

    def _antiderivative(self, x: Tensor) -> Tensor:
        return self(x).square() / 2

    def _penalty(self, z: Tensor) -> Tensor:
        return self.threshold * z.abs()

    def _inverse(self, z: Tensor) -> Tensor:
        return z + self.threshold * z.sign()

    def map(self, Y: Tensor, size: float | Tensor) -> Tensor:
        return _shrink(Y, size * self.threshold)


class HardTanh(Activation):
    """The nearest point of ``[lower, upper]``; the penalty is the indicator of this interval.

    Raises:
        ValueError: unless ``lower < upper``.
    """

    def __init__(self, lower: float = -1.0, upper: float = 1.0) -> None:
        if not lower < upper:
            raise ValueError(f"lower={lower!r} must be below upper={upper!r}")
        self.lower, self.upper = lower, upper
        self.flats = ((lower, -math.inf, lower), (upper, upper, math.inf))

    def __call__(self, x: Tensor) -> Tensor:
        return x.clamp(self.lower, self.upper)

    def _antiderivative(self, x: Tensor) -> Tensor:
        nearest = self(x)
        return nearest * (x - nearest / 2)

    def _penalty(self, z: Tensor) -> Tensor:
        return torch.zeros_like(z)

    def _inverse(self, z: Tensor) -> Tensor:
        return z

    def map(self, Y: Tensor, size: float | Tensor) -> Tensor:
        return self(Y)


class Tanh(Activation):
    r"""tanh; :math:`\tilde\sigma = \log\cosh`, and the conjugate is (up to its sign and a constant)
    the entropy of a spin of mean z.
    """

    lower, upper = -1.0, 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def _antiderivative(self, x: Tensor) -> Tensor:
        # Smallness is not lost: relative to |x| on the right, and x^2 / 2 is worth its eps near 0.
        return _softplus(2 * x) - x - math.log(2)

    def _penalty(self, z: Tensor) -> Tensor:
        entropy = torch.xlogy(1 + z, 1 + z) + torch.xlogy(1 - z, 1 - z)
        return (entropy - z.square()) / 2

    def _inverse(self, z: Tensor) -> Tensor:
        return torch.atanh(z)


class Sigmoid(Activation):
    r""":math:`1 / (1 + e^{-x})`; its antiderivative is softplus, the conjugate the negative entropy
    of a coin.
    """

    lower, upper = 0.0, 1.0
    slopes = (0.0, 0.25)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def _antiderivative(self, x: Tensor) -> Tensor:
        return _softplus(x)

    def _penalty(self, z: Tensor) -> Tensor:
        return torch.xlogy(z, z) + torch.xlogy(1 - z, 1 - z) - z.square() / 2

    def _inverse(self, z: Tensor) -> Tensor:
        return torch.logit(z)


class Softplus(Activation):
    r""":math:`\log(1 + e^x)`; the penalty is
    :math:`\mathrm{Li}_2(e^{-z}) - \pi^2 / 6` on :math:`z \ge 0`.
    """

    lower = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return _softplus(x)

    def _antiderivative(self, x: Tensor) -> Tensor:
        t = x.abs()
        tail = _dilogarithm(t) - _dilogarithm(2 * t) / 2
        return torch.where(x > 0, x.square() / 2 + math.pi**2 / 6 - tail, tail)

    def _penalty(self, z: Tensor) -> Tensor:
        return _dilogarithm(z) - math.pi**2 / 6

    def _inverse(self, z: Tensor) -> Tensor:
        return z + self._penalty_slope(z)

    def _penalty_slope(self, z: Tensor) -> Tensor:
        return torch.log(-torch.expm1(-z))


class NumericActivation(Activation):
    r"""Any non-decreasing, continuous function.

    The antiderivative is a Gauss-Legendre quadrature from 0, on panels whose integrals are kept: 16
    evaluations of the function a value, for smooth functions to rounding. The inverse is a
    safeguarded Newton iteration of some tens of evaluations, and their derivatives are the function
    and the implicit ones.

    Args:
        function: elementwise and differentiable by autograd.
        lower: infimum of its range.
        upper: supremum of its range.
        slopes: its least and largest slope; None measures them on ``window``.
        flats: intervals of slope zero, as ``(value, left, right)``. One that is reached and not
            named here has an inverse somewhere in it.
        kinks: points where the function is not smooth, besides the ends of the flats.
        antiderivative: a closed form; None for the quadrature.
        window: where the slopes are measured, by differences between 4001 points.

    Raises:
        ValueError: the function falls, or is NaN, somewhere in the window.
    """

    def __init__(
        self,
        function: Elementwise,
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
        slopes: tuple[float, float] | None = None,
        flats: tuple[tuple[float, float, float], ...] = (),
        kinks: Sequence[float] = (),
        antiderivative: Elementwise | None = None,
        window: tuple[float, float] = (-20.0, 20.0),
    ) -> None:
        points = torch.linspace(*window, 4001, dtype=torch.float64)
        with torch.no_grad():
            steepness = function(points).diff() / points.diff()
        least, where = steepness.min(0)
        if not least >= -1e-9:
            raise ValueError(
                f"function falls near {points[where]:.3g}, with slope {least:.3g}: it is no "
                "proximal map. Only a non-decreasing one is; 'monotone_gelu' and 'monotone_silu' "
                "stand in for GELU and SiLU"
                if not least.isnan()
                else f"function is NaN near {points[where]:.3g}: choose a window where it is not"
            )
        self.function = function
        self.lower, self.upper = lower, upper
        measured = (max(float(least), 0.0), float(steepness.max()))
        self.slopes = measured if slopes is None else slopes
        self.flats = flats
        self.closed = antiderivative
        bends = {*kinks, *(end for _, *ends in flats for end in ends)}
        edges = sorted({*_PANELS, *(bend for bend in bends if math.isfinite(bend))})
        self._edges = torch.tensor(edges, dtype=torch.float64)
        with torch.no_grad():
            panels = self._quadrature(self._edges[:-1], self._edges[1:])
        # Away from 0 on both sides: what is small there must not be a difference of large ones.
        left, right = panels[self._edges[:-1] < 0], panels[self._edges[:-1] >= 0]
        self._integrals = torch.cat(
            [-left.flip(0).cumsum(0).flip(0), torch.zeros_like(panels[:1]), right.cumsum(0)]
        )

    def __call__(self, x: Tensor) -> Tensor:
        # Rounding must not carry a value out of the range, where the penalty is infinite.
        return self.function(x).clamp(self.lower, self.upper)

    def _antiderivative(self, x: Tensor) -> Tensor:
        if self.closed is not None:
            return self.closed(x)
        edges, integrals = self._edges.to(x), self._integrals.to(x)
        # The last edge on the way from 0 to x.
        after = torch.searchsorted(edges, x.contiguous(), right=True)
        before = torch.searchsorted(edges, x.contiguous())
        last = torch.where(x < 0, before, after - 1).clamp(0, len(edges) - 1)
        return integrals[last] + self._quadrature(edges[last], x)

    def _quadrature(self, start: Tensor, stop: Tensor) -> Tensor:
        nodes, weights = (torch.from_numpy(part).to(start) for part in _GAUSS)
        half = (stop - start) / 2
        at = ((start + stop) / 2).unsqueeze(-1) + half.unsqueeze(-1) * nodes
        return half * (self.function(at) @ weights)

    def _penalty(self, z: Tensor) -> Tensor:
        x = self._inverse(z)
        return z * x - self._antiderivative(x) - z.square() / 2

    def _inverse(self, z: Tensor) -> Tensor:
        def residual(x: Tensor, y: Tensor) -> Tensor:
            return self.function(x) - y

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            return residual(x, z), _slope(self.function, x)

        with torch.no_grad():
            low, high = torch.full_like(z, -1.0), torch.full_like(z, 1.0)
            # A value that is approached and not attained stays with the last, very far, end.
            for _ in range(40):
                above, below = residual(low, z) > 0, residual(high, z) < 0
                if not bool((above | below).any()):
                    break
                low, high = torch.where(above, 2 * low, low), torch.where(below, 2 * high, high)
            x = increasing_root(both, low, high)
        return implicit(x, residual, (z,), diagonal_adjoint)


def _shrink(x: Tensor, threshold: float | Tensor) -> Tensor:
    return torch.where(x.abs() <= threshold, 0.0, x - threshold * x.sign())


def _softplus(x: Tensor) -> Tensor:
    # torch's own is linear above 20, which float64 can tell from the truth.
    return torch.logaddexp(x, torch.zeros_like(x))


@functools.cache
def _dilogarithm_series() -> tuple[float, ...]:
    """``B_2k / (2k (2k + 1)!)`` for k from 12 down to 1."""
    # Imported where it is needed: it takes longer to import than all of this package.
    from scipy.special import bernoulli  # noqa: PLC0415

    even = bernoulli(24)[2::2].tolist()
    return tuple(even[k - 1] / (2 * k * math.factorial(2 * k + 1)) for k in range(12, 0, -1))


def _dilogarithm(t: Tensor) -> Tensor:
    """``Li_2(exp(-t))`` for t >= 0, to rounding: a power series below 3/2, the sum itself above."""
    near = t.clamp_max(1.5)
    square = near.square()
    series = torch.zeros_like(t)
    for factor in _dilogarithm_series():
        series = factor + square * series
    small = math.pi**2 / 6 + torch.xlogy(near, near) - near - square / 4 + near * square * series
    ratio = torch.exp(-t.clamp_min(1.5))
    far = torch.zeros_like(t)
    for k in range(24, 0, -1):
        far = ratio * (1 / k**2 + far)
    return torch.where(t < 1.5, small, far)


_GAUSS = np.polynomial.legendre.leggauss(16)
_POSITIVE_PANELS = [0.5 * k for k in range(1, 9)] + [4.0 * 1.5**k for k in range(1, 17)]
_PANELS = (*(-edge for edge in _POSITIVE_PANELS), 0.0, *_POSITIVE_PANELS)


class _Primitive(torch.autograd.Function):
    """A value whose derivative is known in closed form, whatever computed it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, value: Elementwise, derivative: Elementwise) -> Tensor:
        return value(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.derivative = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return grad_output * ctx.derivative(x), None, None


def _primitive(x: Tensor, value: Elementwise, derivative: Elementwise) -> Tensor:
    attached: Tensor = _Primitive.apply(x, value, derivative)
    return attached


def _slope(function: Elementwise, x: Tensor) -> Tensor:
    """The derivative of an elementwise function, as a value."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = function(x)
        if not out.requires_grad:  # a constant
            return torch.zeros_like(x)
        slope: Tensor = torch.autograd.grad(out.sum(), x)[0]
    return slope


def diagonal_adjoint(vjp: Callable[[Tensor], Tensor], rhs: Tensor) -> Tensor:
    """The adjoint of an elementwise equation, for :func:`spinformer.solve.implicit.implicit`."""
    return rhs / vjp(torch.ones_like(rhs))


def check_size(size: float | Tensor, convexity: float = 0.0) -> None:
    """Raise ``ValueError`` unless ``size * eta + |z|^2 / 2`` is strictly convex.

    Args:
        size: of a proximal map, a number or a tensor.
        convexity: eta is convex up to ``convexity * z^2 / 2``; negative for weakly convex ones.
    """
    low, high = size, size
    if isinstance(size, Tensor):
        if size.numel() == 0:
            return
        low, high = (float(end) for end in size.detach().aminmax())
    if not low > 0:
        raise ValueError(f"size={low!r} must be positive")
    if not 1 + high * convexity > 0:
        raise ValueError(
            f"size={high!r}: size * penalty + |z - y|^2 / 2 is not strictly convex, so that it may "
            f"have several minima; the penalty curves down to {convexity:.4g}: choose a size below "
            f"{-1 / convexity:.4g}"
        )


def increasing_root(
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    low: Tensor,
    high: Tensor,
    *,
    max_iterations: int = 200,
) -> Tensor:
    """The roots of elementwise increasing functions, to rounding, without a graph.

    Newton's method inside a bracket, halved where a Newton step does not halve the last one; a jump
    across zero counts as a root. Where the function has one sign, the end nearer to zero is
    approached. An element that is done no longer moves, and one that is NaN stays NaN.

    Args:
        function: the values and the slopes at x.
        low: below the roots.
        high: above the roots.
        max_iterations: 200 halvings exhaust any bracket.

    Source: the safeguard is that of Dekker and Brent.
    """
    eps = torch.finfo(low.dtype).eps
    # Of the nearer end: a far one may be a bound that says little.
    floor = eps**2 * torch.minimum(low.abs(), high.abs())
    x = (low + high) / 2
    last = high - low
    going = torch.ones_like(x, dtype=torch.bool)
    for _ in range(max_iterations):
        value, slope = function(x)
        low = torch.where(value <= 0, x, low)
        high = torch.where(value >= 0, x, high)
        new = x - value / slope
        fast = (new > low) & (new < high) & (2 * (new - x).abs() < last)
        new = torch.where(fast, new, (low + high) / 2)
        moved = (new - x).abs()
        going = going & (moved > eps * x.abs() / 2) & (moved > floor) & (value != 0)
        if not bool(going.any()):
            break
        x = torch.where(going, new, x)
        last = moved
    return x


# Where GELU and SiLU are least, and where they are steepest.
_GELU_LEAST = -0.7517915246935645
_GELU_STEEPEST = math.sqrt(2)
_SILU_LEAST = -1.2784645427610738
_SILU_STEEPEST = 2.399357280520326


def _monotone_gelu(x: Tensor) -> Tensor:
    return F.gelu(x.clamp_min(_GELU_LEAST))


def _monotone_gelu_antiderivative(x: Tensor) -> Tensor:
    y = x.clamp_min(_GELU_LEAST)
    density = torch.exp(-y.square() / 2) / math.sqrt(2 * math.pi)
    probability = torch.special.ndtr(y)
    right = ((y.square() - 1) * probability + y * density) / 2
    total: Tensor = right + (x - y) * F.gelu(y) + 0.25  # 0 at x = 0
    return total


def _monotone_silu(x: Tensor) -> Tensor:
    return F.silu(x.clamp_min(_SILU_LEAST))


def _least(function: Elementwise, at: float) -> float:
    return float(function(torch.tensor(at, dtype=torch.float64)))


def _steepest(function: Elementwise, at: float) -> float:
    return float(_slope(function, torch.tensor(at, dtype=torch.float64)))


def _monotone(
    function: Elementwise, least: float, steepest: float, antiderivative: Elementwise | None
) -> NumericActivation:
    lower = _least(function, least)
    return NumericActivation(
        function,
        lower=lower,
        slopes=(0.0, _steepest(function, steepest)),
        flats=((lower, -math.inf, least),),
        antiderivative=antiderivative,
    )


ACTIVATIONS: MappingProxyType[str, Activation] = MappingProxyType(
    {
        "identity": LeakyReLU(1.0),
        "relu": LeakyReLU(),
        "leaky_relu": LeakyReLU(0.01),
        "soft_threshold": SoftThreshold(),
        "hard_tanh": HardTanh(),
        "tanh": Tanh(),
        "sigmoid": Sigmoid(),
        "softplus": Softplus(),
        "monotone_gelu": _monotone(
            _monotone_gelu, _GELU_LEAST, _GELU_STEEPEST, _monotone_gelu_antiderivative
        ),
        "monotone_silu": _monotone(_monotone_silu, _SILU_LEAST, _SILU_STEEPEST, None),
    }
)
"""The activations that have a name: ``"identity"``, ``"relu"``, ``"leaky_relu"``,
``"soft_threshold"``, ``"hard_tanh"``, ``"tanh"``, ``"sigmoid"``, ``"softplus"``,
``"monotone_gelu"``, ``"monotone_silu"``."""


def as_activation(activation: str | Activation) -> Activation:
    """The activation of a name of :data:`ACTIVATIONS`; an :class:`Activation` as it is.

    Raises:
        ValueError: an unknown name; ``"gelu"`` and ``"silu"``, which are not monotone.
    """
    if isinstance(activation, Activation):
        return activation
    if activation in ("gelu", "silu"):
        raise ValueError(
            f"activation={activation!r} is not monotone, hence the proximal map of nothing: use "
            f"'monotone_{activation}', which is constant on the left of its minimum"
        )
    return ACTIVATIONS[check_choice("activation", activation, tuple(ACTIVATIONS))]
