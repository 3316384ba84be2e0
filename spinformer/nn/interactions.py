"""What mixes the tokens of a block: which options go together, and who is built."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spinformer.errors import check_choice
from spinformer.nn.couplings import (
    AttentionCouplings,
    FixedCouplings,
    FusedHeads,
    Heads,
    LinearCouplings,
)
from spinformer.nn.matrix_valued import BlockMatrix, BlockStrips, MatrixCouplings
from spinformer.nn.neural_force import Mixing, Reaction, TokenMixer
from spinformer.nn.streamed import StreamedHeads
from spinformer.spins.couplings import Couplings, LowRank

__all__ = [
    "AMORTIZED",
    "COUPLINGS",
    "FIXED",
    "Interaction",
    "Mixture",
    "check_interaction",
    "make_correction",
    "make_interaction",
    "reported_couplings",
]

Interaction = AttentionCouplings | LinearCouplings | FixedCouplings | MatrixCouplings | TokenMixer
"""The module that makes what mixes the tokens in one forward pass, a :data:`Mixture`."""

Mixture = Heads | FusedHeads | StreamedHeads | LowRank | BlockMatrix | BlockStrips | Mixing

# Computed from the tokens, of any number; and parameters of a fixed number of tokens.
AMORTIZED = ("softmax", "symmetric", "linear")
FIXED = ("fixed", "matrix", "mixer")
COUPLINGS = (*AMORTIZED, *FIXED)

# Options that only one choice of another option reads.
_OWNERS = {
    "symmetric_between": ("couplings", "matrix"),
    "symmetric_within": ("couplings", "matrix"),
    "dim_mixer": ("couplings", "mixer"),
    "dim_correction": ("correction", "mlp"),
}


def check_interaction(
    approximation: str,
    couplings: str,
    heads: str,
    derivative: str,
    steps: int | None,
    fused: bool | str,
    num_spins: int | None,
    correction: str,
    **owned: Any,
) -> None:
    """Raise ``ValueError`` where the options about couplings and correction contradict each other.

    ``owned``: the options of ``_OWNERS`` that may be None.
    """
    check_choice("correction", correction, ("none", "mlp"))
    if (couplings in FIXED) != (num_spins is not None):
        kinds = ", ".join(map(repr, FIXED))
        raise ValueError(
            f"couplings={couplings!r} with num_spins={num_spins}: num_spins goes with couplings of "
            f"a fixed number of tokens ({kinds}), and only with those; pass "
            "num_spins=N for sequences of N tokens, or leave it out"
        )
    chosen = {"couplings": couplings, "correction": correction}
    for option, value in owned.items():
        owner, choice = _OWNERS[option]
        if value is not None and chosen[owner] != choice:
            raise ValueError(
                f"{option}={value!r} with {owner}={chosen[owner]!r}: it goes with "
                f"{owner}={choice!r}, and only with that"
            )
    if couplings in ("matrix", "mixer", "linear") and heads == "mixed":
        raise ValueError(
            f"couplings={couplings!r} with heads='mixed', whose projections are for scalar weights "
            "that are written down: use heads='split'; with nhead=1 it is one system of dimension "
            "d_model"
        )
    if fused is True:
        _check_fused(approximation, couplings, steps)
    named = f"couplings={couplings!r}" if couplings in ("matrix", "mixer") else "correction='mlp'"
    if (couplings in ("matrix", "mixer") or correction == "mlp") and approximation != "mean_field":
        raise ValueError(
            f"approximation={approximation!r} with {named}, which only mean field solves: use "
            "approximation='mean_field'"
        )
    if derivative == "total" and (couplings == "mixer" or correction == "mlp"):
        named = "correction='mlp'" if correction == "mlp" else "couplings='mixer'"
        raise ValueError(
            f"derivative='total' is the derivative of a free energy, and {named} has none: use "
            "derivative='partial', or correction='none' and couplings='symmetric'"
        )


def _check_fused(approximation: str, couplings: str, steps: int | None) -> None:
    """Raise ``ValueError`` where ``fused=True`` has no couplings that could stay unwritten."""
    if couplings == "linear":
        return  # as they always do
    refused = {
        "couplings": (couplings, couplings in FIXED, "'softmax' or 'symmetric'"),
        "approximation": (approximation, approximation != "mean_field", "'mean_field'"),
        "steps": (steps, steps is not None and couplings == "symmetric", "None"),
    }
    for option, (value, wrong, remedy) in refused.items():
        if wrong:
            also = f" with couplings={couplings!r}" if option == "steps" else ""
            raise ValueError(
                f"fused=True leaves couplings unwritten, and {option}={value!r}{also} writes them "
                f"down: use {option}={remedy}, or fused='auto'"
            )


def make_interaction(
    couplings: str,
    d_model: int,
    nhead: int,
    dim: int,
    num_spins: int | None,
    symmetric_between: bool | None,
    symmetric_within: bool | None,
    dim_mixer: int | None,
    activation: str,
    dropout: float,
    bias: bool,
    batch_first: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Interaction:
    """The module of one of :data:`COUPLINGS`, with those of the options that it has.

    ``dim`` is that of a spin. ``num_spins`` is a number for :data:`FIXED`, as checked above.
    """
    if couplings == "linear":
        return LinearCouplings(d_model, nhead, bias, batch_first, device, dtype)
    if num_spins is None:
        symmetric = couplings == "symmetric"
        return AttentionCouplings(
            d_model, nhead, symmetric, dropout, bias, batch_first, device, dtype
        )
    if couplings == "matrix":
        return MatrixCouplings(
            num_spins,
            dim,
            nhead,
            True if symmetric_between is None else symmetric_between,
            bool(symmetric_within),
            dropout,
            batch_first,
            device,
            dtype,
        )
    if couplings == "mixer":
        hidden = 2 * num_spins if dim_mixer is None else dim_mixer
        return TokenMixer(
            num_spins, nhead, hidden, activation, dropout, bias, batch_first, device, dtype
        )
    return FixedCouplings(num_spins, nhead, dropout, batch_first, device, dtype)


def make_correction(
    correction: str,
    dim: int,
    systems: int,
    hidden: int | None,
    activation: str,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Reaction | None:
    """The module of the neural Onsager term, None for ``"none"``."""
    if correction == "none":
        return None
    hidden = 2 * dim if hidden is None else hidden
    return Reaction(dim, systems, hidden, activation, bias, device, dtype)


def reported_couplings(
    mixing: Couplings | Mixing, batch: int, absent: Tensor | None
) -> Tensor | None:
    """What a report shows as couplings, (B, H, N, N): Frobenius norms of matrix-valued ones.

    None for an MLP across the tokens, which has no pairs.
    """
    if isinstance(mixing, Mixing):
        return None
    if isinstance(mixing, (BlockMatrix, BlockStrips)):
        # Absent tokens are still in: these couplings are the same for every sequence.
        weights = mixing.norms()
        if absent is not None:
            weights = weights.masked_fill((absent[:, :, None] | absent[:, None])[:, None], 0.0)
    else:
        weights = mixing.to_dense()
    return weights.expand(batch, *weights.shape[-3:])
