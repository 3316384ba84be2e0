"""Monte Carlo: the ground truth, with error bars.

A run (:class:`MonteCarlo`) moves chains by one or several moves and returns what it saw
(:class:`SampledEquilibrium`). Read from top to bottom: a run and its relatives for many valleys,
for ground states and for free energies; the moves; what a move of your own is made of.
"""

from spinformer.sampling.monte_carlo import MonteCarlo
from spinformer.sampling.sampled import Diagnostics, Reweighted, SampledEquilibrium
from spinformer.sampling.tempering import (
    ParallelTempering,
    ReplicaExchange,
    SwapStatistics,
    swap_statistics,
)
from spinformer.sampling.overlap import OverlapDistribution, ReplicaOverlaps
from spinformer.sampling.annealing import AnnealingResult, SimulatedAnnealing, quench
from spinformer.sampling.free_energy import (
    FreeEnergyEstimate,
    MultiHistogram,
    ThermodynamicIntegration,
)
from spinformer.sampling.local import HeatBath, Metropolis, OverRelaxation
from spinformer.sampling.cluster import SwendsenWang, Wolff
from spinformer.sampling.hamiltonian import Hamiltonian
from spinformer.sampling.chains import Chains, Kernel, Move

__all__ = [
    # a run, and what it saw
    "MonteCarlo",
    "SampledEquilibrium",
    "Diagnostics",
    "Reweighted",
    # many valleys
    "ParallelTempering",
    "ReplicaExchange",
    "SwapStatistics",
    "swap_statistics",
    "ReplicaOverlaps",
    "OverlapDistribution",
    # ground states
    "SimulatedAnnealing",
    "AnnealingResult",
    "quench",
    # free energies
    "ThermodynamicIntegration",
    "MultiHistogram",
    "FreeEnergyEstimate",
    # moves
    "HeatBath",
    "OverRelaxation",
    "Metropolis",
    "SwendsenWang",
    "Wolff",
    "Hamiltonian",
    # what moves are made of
    "Move",
    "Kernel",
    "Chains",
]
