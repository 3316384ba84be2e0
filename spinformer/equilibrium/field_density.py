r"""The field as data: the probability density of the external fields of a spin system.

Spins and fields together, with a Gaussian base of variance :math:`\sigma^2` a component on the
fields of the N sites,

.. math:: p(h, S) \propto \mathcal N(h; 0, \sigma^2)\, e^{-\beta E(S; h)} ,

leave, summed over the spins, a density of the fields alone:

.. math:: p(h) = \mathcal N(h; 0, \sigma^2)\, \frac{Z(J, h)}{Z_0}, \qquad
          Z_0 = \int \mathcal N(h; 0, \sigma^2)\, Z(J, h)\, dh .

Completing the square in :math:`h` gives the whole of it in closed form. Given the spins, fields
are :math:`\mathcal N(\sigma^2 \beta S, \sigma^2)`: a field is a *noisy observation of a spin*.
What is left for the spins is the weight :math:`e^{\sigma^2\beta^2|S|^2/2}`, which on spheres is a
constant: they follow the Boltzmann law without a field, and

.. math:: Z_0 = Z(J, 0)\, e^{N \sigma^2 \beta^2 R^2 / 2} .

For Gaussian spins of variance v it leaves
:math:`Z_0 = \det\big[(1 - v \sigma^2 \beta^2)\, 1 - v \beta J\big]^{-D/2}`, while that matrix is
positive definite. The gradient of the density is the denoising identity
:math:`\sigma^2 \nabla_h \log p = \sigma^2 \beta\, m(h) - h`, with the magnetization as the
posterior mean :math:`\langle S | h \rangle` (Tweedie's formula).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from spinformer.equilibrium.exact import Exact, components
from spinformer.errors import (
    OnFailure,
    check_choice,
    check_on_failure,
    report_failure,
    strict_options,
)
from spinformer.spins.couplings import Couplings, Dense
from spinformer.spins.site import Gaussian, Ising, LargeDSphere, SiteLaw, Sphere
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import Equilibrium

__all__ = ["Approximation", "FieldDensity", "LogNormalizer", "log_base"]

# Numbers held at once while normalizers are estimated: 32 MiB in float64.
_CHUNK = 2**22
MOST_ENUMERATED = 20


class Approximation(Protocol):
    """What solves a system: ``Exact()``, ``MeanField()``, ``SteepestDescent()`` ..."""

    def solve(self, system: SpinSystem) -> Equilibrium:
        """The equilibrium of every system of the batch."""


@dataclass(frozen=True)
class LogNormalizer:
    r""":math:`\log Z_0` with the evidence for it, one entry a system.

    Attributes:
        value: (...), log Z_0 relative to free spins.
        standard_error: (...), of ``value``; zero for the closed form.
        effective_sample_size: (...), the number of equally weighted draws that would do as well;
            infinite for the closed form.
    """

    value: Tensor
    standard_error: Tensor
    effective_sample_size: Tensor


def log_base(field: Tensor, variance: float, num_present: Tensor | float) -> Tensor:
    r""":math:`\log \mathcal N(h; 0, \sigma^2)` of fields (..., N, D) that are zero at absent sites.

    Args:
        field: h, (..., N, D).
        variance: :math:`\sigma^2`, of each component.
        num_present: number of sites that are there, (...).
    """
    components = num_present * field.shape[-1]
    log_norm = components * math.log(2 * math.pi * variance)
    return -(field.square().sum((-2, -1)) / variance + log_norm) / 2


@strict_options
class FieldDensity:
    r"""The density p(h) of fields, or, where the free energy is an approximation, a score of them.

    .. math:: \log p(h) = \log \mathcal N(h; 0, \sigma^2) + \log Z(J, h) - \log Z_0

    **A density** needs the exact log Z and couplings that do not depend on the field; then
    :meth:`log_prob` is normalized. With an approximation of log Z, or with *amortized* couplings
    J(h), what is left is :meth:`score`, the same without :math:`Z_0`: it ranks fields, and its
    normalizer can be estimated (:meth:`log_normalizer`), but nothing else makes it a density.

    Args:
        couplings: J as for :class:`~spinformer.SpinSystem`, symmetric; or a function of the field
            (..., N, D) that returns it (amortized couplings).
        site: the law of one spin.
        variance: :math:`\sigma^2 > 0` of each component of the base.
        beta: inverse temperature, a number or a tensor ``(...)``.
        approximation: what gives log Z; None is ``Exact()``, which knows: Ising spins up to N = 20,
            Gaussian spins, and spheres in fields for N <= 2 only; beyond, it raises and names the
            approximations.
        mask: bool ``(..., N)``, True = this site is not there: it has no field either.
        num_spins: N, for amortized couplings without a mask only (to draw fields from).

    Raises:
        TypeError: ``couplings`` or ``site`` is none.
        ValueError: asymmetric couplings, a variance that is not positive, or Gaussian spins whose
            fields have no density: :math:`v (\sigma^2 \beta^2 + \beta J)` has an eigenvalue of 1 or
            more.
    """

    def __init__(
        self,
        couplings: Tensor | Couplings | Callable[[Tensor], Tensor | Couplings],
        site: SiteLaw,
        variance: float,
        beta: float | Tensor = 1.0,
        approximation: Approximation | None = None,
        mask: Tensor | None = None,
        *,
        num_spins: int | None = None,
    ) -> None:
        if not (isinstance(variance, (int, float)) and 0 < variance < math.inf):
            raise ValueError(f"variance={variance!r} must be a positive finite number")
        if not isinstance(site, SiteLaw):
            raise TypeError(
                f"site={site!r} is no site law: pass Ising(), Sphere(dim) or Gaussian(dim)"
            )
        self.couplings, self.site, self.beta, self.mask = couplings, site, beta, mask
        self.variance = float(variance)
        self.approximation: Approximation = Exact() if approximation is None else approximation
        self.amortized = callable(couplings)
        if (num_spins is not None) and (not self.amortized or mask is not None):
            raise ValueError(
                f"num_spins={num_spins}: it is for couplings that are a function of the field, "
                "without a mask; leave it out"
            )
        if mask is not None:
            num_spins = mask.shape[-1]
        elif not self.amortized:
            num_spins = couplings.shape[-1] if isinstance(couplings, Tensor) else None
            num_spins = couplings.num_spins if isinstance(couplings, Couplings) else num_spins
        self._num_spins = num_spins
        if not self.amortized:
            self._without_field().require_symmetric("FieldDensity")

    def system(self, field: Tensor) -> SpinSystem:
        """The spins in these fields (..., N, D), for a look at their magnetization, say."""
        couplings = self.couplings(field) if callable(self.couplings) else self.couplings
        return SpinSystem(couplings, field, self.beta, self.site, mask=self.mask)

    def score(self, field: Tensor) -> Tensor:
        r""":math:`\log \mathcal N(h; 0, \sigma^2) + \log Z(J, h)`, (...), not normalized.

        Higher is more like data. Differentiable in the field, the couplings and beta. (The word is
        meant as in scoring, not for the gradient of a log-density.) Differences between fields are
        log-ratios of densities if log Z is exact and J does not depend on the field. It costs one
        solve of the approximation.
        """
        system = self.system(field)
        system.require_symmetric("FieldDensity.score")
        log_z = self.approximation.solve(system).log_partition
        return log_base(system.field, self.variance, system.num_present) + log_z

    def log_prob(self, field: Tensor) -> Tensor:
        r""":math:`\log p(h)`, (...), of fields (..., N, D): normalized, in nats.

        Differentiable in the field, the couplings and beta; its gradient in J is
        :math:`\tfrac\beta2 (\langle S_i \cdot S_j\rangle_h - \langle S_i \cdot S_j\rangle_0)`, that
        of Boltzmann learning. It costs two exact solves.

        Raises:
            ValueError: this is no density (an approximation, amortized couplings), or a system
                that :class:`~spinformer.Exact` cannot solve.
        """
        self._require_density("log_prob", "score(field), which is not normalized")
        return self.score(field) - self._closed_form()

    def log_normalizer(
        self,
        method: Literal["closed_form", "importance"] = "closed_form",
        *,
        num_samples: int = 1000,
        generator: torch.Generator | None = None,
        min_effective_samples: float = 100.0,
        on_failure: OnFailure = "raise",
    ) -> LogNormalizer:
        r""":math:`\log Z_0 = \log \int e^{\text{score}(h)} dh`.

        Args:
            method: ``"closed_form"`` (a density only; differentiable), or ``"importance"``: an
                average over fields drawn from the density of *uncoupled* spins, which differs from
                this one by the effect of the couplings only. Draws from the base would need
                :math:`e^{N \sigma^2\beta^2 R^2}` times as many. No gradients.
            num_samples: number of fields to draw.
            generator: source of the random numbers.
            min_effective_samples: the estimate fails below so many. (An estimate that has missed
                where the weight lies may not notice; repeat it with more draws.)
            on_failure: ``"raise"``, ``"warn"``, ``"ignore"`` or a function of the message.

        The estimate of Z_0 has no bias; that of its logarithm has one of
        ``-standard_error**2 / 2``. It costs ``num_samples`` solves of the approximation.

        Raises:
            ConvergenceError: too few effective samples.
            ValueError: the closed form of what is no density.
        """
        check_choice("method", method, ("closed_form", "importance"))
        if method == "closed_form":
            self._require_density("closed_form", "method='importance', an estimate")
            value = self._closed_form()
            return LogNormalizer(value, torch.zeros_like(value), torch.full_like(value, math.inf))
        if num_samples < 2:
            raise ValueError(f"num_samples={num_samples}: an error estimate needs 2 or more")
        check_on_failure(on_failure)
        with torch.no_grad():
            estimate = self._importance(num_samples, generator)
        worst = float(estimate.effective_sample_size.min()) if estimate.value.numel() else math.inf
        if not worst >= min_effective_samples:
            report_failure(
                on_failure,
                f"importance sampling of Z_0: {num_samples} draws are worth {worst:.3g} "
                f"independent ones, fewer than min_effective_samples={min_effective_samples:g}: "
                "raise num_samples, or lower beta, the couplings or the variance",
            )
        return estimate

    def sample_spins(self, num_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of the spins behind the fields, (num_samples, ..., N, D).

        On spheres they follow the Boltzmann law without a field, exactly. Ising spins up to N = 20
        are drawn from the list of all states, Gaussian spins by a Cholesky factor, spheres (and
        more Ising spins) on forests from the root outwards.

        Raises:
            ValueError: amortized couplings, a graph with loops where it must not have any, or a
                negative number of samples.
        """
        if self.amortized:
            raise ValueError(
                "fields with couplings that depend on them have no law of the spins to draw from: "
                "FieldDensity.sample and sample_spins need fixed couplings"
            )
        if num_samples < 0:
            raise ValueError(f"num_samples={num_samples} must be zero or more")
        with torch.no_grad():
            system = self._without_field()
            shape = (num_samples, *system.field.shape)
            if system.num_spins == 0 or num_samples == 0:
                return system.field.new_zeros(shape)
            if isinstance(self.site, Gaussian):
                spins = _gaussian_spins(
                    self._gaussian_precision(system), self.site, shape, generator
                )
            elif isinstance(self.site, Ising) and system.num_spins <= MOST_ENUMERATED:
                spins = _enumerated_spins(system, num_samples, generator)
            else:
                spins = _forest_spins(system, num_samples, generator)
            spins = spins.to(system.field.dtype)
            return spins if system.mask is None else spins.masked_fill(system.mask[..., None], 0.0)

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of the field, (num_samples, ..., N, D): :meth:`observe` of
        :meth:`sample_spins`. It is exact, whatever the approximation."""
        return self.observe(
            self.sample_spins(num_samples, generator=generator), generator=generator
        )

    def observe(self, spins: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        r"""Fields given the spins, :math:`\mathcal N(\sigma^2 \beta S, \sigma^2)`, (..., N, D).

        Args:
            spins: (..., N, D), of any origin: a Monte Carlo run at zero field gives exact draws of
                the field where :meth:`sample` cannot.
        """
        self.site.check_components(spins)
        beta = torch.as_tensor(self.beta, dtype=spins.dtype, device=spins.device)
        noise = torch.randn(
            spins.shape, generator=generator, dtype=spins.dtype, device=spins.device
        )
        field = self.variance * beta[..., None, None] * spins + math.sqrt(self.variance) * noise
        return field if self.mask is None else field.masked_fill(self.mask[..., None], 0.0)

    def __repr__(self) -> str:
        couplings = "amortized" if self.amortized else f"N={self._num_spins}"
        return (
            f"FieldDensity({couplings}, site={self.site!r}, variance={self.variance:g}, "
            f"{type(self.approximation).__name__})"
        )

    # -- the normalizer -------------------------------------------------------------------------

    def _require_density(self, what: str, instead: str) -> None:
        why = None
        if self.amortized:
            why = "couplings that depend on the field have no closed-form normalizer"
        elif not isinstance(self.approximation, Exact):
            why = f"the log Z of {type(self.approximation).__name__} has no closed-form normalizer"
        elif isinstance(self.site, LargeDSphere):
            why = (
                "the large-D response is no average over spins (site=Sphere(dim, radius) is), and "
                "has no closed-form normalizer"
            )
        if why is not None:
            raise ValueError(f"{what}: {why}. Use {instead}")

    def _without_field(self) -> SpinSystem:
        """The spins with no field on them."""
        couplings = None if callable(self.couplings) else self.couplings
        like = couplings if couplings is not None else self.beta
        num_spins = self._num_spins
        if num_spins is None:
            if couplings is not None:
                raise TypeError(
                    f"couplings is {type(self.couplings).__name__}: pass a tensor, Couplings, or a "
                    "function of the field"
                )
            raise ValueError(
                "to draw fields for couplings that depend on them, the number of sites must be "
                "known: pass FieldDensity(..., num_spins=N) or a mask"
            )
        zero = torch.zeros(num_spins, self.site.dim)
        if isinstance(like, (Tensor, Couplings)):
            zero = zero.to(dtype=like.dtype, device=like.device)
        if couplings is None:
            couplings = Dense(zero.new_zeros(num_spins, num_spins))
        return SpinSystem(couplings, zero, self.beta, self.site, mask=self.mask)

    def _closed_form(self) -> Tensor:
        """log Z_0, (...)."""
        system = self._without_field()
        if isinstance(self.site, Gaussian):
            factor = torch.linalg.cholesky(self._gaussian_precision(system))
            log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            value: Tensor = -self.site.dim / 2 * log_det
            return value.expand(system.batch_shape).to(system.field.dtype)
        return self.approximation.solve(system).log_partition + self._tilt(system)

    def _tilt(self, system: SpinSystem) -> Tensor:
        r"""log Z_0 of uncoupled spins: :math:`n \sigma^2\beta^2 R^2/2` on spheres, (...)."""
        tilt = self.variance * system.beta.square()
        if isinstance(self.site, Gaussian):
            return -system.num_present * self.site.dim / 2 * torch.log1p(-self.site.variance * tilt)
        assert self.site.radius is not None
        return system.num_present * tilt * self.site.radius**2 / 2

    def _gaussian_precision(self, system: SpinSystem) -> Tensor:
        r""":math:`(1 - v\sigma^2\beta^2)\, 1 - v \beta J` in float64, (..., N, N): v times the
        inverse covariance of Gaussian spins behind fields; 1 at absent sites."""
        assert isinstance(self.site, Gaussian)
        if system.couplings.dim is not None:
            raise ValueError(
                f"FieldDensity of Gaussian spins takes scalar couplings J (..., N, N), not "
                f"{system.couplings!r}"
            )
        beta = system.beta.double()[..., None, None]
        eye = torch.eye(system.num_spins, dtype=torch.float64, device=beta.device)
        tilt = self.variance * beta.square() * eye
        if system.present is not None:
            tilt = tilt * system.present[..., None]
        matrix = tilt + beta * system.couplings.to_dense().double()
        matrix = (matrix + matrix.mT) / 2
        largest = torch.linalg.eigvalsh(matrix.detach())[..., -1:] * self.site.variance
        if bool((largest >= 1).any()):
            raise ValueError(
                "fields of Gaussian spins have a density while v * (variance * beta^2 + beta * J) "
                f"has no eigenvalue of 1 or more (v = {self.site.variance:g} of a spin's "
                f"component): the largest is {float(largest.max()):.6g}. Lower the variance of the "
                "base, beta or the couplings"
            )
        return eye - self.site.variance * matrix

    def _importance(self, num_samples: int, generator: torch.Generator | None) -> LogNormalizer:
        free = self._without_field()
        site: SiteLaw = self.site
        if isinstance(site, Gaussian):
            self._gaussian_precision(free)  # raises where there is nothing to draw from
        # Fields are drawn from true spins, whatever closed form the response has.
        proposal = Sphere(site.dim, site.radius) if isinstance(site, LargeDSphere) else site
        shape = free.field.shape
        size = max(1, math.prod(shape[:-2])) * free.num_spins * max(free.num_spins, site.dim)
        step = max(1, _CHUNK // max(1, size))
        log_weights = []
        for start in range(0, num_samples, step):
            count = min(step, num_samples - start)
            spins = _free_spins(proposal, free, self.variance, count, generator)
            system = self.system(self.observe(spins, generator=generator))
            system.require_symmetric("FieldDensity.log_normalizer")
            log_z = self.approximation.solve(system).log_partition
            b = system.beta[..., None, None] * system.field
            log_weights.append((log_z - proposal.log_partition(b).sum(-1)).double())
        log_weight = torch.cat(log_weights) + self._tilt(free).double()
        total = log_weight.logsumexp(0)
        effective = torch.exp(2 * total - (2 * log_weight).logsumexp(0))
        # Rounding must not turn equal weights into a negative variance.
        spread = (num_samples / effective - 1).clamp_min(0.0)
        dtype = free.field.dtype
        return LogNormalizer(
            (total - math.log(num_samples)).to(dtype),
            torch.sqrt(spread / (num_samples - 1)).to(dtype),
            effective.to(dtype),
        )


# --- draws of the spins -------------------------------------------------------------------------


def _free_spins(
    site: SiteLaw,
    system: SpinSystem,
    variance: float,
    count: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Uncoupled spins under the weight that the base leaves them, (count, ..., N, D)."""
    spins = site.sample(system.field.new_zeros(count, *system.field.shape), generator)
    if isinstance(site, Gaussian):
        tilt = site.variance * variance * system.beta.square()
        spins = spins * torch.rsqrt(1 - tilt)[..., None, None]
    return spins


def _gaussian_spins(
    precision: Tensor, site: Gaussian, shape: Sequence[int], generator: torch.Generator | None
) -> Tensor:
    factor = torch.linalg.cholesky(precision)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=precision.device)
    whole = factor.mT.expand(*shape[:-2], *factor.shape[-2:])
    spins: Tensor = math.sqrt(site.variance) * torch.linalg.solve_triangular(
        whole, noise, upper=True
    )
    return spins


def ising_states(num_spins: int, device: torch.device | None = None) -> Tensor:
    """All (2^N, N) states of N Ising spins, in float64."""
    index = torch.arange(2**num_spins, device=device)
    bits = (index[:, None] >> torch.arange(num_spins, device=device)) & 1
    return 2.0 * bits.double() - 1.0


def _enumerated_spins(
    system: SpinSystem, num_samples: int, generator: torch.Generator | None
) -> Tensor:
    num_spins = system.num_spins
    states = ising_states(num_spins, system.field.device)
    dense = system.beta.double()[..., None, None] * system.couplings.to_dense().double()
    dense = dense.expand(*system.batch_shape, num_spins, num_spins)
    rows = []
    for couplings in dense.reshape(-1, num_spins, num_spins):
        weight = (((states @ couplings) * states).sum(-1) / 2).softmax(0)
        drawn = torch.multinomial(weight, num_samples, replacement=True, generator=generator)
        rows.append(states[drawn])
    if not rows:
        return system.field.new_zeros(num_samples, *system.field.shape)
    return torch.stack(rows, 1).reshape(num_samples, *system.field.shape)


def _forest_spins(
    system: SpinSystem, num_samples: int, generator: torch.Generator | None
) -> Tensor:
    """From each root outwards: a spin sees its parent only, as a field."""
    if system.couplings.dim is not None:
        raise ValueError(
            f"FieldDensity.sample draws spins with scalar couplings J (..., N, N), not "
            f"{system.couplings!r}: draw them by Monte Carlo and use observe(spins)"
        )
    dense = system.beta[..., None, None] * system.couplings.to_dense()
    bonds = (dense.reshape(-1, *dense.shape[-2:]) != 0).any(0)
    neighbours = [row.nonzero().flatten().tolist() for row in bonds]
    trees = components(range(len(bonds)), neighbours)
    if int(bonds.sum()) // 2 != len(bonds) - len(trees):
        raise ValueError(
            f"FieldDensity.sample draws spins of {system.site!r} on chains, trees and forests "
            f"(Ising spins up to N = {MOST_ENUMERATED} on any graph), and the bonds of these "
            f"{len(bonds)} spins form loops: draw the spins by Monte Carlo at zero field and use "
            "observe(spins)"
        )
    silent = system.field.new_zeros(num_samples, *system.field.shape)
    spins = list(silent.unbind(-2))
    for tree in trees:
        for site, parent in tree.items():
            b = silent[..., 0, :]
            if site != parent:
                b = dense[..., site, parent, None] * spins[parent]
            spins[site] = system.site.sample(b, generator)
    return torch.stack(spins, -2)
