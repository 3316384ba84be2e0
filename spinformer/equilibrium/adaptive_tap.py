r"""Adaptive TAP: every spin in a Gaussian cavity whose variance is found from consistency.

With :math:`K = \beta J`, a site feels the mean of its cavity field and fluctuations of it of one
isotropic variance :math:`V_i`, which is not expanded in J but adapted to it. The spin alone, with
weight :math:`\exp(b_i\cdot S + V_i |S|^2/2)` under its free law, and the Gaussian model with
covariance :math:`A = (\operatorname{diag}\Lambda - K)^{-1}` must agree in their first two moments:

.. math::
    b_i = \beta h_i + \sum_j K_{ij} m_j - V_i m_i,\qquad m_i = \langle S\rangle_{b_i, V_i},

    \chi_i = \tfrac1D\big(\langle|S|^2\rangle_{b_i,V_i} - |m_i|^2\big)
           = \big[(\operatorname{diag}\Lambda - K)^{-1}\big]_{ii},\qquad
    \Lambda_i = V_i + 1/\chi_i .

V is a variance of dimensionless fields: it carries both factors of :math:`\beta`, and to second
order in J it is TAP's :math:`\sum_j K_{ij}^2 \chi_j`. The free energy is

.. math::
    \log Z = \sum_i \log z(b_i, V_i) - \tfrac12 \sum_{ij} K_{ij}\, m_i\cdot m_j
        + \tfrac12 \sum_i V_i |m_i|^2 - \tfrac D2 \log\det(\operatorname{diag}\Lambda - K)
        + \tfrac D2 \sum_i \log(\Lambda_i - V_i),

stationary in m, V and :math:`\Lambda` at the solution, so that
:math:`\partial \log Z/\partial(\beta h_i) = m_i` and
:math:`\tfrac2\beta\, \partial \log Z/\partial J_{ij} = m_i\cdot m_j + D A_{ij}`, J kept symmetric.
On spheres the extra weight is the constant :math:`V R^2/2`.

What is exact, and what is not:

* ``Gaussian``: everything; :math:`\Lambda = 1/v`. With matrix-valued couplings the cavity variances
  are matrices, :math:`V_i = 1/v - (A_{ii})^{-1}`.
* ``Ising`` and, without fields, spheres: errors of log Z are O(J^3) in fields and O(J^4) without.
* Spheres in fields: a covariance :math:`C_i = \chi_i 1 + Q_i` is not isotropic, and log Z lacks
  :math:`\tfrac14\sum_{ij}K_{ij}^2 \operatorname{tr} Q_i Q_j`: errors are of second order, though
  far smaller than mean field's.
* ``LargeDSphere``: its :math:`\chi` is :math:`(R^2 - |m|^2)/D` and :math:`V = \Lambda - D/(R^2 -
  |m|^2)`, which turns the equations into steepest descent (SD0): the two agree in every quantity,
  and at m = 0 any sphere does.

Sources: Opper & Winther 2001, Phys. Rev. Lett. 86, 3695 and Phys. Rev. E 64, 056131; 2005, J. Mach.
Learn. Res. 6, 2177 (expectation consistency).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spinformer.equilibrium.closed_forms import gaussian
from spinformer.equilibrium.iteration import check_initial, refuse_overflow, within_rounding
from spinformer.equilibrium.mean_field import mean_field_map
from spinformer.errors import OnFailure, strict_options
from spinformer.solve.fixed_point import FixedPoint, FixedPointSolver
from spinformer.solve.implicit import envelope
from spinformer.solve.linear import solve_each, symmetric_eigenvalues
from spinformer.solve.newton import minimize_in_cone
from spinformer.solve.positive import cholesky_inverse, known_inverse, known_log_det
from spinformer.solve.solution import Solution
from spinformer.spins.couplings.entries import flatten_blocks
from spinformer.spins.site import Gaussian, LargeDSphere, SiteLaw
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import (
    DerivedEquilibrium,
    in_solving_mode,
    observable,
    outside_inference_mode,
)

__all__ = ["AdaptiveTAP", "AdaptiveTAPEquilibrium", "MatrixGaussianEquilibrium"]

# Of the constraint A_ii = chi_i where an iterate is brought back into the cone: it only has to be
# a good place to go on from.
_RETURN_TOLERANCE = 1e-6


@strict_options
class AdaptiveTAP:
    r"""The adaptive TAP equations of a :class:`~spinformer.SpinSystem` with symmetric couplings.

    To be preferred to TAP where couplings are not many, weak and unrelated: Hopfield patterns, low
    rank, lattices. An iteration is one parallel sweep of expectation propagation: the Gaussian
    model is solved for the current sites, the sites for the cavities that it gives. An iterate
    whose :math:`\operatorname{diag}\Lambda - K` is not positive definite is given the
    :math:`\Lambda` that solves :math:`A_{ii} = \chi_i` first, a convex problem
    (:func:`~spinformer.solve.newton.minimize_in_cone`).

    Args:
        solver: ``"anderson"``, ``"plain"`` or ``"broyden"``
            (:class:`~spinformer.solve.fixed_point.FixedPoint`). Plain sweeps oscillate where
            :math:`\sum_j A_{ij}^2 > 2 A_{ii}^2`, as near a spin-glass transition; Anderson mixing
            takes 5 to 20 iterations above transitions and up to a hundred below.
        damping: step in (0, 1].
        tolerance: residual, the largest change by one more iteration of a component of m, in units
            of R / sqrt(D), or of V, in units of :math:`(D/R^2)\,(1 + \sum_j k_{ij}^2)^{1/2}` with
            :math:`k = K R^2/D`; None is 1e-10 in float64 and 1e-5 in float32.
        max_iterations: evaluations of the map.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"``.

    Cost: an iteration takes one Cholesky factorization of N x N, one triangular solve with N
    columns and three products of J with m: 4/3 N^3 + 8 N^2 D operations, memory O(N^2 + N D).
    The backward pass adds one inverse and iterations of O(N^2 D). Matrix-valued couplings: one
    product with J an iteration for the magnetization, and one factorization, O((N D)^3), for all
    else.
    """

    def __init__(
        self,
        solver: FixedPointSolver = "anderson",
        damping: float = 1.0,
        tolerance: float | None = None,
        max_iterations: int = 500,
        on_failure: OnFailure = "raise",
    ) -> None:
        self.fixed_point = FixedPoint(solver, damping, tolerance, max_iterations, on_failure)

    @outside_inference_mode
    def solve(
        self, system: SpinSystem, initial: Tensor | None = None
    ) -> AdaptiveTAPEquilibrium | MatrixGaussianEquilibrium:
        """Solve the adaptive TAP equations.

        Args:
            system: symmetric couplings and any site law; ``Gaussian`` needs ``beta v
                lambda_max(J) < 1``, and only ``Gaussian`` takes matrix-valued couplings.
            initial: magnetizations (..., N, D) to start from; None is the answer without couplings.
                At zero field m = 0 is a solution at every temperature, and a locally stable one
                also below a transition: start from ordered states too, and take the solution with
                the lowest free energy.

        Raises:
            ConvergenceError: with ``on_failure="raise"``.
            ValueError: asymmetric couplings; matrix-valued ones of other spins than Gaussian;
                Gaussian spins beyond their stability limit.
        """
        system.require_symmetric("Adaptive TAP")
        matrix_valued = system.couplings.dim is not None
        if isinstance(system.site, Gaussian):
            system.site.check_stable(system.beta * system.couplings.largest_eigenvalue())
        elif matrix_valued:
            raise ValueError(
                "adaptive TAP takes matrix-valued couplings between Gaussian spins only, where it "
                f"is exact, and these are {system.site!r}: use MeanField(), or scalar couplings"
            )
        options = within_rounding(self.fixed_point, system)
        start = None if initial is None else check_initial(initial, system)
        kind = _MatrixGaussian if matrix_valued else _Cavities
        equations, broken = kind(system, options), None
        solution = equations.iterate(start)
        # Infinity is the residual of a last state outside the cone: a failure, but an answer.
        lost = solution.residual.isnan()
        if bool(lost.any()):
            # Given broken, or finite and too large for beta J to be.
            system, broken = system.isolated(lost)
            equations = kind(system, options, broken)
            solution = equations.iterate(start)
        answer = MatrixGaussianEquilibrium if matrix_valued else AdaptiveTAPEquilibrium
        equilibrium = answer(system, equations, solution, broken)  # type: ignore[arg-type]
        equilibrium.solution.check(
            options.on_failure,
            "the adaptive TAP iteration",
            "Lower damping (to 0.5), raise max_iterations, raise the temperature, or start from "
            "the magnetizations of a warmer solution.",
        )
        return equilibrium


# -- scalar couplings -----------------------------------------------------------------------------


class _Law:
    """A site law with its weight of |S|^2, in units where a component of a free spin has variance
    one: S = s x with s the root mean square of a component, b and V times s and s^2."""

    def __init__(self, site: SiteLaw) -> None:
        self.site, self.dim, self.scale = site, site.dim, site.scale

    def moments(self, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """m (..., N, D) and chi (..., N)."""
        if isinstance(self.site, Gaussian):
            chi = 1 / (1 - v)
            return chi[..., None] * b, chi
        mean = self.site.mean(b / self.scale) / self.scale
        with torch.no_grad():
            across, along = self.site.response(b / self.scale)
            if isinstance(self.site, LargeDSphere):
                # (R^2 - m^2) / D, which is what the closed form has for the length of its spins;
                # the average of its covariance is another number.
                along = across
            chi = torch.lerp(across, along, 1 / self.dim) / self.scale**2
            # Below, it would be lost in all sums; and its inverse powers must exist.
            chi = chi.clamp_min(torch.finfo(chi.dtype).tiny ** 0.25)
        # (R^2 - m^2) / D with all its digits in a strong field, and the derivatives of m.
        square = mean.square().sum(-1)
        return mean, chi - (square - square.detach()) / self.dim

    def log_partition(self, b: Tensor, v: Tensor) -> Tensor:
        """log z (..., N)."""
        if isinstance(self.site, Gaussian):
            return (b.square().sum(-1) / (1 - v) - self.dim * torch.log1p(-v)) / 2
        return self.site.log_partition(b / self.scale) + self.dim / 2 * v


def functional(
    law: _Law,
    m: Tensor,
    v: Tensor,
    chi: Tensor,
    k: Tensor,
    external: Tensor,
    log_det: Callable[[Tensor], Tensor],
) -> Tensor:
    r"""log Z of any m, V and :math:`\chi = 1/(\Lambda - V)`, stationary in all three, (...).

    ``log_det`` is that of :math:`\chi^{1/2} (\Lambda - K) \chi^{1/2}`, whose entries stay of order
    one however strong the fields.
    """
    force = k @ m
    b = external + force - v[..., None] * m
    sites = law.log_partition(b, v).sum(-1)
    energy = (m * (v[..., None] * m - force)).sum((-2, -1)) / 2
    return sites + energy - law.dim / 2 * log_det(_precision(v, chi, k))


def _precision(v: Tensor, chi: Tensor, k: Tensor) -> Tensor:
    r""":math:`\chi^{1/2} (\Lambda - K) \chi^{1/2} = 1 + V\chi - \chi^{1/2} K \chi^{1/2}`."""
    root = chi.sqrt()
    return torch.diag_embed(1 + v * chi) - root[..., :, None] * k * root[..., None, :]


def _lever(scaled: Tensor, chi: Tensor) -> Tensor:
    r""":math:`A_{ij}/(\chi_i\chi_j)` off the diagonal, about K, for ``scaled``
    :math:`\chi^{-1/2} A \chi^{-1/2}`; nothing in it is small however strong the fields."""
    root = chi.sqrt()
    identity = torch.eye(chi.shape[-1], dtype=torch.bool, device=chi.device)
    return (scaled / root[..., :, None] / root[..., None, :]).masked_fill(identity, 0.0)


class _CavityVariance(torch.autograd.Function):
    r"""V of the old V, :math:`\chi` and K, with a known A: :math:`\Lambda_i - 1/A_{ii}`.

    By :math:`\mathrm dV_i = -\sum_{j\ne i} (A_{ij}/A_{ii})^2\, \mathrm d\Lambda_j + \sum_{jk}
    A_{ij} A_{ik}/A_{ii}^2\, \mathrm dK_{jk}` and :math:`\mathrm d\Lambda = \mathrm dV -
    \mathrm d\chi/\chi^2` a product with its Jacobian takes O(N^2); the part of i itself, which
    cancels, is left out.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, chi: Tensor, k: Tensor, scaled: Tensor) -> Tensor:
        ctx.save_for_backward(v, chi, k, scaled)
        return v.clone()  # the value at a solution

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        v, chi, k, scaled = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():
            scaled = known_inverse(_precision(v, chi, k), scaled)
        own = scaled.diagonal(dim1=-2, dim2=-1)
        lever = _lever(scaled, chi) / own[..., :, None]
        pull = (grad[..., None, :] @ lever.square())[..., 0, :]
        k_bar = None
        if ctx.needs_input_grad[2]:
            ratio = torch.diag_embed(torch.ones_like(chi)) + lever * chi[..., None, :]
            k_bar = ratio.mT @ (grad[..., :, None] * ratio)
        return -chi.square() * pull, pull, k_bar, None


class _Cavities:
    """Map and functional of one system, of the state (m, V / unit) as (..., N, D + 1).

    Args:
        system: what is solved.
        options: how.
        broken: systems to leave out (...), or None.
    """

    def __init__(
        self, system: SpinSystem, options: FixedPoint, broken: Tensor | None = None
    ) -> None:
        self.law, self.options, self.broken = _Law(system.site), options, broken
        dense = system.couplings.to_dense()
        self.arguments = (
            dense.expand(*system.batch_shape, *dense.shape[-2:]),
            system.field,
            system.beta,
        )

    def inputs(self, couplings: Tensor, field: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """K and beta h; of a J that is symmetric in value also its derivative is."""
        scale = self.law.scale
        k = (scale**2 * beta)[..., None, None] * ((couplings + couplings.mT) / 2)
        external = (scale * beta)[..., None, None] * field
        if self.broken is None:
            return k, external
        broken = self.broken[..., None, None]
        return torch.where(broken, 0.0, k), torch.where(broken, 0.0, external)

    @torch.no_grad()
    def iterate(self, start: Tensor | None) -> Solution:
        """Solve without a graph; the value is (m, V / unit)."""
        k, external = self.inputs(*self.arguments)
        square = k.square()
        self.unit = (1 + square.sum(-1)).sqrt()
        v = torch.zeros_like(self.unit)
        if start is None:
            m, chi = self.law.moments(external, v)
        else:
            m = start / self.law.scale
            if self.broken is not None:
                m = torch.where(self.broken[..., None, None], 0.0, m)
            chi = self.law.moments(external + k @ m, v)[1]
        if not isinstance(self.law.site, Gaussian):
            v = (chi[..., None, :] @ square)[..., 0, :]  # that of TAP
        state = self._join(m, v)
        solution = self.options.solve(self._sweep, state, (k, external), check=False)
        solution = refuse_overflow(solution, k, external)
        m, v = self._split(solution.value)
        chi = self._moments(m, v, k, external)[1]
        self._factor, info = torch.linalg.cholesky_ex(_precision(v, chi, k))
        self._state, self._chi = solution.value, chi
        # Outside the cone the map is that of another point: no solution.
        outside = info > 0
        return Solution(
            solution.value,
            torch.where(outside & solution.residual.isfinite(), torch.inf, solution.residual)
            if bool(outside.any())
            else solution.residual,
            solution.iterations,
            solution.converged & ~outside,
        )

    def _join(self, m: Tensor, v: Tensor) -> Tensor:
        return torch.cat([m, (v / self.unit)[..., None]], -1)

    def _split(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return state[..., :-1], state[..., -1] * self.unit

    def _moments(self, m: Tensor, v: Tensor, k: Tensor, external: Tensor) -> tuple[Tensor, Tensor]:
        return self.law.moments(external + k @ m - v[..., None] * m, v)

    def _sweep(self, state: Tensor, k: Tensor, external: Tensor) -> Tensor:
        r"""One parallel sweep: sites, Gaussian model, cavities.

        With m' the mean of the site law, the Gaussian model of the same sites has the mean
        :math:`m' + A (K - V)(m' - m)`; and, as K has no diagonal,
        :math:`\Lambda - 1/A_{ii} = q / (1 + q/\Lambda)` with :math:`q = (K A K)_{ii}`, without the
        cancellation where a strong field makes :math:`\Lambda` large.
        """
        m, v = self._split(state)
        mean, chi = self._moments(m, v, k, external)
        factor, info = torch.linalg.cholesky_ex(_precision(v, chi, k))
        outside = info > 0
        if bool(outside.any()):
            v = self._returned(v, chi, k, outside)
            factor, _ = torch.linalg.cholesky_ex(_precision(v, chi, k))
        change = mean - m
        change = k @ change - v[..., None] * change
        root = chi.sqrt()[..., None]
        mean = mean + root * torch.cholesky_solve(root * change, factor)
        q = torch.linalg.solve_triangular(factor, root * k, upper=False).square().sum(-2)
        return self._join(mean, q / (1 + q * chi / (1 + v * chi)))

    def _returned(self, v: Tensor, chi: Tensor, k: Tensor, outside: Tensor) -> Tensor:
        """V for which A_ii = chi_i, in the systems that have left the cone."""
        root = chi[outside].sqrt()
        scaled = root[..., :, None] * k[outside] * root[..., None, :]
        minimum = minimize_in_cone(
            scaled, torch.zeros_like(root)[..., None], tolerance=_RETURN_TOLERANCE
        )
        inside = (minimum.solution.value.to(v.dtype) - 1) / chi[outside]
        return v.masked_scatter(outside[..., None].expand_as(v), inside)

    # -- what derivatives need, at the solution -------------------------------------------------

    @functools.cached_property
    def scaled_covariance(self) -> Tensor:
        r""":math:`\chi^{-1/2} A \chi^{-1/2}` (..., N, N)."""
        with torch.inference_mode(False), torch.no_grad():
            own = self._factor.diagonal(dim1=-2, dim2=-1)
            failed = ~(torch.isfinite(self._factor).all(-1).all(-1) & (own > 0).all(-1))
            # An answer that was asked for in spite of its failure: any number will do, no error.
            eye = torch.diag_embed(torch.ones_like(own))
            self._factor = torch.where(failed[..., None, None], eye, self._factor)
            return torch.cholesky_inverse(self._factor)

    @functools.cached_property
    def covariance(self) -> Tensor:
        """A (..., N, N)."""
        scaled = self.scaled_covariance
        with torch.inference_mode(False), torch.no_grad():
            root = self._chi.sqrt()
            return root[..., :, None] * scaled * root[..., None, :]

    def _linear(self, state: Tensor, k: Tensor, external: Tensor) -> Tensor:
        """The sweep near the solution, where A may be held fixed in front of what vanishes."""
        m, v = self._split(state)
        mean, chi = self._moments(m, v, k, external)
        change = mean - m
        mean = mean + self.covariance @ (k @ change - v[..., None] * change)
        cavity = _CavityVariance.apply(v, chi, k, self.scaled_covariance)
        return self._join(mean, cavity)

    def _known_log_det(self, precision: Tensor) -> Tensor:
        inverse = known_inverse(precision, self.scaled_covariance)
        value = 2 * self._factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_det = known_log_det(precision, inverse, value)
        return log_det

    def attach(self, k: Tensor, external: Tensor, solution: Solution) -> Tensor:
        """The state with its derivatives."""
        return self.options.attach(solution, self._linear, (k, external))

    def log_partition(self, solution: Solution, *arguments: Tensor) -> Tensor:
        """log Z of (J, h, beta), which must have the values that were solved for."""
        inputs = self.inputs(*arguments)
        m, v = self._split(self.attach(*inputs, solution))
        chi = self._moments(m, v, *inputs)[1]

        def value(state: Tensor, k: Tensor, external: Tensor) -> Tensor:
            m, v, chi = state[..., :-2], state[..., -2], state[..., -1]
            return functional(self.law, m, v, chi, k, external, self._known_log_det)

        # chi as a part of the state costs one order less of derivatives of the site law.
        state = torch.cat([m, v[..., None], chi[..., None]], -1)
        return envelope(value, state, inputs)

    def amplification(self, m: Tensor, v: Tensor, k: Tensor, external: Tensor) -> Tensor:
        r""":math:`T = \chi^{-2} - (A\circ A)^{-1} = \partial V_i/\partial\chi_j`, (..., N, N).

        NaN where a failed iteration left :math:`A\circ A`, with :math:`\chi` for the diagonal,
        without an inverse of the right sign: of a solution it is positive definite.
        """
        chi = self._moments(m, v, k, external)[1]
        scaled = known_inverse(_precision(v, chi, k), self.scaled_covariance)
        squares = _lever(scaled, chi).square()
        # 1 - (1 + E)^-1 with E = chi squares chi, divided by chi on both sides: no difference of
        # large numbers is left.
        weighted = chi[..., :, None] * squares
        eye = torch.eye(chi.shape[-1], dtype=chi.dtype, device=chi.device)
        matrix = eye + weighted * chi[..., None, :]
        failed = (torch.linalg.cholesky_ex(matrix.detach()).info != 0)[..., None, None]
        factor = torch.linalg.cholesky(torch.where(failed, eye, matrix))
        amplified = squares - weighted.mT @ torch.cholesky_solve(weighted, factor)
        return torch.where(failed, torch.nan, amplified)


class AdaptiveTAPEquilibrium(DerivedEquilibrium):
    r"""The adaptive TAP solution; energies and correlations are derivatives of its log Z.

    ``solution.value`` holds (m, V), (..., N, D + 1), without derivatives. ``correlations()`` are
    :math:`m_i\cdot m_j + D A_{ij}`. On spheres :math:`\chi_i = (R^2 - |m_i|^2)/D`, so that the
    response to fields, with the cavities' own, is

    .. math:: \chi = \beta \Big[C^{-1} + V - K - \tfrac2D\, m_i T_{ij} m_j^{\mathsf T}\Big]^{-1},
              \qquad T = \frac{\partial V}{\partial\chi}
                       = \chi^{-2} - (A\circ A)^{-1},

    used up to N D = 512 and where all of it is asked for; beyond, a product is one implicit
    derivative. Of ``Gaussian`` spins it is :math:`\beta A`.
    """

    def __init__(
        self,
        system: SpinSystem,
        equations: _Cavities,
        solution: Solution,
        broken: Tensor | None = None,
    ) -> None:
        self._equations, self._reduced = equations, solution
        scale = system.site.scale
        m, v = equations._split(solution.value)
        super().__init__(
            system,
            functools.partial(equations.log_partition, solution),
            dataclasses.replace(
                solution, value=torch.cat([scale * m, v[..., None] / scale**2], -1)
            ),
            broken,
        )

    @functools.cached_property
    @in_solving_mode
    def _attached(self) -> tuple[Tensor, Tensor]:
        """m and V with their derivatives, in reduced units."""
        equations = self._equations
        inputs = equations.inputs(*equations.arguments)
        return equations._split(equations.attach(*inputs, self._reduced))

    @property
    @observable
    def magnetization(self) -> Tensor:
        return self.system.site.scale * self._attached[0]

    @property
    @observable
    def cavity_variance(self) -> Tensor:
        r""":math:`V_i`, the variance of a component of a site's dimensionless cavity field, (...,
        N); zero at absent sites."""
        return self._attached[1] / self.system.site.scale**2

    def _susceptibility(self) -> Tensor:
        system, equations = self.system, self._equations
        scale, (m, v) = system.site.scale, self._attached
        k, external = equations.inputs(*equations.arguments)
        n, d = m.shape[-2:]
        eye = torch.eye(d, dtype=m.dtype, device=m.device)
        lever = -torch.einsum("...ij,ab->...iajb", k, eye)
        if isinstance(system.site, Gaussian):
            covariance = eye.expand(*m.shape, d)
        else:
            b = external + k @ m - v[..., None] * m
            covariance = system.site.covariance(b / scale) / scale**2
            lever = lever + torch.einsum("...i,ij,ab->...iajb", v, torch.eye(n).to(v), eye)
            t = equations.amplification(m, v, k, external)
            lever = lever - 2 / d * torch.einsum("...ij,...ia,...jb->...iajb", t, m, m)
        rows = (*system.batch_shape, n * d, n * d)
        left = torch.einsum("...iac,...icjb->...iajb", covariance, lever).reshape(rows)
        left = left + torch.eye(n * d, dtype=m.dtype, device=m.device)
        own = torch.einsum("...iab,ij->...iajb", covariance, torch.eye(n).to(v))
        unit = (system.beta * scale**2)[..., None, None]
        chi = solve_each(left, unit * own.reshape(rows)).reshape(*system.batch_shape, n, d, n, d)
        if system.mask is None:
            return chi
        return chi.masked_fill(system.mask[..., :, None, None, None], 0.0)

    def _susceptibility_product(self, vector: Tensor) -> Tensor:
        if self._is_small:
            return self._dense_product(vector)
        return super()._susceptibility_product(vector)

    @observable
    def replicon(self) -> Tensor:
        r"""Stability against random perturbations of the sites, in (0, 1]; (...).

        The inverse of the largest eigenvalue of :math:`A_{ij}^2/(A_{ii}A_{jj})`, which measures how
        much disorder in the sites amplifies itself. Many weak unrelated couplings have
        :math:`\approx 1 - \beta^2\overline{\sum_j J_{ij}^2\chi_j^2}`, zero at the line of de
        Almeida and Thouless. The cone keeps it positive: small values warn that the equations hold
        on to a phase that is about to freeze. O(N^3) a system, without the D of :meth:`stability`.
        """
        if self.system.num_spins == 0:
            return torch.ones_like(self.system.beta)
        return 1 / symmetric_eigenvalues(self._equations.scaled_covariance.square())[..., -1]


# -- matrix-valued couplings of Gaussian spins ----------------------------------------------------


class _MatrixGaussian:
    """The exact equations of Gaussian spins with matrix-valued couplings."""

    def __init__(
        self, system: SpinSystem, options: FixedPoint, broken: Tensor | None = None
    ) -> None:
        self.system, self.options, self.broken = system, options, broken

    def iterate(self, start: Tensor | None) -> Solution:
        """The magnetization: one product with J an iteration."""
        system = self.system
        beta = system.beta[..., None, None]
        if start is None:
            start = system.site.mean(beta * system.field)
        elif self.broken is not None:
            start = torch.where(self.broken[..., None, None], 0.0, start)
        return self.options.solve(
            mean_field_map(system.site, system.couplings),
            start,
            (system.field, beta, *system.couplings.tensors()),
            scale=system.site.scale,
            check=False,
        )

    def inputs(self, couplings: Tensor, field: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """K (..., N D, N D) and beta h (..., N D, 1)."""
        k = beta[..., None, None] * couplings
        b = (beta[..., None, None] * field).flatten(-2)[..., None]
        if self.broken is None:
            return k, b
        broken = self.broken[..., None, None]
        return torch.where(broken, 0.0, k), torch.where(broken, 0.0, b)

    def log_partition(self, couplings: Tensor, field: Tensor, beta: Tensor) -> Tensor:
        """log Z, one factorization."""
        assert isinstance(self.system.site, Gaussian)
        variance = self.system.site.variance
        return gaussian(*self.inputs(couplings, field, beta), variance=variance)


class MatrixGaussianEquilibrium(DerivedEquilibrium):
    r"""Gaussian spins with matrix-valued couplings: exact, with :math:`D\times D` cavities.

    The magnetization comes from the iteration; the rest from :math:`A = (1/v - K)^{-1}`, one
    factorization of N D rows when it is first asked for.
    """

    def __init__(
        self,
        system: SpinSystem,
        equations: _MatrixGaussian,
        solution: Solution,
        broken: Tensor | None = None,
    ) -> None:
        super().__init__(system, equations.log_partition, solution, broken)
        self._equations, self._found = equations, solution.value

    def _dense(self) -> Tensor:
        """J as (..., N D, N D)."""
        dense = flatten_blocks(self.system.couplings.to_dense())
        return dense.expand(*self.system.batch_shape, *dense.shape[-2:])

    @property
    @observable
    def magnetization(self) -> Tensor:
        return self._found

    @functools.cached_property
    @in_solving_mode
    def _covariance(self) -> Tensor:
        """A of all components, (..., N D, N D)."""
        site = self.system.site
        assert isinstance(site, Gaussian)
        k, _ = self._equations.inputs(self._dense(), self.system.field, self.system.beta)
        eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        inverse, _, _ = cholesky_inverse(eye - site.variance * (k + k.mT) / 2)
        return site.variance * inverse

    @property
    @observable
    def cavity_variance(self) -> Tensor:
        r""":math:`V_i = 1/v - (A_{ii})^{-1}`, (..., N, D, D); zero at absent sites."""
        site = self.system.site
        assert isinstance(site, Gaussian)
        n, d = self.system.num_spins, self.system.dim
        shape = (*self.system.batch_shape, n, d, n, d)
        own = self._covariance.reshape(shape).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        eye = torch.eye(d, dtype=own.dtype, device=own.device)
        return self._clear_blocks(eye / site.variance - cholesky_inverse(own)[0])

    def _clear_blocks(self, blocks: Tensor) -> Tensor:
        mask = self.system.mask
        return blocks if mask is None else blocks.masked_fill(mask[..., None, None], 0.0)

    def _susceptibility(self) -> Tensor:
        r""":math:`\chi = \beta A`."""
        n, d = self.system.num_spins, self.system.dim
        chi = self.system.beta[..., None, None] * self._covariance
        chi = chi.reshape(*self.system.batch_shape, n, d, n, d)
        if self.system.mask is None:
            return chi
        return chi.masked_fill(self.system.mask[..., :, None, None, None], 0.0)

    def _susceptibility_product(self, vector: Tensor) -> Tensor:
        product = (self._covariance @ vector.flatten(-2)[..., None])[..., 0]
        product = product.unflatten(-1, vector.shape[-2:])
        return self._clear(self.system.beta[..., None, None] * product)

    def _coupling_correlations(self) -> Tensor:
        n, d = self.system.num_spins, self.system.dim
        gradient = self._first[0].reshape(*self.system.batch_shape, n, d, n, d)
        traced = torch.einsum("...iaja->...ij", gradient)
        symmetric = (traced + traced.mT) / self.system.beta[..., None, None]
        if self.system.mask is not None:
            absent = self.system.mask[..., :, None] | self.system.mask[..., None, :]
            symmetric = symmetric.masked_fill(absent, 0.0)
        return self._finish(symmetric)
