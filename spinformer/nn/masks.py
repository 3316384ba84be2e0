"""The one place that reads masks and layouts, so that every block means the same by them.

The blocks take the masks of :class:`torch.nn.TransformerEncoderLayer`. ``True`` in a boolean mask,
``-inf`` in a floating one, means *ignore*; a finite entry is added to the logits.

A token can be ignored in two ways, kept apart because they are different physics:

* **absent** (``src_key_padding_mask``): there is no such token. It neither gives nor receives, its
  output is zero, and its content, NaN included, changes nothing;
* **blocked** (``src_mask``, ``is_causal``): token ``i`` does not hear token ``j``. Only a symmetric
  pattern has an energy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spinformer.spins.couplings.entries import clear


@dataclass(frozen=True)
class Layout:
    """How a user's tensor lies in memory, and the way to ``(B, N, d)`` and back.

    Attributes:
        batched: there is a batch axis.
        batch_first: it is the first axis, not the second.
    """

    batched: bool
    batch_first: bool

    def enter(self, x: Tensor) -> Tensor:
        """``(N, d)``, ``(N, B, d)`` or ``(B, N, d)`` to ``(B, N, d)``."""
        if not self.batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def leave(self, x: Tensor) -> Tensor:
        """``(B, N, d)`` back to the user's layout."""
        if not self.batched:
            return x.squeeze(0)
        return x if self.batch_first else x.transpose(0, 1)


@dataclass(frozen=True)
class Masks:
    """The merged masks of one forward pass; ``None`` stands for a mask that ignores nothing.

    Attributes:
        absent: boolean ``(B, N)``, the token is not there.
        blocked: boolean, broadcastable to ``(B, nhead, N, N)``: token ``i`` (row) does not hear
            token ``j`` (column). Absent tokens are not repeated here: :meth:`ignored` joins both.
        bias: finite bias of the logits, broadcastable to ``(B, nhead, N, N)``, zero where blocked.
    """

    absent: Tensor | None = None
    blocked: Tensor | None = None
    bias: Tensor | None = None

    @cached_property
    def symmetric(self) -> bool:
        """Pairs are blocked, and biased, both ways or not at all: the condition for an energy.

        Absent tokens don't matter: they are always left out both ways. With a mask over pairs the
        answer waits for the device; nothing else here does.
        """
        unbonded = self.unbonded()
        if unbonded is not None and not torch.equal(unbonded, unbonded.mT):
            return False
        if self.bias is None:
            return True
        bias = self.bias if unbonded is None else self.bias.masked_fill(unbonded, 0.0)
        return torch.equal(bias, bias.mT)

    @cached_property
    def biased(self) -> bool:
        """Some entry of the bias is not zero: what couplings without logits cannot heed.

        Containers of torch hand a boolean padding mask on as a floating one, whose finite entries
        are all zero. The answer waits for the device.
        """
        return self.bias is not None and bool((self.bias != 0).any())

    def ignored(self) -> Tensor | None:
        """Boolean, broadcastable to ``(B, nhead, N, N)``: ``j`` is absent, or blocked to ``i``."""
        if self.absent is None:
            return self.blocked
        keys = self.absent[:, None, None, :]
        return keys if self.blocked is None else keys | self.blocked

    def unbonded(self) -> Tensor | None:
        """As :meth:`ignored`, and all pairs of an absent query: the pairs without a coupling."""
        ignored = self.ignored()
        if ignored is None or self.absent is None:
            return ignored
        return ignored | self.absent[:, None, :, None]

    def clear(self, x: Tensor) -> Tensor:
        """``x`` ``(B, N, d)`` with absent rows set to zero, which stops gradient and NaN."""
        return clear(x, self.absent)


def check_heads(d_model: int, nhead: int) -> int:
    """The dimension of a head, ``d_model / nhead``; ``ValueError`` if that is no whole number."""
    if d_model < 1 or nhead < 1 or d_model % nhead:
        raise ValueError(
            f"d_model={d_model} is not a positive multiple of nhead={nhead}: "
            "choose nhead among the divisors of d_model"
        )
    return d_model // nhead


def to_batch(
    x: Tensor, d_model: int, batch_first: bool, parameter: Tensor
) -> tuple[Tensor, Layout]:
    """Check a block's input and bring it to ``(B, N, d_model)``.

    Args:
        x: ``(N, d_model)``, or ``(B, N, d_model)`` if ``batch_first``, else ``(N, B, d_model)``.
        d_model: width of the block.
        batch_first: where the batch axis of a three-axes ``x`` is.
        parameter: any parameter of the block; outside autocast ``x`` must have its dtype.

    Returns:
        the tensor, and the layout that brings a result back.

    Raises:
        ValueError: wrong number of axes, wrong last axis, or another dtype than the parameters'.
    """
    if x.dim() not in (2, 3):
        batched = "(B, N, d_model)" if batch_first else "(N, B, d_model)"
        raise ValueError(
            f"x has shape {tuple(x.shape)}: pass (N, d_model) or, with batch_first={batch_first}, "
            f"{batched}"
        )
    if x.shape[-1] != d_model:
        raise ValueError(f"x has shape {tuple(x.shape)}: its last axis must be d_model={d_model}")
    if not x.is_floating_point():
        raise ValueError(
            f"x has dtype {x.dtype}: pass embeddings, x.to({parameter.dtype}) if these are numbers"
        )
    if x.dtype != parameter.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"x has dtype {x.dtype}, the block's parameters have {parameter.dtype}: "
            f"convert one, x.to({parameter.dtype}) or block.to({x.dtype})"
        )
    layout = Layout(batched=x.dim() == 3, batch_first=batch_first)
    return layout.enter(x), layout


def merge_masks(
    x: Tensor,
    nhead: int,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Masks:
    """Merge the three mask arguments of a block.

    Values of floating masks are compared with ``-inf`` and not inspected further: that would wait
    for the device at every call.

    Args:
        x: the input as ``(B, N, d_model)`` (see :func:`to_batch`); gives B, N, dtype and device.
        nhead: number of heads.
        src_mask: ``(N, N)``, ``(B * nhead, N, N)`` or ``(B, nhead, N, N)``; boolean or floating.
        src_key_padding_mask: ``(B, N)``, or ``(N,)`` where B = 1; boolean or floating. A finite
            entry biases the logits of that key.
        is_causal: token ``i`` hears ``j <= i`` only. Joined with ``src_mask`` where both are given.

    Raises:
        TypeError: a mask that is neither boolean nor floating.
        ValueError: a shape that does not fit; the message names those that do.
    """
    batch, length = x.shape[0], x.shape[1]
    absent, key_bias = None, None
    if src_key_padding_mask is not None:
        absent, key_bias = _split(_as_padding(src_key_padding_mask, batch, length), x.dtype)
    blocked, bias = None, None
    if src_mask is not None:
        blocked, bias = _split(_as_pairs(src_mask, batch, nhead, length), x.dtype)
    if is_causal:
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)[None, None]
        blocked = future if blocked is None else blocked | future
    if key_bias is not None:
        key_bias = key_bias[:, None, None, :].expand(-1, -1, length, -1)
        bias = key_bias if bias is None else bias + key_bias
    if bias is not None and blocked is not None:
        bias = bias.masked_fill(blocked, 0.0)
    return Masks(absent, blocked, bias)


def absent_tokens(
    x: Tensor, src_key_padding_mask: Tensor | None, batch_first: bool
) -> Tensor | None:
    """The padding mask as a boolean laid out like the tokens of ``x``: (N,), (B, N) or (N, B)."""
    if src_key_padding_mask is None:
        return None
    layout = Layout(batched=x.dim() == 3, batch_first=batch_first)
    batch, length = layout.enter(x).shape[:2]
    absent, _ = _split(_as_padding(src_key_padding_mask, batch, length), x.dtype)
    return layout.leave(absent)


def additive(masks: Masks, dtype: torch.dtype) -> Tensor | None:
    """``masks`` as one term to add to the logits: ``-inf`` where ignored, else the bias."""
    ignored = masks.ignored()
    bias = None if masks.bias is None else masks.bias.to(dtype)
    if ignored is None:
        return bias
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=ignored.device)
    return torch.where(ignored, -math.inf, bias)


def _as_padding(mask: Tensor, batch: int, length: int) -> Tensor:
    _check_dtype("src_key_padding_mask", mask)
    if batch == 1 and mask.dim() == 1:
        mask = mask.unsqueeze(0)
    if mask.shape != (batch, length):
        raise ValueError(
            f"src_key_padding_mask has shape {tuple(mask.shape)}: it must be (B, N) = "
            f"{(batch, length)}, whatever batch_first is"
        )
    return mask


def _as_pairs(mask: Tensor, batch: int, nhead: int, length: int) -> Tensor:
    _check_dtype("src_mask", mask)
    shared, flat, full = (
        (length, length),
        (batch * nhead, length, length),
        (batch, nhead, length, length),
    )
    if mask.shape == shared:
        return mask[None, None]
    if mask.shape in (flat, full):
        return mask.reshape(full)
    raise ValueError(
        f"src_mask has shape {tuple(mask.shape)}: it must be (N, N) = {shared}, "
        f"(B * nhead, N, N) = {flat} or (B, nhead, N, N) = {full}"
    )


def _check_dtype(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{name} has dtype {mask.dtype}: pass a boolean mask (True = ignore), {name}.bool(), "
            "or a floating one that is added to the logits"
        )


def _split(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A mask as (ignored, finite bias); a boolean mask has no bias."""
    if mask.dtype == torch.bool:
        return mask, None
    # Many codes write the most negative number of bfloat16 or of the mask's dtype for -inf. Added
    # to logits it would turn a fully masked row into a uniform one instead of an empty one.
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    ignored = mask <= lowest
    return ignored, mask.masked_fill(ignored, 0.0).to(dtype)
