r"""The minimum in the cone for couplings of low rank, in time and memory linear in N.

The function :math:`\Phi` of :mod:`spinformer.solve.newton` with

.. math:: K = G M G^{\mathsf T} - \operatorname{diag}(G M G^{\mathsf T}),

G (N, q). Over one :math:`\tau` for all sites it is a scalar equation. Over one a site, Newton's
method with the Hessian applied, not formed, and conjugate gradients in place of its factor; start,
rescaling, central path and line search are those of :mod:`spinformer.solve.newton`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.solve.conjugate_gradient import conjugate_gradient
from spinformer.solve.low_rank import LowRankCone, LowRankPoint, signed_factor
from spinformer.solve.newton import (
    MAX_ITERATIONS,
    NEAR,
    PATH_FACTOR,
    QUICK_ERROR,
    QUICK_STEPS,
    ROUNDING,
    line_search,
    path_direction,
)
from spinformer.solve.solution import Solution

__all__ = ["LowRankMinimum", "minimize_low_rank", "minimize_low_rank_shared"]

# Products with the Hessian in one Newton step. A step that they don't finish is still one of
# descent. Far from order 10 are usual.
_PRODUCTS = 400
# Relative residual of a Newton step: less than the residual itself would not be seen in the next.
_FORCING = 0.05
# On the central path, where Newton steps are many and a poor direction costs several.
_PATH_FORCING = 1e-3
# Rounding is no excuse for more than this: at the border of the domain (a zero on the diagonal
# part of V) its estimate has no bound.
_ROUNDING_LIMIT = 1e-6


@dataclass(frozen=True)
class LowRankMinimum:
    r"""The minimum of :math:`\Phi`, as :class:`~spinformer.solve.newton.ConeMinimum`.

    Attributes:
        solution: :math:`\tau`, (..., N), or (...) if shared, with the residual of its constraint.
        tau: of every site (..., N): 1 at absent sites and in broken systems.
        core: Z (..., q, q) in the basis of G (:mod:`spinformer.solve.low_rank`).
        response: :math:`\mu` (..., N, D).
        log_det: :math:`\log\det(\operatorname{diag}\tau - K)` (...).
        value: :math:`\Phi` (...).
        broken: as in :class:`~spinformer.solve.newton.ConeMinimum`.
        point: what products with A and with the Hessian need, systems flattened into one axis.
    """

    solution: Solution
    tau: Tensor
    core: Tensor
    response: Tensor
    log_det: Tensor
    value: Tensor
    broken: Tensor
    point: LowRankPoint


def minimize_low_rank(
    factor: Tensor,
    middle: Tensor,
    b: Tensor,
    *,
    absent: Tensor | None = None,
    initial: Tensor | None = None,
    tolerance: float | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> LowRankMinimum:
    r"""Minimize :math:`\Phi` over one :math:`\tau_i` a site; not differentiable.

    Args:
        factor: G (..., N, q), zero at absent sites.
        middle: M (..., q, q), symmetric.
        b: (..., N, D), zero at absent sites.
        absent, initial, tolerance, max_iterations: as
            :func:`~spinformer.solve.newton.minimize_in_cone`. Systems whose V has a diagonal part
            of both signs (cold, with negative weights) are not converged.

    Cost: each product with the Hessian 2 N q^2 + 2 N q D multiplications, of which a Newton step
    takes about ten where no order is near.
    """
    problem = _Problem.of(factor, middle, b, absent, tolerance)
    cone, tolerance = problem.cone(b.dtype), problem.tolerance
    start = _weak_start(cone)
    if initial is not None:
        start = initial.to(b.dtype).expand(*problem.batch, b.shape[-2]).reshape(start.shape)
    start = problem.settle(start)
    state = _quick(cone, start, None, tolerance, max_iterations)
    rest = (~state.done).nonzero()[:, 0]
    if len(rest):
        state = state.double()
        part, cone = state.take(rest), problem.take(rest).cone(torch.float64)
        if b.dtype == torch.float32:
            near = part.residual < NEAR
            start = torch.where(near[:, None], part.point.tau, _weak_start(cone))
            part = _quick(cone, start, part.steps, tolerance, max_iterations)
        left = (~part.done).nonzero()[:, 0]
        if len(left):
            part.put(left, _path(cone.take(left), part.take(left), tolerance, max_iterations))
        state.put(rest, part)
    return problem.finish(state, state.point.tau)


def minimize_low_rank_shared(
    factor: Tensor,
    middle: Tensor,
    b: Tensor,
    *,
    absent: Tensor | None = None,
    tolerance: float | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> LowRankMinimum:
    r"""Minimize :math:`\Phi` over equal :math:`\tau_i`; not differentiable.

    Newton's method on the reciprocal of the mean of :math:`A_{ii} + |\mu_i|^2`, which is nearly
    linear in :math:`\tau`, between a lower bound (1, by Jensen's inequality, or a point outside the
    cone) and an upper one (from row sums).

    Args:
        factor, middle, b, absent, tolerance: as :func:`minimize_low_rank`.
        max_iterations: evaluations, each 2 N q^2 + N q D multiplications.
    """
    problem = _Problem.of(factor, middle, b, absent, tolerance)
    state = _shared(problem, b.dtype, max_iterations)
    if b.dtype == torch.float32 and not bool(state.done.all()):
        rest = (~state.done).nonzero()[:, 0]
        state = state.double()
        state.put(rest, _shared(problem.take(rest), torch.float64, max_iterations))
    return problem.finish(state, problem.average(state.point.tau))


@dataclass
class _State:
    """A batch (B, ...) of points with the evidence so far."""

    point: LowRankPoint
    residual: Tensor
    steps: Tensor
    done: Tensor

    def take(self, rows: Tensor) -> _State:
        return _State(self.point.take(rows), self.residual[rows], self.steps[rows], self.done[rows])

    def put(self, rows: Tensor, other: _State) -> None:
        self.point.put(rows, other.point)
        self.residual[rows], self.steps[rows] = other.residual, other.steps
        self.done[rows] = other.done

    def double(self) -> _State:
        return _State(self.point.double(), self.residual.double(), self.steps, self.done)


@dataclass
class _Problem:
    """Systems flattened into one axis, broken ones replaced by free ones."""

    factor: Tensor  # G
    basis: Tensor  # of G, in float64: F = G basis
    signs: Tensor
    b: Tensor
    present: Tensor | None
    broken: Tensor
    batch: torch.Size
    tolerance: float

    @classmethod
    def of(
        cls,
        factor: Tensor,
        middle: Tensor,
        b: Tensor,
        absent: Tensor | None,
        tolerance: float | None,
    ) -> _Problem:
        shapes = [factor.shape[:-2], middle.shape[:-2], b.shape[:-2]]
        if absent is not None:
            shapes.append(absent.shape[:-1])
        batch = torch.broadcast_shapes(*shapes)
        systems, (n, d), q = math.prod(batch), b.shape[-2:], factor.shape[-1]
        factor = factor.expand(*batch, n, q).reshape(systems, n, q)
        middle = middle.expand(*batch, q, q).reshape(systems, q, q)
        b = b.expand(*batch, n, d).reshape(systems, n, d)
        sums = factor.square().sum((-2, -1)) * middle.abs().sum((-2, -1))
        broken = ~torch.isfinite(sums + b.square().sum((-2, -1)))
        if bool(broken.any()):
            factor, middle, b = (
                tensor.masked_fill(broken[:, None, None], 0.0) for tensor in (factor, middle, b)
            )
        basis, signs = signed_factor(factor.double(), middle.double())
        present = None
        if absent is not None:
            present = ~absent.expand(*batch, n).reshape(systems, n)
        if tolerance is None:
            tolerance = 1e-12 if b.dtype == torch.float64 else 1e-5
        return cls(factor, basis, signs, b, present, broken, batch, tolerance)

    def take(self, rows: Tensor) -> _Problem:
        present = None if self.present is None else self.present[rows]
        return _Problem(
            self.factor[rows],
            self.basis[rows],
            self.signs[rows],
            self.b[rows],
            present,
            self.broken[rows],
            self.batch,
            self.tolerance,
        )

    def cone(self, dtype: torch.dtype) -> LowRankCone:
        factor = self.factor.to(dtype) @ self.basis.to(dtype)
        return LowRankCone.of(factor, self.signs.to(dtype), self.b.to(dtype))

    def settle(self, tau: Tensor) -> Tensor:
        """tau of every site, 1 where there is none and in broken systems."""
        tau = tau.masked_fill(self.broken[:, None], 1.0)
        return tau if self.present is None else torch.where(self.present, tau, 1.0)

    def total(self, per_site: Tensor) -> Tensor:
        return (per_site if self.present is None else per_site * self.present).sum(-1)

    def count(self, like: Tensor) -> Tensor:
        """Number of present sites, at least 1."""
        return self.total(torch.ones_like(like)).clamp_min(1)

    def average(self, per_site: Tensor) -> Tensor:
        return self.total(per_site) / self.count(per_site)

    def finish(self, state: _State, tau: Tensor) -> LowRankMinimum:
        point, batch, broken = state.point, self.batch, self.broken
        b = self.b.to(point.mu.dtype)
        value = ((point.tau - 1).sum(-1) - point.log_det + (b * point.mu).sum((-2, -1))) / 2
        basis = self.basis.to(point.mu.dtype)
        unknown = broken.reshape(-1, *[1] * (tau.ndim - 1))
        solution = Solution(
            tau.masked_fill(unknown, torch.nan).reshape((*batch, *tau.shape[1:])),
            state.residual.masked_fill(broken, torch.nan).reshape(batch),
            state.steps.reshape(batch),
            (state.done & ~broken).reshape(batch),
        )
        return LowRankMinimum(
            solution,
            point.tau.reshape(*batch, *point.tau.shape[1:]),
            (basis @ point.core @ basis.mT).reshape(*batch, *basis.shape[1:]),
            point.mu.reshape(*batch, *point.mu.shape[1:]),
            point.log_det.reshape(batch),
            value.masked_fill(broken, torch.nan).reshape(batch),
            broken.reshape(batch),
            point,
        )


# -- one tau a site -------------------------------------------------------------------------------


def _weak_start(cone: LowRankCone) -> Tensor:
    """The start of :mod:`spinformer.solve.newton` for weakly correlated couplings."""
    b2 = cone.b.square().sum(-1)
    force = b2
    for _ in range(3):
        a = 2 / (1 + torch.sqrt(1 + 4 * force))
        force = b2 + cone.square(1 - a)
    a = 2 / (1 + torch.sqrt(1 + 4 * force))
    return 1 / a + cone.square(a)


def _evaluate(cone: LowRankCone, tau: Tensor, steps: Tensor) -> tuple[_State, Tensor]:
    point, inside = cone.evaluate(tau)
    deviation = (point.constraint() - 1).abs()
    residual = deviation.amax(-1) if deviation.shape[-1] else deviation.sum(-1)
    residual = torch.where(inside & ~residual.isnan(), residual, torch.inf)
    return _State(point, residual, steps, torch.zeros_like(inside)), inside


def _error(cone: LowRankCone, point: LowRankPoint) -> Tensor:
    """Size of ``point.apply - V^-1``, from its action on one vector without regularity."""
    n = point.tau.shape[-1]
    if not n:
        return point.log_det
    index = torch.arange(n, dtype=point.tau.dtype, device=point.tau.device)
    probe = (math.sqrt(2) * torch.cos(index.square())).expand(point.tau.shape)
    image = point.apply(probe)
    defect = point.tau * image - cone.apply(image) - probe
    return point.apply(defect).abs().amax(-1)


def _step(
    point: LowRankPoint, right: Tensor, root: Tensor, weight: Tensor | None, tolerance: Tensor
) -> Tensor:
    """x with (root P root) x = right, to a relative residual."""
    return conjugate_gradient(
        lambda x: root * point.hessian(root * x, weight),
        right,
        root.square() * point.hessian_diagonal(weight),
        tolerance=tolerance,
        max_iterations=_PRODUCTS,
    ).value


def _quick(
    cone: LowRankCone,
    start: Tensor,
    steps: Tensor | None,
    tolerance: float,
    max_iterations: int,
) -> _State:
    """Full rescaled steps; systems that leave the cone or stall are given up."""
    if steps is None:
        steps = torch.zeros(len(start), dtype=torch.int64, device=start.device)
    everything, inside = _evaluate(cone, start, steps)
    rows: Tensor | None = None
    state = everything
    for step in range(QUICK_STEPS + 1):
        finished = inside & (state.residual <= tolerance)
        if bool(finished.any()):
            finished &= _error(cone, state.point) <= QUICK_ERROR[start.dtype]
        state.done = finished
        if rows is not None:
            everything.put(rows, state)
        going = inside & (state.residual > tolerance) & (state.steps < max_iterations)
        if step == QUICK_STEPS or not bool(going.any()):
            break
        if not bool(going.all()):
            kept = going.nonzero()[:, 0]
            rows = kept if rows is None else rows[kept]
            state, cone = state.take(kept), cone.take(kept)
        scale = state.point.constraint()
        # A last step need not be better than the tolerance.
        enough = torch.maximum(state.residual.clamp_max(_FORCING), tolerance / state.residual / 10)
        change = _step(state.point, scale - 1, scale.rsqrt(), None, enough)
        before = state.residual
        state, inside = _evaluate(cone, state.point.tau + change, state.steps + 1)
        # The first step may raise the residual, on its way from far outside; later ones don't.
        inside = inside & (state.residual < (before if step else 4 * before))
        if rows is None:
            everything = state
    return everything


def _path(cone: LowRankCone, known: _State, tolerance: float, max_iterations: int) -> _State:
    """Follow the central path from where V is diagonally dominant, in float64."""
    sums = cone.row_sums()
    everything, inside = _evaluate(cone, known.point.tau, known.steps)
    near = inside & (everything.residual < NEAR)
    rest = (~near).nonzero()[:, 0]
    if len(rest):
        far = sums + (1 + torch.sqrt(1 + 4 * cone.b.square().sum(-1))) / 2
        everything.put(rest, _evaluate(cone.take(rest), far[rest], known.steps[rest])[0])
    point = everything.point
    weight = ((1 - point.mu.square().sum(-1)) / point.own).median(-1).values
    weight = torch.where(~near & (weight > PATH_FACTOR), weight / PATH_FACTOR, 1.0)
    rows = torch.arange(len(near), device=near.device)
    state, stalled, settled = everything, torch.zeros_like(near), torch.zeros_like(near)
    while True:
        limit = ROUNDING * torch.finfo(sums.dtype).eps * state.point.condition
        within = state.residual <= limit.clamp_max(_ROUNDING_LIMIT)
        # The bound on the condition is a coarse one: what it allows gets one more step.
        state.done = (state.residual <= tolerance) | (within & settled)
        if state is not everything:
            everything.put(rows, state)
        going = ~state.done & ~stalled & (state.steps < max_iterations)
        if not bool(going.any()):
            return everything
        if not bool(going.all()):
            kept = going.nonzero()[:, 0]
            rows, state, cone, weight = rows[kept], state.take(kept), cone.take(kept), weight[kept]
            within = within[kept]
        direction, decrement, weight = _direction(state.point, weight)
        length = _line_search(cone, state.point, direction, decrement, weight)
        stalled, settled = length == 0, within
        tau = state.point.tau + length[:, None] * direction
        state, _ = _evaluate(cone, tau, state.steps + 1)


def _direction(point: LowRankPoint, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def step(slope: Tensor, root: Tensor, weight: Tensor) -> Tensor:
        enough = slope.abs().amax(-1).clamp_max(_PATH_FORCING)
        return _step(point, slope, root, weight, enough)

    return path_direction(point.own, point.mu, weight, step)


def _line_search(
    cone: LowRankCone,
    point: LowRankPoint,
    direction: Tensor,
    decrement: Tensor,
    weight: Tensor,
) -> Tensor:
    def terms(rows: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (cone if len(rows) == len(decrement) else cone.take(rows)).value(tau)

    here = point.tau, point.log_det, (cone.b * point.mu).sum((-2, -1))
    return line_search(here, direction, decrement, weight, terms)


# -- one tau for all ------------------------------------------------------------------------------


def _shared(problem: _Problem, dtype: torch.dtype, max_iterations: int) -> _State:
    cone = problem.cone(dtype)
    eps = torch.finfo(dtype).eps
    ones = torch.ones_like(cone.shift)
    number = problem.count(ones)
    empty = problem.total(ones) == 0
    b2 = cone.b.square().sum(-1)
    highest = cone.row_sums().amax(-1) if cone.shift.shape[-1] else number
    free = (1 + torch.sqrt(1 + 4 * problem.total(b2) / number)) / 2
    low, high = torch.ones_like(free), highest + free
    # Weakly correlated couplings shift tau by the mean square of a row.
    tau = torch.minimum(free + problem.total(cone.square(ones)).clamp_min(0) / number / free, high)
    present = ones if problem.present is None else problem.present.to(dtype)
    steps = torch.zeros_like(tau, dtype=torch.int64)
    while True:
        point, inside = cone.evaluate(problem.settle(tau[:, None].expand_as(ones)))
        total = problem.total(point.constraint()) / number
        residual = torch.where(empty, 0.0, (total - 1).abs())
        residual = torch.where(inside & ~residual.isnan(), residual, torch.inf)
        low = torch.where(~inside | (total >= 1), torch.maximum(low, tau), low)
        high = torch.where(inside & (total <= 1), torch.minimum(high, tau), high)
        done = residual <= problem.tolerance
        going = ~done & (steps < max_iterations) & (high - low > 2 * eps * high)
        if not bool(going.any()):
            break
        slope = problem.total(point.hessian(present)) / number
        new = tau + total * (total - 1) / slope
        middle = (low + high) / 2
        new = torch.where(inside & (new > low) & (new < high), new, middle)
        tau = torch.where(going, new, tau)
        steps += going
    error = _error(cone, point)
    if dtype == torch.float64:
        limit = ROUNDING * eps * point.condition
        done |= residual <= limit.clamp_max(_ROUNDING_LIMIT)
    else:
        done &= error <= QUICK_ERROR[dtype]
    return _State(point, residual, steps, done)
