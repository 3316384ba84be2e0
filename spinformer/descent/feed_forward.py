"""Energies of linear layers, of tokens or of channels, and of a two-layer network."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from spinformer.descent.energy import Energy, check_tokens, clear
from spinformer.solve.implicit import implicit

__all__ = ["FeedForwardEnergy", "MemoryEnergy", "QuadraticEnergy"]


class FeedForwardEnergy(Energy):
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

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The largest eigenvalue of ``I + S``, or 0 where no direction curves upwards."""
        _, largest = self.hessian_bounds(Y.shape[-2])
        return largest.clamp_min(0.0).expand(Y.shape[:-1])

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """The least and the largest eigenvalue of the Hessian ``I + S``, which are attained."""
        eigenvalues = torch.linalg.eigvalsh(self.symmetric_weight)
        return 1 + eigenvalues[0], 1 + eigenvalues[-1]

    def step_bound(self) -> Tensor:
        """The largest step that cannot raise the energy, ``2 / L`` with L the largest eigenvalue.

        Infinite where no direction curves upwards.
        """
        _, largest = self.hessian_bounds(1)
        return torch.where(largest > 0, 2 / largest, torch.inf)

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state = self._tokens(Y, mask)
        quadratic = ((state @ self.symmetric_weight + state) * state).sum((-2, -1)) / 2
        return quadratic if self.bias is None else quadratic - (state @ self.bias).sum(-1)

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``dE/dY = Y (I + S) - b``, ``(..., N, d)``; zero where there is no token."""
        state = self._tokens(Y, mask)
        slope = state @ self.symmetric_weight + state
        return clear(slope if self.bias is None else slope - self.bias, mask)

    def step(self, Y: Tensor, size: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
        """``Y - size * gradient``, ``(..., N, d)``."""
        gradient = self.gradient(Y, mask)
        return clear(Y, mask) - size * gradient

    def _tokens(self, Y: Tensor, mask: Tensor | None) -> Tensor:
        return check_tokens(Y, mask, self.weight.shape[0], self.weight.dtype)


class MemoryEnergy(Energy):
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

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """1 for every token, at all states."""
        return torch.ones(Y.shape[:-1], dtype=Y.dtype, device=Y.device)

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """``1 - |xi|^2``, with the spectral norm, and 1: all units open, or none."""
        norm = torch.linalg.matrix_norm(self.patterns, ord=2)
        return 1 - norm.square(), torch.ones_like(norm)

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state = self._tokens(Y, mask)
        stored = self._overlap(state).square()
        if mask is not None:
            # An absent token overlaps by the offset.
            stored = stored.masked_fill(mask.unsqueeze(-1), 0.0)
        total = (state.square().sum((-2, -1)) - stored.sum((-2, -1))) / 2
        return total if self.bias is None else total - (state @ self.bias).sum(-1)

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``dE/dY = Y - relu(Y xi^T + c) xi - b``, ``(..., N, d)``; zero at absent tokens."""
        state = self._tokens(Y, mask)
        slope = state - self._overlap(state) @ self.patterns
        return clear(slope if self.bias is None else slope - self.bias, mask)

    def _tokens(self, Y: Tensor, mask: Tensor | None) -> Tensor:
        return check_tokens(Y, mask, self.patterns.shape[1], self.patterns.dtype)

    def _overlap(self, state: Tensor) -> Tensor:
        return F.relu(F.linear(state, self.patterns, self.offset))


class QuadraticEnergy(Energy):
    r"""A quadratic energy that mixes tokens, channels, or both, with its exact minimum.

    .. math::
        E(Y) = \mathrm{tr}(Y^T M Y) + \mathrm{tr}(Y C Y^T) + w |Y - B|^2

    Only the symmetric parts of M and C matter. The eigenvalues of the Hessian are
    ``2 (m_a + c_b + w)`` with those of M and C: all bounds are attained. It is bounded below if the
    least is not negative, and has one minimum if that is positive, the solution of the Sylvester
    equation ``(M + w) Y + Y C = w B``.

    The two energies of the synthetic experiments of Yang, Huang & Wipf (2022), ``|S Y|^2 + |Y -
    B|^2`` and ``|Y W|^2 + |Y - B|^2``, are ``QuadraticEnergy(S.mT @ S, center=B, weight=1)`` and
    ``QuadraticEnergy(channel=W @ W.mT, center=B, weight=1)``.

    Cost: O(N^2 d + N d^2), and O(N^3 + d^3) for the curvature, the bounds and the minimum.

    Args:
        mixing: ``M``, ``(N, N)``; None for zero.
        channel: ``C``, ``(d, d)``; None for zero.
        center: ``B``, ``(..., N, d)``; None for zero.
        weight: w, a number or a scalar tensor.

    Raises:
        ValueError: a matrix that is not square.
    """

    def __init__(
        self,
        mixing: Tensor | None = None,
        channel: Tensor | None = None,
        center: Tensor | None = None,
        weight: float | Tensor = 0.0,
    ) -> None:
        for name, matrix, shape in (("mixing", mixing, "(N, N)"), ("channel", channel, "(d, d)")):
            if matrix is not None and (matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]):
                raise ValueError(
                    f"{name} has shape {tuple(matrix.shape)}: it must be square, {shape}"
                )
        self.mixing = None if mixing is None else (mixing + mixing.mT) / 2
        self.channel = None if channel is None else (channel + channel.mT) / 2
        self.center = center
        self.weight = weight

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state = self._tokens(Y, mask)
        pull = self._pull(state, mask)
        total = self.weight * pull.square().sum((-2, -1))
        if self.mixing is None and self.channel is None:
            return total
        return total + (state * self._mix(state)).sum((-2, -1))

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``2 (M Y + Y C + w (Y - B))``, ``(..., N, d)``; zero where there is no token."""
        state = self._tokens(Y, mask)
        return 2 * clear(self._mix(state) + self.weight * self._pull(state, mask), mask)

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The largest eigenvalue of the Hessian, or 0 where no direction curves upwards."""
        _, largest = self.hessian_bounds(Y.shape[-2])
        return largest.clamp_min(0.0).expand(Y.shape[:-1])

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """The least and the largest eigenvalue of the Hessian, which are attained.

        That of present tokens lies between them where a mask takes some away.
        """
        lower = upper = 2 * self._scalar(self.weight)
        for matrix in (self.mixing, self.channel):
            if matrix is not None and matrix.shape[0]:
                eigenvalues = torch.linalg.eigvalsh(matrix)
                lower = lower + 2 * eigenvalues[0]
                upper = upper + 2 * eigenvalues[-1]
        return lower, upper

    def minimum(self, mask: Tensor | None = None) -> Tensor:
        """The state of least energy, ``(..., N, d)``, from the eigenvectors of M and C.

        Args:
            mask: boolean ``(..., N)``, True where there is no token; those come out as zero.

        Raises:
            ValueError: without a center, at which the shape is read, or where the Hessian is not
                positive definite, so that there is no one minimum.
        """
        if self.center is None:
            raise ValueError("center is None: the minimum, if any, is zero in all shapes; pass one")
        center = clear(self.center, mask)
        mixing = center.new_zeros(center.shape[-2], center.shape[-2])
        if self.mixing is not None:
            mixing = self.mixing
        if mask is not None:
            # What stands on the diagonal for absent tokens only has to keep the rest solvable.
            present = (~mask).to(mixing.dtype)
            filler = torch.linalg.matrix_norm(mixing.detach())
            mixing = mixing * present.unsqueeze(-1) * present.unsqueeze(-2)
            mixing = mixing + torch.diag_embed((1 - present) * filler)
        channel = center.new_zeros(center.shape[-1], center.shape[-1])
        if self.channel is not None:
            channel = self.channel
        weight = self._scalar(self.weight)
        rows, left = torch.linalg.eigh(mixing.detach())
        columns, right = torch.linalg.eigh(channel.detach())
        curvature = rows.unsqueeze(-1) + columns + weight.detach()
        if not (curvature > 0).all():
            raise ValueError(
                f"the least eigenvalue of the Hessian is {2 * curvature.min().item():.3g}: there "
                "is no one minimum. Raise the weight, or make mixing and channel positive definite"
            )

        def solve(force: Tensor) -> Tensor:
            modes: Tensor = left.mT @ force @ right / curvature
            whole: Tensor = left @ modes @ right.mT
            return whole

        # Eigenvectors have no derivative where eigenvalues agree; the minimum has.
        minimum = implicit(
            solve((weight * center).detach()),
            lambda x, M, C, w, B: M @ x + x @ C + w * (x - B),
            (mixing, channel, weight, center),
            lambda _vjp, force: solve(force),
        )
        return clear(minimum, mask)

    def merge(self, other: QuadraticEnergy) -> QuadraticEnergy:
        """One energy that is the sum of two, up to a constant: its minimum is that of the sum.

        Raises:
            ValueError: weights that add up to zero while a center would have to be kept.
        """
        weight = self.weight + other.weight
        center: Tensor | None = None
        if self.center is not None or other.center is not None:
            if not torch.as_tensor(weight != 0).all():
                raise ValueError(
                    f"the weights {self.weight} and {other.weight} add up to zero: the sum is no "
                    "distance to a center"
                )
            pulls = [e.weight * e.center for e in (self, other) if e.center is not None]
            center = functools.reduce(torch.add, pulls) / weight
        mixing, channel = _sum(self.mixing, other.mixing), _sum(self.channel, other.channel)
        return QuadraticEnergy(mixing, channel, center, weight)

    def _tokens(self, Y: Tensor, mask: Tensor | None) -> Tensor:
        state = check_tokens(Y, mask, None if self.channel is None else self.channel.shape[0])
        if self.mixing is not None and state.shape[-2] != self.mixing.shape[0]:
            raise ValueError(
                f"Y has shape {tuple(Y.shape)}: mixing is for {self.mixing.shape[0]} tokens"
            )
        return state

    def _mix(self, state: Tensor) -> Tensor:
        """``M Y + Y C``."""
        mixed = torch.zeros_like(state) if self.mixing is None else self.mixing @ state
        return mixed if self.channel is None else mixed + state @ self.channel

    def _pull(self, state: Tensor, mask: Tensor | None) -> Tensor:
        """``Y - B``."""
        return state if self.center is None else state - clear(self.center, mask)

    def _scalar(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value
        bound = (x for x in (self.mixing, self.channel, self.center) if x is not None)
        reference = next(bound, torch.zeros((), dtype=torch.float64))
        return reference.new_tensor(value)


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    if x is None or y is None:
        return y if x is None else x
    return x + y
