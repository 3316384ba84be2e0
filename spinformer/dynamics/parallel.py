r"""Parallel dynamics: all spins are drawn anew at once, each in the force of the last step.

.. math:: W(S'|S) = \prod_i \frac{e^{b_i(S)\cdot S'_i}}{z(b_i(S))},\qquad
          b_i(S) = \beta\Big(h_i + \sum_{j\ne i} J_{ij} S_j\Big),

the synchronous heat bath (Little 1974, Math. Biosci. 19, 101), whose deterministic limit is a
Transformer's step. Symmetric couplings make it reversible with respect to Peretto's law, which is
not that of Gibbs; asymmetric ones give a nonequilibrium steady state, with a current and an entropy
production. To sample the law of Gibbs is the business of the moves in :mod:`spinformer.sampling`.

Averages are taken over what is known of the next step before it is drawn (Rao & Blackwell): the
mean :math:`\mu_i(S) = \langle S'_i\rangle` at given S takes the place of :math:`S'_i`, and as spins
of one step are independent at given S, :math:`\mu_i\cdot\mu_j` that of :math:`S'_i\cdot S'_j`.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from spinformer.dynamics.entropy_production import antisymmetric_flow, entropy_flow, sampled_law
from spinformer.dynamics.protocol import Field, Protocol, Undergoing
from spinformer.dynamics.steady_state import SteadyState, Transient, check_lag, present_pairs
from spinformer.errors import (
    ConvergenceWarning,
    OnFailure,
    check_choice,
    check_on_failure,
    report_failure,
    strict_options,
)
from spinformer.sampling import storage
from spinformer.sampling.chains import Chains
from spinformer.sampling.progress import Progress, deferred_interrupt, reporting
from spinformer.solve.linear import eigenvalues
from spinformer.spins.site import Gaussian
from spinformer.spins.streams import Streams
from spinformer.spins.system import SpinSystem
from spinformer.thermo.statistics import (
    Equilibration,
    Estimate,
    equilibration,
    estimate,
)

__all__ = ["ParallelDynamics", "SampledSteadyState", "SampledTransient"]

# Up to so many spins all pairs are measured unless asked otherwise: 2 MB a chain and lag.
_ALL_PAIRS = 512
# Errors come from the scatter of at least so many averages, those of chains or of parts of them.
_GROUPS = 32
# Series shorter than this have no drift to look for; fewer averages no error.
_FEWEST_STEPS, _FEWEST_GROUPS = 16, 4

Quantity = Literal["magnetization", "correlations", "delayed_correlations", "entropy_production"]


@strict_options
class ParallelDynamics:
    r"""Sampled parallel dynamics of a :class:`~spinformer.SpinSystem`, in many chains at once.

    Any couplings, symmetric or not, and any law; every system of a batch has its own chains. Chain
    k of a batch is chain k alone, to rounding.

    Args:
        chains: of each system.
        steps: measured steps of each chain in :meth:`steady_state`.
        warmup: steps before these; None is a fifth of them.
        lags: delays of the correlations that are measured; 0, equal times, always is.
        every: steps between measurements of correlations, which cost as much as a step of dense
            couplings for each lag. All else is measured in every step.
        correlations: whether to measure any; None: up to N = 512.
        seed: an integer, a ``torch.Generator``, or the int64 keys of chains
            (:meth:`~spinformer.spins.streams.Streams.from_seed`).
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"`` when a run is too short to know: it
            still drifts, or is shorter than 20 of its autocorrelation times.
        progress: True for a bar with the rate of spin updates, or a function of (steps done, steps
            in all).

    Errors are standard errors of averages over independent chains, whatever the correlations
    within. Fewer than 32 chains are cut into parts, which have to be long to be independent.

    Ctrl-C ends a run after the step that it is in: what was measured is returned with a warning, or
    ``KeyboardInterrupt`` raised if that is next to nothing. A second Ctrl-C is raised at once.
    """

    def __init__(
        self,
        *,
        chains: int = 64,
        steps: int = 1000,
        warmup: int | None = None,
        lags: Sequence[int] = (1,),
        every: int = 1,
        correlations: bool | None = None,
        seed: int | Sequence[int] | Tensor | torch.Generator = 0,
        on_failure: OnFailure = "warn",
        progress: Progress = False,
    ) -> None:
        warmup = steps // 5 if warmup is None else warmup
        for name, value, least in (
            ("chains", chains, 1),
            ("steps", steps, _FEWEST_STEPS),
            ("warmup", warmup, 0),
            ("every", every, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer >= {least}")
        check_on_failure(on_failure)
        self.chains, self.steps, self.warmup, self.every = chains, steps, warmup, every
        self.lags = tuple(sorted({0, *(check_lag(lag) for lag in lags)}))
        self.correlations = correlations
        self.seed = seed
        self.on_failure = on_failure
        self.progress = progress
        self._parts = math.ceil(_GROUPS / chains)
        if steps // every < self._parts:
            raise ValueError(
                f"steps={steps} with every={every} and chains={chains}: errors need "
                f"{self._parts} measurements a chain; take more chains or steps"
            )

    @torch.no_grad()
    def steady_state(self, system: SpinSystem, initial: Start = "random") -> SampledSteadyState:
        """Averages over time and chains, after a warm-up.

        Args:
            system: any couplings, law and batch; Gaussian spins need beta v J of a spectral radius
                below one.
            initial: ``"random"``: free spins. ``"ordered"``: all along the first axis. Spins that
                broadcast to (chains, ..., N, D). Or an earlier result, whose chains go on.

        Raises:
            ConvergenceError: with ``on_failure="raise"``, a run that is too short.
            ValueError: Gaussian spins that run away.
        """
        sound, broken = system.isolated()
        _check_bounded(sound)
        chains = self._start(sound, initial)
        law = sampled_law(sound.site)
        pairs = self.correlations
        lags = self.lags if pairs or (pairs is None and sound.num_spins <= _ALL_PAIRS) else ()
        history = max((*lags, 1)) - 1  # steps before the first that is measured
        past: deque[Tensor] = deque(maxlen=history + 1)
        record = _Record(self.steps, self.every, self._parts)
        before = self.warmup + history
        with deferred_interrupt() as asked, self._reporting(chains, before + self.steps) as tell:
            for step in range(-before, self.steps):
                past.appendleft(chains.spins)
                b = chains.beta[..., None, None] * chains.force()
                if step >= 0:
                    mean = law.mean(b)
                    record.series("moment", mean.sum(-2))
                    record.add("magnetization", mean, step)
                    flow = antisymmetric_flow(sound, mean, chains.spins)
                    record.series("entropy_production", flow)
                    record.add("entropy_production", flow, step)
                    if step % self.every == 0:
                        for lag in lags:
                            other = past[lag - 1] if lag else mean
                            record.add(f"delayed_{lag}", mean @ other.mT, step)
                chains.spins = _draw(sound, b, chains.streams)
                chains.sweeps += 1
                tell(before + step + 1, before + self.steps)
                if asked() and step + 1 < self.steps:
                    if not record.suffices():
                        raise KeyboardInterrupt
                    _warn_interrupted(step + 1, self.steps)
                    break
        result = SampledSteadyState(
            sound, _Ensemble.of(chains), lags, record.all_series(), record.groups(), broken
        )
        self._report(result)
        return result

    @torch.no_grad()
    def run(
        self, system: Undergoing, steps: int, initial: Start = "random", *, field: Field = None
    ) -> SampledTransient:
        """The averages of an ensemble of chains from one start, step by step.

        Args:
            system: what moves, or one a step.
            steps: how many, at least 1.
            initial: as :meth:`steady_state`. One start for all chains is the ensemble of a single
                configuration.
            field: a schedule of external fields
                (:class:`~spinformer.dynamics.steady_state.Protocol`): a quench, or the
                :func:`~spinformer.dynamics.triangle_wave` of a hysteresis loop.
        """
        protocol = Protocol(system, steps, field)
        chains = self._start(protocol.system, initial)
        law = sampled_law(protocol.system.site)
        history = _History()
        history.add(chains.spins)
        with deferred_interrupt() as asked, self._reporting(chains, steps) as tell:
            for done, (current, external) in enumerate(protocol, 1):
                before = chains.spins
                b = current.beta[..., None, None] * (external + current.couplings.apply(before))
                after = _draw(current, b, chains.streams)
                history.add(law.mean(b), entropy_flow(current, after, before, external))
                chains.spins = after
                chains.sweeps += 1
                tell(done, steps)
                if asked() and done < steps:
                    _warn_interrupted(done, steps)
                    protocol = protocol.until(done)
                    break
        return SampledTransient(protocol, _Ensemble.of(chains), history.all())

    def _reporting(
        self, chains: Chains, steps: int
    ) -> AbstractContextManager[Callable[[int, int], None]]:
        spins = int(chains.system.num_present.sum()) * chains.num_chains
        return reporting(self.progress, steps, spins=spins)

    def _start(self, system: SpinSystem, initial: Start) -> Chains:
        if not isinstance(initial, SampledSteadyState | SampledTransient):
            return Chains.start(system, self.chains, self.seed, initial)
        shape = (self.chains, *system.batch_shape, system.num_spins, system.dim)
        spins, streams = initial.spins, initial.streams
        if spins.shape != shape:
            raise ValueError(
                f"initial holds spins {tuple(spins.shape)}: chains that go on must have the shape "
                f"{shape}; take chains={spins.shape[0]} of the same systems"
            )
        streams = Streams(streams.keys, streams.position)
        return Chains(system, spins, streams, sweeps=initial.sweeps)

    def _report(self, result: SampledSteadyState) -> None:
        if self.on_failure == "ignore":
            return
        steps = result.series["moment"].shape[-1]
        moment = result.estimate("moment")
        sound = torch.isfinite(moment.mean)
        drifting = sound & ~result.equilibration("moment").equilibrated
        short = sound & ~moment.resolved
        if self._parts > 1:
            short = short | (sound & (10 * moment.tau > steps / self._parts))
        if bool((drifting | short).any()):
            report_failure(
                self.on_failure,
                f"ParallelDynamics: of {result.system.beta.numel()} systems the moment still "
                f"drifts in {int(drifting.any(-1).sum())}, and the run is too short for the "
                f"moment's autocorrelation time in {int(short.any(-1).sum())} (up to "
                f"{float(moment.tau[sound].max()):.3g} steps), after {self.warmup} + {steps} "
                "steps. Raise steps and warmup, or continue with initial=result.",
            )


def _draw(system: SpinSystem, b: Tensor, streams: Streams) -> Tensor:
    spins = system.site.draw(b, streams)
    return spins if system.mask is None else spins.masked_fill(system.mask[..., None], 0.0)


def _warn_interrupted(done: int, steps: int) -> None:
    warnings.warn(
        f"ParallelDynamics was interrupted after {done} of {steps} steps, and returns what they "
        "say; it goes on with initial=result",
        ConvergenceWarning,
        stacklevel=4,
    )


def _check_bounded(system: SpinSystem) -> None:
    """Gaussian spins follow S' = v (b + K S) + noise, which must contract."""
    if not isinstance(system.site, Gaussian) or not system.num_spins:
        return
    matrix = system.couplings.to_dense()
    if system.couplings.dim is not None:
        rows = system.num_spins * system.dim
        matrix = matrix.transpose(-3, -2).reshape(*matrix.shape[:-4], rows, rows)
    radius = system.site.variance * system.beta * eigenvalues(matrix).abs().amax(-1)
    if bool((radius >= 1).any()):
        raise ValueError(
            "Gaussian spins have a steady state while variance * beta * J has a spectral radius "
            f"below 1: it is {float(radius.max()):.6g}. Lower beta, the couplings or the variance"
        )


class _Record:
    """Sums over the parts of chains, and series of what is small."""

    def __init__(self, steps: int, every: int, parts: int) -> None:
        self._steps, self._every, self._parts = steps, every, parts
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: dict[str, list[int]] = {}
        self._series: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: Tensor, step: int) -> None:
        sums, counts = self._sums.setdefault(name, []), self._counts.setdefault(name, [])
        if step * self._parts // self._steps == len(sums):
            sums.append(torch.zeros_like(value, dtype=torch.float64))
            counts.append(0)
        sums[-1] += value
        counts[-1] += 1

    def series(self, name: str, value: Tensor) -> None:
        self._series.setdefault(name, []).append(value)

    def suffices(self) -> bool:
        """Whether what was measured has a mean and an error."""
        series = self._series.get("moment", ())
        groups = (sum(map(len, sums)) for sums in self._sums.values())
        return len(series) >= _FEWEST_STEPS and min(groups) >= _FEWEST_GROUPS

    def groups(self) -> dict[str, Tensor]:
        """Averages of all parts of all chains, (groups, ...)."""
        return {
            name: torch.cat([s / n for s, n in zip(sums, self._counts[name], strict=True)])
            for name, sums in self._sums.items()
        }

    def all_series(self) -> dict[str, Tensor]:
        """(chains, ..., steps)."""
        return {name: torch.stack(values, -1) for name, values in self._series.items()}


def _error(groups: Tensor) -> Tensor:
    """Standard error of the mean of independent averages (groups, ...).

    With the variance of Student's t, so that z-scores have variance one.
    """
    count = len(groups)
    student = (count - 1) / (count - 3)
    return (groups.var(0) * (student / count)).sqrt()


class _Ensemble(NamedTuple):
    """Where chains stand: spins (chains, ..., N, D), random numbers and steps done."""

    spins: Tensor
    streams: Streams
    sweeps: int

    @classmethod
    def of(cls, chains: Chains) -> _Ensemble:
        streams = Streams(chains.streams.keys, chains.streams.position)
        return cls(chains.spins, streams, chains.sweeps)

    @classmethod
    def unpack(cls, arrays: Mapping[str, Tensor], description: Mapping[str, Any]) -> _Ensemble:
        streams = Streams(arrays["keys"], description["position"])
        return cls(arrays["spins"], streams, description["sweeps"])


class _Sampled:
    """A result whose chains can go on.

    Attributes:
        spins: (chains, ..., N, D) after the last step.
        streams: the random numbers of every chain, as far as they were drawn.
        sweeps: steps since the start.
    """

    _kind: str

    def __init__(self, ensemble: _Ensemble) -> None:
        self.spins, self.streams, self.sweeps = ensemble

    def _write(
        self,
        path: str | Path,
        systems: Sequence[SpinSystem],
        broken: Tensor | None,
        arrays: Mapping[str, Tensor],
        **description: Any,
    ) -> None:
        packed = {"spins": self.spins, "keys": self.streams.keys, **arrays}
        if broken is not None:
            packed["broken"] = broken
        names = []
        for number, system in enumerate(systems):
            parts, name = storage.pack_system(system)
            packed |= {f"system.{number}.{key}": value for key, value in parts.items()}
            names.append(name)
        state = {"position": self.streams.position, "sweeps": self.sweeps}
        description = {"kind": self._kind, "systems": names, **state, **description}
        storage.save(path, packed, description)

    @classmethod
    def _read(
        cls, path: str | Path
    ) -> tuple[dict[str, Tensor], dict[str, Any], list[SpinSystem], _Ensemble]:
        arrays, description = storage.load(path)
        if description.get("kind") != cls._kind:
            raise ValueError(
                f"path={str(path)!r} holds a {description.get('kind')}: {cls.__name__}.load reads "
                f"what {cls.__name__}.save wrote"
            )
        systems = [
            storage.unpack_system(storage.room(arrays, f"system.{number}."), name)
            for number, name in enumerate(description["systems"])
        ]
        return arrays, description, systems, _Ensemble.unpack(arrays, description)


class SampledSteadyState(SteadyState, _Sampled):
    """Averages over the chains of :meth:`ParallelDynamics.steady_state`, with errors.

    Attributes:
        spins, streams, sweeps: where the chains stand.
        series: ``"moment"`` (chains, ..., D, steps), the total moment's mean at given last step,
            and ``"entropy_production"`` (chains, ..., steps).
        lags: delays whose correlations were measured.
        broken: systems that were given with NaN or infinity (...) bool, or None.
    """

    _kind = "sampled steady state"

    def __init__(
        self,
        system: SpinSystem,
        ensemble: _Ensemble,
        lags: Sequence[int],
        series: Mapping[str, Tensor],
        groups: Mapping[str, Tensor],
        broken: Tensor | None,
    ) -> None:
        _Sampled.__init__(self, ensemble)
        self.system, self.lags, self.broken = system, tuple(lags), broken
        self.series = {
            name: self._hide(values, 2 if name == "moment" else 1)
            for name, values in series.items()
        }
        self._groups = groups

    @property
    def magnetization(self) -> Tensor:
        return self._finish(self._groups["magnetization"].mean(0), 2)

    @property
    def entropy_production(self) -> Tensor:
        return self._finish(self._groups["entropy_production"].mean(0), 0)

    def delayed_correlations(self, lag: int = 1, *, connected: bool = False) -> Tensor:
        """As :meth:`SteadyState.delayed_correlations`, for one of ``lags``.

        Raises:
            ValueError: a lag that was not measured.
        """
        pairs = self._pairs(lag).mean(0)
        if connected:
            m = self._groups["magnetization"].mean(0)
            pairs = pairs - m @ m.mT
        return self._finish(pairs, 2)

    def standard_error(
        self, quantity: Quantity, lag: int = 1, *, connected: bool = False
    ) -> Tensor:
        """Standard error, of the shape of the quantity.

        Args:
            quantity: ``"magnetization"``, ``"correlations"``, ``"delayed_correlations"`` or
                ``"entropy_production"``.
            lag, connected: of the correlations.
        """
        check_choice(
            "quantity",
            quantity,
            ("magnetization", "correlations", "delayed_correlations", "entropy_production"),
        )
        if quantity == "magnetization":
            return self._finish(_error(self._groups[quantity]), 2)
        if quantity == "entropy_production":
            return self._finish(_error(self._groups[quantity]), 0)
        pairs = self._pairs(0 if quantity == "correlations" else lag)
        if connected:
            # Of the product of two means to first order in their deviations.
            m = self._groups["magnetization"]
            product = m @ m.mean(0).mT
            pairs = pairs - product - product.mT
        return self._finish(_error(pairs), 2)

    def estimate(self, name: str) -> Estimate:
        """Mean, error and autocorrelation time of one of the ``series``, (...)."""
        check_choice("name", name, tuple(self.series))
        return estimate(self.series[name])

    def equilibration(self, name: str) -> Equilibration:
        """Whether one of the ``series`` still drifts, (...)."""
        check_choice("name", name, tuple(self.series))
        return equilibration(self.series[name])

    @cached_property
    def diagnostics(self) -> dict[str, Tensor]:
        """Of every component of the moment, (..., D): ``tau`` (steps), ``ess``, ``r_hat``,
        ``equilibrated``. Needs the extra ``sampling``."""
        moment = self.estimate("moment")
        return {
            "tau": moment.tau,
            "ess": moment.ess,
            "r_hat": moment.r_hat,
            "equilibrated": self.equilibration("moment").equilibrated,
        }

    def save(self, path: str | Path) -> None:
        """Write the system, the averages of all parts of chains, the series and where the chains
        stand.

        Args:
            path: ending in ``.npz``, or in ``.h5`` for HDF5. It also holds what the averages come
                to, for other programs: ``magnetization``, ``magnetization_error`` and so on.
        """
        arrays = {
            "magnetization": self.magnetization,
            "magnetization_error": self.standard_error("magnetization"),
            "entropy_production": self.entropy_production,
            "entropy_production_error": self.standard_error("entropy_production"),
        }
        for lag in self.lags:
            name = f"delayed_correlations_{lag}"
            error = self.standard_error("delayed_correlations", lag)
            arrays |= {name: self.delayed_correlations(lag), f"{name}_error": error}
        arrays |= {f"series.{name}": values for name, values in self.series.items()}
        arrays |= {f"groups.{name}": values for name, values in self._groups.items()}
        self._write(path, [self.system], self.broken, arrays, lags=self.lags)

    @classmethod
    def load(cls, path: str | Path) -> SampledSteadyState:
        """What :meth:`save` wrote; its chains can go on."""
        arrays, description, (system,), ensemble = cls._read(path)
        series, groups = (storage.room(arrays, name) for name in ("series.", "groups."))
        return cls(system, ensemble, description["lags"], series, groups, arrays.get("broken"))

    def _pairs(self, lag: int) -> Tensor:
        """<S_i(t + lag) . S_j(t)> of every group, (groups, ..., N, N)."""
        check_lag(lag)
        if lag not in self.lags:
            raise ValueError(
                f"lag={lag} was not measured, only {list(self.lags)}: pass "
                f"ParallelDynamics(lags=..., correlations=True)"
            )
        pairs = self._groups[f"delayed_{lag}"]
        if lag:
            return pairs
        # Spins of one step are independent at given last step, but not of themselves.
        site, own = self.system.site, pairs.diagonal(dim1=-2, dim2=-1)
        if isinstance(site, Gaussian):
            own = own + site.dim * site.variance
        else:
            assert site.radius is not None
            own = torch.full_like(own, site.radius**2)
        return present_pairs(self.system, torch.diagonal_scatter(pairs, own, dim1=-2, dim2=-1))

    def _finish(self, value: Tensor, trailing: int) -> Tensor:
        return self._hide(value.to(self.system.field.dtype), trailing)

    def _hide(self, value: Tensor, trailing: int) -> Tensor:
        if self.broken is None:
            return value
        return value.masked_fill(self.broken[(..., *[None] * trailing)], torch.nan)


class _History:
    """Mean and error of every step."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []
        self.errors: list[Tensor] = []
        self.moments: list[Tensor] = []
        self.flows: list[Tensor] = []

    def add(self, mean: Tensor, flow: Tensor | None = None) -> None:
        self.means.append(mean.mean(0))
        # One chain has no error.
        self.errors.append(_spread(mean))
        self.moments.append(mean.sum(-2))
        if flow is not None:
            self.flows.append(flow)

    def all(self) -> dict[str, Tensor]:
        """(steps + 1, ...), the flows (steps, ...)."""
        return {name: torch.stack(values) for name, values in vars(self).items()}


def _spread(values: Tensor) -> Tensor:
    if len(values) < 4:
        return torch.full_like(values[0], torch.nan)
    return _error(values)


class SampledTransient(Transient, _Sampled):
    """Averages over the chains of :meth:`ParallelDynamics.run`, with errors, step by step.

    The average of a step is that of the mean at given last step. Errors are NaN with fewer than 4
    chains.

    Attributes:
        spins, streams, sweeps: where the chains stand.
        moments: of every chain, (steps + 1, chains, ..., D).
        flows: entropy given to the heat bath in each step of each chain, (steps, chains, ...).
    """

    _kind = "sampled transient"

    def __init__(
        self, protocol: Protocol, ensemble: _Ensemble, history: Mapping[str, Tensor]
    ) -> None:
        _Sampled.__init__(self, ensemble)
        self.protocol = protocol
        self._means, self._errors = history["means"], history["errors"]
        self.moments = protocol.hide_broken(history["moments"], 1)
        self.flows = protocol.hide_broken(history["flows"], 0)

    @property
    def magnetization(self) -> Tensor:
        return self.protocol.hide_broken(self._means, 2)

    @property
    def entropy_flow(self) -> Tensor:
        return self.flows.mean(1)

    def standard_error(
        self, quantity: Literal["magnetization", "moment", "entropy_flow"]
    ) -> Tensor:
        """Standard error, of the shape of the quantity."""
        check_choice("quantity", quantity, ("magnetization", "moment", "entropy_flow"))
        if quantity == "magnetization":
            return self.protocol.hide_broken(self._errors, 2)
        values = self.moments if quantity == "moment" else self.flows
        return _spread(values.transpose(0, 1))

    def save(self, path: str | Path) -> None:
        """Write the systems, the fields, what was measured and where the chains stand.

        Args:
            path: ending in ``.npz``, or in ``.h5`` for HDF5. It also holds what the measurements
                come to, for other programs: ``magnetization``, ``magnetization_error`` and so on.
        """
        arrays = {
            "fields": self.fields,
            "magnetization": self.magnetization,
            "magnetization_error": self.standard_error("magnetization"),
            "entropy_flow": self.entropy_flow,
            "entropy_flow_error": self.standard_error("entropy_flow"),
        }
        history = (self._means, self._errors, self.moments, self.flows)
        names = ("means", "errors", "moments", "flows")
        arrays |= {f"history.{name}": values for name, values in zip(names, history, strict=True)}
        self._write(path, self.protocol.systems, self.protocol.broken, arrays)

    @classmethod
    def load(cls, path: str | Path) -> SampledTransient:
        """What :meth:`save` wrote; its chains can go on."""
        arrays, _, systems, ensemble = cls._read(path)
        fields = arrays["fields"]
        undergoing = systems[0] if len(systems) == 1 else systems
        protocol = Protocol(undergoing, len(fields), fields, broken=arrays.get("broken"))
        return cls(protocol, ensemble, storage.room(arrays, "history."))


Start = Literal["random", "ordered"] | Tensor | SampledSteadyState | SampledTransient
