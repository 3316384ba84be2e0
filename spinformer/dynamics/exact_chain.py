r"""Parallel dynamics of few Ising spins without any error: the Markov chain of all 2^N states.

.. math:: p_{t+1}(S') = \sum_S W(S'|S)\, p_t(S),\qquad
          W(S'|S) = \prod_i \frac{e^{b_i(S) S'_i}}{2\cosh b_i(S)} .

The stationary law is Peretto's closed form (:func:`~spinformer.dynamics.peretto_log_weight`) for
symmetric J, the null vector of 1 - W otherwise. Everything is differentiable in J, h and beta.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from spinformer.dynamics.entropy_production import antisymmetric_flow, peretto_log_weight
from spinformer.dynamics.protocol import Field, Protocol, Undergoing
from spinformer.dynamics.steady_state import (
    SteadyState,
    Transient,
    check_lag,
    check_step,
    present_pairs,
)
from spinformer.errors import check_choice, strict_options
from spinformer.solve.linear import solve_each
from spinformer.spins.site import Ising
from spinformer.spins.system import SpinSystem

__all__ = ["ExactDynamics", "ExactSteadyState", "ExactTransient", "all_states"]


@strict_options
class ExactDynamics:
    r"""The parallel dynamics of at most ``max_spins`` Ising spins, by its transition matrix.

    A matrix of :math:`4^N` numbers a system: 8 MB at N = 10. The stationary law of asymmetric
    couplings takes :math:`O(8^N)`, a step :math:`O(4^N)`. Errors are rounding; of the stationary
    law of asymmetric couplings rounding times the number of steps in which the slowest deviation
    decays, which is refused where it takes half of the digits.

    Args:
        max_spins: largest N.
    """

    def __init__(self, max_spins: int = 12) -> None:
        if not isinstance(max_spins, int) or not 1 <= max_spins <= 14:
            raise ValueError(f"max_spins={max_spins!r}: give 1 ... 14 (14 spins take 2 GB)")
        self.max_spins = max_spins

    def steady_state(self, system: SpinSystem) -> ExactSteadyState:
        """The stationary law.

        Args:
            system: Ising spins, any couplings and batch.

        Raises:
            ValueError: other spins, or too many.

        Its answers raise ``ValueError`` where asymmetric couplings are too cold for the stationary
        law to be known.
        """
        self._check(system)
        return ExactSteadyState(*system.isolated())

    def run(
        self,
        system: Undergoing,
        steps: int,
        initial: Start = "random",
        *,
        field: Field = None,
    ) -> ExactTransient:
        """The ensemble of all runs from one start.

        Args:
            system: what moves, or one a step.
            steps: how many.
            initial: ``"random"``: free spins. ``"ordered"``: all up. Means of independent spins
                (..., N, 1), where +1 and -1 are spins themselves. An earlier result, whose last
                law is carried on. Or the law of a start, (..., 2^N), in the order of
                :func:`all_states`.
            field: a schedule of external fields
                (:class:`~spinformer.dynamics.steady_state.Protocol`).
        """
        protocol = Protocol(system, steps, field)
        self._check(protocol.system)
        law = self._start(protocol.system, initial)
        laws = [law]
        for current, external in protocol:
            law = (_transition(current, external) @ law[..., None])[..., 0]
            laws.append(law)
        return ExactTransient(protocol, protocol.hide_broken(torch.stack(laws), 1))

    def _check(self, system: SpinSystem) -> None:
        if not isinstance(system.site, Ising):
            raise ValueError(
                f"ExactDynamics enumerates Ising spins, not {system.site!r}: use ParallelDynamics"
            )
        if system.num_spins > self.max_spins:
            raise ValueError(
                f"{system.num_spins} spins have {2**system.num_spins} states: the exact chain "
                f"takes at most {self.max_spins} spins; use ParallelDynamics"
            )

    def _start(self, system: SpinSystem, initial: Start) -> Tensor:
        states = 2**system.num_spins
        shape = (*system.batch_shape, states)
        if isinstance(initial, ExactTransient):
            initial = initial.laws[-1]
        elif isinstance(initial, ExactSteadyState):
            initial = initial.law
        if isinstance(initial, str):
            check_choice("initial", initial, ("random", "ordered"))
            initial = torch.full_like(system.field, float(initial == "ordered"))
        if not isinstance(initial, Tensor):
            raise TypeError(f"initial must be a tensor, not {type(initial).__name__}")
        initial = initial.to(system.field.dtype)
        if initial.shape[-2:] == (system.num_spins, 1):
            mean = initial[..., 0]
            if not bool((mean.abs() <= 1).all()):
                raise ValueError(
                    f"initial holds a spin of {float(mean.abs().max()):g}: those of Ising are +1 "
                    "or -1, and their means in between"
                )
            if system.mask is not None:
                mean = torch.where(system.mask, 0.0, mean)
            law = ((1 + all_states(system)[..., 0] * mean[..., None, :]) / 2).prod(-1)
        else:
            law = initial
            # Single precision's: adding up 2^14 numbers takes a few of its digits.
            if law.shape[-1:] != (states,) or bool((law.sum(-1) - 1).abs().max() > 1e-5):
                raise ValueError(
                    f"initial of shape {tuple(law.shape)} is neither spins (..., "
                    f"{system.num_spins}, 1) nor a law (..., {states}) that adds up to one"
                )
        try:
            return law.expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"initial is of systems {tuple(law.shape[:-1])}, which do not broadcast to "
                f"{tuple(system.batch_shape)}"
            ) from error


def all_states(system: SpinSystem) -> Tensor:
    """All configurations (2^N, N, 1); spin i of state s is up if bit i of s is set."""
    index = torch.arange(2**system.num_spins, device=system.field.device)
    bits = index[:, None] >> torch.arange(system.num_spins, device=index.device) & 1
    return (2 * bits - 1).to(system.field.dtype)[..., None]


def _fields(system: SpinSystem, external: Tensor) -> Tensor:
    """b_i(S) of all states, (..., 2^N, N); an absent spin is free and sees nothing."""
    states = all_states(system)
    batch = len(system.batch_shape)
    states = states.reshape(len(states), *[1] * batch, *states.shape[1:])
    force = external + system.couplings.apply(states)
    return (system.beta[..., None, None] * force)[..., 0].movedim(0, -2)


def _transition(system: SpinSystem, external: Tensor) -> Tensor:
    """W (..., S', S)."""
    b = _fields(system, external)
    # log(2 cosh b), without overflow.
    normalizer = torch.logaddexp(b, -b).sum(-1)
    log: Tensor = all_states(system)[..., 0] @ b.mT - normalizer[..., None, :]
    return log.exp()


def _present_states(system: SpinSystem) -> Tensor:
    """All states with zeros at absent sites, (..., 2^N, N)."""
    states = all_states(system)[..., 0]
    if system.present is None:
        return states
    return states * system.present[..., None, :]


def _mean(system: SpinSystem, law: Tensor) -> Tensor:
    return (law[..., None, :] @ _present_states(system)).mT


def _relative_entropy(law: Tensor) -> Tensor:
    """Shannon's entropy relative to free spins."""
    logs = torch.where(law > 0, law, 1.0).log()
    return -(law * logs).sum(-1) - math.log(law.shape[-1])


class ExactSteadyState(SteadyState):
    """The stationary law of all states and what follows from it.

    Attributes:
        broken: systems that were given with NaN or infinity (...) bool, or None: theirs is NaN.
    """

    def __init__(self, system: SpinSystem, broken: Tensor | None = None) -> None:
        self.system = system
        self.broken = broken

    @cached_property
    def transition(self) -> Tensor:
        r""":math:`W(S'|S)`, (..., 2^N, 2^N): columns add up to one."""
        return _transition(self.system, self.system.field)

    @cached_property
    def law(self) -> Tensor:
        """pi(S), (..., 2^N), in the order of :func:`all_states`."""
        if self.system.couplings.is_symmetric:
            return self.log_law.exp()
        # pi = W pi and sum pi = 1 in one: adding u 1^T, u uniform, moves the zero of 1 - W to 1.
        size = self.transition.shape[-1]
        identity = torch.eye(size, dtype=self.transition.dtype, device=self.transition.device)
        # A deviation from pi, put in at every step, adds up to what its slowest part leaves over.
        put_in = torch.linspace(-1, 1, size, dtype=identity.dtype, device=identity.device) / size
        right = torch.stack((torch.full_like(put_in, 1 / size), put_in), -1)
        right = right.expand(*self.transition.shape[:-1], 2)
        try:
            law, sums = solve_each(identity - self.transition + 1 / size, right).unbind(-1)
            slowest = float(sums.detach().abs().sum(-1).max() / put_in.abs().sum())
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            slowest = math.inf
        if not slowest * torch.finfo(identity.dtype).eps ** 0.5 < 1:
            raise ValueError(
                f"deviations from the stationary law decay in {slowest:.3g} steps: too many to "
                f"know it in {identity.dtype}. Raise the temperature, or follow the law by run()"
            )
        return self._hide(law)

    @cached_property
    def log_law(self) -> Tensor:
        """log pi(S), (..., 2^N): for symmetric couplings Peretto's, with all digits."""
        if not self.system.couplings.is_symmetric:
            return self.law.log()
        states = all_states(self.system)
        batch = len(self.system.batch_shape)
        states = states.reshape(len(states), *[1] * batch, *states.shape[1:])
        weight = peretto_log_weight(self.system, states)
        return self._hide(torch.log_softmax(weight.movedim(0, -1), -1))

    def _hide(self, law: Tensor) -> Tensor:
        return law if self.broken is None else law.masked_fill(self.broken[..., None], torch.nan)

    @cached_property
    def residual(self) -> Tensor:
        r"""Largest :math:`|W\pi - \pi|`, (...)."""
        change = (self.transition @ self.law[..., None])[..., 0] - self.law
        return change.abs().amax(-1)

    @property
    def magnetization(self) -> Tensor:
        return _mean(self.system, self.law)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the law relative to free spins, (...)."""
        return _relative_entropy(self.law)

    @property
    def entropy_production(self) -> Tensor:
        if self.system.couplings.is_symmetric:
            return torch.zeros_like(self.system.beta)
        # sum_ij beta (J_ij - J_ji) D_ij needs no log W, which underflows in cold systems.
        couplings = self.system.couplings.to_dense()
        if self.system.couplings.dim is not None:
            couplings = couplings[..., 0, 0]
        pairs = (couplings - couplings.mT) * self.delayed_correlations(1)
        return self.system.beta * pairs.sum((-2, -1))

    def delayed_correlations(self, lag: int = 1, *, connected: bool = False) -> Tensor:
        states = _present_states(self.system)
        joint = states.mT * self.law[..., None, :]  # (..., N, 2^N): pi(S) S_j
        for _ in range(check_lag(lag)):
            joint = joint @ self.transition.mT
        correlations = (joint @ states).mT
        if connected:
            m = self.magnetization
            correlations = correlations - m @ m.mT
        return present_pairs(self.system, correlations)


class ExactTransient(Transient):
    """The law of all states, step by step.

    Attributes:
        laws: (steps + 1, ..., 2^N).
    """

    def __init__(self, protocol: Protocol, laws: Tensor) -> None:
        self.protocol = protocol
        self.laws = laws

    @property
    def magnetization(self) -> Tensor:
        return _mean(self.protocol.system, self.laws)

    def correlations(self, step: int, *, connected: bool = False) -> Tensor:
        """<S_i . S_j> after a step (1 ... steps), (..., N, N)."""
        after = self.laws[check_step(self.protocol, step)]
        states = _present_states(self.protocol.system)
        pairs = (states.mT * after[..., None, :]) @ states
        return self._pairs(pairs, step, step, connected)

    def delayed_correlations(self, step: int, *, connected: bool = False) -> Tensor:
        """<S_i . S_j> of S after a step (1 ... steps) and before it, (..., N, N)."""
        before = self.laws[check_step(self.protocol, step) - 1]
        states = _present_states(self.protocol.system)
        joint = (states.mT * before[..., None, :]) @ _transition(*self.protocol[step - 1]).mT
        return self._pairs((joint @ states).mT, step, step - 1, connected)

    def _pairs(self, pairs: Tensor, after: int, before: int, connected: bool) -> Tensor:
        if connected:
            m = self.magnetization
            pairs = pairs - m[after] @ m[before].mT
        return pairs

    @property
    def entropy(self) -> Tensor:
        """Entropy of the ensemble relative to free spins, (steps + 1, ...)."""
        return _relative_entropy(self.laws)

    @cached_property
    def entropy_flow(self) -> Tensor:
        flows = []
        for t, (system, external) in enumerate(self.protocol):
            b = _fields(system, external)
            states = all_states(system)[..., 0]
            weight = torch.logaddexp(b, -b).sum(-1)
            if system.present is not None:
                states = states * system.present[..., None, :]
            weight = weight + system.beta[..., None] * (states @ external).squeeze(-1)
            change = (weight * (self.laws[t + 1] - self.laws[t])).sum(-1)
            # The mean of S' at given S: the flow is linear in S'.
            batch = len(system.batch_shape)
            before = all_states(system).reshape(-1, *[1] * batch, system.num_spins, 1)
            after = torch.tanh(b)[..., None].movedim(-3, 0)
            flow = antisymmetric_flow(system, after, before).movedim(0, -1)
            flows.append(change + (flow * self.laws[t]).sum(-1))
        return torch.stack(flows)

    @property
    def entropy_production(self) -> Tensor:
        """Flow to the bath plus the ensemble's own gain, (steps, ...): never negative."""
        return self.entropy_flow + self.entropy.diff(dim=0)


Start = Literal["random", "ordered"] | Tensor | ExactTransient | ExactSteadyState
