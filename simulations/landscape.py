r"""The function that steepest descent minimizes, and the way of Newton's method down it.

The partition function of N spins of D components is an integral over auxiliary variables t whose
saddle point is the minimum, over real t, of

.. math::
    \varphi(t) = \frac1{2N} \Big[\sum_i (\beta t_i - 1)
        - \log\det \beta V + \beta \operatorname{tr} g^{\mathsf T} V^{-1} g\Big],
    \qquad V = \operatorname{diag}(t) - J \succ 0

for spins of length sqrt(D) in fields of length :math:`\sqrt D\, |g_i|`. At the minimum it is
:math:`\log Z_{\rm SD0} / (N D)`. It is infinite on the border of the cone of positive-definite V:
with one t for all sites at the largest eigenvalue of J; with two sites on the hyperbola
:math:`t_1 t_2 = J_{12}^2`.

* ``shared``: a ring of eight spins, one t; without a field at several temperatures, and at
  :math:`\beta = 1` in uniform fields;
* ``sites``: two spins with :math:`J = 1` in fields at a right angle, one t each, warm and cold.

Newton's path is that of the library's solver, asked to stop after 0, 1, 2, ... steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patheffects import withStroke
from torch import Tensor
from tqdm import tqdm

import spinformer as sf
from simulations.figures import blank, clean, save
from simulations.results import conclude, until_interrupted
from simulations.tables import align
from spinformer.solve.newton import minimize_in_cone
from spinformer.solve.secular import minimize_shared
from spinformer.solve.solution import Solution

RING = 8
# (beta, field) of the curves with one t for all: a panel each.
CURVES: dict[str, tuple[tuple[float, float], ...]] = {
    "without a field": ((0.3, 0.0), (1.0, 0.0), (3.0, 0.0)),
    r"in a uniform field $g$ at $\beta = 1$": ((1.0, 0.0), (1.0, 0.3), (1.0, 1.0)),
}
# Fields on the two sites, at a right angle, and where a second path begins.
PAIR_FIELDS = (0.2, 1.0)
PAIR_BETAS = (1.0, 10.0)
FAR = (3.2, 0.8)
_COLORS = ("#0072B2", "#009E73", "#D55E00")
_MOST_STEPS = 30
# Steps nearer to the minimum than this are not numbered: they lie on top of each other.
_APART = 0.004


def ring() -> Tensor:
    """J of the ring."""
    return sf.couplings.ring(RING, dtype=torch.float64).to_dense()


def pair() -> tuple[Tensor, Tensor]:
    """J of the two spins and their fields g (2, 2)."""
    return 1 - torch.eye(2, dtype=torch.float64), torch.diag(
        torch.tensor(PAIR_FIELDS, dtype=torch.float64)
    )


def uniform(strength: float) -> Tensor:
    """The same field on every site of the ring, (N, 1)."""
    return torch.full((RING, 1), strength, dtype=torch.float64)


def phi(couplings: Tensor, field: Tensor, beta: float, t: Tensor) -> Tensor:
    """The function at t (..., N); infinity outside the cone."""
    v = torch.diag_embed(t) - couplings
    factor, info = torch.linalg.cholesky_ex(v)
    half = torch.linalg.solve_triangular(factor, field.expand(*v.shape[:-1], -1), upper=False)
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    n = t.shape[-1]
    log_det = log_det + n * torch.log(torch.tensor(beta, dtype=t.dtype))
    value = ((beta * t - 1).sum(-1) - log_det + beta * half.square().sum((-2, -1))) / (2 * n)
    return torch.where(info == 0, value, torch.inf)


def newton_path(solve: Callable[[int], Solution]) -> list[tuple[Tensor, float]]:
    """Where ``solve(max_iterations)`` is after 0, 1, 2, ... steps, and the residual there."""
    path = []
    for steps in range(_MOST_STEPS):
        found = solve(steps)
        path.append((found.value, float(found.residual)))
        if bool(found.converged):
            break
    return path


def _record(path: list[tuple[Tensor, float]], height: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    points = [torch.atleast_1d(value) for value, _ in path]
    return {
        "t": [point.tolist() for point in points],
        "residual": [residual for _, residual in path],
        "phi": [float(height(point)) for point in points],
    }


def shared(beta: float, strength: float, points: int) -> dict[str, Any]:
    """A curve of the ring, and the path on it."""
    couplings, field = ring(), uniform(strength)
    values, vectors = torch.linalg.eigh(couplings)

    def height(t: Tensor) -> Tensor:
        return phi(couplings, field, beta, t[..., None].expand(*t.shape, RING))

    def solve(steps: int) -> Solution:
        b = beta * field
        return minimize_shared(beta * values, vectors, b, max_iterations=steps).solution

    path = [(tau / beta, residual) for tau, residual in newton_path(solve)]
    # Denser towards the pole.
    gaps = torch.logspace(-4, 1, points, dtype=torch.float64)
    t = float(values[-1]) + gaps
    return {
        "beta": beta,
        "field": strength,
        "pole": float(values[-1]),
        "curve": {"t": t.tolist(), "phi": height(t).tolist()},
        "path": _record(path, height),
    }


def sites(beta: float, points: int) -> dict[str, Any]:
    """The map of the pair, and the paths from the solver's own start and from far away."""
    couplings, field = pair()

    def height(t: Tensor) -> Tensor:
        return phi(couplings, field, beta, t)

    def path(start: tuple[float, float] | None) -> dict[str, Any]:
        initial = None if start is None else beta * torch.tensor(start, dtype=torch.float64)

        def solve(steps: int) -> Solution:
            return minimize_in_cone(
                beta * couplings, beta * field, initial=initial, max_iterations=steps
            ).solution

        found = [(tau / beta, residual) for tau, residual in newton_path(solve)]
        return _record(found, height)

    axis = torch.linspace(0.02, 3.6, points, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    heights = height(grid)
    return {
        "beta": beta,
        "axis": axis.tolist(),
        # JSON has no infinity: outside the cone there is nothing.
        "phi": [[h if np.isfinite(h) else None for h in row] for row in heights.tolist()],
        "paths": {"own start": path(None), "far start": path(FAR)},
    }


def draw(results: dict[str, Any], out: Path) -> Path:
    """Curves above, maps below."""
    figure = blank(11.5, 10.0)
    axes = figure.subplots(2, 2)
    figure.suptitle(
        "What steepest descent minimizes: a convex function with a wall around it, and Newton's "
        "way down\n"
        r"(numbers: steps of the solver; star: the minimum, of height $\log Z / N D$)",
        fontsize=12,
    )
    for axis, (title, curves) in zip(axes[0], results["shared"].items(), strict=False):
        _draw_curves(axis, title, curves)
    for axis, entry in zip(axes[1], results["sites"], strict=False):
        _draw_map(figure, axis, entry)
    for axis in axes[1, len(results["sites"]) :]:
        axis.set_visible(False)
    (path,) = save({"landscape.png": figure}, out)
    return path


def _draw_curves(axis: Axes, title: str, curves: list[dict[str, Any]]) -> None:
    clean(axis)
    axis.set_title(f"one $t$ for all, ring of {RING}, {title}", fontsize=10)
    varied = len({curve["beta"] for curve in curves}) > 1
    for curve, color in zip(curves, _COLORS, strict=False):
        path = curve["path"]
        lowest = path["phi"][-1]
        name = rf"$\beta$ = {curve['beta']:g}" if varied else f"$g$ = {curve['field']:g}"
        above = np.array(curve["curve"]["phi"]) - lowest
        label = rf"{name}, $\varphi_{{\min}}$ = {lowest:.3f}"
        axis.plot(curve["curve"]["t"], above, color=color, label=label)
        t, heights = [point[0] for point in path["t"]], np.array(path["phi"]) - lowest
        axis.plot(t, heights, "o", color=color, markersize=4)
        for step, (x, y) in enumerate(zip(t, heights, strict=True)):
            if y > _APART:
                _number(axis, step, (x, y), (5, 4), color)
        axis.plot(t[-1], 0, "*", color=color, markersize=13, markeredgecolor="white", zorder=5)
    pole = curves[0]["pole"]
    axis.axvline(pole, color="0.3", linestyle="--", linewidth=1)
    axis.axvspan(0, pole, color="0.92", zorder=0)
    axis.text(
        pole - 0.05, 0.15, "pole: largest eigenvalue of $J$", rotation=90, ha="right",
        va="center", fontsize=8, color="0.3",
    )  # fmt: skip
    last = max(point[0] for curve in curves for point in curve["path"]["t"])
    axis.set_xlim(pole - 0.35, last + 0.5)
    axis.set_ylim(-0.02, 0.3)
    axis.set_xlabel("$t / J$", fontsize=9)
    axis.set_ylabel(r"$\varphi(t) - \varphi_{\min}$", fontsize=9)
    axis.legend(fontsize=9, loc="upper right", framealpha=1)


def _number(
    axis: Axes, step: int, point: tuple[float, float], shift: tuple[int, int], color: str
) -> None:
    """The number of a step beside its point, readable on any ground."""
    axis.annotate(
        str(step), point, xytext=shift, textcoords="offset points", fontsize=9, color=color,
        zorder=6, path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )  # fmt: skip


def _draw_map(figure: Any, axis: Axes, entry: dict[str, Any]) -> None:
    own, far = entry["paths"]["own start"], entry["paths"]["far start"]
    lowest = own["phi"][-1]
    above = np.array(entry["phi"], dtype=float) - lowest
    t = np.array(entry["axis"])
    levels = [3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]
    shown = np.ma.masked_invalid(np.clip(above, levels[0] / 2, None))
    colors = axis.contourf(
        t, t, shown, levels=levels, cmap="YlGnBu_r", norm=LogNorm(levels[0], levels[-1]),
        extend="both",
    )  # fmt: skip
    axis.contour(t, t, shown, levels=levels, colors="white", linewidths=0.6)
    bar = figure.colorbar(colors, ax=axis, ticks=levels, format="%g")
    bar.set_label(r"$\varphi - \varphi_{\min}$", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    inside = np.linspace(1 / t[-1], t[-1], 400)
    axis.fill_between(inside, 0, 1 / inside, color="0.85", zorder=2)
    axis.fill_betweenx([0, t[-1]], 0, 1 / t[-1], color="0.85", zorder=2)
    axis.plot(inside, 1 / inside, color="0.2", linewidth=1.4, zorder=3)
    axis.text(
        0.08, 0.1, "$V$ is not positive definite:\nwall at $t_1 t_2 = J^2$", fontsize=8,
        color="0.25", zorder=4,
    )  # fmt: skip
    for (label, path), color, shift in zip(
        (("Newton from the solver's start", own), ("Newton from far away", far)),
        ("#D55E00", "#7F0000"),
        ((6, -11), (6, 3)),
        strict=True,
    ):
        x, y = np.array(path["t"]).T
        axis.plot(x, y, "o-", color=color, markersize=4.5, linewidth=1.6, label=label, zorder=4)
        for step, height in enumerate(path["phi"]):
            if height - lowest > _APART:
                _number(axis, step, (x[step], y[step]), shift, color)
    axis.plot(*own["t"][-1], "*", color="white", markersize=13, markeredgecolor="black", zorder=5)
    axis.set_title(
        rf"one $t$ a site, two spins, $\beta J$ = {entry['beta']:g}, $g$ = "
        f"{PAIR_FIELDS[0]:g} and {PAIR_FIELDS[1]:g}",
        fontsize=10,
    )
    axis.set_xlim(0, t[-1])
    axis.set_ylim(0, t[-1])
    axis.set_aspect("equal")
    axis.tick_params(labelsize=8)
    axis.set_xlabel("$t_1 / J$", fontsize=9)
    axis.set_ylabel("$t_2 / J$", fontsize=9)
    axis.legend(fontsize=8, loc="upper right", framealpha=1)


def render(results: dict[str, Any]) -> str:
    """The steps of every path."""
    rows = []
    for curves in results["shared"].values():
        for curve in curves:
            rows += _rows(f"ring, beta {curve['beta']:g}, g {curve['field']:g}", curve["path"])
    for entry in results["sites"]:
        for start, path in entry["paths"].items():
            rows += _rows(f"pair, beta {entry['beta']:g}, {start}", path)
    return align(("path", "step", "t / J", "residual", "phi - lowest"), rows)


def _rows(name: str, path: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name if step == 0 else "",
            str(step),
            ", ".join(f"{x:.6f}" for x in t),
            f"{residual:.1e}",
            f"{height - path['phi'][-1]:.1e}",
        )
        for step, (t, residual, height) in enumerate(
            zip(path["t"], path["residual"], path["phi"], strict=True)
        )
    ]


class _Landscape:
    name = "landscape"
    description = "the function that steepest descent minimizes, with Newton's path on it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        points = 80 if args.quick else 300
        curves: dict[str, list[dict[str, Any]]] = {}
        maps: list[dict[str, Any]] = []
        with until_interrupted() as interruption:
            for title, cases in tqdm(CURVES.items(), desc="curves", unit="panel"):
                curves[title] = [shared(beta, strength, points) for beta, strength in cases]
            for beta in tqdm(PAIR_BETAS, desc="maps", unit="panel"):
                maps.append(sites(beta, points))
        content = {"shared": curves, "sites": maps}
        show = (lambda results: (render(results), [draw(results, args.out)])) if curves else None
        return conclude(self.name, args, interruption, content, show)


STUDY = _Landscape()
