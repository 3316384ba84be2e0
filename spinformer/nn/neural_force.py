r"""Forces with a neural network in them: a learned Onsager term, and token mixing by an MLP.

.. math::
    m_i = \phi\Big(\beta\big(h_i + \sum_j J_{ij} m_j - f(m_i)\big)\Big)
    \qquad\text{or}\qquad
    m_i = \phi\Big(\beta\big(h_i + g_i(m_1, \dots, m_N) - f(m_i)\big)\Big)

f acts on every spin by itself, in the place of the reaction of TAP, by which a spin does not feel
its own echo; g acts across the spins, channel by channel: an MLP-Mixer that is solved to its fixed
point. Neither is the gradient of an energy, so there is a steady state and no free energy.

Source: Bal, *Deep implicit attention* (2021); Tolstikhin et al., *MLP-Mixer* (2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spinformer.nn.layers import ACTIVATIONS
from spinformer.nn.masks import Masks
from spinformer.nn.matrix_valued import check_fixed_length
from spinformer.solve.fixed_point import FixedPoint
from spinformer.solve.solution import Solution
from spinformer.spins.couplings import Couplings
from spinformer.spins.couplings.checks import check_count
from spinformer.spins.couplings.entries import clear
from spinformer.spins.site import SiteLaw

__all__ = ["Mixing", "NeuralForce", "NeuralSystem", "Reaction", "SteadyState", "TokenMixer"]


class _TwoMaps(nn.Module):
    """Parameters of an MLP with one hidden layer for each of several spin systems.

    The function itself takes them as arguments: an implicit solve needs all that it depends on
    among its inputs.
    """

    def __init__(
        self,
        systems: int,
        width: int,
        hidden: int,
        norm: float,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._norm = norm

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight1 = empty(systems, hidden, width)
        self.weight2 = empty(systems, width, hidden)
        self.bias1 = empty(systems, hidden) if bias else None
        self.bias2 = empty(systems, width) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gaussian matrices of a spectral norm near the one asked for, zero biases."""
        hidden, width = self.weight1.shape[-2:]
        for weight in (self.weight1, self.weight2):
            # The norm of an m x n matrix of unit variance is sqrt(m) + sqrt(n).
            nn.init.normal_(weight, std=self._norm / (math.sqrt(hidden) + math.sqrt(width)))
        for bias in (self.bias1, self.bias2):
            if bias is not None:
                nn.init.zeros_(bias)

    def _given(self) -> tuple[Tensor, ...]:
        biases = () if self.bias1 is None or self.bias2 is None else (self.bias1, self.bias2)
        return (self.weight1, self.weight2, *biases)


class TokenMixer(_TwoMaps):
    r"""The MLP across N tokens of a head, the same for all its channels:
    :math:`g(m) = W_2\,a(W_1 m + b_1) + b_2` with m as a matrix (N, D).

    Its slope is below 0.6 at first, so that the fixed point contracts at the block's beta = 1.

    Args:
        num_spins: number of tokens N that the block serves.
        nhead: number of heads, each with maps of its own.
        hidden: width between the maps.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        dropout: probability, in training, that an entry of W_2 is dropped; one mask a solve.
        bias, batch_first, device, dtype: as elsewhere.
    """

    def __init__(
        self,
        num_spins: int,
        nhead: int,
        hidden: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("num_spins", num_spins, 1)
        check_count("dim_mixer", hidden, 1)
        # The largest slope of GELU is 1.13: 1.13 / 2 for two maps of norm sqrt(1/2).
        super().__init__(nhead, num_spins, hidden, math.sqrt(0.5), bias, device, dtype)
        self.num_spins, self.activation, self.dropout = num_spins, activation, dropout
        self.batch_first = batch_first

    def forward(self, tokens: Tensor, masks: Masks) -> Mixing:
        """The map of all systems; the tokens only give their number.

        Raises:
            ValueError: another number of tokens, or a mask over pairs.
        """
        check_fixed_length("mixer", tokens, self.num_spins, masks)
        if masks.blocked is not None:
            raise ValueError(
                "couplings='mixer' have no pairs that a mask over pairs (src_mask, is_causal) "
                "could block: use another kind of couplings, or src_key_padding_mask alone"
            )
        weight1, weight2, *biases = self._given()
        weight2 = F.dropout(weight2, self.dropout, self.training)
        return Mixing((weight1, weight2, *biases), self.activation)

    def extra_repr(self) -> str:
        """Sizes and activation."""
        nhead, hidden, _ = self.weight1.shape
        return (
            f"num_spins={self.num_spins}, nhead={nhead}, hidden={hidden}, "
            f"activation={self.activation!r}"
        )


class Mixing:
    """g of one forward pass, called as couplings are."""

    def __init__(self, tensors: tuple[Tensor, ...], activation: str) -> None:
        self._tensors, self._activation = tensors, activation

    def tensors(self) -> tuple[Tensor, ...]:
        """W_1 (H, hidden, N), W_2 (H, N, hidden), and the biases where there are."""
        return self._tensors

    def with_tensors(self, *tensors: Tensor) -> Mixing:
        """The same map with other tensors."""
        return Mixing(tensors, self._activation)

    def apply(self, state: Tensor) -> Tensor:
        """(..., H, N, D) to the same shape."""
        weight1, weight2, *biases = self._tensors
        hidden = weight1 @ state
        if biases:
            hidden = hidden + biases[0].unsqueeze(-1)
        out = weight2 @ ACTIVATIONS[self._activation](hidden)
        return out + biases[1].unsqueeze(-1) if biases else out


class Reaction(_TwoMaps):
    r"""The MLP on every spin by itself that stands for the Onsager term,
    :math:`f(m_i) = W_2\,a(W_1 m_i + b_1) + b_2`.

    Its slope is below 0.3 at first: it weakens no contraction much.

    Args:
        dim: channels D of a head.
        nhead: number of heads, each with maps of its own.
        hidden: width between the maps.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        bias, device, dtype: as elsewhere.
    """

    def __init__(
        self,
        dim: int,
        nhead: int,
        hidden: int,
        activation: str = "gelu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("dim_correction", hidden, 1)
        super().__init__(nhead, dim, hidden, 0.5, bias, device, dtype)
        self.activation = activation

    def tensors(self) -> tuple[Tensor, ...]:
        """W_1 (H, hidden, D), W_2 (H, D, hidden), and the biases where there are."""
        return self._given()

    def forward(self, state: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        """f of (..., H, N, D), or of (..., N, D) for one head, with explicit parameters."""
        weight1, weight2, *biases = tensors
        hidden = state @ weight1.mT
        if biases:
            hidden = hidden + biases[0].unsqueeze(-2)
        out = ACTIVATIONS[self.activation](hidden) @ weight2.mT
        return out + biases[1].unsqueeze(-2) if biases else out

    def extra_repr(self) -> str:
        """Sizes and activation."""
        nhead, hidden, dim = self.weight1.shape
        return f"dim={dim}, nhead={nhead}, hidden={hidden}, activation={self.activation!r}"


class NeuralForce:
    """Couplings, or a :class:`Mixing`, minus a reaction; absent spins neither give nor receive.

    Args:
        inner: what mixes the spins.
        reaction: f, or None for none.
        absent: bool, broadcastable to (..., N), or None.
        tensors: the parameters of f in the working dtype.
    """

    # Not the gradient of anything: no free energy, whatever the couplings inside are.
    is_symmetric = False

    def __init__(
        self,
        inner: Couplings | Mixing,
        reaction: Reaction | None,
        absent: Tensor | None,
        tensors: tuple[Tensor, ...],
    ) -> None:
        self._inner, self._reaction, self.absent = inner, reaction, absent
        self._tensors = tensors

    @classmethod
    def of(
        cls,
        inner: Couplings | Mixing,
        reaction: Reaction | None,
        absent: Tensor | None,
        dtype: torch.dtype,
    ) -> NeuralForce:
        """The force with the parameters of ``reaction`` as they are, in the dtype of the solve."""
        given = () if reaction is None else reaction.tensors()
        return cls(inner, reaction, absent, tuple(tensor.to(dtype) for tensor in given))

    def tensors(self) -> tuple[Tensor, ...]:
        """Those of the inner map, then those of f."""
        return (*self._inner.tensors(), *self._tensors)

    def with_tensors(self, *tensors: Tensor) -> NeuralForce:
        """The same force made of other tensors."""
        own = len(self._inner.tensors())
        inner = self._inner.with_tensors(*tensors[:own])
        return NeuralForce(inner, self._reaction, self.absent, tensors[own:])

    def apply(self, state: Tensor) -> Tensor:
        """The force of the spins (..., N, D) on each other and on themselves."""
        state = clear(state, self.absent)
        force = self._inner.apply(state)
        if self._reaction is not None:
            force = force - self._reaction(state, self._tensors)
        return clear(force, self.absent)


class NeuralSystem:
    """Spins in fields under a :class:`NeuralForce`; what a spin system is where there is an energy.

    Args:
        couplings: the force.
        field: (..., N, D); what it holds at absent sites is ignored.
        beta: inverse temperature, broadcastable to (...).
        site: the law of one spin.
    """

    def __init__(self, couplings: NeuralForce, field: Tensor, beta: Tensor, site: SiteLaw) -> None:
        self.couplings, self.site = couplings, site
        self.field = clear(field, couplings.absent)
        self.beta = beta.expand(field.shape[:-2])

    def force(self, m: Tensor) -> Tensor:
        """Field and force of the spins together, (..., N, D)."""
        return self.field + self.couplings.apply(m)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """All that :meth:`step` depends on, in its order."""
        return (self.field, self.beta[..., None, None], *self.couplings.tensors())

    def step(self, m: Tensor, field: Tensor, beta: Tensor, *tensors: Tensor) -> Tensor:
        """The map whose fixed point is the steady state."""
        force = self.couplings.with_tensors(*tensors).apply(m)
        return self.site.mean(beta * (field + force))

    def solve(self, initial: Tensor | None, options: FixedPoint) -> SteadyState:
        """The fixed point, with its implicit derivative."""
        if initial is None:
            initial = self.site.mean(self.beta[..., None, None] * self.field)
        initial = clear(initial, self.couplings.absent)
        solution = options.solve(self.step, initial, self.inputs, scale=self.site.scale)
        return SteadyState(solution)


@dataclass(frozen=True)
class SteadyState:
    """The solution of a :class:`NeuralSystem`."""

    solution: Solution

    @property
    def magnetization(self) -> Tensor:
        """(..., N, D)."""
        return self.solution.value
