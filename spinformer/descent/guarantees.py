r"""Where alternating steps of two energies are proven not to raise their sum.

``h = f + g``. Alternating inexact minimization (AIM) takes ``u = y - a1 grad f(y)``, then
``y+ = u - a2 grad g(u)``: a gradient step of h with noise,

.. math::
    y^+ = y - a_2 (\nabla h(y) - \Delta), \qquad
    \Delta = (1 - a_1 / a_2) \nabla f(y) + \nabla g(y) - \nabla g(u), \qquad
    |\Delta| \le |\nabla f(y)| / L .

With ``a2 <= 1 / L_h`` the descent lemma gives
``h(y+) - h(y) <= -(a2 / 2) (|grad h|^2 - |Delta|^2)``: no rise where
``delta = |grad f| / |grad h| <= L``. The bound is sharp: for quadratics in one dimension with
``a1 = a2 = 1 / L_h`` the energy rises wherever ``delta > L``.

Norms run over all tokens of a system, the last two axes. Source: Yang, Huang & Wipf (2022),
Theorems 4.1 and 5.1 and Lemma 4.3, re-derived; where ours says more or other, it is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Ball",
    "aim_bound",
    "apollonius",
    "gradient_ratio",
    "proximal_bound",
    "proximal_deficit",
    "proximal_kappa",
]

Number = float | Tensor


def gradient_ratio(gradient_f: Tensor, gradient_h: Tensor) -> Tensor:
    """``delta = |grad f| / |grad h|``, ``(...)``, of gradients ``(..., N, d)``.

    The norm of grad f, not of the noise Delta: with the noise in its place Theorem 4.1 is false
    (f = (y + 1)^2 / 2, g = (y - .7)^2 / 2, y = 0, a1 = a2 = .5 rises). 0 where f is stationary, so
    that AIM takes a plain gradient step; infinite where h alone is.
    """
    top, bottom = _norm(gradient_f), _norm(gradient_h)
    return torch.where(top == 0, torch.zeros_like(top), top / bottom)


def aim_bound(
    size_f: Number, size_g: Number, lipschitz_g: Number, lipschitz_h: Number | None = None
) -> Tensor:
    r"""L of Theorem 4.1: where ``delta <= L`` an AIM step does not raise ``h = f + g``.

    .. math::
        L = \frac{a_2}{|a_2 - a_1| + a_1 a_2 L_g} \min(1, \tfrac{2}{a_2 L_h} - 1)

    The paper's conditions are ``a1 <= a2 <= 1 / L_h``, under which the absolute value and the
    minimum change nothing; both extend it. For ``a1 > a2`` the noise is bounded alike. For
    ``1 < s = a2 L_h < 2`` and ``|Delta| = r |grad h|`` the descent lemma leaves
    ``h(y+) - h(y) <= -a2 |grad h|^2 (1 + r) (1 - s (1 + r) / 2)``, not positive for
    ``r <= 2 / s - 1``. At ``s = 2`` the bound is 0; beyond, nothing is proven and it is ``-inf``.

    Args:
        size_f, size_g: a1 and a2, positive.
        lipschitz_g: ``L_g``, of the gradient of g.
        lipschitz_h: an upper bound for the Hessian of h (of both signs of its eigenvalues only the
            upper side matters). None promises ``a2 <= 1 / L_h``.

    Returns:
        The broadcast shape of the arguments. 0 for an infinite ``lipschitz_g``; infinite where
        ``a1 = a2`` and g is linear, for then there is no noise.

    Raises:
        ValueError: a size that is not positive, or a negative ``lipschitz_g``.

    Source: Yang, Huang & Wipf (2022), Theorem 4.1, with the two extensions derived above.
    """
    a2, bound = _noise_bound(size_f, size_g, lipschitz_g)
    if lipschitz_h is None:
        return bound
    # A Hessian without positive eigenvalues allows every size.
    sharpness = torch.as_tensor(a2 * lipschitz_h).clamp_min(0.0)
    scaled = torch.where(sharpness < 2, bound * (2 / sharpness - 1).clamp_max(1.0), 0.0)
    return torch.where(sharpness <= 2, scaled, -torch.inf)


@dataclass(frozen=True)
class Ball:
    """The states whose distances from two points have at most a given ratio.

    Attributes:
        center: ``(..., N, d)``; of no use where the ratio is 1.
        radius: ``(...)``; infinite where the ratio is 1: the region is a half space.
        inside: ``(...)``: the region is the closed ball (ratio < 1), a half space (= 1, also True);
            False: it is what lies outside of the open ball (ratio > 1).
        near, far: the two points, ``(..., N, d)``.
        ratio: ``(...)``.
    """

    center: Tensor
    radius: Tensor
    inside: Tensor
    near: Tensor
    far: Tensor
    ratio: Tensor

    def contains(self, Y: Tensor) -> Tensor:
        """Whether ``|Y - near| <= ratio |Y - far|``, ``(...)``, for states ``(..., N, d)``.

        From the distances themselves: no digits are lost where the ball is nearly a half space.
        """
        near, far = _norm(Y - self.near), _norm(Y - self.far)
        # Each side by a factor of at most one: an infinite ratio leaves no state out.
        return near * (1 / self.ratio).clamp_max(1.0) <= far * self.ratio.clamp_max(1.0)


def apollonius(y_f: Tensor, y_h: Tensor, ratio: Number) -> Ball:
    r"""The region ``|y - y_f| / |y - y_h| <= ratio``: a ball of Apollonius, or the outside of one.

    Lemma 4.3: with ``y_f``, ``y_h`` the minima of f and h and
    ``ratio = c_h L / L_f`` (``c_h`` the strong convexity of h, ``L_f`` the Lipschitz constant of
    grad f) an AIM step from inside the region does not raise h, as
    ``|grad f| <= L_f |y - y_f|`` and ``|grad h| >= c_h |y - y_h|``. Completing the square of
    ``|y - y_f|^2 <= ratio^2 |y - y_h|^2``,

    .. math::
        \text{center} = \frac{y_f - \rho^2 y_h}{1 - \rho^2}, \qquad
        \text{radius} = \frac{\rho\, |y_f - y_h|}{|1 - \rho^2|} .

    Args:
        y_f, y_h: ``(..., N, d)``.
        ratio: rho >= 0, ``(...)`` or a number. At 0 ``y_f`` alone, at 1 the half space nearer to
            it, at infinity all states. No state where a tensor is negative, as the bound is where
            nothing is proven: center and radius are NaN there.

    Raises:
        ValueError: a negative number for ``ratio``.

    Source: Yang, Huang & Wipf (2022), Lemma 4.3.
    """
    if not isinstance(ratio, Tensor) and not ratio >= 0:
        raise ValueError(f"ratio={ratio} must not be negative: it is one of distances")
    rho = torch.as_tensor(ratio, dtype=y_f.dtype, device=y_f.device)
    rho = torch.where(rho < 0, torch.nan, rho)
    rho = rho.expand(torch.broadcast_shapes(rho.shape, y_f.shape[:-2], y_h.shape[:-2]))
    # Beyond 1 by its inverse, with the points exchanged: exact up to infinity.
    inside = rho <= 1
    share = torch.where(inside, rho, 1 / rho)
    first, second = (
        torch.where(inside[..., None, None], *pair) for pair in ((y_f, y_h), (y_h, y_f))
    )
    square = share.square()[..., None, None]
    radius = share * _norm(y_f - y_h) / (1 - share.square())
    return Ball(
        center=(first - square * second) / (1 - square),
        radius=torch.where(rho == 1, torch.inf, radius),
        inside=inside,
        near=y_f,
        far=y_h,
        ratio=rho,
    )


def proximal_deficit(x1: Tensor, x2: Tensor) -> Tensor:
    r""":math:`D(x_1; x_2) = \sum_i \min(x_{2,i}^2 - x_{1,i}^2, 0) / |x_1|^2`, between -1 and 0.

    ``x1``, ``x2`` ``(..., N, d)`` -> ``(...)``. With ``x1 = a2 grad h(y)`` and ``x2 = y >= 0`` the
    ReLU cuts a gradient step from y to no less than ``|x1|^2 (1 + D)``. 0 where x1 = 0.

    Source: Yang, Huang & Wipf (2022), Theorem 5.1.
    """
    missing = (x2.square() - x1.square()).clamp_max(0.0).sum((-2, -1))
    total = x1.square().sum((-2, -1))
    return torch.where(total == 0, torch.zeros_like(total), missing / total)


def proximal_kappa(Y: Tensor, moved: Tensor, step: Tensor) -> Tensor:
    r"""The share of a gradient step that a proximal map cuts, ``1 - |p - y|^2 / |a2 grad h|^2``.

    The sharpest kappa for :func:`proximal_bound`, for every penalty. Where that is the
    indicator of the non-negative states and ``Y`` is one of them, it lies between 0 and
    ``-proximal_deficit(step, Y)``: the deficit also counts entries that move up, which no ReLU
    cuts.

    Args:
        Y: the state ``y``, ``(..., N, d)``.
        moved: ``p = prox(y - a2 grad h(y))``.
        step: ``a2 grad h(y)``.

    Returns:
        ``(...)``, at most 1; below 0 where the penalty itself pulls. 1, the value that promises
        least, where ``step`` is 0 and a share of it says nothing.
    """
    made, total = (moved - Y).square().sum((-2, -1)), step.square().sum((-2, -1))
    return torch.where(total == 0, torch.ones_like(made), 1 - made / total)


def proximal_bound(
    size_f: Number,
    size_g: Number,
    lipschitz_g: Number,
    kappa: Number,
    lipschitz_h: Number | None = None,
    *,
    convexity: Number = 0.0,
    printed: bool = False,
) -> Tensor:
    r"""L' of Theorem 5.1: where ``delta <= L'`` a proximal AIM step does not raise h + penalty.

    .. math::
        L' = \frac{c_P \lambda \sqrt{1 - \kappa}\; a_2}{|a_2 - a_1| + a_1 a_2 L_g},
        \qquad c_P \lambda = 1 + a_2 \mu .

    The step is ``y+ = prox(u - a2 grad g(u))``, the prox that of ``lambda = a2`` times the penalty,
    whose strong convexity is mu (0 for an indicator): it minimizes
    ``P(z) = penalty(z) + |z - v|^2 / (2 lambda)``, which is ``c_P = 1 / lambda + mu`` strongly
    convex. The proof: y+ minimizes ``Q(z) - <Delta, z>``, where
    ``Q(z) = penalty(z) + h(y) + <grad h, z - y> + |z - y|^2 / (2 a2)`` bounds h + penalty from
    above and has its minimum at ``p = prox(y - a2 grad h)``. Then
    ``Q(y+) <= Q(p) + |Delta|^2 / (2 c_P)`` and ``Q(p) <= Q(y) - c_P |y - p|^2 / 2``: no rise where
    ``|Delta| <= c_P |y - p|``, and ``|y - p| >= a2 |grad h| sqrt(1 - kappa)``.

    The printed theorem has another factor ``1 / sqrt(2)``: true, but by that much smaller than it
    need be. Without it the bound is sharp (kappa = 0 is Theorem 4.1). With ``c_P lambda = 2``, the
    reading of a prox objective ``|z - v|^2 / lambda``, the printed bound exceeds the sharp one
    and is false.

    Args:
        size_f, size_g: a1 and a2, positive.
        lipschitz_g: ``L_g``, of the gradient of g.
        kappa: :func:`proximal_kappa`, or ``-proximal_deficit(a2 grad h, y)`` for the ReLU.
        lipschitz_h: an upper bound for the Hessian of h; where ``a2 > 1 / L_h`` nothing is proven,
            and the bound is ``-inf``. None promises ``a2 <= 1 / L_h``.
        convexity: mu of the penalty, negative for a weakly convex one; then ``a2 mu > -1``.
        printed: the paper's factor ``1 / sqrt(2)``.

    Returns:
        The broadcast shape of the arguments.

    Raises:
        ValueError: a size that is not positive, or a negative ``lipschitz_g``.

    Source: Yang, Huang & Wipf (2022), Theorem 5.1, with the sharp constant derived above.
    """
    a2, bound = _noise_bound(size_f, size_g, lipschitz_g)
    kept = torch.as_tensor(1 - kappa, dtype=a2.dtype, device=a2.device).clamp_min(0.0).sqrt()
    bound = (1 + a2 * convexity) * kept * bound
    if printed:
        bound = bound / 2**0.5
    if lipschitz_h is None:
        return bound
    return torch.where(a2 * lipschitz_h <= 1, bound, -torch.inf)


def _noise_bound(size_f: Number, size_g: Number, lipschitz_g: Number) -> tuple[Tensor, Tensor]:
    """``a2``, and the least ``|grad f| / |Delta|``, ``a2 / (|a2 - a1| + a1 a2 L_g)``."""
    tensors = [x for x in (size_f, size_g, lipschitz_g) if isinstance(x, Tensor)]
    # Numbers are float64: they take the type of whatever they meet.
    like = tensors[0] if tensors else torch.zeros((), dtype=torch.float64)
    a1, a2, slope = (
        torch.as_tensor(x, dtype=like.dtype, device=like.device)
        for x in (size_f, size_g, lipschitz_g)
    )
    for name, size in (("size_f", a1), ("size_g", a2)):
        if (size <= 0).any():
            raise ValueError(f"{name}={size.min().item()} must be positive")
    if (slope < 0).any():
        raise ValueError(f"lipschitz_g={slope.min().item()} must not be negative")
    return a2, a2 / ((a2 - a1).abs() + a1 * a2 * slope)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    return norm
