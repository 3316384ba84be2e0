r"""Kinetic mean field and TAP: parallel dynamics of averages, for any couplings.

The magnetization of a step is the average response to a fluctuating field,

.. math:: m_i(t+1) = \Big\langle \mu\big(\beta h_i + \sum_j K_{ij} S_j(t)\big) \Big\rangle,
          \qquad K = \beta J,

with :math:`\mu` the mean of one spin in a field. Expanded in K around spins that are independent at
times t and t + 1 (Plefka's expansion between two steps) it is, to first order, naive mean field,

.. math:: m_i(t+1) = \mu(\bar b_i),\qquad \bar b_i = \beta h_i + \sum_j K_{ij} m_j(t),

and to second order TAP, with the covariance :math:`V_i = \sum_j K_{ij}^2 C_j(t)` of the field and
its reaction on the spin,

.. math:: m_i(t+1) = \mu(\theta_i),\quad \theta_i = \bar b_i + O_i,\quad
          O_i = \tfrac12 \frac{\partial}{\partial m_i} \operatorname{tr}(V_i C_i)
              = \tfrac12 C_i^{-1} \nabla_\theta \operatorname{tr}(V_i C_i(\theta_i)) .

This is the second-order term of the average, :math:`\tfrac12 V : \nabla^2\mu`, moved inside: so the
magnetization stays in its ball. For Ising spins :math:`O_i = -m_i \sum_j K_{ij}^2 (1 - m_j(t)^2)`.
The sum over squared couplings does not ask for symmetry; where J is symmetric, the steady state is
the solution of the TAP equations of equilibrium.

Correlations between the spins i and j, without :math:`m_i\cdot m_j`, at the same two levels:

.. math::
    \langle S_i(t+1)\cdot S_j(t)\rangle &= K_{ij}\operatorname{tr}(C_i C_j)
        + \tfrac12 K_{ij}^2\, \kappa^i : \kappa^j, \\
    \langle S_i(t)\cdot S_j(t)\rangle_{i\ne j}
        &= \sum_k K_{ik} K_{jk} \operatorname{tr}(C_i C_k C_j), \\
    \langle S_i(t+2)\cdot S_j(t)\rangle &= \sum_k K_{ik} K_{kj} \operatorname{tr}(C_i C_k C_j),

with :math:`\kappa` the third cumulants of a spin. Naive mean field keeps the first order, the first
term of the first line. Errors of magnetizations and correlations are of second order in K in naive
mean field and of third in TAP, at every D.

Sources: Roudi & Hertz 2011, J. Stat. Mech. P03031 and Phys. Rev. Lett. 106, 048702; Aguilera,
Moosavi & Shimazaki 2021, Nat. Commun. 12, 1197 (Ising spins). The vector form is derived here.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from spinformer.dynamics.cumulants import (
    Cumulants,
    cubic,
    cumulants,
    reaction,
    two_bonds,
    weighted_bond,
)
from spinformer.dynamics.entropy_production import antisymmetric_flow
from spinformer.dynamics.protocol import Field, Protocol, Undergoing
from spinformer.dynamics.steady_state import (
    SteadyState,
    Transient,
    check_lag,
    check_step,
)
from spinformer.equilibrium.iteration import (
    check_initial,
    natural_size,
    refuse_overflow,
    within_rounding,
)
from spinformer.equilibrium.mean_field import MeanField
from spinformer.errors import OnFailure, check_choice, strict_options
from spinformer.solve.fixed_point import FixedPoint, FixedPointSolver
from spinformer.solve.linear import eigenvalues, solve_each
from spinformer.solve.solution import Solution
from spinformer.spins.site import Gaussian
from spinformer.spins.system import SpinSystem

__all__ = ["KineticMeanField", "KineticSteadyState", "KineticTAP", "KineticTransient"]

Initial = Literal["random", "ordered"]


class _State(NamedTuple):
    """Independent spins at one time: their means (..., N, D) and what they fluctuate."""

    mean: Tensor
    cumulants: Cumulants

    @classmethod
    def in_field(cls, system: SpinSystem, theta: Tensor) -> _State:
        """Spins in the fields theta (..., N, D)."""
        return cls(system.site.mean(theta), cumulants(system.site, theta, system.present))

    @classmethod
    def of_start(cls, system: SpinSystem, initial: Start) -> _State:
        """What :meth:`_Kinetic.run` begins with."""
        if isinstance(initial, KineticTransient):
            return initial.states[-1]._carried_to(system)
        if isinstance(initial, KineticSteadyState):
            return initial._state._carried_to(system)
        site, radius = system.site, system.site.radius
        mean = torch.zeros_like(system.field)
        if isinstance(initial, str):
            if check_choice("initial", initial, ("random", "ordered")) == "random":
                return cls.in_field(system, mean)
            mean[..., 0] = site.scale if radius is None else radius
            mean = check_initial(mean, system)
            full = torch.ones_like(mean[..., 0], dtype=torch.bool)
        else:
            mean = check_initial(initial, system)
            full = torch.zeros_like(mean[..., 0], dtype=torch.bool)
        if radius is not None:
            length = torch.linalg.vector_norm(mean.detach(), dim=-1)
            if bool((length > (1 + 1e-3) * radius).any()):
                raise ValueError(
                    f"initial has a magnetization of length {float(length.max()):.6g}: those of "
                    f"{site!r} are at most {radius:g} long; scale it"
                )
            full = full | (length > (1 - torch.finfo(mean.dtype).eps ** 0.5) * radius)
        if not bool(torch.isfinite(mean).all()):
            raise ValueError("initial holds NaN or infinity: magnetizations must be finite")
        b = site.inverse_response(torch.where(full[..., None], 0.0, mean))
        fluctuates = ~full if system.present is None else ~full & system.present
        return cls(mean, cumulants(site, b, fluctuates))

    def _carried_to(self, system: SpinSystem) -> _State:
        """The state of a run of the same systems, or of one that all of these begin with."""
        shape = system.field.shape
        tensors = (self.mean, *self.cumulants)
        shapes = (shape, shape, *[shape[:-1]] * 4)
        try:
            mean, *parts = (t.expand(s) for t, s in zip(tensors, shapes, strict=True))
        except RuntimeError as error:
            raise ValueError(
                f"initial is a result with magnetizations of shape {tuple(self.mean.shape)}: those "
                f"of the systems to go on with have {tuple(shape)}"
            ) from error
        if system.present is not None:
            mean = torch.where(system.present[..., None], mean, 0.0)
            parts[1:] = (torch.where(system.present, t, 0.0) for t in parts[1:])
        return _State(mean, Cumulants(*parts))


class _Kinetic(abc.ABC):
    """Parallel dynamics of averages to some order of the couplings."""

    order: int

    @abc.abstractmethod
    def steady_state(self, system: SpinSystem, initial: Tensor | None = None) -> KineticSteadyState:
        """A fixed point of the dynamics."""

    @abc.abstractmethod
    def _advance(self, mean_field: Tensor, system: SpinSystem, before: Cumulants) -> Tensor:
        """theta of the next step (..., N, D), from its first order and the spins before."""

    def _check(self, system: SpinSystem) -> None:  # noqa: B027 (naive mean field takes any)
        """Refuse what this level has no formula for."""

    def run(
        self, system: Undergoing, steps: int, initial: Start = "random", *, field: Field = None
    ) -> KineticTransient:
        """The averages of an ensemble that begins in one state.

        Args:
            system: what moves, or one a step.
            steps: how many, at least 1.
            initial: ``"random"``: free spins. ``"ordered"``: all along the first axis.
                Magnetizations that broadcast to (..., N, D): of independent spins in the field
                that has this mean; at their full length they are one configuration, which does not
                fluctuate. Or an earlier result, whose last state is carried on.
            field: a schedule of external fields
                (:class:`~spinformer.dynamics.steady_state.Protocol`).

        Raises:
            ConvergenceError: a step of KineticTAP without a solution, with ``on_failure="raise"``.
        """
        protocol = Protocol(system, steps, field)
        self._check(protocol.system)
        states = [_State.of_start(protocol.system, initial)]
        for current, external in protocol:
            last = states[-1]
            b = current.beta[..., None, None] * (external + current.couplings.apply(last.mean))
            theta = self._advance(b, current, last.cumulants)
            states.append(_State.in_field(current, theta))
        return KineticTransient(protocol, states, self.order)


@strict_options
class KineticMeanField(_Kinetic):
    r"""Naive mean field of parallel dynamics, :math:`m(t+1) = \mu(\beta h + K m(t))`.

    Any couplings and law. Errors are of second order in K; see
    :mod:`spinformer.dynamics.kinetic`. The steady state is that of :class:`~spinformer.MeanField`.
    A step costs one product with J.

    Args:
        solver, damping, tolerance, max_iterations, on_failure: of the steady state, as
            :class:`~spinformer.MeanField`.
    """

    order = 1

    def __init__(
        self,
        solver: FixedPointSolver = "plain",
        damping: float = 1.0,
        tolerance: float | None = None,
        max_iterations: int = 1000,
        on_failure: OnFailure = "raise",
    ) -> None:
        self._mean_field = MeanField(solver, damping, tolerance, max_iterations, on_failure)

    def steady_state(self, system: SpinSystem, initial: Tensor | None = None) -> KineticSteadyState:
        """Solve for the fixed point.

        Args:
            system: any couplings and law.
            initial: magnetizations to start from, as :meth:`spinformer.MeanField.solve`.

        Raises:
            ConvergenceError: with ``on_failure="raise"``. So it is where the dynamics itself does
                not come to rest; :meth:`run` follows it there.
        """
        answer = self._mean_field.solve(system, initial)
        theta = answer.system.beta[..., None, None] * answer.system.force(answer.solution.value)
        return KineticSteadyState(answer.system, theta, answer.solution, self.order, answer.broken)

    def _advance(self, mean_field: Tensor, system: SpinSystem, before: Cumulants) -> Tensor:
        return mean_field


@strict_options
class KineticTAP(_Kinetic):
    r"""Kinetic TAP equations: parallel dynamics with the Onsager reaction, for any scalar J.

    .. math:: m_i(t+1) = \mu(\theta_i),\qquad
              \theta_i = \beta h_i + \sum_j K_{ij} m_j(t) + O_i,\qquad
              O_i = \tfrac12 \sum_j K_{ij}^2 \frac{\partial}{\partial m_i(t+1)}
              \operatorname{tr}(C_i(t+1)\, C_j(t)) .

    Errors are of third order in K, of magnetizations and of correlations, and of fourth of the
    entropy production of a steady state, which is itself of second; see
    :mod:`spinformer.dynamics.kinetic`. J and its square are formed once, dense; an iteration costs
    a few products with matrices N x N.

    Args:
        solver, damping, tolerance, max_iterations, on_failure: of the steady state, as
            :class:`~spinformer.TAP`; its residual is the change of theta by one more iteration in
            units of its natural size. A step of :meth:`run` is an equation for every spin by
            itself, which Anderson mixing solves to the same tolerance.
    """

    order = 2

    def __init__(
        self,
        solver: FixedPointSolver = "plain",
        damping: float = 1.0,
        tolerance: float | None = None,
        max_iterations: int = 1000,
        on_failure: OnFailure = "raise",
    ) -> None:
        self.fixed_point = FixedPoint(solver, damping, tolerance, max_iterations, on_failure)

    def steady_state(self, system: SpinSystem, initial: Tensor | None = None) -> KineticSteadyState:
        """Solve for the fixed point.

        Args:
            system: any scalar couplings, symmetric or not, and any law.
            initial: magnetizations (..., N, D), inside their ball, whose force to start from; None
                is that of the spins without couplings.

        Raises:
            ConvergenceError: with ``on_failure="raise"``.
            ValueError: matrix-valued couplings.
        """
        self._check(system)
        options = within_rounding(self.fixed_point, system)
        if initial is not None:
            initial = check_initial(initial, system)
        system, broken = system.isolated()
        if broken is not None and initial is not None:
            initial = torch.where(broken[..., None, None], 0.0, initial)
        site, present = system.site, system.present
        dense = system.couplings.to_dense()
        beta = system.beta[..., None, None]
        with torch.no_grad():
            size = natural_size(site, (beta * dense).square(), beta * system.field)
            mean = site.mean(beta * system.field) if initial is None else initial
            start = beta * system.force(mean) / size

        def step(z: Tensor, matrix: Tensor, field: Tensor, factor: Tensor) -> Tensor:
            k = factor * matrix
            now = cumulants(site, size * z, present)
            push = factor * field + k @ (now.tau[..., None] * now.b)
            return (push + reaction(site, now, now, k.square())) / size

        solution = options.solve(step, start, (dense, system.field, beta), check=False)
        with torch.no_grad():
            solution = refuse_overflow(solution, beta * dense, beta * system.field)
        state = KineticSteadyState(system, size * solution.value, solution, self.order, broken)
        options.check(state.solution)
        return state

    def _advance(self, mean_field: Tensor, system: SpinSystem, before: Cumulants) -> Tensor:
        site, present = system.site, system.present
        if isinstance(site, Gaussian):
            return mean_field
        square = (system.beta[..., None, None] * system.couplings.to_dense()).square()
        with torch.no_grad():
            size = natural_size(site, square, mean_field)
            # A reaction -v m, right for isotropic variances v, is solved for: what is left of the
            # map contracts where the undamped one would oscillate.
            variance = (square @ before.trace[..., None]) / site.dim
            tau = cumulants(site, mean_field, present).tau[..., None]
            start = mean_field / (1 + tau * variance) / size

        def step(z: Tensor, external: Tensor, weights: Tensor, *spins: Tensor) -> Tensor:
            now = cumulants(site, size * z.squeeze(-2), present)
            theta = external + reaction(site, now, Cumulants(*spins), weights)
            damping = 1 / (1 + now.tau.detach()[..., None] * variance)
            return z + damping[..., None] * ((theta / size).unsqueeze(-2) - z)

        # Every spin is a system of its own, which stops when it is done.
        tolerance = within_rounding(self.fixed_point, system).tolerance
        local = FixedPoint("anderson", 1.0, tolerance, self.fixed_point.max_iterations)
        solution = local.solve(
            step, start.unsqueeze(-2), (mean_field, square, *before), check=False
        )
        solution.check(
            self.fixed_point.on_failure,
            "the step of KineticTAP, an equation for every spin",
            "The couplings are too strong for an expansion in them: lower beta, or use "
            "ParallelDynamics. A residual that is not a number comes from beta J too large for "
            "its square.",
        )
        return size * solution.value.squeeze(-2)

    def _check(self, system: SpinSystem) -> None:
        if system.couplings.dim is not None:
            raise ValueError(
                "KineticTAP needs scalar couplings (..., N, N), and these are matrix-valued: use "
                "KineticMeanField()"
            )


def _delayed(system: SpinSystem, now: Cumulants, before: Cumulants, order: int) -> Tensor:
    """<S_i' . S_j> of neighbouring steps without the product of the means, (..., N, N)."""
    if system.couplings.dim is not None:
        k = system.beta[..., None, None, None, None] * system.couplings.to_dense()
        return torch.einsum("...iab,...ijbc,...jca->...ij", _matrix(now), k, _matrix(before))
    k = system.beta[..., None, None] * system.couplings.to_dense()
    linear = weighted_bond(k, now, before)
    return linear if order == 1 else linear + k.square() * cubic(now, before) / 2


def _equal_time(
    system: SpinSystem, mean: Tensor, now: Cumulants, before: Cumulants, order: int
) -> Tensor:
    """<S_i . S_j> of one step without the product of the means, (..., N, N)."""
    own = now.trace
    if order == 1:
        pairs = torch.zeros_like(mean @ mean.mT)
    else:
        k = system.beta[..., None, None] * system.couplings.to_dense()
        pairs = two_bonds(k, k.mT, now, before)
        own = own + pairs.diagonal(dim1=-2, dim2=-1)
    if system.site.radius is not None:
        # Known whatever the fluctuations are.
        own = system.site.radius**2 - mean.square().sum(-1)
        own = own if system.present is None else torch.where(system.present, own, 0.0)
    return torch.diagonal_scatter(pairs, own, dim1=-2, dim2=-1)


def _antisymmetric(system: SpinSystem, now: Cumulants, before: Cumulants, order: int) -> Tensor:
    r""":math:`\beta\sum_{ij}(J_{ij} - J_{ji})` times :func:`_delayed`, (...)."""
    if system.couplings.is_symmetric:
        return torch.zeros_like(system.beta)
    dense = system.couplings.to_dense()
    beta = system.beta
    if system.couplings.dim is None:
        pairs = (dense - dense.mT) * _delayed(system, now, before, order)
        return beta * pairs.sum((-2, -1))
    # <S_i' S_j^T> = C_i K_ij C_j, and the antisymmetric part of blocks is transposed inside, too.
    left, right = _matrix(now), _matrix(before)
    flow = torch.einsum("...iab,...ijbc,...jcd->...ijad", left, dense, right)
    return beta**2 * ((dense - dense.transpose(-4, -3).mT) * flow).sum((-4, -3, -2, -1))


def _matrix(spins: Cumulants) -> Tensor:
    """C, (..., N, D, D)."""
    eye = torch.eye(spins.b.shape[-1], dtype=spins.b.dtype, device=spins.b.device)
    outer = spins.b[..., :, None] * spins.b[..., None, :]
    return spins.tau[..., None, None] * eye + spins.w[..., None, None] * outer


class KineticSteadyState(SteadyState):
    """A fixed point of a kinetic equation, with correlations to its order.

    Attributes:
        solution: the evidence: residual, iterations and converged, one entry per system.
        theta: the field whose response is the magnetization, (..., N, D).
        order: of the expansion in the couplings, 1 or 2.
        broken: systems that were given with NaN or infinity (...) bool, or None.
    """

    def __init__(
        self,
        system: SpinSystem,
        theta: Tensor,
        solution: Solution,
        order: int,
        broken: Tensor | None,
    ) -> None:
        self.system, self.theta, self.order, self.broken = system, theta, order, broken
        self.solution = solution
        if broken is not None:
            self.solution = dataclasses.replace(
                solution,
                residual=torch.where(broken, torch.nan, solution.residual),
                converged=solution.converged & ~broken,
            )

    @property
    def converged(self) -> Tensor:
        """Which systems converged, (...) bool."""
        return self.solution.converged

    @property
    def _state(self) -> _State:
        return _State.in_field(self.system, self.theta)

    def _hide(self, answer: Tensor, trailing: int) -> Tensor:
        if self.broken is None:
            return answer
        return answer.masked_fill(self.broken[(..., *[None] * trailing)], torch.nan)

    @property
    def magnetization(self) -> Tensor:
        return self._hide(self._state.mean, 2)

    def spectral_radius(self) -> Tensor:
        r"""Largest modulus of the eigenvalues of a step's derivative, (...).

        Below one, the dynamics itself returns from small deviations, shrinking them by this factor
        a step; above, a solver was drawn to a fixed point that :meth:`KineticTAP.run` would leave.
        With :math:`\theta' = F(\theta', \theta)` the derivative is
        :math:`(1 - \partial F/\partial\theta')^{-1}\, \partial F/\partial\theta`.
        O((N D)^3) a system.
        """
        system, shape = self.system, self.theta.shape
        if not self.theta.numel():
            return torch.zeros_like(system.beta)
        beta = system.beta.detach()[..., None, None]
        with torch.enable_grad():
            now, before = (self.theta.detach().clone().requires_grad_() for _ in range(2))
            answer = beta * system.force(system.site.mean(before))
            if self.order > 1:
                left, right = (cumulants(system.site, x, system.present) for x in (now, before))
                square = (beta * system.couplings.to_dense()).square()
                answer = answer + reaction(system.site, left, right, square)
            # Systems are independent: a row of all of their derivatives at once.
            rows = [
                torch.autograd.grad(
                    answer.flatten(-2)[..., row].sum(),
                    (now, before),
                    retain_graph=True,
                    materialize_grads=True,
                )
                for row in range(shape[-2] * shape[-1])
            ]
        own, other = (torch.stack([r[i].flatten(-2) for r in rows], -2) for i in range(2))
        identity = torch.eye(own.shape[-1], dtype=own.dtype, device=own.device)
        return self._hide(eigenvalues(solve_each(identity - own, other)).abs().amax(-1), 0)

    @property
    def entropy_production(self) -> Tensor:
        spins = self._state.cumulants
        return self._hide(_antisymmetric(self.system, spins, spins, self.order), 0)

    def delayed_correlations(self, lag: int = 1, *, connected: bool = False) -> Tensor:
        """To the order of the level: beyond ``order`` steps there are none."""
        mean, spins = self._state
        lag = check_lag(lag)
        if lag == 0:
            pairs = _equal_time(self.system, mean, spins, spins, self.order)
        elif lag > self.order:
            pairs = torch.zeros_like(mean @ mean.mT)
        elif lag == 1:
            pairs = _delayed(self.system, spins, spins, self.order)
        else:
            k = self.system.beta[..., None, None] * self.system.couplings.to_dense()
            pairs = two_bonds(k, k, spins, spins)
        return self._hide(pairs if connected else pairs + mean @ mean.mT, 2)


class KineticTransient(Transient):
    """The averages of an ensemble, step by step.

    Attributes:
        states: means and cumulants of independent spins, at the start and after every step.
        order: of the expansion in the couplings, 1 or 2.
    """

    def __init__(self, protocol: Protocol, states: Sequence[_State], order: int) -> None:
        self.protocol, self.states, self.order = protocol, states, order

    @property
    def magnetization(self) -> Tensor:
        means = torch.stack([state.mean for state in self.states])
        return self.protocol.hide_broken(means, 2)

    def correlations(self, step: int, *, connected: bool = False) -> Tensor:
        """<S_i . S_j> after a step (1 ... steps), (..., N, N)."""
        system, before, now = self._around(step)
        pairs = _equal_time(system, now.mean, now.cumulants, before.cumulants, self.order)
        pairs = pairs if connected else pairs + now.mean @ now.mean.mT
        return self.protocol.hide_broken(pairs, 2)

    def delayed_correlations(self, step: int, *, connected: bool = False) -> Tensor:
        """<S_i . S_j> of S after a step (1 ... steps) and before it, (..., N, N)."""
        system, before, now = self._around(step)
        pairs = _delayed(system, now.cumulants, before.cumulants, self.order)
        pairs = pairs if connected else pairs + now.mean @ before.mean.mT
        return self.protocol.hide_broken(pairs, 2)

    @property
    def entropy_flow(self) -> Tensor:
        r"""As :attr:`Transient.entropy_flow`, to the order of the level, (steps, ...).

        The average of L is that of the means, with half the variance of its fields,
        :math:`\tfrac12 \sum_i \operatorname{tr}(V_i C_i)`, in second order.
        """
        flows = []
        for step, (system, external) in enumerate(self.protocol):
            before, now = self.states[step], self.states[step + 1]
            flow = antisymmetric_flow(system, now.mean, before.mean) + _antisymmetric(
                system, now.cumulants, before.cumulants, self.order
            )
            change = self._log_weight(system, external, now) - self._log_weight(
                system, external, before
            )
            flows.append(flow + change)
        return self.protocol.hide_broken(torch.stack(flows), 0)

    def _log_weight(self, system: SpinSystem, external: Tensor, state: _State) -> Tensor:
        """<L> of independent spins."""
        beta = system.beta[..., None, None]
        b = beta * (external + system.couplings.apply(state.mean))
        own = system.beta * (external * state.mean).sum((-2, -1))
        weight = own + system.site.log_partition(b).sum(-1)
        if self.order == 1:
            return weight
        square = (beta * system.couplings.to_dense()).square()
        spins = cumulants(system.site, b, system.present)
        return weight + weighted_bond(square, spins, state.cumulants).sum((-2, -1)) / 2

    def _around(self, step: int) -> tuple[SpinSystem, _State, _State]:
        check_step(self.protocol, step)
        return self.protocol[step - 1][0], self.states[step - 1], self.states[step]


Start = Initial | Tensor | KineticTransient | KineticSteadyState
