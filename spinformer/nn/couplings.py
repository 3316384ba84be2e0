r"""Couplings of a block: amortized from its input, as attention is, or fixed parameters.

The weights of every head have a zero diagonal *before* they are normalized (a spin does not act on
itself), so the rows of ``"softmax"`` sum to one. A row with no neighbour (one token, the first
causal token) is zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spinformer.nn.amortized import Amortization
from spinformer.nn.masks import Masks
from spinformer.nn.streamed import Bonds, StreamedHeads, attention_weights
from spinformer.spins.couplings import Couplings, LowRank
from spinformer.spins.couplings.checks import check_count

__all__ = [
    "AttentionCouplings",
    "FixedCouplings",
    "FusedHeads",
    "HeadMixture",
    "Heads",
    "LinearCouplings",
]


class Heads(Couplings):
    """One scalar matrix a head, ``J = strength * weights``, with the diagonal removed by its maker.

    Args:
        weights: (..., H, N, N), zero on the diagonal.
        strength: (H,).
        symmetric: whether the weights are, by construction.
        amortization: how they came about, where that was asked for.
    """

    def __init__(
        self,
        weights: Tensor,
        strength: Tensor,
        symmetric: bool,
        amortization: Amortization | None = None,
    ) -> None:
        self._weights, self._strength, self._symmetric = weights, strength, symmetric
        self.amortization = amortization

    @property
    def num_spins(self) -> int:
        return self._weights.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self._weights.shape[:-2]

    @property
    def is_symmetric(self) -> bool:
        return self._symmetric

    def tensors(self) -> tuple[Tensor, ...]:
        return self._weights, self._strength

    def with_tensors(self, *tensors: Tensor) -> Heads:
        weights, strength = tensors
        return Heads(weights, strength, self._symmetric)

    def apply(self, state: Tensor) -> Tensor:
        # The small factor goes on the small tensor.
        return self._weights @ (self._strength[:, None, None] * state)

    def to_dense(self) -> Tensor:
        return self._strength[:, None, None] * self._weights

    def transpose(self) -> Heads:
        return Heads(self._weights.mT, self._strength, self._symmetric)

    def symmetrize(self) -> Heads:
        if self._symmetric:
            return self
        return Heads((self._weights + self._weights.mT) / 2, self._strength, True)


class HeadMixture(Couplings):
    r"""Matrix-valued couplings of one system, :math:`J_{ij} = \sum_h A^h_{ij} O_h V_h`.

    Applied to a state this is multi-head attention with its value and output projections. With
    symmetric weights and tied projections, :math:`O_h = V_h^{\mathsf T}`, it is symmetric.

    Args:
        heads: the weights A, (B, H, N, N).
        value: V, (d, d): the rows of head h are its V_h.
        out: O, (d, d): the columns of head h are its O_h; None ties it to V.
    """

    def __init__(
        self, heads: Heads | FusedHeads | StreamedHeads, value: Tensor, out: Tensor | None
    ) -> None:
        self._heads, self._value, self._out = heads, value, out

    @property
    def num_spins(self) -> int:
        return self._heads.num_spins

    @property
    def dim(self) -> int:
        return self._value.shape[1]

    @property
    def batch_shape(self) -> torch.Size:
        return self._heads.batch_shape[:-1]

    @property
    def is_symmetric(self) -> bool:
        return self._heads.is_symmetric and self._out is None

    def tensors(self) -> tuple[Tensor, ...]:
        projections = (self._value,) if self._out is None else (self._value, self._out)
        return (*self._heads.tensors(), *projections)

    def with_tensors(self, *tensors: Tensor) -> HeadMixture:
        own = len(self._heads.tensors())
        out = None if self._out is None else tensors[own + 1]
        return HeadMixture(self._heads.with_tensors(*tensors[:own]), tensors[own], out)

    def values(self, state: Tensor) -> Tensor:
        """V_h s of every head, (..., H, N, d / H)."""
        nhead = self._heads.batch_shape[-1]
        values = F.linear(state, self._value).unflatten(-1, (nhead, self.dim // nhead))
        return values.transpose(-2, -3)

    def apply(self, state: Tensor) -> Tensor:
        mixed = self._heads.apply(self.values(state)).transpose(-2, -3).flatten(-2)
        return F.linear(mixed, self._value.mT if self._out is None else self._out)

    def to_dense(self) -> Tensor:
        nhead = self._heads.batch_shape[-1]
        value = self._value.unflatten(0, (nhead, -1))
        out = (self._value.mT if self._out is None else self._out).unflatten(1, (nhead, -1))
        return torch.einsum("...hij,ahc,hcb->...ijab", self._heads.to_dense(), out, value)

    def transpose(self) -> HeadMixture:
        out = None if self._out is None else self._value.mT
        value = self._value if self._out is None else self._out.mT
        return HeadMixture(self._heads.transpose(), value, out)

    def symmetrize(self) -> HeadMixture:
        if self.is_symmetric:
            return self
        raise NotImplementedError(
            "couplings of mixed heads are symmetric only by construction: build the block with "
            "couplings='symmetric', which ties the projections"
        )


class FusedHeads(Couplings):
    r"""The couplings of :class:`AttentionCouplings` that are never written down.

    Applied to a state by torch's fused attention kernel: no (N, N) matrix in memory, but a softmax
    at every application, so it pays for a few applications only. The kernel's backward has no
    derivative of its own.

    Args:
        query, key: (B, H, N, d_h).
        strength: (H,).
        blocked: bool, broadcastable to (B, H, N, N), pairs without a coupling, or None.
        bias: finite bias of the logits, broadcastable likewise, or None.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        strength: Tensor,
        blocked: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        self._query, self._key, self._strength = query, key, strength
        self._blocked, self._bias = blocked, bias
        ignored = torch.eye(query.shape[-2], dtype=torch.bool, device=query.device)
        if blocked is not None:
            ignored = ignored | blocked
        # A row without a neighbour would be NaN: it is opened here and cleared afterwards.
        self._silent = ignored.all(-1, keepdim=True)
        self._mask = ~ignored | self._silent
        if bias is not None:
            self._mask = torch.where(self._mask, bias.to(query.dtype), -math.inf)

    @property
    def num_spins(self) -> int:
        return self._query.shape[-2]

    @property
    def batch_shape(self) -> torch.Size:
        return self._query.shape[:-2]

    @property
    def is_symmetric(self) -> bool:
        return False

    def tensors(self) -> tuple[Tensor, ...]:
        return self._query, self._key, self._strength

    def with_tensors(self, *tensors: Tensor) -> FusedHeads:
        query, key, strength = tensors
        return FusedHeads(query, key, strength, self._blocked, self._bias)

    def apply(self, state: Tensor) -> Tensor:
        values = self._strength[:, None, None] * state
        force = F.scaled_dot_product_attention(self._query, self._key, values, self._mask)
        return force.masked_fill(self._silent, 0.0)

    def written_out(self) -> Heads:
        """The same couplings as matrices."""
        bonds = Bonds(self.num_spins, self._blocked, self._bias)
        weights = attention_weights(self._query, self._key, bonds)
        return Heads(weights, self._strength, symmetric=False)

    def to_dense(self) -> Tensor:
        return self.written_out().to_dense()

    def transpose(self) -> Heads:
        return self.written_out().transpose()

    def symmetrize(self) -> Heads:
        return self.written_out().symmetrize()


class AttentionCouplings(nn.Module):
    r"""Couplings amortized from the tokens by scaled dot-product attention.

    .. math:: A = \mathrm{softmax}_{j\ne i}\big(q_i\cdot k_j / \sqrt{d_h} + \text{bias}\big),\qquad
              J = s A \quad\text{or}\quad J = s\,(A + A^{\mathsf T})/2,

    with one strength s a head, 1/2 at first. Rows then sum to 1/2: free spins, whose response has a
    slope of at most beta, are far from the order that sets in by themselves at beta s = 1, and the
    fixed point contracts.

    Args:
        d_model: width of the tokens.
        nhead: number of heads.
        symmetric: the second form.
        dropout: probability, in training, that a weight is dropped; one mask a solve.
        bias, device, dtype: of the projection.
        batch_first: read by containers of torch; the layout is the block's business.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        symmetric: bool,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.nhead, self.symmetric, self.dropout = nhead, symmetric, dropout
        self.batch_first = batch_first
        self.in_proj = nn.Linear(d_model, 2 * d_model, bias=bias, device=device, dtype=dtype)
        self.strength = nn.Parameter(torch.empty(nhead, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform queries and keys, zero biases, strengths of 1/2."""
        for block in self.in_proj.weight.chunk(2):
            nn.init.xavier_uniform_(block)
        if self.in_proj.bias is not None:
            nn.init.zeros_(self.in_proj.bias)
        nn.init.constant_(self.strength, 0.5)

    def forward(
        self,
        tokens: Tensor,
        masks: Masks,
        fused: bool = False,
        keep: bool = False,
        streamed: bool = False,
    ) -> Heads | FusedHeads | StreamedHeads:
        """Couplings (B, H, N, N) of normalized tokens (B, N, d).

        ``fused`` leaves them unwritten where nothing needs the matrices: they are neither
        symmetrized nor dropped. ``streamed`` makes them a function of queries and keys, unless they
        are dropped. ``keep`` keeps their :class:`~spinformer.nn.amortized.Amortization`
        with them.
        """
        batch, length, _ = tokens.shape
        width = self.in_proj.in_features // self.nhead
        heads = self.in_proj(tokens).view(batch, length, 2, self.nhead, width)
        query, key = heads.permute(2, 0, 3, 1, 4)
        blocked = masks.unbonded()
        dropped = self.training and self.dropout > 0
        if fused and not self.symmetric and not dropped:
            return FusedHeads(query, key, self.strength, blocked, masks.bias)
        bonds = Bonds(length, blocked, masks.bias)
        if streamed and not dropped:
            query, key = query.contiguous(), key.contiguous()
            return StreamedHeads(query, key, self.strength, bonds, self.symmetric)
        attention = weights = attention_weights(query, key, bonds)
        kept = None
        if dropped and keep:
            kept = F.dropout(torch.ones_like(attention), self.dropout)
            weights = attention * kept
        elif dropped:
            weights = F.dropout(attention, self.dropout)
        if self.symmetric:
            weights = (weights + weights.mT) / 2
        amortization = None
        if keep:
            amortization = Amortization(
                query, key, attention, self.strength, self.in_proj.weight, kept
            )
        return Heads(weights, self.strength, self.symmetric, amortization)


class FixedCouplings(nn.Module):
    r"""Symmetric couplings :math:`J = (P + P^{\mathsf T})/2` of a fixed number of sites, learned.

    Args:
        num_spins: number of tokens N that the block serves.
        nhead: number of heads.
        dropout: probability, in training, that an entry of P is dropped; one mask a solve.
        batch_first, device, dtype: as elsewhere.
    """

    def __init__(
        self,
        num_spins: int,
        nhead: int,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("num_spins", num_spins, 1)
        self.dropout, self.batch_first = dropout, batch_first
        self.weight = nn.Parameter(
            torch.empty(nhead, num_spins, num_spins, device=device, dtype=dtype)
        )
        self.strength = nn.Parameter(torch.empty(nhead, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gaussian entries with a spectral radius of J near 1/2, unit strengths."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(8 * self.weight.shape[-1]))
        nn.init.ones_(self.strength)

    def forward(self, tokens: Tensor, masks: Masks) -> Heads:
        """Couplings (H, N, N), or (B, H, N, N) under a mask; the tokens only give their number."""
        length, num_spins = tokens.shape[1], self.weight.shape[-1]
        if length != num_spins:
            raise ValueError(
                f"x has {length} tokens, couplings='fixed' of this block are between "
                f"num_spins={num_spins}: pad a shorter x, make the block for {length} tokens, or "
                "use couplings of any number of them, 'softmax', 'symmetric' or 'linear'"
            )
        if masks.biased:
            raise ValueError(
                "a mask with finite entries biases attention logits, and couplings='fixed' have "
                "none: pass a boolean mask"
            )
        itself = torch.eye(length, dtype=torch.bool, device=self.weight.device)
        weight = F.dropout(self.weight, self.dropout, self.training)
        weights = ((weight + weight.mT) / 2).masked_fill(itself, 0.0)
        unbonded = masks.unbonded()
        if unbonded is not None:
            weights = weights.masked_fill(unbonded, 0.0)
        return Heads(weights, self.strength, masks.symmetric)


class LinearCouplings(nn.Module):
    r"""Couplings amortized from the tokens by linear attention, kept in their factors.

    With positive features :math:`\varphi(x) = 1 + \mathrm{elu}(x)` of queries and keys,

    .. math:: \kappa_{ij} = \tfrac12\big[\varphi(q_i)\cdot\varphi(k_j)
              + \varphi(k_i)\cdot\varphi(q_j)\big]\ (i \ne j),\qquad
              J_{ij} = \frac{s\,\kappa_{ij}}{\sqrt{d_i d_j}},\qquad d_i = \sum_{j \ne i}\kappa_{ij},

    with one strength s a head, 1/2 at first. They are symmetric, and as no entry is negative the
    largest eigenvalue of J is s (its vector is :math:`\sqrt{d_i}`): what row sums are to softmax
    couplings. Features, degrees and products cost O(N d_h) numbers and no pair is written down, so
    that neither a mask over pairs nor dropout of weights has anything to act on.

    Args:
        d_model: width of the tokens.
        nhead: number of heads.
        bias, device, dtype: of the projection.
        batch_first: read by containers of torch; the layout is the block's business.

    Source: Katharopoulos et al. 2020, Transformers are RNNs (ICML), for the features.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        bias: bool = True,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.nhead, self.batch_first = nhead, batch_first
        self.in_proj = nn.Linear(d_model, 2 * d_model, bias=bias, device=device, dtype=dtype)
        self.strength = nn.Parameter(torch.empty(nhead, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As those of :class:`AttentionCouplings`."""
        for block in self.in_proj.weight.chunk(2):
            nn.init.xavier_uniform_(block)
        if self.in_proj.bias is not None:
            nn.init.zeros_(self.in_proj.bias)
        nn.init.constant_(self.strength, 0.5)

    def forward(self, tokens: Tensor, masks: Masks) -> LowRank:
        """Couplings of rank 2 d_h, (B, H, N, N) if written down, of normalized tokens (B, N, d)."""
        if masks.blocked is not None or masks.biased:
            raise ValueError(
                "couplings='linear' never write pairs down, and a mask over pairs (causal ones "
                "too) or one with finite entries changes single pairs: pass a boolean padding mask "
                "only, or use couplings='symmetric' or 'softmax'"
            )
        batch, length, _ = tokens.shape
        width = self.in_proj.in_features // self.nhead
        heads = self.in_proj(tokens).view(batch, length, 2, self.nhead, width)
        # Degrees are sums over all tokens: not in half precision.
        heads = heads.permute(2, 0, 3, 1, 4).to(torch.promote_types(heads.dtype, torch.float32))
        features = 1 + F.elu(heads)
        if masks.absent is not None:
            features = features.masked_fill(masks.absent[:, None, :, None], 0.0)
        query, key = features
        others = features.sum(-2, keepdim=True) - features
        degree = ((query * others[1] + key * others[0]).sum(-1, keepdim=True)) / 2
        # A token without another one has no neighbour.
        alone = degree <= 0
        unit = torch.where(alone, 0.0, torch.where(alone, 1.0, degree).rsqrt())
        weights = self.strength.to(unit.dtype)[:, None].expand(-1, width)
        return LowRank(unit * query, unit * key, weights, check=False).symmetrize()
