r"""Naive mean field: every spin in the average force of the others.

.. math::
    m_i = \langle S\rangle_{b_i},\quad b_i = \beta\Big(h_i + \sum_{j\ne i} J_{ij} m_j\Big),\qquad
    \log Z_{\rm MF} = \sum_i \log z(b_i) - \tfrac\beta2 \sum_{ij} m_i\cdot J_{ij} m_j .

For symmetric couplings this maximizes the Gibbs-Bogoliubov lower bound of log Z; its error is of
second order in J. For asymmetric ones the same map has a fixed point, a nonequilibrium steady
state, and no free energy. The map contracts if :math:`\beta \lVert J\rVert_2 R^2/D < 1`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spinformer.equilibrium.iteration import check_initial, refuse_overflow, within_rounding
from spinformer.errors import OnFailure, strict_options
from spinformer.solve.fixed_point import FixedPoint, FixedPointSolver
from spinformer.solve.linear import eigenvalues, solve_each
from spinformer.solve.solution import Solution
from spinformer.spins.couplings import Couplings
from spinformer.spins.site import Gaussian, SiteLaw
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import Equilibrium, in_solving_mode, observable

__all__ = [
    "MeanField",
    "MeanFieldEquilibrium",
    "mean_field_map",
]


def mean_field_map(site: SiteLaw, couplings: Couplings) -> Callable[..., Tensor]:
    """The map m -> <S> in the force of m, as ``f(m, field, beta, *couplings.tensors())``.

    All that it depends on is an explicit argument, as implicit differentiation needs. ``beta``
    broadcasts against (..., N, D).
    """

    def step(m: Tensor, field: Tensor, beta: Tensor, *tensors: Tensor) -> Tensor:
        return site.mean(beta * (field + couplings.with_tensors(*tensors).apply(m)))

    return step


@strict_options
class MeanField:
    r"""Naive mean field of a :class:`~spinformer.SpinSystem`, by fixed-point iteration.

    Args:
        solver: ``"plain"``, ``"anderson"`` or ``"broyden"``
            (:class:`~spinformer.solve.fixed_point.FixedPoint`).
        damping: step in (0, 1]; below 1 for antiferromagnets and other oscillating maps.
        tolerance: residual max \|f(m) - m\| in units of R / sqrt(D), the natural size of one
            component; None is 1e-10 in float64 and 1e-5 in float32.
        max_iterations: evaluations of the map.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"``.

    Cost: one product with J an iteration.
    """

    def __init__(
        self,
        solver: FixedPointSolver = "plain",
        damping: float = 1.0,
        tolerance: float | None = None,
        max_iterations: int = 1000,
        on_failure: OnFailure = "raise",
    ) -> None:
        self.fixed_point = FixedPoint(solver, damping, tolerance, max_iterations, on_failure)

    def solve(self, system: SpinSystem, initial: Tensor | None = None) -> MeanFieldEquilibrium:
        """Solve the mean-field equations.

        Args:
            system: any couplings and site law; ``Gaussian`` needs ``beta v lambda_max(J) < 1``.
            initial: magnetizations (..., N, D) to start from; None is the answer without couplings.
                At zero field that is m = 0, which is a solution at every temperature and an
                unstable one in an ordered phase: look at
                :attr:`MeanFieldEquilibrium.is_stable`, or start from an ordered state.

        Raises:
            ConvergenceError: with ``on_failure="raise"``.
            ValueError: Gaussian spins beyond their stability limit.
        """
        if isinstance(system.site, Gaussian) and system.couplings.is_symmetric:
            system.site.check_stable(system.beta * system.couplings.largest_eigenvalue())
        options = within_rounding(self.fixed_point, system)
        if initial is not None:
            initial = check_initial(initial, system)
        solution, broken = _iterate(system, initial, options), None
        lost = ~torch.isfinite(solution.residual)
        if bool(lost.any()):
            system, broken = system.isolated(lost)
            if initial is not None:
                initial = torch.where(lost[..., None, None], 0.0, initial)
            solution = _iterate(system, initial, options)
        equilibrium = MeanFieldEquilibrium(system, solution, broken)
        options.check(equilibrium.solution)
        return equilibrium


def _iterate(system: SpinSystem, initial: Tensor | None, options: FixedPoint) -> Solution:
    beta = system.beta[..., None, None]
    with torch.no_grad():  # a solution forgets where it was looked for
        start = system.site.mean(beta * system.field) if initial is None else initial
    solution = options.solve(
        mean_field_map(system.site, system.couplings),
        start,
        (system.field, beta, *system.couplings.tensors()),
        scale=system.site.scale,
        check=False,
        linearize=_linearization(system.site, system.couplings),
    )
    if not bool((beta > torch.finfo(beta.dtype).max ** 0.25).any()):
        return solution
    with torch.no_grad():
        return refuse_overflow(solution, beta * system.force(solution.value))


def _linearization(site: SiteLaw, couplings: Couplings) -> Callable[..., Any]:
    """The value of the mean-field map and the map u -> J^T (beta C u), with C and J^T made once."""

    def linearize(
        m: Tensor, field: Tensor, beta: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        made = couplings.with_tensors(*tensors)
        total = beta * (field + made.apply(m))
        with torch.no_grad():
            transposed = couplings.with_tensors(*(t.detach() for t in tensors)).transpose()
        value = site.mean(total)

        def product(u: Tensor) -> Tensor:
            # C is symmetric.
            (answer,) = torch.autograd.grad(value, total, u, retain_graph=True)
            return transposed.apply(beta.detach() * answer)

        return value, product

    return linearize


class MeanFieldEquilibrium(Equilibrium):
    """Mean-field magnetizations and the thermodynamics of their variational free energy.

    Free energy, energy, entropy and specific heat need symmetric couplings and raise ``ValueError``
    without; magnetization and susceptibility, the response of the fixed point, don't.
    """

    @property
    @observable
    def magnetization(self) -> Tensor:
        return self.solution.value

    @cached_property
    @in_solving_mode
    def _field(self) -> Tensor:
        """Total dimensionless field b on every spin."""
        system = self.system
        return system.beta[..., None, None] * system.force(self.magnetization)

    @cached_property
    @in_solving_mode
    def _pair_energy(self) -> Tensor:
        m = self.magnetization
        return -(m * self.system.couplings.apply(m)).sum((-2, -1)) / 2

    @property
    @observable
    def log_partition(self) -> Tensor:
        self.system.require_symmetric("The mean-field free energy")
        one_spin = self.system.site.log_partition(self._field).sum(-1)
        return one_spin + self.system.beta * self._pair_energy

    @property
    @observable
    def internal_energy(self) -> Tensor:
        self.system.require_symmetric("The mean-field energy")
        return self._pair_energy - (self.system.field * self.magnetization).sum((-2, -1))

    @observable
    def specific_heat(self) -> Tensor:
        self.system.require_symmetric("The mean-field specific heat")
        force = self.system.force(self.magnetization)
        heat = (force * self.susceptibility_product(force)).sum((-2, -1))
        return self.system.beta * heat

    @cached_property
    @in_solving_mode
    def _covariance(self) -> Tensor:
        """Covariance of every spin in its field (..., N, D, D), zero at absent sites."""
        covariance = self.system.site.covariance(self._field)
        if self.system.present is not None:
            covariance = covariance * self.system.present[..., None, None]
        return covariance

    @cached_property
    @in_solving_mode
    def _jacobian(self) -> Tensor:
        """df/dm = beta C J as (..., N D, N D)."""
        dense = self.system.couplings.to_dense()
        n, d = self.magnetization.shape[-2:]
        if self.system.couplings.dim is None:
            product = torch.einsum("...iab,...ij->...iajb", self._covariance, dense)
        else:
            product = torch.einsum("...iac,...ijcb->...iajb", self._covariance, dense)
        product = self.system.beta[..., None, None, None, None] * product
        return product.reshape(*self.system.batch_shape, n * d, n * d)

    def _susceptibility(self) -> Tensor:
        r""":math:`\chi = \beta (1 - \beta C J)^{-1} C` with C the covariances of the single spins.

        O((N D)^3) a system.
        """
        n, d = self.magnetization.shape[-2:]
        batch = self.system.batch_shape
        blocks = torch.eye(n, dtype=self._covariance.dtype, device=self._covariance.device)
        covariance = torch.einsum("...iab,ij->...iajb", self._covariance, blocks)
        right = (self.system.beta[..., None, None, None, None] * covariance).reshape(
            *batch, n * d, n * d
        )
        left = torch.eye(n * d, dtype=right.dtype, device=right.device) - self._jacobian
        return solve_each(left, right).reshape(*batch, n, d, n, d)

    def _susceptibility_product(self, vector: Tensor) -> Tensor:
        r""":math:`\chi v`, the solution u of :math:`u = \beta C (J u + v)`.

        From the dense :math:`\chi` up to N D = 512; beyond, by Anderson mixing to a relative
        residual of 1e-10 in float64 and 1e-5 in float32, one product with J an iteration.

        Raises:
            ConvergenceError: the iteration fails, as it may at an unstable solution.
        """
        if self._is_small:
            return self._dense_product(vector)
        return self._iterated_product(vector)

    def _iterated_product(self, vector: Tensor) -> Tensor:
        """chi v for v (..., N, D), which may have more leading axes than the system."""
        couplings = self.system.couplings
        size = vector.detach().abs().amax((-2, -1), keepdim=True)
        size = torch.where(size > 0, size, 1.0)

        def respond(u: Tensor, covariance: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
            force = couplings.with_tensors(*tensors).apply(u) + v
            return (covariance @ force[..., None])[..., 0]

        weighted = self.system.beta[..., None, None, None] * self._covariance
        inputs = (weighted, vector / size, *couplings.tensors())
        # In units of the response without couplings.
        betas = self.system.beta.detach()
        unit = float(betas.min()) * self.system.site.scale**2 if betas.numel() else 1.0
        solver = FixedPoint("anderson")
        return size * solver.solve(respond, torch.zeros_like(vector), inputs, scale=unit).value

    def _linear_response_correlations(self) -> Tensor:
        m = self.magnetization
        return m @ m.mT + self._trace_of_chi() / self.system.beta[..., None, None]

    def _trace_of_chi(self) -> Tensor:
        if self._is_small:
            return super()._trace_of_chi()
        n, d = self.magnetization.shape[-2:]
        batch = self.system.batch_shape
        # All sites j at once, one component after the other: N^2 D numbers, not N^2 D^2.
        identity = torch.eye(n, dtype=self.magnetization.dtype, device=self.magnetization.device)
        pushes = identity.reshape(n, *[1] * len(batch), n).expand(n, *batch, n)
        total = identity.new_zeros(n, *batch, n)
        for a in range(d):
            vectors = torch.zeros_like(pushes)[..., None].repeat_interleave(d, -1)
            vectors[..., a] = pushes
            total = total + self._iterated_product(vectors)[..., a]
        return total.movedim(0, -1)

    def _coupling_correlations(self) -> Tensor:
        self.system.require_symmetric("The derivative of the mean-field free energy in J")
        return self.magnetization @ self.magnetization.mT

    @observable
    def stability(self) -> Tensor:
        r"""Smallest real part of the eigenvalues of :math:`1 - \partial f/\partial m`, (...).

        Positive: small deviations decay under the (sufficiently damped) map, and for symmetric
        couplings the solution is a minimum of the mean-field free energy. Negative: a saddle or a
        maximum. Zero: a mode without restoring force, as the rotations of an ordered state.
        O((N D)^3) a system.
        """
        return 1 - self._multipliers.real.amax(-1) if self.system.num_spins else self._none(1.0)

    @observable
    def spectral_radius(self) -> Tensor:
        r"""Largest modulus of the eigenvalues of :math:`\partial f/\partial m`, (...).

        Below one, the undamped map returns from small deviations, shrinking them by this factor an
        iteration. O((N D)^3) a system.
        """
        return self._multipliers.abs().amax(-1) if self.system.num_spins else self._none(0.0)

    @cached_property
    def _multipliers(self) -> Tensor:
        # A batch of nonsymmetric eigenvalue problems; the spectrum is real where J is symmetric.
        return eigenvalues(self._jacobian.detach())

    def _none(self, value: float) -> Tensor:
        """What a system without sites has."""
        return torch.full_like(self.system.beta, value)
