"""A modern Hopfield network as a block."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spinformer.descent.algorithms import MajorizeMinimize
from spinformer.descent.attention import from_heads, to_heads
from spinformer.descent.energy import Energy, SumEnergy, clear
from spinformer.descent.feed_forward import QuadraticEnergy
from spinformer.descent.hopfield import HopfieldEnergy
from spinformer.descent.report import DescentReport
from spinformer.errors import strict_options
from spinformer.nn.descent_block import (
    DescentBlock,
    Move,
    Problem,
    cayley,
    check_data_term,
    check_size,
    graph_of,
)
from spinformer.nn.masks import Layout, Masks, merge_masks, to_batch
from spinformer.nn.report import BlockReport

__all__ = ["HeadsEnergy", "HopfieldBlock"]


class HeadsEnergy(Energy):
    """An energy of each head's coordinates, as one of the tokens: ``sum_h E_h(Y Q_h)``.

    Args:
        inner: of states ``(..., H, N, d_h)``, a head a system.
        frames: ``Q_h``, ``(H, d, d_h)`` with ``H d_h = d``; the columns of all of them orthonormal,
            so that the heads decouple.
    """

    def __init__(self, inner: HopfieldEnergy, frames: Tensor) -> None:
        self.inner = inner
        self.frames = frames

    def split(self, Y: Tensor) -> Tensor:
        """``Y Q_h``, ``(..., H, N, d_h)``."""
        return to_heads(Y, self.frames)

    def energy(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner.energy(self.split(clear(Y, mask)), _heads(mask)).sum(-1)

    def gradient(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        slope = self.inner.gradient(self.split(clear(Y, mask)), _heads(mask))
        return from_heads(slope, self.frames)

    def curvature(self, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner.curvature(self.split(clear(Y, mask)), _heads(mask)).amax(-2)

    def hessian_bounds(self, count: int) -> tuple[Tensor, Tensor]:
        lower, upper = self.inner.hessian_bounds(count)
        return lower.amin(-1), upper.amax(-1)


@strict_options
class HopfieldBlock(DescentBlock):
    r"""A layer whose tokens fall towards patterns: steps of a modern Hopfield network.

    The state ``Y`` starts at ``norm(x)``. In orthogonal subspaces ``Q_h`` of its channels, one a
    head, it descends

    .. math::
        E(Y) = \sum_{h,i} \Big[ -\frac{1}{\beta_h} \log \sum_k e^{\beta_h\, x_{hk} \cdot q_{hi}}
               + \frac12 |q_{hi}|^2 \Big] + \frac{\lambda}{2} |Y - X|^2, \qquad q_{hi} = y_i Q_h

    with patterns :math:`x_{hk}` that do not move while it does, by the step of size a

    .. math::
        q \leftarrow q + \frac{a}{1 + \lambda}
            \Big[ \sum_k \mathrm{softmax}_k(\beta_h\, x_{hk} \cdot q)\, x_{hk} - q
                  + \lambda\, (X Q_h - q) \Big],

    at a = 1 and without the data term ``q <- K^T softmax(beta K q)``. The energy **never rises**,
    for ``0 < step <= 2``: what is concave in it lies below its tangent (the concave-convex
    procedure). The state itself is returned: an output projection would leave the space of the
    energy. Without the data term a step of size 1 forgets the token but for what it retrieves.

    The patterns are

    * those stored, ``num_patterns`` learned ones a head. Tokens do not see each other: a mask over
      pairs that forbids what does not happen is taken, a bias of logits that do not exist is not;
    * by default associations: the tokens that the block starts from, read by a learned matrix of
      each head, ``x_{hk} = x_k W_h``; or those of another sequence, ``memory``. A token may find
      itself. Since patterns do not move, every mask over pairs leaves an energy, also a causal one,
      and a causal mask is causal.

    The values are the patterns, hence no matrix of their own: with one there would be no energy.

    Cost: O(B N d_model (S + d_model) + d_model^3) a step for S patterns; memory O(B nhead N S).

    Source: Ramsauer et al. (2020), with heads, and a data term as the skip connection.

    Args:
        d_model: width of the token stream.
        nhead: number of heads, a divisor of ``d_model``.
        num_patterns: stored patterns of each head; None associates tokens.
        beta: initial inverse temperature of all heads, positive; None for ``1 / sqrt(d_h)``. Each
            head learns its own.
        data_term: ``"input"``, the state the block starts from; ``"network"``, the normalized input
            of the stack; None for no data term.
        step: size a, in (0, 2].
        tied: one set of parameters for all layers of an :class:`Encoder`.
        steps: number of steps, at least 1, of one energy.
        norm: ``"layer"``, ``"rms"`` or None, of the block's input and of ``memory``.
        data_weight: initial lambda, positive; it is learned.
        dropout: probability, in training, on the state that the descent starts from.
        batch_first: whether three-axes inputs are ``(B, N, d_model)`` or ``(N, B, d_model)``.
        device: where the parameters lie.
        dtype: their dtype. The descent runs in at least float32.

    Raises:
        TypeError: an unknown option; the message names the nearest.
        ValueError: an option out of its range.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        *,
        num_patterns: int | None = None,
        beta: float | None = None,
        data_term: Literal["input", "network"] | None = "input",
        step: float = 1.0,
        tied: bool = False,
        steps: int = 1,
        norm: Literal["layer", "rms"] | None = "layer",
        data_weight: float = 1.0,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model, nhead, steps, tied, data_term, norm, dropout, batch_first, device, dtype
        )
        check_data_term(data_term, ("input", "network"), data_weight)
        if num_patterns is not None and num_patterns < 1:
            raise ValueError(f"num_patterns={num_patterns!r} must be at least 1, or None")
        if beta is not None and not beta > 0:
            raise ValueError(f"beta={beta!r} must be positive")
        self.step = check_size("step", step)
        self.num_patterns = num_patterns
        self.head_dim = d_model // nhead
        self._initial_beta = self.head_dim**-0.5 if beta is None else beta
        self._initial_data_weight = data_weight
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        rows = d_model if num_patterns is None else num_patterns
        self.generator = nn.Parameter(torch.empty(d_model, d_model, **options))
        self.patterns = nn.Parameter(torch.empty(nhead, rows, self.head_dim, **options))
        """The stored patterns, or the matrices that read those of tokens."""
        self.log_beta = nn.Parameter(torch.empty(nhead, **options))
        self.log_data_weight: nn.Parameter | None = None
        if data_term is not None:
            self.log_data_weight = nn.Parameter(torch.empty((), **options))
        self._reset_own()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        if self.norm is not None:
            self.norm.reset_parameters()
        self._reset_own()

    def _reset_own(self) -> None:
        nn.init.normal_(self.generator, std=0.5 / self.d_model**0.5)
        # Patterns are of the size of normalized tokens.
        nn.init.normal_(self.patterns, std=1.0 if self.num_patterns else self.d_model**-0.5)
        nn.init.constant_(self.log_beta, math.log(self._initial_beta))
        if self.log_data_weight is not None:
            nn.init.constant_(self.log_data_weight, math.log(self._initial_data_weight))

    def energy(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        source: Tensor | None = None,
        memory: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The energy of the state that the block starts from at the input ``x``.

        Returns:
            ``(B,)``, or a number for an unbatched input: ``report.energy_before[0]``.
        """
        problem, layout = self._prepare(x, src_mask, src_key_padding_mask, is_causal, source)
        return self._energy(self._remember(problem, memory, memory_key_padding_mask), layout)

    def monitor(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        source: Tensor | None = None,
        keep_states: bool = False,
        memory: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> DescentReport:
        """What each step of the block does to its energy; without dropout and derivatives.

        Returns:
            :class:`spinformer.descent.DescentReport` of ``(B,)`` systems, B = 1 for an unbatched
            input.
        """
        problem, _ = self._prepare(x, src_mask, src_key_padding_mask, is_causal, source)
        problem = self._remember(problem, memory, memory_key_padding_mask)
        return self._monitor(problem, self.num_steps, keep_states)

    def forward(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        source: Tensor | None = None,
        memory: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        return_report: bool = False,
    ) -> Tensor | tuple[Tensor, BlockReport]:
        """Retrieve.

        Args:
            x: ``(B, N, d_model)`` (see ``batch_first``) or ``(N, d_model)``.
            src_mask: ``(N, N)`` or ``(B * nhead, N, N)``; True, or -inf, where token i must not
                find token j. A finite entry is added to the logits.
            src_key_padding_mask: ``(B, N)``; True, or -inf, where there is no token.
            is_causal: token i finds ``j <= i`` only.
            source: the network's input, for ``data_term="network"``; None for ``x``.
            memory: ``(B, S, d_model)``, laid out as ``x``: the tokens to find in place of those of
                ``x``. With it, masks over pairs do not apply.
            memory_key_padding_mask: ``(B, S)``; True, or -inf, where it has no token.
            return_report: also return a :class:`BlockReport` with the energy before and after each
                step and the weights of the last step: ``couplings`` of tokens among each other,
                ``retrieval`` of other patterns.

        Raises:
            ValueError: a memory beside stored patterns or masks over pairs, or of another batch.
        """
        problem, layout = self._prepare(x, src_mask, src_key_padding_mask, is_causal, source)
        problem = self._remember(problem, memory, memory_key_padding_mask)
        return self._forward(x, problem, layout, return_report)

    def _prepare(
        self,
        x: Tensor,
        src_mask: Tensor | None,
        src_key_padding_mask: Tensor | None,
        is_causal: bool,
        source: Tensor | None,
    ) -> tuple[Problem, Layout]:
        problem, layout = super()._prepare(x, src_mask, src_key_padding_mask, is_causal, source)
        if self.num_patterns is None:
            problem = replace(problem, memory=problem.state, memory_absent=problem.masks.absent)
        return problem, layout

    def _remember(self, problem: Problem, memory: Tensor | None, padding: Tensor | None) -> Problem:
        """The problem with other tokens that the state falls towards."""
        if memory is None:
            if padding is not None:
                raise ValueError("memory_key_padding_mask without memory: pass the memory too")
            return problem
        if self.num_patterns is not None:
            raise ValueError(
                f"memory with num_patterns={self.num_patterns}: the block has stored patterns. "
                "Use num_patterns=None to find those of a memory"
            )
        if problem.masks.blocked is not None or problem.masks.biased:
            raise ValueError(
                "a mask over pairs with memory: it is about the tokens among each other. Use "
                "memory_key_padding_mask"
            )
        parameter = self._parameter
        tokens, _ = to_batch(memory, self.d_model, self.batch_first, parameter)
        if tokens.shape[0] != problem.state.shape[0]:
            raise ValueError(
                f"memory has {tokens.shape[0]} systems and x has {problem.state.shape[0]}: pass "
                "one memory a system"
            )
        masks = merge_masks(tokens, self.nhead, None, padding)
        if masks.biased:
            raise ValueError("memory_key_padding_mask has finite entries: pass a boolean mask")
        return replace(
            problem,
            masks=Masks(problem.masks.absent),
            memory=self._start(tokens, masks.absent, parameter.dtype),
            memory_absent=masks.absent,
        )

    def _move(self, index: int, problem: Problem) -> Move:
        dtype = problem.state.dtype
        frames = cayley(self.generator.to(dtype), self.nhead)
        own = problem.memory is problem.state
        patterns, pattern_mask, graph = self.patterns.to(dtype), None, None
        if problem.memory is not None:
            patterns = problem.memory.unsqueeze(-3) @ patterns
            if problem.memory_absent is not None:
                pattern_mask = problem.memory_absent.unsqueeze(-2)
            if own:
                graph = graph_of(problem.masks)
        inner = HopfieldEnergy(
            patterns, self.log_beta.to(dtype).exp(), pattern_mask=pattern_mask, graph=graph
        )
        retrieval = HeadsEnergy(inner, frames)
        energy: Energy = retrieval
        if self.log_data_weight is not None:
            weight = self.log_data_weight.to(dtype).exp() / 2
            energy = SumEnergy(retrieval, QuadraticEnergy(center=problem.data, weight=weight))

        def evidence(state: Tensor) -> dict[str, Tensor]:
            weights = clear(inner.attention(retrieval.split(state)), _heads(problem.masks.absent))
            return {"couplings" if own else "retrieval": weights}

        return Move(energy, MajorizeMinimize(self.step), evidence)

    def _lasting(self) -> bool:
        return self.num_patterns is not None and super()._lasting()

    def _has_energy(self, masks: Masks) -> bool:
        return True

    def _check_masks(self, masks: Masks) -> None:
        if self.num_patterns is not None and masks.biased:
            raise ValueError(
                f"a mask with finite entries and num_patterns={self.num_patterns}: tokens don't "
                "see each other, and no logits of theirs could take it. Pass a boolean mask"
            )

    def extra_repr(self) -> str:
        """The options that the children do not show."""
        return (
            f"nhead={self.nhead}, num_patterns={self.num_patterns}, data_term={self.data_term!r}, "
            f"step={self.step}, tied={self.tied}, steps={self.num_steps}"
        )


def _heads(mask: Tensor | None) -> Tensor | None:
    """A mask of tokens for all heads."""
    return None if mask is None else mask.unsqueeze(-2)
