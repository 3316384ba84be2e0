"""The approximations as every study shows them: how they are made, and their name and look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spinformer as sf

__all__ = ["APPROXIMATIONS", "ITERATION", "Approximation", "exact_law"]

Solver = Any
"""An approximation: ``solve(system) -> Equilibrium``."""


@dataclass(frozen=True)
class Approximation:
    """An approximation as studies show it.

    Attributes:
        label: in figures and tables.
        make: the solver.
        site: the site law that it takes for spins of dimension D.
        look: colour, line style and marker.
    """

    label: str
    make: Callable[[], Solver]
    site: Callable[[int], sf.SiteLaw]
    look: dict[str, Any]


def exact_law(dim: int) -> sf.SiteLaw:
    """Spins of length sqrt(D)."""
    return sf.Ising() if dim == 1 else sf.Sphere(dim)


def _large_d_law(dim: int) -> sf.SiteLaw:
    return sf.Ising() if dim == 1 else sf.LargeDSphere(dim)


# Below order some maps oscillate: half steps cost little and settle them. What still fails is left
# out of a mean and counted.
ITERATION: dict[str, Any] = {"damping": 0.5, "max_iterations": 4000, "on_failure": "ignore"}
APPROXIMATIONS: dict[str, Approximation] = {
    "mean_field": Approximation(
        "mean field",
        lambda: sf.MeanField(**ITERATION),
        exact_law,
        {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    ),
    "tap": Approximation(
        "TAP",
        lambda: sf.TAP(**ITERATION),
        exact_law,
        {"color": "#56B4E9", "linestyle": "-.", "marker": "D"},
    ),
    "tap_large_d": Approximation(
        "TAP, large-D form",
        lambda: sf.TAP(**ITERATION),
        _large_d_law,
        {"color": "#CC79A7", "linestyle": ":", "marker": "x"},
    ),
    "adaptive_tap": Approximation(
        "adaptive TAP",
        lambda: sf.AdaptiveTAP(on_failure="ignore"),
        exact_law,
        {"color": "#009E73", "linestyle": "-", "marker": "v"},
    ),
    "bethe": Approximation(
        "Bethe",
        lambda: sf.Bethe(**ITERATION),
        exact_law,
        {"color": "#E69F00", "linestyle": "-", "marker": "P"},
    ),
    "sd0": Approximation(
        "steepest descent (SD0)",
        lambda: sf.SteepestDescent(on_failure="ignore"),
        exact_law,
        {"color": "#D55E00", "linestyle": "-", "marker": "^"},
    ),
    "sd1": Approximation(
        "with fluctuations (SD1)",
        lambda: sf.SteepestDescent(fluctuations=True, on_failure="ignore"),
        exact_law,
        {"color": "#000000", "linestyle": "-", "marker": "o"},
    ),
}
