"""What the figures of all studies share: their look, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from simulations.runs import replaced

__all__ = ["band", "blank", "clean", "save"]


def blank(width: float, height: float) -> Figure:
    """An empty figure of that size in inches; what is put on it makes room for itself.

    Not one of ``pyplot``, whose figures are global and look for a screen.
    """
    figure = Figure(figsize=(width, height), dpi=130)
    figure.set_layout_engine("constrained")
    return figure


def clean(*axes: Axes) -> None:
    """A light grid behind the data, small labels, and no frame above and to the right."""
    for axis in axes:
        axis.grid(True, color="0.9", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)


def band(axis: Axes, x: ArrayLike, values: ArrayLike, look: Mapping[str, Any]) -> None:
    """The mean over seeds (rows of ``values``), and the range between the extremes.

    ``look``: arguments of the line; its colour is that of the range.
    """
    rows = np.asarray(values, dtype=float)
    axis.plot(x, rows.mean(axis=0), **look)
    if len(rows) > 1:
        axis.fill_between(
            x, rows.min(axis=0), rows.max(axis=0), color=look["color"], alpha=0.15, linewidth=0
        )


def save(figures: Mapping[str, Figure], out: Path) -> list[Path]:
    """Write figures by their file names, each as a whole or not at all; returns the files."""
    for name, figure in figures.items():
        with replaced(out / name) as partial:
            FigureCanvasAgg(figure).print_png(str(partial))
    return [out / name for name in figures]
