"""Dynamics of spins: how a system comes to its equilibrium, or to a steady state that is none.

Parallel dynamics, in which all spins answer at once to the forces of the last step as the tokens of
a Transformer do: sampled, exact for few Ising spins, and its kinetic mean field and TAP equations.
And Landau and Lifshitz' precession of spins of three components in continuous time.
"""

from spinformer.dynamics.entropy_production import entropy_flow, peretto_log_weight
from spinformer.dynamics.exact_chain import ExactDynamics
from spinformer.dynamics.kinetic import KineticMeanField, KineticTAP
from spinformer.dynamics.landau_lifshitz import LandauLifshitz, Trajectory
from spinformer.dynamics.parallel import ParallelDynamics, SampledSteadyState, SampledTransient
from spinformer.dynamics.protocol import triangle_wave

__all__ = [
    "ExactDynamics",
    "KineticMeanField",
    "KineticTAP",
    "LandauLifshitz",
    "ParallelDynamics",
    "SampledSteadyState",
    "SampledTransient",
    "Trajectory",
    "entropy_flow",
    "peretto_log_weight",
    "triangle_wave",
]
