"""Approximations of a spin system's free energy, each ``X(...).solve(system) -> Equilibrium``."""

from spinformer.equilibrium.adaptive_tap import AdaptiveTAP, AdaptiveTAPEquilibrium
from spinformer.equilibrium.bethe import Bethe, BetheEquilibrium
from spinformer.equilibrium.exact import Exact
from spinformer.equilibrium.field_density import FieldDensity, LogNormalizer
from spinformer.equilibrium.inverse import (
    field_moments,
    fit_fields,
    fit_moments,
    mean_field_inversion,
    pair_inversion,
    spin_moments,
    tap_inversion,
)
from spinformer.equilibrium.mean_field import MeanField, MeanFieldEquilibrium
from spinformer.equilibrium.search import Candidates, LowestFreeEnergy
from spinformer.equilibrium.steepest_descent import SteepestDescent, SteepestDescentEquilibrium
from spinformer.equilibrium.tap import TAP, TAPEquilibrium

__all__ = [
    "TAP",
    "AdaptiveTAP",
    "AdaptiveTAPEquilibrium",
    "Bethe",
    "BetheEquilibrium",
    "Candidates",
    "Exact",
    "FieldDensity",
    "LogNormalizer",
    "LowestFreeEnergy",
    "MeanField",
    "MeanFieldEquilibrium",
    "SteepestDescent",
    "SteepestDescentEquilibrium",
    "TAPEquilibrium",
    "field_moments",
    "fit_fields",
    "fit_moments",
    "mean_field_inversion",
    "pair_inversion",
    "spin_moments",
    "tap_inversion",
]
