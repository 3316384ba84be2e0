r"""Rank collapse of stacks of spin systems and of energy steps, with a field of any strength.

A layer poses a spin system: couplings are computed from its tokens :math:`x_i`, the field is
:math:`h_i = s\,x_i`, and the magnetizations are the next layer's tokens. Every approximation solves
equations of the form :math:`t_i m_i = h_i + \sum_j J_{ij} m_j`, with its own :math:`t`. Near
collapse tokens are nearly equal, so are all :math:`t_i`, and the rows of J sum to g: along the
common vector :math:`(t - g) m = s R`, and a deviation with eigenvalue :math:`g \lambda` of J has
:math:`(t - g\lambda)\,\delta m = s\,\delta x`. The relative residual shrinks by

.. math:: q = \frac{t - g}{t - g\lambda} = \frac{s R}{s R + (1 - \lambda)\, g m} .

It is positive as long as s is: with a field, collapse is exponential and no faster. Energy steps
with a data term have the same form, with :math:`m = R` and :math:`g = 1`.

**Lengths.** Deviations along the common vector are stiffer, so that the largest factor is q: unless
the rows of J sum to different numbers. Those of :math:`g (A + A^\top) / 2` do, as columns of a
softmax know their keys. To first order, with the layer norm's Jacobian L, its output n, and bars on
what belongs to the common vector,

.. math:: \frac{\delta r_i}{g} = \frac{1 - (N - 1)^{-2}}{2}\, u_i, \qquad
          u_i = \frac{(W_Q \bar n) \cdot (W_K L\, \delta x_i)}{\sqrt D} .

Let head h of token i be longer than the others by a share :math:`\varepsilon_{ih}`. One layer makes
it :math:`a\, \varepsilon_{ih} + b\, u_{ih}`, where a and b are responses of lengths to those of the
fields and to row sums. In mean field, with :math:`\tau` the inverse slope of the response,
:math:`a = s R / ((\tau - g \lambda)\, m)` and :math:`b = (g / 2) (1 - (N - 1)^{-2}) / (\tau - g
\lambda)`. L is blind to what is common to the heads: H - 1 modes are left, none with one head. As
projections are drawn (Xavier), u is Gaussian with a variance of :math:`|\varepsilon_i|^2 / H` in
every direction, so that over many layers the residual falls, a layer, by

.. math:: \exp \mathrm E \log |a\, e + b\, z / \sqrt H|, \qquad e \text{ a unit vector},\;
          z \text{ Gaussian in } H - 1 \text{ dimensions},

or by q, whichever is larger. It needs no field: without one, ``a = 0``, b stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import spinformer as sf
from simulations.residuals import Curve, measured
from spinformer.descent import PairwiseEnergy
from spinformer.nn import EnergyDescentBlock, FreeEnergyBlock
from spinformer.nn.masks import Masks

__all__ = [
    "KINDS",
    "SOURCES",
    "Case",
    "Stack",
    "cases",
    "magnetization",
    "prediction",
    "run",
    "solver",
    "split",
    "typical_growth",
]

KINDS = {
    "mean_field": "mean field, softmax J",
    "mean_field_symmetric": "mean field, symmetric J",
    "tap": "TAP, symmetric J",
    "steepest_descent": "steepest descent, symmetric J",
    "energy_descent": "energy descent",
}
# Where the field comes from: the layer before, as a skip connection has it, or the network's input.
SOURCES = ("layer", "network")

# Approximation and couplings of the spin systems.
_SYSTEMS = {
    "mean_field": ("mean_field", "softmax"),
    "mean_field_symmetric": ("mean_field", "symmetric"),
    "tap": ("tap", "symmetric"),
    "steepest_descent": ("steepest_descent", "symmetric"),
}


def solver(approximation: type) -> Any:
    """An approximation that goes on to the last digits: collapse is seen below the first ones."""
    if approximation is sf.SteepestDescent:
        return sf.SteepestDescent(on_failure="ignore")
    return approximation("anderson", tolerance=1e-11, max_iterations=500, on_failure="ignore")


def magnetization(approximation: Any, system: sf.SpinSystem, start: Tensor) -> tuple[Tensor, float]:
    """The solution that is found from ``start``, and the share of the systems that have one.

    Steepest descent has one minimum, wherever it starts.
    """
    if isinstance(approximation, sf.SteepestDescent):
        answer = approximation.solve(system)
    else:
        answer = approximation.solve(system, start)
    return answer.magnetization, float(answer.converged.double().mean())


@dataclass(frozen=True)
class Case:
    """One curve to measure.

    Attributes:
        kind: of :data:`KINDS`.
        strength: g, the row sums of J; at beta = 1 spins order by themselves above 1. Energy steps
            have none: 1.
        field: s.
        source: of :data:`SOURCES`.
        one_step: not the equilibrium: the response to the tokens before, once,
            m = phi(beta (h + J x)).
    """

    kind: str
    strength: float
    field: float
    source: str = "layer"
    one_step: bool = False

    @property
    def label(self) -> str:
        """What a table calls it."""
        step = ", one step" if self.one_step else ""
        return KINDS[self.kind] + step


@dataclass(frozen=True)
class Stack:
    """The size of the stacks: channels, heads and layers, each with parameters of its own."""

    d_model: int
    nhead: int
    layers: int
    seed: int


def cases(
    strengths: tuple[float, ...], fields: tuple[float, ...], network: tuple[float, ...]
) -> list[Case]:
    """All of the study, in order.

    Args:
        strengths: row sums g.
        fields: s where the field is made of the layer before.
        network: s where it is made of the network's input.
    """
    found = []
    for kind in KINDS:
        for strength in strengths if kind != "energy_descent" else (1.0,):
            found += [Case(kind, strength, s) for s in fields]
            found += [Case(kind, strength, s, "network") for s in network]
            if kind == "mean_field":
                found.append(Case(kind, strength, 0.0, one_step=True))
    return found


def run(case: Case, tokens: Tensor, stack: Stack) -> Curve:
    """Residuals by layer.

    Args:
        case: what to do.
        tokens: (texts, N, d_model), float64. The channels of every head are scaled to a mean square
            of 1, and again after every layer: relative residuals don't notice, and s is the ratio
            of field to coupling at every depth.
        stack: its size.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(stack.seed)
        if case.kind == "energy_descent":
            states = _descend(case, unit(tokens, stack.nhead), stack)
        else:
            states = _respond(case, unit(tokens, stack.nhead), stack)
        return measured(states, stack.layers)


def unit(x: Tensor, nhead: int) -> Tensor:
    """Tokens (..., N, d) with a mean square of 1 in the channels of every head; zero stays zero."""
    heads = x.unflatten(-1, (nhead, -1))
    size = heads.square().mean((-3, -1), keepdim=True).sqrt()
    return (heads / torch.where(size > 0, size, 1.0)).flatten(-2)


def _respond(case: Case, x: Tensor, stack: Stack) -> Iterator[tuple[Tensor, float]]:
    """The tokens before the first layer and after each, and the share of systems solved."""
    approximation, couplings = _SYSTEMS[case.kind]
    given = x
    yield x, 1.0
    for _ in range(stack.layers):
        block = FreeEnergyBlock(
            stack.d_model,
            stack.nhead,
            approximation,  # type: ignore[arg-type]
            couplings,  # type: ignore[arg-type]
            dtype=x.dtype,
        )
        attention: Any = block.self_attn
        torch.nn.init.constant_(attention.strength, case.strength)
        assert block.norm1 is not None
        state = split(x, stack.nhead)
        field = case.field * (state if case.source == "layer" else split(given, stack.nhead))
        system = sf.SpinSystem(attention(block.norm1(x), Masks()), field, site=block.site)
        if case.one_step:
            m, solved = system.site.mean(system.force(state)), 1.0
        else:
            # From what the tokens before would be alone: where there is no field, an ordered state
            # is found from there, not the unstable m = 0.
            start = system.site.mean(state)
            m, solved = magnetization(solver(type(block.approximation)), system, start)
        m = torch.where(m.abs().amax((-2, -1), keepdim=True) < 1e-9, 0.0, m)
        x = unit(m.transpose(-3, -2).flatten(-2), stack.nhead)
        yield x, solved


def split(x: Tensor, nhead: int) -> Tensor:
    """Tokens (..., N, d) as the fields of systems (..., H, N, d / H)."""
    return x.unflatten(-1, (nhead, -1)).transpose(-3, -2)


def _descend(case: Case, x: Tensor, stack: Stack) -> Iterator[tuple[Tensor, float]]:
    given, n = x, x.shape[-2]
    yield x, 1.0
    for _ in range(stack.layers):
        block = EnergyDescentBlock(stack.d_model, stack.nhead, dtype=x.dtype)
        first: Any = block.steps[0]
        weights = first.pairwise(x.dtype).weights
        # A collapsed state has degrees of N: the pull of the data is then s times that of the
        # others, as for spins.
        scale = float(weights.square().sum() / stack.d_model)
        energy = PairwiseEnergy(
            weights=weights,
            data_weight=2 * n * scale * case.field,
            data=x if case.source == "layer" else given,
            orthonormal=True,
        )
        x = energy.step(x)
        yield x, 1.0


def prediction(case: Case, n: int, head_dim: int, nhead: int) -> float | None:
    """The factor of the relative residual in one layer near collapse; None where m = 0.

    q, or that of lengths if it is larger: the module's first lines. The responses are those of the
    approximation itself, for N spins that are all alike or nearly so. With the field from the
    network's input, q times its residual is where the residual stays.

    Args:
        case: what is done.
        n: tokens.
        head_dim, nhead: components of a spin, and heads.
    """
    s, g = case.field, case.strength
    if case.kind == "energy_descent":
        return s / (1 + s)
    if case.one_step:
        return 1 / (n - 1)
    approximation, couplings = _SYSTEMS[case.kind]
    radius = math.sqrt(head_dim)
    block = FreeEnergyBlock(head_dim, 1, approximation, "symmetric")  # type: ignore[arg-type]
    alike = torch.ones(n, head_dim, dtype=torch.float64)
    uniform = torch.full((n, n), g / (n - 1), dtype=torch.float64).fill_diagonal_(0.0)
    # Of two spins: the field of one is longer and that of the other shorter; then their row sums.
    small = 1e-4
    shares = torch.zeros(n, 1, dtype=torch.float64)
    shares[:2, 0] = torch.tensor([small, -small])
    uneven = uniform * (1 + (shares + shares.mT) / 2 * n / (n - 1))
    system = sf.SpinSystem(
        torch.stack([uniform, uniform, uneven]),
        s * torch.stack([alike, alike * (1 + shares), alike]),
        site=block.site,
    )
    start = block.site.mean(alike).repeat(3, 1, 1)
    lengths = magnetization(solver(type(block.approximation)), system, start)[0].norm(dim=-1)
    m = float(lengths[0, 0])
    if m < 1e-9:
        return None
    q = s * radius / (s * radius + (1 + 1 / (n - 1)) * g * m)
    if couplings == "softmax" or case.source == "network" or nhead == 1:
        return q
    _, a, b = ((lengths[:, 0] - lengths[:, 1]) / (2 * small * m)).tolist()
    return max(q, typical_growth(a, b / math.sqrt(nhead), nhead - 1))


def typical_growth(mean: float, spread: float, dimensions: int) -> float:
    """``exp E log |mean e + spread z|``, with e a unit vector and z a standard Gaussian vector.

    The square in units of the spread is a non-central chi-square: a Poisson mixture of central
    ones, whose logarithms have a mean of ``log 2 + digamma(dimensions / 2 + j)``.
    """
    rate = (mean / spread) ** 2 / 2
    j = torch.arange(int(rate + 12 * math.sqrt(rate) + 60), dtype=torch.float64)
    weights = (torch.xlogy(j, torch.tensor(rate)) - rate - torch.lgamma(j + 1)).exp()
    log_square = math.log(2) + float((weights * torch.digamma(dimensions / 2 + j)).sum())
    return spread * math.exp(log_square / 2)
