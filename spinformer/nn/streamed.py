r"""Softmax couplings as a function of queries and keys, worked through in blocks that fit a cache.

A fixed point applies J many times and differentiates it once. So the weights are either kept as
plain numbers, formed once, or formed again, block by block, at every application. In both cases
the graph holds queries and keys only, and the backward pass turns the cotangent of a block of
weights into those of its queries and keys while it is still in the cache. With
:math:`A = \mathrm{softmax}(L)`, :math:`y = A x` and cotangents marked by a bar,

.. math:: \bar L_{ij} = A_{ij}\Big(\bar A_{ij} - \sum_l A_{il} \bar A_{il}\Big),\qquad
          \bar A = \bar y\, x^{\mathsf T} .
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spinformer.solve.linear import add_transpose
from spinformer.spins.couplings import Couplings, Dense

__all__ = ["Bonds", "RowBlock", "StreamedHeads", "attention_weights", "row_blocks"]

# Bytes of a block of weights: a share of a core's own cache, or enough work for a device.
_BLOCK = 2**20
_DEVICE_BLOCK = 2**28
# Weights beyond this size are formed at every application rather than kept: two to three times the
# time and none of the memory.
_KEPT = 2**30


@dataclass(frozen=True)
class Bonds:
    """Which pairs of tokens are coupled.

    Attributes:
        num_spins: N.
        blocked: bool, broadcastable to (B, H, N, N), pairs without a coupling, or None.
        bias: finite bias of the logits, broadcastable likewise, or None.
    """

    num_spins: int
    blocked: Tensor | None = None
    bias: Tensor | None = None

    @functools.cached_property
    def silent(self) -> Tensor | None:
        """Rows without a neighbour, bool, broadcastable to (B, H, N, 1); None if there is none."""
        if self.blocked is None:
            return None if self.num_spins > 1 else torch.ones(1, 1, 1, 1, dtype=torch.bool)
        itself = torch.eye(self.num_spins, dtype=torch.bool, device=self.blocked.device)
        return (self.blocked | itself).all(-1, keepdim=True)


def attention_weights(query: Tensor, key: Tensor, bonds: Bonds) -> Tensor:
    """Softmax over the neighbours, (B, H, N, N); zero where there is none. Differentiable."""
    logits = (query / math.sqrt(query.shape[-1])) @ key.mT
    if bonds.bias is not None:
        logits = logits + bonds.bias
    # A weight that vanishes passes nothing on to its logit: the graph need not know that this was
    # overwritten, and the backward pass is spared two walks through (N, N) matrices.
    _forbid(logits.detach(), bonds.blocked)
    weights = logits.softmax(-1)
    if bonds.silent is not None:
        weights = weights.masked_fill(bonds.silent.to(weights.device), 0.0)
    return weights


def _forbid(logits: Tensor, blocked: Tensor | None, first: int = 0) -> None:
    """Leave the diagonal and blocked pairs no weight, in place; the rows begin at ``first``.

    The most negative number, not -inf: a row without neighbours stays finite.
    """
    lowest = torch.finfo(logits.dtype).min
    logits.diagonal(first, -2, -1).fill_(lowest)
    if blocked is not None:
        logits.masked_fill_(blocked, lowest)


@dataclass(frozen=True)
class RowBlock:
    """Rows of the weights of some systems: whole sequences, heads of one, or rows of one head."""

    batch: slice
    heads: slice
    systems: slice  # of the B * H
    rows: slice

    @property
    def own(self) -> tuple[slice, slice]:
        return self.systems, self.rows

    def part(self, pairs: Tensor) -> Tensor:
        """The block of what broadcasts to (B, H, N, N), as (systems, rows, N)."""
        b, h, n = pairs.shape[:3]
        part = pairs[
            self.batch if b > 1 else slice(None),
            self.heads if h > 1 else slice(None),
            self.rows if n > 1 else slice(None),
        ]
        sizes = (self.batch.stop - self.batch.start, self.heads.stop - self.heads.start)
        return part.expand(*sizes, -1, -1).flatten(0, 1)


def row_blocks(query: Tensor, entries: int) -> Iterator[RowBlock]:
    """Cut the weights (B, H, N, N) of queries (B, H, N, d_h) into blocks of so many entries."""
    batch, nhead, n = query.shape[:3]
    if batch * n == 0:
        return
    rows = max(1, entries // n)
    if rows >= n * nhead:
        step = rows // (n * nhead)
        for b in range(0, batch, step):
            end = min(b + step, batch)
            systems = slice(b * nhead, end * nhead)
            yield RowBlock(slice(b, end), slice(0, nhead), systems, slice(0, n))
        return
    step = max(1, rows // n)
    for b in range(batch):
        for h in range(0, nhead, step):
            end = min(h + step, nhead)
            systems = slice(b * nhead + h, b * nhead + end)
            for i in range(0, n, rows):
                part = slice(i, min(i + rows, n))
                yield RowBlock(slice(b, b + 1), slice(h, end), systems, part)


class StreamedHeads(Couplings):
    r"""The couplings of :class:`~spinformer.nn.couplings.AttentionCouplings`, in blocks.

    Derivatives of every order exist; second and higher ones write the weights down. Memory of the
    first: that of queries and keys, beside the weights where they are kept.

    Args:
        query, key: (B, H, N, d_h).
        strength: (H,).
        bonds: which pairs are coupled.
        symmetric: half the sum of the weights and their transpose, instead of the weights.
        weights: their numbers, from :meth:`kept`; None forms them at every application.
        softmax: of symmetric ones, the numbers before they were symmetrized, likewise.
        transposed: J^T.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        strength: Tensor,
        bonds: Bonds,
        symmetric: bool,
        weights: Tensor | None = None,
        softmax: Tensor | None = None,
        transposed: bool = False,
    ) -> None:
        self._query, self._key, self._strength = query, key, strength
        self._bonds, self._symmetric = bonds, symmetric
        self._weights, self._softmax = weights, softmax if symmetric else weights
        self._transposed = transposed and not symmetric

    @property
    def num_spins(self) -> int:
        return self._query.shape[-2]

    @property
    def batch_shape(self) -> torch.Size:
        return self._query.shape[:-2]

    @property
    def is_symmetric(self) -> bool:
        return self._symmetric

    def tensors(self) -> tuple[Tensor, ...]:
        """Queries, keys and strengths; also the weights that are kept, which follow from these and
        have no gradient of their own."""
        return self._query, self._key, self._strength, *self._numbers

    def with_tensors(self, *tensors: Tensor) -> StreamedHeads:
        return self._made(tensors[:3], tensors[3:], self._transposed)

    def kept(self, always: bool = False, softmax: bool = False) -> StreamedHeads:
        """The same couplings with their weights formed, once, unless those would be too large.

        ``softmax`` keeps symmetric ones as they were before, too: derivatives ask for these.
        """
        shape = (*self.batch_shape, self.num_spins, self.num_spins)
        softmax = softmax and self._symmetric
        size = (1 + softmax) * math.prod(shape) * self._query.element_size()
        if not always and size > _KEPT:
            return self
        with torch.no_grad():
            weights = self._query.new_empty(shape)
            formed = torch.empty_like(weights) if softmax else weights
            flat, flat_formed = weights.flatten(0, 1), formed.flatten(0, 1)
            for block in self._blocks():
                self._form(block, flat_formed[block.own])
                if self._symmetric and block.rows.stop == self.num_spins:
                    add_transpose(flat_formed[block.systems], flat[block.systems]).div_(2)
        numbers = (weights, formed) if softmax else (weights,)
        return self._made(self.tensors()[:3], numbers, self._transposed)

    def apply(self, state: Tensor) -> Tensor:
        if state.shape[:-1] != self._query.shape[:-1] or 0 in state.shape:
            return self.to_dense() @ state
        strength = self._strength[:, None, None]
        if not torch.is_grad_enabled():
            return strength * self._mix(state)
        # Two nodes, one for each kind of input: autograd runs a node for all of its inputs, and
        # the adjoint iteration, which asks for the cotangent of the state alone, must not pay for
        # those of queries and keys, nor these for the other.
        y: Tensor = _OfState.apply(state, self)
        if self._query.requires_grad or self._key.requires_grad:
            y = y + _OfWeights.apply(self._query, self._key, (self, state))
        return strength * y

    def to_dense(self) -> Tensor:
        return self._strength[:, None, None] * self._matrix()

    def transpose(self) -> StreamedHeads:
        return self._made(self.tensors()[:3], self._numbers, not self._transposed)

    def symmetrize(self) -> StreamedHeads | Dense:
        return self if self._symmetric else Dense(self.to_dense(), check=False).symmetrize()

    def of(self, query: Tensor, key: Tensor) -> StreamedHeads:
        """The same couplings as a function of other names of their queries and keys."""
        return self.with_tensors(query, key, *self.tensors()[2:])

    def attention(self) -> Tensor:
        """The softmax, before it is symmetrized, (B, H, N, N). Differentiable."""
        return attention_weights(self._query, self._key, self._bonds)

    def _matrix(self) -> Tensor:
        """A, differentiable."""
        weights = self.attention()
        if self._symmetric:
            return (weights + weights.mT) / 2
        return weights.mT if self._transposed else weights

    @property
    def _numbers(self) -> tuple[Tensor, ...]:
        """The weights that are kept, and the softmax where that is something else."""
        if self._weights is None:
            return ()
        if not self._symmetric or self._softmax is None:
            return (self._weights,)
        return self._weights, self._softmax

    def _made(
        self, tensors: Sequence[Tensor], numbers: Sequence[Tensor], transposed: bool
    ) -> StreamedHeads:
        query, key, strength = tensors
        weights, softmax = (*numbers, None, None)[:2]
        return StreamedHeads(
            query, key, strength, self._bonds, self._symmetric, weights, softmax, transposed
        )

    # -- in numbers, without a graph --------------------------------------------------------------

    def _mix(self, state: Tensor) -> Tensor:
        """A x, or its transpose."""
        transposed = self._transposed
        if self._weights is not None:
            return (self._weights.mT if transposed else self._weights) @ state
        x = state.flatten(0, 1)
        y = torch.zeros_like(x)
        for block in self._blocks():
            weights = self._form(block)
            if self._symmetric or not transposed:
                y[block.own] += weights @ x[block.systems]
            if self._symmetric or transposed:
                y[block.systems] += weights.mT @ x[block.own]
        return (y / 2 if self._symmetric else y).view_as(state)

    def _pull(self, cotangent: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents of queries and keys from that of A x."""
        g, x = cotangent.flatten(0, 1), state.flatten(0, 1)
        if self._transposed:
            g, x = x, g
        if self._symmetric:  # the symmetric part of g x^T, as one product
            g, x = torch.cat([g, x], -1) / 2, torch.cat([x, g], -1)
        scale = 1 / math.sqrt(self._query.shape[-1])
        query, key = scale * self._query.flatten(0, 1), self._key.flatten(0, 1)
        of_query, of_key = torch.empty_like(query), torch.zeros_like(key)
        for block in self._blocks():
            weights = self.softmax(block)
            slope = g[block.own] @ x[block.systems].mT
            slope *= weights
            slope.addcmul_(weights, slope.sum(-1, keepdim=True), value=-1)
            of_query[block.own] = slope @ key[block.systems]
            of_key[block.systems] += slope.mT @ query[block.own]
        return (scale * of_query).view_as(self._query), of_key.view_as(self._key)

    def softmax(self, block: RowBlock) -> Tensor:
        """Rows of the softmax A, (systems, rows, N), to be read only; no graph."""
        if self._softmax is None:
            return self._form(block)
        return self._softmax.flatten(0, 1)[block.own]

    def _form(self, block: RowBlock, out: Tensor | None = None) -> Tensor:
        """The softmax of a block, before it is symmetrized."""
        query = self._query.flatten(0, 1)[block.own] / math.sqrt(self._query.shape[-1])
        bonds = self._bonds
        weights = torch.bmm(query, self._key.flatten(0, 1)[block.systems].mT, out=out)
        if bonds.bias is not None:
            weights += block.part(bonds.bias)
        _forbid(
            weights, None if bonds.blocked is None else block.part(bonds.blocked), block.rows.start
        )
        torch.softmax(weights, -1, out=weights)
        if bonds.silent is not None:
            weights.masked_fill_(block.part(bonds.silent.to(weights.device)), 0.0)
        return weights

    def _blocks(self) -> Iterator[RowBlock]:
        size = _BLOCK if self._query.device.type == "cpu" else _DEVICE_BLOCK
        return row_blocks(self._query, size // self._query.element_size())


class _OfState(torch.autograd.Function):
    """A x as a function of x."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, couplings: StreamedHeads) -> Tensor:
        ctx.couplings = couplings
        return couplings._mix(state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # to be differentiated, in the weights too
            return ctx.couplings._matrix().mT @ grad, None
        return ctx.couplings.transpose()._mix(grad), None


class _OfWeights(torch.autograd.Function):
    """Zero, with the derivative of A x in queries and keys."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, rest: tuple[StreamedHeads, Tensor]) -> Tensor:
        ctx.rest = rest
        return rest[1].new_zeros(()).expand(rest[1].shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        couplings, state = ctx.rest
        if not torch.is_grad_enabled():
            return *couplings._pull(grad, state), None
        # New names: the state may itself depend on queries and keys.
        query, key = (t.view_as(t) for t in (couplings._query, couplings._key))
        y = couplings.of(query, key)._matrix() @ state
        of_query, of_key = torch.autograd.grad(y, (query, key), grad, create_graph=True)
        return of_query, of_key, None
