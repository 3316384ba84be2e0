r"""The modern Hopfield network: its energy, and what is proven of its memory.

Source: Ramsauer et al. (2020), "Hopfield networks is all you need". Their theorems were derived
anew; where a smaller constant, or a condition that a statement leaves to its proof, is used here,
theirs is given beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spinformer.descent.attention import along, row_log_sum, row_softmax
from spinformer.descent.energy import Energy, check_tokens, clear

__all__ = [
    "Capacity",
    "HopfieldEnergy",
    "Retrieval",
    "retrieval",
    "separation",
    "storage_capacity",
]


class HopfieldEnergy(Energy):
    r"""Stored patterns :math:`x_k`, the rows of K, that every token q falls towards.

    .. math::
        E(q) = -\frac1\beta \log \sum_k e^{\beta\, x_k \cdot q} + \tfrac12 |q|^2
               \;\left[ + \frac{\log |K|}{\beta} + \frac{M^2}{2} \right]

    with M the largest norm of a pattern. The tokens don't see each other; the energy of a system is
    the sum. The step ``q <- K^T softmax(beta K q)``, attention with fixed keys that are the values
    too, minimizes the bound that is left when the concave first term is replaced by its tangent
    (the concave-convex procedure). So it descends always, by at least half the square of its
    length: steps tend to zero, and limit points are fixed points (their Theorems 1 and 2). Steps of
    any ``0 < size <= 2`` descend.

    With the constants in brackets (``constants=True``), and without a graph,
    :math:`(M - |q|)^2 / 2 \le E(q) \le (M + |q|)^2 / 2` for a token.

    Cost: O(N K d) a step.

    Args:
        patterns: K, ``(K, d)``, or ``(..., K, d)`` for one memory a system.
        beta: inverse temperature, positive, a number or one per system ``(...,)``, whose values are
            not checked.
        pattern_mask: boolean ``(..., K)``, True where there is no pattern. Without any pattern the
            energy is ``|q|^2 / 2``, and the step leads to 0.
        graph: which token sees which pattern, broadcastable to ``(..., N, K)``: boolean, True where
            it does, or non-negative weights of the exponentials. Patterns don't move, so it
            need not be symmetric: with a causal one every token still has its energy. None for all.
        constants: add the terms in brackets, with the patterns that are there.

    Raises:
        ValueError: patterns that are no matrix, or a number beta that is not positive.
    """

    def __init__(
        self,
        patterns: Tensor,
        beta: float | Tensor = 1.0,
        *,
        pattern_mask: Tensor | None = None,
        graph: Tensor | None = None,
        constants: bool = False,
    ) -> None:
        _check_patterns(patterns)
        if not isinstance(beta, Tensor):
            _check_beta(beta)
        self.patterns = clear(patterns, pattern_mask)
        self.beta = beta
        self.pattern_mask = pattern_mask
        self.graph = graph
        self.constants = constants

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state = self._tokens(Y, mask)
        beta = _column(self.beta, state)
        total = state.square().sum(-1) / 2 - row_log_sum(self._logits(state), self._full) / beta
        if self.constants:
            number, radius = _count(self.patterns, self.pattern_mask), self._radius()
            total = total + number.clamp_min(1).log()[..., None] / beta + radius[..., None] ** 2 / 2
        return (total if mask is None else total.masked_fill(mask, 0.0)).sum(-1)

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``q - K^T softmax(beta K q)``, ``(..., N, d)``; zero at absent tokens."""
        state = self._tokens(Y, mask)
        return clear(state - self._attention(state) @ self.patterns, mask)

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """1 for every token: the Hessian is the identity less ``beta`` times a covariance."""
        bound = torch.ones_like(Y[..., 0])
        return bound if mask is None else bound.masked_fill(mask, 0.0)

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """``1 - beta D^2 / 4`` and 1, with D the largest distance of two patterns.

        No law on the patterns has a larger variance than ``D^2 / 4`` (Popoviciu 1935). Where
        ``beta D^2 < 4`` the energy is strictly convex: one fixed point, the average of the patterns
        at small beta. Cost: O(K^2 d).
        """
        distances = torch.cdist(
            self.patterns, self.patterns, compute_mode="donot_use_mm_for_euclid_dist"
        )
        if self.pattern_mask is not None:
            absent = self.pattern_mask.unsqueeze(-1) | self.pattern_mask.unsqueeze(-2)
            distances = distances.masked_fill(absent, 0.0)
        widest = distances.amax((-2, -1)) if distances.shape[-1] else distances.sum((-2, -1))
        lower = 1 - self.beta * widest.square() / 4
        return lower, torch.ones_like(lower)

    def step(self, Y: Tensor, size: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
        """``q + size (K^T softmax(beta K q) - q)``, ``(..., N, d)``; zero at absent tokens."""
        state = self._tokens(Y, mask)
        target = clear(self._attention(state) @ self.patterns, mask)
        if not isinstance(size, Tensor) and size == 1:
            return target
        return state + size * (target - state)

    def attention(self, Y: Tensor) -> Tensor:
        """``softmax(beta K q)`` over the patterns that a token sees, ``(..., N, K)``."""
        return self._attention(self._tokens(Y, None))

    def _attention(self, state: Tensor) -> Tensor:
        return row_softmax(self._logits(state), self._full)

    def _tokens(self, Y: Tensor, mask: Tensor | None) -> Tensor:
        return check_tokens(Y, mask, self.patterns.shape[-1], self.patterns.dtype)

    @property
    def _full(self) -> bool:
        """Whether every token is known to see a pattern."""
        return self.graph is None and self.pattern_mask is None and self.patterns.shape[-2] > 0

    def _logits(self, state: Tensor) -> Tensor:
        """``beta K q``, -inf where a token doesn't see a pattern, ``(..., N, K)``."""
        beta = _column(self.beta, state)
        beta = beta.unsqueeze(-1) if isinstance(beta, Tensor) else beta
        logits: Tensor = (beta * state) @ self.patterns.mT
        if self.graph is not None:
            logits = along(self.graph, logits)
        if self.pattern_mask is not None:
            logits = logits.masked_fill(self.pattern_mask.unsqueeze(-2), -torch.inf)
        return logits

    def _radius(self) -> Tensor:
        return _largest_norm(self.patterns)


def separation(patterns: Tensor, pattern_mask: Tensor | None = None) -> Tensor:
    r""":math:`\Delta_i = x_i \cdot x_i - \max_{j \ne i} x_i \cdot x_j`, ``(..., K)``.

    Infinite for the only pattern; NaN for an absent one. Cost: O(K^2 d).

    Args:
        patterns: ``(..., K, d)``.
        pattern_mask: boolean ``(..., K)``, True where there is no pattern.
    """
    _check_patterns(patterns)
    stored = clear(patterns, pattern_mask)
    products = stored @ stored.mT
    own = products.diagonal(dim1=-2, dim2=-1)
    hidden = torch.eye(products.shape[-1], dtype=torch.bool, device=products.device)
    if pattern_mask is not None:
        hidden = hidden | pattern_mask.unsqueeze(-2)
    others = products.masked_fill(hidden, -torch.inf)
    if others.shape[-1] == 0:
        return own
    gap = own - others.amax(-1)
    return gap if pattern_mask is None else gap.masked_fill(pattern_mask, torch.nan)


@dataclass(frozen=True)
class Retrieval:
    r"""How well each pattern is kept, from its separation alone.

    Let :math:`p_i(\xi)` be the weight of pattern i. Where :math:`|\xi - x_i| \le \delta`, all other
    patterns together weigh :math:`1 - p_i \le (N - 1) e^{-\beta (\Delta_i - 2 M \delta)}`, since a
    difference of overlaps changes by at most :math:`2 M \delta`. All else follows.

    Attributes:
        separation: Delta_i, ``(..., K)``; NaN for an absent pattern.
        largest_norm: M, ``(...)``.
        count: N, ``(...)``, the number of patterns.
        beta: inverse temperature, one per system ``(...)`` or a scalar tensor.
    """

    separation: Tensor
    largest_norm: Tensor
    count: Tensor
    beta: Tensor

    @property
    def required(self) -> Tensor:
        r""":math:`\frac{2}{\beta N} + \frac1\beta \max(\log(2 (N - 1) N \beta M^2), 0)`, ``(...)``.

        A pattern with at least this separation is stored: the step maps the ball of :attr:`radius`
        around it into itself and is a contraction there, so that it holds one fixed point, which
        every point of the ball converges to; and no other pattern's ball overlaps it.

        The paper's condition (Lemmas A5 to A7) has no maximum with 0; that the balls are disjoint
        it shows for :math:`2 (N - 1) N \beta M^2 > 1` alone, where the maximum is idle. Elsewhere
        the lemmas hold but a pattern need not be stored: of 0.1 and -0.1 at beta = 1 both fulfil
        the condition, their balls have radius 5, and the one fixed point in both is 0. With the
        maximum no pattern passes there, since no separation exceeds :math:`2 M^2`.
        """
        others = (self.count - 1).clamp_min(0)
        product = 2 * others * self.count * self.beta * self.largest_norm.square()
        return (2 / self.count.clamp_min(1) + product.clamp_min(1.0).log()) / self.beta

    @property
    def stored(self) -> Tensor:
        """Whether each pattern is proven to be stored, ``(..., K)``."""
        return self.separation >= self.required[..., None]

    @property
    def radius(self) -> Tensor:
        r""":math:`1 / (\beta N M)`, ``(...)``, of the ball around a pattern that is stored."""
        return 1 / (self.beta * self.count * self.largest_norm)

    def error(self, distance: float | Tensor) -> Tensor:
        r"""A bound of :math:`|f(\xi) - x_i|` after one step, ``(..., K)`` (Theorem 5).

        :math:`2 (N - 1) M e^{-\beta (\Delta_i - 2 M \delta)}`. In the paper's statement
        :math:`\delta` is also at least the distance of the fixed point, which is not needed.

        Args:
            distance: :math:`\delta \ge |\xi - x_i|`, a number or ``(..., K)``.
        """
        return 2 * self.largest_norm[..., None] * self._leak(distance)

    def contraction(self, distance: float | Tensor) -> Tensor:
        r"""A bound of :math:`|f(\xi) - x_i^*| / |\xi - x_i^*|`, ``(..., K)`` (Theorem 4).

        :math:`4 \beta M^2 (N - 1) e^{-\beta (\Delta_i - 2 M \delta)}`, from the variance
        :math:`\sum_{j \ne i} p_j |x_j - x_i|^2`: 4 is approached by two opposite patterns at large
        beta. The theorem has 2 N in its place, which is the same for N = 2 and more beyond; 4 also
        follows from the paper's Lemma A8, for a cluster of one pattern.

        Args:
            distance: :math:`\delta`, at least the distances of :math:`\xi` and of the fixed point
                :math:`x_i^*` to the pattern; a number or ``(..., K)``.
        """
        scale = 4 * self.beta * self.largest_norm.square()
        return scale[..., None] * self._leak(distance)

    @property
    def fixed_point_error(self) -> Tensor:
        r"""A bound of :math:`|x_i - x_i^*|` for stored patterns, ``(..., K)``; else infinite.

        :math:`2 e^{2/N} (N - 1) M e^{-\beta \Delta_i}`, which is :meth:`error` at the
        :attr:`radius`. Theorem 5 has e for :math:`e^{2/N}`: it takes fixed points up to
        :math:`1 / (2 \beta M)` from their pattern, as far as the radius for N = 2.
        """
        return self.error(self.radius[..., None]).where(self.stored, torch.inf)

    def _leak(self, distance: float | Tensor) -> Tensor:
        shift = 2 * self.largest_norm[..., None] * distance
        others = (self.count - 1).clamp_min(0)[..., None]
        leak = others * torch.exp(-self.beta[..., None] * (self.separation - shift))
        # A single pattern has nothing to leak to, however far the token is.
        return torch.where(others > 0, leak, torch.where(self.separation.isnan(), leak, 0.0))


def retrieval(
    patterns: Tensor, beta: float | Tensor = 1.0, pattern_mask: Tensor | None = None
) -> Retrieval:
    """The separation of patterns, and the bounds that follow from it.

    Args:
        patterns: ``(..., K, d)``.
        beta: inverse temperature, positive, a number or one per system ``(...,)``.
        pattern_mask: boolean ``(..., K)``, True where there is no pattern.

    Raises:
        ValueError: patterns that are no matrix, or a beta that is not positive.
    """
    _check_beta(beta)
    gaps = separation(patterns, pattern_mask)
    stored = clear(patterns, pattern_mask)
    return Retrieval(
        gaps,
        _largest_norm(stored),
        _count(stored, pattern_mask),
        torch.as_tensor(beta, dtype=stored.dtype, device=stored.device),
    )


@dataclass(frozen=True)
class Capacity:
    r"""How many random patterns are stored, :math:`N = \sqrt p\, c^{(d - 1) / 4}`.

    Attributes:
        log_count: log N.
        base: c; the capacity is exponential in the dimension where it exceeds 1.
        applies: whether the derivation goes through: :math:`N \ge 2`, which is the theorem's
            :math:`c \ge (2 / \sqrt p)^{4 / (d - 1)}`, and :math:`2 \beta M^2 N^2 \ge 1`, without
            which balls overlap. Where it does not, nothing is said.
    """

    log_count: float
    base: float
    applies: bool

    @property
    def count(self) -> float:
        """N, which need not be an integer; infinite where it is beyond floating point."""
        return math.exp(self.log_count) if self.log_count < 709 else math.inf


def storage_capacity(
    dim: int, beta: float = 1.0, scale: float = 1.0, failure: float = 0.001
) -> Capacity:
    r"""The number of random patterns on a sphere that are all stored but with probability p.

    The patterns are uniform on the sphere of radius :math:`M = K \sqrt{d - 1}`. With
    :math:`a = \frac{2}{d - 1} (1 + \log(2 \beta K^2 p (d - 1)))` and
    :math:`b = \frac25 K^2 \beta`, :math:`c = b / W_0(e^{a + \log b})`, W_0 the Lambert function.

    Derivation: the least angle of N such points is at least :math:`(p / N^2)^{1/(d-1)}` but with
    probability p; with :math:`1 - \cos\alpha \ge \alpha^2 / 5` each separation is at least
    :math:`M^2 (p / N^2)^{2/(d-1)} / 5`, which is M^2 / (5 c) at the N above; and that this is as
    large as :attr:`Retrieval.required` is :math:`b / c = a + \log c`, the equation of c, where
    N >= 2. A lower bound, and a loose one: it promises 7 patterns for d = 20, K = 3, beta = 1 and
    p = 0.001, where a thousand are stored.

    The theorem states the condition :math:`c \ge (2 / \sqrt p)^{4 / (d - 1)}` only. Its proof also
    assumes :math:`1 < 2 (N - 1) N \beta M^2` (before Theorem A3), which does not follow: for
    :math:`\beta \to 0` the N above grows as :math:`(2 e \beta M^2)^{-1/2}`, while below
    :math:`\beta M^2 = 1` the energy is strictly convex, with one fixed point for all patterns. At
    d = 20, K = 1, p = 0.001, beta = 1e-4 the statement promises 9.8 and one is there.
    :attr:`Capacity.applies` has the assumption.

    Source: Ramsauer et al. (2020), Theorem 3 and its proof, Theorem A5.

    Args:
        dim: d, at least 2.
        beta: inverse temperature, positive.
        scale: K, positive.
        failure: p, in (0, 1].

    Raises:
        ValueError: an argument outside these.
    """
    for name, value in (("beta", beta), ("scale", scale)):
        if not value > 0:
            raise ValueError(f"{name}={value!r} must be positive")
    if dim < 2:
        raise ValueError(
            f"dim={dim!r} must be at least 2: the sphere of one dimension is two points"
        )
    if not 0 < failure <= 1:
        raise ValueError(f"failure={failure!r} is a probability: it must be in (0, 1]")
    a = 2 / (dim - 1) * (1 + math.log(2 * beta * scale**2 * failure * (dim - 1)))
    b = 2 * scale**2 * beta / 5
    # Imported where it is needed: it takes longer to import than all of this package.
    from scipy.special import wrightomega  # noqa: PLC0415

    # The Wright function is W_0 of an exponential, and does not overflow with it.
    base = b / float(wrightomega(a + math.log(b)))
    log_count = math.log(failure) / 2 + (dim - 1) / 4 * math.log(base)
    spread = math.log(2 * beta * scale**2 * (dim - 1)) + 2 * log_count
    return Capacity(log_count, base, log_count >= math.log(2) and spread >= 0)


def _largest_norm(patterns: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(patterns, dim=-1)
    return norms.amax(-1) if norms.shape[-1] else norms.sum(-1)


def _count(patterns: Tensor, pattern_mask: Tensor | None) -> Tensor:
    """The number of patterns of each system, as a floating-point number."""
    if pattern_mask is None:
        return patterns.new_full(patterns.shape[:-2], float(patterns.shape[-2]))
    return (~pattern_mask).sum(-1).to(patterns.dtype).expand(patterns.shape[:-2])


def _column(beta: float | Tensor, state: Tensor) -> float | Tensor:
    """beta against one number a token."""
    return beta.to(state).unsqueeze(-1) if isinstance(beta, Tensor) else beta


def _check_patterns(patterns: Tensor) -> None:
    if patterns.dim() < 2:
        raise ValueError(
            f"patterns has shape {tuple(patterns.shape)}: pass one pattern a row, (K, d)"
        )


def _check_beta(beta: float | Tensor) -> None:
    least = float(beta.detach().min()) if isinstance(beta, Tensor) else beta
    if not least > 0:
        raise ValueError(f"beta={least!r} must be positive")
