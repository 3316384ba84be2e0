r"""TAP: mean field with the Onsager reaction, the second order of Plefka's expansion.

With :math:`K = \beta J`, :math:`C_i` the covariance of spin i alone and :math:`\mathcal S` its
entropy at the magnetization :math:`m_i`,

.. math::
    \log Z_{\rm TAP} = \sum_i \mathcal S(m_i) + \tfrac12 \sum_{ij} K_{ij}\, m_i\cdot m_j
        + \beta \sum_i h_i\cdot m_i + \tfrac14 \sum_{ij} K_{ij}^2 \operatorname{tr}(C_i C_j),

where the last term is half the variance of the pair energies among independent spins. It is
stationary where every spin sits in the field

.. math:: b_i = \beta h_i + \sum_j K_{ij} m_j + O_i,\qquad
          O_i = \tfrac12 \sum_j K_{ij}^2 \frac{\partial}{\partial m_i}\operatorname{tr}(C_i C_j).

The state is the field b itself, from which :math:`m_i = \langle S\rangle_{b_i}` and
:math:`C_i = \tau_i + w_i b_i b_i^{\mathsf T}` follow without an inverse, inside the ball whatever b
is and with all digits at small m. What O is depends on the law of one spin:

* ``Sphere``, exactly, for every D: with :math:`s = |b|^2`, :math:`\rho = \tau + w s` and sums of j
  weighted with :math:`K_{ij}^2`,

  .. math::
    p_i = \sum_j (D\tau_j + w_j s_j),\quad q_i = \sum_j \tau_j,\quad
    v_i = \sum_j w_j (b_i\cdot b_j)\, b_j,\quad u_i = b_i\cdot v_i,

    O_i = \Big[\frac{w_i p_i + 2 (w_i + w_i' s_i) q_i + 2 w_i' u_i}{2\rho_i}
          - \frac{w_i^2 u_i}{\tau_i\rho_i}\Big] b_i + \frac{w_i}{\tau_i} v_i .

* ``LargeDSphere``: its consistent leading order in D. The part w of the covariances is of the same
  order as what the closed form of :math:`\mathcal S` leaves out and is not kept:

  .. math:: \tfrac14 \sum_{ij} K_{ij}^2 D \tau_i \tau_j,\quad \tau = (R^2 - m^2)/D,\qquad
            O_i = -m_i \sum_j K_{ij}^2 \tau_j .

* ``Ising``: the same formula with D = 1, which there is exact (Thouless, Anderson & Palmer).
* ``Gaussian``: C is the constant v, so that O = 0 and the magnetization is that of mean field,
  which is exact; log Z gains the constant :math:`\tfrac14 D v^2 \sum_{ij} K_{ij}^2`.

Errors of log Z and m are of third order in J (mean field's: second), at every D. In contrast to
steepest descent they do not vanish as D grows.

Sources: Thouless, Anderson & Palmer 1977, Phil. Mag. 35, 593; Plefka 1982, J. Phys. A 15, 1971.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from spinformer.equilibrium.iteration import (
    check_initial,
    natural_size,
    refuse_overflow,
    within_rounding,
)
from spinformer.errors import OnFailure, strict_options
from spinformer.solve.fixed_point import FixedPoint, FixedPointSolver
from spinformer.solve.implicit import envelope
from spinformer.solve.linear import solve_each, symmetric_eigenvalues, symmetric_spectrum
from spinformer.solve.solution import Solution
from spinformer.spins.site import Gaussian, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import (
    DerivedEquilibrium,
    in_solving_mode,
    observable,
    outside_inference_mode,
)

__all__ = ["TAP", "TAPEquilibrium", "reaction_weights"]


@strict_options
class TAP:
    r"""The TAP equations of a :class:`~spinformer.SpinSystem` with symmetric scalar couplings.

    An expansion in the couplings. With :math:`k_i^2 = (\beta R^2/D)^2 \sum_j J_{ij}^2` (Gaussian:
    v for R^2/D) its error of log Z, measured on spin glasses of Ising spins and on pairs of
    spheres, is 1 % of mean field's at k = 0.2, 3 % at 0.3, 4 to 8 % at 0.5, 20 to 30 % at 1 and as
    large at 1.5. log Z is no bound: where K is strong and D large it exceeds the exact one. The
    undamped map begins to oscillate at k of 0.5 to 0.7 (:meth:`TAPEquilibrium.spectral_radius`),
    where ``damping=0.5`` helps; beyond k = 1 there may be several solutions or none. Prefer
    ``SteepestDescent`` or ``AdaptiveTAP`` there, and look at :attr:`TAPEquilibrium.is_stable`.

    Args:
        solver: ``"plain"``, ``"anderson"`` or ``"broyden"``
            (:class:`~spinformer.solve.fixed_point.FixedPoint`). Anderson mixing and Broyden's
            method can end at an unstable solution.
        damping: step in (0, 1]; below 1 where the reaction term makes the map oscillate.
        tolerance: residual, the largest change of a component of b by one more iteration, in units
            of :math:`\sqrt D/R`, whose response is R / sqrt(D), the natural size of a component of
            m; at sites in stronger fields in units of their root mean square component,
            :math:`(\beta|h_i| + R (\sum_j K_{ij}^2)^{1/2})/\sqrt D`. None is 1e-10 in float64 and
            1e-5 in float32.
        max_iterations: evaluations of the map.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"``.

    Cost: J and its entrywise square are formed once, dense. An iteration takes one product of an
    N x N matrix with m for ``Ising``, ``LargeDSphere`` and ``Gaussian``, as in mean field, and
    three for ``Sphere``: J m, the overlaps :math:`b_i\cdot b_j` that tr(C_i C_j) holds squared, and
    their product with b. Memory O(N^2 + N D) a system.
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

    @outside_inference_mode
    def solve(self, system: SpinSystem, initial: Tensor | None = None) -> TAPEquilibrium:
        """Solve the TAP equations.

        Args:
            system: symmetric scalar couplings and any site law; ``Gaussian`` needs ``beta v
                lambda_max(J) < 1``.
            initial: magnetizations (..., N, D) to start from; None is the answer without couplings.
                Those on or outside the sphere are first drawn just inside it.

        Raises:
            ConvergenceError: with ``on_failure="raise"``.
            ValueError: asymmetric or matrix-valued couplings; Gaussian spins beyond their
                stability limit.
        """
        _check(system)
        options = within_rounding(self.fixed_point, system)
        start = None if initial is None else _lift(check_initial(initial, system), system.site)
        equations, broken = _Equations(system), None
        solution = equations.iterate(start, options)
        lost = ~torch.isfinite(solution.residual)
        if bool(lost.any()):
            # Given broken, or finite and too large for beta J to be.
            system, broken = system.isolated(lost)
            equations = _Equations(system, broken)
            solution = equations.iterate(start, options)
        equilibrium = TAPEquilibrium(system, equations, solution, options, broken)
        options.check(equilibrium.solution)
        return equilibrium


def _check(system: SpinSystem) -> None:
    if system.couplings.dim is not None:
        raise ValueError(
            "TAP needs scalar couplings (..., N, N), and these are matrix-valued: use MeanField()"
        )
    system.require_symmetric("TAP at equilibrium")
    if isinstance(system.site, Gaussian):
        system.site.check_stable(system.beta * system.couplings.largest_eigenvalue())


def _lift(m: Tensor, site: SiteLaw) -> Tensor:
    """The field of a magnetization, of the nearest that has one."""
    if site.radius is not None:
        longest = (1 - torch.finfo(m.dtype).eps ** 0.5) * site.radius
        length = torch.linalg.vector_norm(m, dim=-1, keepdim=True)
        m = torch.where(length > longest, m * (longest / length), m)
    return site.inverse_response(m)


# -- the equations --------------------------------------------------------------------------------


class _Equations:
    """Map and functional of one system, as functions of z = b / unit, K, K^2 and beta h.

    Args:
        system: what is solved.
        broken: systems to leave out (...), or None.
    """

    def __init__(self, system: SpinSystem, broken: Tensor | None = None) -> None:
        self.site = system.site
        self.law: _SecondOrder = (
            _ExactSecondOrder(system.site)
            if isinstance(system.site, Sphere)
            else _IsotropicSecondOrder(system.site)
        )
        self.broken = broken
        dense = system.couplings.to_dense()
        self.arguments = (
            dense.expand(*system.batch_shape, *dense.shape[-2:]),
            system.field,
            system.beta,
        )
        with torch.no_grad():
            _, square, external = self.inputs(*self.arguments)
            self.unit = natural_size(system.site, square, external)

    def inputs(self, couplings: Tensor, field: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        """K, K^2 and beta h; of a J that is symmetric in value also its derivative is."""
        k = beta[..., None, None] * ((couplings + couplings.mT) / 2)
        b = beta[..., None, None] * field
        if self.broken is not None:
            k, b = (torch.where(self.broken[..., None, None], 0.0, x) for x in (k, b))
        return k, k * k, b

    def step(self, z: Tensor, k: Tensor, square: Tensor, external: Tensor) -> Tensor:
        """One application of the map."""
        m, reaction = self.law.reaction(self.unit * z, square)
        return (external + k @ m + reaction) / self.unit

    def functional(self, z: Tensor, k: Tensor, square: Tensor, external: Tensor) -> Tensor:
        """log Z as a function of the state, stationary at the fixed point, (...)."""
        b = self.unit * z
        m = self.site.mean(b)
        entropy = self.site.log_partition(b).sum(-1) - (b * m).sum((-2, -1))
        energy = (m * (k @ m)).sum((-2, -1)) / 2 + (external * m).sum((-2, -1))
        if isinstance(self.site, Gaussian):
            # Zero, as K has no diagonal. Its derivative is <S_i^2> without the mean.
            variance = self.site.dim * self.site.variance
            energy = energy + variance / 2 * k.diagonal(dim1=-2, dim2=-1).sum(-1)
        return entropy + energy + self.law.overlap(b, square) / 4

    def iterate(self, start: Tensor | None, options: FixedPoint) -> Solution:
        """Solve without a graph; the value is z."""
        with torch.no_grad():
            inputs = self.inputs(*self.arguments)
            b = inputs[-1] if start is None else start
            if start is not None and self.broken is not None:
                b = torch.where(self.broken[..., None, None], 0.0, b)
            solution = options.solve(self.step, b / self.unit, inputs, check=False)
            return refuse_overflow(solution, inputs[0], inputs[-1])

    def log_partition(self, solution: Solution, options: FixedPoint, *arguments: Tensor) -> Tensor:
        """log Z of (J, h, beta), which must have the values that were solved for."""
        inputs = self.inputs(*arguments)
        state = options.attach(solution, self.step, inputs)
        return envelope(self.functional, state, inputs)


class _Response(NamedTuple):
    """C^(1/2), (..., N, D, D), and C^(1/2) (K + dO/dm) C^(1/2), (..., N, D, N, D)."""

    root: Tensor
    coupling: Tensor


class _SecondOrder(abc.ABC):
    """What the second order is for one law of a spin."""

    def __init__(self, site: SiteLaw) -> None:
        self.site = site

    @abc.abstractmethod
    def reaction(self, b: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        """m and O, (..., N, D)."""

    @abc.abstractmethod
    def overlap(self, b: Tensor, square: Tensor) -> Tensor:
        """sum_ij K_ij^2 tr(C_i C_j), (...)."""

    @abc.abstractmethod
    def response(self, b: Tensor, k: Tensor, square: Tensor) -> _Response:
        """The parts of the Hessian."""


class _IsotropicSecondOrder(_SecondOrder):
    """tr(C_i C_j) = D tau_i tau_j with d tau / dm = -2 m / D on spheres, and a constant tau off."""

    def reaction(self, b: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        m = self.site.mean(b)
        if self.site.radius is None:
            return m, torch.zeros_like(m)
        tau = self.site.response(b)[0]
        return m, -m * (square @ tau[..., None])

    def overlap(self, b: Tensor, square: Tensor) -> Tensor:
        tau = self.site.response(b)[0][..., None]
        return self.site.dim * (tau * (square @ tau)).sum((-2, -1))

    def response(self, b: Tensor, k: Tensor, square: Tensor) -> _Response:
        tau, rho = self.site.response(b)
        # In one component the covariance is tau itself, and so is a Gaussian's in any.
        along = isinstance(self.site, LargeDSphere)
        w = -2 / self.site.dim * tau * rho if along else torch.zeros_like(tau)
        root, _ = _roots(b, tau, rho, w)
        coupling = _between(k, root)
        if self.site.radius is not None:
            own = -(square @ tau[..., None])[..., None] * (root @ root)
            lever = rho.sqrt()[..., None] * self.site.mean(b)
            pairs = torch.einsum("...ij,...ia,...jb->...iajb", square, lever, lever)
            coupling = coupling + _on_diagonal(own) + 2 / self.site.dim * pairs
        return _Response(root, coupling)


class _ExactSecondOrder(_SecondOrder):
    """All of tr(C_i C_j) with C = tau + w b b^T on a sphere."""

    site: Sphere

    def reaction(self, b: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        tau, rho, w, slope = self.site.jet(b)
        p, q, v, u = self._sums(b, square, tau, w)
        along, across = reaction_weights(b, (tau, rho, w, slope), p, q, u)
        return tau[..., None] * b, along[..., None] * b + across[..., None] * v

    def overlap(self, b: Tensor, square: Tensor) -> Tensor:
        tau, _, w, _ = self.site.jet(b)
        p, q, _, u = self._sums(b, square, tau, w)
        # tau_i p_i counts tau_i w_j s_j once of twice.
        longitudinal = w * (b * b).sum(-1)
        return (tau * p + longitudinal * q + w * u).sum(-1)

    def _sums(
        self, b: Tensor, square: Tensor, tau: Tensor, w: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """p, q, v and u."""
        longitudinal = w * (b * b).sum(-1)
        sums = square @ torch.stack((self.site.dim * tau + longitudinal, tau), -1)
        v = (square * (b @ b.mT)) @ (w[..., None] * b)
        return sums[..., 0], sums[..., 1], v, (b * v).sum(-1)

    def response(self, b: Tensor, k: Tensor, square: Tensor) -> _Response:
        tau, rho, w, slope = self.site.jet(b)
        root, inverse_root = _roots(b, tau, rho, w)

        # Between sites: C^(-1/2)_i d^2 [K_ij^2 tr(C_i C_j) / 2] / db_i db_j C^(-1/2)_j.
        gram = b @ b.mT
        even = w + slope * (b * b).sum(-1)
        column, row = slice(None), None  # of i and of j in (..., i, j)
        i, j = (..., column, row), (..., row, column)
        straight = self.site.dim / 2 * w[i] * w[j] + w[i] * even[j] + even[i] * w[j]
        straight = straight + 2 * slope[i] * slope[j] * gram * gram
        product = w[i] * w[j]
        twice = 2 * slope[i] * w[j] * gram
        outer = b[..., :, None] * b[..., None, :]
        eye = torch.eye(self.site.dim, dtype=b.dtype, device=b.device)
        pairs = torch.einsum("...ij,...ia,...jb->...iajb", square * straight, b, b)
        pairs = pairs + torch.einsum("...ij,...iab->...iajb", square * twice, outer)
        pairs = pairs + torch.einsum("...ij,...jab->...iajb", square * twice.mT, outer)
        pairs = pairs + torch.einsum("...ij,...ib,...ja->...iajb", square * product, b, b)
        pairs = pairs + torch.einsum("...ij,ab->...iajb", square * product * gram, eye)
        pairs = torch.einsum("...iac,...icjd,...jdb->...iajb", inverse_root, pairs, inverse_root)

        # At a site: C^(1/2) dO/db C^(-1/2), with p, q and the matrix of v held fixed.
        p, q, v, u = self._sums(b, square, tau, w)
        with torch.enable_grad():
            local = b.view_as(b) if b.requires_grad else b.detach().requires_grad_()
            weights = reaction_weights(local, self.site.jet(local), p, q, u)
            slopes = [
                torch.autograd.grad(
                    weight.sum(), local, create_graph=b.requires_grad, retain_graph=True
                )[0]
                for weight in weights
            ]
        along, across = (weight[..., None, None] for weight in weights)
        # p and q don't depend on this b, and u = b . (matrix of v) b does.
        through_u = 2 * ((slope - w * w / tau) / rho)[..., None] * v
        matrix = torch.einsum("...ij,...jab->...iab", square * w[j], outer)
        own = along * eye + across * matrix
        own = own + b[..., :, None] * (slopes[0] + through_u)[..., None, :]
        own = own + v[..., :, None] * slopes[1][..., None, :]
        own = root @ own @ inverse_root
        return _Response(root, _between(k, root) + pairs + _on_diagonal((own + own.mT) / 2))


def reaction_weights(
    b: Tensor, jet: tuple[Tensor, Tensor, Tensor, Tensor], p: Tensor, q: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """The factors of b and of v in O, of a sphere's (tau, rho, w, w') and the sums p, q and u."""
    tau, rho, w, slope = jet
    even = w + slope * (b * b).sum(-1)
    return (w * p / 2 + even * q + (slope - w * w / tau) * u) / rho, w / tau


def _roots(b: Tensor, tau: Tensor, rho: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(tau + w b b^T)^(1/2) and ^(-1/2), smooth at b = 0; rho = tau + w b^2."""
    # A spin that a field holds may have a variance of less than the smallest number.
    tiny = torch.finfo(b.dtype).tiny ** 0.5
    across, along = (x.clamp_min(tiny).sqrt()[..., None, None] for x in (tau, rho))
    outer = w[..., None, None] * b[..., :, None] * b[..., None, :] / (across + along)
    eye = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
    return across * eye + outer, (eye - outer / along) / across


def _between(k: Tensor, root: Tensor) -> Tensor:
    """C^(1/2) K C^(1/2), (..., N, D, N, D)."""
    return torch.einsum("...ij,...iac,...jcb->...iajb", k, root, root)


def _on_diagonal(blocks: Tensor) -> Tensor:
    """(..., N, D, D) as the diagonal blocks of (..., N, D, N, D)."""
    eye = torch.eye(blocks.shape[-3], dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("...iab,ij->...iajb", blocks, eye)


# -- the answer -----------------------------------------------------------------------------------


class TAPEquilibrium(DerivedEquilibrium):
    r"""The TAP solution: :math:`m_i = \langle S\rangle_{b_i}` and the functional's derivatives.

    Energies are derivatives of log Z at fixed m, of which it is a stationary
    point. The response to fields is the inverse Hessian of :math:`\beta G`,

    .. math:: \chi = \beta \Big[C^{-1} - K - \frac{\partial O}{\partial m}\Big]^{-1},

    in closed form, dense up to N D = 512 and where all of it is asked for, else by one implicit
    derivative a product. The specific heat is

    .. math:: \tfrac12 \sum_{ij} K_{ij}^2 \operatorname{tr}(C_i C_j)
              + \beta\, g^{\mathsf T} \chi\, g,\qquad
              g_i = h_i + \sum_j J_{ij} m_j + \tfrac2\beta O_i .

    Correlations are :math:`m_i\cdot m_j + \operatorname{tr}\chi_{ij}/\beta`. Those of
    ``correlations("coupling")`` know nothing beyond a bond: :math:`m_i\cdot m_j + K_{ij}
    \operatorname{tr}(C_i C_j)`.
    """

    def __init__(
        self,
        system: SpinSystem,
        equations: _Equations,
        solution: Solution,
        options: FixedPoint,
        broken: Tensor | None = None,
    ) -> None:
        super().__init__(
            system,
            functools.partial(equations.log_partition, solution, options),
            dataclasses.replace(solution, value=equations.unit * solution.value),
            broken,
        )
        self._equations, self._options, self._state = equations, options, solution

    @functools.cached_property
    @in_solving_mode
    def _inputs(self) -> tuple[Tensor, ...]:
        with self._outside_inference_mode():
            return self._equations.inputs(*self._equations.arguments)

    @contextlib.contextmanager
    def _outside_inference_mode(self) -> Iterator[None]:
        """For what a derivative is taken of: the mode of the solve, but not inference mode."""
        with torch.inference_mode(False), torch.set_grad_enabled(self.tracks_gradients):
            yield

    @property
    @observable
    def cavity_field(self) -> Tensor:
        """b, the field on every spin in units of temperature, (..., N, D)."""
        equations, inputs = self._equations, self._inputs
        with self._outside_inference_mode():
            return equations.unit * self._options.attach(self._state, equations.step, inputs)

    @property
    @observable
    def magnetization(self) -> Tensor:
        return self.system.site.mean(self.cavity_field)

    @property
    @observable
    def onsager(self) -> Tensor:
        """O, what the second order adds to the field on every spin, (..., N, D)."""
        return self._equations.law.reaction(self.cavity_field, self._inputs[1])[1]

    @functools.cached_property
    @in_solving_mode
    def _parts(self) -> _Response:
        field, (k, square, _) = self.cavity_field, self._inputs
        with self._outside_inference_mode():
            return self._equations.law.response(field, k, square)

    @functools.cached_property
    @in_solving_mode
    def _present_root(self) -> Tensor:
        """C^(1/2), zero at absent sites, which don't respond."""
        root, present = self._parts.root, self.system.present
        return root if present is None else root * present[..., None, None]

    def _matrix(self, tensor: Tensor) -> Tensor:
        """(..., N, D, N, D) as (..., N D, N D)."""
        size = self.system.num_spins * self.system.dim
        return tensor.reshape(*self.system.batch_shape, size, size)

    def _susceptibility(self) -> Tensor:
        root, coupling = self._present_root, self._parts.coupling
        n, d = self.system.num_spins, self.system.dim
        matrix = self._matrix(coupling)
        eye = torch.eye(n * d, dtype=matrix.dtype, device=matrix.device)
        right = self._matrix(_on_diagonal(root))
        inverse = right @ solve_each(eye - matrix, right)
        inverse = (inverse + inverse.mT) / 2
        beta = self.system.beta[..., None, None, None, None]
        return beta * inverse.reshape(*self.system.batch_shape, n, d, n, d)

    def _susceptibility_product(self, vector: Tensor) -> Tensor:
        if self._is_small:
            return self._dense_product(vector)
        return super()._susceptibility_product(vector)

    def _linear_response_correlations(self) -> Tensor:
        m = self.magnetization
        return m @ m.mT + self._trace_of_chi() / self.system.beta[..., None, None]

    @observable
    def specific_heat(self) -> Tensor:
        beta = self.system.beta
        overlap = self._equations.law.overlap(self.cavity_field, self._inputs[1])
        force = self.system.force(self.magnetization) + 2 * self.onsager / beta[..., None, None]
        response = (force * self.susceptibility_product(force)).sum((-2, -1))
        return overlap / 2 + beta * response

    @observable
    def stability(self) -> Tensor:
        r"""Smallest eigenvalue of the Hessian of :math:`\beta G(m)`, in units of a free spin's.

        As :meth:`Equilibrium.stability`, by way of :math:`1 - C^{1/2} (K + \partial O/\partial m)
        C^{1/2}`, which has as many negative eigenvalues and, in contrast to the Hessian and its
        inverse, entries of one size however stiff some spins are. O((N D)^3) a system.
        """
        size = self.system.num_spins * self.system.dim
        if size == 0:
            return torch.full_like(self.system.beta, torch.inf)
        root, coupling = self._present_root.detach(), self._matrix(self._parts.coupling.detach())
        eye = torch.eye(size, dtype=coupling.dtype, device=coupling.device)
        values, vectors = symmetric_spectrum(eye - (coupling + coupling.mT) / 2)
        # A mode without any restoring force answers without limit.
        least = torch.finfo(values.dtype).eps ** 2
        safe = torch.where(values.abs() < least, least, values)
        lever = self._matrix(_on_diagonal(root)) @ vectors
        response = symmetric_eigenvalues((lever / safe[..., None, :]) @ lever.mT)
        # The negative eigenvalue of the inverse nearest to zero, or without one the largest.
        negative = (safe < 0).sum(-1, keepdim=True)
        place = torch.where(negative > 0, negative - 1, size - 1)
        stiffness: Tensor = self.system.site.scale**2 / response.gather(-1, place)
        return stiffness[..., 0]

    @observable
    def spectral_radius(self) -> Tensor:
        r"""Largest modulus of the eigenvalues of the map's derivative at the solution, (...).

        Below one, the undamped map returns from small deviations, shrinking them by this factor an
        iteration. The eigenvalues are real, those of :math:`C^{1/2}(K + \partial O/\partial m)
        C^{1/2}`. O((N D)^3) a system.
        """
        matrix = self._matrix(self._parts.coupling.detach())
        if matrix.shape[-1] == 0:
            return torch.zeros_like(self.system.beta)
        return symmetric_eigenvalues((matrix + matrix.mT) / 2).abs().amax(-1)
