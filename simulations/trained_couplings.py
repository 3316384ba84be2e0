r"""Where trained blocks live on the map of errors, and whether their approximation is right there.

Every layer and head of a trained model poses a spin system to every input: couplings J, fields h
and beta of real texts and images. The study takes them out of the models of ``compare``, before and
after training, places them on the plane of :mod:`simulations.maps`, and measures what their block's
approximation is wrong by: against equilibrium where couplings are symmetric, against the steady
state of parallel dynamics where they are those of softmax. See
``docs/studies/trained_couplings.md``.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from torch import Tensor
from tqdm import tqdm

import spinformer as sf
from simulations import fidelity
from simulations.compare import TASKS, load, train
from simulations.data import Dataset
from simulations.figures import blank, clean, save
from simulations.maps import (
    COLORS,
    SCALE,
    Errors,
    Sampling,
    coupling_strength,
    draw_contours,
    field_strength,
    loop_strength,
    relative_errors,
    sample_equilibrium,
    sample_steady,
)
from simulations.models import Batch, Classifier, Shape, Size
from simulations.options import add_digits, add_jobs, add_texts, positive
from simulations.results import conclude, until_interrupted
from simulations.runs import replaced, write_text
from simulations.tables import align
from simulations.training import Budget, Job, make_batch
from spinformer.dynamics.kinetic import KineticTAP
from spinformer.errors import SpinformerError
from spinformer.spins.couplings import Dense

__all__ = ["STUDY", "Posed", "checkpoints", "measure", "posed"]

# Blocks of `compare` whose layers solve a spin system, and the approximation that each uses.
BLOCKS = {
    "mean_field": "mean field",
    "mean_field_mixed": "mean field",
    "steepest_descent": "SD0",
}
_ALTERNATIVES: dict[str, Callable[[], Any]] = {
    "mean field": lambda: sf.MeanField(solver="anderson", on_failure="ignore"),
    "TAP": lambda: sf.TAP(solver="anderson", on_failure="ignore"),
    "adaptive TAP": lambda: sf.AdaptiveTAP(on_failure="ignore"),
    "SD1": lambda: sf.SteepestDescent(fluctuations=True, on_failure="ignore"),
}


class NoCheckpointsError(SpinformerError):
    """There is no trained model to look at."""


@dataclass(frozen=True)
class Plan:
    """How much is looked at, and for how long it is sampled.

    Attributes:
        inputs: texts and images of the test side for each task.
        seeds: models of each kind at most.
        equilibrium, steady: of the systems of blocks.
        background: the generic maps behind the points.
    """

    inputs: int
    seeds: int
    equilibrium: Sampling
    steady: Sampling
    background: fidelity.Plan


def _background(points: tuple[int, int], equilibrium: Sampling, steady: Sampling) -> fidelity.Plan:
    return fidelity.Plan(
        coupling=tuple(np.geomspace(0.3, 3.5, points[0]).tolist()),
        field=tuple(np.geomspace(0.4, 2.5, points[1]).tolist()),
        num_spins=16,
        dims=(16, 64),
        families=("attention",),
        sampling=lambda dim: equilibrium,
        steady=lambda dim: steady,
    )


FULL = Plan(
    inputs=8,
    seeds=3,
    equilibrium=Sampling(8, 500, 100),
    steady=Sampling(8, 1500, 200),
    background=_background((12, 8), Sampling(8, 1200, 200), Sampling(8, 4000, 200)),
)
QUICK = Plan(
    inputs=2,
    seeds=1,
    equilibrium=Sampling(8, 80, 30),
    steady=Sampling(8, 160, 40),
    background=_background((6, 4), Sampling(8, 120, 30), Sampling(8, 400, 50)),
)


# --- models -------------------------------------------------------------------------------------


def checkpoints(directory: Path) -> list[tuple[Job, Path]]:
    """The finished runs in ``DIRECTORY/runs`` of blocks that solve spin systems.

    Of several runs of one job (of earlier versions of the code), the last.

    Raises:
        NoCheckpointsError: there is none.
    """
    found: dict[Job, tuple[float, Path]] = {}
    for path in sorted((directory / "runs").glob("*.json")):
        state = path.with_suffix(".pt")
        settings = json.loads(path.read_text(encoding="utf-8"))["job"]
        if settings.get("block") not in BLOCKS or not state.is_file():
            continue
        shape, size, budget = settings["shape"], settings["size"], settings["budget"]
        job = Job(
            settings["task"],
            settings["block"],
            settings["seed"],
            Shape(**{**shape, "reference": Size(**shape["reference"])}),
            Size(**size),
            Budget(**budget),
        )
        age = state.stat().st_mtime
        if job not in found or age > found[job][0]:
            found[job] = (age, state)
    if not found:
        raise NoCheckpointsError(
            f"no trained models in {directory / 'runs'}: train them first with `python -m "
            f"simulations compare --out {directory}`, name another directory with --checkpoints, "
            "or let --quick train small ones"
        )
    return [(job, state) for job, (_, state) in found.items()]


def restored(job: Job, path: Path, dataset: Dataset) -> Classifier:
    """A model as it was trained.

    Raises:
        NoCheckpointsError: its parameters are those of other code or data.
    """
    model = job.initial(dataset)
    try:
        model.load_state_dict(torch.load(path, weights_only=True))
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise NoCheckpointsError(
            f"{path} does not fit the model of this version and these data: run `python -m "
            f"simulations compare --fresh` again, or give the data that it was trained on ({error})"
        ) from error
    return model.eval()


# --- what a block solves ------------------------------------------------------------------------


@dataclass(frozen=True)
class Posed:
    """A layer's spin systems for some inputs, and the answer that the block went on with.

    Attributes:
        system: (inputs, heads) systems, or (inputs,) where heads are mixed.
        magnetization: the block's (..., N, D).
        solved: (...) bool.
    """

    system: sf.SpinSystem
    magnetization: Tensor
    solved: Tensor


@contextmanager
def _watched(model: Classifier) -> Iterator[list[tuple[sf.SpinSystem, Any]]]:
    """Collects every system that a block hands to its approximation, with the answer."""
    seen: list[tuple[sf.SpinSystem, Any]] = []
    approximations: dict[int, Any] = {}
    for layer in model.encoder.layers:
        approximation: Any = layer.approximation
        approximations[id(approximation)] = approximation

    def watch(own: Callable[..., Any]) -> Callable[..., Any]:
        def solve(system: sf.SpinSystem, initial: Tensor | None = None) -> Any:
            answer = own(system, initial)
            seen.append((system, answer))
            return answer

        return solve

    for approximation in approximations.values():
        vars(approximation)["solve"] = watch(approximation.solve)
    try:
        yield seen
    finally:
        for approximation in approximations.values():
            del vars(approximation)["solve"]


@torch.no_grad()
def posed(model: Classifier, batch: Batch) -> list[Posed]:
    """The spin systems of every layer, in order."""
    with _watched(model) as seen:
        model(batch)
    layers = []
    for system, answer in seen:
        plain = system
        if system.couplings.dim is None:
            # Written out: what samples and compares them reads them many times.
            plain = system.replace(couplings=Dense(system.couplings.to_dense()))
        layers.append(Posed(plain, answer.magnetization, answer.converged))
    return layers


# --- errors -------------------------------------------------------------------------------------


@torch.no_grad()
def measure(
    layers: Sequence[Posed], plan: Plan, seed: int, moved: Callable[[int], object] | None = None
) -> list[dict[str, Any]]:
    """Where the systems of each layer are, and the relative errors of m: arrays, one a system.

    Layers of one shape, which are sampled together.
    """
    if layers[0].system.couplings.dim is not None:
        # Mixed heads are not written out, so that each layer has couplings of its own kind.
        watched = _shared(moved, len(layers))
        return [found for layer in layers for found in _measure([layer], plan, seed, watched)]
    return _measure(layers, plan, seed, moved)


def _shared(moved: Callable[[int], object] | None, count: int) -> Callable[[int], object] | None:
    """What counts a sweep of one layer as a part of one of all."""
    if moved is None:
        return None
    done = 0

    def watched(sweeps: int) -> None:
        nonlocal done
        before, done = done // count, done + sweeps
        moved(done // count - before)

    return watched


def _measure(
    layers: Sequence[Posed], plan: Plan, seed: int, moved: Callable[[int], object] | None
) -> list[dict[str, Any]]:
    system = _together([layer.system for layer in layers])
    shape = layers[0].solved.shape
    symmetric = system.couplings.is_symmetric
    if symmetric:
        truth = sample_equilibrium(system, plan.equilibrium, seed, moved)
    else:
        truth = sample_steady(system, plan.steady, seed, moved)
    own = torch.stack([layer.magnetization for layer in layers]).double().reshape_as(system.field)
    solved = torch.stack([layer.solved for layer in layers]).reshape(system.batch_shape)
    answers: dict[str, tuple[Tensor, Tensor]] = {"block": (own, solved)}
    if symmetric:
        sphere = system.replace(site=sf.Sphere(system.dim, system.site.radius))
        for name, make in _ALTERNATIVES.items():
            answer = make().solve(sphere)
            answers[name] = (answer.magnetization, answer.converged)
    elif system.couplings.dim is None:
        kinetic = KineticTAP(solver="anderson", on_failure="ignore").steady_state(system)
        answers["kinetic TAP"] = (kinetic.magnetization, kinetic.solution.converged)
    errors = {
        name: relative_errors(m, truth.magnetization, known, 2)
        for name, (m, known) in answers.items()
    }
    heads = shape[1] if len(shape) > 1 else 1
    every = {
        "coupling": coupling_strength(system),
        "field": field_strength(system),
        "loop": loop_strength(system, own),
        "spins": system.num_present,
        "beta": system.beta,
    }
    count = shape.numel()

    def part(number: int, values: Any) -> Any:
        return values.reshape(-1)[number * count : (number + 1) * count]

    return [
        {
            **{name: part(number, values.numpy()) for name, values in every.items()},
            "head": np.tile(np.arange(heads), count // heads),
            "dim": system.dim,
            "symmetric": symmetric,
            "errors": {
                name: Errors(part(number, e.squared), part(number, e.noise), part(number, e.solved))
                for name, e in errors.items()
            },
        }
        for number in range(len(layers))
    ]


def _together(systems: Sequence[sf.SpinSystem]) -> sf.SpinSystem:
    """Systems of one shape as one batch, in float64."""
    first = systems[0]
    if len(systems) == 1:
        return _double(first)
    masks = (
        None if first.mask is None else torch.stack([s.mask for s in systems if s.mask is not None])
    )
    return _double(
        sf.SpinSystem(
            Dense(torch.stack([system.couplings.to_dense() for system in systems])),
            torch.stack([system.field for system in systems]),
            torch.stack([system.beta for system in systems]),
            first.site,
            mask=masks,
        )
    )


def _double(system: sf.SpinSystem) -> sf.SpinSystem:
    couplings = system.couplings
    return sf.SpinSystem(
        couplings.with_tensors(*(tensor.double() for tensor in couplings.tensors())),
        system.field.double(),
        system.beta.double(),
        system.site,
        mask=system.mask,
    )


def _inputs(dataset: Dataset, count: int, seed: int) -> Batch:
    """Examples of the test side."""
    random = np.random.default_rng(seed)
    chosen = np.sort(random.choice(len(dataset.test), min(count, len(dataset.test)), replace=False))
    return make_batch(dataset.test, chosen, dataset.vectors is not None)


# --- tables and pictures ------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A layer of the models of one kind: all seeds, heads and inputs.

    Attributes:
        task, block, layer, trained: which.
        found: what :func:`measure` returns, one dictionary a seed.
    """

    task: str
    block: str
    layer: int
    trained: bool
    found: tuple[dict[str, Any], ...]

    def values(self, name: str) -> Any:
        """A property of all systems."""
        return np.concatenate([entry[name] for entry in self.found])

    def errors(self, name: str) -> Errors:
        """The errors of all systems."""
        parts = [entry["errors"][name] for entry in self.found]
        return Errors(
            np.concatenate([part.squared for part in parts]),
            np.concatenate([part.noise for part in parts]),
            np.concatenate([part.solved for part in parts]),
        )

    @property
    def methods(self) -> tuple[str, ...]:
        """The block's own, and those that it could have used."""
        return tuple(self.found[0]["errors"])


def typical(errors: Errors) -> tuple[float, float] | None:
    """Root of the mean squared error over the systems that have one, and what is seen of it.

    The noise of single systems averages out of the mean of squares; the second number is twice the
    standard error of that mean, as an error.
    """
    known = errors.solved & np.isfinite(errors.squared)
    count = int(known.sum())
    if not count:
        return None
    mean = float(errors.squared[known].mean())
    spread = float(np.sqrt(np.square(errors.noise[known]).sum())) / count
    return float(np.sqrt(max(mean, 0.0))), float(np.sqrt(2 * spread))


def _percent(errors: Errors) -> str:
    found = typical(errors)
    if found is None:
        return "-"
    error, resolution = found
    return f"{100 * error:.2g} %" if error > resolution else f"<{100 * resolution:.1g} %"


def gather(measured: Sequence[tuple[Job, int, bool, dict[str, Any]]]) -> list[Row]:
    """Rows in a fixed order, of what was measured model by model and layer by layer."""
    keys = dict.fromkeys((j.task, j.block, layer, trained) for j, layer, trained, _ in measured)
    order = sorted(keys, key=lambda k: (TASKS.index(k[0]), list(BLOCKS).index(k[1]), k[2], k[3]))
    return [
        Row(*key, tuple(f for j, n, t, f in measured if (j.task, j.block, n, t) == key))
        for key in order
    ]


def summarize(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What ``results.json`` says of every row; all points are in ``points.npz``."""
    return [
        {
            "task": row.task,
            "block": row.block,
            "layer": row.layer + 1,
            "trained": row.trained,
            "systems": len(row.values("coupling")),
            "solved": float(row.errors("block").solved.mean()),
            **{
                name: [float(q) for q in np.quantile(row.values(name), (0.05, 0.5, 0.95))]
                for name in ("coupling", "field", "loop", "beta", "spins")
            },
            "errors": {name: typical(row.errors(name)) for name in row.methods},
            "seen": float(row.errors("block").seen.mean()),
        }
        for row in rows
    ]


def render(rows: Sequence[Row]) -> str:
    """The table: where each layer is, before and after training, and what is wrong there."""
    others = [name for name in dict.fromkeys(n for r in rows for n in r.methods) if name != "block"]
    header = ("task, block, layer", "", "K", "H", "k", "beta", "own error", *others)

    lines = []
    for row in rows:
        middle = {
            name: np.quantile(row.values(name), (0.05, 0.5, 0.95))
            for name in ("coupling", "field", "loop", "beta")
        }
        lines.append(
            (
                f"{row.task}, {row.block} ({BLOCKS[row.block]}), {row.layer + 1}",
                "trained" if row.trained else "initial",
                "{1:.2f} ({0:.2f}-{2:.2f})".format(*middle["coupling"]),
                "{1:.2f} ({0:.2f}-{2:.2f})".format(*middle["field"]),
                "{1:.2f} ({0:.2f}-{2:.2f})".format(*middle["loop"]),
                f"{middle['beta'][1]:.2f}",
                _percent(row.errors("block")),
                *(_percent(row.errors(name)) if name in row.methods else "" for name in others),
            )
        )
    return align(header, lines) + (
        "\n\nMedian (5 % - 95 %) over seeds, heads and inputs. K, H: coupling and field (K = 1: "
        "mean field orders\nby itself); k: loop strength. Errors of m: root of the mean square, "
        "less the noise."
    )


_LAYERS = ("o", "^", "s")


def draw(rows: Sequence[Row], panels: Sequence[fidelity.Panel], out: Path) -> list[Path]:
    """The plane, a panel a task and block: initial points hollow, trained ones filled."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    blocks = list(dict.fromkeys(row.block for row in rows))
    figure = blank(1.8 + 3.6 * len(blocks), 1.8 + 3.2 * len(tasks))
    figure.suptitle(
        "Where do trained blocks live, and is their approximation right there?\n"
        "A point a (layer, head, input): colour is the measured error of its magnetizations",
        fontsize=12,
    )
    axes = figure.subplots(len(tasks), len(blocks), squeeze=False, sharex=True, sharey=True)
    low, high = _limits(rows)
    for r, task in enumerate(tasks):
        for c, block in enumerate(blocks):
            axis = axes[r, c]
            own = [row for row in rows if (row.task, row.block) == (task, block)]
            if not own:
                axis.set_visible(False)
                continue
            _background_lines(axis, own[0], panels)
            for row in sorted(own, key=lambda row: row.trained):
                _points(axis, row)
            for layer in sorted({row.layer for row in own}):
                _arrow(axis, [row for row in own if row.layer == layer])
            axis.axvline(1.0, color="0.4", linewidth=1.0, linestyle=":")
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xlim(low[0], high[0])
            axis.set_ylim(low[1], high[1])
            axis.set_xticks(_ticks(low[0], high[0]), [f"{x:g}" for x in _ticks(low[0], high[0])])
            axis.set_yticks(_ticks(low[1], high[1]), [f"{x:g}" for x in _ticks(low[1], high[1])])
            axis.minorticks_off()
            axis.tick_params(labelsize=8)
            axis.set_title(_title(task, own[-1]), fontsize=9)
            if r == len(tasks) - 1:
                axis.set_xlabel(r"coupling $K=\beta\lambda R^2/D$", fontsize=9)
            if c == 0:
                axis.set_ylabel(r"field $H=\beta h R/D$", fontsize=9)
    bar = figure.colorbar(ScalarMappable(SCALE, COLORS), ax=axes, shrink=0.7, extend="both")
    bar.set_label("error of m of the block's own approximation", fontsize=9)
    bar.set_ticks([1e-3, 1e-2, 1e-1, 1.0], labels=["0.1 %", "1 %", "10 %", "100 %"])
    figure.legend(handles=_legend(), loc="outside lower center", ncols=3, fontsize=8)
    return save({"trained_couplings.png": figure, "loop_strength.png": _loops(rows, panels)}, out)


def _loops(rows: Sequence[Row], panels: Sequence[fidelity.Panel]) -> Figure:
    """Errors against the loop strength: does the rule of random couplings hold for trained ones?"""
    kinds = [s for s in (False, True) if any(row.found[0]["symmetric"] == s for row in rows)]
    figure = blank(5.6 * len(kinds), 4.8)
    figure.suptitle("Errors of m against the loop strength k, random and trained couplings")
    axes = figure.subplots(1, len(kinds), squeeze=False, sharex=True, sharey=True)[0]
    for axis, symmetric in zip(axes, kinds, strict=True):
        clean(axis)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(5e-4, 1.0)
        ticks = [0.05, 0.1, 0.2, 0.5]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("loop strength k, from the magnetizations alone", fontsize=9)
        axis.set_title(
            "symmetric couplings, against equilibrium"
            if symmetric
            else "softmax couplings, against parallel dynamics",
            fontsize=10,
        )
        name = "mean_field" if symmetric else "kinetic_mean_field"
        for panel in panels:
            if (panel.family == "attention") == symmetric:
                errors = panel.errors["magnetization"][name]
                seen = errors.seen & errors.solved & panel.trusted
                axis.scatter(
                    panel.loop[seen],
                    errors.size[seen],
                    s=14,
                    color="0.7",
                    label=f"mean field, random attention, D = {panel.dim}",
                    marker="o" if panel.dim < 64 else "s",
                )
        own = [row for row in rows if row.found[0]["symmetric"] == symmetric]
        for look in _LOOKS:
            _scatter(axis, own, *look)
        low, high = axis.get_xlim()
        k = np.geomspace(low, high, 50)
        axis.plot(k, k**2, color="black", linewidth=1.0, label=r"$k^2$")
        axis.set_xlim(low, high)
        axis.legend(fontsize=7, loc="upper left")
    axes[0].set_ylabel("relative error of m", fontsize=9)
    return figure


# Method, task, colour and marker.
_LOOKS = (
    ("mean field", "sentiment", "#56B4E9", "o"),
    ("mean field", "digits", "#0072B2", "o"),
    ("SD0", "sentiment", "#E69F00", "^"),
    ("SD0", "digits", "#D55E00", "^"),
    ("adaptive TAP", "sentiment", "#8FD19E", "v"),
    ("adaptive TAP", "digits", "#009E73", "v"),
)


def _scatter(
    axis: Axes, rows: Sequence[Row], method: str, task: str, color: str, mark: str
) -> None:
    """The errors of one method in the trained blocks of one task, those that are seen."""
    k: list[float] = []
    size: list[float] = []
    for row in rows:
        name = "block" if BLOCKS[row.block] == method else method
        if row.task != task or not row.trained or name not in row.methods:
            continue
        errors = row.errors(name)
        seen = errors.seen & errors.solved
        k += row.values("loop")[seen].tolist()
        size += errors.size[seen].tolist()
    if k:
        label = f"{method}, trained on {task}"
        axis.scatter(k, size, s=18, color=color, marker=mark, label=label, zorder=3)


def _limits(rows: Sequence[Row]) -> tuple[tuple[float, float], tuple[float, float]]:
    k = np.concatenate([row.values("coupling") for row in rows])
    h = np.concatenate([row.values("field") for row in rows])
    return (
        (min(0.4, 0.9 * float(k.min())), min(0.6, 0.9 * float(h.min()))),
        (max(2.0, 1.1 * float(k.max())), max(1.8, 1.1 * float(h.max()))),
    )


def _ticks(low: float, high: float) -> list[float]:
    return [x for x in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0) if low <= x <= high]


def _title(task: str, row: Row) -> str:
    sampled = "equilibrium" if row.found[0]["symmetric"] else "parallel dynamics"
    return f"{task}: {row.block}, D = {row.found[0]['dim']}\n{BLOCKS[row.block]} against {sampled}"


def _background_lines(axis: Axes, row: Row, panels: Sequence[fidelity.Panel]) -> None:
    """1 % and 10 % of the generic map of these couplings, this D and this approximation."""
    family = "attention" if row.found[0]["symmetric"] else "softmax"
    name = "mean_field" if row.found[0]["symmetric"] else "kinetic_mean_field"
    for panel in panels:
        if (panel.family, panel.dim) == (family, row.found[0]["dim"]):
            errors = panel.errors["magnetization"][name]
            draw_contours(axis, panel.coupling, panel.field, errors, panel.trusted, "0.25")


def _points(axis: Axes, row: Row) -> None:
    errors = row.errors("block")
    size = np.clip(np.where(errors.seen, errors.size, errors.bound), 1e-3, 1.0)
    known = errors.solved & np.isfinite(errors.squared)
    k, h = row.values("coupling"), row.values("field")
    colours = colormaps[COLORS](SCALE(size[known]))
    look: dict[str, Any] = {
        "facecolors": colours if row.trained else "none",
        "edgecolors": "black" if row.trained else colours,
        "linewidths": 0.4 if row.trained else 0.8,
        "zorder": 4 if row.trained else 3,
    }
    axis.scatter(k[known], h[known], s=24, marker=_LAYERS[min(row.layer, 2)], **look)
    lost = ~errors.solved
    if lost.any():
        axis.scatter(k[lost], h[lost], marker="x", color="#E377C2", s=26, zorder=5)


def _arrow(axis: Axes, rows: Sequence[Row]) -> None:
    """From where a layer was to where training took it: medians."""
    ends = {
        row.trained: (
            float(np.median(row.values("coupling"))),
            float(np.median(row.values("field"))),
        )
        for row in rows
    }
    if len(ends) == 2:
        arrow = {
            "arrowstyle": "-|>",
            "color": "#D62728",
            "linewidth": 1.8,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        axis.annotate("", xy=ends[True], xytext=ends[False], arrowprops=arrow, zorder=6)


def _legend() -> list[Line2D]:
    blank_line: dict[str, Any] = {"linestyle": "none", "markersize": 6}
    return [
        Line2D(
            [], [], marker="o", markerfacecolor="none", color="0.3", label="initial", **blank_line
        ),
        Line2D([], [], marker="o", color="0.3", label="trained", **blank_line),
        Line2D([], [], marker="o", color="0.6", label="first layer", **blank_line),
        Line2D([], [], marker="^", color="0.6", label="second layer", **blank_line),
        Line2D([], [], color="#D62728", label="medians, before to after training"),
        Line2D([], [], color="0.25", label="random couplings: mean field wrong by 1 %"),
        Line2D([], [], color="0.25", linestyle="dashed", label="the same, by 10 %"),
        Line2D([], [], color="0.4", linestyle=":", label="mean field orders without a field"),
        Line2D([], [], marker="x", color="#E377C2", label="equations not solved", **blank_line),
    ]


# --- the study ----------------------------------------------------------------------------------


class _TrainedCouplings:
    name = "trained_couplings"
    description = "where trained blocks live on the map of errors; needs the models of compare"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--checkpoints",
            type=Path,
            metavar="DIR",
            help="results of compare, with its runs/ (default: results/compare; with --quick, "
            "small models are trained if there are none)",
        )
        parser.add_argument(
            "--inputs", type=positive, metavar="K", help="texts and images (default 8, quick 2)"
        )
        add_jobs(parser)
        add_texts(parser)
        add_digits(parser)

    def run(self, args: argparse.Namespace) -> int:
        start = time.perf_counter()
        plan = QUICK if args.quick else FULL
        plan = replace(plan, inputs=args.inputs or plan.inputs)
        models = self._models(args)
        # The first seeds of every kind.
        kinds: dict[tuple[str, str], list[int]] = {}
        for job, _ in models:
            kinds.setdefault((job.task, job.block), []).append(job.seed)
        models = [
            (job, path)
            for job, path in models
            if job.seed in sorted(kinds[job.task, job.block])[: plan.seeds]
        ]
        datasets = load(tuple(t for t in TASKS if any(j.task == t for j, _ in models)), args)

        measured: list[tuple[Job, int, bool, dict[str, Any]]] = []
        panels: list[fidelity.Panel] = []
        with (
            tqdm(total=self._sweeps(models, plan), unit="sweep", mininterval=0.5) as bar,
            until_interrupted() as interruption,
        ):
            for task, block in kinds:
                bar.set_postfix_str(f"{task}, {block}")
                own = [(j, p) for j, p in models if (j.task, j.block) == (task, block)]
                batch = _inputs(datasets[task], plan.inputs, args.seed)
                layers = list(_layers(own, datasets[task], batch))
                found = measure([layer for *_, layer in layers], plan, args.seed, bar.update)
                measured += [
                    (job, number, trained, entry)
                    for (job, number, trained, _), entry in zip(layers, found, strict=True)
                ]
            bar.set_postfix_str("maps of random couplings")
            panels = _panels(measured, plan, args.seed, bar.update)
        rows = gather(measured)
        content = {
            "inputs": plan.inputs,
            "sampling": {"equilibrium": asdict(plan.equilibrium), "steady": asdict(plan.steady)},
            "models": [{"name": path.stem, "job": job.settings()} for job, path in models],
            "seconds": time.perf_counter() - start,
            "rows": summarize(rows),
        }

        def show(results: dict[str, Any]) -> tuple[str, list[Path]]:
            _write_points(args.out / "points.npz", rows, panels)
            table = render(rows)
            write_text(args.out / "table.txt", table)
            return table, draw(rows, panels, args.out)

        return conclude(self.name, args, interruption, content, show if rows else None)

    def _models(self, args: argparse.Namespace) -> list[tuple[Job, Path]]:
        """Those that are there; with ``--quick``, small ones of its own."""
        directory = args.checkpoints or Path("results") / "compare"
        try:
            return checkpoints(directory)
        except NoCheckpointsError:
            if not args.quick or args.checkpoints is not None:
                raise
        options = {"task": "all", "seeds": 1, "fresh": False, "out": args.out / "models"}
        train(argparse.Namespace(**{**vars(args), **options}), tuple(BLOCKS))
        return checkpoints(args.out / "models")

    def _sweeps(self, models: Sequence[tuple[Job, Path]], plan: Plan) -> int:
        """How many there will be."""
        total = 0
        for block in (block for _, block in {(job.task, job.block) for job, _ in models}):
            total += (plan.equilibrium if block == "steepest_descent" else plan.steady).total
        for symmetric, dim in {(j.block == "steepest_descent", _dimension(j)) for j, _ in models}:
            background = plan.background
            total += (background.sampling if symmetric else background.steady)(dim).total
        return total


def _layers(
    models: Sequence[tuple[Job, Path]], dataset: Dataset, batch: Batch
) -> Iterator[tuple[Job, int, bool, Posed]]:
    """Every layer of every model, before and after training."""
    for job, path in models:
        for trained in (False, True):
            model = restored(job, path, dataset) if trained else job.initial(dataset).eval()
            for number, layer in enumerate(posed(model, batch)):
                yield job, number, trained, layer


def _dimension(job: Job) -> int:
    """Components of a spin."""
    shape = job.shape
    return shape.d_model if job.block == "mean_field_mixed" else shape.d_model // shape.nhead


def _panels(
    measured: Sequence[tuple[Job, int, bool, dict[str, Any]]],
    plan: Plan,
    seed: int,
    moved: Callable[[int], object],
) -> list[fidelity.Panel]:
    """Maps of random couplings for every kind of system that was met."""
    panels = []
    for symmetric, dim in sorted({(f["symmetric"], f["dim"]) for *_, f in measured}):
        if symmetric:
            panels.append(
                fidelity.equilibrium(
                    "attention", dim, plan.background, seed, moved, methods=("mean_field",)
                )
            )
        else:
            panels.append(fidelity.steady_state(dim, plan.background, seed, moved))
    return panels


def _write_points(path: Path, rows: Sequence[Row], panels: Sequence[fidelity.Panel]) -> None:
    """All points of all rows, and the maps of random couplings, in one file."""
    arrays: dict[str, Any] = {}
    for panel in panels:
        arrays |= {f"random/{name}": values for name, values in panel.arrays().items()}
    for row in rows:
        state = "trained" if row.trained else "initial"
        prefix = f"{row.task}/{row.block}/{row.layer + 1}/{state}"
        for name in ("coupling", "field", "loop", "beta", "spins", "head"):
            arrays[f"{prefix}/{name}"] = row.values(name)
        for name in row.methods:
            arrays |= row.errors(name).arrays(f"{prefix}/{name}")
    with replaced(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)


STUDY = _TrainedCouplings()
