r"""Steps of an energy together with a penalty, or on spheres: what they descend is the whole.

:class:`~spinformer.descent.algorithms.ProximalAIM` takes the proximal map as a last turn, blind to
the rest. Here it closes the quadratic upper bound of the energy,

.. math:: Z = \operatorname*{argmin}_Z\; \langle \nabla E(Y), Z \rangle
              + \sum_i \frac{p_i}{2 s} |z_i - y_i|^2 + \eta(Z),

whose metric weighs whole tokens, so that it is elementwise. Energy and penalty fall together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.descent.activation import Activation
from spinformer.descent.algorithms import (
    Algorithm,
    check_line_search,
    check_size,
    shortened,
)
from spinformer.descent.energy import Energy, clear
from spinformer.descent.proximal import Proximal, as_prox, penalty_of

__all__ = ["ProximalBacktracking", "ProximalGradient", "SphereStep"]


@dataclass(frozen=True)
class ProximalGradient(Algorithm):
    r"""``Z = prox_{s / p}(Y - s / p grad E(Y))``, s the ``size``.

    With ``own`` p are the energy's curvatures at Y, otherwise 1. It cannot raise :math:`E + \eta`
    for ``size <= 2``, respectively ``size <= 2 / L``, where :math:`\eta` is convex: the objective
    above is strongly convex with its minimum at Z. For a weakly convex penalty, which curves down
    to :math:`-m`, ``own`` steps add 3 m to p, which leaves that true; others need
    ``size <= 2 / (L + m)``.

    Source: the proximal gradient method (Beck & Teboulle 2009).

    Attributes:
        prox: a :class:`Proximal`, an :class:`Activation`, or a name of :data:`PROXES`, as
            ``"relu"``.
        size: positive; at most 3 for ``own`` steps with a weakly convex penalty.
        own: take the energy's curvatures, token by token.

    Raises:
        ValueError: a size out of its range, or an unknown name.
    """

    prox: str | Activation | Proximal
    size: float = 1.0
    own: bool = True

    def __post_init__(self) -> None:
        _check_size(self.size, self.penalty if self.own else None)

    @property
    def penalty(self) -> Proximal:
        return as_prox(self.prox)

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state, slope = clear(Y, mask), energy.gradient(Y, mask)
        metric = _metric(energy, state, self.penalty, mask) if self.own else None
        return _move(state, slope, metric, self.penalty, self.size, mask)

    def guaranteed(self, energy: Energy, count: int) -> Tensor:
        if self.own:
            return torch.tensor(self.size <= 2)
        _, upper = energy.hessian_bounds(count)
        return torch.as_tensor(self.size * (upper + max(-self.penalty.convexity, 0.0)) <= 2)


@dataclass(frozen=True)
class ProximalBacktracking(Algorithm):
    r"""The step of :class:`ProximalGradient`, shortened until energy and penalty fall enough.

    .. math:: (E + \eta)(Z) \le (E + \eta)(Y) - \frac{c}{2 s} \sum_i p_i |z_i - y_i|^2

    Each system of a batch shortens its own s. One that no s lowers, as a fixed point, stays where
    it is. From a state outside the domain, where the sum is infinite, the first step leads inside.
    Derivatives pass through the step, not through the choice of s.

    Cost: one gradient and at least two energies of the whole batch.

    Attributes:
        prox: a :class:`Proximal`, an :class:`Activation`, or a name of :data:`PROXES`, as
            ``"relu"``.
        size: the first s; at most 3 for a weakly convex penalty.
        shrink: between 0 and 1, what s is multiplied by.
        sufficient: c, between 0 and 1.
        trials: how many s are tried at most.

    Raises:
        ValueError: a number out of its range, or an unknown name.
    """

    prox: str | Activation | Proximal
    size: float = 1.0
    shrink: float = 0.5
    sufficient: float = 1e-4
    trials: int = 60

    def __post_init__(self) -> None:
        _check_size(self.size, self.penalty)
        check_line_search(self.shrink, self.sufficient, self.trials)

    @property
    def penalty(self) -> Proximal:
        return as_prox(self.prox)

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state, slope = clear(Y, mask), energy.gradient(Y, mask)
        metric = _metric(energy, state, self.penalty, mask)
        with torch.no_grad():
            size = self._search(energy, state, slope, metric, mask)[..., None, None]
        stays = size == 0
        moved = _move(state, slope, metric, self.penalty, size.masked_fill(stays, 1.0), mask)
        return torch.where(stays, state, moved)

    def guaranteed(self, energy: Energy, count: int) -> Tensor:
        return torch.tensor(True)

    def _search(
        self, energy: Energy, state: Tensor, slope: Tensor, metric: Tensor, mask: Tensor | None
    ) -> Tensor:
        """s of each system, ``(...)``; 0 where it stays."""
        before = energy.energy(state, mask) + penalty_of(self.penalty, state, mask)

        def fell(size: Tensor) -> Tensor:
            moved = _move(state, slope, metric, self.penalty, size[..., None, None], mask)
            after = energy.energy(moved, mask) + penalty_of(self.penalty, moved, mask)
            length = (metric * (moved - state).square()).sum((-2, -1))
            # Strictly: where s is so short that nothing changes, nothing has fallen.
            return (after <= before - self.sufficient / (2 * size) * length) & (after < before)

        size, searching = shortened(
            torch.full_like(before, self.size), ~before.isnan(), fell, self.shrink, self.trials
        )
        return size.masked_fill(searching | before.isnan(), 0.0)


@dataclass(frozen=True)
class SphereStep(Algorithm):
    """The energy's :meth:`~spinformer.descent.energy.Energy.sphere_step`: norms don't change.

    Attributes:
        size: positive.

    Raises:
        ValueError: a size that is not positive.
    """

    size: float = 1.0

    def __post_init__(self) -> None:
        check_size("size", self.size)

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return energy.sphere_step(Y, None, mask, size=self.size)

    def guaranteed(self, energy: Energy, count: int) -> Tensor:
        return torch.as_tensor(self.size <= energy.step_bound() / 2)


def _check_size(size: float, weighed: Proximal | None) -> None:
    """``weighed`` is a penalty whose proximal map is taken in the metric of tokens."""
    check_size("size", size)
    if weighed is not None and weighed.convexity < 0 and size > 3:
        raise ValueError(
            f"size={size} must be at most 3 where the penalty is weakly convex: beyond, the step "
            "may have several minima"
        )


def _metric(energy: Energy, state: Tensor, prox: Proximal, mask: Tensor | None) -> Tensor:
    """p of every token, ``(..., N, 1)``, positive."""
    curvature = energy.curvature(state, mask)
    # Any number is an upper bound where nothing curves; NaN stays in the state.
    curvature = torch.where(curvature > 0, curvature, 1.0)
    return (curvature + 3 * max(-prox.convexity, 0.0)).unsqueeze(-1)


def _move(
    state: Tensor,
    slope: Tensor,
    metric: Tensor | None,
    prox: Proximal,
    size: float | Tensor,
    mask: Tensor | None,
) -> Tensor:
    length = size if metric is None else size / metric
    return clear(prox(state - length * slope, length), mask)
