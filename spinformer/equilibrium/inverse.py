r"""Couplings from data: the inverse of solving a spin system, by closed forms and by likelihood.

Data are spins, or fields: noisy observations of spins
(:mod:`spinformer.equilibrium.field_density`). Let m_i be the mean of spin i and, per component,
:math:`C_{ij} = (\langle S_i\cdot S_j\rangle - m_i\cdot m_j) / D`. Linear response,
:math:`C^{-1} = \partial b / \partial m` with :math:`b = \beta h`, ties C to the couplings:

========================= ======================================================================
mean field                :math:`\beta J_{ij} = -(C^{-1})_{ij}`
TAP (Ising)               :math:`\beta J_{ij} + 2 (\beta J_{ij})^2 m_i m_j = -(C^{-1})_{ij}`
independent pairs         :math:`\beta J_{ij}` of two spins alone with these m_i, m_j and C_ij
maximum likelihood        the J with :math:`\langle S_i \cdot S_j\rangle_{model} =
                          \langle S_i \cdot S_j\rangle_{data}`
========================= ======================================================================

Sources: Kappen & Rodriguez, Neural Computation 10, 1137 (1998), mean field by linear response;
Tanaka, Phys. Rev. E 58, 2302 (1998), TAP; Roudi, Tyrcha & Hertz, Phys. Rev. E 79, 051915 (2009),
the closed forms compared; Ackley, Hinton & Sejnowski, Cognitive Science 9, 147 (1985), the gradient
of the likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spinformer.equilibrium.exact import Exact
from spinformer.equilibrium.field_density import (
    MOST_ENUMERATED,
    Approximation,
    FieldDensity,
    ising_states,
)
from spinformer.errors import OnFailure, check_choice, check_on_failure, report_failure
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw
from spinformer.spins.special import inverse_reduced_ratio
from spinformer.spins.system import SpinSystem

__all__ = [
    "FittedCouplings",
    "Moments",
    "field_moments",
    "fit_fields",
    "fit_moments",
    "mean_field_inversion",
    "pair_inversion",
    "spin_moments",
    "tap_inversion",
]

Missing = Literal["raise", "nan"]

# Numbers held at once by an enumeration: 32 MiB in float64.
_CHUNK = 2**22
# A coupling in these units (beta J R^2) is not told from infinity by any data: the two spins
# deviate from being parallel once in exp(2 * 30) samples.
_UNBOUNDED = 30.0


class Moments(NamedTuple):
    """What the couplings are found from.

    Attributes:
        magnetization: <S_i>, (..., N, D).
        correlations: <S_i . S_j>, (..., N, N).
        covariance: C_ij = (<S_i . S_j> - <S_i> . <S_j>) / D, (..., N, N), of one component.
    """

    magnetization: Tensor
    correlations: Tensor
    covariance: Tensor


def spin_moments(spins: Tensor) -> Moments:
    """Sample averages of spins (M, ..., N, D) over their first axis.

    Where the mean is known to be zero (no field), ``correlations / D`` is the better covariance.

    Raises:
        ValueError: no sample, or too few axes.
    """
    if spins.ndim < 3 or spins.shape[0] < 1:
        raise ValueError(
            f"spins have shape {tuple(spins.shape)}: pass samples (M, ..., N, D) with M >= 1; "
            "Ising spins (M, N) need spins.unsqueeze(-1)"
        )
    mean = spins.mean(0)
    # One product of matrices a system: no (M, N, N) array in between.
    flat = spins.movedim(0, -2).flatten(-2)
    correlations = flat @ flat.mT / len(spins)
    covariance = (correlations - mean @ mean.mT) / spins.shape[-1]
    return Moments(mean, correlations, covariance)


def field_moments(fields: Tensor, variance: float, beta: float | Tensor = 1.0) -> Moments:
    r"""Moments of the spins behind fields (M, ..., N, D) with a base of that variance.

    Fields are :math:`\sigma^2 \beta S` with independent noise :math:`\sigma^2`, so that
    :math:`\langle S_i\cdot S_j\rangle = (\langle h_i\cdot h_j\rangle - D \sigma^2 \delta_{ij})
    / (\sigma^2\beta)^2`. Samples leave errors on the diagonal too; where it is known (R^2 on
    spheres), put it there.

    Raises:
        ValueError: a variance that is not positive, or as :func:`spin_moments`.
    """
    if not 0 < variance < math.inf:
        raise ValueError(f"variance={variance!r} must be a positive finite number")
    scale = variance * torch.as_tensor(beta, dtype=fields.dtype, device=fields.device)
    mean, correlations, covariance = spin_moments(fields)
    noise = variance * torch.eye(fields.shape[-2], dtype=fields.dtype, device=fields.device)
    scale = scale[..., None, None]
    return Moments(
        mean / scale,
        (correlations - fields.shape[-1] * noise) / scale**2,
        (covariance - noise) / scale**2,
    )


# --- closed forms -------------------------------------------------------------------------------


def mean_field_inversion(
    covariance: Tensor, beta: float | Tensor = 1.0, *, shrinkage: float = 0.0
) -> Tensor:
    r""":math:`\beta J_{ij} = -(C^{-1})_{ij}` off the diagonal, (..., N, N), zero on it.

    Exact for Gaussian spins; for others at weak coupling, with an error in :math:`\beta J` of
    second order. For O(D) spins without a field C is ``correlations / D``, and this is the maximum
    of the likelihood in the steepest-descent approximation too.

    Args:
        covariance: C of one component, (..., N, N), symmetric and positive definite.
        beta: inverse temperature, a number or (...).
        shrinkage: from 0 to 1, how far C is moved to its own diagonal first; a little makes a
            sample covariance of too few samples positive definite.

    One Cholesky factorization, O(N^3).

    Raises:
        ValueError: C is not symmetric, or not positive definite.
    """
    return _off_diagonal(-_precision(covariance, shrinkage)) / _column(beta, covariance)


def tap_inversion(
    covariance: Tensor,
    magnetization: Tensor,
    beta: float | Tensor = 1.0,
    *,
    shrinkage: float = 0.0,
    missing: Missing = "raise",
) -> Tensor:
    r"""Couplings of Ising spins by linear response of the TAP equations, (..., N, N).

    .. math:: \beta J_{ij} + 2 (\beta J_{ij})^2 m_i m_j = a_{ij} = -(C^{-1})_{ij}
              \quad\Rightarrow\quad
              \beta J_{ij} = \frac{2 a_{ij}}{1 + \sqrt{1 + 8 a_{ij} m_i m_j}},

    the root that is :func:`mean_field_inversion` at :math:`m = 0`. The root is real while
    :math:`8 a_{ij} m_i m_j \ge -1`: strong bonds against the signs of the magnetizations have none.

    Args:
        covariance, beta, shrinkage: as for :func:`mean_field_inversion`.
        magnetization: m, (..., N), or (..., N, 1) as in :class:`Moments`.
        missing: what a pair without a real root does: ``"raise"``, or ``"nan"`` in its place.

    Raises:
        ValueError: as for :func:`mean_field_inversion`, or a pair without a real root.
    """
    m = magnetization
    if m.shape[-1:] == (1,) and covariance.shape[-1] != 1:
        m = m.squeeze(-1)
    if m.shape[-1] != covariance.shape[-1]:
        raise ValueError(
            f"magnetization has shape {tuple(magnetization.shape)}: the TAP inversion is for Ising "
            f"spins, (..., {covariance.shape[-1]}) or (..., {covariance.shape[-1]}, 1)"
        )
    check_choice("missing", missing, ("raise", "nan"))
    target = _off_diagonal(-_precision(covariance, shrinkage))
    discriminant = 1 + 8 * target * m[..., :, None] * m[..., None, :]
    lost = discriminant < 0
    if missing == "raise" and bool(lost.any()):
        index = tuple(lost.nonzero()[0].tolist())
        worst = float(discriminant.detach()[index]) - 1
        raise ValueError(
            f"the TAP equations have no real coupling for {int(lost.sum()) // 2} pairs of spins "
            f"(the first: {list(index)}, where 8 a m_i m_j = {worst:.4g} < -1): so "
            "strong a coupling is beyond them; use pair_inversion, fit_moments, or a shrinkage > 0"
        )
    root = torch.where(lost, torch.nan, 1 + torch.where(lost, 1.0, discriminant).sqrt())
    return 2 * target / root / _column(beta, covariance)


def pair_inversion(
    correlations: Tensor,
    site: SiteLaw,
    magnetization: Tensor | None = None,
    beta: float | Tensor = 1.0,
    *,
    missing: Missing = "raise",
) -> Tensor:
    r"""Every pair as if alone, (..., N, N): exact for isolated pairs, and for the bonds of a tree
    at zero field (where pairs without a bond get a spurious coupling).

    Ising spins, with :math:`p_{st}` the probability of the signs s and t:
    :math:`\beta J = \tfrac14 \log \frac{p_{++} p_{--}}{p_{+-} p_{-+}}`. Spheres without a field:
    :math:`\langle S_i \cdot S_j\rangle = R^2 A_D(\beta J R^2)`, solved for J.

    Args:
        correlations: <S_i . S_j>, (..., N, N).
        site: ``Ising()`` or ``Sphere(dim)``.
        magnetization: of Ising spins in fields, (..., N, 1); None is zero.
        beta: inverse temperature, a number or (...).
        missing: what a pair does that is always parallel or always opposite, which takes an
            infinite coupling: ``"raise"``, or ``"nan"`` in its place.

    Raises:
        ValueError: correlations that no finite coupling gives (two spins always parallel); other
            site laws; spheres with a magnetization.
    """
    check_choice("missing", missing, ("raise", "nan"))
    n = correlations.shape[-1]
    pairs = ~torch.eye(n, dtype=torch.bool, device=correlations.device)
    if isinstance(site, Ising):
        m = correlations.new_zeros(n, 1) if magnetization is None else magnetization
        left, right = m, m.mT
        c = torch.where(pairs, correlations, 0.0)
        same = torch.stack([1 + left + right + c, 1 - left - right + c])
        opposite = torch.stack([1 + left - right - c, 1 - left + right - c])
        lost = ((same <= 0) | (opposite <= 0)).any(0) & pairs
        # Ones keep the logarithms (and their gradients) finite where there is nothing to find.
        inside = pairs & ~lost
        ratio = torch.where(inside, same, 1.0).log() - torch.where(inside, opposite, 1.0).log()
        strength = ratio.sum(0) / 4
    elif site.radius is not None and not isinstance(site, LargeDSphere):
        if magnetization is not None:
            raise ValueError(
                f"pair_inversion of {site!r} knows spins without a field only: leave "
                "magnetization out, or use mean_field_inversion of the covariance"
            )
        square = site.radius**2
        alignment = torch.where(pairs, correlations / square, 0.0)
        lost = alignment.abs() >= 1
        alignment = torch.where(lost, 0.0, alignment)
        strength = inverse_reduced_ratio(alignment.square(), site.dim) * alignment / square
    else:
        raise ValueError(
            f"pair_inversion knows Ising() and Sphere(dim), not {site!r}: use mean_field_inversion"
        )
    if missing == "raise":
        _check_finite_pairs(lost, correlations)
    return torch.where(lost, torch.nan, strength) / _column(beta, correlations)


def _precision(covariance: Tensor, shrinkage: float) -> Tensor:
    """The inverse of a covariance that was moved towards its diagonal."""
    if covariance.ndim < 2 or covariance.shape[-1] != covariance.shape[-2]:
        raise ValueError(f"covariance has shape {tuple(covariance.shape)}: it must be (..., N, N)")
    if not 0 <= shrinkage <= 1:
        raise ValueError(f"shrinkage={shrinkage!r} must lie between 0 and 1")
    values = covariance.detach()
    asymmetry = float((values - values.mT).abs().amax()) if values.numel() else 0.0
    scale = float(values.abs().amax()) if values.numel() else 0.0
    # Sums in another order are all that may differ.
    if not asymmetry <= 1e3 * torch.finfo(values.dtype).eps * scale:
        raise ValueError(
            f"covariance differs from its transpose by {asymmetry:.3g}, or holds NaN: pass "
            "a symmetric matrix, (C + C.mT) / 2"
        )
    covariance = (covariance + covariance.mT) / 2
    diagonal = torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
    shrunk = torch.lerp(covariance, diagonal, shrinkage)
    factor, failed = torch.linalg.cholesky_ex(shrunk)
    if bool(failed.any()):
        smallest = float(torch.linalg.eigvalsh(shrunk.detach()).min())
        raise ValueError(
            f"covariance is not positive definite (smallest eigenvalue {smallest:.3g}) with "
            f"shrinkage={shrinkage:g}: use more samples than spins, raise shrinkage, or leave out "
            "spins that never change"
        )
    return torch.cholesky_inverse(factor)


def _off_diagonal(matrix: Tensor) -> Tensor:
    identity = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    return matrix.masked_fill(identity, 0.0)


def _column(beta: float | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(beta, dtype=like.dtype, device=like.device)[..., None, None]


def _check_finite_pairs(unbounded: Tensor, correlations: Tensor) -> None:
    if bool(unbounded.any()):
        index = tuple(unbounded.nonzero()[0].tolist())
        value = float(correlations.detach()[index])
        raise ValueError(
            f"correlations{list(index)} = {value:.6g}: in these data the two spins never part "
            "(or never meet), which no finite coupling gives; use more samples, or leave one of "
            "them out"
        )


# --- maximum likelihood -------------------------------------------------------------------------


@dataclass(frozen=True)
class FittedCouplings:
    """Couplings of largest likelihood, with the evidence for them.

    Attributes:
        couplings: J, (N, N), symmetric with a zero diagonal.
        field: h, (N, D), where fields were fitted, else None.
        log_likelihood: mean over samples, in nats, relative to free spins (of fields: of p(h)).
        residual: largest entry of the gradient of the objective in :math:`\\beta J R^2` and
            :math:`\\beta h R`: how far the model's correlations, relative to R^2, are from those
            of the data (on top of what the ridge adds).
        iterations: steps of the optimizer.
        converged: residual at or below the tolerance.
    """

    couplings: Tensor
    field: Tensor | None
    log_likelihood: float
    residual: float
    iterations: int
    converged: bool


def fit_moments(
    correlations: Tensor,
    site: SiteLaw,
    magnetization: Tensor | None = None,
    beta: float = 1.0,
    *,
    approximation: Approximation | None = None,
    bonds: Tensor | None = None,
    ridge: float = 0.0,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    on_failure: OnFailure = "raise",
) -> FittedCouplings:
    r"""Boltzmann learning from spins: the J (and h) of largest likelihood, for given moments.

    .. math:: \ell = \tfrac\beta2 \sum_{i\ne j} J_{ij} \langle S_i\cdot S_j\rangle_{data}
              + \beta \sum_i h_i \cdot \langle S_i\rangle_{data} - \log Z(J, h),
              \qquad
              \frac{\partial \ell}{\partial J_{ij}} = \beta \big(\langle S_i\cdot S_j\rangle_{data}
              - \langle S_i\cdot S_j\rangle_{model}\big)

    (each pair counted once). With the exact log Z it is concave and its maximum unique; it is
    climbed by L-BFGS (scipy) in float64. It is finite if the data keep away from the boundary of
    what spins can do; otherwise a ridge makes it so.

    Args:
        correlations: <S_i . S_j> of the data, (N, N), from :func:`spin_moments`.
        site: ``Ising()``, ``Sphere(dim)`` or ``LargeDSphere(dim)``. (Gaussian spins:
            :func:`mean_field_inversion` is exact.)
        magnetization: <S_i> of the data, (N, D), to fit fields too; None: there are none.
        beta: inverse temperature.
        approximation: of log Z; None is ``Exact()``. Others give the couplings that reproduce the
            data in that approximation.
        bonds: bool (N, N), which pairs may be coupled; None is all.
        ridge: weight of :math:`-\tfrac12 \text{ridge} \sum_{i<j} (\beta J_{ij} R^2)^2`.
        tolerance: of the residual (:class:`FittedCouplings`); 1e-7 is what rounding still allows.
        max_iterations: of the optimizer.
        on_failure: ``"raise"``, ``"warn"``, ``"ignore"`` or a function of the message.

    Each step costs one solve and one gradient.

    Raises:
        ConvergenceError: the tolerance is not reached, or a coupling runs away.
        ValueError: a system that the approximation does not solve; two spins that are always
            parallel, without a ridge.
    """
    if correlations.ndim != 2 or correlations.shape[0] != correlations.shape[1]:
        raise ValueError(
            f"correlations have shape {tuple(correlations.shape)}: fit one system, (N, N)"
        )
    shape = (len(correlations), site.dim)
    if magnetization is not None and magnetization.shape != shape:
        raise ValueError(
            f"magnetization has shape {tuple(magnetization.shape)}: it must be (N, D) = {shape}"
        )
    approximation = Exact() if approximation is None else approximation
    data = correlations.detach().double()
    mean = None if magnetization is None else magnetization.detach().double()
    parameters = _Parameters(len(data), site, beta, bonds, mean is not None, data.device)
    square = parameters.radius**2
    if ridge == 0:
        bonded = torch.zeros_like(data, dtype=torch.bool)
        bonded[parameters.first, parameters.second] = True
        _check_finite_pairs(bonded & (data.abs() >= square * (1 - 1e-12)), data)

    def log_likelihood(couplings: Tensor, field: Tensor) -> Tensor:
        log_z = approximation.solve(SpinSystem(couplings, field, beta, site)).log_partition
        value = beta / 2 * (couplings * data).sum() - log_z
        return value if mean is None else value + beta * (field * mean).sum()

    return _maximize(
        log_likelihood, parameters, "fit_moments", ridge, tolerance, max_iterations, on_failure
    )


def fit_fields(
    fields: Tensor,
    site: SiteLaw,
    variance: float,
    beta: float = 1.0,
    *,
    bonds: Tensor | None = None,
    ridge: float = 0.0,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    on_failure: OnFailure = "raise",
) -> FittedCouplings:
    r"""Boltzmann learning from fields: the J of largest mean :meth:`FieldDensity.log_prob`.

    .. math:: \frac{\partial \ell}{\partial J_{ij}} = \beta \big(\overline{\langle S_i\cdot S_j
              \rangle_{h}} - \langle S_i\cdot S_j\rangle_{0}\big),

    the correlations of spins in each field of the data against those without a field. It is a
    difference of two concave functions: the maximum that L-BFGS climbs to, from J = 0, is a local
    one. Weak observations (:math:`\sigma\beta R \ll 1`) say little about J.

    Args:
        fields: h, (M, N, D).
        site: ``Ising()``, or ``Sphere(dim)`` for N <= 2.
        variance: :math:`\sigma^2` of the base.
        beta, bonds, ridge, tolerance, max_iterations, on_failure: as in :func:`fit_moments`.

    Each step costs M exact solves: :math:`M\, 2^N` for Ising spins.

    Raises:
        ConvergenceError, ValueError: as :func:`fit_moments`.
    """
    if fields.ndim != 3 or len(fields) < 1:
        raise ValueError(f"fields have shape {tuple(fields.shape)}: pass samples (M, N, D)")
    data = fields.detach().double()
    parameters = _Parameters(data.shape[1], site, beta, bonds, False, data.device)

    if isinstance(site, Ising) and data.shape[1] <= MOST_ENUMERATED:
        log_likelihood = _likelihood_of_states(data, variance, beta)
    else:

        def log_likelihood(couplings: Tensor, _: Tensor) -> Tensor:
            return FieldDensity(couplings, site, variance, beta).log_prob(data).mean()

    return _maximize(
        log_likelihood, parameters, "fit_fields", ridge, tolerance, max_iterations, on_failure
    )


def _likelihood_of_states(
    fields: Tensor, variance: float, beta: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean log p of Ising spins' fields (M, N, 1). It is that of :class:`FieldDensity`, which would
    sum up the couplings' part of the energy of every state for every field again."""
    num_spins = fields.shape[1]
    free = FieldDensity(fields.new_zeros(num_spins, num_spins), Ising(), variance, beta)
    constant = (free.log_prob(fields) - Ising().log_partition(beta * fields).sum(-1)).mean()
    states = ising_states(num_spins, fields.device)
    chunks = (beta * fields[..., 0]).split(max(1, _CHUNK // len(states)))

    def log_sums(b: Tensor, exponent: Tensor) -> Tensor:
        return torch.logsumexp(exponent + b @ states.mT, -1).sum()

    def log_likelihood(couplings: Tensor, _: Tensor) -> Tensor:
        exponent = beta / 2 * ((states @ couplings) * states).sum(-1)
        total = torch.stack(
            [checkpoint(log_sums, b, exponent, use_reentrant=False) for b in chunks]
        ).sum()
        return constant + total / len(fields) - exponent.logsumexp(0)

    return log_likelihood


class _Parameters:
    """The vector that is optimized: beta J R^2 of each pair, then beta h R."""

    def __init__(
        self,
        num_spins: int,
        site: SiteLaw,
        beta: float,
        bonds: Tensor | None,
        with_field: bool,
        device: torch.device,
    ) -> None:
        if site.radius is None or isinstance(site, Gaussian):
            raise ValueError(
                f"{site!r}: the couplings of Gaussian spins are mean_field_inversion(covariance), "
                "exactly; likelihood is climbed for Ising spins and spheres"
            )
        if not (math.isfinite(beta) and beta > 0):
            raise ValueError(f"beta={beta!r} must be positive and finite")
        self.radius, self.beta = float(site.radius), float(beta)
        self.shape = (num_spins, site.dim)
        self.with_field = with_field
        allowed = torch.ones(num_spins, num_spins, dtype=torch.bool, device=device)
        if bonds is not None:
            if bonds.dtype != torch.bool or bonds.shape != allowed.shape:
                raise ValueError(
                    f"bonds is {bonds.dtype} {tuple(bonds.shape)}: pass a bool tensor "
                    f"{tuple(allowed.shape)}, True = this pair may be coupled"
                )
            allowed = bonds | bonds.mT
        self.first, self.second = allowed.triu(1).nonzero(as_tuple=True)

    @property
    def count(self) -> int:
        own = self.shape[0] * self.shape[1] if self.with_field else 0
        return len(self.first) + own

    def unpack(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """J (N, N) and h (N, D)."""
        pairs, own = vector.split([len(self.first), len(vector) - len(self.first)])
        matrix = vector.new_zeros(self.shape[0], self.shape[0])
        half = matrix.index_put((self.first, self.second), pairs / (self.beta * self.radius**2))
        field = vector.new_zeros(self.shape)
        if self.with_field:
            field = own.reshape(self.shape) / (self.beta * self.radius)
        return half + half.mT, field


def _maximize(
    log_likelihood: Callable[[Tensor, Tensor], Tensor],
    parameters: _Parameters,
    what: str,
    ridge: float,
    tolerance: float,
    max_iterations: int,
    on_failure: OnFailure,
) -> FittedCouplings:
    if not (math.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"ridge={ridge!r} must be zero or positive")
    if not tolerance > 0:
        raise ValueError(f"tolerance={tolerance!r} must be positive")
    if max_iterations < 1:
        raise ValueError(f"max_iterations={max_iterations!r} must be an integer >= 1")
    check_on_failure(on_failure)
    num_pairs = len(parameters.first)
    device = parameters.first.device

    def loss(vector: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        with torch.enable_grad():
            x = torch.from_numpy(vector.copy()).to(device).requires_grad_()
            value = ridge / 2 * x[:num_pairs].square().sum() - log_likelihood(*parameters.unpack(x))
            (gradient,) = torch.autograd.grad(value, x)
        return float(value.detach()), gradient.cpu().numpy()

    # Imported where it is needed: scipy's optimizers take longer to import than the rest of this
    # package, and few callers come here.
    from scipy.optimize import minimize  # noqa: PLC0415

    # ftol = 0: it is the gradient that decides, not how little the likelihood still changes.
    options: dict[str, Any] = {"maxiter": max_iterations, "ftol": 0.0, "gtol": tolerance / 2}
    found = minimize(loss, np.zeros(parameters.count), jac=True, method="L-BFGS-B", options=options)
    best = torch.from_numpy(np.asarray(found.x, dtype=np.float64)).to(device)
    residual = float(np.abs(found.jac).max(initial=0.0))
    largest = float(best[:num_pairs].abs().max()) if num_pairs else 0.0
    converged = residual <= tolerance and largest < _UNBOUNDED
    couplings, field = parameters.unpack(best)
    if not converged:
        report_failure(
            on_failure,
            f"{what}: residual {residual:.3g} after {found.nit} iterations (tolerance "
            f"{tolerance:g}), largest |beta J| R^2 = {largest:.3g}. "
            + (
                "The data do not bound the couplings: set ridge > 0, or use more samples"
                if largest >= _UNBOUNDED
                else "Raise max_iterations or tolerance"
            ),
        )
    penalty = ridge / 2 * float(best[:num_pairs].square().sum())
    return FittedCouplings(
        couplings,
        field if parameters.with_field else None,
        penalty - float(found.fun),
        residual,
        int(found.nit),
        converged,
    )
