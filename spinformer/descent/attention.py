"""What all kinds of attention share: heads of tokens, bonds on logits, rows that may be empty."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["along", "columns", "from_heads", "row_log_sum", "row_softmax", "to_heads"]


def columns(weights: Tensor) -> Tensor:
    """``[W_1 ... W_H]`` of ``(H, d, k)``, ``(d, H k)``."""
    return weights.movedim(0, 1).flatten(1)


def to_heads(Y: Tensor, weights: Tensor) -> Tensor:
    """``Y W_h`` of every head: ``(..., N, d)`` and ``(H, d, k)`` to ``(..., H, N, k)``.

    One product, not one a head, for which Y would be copied H times.
    """
    heads, _, width = weights.shape
    parts: Tensor = (Y @ columns(weights)).unflatten(-1, (heads, width))
    return parts.transpose(-3, -2)


def from_heads(parts: Tensor, weights: Tensor) -> Tensor:
    """``sum_h U_h W_h^T``: ``(..., H, N, k)`` and ``(H, d, k)`` to ``(..., N, d)``, one product."""
    return parts.transpose(-3, -2).flatten(-2) @ columns(weights).mT


def along(graph: Tensor, logits: Tensor) -> Tensor:
    """Logits times what the graph allows, -inf where that is nothing.

    Args:
        graph: boolean, or non-negative weights of the exponentials. One that is 0 gets no gradient.
        logits: what it is broadcastable to.
    """
    if graph.dtype == torch.bool:
        return logits.masked_fill(~graph, -torch.inf)
    cut = graph == 0
    return (logits + graph.masked_fill(cut, 1).log()).masked_fill(cut, -torch.inf)


def row_softmax(logits: Tensor, full: bool) -> Tensor:
    """The softmax of each row; 0 where all of a row is -inf, which ``full`` says none is."""
    if full:
        return logits.softmax(-1)
    nothing = _nothing(logits)
    # A finite row, which is then replaced: that of nothing has no derivative.
    return logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


def row_log_sum(logits: Tensor, full: bool) -> Tensor:
    """The log-sum-exp of each row; 0 where all of a row is -inf, which ``full`` says none is."""
    if full:
        return logits.logsumexp(-1)
    nothing = _nothing(logits)
    total = logits.masked_fill(nothing, 0.0).logsumexp(-1)
    return total.masked_fill(nothing.squeeze(-1), 0.0)


def _nothing(logits: Tensor) -> Tensor:
    return (logits == -torch.inf).all(-1, keepdim=True)
