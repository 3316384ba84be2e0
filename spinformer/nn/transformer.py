"""The plain Transformer layer: the yardstick of the spin blocks, built as well as they are."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spinformer.errors import strict_options
from spinformer.nn.layers import MLP, make_norm
from spinformer.nn.masks import Masks, additive, check_heads, merge_masks, to_batch
from spinformer.nn.report import BlockReport


class SelfAttention(nn.Module):
    """Multi-head softmax attention of tokens ``(B, N, d_model)`` to themselves.

    ``y_i = W_o concat_h sum_j softmax_j(q_i . k_j / sqrt(d_h)) v_j``. A token that may attend to
    nothing receives zero, not NaN. Cost: O(B N^2 d_model).

    Args:
        d_model: width.
        nhead: heads, a divisor of ``d_model``.
        dropout: probability of dropping an attention weight in training.
        bias: whether the projections have biases.
        qk_norm: normalize queries and keys per head (root mean square, with gains), which bounds
            the logits.
        fused: use torch's fused kernel. Its backward has no derivative: a second derivative raises
            and asks for ``fused=False``, the same sum written out, with O(B nhead N^2) memory.
        batch_first: kept for :class:`torch.nn.TransformerEncoder`, which reads it here.
        device: where the parameters lie.
        dtype: their dtype.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dropout: float = 0.0,
        bias: bool = True,
        qk_norm: bool = False,
        fused: bool = True,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = check_heads(d_model, nhead)
        self.nhead = nhead
        self.dropout = dropout
        self.fused = fused
        self.batch_first = batch_first
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)
        self.query_norm: nn.RMSNorm | None = None
        self.key_norm: nn.RMSNorm | None = None
        if qk_norm:
            self.query_norm = nn.RMSNorm(self.head_dim, 1e-5, device=device, dtype=dtype)
            self.key_norm = nn.RMSNorm(self.head_dim, 1e-5, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform projections, zero biases, unit gains."""
        d_model = self.out_proj.in_features
        for block in (*self.in_proj.weight.split(d_model), self.out_proj.weight):
            nn.init.xavier_uniform_(block)
        for linear in (self.in_proj, self.out_proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.query_norm is not None and self.key_norm is not None:
            nn.init.ones_(self.query_norm.weight)
            nn.init.ones_(self.key_norm.weight)

    def forward(
        self, x: Tensor, masks: Masks, return_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The attended tokens, and the weights ``(B, nhead, N, N)`` if asked for."""
        batch, length, _ = x.shape
        heads = self.in_proj(x).view(batch, length, 3, self.nhead, self.head_dim)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if self.query_norm is not None and self.key_norm is not None:
            # Under autocast the projections are of lower precision than the gains.
            precise = self.query_norm.weight.dtype
            query = self.query_norm(query.to(precise)).to(value.dtype)
            key = self.key_norm(key.to(precise)).to(value.dtype)
        mask, silent = _open_empty_rows(masks, value.dtype)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if self.fused and not return_weights:
            out = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        else:
            logits = query @ key.mT / math.sqrt(self.head_dim)
            weights = (logits if mask is None else logits + mask).softmax(-1)
            out = F.dropout(weights, dropout, training=dropout > 0) @ value
            if silent is not None:
                weights = weights.masked_fill(silent, 0.0)
        if silent is not None:
            out = out.masked_fill(silent, 0.0)
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights


def _open_empty_rows(masks: Masks, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask with its fully masked rows opened, and which rows those were.

    The softmax of a row of ``-inf`` is NaN, and so is its gradient whatever is done to the output.
    Such a row attends to everything instead, and its output is then set to zero.
    """
    ignored = masks.ignored()
    if ignored is None:
        return additive(masks, dtype), None
    silent = ignored.all(-1, keepdim=True)
    opened = Masks(blocked=ignored & ~silent, bias=masks.bias)
    return additive(opened, dtype), silent


@strict_options
class TransformerBlock(nn.Module):
    """A pre-norm Transformer layer: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Drop-in for :class:`torch.nn.TransformerEncoderLayer` with ``norm_first=True``, also inside
    :class:`torch.nn.TransformerEncoder` (built with ``enable_nested_tensor=False``). Absent tokens
    are zero in the output and change nothing. Cost: O(B N d_model (N + d_model)).

    Args:
        d_model: width of the token stream.
        nhead: number of heads, a divisor of ``d_model``.
        dim_feedforward: hidden width of the MLP; ``None`` for ``4 * d_model``.
        dropout: probability, in training, on attention weights, hidden units and both branches.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        norm: ``"layer"`` or ``"rms"``.
        bias: whether linear maps have biases.
        qk_norm: normalize queries and keys, which bounds the attention logits.
        fused: attention by torch's fused kernel, which cannot be differentiated twice: a second
            derivative raises. ``False`` writes the sum out.
        batch_first: whether three-axes inputs are ``(B, N, d_model)`` or ``(N, B, d_model)``.
        device: where the parameters lie.
        dtype: their dtype.

    Raises:
        TypeError: an unknown option; the message names the nearest.
        ValueError: ``nhead`` does not divide ``d_model``, or a choice that does not exist.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
        activation: Literal["gelu", "relu", "silu"] = "gelu",
        norm: Literal["layer", "rms"] = "layer",
        bias: bool = True,
        *,
        qk_norm: bool = False,
        fused: bool = True,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = 4 * d_model if dim_feedforward is None else dim_feedforward
        self.d_model = d_model
        self.nhead = nhead
        self.self_attn = SelfAttention(
            d_model, nhead, dropout, bias, qk_norm, fused, batch_first, device, dtype
        )
        self.norm1 = make_norm(norm, d_model, device, dtype)
        self.norm2 = make_norm(norm, d_model, device, dtype)
        self.mlp = MLP(d_model, hidden, activation, dropout, bias, device, dtype)
        self.dropout = nn.Dropout(dropout)

    @property
    def batch_first(self) -> bool:
        """Whether three-axes inputs are ``(B, N, d_model)``."""
        return self.self_attn.batch_first

    def reset_parameters(self) -> None:
        """Draw all parameters anew: Xavier-uniform matrices, zero biases, unit gains."""
        for module in (self.self_attn, self.norm1, self.norm2, self.mlp):
            module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        return_report: bool = False,
    ) -> Tensor | tuple[Tensor, BlockReport]:
        """Apply the layer.

        Args:
            x: ``(B, N, d_model)`` (see ``batch_first``) or ``(N, d_model)``.
            src_mask: ``(N, N)`` or ``(B * nhead, N, N)``; True, or -inf, where token i must not
                hear token j.
            src_key_padding_mask: ``(B, N)``; True, or -inf, where there is no token.
            is_causal: token i hears ``j <= i`` only.
            return_report: also return a :class:`BlockReport` with the attention weights.
        """
        tokens, layout = to_batch(x, self.d_model, self.batch_first, self.self_attn.in_proj.weight)
        masks = merge_masks(tokens, self.nhead, src_mask, src_key_padding_mask, is_causal)
        # Under autocast the stream keeps the precision of the parameters.
        tokens = masks.clear(tokens).to(self.self_attn.in_proj.weight.dtype)
        attended, weights = self.self_attn(self.norm1(tokens), masks, return_report)
        tokens = tokens + self.dropout(attended)
        tokens = tokens + self.mlp(self.norm2(tokens))
        out = layout.leave(masks.clear(tokens).to(x.dtype))
        return (out, BlockReport(couplings=weights)) if return_report else out

    def extra_repr(self) -> str:
        """The options that the children do not show."""
        return f"nhead={self.nhead}, fused={self.self_attn.fused}"
