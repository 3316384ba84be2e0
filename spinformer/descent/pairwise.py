"""Attention as a step down a pairwise energy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.descent.rho import Rho, as_rho


@dataclass(frozen=True)
class Kernel:
    """The kernel of every head at one state, with what a step needs of it.

    Attributes:
        projected: ``(..., H, N, d_h)``, the states ``Y W_h``.
        weights: ``W_ij = rho'(|(y_i - y_j) W_h|^2 / 2)``, ``(..., H, N, N)``; zero without a bond.
        degree: ``D_i = sum_j W_ij``, ``(..., H, N)``.
    """

    projected: Tensor
    weights: Tensor
    degree: Tensor

    @property
    def attention(self) -> Tensor:
        """``D^-1 W``, with rows that sum to one; rows of tokens without any bond are zero."""
        return self.weights * _reciprocal(self.degree).unsqueeze(-1)


class PairwiseEnergy:
    r"""The energy that attention descends.

    .. math::
        E(Y) = \sum_h \sum_{ij} \rho(|(y_i - y_j) W_h|^2 / 2) + \frac{\lambda}{2} |Y - X|^2

    The double sum runs over ordered pairs of present tokens, ``i = j`` included (a constant). At
    any state the quadratic form ``tr Y^T (D - W) Y`` with ``W_ij = rho'(z_ij)`` majorizes it, up to
    a constant, and has its gradient ``2 (D - W) Y``. One preconditioned step of size a on it reads,
    for a single head that sees ``Y`` itself,

    * ``Y <- (1 - a) Y + a D^-1 W Y`` where ``data_weight`` is 0. With ``rho(z) = -exp(-z)`` this is
      attention: ``D^-1 W`` is the softmax of ``y_i . y_j - |y_j|^2 / 2``, the plain softmax where
      all tokens have one norm;
    * ``Y <- (2 D + lambda)^-1 (2 W Y + lambda X)``, at a = 1, where it is lambda: a residual
      connection whose weight depends on the state. It has the form of the spin system's equation
      ``t_i m_i = h_i + sum_j J_ij m_j``, with another normalizer. X = 0 gives the regularizer
      ``lambda |Y|^2 / 2``.

    Yang, Huang & Wipf (2022), Theorem 3.1, adds ``|Y|^2 / 2`` and keeps the first of these steps.
    That need not descend: three scalar tokens 12, 12, 10 rise by 0.46.

    Heads with general weights share one diagonal, since the matrix that preconditions them exactly
    differs from token to token:
    ``p_i = 2 min(sum_h D_hi |W_h|^2, c max_h D_hi |W_h|^2)`` with spectral norms and
    ``c = |sum_h W_h W_h^T / |W_h|^2|``. Where the heads see orthogonal subspaces c is 1, and the
    step up to H times longer than the sum alone allows. If the columns of all heads together are
    orthonormal up to a factor a head, the heads decouple and each is normalized by its own
    ``D_h`` (``orthonormal=True``): every head is a full attention step.

    Cost: one Gram matrix a head, O(H N^2 d_h) time and O(H N^2) memory, and O(H d d_h^2) for the
    norms of general weights.

    Args:
        rho: ``"exp"`` (``-exp(-z)``), ``"log1p"`` (``log(1 + z)``), ``"log2p"`` (``log(2 + z)``) or
            a :class:`Rho`.
        weights: ``(H, d, d_h)``; None for one head that sees ``Y`` itself.
        data_weight: lambda, a number or a scalar tensor, not negative.
        orthonormal: the columns of ``[W_1 / s_1 ... W_H / s_H]`` are orthonormal for some
            ``s_h > 0``. A promise: it is not checked.

    Raises:
        ValueError: weights of another shape, or a negative ``data_weight``.
    """

    def __init__(
        self,
        rho: str | Rho = "exp",
        weights: Tensor | None = None,
        data_weight: float | Tensor = 0.0,
        *,
        orthonormal: bool = False,
    ) -> None:
        if weights is not None and weights.dim() != 3:
            raise ValueError(
                f"weights has shape {tuple(weights.shape)}: pass one matrix a head, (H, d, d_h)"
            )
        if not isinstance(data_weight, Tensor) and data_weight < 0:
            raise ValueError(
                f"data_weight={data_weight} is negative: the energy is not bounded below"
            )
        self.rho = as_rho(rho)
        self.weights = weights
        self.data_weight = data_weight
        self.orthonormal = orthonormal

    def step_bound(self, graph: Tensor | None = None) -> float:
        """The largest step size that cannot raise the energy.

        2 for positive semi-definite kernels. Other kernels, and graphs, which can cost the
        definiteness, leave 1.
        """
        return 2.0 if self.rho.completely_monotone and graph is None else 1.0

    def kernel(self, Y: Tensor, mask: Tensor | None = None, graph: Tensor | None = None) -> Kernel:
        """The kernel at ``Y``.

        Args:
            Y: tokens ``(..., N, d)``.
            mask: boolean ``(..., N)``, True where there is no token.
            graph: the bonds ``M_ij >= 0`` that multiply the kernel, boolean (an adjacency) or
                floating, broadcastable to ``(..., H, N, N)``; None for all equal to one. An
                asymmetric one has a kernel and a step, but no energy.
        """
        projected = self._project(_clear(Y, mask))
        profile = self.rho.derivative(_half_squared_distances(projected, mask, graph))
        weights = _weigh(profile, mask, graph)
        return Kernel(projected, weights, weights.sum(-1))

    def energy(
        self,
        Y: Tensor,
        mask: Tensor | None = None,
        *,
        graph: Tensor | None = None,
        data: Tensor | None = None,
    ) -> Tensor:
        """``E(Y)``, ``(...)``: the total of each system.

        Args:
            Y: tokens ``(..., N, d)``.
            mask: boolean ``(..., N)``, True where there is no token.
            graph: the bonds, as in :meth:`kernel`, symmetric.
            data: ``X`` of the data term, ``(..., N, d)``; None for zero.

        Raises:
            ValueError: ``graph`` is not symmetric, so that the step descends no energy.
        """
        self._require_symmetric(graph)
        state = _clear(Y, mask)
        distances = _half_squared_distances(self._project(state), mask, graph)
        pull = self._displacement(state, mask, data)
        total = _weigh(self.rho.value(distances), mask, graph).sum((-3, -2, -1))
        if pull is None:
            return total
        return total + self.data_weight / 2 * pull.square().sum((-2, -1))

    def gradient(
        self,
        Y: Tensor,
        mask: Tensor | None = None,
        *,
        graph: Tensor | None = None,
        data: Tensor | None = None,
    ) -> Tensor:
        """``dE/dY = sum_h 2 (D_h - W_h) Y W_h W_h^T + lambda (Y - X)``, ``(..., N, d)``.

        Arguments and errors are those of :meth:`energy`.
        """
        self._require_symmetric(graph)
        state = _clear(Y, mask)
        slope = self._back(_slope(self.kernel(state, mask, graph)))
        pull = self._displacement(state, mask, data)
        return slope if pull is None else slope + self.data_weight * pull

    def step(
        self,
        Y: Tensor,
        size: float | Tensor = 1.0,
        mask: Tensor | None = None,
        *,
        graph: Tensor | None = None,
        data: Tensor | None = None,
    ) -> Tensor:
        """One preconditioned step from ``Y``, ``(..., N, d)``.

        It cannot raise the energy for ``0 < size <= step_bound()``, and lowers it strictly below
        the bound unless ``Y`` is a fixed point. A token without any bond stays where it is.

        Args:
            Y: tokens ``(..., N, d)``.
            size: a, not bounded here: what lies above the bound may rise.
            mask: boolean ``(..., N)``, True where there is no token; those come out as zero.
            graph: the bonds, as in :meth:`kernel`; the step along an asymmetric one descends no
                energy.
            data: ``X`` of the data term, ``(..., N, d)``; None for zero.
        """
        state = _clear(Y, mask)
        return self.step_from(self.kernel(state, mask, graph), state, size, mask, data=data)

    def step_from(
        self,
        kernel: Kernel,
        Y: Tensor,
        size: float | Tensor = 1.0,
        mask: Tensor | None = None,
        *,
        data: Tensor | None = None,
    ) -> Tensor:
        """:meth:`step` with the kernel at ``Y`` already at hand."""
        state = _clear(Y, mask)
        pull = self._displacement(state, mask, data)
        if self.weights is None or self.orthonormal:
            return state + size * self._decoupled(kernel, pull)
        diagonal = 2 * self._shared_diagonal(kernel, self.weights) + self.data_weight
        slope = self._back(_slope(kernel))
        if pull is not None:
            slope = slope + self.data_weight * pull
        return state - size * _reciprocal(diagonal).unsqueeze(-1) * slope

    def _decoupled(self, kernel: Kernel, pull: Tensor | None) -> Tensor:
        """The increment at a = 1 where each head's subspace has its own diagonal."""
        slope, degree, strength = _slope(kernel), kernel.degree, self.data_weight
        if self.weights is None:
            slope = slope.squeeze(-3) if pull is None else slope.squeeze(-3) + strength * pull
            return -slope * _reciprocal(2 * degree.squeeze(-2) + strength).unsqueeze(-1)
        # With W_h = s_h Q_h the head's coordinates are Y Q_h, in which its curvature is bounded by
        # 2 s_h^2 D_h + lambda.
        squares = self.weights.square().sum((-2, -1)) / self.weights.shape[-1]
        scales = squares.sqrt()[:, None, None]
        diagonal = (2 * squares[:, None] * degree + strength).unsqueeze(-1)
        if pull is None:
            return -self._back(slope * _reciprocal(diagonal))
        frames = self.weights / scales
        seen = _project(pull, frames)
        local = (scales * slope + strength * seen) * _reciprocal(diagonal)
        increment = -_back(local, frames)
        if frames.shape[0] * frames.shape[-1] < frames.shape[-2]:
            # What no head sees feels the data term alone, whose minimum is one step away.
            increment = increment - (pull - _back(seen, frames))
        return increment

    def _shared_diagonal(self, kernel: Kernel, weights: Tensor) -> Tensor:
        """``(..., N)``: twice this bounds the curvature of all heads together."""
        norms = torch.linalg.matrix_norm(weights, ord=2)
        joint = _columns(weights / norms[:, None, None])
        overlap = torch.linalg.matrix_norm(joint, ord=2).square()
        curvature = kernel.degree * norms.square()[:, None]
        return torch.minimum(curvature.sum(-2), overlap * curvature.amax(-2))

    def _project(self, state: Tensor) -> Tensor:
        return state.unsqueeze(-3) if self.weights is None else _project(state, self.weights)

    def _back(self, local: Tensor) -> Tensor:
        return local.squeeze(-3) if self.weights is None else _back(local, self.weights)

    def _displacement(
        self, state: Tensor, mask: Tensor | None, data: Tensor | None
    ) -> Tensor | None:
        """``Y - X``; None without a data term, so that its arithmetic is not done."""
        if not isinstance(self.data_weight, Tensor) and self.data_weight == 0:
            return None
        return state if data is None else state - _clear(data, mask)

    def _require_symmetric(self, graph: Tensor | None) -> None:
        if graph is not None and not torch.equal(graph, graph.mT):
            raise ValueError(
                "graph is not symmetric (a causal one, say): the step then descends no energy. "
                "Symmetrize it, or use the step alone"
            )


def _slope(kernel: Kernel) -> Tensor:
    """``2 (D - W) Y W_h``, ``(..., H, N, d_h)``."""
    averaged = kernel.weights @ kernel.projected
    return 2 * (kernel.degree.unsqueeze(-1) * kernel.projected - averaged)


def _columns(weights: Tensor) -> Tensor:
    """``[W_1 ... W_H]``, ``(d, H d_h)``."""
    return weights.permute(1, 0, 2).flatten(1)


def _project(state: Tensor, weights: Tensor) -> Tensor:
    """``Y W_h`` of every head, ``(..., H, N, d_h)``, as one product."""
    heads, _, width = weights.shape
    local: Tensor = (state @ _columns(weights)).unflatten(-1, (heads, width))
    return local.transpose(-3, -2)


def _back(local: Tensor, weights: Tensor) -> Tensor:
    """``sum_h U_h W_h^T``, ``(..., N, d)``, as one product."""
    return local.transpose(-3, -2).flatten(-2) @ _columns(weights).mT


def _clear(Y: Tensor, mask: Tensor | None) -> Tensor:
    return Y if mask is None else Y.masked_fill(mask.unsqueeze(-1), 0.0)


def _weigh(profile: Tensor, mask: Tensor | None, graph: Tensor | None) -> Tensor:
    """``profile`` ``(..., H, N, N)`` times the bonds, and zero at the pairs of absent tokens."""
    if graph is not None:
        profile = profile.masked_fill(~graph, 0.0) if graph.dtype == torch.bool else profile * graph
    if mask is not None:
        absent = mask.unsqueeze(-2)
        profile = profile.masked_fill(absent.unsqueeze(-1) | absent.unsqueeze(-2), 0.0)
    return profile


def _half_squared_distances(projected: Tensor, mask: Tensor | None, graph: Tensor | None) -> Tensor:
    """``|z_i - z_j|^2 / 2``, ``(..., H, N, N)``, from one Gram matrix.

    The exponent is a distance, never ``beta_j exp(y_i . y_j)``, which overflows in float32 at
    ``y_i . y_j`` = 88. Tokens are first moved to their mean, lest a common offset cancel the digits
    away. The derivative along a common shift is zero: the mean is a constant to autograd. On a
    graph it is left out, for it would tell a token, if only by rounding, of tokens without a bond
    to it.
    """
    if graph is None:
        total = projected.detach().sum(-2, keepdim=True)
        if mask is None:
            count: float | Tensor = max(projected.shape[-2], 1)
        else:
            count = (~mask).sum(-1).clamp_min(1)[..., None, None, None]
        projected = projected - total / count
        # Absent tokens now sit at minus the mean: finite, and without bonds.
    squares = projected.square().sum(-1)
    sums = squares.unsqueeze(-1) + squares.unsqueeze(-2)
    return (sums / 2 - projected @ projected.mT).clamp_min(0.0)


def _reciprocal(x: Tensor) -> Tensor:
    """``1 / x``, and 0 with zero gradient at x = 0: a token without any bond does not move."""
    zero = x == 0
    return torch.where(zero, 0.0, 1 / x.masked_fill(zero, 1.0))
