r"""The Energy Transformer: attention and a Hopfield network as one energy of normalized tokens.

Source: Hoover et al. (2023), "Energy Transformer".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spinformer.descent.algorithms import Algorithm
from spinformer.descent.attention import along, from_heads, row_log_sum, row_softmax, to_heads
from spinformer.descent.energy import Energy, check_tokens, clear, reciprocal

__all__ = [
    "EnergyAttention",
    "EnergyHopfield",
    "EnergyLayerNorm",
    "EnergyTransformer",
    "EnergyTransformerStep",
]


class EnergyAttention(Energy):
    r"""The attention energy of tokens g.

    .. math::
        E(g) = -\sum_h \frac{1}{\beta_h} \sum_q \log \sum_{k \ne q}
               e^{\beta_h\, (W^K_h g_k) \cdot (W^Q_h g_q)}

    A token does not attend to itself (the authors' program lets it); one without anybody to attend
    to contributes 0 and feels no force as a query. With the attention ``A_h = softmax(beta s_h)``
    the force on a token has two parts,

    .. math::
        -\frac{\partial E}{\partial g_i} =
            \sum_{h,k} A_{h,ik}\, {W^Q_h}^{\mathsf T} W^K_h\, g_k
          + \sum_{h,q} A_{h,qi}\, {W^K_h}^{\mathsf T} W^Q_h\, g_q .

    The first is a conventional attention layer with the values ``W^Q^T W^K g``; the second, from
    the tokens that attend to i, has no counterpart there, and without it the first descends
    nothing. Since also a masked softmax has an energy, any mask over pairs is allowed; but through
    the second part a token then hears those that attend to it: a causal mask does not make the
    force causal.

    :meth:`curvature` is state-dependent: ``-log sum exp`` is concave in the scores, so that its
    tangent, a bilinear form in the tokens, is an upper bound everywhere, with
    ``p_i = sum_h |W^Q_h^T W^K_h| (sum_k A_ik + sum_q A_qi)``. So there is a step that descends for
    every size up to 2, without a norm and whatever the weights are. The energy has no lower bound
    unless the tokens have a bounded length.

    Cost: O(H N^2 d_k) time and O(H N^2) memory, with O(H d^3) for the norms in the curvature.

    Args:
        query: ``W^Q``, one matrix a head as ``(H, d, d_k)``: queries are ``g @ query[h]``.
        key: ``W^K``, of the same shape.
        beta: inverse temperature, positive: a number or one a head ``(H,)``; None is
            ``1 / sqrt(d_k)``. The values of a tensor are not checked.
        graph: the pairs that may be, ``graph[..., q, k]``, broadcastable to ``(..., H, N, N)``:
            boolean, True where q may attend to k, or non-negative weights of the exponentials.
        attend_self: let a token attend to itself.

    Raises:
        ValueError: weights of another shape, or a number beta that is not positive.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        beta: float | Tensor | None = None,
        *,
        graph: Tensor | None = None,
        attend_self: bool = False,
    ) -> None:
        if query.dim() != 3 or query.shape != key.shape:
            raise ValueError(
                f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}: pass one matrix "
                "a head, both (H, d, d_k)"
            )
        if beta is not None and not isinstance(beta, Tensor) and not beta > 0:
            raise ValueError(f"beta={beta!r} must be positive")
        self.query = query
        self.key = key
        self.beta = 1 / math.sqrt(query.shape[-1]) if beta is None else beta
        self.graph = graph
        self.attend_self = attend_self

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        state = self._tokens(Y, mask)
        total = row_log_sum(self._logits(*self._project(state), mask), self._full(state, mask))
        return -(total / self._temper(total, 1)).sum((-2, -1))

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        as_query, as_key = self.forces(Y, mask)
        return -(as_query + as_key)

    def forces(self, Y: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The two parts of the force, each ``(..., N, d)``: of a token as query, and as key."""
        state = self._tokens(Y, mask)
        queries, keys = self._project(state)
        weights = row_softmax(self._logits(queries, keys, mask), self._full(state, mask))
        return from_heads(weights @ keys, self.query), from_heads(weights.mT @ queries, self.key)

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.attention(Y, mask)
        norms = self._norms()[:, None]
        return (norms * (weights.sum(-1) + weights.sum(-2))).sum(-2)

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """No lower bound of two tokens or more, ``2 sqrt(n - 1) sum_h |W^Q_h^T W^K_h|`` above.

        An attention matrix of n rows that sum to one has a spectral norm of at most ``sqrt(n)``,
        with entries off the diagonal only of at most ``sqrt(n - 1)``.
        """
        columns = count if self.attend_self else max(count - 1, 0)
        upper = 2 * math.sqrt(columns) * self._norms().sum()
        # Without a pair there is no energy.
        return torch.full_like(upper, -math.inf if columns > 0 else 0.0), upper

    def attention(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """``A_h``, ``(..., H, N, N)``, queries in rows; rows without anybody are zero."""
        state = self._tokens(Y, mask)
        return row_softmax(self._logits(*self._project(state), mask), self._full(state, mask))

    def _tokens(self, Y: Tensor, mask: Tensor | None) -> Tensor:
        return check_tokens(Y, mask, self.query.shape[-2], self.query.dtype)

    def _project(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return to_heads(state, self.query), to_heads(state, self.key)

    def _full(self, state: Tensor, mask: Tensor | None) -> bool:
        """Whether every token is known to have somebody to attend to."""
        return self.graph is None and mask is None and state.shape[-2] > (not self.attend_self)

    def _norms(self) -> Tensor:
        norms: Tensor = torch.linalg.matrix_norm(self.query @ self.key.mT, ord=2)
        return norms

    def _temper(self, like: Tensor, trailing: int) -> float | Tensor:
        """beta, against what has so many axes behind the heads."""
        if not isinstance(self.beta, Tensor):
            return self.beta
        return self.beta.to(like).reshape(*self.beta.shape, *(1 for _ in range(trailing)))

    def _logits(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """beta s, -inf where there is no pair, ``(..., H, N, N)``."""
        logits = (self._temper(queries, 2) * queries) @ keys.mT
        if self.graph is not None:
            logits = along(self.graph, logits)
        if not self.attend_self:
            own = torch.eye(logits.shape[-1], dtype=torch.bool, device=logits.device)
            logits = logits.masked_fill(own, -torch.inf)
        if mask is not None:
            pair = mask.unsqueeze(-1) | mask.unsqueeze(-2)
            logits = logits.masked_fill(pair.unsqueeze(-3), -torch.inf)
        return logits


class EnergyHopfield(Energy):
    r"""The memory of the Energy Transformer.

    .. math:: E(g) = -\tfrac12 \sum_{i \mu} \mathrm{relu}(\xi_\mu \cdot g_i)^2

    It is concave: a step along the force descends whatever its size. It has no lower bound unless
    the tokens have a bounded length; :class:`~spinformer.descent.feed_forward.MemoryEnergy` adds
    ``|Y|^2 / 2``. Cost: O(N K d).

    Args:
        patterns: ``xi``, ``(K, d)``.

    Raises:
        ValueError: patterns that are not a matrix.
    """

    def __init__(self, patterns: Tensor) -> None:
        if patterns.dim() != 2:
            raise ValueError(
                f"patterns has shape {tuple(patterns.shape)}: pass one pattern a row, (K, d)"
            )
        self.patterns = patterns

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return -self._overlap(self._tokens(Y, mask)).square().sum((-2, -1)) / 2

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return -self._overlap(self._tokens(Y, mask)) @ self.patterns

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.zeros_like(clear(Y, mask)[..., 0])

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.matrix_norm(self.patterns, ord=2)
        return -norm.square(), torch.zeros_like(norm)

    def step(self, Y: Tensor, size: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
        """``g + size relu(g xi^T) xi``, along the force: there is no curvature to divide by."""
        gradient = self.gradient(Y, mask)
        return clear(Y, mask) - size * gradient

    def step_bound(self) -> float:
        """Infinite."""
        return math.inf

    def _tokens(self, Y: Tensor, mask: Tensor | None) -> Tensor:
        return check_tokens(Y, mask, self.patterns.shape[1], self.patterns.dtype)

    def _overlap(self, state: Tensor) -> Tensor:
        return F.relu(state @ self.patterns.mT)


class EnergyLayerNorm:
    r"""Layer normalization as the gradient of a Lagrangian.

    .. math::
        g = \gamma \frac{x - \bar x}{\sqrt{v + \varepsilon}} + b = \frac{\partial L}{\partial x},
        \qquad v = \overline{(x - \bar x)^2}, \qquad
        L(x) = \gamma d \sqrt{v + \varepsilon} + b \cdot x

    L is a norm of an affine map of x, hence convex for :math:`\gamma \ge 0`, and the Jacobian
    :math:`\partial g / \partial x = (\gamma / s)(P - \hat x \hat x^{\mathsf T} / d)` is symmetric
    and positive semi-definite, with eigenvalues of at most :math:`\gamma / s`. Here
    :math:`s = \sqrt{v + \varepsilon}`, P removes the mean and :math:`\hat x = (x - \bar x) / s`,
    whose square is at most d. With :math:`\gamma < 0` what descends climbs. One gain a component
    would not be the gradient of anything.

    Args:
        gain: :math:`\gamma \ge 0`, a number or a scalar tensor (whose sign is not checked).
        bias: b, ``(d,)``; None for zero.
        eps: :math:`\varepsilon > 0`.

    Raises:
        ValueError: a negative gain, one of many entries, or an eps that is not positive.
    """

    def __init__(
        self, gain: float | Tensor = 1.0, bias: Tensor | None = None, eps: float = 1e-5
    ) -> None:
        if isinstance(gain, Tensor):
            if gain.numel() != 1:
                raise ValueError(
                    f"gain has shape {tuple(gain.shape)}: with more than one the norm is not the "
                    "gradient of a Lagrangian. Pass a scalar"
                )
            gain = gain.reshape(())
        elif not gain >= 0:
            raise ValueError(f"gain={gain!r} must not be negative: the energy would rise")
        if not eps > 0:
            raise ValueError(f"eps={eps!r} must be positive")
        self.gain = gain
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """``g``, of the shape of ``x`` ``(..., d)``."""
        out = self.gain * F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return out if self.bias is None else out + self.bias

    def scale(self, x: Tensor) -> Tensor:
        """``s = sqrt(v + eps)``, ``(...)``."""
        return (_center(x).square().mean(-1) + self.eps).sqrt()

    def lagrangian(self, x: Tensor) -> Tensor:
        """``L``, ``(...)``."""
        value = self.gain * x.shape[-1] * self.scale(x)
        return value if self.bias is None else value + x @ self.bias


class EnergyTransformer(Energy):
    r"""Tokens x that move along the force on their normalized selves, ``dx/dt = -dE/dg``.

    Along the continuous flow the energy never rises,

    .. math::
        \frac{\mathrm dE}{\mathrm dt} = -\sum_i
            \frac{\partial E}{\partial g_i} \cdot \frac{\partial g_i}{\partial x_i}
            \frac{\partial E}{\partial g_i} \le 0 ,

    since the norm is the gradient of a convex function. Steps of a fixed size can raise it; those
    of :meth:`safe_size` cannot. What comes to rest is g, not x: a force along the mean or along
    :math:`g - b` does not turn g, and x goes on. Its length grows without bound at the fixed points
    of g, and only while it does is the step in g ever finer.

    It is an energy of x, ``E(g(x))``, whose own step follows dE/dg and not the gradient in x.

    Args:
        norm: the energy layer norm.
        energy: of the normalized tokens, such as ``EnergyAttention(...) + EnergyHopfield(...)``.
    """

    def __init__(self, norm: EnergyLayerNorm, energy: Energy) -> None:
        self.norm = norm
        self.terms = energy

    def normalized(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``g``, ``(..., N, d)``; zero at absent tokens."""
        return clear(self.norm(check_tokens(x, mask)), mask)

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.terms.energy(self.normalized(Y, mask), mask)

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        r""":math:`J\, \partial E / \partial g` with the symmetric Jacobian of the norm."""
        force, state = self.force(Y, mask), clear(Y, mask)
        scale = self.norm.scale(state).unsqueeze(-1)
        unit = _center(state) / scale
        turning = _center(force)
        turning = turning - unit * (unit * force).mean(-1, keepdim=True)
        return -self.norm.gain / scale * turning

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Infinite: no bound is known that holds for steps of every length."""
        return torch.full_like(Y[..., 0], math.inf)

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """None are known."""
        bound = torch.tensor(math.inf)
        return -bound, bound

    def force(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``-dE/dg``, ``(..., N, d)``: the velocity of x."""
        return -self.terms.gradient(self.normalized(x, mask), mask)

    def rate(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``dE/dt`` along the continuous flow, ``(...)``, never positive."""
        force, state = self.force(x, mask), clear(x, mask)
        scale = self.norm.scale(state)
        centered = _center(force)
        along = (centered * _center(state)).sum(-1) / scale
        square = centered.square().sum(-1) - along.square() / x.shape[-1]
        return -(self.norm.gain / scale * square.clamp_min(0.0)).sum(-1)

    def step(self, Y: Tensor, size: float | Tensor = 1.0, mask: Tensor | None = None) -> Tensor:
        """``x + size * force``, ``(..., N, d)``; :meth:`safe_size` says which sizes descend.

        Args:
            Y: tokens x, ``(..., N, d)``.
            size: a number, or a tensor that broadcasts to ``Y``.
            mask: boolean ``(..., N)``, True where there is no token; those come out as zero.
        """
        force = self.force(Y, mask)
        return clear(Y, mask) + size * force

    def step_bound(self) -> float:
        """0: of no size is it known, whatever the state."""
        return 0.0

    def safe_size(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        r"""A size for each token at which a step cannot raise the energy, ``(..., N, 1)``.

        .. math:: a_i = \frac{2 s_i}{\gamma p_i + 2 f_i}, \qquad
                  f_i = |P F_i| / \sqrt d

        with the curvature p of the energy and the force F. Any smaller size descends too.
        Derivation: on the way from x to x + a F the deviation stays above s - a f, since it changes
        by at most the root mean square of what is added; the mean Jacobian J on that way is then
        positive semi-definite with eigenvalues of at most :math:`\gamma / (s - a f)`, and g moves
        by a J F. The quadratic upper bound changes by
        :math:`\sum_i -a F \cdot J F + \tfrac12 p\, a^2 |J F|^2`, which is not positive where
        :math:`a\, p\, \gamma / (s - a f) \le 2`.

        0 where no force acts.
        """
        g = self.normalized(x, mask)
        force = _center(-self.terms.gradient(g, mask))
        strength = force.square().mean(-1)
        still = strength == 0
        root = strength.masked_fill(still, 1.0).sqrt().masked_fill(still, 0.0)
        scale = self.norm.scale(clear(x, mask))
        bound = 2 * scale * reciprocal(self.norm.gain * self.terms.curvature(g, mask) + 2 * root)
        return bound.masked_fill(still, 0.0).unsqueeze(-1)


@dataclass(frozen=True)
class EnergyTransformerStep(Algorithm):
    """``x - size dE/dg``, of an :class:`EnergyTransformer`.

    Attributes:
        size: positive.
        safe: no token's size above what is proven not to raise the energy.

    Raises:
        TypeError: of the step, another energy.
    """

    size: float
    safe: bool = False

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        if not isinstance(energy, EnergyTransformer):
            raise TypeError(
                f"energy is {type(energy).__name__}: this is the step of an EnergyTransformer"
            )
        size: float | Tensor = self.size
        if self.safe:
            size = energy.safe_size(Y, mask).clamp_max(self.size)
        return energy.step(Y, size, mask)

    def guaranteed(self, energy: Energy, count: int) -> Tensor:
        return torch.tensor(self.safe)


def _center(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)
