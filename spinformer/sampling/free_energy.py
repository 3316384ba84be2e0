r"""Free energies from simulations, which see energies only: integration and reweighting.

*Thermodynamic integration* switches the couplings on along :math:`\lambda J`, from independent
spins, whose log Z is known exactly whatever their fields are:

.. math::
    \log Z = \sum_i \log z(\beta h_i) - \beta \int_0^1 \langle E_J \rangle_\lambda\, d\lambda,
    \qquad E_J = -\tfrac12 \sum_{i \ne j} S_i \cdot J_{ij} S_j .

*Multi-histogram reweighting* joins simulations at several temperatures into one estimate of the
density of states, and reads off log Z, energies and other means at every temperature between.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spinformer.errors import (
    ConvergenceError,
    OnFailure,
    check_on_failure,
    report_failure,
    strict_options,
)
from spinformer.sampling.monte_carlo import MonteCarlo
from spinformer.sampling.observables import sampled_law
from spinformer.sampling.sampled import SampledEquilibrium
from spinformer.spins.system import SpinSystem
from spinformer.thermo.statistics import bin_means, combined_error, estimate

__all__ = [
    "FreeEnergyEstimate",
    "Interpolated",
    "MultiHistogram",
    "ThermodynamicIntegration",
]

# Neighbours on a ladder share so much of their states at least (Klimovich, Shirts & Mobley, J.
# Comput. Aided Mol. Des. 29, 397 (2015)), and a mean rests on so many samples.
_LEAST_OVERLAP = 0.03
_FEWEST_SAMPLES = 50
# Residual of the equations of MBAR: far below any statistical error.
_RESIDUAL = 1e-6
# Measurements of a chain that are kept however slow it is.
_KEPT = 64


@dataclass(frozen=True)
class FreeEnergyEstimate:
    r"""log Z from thermodynamic integration; entries are (*batch) unless said otherwise.

    Attributes:
        system: the system.
        log_partition: log Z relative to free spins.
        error: its standard error, of the sampling.
        quadrature_error: what the rule of integration may add.
        start: log Z without couplings, exact.
        nodes: strengths lambda of the couplings, (K + 1): 0 and those that were sampled.
        integrand: :math:`-\beta \langle E_J\rangle` at the nodes, (K + 1, *batch).
        integrand_error: its standard errors, zero at lambda = 0, (K + 1, *batch).
        sampled: the runs at nodes 1 ... K, a batch (K, *batch). The last one is of the system
            itself.
    """

    system: SpinSystem
    log_partition: Tensor
    error: Tensor
    quadrature_error: Tensor
    start: Tensor
    nodes: Tensor
    integrand: Tensor
    integrand_error: Tensor
    sampled: SampledEquilibrium

    @property
    def free_energy(self) -> Tensor:
        """F = -log Z / beta, (*batch)."""
        return -self.log_partition / self.system.beta

    @property
    def free_energy_error(self) -> Tensor:
        """Standard error of F, (*batch)."""
        return self.error / self.system.beta


@strict_options
class ThermodynamicIntegration:
    r"""log Z by integration over the strength of the couplings.

    Nodes are those of Clenshaw and Curtis, :math:`\lambda_k = (1 - \cos(\pi k/K))/2`: the integrand
    is known at the first, the last is the system itself, and every other one makes the rule of half
    the order, a nested check. All are one batch, and one Monte Carlo run: couplings
    :math:`\lambda J` in the same :math:`\beta h` are the system at inverse temperature
    :math:`\lambda\beta` in the field :math:`h/\lambda`, whatever kind of couplings J is.

    With :math:`\epsilon` the difference of the two rules and A the mean variation of the integrand,
    the quadrature error is taken to be :math:`A (\epsilon / A)^{3/2}`: a smooth integrand's error
    is squared where the order is doubled, and the exponent leaves a margin (as QUADPACK): an
    estimate, no bound. A phase transition on the path makes the integrand steep; more nodes resolve
    it.

    Args:
        monte_carlo: how to sample; its error is propagated.
        nodes: K, an even number >= 2 of strengths to sample.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"`` where the quadrature error is larger
            than the statistical one.

    Cost: K Monte Carlo runs, advanced together.

    Source: Frenkel & Smit, Understanding Molecular Simulation (2002), chapter 7; Trefethen, SIAM
    Rev. 50, 67 (2008) on the rule.
    """

    def __init__(
        self, monte_carlo: MonteCarlo, nodes: int = 8, on_failure: OnFailure = "warn"
    ) -> None:
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 2 or nodes % 2:
            raise ValueError(
                f"nodes={nodes!r} must be an even integer >= 2: every other one is the nested rule"
            )
        check_on_failure(on_failure)
        self.monte_carlo = monte_carlo
        self.nodes = nodes
        self.on_failure = on_failure

    @torch.no_grad()
    def solve(self, system: SpinSystem) -> FreeEnergyEstimate:
        """Integrate.

        Args:
            system: symmetric couplings of any kind, any site law and batch.

        Raises:
            ValueError: asymmetric couplings.
            ConvergenceError: with ``on_failure="raise"``.
        """
        system.require_symmetric("A free energy")
        law = sampled_law(system.site)
        field = system.field.double()
        bound = system.beta.double()[..., None, None] * field
        start = law.log_partition(bound).sum(-1)
        free = law.mean(bound).to(system.field.dtype)
        first = (free * system.couplings.apply(free)).sum((-2, -1)).double() / 2 * system.beta

        nodes, weights, nested = _clenshaw_curtis(self.nodes, field.device)
        strengths = nodes[1:].reshape((-1, *[1] * system.beta.ndim))
        ladder = system.replace(
            field=(field / strengths[..., None, None]).to(system.field.dtype),
            beta=(system.beta.double() * strengths).to(system.field.dtype),
        )
        sampled = self.monte_carlo.solve(ladder)
        mean, error, degrees = _coupling_energy(sampled, ladder)
        if sampled.broken is not None:
            mean = mean.masked_fill(sampled.broken, torch.nan)

        integrand = torch.cat([first[None], -system.beta * mean])
        spread = torch.cat([torch.zeros_like(first)[None], system.beta * error])
        integral = _weighted(weights, integrand)
        difference = (integral - _weighted(nested, integrand)).abs()
        variation = _weighted(weights, (integrand - integral).abs())
        quadrature = difference * torch.sqrt(
            difference / torch.where(variation > 0, variation, 1.0)
        ).clamp_max(1)
        answer = FreeEnergyEstimate(
            system,
            start + integral,
            combined_error(weights[1:].reshape(strengths.shape) * spread[1:], degrees),
            quadrature,
            start,
            nodes,
            integrand,
            spread,
            sampled,
        )
        self._check(answer)
        return answer

    def _check(self, answer: FreeEnergyEstimate) -> None:
        # Rounding is no reason to sample more.
        rounding = 1e-12 * answer.integrand.abs().amax(0)
        failed = answer.quadrature_error > answer.error + rounding
        if self.on_failure == "ignore" or not bool(failed.any()):
            return
        worst = torch.where(failed, answer.quadrature_error, 0.0)
        report_failure(
            self.on_failure,
            f"Thermodynamic integration: in {int(failed.sum())} of {failed.numel()} systems "
            f"nodes={self.nodes} leave a quadrature error (up to {float(worst.max()):.3g} of log Z)"
            f" above the statistical one; double the nodes",
        )


def _clenshaw_curtis(order: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes on [0, 1] and the weights of the rule and of the one on every other node."""
    k = torch.arange(order + 1, dtype=torch.float64, device=device)
    nodes = torch.sin(math.pi * k / (2 * order)).square()
    nested = torch.zeros_like(nodes)
    nested[::2] = _weights(order // 2, device)
    return nodes, _weights(order, device), nested


def _weights(order: int, device: torch.device) -> Tensor:
    """Of Clenshaw and Curtis on [0, 1], for any order: cosine series integrated term by term."""
    k = torch.arange(order + 1, dtype=torch.float64, device=device)
    even = torch.arange(0, order + 1, 2, dtype=torch.float64, device=device)
    halved = 1 - 0.5 * ((even == 0) | (even == order)).to(even.dtype)
    series = torch.cos(math.pi * k[:, None] * even / order) * halved / (1 - even.square())
    ends = 1 - 0.5 * ((k == 0) | (k == order)).to(k.dtype)
    weights: Tensor = 2 / order * ends * series.sum(-1)
    return weights


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """sum_k w_k f_k over the first axis."""
    total: Tensor = torch.tensordot(weights, values, 1)
    return total


def _coupling_energy(
    sampled: SampledEquilibrium, system: SpinSystem
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, error and its degrees of freedom of E_J = E + sum_i h_i . S_i of a run, (*batch)."""
    series = sampled.record.series
    # With the means of spins given their neighbours, the energy is that of those.
    energy = series.get("smooth_energy", series["energy"])
    if not bool(system.field.any()):
        found = estimate(energy)
        return found.mean, found.error, found.degrees
    spin = sampled.record.means["spin"]
    field = system.field.double()
    mean = energy.double().mean((0, -1)) + (field * spin.mean).sum((-2, -1))
    # Both by the bins that the spins are kept in: energy and field energy fluctuate together.
    chains = energy.shape[0]
    kept = spin.bins.unflatten(0, (-1, chains))
    covered = kept.shape[0] * spin.length
    parts = bin_means(energy[..., :covered], kept.shape[0]).unflatten(0, (chains, -1))
    total = parts.movedim(1, -1) + (field * kept).sum((-2, -1)).movedim(0, -1)
    found = estimate(total)
    return mean, found.error * math.sqrt(covered / energy.shape[-1]), found.degrees


_Question = Callable[["_Joined", float, int], tuple[Tensor, ...]]


class Interpolated(NamedTuple):
    """A quantity at inverse temperatures (B): value, error and what they rest on, (B, *batch).

    Attributes:
        value: the quantity.
        error: its standard error.
        effective_samples: independent samples that have a share in it, roughly: measurements by the
            evenness of their weights.
    """

    value: Tensor
    error: Tensor
    effective_samples: Tensor


@strict_options
class MultiHistogram:
    r"""One estimate from simulations at several temperatures: multi-histogram reweighting, MBAR.

    With K inverse temperatures, :math:`n_k` measurements each, weights and free energies solve

    .. math::
        w(E) = \frac{1}{\sum_k n_k Z_k^{-1} e^{-\beta_k E}},\qquad
        Z(\beta) = \sum_n w(E_n)\, e^{-\beta E_n},\qquad
        \langle O\rangle_\beta = \frac1{Z(\beta)} \sum_n w(E_n)\, e^{-\beta E_n} O_n,

    the estimate of least variance (Ferrenberg & Swendsen 1989 without histograms; Shirts & Chodera
    2008), solved by ``pymbar``. log Z is absolute: :math:`\log Z(0) = 0` by the normalization of
    the measure, and beta = 0 is one more temperature to reweight to, if the ladder comes near;
    else give an ``anchor``.

    Errors hold for correlated measurements: every answer is to first order a sum over measurements,
    and its variance that of the sum as a time series (the influence function of MBAR; Li, Van
    Koten, Dinner & Thiede, J. Chem. Phys. 158, 214107 (2023)). The temperatures are summed at equal
    times, so that replicas which visit several of them count right.

    Args:
        energies: (C, K, *batch, T): chains, temperatures, systems and time.
        betas: (K) or (K, *batch), in any order, different from each other in every system whose
            energies are finite; any other has NaN for an answer.
        anchor: inverse temperature and log Z (a number or *batch) there, taken as exact.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"`` where the temperatures share too few
            states to be joined (overlap below 0.03), or an answer rests on fewer than 50 effective
            samples.

    Attributes:
        betas: (K, *batch).
        overlap: probability that a measurement at one temperature could be of the next higher one
            (K - 1, *batch), in ascending order.

    Cost: O(C K^2 T) an iteration of pymbar, and O(C K^2 T) a temperature that is asked for.

    Raises:
        ImportError: without the extra ``sampling``.
        ValueError: shapes that do not fit, a temperature given twice, or fewer than two.
    """

    def __init__(
        self,
        energies: Tensor,
        betas: Tensor,
        *,
        anchor: tuple[float, Tensor | float] = (0.0, 0.0),
        on_failure: OnFailure = "warn",
    ) -> None:
        check_on_failure(on_failure)
        if not isinstance(energies, Tensor) or energies.ndim < 3:
            shape = tuple(energies.shape) if isinstance(energies, Tensor) else energies
            raise ValueError(
                f"energies have shape {shape}: they must be (C, K, *batch, T), chains, "
                "temperatures, systems and time, as those of ParallelTempering are"
            )
        count, batch = energies.shape[1], energies.shape[2:-1]
        betas = torch.as_tensor(betas, dtype=torch.float64, device=energies.device)
        if betas.ndim == 1:
            betas = betas.reshape((-1, *[1] * len(batch))).expand(-1, *batch)
        if betas.shape != (count, *batch):
            raise ValueError(
                f"betas have shape {tuple(betas.shape)}, energies {tuple(energies.shape)}: betas "
                f"must be ({count},) or {(count, *batch)}, one for each temperature"
            )
        if count < 2:
            raise ValueError("one temperature cannot be joined with others: give two or more betas")
        rank = betas.reshape(count, -1).argsort(0)
        ascending = betas.reshape(count, -1).gather(0, rank)
        finite = torch.isfinite(energies).all(-1).all(1).all(0).flatten()
        if bool(((ascending.diff(dim=0) <= 0) & finite).any()):
            raise ValueError("betas has a temperature twice: join those runs as chains of one")
        self.betas = betas
        self.on_failure = on_failure
        beta, value = anchor
        given = torch.as_tensor(value, dtype=torch.float64, device=energies.device)
        try:
            self._anchor = float(beta), given.expand(batch).flatten()
        except RuntimeError as error:
            raise ValueError(
                f"anchor has log Z of shape {tuple(given.shape)}: give a number, or one for each "
                f"system of the batch {tuple(batch)}"
            ) from error
        self._shape = energies.shape
        self._rank = rank
        self._thin = 1
        self._thin = _thinning(self._ordered(energies))
        self._energies = energies.detach()
        self._joined: list[_Joined | None] = []
        for system, own in enumerate(self._ordered(energies).unbind(2)):
            self._joined.append(_join(own, ascending[:, system]) if finite[system] else None)
        lost = ascending.new_full((count - 1,), torch.nan)
        rows = [lost if joined is None else joined.overlap for joined in self._joined]
        self.overlap = torch.stack(rows, -1).reshape(count - 1, *batch)
        self._check_overlap()

    @classmethod
    def of(
        cls,
        equilibrium: SampledEquilibrium,
        *,
        anchor: tuple[float, Tensor | float] = (0.0, 0.0),
        on_failure: OnFailure = "warn",
    ) -> MultiHistogram:
        """The temperatures of a run joined.

        Args:
            equilibrium: of :class:`~spinformer.ParallelTempering`, or of a batch whose first axis
                is the temperature and differs in nothing else. Its ``series`` have the shape that
                :meth:`mean` asks for.
            anchor, on_failure: see the class.
        """
        energies = equilibrium.series["energy"]
        if equilibrium.broken is not None:
            energies = energies.masked_fill(equilibrium.broken[..., None], torch.nan)
        return cls(energies, equilibrium.system.beta, anchor=anchor, on_failure=on_failure)

    def _ordered(self, values: Tensor) -> Tensor:
        """(C, K, systems, T) in ascending order of beta, without what is left out."""
        chains, count, steps = self._shape[0], self._shape[1], self._shape[-1]
        flat = values.detach().double().reshape(chains, count, -1, steps)[..., :: self._thin]
        return flat.gather(1, self._rank[None, :, :, None].expand(flat.shape))

    def log_partition(self, beta: Tensor | float) -> Interpolated:
        """log Z relative to free spins.

        Args:
            beta: a number or (B): each is asked of all systems. The answer at a number is (*batch).

        Its effective samples are the fewer of those at beta and at the anchor.
        """
        start, known = self._anchor

        def ask(joined: _Joined, at: float, system: int) -> tuple[Tensor, ...]:
            value, error, samples = joined.log_partition(at, start)
            return value + known[system], error, samples

        return self._ask(beta, ask)

    def free_energy(self, beta: Tensor | float) -> Interpolated:
        """F = -log Z / beta."""
        found = self.log_partition(beta)
        at = torch.as_tensor(beta, dtype=torch.float64, device=self.betas.device)
        at = at.reshape((*at.shape, *[1] * (self.betas.ndim - 1)))
        return Interpolated(-found.value / at, found.error / at, found.effective_samples)

    def internal_energy(self, beta: Tensor | float) -> Interpolated:
        """U = <E>."""
        return self.mean(self._energies, beta)

    def specific_heat(self, beta: Tensor | float) -> Interpolated:
        """C = beta^2 Var(E), of each whole system."""
        return self._ask(beta, lambda joined, at, _: joined.specific_heat(at))

    def mean(self, values: Tensor, beta: Tensor | float) -> Interpolated:
        """<O> of any measured quantity.

        Args:
            values: O, (C, K, *batch, T), measured with the energies.
            beta: a number or (B).

        Raises:
            ValueError: values of another shape than the energies.
        """
        if values.shape != self._shape:
            raise ValueError(
                f"values have shape {tuple(values.shape)}, the energies {tuple(self._shape)}: one "
                "value is needed for every energy"
            )
        own = self._ordered(values)
        return self._ask(beta, lambda joined, at, system: joined.mean(own[:, :, system], at))

    def _ask(self, beta: Tensor | float, question: _Question) -> Interpolated:
        asked = torch.as_tensor(beta, dtype=torch.float64, device=self.betas.device)
        lost = self.betas.new_full((3,), torch.nan)
        rows = [
            lost if joined is None else torch.stack(question(joined, at, system))
            for at in asked.flatten().tolist()
            for system, joined in enumerate(self._joined)
        ]
        found = torch.stack(rows, -1).reshape(3, *asked.shape, *self.betas.shape[1:])
        answer = Interpolated(found[0], found[1], found[2])
        self._check_samples(answer)
        return answer

    def _check_overlap(self) -> None:
        worst = self.overlap < _LEAST_OVERLAP
        if bool(worst.any()):
            place = tuple(worst.nonzero()[0].tolist())
            report_failure(
                self.on_failure,
                f"overlap{list(place)} = {float(self.overlap[place]):.2g}: neighbouring "
                f"temperatures share too few states to be joined (at least {_LEAST_OVERLAP}); put "
                "more of them between",
            )

    def _check_samples(self, answer: Interpolated) -> None:
        few = answer.effective_samples < _FEWEST_SAMPLES
        if bool(few.any()):
            report_failure(
                self.on_failure,
                f"An answer rests on {float(answer.effective_samples[few].min()):.2g} effective "
                f"samples, fewer than {_FEWEST_SAMPLES}: its temperature, or that of the anchor, "
                "is too far from those that were sampled; extend the ladder, sample longer, or "
                "give an anchor inside it",
            )


def _thinning(energies: Tensor) -> int:
    """How many measurements to go on by: within the shortest autocorrelation time nothing is lost,
    and all temperatures are left at common times."""
    tau = estimate(energies).tau
    tau = tau[torch.isfinite(tau)]
    if not tau.numel():
        return 1
    return max(1, min(int(tau.min()), energies.shape[-1] // _KEPT))


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Nothing but errors from a logger: pymbar advertises its options by warnings."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _mbar() -> Any:
    try:
        with _quiet("pymbar"):
            from pymbar import MBAR  # noqa: PLC0415 (loads scipy)
    except ImportError as error:
        raise ImportError("reweighting needs pymbar: pip install 'spinformer[sampling]'") from error
    return MBAR


def _join(energies: Tensor, betas: Tensor) -> _Joined:
    """Solve the equations of MBAR for energies (C, K, T) at ascending betas (K)."""
    mbar = _mbar()
    origin = energies.mean()
    energy = energies - origin
    flat = energy.movedim(1, 0).flatten(1)  # (K, C T): temperature after temperature
    mean = flat.mean(-1)
    # -log Z by the trapezoidal rule: close enough for Newton's method to start from.
    first = torch.cat([mean.new_zeros(1), ((mean[1:] + mean[:-1]) / 2 * betas.diff()).cumsum(0)])
    counts = torch.full_like(betas, flat.shape[-1], dtype=torch.int64)
    with _quiet("pymbar"):
        # With a seed pymbar leaves numpy's global generator alone.
        solved = mbar(
            (betas[:, None] * flat.flatten()).cpu().numpy(),
            counts.cpu().numpy(),
            initial_f_k=first.cpu().numpy(),
            # Its own Newton iteration: the default hands scipy options that this does not know.
            solver_protocol=({"method": "adaptive"},),
            rseed=0,
        )
    minus_log_z = torch.as_tensor(solved.f_k, dtype=torch.float64, device=energies.device)
    return _Joined(energy, origin, betas, minus_log_z)


class _Joined:
    """The solution of MBAR for one system, and what follows from it.

    Energies are relative to ``origin``, flattened in the order (C, K, T).
    """

    def __init__(self, energy: Tensor, origin: Tensor, betas: Tensor, minus_log_z: Tensor) -> None:
        self.shape = energy.shape
        self.origin = origin
        self.energy = energy.flatten()
        count = energy.shape[0] * energy.shape[2]
        exponents = minus_log_z - betas * self.energy[:, None]
        self.log_weight = -(torch.logsumexp(exponents, -1) + math.log(count))
        weights = torch.exp(exponents + self.log_weight[:, None])  # w_k(n), (n, K)
        residual = float((weights.sum(0) - 1).abs().max())
        if not residual < _RESIDUAL:
            raise ConvergenceError(
                f"the equations of MBAR are solved to {residual:.2g} only: the temperatures share "
                "too few states; put more of them between"
            )
        self.weights, self.count = weights, count
        shared = weights.mT @ weights * count
        self.overlap = shared.diagonal(1)
        # A change epsilon_n of the weight of every measurement moves f = -log Z by
        # -(1 - O n)^+ sum_n w(n) epsilon_n.
        identity = torch.eye(len(betas), dtype=weights.dtype, device=weights.device)
        self.response = torch.linalg.pinv(identity - shared, rtol=1e-12)

    def _at(self, beta: float) -> tuple[Tensor, Tensor]:
        """log Z relative to the origin and the normalized weights (n) of the measurements."""
        exponents = self.log_weight - beta * self.energy
        total = torch.logsumexp(exponents, 0)
        return total, torch.exp(exponents - total)

    def _error(self, direct: Tensor) -> Tensor:
        """Standard error of an answer whose derivative in epsilon_n is ``direct`` (n) at fixed f,
        and in f_j as that of weights times such a sum."""
        through = -self.count * (direct @ self.weights)
        influence = direct - self.weights @ (self.response.mT @ through)
        # Temperatures at equal times together.
        series = influence.reshape(self.shape).sum(1)
        error: Tensor = estimate(series).error
        total: Tensor = error * series.numel()
        return total

    def log_partition(self, beta: float, start: float) -> tuple[Tensor, Tensor, Tensor]:
        there, here = self._at(start), self._at(beta)
        value = here[0] - there[0] - (beta - start) * self.origin
        samples = torch.minimum(_effective(here[1]), _effective(there[1]))
        return value, self._error(here[1] - there[1]), samples

    def mean(self, values: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
        _, p = self._at(beta)
        flat = values.flatten()
        mean = (p * flat).sum()
        return mean, self._error(p * (flat - mean)), _effective(p)

    def specific_heat(self, beta: float) -> tuple[Tensor, Tensor, Tensor]:
        _, p = self._at(beta)
        square = (self.energy - (p * self.energy).sum()).square()
        variance = (p * square).sum()
        error = self._error(p * (square - variance))
        return beta**2 * variance, beta**2 * error, _effective(p)


def _effective(weights: Tensor) -> Tensor:
    """Kish's number of samples of normalized weights."""
    samples: Tensor = 1 / weights.square().sum()
    return samples
