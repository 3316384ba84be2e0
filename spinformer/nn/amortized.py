r"""How amortized couplings answer to the tokens that they were computed from.

With :math:`F(h, J(h))` the magnetization as the total derivative is

.. math:: -\frac{\mathrm dF}{\mathrm dh} = m
          + \tfrac12 \sum_{m \ne n} \langle S_m\cdot S_n\rangle \frac{\partial J_{mn}}{\partial h},

and the second term is the vector-Jacobian product of the couplings with half the correlations. It
is written here in closed form, as ordinary differentiable code: training needs one derivative more
of it, and the double backward pass that autograd would make of a first one is slower and keeps
more (``docs/theory/total_derivative.md`` has the numbers).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Amortization", "norm_pullback"]

_Index = tuple[slice, ...]


@dataclass(frozen=True)
class Amortization:
    r"""What :class:`~spinformer.nn.couplings.AttentionCouplings` went through to its couplings.

    Attributes:
        projected: queries and keys, (B, N, 2, H, d_h).
        attention: the softmax before dropout, (B, H, N, N), zero where there is no coupling.
        kept: the factors of dropout on it, 0 or 1 / (1 - p), or None.
        strength: (H,).
        projection: (2 d, d), from tokens to queries and keys.
    """

    projected: Tensor
    attention: Tensor
    kept: Tensor | None
    strength: Tensor
    projection: Tensor

    def pullback(self, values: Tensor | None, matrix: Tensor | None = None) -> Tensor:
        r"""The tokens' share in :math:`\tfrac12\sum_{h, i\ne j} C^h_{ij} J^h_{ij}`, C held fixed.

        Args:
            values: u, (B, H, N, D), in the precision to work in, or None.
            matrix: symmetric M, (B, H, N, N), or None: :math:`C_{ij} = u_i\cdot u_j + M_{ij}`.
                Where there is no coupling, on the diagonal too, finite entries don't matter.

        Returns:
            the derivative in the (normalized) tokens, (B, N, d). Differentiable in all that it
            is computed from.
        """
        if self.kept is not None:
            # What dropout has taken out of the couplings has no slope.
            product = 0.0 if values is None else values @ values.mT
            matrix = (product if matrix is None else matrix + product) * self.kept
            values = None
        given = matrix if values is None else values
        assert given is not None
        working = given.dtype
        slopes = _LogitPullback.apply(
            self.projected.to(working), self.attention.to(working), values, matrix
        )
        # J = s (A + A^T) / 2 and C = C^T: half the correlations times s reaches A. The factor goes
        # on the smaller tensor.
        factor = self.strength.to(working) / (2 * math.sqrt(self.projected.shape[-1]))
        rows = self.projection.to(working).unflatten(0, self.projected.shape[2:])
        return slopes.flatten(2) @ (factor[:, None, None] * rows).flatten(0, 2)


class _LogitPullback(torch.autograd.Function):
    r"""(T k, T^T q) with :math:`T_{ij} = A_{ij}(C_{ij} - \sum_l A_{il} C_{il})`, C = u u^T + M.

    T is the cotangent of the logits. It is not kept, nor is u u^T: the backward pass makes them
    again, block by block of rows, in the cache.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        attention: Tensor,
        values: Tensor | None,
        matrix: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(projected, attention, values, matrix)
        query, key = _split(projected)
        to_query, to_key = torch.empty_like(query), torch.zeros_like(key)
        for rows, systems in _blocks(attention):
            a = attention[rows]
            t = _correlations(values, matrix, rows, systems).mul_(a)
            t.addcmul_(a, t.sum(-1, keepdim=True), value=-1)
            to_query[rows] = t @ key[systems]
            to_key[systems] += t.mT @ query[rows]
        return _join(to_query, to_key)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        projected, attention, values, matrix = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(projected, attention, values, matrix, grads[0])
        (query, key), (of_query, of_key) = _split(projected), _split(grads[0])
        query_bar, key_bar = torch.empty_like(query), torch.zeros_like(key)
        attention_bar = torch.empty_like(attention)
        # a k^T + q b^T as one product.
        left, right = torch.cat([of_query, query], -1), torch.cat([key, of_key], -1)
        values_bar = None if values is None else torch.zeros_like(values)
        matrix_bar = None if matrix is None else torch.empty_like(attention)
        for rows, systems in _blocks(attention):
            a = attention[rows]
            c = _correlations(values, matrix, rows, systems)
            t = a * c
            mean = t.sum(-1, keepdim=True)
            t.addcmul_(a, mean, value=-1)
            query_bar[rows] = t @ of_key[systems]
            key_bar[systems] += t.mT @ of_query[rows]
            t_bar = left[rows] @ right[systems].mT
            lean = torch.mul(a, t_bar, out=t).sum(-1, keepdim=True)
            # A gets (C - mean) T_bar - lean C.
            t_bar -= lean
            torch.mul(c.sub_(mean), t_bar, out=attention_bar[rows]).sub_(lean * mean)
            c_bar = torch.mul(a, t_bar, out=t if matrix_bar is None else matrix_bar[rows])
            if values is not None and values_bar is not None:
                values_bar[rows] += c_bar @ values[systems]
                values_bar[systems] += c_bar.mT @ values[rows]
        return _join(query_bar, key_bar), attention_bar, values_bar, matrix_bar


def _split(projected: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, (B, H, N, d_h), each in one piece: they are read many times."""
    query, key = projected.permute(2, 0, 3, 1, 4).contiguous()
    return query, key


def _join(query: Tensor, key: Tensor) -> Tensor:
    return torch.stack([query.transpose(1, 2), key.transpose(1, 2)], 2)


def _correlations(
    values: Tensor | None, matrix: Tensor | None, rows: _Index, systems: _Index
) -> Tensor:
    """Rows of C, in memory of their own."""
    if values is None:
        assert matrix is not None
        return matrix[rows].clone()
    product = values[rows] @ values[systems].mT
    return product if matrix is None else product.add_(matrix[rows])


def _differentiable(
    projected: Tensor,
    attention: Tensor,
    values: Tensor | None,
    matrix: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """The backward pass of :class:`_LogitPullback` at once, for derivatives of its own."""
    (query, key), (of_query, of_key) = _split(projected), _split(grad)
    c = 0.0 if matrix is None else matrix
    c = c if values is None else c + values @ values.mT
    mean = (attention * c).sum(-1, keepdim=True)
    t = attention * (c - mean)
    t_bar = of_query @ key.mT + query @ of_key.mT
    lean = (attention * t_bar).sum(-1, keepdim=True)
    c_bar = attention * (t_bar - lean)
    return (
        _join(t @ of_key, t.mT @ of_query),
        (c - mean) * t_bar - lean * c,
        None if values is None else (c_bar + c_bar.mT) @ values,
        None if matrix is None else c_bar,
    )


# Entries of one block of rows: a few of them fit into a core's cache.
_BLOCK = 2**17


def _blocks(matrices: Tensor) -> Iterator[tuple[_Index, _Index]]:
    """Indices that cut (B, H, N, N) into blocks: of its rows, and of all sites of the same systems.

    A block is a part of the rows of one matrix, or some whole matrices.
    """
    batch, heads, length, _ = matrices.shape
    every = slice(None)
    together = max(1, _BLOCK // max(1, length * length))
    some = max(1, min(heads, together))
    batches = max(1, together // heads) if some == heads else 1
    height = max(1, min(length, _BLOCK // max(1, length)))
    for b in range(0, batch, batches):
        for h in range(0, heads, some):
            systems = slice(b, b + batches), slice(h, h + some)
            for i in range(0, length, height):
                yield (*systems, slice(i, i + height)), (*systems, every)


def norm_pullback(norm: nn.LayerNorm | nn.RMSNorm, x: Tensor, cotangent: Tensor) -> Tensor:
    r"""The cotangent of ``x`` that one of ``norm(x)`` comes from, in the latter's precision.

    .. math:: \bar x = r\big(g - \overline{g} - \hat x\,\overline{g \hat x}\big),\qquad
              g = \gamma\,\bar y,\quad \hat x = r (x - \overline{x}),

    with means over channels and :math:`r` one over the root of the variance plus eps;
    root-mean-square norms subtract no mean.
    """
    x = x.to(cotangent.dtype)
    g = cotangent if norm.weight is None else cotangent * norm.weight.to(cotangent.dtype)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    pulled: Tensor = _NormPullback.apply(x, g, eps, isinstance(norm, nn.LayerNorm))
    return pulled


class _NormPullback(torch.autograd.Function):
    r"""P g = r (g - x^ mean(g x^)) on centered g, where P is symmetric and depends on x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, eps: float, center: bool) -> Tensor:
        ctx.save_for_backward(x, g)
        ctx.eps, ctx.center = eps, center
        r, unit = _normalized(x, eps, center)
        return _project(r, unit, _centered(g, center))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        r, unit = _normalized(x, ctx.eps, ctx.center)
        g, grad = _centered(g, ctx.center), _centered(grads[0], ctx.center)
        # <grad, P g> = r (<grad, g> - <grad, x^> <g, x^> / d), with dr = -r^2 <x^, dx> / d.
        along, across = (unit * g).mean(-1, keepdim=True), (unit * grad).mean(-1, keepdim=True)
        both = along * across
        radial = (grad * g).mean(-1, keepdim=True) - 3 * both
        x_bar = -r.square() * (along * grad + across * g + radial * unit)
        return x_bar, r * (grad - unit * across), None, None


def _centered(g: Tensor, center: bool) -> Tensor:
    return g - g.mean(-1, keepdim=True) if center else g


def _normalized(x: Tensor, eps: float, center: bool) -> tuple[Tensor, Tensor]:
    """r and x^."""
    x = _centered(x, center)
    r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return r, r * x


def _project(r: Tensor, unit: Tensor, g: Tensor) -> Tensor:
    return r * (g - unit * (g * unit).mean(-1, keepdim=True))
