"""Explicit energies, and the steps that descend them.

An energy has ``energy(Y)`` (one number a system), ``gradient(Y)``, ``step(Y, size)`` and
``step_bound()``, the largest size at which that step is proven not to raise that energy.
"""

from spinformer.descent.feed_forward import FeedForwardEnergy, MemoryEnergy
from spinformer.descent.pairwise import Kernel, PairwiseEnergy
from spinformer.descent.proximal import prox_nonnegative
from spinformer.descent.rho import RHOS, Rho

__all__ = [
    "PairwiseEnergy",
    "Kernel",
    "Rho",
    "RHOS",
    "FeedForwardEnergy",
    "MemoryEnergy",
    "prox_nonnegative",
]
