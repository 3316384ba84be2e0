r"""Parallel tempering: one system at a ladder of temperatures, whose configurations change places.

A swap of the configurations of two neighbouring rungs is accepted with probability

.. math:: \min\big(1,\, e^{\Delta}\big),\qquad
          \Delta = (\beta_{k+1} - \beta_k)\,(E_{k+1} - E_k),

which leaves the product of all Boltzmann laws as it is. What is stuck in a valley when cold climbs
to where it is hot, forgets, and comes back somewhere else.

A ladder is good if no pair of rungs is a bottleneck. For Gaussian energies of standard deviation
:math:`\sigma` a pair accepts with :math:`\operatorname{erfc}(d/2)`,
:math:`d = \sigma\,(\beta_{k+1} - \beta_k)`, and d is a length: it adds up along the ladder. So the
rungs that accept equally often divide the measured length

.. math:: \sum_k d_k,\qquad d_k = 2\operatorname{erfc}^{-1}(\text{acceptance of the pair } k),

in equal parts (:func:`equalized`).

Source: Hukushima & Nemoto, J. Phys. Soc. Jpn. 65, 1604 (1996); acceptance of Gaussian energies:
Kofke, J. Chem. Phys. 117, 6911 (2002); even and odd pairs in turn: Okabe et al., Chem. Phys. Lett.
335, 435 (2001), and Syed et al., J. R. Stat. Soc. B 84, 321 (2022); flow of replicas: Katzgraber
et al., J. Stat. Mech. P03018 (2006).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from spinformer.errors import OnFailure, check_on_failure, report_failure, strict_options
from spinformer.sampling.chains import Chains, Kernel, Move, Start
from spinformer.sampling.local import HeatBath
from spinformer.sampling.monte_carlo import MonteCarlo, Seed
from spinformer.sampling.progress import Progress
from spinformer.sampling.sampled import SampledEquilibrium
from spinformer.spins.couplings.checks import check_count
from spinformer.spins.system import SpinSystem

__all__ = [
    "ParallelTempering",
    "ReplicaExchange",
    "SwapStatistics",
    "default_rungs",
    "disordered_beta",
    "equalized",
    "geometric",
    "swap_length",
    "swap_statistics",
]

# Sweeps between adaptations of the moves in a pilot run.
_ADAPT = 10
# Rounds in which a ladder is adapted, each twice as long as the one before; the part of each in
# which chains get used to it; and sweeps of the shortest.
_ADAPTATIONS, _SETTLING, _SHORTEST = 5, 0.25, 8
# Pairs that swap less often are bottlenecks.
_LEAST_ACCEPTANCE = 0.05
# Whether a replica was at the hottest rung, then at the coldest: its way to a round trip.
_NOWHERE, _HOT, _COLD_AFTER_HOT, _COLD = 0, 1, 2, 3


@strict_options
class ReplicaExchange(Move):
    """Swaps of configurations between neighbouring rungs of a ladder of temperatures.

    The ladder is the first axis of the system's batch: the same couplings, fields and mask at
    inverse temperatures that rise along it, hot first. Every chain is a ladder of its own. It
    is used together with a move that changes spins.

    Rounds take the pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ... in turn. The pairs of a round
    have no rung in common, so that all are decided at once; and a replica that has just moved up
    meets its next pair in the next round, which carries it on instead of back: it crosses K rungs
    in O(K) rounds where a random choice of pairs would diffuse in O(K^2). Each round by itself
    satisfies detailed balance; their sequence leaves the law invariant.

    A swap is decided by the stream of its lower rung, so that a ladder does what it would do alone.

    Args:
        every: sweeps from one round to the next.

    Reports, each (chains, K, *batch):

    * ``swap_acceptance``: mean probability that rung k and k + 1 swap, over all rounds; NaN at the
      last rung;
    * ``swaps``: how often they did;
    * ``round_trips``: of replica r, from the hottest rung to the coldest and back to the hottest;
    * ``flow``: of those replicas at rung k that have been at an end of the ladder, the fraction
      that was last at the hottest: 1 at the hottest rung and 0 at the coldest, a straight line for
      the best ladder and a step at a bottleneck;
    * ``replica``: which configuration is at rung k now, by the rung at which it started.

    Cost: one energy of every rung a round.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = check_count("every", every, 1)

    def start(self, chains: Chains) -> _Exchange:
        _check_ladder(chains)
        return _Exchange(chains, self.every)


class _Exchange(Kernel):
    """Replica exchange at work. All tensors are (chains, K, *batch)."""

    def __init__(self, chains: Chains, every: int) -> None:
        super().__init__(chains)
        self.every = every
        shape, device = chains.beta.shape, chains.beta.device
        rungs = torch.arange(shape[1], device=device)
        self.rung = rungs.reshape(-1, *[1] * (len(shape) - 2)).expand(shape)
        self.replica = self.rung.clone()
        self.visited = torch.full(shape, _NOWHERE, device=device)
        self.trips = torch.zeros(shape, dtype=torch.int64, device=device)  # these three move along
        self.sweeps = 0
        self.rounds = 0
        self.reset_report()
        self._mark_ends()

    def sweep(self, count: int = 1) -> None:
        for _ in range(count):
            self.sweeps += 1
            if self.sweeps % self.every == 0:
                self._round()

    def _round(self) -> None:
        chains = self.chains
        energy = chains.energy()
        log_ratio = chains.beta.diff(dim=1) * energy.diff(dim=1)  # (chains, K - 1, *batch)
        # Of every pair, also of those whose turn it is not: it is the mean that counts, and what a
        # pair would do is known.
        self.probability[:, :-1] += log_ratio.clamp_max(0).exp()
        self.measured += 1
        first = self.rounds % 2
        self.rounds += 1
        uniform = chains.streams.uniform(dtype=torch.float64)[:, :-1]
        # NaN, of a system that was given broken, is not above anything: it never swaps.
        accepted = log_ratio > uniform.log()
        accepted[:, 1 - first :: 2] = False
        self.swaps[:, :-1] += accepted
        source = self.rung.clone()
        source[:, :-1] += accepted
        source[:, 1:] -= accepted.long()
        if bool(accepted.any()):
            sites = source[..., None, None].expand_as(chains.spins)
            chains.spins.copy_(chains.spins.gather(1, sites))
            self.replica = self.replica.gather(1, source)
            self.visited = self.visited.gather(1, source)
            self.trips = self.trips.gather(1, source)
        self._mark_ends()
        self.from_hot += self.visited == _HOT
        self.from_cold += self.visited >= _COLD_AFTER_HOT

    def _mark_ends(self) -> None:
        hot, cold = self.visited[:, 0], self.visited[:, -1]
        self.trips[:, 0] += hot == _COLD_AFTER_HOT
        hot.fill_(_HOT)
        cold.copy_(torch.where((cold == _HOT) | (cold == _COLD_AFTER_HOT), _COLD_AFTER_HOT, _COLD))

    @property
    def acceptance(self) -> Tensor:
        """Mean probability of a swap of rungs k and k + 1, (chains, K, *batch); NaN at the last."""
        return self.probability / self.measured

    def report(self) -> dict[str, Tensor]:
        last_seen = self.from_hot + self.from_cold
        return {
            "swap_acceptance": self.acceptance,
            "swaps": self.swaps.clone(),
            "round_trips": torch.zeros_like(self.trips).scatter(1, self.replica, self.trips),
            "flow": self.from_hot / last_seen,
            "replica": self.replica.clone(),
        }

    def reset_report(self) -> None:
        """Where replicas have been is not forgotten: a round trip may begin while warming up."""
        self.measured = 0
        self.probability = torch.zeros_like(self.chains.beta)
        self.probability[:, -1] = torch.nan
        self.swaps = torch.zeros_like(self.replica)
        self.trips = torch.zeros_like(self.replica)
        self.from_hot = torch.zeros_like(self.replica)
        self.from_cold = torch.zeros_like(self.replica)

    def state(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.sweeps, self.rounds, self.measured])
        return {"counts": counts} | {name: getattr(self, name).clone() for name in _KEPT}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.sweeps, self.rounds, self.measured = state["counts"].tolist()
        for name in _KEPT:
            setattr(self, name, state[name].clone())


_KEPT = ("replica", "visited", "trips", "probability", "swaps", "from_hot", "from_cold")


def _check_ladder(chains: Chains) -> None:
    system = chains.system
    system.require_symmetric("ReplicaExchange")
    if not system.batch_shape or system.batch_shape[0] < 2:
        raise ValueError(
            f"ReplicaExchange needs a ladder of temperatures, the system's batch is "
            f"{tuple(system.batch_shape)}: give beta of shape (K, *batch), K >= 2, or use "
            "ParallelTempering, which builds it"
        )
    # Equal ones are harmless, and what members that were given broken have.
    if bool((chains.beta.diff(dim=1) < 0).any()):
        shown = chains.beta[0].reshape(chains.beta.shape[1], -1)[:6, 0].tolist()
        raise ValueError(
            f"beta={[round(value, 6) for value in shown]} along the ladder: inverse "
            "temperatures must rise, hottest first; sort them"
        )
    # One configuration has one force in all rungs, unless couplings or fields differ along the
    # first axis. Products of different shapes round differently, hence the margin.
    probe = chains.spins[0, :1].expand(chains.spins.shape[1:])
    force = torch.nan_to_num(system.force(probe))
    size = force.square().sum((-2, -1), keepdim=True).sqrt()
    margin = 100 * torch.finfo(force.dtype).eps * size
    alike = bool(((force - force[:1]).abs() <= margin + margin[:1]).all())
    if alike and system.mask is not None:
        alike = bool((system.mask == system.mask[:1]).all())
    if not alike:
        raise ValueError(
            "ReplicaExchange swaps configurations along the first axis of the batch, where "
            "couplings, fields or masks of this system differ: only beta may; put the ladder first"
        )


@strict_options
class ParallelTempering:
    r"""Monte Carlo of a system at a ladder of temperatures at once, for systems with many valleys.

    The answer is one equilibrium with the ladder as its first axis: K systems of the energy of the
    one that was given, hottest first. Its coldest rung is ``[-1]``: ``eq.magnetization[-1]``. How
    the swaps went tells :func:`swap_statistics`.

    Args:
        betas: inverse temperatures, rising, (K,) or (K, *batch). They are those of the rungs,
            whatever the system's own beta is. None: a ladder from ``beta_min`` to ``beta_max``.
        beta_min: the hottest rung, which must be disordered and mix fast. None: half the inverse
            temperature at which mean field orders (:func:`disordered_beta`), at most half of
            ``beta_max``.
        beta_max: the coldest rung. None: the system's beta.
        rungs: K. None: enough for every second swap if all degrees of freedom were harmonic, in
            the system of the batch that needs most.
        adapt: move the rungs between the ends until all pairs swap equally often
            (:func:`equalized`), in a pilot run of as many sweeps as the warm-up and 248 at least;
            what is measured has a ladder that stays. All chains of a system share its ladder.
            None: if ``betas`` are not given.
        exchange_every: sweeps from one round of swaps to the next.
        moves: what changes spins between swaps. None: :class:`HeatBath`.
        chains: independent ladders.
        sweeps: of each ladder, to be measured. It and all other options are those of
            :class:`MonteCarlo`. With a fixed ladder, ``seed=eq.keys[k : k + 1], chains=1`` repeats
            ladder k.

    Warns (or raises, with ``on_failure="raise"``) if a pair swaps in less than 5 % of rounds, which
    cuts the ladder in two, or if no replica made a round trip: what is cold has then never been
    exchanged for something that forgot where it was.
    """

    def __init__(
        self,
        betas: Sequence[float] | Tensor | None = None,
        *,
        beta_min: float | Tensor | None = None,
        beta_max: float | Tensor | None = None,
        rungs: int | None = None,
        adapt: bool | None = None,
        exchange_every: int = 1,
        moves: Move | Sequence[Move] | None = None,
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
        if betas is not None:
            given = {"beta_min": beta_min, "beta_max": beta_max, "rungs": rungs}
            extra = [name for name, value in given.items() if value is not None]
            if extra:
                raise ValueError(f"betas are given one by one: leave {', '.join(extra)} out")
        if rungs is not None:
            check_count("rungs", rungs, 2)
        check_on_failure(on_failure)
        self.betas = betas
        self.beta_min, self.beta_max, self.rungs = beta_min, beta_max, rungs
        self.adapt = betas is None if adapt is None else adapt
        self.moves = listed(moves)
        self.exchange = ReplicaExchange(exchange_every)
        self.chains, self.seed, self.initial = chains, seed, initial
        self.on_failure = on_failure
        self._options: dict[str, Any] = {
            "chains": chains,
            "sweeps": sweeps,
            "warmup": warmup,
            "every": every,
            "initial": initial,
            "correlations": correlations,
            "conditional": conditional,
            "structure_factor": structure_factor,
            "keep": keep,
            "progress": progress,
            "checkpoint": checkpoint,
            "checkpoint_every": checkpoint_every,
            "on_failure": on_failure,
        }
        # Now, for what it says of the options.
        self.warmup = self._run(seed).warmup

    def _run(self, seed: Seed) -> MonteCarlo:
        return MonteCarlo((*self.moves, self.exchange), seed=seed, **self._options)

    def solve(self, system: SpinSystem, initial: Tensor | None = None) -> SampledEquilibrium:
        """Sample the ladder of every system of the batch.

        Args:
            system: symmetric couplings.
            initial: spins to start from, that broadcast to (chains, K, *batch, N, D), instead of
                the option's.

        Raises:
            ValueError: asymmetric couplings, or a ladder that does not fit or does not rise.
            ConvergenceError: with ``on_failure="raise"``.
        """
        system.require_symmetric("ParallelTempering")
        start = self.initial if initial is None else initial
        betas, seed = self._ladder(system), self.seed
        if self.adapt and len(betas) > 2:
            betas, seed = self._adapted(system, betas, start)
        equilibrium = self._run(seed).solve(_laddered(system, betas), initial)
        self._check(equilibrium)
        return equilibrium

    @torch.no_grad()
    def _ladder(self, system: SpinSystem) -> Tensor:
        """(K, *batch)."""
        batch, own = system.batch_shape, system.beta.detach()

        def spread(value: Sequence[float] | float | Tensor, name: str, lead: int) -> Tensor:
            given = torch.as_tensor(value, dtype=own.dtype, device=own.device).detach()
            if lead and given.ndim == 1:
                given = given.reshape(-1, *[1] * len(batch))
            try:
                return given.expand((*given.shape[:lead], *batch))
            except RuntimeError as error:
                raise ValueError(
                    f"{name} of shape {tuple(given.shape)} does not fit the batch {tuple(batch)}"
                ) from error

        if self.betas is not None:
            betas = spread(self.betas, "betas", 1)
            if betas.ndim == len(batch) or len(betas) < 2:
                raise ValueError(f"betas={self.betas}: a ladder has two rungs or more")
        else:
            coldest = own if self.beta_max is None else spread(self.beta_max, "beta_max", 0)
            if self.beta_min is None:
                # A system that was given broken has no largest eigenvalue; it gets some ladder.
                hottest = disordered_beta(system).nan_to_num(torch.inf).minimum(coldest / 2)
            else:
                hottest = spread(self.beta_min, "beta_min", 0)
            rungs = default_rungs(system, hottest, coldest) if self.rungs is None else self.rungs
            betas = geometric(hottest, coldest, rungs)
        steps = betas.diff(dim=0)
        # Where the system's own beta is not finite, so is its ladder; it is left to MonteCarlo.
        if not bool(((steps > 0) | ~own.isfinite()).all()) or bool((betas <= 0).any()):
            shown = [round(value, 6) for value in betas.reshape(len(betas), -1)[:6, 0].tolist()]
            raise ValueError(
                f"betas={shown}: inverse temperatures of a ladder are positive and rise, hottest "
                "first; sort them, or choose beta_min below beta_max"
            )
        return betas

    @torch.no_grad()
    def _adapted(
        self, system: SpinSystem, betas: Tensor, start: Start | Tensor
    ) -> tuple[Tensor, Tensor]:
        """A ladder of equal acceptances, and the keys of the run to follow."""
        # A broken member has neither couplings nor fields here, and one temperature on all rungs.
        ladder, broken = _laddered(system, betas).isolated()
        given, betas = betas, ladder.beta
        chains = Chains.start(ladder, self.chains, self.seed, start)
        kernels = [move.start(chains) for move in self.moves]
        exchange = _Exchange(chains, self.exchange.every)
        unit = max(_SHORTEST, self.warmup // (2**_ADAPTATIONS - 1))
        for adaptation in range(_ADAPTATIONS):
            length = unit * 2**adaptation
            for sweep in range(length):
                if sweep == int(_SETTLING * length):
                    exchange.reset_report()
                for kernel in (*kernels, exchange):
                    kernel.sweep()
                    if sweep % _ADAPT == _ADAPT - 1:
                        kernel.adapt()
            if exchange.measured:
                betas = equalized(betas, exchange.acceptance[:, :-1].mean(0))
                chains.beta.copy_(betas)
        if broken is not None:
            betas = torch.where(broken, given, betas)
        return betas, chains.streams.bits()

    def _check(self, equilibrium: SampledEquilibrium) -> None:
        """Is the ladder whole?"""
        found, betas = swap_statistics(equilibrium), equilibrium.system.beta
        if equilibrium.broken is None:
            sound = torch.ones(betas.shape[1:], dtype=torch.bool, device=betas.device)
        else:
            sound = ~equilibrium.broken.any(0)
        acceptance = found.acceptance
        rare = (acceptance < _LEAST_ACCEPTANCE) & sound
        if bool(rare.any()):
            worst = torch.where(rare, acceptance, 1.0)
            pair, *where = (int(i) for i in torch.unravel_index(worst.argmin(), worst.shape))
            along = acceptance.movedim(0, -1)[tuple(where)]
            length = swap_length(along).sum() / swap_length(torch.tensor(0.5))
            between = [float(betas[(pair + step, *where)]) for step in (0, 1)]
            report_failure(
                self.on_failure,
                f"ParallelTempering{f', system {tuple(where)}' if where else ''}: rungs {pair} and "
                f"{pair + 1} (beta {between[0]:.5g} and {between[1]:.5g}) swap with "
                f"probability {float(worst.min()):.2g}, which cuts the ladder: "
                f"{1 + math.ceil(float(length))} rungs would swap every second time; raise rungs, "
                "or let adapt=True move them",
            )
            return
        stuck = (found.round_trips.sum((0, 1)) == 0) & sound
        if bool(stuck.any()):
            where = stuck.nonzero()[0].tolist()
            report_failure(
                self.on_failure,
                f"ParallelTempering{f', system {tuple(where)}' if where else ''}: no replica went "
                "from the hottest rung to the coldest and back: run more sweeps, swap more often "
                "(exchange_every), or look for a bottleneck in the flow of swap_statistics()",
            )


class SwapStatistics(NamedTuple):
    """What replicas did on their ladder, see :class:`ReplicaExchange`.

    Attributes:
        betas: (K, *batch), the ladder.
        acceptance: (K - 1, *batch), mean probability that rungs k and k + 1 swap.
        round_trips: (chains, K, *batch), from the hottest rung to the coldest and back, of each
            replica.
        flow: (K, *batch), the fraction of replicas at a rung that came from the hottest, not the
            coldest; the mean over the chains in which there was one.
    """

    betas: Tensor
    acceptance: Tensor
    round_trips: Tensor
    flow: Tensor


def swap_statistics(equilibrium: SampledEquilibrium) -> SwapStatistics:
    """The swaps of a run of :class:`ParallelTempering`, or of :class:`MonteCarlo` with a
    :class:`ReplicaExchange` among its moves.

    Raises:
        ValueError: no move of the run swapped.
    """
    name = f".{ReplicaExchange.__name__}."
    reports = {
        key.partition(name)[2]: value
        for key, value in equilibrium.record.reports.items()
        if name in key
    }
    if not reports:
        raise ValueError("no move of this run swapped temperatures: solve with ParallelTempering")
    return SwapStatistics(
        equilibrium.system.beta.detach(),
        reports["swap_acceptance"][:, :-1].mean(0),
        reports["round_trips"],
        reports["flow"].nanmean(0),
    )


def _laddered(system: SpinSystem, betas: Tensor) -> SpinSystem:
    """The system at the inverse temperatures (K, *batch)."""
    return system.replace(field=system.field, beta=betas)


def listed(moves: Move | Sequence[Move] | None) -> tuple[Move, ...]:
    """One move or several that take turns, as :class:`MonteCarlo` reads them; None: heat bath."""
    return MonteCarlo(moves).moves or (HeatBath(),)


# -- ladders ---------------------------------------------------------------------------------------


def disordered_beta(system: SpinSystem) -> Tensor:
    r"""An inverse temperature at which spins hardly feel their couplings, (...).

    .. math:: \beta = \frac{D}{2 R^2 \lambda_{\max}(J)},

    half of where mean field first has more than one state, in any field; mean field orders before
    the true system does. Infinite without couplings that could order. The cost is that of the
    largest eigenvalue.
    """
    largest = system.couplings.largest_eigenvalue().detach().expand(system.batch_shape)
    return 0.5 / (system.site.scale**2 * largest.clamp_min(0))


def default_rungs(system: SpinSystem, hottest: Tensor, coldest: Tensor) -> int:
    r"""So many rungs that neighbours swap about every second time.

    The length of a ladder is :math:`\int \sqrt C\, d\log\beta` with the heat capacity C, taken to
    be that of harmonic modes, N (D - 1) / 2 (N / 2 for Ising spins); half of the swaps are accepted
    at length 0.95 a pair.
    """
    modes = system.num_present * max(system.dim - 1, 1) / 2
    length = modes.sqrt() * (coldest / hottest).log()
    # One number for the batch: a system that was given broken has no say in it.
    longest = float(torch.where(length.isfinite(), length, 0.0).max())
    return max(2, 1 + math.ceil(longest / float(swap_length(torch.tensor(0.5)))))


def geometric(hottest: Tensor, coldest: Tensor, rungs: int) -> Tensor:
    """Inverse temperatures at a constant ratio, (rungs, ...): of equal length if the heat capacity
    is the same at all temperatures."""
    parts = torch.linspace(0, 1, rungs, dtype=coldest.dtype, device=coldest.device)
    parts = parts.reshape(-1, *[1] * coldest.ndim)
    ladder = hottest * (coldest / hottest) ** parts
    ladder[-1] = coldest  # to the last digit: it is what was asked for
    return ladder


def swap_length(acceptance: Tensor) -> Tensor:
    """d of two rungs whose swaps are accepted with probability erfc(d / 2)."""
    least = torch.finfo(torch.float64).tiny
    quantile = torch.special.ndtri(acceptance.double().clamp(least, 1) / 2)
    length: Tensor = -math.sqrt(2) * quantile
    return length


def equalized(betas: Tensor, acceptance: Tensor) -> Tensor:
    r"""The ladder on which all pairs accept alike, from what they did on another one.

    The lengths :math:`d_k = 2 \operatorname{erfc}^{-1}` of the acceptances add up to a function of
    :math:`\log\beta`, linear between the rungs; the new rungs divide it in equal parts. Between two
    rungs that is right for Gaussian energies of constant heat capacity; where it is not, repeat.

    Args:
        betas: (K, ...), rising.
        acceptance: (K - 1, ...), means of min(1, exp(Delta)) (not counts, which know nothing of
            pairs that never swapped).

    Returns:
        (K, ...) with the ends of ``betas``.
    """
    rungs = len(betas)
    shape = betas.shape
    x = betas.double().log().reshape(rungs, -1).T.contiguous()
    d = swap_length(acceptance).reshape(rungs - 1, -1).T
    # A pair that always swaps has no length; a thousandth of the others' keeps the order of rungs.
    floor = 1e-3 * d.mean(-1, keepdim=True) + torch.finfo(torch.float64).tiny
    length = torch.cat([torch.zeros_like(x[:, :1]), d.maximum(floor).cumsum(-1)], -1)
    parts = torch.linspace(0, 1, rungs, dtype=x.dtype, device=x.device)
    wanted = (length[:, -1:] * parts).contiguous()
    right = torch.searchsorted(length, wanted).clamp(1, rungs - 1)
    left = right - 1
    fraction = (wanted - length.gather(-1, left)) / (
        length.gather(-1, right) - length.gather(-1, left)
    )
    ladder = torch.lerp(x.gather(-1, left), x.gather(-1, right), fraction).exp()
    ladder = ladder.T.reshape(shape).to(betas.dtype)
    ladder[0], ladder[-1] = betas[0], betas[-1]
    return ladder
