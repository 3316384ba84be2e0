"""Proximal maps: activations as the minimization of a non-smooth energy."""

from __future__ import annotations

from torch import Tensor


def prox_nonnegative(Y: Tensor) -> Tensor:
    """ReLU: the nearest non-negative point, ``argmin_Z |Z - Y|^2 / 2`` over ``Z >= 0``.

    It is the proximal map of the indicator of the positive orthant, for every step size, and in
    every metric that weighs whole tokens. Followed by it, a gradient step of size at most ``1 / L``
    lowers an energy of curvature L among non-negative states; a state with negative entries has
    infinite energy, and leaving it is no descent that a finite number could show.
    """
    return Y.clamp_min(0.0)
