"""Explicit energies, and the steps that descend them.

An :class:`Energy` has ``energy(Y)`` (one number a system), ``gradient(Y)``, ``curvature(Y)`` and
``hessian_bounds(count)``, its own ``step(Y, size)`` and ``step_bound()``, the largest size at which
that step is proven not to raise that energy. Energies add up: ``f + g``. An :class:`Algorithm`
makes steps of an energy or a sum, and :func:`descend` reports what they did and what was known.
"""

from spinformer.descent.activation import ACTIVATIONS, Activation, NumericActivation
from spinformer.descent.algorithms import (
    AIM,
    Algorithm,
    Backtracking,
    Gradient,
    MajorizeMinimize,
    ProximalAIM,
)
from spinformer.descent.asymmetric import (
    AsymmetricAttention,
    Split,
    SymmetricEmbedding,
    TiedEnergy,
    curl_share,
    jacobian,
    symmetric_embedding,
)
from spinformer.descent.constrained import ProximalBacktracking, ProximalGradient, SphereStep
from spinformer.descent.energy import Energy, SumEnergy
from spinformer.descent.energy_transformer import (
    EnergyAttention,
    EnergyHopfield,
    EnergyLayerNorm,
    EnergyTransformer,
    EnergyTransformerStep,
)
from spinformer.descent.feed_forward import FeedForwardEnergy, MemoryEnergy, QuadraticEnergy
from spinformer.descent.graph import GraphEnergy
from spinformer.descent.guarantees import (
    Ball,
    aim_bound,
    apollonius,
    gradient_ratio,
    proximal_bound,
    proximal_deficit,
    proximal_kappa,
)
from spinformer.descent.hopfield import (
    Capacity,
    HopfieldEnergy,
    Retrieval,
    retrieval,
    separation,
    storage_capacity,
)
from spinformer.descent.network import NetworkEnergy
from spinformer.descent.pairwise import Kernel, PairwiseEnergy
from spinformer.descent.proximal import PROXES, Proximal, prox_nonnegative
from spinformer.descent.report import Constants, DescentReport, Verdict, descend, monitor
from spinformer.descent.rho import RHOS, Rho

__all__ = [
    # what an energy is
    "Energy",
    "SumEnergy",
    # tokens among each other
    "PairwiseEnergy",
    "Kernel",
    "Rho",
    "RHOS",
    "GraphEnergy",
    # each token by itself
    "FeedForwardEnergy",
    "MemoryEnergy",
    "QuadraticEnergy",
    "NetworkEnergy",
    "HopfieldEnergy",
    "Capacity",
    "Retrieval",
    "retrieval",
    "separation",
    "storage_capacity",
    # the Energy Transformer
    "EnergyTransformer",
    "EnergyTransformerStep",
    "EnergyAttention",
    "EnergyHopfield",
    "EnergyLayerNorm",
    # activations and proximal maps
    "Activation",
    "NumericActivation",
    "ACTIVATIONS",
    "Proximal",
    "PROXES",
    "prox_nonnegative",
    # algorithms, and what is known of them
    "Algorithm",
    "Gradient",
    "MajorizeMinimize",
    "AIM",
    "ProximalAIM",
    "ProximalGradient",
    "Backtracking",
    "ProximalBacktracking",
    "SphereStep",
    "descend",
    "monitor",
    "DescentReport",
    "Verdict",
    "Constants",
    "aim_bound",
    "proximal_bound",
    "gradient_ratio",
    "proximal_deficit",
    "proximal_kappa",
    "apollonius",
    "Ball",
    # attention that descends nothing
    "AsymmetricAttention",
    "Split",
    "SymmetricEmbedding",
    "symmetric_embedding",
    "TiedEnergy",
    "curl_share",
    "jacobian",
]
