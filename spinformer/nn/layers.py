"""Pieces that the blocks share: norms, activations, and the position-wise MLP."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spinformer.errors import check_choice

__all__ = ["ACTIVATIONS", "MLP", "make_norm"]

ACTIVATIONS: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
)
NORMS: MappingProxyType[str, type[nn.LayerNorm] | type[nn.RMSNorm]] = MappingProxyType(
    {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
)


def make_norm(
    name: str, dim: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.LayerNorm | nn.RMSNorm:
    """A layer norm (``"layer"``) or a root-mean-square norm (``"rms"``) over ``dim`` channels.

    The root-mean-square norm adds the same 1e-5 as the layer norm, not the machine epsilon that is
    torch's default: at a zero token, such as padding, the gain would be thousands.
    """
    return NORMS[check_choice("norm", name, tuple(NORMS))](
        dim, eps=1e-5, device=device, dtype=dtype
    )


class MLP(nn.Module):
    """Two linear maps with an activation between, on every token by itself.

    Args:
        d_model: width of the tokens.
        hidden: width between the maps.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        dropout: probability, in training, on hidden units and on the output.
        bias: whether the maps have biases.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"dim_feedforward={hidden!r} must be at least 1")
        self.activation = check_choice("activation", activation, tuple(ACTIVATIONS))
        self.linear1 = nn.Linear(d_model, hidden, bias=bias, device=device, dtype=dtype)
        self.linear2 = nn.Linear(hidden, d_model, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices, zero biases."""
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) to (..., d_model)."""
        hidden = ACTIVATIONS[self.activation](self.linear1(x))
        return self.dropout(self.linear2(self.dropout(hidden)))

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation!r}"
