"""Proximal maps: activations as the minimization of a non-smooth energy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from spinformer.descent.activation import (
    ACTIVATIONS,
    Activation,
    check_size,
    diagonal_adjoint,
    increasing_root,
)
from spinformer.descent.energy import clear
from spinformer.errors import check_choice
from spinformer.solve.implicit import implicit

__all__ = ["PROXES", "Proximal", "as_prox", "penalty_of", "prox_nonnegative"]

# How far beside a minimum the slopes are compared, to see whether it lies at a kink.
_ROUNDINGS = 128
_DOUBLINGS = 40


def prox_nonnegative(Y: Tensor) -> Tensor:
    """ReLU: the nearest non-negative point, ``argmin_Z |Z - Y|^2 / 2`` over ``Z >= 0``.

    It is the proximal map of the indicator of the positive orthant, for every step size, and in
    every metric that weighs whole tokens. Followed by it, a gradient step of size at most ``1 / L``
    lowers an energy of curvature L among non-negative states; a state with negative entries has
    infinite energy, and leaving it is no descent that a finite number could show.
    """
    return Y.clamp_min(0.0)


@dataclass(frozen=True)
class Proximal:
    r"""A penalty :math:`\eta` on every entry, and its proximal map.

    .. math:: P_s(Y) = \operatorname*{argmin}_Z\; s \sum \eta(Z) + \tfrac12 |Z - Y|^2

    Entries are independent: which of them belong to a token is for the caller to mask.

    Attributes:
        value: the penalty, elementwise, infinite outside its domain.
        map: ``map(Y, size)``, the minimum.
        convexity: :math:`\mu` such that :math:`\eta - \mu z^2 / 2` is convex; negative for a weakly
            convex penalty, whose sizes are then below ``-1 / convexity``.
    """

    value: Callable[[Tensor], Tensor]
    map: Callable[[Tensor, float | Tensor], Tensor]
    convexity: float = 0.0

    def __call__(self, Y: Tensor, size: float | Tensor = 1.0) -> Tensor:
        """The proximal map of ``size`` times the penalty, of the shape of ``Y``.

        Args:
            Y: any shape.
            size: positive, a number or a tensor that broadcasts to ``Y``.

        Raises:
            ValueError: a size that is not positive, or at which the objective is not strictly
                convex.
        """
        check_size(size, self.convexity)
        return self.map(Y, size)

    def strong_convexity(self, size: float = 1.0) -> float:
        r"""Of the objective, :math:`1 + s \mu`: the c_P of Yang, Huang & Wipf (2022), Thm. 5.1."""
        return 1 + size * self.convexity

    @classmethod
    def from_activation(cls, activation: Activation) -> Proximal:
        """The penalty whose map at size 1 is the activation."""
        return cls(activation.penalty, activation.map, activation.convexity)

    @classmethod
    def from_penalty(
        cls,
        penalty: Callable[..., Tensor],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
        convexity: float | None = None,
        parameters: Sequence[Tensor] = (),
        window: tuple[float, float] = (-20.0, 20.0),
    ) -> Proximal:
        r"""The proximal map of one's own penalty.

        The condition :math:`s \eta'(z) + z = y` is solved by Newton's method in a bracket, which
        strong convexity provides. A kink of the penalty, and an end of its domain, hold z still for
        an interval of y. The derivatives, of any order, in y, the size and the parameters, are
        those of the condition, never of the iteration.

        Args:
            penalty: ``penalty(Z, *parameters)``, elementwise and differentiable by autograd; finite
                inside ``[lower, upper]``.
            lower: end of the domain, in it unless the slope is infinite there.
            upper: the other end.
            convexity: mu such that ``penalty - mu z^2 / 2`` is convex. None measures it by second
                differences between 4001 points of ``window``, at the present parameters: what lies
                between the points, or outside, is not seen.
            parameters: tensors that the penalty depends on and that may want a gradient, each
                broadcastable to ``Z``.
            window: where the convexity is measured.

        Raises:
            ValueError: an empty domain or window, or a penalty that is not finite in it.
        """
        if not lower < upper:
            raise ValueError(f"lower={lower!r} must be below upper={upper!r}")
        if convexity is None:
            convexity = _measure_convexity(penalty, lower, upper, tuple(parameters), window)
        solve = functools.partial(_minimize, penalty, lower, upper, convexity, tuple(parameters))
        value = functools.partial(_restrict, penalty, lower, upper, tuple(parameters))
        return cls(value, solve, convexity)


def penalty_of(prox: Proximal, Y: Tensor, mask: Tensor | None = None) -> Tensor:
    """The penalty of each system, ``(...)``; infinite outside the domain."""
    return clear(prox.value(Y), mask).sum((-2, -1))


def _restrict(
    penalty: Callable[..., Tensor],
    lower: float,
    upper: float,
    parameters: tuple[Tensor, ...],
    z: Tensor,
) -> Tensor:
    inside = (z >= lower) & (z <= upper)
    safe = torch.where(inside, z, _inner(lower, upper))
    outside = torch.where(z.isnan(), z, torch.inf)
    return torch.where(inside, penalty(safe, *parameters), outside)


def _inner(lower: float, upper: float) -> float:
    if math.isfinite(lower) and math.isfinite(upper):
        return (lower + upper) / 2
    return lower + 1 if math.isfinite(lower) else min(upper - 1, 0.0)


def _measure_convexity(
    penalty: Callable[..., Tensor],
    lower: float,
    upper: float,
    parameters: tuple[Tensor, ...],
    window: tuple[float, float],
) -> float:
    left, right = max(lower, window[0]), min(upper, window[1])
    if not left < right:
        raise ValueError(f"window={window!r} does not meet the domain [{lower}, {upper}]")
    # Centers of cells: the penalty may have no value at an end of its domain.
    width = (right - left) / 4001
    points = left + width * (torch.arange(4001, dtype=torch.float64) + 0.5)
    with torch.no_grad():
        held = [parameter.detach().double().cpu() for parameter in parameters]
        # Parameters of many entries: each point for each of them.
        points = points.reshape(-1, *(1 for _ in torch.broadcast_shapes(*(h.shape for h in held))))
        values = penalty(points, *held)
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"penalty is not finite everywhere in ({left:.4g}, {right:.4g}): name its domain by "
            "lower= and upper="
        )
    curvature = float(values.diff(n=2, dim=0).min()) / width**2
    # What the differences cannot tell from the truth.
    rounding = 8 * torch.finfo(torch.float64).eps * float(values.abs().max()) / width**2
    return curvature if curvature < -rounding else max(curvature - rounding, 0.0)


def _minimize(
    penalty: Callable[..., Tensor],
    lower: float,
    upper: float,
    convexity: float,
    parameters: tuple[Tensor, ...],
    Y: Tensor,
    size: float | Tensor,
) -> Tensor:
    sizes = torch.as_tensor(size, dtype=Y.dtype, device=Y.device).expand(Y.shape)

    def slope(z: Tensor, *bound: Tensor) -> Tensor:
        return _derivative(penalty, z, bound, keep=True)

    def condition(z: Tensor) -> Tensor:
        return sizes * _derivative(penalty, z, parameters, keep=False) + z - Y

    def both(z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            first = _derivative(penalty, z, tuple(p.detach() for p in parameters), keep=True)
            second = torch.zeros_like(z)
            if first.requires_grad:
                (second,) = torch.autograd.grad(first.sum(), z, materialize_grads=True)
        return sizes * first.detach() + z.detach() - Y, 1 + sizes * second

    with torch.no_grad():
        # From a point inside, whose slope is finite, strong convexity bounds the way to the root.
        margin = min(1.0, upper - lower) / 1024
        inner = _inner(lower, upper)
        start = Y.clamp(lower + margin, upper - margin)
        first = condition(start)
        reach = -first / (1 + sizes * convexity)
        end = (start + reach).clamp(lower, upper)
        for _ in range(_DOUBLINGS):  # where the convexity was measured too large
            short = (condition(end) * first > 0) & (end > lower) & (end < upper)
            if not bool(short.any()):
                break
            reach = torch.where(short, 2 * reach, reach)
            end = (start + reach).clamp(lower, upper)
        z = increasing_root(both, torch.minimum(start, end), torch.maximum(start, end))
        for bound, sign in ((lower, 1), (upper, -1)):
            if math.isfinite(bound):
                at = torch.full_like(Y, bound)
                held = sign * condition(at) >= 0
                z = torch.where(held, at, z)
        # Autograd may call the slope at a kink zero: it is the rise across it that tells.
        _, steepness = both(z)
        limits = torch.finfo(Y.dtype)
        beside = _ROUNDINGS * limits.eps * torch.maximum(z.abs(), Y.abs()) + limits.tiny**0.5
        held = condition(z + beside) - condition(z - beside) > 4 * steepness * beside
        free = ~held & (z > lower) & (z < upper) | z.isnan()

    def residual(z: Tensor, y: Tensor, s: Tensor, *bound: Tensor) -> Tensor:
        # Where z is held, its own slope may be infinite: it is not asked for.
        moving = torch.where(free, z, inner)
        return torch.where(free, s * slope(moving, *bound) + moving - y, z)

    return implicit(z, residual, (Y, sizes, *parameters), diagonal_adjoint)


def _derivative(
    penalty: Callable[..., Tensor], z: Tensor, parameters: tuple[Tensor, ...], *, keep: bool
) -> Tensor:
    """The slope of the penalty; ``keep`` its graph, so that it can be differentiated again."""
    with torch.enable_grad():
        if not z.requires_grad:
            z = z.detach().requires_grad_()
        total = penalty(z, *parameters).sum()
        if not total.requires_grad:  # a constant penalty
            return torch.zeros_like(z)
        (first,) = torch.autograd.grad(total, z, create_graph=keep, materialize_grads=True)
    return first


PROXES: MappingProxyType[str, Proximal] = MappingProxyType(
    {
        "box" if name == "hard_tanh" else name: Proximal.from_activation(activation)
        for name, activation in ACTIVATIONS.items()
    }
)
"""The proximal maps that have a name, each an activation too: ``"identity"``, ``"relu"``,
``"leaky_relu"``, ``"soft_threshold"``, ``"box"`` (the activation ``"hard_tanh"``), ``"tanh"``,
``"sigmoid"``, ``"softplus"``, ``"monotone_gelu"``, ``"monotone_silu"``."""


def as_prox(prox: str | Activation | Proximal) -> Proximal:
    """The proximal map of a name of :data:`PROXES` or of an activation; a :class:`Proximal` as is.

    Raises:
        ValueError: an unknown name; ``"gelu"`` and ``"silu"``, which are not monotone.
    """
    if isinstance(prox, Proximal):
        return prox
    if isinstance(prox, Activation):
        return Proximal.from_activation(prox)
    if prox in ("gelu", "silu"):
        raise ValueError(
            f"prox={prox!r} is not monotone, hence the proximal map of nothing: use "
            f"'monotone_{prox}', which is constant on the left of its minimum"
        )
    return PROXES[check_choice("prox", prox, tuple(PROXES))]
