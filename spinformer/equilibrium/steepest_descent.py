r"""Steepest descent: spins of many components, or the spherical model, with all couplings kept.

The constraints :math:`|S_i| = R` become integrals over auxiliary variables :math:`t_i`, the spins
are integrated out as Gaussians of precision :math:`\beta V` with
:math:`V = \operatorname{diag}(t) - J`, and the integral over t is taken at its saddle point, which
is a minimum on the real axis:

.. math::
    \log Z_{\rm SD0} = D \min_\tau \Phi,\qquad
    \Phi = \tfrac12 \sum_i (\tau_i - 1) - \tfrac12 \log\det A^{-1}
           + \tfrac12 \operatorname{tr} b^{\mathsf T} A b,

    \tau = \frac{\beta R^2}{D} t,\quad A = \Big(\operatorname{diag}\tau
    - \frac{\beta R^2}{D} J\Big)^{-1} = \frac{D}{\beta R^2} V^{-1},\quad b = \frac{\beta R}{D} h,
    \quad \mu = A b = m / R .

The condition :math:`A_{ii} + |\mu_i|^2 = 1` says that :math:`\langle |S_i|^2\rangle = R^2`. The
quadratic fluctuations around the saddle are

.. math::
    \log Z_{\rm SD1} = \log Z_{\rm SD0}
        - \tfrac12 \log\det\big[A \circ (A + 2 \mu\mu^{\mathsf T})\big].

Errors of log Z are O(1) for SD0 and O(1/D) for SD1 as D grows at fixed :math:`R^2 \propto D`. With
one shared t the constraint holds on average over the sites: the spherical model, exact for an
:math:`ND`-component sphere at large N D.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from spinformer.equilibrium.low_rank_saddle import LowRankSaddle
from spinformer.equilibrium.saddle import (
    DenseSaddle,
    Response,
    Saddle,
    SharedSaddle,
    SiteSaddle,
    clear,
)
from spinformer.errors import OnFailure, check_choice, check_on_failure, strict_options
from spinformer.solve.linear import symmetric_spectrum
from spinformer.solve.low_rank_newton import minimize_low_rank, minimize_low_rank_shared
from spinformer.solve.newton import MAX_ITERATIONS, minimize_in_cone
from spinformer.solve.secular import minimize_shared
from spinformer.solve.solution import Solution
from spinformer.spins.couplings import LowRank
from spinformer.spins.site import Gaussian
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import (
    DerivedEquilibrium,
    Equilibrium,
    in_solving_mode,
    observable,
    outside_inference_mode,
)

__all__ = ["FluctuationEquilibrium", "SteepestDescent", "SteepestDescentEquilibrium"]

Auxiliary = Literal["site", "shared"]

# Relative error of the gap from the eigenvalues of a float32 matrix beyond which they are taken
# again in float64.
_FLOAT32_GAP = 1e-4
# Low-rank couplings are left in their factors from this number of sites, and while the factors have
# at most this share of as many columns as sites; `python benchmarks/length.py` measures it.
_LOW_RANK_SITES, _LOW_RANK_SHARE = 256, 0.125
# Where that method does not converge, the matrix is formed up to this size.
_LOW_RANK_RESCUE = 4096
# Entries of matrices whose eigenvectors are kept: those that many systems share, rather than one
# for each head and sequence of a batch.
_KEPT = 2**24


@strict_options
class SteepestDescent:
    r"""Steepest descent of a :class:`~spinformer.SpinSystem` with symmetric scalar couplings.

    It has a unique solution at every temperature, frustrated or ordered; the sign of an ordered
    state is not broken, so that m = 0 without a field. For ``Sphere``, ``LargeDSphere`` and
    ``Ising`` (D = 1): only R and D enter.

    Args:
        auxiliary: ``"site"``, one :math:`t_i` for each spin; ``"shared"``, one t for all, the
            spherical model, whose lengths :math:`\langle|S_i|^2\rangle` are R^2 on average only.
        fluctuations: False is SD0, with all observables in closed form. True is SD1, more accurate
            by one power of 1/D in log Z, with all observables as derivatives of log Z; here
            m and the correlations are those of SD0 with their first correction in 1/D.
        tolerance: of the residual :math:`\max_i |A_{ii} + |\mu_i|^2 - 1|` (shared: of the mean over
            sites), which is the error of :math:`\langle|S_i|^2\rangle/R^2`; None is 1e-12 in
            float64 and 1e-5 in float32. Systems so cold that rounding forbids it stop at the
            rounding limit (:func:`~spinformer.solve.newton.minimize_in_cone`).
        max_iterations: Newton steps; a few are usual, 36 the most seen.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"``.

    Cost: ``"site"``: one inverse of N x N and one solve with another such matrix a Newton step;
    backward costs about one step. ``"shared"``: one eigendecomposition of J, which is kept for the
    next call with the same entries, and O(N^2 D). Float32 systems that need it are worked out in
    float64.

    :class:`~spinformer.spins.couplings.LowRank` couplings of N >= 256 sites whose factors have q <=
    N / 8 columns (q is r, or 2r of two factors) are left in their factors, with the same answers:
    memory O(N (q + D)) and, for ``"shared"``, O(N q^2 + N q D) an evaluation, of which there are 3
    to 20; for ``"site"`` as much for each of about ten products in a Newton step. It wants
    :math:`t_i + \sum_k w_k A_{ik} B_{ik} > 0`, which cold systems with negative weights may not
    have, and deep in an ordered state needs many products. Where it does not converge the matrix
    is formed up to N = 4096; beyond, the failure is reported. ``fluctuations`` need the matrix.

    Source: Berlin & Kac 1952, Phys. Rev. 86, 821 (spherical model); Stanley 1968, Phys. Rev. 176,
    718 (its equivalence with large D).
    """

    def __init__(
        self,
        auxiliary: Auxiliary = "site",
        fluctuations: bool = False,
        tolerance: float | None = None,
        max_iterations: int = MAX_ITERATIONS,
        on_failure: OnFailure = "raise",
    ) -> None:
        check_choice("auxiliary", auxiliary, ("site", "shared"))
        check_on_failure(on_failure)
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance={tolerance!r} must be positive, or None")
        if not (isinstance(max_iterations, int) and max_iterations >= 1):
            raise ValueError(f"max_iterations={max_iterations!r} must be an integer >= 1")
        self.auxiliary: Auxiliary = auxiliary
        self.fluctuations = fluctuations
        self.tolerance, self.max_iterations = tolerance, max_iterations
        self.on_failure: OnFailure = on_failure
        self._spectrum = _Spectrum()

    @outside_inference_mode
    def solve(
        self, system: SpinSystem, initial: Tensor | None = None
    ) -> SteepestDescentEquilibrium | FluctuationEquilibrium:
        """Find the saddle point.

        Args:
            system: symmetric scalar couplings; ``Sphere``, ``LargeDSphere`` or ``Ising``.
            initial: the ``t`` of an earlier, similar solution (..., N), to save Newton steps. The
                answer does not depend on it. Only for ``auxiliary="site"``.

        Raises:
            ConvergenceError: with ``on_failure="raise"``.
            ValueError: asymmetric or matrix-valued couplings, or Gaussian spins.
        """
        _check(system)
        if initial is not None and self.auxiliary == "shared":
            raise ValueError(
                "initial is for auxiliary='site': one shared t needs no start, leave it None"
            )
        if initial is not None and not isinstance(initial, Tensor):
            raise TypeError(f"initial must be a tensor, not {type(initial).__name__}")
        saddle, broken = self._saddle(system, initial), None
        if bool(saddle.broken.any()):
            # Given broken, or finite and too large for beta J or beta h to be.
            system, broken = system.isolated(saddle.broken)
            saddle = self._saddle(system, initial)
        found = saddle.solution
        scale, _ = _reduced(system)
        unit = scale.detach() if self.auxiliary == "shared" else scale.detach()[..., None]
        dtype = system.field.dtype
        solution = Solution(
            (found.value / unit).to(dtype),
            found.residual.to(dtype),
            found.iterations,
            found.converged,
        )
        equilibrium: SteepestDescentEquilibrium | FluctuationEquilibrium
        if self.fluctuations and isinstance(saddle, DenseSaddle):
            equilibrium = FluctuationEquilibrium(system, saddle, solution, broken)
        else:
            equilibrium = SteepestDescentEquilibrium(system, saddle, solution, broken)
        equilibrium.solution.check(
            self.on_failure,
            f"steepest descent ({self.auxiliary})",
            "Look for NaN in couplings and fields; else raise max_iterations or tolerance.",
        )
        return equilibrium

    @torch.no_grad()
    def _saddle(self, system: SpinSystem, initial: Tensor | None) -> Saddle:
        scale, b = _reduced(system)
        if initial is not None:
            try:
                initial = scale[..., None] * initial.to(b.dtype).expand(b.shape[:-1])
            except RuntimeError as error:
                raise ValueError(
                    f"initial has shape {tuple(initial.shape)}: it must be the t of a solution, "
                    f"{tuple(b.shape[:-1])}"
                ) from error
        if not self.fluctuations and _is_low_rank(system):
            low_rank = self._low_rank(system, scale, b, initial)
            done = low_rank.solution.converged | low_rank.broken
            if bool(done.all()) or system.num_spins > _LOW_RANK_RESCUE:
                return low_rank
        couplings = system.couplings.to_dense()
        if self.auxiliary == "shared":
            return self._shared(couplings, scale, b, system.mask)
        return self._site(couplings, scale, b, system.mask, initial)

    def _low_rank(
        self, system: SpinSystem, scale: Tensor, b: Tensor, initial: Tensor | None
    ) -> LowRankSaddle:
        factor, middle = _couplings(system, low_rank=True)
        middle = scale[..., None, None] * middle
        options: dict[str, Any] = {
            "absent": system.mask,
            "tolerance": self.tolerance,
            "max_iterations": self.max_iterations,
        }
        shared = self.auxiliary == "shared"
        if shared:
            minimum = minimize_low_rank_shared(factor, middle, b, **options)
        else:
            minimum = minimize_low_rank(factor, middle, b, initial=initial, **options)
        return LowRankSaddle(minimum, system.mask, shared, self.on_failure)

    def _site(
        self,
        couplings: Tensor,
        scale: Tensor,
        b: Tensor,
        mask: Tensor | None,
        initial: Tensor | None,
    ) -> SiteSaddle:
        minimum = minimize_in_cone(
            scale[..., None, None] * couplings.to(b.dtype),
            b,
            absent=mask,
            initial=initial,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
        )
        return SiteSaddle(minimum, mask)

    def _shared(
        self, couplings: Tensor, scale: Tensor, b: Tensor, mask: Tensor | None
    ) -> SharedSaddle:
        for dtype in (b.dtype, torch.float64):
            values, vectors = self._spectrum.of(couplings, dtype)
            minimum = minimize_shared(
                values,
                vectors,
                b.to(dtype),
                scale=scale.to(dtype),
                absent=mask,
                tolerance=self.tolerance,
                max_iterations=self.max_iterations,
            )
            gaps = minimum.gaps
            if dtype == torch.float64 or not gaps.shape[-1]:
                break
            # Eigenvalues are wrong by eps |J|, and near the border of the cone gaps are small.
            error = torch.finfo(dtype).eps * (gaps[..., 0] / gaps[..., -1]) <= _FLOAT32_GAP
            if bool((error | minimum.broken).all()):
                break
        return SharedSaddle(minimum, mask)


class _Spectrum:
    """Eigenvalues and eigenvectors of the last matrix that was asked for.

    Known again by its entries, not by its name: a module assembles J anew in every forward pass,
    and looking at N^2 entries is nothing beside what is saved.
    """

    def __init__(self) -> None:
        self._matrix: Tensor | None = None
        # By dtype: systems that need float64 are looked at in float32 first.
        self._found: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def __reduce__(self) -> tuple[type[_Spectrum], tuple[()]]:
        # Copies and pickles of a module start anew: they are not three times as large.
        return _Spectrum, ()

    def of(self, matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        matrix = matrix.detach()
        if not self._is_known(matrix):
            # A copy: the caller may write into his.
            self._matrix = matrix.clone() if matrix.numel() <= _KEPT else None
            self._found = {}
        if dtype in self._found:
            return self._found[dtype]
        values, vectors = symmetric_spectrum(matrix.to(dtype))
        if self._matrix is not None:
            self._found[dtype] = (values, vectors)
        return values, vectors

    def _is_known(self, matrix: Tensor) -> bool:
        known = self._matrix
        return (
            known is not None
            and (known.shape, known.dtype, known.device)
            == (matrix.shape, matrix.dtype, matrix.device)
            and torch.equal(known, matrix)
        )


def _check(system: SpinSystem) -> None:
    if isinstance(system.site, Gaussian):
        raise ValueError(
            "steepest descent replaces the constraint |S| = R of spheres and Ising spins; "
            f"{system.site!r} has none and is exactly solvable: use MeanField(), which is exact "
            "for the magnetization of Gaussian spins, or Exact()"
        )
    system.require_symmetric("Steepest descent")
    if system.couplings.dim is not None:
        raise ValueError(
            "steepest descent needs scalar couplings (..., N, N), and these are matrix-valued: "
            "use MeanField()"
        )


def _is_low_rank(system: SpinSystem) -> bool:
    """Whether the couplings are worth leaving in their factors."""
    couplings, n = system.couplings, system.num_spins
    if not isinstance(couplings, LowRank) or n < _LOW_RANK_SITES:
        return False
    return couplings.quadratic_form()[0].shape[-1] <= _LOW_RANK_SHARE * n


def _couplings(system: SpinSystem, low_rank: bool) -> tuple[Tensor, ...]:
    """The couplings as differentiable inputs of a saddle."""
    couplings = system.couplings
    if low_rank and isinstance(couplings, LowRank):
        return couplings.quadratic_form()
    return (couplings.to_dense(),)


def _reduced(
    system: SpinSystem, field: Tensor | None = None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The factor beta R^2 / D of the couplings and b = beta R h / D."""
    field = system.field if field is None else field
    beta = system.beta if beta is None else beta
    radius = system.site.radius
    assert radius is not None  # _check
    dim = system.dim
    return beta * (radius**2 / dim), (beta * (radius / dim))[..., None, None] * field


# -- the answers ----------------------------------------------------------------------------------


class SteepestDescentEquilibrium(Equilibrium):
    r"""The steepest-descent answer without fluctuations (SD0), in closed form.

    With :math:`n` present sites, :math:`P = A \circ (A + 2\mu\mu^{\mathsf T})` and
    :math:`k = \beta R^2/D`,

    .. math::
        m = R\mu,\qquad \langle S_i\cdot S_j\rangle = R^2 (A_{ij} + \mu_i\cdot\mu_j),\qquad
        S = \tfrac D2 \log\det A,

        U = -\tfrac12 \sum_{ij} J_{ij} \langle S_i \cdot S_j\rangle - \sum_i h_i\cdot m_i,\qquad
        C = \tfrac D2 \big(n - a^{\mathsf T} P^{-1} a\big),\ a = \operatorname{diag} A,

        \chi_{ia,jb} = k \Big[A_{ij}\delta_{ab}
            - 2 \sum_{kl} A_{ik}\mu_{ka} (P^{-1})_{kl} \mu_{lb} A_{lj}\Big].

    With one shared t, :math:`P^{-1}` is replaced by :math:`1 / \sum_{ij} P_{ij}` in every entry.
    """

    def __init__(
        self,
        system: SpinSystem,
        saddle: Saddle,
        solution: Solution,
        broken: Tensor | None = None,
    ) -> None:
        super().__init__(system, solution, broken)
        assert system.site.radius is not None  # solve() takes spheres and Ising spins
        self._radius = system.site.radius
        self._saddle = saddle
        couplings = _couplings(system, low_rank=isinstance(saddle, LowRankSaddle))
        self._inputs = (*couplings, *_reduced(system))

    @property
    def t(self) -> Tensor:
        r"""The auxiliary variables without derivatives: (..., N), or (...) if shared.

        At an absent site it is that of a free spin, :math:`D / (\beta R^2)`.
        """
        return self.solution.value

    @cached_property
    @in_solving_mode
    def _mean(self) -> tuple[Tensor, Tensor | None]:
        """mu, and what carries the derivative of A."""
        return self._saddle.mean(*self._inputs)

    @property
    @observable
    def magnetization(self) -> Tensor:
        return self._radius * self._mean[0]

    @property
    @observable
    def connected_correlations(self) -> Tensor:
        r""":math:`\langle S_i\cdot S_j\rangle - m_i\cdot m_j = R^2 A_{ij}`, (..., N, N).

        The diagonal is the length that is not in the mean. Zero at absent sites.
        """
        inverse = self._mean[1]
        if inverse is None:
            return self._cast(self._radius**2 * self._response.inverse)
        inverse = clear(self._saddle.completed(inverse), self._saddle.mask)
        return self._cast(self._radius**2 * inverse)

    @property
    @observable
    def log_partition(self) -> Tensor:
        return self.system.dim * self._saddle.minimum(*self._inputs)

    @cached_property
    @in_solving_mode
    def _response(self) -> Response:
        """A and mu with their derivatives."""
        return self._saddle.attach(*self._inputs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.system.field.dtype)

    @property
    @observable
    def internal_energy(self) -> Tensor:
        response = self._response
        pairs = self._radius**2 * response.pairs
        field = (self.system.field * response.mu).sum((-2, -1)) * self._radius
        return self._cast(-pairs / 2 - field)

    @property
    @observable
    def entropy(self) -> Tensor:
        """S = D/2 log det A, (...), relative to free spins."""
        return self._cast(-self.system.dim / 2 * self._response.log_det)

    @observable
    def specific_heat(self) -> Tensor:
        own = self._response.own[..., None]
        lost = (own * self._response.relax(own)).sum((-2, -1))
        return self._cast(self.system.dim / 2 * (self.system.num_present - lost))

    def _chi(self, first: Tensor, second: Tensor) -> Tensor:
        scale = self._inputs[-2]
        return self._cast(
            scale.reshape(*scale.shape, *[1] * (first.ndim - scale.ndim)) * (first - 2 * second)
        )

    def _susceptibility_product(self, vector: Tensor) -> Tensor:
        r""":math:`\chi v` from the closed form: two products with A and one with :math:`P^{-1}`."""
        response, mu = self._response, self._response.mu
        first = response.apply(vector.to(mu.dtype))
        lever = (mu * first).sum(-1, keepdim=True)
        return self._chi(first, response.apply(mu * response.relax(lever)))

    @observable
    def uniform_susceptibility(self) -> Tensor:
        r""":math:`\sum_{ij}\chi_{ia,jb}`, (..., D, D), from one product with A and D with
        :math:`P^{-1}`."""
        response, mu = self._response, self._response.mu
        ones = torch.ones_like(mu[..., :1])
        if self.system.mask is not None:
            ones = ones.masked_fill(self.system.mask[..., None], 0.0)
        sums = response.apply(ones)
        lever = mu * sums
        first = (ones * sums).sum((-2, -1))[..., None, None] * self._identity
        return self._chi(first, lever.mT @ response.relax(lever))

    @observable
    def local_susceptibility(self) -> Tensor:
        r""":math:`\chi_{ia,ib}`, (..., N, D, D).

        Shared: O(N D^2) beyond one product with A. Site: O(N^3 D + N^2 D^2), N^2 D numbers a
        system; for low-rank couplings one product a column, no N^2 numbers.
        """
        response, mu = self._response, self._response.mu
        first = response.own[..., None, None] * self._identity
        if self._saddle.shared:
            # What stands for P^{-1} is the same number in every entry.
            constant = response.relax(torch.ones_like(mu[..., :1])) / max(mu.shape[-2], 1)
            lever = response.apply(mu)
            second = constant[..., None] * lever[..., :, None] * lever[..., None, :]
            return self._chi(first, second)
        if isinstance(self._saddle, LowRankSaddle):
            found: Tensor = super().local_susceptibility()
            return found
        inverse = response.inverse
        levers = [inverse * mu[..., :, b : b + 1] for b in range(mu.shape[-1])]
        columns = []
        for lever in levers:
            relaxed = response.relax(lever)
            columns.append(torch.stack([(other * relaxed).sum(-2) for other in levers], -1))
        second = torch.stack(columns, -1) if columns else first
        return self._chi(first, second)

    def _susceptibility(self) -> Tensor:
        r""":math:`\chi` with the response of the auxiliary variables, O(N^3 D + N^3 D^2)."""
        response, mu = self._response, self._response.mu
        n, d = mu.shape[-2:]
        batch = self.system.batch_shape
        inverse = response.inverse
        # L[k, (i, a)] = A_ik mu_ka
        lever = (inverse[..., :, :, None] * mu[..., :, None, :]).reshape(*batch, n, n * d)
        second = (lever.mT @ response.relax(lever)).reshape(*batch, n, d, n, d)
        first = torch.einsum("...ij,ab->...iajb", inverse, self._identity)
        return self._chi(first, second)

    @property
    def _identity(self) -> Tensor:
        mu = self._response.mu
        return torch.eye(self.system.dim, dtype=mu.dtype, device=mu.device)

    def _linear_response_correlations(self) -> Tensor:
        return self._coupling_correlations()

    def _coupling_correlations(self) -> Tensor:
        return self.connected_correlations + self.magnetization @ self.magnetization.mT


class FluctuationEquilibrium(DerivedEquilibrium):
    r"""The steepest-descent answer with quadratic fluctuations (SD1).

    Every observable is a derivative of
    :math:`\log Z_{\rm SD1} = D\Phi - \tfrac12\log\det[A\circ(A + 2\mu\mu^{\mathsf T})]` (shared:
    :math:`-\tfrac12\log\tfrac1n\sum_{ij}[\dots]_{ij}`) by implicit differentiation of the saddle.
    """

    def __init__(
        self,
        system: SpinSystem,
        saddle: DenseSaddle,
        solution: Solution,
        broken: Tensor | None = None,
    ) -> None:
        def log_partition(couplings: Tensor, field: Tensor, beta: Tensor) -> Tensor:
            # Only ever called with the values that the saddle was solved for.
            inputs = (couplings, *_reduced(system, field, beta))
            leading = system.dim * saddle.minimum(*inputs)
            log_det, _ = saddle.curvature(*saddle.matrices(*inputs)[1:])
            return leading - log_det.to(field.dtype) / 2

        super().__init__(system, log_partition, solution, broken)

    @property
    def t(self) -> Tensor:
        """The auxiliary variables at the saddle, without derivatives; see SD0."""
        return self.solution.value
