"""The figures of the study ``energy_by_layer``: one a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from simulations.energy_by_layer import LAYERS, TITLES
from simulations.figures import blank, clean, save

_COLUMNS = {
    "published": "public code",
    "paper": "as printed",
    "corrected": "same energy,\nstep of the sum",
    "data": "attention and\ndata term",
    "free_energy": "free energy of a block repeated\n(dashed: stream of magnetizations)",
}
_COLORS = {False: "#0072b2", True: "#d55e00"}
_NAMES = {False: "without ReLU", True: "with ReLU"}


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """Write ``imdb.png`` and ``snippets.png``."""
    figures = {}
    for task in results["tasks"]:
        records = [record for record in results["runs"] if record["task"] == task]
        columns = [name for name in _COLUMNS if any(r["variant"] == name for r in records)]
        if not columns:
            continue
        figure = blank(1.2 + 2.75 * len(columns), 6.4)
        axes = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey=True)
        reviews = records[0]["reviews"]
        figure.suptitle(
            f"Energy by layer: {reviews} reviews ({TITLES[task]}, {results['vectors']})",
            fontsize=12,
        )
        for row, weights in enumerate(("random", "trained")):
            axes[row, 0].set_ylabel(
                f"{weights} weights\n(E - least) / range, of each review", fontsize=9
            )
            for column, variant in enumerate(columns):
                axis = axes[row, column]
                clean(axis)
                axis.set_yscale("symlog", linthresh=1e-3, linscale=0.4)
                axis.set_ylim(-2e-4, 1.3)
                axis.set_yticks([0, 1e-3, 1e-2, 1e-1, 1], ["0", "0.001", "0.01", "0.1", "1"])
                axis.set_xlim(-0.7, LAYERS + 0.7)
                axis.set_xticks(range(0, LAYERS + 1, 2), range(0, LAYERS + 1, 2))
                _panel(axis, records, variant, weights)
                if row == 0:
                    axis.set_title(f"{_COLUMNS[variant]}\n\n", fontsize=10)
                else:
                    axis.set_xlabel("layer t", fontsize=9)
        figure.legend(
            [Line2D([], [], color=color, marker="o", markersize=3) for color in _COLORS.values()],
            [f"{name}: mean, box 25 to 75 %, whiskers 5 to 95 %" for name in _NAMES.values()],
            loc="outside lower center",
            ncols=2,
            fontsize=9,
        )
        figures[f"{task}.png"] = figure
    return save(figures, out)


def _panel(axis: Axes, records: list[dict[str, Any]], variant: str, weights: str) -> None:
    counts = []
    for relu, color in _COLORS.items():
        curve = _curve(records, variant, weights, relu)
        if curve is None:
            continue
        if curve["all_fall"] is None:
            counts.append((relu, "training diverged"))
            continue
        layers = np.arange(len(curve["mean"])) + LAYERS + 1 - len(curve["mean"])
        shift = 0.17 if relu else -0.17
        names = ("whislo", "q1", "med", "q3", "whishi")
        boxes = [
            dict(zip(names, column, strict=True))
            for column in np.array(curve["quantiles"]).T.tolist()
        ]
        line = {"color": color, "linewidth": 0.8}
        axis.bxp(
            boxes,
            positions=(layers + shift).tolist(),
            widths=0.28,
            showfliers=False,
            manage_ticks=False,
            boxprops=line,
            whiskerprops=line,
            capprops=line,
            medianprops=line,
        )
        axis.plot(layers + shift, curve["mean"], color=color, linewidth=1, marker="o", markersize=2)
        count = f"every step falls in {curve['all_fall']} of {curve['reviews']}"
        dashed = _curve(records, variant, weights, relu, "plain")
        if dashed is not None:
            axis.plot(layers + shift, dashed["mean"], color=color, linewidth=1, linestyle="--")
            count += f" (dashed {dashed['all_fall']})"
        counts.append((relu, count))
    for place, (relu, count) in enumerate(counts):
        axis.text(
            0.5,
            1.11 - 0.07 * place,
            f"{_NAMES[relu]}: {count}",
            ha="center",
            transform=axis.transAxes,
            fontsize=7,
            color=_COLORS[relu],
        )


def _curve(
    records: list[dict[str, Any]], variant: str, weights: str, relu: bool, step: str | None = None
) -> dict[str, Any] | None:
    """Energies of one step, the variant's own unless named, on the vectors it is trained on."""
    inputs, optimizer = ("raw", "sgd") if variant == "published" else ("unit", "adam")
    for record in records:
        if (record["variant"], record["relu"], record["optimizer"]) != (variant, relu, optimizer):
            continue
        for curve in record["curves"]:
            known = (curve["weights"], curve["inputs"]) == (weights, inputs)
            if known and step in (None, curve["step"]):
                return curve
    return None
