r"""The magnetization as a partial and as a total derivative: both terms, and what each trains to.

Couplings that are computed from the field make :math:`-\mathrm dF/\mathrm dh` the sum of the
magnetization at fixed couplings and of what the couplings' own slope adds. The study checks the sum
by finite differences of F, measures the second term against the first (size, and angle) over
temperature, strength of the couplings and depth, and trains classifiers whose blocks return one or
the other. See ``docs/studies/total_derivative.md``.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import spinformer
from simulations import compare
from simulations.compare import TASKS, spread
from simulations.data import Dataset
from simulations.figures import band, blank, clean, save
from simulations.models import Classifier
from simulations.options import add_digits, add_fresh, add_jobs, add_seeds, add_texts
from simulations.runs import RunStore, write_json
from simulations.tables import align
from simulations.training import Job, evaluation_batches
from spinformer.nn import Encoder, FreeEnergyBlock

# Okabe and Ito's palette; style and marker for print in grey.
LOOKS: dict[str, dict[str, Any]] = {
    "mean_field": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    "tap": {"color": "#009E73", "linestyle": "-.", "marker": "D"},
    "adaptive_tap": {"color": "#CC79A7", "linestyle": ":", "marker": "v"},
    "steepest_descent": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
}
LABELS = {
    "mean_field": "mean field",
    "tap": "TAP",
    "adaptive_tap": "adaptive TAP",
    "steepest_descent": "steepest descent",
}
# Names in simulations.models of the two blocks of an approximation.
PAIRS = {
    "mean_field": ("mean_field_symmetric", "mean_field_total"),
    "steepest_descent": ("steepest_descent", "steepest_descent_total"),
}
DERIVATIVES = ("partial", "total")


@dataclass(frozen=True)
class Grid:
    """What the terms are measured on.

    Attributes:
        d_model, nhead, tokens, batch: of the random tokens.
        blocks: draws of parameters, over which is averaged.
        betas: inverse temperatures, at coupling strength 1/2.
        strengths: row sums of J, at beta = 1.
        layers: depth of the stack.
    """

    d_model: int
    nhead: int
    tokens: int
    batch: int
    blocks: int
    betas: tuple[float, ...]
    strengths: tuple[float, ...]
    layers: int


def _geometric(low: float, high: float, count: int) -> tuple[float, ...]:
    ratio = (high / low) ** (1 / (count - 1))
    return tuple(low * ratio**i for i in range(count))


FULL = Grid(64, 4, 32, 8, 2, _geometric(0.05, 3.2, 13), _geometric(0.05, 3.2, 13), 8)
QUICK = Grid(32, 4, 16, 2, 1, _geometric(0.1, 3.2, 6), _geometric(0.1, 3.2, 6), 4)


class TotalDerivative:
    """The study ``total_derivative``."""

    name = "total_derivative"
    description = "what couplings that depend on the field add to the magnetization"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the study."""
        parser.add_argument(
            "--task",
            choices=(*TASKS, "all", "none"),
            help="what to train on (default: all; --quick: digits)",
        )
        add_seeds(parser, 3, 1)
        add_jobs(parser)
        add_fresh(parser)
        add_texts(parser)
        add_digits(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Check, measure, train what is not trained yet; write figures and ``results.json``."""
        started = time.monotonic()
        grid = QUICK if args.quick else FULL
        results: dict[str, Any] = {
            "study": self.name,
            "versions": {
                "spinformer": spinformer.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "finite_differences": finite_differences(args.seed),
            "terms": measure(grid, args.seed),
        }
        if args.task is None:
            args.task = "digits" if args.quick else "all"
        status = train(args, results) if args.task != "none" else 0
        write_json(args.out / "results.json", results)
        drawn = draw(results, args.out)
        print("figures:", ", ".join(str(path) for path in drawn))
        print(f"results: {args.out / 'results.json'} ({time.monotonic() - started:.0f} s)")
        return status


STUDY = TotalDerivative()


# The check ---------------------------------------------------------------------------------------


def finite_differences(seed: int) -> dict[str, dict[str, float]]:
    """Each approximation's output against central differences of its F in the tokens, float64."""
    step, tokens, d_model = 1e-4, 6, 8
    found = {}
    for approximation in LABELS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            block = FreeEnergyBlock(
                d_model,
                2,
                approximation,  # type: ignore[arg-type]
                "symmetric",
                derivative="total",
                tolerance=1e-12,
                max_iterations=2000,
                on_failure="raise",
                dtype=torch.float64,
            )
            x = torch.randn(tokens, d_model, dtype=torch.float64)
        moves = step * torch.eye(tokens * d_model, dtype=x.dtype).view(-1, tokens, d_model)
        with torch.no_grad():
            out, report = block(x, return_report=True)
            plus, minus = (block(x + sign * moves, return_report=True)[1] for sign in (1, -1))
        slope = -(plus.free_energy - minus.free_energy).sum(-1).view_as(out) / (2 * step)
        found[approximation] = {
            "largest_error": float((slope - out).abs().max()),
            "without_second_term": float((slope - out + report.coupling_term[0]).abs().max()),
        }
    rows: list[tuple[str, ...]] = [
        ("-dF/dx by central differences", "error", "without the second term")
    ]
    for approximation, errors in found.items():
        rows.append((LABELS[approximation], *(f"{error:.1e}" for error in errors.values())))
    print(align(rows[0], rows[1:]), "\n")
    return found


# The two terms -----------------------------------------------------------------------------------


def compared(m: Tensor, term: Tensor) -> tuple[Tensor, Tensor]:
    """|second| / |first| and the angle between them in degrees, one a sequence."""
    size = torch.linalg.vector_norm(term, dim=(-2, -1)) / torch.linalg.vector_norm(m, dim=(-2, -1))
    cosine = (m * term).sum((-2, -1)) / (
        torch.linalg.vector_norm(term, dim=(-2, -1)) * torch.linalg.vector_norm(m, dim=(-2, -1))
    )
    return size, torch.rad2deg(torch.arccos(cosine.clamp(-1, 1)))


def _summary(size: Tensor, angle: Tensor) -> dict[str, float | None]:
    """Means over the sequences that have both; None where fewer than half do."""
    good = torch.isfinite(size) & torch.isfinite(angle)
    if not good.numel() or float(good.double().mean()) < 0.5:
        return {"size": None, "angle": None}
    return {"size": float(size[good].mean()), "angle": float(angle[good].mean())}


def _of_block(block: FreeEnergyBlock, x: Tensor) -> tuple[Tensor, Tensor]:
    out, report = block(x, return_report=True)
    term = report.coupling_term
    size, angle = compared(out - term, term)
    solved = report.converged.all(-1)
    return torch.where(solved, size, torch.nan), torch.where(solved, angle, torch.nan)


def _block(approximation: str, grid: Grid, **options: Any) -> FreeEnergyBlock:
    return FreeEnergyBlock(
        grid.d_model,
        grid.nhead,
        approximation,  # type: ignore[arg-type]
        "symmetric",
        derivative=options.pop("derivative", "total"),
        on_failure="ignore",
        **options,
    )


def measure(grid: Grid, seed: int) -> dict[str, Any]:
    """Size and angle over beta, over the strength of the couplings, and along an untrained stack.

    The tokens are independent normal numbers. Systems whose equations were not solved are left out.
    """
    found: dict[str, Any] = {"grid": grid.__dict__, "beta": {}, "strength": {}, "depth": {}}
    bar = tqdm(total=4 * (len(grid.betas) + len(grid.strengths)) + 4, desc="terms", leave=False)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), bar:
        torch.manual_seed(seed)
        x = torch.randn(grid.batch, grid.tokens, grid.d_model)
        for approximation in LABELS:
            for axis, values in (("beta", grid.betas), ("strength", grid.strengths)):
                points = []
                for value in values:
                    parts = []
                    for draw_ in range(grid.blocks):
                        torch.manual_seed(seed + draw_)
                        block = _block(approximation, grid, beta=value if axis == "beta" else 1.0)
                        couplings: Any = block.self_attn
                        if axis == "strength":
                            nn.init.constant_(couplings.strength, value)
                        parts.append(_of_block(block, x))
                    points.append(_summary(*(torch.cat(p) for p in zip(*parts, strict=True))))
                    bar.update()
                found[axis][approximation] = {"at": list(values), "points": points}
        for approximation in PAIRS:
            for derivative in DERIVATIVES:
                torch.manual_seed(seed)
                stack = Encoder(_block(approximation, grid, derivative=derivative), grid.layers)
                found["depth"].setdefault(approximation, {})[derivative] = along_depth(stack, x)
                bar.update()
    return found


@torch.no_grad()
def along_depth(stack: Encoder, x: Tensor, absent: Tensor | None = None) -> list[dict[str, Any]]:
    """Size and angle of the terms at every layer, for what that layer reads in the stack as it is.

    A stack of partial derivatives has no second term: it is the one that it would have.
    """
    found = []
    layer: Any
    for layer in stack.layers:
        given = layer.derivative
        layer.derivative = "total"
        try:
            found.append(_summary(*_of_masked(layer, x, absent)))
        finally:
            layer.derivative = given
        x = layer(x, src_key_padding_mask=absent)
    return found


def _of_masked(layer: Any, x: Tensor, absent: Tensor | None) -> tuple[Tensor, Tensor]:
    out, report = layer(x, src_key_padding_mask=absent, return_report=True)
    return compared(out - report.coupling_term, report.coupling_term)


# Training ----------------------------------------------------------------------------------------


def train(args: argparse.Namespace, results: dict[str, Any]) -> int:
    """Train every pair of blocks on every task and seed; fills ``results["tasks"]``."""
    blocks = [block for pair in PAIRS.values() for block in pair]
    datasets, jobs, store, outcome = compare.train(args, blocks)
    results["tasks"] = {}
    for task, dataset in datasets.items():
        entry: dict[str, Any] = {"title": dataset.title, "approximations": {}}
        for approximation, pair in PAIRS.items():
            both = {}
            for derivative, block in zip(DERIVATIVES, pair, strict=True):
                done = [
                    (job, outcome.done[job])
                    for job in jobs
                    if (job.task, job.block) == (task, block) and job in outcome.done
                ]
                if done:
                    both[derivative] = _row(done, dataset, store)
            if len(both) == 2:
                entry["approximations"][approximation] = both
        results["tasks"][task] = entry
        print(f"\n{task}: {entry['title']}\n{render(entry)}\n")
    results |= outcome.summary()
    return outcome.status()


def _row(
    done: Sequence[tuple[Job, dict[str, Any]]], dataset: Dataset, store: RunStore
) -> dict[str, Any]:
    """What the runs of one block give, and the terms in its models before and after training."""
    before, after = [], []
    for job, _ in done:
        model = job.initial(dataset).eval()
        before.append(_in_model(model, dataset))
        model.load_state_dict(torch.load(store.state_path(job), weights_only=True))
        after.append(_in_model(model, dataset))
    records = [record for _, record in done]
    return {
        "seeds": [job.seed for job, _ in done],
        "parameters": records[0]["parameters"],
        "accuracy": spread([record["test"]["accuracy"] for record in records]),
        "loss": spread([record["test"]["loss"] for record in records]),
        "ms_per_step": statistics.median(record["ms_per_step"] for record in records),
        "converged": statistics.fmean(record["test"]["converged"] for record in records),
        "at_once": max(record["at_once"] for record in records),
        "curves": [record["curve"] for record in records],
        "terms": {"before": before, "after": after},
    }


@torch.no_grad()
def _in_model(model: Classifier, dataset: Dataset) -> list[dict[str, Any]]:
    """Size and angle at every layer, on the first batch of the test side."""
    batch = next(evaluation_batches(dataset, dataset.test))
    return along_depth(model.encoder, model.tokens(batch), batch.absent)


def render(entry: dict[str, Any]) -> str:
    """The table of one task."""
    rows = [
        (
            "block",
            "derivative",
            "parameters",
            "test acc. [%]",
            "total - partial",
            "test loss",
            "ms/step",
            "2nd/1st before",
            "after",
            "angle before",
            "after",
        )
    ]
    for approximation, both in entry["approximations"].items():
        for derivative, row in both.items():
            paired = "-"
            if derivative == "total":
                paired = _pm(paired_difference(both), 100, "+.2f")
            rows.append(
                (
                    LABELS[approximation],
                    derivative,
                    f"{row['parameters']:,}",
                    _pm(row["accuracy"], 100, ".2f"),
                    paired,
                    _pm(row["loss"], 1, ".3f"),
                    f"{row['ms_per_step']:.1f}",
                    *(
                        _layers(row["terms"][when], key, form)
                        for key, form in (("size", ".3f"), ("angle", ".0f"))
                        for when in ("before", "after")
                    ),
                )
            )
    return align(rows[0], rows[1:])


def paired_difference(both: dict[str, Any]) -> dict[str, Any]:
    """Accuracy of total minus that of partial, seed by seed."""
    partial, total = (
        dict(zip(both[name]["seeds"], both[name]["accuracy"]["values"], strict=True))
        for name in DERIVATIVES
    )
    return spread([total[seed] - partial[seed] for seed in total if seed in partial])


def _layers(runs: list[list[dict[str, Any]]], key: str, form: str) -> str:
    """Means over seeds, one a layer."""
    means = [_mean([layer[key] for layer in layers]) for layers in zip(*runs, strict=True)]
    return ", ".join("-" if math.isnan(mean) else f"{mean:{form}}" for mean in means)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else math.nan


def _pm(entry: dict[str, Any], scale: float, form: str) -> str:
    text = f"{scale * entry['mean']:{form}}"
    if entry["std"] is None:
        return text
    return f"{text} ± {scale * entry['std']:{form.lstrip('+')}}"


# Figures -----------------------------------------------------------------------------------------


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """Write the figures; returns the files."""
    figures = {"terms.png": _draw_terms(results["terms"])}
    if any(entry["approximations"] for entry in results.get("tasks", {}).values()):
        figures["training.png"] = _draw_training(results["tasks"])
    return save(figures, out)


def _column(points: list[dict[str, Any]], key: str) -> list[float]:
    return [math.nan if point[key] is None else point[key] for point in points]


def _draw_terms(terms: dict[str, Any]) -> Figure:
    grid = terms["grid"]
    figure = blank(12.0, 6.4)
    axes = figure.subplots(2, 3, squeeze=False)
    clean(*axes.flat)
    figure.suptitle(
        "The second term, of the couplings' dependence on the tokens, against the magnetization\n"
        f"untrained blocks, {grid['tokens']} random tokens, d_model {grid['d_model']}, "
        f"{grid['nhead']} heads",
        fontsize=11,
    )
    for column, (axis_name, title) in enumerate(
        (
            ("beta", r"inverse temperature $\beta$ (row sums of J: 1/2)"),
            ("strength", r"row sums of J ($\beta = 1$)"),
        )
    ):
        for row, key in enumerate(("size", "angle")):
            axis = axes[row, column]
            for approximation, found in terms[axis_name].items():
                axis.plot(
                    found["at"],
                    _column(found["points"], key),
                    label=LABELS[approximation],
                    markersize=4,
                    linewidth=1.5,
                    **LOOKS[approximation],
                )
            axis.set_xscale("log")
            axis.set_xlabel(title, fontsize=9)
    for row, key in enumerate(("size", "angle")):
        axis = axes[row, 2]
        for approximation, stacks in terms["depth"].items():
            for derivative, points in stacks.items():
                axis.plot(
                    range(1, len(points) + 1),
                    _column(points, key),
                    label=f"{LABELS[approximation]}, stack of {derivative} derivatives",
                    markersize=4,
                    linewidth=1.5,
                    **(LOOKS[approximation] | _fill(derivative)),
                )
        axis.set_xlabel("layer of an untrained stack", fontsize=9)
        axis.set_xticks(range(1, grid["layers"] + 1))
    for axis in axes[0]:
        axis.set_ylabel("|second| / |first|", fontsize=9)
        axis.set_ylim(bottom=0)
    for axis in axes[1]:
        _angles(axis)
    axes[0, 0].legend(fontsize=8, frameon=False)
    axes[0, 2].legend(fontsize=7, frameon=False)
    return figure


def _fill(derivative: str) -> dict[str, Any]:
    """Open markers and thin lines for the partial derivative."""
    return {"markerfacecolor": "white", "alpha": 0.7} if derivative == "partial" else {}


def _angles(axis: Axes) -> None:
    axis.axhline(90, color="0.5", linewidth=0.8)
    # A range that does not blow a degree up.
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 70), max(high, 110))
    axis.set_ylabel("angle between them [degrees]", fontsize=9)


def _draw_training(tasks: dict[str, Any]) -> Figure:
    shown = {task: entry for task, entry in tasks.items() if entry["approximations"]}
    figure = blank(2.4 + 4.6 * len(shown), 7.0)
    axes = figure.subplots(2, len(shown), squeeze=False)
    clean(*axes.flat)
    figure.suptitle(
        "Training with the partial (open marks) and the total derivative (filled)\n"
        "lines: means over seeds; bands: smallest to largest\n"
        "below: with the partial derivative, the second term that there would be",
        fontsize=10,
    )
    for column, (task, entry) in enumerate(shown.items()):
        top, bottom = axes[:, column]
        top.set_title(f"{task}: {entry['title']}", fontsize=9)
        for approximation, both in entry["approximations"].items():
            for derivative, row in both.items():
                look = {"markersize": 4.5, "linewidth": 1.5}
                look |= LOOKS[approximation] | _fill(derivative)
                label = f"{LABELS[approximation]}, {derivative}"
                steps = [point["step"] for point in row["curves"][0]]
                curves = [
                    [100 * point["validation_accuracy"] for point in curve]
                    for curve in row["curves"]
                ]
                band(top, steps, curves, {**look, "label": label})
                runs = row["terms"]["after"]
                layers = list(range(1, len(runs[0]) + 1))
                band(bottom, layers, [_column(run, "size") for run in runs], look)
        top.set_xlabel("optimizer step", fontsize=9)
        top.set_ylabel("validation accuracy [%]", fontsize=9)
        untrained = [
            run
            for both in entry["approximations"].values()
            for run in both["total"]["terms"]["before"]
        ]
        means = [_mean([run[i]["size"] for run in untrained]) for i in range(len(layers))]
        bottom.plot(layers, means, color="0.5", linewidth=1.0, label="before training")
        bottom.legend(fontsize=8, frameon=False)
        bottom.set_xlabel("layer", fontsize=9)
        bottom.set_xticks(layers)
        bottom.set_xlim(0.8, len(layers) + 0.2)
        bottom.set_ylabel("|second| / |first|", fontsize=9)
        bottom.set_ylim(bottom=0)
        top.legend(fontsize=8, frameon=False)
    return figure
