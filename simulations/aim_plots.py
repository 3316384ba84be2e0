"""The figures of the study ``aim``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from simulations.figures import blank, clean, save

# Of Okabe and Ito's palette: inner and outer guarantee, fell without one, rose, outside the domain.
KIND_COLORS = ("#0072B2", "#56B4E9", "#EEEEEE", "#D55E00", "#A8A8A8")
_KINDS = ListedColormap(KIND_COLORS)
_KIND_NORM = BoundaryNorm(np.arange(6) - 0.5, 5)
_HALO = [withStroke(linewidth=2.5, foreground="white")]
_RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AIM": ("AIM", "#D55E00", {"linewidth": 2.2}),
    "majorize-minimize": ("majorize-minimize", "#0072B2", {}),
    "gradient": ("exact gradient of the sum", "#009E73", {"linestyle": "--"}),
    "backtracking": ("backtracking", "#CC79A7", {"linestyle": "-."}),
}
_PRINTED, _CORRECTED = "#D55E00", "#0072B2"

Arrays = Mapping[str, Any]


def draw(results: dict[str, Any], arrays: Mapping[str, Arrays], out: Path) -> list[Path]:
    """Draw every section that was finished; returns the files."""
    figures: dict[str, Figure] = {}
    for name, numbers in results["sections"].items():
        for file, make in _FIGURES.get(name, {}).items():
            figures[file] = make(numbers, arrays[name])
    return save(figures, out)


def _kinds(axis: Axes, x: Any, y: Any, kind: Any) -> None:
    axis.pcolormesh(x, y, kind, cmap=_KINDS, norm=_KIND_NORM, shading="nearest", rasterized=True)
    axis.set_aspect("equal")
    axis.tick_params(labelsize=8)


def _mark(axis: Axes, point: Any, text: str, shift: tuple[int, int] = (5, 5)) -> None:
    axis.plot(*point, "o", color="black", markersize=4, markeredgecolor="white", zorder=6)
    axis.annotate(
        text, point, xytext=shift, textcoords="offset points", fontsize=9, zorder=7,
        path_effects=_HALO,
    )  # fmt: skip


def _legend(figure: Figure, labels: Mapping[int, str], *lines: Line2D) -> None:
    patches = [
        Patch(facecolor=KIND_COLORS[code], edgecolor="0.5", linewidth=0.5, label=label)
        for code, label in labels.items()
    ]
    handles = [*patches, *lines]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)


def _end_line() -> Line2D:
    return Line2D([], [], color="black", marker="x", linestyle="", label="where AIM ends")


# --- figure 1 ------------------------------------------------------------------------------------


def _regions(numbers: dict[str, Any], arrays: Arrays) -> Figure:
    panels = numbers["panels"]
    figure = blank(13.0, 8.9)
    axes = figure.subplots(2, 3).ravel()
    figure.suptitle(
        "One step of AIM on the synthetic problem, in the plane through the minima of f, g and "
        "h = f + g: where it must fall, and what it did",
        fontsize=12,
    )
    for index, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        wide = panel["wide"]
        _kinds(axis, *(arrays[f"wide{index}_{key}"] for key in ("x", "y", "kind")))
        kind = "inside" if wide["ratio"] <= 1 else "outside"
        axis.set_title(
            f"$a_1 / a_2$ = {panel['a1/a2']:g}, $a_2 L_h$ = {panel['a2 L_h']:g}: "
            f"ratio {wide['ratio']:.2f}, {kind} of a ball\n"
            f"rose in {wide['rose']:,} of {sum(wide[key] for key in _CELLS):,} cells, "
            f"{wide['rose_in_outer']} of them guaranteed",
            fontsize=9,
        )
        for name, point in numbers["minima"].items():
            _mark(axis, point, f"$y_{name}^*$")
        half = 2 * panel["gap"]
        if half < 1:
            _inset(axis, index, half, numbers["minima"]["h"], panel["end"], arrays)
        else:
            axis.plot(*panel["end"], "x", color="black", markersize=8, zorder=6)
        axis.set_xlabel("distance from $y_h^*$", fontsize=9)
    _legend(
        figure,
        {
            0: "guaranteed by Lemma 4.3 (Apollonius)",
            1: "guaranteed by Theorem 4.1",
            2: "fell anyway",
            3: "rose",
        },
        _end_line(),
    )
    return figure


def _inset(axis: Axes, index: int, half: float, minimum: Any, end: Any, arrays: Arrays) -> None:
    """The surroundings of the minimum, in a corner that has one colour in the wide map."""
    inset = axis.inset_axes((0.02, 0.02, 0.36, 0.36))
    _kinds(inset, *(arrays[f"zoom{index}_{key}"] for key in ("x", "y", "kind")))
    inset.plot(*minimum, "o", color="black", markersize=4, markeredgecolor="white")
    inset.plot(*end, "x", color="black", markersize=7)
    inset.set_xticks([])
    inset.set_yticks([])
    inset.text(
        0.04, 0.04, f"width {2 * half:.2g}", transform=inset.transAxes, fontsize=8,
        path_effects=_HALO,
    )  # fmt: skip
    for side in inset.spines.values():
        side.set_edgecolor("black")
    axis.plot(
        half * np.array([-1, 1, 1, -1, -1]), half * np.array([-1, -1, 1, 1, -1]),
        color="black", linewidth=0.8,
    )  # fmt: skip


_CELLS = ("inner", "outer", "fell", "rose")


# --- figures 2 and 3 -----------------------------------------------------------------------------


def _trajectory(numbers: dict[str, Any], arrays: Arrays) -> Figure:
    figure = blank(12.5, 6.6)
    axes = figure.subplots(1, 2)
    figure.suptitle(
        "AIM does not end at the minimum of h = f + g, but next to it\n"
        "(in brackets: the share of the squared distances from $y_h^*$ that the plane shows)",
        fontsize=12,
    )
    titles = {
        "whole": "the path in its principal plane",
        "end": "its end, in the principal plane of the end",
    }
    kind = arrays["AIM_kind"]
    for axis, (window, title) in zip(axes, titles.items(), strict=True):
        x, y, heights = (arrays[f"{window}_{key}"] for key in "xyh")
        top = np.log10(heights.max())
        low = np.log10(numbers["gap_energy"]) - 1.2
        levels = np.logspace(low, top, 14)
        lines = axis.contour(x, y, heights, levels=levels, colors="0.72", linewidths=0.8)
        axis.clabel(lines, lines.levels[1::3], fmt="%.2g", fontsize=7)
        axis.plot(*arrays[f"{window}_gradient"].T, color="#009E73", linestyle="--", linewidth=1.4)
        path = arrays[f"{window}_path"]
        axis.plot(*path.T, color="0.25", linewidth=1.0, zorder=3)
        axis.scatter(
            *path[:-1].T, c=[KIND_COLORS[code] for code in kind], s=26, edgecolors="0.25",
            linewidths=0.6, zorder=4,
        )  # fmt: skip
        axis.plot(*arrays[f"{window}_end"], "x", color="black", markersize=9, zorder=6)
        _mark(axis, arrays[f"{window}_minimum"], "$y_h^*$", (6, -13))
        share = numbers[f"share_{window}"]
        axis.set_title(f"{title} ({share:.1%})", fontsize=10)
        axis.set_xlim(x[0], x[-1])
        axis.set_ylim(y[0], y[-1])
        axis.set_aspect("equal")
        axis.tick_params(labelsize=8)
        axis.set_xlabel("first direction, from $y_h^*$", fontsize=9)
        axis.set_ylabel("second direction", fontsize=9)
    _legend(
        figure,
        _STEP_LABELS,
        _end_line(),
        Line2D([], [], color="#009E73", linestyle="--", label="exact gradient of h"),
        Line2D([], [], color="0.72", label="$h - h^*$ in the plane"),
    )
    return figure


_STEP_LABELS = {
    0: "guaranteed by Lemma 4.3",
    1: "by Theorem 4.1",
    2: "fell anyway",
    3: "rose",
}


def _energy(numbers: dict[str, Any], arrays: Arrays) -> Figure:
    figure = blank(12.0, 5.2)
    left, right = figure.subplots(1, 2)
    figure.suptitle("The energy of the sum: AIM falls, then rises to its end", fontsize=12)
    clean(left, right)
    for name, (label, color, look) in _RUNS.items():
        above = arrays[f"{name}_energy"]
        rose = numbers["runs"][name]["rose"]
        left.plot(above, color=color, label=f"{label}: {rose} rises", **look)
    left.set_yscale("log")
    left.set_ylim(1e-10, None)
    left.set_ylabel("$h(y_t) - h^*$", fontsize=9)
    left.legend(fontsize=9)
    left.set_title("all algorithms", fontsize=10)
    above, kind = arrays["AIM_energy"], arrays["AIM_kind"]
    right.plot(above, color="0.25", linewidth=1.0, zorder=3)
    right.scatter(
        range(len(kind)), above[:-1], c=[KIND_COLORS[code] for code in kind], s=30,
        edgecolors="0.25", linewidths=0.6, zorder=4,
    )  # fmt: skip
    end, lowest = numbers["gap_energy"], numbers["runs"]["AIM"]["lowest"]
    right.axhline(end, color="black", linestyle=":", linewidth=1)
    right.annotate(
        "$h - h^*$ at the fixed point, by linear algebra", (len(kind), end), xytext=(0, 8),
        textcoords="offset points", ha="right", fontsize=9,
    )  # fmt: skip
    top = 1.8 * end
    right.set_ylim(min(lowest, end) - 0.1 * end, top)
    right.set_title(
        f"AIM, zoom: lowest at step {numbers['runs']['AIM']['lowest_step']}, "
        f"then up by {end - lowest:.3f}",
        fontsize=10,
    )
    right.set_ylabel("$h(y_t) - h^*$", fontsize=9)
    handles = [
        Line2D([], [], marker="o", linestyle="", color=KIND_COLORS[code], label=label,
               markeredgecolor="0.25")
        for code, label in _STEP_LABELS.items()
        if (kind[above[:-1] < top] == code).any()
    ]  # fmt: skip
    right.legend(handles=handles, title="the step from here", fontsize=9, title_fontsize=9)
    for axis in (left, right):
        axis.set_xlabel("step t", fontsize=9)
    return figure


# --- figure 4 ------------------------------------------------------------------------------------


def _proximal(numbers: dict[str, Any], arrays: Arrays) -> Figure:
    titles = {
        "inside": ("two channels, minimum inside", ("$y_1$", "$y_2$")),
        "border": ("two channels, minimum on the border", ("$y_1$", "$y_2$")),
        "slice": (
            "six tokens of four channels: $(1-s-t)\\,y_h^* + s\\,y_f^* + t\\,y_g^*$",
            ("$s$", "$t$"),
        ),
    }
    figure = blank(14.0, 5.9)
    figure.suptitle(
        r"One step of proximal AIM with ReLU, and the regions $D(a_2 \nabla h; y) \geq -\kappa$ "
        "of Theorem 5.1\n($y_f^*$, $y_g^*$, $y_h^*$: minima among states without a negative entry)",
        fontsize=12,
    )
    panels = numbers["panels"]
    axes = figure.subplots(1, len(panels))
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        title, (first, second) = titles[name]
        x = arrays[f"{name}_axis"]
        _kinds(axis, x, x, arrays[f"{name}_kind"])
        kappa = np.ma.masked_invalid(arrays[f"{name}_kappa"])
        lines = axis.contour(
            x, x, kappa, levels=[0.25, 0.5, 0.75, 0.95], colors="black", linewidths=0.9
        )
        axis.clabel(lines, fmt=r"$\kappa$ = %g", fontsize=7)
        for key, point in panel["minima"].items():
            _mark(axis, point, f"$y_{key}^*$")
        cells = sum(panel[key] for key in _CELLS)
        axis.set_title(
            f"{title}\nrose in {panel['rose']:,} of {cells:,} cells, "
            f"{panel['rose_in_outer']} of them guaranteed",
            fontsize=9,
        )
        axis.set_xlabel(first, fontsize=9)
        axis.set_ylabel(second, fontsize=9)
    _legend(
        figure,
        {
            0: "guaranteed as printed",
            1: "guaranteed with the sharp constant and $\\kappa$",
            2: "fell anyway",
            3: "rose",
            4: "not in the domain",
        },
    )
    return figure


# --- the printed Theorem 3.1 ---------------------------------------------------------------------


def _attention(numbers: dict[str, Any], arrays: Arrays) -> Figure:
    figure = blank(14.0, 5.0)
    axes = figure.subplots(1, 3)
    tokens = ", ".join(f"{token:g}" for token in numbers["tokens"])
    figure.suptitle(
        r"Attention and $E_\rho(Y) + |Y|^2/2$: the update of the printed Theorem 3.1, and the "
        "corrected one",
        fontsize=12,
    )
    clean(*axes[:2])
    looks = {
        "printed": (r"printed: $\mathrm{softmax}_\beta(YY^T)\,Y$", _PRINTED),
        "corrected": (r"corrected: $(2D + 1)^{-1}\,2WY$", _CORRECTED),
    }
    for name, (label, color) in looks.items():
        line = arrays[f"{name}_along"]
        axes[0].plot(arrays["along"], line, color=color, label=label)
        run = arrays[f"{name}_run"]
        axes[1].plot(run, "o-", color=color, markersize=4, label=label)
        axes[0].annotate(
            f"{line[-1]:+.4f}", (1, line[-1]), xytext=(-4, 6), textcoords="offset points",
            ha="right", fontsize=9, color=color, path_effects=_HALO,
        )  # fmt: skip
    for axis in axes[:2]:
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_yscale("symlog", linthresh=1.0)
        axis.set_yticks([-100, -10, -1, 0, 1], ["-100", "-10", "-1", "0", "1"])
        axis.set_ylim(-200, 2)
        axis.set_ylabel("change of the energy", fontsize=9)
    axes[0].set_title(f"tokens {tokens}: along the first update", fontsize=10)
    axes[0].set_xlabel("share of the update", fontsize=9)
    axes[0].legend(fontsize=9, loc="center right", bbox_to_anchor=(1.0, 0.52))
    axes[1].set_title(f"tokens {tokens}: over ten updates", fontsize=10)
    axes[1].set_xlabel("update", fontsize=9)
    change = arrays["change"]
    limit = float(change.max())
    shown = axes[2].pcolormesh(
        arrays["a"], arrays["b"], change, cmap="RdBu_r",
        norm=TwoSlopeNorm(0.0, -4 * limit, limit), shading="nearest", rasterized=True,
    )  # fmt: skip
    axes[2].contour(arrays["a"], arrays["b"], change, levels=[1e-9], colors="black", linewidths=0.8)
    first, _, third = numbers["tokens"]
    axes[2].plot(first, third, "o", color="black", markersize=4)
    axes[2].annotate(
        tokens, (first, third), xytext=(8, -12), textcoords="offset points", fontsize=9,
        path_effects=_HALO,
    )  # fmt: skip
    axes[2].set_title(
        f"tokens a, a, b, printed update: rises inside the line,\n"
        f"{numbers['rose']:,} of {numbers['cells']:,} cells",
        fontsize=10,
    )
    axes[2].set_xlabel("a", fontsize=9)
    axes[2].set_ylabel("b", fontsize=9)
    bar = figure.colorbar(shown, ax=axes[2], extend="min")
    bar.set_label("change of the energy", fontsize=9)
    for ticks in (*axes, bar.ax):
        ticks.tick_params(labelsize=8)
    return figure


_FIGURES: dict[str, dict[str, Callable[[dict[str, Any], Arrays], Figure]]] = {
    "regions": {"aim_regions.png": _regions},
    "trajectory": {"aim_trajectory.png": _trajectory, "aim_energy.png": _energy},
    "proximal": {"aim_proximal.png": _proximal},
    "attention": {"aim_attention.png": _attention},
}
