"""What the blocks share that descend an energy: input, masks, steps, report and monitor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from spinformer.descent.algorithms import Algorithm
from spinformer.descent.energy import Energy, clear
from spinformer.descent.report import DescentReport, descend
from spinformer.errors import check_choice
from spinformer.nn.encoder import Encoder
from spinformer.nn.layers import make_norm
from spinformer.nn.masks import Layout, Masks, check_heads, merge_masks, to_batch
from spinformer.nn.report import BlockReport

__all__ = ["DescentBlock", "Move", "Problem", "cayley", "energy_along_depth", "graph_of"]


@dataclass(frozen=True)
class Problem:
    """Where a descent starts, and what its energy is bound to.

    Attributes:
        state: ``(B, N, d_model)``, of at least float32, zero at absent tokens.
        masks: of the tokens and their pairs.
        data: X of a data term, as the state; None for zero, or without one.
        memory: other tokens ``(B, S, d_model)`` that the state falls towards; None for none.
        memory_absent: ``(B, S)``, True where there is none of them.
    """

    state: Tensor
    masks: Masks
    data: Tensor | None = None
    memory: Tensor | None = None
    memory_absent: Tensor | None = None


@dataclass(frozen=True)
class Move:
    """One step of a block: what it descends, how, and what it saw.

    Attributes:
        energy: with all that it depends on but the state.
        algorithm: what makes the step.
        evidence: the entries of a :class:`BlockReport` at a state, attention weights say.
    """

    energy: Energy
    algorithm: Algorithm
    evidence: Callable[[Tensor], dict[str, Tensor]]

    def step(self, state: Tensor, absent: Tensor | None) -> Tensor:
        """The next state."""
        return self.algorithm.step(self.energy, state, absent)

    def value(self, state: Tensor, absent: Tensor | None) -> Tensor:
        """``(B,)``: the energy, and the penalty of the entries inside its domain."""
        total = self.energy.energy(state, absent)
        if self.algorithm.penalty is None:
            return total
        penalty = clear(self.algorithm.penalty.value(state), absent)
        return total + penalty.masked_fill(penalty == torch.inf, 0.0).sum((-2, -1))


class DescentBlock(nn.Module):
    """A block whose forward pass is a number of steps down an energy.

    A subclass says what a step is, :meth:`_move`, and which masks have which meaning.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        steps: int,
        tied: bool,
        data_term: str | None,
        norm: str | None,
        dropout: float,
        batch_first: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_heads(d_model, nhead)
        if steps < 1:
            raise ValueError(f"steps={steps!r} must be at least 1")
        self.d_model, self.nhead = d_model, nhead
        self.num_steps, self.tied, self.data_term = steps, tied, data_term
        self.norm = None if norm is None else make_norm(norm, d_model, device, dtype)
        self.dropout = nn.Dropout(dropout)
        # torch.nn.TransformerEncoder reads the layout here.
        self.self_attn = SimpleNamespace(batch_first=batch_first)

    @property
    def batch_first(self) -> bool:
        """Whether three-axes inputs are ``(B, N, d_model)``."""
        return bool(self.self_attn.batch_first)

    @property
    def needs_source(self) -> bool:
        """Whether :class:`Encoder` is to hand the input of the stack on."""
        return self.data_term == "network"

    # What a subclass defines.

    def _move(self, index: int, problem: Problem) -> Move:
        """The step of that number."""
        raise NotImplementedError

    def _one_energy(self) -> bool:
        """Whether all steps descend one energy."""
        return True

    def _lasting(self) -> bool:
        """Whether that energy does not depend on what the block is given, but for ``source``."""
        return self.data_term != "input"

    def _check_masks(self, masks: Masks) -> None:
        """Raise where the steps have no answer to these masks over pairs."""

    def _has_energy(self, masks: Masks) -> bool:
        return masks.symmetric

    # What all of them do.

    def energy(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        source: Tensor | None = None,
    ) -> Tensor:
        """The energy of the state that the block starts from at the input ``x``.

        Returns:
            ``(B,)``, or a number for an unbatched input: the first step's energy at ``norm(x)``,
            ``report.energy_before[0]``, with the penalty of the entries inside its domain.

        Raises:
            ValueError: a mask over pairs for which there is no energy.
        """
        problem, layout = self._prepare(x, src_mask, src_key_padding_mask, is_causal, source)
        return self._energy(problem, layout)

    def monitor(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        source: Tensor | None = None,
        keep_states: bool = False,
    ) -> DescentReport:
        """What each step of the block does to its energy, and what was known before it.

        Without dropout and without derivatives. The energy is infinite where a state, ``norm(x)``
        say, lies outside the domain of the activation's penalty.

        Args:
            x, src_mask, src_key_padding_mask, is_causal, source: as the forward pass.
            keep_states: keep all states.

        Returns:
            :class:`spinformer.descent.DescentReport` of ``(B,)`` systems, B = 1 for an unbatched
            input.

        Raises:
            ValueError: a mask over pairs for which there is no energy, or steps that descend one
                each (``tied=False`` with ``steps`` above 1).
        """
        problem, _ = self._prepare(x, src_mask, src_key_padding_mask, is_causal, source)
        return self._monitor(problem, self.num_steps, keep_states)

    def forward(
        self,
        x: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        source: Tensor | None = None,
        return_report: bool = False,
    ) -> Tensor | tuple[Tensor, BlockReport]:
        """Descend.

        Args:
            x: ``(B, N, d_model)`` (see ``batch_first``) or ``(N, d_model)``.
            src_mask: ``(N, N)`` or ``(B * nhead, N, N)``; True, or -inf, where token i must not
                hear token j. A finite entry multiplies the bond by its exponential.
            src_key_padding_mask: ``(B, N)``; True, or -inf, where there is no token.
            is_causal: token i hears ``j <= i`` only.
            source: the network's input, for ``data_term="network"``; None for ``x``.
            return_report: also return a :class:`BlockReport` with the energy before and after each
                step (None where the masks leave none), and the attention of the last step.
        """
        problem, layout = self._prepare(x, src_mask, src_key_padding_mask, is_causal, source)
        return self._forward(x, problem, layout, return_report)

    def _prepare(
        self,
        x: Tensor,
        src_mask: Tensor | None,
        src_key_padding_mask: Tensor | None,
        is_causal: bool,
        source: Tensor | None,
    ) -> tuple[Problem, Layout]:
        parameter = self._parameter
        tokens, layout = to_batch(x, self.d_model, self.batch_first, parameter)
        masks = merge_masks(tokens, self.nhead, src_mask, src_key_padding_mask, is_causal)
        if masks.blocked is not None or masks.bias is not None:
            self._check_masks(masks)
        state = self._start(tokens, masks.absent, parameter.dtype)
        data: Tensor | None = None
        if self.data_term == "input" or (self.data_term == "network" and source is None):
            data = state
        elif self.data_term == "network" and source is not None:
            given, _ = to_batch(source, self.d_model, self.batch_first, parameter)
            data = self._start(given, masks.absent, parameter.dtype)
        return Problem(state, masks, data), layout

    def _start(self, tokens: Tensor, absent: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What the descent starts from, in at least float32; ``dtype`` is the parameters'."""
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = clear(tokens, absent).to(dtype)
            if self.norm is not None:
                tokens = clear(self.norm(tokens), absent)
        return tokens.to(torch.promote_types(dtype, torch.float32))

    def _forward(
        self, x: Tensor, problem: Problem, layout: Layout, return_report: bool
    ) -> Tensor | tuple[Tensor, BlockReport]:
        absent = problem.masks.absent
        with_energy = return_report and self._has_energy(problem.masks)
        before: list[Tensor] = []
        after: list[Tensor] = []
        with torch.autocast(x.device.type, enabled=False):
            state = self.dropout(problem.state)
            for move in self._moves(problem, self.num_steps):
                previous = state
                state = move.step(previous, absent)
                if with_energy:
                    known = after and self._one_energy()
                    before.append(after[-1] if known else move.value(previous, absent))
                    after.append(move.value(state, absent))
            evidence = move.evidence(previous) if return_report else {}
        out = layout.leave(clear(state, absent).to(x.dtype))
        if not return_report:
            return out
        report = BlockReport(
            energy_before=torch.stack(before) if with_energy else None,
            energy_after=torch.stack(after) if with_energy else None,
            **evidence,
        )
        return out, report

    def _energy(self, problem: Problem, layout: Layout) -> Tensor:
        self._require_energy(problem.masks)
        with torch.autocast(problem.state.device.type, enabled=False):
            value = self._move(0, problem).value(problem.state, problem.masks.absent)
        return value if layout.batched else value.squeeze(0)

    @torch.no_grad()
    def _monitor(self, problem: Problem, steps: int, keep_states: bool) -> DescentReport:
        self._require_energy(problem.masks)
        if not self._one_energy():
            raise ValueError(
                f"steps={self.num_steps} with tied=False: each step descends an energy of its own. "
                "Use tied=True or steps=1; return_report=True has the energies around each step"
            )
        with torch.autocast(problem.state.device.type, enabled=False):
            move = self._move(0, problem)
            return descend(
                move.energy,
                problem.state,
                move.algorithm,
                steps,
                problem.masks.absent,
                keep_states=keep_states,
            )

    def _moves(self, problem: Problem, steps: int) -> Iterator[Move]:
        """The steps; what they share is computed once."""
        if self._one_energy():
            move = self._move(0, problem)
            for _ in range(steps):
                yield move
        else:
            for index in range(steps):
                yield self._move(index, problem)

    def _require_energy(self, masks: Masks) -> None:
        if not self._has_energy(masks):
            raise ValueError(
                "the mask over pairs is not symmetric (a causal mask, say): the step descends no "
                "energy. Use a symmetric mask, or the forward pass alone"
            )

    @property
    def _parameter(self) -> Tensor:
        """Any parameter: they share dtype and device."""
        return next(self.parameters())


@torch.no_grad()
def energy_along_depth(
    encoder: Encoder,
    x: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    keep_states: bool = False,
) -> DescentReport:
    """One report for all steps of all layers, where a stack is one long descent.

    That is a stack of one tied block that has no norm of its own and whose energy does not depend
    on the layer's input: ``tied=True``, ``norm=None`` and no ``data_term="input"``. Other stacks
    descend an energy a layer: their reports have the energies around each step.

    Args:
        encoder: of :class:`EnergyDescentBlock`, :class:`HopfieldBlock` with stored patterns, or
            :class:`EnergyTransformerBlock`.
        x, src_mask, src_key_padding_mask, is_causal: as the encoder's forward pass.
        keep_states: keep all states.

    Raises:
        TypeError: layers of another kind.
        ValueError: layers that do not descend one energy, or a mask for which there is none.
    """
    block = encoder.layers[0]
    if not isinstance(block, DescentBlock):
        raise TypeError(
            f"encoder has layers {type(block).__name__}, which descend no explicit energy: pass a "
            "stack of energy-descent, Hopfield or Energy Transformer blocks"
        )
    if len(encoder.layers) > 1:
        complaints = (
            (
                any(layer is not block for layer in encoder.layers),
                "parameters of their own (tied=False, say)",
                "Encoder and tied=True",
            ),
            (block.norm is not None, "a norm between the layers", "norm=None"),
            (not block._lasting(), "an energy that depends on the layer's input", "another"),
        )
        for wrong, found, wanted in complaints:
            if wrong:
                raise ValueError(
                    f"encoder has layers with {found}: they descend different energies. Use "
                    f"{wanted}, or the layers' reports"
                )
    problem, _ = block._prepare(x, src_mask, src_key_padding_mask, is_causal, x)
    return block._monitor(problem, len(encoder.layers) * block.num_steps, keep_states)


def cayley(generator: Tensor, nhead: int) -> Tensor:
    """Orthonormal heads ``[Q_1 ... Q_H]`` ``(H, d, d / H)`` from a free matrix A ``(d, d)``.

    The Cayley transform ``(1 - S)^-1 (1 + S)`` with ``S = A - A^T``. Cost: O(d^3).
    """
    skew = generator - generator.mT
    identity = torch.eye(skew.shape[0], dtype=skew.dtype, device=skew.device)
    frame = torch.linalg.solve(identity - skew, identity + skew)
    return frame.unflatten(-1, (nhead, -1)).permute(1, 0, 2)


def graph_of(masks: Masks) -> Tensor | None:
    """The bonds that masks over pairs leave, broadcastable to ``(B, nhead, N, N)``.

    One where a token is absent: what it has no part in cannot make the bonds asymmetric.
    """
    if masks.blocked is None and masks.bias is None:
        return None
    if masks.bias is None:
        assert masks.blocked is not None
        bonds = ~masks.blocked
    else:
        bonds = masks.bias.exp()
        if masks.blocked is not None:
            bonds = bonds.masked_fill(masks.blocked, 0.0)
    if masks.absent is None:
        return bonds
    absent = masks.absent[:, None, :, None] | masks.absent[:, None, None, :]
    return bonds | absent if bonds.dtype == torch.bool else bonds.masked_fill(absent, 1.0)


def check_size(name: str, size: float, bound: float = 2.0) -> float:
    """A step size in ``(0, bound]``."""
    if not 0 < size <= bound:
        raise ValueError(f"{name}={size!r} must be in (0, {bound:g}]: beyond, energies rise")
    return size


def check_data_term(data_term: str | None, choices: tuple[str, ...], weight: float) -> None:
    """Raise unless the data term exists and its weight is positive."""
    check_choice("data_term", data_term, choices, optional=True)
    if not weight > 0:
        raise ValueError(f"data_weight={weight!r} must be positive; data_term=None has none")
