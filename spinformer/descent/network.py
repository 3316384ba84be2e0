"""A multilayer perceptron with one matrix as the minimization over its hidden units."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spinformer.descent.activation import Activation, as_activation
from spinformer.descent.energy import Energy, check_tokens, clear

__all__ = ["NetworkEnergy"]


class NetworkEnergy(Energy):
    r"""The energy of the hidden units z of a network ``y = W^T sigma(W y + f)``.

    .. math::
        E(Z) = \sum_i \left[ 1^{\mathsf T} \tilde\sigma^*(z_i) - f_i \cdot z_i
               - \tfrac12 |W^{\mathsf T} z_i|^2 \right], \qquad y_i = W^{\mathsf T} z_i

    with the conjugate of :mod:`spinformer.descent.activation`. The tokens of this energy are the
    hidden vectors ``Z`` ``(..., N, m)``; :meth:`output` gives the ``y_i``. The last term is
    concave: replaced by its tangent it leaves a convex upper bound, and what minimizes that is

    .. math:: z \leftarrow \sigma(W W^{\mathsf T} z + f) = \sigma(W y + f),

    the concave-convex procedure. So it **descends always**, for every W and f and every
    non-decreasing activation, from any state where the energy is finite; from one outside the range
    of :math:`\sigma`, where it is infinite, the step leads inside. Steps of size up to 1 stay
    between the two ends and below the bound; longer ones can rise, or leave the range.

    It is **bounded below** where the range of :math:`\sigma` is bounded, and where
    :math:`L |W|^2 < 1`, with L the largest slope and the spectral norm (it is then strictly convex
    on the range, with one minimum, the network's only fixed point). Otherwise it may not be: with
    ReLU, W = 2 and f = 0, z doubles twice in every step.

    W may have any shape. The form of this energy in the output,
    :math:`1^{\mathsf T} \tilde\sigma^*(W^{-\mathsf T} y) - \dots`, needs a square, invertible W:
    with more hidden units than outputs (m > d) many z give one y, with fewer no z gives most y.

    Source: the energy of Hopfield (1984) and Cohen & Grossberg (1983), with the discrete steps of
    Yuille & Rangarajan (2003). Cost: O(N m d) a step.

    Args:
        weight: W, ``(m, d)``, or a batch ``(..., m, d)``.
        activation: a name of :data:`spinformer.descent.activation.ACTIVATIONS`, or an
            :class:`~spinformer.descent.activation.Activation`.
        bias: f, the input: ``(m,)``, or one a token, ``(..., N, m)``; None for zero.

    Raises:
        ValueError: a weight that is no matrix, a bias of another width, an unknown activation.
    """

    def __init__(
        self, weight: Tensor, activation: str | Activation = "relu", bias: Tensor | None = None
    ) -> None:
        if weight.dim() < 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}: it must be (m, d)")
        if bias is not None and bias.shape[-1:] != weight.shape[-2:-1]:
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}: the last axis must be the {weight.shape[-2]} "
                "hidden units of the weight"
            )
        self.weight = weight
        self.activation = as_activation(activation)
        self.bias = bias

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``E(Z)``, ``(...)``; infinite where an entry is outside the range of the activation.

        Args:
            Y: hidden units ``Z``, ``(..., N, m)``.
            mask: boolean ``(..., N)``, True where there is no token.
        """
        state = self._tokens(Y, mask)
        penalty = clear(self.activation.conjugate(state), mask)
        total = penalty.sum((-2, -1)) - self.output(state).square().sum((-2, -1)) / 2
        return (
            total if self.bias is None else total - (state * self._input(state, mask)).sum((-2, -1))
        )

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        r""":math:`\sigma^{-1}(Z) - W W^T Z - f`, ``(..., N, m)``; zero at absent tokens.

        Where the energy has a kink (ReLU at 0), the smallest of its slopes: zero if and only if the
        state is a fixed point of the step. NaN outside the range.
        """
        state = self._tokens(Y, mask)
        field = self._field(state, mask)
        return clear(self.activation.inverse(state, nearest=field) - field, mask)

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The inverse of the least slope of the activation, ``(..., N)``.

        Infinite where the activation is flat somewhere: no quadratic lies above the energy.
        """
        slope = self.activation.slopes[0]
        bound = torch.full_like(Y[..., 0], 1 / slope if slope > 0 else math.inf)
        return bound if mask is None else bound.masked_fill(mask, 0.0)

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """``1 / L - |W|^2`` and ``1 / l - s^2``, with l, L the extreme slopes.

        s is the least singular value of W where m <= d, and else 0.
        """
        least, largest = self.activation.slopes
        values = torch.linalg.svdvals(self.weight).square()
        smallest = values[..., -1]
        if self.weight.shape[-2] > self.weight.shape[-1]:
            smallest = torch.zeros_like(smallest)
        lower = (1 / largest if largest > 0 else math.inf) - values[..., 0]
        upper = torch.full_like(smallest, math.inf) if least == 0 else 1 / least - smallest
        return lower, upper

    def step(self, Y: Tensor, size: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
        """``Z + size (sigma(W W^T Z + f) - Z)``, ``(..., N, m)``.

        Args:
            Y: hidden units ``Z``, ``(..., N, m)``.
            size: in (0, 1] it cannot raise the energy.
            mask: boolean ``(..., N)``, True where there is no token; those come out as zero.
        """
        state = self._tokens(Y, mask)
        target = clear(self.activation(self._field(state, mask)), mask)
        return (
            target
            if not isinstance(size, Tensor) and size == 1
            else state + size * (target - state)
        )

    def step_bound(self) -> float:
        """1: the whole way to the minimum of the upper bound."""
        return 1.0

    def output(self, Y: Tensor) -> Tensor:
        """``y_i = W^T z_i``, ``(..., N, d)``."""
        return Y @ self.weight

    def is_bounded(self) -> Tensor:
        """Whether the energy is known to have a lower bound, ``(...)``, one entry a weight.

        A bounded range, or ``L |W|^2 < 1``, which suffices and is not necessary.
        """
        lower, _ = self.hessian_bounds(1)
        finite = math.isfinite(self.activation.lower) and math.isfinite(self.activation.upper)
        return (lower > 0) | finite

    def _tokens(self, Y: Tensor, mask: Tensor | None) -> Tensor:
        return check_tokens(Y, mask, self.weight.shape[-2], self.weight.dtype)

    def _field(self, state: Tensor, mask: Tensor | None) -> Tensor:
        field = self.output(state) @ self.weight.mT
        return field if self.bias is None else field + self._input(state, mask)

    def _input(self, state: Tensor, mask: Tensor | None) -> Tensor:
        """f at every token that is there."""
        assert self.bias is not None
        return clear(self.bias.expand_as(state), mask)
