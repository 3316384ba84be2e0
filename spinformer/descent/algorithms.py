r"""Algorithms that lower an energy, or a sum of two, step by step.

An algorithm is a small value without state: ``algorithm.step(energy, Y, mask)`` is the next state.
:func:`spinformer.descent.descend` runs one and keeps the books. The exact gradient of a sum is
:class:`Gradient` on that sum; its terms in turn are :class:`AIM`.

==================  ====================================================  ==========================
algorithm           one step                                              cannot raise the energy
==================  ====================================================  ==========================
Gradient            ``Y - size grad E``                                   ``size <= 2 / L``
MajorizeMinimize    the energy's own step                                 ``size <= step_bound()``
AIM                 a step of each term in turn                           inside Theorem 4.1
ProximalAIM         AIM, then a proximal map                              inside Theorem 5.1
Backtracking        a step shortened until the energy falls enough        always
==================  ====================================================  ==========================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.descent.activation import Activation
from spinformer.descent.energy import Energy, SumEnergy, check_tokens, clear
from spinformer.descent.proximal import Proximal, as_prox
from spinformer.errors import OnFailure, check_on_failure, report_failure

__all__ = [
    "AIM",
    "Algorithm",
    "Backtracking",
    "Gradient",
    "MajorizeMinimize",
    "ProximalAIM",
    "aligned",
    "check_line_search",
    "check_size",
    "rounding",
    "shortened",
    "terms_of",
]

Size = float | Tensor


class Algorithm(ABC):
    """One kind of step."""

    @abstractmethod
    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The next state, ``(..., N, d)``; zero where ``mask`` says there is no token."""

    def guaranteed(self, energy: Energy, count: int) -> Tensor:
        """Whether no step from any state of ``count`` tokens can raise the energy, ``(...)``.

        False does not say that one does: AIM, for one, is guaranteed state by state.
        """
        return torch.tensor(False)

    @property
    def penalty(self) -> Proximal | None:
        """What the steps descend besides the energy, by its proximal map; None for nothing."""
        return None


@dataclass(frozen=True)
class Gradient(Algorithm):
    """``Y - size grad E(Y)``. It cannot raise an energy whose Hessian is at most ``2 / size``.

    Attributes:
        size: positive; a number, or one per system ``(...)``.
    """

    size: Size

    def __post_init__(self) -> None:
        check_size("size", self.size)

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return check_tokens(Y, mask) - aligned(self.size) * energy.gradient(Y, mask)

    def guaranteed(self, energy: Energy, count: int) -> Tensor:
        _, upper = energy.hessian_bounds(count)
        return torch.as_tensor(self.size * upper <= 2)


@dataclass(frozen=True)
class MajorizeMinimize(Algorithm):
    """The energy's own step: to the minimum of its quadratic upper bound at ``size`` 1.

    Attributes:
        size: positive; over-relaxed above 1. A number, or one per system ``(...)``.
    """

    size: Size = 1.0

    def __post_init__(self) -> None:
        check_size("size", self.size)

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return energy.step(Y, aligned(self.size), mask)

    def guaranteed(self, energy: Energy, count: int) -> Tensor:
        return torch.as_tensor(self.size <= energy.step_bound())


@dataclass(frozen=True)
class AIM(Algorithm):
    """Alternating inexact minimization: one step of each term of a sum in turn.

    For two terms ``u = Y - a1 grad f(Y)``, then ``u - a2 grad g(u)``: a gradient step of the sum
    with noise, which may raise it. :func:`spinformer.descent.aim_bound` says where it cannot. A
    single energy is a sum of one term.

    Source: Yang, Huang & Wipf (2022), Algorithm 1.

    Attributes:
        sizes: one positive size for all terms, or one a term; each a number, or one per system.
        own: every term takes its own preconditioned step (attention, then feed-forward: a
            Transformer layer) in place of a gradient step. Each lowers its own term; Theorem 4.1 is
            silent about their sum.
    """

    sizes: Size | Sequence[Size]
    own: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self.sizes)

    def sizes_of(self, energy: Energy) -> tuple[Size, ...]:
        """One size for each term of ``energy``.

        Raises:
            ValueError: another number of sizes than of terms.
        """
        count = len(terms_of(energy))
        if not isinstance(self.sizes, Sequence):
            return (self.sizes,) * count
        if len(self.sizes) != count:
            raise ValueError(
                f"sizes has {len(self.sizes)} entries for {count} terms: pass one for each, or one "
                "number for all"
            )
        return tuple(self.sizes)

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state = check_tokens(Y, mask)
        for term, size in zip(terms_of(energy), self.sizes_of(energy), strict=True):
            if self.own:
                state = term.step(state, aligned(size), mask)
            else:
                state = state - aligned(size) * term.gradient(state, mask)
        return state


@dataclass(frozen=True)
class ProximalAIM(Algorithm):
    """AIM, then the proximal map of a penalty: for ``f + g + penalty``.

    The map is that of the last size times the penalty. For an indicator (ReLU) the size plays no
    part. :func:`spinformer.descent.proximal_bound` says where the sum cannot rise.

    Source: Yang, Huang & Wipf (2022), Algorithm 2.

    Attributes:
        sizes, own: as :class:`AIM`.
        prox: a :class:`Proximal`, an :class:`Activation`, or a name of :data:`PROXES`, as
            ``"relu"``.
    """

    sizes: Size | Sequence[Size]
    prox: str | Activation | Proximal
    own: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self.sizes)
        as_prox(self.prox)

    @property
    def penalty(self) -> Proximal:
        return as_prox(self.prox)

    @property
    def alternating(self) -> AIM:
        """The step without the proximal map."""
        return AIM(self.sizes, self.own)

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        moved = self.alternating.step(energy, Y, mask)
        return self.project(moved, self.alternating.sizes_of(energy)[-1], mask)

    def project(self, Y: Tensor, size: Size, mask: Tensor | None = None) -> Tensor:
        """The proximal map of ``size`` times the penalty; zero where there is no token."""
        return clear(self.penalty(Y, aligned(size)), mask)


@dataclass(frozen=True)
class Backtracking(Algorithm):
    r"""A step along a descent direction, shortened until the energy has fallen enough.

    .. math::
        E(Y + s\, V) \le E(Y) + c\, s\, \langle \nabla E(Y), V \rangle

    with the exact energy of each system, s from ``size`` on multiplied by ``shrink``: the systems
    of a batch shrink on their own. A system without any step that its rounding could tell from none
    stays where it is. Derivatives pass through the step, not through the choice of s.

    Cost: one gradient and at least two energies of the whole batch.

    Source: Armijo (1966).

    Attributes:
        size: the first s tried.
        own: V is the increment of the energy's own step (preconditioned); False: ``-grad E``.
        shrink: between 0 and 1.
        sufficient: c, between 0 and 1.
        trials: how many s are tried at most.
        on_failure: what a system does to the caller that no s lowers although its slope is steeper
            than rounding (an energy whose gradient is wrong, a direction that ascends): "raise",
            "warn", "ignore" or a function. It stays where it is. A system that is not finite stays
            too, and is no failure: what it is can be seen.

    Raises:
        ConvergenceError: with ``on_failure="raise"``.
    """

    size: float = 1.0
    own: bool = True
    shrink: float = 0.5
    sufficient: float = 1e-4
    trials: int = 60
    on_failure: OnFailure = "raise"

    def __post_init__(self) -> None:
        check_size("size", self.size)
        check_line_search(self.shrink, self.sufficient, self.trials)
        check_on_failure(self.on_failure)

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state = check_tokens(Y, mask)
        gradient = energy.gradient(state, mask)
        direction = energy.step(state, 1.0, mask) - state if self.own else -gradient
        with torch.no_grad():
            size = self._search(energy, state, direction, gradient, mask)[..., None, None]
        return torch.where(size > 0, state + size * direction, state)

    def guaranteed(self, energy: Energy, count: int) -> Tensor:
        return torch.tensor(True)

    def _search(
        self,
        energy: Energy,
        state: Tensor,
        direction: Tensor,
        gradient: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """s of each system, ``(...)``; 0 where it stays."""
        before = energy.energy(state, mask)
        slope = (gradient * direction).sum((-2, -1))
        finite = torch.isfinite(before) & torch.isfinite(slope)

        def fell(size: Tensor) -> Tensor:
            after = energy.energy(state + size[..., None, None] * direction, mask)
            # Strictly: where s is so short that nothing changes, nothing has fallen.
            return (after <= before + self.sufficient * size * slope) & (after < before)

        size, searching = shortened(
            torch.full_like(before, self.size), finite & (slope < 0), fell, self.shrink, self.trials
        )
        stays = searching | ~finite | (slope >= 0)
        steep = self.size * slope.abs() > rounding(before.unsqueeze(0), state)
        failed = finite & steep & (searching | (slope > 0))
        if failed.any():
            count = int(failed.sum())
            report_failure(
                self.on_failure,
                f"backtracking found no step that lowers the energy of {count} of "
                f"{failed.numel()} systems, whose slopes along the step are "
                f"{slope[failed].min().item():.3g} to {slope[failed].max().item():.3g}: check that "
                "the energy's gradient is its derivative, or allow more trials",
            )
        return torch.where(stays, torch.zeros_like(size), size)


def shortened(
    size: Tensor,
    searching: Tensor,
    fell: Callable[[Tensor], Tensor],
    shrink: float,
    trials: int,
) -> tuple[Tensor, Tensor]:
    """Sizes of systems ``(...)``, multiplied by ``shrink`` until ``fell(size)``, each on its own.

    Args:
        size: the first.
        searching: which systems look for one.
        fell: whether the energy of each has fallen enough at these sizes.
        shrink: between 0 and 1.
        trials: how many sizes are tried at most.

    Returns:
        the sizes, and which systems have found none.
    """
    for _ in range(trials):
        if not searching.any():
            break
        searching = searching & ~fell(size)
        size = torch.where(searching, size * shrink, size)
    return size, searching


def terms_of(energy: Energy) -> tuple[Energy, ...]:
    """The terms of a sum; an energy that is no sum is its only term."""
    return energy.terms if isinstance(energy, SumEnergy) else (energy,)


def rounding(terms: Tensor, Y: Tensor, factor: float = 64.0) -> Tensor:
    """``factor eps (1 + sum_k |E_k| + |Y|^2)``, ``(...)``: what rounding may change in an energy.

    Terms ``(K, ...)`` are sums of many numbers that cancel in differences, and distances lose
    ``eps |Y|^2``.
    """
    eps = torch.finfo(terms.dtype).eps
    return factor * eps * (1 + terms.abs().sum(0) + Y.square().sum((-2, -1)))


def aligned(size: Size) -> Size:
    """Sizes of systems ``(...)``, ready to multiply tokens."""
    return size[..., None, None] if isinstance(size, Tensor) and size.dim() else size


def _check_sizes(sizes: Size | Sequence[Size]) -> None:
    for size in sizes if isinstance(sizes, Sequence) else (sizes,):
        check_size("sizes", size)


def check_line_search(shrink: float, sufficient: float, trials: int) -> None:
    """Raise ``ValueError`` unless the numbers of a line search are in their ranges."""
    for name, value in (("shrink", shrink), ("sufficient", sufficient)):
        if not 0 < value < 1:
            raise ValueError(f"{name}={value} must lie between 0 and 1")
    if trials < 1:
        raise ValueError(f"trials={trials} must be at least 1")


def check_size(name: str, size: Size) -> None:
    """Raise ``ValueError`` unless the size, or that of every system, is positive."""
    positive = bool((size > 0).all()) if isinstance(size, Tensor) else size > 0
    if not positive:
        raise ValueError(f"{name}={size} must be positive")
