"""The figures of the study ``rank_collapse``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from simulations.collapse_blocks import BLOCKS
from simulations.collapse_spins import KINDS
from simulations.figures import blank, clean, save
from simulations.residuals import FLOOR

__all__ = ["draw"]

# Okabe and Ito's palette; style and marker for print in grey.
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "no_mlp": {"color": "#009E73", "linestyle": "--", "marker": "s"},
    "no_skip": {"color": "#E69F00", "linestyle": "-.", "marker": "^"},
    "attention": {"color": "#D55E00", "linestyle": ":", "marker": "v"},
    "no_biases": {"color": "#CC79A7", "linestyle": (0, (1, 3)), "marker": "D"},
}
NAMES = {
    "full": "full",
    "no_mlp": "without MLP",
    "no_skip": "without skips",
    "attention": "attention alone",
    "no_biases": "attention alone, no biases",
}
SPIN_NAMES = {
    "full": "full",
    "no_mlp": "without MLP",
    "no_skip": "without the field x (skip)",
    "attention": "couplings alone, one step",
}
_LOWEST = 3e-17
_RESIDUAL = r"$|\mathrm{res}(X)|_{1,\infty}\ /\ |X|_{1,\infty}$"


def draw(results: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the figures for which there are numbers; returns their files."""
    figures: dict[str, Figure] = {}
    if results["networks"]:
        figures["networks.png"] = _networks(results)
        if any(entry["theorem"] for entry in results["networks"].values()):
            figures["theorem.png"] = _theorem(results)
    if results["spins"]:
        figures["spins.png"] = _spins(results)
        figures["factors.png"] = _factors(results)
    if results["blocks"]:
        figures["blocks.png"] = _blocks(results)
    return save(figures, out)


def _curve(axis: Axes, summary: Mapping[str, Any], look: Mapping[str, Any]) -> None:
    """Mean over texts and the range of them; what is exactly 0 stands at the lower edge."""
    at = np.arange(len(summary["residual"]))
    mean, low, high = (
        np.maximum(np.asarray(summary[name]), _LOWEST) for name in ("residual", "lowest", "highest")
    )
    axis.plot(at, mean, markersize=3.2, linewidth=1.4, **look)
    axis.fill_between(at, low, high, color=look["color"], alpha=0.18, linewidth=0)


def _residual_axis(axis: Axes, layers: int) -> None:
    axis.set_yscale("log")
    axis.set_ylim(_LOWEST, 3)
    axis.set_xlim(-0.3, layers + 0.3)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.axhspan(_LOWEST, FLOOR / 100, color="0.93", zorder=0)
    clean(axis)


def _legend(looks: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> list[Line2D]:
    return [
        Line2D([], [], markersize=4, label=names[key], **looks[key])
        for key in names
        if key in looks
    ]


def _networks(results: Mapping[str, Any]) -> Figure:
    entries = list(results["networks"].values())
    figure = blank(max(3.1 * len(entries) + 0.4, 9.0), 3.9)
    axes = np.atleast_1d(figure.subplots(1, len(entries), sharey=True))
    for axis, entry in zip(axes, entries, strict=True):
        layers = len(entry["full"]["residual"]) - 1
        for variant, look in VARIANTS.items():
            _curve(axis, entry[variant], look)
        _residual_axis(axis, layers)
        axis.set_title(entry["title"], fontsize=9)
        axis.set_xlabel("layer", fontsize=9)
    axes[0].set_ylabel(f"relative residual {_RESIDUAL}", fontsize=9)
    figure.legend(
        handles=_legend(VARIANTS, NAMES), loc="outside lower center", ncols=5, fontsize=8.5
    )
    axes[0].annotate("rounding", (0.02, 1.1e-16), fontsize=7.5, color="0.4")
    figure.suptitle(
        f"Rank collapse by layer: {results['texts']} pieces of {results['length']} tokens of "
        f"{results.get('network_data', 'texts')} (geometric mean, range)",
        fontsize=10,
    )
    return figure


def _theorem(results: Mapping[str, Any]) -> Figure:
    entries = [entry for entry in results["networks"].values() if entry["theorem"]]
    figure = blank(max(3.6 * len(entries) + 0.6, 9.0), 3.9)
    axes = np.atleast_1d(figure.subplots(1, len(entries), sharey=True))
    looks: dict[str, dict[str, Any]] = {
        "residual": {"color": "#CC79A7", "marker": "D", "label": "measured"},
        "bound": {
            "color": "black",
            "linestyle": "--",
            "label": "the theorem, from the first layer on",
        },
        "proved": {
            "color": "#009E73",
            "linestyle": "-.",
            "label": "the same with constants that are proved",
        },
        "next": {
            "color": "#0072B2",
            "linestyle": "none",
            "marker": "_",
            "markersize": 12,
            "label": "the theorem for one layer, from the residual measured before",
        },
    }
    for axis, entry in zip(axes, entries, strict=True):
        for name, look in looks.items():
            values = [np.nan if v is None else v for v in entry["theorem"][name]]
            at = np.arange(len(values)) + (name == "next")
            axis.plot(at, values, **{"markersize": 4, "linewidth": 1.3} | look)
        axis.axhline(-16, color="0.6", linewidth=0.7, linestyle=":")
        axis.set_yscale("symlog", linthresh=10)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_title(entry["title"], fontsize=9)
        axis.set_xlabel("layer", fontsize=9)
        clean(axis)
    axes[0].set_ylabel(r"$\log_{10} |\mathrm{res}(X)|_{1,\infty}$", fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8.5)
    figure.suptitle(
        "Attention alone, without biases, followed beyond rounding (dotted: float64), and the "
        "theorem of rank collapse",
        fontsize=10,
    )
    return figure


# Spins -------------------------------------------------------------------------------------------


def _field_colors(fields: Iterable[float]) -> dict[float, Any]:
    ordered = sorted(set(fields), reverse=True)
    places = np.linspace(0.0, 0.88, len(ordered))
    return {s: colormaps["viridis"](place) for s, place in zip(ordered, places, strict=True)}


def _spins(results: Mapping[str, Any]) -> Figure:
    entries = results["spins"]
    strengths = sorted({e["strength"] for e in entries if e["kind"] != "energy_descent"})
    colors = _field_colors(e["field"] for e in entries)
    systems = [kind for kind in KINDS if kind != "energy_descent"]
    figure = blank(15.5, 3.3 * len(strengths) + 0.9)
    # Energy steps have no temperature: they stand apart, over all rows.
    grid = figure.add_gridspec(len(strengths), len(systems) + 1)
    axes = np.empty((len(strengths), len(systems)), dtype=object)
    for row, strength in enumerate(strengths):
        for column, kind in enumerate(systems):
            axis = axes[row, column] = figure.add_subplot(grid[row, column])
            _spin_panel(axis, entries, colors, kind, strength)
            axis.tick_params(labelbottom=row == len(strengths) - 1, labelleft=column == 0)
        side = "disordered" if strength < 1 else "ordered without a field"
        axes[row, 0].set_ylabel(
            f"row sums $\\beta g$ = {strength:g} ({side})\nrelative residual", fontsize=9
        )
    for column, kind in enumerate(systems):
        axes[0, column].set_title(KINDS[kind], fontsize=9)
    apart = figure.add_subplot(grid[:, -1])
    _spin_panel(apart, entries, colors, "energy_descent", 1.0)
    apart.set_title("energy descent (has no temperature)", fontsize=9)
    for axis in (*axes[-1], apart):
        axis.set_xlabel("layer", fontsize=9)
    figure.legend(handles=_spin_legend(colors), loc="outside lower center", ncols=5, fontsize=8.5)
    figure.suptitle(
        "Spin systems and energy steps with a field of strength s: "
        f"{results['texts']} pieces of {results['length']} words of {results.get('data', 'texts')}",
        fontsize=10,
    )
    return figure


def _spin_panel(
    axis: Axes,
    entries: Sequence[Mapping[str, Any]],
    colors: Mapping[float, Any],
    kind: str,
    strength: float,
) -> None:
    own = [entry for entry in entries if (entry["kind"], entry["strength"]) == (kind, strength)]
    for entry in own:
        _spin_curve(axis, entry, colors[entry["field"]])
    _residual_axis(axis, len(entries[0]["residual"]) - 1)


def _spin_curve(axis: Axes, entry: Mapping[str, Any], color: Any) -> None:
    network = entry["source"] == "network"
    look: dict[str, Any] = {"color": color, "linestyle": "-", "marker": "."}
    if network:
        look |= {"linestyle": "--", "marker": ""}
    if entry["one_step"]:
        look |= {"color": "#D55E00", "linestyle": "-.", "marker": "x"}
    _curve(axis, entry, look)
    if entry["vanished"]:
        # All magnetizations are zero: no residual to speak of.
        axis.annotate("m = 0", (1, _LOWEST), (1.4, 2e-14), fontsize=8, color="0.25")
    predicted = entry["predicted"]
    if predicted is None or not predicted > 0:
        return
    residual = np.asarray(entry["residual"])
    at = np.arange(len(residual))
    if network:
        line = np.full(len(at), predicted * residual[0])
    else:
        # The slope is predicted. It starts where the theory speaks.
        near = np.flatnonzero(residual < 0.1)
        if not near.size:
            return
        start = int(near[0])
        line = residual[start] * predicted ** (at - start)
        line[:start] = np.nan
    shown = (line > 1e-16) & (at >= 1)
    axis.plot(at[shown], line[shown], color="black", linewidth=0.8, linestyle=":", zorder=5)


def _spin_legend(colors: Mapping[float, Any]) -> list[Line2D]:
    lines = [
        Line2D([], [], color=color, marker=".", label=f"field s = {s:g} of the layer before")
        for s, color in colors.items()
    ]
    return [
        *lines,
        Line2D([], [], color="0.3", linestyle="--", label="the same of the network's input"),
        Line2D([], [], color="#D55E00", linestyle="-.", marker="x", label="s = 0, one step"),
        Line2D(
            [], [], color="black", linestyle=":", linewidth=0.9, label="predicted slope or level"
        ),
    ]


# The larger lie under the smaller: most approximations differ by less than a marker.
_MARKS: dict[str, dict[str, Any]] = {
    "mean_field": {"marker": "o", "color": "#0072B2", "markersize": 12},
    "mean_field_symmetric": {"marker": "s", "color": "#56B4E9", "markersize": 9},
    "tap": {"marker": "D", "color": "#009E73", "markersize": 6},
    "steepest_descent": {"marker": "^", "color": "#D55E00", "markersize": 4.5},
    "energy_descent": {"marker": "P", "color": "#CC79A7", "markersize": 7},
}


def _factors(results: Mapping[str, Any]) -> Figure:
    """Measured against predicted factors of the residual in one layer."""
    figure = blank(5.6, 4.9)
    axis = figure.subplots()
    for kind, look in _MARKS.items():
        for filled in (True, False):
            points = _points(results["spins"], kind, filled)
            if points:
                face = look["color"] if filled else "none"
                axis.plot(
                    *zip(*points, strict=True), linestyle="none", markerfacecolor=face, **look
                )
    ends = np.array([4e-3, 1.0])
    axis.plot(ends, ends, color="0.4", linewidth=0.9, zorder=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("predicted near collapse, without a fit", fontsize=9)
    axis.set_ylabel("measured factor of the residual in one layer", fontsize=9)
    clean(axis)
    handles = [
        Line2D([], [], linestyle="none", label=KINDS[kind], **look) for kind, look in _MARKS.items()
    ]
    handles += [
        Line2D([], [], linestyle="none", marker="o", color="0.4", label=r"filled: $\beta g > 1$"),
        Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            markerfacecolor="none",
            color="0.4",
            label=r"open: $\beta g \leq 1$",
        ),
    ]
    axis.legend(handles=handles, fontsize=8, loc="upper left")
    return figure


def _points(
    entries: Sequence[Mapping[str, Any]], kind: str, filled: bool
) -> list[tuple[float, float]]:
    """Predicted and measured factors of curves that fall, with the field of the layer before."""
    return [
        (entry["predicted"], entry["fall"]["factor"])
        for entry in entries
        if entry["kind"] == kind
        and (entry["strength"] > 1) == filled
        and entry["source"] == "layer"
        and entry["predicted"]
        and entry["predicted"] > 0
        and entry["fall"]["form"] == "exponential"
    ]


def _blocks(results: Mapping[str, Any]) -> Figure:
    names = [name for name in BLOCKS if name in results["blocks"]]
    figure = blank(3.2 * len(names) + 0.6, 6.4)
    axes = figure.subplots(2, len(names), sharex=True, sharey=True, squeeze=False)
    for column, name in enumerate(names):
        entry = results["blocks"][name]
        for row, state in enumerate(("initial", "trained")):
            axis = axes[row, column]
            for variant, summary in entry[state].items():
                _curve(axis, summary, VARIANTS[variant])
            _residual_axis(axis, len(entry[state]["full"]["residual"]) - 1)
        axes[0, column].set_title(BLOCKS[name], fontsize=9)
        axes[1, column].set_title(f"test accuracy {100 * entry['accuracy']:.1f} %", fontsize=8.5)
        axes[1, column].set_xlabel("layer", fontsize=9)
    for row, state in enumerate(("at their start", "trained")):
        axes[row, 0].set_ylabel(f"{state}\nrelative residual", fontsize=9)
    figure.legend(
        handles=_legend(VARIANTS, SPIN_NAMES), loc="outside lower center", ncols=4, fontsize=8.5
    )
    figure.suptitle(
        f"Classifiers before and after training: {results['texts']} pieces of "
        f"{results['length']} words of {results.get('data', 'texts')}",
        fontsize=10,
    )
    return figure
