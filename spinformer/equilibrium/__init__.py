"""Approximations of a spin system's free energy, each ``X(...).solve(system) -> Equilibrium``."""

from spinformer.equilibrium.exact import Exact
from spinformer.equilibrium.mean_field import MeanField, MeanFieldEquilibrium
from spinformer.equilibrium.steepest_descent import SteepestDescent

__all__ = ["Exact", "MeanField", "MeanFieldEquilibrium", "SteepestDescent"]
