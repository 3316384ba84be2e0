"""The problem of the study ``aim``, its states, and what one step does to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from spinformer.descent import (
    AIM,
    Constants,
    ProximalAIM,
    QuadraticEnergy,
    SumEnergy,
    Verdict,
    aim_bound,
    apollonius,
    descend,
    proximal_bound,
)

__all__ = [
    "DTYPE",
    "KINDS",
    "Arrays",
    "Found",
    "Plane",
    "Problem",
    "aim_step",
    "kinds_of",
    "problem",
    "proximal_step",
]

DTYPE = torch.float64
# Tokens and channels of the synthetic problem, and the sizes of S and W.
TOKENS, CHANNELS = 6, 4
MIXING, CHANNEL = 1.5, 1.0
# What may happen at a state; the two guarantees are nested: the ball of Lemma 4.3 in the region of
# Theorem 4.1, the printed bound of Theorem 5.1 in the sharp one.
KINDS = ("inner", "outer", "fell", "rose", "outside")

Arrays = dict[str, NDArray[Any]]
Found = tuple[dict[str, Any], Arrays]


@dataclass(frozen=True)
class Problem:
    """The synthetic problem: matrices ``S`` (N, N), ``W`` (d, d), data ``B1``, ``B2`` (N, d)."""

    S: Tensor
    W: Tensor
    B1: Tensor
    B2: Tensor

    @property
    def f(self) -> QuadraticEnergy:
        """``|S Y|^2 + |Y - B1|^2``."""
        return QuadraticEnergy(mixing=self.S.mT @ self.S, center=self.B1, weight=1.0)

    @property
    def g(self) -> QuadraticEnergy:
        """``|Y W|^2 + |Y - B2|^2``."""
        return QuadraticEnergy(channel=self.W @ self.W.mT, center=self.B2, weight=1.0)

    @property
    def h(self) -> SumEnergy:
        """Their sum."""
        return self.f + self.g

    @property
    def constants(self) -> Constants:
        """Lipschitz constants of the gradients, and the strong convexity of h."""
        return Constants.of(self.h, len(self.B1))

    def sizes(self, ratio: float, share: float) -> tuple[float, float]:
        """``a1, a2`` with ``a1 / a2 = ratio`` and ``a2 L_h = share``."""
        size = share / float(self.constants.lipschitz_h)
        return ratio * size, size

    def energies(self) -> dict[str, QuadraticEnergy]:
        """f, g, and their sum as one energy (up to a constant)."""
        return {"f": self.f, "g": self.g, "h": self.f.merge(self.g)}

    def minima(self) -> dict[str, Tensor]:
        """The minima of f, g and h, ``(N, d)``."""
        return {name: energy.minimum() for name, energy in self.energies().items()}

    def fixed_point(self, sizes: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Where AIM stops, and the eigenvalues of its map: linear algebra, not the algorithm.

        ``u = (1 - a1 F) y + 2 a1 b1`` and ``y = (1 - a2 G) u + 2 a2 b2`` in one vector of N d
        numbers, F and G the Hessians. The eigenvalues say how AIM approaches that point: a pair
        that is not real would circle.
        """
        a1, a2 = sizes
        hessian_f, hessian_g = self._hessians()
        one = torch.eye(len(hessian_f), dtype=DTYPE)
        first, second = one - a1 * hessian_f, one - a2 * hessian_g
        offset = 2 * a1 * second @ self.B1.flatten() + 2 * a2 * self.B2.flatten()
        point = torch.linalg.solve(one - second @ first, offset)
        return point.reshape(self.B1.shape), torch.linalg.eigvals(second @ first)

    def _hessians(self) -> tuple[Tensor, Tensor]:
        """F and G as matrices on flattened tokens, straight from S and W."""
        tokens, channels = (torch.eye(n, dtype=DTYPE) for n in self.B1.shape)
        mixing = 2 * (self.S.mT @ self.S + tokens)
        channel = 2 * (self.W @ self.W.mT + channels)
        return torch.kron(mixing, channels), torch.kron(tokens, channel)


def problem(
    generator: torch.Generator,
    tokens: int = TOKENS,
    channels: int = CHANNELS,
    scales: tuple[float, float] = (MIXING, CHANNEL),
    shift: float = 0.0,
) -> Problem:
    """A random problem: Gaussian S and W of those sizes, Gaussian data around ``shift``."""

    def draw_one(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=DTYPE)

    mixing, channel = scales
    return Problem(
        S=mixing * draw_one(tokens, tokens) / tokens**0.5,
        W=channel * draw_one(channels, channels) / channels**0.5,
        B1=draw_one(tokens, channels) + shift,
        B2=draw_one(tokens, channels) + shift,
    )


@dataclass(frozen=True)
class Plane:
    """States ``origin + x first + y second``, the directions ``(N, d)`` orthonormal."""

    origin: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def through(cls, origin: Tensor, *points: Tensor) -> Plane:
        """The plane through the origin that is nearest to the points; through two of them."""
        rows = torch.stack([point - origin for point in points]).flatten(1)
        axes = torch.linalg.svd(rows, full_matrices=False).Vh[:2]
        # The sign of a singular vector is nobody's choice: the last point lies to the right.
        axes = axes * torch.where(axes @ rows[-1] < 0, -1.0, 1.0)[:, None]
        first, second = axes.reshape(2, *origin.shape)
        return cls(origin, first, second)

    def states(self, x: Tensor, y: Tensor) -> Tensor:
        """The states at coordinates, ``(..., N, d)``."""
        return self.origin + x[..., None, None] * self.first + y[..., None, None] * self.second

    def grid(self, center: Tensor, half: float, points: int) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates (two axes of ``points``) of a square, and its states; rows are ``second``."""
        axis = torch.linspace(-half, half, points, dtype=DTYPE)
        x, y = center[0] + axis, center[1] + axis
        return x, y, self.states(*torch.meshgrid(x, y, indexing="xy"))

    def coordinates(self, Y: Tensor) -> Tensor:
        """The coordinates of states, projected, ``(..., 2)``."""
        away = Y - self.origin
        return torch.stack([(away * a).sum((-2, -1)) for a in (self.first, self.second)], -1)

    def share(self, Y: Tensor) -> float:
        """The share of the states' squared distances from the origin that the plane shows."""
        total = (Y - self.origin).square().sum()
        return float(self.coordinates(Y).square().sum() / total)


def kinds_of(inner: Tensor, outer: Tensor, rose: Tensor, outside: Tensor | None = None) -> Found:
    """The map of kinds, with the number of states of each and of those that break a guarantee.

    Args:
        inner, outer: whether the narrower and the wider guarantee cover a state.
        rose: whether the step from it raised the energy.
        outside: whether it has no energy; None for none.
    """
    known = torch.ones_like(rose) if outside is None else ~outside
    kind = torch.full(rose.shape, KINDS.index("fell"))
    kind[outer], kind[inner & outer] = KINDS.index("outer"), KINDS.index("inner")
    kind[rose], kind[~known] = KINDS.index("rose"), KINDS.index("outside")
    numbers = {name: int((kind == code).sum()) for code, name in enumerate(KINDS)}
    for name, covered in (("inner", inner), ("outer", outer)):
        numbers[f"in_{name}"] = int((covered & known).sum())
        numbers[f"rose_in_{name}"] = int((covered & known & rose).sum())
    numbers["inner_not_outer"] = int((inner & ~outer & known).sum())
    return numbers, {"kind": kind.to(torch.int8).numpy()}


def aim_step(case: Problem, sizes: tuple[float, float], states: Tensor) -> Found:
    """One step of AIM from each of the states: guaranteed, fell, or rose."""
    known, minima = case.constants, case.minima()
    report = descend(
        case.h, states, AIM(sizes), 1, constants=known, minima=(minima["f"], minima["h"])
    )
    rose = report.verdict[0] == Verdict.ROSE
    numbers, arrays = kinds_of(report.region["lemma_4_3"][0], report.region["theorem_4_1"][0], rose)
    bound = aim_bound(*sizes, known.lipschitz_g, known.lipschitz_h)
    ratio = known.convexity_h * bound / known.lipschitz_f
    ball = apollonius(minima["f"], minima["h"], ratio)
    described = {"bound": float(bound), "ratio": float(ratio), "radius": float(ball.radius)}
    return {**described, **numbers}, arrays


def proximal_step(case: Problem, sizes: tuple[float, float], states: Tensor) -> Found:
    """One step of proximal AIM with ReLU from each of the states; those outside have no energy."""
    known = case.constants
    report = descend(case.h, states, ProximalAIM(sizes, "relu"), 1, constants=known)
    rose = report.verdict[0] == Verdict.ROSE
    outside = (states < 0).any(-1).any(-1)
    # A kappa of one is not allowed; the least that is gives the largest bound.
    deficit = report.deficit[0]
    bound = proximal_bound(*sizes, known.lipschitz_g, -deficit, known.lipschitz_h, printed=True)
    printed = (report.delta[0] <= bound) & (deficit > -1)
    numbers, arrays = kinds_of(printed, report.region["theorem_5_1"][0], rose, outside)
    return numbers, {**arrays, "kappa": torch.where(outside, torch.nan, -deficit).numpy()}
