"""Which approximation solves the spin system of a block, and what each asks of the block."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from spinformer.equilibrium.adaptive_tap import AdaptiveTAP
from spinformer.equilibrium.mean_field import MeanField
from spinformer.equilibrium.steepest_descent import SteepestDescent
from spinformer.equilibrium.tap import TAP
from spinformer.errors import OnFailure, check_choice
from spinformer.solve.fixed_point import FixedPointSolver
from spinformer.spins.site import Ising, LargeDSphere, Radius, SiteLaw, Sphere

__all__ = [
    "APPROXIMATIONS",
    "Approximation",
    "check_approximation",
    "make_approximation",
    "make_site",
]

Approximation = MeanField | TAP | AdaptiveTAP | SteepestDescent
APPROXIMATIONS = ("mean_field", "tap", "adaptive_tap", "steepest_descent")

_ITERATED: dict[str, type[MeanField] | type[TAP] | type[AdaptiveTAP]] = {
    "mean_field": MeanField,
    "tap": TAP,
    "adaptive_tap": AdaptiveTAP,
}


def check_approximation(
    name: str,
    couplings: str,
    heads: str,
    steps: int | None,
    initial: str | Tensor | None,
    auxiliary: str,
) -> None:
    """Raise ``ValueError`` where an approximation cannot do what the other options ask for."""
    check_choice("approximation", name, APPROXIMATIONS)
    check_choice("auxiliary", auxiliary, ("site", "shared"))
    if auxiliary == "shared" and name != "steepest_descent":
        raise ValueError(
            f"approximation={name!r} with auxiliary='shared': the auxiliary variables are those of "
            "approximation='steepest_descent'; leave auxiliary='site' with any other"
        )
    if name == "mean_field":
        return
    if couplings == "softmax":
        raise ValueError(
            f"approximation={name!r} needs a free energy, and couplings='softmax' are asymmetric: "
            "use couplings='symmetric', 'linear' or 'fixed', or approximation='mean_field'"
        )
    refused = {
        "heads='mixed'": ("heads='split'", heads == "mixed"),
        f"steps={steps}": ("steps=None", steps is not None),
        # Its minimum is unique.
        "an initial state": ("initial=None", initial is not None and name == "steepest_descent"),
    }
    for given, (remedy, wrong) in refused.items():
        if wrong:
            raise ValueError(
                f"approximation={name!r} does not go with {given}: use {remedy}, or "
                "approximation='mean_field'"
            )


def make_approximation(
    name: str,
    solver: FixedPointSolver,
    damping: float,
    tolerance: float | None,
    max_iterations: int,
    auxiliary: Literal["site", "shared"],
    on_failure: OnFailure,
) -> Approximation:
    """The solver of that name with those of the options that it has."""
    if name == "steepest_descent":
        return SteepestDescent(
            auxiliary=auxiliary,
            tolerance=tolerance,
            max_iterations=max_iterations,
            on_failure=on_failure,
        )
    return _ITERATED[name](solver, damping, tolerance, max_iterations, on_failure)


def make_site(name: str, dim: int, radius: Radius, response: str) -> SiteLaw:
    """The law of the spins of a head of that dimension."""
    if dim == 1:
        if radius not in (None, 1, 1.0):
            raise ValueError(
                f"radius={radius!r}: heads of dimension 1 are Ising spins, of length 1"
            )
        return Ising()
    closed_form = response == "large_d" or name == "steepest_descent"
    return LargeDSphere(dim, radius) if closed_form else Sphere(dim, radius)
