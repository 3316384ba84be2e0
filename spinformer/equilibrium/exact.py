r"""Systems whose partition function is known: no approximation, to float64 rounding.

Everything is a function of :math:`K = \beta J` and :math:`b = \beta h` alone. A system falls apart
into the connected components of its bonds (the couplings that are not zero), and log Z is the sum
over them. With :math:`k = K R^2`, :math:`\nu = D/2 - 1` and the functions :math:`z_D, A_D` of
:mod:`spinformer.spins.special`:

===================================== ==========================================================
one spin in a field                   the site law's own log-partition
Ising spins, at most 20 of them       enumeration
spheres on a forest, no field         :math:`\log Z = \sum_{bonds} \log z_D(k)`,
                                      :math:`\langle S_i S_j\rangle = R^2 \prod_{path} A_D(k)`
spheres on a ring, no field           :math:`Z = \sum_\ell d_\ell \prod_{bonds} \lambda_\ell(k)`,
                                      :math:`\lambda_\ell = \Gamma(D/2) (2/k)^\nu I_{\nu+\ell}(k)`
two spheres in fields                 :math:`Z = \int d\Omega(u)\,
                                      e^{R b_1 u} z_D(R |b_2 + K R u|)`
Gaussian spins                        :math:`\log Z = -\frac D2 \log\det(1 - v K)
                                      + \frac v2\,\mathrm{tr}\, b^T (1 - v K)^{-1} b`
===================================== ==========================================================

The partition functions themselves stand in :mod:`spinformer.equilibrium.closed_forms`; here a
system is taken apart and put together again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.equilibrium.closed_forms import (
    Enumeration,
    Forest,
    Pair,
    Ring,
    gaussian,
)
from spinformer.errors import strict_options
from spinformer.solve.linear import symmetric_eigenvalues
from spinformer.solve.solution import Solution
from spinformer.spins.site import Gaussian, Ising, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import DerivedEquilibrium, Equilibrium, outside_inference_mode

__all__ = ["Exact", "components"]

# A piece of log Z: K (systems, N, N), b (systems, N, D) -> (systems,).
_Part = Callable[[Tensor, Tensor], Tensor]

_FIRST_POINTS, _MOST_POINTS = 16, 512


@strict_options
class Exact:
    r"""The equilibrium itself, where a closed form, an enumeration or a quadrature gives it.

    It solves: Ising spins up to ``max_enumerated`` of them per connected component, with any
    couplings and fields; spheres of any dimension on chains, trees and rings without fields;
    two coupled spheres in any fields; spins without couplings; any system whose connected
    components are of these kinds; and Gaussian spins in any number. It computes in float64 and
    returns the dtype of the system.

    Observables are derivatives of log Z and can be differentiated twice more, with one
    restriction: among spheres, and between the components of a system, a coupling that is zero is
    a missing bond. The first derivative of log Z (the correlation of that pair) is exact, but how
    correlations and susceptibilities change when a missing bond is opened is not seen: that
    derivative is returned as zero. Without fields, derivatives with respect to the field are
    exact to the third order of log Z (the susceptibility and its derivatives).

    Args:
        quadrature_points: points per axis for two spheres in fields; they are doubled once to
            verify the result. None: as many as the verification asks for, at most 512.
        tolerance: largest change of log Z, relative to 1 + \|log Z\|, when the points are
            doubled, and largest rounding error admitted in the alternating sum of a frustrated
            ring.
        max_enumerated: largest number of Ising spins to enumerate.

    The cost is :math:`2^N` per system for an enumeration, the square of the number of points
    (D = 2: the number itself) for a quadrature, :math:`N^3` otherwise, on dense couplings.

    Raises:
        ValueError: asymmetric couplings; a system outside the list above; Gaussian spins whose
            :math:`\beta J` has an eigenvalue of 1 / variance or more.
        ConvergenceError: a quadrature or a ring that does not reach the tolerance.
    """

    def __init__(
        self,
        *,
        quadrature_points: int | None = None,
        tolerance: float = 1e-12,
        max_enumerated: int = 20,
    ) -> None:
        if quadrature_points is not None and quadrature_points < 2:
            raise ValueError(f"quadrature_points={quadrature_points}: give 2 or more, or None")
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance={tolerance}: give a number between 0 and 1")
        if not 1 <= max_enumerated <= 26:
            raise ValueError(
                f"max_enumerated={max_enumerated}: give 1 ... 26 (26 spins have 7e7 states)"
            )
        self.quadrature_points = quadrature_points
        self.tolerance = tolerance
        self.max_enumerated = max_enumerated

    @outside_inference_mode
    def solve(self, system: SpinSystem, initial: Tensor | None = None) -> Equilibrium:
        """The exact equilibrium of every system of the batch.

        Args:
            system: symmetric couplings, any batch shape.
            initial: not used: nothing here iterates. It stands in the signature that all
                approximations share.
        """
        system.require_symmetric("Exact")
        if system.couplings.dim is not None:
            raise ValueError(
                f"Exact takes scalar couplings J (..., N, N), not {system.couplings!r}: use "
                "MeanField for matrix-valued ones"
            )
        shape = system.batch_shape
        with torch.no_grad():
            couplings, b = _dimensionless(
                system.couplings.to_dense(), system.field, system.beta, shape
            )
            groups = self._groups(system, couplings, b)
            error = couplings.new_zeros(len(couplings))
            doublings = torch.zeros(len(couplings), dtype=torch.int64, device=error.device)
            for group in groups:
                rows = group.rows
                error[rows], doublings[rows] = self._verify(group, couplings[rows], b[rows])
            value = _evaluate(groups, couplings, b)
        solution = Solution(
            value=value.reshape(shape).to(system.field.dtype),
            residual=error.reshape(shape).to(system.field.dtype),
            iterations=doublings.reshape(shape),
            converged=((error <= self.tolerance) & value.isfinite()).reshape(shape),
        )
        solution.check(
            "raise",
            "Exact",
            "For two spheres in fields raise quadrature_points or tolerance, or use "
            "SteepestDescent for so cold a pair; a residual that is not a number comes from the "
            "system.",
        )

        def log_partition(couplings: Tensor, field: Tensor, beta: Tensor) -> Tensor:
            value = _evaluate(groups, *_dimensionless(couplings, field, beta, shape))
            return value.reshape(shape).to(field.dtype)

        return DerivedEquilibrium(system, log_partition, solution)

    def _groups(self, system: SpinSystem, couplings: Tensor, b: Tensor) -> list[_Group]:
        """Systems of the same bonds, fields and absent sites, with the parts of their log Z."""
        count, num_spins = b.shape[:2]
        site = system.site
        everything = torch.arange(count, device=b.device)
        if count == 0 or num_spins == 0:
            return []
        if isinstance(site, Gaussian):
            site.check_stable(symmetric_eigenvalues(couplings)[..., -1])
            return [_Group(everything, [functools.partial(gaussian, variance=site.variance)])]
        if system.present is None:
            if isinstance(site, Ising) and num_spins <= self.max_enumerated:
                return [_Group(everything, [Enumeration(range(num_spins))])]
            present = torch.ones(count, num_spins, dtype=torch.bool, device=b.device)
        else:
            present = system.present.reshape(count, num_spins)
        pattern = torch.cat([(couplings != 0).flatten(1), (b != 0).any(-1), present], dim=1)
        kinds, member = pattern.unique(dim=0, return_inverse=True)
        groups = []
        for kind, flags in enumerate(kinds):
            bonds, fields, there = flags.split([num_spins**2, num_spins, num_spins])
            group = _Group(everything[member == kind], [])
            self._add_parts(group, site, bonds.view(num_spins, -1), fields, there)
            groups.append(group)
        return groups

    def _add_parts(
        self, group: _Group, site: SiteLaw, bonds: Tensor, fields: Tensor, present: Tensor
    ) -> None:
        sites = present.nonzero().flatten().tolist()
        if isinstance(site, Ising) and len(sites) <= self.max_enumerated:
            group.parts.append(Enumeration(sites))
            return
        neighbours = [row.nonzero().flatten().tolist() for row in bonds]
        label = torch.full(fields.shape, -1, device=fields.device)
        magnetized = torch.zeros_like(fields)
        singles = []
        for number, tree in enumerate(components(sites, neighbours)):
            inside = list(tree)
            label[inside] = number
            in_field = bool(fields[inside].any())
            magnetized[inside] = in_field
            if len(inside) == 1:
                singles += inside
            else:
                group.parts.append(self._part(site, tree, neighbours, in_field))
        if singles:
            group.parts.append(_Singles(site, singles))
        # Spins of different components are correlated by their mean values only.
        apart = (label[:, None] != label) & magnetized[:, None] & magnetized
        group.apart = apart if bool(apart.any()) else None

    def _part(
        self, site: SiteLaw, tree: dict[int, int], neighbours: list[list[int]], in_field: bool
    ) -> _Part:
        sites = list(tree)
        if isinstance(site, Ising) and len(sites) <= self.max_enumerated:
            return Enumeration(sites)
        if isinstance(site, Ising | Sphere) and not in_field:
            num_bonds = sum(len(neighbours[i]) for i in sites) // 2
            if num_bonds == len(sites) - 1:
                return Forest(site.dim, site.radius, tree)
            if all(len(neighbours[i]) == 2 for i in sites):
                return Ring(site.dim, site.radius, _around(sites[0], neighbours), self.tolerance)
        if isinstance(site, Sphere) and len(sites) == 2:
            return Pair(site.dim, site.radius, (sites[0], sites[1]))
        if not isinstance(site, Ising | Sphere):
            why = "whose response is an approximation itself"
        else:
            why = "in a field" if in_field else "on a graph with loops"
        raise ValueError(
            f"Exact cannot solve {len(sites)} coupled spins (sites {_listed(sites)}) of "
            f"{site!r} {why}. It solves Ising spins up to N = {self.max_enumerated} by "
            "enumeration, spheres without fields on chains, trees and rings, two spheres in "
            "fields, uncoupled spins and Gaussian spins. For this system use SteepestDescent "
            "(large D, strong coupling) or MeanField (weak or long-ranged coupling)."
        )

    def _verify(self, group: _Group, couplings: Tensor, b: Tensor) -> tuple[Tensor, int]:
        """Fix the quadratures of a group; change of log Z at the last doubling, per system."""
        worst, most = b.new_zeros(len(b)), 0
        for part in group.parts:
            if not isinstance(part, Pair):
                continue
            part.points = self.quadrature_points or _FIRST_POINTS
            fine, doublings, enough = part(couplings, b), 0, False
            while not enough:
                coarse = fine
                part.points *= 2
                doublings += 1
                fine = part(couplings, b)
                error = (fine - coarse).abs() / (1 + fine.abs())
                enough = (
                    bool((error <= self.tolerance).all())
                    or self.quadrature_points is not None
                    or part.points >= _MOST_POINTS
                )
            worst = torch.maximum(worst, error)
            most = max(most, doublings)
        return worst, most


# --- putting the parts together -----------------------------------------------------------------


@dataclass
class _Group:
    """Systems that share one structure."""

    rows: Tensor
    parts: list[_Part]
    apart: Tensor | None = None  # (N, N) pairs of different components, both in a field


def _dimensionless(
    couplings: Tensor, field: Tensor, beta: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """K and b in float64 with the batch axes flattened."""
    num_spins, dim = field.shape[-2:]
    scale = beta.double()[..., None, None]
    count = math.prod(shape)
    k = (scale * couplings.double()).expand(*shape, num_spins, num_spins)
    b = (scale * field.double()).expand(*shape, num_spins, dim)
    # An energy sees the symmetric part; so do its derivatives.
    k = (k + k.mT) / 2
    return k.reshape(count, num_spins, num_spins), b.reshape(count, num_spins, dim)


class _Singles:
    """Uncoupled spins of any law."""

    def __init__(self, site: SiteLaw, sites: list[int]) -> None:
        self.site, self.sites = site, sites

    def __call__(self, couplings: Tensor, b: Tensor) -> Tensor:
        return self.site.log_partition(b[:, self.sites]).sum(-1)


def _evaluate(groups: Sequence[_Group], couplings: Tensor, b: Tensor) -> Tensor:
    """log Z of every system. It depends on K and b also where nothing is left to sum over."""
    total = 0 * (couplings.sum((-1, -2)) + b.sum((-1, -2)))
    for group in groups:
        k, fields = couplings[group.rows], b[group.rows]
        # Independent components: d log Z / dK_ij = m_i . m_j. The term vanishes and only its
        # derivative counts, so that it is left out where no derivative is taken.
        apart = group.apart if torch.is_grad_enabled() and k.requires_grad else None
        if apart is not None and not fields.requires_grad:
            fields = fields.detach().requires_grad_()
        value = sum((part(k, fields) for part in group.parts), fields.new_zeros(len(fields)))
        if apart is not None:
            (m,) = torch.autograd.grad(value.sum(), fields, create_graph=True)
            value = value + (k * apart * (m @ m.mT)).sum((-1, -2)) / 2
        total = total.index_add(0, group.rows, value)
    return total


def components(sites: Sequence[int], neighbours: list[list[int]]) -> list[dict[int, int]]:
    """Connected components, each as {site: the neighbour it was reached from}, parents first."""
    seen: set[int] = set()
    found = []
    for start in sites:
        if start in seen:
            continue
        tree = {start: start}
        queue = [start]
        for here in queue:
            for there in neighbours[here]:
                if there not in tree:
                    tree[there] = here
                    queue.append(there)
        seen.update(tree)
        found.append(tree)
    return found


def _around(start: int, neighbours: list[list[int]]) -> list[int]:
    """The sites of a ring in order."""
    ring = [start, neighbours[start][0]]
    while True:
        left, right = neighbours[ring[-1]]
        ahead = right if left == ring[-2] else left
        if ahead == start:
            return ring
        ring.append(ahead)


def _listed(sites: Sequence[int]) -> str:
    shown = ", ".join(str(i) for i in sites[:8])
    return shown + (", ..." if len(sites) > 8 else "")
