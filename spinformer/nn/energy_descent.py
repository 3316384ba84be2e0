"""A Transformer block that descends an explicit energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spinformer.descent.activation import Activation, as_activation
from spinformer.descent.algorithms import (
    AIM,
    Algorithm,
    Backtracking,
    Gradient,
    MajorizeMinimize,
    ProximalAIM,
    terms_of,
)
from spinformer.descent.constrained import ProximalBacktracking, ProximalGradient, SphereStep
from spinformer.descent.energy import Energy, SumEnergy, clear
from spinformer.descent.feed_forward import FeedForwardEnergy, MemoryEnergy
from spinformer.descent.pairwise import PairwiseEnergy
from spinformer.descent.proximal import PROXES, Proximal, as_prox
from spinformer.descent.rho import Rho, as_rho
from spinformer.errors import check_choice, strict_options
from spinformer.nn.descent_block import (
    DescentBlock,
    Move,
    Problem,
    cayley,
    check_data_term,
    check_size,
    graph_of,
)
from spinformer.nn.masks import Masks

__all__ = ["AttentionThenRest", "EnergyDescentBlock"]

ALGORITHMS = ("aim", "aim_gradient", "majorize_minimize", "gradient", "backtracking")
NORMALIZERS = ("softmax_beta", "sphere")
HEADS = ("orthonormal", "free")
FEED_FORWARD = ("linear", "memory", "network")


class DescentStep(nn.Module):
    """The parameters of one step, and the energies that are made of them.

    Orthonormal heads are ``W_h = s_h Q_h`` with ``[Q_1 ... Q_H]`` orthogonal, so that they decouple
    and each is a full attention step (:class:`PairwiseEnergy`). Q is the Cayley transform of a free
    matrix: O(d_model^3), once for a whole batch. Free heads are any matrices.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        rho: Rho,
        heads: str,
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
        self.generator: nn.Parameter | None = None
        self.log_scale: nn.Parameter | None = None
        self.heads: nn.Parameter | None = None
        if heads == "orthonormal":
            self.generator = nn.Parameter(torch.empty(d_model, d_model, **options))
            self.log_scale = nn.Parameter(torch.empty(nhead, **options))
        else:
            self.heads = nn.Parameter(torch.empty(nhead, d_model, self.head_dim, **options))
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
        # Two normalized tokens differ by O(1) a channel: the exponent is then of the size of a
        # Transformer's logits q . k / sqrt(d_h), and a token hears itself more than others.
        scale = self.head_dim**-0.25
        if self.generator is not None and self.log_scale is not None:
            nn.init.normal_(self.generator, std=0.5 / self.generator.shape[0] ** 0.5)
            nn.init.constant_(self.log_scale, math.log(scale))
        if self.heads is not None:
            # Their columns have the norms of orthonormal heads, on average.
            nn.init.normal_(self.heads, std=scale / self.heads.shape[1] ** 0.5)
        if self.log_data_weight is not None and self._initial_data_weight is not None:
            nn.init.constant_(self.log_data_weight, math.log(self._initial_data_weight))
        if self.weight is not None and self.bias is not None:
            rows, d_model = self.weight.shape
            # |W| is then below 1: the energies of memory and network are bounded below.
            std = {"linear": d_model**-0.5, "memory": (2 * rows) ** -0.5}.get(
                str(self.feedforward), 0.5 * (rows + d_model) ** -0.5
            )
            nn.init.normal_(self.weight, std=std)
            nn.init.zeros_(self.bias)
        if self.offset is not None:
            nn.init.zeros_(self.offset)

    def pairwise(
        self, dtype: torch.dtype, data: Tensor | None = None, graph: Tensor | None = None
    ) -> PairwiseEnergy:
        """The energy of the attention step, with its data and its bonds."""
        if self.generator is not None and self.log_scale is not None:
            weights = cayley(self.generator.to(dtype), self.nhead)
            weights = weights * self.log_scale.to(dtype).exp()[:, None, None]
        else:
            assert self.heads is not None
            weights = self.heads.to(dtype)
        data_weight: float | Tensor = 0.0
        if self.log_data_weight is not None:
            data_weight = self.log_data_weight.to(dtype).exp()
        return PairwiseEnergy(
            self.rho,
            weights,
            data_weight=data_weight,
            data=data,
            graph=graph,
            orthonormal=self.heads is None,
        )

    def position_wise(self, dtype: torch.dtype) -> FeedForwardEnergy | MemoryEnergy | None:
        """The energy of the feed-forward step; None without one."""
        if self.weight is None or self.bias is None:
            return None
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        if self.offset is not None:
            return MemoryEnergy(weight, self.offset.to(dtype), bias)
        # The conjugate of an activation is |z|^2 / 2 and the penalty that its proximal map is of:
        # what is left of a network's energy is that of a linear layer.
        if self.feedforward == "network":
            weight = -weight.mT @ weight
        return FeedForwardEnergy(weight, bias)

    def energy(self, dtype: torch.dtype, data: Tensor | None, graph: Tensor | None) -> SumEnergy:
        """All that the step descends but the penalty of the activation, attention first."""
        pairwise, position_wise = self.pairwise(dtype, data, graph), self.position_wise(dtype)
        return SumEnergy(pairwise) if position_wise is None else pairwise + position_wise


@dataclass(frozen=True)
class AttentionThenRest(Algorithm):
    """The energies' own steps in turn: a Transformer layer (AIM with preconditioned steps).

    Attributes:
        size: of the attention step.
        rest: of the other terms' steps, and of the proximal map.
        sphere: the attention step is the energy's
            :meth:`~spinformer.descent.energy.Energy.sphere_step`.
        prox: what closes the step; None for nothing.
    """

    size: float
    rest: float
    sphere: bool = False
    prox: Proximal | None = None

    @property
    def penalty(self) -> Proximal | None:
        return self.prox

    def step(self, energy: Energy, Y: Tensor, mask: Tensor | None = None) -> Tensor:
        first, *others = terms_of(energy)
        attend = first.sphere_step if self.sphere else first.step
        state = attend(Y, size=self.size, mask=mask)
        for term in others:
            state = term.step(state, self.rest, mask)
        return state if self.prox is None else clear(self.prox(state, self.rest), mask)

    def guaranteed(self, energy: Energy, count: int) -> Tensor:
        first, *others = terms_of(energy)
        if others or self.prox is not None:
            return torch.tensor(False)
        bound = first.step_bound()
        return torch.as_tensor(self.size <= (bound / 2 if self.sphere else bound))


@strict_options
class EnergyDescentBlock(DescentBlock):
    r"""A layer whose forward pass is steps down an explicit energy.

    The **variable** of the descent is ``Y``, which starts at ``Y_0 = norm(x)`` and which the block
    returns after its last step: the skip connection is inside the step. The energy is

    .. math::
        E(Y) = \sum_h \sum_{ij} \rho(|(y_i - y_j) W_h|^2 / 2)
               + \frac{\lambda}{2} |Y - X|^2 + E_f(Y) + \eta(Y)

    with :math:`\eta` the penalty whose proximal map is the activation (ReLU: the constraint
    ``Y >= 0``). A step of ``algorithm="aim"`` descends its parts alternately (Algorithms 1 and 2 of
    Yang, Huang & Wipf 2022, with each part's own step):

    1. attention, ``size`` a: ``Y W_h <- (1 - a) Y W_h + a D_h^-1 W^(h) Y W_h``, for ``rho="exp"``
       the softmax re-weighted by ``exp(-|y_j|^2 / 2)``; with the data term
       ``(2 s^2 D_h + lambda)^-1 (2 s^2 W^(h) Y + lambda X)``. A token hears itself;
    2. feed-forward: a gradient step of E_f;
    3. the activation: the proximal map of ``feedforward_step`` times the penalty.

    **What is guaranteed.**

    ===================== ==================================== =================================
    algorithm             one step                             cannot raise
    ===================== ==================================== =================================
    ``aim``               the parts' own steps in turn         each part its own (below)
    ``aim_gradient``      gradient steps of the parts in turn  E where Theorems 4.1, 5.1 hold
    ``majorize_minimize`` one step of the sum, all curvatures  E for ``step <= 2``
    ``gradient``          ``Y - step grad E``                  E for ``step <= 2 / L``
    ``backtracking``      as ``majorize_minimize``, shortened  E
    ===================== ==================================== =================================

    Of ``aim``, without a mask over pairs, part 1 never raises the pairwise and data energy for
    ``step <= 2``: the kernels are positive semi-definite, and the heads decouple, or share one
    diagonal. On a symmetric graph, and with a rho of one's own that is not completely monotone, it
    is ``step <= 1``. Part 2 alone never raises ``E_f`` with ``"memory"``
    and ``"network"``, and with ``"linear"`` while ``feedforward_step`` is below 2 over the largest
    eigenvalue of ``1 + (W_f + W_f^T) / 2``. Part 3 alone never raises :math:`\eta`. Their sum may
    rise, since each is blind to the others: the report and :meth:`monitor` show it.
    ``majorize_minimize`` pays for its guarantee with shorter steps: one diagonal for all heads and
    the feed-forward part, on graphs half of it. L bounds the Hessian of the smooth part, plus m
    where the penalty curves down to -m (``"monotone_gelu"``). Between blocks, ``norm`` moves the
    state to another energy; a stack with ``norm=None`` and ``tied=True`` is one long descent.

    A causal mask has steps, of ``aim``, and no energy; the other algorithms refuse it.

    Norm and activation are what makes the block train. Attention and a symmetric linear map are
    both averages; ReLU is the only position-wise nonlinearity, hence the default.

    Asymmetric weights have no place here: with queries and keys of their own a step is an ordinary
    Transformer's, which descends nothing, or the energy has a second half, which
    :class:`EnergyTransformerBlock` keeps. :class:`spinformer.descent.AsymmetricAttention` takes
    such a step apart.

    Cost: O(B N d_model (N + d_model) + d_model^3) a step; memory O(B nhead N^2).

    Args:
        d_model: width of the token stream.
        nhead: number of heads, a divisor of ``d_model``.
        rho: ``"exp"``, ``"log1p"``, ``"log2p"``, or a :class:`spinformer.descent.Rho`, one's own by
            ``Rho.from_value``.
        data_term: X of the data term: ``"input"``, the state the block starts from; ``"network"``,
            the normalized input of the stack, which :class:`Encoder` hands on as ``source`` (alone,
            and in other containers, it is the block's input); ``"zero"``, the regularizer
            :math:`\lambda |Y|^2 / 2`; None for no data term.
        step: size a of the attention step, or of the whole one, in (0, 2].
        feedforward: True or ``"linear"``: ``tr(Y W_f Y^T) / 2 + |Y|^2 / 2``, a symmetric linear
            layer; ``"memory"``: a two-layer network with one matrix,
            :class:`spinformer.descent.MemoryEnergy`; ``"network"``:
            :class:`spinformer.descent.NetworkEnergy` with the channels of ``Y`` as its hidden units
            and the activation as its own, ``y <- sigma(W W^T y + b)`` at ``feedforward_step=1``,
            whose outputs ``W^T y`` (``dim_feedforward`` of them) are not a state of the block;
            False for none.
        activation: whose penalty is part of the energy: a name of
            :data:`spinformer.descent.PROXES` (``"relu"``, ``"soft_threshold"``,
            ``"monotone_gelu"``, ...), an :class:`~spinformer.descent.activation.Activation`, a
            :class:`spinformer.descent.Proximal`, or None. It acts as a proximal map, at size 1 the
            activation itself.
        tied: one set of parameters for all steps, and for all layers of an :class:`Encoder`.
        steps: number of steps, at least 1.
        heads: ``"orthonormal"``, or ``"free"``: any tall matrices, which share one diagonal
            (a single one, square, keeps its own).
        algorithm: see the table.
        normalizer: of the attention step. ``"softmax_beta"``; ``"sphere"``: renormalized, so that
            each head's part of a token keeps its norm (with ``heads="free"`` or
            ``"majorize_minimize"``: each token does), which makes the plain softmax of tokens of
            one norm a descent. For ``step <= 1``; with ``"aim"`` on a graph, or with one's own rho,
            only ``step <= 1 / 2`` is proven.
        dim_feedforward: hidden units of ``"memory"``, outputs of ``"network"``, and only of these;
            None for ``4 * d_model``.
        feedforward_step: size of the feed-forward step and of the proximal map, in (0, 2], of the
            two ``aim`` algorithms, and only of these; None for 0.5.
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
        data_term: Literal["input", "network", "zero"] | None = "input",
        step: float = 1.0,
        feedforward: bool | Literal["linear", "memory", "network"] = True,
        activation: str | Activation | Proximal | None = "relu",
        tied: bool = False,
        *,
        steps: int = 1,
        heads: Literal["orthonormal", "free"] = "orthonormal",
        algorithm: Literal[
            "aim", "aim_gradient", "majorize_minimize", "gradient", "backtracking"
        ] = "aim",
        normalizer: Literal["softmax_beta", "sphere"] = "softmax_beta",
        dim_feedforward: int | None = None,
        feedforward_step: float | None = None,
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
        check_data_term(data_term, ("input", "network", "zero"), data_weight)
        kind = _feedforward(feedforward, dim_feedforward)
        self._prox = None if activation is None else _prox(activation)
        if kind == "network" and activation is None:
            raise ValueError(
                "feedforward='network' with activation=None: the network needs one, 'relu' say"
            )
        check_choice("heads", heads, HEADS)
        check_choice("algorithm", algorithm, ALGORITHMS)
        _check_normalizer(normalizer, algorithm, step, activation)
        if algorithm == "aim_gradient" and kind is None:
            raise ValueError(
                "algorithm='aim_gradient' with feedforward=False: there is one part to take a "
                "gradient step of. Use algorithm='gradient'"
            )
        if feedforward_step is not None and not algorithm.startswith("aim"):
            raise ValueError(
                f"feedforward_step={feedforward_step!r} with algorithm={algorithm!r}: its one step "
                "has the size step; only 'aim' and 'aim_gradient' take parts in turn"
            )
        self.step = check_size("step", step)
        self.feedforward_step = check_size(
            "feedforward_step", 0.5 if feedforward_step is None else feedforward_step
        )
        self.activation, self.algorithm, self.normalizer = activation, algorithm, normalizer
        self.steps = nn.ModuleList(
            DescentStep(
                d_model,
                nhead,
                as_rho(rho),
                heads,
                None if data_term is None else data_weight,
                kind,
                4 * d_model if dim_feedforward is None else dim_feedforward,
                device,
                dtype,
            )
            for _ in range(1 if tied else steps)
        )

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        if self.norm is not None:
            self.norm.reset_parameters()
        for index in range(len(self.steps)):
            self._step(index).reset_parameters()

    @property
    def _algorithm(self) -> Algorithm:
        size, rest, prox = self.step, self.feedforward_step, self._prox
        sphere = self.normalizer == "sphere"
        if self.algorithm == "aim":
            return AttentionThenRest(size, rest, sphere, prox)
        if self.algorithm == "aim_gradient":
            return AIM((size, rest)) if prox is None else ProximalAIM((size, rest), prox)
        if self.algorithm == "majorize_minimize":
            if sphere:
                return SphereStep(size)
            return MajorizeMinimize(size) if prox is None else ProximalGradient(prox, size)
        if self.algorithm == "gradient":
            return Gradient(size) if prox is None else ProximalGradient(prox, size, own=False)
        if prox is None:
            # In low precision rounding alone may keep a state from falling.
            return Backtracking(size, on_failure="ignore")
        return ProximalBacktracking(prox, size)

    def _move(self, index: int, problem: Problem) -> Move:
        step, graph = self._step(index), graph_of(problem.masks)
        energy = step.energy(problem.state.dtype, problem.data, graph)

        def evidence(state: Tensor) -> dict[str, Tensor]:
            attention = energy.terms[0]
            assert isinstance(attention, PairwiseEnergy)
            return {"couplings": attention.kernel(state, problem.masks.absent).attention}

        return Move(energy, self._algorithm, evidence)

    def _one_energy(self) -> bool:
        return len(self.steps) == 1

    def _check_masks(self, masks: Masks) -> None:
        if self.algorithm == "aim" or masks.symmetric:
            return
        raise ValueError(
            f"the mask over pairs is not symmetric (a causal mask, say), and "
            f"algorithm={self.algorithm!r} needs an energy: use a symmetric mask, or "
            "algorithm='aim', whose steps need none"
        )

    def _step(self, index: int) -> DescentStep:
        step = self.steps[0 if self.tied else index]
        assert isinstance(step, DescentStep)
        return step

    def extra_repr(self) -> str:
        """The options that the children do not show."""
        return (
            f"nhead={self.nhead}, data_term={self.data_term!r}, step={self.step}, "
            f"activation={self.activation!r}, tied={self.tied}, steps={self.num_steps}, "
            f"algorithm={self.algorithm!r}, normalizer={self.normalizer!r}"
        )


def _prox(activation: str | Activation | Proximal) -> Proximal:
    if not isinstance(activation, str) or activation in PROXES:
        return as_prox(activation)
    return Proximal.from_activation(as_activation(activation))


def _feedforward(feedforward: bool | str, dim_feedforward: int | None) -> str | None:
    """The kind of the position-wise energy; None without one."""
    kind: str | None = None
    if feedforward is True:
        kind = "linear"
    elif feedforward is not False:
        kind = check_choice("feedforward", str(feedforward), FEED_FORWARD)
    wide = kind in ("memory", "network")
    if dim_feedforward is not None and (not wide or dim_feedforward < 1):
        raise ValueError(
            f"dim_feedforward={dim_feedforward!r} with feedforward={feedforward!r}: it is the "
            "number, at least 1, of hidden units of feedforward='memory', or of outputs of "
            "'network'"
        )
    return kind


def _check_normalizer(normalizer: str, algorithm: str, step: float, activation: object) -> None:
    check_choice("normalizer", normalizer, NORMALIZERS)
    if normalizer == "softmax_beta":
        return
    if algorithm not in ("aim", "majorize_minimize"):
        raise ValueError(
            f"normalizer='sphere' with algorithm={algorithm!r}: it is a way to take the attention "
            "step of algorithm='aim', or the step of 'majorize_minimize'"
        )
    check_size("step", step, 1.0)
    if algorithm == "majorize_minimize" and activation is not None:
        raise ValueError(
            f"normalizer='sphere' with activation={activation!r}: the proximal map leaves the "
            "spheres. Use activation=None, or algorithm='aim', which takes them in turn"
        )
