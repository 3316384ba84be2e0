"""A stack of blocks."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from spinformer.errors import strict_options
from spinformer.nn.masks import absent_tokens
from spinformer.nn.report import BlockReport
from spinformer.spins.couplings.entries import clear

__all__ = ["Encoder"]


@strict_options
class Encoder(nn.Module):
    """``num_layers`` blocks in a row.

    The layers are copies of ``block``. The first keeps its parameters, the others draw theirs anew
    (:class:`torch.nn.TransformerEncoder` starts all layers at the same point). A block with
    ``tied = True`` is one layer applied ``num_layers`` times.

    A block may define what a stack does before its first and after its last layer:

    * ``embed(x)``, applied once to what the first block will read;
    * ``readout(x)``, applied once to what the last block returned;
    * ``needs_source = True``: each block is called with ``source=``, the input of the stack after
      ``embed``.

    Args:
        block: a block of this package, or a module with the forward of
            :class:`torch.nn.TransformerEncoderLayer`. Parameters are redrawn by its
            ``reset_parameters()``, or else by those of the modules inside it.
        num_layers: at least 1.
        norm: applied at the end, as pre-norm layers need; None for none.

    Raises:
        TypeError: a block that is no module, its class say.
        ValueError: ``num_layers`` below 1, or a block whose parameters nothing can redraw.
    """

    def __init__(self, block: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        if not isinstance(block, nn.Module):
            made = block.__name__ if isinstance(block, type) else "FreeEnergyBlock"
            raise TypeError(
                f"block={block!r} is no module: make one first, "
                f"Encoder({made}(64, 4), {num_layers})"
            )
        if num_layers < 1:
            raise ValueError(f"num_layers={num_layers!r} must be at least 1")
        first = copy.deepcopy(block)
        layers = [first]
        for _ in range(num_layers - 1):
            layers.append(first if getattr(block, "tied", False) else _redrawn(block))
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    @property
    def batch_first(self) -> bool:
        """Whether three-axes inputs are ``(B, N, d_model)``; that of the blocks."""
        first: Any = self.layers[0]
        return bool(first.self_attn.batch_first)

    def forward(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        return_report: bool = False,
    ) -> Tensor | tuple[Tensor, list[BlockReport]]:
        """Apply the blocks in turn; the arguments are those of a block.

        Returns:
            the tokens, zero where there is no token; with ``return_report`` also the report of each
            layer, in order.
        """
        absent = absent_tokens(x, src_key_padding_mask, self.batch_first)
        first: Any = self.layers[0]
        last: Any = self.layers[-1]
        if hasattr(first, "embed"):
            # Cleared first: a NaN that is absent must not reach the gradient of the embedding.
            x = first.embed(clear(x, absent))
        options: dict[str, Any] = {}
        if getattr(first, "needs_source", False):
            options["source"] = x
        if return_report:
            options["return_report"] = True
        reports: list[BlockReport] = []
        for layer in self.layers:
            x = layer(
                x,
                src_mask=src_mask,
                src_key_padding_mask=src_key_padding_mask,
                is_causal=is_causal,
                **options,
            )
            if return_report:
                x, report = x
                reports.append(report)
        if hasattr(last, "readout"):
            x = clear(last.readout(x), absent)
        if self.norm is not None:
            x = clear(self.norm(x), absent)
        return (x, reports) if return_report else x


def _redrawn(block: nn.Module) -> nn.Module:
    """A copy of ``block`` with parameters of its own."""
    layer: Any = copy.deepcopy(block)
    if hasattr(layer, "reset_parameters"):
        layer.reset_parameters()
        return layer
    redrawn: set[int] = set()
    for module in layer.modules():
        # torch's own attention spells it with an underscore.
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if reset is not None:
            reset()
            redrawn.update(id(parameter) for parameter in module.parameters())
    for name, parameter in layer.named_parameters():
        if id(parameter) not in redrawn:
            raise ValueError(
                f"Encoder cannot redraw the parameter {name!r} of {type(block).__name__}: give the "
                "block a method reset_parameters()"
            )
    return layer
