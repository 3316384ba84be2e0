"""Residuals along depth: what is kept of a stack of layers, and how fast they fall."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spinformer.diagnostics import rank_residual
from spinformer.diagnostics.rank import effective_rank

__all__ = ["FLOOR", "Curve", "Fall", "fall", "measured"]

# Rounding in float64 leaves residuals of this size; what is measured below says nothing.
FLOOR = 1e-13


@dataclass(frozen=True)
class Curve:
    """Residuals before the first layer and after each, of every text.

    Attributes:
        residual: relative, of the norm 1,inf, (layers + 1, texts).
        frobenius: relative, of the Frobenius norm.
        rank: effective rank of the tokens.
        solved: share of the spin systems of each layer whose equations were solved.
        vanished: whether all tokens were zero after a layer: magnetizations without a field, above
            the transition. The residual is 0 there by definition.
    """

    residual: NDArray[np.float64]
    frobenius: NDArray[np.float64]
    rank: NDArray[np.float64]
    solved: NDArray[np.float64]
    vanished: bool = False

    @property
    def mean(self) -> NDArray[np.float64]:
        """Geometric mean over texts; 0 where one of them has collapsed exactly."""
        with np.errstate(divide="ignore"):
            means: NDArray[np.float64] = np.exp(np.log(self.residual).mean(axis=1))
        return means

    def arrays(self, prefix: str) -> dict[str, NDArray[np.float64]]:
        """All numbers, by name."""
        return {
            f"{prefix}/residual": self.residual,
            f"{prefix}/frobenius": self.frobenius,
            f"{prefix}/effective_rank": self.rank,
            f"{prefix}/solved": self.solved,
        }

    def summary(self) -> dict[str, Any]:
        """Means over texts by layer, for JSON."""
        return {
            "residual": self.mean.tolist(),
            "lowest": self.residual.min(axis=1).tolist(),
            "highest": self.residual.max(axis=1).tolist(),
            "frobenius": self.frobenius.mean(axis=1).tolist(),
            "effective_rank": self.rank.mean(axis=1).tolist(),
            "solved": float(self.solved.min()),
            "vanished": self.vanished,
            "fall": fall(self.mean).__dict__,
        }


@torch.no_grad()
def measured(states: Iterable[tuple[Tensor, float]], layers: int) -> Curve:
    """A curve out of tokens (texts, N, d) and the share of systems solved, layer after layer.

    Layers after all texts have collapsed to rounding are not computed: they repeat the last.
    """
    numbers: list[NDArray[np.float64]] = []
    solved: list[float] = []
    vanished = False
    for x, share in states:
        values = (rank_residual(x), rank_residual(x, norm="fro"), effective_rank(x))
        numbers.append(np.stack([value.double().numpy() for value in values]))
        solved.append(share)
        vanished = not bool(x.any())
        # What is left is rounding: it does not come back.
        if float(numbers[-1][0].max()) < FLOOR / 10:
            break
    while len(numbers) <= layers:
        numbers.append(numbers[-1])
        solved.append(solved[-1])
    residual, frobenius, rank = np.stack(numbers, axis=1)
    return Curve(residual, frobenius, rank, np.array(solved), vanished)


@dataclass(frozen=True)
class Fall:
    """How residuals fall.

    Attributes:
        form: ``"none"``: by less than 3 % a layer in the last quarter of the layers. ``"slow"``: by
            more, and not below a tenth. Below a tenth: ``"exponential"``, by a common factor a
            layer, or ``"faster"``, the logarithm grows by a factor; ``"unclear"`` if there are too
            few layers to tell. ``"at once"``: below rounding after two layers.
        factor: of the residual in one layer, the geometric mean over the layers that are looked
            at; None without any.
        order: p of ``residual -> residual^p``, 1 for exponential and 3 for pure attention; None
            where it is not told.
    """

    form: str
    factor: float | None = None
    order: float | None = None


def fall(residuals: NDArray[np.float64]) -> Fall:
    """The form in which residuals by layer fall.

    Looked at are the layers from where the residual is below a tenth, the neighbourhood of collapse
    of which the theory speaks, until rounding; if it does not get there, the last quarter.
    """
    ended = np.flatnonzero(~(residuals > FLOOR))
    kept = np.log(residuals[: ended[0]] if ended.size else residuals)
    if ended.size and ended[0] <= 2:
        return Fall("at once")
    low = np.flatnonzero(kept < math.log(0.1))
    if not low.size and not ended.size:
        late = float(np.exp(np.diff(kept)[-max(len(kept) // 4, 1) :].mean()))
        return Fall("none" if late > 0.97 else "slow", late)
    near = kept[low[0] :] if low.size else kept[-1:]
    steps = np.diff(near)
    # The order of convergence of a sequence, from three members in a row.
    if len(steps) >= 2:
        order = float(np.median(steps[1:] / steps[:-1]))
        stays = float(steps[-max(len(steps) // 4, 1) :].mean()) > math.log(0.97)
        form = "none" if stays else "faster" if order > _ORDER else "exponential"
        return Fall(form, float(np.exp(steps.mean())), None if stays else order)
    factor = float(np.exp(steps.mean())) if steps.size else None
    if ended.size:
        # Rounding hides how far the last step went: at least to there. Or from one layer earlier.
        triples = (kept[-3:], np.array([*kept[-2:], math.log(FLOOR)]))
        for steps in map(np.diff, triples):
            if len(steps) == 2 and steps[1] / steps[0] > _ORDER:
                return Fall("faster", factor)
    return Fall("unclear", factor)


# Half way, in the logarithm, between an exponential and the square.
_ORDER = 2.0**0.5
