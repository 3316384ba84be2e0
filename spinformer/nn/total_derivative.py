"""What couplings that are computed from the tokens add to a block's magnetization."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spinformer.equilibrium.mean_field import MeanFieldEquilibrium
from spinformer.equilibrium.steepest_descent import SteepestDescentEquilibrium
from spinformer.nn.amortized import Amortization, norm_pullback
from spinformer.nn.couplings import HeadMixture
from spinformer.spins.couplings import Couplings
from spinformer.thermo.equilibrium import Equilibrium

__all__ = ["check_total", "coupling_term"]


def check_total(
    couplings: str, stream: str, steps: int | None, symmetric_between: bool | None = None
) -> None:
    """Raise ``ValueError`` where the other options leave no free energy, or another field."""
    wrong = {
        "couplings": (
            couplings,
            couplings in ("softmax", "linear"),
            "'symmetric': 'softmax' has no free energy, and of 'linear' the derivative in the "
            "tokens is not worked out",
        ),
        "stream": (stream, stream != "plain", "'plain', where the tokens are the field"),
        "symmetric_between": (
            symmetric_between,
            couplings == "matrix" and symmetric_between is False,
            "True, which leaves a free energy",
        ),
        "steps": (steps, steps is not None, "None: it needs a solved equilibrium"),
    }
    for option, (value, given, remedy) in wrong.items():
        if given:
            raise ValueError(
                f"derivative='total' is the derivative of a free energy in the tokens, and "
                f"{option}={value!r}: use {option}={remedy}, or derivative='partial'"
            )


def coupling_term(
    equilibrium: Equilibrium,
    couplings: Couplings,
    amortization: Amortization | None,
    norm: nn.LayerNorm | nn.RMSNorm,
    tokens: Tensor,
) -> Tensor:
    r""":math:`\tfrac12\sum_{h, m\ne n} \langle S^h_m\cdot S^h_n\rangle\, \partial J^h_{mn}/\partial
    x`, (B, N, d_model), differentiable.

    Args:
        equilibrium: of the heads' systems.
        couplings: theirs, as the block made them.
        amortization: how they came about; None: not from the tokens.
        norm: through which the couplings see the tokens.
        tokens: x, (B, N, d_model).
    """
    if amortization is None:
        return torch.zeros_like(tokens, dtype=equilibrium.system.field.dtype)
    values: Tensor | None = None
    matrix: Tensor | None = None
    # The correlations("coupling"), in parts that need no walk through (N, N) matrices.
    if isinstance(couplings, HeadMixture):
        # J_ij = sum_h A^h_ij V_h^T V_h: the heads' weights meet the heads' values.
        values = couplings.values(equilibrium.magnetization)
    elif isinstance(equilibrium, MeanFieldEquilibrium):
        values = equilibrium.magnetization
    elif isinstance(equilibrium, SteepestDescentEquilibrium):
        values, matrix = equilibrium.magnetization, equilibrium.connected_correlations
    else:
        matrix = equilibrium.correlations("coupling")
    broken = equilibrium.broken
    if broken is not None:
        # NaN times the zero that a loss gives it would reach the weights.
        broken = broken.reshape(len(tokens), -1)[..., None, None]
        values = None if values is None else torch.where(broken, 0.0, values)
        matrix = None if matrix is None else torch.where(broken, 0.0, matrix)
    term = norm_pullback(norm, tokens, amortization.pullback(values, matrix))
    return term if broken is None else torch.where(broken.any(1), torch.nan, term)
