"""The figures of the study ``compare``, drawn from the content of its ``results.json``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from simulations.figures import band, blank, clean, save

# Okabe and Ito's palette, which stays distinct in every common form of colour blindness. Line style
# and marker serve print in grey.
STYLES: dict[str, dict[str, Any]] = {
    "plain": {"color": "#000000", "linestyle": "-", "marker": "o"},
    "mean_field": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    "mean_field_mixed": {"color": "#56B4E9", "linestyle": "-.", "marker": "D"},
    "steepest_descent": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
    "energy_descent": {"color": "#009E73", "linestyle": "-", "marker": "v"},
}
LABELS = {
    "plain": "plain Transformer",
    "mean_field": "mean field",
    "mean_field_mixed": "mean field, mixed heads",
    "steepest_descent": "steepest descent",
    "energy_descent": "energy descent",
}
_OTHERS = ("#CC79A7", "#E69F00", "#F0E442", "#999999")

Runs = list[dict[str, Any]]


def style(block: str, blocks: Sequence[str]) -> dict[str, Any]:
    """Colour, line and marker of a block; one that is not listed takes a free colour."""
    if block in STYLES:
        return {"markersize": 4.5, "linewidth": 1.6, **STYLES[block]}
    position = [name for name in blocks if name not in STYLES].index(block)
    color = _OTHERS[position % len(_OTHERS)]
    return {"markersize": 4.5, "linewidth": 1.6, "color": color, "linestyle": ":", "marker": "x"}


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """Draw every figure for which there is something to show; returns the files."""
    figures = {
        "learning_curves.png": _learning_curves,
        "accuracy_over_time.png": _accuracy_over_time,
        "energy_along_depth.png": _energy_along_depth,
        "rank_along_depth.png": _rank_along_depth,
    }
    made = {name: make(results) for name, make in figures.items()}
    return save({name: figure for name, figure in made.items() if figure is not None}, out)


def _runs(results: dict[str, Any], task: str, block: str) -> Runs:
    return [
        record
        for record in results["runs"]
        if record["job"]["task"] == task and record["job"]["block"] == block
    ]


def _figure(
    results: dict[str, Any], rows: int, title: str, side: str
) -> tuple[Figure, NDArray[Any]]:
    """Axes with a column for each task; ``side`` of the split is what is shown."""
    tasks = list(results["tasks"])
    figure = blank(1.2 + 4.6 * len(tasks), 1.3 + 2.9 * rows)
    axes = figure.subplots(rows, len(tasks), squeeze=False)
    figure.suptitle(title, fontsize=11)
    for column, task in enumerate(tasks):
        entry = results["tasks"][task]
        counts = sorted({len(row["seeds"]) for row in entry["blocks"].values()})
        seeds = "1 seed" if counts == [1] else f"{' to '.join(map(str, counts))} seeds a block"
        axes[0, column].set_title(
            f"{task}: {entry['title']}\n{side} side, n = {entry['examples'][side]:,}; {seeds}",
            fontsize=9,
        )
    clean(*axes.flat)
    return figure, axes


def _legend(figure: Figure, results: dict[str, Any], blocks: Sequence[str]) -> None:
    """Below the axes, where it covers no data."""
    every = _all_blocks(results)
    handles = [_handle(block, every) for block in every if block in blocks]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 3 if len(results["tasks"]) == 1 else 5),
        fontsize=8,
        frameon=False,
        handlelength=3.2,
    )


def _handle(block: str, blocks: Sequence[str]) -> Any:
    return Line2D([], [], label=LABELS.get(block, block), **style(block, blocks))


def _all_blocks(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(b for entry in results["tasks"].values() for b in entry["blocks"]))


def _learning_curves(results: dict[str, Any]) -> Figure:
    figure, axes = _figure(
        results,
        2,
        "Learning curves (line: mean over seeds, band: smallest to largest)",
        "validation",
    )
    blocks = _all_blocks(results)
    for column, task in enumerate(results["tasks"]):
        top, bottom = axes[:, column]
        for block in blocks:
            runs = _runs(results, task, block)
            if not runs:
                continue
            steps = np.array([point["step"] for point in runs[0]["curve"]])
            band(top, steps, _curves(runs, "train_loss"), style(block, blocks))
            band(bottom, steps, 100 * _curves(runs, "validation_accuracy"), style(block, blocks))
        top.set_ylabel("training loss [nats]", fontsize=9)
        bottom.set_ylabel("validation accuracy [%]", fontsize=9)
        bottom.set_xlabel("optimizer step", fontsize=9)
    _legend(figure, results, blocks)
    return figure


def _curves(runs: Runs, name: str) -> NDArray[Any]:
    return np.array([[point[name] for point in run["curve"]] for run in runs])


def _accuracy_over_time(results: dict[str, Any]) -> Figure:
    figure, axes = _figure(
        results,
        1,
        f"Accuracy against training time ({_machine(results)}; thin lines: single seeds)",
        "validation",
    )
    blocks = _all_blocks(results)
    for column, task in enumerate(results["tasks"]):
        axis = axes[0, column]
        for block in blocks:
            runs = _runs(results, task, block)
            if not runs:
                continue
            look = style(block, blocks)
            seconds, accuracy = _curves(runs, "seconds"), 100 * _curves(runs, "validation_accuracy")
            for x, y in zip(seconds, accuracy, strict=True):
                axis.plot(x, y, color=look["color"], linewidth=0.7, alpha=0.35)
            axis.plot(seconds.mean(axis=0), accuracy.mean(axis=0), **look)
        axis.set_xscale("log")
        axis.set_xlabel("training time, evaluation left out [s]", fontsize=9)
        axis.set_ylabel("validation accuracy [%]", fontsize=9)
    _legend(figure, results, blocks)
    return figure


def _machine(results: dict[str, Any]) -> str:
    threads = sorted({run["threads"] for run in results["runs"]})
    at_once = sorted({run["at_once"] for run in results["runs"]})
    return (
        f"{' or '.join(map(str, threads))} thread a run, {' or '.join(map(str, at_once))} at once"
    )


def _energy_along_depth(results: dict[str, Any]) -> Figure | None:
    blocks = _all_blocks(results)
    free = _having(results, blocks, "free_energy")
    descending = _having(results, blocks, "energy_after")
    kinds: list[tuple[list[str], str, Callable[..., None]]] = []
    if free:
        kinds.append((free, "free energy per token", _draw_free_energy))
    if descending:
        # Open and filled markers are named here: the legend speaks of blocks only.
        label = "energy per token\n(open: before the step, filled: after)"
        kinds.append((descending, label, _draw_energy))
    if not kinds:
        return None
    figure, axes = _figure(
        results, len(kinds), "Energies along depth (each layer has an energy of its own)", "test"
    )
    for row, (shown, label, draw_block) in enumerate(kinds):
        for column, task in enumerate(results["tasks"]):
            axis = axes[row, column]
            for block in shown:
                runs = _runs(results, task, block)
                if runs:
                    draw_block(axis, runs, block, blocks)
            axis.set_ylabel(label, fontsize=9)
            axis.set_xlabel("layers passed", fontsize=9)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.ticklabel_format(axis="y", useOffset=False)
    _legend(figure, results, [*free, *descending])
    return figure


def _having(results: dict[str, Any], blocks: Sequence[str], name: str) -> list[str]:
    return [
        block
        for block in blocks
        if any(
            run["test"]["depth"][name] is not None
            for run in results["runs"]
            if run["job"]["block"] == block
        )
    ]


def _depth(runs: Runs, name: str) -> NDArray[Any]:
    return np.array([run["test"]["depth"][name] for run in runs])


def _draw_free_energy(axis: Axes, runs: Runs, block: str, blocks: Sequence[str]) -> None:
    values = _depth(runs, "free_energy")
    band(axis, np.arange(1, values.shape[1] + 1), values, style(block, blocks))


def _draw_energy(axis: Axes, runs: Runs, block: str, blocks: Sequence[str]) -> None:
    """Each layer is a line from its energy before the step to its energy after."""
    look = style(block, blocks)
    before = _depth(runs, "energy_before").mean(axis=0)
    after = _depth(runs, "energy_after").mean(axis=0)
    for layer, (start, end) in enumerate(zip(before, after, strict=True), start=1):
        axis.plot([layer - 1, layer], [start, end], **look)
        axis.plot([layer - 1], [start], **{**look, "markerfacecolor": "white"})


def _rank_along_depth(results: dict[str, Any]) -> Figure:
    figure, axes = _figure(
        results, 1, "How far the tokens of a text or an image are from being all equal", "test"
    )
    blocks = _all_blocks(results)
    for column, task in enumerate(results["tasks"]):
        axis = axes[0, column]
        for block in blocks:
            runs = _runs(results, task, block)
            if not runs:
                continue
            values = _depth(runs, "rank")
            # Models of equal size may have unequal numbers of layers.
            band(axis, np.linspace(0, 1, values.shape[1]), values, style(block, blocks))
        axis.set_ylim(bottom=0)
        axis.set_xlabel("depth as a share of all layers", fontsize=9)
        axis.set_ylabel("relative rank residual", fontsize=9)
    _legend(figure, results, blocks)
    return figure
