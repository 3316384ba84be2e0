r"""Attention with asymmetric weights: what an energy can and cannot say of it.

Queries ``q_i = y_i W_Q`` and keys ``k_j = y_j W_K`` give scores ``y_i A y_j`` with
``A = W_Q W_K^T``, asymmetric in general. A symmetric function of two lifted tokens
``phi(y_i), phi(y_j)`` is symmetric in i and j, so that no lift of one token into a larger space
makes the scores those of a symmetric system: with ``phi(y) = [y W_Q, y W_K]`` and the exchange of
the two halves as its form one gets ``y_i (A + A^T) y_j``. What works is to give each token two
variables, a query and a key, and bonds between those of different kind only:
:func:`symmetric_embedding`. Its price is listed there. Tied back to one variable it is
:class:`TiedEnergy`, whose gradient is attention *and* the transposed attention.
:meth:`AsymmetricAttention.split` measures what the ordinary step does to the energy of the
symmetric part.

What is lost without symmetry is the energy, not always the order: with values that are the tokens
themselves (V = I) every step averages, no two tokens are ever further apart than the furthest two
were, and the diameter ``max_ij |y_i - y_j|`` takes the place of the energy. With general values
nothing does: one token and a rotation V go round forever, and no function of the state can fall at
each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spinformer.descent.attention import row_softmax
from spinformer.descent.energy import Energy, check_tokens, clear, reciprocal
from spinformer.descent.pairwise import PairwiseEnergy
from spinformer.descent.rho import Rho, as_rho
from spinformer.errors import check_choice

__all__ = [
    "AsymmetricAttention",
    "Split",
    "SymmetricEmbedding",
    "TiedEnergy",
    "curl_share",
    "jacobian",
    "symmetric_embedding",
]

Metric = Literal["attention", "gradient"]
Role = Literal["both", "queries", "keys"]


@dataclass(frozen=True)
class SymmetricEmbedding:
    """Queries and keys as 2 N tokens of one symmetric pairwise system.

    Attributes:
        tokens: ``[q_1 ... q_N, k_1 ... k_N]``, ``(..., 2 N, d_k)``.
        mask: of the 2 N tokens, or None.
        energy: :class:`PairwiseEnergy` on the bonds between queries and keys.
        query, key: the projections.
    """

    tokens: Tensor
    mask: Tensor | None
    energy: PairwiseEnergy
    query: Tensor
    key: Tensor

    def step(self, tokens: Tensor, size: float = 1.0, role: Role = "both") -> Tensor:
        """One step of the symmetric system, ``(..., 2 N, d_k)``.

        Args:
            tokens: ``(..., 2 N, d_k)``.
            size: never raises the energy up to 1 for both kinds at once, up to 2 for one of them.
            role: what moves: "both", "queries" (attention to frozen keys) or "keys" (the transposed
                attention to frozen queries).

        Raises:
            ValueError: an unknown ``role``.
        """
        check_choice("role", role, ("both", "queries", "keys"))
        moved = self.energy.step(tokens, size, self.mask)
        if role == "both":
            return moved
        old_queries, old_keys = clear(tokens, self.mask).chunk(2, -2)
        queries, keys = moved.chunk(2, -2)
        kept = (queries, old_keys) if role == "queries" else (old_queries, keys)
        return torch.cat(kept, -2)

    def untied(self, tokens: Tensor) -> Tensor:
        """How far queries and keys are from being those of one set of tokens, ``(...)``.

        The least ``|Z - [Y W_Q, Y W_K]| / |Z|`` over all Y; 0 for the embedding itself.
        """
        queries, keys = clear(tokens, self.mask).chunk(2, -2)
        pairs = torch.cat((queries, keys), -1)
        both = torch.cat((self.query, self.key), -1)
        fitted = pairs @ torch.linalg.pinv(both) @ both
        return _norm(pairs - fitted) / _norm(pairs)


def symmetric_embedding(
    Y: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    rho: str | Rho = "exp",
    graph: Tensor | None = None,
) -> SymmetricEmbedding:
    r"""Asymmetric attention inside a symmetric system of twice as many tokens.

    .. math::
        E(q, k) = 2 \sum_{ij} M_{ij}\, \rho(|q_i - k_j|^2 / 2),
        \qquad q_i = y_i W_Q, \quad k_j = y_j W_K .

    A step of size 1 makes each query the average of the keys, with the weights of attention:
    ``q_i <- sum_j softmax_j(q_i . k_j - |k_j|^2 / 2) k_j`` for ``rho = "exp"``, the plain softmax
    where the keys have one norm; the keys become averages of the queries by the transposed scores.
    It descends E for any ``W_Q``, ``W_K`` and any bonds M, also causal ones, for M between queries
    and keys is symmetric as a graph of 2 N tokens.

    What is lost:

    * the tie, unless ``2 d_k <= d`` and ``[W_Q, W_K]`` has full rank (as heads of a Transformer
      have it): then every pair of query and key is that of some token, and the step is one of Y.
      Otherwise no tokens Y have the new queries and keys (:meth:`untied
      <SymmetricEmbedding.untied>`): only the first step is the attention of Y;
    * the values: they are the keys, in the space of keys. In a variable u of the query,
      ``q = u W_Q``, they come back by ``W_Q^T``: the value matrix ``W_K W_Q^T`` is forced, and the
      query itself is subtracted;
    * half of the work: attention moves the queries only. To freeze the keys is to descend E in one
      of its two variables, towards a fixed memory: a modern Hopfield network, no self-attention;
    * twice as many variables, and half the step (the kernel is not positive semi-definite) where
      both kinds move at once.

    Args:
        Y: tokens ``(..., N, d)``.
        query, key: ``(d, d_k)``.
        mask: boolean ``(..., N)``, True where there is no token.
        rho: the profile, as :class:`PairwiseEnergy`.
        graph: ``M_ij >= 0``, ``(N, N)``, boolean or floating: whether i attends to j; it need not
            be symmetric. None for all.

    Raises:
        ValueError: projections of different shapes.
    """
    _check_projections(query, key)
    state = check_tokens(Y, mask, query.shape[0], query.dtype)
    return SymmetricEmbedding(
        tokens=torch.cat((state @ query, state @ key), -2),
        mask=None if mask is None else torch.cat((mask, mask), -1),
        energy=PairwiseEnergy(rho, graph=_bipartite(Y, graph)),
        query=query,
        key=key,
    )


class TiedEnergy(Energy):
    r"""The energy of :func:`symmetric_embedding` as one of the tokens themselves.

    .. math::
        E(Y) = 2 \sum_{ij} M_{ij}\, \rho(|y_i W_Q - y_j W_K|^2 / 2)

    It has one variable and takes asymmetric weights, at the price of a second half in its gradient:
    with ``W_ij = M_ij rho'(...)`` it is ``sum_j W_ij (q_i - k_j) W_Q^T``, attention with the value
    matrix ``W_K W_Q^T``, plus ``sum_j W_ji (k_i - q_j) W_K^T``, in which a token follows those that
    attend to it. The Energy Transformer's gradient has the same two halves. Where
    ``W_Q = W_K`` and M is symmetric they are equal.

    Cost: that of a pairwise energy of 2 N tokens.

    Args:
        query, key: ``(d, d_k)``.
        rho, graph: as :func:`symmetric_embedding`.

    Raises:
        ValueError: projections of different shapes.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        *,
        rho: str | Rho = "exp",
        graph: Tensor | None = None,
    ) -> None:
        _check_projections(query, key)
        self.query, self.key = query, key
        self.rho = as_rho(rho)
        self.graph = graph

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        lifted = self._lift(Y, mask)
        return lifted.energy.energy(lifted.tokens, lifted.mask)

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        lifted = self._lift(Y, mask)
        queries, keys = lifted.energy.gradient(lifted.tokens, lifted.mask).chunk(2, -2)
        total: Tensor = queries @ self.query.mT + keys @ self.key.mT
        return total

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Of the 2 N tokens, each by the squared spectral norm of its projection."""
        lifted = self._lift(Y, mask)
        queries, keys = lifted.energy.curvature(lifted.tokens, lifted.mask).chunk(2, -1)
        squares = [torch.linalg.matrix_norm(x, ord=2).square() for x in (self.query, self.key)]
        total: Tensor = squares[0] * queries + squares[1] * keys
        return total

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """Of the 2 N tokens, by the squared spectral norm of ``[W_Q, W_K]``."""
        bonds = _bipartite(self.query.new_zeros(count, 1), self.graph)
        lower, upper = PairwiseEnergy(self.rho, graph=bonds).hessian_bounds(2 * count)
        both = torch.cat((self.query, self.key), -1)
        square = torch.linalg.matrix_norm(both, ord=2).square()
        return square * lower.clamp_max(0.0), square * upper.clamp_min(0.0)

    def _lift(self, Y: Tensor, mask: Tensor | None) -> SymmetricEmbedding:
        return symmetric_embedding(Y, self.query, self.key, mask, rho=self.rho, graph=self.graph)


@dataclass(frozen=True)
class Split:
    """An increment ``G = descent + circulation`` beside the gradient of an energy.

    Attributes:
        descent: ``-P^-1 grad E``, ``(..., N, d)``, P positive: alone it would lower E.
        circulation: what is left of the increment, ``(..., N, d)``.
        gradient: ``grad E``, ``(..., N, d)``.
    """

    descent: Tensor
    circulation: Tensor
    gradient: Tensor

    @property
    def fall(self) -> Tensor:
        """``<grad E, descent>``, ``(...)``: the rate of E along the descent part, never above 0."""
        return (self.gradient * self.descent).sum((-2, -1))

    @property
    def rise(self) -> Tensor:
        """``<grad E, circulation>``, ``(...)``: of either sign; E rises where it beats the fall."""
        return (self.gradient * self.circulation).sum((-2, -1))


class AsymmetricAttention:
    r"""One attention head with its own queries, keys and values.

    .. math::
        G(Y) = (S - I)\, Y V, \qquad
        S_{ij} = \mathrm{softmax}_j(y_i A y_j - \tfrac12 y_j A y_j), \qquad A = W_Q W_K^T

    ``Y <- Y + size G(Y)``. Where A is symmetric and positive semi-definite, ``A = W W^T``, and
    ``V = I`` or ``V = A``, G is ``-P^-1 grad E`` of the pairwise energy of ``Y W``. The standard
    layer has neither the second term of the scores (``reweight=False``) nor the ``-I``
    (``residual=True``: ``G = S Y V``, added to the token itself).

    Args:
        query, key: ``(d, d_k)``; a factor ``1 / sqrt(d_k)`` of the scores belongs into them.
        value: ``V``, ``(d, d)``, values and output projection together; None for the identity.
        reweight: subtract ``y_j A y_j / 2`` from the scores.
        residual: do not subtract the token.
        metric: P of the descent part. With ``A_+ = W W^T`` the positive part of
            ``(A + A^T) / 2`` and D the degrees: "attention": ``P^-1 = c / 2 D^-1 (.) A_+^-1``, a
            multiple of the symmetric attention itself, ``c (S_+ - I) Y``, inside the range of
            ``A_+``; "gradient": ``P^-1 = c / 2 D^-1``, whose values are ``A_+``. c >= 0 fits the
            values best.

    The step is differentiable in the weights; the energy and the split take them as numbers.

    Raises:
        ValueError: shapes that do not fit, or an unknown ``metric``.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        reweight: bool = True,
        residual: bool = False,
        metric: Metric = "attention",
    ) -> None:
        _check_projections(query, key)
        width = query.shape[0]
        if value is not None and value.shape != (width, width):
            raise ValueError(
                f"value has shape {tuple(value.shape)}: it must be square, {(width, width)}"
            )
        check_choice("metric", metric, ("attention", "gradient"))
        self.query, self.key = query, key
        identity = torch.eye(width, dtype=query.dtype, device=query.device)
        self.value = identity if value is None else value
        self.reweight, self.residual, self.metric = reweight, residual, metric
        scores = (query @ key.mT).detach()
        eigenvalues, vectors = torch.linalg.eigh((scores + scores.mT) / 2)
        cut = eigenvalues.abs().max() * width * torch.finfo(scores.dtype).eps
        kept = torch.where(eigenvalues > cut, eigenvalues, 0.0)
        self.energy = PairwiseEnergy(weights=(vectors * kept.sqrt()).unsqueeze(0))
        """That of the symmetric part, ``sum_ij -exp(-(y_i - y_j) A_+ (y_i - y_j) / 2)``."""
        inverse = reciprocal(kept) if metric == "attention" else torch.ones_like(kept)
        values = (vectors * (kept * inverse)) @ vectors.mT
        size = values.square().sum()
        fit = (values * self.value.detach()).sum() * reciprocal(size)
        share = fit.clamp_min(0.0)
        self._inverse: Tensor = share * (vectors * inverse) @ vectors.mT

    def attention(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """S, ``(..., N, N)``."""
        state = check_tokens(Y, mask, self.query.shape[0], self.query.dtype)
        queries, keys = state @ self.query, state @ self.key
        scores = queries @ keys.mT
        if self.reweight:
            scores = scores - (queries * keys).sum(-1).unsqueeze(-2) / 2
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(-2), -torch.inf)
        return clear(row_softmax(scores, full=mask is None), mask)

    def increment(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``G(Y)``, ``(..., N, d)``."""
        attention, state = self.attention(Y, mask), clear(Y, mask)
        averaged = attention @ state
        return (averaged if self.residual else averaged - state) @ self.value

    def step(self, Y: Tensor, size: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """``Y + size G(Y)``, ``(..., N, d)``."""
        increment = self.increment(Y, mask)
        return clear(Y, mask) + size * increment

    def split(
        self, Y: Tensor, mask: Tensor | None = None, *, energy: Energy | None = None
    ) -> Split:
        """G as a descent part and a circulation part, which is no gradient step of that energy.

        Args:
            Y: tokens ``(..., N, d)``.
            mask: boolean ``(..., N)``, True where there is no token.
            energy: None for that of the symmetric part, with P of ``metric``; any other, as
                :class:`TiedEnergy`, with the P of its own step.
        """
        increment = self.increment(Y, mask)
        reference = self.energy if energy is None else energy
        gradient = reference.gradient(Y, mask)
        if energy is not None:
            descent = energy.step(Y, 1.0, mask) - clear(Y, mask)
        else:
            degree = self.energy.kernel(Y, mask).degree.squeeze(-2)
            descent = -reciprocal(2 * degree).unsqueeze(-1) * gradient @ self._inverse
        return Split(descent, increment - descent, gradient)

    def force(self, Y: Tensor) -> Tensor:
        """``P G``, ``(..., N, d)``: minus the gradient of the energy where the weights are.

        Its :func:`curl_share` is zero if and only if it is the gradient of something: then G
        descends that in the metric P. Directions in which P is singular are left out.
        """
        degree = self.energy.kernel(Y).degree.squeeze(-2)
        metric = torch.linalg.pinv(self._inverse, hermitian=True)
        force: Tensor = 2 * degree.unsqueeze(-1) * self.increment(Y) @ metric
        return force


def jacobian(field: Callable[[Tensor], Tensor], Y: Tensor) -> Tensor:
    """``d field_a / d Y_b`` of each system, ``(..., N d, N d)``, by N d backward passes.

    Complex eigenvalues at a state where the field vanishes prove that it is no ``-M grad E`` with
    M symmetric and positive, whatever M and E (with a Hessian H of E there, M H has the real
    eigenvalues of ``M^(1/2) H M^(1/2)``).

    Args:
        field: a map of tokens that treats every system on its own.
        Y: ``(..., N, d)``.
    """
    with torch.enable_grad():
        state = Y.detach().requires_grad_()
        values = field(state).flatten(-2)
        rows = [
            torch.autograd.grad(values[..., a].sum(), state, retain_graph=True)[0].flatten(-2)
            for a in range(values.shape[-1])
        ]
    return torch.stack(rows, -2)


def curl_share(field: Callable[[Tensor], Tensor], Y: Tensor) -> Tensor:
    """Curl of a field as a share, ``|J - J^T| / (2 |J|)``, ``(...)``, between 0 and 1.

    0 where the field is locally a gradient, 1 where its Jacobian J is antisymmetric; Frobenius
    norms. Cost: N d backward passes and ``(N d)^2`` memory.
    """
    J = jacobian(field, Y)
    return _norm(J - J.mT) / (2 * _norm(J))


def _bipartite(Y: Tensor, graph: Tensor | None) -> Tensor:
    """Bonds of 2 N tokens, ``[[0, M], [M^T, 0]]``."""
    count = Y.shape[-2]
    if graph is None:
        graph = torch.ones(count, count, dtype=torch.bool, device=Y.device)
    none = torch.zeros_like(graph)
    return torch.cat((torch.cat((none, graph), -1), torch.cat((graph.mT, none), -1)), -2)


def _check_projections(query: Tensor, key: Tensor) -> None:
    if query.dim() != 2 or query.shape != key.shape:
        raise ValueError(
            f"query and key have shapes {tuple(query.shape)} and {tuple(key.shape)}: both must be "
            "(d, d_k), one head"
        )


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1))
    return norm
