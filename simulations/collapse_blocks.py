"""Rank collapse in classifiers with spin blocks, before and after training: what each part holds.

The parts are those that are taken out of Transformers, in the words of spins: the skip connection
is the field that the tokens are, the MLP a shift of that field, attention the couplings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import spinformer as sf
from simulations.collapse_spins import magnetization, solver, split
from simulations.residuals import Curve, measured
from spinformer.diagnostics import hidden_states
from spinformer.nn import EnergyDescentBlock, FreeEnergyBlock, TransformerBlock
from spinformer.nn.masks import Masks

__all__ = ["BLOCKS", "VARIANTS", "curve"]

# Names in simulations.models, and what figures call them.
BLOCKS = {
    "plain": "plain Transformer",
    "mean_field": "mean field",
    "steepest_descent": "steepest descent",
    "energy_descent": "energy descent",
}
VARIANTS = ("full", "no_mlp", "no_skip", "attention")


def curve(layers: list[torch.nn.Module], x: Tensor, variant: str) -> Curve | None:
    r"""Residuals by layer of a stack of blocks; None where a block has no such variant.

    ======================  ========================================  ==========================
    variant                 spin blocks                               energy-descent blocks
    ======================  ========================================  ==========================
    ``full``                field x + MLP(norm x)                     norm, both steps, ReLU
    ``no_mlp``              field x                                   norm, attention step
    ``no_skip``             field MLP(norm x)                         (the step has no skip)
    ``attention``           m = phi(beta J x), once                   attention step
    ======================  ========================================  ==========================

    Plain blocks: those of :func:`spinformer.diagnostics.hidden_states`. Steepest descent without
    any field has no magnetization, so that its ``attention`` is the mean-field step with its law of
    one spin.

    Args:
        layers: of an :class:`~spinformer.nn.Encoder`.
        x: tokens that enter the first, (texts, N, d_model) float64.
        variant: of :data:`VARIANTS`.
    """
    layers = [copy.deepcopy(layer).double().eval() for layer in layers]
    first = layers[0]
    if isinstance(first, TransformerBlock):
        with torch.no_grad():
            states = hidden_states(layers, x, variant)  # type: ignore[arg-type]
        return measured(((state, 1.0) for state in states), len(layers))
    if isinstance(first, EnergyDescentBlock) and variant == "no_skip":
        return None
    with torch.no_grad():
        return measured(_through(layers, x, variant), len(layers))


def _through(
    layers: list[torch.nn.Module], x: Tensor, variant: str
) -> Iterator[tuple[Tensor, float]]:
    yield x, 1.0
    for layer in layers:
        if isinstance(layer, EnergyDescentBlock):
            x, solved = descend(layer, x, variant), 1.0
        else:
            assert isinstance(layer, FreeEnergyBlock)
            x, solved = respond(layer, x, variant)
        yield x, solved


def respond(block: FreeEnergyBlock, x: Tensor, variant: str) -> tuple[Tensor, float]:
    """The tokens after a spin block with split heads, and the share of its systems solved.

    Solved to the last digits, which a block in float32 does not do: collapse is seen below them.
    """
    attention: Any = block.self_attn
    assert block.norm1 is not None
    couplings = attention(block.norm1(x), Masks())
    beta = block.log_beta.exp()
    state = split(x, block.nhead)
    field = torch.zeros_like(state)
    if variant in ("full", "no_mlp"):
        field = field + state
    if variant in ("full", "no_skip") and block.mlp is not None and block.norm2 is not None:
        field = field + split(block.mlp(block.norm2(x)), block.nhead)
    system = sf.SpinSystem(couplings, field, beta, block.site)
    if variant == "attention":
        m, solved = block.site.mean(beta[:, None, None] * couplings.apply(state)), 1.0
    else:
        start = block.site.mean(beta[:, None, None] * state)
        m, solved = magnetization(solver(type(block.approximation)), system, start)
    return m.transpose(-3, -2).flatten(-2), solved


def descend(block: EnergyDescentBlock, x: Tensor, variant: str) -> Tensor:
    """The tokens after an energy-descent block of one step without a data term."""
    if variant == "full":
        full: Tensor = block(x)
        return full
    step: Any = block.steps[0]
    if variant == "no_mlp" and block.norm is not None:
        x = block.norm(x)
    return step.pairwise(x.dtype).step(x, block.step)
