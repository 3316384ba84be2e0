"""The concave profiles rho of pairwise energies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from spinformer.errors import check_choice

__all__ = ["RHOS", "Rho", "as_rho"]


@dataclass(frozen=True)
class Rho:
    """A concave, non-decreasing profile ``rho(z)`` of ``z = |y_i - y_j|^2 / 2 >= 0``.

    Concavity makes its tangent in ``z`` an upper bound, which is quadratic in ``y``: that is why a
    step of the re-weighted average ``W_ij = rho'(z_ij)`` descends. Between tokens of unit norm,
    where ``z = 1 - y_i . y_j``, the weights are

    ==================  ================  ========================
    name                rho(z)            rho' at unit norm
    ==================  ================  ========================
    ``"exp"``           ``-exp(-z)``      ``exp(y_i . y_j - 1)``
    ``"log1p"``         ``log(1 + z)``    ``1 / (2 - y_i . y_j)``
    ``"log2p"``         ``log(2 + z)``    ``1 / (3 - y_i . y_j)``
    ==================  ================  ========================

    Attributes:
        value: ``rho``, elementwise.
        derivative: ``rho'``, elementwise, non-negative and non-increasing.
        completely_monotone: ``rho'`` is a completely monotone function of ``z`` (a mixture of
            ``exp(-s z)``), so that every kernel matrix W is positive semi-definite (Schoenberg),
            which doubles the step that is known to descend. Leave False if in doubt.
        least_curvature: a lower bound of ``rho' + 2 z rho''``, the curvature of a pair along its
            own difference; -inf if in doubt. Gradient steps need it, majorize-minimize ones don't.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    completely_monotone: bool = False
    least_curvature: float = -math.inf

    @classmethod
    def from_value(
        cls,
        value: Callable[[Tensor], Tensor],
        *,
        completely_monotone: bool = False,
        least_curvature: float = -math.inf,
    ) -> Rho:
        """A profile whose derivative is found by automatic differentiation.

        It costs a backward pass of ``value``, and can itself be differentiated.

        Args:
            value: ``rho``, elementwise and differentiable at every ``z >= 0``, zero included (where
                ``sqrt`` is not). :meth:`check` tells whether it is a profile.
            completely_monotone: as of the class.
            least_curvature: as of the class.
        """
        return cls(value, _Derivative(value), completely_monotone, least_curvature)

    @classmethod
    def smoothed_norm(cls, power: float = 1.0, scale: float = 1e-3) -> Rho:
        r"""``rho(z) = (2 z + scale^2)^(power / 2) / power``: the norm of differences, to a power.

        With ``|u|^2 = 2 z`` it is :math:`|u|^p / p`, rounded off where ``|u|`` is below the scale:
        convex in the tokens for ``power >= 1`` and quadratic, ``rho(z) = z``, for 2 (uniform
        averaging). At power 1 the steps are Weiszfeld's, for medians and total variation.

        Args:
            power: in (0, 2].
            scale: positive, in the units of the tokens; steps get slower the smaller it is.

        Raises:
            ValueError: a power or a scale out of range.
        """
        if not 0 < power <= 2:
            raise ValueError(f"power={power!r} must be in (0, 2]: beyond, rho is not concave")
        if not scale > 0:
            raise ValueError(f"scale={scale!r} must be positive: the slope at z = 0 is finite then")
        least = 0.0
        if power < 1:
            # rho' + 2 z rho'' = t^(p/2 - 2) (scale^2 + 2 (p - 1) z), least at this t.
            t = scale**2 * (4 - power) / (1 - power)
            least = t ** (power / 2 - 2) * (scale**2 + (power - 1) * (t - scale**2))
        return cls(
            functools.partial(_norm, power=power, scale=scale),
            functools.partial(_norm_derivative, power=power, scale=scale),
            completely_monotone=True,
            least_curvature=least,
        )

    def bounds(self, spread: Tensor) -> tuple[Tensor, Tensor]:
        """``spread`` times the least, at most 0, and the largest curvature of a pair.

        The sum of pairs curves at most so, in all directions, for the largest eigenvalue of their
        Laplacian as ``spread``. Where no pair is bonded both are zero.
        """
        bonded = spread > 0
        lower = spread * min(self.least_curvature, 0.0)
        upper = spread * self.derivative(torch.zeros_like(spread))
        return torch.where(bonded, lower, 0.0), torch.where(bonded, upper, 0.0)

    def check(self, points: Tensor | None = None, tolerance: float = 1e-7) -> None:
        """Raise unless this is a concave, non-decreasing profile on a grid of points.

        Concave, with this derivative, is what every chord says whose slope lies between the
        derivatives at its ends. The promise of complete monotonicity isn't checked.

        Args:
            points: increasing ``z >= 0``; None for 0 and 2,000 points from 1e-6 to 1e4.
            tolerance: what is forgiven, relative to the derivative at the first point.

        Raises:
            ValueError: a value or derivative that is not finite, that decreases, a derivative that
                grows or is not that of the value; the message names the point.
        """
        if points is None:
            grid = torch.logspace(-6, 4, 2000, dtype=torch.float64)
            points = torch.cat([grid.new_zeros(1), grid])
        with torch.no_grad():
            value, slope = self.value(points), self.derivative(points)
            chord = value.diff() / points.diff()
            # The values are rounded, the more so the larger they are.
            eps = torch.finfo(points.dtype).eps
            slack = tolerance * slope[0].abs()
            slack = slack + 4 * eps * value.abs().maximum(value.abs().roll(1))[1:] / points.diff()
        for wrong, complaint in (
            (~(value.isfinite() & slope.isfinite()), "is not finite, or has no finite slope,"),
            (slope < -tolerance * slope[0].abs(), "decreases"),
            (slope[1:] > slope[:-1] + tolerance * slope[0].abs(), "is not concave"),
            (
                (chord > slope[:-1] + slack) | (chord < slope[1:] - slack),
                "does not have the derivative that is given",
            ),
        ):
            if wrong.any():
                z = float(points[int(wrong.nonzero()[0])])
                raise ValueError(
                    f"rho {complaint} at z = {z:.6g}: a profile must be concave and "
                    "non-decreasing, with its own derivative"
                )


@dataclass(frozen=True)
class _Derivative:
    """The derivative of an elementwise function, by autograd."""

    value: Callable[[Tensor], Tensor]

    def __call__(self, z: Tensor) -> Tensor:
        tracked = torch.is_grad_enabled()
        if tracked and not z.requires_grad:
            # The function may have parameters of its own that do.
            tracked = self.value(z).requires_grad
        with torch.enable_grad():
            point = z if z.requires_grad else z.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.value(point).sum(), point, create_graph=tracked)
        return slope


def _exp(z: Tensor) -> Tensor:
    return -torch.exp(-z)


def _exp_derivative(z: Tensor) -> Tensor:
    return torch.exp(-z)


def _log2p(z: Tensor) -> Tensor:
    return torch.log(2.0 + z)


def _log1p_derivative(z: Tensor) -> Tensor:
    return 1.0 / (1.0 + z)


def _log2p_derivative(z: Tensor) -> Tensor:
    return 1.0 / (2.0 + z)


def _norm(z: Tensor, power: float, scale: float) -> Tensor:
    return (2.0 * z + scale**2) ** (power / 2) / power


def _norm_derivative(z: Tensor, power: float, scale: float) -> Tensor:
    return (2.0 * z + scale**2) ** (power / 2 - 1)


# Plain functions, not lambdas: an energy, and a module that holds one, can then be pickled.
RHOS: MappingProxyType[str, Rho] = MappingProxyType(
    {
        # The least curvatures are attained at z = 3/2, 3 and 6.
        "exp": Rho(_exp, _exp_derivative, True, -2 * math.exp(-1.5)),
        "log1p": Rho(torch.log1p, _log1p_derivative, True, -1 / 8),
        "log2p": Rho(_log2p, _log2p_derivative, True, -1 / 16),
    }
)
"""The profiles that have a name: ``"exp"``, ``"log1p"``, ``"log2p"``."""


def as_rho(rho: str | Rho) -> Rho:
    """The profile of a name, ``"exp"``, ``"log1p"`` or ``"log2p"``; a :class:`Rho` as it is."""
    return rho if isinstance(rho, Rho) else RHOS[check_choice("rho", rho, tuple(RHOS))]
