r"""How much tokens look like fields that a block's spin system would have: a score, no density."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spinformer.equilibrium.field_density import log_base
from spinformer.nn.free_energy import FreeEnergyBlock
from spinformer.nn.masks import merge_masks, to_batch

__all__ = ["field_score"]


def field_score(
    block: FreeEnergyBlock,
    x: Tensor,
    variance: float,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    per_token: bool = False,
) -> Tensor:
    r"""A score of sequences for telling what is unlike the data, one number each, (B,).

    .. math:: s(x) = \log \mathcal N(x; 0, \sigma^2) - \sum_{heads} \beta F(J(x), h(x))

    The tokens are the data, the base is Gaussian, and :math:`-\beta F = \log Z` of every head, in
    the block's approximation, rewards tokens that its couplings can align. Higher is more like the
    data of a block that was trained to it (by likelihood, or by contrast: it is differentiable).

    **It is not normalized**: couplings that depend on the tokens, and an approximate free energy,
    leave a normalizer that is unknown, and different for other lengths of the sequence. Compare
    scores of one block at one variance; :class:`~spinformer.equilibrium.field_density.FieldDensity`
    has the case that is a density (fixed couplings, exact free energy).

    Args:
        block: symmetric or fixed couplings, of the stream ``"plain"`` or ``"field"``.
        x: tokens, (B, N, d_model) (see ``batch_first``) or (N, d_model).
        variance: :math:`\sigma^2 > 0` of each component of the base.
        src_mask, src_key_padding_mask, is_causal: as the block takes them. Absent tokens do not
            count.
        per_token: divide by the number of tokens that are there, for sequences of unlike lengths;
            one without any has score zero.

    It costs one forward pass with a report. A sequence that holds NaN has score NaN.

    Raises:
        TypeError: another kind of block.
        ValueError: couplings without a free energy; tokens that are magnetizations.
    """
    if not isinstance(block, FreeEnergyBlock):
        raise TypeError(
            f"block is {type(block).__name__}: field_score needs the free energy of a "
            "FreeEnergyBlock"
        )
    if not 0 < variance < math.inf:
        raise ValueError(f"variance={variance!r} must be a positive finite number")
    if block.stream == "magnetization":
        raise ValueError(
            "stream='magnetization' carries magnetizations, which are bounded and no fields: "
            "use stream='plain' or 'field'"
        )
    if block.couplings == "softmax":
        raise ValueError(
            "couplings='softmax' are asymmetric and have no free energy: use "
            "couplings='symmetric' or 'fixed'"
        )
    _, report = block(x, src_mask, src_key_padding_mask, is_causal, return_report=True)
    tokens, layout = to_batch(x, block.d_model, block.batch_first, block.log_beta)
    absent = merge_masks(tokens, block.nhead, src_mask, src_key_padding_mask, is_causal).absent
    tokens = tokens.to(report.free_energy.dtype)
    count: Tensor | float = float(tokens.shape[1])
    if absent is not None:
        tokens = tokens.masked_fill(absent[..., None], 0.0)
        count = (~absent).sum(-1).to(tokens.dtype)
    # What is broken in one sequence must not reach the parameters that all of them share.
    broken = report.free_energy.isnan().any(-1) | tokens.isnan().any(-1).any(-1)
    tokens = torch.where(broken[:, None, None], 0.0, tokens)
    free_energy = torch.where(broken[:, None], 0.0, report.free_energy)
    log_z = -(block.log_beta.to(tokens.dtype).exp() * free_energy).sum(-1)
    score = log_base(tokens, variance, count) + log_z
    if per_token:
        score = score / torch.as_tensor(count).clamp_min(1)
    score = torch.where(broken, torch.nan, score)
    return score if layout.batched else score.squeeze(0)
