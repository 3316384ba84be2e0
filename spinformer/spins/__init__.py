"""The physics that knows no solver: systems, couplings, and one spin in a field."""

from spinformer.spins import couplings, special
from spinformer.spins.couplings import Couplings
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

__all__ = [
    "Couplings",
    "Gaussian",
    "Ising",
    "LargeDSphere",
    "SiteLaw",
    "Sphere",
    "SpinSystem",
    "couplings",
    "special",
]
