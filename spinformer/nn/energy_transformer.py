"""The Energy Transformer as a block."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from spinformer.descent.energy import Energy
from spinformer.descent.energy_transformer import (
    EnergyAttention,
    EnergyHopfield,
    EnergyLayerNorm,
    EnergyTransformer,
    EnergyTransformerStep,
)
from spinformer.errors import strict_options
from spinformer.nn.descent_block import DescentBlock, Move, Problem, graph_of
from spinformer.nn.masks import Masks

__all__ = ["EnergyTransformerBlock"]


@strict_options
class EnergyTransformerBlock(DescentBlock):
    r"""The Energy Transformer: tokens that follow the force on their normalized selves.

    .. math::
        x \leftarrow x - \alpha \frac{\partial E}{\partial g}, \qquad
        E(g) = -\sum_h \frac{1}{\beta_h} \sum_i \log \sum_{j \ne i}
                  e^{\beta_h\, (g_i W^Q_h) \cdot (g_j W^K_h)}
               - \frac12 \sum_{i\mu} \mathrm{relu}(\xi_\mu \cdot g_i)^2

    with the energy layer norm ``g = gamma (x - mean) / std + b``, gamma a scalar. Attention and
    memory act at once, with the same weights in all ``steps``. The state is ``x`` itself, which
    starts at the block's input: the skip connection is the step.

    **What is guaranteed.** Along the continuous flow the energy never rises, in steps of a small
    size it hardly does, with ``safe=True`` never: no token's size then exceeds
    :meth:`spinformer.descent.EnergyTransformer.safe_size`. (The gain is kept non-negative.) A stack
    with ``tied=True`` is one long descent.

    **Masks over pairs** must be symmetric. An asymmetric one, a causal one say, has an energy too,
    but the force on a token includes that of the tokens which attend to it: it would hear those
    that the mask hides from it. So it is refused. :class:`spinformer.descent.EnergyAttention` takes
    any.

    Cost: O(B N d_model (N + K)) a step for K patterns, with ``safe=True`` O(nhead d_model^3) more;
    memory O(B nhead N^2).

    Source: Hoover et al. (2023); no token attends to itself, as in the paper.

    Args:
        d_model: width of the token stream.
        nhead: number of heads, a divisor of ``d_model``.
        dim_feedforward: K, patterns of the memory; None for ``4 * d_model``, 0 for no memory.
        steps: number of steps, at least 1.
        step: alpha, positive.
        beta: initial inverse temperature of all heads, positive; None for ``1 / sqrt(d_h)``. Each
            head learns its own.
        safe: shorten steps where it takes that to never raise the energy.
        tied: one set of parameters for all layers of an :class:`Encoder`.
        dropout: probability, in training, on the state that the descent starts from.
        batch_first: whether three-axes inputs are ``(B, N, d_model)`` or ``(N, B, d_model)``.
        device: where the parameters lie.
        dtype: their dtype. The descent runs in at least float32.

    Raises:
        TypeError: an unknown option; the message names the nearest.
        ValueError: an option out of its range; in the forward pass, an asymmetric mask over pairs.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        *,
        dim_feedforward: int | None = None,
        steps: int = 12,
        step: float = 0.1,
        beta: float | None = None,
        safe: bool = False,
        tied: bool = False,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model, nhead, steps, tied, None, None, dropout, batch_first, device, dtype
        )
        hidden = 4 * d_model if dim_feedforward is None else dim_feedforward
        if hidden < 0:
            raise ValueError(f"dim_feedforward={hidden!r} must not be negative; 0 has no memory")
        for name, value in (("step", step), ("beta", beta)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} must be positive")
        self.step, self.safe = step, safe
        self.head_dim = d_model // nhead
        self._initial_beta = self.head_dim**-0.5 if beta is None else beta
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.log_gain = nn.Parameter(torch.empty((), **options))
        self.bias = nn.Parameter(torch.empty(d_model, **options))
        self.query = nn.Parameter(torch.empty(nhead, d_model, self.head_dim, **options))
        self.key = nn.Parameter(torch.empty(nhead, d_model, self.head_dim, **options))
        self.log_beta = nn.Parameter(torch.empty(nhead, **options))
        self.patterns: nn.Parameter | None = None
        if hidden:
            self.patterns = nn.Parameter(torch.empty(hidden, d_model, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew: unit gain, zero bias, projections that keep the variance."""
        nn.init.zeros_(self.log_gain)
        nn.init.zeros_(self.bias)
        for weight in (self.query, self.key):
            nn.init.normal_(weight, std=self.d_model**-0.5)
        nn.init.constant_(self.log_beta, math.log(self._initial_beta))
        if self.patterns is not None:
            # The memory's force is then of the size of the token, whatever their number.
            nn.init.normal_(self.patterns, std=self.patterns.shape[0] ** -0.5)

    def _move(self, index: int, problem: Problem) -> Move:
        dtype, absent = problem.state.dtype, problem.masks.absent
        attention = EnergyAttention(
            self.query.to(dtype),
            self.key.to(dtype),
            self.log_beta.to(dtype).exp(),
            graph=graph_of(problem.masks),
        )
        energy: Energy = attention
        if self.patterns is not None:
            energy = attention + EnergyHopfield(self.patterns.to(dtype))
        norm = EnergyLayerNorm(self.log_gain.to(dtype).exp(), self.bias.to(dtype))
        model = EnergyTransformer(norm, energy)

        def evidence(state: Tensor) -> dict[str, Tensor]:
            return {"couplings": attention.attention(model.normalized(state, absent), absent)}

        return Move(model, EnergyTransformerStep(self.step, self.safe), evidence)

    def _has_energy(self, masks: Masks) -> bool:
        return True

    def _check_masks(self, masks: Masks) -> None:
        if not masks.symmetric:
            raise ValueError(
                "the mask over pairs is not symmetric (a causal mask, say): a token would hear, by "
                "the force on it as a key, those that the mask hides from it. Use a symmetric "
                "mask, or EnergyDescentBlock(algorithm='aim')"
            )

    def extra_repr(self) -> str:
        """The options that the children do not show."""
        return (
            f"nhead={self.nhead}, steps={self.num_steps}, step={self.step}, safe={self.safe}, "
            f"tied={self.tied}"
        )
