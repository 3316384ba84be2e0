"""Results of approximations: :class:`Equilibrium` and what follows from a free energy."""

from spinformer.thermo.equilibrium import (
    CorrelationMethod,
    DerivedEquilibrium,
    Equilibrium,
    in_solving_mode,
    observable,
    outside_inference_mode,
)

__all__ = [
    "CorrelationMethod",
    "DerivedEquilibrium",
    "Equilibrium",
    "in_solving_mode",
    "observable",
    "outside_inference_mode",
]
