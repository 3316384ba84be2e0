"""The position-wise energies: a linear layer, and a two-layer network that shares its matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class FeedForwardEnergy:
    r"""The energy that a position-wise linear layer descends.

    .. math::
        E(Y) = \frac12 \mathrm{tr}(Y W_f Y^T) + \frac12 |Y|^2 - \sum_i b \cdot y_i

    An energy sees the symmetric part ``S = (W_f + W_f^T) / 2`` only. A step of size a is the linear
    layer ``Y ((1 - a) I - a S) + a b``. The energy is bounded below if and only if ``I + S`` is
    positive semi-definite; below the step bound a step descends in any case.

    Source: Yang, Huang & Wipf (2022), section 3.2, with a bias. Cost: O(N d^2).

    Args:
        weight: ``W_f``, ``(d, d)``.
        bias: ``b``, ``(d,)``; None for zero.

    Raises:
        ValueError: a weight that is not square.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dim() != 2 or weight.shape[0] != weight.shape[1]:
            raise ValueError(f"weight has shape {tuple(weight.shape)}: it must be square, (d, d)")
        self.weight = weight
        self.bias = bias

    @property
    def symmetric_weight(self) -> Tensor:
        """``S``, the part of the weight that the energy sees."""
        return (self.weight + self.weight.mT) / 2

    def curvature(self) -> tuple[Tensor, Tensor]:
        """The least and the largest eigenvalue of the Hessian ``I + S``."""
        eigenvalues = torch.linalg.eigvalsh(self.symmetric_weight)
        return 1 + eigenvalues[0], 1 + eigenvalues[-1]

    def step_bound(self) -> Tensor:
        """The largest step that cannot raise the energy, ``2 / L`` with L the largest eigenvalue.

        Infinite where no direction curves upwards.
        """
        _, largest = self.curvature()
        return torch.where(largest > 0, 2 / largest, torch.inf)

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``E(Y)``, ``(...)``: the total of each system.

        Args:
            Y: tokens ``(..., N, d)``.
            mask: boolean ``(..., N)``, True where there is no token.
        """
        state = _clear(Y, mask)
        quadratic = ((state @ self.symmetric_weight + state) * state).sum((-2, -1)) / 2
        return quadratic if self.bias is None else quadratic - (state @ self.bias).sum(-1)

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``dE/dY = Y (I + S) - b``, ``(..., N, d)``; zero where there is no token."""
        state = _clear(Y, mask)
        slope = state @ self.symmetric_weight + state
        return _clear(slope if self.bias is None else slope - self.bias, mask)

    def step(self, Y: Tensor, size: float | Tensor, mask: Tensor | None = None) -> Tensor:
        """``Y - size * gradient``, ``(..., N, d)``."""
        return _clear(Y, mask) - size * self.gradient(Y, mask)


class MemoryEnergy:
    r"""The energy that a two-layer network with one matrix descends.

    .. math::
        E(Y) = \frac12 |Y|^2 - \sum_i b \cdot y_i
               - \frac12 \sum_{i\mu} \mathrm{relu}(\xi_\mu \cdot y_i + c_\mu)^2

    A step of size a is ``(1 - a) Y + a (relu(Y xi^T + c) xi + b)``: hidden units that are written
    back by the patterns that read them, at a = 1 without the token itself. The Hessian never
    exceeds the identity, so that every ``0 < a <= 2`` descends whatever the patterns are; the
    energy is bounded below if ``|xi|_2 < 1``.

    Source: the Hopfield energy of Hoover et al. (2023), with offsets and ``|Y|^2 / 2``.
    Cost: O(N d K) for K patterns.

    Args:
        patterns: ``xi``, ``(K, d)``.
        offset: ``c``, ``(K,)``; None for zero.
        bias: ``b``, ``(d,)``; None for zero.

    Raises:
        ValueError: patterns that are not a matrix.
    """

    def __init__(
        self, patterns: Tensor, offset: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        if patterns.dim() != 2:
            raise ValueError(
                f"patterns has shape {tuple(patterns.shape)}: pass one pattern a row, (K, d)"
            )
        self.patterns = patterns
        self.offset = offset
        self.bias = bias

    def step_bound(self) -> float:
        """The largest step that cannot raise the energy."""
        return 2.0

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``E(Y)``, ``(...)``: the total of each system.

        Args:
            Y: tokens ``(..., N, d)``.
            mask: boolean ``(..., N)``, True where there is no token.
        """
        state = _clear(Y, mask)
        stored = self._overlap(state).square()
        if mask is not None:
            # An absent token overlaps by the offset.
            stored = stored.masked_fill(mask.unsqueeze(-1), 0.0)
        total = (state.square().sum((-2, -1)) - stored.sum((-2, -1))) / 2
        return total if self.bias is None else total - (state @ self.bias).sum(-1)

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``dE/dY = Y - relu(Y xi^T + c) xi - b``, ``(..., N, d)``; zero at absent tokens."""
        state = _clear(Y, mask)
        slope = state - self._overlap(state) @ self.patterns
        return _clear(slope if self.bias is None else slope - self.bias, mask)

    def step(self, Y: Tensor, size: float | Tensor, mask: Tensor | None = None) -> Tensor:
        """``Y - size * gradient``, ``(..., N, d)``."""
        return _clear(Y, mask) - size * self.gradient(Y, mask)

    def _overlap(self, state: Tensor) -> Tensor:
        return F.relu(F.linear(state, self.patterns, self.offset))


def _clear(Y: Tensor, mask: Tensor | None) -> Tensor:
    return Y if mask is None else Y.masked_fill(mask.unsqueeze(-1), 0.0)
