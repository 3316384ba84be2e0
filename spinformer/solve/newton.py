r"""Newton's method for a convex function inside the cone of positive-definite matrices.

For symmetric K (..., N, N) and b (..., N, D) the function

.. math::
    \Phi(\tau) = \tfrac12 \sum_i (\tau_i - 1) - \tfrac12 \log\det V
                 + \tfrac12 \operatorname{tr} b^{\mathsf T} V^{-1} b,
    \qquad V = \operatorname{diag}(\tau) - K \succ 0,

has exactly one minimum, for every K and b: it is strictly convex and grows without bound towards
the border of the cone and towards infinity. With :math:`A = V^{-1}` and :math:`\mu = A b`,

.. math::
    -2\,\partial_i \Phi = A_{ii} + |\mu_i|^2 - 1,\qquad
    2\,\Phi'' = P = A \circ (A + 2 \mu\mu^{\mathsf T}),

where :math:`\circ` multiplies entry by entry and :math:`\mu\mu^{\mathsf T}` is the Gram matrix of
the rows of :math:`\mu`.

Two methods share the work. Most systems take a few full steps from a start that is right for
weakly correlated entries of K. Those that it does not suit are solved again in float64 along the
central path: :math:`\log\det V` is weighted by :math:`\nu \ge 1`, which is lowered tenfold whenever
the Newton decrement says that the minimum for the present :math:`\nu` is near. Without the weight,
a cold system (large K) would need hundreds of steps, as V must come within O(1) of a singular
matrix with entries of the size of K.

Source: Nesterov & Nemirovskii, Interior-Point Polynomial Algorithms (SIAM 1994), for
self-concordance (:math:`2\Phi` is) and the central path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.solve.conjugate_gradient import conjugate_gradient
from spinformer.solve.positive import (
    cholesky_inverse,
    cone_hessian,
    positive_factor,
    positive_inverse_,
)
from spinformer.solve.solution import Solution

__all__ = [
    "ITERATIVE_SITES",
    "MAX_ITERATIONS",
    "ConeMinimum",
    "iterative_solve",
    "line_search",
    "minimize_in_cone",
    "path_direction",
]

MAX_ITERATIONS = 60
# A system that the quick method does not finish in this many steps is left to the path.
QUICK_STEPS = 8
# The path: tenfold steps of nu, each when the squared decrement is below one. Larger steps, or
# taken earlier, were measured to need more Newton steps, not fewer.
PATH_FACTOR = 10.0
_PATH_DECREMENT = 1.0
# A residual from which Newton's method converges at once.
NEAR = 0.1
# Trial steps of the line search: two powers of 1 / 0.6 above the full step, then down to nothing.
_LINE_START, _LINE_SHRINK, _LINE_TRIALS = 0.6**-2, 0.6, 60
# Rounding limit of the residual as a multiple of eps * cond(V); see `_rounding`.
ROUNDING = 10.0
# The Newton equation is solved by conjugate gradients from this size on: measured on a CPU, 7
# products take twice the time of a Cholesky factorization at N = 256, half at 512, a tenth at 1024.
ITERATIVE_SITES = 512
_PRODUCTS = 60
_FORCING = 1e-2
# Largest error of A that a quick solve may have: what fails is solved again with more digits.
QUICK_ERROR = {torch.float32: 1e-4, torch.float64: 1e-11}


@dataclass(frozen=True)
class ConeMinimum:
    r"""The minimum of :math:`\Phi` over :math:`\tau` (..., N), and what derivatives need.

    Tensors are in the dtype that the solve needed, which is float64 where float32 could not.

    Attributes:
        solution: :math:`\tau` with residual :math:`\max_i |A_{ii} + |\mu_i|^2 - 1|`, Newton steps
            and convergence. A system with NaN or infinity in K or b has value and residual NaN.
        inverse: :math:`A = (\operatorname{diag}\tau - K)^{-1}` (..., N, N); rows of the unit
            matrix at absent sites.
        response: :math:`\mu = A b` (..., N, D).
        log_det: :math:`\log\det(\operatorname{diag}\tau - K)` (...).
        value: :math:`\Phi` at its minimum (...).
        broken: systems whose K or b, or their squares, were not finite (...) bool. Their
            ``inverse`` and ``response`` are those of K = 0, b = 0, so that they spoil no sum.
    """

    solution: Solution
    inverse: Tensor
    response: Tensor
    log_det: Tensor
    value: Tensor
    broken: Tensor


def minimize_in_cone(
    matrix: Tensor,
    b: Tensor,
    *,
    absent: Tensor | None = None,
    initial: Tensor | None = None,
    tolerance: float | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> ConeMinimum:
    r"""Minimize :math:`\Phi` over one :math:`\tau_i` a site; not differentiable.

    A system is done when :math:`\max_i |A_{ii} + |\mu_i|^2 - 1|` is at most ``tolerance`` or, where
    that is out of reach, ten times the rounding error
    :math:`\epsilon \lVert V\rVert_\infty \lVert A\rVert_\infty \ge \epsilon\operatorname{cond}(V)`
    of float64. Float32 systems for which that error in float32 exceeds 1e-4, or which need the
    central path, are solved in float64. A finished or broken system neither changes another nor
    is changed by one.

    Args:
        matrix: symmetric K (..., N, N), float32 or float64, any entries and any diagonal.
        b: (..., N, D) of the same dtype; leading axes broadcast with those of ``matrix``.
        absent: bool (..., N): sites that are not there. They have :math:`\tau = 1` and contribute
            nothing, whatever K and b hold for them.
        initial: :math:`\tau` (..., N) to start from, used where it lies in the cone. The answer
            does not depend on it; the number of steps does.
        tolerance: None is 1e-12 in float64 and 1e-5 in float32.
        max_iterations: Newton steps in all. 3 to 6 are usual; the hardest cases that are known
            (K up to 1e6, N up to 512) take fewer than the default. A system that runs out of them
            inside the cone is left where its last step led.

    Returns:
        the :class:`ConeMinimum`.

    Cost: each step one inverse, one Cholesky factorization (from N = 512 on about ten products with
    vectors instead) and three products, about 4 N^3 + 4 N^2 D operations.
    """
    batch = torch.broadcast_shapes(matrix.shape[:-2], b.shape[:-2])
    if absent is not None:
        batch = torch.broadcast_shapes(batch, absent.shape[:-1])
    n, d = b.shape[-2:]
    if tolerance is None:
        tolerance = 1e-12 if b.dtype == torch.float64 else 1e-5
    if absent is not None:
        matrix = matrix.masked_fill(absent[..., :, None] | absent[..., None, :], 0.0)
        b = b.masked_fill(absent[..., None], 0.0)
    systems = math.prod(batch)
    matrix = matrix.expand(*batch, n, n).reshape(systems, n, n)
    b = b.expand(*batch, n, d).reshape(systems, n, d)
    # What has no square has no answer; torch.isfinite of all entries takes ten times as long.
    work = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
    torch.mul(matrix, matrix, out=work)
    broken = ~torch.isfinite(work.sum((-2, -1)) + b.square().sum((-2, -1)))
    if bool(broken.any()):
        matrix = matrix.masked_fill(broken[:, None, None], 0.0)
        b = b.masked_fill(broken[:, None, None], 0.0)

    start = _weak_start(matrix, b, work)
    if initial is not None:
        start = initial.to(b.dtype).expand(*batch, n).reshape(systems, n)
        if absent is not None:
            start = start.masked_fill(absent.expand(*batch, n).reshape(systems, n), 1.0)
        start = start.masked_fill(broken[:, None], 1.0)
    steps = torch.zeros(len(b), dtype=torch.int64, device=b.device)
    state = _quick(matrix, b, start, steps, tolerance, max_iterations, work)
    # What ran out of steps inside the cone keeps its last point: the path would begin anew.
    spent = (state.steps >= max_iterations) & state.residual.isfinite()
    rest = (~state.done & ~spent).nonzero()[:, 0]
    if len(rest):
        state = state.double()
        matrix, rest_b, part = matrix[rest].double(), b[rest].double(), state.take(rest)
        if b.dtype == torch.float32:
            near = part.residual < NEAR
            work = torch.empty_like(matrix)
            start = torch.where(near[:, None], part.tau, _weak_start(matrix, rest_b, work))
            part = _quick(matrix, rest_b, start, part.steps, tolerance, max_iterations, work)
        left = (~part.done).nonzero()[:, 0]
        if len(left):
            last = _path(matrix[left], rest_b[left], part.take(left), tolerance, max_iterations)
            part.put(left, last)
        state.put(rest, part)

    value = ((state.tau - 1).sum(-1) - state.log_det + (b * state.mu).sum((-2, -1))) / 2
    nan = broken[:, None]
    solution = Solution(
        state.tau.masked_fill(nan, torch.nan).reshape(*batch, n),
        state.residual.masked_fill(broken, torch.nan).reshape(batch),
        state.steps.reshape(batch),
        (state.done & ~broken).reshape(batch),
    )
    return ConeMinimum(
        solution,
        state.inverse.reshape(*batch, n, n),
        state.mu.reshape(*batch, n, d),
        state.log_det.reshape(batch),
        value.masked_fill(broken, torch.nan).reshape(batch),
        broken.reshape(batch),
    )


@dataclass
class _State:
    """A batch (B, ...) of points in the cone, with the evidence so far."""

    tau: Tensor
    inverse: Tensor
    mu: Tensor
    log_det: Tensor
    residual: Tensor
    steps: Tensor
    done: Tensor

    def fields(self) -> list[str]:
        return list(vars(self))

    def take(self, rows: Tensor) -> _State:
        return _State(**{name: getattr(self, name)[rows] for name in self.fields()})

    def put(self, rows: Tensor, other: _State) -> None:
        for name in self.fields():
            getattr(self, name)[rows] = getattr(other, name)

    def double(self) -> _State:
        changed = {}
        for name in self.fields():
            tensor = getattr(self, name)
            changed[name] = tensor.double() if tensor.is_floating_point() else tensor
        return _State(**changed)


def _shifted(tau: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    v = torch.neg(matrix, out=out)
    v.diagonal(dim1=-2, dim2=-1).add_(tau)
    return v


def _evaluate(
    matrix: Tensor,
    b: Tensor,
    tau: Tensor,
    steps: Tensor,
    *,
    stable: bool,
    reuse: _State | None = None,
) -> tuple[_State, Tensor]:
    """The point tau, and whether it lies in the cone.

    ``stable`` inverts by Cholesky. ``reuse`` is a point whose memory may be overwritten.
    """
    v = _shifted(tau, matrix, None if reuse is None else reuse.inverse)
    if stable:
        inverse, log_det, inside = cholesky_inverse(v)
    else:
        log_det, inside = positive_inverse_(v)
        inverse = v
    mu = torch.bmm(inverse, b, out=None if reuse is None else reuse.mu)
    deviation = (_constraint(inverse, mu) - 1).abs()
    residual = deviation.amax(-1) if deviation.shape[-1] else deviation.sum(-1)
    residual = torch.where(inside & ~residual.isnan(), residual, torch.inf)
    return _State(tau, inverse, mu, log_det, residual, steps, torch.zeros_like(inside)), inside


def _inverse_error(matrix: Tensor, state: _State) -> Tensor:
    """Size of ``state.inverse - V^-1``, from its action on one vector without regularity."""
    n = matrix.shape[-1]
    if not n:
        return state.residual
    index = torch.arange(n, dtype=matrix.dtype, device=matrix.device)
    probe = math.sqrt(2) * torch.cos(index.square())
    image = _times(probe.expand(state.tau.shape), state.inverse)
    defect = state.tau * image - _times(image, matrix) - probe
    return _times(defect, state.inverse).abs().amax(-1)


def _constraint(inverse: Tensor, mu: Tensor) -> Tensor:
    """A_ii + |mu_i|^2."""
    length: Tensor = torch.linalg.vector_norm(mu, dim=-1)
    return inverse.diagonal(dim1=-2, dim2=-1) + length.square()


def _rounding(state: _State, row_sums: Tensor) -> Tensor:
    """eps |V| |A| in row-sum norms, an upper bound on eps cond(V)."""
    if not state.tau.shape[-1]:
        return state.residual
    norm = (state.tau.abs() + row_sums).amax(-1) * state.inverse.abs().sum(-1).amax(-1)
    return torch.finfo(state.tau.dtype).eps * norm


def _weak_start(matrix: Tensor, b: Tensor, work: Tensor) -> Tensor:
    r"""tau for entries of K that are many, weak and unrelated to each other.

    Then :math:`A_{ii} = a_i` with :math:`1/a_i = \tau_i - \sum_j K_{ij}^2 a_j`, and
    :math:`|\mu_i|^2 = a_i^2 (|b_i|^2 + \sum_j K_{ij}^2 |\mu_j|^2)`, which with
    :math:`a_i + |\mu_i|^2 = 1` is a fixed-point equation for a. It is exact without K.
    """
    # An entry on the diagonal only shifts tau.
    own = matrix.diagonal(dim1=-2, dim2=-1)
    square = torch.mul(matrix, matrix, out=work)
    square.diagonal(dim1=-2, dim2=-1).zero_()
    b2 = b.square().sum(-1)
    force = b2
    for _ in range(3):
        a = 2 / (1 + torch.sqrt(1 + 4 * force))
        force = b2 + _times(1 - a, square)
    a = 2 / (1 + torch.sqrt(1 + 4 * force))
    return own + 1 / a + _times(a, square)


def _times(vector: Tensor, symmetric: Tensor) -> Tensor:
    """The product, as row times matrix: ten times faster on a CPU than matrix times column."""
    return (vector[..., None, :] @ symmetric)[..., 0, :]


def _quick(
    matrix: Tensor,
    b: Tensor,
    start: Tensor,
    steps: Tensor,
    tolerance: float,
    max_iterations: int,
    work: Tensor,
) -> _State:
    r"""Full steps from ``start``; systems that leave the cone or stall are given up.

    The Hessian is taken with A and mu rescaled so that their constraint holds,
    :math:`P_{ij} / \sqrt{a_i a_j}` with :math:`a_i = A_{ii} + |\mu_i|^2`. That is Newton's method
    as a tends to 1, stays a direction of descent, and is exact in one step for diagonal V, where
    plain Newton needs several: it saves one step of three. ``work`` is memory of the shape of
    ``matrix``.
    """
    everything, inside = _evaluate(matrix, b, start, steps, stable=False)
    rows: Tensor | None = None  # of the systems that are still going; None is all of them
    state = everything
    info = torch.empty_like(steps, dtype=torch.int32)
    # Not touched, and so not there, where no factor is taken.
    factor = torch.empty_like(matrix).mT
    for step in range(QUICK_STEPS + 1):
        finished = inside & (state.residual <= tolerance)
        if bool(finished.any()):
            finished &= _inverse_error(matrix, state) <= QUICK_ERROR[matrix.dtype]
        state.done = finished
        if rows is not None:
            everything.put(rows, state)
        going = inside & (state.residual > tolerance) & (state.steps < max_iterations)
        if step == QUICK_STEPS or not bool(going.any()):
            break
        if not bool(going.all()):
            kept = going.nonzero()[:, 0]
            rows = kept if rows is None else rows[kept]
            state, matrix, b = state.take(kept), matrix[kept], b[kept]
            work, factor, info = work[: len(kept)], factor[: len(kept)], info[: len(kept)]
        scale = _constraint(state.inverse, state.mu)
        root = scale.rsqrt()
        hessian = cone_hessian(state.inverse, state.mu, out=work)
        hessian.mul_(root[..., None]).mul_(root[..., None, :])
        change = None
        if hessian.shape[-1] >= ITERATIVE_SITES:
            # No further than the tolerance of the step that this one may be the last before.
            enough = (tolerance / state.residual / 10).clamp_max(_FORCING)
            change = iterative_solve(hessian, scale - 1, enough)
            info.zero_()
        if change is None:
            torch.linalg.cholesky_ex(hessian, out=(factor, info))
            change = torch.cholesky_solve((scale - 1)[..., None], factor)[..., 0]
        before = state.residual
        state, inside = _evaluate(
            matrix, b, state.tau + change, state.steps + 1, stable=False, reuse=state
        )
        # The first step may raise the residual, on its way from far outside; later ones don't.
        inside = inside & (info == 0) & (state.residual < (before if step else 4 * before))
        if rows is None:
            everything = state
    return everything


def iterative_solve(matrix: Tensor, right: Tensor, tolerance: float | Tensor) -> Tensor | None:
    """Conjugate gradients with positive-definite matrices (..., N, N), None where they are slow."""
    found = conjugate_gradient(
        lambda x: _times(x, matrix),
        right,
        matrix.diagonal(dim1=-2, dim2=-1),
        tolerance=tolerance,
        max_iterations=_PRODUCTS,
    )
    return found.value if bool(found.converged.all()) else None


def _path(
    matrix: Tensor, b: Tensor, known: _State, tolerance: float, max_iterations: int
) -> _State:
    """Follow the central path from where V is diagonally dominant, in float64.

    Systems whose ``known`` point is near the minimum start there.
    """
    row_sums = matrix.abs().sum(-1)
    own = matrix.diagonal(dim1=-2, dim2=-1)
    # Diagonal dominance, and exact without couplings.
    far = row_sums - own.abs() + own + (1 + torch.sqrt(1 + 4 * b.square().sum(-1))) / 2
    everything, inside = _evaluate(matrix, b, known.tau, known.steps, stable=True)
    near = inside & (everything.residual < NEAR)
    rest = (~near).nonzero()[:, 0]
    if len(rest):
        remote, _ = _evaluate(matrix[rest], b[rest], far[rest], known.steps[rest], stable=True)
        everything.put(rest, remote)
    # The weight for which the start is about the minimum.
    squares = everything.mu.square().sum(-1)
    weight = ((1 - squares) / everything.inverse.diagonal(dim1=-2, dim2=-1)).median(-1).values
    weight = torch.where(~near & (weight > PATH_FACTOR), weight / PATH_FACTOR, 1.0)
    rows = torch.arange(len(b), device=b.device)
    state = everything
    while True:
        limit = ROUNDING * _rounding(state, row_sums)
        state.done = state.residual <= limit.clamp_min(tolerance)
        if state is not everything:
            everything.put(rows, state)
        going = ~state.done & (state.steps < max_iterations)
        if not bool(going.any()):
            return everything
        if not bool(going.all()):
            kept = going.nonzero()[:, 0]
            rows, state = rows[kept], state.take(kept)
            matrix, b, row_sums, weight = matrix[kept], b[kept], row_sums[kept], weight[kept]
        direction, decrement, weight = _direction(state, weight)
        length = _line_search(matrix, b, state, direction, decrement, weight)
        tau = state.tau + length[:, None] * direction
        state, _ = _evaluate(matrix, b, tau, state.steps + 1, stable=True)


def _direction(state: _State, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def step(slope: Tensor, root: Tensor, weight: Tensor) -> Tensor:
        hessian = cone_hessian(state.inverse, state.mu, weight)
        hessian.mul_(root[..., None]).mul_(root[..., None, :])
        direction: Tensor = torch.cholesky_solve(slope[..., None], positive_factor(hessian))
        return direction[..., 0]

    return path_direction(state.inverse.diagonal(dim1=-2, dim2=-1), state.mu, weight, step)


def path_direction(
    own: Tensor,
    mu: Tensor,
    weight: Tensor,
    step: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Direction of descent, its squared decrement, and the weight that it is for.

    The weight is lowered first, as often as the decrement allows. Where :math:`|\mu_i| > 1` the
    Hessian is divided by it: in a strong field :math:`\mu_i` is about c / x with x linear in tau,
    and a Newton step for x + c^2 / x from small x is too short, by a factor that this restores.

    Args:
        own: the diagonal of A, (B, N).
        mu: (B, N, D).
        weight: of log det V (B,).
        step: the solution of the Hessian, with ``root`` (B, N) on either side, for ``slope`` (B,
            N), as ``step(slope, root, weight)``.
    """
    squares = mu.square().sum(-1)
    root = squares.clamp_min(1).pow(-0.25)
    while True:
        slope = weight[:, None] * own + squares - 1
        direction = step(slope, root, weight)
        decrement = (slope * direction).sum(-1) / weight
        lower = (weight > 1) & (decrement < _PATH_DECREMENT)
        if not bool(lower.any()):
            return direction, decrement, weight
        weight = torch.where(lower, (weight / PATH_FACTOR).clamp_min(1.0), weight)


def _line_search(
    matrix: Tensor,
    b: Tensor,
    state: _State,
    direction: Tensor,
    decrement: Tensor,
    weight: Tensor,
) -> Tensor:
    """Each trial costs one Cholesky factorization, which is less than half of what a step costs."""

    def terms(rows: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor, info = torch.linalg.cholesky_ex(_shifted(tau, matrix[rows]))
        half = torch.linalg.solve_triangular(factor, b[rows], upper=False)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return log_det, half.square().sum((-2, -1)), info == 0

    here = state.tau, state.log_det, (b * state.mu).sum((-2, -1))
    return line_search(here, direction, decrement, weight, terms)


def line_search(
    here: tuple[Tensor, Tensor, Tensor],
    direction: Tensor,
    decrement: Tensor,
    weight: Tensor,
    terms: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
) -> Tensor:
    """Step lengths (B,): about the minimum along the line, inside the cone; 0 without one.

    Args:
        here: tau (B, N), and log det V (B,) and tr b^T A b (B,) there.
        direction, decrement, weight: of :func:`path_direction`.
        terms: log det V, tr b^T A b and whether the point lies in the cone, of some of the systems:
            ``terms(rows, tau)``.
    """
    start, log_det, field = here
    lowest = (start.sum(-1) - weight * log_det + field) / 2
    length = torch.zeros_like(decrement)
    # Near the minimum the full step is right, and differences of Phi drown in rounding.
    near = decrement < 0.1
    rows = torch.arange(len(near), device=near.device)
    trial = _LINE_START
    for _ in range(_LINE_TRIALS):
        tau = start[rows] + trial * direction[rows]
        log_det, field, inside = terms(rows, tau)
        value = (tau.sum(-1) - weight[rows] * log_det + field) / 2
        better = inside & torch.where(near[rows], trial <= 1, value < lowest[rows])
        # Phi is convex on the line: after a fall, the first rise has passed the minimum.
        over = ~better & (length[rows] > 0)
        lowest[rows] = torch.where(better, value, lowest[rows])
        length[rows] = torch.where(better, trial, length[rows])
        rows = rows[~over & ~(near[rows] & better)]
        if not len(rows):
            break
        trial *= _LINE_SHRINK
    return length
