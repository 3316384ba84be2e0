"""The figures of the study ``path_tasks``, drawn from the content of its ``results.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from matplotlib.ticker import MaxNLocator, NullFormatter
from numpy.typing import ArrayLike

from simulations.figures import blank, clean, save

# Of Okabe and Ito's palette.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention and skip", {"color": "#0072B2", "marker": "o"}),
    "transformer": ("Transformer (with MLP)", {"color": "#D55E00", "marker": "s"}),
    "spins": ("mean field, one step", {"color": "#009E73", "marker": "^"}),
    "spins_mlp": ("mean field, one step, and MLP", {"color": "#CC79A7", "marker": "v"}),
}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "up_to": ("all paths up to the length", {"color": "#0072B2", "marker": "o"}),
    "only": ("all paths of the length", {"color": "#56B4E9", "marker": "s"}),
    "frozen": ("20 random paths of the length", {"color": "#009E73", "marker": "^"}),
    "walked": (
        "the same, each with its own attention",
        {"color": "#CC79A7", "marker": "v", "linestyle": "--"},
    ),
    "refit": (
        "all paths of the length, read-out fitted to them",
        {"color": "#D55E00", "marker": "D", "linestyle": "-."},
    ),
}
VARIANTS = {
    "attention": ("attention", "#0072B2"),
    "mlp": ("attention, MLP", "#56B4E9"),
    "skip": ("attention, skip", "#D55E00"),
    "skip_mlp": ("attention, skip, MLP", "#E69F00"),
    "spins": ("mean field", "#009E73"),
    "spins_no_field": ("mean field, no field", "#CC79A7"),
}
# Half the side of the picture of the circle, whose radius is 0.3.
LIMIT = 0.6
_TITLES = {
    "sort": "sorting 8 digits, tested on new ones",
    "hull": "convex hull of 10 points, tested on new ones",
    "memorization": "memorized random labels,\nwords of Rotten Tomatoes snippets, GloVe 6B 50d",
}


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """Draw every figure for which there is something to show; returns the files."""
    figures: dict[str, Figure] = {}
    if results["runs"]:
        for model in ("attention", "transformer"):
            if any(run["model"] == model for run in results["runs"]):
                figures[f"paths_{model}.png"] = _paths(results, model)
        figures["switched_off.png"] = _switches(results)
        if len({run["depth"] for run in results["runs"]}) > 1:
            figures["depth.png"] = _depths(results)
    if results["circle"]:
        figures["circle_distance.png"] = _distances(results["circle"])
        figures["circle_trajectories.png"] = _trajectories(results["circle"])
    return save(figures, out)


def _mean(axis: Axes, x: ArrayLike, values: ArrayLike, look: dict[str, Any]) -> None:
    """Mean over seeds (rows), and a band of its standard error."""
    rows = np.asarray(values, dtype=float)
    mean = rows.mean(axis=0)
    axis.plot(x, mean, **{"markersize": 4.5, "linewidth": 1.5, **look})
    if len(rows) > 1:
        error = rows.std(axis=0, ddof=1) / len(rows) ** 0.5
        axis.fill_between(
            x, mean - error, mean + error, color=look["color"], alpha=0.2, linewidth=0
        )


def _select(results: dict[str, Any], task: str, model: str, depth: int) -> list[dict[str, Any]]:
    kind = (task, model, depth)
    return [r for r in results["runs"] if (r["task"], r["model"], r["depth"]) == kind]


def _main_depth(results: dict[str, Any]) -> int:
    """The number of layers that all models have."""
    depths = [run["depth"] for run in results["runs"]]
    return max(set(depths), key=depths.count)


def _tasks(results: dict[str, Any]) -> list[str]:
    return [task for task in _TITLES if any(run["task"] == task for run in results["runs"])]


def _seeds(results: dict[str, Any]) -> str:
    count = len({run["seed"] for run in results["runs"]})
    if count == 1:
        return "one seed"
    return f"mean of {count} seeds, band: standard error"


def _baselines(axis: Axes, results: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
    task = runs[0]["task"]
    whole = 100 * float(np.mean([run["test"]["accuracy"] for run in runs]))
    axis.axhline(whole, color="black", linewidth=1.0)
    axis.axhline(100 / results["tasks"][task]["classes"], color="0.45", linestyle=":")
    axis.axhline(
        100 * float(np.mean([run["baseline"] for run in runs])), color="0.45", linestyle="--"
    )


_BASELINES = [
    Line2D([], [], color="black", linewidth=1.0, label="entire model"),
    Line2D([], [], color="0.45", linestyle="--", label="most frequent label (sorting: of a place)"),
    Line2D([], [], color="0.45", linestyle=":", label="random guess"),
]


def _paths(results: dict[str, Any], model: str) -> Figure:
    """Accuracy by the length of paths; below, what the sums of paths of a length are like."""
    depth = _main_depth(results)
    tasks = [task for task in _tasks(results) if _select(results, task, model, depth)]
    figure = blank(1.2 + 4.2 * len(tasks), 7.0)
    name = "attention with skips" if model == "attention" else "a Transformer"
    figure.suptitle(f"Paths through {name}, {depth} layers of 2 heads ({_seeds(results)})")
    axes = figure.subplots(2, len(tasks), squeeze=False, sharex=True, height_ratios=[1.5, 1.0])
    # A path with its own attention has no MLPs on its way.
    parts = [part for part in PARTS if part != "walked" or model == "attention"]
    for column, task in enumerate(tasks):
        runs = _select(results, task, model, depth)
        top, bottom = axes[0, column], axes[1, column]
        clean(top, bottom)
        lengths = range(depth + 1)
        for part in parts:
            values = [r["paths"][part] for r in runs]
            if part in ("frozen", "walked"):
                values = [value["20"] for value in values]
            _mean(top, lengths, 100 * np.asarray(values), PARTS[part][1])
        _baselines(top, results, runs)
        top.set_title(_TITLES[task], fontsize=9)
        top.set_ylim(0 if task == "sort" else 40, 102)
        for quantity, color, mark in (("rank", "#0072B2", "o"), ("share", "#E69F00", "s")):
            values = [r["paths"][quantity] for r in runs]
            _mean(bottom, lengths, values, {"color": color, "marker": mark})
        bottom.set_yscale("log")
        low, high = bottom.get_ylim()
        ticks = [t for t in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0) if low < t < high]
        bottom.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        bottom.yaxis.set_minor_formatter(NullFormatter())
        bottom.set_xlabel("length of paths (heads on the way)", fontsize=9)
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        bottom.axhline(1.0, color="0.45", linewidth=0.8)
    axes[0, 0].set_ylabel("accuracy of a token's label [%]", fontsize=9)
    axes[1, 0].set_ylabel("all paths of the length:\nrank residual, size", fontsize=9)
    handles = [Line2D([], [], label=PARTS[part][0], **PARTS[part][1]) for part in parts]
    handles += _BASELINES
    handles += [
        Line2D([], [], color="#0072B2", marker="o", label="below: rank residual (Frobenius)"),
        Line2D([], [], color="#E69F00", marker="s", label="below: size over that of the output"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _switches(results: dict[str, Any]) -> Figure:
    """Accuracy by the number of layers whose couplings are on."""
    depth, tasks = _main_depth(results), _tasks(results)
    figure = blank(1.2 + 4.2 * len(tasks), 4.6)
    figure.suptitle(
        f"Couplings on in some of {depth} layers, mean over their choice ({_seeds(results)})"
    )
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axis, task in zip(axes, tasks, strict=True):
        clean(axis)
        for model, (_, look) in MODELS.items():
            runs = _select(results, task, model, depth)
            if runs:
                values = 100 * np.asarray([run["switches"]["mean"] for run in runs])
                _mean(axis, range(depth + 1), values, look)
        # Of the data alone, whichever model.
        runs = [run for run in results["runs"] if run["task"] == task]
        axis.axhline(100 / results["tasks"][task]["classes"], color="0.45", linestyle=":")
        axis.axhline(100 * runs[0]["baseline"], color="0.45", linestyle="--")
        axis.set_title(_TITLES[task], fontsize=9)
        axis.set_xlabel("layers with couplings", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(0 if task == "sort" else 40, 102)
    axes[0].set_ylabel("accuracy of a token's label [%]", fontsize=9)
    handles = [Line2D([], [], label=label, **look) for label, look in MODELS.values()]
    figure.legend(
        handles=[*handles, *_BASELINES[1:]],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    return figure


def _depths(results: dict[str, Any]) -> Figure:
    """Networks of different depth on sorting: which lengths of paths they use."""
    depths = sorted({run["depth"] for run in results["runs"] if run["task"] == "sort"})
    figure = blank(1.2 + 4.2 * len(depths), 4.4)
    figure.suptitle(
        f"Attention with skips of different depth, sorting 8 digits ({_seeds(results)})"
    )
    axes = figure.subplots(1, len(depths), squeeze=False, sharey=True)[0]
    parts = ("up_to", "only", "refit")
    for axis, depth in zip(axes, depths, strict=True):
        clean(axis)
        runs = _select(results, "sort", "attention", depth)
        axis.set_title(f"{depth} layers", fontsize=10)
        axis.set_xlabel("length of paths (heads on the way)", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(0, 102)
        if runs:
            for part in parts:
                values = 100 * np.asarray([run["paths"][part] for run in runs])
                _mean(axis, range(depth + 1), values, PARTS[part][1])
            _baselines(axis, results, runs)
    axes[0].set_ylabel("accuracy of a token's label [%]", fontsize=9)
    handles = [Line2D([], [], label=PARTS[part][0], **PARTS[part][1]) for part in parts]
    figure.legend(
        handles=[*handles, *_BASELINES],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    return figure


# --- the circle ---------------------------------------------------------------------------------


def _kinds(points: Sequence[dict[str, Any]]) -> list[tuple[float, int]]:
    return list(dict.fromkeys((run["noise"], run["width"]) for run in points))


def _kind(noise: float, width: int) -> str:
    trained = f"{noise:.0%} noise" if noise else "no noise"
    return f"{width} channels, {trained}"


def _distances(points: Sequence[dict[str, Any]]) -> Figure:
    """The distance of the points as the layer is applied, after little and much training."""
    kinds, moments = _kinds(points), [m["step"] for m in points[0]["moments"]]
    seeds = len({run["seed"] for run in points})
    figure = blank(1.0 + 3.3 * len(moments), 1.4 + 2.5 * len(kinds))
    figure.suptitle(
        "Two points on a circle, moved by one layer again and again: do they become one?\n"
        + ("one line a seed" if seeds > 1 else "one seed"),
        fontsize=11,
    )
    axes = figure.subplots(len(kinds), len(moments), squeeze=False, sharex=True, sharey=True)
    for row, kind in enumerate(kinds):
        for column, step in enumerate(moments):
            axis = axes[row, column]
            clean(axis)
            axis.axhline(1.0, color="0.45", linestyle="--", linewidth=1.0)
            for run in points:
                if (run["noise"], run["width"]) != kind:
                    continue
                distance = run["moments"][column]["distance"]
                x = np.linspace(0, run["rollout"], len(distance))
                axis.plot(x, distance, color=VARIANTS[run["variant"]][1], linewidth=1.3)
            # What leaves the circle far behind leaves the panel.
            axis.set_ylim(-0.05, 2.0)
            if row == 0:
                axis.set_title(f"trained for {step} steps", fontsize=9)
            if row == len(kinds) - 1:
                axis.set_xlabel("times applied", fontsize=9)
            if column == 0:
                axis.set_ylabel(f"{_kind(*kind)}\ndistance / diameter", fontsize=8)
    _variant_legend(figure)
    return figure


def _trajectories(points: Sequence[dict[str, Any]]) -> Figure:
    """Where the points go in the plane: the first seed with noise, every variant and width."""
    first = min(run["seed"] for run in points)
    noisy = [run for run in points if run["noise"]] or list(points)
    widths = list(dict.fromkeys(run["width"] for run in noisy))
    smallest = [run for run in noisy if run["width"] == widths[0] and run["seed"] == first]
    moments = [m["step"] for m in smallest[0]["moments"]]
    # The smallest width while it is trained, then the others at the end.
    rows = [(widths[0], i) for i in range(len(moments))]
    rows += [(width, len(moments) - 1) for width in widths[1:]]
    shown = [v for v in VARIANTS if any(run["variant"] == v for run in noisy)]
    figure = blank(1.0 + 2.2 * len(shown), 1.2 + 2.2 * len(rows))
    figure.suptitle(
        f"The two points, {points[0]['rollout']} times moved by one layer "
        f"({noisy[0]['noise']:.0%} noise in training, seed {first})",
        fontsize=11,
    )
    axes = figure.subplots(len(rows), len(shown), squeeze=False, sharex=True, sharey=True)
    for r, (width, moment) in enumerate(rows):
        for c, variant in enumerate(shown):
            axis = axes[r, c]
            axis.set_aspect("equal")
            axis.add_patch(Circle((0, 0), 0.3, fill=False, color="0.75", linewidth=1.0))
            for run in noisy:
                if (run["variant"], run["width"], run["seed"]) != (variant, width, first):
                    continue
                path = np.asarray(run["moments"][moment]["path"])
                if (np.abs(path[-1]) > LIMIT).any():
                    axis.text(0, -0.85 * LIMIT, "ends outside", ha="center", fontsize=7)
                for point, color in ((0, "#0072B2"), (1, "#E69F00")):
                    x, y = path[:, point].T
                    axis.plot(x, y, ".", color=color, markersize=3)
                    axis.plot(x[-1], y[-1], "X", color=color, markeredgecolor="k", markersize=7)
            axis.set_xlim(-LIMIT, LIMIT)
            axis.set_ylim(-LIMIT, LIMIT)
            axis.tick_params(labelsize=7)
            if r == 0:
                axis.set_title(VARIANTS[variant][0], fontsize=9)
            if c == 0:
                axis.set_ylabel(f"{width} channels\n{moments[moment]} steps", fontsize=8)
    handles: list[Any] = [
        Line2D([], [], color="#0072B2", marker=".", linestyle="none", label="first point"),
        Line2D([], [], color="#E69F00", marker=".", linestyle="none", label="second point"),
        Line2D([], [], color="0.3", marker="X", linestyle="none", label="at the end"),
        Line2D([], [], color="0.75", label="the circle of the training data"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _variant_legend(figure: Figure) -> None:
    handles = [Line2D([], [], color=color, label=label) for label, color in VARIANTS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
