"""A Transformer block that descends an explicit energy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spinformer.descent.feed_forward import FeedForwardEnergy, MemoryEnergy
from spinformer.descent.pairwise import PairwiseEnergy
from spinformer.descent.proximal import prox_nonnegative
from spinformer.descent.rho import Rho, as_rho
from spinformer.errors import check_choice, strict_options
from spinformer.nn.layers import make_norm
from spinformer.nn.masks import Masks, check_heads, merge_masks, to_batch
from spinformer.nn.report import BlockReport

__all__ = ["EnergyDescentBlock"]


class DescentStep(nn.Module):
    """The parameters of one step: the heads, the data weight, the position-wise energy.

    The heads are ``W_h = s_h Q_h`` with ``[Q_1 ... Q_H]`` orthogonal, so that they decouple and
    each is a full attention step (:class:`PairwiseEnergy`). Q is the Cayley transform of a free
    matrix, ``(1 - S)^-1 (1 + S)`` with ``S = A - A^T``: O(d_model^3), once for a whole batch.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        rho: Rho,
        data_weight: float | None,
        feedforward: str | None,
        dim_feedforward: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.nhead, self.rho, self.feedforward = nhead, rho, feedforward
        self.head_dim = d_model // nhead
        self._initial_data_weight = data_weight
        self.generator = nn.Parameter(torch.empty(d_model, d_model, **options))
        self.log_scale = nn.Parameter(torch.empty(nhead, **options))
        self.log_data_weight: nn.Parameter | None = None
        if data_weight is not None:
            self.log_data_weight = nn.Parameter(torch.empty((), **options))
        self.weight: nn.Parameter | None = None
        self.offset: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if feedforward is not None:
            rows = d_model if feedforward == "linear" else dim_feedforward
            self.weight = nn.Parameter(torch.empty(rows, d_model, **options))
            self.bias = nn.Parameter(torch.empty(d_model, **options))
            if feedforward == "memory":
                self.offset = nn.Parameter(torch.empty(rows, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        d_model = self.generator.shape[0]
        nn.init.normal_(self.generator, std=0.5 / d_model**0.5)
        # Two normalized tokens differ by O(1) a channel: the exponent is then of the size of a
        # Transformer's logits q . k / sqrt(d_h), and a token hears itself more than others.
        nn.init.constant_(self.log_scale, -0.25 * torch.tensor(float(self.head_dim)).log().item())
        if self.log_data_weight is not None and self._initial_data_weight is not None:
            weight = torch.tensor(self._initial_data_weight)
            nn.init.constant_(self.log_data_weight, weight.log().item())
        if self.weight is not None and self.bias is not None:
            rows = self.weight.shape[0]
            std = d_model**-0.5 if self.feedforward == "linear" else (2 * rows) ** -0.5
            nn.init.normal_(self.weight, std=std)
            nn.init.zeros_(self.bias)
        if self.offset is not None:
            nn.init.zeros_(self.offset)

    def pairwise(self, dtype: torch.dtype) -> PairwiseEnergy:
        """The energy of the attention step."""
        skew = self.generator.to(dtype)
        skew = skew - skew.mT
        identity = torch.eye(skew.shape[0], dtype=dtype, device=skew.device)
        frame = torch.linalg.solve(identity - skew, identity + skew)
        heads = frame.unflatten(-1, (self.nhead, self.head_dim)).permute(1, 0, 2)
        weights = heads * self.log_scale.to(dtype).exp()[:, None, None]
        data_weight: float | Tensor = 0.0
        if self.log_data_weight is not None:
            data_weight = self.log_data_weight.to(dtype).exp()
        return PairwiseEnergy(self.rho, weights, data_weight, orthonormal=True)

    def position_wise(self, dtype: torch.dtype) -> FeedForwardEnergy | MemoryEnergy | None:
        """The energy of the feed-forward step; None without one."""
        if self.weight is None or self.bias is None:
            return None
        if self.offset is None:
            return FeedForwardEnergy(self.weight.to(dtype), self.bias.to(dtype))
        return MemoryEnergy(self.weight.to(dtype), self.offset.to(dtype), self.bias.to(dtype))

    def energy(self, state: Tensor, data: Tensor | None, masks: Masks) -> Tensor:
        """``(B,)``: the sum of the energies that the step descends."""
        total = self.pairwise(state.dtype).energy(
            state, masks.absent, graph=_graph(masks), data=data
        )
        position_wise = self.position_wise(state.dtype)
        return total if position_wise is None else total + position_wise.energy(state, masks.absent)

    def forward(
        self,
        state: Tensor,
        data: Tensor | None,
        masks: Masks,
        size: float,
        feedforward_size: float,
        activation: str | None,
    ) -> tuple[Tensor, Tensor]:
        """The next state, and the attention ``(B, nhead, N, N)`` that led to it."""
        pairwise = self.pairwise(state.dtype)
        kernel = pairwise.kernel(state, masks.absent, _graph(masks))
        state = pairwise.step_from(kernel, state, size, masks.absent, data=data)
        position_wise = self.position_wise(state.dtype)
        if position_wise is not None:
            state = position_wise.step(state, feedforward_size, masks.absent)
        if activation is not None:
            state = prox_nonnegative(state)
        return state, kernel.attention


@strict_options
class EnergyDescentBlock(nn.Module):
    r"""A layer whose forward pass is steps down an explicit energy.

    The **variable** of the descent is ``Y``, which starts at ``Y_0 = norm(x)`` and which the block
    returns after its last step: the skip connection is inside the step. The energy is

    .. math::
        E(Y) = \sum_h \sum_{ij} \rho(|(y_i - y_j) W_h|^2 / 2)
               + \frac{\lambda}{2} |Y - X|^2 + E_f(Y)

    and a step descends its two parts alternately (AIM, Algorithm 1 of Yang et al. 2022; with an
    activation, Algorithm 2):

    1. attention, ``size`` a: ``Y W_h <- (1 - a) Y W_h + a D_h^-1 W^(h) Y W_h``, for ``rho="exp"``
       the softmax re-weighted by ``exp(-|y_j|^2 / 2)``; with the data term
       ``(2 s^2 D_h + lambda)^-1 (2 s^2 W^(h) Y + lambda X)``. A token hears itself;
    2. feed-forward: a gradient step of E_f;
    3. the activation, the proximal map of a last term: ReLU for the constraint ``Y >= 0``.

    **What is guaranteed.** Without a mask over pairs, part 1 never raises the pairwise and data
    energy for ``step <= 2`` (on a symmetric graph, ``step <= 1``): the kernels are positive
    semi-definite, and the heads decouple. Part 2 alone never raises ``E_f`` with
    ``feedforward="memory"``, and with ``"linear"`` while ``feedforward_step`` is below 2 over the
    largest eigenvalue of ``1 + (W_f + W_f^T) / 2``. Their sum may rise, since each is blind to the
    other: the report shows it. Between blocks, ``norm`` moves the state to another energy; a stack
    with ``norm=None`` and ``tied=True`` is one long descent.

    Norm and activation are what makes the block train. Attention and a symmetric linear map are
    both averages; ReLU is the only position-wise nonlinearity, hence the default.

    Cost: O(B N d_model (N + d_model) + d_model^3) a step; memory O(B nhead N^2).

    Args:
        d_model: width of the token stream.
        nhead: number of heads, a divisor of ``d_model``.
        rho: ``"exp"``, ``"log1p"``, ``"log2p"``, or a :class:`spinformer.descent.Rho`.
        data_term: X of the data term: ``"input"``, the state the block starts from; ``"network"``,
            the normalized input of the stack, which :class:`Encoder` hands on as ``source`` (alone,
            and in other containers, it is the block's input); None for no data term.
        step: size a of the attention step, in (0, 2].
        feedforward: True or ``"linear"``: ``tr(Y W_f Y^T) / 2 + |Y|^2 / 2``, a symmetric linear
            layer; ``"memory"``: a two-layer network with one matrix,
            :class:`spinformer.descent.MemoryEnergy`; False for none.
        activation: ``"relu"`` or None.
        tied: one set of parameters for all steps, and for all layers of an :class:`Encoder`.
        steps: number of steps, at least 1.
        dim_feedforward: hidden units of ``"memory"``, and only of it; None for ``4 * d_model``.
        feedforward_step: size of the feed-forward step, in (0, 2].
        norm: ``"layer"``, ``"rms"`` or None, of the block's input.
        data_weight: initial lambda, positive; it is learned.
        dropout: probability, in training, on the state that the descent starts from.
        batch_first: whether three-axes inputs are ``(B, N, d_model)`` or ``(N, B, d_model)``.
        device: where the parameters lie.
        dtype: their dtype. The descent runs in at least float32.

    Raises:
        TypeError: an unknown option; the message names the nearest.
        ValueError: a size, or a combination of options, that does not exist.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        rho: Literal["exp", "log1p", "log2p"] | Rho = "exp",
        data_term: Literal["input", "network"] | None = "input",
        step: float = 1.0,
        feedforward: bool | Literal["linear", "memory"] = True,
        activation: Literal["relu"] | None = "relu",
        tied: bool = False,
        *,
        steps: int = 1,
        dim_feedforward: int | None = None,
        feedforward_step: float = 0.5,
        norm: Literal["layer", "rms"] | None = "layer",
        data_weight: float = 1.0,
        dropout: float = 0.0,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(d_model, nhead)
        if data_term is not None:
            check_choice("data_term", data_term, ("input", "network"))
        if activation is not None:
            check_choice("activation", activation, ("relu",))
        for name, size in (("step", step), ("feedforward_step", feedforward_step)):
            if not 0 < size <= 2:
                raise ValueError(f"{name}={size!r} must be in (0, 2]: beyond, energies rise")
        if steps < 1:
            raise ValueError(f"steps={steps!r} must be at least 1")
        if not data_weight > 0:
            raise ValueError(
                f"data_weight={data_weight!r} must be positive; data_term=None has none"
            )
        kind: str | None = None
        if feedforward is True:
            kind = "linear"
        elif feedforward is not False:
            kind = check_choice("feedforward", feedforward, ("linear", "memory"))
        if dim_feedforward is not None and (kind != "memory" or dim_feedforward < 1):
            raise ValueError(
                f"dim_feedforward={dim_feedforward!r} with feedforward={feedforward!r}: it is the "
                "number, at least 1, of hidden units of feedforward='memory'"
            )
        self.d_model, self.nhead = d_model, nhead
        self.data_term, self.activation, self.tied = data_term, activation, tied
        self.step, self.feedforward_step, self.num_steps = step, feedforward_step, steps
        self.norm = None if norm is None else make_norm(norm, d_model, device, dtype)
        self.dropout = nn.Dropout(dropout)
        self.steps = nn.ModuleList(
            DescentStep(
                d_model,
                nhead,
                as_rho(rho),
                None if data_term is None else data_weight,
                kind,
                4 * d_model if dim_feedforward is None else dim_feedforward,
                device,
                dtype,
            )
            for _ in range(1 if tied else steps)
        )
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

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        if self.norm is not None:
            self.norm.reset_parameters()
        for index in range(len(self.steps)):
            self._step(index).reset_parameters()

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
            ``report.energy_before[0]``. The constraint of the activation is not in it.

        Raises:
            ValueError: a mask over pairs that is not symmetric: there is no energy.
        """
        tokens, layout = to_batch(x, self.d_model, self.batch_first, self._step(0).generator)
        masks = merge_masks(tokens, self.nhead, src_mask, src_key_padding_mask, is_causal)
        if not masks.symmetric:
            raise ValueError(
                "the mask over pairs is not symmetric (a causal mask, say): the step descends no "
                "energy. Use a symmetric mask, or the forward pass alone"
            )
        with torch.autocast(x.device.type, enabled=False):
            state = self._start(tokens, masks)
            data = self._data(state, source, masks)
            energy = self._step(0).energy(state, data, masks)
        return energy if layout.batched else energy.squeeze(0)

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
            is_causal: token i hears ``j <= i`` only. The steps are taken, but there is no energy.
            source: the network's input, for ``data_term="network"``; None for ``x``.
            return_report: also return a :class:`BlockReport` with the energy before and after each
                step (None where the mask over pairs is not symmetric), and the attention of the
                last step.
        """
        tokens, layout = to_batch(x, self.d_model, self.batch_first, self._step(0).generator)
        masks = merge_masks(tokens, self.nhead, src_mask, src_key_padding_mask, is_causal)
        with_energy = return_report and masks.symmetric
        before: list[Tensor] = []
        after: list[Tensor] = []
        attention: Tensor | None = None
        with torch.autocast(x.device.type, enabled=False):
            state = self._start(tokens, masks)
            data = self._data(state, source, masks)
            state = self.dropout(state)
            for index in range(self.num_steps):
                step = self._step(index)
                if with_energy:
                    before.append(step.energy(state, data, masks))
                state, attention = step(
                    state, data, masks, self.step, self.feedforward_step, self.activation
                )
                if with_energy:
                    after.append(step.energy(state, data, masks))
        out = layout.leave(masks.clear(state).to(x.dtype))
        if not return_report:
            return out
        report = BlockReport(
            energy_before=torch.stack(before) if with_energy else None,
            energy_after=torch.stack(after) if with_energy else None,
            couplings=attention,
        )
        return out, report

    def _step(self, index: int) -> DescentStep:
        step = self.steps[0 if self.tied else index]
        assert isinstance(step, DescentStep)
        return step

    def _start(self, tokens: Tensor, masks: Masks) -> Tensor:
        """The state the descent starts from, in at least float32."""
        parameter = self._step(0).generator
        tokens = masks.clear(tokens).to(parameter.dtype)
        if self.norm is not None:
            tokens = masks.clear(self.norm(tokens))
        return tokens.to(torch.promote_types(parameter.dtype, torch.float32))

    def _data(self, state: Tensor, source: Tensor | None, masks: Masks) -> Tensor | None:
        """X of the data term."""
        if self.data_term is None:
            return None
        if self.data_term == "input" or source is None:
            return state
        tokens, _ = to_batch(source, self.d_model, self.batch_first, self._step(0).generator)
        return self._start(tokens, masks)

    def extra_repr(self) -> str:
        """The options that the children do not show."""
        return (
            f"nhead={self.nhead}, data_term={self.data_term!r}, step={self.step}, "
            f"activation={self.activation!r}, tied={self.tied}, steps={self.num_steps}"
        )


def _graph(masks: Masks) -> Tensor | None:
    """The bonds of the masks over pairs; those of absent tokens are left to the energy."""
    if masks.bias is None:
        return None if masks.blocked is None else ~masks.blocked
    bonds = masks.bias.exp()
    return bonds if masks.blocked is None else bonds.masked_fill(masks.blocked, 0.0)
