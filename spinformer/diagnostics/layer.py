r"""One description of a Transformer layer, :class:`AttentionLayer`, in four variants.

It holds the weights of each head, the MLP and the norms, and the order in which they are applied,
so that each can be left out:

=============  ======================================  =========================================
variant        pre-norm layer                          post-norm layer
=============  ======================================  =========================================
``full``       ``z = x + A(N1 x)``, ``z + F(N2 z)``    ``z = N1(x + A x)``, ``N2(z + F z)``
``no_mlp``     ``x + A(N1 x)``                         ``N1(x + A x)``
``no_skip``    ``F(N2 A(N1 x))``                       ``N2 F(N1 A x)``
``attention``  ``A x``                                 ``A x``
=============  ======================================  =========================================

A is self-attention, F the MLP, N1 and N2 the norms. ``full`` is the model itself. The last is the
self-attention network of Dong, Cordonnier & Loukas (2021), whose theorem knows no norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spinformer.descent.attention import from_heads, row_softmax, to_heads
from spinformer.descent.energy import clear
from spinformer.errors import check_choice

__all__ = ["AttentionLayer", "FeedForward", "Normalization", "Variant"]

Variant = Literal["full", "no_mlp", "no_skip", "attention"]
VARIANTS: tuple[Variant, ...] = ("full", "no_mlp", "no_skip", "attention")


@dataclass(frozen=True, eq=False)
class Normalization:
    """Layer norm, or root-mean-square norm, of every token by itself.

    ``N(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``; without the mean where not
    ``centered``.

    Attributes:
        eps: added to the variance.
        weight: gains ``(d,)``; None for 1.
        bias: ``(d,)``; None for 0.
        centered: layer norm if True, else root mean square.
    """

    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    centered: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """``(..., n, d)`` to the same shape."""
        return self.frozen(x, self.scale(x))

    def scale(self, x: Tensor) -> Tensor:
        """``1 / sqrt(var(x) + eps)`` of every token, ``(..., n, 1)``."""
        return (self._center(x).square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def frozen(self, x: Tensor, scale: Tensor, affine: bool = True) -> Tensor:
        """The norm with the scale of other tokens: linear in x, plus the bias if ``affine``."""
        y = self._center(x) * scale
        if self.weight is not None:
            y = y * self.weight
        return y + self.bias if affine and self.bias is not None else y

    def _center(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centered else x


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The position-wise MLP ``F(x) = activation(x first + first_bias) second + second_bias``.

    Attributes:
        first: ``(d, hidden)``.
        second: ``(hidden, d)``.
        activation: elementwise.
        first_bias: ``(hidden,)`` or None.
        second_bias: ``(d,)`` or None.
    """

    first: Tensor
    second: Tensor
    activation: Callable[[Tensor], Tensor]
    first_bias: Tensor | None = None
    second_bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """``(..., n, d)`` to the same shape."""
        return _plus(self.activation(self._hidden(x)) @ self.second, self.second_bias)

    def gates(self, x: Tensor) -> Tensor:
        """``(activation(z) - activation(0)) / z`` of the hidden units z, ``(..., n, hidden)``.

        0 where z is 0, one of the choices: a unit at rest passes nothing on.
        """
        hidden = self._hidden(x)
        zero = hidden == 0.0
        rise = self.activation(hidden) - self.activation(torch.zeros_like(hidden))
        return (rise / hidden.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)

    def frozen(self, x: Tensor, gates: Tensor, affine: bool = True) -> Tensor:
        """The MLP with the gates of other tokens: linear in x, plus a constant if ``affine``."""
        if not affine:
            return ((x @ self.first) * gates) @ self.second
        hidden = self._hidden(x)
        hidden = hidden * gates + self.activation(torch.zeros_like(hidden))
        return _plus(hidden @ self.second, self.second_bias)

    def _hidden(self, x: Tensor) -> Tensor:
        return _plus(x @ self.first, self.first_bias)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    r"""One Transformer layer with H heads on tokens of width d, whatever the code it came from.

    .. math::
        A(X) = \sum_h P_h (X W_{V,h} + 1 b_{V,h}^\top) W_{O,h} + 1 b_O^\top, \qquad
        P_h = \mathrm{softmax}\left(s\, (X W_{Q,h} + 1 b_{Q,h}^\top)
        (X W_{K,h} + 1 b_{K,h}^\top)^\top + B_h\right)

    Cost of a call: ``O(H n^2 d_h + n d^2)``.

    Attributes:
        query: ``W_Q``, ``(H, d, d_qk)``.
        key: ``W_K``, ``(H, d, d_qk)``.
        value: ``W_V``, ``(H, d, d_v)``.
        output: ``W_O``, ``(H, d_v, d)``.
        query_bias: ``(H, d_qk)`` or None.
        key_bias: ``(H, d_qk)`` or None.
        value_bias: ``(H, d_v)`` or None.
        output_bias: ``(d,)`` or None.
        scale: s, usually ``d_qk ** -0.5``.
        position: the term B of the logits that knows the positions: a function of the queries
            without bias ``(..., H, n, d_qk)``, with a result that broadcasts to
            ``(..., H, n, n)``; None for none.
        query_norm: a norm of each query over ``d_qk``; None for none.
        key_norm: likewise of each key.
        mlp: None for a layer without one.
        attention_norm: N1; None for none.
        mlp_norm: N2; None for none.
        norm_first: the norms stand before the two maps, not after the sums.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    scale: float = 1.0
    position: Callable[[Tensor], Tensor] | None = None
    query_norm: Normalization | None = None
    key_norm: Normalization | None = None
    mlp: FeedForward | None = None
    attention_norm: Normalization | None = None
    mlp_norm: Normalization | None = None
    norm_first: bool = False

    @property
    def heads(self) -> int:
        """H."""
        return self.query.shape[0]

    @property
    def width(self) -> int:
        """d."""
        return self.query.shape[1]

    @property
    def query_key(self) -> Tensor:
        """``W_QK = W_Q W_K^T`` of every head, ``(H, d, d)``."""
        return self.query @ self.key.mT

    @property
    def value_output(self) -> Tensor:
        """``W_V W_O`` of every head, ``(H, d, d)``."""
        return self.value @ self.output

    def without_biases(self) -> AttentionLayer:
        """The layer without the biases of its attention; norms and MLP keep theirs."""
        return replace(self, query_bias=None, key_bias=None, value_bias=None, output_bias=None)

    def weights(
        self, x: Tensor, mask: Tensor | None = None, src_mask: Tensor | None = None
    ) -> Tensor:
        """The attention matrices P of every head, ``(..., H, n, n)``, with rows that sum to one.

        Args:
            x: what the attention reads ``(..., n, d)``: in a pre-norm layer, the tokens after N1.
            mask: boolean ``(..., n)``, True = absent: its columns are zero.
            src_mask: broadcastable to ``(..., H, n, n)``; True, or -inf, where token i must not
                hear token j; finite entries are added to the logits. A token that hears no other
                has a row of zeros.
        """
        plain = to_heads(x, self.query)
        queries = _plus_heads(plain, self.query_bias)
        keys = _plus_heads(to_heads(x, self.key), self.key_bias)
        if self.query_norm is not None:
            queries = self.query_norm(queries)
        if self.key_norm is not None:
            keys = self.key_norm(keys)
        logits = self.scale * (queries @ keys.mT)
        if self.position is not None:
            logits = logits + self.position(plain)
        if src_mask is not None and src_mask.dtype != torch.bool:
            logits = logits + src_mask
            src_mask = src_mask == -torch.inf
        if src_mask is not None:
            logits = logits.masked_fill(src_mask, -torch.inf)
        if mask is not None:
            logits = logits.masked_fill(mask[..., None, None, :], -torch.inf)
        return row_softmax(logits, full=src_mask is None and mask is None)

    def attend(
        self, x: Tensor, mask: Tensor | None = None, src_mask: Tensor | None = None
    ) -> Tensor:
        """``A(x)``, ``(..., n, d)``; the arguments are those of :meth:`weights`."""
        values = _plus_heads(to_heads(x, self.value), self.value_bias)
        return _plus(
            from_heads(self.weights(x, mask, src_mask) @ values, self.output.mT), self.output_bias
        )

    def __call__(
        self,
        x: Tensor,
        variant: Variant = "full",
        mask: Tensor | None = None,
        src_mask: Tensor | None = None,
        *,
        norms: bool | None = None,
    ) -> Tensor:
        """The layer in one of its variants, ``(..., n, d)``; absent tokens come out as zero.

        Args:
            x: tokens ``(..., n, d)``.
            variant: ``"full"``, ``"no_mlp"``, ``"no_skip"`` or ``"attention"``, see the top.
            mask: as in :meth:`weights`.
            src_mask: as in :meth:`weights`.
            norms: whether N1 and N2 are applied; None: in all variants but ``"attention"``.
        """
        skip, mlp, norms = kept_parts(variant, norms)
        x = clear(x, mask)

        def attend(tokens: Tensor) -> Tensor:
            return self.attend(tokens, mask, src_mask)

        x = self._sublayer(x, attend, self.attention_norm if norms else None, skip)
        if mlp and self.mlp is not None:
            x = self._sublayer(x, self.mlp, self.mlp_norm if norms else None, skip)
        return clear(x, mask)

    def _sublayer(
        self,
        x: Tensor,
        branch: Callable[[Tensor], Tensor],
        norm: Normalization | None,
        skip: bool,
    ) -> Tensor:
        if norm is None:
            return x + branch(x) if skip else branch(x)
        if self.norm_first:
            return x + branch(norm(x)) if skip else branch(norm(x))
        return norm(x + branch(x) if skip else branch(x))


def kept_parts(variant: Variant, norms: bool | None) -> tuple[bool, bool, bool]:
    """Whether skips, MLP and norms are kept."""
    check_choice("variant", variant, VARIANTS)
    skip, mlp = variant in ("full", "no_mlp"), variant in ("full", "no_skip")
    return skip, mlp, variant != "attention" if norms is None else norms


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _plus_heads(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.unsqueeze(-2)
