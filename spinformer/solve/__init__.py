"""Numerics that know no spins: fixed points, Newton in a cone, implicit differentiation."""

from spinformer.solve.fixed_point import FixedPoint, FixedPointSolver, unroll
from spinformer.solve.implicit import envelope, implicit
from spinformer.solve.solution import Solution

__all__ = ["FixedPoint", "FixedPointSolver", "Solution", "envelope", "implicit", "unroll"]
