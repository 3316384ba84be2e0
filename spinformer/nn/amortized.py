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

from spinformer.nn.streamed import RowBlock, StreamedHeads, row_blocks
from spinformer.solve.linear import add_transpose

__all__ = ["Amortization", "norm_pullback"]

# Entries of one block of rows: four of them are at work at once, in the cache.
_BLOCK = 2**18
_DEVICE_BLOCK = 2**26


@dataclass(frozen=True)
class Amortization:
    r"""What :class:`~spinformer.nn.couplings.AttentionCouplings` went through to its couplings.

    Attributes:
        query, key: (B, H, N, d_h).
        attention: the softmax before dropout, (B, H, N, N), zero where there is no coupling; or the
            couplings that form it in blocks.
        strength: (H,).
        projection: (2 d, d), from tokens to queries and keys.
        kept: the factors of dropout on ``attention``, 0 or 1 / (1 - p), or None.
    """

    query: Tensor
    key: Tensor
    attention: Tensor | StreamedHeads
    strength: Tensor
    projection: Tensor
    kept: Tensor | None = None

    @classmethod
    def of(cls, heads: StreamedHeads, projection: Tensor) -> Amortization:
        """That of couplings in blocks, in their precision."""
        query, key, strength = heads.tensors()[:3]
        return cls(query, key, heads, strength, projection)

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
        working, attention = given.dtype, self.attention
        streamed = isinstance(attention, StreamedHeads)
        slopes = _LogitPullback.apply(
            self.query.to(working),
            self.key.to(working),
            None if isinstance(attention, StreamedHeads) else attention.to(working),
            values,
            matrix,
            attention if streamed else None,
        )
        # J = s (A + A^T) / 2 and C = C^T: half the correlations times s reaches A. The factor goes
        # on the smaller tensor.
        nhead, width = self.query.shape[1], self.query.shape[-1]
        factor = self.strength.to(working) / (2 * math.sqrt(width))
        rows = self.projection.to(working).unflatten(0, (2, nhead, width))
        return slopes.flatten(2) @ (factor[:, None, None] * rows).flatten(0, 2)


class _LogitPullback(torch.autograd.Function):
    r"""(T k, T^T q) with :math:`T_{ij} = A_{ij}(C_{ij} - \sum_l A_{il} C_{il})`, C = u u^T + M.

    T is the cotangent of the logits. It is not kept, nor is u u^T: the backward pass makes them
    again, block by block of rows, in the cache. The softmax A is an input, or (``heads``) a
    function of q and k whose numbers can be had in blocks. The answer is in one piece,
    (B, N, 2, H, d_h), as the projection has it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        attention: Tensor | None,
        values: Tensor | None,
        matrix: Tensor | None,
        heads: StreamedHeads | None,
    ) -> Tensor:
        ctx.heads = heads
        pairs = _Pairs(attention, values, matrix, heads)
        batch, nhead, n, width = query.shape
        joint = query.new_empty(batch, n, 2, nhead, width)
        to_query, to_key = joint.permute(2, 0, 3, 1, 4)
        q, k = query.flatten(0, 1), key.flatten(0, 1)
        # Transposed, as matrix products run faster: q^T T rather than T^T q.
        sums = k.new_zeros(k.mT.shape)
        means = k.new_empty(*k.shape[:2], 1)  # of C over the softmax
        for block in _blocks(query):
            a, c = pairs.softmax(block), pairs.correlations(block)
            t = a * c
            mean = torch.sum(t, -1, keepdim=True, out=means[block.own])
            t.addcmul_(a, mean, value=-1)
            _part(to_query, block).copy_((t @ k[block.systems]).view(_part(to_query, block).shape))
            sums[block.systems].baddbmm_(q[block.own].mT, t)
        to_key.copy_(sums.mT.unflatten(0, (batch, nhead)))
        ctx.save_for_backward(query, key, attention, values, matrix, means)
        return joint

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, attention, values, matrix, means = ctx.saved_tensors
        heads: StreamedHeads | None = ctx.heads
        if torch.is_grad_enabled():
            return _differentiable(ctx, grads[0])
        pairs = _Pairs(attention, values, matrix, heads)
        scale = 1 / math.sqrt(query.shape[-1])
        of_query, of_key = (x.flatten(0, 1) for x in grads[0].permute(2, 0, 3, 1, 4))
        q, k = query.flatten(0, 1), key.flatten(0, 1)
        query_bar, key_bar = torch.empty_like(q), k.new_zeros(k.mT.shape)
        # Not in the layout of what they belong to: blocks are written to them by flat systems.
        attention_bar = None if attention is None else attention.new_empty(attention.shape)
        values_bar = None if values is None else values.new_zeros(values.shape)
        matrix_bar = None if matrix is None else matrix.new_empty(matrix.shape)
        for block in _blocks(query):
            own, systems = block.own, block.systems
            a, c = pairs.softmax(block), pairs.correlations(block)
            # Correlations and the cotangent of T without their means over the softmax.
            c -= means[own]
            t = c.mul_(a) if attention_bar is None else a * c
            e = torch.bmm(of_query[own], k[systems].mT).baddbmm_(q[own], of_key[systems].mT)
            scratch = a * e
            lean = scratch.sum(-1, keepdim=True)
            e -= lean
            of_rows = t @ of_key[systems]
            key_bar[systems].baddbmm_(of_query[own].mT, t)
            if attention_bar is not None:
                torch.mul(c, e, out=_flat(attention_bar)[own]).sub_(lean * means[own])
            else:
                # The cotangent of the logits that A is made of: a third cumulant.
                logits_bar = t.mul_(e)
                logits_bar.addcmul_(a, logits_bar.sum(-1, keepdim=True), value=-1)
                of_rows.baddbmm_(logits_bar, k[systems], alpha=scale)
                key_bar[systems].baddbmm_(q[own].mT, logits_bar, alpha=scale)
            query_bar[own] = of_rows
            c_bar = e.mul_(a)
            if matrix_bar is not None:
                _flat(matrix_bar)[own] = c_bar
            if values is not None and values_bar is not None:
                u, u_bar = values.flatten(0, 1), values_bar.flatten(0, 1)
                if c_bar.shape[-2] == c_bar.shape[-1]:
                    # One product with c_bar + c_bar^T.
                    torch.bmm(add_transpose(c_bar, out=scratch), u[own], out=u_bar[own])
                else:
                    u_bar[own].baddbmm_(c_bar, u[systems])
                    u_bar[systems].baddbmm_(c_bar.mT, u[own])
        return (
            query_bar.view_as(query),
            key_bar.mT.unflatten(0, key.shape[:2]),
            attention_bar,
            values_bar,
            matrix_bar,
            None,
        )


@dataclass(frozen=True)
class _Pairs:
    """Blocks of rows of the softmax and of the correlations, in numbers."""

    attention: Tensor | None
    values: Tensor | None
    matrix: Tensor | None
    heads: StreamedHeads | None

    def softmax(self, block: RowBlock) -> Tensor:
        """To be read only."""
        if self.heads is not None:
            return self.heads.softmax(block)
        assert self.attention is not None
        return _flat(self.attention)[block.own]

    def correlations(self, block: RowBlock) -> Tensor:
        """In memory of their own."""
        if self.values is None:
            assert self.matrix is not None
            return _flat(self.matrix)[block.own].clone()
        u = self.values.flatten(0, 1)
        product = torch.bmm(u[block.own], u[block.systems].mT)
        return product if self.matrix is None else product.add_(_flat(self.matrix)[block.own])


def _flat(matrices: Tensor) -> Tensor:
    """(B, H, N, N) as (B * H, N, N), the same memory where it is in one piece."""
    return matrices.flatten(0, 1)


def _part(states: Tensor, block: RowBlock) -> Tensor:
    """The block's rows of (B, H, N, d_h)."""
    return states[block.batch, block.heads, block.rows]


def _blocks(query: Tensor) -> Iterator[RowBlock]:
    size = _BLOCK if query.device.type == "cpu" else _DEVICE_BLOCK
    return row_blocks(query, size)


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The backward pass of :class:`_LogitPullback` at once, for derivatives of its own."""
    # New names: a dependence of one argument on another is not ours to follow.
    arguments: list[Any] = [None if x is None else x.view_as(x) for x in ctx.saved_tensors[:5]]
    query, key, attention, values, matrix = arguments
    if attention is None:
        attention = ctx.heads.of(query, key).attention()
    c = 0.0 if matrix is None else matrix
    c = c if values is None else c + values @ values.mT
    t = attention * (c - (attention * c).sum(-1, keepdim=True))
    joint = torch.stack([t @ key, t.mT @ query]).permute(1, 3, 0, 2, 4)
    wanted = [x for x, need in zip(arguments, ctx.needs_input_grad, strict=False) if need]
    found = iter(torch.autograd.grad(joint, wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in ctx.needs_input_grad)


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
