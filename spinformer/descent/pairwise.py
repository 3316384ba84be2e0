"""Attention as a step down a pairwise energy."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.descent.attention import along, columns, from_heads, row_softmax, to_heads
from spinformer.descent.energy import (
    Energy,
    check_data_weight,
    check_tokens,
    clear,
    onto_sphere,
    reciprocal,
)
from spinformer.descent.rho import RHOS, Rho, as_rho
from spinformer.solve.implicit import implicit

__all__ = ["Kernel", "PairwiseEnergy"]


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
        return self.weights * reciprocal(self.degree).unsqueeze(-1)


class PairwiseEnergy(Energy):
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
    ``D_h`` (``orthonormal=True``): every head is a full attention step. So is a single square
    ``W_1``, in the singular vectors of which all curvatures are known.

    Cost: one Gram matrix a head, O(H N^2 d_h) time and O(H N^2) memory, and O(H d d_h^2) for the
    norms of general weights. Tokens are compared about their mean, but on a graph about the origin:
    in float32 the exponents are then off by about ``|y|^2 / 10^7``. Move tokens that lie far out,
    or use :class:`GraphEnergy`, which subtracts before it squares.

    Args:
        rho: ``"exp"`` (``-exp(-z)``), ``"log1p"`` (``log(1 + z)``), ``"log2p"`` (``log(2 + z)``) or
            a :class:`Rho`.
        weights: ``(H, d, d_h)``; None for one head that sees ``Y`` itself.
        data_weight: lambda, a number or a scalar tensor, not negative; None for 1 with data and 0
            without.
        data: ``X`` of the data term, ``(..., N, d)``; None for zero.
        graph: the bonds ``M_ij >= 0`` that multiply the kernel, boolean (an adjacency) or floating,
            broadcastable to ``(..., H, N, N)``; None for all equal to one. An asymmetric one (a
            causal one, say) has a kernel and a step, but no energy. Whether it is one is looked up
            once: don't change it in place.
        orthonormal: the columns of ``[W_1 / s_1 ... W_H / s_H]`` are orthonormal for some
            ``s_h > 0``. A promise: it is not checked.

    Raises:
        ValueError: weights of another shape, or a negative ``data_weight``; from the energy, its
            gradient and its curvature: a graph that is not symmetric.
    """

    def __init__(
        self,
        rho: str | Rho = "exp",
        weights: Tensor | None = None,
        *,
        data_weight: float | Tensor | None = None,
        data: Tensor | None = None,
        graph: Tensor | None = None,
        orthonormal: bool = False,
    ) -> None:
        if weights is not None and weights.dim() != 3:
            raise ValueError(
                f"weights has shape {tuple(weights.shape)}: pass one matrix a head, (H, d, d_h)"
            )
        self.rho = as_rho(rho)
        self.weights = weights
        self.data_weight = check_data_weight(data_weight, data)
        self.data = data
        self.graph = graph
        self.orthonormal = orthonormal

    def step_bound(self) -> float:
        """The largest step size that cannot raise the energy.

        2 for positive semi-definite kernels. Other kernels, and graphs, which can cost the
        definiteness, leave 1.
        """
        return 2.0 if self.rho.completely_monotone and self.graph is None else 1.0

    def kernel(self, Y: Tensor, mask: Tensor | None = None) -> Kernel:
        """The kernel at ``Y``.

        Args:
            Y: tokens ``(..., N, d)``.
            mask: boolean ``(..., N)``, True where there is no token.
        """
        projected = self._project(self._tokens(Y, mask))
        profile = self.rho.derivative(_half_squared_distances(projected, mask, self.graph))
        weights = _weigh(profile, mask, self.graph)
        return Kernel(projected, weights, weights.sum(-1))

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state = self._tokens(Y, mask)
        self._require_symmetric(mask)
        distances = _half_squared_distances(self._project(state), mask, self.graph)
        pull = self._displacement(state, mask)
        total = _weigh(self.rho.value(distances), mask, self.graph).sum((-3, -2, -1))
        if pull is None:
            return total
        return total + self.data_weight / 2 * pull.square().sum((-2, -1))

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``dE/dY = sum_h 2 (D_h - W_h) Y W_h W_h^T + lambda (Y - X)``, ``(..., N, d)``."""
        kernel = self.kernel(Y, mask)
        self._require_symmetric(mask)
        state, slope = clear(Y, mask), self._back(_slope(kernel))
        pull = self._displacement(state, mask)
        return slope if pull is None else slope + self.data_weight * pull

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """The diagonal that all heads share, plus lambda, ``(..., N)``.

        ``2 D + lambda`` for one head that sees ``Y`` itself, and ``4 D + lambda`` where the kernel
        may be indefinite, since ``D - W <= 2 D`` is all that is then known.
        """
        diagonal = self._shared_diagonal(self.kernel(Y, mask))
        self._require_symmetric(mask)
        return self._excess(mask, diagonal) * diagonal + self.data_weight

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        r"""Bounds for the eigenvalues of the Hessian.

        A pair curves by :math:`\rho'(z) I + \rho''(z) u u^T`, ``u`` its difference, hence between
        :math:`c = \min_z (\rho' + 2 z \rho'')` and :math:`\rho'(0)`; their sum, by
        ``2 mu |sum_h W_h W_h^T|`` times that, plus lambda. The largest eigenvalue ``mu`` of the
        graph's Laplacian is ``count`` where all are bonded. Masks only take bonds away.
        """
        self._require_symmetric(None)
        bound = (x for x in (self.weights, self.data, self.graph) if x is not None)
        reference = next(bound, torch.zeros((), dtype=torch.float64))
        dtype = reference.dtype if reference.is_floating_point() else torch.float64
        spread = torch.full((), count if count > 1 else 0, dtype=dtype, device=reference.device)
        if self.graph is not None and count:
            bonds = self.graph.to(dtype).expand(*self.graph.shape[:-2], count, count)
            spread = torch.linalg.eigvalsh(torch.diag_embed(bonds.sum(-1)) - bonds)[..., -1]
            # One graph a head: the most connected bounds them all.
            spread = spread.amax(-1) if spread.dim() else spread
        if self.weights is not None:
            spread = spread * torch.linalg.matrix_norm(columns(self.weights), ord=2).square()
        lower, upper = self.rho.bounds(2 * spread)
        return lower + self.data_weight, upper + self.data_weight

    def step(self, Y: Tensor, size: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
        """One preconditioned step from ``Y``, ``(..., N, d)``.

        It cannot raise the energy for ``0 < size <= step_bound()``, and lowers it strictly below
        the bound unless ``Y`` is a fixed point. A token without any bond stays where it is. A step
        along an asymmetric graph descends no energy.

        Args:
            Y: tokens ``(..., N, d)``.
            size: a, not bounded here: what lies above the bound may rise.
            mask: boolean ``(..., N)``, True where there is no token; those come out as zero.
        """
        return self.step_from(self.kernel(Y, mask), Y, size, mask)

    def step_from(
        self,
        kernel: Kernel,
        Y: Tensor,
        size: float | Tensor = 1.0,
        mask: Tensor | None = None,
    ) -> Tensor:
        """:meth:`step` with the kernel at ``Y`` already at hand."""
        state = clear(Y, mask)
        pull = self._displacement(state, mask)
        if self.weights is None or self.orthonormal:
            return state + size * self._decoupled(kernel, pull)
        if self._whole:
            return state + size * self._single(kernel, state, pull, self.weights[0])
        return state + size * self._joint(kernel, pull)

    def sphere_step(
        self,
        Y: Tensor,
        radius: float | Tensor | None = None,
        mask: Tensor | None = None,
        *,
        size: float | Tensor = 1.0,
    ) -> Tensor:
        r"""The step, renormalized: ``y_i <- r_i (W Y)_i / |(W Y)_i|`` for one head at size 1.

        With rho = "exp" and tokens of one norm this is the plain softmax followed by a
        normalization, which descends although the plain softmax alone need not: where norms do not
        change, ``tr Z^T D Z`` is a constant, the quadratic bound is ``-tr Z^T W Z``, and its
        tangent, an upper bound as W is positive semi-definite, is minimal there. Tokens may have
        different norms (W is then the re-weighted softmax, up to the rows' factors).

        It cannot raise the energy for ``0 < size <= step_bound() / 2``, from tokens that have the
        norms r. So half a step is left on a graph: at size 1 three tokens on a path can rise.
        With ``orthonormal`` heads it is each head's part ``Y Q_h`` that is renormalized, and what
        no head sees is left as :meth:`step` leaves it. With general heads, one alone included, it
        is whole tokens, after a step with the diagonal that all heads share: the full attention
        step of a head whose W_1 is not orthogonal need not descend between spheres of ``Y``.

        Args:
            Y: tokens ``(..., N, d)``.
            radius: ``r_i``, broadcastable to ``(..., N)``, or with ``orthonormal`` to
                ``(..., H, N)``, of each head's part; None for the norms that ``Y`` has. A first
                step that changes norms may rise.
            mask: boolean ``(..., N)``, True where there is no token; those come out as zero.
            size: of the step that is renormalized.
        """
        state = self._tokens(Y, mask)
        if self.weights is not None and not self.orthonormal:
            increment = self._joint(self.kernel(state, mask), self._displacement(state, mask))
            return onto_sphere(state + size * increment, state, radius)
        moved = self.step(state, size, mask)
        if self.weights is None:
            return onto_sphere(moved, state, radius)
        frames = _frames(self.weights)
        parts = to_heads(moved, frames)
        renormalized = onto_sphere(parts, to_heads(state, frames), radius)
        return moved + from_heads(renormalized - parts, frames)

    def plain_softmax_step(
        self, Y: Tensor, size: float | Tensor = 1.0, mask: Tensor | None = None
    ) -> Tensor:
        r"""The update with the plain softmax, ``Y <- (1 - a) Y + a softmax(Y W W^T Y^T) Y``.

        Attention as it is commonly written, and as Yang, Huang & Wipf (2022) run it. It is
        :meth:`step` where all tokens have one norm in every head, and may rise elsewhere: the
        tokens 1.4716, -0.0117, -2.3644 do, by 0.0115. The data term has no part in it. Heads that
        are ``orthonormal`` each move their own part.

        Args:
            Y: tokens ``(..., N, d)``.
            size: a.
            mask: boolean ``(..., N)``, True where there is no token; those come out as zero.

        Raises:
            ValueError: another rho than ``"exp"``, or several heads without ``orthonormal``.
        """
        if self.rho != RHOS["exp"]:
            raise ValueError("rho is not 'exp': the softmax belongs to exp(-z) alone")
        if self.weights is not None and not (self.orthonormal or self._whole):
            raise ValueError(
                f"weights has shape {tuple(self.weights.shape)} and orthonormal=False: general "
                "heads have no common normalizer. Pass one square head, or orthonormal ones"
            )
        state = self._tokens(Y, mask)
        projected = self._project(state)
        logits = projected @ projected.mT
        bonds = _weigh(torch.ones_like(logits), mask, self.graph)
        alone = (bonds == 0).all(-1, keepdim=True)
        attention = row_softmax(along(bonds, logits), full=False)
        if self.weights is None or self._whole:
            tokens = state.unsqueeze(-3)
            increment: Tensor = (attention @ tokens - tokens).masked_fill(alone, 0.0)
            return state + size * increment.squeeze(-3)
        frames = _frames(self.weights)
        parts = to_heads(state, frames)
        return state + size * from_heads(
            (attention @ parts - parts).masked_fill(alone, 0.0), frames
        )

    @property
    def _whole(self) -> bool:
        """Whether one square matrix is all heads: its step acts on whole tokens."""
        shape = () if self.weights is None else self.weights.shape
        return len(shape) == 3 and shape[0] == 1 and shape[1] == shape[2]

    def _joint(self, kernel: Kernel, pull: Tensor | None) -> Tensor:
        """The increment at a = 1 with one diagonal for all heads."""
        diagonal = 2 * self._shared_diagonal(kernel) + self.data_weight
        slope = self._back(_slope(kernel))
        if pull is not None:
            slope = slope + self.data_weight * pull
        return -reciprocal(diagonal).unsqueeze(-1) * slope

    def _decoupled(self, kernel: Kernel, pull: Tensor | None) -> Tensor:
        """The increment at a = 1 where each head's subspace has its own diagonal."""
        slope, degree, strength = _slope(kernel), kernel.degree, self.data_weight
        if self.weights is None:
            slope = slope.squeeze(-3) if pull is None else slope.squeeze(-3) + strength * pull
            return -slope * reciprocal(2 * degree.squeeze(-2) + strength).unsqueeze(-1)
        # With W_h = s_h Q_h the head's coordinates are Y Q_h, in which its curvature is bounded by
        # 2 s_h^2 D_h + lambda.
        squares = _squared_scales(self.weights)
        scales = squares.sqrt()[:, None, None]
        diagonal = (2 * squares[:, None] * degree + strength).unsqueeze(-1)
        if pull is None:
            return -self._back(slope * reciprocal(diagonal))
        frames = self.weights / scales
        seen = to_heads(pull, frames)
        local = (scales * slope + strength * seen) * reciprocal(diagonal)
        increment = -from_heads(local, frames)
        if frames.shape[0] * frames.shape[-1] < frames.shape[-2]:
            # What no head sees feels the data term alone, whose minimum is one step away.
            increment = increment - (pull - from_heads(seen, frames))
        return increment

    def _single(self, kernel: Kernel, state: Tensor, pull: Tensor | None, weight: Tensor) -> Tensor:
        """The increment at a = 1 of one square head."""
        W, D = kernel.weights.squeeze(-3), kernel.degree.squeeze(-2)
        averaged = W @ state - D.unsqueeze(-1) * state
        if pull is None:
            return averaged * reciprocal(D).unsqueeze(-1)
        # In the eigenvectors of W_1 W_1^T, with eigenvalue g, token i curves by 2 D_i g + lambda.
        # They have no derivative where eigenvalues agree; the solution of the equation has.
        metric = weight @ weight.mT
        strength = torch.as_tensor(self.data_weight, dtype=state.dtype, device=state.device)
        squares, frame = torch.linalg.eigh(metric.detach())
        diagonal = 2 * D.detach().unsqueeze(-1) * squares.clamp_min(0.0) + strength.detach()

        def solve(right: Tensor) -> Tensor:
            move: Tensor = (right @ frame * reciprocal(diagonal)) @ frame.mT
            return move

        def residual(move: Tensor, right: Tensor, D: Tensor, metric: Tensor, lam: Tensor) -> Tensor:
            return 2 * D.unsqueeze(-1) * (move @ metric) + lam * move - right

        right = 2 * averaged @ metric - strength * pull
        inputs = right, D, metric, strength
        return implicit(solve(right.detach()), residual, inputs, lambda _vjp, g: solve(g))

    def _shared_diagonal(self, kernel: Kernel) -> Tensor:
        """``(..., N)``: twice this bounds the curvature of all heads together."""
        if self.weights is None:
            return kernel.degree.squeeze(-2)
        if self.orthonormal:
            # As below, without a decomposition, whose second derivative equal norms would spoil.
            return (kernel.degree * _squared_scales(self.weights)[:, None]).amax(-2)
        norms = torch.linalg.matrix_norm(self.weights, ord=2)
        joint = columns(self.weights * reciprocal(norms)[:, None, None])
        overlap = torch.linalg.matrix_norm(joint, ord=2).square()
        curvature = kernel.degree * norms.square()[:, None]
        return torch.minimum(curvature.sum(-2), overlap * curvature.amax(-2))

    def _excess(self, mask: Tensor | None, like: Tensor) -> Tensor:
        """What times the diagonal bounds the curvature: 2 or 4, ``(...)`` or ``(..., 1)``.

        2 where the kernel is known to be positive semi-definite, system by system: one whose bonds
        are all there does not take shorter steps because another's are not.
        """
        if not self.rho.completely_monotone:
            return like.new_tensor(4.0)
        if self.graph is None:
            return like.new_tensor(2.0)
        complete = self.graph == 1
        if mask is not None:
            complete = complete | _absent_pairs(mask)
        complete = complete.all(-1).all(-1)
        if complete.dim():
            complete = complete.all(-1, keepdim=True)
        return torch.where(complete, 2.0, 4.0).to(like.dtype)

    def _tokens(self, Y: Tensor, mask: Tensor | None) -> Tensor:
        if self.weights is None:
            return check_tokens(Y, mask)
        return check_tokens(Y, mask, self.weights.shape[-2], self.weights.dtype)

    def _project(self, state: Tensor) -> Tensor:
        return state.unsqueeze(-3) if self.weights is None else to_heads(state, self.weights)

    def _back(self, local: Tensor) -> Tensor:
        return local.squeeze(-3) if self.weights is None else from_heads(local, self.weights)

    def _displacement(self, state: Tensor, mask: Tensor | None) -> Tensor | None:
        """``Y - X``; None without a data term, so that its arithmetic is not done."""
        if not isinstance(self.data_weight, Tensor) and self.data_weight == 0:
            return None
        return state if self.data is None else state - clear(self.data, mask)

    @functools.cached_property
    def _symmetric(self) -> bool:
        """Once an object: the answer has to come back from the device."""
        return self.graph is None or _is_symmetric(self.graph)

    def _require_symmetric(self, mask: Tensor | None) -> None:
        if self.graph is None or self._symmetric:
            return
        if mask is None or not _is_symmetric(self.graph.masked_fill(_absent_pairs(mask), 0)):
            raise ValueError(
                "graph is not symmetric (a causal one, say): the step then descends no energy. "
                "Symmetrize it, or use the step alone"
            )


def _is_symmetric(graph: Tensor) -> bool:
    """NaN is let through: it stays in its system."""
    return bool(((graph == graph.mT) | graph.isnan()).all())


def _slope(kernel: Kernel) -> Tensor:
    """``2 (D - W) Y W_h``, ``(..., H, N, d_h)``."""
    averaged = kernel.weights @ kernel.projected
    return 2 * (kernel.degree.unsqueeze(-1) * kernel.projected - averaged)


def _squared_scales(weights: Tensor) -> Tensor:
    """``s_h^2`` of orthonormal heads ``W_h = s_h Q_h``, ``(H,)``."""
    return weights.square().sum((-2, -1)) / weights.shape[-1]


def _frames(weights: Tensor) -> Tensor:
    """``Q_h`` of orthonormal heads ``W_h = s_h Q_h``."""
    return weights / _squared_scales(weights).sqrt()[:, None, None]


def _absent_pairs(mask: Tensor) -> Tensor:
    """Pairs with an absent token, ``(..., 1, N, N)``."""
    absent = mask.unsqueeze(-2)
    return absent.unsqueeze(-1) | absent.unsqueeze(-2)


def _weigh(profile: Tensor, mask: Tensor | None, graph: Tensor | None) -> Tensor:
    """``profile`` ``(..., H, N, N)`` times the bonds, and zero at the pairs of absent tokens."""
    cut = None if mask is None else _absent_pairs(mask)
    if graph is not None and graph.dtype == torch.bool:
        cut = ~graph if cut is None else ~graph | cut
    elif graph is not None:
        # Before the product: a NaN at an absent token would reach derivatives.
        profile = profile * (graph if cut is None else graph.masked_fill(cut, 0.0))
    return profile if cut is None else profile.masked_fill(cut, 0.0)


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
