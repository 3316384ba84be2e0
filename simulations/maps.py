r"""What the studies of errors share: systems on a plane, averages over chains, unbiased errors.

The plane. Spins have length R. With :math:`\lambda` the largest eigenvalue of J,

.. math:: K = \beta\lambda R^2/D,\qquad H = \beta h R/D,

h the root mean square of :math:`|h_i|`: K is the coupling in units of that at which mean field
orders without a field, H the field in units of the one that polarizes a free spin.

The errors. Against a truth that is itself an average over chains, the square of a difference is too
large by the variance of that average. Chains are independent, so products of the differences from
*two* of them are not:

.. math:: E^2 = \frac1{C(C-1)}\sum_{a\ne b} (x - y_a)\cdot(x - y_b)

has the expectation :math:`|x - \langle y\rangle|^2`, whatever the noise, and may be negative where
the noise hides the error. Its standard error is a jackknife over chains, which is right where the
error is large and some 1.5 times too large where it is zero (jackknives err on that side: Efron &
Stein 1981, Ann. Stat. 9, 586).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.patches import Patch
from numpy.typing import NDArray
from torch import Tensor

from spinformer import Sphere, SpinSystem
from spinformer.sampling.chains import Chains
from spinformer.sampling.local import HeatBath
from spinformer.spins.couplings import curie_weiss, sherrington_kirkpatrick

__all__ = [
    "FAMILIES",
    "Averages",
    "Errors",
    "Family",
    "coupling_strength",
    "draw_map",
    "field_strength",
    "legend_patches",
    "loop_strength",
    "nearness",
    "relative_errors",
    "squared_distance",
]

Array = NDArray[np.float64]

# An error is shown where it is more than so many of its standard errors.
_SEEN = 2.0
# What a map shows as a colour; beyond, the ends of the scale.
_LOWEST, _HIGHEST = 1e-3, 1.0
# The components of a random query; their products have unit variance.
_QUERY_DIM = 16
# Standard deviation of random attention's logits: a row's largest weights are then a fifth or so.
_SHARPNESS = 1.5
# Products with J until its largest eigenvalue is all that is left.
_POWERS = 200


# --- systems ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A way to draw couplings.

    Attributes:
        label: in titles.
        draw: ``draw(N, generator)``: J (N, N) in float64.
    """

    label: str
    draw: Callable[[int, torch.Generator], Tensor]


def _glass(n: int, generator: torch.Generator) -> Tensor:
    return sherrington_kirkpatrick(n, generator=generator, dtype=torch.float64).to_dense()


def _ferromagnet(n: int, generator: torch.Generator) -> Tensor:
    return curie_weiss(n, dtype=torch.float64).to_dense()


def _softmax(n: int, generator: torch.Generator) -> Tensor:
    query, key = torch.randn(2, n, _QUERY_DIM, generator=generator, dtype=torch.float64)
    logits = query @ key.mT * (_SHARPNESS / math.sqrt(_QUERY_DIM))
    logits.fill_diagonal_(-math.inf)
    return logits.softmax(-1)


def _attention(n: int, generator: torch.Generator) -> Tensor:
    weights = _softmax(n, generator)
    return (weights + weights.mT) / 2


FAMILIES: dict[str, Family] = {
    "glass": Family(r"Gaussian $J_{ij}=J_{ji}$", _glass),
    "attention": Family("symmetric random attention", _attention),
    "ferromagnet": Family("ferromagnet, all to all", _ferromagnet),
    "softmax": Family("random attention, rows sum to one", _softmax),
}


def coupling_strength(system: SpinSystem) -> Tensor:
    """K of every system (...): beta R^2 / D times the largest size of an eigenvalue of J.

    Of symmetric couplings it is the largest eigenvalue itself: a negative one orders nothing.
    """
    radius = system.site.radius
    assert radius is not None  # spins of fixed length
    scale = system.beta * radius**2 / system.dim
    if system.couplings.dim is not None:
        return scale * _growth(system)
    matrix = system.couplings.to_dense()
    if system.couplings.is_symmetric:
        return scale * torch.linalg.eigvalsh(matrix)[..., -1]
    return scale * torch.linalg.eigvals(matrix).abs().amax(-1)


def _growth(system: SpinSystem) -> Tensor:
    """How much J makes of a vector in the long run: the size of its largest eigenvalue (...)."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(system.field.shape, generator=generator, dtype=system.field.dtype)
    logs = []
    for _ in range(_POWERS):
        vector = system.couplings.apply(vector)
        size = vector.square().sum((-2, -1), keepdim=True).sqrt()
        logs.append(size.log()[..., 0, 0])
        vector = vector / size
    # The first half turns the vector; a complex pair makes the rest swing around its mean.
    return torch.stack(logs[_POWERS // 2 :]).mean(0).exp()


def field_strength(system: SpinSystem) -> Tensor:
    """H of every system (...): beta R / D times the root mean square of the fields' lengths."""
    radius = system.site.radius
    assert radius is not None
    square = system.field.square().sum((-2, -1)) / system.num_present
    return system.beta * square.sqrt() * radius / system.dim


def loop_strength(system: SpinSystem, magnetization: Tensor) -> Tensor:
    r"""How much of a spin's force is its own echo, k (...):

    .. math:: k^2 = \frac1N \sum_{ij} \beta^2 J_{ij}^2 c_i c_j,\qquad c_i = (R^2 - |m_i|^2)/D.

    A spin moves its neighbours by :math:`\beta J c_j`, and they move it: what mean field leaves
    out is of the order of k^2. c is the mean variance of a component. Matrix-valued couplings count
    by :math:`\operatorname{tr} J_{ij} J_{ij}^{\mathsf T} / D`.

    Args:
        system: spins of fixed length R.
        magnetization: (..., N, D), of mean field say.
    """
    radius = system.site.radius
    assert radius is not None
    square = system.couplings.to_dense().square()
    if system.couplings.dim is not None:
        square = square.sum((-2, -1)) / system.dim
    response = (radius**2 - magnetization.square().sum(-1)) / system.dim
    if system.mask is not None:
        response = response.masked_fill(system.mask, 0.0)
    total = (response[..., :, None] * square * response[..., None, :]).sum((-2, -1))
    return system.beta * (total / system.num_present).sqrt()


def nearness(system: SpinSystem, magnetization: Tensor) -> Tensor:
    r"""How near mean field is to ordering by itself, (...): 1 where it does.

    The largest real part of an eigenvalue of :math:`\beta c_i J_{ij}`, scalar couplings, with c as
    in :func:`loop_strength`. What disturbs the force is amplified by one over one minus this.
    """
    radius = system.site.radius
    assert radius is not None
    response = (radius**2 - magnetization.square().sum(-1)) / system.dim
    if system.mask is not None:
        response = response.masked_fill(system.mask, 0.0)
    gain = (system.beta[..., None] * response)[..., None] * system.couplings.to_dense()
    return torch.linalg.eigvals(gain).real.amax(-1)


# --- the truth ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How much is sampled.

    Attributes:
        chains: of each system, an even number of at least six.
        sweeps: of each, after warming up.
        warmup: sweeps before.
        every: sweeps between two looks.
    """

    chains: int
    sweeps: int
    warmup: int
    every: int = 1

    @property
    def total(self) -> int:
        """Sweeps of each chain."""
        return self.warmup + self.sweeps


@dataclass(frozen=True)
class Averages:
    """Averages over the time of each chain.

    Attributes:
        magnetization: (C, ..., N, D).
        pairs: (C, ..., N, N): <S_i . S_j>, or <S_i(t+1) . S_j(t)>.
        interaction: (C, ..., T): sum_{i<j} J_ij S_i . S_j at every time, or what has its mean.
    """

    magnetization: Tensor
    pairs: Tensor
    interaction: Tensor

    def connected(self) -> Tensor:
        """Pairs less the product of the means, one for every two chains (C / 2, ..., N, N).

        The mean of one chain times that of another: the product of a mean with itself would hold
        its variance.
        """
        a, b = self.magnetization[0::2], self.magnetization[1::2]
        product = (a @ b.mT + b @ a.mT) / 2
        return (self.pairs[0::2] + self.pairs[1::2]) / 2 - product

    def scatter(self) -> Tensor:
        """Split R-hat of the interaction (...), by which chains that disagree are known."""
        return split_r_hat(self.interaction)


@torch.no_grad()
def sample_equilibrium(
    system: SpinSystem, plan: Sampling, seed: int, moved: Callable[[int], object] | None = None
) -> Averages:
    """Boltzmann averages by heat bath, half of the chains from free spins, half along the fields.

    What is averaged is the mean of a spin in the force of the others, which has the same
    expectation as the spin and less noise. In float32: its rounding is far below the noise.
    """
    system = _single(system)
    chains = Chains.start(system, plan.chains, seed)
    aligned = _along(system)
    chains.spins[1::2] = aligned
    kernel = HeatBath().start(chains)
    gathered = _Gathered(chains)
    _in_steps(kernel.sweep, plan.warmup, moved)
    for _ in range(plan.sweeps // plan.every):
        kernel.sweep(plan.every)
        gathered.add(chains.force())
        if moved is not None:
            moved(plan.every)
    return gathered.averages()


@torch.no_grad()
def sample_steady(
    system: SpinSystem, plan: Sampling, seed: int, moved: Callable[[int], object] | None = None
) -> Averages:
    """Averages of the steady state of parallel dynamics, and correlations over one step.

    All spins are drawn at once from their laws in the forces of the spins before; of
    S(t+1), the mean given S(t) is averaged.
    """
    system = _single(system)
    chains = Chains.start(system, plan.chains, seed)
    chains.spins[1::2] = _along(system)
    gathered = _Gathered(chains)
    beta = system.beta[..., None, None]
    for step in range(plan.total):
        force = chains.force()
        if step >= plan.warmup:
            gathered.add(force)
        chains.spins = system.site.sample(beta * force, chains.streams)
        if system.mask is not None:
            chains.spins.masked_fill_(system.mask[..., None], 0.0)
        if moved is not None:
            moved(1)
    return gathered.averages()


class _Gathered:
    """Running sums over the time of each chain."""

    def __init__(self, chains: Chains) -> None:
        self.chains = chains
        self.count = 0
        self.magnetization = torch.zeros_like(chains.spins, dtype=torch.float64)
        n = chains.system.num_spins
        self.pairs = self.magnetization.new_zeros(*chains.spins.shape[:-1], n)
        self.interaction: list[Tensor] = []

    def add(self, force: Tensor) -> None:
        system, spins = self.chains.system, self.chains.spins
        mean = system.site.mean(system.beta[..., None, None] * force)
        if system.mask is not None:
            mean = mean.masked_fill(system.mask[..., None], 0.0)
        self.magnetization += mean
        self.pairs += mean @ spins.mT
        self.interaction.append(((force - system.field) * mean).sum((-2, -1)).double() / 2)
        self.count += 1

    def averages(self) -> Averages:
        return Averages(
            self.magnetization / self.count,
            self.pairs / self.count,
            torch.stack(self.interaction, -1),
        )


def _single(system: SpinSystem) -> SpinSystem:
    """The system in float32, of spins that are on a sphere exactly, not to leading order."""
    radius = system.site.radius
    assert radius is not None
    couplings = system.couplings
    return SpinSystem(
        couplings.with_tensors(*(tensor.float() for tensor in couplings.tensors())),
        system.field.float(),
        system.beta.float(),
        Sphere(system.dim, radius) if system.dim > 1 else system.site,
        mask=system.mask,
    )


def _along(system: SpinSystem) -> Tensor:
    """Spins along their fields."""
    length = system.field.norm(dim=-1, keepdim=True)
    free = torch.zeros_like(system.field)
    free[..., 0] = 1.0
    direction = torch.where(length > 0, system.field / length.clamp_min(1e-30), free)
    radius = system.site.radius
    assert radius is not None
    spins = direction * radius
    return spins if system.mask is None else spins.masked_fill(system.mask[..., None], 0.0)


def _in_steps(
    sweep: Callable[[int], None], count: int, moved: Callable[[int], object] | None
) -> None:
    """So many sweeps, a few at a time where somebody watches."""
    for first in range(0, count, 10):
        step = min(10, count - first)
        sweep(step)
        if moved is not None:
            moved(step)


# --- what mean field says of fluctuations -------------------------------------------------------


def mean_field_fluctuations(system: SpinSystem, magnetization: Tensor) -> Tensor:
    r"""Connected :math:`\langle S_i\cdot S_j\rangle` of mean field by linear response, (..., N, N).

    :math:`\chi/\beta = (C^{-1} - \beta J)^{-1}` is N D squared numbers. On spheres
    :math:`C_i^{-1} = \tau_i^{-1} + q_i n_i n_i^{\mathsf T}` with n along m, so that with
    :math:`G = (\tau^{-1} - \beta J)^{-1}` and :math:`M = G \circ n n^{\mathsf T}`,

    .. math:: \operatorname{tr}\chi_{ij}/\beta =
              D\,G_{ij} - \big[G\,(W\circ n n^{\mathsf T})\,G\big]_{ij},\quad
              W = \sqrt q\,(1 + \sqrt q M \sqrt q)^{-1}\sqrt q

    takes N squared numbers and N^3 operations, whatever D (Woodbury's identity).
    """
    beta = system.beta[..., None, None]
    b = beta * system.force(magnetization)
    transverse, longitudinal = system.site.response(b)
    n = b / b.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(b.dtype).tiny)
    q = (1 / longitudinal - 1 / transverse).clamp_min(0.0).sqrt()
    couplings = beta * system.couplings.to_dense()
    propagator = _symmetric_inverse(torch.diag_embed(1 / transverse) - couplings)
    overlap = n @ n.mT
    scaled = q[..., :, None] * propagator * overlap * q[..., None, :]
    inner = _symmetric_inverse(scaled + torch.eye(scaled.shape[-1], dtype=scaled.dtype))
    weight = q[..., :, None] * inner * q[..., None, :]
    return system.dim * propagator - propagator @ (weight * overlap) @ propagator


def _symmetric_inverse(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors / values[..., None, :]) @ vectors.mT


# --- errors -------------------------------------------------------------------------------------


def split_r_hat(series: Tensor) -> Tensor:
    """Gelman and Rubin's ratio of every half chain's scatter to all, for series (C, ..., T)."""
    half = series.shape[-1] // 2
    halves = torch.cat([series[..., :half], series[..., half : 2 * half]])
    within = halves.var(-1).mean(0)
    between = halves.mean(-1).var(0)
    return ((half - 1) / half + between / within.clamp_min(torch.finfo(within.dtype).tiny)).sqrt()


def squared_distance(value: Tensor, groups: Tensor, axes: int) -> tuple[Tensor, Tensor]:
    """|value - truth|^2 without bias from the noise of independent estimates of the truth.

    Args:
        value: (..., *X).
        groups: (C, ..., *X), at least three estimates.
        axes: how many axes X has.

    Returns:
        The squared distance (...), negative at times, and its standard error by jackknife.
    """
    count = len(groups)
    if count < 3:
        raise ValueError(f"{count} independent estimates: a jackknife needs three or more")

    def square(x: Tensor) -> Tensor:
        return x.square().sum(tuple(range(-axes, 0))) if axes else x.square()

    differences = value - groups
    total, squares = differences.sum(0), square(differences)
    every = squares.sum(0)
    distance = (square(total) - every) / (count * (count - 1))
    without = (square(total - differences) - (every - squares)) / ((count - 1) * (count - 2))
    error = ((count - 1) / count * (without - without.mean(0)).square().sum(0)).sqrt()
    return distance, error


@dataclass(frozen=True)
class Errors:
    """Relative errors on a plane, squared: arrays (K, H).

    Attributes:
        squared: the unbiased squared relative error; NaN where there is no answer.
        noise: its standard error.
        solved: whether the approximation's equations were.
    """

    squared: Array
    noise: Array
    solved: NDArray[np.bool_]

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Where the error stands out of the noise."""
        with np.errstate(invalid="ignore"):
            return self.squared > _SEEN * self.noise

    @property
    def bound(self) -> Array:
        """What the error is at most, at two standard errors."""
        return np.sqrt(np.clip(self.squared, 0.0, None) + _SEEN * self.noise)

    @property
    def size(self) -> Array:
        """The error, zero where the unbiased square is negative."""
        return np.sqrt(np.clip(self.squared, 0.0, None))

    def arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """By name, for a file."""
        return {
            f"{prefix}/squared": self.squared,
            f"{prefix}/noise": self.noise,
            f"{prefix}/solved": self.solved,
        }


def relative_errors(
    value: Tensor, groups: Tensor, solved: Tensor, axes: int, floor: Tensor | None = None
) -> Errors:
    """The error of ``value`` in units of the truth's own size, of which noise is taken too.

    Args:
        value: (..., *X); what is not finite, or not ``solved``, has no error.
        groups: (C, ..., *X) independent estimates of the truth.
        solved: (...) bool.
        axes: how many axes X has.
        floor: (...) a known systematic error of the truth, which counts as noise.
    """
    distance, noise = squared_distance(value, groups, axes)
    size, spread = squared_distance(torch.zeros_like(value), groups, axes)
    if floor is not None:
        noise = noise + floor.square()
    # A truth that is not seen itself has no relative error.
    known = size > _SEEN * spread
    solved = solved & torch.isfinite(distance)
    squared = torch.where(known & solved, distance / size, torch.nan)
    relative = torch.where(known & solved, noise / size, torch.nan)
    return Errors(squared.cpu().numpy(), relative.cpu().numpy(), solved.cpu().numpy())


# --- pictures -----------------------------------------------------------------------------------

_FAILED, _DISAGREE = "#E377C2", "#FFFFFF"
SCALE = LogNorm(_LOWEST, _HIGHEST)
COLORS = "viridis"
# An error that is not seen draws no line.
_UNSEEN = 10**-2.5


def draw_map(
    axis: Axes, coupling: Array, field: Array, errors: Errors, trusted: NDArray[np.bool_]
) -> Any:
    """One map on logarithmic axes: K to the right, H upwards; returns what a colour bar needs.

    Hatched: no error is seen in the noise, and the pale colour is what it is at most. Pink: the
    equations were not solved. White and crossed: the chains do not agree, so that nothing is known.
    Lines: 1 % (solid) and 10 % (dashed).
    """
    x, y = _edges(coupling), _edges(field)
    answered = errors.solved & trusted & np.isfinite(errors.squared)
    seen = answered & errors.seen

    def paint(where: NDArray[np.bool_], values: Array, **look: Any) -> Any:
        shown = np.ma.masked_array(np.clip(values, _LOWEST, _HIGHEST), ~where)
        return axis.pcolormesh(x, y, shown.T, linewidth=0.2, **look)

    image = paint(seen, errors.size, norm=SCALE, cmap=COLORS, edgecolor="face")
    paint(answered & ~seen, errors.bound, norm=SCALE, cmap=COLORS, alpha=0.4, edgecolor="none")
    flat = np.ones_like(errors.squared)
    paint(~errors.solved & trusted, flat, cmap=ListedColormap([_FAILED]))
    paint(~trusted, flat, cmap=ListedColormap([_DISAGREE]))
    for where, hatch in (
        (answered & ~seen, "////"),
        (~trusted | (errors.solved & ~answered), "xx"),
    ):
        if where.any():
            axis.pcolor(
                x,
                y,
                np.ma.masked_array(flat, ~where).T,
                cmap=ListedColormap(["none"]),
                hatch=hatch,
                edgecolor="0.45",
                linewidth=0.0,
            )
    draw_contours(axis, coupling, field, errors, trusted)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks([0.1, 0.3, 1.0], ["0.1", "0.3", "1"])
    axis.set_yticks([0.1, 0.3, 1.0, 3.0], ["0.1", "0.3", "1", "3"])
    axis.minorticks_off()
    axis.set_xlim(x[0], x[-1])
    axis.set_ylim(y[0], y[-1])
    axis.tick_params(labelsize=7)
    return image


def draw_contours(
    axis: Axes,
    coupling: Array,
    field: Array,
    errors: Errors,
    trusted: NDArray[np.bool_],
    color: str = "white",
) -> None:
    """Where the error is seen to pass 1 % (solid) and 10 % (dashed)."""
    usable = errors.solved & trusted & np.isfinite(errors.squared)
    if usable.sum() < 4:
        return
    size = np.where(errors.seen, errors.size, np.minimum(errors.size, _UNSEEN))
    level = np.ma.masked_array(np.log10(np.maximum(size, 1e-6)), ~usable)
    for value, style in ((-2.0, "solid"), (-1.0, "dashed")):
        if level.min() < value < level.max():
            axis.contour(
                coupling,
                field,
                level.T,
                levels=[value],
                colors=color,
                linestyles=style,
                linewidths=1.5,
            )


def legend_patches() -> list[Patch]:
    """What the colours that are no errors mean."""
    return [
        Patch(
            facecolor="0.85",
            edgecolor="0.45",
            hatch="////",
            label="no error seen in the noise (pale: at most)",
        ),
        Patch(facecolor=_FAILED, label="equations not solved"),
        Patch(
            facecolor=_DISAGREE, edgecolor="0.45", hatch="xx", label="Monte Carlo not conclusive"
        ),
    ]


def _edges(centres: Array) -> Array:
    """Edges of cells around points that are evenly spaced on a logarithmic axis."""
    logs = np.log(centres)
    step = logs[1] - logs[0] if len(logs) > 1 else 1.0
    edges: Array = np.exp(np.concatenate([logs - step / 2, logs[-1:] + step / 2]))
    return edges
