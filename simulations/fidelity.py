r"""How wrong each approximation is: maps over coupling strength and field, against Monte Carlo.

Equilibrium, of symmetric couplings: magnetizations, connected correlations and free energies of
mean field, TAP, adaptive TAP and steepest descent. The steady state of parallel dynamics, of
attention whose rows sum to one: magnetizations and correlations over one step of kinetic mean field
and TAP. Systems, axes and errors are those of :mod:`simulations.maps`; see
``docs/studies/fidelity.md``.

Free energies are integrals along the rows of a map. At fixed :math:`\beta h`,

.. math:: \log Z(K) = \sum_i \log z(\beta h_i)
          + \int_0^K \Big\langle \tfrac12\sum_{ij}\hat J_{ij} S_i\cdot S_j \Big\rangle_{K'} dK',

so that the points of a row are the nodes of one integral, which begins at free spins, where value
and slope of the integrand are known exactly.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from torch import Tensor
from tqdm import tqdm

import spinformer as sf
from simulations.figures import blank, clean, save
from simulations.maps import (
    FAMILIES,
    Array,
    Averages,
    Errors,
    Sampling,
    draw_map,
    legend_patches,
    loop_strength,
    mean_field_fluctuations,
    nearness,
    relative_errors,
    sample_equilibrium,
    sample_steady,
)
from simulations.options import positive
from simulations.results import conclude, until_interrupted
from simulations.runs import replaced, write_text
from simulations.tables import align
from spinformer.dynamics.kinetic import KineticMeanField, KineticTAP

__all__ = ["STUDY", "Panel", "Plan", "equilibrium", "loop_rule", "plane", "steady_state"]

# Up to so many components N D, TAP's susceptibility is a matrix; beyond, N D solves a system.
_DENSE_ROWS = 512
# Chains whose split R-hat is above do not agree.
_AGREE = 1.1
# Errors of neglected loops grow at least like k^2, less a fit's error.
_PERTURBATIVE = 1.5
_ITERATION: dict[str, Any] = {
    "solver": "anderson",
    "max_iterations": 600,
    "on_failure": "ignore",
}

EQUILIBRIUM: dict[str, tuple[str, Callable[[], Any]]] = {
    "mean_field": ("mean field", lambda: sf.MeanField(**_ITERATION)),
    "tap": ("TAP", lambda: sf.TAP(**_ITERATION)),
    "adaptive_tap": (
        "adaptive TAP",
        lambda: sf.AdaptiveTAP(max_iterations=200, on_failure="ignore"),
    ),
    "sd0": ("SD0", lambda: sf.SteepestDescent(on_failure="ignore")),
    "sd1": ("SD1", lambda: sf.SteepestDescent(fluctuations=True, on_failure="ignore")),
}
KINETIC: dict[str, tuple[str, Callable[[], Any]]] = {
    "kinetic_mean_field": ("kinetic mean field", lambda: KineticMeanField(**_ITERATION)),
    "kinetic_tap": ("kinetic TAP", lambda: KineticTAP(**_ITERATION)),
}
QUANTITIES = {
    "magnetization": "relative error of the magnetizations",
    "correlations": r"relative error of $\langle S_i\cdot S_j\rangle - m_i\cdot m_j$, $i\neq j$",
    "free_energy": r"relative error of the couplings' part of $\log Z$",
    "delayed": r"relative error of $\langle S_i(t+1)\cdot S_j(t)\rangle - m_i\cdot m_j$",
}
SHORT = {
    "magnetization": "m",
    "correlations": "correlations",
    "free_energy": "log Z",
    "delayed": "delayed correlations",
}


@dataclass(frozen=True)
class Plan:
    """The grid, and how long it is sampled.

    Attributes:
        coupling, field: K and H (:mod:`simulations.maps`).
        num_spins: N.
        dims: D, a column of the figures each.
        families: of symmetric couplings, a set of figures each.
        sampling: for a dimension, in equilibrium.
        steady: for a dimension, of parallel dynamics.
    """

    coupling: tuple[float, ...]
    field: tuple[float, ...]
    num_spins: int
    dims: tuple[int, ...]
    families: tuple[str, ...]
    sampling: Callable[[int], Sampling]
    steady: Callable[[int], Sampling]


def _points(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(float(x) for x in np.geomspace(first, last, count))


def _full_sampling(dim: int) -> Sampling:
    # A sweep of 128 components takes as long as six of three.
    sweeps = 600 if dim <= 3 else 400 if dim <= 16 else 200 if dim <= 64 else 120
    return Sampling(chains=8, sweeps=sweeps, warmup=sweeps // 4, every=2)


def _full_steady(dim: int) -> Sampling:
    sweeps = 1500 if dim <= 3 else 1200 if dim <= 16 else 300
    return Sampling(chains=8, sweeps=sweeps, warmup=min(200, sweeps // 4))


FULL = Plan(
    coupling=_points(0.1, 2.5, 10),
    field=_points(0.1, 3.2, 6),
    num_spins=64,
    dims=(2, 3, 16, 64, 128),
    families=("glass", "attention"),
    sampling=_full_sampling,
    steady=_full_steady,
)
QUICK = Plan(
    coupling=_points(0.15, 2.2, 6),
    field=_points(0.15, 2.5, 4),
    num_spins=32,
    dims=(3, 64),
    families=("glass",),
    sampling=lambda dim: Sampling(8, 300 if dim <= 16 else 100, 60 if dim <= 16 else 30),
    steady=lambda dim: Sampling(8, 800 if dim <= 16 else 200, 60),
)


@dataclass
class Panel:
    """What is known of one family of couplings at one dimension.

    Attributes:
        family, dim: which.
        coupling, field: the axes, K and H.
        trusted: where the chains agree, (K, H).
        loop: how strong a spin's own echo is by mean field's magnetizations, (K, H)
            (:func:`~simulations.maps.loop_strength`).
        nearness: how near mean field is to ordering, (K, H) (:func:`~simulations.maps.nearness`).
        gap: the relative distance of the magnetizations of mean field and TAP, (K, H).
        errors: by quantity and approximation.
        seconds: of sampling.
    """

    family: str
    dim: int
    coupling: Array
    field: Array
    trusted: NDArray[np.bool_]
    loop: Array
    nearness: Array
    gap: Array
    errors: dict[str, dict[str, Errors]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def predicted(self) -> Array:
        """k^2 / (1 - nearness), what mean field's error is about; NaN where it orders by itself."""
        margin = np.where(self.nearness < 1, 1 - self.nearness, np.nan)
        return self.loop**2 / margin

    def arrays(self) -> dict[str, NDArray[Any]]:
        """By name, for a file."""
        prefix = f"{self.family}/D{self.dim}"
        found: dict[str, NDArray[Any]] = {
            f"{prefix}/coupling": self.coupling,
            f"{prefix}/field": self.field,
            f"{prefix}/trusted": self.trusted,
            f"{prefix}/loop": self.loop,
            f"{prefix}/nearness": self.nearness,
            f"{prefix}/gap": self.gap,
        }
        for quantity, methods in self.errors.items():
            for name, errors in methods.items():
                found |= errors.arrays(f"{prefix}/{quantity}/{name}")
        return found


def plane(
    family: str,
    dim: int,
    num_spins: int,
    coupling: Sequence[float],
    field: Sequence[float],
    seed: int,
) -> sf.SpinSystem:
    """Systems (K, H) of one draw of couplings and of fields' directions.

    Fields are Gaussian, of unit variance a component before they are scaled; every point of the
    plane has the same ones.
    """
    generator = torch.Generator().manual_seed(seed)
    couplings = FAMILIES[family].draw(num_spins, generator)
    noise = torch.randn(num_spins, dim, generator=generator, dtype=torch.float64)
    noise = noise / noise.square().sum(-1).mean().div(dim).sqrt()
    largest = torch.linalg.eigvals(couplings).real.amax()
    # R^2 = D, so that K = beta lambda and H = beta h / sqrt(D).
    beta = torch.tensor(coupling, dtype=torch.float64)[:, None] / largest
    strength = torch.tensor(field, dtype=torch.float64)[None, :]
    site = sf.Ising() if dim == 1 else sf.Sphere(dim)
    fields = (strength / beta)[..., None, None] * noise
    return sf.SpinSystem(couplings, fields, beta.expand(len(coupling), len(field)), site)


# --- one dimension ------------------------------------------------------------------------------


@torch.no_grad()
def equilibrium(
    family: str,
    dim: int,
    plan: Plan,
    seed: int,
    moved: Callable[[int], object] | None = None,
    methods: Iterable[str] = tuple(EQUILIBRIUM),
) -> Panel:
    """Errors of the approximations of symmetric couplings."""
    system = plane(family, dim, plan.num_spins, plan.coupling, plan.field, seed)
    start = time.perf_counter()
    truth = sample_equilibrium(system, plan.sampling(dim), seed, moved)
    seconds = time.perf_counter() - start

    pairs = _off_diagonal(_symmetric(truth.connected()))
    logs, floor = interaction_logs(system, truth, torch.tensor(plan.coupling))
    free = system.site.log_partition(system.beta[..., None, None] * system.field).sum(-1)
    found: dict[str, dict[str, Errors]] = {name: {} for name in list(QUANTITIES)[:3]}
    solutions: dict[str, Tensor] = {}
    for name in methods:
        answer = EQUILIBRIUM[name][1]().solve(system)
        m, solved = answer.magnetization, answer.converged
        solutions[name] = m
        found["magnetization"][name] = relative_errors(m, truth.magnetization, solved, 2)
        connected = _connected(name, answer)
        if connected is not None:
            found["correlations"][name] = relative_errors(connected, pairs, solved, 2)
        found["free_energy"][name] = relative_errors(
            answer.log_partition - free, logs, solved, 0, floor
        )
    return _panel(family, dim, plan, system, truth, solutions, found, seconds)


@torch.no_grad()
def steady_state(
    dim: int,
    plan: Plan,
    seed: int,
    moved: Callable[[int], object] | None = None,
    family: str = "softmax",
) -> Panel:
    """Errors of the approximations of parallel dynamics."""
    system = plane(family, dim, plan.num_spins, plan.coupling, plan.field, seed)
    start = time.perf_counter()
    truth = sample_steady(system, plan.steady(dim), seed, moved)
    seconds = time.perf_counter() - start

    delayed = truth.connected()
    found: dict[str, dict[str, Errors]] = {"magnetization": {}, "delayed": {}}
    solutions: dict[str, Tensor] = {}
    for name, (_, make) in KINETIC.items():
        answer = make().steady_state(system)
        m, solved = answer.magnetization, answer.solution.converged
        solutions[name] = m
        found["magnetization"][name] = relative_errors(m, truth.magnetization, solved, 2)
        connected = answer.delayed_correlations(1, connected=True)
        found["delayed"][name] = relative_errors(connected, delayed, solved, 2)
    return _panel(family, dim, plan, system, truth, solutions, found, seconds)


def _panel(
    family: str,
    dim: int,
    plan: Plan,
    system: sf.SpinSystem,
    truth: Averages,
    solutions: dict[str, Tensor],
    found: dict[str, dict[str, Errors]],
    seconds: float,
) -> Panel:
    first, *others = solutions
    naive = solutions[first]
    second = solutions[others[0]] if others else naive
    gap = (naive - second).norm(dim=(-2, -1)) / second.norm(dim=(-2, -1))
    return Panel(
        family,
        dim,
        np.array(plan.coupling),
        np.array(plan.field),
        (truth.scatter() < _AGREE).numpy(),
        loop_strength(system, naive).numpy(),
        nearness(system, naive).numpy(),
        gap.numpy(),
        found,
        seconds,
    )


def _connected(name: str, answer: sf.Equilibrium) -> Tensor | None:
    """Off the diagonal, (..., N, N), or None where it costs too much."""
    m = answer.magnetization
    if name == "mean_field" and answer.system.dim > 1:
        return _off_diagonal(mean_field_fluctuations(answer.system, m))
    if name == "tap" and answer.system.num_spins * answer.system.dim > _DENSE_ROWS:
        return None
    return _off_diagonal(answer.correlations() - m @ m.mT)


def _off_diagonal(matrix: Tensor) -> Tensor:
    return matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def interaction_logs(
    system: sf.SpinSystem, truth: Averages, coupling: Tensor
) -> tuple[Tensor, Tensor]:
    """log Z less that of free spins in the same fields, of every chain (C, K, H), and an error.

    The integrand goes through a cubic spline over K, from its exact value and slope at K = 0; the
    error (K, H) is a quarter of what leaving out every other point changes, where the true one is
    smaller by 2^4 for a smooth integrand.
    """
    scale = system.beta[:, 0] / coupling  # 1 / lambda
    unit = system.couplings.to_dense() * scale[0]
    free = system.beta[..., None, None] * system.field
    m = system.site.mean(free)[0]
    covariance = system.site.covariance(free)[0]
    force = unit @ m
    value = (m * force).sum((-2, -1)) / 2
    # The variance of the integrand under free spins.
    pairs = torch.einsum("ij,hiab,hjba->h", unit.square(), covariance, covariance) / 2
    slope = pairs + torch.einsum("hia,hiab,hib->h", force, covariance, force)
    integrand = truth.interaction.mean(-1) * scale[:, None]
    nodes = np.concatenate([[0.0], coupling.numpy()])
    start = value.expand(len(integrand), 1, -1)
    values = torch.cat([start, integrand], 1).numpy()
    ends = slope.expand(len(integrand), -1).numpy()

    def integral(kept: NDArray[np.int64]) -> Array:
        ends_known = ((1, ends), "not-a-knot")
        spline = CubicSpline(nodes[kept], values[:, kept], axis=1, bc_type=ends_known)
        whole: Array = spline.antiderivative()(nodes[1:])
        return whole

    every = np.arange(len(nodes))
    logs = integral(every)
    # Both ends stay.
    thin = np.unique(np.append(every[::2], every[-1]))
    floor = np.abs(integral(thin) - logs).mean(0) / 4
    return torch.from_numpy(logs), torch.from_numpy(floor)


# --- the rule -----------------------------------------------------------------------------------


def loop_rule(panel: Panel, quantity: str, name: str) -> dict[str, float | None]:
    """How an error grows with the loop strength k, over the cells of a panel.

    Returns:
        ``at_1``, ``at_10``: the largest k up to which at most 5 % of the cells have an error above
        1 % or 10 % (cells that were not solved count, cells whose noise hides the answer do not);
        None if it is below the smallest k. ``reached_1``, ``reached_10``: whether a larger k was
        seen at all. ``power``, ``factor``: error = factor k^power, by least squares of logarithms
        over the cells that are seen with errors below 30 %.
    """
    errors = panel.errors[quantity][name]
    k = panel.loop
    found: dict[str, float | None] = {}
    for percent in (1, 10):
        limit = percent / 100
        above = ~errors.solved | (errors.seen & (errors.size > limit))
        below = errors.solved & (errors.bound <= limit) | (errors.seen & (errors.size <= limit))
        known = panel.trusted & (above | below)
        order = np.argsort(k[known])
        bad = np.cumsum(above[known][order])
        fine = np.flatnonzero(bad <= 0.05 * np.arange(1, len(bad) + 1))
        sorted_k = k[known][order]
        found[f"at_{percent}"] = float(sorted_k[fine[-1]]) if len(fine) else None
        found[f"reached_{percent}"] = float(len(fine) > 0 and fine[-1] == len(bad) - 1)
    fit = panel.trusted & errors.solved & errors.seen & (errors.size < 0.3)
    if fit.sum() >= 4:
        power, intercept = np.polyfit(np.log(k[fit]), np.log(errors.size[fit]), 1)
        found["power"], found["factor"] = float(power), float(np.exp(intercept))
    else:
        found["power"] = found["factor"] = None
    return found


def self_checks(panel: Panel) -> dict[str, dict[str, float]]:
    """Error of the first approximation's m over what a user can know of it: quantiles of cells.

    Over ``"predicted"`` (:attr:`Panel.predicted`), and ``"gap"``, its distance from the second
    approximation; of the cells whose error is seen.
    """
    errors = next(iter(panel.errors["magnetization"].values()))
    found = {}
    for name, known in (("predicted", panel.predicted), ("gap", panel.gap)):
        kept = panel.trusted & errors.seen & errors.solved & (known > 0)
        if kept.sum() < 4:
            continue
        low, middle, high = np.quantile(errors.size[kept] / known[kept], (0.1, 0.5, 0.9))
        found[name] = {"tenth": float(low), "median": float(middle), "ninetieth": float(high)}
    return found


def summarize(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """What ``results.json`` says of every panel; the maps themselves are in ``maps.npz``."""
    rows = []
    for panel in panels:
        methods: dict[str, Any] = {}
        for quantity, entries in panel.errors.items():
            for name, errors in entries.items():
                usable = errors.solved & panel.trusted & np.isfinite(errors.squared)
                methods.setdefault(name, {})[quantity] = {
                    "rule": loop_rule(panel, quantity, name),
                    "solved": float(errors.solved.mean()),
                    "seen": float((errors.seen & errors.solved).mean()),
                    "median_error": float(np.median(errors.size[usable])) if usable.any() else None,
                    "median_noise": (
                        float(np.median(np.sqrt(errors.noise[usable]))) if usable.any() else None
                    ),
                }
        rows.append(
            {
                "family": panel.family,
                "dim": panel.dim,
                "seconds": panel.seconds,
                "trusted": float(panel.trusted.mean()),
                "self_checks": self_checks(panel),
                "methods": methods,
            }
        )
    return rows


# --- pictures and tables ------------------------------------------------------------------------


def _labels(panels: Sequence[Panel]) -> dict[str, str]:
    known = {name: label for name, (label, _) in (EQUILIBRIUM | KINETIC).items()}
    names = dict.fromkeys(n for p in panels for methods in p.errors.values() for n in methods)
    return {name: known[name] for name in names}


def draw(panels: Sequence[Panel], num_spins: int, out: Path) -> list[Path]:
    """A page for each family and quantity; the two quantities of parallel dynamics share one."""
    figures: dict[str, Figure] = {}
    for family in dict.fromkeys(panel.family for panel in panels):
        own = [panel for panel in panels if panel.family == family]
        if family == "softmax":
            figures["parallel.png"] = _page(
                own,
                [(q, n) for q in ("magnetization", "delayed") for n in KINETIC],
                "Parallel dynamics: how wrong is kinetic mean field, and kinetic TAP?\n"
                f"{FAMILIES[family].label}, N = {num_spins}; against sampled dynamics",
            )
            continue
        for quantity in ("magnetization", "correlations", "free_energy"):
            figures[f"{family}_{quantity}.png"] = _page(
                own,
                [(quantity, name) for name in EQUILIBRIUM],
                f"Equilibrium: {QUANTITIES[quantity]}\n"
                f"{FAMILIES[family].label}, N = {num_spins}; against Monte Carlo",
            )
    figures["prediction.png"] = _predictions(panels, num_spins)
    return save(figures, out)


_LOOKS: dict[str, tuple[str, str]] = {
    "mean_field": ("#0072B2", "s"),
    "tap": ("#56B4E9", "D"),
    "adaptive_tap": ("#009E73", "v"),
    "sd0": ("#D55E00", "^"),
    "sd1": ("#000000", "o"),
    "kinetic_mean_field": ("#0072B2", "s"),
    "kinetic_tap": ("#56B4E9", "D"),
}


def _predictions(panels: Sequence[Panel], num_spins: int) -> Figure:
    """All errors of m that are seen, over one number that a user can know."""
    families = list(dict.fromkeys(panel.family for panel in panels))
    dims = list(dict.fromkeys(panel.dim for panel in panels))
    figure = blank(1.2 + 2.6 * max(len(dims), 2), 1.5 + 2.5 * len(families))
    figure.suptitle(
        "Errors of the magnetizations over what mean field says its own error is\n"
        f"every cell of the maps whose error is seen, N = {num_spins}",
        fontsize=11,
    )
    axes = figure.subplots(len(families), len(dims), squeeze=False, sharex=True, sharey=True)
    labels = _labels(panels)
    handles: dict[str, Any] = {}
    for panel in panels:
        axis = axes[families.index(panel.family), dims.index(panel.dim)]
        for name, errors in panel.errors["magnetization"].items():
            seen = errors.seen & errors.solved & panel.trusted & np.isfinite(panel.predicted)
            colour, mark = _LOOKS[name]
            points = axis.scatter(
                panel.predicted[seen], errors.size[seen], s=12, color=colour, marker=mark
            )
            handles.setdefault(labels[name].removeprefix("kinetic "), points)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(3e-4, 3)
        axis.set_ylim(3e-4, 3)
        (line,) = axis.plot([3e-4, 3], [3e-4, 3], color="0.3", linewidth=1.0)
        handles.setdefault("as predicted", line)
        clean(axis)
        if panel.family == families[0]:
            axis.set_title(f"D = {panel.dim}", fontsize=10)
        if panel.dim == dims[0]:
            axis.set_ylabel(f"{FAMILIES[panel.family].label}\nrelative error of m", fontsize=8)
        if panel.family == families[-1]:
            axis.set_xlabel(r"$k^2/(1-\Lambda)$", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _page(panels: Sequence[Panel], rows: Sequence[tuple[str, str]], title: str) -> Figure:
    labels = {name: label for name, (label, _) in (EQUILIBRIUM | KINETIC).items()}
    several = len({quantity for quantity, _ in rows}) > 1
    figure = blank(1.6 + 2.3 * max(len(panels), 2), 1.5 + 1.9 * len(rows))
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(len(rows), len(panels), squeeze=False, sharex=True, sharey=True)
    image = None
    for row, (quantity, name) in enumerate(rows):
        for column, panel in enumerate(panels):
            axis = axes[row, column]
            errors = panel.errors.get(quantity, {}).get(name)
            if errors is None:
                axis.set_facecolor("0.95")
                axis.text(
                    0.5,
                    0.5,
                    "not computed:\n$(ND)^2$ responses",
                    ha="center",
                    va="center",
                    transform=axis.transAxes,
                    fontsize=8,
                    color="0.4",
                )
            else:
                image = draw_map(axis, panel.coupling, panel.field, errors, panel.trusted)
            axis.axvline(1.0, color="white", linewidth=0.8, linestyle=":")
            if row == 0:
                axis.set_title(f"D = {panel.dim}", fontsize=10)
            if row == len(rows) - 1:
                axis.set_xlabel(r"coupling $K = \beta\lambda R^2/D$", fontsize=8)
            if column == 0:
                name_of_row = f"{labels[name]}\n({SHORT[quantity]})" if several else labels[name]
                axis.set_ylabel(f"{name_of_row}\n" + r"field $H=\beta h R/D$", fontsize=8)
    if image is not None:
        bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=30, extend="both")
        bar.set_label("relative error (lines: 1 % solid, 10 % dashed)", fontsize=9)
        bar.set_ticks([1e-3, 1e-2, 1e-1, 1.0], labels=["0.1 %", "1 %", "10 %", "100 %"])
    figure.legend(handles=legend_patches(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def render(panels: Sequence[Panel]) -> str:
    """The rule of thumb as tables: up to which loop strength is an approximation right?"""
    labels = _labels(panels)
    parts = []
    for family in dict.fromkeys(panel.family for panel in panels):
        own = [panel for panel in panels if panel.family == family]
        for quantity in QUANTITIES:
            names = [n for n in labels if any(n in p.errors.get(quantity, {}) for p in own)]
            if not names:
                continue
            rows = [
                (
                    labels[name],
                    *(_cell(panel, quantity, name) for panel in own),
                )
                for name in names
            ]
            header = (
                f"{FAMILIES[family].label}: {SHORT[quantity]}",
                *(f"D = {panel.dim}" for panel in own),
            )
            parts.append(align(header, rows))
    for known, title in (
        ("predicted", "error of mean field's m over k^2 / (1 - L)"),
        ("gap", "error of mean field's m over its distance from TAP's"),
    ):
        checks = [
            (
                f"{FAMILIES[panel.family].label}, D = {panel.dim}",
                *(f"{check[known][key]:.2f}" for key in ("tenth", "median", "ninetieth")),
            )
            for panel in panels
            if known in (check := self_checks(panel))
        ]
        parts.append(align((title, "10 %", "median", "90 %"), checks))
    text = "\n\n".join(parts).replace("$", "").replace(r"J_{ij}=J_{ji}", "J_ij = J_ji")
    return f"""{text}

Cells: k up to which the error stays below 1 % / 10 %; where it is a correction, error ~ a k^p.
k^2 is the mean over i of sum_j (beta J_ij)^2 c_i c_j, with c = (R^2 - m^2) / D; L is the
largest eigenvalue of beta c_i J_ij.
'>': nothing larger was seen; '-': never."""


def _cell(panel: Panel, quantity: str, name: str) -> str:
    if name not in panel.errors.get(quantity, {}):
        return "not computed"
    rule = loop_rule(panel, quantity, name)
    bounds = []
    for percent in (1, 10):
        value = rule[f"at_{percent}"]
        sign = ">" if rule[f"reached_{percent}"] else ""
        bounds.append("-" if value is None else f"{sign}{value:.2g}")
    power = rule["power"]
    law = "" if power is None or power < _PERTURBATIVE else f" ({rule['factor']:.2g} k^{power:.1f})"
    return " / ".join(bounds) + law


# --- the study ----------------------------------------------------------------------------------


class _Fidelity:
    name = "fidelity"
    description = "maps of every approximation's error over coupling, field and D"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--dims", type=positive, nargs="+", metavar="D", help="components of the spins"
        )
        parser.add_argument("--spins", type=positive, metavar="N", help="spins of a system")
        parser.add_argument(
            "--couplings",
            nargs="+",
            choices=[name for name in FAMILIES if name != "softmax"],
            metavar="KIND",
            help="symmetric couplings: glass, attention, ferromagnet (default: glass attention, "
            "with --quick glass)",
        )

    def run(self, args: argparse.Namespace) -> int:
        start = time.perf_counter()
        plan = QUICK if args.quick else FULL
        plan = replace(
            plan,
            dims=tuple(dict.fromkeys(args.dims)) if args.dims else plan.dims,
            num_spins=args.spins or plan.num_spins,
            families=tuple(dict.fromkeys(args.couplings)) if args.couplings else plan.families,
        )
        panels: list[Panel] = []
        total = sum(
            len(plan.families) * plan.sampling(dim).total + plan.steady(dim).total
            for dim in plan.dims
        )
        with (
            tqdm(total=total, unit="sweep", smoothing=0.05, mininterval=0.5) as bar,
            until_interrupted() as interruption,
        ):
            # The quickest first: an interrupted study has all families of some dimensions.
            for dim in plan.dims:
                for family in plan.families:
                    bar.set_postfix_str(f"{family}, D = {dim}")
                    panels.append(equilibrium(family, dim, plan, args.seed, bar.update))
                bar.set_postfix_str(f"parallel dynamics, D = {dim}")
                panels.append(steady_state(dim, plan, args.seed, bar.update))
        content = {
            "num_spins": plan.num_spins,
            "coupling": list(plan.coupling),
            "field": list(plan.field),
            "sampling": {
                str(dim): {
                    "equilibrium": vars(plan.sampling(dim)),
                    "steady": vars(plan.steady(dim)),
                }
                for dim in plan.dims
            },
            "seconds": time.perf_counter() - start,
            "panels": summarize(panels),
        }

        def show(results: dict[str, Any]) -> tuple[str, list[Path]]:
            write_maps(args.out / "maps.npz", panels)
            table = render(panels)
            write_text(args.out / "table.txt", table)
            return table, draw(panels, plan.num_spins, args.out)

        return conclude(self.name, args, interruption, content, show if panels else None)


def write_maps(path: Path, panels: Sequence[Panel]) -> None:
    """All maps in one file."""
    arrays: dict[str, Any] = {}
    for panel in panels:
        arrays |= panel.arrays()
    with replaced(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)


STUDY = _Fidelity()
