r"""Many solutions: from several starts, cooled slowly, to the one of lowest free energy.

In an ordered or glassy phase the equations of an approximation have many solutions. The one that
an iteration finds is decided by where it starts, and m = 0 stays a solution, an unstable one, of
every system without fields. Thermodynamics asks for the lowest free energy:
:class:`LowestFreeEnergy` wraps an approximation, solves it from many starts, and keeps that one,
with the evidence about all of them (:class:`Candidates`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spinformer.equilibrium.iteration import check_initial
from spinformer.errors import strict_options
from spinformer.solve.fixed_point import FixedPoint
from spinformer.solve.solution import Solution
from spinformer.spins.couplings import Couplings
from spinformer.spins.system import SpinSystem
from spinformer.thermo.equilibrium import Equilibrium, outside_inference_mode

__all__ = ["Candidates", "LowestFreeEnergy", "StartedApproximation"]

# How much of its start a state gets back when it is cooled by a step: a state that lost its
# magnetization above the ordering temperature would otherwise never find it again below.
_KICK = 0.1
# Products with J for a start along its leading eigenvector: the first few measure the spectrum.
_GAUGING_PRODUCTS, _POWER_PRODUCTS = 20, 100


class StartedApproximation(Protocol):
    """An approximation that iterates from given magnetizations.

    ``MeanField``, ``TAP``, ``AdaptiveTAP`` and ``Bethe`` are.
    """

    fixed_point: FixedPoint

    def solve(self, system: SpinSystem, initial: Tensor | None = None) -> Equilibrium:
        """Solve from the magnetizations ``initial`` (..., N, D)."""
        ...


@dataclass(frozen=True, repr=False)
class Candidates:
    """What a search found: the winner, and what each start came to.

    Attributes:
        equilibrium: the winner of every system, differentiable.
        magnetization: (..., starts, N, D).
        free_energy: (..., starts).
        stability: (..., starts), as the approximation's ``stability()``: negative for a saddle or
            maximum of the free energy.
        is_stable: (..., starts) bool, stable or marginal.
        residual, iterations, converged: (..., starts); iterations of all temperatures together.
        winner: (...) int64, which start the equilibrium comes from.
        num_distinct: (...) int64, how many different states converged. States related by a
            symmetry (a flip, a rotation) are different.
    """

    equilibrium: Equilibrium
    magnetization: Tensor
    free_energy: Tensor
    stability: Tensor
    is_stable: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor
    winner: Tensor
    num_distinct: Tensor

    def __repr__(self) -> str:
        distinct = self.num_distinct
        spread = f"{int(distinct.min())} to {int(distinct.max())}" if distinct.numel() else "no"
        return (
            f"Candidates({self.free_energy.shape[-1]} starts, {int(self.converged.sum())} of "
            f"{self.converged.numel()} converged, {int(self.is_stable.sum())} stable, {spread} "
            f"distinct states a system, winner: {self.equilibrium!r})"
        )


@strict_options
class LowestFreeEnergy:
    r"""The solution of lowest free energy that an approximation has from several starts.

    The starts are, in this order and as many as asked for: free spins in the fields (what the
    approximation alone starts from); the leading eigenvector of J, as it orders first on cooling,
    along and against the field; and independent random directions on every site. The random ones
    are the same for every system of a batch, so that a system's answer does not depend on its batch
    mates.

    A start wins if it converged, and then by its free energy. Of several within rounding
    (:math:`\sqrt\epsilon` relative to :math:`|F| + N/\beta`) a stable one is preferred. Where none
    converged, the smallest residual wins, and the failure is as loud as the approximation's
    ``on_failure`` says. An approximation's free energy is no upper bound beyond mean field: at low
    temperature TAP can have unphysical solutions whose free energy is too low; look at the
    stability.

    Args:
        approximation: ``MeanField(...)``, ``TAP(...)``, ``AdaptiveTAP(...)`` or ``Bethe(...)``
            with its own options; all starts share its damping. What has one solution
            (``SteepestDescent``, ``Exact``) needs no search and is refused.
        starts: how many, or the starting magnetizations themselves, (starts, ..., N, D).
        anneal: fractions of beta, rising in (0, 1), at which every start is solved first, each
            from the state before, mixed with a tenth of its start. Cooling leads to states that
            are lower than what a quench finds. Empty: straight at beta.
        generator: for the random starts; None is torch's global one.
        spread: length in (0, 1) of the starting magnetizations in units of the spin's: of every
            spin in random starts, of the longest along the eigenvector.

    Cost: starts times that of the approximation, solved as one batch, times 1 + len(anneal); the
    stability of every candidate, O((N D)^3); and one more solve, from the winner, which takes an
    iteration and attaches the derivatives.
    """

    def __init__(
        self,
        approximation: StartedApproximation,
        starts: int | Tensor = 8,
        anneal: Sequence[float] = (),
        generator: torch.Generator | None = None,
        spread: float = 0.5,
    ) -> None:
        if not isinstance(getattr(approximation, "fixed_point", None), FixedPoint):
            raise TypeError(
                f"approximation={approximation!r} does not start from magnetizations: pass "
                "MeanField(), TAP(), AdaptiveTAP() or Bethe(). SteepestDescent and Exact have one "
                "solution, and no use for a search"
            )
        if isinstance(starts, Tensor):
            if starts.ndim < 3 or not len(starts) or not starts.is_floating_point():
                raise ValueError(
                    f"starts is {starts.dtype} of shape {tuple(starts.shape)}: pass a number of "
                    "starts, or magnetizations (starts, ..., N, D)"
                )
        elif not isinstance(starts, int) or isinstance(starts, bool) or starts < 1:
            raise ValueError(f"starts={starts!r} must be an integer >= 1 or a tensor")
        anneal = tuple(float(fraction) for fraction in anneal)
        steps = itertools.pairwise((0.0, *anneal, 1.0))
        if not all(warmer < colder for warmer, colder in steps):
            raise ValueError(
                f"anneal={anneal}: give fractions of beta that rise in (0, 1), as (0.25, 0.5, "
                "0.75); beta itself comes last of its own"
            )
        if not 0 < spread < 1:
            raise ValueError(f"spread={spread!r} must lie in (0, 1)")
        self.approximation = approximation
        self.starts, self.anneal = starts, anneal
        self.generator, self.spread = generator, spread

    def solve(self, system: SpinSystem, initial: Tensor | None = None) -> Equilibrium:
        """The equilibrium of lowest free energy of every system.

        Args:
            system: symmetric couplings, and what else the approximation asks for.
            initial: one more start, magnetizations (..., N, D), before all others.

        Raises:
            ConvergenceError: with the approximation's ``on_failure="raise"``, where no start of a
                system converged.
            ValueError: asymmetric couplings, which have no free energy.
        """
        found: Candidates = self.explore(system, initial)
        return found.equilibrium

    @outside_inference_mode
    def explore(self, system: SpinSystem, initial: Tensor | None = None) -> Candidates:
        """As :meth:`solve`, with what every start came to."""
        system.require_symmetric("The search for the lowest free energy")
        with torch.no_grad():
            clean, broken = system.isolated()
            start = self._starts(clean, initial)
            last, iterations = self._cool(clean, start)
            state = last.magnetization.movedim(0, -3)
            free_energy, stability = (
                x.detach().movedim(0, -1) for x in (last.free_energy, last.stability())
            )
            is_stable = last.is_stable.movedim(0, -1)
            residual = last.solution.residual.movedim(0, -1)
            converged = last.converged.movedim(0, -1)
            converged = converged & torch.isfinite(free_energy)
            winner = _winner(clean, free_energy, is_stable, residual, converged)
            best = torch.take_along_dim(state, winner[..., None, None, None], -3)[..., 0, :, :]
            best = torch.where(torch.isfinite(best), best, 0.0)
            num_distinct = _count_distinct(state, converged, clean.site.scale)
        equilibrium = self.approximation.solve(system, best)
        self._check(equilibrium, free_energy, converged, winner)
        if broken is not None:
            state = torch.where(broken[..., None, None, None], torch.nan, state)
            free_energy, stability, residual = (
                torch.where(broken[..., None], torch.nan, x)
                for x in (free_energy, stability, residual)
            )
            is_stable, converged = is_stable & ~broken[..., None], converged & ~broken[..., None]
            num_distinct = torch.where(broken, 0, num_distinct)
        return Candidates(
            equilibrium,
            state,
            free_energy,
            stability,
            is_stable,
            residual,
            iterations.movedim(0, -1),
            converged,
            winner,
            num_distinct,
        )

    def _cool(self, system: SpinSystem, start: Tensor) -> tuple[Equilibrium, Tensor]:
        """All starts (starts, ..., N, D) taken to beta, and their iterations."""
        quiet = copy.copy(self.approximation)
        quiet.fixed_point = dataclasses.replace(quiet.fixed_point, on_failure="ignore")
        # One more leading axis: independent systems, as those of the batch are.
        every = system.replace(field=system.field.expand(start.shape))
        state = start
        iterations = torch.zeros_like(every.beta, dtype=torch.int64)
        for fraction in self.anneal:
            warm = quiet.solve(every.replace(beta=fraction * every.beta), state)
            iterations = iterations + warm.solution.iterations
            m = warm.magnetization
            state = torch.lerp(torch.where(torch.isfinite(m), m, start), start, _KICK)
        last = quiet.solve(every, state)
        return last, iterations + last.solution.iterations

    def _check(
        self, equilibrium: Equilibrium, free_energy: Tensor, converged: Tensor, winner: Tensor
    ) -> None:
        """Loud where the solve from the winner went elsewhere."""
        found = equilibrium.free_energy.detach()
        lowest, reached = (
            torch.take_along_dim(x, winner[..., None], -1)[..., 0] for x in (free_energy, converged)
        )
        excess = torch.where(reached & equilibrium.converged, found - lowest, 0.0)
        solution = equilibrium.solution
        margin = _rounding(equilibrium.system, lowest)
        Solution(found, excess, solution.iterations, ~(excess > margin)).check(
            self.approximation.fixed_point.on_failure,
            "the solve from the state of lowest free energy, which ended in a higher one",
            "The residual is the difference. Lower the damping or the tolerance.",
        )

    # -- where to start -------------------------------------------------------------------------

    def _starts(self, system: SpinSystem, initial: Tensor | None) -> Tensor:
        field = system.field
        if isinstance(self.starts, Tensor):
            shape = (len(self.starts), *field.shape)
            try:
                given = self.starts.to(field).reshape(
                    len(self.starts),
                    *[1] * (len(shape) - self.starts.ndim),
                    *self.starts.shape[1:],
                )
                states = [given.expand(shape)]
            except RuntimeError as error:
                raise ValueError(
                    f"starts has shape {tuple(self.starts.shape)}: it must broadcast to (starts, "
                    f"..., N, D) = {shape}"
                ) from error
        else:
            free = system.site.mean(system.beta[..., None, None] * field)
            length = self.spread * system.site.scale * math.sqrt(system.dim)
            along = length * _ordered(system)
            named = torch.stack([free, along, -along])[: self.starts]
            states = [named]
            count = self.starts - len(named)
            if count:
                states.append(length * self._directions(system, count))
        if initial is not None:
            states.insert(0, check_initial(initial, system)[None])
        return torch.cat(states)

    def _directions(self, system: SpinSystem, count: int) -> Tensor:
        """Random directions (count, ..., N, D), the same for every system."""
        field = system.field
        device = "cpu" if self.generator is None else self.generator.device
        shape = (count, *field.shape[-2:])
        normal = torch.randn(shape, generator=self.generator, dtype=torch.float64, device=device)
        unit: Tensor = (normal / torch.linalg.vector_norm(normal, dim=-1, keepdim=True)).to(field)
        axes = [1] * (field.ndim - 2)
        return unit.reshape(count, *axes, *shape[1:]).expand(count, *field.shape)


def _ordered(system: SpinSystem) -> Tensor:
    """The leading eigenvector of J as spins (..., N, D), the longest of length one.

    Scalar couplings leave its axis open: that of the field, or the first.
    """
    pattern = _leading(system.couplings)
    if system.couplings.dim is None:
        axis = (pattern * system.field).sum(-2, keepdim=True)
        size = torch.linalg.vector_norm(axis, dim=-1, keepdim=True)
        first = torch.zeros_like(axis)
        first[..., 0] = 1
        pattern = pattern * torch.where(size > 0, axis / torch.where(size > 0, size, 1.0), first)
    longest = torch.linalg.vector_norm(pattern, dim=-1, keepdim=True)
    if longest.numel():
        longest = longest.amax(-2, keepdim=True)
    return (pattern / torch.where(longest > 0, longest, 1.0)).expand(system.field.shape)


def _leading(couplings: Couplings) -> Tensor:
    """The leading eigenvector of J, (..., N, 1) or (..., N, D), as well as a start asks for.

    By powers of J, which every kind of couplings has; those of J + c with c the largest modulus
    grow with the largest eigenvalue, not with the most negative one.
    """
    # A fixed start, that no batch mate changes.
    generator = torch.Generator().manual_seed(0)
    shape = (couplings.num_spins, couplings.dim or 1)
    gaussian = torch.randn(shape, generator=generator, dtype=torch.float64)
    v = gaussian.to(dtype=couplings.dtype, device=couplings.device)
    v = v.expand(*couplings.batch_shape, *shape)
    shift = v.new_zeros(())
    growth = shift
    for step in range(_GAUGING_PRODUCTS + _POWER_PRODUCTS):
        if step == _GAUGING_PRODUCTS:
            shift = growth
        v = v / _norm(v)
        w = couplings.apply(v) + shift * v
        growth = torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True)
        v = torch.where(growth > 0, w, v)
    leading: Tensor = v / _norm(v)
    return leading


def _norm(v: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    safe: Tensor = torch.where(size > 0, size, 1.0)
    return safe


# -- who wins -------------------------------------------------------------------------------------


def _rounding(system: SpinSystem, free_energy: Tensor) -> Tensor:
    """Differences of free energies that mean nothing, (...)."""
    scale = free_energy.abs() + system.num_present / system.beta.detach()
    return scale * math.sqrt(torch.finfo(free_energy.dtype).eps)


def _winner(
    system: SpinSystem, free_energy: Tensor, is_stable: Tensor, residual: Tensor, converged: Tensor
) -> Tensor:
    """Index of the best start of every system, the first of equals."""
    lowest = torch.where(converged, free_energy, torch.inf).amin(-1)
    tied = converged & (free_energy <= (lowest + _rounding(system, lowest))[..., None])
    best = (~tied * 2 + ~is_stable).argmin(-1)
    closest = torch.where(torch.isfinite(residual), residual, torch.inf).argmin(-1)
    return torch.where(converged.any(-1), best, closest)


def _count_distinct(state: Tensor, converged: Tensor, scale: float) -> Tensor:
    """How many converged states of each system differ by more than a badly conditioned residual."""
    apart = torch.finfo(state.dtype).eps ** 0.25 * scale
    new = torch.zeros_like(converged)
    for k in range(converged.shape[-1]):
        change = (state[..., :k, :, :] - state[..., k : k + 1, :, :]).abs()
        same = (change <= apart).all(-1).all(-1) & new[..., :k]
        new[..., k] = converged[..., k] & ~same.any(-1)
    return new.sum(-1)
