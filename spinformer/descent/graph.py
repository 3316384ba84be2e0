"""Graph attention: iteratively re-weighted least squares on a list of edges."""

from __future__ import annotations

import torch
from torch import Tensor

from spinformer.descent.energy import (
    Energy,
    check_data_weight,
    check_tokens,
    clear,
    reciprocal,
)
from spinformer.descent.rho import Rho, as_rho

__all__ = ["GraphEnergy"]


class GraphEnergy(Energy):
    r"""The energy that attention along the edges of a graph descends.

    .. math::
        E(Y) = \frac{\lambda}{2} |Y - X|^2 + \sum_{(i, j)} M_{ij} \, \rho(|y_i - y_j|^2 / 2)

    The sum runs over the listed edges as they stand. Each acts on both its ends, whichever comes
    first; one that is listed twice counts twice. A list with every edge in both directions gives
    the energy of :class:`PairwiseEnergy` on the same graph, that sums over ordered pairs; a list
    with every edge once gives half of its pairs. In general, with ``A_ij`` the total weight listed
    from i to j, it is that of ``PairwiseEnergy(graph=(A + A^T) / 2)``.

    A step is one round of iteratively re-weighted least squares. With the weights
    ``w_ij = M_ij rho'(|y_i - y_j|^2 / 2)`` of the edges at the present state, W their symmetrized
    matrix ``(w + w^T) / 2`` and D its row sums, it reads at size 1

    ``Y <- (2 D + lambda)^-1 (2 W Y + lambda X)``,

    attention over the neighbours with the data as a residual connection, normalized as graph
    networks do. What :math:`\rho` is, is what attention is for: concave profiles mistrust edges
    between tokens that differ. ``Rho.smoothed_norm(1)`` gives edges that may break.

    Source: Yang, Huang & Wipf (2022), section 3, on the sparse graphs of Yang et al. (2021), "Graph
    neural networks inspired by classical iterative algorithms". Cost: O(E d) time and memory.

    Args:
        edges: ``(2, E)``, integers in ``0 .. N - 1``: the two ends of every edge. Self loops are
            constants of the energy; they slow the step down.
        bonds: ``M >= 0``, ``(E,)`` or ``(..., E)`` for weights of every system; None for 1.
        rho: ``"exp"``, ``"log1p"``, ``"log2p"`` or a :class:`Rho`.
        data_weight: lambda, a number or a scalar tensor, not negative; None for 1 with data and 0
            without.
        data: ``X`` of the data term, ``(..., N, d)``; None for zero.

    Raises:
        ValueError: edges or bonds of another shape, or a negative ``data_weight``.
        TypeError: edges that are not integers.
    """

    def __init__(
        self,
        edges: Tensor,
        bonds: Tensor | None = None,
        rho: str | Rho = "exp",
        *,
        data_weight: float | Tensor | None = None,
        data: Tensor | None = None,
    ) -> None:
        if edges.dim() != 2 or edges.shape[0] != 2:
            raise ValueError(
                f"edges has shape {tuple(edges.shape)}: pass the two ends of every edge, (2, E)"
            )
        if edges.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"edges has dtype {edges.dtype}: pass int64 or int32, numbers of tokens"
            )
        if bonds is not None and (bonds.dim() == 0 or bonds.shape[-1] != edges.shape[1]):
            raise ValueError(
                f"bonds has shape {tuple(bonds.shape)}: pass one weight an edge, "
                f"(..., {edges.shape[1]})"
            )
        self.edges = edges
        self.bonds = bonds
        self.rho = as_rho(rho)
        self.data_weight = check_data_weight(data_weight, data)
        self.data = data

    def weights(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``M_ij rho'(|y_i - y_j|^2 / 2)`` of every edge at ``Y``, ``(..., E)``."""
        state = check_tokens(Y, mask)
        return self._weigh(self.rho.derivative(self._distances(state)), mask)

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state = check_tokens(Y, mask)
        total = self._weigh(self.rho.value(self._distances(state)), mask).sum(-1)
        return total + self.data_weight / 2 * self._pull(state, mask).square().sum((-2, -1))

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        weights, state = self.weights(Y, mask), clear(Y, mask)
        return self._slope(weights, state) + self.data_weight * self._pull(state, mask)

    def degree(self, weights: Tensor, count: int) -> Tensor:
        """``D`` of ``count`` tokens, half the weights of the edges at each, ``(..., N)``."""
        degree = weights.new_zeros(*weights.shape[:-1], count)
        for end in self.edges:
            degree = degree.index_add(-1, end, weights / 2)
        return degree

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``4 D + lambda``: the matrix W of a graph may be indefinite."""
        return 4 * self.degree(self.weights(Y, mask), Y.shape[-2]) + self.data_weight

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        r"""Bounds by the curvatures of one pair and the largest weight of edges at two neighbours.

        The largest eigenvalue of the Laplacian with the bonds as weights is at most the largest
        ``deg_i + deg_j`` over edges (Gershgorin's circles for the matrix of its edges).
        """
        bonds = self.bonds
        if bonds is None:
            dtype = torch.float64 if self.data is None else self.data.dtype
            bonds = torch.ones(self.edges.shape[1], dtype=dtype, device=self.edges.device)
        loops = self.edges[0] == self.edges[1]
        bonds = bonds.masked_fill(loops, 0.0)
        spread = bonds.new_zeros(bonds.shape[:-1])
        if bonds.shape[-1]:
            degree = 2 * self.degree(bonds, count)
            pairs = degree[..., self.edges[0]] + degree[..., self.edges[1]]
            spread = pairs.masked_fill(bonds == 0, 0.0).amax(-1)
        lower, upper = self.rho.bounds(spread)
        return lower + self.data_weight, upper + self.data_weight

    def step(self, Y: Tensor, size: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
        """One round of re-weighted averaging, ``(..., N, d)``.

        It cannot raise the energy for ``0 < size <= step_bound()``. A token without any edge, and
        without data, stays where it is.

        Args:
            Y: tokens ``(..., N, d)``.
            size: of the move towards the average.
            mask: boolean ``(..., N)``, True where there is no token; those come out as zero.
        """
        weights, state = self.weights(Y, mask), clear(Y, mask)
        slope = self._slope(weights, state) + self.data_weight * self._pull(state, mask)
        diagonal = 2 * self.degree(weights, Y.shape[-2]) + self.data_weight
        return state - size * reciprocal(diagonal).unsqueeze(-1) * slope

    def step_bound(self) -> float:
        """1: at larger sizes two bonded tokens leap over each other."""
        return 1.0

    def _distances(self, state: Tensor) -> Tensor:
        """``|y_i - y_j|^2 / 2`` of every edge, ``(..., E)``."""
        return self._differences(state).square().sum(-1) / 2

    def _differences(self, state: Tensor) -> Tensor:
        return state[..., self.edges[0], :] - state[..., self.edges[1], :]

    def _weigh(self, profile: Tensor, mask: Tensor | None) -> Tensor:
        """``profile`` times the bonds, and zero at edges with an absent end."""
        cut = None if mask is None else mask[..., self.edges[0]] | mask[..., self.edges[1]]
        if self.bonds is not None:
            # Before the product: a NaN at an absent end would reach derivatives.
            profile = profile * (self.bonds if cut is None else self.bonds.masked_fill(cut, 0.0))
        return profile if cut is None else profile.masked_fill(cut, 0.0)

    def _slope(self, weights: Tensor, state: Tensor) -> Tensor:
        """``2 (D - W) Y``."""
        flow = weights.unsqueeze(-1) * self._differences(state)
        slope = flow.new_zeros(*flow.shape[:-2], *state.shape[-2:])
        return slope.index_add(-2, self.edges[0], flow).index_add(-2, self.edges[1], -flow)

    def _pull(self, state: Tensor, mask: Tensor | None) -> Tensor:
        """``Y - X``."""
        return state if self.data is None else state - clear(self.data, mask)
