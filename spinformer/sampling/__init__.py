"""Monte Carlo: the ground truth, with error bars.

A run (:class:`MonteCarlo`) moves chains by one or several moves and returns what it saw
(:class:`SampledEquilibrium`).
"""

from spinformer.sampling.chains import Chains, Kernel, Move
from spinformer.sampling.local import HeatBath, Metropolis, OverRelaxation
from spinformer.sampling.monte_carlo import MonteCarlo
from spinformer.sampling.sampled import Diagnostics, Reweighted, SampledEquilibrium

__all__ = [
    # a run, and what it saw
    "MonteCarlo",
    "SampledEquilibrium",
    "Diagnostics",
    "Reweighted",
    # moves
    "HeatBath",
    "Metropolis",
    "OverRelaxation",
    # what moves are made of
    "Move",
    "Kernel",
    "Chains",
]
