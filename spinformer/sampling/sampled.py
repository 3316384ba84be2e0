r"""The equilibrium that a Monte Carlo run saw: every observable with its error.

.. math::
    C = \beta^2 \operatorname{Var} E,\qquad
    \chi_{ia,jb} = \beta \operatorname{Cov}(S_{ia}, S_{jb}),\qquad
    U_{\mathrm{Binder}} = 1 - \frac{D}{D + 2}\,
    \frac{\langle |M|^4\rangle}{\langle |M|^2\rangle^2},\qquad M = \sum_i S_i .
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spinformer.errors import NotSampledError, OnFailure, nearest, report_failure
from spinformer.sampling import storage
from spinformer.sampling.observables import (
    Look,
    Observables,
    Record,
    lattice_of,
    scalar_means,
)
from spinformer.solve.solution import Solution
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import (
    CorrelationMethod,
    Equilibrium,
    in_solving_mode,
    observable,
)
from spinformer.thermo.statistics import (
    BinnedMean,
    autocorrelation_time,
    bin_means,
    equilibration,
    estimate,
    jackknife,
    split_r_hat,
)

__all__ = ["Diagnostics", "Reweighted", "SampledEquilibrium"]

# Chains that agree so well are mixed (Vehtari et al. 2021 ask for 1.01 of final results).
_LARGEST_R_HAT = 1.05
# A chain of fewer autocorrelation times cannot tell how long they are.
_FEWEST_TAU = 50
# Blocks of a jackknife are at least so many tau long, and no fewer than so many in all.
_BLOCK_TAU, _FEWEST_BLOCKS = 10, 8
# More of them make no better error.
_MOST_BLOCKS = 256
# So many chains can be blocks themselves.
_FEWEST_CHAINS = 4
_LARGEST_DRIFT = 4.0
# Less of a run than this, reweighted, is no estimate.
_SMALLEST_FRACTION = 0.05

_Function = Callable[..., Tensor]


# What decides whether a run was long enough.
DECIDING = ("energy", "absolute_moment", "moment_along_field")


@dataclass(frozen=True)
class Diagnostics:
    """Whether a run was long enough to know its own errors; every entry is (*batch).

    Energy, absolute moment and the moment along the field decide. Its direction else may be one of
    several that a symmetry makes alike, between which local moves never get in order: chains that
    froze into different ones know energies, moduli and their fluctuations well, and their
    disagreement is seen in ``r_hat["moment"]`` and in the standard errors of magnetization and
    susceptibility, which are then those of the scatter of the chains. Chains that all froze into
    the same one see nothing.

    Attributes:
        tau: integrated autocorrelation time in sweeps, 1/2 of the distance of measurements for
            independent ones: of ``energy``, ``absolute_moment``, ``moment_along_field`` (the
            direction of the sum of all fields) and the slowest component of ``moment``.
        effective_samples: independent draws that all chains are worth, of the same.
        r_hat: split R-hat over chains, of the same.
        drift: distance of the beginning of the run from its end in standard errors, of the same.
        enough: whether the chains are 50 tau long in what decides; never of a system that was given
            with NaN.
        mixed: whether their R-hat is below 1.05.
        equilibrated: whether they don't drift (4 standard errors).
    """

    tau: dict[str, Tensor]
    effective_samples: dict[str, Tensor]
    r_hat: dict[str, Tensor]
    drift: dict[str, Tensor]
    enough: Tensor
    mixed: Tensor
    equilibrated: Tensor

    @property
    def passed(self) -> Tensor:
        """All three, (*batch) bool."""
        return self.enough & self.mixed & self.equilibrated

    def __repr__(self) -> str:
        rows = [
            f"Diagnostics: {int(self.passed.sum())} of {self.passed.numel()} systems passed",
            f"  {'worst of':18s} {'tau [sweeps]':>13s} {'eff. samples':>13s} {'R-hat':>8s} "
            f"{'drift':>7s}",
        ]
        if self.passed.numel():
            rows += [
                f"  {name:18s} {float(self.tau[name].max()):13.4g} "
                f"{float(self.effective_samples[name].min()):13.4g} "
                f"{float(self.r_hat[name].max()):8.4f} {float(self.drift[name].abs().max()):7.2f}"
                for name in self.tau
            ]
        return "\n".join(rows)


@dataclass(frozen=True)
class Reweighted:
    """Scalars of a run at another temperature: name -> value and standard error, (*batch, ...).

    Attributes:
        beta: the inverse temperature (*batch).
        values, errors: of ``internal_energy``, ``specific_heat``, ``absolute_moment``,
            ``binder_cumulant``, ``uniform_susceptibility``, ``absolute_susceptibility`` and
            ``log_partition_change``, log Z at the new temperature less that of the run.
        effective_fraction: (sum w)^2 / (T sum w^2), the share of the run that still counts.
    """

    beta: Tensor
    values: dict[str, Tensor]
    errors: dict[str, Tensor]
    effective_fraction: Tensor


class SampledEquilibrium(Equilibrium):
    r"""Means and fluctuations of a Monte Carlo run; each has a :meth:`standard_error`.

    Nonlinear quantities are functions of means, whose bias is of the order of their error squared;
    their errors are those of a jackknife over blocks of all chains, long against the
    autocorrelation time. Free energies are not sampled: see
    :class:`~spinformer.sampling.free_energy.ThermodynamicIntegration` and
    :class:`~spinformer.sampling.free_energy.MultiHistogram`.

    The correlations ``"linear_response"`` and ``"coupling"`` are both the measured
    :math:`\langle S_i \cdot S_j\rangle`.

    If gradients were enabled and a tensor of the system asked for them when it was solved, every
    mean is differentiable to any order in couplings, field and beta through the kept
    configurations: with weights :math:`w_s \propto e^{-(\beta E(S_s) - c_s)}`, c_s the same number
    without its gradient,

    .. math:: \partial \langle O\rangle = \langle \partial O\rangle - \operatorname{Cov}(O,
              \partial(\beta E)).

    The value is that of the whole run; the noise of the n-th derivative grows as the n-th power of
    the energy's fluctuations.

    Args:
        system: what was sampled.
        observables: what was measured.
        record: what was taken down.
        broken: systems that were given with NaN.
        log_partition: log Z (*batch) and its standard error, where another method found them.

    Attributes:
        record: the same.
        solution: magnetizations; ``residual`` is the worst split R-hat of energy and modulus,
            less 1, ``iterations`` the sweeps that were measured, and ``converged`` whether
            :attr:`diagnostics` passed.
    """

    def __init__(
        self,
        system: SpinSystem,
        observables: Observables,
        record: Record,
        broken: Tensor | None = None,
        log_partition: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.record = record
        # What the base class sets, earlier: its solution is the verdict of the diagnostics.
        self.system, self.broken = system, broken
        self._observables = observables
        self._log_partition = log_partition
        self._errors: dict[str, Tensor] = {}
        sweeps = self.num_measurements * record.every
        batch = system.batch_shape
        diagnostics = self.diagnostics
        worst = torch.maximum(diagnostics.r_hat["energy"], diagnostics.r_hat["absolute_moment"])
        solution = Solution(
            record.means["spin"].mean.to(system.field.dtype),
            (worst - 1).to(system.field.dtype),
            torch.full(batch, sweeps, dtype=torch.int64, device=system.field.device),
            diagnostics.passed,
        )
        super().__init__(system, solution, broken)

    # -- what was taken down ----------------------------------------------------------------------

    @property
    def series(self) -> dict[str, Tensor]:
        """``energy`` (chains, *batch, T) and ``moment`` (chains, *batch, T, D), and of conditional
        estimators ``smooth_energy``: one entry a measurement, ``record.every`` sweeps apart."""
        return self.record.series

    @property
    def samples(self) -> Tensor:
        """Configurations that were kept, (chains, *batch, k, N, D)."""
        return self.record.samples

    @property
    def keys(self) -> Tensor:
        """Seeds of all chains: ``MonteCarlo(seed=keys[k:k + 1], chains=1)`` repeats chain k."""
        return self.record.keys

    @cached_property
    def diagnostics(self) -> Diagnostics:
        """Autocorrelation times, effective samples, R-hat and drift."""
        series = self._watched
        found = {name: autocorrelation_time(values) for name, values in series.items()}
        length = self.num_measurements
        count = length * self.keys.shape[0]
        r_hat = {name: split_r_hat(values) for name, values in series.items()}
        drift = {name: equilibration(values).z for name, values in series.items()}
        enough = torch.stack([found[name].tau * _FEWEST_TAU <= length for name in DECIDING])
        mixed = torch.stack([r_hat[name] < _LARGEST_R_HAT for name in DECIDING])
        still = torch.stack([drift[name].abs() < _LARGEST_DRIFT for name in DECIDING])
        return Diagnostics(
            {name: self.record.every * times.tau for name, times in found.items()},
            {name: count / (2 * times.tau) for name, times in found.items()},
            r_hat,
            drift,
            enough.all(0) if self.broken is None else enough.all(0) & ~self.broken,
            mixed.all(0),
            still.all(0),
        )

    @property
    def num_measurements(self) -> int:
        """Measurements T of each chain."""
        return self.series["energy"].shape[-1]

    @cached_property
    def _watched(self) -> dict[str, Tensor]:
        """Series (chains, *batch, T) that tell how slow the chains are."""
        moment = self.series["moment"].movedim(-1, -2)
        slowest = autocorrelation_time(moment).tau.nan_to_num().argmax(-1)
        index = slowest[None, ..., None, None].expand(*moment.shape[:-2], 1, moment.shape[-1])
        # Along the field as a whole. Across it, and without one, valleys are alike by symmetry.
        field = self.system.field.detach().sum(-2)
        field = field / torch.where(field == 0, 1.0, field).norm(dim=-1, keepdim=True)
        return {
            "energy": self.series["energy"],
            "absolute_moment": moment.norm(dim=-2),
            "moment_along_field": (moment * field[..., None]).sum(-2),
            "moment": moment.gather(-2, index)[..., 0, :],
        }

    def _tau(self, of_moment: bool = False) -> Tensor:
        """The slowest time, in measurements, (*batch); NaN of a broken system is no time.

        Args:
            of_moment: count every direction of the moment.
        """
        names = (*DECIDING, "moment") if of_moment else DECIDING
        slowest = torch.stack([self.diagnostics.tau[name] for name in names]).amax(0)
        return slowest.nan_to_num(nan=0.5) / self.record.every

    # -- means ------------------------------------------------------------------------------------

    @cached_property
    @in_solving_mode
    def _kept(self) -> tuple[Look, Tensor]:
        """Kept configurations (S, *batch, N, D) as they look in the graph, and their weights."""
        spins = self.samples.movedim(-3, 1).flatten(0, 1)
        look = self._observables.look(spins)
        exponent = -self.system.beta * look.energy
        return look, torch.softmax(exponent - exponent.detach(), 0)

    @cached_property
    @in_solving_mode
    def _averages(self) -> dict[str, Tensor]:
        return self._observables.averages(*self._kept)

    def _array(self, name: str) -> Tensor:
        """Mean of an array over the run, with the gradient of the kept configurations."""
        value = self.record.means[name].mean
        if self.tracks_gradients:
            graph = self._averages[name]
            value = value + (graph - graph.detach())
        return value

    @cached_property
    def _centre(self) -> dict[str, Tensor]:
        return {
            "energy": self.series["energy"].mean((0, -1)),
            "moment": self.series["moment"].mean((0, -2)),
        }

    @property
    def _all_series(self) -> dict[str, Tensor]:
        """The series, that of the conditional energy being the energy where there is none."""
        return {"smooth_energy": self.series["energy"], **self.series}

    def _scalars(self, names: Sequence[str]) -> list[Tensor]:
        """Means of scalars over the run, with the gradient of the kept configurations."""
        values = scalar_means(names, self._in_one_time(self._all_series), self._centre)
        if self.tracks_gradients:
            look, weights = self._kept
            series = {
                "energy": look.energy.movedim(0, -1),
                "smooth_energy": look.smooth_energy.movedim(0, -1),
                "moment": look.moment.movedim(0, -2),
            }
            graph = scalar_means(names, series, self._centre, weights.movedim(0, -1))
            values = [v + (g - g.detach()) for v, g in zip(values, graph, strict=True)]
        return values

    @staticmethod
    def _in_one_time(series: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The chains one after the other, (*batch, C T)."""
        joined = {}
        for name, values in series.items():
            time = -2 if name == "moment" else -1
            joined[name] = values.movedim(0, time - 1).flatten(time - 1, time)
        return joined

    def _formula(self, name: str) -> Tensor:
        names, function = _FORMULAS[name]
        value = function(self.system.beta, self._centre, *self._scalars(names))
        return value.to(self.system.field.dtype)

    def _measured(self, name: str, remedy: str) -> None:
        if name not in self.record.means:
            what = {
                "pair": "products of all pairs of spins",
                "components": "components of all pairs",
            }
            raise NotSampledError(f"{what[name]} were not measured in this run: {remedy}")

    # -- the face of every equilibrium ------------------------------------------------------------

    @property
    @observable
    def magnetization(self) -> Tensor:
        return self._array("spin").to(self.system.field.dtype)

    @property
    @observable
    def moment(self) -> Tensor:
        """<M> = sum_i m_i, the total moment, (..., D)."""
        return self.magnetization.sum(-2)

    @property
    @observable
    def internal_energy(self) -> Tensor:
        return self._formula("internal_energy")

    @observable
    def specific_heat(self) -> Tensor:
        return self._formula("specific_heat")

    @property
    @observable
    def log_partition(self) -> Tensor:
        """log Z relative to free spins, (...), if another method found it.

        Raises:
            NotSampledError: a run at one temperature knows averages, not how many states there
                are.
        """
        if self._log_partition is None:
            raise NotSampledError(
                "a Monte Carlo run measures averages, and no free energy, entropy or log Z: use "
                "ThermodynamicIntegration(...) or MultiHistogram(...) of spinformer.sampling, "
                "which sample several temperatures"
            )
        value = self._log_partition[0]
        if self.tracks_gradients:
            exponent = -self.system.beta * self._kept[0].energy
            value = value + torch.logsumexp(exponent - exponent.detach(), 0)
            value = value - value.new_tensor(len(exponent)).log()
        return value

    def with_log_partition(self, value: Tensor, error: Tensor) -> SampledEquilibrium:
        """The same run with the log Z (*batch) that another method found, and its error."""
        return SampledEquilibrium(
            self.system, self._observables, self.record, self.broken, (value, error)
        )

    def _linear_response_correlations(self) -> Tensor:
        self._measured("pair", "pass MonteCarlo(correlations=True), N^2 numbers a bin")
        return self._array("pair").to(self.system.field.dtype)

    def _coupling_correlations(self) -> Tensor:
        return self._linear_response_correlations()

    def _susceptibility(self) -> Tensor:
        self._measured(
            "components",
            'pass MonteCarlo(correlations="components"), N^2 D^2 numbers a bin, or keep='
            "1000 configurations and ask for susceptibility_product or local_susceptibility",
        )
        return self._chi(self._array("components"), self._array("spin"))

    def _chi(self, components: Tensor, spin: Tensor) -> Tensor:
        n, d = spin.shape[-2:]
        flat = spin.flatten(-2)
        covariance = components - flat[..., :, None] * flat[..., None, :]
        chi = (self.system.beta[..., None, None] * covariance).to(self.system.field.dtype)
        blocks: Tensor = chi.unflatten(-1, (n, d)).unflatten(-3, (n, d))
        return blocks

    def _susceptibility_product(self, vector: Tensor) -> Tensor:
        if "components" in self.record.means:
            return self._dense_product(vector)
        look, weights = self._fluctuations("susceptibility_product")
        along = (look.spins * vector).sum((-2, -1))
        along = weights * (along - (weights * along).sum(0))
        return self._clear(
            self.system.beta[..., None, None] * (along[..., None, None] * look.spins).sum(0)
        )

    @observable
    def local_susceptibility(self) -> Tensor:
        r""":math:`\chi_{ia,ib}`, the response of every site to its own field, (..., N, D, D).

        From the components of all pairs where they were measured, else from the configurations
        that were kept.
        """
        if "components" in self.record.means:
            chi = self._all_susceptibilities()
            return chi.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        look, weights = self._fluctuations("local_susceptibility")
        spins = look.spins - (weights[..., None, None] * look.spins).sum(0)
        outer = torch.einsum("s...,s...ia,s...ib->...iab", weights, spins, spins)
        return self.system.beta[..., None, None, None] * outer

    def _fluctuations(self, what: str) -> tuple[Look, Tensor]:
        if self.samples.shape[-3] * self.samples.shape[0] < 2:
            raise NotSampledError(
                f'{what} was not measured in this run: pass MonteCarlo(correlations="components"), '
                "N^2 D^2 numbers a bin, or keep=1000 configurations"
            )
        return self._kept

    @observable
    def uniform_susceptibility(self) -> Tensor:
        r""":math:`\beta \operatorname{Cov}(M_a, M_b)` of the total moment, (..., D, D)."""
        return self._formula("uniform_susceptibility")

    @observable
    def order_ratio(self) -> Tensor:
        r""":math:`|\langle M\rangle|^2 / \langle |M|^2\rangle` of the total moment M, (...)."""
        return self._formula("order_ratio")

    # -- what only a run knows --------------------------------------------------------------------

    @observable
    def absolute_moment(self) -> Tensor:
        r""":math:`\langle |M| \rangle` of the total moment, (...): order, also where it turns."""
        return self._formula("absolute_moment")

    @observable
    def absolute_susceptibility(self) -> Tensor:
        r""":math:`\beta (\langle |M|^2\rangle - \langle|M|\rangle^2)`, (...).

        The connected susceptibility of a finite system without a field, whose moment turns.
        """
        return self._formula("absolute_susceptibility")

    @observable
    def binder_cumulant(self) -> Tensor:
        r""":math:`1 - \frac{D}{D+2} \langle |M|^4\rangle / \langle |M|^2\rangle^2`, (...).

        Zero for a moment that is a Gaussian vector (disorder), 2 / (D + 2) for one of fixed length
        (order): of Ising spins Binder's own :math:`1 - \langle M^4\rangle/3\langle M^2\rangle^2`.
        """
        return self._formula("binder_cumulant")

    def structure_factor(
        self, momenta: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        r""":math:`S(q) = \frac1N \langle |\sum_i S_i e^{-i q \cdot r_i}|^2\rangle`.

        N is the number of present sites: S is R^2 without correlations.

        Args:
            momenta: q (Q, P). None: all waves of a lattice, :math:`q_a = 2\pi n_a / L_a`, in the
                order of ``torch.fft``: (..., L_1, L_2, ...).
            positions: r (N, P) where momenta are given; None: the sites of the lattice.

        Raises:
            NotSampledError: neither the waves of the lattice nor all pairs were measured.
        """
        names, function = self._structure(momenta, positions)
        with torch.set_grad_enabled(self.tracks_gradients):
            value = function(*(self._array(name) for name in names))
        return self._hide_broken(value.to(self.system.field.dtype))

    def _structure(
        self, momenta: Tensor | None, positions: Tensor | None
    ) -> tuple[tuple[str, ...], _Function]:
        """Which means the structure factor is made of, and how."""
        lattice = lattice_of(self.system.couplings)
        n = self.system.num_spins
        share = self.system.num_present.double().clamp_min(1)
        if momenta is None:
            if lattice is None:
                raise ValueError(
                    "momenta=None stands for the waves of a lattice, and these couplings are none: "
                    "pass momenta (Q, P) and positions (N, P)"
                )
            shape = lattice.shape
            if "structure" in self.record.means:
                factor = _before(n / share, share.ndim + len(shape))
                return ("structure",), lambda waves: waves * factor
            last = tuple(range(-len(shape), 0))

            def transform(pair: Tensor) -> Tensor:
                # e^{-i q r_i} over the first site; over the second its conjugate, times 1 / N.
                once = torch.fft.fftn(pair.mT.unflatten(-1, shape), dim=last).flatten(-len(shape))
                waves = torch.fft.ifftn(once.mT.unflatten(-1, shape), dim=last)
                own = waves.flatten(-len(shape)).diagonal(dim1=-2, dim2=-1).real
                structure: Tensor = (own * (n / share)[..., None]).unflatten(-1, shape)
                return structure

            self._measured("pair", "pass MonteCarlo(structure_factor=True)")
            return ("pair",), transform
        if positions is None:
            if lattice is None:
                raise ValueError("positions are missing: pass those of the sites, (N, P)")
            grids = torch.meshgrid(
                *(torch.arange(length) for length in lattice.shape), indexing="ij"
            )
            positions = torch.stack([grid.flatten() for grid in grids], -1)
        positions = positions.to(share)
        if positions.shape != (n, momenta.shape[-1]) or momenta.ndim != 2:
            raise ValueError(
                f"momenta {tuple(momenta.shape)} and positions {tuple(positions.shape)} don't fit: "
                f"pass (Q, P) and ({n}, P)"
            )
        phase = momenta.to(share) @ positions.mT
        cosine, sine = phase.cos(), phase.sin()
        self._measured("pair", "pass MonteCarlo(correlations=True)")

        def project(pair: Tensor) -> Tensor:
            both = (cosine @ pair * cosine).sum(-1) + (sine @ pair * sine).sum(-1)
            return both / share[..., None]

        return ("pair",), project

    # -- errors -----------------------------------------------------------------------------------

    def standard_error(self, name: str, **arguments: Any) -> Tensor:
        """Standard error of an observable, in its shape.

        Args:
            name: of the observable, as ``"magnetization"``, ``"internal_energy"``,
                ``"specific_heat_per_spin"`` or ``"correlations"``.
            arguments: those of the observable: ``method="product"`` of correlations, ``momenta``
                and ``positions`` of the structure factor.

        Of means of series from the autocorrelation time, of means of arrays from their bins; of
        everything else from a jackknife over blocks of all chains, ten autocorrelation times long
        where there are enough of them. Where chains are too short for that, their means are the
        blocks.
        """
        key = name if not arguments else ""
        with torch.no_grad():
            if key and key in self._errors:
                error = self._errors[key]
            else:
                error = self._error(name, **arguments).to(self.system.field.dtype)
                if key:
                    self._errors[key] = error
        return self._hide_broken(error)

    def _error(self, name: str, **arguments: Any) -> Tensor:
        if name.endswith("_per_spin") and name.removesuffix("_per_spin") in _PER_SPIN:
            total = self._error(name.removesuffix("_per_spin"))
            return total / self.system.num_present.clamp_min(1)
        if name in ("log_partition", "free_energy", "entropy"):
            return self._error_of_log_partition(name)
        if name == "internal_energy":
            return self._mean_error(self._all_series["smooth_energy"])
        if name == "absolute_moment":
            return self._mean_error(self._watched["absolute_moment"])
        if name in _FORMULAS:
            return self._scalar_error(name)
        if name == "magnetization":
            return self.record.means["spin"].error
        if name == "moment":
            # Of the plain series: a little too large where the means of spins are conditional.
            moment = self.series["moment"]
            return torch.stack([self._mean_error(part) for part in moment.unbind(-1)], -1)
        if name == "correlations":
            method: CorrelationMethod = arguments.get("method", "linear_response")
            self.correlations(method)  # whatever it raises
            if method == "product":
                return self._array_error(
                    lambda spin: self._with_diagonal(spin @ spin.mT), ("spin",)
                )
            return self.record.means["pair"].error
        if name == "structure_factor":
            names, function = self._structure(arguments.get("momenta"), arguments.get("positions"))
            return self._array_error(function, names)
        if name == "susceptibility":
            self.susceptibility()
            return self._array_error(self._chi, ("components", "spin"))
        if name == "local_susceptibility" and "components" in self.record.means:
            return self._array_error(
                lambda *means: self._chi(*means).diagonal(dim1=-4, dim2=-2).movedim(-1, -3),
                ("components", "spin"),
            )
        known = (*_FORMULAS, *(f"{part}_per_spin" for part in _PER_SPIN), *_ARRAYS)
        raise ValueError(f"standard_error({name!r}) is not known{nearest(name, known)}")

    def _error_of_log_partition(self, name: str) -> Tensor:
        self.log_partition  # noqa: B018 (raises where there is none)
        assert self._log_partition is not None
        error = self._log_partition[1]
        if name == "log_partition":
            return error
        if name == "free_energy":
            return error / self.system.beta
        # Not independent, if this run was one of those that gave log Z: neither is known better.
        return torch.hypot(self.system.beta * self.standard_error("internal_energy"), error)

    def _mean_error(self, series: Tensor) -> Tensor:
        """Error of the mean of a series (chains, *batch, T).

        Blocks that are long against all times see what the series itself may hide: that it is of
        another value in another valley, by less than it fluctuates in one.
        """
        own, tau = estimate(series), self._tau()
        slow = tau > 2 * own.tau
        if not bool(slow.any()):
            return own.error

        error = self._by_levels(
            lambda mean: mean,
            lambda bins: [bin_means(series, bins)],
            self.num_measurements,
            tau,
        )
        return torch.where(slow, torch.maximum(own.error, error), own.error)

    def _scalar_error(self, name: str) -> Tensor:
        names, function = _FORMULAS[name]

        def blocks(bins: int) -> list[Tensor]:
            return scalar_means(names, self._in_parts(self._all_series, bins), self._centre)

        def formula(*means: Tensor) -> Tensor:
            return function(self.system.beta, self._centre, *means)

        return self._by_levels(
            formula, blocks, self.num_measurements, self._tau(name in _OF_MOMENT)
        )

    def _array_error(self, function: _Function, names: Sequence[str]) -> Tensor:
        means = [self.record.means[name] for name in names]
        longest = max(mean.length for mean in means)
        count = means[0].count // longest

        def blocks(bins: int) -> list[Tensor]:
            if bins == 1:
                return [mean.chain_means for mean in means]
            length = longest * (count // bins)
            return [_rebinned(mean, length, bins) for mean in means]

        tau = self._tau(of_moment=True)
        return self._by_levels(function, blocks, means[0].count, tau, count)

    def _by_levels(
        self,
        function: _Function,
        blocks: Callable[[int], list[Tensor]],
        measurements: int,
        tau: Tensor,
        most: int = 32,
    ) -> Tensor:
        """Jackknife with as many blocks as the autocorrelation time of each system allows.

        Args:
            function: of means with one more axis in front.
            blocks: number of blocks of each chain -> their means (blocks, *batch, ...).
            measurements: in each chain.
            tau: autocorrelation time in measurements (*batch).
            most: blocks of each chain.
        """
        chains = self.keys.shape[0]
        levels = [min(most, measurements)]
        while levels[0] > 1 and levels[0] * chains > _MOST_BLOCKS:
            levels[0] //= 2
        while levels[-1] > 1 and levels[-1] // 2 * chains >= _FEWEST_BLOCKS:
            levels.append(levels[-1] // 2)
        if chains >= _FEWEST_CHAINS and levels[-1] > 1:
            levels.append(1)
        found: Tensor | None = None
        for above, bins in zip([0, *levels], levels, strict=False):
            # Blocks that long will do, but for chains as blocks: only where nothing else will.
            wanted = _BLOCK_TAU if bins > 1 else _BLOCK_TAU / 4
            short = measurements < wanted * tau * above
            if found is not None and not bool(short.any()):
                continue
            means = blocks(bins)
            error = jackknife(function, *means).error * _student(len(means[0]))
            if found is None:
                found = error
            else:
                found = torch.where(_before(short, error.ndim), error, found)
        assert found is not None
        return found

    def _in_parts(self, series: Mapping[str, Tensor], bins: int) -> dict[str, Tensor]:
        """Series in equal parts, the first axis, (C bins, *batch, T / bins)."""
        parts = {}
        for name, values in series.items():
            time = values.ndim - (2 if name == "moment" else 1)
            length = values.shape[time] // bins
            last = values.narrow(time, values.shape[time] - length * bins, length * bins)
            parts[name] = last.unflatten(time, (bins, length)).movedim(time, 0).flatten(0, 1)
        return parts

    # -- other temperatures -----------------------------------------------------------------------

    def reweight(self, beta: float | Tensor, on_failure: OnFailure = "warn") -> Reweighted:
        r"""Scalars at another temperature, from the energies of this run.

        .. math:: \langle O\rangle_{\beta'} = \frac{\langle O e^{-(\beta'-\beta) E}\rangle}
                  {\langle e^{-(\beta'-\beta) E}\rangle}.

        It reaches as far as the energies of the run do: about :math:`|\beta'-\beta| < 1/\sigma_E`.

        Args:
            beta: the other temperature, a number or (*batch).
            on_failure: what to do where less than a twentieth of the run still counts.

        Source: Ferrenberg & Swendsen, Phys. Rev. Lett. 61, 2635 (1988).
        """
        system = self.system
        with torch.no_grad():
            other = torch.as_tensor(beta, dtype=torch.float64, device=system.field.device)
            other = other.expand(system.batch_shape)
            exponent = -(other - system.beta)[..., None] * (
                self.series["energy"] - self._centre["energy"][..., None]
            )
            top = exponent.amax((0, -1), keepdim=True)
            weights = (exponent - top).exp()
            fraction = weights.sum((0, -1)).square() / weights.square().sum((0, -1))
            fraction = fraction / (weights.shape[0] * weights.shape[-1])
            # A conditional mean is that of the temperature that it was taken at.
            plain = {**self.series, "smooth_energy": self.series["energy"]}
            values, errors = {}, {}
            tau = self._tau(of_moment=True)
            for name, (names, function) in _FORMULAS.items():
                if name == "order_ratio":
                    continue

                def blocks(bins: int, names: Sequence[str] = names) -> list[Tensor]:
                    share = self._in_parts({"weight": weights}, bins)["weight"]
                    series = self._in_parts(plain, bins)
                    share = share / share.shape[-1]
                    return [share.sum(-1), *scalar_means(names, series, self._centre, share)]

                def ratio(share: Tensor, *sums: Tensor, function: _Function = function) -> Tensor:
                    means = (s / _before(share, s.ndim) for s in sums)
                    return function(other, self._centre, *means)

                values[name] = ratio(*(block.mean(0, keepdim=True) for block in blocks(1)))[0]
                errors[name] = self._by_levels(ratio, blocks, self.num_measurements, tau)

            def log_ratio(share: Tensor) -> Tensor:
                moved = (other - system.beta) * self._centre["energy"]
                return share.log() + top[0, ..., 0] - moved

            values["log_partition_change"] = log_ratio(weights.mean((0, -1)))
            errors["log_partition_change"] = self._by_levels(
                log_ratio, lambda bins: [bin_means(weights, bins)], self.num_measurements, tau
            )
        found = Reweighted(
            self._hide_broken(other),
            {name: self._hide_broken(value) for name, value in values.items()},
            {name: self._hide_broken(error) for name, error in errors.items()},
            self._hide_broken(fraction),
        )
        if bool((fraction < _SMALLEST_FRACTION).any()):
            report_failure(
                on_failure,
                f"reweight: only {float(fraction.min()):.2g} of the run counts at beta="
                f"{other[fraction < _SMALLEST_FRACTION].tolist()[:4]}: its energies hardly reach "
                "so far. Sample closer to that temperature, or several and use MultiHistogram",
            )
        return found

    # -- files ------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the run: system, series, bins, kept configurations, keys and configuration.

        Args:
            path: ``.npz``, or ``.h5`` / ``.hdf5`` with h5py.

        Raises:
            ImportError: HDF5 without h5py.
            ValueError: another ending.
        """
        parts = (self.system, self._observables, self.record, self.broken, self._log_partition)
        storage.save(path, *storage.pack_run(*parts))

    @classmethod
    def load(cls, path: str | Path) -> SampledEquilibrium:
        """What :meth:`save` wrote; without gradients.

        Raises:
            ValueError: a file of something else.
        """
        return cls(*storage.unpack_run(*storage.load(path)))


def _rebinned(mean: BinnedMean, length: int, bins: int) -> Tensor:
    """Means over the first so many bins of this length of every chain, (bins C, *shape)."""
    chains = len(mean.chain_means)
    own = mean.bins.unflatten(0, (-1, chains))
    ratio = length // mean.length
    joined: Tensor = own[: bins * ratio].unflatten(0, (bins, ratio)).mean(1).flatten(0, 1)
    return joined


def _student(blocks: int) -> float:
    """What makes z-scores of a jackknife error have variance one: that of Student's t."""
    return ((blocks - 1) / (blocks - 3)) ** 0.5 if blocks > 4 else 3**0.5


def _before(values: Tensor, axes: int) -> Tensor:
    """With more axes behind its own, so many in all."""
    return values[(..., *[None] * (axes - values.ndim))]


def _matrix(beta: Tensor) -> Tensor:
    return beta[..., None, None]


_Formula = tuple[tuple[str, ...], _Function]

# name -> the means that it is made of, and (beta, centre, *means) -> value.
_FORMULAS: dict[str, _Formula] = {
    "internal_energy": (("smooth_energy",), lambda beta, c, energy: c["energy"] + energy),
    "specific_heat": (
        ("energy", "energy_square"),
        lambda beta, c, energy, square: beta**2 * (square - energy.square()),
    ),
    "uniform_susceptibility": (
        ("moment", "moment_outer"),
        lambda beta, c, moment, outer: (
            _matrix(beta) * (outer - moment[..., :, None] * moment[..., None, :])
        ),
    ),
    "absolute_moment": (("absolute",), lambda beta, c, absolute: absolute),
    "absolute_susceptibility": (
        ("absolute", "square"),
        lambda beta, c, absolute, square: beta * (square - absolute.square()),
    ),
    "binder_cumulant": (
        ("square", "fourth", "moment"),
        lambda beta, c, square, fourth, moment: _binder(square, fourth, moment.shape[-1]),
    ),
    "order_ratio": (
        ("square", "moment"),
        lambda beta, c, square, moment: _share((moment + c["moment"]).square().sum(-1), square),
    ),
}
_OF_MOMENT = ("uniform_susceptibility", "order_ratio", "binder_cumulant", "absolute_susceptibility")
_PER_SPIN = ("internal_energy", "specific_heat", "free_energy", "entropy")
_ARRAYS = (
    "magnetization",
    "moment",
    "correlations",
    "susceptibility",
    "local_susceptibility",
    "structure_factor",
)


def _binder(square: Tensor, fourth: Tensor, dim: int) -> Tensor:
    return 1 - dim / (dim + 2) * _share(fourth, square.square())


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Zero of nothing, as of a system without a present site."""
    return torch.where(whole == 0, 0.0, part / torch.where(whole == 0, 1.0, whole))
