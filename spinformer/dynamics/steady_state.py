"""What every kind of parallel dynamics returns: a steady state, or the way there.

Sampled, exact and mean-field dynamics answer the same questions, so that they can be swapped and
compared: :class:`SteadyState` and :class:`Transient` are the questions.
"""

from __future__ import annotations

import abc
from functools import cached_property

import torch
from torch import Tensor

from spinformer.dynamics.protocol import Protocol
from spinformer.spins.system import SpinSystem

__all__ = ["SteadyState", "Transient", "check_lag", "check_step", "present_pairs"]


class SteadyState(abc.ABC):
    r"""A stationary law of parallel dynamics, :math:`\langle\cdot\rangle` below.

    Couplings need not be symmetric; where they aren't, there is a current in the space of states
    and no free energy.

    Attributes:
        system: what is at rest.
    """

    system: SpinSystem

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.system!r})"

    @property
    @abc.abstractmethod
    def magnetization(self) -> Tensor:
        """m_i = <S_i>, (..., N, D); zero at absent sites."""

    @property
    @abc.abstractmethod
    def entropy_production(self) -> Tensor:
        r"""Entropy that a step makes, (...), in units of k_B; zero for symmetric couplings.

        .. math:: \sigma = \Big\langle \log\frac{W(S'|S)}{W(S|S')} \Big\rangle
                  = \beta \sum_{ij} (J_{ij} - J_{ji}) \langle S_i(t+1)\cdot S_j(t)\rangle ,

        as the fields and the normalizers of W give to a difference of one-time averages, which
        vanishes at rest.
        """

    @abc.abstractmethod
    def delayed_correlations(self, lag: int = 1, *, connected: bool = False) -> Tensor:
        r""":math:`\langle S_i(t + \text{lag})\cdot S_j(t)\rangle`, (..., N, N).

        Args:
            lag: steps between the two, at least 0.
            connected: without the product :math:`m_i\cdot m_j`.
        """

    def correlations(self, *, connected: bool = False) -> Tensor:
        r"""Equal-time correlations :math:`\langle S_i\cdot S_j\rangle`, (..., N, N).

        Args:
            connected: without the product :math:`m_i\cdot m_j`.
        """
        return self.delayed_correlations(0, connected=connected)


class Transient(abc.ABC):
    r"""The averages over an ensemble of runs from one start, step by step.

    Attributes:
        protocol: the systems and fields of the steps.
    """

    protocol: Protocol

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.protocol.system!r}, steps={len(self.protocol)})"

    @property
    @abc.abstractmethod
    def magnetization(self) -> Tensor:
        """m_i(t), (steps + 1, ..., N, D), from the start on."""

    @property
    @abc.abstractmethod
    def entropy_flow(self) -> Tensor:
        r"""Entropy that step t gives to the heat bath, (steps, ...).

        .. math:: \Big\langle \log\frac{W_t(S'|S)}{W_t(S|S')} \Big\rangle
                  = \langle L_t(S')\rangle - \langle L_t(S)\rangle
                  + \beta\sum_{ij}(J_{ij} - J_{ji})\langle S'_i\cdot S_j\rangle,

        with S = S(t), S' = S(t+1) and L the :func:`~spinformer.dynamics.peretto_log_weight`. With
        what the Shannon entropy of the ensemble itself gains it makes up the entropy production of
        the step, which is never negative; this part of it can be measured on trajectories.
        """

    @property
    def moment(self) -> Tensor:
        """The total moment sum_i m_i(t), (steps + 1, ..., D)."""
        return self.magnetization.sum(-2)

    @cached_property
    def fields(self) -> Tensor:
        """h(t), (steps, ..., N, D), in which step t was taken."""
        return torch.stack([field for _, field in self.protocol])

    @property
    def work(self) -> Tensor:
        r"""Work done on a system when its field changes, (steps - 1, ...).

        :math:`-\sum_i (h_i(t+1) - h_i(t))\cdot m_i(t+1)`, between step t and the next. Over the
        last cycle of a periodic field, ``work[-period:].sum(0)``, it adds up to the area of the
        hysteresis loop.
        """
        return -(self.fields.diff(dim=0) * self.magnetization[1:-1]).sum((-2, -1))


def check_step(protocol: Protocol, step: int) -> int:
    """A step of a run, 1 ... steps."""
    if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= len(protocol):
        raise ValueError(f"step={step!r}: give 1 ... {len(protocol)}")
    return step


def check_lag(lag: int) -> int:
    """The lag of a delayed correlation."""
    if not isinstance(lag, int) or isinstance(lag, bool) or lag < 0:
        raise ValueError(f"lag={lag!r}: a delay is an integer number of steps >= 0")
    return lag


def present_pairs(system: SpinSystem, matrix: Tensor) -> Tensor:
    """A matrix of pairs (..., N, N), zero at absent sites."""
    if system.mask is None:
        return matrix
    return matrix.masked_fill(system.mask[..., :, None] | system.mask[..., None, :], 0.0)
