r"""The theorem of rank collapse, with its constants measured from weights.

For a self-attention network (no skips, MLPs or norms) of L layers with H heads,

.. math::
    |\mathrm{res}(\mathrm{SAN}(X))| \le
    \left(\frac{4 \beta H}{\sqrt{d_{qk}}}\right)^{(3^L - 1)/2} |\mathrm{res}(X)|^{3^L},
    \qquad \beta \ge |W_{QK}|_1 |W_V W_O|_{1,\infty} \text{ in all layers and heads},

with :math:`|\cdot| = |\cdot|_{1,\infty}`: every layer cubes the residual. The bound tends to zero
where :math:`\sqrt{4 \beta H / \sqrt{d_{qk}}}\, |\mathrm{res}(X)| < 1`; a small :math:`4 \beta H /
\sqrt{d_{qk}}` alone does not make it. (Another version of the theorem has a factor gamma beside
beta that depends on the entries of the attention; here it is 1.)

**What it needs and does not say.** The proof bounds :math:`e^x - 1` by 2 x, which is true below
1.256: with R the residual, the logits :math:`E = s R W_{QK} R^\top` (s the scale, usually
:math:`d_{qk}^{-1/2}`) must not differ by more than that within a row. And it adds heads as if
:math:`|\cdot|_{1,\infty}` obeyed the triangle inequality. Without either, there are networks beyond
the bound (in the tests): one head at n = 8001, two at n = 3 and a width of two millions. Two norms
kept apart give one that holds.

**A bound that holds.** Let :math:`\tilde p` be the attention without E, the same for all tokens,
:math:`\bar R = \tilde p^\top R`, and :math:`D_i` the range of row i of E, at most
:math:`2 \max_j |E_{ij}|`. Two softmaxes of logits whose difference has a range D are at most
:math:`\tanh(D / 4) \le D / 4` apart in total variation, so that

.. math::
    |(P R)_i - \bar R|_1 \le \tfrac12 D_i |R|_\infty \le |E|_1 |R|_\infty, \qquad
    \sum_i |(P R)_{ik} - \bar R_k| \le \tfrac14 \sum_i D_i\, |R|_1
    \le \tfrac12 \min(n, d)\, s |W_{QK}|_1 |R|_{1,\infty}^2 |R|_1 .

The last step counts rows, each with entries up to :math:`|E|_1 \le s |W_{QK}|_1
|R|_{1,\infty}^2`, or the columns of :math:`R W_{QK}`. While the logits are small the column sums
know no n: with :math:`E'` the logits E less their mean over :math:`\tilde p`,

.. math::
    (P R)_i - \bar R = \frac{1}{Z_i} \sum_j \tilde p_j (e^{E'_{ij}} - 1) (R_j - \bar R), \qquad
    Z_i = \sum_j \tilde p_j e^{E'_{ij}} \ge 1,

and :math:`|e^{E'} - 1| \le 2 |E'|`, :math:`\sum_i |E'_{ij}| \le 2 |E|_1` and
:math:`\sum_j \tilde p_j |R_{jk} - \bar R_k| \le |R|_1 / 2` make them at most
:math:`2 |E|_1 |R|_1`. Both are norms that heads may be added in:

.. math::
    |\mathrm{res}(\mathrm{SA}(X))| \le \sqrt c\, s
    \Big(\sum_h a_h |W_h|_1 \sum_h a_h |W_h|_\infty\Big)^{1/2} |\mathrm{res}(X)|^3,
    \qquad a_h = |W_{QK,h}|_1, \; W_h = W_{V,h} W_{O,h},

with :math:`c = \min(n, d) / 2` whatever the logits, and c = 2 if that is less and
:math:`2 s \max_h a_h |\mathrm{res}(X)|^2 \le 1.256`, which keeps the rows within the range. For one
head the theorem thus holds within the range, and outside for min(n, d) up to 32. A cubed residual
is smaller only if it is small: within the range, too, tokens grow apart if W is large enough.

None of them covers logits that know positions (relative position bias, masks over pairs such as a
causal one): such attention stays apart however equal its tokens are, and the collapse is merely
exponential.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from spinformer.descent.attention import from_heads, to_heads
from spinformer.diagnostics.attention import first_tokens, hidden_states
from spinformer.diagnostics.layer import AttentionLayer, FeedForward
from spinformer.diagnostics.models import attention_layers
from spinformer.diagnostics.rank import Norm, matrix_norm, residual
from spinformer.errors import check_choice

__all__ = ["ROW_RANGE", "CollapseBound", "collapse_bound", "lipschitz_bound", "log_residuals"]

ROW_RANGE = 1.2564
"""Up to here e^x - 1 is at most 2 x: the widest row of logits that the proof allows."""


@dataclass(frozen=True, eq=False)
class CollapseBound:
    r"""The theorem beside what happens. Logarithms are natural, as :math:`3^L` soon overflows.

    Attributes:
        log_residual: of the tokens before the first layer and after each, absolute,
            ``(L + 1, ...)``.
        log_bound: the theorem with one beta for all layers and heads, ``(L + 1, ...)``.
        log_composed: the same with the constant of each layer, ``4 s sum_h |W_QK| |W_V W_O|``, as
            sharp or sharper.
        log_proved: the bound that holds, of the module's first lines, layer by layer.
        beta: of the theorem, the largest ``|W_QK|_1 |W_V W_O|_{1,inf}``, a scalar.
        factor: ``4 beta H s``, times the largest Lipschitz constant of an MLP if those are kept (at
            least 1), a scalar.
        log_constants: log of ``4 s sum_h |W_QK| |W_V W_O|_{1,inf}`` of each layer, times the
            Lipschitz constant of its MLP if that is kept, ``(L,)``.
        row_range: the largest difference of logits E within a row, ``(L, ...)``, with R taken
            around the mean of the tokens: the theorem's proof needs it below :data:`ROW_RANGE`.
        forces_collapse: whether ``sqrt(factor) |res(X)| < 1``, so that the theorem's bound
            tends to zero with depth, ``(...)``.
    """

    log_residual: Tensor
    log_bound: Tensor
    log_composed: Tensor
    log_proved: Tensor
    beta: Tensor
    factor: Tensor
    log_constants: Tensor
    row_range: Tensor
    forces_collapse: Tensor

    @property
    def within_range(self) -> Tensor:
        """Whether the logits of a layer are what the proof needs, ``(L, ...)``."""
        return self.row_range <= ROW_RANGE


def collapse_bound(
    model: Any,
    inputs: Any,
    mask: Tensor | None = None,
    *,
    variant: Literal["attention", "no_skip"] = "attention",
    biases: bool = True,
) -> CollapseBound:
    """The theorem of rank collapse for a model at an input, beside the residuals themselves.

    Cost: the pass of :func:`log_residuals`, and ``O(H d^2 d_h)`` a layer for the norms of weights.

    Args:
        model: anything that :func:`~spinformer.diagnostics.attention_layers` knows, without terms
            of positions in its logits.
        inputs: as in :func:`~spinformer.diagnostics.hidden_states`.
        mask: as in :func:`~spinformer.diagnostics.hidden_states`.
        variant: ``"attention"``; or ``"no_skip"``, with the MLPs (norms left out), whose Lipschitz
            constants multiply those of the layers. The residuals of that are resolved only down to
            the rounding of the tokens.
        biases: whether the attention keeps its biases. They don't enter the bound.

    Raises:
        TypeError: as :func:`~spinformer.diagnostics.hidden_states`.
        ValueError: as :func:`log_residuals`, or another variant.

    Source: Dong, Cordonnier & Loukas (2021), theorems 2.2 and 2.3, corollary 3.2; the condition on
    the logits is that of their lemma A.3.
    """
    check_choice("variant", variant, ("attention", "no_skip"))
    layers = attention_layers(model)
    if not biases:
        layers = tuple(layer.without_biases() for layer in layers)
    x, mask = first_tokens(model, inputs, mask)
    with_mlp = variant == "no_skip"
    if with_mlp:
        states = hidden_states(layers, x, variant, mask, norms=False)
        measured = residual(states, mask).log()
        # The rows of logits, for which every layer's own pass is at hand.
        ranges = torch.stack(
            [
                _follow([layer], tokens, mask, "1,inf")[1][0]
                for layer, tokens in zip(layers, states[:-1], strict=True)
            ]
        )
    else:
        measured, ranges = _follow(layers, x, mask, "1,inf")

    constants, proved, slopes = [], [], []
    beta, widest, rise = x.new_zeros(()), 0.0, x.new_ones(())
    for layer in layers:
        own_rise = x.new_ones(())
        if with_mlp and layer.mlp is not None:
            own_rise = lipschitz_bound(layer.mlp)
        inner = layer.query_key.abs().sum(-2).amax(-1)
        outer = layer.value_output.abs()
        columns, rows = outer.sum(-2).amax(-1), outer.sum(-1).amax(-1)
        products = inner * (columns * rows).sqrt()
        beta, rise = torch.maximum(beta, products.amax()), torch.maximum(rise, own_rise)
        widest = max(widest, layer.scale * layer.heads)
        constants.append((4.0 * layer.scale * products.sum() * own_rise).log())
        both = (inner * columns).sum().sqrt() * (inner * rows).sum().sqrt()
        proved.append((layer.scale * both * own_rise).log())
        slopes.append(2.0 * layer.scale * inner.amax())

    start = measured[0]
    count = x.new_tensor(x.shape[-2]) if mask is None else (~mask).sum(-1).to(x.dtype)
    always = 0.5 * (0.5 * count.clamp(max=layers[0].width)).log()
    within = always.clamp(max=0.5 * math.log(2.0))
    composed, holding = [start], [start]
    for constant, own, slope in zip(constants, proved, slopes, strict=True):
        composed.append(constant + 3.0 * composed[-1])
        allowed = slope.log() + 2.0 * holding[-1] <= math.log(ROW_RANGE)
        holding.append(own + torch.where(allowed, within, always) + 3.0 * holding[-1])
    factor = 4.0 * beta * widest * rise
    powers = [3.0**depth for depth in range(1, len(layers) + 1)]
    bounds = [start] + [(power - 1.0) / 2.0 * factor.log() + power * start for power in powers]
    return CollapseBound(
        log_residual=measured,
        log_bound=torch.stack(bounds),
        log_composed=torch.stack(composed),
        log_proved=torch.stack(holding),
        beta=beta,
        factor=factor,
        log_constants=torch.stack(constants),
        row_range=ranges,
        forces_collapse=0.5 * factor.log() + start < 0.0,
    )


def log_residuals(
    model: Any,
    inputs: Any,
    mask: Tensor | None = None,
    *,
    norm: Norm = "1,inf",
    biases: bool = True,
) -> Tensor:
    r"""Log of the absolute residual of pure self-attention by layer, however small it becomes.

    The tokens are :math:`1 x^\top + R`. What all have in common and what sets them apart are
    carried separately, R with a scale of its own, and the attention as its difference from the
    attention that all tokens have in common, by ``expm1``. So the residual keeps its digits where
    the tokens have long become equal to rounding, and below the smallest number of their dtype: one
    of 1e-6 that every layer cubes leaves float64 in the fourth.

    Cost: that of the attention layers.

    Args:
        model: as in :func:`collapse_bound`.
        inputs: as in :func:`~spinformer.diagnostics.hidden_states`.
        mask: as in :func:`~spinformer.diagnostics.hidden_states`.
        norm: ``"1,inf"``, the smallest over the centers of
            :func:`~spinformer.diagnostics.residual` and one more, or ``"fro"``.
        biases: whether the attention keeps its biases.

    Returns:
        ``(L + 1, ...)``, natural logarithms; minus infinity where all tokens are the same.

    Raises:
        TypeError: as :func:`~spinformer.diagnostics.hidden_states`.
        ValueError: logits with terms of positions, or with norms of queries and keys; a model in
            half precision.
    """
    layers = attention_layers(model)
    if not biases:
        layers = tuple(layer.without_biases() for layer in layers)
    x, mask = first_tokens(model, inputs, mask)
    return _follow(layers, x, mask, norm)[0]


def lipschitz_bound(mlp: FeedForward) -> Tensor:
    r"""An upper bound of the Lipschitz constant of an MLP in :math:`|\cdot|_{1,\infty}`, a scalar.

    :math:`|F(X) - F(Y)| \le c\, |W_1| |W_2| |X - Y|` with c the largest slope of the activation,
    measured on a grid from -30 to 30 in steps of 0.01 (at fourth order in the step below the
    truth for a smooth one).
    """
    with torch.enable_grad():
        grid = torch.linspace(-30.0, 30.0, 6001, dtype=mlp.first.dtype, device=mlp.first.device)
        grid.requires_grad_()
        (slope,) = torch.autograd.grad(mlp.activation(grid).sum(), grid)
    return slope.abs().amax() * matrix_norm(mlp.first) * matrix_norm(mlp.second)


def _follow(
    layers: Sequence[AttentionLayer], x: Tensor, mask: Tensor | None, norm: Norm
) -> tuple[Tensor, Tensor]:
    """The log residuals ``(L + 1, ...)`` and the row ranges ``(L, ...)`` of pure attention."""
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the model is {x.dtype}: cast it to float32 or float64, model.double()")
    for layer in layers:
        if layer.position is not None:
            raise ValueError(
                "the logits of this model know positions (a relative position bias), which the "
                "theorem of rank collapse does not cover: take collapse_curve"
            )
        if layer.query_norm is not None or layer.key_norm is not None:
            raise ValueError(
                "queries and keys of this model are normalized, which the theorem of rank collapse "
                "does not cover: take collapse_curve"
            )
    present = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if mask is not None:
        present = present & ~mask
    count = present.sum(-1).clamp(min=1)[..., None, None]
    there = present.unsqueeze(-1)
    x = x.masked_fill(~there, 0.0)

    common = x.sum(-2, keepdim=True) / count
    apart, log_scale = _normalized((x - common).masked_fill(~there, 0.0), x.new_zeros(x.shape[:-2]))
    logs, ranges = [residual(x, mask, norm).log()], []
    for layer in layers:
        common, apart, log_gain, row_range = _attend_apart(layer, common, apart, log_scale, present)
        apart, log_scale = _normalized(apart, log_gain)
        about = residual(apart, mask, norm).log() + log_scale
        # The center 0 of the tokens themselves, as residual() has it.
        whole = (common + apart * log_scale.exp()[..., None, None]).masked_fill(~there, 0.0)
        logs.append(torch.minimum(about, matrix_norm(whole, norm).log()))
        ranges.append(row_range)
        # Centered anew, without which the common part would hold less than it could.
        middle = apart.sum(-2, keepdim=True) / count
        common = common + middle * log_scale.exp()[..., None, None]
        apart = (apart - middle).masked_fill(~there, 0.0)
    return torch.stack(logs), torch.stack(ranges)


def _attend_apart(
    layer: AttentionLayer, common: Tensor, apart: Tensor, log_scale: Tensor, present: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer on the tokens ``common + exp(log_scale) apart``, in the same parts.

    Returns the common part, what sets apart, the log of its scale, and the largest row range.
    """
    scale = log_scale.exp()[..., None, None, None]
    square = scale.square()
    here = apart.unsqueeze(-3)
    keys = to_heads(apart, layer.key)
    query = common.unsqueeze(-3) @ layer.query
    if layer.query_bias is not None:
        query = query + layer.query_bias.unsqueeze(-2)
    absent = ~present[..., None, None, :]
    shared = (layer.scale * scale * (query @ keys.mT)).masked_fill(absent, -torch.inf)
    # A sequence without tokens has no attention.
    empty = absent.all(-1, keepdim=True)
    shared = shared.masked_fill(empty, 0.0)
    alike = shared.softmax(-1)

    # In units of the square of the scale, which may be zero.
    logits = (layer.scale * (to_heads(apart, layer.query) @ keys.mT)).masked_fill(absent, 0.0)
    highest = logits.masked_fill(absent, -torch.inf).amax(-1, keepdim=True).masked_fill(empty, 0.0)
    lowest = logits.masked_fill(absent, torch.inf).amin(-1, keepdim=True).masked_fill(empty, 0.0)
    width = square * (highest - lowest)
    below = (logits - highest).masked_fill(absent, 0.0)
    tiny = square < 1e-30
    unit = square.masked_fill(tiny, 1.0)
    rise = torch.where(tiny, below, (square * below).expm1() / unit)
    mean_rise = (alike * rise).sum(-1, keepdim=True)
    # Between exp(-1) and 1 in the rows that are taken from here; in others it may vanish.
    near = alike * (rise - mean_rise) / (1.0 + square * mean_rise).clamp(min=0.3)
    # Wide rows, where the difference does not cancel.
    full = (shared + square * logits).masked_fill(absent & ~empty, -torch.inf).softmax(-1)
    difference = torch.where(width < 1.0, near, (full - alike) / unit)

    moved = from_heads(difference @ to_heads(apart, layer.value), layer.output.mT)
    moved = moved.masked_fill(~present.unsqueeze(-1), 0.0)
    values = (common.unsqueeze(-3) + scale * (alike @ here)) @ layer.value
    if layer.value_bias is not None:
        values = values + layer.value_bias.unsqueeze(-2)
    together = from_heads(values, layer.output.mT)
    if layer.output_bias is not None:
        together = together + layer.output_bias
    rows = width.squeeze(-1).masked_fill(~present.unsqueeze(-2), 0.0)
    return together, moved, 3.0 * log_scale, rows.amax((-2, -1))


def _normalized(apart: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """``apart`` over its largest entry, whose log joins the scale."""
    largest = apart.abs().amax((-2, -1))
    largest = torch.where(largest > 0.0, largest, torch.ones_like(largest))
    return apart / largest[..., None, None], log_scale + largest.log()
