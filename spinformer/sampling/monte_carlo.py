"""Monte Carlo of any spin system: many chains, one after the other's sweep, measured as they go."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from spinformer.errors import (
    OnFailure,
    check_on_failure,
    nearest,
    report_failure,
    strict_options,
    warn_caller,
)
from spinformer.sampling import storage
from spinformer.sampling.chains import Chains, Move, Start
from spinformer.sampling.local import HeatBath, OverRelaxation
from spinformer.sampling.observables import Observables, Pairs, Record, Recorder, lattice_of
from spinformer.sampling.progress import Progress, deferred_interrupt, reporting
from spinformer.sampling.sampled import DECIDING, SampledEquilibrium
from spinformer.spins.site import Gaussian
from spinformer.spins.streams import Streams
from spinformer.spins.system import SpinSystem
from spinformer.thermo.statistics import split_r_hat

__all__ = ["MonteCarlo"]

Seed = int | Sequence[int] | Tensor | torch.Generator

# Series shorter than this have no drift to look for.
_FEWEST_MEASUREMENTS = 16
# Unless told otherwise, means given the neighbours are measured up to so many sites, all pairs up
# to so many, and all pairs of components up to so many of those: more would cost more than sweeps.
_SMALL_SITES, _SMALL_PAIRS, _SMALL_COMPONENTS = 512, 128, 64
# Configurations kept for gradients: their error is that of the run times sqrt(T / kept).
_KEPT_FOR_GRADIENTS = 1000
_SWEEPS_TO_ADAPT = 10


@strict_options
class MonteCarlo:
    r"""The Boltzmann law itself, by Markov chains, with error bars.

    A sweep lets every move treat each spin once; after ``warmup`` of them, which are forgotten and
    in which moves adapt, every ``every``-th configuration is measured.

    Args:
        moves: a :class:`~spinformer.sampling.chains.Move`, or several that take turns in each sweep
            (list one twice to have it twice). None: heat bath, and for spheres over-relaxation
            after it, which turns spins around the force on them without changing the energy.
        chains: independent chains of each system. Four at least can tell whether they agree.
        sweeps: of each chain, to be measured.
        warmup: sweeps before that. None: a fifth of ``sweeps``.
        every: sweeps between measurements.
        seed: an integer, a generator, or the int64 keys of the chains (chains, *batch): see
            :meth:`Streams.from_seed`. Chain k of a run is the chain of its key alone, to rounding.
            So is a system of a batch, if it has the bonds of the others: their union decides which
            spins are updated together, and another order gives other, as good, chains.
        initial: ``"random"`` or ``"ordered"`` spins to start from.
        correlations: True: measure :math:`S_i \cdot S_j` of all pairs, N^2 numbers.
            ``"components"``: :math:`S_{ia} S_{jb}` too, N^2 D^2 numbers, for the susceptibility of
            all pairs. False: O(N D) numbers only. None: components up to N D = 64, pairs up to
            N = 128; beyond, they take longer than a sweep.
        conditional: measure the mean of each spin given the others instead of the spin: less noise
            for one more evaluation of the site law a measurement. None: up to N = 512.
        structure_factor: measure the waves of a lattice, O(N D log N) a measurement.
        keep: configurations of each chain to keep, evenly spaced. None: none, or at most 1000 where
            gradients are asked for.
        progress: True for a bar with the rate of spin updates, or a function of (sweeps done,
            sweeps in all).
        checkpoint: file (``.npz``, ``.h5``) from which a run goes on where it was, bit by bit as if
            it had not been stopped, and into which it writes its state now and then, on Ctrl-C and
            at the end.
        checkpoint_every: seconds between.
        on_failure: what to do when the run is too short to know its own errors: fewer than 50
            autocorrelation times, chains that disagree, or a drift.

    Ctrl-C ends a run after the sweep that it is in: the checkpoint is written, and what was
    measured is returned with a warning. If that is next to nothing, ``KeyboardInterrupt`` is raised
    after the checkpoint is written. A second Ctrl-C is raised at once.
    """

    def __init__(
        self,
        moves: Move | Sequence[Move] | None = None,
        *,
        chains: int = 4,
        sweeps: int = 10_000,
        warmup: int | None = None,
        every: int = 1,
        seed: Seed = 0,
        initial: Start = "random",
        correlations: bool | Literal["components"] | None = None,
        conditional: bool | None = None,
        structure_factor: bool = False,
        keep: int | None = None,
        progress: Progress = False,
        checkpoint: str | Path | None = None,
        checkpoint_every: float = 60.0,
        on_failure: OnFailure = "warn",
    ) -> None:
        self.moves = None if moves is None else _moves(moves)
        self.chains = _count("chains", chains, 1)
        self.every = _count("every", every, 1)
        self.sweeps = _count("sweeps", sweeps, _FEWEST_MEASUREMENTS * every)
        self.warmup = sweeps // 5 if warmup is None else _count("warmup", warmup, 0)
        self.seed = seed
        self.initial = initial
        if correlations not in (None, True, False, "components"):
            raise ValueError(
                f"correlations={correlations!r}"
                + nearest(str(correlations), ("components", "True", "False", "None"))
            )
        self.correlations = correlations
        self.conditional = conditional
        self.structure_factor = structure_factor
        self.keep = None if keep is None else _count("keep", keep, 0)
        self.progress = progress
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        if self.checkpoint is not None:
            storage.check_ending(self.checkpoint)
        if not checkpoint_every >= 0:
            raise ValueError(f"checkpoint_every={checkpoint_every} must be seconds, 0 or more")
        self.checkpoint_every = checkpoint_every
        check_on_failure(on_failure)
        self.on_failure = on_failure

    def solve(self, system: SpinSystem, initial: Tensor | None = None) -> SampledEquilibrium:
        """Sample every system of the batch.

        Args:
            system: symmetric couplings, any batch shape.
            initial: spins to start from, (chains, *batch, N, D) or broadcastable to it.

        Raises:
            ValueError: asymmetric couplings, Gaussian spins that don't exist, a move that does not
                apply, or a checkpoint of another run.
            ConvergenceError: ``on_failure="raise"`` and the run was too short.
        """
        if not system.couplings.is_symmetric:
            raise ValueError(
                "MonteCarlo samples exp(-beta E), and asymmetric couplings have no energy. Pass "
                "SpinSystem(..., symmetrize=True) to use (J + J^T) / 2, or sample the steady state "
                "of their dynamics with ParallelDynamics"
            )
        # Now, not after hours of sampling: diagnostics need an extra package.
        split_r_hat(torch.zeros(1, 8))
        sound, broken = system.isolated()
        if isinstance(sound.site, Gaussian):
            sound.site.check_stable(sound.beta.detach() * sound.couplings.largest_eigenvalue())
        observables = self._observables(sound)
        keep = self._kept(sound)
        with torch.no_grad():
            run = _Run(self, sound, observables, initial, keep)
            run.go()
        equilibrium = SampledEquilibrium(sound, observables, run.record(), broken)
        self._judge(equilibrium)
        return equilibrium

    def _observables(self, system: SpinSystem) -> Observables:
        n, d = system.num_spins, system.dim
        pairs: Pairs
        if self.correlations is None:
            scalar: Pairs = "scalar" if n <= _SMALL_PAIRS else "none"
            pairs = "components" if n * d <= _SMALL_COMPONENTS else scalar
        elif self.correlations == "components":
            pairs = "components"
        else:
            pairs = "scalar" if self.correlations else "none"
        if self.structure_factor and lattice_of(system.couplings) is None:
            raise ValueError(
                "structure_factor=True measures the waves of a lattice, and these couplings are "
                "none: pass momenta and positions to structure_factor() of the result"
            )
        return Observables(
            system,
            conditional=n <= _SMALL_SITES if self.conditional is None else self.conditional,
            pairs=pairs,
            structure=self.structure_factor,
        )

    def _kept(self, system: SpinSystem) -> int:
        tensors = (system.field, system.beta, *system.couplings.tensors())
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if wanted and self.keep == 0:
            raise ValueError(
                "keep=0, and gradients are asked for, which are those of kept configurations: pass "
                "keep=None or a number, or solve under torch.no_grad()"
            )
        if self.keep is not None:
            return self.keep
        return min(self.sweeps // self.every, _KEPT_FOR_GRADIENTS) if wanted else 0

    def _judge(self, equilibrium: SampledEquilibrium) -> None:
        """Warn of what the run does not know."""
        found = equilibrium.diagnostics
        sound = torch.ones_like(found.passed)
        if equilibrium.broken is not None:
            sound = ~equilibrium.broken
        failed = ~found.passed & sound
        if not bool(failed.any()):
            return
        reasons = []

        def worst(values: dict[str, Tensor]) -> float:
            return max(float(values[name][failed].abs().max()) for name in DECIDING)

        if bool((~found.enough & failed).any()):
            sweeps = equilibrium.num_measurements * self.every
            reasons.append(
                f"an autocorrelation time of {worst(found.tau):.3g} sweeps or more in chains of "
                f"{sweeps}: raise sweeps to {_round(100 * worst(found.tau))} or more, or use other "
                "moves"
            )
        if bool((~found.mixed & failed).any()):
            reasons.append(
                f"chains that disagree (R-hat {worst(found.r_hat):.3g}): raise warmup and sweeps, "
                "or use ParallelTempering if they sit in different valleys"
            )
        if bool((~found.equilibrated & failed).any()):
            reasons.append(
                f"a drift of {worst(found.drift):.1f} standard errors: raise warmup (now "
                f"{self.warmup})"
            )
        report_failure(
            self.on_failure,
            f"MonteCarlo: {int(failed.sum())} of {failed.numel()} systems were sampled too shortly "
            f"to know their errors: {'; '.join(reasons)}",
        )


class _Run:
    """One call of solve: its chains, and where they are."""

    def __init__(
        self,
        options: MonteCarlo,
        system: SpinSystem,
        observables: Observables,
        initial: Tensor | None,
        keep: int,
    ) -> None:
        if options.checkpoint is not None:
            storage.check_writable(options.checkpoint)
        self.options = options
        start = options.initial if initial is None else initial
        lead = (options.chains, *system.batch_shape)
        # The keys first: a generator gives them once, for the hash and for the chains.
        self.keys = Streams.from_seed(options.seed, lead, system.field.device).keys
        self.chains = Chains.start(system, options.chains, self.keys, start)
        self.moves = options.moves or _default_moves(system)
        self.kernels = [move.start(self.chains) for move in self.moves]
        self.interrupted = False
        self.recorder = Recorder(self.chains, observables, options.sweeps // options.every, keep)
        self.configuration = self._configuration(start)
        self.identity = self._identity(start)
        if options.checkpoint is not None and options.checkpoint.exists():
            self._resume(options.checkpoint)

    def go(self) -> None:
        """Warm up and measure, to the end or to Ctrl-C."""
        saved = time.monotonic()
        try:
            with (
                deferred_interrupt() as asked,
                reporting(
                    self.options.progress,
                    self.sweeps,
                    done=self.chains.sweeps,
                    spins=int(self.chains.system.num_present.sum()) * self.chains.num_chains,
                ) as tell,
            ):
                for _ in self._steps():
                    tell(self.chains.sweeps, self.sweeps)
                    if asked():
                        raise KeyboardInterrupt
                    if time.monotonic() - saved > self.options.checkpoint_every:
                        self._save()
                        saved = time.monotonic()
        except KeyboardInterrupt:
            self._save()
            path = self.options.checkpoint
            so_far = (
                f"MonteCarlo was interrupted after {self.recorder.done} of "
                f"{self.recorder.measurements} measurements"
            )
            goes_on = "" if path is None else f"; it goes on from {path} when it is solved again"
            if self.recorder.done < _FEWEST_MEASUREMENTS:
                raise KeyboardInterrupt(so_far + goes_on) from None
            self.interrupted = True
            warn_caller(f"{so_far}, and returns what they say{goes_on}")
        else:
            self._save()

    @property
    def sweeps(self) -> int:
        """Sweeps in all."""
        return self.options.warmup + self.recorder.measurements * self.options.every

    def _steps(self) -> Iterator[None]:
        """Do some sweeps at a time; between them all of the state is in order."""
        options, chains = self.options, self.chains
        while chains.sweeps < options.warmup:
            count = min(_SWEEPS_TO_ADAPT, options.warmup - chains.sweeps)
            self._sweep(count)
            for kernel in self.kernels:
                kernel.adapt()
            if chains.sweeps == options.warmup:
                for kernel in self.kernels:
                    kernel.reset_report()
            yield
        while self.recorder.done < self.recorder.measurements:
            self._sweep(options.every)
            self.recorder.record()
            yield

    def _sweep(self, count: int) -> None:
        if len(self.kernels) == 1:
            self.kernels[0].sweep(count)
        else:
            for _ in range(count):
                for kernel in self.kernels:
                    kernel.sweep()
        self.chains.sweeps += count

    def record(self) -> Record:
        """What the run took down."""
        recorder = self.recorder
        reports = {}
        for number, (move, kernel) in enumerate(zip(self.moves, self.kernels, strict=True)):
            for name, value in kernel.report().items():
                reports[f"{number}.{type(move).__name__}.{name}"] = value
        return Record(
            series=recorder.series,
            means=recorder.means,
            samples=recorder.samples,
            keys=self.keys,
            every=self.options.every,
            interrupted=self.interrupted,
            reports=reports,
            configuration=self.configuration,
        )

    # -- checkpoints ------------------------------------------------------------------------------

    def _configuration(self, start: Start | Tensor) -> dict[str, Any]:
        options = self.options
        return {
            "moves": [storage.described(move) for move in self.moves],
            "chains": options.chains,
            "sweeps": options.sweeps,
            "warmup": options.warmup,
            "every": options.every,
            "initial": start if isinstance(start, str) else "tensor",
            "pairs": self.recorder.observables.pairs,
            "conditional": self.recorder.observables.conditional,
            "structure_factor": self.recorder.observables.structure,
            "keep": self.recorder.keep,
        }

    def _identity(self, start: Start | Tensor) -> str:
        """A hash of all that decides what the run does."""
        system = self.chains.system
        arrays, description = storage.pack_system(system)
        arrays["keys"] = self.keys
        if isinstance(start, Tensor):
            arrays["initial"] = start
        return storage.fingerprint(arrays, {"run": self.configuration, "system": description})

    def _save(self) -> None:
        if self.options.checkpoint is None:
            return
        arrays = {"spins": self.chains.spins, "beta": self.chains.beta}
        for number, kernel in enumerate(self.kernels):
            arrays |= {f"kernel.{number}.{name}": v for name, v in kernel.state().items()}
        arrays |= {f"recorder.{name}": value for name, value in self.recorder.state().items()}
        numbers = {"position": self.chains.streams.position, "sweeps": self.chains.sweeps}
        storage.save(
            self.options.checkpoint,
            arrays,
            {"kind": "checkpoint", "identity": self.identity, **numbers, "run": self.configuration},
        )

    def _resume(self, path: Path) -> None:
        arrays, description = storage.load(path)
        if description.get("kind") != "checkpoint":
            raise ValueError(
                f"checkpoint={str(path)!r} is a file of something else: give another path"
            )
        if description["identity"] != self.identity:
            differences = [
                f"{name} {description['run'].get(name)!r} there, {value!r} here"
                for name, value in self.configuration.items()
                if description["run"].get(name) != value
            ]
            raise ValueError(
                f"checkpoint={str(path)!r} is of another run: "
                + ("; ".join(differences) or "its system, seed or initial spins differ")
                + ". Give another path, or delete the file to start anew"
            )
        device = self.chains.spins.device
        arrays = {name: value.to(device) for name, value in arrays.items()}
        self.chains.spins.copy_(arrays["spins"])
        self.chains.beta.copy_(arrays["beta"])
        self.chains.streams.position = description["position"]
        self.chains.sweeps = description["sweeps"]
        for number, kernel in enumerate(self.kernels):
            kernel.restore(storage.room(arrays, f"kernel.{number}."))
        self.recorder.restore(storage.room(arrays, "recorder."))


def _default_moves(system: SpinSystem) -> tuple[Move, ...]:
    """Heat bath; over-relaxation where spins can turn around the force on them."""
    if system.dim == 1 or isinstance(system.site, Gaussian):
        return (HeatBath(),)
    return (HeatBath(), OverRelaxation())


def _moves(moves: Move | Sequence[Move]) -> tuple[Move, ...]:
    several = tuple(moves) if isinstance(moves, Iterable) else (moves,)
    for move in several:
        if not isinstance(move, Move):
            raise TypeError(
                f"moves={moves!r}: pass a Move such as HeatBath(), or several in a list"
            )
    if not several:
        raise ValueError("moves is empty: pass at least one, or None for the default")
    return several


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer, {least} or more")
    return value


def _round(number: float) -> int:
    """Up to two digits."""
    size: int = 10 ** max(math.floor(math.log10(max(number, 1))) - 1, 0)
    return math.ceil(number / size) * size
