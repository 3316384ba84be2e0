r"""Learned couplings whose bonds are matrices, for a fixed number of sites.

Only independent entries are parameters. A head of N sites and D channels has N (N - 1) / 2 pairs
i < j, each with one block, or with two where nothing ties :math:`J_{ij}` to :math:`J_{ji}`:

=====================  ====================  ==============================
symmetric_between      symmetric_within      parameters
=====================  ====================  ==============================
True                   True                  N (N - 1) / 2 * D (D + 1) / 2
True                   False                 N (N - 1) / 2 * D^2
False                  True                  N (N - 1) * D (D + 1) / 2
False                  False                 N (N - 1) * D^2
=====================  ====================  ==============================

The blocks are stored as ``(H, K, pairs, D, D)``, K = 1 or 2: first :math:`J_{ji}` and last
:math:`J_{ij}^{\mathsf T}`, which are one where :math:`J_{ij} = J_{ji}^{\mathsf T}`. The pairs of a
site with all later ones lie next to each other, so each of these strips is a matrix without a copy.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from spinformer.nn.masks import Masks
from spinformer.spins.couplings import Couplings
from spinformer.spins.couplings.checks import check_count
from spinformer.spins.couplings.stored import block_matrix_product

__all__ = ["BlockMatrix", "BlockStrips", "MatrixCouplings"]

# Rows N D of the matrix of a head up to which it is written down on a CPU. Above it the strips win:
# they are half as large, stay in the cache while they are used twice, and need no gradient of the
# size of the matrix.
_WRITTEN_ROWS = 512
_ROWS_AT_ONCE = 32


class BlockMatrix(Couplings):
    """One matrix ``(..., H, N D, N D)`` a head, with zero diagonal blocks by its maker.

    Args:
        matrix: the components of a site next to each other.
        dim: D.
        symmetric: whether the matrix is, by construction.
    """

    def __init__(self, matrix: Tensor, dim: int, symmetric: bool) -> None:
        self._matrix, self._dim, self._symmetric = matrix, dim, symmetric

    @property
    def num_spins(self) -> int:
        return self._matrix.shape[-1] // self._dim

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def batch_shape(self) -> torch.Size:
        return self._matrix.shape[:-2]

    @property
    def is_symmetric(self) -> bool:
        return self._symmetric

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._matrix,)

    def with_tensors(self, *tensors: Tensor) -> BlockMatrix:
        (matrix,) = tensors
        return BlockMatrix(matrix, self._dim, self._symmetric)

    def apply(self, state: Tensor) -> Tensor:
        return block_matrix_product(self._matrix, state)

    def to_dense(self) -> Tensor:
        sizes = (self.num_spins, self._dim)
        return self._matrix.unflatten(-1, sizes).unflatten(-3, sizes).transpose(-3, -2)

    def norms(self) -> Tensor:
        """Frobenius norm of every bond, (..., H, N, N)."""
        return torch.linalg.vector_norm(self.to_dense(), dim=(-2, -1))

    def transpose(self) -> BlockMatrix:
        return BlockMatrix(self._matrix.mT, self._dim, self._symmetric)

    def symmetrize(self) -> BlockMatrix:
        if self._symmetric:
            return self
        return BlockMatrix((self._matrix + self._matrix.mT) / 2, self._dim, True)


class BlockStrips(Couplings):
    """The same couplings without the matrix: the blocks of the pairs as they are stored.

    A state is multiplied strip by strip, each with both sides of its pairs. Every entry of a
    symmetric J is read from memory once a product, not twice, and its gradient is written once.

    Args:
        blocks: (H, K, pairs, D, D), see above.
        num_spins: N.
    """

    def __init__(self, blocks: Tensor, num_spins: int) -> None:
        self._blocks, self._num_spins = blocks, num_spins

    @property
    def num_spins(self) -> int:
        return self._num_spins

    @property
    def dim(self) -> int:
        return self._blocks.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self._blocks.shape[:1]

    @property
    def is_symmetric(self) -> bool:
        return self._blocks.shape[1] == 1

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._blocks,)

    def with_tensors(self, *tensors: Tensor) -> BlockStrips:
        (blocks,) = tensors
        return BlockStrips(blocks, self._num_spins)

    def apply(self, state: Tensor) -> Tensor:
        self._check_state(state)
        return _product(self._blocks, state)

    def written_out(self) -> BlockMatrix:
        """The same couplings as matrices."""
        dense = self.to_dense().transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)
        return BlockMatrix(dense, self.dim, self.is_symmetric)

    def to_dense(self) -> Tensor:
        return self._pairwise(self._blocks[:, 0], self._blocks[:, -1].mT)

    def norms(self) -> Tensor:
        """Frobenius norm of every bond, (H, N, N)."""
        norms = torch.linalg.vector_norm(self._blocks, dim=(-2, -1))
        return self._pairwise(norms[:, 0], norms[:, -1])

    def _pairwise(self, below: Tensor, above: Tensor) -> Tensor:
        """(H, N, N, ...) with (H, pairs, ...) below and above a zero diagonal."""
        n = self._num_spins
        first, second = torch.triu_indices(n, n, 1, device=self.device)
        full = below.new_zeros(n, n, below.shape[0], *below.shape[2:])
        full = full.index_put((second, first), below.transpose(0, 1))
        full = full.index_put((first, second), above.transpose(0, 1))
        return full.movedim(2, 0)

    def transpose(self) -> BlockStrips:
        return BlockStrips(self._blocks.flip(1), self._num_spins)

    def symmetrize(self) -> BlockStrips:
        return BlockStrips(self._blocks.mean(1, keepdim=True), self._num_spins)


# -- products with strips ------------------------------------------------------------------------


def _product(blocks: Tensor, state: Tensor, transposed: bool = False) -> Tensor:
    """J or J^T times ``(..., H, N, D)``.

    The derivatives in state and blocks are two branches of the graph: a function of two arguments
    computes both gradients whenever one is asked for, and every step of an adjoint iteration asks
    for that in the state, which costs far less.
    """
    state = state.expand(*_leading(blocks, state), *state.shape[-2:])
    force = _InState.apply(state, (blocks,), transposed)
    if torch.is_grad_enabled() and blocks.requires_grad:
        force = force + _InBlocks.apply(blocks, (state,), transposed)
    return force


def _leading(blocks: Tensor, state: Tensor) -> torch.Size:
    return torch.Size(torch.broadcast_shapes(state.shape[:-2], blocks.shape[:1]))


class _InState(torch.autograd.Function):
    """The product as a function of the state. The blocks come in a tuple, unseen by autograd."""

    @staticmethod
    def forward(ctx: FunctionCtx, state: Tensor, held: tuple[Tensor], transposed: bool) -> Tensor:
        ctx.blocks, ctx.transposed = held[0], transposed  # type: ignore[attr-defined]
        return _multiply(held[0], state, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _product(ctx.blocks, grad, not ctx.transposed), None, None


class _InBlocks(torch.autograd.Function):
    """The product as a function of the blocks, less its value: zero."""

    @staticmethod
    def forward(ctx: FunctionCtx, blocks: Tensor, held: tuple[Tensor], transposed: bool) -> Tensor:
        ctx.state, ctx.transposed, ctx.kinds = held[0], transposed, blocks.shape[1]  # type: ignore[attr-defined]
        return torch.zeros_like(held[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Outer.apply(grad, ctx.state, ctx.kinds, ctx.transposed), None, None


class _Outer(torch.autograd.Function):
    """Gradient of ``force . J state`` (or ``J^T``) in the blocks: bilinear in force and state."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, force: Tensor, state: Tensor, kinds: int, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(force, state)
        ctx.transposed = transposed  # type: ignore[attr-defined]
        if transposed:
            force, state = state, force
        return _outer(force, state, kinds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        force, state = ctx.saved_tensors
        return (
            _product(grad, state, ctx.transposed),
            _product(grad, force, not ctx.transposed),
            None,
            None,
        )


def _strips(num_spins: int, dim: int) -> list[tuple[slice, slice, slice]]:
    """Of each site with a later one: its pairs, its components, the components of later sites."""
    strips, start = [], 0
    for site in range(num_spins - 1):
        stop = start + num_spins - 1 - site
        after = (site + 1) * dim
        strips.append((slice(start, stop), slice(site * dim, after), slice(after, None)))
        start = stop
    return strips


def _multiply(blocks: Tensor, state: Tensor, transposed: bool) -> Tensor:
    heads, _, _, dim, _ = blocks.shape
    num_spins = state.shape[-2]
    rows = state.reshape(-1, heads, num_spins * dim)
    force = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    strips = _strips(num_spins, dim)
    for head in range(heads):
        below, above = blocks[head, 0], blocks[head, -1]
        if transposed:
            below, above = above, below
        given, found = rows[:, head], force[:, head]
        for pairs, own, later in strips:
            found[:, own].addmm_(given[:, later], above[pairs].flatten(0, 1))
            found[:, later].addmm_(given[:, own], below[pairs].flatten(0, 1).mT)
    return force.view(state.shape)


def _outer(force: Tensor, state: Tensor, kinds: int) -> Tensor:
    heads, num_spins, dim = state.shape[-3:]
    forces = force.reshape(-1, heads, num_spins * dim)
    states = state.reshape(-1, heads, num_spins * dim)
    if kinds == 1:
        # One block serves both directions of a pair: both products are one with twice the rows.
        forces, states = torch.cat((forces, states)), torch.cat((states, forces))
    grad = state.new_empty(heads, kinds, num_spins * (num_spins - 1) // 2, dim, dim)
    for head in range(heads):
        f, s = forces[:, head], states[:, head]
        for pairs, own, later in _strips(num_spins, dim):
            torch.mm(f[:, later].mT, s[:, own], out=grad[head, 0, pairs].flatten(0, 1))
            if kinds == 2:
                torch.mm(s[:, later].mT, f[:, own], out=grad[head, 1, pairs].flatten(0, 1))
    return grad


# -- symmetric blocks ----------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _triangle(dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where entries of a symmetric block stand in its packed upper triangle, and back.

    Returns the packed place of every entry of the block (D^2), the entries of the upper triangle
    (places in the flat block), those mirrored, and whether they stand off the diagonal.
    """
    row, column = torch.triu_indices(dim, dim, device=device)
    place = torch.empty(dim, dim, dtype=torch.int64, device=device)
    place[row, column] = place[column, row] = torch.arange(len(row), device=device)
    return place.flatten(), row * dim + column, column * dim + row, row != column


def _select(given: Tensor, places: Tensor) -> Tensor:
    """``given[..., places]``, some rows at a time: what is read stays in the cache."""
    rows = given.flatten(0, -2)
    found = rows.new_empty(len(rows), len(places))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        torch.index_select(rows[part], 1, places, out=found[part])
    return found.unflatten(0, given.shape[:-1])


class _Unpack(torch.autograd.Function):
    """Packed upper triangles ``(..., D (D + 1) / 2)`` to symmetric blocks ``(..., D^2)``.

    torch's own gradient of an indexed read adds entry by entry; the adjoint of this one is two
    indexed reads.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, packed: Tensor, dim: int) -> Tensor:
        ctx.dim = dim  # type: ignore[attr-defined]
        return _select(packed, _triangle(dim, packed.device)[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Fold.apply(grad, ctx.dim), None


class _Fold(torch.autograd.Function):
    """The adjoint of :class:`_Unpack`: the two entries that a parameter stands at are added."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, dim: int) -> Tensor:
        ctx.dim = dim  # type: ignore[attr-defined]
        _, upper, lower, off = _triangle(dim, grad.device)
        return _select(grad, upper).addcmul_(_select(grad, lower), off.to(grad.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Unpack.apply(grad, ctx.dim), None


# -- the module ----------------------------------------------------------------------------------


class MatrixCouplings(nn.Module):
    r"""Matrix-valued couplings :math:`J_{ij}` (D x D) of a fixed number of sites, learned.

    The diagonal blocks are zero. A parameter is an independent entry; the table above counts them.

    Args:
        num_spins: number of tokens N that the block serves.
        dim: channels D of a head.
        nhead: number of heads, each with couplings of its own.
        symmetric_between: :math:`J_{ij} = J_{ji}^{\mathsf T}`, the symmetry of an energy: a free
            energy exists.
        symmetric_within: :math:`J_{ij} = J_{ij}^{\mathsf T}`, inside the block of a pair.
        dropout: probability, in training, that a parameter is dropped; one mask a solve.
        batch_first, device, dtype: as elsewhere.
    """

    def __init__(
        self,
        num_spins: int,
        dim: int,
        nhead: int = 1,
        symmetric_between: bool = True,
        symmetric_within: bool = False,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_spins, self.dim = check_count("num_spins", num_spins, 1), dim
        self.symmetric_between, self.symmetric_within = symmetric_between, symmetric_within
        self.dropout, self.batch_first = dropout, batch_first
        pairs = num_spins * (num_spins - 1) // 2
        block = (dim * (dim + 1) // 2,) if symmetric_within else (dim, dim)
        shape = (nhead, 1 if symmetric_between else 2, pairs, *block)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gaussian entries with a spectral norm of J near 1/2 at most, as that of "fixed"."""
        # Two standard deviations times the root of the number of rows bound it for large matrices.
        nn.init.normal_(self.weight, std=1 / (4 * math.sqrt(self.num_spins * self.dim)))

    def forward(self, tokens: Tensor, masks: Masks) -> BlockMatrix | BlockStrips:
        """Couplings of all systems, or one set a system under a mask over pairs.

        The tokens only give their number.

        Raises:
            ValueError: another number of tokens than ``num_spins``; a mask with finite entries.
        """
        check_fixed_length("matrix", tokens, self.num_spins, masks)
        weight = F.dropout(self.weight, self.dropout, self.training)
        if self.symmetric_within:
            weight = _Unpack.apply(weight, self.dim).unflatten(-1, (self.dim, self.dim))
        strips = BlockStrips(weight, self.num_spins)
        if masks.blocked is not None:
            return _blocked(strips.written_out(), masks)
        if weight.device.type == "cpu" and self.num_spins * self.dim > _WRITTEN_ROWS:
            return strips
        # On an accelerator one large product is worth more than memory saved.
        return strips.written_out()

    def extra_repr(self) -> str:
        """Sizes and symmetries."""
        return (
            f"num_spins={self.num_spins}, dim={self.dim}, nhead={self.weight.shape[0]}, "
            f"symmetric_between={self.symmetric_between}, "
            f"symmetric_within={self.symmetric_within}"
        )


def _blocked(couplings: BlockMatrix, masks: Masks) -> BlockMatrix:
    """The bonds of blocked pairs removed. Absent tokens are the spin system's business."""
    assert masks.blocked is not None
    removed = masks.blocked[..., :, None, :, None]
    (matrix,) = couplings.tensors()
    sizes = (couplings.num_spins, couplings.dim)
    blocks = matrix.unflatten(-1, sizes).unflatten(-3, sizes).masked_fill(removed, 0.0)
    matrix = blocks.flatten(-4, -3).flatten(-2, -1)
    return BlockMatrix(matrix, couplings.dim, couplings.is_symmetric and masks.symmetric)


def check_fixed_length(kind: str, tokens: Tensor, num_spins: int, masks: Masks) -> None:
    """``ValueError`` for another number of tokens, or for a mask of logits that there are none."""
    length = tokens.shape[1]
    if length != num_spins:
        raise ValueError(
            f"x has {length} tokens, couplings={kind!r} of this block are between "
            f"num_spins={num_spins}: pad a shorter x, make the block for {length} tokens, or "
            "use couplings of any number of them, 'softmax', 'symmetric' or 'linear'"
        )
    if masks.biased:
        raise ValueError(
            f"a mask with finite entries biases attention logits, and couplings={kind!r} have "
            "none: pass a boolean mask"
        )
