"""The figures of the study ``class_token``, drawn from the content of its ``results.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from simulations.figures import band, blank, clean, save

# Of Okabe and Ito's palette.
STYLES: dict[str, dict[str, Any]] = {
    "matrix": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "matrix_mlp": {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    "mixer_mlp": {"color": "#009E73", "linestyle": "-.", "marker": "^"},
}
LABELS = {
    "matrix": "matrix couplings",
    "matrix_mlp": "matrix couplings, MLP as Onsager term",
    "mixer_mlp": "MLP across tokens, MLP as Onsager term",
}
_GRID_BOND, _CLASS_BOND = "#0072B2", "#D55E00"


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """Draw every figure for which there is something to show; returns the files."""
    figures = {"accuracy.png": _accuracy(results)}
    for variant in STYLES:
        figure = _couplings(results, variant)
        if figure is not None:
            figures[f"couplings_{variant}.png"] = figure
    return save(figures, out)


def _runs(results: dict[str, Any], task: str, variant: str) -> list[dict[str, Any]]:
    return [r for r in results["runs"] if r["task"] == task and r["variant"] == variant]


def _title(results: dict[str, Any], task: str, side: str) -> str:
    entry = results["tasks"][task]
    return f"{entry['title']}\n{side} side, n = {entry['examples'][side]:,}"


def _accuracy(results: dict[str, Any]) -> Figure:
    tasks = list(results["tasks"])
    figure = blank(1.0 + 4.4 * len(tasks), 4.2)
    shown = [v for v in STYLES if any(_runs(results, task, v) for task in tasks)]
    for axis, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for variant in shown:
            runs = _runs(results, task, variant)
            if not runs:
                continue
            steps = [point["step"] for point in runs[0]["curve"]]
            values = [
                [100 * point["validation_accuracy"] for point in run["curve"]] for run in runs
            ]
            band(axis, steps, values, {"markersize": 4, "linewidth": 1.5, **STYLES[variant]})
        axis.set_title(_title(results, task, "validation"), fontsize=9)
        axis.set_xlabel("optimizer step", fontsize=9)
        axis.set_ylabel("accuracy [%]", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        clean(axis)
    counts = {len(runs) for task in tasks for v in shown if (runs := _runs(results, task, v))}
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    title = "Validation accuracy while training"
    title += " (one seed)" if seeds == "1" else f"\nline: mean over {seeds} seeds; band: extremes"
    figure.suptitle(title, fontsize=11)
    figure.legend(
        handles=[Line2D([], [], label=LABELS[v], **STYLES[v]) for v in shown],
        loc="outside lower center",
        ncols=len(shown),
        fontsize=8,
        frameon=False,
        handlelength=3.2,
    )
    return figure


def _couplings(results: dict[str, Any], variant: str) -> Figure | None:
    """|J_ij| as a graph over the image and as a matrix, at several moments of one run a task."""
    rows = {}
    for task in results["tasks"]:
        runs = [run for run in _runs(results, task, variant) if run["moments"] is not None]
        if runs:
            rows[task] = runs[0]
    if not rows:
        return None
    columns = max(len(run["moments"]) for run in rows.values())
    figure = blank(0.8 + 2.5 * columns, 1.0 + 4.4 * len(rows))
    figure.suptitle(f"Couplings |J$_{{ij}}$| (Frobenius), {LABELS[variant]}", fontsize=11)
    axes = figure.subplots(
        2 * len(rows), columns, squeeze=False, height_ratios=[0.8, 1.0] * len(rows)
    )
    for row, (task, run) in enumerate(rows.items()):
        bonds = np.array([moment["bonds"] for moment in run["moments"]])
        # A site has no bond with itself: neither a colour nor a part in the scale.
        bonds[:, range(bonds.shape[1]), range(bonds.shape[1])] = np.nan
        # One scale for all moments: what grows on the page grows in the model.
        limits = float(np.nanmin(bonds)), float(np.nanmax(bonds))
        for column, (moment, bond) in enumerate(zip(run["moments"], bonds, strict=True)):
            graph, matrix = axes[2 * row, column], axes[2 * row + 1, column]
            _graph(graph, bond, limits, results["grid"])
            image = matrix.imshow(bond, cmap="viridis", vmin=limits[0], vmax=limits[1])
            last = len(bond) - 1
            for draw_line in (matrix.axhline, matrix.axvline):
                draw_line(last - 0.5, color="white", linewidth=1)
            ticks = [*range(0, last, results["grid"]), last]
            names = [*map(str, range(0, last, results["grid"])), "class"]
            matrix.set_xticks(ticks, names, fontsize=7)
            matrix.set_yticks(ticks, names if column == 0 else [], fontsize=7)
            graph.set_title(f"step {moment['step']}", fontsize=9)
            if column == 0:
                graph.set_ylabel(f"{task}, seed {run['seed']}", fontsize=9)
                matrix.set_ylabel("site, row by row of the grid", fontsize=8)
        figure.colorbar(image, ax=axes[2 * row + 1, :], label="|J$_{ij}$|", shrink=0.9)
    figure.legend(
        handles=[
            Line2D([], [], color=_GRID_BOND, label="bond between places of the image"),
            Line2D([], [], color=_CLASS_BOND, label="bond with the class token"),
        ],
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
    )
    return figure


def _graph(axis: Axes, bonds: NDArray[np.float64], limits: tuple[float, float], grid: int) -> None:
    """Sites at their places in the image, the class token beside.

    Width and opacity grow from the weakest bond of all moments, which is invisible, to the
    strongest: drawn in proportion to |J|, 136 lines hide each other.
    """
    places = [(float(column), -float(row)) for row in range(grid) for column in range(grid)]
    places.append((grid + 0.8, -(grid - 1) / 2))
    token = len(places) - 1
    first, second = np.triu_indices(len(places), 1)
    # Weak bonds first, strong ones over them.
    order = np.argsort(bonds[first, second])
    segments, colors, widths = [], [], []
    for i, j in zip(first[order], second[order], strict=True):
        share = (bonds[i, j] - limits[0]) / (limits[1] - limits[0])
        segments.append([places[i], places[j]])
        rgb = _CLASS_BOND if token in (i, j) else _GRID_BOND
        colors.append((*(int(rgb[k : k + 2], 16) / 255 for k in (1, 3, 5)), share**1.5))
        widths.append(3.0 * share**1.5)
    axis.add_collection(LineCollection(segments, colors=colors, linewidths=widths))
    x, y = np.array(places[:token]).T
    axis.scatter(x, y, s=16, color="black", zorder=3)
    axis.scatter(*places[token], s=60, marker="*", color=_CLASS_BOND, edgecolor="black", zorder=3)
    axis.set_aspect("equal")
    axis.set_xlim(-0.5, grid + 1.3)
    axis.set_ylim(-grid + 0.5, 0.5)
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)
