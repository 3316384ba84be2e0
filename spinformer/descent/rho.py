"""The concave profiles rho of pairwise energies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from spinformer.errors import check_choice


@dataclass(frozen=True)
class Rho:
    """A concave, non-decreasing profile ``rho(z)`` of ``z = |y_i - y_j|^2 / 2 >= 0``.

    Concavity makes its tangent in ``z`` an upper bound, which is quadratic in ``y``: that is why a
    step of the re-weighted average ``W_ij = rho'(z_ij)`` descends.

    Attributes:
        value: ``rho``, elementwise.
        derivative: ``rho'``, elementwise, non-negative and non-increasing.
        completely_monotone: ``rho'`` is a completely monotone function of ``z`` (a mixture of
            ``exp(-s z)``), so that every kernel matrix W is positive semi-definite (Schoenberg),
            which doubles the step that is known to descend. Leave False if in doubt.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    completely_monotone: bool = False


def _exp(z: Tensor) -> Tensor:
    return -torch.exp(-z)


def _exp_derivative(z: Tensor) -> Tensor:
    return torch.exp(-z)


def _log2p(z: Tensor) -> Tensor:
    return torch.log(2.0 + z)


def _log1p_derivative(z: Tensor) -> Tensor:
    return 1.0 / (1.0 + z)


def _log2p_derivative(z: Tensor) -> Tensor:
    return 1.0 / (2.0 + z)


# Plain functions, not lambdas: an energy, and a module that holds one, can then be pickled.
RHOS: MappingProxyType[str, Rho] = MappingProxyType(
    {
        "exp": Rho(_exp, _exp_derivative, completely_monotone=True),
        "log1p": Rho(torch.log1p, _log1p_derivative, completely_monotone=True),
        "log2p": Rho(_log2p, _log2p_derivative, completely_monotone=True),
    }
)


def as_rho(rho: str | Rho) -> Rho:
    """The profile of a name, ``"exp"``, ``"log1p"`` or ``"log2p"``; a :class:`Rho` as it is."""
    return rho if isinstance(rho, Rho) else RHOS[check_choice("rho", rho, tuple(RHOS))]
