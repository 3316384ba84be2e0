r"""Diagonal matrices with a low-rank change: inverses, determinants and Hessians without N x N.

With a symmetric core M (q, q) of any inertia, possibly singular,

.. math:: V = \operatorname{diag}(x) - G M G^{\mathsf T},\qquad E = \operatorname{diag}(x)^{-1},
          \qquad S = G^{\mathsf T} E G,

    V^{-1} = E + E G Z G^{\mathsf T} E,\quad Z = M (I - S M)^{-1},\qquad
    \det V = \det(I - S M) \prod_i x_i .

Nothing here is larger than N x q. V must be positive definite and so must x, which is more than
the cone asks for: a V with :math:`x_i \le 0` is positive definite only through negative weights,
and is refused.

Source: Golub & Van Loan, Matrix Computations (4th ed. 2013), section 2.1.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spinformer.solve.positive import cholesky_inverse

__all__ = [
    "LowRankCone",
    "LowRankPoint",
    "core",
    "core_log_det",
    "hessian_product",
    "signed_factor",
]


def signed_factor(factor: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
    r"""T (..., q, q) and signs :math:`\sigma` (..., q) of M.

    :math:`T \operatorname{diag}(\sigma) T^{\mathsf T} = M`, so that :math:`F = G T` has
    :math:`F \operatorname{diag}(\sigma) F^{\mathsf T} = G M G^{\mathsf T}`.
    Columns of G are brought to one length first: two factors of unlike scale lose no digits.
    """
    length = torch.linalg.vector_norm(factor, dim=-2)
    length = torch.where(length > 0, length, 1.0)
    values, vectors = torch.linalg.eigh(length[..., :, None] * middle * length[..., None, :])
    signs = torch.where(values < 0, -1.0, 1.0).to(values.dtype)
    return vectors * values.abs().sqrt()[..., None, :] / length[..., :, None], signs


def hessian_product(
    diagonal: Tensor, own: Tensor, left: Tensor, right: Tensor, mu: Tensor, vector: Tensor
) -> Tensor:
    r""":math:`A \circ (A + 2\mu\mu^{\mathsf T})` times a vector (..., N), O(N q^2 + N q D).

    ``diagonal`` is E, ``own`` the diagonal of A, and A is E plus ``left @ right.mT``.
    """
    return _square_product(diagonal, own, left, right, vector) + 2 * _gram_product(
        diagonal, left, right, mu, vector
    )


def _square_product(
    diagonal: Tensor, own: Tensor, left: Tensor, right: Tensor, vector: Tensor
) -> Tensor:
    """A * A times a vector."""
    # Entries of the square of the low-rank part L: L_ij^2 = left_i^T (right_j right_j^T) left_i.
    middle = right.mT @ (vector[..., None] * right)
    square = ((left @ middle) * left).sum(-1)
    return torch.addcmul(square, diagonal * (2 * own - diagonal), vector)


def _gram_product(
    diagonal: Tensor, left: Tensor, right: Tensor, mu: Tensor, vector: Tensor
) -> Tensor:
    """A * mu mu^T times a vector."""
    moved = mu * vector[..., None]
    image = left @ (right.mT @ moved)
    return (mu * torch.addcmul(image, diagonal[..., None], moved)).sum(-1)


@dataclass
class LowRankCone:
    r"""K = F diag(signs) F^T without its diagonal, and b: a batch (B, ...) of them."""

    factor: Tensor  # F (B, N, q)
    signs: Tensor  # (B, q)
    b: Tensor  # (B, N, D)
    shift: Tensor  # the diagonal taken off (B, N)

    @classmethod
    def of(cls, factor: Tensor, signs: Tensor, b: Tensor) -> LowRankCone:
        return cls(factor, signs, b, (factor.square() @ signs[..., None])[..., 0])

    def take(self, rows: Tensor) -> LowRankCone:
        return LowRankCone(*(tensor[rows] for tensor in vars(self).values()))

    def apply(self, vector: Tensor) -> Tensor:
        """K times a vector (B, N)."""
        overlap = (vector[..., None, :] @ self.factor)[..., 0, :] * self.signs
        return (self.factor @ overlap[..., None])[..., 0] - self.shift * vector

    def square(self, vector: Tensor) -> Tensor:
        """K * K times a vector (B, N): what weakly correlated couplings do."""
        middle = self.factor.mT @ (vector[..., None] * self.factor)
        middle = self.signs[..., None] * middle * self.signs[..., None, :]
        square = ((self.factor @ middle) * self.factor).sum(-1)
        return square - self.shift.square() * vector

    def row_sums(self) -> Tensor:
        r"""Upper bounds, (B, N), on :math:`\sum_j |K_{ij}|` and on the diagonal taken off."""
        factor = self.factor.abs()
        return (factor @ factor.sum(-2)[..., None])[..., 0]

    def value(self, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log det V, tr b^T A b, and whether tau lies in the cone."""
        diagonal, inside = self._diagonal(tau)
        scaled = diagonal[..., None] * self.factor
        z, log_det, good = _signed_core(self.factor.mT @ scaled, self.signs)
        log_det = log_det - diagonal.log().sum(-1)
        overlap = scaled.mT @ self.b
        field = (diagonal[..., None] * self.b.square()).sum((-2, -1))
        return log_det, field + (overlap * (z @ overlap)).sum((-2, -1)), inside & good

    def evaluate(self, tau: Tensor) -> tuple[LowRankPoint, Tensor]:
        """The point tau (B, N), and whether it lies in the cone."""
        diagonal, inside = self._diagonal(tau)
        right = diagonal[..., None] * self.factor
        gram = self.factor.mT @ right
        z, log_det, good = _signed_core(gram, self.signs)
        left = right @ z
        mu = torch.addcmul(left @ (right.mT @ self.b), diagonal[..., None], self.b)
        own = diagonal + (left * right).sum(-1)
        # |V| |A| <= max x / min x times those of I - F' s F'^T, from the eigenvalues of s S, S Z.
        condition = (tau + self.shift).abs().amax(-1) * diagonal.amax(-1) if tau.shape[-1] else 1
        condition = condition * (1 + torch.linalg.matrix_norm(gram))
        condition = condition * (1 + torch.linalg.matrix_norm(gram @ z))
        log_det = log_det - diagonal.log().sum(-1)
        return LowRankPoint(tau, diagonal, left, right, z, mu, own, log_det, condition), (
            inside & good
        )

    def _diagonal(self, tau: Tensor) -> tuple[Tensor, Tensor]:
        shifted = tau + self.shift
        inside = (shifted > 0).all(-1)
        return 1 / torch.where(inside[..., None], shifted, 1.0), inside


@dataclass
class LowRankPoint:
    """A and mu at a point of the cone: A = diag(diagonal) + left right^T."""

    tau: Tensor
    diagonal: Tensor
    left: Tensor
    right: Tensor
    core: Tensor
    mu: Tensor
    own: Tensor
    log_det: Tensor
    condition: Tensor  # upper bound on cond(V)

    def fields(self) -> list[str]:
        return list(vars(self))

    def take(self, rows: Tensor) -> LowRankPoint:
        return LowRankPoint(*(tensor[rows] for tensor in vars(self).values()))

    def put(self, rows: Tensor, other: LowRankPoint) -> None:
        for name in self.fields():
            getattr(self, name)[rows] = getattr(other, name)

    def double(self) -> LowRankPoint:
        return LowRankPoint(*(tensor.double() for tensor in vars(self).values()))

    def constraint(self) -> Tensor:
        r""":math:`A_{ii} + |\mu_i|^2`, (B, N)."""
        return self.own + self.mu.square().sum(-1)

    def apply(self, vector: Tensor) -> Tensor:
        """A times a vector (B, N)."""
        overlap = (vector[..., None, :] @ self.right)[..., 0, :]
        return torch.addcmul((self.left @ overlap[..., None])[..., 0], self.diagonal, vector)

    def hessian(self, vector: Tensor, weight: Tensor | None = None) -> Tensor:
        r""":math:`A\circ(\nu A + 2\mu\mu^{\mathsf T})` times a vector (B, N)."""
        square = _square_product(self.diagonal, self.own, self.left, self.right, vector)
        if weight is not None:
            square = weight[..., None] * square
        gram = _gram_product(self.diagonal, self.left, self.right, self.mu, vector)
        return square + 2 * gram

    def hessian_diagonal(self, weight: Tensor | None = None) -> Tensor:
        own = self.own if weight is None else weight[..., None] * self.own
        return self.own * (own + 2 * self.mu.square().sum(-1))


def _signed_core(gram: Tensor, signs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Z = :math:`(\Sigma - S)^{-1}`, log det(I - \Sigma S), and whether I - F' \Sigma F'^T > 0.

    The columns with sign -1 come first: what they add is definite, so :math:`I + S_{nn}` always has
    a Cholesky factor. V is then definite if the Schur complement of the others is.
    """
    p, n = (signs > 0).to(gram.dtype), (signs < 0).to(gram.dtype)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    within = identity + n[..., :, None] * gram * n[..., None, :]
    t, first, _ = cholesky_inverse(within)
    t = t * n[..., None, :] * n[..., :, None]
    between = n[..., :, None] * gram * p[..., None, :]
    x = t @ between
    schur = identity - p[..., :, None] * gram * p[..., None, :] + between.mT @ x
    inverse, second, good = cholesky_inverse(schur)
    inverse = inverse * p[..., :, None] * p[..., None, :]
    cross = x @ inverse
    z = inverse - t + cross @ x.mT - cross - cross.mT
    return z, first + second, good


# -- Z and log det(I - S M) as functions of S and M, to any order ---------------------------------


def core(gram: Tensor, middle: Tensor, value: Tensor) -> Tensor:
    """The known Z as a differentiable function of symmetric S and M."""
    z: Tensor = _Core.apply(gram, middle, value)
    return z


def core_log_det(gram: Tensor, middle: Tensor, z: Tensor, value: Tensor) -> Tensor:
    """The known log det(I - S M); ``z`` carries higher orders."""
    log_det: Tensor = _CoreLogDet.apply(gram, middle, z, value)
    return log_det


class _Core(torch.autograd.Function):
    """dZ = Z dS Z + Y^T dM Y with Y = (I - S M)^{-1} = I + S Z."""

    @staticmethod
    def forward(ctx: Any, gram: Tensor, middle: Tensor, value: Tensor) -> Tensor:
        output = value.clone()
        ctx.save_for_backward(gram, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gram, z = ctx.saved_tensors
        y = gram @ z
        y = y + torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
        return z.mT @ grads[0] @ z.mT, y @ grads[0] @ y.mT, None


class _CoreLogDet(torch.autograd.Function):
    """d log det(I - S M) = -tr Z dS - tr (S + S Z S) dM."""

    @staticmethod
    def forward(ctx: Any, gram: Tensor, middle: Tensor, z: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gram, z)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gram, z = ctx.saved_tensors
        grad = -grads[0][..., None, None]
        return grad * z, grad * (gram + gram @ z @ gram), None, None
