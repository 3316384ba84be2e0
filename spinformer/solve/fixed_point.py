r"""Fixed points z = f(z) of batches of independent systems.

One adapter serves three methods, and adds what a physicist needs from each: every system stops by
itself (its answer and its number of iterations do not depend on its batch mates, and a NaN stays
in its system), tolerances don't depend on the size of a system, the reported residual is the
undamped one of the returned value, and no failure is silent.

* ``"plain"``: z <- z + damping (f(z) - z). One evaluation of f an iteration and nothing else. Where
  f is a contraction it is the fastest per second.
* ``"anderson"``: Anderson mixing over the last five differences (Walker & Ni 2011, SIAM J. Numer.
  Anal. 49, 1715), with plain steps where it stalls. Fewer iterations near criticality; can be
  drawn to unstable fixed points.
* ``"broyden"``: the good Broyden method of torchdeq, restarted every 40 steps to bound its memory.
  Quickest in iterations on strongly non-normal maps and dearest per iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torchdeq.solver import broyden_solver

from spinformer.errors import OnFailure, check_choice, check_on_failure, strict_options
from spinformer.solve.implicit import implicit
from spinformer.solve.solution import Solution

__all__ = ["FixedPoint", "FixedPointSolver", "unroll"]

FixedPointSolver = Literal["plain", "anderson", "broyden"]
Map = Callable[..., Tensor]
Linearization = Callable[..., tuple[Tensor, Callable[[Tensor], Tensor]]]

_METHODS = ("plain", "anderson", "broyden")
_WINDOW = 5
_PATIENCE = 10
_RESTART = 40


@strict_options
@dataclass(frozen=True)
class FixedPoint:
    r"""How to solve z = f(z) and differentiate the answer.

    The state is (..., N, D); every leading axis is a system. The residual of a system is
    :math:`\max |f(z) - z| / \text{scale}` over its entries.

    Args:
        solver: ``"plain"``, ``"anderson"`` or ``"broyden"``.
        damping: step in (0, 1] of the map (1 - damping) z + damping f(z) that is iterated, in the
            solve and in its adjoint. Below 1 it tames oscillations.
        tolerance: the residual at which a system is done; None is 1e-10 in float64 and 1e-5 in
            float32. The adjoint stops at this fraction of its cotangent.
        max_iterations: evaluations of f before a system is given up.
        on_failure: ``"raise"``, ``"warn"``, ``"ignore"`` or a function of the message, for the
            solve and for its adjoint.
    """

    solver: FixedPointSolver = "plain"
    damping: float = 1.0
    tolerance: float | None = None
    max_iterations: int = 1000
    on_failure: OnFailure = "raise"

    def __post_init__(self) -> None:
        check_choice("solver", self.solver, _METHODS)
        check_on_failure(self.on_failure)
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping={self.damping!r} must lie in (0, 1]; 1 is the plain map")
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(f"tolerance={self.tolerance!r} must be positive, or None")
        if not (isinstance(self.max_iterations, int) and self.max_iterations >= 1):
            raise ValueError(f"max_iterations={self.max_iterations!r} must be an integer >= 1")

    def solve(
        self,
        function: Map,
        initial: Tensor,
        inputs: Sequence[Tensor] = (),
        *,
        scale: float = 1.0,
        check: bool = True,
        linearize: Linearization | None = None,
    ) -> Solution:
        r"""Solve z = function(z, \*inputs) from ``initial``, with the implicit derivative attached.

        Args:
            function: maps (..., N, D) to itself, system by system, without side effects.
            initial: where to start, (..., N, D), float32 or float64.
            inputs: every tensor that needs a gradient.
            scale: unit of the residual, the natural size of one entry of z.
            check: apply ``on_failure`` to the solve at once; False leaves it to :meth:`check`.
            linearize: a quicker derivative of the function, see :meth:`attach`.

        Returns:
            the :class:`Solution`; its value carries the derivative in ``inputs``.

        Raises:
            ConvergenceError: with ``on_failure="raise"``, also from the backward pass.
        """
        if initial.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"initial is {initial.dtype}: solve in float32 or float64")
        with torch.no_grad():
            solution = self._iterate(lambda z: function(z, *inputs), initial.detach(), scale)
        if check:
            self.check(solution)
        value = self.attach(solution, function, inputs, linearize)
        return Solution(value, solution.residual, solution.iterations, solution.converged)

    def attach(
        self,
        solution: Solution,
        function: Map,
        inputs: Sequence[Tensor],
        linearize: Linearization | None = None,
    ) -> Tensor:
        r"""The value of a solution of z = function(z, \*inputs) with its implicit derivative.

        For a fixed point that is known already and now depends on other tensors of the same values:
        :meth:`solve` without its iteration.

        Args:
            solution: z, and which systems have it.
            function, inputs: as :meth:`solve`.
            linearize: ``linearize(z, *inputs)`` returns ``function(z, *inputs)``, with its graph,
                and the map :math:`u \mapsto (\partial f/\partial z)^{\mathsf T} u` in plain
                numbers, which the adjoint iteration applies. None leaves it to autograd.
        """

        def adjoint(vjp: Callable[[Tensor], Tensor], rhs: Tensor) -> Tensor:
            # A system that has no value has no gradient either; its NaN must not reach a shared
            # parameter. Dividing by the size of the cotangent makes the tolerance relative.
            size = _size(rhs)
            usable = torch.isfinite(size) & torch.isfinite(solution.residual)
            factor = torch.where(size > 0, size, 1.0)[..., None, None]
            b = rhs / factor
            broken = not bool(usable.all())
            if broken:
                b = torch.where(usable[..., None, None], b, 0.0)

            def step(u: Tensor) -> Tensor:
                return vjp.inner(u) + b if isinstance(vjp, _Complement) else u - vjp(u) + b

            linear = self._iterate(step, b, 1.0, usable)
            linear.check(
                self.on_failure,
                f"the adjoint of the {self.solver} fixed-point iteration",
                "The gradient is that of the best iterate: raise max_iterations, or keep the "
                "couplings weaker.",
            )
            value = linear.value * factor
            return torch.where(usable[..., None, None], value, 0.0) if broken else value

        def linearized(z: Tensor, *x: Tensor) -> tuple[Tensor, _Complement]:
            assert linearize is not None
            new, transposed = linearize(z, *x)
            return z - new, _Complement(transposed)

        return implicit(
            solution.value,
            lambda z, *x: z - function(z, *x),
            inputs,
            adjoint,
            None if linearize is None else linearized,
        )

    def check(self, solution: Solution) -> None:
        """Apply ``on_failure`` to a solution."""
        solution.check(
            self.on_failure,
            f"the {self.solver} fixed-point iteration",
            "Raise max_iterations, lower damping, lower beta, or try another solver; where the "
            "residual is NaN, look for NaN in the couplings and fields.",
        )

    def _iterate(
        self,
        function: Callable[[Tensor], Tensor],
        initial: Tensor,
        scale: float,
        wanted: Tensor | None = None,
    ) -> Solution:
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = 1e-10 if initial.dtype == torch.float64 else 1e-5
        record = _Record(initial, tolerance, self.max_iterations, scale, wanted)
        if self.solver == "plain":
            _plain(function, record, self.damping)
        elif self.solver == "anderson":
            _anderson(function, record, self.damping)
        else:
            _broyden(function, record, self.damping)
        return record.solution()


def unroll(
    function: Map,
    initial: Tensor,
    inputs: Sequence[Tensor] = (),
    *,
    steps: int,
    damping: float = 1.0,
) -> Tensor:
    r"""``steps`` damped iterations of z <- function(z, \*inputs), differentiated through.

    A fixed amount of work, with no data-dependent stop: it compiles and exports.
    """
    z = initial
    for _ in range(steps):
        new = function(z, *inputs)
        z = new if damping == 1 else torch.lerp(z, new, damping)
    return z


@dataclass(frozen=True)
class _Complement:
    """The map u -> u - A u, which lets the iteration u <- A u + b see its A."""

    inner: Callable[[Tensor], Tensor]

    def __call__(self, u: Tensor) -> Tensor:
        return u - self.inner(u)


def _size(state: Tensor) -> Tensor:
    """Largest entry of each system; zero for a system with no sites."""
    if state.shape[-1] * state.shape[-2] == 0:
        return state.new_zeros(state.shape[:-2])
    # Two reductions without a copy of the state, which abs() would make.
    return torch.maximum(state.amax((-2, -1)), -state.amin((-2, -1)))


class _Record:
    """The evidence of a running solve: which systems go on, and what each has reached."""

    def __init__(
        self,
        initial: Tensor,
        tolerance: float,
        max_iterations: int,
        scale: float,
        wanted: Tensor | None,
    ) -> None:
        batch = initial.shape[:-2]
        self.value = initial
        self.tolerance, self.max_iterations, self.scale = tolerance, max_iterations, scale
        self.residual = initial.new_full(batch, torch.inf)
        self.best, self.lowest = initial, self.residual
        self.iterations = torch.zeros(batch, dtype=torch.int64, device=initial.device)
        self.active = torch.ones(batch, dtype=torch.bool, device=initial.device)
        if wanted is not None:
            self.active &= wanted
            self.residual.masked_fill_(~wanted, 0.0)
        self.evaluations = 0

    @property
    def running(self) -> bool:
        return self.evaluations < self.max_iterations and bool(self.active.any())

    def observe(self, z: Tensor, step: Tensor) -> None:
        """Note that the undamped step f(z) - z was taken at z."""
        self.evaluations += 1
        residual = _size(step) / self.scale
        active = self.active
        if bool(active.all()):
            self.value, self.residual = z, residual
            self.iterations += 1
        else:
            self.value = torch.where(active[..., None, None], z, self.value)
            self.residual = torch.where(active, residual, self.residual)
            self.iterations += active
        better = residual <= self.lowest
        if bool(better.all()):
            self.best, self.lowest = z, residual
        else:
            self.best = torch.where(better[..., None, None], z, self.best)
            self.lowest = torch.where(better, residual, self.lowest)
        # A comparison with NaN is false: a broken system stops here too, and has not converged.
        self.active = active & (residual > self.tolerance) & torch.isfinite(residual)

    def solution(self) -> Solution:
        converged = self.residual <= self.tolerance
        # An iteration that fails may have run away: the best that it met is worth more than the
        # last. One that never met a number keeps its NaN.
        failed = ~converged & torch.isfinite(self.lowest)
        if not bool(failed.any()):
            return Solution(self.value, self.residual, self.iterations, converged)
        value = torch.where(failed[..., None, None], self.best, self.value)
        residual = torch.where(failed, self.lowest, self.residual)
        return Solution(value, residual, self.iterations, converged)


def _plain(function: Callable[[Tensor], Tensor], record: _Record, damping: float) -> None:
    z = record.value
    while record.running:
        new = function(z)
        record.observe(z, new - z)
        z = new if damping == 1 else torch.lerp(z, new, damping)


def _anderson(function: Callable[[Tensor], Tensor], record: _Record, damping: float) -> None:
    z = record.value
    rows, size = record.active.numel(), z.shape[-2] * z.shape[-1]
    window = min(_WINDOW, record.max_iterations)
    # The latest step and the last differences of the steps in a ring, side by side, so that one
    # product gives all of their inner products; and the differences of z + damping * step.
    steps = z.new_empty(rows, 1 + window, size)
    moves = z.new_empty(rows, window, size)
    # Enough to make the normal equations solvable, far too little to slow convergence; heavier on
    # older differences, so that of several that are parallel the latest, the most local, is used.
    ages = torch.arange(window, device=z.device)
    ridge = 10 * torch.finfo(z.dtype).eps * 10.0 ** ages.to(z.dtype)
    stale, strikes = torch.zeros_like(record.iterations), torch.zeros_like(record.iterations)
    previous = z
    for count in itertools.count():
        if not record.running:
            return
        new = function(z)
        step = new - z
        record.observe(z, step)
        new = (new if damping == 1 else torch.lerp(z, new, damping)).reshape(rows, size)
        step = step.reshape(rows, size)
        # Mixing may go round in circles. A system without a new lowest residual for some time
        # forgets its differences and takes plain steps until there is one; when that happens
        # again, for good, so that a contraction is sure to end.
        stale = torch.where(record.residual <= record.lowest, 0, stale + 1)
        strikes += stale == _PATIENCE
        circling = (stale >= _PATIENCE) | (strikes > 1)
        latest = (count - 1) % window
        if count:
            torch.sub(step, steps[:, 0], out=steps[:, 1 + latest])
            torch.sub(new, previous, out=moves[:, latest])
        steps[:, 0] = step
        previous = new
        if not count:
            z = new.view(z.shape)
            continue
        k = min(count, window)
        if bool(circling.any()):
            plain = circling.reshape(rows, 1, 1)
            steps[:, 1 : k + 1].masked_fill_(plain, 0.0)
            moves[:, :k].masked_fill_(plain, 0.0)
        products = steps[:, : k + 1] @ steps[:, : k + 1].mT
        gram, projections = products[:, 1:, 1:], products[:, 1:, :1]
        # Differences shrink as the iteration converges: compare directions, not lengths.
        length = gram.diagonal(dim1=-2, dim2=-1).sqrt()
        length = torch.where(length > 0, length, 1.0)[..., None]
        gram = gram / (length * length.mT)
        gram.diagonal(dim1=-2, dim2=-1).add_(ridge[(latest - ages[:k]) % window])
        factor, info = torch.linalg.cholesky_ex(gram)
        weights = torch.cholesky_solve(projections / length, factor) / length
        usable = (info == 0) & torch.isfinite(weights.sum((-2, -1))) & ~circling.reshape(rows)
        weights = torch.where(usable[:, None, None], weights, 0.0)
        z = torch.baddbmm(new[:, None], weights.mT, moves[:, :k], alpha=-1).view(z.shape)


def _broyden(function: Callable[[Tensor], Tensor], record: _Record, damping: float) -> None:
    shape = record.value.shape
    rows = (record.active.numel(), shape[-2] * shape[-1])  # one a system, as torchdeq wants it

    def observed(flat: Tensor) -> Tensor:
        z = flat.reshape(shape)
        if not bool(record.active.any()):
            return flat
        step = function(z) - z
        record.observe(z, step)
        # A system that is done shows no residual, which freezes it; when all are, torchdeq stops.
        step = torch.where(record.active[..., None, None], step, 0.0)
        return flat + damping * step.reshape(flat.shape)

    while record.running:
        start = torch.where(record.active[..., None, None], record.best, record.value)
        left = min(_RESTART, record.max_iterations - record.evaluations - 1)
        if left < 1:
            observed(start.reshape(rows))
            break
        # Nothing is below this tolerance but a batch of frozen systems.
        broyden_solver(observed, start.reshape(rows), max_iter=left, tol=1e-300)
