"""Spin systems as physics, and as Transformer blocks.

A vector spin model takes token embeddings as external fields; its magnetization, the gradient of
its free energy, is the output of a block. Read from top to bottom: a system, what one spin is, who
is coupled to whom, the approximations that solve it, the samplers and dynamics that judge them,
what they return, and what can go wrong. The moves of samplers are in :mod:`spinformer.sampling`,
the blocks in :mod:`spinformer.nn`.
"""

from spinformer.spins import couplings
from spinformer.spins.couplings import Couplings
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem

from spinformer.equilibrium.exact import Exact
from spinformer.equilibrium.mean_field import MeanField
from spinformer.equilibrium.tap import TAP
from spinformer.equilibrium.adaptive_tap import AdaptiveTAP
from spinformer.equilibrium.bethe import Bethe
from spinformer.equilibrium.steepest_descent import SteepestDescent
from spinformer.equilibrium.search import LowestFreeEnergy
from spinformer.equilibrium.field_density import FieldDensity
from spinformer.sampling.monte_carlo import MonteCarlo
from spinformer.sampling.tempering import ParallelTempering
from spinformer.sampling.annealing import SimulatedAnnealing
from spinformer.sampling.free_energy import MultiHistogram, ThermodynamicIntegration
from spinformer.sampling.sampled import SampledEquilibrium
from spinformer.dynamics.parallel import ParallelDynamics
from spinformer.dynamics.kinetic import KineticMeanField, KineticTAP
from spinformer.dynamics.landau_lifshitz import LandauLifshitz
from spinformer.thermo.equilibrium import Equilibrium
from spinformer.solve.solution import Solution

from spinformer.errors import (
    ConvergenceError,
    ConvergenceWarning,
    NotSampledError,
    SpinformerError,
)

__version__ = "0.1.0"

__all__ = [
    "TAP",
    "AdaptiveTAP",
    "Bethe",
    "ConvergenceError",
    "ConvergenceWarning",
    "Couplings",
    "Equilibrium",
    "Exact",
    "FieldDensity",
    "Gaussian",
    "Ising",
    "KineticMeanField",
    "KineticTAP",
    "LandauLifshitz",
    "LargeDSphere",
    "LowestFreeEnergy",
    "MeanField",
    "MonteCarlo",
    "MultiHistogram",
    "NotSampledError",
    "ParallelDynamics",
    "ParallelTempering",
    "SampledEquilibrium",
    "SimulatedAnnealing",
    "SiteLaw",
    "Solution",
    "Sphere",
    "SpinSystem",
    "SpinformerError",
    "SteepestDescent",
    "ThermodynamicIntegration",
    "couplings",
]
