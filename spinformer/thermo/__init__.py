"""Results of approximations: :class:`Equilibrium` and what follows from a free energy."""

from spinformer.thermo.equilibrium import CorrelationMethod, DerivedEquilibrium, Equilibrium

__all__ = ["CorrelationMethod", "DerivedEquilibrium", "Equilibrium"]
